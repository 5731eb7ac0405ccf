"""Memory needs other than the denoiser's: encoder weights and passes, caches, staged files. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.data.captions import most_epochs, orders_wanted
from gracetune.memory.placement import hints_of
from gracetune.models.footprint import AudioLatents, Footprint, FootprintEncoder, SampleShape
from gracetune.planning.dataset_facts import DatasetFacts
from gracetune.planning.demand import Need, Phase, Role
from gracetune.units import GIB, MIB

CACHE_BYTES = 2
"""Latents and embeddings are cached in 16 bits."""
RING_DEPTH = 3
"""Batches in flight between the loader and the step."""
PROCESS_BYTES = 4 * GIB
"""Host memory of Python, torch and the CUDA driver in one training process."""
TILE = 512
"""Side in pixels of the tiles that a VAE processes with `vae_tiling`."""
_AFTER_TEXT: tuple[Phase, ...] = ("encode latents", "train", "sample")


def sample_bytes(footprint: Footprint, shape: SampleShape) -> int:
    """Bytes of one sample of a batch: latents and text embedding."""
    return CACHE_BYTES * (footprint.latents.elements(shape) + footprint.text.cached_elements)


def codec_bytes(footprint: Footprint, shape: SampleShape, *, decode: bool, tiled: bool) -> int:
    """Peak bytes of a VAE pass over one sample, without the weights."""
    codec, latents = footprint.codec, footprint.latents
    if isinstance(latents, AudioLatents):
        points, planes = int(shape.seconds * latents.sample_rate), 1
    else:
        points, planes = shape.pixels, shape.frames
        if tiled:
            points = min(points, TILE * TILE)
    if planes == 1:
        elements = codec.decode if decode else codec.encode
    else:
        # and the pixels of all frames (3 channels)
        elements = (codec.decode_video if decode else codec.encode_video) + 3 * planes
    return int(points * elements * codec.element_bytes)


def encoder_needs(
    config: RunConfig, footprint: Footprint, shapes: Mapping[str, SampleShape], *, sampling: bool
) -> Iterator[Need]:
    after: tuple[Phase, ...] = _AFTER_TEXT if sampling else _AFTER_TEXT[:2]
    live, refreshed = _uncached_datasets(config), refreshed_datasets(config)

    def works_while_sampling(encoder: FootprintEncoder) -> bool:
        return sampling and encoder.works_while_sampling

    for encoder in footprint.encoders:
        text = encoder.kind == "text"
        first: Phase = "encode text" if text else "encode latents"
        # A text encoder that reads reference images runs again whenever those images are encoded again.
        reencoded = [*live, *refreshed]
        again = encoder.sees_references and any(one.has_references for one in reencoded) if text else bool(reencoded)
        busy: tuple[Phase, ...] = (
            first,
            *(("train",) if again else ()),
            *(("sample",) if works_while_sampling(encoder) else ()),
        )
        idle = tuple(phase for phase in (after if text else after[1:]) if phase not in busy)
        why = f"{encoder.parameters / 1e9:.2f} G parameters, bf16" + (_when_encoding(live, refreshed) if again else "")
        yield Need(encoder.name, "encoder weights", 2 * encoder.parameters, busy, why, idle=idle, parkable=True)
    prompt_bytes = [encoder.tokens * encoder.working for encoder in footprint.encoders if works_while_sampling(encoder)]
    if prompt_bytes:
        # The prompt and the negative prompt (factor 2). The encoders run one after the other.
        yield Need(
            "encoding the prompts", "workspace", 2 * max(prompt_bytes), ("sample",), "for every generated sample"
        )
    yield from _pass_workspaces(config, footprint, shapes)
    wanted: dict[Phase, bool] = {"encode latents": True, "train": bool(live or refreshed), "sample": sampling}
    needed = tuple(phase for phase, is_needed in wanted.items() if is_needed)
    idle = tuple(phase for phase in after if phase not in needed)
    codec = footprint.codec
    precision = "fp32" if codec.element_bytes == 4 else "bf16"
    why = f"{codec.parameters / 1e6:.0f} M parameters, {precision}" + _when_encoding(live, refreshed)
    size = codec.element_bytes * codec.parameters
    yield Need(codec.name, "encoder weights", size, needed, why, idle=idle, parkable=True)


def _enabled(config: RunConfig) -> list[Dataset]:
    return [dataset for dataset in config.datasets if not dataset.disabled]


def _uncached_datasets(config: RunConfig) -> list[Dataset]:
    """Datasets without a latent cache, which are encoded in every step."""
    return [dataset for dataset in _enabled(config) if not _has_latent_cache(config, dataset)]


def refreshed_datasets(config: RunConfig) -> list[Dataset]:
    """Datasets whose next epoch is encoded while one is trained."""
    return [dataset for dataset in _enabled(config) if _is_refreshed(dataset)]


def _when_encoding(live: list[Dataset], refreshed: list[Dataset]) -> str:
    if live:
        return "; encodes in every step"
    return "; encodes the next epoch while one is trained" if refreshed else ""


def _pass_workspaces(config: RunConfig, footprint: Footprint, shapes: Mapping[str, SampleShape]) -> Iterator[Need]:
    batch = config.cache.text_encoder_batch_size
    text = max(batch * encoder.tokens * encoder.working for encoder in footprint.encoders if encoder.kind == "text")
    yield Need("text encoding", "workspace", text, ("encode text",), f"a batch of {batch} captions")
    found = [shapes[dataset.id] for dataset in _uncached_datasets(config) if dataset.id in shapes]
    live = [codec_bytes(footprint, shape, decode=False, tiled=config.model.vae_tiling) for shape in found]
    if live:
        why = "one sample at a time: a dataset without a latent cache"
        yield Need("encoding in the step", "workspace", max(live), ("train",), why)


def data_needs(
    config: RunConfig, footprint: Footprint, facts: tuple[DatasetFacts, ...], shapes: Mapping[str, SampleShape]
) -> Iterator[Need]:
    yield Need("process", "process", PROCESS_BYTES, ("encode text", *_AFTER_TEXT), "Python, torch, CUDA", home="host")
    found = {fact.id: fact for fact in facts}
    datasets = [dataset for dataset in config.datasets if dataset.id in found and dataset.id in shapes]
    yield from _latent_caches(config, footprint, datasets, found, shapes)
    yield from _text_cache(config, footprint, datasets, found)
    # Datasets with the same folder and compression share one staged copy, as `data.backends.pool` does it.
    staged: dict[tuple[str, str], list[Dataset]] = {}
    for dataset in datasets:
        if dataset.is_staged:
            staged.setdefault((dataset.path, dataset.in_memory.compression), []).append(dataset)
    yield from (_staging_need(sharing, found) for sharing in staged.values())


def _latent_caches(
    config: RunConfig,
    footprint: Footprint,
    datasets: list[Dataset],
    facts: Mapping[str, DatasetFacts],
    shapes: Mapping[str, SampleShape],
) -> Iterator[Need]:
    for dataset in datasets:
        if not _has_latent_cache(config, dataset):
            continue
        each = CACHE_BYTES * footprint.latents.elements(shapes[dataset.id])
        variants = _variants_per_item(dataset)
        count = facts[dataset.id].samples * variants
        kinds = f", {variants} variants of each sample" if variants > 1 else ""
        why = f"{count} of {_small_size(each)}, 16-bit{kinds}"
        kind = dataset.cache_latents or config.cache.vae_cache_type
        managed = _is_managed(config.cache.vae_cache_type, config)
        yield from _cache(
            f"latents of {dataset.id}", "latent cache", kind, count * each, why, config, _AFTER_TEXT, managed
        )


def _text_cache(
    config: RunConfig, footprint: Footprint, datasets: list[Dataset], facts: Mapping[str, DatasetFacts]
) -> Iterator[Need]:
    captions = sum(
        facts[dataset.id].samples * _tag_orders(config, dataset, facts[dataset.id].samples)
        for dataset in datasets
        if dataset.dataset_type != "conditioning"
    )
    prompts = 2 * len(config.validation.prompts)
    each = CACHE_BYTES * footprint.text.cached_elements
    why = f"{captions} and {prompts} prompts of {_small_size(each)}, 16-bit"
    total = (captions + prompts) * each
    phases: tuple[Phase, ...] = ("encode text", *_AFTER_TEXT)
    kind = config.cache.text_cache_type
    yield from _cache("captions", "text cache", kind, total, why, config, phases, _is_managed(kind, config))


def _tag_orders(config: RunConfig, dataset: Dataset, samples: int) -> int:
    """How many tag orders of each caption are cached."""
    visits = 1 + dataset.repeats
    return orders_wanted(dataset.captions, visits * most_epochs(config.training, dataset, visits * samples))


def _is_managed(kind: str, config: RunConfig) -> bool:
    """Managed caches need unified-memory hints (docs/memory.md)."""
    return kind == "unified_memory" and hints_of(config).on


def _cache(
    name: str, role: Role, kind: str, size: int, why: str, config: RunConfig, phases: tuple[Phase, ...], managed: bool
) -> Iterator[Need]:
    if kind in ("memory", "unified_memory"):
        requested = managed and hints_of(config).requested
        yield Need(name, role, size, phases, why, home="host", managed=managed, managed_requested=requested)
    # Encoded entries are always written to disk too, so that a crash does not lose them.
    until = "" if config.cache.persistent_cache else "; removed at the end"
    yield Need(f"{name} on disk", role, size, phases, why + until, home="disk")


def _has_latent_cache(config: RunConfig, dataset: Dataset) -> bool:
    changing = bool(dataset.augmentation.transforms) and dataset.augmentation.cache_mode == "disable_cache"
    return dataset.cache_latents != "none" and not changing


def _is_refreshed(dataset: Dataset) -> bool:
    """Whether the next epoch's latents are encoded during an epoch, as `data.index.freshness` decides it."""
    mode = dataset.augmentation.cache_mode
    return dataset.cache_latents != "none" and mode == "refresh_each_epoch"


def _variants_per_item(dataset: Dataset) -> int:
    augmentation = dataset.augmentation
    flips = (2 if augmentation.flip_x else 1) * (2 if augmentation.flip_y else 1)
    # While the next epoch's variants are encoded, those of the current epoch are still in use.
    return flips * (2 if _is_refreshed(dataset) else 1)


def _staging_need(datasets: list[Dataset], facts: Mapping[str, DatasetFacts]) -> Need:
    limit = min((one.in_memory.memory_limit_gb for one in datasets if one.in_memory.memory_limit_gb), default=None)
    # The datasets share one folder, so the largest selection is about the size of the copy.
    size = max(facts[one.id].file_bytes for one in datasets)
    why = "as large as the files: media do not compress"
    if limit is not None and size > limit * 1e9:
        why += f"; MORE THAN memory_limit_gb {limit:g}: staging will fail"
    phases: tuple[Phase, ...] = ("encode text", *_AFTER_TEXT)
    return Need(f"files of {', '.join(one.id for one in datasets)}", "staged data", size, phases, why, home="host")


def _small_size(size: int) -> str:
    """A size below a few MiB as text."""
    return f"{size / MIB:.2f} MiB" if size >= MIB // 10 else f"{size / 1024:.1f} KiB"

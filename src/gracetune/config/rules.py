"""Rules that involve several values of a `RunConfig`. Each is a small pure function that yields what it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from gracetune.config.dataset_config import ACCESS_PROTOCOLS, BACKEND_SECTIONS, Dataset
from gracetune.config.draft import Path, describe
from gracetune.config.families import FAMILIES, Flavour, find_flavour, flavours, names_of
from gracetune.config.limits import LARGEST_RANK, MOST_MEGAPIXELS, MOST_PROBLEMS
from gracetune.config.registry import (
    FULL_FINETUNE,
    checked_record,
    is_installed,
    kind_of_algo,
    reads_key,
    validated,
)
from gracetune.config.run_config import RunConfig
from gracetune.config.spelling import misspelt
from gracetune.errors import ConfigError
from gracetune.redaction import HIDDEN, redact_webhook


@dataclass(frozen=True)
class BrokenRule:
    """A rule that is violated, and the value to change."""

    path: Path
    found: str
    expected: str
    hint: str
    because: tuple[Path, ...] = ()
    """Other values that the rule depends on. It is not reported if one of them is a placeholder."""


_MODEL: tuple[Path, ...] = (("model", "family"), ("model", "flavour"), ("model", "path"))
"""The values that decide `known_flavour`: `because` of the rules that depend on it."""


def broken_rules(config: RunConfig) -> list[BrokenRule]:
    """Check every rule, and stop at the number of problems that is shown: each can cost a search for a name."""
    return list(islice(chain.from_iterable(rule(config) for rule in RULES), MOST_PROBLEMS + 1))


def _length(config: RunConfig) -> Iterator[BrokenRule]:
    steps, epochs = config.training.max_steps, config.training.epochs
    if steps is None and epochs is None:
        yield BrokenRule(("training", "max_steps"), "neither steps nor epochs", "one of the two",
                     "set training.max_steps, for example 2000", (("training", "epochs"),))  # fmt: skip
    if steps is not None and epochs is not None:
        yield BrokenRule(("training", "epochs"), f"{steps} steps and {epochs} epochs", "one of the two",
                     "remove training.epochs or training.max_steps")  # fmt: skip


def _ramp(config: RunConfig) -> Iterator[BrokenRule]:
    ramp = config.training.ramp
    if not ramp.enabled:
        return
    for name in ("initial_effective_batch_size", "target_effective_batch_size", "batch_rampup_steps"):
        if ramp.model_dump()[name] is None:
            yield BrokenRule(("training", "ramp", name), "nothing", "a whole number >= 1",
                         f"the batch ramp is enabled: set {name}")  # fmt: skip
    first, last = ramp.initial_effective_batch_size, ramp.target_effective_batch_size
    if first is not None and last is not None and first > last:
        yield BrokenRule(("training", "ramp", "initial_effective_batch_size"), str(first),
                     f"at most the target, {last}", "a ramp rises: swap the two")  # fmt: skip


def _determinism(config: RunConfig) -> Iterator[BrokenRule]:
    training = config.training
    if training.deterministic and training.attention in ("flash_attn_2", "flash_attn_3"):
        yield BrokenRule(("training", "attention"), training.attention,
                     "one of torch's own, with training.deterministic",
                     "write `auto`, or turn training.deterministic off", (("training", "deterministic"),))  # fmt: skip


def _token_routing(config: RunConfig) -> Iterator[BrokenRule]:
    routes, family = config.training.token_routing.routes, config.model.family
    if routes and not names_of(family).routed_blocks:
        able = ", ".join(name for name in FAMILIES if names_of(name).routed_blocks)
        yield BrokenRule(("training", "token_routing", "routes"), f"{len(routes)} with model.family {family}",
                     f"none: only tokens of {able} can skip blocks", "--set 'training.token_routing.routes=[]'",
                     (("model", "family"),))  # fmt: skip


def known_flavour(config: RunConfig) -> Flavour | None:
    """Return the config's flavour if it is known without opening the weights, else None."""
    model = config.model
    if model.flavour is not None:
        return find_flavour(model.family, model.flavour)
    return flavours(model.family)[0] if model.path is None else None


def _model(config: RunConfig) -> Iterator[BrokenRule]:
    model, flavour = config.model, known_flavour(config)
    if model.flavour is not None and flavour is None:
        names = [known.name for known in flavours(model.family)]
        hint = misspelt(model.flavour, names, "choose one of them, or give model.path instead")
        yield BrokenRule(("model", "flavour"), describe(model.flavour), f"one of {', '.join(names)}", hint, _MODEL)
    if model.assistant_adapter is not None and flavour is not None and flavour.dual_expert:
        yield BrokenRule(("model", "assistant_adapter"), f"one for {flavour.name}, which has two denoisers",
                     "a model with one denoiser", "remove model.assistant_adapter", _MODEL)  # fmt: skip
    if model.experts != "both" and flavour is not None and not flavour.dual_expert:
        yield BrokenRule(("model", "experts"), model.experts, f"both: {flavour.name} has a single expert",
                     "remove model.experts", _MODEL)  # fmt: skip


def distilled_problem(config: RunConfig, flavour: Flavour) -> BrokenRule | None:
    """Why these weights cannot be trained as the config says; None if they can.

    Training weights that were distilled to few steps undoes the distillation. An assistant adapter prevents that.
    """
    if not flavour.distilled or config.model.assistant_adapter is not None:
        return None
    found = f"none, for {flavour.name}, which is distilled to few sampling steps"
    hint = "give its de-distillation adapter in model.assistant_adapter (docs/training.md, assistant adapters)"
    if config.adapter.kind == "full_finetune":
        others = [one.name for one in flavours(config.model.family) if not one.distilled]
        found, hint = f"full_finetune of {flavour.name}, which is distilled to few sampling steps", "train an adapter"
        hint += "".join(f", or the weights of {name}" for name in others)
        return BrokenRule(("adapter", "kind"), found, "an adapter, with model.assistant_adapter", hint, _MODEL)
    expected = "an assistant adapter, because training would undo the distillation"
    return BrokenRule(("model", "assistant_adapter"), found, expected, hint, _MODEL)


def _distilled(config: RunConfig) -> Iterator[BrokenRule]:
    flavour = known_flavour(config)
    problem = None if flavour is None else distilled_problem(config, flavour)
    if problem is not None:
        yield problem


def _adapter(config: RunConfig) -> Iterator[BrokenRule]:
    adapter = config.adapter
    if adapter.is_full_finetune and config.model.assistant_adapter is not None:
        yield BrokenRule(("model", "assistant_adapter"), "one for full_finetune", "an adapter to train beside it",
                     "remove model.assistant_adapter, or choose lora", (("adapter", "kind"),))  # fmt: skip
    if adapter.is_full_finetune and (adapter.targets or adapter.init_from):
        yield BrokenRule(("adapter", "kind"), "full_finetune with targets or init_from", "an adapter for those",
                     "remove adapter.targets and adapter.init_from, or choose lora")  # fmt: skip
    if adapter.strength == 0 and not adapter.is_full_finetune:
        yield BrokenRule(("adapter", "strength"), "0", "another factor: 0 switches the adapter off",
                     "remove adapter.strength: it is 1 by default")  # fmt: skip


def _precision(config: RunConfig) -> Iterator[BrokenRule]:
    held = config.model.base_precision
    if held in ("auto", "fp8", "int8") and config.adapter.is_full_finetune:
        yield BrokenRule(("model", "base_precision"), f"{held} with full_finetune",
                     f"bf16, fp16 or fp32: {held} is for frozen weights",
                     "--set model.base_precision=bf16, or train an adapter",
                     (("adapter", "kind"),))  # fmt: skip


def _chunked_state(config: RunConfig) -> Iterator[BrokenRule]:
    optimizer, training = config.optimizer, config.training
    home, location = optimizer.state.home, ("optimizer", "state", "home")
    if home == "auto":
        return
    auto = "--set optimizer.state.home=auto"
    if not config.adapter.is_full_finetune:
        yield BrokenRule(location, f"{home} with {config.adapter.kind}", "full_finetune: an adapter's state is small",
                         auto, (("adapter", "kind"),))  # fmt: skip
        return
    if optimizer.name != "adamw":
        yield BrokenRule(
            location, f"{home} with {optimizer.name}", "the adamw optimizer", auto, (("optimizer", "name"),)
        )
    if (config.model.base_precision, training.mixed_precision) != ("bf16", "bf16"):
        found = f"{home} with weights in {config.model.base_precision} and {training.mixed_precision} computation"
        remedy = "--set model.base_precision=bf16 --set training.mixed_precision=bf16"
        yield BrokenRule(location, found, "bf16 for both", remedy,
                         (("model", "base_precision"), ("training", "mixed_precision")))  # fmt: skip
    if training.ema.enabled:
        yield BrokenRule(location, f"{home} with training.ema", "no average: it would take fp32 weights on the GPU",
                         "--set training.ema.enabled=false", (("training", "ema", "enabled"),))  # fmt: skip


def _automagic(config: RunConfig) -> Iterator[BrokenRule]:
    optimizer = config.optimizer
    for name, limits in (
        ("limits", optimizer.limits), ("high_noise", optimizer.high_noise), ("low_noise", optimizer.low_noise)
    ):  # fmt: skip
        if not reads_key(optimizer.name, name) and limits != type(limits)():
            yield BrokenRule(("optimizer", name), f"limits for {optimizer.name}", "the automagic optimizer",
                         f"set optimizer.name to automagic or remove optimizer.{name}",
                         (("optimizer", "name"),))  # fmt: skip
        if limits.min_lr is not None and limits.max_lr is not None and limits.min_lr > limits.max_lr:
            yield BrokenRule(("optimizer", name, "min_lr"), f"{limits.min_lr:g}", f"at most max_lr, {limits.max_lr:g}",
                         "swap the two")  # fmt: skip


def _objective(config: RunConfig) -> Iterator[BrokenRule]:
    objective = config.objective
    if objective.min_timestep >= objective.max_timestep:
        yield BrokenRule(("objective", "min_timestep"), str(objective.min_timestep),
                     f"below max_timestep, {objective.max_timestep}", "widen the noise range",
                     (("objective", "max_timestep"),))  # fmt: skip
    line = objective.resolution_shift
    if line is not None and line.base_image_seq_len >= line.max_image_seq_len:
        path = ("objective", "resolution_shift")
        yield BrokenRule((*path, "base_image_seq_len"), str(line.base_image_seq_len),
                     f"below max_image_seq_len, {line.max_image_seq_len}", "write 256 and 4096, for example",
                     ((*path, "max_image_seq_len"),))  # fmt: skip


def _dataset_ids(config: RunConfig) -> Iterator[BrokenRule]:
    seen: dict[str, int] = {}
    for index, dataset in enumerate(config.datasets):
        if dataset.id in seen:
            yield BrokenRule(("datasets", index, "id"), f"{describe(dataset.id)} again", "an id of its own",
                         f"datasets[{seen[dataset.id]}] has this id: rename one of the two")  # fmt: skip
        seen.setdefault(dataset.id, index)


def _something_to_train_on(config: RunConfig) -> Iterator[BrokenRule]:
    trainable = [d for d in config.datasets if not d.disabled and d.dataset_type in ("image", "video", "audio")]
    if not trainable:
        yield BrokenRule(("datasets",), f"{len(config.datasets)} datasets, none to train on",
                     "an enabled image, video or audio dataset", "add one, or remove its `disabled`")  # fmt: skip


def _datasets(config: RunConfig) -> Iterator[BrokenRule]:
    ids = [dataset.id for dataset in config.datasets]
    flavour = known_flavour(config)
    for index, dataset in enumerate(config.datasets):
        for rule in (_sizes, _frames, _periods, _strength, _backend, _storage, _local_copy, _megapixels):
            yield from rule(dataset, ("datasets", index))
        yield from _references(dataset, ("datasets", index), ids)
        yield from _canny(dataset, ("datasets", index), flavour)
        if flavour is not None:
            yield from _modality(dataset, ("datasets", index), flavour)


def _strength(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    if dataset.adapter_strength == 0 and not dataset.disabled:
        yield BrokenRule((*path, "adapter_strength"), "0",
                     "another factor: 0 switches the adapter off, and nothing is learned from this dataset",
                     "remove it for full strength, or leave the dataset out")  # fmt: skip


def _backend(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    """Check that an installed backend can be imported and that its own model accepts its options."""
    given = dict(dataset)
    for name in BACKEND_SECTIONS:
        if name != dataset.type and given[name]:
            expected = f"no options of {name} in a dataset of type {dataset.type}"
            hint = f"write type: {name}, or remove them"
            yield BrokenRule((*path, name), describe(given[name]), expected, hint, ((*path, "type"),))
    if not is_installed(dataset.type):
        return
    if dataset.type not in BACKEND_SECTIONS:
        expected = "a backend whose name is no other key of a dataset"
        yield BrokenRule(
            (*path, "type"), dataset.type, expected, "rename the entry point of the package that brings it"
        )
        return
    try:
        _, invalid = validated(dataset.type, given[dataset.type])
    except ConfigError as error:
        for one in error.problems:
            yield BrokenRule((*path, "type"), f"{dataset.type}: {one.found}", one.expected, one.hint)
        return
    for option in invalid:
        hint = f"look at the documentation of the package that brings {dataset.type}"
        yield BrokenRule((*path, dataset.type, *option.path), describe(option.found), option.expected, hint)


def _storage(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    protocol = dataset.path.partition("://")[0] if "://" in dataset.path else None
    if dataset.storage is not None and protocol not in ACCESS_PROTOCOLS:
        found = f"options for {'a folder' if protocol is None else f'{protocol}://'}"
        hint = "remove datasets[].storage: other libraries read environment variables"
        yield BrokenRule((*path, "storage"), found, f"them for {', '.join(f'{name}://' for name in ACCESS_PROTOCOLS)}",
                     hint, ((*path, "path"),))  # fmt: skip
    if protocol == "hf" and dataset.path.removeprefix("hf://").removeprefix("datasets/").count("/") == 0:
        yield BrokenRule((*path, "path"), dataset.path, "hf://datasets/OWNER/NAME", "name the owner too")


def _local_copy(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    copy = dataset.local_copy
    if copy is None:
        return
    local_copy_path = (*path, "local_copy")
    if not dataset.reads_folder:
        yield BrokenRule((*path, "type"), f"{dataset.type} with local_copy",
                     "local or in_memory: a copy is read from disk",
                     "write type: local, or remove local_copy", (local_copy_path,))  # fmt: skip
    if copy.index is not None and copy.format not in ("auto", "archives"):
        yield BrokenRule((*local_copy_path, "index"), f"an index for format {copy.format}", "format archives",
                     "remove local_copy.index", ((*local_copy_path, "format"),))  # fmt: skip
    if copy.tile is not None and copy.tile.index >= copy.tile.count:
        yield BrokenRule((*local_copy_path, "tile", "index"), str(copy.tile.index), f"below count, {copy.tile.count}",
                     f"write {copy.tile.count - 1} for the last")  # fmt: skip
    if copy.tile is not None and dataset.dataset_type in ("video", "audio"):
        yield BrokenRule((*local_copy_path, "tile"), f"tiles of {dataset.dataset_type}", "images",
                     "remove local_copy.tile", ((*path, "dataset_type"),))  # fmt: skip
    for index, one in enumerate(copy.filter):
        if one.minimum is None and not one.one_of:
            yield BrokenRule((*local_copy_path, "filter", index), "neither minimum nor one_of", "one of the two",
                         "add minimum: 0.5, for example")  # fmt: skip


def _sizes(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    if dataset.maximum_size is not None and dataset.downsample_to is None:
        yield BrokenRule((*path, "downsample_to"), "nothing", "a size that images above maximum_size are scaled to",
                     "set downsample_to, or remove maximum_size")  # fmt: skip
    low, high = dataset.minimum_aspect_ratio, dataset.maximum_aspect_ratio
    if low is not None and high is not None and low > high:
        yield BrokenRule((*path, "minimum_aspect_ratio"), f"{low:g}", f"at most {high:g}", "swap the two")
    crop = dataset.crop
    if crop.enabled and crop.aspect in ("closest", "random") and not crop.aspect_buckets:
        yield BrokenRule((*path, "crop", "aspect_buckets"), "nothing", f"a list of ratios for aspect {crop.aspect}",
                     "for example [1.0, 0.75, 1.33]")  # fmt: skip


def _frames(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    frames = dataset.video.num_frames
    if dataset.dataset_type == "video" and frames is not None and frames % 4 != 1:
        lower, upper = frames - (frames - 1) % 4, frames - (frames - 1) % 4 + 4
        yield BrokenRule((*path, "video", "num_frames"), str(frames), "a multiple of 4 plus 1",
                     f"write {lower} or {upper}" if lower > 0 else f"write {upper}")  # fmt: skip


def _canny(dataset: Dataset, path: Path, flavour: Flavour | None) -> Iterator[BrokenRule]:
    edges, canny_path = dataset.canny_reference, (*path, "canny_reference")
    if edges is None:
        return
    if edges.low_threshold > edges.high_threshold:
        yield BrokenRule((*canny_path, "low_threshold"), f"{edges.low_threshold:g}",
                     f"at most high_threshold, {edges.high_threshold:g}", "swap the two",
                     ((*canny_path, "high_threshold"),))  # fmt: skip
    if dataset.dataset_type not in ("image", "eval"):
        yield BrokenRule(canny_path, f"it for a dataset of type {dataset.dataset_type}",
                     "it for images that are trained on", "remove it", ((*path, "dataset_type"),))  # fmt: skip
    if flavour is not None and not flavour.edits:
        yield BrokenRule(canny_path, f"references for {flavour.name}", "a model that edits, such as kontext",
                     "remove canny_reference or choose a model that edits", _MODEL)  # fmt: skip


def _periods(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    if dataset.end_epoch is not None and dataset.end_epoch < dataset.start_epoch:
        yield BrokenRule((*path, "end_epoch"), str(dataset.end_epoch), f"at least start_epoch, {dataset.start_epoch}",
                     "swap the two")  # fmt: skip
    if dataset.end_step is not None and dataset.end_step <= dataset.start_step:
        yield BrokenRule((*path, "end_step"), str(dataset.end_step), f"above start_step, {dataset.start_step}",
                     "swap the two")  # fmt: skip


def _references(dataset: Dataset, path: Path, ids: list[str]) -> Iterator[BrokenRule]:
    wanted = [*dataset.conditioning, *([dataset.source_dataset_id] if dataset.source_dataset_id else [])]
    for name in wanted:
        if name not in ids or name == dataset.id:
            field = "conditioning" if name in dataset.conditioning else "source_dataset_id"
            hint = misspelt(name, [known for known in ids if known != dataset.id], "add that dataset")
            others = tuple(("datasets", index, "id") for index in range(len(ids)))
            yield BrokenRule((*path, field), describe(name), "the id of another dataset of this config", hint, others)


def _modality(dataset: Dataset, path: Path, flavour: Flavour) -> Iterator[BrokenRule]:
    """Check that the model can train on this type of dataset. Only video models accept two types: clips and images."""
    readable = {"video": ("video", "image"), "image": ("image",), "audio": ("audio",)}[flavour.makes]
    if dataset.dataset_type in ("image", "video", "audio") and dataset.dataset_type not in readable:
        expected = f"{' or '.join(readable)}, which {flavour.name} learns from"
        yield BrokenRule((*path, "dataset_type"), dataset.dataset_type, expected,
                     "remove the dataset or choose a model for it", _MODEL)  # fmt: skip


def _edit_sources(config: RunConfig) -> Iterator[BrokenRule]:
    """Check that a dataset for an edit model has the images before the edit."""
    flavour = known_flavour(config)
    if flavour is None or not flavour.edits or flavour.images_alone:
        return
    enabled = [(index, dataset) for index, dataset in enumerate(config.datasets) if not dataset.disabled]
    masks = {dataset.id for _, dataset in enabled if dataset.conditioning_type == "mask"}
    edited = {dataset.source_dataset_id for _, dataset in enabled if dataset.conditioning_type != "mask"}
    trained = [(index, dataset) for index, dataset in enabled if dataset.dataset_type == "image"]
    if trained and not any(
        set(dataset.conditioning) - masks or dataset.id in edited or dataset.canny_reference for _, dataset in trained
    ):
        index, dataset = trained[0]
        fields = ("conditioning", "conditioning_type", "source_dataset_id", "dataset_type")
        others = tuple(("datasets", other, field) for other in range(len(config.datasets)) for field in fields)
        yield BrokenRule(("datasets", index, "conditioning"), f"no edit sources for {describe(dataset.id)}",
                     f"a dataset of the images before the edit: {flavour.name} learns from pairs",
                     "give their folder: `control_path` in ai-toolkit; elsewhere a dataset with `dataset_type: "
                     "conditioning`, named in `conditioning` (SimpleTuner: `conditioning_data`)",
                     (*_MODEL, *others))  # fmt: skip


def _ranks(config: RunConfig) -> Iterator[BrokenRule]:
    adapter = config.adapter
    ranks: list[tuple[Path, Any, Any]] = [
        (("adapter", "rank"), adapter.kind, adapter.rank),
        (("adapter", "conv_rank"), adapter.kind, adapter.conv_rank),
    ]
    for module, options in adapter.by_module.items():
        kind = kind_of_algo(options["algo"]) if "algo" in options else adapter.kind
        ranks += [(("adapter", "by_module", module, name), kind, options.get(name)) for name in ("dim", "linear_dim")]
    for path, kind, rank in ranks:
        limited = kind not in (None, FULL_FINETUNE) and checked_record(kind).rank_is_width
        if limited and isinstance(rank, int | float) and rank > LARGEST_RANK:
            yield BrokenRule(path, str(rank), f"at most {LARGEST_RANK:,} for {kind}",
                         "write 16, for example; whole matrices are learned by full_delta, or by lokr with "
                         "`full_rank: true`", (("adapter", "kind"),))  # fmt: skip


def _megapixels(dataset: Dataset, path: Path) -> Iterator[BrokenRule]:
    if dataset.resolution_type != "area":
        return
    for name, size in (("resolution", dataset.resolution), ("downsample_to", dataset.downsample_to)):
        if size is not None and size > MOST_MEGAPIXELS:
            yield BrokenRule((*path, name), f"{size:g} megapixels",
                         f"at most {MOST_MEGAPIXELS:g} with resolution_type area",
                         f"if {size:g} is in pixels, write `resolution_type: pixel_area`, or {size * size / 1e6:.2g} "
                         "for as many megapixels", ((*path, "resolution_type"),))  # fmt: skip


def _webhook(config: RunConfig) -> Iterator[BrokenRule]:
    if config.logging.webhook is None:
        return
    # Imported here because it takes 40 ms and most configs have no webhook.
    from gracetune.telemetry.sinks.webhook import ADDRESS_HINT, EXPECTED_ADDRESS, check_address

    _, wrong = check_address(config.logging.webhook)
    if wrong is not None and not _is_hidden(config.logging.webhook):
        yield BrokenRule(("logging", "webhook"), f"{redact_webhook(config.logging.webhook)}, {wrong}", EXPECTED_ADDRESS,
                     ADDRESS_HINT)  # fmt: skip


def _written_folders(config: RunConfig) -> Iterator[BrokenRule]:
    """Reject a URL as an output folder: it would create a folder `https:`, and in it one named after the login."""
    cache = config.cache
    folders: list[tuple[Path, str | None]] = [
        (("output_dir",), config.output_dir),
        (("cache", "cache_dir"), cache.cache_dir),
        (("cache", "text_cache_dir"), cache.text_cache_dir),
        (("cache", "vae_cache_dir"), cache.vae_cache_dir),
        *((("datasets", number, "cache_dir"), one.cache_dir) for number, one in enumerate(config.datasets)),
    ]
    for path, folder in folders:
        if folder is not None and "://" in folder and not _is_hidden(folder):
            yield BrokenRule(path, describe(folder), "a folder of this machine",
                         "write the path of a folder; storage of another machine has to be mounted")  # fmt: skip


def _is_hidden(text: str) -> bool:
    """Whether a text is the placeholder of a redacted value."""
    return text == HIDDEN or ("://" in text and HIDDEN in text.partition("://")[2])


def _hidden(config: RunConfig) -> Iterator[BrokenRule]:
    """Reject placeholders of secrets, which come from the output of `config show` or from a checkpoint."""
    for path, text in _texts(config.model_dump(mode="json"), ()):
        if _is_hidden(text):
            yield BrokenRule(path, f"{describe(text)}, which was hidden where it was shown", "the value itself",
                         "write the whole value; the config.yaml in a run's folder has it")  # fmt: skip


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


RULES: tuple[Callable[[RunConfig], Iterator[BrokenRule]], ...] = (
    _length,
    _ramp,
    _determinism,
    _token_routing,
    _model,
    _distilled,
    _adapter,
    _precision,
    _automagic,
    _chunked_state,
    _objective,
    _dataset_ids,
    _something_to_train_on,
    _datasets,
    _edit_sources,
    _ranks,
    _webhook,
    _written_folders,
    _hidden,
)

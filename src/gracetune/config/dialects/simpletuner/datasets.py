"""Reads the list of datasets, from `multidatabackend.json`, `datasets` or `data_backend`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gracetune.config.dialects.gh200 import IN_MEMORY
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.dataset import ENTRY, EntryContext, is_reachable
from gracetune.config.dialects.simpletuner.dataset_keys import NOT_USED
from gracetune.config.dialects.simpletuner.files import Placeholders, line, read_sidecar
from gracetune.config.dialects.simpletuner.keys import PEER, Off
from gracetune.config.dialects.table import (
    Key,
    KeyRule,
    KeyTable,
    apply,
    check,
    read_elsewhere,
    rejected,
    report_unknown_keys,
)
from gracetune.config.dialects.values import as_number, is_number, is_off, real
from gracetune.config.draft import OUR_DEFAULT, Origin
from gracetune.config.environment import Environment
from gracetune.config.families import flavours, names_of
from gracetune.config.spelling import misspelt

_EMBEDS = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_KINDS = ("image", "video", "audio", "conditioning", "eval", *_EMBEDS)
_UNSUPPORTED_KINDS = ("caption", "grounding", "distillation_cache")


def read_datasets(options: PeerBlock, family: str, environment: Environment) -> int:
    """Read all datasets and the options that mix them. Returns the number of datasets."""
    draft, before = options.draft, len(options.draft.problems)
    backend = _backend(options)
    entries = _entries(options, family, environment, backend)
    context = EntryContext(options, family, backend if not _is_dataset(backend) else None)
    embeds: list[PeerBlock] = []
    count = 0
    for entry in entries:
        if _skip(entry):
            continue
        if entry.get("dataset_type") in _EMBEDS:
            embeds.append(entry)
        elif is_reachable(entry, context):
            kind = str(entry.get("dataset_type") or "image")
            entry_context = replace(context, path=("datasets", count), kind=kind)
            apply(entry, ENTRY, entry_context, entry_context.path)
            count += 1
    _embeds(embeds)
    _check_unique_ids(embeds)
    if any(entry.get("dataset_type") not in ("audio", *_EMBEDS) for entry in entries):
        differences = ", ".join(_differences(options, family, entries))
        options.note(f"on purpose not as in SimpleTuner: {differences}; see docs/fidelity.md")
    apply(options, MIXING, family)
    if not count:
        if len(draft.problems) == before:
            _report_no_datasets(options)
        sounds = any(flavour.makes == "audio" for flavour in flavours(family))
        stand_in = {"id": "unread", "path": "unread", "dataset_type": "audio" if sounds else "image"}
        draft.put_tree(("datasets", 0), stand_in, OUR_DEFAULT)  # the missing datasets are already reported
        draft.unread.add(("datasets", 0))
    return count


def _differences(options: PeerBlock, family: str, entries: Sequence[PeerBlock]) -> Iterator[str]:
    """Yield how gracetune deliberately differs from SimpleTuner, with SimpleTuner's way in parentheses."""
    yield "images are scaled with Lanczos (there bilinear) and never squeezed"
    yield "transparent areas become white, and colour profiles are applied"
    if all(flavour.makes != "video" for flavour in flavours(family)):
        yield "latents are the mean of the VAE's distribution (there a sample)"
    yield "every bucket is visited in every epoch, also if it has fewer samples than a step takes (there an error)"
    yield "an image's own shape decides its bucket (there the first image of an aspect ratio decides)"
    styles = [options.draft.get(("datasets", at, "crop", "style")) for at in range(len(_read_datasets(options)))]
    if names_of(family).explicit_sizes and any(style in (None, "random") for style in styles):
        yield "the model gets the position of a random crop (there always the middle)"
    if any(_inside(entry, "caption_shuffle").get("enable") for entry in entries):
        yield "`caption_shuffle` has as many different orders as `count` (there fewer: duplicates are dropped)"
    from_columns = (None, "huggingface")
    hub = [one for one in entries if one.get("type") == "huggingface" and one.get("caption_strategy") in from_columns]
    if any("caption_column" in entry for entry in hub):
        yield "`caption_column` beside the `huggingface` block is read (there only inside the block)"
    named = [{*entry.values, *_inside(entry, "huggingface")} for entry in hub]
    if any({"fallback_caption_column", "description_column"}.isdisjoint(keys) for keys in named):
        yield "empty captions stay empty (there the column `description` is tried)"


def _inside(entry: PeerBlock, name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, Mapping) else {}


def _report_no_datasets(options: PeerBlock) -> None:
    for name in ("data_backend_config", "datasets"):
        if name in options:
            options.problem(name, "at least one dataset to train on", "add one, or remove its `disabled`")
            return
    if "data_backend" in options:
        key = f"{options.key('data_backend')}.instance_data_dir"
        options.draft.missing(("datasets",), key, "the folder of the dataset, or `datasets` beside `data_backend`",
                              'add "instance_data_dir": "/path/to/images"')  # fmt: skip
        return
    hint = f"add {line(options, 'data_backend_config', 'config/multidatabackend.json')}"
    expected = "a file of datasets, or `datasets` in this one"
    options.draft.missing(("datasets",), "data_backend_config", expected, hint)


BACKEND: KeyTable[None] = KeyTable(
    *(Key(name) for name in dict.fromkeys((*ENTRY, *IN_MEMORY))), expected="a key of a dataset"
)


def _backend(options: PeerBlock) -> PeerBlock | None:
    value = options.get("data_backend")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        options.problem("data_backend", "a mapping with `type`", 'write {"type": "in_memory"}')
        return None
    backend = _block(options, value, options.key("data_backend"))
    report_unknown_keys(backend, BACKEND)
    return backend


def _block(options: PeerBlock, value: Mapping[Any, Any], key_path: str, file: str = "") -> PeerBlock:
    """Wrap an entry. Lists of its keys omit the path of the entry itself."""
    reading = replace(options.reading, root=f"{key_path}.")
    return replace(options.without_nulls(value, key_path), reading=reading, elsewhere=file, around=options)


def _is_dataset(backend: PeerBlock | None) -> bool:
    """Whether a `data_backend` is a dataset: it has a folder. Without one it sets the storage of the others."""
    return backend is not None and ("instance_data_dir" in backend or "instance_data_root" in backend)


def _entries(options: PeerBlock, family: str, environment: Environment, backend: PeerBlock | None) -> list[PeerBlock]:
    entries: list[PeerBlock] = []
    if "data_backend_config" in options:
        entries += _from_file(options)
    if "datasets" in options:
        entries += _from_list(options)
    if backend is not None and _is_dataset(backend):
        entries.append(_as_dataset(backend))
    variables = {"model_family": family, "output_dir": str(options.get("output_dir") or "")}
    return [_filled(entry, environment, variables) for entry in entries]


def _from_file(options: PeerBlock) -> list[PeerBlock]:
    document = read_sidecar(options, "data_backend_config", "a JSON list of datasets")
    if document is None:
        return []
    name = document.name
    if not isinstance(document.data, list):
        options.draft.problem("(file)", document.data, "a list of datasets", "write [ { … }, { … } ]", name)
        return []
    found = [_entry(options, value, f"[{index}]", name) for index, value in enumerate(document.data)]
    return [entry for entry in found if entry is not None]


def _from_list(options: PeerBlock) -> list[PeerBlock]:
    value = options.get("datasets")
    if not isinstance(value, list):
        options.problem("datasets", "a list of datasets", "write [ { … }, { … } ]")
        return []
    key = options.key("datasets")
    found = [_entry(options, item, f"{key}[{index}]") for index, item in enumerate(value)]
    return [entry for entry in found if entry is not None]


def _entry(options: PeerBlock, value: Any, key_path: str, file: str = "") -> PeerBlock | None:
    if isinstance(value, Mapping):
        return _block(options, value, key_path, file)
    options.draft.problem(key_path, value, "a dataset", 'write {"id": …, "instance_data_dir": …}', file or None)
    return None


def _as_dataset(backend: PeerBlock) -> PeerBlock:
    """Convert a `data_backend` to a dataset entry: staging options beside the folder move to the `in_memory` block."""
    values = dict(backend.values)
    loose = {name: values.pop(name) for name in IN_MEMORY if name in values}
    block = values.get("in_memory")
    if loose:
        values["in_memory"] = {**loose, **block} if isinstance(block, Mapping) else loose
    return replace(backend, values={"id": "data_backend", **values}, used=set())


def _filled(entry: PeerBlock, environment: Environment, variables: Mapping[str, str]) -> PeerBlock:
    placeholders = Placeholders(environment, {**variables, "id": str(entry.get("id") or "")})
    filled = {
        name: placeholders.fill(value, entry.draft, entry.key(name), entry.file) for name, value in entry.values.items()
    }
    return replace(entry, values=filled, used=set())


def _skip(entry: PeerBlock) -> bool:
    """Whether an entry is disabled, or of a type that gracetune does not support."""
    for name in ("disabled", "disable"):
        if entry.switch(name):
            entry.note(f"{entry.key_path} ({entry.get('id')}) is disabled and was not read")
            return True
    kind = entry.get("dataset_type")
    if kind in _UNSUPPORTED_KINDS:
        entry.reject("dataset_type", f"one of {', '.join(_KINDS)}")
        return True
    if kind is not None and kind not in _KINDS:
        entry.problem("dataset_type", f"one of {', '.join(_KINDS)}", misspelt(kind, _KINDS, "write `image`"))
        return True
    return False


_USED_BY_EMBEDS = "default text_encoder_batch_size"


def _embeds_table(kind: str) -> KeyTable[None]:
    return KeyTable(
        *read_elsewhere("cache_dir id type dataset_type disabled disable"),
        *read_elsewhere(_USED_BY_EMBEDS),
        rejected("caption_filter_list", Off((None, [])), "captions are not filtered; edit them"),
        # Keys without an `unless` (`_OTHER_STORAGE`) belong to datasets of media only.
        *(key for key in NOT_USED if key.unless is not None and key.name not in _USED_BY_EMBEDS.split()),
        expected=f"a key of a {kind} entry",
    )


EMBEDS = {kind: _embeds_table(kind) for kind in _EMBEDS}
"""Tables of entries that only configure the cache of embeddings."""


def _embeds(entries: list[PeerBlock]) -> None:
    for entry in entries:
        _embed_keys(entry)
    _text_cache([entry for entry in entries if entry.get("dataset_type") == "text_embeds"])
    for entry in entries:
        if not is_off(entry.get("cache_dir")) and "cache_dir" not in entry.used:
            # SimpleTuner keeps no latents in an image_embeds folder either: only its storage is used.
            entry.note(f"{entry.key('cache_dir')}: nothing is kept there. Embeddings of captions are in the folder of "
                       "the default text_embeds entry, latents and everything else computed from an image where "
                       "`cache_dir_vae` says, the dataset's or the config's")  # fmt: skip


def _embed_keys(entry: PeerBlock) -> None:
    table = EMBEDS[entry.get("dataset_type")]
    storage = [name for name in entry.values if name not in table and name.startswith(("aws", "memory_"))]
    check(replace(entry, values={name: value for name, value in entry.values.items() if name not in storage}), table)
    if entry.get("type") not in (None, "local", "memory", "in_memory"):
        entry.reject("type", "embeddings are cached on disk or in memory", 'write "local"')


def _text_cache(entries: list[PeerBlock]) -> None:
    """Read the text cache from the default entry, or from the first if none is marked as default."""
    defaults = [entry for entry in entries if entry.switch("default")]
    for entry in defaults[1:]:
        entry.problem("default", f"one default: {defaults[0].key('default')} is one already",
                      f'remove it from "{entry.get("id")}"')  # fmt: skip
    for entry in (defaults or entries)[:1]:
        entry.put("cache_dir", ("cache", "text_cache_dir"))
        entry.put("text_encoder_batch_size", ("cache", "text_encoder_batch_size"), as_number)
        if entry.get("type") in ("memory", "in_memory"):
            entry.assign(("cache", "text_cache_type"), "memory", "type")


def _check_unique_ids(embeds: list[PeerBlock]) -> None:
    """Check that ids are unique. Entries for embeddings are not datasets here, but in SimpleTuner they need ids too."""
    for number, entry in enumerate(embeds):
        datasets = entry.draft.get(("datasets",))
        found = datasets if isinstance(datasets, list) else []
        taken = [one.get("id") for one in (*found, *embeds[:number]) if isinstance(one, Mapping | PeerBlock)]
        name = entry.get("id")
        if isinstance(name, str) and name in taken:
            entry.problem("id", "an id of its own: another entry has this one", "rename one of the two")


def _sampling(options: PeerBlock, family: str) -> None:
    """Read how batches are filled and, with more than one dataset to train on, how datasets are mixed."""
    draft, found = options.draft, _read_datasets(options)
    options.default(("training", "fill_batches"), True)
    if names_of(family).explicit_sizes:
        options.default(("model", "size_conditioning"), "scaled")
        options.default(("model", "drop_size_conditioning"), True)
    trained = [
        at for at, entry in enumerate(found) if entry.get("dataset_type", "image") in ("image", "video", "audio")
    ]
    if len(trained) < 2:
        return
    sampling = options.take("data_backend_sampling")
    if sampling == "uniform":
        options.assign(("training", "dataset_weights"), "equal", "data_backend_sampling")
    elif sampling not in (None, "auto-weighting"):
        options.problem("data_backend_sampling", "auto-weighting or uniform", 'write "auto-weighting"')
    else:
        _weigh_batches(options, [(at, found[at]) for at in trained])
    strengths = {at: real(found[at].get("adapter_strength")) or 0.0 for at in trained}
    if any(strengths.values()):
        for at, strength in strengths.items():
            turn = 0 if strength > 0 else 1 if strength < 0 else 2
            draft.put(("datasets", at, "turn"), turn, draft.origin(("datasets", at, "adapter_strength")) or _SLIDERS)


_SLIDERS = Origin("default", "slider_strength", PEER)


def _weigh_batches(options: PeerBlock, trained: list[tuple[int, Mapping[str, Any]]]) -> None:
    """Scale probabilities, because SimpleTuner weighs a dataset by its number of batches and gracetune by its samples.

    The two differ only for a dataset with a batch size of its own.
    """
    common = as_number(options.draft.get(("training", "batch_size")))
    for at, entry in trained:
        own, probability = as_number(entry.get("batch_size")), entry.get("probability", 1.0)
        if all(is_number(one) and one > 0 for one in (common, own, probability)) and own != common:
            origin = options.draft.origin(("datasets", at, "batch_size")) or _SLIDERS
            options.draft.put(("datasets", at, "probability"), probability * common / own, origin)


def _references(options: PeerBlock, family: str) -> None:
    found, name = _read_datasets(options), "conditioning_multidataset_sampling"
    masks = [entry.get("id") for entry in found if entry.get("conditioning_type") == "mask"]
    counts = [_count_references(entry, masks) for entry in found]
    if max(counts, default=0) > 1 and options.take(name) != "combined":
        why = "combined: a sample is trained with all of its references (SimpleTuner's default uses one at random)"
        options.reject(name, why, f"write {line(options, name, 'combined')}", found=options.get(name) or "random")


def _read_datasets(options: PeerBlock) -> list[Mapping[str, Any]]:
    datasets = options.draft.get(("datasets",))
    return [entry for entry in datasets if isinstance(entry, Mapping)] if isinstance(datasets, list) else []


def _count_references(entry: Mapping[str, Any], masks: list[Any]) -> int:
    names = entry.get("conditioning")
    return len([name for name in names if name not in masks]) if isinstance(names, list) else 0


MIXING: KeyTable[str] = KeyTable(
    *read_elsewhere("data_backend_config datasets data_backend"),
    KeyRule(_sampling, "data_backend_sampling"),
    KeyRule(_references, "conditioning_multidataset_sampling"),
)
"""Options that name the datasets or control how they are mixed."""

"""The list of datasets: from `multidatabackend.json`, from `datasets`, or from `data_backend`, as people write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracetune.config.dialects.simpletuner.dataset import DatasetReader
from gracetune.config.dialects.simpletuner.dataset_keys import HARMLESS, IN_MEMORY_KEYS
from gracetune.config.dialects.simpletuner.dataset_keys import KNOWN as ENTRY_KEYS
from gracetune.config.dialects.simpletuner.values import Options, Placeholders, as_number, is_off, read_sidecar
from gracetune.config.draft import OUR_DEFAULT, Draft
from gracetune.config.environment import Environment
from gracetune.config.spelling import misspelt

_EMBEDS = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_KINDS = ("image", "video", "audio", "conditioning", "eval", *_EMBEDS)
_UNSUPPORTED_KINDS = ("caption", "grounding", "distillation_cache")


def read_datasets(options: Options, draft: Draft, family: str, environment: Environment) -> DatasetReader:
    """Returns the reader, which knows how many datasets there were and which of their keys had nothing to say."""
    before = len(draft.problems)
    backend = _backend(options, draft)
    entries = _entries(options, draft, family, environment, backend)
    reader = DatasetReader(options, draft, family, backend if not _is_dataset(backend) else None)
    embeds: list[Options] = []
    for entry in entries:
        if _skip(entry, draft):
            continue
        if entry.get("dataset_type") in _EMBEDS:
            embeds.append(entry)
        else:
            reader.read(entry)
    _embeds(embeds, draft, reader)
    _own_ids(embeds, draft)
    _sampling(options, draft)
    if not reader.count:
        if len(draft.problems) == before:
            _ask_for_datasets(options, draft)
        stand_in = {"id": "unread", "path": "unread", "dataset_type": "audio" if family == "stable_audio" else "image"}
        draft.put_tree(("datasets", 0), stand_in, OUR_DEFAULT)  # that there are none has been said above
        draft.unread.add(("datasets", 0))
    return reader


def _ask_for_datasets(options: Options, draft: Draft) -> None:
    for name in ("data_backend_config", "datasets"):
        if name in options:
            options.problem(draft, name, "at least one dataset to train on", "add one, or remove its `disabled`")
            return
    if "data_backend" in options:
        key = f"{options.key('data_backend')}.instance_data_dir"
        draft.missing(("datasets",), key, "the folder of the dataset, or `datasets` beside `data_backend`",
                      'add "instance_data_dir": "/path/to/images"')  # fmt: skip
        return
    draft.missing(("datasets",), "data_backend_config", "a file of datasets, or `datasets` in this one",
                  f"add {options.line('data_backend_config', 'config/multidatabackend.json')}")  # fmt: skip


def _backend(options: Options, draft: Draft) -> Options | None:
    value = options.get("data_backend")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        options.problem(draft, "data_backend", "a mapping with `type`", 'write {"type": "in_memory"}')
        return None
    backend = Options.block(value, options.file, f"{options.key('data_backend')}.")
    known = ENTRY_KEYS | set(IN_MEMORY_KEYS)
    for name in backend.values:
        if name not in known:
            backend.problem(draft, name, "a key of a dataset", misspelt(name, known))
    return backend


def _is_dataset(backend: Options | None) -> bool:
    """A `data_backend` with a folder is a dataset; without one it says how the others are kept."""
    return backend is not None and ("instance_data_dir" in backend or "instance_data_root" in backend)


def _entries(
    options: Options, draft: Draft, family: str, environment: Environment, backend: Options | None
) -> list[Options]:
    found: list[tuple[Any, str, str]] = []
    if "data_backend_config" in options:
        found += _from_file(options, draft)
    if "datasets" in options:
        found += _from_list(options, draft)
    entries = [_entry(value, file, prefix, draft) for value, file, prefix in found]
    if backend is not None and _is_dataset(backend):
        entries.append(_as_dataset(backend))
    variables = {"model_family": family, "output_dir": str(options.get("output_dir") or "")}
    return [_filled(entry, draft, environment, variables) for entry in entries if entry is not None]


def _from_file(options: Options, draft: Draft) -> list[tuple[Any, str, str]]:
    document = read_sidecar(draft, options, "data_backend_config", "a JSON list of datasets")
    if document is None:
        return []
    if not isinstance(document.data, list):
        draft.problem("(file)", document.data, "a list of datasets", "write [ { … }, { … } ]", document.name)
        return []
    return [(value, document.name, f"[{index}].") for index, value in enumerate(document.data)]


def _from_list(options: Options, draft: Draft) -> list[tuple[Any, str, str]]:
    value = options.get("datasets")
    if not isinstance(value, list):
        options.problem(draft, "datasets", "a list of datasets", "write [ { … }, { … } ]")
        return []
    return [(item, options.file, f"{options.key('datasets')}[{index}].") for index, item in enumerate(value)]


def _entry(value: Any, file: str, prefix: str, draft: Draft) -> Options | None:
    if isinstance(value, Mapping):
        return Options.block(value, file, prefix)
    draft.problem(prefix.removesuffix("."), value, "a dataset", 'write {"id": …, "instance_data_dir": …}', file)
    return None


def _as_dataset(backend: Options) -> Options:
    """Its staging options may stand beside the folder; a dataset keeps them in a block."""
    values = dict(backend.values)
    loose = {name: values.pop(name) for name in IN_MEMORY_KEYS if name in values}
    block = values.get("in_memory")
    if loose:
        values["in_memory"] = {**loose, **block} if isinstance(block, Mapping) else loose
    return Options({"id": "data_backend", **values}, backend.written, backend.file, backend.prefix)


def _filled(entry: Options, draft: Draft, environment: Environment, variables: Mapping[str, str]) -> Options:
    placeholders = Placeholders(environment, {**variables, "id": str(entry.get("id") or "")})
    filled = {
        name: placeholders.fill(value, draft, entry.key(name), entry.file) for name, value in entry.values.items()
    }
    return Options(filled, entry.written, entry.file, entry.prefix)


def _skip(entry: Options, draft: Draft) -> bool:
    """Entries that are switched off, and kinds of entry that are no dataset of ours."""
    for name in ("disabled", "disable"):
        if entry.switch(draft, name):
            draft.note(f"{entry.prefix.removesuffix('.')} ({entry.get('id')}) is disabled and was not read")
            return True
    kind = entry.get("dataset_type")
    if kind in _UNSUPPORTED_KINDS:
        entry.refuse(draft, "dataset_type", f"one of {', '.join(_KINDS)}")
        return True
    if kind is not None and kind not in _KINDS:
        entry.problem(draft, "dataset_type", f"one of {', '.join(_KINDS)}", misspelt(kind, _KINDS, "write `image`"))
        return True
    return False


_EMBED_KEYS = ("cache_dir", "caption_filter_list", "id", "type", "dataset_type", "disabled", "disable", *HARMLESS)


def _embeds(entries: list[Options], draft: Draft, reader: DatasetReader) -> None:
    """Entries that only say where embeddings are cached."""
    for entry in entries:
        _embed_keys(entry, draft)
        reader.harmless += [name for name in entry.values if name in HARMLESS and not is_off(entry.get(name))
                            and name not in ("default", "text_encoder_batch_size")]  # fmt: skip
    _text_cache([entry for entry in entries if entry.get("dataset_type") == "text_embeds"], draft)
    for entry in entries:
        if not is_off(entry.get("cache_dir")) and "cache_dir" not in entry.used:
            # SimpleTuner keeps no latents in an image_embeds folder either: only its storage is used.
            draft.note(f"{entry.key('cache_dir')}: nothing is kept there. Embeddings of captions are in the folder of "
                       "the default text_embeds entry, latents and all else that is made of a picture where "
                       "`cache_dir_vae` says, the dataset's or the config's")  # fmt: skip


def _embed_keys(entry: Options, draft: Draft) -> None:
    for name in entry.values:
        if name not in _EMBED_KEYS and not name.startswith(("aws", "memory_")):
            entry.problem(draft, name, f"a key of a {entry.get('dataset_type')} entry", misspelt(name, _EMBED_KEYS))
    if not is_off(entry.get("caption_filter_list")) and entry.get("caption_filter_list") != []:
        entry.refuse(draft, "caption_filter_list", "captions are not filtered; edit them")
    if entry.get("type") not in (None, "local", "memory", "in_memory"):
        entry.refuse(draft, "type", "embeddings are cached on disk or in memory", 'write "local"')


def _text_cache(entries: list[Options], draft: Draft) -> None:
    """The default entry decides; where none is marked, the first."""
    defaults = [entry for entry in entries if entry.switch(draft, "default")]
    for entry in defaults[1:]:
        entry.problem(draft, "default", f"one default: {defaults[0].key('default')} is one already",
                      f'remove it from "{entry.get("id")}"')  # fmt: skip
    for entry in (defaults or entries)[:1]:
        entry.put(draft, "cache_dir", ("cache", "text_cache_dir"))
        entry.put(draft, "text_encoder_batch_size", ("cache", "text_encoder_batch_size"), as_number)
        if entry.get("type") in ("memory", "in_memory"):
            draft.put(("cache", "text_cache_type"), "memory", entry.origin("type"))


def _own_ids(embeds: list[Options], draft: Draft) -> None:
    """Embeddings are no datasets of ours, but SimpleTuner tells them apart by their ids too."""
    datasets = draft.get(("datasets",))
    taken = [entry.get("id") for entry in datasets if isinstance(entry, Mapping)] if isinstance(datasets, list) else []
    for entry in embeds:
        name = entry.get("id")
        if isinstance(name, str) and name in taken:
            entry.problem(draft, "id", "an id of its own: another entry has this one", "rename one of the two")
        taken.append(name)


def _sampling(options: Options, draft: Draft) -> None:
    """How datasets are mixed, where there is more than one to mix."""
    datasets = draft.get(("datasets",))
    found = [entry for entry in datasets if isinstance(entry, Mapping)] if isinstance(datasets, list) else []
    trained = [entry for entry in found if entry.get("dataset_type", "image") in ("image", "video", "audio")]
    if len(trained) > 1 and options.take("data_backend_sampling") not in (None, "auto-weighting"):
        options.refuse(draft, "data_backend_sampling", "auto-weighting: large datasets are visited more often",
                       "set each dataset's `probability` or `repeats` instead")  # fmt: skip
    masks = [entry.get("id") for entry in found if entry.get("conditioning_type") == "mask"]
    references = [_references(entry, masks) for entry in found]
    if max(references, default=0) > 1 and options.take("conditioning_multidataset_sampling") != "combined":
        draft.refuse(options.key("conditioning_multidataset_sampling"),
                     options.get("conditioning_multidataset_sampling") or "random",
                     "combined: a sample is trained with all of its references (SimpleTuner's default draws one)",
                     f"write {options.line('conditioning_multidataset_sampling', 'combined')}")  # fmt: skip


def _references(entry: Mapping[str, Any], masks: list[Any]) -> int:
    names = entry.get("conditioning")
    return len([name for name in names if name not in masks]) if isinstance(names, list) else 0

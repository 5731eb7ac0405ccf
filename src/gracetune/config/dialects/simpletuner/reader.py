"""Reads SimpleTuner's configs: JSON, TOML or env files, and the files they name.

`keys` has the options that have no effect here or are not supported. Each of the other modules reads one part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from gracetune.config import native
from gracetune.config.base import file_name
from gracetune.config.dialects import gh200
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.adapter import ADAPTER, LORA, LYCORIS, PER_MODULE, PRESET
from gracetune.config.dialects.simpletuner.dataset import ENTRY, SHUFFLE
from gracetune.config.dialects.simpletuner.dataset_keys import AUDIO, GENERATED, INHERITED, PARQUET, VIDEO
from gracetune.config.dialects.simpletuner.dataset_sources import COMPOSITE, FILTER, HUGGINGFACE, WEBSHART
from gracetune.config.dialects.simpletuner.datasets import BACKEND, EMBEDS, MIXING, read_datasets
from gracetune.config.dialects.simpletuner.files import ENV_NAMES, line
from gracetune.config.dialects.simpletuner.keys import (
    ALIASES,
    GATED,
    NOT_DONE,
    NOT_USED,
    PASSED_ON,
    WITHOUT_EFFECT,
    Off,
)
from gracetune.config.dialects.simpletuner.model import MODEL, read_family, reject_untrained_flavour
from gracetune.config.dialects.simpletuner.optimizer import OPTIMIZER
from gracetune.config.dialects.simpletuner.option_block import bare, collect, unwrapped
from gracetune.config.dialects.simpletuner.training import ROUTE, TRAINING, TREAD
from gracetune.config.dialects.simpletuner.validation import INPUT, PROMPT, VALIDATION
from gracetune.config.dialects.table import Effect, Key, KeyRule, KeyTable, apply, decline
from gracetune.config.dialects.values import as_text, is_off
from gracetune.config.draft import OUR_DEFAULT, Draft
from gracetune.config.environment import Environment
from gracetune.config.families import FAMILIES, flavours
from gracetune.config.syntax import Document

_ENTRY_MARKS = frozenset({"instance_data_dir", "instance_data_root", "dataset_type", "cache_dir_vae"})


def looks_like(data: Any) -> bool:
    data = unwrapped(data)
    if isinstance(data, list):
        return _are_entries(data)
    if not isinstance(data, Mapping) or "job" in data:
        return False
    names = {bare(key) for key in data}
    dashed = any(str(key).startswith("--") for key in data)
    return dashed or bool(names & _MARKS) or _are_entries(data.get("datasets"))


def _are_entries(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) and _ENTRY_MARKS & set(item) for item in value)


def read(document: Document, draft: Draft, environment: Environment) -> None:
    options = collect(document, draft, environment, SUPPORTED)
    family = read_family(options)
    if family is None or reject_untrained_flavour(options, family):
        _put_placeholders(draft)
        return
    for table in (IDENTITY, MODEL, ADAPTER, TRAINING, OPTIMIZER, VALIDATION):
        apply(options, table, family)
    gh200.read_gh200(options)
    count = read_datasets(options, family, environment)
    apply(options, OURS, family)
    for key in NOT_DONE:
        if key.name in options:
            decline(options, key)
    _list_unused(options, family, count)
    options.reading.note_unused()


def _put_placeholders(draft: Draft) -> None:
    """Put placeholders for everything that is required, so that only the unsupported model is reported."""
    family = FAMILIES[0]
    dataset = {"id": "unread", "path": "unread", "dataset_type": flavours(family)[0].makes}
    stand_in = {"name": "unread", "output_dir": "unread", "model": {"family": family}, "training": {"max_steps": 1},
                "datasets": [dataset]}  # fmt: skip
    draft.put_tree((), stand_in, OUR_DEFAULT)


def _output(options: PeerBlock, family: str) -> None:
    if "output_dir" not in options:
        hint = f"add {line(options, 'output_dir', 'output/my-run')}"
        options.draft.missing(("output_dir",), "output_dir", "a folder for the results", hint)
    options.put("output_dir", ("output_dir",))


def _name(options: PeerBlock, family: str) -> None:
    if "tracker_run_name" in options:
        options.put("tracker_run_name", ("name",), _as_file_name)
    elif isinstance(options.get("output_dir"), str):
        folder = PurePath(options.get("output_dir")).name
        options.assign(("name",), file_name(folder) or "run", "output_dir")
    else:
        options.draft.reported_missing.add(("name",))


def _as_file_name(value: Any) -> Any:
    """Convert the run's name to a file name, because adapter files are named after it."""
    value = as_text(value)
    return file_name(value) if isinstance(value, str) else value


def _our_sections(options: PeerBlock, family: str) -> None:
    key = native.VERSION_KEY
    if key in options:
        native.read_block(options.take(key), options.key(key), options.file, options.draft)


def _list_unused(options: PeerBlock, family: str, count: int) -> None:
    """List the options that had no effect. Without a valid family their effect is unknown, and fewer are listed."""
    active = [OPTIONS.keys[name] for name in options.values if not is_off(options.get(name))]
    for key in active:
        if key.effect is Effect.NOTED and key.note != WITHOUT_EFFECT:
            options.list_unused(key.note, key.name)
    if not family:
        return
    rejected = {problem.key for problem in options.draft.unsupported}
    used_keys = options.used | set(INHERITED) | (set() if count else {*PASSED_ON})
    own = {*OURS, *gh200.GUIDES, "datasets", "data_backend"}
    idle = [key.name for key in active if key.note == WITHOUT_EFFECT and options.key(_switch(key)) not in rejected]
    idle += [key.name for key in active if key.effect is Effect.REJECTED and _is_inert(options, key)]
    idle += [key.name for key in active if key.effect is Effect.ACTS and key.name not in used_keys | own]
    options.list_unused(WITHOUT_EFFECT, *idle)


def _switch(key: Key) -> str:
    return key.unless.behind if isinstance(key.unless, Off) else ""


def _is_inert(options: PeerBlock, key: Key) -> bool:
    off = key.unless
    return isinstance(off, Off) and not off.at_default(options.get(key.name)) and off.is_inert(options, key.name)


IDENTITY: KeyTable[str] = KeyTable(KeyRule(_output, "output_dir"), KeyRule(_name, "tracker_run_name output_dir"))
OURS: KeyTable[str] = KeyTable(KeyRule(_our_sections, native.VERSION_KEY))
_READ = (IDENTITY, MODEL, ADAPTER, LORA, TRAINING, OPTIMIZER, VALIDATION, gh200.GUIDES, MIXING, PASSED_ON, OURS)
OPTIONS: KeyTable[Any] = KeyTable(
    *(entry for table in _READ for entry in table.entries),
    *NOT_USED,
    *NOT_DONE,
    *GATED,
    expected="an option SimpleTuner knows",
)
"""Every option at the top of a config."""
SUPPORTED = frozenset({*OPTIONS, *ALIASES})
_MARKS = frozenset(name for name in SUPPORTED if "_" in name) - {"output_dir"} | set(ENV_NAMES)
"""Option names by which a SimpleTuner file is recognized. Plain words such as `seed` occur in other formats too."""

TABLES: Mapping[str, KeyTable[Any]] = {
    "the file": OPTIONS, "lycoris_config": LYCORIS, "lycoris_config.apply_preset": PRESET,
    "lycoris_config.apply_preset.module_algo_map{}": PER_MODULE, "user_prompt_library{}": PROMPT,
    "validation_input[]": INPUT, "tread_config": TREAD, "tread_config.routes[]": ROUTE,
    "datasets[]": ENTRY, "datasets[].video": VIDEO, "datasets[].audio": AUDIO,
    "datasets[].conditioning": GENERATED, "datasets[].parquet": PARQUET,
    "datasets[].caption_shuffle": SHUFFLE, "datasets[].in_memory": gh200.IN_MEMORY,
    "datasets[].huggingface": HUGGINGFACE, "datasets[].huggingface.filter_func": FILTER,
    "datasets[].huggingface.composite_image_config": COMPOSITE, "datasets[].webshart": WEBSHART,
    **{f"datasets[] of {kind}": table for kind, table in EMBEDS.items()}, "data_backend": BACKEND,
    "cache_config": gh200.CACHE, "gh200_optimizations": gh200.OPTIMIZATIONS,
}  # fmt: skip

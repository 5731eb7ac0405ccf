"""SimpleTuner's dialect: `config.json`, TOML or env files, and the files they name.

`keys` says what each option is to us; the other modules read one part of a config each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from gracetune.config import native
from gracetune.config.base import file_name
from gracetune.config.dialects.simpletuner.adapter import read_adapter
from gracetune.config.dialects.simpletuner.collect import bare, collect, unwrapped
from gracetune.config.dialects.simpletuner.dataset import DatasetReader
from gracetune.config.dialects.simpletuner.dataset_keys import INHERITED
from gracetune.config.dialects.simpletuner.datasets import read_datasets
from gracetune.config.dialects.simpletuner.env import ENV_NAMES
from gracetune.config.dialects.simpletuner.gh200 import read_gh200
from gracetune.config.dialects.simpletuner.keys import (
    GATED,
    GATED_NAMES,
    HARMLESS,
    INERT,
    KNOWN,
    PASSED_ON,
    READ,
    REFUSED,
    REMOVED_UPSTREAM,
    SAMPLES_ONLY,
    Refusal,
)
from gracetune.config.dialects.simpletuner.model import lacks_flavour, read_family, read_model
from gracetune.config.dialects.simpletuner.optimizer import read_optimizer
from gracetune.config.dialects.simpletuner.training import read_training
from gracetune.config.dialects.simpletuner.validation import read_validation
from gracetune.config.dialects.simpletuner.values import Options, as_text, is_off
from gracetune.config.draft import OUR_DEFAULT, Draft
from gracetune.config.environment import Environment
from gracetune.config.syntax import Document

_MARKS = frozenset(name for name in KNOWN if "_" in name) - {"output_dir"} | set(ENV_NAMES)
"""Names that only SimpleTuner gives its options; plain words such as `seed` say nothing about whose file it is."""
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
    options = collect(document, draft, environment)
    family = read_family(options, draft)
    if family is None or lacks_flavour(options, draft, family):
        _nothing_more_to_say(draft)
        return
    _identity(options, draft)
    read_model(options, draft, family)
    read_adapter(options, draft, family)
    read_training(options, draft, family)
    read_optimizer(options, draft)
    read_validation(options, draft)
    read_gh200(options, draft)
    datasets = read_datasets(options, draft, family, environment)
    if native.VERSION_KEY in options:
        native.read_block(options.take(native.VERSION_KEY), options.key(native.VERSION_KEY), options.file, draft)
    _refusals(options, draft, family)
    _notes(options, draft, family, datasets)


def _nothing_more_to_say(draft: Draft) -> None:
    """A model we do not train is one problem, not fifty: everything else is taken for granted."""
    stand_in = {"name": "unread", "output_dir": "unread", "model": {"family": "wan"}, "training": {"max_steps": 1},
                "datasets": [{"id": "unread", "path": "unread", "dataset_type": "video"}]}  # fmt: skip
    draft.put_tree((), stand_in, OUR_DEFAULT)


def _identity(options: Options, draft: Draft) -> None:
    if "output_dir" not in options:
        hint = f"add {options.line('output_dir', 'output/my-run')}"
        draft.missing(("output_dir",), "output_dir", "a folder for the results", hint)
    options.put(draft, "output_dir", ("output_dir",))
    if "tracker_run_name" in options:
        options.put(draft, "tracker_run_name", ("name",), _as_file_name)
    elif isinstance(options.get("output_dir"), str):
        folder = PurePath(options.get("output_dir")).name
        draft.put(("name",), file_name(folder) or "run", options.origin("output_dir"))
    else:
        draft.reported_missing.add(("name",))


def _as_file_name(value: Any) -> Any:
    """Adapter files are named after the run."""
    value = as_text(value)
    return file_name(value) if isinstance(value, str) else value


def _refusals(options: Options, draft: Draft, family: str) -> None:
    for name, refusal in REFUSED.items():
        if name in options and _acts(options, name, refusal, family):
            options.refuse(draft, name, refusal.why)


def _acts(options: Options, name: str, refusal: Refusal, family: str) -> bool:
    value = options.get(name)
    if refusal.families and not family:
        return False  # a family that has to be mended first
    if is_off(value, refusal.default) or (refusal.same_as and value == options.get(refusal.same_as)):
        return False
    if refusal.switch and is_off(options.get(refusal.switch), 0):
        return False
    return not _is_inert(options, refusal, family)


def _is_inert(options: Options, refusal: Refusal, family: str) -> bool:
    """Whether SimpleTuner itself would do nothing with it in a config like this one."""
    if refusal.families and family not in refusal.families:
        return True
    if refusal.unless and options.is_on(refusal.unless):
        return True
    return bool(refusal.lora_type) and (options.get("lora_type") or "standard") != refusal.lora_type


def _notes(options: Options, draft: Draft, family: str, datasets: DatasetReader) -> None:
    active = [name for name in options.values if not is_off(options.get(name))]
    refused = {problem.key for problem in draft.unsupported}
    behind_refused = {name for switch, gated in GATED.items() if options.key(switch) in refused for name in gated}
    without_effect = [name for name in active if name in INERT or name in GATED_NAMES - behind_refused]
    without_effect += [name for name in active if name in REFUSED and not _at_default(options, name)
                       and _is_inert(options, REFUSED[name], family)]  # fmt: skip
    heard = options.used | set(INHERITED) | (set() if datasets.count else PASSED_ON)
    without_effect += [name for name in active if name in (READ | PASSED_ON) - heard]
    lists = {
        "not used here (speed, storage, publishing, bucketing: gracetune decides)": [
            name for name in active if name in HARMLESS or name in REMOVED_UPSTREAM
        ],
        "not used here (only sample images and measurements would differ)": [
            name for name in active if name in SAMPLES_ONLY
        ],
        # of a family that has to be mended first nobody knows what it would do with them
        "without effect, in SimpleTuner too, next to the other settings": without_effect if family else [],
    }
    for what, names in lists.items():
        if names:
            draft.note(f"{what}: {', '.join(dict.fromkeys(options.key(name) for name in names))}")
    if datasets.harmless:
        draft.note(f"in datasets, not needed here: {', '.join(dict.fromkeys(datasets.harmless))}")
    if any(options.is_on(name) for name in ("push_to_hub", "push_checkpoints_to_hub")):
        draft.note("nothing is uploaded: push the output folder yourself when the run is done")


def _at_default(options: Options, name: str) -> bool:
    return is_off(options.get(name), REFUSED[name].default)

"""Reads the blocks that the GH200 guides add to SimpleTuner files and ai-toolkit processes.

They are `cache_config`, `gh200_optimizations`, `in_memory`, `use_gh200_trainer`, and memory options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock, PeerFile
from gracetune.config.dialects.table import Key, KeyRule, KeyTable, apply, supported_block
from gracetune.config.dialects.values import as_flag, as_given, as_list, as_number, is_number
from gracetune.config.draft import Draft, Path
from gracetune.config.memory_options import OPTION_NAMES

GUIDE = "GH200 guide"
_RAMP_STEPS = 400
"""Micro-batches of the batch ramp in the guide's example, for configs that enable a ramp without a length."""
_FLAGS = ("use_uvm", "enable_uvm_hints")
_SWITCH = "enable_batch_size_rampup"


def read_gh200(options: PeerBlock) -> None:
    apply(options, GUIDES, None)


def read_guide_options(values: Mapping[str, Any], draft: Draft) -> None:
    """Read a mapping that has only the guides' options, as an overlay extracts them from a config."""
    read_gh200(PeerBlock(PeerFile(GUIDE, draft), {name: value for name, value in values.items() if value is not None}))


def read_in_memory(block: PeerBlock, dataset: Path) -> None:
    """Read a dataset's `in_memory` block, if it has one."""
    staging = supported_block(block, "in_memory", IN_MEMORY)
    if staging is not None:
        apply(staging, IN_MEMORY, None, dataset)


def _optimizations(options: PeerBlock, _: None) -> None:
    gh200 = supported_block(options, "gh200_optimizations", OPTIMIZATIONS)
    if gh200 is not None:
        apply(gh200, OPTIMIZATIONS, None)
    _ramp(options, gh200)


def _ramp(options: PeerBlock, gh200: PeerBlock | None) -> None:
    """Read the batch ramp. An initial size at the top level also turns it on, as in the guides' checklist."""
    ramp, draft = ("training", "ramp"), options.draft
    if gh200 is not None and gh200.get(_SWITCH) is not None:
        gh200.put(_SWITCH, (*ramp, "enabled"), as_flag)
    elif "initial_effective_batch_size" in options:
        options.assign((*ramp, "enabled"), True, "initial_effective_batch_size")
    if draft.get((*ramp, "enabled")) is not True:
        return
    product = _batch(draft, "batch_size") * _batch(draft, "gradient_accumulation_steps")
    for name in ("initial_effective_batch_size", "target_effective_batch_size"):
        draft.default((*ramp, name), product, GUIDE, name)
    if "batch_rampup_steps" not in options and (gh200 is None or "batch_rampup_steps" not in gh200):
        draft.default((*ramp, "batch_rampup_steps"), _RAMP_STEPS, GUIDE, "batch_rampup_steps")
        first, last = (draft.get((*ramp, f"{name}_effective_batch_size")) for name in ("initial", "target"))
        if first != last:
            draft.note(f"batch_rampup_steps is not given: the batch grows over the guide's {_RAMP_STEPS} micro-batches")


def _batch(draft: Draft, name: str) -> int:
    value = draft.get(("training", name))
    return int(value) if is_number(value) and 0 < value < 1_000_000 else 1


def _cache(options: PeerBlock, _: None) -> None:
    cache = supported_block(options, "cache_config", CACHE)
    if cache is not None:
        apply(cache, CACHE, None)


def _trainer(options: PeerBlock, _: None) -> None:
    if "use_gh200_trainer" not in options:
        return
    value = as_flag(options.get("use_gh200_trainer"))
    if not isinstance(value, bool):
        options.problem("use_gh200_trainer", "true or false", "write true")
    elif value:
        options.note(f"{options.key('use_gh200_trainer')}: there is one trainer, so this has no effect")
    else:
        options.note(f"{options.key('use_gh200_trainer')}: there is one trainer; to do without unified memory set "
                     "enable_uvm_hints and use_uvm to false")  # fmt: skip


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


_MEMORY = tuple(
    Key(name, ("memory", name), as_flag if name in _FLAGS else as_number) for name in (*OPTION_NAMES, _FLAGS[1])
)
_RAMP = tuple(
    Key(name, ("training", "ramp", name), as_number)
    for name in ("initial_effective_batch_size", "target_effective_batch_size", "batch_rampup_steps")
)
OPTIMIZATIONS: KeyTable[None] = KeyTable(*_MEMORY, *_RAMP, Key(_SWITCH))
CACHE: KeyTable[None] = KeyTable(
    Key("vae_cache_type", ("cache", "vae_cache_type"), _lower),
    Key("text_cache_type", ("cache", "text_cache_type"), _lower),
    Key("cache_dir", ("cache", "cache_dir"), as_given),
    Key("persistent_cache", ("cache", "persistent_cache"), as_flag),
)
IN_MEMORY: KeyTable[None] = KeyTable(
    Key("compression", ("in_memory", "compression"), lambda value: value if value else "none"),
    Key("num_workers", ("in_memory", "num_workers"), as_number),
    Key("memory_limit_gb", ("in_memory", "memory_limit_gb"), as_number),
    Key("file_extensions", ("in_memory", "file_extensions"), as_list),
)
"""Its paths are relative to one of `datasets` of a `RunConfig`."""
GUIDES: KeyTable[None] = KeyTable(
    *_MEMORY,
    *_RAMP,
    KeyRule(_optimizations, "gh200_optimizations"),
    KeyRule(_cache, "cache_config"),
    KeyRule(_trainer, "use_gh200_trainer"),
)
"""At the top of a SimpleTuner file."""
BLOCKS = ("cache_config", "gh200_optimizations")
"""The keys of `GUIDES` that an ai-toolkit process can have."""

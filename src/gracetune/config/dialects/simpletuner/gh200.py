"""The blocks that the GH200 guides add: `cache_config`, `gh200_optimizations`, `in_memory`, `use_gh200_trainer`, memory
options. SimpleTuner files and ai-toolkit processes have them alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracetune.config.alloc_conf import OPTION_NAMES
from gracetune.config.dialects.simpletuner.dataset_keys import IN_MEMORY_KEYS
from gracetune.config.dialects.simpletuner.values import Converter, Options, as_flag, as_list, as_number, is_number
from gracetune.config.draft import Draft, Path
from gracetune.config.spelling import misspelt

GUIDE = "GH200 guide"
_RAMP_STEPS = 400
"""What the guide's example says, for configs that ask for a ramp without saying how long."""

_MEMORY_KEYS = (*OPTION_NAMES, "enable_uvm_hints")
_FLAGS = ("use_uvm", "enable_uvm_hints")
_RAMP_KEYS = ("initial_effective_batch_size", "target_effective_batch_size", "batch_rampup_steps")
_SWITCH = "enable_batch_size_rampup"


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


_CACHE_KEYS: dict[str, Converter | None] = {
    "vae_cache_type": _lower,
    "text_cache_type": _lower,
    "cache_dir": None,
    "persistent_cache": as_flag,
}


_IN_MEMORY: dict[str, Converter] = {
    "compression": lambda value: value if value else "none",
    "num_workers": as_number,
    "memory_limit_gb": as_number,
    "file_extensions": as_list,
}
BLOCKS = ("cache_config", "gh200_optimizations")
"""What of this an ai-toolkit process may have."""


def put_in_memory(options: Options, draft: Draft, dataset: Path) -> None:
    """How one dataset is staged."""
    for name in IN_MEMORY_KEYS:
        options.put(draft, name, (*dataset, "in_memory", name), _IN_MEMORY[name])


def read_gh200(options: Options, draft: Draft) -> None:
    _memory(options, draft)
    _ramp_values(options, draft)
    gh200 = known_block(options, draft, "gh200_optimizations", (*_MEMORY_KEYS, *_RAMP_KEYS, _SWITCH))
    if gh200 is not None:
        _memory(gh200, draft)
        _ramp_values(gh200, draft)
    _ramp(options, gh200, draft)
    cache = known_block(options, draft, "cache_config", tuple(_CACHE_KEYS))
    if cache is not None:
        for name, convert in _CACHE_KEYS.items():
            cache.put(draft, name, ("cache", name), convert)
    if "use_gh200_trainer" in options:
        _trainer(options, draft)


def known_block(options: Options, draft: Draft, name: str, known: tuple[str, ...]) -> Options | None:
    """A nested mapping whose keys are all known; what is not known is reported with the nearest name."""
    value = options.take(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        options.problem(draft, name, f"a mapping with {', '.join(known[:3])}, …", f'write "{name}": {{…}}')
        return None
    block = Options.block(value, options.file, f"{options.key(name)}.")
    for key in block.values:
        if key not in known:
            block.problem(draft, key, f"one of {', '.join(known)}", misspelt(key, known))
    return block


def _memory(options: Options, draft: Draft) -> None:
    for name in _MEMORY_KEYS:
        options.put(draft, name, ("memory", name), as_flag if name in _FLAGS else as_number)


def _ramp_values(options: Options, draft: Draft) -> None:
    for name in _RAMP_KEYS:
        options.put(draft, name, ("training", "ramp", name), as_number)


def _ramp(options: Options, gh200: Options | None, draft: Draft) -> None:
    """On where it is switched on, or where an initial size stands at the top level, as the checklist says it."""
    ramp = ("training", "ramp")
    switch = gh200.get(_SWITCH) if gh200 is not None else None
    if gh200 is not None and switch is not None:
        gh200.put(draft, _SWITCH, (*ramp, "enabled"), as_flag)
    elif "initial_effective_batch_size" in options:
        draft.put((*ramp, "enabled"), True, options.origin("initial_effective_batch_size"))
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


def _trainer(options: Options, draft: Draft) -> None:
    value = as_flag(options.get("use_gh200_trainer"))
    if not isinstance(value, bool):
        options.problem(draft, "use_gh200_trainer", "true or false", "write true")
    elif value:
        draft.note(f"{options.key('use_gh200_trainer')}: there is one trainer, so this switches nothing")
    else:
        draft.note(f"{options.key('use_gh200_trainer')}: there is one trainer; to do without unified memory set "
                   "enable_uvm_hints and use_uvm to false")  # fmt: skip

"""Take the blocks that upstream does not know out of its config, and parse them as gracetune does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from gracetune.extension import (
    ALLOCATOR_OPTIONS,
    BatchRamp,
    Cache,
    ConfigError,
    Draft,
    Environment,
    MemoryOptions,
    Origin,
    Problem,
    Section,
    memory_settings,
    read_guide_options,
)

BLOCKS = ("cache_config", "gh200_optimizations")
_RAMP = ("initial_effective_batch_size", "target_effective_batch_size", "batch_rampup_steps")
OURS = (*BLOCKS, *ALLOCATOR_OPTIONS, "enable_uvm_hints", *_RAMP, "use_gh200_trainer")
"""Top-level keys of the guides' configs that upstream would reject as unknown."""
_S = TypeVar("_S", bound=Section)


@dataclass(frozen=True)
class OverlayOptions:
    """The requested features, except datasets of type `in_memory`."""

    cache: Cache = field(default_factory=Cache)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    ramp: BatchRamp = field(default_factory=BatchRamp)
    notes: tuple[str, ...] = ()

    @property
    def wants_caches(self) -> bool:
        return {self.cache.vae_cache_type, self.cache.text_cache_type} != {"disk"}

    @property
    def wants_memory(self) -> bool:
        """Whether the memory layer is needed, for its arena or for a cache in managed memory."""
        requested = (self.cache.vae_cache_type, self.cache.text_cache_type)
        return self.memory.use_uvm or "unified_memory" in requested

    @property
    def wants_placement(self) -> bool:
        return bool(self.memory.enable_uvm_hints)

    @property
    def wants_anything(self) -> bool:
        return self.wants_caches or self.wants_memory or self.wants_placement or self.ramp.enabled


def split_mapping(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into upstream's keys and ours. Keys may have upstream's leading dashes."""
    ours = {key.lstrip("-"): value for key, value in config.items() if key.lstrip("-") in OURS}
    return {key: value for key, value in config.items() if key.lstrip("-") not in OURS}, ours


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split arguments into upstream's and ours, such as `--cache_config=JSON` or `--cache_config JSON`."""
    rest: list[str] = []
    ours: dict[str, Any] = {}
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        name, equals, value = argument.partition("=")
        key = name.lstrip("-")
        if key not in OURS or not name.startswith("-"):
            rest.append(argument)
            continue
        if not equals and pending and not pending[0].startswith("--"):
            equals, value = "=", pending.pop(0)
        ours[key] = _parsed(key, value) if key in BLOCKS else value if equals else True
    return rest, ours


def _parsed(block: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        hint = f'--{block}=\'{{"vae_cache_type": "unified_memory"}}\''
        raise ConfigError([Problem(f"--{block}", text or "nothing", "a JSON object", hint)]) from error


def read_options(
    blocks: Mapping[str, Any], environment: Environment, *, batch_size: int, accumulation: int, file: str
) -> OverlayOptions:
    """Parse our options; ConfigError lists all problems. The config overrides the environment's memory options."""
    draft = Draft(file)
    found = memory_settings(environment)
    draft.problems += found.problems
    for name, setting in found.settings.items():
        draft.put(("memory", name), setting.value, Origin("environment", setting.variable))
    for name, value in (("batch_size", batch_size), ("gradient_accumulation_steps", accumulation)):
        draft.put(("training", name), value, Origin("file", name, file))
    read_guide_options(blocks, draft)
    cache = _section(Cache, draft, ("cache",))
    if "unified_memory" in (cache.vae_cache_type, cache.text_cache_type):
        draft.default(("memory", "enable_uvm_hints"), True, "unified_memory caches")
    memory = _section(MemoryOptions, draft, ("memory",))
    ramp = _section(BatchRamp, draft, ("training", "ramp"))
    if draft.problems:
        raise ConfigError(draft.problems)
    return OverlayOptions(cache, memory, ramp, (*draft.notes, *_ignored(cache)))


def _section(kind: type[_S], draft: Draft, path: tuple[str, ...]) -> _S:
    try:
        return kind.model_validate(draft.get(path) or {})
    except ValidationError as error:
        for one in error.errors():
            key_path = (*path, *one["loc"])
            origin = draft.origin(key_path)
            key = origin.key if origin is not None and origin.key else ".".join(map(str, key_path))
            draft.problems.append(Problem(key, repr(one["input"]), one["msg"], f"correct or remove {key}", draft.file))
        return kind()


def _ignored(cache: Cache) -> list[str]:
    notes = []
    if cache.cache_dir is not None:
        notes.append(
            "cache_config.cache_dir is not used: upstream's files are read where cache_dir_vae and cache_dir put them"
        )
    if not cache.persistent_cache:
        notes.append("cache_config.persistent_cache is not used: upstream's cache files stay upstream's, and stay")
    return notes

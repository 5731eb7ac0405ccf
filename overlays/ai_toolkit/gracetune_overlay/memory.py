"""The `memory` feature: gracetune's unified-memory layer in ai-toolkit's training, with its governor after every
step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gracetune import gh200
from gracetune.extension import (
    ALLOCATOR_VARIABLES,
    ConfigError,
    Environment,
    MemoryOptions,
    MemoryPressure,
    Unavailable,
    UnifiedMemory,
    claim_allocator_options,
    memory_settings,
    probe,
    torch_accepts_uvm_options,
)

from .hooks import Around, Function
from .points import END_STEP, Point

if TYPE_CHECKING:
    from gracetune.extension import ManagedHeap

Opener = Callable[..., UnifiedMemory | Unavailable]
_NO_GPU: Final = "not available: this run has no GPU whose memory could overflow"


def merged_options(written: MemoryOptions, environment: Environment) -> MemoryOptions:
    """The options of the block, completed from the environment. ConfigError lists all problems of the environment."""
    found = memory_settings(environment)
    if found.problems:
        raise ConfigError(found.problems)
    given = written.model_dump(include=written.model_fields_set)
    return MemoryOptions.model_validate({name: each.value for name, each in found.settings.items()} | given)


class MemoryFeature:
    """`opener` opens the memory layer; tests pass one that needs no GPU."""

    def __init__(
        self,
        written: MemoryOptions,
        environment: Environment,
        report: Callable[[str], None],
        opener: Opener = UnifiedMemory.open,
    ) -> None:
        self.options = merged_options(written, environment)
        self._environment, self._report, self._opener = environment, report, opener
        self._layer: UnifiedMemory | None = None
        self._why = "not opened yet"
        self._samples = 0
        self._stats: dict[str, float] = {}

    def open(self, process: Any) -> None:
        for line in claim_allocator_options(torch_takes_them=torch_accepts_uvm_options()):
            self._report(line)
        if "enable_uvm_hints" in self.options.model_fields_set:
            gh200.set_uvm_hint_override(self.options.enable_uvm_hints)
        device = process.device_torch
        if device.type != "cuda":
            self._rejected(_NO_GPU)
            return
        allocator = next((text for name in ALLOCATOR_VARIABLES if (text := self._environment.get(name))), "")
        local_ranks = int(self._environment.get("LOCAL_WORLD_SIZE") or 1)
        layer = self._opener(
            self.options, probe(), device=device.index or 0, allocator_string=allocator, local_ranks=local_ranks
        )
        if isinstance(layer, Unavailable):
            self._rejected(str(layer))
            return
        self._layer, self._why = layer, ""
        gh200.attach(layer)
        self._report(f"overflow arena: {layer.arena_size.reason}")

    def _rejected(self, why: str) -> None:
        self._why = why
        self._report(f"memory: {why}")

    def managed(self) -> ManagedHeap | str:
        """The managed heap, or why there is none."""
        return self._why if self._layer is None else self._layer.heap

    def hooks(self) -> list[tuple[Point, Around]]:
        return [] if self._layer is None else [(END_STEP, self._end_step)]

    def _end_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        assert self._layer is not None
        tight = self._layer.memory_is_tight
        self._samples += 1
        try:
            decision = self._layer.step()
        except MemoryPressure:
            process = args[0]
            self._report(f"main memory is nearly exhausted: saving step {process.step_num}, then stopping")
            process.save(process.step_num)
            raise
        if self._layer.memory_is_tight != tight:
            self._report(decision.reason)
        return result

    def report(self) -> dict[str, Any]:
        return {"available": not self._why, "why_not": self._why, "samples": self._samples, "stats": self._stats}

    def close(self) -> None:
        gh200.set_uvm_hint_override(None)
        if self._layer is None:
            return
        if not self._samples:
            self._report(
                "memory: the governor never ran: no step ended, or this trainer skips ai-toolkit's end_step_hook"
            )
        self._stats = {name: value for name, value in self._layer.stats().items() if name.startswith("uvm.")}
        self._layer.close()
        self._layer = None

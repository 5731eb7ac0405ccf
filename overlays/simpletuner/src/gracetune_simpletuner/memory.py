"""gracetune's memory layer in upstream's training, with its governor at step boundaries and hints for batches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gracetune import gh200
from gracetune.extension import ALLOCATOR_VARIABLES, Unavailable, UnifiedMemory, probe
from gracetune_simpletuner.errors import stopping
from gracetune_simpletuner.hooks import Around, check_reads
from gracetune_simpletuner.overlay import Overlay
from gracetune_simpletuner.points import hooks_of

if TYPE_CHECKING:
    from gracetune.extension import ManagedHeap


class Layer:
    """The memory layer of this process's GPU, or why there is none."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.device: int | None = None
        self.why_not = "the memory layer was not requested"
        self._opened: UnifiedMemory | None = None
        self._checked_trainer = False

    @property
    def heap(self) -> ManagedHeap | None:
        return None if self._opened is None else self._opened.heap

    def wrappers(self) -> dict[str, Around]:
        names = [hook.target for hook in hooks_of("memory")]
        return dict(zip(names, (partial(_before_models, self), partial(_step_boundary, self)), strict=True))

    def open(self) -> None:
        import torch

        if not torch.cuda.is_available():
            self.why_not = "there is no CUDA device"
            self._note_state(False, self.why_not)
            return
        self.device = torch.cuda.current_device()
        environment = self.overlay.environment
        opened = UnifiedMemory.open(
            self.overlay.options.memory,
            probe(),
            device=self.device,
            allocator_string=next(filter(None, map(environment.get, ALLOCATOR_VARIABLES)), ""),
            local_ranks=self.overlay.launch.local_count,
        )
        if isinstance(opened, Unavailable):
            self.why_not = str(opened)
            self._note_state(False, self.why_not)
            return
        self._opened = opened
        gh200.attach(opened)
        self.overlay.at_end.append(self._close)
        self._note_state(True, str(opened.arena_size.reason), arena_bytes=opened.arena_size.bytes)

    def at_boundary(self, trainer: Any) -> None:
        if not self._checked_trainer:
            check_reads("Trainer", trainer)
            check_reads("Accelerator", trainer.accelerator)
            self._checked_trainer = True
        if trainer.accelerator.sync_gradients:  # false for micro-batches inside an optimizer step
            self.step()

    def step(self) -> None:
        if self._opened is not None:
            self._opened.step()
            self.overlay.telemetry.of("memory").add("governor_samples")

    def _close(self) -> None:
        if self._opened is not None:
            stats = gh200.memory_stats(self.device or 0)
            own = {name: value for name, value in stats.items() if name.startswith("uvm.")}
            self.overlay.telemetry.emit("memory_stats", stats=own)
            self._opened.close()
            self._opened = None

    def _note_state(self, opened: bool, reason: str, **content: Any) -> None:
        words = "open" if opened else "not available"
        self.overlay.note(f"memory layer {words}: {reason}", event="memory", opened=opened, reason=reason, **content)


def activate(overlay: Overlay) -> Layer:
    """Attach the memory layer and hints as the options request."""
    layer = Layer(overlay)
    if overlay.options.wants_memory:
        overlay.activate("memory", layer.wrappers())
    if overlay.options.wants_placement:
        gh200.set_uvm_hint_override(True)
        (target,) = (hook.target for hook in hooks_of("placement"))
        overlay.activate("placement", {target: partial(_place_batch, overlay)})
    return layer


def _before_models(layer: Layer, original: Any, *arguments: Any, **options: Any) -> Any:
    with stopping():
        layer.open()
    return original(*arguments, **options)


def _step_boundary(layer: Layer, original: Any, trainer: Any, *arguments: Any, **options: Any) -> Any:
    with stopping():
        layer.at_boundary(trainer)
    return original(trainer, *arguments, **options)


def _place_batch(overlay: Overlay, original: Any, trainer: Any, *arguments: Any, **options: Any) -> Any:
    batch = original(trainer, *arguments, **options)
    if batch:
        counts = overlay.telemetry.of("placement")
        counts.add("batches")
        hint = gh200.optimize_batch_for_gh200(batch)
        counts.add("hinted_bytes", hint.bytes)
        if not hint.tensors and not hint:
            counts.reject("batches", hint.reason)
        for one in hint.tensors.values():
            if one:
                counts.add("tensors")
            else:
                counts.reject("tensors", one.reason)
    return batch

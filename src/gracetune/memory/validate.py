"""Validation of unified memory by small experiments, each with its observations.

The experiments use at most 1 GiB of managed memory and never more than the GPU has free. Exceeding the GPU's memory is
tested by `hardware.allocation`, which first checks whether that is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gracetune.hardware.checks import Check
from gracetune.memory.arena import OverflowArena
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.experiment_tools import small_gpu, synchronize
from gracetune.memory.managed import ManagedBuffer, ManagedHeap
from gracetune.memory.native import HOST, Unavailable, Uvm, load
from gracetune.memory.transport import LinkSpeeds, measure_link
from gracetune.units import GIB, MIB, format_bytes

PROBE: Final = 256 * MIB
"""Bytes of the managed buffer of an experiment."""
ARENA: Final = 512 * MIB
"""Bytes of the overflow arena in its experiment."""
_REPORT = "please report it with the output of `gracetune doctor --json`"


def validate(device: int = 0, *, one_pool: bool = False) -> Iterator[Check]:
    """Run the checks one by one. Stops if one fails that the others depend on.

    With `one_pool`, CPU and GPU share one memory, so the GPU's free memory does not show whether pages moved.
    """
    uvm = load()
    if isinstance(uvm, Unavailable):
        yield Check("uvm_native", "warn", f"unified memory is {uvm.reason}", uvm.remedy)
        return
    yield Check("uvm_native", "ok", _features(uvm), "")
    blocker = _blocker(uvm, device)
    if blocker is not None:
        yield blocker
        return
    heap = ManagedHeap(uvm, device, lambda: synchronize(device))
    for name, experiment in _EXPERIMENTS.items():
        yield _run(name, experiment, heap)
    yield _run("uvm_prefetch", lambda heap: _prefetch_both_ways(heap, one_pool), heap)


def _features(uvm: Uvm) -> str:
    have = [name for name, is_present in vars(uvm.features).items() if is_present]
    version = ".".join(str(part) for part in uvm.driver_version())
    return f"driver of CUDA {version} with {', '.join(have)}"


def _blocker(uvm: Uvm, device: int) -> Check | None:
    try:
        import torch
    except ImportError as error:
        return Check("uvm_torch", "fail", f"torch cannot be imported: {error}", "install a CUDA build of torch")
    if not torch.cuda.is_available():
        return Check(
            "uvm_torch", "fail", f"torch {torch.__version__} cannot use the GPU", "install a CUDA build of torch"
        )
    if not 0 <= device < torch.cuda.device_count():
        return Check("uvm_torch", "fail", f"no GPU {device}", f"--device 0 to {torch.cuda.device_count() - 1}")
    free, _ = uvm.memory_info(device)
    if free < 4 * GIB:
        return Check(
            "uvm_room", "warn", f"{format_bytes(free)} free on the GPU: not tested", "free 4 GiB and run this again"
        )
    return None


def _run(name: str, experiment: Callable[[ManagedHeap], str], heap: ManagedHeap) -> Check:
    import torch

    try:
        return Check(name, "ok", experiment(heap), "")
    except (UnifiedMemoryError, torch.cuda.OutOfMemoryError) as error:
        return Check(name, "fail", str(error).splitlines()[0], _REPORT)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise UnifiedMemoryError(what)


def _one_memory(heap: ManagedHeap) -> str:
    """The GPU reads what the CPU writes, and vice versa, without a copy."""
    import torch

    with heap.empty((PROBE // 4,), torch.int32, "host") as buffer:
        buffer.cpu().copy_(torch.randint(-1000, 1000, (PROBE // 4,), dtype=torch.int32))
        expected = int(buffer.cpu().sum())
        seen = int(buffer.cuda().sum())
        _expect(seen == expected, f"the CPU wrote numbers that sum to {expected}, the GPU read {seen}")
        buffer.cuda().add_(1)
        with buffer.host() as view:
            back = int(view.sum())
        _expect(back == expected + PROBE // 4, f"the GPU wrote {expected + PROBE // 4}, the CPU read {back}")
    return f"{format_bytes(PROBE)} written by the CPU and read by the GPU, and back"


def _hints_are_kept(heap: ManagedHeap) -> str:
    import torch

    with heap.empty((PROBE,), torch.uint8, "host") as buffer:
        _expect(buffer.state().preferred == HOST, f"preferred location reads {buffer.state().preferred}, not the host")
        _expect(heap.device in buffer.state().accessed_by, "the GPU is not in accessed-by")
        hint = buffer.rehome("device")
        _expect(hint.applied, hint.reason)
        _expect(buffer.state().preferred == heap.device, "the new preferred location does not read back")
    return "preferred location and accessed-by read back as given"


def _prefetch_both_ways(heap: ManagedHeap, one_pool: bool) -> str:
    import torch

    with heap.empty((PROBE,), torch.uint8, "host") as buffer:
        buffer.cpu().fill_(1)
        stream = torch.cuda.current_stream(heap.device).cuda_stream
        taken = _moves(heap, buffer, stream)
    if one_pool:
        return f"{format_bytes(PROBE)} asked to the GPU and back; with one pool nothing has to move"
    _expect(taken >= PROBE // 2, f"the GPU's free memory fell by {format_bytes(taken)} only")
    return f"{format_bytes(PROBE)} moved to the GPU and back, and its free memory went down and up"


def _moves(heap: ManagedHeap, buffer: ManagedBuffer, stream: int) -> int:
    """Bytes by which the GPU's free memory shrank. The driver reports only the prefetch request, not its effect."""
    before, _ = heap.uvm.memory_info(heap.device)
    buffer.prefetch("device", stream)
    synchronize(heap.device)
    available, _ = heap.uvm.memory_info(heap.device)
    _expect(buffer.state().last_prefetch == heap.device, "the last prefetch does not read back as the GPU")
    buffer.prefetch("host", stream)
    synchronize(heap.device)
    _expect(buffer.state().last_prefetch == HOST, "the last prefetch does not read back as the host")
    return before - available


def _overflow(heap: ManagedHeap) -> str:
    """When PyTorch may use little GPU memory, it allocates from the arena, and the data in it is correct."""
    import torch

    arena = OverflowArena(heap.uvm, heap.device, ARENA, "cpu_first")
    try:
        with small_gpu(heap.device, room=64 * MIB):
            held = [torch.full((64 * MIB // 4,), 1.0, device=f"cuda:{heap.device}") for _ in range(4)]
            spilled = arena.usage().active
            total = sum(float(tensor.sum()) for tensor in held)
            del held
    finally:
        arena.close()
    _expect(spilled > 0, "nothing spilled into the arena")
    _expect(total == 4 * 64 * MIB / 4, f"spilled tensors sum to {total:g}, not {64 * MIB:g}")
    _expect(heap.uvm.slot_stats(0).live_bytes == 0, "the arena did not give its memory back")
    return f"{format_bytes(spilled)} of 256 MiB spilled, read back right, and given back"


def _link(heap: ManagedHeap) -> str:
    return describe(measure_link(heap.device, heap).speeds)


def describe(speeds: LinkSpeeds) -> str:
    managed = speeds.managed
    ways = {"pinned copy": speeds.pinned_copy}
    back = {"pinned copy": speeds.pinned_copy_to_host}
    if managed is not None:
        ways |= {"read in place": managed.gather, "prefetch": managed.prefetch}
        back["prefetch"] = managed.prefetch_to_host
    rates = ", ".join(f"{name} {way.rate:.0f} GB/s ({way.hidden:.0%} hidden)" for name, way in ways.items())
    return f"to the GPU: {rates}; to the host: {', '.join(f'{name} {rate:.0f}' for name, rate in back.items())} GB/s"


_EXPERIMENTS: Final[dict[str, Callable[[ManagedHeap], str]]] = {
    "uvm_one_memory": _one_memory,
    "uvm_hints": _hints_are_kept,
    "uvm_overflow": _overflow,
    "uvm_link": _link,
}

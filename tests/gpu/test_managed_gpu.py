from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from gracetune import gh200
from gracetune.hardware import probe
from gracetune.memory.arena import OverflowArena
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.experiment_tools import small_gpu, tidy
from gracetune.memory.lookahead import LookAhead, RingMover
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import Uvm
from gracetune.memory.validate import validate
from gracetune.units import MIB

CUDA = torch.device("cuda", 0)


def test_every_experiment_of_the_validation_passes(uvm: Uvm) -> None:
    checks = list(validate())
    assert [check for check in checks if check.status != "ok"] == []
    assert len(checks) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_both_views_are_the_same_bytes(heap: ManagedHeap, dtype: torch.dtype) -> None:
    buffer = heap.empty((33, 7), dtype)
    raw = torch.randint(0, 2 if dtype is torch.bool else 100, (33, 7), dtype=torch.uint8)
    buffer.cpu().copy_(raw.to(dtype))
    assert torch.equal(buffer.cuda().cpu().view(torch.uint8), buffer.cpu().view(torch.uint8))
    buffer.cuda().zero_()
    with buffer.host() as view:
        assert not view.view(torch.uint8).any()


def test_a_view_outlives_its_buffer_and_then_the_memory_is_gone(heap: ManagedHeap, uvm: Uvm) -> None:
    buffer = heap.empty((1024, 1024), torch.float32)
    view = buffer.cuda()[10:20]
    buffer.close()
    del buffer
    view.fill_(2.0)
    assert view.sum().item() == 2.0 * 10 * 1024
    del view


def test_managed_memory_takes_part_in_autograd(heap: ManagedHeap) -> None:
    buffer = heap.empty((256, 256), torch.float32, "device")
    weight = torch.nn.Parameter(buffer.cuda())
    with torch.no_grad():
        weight.normal_(generator=torch.Generator(CUDA).manual_seed(0))
    plain = weight.detach().clone().requires_grad_()
    inputs = torch.randn(64, 256, device=CUDA)
    for tensor in (weight, plain):
        (inputs @ tensor).square().sum().backward()
    assert weight.grad is not None
    assert plain.grad is not None
    assert torch.equal(weight.grad, plain.grad)
    del weight


def test_hints_for_each_kind_of_tensor(heap: ManagedHeap) -> None:
    gh200.set_uvm_hint_override(True)
    try:
        buffer = heap.empty((64, 1024, 256), torch.float32)
        managed = buffer.cuda()
        assert gh200.gh200_uvm_enabled()
        assert gh200.prefer_gpu_residency(managed).bytes == managed.numel() * 4
        assert buffer.state().preferred == 0
        assert gh200.prefetch_to_device(managed)
        assert buffer.state().last_prefetch == 0
        assert gh200.prefer_cpu_residency(managed[1:3]).bytes == 2 * 1024 * 256 * 4
        assert "not contiguous" in gh200.prefer_cpu_residency(managed[:, :, 0]).reason
        assert "plain device memory" in gh200.prefer_cpu_residency(torch.zeros(10, device=CUDA)).reason
        assert "pinned" in gh200.prefer_cpu_residency(torch.zeros(10).pin_memory()).reason
        batch = gh200.optimize_batch_for_gh200({"latents": managed, "prompt_embeds": torch.zeros(4, device=CUDA)})
        assert batch.applied
        assert set(batch.tensors) == {"latents", "prompt_embeds"}
        assert not batch.tensors["prompt_embeds"]
        del managed, batch
    finally:
        gh200.set_uvm_hint_override(None)


def test_overflow_serves_backward_and_small_requests(uvm: Uvm) -> None:
    arena = OverflowArena(uvm, 0, 1024 * MIB, "cpu_first")
    weight = torch.randn(2048, 2048, device=CUDA, requires_grad=True)
    expected = torch.autograd.grad((weight @ weight).relu().square().sum(), weight)[0].clone()
    with small_gpu(0, room=8 * MIB):
        filler = [torch.empty(16 * MIB, dtype=torch.uint8, device=CUDA) for _ in range(12)]  # what was only cached
        filled = arena.usage().active
        torch.autograd.backward((weight @ weight).relu().square().sum())
        after_backward = arena.usage().active
        small = [torch.full((1000,), float(index), device=CUDA) for index in range(6000)]
        assert filled >= 64 * MIB
        assert after_backward >= filled + 16 * MIB, "the gradient was made in another thread, with the GPU full"
        assert arena.usage().active > after_backward, "small requests look for blocks of their own"
        assert [tensor[0].item() for tensor in small[::97]] == [float(index) for index in range(0, 6000, 97)]
        assert weight.grad is not None
        assert torch.equal(weight.grad, expected)
    del small, weight, expected, filler
    arena.close()
    tidy(0)
    assert uvm.slot_stats(0).live_bytes == 0


def test_overflow_on_a_second_stream_needs_its_own_reservation(uvm: Uvm) -> None:
    stream = torch.cuda.Stream()
    arena = OverflowArena(uvm, 0, 1024 * MIB, "cpu_first", streams=[stream])
    with small_gpu(0, room=2 * MIB):
        with torch.cuda.stream(stream):
            side = [torch.ones(32 * MIB, dtype=torch.uint8, device=CUDA) for _ in range(3)]
        on_side = arena.usage().active
        main = [torch.ones(32 * MIB, dtype=torch.uint8, device=CUDA) for _ in range(7)]  # some of it was only cached
        assert on_side >= 64 * MIB
        assert arena.usage().active >= on_side + 64 * MIB
        other = torch.cuda.Stream()
        with torch.cuda.stream(other), pytest.raises(torch.cuda.OutOfMemoryError):
            torch.ones(32 * MIB, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    del side, main
    arena.close()
    tidy(0)
    assert uvm.slot_stats(0).live_bytes == 0


@pytest.mark.parametrize("managed", [False, True])
def test_look_ahead_hands_over_the_right_bytes(heap: ManagedHeap, managed: bool) -> None:
    rows = 12
    data = torch.randint(0, 255, (rows, 4 * MIB), dtype=torch.uint8)
    if managed:
        slab = heap.empty(tuple(data.shape), torch.uint8)
        slab.cpu().copy_(data)
        sources = list(slab.cuda())
    else:
        sources = list(data.pin_memory())
    expected = [int(row.long().sum()) for row in data]
    seen = []
    ahead = LookAhead([{"x": source} for source in sources], RingMover(CUDA), depth=2)
    for batch in ahead:
        torch.cuda._sleep(1_000_000)  # a step that is still running when the next batch is requested
        seen.append(batch["x"].long().sum())
        batch["x"].zero_()  # the ring is the step's to write; the source must not change
    assert [int(total) for total in seen] == expected
    assert torch.equal(torch.stack([source.cpu() for source in sources]), data)
    assert ahead.stats.batches == rows
    torch.cuda.synchronize()
    del sources


def test_this_machine_is_known(uvm: Uvm) -> None:
    machine = probe(free_memory=True)
    assert machine.gpus
    assert machine.profile.value in ("discrete", "superchip", "integrated")
    assert machine.gpus[0].memory_total == torch.cuda.get_device_properties(0).total_memory


SPLIT_LIMITED = """
import torch
from gracetune.memory.arena import OverflowArena
from gracetune.memory.native import load
from gracetune.memory.experiment_tools import small_gpu
from gracetune.units import MIB
uvm = load()
uvm.set_managed_cap(4096 * MIB)
arena = OverflowArena(uvm, 0, 512 * MIB, "cpu_first", max_split_bytes=64 * MIB)
with small_gpu(0, room=2 * MIB):
    held = [torch.ones(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
    print(arena.usage().active // MIB, all(bool((t == 1).all()) for t in held[::5]))
"""


def test_overflow_works_where_large_blocks_may_not_be_split(uvm: Uvm) -> None:
    """The option is read when CUDA starts, so it takes a process of its own."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    command = [sys.executable, "-c", SPLIT_LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    active, right = done.stdout.split()
    assert int(active) >= 128
    assert right == "True"


def test_an_arena_that_does_not_fit_the_memory_fraction_says_so(uvm: Uvm) -> None:
    tidy(0)
    torch.cuda.set_per_process_memory_fraction(0.002)
    try:
        with pytest.raises(UnifiedMemoryError, match="counts towards"):
            OverflowArena(uvm, 0, 1024 * MIB, "cpu_first")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    tidy(0)
    assert uvm.slot_stats(0).live_bytes == 0


def test_a_batch_first_asked_for_in_inference_mode_can_be_trained_on() -> None:
    sources = [{"x": torch.ones(4, 4).pin_memory()} for _ in range(4)]
    mover = RingMover(CUDA)
    with torch.inference_mode():
        for batch in LookAhead(sources, mover, depth=1):
            batch["x"].sum()
    weight = torch.ones(4, 4, device=CUDA, requires_grad=True)
    for batch in LookAhead(sources, mover, depth=1):
        (batch["x"] @ weight).sum().backward()
    assert weight.grad is not None


def test_batches_of_changing_shapes_and_keys_share_the_ring() -> None:
    shapes = [(3, 5), (64, 64), (1,), (128, 7), (2, 2)] * 4
    sources = [{f"k{i % 2}": torch.full(shape, float(i)).pin_memory()} for i, shape in enumerate(shapes)]
    for i, batch in enumerate(LookAhead(sources, RingMover(CUDA), depth=3)):
        ((name, tensor),) = batch.items()
        assert (name, tuple(tensor.shape)) == (f"k{i % 2}", shapes[i])
        assert bool((tensor == i).all())

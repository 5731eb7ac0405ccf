from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from gracetune.memory.experiment_tools import tidy, timed_ms
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.transport import matmul_step, measure_link
from gracetune.models.attention import attention_facts, choose_attention
from gracetune.models.experts import ExpertHost, ParkingChoice
from gracetune.models.parking import (
    CopyParking,
    CudaLane,
    ManagedParking,
    Parking,
    device_room,
    frozen_tensors,
    pinned_bytes,
)
from gracetune.units import MIB

CUDA = torch.device("cuda", 0)
HIGH, LOW = "high_noise", "low_noise"
WIDTH, LAYERS = 4096, 12
WEIGHTS = 2 * WIDTH * WIDTH * LAYERS
"""384 MiB: two of them in managed memory stay far below the tests' cap."""


def _pinned(module: nn.Module) -> CopyParking:
    """Its home is pinned memory, as an expert host makes it."""
    home = partial(pinned_bytes, registry=torch.cuda.cudart())
    return CopyParking.of(frozen_tensors(module), CUDA, CudaLane(CUDA), home)


class Denoiser(nn.Module):
    """Frozen bfloat16 layers, and an adapter that is trained."""

    def __init__(self, seed: int, device: torch.device = CUDA) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)
        )
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.normal_(std=WIDTH**-0.5, generator=generator)  # type: ignore[operator]
        self.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, 8, device=CUDA)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        answer: Tensor = self.adapter(inputs.float())
        return answer


def reference(module: nn.Module) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in frozen_tensors(module)]


def assert_as_before(module: nn.Module, expected: list[Tensor]) -> None:
    for tensor, before in zip(frozen_tensors(module), expected, strict=True):
        assert torch.equal(tensor.detach().cpu().view(torch.uint8), before.view(torch.uint8))


def free_bytes() -> int:
    tidy(0)
    return torch.cuda.mem_get_info(CUDA)[0]


def take_turns(host: ExpertHost) -> None:
    """Every weight the same, every answer the same, whichever expert was away in between."""
    inputs = torch.randn(4, WIDTH, device=CUDA, dtype=torch.bfloat16)
    adapters = {name: [p.data_ptr() for p in host.module(name).adapter.parameters()] for name in (HIGH, LOW)}  # type: ignore[union-attr]
    weights, answers = {}, {}
    for name in (HIGH, LOW):
        answers[name] = host.activate(name)(inputs)
        weights[name] = reference(host.module(name))
    for name in (HIGH, LOW, LOW, HIGH, HIGH, LOW):
        other = LOW if name == HIGH else HIGH
        model = host.activate(name)
        answer = model(inputs)
        assert host.prepare(other).started
        assert torch.equal(answer, answers[name])
        answer.square().sum().backward()
        assert_as_before(model, weights[name])
    for name in (HIGH, LOW):
        assert_as_before(host.module(name), weights[name])
        assert [p.data_ptr() for p in host.module(name).adapter.parameters()] == adapters[name]  # type: ignore[union-attr]


def test_pinned_parking_is_exact() -> None:
    host = ExpertHost.open(ParkingChoice("pinned_copy", "for the test"), CUDA)
    host.add(HIGH, Denoiser(0))
    host.add(LOW, Denoiser(1, torch.device("cpu")))  # from wherever it was loaded to
    take_turns(host)


def test_managed_parking_is_exact(heap: ManagedHeap) -> None:
    host = ExpertHost.open(ParkingChoice("managed", "for the test"), CUDA, heap=heap)
    host.add(HIGH, Denoiser(0))
    host.add(LOW, Denoiser(1, torch.device("cpu")))
    take_turns(host)


def test_pinned_parking_gives_the_memory_back_and_takes_one_block() -> None:
    tidy(0)
    before = torch.cuda.memory_allocated(CUDA)
    module = Denoiser(0)
    adapter = sum(p.nbytes for p in module.adapter.parameters())
    expected = reference(module)
    parking = _pinned(module)
    assert torch.cuda.memory_allocated(CUDA) - before < adapter + MIB
    assert {tensor.device.type for tensor in frozen_tensors(module)} == {"cpu"}
    for _ in range(3):
        parking.finish()
        assert WEIGHTS <= torch.cuda.memory_allocated(CUDA) - before < WEIGHTS + adapter + MIB
        assert {tensor.device for tensor in frozen_tensors(module)} == {CUDA}
        assert_as_before(module, expected)
        parking.park()
        assert torch.cuda.memory_allocated(CUDA) - before < adapter + MIB
    assert_as_before(module, expected)


def read_ms(module: Denoiser) -> float:
    """All weights once, by the GPU: over the link that takes many times as long as from its own memory."""
    return timed_ms(lambda: [layer.weight.view(torch.int32).sum() for layer in module.layers], 0)  # type: ignore[operator]


def test_managed_parking_sends_the_pages_away_and_their_room_counts_as_room(heap: ManagedHeap) -> None:
    module = Denoiser(0)
    expected = reference(module)
    parking = ManagedParking(module, heap)
    free, room = free_bytes(), device_room(CUDA)
    for _ in range(3):
        parking.finish()
        assert 0.9 * WEIGHTS < free - free_bytes() < 1.1 * WEIGHTS
        assert abs(free - WEIGHTS - room(on_device=WEIGHTS, elsewhere=0)) < 0.1 * WEIGHTS
        assert read_ms(module) < 3
        parking.park()
        # The driver keeps the room until it is needed, and does not call it free: never more than once, though.
        assert free - free_bytes() < 1.1 * WEIGHTS
        assert abs(free - room(on_device=0, elsewhere=WEIGHTS)) < 0.1 * WEIGHTS
        assert read_ms(module) > 5
    assert_as_before(module, expected)
    del parking, module
    assert heap.held_bytes == 0
    assert abs(free - free_bytes()) < 0.1 * WEIGHTS


def test_a_merge_on_the_device_is_kept(heap: ManagedHeap) -> None:
    for make in (_pinned, lambda m: ManagedParking(m, heap)):
        module = Denoiser(0)
        parking: Parking = make(module)
        parking.finish()
        weight: nn.Parameter = module.layers[3].weight  # type: ignore[assignment]
        weight.data += 0.5  # how peft merges
        expected = reference(module)
        parking.park()
        assert_as_before(module, expected)
        parking.finish()
        assert_as_before(module, expected)
        del parking, module, weight


def _hidden(parking: Parking) -> float:
    """The part of bringing the weights that disappears behind work that was begun before and goes on after it."""

    def bring() -> None:
        parking.start()
        parking.finish()

    def alone() -> float:
        parking.park()
        return timed_ms(bring, 0)

    alone()
    move = min(alone() for _ in range(3))
    step = matmul_step(4 * move, 0)  # long enough for a slow host to enqueue the move behind it

    def steps() -> None:
        step()
        step()

    def beside() -> None:
        step()
        parking.start()
        step()
        parking.finish()

    def both() -> tuple[float, float]:
        parking.park()
        return timed_ms(beside, 0), timed_ms(steps, 0)

    lost = min(together - length for together, length in (both() for _ in range(5)))
    return 1 - lost / move


def test_bringing_an_expert_overlaps_with_work() -> None:
    module = Denoiser(0)
    assert _hidden(_pinned(module)) > 0.6


def test_prefetching_an_expert_overlaps_with_work(heap: ManagedHeap) -> None:
    """Nearly as much as this machine's driver allows: on one H200 host a prefetch was hidden, on another hardly."""
    managed = measure_link(0, heap).speeds.managed
    assert managed is not None
    module = Denoiser(0)
    parking = ManagedParking(module, heap)
    hidden = _hidden(parking)
    del parking, module
    print(f"a parked expert: {hidden:.0%} of its prefetch hidden; any managed memory: {managed.prefetch.hidden:.0%}")
    assert hidden > 0.6 * managed.prefetch.hidden - 0.1


def test_pinned_memory_is_pinned_for_torch_too() -> None:
    block = pinned_bytes(10 * MIB + 3, torch.cuda.cudart())
    assert block.is_pinned()
    assert block.nbytes == 10 * MIB + 3
    target = torch.zeros_like(block, device=CUDA)
    target.copy_(block.fill_(7), non_blocking=True)
    del block  # the copy may still be under way
    assert int(target.min()) == 7


def test_what_is_chosen_for_attention_runs_and_trains() -> None:
    from torch.nn.attention import sdpa_kernel

    from gracetune.models.attention import _KERNELS

    facts = attention_facts(CUDA, torch.bfloat16)
    choice = choose_attention("auto", facts)
    assert (choice.backend == "_native_cudnn") == (torch.cuda.get_device_capability(CUDA) >= (9, 0)), choice.reason
    query = torch.randn(1, 8, 1024, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    for requested in ("flash", "cudnn", "efficient", "math"):
        if requested in facts.lacking:
            continue
        backend = choose_attention(requested, facts).backend
        assert backend is not None
        with sdpa_kernel(_KERNELS[backend]):
            torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())

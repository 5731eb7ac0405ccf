from __future__ import annotations

import ctypes
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gracetune.diffusion.schedule import Flow
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.models.experts import (
    ExpertHost,
    choose_parking,
    expert_for_step,
    next_expert,
    noise_range_of,
    trained_experts,
)
from gracetune.models.loading import load_component
from gracetune.models.parking import CopyParking, InlineLane, NoParking, frozen_tensors, pinned_bytes
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement
from unit.models.expert_levels import expert_at

CPU = torch.device("cpu")
HIGH, LOW = "high_noise", "low_noise"
BOUNDARY = 0.875


def facts(boundary: float = BOUNDARY) -> ModelFacts:
    experts = (Expert(HIGH, "transformer", boundary, 1.0), Expert(LOW, "transformer_2", 0.0, boundary))
    return ModelFacts("wan", "t2v-14b-2.2", experts, Flow(1000.0))


ONE = ModelFacts("flux", "dev", (Expert("", "transformer"),), Flow(1000.0))


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_are_counted_in_optimizer_steps() -> None:
    assert [expert_for_step(step, 2, (HIGH, LOW)) for step in range(6)] == [HIGH, HIGH, LOW, LOW, HIGH, HIGH]
    assert {expert_for_step(step, 3, (LOW,)) for step in range(9)} == {LOW}


@given(st.integers(0, 10_000), st.integers(1, 50), st.sampled_from([(HIGH, LOW), (LOW, HIGH), (HIGH,), ("",)]))
def test_experts_train_equally_often_and_next_expert_announces_changes(
    step: int, every: int, trained: tuple[str, ...]
) -> None:
    start = step - step % (every * len(trained))
    turns = [expert_for_step(index, every, trained) for index in range(start, start + every * len(trained))]
    assert all(turns.count(name) == every for name in trained)
    then = expert_for_step(step + 1, every, trained)
    expected = then if then != expert_for_step(step, every, trained) else None
    assert next_expert(step, every, trained) == expected


@pytest.mark.parametrize("wrong", [(-1, 1, (HIGH,)), (0, 0, (HIGH,)), (0, 1, ())])
def test_invalid_turns_are_rejected(wrong: tuple[int, int, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        expert_for_step(*wrong)


def test_trained_experts_of_a_config() -> None:
    assert trained_experts("both", facts()) == (HIGH, LOW)
    assert trained_experts("high", facts()) == (HIGH,)
    assert trained_experts("low", facts()) == (LOW,)
    assert trained_experts("low", ONE) == ("",)


# -- noise levels -----------------------------------------------------------------------------------------------------


@given(st.fractions(0, 1, max_denominator=1000))
def test_sampled_levels_belong_to_their_expert(share: Fraction) -> None:
    for name in (HIGH, LOW):
        lowest, highest = noise_range_of(name, facts())
        level = lowest + float(share) * (highest - lowest)
        if level < highest:
            assert expert_at(level, facts()).name == name
    assert noise_range_of("", ONE) == (0.0, 1.0)
    with pytest.raises(KeyError, match="no expert 'middle'"):
        noise_range_of("middle", facts())


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "park", "experts", "managed", "way", "reason"),
    [
        ("superchip", True, 2, True, "managed", "prefetched over the coherent link"),
        ("superchip", True, 2, False, "pinned_copy", "managed memory is off or not available"),
        ("superchip", False, 2, True, "resident", "both fit in the plan"),
        ("discrete", True, 2, True, "pinned_copy", "copied from pinned memory"),
        ("discrete", False, 2, True, "resident", "both fit in the plan"),
        ("integrated", True, 2, True, "resident", "one pool"),
        ("cpu", True, 2, False, "resident", "no GPU"),
        ("discrete", True, 1, True, "resident", "one denoiser"),
    ],
)
def test_where_the_inactive_expert_is_kept(
    profile: str, park: bool, experts: int, managed: bool, way: str, reason: str
) -> None:
    choice = choose_parking(profile, park=park, experts=experts, managed=managed)  # type: ignore[arg-type]
    assert choice.way == way
    assert reason in choice.reason


# -- parking, with host memory as the device --------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Frozen layers of several dtypes, one of them tied, a buffer, and a trained adapter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(33, 7, dtype=torch.bfloat16)
        self.second = nn.Linear(33, 7, dtype=torch.float32)
        self.third = nn.Linear(33, 7, bias=False, dtype=torch.bfloat16)
        self.third.weight = self.first.weight
        self.register_buffer("table", torch.tensor([float("nan"), -0.0, 1.5]), persistent=False)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("steps", torch.tensor(3))
        self.eighth = nn.Parameter(torch.randn(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.requires_grad_(False)
        self.adapter = nn.Linear(7, 7)


def snapshot(module: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    raw = {name: tensor.detach().clone().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: (tensors[name].dtype, bytes(raw[name].tolist())) for name in tensors}


def copying(module: nn.Module) -> CopyParking:
    return CopyParking(module, CPU, InlineLane())


def addresses(module: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in frozen_tensors(module)}


def test_frozen_tensors_move_once_and_trained_ones_stay() -> None:
    module = Denoiser(0)
    before, adapter = snapshot(module), [(p.data_ptr(), id(p)) for p in module.adapter.parameters()]
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    parking = copying(module)
    assert snapshot(module) == before
    home = addresses(module)
    assert len(home) == 1
    parking.finish()
    assert snapshot(module) == before
    assert len(addresses(module)) == 1
    assert addresses(module) != home
    assert module.third.weight is module.first.weight
    parking.park()
    assert snapshot(module) == before
    assert addresses(module) == home
    assert [(p.data_ptr(), id(p)) for p in module.adapter.parameters()] == adapter
    assert {id(tensor): name for name, tensor in module.named_parameters()} == names
    assert parking.bytes >= sum(tensor.nbytes for tensor in frozen_tensors(module))


def in_place(module: Denoiser) -> None:
    with torch.no_grad():
        module.second.weight.add_(1.0)


def behind_autograds_back(module: Denoiser) -> None:
    module.second.weight.data += 1.0  # how peft merges


def other_memory(module: Denoiser) -> None:
    module.second.weight.data = module.second.weight.data.double().add(1.0).float()


@pytest.mark.parametrize("change", [in_place, behind_autograds_back, other_memory])
def test_change_on_the_device_is_saved(change: Callable[[Denoiser], None]) -> None:
    module = Denoiser(0)
    expected = module.second.weight.detach() + 1.0
    parking = copying(module)
    for _ in range(2):
        parking.finish()
        if change is not None:
            change(module)
            changed, change = snapshot(module), None  # type: ignore[assignment]
        parking.park()
        assert torch.equal(module.second.weight, expected)
        assert snapshot(module) == changed


def test_graph_from_before_parking_still_computes_gradients() -> None:
    torch.manual_seed(1)
    module, inputs = Denoiser(0), torch.randn(4, 33)

    def loss() -> Tensor:
        return module.adapter(module.second(inputs)).square().sum()

    loss().backward()
    expected = [p.grad.clone() for p in module.adapter.parameters() if p.grad is not None]
    module.zero_grad()
    parking = copying(module)
    parking.finish()
    pending = loss()
    parking.park()
    pending.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(module.adapter.parameters(), expected, strict=True))  # type: ignore[arg-type]


def test_cancelled_start() -> None:
    module = Denoiser(0)
    before, parking = snapshot(module), copying(module)
    parking.start()
    parking.start()
    parking.park()
    parking.park()
    assert snapshot(module) == before
    parking.finish()
    parking.finish()
    assert snapshot(module) == before


def test_a_module_with_nothing_frozen() -> None:
    parking = copying(nn.Linear(3, 3))
    parking.finish()
    parking.park()
    assert parking.bytes == 0


class Registry:
    """Stands in for the CUDA runtime: records what is pinned."""

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.pinned = answer, dict[int, int]()

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> int:  # noqa: N802 - CUDA's name
        if self.answer == 0:
            self.pinned[pointer] = size
        return self.answer

    def cudaHostUnregister(self, pointer: int, /) -> int:  # noqa: N802
        ctypes.c_uint8.from_address(pointer).value = 1  # crashes if the memory were gone before
        del self.pinned[pointer]
        return 0


def test_memory_stays_pinned_until_its_last_view_is_gone() -> None:
    registry = Registry()
    block = pinned_bytes(3 * 4096 + 5, registry)
    assert registry.pinned == {block.data_ptr(): 3 * 4096 + 5}
    module = Denoiser(0)
    before = snapshot(module)
    parking = CopyParking(module, CPU, InlineLane(), block)
    del block
    del parking  # its tensors still lie there
    assert len(registry.pinned) == 1
    assert snapshot(module) == before
    del module
    assert registry.pinned == {}
    assert pinned_bytes(0, registry).numel() == 0


def test_memory_that_cannot_be_pinned() -> None:
    with pytest.raises(UnifiedMemoryError, match=r"cannot be pinned \(CUDA error 2\)"):
        pinned_bytes(4096, Registry(answer=2))


# -- the host ---------------------------------------------------------------------------------------------------------


def host_of(*names: str, room: int = 1 << 40, spare: int = 0) -> ExpertHost:
    host = ExpertHost(copying, "for the test", room=lambda *, on_device, elsewhere: room, spare=spare)
    for index, name in enumerate(names):
        host.add(name, Denoiser(index))
    return host


@given(
    st.lists(st.tuples(st.sampled_from(["prepare", "activate"]), st.sampled_from([HIGH, LOW, "third"])), max_size=12)
)
def test_any_order_of_turns_preserves_every_weight(turns: list[tuple[str, str]]) -> None:
    host = host_of(HIGH, LOW, "third")
    assert host.moves
    before = {name: snapshot(host.module(name)) for name in (HIGH, LOW)}
    at_home = {name: addresses(host.module(name)) for name in (HIGH, LOW)}
    for what, name in turns:
        if what == "prepare":
            host.prepare(name)
        else:
            assert host.activate(name) is host.module(name)
            assert host.active == name
        for other in (HIGH, LOW):
            assert (addresses(host.module(other)) == at_home[other]) == (other != host.active)
        assert {other: snapshot(host.module(other)) for other in (HIGH, LOW)} == before


def test_prepare_needs_room() -> None:
    size = copying(Denoiser(0)).bytes
    tight = host_of(HIGH, LOW, room=size + 99, spare=100)
    tight.activate(HIGH)
    rejected = tight.prepare(LOW)
    assert not rejected.started
    assert "no room beside the active expert" in rejected.reason
    tight.activate(LOW)
    roomy = host_of(HIGH, LOW, "third", room=size + 100, spare=100)
    roomy.activate(HIGH)
    assert roomy.prepare(LOW).started
    assert roomy.prepare(LOW).reason == "already there or on its way"
    assert not roomy.prepare("third").started


def test_managed_bytes_of_parked_experts_are_passed_to_room() -> None:
    class Managed(NoParking):
        bytes = managed = 100

    begin_mark: list[tuple[int, int]] = []

    def room(*, on_device: int, elsewhere: int) -> int:
        begin_mark.append((on_device, elsewhere))
        return 100

    host = ExpertHost(lambda module: Managed(), "for the test", room=room)
    for name in (HIGH, LOW, "third"):
        host.add(name, Denoiser(0))
    host.activate(HIGH)
    assert host.prepare(LOW).started
    host.activate(LOW)
    assert host.prepare(HIGH).started
    host.activate("third")
    assert begin_mark == [(100, 200)] * 2


class OutOfRoom(NoParking):
    """A device that is full or fragmented."""

    bytes = 1

    def __init__(self) -> None:
        self.full = True

    def start(self) -> None:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def finish(self) -> None:
        self.start()


def test_prepare_on_a_full_device() -> None:
    parking = {HIGH: OutOfRoom(), LOW: OutOfRoom()}
    waiting = iter(parking.values())
    host = ExpertHost(lambda module: next(waiting), "for the test")
    for name in parking:
        host.add(name, nn.Linear(1, 1))
    assert "no contiguous room" in host.prepare(LOW).reason
    parking[HIGH].full = False
    host.activate(HIGH)
    with pytest.raises(torch.OutOfMemoryError):
        host.activate(LOW)
    assert host.active is None
    host.activate(HIGH)
    parking[LOW].full = False
    host.activate(LOW)
    assert host.active == LOW


def test_unknown_names_are_rejected() -> None:
    host = host_of(HIGH)
    for call in (host.activate, host.prepare, host.module):
        with pytest.raises(KeyError, match="no expert 'low_noise'"):
            call(LOW)
    with pytest.raises(ValueError, match="already"):
        host.add(HIGH, Denoiser(3))


def test_resident_experts_do_not_move(tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("wan", "t2v-14b-2.2")
    source = ModelSource("tiny", folder)
    host = ExpertHost.open(choose_parking("cpu", park=True, experts=2), CPU)
    for name, component in ((HIGH, "transformer"), (LOW, "transformer_2")):
        host.add(name, load_component(source, component, WanTransformer3DModel, PartPlacement(CPU, torch.bfloat16)))
    placement = {name: addresses(host.module(name)) for name in (HIGH, LOW)}
    assert not host.moves
    assert host.prepare(LOW).started
    host.activate(LOW)
    host.activate(HIGH)
    assert {name: addresses(host.module(name)) for name in (HIGH, LOW)} == placement
    assert host.reason == "resident: no GPU: everything is in host memory"
    assert NoParking.bytes == 0


def test_managed_parking_needs_a_heap() -> None:
    with pytest.raises(ValueError, match="needs the heap"):
        ExpertHost.open(choose_parking("superchip", park=True, experts=2), CPU)


def test_wans_experts_predict_the_same_after_any_number_of_turns(tiny_model: Callable[[str, str], Path]) -> None:
    source = ModelSource("tiny", tiny_model("wan", "t2v-14b-2.2"))
    host = ExpertHost(copying, "for the test")
    given_to = {
        "hidden_states": torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0)),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.zeros(1, 512, 32),
    }
    expected = {}
    for name, component in ((HIGH, "transformer"), (LOW, "transformer_2")):
        model = load_component(source, component, WanTransformer3DModel, PartPlacement(CPU, torch.float32))
        expected[name] = model(**given_to, return_dict=False)[0]
        host.add(name, model)
    for name in (HIGH, LOW, LOW, HIGH, LOW):
        assert torch.equal(host.activate(name)(**given_to, return_dict=False)[0], expected[name])
    assert not torch.equal(expected[HIGH], expected[LOW])

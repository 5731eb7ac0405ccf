"""The next expert is streamed in during the last backward pass, block by block. Host memory is the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gracetune.models.expert_streaming import StreamedParking, StreamedSwap
from gracetune.models.experts import ExpertHost
from gracetune.models.parking import CopyParking, InlineLane, frozen_tensors

CPU = torch.device("cpu")
BLOCKS = 6


class Block(nn.Module):
    """A frozen matrix with a trained one, like an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Expert(nn.Module):
    def __init__(self, seed: int, *, repeated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave = (nn.Linear(16, 16).requires_grad_(False) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.repeated = repeated

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.repeated else block(x)
        return self.leave(x).square().sum()


def given(seed: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def gradients(expert: nn.Module) -> list[Tensor]:
    found = [one.grad.clone() for one in expert.parameters() if one.grad is not None]
    expert.zero_grad()
    return found


def values(expert: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in expert.parameters()]


def parked(expert: nn.Module) -> StreamedParking:
    return StreamedParking(expert, ["Block"], CPU, InlineLane())


def on_device(parking: StreamedParking) -> list[bool]:
    return [part._block is not None for part in parking.parts]


def host(*, room: int = 0, repeated: bool = False) -> tuple[ExpertHost, list[Expert]]:
    made = ExpertHost(parked, "in a test", room=lambda *, on_device, elsewhere: room)
    experts = [Expert(seed, repeated=repeated) for seed in range(2)]
    for name, expert in zip(("high", "low"), experts, strict=True):
        made.add(name, expert)
    return made, experts


class TestParts:
    def test_cover_the_whole_module_once(self) -> None:
        expert = Expert(0)
        expert.blocks[3].base.weight = expert.blocks[1].base.weight
        before, tensors = values(expert), frozen_tensors(expert)
        parking = parked(expert)
        assert len(parking.parts) == BLOCKS + 1
        assert sum(len(part._slots) for part in parking.parts) == len(tensors)
        for step in (parking.finish, parking.park, parking.start, parking.finish, parking.park):
            step()
            assert all(torch.equal(*pair) for pair in zip(values(expert), before, strict=True))
        assert not any(on_device(parking))

    def test_without_blocks_there_is_one(self) -> None:
        parking = StreamedParking(Expert(0), (), CPU, InlineLane())
        assert len(parking.parts) == 1


@pytest.mark.parametrize("repeated", [False, True])
class TestFollowing:
    def test_blocks_leave_last_first_and_arrive_first_first(self, repeated: bool) -> None:
        coming = parked(Expert(1, repeated=repeated))
        order: list[tuple[list[bool], list[bool]]] = []
        expert = Expert(0, repeated=repeated)
        leaving = parked(expert)
        leaving.finish()
        loss = expert(given())
        most = leaving.bytes
        for parameters in leaving.trained:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _: order.append((on_device(leaving), on_device(coming)))
                )
        with StreamedSwap(leaving, coming) as moving:
            loss.backward()
        for old, new in order:
            held = sum(part.bytes for part, existing in zip(leaving.parts, old, strict=True) if existing)
            held += sum(part.bytes for part, existing in zip(coming.parts, new, strict=True) if existing)
            assert held <= most, "never more than one expert's worth"
            assert old == sorted(old, reverse=True), "the last leaves first"
            assert new[1:] == sorted(new[1:], reverse=True), "the first block comes first"
        assert on_device(leaving) == [True, True, *[False] * (BLOCKS - 1)], "the first block may still be at work"
        assert moving.moved
        assert moving.brought_bytes == sum(
            p.bytes for p, existing in zip(coming.parts, on_device(coming), strict=True) if existing
        )
        assert moving.brought_bytes > leaving.bytes // 2

    def test_training_is_bit_identical(self, repeated: bool) -> None:
        made, experts = host(repeated=repeated)
        plain = [Expert(seed, repeated=repeated) for seed in range(2)]
        before = [values(expert) for expert in experts]
        for turn in range(4):
            name, other = (("high", "low"), ("low", "high"))[turn % 2]
            expert = made.activate(name)
            assert not made.prepare(other).started
            for micro_batch in range(2):
                with made.following(other if micro_batch == 1 else None):
                    expert(given(turn)).backward()
                plain[turn % 2](given(turn)).backward()
            found, wanted = gradients(expert), gradients(plain[turn % 2])
            assert len(found) == 2 * BLOCKS
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert all(torch.equal(*pair) for one, two in zip(experts, before, strict=True)
                   for pair in zip(values(one), two, strict=True))  # fmt: skip
        assert made.switches.count == 4
        assert made.switches.followed_bytes > 0
        made.activate("high")
        assert made.switches.waited_ms > 0

    def test_parked_expert_can_be_activated_again(self, repeated: bool) -> None:
        """A validation between steps can activate any expert."""
        made, _ = host(repeated=repeated)
        expert = made.activate("high")
        with made.following("low"):
            expert(given()).backward()
        assert made.active is None
        wanted = Expert(0, repeated=repeated)(given())
        assert torch.equal(made.activate("high")(given()), wanted)
        assert not any(on_device(made._parking["low"])), "what had come of the other is gone again"  # type: ignore[arg-type]
        assert torch.equal(made.activate("low")(given()), Expert(1, repeated=repeated)(given()))

    def test_error_in_the_backward_pass_leaves_a_working_host(self, repeated: bool) -> None:
        made, experts = host(repeated=repeated)
        expert = made.activate("high")

        def fail(_: Tensor) -> None:
            raise ValueError("no")

        hook = experts[0].blocks[1].up.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(ValueError, match="no"), made.following("low"):
            expert(given()).backward()
        hook.remove()
        assert torch.equal(made.activate("high")(given()), Expert(0, repeated=repeated)(given()))


class LateLane(InlineLane):
    """Copies only become visible when they are waited for; before that the memory holds other values."""

    def __init__(self) -> None:
        self.on_their_way: dict[int, Callable[[], object]] = {}
        self.waited: list[int] = []
        self.copies = 0

    def bring(self, block: Tensor, home: Tensor) -> int:
        self.copies += 1
        self.on_their_way[self.copies - 1] = lambda: block.copy_(home)
        return self.copies - 1

    def wait(self, mark: int) -> None:
        self.waited.append(mark)
        self.on_their_way.pop(mark)()

    def join(self) -> None:
        for mark in [*self.on_their_way]:
            self.on_their_way.pop(mark)()


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    late = LateLane()

    def start(parking: CopyParking) -> None:
        if parking._block is None:
            parking._block = torch.full((parking.bytes,), 63, dtype=torch.uint8)
            parking._arrived = late.bring(parking._block, parking._home)

    monkeypatch.setattr(CopyParking, "start", start)
    return late


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_are_waited_for_when_they_are_called(compiled: bool, lane: LateLane) -> None:
    expert, calls = Expert(0), list[tuple[int, list[int]]]()
    for number, block in enumerate(expert.blocks):
        if compiled:
            block.compile(backend="eager")
        block.base.register_forward_hook(lambda *_, number=number: calls.append((number, list(lane.waited))))
    wanted = Expert(0)(given())
    parking = StreamedParking(expert, ["Block"], CPU, lane)
    for _ in range(2):
        parking.expect()
        assert lane.waited == [0], "what is around the blocks"
        torch.testing.assert_close(expert(given()), wanted)
        assert calls == [(number, list(range(number + 2))) for number in range(BLOCKS)]
        expert(given())
        assert len(lane.waited) == BLOCKS + 1, "once"
        parking.park()
        lane.copies = 0
        lane.waited.clear()
        calls.clear()


def test_settle_makes_weights_readable(lane: LateLane) -> None:
    """For a checkpoint after a validation that activated the expert, and one after a step that did not start."""
    made = ExpertHost(
        lambda module: StreamedParking(module, ["Block"], CPU, lane), "", room=lambda *, on_device, elsewhere: 0
    )
    experts, before = [Expert(seed) for seed in range(2)], [values(Expert(seed)) for seed in range(2)]
    for name, expert in zip(("high", "low"), experts, strict=True):
        made.add(name, expert)
    made.activate("high", at_once=False)
    assert any(not torch.equal(*pair) for pair in zip(values(experts[0]), before[0], strict=True)), "still on their way"
    made.settle()
    assert all(torch.equal(*pair) for pair in zip(values(experts[0]), before[0], strict=True))
    made.activate("low")
    assert all(torch.equal(*pair) for pair in zip(values(experts[1]), before[1], strict=True))
    made.activate("high", at_once=False)
    made.activate("high")
    assert all(torch.equal(*pair) for pair in zip(values(experts[0]), before[0], strict=True))


def test_parked_expert_and_deleted_modules_hold_no_memory() -> None:
    made = ExpertHost(parked, "in a test", room=lambda *, on_device, elsewhere: 0)
    experts = [Expert(seed) for seed in range(2)]
    for block in experts[0].blocks[:3]:
        block.requires_grad_(False)  # no hook runs when a gradient arrives here
    for name, expert in zip(("high", "low"), experts, strict=True):
        made.add(name, expert)
    made.activate("high")
    with made.following("low"):
        experts[0](given()).backward()
    parking = made._parking["high"]
    assert isinstance(parking, StreamedParking)
    assert not any(on_device(parking))
    gone = weakref.ref(parking)
    del made, parking
    assert gone() is None, "without the garbage collector, while its module is still there"
    assert experts[0](given()).isfinite()


@pytest.mark.parametrize("followed", [False, True])
def test_weights_changed_in_place_are_saved(followed: bool) -> None:
    """A merge before the first step of a turn."""
    made, experts = host()
    expert = made.activate("high")
    for block in experts[0].blocks:
        block.base.weight.data += 1
    changed = values(experts[0])
    if followed:
        with made.following("low"):
            expert(given()).backward()
    made.activate("low")(given())
    assert all(torch.equal(*pair) for pair in zip(values(experts[0]), changed, strict=True))
    made.activate("high")(given())
    assert all(torch.equal(*pair) for pair in zip(values(experts[0]), changed, strict=True))


def test_no_streaming_if_both_fit_or_no_expert_is_next() -> None:
    made, _ = host(room=1 << 30)
    expert = made.activate("high")
    assert made.prepare("low").started
    with made.following("low"):
        expert(given()).backward()
    assert made.active == "high"
    made, _ = host()
    expert = made.activate("high")
    for nobody in (None, "high"):
        with made.following(nobody):
            expert(given()).backward()
        assert made.active == "high"
    assert made.switches.followed_bytes == 0

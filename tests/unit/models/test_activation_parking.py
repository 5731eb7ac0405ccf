"""Block inputs parked in host memory: equal gradients, less device memory, and the order of copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracetune.models.activation_parking import ActivationParking, HostClock
from gracetune.models.footprint import UNPARKED_INPUTS
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement

CPU = torch.device("cpu")
TinyModel = Callable[[str, str], Path]
BLOCKS = 8


class CountingLane:
    """Copies run immediately. Counts the parked inputs on the device in between."""

    def __init__(self) -> None:
        self.parking: ActivationParking | None = None
        self.most = 0
        self.events: list[str] = []
        self.marks = self.waited = 0

    @contextmanager
    def _beside(self) -> Iterator[None]:
        yield
        assert self.parking is not None
        alive = [parked for one in self.parking._order if (parked := one()) is not None]
        self.most = max(self.most, sum(parked.bytes for parked in alive if parked.on_device is not None))
        self.events.append("copy")

    def beside(self) -> AbstractContextManager[object]:
        return self._beside()

    def join(self) -> None:
        self.events.append("join")

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def wait(self, mark: int) -> None:
        """Called while the copied tensor is still referenced. Its memory can be reused afterwards."""
        assert self.parking is not None
        alive = [parked for one in self.parking._order if (parked := one()) is not None]
        leaving = [parked for parked in alive if parked.copied == mark]
        assert all(parked.on_device is not None for parked in leaving)
        self.waited += len(leaving)


def counted(least: int = 1) -> tuple[ActivationParking, CountingLane, list[int]]:
    lane, homes = CountingLane(), list[int]()

    def new_home(size: int) -> Tensor:
        homes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    parking = ActivationParking(CPU, lane, HostClock(), new_home, least=least)
    lane.parking = parking
    return parking, lane, homes


class Chain(nn.Module):
    """A sequence of blocks that all get the same caption."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(BLOCKS))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor, caption: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.checkpoint(lambda y, text, layer=layer: torch.tanh(layer(y) + text.mean()), x, caption)
        return x.square().sum()


def plain(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return block(*inputs)


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(*inputs).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 16, generator=generator), torch.randn(32, 16, generator=generator)


class TestChain:
    def test_gradients_are_bit_identical_in_every_step(self) -> None:
        parking, _, _ = counted()
        ours, theirs = Chain(parking.checkpoint), Chain(plain)
        for step in range(3):
            found, wanted = gradients(ours, *inputs(step)), gradients(theirs, *inputs(step))
            assert len(found) == 2 * BLOCKS
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

    def test_device_holds_few_inputs_for_any_number_of_blocks(self) -> None:
        parking, lane, _ = counted()
        x, caption = inputs()
        gradients(Chain(parking.checkpoint), x, caption)
        # The newest ones and one being copied. The caption is parked with the first block, not yet known as shared.
        assert lane.most <= (UNPARKED_INPUTS + 1) * x.nbytes
        assert parking.stats.parked_bytes == (BLOCKS + 1) * x.nbytes
        assert parking.stats.stayed == UNPARKED_INPUTS
        assert parking.stats.returned == BLOCKS + 1 - UNPARKED_INPUTS
        assert parking.stats.returned_bytes == parking.stats.returned * x.nbytes
        assert lane.waited == parking.stats.returned, "an input leaves the device after its copy, not before"

    def test_failed_backward_pass_leaves_no_pending_copy(self) -> None:
        """The destination of a pending copy must not be freed; the next step waits for the copy."""
        parking, lane, _ = counted()
        model = Chain(parking.checkpoint)

        def fail(gradient: Tensor) -> None:
            raise ZeroDivisionError

        hook = model.layers[BLOCKS - UNPARKED_INPUTS - 1].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            gradients(model, *inputs(0))
        hook.remove()
        assert parking._coming
        lane.events.clear()
        found = gradients(model, *inputs(1))
        assert lane.events[0] == "join"
        assert all(torch.equal(*pair) for pair in zip(found, gradients(Chain(plain), *inputs(1)), strict=True))

    def test_inputs_are_fetched_one_block_ahead(self) -> None:
        """A block's input is joined before the next copy starts, so that no join waits for two copies."""
        parking, lane, _ = counted()
        gradients(Chain(parking.checkpoint), *inputs())
        backward = lane.events[BLOCKS + 1 :]
        joins = [number for number, event in enumerate(backward) if event == "join"]
        assert all(backward[number - 1] == "copy" for number in joins[:-1])
        assert backward[joins[0] - 1] == "copy", "under way before it is needed"
        assert backward[:1] == ["copy"], "started while an input that stayed is worked on"

    def test_host_memory_is_reused(self) -> None:
        parking, _, homes = counted()
        model = Chain(parking.checkpoint)
        gradients(model, *inputs(0))
        first = len(homes)
        for step in range(1, 4):
            gradients(model, *inputs(step))
        assert len(homes) == first == BLOCKS + 1

    def test_waits_are_counted(self) -> None:
        parking, _, _ = counted()
        model = Chain(parking.checkpoint)
        gradients(model, *inputs(0))
        gradients(model, *inputs(1))
        assert parking.stats.waited_ms > 0

    def test_small_and_noncontiguous_tensors_stay_on_the_device(self) -> None:
        parking, lane, homes = counted(least=1 << 20)
        gradients(Chain(parking.checkpoint), *inputs())
        assert not homes
        assert not lane.events
        parking, _, homes = counted()
        x = torch.randn(16, 32).t().requires_grad_()
        parking.checkpoint(torch.tanh, x).sum().backward()
        assert not homes

    def test_an_input_changed_in_place_is_an_error(self) -> None:
        parking, _, _ = counted()
        x = torch.randn(4, 4, requires_grad=True) * 1
        answer = parking.checkpoint(torch.tanh, x).sum()
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            answer.backward()

    def test_abandoned_pass_leaves_no_state(self) -> None:
        parking, _, homes = counted()
        model = Chain(parking.checkpoint)
        loss = model(*inputs(0))
        del loss
        found = gradients(model, *inputs(1))
        wanted = gradients(Chain(plain), *inputs(1))
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert len(homes) == BLOCKS + 1


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_tiny_model_gets_equal_gradients(tiny_model: TinyModel, family: str) -> None:
    """Through diffusers' own switch, against its own checkpointing."""
    from unit.models.model_inputs import inputs_of

    spec = spec_of(family)
    source = ModelSource("tiny", tiny_model(family, {"wan": "t2v-14b-2.2", "flux": "dev"}[family]))
    found = []
    parking, _, homes = counted(least=64)
    for check in (None, parking.checkpoint):
        denoiser: Any = spec.load_denoiser(source, spec.inspect(source).experts[0], PartPlacement(CPU, torch.float32))
        denoiser.train()
        denoiser.enable_gradient_checkpointing(check)
        trained = [
            parameter.requires_grad_()
            for name, parameter in denoiser.named_parameters()
            if "to_q.weight" in name or "to_out" in name
        ]
        given = inputs_of(denoiser, torch.float32)
        assert isinstance(given, dict)
        denoiser(**given, return_dict=False)[0].square().sum().backward()
        found.append([parameter.grad for parameter in trained])
    assert homes
    assert parking.stats.returned > 0
    for one, two in zip(*found, strict=True):
        assert one is not None
        assert torch.equal(one, two)

"""What is recorded when, and that a recording gives the gradients autograd gives. The recorder here runs the recorded
functions again instead of a GPU's graphs; those are in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracetune.train.gradients import Clip, FlatGradients
from gracetune.train.replay import MOST, PROBES, Gpu, Recording, Replay, Run
from gracetune.units import GIB

FACTS: Any = None
WARM_UP = 1 + PROBES
OFF = "CUDA graph: off, kernels are launched one by one: "


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + text))  # type: ignore[no-any-return]


def predict(denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    answer: Tensor = denoiser(noisy * level.view(-1, 1), batch["text"])
    return answer


class Again:
    """Does what it was given to do."""

    def __init__(self, run: Any) -> None:
        self.replay = run


class Recorder(Gpu):
    """A device of this test's making: busy or waiting, with so much memory."""

    def __init__(self, waits: bool, error: Exception | None, free: int, synchronises: bool) -> None:
        self.asked, self.recorded = 0, 0
        self._waits, self._error, self._free, self._synchronises = waits, error, free, synchronises
        self._held = 0

    def waits(self) -> bool:
        self.asked += 1
        return self._waits

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        yield ["called a synchronizing CUDA operation"] if self._synchronises else []

    def held(self) -> int:
        self._held += GIB  # every pass keeps one
        return self._held

    def free(self) -> int:
        return self._free

    def pool(self) -> Any:
        return object()

    def record(self, run: Run, inputs: Sequence[Tensor], gradients: FlatGradients, pool: Any) -> Recording:
        if self._error is not None:
            raise self._error
        self.recorded += 1
        places = [one.clone() for one in inputs]
        live: list[Tensor] = [run(places)]
        answer = live[0].detach().clone()
        gradient = torch.full_like(answer, torch.nan)

        def forward() -> None:
            with torch.enable_grad():
                live[0] = run(places)
            answer.copy_(live[0].detach())

        def backward() -> None:
            gradients.add(torch.autograd.grad((live[0],), gradients.parameters, (gradient,), allow_unused=True))

        return Recording(places, answer, gradient, (Again(forward), Again(backward)))


class Setup:
    def __init__(
        self, waits: bool = True, error: Exception | None = None, free: int = 3 * GIB, synchronises: bool = False
    ) -> None:
        self.net, self.said = Net(), list[str]()
        self.gpu = Recorder(waits, error, free, synchronises)
        self.gradients = FlatGradients(dict(self.net.named_parameters()), small=10)
        self.replay = Replay(predict, {self.net: self.gradients}, say=self.said.append, gpu=self.gpu)

    def window(self, seed: int, size: int = 3, micro_batches: int = 2) -> list[Tensor]:
        """All gradients of a window, by the replaying way; they are those of the plain one, every time."""
        generator = torch.Generator().manual_seed(seed)
        plain = {name: torch.zeros_like(one) for name, one in self.net.named_parameters()}
        self.gradients.open()
        for _ in range(micro_batches):
            drawn = [torch.rand(size, width, generator=generator) for width in (6, 5)]
            level = torch.rand(size, generator=generator)
            batch = {"text": drawn[1], "latents": drawn[0]}
            self.replay(self.net, drawn[0], level, batch, FACTS).square().sum().backward()
            self.gradients.collect()
            other = Net()
            other.load_state_dict(self.net.state_dict())
            predict(other, drawn[0], level, batch, FACTS).square().sum().backward()
            for name, one in other.named_parameters():
                if one.grad is not None:
                    plain[name] += one.grad
        self.gradients.finish(1.0, Clip(limit=None))
        found = [one.grad.clone() for one in self.net.parameters() if one.grad is not None]
        self.gradients.close()
        for one, wanted in zip(found, plain.values(), strict=True):
            torch.testing.assert_close(one, wanted)
        return found


def test_a_window_has_the_same_gradients_before_and_after_it_is_recorded() -> None:
    setup = Setup()
    for seed in range(5):
        setup.window(seed)
    assert setup.gpu.recorded == 1
    assert setup.gpu.asked == PROBES
    assert len(setup.said) == 1
    assert setup.said[0].startswith("CUDA graph: on")


def test_weights_that_have_changed_are_read_by_the_next_replay() -> None:
    setup = Setup()
    for seed in range(3):
        setup.window(seed)
    with torch.no_grad():
        setup.net.first.weight.mul_(2)
    setup.window(9)
    assert setup.gpu.recorded == 1


def test_nothing_is_recorded_where_the_gpu_has_work() -> None:
    setup = Setup(waits=False)
    for seed in range(5):
        setup.window(seed)
    assert setup.gpu.recorded == 0
    assert setup.gpu.asked == PROBES
    assert setup.said == []


def test_each_shape_has_its_own_and_there_are_not_too_many() -> None:
    setup = Setup()
    for _ in range(2):
        for size in range(1, MOST + 3):
            setup.window(size, size, micro_batches=WARM_UP)
    assert setup.gpu.recorded == MOST


def test_without_gradients_it_is_the_plain_call() -> None:
    setup = Setup()
    with torch.no_grad():
        for _ in range(6):
            setup.replay(setup.net, torch.ones(1, 6), torch.ones(1), {"text": torch.ones(1, 5)}, FACTS)
    assert setup.gpu.asked == setup.gpu.recorded == 0


def test_what_cannot_be_recorded_goes_on_as_before_and_says_why() -> None:
    setup = Setup(error=RuntimeError("operation not permitted when stream is capturing\nand more"))
    for seed in range(4):
        setup.window(seed)
    assert setup.said == [OFF + "operation not permitted when stream is capturing"]


def test_a_model_that_waits_for_the_device_is_not_recorded() -> None:
    setup = Setup(synchronises=True)
    for seed in range(4):
        setup.window(seed)
    assert setup.said == [OFF + "the model waits for the GPU in its forward pass"]
    assert setup.gpu.recorded == 0


@pytest.mark.parametrize(("free", "recorded"), [(int(2.3 * GIB), 1), (int(2.3 * GIB) - 1, 0)])
def test_it_needs_room_for_what_a_step_keeps(free: int, recorded: int) -> None:
    setup = Setup(free=free)
    for seed in range(4):
        setup.window(seed)
    assert setup.gpu.recorded == recorded
    if not recorded:
        assert setup.said == [OFF + "it takes 2.30 GiB of its own, and 2.30 GiB are free"]


def test_what_is_released_is_recorded_again() -> None:
    setup = Setup()
    for seed in range(3):
        setup.window(seed)
    setup.replay.release()
    setup.window(7)
    assert setup.gpu.recorded == 2
    assert len(setup.said) == 1


def test_weights_that_have_moved_are_recorded_anew() -> None:
    setup = Setup()
    for seed in range(3):
        setup.window(seed)
    setup.net.last.weight.data = setup.net.last.weight.data.clone()
    setup.window(7)
    assert setup.gpu.recorded == 2


def test_a_second_forward_pass_before_the_backward_pass_is_an_error() -> None:
    setup = Setup()
    for seed in range(3):
        setup.window(seed)
    asked: Any = (setup.net, torch.ones(3, 6), torch.ones(3), {"text": torch.ones(3, 5), "latents": torch.ones(3, 6)})
    first = setup.replay(*asked, FACTS)
    setup.replay(*asked, FACTS)
    with pytest.raises(RuntimeError, match="before its backward pass"):
        first.sum().backward()

"""When shapes are captured, and that replays give autograd's gradients.

The device in these tests runs the captured functions again. Tests with real CUDA graphs are in tests/gpu.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from gracetune.config.run_config import Adapter
from gracetune.config.token_routes import Route
from gracetune.models.registry import spec_of
from gracetune.train.assembly import why_not_captured
from gracetune.train.blocks import Preparation
from gracetune.train.cuda_graphs import (
    MOST,
    PROBES,
    STATES,
    WORTH,
    CapturedPass,
    GraphCaptureError,
    GraphDevice,
    Replay,
    Run,
    SharedGraphPool,
)
from gracetune.train.gradients import FlatGradients, GradientClipping
from gracetune.units import GIB
from unit.models.test_token_routing import TinyModel, opened

FACTS: Any = None
WARM_UP = 1 + PROBES
SCARCE = int(3.2 * GIB)
"""A capture takes 1 GiB and a step is estimated at 2.3 GiB: either of them fits alone, but not both."""
BUSY = "CUDA graph: off for latents [{}, 6]: the step is GPU-bound"
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


SPEC: Any = SimpleNamespace(predict=predict, graph_inputs=dict)


class Again:
    """A stand-in for a CUDA graph: `replay` calls a function."""

    def __init__(self, run: Any) -> None:
        self.replay = run


class Device(GraphDevice):
    """A stand-in for a GPU, launch-bound (`waits`) or not, with `free` memory. Every forward pass keeps 1 GiB."""

    def __init__(self, waits: bool, error: Exception | None, free: int, synchronizes: bool) -> None:
        self.requested = self.recorded = self.pools = self.left = self.on_side_stream = 0
        self._waits, self._error, self._free, self._synchronizes = waits, error, free, synchronizes
        self._held, self._kept, self._existing = 0, GIB, WeakSet[CapturedPass]()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.on_side_stream += 1
        yield

    def accumulators(self, parameters: Sequence[nn.Parameter]) -> list[Any]:
        return [object() for _ in parameters]

    def finish(self) -> None:
        self.left = 0

    def is_launch_bound(self) -> bool:
        """Unfinished work of earlier steps makes the device look GPU-bound."""
        self.requested += 1
        return self._waits and self.left == 0

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        yield ["called a synchronizing CUDA operation"] if self._synchronizes else []

    def held(self) -> int:
        self._held += self._kept
        return self._held

    def free(self) -> int:
        return self._free - GIB * bool(self._existing)

    def pool(self) -> Any:
        self.pools += 1
        return object()

    def capture(
        self, run: Run, inputs: Sequence[Tensor], gradients: FlatGradients, shared: SharedGraphPool
    ) -> CapturedPass:
        """A replay runs the captured function again. All captures share the last forward pass, as they share a pool."""
        if self._error is not None:
            raise self._error
        self.recorded += 1
        buffers = [one.clone() for one in inputs]
        answer = run(buffers).detach().clone()
        gradient = torch.full_like(answer, torch.nan)

        def forward() -> None:
            self.left += 1
            with torch.enable_grad():
                self.live = run(buffers)
            answer.copy_(self.live.detach())

        def backward() -> None:
            gradients.add(torch.autograd.grad((self.live,), gradients.parameters, (gradient,), allow_unused=True))

        made = CapturedPass(buffers, answer, gradient, (Again(forward), Again(backward)), shared)
        self._existing.add(made)
        return made


class Setup:
    def __init__(
        self, waits: bool = True, error: Exception | None = None, free: int = 8 * GIB, synchronizes: bool = False
    ) -> None:
        self.net, self.lines = Net(), list[str]()
        self.gpu = Device(waits, error, free, synchronizes)
        self.gradients = FlatGradients(dict(self.net.named_parameters()), small=10)
        self.replay = Replay(SPEC, {self.net: self.gradients}, report=self.lines.append, gpu=self.gpu)

    def step(self, seed: int, size: int = 3, micro_batches: int = 2, sizes: Sequence[int] = ()) -> list[Tensor]:
        """The gradients of an optimizer step through `Replay`. Asserts that they equal those without it."""
        generator = torch.Generator().manual_seed(seed)
        plain = {name: torch.zeros_like(one) for name, one in self.net.named_parameters()}
        self.gradients.open()
        for count in sizes or [size] * micro_batches:
            generated = [torch.rand(count, width, generator=generator) for width in (6, 5)]
            level = torch.rand(count, generator=generator)
            batch = {"text": generated[1], "latents": generated[0]}
            self.replay(self.net, generated[0], level, batch, FACTS).square().sum().backward()
            self.gradients.collect()
            other = Net()
            other.load_state_dict(self.net.state_dict())
            predict(other, generated[0], level, batch, FACTS).square().sum().backward()
            for name, one in other.named_parameters():
                if one.grad is not None:
                    plain[name] += one.grad
        self.gradients.finish(1.0, GradientClipping(limit=None))
        found = [one.grad.clone() for one in self.net.parameters() if one.grad is not None]
        self.gradients.close()
        for one, wanted in zip(found, plain.values(), strict=True):
            torch.testing.assert_close(one, wanted)
        return found


def test_a_step_has_the_same_gradients_before_and_after_its_capture() -> None:
    setup = Setup()
    for seed in range(5):
        setup.step(seed)
    assert setup.gpu.recorded == 1
    assert setup.gpu.requested == PROBES
    assert len(setup.lines) == 1
    assert setup.lines[0].startswith("CUDA graph: on")


def test_weights_that_have_changed_are_read_by_the_next_replay() -> None:
    setup = Setup()
    for seed in range(3):
        setup.step(seed)
    with torch.no_grad():
        setup.net.first.weight.mul_(2)
    setup.step(9)
    assert setup.gpu.recorded == 1


def test_nothing_is_captured_if_the_step_is_gpu_bound() -> None:
    setup = Setup(waits=False)
    for seed in range(5):
        setup.step(seed)
    assert setup.gpu.recorded == 0
    assert setup.gpu.requested == 1
    assert setup.lines == [BUSY.format(3)]


def test_unfinished_replays_do_not_make_another_shape_look_gpu_bound() -> None:
    setup = Setup()
    for seed in range(6):
        setup.step(seed, 3)
    assert setup.gpu.left > 0
    for seed in range(2):
        setup.step(seed, 2)
    assert setup.gpu.recorded == 2
    assert len(setup.lines) == 1


def test_each_shape_has_its_own_capture_up_to_a_limit() -> None:
    setup = Setup(free=64 * GIB)
    for _ in range(2):
        for size in range(1, MOST + 3):
            setup.step(size, size, micro_batches=WARM_UP)
    assert setup.gpu.recorded == MOST
    assert setup.gpu.pools == 1
    assert setup.lines[1:] == [f"CUDA graph: off for latents [{MOST + 1}, 6]: {MOST} other shapes are captured"]


def test_captures_of_several_shapes_are_used_within_one_step() -> None:
    setup = Setup()
    for seed in range(4):
        setup.step(seed, sizes=(3, 2, 3, 2))
    assert setup.gpu.recorded == 2


def test_views_are_cloned_before_and_during_a_capture() -> None:
    """Otherwise compiled blocks would compile a new graph during a capture, for a tensor that is no longer a view."""
    seen: list[bool] = []
    setup = Setup()

    def watched(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
        seen.append(batch["text"]._is_view())
        return predict(denoiser, noisy, level, batch, facts)

    replay = Replay(SimpleNamespace(predict=watched, graph_inputs=dict), {setup.net: setup.gradients}, gpu=setup.gpu)
    slot = torch.rand(100)
    for _ in range(5):
        text = slot[:15].view(3, 5)
        assert text._is_view()
        replay(setup.net, torch.rand(3, 6), torch.ones(3), {"text": text}, FACTS).sum().backward()
    assert setup.gpu.recorded == 1
    assert not any(seen)


def test_captures_are_released_if_a_new_shape_needs_their_memory() -> None:
    setup = Setup(free=SCARCE)
    for seed in range(3):
        setup.step(seed, 2)
    assert (setup.gpu.recorded, setup.gpu.pools) == (1, 1)
    setup.step(5, 4, micro_batches=1)
    setup.step(6, 2)
    assert (setup.gpu.recorded, setup.gpu.pools) == (2, 2), "let go, and recorded again"
    assert len(setup.lines) == 1


def test_captures_are_turned_off_if_an_uncaptured_shape_has_no_room_beside_them() -> None:
    setup = Setup(free=SCARCE)
    for seed in range(3):
        setup.step(seed, 2)
    setup.gpu._waits = False  # with larger samples the step is GPU-bound
    for seed in range(4):
        setup.step(seed, sizes=(4, 2))
    assert setup.lines[1:] == [BUSY.format(4), OFF + "there is no room for it beside samples of other shapes"]
    setup.step(1, 2)


def test_without_gradients_the_model_is_called_as_usual() -> None:
    setup = Setup()
    with torch.no_grad():
        for _ in range(6):
            setup.replay(setup.net, torch.ones(1, 6), torch.ones(1), {"text": torch.ones(1, 5)}, FACTS)
    assert setup.gpu.requested == setup.gpu.recorded == 0


def test_running_out_of_memory_during_a_capture_does_not_stop_the_run() -> None:
    setup = Setup(error=torch.OutOfMemoryError("CUDA out of memory"))
    for seed in range(4):
        setup.step(seed)
    why = "the GPU's memory was full before all of it was captured"
    assert setup.lines == [f"CUDA graph: off for latents [3, 6]: {why}"]


def test_a_failed_capture_turns_graphs_off_and_the_run_continues() -> None:
    setup = Setup(error=GraphCaptureError("operation not permitted when stream is capturing"))
    for seed in range(4):
        setup.step(seed)
    found = "a capture failed: operation not permitted when stream is capturing"
    assert setup.lines == [f"{OFF}{found}. Losses are not affected; please report this"]
    launched = setup.gpu.on_side_stream
    setup.step(9)
    assert setup.gpu.on_side_stream == launched == WARM_UP, "nothing is left on the side stream"


def test_a_failed_capture_releases_earlier_captures() -> None:
    """All graphs share the random generator's state, which a failed capture replaces."""
    setup = Setup()
    for seed in range(3):
        setup.step(seed)
    setup.gpu._error = GraphCaptureError("operation not permitted when stream is capturing")
    for seed in range(4):
        setup.step(seed, sizes=(2, 3))
    assert setup.gpu.recorded == 1
    assert setup.lines[-1].startswith(OFF + "a capture failed")


def test_shapes_that_evict_each_other_turn_graphs_off() -> None:
    setup = Setup(free=SCARCE)
    for size in range(2, 40):
        setup.step(size, sizes=(1, 1, 1, 1, size))
    assert setup.lines[1:] == [OFF + "samples of many shapes take the memory from each other"]
    assert setup.gpu.recorded == PROBES + 1


def test_captures_that_were_worth_it_make_room_for_another_shape() -> None:
    setup = Setup(free=SCARCE)
    for size in range(2, 6):
        setup.step(size, sizes=(1,) * (WORTH + 1 + WARM_UP))
        setup.step(size, size, micro_batches=1)
    assert len(setup.lines) == 1
    assert setup.gpu.recorded == 4


def test_a_model_that_synchronizes_is_not_captured() -> None:
    setup = Setup(synchronizes=True)
    for seed in range(4):
        setup.step(seed)
    assert setup.lines == ["CUDA graph: off for latents [3, 6]: the model waits for the GPU in its forward pass"]
    assert setup.gpu.recorded == 0


def test_watched_collects_every_synchronization_and_leaves_other_warnings_alone(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def warn(text: str, kind: type[Warning] = UserWarning) -> None:
        warnings.warn(text, kind, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with GraphDevice().watched() as found:
            for _ in range(2):
                warn("called a synchronizing CUDA operation")
            elsewhere = threading.Thread(target=warn, args=("called a synchronizing CUDA operation",))
            elsewhere.start()
            elsewhere.join()
            warn("Synchronization debug mode is a prototype feature")
            warn("of no use any more", DeprecationWarning)
            warn("of interest")
    assert len(found) == 2
    assert [str(one.message) for one in recwarn] == ["of interest"]
    assert modes == ["warn", 0]


GRADIENTS = 4 * sum(one.numel() for one in Net().parameters())


@pytest.mark.parametrize(("missing", "recorded"), [(0, 1), (1, 0)])
def test_a_capture_needs_room_for_activations_and_gradients(missing: int, recorded: int) -> None:
    setup = Setup(free=int(1.3 * GIB) + (1 + STATES) * GRADIENTS + GIB - missing)
    for seed in range(4):
        setup.step(seed)
    assert setup.gpu.recorded == recorded
    if not recorded:
        why = "it takes 2.30 GiB of its own, and 2.30 GiB are free"
        assert setup.lines == [f"CUDA graph: off for latents [3, 6]: {why}"]


@pytest.mark.parametrize(("size", "recorded"), [(2, 2), (4, 1)])
def test_a_smaller_shape_reuses_the_memory_of_a_larger_capture(size: int, recorded: int) -> None:
    """A capture can reuse the pool's memory if it needs no more than an earlier one."""
    setup = Setup(free=8 * GIB)
    for seed in range(3):
        setup.step(seed, 3)
    setup.gpu._kept = GIB * size // 3
    setup.step(5, size, micro_batches=WARM_UP)
    setup.gpu._free = 3 * GIB
    setup.step(6, size)
    assert setup.gpu.recorded == recorded


def test_capturing_again_needs_no_room_for_optimizer_states() -> None:
    setup = Setup(free=int(1.3 * GIB) + (1 + STATES) * GRADIENTS + GIB)
    for seed in range(3):
        setup.step(seed)
    setup.replay.release()
    setup.gpu._free -= STATES * GRADIENTS  # the optimizer states are allocated now
    setup.step(7)
    assert setup.gpu.recorded == 2


def test_a_released_capture_is_captured_again() -> None:
    setup = Setup()
    for seed in range(3):
        setup.step(seed)
    setup.replay.release()
    setup.step(7)
    assert setup.gpu.recorded == 2
    assert len(setup.lines) == 1


def test_a_pass_beside_training_is_replayed_or_launched_and_never_leads_to_a_capture() -> None:
    setup, given = Setup(), [torch.rand(3, width) for width in (6, 5, 1)]

    def aside() -> Tensor:
        with setup.replay.no_capture():
            batch = {"text": given[1], "latents": given[0]}
            return setup.replay(setup.net, given[0], given[2].flatten(), batch, FACTS).detach().clone()

    launched = [aside() for _ in range(WARM_UP + 1)]
    assert (setup.gpu.recorded, setup.gpu.requested) == (0, 0)
    for seed in range(2):
        setup.step(seed)
    assert setup.gpu.recorded == 1, "its passes have not shortened the warm-up, or lengthened it"
    replays = setup.replay.counters["cuda_graph.replays"]
    assert torch.equal(aside(), launched[0])
    assert setup.replay.counters == {"cuda_graph.captures": 1, "cuda_graph.replays": replays + 1}
    setup.step(7)


def test_weights_that_have_moved_are_captured_again() -> None:
    setup = Setup()
    for seed in range(3):
        setup.step(seed)
    setup.net.last.weight.data = setup.net.last.weight.data.clone()
    setup.step(7)
    assert setup.gpu.recorded == 2


@pytest.mark.parametrize("other", [3, 2], ids=["the same", "another shape"])
def test_a_second_forward_pass_before_the_backward_pass_is_an_error(other: int) -> None:
    setup = Setup()
    for seed in range(3):
        setup.step(seed, sizes=(3, 2))

    def answer(size: int) -> Tensor:
        batch = {"text": torch.ones(size, 5), "latents": torch.ones(size, 6)}
        return setup.replay(setup.net, torch.ones(size, 6), torch.ones(size), batch, FACTS)

    for seed in range(3):
        setup.step(seed, sizes=(3, 2))
    first = answer(3)
    answer(other)
    with pytest.raises(RuntimeError, match="before the backward pass of this one"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("adapter", "strengths", "prepared", "moves", "recorded"),
    [
        ({}, {}, Preparation(2, compiled=True), False, True),
        ({"by_module": {"Attention": {"algo": "lokr", "factor": 4}}}, {}, Preparation(2, compiled=True), False, True),
        ({"dropout": 0.1}, {}, Preparation(2, compiled=True), False, False),
        ({"by_module": {"Attention": {"dropout": 0.1}}}, {}, Preparation(2, compiled=True), False, False),
        ({"kind": "full_finetune"}, {}, Preparation(2, compiled=True), False, False),
        ({}, {"faint": 0.5}, Preparation(2, compiled=True), False, False),
        ({}, {}, Preparation(2, compiled=False), False, False),
        ({}, {}, Preparation(2, compiled=True, recomputes=True), False, False),
        ({}, {}, Preparation(2, compiled=True), True, False),
    ],
)
def test_which_models_may_be_captured(
    adapter: dict[str, Any], strengths: dict[str, float], prepared: Preparation, moves: bool, recorded: bool
) -> None:
    config: Any = SimpleNamespace(adapter=Adapter.model_validate(adapter), keeps_masked_tokens=False)
    experts = {"high_noise": Preparation(2, compiled=True), "low_noise": prepared}
    trained_model: Any = SimpleNamespace(
        spec=spec_of("wan"), facts=SimpleNamespace(family="wan"), prepared=experts, strengths=strengths,
        host=SimpleNamespace(moves=moves),
    )  # fmt: skip
    assert (why_not_captured(config, trained_model) is None) is recorded


def test_a_family_without_graph_inputs_is_not_captured() -> None:
    config: Any = SimpleNamespace(adapter=Adapter(), keeps_masked_tokens=False)
    trained_model: Any = SimpleNamespace(
        spec=spec_of("stable_audio"), facts=SimpleNamespace(family="stable_audio"), strengths={},
        prepared={"": Preparation(2, compiled=True)}, host=SimpleNamespace(moves=False),
    )  # fmt: skip
    assert why_not_captured(config, trained_model) == "stable_audio has not been captured on a GPU yet"


def test_a_replay_reads_which_tokens_are_kept_from_its_inputs(tiny_model: TinyModel) -> None:
    """Every sample keeps different tokens; one capture serves all of them."""
    flux = opened(tiny_model, "flux", "dev")
    router = flux.router(Route(0, 2, 0.5))
    weights = {name: one for name, one in flux.denoiser.named_parameters() if name.endswith("attn.to_q.weight")}
    for one in weights.values():
        one.requires_grad_(True)
    gradients, device = FlatGradients(weights, small=10), Device(True, None, 8 * GIB, synchronizes=False)
    replay = Replay(router.spec, {flux.denoiser: gradients}, gpu=device)
    for index in range(WARM_UP + 3):
        batch, level = router.routed(flux.batch((index,))), torch.full((1,), 0.5)
        gradients.open()
        answer = replay(flux.denoiser, batch.tensors["latents"], level, batch.tensors, flux.facts)
        answer.square().sum().backward()
        gradients.collect()
        torch.testing.assert_close(answer, flux.answer(batch, router.spec))
        gradients.close()
    assert (device.recorded, replay.counters["cuda_graph.replays"]) == (1, 3)

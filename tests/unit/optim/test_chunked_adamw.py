"""AdamW with its state in chunks: homes, precisions, skipped steps, saved state."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from gracetune.config.run_config import OptimizerState, StatePrecision
from gracetune.optim.chunked_adamw import RESIDENT, ChunkedAdamW, StateChoice
from gracetune.optim.named_state import NamedState, StateMismatchError
from gracetune.optim.state_precision import FIRST, LAYOUTS, SECOND, Scratch, pack, unpack
from gracetune.optim.state_sizes import BYTES, passing_bytes, state_bytes
from gracetune.optim.weight_waits import wait_in
from gracetune.train.gradients import GradientClipping, SummedGradients

PRECISIONS = get_args(StatePrecision)
SHAPES = {"matrix": (100, 30), "norm": (77,), "other": (300, 10), "bias": (5,)}
"""With chunks of 1,000 elements, matrices are split. `norm` is in fp32."""
STEPS = 20


def weights() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(one if name == "norm" else one.bfloat16()) for name, one in values.items()}


def chunked(
    trained: dict[str, nn.Parameter], precision: StatePrecision, resident: int = 0, chunk: int = 1000
) -> ChunkedAdamW:
    state = StateChoice(precision, resident, slots=2, chunk_elements=chunk)
    return ChunkedAdamW([{"params": [*trained.items()], "name": "all"}], lr=1e-2, state=state)


def gradients(trained: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(one.shape, generator=generator).to(one.dtype) for name, one in trained.items()}


def take(optimizer: ChunkedAdamW, trained: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        optimizer.load_ahead(0)
        for name, gradient in gradients(trained, step).items():
            optimizer.sums[0].add(trained[name], gradient)
        optimizer.step()


def equal(one: dict[str, nn.Parameter], two: dict[str, nn.Parameter]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in SHAPES)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_streamed_resident_and_resumed_states_give_the_same_bits(precision: StatePrecision) -> None:
    """The resumed state has other chunks. A part of the mixed one is resident."""
    streamed, resident, mixed, resumed = (weights() for _ in range(4))
    one = chunked(streamed, precision)
    homes = [chunk.home for chunk in chunked(mixed, precision, resident=20_000).chunks]
    assert len(homes) > 6
    assert set(homes) == {"resident", "streamed"}
    take(one, streamed, range(STEPS))
    take(chunked(resident, precision, RESIDENT), resident, range(STEPS))
    take(chunked(mixed, precision, 20_000), mixed, range(STEPS))
    assert equal(streamed, resident)
    assert equal(streamed, mixed)
    first = chunked(resumed, precision)
    take(first, resumed, range(STEPS // 2))
    saved = first.named_state()
    saved = NamedState({name: tensor.clone() for name, tensor in saved.tensors.items()}, saved.json)
    second = chunked(resumed, precision)
    second.load_named_state(saved)
    take(second, resumed, range(STEPS // 2, STEPS))
    assert equal(streamed, resumed)
    assert one.host_bytes == sum(chunk.size for chunk in one.chunks) >= BYTES[precision] * 6082


@pytest.mark.parametrize("precision", ["fp32", "residual"])
def test_an_exact_master_is_that_of_torchs_adamw_in_fp32(precision: StatePrecision) -> None:
    ours, theirs = weights(), {name: nn.Parameter(one.detach().float()) for name, one in weights().items()}
    take(chunked(ours, precision), ours, range(STEPS))
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, fused=True)
    for step in range(STEPS):
        for name, gradient in gradients(ours, step).items():
            theirs[name].grad = gradient.float()
        reference.step()
    for name, one in ours.items():
        assert torch.equal(one, theirs[name].to(one.dtype))


def test_second_moments_in_bf16_follow_small_changes() -> None:
    """Rounding to nearest would keep the second moment at its first value."""
    layout, elements = LAYOUTS["residual_bf16_moments"], 4096
    packed = layout.views(torch.zeros(layout.size(elements), dtype=torch.uint8), elements)
    weight, scratch = torch.zeros(elements, dtype=torch.bfloat16), Scratch(elements, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor(3.0)
    packed[SECOND].fill_(3.0)
    for _ in range(1000):
        master, first, second = unpack(packed, [(weight, 0)], scratch)
        second.lerp_(torch.tensor(0.5), 0.001)
        exact.lerp_(torch.tensor(0.5), 0.001)
        pack(master, first, second, packed, [(weight, 0)], scratch, generator)
    assert packed[SECOND].float().mean() == pytest.approx(float(exact), rel=2e-3)
    assert not packed[FIRST].any()


def test_a_bad_step_leaves_no_trace() -> None:
    trained = weights()
    optimizer = chunked(trained, "residual_bf16_moments")
    take(optimizer, trained, range(3))
    before = {name: tensor.clone() for name, tensor in optimizer.named_state().tensors.items()}
    values = {name: one.detach().clone() for name, one in trained.items()}
    sums = SummedGradients(optimizer.sums[0])
    sums.open()
    (trained["matrix"].float().sum() * float("inf")).backward()
    norm = sums.finish(1.0, GradientClipping())
    assert not norm.isfinite()
    optimizer.found_inf = (~norm.isfinite()).float()
    optimizer.step()
    sums.close()
    assert all(torch.equal(one, values[name]) for name, one in trained.items())
    after = optimizer.named_state()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.tensors.items())
    assert after.json["steps"] == [3.0]
    optimizer.found_inf = None
    optimizer.sums[0].divisor.fill_(1.0)
    take(optimizer, trained, range(3, 6))
    twin = weights()
    other = chunked(twin, "residual_bf16_moments")
    take(other, twin, range(3))
    other.step()  # nothing was added: no group takes a step
    take(other, twin, range(3, 6))
    assert equal(trained, twin)


@pytest.mark.parametrize("clip", [GradientClipping("norm", 0.5), GradientClipping("value", 0.01)])
def test_sums_scaling_and_clipping_are_those_of_fp32_gradients(clip: GradientClipping) -> None:
    """Two micro-batches, of four samples together. What an abandoned step has added is not taken."""
    ours, theirs = weights(), {name: nn.Parameter(one.detach().float()) for name, one in weights().items()}
    optimizer = chunked(ours, "fp32")
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, fused=True)
    sums = SummedGradients(optimizer.sums[0])
    inputs = [{name: torch.full(one.shape, 0.5 + number) for name, one in ours.items()} for number in range(2)]
    sums.open()
    torch.stack([(one.float() * 7).sum() for one in ours.values()]).sum().backward()
    sums.close()
    for _ in range(3):
        sums.open()
        for members in inputs:
            torch.stack([(one.float() * members[name]).sum() for name, one in ours.items()]).sum().backward()
            assert all(one.grad is None for one in ours.values())
            torch.stack([(one * members[name]).sum() for name, one in theirs.items()]).sum().backward()
        norm = sums.finish(0.25, clip)
        for one in theirs.values():
            assert one.grad is not None
            one.grad *= 0.25
        assert clip.limit is not None
        if clip.kind == "norm":
            expected = torch.nn.utils.clip_grad_norm_(theirs.values(), clip.limit)
        else:
            expected = torch.nn.utils.get_total_norm([one.grad for one in theirs.values() if one.grad is not None])
            torch.nn.utils.clip_grad_value_(theirs.values(), clip.limit)
        torch.testing.assert_close(norm, expected)
        optimizer.step()
        reference.step()
        reference.zero_grad()
        sums.close()
    for name, one in ours.items():
        torch.testing.assert_close(one.detach(), theirs[name].detach().to(one.dtype), rtol=1e-2, atol=1e-5)


def test_a_state_of_another_precision_or_model_is_rejected_and_changes_nothing() -> None:
    trained = weights()
    optimizer = chunked(trained, "fp32")
    take(optimizer, trained, range(2))
    before = {name: tensor.clone() for name, tensor in optimizer.named_state().tensors.items()}
    others = {name: one for name, one in weights().items() if name != "bias"}
    for other in (chunked(weights(), "bf16_moments"), chunked(others, "fp32")):
        with pytest.raises(StateMismatchError, match="--resume none"):
            optimizer.load_named_state(other.named_state())
    after = optimizer.named_state().tensors
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))  # type: ignore[no-any-return]


def test_each_module_waits_for_its_own_chunks_before_it_is_called() -> None:
    model = nn.Sequential(nn.Linear(20, 20), Block(), Block(), nn.Linear(20, 20)).bfloat16()
    trained = dict(model.named_parameters())
    optimizer = ChunkedAdamW(
        [{"params": [*trained.items()]}], lr=1e-2, state=StateChoice(slots=2, chunk_elements=300)
    )  # fmt: skip
    wait_in(model, ["Block"], optimizer)
    awaited = []
    for module in model:
        module.register_forward_pre_hook(lambda _module, _inputs: awaited.append(optimizer._awaited[0]))
    for name, one in trained.items():
        optimizer.sums[0].add(one, torch.ones_like(one))
        assert optimizer.last_chunk([one]) is not None, name
    optimizer.step()
    assert optimizer._awaited == [-1]
    model(torch.zeros(1, 20, dtype=torch.bfloat16))
    expected = [optimizer.last_chunk(list(module.parameters())) or 0 for module in model]
    assert awaited == expected
    assert expected == sorted({*expected})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_planned_sizes_are_those_of_the_layouts(precision: StatePrecision) -> None:
    assert LAYOUTS[precision].bytes_per_element == BYTES[precision]
    size, one = 1 << 20, nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16))
    optimizer = ChunkedAdamW([{"params": [("one", one)]}], state=StateChoice(precision))
    optimizer.sums[0].add(one, one.detach())
    optimizer.step()
    planned = OptimizerState(home="streamed", precision=precision)
    assert optimizer.host_bytes == state_bytes(planned, size)
    scratch = sum(buffer.nbytes for buffer in optimizer._scratch._buffers.values())
    assert optimizer.device_bytes + scratch == passing_bytes(planned, size)


def test_hooks_keep_neither_optimizer_nor_weights_alive() -> None:
    """Python's garbage collector does not see hooks of parameters: what they hold strongly is never freed."""
    model = nn.Sequential(Block(), Block()).bfloat16()
    optimizer = ChunkedAdamW([{"params": [*model.named_parameters()]}])
    sums = SummedGradients(optimizer.sums[0], load_ahead=partial(optimizer.load_ahead, 0))
    wait_in(model, ["Block"], optimizer)
    sums.open()
    model(torch.zeros(1, 20, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    known = [weakref.ref(one) for one in (model, optimizer, optimizer.sums[0], next(model.parameters()))]
    del model, optimizer, sums
    gc.collect()
    assert [one() for one in known] == [None] * 4

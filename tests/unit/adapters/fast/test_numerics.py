"""The factorised forms against peft, lycoris-lora and our own reference: the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from torch import nn

from gracetune.adapters.attach import attach
from gracetune.adapters.computation import Computation
from gracetune.adapters.delta import EPSILON
from gracetune.adapters.fast import products
from gracetune.config.run_config import Adapter
from unit.adapters.denoisers import shake
from unit.adapters.fast.nets import CASES, WIDTH, Passes, adapt, distance, net, passes, relative

LIBRARY: dict[str, Any] = {"locon": LoConModule, "loha": LohaModule, "lokr": LokrModule}
SIZES = st.sampled_from([6, 12, 16, 30, 64])


@st.composite
def adapters(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["lora", "dora", "locon", "lokr", "loha"]))
    options: dict[str, Any] = {
        "kind": kind,
        "rank": draw(st.integers(1, 9)),
        "alpha": draw(st.sampled_from([None, 1.0, 3.5, 8.0])),
        "strength": draw(st.sampled_from([1.0, 0.5, 2.0, -1.0])),
    }
    if kind == "lokr":
        options |= {
            "factor": draw(st.sampled_from([-1, 2, 4, 6])),
            "full_rank": draw(st.booleans()),
            "decompose_both": draw(st.booleans()),
        }
    return options


class TestSameAsTheReference:
    """The reference is peft (LoRA, DoRA) or the change built in fp32 (the others)."""

    @given(adapters(), SIZES, SIZES, st.booleans(), st.sampled_from([(5,), (2, 3), (1, 2, 2)]))
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_in_fp32(
        self, options: dict[str, Any], inputs: int, outputs: int, bias: bool, rows: tuple[int, ...]
    ) -> None:
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(inputs, outputs, bias=bias)).requires_grad_(False)
        given_ = torch.randn(*rows, inputs)
        found = []
        for path in ("auto", "reference"):
            layer = nn.Sequential(nn.Linear(inputs, outputs, bias=bias)).requires_grad_(False)
            layer.load_state_dict(base.state_dict())
            attached = adapt(layer, options, path)  # type: ignore[arg-type]
            x = given_.clone().requires_grad_()
            y = layer(x)
            y.square().sum().backward()
            parameters = attached.parameters()
            gradients = {name: parameter.grad for name, parameter in parameters.items()}
            found.append((y.detach(), {**gradients, "x": x.grad}))
        (ours, our_gradients), (theirs, their_gradients) = found
        assert relative(ours, theirs) <= 1e-5
        for name, gradient in their_gradients.items():
            assert gradient is not None
            # Of a sum that cancels nothing may be left to compare with: the whole gradient is the measure.
            assume(gradient.norm() > 1e-4)
            assert relative(our_gradients[name], gradient) <= 1e-5, name  # type: ignore[arg-type]

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("strength", [1.0, 0.25])
    def test_in_a_net(self, case: str, strength: float) -> None:
        ours, theirs = self.both(case, torch.float32, strength=strength)
        assert relative(ours.output, theirs.output) <= 1e-5
        assert distance(ours.gradients, theirs.gradients, without="") <= 1e-5

    def both(self, case: str, dtype: torch.dtype, **options: Any) -> tuple[Passes, Passes]:
        found = []
        for path in ("auto", "reference"):
            model = net(dtype)
            attached = adapt(model, CASES[case], path, **options)  # type: ignore[arg-type]
            found.append(passes(model, attached.parameters()))
        return found[0], found[1]


def own_error(case: str, *, autocast: bool, dtype: torch.dtype) -> Passes:
    """peft's or lycoris-lora's own layers, with the values our layers have."""
    options = CASES[case]
    model = net(dtype)
    if options["kind"] in ("lora", "dora"):
        return passes(model, adapt(model, options, "reference").parameters(), autocast=autocast)
    values = adapt(net(), options, "reference").state()
    parameters: dict[str, nn.Parameter] = {}
    for path, layer in values.layers.items():
        more = {}
        if options["kind"] == "lokr":
            more = {
                "factor": options["factor"],
                "decompose_both": options.get("decompose_both", False),
                "full_matrix": options.get("full_rank", False),
            }
        rank = options.get("rank", 16)
        module = LIBRARY[options["kind"]]("", model.get_submodule(path), 1.0, rank, rank, **more).float()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(layer.tensors[name])
                parameters[f"{path}.{name}"] = parameter
        module.apply_to()
    return passes(model, parameters, autocast=autocast)


@pytest.mark.parametrize("case", CASES)
class TestSameAsTheLibrariesThemselves:
    def test_in_fp32(self, case: str) -> None:
        model = net()
        ours = passes(model, adapt(model, CASES[case]).parameters())
        theirs = own_error(case, autocast=False, dtype=torch.float32)
        assert relative(ours.output, theirs.output) <= 1e-5
        assert distance(ours.gradients, theirs.gradients, without="") <= 1e-5

    @pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 1.1), (torch.float32, 1.3)], ids=["bf16", "fp32"])
    def test_bf16_is_near_fp32_and_no_worse_than_they_are(self, case: str, dtype: torch.dtype, times: float) -> None:
        """By the base's precision. From an fp32 one lycoris-lora rounds only once, the sum of weight and change."""
        exact = net()
        wanted = passes(exact, adapt(exact, CASES[case], "reference").parameters()).gradients
        model = net(dtype)
        ours = distance(passes(model, adapt(model, CASES[case]).parameters(), autocast=True).gradients, wanted)
        theirs = distance(own_error(case, autocast=True, dtype=dtype).gradients, wanted)
        assert ours <= 1e-2
        assert ours <= times * theirs

    def test_without_autocast_too(self, case: str) -> None:
        exact, model = net(), net(torch.bfloat16)
        wanted = passes(exact, adapt(exact, CASES[case], "reference").parameters()).gradients
        assert distance(passes(model, adapt(model, CASES[case]).parameters()).gradients, wanted) <= 1e-2


class TestGradients:
    """The hand-written gradients against finite differences."""

    @staticmethod
    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))

    @pytest.mark.parametrize("w1_first", [True, False])
    def test_kronecker(self, w1_first: bool) -> None:
        mode = Computation("kronecker", "", w1_first=w1_first)
        tensors = [self.values(2, 3, 12), self.values(5, 3), self.values(2, 4)]
        assert torch.autograd.gradcheck(
            lambda x, w1, w2: products.kronecker(x, w1, w2, 0.5, mode), [one.requires_grad_() for one in tensors]
        )

    @pytest.mark.parametrize("form", [products.hadamard_by_rank, products.hadamard_rebuilt])
    def test_hadamard(self, form: Any) -> None:
        tensors = [
            self.values(2, 3, 7),
            self.values(5, 2),
            self.values(2, 7),
            self.values(5, 2) + 1,
            self.values(2, 7) + 1,
        ]
        assert torch.autograd.gradcheck(lambda *all_: form(*all_, 0.5), [one.requires_grad_() for one in tensors])

    def test_an_input_that_needs_none(self) -> None:
        w1, w2 = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        products.kronecker(torch.randn(3, 16), w1, w2, 1.0, Computation("kronecker", "")).sum().backward()
        assert w1.grad is not None
        assert w2.grad is not None


class TestRowLengths:
    @given(st.floats(-4, 4), st.integers(1, 6), st.sampled_from([1e-4, 0.1, 10.0]))
    @settings(max_examples=25, deadline=None)
    def test_are_those_of_the_sum(self, scale: float, rank: int, size: float) -> None:
        generator = torch.Generator().manual_seed(rank)
        weight, down, up = (torch.randn(shape, generator=generator) for shape in ((12, 20), (rank, 20), (12, rank)))
        found = products.row_norms(weight, weight.square().sum(1), down, size * up, scale)
        wanted = (weight + scale * size * up @ down).double().norm(dim=1)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)

    def test_of_a_row_that_is_cancelled(self) -> None:
        weight = torch.eye(4)
        lengths = products.row_norms(weight, torch.ones(4), torch.eye(4), -torch.eye(4), 1.0)
        assert torch.equal(lengths, torch.full((4,), EPSILON))

    def test_a_row_of_zeros_stays_one(self) -> None:
        """Merging gives zeros too; peft divides 0 by 0."""
        model = nn.Sequential(nn.Linear(6, 4)).requires_grad_(False)
        model[0].weight[1] = 0
        attached = attach(model, Adapter(kind="dora", targets=("Linear",)), family="wan", default_targets=(), seed=0)
        output = model(torch.ones(2, 6))
        output.square().sum().backward()
        assert bool(output.isfinite().all())
        for parameter in attached.parameters().values():
            assert parameter.grad is not None
            assert bool(parameter.grad.isfinite().all())

    def test_begin_as_the_magnitudes(self) -> None:
        """So an untrained DoRA is the base layer bit for bit."""
        model, base = net(torch.bfloat16), net(torch.bfloat16)
        attach(model, Adapter(kind="dora", targets=("Linear",)), family="wan", default_targets=(), seed=0)
        x = torch.randn(2, 4, 128, dtype=torch.bfloat16)
        assert torch.equal(model(x), base(x))


@pytest.mark.parametrize("case", ["lora", "locon", "lokr", "loha"])
def test_dropout_means_the_same(case: str) -> None:
    """Dropout applies to the adapter's input and not to the base layer's. The same seed drops the same elements."""
    outputs = []
    for path in ("auto", "reference"):
        model = net(blocks=1).train()
        attached = adapt(model, CASES[case], path, dropout=0.5)  # type: ignore[arg-type]
        shake(attached)
        torch.manual_seed(3)
        outputs.append(model(torch.ones(4, 128)))
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_two_hundred_steps_learn_the_same(case: str) -> None:
    """In bf16, the losses of both paths are closer to each other than those of the reference on other data."""

    def losses(path: Any, seed: int) -> torch.Tensor:
        model, teacher = net(torch.bfloat16), net()
        parameters = adapt(model, CASES[case], path).parameters()
        with torch.no_grad():
            for number, weight in enumerate(teacher.parameters()):
                weight.add_(0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        optimizer = torch.optim.AdamW(parameters.values(), lr=2e-3)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _ in range(200):
            x = torch.randn(64, WIDTH, generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x.bfloat16())
            loss = (output.float() - teacher(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found)

    ours, reference, other = losses("auto", 1), losses("reference", 1), losses("reference", 2)
    assert ours[-20:].mean() < 0.98 * ours[:20].mean()
    smooth = [curve.unfold(0, 20, 20).mean(1) for curve in (ours, reference, other)]
    assert (smooth[0] - smooth[1]).abs().max() < (smooth[2] - smooth[1]).abs().max()
    assert (smooth[0] / smooth[1] - 1).abs().max() < 0.02

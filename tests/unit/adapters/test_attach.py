"""Every kind of adapter on a transformer and on a U-Net: trained, saved, loaded, switched off, taken off again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lycoris import LycorisNetwork
from torch import Tensor, nn

from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.delta import delta
from gracetune.adapters.fast.modules import AdaptedLinear
from gracetune.adapters.merge import Weighted, merge_module
from gracetune.adapters.state import AdapterState
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError, GracetuneError
from gracetune.models.registry import spec_of
from unit.adapters.denoisers import ADAPTERS, Denoiser, TinyModel, load, shake

FAMILIES = ("wan", "sdxl")
RANDOM = ("lora", "dora", "locon", "loha", "lokr")
STEPS = 10
EVERYDAY = ("lora", "dora", "lokr")
EVERY_KIND = [
    pytest.param(family, kind, id=f"{family}-{kind}", marks=[pytest.mark.full] if rare else [])
    for family in FAMILIES
    for kind in ADAPTERS
    for rare in [family == "sdxl" and kind not in EVERYDAY]
]
"""On the U-Net, whose convolutions are slow, most kinds are left to `make test-full`."""


@pytest.fixture(scope="module")
def wan(tiny_model: TinyModel) -> Callable[[], Denoiser]:
    original = load(tiny_model, "wan")
    return lambda: copy.deepcopy(original)


@dataclass(frozen=True)
class Trained:
    denoiser: Denoiser
    attached: Attached
    weights: dict[str, Tensor]
    """The model's own values, before the adapter is attached."""
    base: Tensor
    first: Tensor
    last: Tensor
    losses: list[float]


def train(denoiser: Denoiser, attached: Attached, steps: int = STEPS, lr: float = 1e-2) -> list[float]:
    optimizer = torch.optim.AdamW(attached.parameters().values(), lr=lr)
    wanted = torch.randn(denoiser().shape, generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(steps):
        loss = (denoiser().float() - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module", params=[pytest.param(case.values, id=case.id, marks=case.marks) for case in EVERY_KIND])
def trained(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Trained:
    family, kind = request.param
    denoiser = load(tiny_model, family)
    weights = {name: tensor.clone() for name, tensor in denoiser.model.state_dict().items()}
    base = denoiser()
    attached = denoiser.attach(kind)
    first = denoiser().detach()
    losses = train(denoiser, attached)
    return Trained(denoiser, attached, weights, base, first, denoiser().detach(), losses)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_acting_tensors_of_a_layer_are_0_at_first(kind: str, wan: Callable[[], Denoiser]) -> None:
    acting = wan().attach(kind).zero_initialized()
    assert acting
    for path, tensors in acting.items():
        assert tensors, path
        assert not any(tensor.any() for tensor in tensors), path


def test_held_values_are_restored_bit_for_bit(trained: Trained) -> None:
    attached = trained.attached
    assert all(any(tensor.any() for tensor in tensors) for tensors in attached.zero_initialized().values())
    before = {name: parameter.detach().clone() for name, parameter in attached.parameters().items()}
    fitting = attached.fitting(attached.state())
    nothing = {path: {name: 0 * tensor for name, tensor in tensors.items()} for path, tensors in fitting.items()}
    with attached.holding(nothing) as own:
        assert all(not parameter.any() for parameter in attached.parameters().values())
        assert all(torch.equal(own[name], tensor) for name, tensor in before.items())
    with attached.amplified(2.0**10), torch.no_grad():
        assert not torch.allclose(trained.denoiser(), trained.last)
    assert all(torch.equal(parameter, before[name]) for name, parameter in attached.parameters().items())


class TestEveryKind:
    """In this order: the last takes the adapter off."""

    def test_begins_as_the_base_and_learns(self, trained: Trained) -> None:
        torch.testing.assert_close(trained.first, trained.base, rtol=1e-5, atol=1e-5)
        assert trained.losses[-1] < 0.95 * trained.losses[0]
        assert (trained.last - trained.base).abs().max() > 1e-2

    def test_trains_fp32_parameters_of_the_model_and_nothing_else(self, trained: Trained) -> None:
        flags = {id(parameter) for parameter in trained.denoiser.model.parameters() if parameter.requires_grad}
        parameters = trained.attached.parameters()
        assert flags == {id(parameter) for parameter in parameters.values()}
        assert all(parameter.dtype == torch.float32 for parameter in parameters.values())

    def test_disabled_is_the_base_bit_for_bit(self, trained: Trained) -> None:
        with trained.attached.disabled():
            assert torch.equal(trained.denoiser(), trained.base)
        assert torch.equal(trained.denoiser(), trained.last)
        assert all(parameter.requires_grad for parameter in trained.attached.parameters().values())

    def test_state_is_a_copy_that_loads_into_a_fresh_one(self, trained: Trained, tiny_model: TinyModel) -> None:
        state = trained.attached.state()
        for layer in state.layers.values():
            assert all(tensor.device.type == "cpu" for tensor in layer.tensors.values())
            assert all(tensor.dtype == torch.float32 for name, tensor in layer.tensors.items() if name != "on_input")
            assert layer.rank is not None or layer.alpha == 1.0
        kind = next(iter(state.layers.values())).algorithm
        fresh = load(tiny_model, trained.denoiser.family)
        attached = fresh.attach(kind, seed=99)
        attached.load(state)
        assert torch.equal(fresh(), trained.last)
        for path, layer in attached.state().layers.items():
            assert all(torch.equal(layer.tensors[name], tensor) for name, tensor in state.layers[path].tensors.items())

    @pytest.mark.parametrize("strength", [1.0, -0.5])
    def test_is_the_base_with_the_delta_merged(self, trained: Trained, tiny_model: TinyModel, strength: float) -> None:
        merged = load(tiny_model, trained.denoiser.family)
        merge_module(Weighted(trained.attached.state(), strength), merged.model)
        with trained.attached.with_strength(strength):
            torch.testing.assert_close(merged(), trained.denoiser(), rtol=1e-5, atol=1e-5)

    def test_detach_gives_the_model_back(self, trained: Trained) -> None:
        model = trained.denoiser.model
        trained.attached.detach()
        state = model.state_dict()
        assert list(state) == list(trained.weights)
        assert all(torch.equal(state[name], tensor) for name, tensor in trained.weights.items())
        assert torch.equal(trained.denoiser(), trained.base)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert all(type(module).__module__.split(".")[0] in ("torch", "diffusers") for module in model.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert not hasattr(model, "peft_config")


@pytest.mark.parametrize(("family", "kind"), EVERY_KIND)
def test_bf16_base(tiny_model: TinyModel, family: str, kind: str) -> None:
    denoiser = load(tiny_model, family, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in denoiser.model.named_parameters()}
    base = denoiser()
    attached = denoiser.attach(kind)
    assert torch.equal(denoiser(), base) or kind == "dora"  # m / |W| is not always exactly 1
    torch.testing.assert_close(denoiser(), base, rtol=2e-2, atol=2e-2)
    shake(attached)
    plain = denoiser()
    with torch.autocast("cpu", torch.bfloat16):
        cast = denoiser()
    assert plain.dtype == torch.bfloat16
    assert (plain - base).float().norm() > 2 * (plain - cast).float().norm()
    torch.testing.assert_close(plain.float(), cast.float(), rtol=5e-2, atol=5e-2)
    plain.float().square().mean().backward()
    for parameter in attached.parameters().values():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert bool(torch.isfinite(parameter.grad).all())
    attached.detach()
    assert {name: parameter.dtype for name, parameter in denoiser.model.named_parameters()} == dtypes


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["locon", "loha", "lokr", "full_delta"])
def test_a_small_change_is_not_lost_in_a_bf16_base(kind: str, path: Any) -> None:
    """The change is a thousandth of the weight. LyCORIS' (W + D) - W in bf16 would round most of it off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(torch.bfloat16)
    adapter = Adapter(kind=kind, rank=4, targets=("Linear",))  # type: ignore[arg-type]
    attached = attach(model, adapter, family="wan", default_targets=(), seed=0, adapter_path=path)
    shake(attached, 0.01)
    state = attached.state()
    change = delta(state.layers["0"], (64, 64))
    small = 1e-4 / float(change.abs().max())
    rounded = (model[0].weight + (small * change).bfloat16()) - model[0].weight
    assert (rounded.float() - small * change).norm() > 0.3 * (small * change).norm()
    with attached.with_strength(small):
        x = torch.eye(64, dtype=torch.bfloat16)
        if isinstance(model[0], AdaptedLinear):
            added = model[0].added(x).float().T
        else:
            added = small * model[0].get_submodule("adapter")(model[0], x).float().T
    assert (added - small * change).norm() < 0.01 * (small * change).norm()


@pytest.mark.parametrize("kind", ["locon", "loha", "lokr"])
def test_the_reference_rounds_the_change_once_and_not_its_factors(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    adapter = Adapter(kind=kind, rank=2, targets=("Linear",))  # type: ignore[arg-type]
    attached = attach(model, adapter, family="wan", default_targets=(), seed=0, adapter_path="reference")
    shake(attached)
    x = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        added = model[0].get_submodule("adapter")(model[0], x)
    change = delta(attached.state().layers["0"], (64, 64))
    assert torch.equal(added, nn.functional.linear(x.bfloat16(), change.bfloat16()))


@pytest.mark.parametrize(("family", "kind"), [*EVERY_KIND, ("wan", "full_finetune")])
def test_gradient_checkpointing_changes_nothing(tiny_model: TinyModel, family: str, kind: str) -> None:
    def gradients(checkpointing: bool) -> tuple[Tensor, dict[str, Tensor]]:
        denoiser = load(tiny_model, family)
        denoiser.model.train()
        attached = denoiser.attach(kind, **({"targets": ()} if kind == "full_finetune" else {}))
        if kind != "full_finetune":
            shake(attached)
        if checkpointing:
            denoiser.model.enable_gradient_checkpointing()
        output = denoiser()
        output.square().mean().backward()
        found = {name: parameter.grad for name, parameter in attached.parameters().items()}
        return output.detach(), {name: grad for name, grad in found.items() if grad is not None}

    (plain, expected), (again, found) = gradients(False), gradients(True)
    torch.testing.assert_close(again, plain)
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)


class TestSeed:
    @staticmethod
    def values(denoiser: Denoiser, kind: str, **options: Any) -> dict[str, Tensor]:
        attached = denoiser.attach(kind, **options)
        found = {name: parameter.detach().clone() for name, parameter in attached.parameters().items()}
        attached.detach()
        return found

    @pytest.mark.parametrize("kind", RANDOM)
    def test_decides_everything(self, wan: Callable[[], Denoiser], kind: str) -> None:
        torch.manual_seed(1)
        first = self.values(wan(), kind, seed=3)
        torch.manual_seed(2)
        second = self.values(wan(), kind, seed=3)
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
        other = self.values(wan(), kind, seed=4)
        assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())

    @pytest.mark.parametrize("kind", RANDOM)
    def test_a_layer_does_not_depend_on_the_others(self, wan: Callable[[], Denoiser], kind: str) -> None:
        everything = self.values(wan(), kind, seed=3)
        part = self.values(wan(), kind, seed=3, targets=("blocks.1.attn2",))
        assert len(part) < len(everything)
        assert all(torch.equal(tensor, everything[name]) for name, tensor in part.items())

    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_the_global_generator_does_not_move(self, wan: Callable[[], Denoiser], kind: str) -> None:
        denoiser, before = wan(), torch.get_rng_state()
        denoiser.attach(kind)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("kind", RANDOM)
    def test_first_values_have_all_digits_whatever_the_base_is(self, tiny_model: TinyModel, kind: str) -> None:
        fp32, bf16 = (self.values(load(tiny_model, "wan", dtype), kind) for dtype in (torch.float32, torch.bfloat16))
        values = {name: tensor for name, tensor in fp32.items() if not name.endswith("dora_scale")}
        assert all(torch.equal(bf16[name], tensor) for name, tensor in values.items())
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in values.values())

    def test_two_experts_begin_differently(self, wan: Callable[[], Denoiser]) -> None:
        adapter = Adapter(rank=2)
        high, low = (
            attach(wan().model, adapter, family="wan", expert=expert, default_targets=("to_q",), seed=1).parameters()
            for expert in ("high_noise", "low_noise")  # type: ignore[assignment]
        )
        assert not torch.equal(high["blocks.0.attn1.to_q.lora_A.weight"], low["blocks.0.attn1.to_q.lora_A.weight"])


class TestStrength:
    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_of_the_config_holds_in_training_and_times_that_of_a_sample(
        self, wan: Callable[[], Denoiser], kind: str
    ) -> None:
        denoiser, merged = wan(), wan()
        attached = denoiser.attach(kind, strength=0.5)
        shake(attached)
        state = attached.state()
        weights = copy.deepcopy(merged.model.state_dict())
        for strength in (1.0, 0.5, 2.0):
            merged.model.load_state_dict(weights)
            merge_module(Weighted(state, 0.5 * strength), merged.model)
            with attached.with_strength(strength):
                torch.testing.assert_close(denoiser(), merged(), rtol=1e-5, atol=1e-5)

    def test_zero_would_train_nothing(self, wan: Callable[[], Denoiser]) -> None:
        with pytest.raises(ConfigError, match=r"adapter\.strength"):
            wan().attach("lora", strength=0.0)

    def test_contexts_nest_and_end_even_with_an_error(self, wan: Callable[[], Denoiser]) -> None:
        denoiser = wan()
        base = denoiser()
        attached = denoiser.attach("lokr")
        shake(attached)
        full = denoiser()
        with attached.with_strength(0.5):
            half = denoiser()
            with attached.disabled():
                assert torch.equal(denoiser(), base)
            assert torch.equal(denoiser(), half)
        with pytest.raises(RuntimeError, match="stop"), attached.with_strength(0.5):
            raise RuntimeError("stop")
        assert torch.equal(denoiser(), full)


class TestOptions:
    def test_by_module(self, wan: Callable[[], Denoiser]) -> None:
        attached = wan().attach(
            "lokr", factor=4, rank=4, by_module={"FeedForward": {"algo": "loha", "dim": 3, "alpha": 1}}
        )
        layers = attached.state().layers
        assert layers["blocks.0.attn1.to_q"].algorithm == "lokr"
        ffn = layers["blocks.0.ffn.net.2"]
        assert (ffn.algorithm, ffn.rank, ffn.alpha) == ("loha", 3, 1.0)

    def test_peft_and_lycoris_together(self, wan: Callable[[], Denoiser]) -> None:
        denoiser = wan()
        attached = denoiser.attach("lora", by_module={"FeedForward": {"algo": "lokr", "full_matrix": True}})
        shake(attached)
        merged = wan()
        merge_module(attached.state(), merged.model)
        torch.testing.assert_close(denoiser(), merged(), rtol=1e-5, atol=1e-5)

    def test_the_older_name_of_a_class(self, wan: Callable[[], Denoiser]) -> None:
        layers = wan().attach("lora", by_module={"Attention": {"dim": 5}}).state().layers
        assert layers["blocks.0.attn1.to_q"].rank == 5
        assert layers["blocks.0.ffn.net.2"].rank == 2

    def test_two_attachments_do_not_share_anything(self, wan: Callable[[], Denoiser]) -> None:
        before = {name: value for name, value in vars(LycorisNetwork).items() if name.isupper()}
        first = wan().attach("lokr", factor=2, by_module={"FeedForward": {"factor": 4}})
        second = wan().attach("loha", targets=("attn1",))
        assert {layer.algorithm for layer in second.state().layers.values()} == {"loha"}
        assert len(second.state().layers) == 8
        assert len(first.state().layers) == 20
        shapes = {path: tuple(layer.tensors["lokr_w1"].shape) for path, layer in first.state().layers.items()}
        assert shapes["blocks.0.attn1.to_q"] == (2, 2)
        assert shapes["blocks.0.ffn.net.2"] == (4, 4)
        assert {name: value for name, value in vars(LycorisNetwork).items() if name.isupper()} == before

    def test_misspelt_options_are_rejected_all_at_once(self, wan: Callable[[], Denoiser]) -> None:
        table = {
            "FeedForward": {"factr": 4, "algo": "lokrr", "dim": 0},
            "FeedForwrd": {"factor": 4},
        }
        with pytest.raises(ConfigError) as caught:
            wan().attach("lokr", by_module=table)
        message = str(caught.value)
        assert "by_module.FeedForward.factr" in message
        assert "write `factor`" in message
        assert "write `lokr`" in message
        assert "by_module.FeedForward.dim" in message
        assert "write `FeedForward`" in message

    def test_convolutions_have_their_own_rank(self, tiny_model: TinyModel) -> None:
        attached = load(tiny_model, "sdxl").attach(
            "locon", rank=4, alpha=2.0, conv_rank=3, conv_alpha=6.0, targets=("ResnetBlock2D",)
        )
        layers = attached.state().layers
        found = {(path.rsplit(".", 1)[1], layer.rank, layer.alpha) for path, layer in layers.items()}
        assert {("conv1", 3, 6.0), ("conv2", 3, 6.0), ("time_emb_proj", 4, 2.0)} <= found
        assert ("conv_shortcut", 4, 2.0) in found  # one pixel wide: the linear rank, as in LyCORIS

    @pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[] if kind in EVERYDAY else [pytest.mark.full]) for kind in ADAPTERS]
    )
    def test_a_rank_for_convolutions_adapts_them(self, tiny_model: TinyModel, kind: str) -> None:
        spec = spec_of("sdxl")
        found = {}
        for rank in (None, 3):
            denoiser = load(tiny_model, "sdxl")
            attached = attach(
                denoiser.model, Adapter(kind=kind, rank=2, conv_rank=rank), family="sdxl",  # type: ignore[arg-type]
                default_targets=spec.default_targets, conv_targets=spec.conv_targets, seed=0,
            )  # fmt: skip
            assert attached.notes == ()
            assert attached.selection is not None
            found[rank] = {path for path in attached.selection.paths if "attentions" not in path}
            before = denoiser()
            shake(attached)
            assert not torch.equal(denoiser(), before)
        assert found[None] == set()
        ends = {path.rsplit(".", 1)[1] for path in found[3]}
        assert ends == {"conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv"}

    def test_a_rank_for_convolutions_without_any_is_noted(self, wan: Callable[[], Denoiser]) -> None:
        attached = wan().attach("lora", conv_rank=3, conv_alpha=1.0, targets=())
        assert attached.notes == (
            "adapter.conv_rank and adapter.conv_alpha: no effect, because no convolution is among the adapted layers",
        )

    def test_an_unset_alpha_is_the_rank(self, tiny_model: TinyModel) -> None:
        attached = load(tiny_model, "sdxl").attach("locon", rank=4, conv_rank=3, targets=("ResnetBlock2D",))
        assert all(layer.scale == 1.0 for layer in attached.state().layers.values())

    @pytest.mark.parametrize("kind", ["lora", "lokr"])
    def test_dropout_only_while_training(self, wan: Callable[[], Denoiser], kind: str) -> None:
        denoiser = wan()
        attached = denoiser.attach(kind, dropout=0.5)
        shake(attached)
        assert torch.equal(denoiser(), denoiser())
        denoiser.model.train()
        assert not torch.equal(denoiser(), denoiser())

    def test_defaults_and_untrained_are_the_familys(self, wan: Callable[[], Denoiser]) -> None:
        attached = attach(
            wan().model, Adapter(), family="wan", default_targets=("to_q",), untrained=("blocks.1.attn2",), seed=0
        )
        assert attached.selection is not None
        assert attached.selection.paths == ("blocks.0.attn1.to_q", "blocks.0.attn2.to_q", "blocks.1.attn1.to_q")


class TestModel:
    """Adapters are a part of the model, for everything that walks through models."""

    @pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
    def test_state_dict_and_to(self, wan: Callable[[], Denoiser], kind: str) -> None:
        denoiser = wan()
        attached = denoiser.attach(kind)
        shake(attached)
        twin = wan()
        twin.attach(kind, seed=5)
        twin.model.load_state_dict(denoiser.model.state_dict())
        assert torch.equal(twin(), denoiser())
        denoiser.model.to("meta")
        assert all(parameter.is_meta for parameter in attached.parameters().values())

    @pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha"])
    def test_fsdp_shards_them(self, wan: Callable[[], Denoiser], kind: str) -> None:
        from torch import distributed
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        denoiser = wan()
        attached = denoiser.attach(kind)
        shake(attached)
        before, plain = attached.state(), denoiser()
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            mesh = distributed.init_device_mesh("cpu", (1,))
            for block in denoiser.model.blocks:
                fully_shard(block, mesh=mesh)
            assert all(isinstance(parameter, DTensor) for parameter in attached.parameters().values())
            torch.testing.assert_close(denoiser(), plain)
            denoiser().square().mean().backward()
            assert all(parameter.grad is not None for parameter in attached.parameters().values())
            after = attached.state()
            attached.load(before)
        finally:
            distributed.destroy_process_group()
        for path, layer in before.layers.items():
            assert all(torch.equal(tensor, after.layers[path].tensors[name]) for name, tensor in layer.tensors.items())

    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_compiles_into_one_graph(self, kind: str) -> None:
        torch._dynamo.reset()  # other tests compile an nn.Sequential, too, and all count as one function
        model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, padding=1))
        targets = ("Linear",) if kind == "dora" else ("Linear", "Conv1d")  # peft's own DoRA breaks the graph
        adapter = Adapter(kind=kind, rank=1, targets=targets)  # type: ignore[arg-type]
        shake(attach(model, adapter, family="wan", default_targets=(), seed=0))
        x = torch.randn(3, 8)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))

    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_sampling_does_not_wake_a_frozen_expert(self, wan: Callable[[], Denoiser], kind: str) -> None:
        attached = wan().attach(kind)
        for parameter in attached.parameters().values():
            parameter.requires_grad_(False)
        with attached.disabled():
            pass
        assert not any(parameter.requires_grad for parameter in attached.parameters().values())

    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_a_model_without_weights(self, wan: Callable[[], Denoiser], kind: str) -> None:
        real, shapes = wan().attach(kind).parameters(), wan()
        shapes.model.to("meta")
        assert {name: parameter.shape for name, parameter in shapes.attach(kind).parameters().items()} == {
            name: parameter.shape for name, parameter in real.items()
        }

    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_prints_nothing(self, wan: Callable[[], Denoiser], kind: str, capfd: pytest.CaptureFixture[str]) -> None:
        """lycoris-lora logs to stdout, where `--json` promises nothing else."""
        wan().attach(kind, rank=99)
        assert capfd.readouterr() == ("", "")
        assert not logging.getLogger("LyCORIS").disabled

    def test_a_second_adapter_is_rejected(self, wan: Callable[[], Denoiser]) -> None:
        for kind in ("lora", "lokr"):
            denoiser = wan()
            denoiser.attach(kind)
            with pytest.raises(GracetuneError, match="already has an adapter"):
                denoiser.attach("lora")

    def test_a_failure_half_way_leaves_no_trace(
        self, wan: Callable[[], Denoiser], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from gracetune.adapters.algorithms.ia3 import Ia3

        denoiser = wan()
        names, base = list(denoiser.model.state_dict()), denoiser()

        def fails(*_: Any) -> Any:
            raise RuntimeError("no")

        monkeypatch.setattr(Ia3, "first_values", fails)
        with pytest.raises(RuntimeError, match="no"):
            denoiser.attach("lora", by_module={"FeedForward": {"algo": "ia3"}})
        assert list(denoiser.model.state_dict()) == names
        assert torch.equal(denoiser(), base)


class TestFull:
    @pytest.mark.parametrize("family", ["wan", pytest.param("sdxl", marks=pytest.mark.full)])
    def test_everything(self, tiny_model: TinyModel, family: str) -> None:
        denoiser = load(tiny_model, family, torch.bfloat16)
        names = [name for name, _ in denoiser.model.named_parameters()]
        dtypes = [parameter.dtype for parameter in denoiser.model.parameters()]
        attached = denoiser.attach("full_finetune", targets=())
        assert list(attached.parameters()) == names
        assert all(parameter.dtype == torch.float32 for parameter in attached.parameters().values())
        losses = train(denoiser, attached, lr=1e-3)
        assert losses[-1] < 0.95 * losses[0]
        attached.detach()
        assert [parameter.dtype for parameter in denoiser.model.parameters()] == dtypes
        assert not any(parameter.requires_grad for parameter in denoiser.model.parameters())

    def test_a_part_in_fp32_within_a_bf16_model(self, tiny_model: TinyModel) -> None:
        denoiser = load(tiny_model, "wan", torch.bfloat16)
        base = denoiser()
        attached = denoiser.attach("full_finetune", targets=("attn1", "scale_shift_table"), exclude=("norm_q",))
        names = list(attached.parameters())
        assert "blocks.0.attn1.to_q.weight" in names
        assert "blocks.0.attn1.norm_k.weight" in names
        assert "blocks.1.scale_shift_table" in names
        assert not any("norm_q" in name or "ffn" in name for name in names)
        torch.testing.assert_close(denoiser(), base, rtol=2e-2, atol=2e-2)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(denoiser(), base, rtol=2e-2, atol=2e-2)
        losses = train(denoiser, attached, lr=1e-2)
        assert losses[-1] < losses[0]

    def test_modules_without_parameters_are_no_targets(self, wan: Callable[[], Denoiser]) -> None:
        with pytest.raises(ConfigError, match="rope: matches nothing"):
            wan().attach("full_finetune", targets=("rope",))

    def test_unsupported_calls_are_errors(self, wan: Callable[[], Denoiser]) -> None:
        attached = wan().attach("full_finetune", targets=())
        with pytest.raises(GracetuneError, match="no adapter beside the model"):
            attached.state()
        with pytest.raises(GracetuneError, match="merge the adapter"):
            attached.load(AdapterState("wan", "", {}))
        with pytest.raises(GracetuneError, match="strength cannot be changed"), attached.disabled():
            pass


@pytest.mark.parametrize(("family", "kind"), EVERY_KIND)
def test_on_layers_without_weights_it_is_the_same_adapter(family: str, kind: str, tiny_model: TinyModel) -> None:
    """So a run can report misfits before it loads any weights."""
    real, empty = load(tiny_model, family), load(tiny_model, family)
    empty.model.to("meta")
    attached, without = real.attach(kind), empty.attach(kind)
    shapes = [{name: one.shape for name, one in made.parameters().items()} for made in (attached, without)]
    assert shapes[0] == shapes[1]
    without.load(attached.state())

"""Our formulas against the libraries' own layers, which compute them in other ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lycoris.modules.diag_oft import DiagOFTModule
from lycoris.modules.full import FullModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from gracetune.adapters.delta import apply, bias_delta, delta, with_base_magnitude
from gracetune.adapters.state import Layer

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LAYERS = {
    "linear": (lambda: nn.Linear(12, 20), (3, 12)),
    "conv1x1": (lambda: nn.Conv2d(12, 20, 1), (1, 12, 5, 5)),
    "conv": (lambda: nn.Conv2d(12, 20, 3, stride=2, padding=1), (1, 12, 5, 5)),
    "conv1d": (lambda: nn.Conv1d(12, 20, 3, padding=1), (1, 12, 7)),
    "conv3d": (lambda: nn.Conv3d(12, 20, (1, 3, 3), padding=(0, 1, 1)), (1, 12, 2, 5, 5)),
}
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("locon", LoConModule, {}),
    ("locon", LoConModule, {"weight_decompose": True}),
    ("locon", LoConModule, {"weight_decompose": True, "wd_on_out": False}),
    ("locon", LoConModule, {"use_tucker": True}),
    ("loha", LohaModule, {}),
    ("loha", LohaModule, {"use_tucker": True}),
    ("loha", LohaModule, {"weight_decompose": True}),
    ("lokr", LokrModule, {"factor": 2}),
    ("lokr", LokrModule, {"factor": 4, "decompose_both": True}),
    ("lokr", LokrModule, {"full_matrix": True}),
    ("lokr", LokrModule, {"factor": 2, "use_tucker": True}),
    ("lokr", LokrModule, {"factor": 2, "weight_decompose": True}),
    ("ia3", IA3Module, {}),
    ("ia3", IA3Module, {"train_on_input": True}),
    ("diag_oft", DiagOFTModule, {}),
    ("diag_oft", DiagOFTModule, {"rescaled": True}),
    ("full_delta", FullModule, {}),
]
# At other strengths LyCORIS scales a dora_scale alone and a rescale not at all; we, like ComfyUI, go in a line from one
# weight to the other.
BENT = {"weight_decompose", "rescaled"}
STRENGTHS = [(*case, strength) for case in CASES for strength in ((1.0,) if BENT & case[2].keys() else (1.0, 0.5))]


def values(module: nn.Module, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def layer_of(algorithm: str, module: Any, rank: int) -> Layer:
    tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    alpha = float(tensors.pop("alpha", torch.tensor(1.0)))
    whole = algorithm in ("ia3", "diag_oft", "full_delta") or {"lokr_w1", "lokr_w2"} <= tensors.keys()
    return Layer(algorithm, tensors, 1.0 if whole else alpha, None if whole else rank)


def run(layer: nn.Module, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
    return result


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize(("algorithm", "kind", "options", "strength"), STRENGTHS)
def test_lycoris(shape: str, algorithm: str, kind: Any, options: dict[str, Any], strength: float) -> None:
    torch.manual_seed(0)
    make, size = LAYERS[shape]
    layer, x = make(), torch.randn(size)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    module = kind("", layer, strength, 3, 2.0, **options)
    values(module)
    module.apply_to()
    adapter = layer_of(algorithm, module, 3)
    with torch.no_grad():
        theirs = layer(x)
    module.restore()
    added = bias_delta(adapter)
    ours_bias = bias if added is None else bias + strength * added
    ours = run(layer, apply(adapter, weight, strength=strength), ours_bias, x)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert (ours - run(layer, weight, bias, x)).abs().max() > 1e-2  # there is something to be equal


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("dora", [False, True])
def test_peft(shape: str, dora: bool) -> None:
    torch.manual_seed(0)
    make, size = LAYERS[shape]
    layer, x = make(), torch.randn(size)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    config = LoraConfig(r=3, lora_alpha=2, target_modules=["0"], use_dora=dora)
    model = inject_adapter_in_model(config, nn.Sequential(layer)).eval()
    wrapped: Any = model[0]
    values(wrapped.lora_A)
    values(wrapped.lora_B)
    tensors = {
        "lora_A.weight": wrapped.lora_A["default"].weight.detach(),
        "lora_B.weight": wrapped.lora_B["default"].weight.detach(),
    }
    if dora:
        values(wrapped.lora_magnitude_vector)
        tensors["dora_scale"] = wrapped.lora_magnitude_vector["default"].weight.detach().flatten()
    adapter = Layer("dora" if dora else "lora", tensors, 2.0, 3)
    with torch.no_grad():
        theirs = model(x)
    torch.testing.assert_close(run(layer, apply(adapter, weight), bias, x), theirs, **CLOSE)
    if not dora:
        torch.testing.assert_close(delta(adapter, weight.shape), wrapped.get_delta_weight("default"), **CLOSE)


def test_lycoris_own_merge_of_lokr_is_not_what_it_trains() -> None:
    """The reason for our own formulas. If this fails, the library has been fixed."""
    layer = nn.Linear(12, 20)
    module = LokrModule("", layer, 1.0, 3, 1.5, factor=2)
    values(module)
    ours = delta(layer_of("lokr", module, 3), layer.weight.shape)
    torch.testing.assert_close(module.get_weight(layer.weight.shape).detach(), ours)
    torch.testing.assert_close(module.get_diff_weight(shape=layer.weight.shape)[0].detach(), 0.5 * ours)


class TestRejections:
    def test_a_change_that_depends_on_the_weight(self) -> None:
        layer = Layer("ia3", {"weight": torch.zeros(4), "on_input": torch.tensor(0)}, 1.0, None)
        with pytest.raises(ValueError, match="ia3 changes depends on the weight"):
            delta(layer, (4, 4))

    @pytest.mark.parametrize(
        "layer",
        [
            Layer("lora", {"lora_A.weight": torch.zeros(2, 6), "lora_B.weight": torch.zeros(4, 2)}, 1.0, 2),
            Layer("lokr", {"lokr_w1": torch.zeros(2, 3), "lokr_w2": torch.zeros(2, 2)}, 1.0, None),
            Layer("full_delta", {"diff": torch.zeros(4, 6)}, 1.0, None),
            Layer("ia3", {"weight": torch.zeros(4)}, 1.0, None),
            Layer("diag_oft", {"oft_blocks": torch.zeros(2, 2, 2)}, 1.0, None),
        ],
        ids=lambda layer: layer.algorithm,
    )
    def test_as_many_elements_are_not_the_same_shape(self, layer: Layer) -> None:
        with pytest.raises(ValueError, match="for a weight of shape"):
            apply(layer, torch.zeros(6, 4))


@pytest.mark.parametrize("shape", [(20,), (1, 20, 1, 1), (20, 1, 1, 1)])
def test_pefts_magnitudes_belong_to_rows_even_of_a_square_convolution(shape: tuple[int, ...]) -> None:
    """peft keeps a convolution's as [1, out, 1, 1], which in LyCORIS' files would mean columns."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 20, 3, 3, generator=generator)
    tensors = {
        "lora_A.weight": torch.randn(2, 20, 3, 3, generator=generator),
        "lora_B.weight": torch.randn(20, 2, 1, 1, generator=generator),
        "dora_scale": torch.rand(20, generator=generator).reshape(shape) + 0.5,
    }
    adapted = apply(Layer("dora", tensors, 2.0, 2), weight)
    torch.testing.assert_close(adapted.flatten(1).norm(dim=1), tensors["dora_scale"].flatten(), **CLOSE)


def test_magnitudes_by_columns_need_no_measuring() -> None:
    weight, names = torch.ones(4, 6), {"lora_down.weight": torch.ones(1, 6), "lora_up.weight": torch.ones(4, 1)}
    layer = Layer("locon", {**names, "dora_scale": torch.ones(1, 6)}, 1.0, 1)
    assert with_base_magnitude(layer, weight) is layer
    plain = Layer("locon", names, 1.0, 1)
    assert with_base_magnitude(plain, weight) is plain

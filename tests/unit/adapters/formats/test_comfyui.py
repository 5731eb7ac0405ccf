"""Our files, loaded the way ComfyUI loads them into the model's original layout, change the weights as training did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gracetune.adapters import delta
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats import comfyui
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState
from gracetune.models.registry import KEY_MAPS
from unit.adapters.formats import comfyui_reader, making

KNOWN_TO_COMFYUI = {
    "comfyui": tuple(making.FLAVOURS),
    "kohya": tuple(making.FLAVOURS),
    "lycoris": ("qwen_image", "flux", "flux2", "z_image", "krea2", "sdxl"),
}
OPTIONS = {"lokr": [(), ("decomposed",), ("both",)], "loha": [(), ("tucker",)], "locon": [(), ("tucker",)]}
CASES = [
    (family, format, algorithm, options)
    for format, families in KNOWN_TO_COMFYUI.items()
    for family in families
    for algorithm in making.ALGORITHMS
    for options in OPTIONS.get(algorithm, [()])
    if algorithm not in ("dora", "ia3")  # ComfyUI computes the first otherwise and does not know the second
]


def in_original_layout(family: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    keys = KEY_MAPS[family]
    found: dict[str, Tensor] = {}
    for path, weight in weights.items():
        original = keys.original(path)
        assert original is not None
        key = f"diffusion_model.{original.name}.weight"
        if original.mapped.halves_swapped:
            first, second = weight.chunk(2)
            found[key] = torch.cat((second, first))
        else:
            found[key] = torch.cat([weights[part] for part in original.mapped.paths])
    return found


@pytest.mark.parametrize(("family", "format", "algorithm", "options"), CASES)
def test_comfyui_gets_the_weights_we_trained(family, format, algorithm, options, tiny_model) -> None:
    keys = KEY_MAPS[family]
    shapes = making.one_of_each(making.layer_shapes(family, tiny_model))
    generator = torch.Generator().manual_seed(1)
    weights = {path: torch.randn(shape, generator=generator) * 0.2 for path, shape in shapes.items()}
    # If the format rejects some layers, write them one at a time, so that every accepted layer is compared.
    held = {}
    for path, shape in shapes.items():
        one = making.state(family, {path: shape}, algorithm, seed=len(held), options=options)
        try:
            FORMATS[format].write(one, torch.float32)
        except CannotHoldError:
            continue
        # The other formats also hold what ComfyUI would not understand.
        if comfyui.rejection(one.layers[path], path, keys) is None:
            held |= one.layers
    assert held, "nothing is held at all: that belongs into the table of refusals"
    state = making.state(family, {}, algorithm)
    file, _ = FORMATS[format].write(type(state)(family, "", held), torch.float32)
    original = in_original_layout(family, weights)
    names = {path: found.name for path in shapes if (found := keys.original(path)) is not None}
    loaded = comfyui_reader.load(file, original, comfyui_reader.key_map(family, original, names))
    ours = {path: delta.apply(held[path], weight) if path in held else weight for path, weight in weights.items()}
    expected = in_original_layout(family, ours)
    for key, weight in expected.items():
        torch.testing.assert_close(
            loaded[key], weight, atol=1e-5, rtol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert any(not torch.equal(original[key], weight) for key, weight in expected.items())


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("dora", ()), ("locon", ("dora", "tucker")), ("loha", ("dora",)), ("lokr", ("dora",)), ("lokr", ("dora", "both"))],
)
@pytest.mark.parametrize("family", making.FLAVOURS)
def test_dora_by_rows_measured_against_the_base(family, algorithm, options, tiny_model) -> None:
    """Given the base weights, the magnitudes are written so that ComfyUI's division gives the trained weights."""
    shapes = making.one_of_each(making.layer_shapes(family, tiny_model))
    generator = torch.Generator().manual_seed(1)
    weights = {path: torch.randn(shape, generator=generator) * 0.2 for path, shape in shapes.items()}
    trained = making.state(family, shapes, algorithm, options=options).layers
    held = {path: delta.with_base_magnitude(layer, weights[path]) for path, layer in trained.items()}
    keys = KEY_MAPS[family]
    held = {path: layer for path, layer in held.items() if comfyui.rejection(layer, path, keys) is None}
    assert len(held) >= 4
    state = AdapterState(family, "", held)
    file, header = FORMATS["comfyui"].write(state, torch.float32)
    original = in_original_layout(family, weights)
    names = {path: found.name for path in shapes if (found := keys.original(path)) is not None}
    loaded = comfyui_reader.load(file, original, comfyui_reader.key_map(family, original, names))
    ours = {path: delta.apply(trained[path], weight) if path in held else weight for path, weight in weights.items()}
    for key, weight in in_original_layout(family, ours).items():
        torch.testing.assert_close(loaded[key], weight, atol=1e-5, rtol=1e-5)
    again = FORMATS["comfyui"].read(file, header, family).checked().states[""]
    for path, layer in again.layers.items():
        torch.testing.assert_close(delta.apply(layer, weights[path]), ours[path], atol=1e-5, rtol=1e-5)
    second, same = FORMATS["comfyui"].write(again, torch.float32)
    assert same == header
    assert all(torch.equal(second[key], tensor) for key, tensor in file.items())
    for format in ("diffusers", "kohya", "lycoris"):
        with pytest.raises(CannotHoldError, match=r"use the file it came from|nothing else|one matrix|Tucker"):
            FORMATS[format].write(again, torch.float32)


def test_why_dora_is_rejected(tiny_model) -> None:
    """By the rule our reader restates, DoRA as it is trained would come out as another model."""
    from gracetune.adapters.formats import kohya

    path, shape = "blocks.0.attn1.to_q", making.layer_shapes("wan", tiny_model)["blocks.0.attn1.to_q"]
    state = making.state("wan", {path: shape}, "dora")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    original = in_original_layout("wan", {path: weight})
    file, _ = kohya.write(state, torch.float32)
    loaded = comfyui_reader.load(file, original, comfyui_reader.key_map("wan", original, {}))
    difference = loaded["diffusion_model.blocks.0.self_attn.q.weight"] - delta.apply(state.layers[path], weight)
    assert difference.abs().max() > 1e-3
    with pytest.raises(CannotHoldError, match=r"norm of the base weight.*--model"):
        FORMATS["comfyui"].write(state, torch.float32)


def test_why_lokrs_tucker_form_is_rejected() -> None:
    """This is the product that ComfyUI computes. If this fails, torch was fixed and the rejection can be removed."""
    core, left, right = torch.randn(2, 2, 3, 3), torch.randn(2, 8), torch.randn(2, 4)
    second = torch.einsum("ijkl,jr,ip->prkl", core, right, left)
    with pytest.raises(RuntimeError, match="view size"):
        torch.kron(torch.randn(4, 4)[:, :, None, None], second)


@pytest.mark.parametrize("algorithm", ["locon", "lokr", "loha"])
def test_magnitudes_by_column_are_held(algorithm, tiny_model) -> None:
    """Files of old LyCORIS have these, and ComfyUI divides them by the right norm."""
    path, shape = "blocks.0.ffn.net.0.proj", making.layer_shapes("wan", tiny_model)["blocks.0.ffn.net.0.proj"]
    layer = making.state("wan", {path: shape}, algorithm).layers[path]
    magnitude = torch.rand(1, shape[1], generator=torch.Generator().manual_seed(2)) + 0.5
    layer = type(layer)(algorithm, {**layer.tensors, "dora_scale": magnitude}, layer.alpha, layer.rank)
    state = making.state("wan", {}, algorithm)
    file, header = FORMATS["comfyui"].write(type(state)("wan", "", {path: layer}), torch.float32)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    original = in_original_layout("wan", {path: weight})
    loaded = comfyui_reader.load(file, original, comfyui_reader.key_map("wan", original, {}))
    expected = delta.apply(layer, weight)
    torch.testing.assert_close(loaded["diffusion_model.blocks.0.ffn.0.weight"], expected, atol=1e-5, rtol=1e-5)
    again = FORMATS["comfyui"].read(file, header, "wan").checked().states[""]
    torch.testing.assert_close(delta.apply(again.layers[path], weight), expected)

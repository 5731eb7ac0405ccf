"""Verification accepts an adapter that fits, and lists everything else by layer."""

from __future__ import annotations

import pytest
import torch

from gracetune.adapters.delta import flat_shape, misfit
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import Layer
from gracetune.adapters.verification import verify
from gracetune.config.families import FAMILIES, flavours
from gracetune.models.registry import FOOTPRINTS, build_published
from unit.adapters.formats import making

OPTIONS = ((), ("tucker",), ("decomposed",), ("both",), ("dora",), ("rescale",), ("bias",), ("on_input",))


@pytest.mark.parametrize("family", making.FLAVOURS)
@pytest.mark.parametrize("algorithm", making.ALGORITHMS)
def test_every_kind_fits_the_layers_it_was_made_for_and_no_others(family, algorithm, tiny_model) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in sorted(set(making.layer_shapes(family, tiny_model).values())):
        for options in OPTIONS:
            layer = making.layer(algorithm, shape, 2, 1.0, generator, frozenset(options))
            assert misfit(layer, shape) is None
            if len(shape) == 2 and algorithm not in ("ia3", "diag_oft"):
                assert flat_shape(layer) == shape
            wider = (2 * shape[0], *shape[1:])
            assert misfit(layer, wider) is not None or ("on_input" in options and algorithm == "ia3")
            deeper = (shape[0], 2 * shape[1], *shape[2:])
            by_row = algorithm == "diag_oft" or (algorithm == "ia3" and "on_input" not in options)
            assert misfit(layer, deeper) is not None or by_row


def test_a_bias_of_another_size() -> None:
    layer = Layer("full_delta", {"diff": torch.ones(4, 3), "diff_b": torch.ones(5)}, 1.0, None)
    assert misfit(layer, (4, 3)) == "a bias of 5 for 4 outputs"


@pytest.mark.parametrize("algorithm", making.ALGORITHMS)
def test_a_weight_that_is_not_a_matrix(algorithm) -> None:
    """Such weights are in models that were quantized or flattened."""
    layer = making.layer(algorithm, (4, 4), 2, 1.0, torch.Generator(), frozenset({"on_input", "dora"}))
    for shape, called in (((4,), "a weight of 4"), ((), "a weight of one number")):
        assert (misfit(layer, shape) or "").startswith(called)


def test_everything_that_does_not_fit_is_listed(tiny_model) -> None:
    shapes = making.in_blocks(making.layer_shapes("wan", tiny_model))
    state = making.state("wan", shapes, "lora")
    tensors, header = FORMATS["comfyui"].write(state, torch.float32)
    stem = "diffusion_model.blocks.{}.self_attn.{}"
    for name in ("lora_A.weight", "lora_B.weight"):
        tensors[f"{stem.format(99, 'q')}.{name}"] = torch.ones(2, 2)
    del tensors[f"{stem.format(0, 'k')}.lora_B.weight"]
    tensors[f"{stem.format(0, 'v')}.lora_A.weight"] = torch.ones(2, 5)
    tensors[f"{stem.format(1, 'v')}.lora_A.weight"][0, 0] = torch.nan
    tensors["diffusion_model.nonsense.lora_A.weight"] = torch.ones(1)
    for name in ("lora_A.weight", "lora_B.weight", "alpha"):
        del tensors[f"{stem.format(1, 'o')}.{name}"]
    (report,) = verify(FORMATS["comfyui"].read(tensors, header, "wan"), {"": shapes})
    assert not report.ok
    assert len(report.matched) == len(shapes) - 3
    assert report.missing == (f"{stem.format(0, 'k')}: lora_A.weight without lora_B.weight",)
    assert report.unexpected == ("blocks.99.attn1.to_q", "diffusion_model.nonsense.lora_A.weight")
    assert report.mismatched == (f"blocks.0.attn1.to_v: 5 inputs, the layer has {shapes['blocks.0.attn1.to_v'][1]}",)
    assert report.not_finite == (f"{stem.format(1, 'v')}.lora_A.weight",)
    assert report.left_out == ("blocks.0.attn1.to_k", "blocks.1.attn1.to_out.0")


def test_a_gap_is_reported_but_is_no_mismatch(tiny_model) -> None:
    shapes = making.in_blocks(making.layer_shapes("wan", tiny_model))
    chosen = {path: shape for path, shape in shapes.items() if path != "blocks.1.attn1.to_q" and "attn1" in path}
    tensors, header = FORMATS["kohya"].write(making.state("wan", chosen, "lora"), torch.float32)
    (report,) = verify(FORMATS["kohya"].read(tensors, header, "wan"), {"": shapes})
    assert report.ok
    assert report.left_out == ("blocks.1.attn1.to_q",)


def test_nothing_at_all_is_no_match() -> None:
    (report,) = verify(FORMATS["comfyui"].read({"x": torch.ones(1)}, {}, "wan"), {"": {}})
    assert not report.ok


@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_denoisers_have_the_parameters_the_plan_counts(family: str) -> None:
    footprints = {footprint.flavour: footprint for footprint in FOOTPRINTS[family]}
    for flavour in flavours(family):
        model = build_published(family, flavour.name)
        assert sum(parameter.numel() for parameter in model.parameters()) == footprints[flavour.name].parameters

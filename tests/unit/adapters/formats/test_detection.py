"""Detection reports what a file is, with the evidence. If the evidence is missing, it raises instead of guessing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gracetune.adapters.errors import CannotHoldError, UnclearFamilyError
from gracetune.adapters.formats.detection import detect
from gracetune.adapters.formats.record import FORMATS
from unit.adapters.formats import making


@pytest.mark.parametrize(("family", "ratio"), [("flux", 4), ("flux2", 6)])
def test_flux_and_flux2_share_original_names(family: str, ratio: int) -> None:
    """The header, the shapes, or an error. `flux-2` contains the mark of FLUX.1 too."""

    def lora(layer: str, rows: int) -> dict[str, torch.Tensor]:
        name = f"lora_unet_double_blocks_0_img_{layer}"
        return {f"{name}.lora_down.weight": torch.ones(2, 8), f"{name}.lora_up.weight": torch.ones(rows, 2)}

    attention = lora("attn_qkv", 24)
    with pytest.raises(UnclearFamilyError, match="flux and flux2"):
        detect(attention, {})
    assert detect({**attention, **lora("mlp_0", 8 * ratio)}, {}).family == family
    assert (
        detect(attention, {"modelspec.architecture": {4: "flux-1-dev/lora", 6: "flux-2/lora"}[ratio]}).family == family
    )


@pytest.mark.parametrize("with_header", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("algorithm", making.ALGORITHMS)
@pytest.mark.parametrize("family", making.FLAVOURS)
def test_our_own_files(family, algorithm, format, with_header, tiny_model) -> None:
    shapes = making.one_of_each(making.in_blocks(making.layer_shapes(family, tiny_model)))
    state = making.state(family, shapes, algorithm, expert="high_noise" if family == "wan" else "")
    try:
        tensors, header = FORMATS[format].write(state, torch.float32)
    except CannotHoldError:
        return
    found = detect(tensors, header if with_header else {})
    same_tensors = {"lora", "locon", "dora"}
    assert found.family == family
    assert found.algorithms == (algorithm,) or (not with_header and {algorithm, *found.algorithms} <= same_tensors)
    assert found.format == format
    assert found.experts == (state.expert if with_header else "",)
    assert found.evidence


def test_lycoris_own_dora_is_what_its_header_says() -> None:
    state = making.state("wan", {"blocks.0.attn1.to_q": (8, 8)}, "locon", options=("dora",))
    assert detect(*FORMATS["lycoris"].write(state, torch.float32)).algorithms == ("locon",)


def test_dora_and_locon_in_one_file_are_found_and_read_alike() -> None:
    parts = [making.state("wan", {f"blocks.{block}.attn1.to_q": (8, 8)}, kind)
             for block, kind in enumerate(("dora", "locon"))]  # fmt: skip
    state = replace(parts[0], layers={**parts[0].layers, **parts[1].layers})
    contents = FORMATS["lycoris"].write(state, torch.float32)
    assert set(detect(*contents).algorithms) == {"dora", "locon"}
    (again,) = FORMATS["lycoris"].read(*contents, "wan").states.values()
    assert [layer.algorithm for layer in again.layers.values()] == ["dora", "locon"]


def test_flux_and_qwen_image_share_names() -> None:
    """Their blocks have the same widths and names. The header, the depth or the user distinguishes them."""
    tensors = {
        f"transformer.transformer_blocks.{block}.attn.to_q.lora_{side}.weight": torch.zeros(2, 2)
        for block in range(19)
        for side in "AB"
    }
    with pytest.raises(UnclearFamilyError, match="--family"):
        detect(tensors, {})
    assert detect(tensors, {"modelspec.architecture": "Flux.1-dev/lora"}).family == "flux"
    assert detect(tensors, {"ss_base_model_version": "qwen_image"}).family == "qwen_image"
    assert detect(tensors, {}, family="flux").family == "flux"
    deeper = tensors | {
        f"transformer.transformer_blocks.40.attn.to_q.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"
    }
    assert detect(deeper, {}).family == "qwen_image"


@pytest.mark.parametrize("keys", [[], ["nothing.weight"], ["lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha"]])
def test_no_family(keys: list[str]) -> None:
    with pytest.raises(UnclearFamilyError):
        detect({key: torch.zeros(1) for key in keys}, {})


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("my_lora_high_noise", "high_noise"),
        ("my_lora_000001000_low_noise", "low_noise"),
        ("my-lora.high_noise.v2", "high_noise"),
        ("my_low_noise_run_high_noise", "high_noise"),
        ("my_lora", ""),
        ("yellow_noisey", ""),
    ],
)
def test_the_stage_in_a_files_name(name: str, expert: str) -> None:
    tensors = {f"diffusion_model.blocks.0.self_attn.q.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"}
    assert detect(tensors, {}, name=name).experts == (expert,)
    assert detect(tensors, {"gracetune.stage": "low_noise"}, name=name).experts == ("low_noise",)


KEY = "diffusion_model.blocks.0.self_attn.q.lora_{}.weight"


@pytest.mark.parametrize(
    ("prefix", "header", "name", "expected_text"),
    [
        ("transformer.transformer_1.", "low_noise", "x", "its keys says high_noise, its header low_noise"),
        ("transformer.transformer_2.", "", "x_high_noise", "its keys says low_noise, its file's name high_noise"),
        ("transformer.", "high_noise", "x_low_noise", "its header says high_noise, its file's name low_noise"),
        ("transformer.transformer_1.", "high_noise", "x_high_noise", None),
        ("transformer.", "", "x_low_noise", None),
    ],
)
def test_places_that_disagree_about_the_expert(prefix, header, name, expected_text) -> None:
    tensors = {f"{prefix}blocks.0.attn1.to_q.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"}
    found = detect(tensors, {"gracetune.stage": header} if header else {}, name=name)
    assert found.contradictions == ((expected_text,) if expected_text else ())


@pytest.mark.parametrize(
    ("layer", "block"),
    [("transformer_blocks.{}.attn1.to_q", 27), ("transformer_blocks.{}.ff_context.net.2", 23)],
    ids=["LTX-Video", "Stable Diffusion 3"],
)
def test_other_models_with_our_families_names(layer: str, block: int) -> None:
    """Only the depth shows it: no model of the family has so many blocks."""
    tensors = {
        f"transformer.{layer.format(number)}.lora_{side}.weight": torch.zeros(2, 2)
        for number in range(block + 1)
        for side in "AB"
    }
    with pytest.raises(UnclearFamilyError, match="more blocks than any"):
        detect(tensors, {})
    family = "stable_audio" if "attn1" in layer else "flux"
    assert detect(tensors, {}, family=family).family == family


def test_the_algorithm_comes_from_the_keys_and_not_the_header() -> None:
    tensors = {KEY.format(side): torch.zeros(2, 2) for side in "AB"}
    assert detect(tensors, {"gracetune.algorithm": "lokr"}).algorithms == ("lora",)
    assert detect(tensors, {"gracetune.algorithm": "locon"}).algorithms == ("locon",)

"""diffusers' own loader makes of our files the model we trained, and we make of its files the model it had.

Tolerance 1e-5 in fp32, on predictions of the denoiser.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.attach import attach
from gracetune.adapters.formats.programs import misread_by
from gracetune.adapters.merge import merge_module
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.config.run_config import Adapter
from gracetune.models.hub_download import index_parts
from gracetune.models.registry import KEY_MAPS
from unit.adapters.formats import making
from unit.adapters.formats.predicting import predict

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
TinyModel = Callable[[str, str], Path]
TARGETS = {
    "wan": ("*.attn1.*", "*.attn2.*", "*.ffn.*"),
    "qwen_image": ("*.attn.*", "*.img_mlp.*", "*.txt_mlp.*"),
    "flux": ("*.attn.*", "*.ff.*", "*.ff_context.*", "single_transformer_blocks.*.proj_*"),
    "flux2": ("*.attn.*", "*.ff.*", "*.ff_context.*"),
    "z_image": ("*.attention.*", "*.feed_forward.*"),
    "krea2": ("*.attn.*", "*.ff.*"),
    "sdxl": ("*.attn1.*", "*.attn2.*", "*.ff.*", "*.resnets.*.conv1", "*.time_emb_proj", "*.proj_in"),
    "stable_audio": ("*.attn1.*", "*.attn2.*", "*.ff.*"),
}
OUTSIDE = {
    "flux": ("proj_out", "norm_out.linear", "x_embedder"),
    "qwen_image": ("proj_out", "img_in"),
    "flux2": ("proj_out", "norm_out.linear", "x_embedder", "*_modulation*.linear"),
    "krea2": ("img_in", "time_mod_proj"),
}  # fmt: skip
WITH_LOADER = ("wan", "qwen_image", "flux", "flux2", "z_image", "krea2", "sdxl")


def trained(
    family: str, denoiser: Any, *, kind: str = "lora", expert: ExpertStage = "", seed: int = 0, **more: Any
) -> tuple[AdapterState, Tensor]:
    """An adapter as after some training, attached as it is for training, and what the model then predicts."""
    options = {"rank": 4, "alpha": 2.0, "targets": TARGETS[family], **more}
    adapter = Adapter(kind=kind, **options)  # type: ignore[arg-type]
    attached = attach(denoiser, adapter, family=family, expert=expert, default_targets=(), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attached.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    state, output = attached.state(), predict(family, denoiser)
    attached.detach()
    return state, output


def pipeline_of(family: str, tiny_model: TinyModel, flavour: str | None = None) -> Any:
    """A pipeline with its denoisers only. The other parts are unused here, and loading them takes most of the time."""
    folder = tiny_model(family, flavour or making.FLAVOURS[family])
    parts = json.loads((folder / "model_index.json").read_text())
    kept = ("transformer", "transformer_2", "unet", "scheduler")
    unused = {name: None for name in index_parts(parts) if name not in kept}
    return DiffusionPipeline.from_pretrained(folder, **unused)


def denoiser_of(pipeline: Any, family: str) -> Any:
    return getattr(pipeline, KEY_MAPS[family].component)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "lora") for family in WITH_LOADER),
        *((family, "dora") for family in WITH_LOADER if family != "sdxl"),
        pytest.param("sdxl", "dora", marks=pytest.mark.full),
    ],
)
def test_diffusers_loads_our_diffusers_files(family: str, kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """With the alpha it was trained with: half its rank."""
    pipeline = pipeline_of(family, tiny_model)
    base = predict(family, denoiser_of(pipeline, family))
    targets = (*TARGETS[family], *OUTSIDE.get(family, ()))
    state, expected = trained(family, denoiser_of(pipeline, family), kind=kind, targets=targets)
    file = save(tmp_path / "adapter.safetensors", state, "diffusers", torch.float32)
    pipeline.load_lora_weights(file)
    torch.testing.assert_close(predict(family, denoiser_of(pipeline, family)), expected, **TOLERANCE)
    assert (expected - base).abs().max() > 1e-3, "the adapter has to do something for this test to mean anything"


WITHIN = {"flux": ("transformer_blocks", "single_transformer_blocks"), "qwen_image": ("transformer_blocks",),
          "z_image": ("layers", "noise_refiner", "context_refiner"), "sdxl": ("attentions",)}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "format"),
    [("flux", "diffusers"), ("flux", "comfyui"), ("qwen_image", "diffusers"), ("qwen_image", "comfyui"),
     ("qwen_image", "kohya"), ("z_image", "diffusers"), ("z_image", "comfyui"), ("z_image", "kohya"),
     ("sdxl", "diffusers"), ("sdxl", "kohya")],
)  # fmt: skip
def test_diffusers_loads_every_layer_of_the_blocks(
    family: str, format: Any, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Modulation layers, and the projections around a U-Net's attention, too: ai-toolkit's layers."""
    pipeline = pipeline_of(family, tiny_model)
    state, expected = trained(family, denoiser_of(pipeline, family), targets=(), within=WITHIN[family])
    assert any(path.endswith((".linear", "_mod.1", "_modulation.0", "proj_in")) for path in state.layers)
    file = save(tmp_path / "adapter.safetensors", state, format, torch.float32)
    pipeline.load_lora_weights(file)
    torch.testing.assert_close(predict(family, denoiser_of(pipeline, family)), expected, **TOLERANCE)


def test_a_dora_in_half_precision_loads_into_a_model_in_half_precision(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Its magnitudes are fp32 in the file all the same."""
    pipeline = pipeline_of("wan", tiny_model)
    state, expected = trained("wan", pipeline.transformer, kind="dora")
    base = predict("wan", pipeline.transformer)
    file = save(tmp_path / "adapter.safetensors", state, "diffusers", torch.bfloat16)
    pipeline.transformer.to(torch.bfloat16)
    pipeline.load_lora_weights(file)
    with torch.autocast("cpu", torch.bfloat16):
        found = predict("wan", pipeline.transformer)
    assert (found.float() - expected).norm() < 0.2 * (expected - base).norm()


@pytest.mark.parametrize(
    ("family", "alpha"),
    [
        *((family, alpha) for family in ("wan", "qwen_image", "flux", "z_image") for alpha in (2.0, 4.0)),
        ("flux2", 4.0),
        ("krea2", 4.0),
    ],
)
def test_diffusers_loads_our_comfyui_files(family: str, alpha: float, tiny_model: TinyModel, tmp_path: Path) -> None:
    """One file for both programs, with and without alpha keys in it. diffusers rejects those of FLUX.2 and Krea 2."""
    pipeline = pipeline_of(family, tiny_model)
    state, expected = trained(family, denoiser_of(pipeline, family), alpha=alpha)
    file = save(tmp_path / "adapter.safetensors", state, "comfyui", torch.float32)
    assert any(key.endswith(".alpha") for key in load_file(file)) == (alpha != 4.0)
    pipeline.load_lora_weights(file)
    torch.testing.assert_close(predict(family, denoiser_of(pipeline, family)), expected, **TOLERANCE)


def test_diffusers_rejects_krea_2s_alphas_as_the_records_say(tiny_model: TinyModel, tmp_path: Path) -> None:
    pipeline = pipeline_of("krea2", tiny_model)
    state, _ = trained("krea2", pipeline.transformer, alpha=2.0)
    with pytest.raises(ValueError, match="should be empty"):
        pipeline.load_lora_weights(save(tmp_path / "adapter.safetensors", state, "comfyui", torch.float32))
    wrong = misread_by(state, "comfyui", "diffusers")
    assert wrong is not None
    assert "rejects alphas" in wrong.reason
    assert misread_by(trained("krea2", pipeline.transformer, alpha=4.0)[0], "comfyui", "diffusers") is None


@pytest.mark.parametrize("family", ["wan", "qwen_image", "z_image", "sdxl"])
def test_diffusers_loads_our_kohya_files(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Flux' converter knows the published sizes only (3072 and 12288 rows), so no tiny model can be tried there."""
    pipeline = pipeline_of(family, tiny_model)
    state, expected = trained(family, denoiser_of(pipeline, family))
    file = save(tmp_path / "adapter.safetensors", state, "kohya", torch.float32)
    pipeline.load_lora_weights(file)
    torch.testing.assert_close(predict(family, denoiser_of(pipeline, family)), expected, **TOLERANCE)


@pytest.mark.parametrize("format", ["diffusers", "comfyui", "kohya"])
@pytest.mark.parametrize("flavour", ["t2v-14b-2.2", "i2v-14b-2.2"])
def test_both_experts(flavour: str, format: Any, tiny_model: TinyModel, tmp_path: Path) -> None:
    pipeline = pipeline_of("wan", tiny_model, flavour)
    parts: tuple[tuple[ExpertStage, Any, bool], ...] = (
        ("high_noise", pipeline.transformer, False),
        ("low_noise", pipeline.transformer_2, True),
    )
    expected = {}
    for seed, (expert, denoiser, _) in enumerate(parts):
        state, expected[expert] = trained("wan", denoiser, expert=expert, seed=seed)
        save(tmp_path / f"{expert}.safetensors", state, format, torch.float32)
    for expert, _, second in parts:
        pipeline.load_lora_weights(
            tmp_path / f"{expert}.safetensors", adapter_name=expert, load_into_transformer_2=second
        )
    for expert, denoiser, _ in parts:
        torch.testing.assert_close(predict("wan", denoiser), expected[expert], **TOLERANCE)


def test_image_to_video_with_an_image_encoder(tiny_model: TinyModel, tmp_path: Path) -> None:
    pipeline = pipeline_of("wan", tiny_model, "i2v-14b-480p-2.1")
    for format in ("diffusers", "comfyui"):
        state, expected = trained("wan", pipeline.transformer)
        assert any("add_k_proj" in path for path in state.layers)
        pipeline.load_lora_weights(save(tmp_path / f"{format}.safetensors", state, format, torch.float32))
        torch.testing.assert_close(predict("wan", pipeline.transformer), expected, **TOLERANCE)
        pipeline.unload_lora_weights()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_stable_audio_by_peft(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """diffusers has no loader for this family; PEFT's functions take our keys without the component's name."""
    model = making.denoiser("stable_audio", tiny_model("stable_audio", "open-1.0"))
    state, expected = trained("stable_audio", model, kind=kind)
    file = save(tmp_path / "adapter.safetensors", state, "diffusers", torch.float32)
    config = LoraConfig(r=4, lora_alpha=2, target_modules=list(state.layers), use_dora=kind == "dora")
    inject_adapter_in_model(config, model)
    found = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
    outcome = set_peft_model_state_dict(model, found)
    assert not outcome.unexpected_keys
    torch.testing.assert_close(predict("stable_audio", model), expected, **TOLERANCE)


# -- the other way ----------------------------------------------------------------------------------------------------


def merged(family: str, tiny_model: TinyModel, state: AdapterState, component: str | None = None) -> Tensor:
    """What the base model predicts with our reading of a file in its weights."""
    model = making.denoiser(family, tiny_model(family, making.FLAVOURS[family]), component)
    merge_module(state, model)
    return predict(family, model)


@pytest.mark.parametrize(
    ("dora", "with_header"),
    [(False, True), (True, True), *(pytest.param(dora, False, marks=pytest.mark.full) for dora in (False, True))],
)
@pytest.mark.parametrize("family", WITH_LOADER)
def test_we_read_what_diffusers_saves(
    family: str, dora: bool, with_header: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """`save_lora_weights` with PEFT's adapter in the model, of several ranks and alphas; without a header all are 1."""
    pipeline = pipeline_of(family, tiny_model)
    denoiser = denoiser_of(pipeline, family)
    alpha = {"lora_alpha": 2, "alpha_pattern": {"to_q": 3.0}} if with_header else {"lora_alpha": 4}
    ranks = {"rank_pattern": {"to_k": 2}} if with_header else {}
    config = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], use_dora=dora, **alpha, **ranks)
    denoiser.add_adapter(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in denoiser.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    expected = predict(family, denoiser)
    component = KEY_MAPS[family].component
    layers = get_peft_model_state_dict(denoiser)
    header = {f"{component}_lora_adapter_metadata": config.to_dict()} if with_header else {}
    type(pipeline).save_lora_weights(tmp_path, **{f"{component}_lora_layers": layers}, **header)
    opened = open_adapter(next(tmp_path.glob("*.safetensors")), family)
    assert (opened.detected.format, opened.detected.algorithm) == ("diffusers", "dora" if dora else "lora")
    torch.testing.assert_close(merged(family, tiny_model, opened.state()), expected, **TOLERANCE)


def test_we_read_a_peft_folder(tiny_model: TinyModel, tmp_path: Path) -> None:
    """PEFT's own `save_pretrained`: alpha stands in adapter_config.json beside the file."""
    from peft import get_peft_model

    model = making.denoiser("wan", tiny_model("wan", "t2v-14b-2.2"))
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_v"], use_rslora=True))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.05)
    expected = predict("wan", adapted.base_model.model)
    adapted.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        torch.testing.assert_close(merged("wan", tiny_model, open_adapter(path).state()), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["lokr", "loha", "locon", "diag_oft", "ia3"])
@pytest.mark.parametrize("family", ["wan", pytest.param("sdxl", marks=pytest.mark.full)])
def test_we_read_what_lycoris_saves(family: str, kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """A file of the LyCORIS wrapper around the diffusers model, as SimpleTuner writes it."""
    from lycoris import LycorisNetwork, create_lycoris

    algo = {"diag_oft": "diag-oft"}.get(kind, kind)
    model = making.denoiser(family, tiny_model(family, making.FLAVOURS[family]))
    LycorisNetwork.apply_preset({"target_module": ["Attention", "WanAttention"], "enable_conv": False})
    network = create_lycoris(model, 1.0, linear_dim=2, linear_alpha=2, algo=algo, factor=2)
    network.apply_to()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    expected = predict(family, model)
    file = tmp_path / "lycoris.safetensors"
    save_file({key: value.detach().contiguous() for key, value in network.state_dict().items()}, file)
    opened = open_adapter(file, family)
    assert (opened.detected.family, opened.detected.format) == (family, "lycoris")
    torch.testing.assert_close(merged(family, tiny_model, opened.state()), expected, **TOLERANCE)

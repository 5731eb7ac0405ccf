"""Every spelling of a key that the forks and their forerunners use leads to the same layer and expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.delta import delta
from gracetune.adapters.errors import BrokenLayerError, MixedExpertsError
from gracetune.adapters.formats.names import locate, split_key
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState
from gracetune.models.registry import KEY_MAPS
from unit.adapters.formats import making

PATH = "blocks.3.attn1.to_q"
ORIGINAL = "blocks.3.self_attn.q"
STEMS = {
    # of no particular expert
    "": [
        "diffusion_model.{original}",
        "model.diffusion_model.{original}",
        "transformer.{path}",
        "{path}",
        "{original}",
        "base_model.model.{path}",
        "base_model.model.{original}",
        "base_model.model.transformer.{path}",
        "lora_unet_{original_}",
        "lora_unet_{path_}",
        "lora_unet__{original_}",
        "lora_transformer_{path_}",
        "lycoris_{path_}",
        "lycoris_{original_}",
        "diffusion_model..{original}",
    ],
    "high_noise": [
        "transformer$$transformer_1$${dollars}",
        "transformer.transformer_1.{path}",
        "diffusion_model.transformer_1.{original}",
        "diffusion_model.transformer1.{path}",
        "transformer_1.{path}",
        "transformer1.{original}",
        "lycoris_transformer_1_{path_}",
        "lycoris_transformer1_{original_}",
        "transformer_1_{path_}",
        "transformer1_{original_}",
        "lora_transformer_1_{path_}",
        "lora_transformer1_{path_}",
        "lora_unet_transformer_1_{original_}",
        "base_model.model.transformer_1.{path}",
    ],
}
TENSORS = [
    ("lora_A.weight", "lora_B.weight"),
    ("lora_down.weight", "lora_up.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"),
    ("lora_A", "lora_B"),
    ("lora.down.weight", "lora.up.weight"),
    ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
]


def spelled(stem: str) -> str:
    return stem.format(
        path=PATH,
        path_=PATH.replace(".", "_"),
        original=ORIGINAL,
        original_=ORIGINAL.replace(".", "_"),
        dollars=PATH.replace(".", "$$"),
    )


@pytest.mark.parametrize("tensors", TENSORS, ids=lambda names: names[0])
@pytest.mark.parametrize("number", ["1", "2"])
@pytest.mark.parametrize("stem", [*STEMS[""], *STEMS["high_noise"]])
def test_a_key_leads_to_its_layer_and_expert(stem: str, number: str, tensors: tuple[str, str]) -> None:
    expert = "" if stem in STEMS[""] else {"1": "high_noise", "2": "low_noise"}[number]
    name = spelled(stem)
    if expert:
        name = name.replace("transformer_1", f"transformer_{number}").replace("transformer1", f"transformer{number}")
    for suffix, expected in zip(tensors, ("lora_A.weight", "lora_B.weight"), strict=True):
        found = split_key(f"{name}.{suffix}")
        assert found is not None
        assert found.tensor == expected
        located = locate(found.stem, KEY_MAPS["wan"])
        assert located is not None
        assert (located.mapped.paths, located.expert) == ((PATH,), expert)


@pytest.mark.parametrize(
    ("suffix", "tensor"),
    [
        ("lora_magnitude_vector", "magnitude"),
        ("lora_magnitude_vector.weight", "magnitude"),
        ("lora_magnitude_vector.default.weight", "magnitude"),
        ("dora_scale", "dora_scale"),
        ("lokr_w1", "lokr_w1"),
        ("lokr_w2_a", "lokr_w2_a"),
        ("lokr_t2", "lokr_t2"),
        ("hada_w2_b", "hada_w2_b"),
        ("oft_blocks", "oft_blocks"),
        ("diff_b", "diff_b"),
        ("on_input", "on_input"),
        ("weight", "weight"),
        ("alpha", "alpha"),
    ],
)
def test_the_other_tensors(suffix: str, tensor: str) -> None:
    found = split_key(f"diffusion_model.{ORIGINAL}.{suffix}")
    assert found is not None
    assert (found.stem, found.tensor) == (f"diffusion_model.{ORIGINAL}", tensor)


def test_old_diffusers_attention_processors() -> None:
    """`processor`, `to_q_lora`, and `to_out` without its 0."""
    attention = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1"
    for name, path in (("to_q", "to_q"), ("to_out", "to_out.0")):
        found = split_key(f"{attention}.processor.{name}_lora.down.weight")
        assert found is not None
        located = locate(found.stem, KEY_MAPS["sdxl"])
        assert located is not None
        assert located.mapped.paths == (f"{attention.removeprefix('unet.')}.{path}",)


def test_other_families_have_no_experts() -> None:
    assert locate("transformer_1.transformer_blocks.0.attn.to_q", KEY_MAPS["flux"]) is None


# -- whole files ------------------------------------------------------------------------------------------------------


def two_experts(tiny_model, kind: str = "lokr") -> dict[str, AdapterState]:
    shapes = making.in_blocks(making.layer_shapes("wan", tiny_model))
    return {
        expert: making.state("wan", shapes, kind, seed=seed, expert=expert)
        for seed, expert in enumerate(("high_noise", "low_noise"))
    }


def mixed(states: dict[str, AdapterState], stem: str) -> dict[str, Tensor]:
    """Both experts in one file, as ai-toolkit has them in memory and writes them with split_multistage_loras off."""
    found = {}
    for number, state in zip("12", states.values(), strict=True):
        for path, layer in state.layers.items():
            name = stem.format(number=number, path=path, path_=path.replace(".", "_"), dollars=path.replace(".", "$$"))
            found |= {f"{name}.{tensor}": value for tensor, value in layer.tensors.items()}
            found[f"{name}.alpha"] = torch.tensor(9999999999.0).half()
    return found


@pytest.mark.parametrize(
    "stem",
    [
        "transformer$$transformer_{number}$${dollars}",
        "transformer.transformer_{number}.{path}",
        "lycoris_transformer_{number}_{path_}",
        "lora_transformer_{number}_{path_}",
        "transformer{number}_{path_}",
    ],
)
def test_both_experts_in_one_file(stem: str, tiny_model, tmp_path: Path) -> None:
    """It is rejected unless split; after splitting, both are complete. The alpha of 9999999999 is inf in the file and
    means a scale of 1."""
    states = two_experts(tiny_model)
    file = tmp_path / "both.safetensors"
    save_file(mixed(states, stem), file)
    opened = open_adapter(file)
    assert opened.detected.experts == ("high_noise", "low_noise")
    with pytest.raises(MixedExpertsError, match="--split"):
        opened.state()
    for found, expected in zip(opened.states(), states.values(), strict=True):
        assert found.expert == expected.expert
        assert list(found.layers) == list(expected.layers)
        for path, layer in found.layers.items():
            assert (layer.alpha, layer.rank) == (1.0, None)
            for name, tensor in expected.layers[path].tensors.items():
                assert torch.equal(layer.tensors[name], tensor)


def test_both_experts_by_diffusers_names(tiny_model, tmp_path: Path) -> None:
    """`transformer.` and `transformer_2.`: diffusers itself would ignore the second half."""
    states = two_experts(tiny_model, "lora")
    tensors = {}
    for prefix, state in zip(("transformer", "transformer_2"), states.values(), strict=True):
        for path, layer in state.layers.items():
            tensors |= {f"{prefix}.{path}.{name}": value for name, value in layer.tensors.items()}
    save_file(tensors, tmp_path / "both.safetensors")
    found = open_adapter(tmp_path / "both.safetensors").states()
    assert [state.expert for state in found] == ["high_noise", "low_noise"]


def test_some_keys_of_one_expert_and_some_of_none(tiny_model, tmp_path: Path) -> None:
    state = two_experts(tiny_model, "lora")["high_noise"]
    paths = list(state.layers)
    tensors = {
        f"{prefix}.{path}.{name}": value
        for prefix, path in (("transformer_1", paths[0]), ("diffusion_model", paths[1]))
        for name, value in state.layers[path].tensors.items()
    }
    save_file(tensors, tmp_path / "some.safetensors")
    with pytest.raises(MixedExpertsError, match="beside layers of no expert"):
        open_adapter(tmp_path / "some.safetensors")


def test_ai_toolkits_file_reads_as_ours(tiny_model, tmp_path: Path) -> None:
    """The file of the forks: original names, lora_A and lora_B, no alpha; the expert only in the file's name."""
    state = two_experts(tiny_model, "lora")["low_noise"]
    keys = KEY_MAPS["wan"]
    tensors = {
        f"diffusion_model.{found.name}.{name}": value.bfloat16()
        for path, layer in state.layers.items()
        if (found := keys.original(path)) is not None
        for name, value in layer.tensors.items()
    }
    save_file(tensors, tmp_path / "job_000001000_low_noise.safetensors", {"ss_base_model_version": "wan_2.2_14b"})
    opened = open_adapter(tmp_path / "job_000001000_low_noise.safetensors")
    found = opened.state()
    assert (opened.detected.format, found.expert) == ("comfyui", "low_noise")
    assert {(layer.alpha, layer.rank) for layer in found.layers.values()} == {(2.0, 2)}
    again, _ = FORMATS["comfyui"].write(found, torch.bfloat16)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_flux_trained_on_fused_matrices(tiny_model) -> None:
    """kohya without split_qkv: one dense LoRA over query, key, value becomes three with the same effect."""
    generator = torch.Generator().manual_seed(0)
    width, rank = 24, 4
    down, up = torch.randn(rank, width, generator=generator), torch.randn(7 * width, rank, generator=generator)
    tensors = {
        "lora_unet_single_blocks_0_linear1.lora_down.weight": down,
        "lora_unet_single_blocks_0_linear1.lora_up.weight": up,
        "lora_unet_single_blocks_0_linear1.alpha": torch.tensor(2.0),
    }
    state = FORMATS["kohya"].read(tensors, {}, "flux").checked().states[""]
    assert [path.rpartition(".")[2] for path in state.layers] == ["to_q", "to_k", "to_v", "proj_mlp"]
    rows = torch.cat(
        [delta(layer, (layer.tensors["lora_B.weight"].shape[0], width)) for layer in state.layers.values()]
    )
    torch.testing.assert_close(rows, up @ down * 0.5)


def test_our_flux_kohya_file_in_diffusers_converter() -> None:
    """The converter only knows the published sizes; a LoRA of those is small enough to convert without a model."""
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    wide = 3072
    shapes = {
        **{f"transformer_blocks.0.attn.{name}": (wide, wide) for name in ("to_q", "to_k", "to_v", "to_out.0")},
        **{f"single_transformer_blocks.1.attn.to_{name}": (wide, wide) for name in "qv"},
        "single_transformer_blocks.1.proj_mlp": (4 * wide, wide),
        "transformer_blocks.0.ff.net.0.proj": (4 * wide, wide),
    }
    state = making.state("flux", shapes, "lora", rank=3, alpha=1.5)
    tensors, _ = FORMATS["kohya"].write(state, torch.float32)
    found = _convert_kohya_flux_lora_to_diffusers(tensors)
    for path, layer in state.layers.items():
        some = slice(0, 16)  # columns enough
        theirs = (
            found.pop(f"transformer.{path}.lora_B.weight") @ found.pop(f"transformer.{path}.lora_A.weight")[:, some]
        )
        ours = layer.tensors["lora_B.weight"] @ layer.tensors["lora_A.weight"][:, some] * layer.scale
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    assert all(not tensor.any() for key, tensor in found.items() if "lora_B" in key), "parts without an adapter stay so"


# -- DiffSynth-Studio -------------------------------------------------------------------------------------------------

# Its FLUX.1: what its layers are called, and the rows of diffusers' layers that each consists of, in its order.
DIFFSYNTH_FLUX = {
    "blocks.0.norm1_a.linear": ["transformer_blocks.0.norm1.linear"],
    "blocks.0.norm1_b.linear": ["transformer_blocks.0.norm1_context.linear"],
    "blocks.0.attn.a_to_qkv": [f"transformer_blocks.0.attn.to_{name}" for name in "qkv"],
    "blocks.0.attn.b_to_qkv": [f"transformer_blocks.0.attn.add_{name}_proj" for name in "qkv"],
    "blocks.0.attn.a_to_out": ["transformer_blocks.0.attn.to_out.0"],
    "blocks.0.attn.b_to_out": ["transformer_blocks.0.attn.to_add_out"],
    "blocks.0.ff_a.0": ["transformer_blocks.0.ff.net.0.proj"],
    "blocks.0.ff_a.2": ["transformer_blocks.0.ff.net.2"],
    "blocks.0.ff_b.0": ["transformer_blocks.0.ff_context.net.0.proj"],
    "blocks.0.ff_b.2": ["transformer_blocks.0.ff_context.net.2"],
    "single_blocks.0.norm.linear": ["single_transformer_blocks.0.norm.linear"],
    "single_blocks.0.to_qkv_mlp": [
        *(f"single_transformer_blocks.0.attn.to_{name}" for name in "qkv"),
        "single_transformer_blocks.0.proj_mlp",
    ],
    "single_blocks.0.proj_out": ["single_transformer_blocks.0.proj_out"],
    "time_embedder.timestep_embedder.0": ["time_text_embed.timestep_embedder.linear_1"],
    "guidance_embedder.timestep_embedder.2": ["time_text_embed.guidance_embedder.linear_2"],
    "pooled_text_embedder.0": ["time_text_embed.text_embedder.linear_1"],
    "context_embedder": ["context_embedder"],
    "x_embedder": ["x_embedder"],
    "final_proj_out": ["proj_out"],
}
DIFFSYNTH_WAN = {
    f"blocks.1.{theirs}": [f"blocks.1.{ours}"]
    for theirs, ours in {
        "self_attn.q": "attn1.to_q", "self_attn.k": "attn1.to_k", "self_attn.v": "attn1.to_v",
        "self_attn.o": "attn1.to_out.0", "cross_attn.q": "attn2.to_q", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
    }.items()
}  # fmt: skip
DIFFSYNTH_QWEN = {
    f"transformer_blocks.1.{name}": [f"transformer_blocks.1.{name}"]
    for name in ("attn.to_q", "attn.add_k_proj", "attn.to_out.0", "attn.to_add_out", "img_mlp.net.2", "img_mod.1")
}
DIFFSYNTH = {"flux": DIFFSYNTH_FLUX, "wan": DIFFSYNTH_WAN, "qwen_image": DIFFSYNTH_QWEN}


@pytest.mark.parametrize("prefix", ["", "pipe.dit."])
@pytest.mark.parametrize("family", DIFFSYNTH)
def test_files_of_diffsynth_studio(family: str, prefix: str, tiny_model, tmp_path: Path) -> None:
    """peft's names for its own modules, and no alpha: with the one its trainer uses, every layer gets its rows."""
    shapes = making.layer_shapes(family, tiny_model)
    generator, rank = torch.Generator().manual_seed(0), 4
    tensors, changes = {}, {}
    for name, paths in DIFFSYNTH[family].items():
        rows = [shapes[path][0] for path in paths]
        down = torch.randn(rank, shapes[paths[0]][1], generator=generator)
        up = torch.randn(sum(rows), rank, generator=generator)
        tensors |= {f"{prefix}{name}.lora_A.default.weight": down, f"{prefix}{name}.lora_B.default.weight": up}
        changes |= dict(zip(paths, (up @ down).split(rows), strict=True))
    path = tmp_path / "epoch-4.safetensors"
    save_file(tensors, path)
    with pytest.raises(BrokenLayerError, match="--alpha"):
        open_adapter(path, family).states()
    found = open_adapter(path, family, alpha=2.0).state()
    assert found.layers.keys() == changes.keys()
    for layer, change in changes.items():
        torch.testing.assert_close(delta(found.layers[layer], shapes[layer]), change / 2)


def test_the_final_norm_of_diffsynths_flux_has_the_originals_order() -> None:
    mapped = KEY_MAPS["flux"].find("final_norm_out.linear")
    assert mapped == KEY_MAPS["flux"].find("final_layer.adaLN_modulation.1")
    assert mapped is not None
    assert mapped.halves_swapped

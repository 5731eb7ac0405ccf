"""Every layer of every denoiser has exactly one name in each layout, and each name leads back to it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_krea2_transformer_checkpoint_to_diffusers,
    convert_wan_transformer_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from torch import nn

from gracetune.config.families import FAMILIES
from gracetune.models.keys import Fused, KeyMap, KeyMapRule, MappedLayers
from gracetune.models.registry import KEY_MAPS
from unit.models.original_names import sdxl_unet
from unit.models.published import FLUX, QWEN, WAN, denoiser

FLAVOURS = [
    *(("wan", flavour) for flavour in WAN),
    *(("qwen_image", flavour) for flavour in QWEN),
    *(("flux", flavour) for flavour in FLUX),
    ("flux2", "dev"),
    ("flux2", "klein-base-4b"),
    ("z_image", "base"),
    ("krea2", "raw"),
    ("sdxl", "base-1.0"),
    ("stable_audio", "open-1.0"),
]
TINY = [
    ("wan", "t2v-14b-2.2"),
    ("wan", "i2v-14b-2.2"),
    ("wan", "ti2v-5b-2.2"),
    ("wan", "i2v-14b-480p-2.1"),
    ("qwen_image", "t2i"),
    ("flux", "dev"),
    ("flux2", "dev"),
    ("z_image", "base"),
    ("krea2", "raw"),
    ("sdxl", "base-1.0"),
    ("stable_audio", "open-1.0"),
]


Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def adaptable(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield path


@functools.cache
def published_paths(family: str, flavour: str) -> tuple[str, ...]:
    with torch.device("meta"):
        return tuple(adaptable(denoiser(family, flavour)))


def check_bijection(keys: KeyMap, paths: Sequence[str]) -> None:
    assert [path for path in paths if not keys.has(path)] == []
    seen: dict[tuple[str, int], str] = {}
    for path in paths:
        original = keys.original(path)
        assert original is not None
        assert seen.setdefault((original.name, original.part), path) == path, "two layers share an original name"
        assert original.mapped.paths[original.part] == path
        for name in (path, path.replace(".", "_")):
            assert keys.find(name) == MappedLayers((path,), "diffusers")
        for name in (original.name, original.name.replace(".", "_")):
            found = keys.find(name)
            assert found is not None
            assert found.paths == original.mapped.paths or name in (path, path.replace(".", "_"))


@pytest.mark.parametrize(("family", "flavour"), FLAVOURS)
def test_every_layer_of_the_published_models_has_one_name_in_each_layout(family: str, flavour: str) -> None:
    check_bijection(KEY_MAPS[family], published_paths(family, flavour))


def original_names(family: str, flavour: str) -> dict[str, str]:
    found = {path: KEY_MAPS[family].original(path) for path in published_paths(family, flavour)}
    return {path: original.name for path, original in found.items() if original is not None}


@pytest.mark.parametrize("flavour", WAN)
def test_wans_original_names_are_those_diffusers_converts(flavour: str) -> None:
    names = original_names("wan", flavour)
    converted = convert_wan_transformer_to_diffusers({f"{name}.weight": path for path, name in names.items()})
    assert converted == {f"{path}.weight": path for path in names}


def test_sdxls_original_names_equal_its_single_files() -> None:
    """`sdxl_unet` is what diffusers' own reader of single files is tested with (test_single_file)."""
    for path, name in original_names("sdxl", "base-1.0").items():
        assert f"model.diffusion_model.{name}.weight" == sdxl_unet(f"{path}.weight")


STABLE_AUDIO_OUTSIDE = {
    **{f"{ours}.{layer}": f"to_{theirs}_embed.{layer}" for layer in (0, 2) for ours, theirs in (
        ("timestep_proj", "timestep"), ("global_proj", "global"), ("cross_attention_proj", "cond"),
    )},
    "proj_in": "transformer.project_in", "proj_out": "transformer.project_out",
    "preprocess_conv": "preprocess_conv", "postprocess_conv": "postprocess_conv",
}  # fmt: skip
STABLE_AUDIO_BLOCK = {
    "attn1.to_q": ("self_attn.to_qkv", 0), "attn1.to_k": ("self_attn.to_qkv", 1), "attn1.to_v": ("self_attn.to_qkv", 2),
    "attn1.to_out.0": ("self_attn.to_out", 0), "attn2.to_q": ("cross_attn.to_q", 0),
    "attn2.to_k": ("cross_attn.to_kv", 0), "attn2.to_v": ("cross_attn.to_kv", 1),
    "attn2.to_out.0": ("cross_attn.to_out", 0), "ff.net.0.proj": ("ff.ff.0.proj", 0), "ff.net.2": ("ff.ff.2", 0),
}  # fmt: skip
"""Name, and which part of it: as read in ComfyUI's `comfy/ldm/audio/dit.py`."""


def test_stable_audios_original_names_are_those_of_comfyuis_model() -> None:
    expected = {path: (name, 0) for path, name in STABLE_AUDIO_OUTSIDE.items()}
    for block in range(24):
        for path, (name, part) in STABLE_AUDIO_BLOCK.items():
            expected[f"transformer_blocks.{block}.{path}"] = (f"transformer.layers.{block}.{name}", part)
    found = {path: KEY_MAPS["stable_audio"].original(path) for path in published_paths("stable_audio", "open-1.0")}
    assert {path: (one.name, one.part) for path, one in found.items() if one is not None} == expected


@pytest.mark.parametrize(
    ("family", "flavour", "convert"),
    [
        ("z_image", "base", convert_z_image_transformer_checkpoint_to_diffusers),
        ("flux2", "dev", convert_flux2_transformer_checkpoint_to_diffusers),
    ],
)
def test_original_names_are_those_diffusers_converts(family: str, flavour: str, convert: Convert) -> None:
    """Each matrix of the original layout, filled with its index: diffusers puts it where our map says."""
    keys, names = KEY_MAPS[family], original_names(family, flavour)
    originals = sorted({*names.values()})
    rows = torch.arange(6)[:, None] / 8
    checkpoint = {f"{name}.weight": index + rows for index, name in enumerate(originals)}
    converted = convert(checkpoint)
    assert {path.removesuffix(".weight") for path in converted} == {*published_paths(family, flavour)}
    for path, tensor in converted.items():
        found = keys.original(path.removesuffix(".weight"))
        assert found is not None
        assert originals[int(tensor[0, 0])] == found.name
        parts = rows.chunk(2)[::-1] if found.mapped.halves_swapped else rows.chunk(len(found.mapped.paths))
        expected = torch.cat(parts) if found.mapped.halves_swapped else parts[found.part]
        assert torch.equal(tensor - tensor.floor(), expected)


def test_krea_2s_original_names_are_those_diffusers_converts() -> None:
    names = original_names("krea2", "raw")
    checkpoint = {f"{name}.weight": torch.full((1,), float(index)) for index, name in enumerate(names.values())}
    converted = convert_krea2_transformer_checkpoint_to_diffusers(checkpoint)
    assert {path: int(value) for path, value in converted.items()} == {
        f"{path}.weight": index for index, path in enumerate(names)
    }


@pytest.mark.parametrize("flavour", QWEN)
def test_qwen_images_names_are_the_original_ones(flavour: str) -> None:
    names = original_names("qwen_image", flavour)
    assert names == {path: path for path in names}


@pytest.mark.parametrize(("family", "flavour"), TINY)
def test_every_layer_of_the_tiny_models_has_one_name_in_each_layout(family, flavour, tiny_model) -> None:
    import diffusers

    folder = tiny_model(family, flavour)
    component = KEY_MAPS[family].component
    cls = {
        "wan": diffusers.WanTransformer3DModel,
        "qwen_image": diffusers.QwenImageTransformer2DModel,
        "flux": diffusers.FluxTransformer2DModel,
        "flux2": diffusers.Flux2Transformer2DModel,
        "z_image": diffusers.ZImageTransformer2DModel,
        "krea2": diffusers.Krea2Transformer2DModel,
        "sdxl": diffusers.UNet2DConditionModel,
        "stable_audio": diffusers.StableAudioDiTModel,
    }[family]
    check_bijection(KEY_MAPS[family], list(adaptable(cls.from_pretrained(folder / component))))


@pytest.mark.parametrize("keys", KEY_MAPS.values(), ids=lambda keys: keys.family)
def test_underscored_names_are_unambiguous(keys: KeyMap) -> None:
    """Over all templates with small block numbers: a name means one layer, whichever table finds it."""
    means: dict[str, set[tuple[str, ...]]] = {}
    for template in keys.templates:
        for counts in itertools.product(range(3), repeat=template.count("{}")):
            path = template.format(*counts)
            means.setdefault(path.replace(".", "_"), set()).add((path,))
    for entry in (*keys.rules, *keys.fused):
        for counts in itertools.product(range(3), repeat=entry.original.count("{}")):
            parts = [entry.ours] if isinstance(entry, KeyMapRule) else [part for part, _ in entry.parts]
            paths = tuple(part.format(*counts) for part in parts)
            means.setdefault(entry.original.format(*counts).replace(".", "_"), set()).add(paths)
            for other in (other for other, original in keys.other_names if original == entry.original):
                means.setdefault(other.format(*counts), set()).add(paths)
    assert {name: places for name, places in means.items() if len(places) > 1} == {}
    for name, places in means.items():
        found = keys.find(name)
        assert found is not None
        assert {found.paths} == places


def test_every_family_has_a_map() -> None:
    assert tuple(KEY_MAPS) == FAMILIES


@pytest.mark.parametrize("keys", KEY_MAPS.values(), ids=lambda keys: keys.family)
def test_other_names_refer_to_existing_layers(keys: KeyMap) -> None:
    assert {original for _, original in keys.other_names} <= {entry.original for entry in (*keys.rules, *keys.fused)}


def test_fused_families_say_so() -> None:
    assert {family for family, keys in KEY_MAPS.items() if keys.fused} == {"flux", "flux2", "z_image", "stable_audio"}
    mapped = KEY_MAPS["flux"].find("lora_unet_single_blocks_3_linear1".removeprefix("lora_unet_"))
    assert mapped == MappedLayers(
        tuple(f"single_transformer_blocks.3.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        "original",
        (1, 1, 1, 4),
    )


def test_unknown_names_are_unknown() -> None:
    for keys in KEY_MAPS.values():
        for name in ("", "blocks", "nonsense.0.to_q", "lora_te1_text_model_encoder_layers_0_mlp_fc1", "12"):
            assert keys.find(name) is None
            assert keys.original(name) is None


def test_order_follows_the_blocks() -> None:
    keys = KEY_MAPS["wan"]
    paths = ["proj_out", "blocks.10.attn1.to_q", "blocks.2.ffn.net.2", "blocks.2.attn1.to_k", "patch_embedding"]
    assert keys.in_order(paths) == [
        "patch_embedding", "blocks.2.attn1.to_k", "blocks.2.ffn.net.2", "blocks.10.attn1.to_q", "proj_out",
    ]  # fmt: skip


def test_custom_map() -> None:
    keys = KeyMap("x", "transformer", (KeyMapRule("a.{}.b", "c.{}"),), (Fused("f.{}", (("a.{}.q", 1), ("a.{}.k", 2))),))
    assert keys.find("c_7") == MappedLayers(("a.7.b",), "original")
    assert keys.find("f.7") == MappedLayers(("a.7.q", "a.7.k"), "original", (1, 2))
    found = keys.original("a.7.k")
    assert found is not None
    assert (found.name, found.part) == ("f.7", 1)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dialects.aitoolkit.model import OTHER_ARCHS, archs
from gracetune.config.families import find_flavour
from unit.config.aitoolkit_jobs import (
    FLUX,
    QWEN_EDIT,
    SDXL,
    WAN,
    dataset,
    job,
    note,
    only_problem,
    problems,
    read,
)


def model(folder: Path, keys: dict[str, Any]) -> Any:
    document = job()
    document["config"]["process"][0]["model"] = keys
    return read(folder, document).config.model


@pytest.mark.parametrize(
    ("arch", "path", "family", "flavour"),
    [
        ("wan22_14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "wan", "t2v-14b-2.2"),
        ("wan22_14b:t2v", "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16", "wan", "t2v-14b-2.2"),
        ("wan22_14b_i2v", "/weights/i2v", "wan", "i2v-14b-2.2"),
        ("wan22_5b", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "wan", "ti2v-5b-2.2"),
        ("wan21", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan", "t2v-1.3b-2.1"),
        ("wan21", "/weights/some-wan", "wan", None),
        ("wan21:1b", "/weights/some-wan", "wan", "t2v-1.3b-2.1"),
        ("wan21:14b", "/weights/some-wan", "wan", "t2v-14b-2.1"),
        # the weights decide, as upstream drops the tag
        ("wan21:14b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan", "t2v-1.3b-2.1"),
        ("wan21_i2v:14b480p", "/weights/some-wan", "wan", "i2v-14b-480p-2.1"),
        ("wan21_i2v:14b", "/weights/some-wan", "wan", "i2v-14b-720p-2.1"),
        ("qwen_image", "Qwen/Qwen-Image", "qwen_image", "t2i"),
        ("qwen_image:2512", "/weights/qwen", "qwen_image", "t2i-2512"),
        ("qwen_image_edit", "/weights/qwen", "qwen_image", "edit"),
        ("qwen_image_edit_plus", "Qwen/Qwen-Image-Edit-2509", "qwen_image", "edit-2509"),
        ("qwen_image_edit_plus:2511", "/weights/qwen", "qwen_image", "edit-2511"),
        ("flux", "black-forest-labs/flux.1-KREA-dev", "flux", "krea"),
        ("flux", "/weights/flux", "flux", None),
        ("flux_kontext", "/weights/flux", "flux", "kontext"),
        ("flux2", "/weights/flux2", "flux2", "dev"),
        ("flux2_klein_9b", "black-forest-labs/FLUX.2-klein-base-9B", "flux2", "klein-base-9b"),
        ("flux2_klein_4b", "/weights/klein", "flux2", None),
        ("zimage", "Tongyi-MAI/Z-Image", "z_image", "base"),
        ("zimage", "/weights/z-image", "z_image", None),
        ("krea2", "krea/Krea-2-Raw", "krea2", "raw"),
        ("krea2", "/weights/krea", "krea2", None),
        ("sdxl", "/weights/some.safetensors", "sdxl", "base-1.0"),
    ],
)
def test_an_arch_and_its_weights_give_family_and_flavour(
    tmp_path: Path, arch: str, path: str, family: str, flavour: str | None
) -> None:
    scheduler = "ddpm" if arch == "sdxl" else "flowmatch"
    sources = {"control_path": "/data/before"} if archs()[arch.partition(":")[0]][1].references else {}
    document = job(train={"noise_scheduler": scheduler}, datasets=dataset(**sources))
    document["config"]["process"][0]["model"] = {"arch": arch, "name_or_path": path}
    found = read(tmp_path, document).config.model
    assert (found.family, found.flavour, found.path) == (family, flavour, path)


def test_every_arch_leads_to_flavours_that_exist() -> None:
    for names, arch in archs().values():
        assert all(find_flavour(names.family, name) for name in arch.flavours)
        assert set(arch.tags.values()) <= set(arch.flavours)
    assert not set(archs()) & set(OTHER_ARCHS)


@pytest.mark.parametrize(("switch", "family"), [("is_flux", "flux"), ("is_xl", "sdxl")])
def test_the_old_switches_name_our_families_too(tmp_path: Path, switch: str, family: str) -> None:
    document = job(train={"noise_scheduler": "flowmatch"})
    document["config"]["process"][0]["model"] = {"name_or_path": "/weights/x", switch: True, "is_v2": False}
    assert read(tmp_path, document).config.model.family == family


@pytest.mark.parametrize("arch", OTHER_ARCHS)
def test_models_we_do_not_train_are_rejected_without_a_guess(tmp_path: Path, arch: str) -> None:
    problem = only_problem(tmp_path, model={"arch": arch, "name_or_path": "owner/name"})
    assert problem.key == "config.process[0].model.arch"
    assert problem.hint == "train it with ai-toolkit, or choose one of these models"


def test_a_misspelt_arch_gets_the_nearest(tmp_path: Path) -> None:
    assert only_problem(tmp_path, model={"arch": "wan22_14"}).hint == "write `arch: wan22_14b`"


@pytest.mark.parametrize(
    ("keys", "key", "found"),
    [
        ({"is_v3": True}, "model.is_v3", "sd3"),
        ({"is_ssd": True}, "model.is_ssd", "ssd"),
        ({}, "model.arch", "Stable Diffusion 1.5"),
        ({"arch": ["wan21"]}, "model.arch", "a list of 1"),
    ],
)
def test_an_old_switch_or_no_arch_at_all_is_named(tmp_path: Path, keys: dict[str, Any], key: str, found: str) -> None:
    document = job()
    document["config"]["process"][0]["model"] = {"name_or_path": "owner/name", **keys}
    problem = problems(tmp_path, document)[key]
    assert found in problem.found


def test_flex_behind_a_flux_arch_is_still_flex(tmp_path: Path) -> None:
    assert "Flex" in only_problem(tmp_path, model={**FLUX, "name_or_path": "ostris/Flex.1-alpha"}).expected


def test_weights_of_another_arch_are_a_problem(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, model={"name_or_path": "Wan-AI/Wan2.1-T2V-14B-Diffusers"})
    assert problem.key == "config.process[0].model.name_or_path"
    assert "Wan2.2-T2V-A14B" in problem.expected


def test_weights_behind_a_link_have_to_be_fetched_first(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, model={"name_or_path": "https://example.org/models/1"})
    assert problem.hint == "download the file and name it here"


def test_missing_weights_are_named_with_an_example(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, model={"name_or_path": None})
    assert problem.hint == "for example `name_or_path: Wan-AI/Wan2.2-T2V-A14B-Diffusers`"


def test_text_encoder_and_vae_may_come_from_elsewhere(tmp_path: Path) -> None:
    found = model(tmp_path, {**WAN, "extras_name_or_path": "owner/extras", "vae_path": "/weights/vae"})
    assert (found.vae_path, found.text_encoder_path) == ("/weights/vae", "owner/extras")
    found = model(tmp_path, {**WAN, "extras_name_or_path": WAN["name_or_path"], "te_name_or_path": "/weights/te"})
    assert (found.vae_path, found.text_encoder_path) == (None, "/weights/te")


@pytest.mark.parametrize(
    ("kwargs", "experts"),
    [
        ({}, "both"),
        ({"train_high_noise": True, "train_low_noise": True}, "both"),
        ({"train_low_noise": False}, "high"),
        ({"train_high_noise": False, "train_low_noise": True}, "low"),
    ],
)
def test_the_noise_experts_to_train(tmp_path: Path, kwargs: dict[str, bool], experts: str) -> None:
    assert model(tmp_path, {**WAN, "model_kwargs": kwargs}).experts == experts


def test_training_neither_expert_is_a_problem(tmp_path: Path) -> None:
    kwargs = {"train_high_noise": False, "train_low_noise": False}
    assert "at least one" in only_problem(tmp_path, model={"model_kwargs": kwargs}).expected


def test_experts_mean_nothing_to_a_model_without_them(tmp_path: Path) -> None:
    resolved = read(tmp_path, model={**FLUX, "model_kwargs": {"train_high_noise": False}})
    assert resolved.config.model.experts == "both"
    assert "model_kwargs.train_high_noise" in note(resolved, "harmless")


def test_vae_tiling_is_passed_on(tmp_path: Path) -> None:
    assert model(tmp_path, {**WAN, "model_kwargs": {"vae_tiling": True}}).vae_tiling is True


@pytest.mark.parametrize("qtype", [None, "qfloat8", "float8", "qfloat8_e4m3fn", "qfloat8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["bf16", None])
def test_a_float8_base_is_held_in_fp8(tmp_path: Path, qtype: str | None, dtype: str | None) -> None:
    keys = {"quantize": True, "quantize_te": True, "qtype": qtype}
    resolved = read(tmp_path, model=keys, train={"dtype": dtype})
    assert resolved.config.model.base_precision == "fp8"
    assert resolved.config.training.mixed_precision == (dtype or "fp32")
    assert "round a little differently" in note(resolved, "model.quantize:")
    assert "more exact than requested" in note(resolved, "model.quantize_te:")


@pytest.mark.parametrize("qtype", ["uint4", "int8", "qint8", "orbit3", "uint3|owner/adapter.safetensors"])
def test_the_plan_decides_what_few_bits_become(tmp_path: Path, qtype: str) -> None:
    resolved = read(tmp_path, model={**FLUX, "quantize": True, "quantize_te": False, "qtype": qtype})
    assert (resolved.config.model.base_precision, resolved.config.training.mixed_precision) == ("auto", "bf16")
    (stated,) = [text for text in resolved.notes if "model.quantize" in text]
    kind, _, recovery = qtype.partition("|")
    assert f"{kind} is requested; decided by the memory plan" in stated
    assert ("owner/adapter.safetensors" in stated and "is not loaded" in stated) == bool(recovery)


def test_an_accuracy_recovery_adapter_may_have_a_key_of_its_own(tmp_path: Path) -> None:
    keys = {"qtype": "uint4", "accuracy_recovery_adapter": "owner/a.safetensors"}
    assert "owner/a.safetensors" in note(read(tmp_path, model={**FLUX, "quantize": True, **keys}), "model.quantize: u")
    keys["qtype"] = "qfloat8"
    assert "owner/a.safetensors" in note(
        read(tmp_path, model={**FLUX, "quantize": True, **keys}), "model.quantize: base"
    )
    assert "accuracy_recovery_adapter" in note(read(tmp_path, model={**FLUX, **keys}), "harmless")


@pytest.mark.parametrize(
    ("qtype", "hint"), [("nf4", "nvfp4"), ("qfloat", "qfloat8"), (8, "qfloat8"), ("unt4", "uint4")]
)
def test_a_type_nobody_knows_is_a_problem(tmp_path: Path, qtype: Any, hint: str) -> None:
    problem = only_problem(tmp_path, model={**FLUX, "quantize": True, "qtype": qtype})
    assert problem.key == "config.process[0].model.qtype"
    assert str(qtype) in problem.found
    assert f"qtype: {hint}" in problem.hint


def test_a_text_encoder_has_a_type_of_its_own_except_in_wan(tmp_path: Path) -> None:
    te = {"quantize_te": True, "qtype_te": "uint4"}
    assert "requested, 'uint4'" in note(read(tmp_path, model={**FLUX, **te}), "model.quantize_te:").replace('"', "'")
    wan = note(read(tmp_path, model=te), "model.quantize_te:")
    assert "more exact" in wan  # qtype counts, which is not set
    assert "uint4" not in wan
    assert "more exact" in note(read(tmp_path, model={**FLUX, **te, "qtype_te": "float8"}), "model.quantize_te:")


def test_a_text_encoder_follows_the_base_unless_it_is_told_not_to(tmp_path: Path) -> None:
    requested = [text for text in read(tmp_path, model={**FLUX, "quantize": True}).notes if "more exact" in text]
    assert len(requested) == 1
    message = read(tmp_path, model={**FLUX, "quantize": True, "quantize_te": False}).notes
    assert not any("more exact" in text for text in message)


def test_what_quantizing_cannot_be_combined_with(tmp_path: Path) -> None:
    full = only_problem(tmp_path, network=None, model={"quantize": True})
    assert "full fine-tune" in full.expected
    exclude = {"quantize": True, "quantize_kwargs": {"exclude": ["proj_out"]}}
    assert only_problem(tmp_path, model=exclude).key.endswith("quantize_kwargs")


def test_an_assistant_is_for_models_that_were_distilled(tmp_path: Path) -> None:
    assert model(tmp_path, {**FLUX, "assistant_lora_path": "owner/lora"}).assistant_adapter == "owner/lora"
    problem = only_problem(tmp_path, model={"assistant_lora_path": "owner/lora"})
    assert problem.key == "config.process[0].model.assistant_lora_path"
    assert "for flux, zimage, krea2 alone" in problem.expected
    alone = only_problem(tmp_path, network=None, model={**FLUX, "assistant_lora_path": "owner/lora"})
    assert "add a `network`" in alone.hint


TURBO = {"arch": "zimage:turbo", "name_or_path": "Tongyi-MAI/Z-Image-Turbo"}


def test_z_images_turbo_has_its_assistant_on_the_hub(tmp_path: Path) -> None:
    """ai-toolkit's `owner/name/file`, unless such a file is on disk."""
    name = "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"
    found = model(tmp_path, {**TURBO, "assistant_lora_path": name})
    assert (found.flavour, found.assistant_adapter) == ("turbo", f"hf://{name}")
    assert "distilled" in only_problem(tmp_path, model=TURBO).found
    other = {**TURBO, "name_or_path": "ostris/Z-Image-De-Turbo", "assistant_lora_path": name}
    assert "without its model" in only_problem(tmp_path, model=other).expected


def test_krea_2s_turbo_has_its_assistant_on_the_hub(tmp_path: Path) -> None:
    name = "ostris/krea2_turbo_training_adapter/krea2_turbo_training_adapter_v1.safetensors"
    keys = {"arch": "krea2:turbo", "name_or_path": "krea/Krea-2-Turbo"}
    found = model(tmp_path, {**keys, "assistant_lora_path": name})
    assert (found.flavour, found.assistant_adapter) == ("turbo", f"hf://{name}")
    assert "distilled" in only_problem(tmp_path, model=keys).found
    edits = {"arch": "krea2:o_edit", "name_or_path": "krea/Krea-2-Raw", "model_kwargs": {"edit": True}}
    assert only_problem(tmp_path, model=edits).key == "config.process[0].model.model_kwargs.edit"


def test_an_edit_model_without_references_is_asked_for_them(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, model=QWEN_EDIT)
    assert problem.key == "config.process[0].datasets[0].control_path"
    assert "control_path" in problem.hint


def test_our_own_words_stand_without_quotes(tmp_path: Path) -> None:
    assert only_problem(tmp_path, model={"arch": None}).found == "no arch, which means Stable Diffusion 1.5"
    found = problems(tmp_path, job(trigger_word="${NOT_SET_ANYWHERE}"))
    assert found["${NOT_SET_ANYWHERE}"].found == "an unset variable"


def test_a_reference_that_is_no_path_is_named_where_it_stands(tmp_path: Path) -> None:
    samples = {"prompts": None, "samples": [{"prompt": "p", "ctrl_img_1": "a.png", "ctrl_img_2": 7}]}
    document = job(model=QWEN_EDIT, datasets=dataset(control_path="/a"), sample=samples)
    assert list(problems(tmp_path, document)) == ["sample.samples[0].ctrl_img_2"]


@pytest.mark.parametrize(
    "keys",
    [
        {"lora_path": "x.safetensors"},
        {"refiner_name_or_path": "owner/refiner"},
        {"unet_path": "x"},
        {"use_text_encoder_2": False},
        {"attn_masking": True},
        {"use_flux_cfg": True},
        {"split_model_over_gpus": True},
        {"vae_dtype": "fp32"},
        {"model_paths": {"vae": "x"}},
    ],
)
def test_what_changes_the_model_is_rejected_by_name(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert only_problem(tmp_path, model=keys).key == f"config.process[0].model.{next(iter(keys))}"


@pytest.mark.parametrize(
    "keys",
    [
        {"assistant_lora_path": None, "quantize": False, "text_encoder_bits": 16, "use_text_encoder_1": True},
        {"vae_dtype": "bfloat16", "te_dtype": "bf16", "dtype": "float16"},
        {"model_paths": {}, "low_vram": True, "layer_offloading": True, "quantize_kwargs": {"exclude": ["*"]}},
    ],
)
def test_defaults_written_out_ask_for_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert read(tmp_path, model=keys).config == read(tmp_path).config


@pytest.mark.parametrize(
    ("keys", "compile_mode"),
    [
        ({}, "auto"),
        ({"compile": True}, "on"),
        ({"compile": False}, "off"),
        ({"compile": False, "block_compile": True}, "on"),
    ],
)
def test_compile(tmp_path: Path, keys: dict[str, bool], compile_mode: str) -> None:
    assert read(tmp_path, model=keys).config.training.compile == compile_mode


def test_v_prediction(tmp_path: Path) -> None:
    config = read(tmp_path, model={**SDXL, "is_v_pred": True}, train={"noise_scheduler": "ddpm"}).config
    assert config.objective.prediction == "v_prediction"


def test_layers_of_the_model_matter_only_without_an_adapter(tmp_path: Path) -> None:
    assert read(tmp_path, model={"only_if_contains": ["blocks.0."]}).config.adapter.targets == ()
    problem = only_problem(tmp_path, network=None, model={"only_if_contains": ["blocks.0."]})
    assert problem.key == "config.process[0].model.only_if_contains"

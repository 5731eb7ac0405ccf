"""Which model and which adapter a SimpleTuner config means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config import load
from gracetune.config.dialects.simpletuner.model import OTHER_FAMILIES
from gracetune.config.families import FAMILIES, find_flavour
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from unit.config.simpletuner_files import DATASETS, EMPTY, GOOD, IMAGES, LYCORIS, problems, resolve, write

SDXL = {"model_family": "sdxl", "model_flavour": "base-1.0"}
FLUX = {"model_family": "flux", "model_flavour": "dev"}


def config(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    return resolve(folder, changes, **options).config


@pytest.mark.parametrize("family", sorted(OTHER_FAMILIES))
def test_a_family_we_do_not_train_is_one_problem(tmp_path: Path, family: str) -> None:
    found = problems(tmp_path, {"model_family": family, "controlnet": True, "train_batch_size": "x", "optimizer": ...})
    assert list(found) == ["model_family"]


def test_a_misspelt_family_hides_nothing(tmp_path: Path) -> None:
    found = problems(tmp_path, {"model_family": "wann", "train_batch_size": "x"})
    assert found["model_family"].hint == "write `wan`"
    assert "train_batch_size" in found


@pytest.mark.parametrize(
    ("family", "theirs", "ours", "experts"),
    [
        ("wan", "t2v-480p-1.3b-2.1", "t2v-1.3b-2.1", "both"),
        ("wan", "t2v-480p-14b-2.1", "t2v-14b-2.1", "both"),
        ("wan", "i2v-14b-2.1", "i2v-14b-480p-2.1", "both"),
        ("wan", "i2v-14b-2.1-720p", "i2v-14b-720p-2.1", "both"),
        ("wan", "ti2v-5b-2.2", "ti2v-5b-2.2", "both"),
        ("wan", "i2v-14b-2.2-high", "i2v-14b-2.2", "high"),
        ("wan", "i2v-14b-2.2-low", "i2v-14b-2.2", "low"),
        ("wan", "t2v-14b-2.2", "t2v-14b-2.2", "both"),
        ("wan", "t2v-14b-2.2-low", "t2v-14b-2.2", "low"),
        ("qwen_image", "v1.0", "t2i", "both"),
        ("qwen_image", "v2.0", "t2i-2512", "both"),
        ("qwen_image", "edit-v1", "edit", "both"),
        ("qwen_image", "edit-v2+", "edit-2509", "both"),
        ("qwen_image", "edit-v3", "edit-2511", "both"),
        ("flux", "dev", "dev", "both"),
        ("flux", "kontext", "kontext", "both"),
        ("flux2", "dev", "dev", "both"),
        ("flux2", "klein-9b", "klein-base-9b", "both"),
        ("flux2", None, "klein-base-9b", "both"),
        ("flux2", "klein-4b", "klein-base-4b", "both"),
        ("z_image", "base", "base", "both"),
        ("z_image", "turbo", "turbo", "both"),
        ("z_image", "turbo-ostris-v2", "turbo", "both"),
        ("krea2", "raw", "raw", "both"),
        ("sdxl", "base-1.0", "base-1.0", "both"),
        ("stable_audio", "open-1.0", "open-1.0", "both"),
    ],
)
def test_flavours(tmp_path: Path, family: str, theirs: str, ours: str, experts: str) -> None:
    kind = "audio" if family == "stable_audio" else "image"
    sources = {**IMAGES[0], "id": "sources", "dataset_type": "conditioning", "conditioning_type": "reference_strict"}
    datasets = [{**IMAGES[0], "dataset_type": kind, "conditioning_data": "sources"}, sources]
    model = config(tmp_path, {"model_family": family, "model_flavour": theirs}, datasets=datasets).model
    assert (model.flavour, model.experts) == (ours, experts)
    assert find_flavour(family, ours) is not None


@pytest.mark.parametrize(
    ("family", "flavour"),
    [("wan", "vace-14b-2.1"), ("wan", "flf2v-14b-2.1"), ("qwen_image", "v2.1"), ("flux", "fluxbooru"),
     ("z_image", "ostris-de-turbo"),
     ("sdxl", "refiner-1.0"), ("wan", "no such one"), ("wan", 3), ("sdxl", "base-1.0-high")],
)  # fmt: skip
def test_flavours_we_lack(tmp_path: Path, family: str, flavour: Any) -> None:
    found = problems(tmp_path, {"model_family": family, "model_flavour": flavour}, datasets=IMAGES)
    assert list(found) == ["model_flavour"]


SCHNELL = {"model_family": "flux", "model_flavour": "schnell"}
TURBO = {"model_family": "z_image", "model_flavour": "turbo"}
TURBO_ASSISTANT = "hf://ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_{}.safetensors"


@pytest.mark.parametrize(
    ("changes", "assistant"),
    [
        (SCHNELL, "ostris/FLUX.1-schnell-training-adapter"),
        ({**SCHNELL, "assistant_lora_path": "owner/lora", "assistant_lora_strength": "1.0"}, "owner/lora"),
        ({**SCHNELL, "disable_assistant_lora": True, "assistant_lora_path": "owner/lora"}, None),
        ({**SCHNELL, "model_type": "full"}, None),
        ({"model_family": "flux", "model_flavour": "dev", "assistant_lora_path": "owner/lora"}, None),
        (TURBO, TURBO_ASSISTANT.format("v1")),
        ({**TURBO, "model_flavour": "turbo-ostris-v2"}, TURBO_ASSISTANT.format("v2")),
        ({**TURBO, "model_flavour": ...}, TURBO_ASSISTANT.format("v2")),
        ({**TURBO, "model_flavour": ..., "pretrained_model_name_or_path": "Tongyi-MAI/Z-Image"}, None),
        ({**TURBO, "assistant_lora_path": "owner/lora"}, "owner/lora"),
    ],
)
def test_distilled_flavours_are_trained_under_their_assistant(
    tmp_path: Path, changes: dict[str, Any], assistant: str | None
) -> None:  # fmt: skip
    resolved = resolve(tmp_path, changes, datasets=IMAGES)
    assert resolved.config.model.assistant_adapter == assistant
    unused = [note for note in resolved.notes if "without effect" in note and "assistant_lora_path" in note]
    assert bool(unused) == (assistant is None and "assistant_lora_path" in changes)


@pytest.mark.parametrize("changes", [{"disable_assistant_lora": True}, {"model_type": "full"}])
def test_z_images_turbo_is_not_trained_directly(tmp_path: Path, changes: dict[str, Any]) -> None:
    [problem] = problems(tmp_path, {**TURBO, **changes}, datasets=IMAGES).values()
    assert "distilled" in problem.found


def test_the_strength_of_an_assistant_is_fixed(tmp_path: Path) -> None:
    keys = {"assistant_lora_strength": 0.5, "assistant_lora_inference_strength": 1}
    assert set(problems(tmp_path, {**SCHNELL, **keys}, datasets=IMAGES)) == set(keys)


@pytest.mark.parametrize(
    ("family", "flavour"), [("wan", "t2v-1.3b-2.1"), ("flux", "krea"), ("krea2", "raw"), ("sdxl", "base-1.0")]
)
def test_default_flavours_are_simpletuners(tmp_path: Path, family: str, flavour: str) -> None:
    resolved = resolve(tmp_path, {"model_family": family, "model_flavour": ...}, datasets=IMAGES)
    assert resolved.config.model.flavour == flavour
    assert resolved.origins["model", "flavour"].location == "SimpleTuner"


def test_a_default_flavour_we_lack_has_to_be_chosen(tmp_path: Path) -> None:
    found = problems(tmp_path, {"model_family": "qwen_image", "model_flavour": ...}, datasets=IMAGES)
    assert "v1.0" in found["model_flavour"].hint


def test_published_weights_give_the_flavour_away(tmp_path: Path) -> None:
    changes = {"model_flavour": ..., "pretrained_model_name_or_path": "wan-ai/wan2.2-t2v-a14b-diffusers"}
    model = config(tmp_path, changes).model
    assert (model.flavour, model.path) == ("t2v-14b-2.2", "wan-ai/wan2.2-t2v-a14b-diffusers")
    other = config(tmp_path, {"model_flavour": ..., "pretrained_model_name_or_path": "/weights"}).model
    assert (other.flavour, other.path) == (None, "/weights")


def test_one_expert_is_trained_at_simpletuners_shift(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"model_flavour": "i2v-14b-2.2-high", "flow_schedule_shift": 2})
    assert resolved.config.objective.flow_shift == 5
    assert any(note.startswith("flow_schedule_shift") for note in resolved.notes)
    assert any("transformer_2" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("changes", "base", "mixed"),
    [
        ({}, "bf16", "bf16"),
        ({"mixed_precision": "no"}, "fp32", "fp32"),
        ({"mixed_precision": "fp16"}, "fp16", "fp16"),
        ({"base_model_precision": "no_change"}, "bf16", "bf16"),
        ({"base_model_precision": "fp8-torchao"}, "fp8", "bf16"),
        ({"base_model_precision": "fp32", "mixed_precision": "bf16"}, "fp32", "bf16"),
        ({"base_model_precision": "fp8-sdnq"}, "fp8", "bf16"),
        ({"base_model_precision": "int16-sdnq"}, "bf16", "bf16"),
        ({"base_model_precision": "uint16-sdnq", "mixed_precision": "fp16"}, "fp16", "fp16"),
        ({"base_model_precision": "int8-quanto", "mixed_precision": "fp16"}, "auto", "fp16"),
    ],
)
def test_precision(tmp_path: Path, changes: dict[str, Any], base: str, mixed: str) -> None:
    found = config(tmp_path, changes)
    assert (found.model.base_precision, found.training.mixed_precision) == (base, mixed)


@pytest.mark.parametrize("value", ["int8-quanto", "int2-quanto", "int4-torchao", "nf4-bnb", "fp8-int4-torchao"])
def test_the_plan_decides_what_few_bits_become(tmp_path: Path, value: str) -> None:
    resolved = resolve(tmp_path, {"base_model_precision": value})
    assert resolved.config.model.base_precision == "auto"
    (note,) = [note for note in resolved.notes if note.startswith("base_model_precision")]
    assert f"{value} is requested; decided by the memory plan when the run starts" in note


@pytest.mark.parametrize(("value", "hint"), [(8, "no_change"), ("int8-quantoo", "int8-quanto")])
def test_a_precision_nobody_knows(tmp_path: Path, value: Any, hint: str) -> None:
    (problem,) = problems(tmp_path, {"base_model_precision": value}).values()
    assert problem.key == "base_model_precision"
    assert hint in problem.hint


def test_a_full_fine_tune_keeps_its_weights_whole(tmp_path: Path) -> None:
    assert config(tmp_path, {"model_type": "full"}).adapter.kind == "full_finetune"
    for value in ("fp8-torchao", "int8-quanto"):
        found = problems(tmp_path, {"model_type": "full", "base_model_precision": value})
        assert list(found) == ["base_model_precision"]


def test_the_vae_of_sdxl(tmp_path: Path) -> None:
    assert config(tmp_path, SDXL, datasets=IMAGES).model.vae_path == "madebyollin/sdxl-vae-fp16-fix"
    resolved = resolve(tmp_path, {"pretrained_vae_model_name_or_path": "someone/sdxl-vae-fp16"})
    assert resolved.config.model.vae_path is None
    assert any("SDXL VAE" in note for note in resolved.notes)


def test_repeating_the_weights_as_parts_changes_nothing(tmp_path: Path) -> None:
    weights = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
    names = ("pretrained_model_name_or_path", "pretrained_vae_model_name_or_path",
             "pretrained_transformer_model_name_or_path")  # fmt: skip
    model = config(tmp_path, dict.fromkeys(names, weights)).model
    assert (model.path, model.vae_path) == (weights, None)


def test_all_our_families_are_open_to_this_dialect() -> None:
    assert not OTHER_FAMILIES & set(FAMILIES)


def test_lora_as_simpletuner_trains_it(tmp_path: Path) -> None:
    adapter = config(tmp_path, {"lora_rank": 8, "lora_alpha": 4}).adapter
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 8, 4, 0.1)
    assert adapter.targets == ("to_k", "to_q", "to_v", "to_out.0")
    assert config(tmp_path, {"use_dora": True, "lora_dropout": 0}).adapter.kind == "dora"
    assert config(tmp_path).checkpoints.format == "diffusers"
    assert config(tmp_path, {"lora_format": "comfyui"}).checkpoints.format == "comfyui"


@pytest.mark.parametrize(("name", "present", "absent"), [
    (None, "add_k_proj", "proj_mlp"), ("context", "to_add_out", "to_k"), ("all+ffs", "proj_mlp", "x_embedder"),
    ("tiny", "single_transformer_blocks.20.proj_out", "to_k"), ("ai-toolkit", "norm1.linear", "x_embedder"),
])  # fmt: skip
def test_flux_targets(tmp_path: Path, name: str | None, present: str, absent: str) -> None:
    targets = config(tmp_path, {**FLUX, "flux_lora_target": name}, datasets=IMAGES).adapter.targets
    assert present in targets
    assert absent not in targets


def test_named_targets(tmp_path: Path) -> None:
    write(tmp_path, "targets.json", ["attn2.to_q"])
    for value in (["attn2.to_q"], '["attn2.to_q"]', "targets.json"):
        assert config(tmp_path, {"peft_lora_target_modules": value}).adapter.targets == ("attn2.to_q",)


def lycoris(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    data = {key: value for key, value in {**LYCORIS, **changes}.items() if value is not ...}
    write(folder, "lycoris.json", data)
    return {"lora_type": "lycoris", "lycoris_config": "lycoris.json"}


def test_a_lycoris_file(tmp_path: Path) -> None:
    preset = {**LYCORIS["apply_preset"], "exclude_name": ["*.embed"], "target_name": ["proj_in"]}
    changes = {"dropout": 0.1, "decompose_both": True, "multiplier": 0.5, "apply_preset": preset, "bypass_mode": True}
    found = config(tmp_path, lycoris(tmp_path, changes))
    assert found.adapter.model_dump(exclude_defaults=True) == {
        "kind": "lokr", "alpha": 8.0, "factor": 4, "dropout": 0.1, "decompose_both": True, "strength": 0.5,
        "targets": ("Attention", "proj_in"), "exclude": ("*.embed",), "by_module": {"Attention": {"factor": 4}},
    }  # fmt: skip
    assert (found.checkpoints.format, found.checkpoints.for_program) == ("lycoris", "lycoris")
    # Files of another format are for all programs that it is for.
    chosen = config(tmp_path, lycoris(tmp_path, changes), overrides=["checkpoints.format=comfyui"])
    assert (chosen.checkpoints.format, chosen.checkpoints.for_program) == ("comfyui", None)
    both = ["checkpoints.format=kohya", "checkpoints.for_program=musubi"]
    named = config(tmp_path, lycoris(tmp_path, changes), overrides=both)
    assert (named.checkpoints.format, named.checkpoints.for_program) == ("kohya", "musubi")


@pytest.mark.parametrize(
    ("changes", "kind", "full"),
    [
        ({"algo": "lora"}, "locon", False),
        ({"algo": "loha"}, "loha", False),
        ({"algo": "diag-oft"}, "diag_oft", False),
        ({"algo": "ia3", "linear_dim": None, "linear_alpha": None}, "ia3", False),
        ({"algo": "full"}, "full_delta", False),
        ({"algo": "lora", "dora_wd": True}, "dora", False),
        ({"full_matrix": True, "linear_dim": ...}, "lokr", True),
        ({"linear_dim": 10000}, "lokr", True),
        ({"linear_dim": 64}, "lokr", False),
    ],
)
def test_lycoris_algorithms(tmp_path: Path, changes: dict[str, Any], kind: str, full: bool) -> None:
    adapter = config(tmp_path, lycoris(tmp_path, changes)).adapter
    assert (adapter.kind, adapter.full_rank) == (kind, full)


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"linear_dimm": 4}, "linear_dimm", "linear_dim"),
        ({"algo": "dylora"}, "algo", "choose"),
        ({"algo": ...}, "algo", "lokr"),
        ({"use_tucker": True}, "use_tucker", "--allow-unsupported"),
        ({"dora_wd": True}, "dora_wd", "--allow-unsupported"),
        ({"algo": "lora", "dora_wd": True, "wd_on_output": False}, "wd_on_output", "--allow-unsupported"),
        ({"linear_dim": "wide"}, "linear_dim", "linear_dim"),
        ({"apply_preset": ...}, "apply_preset", "target_module"),
        ({"apply_preset": {"exclude_name": ["*.embed"]}}, "apply_preset", "target_module"),
        ({"apply_preset": {"target_modul": []}}, "apply_preset.target_modul", "target_module"),
        ({"apply_preset": {"target_module": ["A"], "module_algo_map": {"A": {"fctor": 2}}}},
         "apply_preset.module_algo_map.A.fctor", "factor"),
    ],
)  # fmt: skip
def test_mistakes_in_a_lycoris_file(tmp_path: Path, changes: dict[str, Any], key: str, hint: str) -> None:
    found = problems(tmp_path, lycoris(tmp_path, changes))
    assert list(found) == [key]
    assert hint in found[key].hint
    assert found[key].file == str(tmp_path / "lycoris.json")


def test_a_lycoris_file_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in problems(tmp_path, {"lora_type": "lycoris"})["lycoris_config"].expected


def test_sidecars_are_found_from_the_working_folder_and_from_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "config" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "config", "datasets.json", DATASETS)
    path = write(folder, "config.json", {**GOOD, "data_backend_config": "config/datasets.json"})
    assert load(path, environment=EMPTY).config.datasets[0].id == "clips"
    monkeypatch.chdir("/")
    assert load(path, environment=EMPTY).config.datasets[0].id == "clips"
    copied = write(folder, "config.json", {**GOOD, "data_backend_config": "config/examples/mine/list.json"})
    write(folder, "list.json", DATASETS)
    assert load(copied, environment=EMPTY).config.datasets[0].id == "clips"


def test_a_broken_sidecar_is_reported_next_to_everything_else(tmp_path: Path) -> None:
    write(tmp_path, "datasets.json", "[{]")
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "config.json", {**GOOD, "train_batch_size": "x"}), environment=EMPTY)
    assert {problem.key for problem in caught.value.problems} == {"line 1, column 3", "train_batch_size"}

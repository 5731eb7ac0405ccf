"""Train every family from a config to an adapter that fits. Everyday tests cover one kind of adapter for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.statistics import norms
from gracetune.errors import ConfigError
from gracetune.train.view import CollectingView
from runs.golden import FILE, SECTIONS
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_resume import losses

EVERYDAY = {("wan", "lora"), ("sdxl", "lora"), ("flux", "lora"), ("qwen_image", "lora"), ("z_image", "lora"),
            ("flux2", "lora"), ("krea2", "lora"), ("stable_audio", "lora")}  # fmt: skip
FAMILIES = ("wan", "sdxl", "flux", "qwen_image", "flux2", "z_image", "krea2", "stable_audio")
KINDS = ("lora", "lokr")
CASES = [
    pytest.param(family, kind, marks=[] if (family, kind) in EVERYDAY else pytest.mark.full)
    for family in FAMILIES
    for kind in KINDS
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_family_is_trained_and_its_adapter_fits(
    family: str, kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    format = "lycoris" if kind == "lokr" else "comfyui"
    config = config_for(
        family,
        tiny_model,
        tmp_path,
        adapter={"kind": kind, "rank": 4},
        checkpoints={"format": format, "save_dtype": "fp32"},
        **SECTIONS,
    )
    view = CollectingView()
    result = run(config, view)
    assert result.step == 3
    judged = "fewer than 3 steps" if family == "wan" else "the adapter changes the output by "  # its experts have two
    assert [line for line in view.lines if line.startswith(f"self-check: {judged}")], view.lines
    assert not [text for text in view.warnings if "self-check" in text]
    if kind == "lora":
        stored = json.loads(FILE.read_text())
        assert [loss for _, _, loss, _ in losses(config)] == pytest.approx(stored["losses"][family], rel=1e-4)
    experts = ["high_noise", "low_noise"] if family == "wan" else [""]
    states = [open_adapter(path, family).state() for path in result.files]
    assert [state.expert for state in states] == experts
    for state in states:
        assert norms(state).largest > 0, "something was learned"
    assert (Path(config.output_dir) / "report.html").is_file()
    assert (Path(config.output_dir) / "samples").is_dir()


@pytest.mark.full
@pytest.mark.parametrize("family", ["wan", "qwen_image", "flux2", "z_image", "krea2", "stable_audio"])
def test_a_full_finetune_of_the_other_families_is_saved_as_it_was_trained(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"training": {"max_steps": 4}, "checkpoints": {"save_dtype": "fp32"}}
    config = config_for(family, tiny_model, tmp_path, adapter={"kind": "full_finetune"}, **sections)
    view = CollectingView()
    folders = run(config, view).files
    assert len(folders) == (2 if family == "wan" else 1)
    assert [line for line in view.lines if "tensors read back from the saved file" in line]
    assert all(load_file(folder / "diffusion_pytorch_model.safetensors") for folder in folders)


def test_a_full_finetune_leaves_a_model_folder_diffusers_can_load(tiny_model: TinyModel, tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel

    config = config_for(
        "flux", tiny_model, tmp_path, adapter={"kind": "full_finetune"}, training={"max_steps": 3},
        checkpoints={"save_dtype": "fp32"},
    )  # fmt: skip
    view = CollectingView()
    (folder,) = run(config, view).files
    (line,) = [line for line in view.lines if line.startswith("self-check: the weights have changed in ")]
    assert "tensors read back from the saved file are the trained ones (difference 0.0e+00)" in line
    loaded = FluxTransformer2DModel.from_pretrained(folder)
    before = load_file(tiny_model("flux", "dev") / "transformer" / "diffusion_pytorch_model.safetensors")
    changed = [name for name, value in loaded.state_dict().items() if not torch.equal(value, before[name])]
    assert len(changed) > len(before) / 2


def test_an_adapter_the_files_format_cannot_hold_is_rejected_before_the_first_step(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = config_for("stable_audio", tiny_model, tmp_path, adapter={"kind": "lokr", "rank": 4})
    with pytest.raises(ConfigError, match=r"checkpoints\.format") as error:
        run(config)
    assert "--set checkpoints.format=" in error.value.problems[0].hint
    assert not list((tmp_path / "out").glob("checkpoints/checkpoint-*"))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_half_precision_runs(precision: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"training": {"max_steps": 2, "mixed_precision": precision}}
    config = config_for("flux", tiny_model, tmp_path, model={"base_precision": precision}, **sections)
    assert run(config).step == 2
    mixed = config_for("flux", tiny_model, tmp_path / "mixed", model={"base_precision": "bf16"}, **sections)
    if precision == "fp16":
        with pytest.raises(ConfigError, match="base weights that compute in bf16"):
            run(mixed)


@pytest.mark.full
def test_a_datasets_own_strength_holds_where_blocks_are_repeated_in_the_backward_pass(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    data = {"id": "weak", "path": str(images(tmp_path / "weak")), "resolution": 64.0, "adapter_strength": 0.5}
    found = []
    for requested in ("off", "full"):
        training = {"max_steps": 3, "gradient_checkpointing": requested}
        config = config_for("flux", tiny_model, tmp_path / requested, datasets=[data], training=training)
        run(config)
        found.append(losses(config))
    for kept, repeated in zip(*found, strict=True):
        assert kept[2:] == pytest.approx(repeated[2:], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_regularisation_data_draws_an_adapter_back_to_its_base(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """A new adapter has a loss of 0 on such data; after training on other data it does not. Blocks are checkpointed."""
    prior = {"id": "prior", "path": str(images(tmp_path / "prior")), "resolution": 64.0, "regularisation": True}
    other = {"id": "other", "path": str(images(tmp_path / "other")), "resolution": 64.0, "end_step": 2}
    sections: dict[str, Any] = {
        "adapter": {"kind": kind, "rank": 4}, "training": {"max_steps": 4, "gradient_checkpointing": "full"},
        "checkpoints": {"format": "lycoris" if kind == "lokr" else "diffusers"}, "optimizer": {"lr": 1e-2},
    }  # fmt: skip
    alone = config_for("wan", tiny_model, tmp_path / "alone", datasets=[prior], **sections)
    run(alone)
    assert [loss for _, _, loss, _ in losses(alone)] == pytest.approx([0.0] * 4, abs=1e-6)
    after = config_for("wan", tiny_model, tmp_path / "after", datasets=[{**prior, "start_step": 2}, other], **sections)
    run(after)
    found = [loss for _, _, loss, _ in losses(after)]
    assert all(0 < late < early for late, early in zip(found[2:], found[:2], strict=True))


def test_samples_that_look_different_at_every_visit_are_encoded_in_the_step(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    data = {"id": "live", "path": str(images(tmp_path / "live")), "resolution": 64.0, "cache_latents": "none"}
    config = config_for("flux", tiny_model, tmp_path, datasets=[data], training={"max_steps": 2})
    assert run(config).step == 2


def test_entries_are_drawn_anew_for_each_epoch(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Six epochs of two batches. Entries of past epochs are removed from the cache."""
    data = {
        "id": "crops", "path": str(images(tmp_path / "crops", 2, 96)), "resolution": 64.0,
        "crop": {"enabled": True, "style": "random"}, "augmentation": {"cache_mode": "refresh_each_epoch"},
    }  # fmt: skip
    config = config_for("flux", tiny_model, tmp_path, datasets=[data], training={"max_steps": None, "epochs": 3})
    view = CollectingView()
    result = run(config, view)
    assert (result.step, result.steps) == (6, 6)
    left = sorted(path.name for path in (tmp_path / "out" / "cache" / "epochs").iterdir())
    assert left in (["2"], ["2", "3"])


def test_an_adapter_can_start_from_another_ones_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    first = run(config_for("wan", tiny_model, tmp_path / "first", training={"max_steps": 2}, optimizer={"lr": 1e-2}))
    config = config_for(
        "wan", tiny_model, tmp_path / "second", training={"max_steps": 1}, optimizer={"lr": 0.0},
        adapter={"init_from": str(first.files[0])},
    )  # fmt: skip
    second = run(config)
    for before, after in zip(first.files, second.files, strict=True):
        one, two = load_file(before), load_file(after)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("refreshed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_cache_that_is_not_to_stay_is_gone_at_the_end(refreshed: bool, tiny_model: TinyModel, tmp_path: Path) -> None:
    data = {
        "id": "crops", "path": str(images(tmp_path / "crops", 2, 96)), "resolution": 64.0,
        "crop": {"enabled": True, "style": "random"},
        "augmentation": {"cache_mode": "refresh_each_epoch" if refreshed else "static"},
    }  # fmt: skip
    sections: dict[str, Any] = {"cache": {"persistent_cache": False}, "training": {"max_steps": 3}}
    view = CollectingView()
    run(config_for("flux", tiny_model, tmp_path, datasets=[data], **sections), view)
    assert any("entries of this run removed" in line for line in view.lines)
    left = [path for path in (tmp_path / "out" / "cache").rglob("*.safetensors") if "shards" in path.parts]
    assert left == []

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gracetune.config.run_config import RunConfig
from gracetune.train.view import CollectingView
from runs.launched import launch, write_config
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_resume import losses, states

STEPS = 3
SECTIONS: dict[str, Any] = {"training": {"max_steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2}}
FULL = {"adapter": {"kind": "full_finetune"}, "optimizer": {"lr": 1e-5}}
LOKR: dict[str, Any] = {
    "adapter": {"kind": "lokr", "rank": 4},
    "optimizer": {"name": "automagic"},
    "training": {**SECTIONS["training"], "ema": {"enabled": True, "decay": 0.9}},
    "validation": {"at_start": True, "steps": 2, "width": 64, "height": 64, "prompts": [{"prompt": "a"}]},
}
NAMES = ("small", "large")
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
Run = tuple[RunConfig, dict[str, str], int | None]


def half(config: RunConfig, folder: Path) -> RunConfig:
    """The same steps, divided over two processes."""
    training = config.training.model_copy(update={"batch_size": 1})
    return config.model_copy(update={"training": training, "output_dir": str(folder)})


def run_two(runs: list[Run], folder: Path) -> str:
    """Run all configs in two processes. Return the output of the first one."""
    jobs = [
        (str(write_config(config, folder / f"{number}.yaml")), variables, stop_after)
        for number, (config, variables, stop_after) in enumerate(runs)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ended = launch(folder / "jobs.json", 2)
    for code, _, errors in ended:
        assert code == 0, errors
    return ended[0][1]


def assert_close(ours: RunConfig, theirs: RunConfig, step: int = STEPS) -> None:
    for mine, other in zip(losses(ours), losses(theirs), strict=True):
        assert mine[:2] == other[:2]
        assert mine[2:] == pytest.approx(other[2:], rel=2e-5)
    one, two = states(ours, step)["parameters.safetensors"], states(theirs, step)["parameters.safetensors"]
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-6)


@pytest.mark.full
def test_two_processes_learn_what_one_learns(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As replicas and with a sharded model (FSDP2). The sharded run is interrupted and resumed.

    Two datasets name one folder: it is staged once, by the first process, for both datasets and both processes.
    """
    staged = {"type": "in_memory", "path": str(images(tmp_path / "data"))}
    datasets = [{**staged, "id": name, "resolution": 64.0, "repeats": number} for number, name in enumerate(NAMES)]
    alone = config_for("wan", tiny_model, tmp_path, datasets=datasets, **SECTIONS)
    run(alone)
    replicas, sharded, parted = (half(alone, tmp_path / name) for name in ("replicas", "sharded", "parted"))
    stated = run_two([(replicas, {}, None), (sharded, FSDP, None), (parted, FSDP, 2), (parted, FSDP, None)], tmp_path)
    assert stated.count("spread over 2 processes") == 3
    # The plan is made for both: what each of them holds, and what this machine holds for the two.
    assert stated.count("2 processes: DDP, each holds a whole copy") == 1
    assert stated.count("2 processes: FSDP2, each holds 1/2 of the weights") == 3
    assert stated.count("Python, torch, CUDA; 2 processes, 4.00 GiB each") == 4
    assert stated.count(f"datasets small, large share {tmp_path / 'data'}: it is staged once") == 4
    assert stated.count("small: 8 files") == 4
    assert "large: 8 files" not in stated
    for config in (replicas, sharded, parted):
        assert_close(config, alone)
    assert losses(parted) == losses(sharded)


@pytest.mark.full
def test_a_file_that_turns_out_to_be_damaged_is_left_out_by_both(tiny_model: TinyModel, tmp_path: Path) -> None:
    """One process decodes it in the middle of an epoch. The steps stay those of a single process."""
    folder = images(tmp_path / "data", 6)
    whole = (folder / "03.png").read_bytes()
    (folder / "03.png").write_bytes(whole[:200] + bytes(100) + whole[300:])  # its header is sound
    for number in range(6):
        (folder / f"{number:02}.txt").write_text(f"a long caption, number {number}, " * 30)
    data = {"id": "live", "path": str(folder), "resolution": 64.0, "cache_latents": "none", "corrupt_threshold": 0.5}
    training = {"max_steps": 4, "batch_size": 2}
    alone = config_for("flux", tiny_model, tmp_path, datasets=[data], training=training)
    view = CollectingView()
    run(alone, view)
    assert [text for text in view.warnings if "03.png" in text]
    shared = half(alone, tmp_path / "shared")
    stated = run_two([(shared, {}, None)], tmp_path)
    assert "left out, unreadable: 03.png of live" in stated
    assert re.search(r"captions longer than 77 tokens, .*: 6 samples: ", stated), "whichever process encoded them"
    assert_close(shared, alone, 4)


@pytest.mark.full
@pytest.mark.parametrize("sections", [pytest.param(FULL, id="full-finetune"), pytest.param(LOKR, id="lokr-automagic")])
def test_sharded_runs_of_other_kinds_learn_what_one_process_learns(
    sections: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    alone = config_for("wan", tiny_model, tmp_path, **{**SECTIONS, **sections})
    run(alone)
    sharded, parted = half(alone, tmp_path / "sharded"), half(alone, tmp_path / "parted")
    run_two([(sharded, FSDP, None), (parted, FSDP, 1), (parted, FSDP, None)], tmp_path)
    assert_close(sharded, alone)
    assert_close(parted, alone)
    if "validation" in sections:
        ema, ours = (states(config, STEPS)["ema.safetensors"] for config in (alone, parted))
        for name in ema:
            torch.testing.assert_close(ours[name], ema[name], rtol=1e-3, atol=1e-6)
        assert len(list((tmp_path / "sharded" / "samples").glob("*.png"))) == 1


@pytest.mark.full
def test_two_processes_write_the_dora_files_of_one_and_leave_out_what_one_of_them_cannot_read(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Magnitudes for ComfyUI need sharded base weights, and half of the data has the base model's target.
    There is one expert, so that it gets the three steps after which the self-check runs."""
    folder = images(tmp_path / "others", 5)
    whole = (folder / "03.png").read_bytes()
    (folder / "03.png").write_bytes(whole[:200] + bytes(100) + whole[300:])  # its header is sound
    others = {
        "id": "others", "path": str(folder), "resolution": 64.0, "regularisation": True, "corrupt_threshold": 0.5,
    }  # fmt: skip
    own = {"id": "own", "path": str(images(tmp_path / "own", 4)), "resolution": 64.0}
    dora = {"adapter": {"kind": "dora", "rank": 2}, "checkpoints": {"every_steps": None, "format": "comfyui"}}
    model = {"experts": "high"}
    alone = config_for("wan", tiny_model, tmp_path, datasets=[others, own], model=model, **{**SECTIONS, **dora})
    run(alone)
    replicas, sharded = half(alone, tmp_path / "replicas"), half(alone, tmp_path / "sharded")
    stated = run_two([(replicas, {}, None), (sharded, FSDP, None)], tmp_path)
    assert stated.count("left out, unreadable: 03.png of others") == 2
    proven = [line for line in stated.splitlines() if line.startswith("self-check: the adapter changes the output by")]
    assert len(proven) == 2, stated
    assert all("the saved file reproduces it" in line for line in proven)
    for config in (replicas, sharded):
        assert_close(config, alone)
        one, two = (load_file(Path(each.output_dir) / "tiny_high_noise.safetensors") for each in (alone, config))
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(one[name], two[name], rtol=1e-2, atol=1e-4)


@pytest.mark.full
def test_gradients_that_are_no_numbers_end_both_processes_at_the_state_before(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    good = {"id": "good", "path": str(images(tmp_path / "good")), "resolution": 64.0, "end_step": 2}
    bad = {
        "id": "bad", "path": str(images(tmp_path / "bad", 2)), "resolution": 64.0, "start_step": 2,
        "loss_weight": 1e38,
    }  # fmt: skip
    training = {"max_steps": 5, "batch_size": 2}
    alone = config_for("wan", tiny_model, tmp_path, datasets=[good, bad], training=training)
    run(alone)
    replicas, sharded = (half(alone, tmp_path / name) for name in ("replicas", "sharded"))
    run_two([(replicas, {}, None), (sharded, FSDP, None)], tmp_path)
    for config in (alone, replicas, sharded):
        existing = [path.name for path in (Path(config.output_dir) / "checkpoints").glob("checkpoint-*")]
        assert existing == ["checkpoint-2"]
        one, two = (states(each, 2)["parameters.safetensors"] for each in (alone, config))
        for name in one:
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-6)
        ended = (Path(config.output_dir) / "logs" / "events.jsonl").read_text()
        assert "the gradients of step 3 are not finite" in ended


@pytest.mark.full
def test_entries_are_drawn_anew_for_each_epoch_by_both(tiny_model: TinyModel, tmp_path: Path) -> None:
    """They share the work and switch at the same batch, so two processes learn what one learns. No entries are left."""
    data = {
        "id": "crops", "path": str(images(tmp_path / "crops", 4, 96)), "resolution": 64.0,
        "crop": {"enabled": True, "style": "random"}, "augmentation": {"cache_mode": "refresh_each_epoch"},
    }  # fmt: skip
    sections: dict[str, Any] = {
        "datasets": [data],
        "training": {"max_steps": None, "epochs": 3, "batch_size": 2},
        "cache": {"persistent_cache": False, "vae_cache_type": "memory"},
        "optimizer": {"lr": 1e-4},
    }
    alone = config_for("flux", tiny_model, tmp_path, **sections)
    assert run(alone).step == 6
    shared = half(alone, tmp_path / "shared")
    stated = run_two([(shared, {}, None)], tmp_path)
    assert_close(shared, alone, 6)
    assert "entries of this run removed" in stated
    for config in (alone, shared):
        cache = Path(config.output_dir) / "cache"
        assert not list(cache.glob("epochs/*"))
        assert not [path for path in cache.rglob("*.safetensors") if "shards" in path.parts]

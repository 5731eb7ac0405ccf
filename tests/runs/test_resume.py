from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gracetune.checkpoint.errors import OtherRunError
from gracetune.checkpoint.manifest import MANIFEST, PART, read_manifest
from gracetune.config.run_config import RunConfig
from gracetune.data.loader import OtherDataError
from gracetune.telemetry.events import StepDone
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, changed, config_for, images, run

STEPS = 8
DUAL_EXPERT: dict[str, Any] = {
    "adapter": {"kind": "lokr", "rank": 4, "dropout": 0.1},
    "optimizer": {"name": "automagic", "lr": 1e-4},
    "training": {
        "max_steps": STEPS,
        "batch_size": 2,
        "ema": {"enabled": True, "decay": 0.9},
        "ramp": {
            "enabled": True,
            "initial_effective_batch_size": 1,
            "target_effective_batch_size": 4,
            "batch_rampup_steps": 6,
        },
    },
    "model": {"switch_experts_every": 2},
    "objective": {"noise_offset": 0.1, "noise_offset_probability": 0.5},
}
COSINE: dict[str, Any] = {
    "training": {"max_steps": STEPS, "gradient_accumulation_steps": 2, "batch_size": 1},
    "schedule": {"name": "cosine", "warmup_steps": 2},
}


class Interrupting(CollectingView):
    """Sends the process a signal after a step, as a user or a scheduler would."""

    def __init__(self, at: int, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.at, self.number = at, number

    def on_step(self, step: int, steps: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)


def losses(config: RunConfig) -> list[tuple[int, str, float, float | None]]:
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").merged()
    found = [record.event for record in records]
    return [(one.step, one.stage, one.loss, one.grad_norm) for one in found if isinstance(one, StepDone)]


def states(config: RunConfig, step: int) -> dict[str, dict[str, torch.Tensor]]:
    folder = Path(config.output_dir) / "checkpoints" / f"checkpoint-{step}"
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def assert_same_end(one: RunConfig, two: RunConfig, step: int = STEPS) -> None:
    ours, theirs = states(one, step), states(two, step)
    assert ours.keys() == theirs.keys()
    for file, tensors in ours.items():
        assert tensors.keys() == theirs[file].keys()
        different = [name for name in tensors if not torch.equal(tensors[name], theirs[file][name])]
        assert not different, f"{file}: {different}"
    for name in (path.name for path in Path(one.output_dir).glob("*.safetensors")):
        assert (Path(one.output_dir) / name).read_bytes() == (Path(two.output_dir) / name).read_bytes()


@pytest.mark.parametrize(
    ("family", "sections", "at"),
    [
        pytest.param("wan", DUAL_EXPERT, 3, id="dual-expert-lokr-ramp-automagic-ema"),
        pytest.param("flux", COSINE, 5, id="accumulation-cosine-adamw"),
        *(
            pytest.param("wan", DUAL_EXPERT, at, id=f"dual-expert-{at}", marks=pytest.mark.full)
            for at in (1, 2, 4, 5, 6, 7)
        ),
        *(pytest.param("sdxl", COSINE, at, id=f"cosine-{at}", marks=pytest.mark.full) for at in (1, 4)),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_interrupted(
    family: str, sections: dict[str, Any], at: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    whole = config_for(family, tiny_model, tmp_path / "whole", **sections)
    assert run(whole).stop is not None
    parted = config_for(family, tiny_model, tmp_path / "parted", **sections)
    first = run(parted, Interrupting(at))
    assert first.stop is not None
    assert (first.stop.kind, first.step, first.files) == ("interrupted", at, ())
    second = run(parted)
    assert second.stop is not None
    assert (second.stop.kind, second.step) == ("finished", STEPS)
    assert losses(parted) == losses(whole)
    assert_same_end(whole, parted)


def test_an_interrupted_run_leaves_weights_one_can_load(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("wan", tiny_model, tmp_path)
    run(config, Interrupting(2))
    names = sorted(path.name for path in Path(config.output_dir).glob("*.safetensors"))
    assert names == ["tiny_000000002_high_noise.safetensors", "tiny_000000002_low_noise.safetensors"]


def test_a_finished_run_can_be_made_longer(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Its first result outlives its checkpoint. For a run that is complete, nothing is loaded."""
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 2}, checkpoints={"keep_last": 1})
    first = run(config).files[0].read_bytes()
    longer = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 3})})
    result = run(longer)
    assert result.step == 3
    names = sorted(path.name for path in Path(config.output_dir).glob("*.safetensors"))
    assert names == ["finished-tiny_000000002.safetensors", "tiny.safetensors"]
    assert (Path(config.output_dir) / names[0]).read_bytes() == first
    again = run(longer)
    assert (again.step, again.files, again.first_batch) == (3, result.files, None)
    assert run(config).step == 3  # fewer steps than are done


@pytest.mark.full
def test_a_run_that_goes_back_sets_the_weights_of_later_steps_aside(tiny_model: TinyModel, tmp_path: Path) -> None:
    steps = {"training": {"max_steps": 2}, "checkpoints": {"every_steps": 1}}
    config = config_for("flux", tiny_model, tmp_path, **steps)
    run(config)
    out = Path(config.output_dir)
    before = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    faster = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.1})})
    run(faster, resume=str(out / "checkpoints" / "checkpoint-1"))
    assert (out / "set-aside-tiny_000000002.safetensors").read_bytes() == before["tiny_000000002.safetensors"]
    assert (out / "finished-tiny_000000002.safetensors").read_bytes() == before["tiny.safetensors"]
    assert (out / "tiny_000000001.safetensors").read_bytes() == before["tiny_000000001.safetensors"]
    new, result = load_file(out / "tiny_000000002.safetensors"), load_file(out / "tiny.safetensors")
    assert all(torch.equal(new[name], result[name]) for name in result)
    old = load_file(out / "set-aside-tiny_000000002.safetensors")
    assert any(not torch.equal(new[name], old[name]) for name in old)


@pytest.mark.full
def test_a_dry_run_leaves_the_run_as_it_is(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 2})
    run(config, Interrupting(1))
    out = Path(config.output_dir)

    def existing() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and "cache" not in path.parts}

    before = existing()
    other = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.1})})
    assert run(other, resume="none", dry_run=True).step == 0
    assert run(other, dry_run=True).step == 1
    assert existing() == before


def change_a_byte(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def change_a_setting(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


PARTS: dict[str, tuple[str, Any]] = {
    "part vae was '": ("vae/diffusion_pytorch_model.safetensors", change_a_byte),
    "part scheduler: shift was 3.0 and is 5.0": (
        "scheduler/scheduler_config.json",
        lambda file: change_a_setting(file, shift=5.0),
    ),
}


def test_a_run_goes_on_only_with_the_model_it_began_with(tiny_model: TinyModel, tmp_path: Path) -> None:
    """`unit.models.test_fingerprint` covers every part. The switch for another transformer allows these too."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model("flux", "dev"), model)
    change_a_setting(model / "scheduler/scheduler_config.json", shift=3.0)
    config = config_for(
        "flux", tiny_model, tmp_path, model={"path": str(model)}, training={"max_steps": 1},
        cache={"cache_dir": str(tmp_path / "cache")},
    )  # fmt: skip
    view = CollectingView()
    run(config, view)
    assert {"4 latents encoded: 4 new images", "4 text embeddings encoded: 4 new captions"} <= {*view.lines}
    longer = changed(config, "training", max_steps=2)
    for words, (name, change) in PARTS.items():
        before = (model / name).read_bytes()
        change(model / name)
        with pytest.raises(OtherRunError) as rejected:
            run(longer)
        assert words in rejected.value.problem.found
        assert "--allow-other-run" in rejected.value.problem.hint
        (model / name).write_bytes(before)
    change_a_byte(model / "vae/diffusion_pytorch_model.safetensors")
    elsewhere = longer.model_copy(update={"output_dir": str(tmp_path / "elsewhere")})
    view = CollectingView()
    checkpoint = Path(config.output_dir) / "checkpoints" / "checkpoint-1"
    assert run(elsewhere, view, resume=str(checkpoint), allow_other_run=True).step == 2
    assert "checkpoint-1 belongs to another run: part vae was" in "\n".join(view.lines)
    assert [line for line in view.lines if " encoded" in line] == [
        "4 latents encoded again: the VAE changed since they were cached"
    ]


def test_a_checkpoint_of_the_earlier_form_is_resumed_with_one_note(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 1}, checkpoints={"keep_last": 1})
    run(config)
    folder = Path(config.output_dir) / "checkpoints"
    manifest = read_manifest(folder / "checkpoint-1")
    known = {name: value for name, value in manifest.metadata.identity.items() if not name.startswith(PART)}
    assert len(known) == 3 < len(manifest.metadata.identity)
    earlier = replace(manifest, metadata=replace(manifest.metadata, identity=known))
    (folder / "checkpoint-1" / MANIFEST).write_bytes(earlier.as_bytes())
    view = CollectingView()
    assert run(changed(config, "training", max_steps=2), view).step == 2
    assert len([line for line in view.lines if "was written by an earlier release" in line]) == 1
    assert not (folder / "checkpoint-1").exists(), "it is this run's own, and not kept any more"
    assert read_manifest(folder / "checkpoint-2").metadata.identity == manifest.metadata.identity
    view = CollectingView()
    assert run(changed(config, "training", max_steps=3), view).step == 3
    assert not [line for line in view.lines if "was written by an earlier release" in line]


def shards(config: RunConfig) -> set[str]:
    return {path.name for path in (Path(config.output_dir) / "cache").glob("*/shards/*")}


def test_other_data_is_rejected_before_any_of_it_is_encoded(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 2})
    run(config)
    before, folder = shards(config), Path(config.datasets[0].path)
    shutil.copy(images(tmp_path / "more", 9) / "08.png", folder / "new.png")
    (folder / "new.txt").write_text("another caption")
    longer = changed(config, "training", max_steps=4)
    with pytest.raises(OtherDataError, match=r"\d samples then, \d now"):
        run(longer)
    assert shards(config) == before
    (folder / "new.png").unlink()
    assert run(longer).step == 4


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_file_that_was_left_out_when_it_was_encoded_is_no_other_data(
    tiny_model: TinyModel, tmp_path: Path, is_cached: bool
) -> None:
    folder = images(tmp_path / "data", 6)
    whole = (folder / "03.png").read_bytes()
    (folder / "03.png").write_bytes(whole[:200] + bytes(100) + whole[300:])  # its header is sound
    data = {"id": "d", "path": str(folder), "resolution": 64.0, "corrupt_threshold": 0.5}
    config = config_for("flux", tiny_model, tmp_path, datasets=[data], training={"max_steps": 2})
    run(config)
    if not is_cached:
        shutil.rmtree(Path(config.output_dir) / "cache")
    assert run(changed(config, "training", max_steps=3)).step == 3

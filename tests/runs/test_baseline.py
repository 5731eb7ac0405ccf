"""Captures of real runs: what is kept, what is left alone, and that a slower run is recognized."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from gracetune.baselines.baseline import FILE, REPORT, SMI_LOG, read_baseline
from gracetune.baselines.capture import BaselineCaptureError, CaptureOptions, capture, measured_config
from gracetune.baselines.regression import compare
from gracetune.cli.main import main
from gracetune.config.environment import Environment
from gracetune.config.native import write
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.train.view import CollectingView
from runs.launched import start, write_config
from runs.made_runs import ALONE, TinyModel, config_for

SLOW = Path(__file__).with_name("slow_capture.py")


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def gracetune(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return int(str(ended.value.code))


def test_a_capture_keeps_what_a_run_cost_and_leaves_its_output_alone(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warm-up longer than the capture, samples, a webhook that must not be called, and a stand-in nvidia-smi."""
    monkeypatch.setenv("PATH", f"{_nvidia_smi(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    config = config_for(
        "flux", tiny_model, tmp_path, schedule={"name": "cosine", "warmup_steps": 4},
        validation={"at_start": True, "prompts": [{"prompt": "one"}]},
        logging={"webhook": "https://127.0.0.1:9/secret"},
    )  # fmt: skip
    output = Path(config.output_dir)
    output.mkdir()
    (output / "tiny.safetensors").write_text("the result of an earlier run")
    before = files_below(tmp_path)
    file = write_config(config, tmp_path / "c.yaml")
    kept = tmp_path / "kept"
    killed, at_work = (kept / f".gracetune-baseline-{letter * 32}.tmp" for letter in "ab")
    for folder in (killed, at_work):
        (folder / "run").mkdir(parents=True)
    held = os.open(at_work, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert gracetune("baseline", "capture", str(file), "--steps", "8", "--output", str(kept), "--json") == 0
    captured = capsys.readouterr()
    message = json.loads(captured.out)
    folder = Path(message["folder"])
    assert folder.parent == kept
    assert sorted(path.name for path in folder.iterdir()) == [FILE, REPORT, SMI_LOG]
    assert {path.name for path in kept.iterdir()} == {folder.name, at_work.name}, "what a killed capture left is gone"
    os.close(held)
    found = read_baseline(folder)
    assert found.name == "tiny"
    assert (found.steps.warm_up, len(found.steps.ms)) == (2, 6)
    assert found.steps.samples == (1,) * 6
    assert found.memory.peak_bytes["host"] > found.memory.owners_bytes["host"]["frozen weights"] > 0
    assert found.counters["cache.batches"] >= 8
    assert found.final_losses[""] > 0
    assert "secret" not in (folder / FILE).read_text()
    assert (folder / SMI_LOG).read_text().startswith("0 %")
    assert (folder / REPORT).read_text().startswith("Baseline of tiny")
    after = files_below(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert sorted(path.name for path in output.iterdir()) == ["tiny.safetensors"]
    assert not compare(found, found, 0.0).regressions


def _nvidia_smi(folder: Path) -> Path:
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0 %, 1 MiB'\nexec sleep 600\n")
    program.chmod(0o755)
    return folder


class Interrupted(CollectingView):
    def on_step(self, step: int, steps: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.full
def test_a_run_that_is_stopped_leaves_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path)
    with pytest.raises(BaselineCaptureError, match="ended at step 3 of 8"):
        capture(config, CaptureOptions(8, tmp_path / "kept"), environment=ALONE, view=Interrupted())
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.full
def test_the_configs_own_caches_are_used_where_that_is_asked_for(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path)
    requested = CaptureOptions(8, tmp_path / "kept", use_caches=True)
    heard = CollectingView()
    first = capture(config, requested, environment=ALONE, view=heard)
    assert heard.lines
    assert not [line for line in (*heard.lines, *heard.warnings) if ".tmp" in line], "names a folder that does not stay"
    entries = {path for path in files_below(tmp_path / "out" / "cache") if "shards" in path}
    assert entries
    second = capture(config, requested, environment=ALONE, view=CollectingView())
    assert {path for path in files_below(tmp_path / "out" / "cache") if "shards" in path} == entries
    assert first.folder != second.folder
    assert first.baseline.final_losses == second.baseline.final_losses
    assert first.baseline.config_fingerprint == second.baseline.config_fingerprint
    assert first.baseline.nvidia_smi == "not available: no nvidia-smi on the PATH"


def test_a_launched_process_is_rejected(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path)
    with pytest.raises(ConfigError, match="one process"):
        capture(
            config,
            CaptureOptions(8, tmp_path / "kept"),
            environment=Environment({"WORLD_SIZE": "2"}),
            view=CollectingView(),
        )
    assert not (tmp_path / "kept").exists()


def test_an_output_that_cannot_be_is_told(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output FOLDER"):
        capture(
            config_for("flux", tiny_model, tmp_path),
            CaptureOptions(8, tmp_path / "file" / "x"),
            environment=ALONE,
            view=CollectingView(),
        )


def test_what_is_measured_is_the_config_without_what_happens_between_steps(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    cache = {"text_cache_dir": str(tmp_path / "texts"), "vae_cache_dir": str(tmp_path / "vae")}
    config = config_for("flux", tiny_model, tmp_path, cache=cache)
    measured = measured_config(config, tmp_path / "run", CaptureOptions(20, tmp_path))
    assert (measured.output_dir, measured.training.max_steps) == (str(tmp_path / "run"), 20)
    assert (measured.cache.text_cache_dir, measured.cache.vae_cache_dir) == (None, None)
    assert (measured.model, measured.adapter, measured.optimizer) == (config.model, config.adapter, config.optimizer)
    shared = measured_config(config, tmp_path / "run", CaptureOptions(20, tmp_path, use_caches=True))
    assert shared.cache.text_cache_dir == config.cache.text_cache_dir
    assert shared.cache.cache_dir == str(tmp_path / "out" / "cache")
    assert RunConfig.model_validate(measured.model_dump()) == measured


@pytest.mark.full
def test_a_tenth_more_of_every_step_is_a_regression_and_the_same_again_is_none(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Three real runs side by side; one of them waits in every step for a tenth of a step more."""
    file = tmp_path / "c.yaml"
    file.write_text(write(config_for("flux", tiny_model, tmp_path)))
    waits = {"one": 0.3, "again": 0.3, "slow": 0.3 * 1.1 + 0.004}
    running = [start([str(SLOW), str(file), str(tmp_path / name), str(wait)]) for name, wait in waits.items()]
    try:
        ended = [process.communicate(timeout=280) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0, 0], ended
    one, again, slow = (read_baseline(next((tmp_path / name).iterdir())) for name in waits)
    assert not compare(one, again, 0.05).regressions
    assert {row.name for row in compare(one, slow, 0.05).regressions} == {"step time", "throughput"}

"""The overlay in front of a shell of upstream: its config, its datasets, its caches, its loop."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gracetune_simpletuner.__main__ import main
from gracetune_simpletuner.points import HOOKS, READS, hooks_of

from gracetune.gh200 import set_uvm_hint_override
from unit.overlays.simpletuner.conftest import OVERLAY, ROOT, STAND_IN

SCRIPT = str(STAND_IN / "simpletuner" / "train.py")
UNIFIED = {"cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}}
Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forget_upstream: Callable[[], None]
) -> Train:
    """One run, as accelerate would start it; what upstream's script said at its end."""

    def run(*arguments: str, overlay: bool = True) -> dict[str, Any]:
        forget_upstream()
        finders = list(sys.meta_path)
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        monkeypatch.setattr(sys, "argv", ["overlay", SCRIPT, *arguments] if overlay else [SCRIPT, *arguments])
        try:
            if overlay:
                main()
            else:
                sys.path[0] = str(Path(SCRIPT).parent)
                runpy.run_path(SCRIPT, run_name="__main__")
        finally:
            sys.meta_path[:] = finders
            set_uvm_hint_override(None)
        stated: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return stated

    return run


def message(job: Path) -> list[dict[str, Any]]:
    file = job / "output" / "gracetune-overlay.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def ask(job: Path, *, staged: bool = False, **blocks: Any) -> None:
    config = job / "config" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | blocks))
    if staged:
        datasets = job / "config" / "datasets.json"
        text, images = json.loads(datasets.read_text())
        datasets.write_text(json.dumps([text, images | {"type": "in_memory"}]))


def test_with_nothing_asked_for_upstream_is_as_without_us(job: Path, train: Train) -> None:
    plain = train("--seed=1", overlay=False)
    assert train("--seed=1") == plain
    assert len(plain["seen"]) == 8
    assert plain["arguments"] == ["--seed=1"]
    assert message(job) == []


def test_with_everything_asked_for_it_sees_the_same_from_memory(job: Path, train: Train) -> None:
    plain = train(overlay=False)
    ask(job, staged=True, **UNIFIED)
    assert train("--gh200_optimizations={}") == plain
    lines = message(job)
    counts = lines[-1]["counts"]
    assert counts["caches"]["hits"] == 16
    assert "reads_from_disk" not in counts["caches"]
    assert counts["in_memory"]["reads_from_memory"] == 4 + 4 + 8  # images once, captions of three passes
    assert counts["placement"]["batches"] == 8
    assert sum(counts["placement"]["refused"]["batches"].values()) == 8
    assert {"attached", "memory", "staged", "resident", "finished"} <= {line["event"] for line in lines}
    (resident,) = (line for line in lines if line["event"] == "resident")
    assert resident["entries"] == 8
    assert not resident["look_ahead"]["available"]
    assert "dataloader_prefetch" in resident["look_ahead"]["reason"]


def test_a_second_run_sees_what_changed_in_between(job: Path, train: Train) -> None:
    ask(job, staged=True, **UNIFIED)
    train()
    for file in (job / "pictures").glob("*.png"):
        file.write_bytes(b"another picture")
    assert all(latents == [15.0, float(sum(b"another picture") % 97)] for latents, _ in train()["seen"])


def test_a_problem_is_a_message(job: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    ask(job, cache_config={"vae_cache_type": "ram"})
    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 1
    errors = capsys.readouterr().err
    assert "gracetune overlay: config: cache_config.vae_cache_type" in errors
    assert "'ram'" in errors


def test_without_a_script_the_usage_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["overlay", "nowhere.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_dataset_without_its_buckets_is_a_message(
    job: Path, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(job, **UNIFIED)
    monkeypatch.setitem(READS, "metadata backend", ("aspect_ratio_bucket_indices", "renamed"))
    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 1
    assert "gracetune overlay: metadata backend: renamed\n" in capsys.readouterr().err


@pytest.mark.full
def test_as_a_module_of_its_own_process_a_problem_has_no_traceback(job: Path) -> None:
    ask(job, cache_config={"vae_cache_type": "ram"})
    paths = [str(STAND_IN), str(OVERLAY), str(ROOT / "src")]
    done = subprocess.run(
        [sys.executable, "-m", "gracetune_simpletuner", SCRIPT],
        cwd=job,
        env=dict(os.environ) | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "'ram'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_hook_belongs_to_a_feature_and_is_named_once_in_it() -> None:
    features = {hook.feature for hook in HOOKS}
    assert sum(len({hook.target for hook in hooks_of(feature)}) for feature in features) == len(HOOKS)

"""The plan's decisions for a run, from the command line to the opening of the unified-memory layer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gracetune.errors import GracetuneError
from gracetune.hardware.recording import load_recording
from gracetune.models.registry import build_published, footprint_of
from gracetune.train import load as loading
from gracetune.train import preflight as checking
from runs.launched import write_config
from runs.made_runs import TinyModel, config_for
from runs.test_commands import gracetune

MACHINES = Path(__file__).parents[1] / "fixtures" / "machines"


class FarEnoughError(GracetuneError):
    """Raised where the layer would be opened on a GPU, which this machine does not have."""


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def opening(*_: object, **given: Any) -> None:
        calls.append(given)
        raise FarEnoughError("far enough")

    monkeypatch.setattr(loading, "open_memory", opening)
    monkeypatch.setattr(checking, "probe", lambda: load_recording(MACHINES / "gh200-numa"))
    return calls


def of_published_size(tiny: Path, folder: Path) -> Path:
    """A model whose files claim the size of Wan 2.2 14B; its weights cannot be loaded."""
    shutil.copytree(tiny, folder)
    for part in ("transformer", "transformer_2"):
        build_published("wan", "t2v-14b-2.2").save_config(str(folder / part))  # type: ignore[operator]
    return folder


def test_the_layer_is_told_what_the_plan_manages_elsewhere(
    tiny_model: TinyModel, tmp_path: Path, handed_on: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """`gracetune train` on a modelled GH200 that parks the inactive expert and keeps its caches in managed memory."""
    sections = {
        "model": {"base_precision": "bf16"},
        "training": {"max_steps": 1, "mixed_precision": "bf16", "batch_size": 8, "gradient_checkpointing": "auto"},
        "cache": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
        "memory": {"use_uvm": True, "enable_uvm_hints": True},
    }
    config = config_for("wan", tiny_model, tmp_path, **sections)
    data = config.datasets[0].model_copy(update={"resolution": 1024.0})
    config = config.model_copy(update={"datasets": (data,)})
    published = of_published_size(Path(config.model.path or ""), tmp_path / "published")
    file = write_config(config, tmp_path / "c.yaml")
    assert gracetune("train", str(file), "--set", f"model.path={published}") == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "far enough" in message
    assert "placement: idle expert" in message
    experts = 2 * 2 * footprint_of(config.model)[0].parameters
    (given,) = handed_on
    assert experts < given["managed_elsewhere"] < experts * 1.01, "both experts, and the caches of four images"
    assert given["force_oversubscription"] is False
    # Weights the plan is not for are not parked by it; their caches are managed all the same.
    assert gracetune("train", str(file), "--force-oversubscription") == 1
    _, given = handed_on
    assert 0 < given["managed_elsewhere"] < experts / 100
    assert given["force_oversubscription"] is True

"""A run that is killed (SIGKILL) and started again ends with the same folder as an undisturbed run.

This test kills at one moment; `storm` tests many."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from runs.made_runs import TinyModel, config_for, run
from storm.judging import listing
from unit.cache.processes import Child

SAMPLES = {"every_steps": 2, "steps": 1, "width": 64, "height": 64, "prompts": [{"prompt": "a"}, {"prompt": "b"}]}
SECTIONS: dict[str, Any] = {
    "validation": SAMPLES, "training": {"max_steps": 4}, "checkpoints": {"every_steps": 1, "keep_last": 2},
}  # fmt: skip


def test_killed_before_a_checkpoint_is_complete(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = config_for("flux", tiny_model, tmp_path, **SECTIONS)
    killed = whole.model_copy(update={"output_dir": str(tmp_path / "killed")})
    run(whole)

    def die(event: str, details: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(details[1]).endswith("checkpoint-2"):
            os.kill(os.getpid(), signal.SIGKILL)

    child = Child(lambda report: (sys.addaudithook(die), run(killed), None)[-1])
    while child.wait_for_word():
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -signal.SIGKILL
    left = listing(Path(killed.output_dir))
    assert "tiny_000000002.safetensors" in left
    assert "checkpoints/checkpoint-2" not in left
    run(killed)
    assert listing(Path(killed.output_dir)) == listing(Path(whole.output_dir))

"""Runs of two processes that lose one: the error names it, the last checkpoint, and the command that resumes."""

from __future__ import annotations

import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gracetune.config.run_config import RunConfig
from gracetune.telemetry.events import RunEnded, StepDone
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.view import CollectingView
from runs.launched import COMMAND, ROOT, start, start_ranks, write_config
from runs.made_runs import TinyModel, config_for, images, run

pytestmark = pytest.mark.full
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
QUICK = (
    "import gracetune.train.rank_monitor as p; "
    "p.BEAT_S, p.SILENT_BEATS, p.GRACE_S, p.REPORT_EVERY_S = 0.2, 20, 1.0, {True: 1.0, False: 2.0}"
)
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    # Without a GPU accelerate's own launcher for several processes is this one too.
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                   "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"],
}  # fmt: skip


def endless(tiny_model: TinyModel, root: Path, **sections: Any) -> RunConfig:
    sections = {"training": {"max_steps": 5000}, "checkpoints": {"every_steps": 2}, **sections}
    return config_for("flux", tiny_model, root, logging={"trackers": []}, **sections)


def wait_for_step(config: RunConfig, step: int, processes: list[subprocess.Popen[str]]) -> None:
    log, deadline = Path(config.output_dir) / "logs" / "events.jsonl", time.monotonic() + 200
    while not (log.exists() and f'"step":{step},' in log.read_text()):
        if time.monotonic() > deadline or not all(one.poll() is None for one in processes):
            for one in processes:
                one.kill()
            pytest.fail(f"step {step} is not reached: {[one.communicate() for one in processes]}")
        time.sleep(0.02)


def ended(config: RunConfig) -> RunEnded:
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").records
    (found,) = [record.event for record in records if isinstance(record.event, RunEnded)]
    return found


def last_checkpoint(config: RunConfig) -> Path:
    folder = Path(config.output_dir) / "checkpoints"
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def assert_named(stated: str, config: RunConfig, rank: int, what: str) -> None:
    assert "Traceback" not in stated, stated
    assert f"error rank {rank} of 2 is lost: {what}" in stated, stated
    assert f"the last checkpoint is {config.output_dir}/checkpoints/checkpoint-" in stated
    assert (ended(config).outcome, ended(config).reason.partition("\n")[0] in stated) == ("failed", True)
    assert (Path(config.output_dir) / "report.html").is_file()


@pytest.mark.parametrize(
    ("variables", "lost"), [({}, 1), (FSDP, 0)], ids=["replicas-rank-1", "sharded-rank-0, which has the log"]
)
def test_a_killed_process_is_named_and_the_run_goes_on_with_one(
    variables: dict[str, str], lost: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = endless(tiny_model, tmp_path, training={"max_steps": 5000, "gradient_accumulation_steps": 2})
    file = write_config(config, tmp_path / "c.yaml")
    command = ["-c", COMMAND, "train", str(file), "--resume", "none"]
    ranks = start_ranks(2, command, **variables)
    wait_for_step(config, 5, ranks)
    ranks[lost].kill()
    _, stated = ranks[1 - lost].communicate(timeout=60)
    assert ranks[1 - lost].returncode == 1
    what = f"its process (pid {ranks[lost].pid} on "
    assert_named(stated, config, lost, what)
    assert stated.strip().endswith(f"train {file} --resume latest"), "the same command would begin anew"
    step = int(last_checkpoint(config).name.partition("-")[2])
    view = CollectingView()
    longer = {"max_steps": step + 1}
    result = run(config.model_copy(update={"training": config.training.model_copy(update=longer)}), view)
    assert result.step == step + 1
    (note,) = [text for text in view.warnings if text.startswith("effective batch: ")]
    assert "until now 4 (batch_size 1 x gradient_accumulation_steps 2 x processes 2), from here on 2 (" in note
    assert note.endswith("--set training.batch_size=1 --set training.gradient_accumulation_steps=4")
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").merged()
    assert [one.event.step for one in records if isinstance(one.event, StepDone)][-1] == step + 1


@pytest.mark.parametrize(("launcher", "lost"), [("torchrun", 1), ("accelerate", 0)])
def test_under_a_launcher_the_command_that_was_typed_is_named(
    launcher: str, lost: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = endless(tiny_model, tmp_path)
    file = write_config(config, tmp_path / "c.yaml")
    words = [*LAUNCHERS[launcher], str(ROOT / "train.py"), "--config", str(file)]
    process = start(words)
    wait_for_step(config, 5, [process])
    ranks = {one.environ().get("RANK"): one for one in psutil.Process(process.pid).children()}
    ranks[str(lost)].kill()
    _, stated = process.communicate(timeout=120)
    assert process.returncode == 1
    ours = stated.partition("Traceback")[0]  # the launcher's own, below
    assert_named(ours, config, lost, f"its process (pid {ranks[str(lost)].pid} on ")
    command = next(line for line in ours.splitlines() if line.endswith(f"train.py --config {file}"))
    assert shlex.split(command) == [sys.executable, *words]


def test_a_process_that_fails_is_named_with_its_reason(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The kernel gives it no memory."""
    config = endless(tiny_model, tmp_path)
    ranks = start_ranks(2, ["-c", COMMAND, "train", str(write_config(config, tmp_path / "c.yaml"))])
    wait_for_step(config, 5, ranks)
    resource.prlimit(ranks[1].pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    _, stated = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert_named(stated, config, 1, "it stopped: out of memory after")


def test_a_process_that_hangs_ends_the_one_that_waits_for_it(tiny_model: TinyModel, tmp_path: Path) -> None:
    """gloo and NCCL would wait silently for hours. The timeouts are shorter here."""
    config = endless(tiny_model, tmp_path)
    file = write_config(config, tmp_path / "c.yaml")
    ranks = start_ranks(2, ["-c", f"{QUICK}; {COMMAND}", "train", str(file)])
    wait_for_step(config, 5, ranks)
    ranks[0].send_signal(signal.SIGSTOP)  # it holds the store, too
    _, stated = ranks[1].communicate(timeout=60)
    ranks[0].kill()
    ranks[0].communicate()
    assert ranks[1].returncode == 1
    assert "rank 1 has waited" in stated
    assert_named(stated, config, 0, f"its process (pid {ranks[0].pid} on ")
    assert "does not answer: it is stopped, or its machine is out of reach" in stated


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked to stop"])
def test_while_caching(number: signal.Signals, tiny_model: TinyModel, tmp_path: Path) -> None:
    """One process is killed and is lost, or gets a signal, which interrupts both."""
    data = {"id": "many", "path": str(images(tmp_path / "many", 200)), "resolution": 64.0}
    config = endless(tiny_model, tmp_path, datasets=[data], cache={"vae_batch_size": 1})
    ranks = start_ranks(2, ["-c", COMMAND, "train", str(write_config(config, tmp_path / "c.yaml"))])
    while not list((Path(config.output_dir) / "cache").rglob("*.safetensors")):
        assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
        time.sleep(0.01)
    ranks[1].send_signal(number)
    stated = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert "Traceback" not in stated[0], stated[0]
    if number == signal.SIGKILL:
        assert ranks[0].returncode == 1
        assert f"error rank 1 of 2 is lost: its process (pid {ranks[1].pid} on " in stated[0]
        assert "there is no checkpoint yet; resume with" in stated[0]
    else:
        assert [rank.returncode for rank in ranks] == [3, 3]
        assert "interrupted by SIGTERM (rank 1); staged data is lost" in stated[0]
        assert "interrupted by SIGTERM; staged data is lost" in stated[1]

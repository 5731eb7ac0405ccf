"""Every launch line and script of docs/cluster.md, as it is written there, with local processes on a CPU.

`srun` and `scontrol` are stand-ins that start local processes and record their arguments. The numbers of processes
are smaller, and ports are free ones.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from gracetune.config.run_config import RunConfig
from gracetune.telemetry.events import RunEnded, RunStarted
from gracetune.telemetry.sinks.jsonl import read_log
from runs.launched import write_config
from runs.made_runs import TinyModel, config_for
from unit.docs.targets import text_of

BLOCKS = re.findall(r"^```(?:sh|yaml)\n(.*?)^```$", text_of("cluster.md"), re.M | re.S)
TORCHRUN, ACCELERATE, TORCHRUN_NODES, ACCELERATE_NODES, SLURM, SKYPILOT = BLOCKS
SRUN = """#!/bin/bash
pids=()
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & pids+=($!)
done
printf '%s\\n' "${pids[@]}" >pids.new && mv pids.new pids
code=0
for pid in "${pids[@]}"; do wait "$pid"; ended=$?; ((ended > code)) && code=$ended; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >>requeued; fi
"""
MODULES = {
    "gracetune": "gracetune",
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the programs that the page names on the PATH."""
    programs = {name: f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n' for name, module in MODULES.items()}
    (tmp_path / "bin").mkdir()
    for name, text in {**programs, "srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(tiny_model: TinyModel, folder: Path, steps: int) -> RunConfig:
    config = config_for(
        "flux", tiny_model, folder, training={"max_steps": steps}, checkpoints={"every_steps": 2},
        logging={"trackers": []},
    )  # fmt: skip
    write_config(config, folder / "my.yaml")
    return config


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def smaller(text: str, port: str) -> str:
    text = re.sub(r"--nproc_per_node 4", "--nproc_per_node 1", text).replace("29500", port)
    return text.replace("--num_processes 8", "--num_processes 2")


def start(script: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **variables},
    )  # fmt: skip


def assert_finished(config: RunConfig, processes: list[subprocess.Popen[str]], world_size: int) -> None:
    stated = [one.communicate(timeout=250)[0] for one in processes]
    assert [one.returncode for one in processes] == [0] * len(processes), stated
    events = [record.event for record in read_log(Path(config.output_dir) / "logs" / "events.jsonl").records]
    assert [event.outcome for event in events if isinstance(event, RunEnded)][-1] == "finished"
    assert [event.world_size for event in events if isinstance(event, RunStarted)][-1] == world_size


@pytest.mark.full
@pytest.mark.parametrize("line", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_on_one_machine(line: str, site: Path, tiny_model: TinyModel) -> None:
    config = configured(tiny_model, site, 2)
    line = re.sub(r"(--nproc_per_node|--num_processes) 4", r"\1 2", line)
    line = line.replace("--multi_gpu", f"--multi_gpu --main_process_port {free_port()}")
    assert_finished(config, [start(line)], 2)


@pytest.mark.full
@pytest.mark.parametrize(
    "line", [TORCHRUN_NODES, ACCELERATE_NODES, SKYPILOT], ids=["torchrun", "accelerate", "skypilot"]
)
def test_on_two_machines(line: str, site: Path, tiny_model: TinyModel) -> None:
    config, port = configured(tiny_model, site, 2), free_port()
    script = yaml.safe_load(line)["run"] if line == SKYPILOT else line
    processes = [start(smaller(script, port), **of_node(node)) for node in ("0", "1")]
    assert_finished(config, processes, 2)


def of_node(node: str) -> Mapping[str, str]:
    sky = {"NODE_IPS": "127.0.0.1\n127.0.0.1", "NUM_NODES": "2", "NODE_RANK": node, "NUM_GPUS_PER_NODE": "1"}
    return {"HEAD": "127.0.0.1", "NODE": node, **{f"SKYPILOT_{name}": value for name, value in sky.items()}}


@pytest.mark.full
def test_a_job_of_slurm_is_put_back_into_the_queue_and_resumes(site: Path, tiny_model: TinyModel) -> None:
    config = configured(tiny_model, site, 400)
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    script = start(smaller(SLURM, free_port()), **job)
    log, deadline = Path(config.output_dir) / "logs" / "events.jsonl", time.monotonic() + 200
    while not (log.exists() and '"step":2,' in log.read_text()):
        assert script.poll() is None, script.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in (site / "pids").read_text().split():  # as SLURM signals the tasks of a step
        os.kill(int(pid), signal.SIGTERM)
    stated, _ = script.communicate(timeout=200)
    assert script.returncode == 3, stated
    assert (site / "requeued").read_text() == "requeue 7\n"
    (site / "requeued").unlink()
    events = [record.event for record in read_log(log).records]
    step = next(event.step for event in events if isinstance(event, RunEnded))
    configured(tiny_model, site, step + 2)  # a run of 400 steps would take too long here
    assert_finished(config, [start(smaller(SLURM, free_port()), **job)], 2)
    assert not (site / "requeued").exists()
    starts = [record.event for record in read_log(log).records if isinstance(record.event, RunStarted)]
    assert starts[-1].resumed_step == step

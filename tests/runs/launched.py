"""Start runs in their own processes, as a launcher does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gracetune.config.native import write
from gracetune.config.run_config import RunConfig

COMMAND = "from gracetune.cli.main import main; main()"
ROOT = Path(__file__).parents[2]


def write_config(config: RunConfig, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write(config))
    return path


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """Run Python with these arguments."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def command_line(*arguments: str) -> list[str]:
    """Run `gracetune` with these arguments."""
    return ["-c", COMMAND, *arguments]


def start_ranks(count: int, command: list[str], **environment: str) -> list[subprocess.Popen[str]]:
    """Run Python with these arguments in `count` processes that form a process group, as a launcher's do."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONFAULTHANDLER": "1",
    }
    return [start(command, RANK=str(rank), LOCAL_RANK=str(rank), **shared, **environment) for rank in range(count)]


def launch(jobs: Path, count: int) -> list[tuple[int, str, str]]:
    """Run the jobs in `count` processes. Return exit code, stdout and stderr of each."""
    processes = start_ranks(count, [str(Path(__file__).with_name("two_processes.py")), str(jobs)])
    # At the same time: one that waits for room in its pipe would keep the others waiting for it.
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(_ended, processes))


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """A process that hangs is made to print its stack."""
    try:
        out, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, errors = process.communicate()
    finally:
        process.kill()
    return process.returncode, out, errors

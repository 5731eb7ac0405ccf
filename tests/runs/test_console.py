"""A run continues if its console cannot be written, with real pipes, terminals and file systems that fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from gracetune.config.run_config import RunConfig
from gracetune.telemetry.events import RunEnded, Warned
from gracetune.telemetry.sinks.jsonl import read_log
from runs.launched import ROOT, write_config
from runs.made_runs import TinyModel, config_for, run
from unit.cache.processes import Child, mount_tmpfs, own_mounts
from unit.cli.consoles import Connect, both_to, gracetune

STEPS = 6


@pytest.fixture(scope="module")
def undisturbed(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = tmp_path_factory.mktemp("undisturbed")
    shared = {"cache_dir": str(root / "cache")}
    config = config_for("flux", tiny_model, root, training={"max_steps": STEPS}, cache=shared)
    run(config)
    return config


def disturbed(config: RunConfig, folder: Path) -> RunConfig:
    """The same run in another folder."""
    return config.model_copy(update={"output_dir": str(folder / "out")})


def trained(config: RunConfig, folder: Path, connect: Connect, *options: str) -> Child:
    return gracetune(connect, "train", str(write_config(config, folder / "c.yaml")), *options)


def assert_undisturbed(config: RunConfig, undisturbed: RunConfig, *reasons: str) -> None:
    """The result equals that of an undisturbed run. The log says once what happened to the console."""
    ours, theirs = (Path(one.output_dir) / "tiny.safetensors" for one in (config, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()
    events = [record.event for record in read_log(Path(config.output_dir) / "logs" / "events.jsonl").records]
    assert [event.outcome for event in events if isinstance(event, RunEnded)] == ["finished"]
    warned = [event.message for event in events if isinstance(event, Warned)]
    assert len(warned) == len(reasons), warned
    for message, reason in zip(warned, reasons, strict=True):
        assert reason in message
        assert reason in (Path(config.output_dir) / "report.html").read_text()


def test_a_reader_that_goes_away(undisturbed: RunConfig, tmp_path: Path) -> None:
    config = disturbed(undisturbed, tmp_path)
    reading, writing = os.pipe()

    def connect() -> None:
        os.close(reading)
        both_to(writing)()

    child = trained(config, tmp_path, connect)
    os.close(writing)
    read = b""
    while b"step 3/" not in read:
        read += os.read(reading, 100)
    os.close(reading)
    assert child.join() == ["0"]
    assert_undisturbed(config, undisturbed, "stderr cannot be written (Broken pipe)")


@pytest.mark.full
def test_a_log_file_on_a_full_disk(undisturbed: RunConfig, tmp_path: Path) -> None:
    config = disturbed(undisturbed, tmp_path)

    def connect() -> None:
        own_mounts()
        mount_tmpfs(tmp_path / "small", 4096)
        log = tmp_path / "small" / "log"
        log.write_bytes(b"x" * 3500)
        both_to(os.open(log, os.O_WRONLY | os.O_APPEND))()

    assert trained(config, tmp_path, connect).join() == ["0"]
    assert_undisturbed(config, undisturbed, "stderr cannot be written (No space left on device)")


def test_a_terminal_that_is_closed(undisturbed: RunConfig, tmp_path: Path) -> None:
    """A thread renders progress bars. SIGHUP is ignored, as under nohup."""
    config = disturbed(undisturbed, tmp_path)
    master, terminal = pty.openpty()

    def connect() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.close(master)
        both_to(terminal)()

    child = trained(config, tmp_path, connect)
    os.close(terminal)
    read = b""
    while b"training" not in read:
        read += os.read(master, 1000)
    os.close(master)
    assert child.join() == ["0"]
    assert_undisturbed(config, undisturbed, "stderr cannot be written (Input/output error)")


def test_a_terminal_of_80_columns(undisturbed: RunConfig, tmp_path: Path) -> None:
    """It says at all times what the run does, and keeps a line for each step of so short a run."""
    config = disturbed(undisturbed, tmp_path)
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))

    def connect() -> None:
        os.environ["TERM"] = "xterm"
        os.environ.pop("COLUMNS", None)
        both_to(terminal)()

    child = trained(config, tmp_path, connect)
    os.close(terminal)
    read = b""
    with contextlib.suppress(OSError):  # a terminal whose last process has ended
        while data := os.read(master, 65536):
            read += data
    os.close(master)
    assert child.join() == ["0"]
    frames = [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read.decode()))]
    assert frames[0].endswith(f"c.yaml: flux, lora, into {config.output_dir}")
    progress = [line for line in frames if line[:1] in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"]
    assert max(map(len, progress)) <= 80
    for what in ("loading PyTorch", "checking the config", "loading the model", "first batch", r"training \d/6 loss "):
        assert any(re.search(what, line) for line in progress), what
    kept = [line for line in frames if re.match(r"step \d/6 · loss", line)]
    assert [line[:8] for line in kept] == [f"step {step}/6" for step in range(1, STEPS + 1)]
    assert all(re.search(r" · \S+ (m?s/it|measuring).* · host \d", line) for line in kept[1:-1])
    assert all(" · ETA " in line for line in kept[1:-1])
    at = frames.index("    copy to ComfyUI/models/loras")
    assert frames[at - 1].endswith("out/tiny.safetensors")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_reads_nothing(
    kind: str, undisturbed: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a pager that is not scrolled, or a terminal behind a dead connection."""
    monkeypatch.setattr("gracetune.cli.streams.PATIENCE_S", 0.2)
    config = disturbed(undisturbed, tmp_path)
    reading, writing = os.pipe() if kind == "pipe" else pty.openpty()
    fill(writing)

    def connect() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(writing, 2)

    child = trained(config, tmp_path, connect)
    assert child.join() == ["0"]
    os.close(reading)
    os.close(writing)
    assert_undisturbed(config, undisturbed, "stderr accepted no output for 0 s: output is dropped until it does")


def fill(descriptor: int) -> None:
    """Fill the console until it accepts nothing more. A terminal moves its buffer once and has room again."""
    os.set_blocking(descriptor, False)
    for _ in range(5):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptor, b"x" * 64)
        time.sleep(0.02)
    os.set_blocking(descriptor, True)


def test_descriptors_that_are_closed_from_the_beginning(undisturbed: RunConfig, tmp_path: Path) -> None:
    """No file of the run may get these descriptors, or it would receive what a C library prints. No warning is due."""
    config = disturbed(undisturbed, tmp_path)

    def connect() -> None:
        for number in (0, 1, 2):
            os.close(number)

    assert trained(config, tmp_path, connect).join() == ["0"]
    assert_undisturbed(config, undisturbed)


@pytest.mark.full
def test_a_result_that_nobody_takes_is_no_failed_run(undisturbed: RunConfig, tmp_path: Path) -> None:
    config = disturbed(undisturbed, tmp_path)

    def connect() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        os.dup2(os.open(tmp_path / "stderr", os.O_WRONLY | os.O_CREAT), 2)

    assert trained(config, tmp_path, connect, "--json").join() == ["0"]
    assert_undisturbed(config, undisturbed)
    stated = (tmp_path / "stderr").read_text()
    assert "warning: stdout cannot be written (No space left on device)" in stated
    assert "the run is not affected" in stated


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        "{gracetune} train {config} 2>&1 | head -20",
        "{gracetune} train {config} --log-level debug > /dev/full 2>&1; (exit $?) | true",
        "{train} --config {config} 2>&1 | head -1",
        "accelerate launch --cpu --num_processes 1 {train} --config {config} 2>&1 | head -1",
        "torchrun --nproc_per_node 2 {train} --config {config} --set training.batch_size=1 > /dev/full 2>&1 | true",
    ],
    ids=["head", "full", "train.py", "accelerate", "two-processes"],
)
def test_as_it_is_typed(line: str, undisturbed: RunConfig, tmp_path: Path) -> None:
    """The exit code of the first program of the line is that of a run that ended well. 120 would be Python's own."""
    config = disturbed(undisturbed, tmp_path)
    names = {"gracetune": f"{sys.executable} -m gracetune", "train": f"{sys.executable} {ROOT / 'train.py'}"}
    if "accelerate" in line or "torchrun" in line:
        names["train"] = str(ROOT / "train.py")
    script = line.format(config=write_config(config, tmp_path / "c.yaml"), **names)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"{script}; exit ${{PIPESTATUS[0]}}"],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    events = [record.event for record in read_log(Path(config.output_dir) / "logs" / "events.jsonl").records]
    assert [event.outcome for event in events if isinstance(event, RunEnded)] == ["finished"]
    if "torchrun" not in line:
        assert_undisturbed(config, undisturbed, "stderr cannot be written")

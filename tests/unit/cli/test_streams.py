"""Output that cannot be written: what a command does whose result it is, and what every write does afterwards."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.cli.streams import CLOSED_PIPE, GuardedOutput, OutputLostError

ROOT = Path(__file__).parents[3]


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """The exit code is that of the first program of the line."""
    script = f"{line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)


SCHEMA = f"{sys.executable} -m gracetune config schema"
HELP = f"{sys.executable} train.py --help"


class TestResultsOnStdout:
    @pytest.mark.parametrize("command", [SCHEMA, HELP], ids=["schema", "help"])
    def test_a_full_disk_is_an_error(self, command: str) -> None:
        full = shell(f"{command} > /dev/full")
        assert full.returncode == 1
        assert full.stderr == "error the output is incomplete: stdout cannot be written: No space left on device\n"

    def test_a_closed_pipe_ends_the_command_without_a_word(self) -> None:
        closed = shell(f"{SCHEMA} | head -c 1")
        assert (closed.returncode, closed.stderr) == (CLOSED_PIPE, "")

    def test_a_closed_descriptor_is_an_error(self) -> None:
        closed = shell(f"{SCHEMA} >&-")
        assert closed.returncode == 1
        assert "it was closed when the command began" in closed.stderr

    def test_errors_are_errors_whatever_happens_to_stderr(self) -> None:
        """Python's own exit code for a stream that cannot be flushed would be 120."""
        for end in ("2>&-", "> /dev/full 2>&1"):
            assert shell(f"{sys.executable} -m gracetune config show nothing.yaml --json {end}").returncode == 1, end


class TestWrites:
    def test_a_failing_write_points_the_descriptor_at_nothing_and_is_said_once(self) -> None:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        said: list[str] = []
        output = GuardedOutput("stderr", descriptor)
        output.on_lost = said.append
        assert [output.write(b"a"), output.write(b"bc"), os.write(descriptor, b"d")] == [1, 2, 1]
        assert said == ["stderr cannot be written (No space left on device): what follows is not shown there"]
        os.close(descriptor)

    def test_a_result_that_is_lost_ends_the_command_at_every_write(self) -> None:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        output = GuardedOutput("stdout", descriptor)
        output.carries_result = True
        for _ in range(2):
            with pytest.raises(OutputLostError):
                output.write(b"a")
        output.carries_result = False
        assert output.write(b"a") == 1
        os.close(descriptor)

    def test_a_reader_that_comes_back_is_told_what_was_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gracetune.cli.streams.PATIENCE_S", 0.05)
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        said: list[str] = []
        output = GuardedOutput("stderr", writing)
        output.on_lost = said.append
        output.leave_out_when_stuck()
        for _ in range(30):
            assert output.write(b"x" * 299 + b"\n") == 300
        assert len(said) == 1
        assert os.get_blocking(writing), "other processes write to it too"
        taken = os.read(reading, 1 << 16)
        output.write(b"back\n")
        more = os.read(reading, 1 << 16)
        left_out = 30 - taken.count(b"\n")
        assert more.decode() == f"\n[{left_out} lines left out: nothing was read here]\nback\n"
        os.close(reading)
        assert output.write(b"gone\n") == 5
        assert output.lost is not None
        os.close(writing)

"""Output that cannot be written: the effect on commands whose result it is, and on later writes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gracetune.cli.streams import CLOSED_PIPE, GuardedOutput, OutputLostError
from unit.cli.consoles import both_to, gracetune

ROOT = Path(__file__).parents[3]
SCHEMA = ("config", "schema")
Run = Callable[..., tuple[str, str]]


def to(place: str) -> int:
    return os.open(place, os.O_WRONLY)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Exit code and stderr of a command with the given stdout; None closes it."""

    def work(stdout: int | None, *arguments: str) -> tuple[str, str]:
        file = tmp_path / "stderr"

        def connect() -> None:
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.close(1) if stdout is None else os.dup2(stdout, 1)

        (code,) = gracetune(connect, *(arguments or SCHEMA)).join()
        return code, file.read_text()

    return work


class TestResultsOnStdout:
    def test_a_full_disk_is_an_error(self, run: Run) -> None:
        lost = "error the output is incomplete: stdout cannot be written: No space left on device\n"
        assert run(to("/dev/full")) == ("1", lost)
        assert run(to("/dev/full"), "train", "--help") == ("1", lost)
        assert run(to(os.devnull)) == ("0", "")

    def test_a_closed_pipe_ends_the_command_silently(self, run: Run) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        assert run(writing) == (str(CLOSED_PIPE), "")

    def test_a_closed_descriptor_is_an_error(self, run: Run) -> None:
        code, errors = run(None)
        assert code == "1"
        assert "it was closed when the command began" in errors

    def test_the_exit_code_of_an_error_survives_a_lost_console(self) -> None:
        for place in ("/dev/full", os.devnull):
            child = gracetune(both_to(to(place)), "config", "show", "nothing.yaml", "--json")
            assert child.join() == ["1"]

    def test_scripts_at_the_root_guard_their_output_too(self) -> None:
        """Started as a user would. Python's own exit code for a stream that cannot be flushed would be 120."""
        line = f"{sys.executable} train.py --help > /dev/full"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
        assert (done.returncode, done.stderr.startswith("error the output is incomplete")) == (1, True)


class TestWrites:
    def test_a_failed_write_redirects_the_descriptor_to_devnull_and_is_reported_once(self) -> None:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        reported: list[str] = []
        output = GuardedOutput("stderr", descriptor)
        output.on_lost = reported.append
        assert [output.write(b"a"), output.write(b"bc"), os.write(descriptor, b"d")] == [1, 2, 1]
        assert reported == ["stderr cannot be written (No space left on device): what follows is not shown there"]
        os.close(descriptor)

    def test_every_write_ends_the_command_after_its_result_is_lost(self) -> None:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        output = GuardedOutput("stdout", descriptor)
        output.carries_result = True
        for _ in range(2):
            with pytest.raises(OutputLostError):
                output.write(b"a")
        output.carries_result = False
        assert output.write(b"a") == 1
        os.close(descriptor)

    def test_a_reader_that_resumes_sees_how_many_lines_were_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gracetune.cli.streams.PATIENCE_S", 0.05)
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        reported: list[str] = []
        output = GuardedOutput("stderr", writing)
        output.on_lost = reported.append
        output.leave_out_when_stuck()
        for _ in range(30):
            assert output.write(b"x" * 299 + b"\n") == 300
        assert len(reported) == 1
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

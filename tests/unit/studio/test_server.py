"""The command itself: a real server, its link, live streams, its cost, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from gracetune.studio.access import CHANGE_HEADER
from unit.studio.logs import BEGAN_S, locked, small_run, started, step, write_run


@dataclass
class Served:
    process: subprocess.Popen[str]
    port: int
    cookie: str = ""

    def request(self, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
        """A response whose body is not read yet; its connection stays open."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        own = {"origin": f"http://127.0.0.1:{self.port}", CHANGE_HEADER: "1"} if method != "GET" else {}
        connection.request(method, path, headers={"cookie": self.cookie, **own, **headers})
        return connection.getresponse()

    def get(self, path: str) -> Any:
        reply = self.request("GET", f"/api/{path}")
        assert reply.status == 200, reply.read()
        return json.loads(reply.read())


@contextmanager
def serving(*arguments: str, command: str = "studio") -> Iterator[Served]:
    line = [sys.executable, "-m", "gracetune", command, *arguments, "--port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)(/\?token=\S+)", first)
            assert found is not None, first + process.stdout.read()
            served = Served(process, int(found[1]))
            reply = served.request("GET", found[2].partition("#")[0])
            served.cookie = reply.headers["set-cookie"].partition(";")[0]
            yield served
        finally:
            process.kill()


def messages(reply: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """The events of a stream."""
    name = ""
    for raw in reply:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_a_live_run_is_followed_within_two_seconds_and_the_server_ends_at_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), step(1)])
    with locked(run), serving(str(tmp_path)) as served:
        (row,) = served.get("runs")["runs"]
        assert row["state"] == "running"
        stream = messages(served.request("GET", f"/api/runs/{row['id']}/stream"))
        assert next(stream)[0] == "status"
        time.sleep(0.8)  # until the first poll has seen the end of the log
        write_run(run, [step(2, loss=float("nan")), step(3)], begin=BEGAN_S + 9)
        written = time.monotonic()
        steps = []
        for name, data in stream:
            if name == "step":
                steps.append((data["step"], data["loss"], data["expert"]))
            if len(steps) == 2:
                break
        assert time.monotonic() - written < 2.0
        assert steps[0] == (2, None, "")
        assert steps[1][0] == 3
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(10) == 0, "a browser that keeps its stream open does not hold the server"


def test_the_list_is_live(tmp_path: Path) -> None:
    small_run(tmp_path / "one")
    with serving(str(tmp_path)) as served:
        stream = messages(served.request("GET", "/api/runs/stream"))
        assert [row["path"] for row in next(stream)[1]["changed"]] == ["one"]
        small_run(tmp_path / "two")
        assert [row["path"] for row in next(stream)[1]["changed"]] == ["two"]


def test_a_stop_is_requested_by_a_file_and_only_where_a_run_is_active(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), step(1)])
    with serving(str(tmp_path), "--control") as served:
        identifier = served.get("runs")["runs"][0]["id"]
        reply = served.request("POST", f"/api/runs/{identifier}/actions/stop")
        assert reply.status == 409
        assert "no run is active" in json.loads(reply.read())["error"]["found"]
        with locked(run):
            time.sleep(0.3)
            for action, file in (("sample", "validate-now"), ("save", "save-now"), ("stop", "stop-now")):
                reply = served.request("POST", f"/api/runs/{identifier}/actions/{action}")
                assert reply.status == 200, reply.read()
                assert (run / file).read_text() == "studio\n"
        assert served.request("POST", f"/api/runs/{identifier}/actions/dance").status == 404


def test_watch_opens_one_run(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    with serving(str(run), command="watch") as served:
        (row,) = served.get("runs")["runs"]
        assert row["path"] == "."
    done = subprocess.run(
        [sys.executable, "-m", "gracetune", "watch", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no such folder" in done.stderr


def test_without_its_packages_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; from gracetune.cli.main import main; main(['studio', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'gracetune[studio]'" in done.stderr


def test_the_studio_imports_no_torch_and_opens_no_file_of_a_run_for_writing(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    with serving(str(tmp_path)) as served:
        (row,) = served.get("runs")["runs"]
        stream = messages(served.request("GET", f"/api/runs/{row['id']}/stream"))
        next(stream)
        for page in ("", "/series", "/memory", "/log"):
            served.get(f"runs/{row['id']}{page}")
        process = psutil.Process(served.process.pid)
        assert not [one.path for one in process.memory_maps() if "libtorch" in one.path]
        inside = [one for one in process.open_files() if Path(one.path).is_relative_to(run)]
        assert not [one for one in inside if one.mode != "r"]
        os.kill(served.process.pid, signal.SIGKILL)
    assert sorted(one.name for one in run.iterdir()) == ["checkpoints", "logs"]


@pytest.mark.full
def test_five_open_tabs_take_at_most_two_percent_of_a_core(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), step(1)])
    for number in range(20):
        small_run(tmp_path / f"other{number}")
    with locked(run), serving(str(tmp_path)) as served:
        rows = {row["path"]: row["id"] for row in served.get("runs")["runs"]}
        paths = [f"/api/runs/{rows['run']}/stream"] * 3 + ["/api/runs/stream"] * 2
        tabs = [served.request("GET", path) for path in paths]
        process = psutil.Process(served.process.pid)
        time.sleep(3)
        before, began = process.cpu_times(), time.monotonic()
        for number in range(2, 22):
            write_run(run, [step(number)], begin=BEGAN_S + number)
            time.sleep(1)
        after, passed = process.cpu_times(), time.monotonic() - began
        spent = after.user + after.system - before.user - before.system
        assert spent / passed < 0.02
        assert len(tabs) == 5

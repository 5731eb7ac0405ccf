"""The queue: its files, its order, and what a restarted studio finds. Whole jobs run in runs/test_studio_jobs.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.environment import Environment
from gracetune.studio.job_files import JobFiles, JobStart, QueuedJob, boot_id, ticks_of
from gracetune.studio.job_queue import JobQueue, slots_of
from gracetune.studio.replies import StudioError
from gracetune.studio.run_list import RunList
from gracetune.telemetry.events import Record, RunEnded
from gracetune.telemetry.schema import to_line
from unit.studio.clients import StudioClient, client_of


def config(root: Path, name: str) -> Path:
    (root / "photos").mkdir(exist_ok=True)
    path = root / f"{name}.yaml"
    path.write_text(
        f"gracetune: 1\nname: {name}\noutput_dir: {root}/{name}\nmodel: {{family: sdxl}}\n"
        f"datasets: {root}/photos\ntraining: {{max_steps: 1}}\n"
    )
    return path


@pytest.fixture
def client(tmp_path: Path) -> StudioClient:
    return client_of(tmp_path)


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    while ticks_of(process.pid) is None:
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def files_of(root: Path) -> JobFiles:
    return JobFiles(root / ".studio" / "queue")


def queue_of(root: Path) -> JobQueue:
    return JobQueue(files_of(root), RunList(root), Environment.capture(), root)


def started(root: Path, **start: Any) -> QueuedJob:
    """A job that an earlier studio started."""
    files = files_of(root)
    job = QueuedJob(
        id=files.new_id(), name="cats", config=str(config(root, "cats")), folder=str(root), output=str(root / "cats"),
        position=1, added_s=1.0, start=JobStart(time_s=1.0, boot=boot_id(), **start),
    )  # fmt: skip
    with files.changing():
        files.write(job)
    return job


def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not within the limit"
        time.sleep(0.05)


def row(queue: JobQueue) -> dict[str, Any]:
    (found,) = queue.state(control=True)["jobs"]
    assert isinstance(found, dict)
    return found


def names(client: StudioClient) -> list[str]:
    return [job["name"] for job in client.get("queue")["jobs"]]


def test_jobs_wait_in_order_and_move(client: StudioClient, tmp_path: Path) -> None:
    jobs = {name: client.post("queue", {"config": str(config(tmp_path, name))})["id"] for name in "abcd"}
    assert names(client) == [*"abcd"]
    for job, action, order in (("d", "up", "abdc"), ("d", "up", "adbc"), ("a", "down", "dabc"), ("d", "up", "dabc"),
                               ("c", "down", "dabc"), ("a", "down", "dbac")):  # fmt: skip
        client.post(f"queue/{jobs[job]}/{action}")
        assert names(client) == [*order]
    assert [job["position"] for job in client.get("queue")["jobs"]] == [1, 2, 3, 4]
    client.post(f"queue/{jobs['b']}/cancel")
    state = {job["name"]: job["state"] for job in client.get("queue")["jobs"]}
    assert state == {"d": "waiting", "a": "waiting", "c": "waiting", "b": "cancelled"}
    assert client.rejected("POST", f"queue/{jobs['b']}/up")[0] == 409
    client.post(f"queue/{jobs['b']}/remove")
    assert names(client) == [*"dac"]
    assert names(client_of(tmp_path)) == [*"dac"]  # another studio of the folder
    assert client.get("queue")["runner"]["active"] is False


def test_positions_have_room_however_often_jobs_move(client: StudioClient, tmp_path: Path) -> None:
    jobs = [client.post("queue", {"config": str(config(tmp_path, name))})["id"] for name in "abc"]
    for _ in range(60):
        client.post(f"queue/{jobs[2]}/up")
        client.post(f"queue/{jobs[1]}/up")
        order = names(client)
        assert sorted(order) == [*"abc"]
        jobs = [one["id"] for one in client.get("queue")["jobs"]]


def test_what_cannot_be_added(client: StudioClient, tmp_path: Path) -> None:
    first = config(tmp_path, "a")
    client.post("queue", {"config": "a.yaml"})  # relative to where the studio was started
    assert client.rejected("POST", "queue", {"config": str(first)})[0] == 409
    assert client.rejected("POST", "queue", {"config": "gone.yaml"})[0] == 422
    (tmp_path / "b.yaml").write_text(first.read_text().replace("max_steps: 1", "max_steps: none"))
    status, error = client.rejected("POST", "queue", {"config": "b.yaml"})
    assert (status, "training.max_steps" in error["found"]) == (422, True)
    for body in ({}, {"config": 3}, {"config": "a\0"}, {"config": "x" * 9000}, {"config": ["a"]}):
        assert client.rejected("POST", "queue", body)[0] in (400, 422)
    for action in ("up", "start", "remove"):
        assert client.rejected("POST", f"queue/{'0' * 12}/{action}")[0] == 404


def test_files_that_are_no_jobs_are_ignored(client: StudioClient, tmp_path: Path) -> None:
    job = client.post("queue", {"config": str(config(tmp_path, "a"))})
    folder = tmp_path / ".studio" / "queue"
    for number, text in enumerate(("", "{", "[]", '{"format": "other"}', '{"id": 3}')):
        (folder / f"{number:012}.json").write_text(text)
    (folder / "ffffffffffff.json").write_text((folder / f"{job['id']}.json").read_text())
    assert names(client) == ["a"]


def test_a_running_job_is_recognized_by_its_process(tmp_path: Path, sleeping: subprocess.Popen[bytes]) -> None:
    started(tmp_path, pid=sleeping.pid, ticks=ticks_of(sleeping.pid))
    queue = queue_of(tmp_path)
    assert row(queue)["state"] == "running"
    with pytest.raises(StudioError, match="a running job"):
        queue.remove(row(queue)["id"])
    queue.cancel(row(queue)["id"])
    assert sleeping.wait(10) == -15
    assert row(queue)["state"] == "cancelled"


def test_a_reused_process_id_is_another_process(tmp_path: Path, sleeping: subprocess.Popen[bytes]) -> None:
    ticks = ticks_of(sleeping.pid)
    assert ticks is not None
    started(tmp_path, pid=sleeping.pid, ticks=ticks - 1)
    queue = queue_of(tmp_path)
    assert row(queue)["state"] == "interrupted"
    queue.cancel(row(queue)["id"])  # still without an end in its file: nothing is signalled
    assert sleeping.poll() is None


@pytest.mark.parametrize(
    ("event", "state"),
    [(RunEnded(step=5, outcome="finished"), "done"), (RunEnded(step=5, outcome="interrupted"), "interrupted"),
     (RunEnded(step=5, outcome="failed", reason="no space"), "failed"), (None, "interrupted")],
)  # fmt: skip
def test_the_outcome_that_no_studio_saw_is_in_the_event_log(event: RunEnded | None, state: str, tmp_path: Path) -> None:
    started(tmp_path, pid=1 << 22, ticks=1)
    (tmp_path / "cats" / "logs").mkdir(parents=True)
    log = tmp_path / "cats" / "logs" / "events.jsonl"
    old = to_line(Record(-10.0, RunEnded(step=1, outcome="failed")))
    log.write_bytes(old + b"not an event\n" + (b"" if event is None else to_line(Record(50.0, event))))
    found = row(queue_of(tmp_path))
    assert (found["state"], found["exit_code"]) == (state, None)
    assert found["why"]


def test_a_job_that_was_being_started_is_found_by_its_lock(tmp_path: Path) -> None:
    job = started(tmp_path)
    files, queue = files_of(tmp_path), queue_of(tmp_path)
    held = files.open_job_lock(job)
    process = subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=(held,), stdin=subprocess.PIPE)
    os.close(held)
    assert row(queue)["state"] == "running"
    process.communicate(b"\n", timeout=30)
    assert row(queue)["state"] == "interrupted"


def test_jobs_run_one_after_another_and_a_failure_is_shown(tmp_path: Path) -> None:
    """The configs become invalid after they were added, so that the processes end at once."""
    client = client_of(tmp_path)
    for name in "ab":
        path = config(tmp_path, name)
        client.post("queue", {"config": str(path)})
        path.write_text("gracetune: 1\nname: 5\n")
    client.studio.queue.start_runner()
    try:
        until(lambda: all(job["state"] == "failed" for job in client.get("queue")["jobs"]))
        runner = client.get("queue")["runner"]
    finally:
        client.studio.queue.stop_runner()
    later, earlier = client.get("queue")["jobs"]
    assert (earlier["name"], later["name"], earlier["exit_code"]) == ("a", "b", 1)
    assert later["started_s"] >= earlier["started_s"]
    assert any("expected" in line for line in earlier["log"])
    assert runner["active"]
    assert not client.get("queue")["runner"]["active"]
    assert not [*(tmp_path / ".studio" / "queue").glob(".gracetune-*")]


def test_only_one_studio_of_a_folder_starts_jobs(tmp_path: Path) -> None:
    first, second = queue_of(tmp_path), queue_of(tmp_path)
    first.start_runner()
    until(lambda: bool(first.state(control=True)["runner"]["active"]))
    second.start_runner()
    time.sleep(0.3)
    assert second.state(control=True)["runner"] == {
        "active": True, "why": "another studio of this folder starts the jobs"
    }  # fmt: skip
    first.stop_runner()
    until(lambda: second.state(control=True)["runner"]["why"] == "one run at a time")
    second.stop_runner()


def test_a_job_that_never_began_waits_again(tmp_path: Path) -> None:
    job = started(tmp_path)
    Path(job.config).write_text("gracetune: 1\nname: 5\n")
    queue = queue_of(tmp_path)
    queue.start_runner()
    try:
        until(lambda: row(queue)["state"] == "failed")  # it was started after all
    finally:
        queue.stop_runner()
    assert row(queue)["exit_code"] == 1


def test_nothing_is_written_to_look(tmp_path: Path) -> None:
    client = client_of(tmp_path, control=False)
    assert client.get("queue") == {
        "jobs": [], "runner": {"active": False, "why": "jobs are started with --control only"}
    }  # fmt: skip
    assert not [*tmp_path.iterdir()]
    assert client.rejected("POST", "queue", {"config": "a.yaml"})[0] == 403


@pytest.mark.parametrize(
    ("gpus", "visible", "slots"),
    [(0, None, [None]), (0, "0", [None]), (1, None, ["0"]), (2, "", ["0", "1"]), (2, "3, GPU-5", ["3", "GPU-5"]),
     (1, "3,-1", ["3"])],
)  # fmt: skip
def test_one_job_for_each_gpu(gpus: int, visible: str | None, slots: list[str | None]) -> None:
    assert list(slots_of(gpus, visible)) == slots


def test_jobs_of_several_gpus_run_side_by_side(tmp_path: Path) -> None:
    client = client_of(tmp_path)
    for name in "abc":
        path = config(tmp_path, name)
        client.post("queue", {"config": str(path)})
        path.write_text("gracetune: 1\nname: 5\n")
    client.studio.queue.start_runner(slots=("0", "5"))
    try:
        until(lambda: all(job["state"] == "failed" for job in client.get("queue")["jobs"]))
    finally:
        client.studio.queue.stop_runner()
    third, *first = sorted(client.get("queue")["jobs"], key=lambda job: job["started_s"], reverse=True)
    assert {job["gpu"] for job in first} == {"0", "5"}
    assert third["started_s"] >= min(job["ended_s"] for job in first)


def test_a_queue_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / ".studio").write_text("not a folder")
    queue = queue_of(tmp_path)
    queue.start_runner()
    try:
        until(lambda: "Not a directory" in str(queue.state(control=True)["runner"]["why"]))
    finally:
        queue.stop_runner()

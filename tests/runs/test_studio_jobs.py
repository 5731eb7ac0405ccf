"""From the studio's pages to finished runs: a dropped ai-toolkit file, an edited caption, a studio that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gracetune.config import native
from gracetune.studio.job_files import ticks_of
from runs.made_runs import TinyModel, config_for
from runs.test_dialects import sdxl_job
from unit.studio.clients import StudioClient, client_of


def until(condition: Callable[[], Any], limit_s: float = 200) -> Any:
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, "not within the limit"
        time.sleep(0.1)
    return found


def ended(client: StudioClient, identifier: str) -> dict[str, Any]:
    """The job once it has ended."""

    def look() -> dict[str, Any] | None:
        job: dict[str, Any] = next(one for one in client.get("queue")["jobs"] if one["id"] == identifier)
        return None if job["state"] in ("waiting", "running") else job

    found: dict[str, Any] = until(look)
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    try:
        lines = (folder / "logs" / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if f'"{kind}"' in line and (event := json.loads(line))["kind"] == kind]


def test_a_dropped_file_trains_and_an_edited_caption_reaches_the_next_run(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    client = client_of(tmp_path)
    dropped = sdxl_job(tiny_model, tmp_path, train={"steps": 2, "noise_scheduler": "ddpm", "dtype": "fp32"}).read_text()
    client.studio.queue.start_runner()
    try:
        checked = client.post("new/check", {"text": dropped, "name": "job.yaml"})
        assert (checked["ok"], checked["dialect"]) == (True, "ai-toolkit")
        plan = client.post("new/plan", {"text": dropped, "name": "job.yaml"})
        assert plan["verdict"]
        assert plan["tiers"]
        saved = client.post("new/save", {"text": dropped, "file_name": "cats.yaml", "start": True})
        first = ended(client, saved["job"]["id"])
        assert (first["state"], first["exit_code"]) == ("done", 0), first["log"]

        (run,) = client.get("runs")["runs"]
        assert (run["id"], run["state"]) == (first["run"], "finished")
        base = f"runs/{run['id']}/data"
        (dataset,) = client.get(base)["datasets"]
        item = client.get(f"{base}/{dataset['id']}/items")["items"][0]
        assert item["caption"] == "picture number 0"
        path = f"{base}/{dataset['id']}/items/{item['key']}/caption"
        client.put(path, {"text": "a caption from the studio", "was": item["caption"]})

        # Our own dialect makes prompts of captions where it has none.
        changes = {"name": "again", "output_dir": str(tmp_path / "again"), "validation.prompts": None,
                   "training.max_steps": 1, "validation.every_steps": 1, "validation.steps": 1,
                   "validation.width": 64, "validation.height": 64}  # fmt: skip
        ours = client.post("new/check", {"text": checked["yaml"], "name": "again.yaml", "set": changes})
        assert ours["ok"], ours["problems"]
        saved = client.post("new/save", {"text": ours["yaml"], "file_name": "again.yaml", "start": True})
        second = ended(client, saved["job"]["id"])
        assert second["state"] == "done", second["log"]
    finally:
        client.studio.queue.stop_runner()
    prompts = {file["prompt"] for event in events(tmp_path / "again", "ValidationDone") for file in event["files"]}
    assert "a caption from the studio" in prompts
    assert "picture number 0" not in prompts


def killed_studio(root: Path, config: Path) -> None:
    """A studio that adds a job, sees it train, and is killed."""
    code = (
        "import sys, time, pathlib\n"
        "from unit.studio.clients import client_of\n"
        "root, config = map(pathlib.Path, sys.argv[1:])\n"
        "client = client_of(root)\n"
        "client.studio.queue.start_runner()\n"
        "client.post('queue', {'config': str(config)})\n"
        "print('added', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    studio = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(config)], env=environment, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert studio.stdout is not None
        assert studio.stdout.readline() == b"added\n"
        until(lambda: len(events(root / "out", "StepDone")) > 2)
    finally:
        os.killpg(studio.pid, signal.SIGKILL)
        studio.communicate()


def test_a_killed_studio_leaves_its_queue_and_its_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = tmp_path / "endless.yaml"
    sections = {"training": {"max_steps": 1_000_000}, "name": "endless"}
    config.write_text(native.write(config_for("sdxl", tiny_model, tmp_path, **sections)))
    killed_studio(tmp_path, config)
    (file,) = (tmp_path / ".studio" / "queue").glob("*.json")
    pid = json.loads(file.read_text())["start"]["pid"]
    try:
        steps = len(events(tmp_path / "out", "StepDone"))
        until(lambda: len(events(tmp_path / "out", "StepDone")) > steps)  # it does not notice

        client = client_of(tmp_path)
        (job,) = client.get("queue")["jobs"]
        assert (job["state"], job["name"]) == ("running", "endless")
        client.studio.queue.start_runner()
        try:
            other = tmp_path / "other.yaml"
            other.write_text(config.read_text().replace(f"{tmp_path}/out", f"{tmp_path}/other"))
            waiting = client.post("queue", {"config": str(other)})
            time.sleep(1.5)
            assert [one["state"] for one in client.get("queue")["jobs"]] == ["running", "waiting"]
            client.post(f"queue/{waiting['id']}/cancel")
            client.post(f"queue/{job['id']}/cancel")
            stopped = ended(client, job["id"])
        finally:
            client.studio.queue.stop_runner()
        assert stopped["state"] == "cancelled"
        (end,) = events(tmp_path / "out", "RunEnded")
        assert end["outcome"] == "interrupted"
        assert [*(tmp_path / "out" / "checkpoints").glob("checkpoint-*")]  # its state is saved
    finally:
        if ticks_of(pid) is not None:
            os.kill(pid, signal.SIGKILL)

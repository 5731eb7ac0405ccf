"""The queue: training jobs that are started one after another, one at a time per GPU.

Its state is in files (`job_files`), so it survives the studio. A job is `gracetune train CONFIG` in a process of its
own session: it goes on when the studio ends, is killed or runs out of memory. After a restart, a job that was running
is recognized by its process; its outcome is read from the event log of its run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gracetune.config import Environment, load
from gracetune.config.limits import LARGEST_FILE
from gracetune.config.machine_checks import path_problems
from gracetune.errors import ConfigError
from gracetune.hardware import probe
from gracetune.redaction import redact
from gracetune.storage.atomic import sweep
from gracetune.storage.regular_files import open_regular
from gracetune.studio.commands import command_line
from gracetune.studio.job_files import EndState, JobEnd, JobFiles, JobStart, QueuedJob, ask_to_stop, boot_id, ticks_of
from gracetune.studio.replies import StudioError, json_body, json_reply
from gracetune.studio.run_list import RunList
from gracetune.telemetry.events import RunEnded
from gracetune.telemetry.schema import NotAnEventError, from_line

MOST_JOBS = 500
_LOG_LINES = 20
_BUSY_S, _IDLE_S = 0.5, 2.0
"""Time between two looks at the queue. A new job wakes the runner at once."""
_TAIL = 1 << 18
_SAVED = 3
"""The exit code of a run that was interrupted with its state saved."""
_NEAREST = 1e-9
"""Jobs whose positions differ by less get new positions."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class JobQueue:
    """The jobs, and the thread that starts them. All methods may block for the time of a few file operations."""

    def __init__(self, files: JobFiles, runs: RunList, environment: Environment, folder: Path) -> None:
        """`folder` is the working folder of new jobs."""
        self._files, self._runs, self._environment, self._folder = files, runs, environment, folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: int | None = None
        self._slots: Sequence[str | None] = ()
        self._trouble = ""

    # -- the runner ---------------------------------------------------------------------------------------------------

    def start_runner(self, slots: Sequence[str | None] = ()) -> None:
        """Start jobs from now on, as soon as no other process does. `slots` are by default those of this machine."""
        self._slots = slots
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)
        self._thread.start()

    def stop_runner(self) -> None:
        """Start no further jobs. Running ones go on."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _run(self) -> None:
        self._slots = self._slots or slots_of(len(probe().gpus), self._environment.get(_VISIBLE))
        while not self._stopping.is_set():
            self._wake.clear()
            busy = False
            try:
                if self._lock is None:
                    self._lock = self._files.take_runner_lock()
                    if self._lock is not None:
                        sweep(self._files.folder)
                if self._lock is not None:
                    busy = self._look()
                self._trouble = ""
            except OSError as error:  # a full disk or a folder that was removed: tried again at the next look
                self._trouble = f"{error.filename or self._files.folder}: {error.strerror}"
            self._wake.wait(_BUSY_S if busy else _IDLE_S)

    def _look(self) -> bool:
        """Note jobs that have ended, and start the next ones. Returns whether any job is left to do."""
        if not self._files.jobs():
            return False
        with self._files.changing():
            taken = []
            for job in self._files.jobs():
                if job.start is None or job.end is not None:
                    continue
                end = self._end_of(job)
                if end is None:
                    taken.append(job.start.gpu)
                elif _never_began(job, self._files):
                    self._files.write(job.model_copy(update={"start": None}))
                else:
                    self._children.pop(job.id, None)
                    self._files.write(job.model_copy(update={"end": end}))
            waiting = [job for job in self._files.jobs() if job.is_waiting]
            free = [slot for slot in self._slots if slot not in taken]
            for job, slot in zip(waiting, free, strict=False):
                self._start(job, slot)
        return bool(waiting or taken)

    def _start(self, job: QueuedJob, gpu: str | None) -> None:
        """Start a job. It is written before and after, so that a killed studio leaves no process without a job."""
        start = JobStart(time_s=time.time(), boot=boot_id(), gpu=gpu)
        held = self._files.open_job_lock(job)  # first: a job without a process id is alive while this is locked
        variables = dict(self._environment.variables) | ({} if gpu is None else {_VISIBLE: gpu})
        try:
            self._files.write(job.model_copy(update={"start": start}))
            with self._files.log(job).open("ab") as log:
                child = subprocess.Popen(
                    command_line("train", job.config), cwd=job.folder, env=variables, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=(held,),
                )  # fmt: skip
        except OSError as error:  # the working folder was removed, or there is no memory for a process
            end = JobEnd(time_s=time.time(), state="failed", why=f"it could not be started: {error.strerror}")
            self._files.write(job.model_copy(update={"start": start, "end": end}))
            return
        finally:
            os.close(held)
        self._children[job.id] = child
        started = start.model_copy(update={"pid": child.pid, "ticks": ticks_of(child.pid)})
        self._files.write(job.model_copy(update={"start": started}))

    def _end_of(self, job: QueuedJob) -> JobEnd | None:
        """The end of a job that was started; None while its process lives."""
        child = self._children.get(job.id)
        if child is not None:
            code = child.poll()
            return None if code is None else _end_with(job, code)
        return None if self._files.is_alive(job) else _end_unseen(job)

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, config: Path) -> dict[str, Any]:
        """Add a job at the end. Its config is checked first."""
        path = config.expanduser() if config.is_absolute() else self._folder / config.expanduser()
        try:
            resolved = load(path, environment=self._environment)
            problems = path_problems(resolved)
            if problems:
                raise ConfigError(problems)
        except ConfigError as error:
            raise StudioError.of(error, 422) from None
        output = self._folder / Path(resolved.config.output_dir).expanduser()
        with self._files.changing():
            jobs = self._files.jobs()
            if any(job.config == str(path) and job.end is None for job in jobs):
                raise StudioError(409, f"{path.name} is in the queue", "a config that is not", "wait for it")
            if len(jobs) >= MOST_JOBS:
                raise StudioError(409, f"{len(jobs)} jobs", f"at most {MOST_JOBS}", "remove jobs that have ended")
            last = max((job.position for job in jobs), default=0.0)
            job = QueuedJob(
                id=self._files.new_id(), name=resolved.config.name, config=str(path), folder=str(self._folder),
                output=str(output), position=float(int(last) + 1), added_s=time.time(),
            )  # fmt: skip
            self._files.write(job)
        self._wake.set()
        return self._row(job, 0)

    def move(self, identifier: str, by: int) -> None:
        """Move a waiting job by one place; by -1 it comes earlier."""
        with self._files.changing():
            waiting = [job for job in self._files.jobs() if job.is_waiting]
            job = self._find(identifier)
            if not job.is_waiting:
                raise StudioError(409, "a job that has been started", "a waiting job", "only waiting jobs can be moved")
            places = [one.id for one in waiting]
            place = places.index(job.id)
            wanted = place + by
            if not 0 <= wanted < len(places):
                return
            waiting.insert(wanted, waiting.pop(place))
            position = _between(waiting, wanted)
            if position is not None:
                self._files.write(job.model_copy(update={"position": position}))
            else:
                self._renumber(waiting)

    def _renumber(self, ordered: Sequence[QueuedJob]) -> None:
        """New positions above all present ones, the last job first: a studio killed meanwhile leaves no wrong order
        among those that were not reached."""
        top = max(job.position for job in self._files.jobs()) + 1
        for number in range(len(ordered) - 1, -1, -1):
            self._files.write(ordered[number].model_copy(update={"position": float(int(top) + number)}))

    def cancel(self, identifier: str) -> str:
        """Take a waiting job out of the queue, or ask a running one to stop: it saves its state first."""
        with self._files.changing():
            job = self._find(identifier)
            now = time.time()
            if job.end is not None:
                raise StudioError(409, f"a job that is {job.end.state}", "a waiting or running job", "remove it")
            if job.is_waiting:
                end = JobEnd(time_s=now, state="cancelled", why="cancelled before it was started")
                self._files.write(job.model_copy(update={"cancelled_s": now, "end": end}))
                return "cancelled"
            self._files.write(job.model_copy(update={"cancelled_s": now}))  # before the signal: the end depends on it
            if job.start is not None and not ask_to_stop(job.start) and self._files.is_alive(job):
                raise StudioError(
                    409, "a process that this studio cannot signal", "a process of this user",
                    f"gracetune stop {job.output}",
                )  # fmt: skip
        self._wake.set()
        return "requested: it completes its step and saves first"

    def remove(self, identifier: str) -> None:
        """Forget a job that has ended, with its log. Its run folder stays."""
        with self._files.changing():
            job = self._find(identifier)
            if job.end is None and not job.is_waiting and self._end_of(job) is None:
                raise StudioError(409, "a running job", "a job that has ended or waits", "cancel it first")
            self._children.pop(job.id, None)
            self._files.remove(job)

    def _find(self, identifier: str) -> QueuedJob:
        found = next((job for job in self._files.jobs() if job.id == identifier), None)
        if found is None:
            raise StudioError(404, "no such job", "the id of a job in the queue", "reload the list: GET api/queue")
        return found

    # -- reading ------------------------------------------------------------------------------------------------------

    def state(self, *, control: bool) -> dict[str, Any]:
        """The whole queue as JSON: running jobs, then waiting ones, then those that ended, the last one first."""
        jobs = self._files.jobs()
        waiting = [job for job in jobs if job.is_waiting]
        rows = [self._row(job, waiting.index(job) + 1 if job.is_waiting else None) for job in jobs]
        order = {"running": 0, "waiting": 1}
        rows.sort(key=lambda row: (order.get(row["state"], 2), row["position"] or 0, -(row["ended_s"] or 0)))
        return {"jobs": rows, "runner": self._runner_state(control)}

    def _runner_state(self, control: bool) -> dict[str, Any]:
        if self._trouble:
            return {"active": False, "why": self._trouble}
        if self._lock is not None and self._thread is not None and self._thread.is_alive():
            gpus = [slot for slot in self._slots if slot is not None]
            return {"active": True, "why": f"one run at a time on each of {len(gpus)} GPUs" if len(gpus) > 1
                    else "one run at a time"}  # fmt: skip
        if self._files.is_runner_active():
            return {"active": True, "why": "another studio of this folder starts the jobs"}
        return {"active": False, "why": "it starts" if control else "jobs are started with --control only"}

    def _row(self, job: QueuedJob, place: int | None) -> dict[str, Any]:
        end = job.end if job.end is not None or job.start is None else self._end_of(job)
        state = "waiting" if job.is_waiting else "running" if end is None else end.state
        why = end.why if end is not None else ""
        if state == "running" and job.cancelled_s is not None:
            why = "stopping: it completes its step and saves first"
        return {
            "id": job.id,
            "name": job.name,
            "config": job.config,
            "state": state,
            "position": place,
            "run": self._runs.id_of(Path(job.output)),
            "gpu": job.start.gpu if job.start else None,
            "added_s": job.added_s,
            "started_s": job.start.time_s if job.start else None,
            "ended_s": end.time_s if end else None,
            "exit_code": end.exit_code if end else None,
            "log": [redact(line) for line in self._files.last_lines(job, _LOG_LINES)],
            "why": why,
        }


def slots_of(gpus: int, visible: str | None) -> Sequence[str | None]:
    """The value of CUDA_VISIBLE_DEVICES for each job that may run at a time. Without a GPU: one job without a value.

    `gpus` is the number of GPUs that this process may use, and `visible` its own CUDA_VISIBLE_DEVICES.
    """
    named = [name.strip() for name in (visible or "").split(",") if name.strip()]
    return (named or [*map(str, range(gpus))])[:gpus] or (None,)


def _between(ordered: Sequence[QueuedJob], place: int) -> float | None:
    """A position for the job at this place, between those of its neighbours; None if there is no room."""
    before = ordered[place - 1].position if place else ordered[place + 1].position - 2
    after = ordered[place + 1].position if place + 1 < len(ordered) else before + 2
    return (before + after) / 2 if after - before > _NEAREST else None


def _never_began(job: QueuedJob, files: JobFiles) -> bool:
    """Whether the studio was killed after it wrote the start, and before there was a process."""
    return job.start is not None and job.start.pid is None and not files.last_lines(job, 1)


def _end_with(job: QueuedJob, code: int) -> JobEnd:
    now = time.time()
    if code == 0:
        return JobEnd(time_s=now, state="done", exit_code=code)
    if job.cancelled_s is not None:
        saved = "its state is saved" if code == _SAVED else f"it ended with {_exit_words(code)}"
        return JobEnd(time_s=now, state="cancelled", exit_code=code, why=f"cancelled; {saved}")
    if code == _SAVED:
        why = "interrupted, its state is saved; add its config again to continue"
        return JobEnd(time_s=now, state="interrupted", exit_code=code, why=why)
    return JobEnd(time_s=now, state="failed", exit_code=code, why=f"it ended with {_exit_words(code)}; see its log")


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _end_unseen(job: QueuedJob) -> JobEnd:
    """The end of a job that no studio saw, from the event log of its run."""
    stopped: EndState = "interrupted" if job.cancelled_s is None else "cancelled"
    found = _last_end(Path(job.output) / "logs" / "events.jsonl", job.start.time_s if job.start else 0.0)
    if found is None:
        why = "its process ended without an outcome; add its config again to continue from its last checkpoint"
        return JobEnd(time_s=time.time(), state=stopped, why=why)
    time_s, ended = found
    if ended.outcome == "finished":
        return JobEnd(time_s=time_s, state="done", why="it ended while no studio was running")
    if ended.outcome == "interrupted":
        return JobEnd(time_s=time_s, state=stopped, why=f"{ended.reason or 'interrupted'}; its state is saved")
    return JobEnd(time_s=time_s, state="failed", why=ended.reason or "see its log")


def _last_end(log: Path, since_s: float) -> tuple[float, RunEnded] | None:
    """When and how the last process of a run ended, if it was after `since_s`."""
    try:
        with os.fdopen(open_regular(log), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read(_TAIL).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if b"RunEnded" in line:
            with suppress(NotAnEventError):
                record = from_line(line)
                if isinstance(record.event, RunEnded):
                    return (record.time_s, record.event) if record.time_s >= since_s - 1 else None
    return None


# -- requests ---------------------------------------------------------------------------------------------------------


def routes(queue: JobQueue, *, control: bool) -> list[Route]:
    async def show(_request: Request) -> Response:
        return json_reply(await to_thread.run_sync(lambda: queue.state(control=control)))

    async def add(request: Request) -> Response:
        config = (await json_body(request)).get("config")
        if not isinstance(config, str) or not config.strip() or "\0" in config or len(config) > min(4096, LARGEST_FILE):
            raise StudioError(400, "no config", "the path of a config", '{"config": "photos.yaml"}')
        return json_reply(await to_thread.run_sync(queue.add, Path(config)))

    async def change(request: Request) -> Response:
        job, action = request.path_params["job"], request.path_params["action"]
        message = "done"
        if action in ("up", "down"):
            await to_thread.run_sync(queue.move, job, -1 if action == "up" else 1)
        elif action == "cancel":
            message = await to_thread.run_sync(queue.cancel, job)
        elif action == "remove":
            await to_thread.run_sync(queue.remove, job)
        else:
            raise StudioError(404, f"no action {action[:40]!r}", "up, down, cancel or remove", "POST api/queue/JOB/up")
        return json_reply({"message": message})

    return [
        Route("/api/queue", show),
        Route("/api/queue", add, methods=["POST"]),
        Route("/api/queue/{job}/{action}", change, methods=["POST"]),
    ]

"""Requests to a running job from other processes: validate, save, stop. Each is a file in the run's folder.

    validate-now   generate the samples after the current step, as SIGUSR1 does
    save-now       save a checkpoint after the current step
    stop-now       complete the current step, save, and end, as SIGTERM does

`gracetune validate-now RUN`, `gracetune save-now RUN`, `gracetune stop RUN` and the studio create them; `touch` does
too. The job reads them between its steps (`requested.py`), removes each and records it as an event. The file's text
names the source of the request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from gracetune.checkpoint.folder import LOCK_FILE
from gracetune.errors import ConfigError, Problem
from gracetune.storage.atomic import write_file
from gracetune.storage.locks import lock
from gracetune.storage.os_errors import explain

RequestName = Literal["validate", "save", "stop"]
_LONGEST = 64
"""Bytes of a request's file that are read."""


class RequestSource(StrEnum):
    """How a request was made."""

    COMMAND = "command"
    STUDIO = "studio"
    FILE = "file"
    """The file was created in another way, by `touch` for example."""


@dataclass(frozen=True)
class RunRequest:
    name: RequestName
    file: str
    promise: str
    """What happens then, for the user."""
    instead: str
    """What to do where no run is active."""


REQUESTS: dict[RequestName, RunRequest] = {
    "validate": RunRequest(
        "validate", "validate-now", "samples will appear in samples/ after the current step",
        "gracetune train CONFIG --set validation.at_start=true generates samples when a run starts",
    ),
    "save": RunRequest(
        "save", "save-now", "a checkpoint will appear in checkpoints/ after the current step",
        "a run that has ended has saved its last step",
    ),
    "stop": RunRequest(
        "stop", "stop-now", "the run ends after the current step, saved; the same command resumes it",
        "`ps aux | grep gracetune` shows other runs",
    ),
}  # fmt: skip


def ask(run_folder: Path, request: RunRequest) -> str:
    """Make a request for the command line, and return a line for the user."""
    folder = run_folder.expanduser().absolute()
    if not (folder / "checkpoints").is_dir():
        problem = "no such folder" if not folder.is_dir() else "a folder without checkpoints/"
        raise ConfigError([Problem("RUN", problem, "the output folder of a run", "check the path", str(folder))])
    if not is_running(folder):
        found, expected = "no run is active here", "a running job"
        raise ConfigError([Problem("RUN", found, expected, request.instead, str(folder))])
    create(folder, request, RequestSource.COMMAND)
    return f"requested: {request.promise} ({folder})"


def create(folder: Path, request: RunRequest, source: RequestSource) -> None:
    """Create the file of a request. It does not check that a run is active."""
    write_file(folder / request.file, f"{source}\n".encode())


def is_running(folder: Path) -> bool:
    """Whether a run uses this folder: it holds a lock on its checkpoints while its process lives."""
    try:
        descriptor = os.open(folder / "checkpoints" / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return lock(descriptor, exclusive=True) == "busy"
    finally:
        os.close(descriptor)


# -- in the job -------------------------------------------------------------------------------------------------------


def discard(folder: Path) -> None:
    """Remove requests that an earlier process left unread. Raises OSError."""
    for request in REQUESTS.values():
        (folder / request.file).unlink(missing_ok=True)


class RequestFiles:
    """Reads the requests to a job. A file that cannot be removed is ignored: it would be read after every step."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._stuck: set[RequestName] = set()

    def take(self, names: Iterable[RequestName] | None = None) -> dict[RequestName, str]:
        """The requests since the last call, of these names or of all, and how each was made."""
        found = {name: self._take(REQUESTS[name]) for name in names or REQUESTS}
        return {name: str(source) for name, source in found.items() if source is not None}

    def _take(self, request: RunRequest) -> RequestSource | None:
        file = self._folder / request.file
        try:
            if not file.exists():
                return None
            source = _source_of(file)
            file.unlink(missing_ok=True)
        except OSError as error:
            if request.name not in self._stuck:
                self._warn(f"{request.file} is ignored, because it cannot be removed: {explain(error, file).found}")
            self._stuck.add(request.name)
            return None
        return source


def _source_of(file: Path) -> RequestSource:
    """The first word of the file. It may be a pipe or a folder, which are not read."""
    if not file.is_file():
        return RequestSource.FILE
    with file.open("rb") as opened:
        word = opened.read(_LONGEST).decode("ascii", "replace").strip()
    return RequestSource(word) if word in list(RequestSource) else RequestSource.FILE

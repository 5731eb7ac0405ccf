"""Uploads to the hub, beside the work that makes the files. A failure is reported and never raised."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gracetune.hub.access import HubAccess, unreachable_errors, why, without_bars
from gracetune.storage.atomic import link_or_copy
from gracetune.storage.os_errors import explain

Report = Callable[[str], None]
_ATTEMPTS: Final = 3
_PINNED: Final = ".uploads"


@dataclass(frozen=True)
class Upload:
    """Files that belong into one commit."""

    files: Mapping[str, Path]
    """Path in the repository -> file or folder on this disk, as it was when it was handed over."""
    message: str
    originals: tuple[Path, ...]
    """Where they were: for the command that uploads them by hand."""


class HubUploads:
    """One repository that a run uploads to, in a thread of its own. Files are pinned by links until they are there, so
    that a run may remove its own names for them meanwhile."""

    def __init__(
        self, repo: str, folder: Path, access: HubAccess, *, private: bool, card: str, say: Report, warn: Report
    ) -> None:
        """`folder` is the run's own, where files are pinned; `card` the README of a repository that has none."""
        self._repo, self._folder, self._access, self._private, self._card = repo, folder, access, private, card
        self._say, self._warn = say, warn
        self._waiting: queue.Queue[Upload | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._count = 0

    def begin(self) -> None:
        """Make the repository: what is wrong with the token is known before the first step."""
        shutil.rmtree(self._folder / _PINNED, ignore_errors=True)  # of a process that was killed
        if self._access.offline is not None:
            self._warn(f"push_to_hub: {self._access.offline} forbids asking the hub, so nothing is uploaded; "
                       f"afterwards, with network: hf upload {self._repo} {self._folder}")  # fmt: skip
            return
        try:
            self._make_repo()
        except _failures() as error:
            self._warn(f"push_to_hub: {self._repo} cannot be made on the hub ({why(error)}); it is tried again with "
                       "the first upload. To log in again: hf auth login")  # fmt: skip
        else:
            self._say(f"push_to_hub: results are uploaded to {self._repo}")

    def add(self, files: Sequence[Path], *, below: str = "", message: str) -> None:
        """Upload files or folders, by and by. `below` is a folder of the repository."""
        if self._access.offline is not None:
            return
        prefix = f"{below.strip('/')}/" if below else ""
        try:
            pinned = {f"{prefix}{path.name}": self._pin(path) for path in files}
        except OSError as error:
            found = explain(error, files[0], access="read").found
            self._warn(f"push_to_hub: {found}; by hand: {self._command(files[0], prefix)}")
            return
        self._waiting.put(Upload(pinned, message, tuple(files)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait until everything is there, or has failed."""
        if self._thread is not None:
            if not self._waiting.empty():
                self._say(f"waiting for uploads to {self._repo}")
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        shutil.rmtree(self._folder / _PINNED, ignore_errors=True)

    def _work(self) -> None:
        while (upload := self._waiting.get()) is not None:
            failed = self._attempt(upload)
            names = ", ".join(upload.files)
            if failed is None:
                self._say(f"uploaded to {self._repo}: {names}")
            else:
                command = self._command(upload.originals[0], next(iter(upload.files)))
                self._warn(f"push_to_hub: {names} could not be uploaded to {self._repo} ({failed}); by hand: {command}")

    def _attempt(self, upload: Upload) -> str | None:
        """Why it failed, or None."""
        failed = None
        for _ in range(_ATTEMPTS):
            try:
                with without_bars():
                    self._make_repo()
                    self._commit(upload)
                return None
            except _failures() as error:
                failed = why(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        return failed

    def _make_repo(self) -> None:
        url = self._api().create_repo(self._repo, private=self._private, exist_ok=True)
        self._repo = str(url.repo_id)  # with the owner, where the config names none

    def _commit(self, upload: Upload) -> None:
        from huggingface_hub import CommitOperationAdd

        api = self._api()
        added = [
            CommitOperationAdd(path_in_repo=inside, path_or_fileobj=str(file))
            for name, place in upload.files.items()
            for inside, file in _each_file(name, place)
        ]
        if self._card and not api.file_exists(self._repo, "README.md"):
            added.append(CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=self._card.encode()))
        api.create_commit(self._repo, added, commit_message=upload.message)

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._access.endpoint)

    def _pin(self, path: Path) -> Path:
        self._count += 1
        target = self._folder / _PINNED / f"{self._count}" / path.name
        target.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, target, copy_function=link_or_copy)
        else:
            link_or_copy(str(path), str(target))
        return target

    def _command(self, path: Path, inside: str) -> str:
        return f"hf upload {self._repo} {path} {inside.rstrip('/') or path.name}"


def _failures() -> tuple[type[Exception], ...]:
    """RuntimeError is what huggingface_hub makes of a failed transfer of a large file, ValueError of a wrong name."""
    return (*unreachable_errors(), ValueError, RuntimeError)


def _each_file(name: str, place: Path) -> list[tuple[str, Path]]:
    if not place.is_dir():
        return [(name, place)]
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return [(f"{name}/{path.relative_to(place).as_posix()}", path) for path in files]

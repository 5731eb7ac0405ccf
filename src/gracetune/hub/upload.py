"""Background uploads to the hub while a run continues. Failures are reported and never raised."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gracetune.hub.access import HubAccess, unreachable_errors, why, without_bars
from gracetune.storage.atomic import link_or_copy
from gracetune.storage.os_errors import explain
from gracetune.storage.transfer import RetryPolicy

Report = Callable[[str], None]
_PINNED: Final = ".uploads"
"""The subfolder of the run folder with links to files that still have to be uploaded."""


@dataclass(frozen=True)
class Upload:
    """The files of one commit."""

    files: Mapping[str, Path]
    """Path in the repository -> pinned file or folder on this disk."""
    message: str
    originals: tuple[Path, ...]
    """The original paths, for the command that uploads them by hand."""


class HubUploads:
    """Uploads to one repository in a background thread.

    Files are pinned by hard links until they are uploaded, so that the run may delete them meanwhile.
    """

    def __init__(
        self, repo: str, folder: Path, access: HubAccess, *, private: bool, card: str, report: Report, warn: Report,
        retry_policy: RetryPolicy = RetryPolicy(attempts=3),  # noqa: B008 - frozen
    ) -> None:  # fmt: skip
        """`folder` is the run folder, where files are pinned. `card` becomes the README of a repository without one.

        `report` and `warn` are also called from the background thread.
        """
        self._repo, self._folder, self._access, self._private, self._card = repo, folder, access, private, card
        self._report, self._warn, self._retry_policy = report, warn, retry_policy
        self._waiting: queue.Queue[Upload | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._count = 0

    def begin(self) -> None:
        """Create the repository now, so that a problem with the token is reported before the first step."""
        shutil.rmtree(self._folder / _PINNED, ignore_errors=True)  # left by a process that was killed
        if self._access.offline is not None:
            self._warn(f"push_to_hub: {self._access.offline} forbids access to the hub, so nothing is uploaded; "
                       f"upload later with: hf upload {self._repo} {self._folder}")  # fmt: skip
            return
        try:
            self._make_repo()
        except _failures() as error:
            self._warn(f"push_to_hub: {self._repo} cannot be created on the hub ({why(error)}); the first upload "
                       "tries again. To log in again: hf auth login")  # fmt: skip
        else:
            self._report(f"push_to_hub: results are uploaded to {self._repo}")

    def add(self, files: Sequence[Path], *, below: str = "", message: str) -> None:
        """Queue files or folders for upload. `below` is the target folder in the repository."""
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
        """Wait until every queued upload has succeeded or failed."""
        if self._thread is not None:
            if not self._waiting.empty():
                self._report(f"waiting for uploads to {self._repo}")
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        shutil.rmtree(self._folder / _PINNED, ignore_errors=True)

    def _work(self) -> None:
        while (upload := self._waiting.get()) is not None:
            failed = self._attempt(upload)
            names = ", ".join(upload.files)
            if failed is None:
                self._report(f"uploaded to {self._repo}: {names}")
            else:
                command = self._command(upload.originals[0], next(iter(upload.files)))
                self._warn(f"push_to_hub: {names} could not be uploaded to {self._repo} ({failed}); by hand: {command}")

    def _attempt(self, upload: Upload) -> str | None:
        """Upload in several attempts. Returns the reason of the last failure, or None on success."""
        pauses = self._retry_policy.pauses()
        while True:
            try:
                with without_bars():
                    self._make_repo()
                    self._commit(upload)
                return None
            except _failures() as error:
                failed = why(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            pause = next(pauses, None)
            if pause is None:
                return failed
            time.sleep(pause)

    def _make_repo(self) -> None:
        url = self._api().create_repo(self._repo, private=self._private, exist_ok=True)
        self._repo = str(url.repo_id)  # the hub adds the owner if the config names none

    def _commit(self, upload: Upload) -> None:
        from huggingface_hub import CommitOperationAdd

        api = self._api()
        added = [
            CommitOperationAdd(path_in_repo=inside, path_or_fileobj=str(file))
            for name, source in upload.files.items()
            for inside, file in _each_file(name, source)
        ]
        if self._card and not api.file_exists(self._repo, "README.md"):
            added.append(CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=self._card.encode()))
        api.create_commit(self._repo, added, commit_message=upload.message)

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._access.endpoint)

    def _pin(self, path: Path) -> Path:
        """Hard-link a file or folder below `.uploads`, in a folder of its own because names may repeat."""
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
    """The exceptions that count as a failed upload.

    huggingface_hub raises RuntimeError when a large file fails to transfer, and ValueError for an invalid name.
    """
    return (*unreachable_errors(), ValueError, RuntimeError)


def _each_file(name: str, source: Path) -> list[tuple[str, Path]]:
    """The path in the repository and the local path of a file, or of each file in a folder."""
    if not source.is_dir():
        return [(name, source)]
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    return [(f"{name}/{path.relative_to(source).as_posix()}", path) for path in files]

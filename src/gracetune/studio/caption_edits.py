"""Edits of caption files: atomic, only inside a dataset's folder, rejected if the file has changed, and undoable.

What a file held before each edit is kept in `ROOT/.studio/captions/<hash of its path>/<time>.json`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.config.dataset_config import Captions, Dataset
from gracetune.config.limits import LARGEST_FILE
from gracetune.data.caption_tables import why_no_captions
from gracetune.data.captions import caption_path, lines
from gracetune.storage.atomic import sweep, write_file
from gracetune.storage.folders import make_private_folder
from gracetune.storage.locks import lock, open_lock_file
from gracetune.storage.regular_files import read_small_file
from gracetune.studio.replies import StudioError

FORMAT: Final = "gracetune-caption-edit"
VERSION: Final = 1
KEPT = 100
"""Edits of one file that can be undone."""
_ID = re.compile(r"([0-9]{20})-[0-9a-f]{6}")


class CaptionEdit(BaseModel):
    """One edit: what the file held before (None: there was none) and after."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["gracetune-caption-edit"] = FORMAT
    version: Literal[1] = VERSION
    file: str
    before: str | None
    after: str
    time_s: float


@dataclass(frozen=True)
class CaptionFolder:
    """The folder of a dataset whose captions are text files beside the media files."""

    root: Path
    options: Captions

    def file_of(self, media: str) -> Path:
        """The caption file of a media file: the one that is there, or the one to create.

        Raises StudioError if it is not inside the folder; links are followed first.
        """
        extension = self.options.extension
        spellings = dict.fromkeys([extension, extension.lower(), extension.upper()])
        names = [caption_path(media, one) for one in spellings]
        name = next((one for one in names if os.path.lexists(self.root / one)), names[0])
        path, root = (self.root / name).resolve(), self.root.resolve()
        if not path.is_relative_to(root) or path.suffix != Path(name).suffix:
            raise StudioError(
                409, f"{name}, a link out of the dataset or to a file of another kind",
                "a caption file in the dataset's folder", "replace the link by a file",
            )  # fmt: skip
        return path

    def read(self, media: str) -> str | None:
        """The caption as it is written; None if there is no file."""
        return read_caption(self.file_of(media))


def why_not_editable(dataset: Dataset, root: Path) -> str:
    """Why the captions of a dataset cannot be edited here; empty if they can."""
    strategy = dataset.captions.strategy
    if strategy in ("filename", "instanceprompt"):
        source = "the file names" if strategy == "filename" else "`captions.instance_prompt`"
        return f"the captions come from {source}, not from files of their own"
    if strategy != "textfile":
        table = dataset.captions.table
        return f"the captions come from a table: {table.path if table is not None else strategy}"
    if dataset.has_local_copy:
        return f"these files are a copy of {dataset.path}; edit the captions there"
    if not dataset.reads_folder:
        return f"the files are read by the backend {dataset.type}, not from a folder"
    return "" if root.is_dir() else f"{root} is not a folder on this machine"


def read_caption(path: Path) -> str | None:
    try:
        return read_small_file(path, LARGEST_FILE).decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise StudioError(409, f"{path.name}, which is not UTF-8", "UTF-8 text", "save the file as UTF-8") from None


class CaptionEdits:
    """Saves and undoes edits. Thread-safe, also against other studios of the same folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, captions: CaptionFolder, media: str, text: str, was: str | None) -> str:
        """Write a caption if the file still holds `was` (None: does not exist). Returns the id for `undo`."""
        wrong = why_no_captions(lines(text, captions.options.split_lines))
        if wrong is not None or len(text) > LARGEST_FILE or "\0" in text or _has_half(text):
            found = wrong or ("text with a NUL or half a character" if len(text) <= LARGEST_FILE else "too long a text")
            raise StudioError(400, found, f"text of at most {LARGEST_FILE // 1024} KiB", "shorten or correct it")
        with self._locked():
            path = captions.file_of(media)
            before = read_caption(path)
            if _plain(before) != _plain(was):
                raise _changed_error(path, before)
            if before is not None and "\r\n" in before:
                text = _line_feeds(text).replace("\n", "\r\n")
            identifier = self._keep(CaptionEdit(file=str(path), before=before, after=text, time_s=time.time()))
            _write(path, text)
        return identifier

    def undo(self, captions: CaptionFolder, identifier: str) -> str:
        """Restore what a file held before an edit. It must be as that edit left it. Returns the file's path relative to
        the dataset's folder."""
        with self._locked():
            root = captions.root.resolve()
            record = next(self._folder.glob(f"*/{identifier}.json"), None) if _ID.fullmatch(identifier) else None
            edit = None if record is None else self._read(record)
            path = None if edit is None else Path(edit.file)
            if record is None or edit is None or path is None or not path.resolve().is_relative_to(root):
                raise StudioError(
                    404, "no such edit in this dataset", "the id that saving a caption returned", "reload"
                )
            path = path.resolve()
            now = read_caption(path)
            if _plain(now) != _plain(edit.after):
                raise _changed_error(path, now)
            if edit.before is None:
                path.unlink()
            else:
                _write(path, edit.before)
            record.unlink()
        return str(path.relative_to(root))

    def last(self, captions: CaptionFolder, media: str) -> str | None:
        """The id of the last edit that can be undone."""
        kept = self._kept(captions.file_of(media))
        return kept[-1] if kept else None

    def _keep(self, edit: CaptionEdit) -> str:
        folder = self._of(Path(edit.file))
        folder.mkdir(exist_ok=True)
        sweep(folder)
        kept = self._kept(Path(edit.file))
        # In order, whatever the clock does.
        number = max(time.time_ns(), int(kept[-1].partition("-")[0]) + 1 if kept else 0)
        identifier = f"{number:020}-{secrets.token_hex(3)}"
        write_file(folder / f"{identifier}.json", f"{edit.model_dump_json(indent=1)}\n".encode())
        for old in kept[: len(kept) + 1 - KEPT]:
            (folder / f"{old}.json").unlink(missing_ok=True)
        return identifier

    def _kept(self, path: Path) -> list[str]:
        return sorted(one.stem for one in self._of(path).glob("*.json") if _ID.fullmatch(one.stem))

    def _read(self, record: Path) -> CaptionEdit:
        try:
            return CaptionEdit.model_validate_json(read_small_file(record))
        except ValidationError:
            raise StudioError(409, f"{record.name}, a damaged file", "an edit", f"remove {record}") from None

    def _of(self, path: Path) -> Path:
        return self._folder / hashlib.sha256(os.fsencode(path)).hexdigest()[:24]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_private_folder(self._folder.parent)
        self._folder.mkdir(exist_ok=True)
        descriptor = open_lock_file(self._folder / "changes.lock")
        try:
            lock(descriptor, exclusive=True, wait=True)
            yield
        finally:
            os.close(descriptor)


def _write(path: Path, text: str) -> None:
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        mode = None
    write_file(path, text.encode())
    if mode is not None:
        path.chmod(mode)


def _changed_error(path: Path, now: str | None) -> StudioError:
    found = f"{path.name} was removed" if now is None else f"{path.name} has changed: {now[:200]}"
    return StudioError(409, found, "the caption that was shown", "reload it, then edit it again")


def _plain(text: str | None) -> str | None:
    """With line feeds only: a browser's text field has no others."""
    return None if text is None else _line_feeds(text)


def _line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _has_half(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)

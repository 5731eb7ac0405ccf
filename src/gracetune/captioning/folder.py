"""Caption the images of a folder and its subfolders. Each caption is written atomically beside its image; existing
caption files stay as they are.

To continue a command that was killed, run it again: images that have a caption are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL.Image import Image

from gracetune.captioning.caption_model import GeneratedCaption
from gracetune.captioning.kinds import Style
from gracetune.config.dataset_config import Captions
from gracetune.config.path_status import inspect_path
from gracetune.data.backend import Backend, LeftOut, survey
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.paths import is_hidden
from gracetune.data.captions import caption_path, with_trigger
from gracetune.data.errors import MissingFileError, UnreadableMediaError
from gracetune.data.media import kind_of
from gracetune.data.media.image import open_rgb
from gracetune.data.media.truncated import truncation
from gracetune.errors import ConfigError, Problem
from gracetune.storage.atomic import sweep, write_file

_READERS = 4
"""Threads that decode images."""


class Captioner(Protocol):
    def captions(self, images: Sequence[Image], style: Style) -> list[GeneratedCaption]: ...


@dataclass(frozen=True)
class CaptionTask:
    """The images of a folder that have no caption file yet."""

    root: Path
    missing: tuple[str, ...]
    """Relative paths of the images."""
    kept: int
    """Images whose caption file exists, even if it is empty."""
    sharing: tuple[str, ...]
    """Images that differ from an earlier one in their extension only, so both read the same caption file."""


@dataclass
class CaptionedFolder:
    """What happened to the images of a task."""

    written: list[str] = field(default_factory=list)
    """Relative paths of the caption files."""
    cut: int = 0
    """How many of the written captions reached the limit of the style."""
    kept: int = 0
    """Images whose caption file another program created in the meantime."""
    skipped: list[LeftOut] = field(default_factory=list)
    """Images without a caption, and why."""


def plan_captions(folder: Path) -> CaptionTask:
    """Find the images without a caption, in subfolders too. Raises ConfigError if it is no folder or has no images.

    Hidden files and folders are left out.
    """
    status = inspect_path(folder)
    if status.kind != "folder":
        problem = Problem("FOLDER", f"{folder}, {status.words}", "a folder of images", "check the spelling")
        raise ConfigError([problem])
    root = status.path.absolute()
    images = sorted(
        path for path in survey(LocalBackend(root)).files if not is_hidden(path) and kind_of(path) == "image"
    )
    if not images:
        problem = Problem(
            "FOLDER", f"{folder}, without images", "a folder of images", "pass the folder that contains them"
        )
        raise ConfigError([problem])
    extension = Captions().extension
    missing: dict[str, str] = {}
    kept, sharing = 0, []
    for path in images:
        spellings = [caption_path(path, one) for one in (extension, extension.upper())]
        if any(os.path.lexists(root / one) for one in spellings):
            kept += 1
        elif spellings[0] in missing:
            sharing.append(path)
        else:
            missing[spellings[0]] = path
    return CaptionTask(root, tuple(missing.values()), kept, tuple(sharing))


def write_captions(
    task: CaptionTask,
    captioner: Captioner,
    style: Style,
    *,
    trigger: str | None,
    batch: int,
    result: CaptionedFolder,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Caption the missing images, `batch` at a time.

    `result` is updated as captions are written, so it is also valid after an interrupt.
    """
    for folder in {(task.root / path).parent for path in task.missing}:
        sweep(folder)
    backend, done = LocalBackend(task.root), 0
    for paths, opened in _batches(backend, task.missing, batch):
        images = {path: image for path, image in zip(paths, opened, strict=True) if isinstance(image, Image)}
        for path, image in zip(paths, opened, strict=True):
            if isinstance(image, str):
                result.skipped.append(LeftOut(path, image))
        found = captioner.captions(list(images.values()), style) if images else []
        for path, caption in zip(images, found, strict=True):
            _write(task.root, path, caption, style, trigger, result)
        done += len(paths)
        on_done(done, len(task.missing))


def _write(
    root: Path, path: str, caption: GeneratedCaption, style: Style, trigger: str | None, result: CaptionedFolder
) -> None:
    if not caption.text:
        result.skipped.append(LeftOut(path, "the model returned an empty caption"))
        return
    name = caption_path(path, Captions().extension)
    try:
        write_file(root / name, f"{_with_trigger(caption.text, trigger, style)}\n".encode(), replace=False)
    except FileExistsError:
        result.kept += 1
        return
    result.written.append(name)
    result.cut += caption.cut


def _with_trigger(text: str, trigger: str | None, style: Style) -> str:
    trigger = (trigger or "").strip()
    if style == "tags" and trigger:
        tags = [tag for tag in text.split(", ") if tag.lower() != trigger.lower()]
        return ", ".join([trigger, *tags])
    return with_trigger(text, trigger)


def _batches(backend: Backend, paths: Sequence[str], size: int) -> Iterator[tuple[Sequence[str], list[Image | str]]]:
    """Batches of opened images. The next batch is decoded while the model works on this one."""
    batches = [paths[start : start + size] for start in range(0, len(paths), size)]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="images") as pool:
        ahead: list[Future[Image | str]] = []
        for number, batch in enumerate(batches):
            current = ahead or [pool.submit(_open, backend, path) for path in batch]
            following = batches[number + 1] if number + 1 < len(batches) else ()
            ahead = [pool.submit(_open, backend, path) for path in following]
            yield batch, [one.result() for one in current]


def _open(backend: Backend, path: str) -> Image | str:
    """The image, or why it cannot be read."""
    try:
        data = backend.read(path)
        return truncation(data) or open_rgb(data, path)
    except UnreadableMediaError as error:
        return error.reason
    except MissingFileError:
        return "it was removed before it could be read"

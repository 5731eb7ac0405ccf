"""Files and folders that a config reads: their keys in a `RunConfig`, and how relative paths are resolved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from gracetune.config.draft import Draft, Path
from gracetune.config.native import VERSION_KEY
from gracetune.config.path_status import inspect_path


def find_beside(draft: Draft) -> None:
    """Resolve relative paths of a peer's file against its folder. A path that does not exist there stays as written.

    Paths in the `gracetune` block of such a file are not changed.
    """
    for path in _input_paths(draft):
        origin, value = draft.origins.get(path), draft.get(path)
        if origin is None or origin.kind != "file" or VERSION_KEY in origin.key.replace("[", ".").split("."):
            continue
        folders = dict.fromkeys(FilePath(file).parent for file in (origin.location, draft.file) if file)
        draft.put(path, _beside(value, [*folders]), origin)


def _beside(value: Any, folders: list[FilePath]) -> Any:
    if isinstance(value, list):
        return [_beside(one, folders) for one in value]
    if not isinstance(value, str) or not is_relative(value):
        return value
    paths = (folder / value for folder in folders if folder != FilePath())
    return next((str(candidate) for candidate in paths if inspect_path(candidate).kind in ("file", "folder")), value)


def is_relative(name: str) -> bool:
    """Whether a name is a relative path or a hub id, which cannot be told apart by their text."""
    return bool(name.strip()) and "://" not in name and not name.startswith(("/", "~", "\\"))


def _input_paths(draft: Draft) -> Iterator[Path]:
    yield from (("model", name) for name in ("path", "vae_path", "text_encoder_path", "assistant_adapter"))
    yield from (("adapter", "init_from"), ("optimizer", "rates_from"))
    for at in _positions(draft, ("datasets",)):
        yield from (("datasets", at, *rest) for rest in (("path",), ("mask", "path"), ("captions", "table", "path")))
    for at in _positions(draft, ("validation", "prompts")):
        yield ("validation", "prompts", at, "references")


def _positions(draft: Draft, path: Path) -> range:
    found = draft.get(path)
    return range(len(found)) if isinstance(found, list) else range(0)

"""Locate an upstream's code in a folder, in a wheel, or as installed. Nothing is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gracetune.errors import GracetuneError, Problem
from gracetune.integrations.points import Upstream

NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
ENVIRONMENTS = "lib/python3.*/site-packages"


class UpstreamError(GracetuneError):
    """The code of an upstream was not found."""

    def __init__(self, *, key: str, found: str, expected: str, hint: str) -> None:
        super().__init__(str(Problem(key=key, found=found, expected=expected, hint=hint)))


class Tree(Protocol):
    """Files below upstream's root, by path with slashes."""

    def has(self, path: str) -> bool:
        """Whether a file or folder of that name is there."""

    def files(self, folder: str) -> Iterator[str]:
        """Every file below a folder."""

    def read(self, path: str) -> bytes:
        """May raise OSError."""

    def metadata(self, distribution: str) -> bytes | None:
        """The METADATA of the distribution, if it lies beside the code. May raise OSError."""


@dataclass(frozen=True)
class Folder:
    root: Path

    def has(self, path: str) -> bool:
        return (self.root / path).exists()

    def files(self, folder: str) -> Iterator[str]:
        for parent, folders, names in os.walk(self.root / folder):
            folders[:] = sorted(name for name in folders if name not in NOT_CODE and not name.startswith("."))
            for name in sorted(names):
                yield (Path(parent) / name).relative_to(self.root).as_posix()

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def metadata(self, distribution: str) -> bytes | None:
        for folder in (self.root, self.root.parent):
            for found in sorted(folder.glob("*.dist-info/METADATA")):
                if _distribution_of(found.parent.name) == _same_name(distribution):
                    return found.read_bytes()
        return None


@dataclass(frozen=True)
class Wheel:
    archive: zipfile.ZipFile
    names: frozenset[str]
    root: str
    """Empty, or a folder name with a trailing slash."""

    def has(self, path: str) -> bool:
        return f"{self.root}{path}" in self.names

    def files(self, folder: str) -> Iterator[str]:
        start = f"{self.root}{folder}/"
        for name in self.archive.namelist():
            if name.startswith(start) and not name.endswith("/"):
                yield name.removeprefix(self.root)

    def read(self, path: str) -> bytes:
        return _member(self.archive, f"{self.root}{path}")

    def metadata(self, distribution: str) -> bytes | None:
        for name in self.archive.namelist():
            folder, _, rest = name.partition("/")
            if rest == "METADATA" and _distribution_of(folder) == _same_name(distribution):
                return _member(self.archive, name)
        return None


@contextmanager
def open_tree(upstream: Upstream, source: Path | None) -> Iterator[tuple[Tree, str]]:
    """The tree at `source`, or of the installed upstream, and its location."""
    if source is None:
        root = _installed(upstream)
        yield _folder(upstream, root, key=f"{upstream.title}, as installed"), str(root)
        return
    kind = _kind(upstream, source)
    if kind == "folder":
        yield _folder(upstream, source, key=f"--source {source}"), str(source)
        return
    try:
        archive = zipfile.ZipFile(source)
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise _unusable(upstream, source, f"an archive that cannot be opened: {error}") from error
    with archive:
        yield _wheel(upstream, source, archive), str(source)


def version_of(tree: Tree, upstream: Upstream) -> str | None:
    """The version from the code, else from metadata, else from pyproject.toml; None if unknown."""
    for file, variable in upstream.version_in:
        version = _assigned(tree, file, variable)
        if version is not None:
            return version
    try:
        metadata = tree.metadata(upstream.distribution)
    except OSError:
        metadata = None
    if metadata is not None:
        line = re.search(rb"^Version:\s*(\S+)", metadata, re.MULTILINE)
        if line is not None:
            return line.group(1).decode("utf-8", "replace")
    return _project_version(tree, upstream)


# -- parts ------------------------------------------------------------------------------------------------------------


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, NotImplementedError) as error:
        raise OSError(f"damaged in the archive: {error}") from error


def _kind(upstream: Upstream, source: Path) -> Literal["folder", "archive"]:
    try:
        if source.is_dir():
            return "folder"
        if zipfile.is_zipfile(source):
            return "archive"
        found = "neither a folder nor a wheel" if source.exists() else "nothing there"
    except (OSError, ValueError) as error:
        found = f"nothing that can be looked at: {error}"
    raise _unusable(upstream, source, found)


def _installed(upstream: Upstream) -> Path:
    try:
        distribution = importlib.metadata.distribution(upstream.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise UpstreamError(
            key=upstream.title,
            found=f"no distribution {upstream.distribution!r} in this Python environment",
            expected=f"{upstream.title}, installed here or named with --source",
            hint=f"gracetune overlay check {upstream.name} --source DIR_OR_WHEEL; {upstream.how_to_get}",
        ) from None
    root = Path(str(distribution.locate_file("")))
    if not _is_root(upstream, root):
        # An editable install points into a checkout. `find_spec` does not import a top-level package.
        spec = importlib.util.find_spec(upstream.distribution.replace("-", "_"))
        if spec is not None and spec.origin is not None and spec.submodule_search_locations:
            return Path(spec.submodule_search_locations[0])
    return root


def _folder(upstream: Upstream, given: Path, *, key: str) -> Folder:
    for root in _roots(upstream, given):
        if _is_root(upstream, root):
            return Folder(root)
    raise UpstreamError(key=key, found=_folder_contents(given), expected=_expected(upstream), hint=_hint(upstream))


def _is_root(upstream: Upstream, folder: Path) -> bool:
    return all((folder / mark).is_dir() for mark in upstream.marks)


def _roots(upstream: Upstream, given: Path) -> Iterator[Path]:
    for inside in upstream.inside:
        yield given / inside
    if given.name in {mark.partition("/")[0] for mark in upstream.marks}:
        yield given.parent  # the user named the package itself
    for environment in sorted(given.glob(ENVIRONMENTS)):
        for inside in upstream.inside:
            yield environment / inside


def _wheel(upstream: Upstream, source: Path, archive: zipfile.ZipFile) -> Wheel:
    names = frozenset(
        "/".join(parts[:length])
        for name in archive.namelist()
        if (parts := name.rstrip("/").split("/"))
        for length in range(1, len(parts) + 1)
    )
    for inside in upstream.inside:
        root = f"{inside}/" if inside else ""
        if all(f"{root}{mark}" in names for mark in upstream.marks):
            return Wheel(archive, names, root)
    names_found = sorted({name.partition("/")[0] for name in names})
    raise _unusable(upstream, source, f"an archive with {_few(names_found)}")


def _unusable(upstream: Upstream, source: Path, found: str) -> UpstreamError:
    return UpstreamError(key=f"--source {source}", found=found, expected=_expected(upstream), hint=_hint(upstream))


def _folder_contents(folder: Path) -> str:
    try:
        names = sorted(one.name for one in folder.iterdir())
    except OSError as error:
        return f"a folder that cannot be listed: {error.strerror}"
    return f"a folder with {_few(names)}" if names else "an empty folder"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _expected(upstream: Upstream) -> str:
    marks = " and ".join(f"{mark}/" for mark in upstream.marks)
    return f"{upstream.title}: a checkout, a site-packages folder, an environment or a wheel with {marks} in it"


def _hint(upstream: Upstream) -> str:
    return f"gracetune overlay check {upstream.name} --source DIR_OR_WHEEL"


def _same_name(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _distribution_of(dist_info: str) -> str:
    """`a_b-1.2.dist-info` -> `a-b`"""
    return _same_name(dist_info.removesuffix(".dist-info").rpartition("-")[0])


def _assigned(tree: Tree, file: str, variable: str) -> str | None:
    """The string that a module assigns to `variable`."""
    if not tree.has(file):
        return None
    try:
        body = ast.parse(tree.read(file)).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    for statement in body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        named = any(isinstance(target, ast.Name) and target.id == variable for target in statement.targets)
        if named and isinstance(statement.value.value, str):
            return statement.value.value
    return None


def _project_version(tree: Tree, upstream: Upstream) -> str | None:
    if not tree.has("pyproject.toml"):
        return None
    try:
        project = tomllib.loads(tree.read("pyproject.toml").decode("utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    if not isinstance(project, dict) or _same_name(str(project.get("name", ""))) != _same_name(upstream.distribution):
        return None
    version = project.get("version")
    return version if isinstance(version, str) else None

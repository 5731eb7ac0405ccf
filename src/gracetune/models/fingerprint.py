"""Which weights these are, in one short digest: caches and checkpoints made with other weights are not taken for ours.

Format version 2: xxh3-128 over the version and one line for every tensor, sorted: the xxh3-128 of its bytes, its dtype,
its shape, its name. So neither files nor folders nor shards nor their metadata count, and every byte of the weights
does: a text encoder in which somebody replaced a single row of the embedding table is another one.

Reading a text encoder of 11 GB takes seconds from the page cache and a minute from a slow disk, before every run. So
the digests can be kept in a file. They are taken from there while the weights' file is the same by path, device, inode,
size and time of change; the file may be removed at any time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.storage.atomic import write_file
from gracetune.storage.errors import WeightFileError
from gracetune.storage.regular_files import open_regular
from gracetune.storage.safetensors_headers import FileIdentity, TensorEntry, read_fully, unreadable
from gracetune.units import MIB

VERSION: Final = 2
_CHUNK: Final = MIB
_MAX_THREADS: Final = 16

Digests = Mapping[str, str]
"""Of the tensors of one file, by name."""


def fingerprint(tensors: Iterable[TensorEntry], remembered: Path | None = None) -> str:
    """Of the content of all these. `remembered`: the file digests are kept in; None reads every byte."""
    memory = _Memory(remembered)
    by_file: dict[Path, list[TensorEntry]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.path, []).append(tensor)
    if not by_file:
        raise ValueError("the fingerprint of no tensor at all would fit every model")
    lines: list[str] = []
    for path, entries in by_file.items():
        digests = _digests(path, entries, memory)
        lines += (f"{digests[one.name]} {one.dtype} {[*one.shape]} {one.name}" for one in entries)
    memory.save()
    return xxhash.xxh3_128_hexdigest("\n".join([f"weights {VERSION}", *sorted(lines)]).encode())


def _digests(path: Path, entries: list[TensorEntry], memory: _Memory) -> Digests:
    try:
        descriptor = open_regular(path)
        try:
            identity = FileIdentity.of(descriptor)
            known = memory.of(path, identity)
            lacking = [entry for entry in entries if entry.name not in known]
            with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
                found = pool.map(lambda entry: _digest(descriptor, entry), lacking)
                digests = {**known, **dict(zip((entry.name for entry in lacking), found, strict=True))}
        finally:
            os.close(descriptor)
    except OSError as error:
        raise WeightFileError([unreadable(path, error)]) from None
    if lacking:
        memory.keep(path, identity, digests)
    return digests


def _digest(descriptor: int, entry: TensorEntry) -> str:
    digest, end = xxhash.xxh3_128(), entry.start + entry.size
    buffer = memoryview(bytearray(min(_CHUNK, entry.size)))
    for offset in range(entry.start, end, _CHUNK):
        part = buffer[: min(_CHUNK, end - offset)]
        digest.update(part[: read_fully(descriptor, part, offset)])
    return digest.hexdigest()


# -- what was computed before -----------------------------------------------------------------------------------------


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    device: int
    inode: int
    size: int
    modified_ns: int
    tensors: dict[str, str]

    def is_of(self, identity: FileIdentity) -> bool:
        return FileIdentity(self.device, self.inode, self.size, self.modified_ns) == identity


class _Files(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    files: dict[str, _File]


class _Memory:
    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._files = self._read()
        self._changed = False

    def _read(self) -> dict[str, _File]:
        """Nothing where there is no file, or one that this release would not have written: it is only a memory."""
        try:
            found = None if self._file is None else _Files.model_validate_json(self._file.read_bytes())
        except (OSError, ValidationError):
            return {}
        return found.files if found is not None and found.version == VERSION else {}

    def of(self, path: Path, identity: FileIdentity) -> Digests:
        found = self._files.get(str(path.absolute()))
        return found.tensors if found is not None and found.is_of(identity) else {}

    def keep(self, path: Path, identity: FileIdentity, digests: Digests) -> None:
        self._files[str(path.absolute())] = _File(
            device=identity.device,
            inode=identity.inode,
            size=identity.size,
            modified_ns=identity.modified_ns,
            tensors=dict(digests),
        )
        self._changed = True

    def save(self) -> None:
        """Where it cannot be written the digests are computed again the next time, and that is all."""
        if self._file is None or not self._changed:
            return
        content = _Files(version=VERSION, files=self._files).model_dump_json().encode()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._file, content)
        except OSError:
            return

"""A digest of a set of weights. Caches and checkpoints store it, so that those made with other weights are rejected.

Format version 2: xxh3-128 over the version and one line per tensor, sorted. A line has the xxh3-128 of the tensor's
bytes, its dtype, its shape and its name. File names, folders, sharding and metadata do not count; every byte of the
weights does. A text encoder with a single replaced row in its embedding table has another fingerprint.

Reading an 11 GB text encoder takes seconds from the page cache and a minute from a slow disk, before every run. The
digests of tensors can therefore be remembered in a file. They are reused while the weight file's path, device, inode,
size and modification time are unchanged. The remembered file can be deleted at any time.
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
from gracetune.storage.regular_files import open_regular
from gracetune.storage.safetensors_headers import FileIdentity, TensorEntry, WeightFileError, read_fully, unreadable
from gracetune.units import MIB

VERSION: Final = 2
_CHUNK: Final = MIB
_MAX_THREADS: Final = 16

Digests = Mapping[str, str]
"""Tensor name -> digest, for the tensors of one file."""


def fingerprint(tensors: Iterable[TensorEntry], remembered: Path | None = None) -> str:
    """The fingerprint of all these tensors. `remembered` is the file that keeps digests; None reads every byte."""
    memory = _Memory(remembered)
    by_file: dict[Path, list[TensorEntry]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.path, []).append(tensor)
    if not by_file:
        raise ValueError("no tensors to fingerprint: expected at least one")
    lines: list[str] = []
    for path, entries in by_file.items():
        digests = _digests(path, entries, memory)
        lines += (f"{digests[one.name]} {one.dtype} {[*one.shape]} {one.name}" for one in entries)
    memory.save()
    return xxhash.xxh3_128_hexdigest("\n".join([f"weights {VERSION}", *sorted(lines)]).encode())


def _digests(path: Path, entries: list[TensorEntry], memory: _Memory) -> Digests:
    """The digests of a file's tensors. Computes those that are not remembered, several at a time."""
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
    """Hash one tensor's bytes in chunks. Uses positioned reads, so threads can share the descriptor."""
    digest, end = xxhash.xxh3_128(), entry.start + entry.size
    buffer = memoryview(bytearray(min(_CHUNK, entry.size)))
    for offset in range(entry.start, end, _CHUNK):
        part = buffer[: min(_CHUNK, end - offset)]
        digest.update(part[: read_fully(descriptor, part, offset)])
    return digest.hexdigest()


# -- remembered digests ------------------------------------------------------------------------------------------------


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
    """The file of remembered digests."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._files = self._read()
        self._changed = False

    def _read(self) -> dict[str, _File]:
        """Empty if the file is missing or was not written by this version: the digests can always be recomputed."""
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
        """Failing to write is not an error: the digests are computed again next time."""
        if self._file is None or not self._changed:
            return
        content = _Files(version=VERSION, files=self._files).model_dump_json().encode()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._file, content)
        except OSError:
            return

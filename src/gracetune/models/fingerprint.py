"""Digests of weights and of a model's other parts. Caches and checkpoints made with other weights are rejected.

Format version 2: xxh3-128 over the version and one line per tensor, sorted. A line has the xxh3-128 of the tensor's
bytes, its dtype, its shape and its name. File names, folders, sharding and metadata do not count; every byte of the
weights does. A text encoder with a single replaced row in its embedding table has another fingerprint.

Reading an 11 GB text encoder takes seconds from the page cache and a minute from a slow disk, before every run. The
digests of tensors can therefore be kept in a JSON file, the digest file. They are reused while the weight file's path,
device, inode, size and modification time are unchanged. The digest file can be deleted at any time.

A checkpoint can be resumed only with the same model: the same base weights of the trained denoisers, for which
`train/run_identity.py` calls `fingerprint`, and the same values of `part_fingerprints` for everything else. There, a
part with weights is fingerprinted by every byte of them and its configuration, a tokenizer or processor by all its
files. Plain configurations (the scheduler's, the denoisers', the pipeline's settings) are kept as JSON, so that a
message can name the setting that changed. Keys that only record which program wrote a file are ignored. The weights of
a denoiser that is not trained are not fingerprinted at all: they only affect generated samples, and reading 28 GB would
delay every first start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.models.hub_download import index_parts
from gracetune.models.layout import CONFIG, SCHEDULER, part_tensors, read_config, read_index
from gracetune.models.source import INDEX, ModelSource
from gracetune.models.spec import ModelFacts
from gracetune.storage.atomic import write_file
from gracetune.storage.os_errors import explained
from gracetune.storage.regular_files import open_regular
from gracetune.storage.safetensors_headers import FileIdentity, TensorEntry, WeightFileError, read_fully, unreadable
from gracetune.units import MIB

VERSION: Final = 2
_CHUNK: Final = MIB
_MAX_THREADS: Final = 16

Digests = Mapping[str, str]
"""Tensor name -> digest, for the tensors of one file."""


def fingerprint(tensors: Iterable[TensorEntry], digest_file: Path | None = None) -> str:
    """The fingerprint of all these tensors. `digest_file` keeps their digests; None reads every byte."""
    kept = _DigestFile(digest_file)
    by_file: dict[Path, list[TensorEntry]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.path, []).append(tensor)
    if not by_file:
        raise ValueError("no tensors to fingerprint: expected at least one")
    lines: list[str] = []
    for path, entries in by_file.items():
        digests = _digests(path, entries, kept)
        lines += (f"{digests[one.name]} {one.dtype} {[*one.shape]} {one.name}" for one in entries)
    kept.save()
    return xxhash.xxh3_128_hexdigest("\n".join([f"weights {VERSION}", *sorted(lines)]).encode())


def _digests(path: Path, entries: list[TensorEntry], kept: _DigestFile) -> Digests:
    """The digests of a file's tensors. Computes those that are not in the digest file, several at a time."""
    try:
        descriptor = open_regular(path)
        try:
            identity = FileIdentity.of(descriptor)
            known = kept.digests_of(path, identity)
            lacking = [entry for entry in entries if entry.name not in known]
            with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
                found = pool.map(lambda entry: _digest(descriptor, entry), lacking)
                digests = {**known, **dict(zip((entry.name for entry in lacking), found, strict=True))}
        finally:
            os.close(descriptor)
    except OSError as error:
        raise WeightFileError([unreadable(path, error)]) from None
    if lacking:
        kept.add(path, identity, digests)
    return digests


def _digest(descriptor: int, entry: TensorEntry) -> str:
    """Hash one tensor's bytes in chunks. Uses positioned reads, so threads can share the descriptor."""
    digest, end = xxhash.xxh3_128(), entry.start + entry.size
    buffer = memoryview(bytearray(min(_CHUNK, entry.size)))
    for offset in range(entry.start, end, _CHUNK):
        part = buffer[: min(_CHUNK, end - offset)]
        digest.update(part[: read_fully(descriptor, part, offset)])
    return digest.hexdigest()


# -- the digest file ---------------------------------------------------------------------------------------------------


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


class _DigestFile:
    """The digests kept from earlier runs. Entries of deleted weight files stay."""

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

    def digests_of(self, path: Path, identity: FileIdentity) -> Digests:
        """Empty if the weight file is new or changed."""
        found = self._files.get(str(path.absolute()))
        return found.tensors if found is not None and found.is_of(identity) else {}

    def add(self, path: Path, identity: FileIdentity, digests: Digests) -> None:
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


# -- all parts of a model ----------------------------------------------------------------------------------------------


_WRITERS = ("_name_or_path", "_diffusers_version", "transformers_version", "torch_dtype", "dtype", "architectures")
"""Keys of a config file that record which program wrote it, not what the part does."""


def part_fingerprints(source: ModelSource, facts: ModelFacts) -> dict[str, str]:
    """Fingerprint by part name, as in model_index.json: a digest, or JSON for a plain configuration. The settings in
    model_index.json itself are under that name.

    Missing parts are no error here; the code that loads them reports it."""
    index = read_index(source)
    denoisers, parts = {expert.component for expert in facts.experts}, index_parts(index)
    given = sorted(name for name, (_, cls) in parts.items() if cls is not None)
    settings = {name: value for name, value in index.items() if not name.startswith("_") and name not in parts}
    found = {name: _denoiser(source, name) if name in denoisers else _part(source, name) for name in given}
    return {**found, INDEX: _text(settings)}


def _denoiser(source: ModelSource, component: str) -> str:
    return _text(read_config(source, component))


def _part(source: ModelSource, component: str) -> str:
    folder = source.part(component)
    with explained("model.path", folder, access="read", elsewhere="set model.path to another copy"):
        if not folder.is_dir():
            return "not there"
        if (folder / SCHEDULER).is_file():
            return _text(read_config(source, component, SCHEDULER))
        if not (folder / CONFIG).is_file():
            return files_digest(folder)
    texts = [_text(read_config(source, component)), _weights(source, component)]
    return xxhash.xxh3_128_hexdigest("\n".join(texts).encode())


def _weights(source: ModelSource, component: str) -> str:
    try:
        tensors = part_tensors(source, component)
    except WeightFileError:
        return "not there"
    return fingerprint(tensors, source.fingerprints) if tensors else "none"


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(without_writers(config), sort_keys=True)


def without_writers(value: Any) -> Any:
    """A configuration without the keys that record its writer. Nested models (as in Qwen2.5-VL) have nested
    configurations with such keys of their own."""
    if not isinstance(value, dict):
        return value
    return {key: without_writers(one) for key, one in value.items() if key not in _WRITERS}


def files_digest(folder: Path) -> str:
    """A digest of the names and content of a folder's files, for small ones such as a tokenizer's or a processor's.

    Hidden files are skipped: they belong to file browsers or git.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()

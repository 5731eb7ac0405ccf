"""A record, stored beside the caches, of latent encoders that had to use tiling.

Tiling is part of an encoder's id. A pass that has to switch to tiling makes all latents again under the new id. The
next start must know that id in advance: to find, audit and clear the entries, and to skip an attempt that would run
out of memory.

    {"format": "gracetune-tiling", "version": 1, "encoders": {"<BLAKE2b-128 of the untiled id>": "<reason>"}}

After the file is removed, for example by `gracetune cache clear`, the next build tries without tiles again.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.cache.encoder import EncoderId
from gracetune.storage.atomic import write_file

FILE = "gracetune-tiling.json"
_FORMAT, _VERSION = "gracetune-tiling", 1


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = _FORMAT
    version: int = _VERSION
    encoders: dict[str, str]


class TilingNotes:
    """The record. I/O errors are ignored: the next build then finds out again. A foreign file is left unchanged."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE

    def why(self, untiled: EncoderId) -> str | None:
        """The reason why this encoder uses tiling, or None if it does not."""
        return self._read().get(_name(untiled))

    def remember(self, untiled: EncoderId, why: str) -> None:
        self._write({**self._read(), _name(untiled): why})

    def forget(self, untiled: EncoderId) -> None:
        known = self._read()
        if known.pop(_name(untiled), None) is not None:
            self._write(known)

    def _read(self) -> dict[str, str]:
        try:
            found = _Content.model_validate_json(self.file.read_bytes())
        except (OSError, ValidationError):
            return {}
        return {**found.encoders} if (found.format, found.version) == (_FORMAT, _VERSION) else {}

    def _write(self, encoders: dict[str, str]) -> None:
        try:
            if self.file.exists() and not self._read():
                return  # not our file: do not overwrite it
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.file, _Content(encoders=encoders).model_dump_json().encode())
        except OSError:
            return


def _name(encoder: EncoderId) -> str:
    return blake2b(json.dumps(asdict(encoder), sort_keys=True).encode(), digest_size=16).hexdigest()

"""A checkpoint that was opened: every byte has been checked, and each piece can be given back to its owner."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracetune.checkpoint.errors import CheckpointError, MissingPieceError, OtherRunError, listed, unreadable
from gracetune.checkpoint.manifest import (
    MANIFEST,
    BadManifestError,
    Manifest,
    NewerFormatError,
    file_stem,
    identity_differences,
    read_manifest,
)
from gracetune.checkpoint.pieces import Piece, Saved
from gracetune.errors import Problem
from gracetune.storage.checksums import difference
from gracetune.storage.safetensors_files import read_tensors


@dataclass(frozen=True)
class Damage:
    """What is wrong with a checkpoint that was complete once."""

    file: str
    found: str


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done when it was made."""
        return self.manifest.step

    def saved(self, piece: str, rank: int | None = None) -> Saved:
        """The contents of a piece; `rank` for one that each process has for itself."""
        stem = file_stem(piece, rank)
        try:
            value: dict[str, Any] = json.loads((self.path / f"{stem}.json").read_bytes())
        except OSError as error:
            raise unreadable(error, self.path) from error
        tensors = f"{stem}.safetensors"
        if tensors not in self.manifest.files:
            return Saved(value)
        # Copies: what safetensors gives may be the file itself, mapped, and retention will delete that one day.
        return Saved(value, {name: tensor.clone() for name, tensor in read_tensors(self.path / tensors).items()})

    def load(
        self, pieces: Sequence[Piece], *, per_rank: Sequence[Piece] = (), rank: int = 0, world_size: int = 1
    ) -> tuple[str, ...]:
        """Give every piece its state. Returns what the user should know; MissingPieceError before anything is loaded.

        With another number of processes, a per-rank piece of a rank that did not exist then keeps its fresh state.
        """
        shared, own = self.manifest.pieces, self.manifest.per_rank_pieces
        lacking = _without(pieces, shared) + _without(per_rank, own)
        if lacking:
            raise self._missing(lacking)
        for piece in pieces:
            _load(piece, self.saved(piece.name))
        if rank < self.manifest.world_size:
            for piece in per_rank:
                _load(piece, self.saved(piece.name, rank))
        return self._notes(pieces, per_rank, world_size)

    def _notes(self, pieces: Sequence[Piece], per_rank: Sequence[Piece], world_size: int) -> tuple[str, ...]:
        notes = []
        asked = {piece.name for piece in (*pieces, *per_rank)}
        unused = [name for name in (*self.manifest.pieces, *self.manifest.per_rank_pieces) if name not in asked]
        if unused:
            notes.append(f"{self.path.name} also holds {listed(unused)}, which this run does not use")
        before = self.manifest.world_size
        if before != world_size and per_rank:
            names = listed(piece.name for piece in per_rank)
            notes.append(
                f"{self.path.name} was made by {before} processes and is resumed by {world_size}: "
                f"the state of {names} is kept for those that existed then, and is new for others"
            )
        return tuple(notes)

    def _missing(self, lacking: list[str]) -> MissingPieceError:
        return MissingPieceError(
            Problem(
                f"no saved state of {listed(lacking)}",
                f"state of {listed((*self.manifest.pieces, *self.manifest.per_rank_pieces))}",
                "the state of everything this run is configured to use",
                "resume with the configuration that made the checkpoint, or start anew with --resume none",
                str(self.path),
            )
        )

    def differences(self, identity: Mapping[str, str]) -> tuple[str, ...]:
        """How the run that made it differs from this one."""
        return identity_differences(self.manifest.metadata.identity, identity)

    def refuse_other_run(self, identity: Mapping[str, str]) -> None:
        different = self.differences(identity)
        if different:
            raise other_run(self.path, different)


def _without(pieces: Iterable[Piece], names: Sequence[str]) -> list[str]:
    return [piece.name for piece in pieces if piece.name not in names]


def _load(piece: Piece, saved: Saved) -> None:
    piece.load(saved.json, saved.tensors)


def other_run(path: Path, different: Sequence[str]) -> OtherRunError:
    return OtherRunError(
        Problem(
            "a checkpoint of another run",
            "; ".join(different),
            "a checkpoint of the run that is configured",
            "the configuration of that run (config.yaml in its folder), or another folder for this one: "
            "--set output_dir=FOLDER; to begin there "
            f"with this state all the same (of an adapter of the same shape), add --resume {path} --allow-other-run",
            str(path),
        )
    )


def verify(path: Path) -> Checkpoint | Damage:
    """Read and compare every byte. CheckpointError where that is not possible at all."""
    try:
        manifest = read_manifest(path)
        for name, fact in manifest.files.items():
            found = difference(path / name, fact)
            if found is not None:
                return Damage(name, found)
    except NewerFormatError as error:
        hint = "resume with the release that made it, or start anew with --resume none"
        problem = Problem("a checkpoint of a newer release", str(error), "a checkpoint we can read", hint, str(path))
        raise CheckpointError(problem) from None
    except BadManifestError as error:
        return Damage(MANIFEST, str(error))
    except OSError as error:
        raise unreadable(error, path) from error
    return Checkpoint(path, manifest)

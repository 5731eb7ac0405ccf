"""Reading a checkpoint: verify every byte, then pass each part of the state to its owner."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracetune.checkpoint.errors import CheckpointError, MissingStateError, OtherRunError, list_names, read_error
from gracetune.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    BadManifestError,
    CheckpointManifest,
    OtherManifestError,
    difference,
    file_stem,
    identity_differences,
    read_manifest,
)
from gracetune.checkpoint.state_parts import CheckpointPart, SavedState
from gracetune.errors import Problem
from gracetune.storage.safetensors_files import read_tensors


@dataclass(frozen=True)
class Damage:
    """The damage of a checkpoint that was complete once."""

    file: str
    found: str


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """The number of optimizer steps done when it was written."""
        return self.manifest.step

    def json_of(self, part: str, rank: int | None = None) -> dict[str, Any]:
        """The JSON object of a state part. Pass `rank` for a part that each process saves separately."""
        try:
            value: dict[str, Any] = json.loads((self.path / f"{file_stem(part, rank)}.json").read_bytes())
        except OSError as error:
            raise read_error(error, self.path) from error
        return value

    def saved(self, part: str, rank: int | None = None, *, mapped: bool = False) -> SavedState:
        """The content of a state part. `mapped`: its tensors may be in a mapping of the file, so that a large state
        does not take memory twice."""
        value = self.json_of(part, rank)
        tensors = f"{file_stem(part, rank)}.safetensors"
        if tensors not in self.manifest.files:
            return SavedState(value)
        found = read_tensors(self.path / tensors)
        # Clone, because safetensors may return tensors in a mapping of the file, which is deleted at some time.
        return SavedState(value, found if mapped else {name: tensor.clone() for name, tensor in found.items()})

    def load(
        self,
        parts: Sequence[CheckpointPart],
        *,
        per_rank: Sequence[CheckpointPart] = (),
        rank: int = 0,
        world_size: int = 1,
        copied: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Load the state of all parts. Returns notes for the user.

        `copied` are the names of parts that keep no tensor, but copy it.

        Raises MissingStateError before anything is loaded. If the number of processes has grown, per-rank parts of new
        ranks keep their initial state.
        """
        shared, own = self.manifest.parts, self.manifest.per_rank_parts
        lacking = _without(parts, shared) + _without(per_rank, own)
        if lacking:
            raise self._missing(lacking)
        for part in parts:
            _load(part, self.saved(part.name, mapped=part.name in copied))
        if rank < self.manifest.world_size:
            for part in per_rank:
                _load(part, self.saved(part.name, rank))
        return self._notes(parts, per_rank, world_size)

    def _notes(
        self, parts: Sequence[CheckpointPart], per_rank: Sequence[CheckpointPart], world_size: int
    ) -> tuple[str, ...]:
        notes = []
        used = {part.name for part in (*parts, *per_rank)}
        unused = [name for name in (*self.manifest.parts, *self.manifest.per_rank_parts) if name not in used]
        if unused:
            notes.append(f"{self.path.name} also contains {list_names(unused)}, which this run does not use")
        before = self.manifest.world_size
        if before != world_size and per_rank:
            names = list_names(part.name for part in per_rank)
            notes.append(
                f"{self.path.name} was written by {before} processes and is resumed by {world_size}: "
                f"the state of {names} is restored for ranks that existed then and is new for others"
            )
        return tuple(notes)

    def _missing(self, lacking: list[str]) -> MissingStateError:
        return MissingStateError(
            Problem(
                f"no saved state of {list_names(lacking)}",
                f"state of {list_names((*self.manifest.parts, *self.manifest.per_rank_parts))}",
                "the state of everything that this run uses",
                "resume with the configuration that wrote the checkpoint, or start from step 0 with --resume none",
                str(self.path),
            )
        )

    def differences(self, identity: Mapping[str, str]) -> tuple[str, ...]:
        """Differences between the run that wrote the checkpoint and this run."""
        return identity_differences(self.manifest.metadata.identity, identity)

    def reject_other_run(self, identity: Mapping[str, str]) -> None:
        """Raise OtherRunError if another run wrote the checkpoint."""
        different = self.differences(identity)
        if different:
            raise other_run(self.path, different)


def _without(parts: Iterable[CheckpointPart], names: Sequence[str]) -> list[str]:
    return [part.name for part in parts if part.name not in names]


def _load(part: CheckpointPart, saved: SavedState) -> None:
    part.load(saved.json, saved.tensors)


def other_run(path: Path, different: Sequence[str]) -> OtherRunError:
    return OtherRunError(
        Problem(
            "a checkpoint of another run",
            "; ".join(different),
            "a checkpoint of the configured run",
            "use the configuration of that run (config.yaml in its folder), or another folder for this one: "
            "--set output_dir=FOLDER; to start there from this state anyway (if the adapter has the same shape), "
            f"add --resume {path} --allow-other-run",
            str(path),
        )
    )


def verify(path: Path) -> Checkpoint | Damage:
    """Verify every byte of a checkpoint. Raises CheckpointError if it cannot be read or has another format."""
    try:
        manifest = read_manifest(path)
        for name, fact in manifest.files.items():
            found = difference(path / name, fact)
            if found is not None:
                return Damage(name, found)
    except OtherManifestError as error:
        hint = "resume with the release that wrote it, or start from step 0 with --resume none; nothing was changed"
        problem = Problem("a checkpoint of another release", str(error), f"format version {VERSION}", hint, str(path))
        raise CheckpointError(problem) from None
    except BadManifestError as error:
        return Damage(MANIFEST, str(error))
    except OSError as error:
        raise read_error(error, path) from error
    return Checkpoint(path, manifest)

"""Take a checkpoint's state over, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gracetune.checkpoint.random_state import RandomState
from gracetune.checkpoint.resume import Start, begin, resolve
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex
from gracetune.data.loader import Loader
from gracetune.train.job import Job
from gracetune.train.output import RunFolder
from gracetune.train.pieces import PositionPiece, shared_pieces


def find_start(
    asked: str, store: CheckpointStore, folder: RunFolder, identity: Mapping[str, str], stages: Sequence[str],
    *, allow_other_run: bool,
) -> Start:  # fmt: skip
    """Where the run begins; its folder is taken. Refuses before anything in the folder is touched."""
    path, _ = resolve(asked, store)
    if path is None:
        folder.refuse_finished(stages)
    return begin(asked, store, identity, allow_other_run=allow_other_run)


def saved_epoch(start: Start) -> int:
    """Whose entries are wanted first, where some are drawn anew for each epoch."""
    return 0 if start.checkpoint is None else int(start.checkpoint.saved(PositionPiece.name).json["epoch"])


def refuse_other_data(start: Start, index: DataIndex, *, allowed: bool) -> None:
    """Before a model is loaded for nothing: the loader itself asks again when it takes its state over."""
    if start.checkpoint is not None:
        state = start.checkpoint.saved(PositionPiece.name).json["loader"]
        Loader(index, batch_size=1).load_state_dict(state, allow_other_data=allowed)


def restore(job: Job, config: RunConfig, start: Start, folder: RunFolder, allow_other_data: bool) -> tuple[str, ...]:
    """Returns what the user should know."""
    runtime = job.runtime
    if start.checkpoint is None:
        if runtime.is_main:
            folder.make(config)
        return start.notes
    pieces = shared_pieces(job, config, allow_other_data=allow_other_data)
    notes = start.checkpoint.load(
        pieces, per_rank=[RandomState(runtime.device)], rank=runtime.rank, world_size=runtime.world_size
    )
    told = [line for piece in pieces if isinstance(piece, PositionPiece) for line in piece.notes]
    if runtime.is_main:
        folder.make(config)
        if job.position.step < job.length.steps:
            told += folder.move_finished(job.trainee.trained, job.position.step)
    return (*start.notes, *notes, *told)

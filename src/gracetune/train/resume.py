"""Resume: find the checkpoint, check that it fits the run, and restore its state."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
from torch.optim import Optimizer

from gracetune.cache.required_entries import LatentItem
from gracetune.checkpoint.resume import ResumeStart, open_requested, resolve
from gracetune.checkpoint.state_parts import RandomState
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.environment import Environment
from gracetune.config.registry import reads_key
from gracetune.config.run_config import RunConfig, Training
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.fingerprint import Fingerprint, differences
from gracetune.data.index import DataIndex, freshness
from gracetune.data.loader import Loader
from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import ModelFacts
from gracetune.optim.aitoolkit_rates import ImportedRates, read_rates
from gracetune.optim.build import named_state
from gracetune.optim.element_rates import KeepsRates
from gracetune.train.output import RunFolder
from gracetune.train.runtime import Runtime
from gracetune.train.state_parts import CheckpointSource, shared_parts


def find_start(
    requested: str, store: CheckpointStore, folder: RunFolder, identity: Mapping[str, str], experts: Sequence[str],
    *, allow_other_run: bool, is_half_finished: bool,
) -> ResumeStart:  # fmt: skip
    """Find where the run starts. Changes nothing: `CheckpointStore.begin` takes the folder.

    `is_half_finished` means that a process was killed while it wrote the final weights; they are then not a result that
    stands in the way.
    """
    path, _ = resolve(requested, store)
    if path is None and not is_half_finished:
        folder.reject_finished(experts)
    return open_requested(requested, store, identity, allow_other_run=allow_other_run)


def resume_hint(store: CheckpointStore, environment: Environment, *, requested: str, processes: int) -> str:
    """The last checkpoint, and the command that resumes from it. For the message about a lost rank."""
    latest = store.latest()
    saved = "there is no checkpoint yet" if latest is None else f"the last checkpoint is {latest}"
    command = sys.orig_argv
    each = f"in each of the {processes} processes: "
    if environment.get("TORCHELASTIC_RUN_ID") is not None:  # the user typed the parent's command (torchrun, accelerate)
        with suppress(psutil.Error):
            command, each = psutil.Process(os.getppid()).cmdline() or command, ""
    if requested != "latest":
        command = [*_without_resume(command), "--resume", "latest"]
    return f"{saved}; resume with\n  {each}{shlex.join(command)}"


def _without_resume(command: Sequence[str]) -> list[str]:
    kept = [word for before, word in zip(("", *command), command, strict=False) if before != "--resume"]
    return [word for word in kept if word != "--resume" and not word.startswith("--resume=")]


def saved_epoch(start: ResumeStart) -> int:
    """The epoch at which the run starts. With `refresh_each_epoch`, its cache entries are needed first."""
    return 0 if start.checkpoint is None else int(start.checkpoint.saved("position").json["epoch"])


def reject_other_data(start: ResumeStart, index: DataIndex, *, allowed: bool) -> None:
    """Reject data that differs from the checkpoint's, before the model is loaded.

    The run's own loader checks again when it restores its state.
    """
    if start.checkpoint is not None:
        state = start.checkpoint.saved("position").json["loader"]
        Loader(index, batch_size=1).load_state_dict(state, allow_other_data=allowed)


def reject_other_data_early(
    start: ResumeStart, index: DataIndex, missing: Callable[[], Sequence[LatentItem]], *, allowed: bool
) -> None:
    """Reject data that differs from the checkpoint's, before anything is encoded.

    At this point the index still contains damaged files, which the checkpoint's data does not: they are found when they
    are encoded. Additional samples are therefore rejected only if they cannot all be damaged. `missing` returns the
    samples without cached latents; a damaged file is one of them.
    """
    if start.checkpoint is None or allowed:
        return
    before = Fingerprint.from_json(start.checkpoint.saved("position").json["loader"]["data"])
    if differences(before, index.fingerprint) and not _may_be_damaged(before, index, missing):
        reject_other_data(start, index, allowed=False)


_WORTH_DECODING: Final = 64
"""Largest number of samples to decode in this check. If more are missing, the caches themselves were removed, and
encoding will find the damaged files."""


def _may_be_damaged(before: Fingerprint, index: DataIndex, missing: Callable[[], Sequence[LatentItem]]) -> bool:
    """Whether the data may be the same once damaged files are left out."""
    now = index.fingerprint
    if before.datasets.keys() != now.datasets.keys():
        return False
    others = [one for one in index.datasets if now.datasets[one.id] != before.datasets[one.id]]
    more = {one.id: now.datasets[one.id].items - before.datasets[one.id].items for one in others}
    if any(more[id_] <= 0 or now.datasets[id_].settings != before.datasets[id_].settings for id_ in more):
        return False
    samples: dict[str, dict[str, LatentItem]] = {}
    for item in missing():
        samples.setdefault(item.dataset.id, {}).setdefault(item.item.path, item)
    uncached = {one.id for one in others if freshness(one.dataset) == "visit"}
    return all(id_ in uncached or _may_have_damaged(samples.get(id_, {}).values(), more[id_]) for id_ in more)


def _may_have_damaged(items: Collection[LatentItem], count: int) -> bool:
    """Whether at least `count` of the items may be damaged. Decodes items until the answer is known."""
    sound_allowed = len(items) - count
    if sound_allowed > _WORTH_DECODING:
        return True
    for item in items:
        try:
            item.index.load(item.ref)
        except UnreadableMediaError:
            continue
        sound_allowed -= 1
        if sound_allowed < 0:
            return False
    return sound_allowed >= 0


def reject_other_optimizer(
    start: ResumeStart, config: RunConfig, optimizer: Optimizer, folder: RunFolder, experts: Sequence[str]
) -> None:
    """Reject a checkpoint of another optimizer, before anything is staged or loaded."""
    if start.checkpoint is None:
        return
    if start.checkpoint.json_of("optimizer")["optimizer"] == named_state(optimizer, {}).json["optimizer"]:
        return
    settings = start.checkpoint.json_of("config")["config"]["optimizer"]
    theirs, home = settings["name"], settings.get("state", {}).get("home", "auto")
    key, ours, hint = "optimizer.name", config.optimizer.name, f"--set optimizer.name={theirs}"
    if theirs == ours:
        key, ours, theirs = "optimizer.state.home", config.optimizer.state.home, home
        hint = f"--set optimizer.state.home={home}"
    weights = [path for path in (*folder.results(experts, start.step), *folder.results(experts)) if path.is_file()]
    if weights:
        hint += f"; or another run from its weights: --set output_dir=FOLDER --set adapter.init_from='{weights[0]}'"
    found = f"{ours}, and a checkpoint with the state of {theirs}"
    raise ConfigError([Problem(key, found, f"{theirs}, to resume", hint, str(start.checkpoint.path))])


def batch_change(start: ResumeStart, training: Training, world_size: int) -> str | None:
    """A warning if the number of processes changed and with it the effective batch size; else None.

    A batch ramp sets the effective batch size itself, so it needs no warning.
    """
    if start.checkpoint is None or start.checkpoint.manifest.world_size == world_size or training.ramp.enabled:
        return None
    before = start.checkpoint.saved("config").json["config"]["training"]
    if before["ramp"]["enabled"]:
        return None
    shares = (before["batch_size"], before["gradient_accumulation_steps"], start.checkpoint.manifest.world_size)
    now = (training.batch_size, training.gradient_accumulation_steps, world_size)
    was, becomes = math.prod(shares), math.prod(now)
    if was == becomes:
        return None
    parts = "{} (batch_size {} x gradient_accumulation_steps {} x processes {})"
    return (
        f"effective batch: until now {parts.format(was, *shares)}, from here on {parts.format(becomes, *now)}; "
        f"to keep it: {_settings_for(was, training.batch_size, world_size)}"
    )


def _settings_for(effective: int, batch_size: int, world_size: int) -> str:
    """The settings that keep the effective batch size. The micro-batch does not grow, because a larger one may not
    fit."""
    share = max(1, round(effective / world_size))
    micro = max(size for size in range(1, min(batch_size, share) + 1) if share % size == 0)
    nearest = "" if share * world_size == effective else f", which is {share * world_size}, the nearest"
    return f"--set training.batch_size={micro} --set training.gradient_accumulation_steps={share // micro}{nearest}"


def files_if_complete(
    start: ResumeStart, config: RunConfig, folder: RunFolder, files: Sequence[Path]
) -> tuple[Path, ...]:
    """`files` if the run is complete already, so that nothing needs to be loaded; empty if work is left."""
    steps = config.training.max_steps
    if start.checkpoint is None or steps is None or start.step < steps or start.newest > start.step:
        return ()
    return tuple(files) if folder.has_all(files) else ()


def rates_to_start_with(
    config: RunConfig, start: ResumeStart, facts: ModelFacts, shapes: Mapping[str, tuple[int, ...]]
) -> ImportedRates | None:
    """The learning rates in `optimizer.rates_from`, read before anything is loaded. A resumed run has its own rates."""
    requested = config.optimizer
    if requested.rates_from is None or not reads_key(requested.name, "rates_from") or start.checkpoint is not None:
        return None
    single_expert = len(facts.experts) > 1 and config.model.experts != "both"
    path = Path(requested.rates_from).expanduser()
    return read_rates(path, shapes, kind=config.adapter.kind, single_expert=single_expert)


def _rates_beside(config: RunConfig) -> list[str]:
    """A hint for users who start from the weights of an ai-toolkit run: its learning rates can be imported too."""
    if config.adapter.init_from is None or not reads_key(config.optimizer.name, "rates_from"):
        return []
    beside = Path(config.adapter.init_from).expanduser().parent / "optimizer.pt"
    if config.optimizer.rates_from is not None or not beside.is_file():
        return []
    return [f"an ai-toolkit run's learning rates are kept beside its weights: --set optimizer.rates_from='{beside}'"]


def restore(
    run: CheckpointSource, start: ResumeStart, folder: RunFolder, rates: ImportedRates | None, runtime: Runtime, *,
    steps: int, dry_run: bool,
) -> tuple[str, ...]:  # fmt: skip
    """Restore the run's state and prepare its folder. Return notes for the user.

    `steps` is the length of the whole run. A dry run does not change the folder.
    """
    optimizer, position = run.state.optimizer, run.state.position
    lines: list[str] = []
    kept: Optimizer | KeepsRates = optimizer
    if rates is not None and isinstance(kept, KeepsRates):
        kept.load_rates(rates.rates, rates.signs)
        lines.append(f"optimizer.rates_from: {rates}")
    elif start.checkpoint is None:
        lines += _rates_beside(run.config)
    if start.checkpoint is not None:
        parts = shared_parts(run)
        lines += start.checkpoint.load(
            parts, per_rank=[RandomState(runtime.device)], rank=runtime.rank, world_size=runtime.world_size,
            copied=("parameters", "optimizer") if run.config.has_chunked_state else (),
        )  # fmt: skip
        lines += [line for part in parts for line in part.notes]
    if runtime.is_main and not dry_run:
        folder.make(run.config)
        lines += folder.set_aside(run.trained_model.trained, position.step)
        if position.step < max(steps, start.newest):
            lines += folder.move_finished(run.trained_model.trained, max(start.newest, position.step))
    return (*start.notes, *lines)

"""`gracetune cache build | audit | clear`: build, check and clear the latents and embeddings of a run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.config import AllowUnsupported, AsJson, Overrides
from gracetune.cli.console import out, print_json, session
from gracetune.cli.library_output import libraries_quiet
from gracetune.cli.streams import ignore_lost_stdout
from gracetune.config import Resolved
from gracetune.config.machine_checks import path_problems
from gracetune.config.run_config import RunConfig, Validation
from gracetune.errors import ConfigError
from gracetune.storage.folders import private_if_new
from gracetune.train.control import Control, listening

if TYPE_CHECKING:  # torch and the models' code are loaded by the command that needs them, not by every `--help`
    import torch

    from gracetune.cache.audit import Audit
    from gracetune.cache.encoder import Encoders
    from gracetune.cache.folders import CacheFolders
    from gracetune.cache.session import Caches, Needs
    from gracetune.cli.cache_view import Cleared, ProgressBars
    from gracetune.data.index import DataIndex

app = typer.Typer(
    cls=CommandGroup, help="Build, check and clear the caches of a run.", no_args_is_help=True, add_completion=False
)

Config = Annotated[Path, typer.Argument(readable=False, metavar="CONFIG", help="A configuration file of any dialect.")]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--import-ai-toolkit",
        help="Import matching entries of ai-toolkit's caches beside the data. A few are encoded again to compare them.",
    ),
]
OnlyDamaged = Annotated[
    bool, typer.Option("--damaged", help="Remove only damaged files, which a run cannot use. Entries stay.")
]

INTERRUPTED = 3


@dataclass(frozen=True)
class CacheCommand:
    """The config and the objects made from it, which every command here needs."""

    config: RunConfig
    index: DataIndex
    encoders: Encoders
    folders: CacheFolders
    epoch: int
    """The epoch whose entries are needed, for entries that are sampled anew in each epoch."""
    notes: tuple[str, ...]

    @cached_property
    def wanted(self) -> Needs:
        """The entries that the run needs. Cached, because a large dataset takes seconds."""
        from gracetune.cache.session import needs

        return needs(self.config, self.index, self.encoders, self.folders, epoch=self.epoch)


@app.callback()
def cache() -> None:
    """Build, check and clear the caches of a run."""


@app.command()
def build(
    context: typer.Context,
    config_file: Config,
    overrides: Overrides = None,
    take_over: TakeOver = False,
    allow_unsupported: AllowUnsupported = False,
    json_output: AsJson = False,
) -> None:
    """Encode missing cache entries: captions, then latents. Only the encoders are loaded, one at a time."""
    from gracetune.cache.encode_passes import PassOptions
    from gracetune.cache.session import Caches
    from gracetune.cache.session import build as build_caches
    from gracetune.cli.cache_view import BuiltView, bars

    ignore_lost_stdout()
    control = Control(stops_on_sigusr1=session(context).environment.stops_on_sigusr1)
    kept = 0
    try:
        with listening(control), libraries_quiet(), bars(quiet=json_output) as progress:
            job = _open(context, config_file, overrides, progress, allow_unsupported=allow_unsupported)
            with Caches(job.folders, writable=True) as caches:
                if not take_over:
                    _report_other_stores(job, caches)
                try:
                    built = build_caches(
                        job.config, job.index, job.encoders, caches, epoch=job.epoch, wanted=job.wanted, check=True,
                        take_over=take_over, options=PassOptions(workers=_workers()), on_text=progress.on_text,
                        on_latents=progress.on_latents, on_checked=progress.on_checked,
                    )  # fmt: skip
                finally:
                    kept = sum(len(store.created) for store in caches.stores)
                notes = [*job.notes, *built.notes]
                if not job.config.cache.persistent_cache:
                    note = "persistent_cache is false: a run removes at its end what it added; these entries stay"
                    notes.append(note)
                view = BuiltView.of(built, caches, tuple(notes))
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {kept} new entries are kept; run the same command again to continue", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if json_output:
        print_json(view.as_json())
    else:
        view.print(out())


@app.command()
def audit(
    context: typer.Context,
    config_file: Config,
    overrides: Overrides = None,
    allow_unsupported: AllowUnsupported = False,
    json_output: AsJson = False,
) -> None:
    """Check that the caches hold every entry the run needs, undamaged. Exit 1 if an entry is missing or corrupt."""
    from gracetune.cli.cache_view import AuditView, bars

    with libraries_quiet(), bars(quiet=json_output) as progress:
        job = _open(context, config_file, overrides, progress, allow_unsupported=allow_unsupported)
        job = _without_unreadable(job)
        wanted = job.wanted
        audits = _audits(wanted, progress)
    view = AuditView.of(audits, wanted, job.notes)
    if json_output:
        print_json(view.as_json())
    else:
        view.print(out())
    raise typer.Exit(0 if view.ok else 1)


@app.command()
def clear(
    context: typer.Context,
    config_file: Config,
    overrides: Overrides = None,
    only_damaged: OnlyDamaged = False,
    allow_unsupported: AllowUnsupported = False,
    json_output: AsJson = False,
) -> None:
    """Remove the entries of this configuration and damaged cache files. All other entries stay."""
    from gracetune.cli.cache_view import ClearedView, bars

    ignore_lost_stdout()
    with libraries_quiet(), bars(quiet=json_output) as progress:
        job = _open(context, config_file, overrides, progress, allow_unsupported=allow_unsupported)
        cleared = _clear_damaged(job) if only_damaged else _clear(job)
        view = ClearedView(tuple(cleared), job.notes, only_damaged=only_damaged)
    if json_output:
        print_json(view.as_json())
    else:
        view.print(out())


# -- parts ------------------------------------------------------------------------------------------------------------


def _open(
    context: typer.Context,
    config_file: Path,
    overrides: list[str] | None,
    progress: ProgressBars,
    *,
    allow_unsupported: bool,
) -> CacheCommand:
    from gracetune.cache.folders import cache_folders
    from gracetune.cache.session import current_epoch
    from gracetune.data.copies.local import Copies
    from gracetune.data.index_builder import build_index, scan_folder
    from gracetune.hub.access import HubAccess
    from gracetune.models.encoders import encoders_of
    from gracetune.models.hub_download import HubFetcher
    from gracetune.models.registry import geometry_of

    resolved = session(context).load(config_file, overrides, allow_unsupported=allow_unsupported)
    _check_paths(resolved)
    access = HubAccess.of(session(context).environment)
    config = Copies(resolved.config, access).localized()
    geometry, assumption = geometry_of(config.model)
    encoders = encoders_of(config, _device(), fetch=HubFetcher(access, _print))
    with private_if_new(Path(config.output_dir).expanduser()):  # by default, caches and scans are in this folder
        index = build_index(config, geometry, scans=scan_folder(config), on_scanned=progress.on_scanned)
    folders = cache_folders(config)
    epoch = current_epoch(config, index, encoders, folders)
    notes = [*([assumption] if assumption else []), *resolved.notes, *index.notes]
    return CacheCommand(config, index, encoders, folders, epoch, tuple(notes))


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def _check_paths(resolved: Resolved) -> None:
    """Reject missing folders of data and weights, all at once. Caches need no adapter and no validation images."""
    config = resolved.config
    adapter = config.adapter.model_copy(update={"init_from": None})
    own = config.model_copy(update={"adapter": adapter, "validation": Validation()})
    problems = path_problems(replace(resolved, config=own))
    if problems:
        ending = "; or check without folders: --no-paths"
        raise ConfigError(
            dict.fromkeys(replace(problem, hint=problem.hint.removesuffix(ending)) for problem in problems)
        )


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _workers() -> int:
    return max(1, min(16, len(os.sched_getaffinity(0))))


def _without_unreadable(job: CacheCommand) -> CacheCommand:
    """Leave out files that cannot be decoded: no build could encode them, so a note names them instead."""
    from gracetune.cache.session import Caches, missing_among, without_unreadable

    with Caches(job.folders, writable=False) as caches:
        missing = missing_among(caches, job.wanted.latents)
    index = without_unreadable(job.index, missing)
    if index is job.index:
        return job
    before = {(one.id, file.path) for one in (*job.index.datasets, *job.index.held_out) for file in one.unreadable}
    notes = [
        f"left out, unreadable: {file.path} of {one.id}: {file.reason}"
        for one in (*index.datasets, *index.held_out)
        for file in one.unreadable
        if (one.id, file.path) not in before
    ]
    return replace(job, index=index, notes=(*job.notes, *notes))


def _report_other_stores(job: CacheCommand, caches: Caches) -> None:
    """Print a note if ai-toolkit's caches may hold the missing entries, which could save hours of encoding."""
    from gracetune.cache.ai_toolkit_import import cache_folders_found
    from gracetune.cache.session import missing_among

    if job.encoders.reads_images() or not missing_among(caches, job.wanted.latents):
        return
    found = cache_folders_found(job.index)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        typer.echo(
            f"note: found caches of ai-toolkit in {found[0]}{more}; --import-ai-toolkit imports matching entries",
            err=True,
        )


def _audits(wanted: Needs, progress: ProgressBars) -> dict[Path, Audit]:
    from gracetune.cache.audit import audit as audit_store
    from gracetune.cache.required_entries import by_folder, for_audit
    from gracetune.cache.session import is_cache
    from gracetune.cache.store import DiskStore
    from gracetune.cli.cache_view import empty_audit

    found: dict[Path, Audit] = {}
    for folder, items in by_folder(wanted.all).items():
        requested = for_audit(items)
        if not is_cache(folder):
            found[folder] = empty_audit(requested)
            continue
        with DiskStore.open(folder, writable=False) as store:
            found[folder] = audit_store(store, requested, on_checked=progress.on_checked)
    return found


def _clear(job: CacheCommand) -> list[Cleared]:
    from gracetune.cache.audit import clear as clear_store
    from gracetune.cache.maintenance import remove_damaged
    from gracetune.cache.refresh import remove_items
    from gracetune.cache.required_entries import by_folder
    from gracetune.cache.session import is_cache, needs
    from gracetune.cache.store import DiskStore
    from gracetune.cli.cache_view import Cleared

    found = []
    lasting = needs(job.config, job.index, job.encoders, job.folders, part="lasting").all
    for folder, items in by_folder(lasting).items():
        if is_cache(folder):
            with DiskStore.open(folder, writable=True) as store:
                removal = clear_store(store, [item.key for item in items])
                damaged = remove_damaged(store)
                found.append(
                    Cleared(
                        folder, removal.entries, removal.size, left=len(store.keys()), damaged=damaged,
                        damaged_left=store.damaged,
                    )
                )  # fmt: skip
    for epoch, folder in [*job.folders.epochs()]:
        of_epoch = needs(job.config, job.index, job.encoders, job.folders, epoch=epoch, part="epoch").all
        if is_cache(folder):
            removal = remove_items(folder, [item for item in of_epoch if item.folder == folder])
            found.append(Cleared(folder, removal.entries, removal.size, left=_remaining_entries(folder)))
    job.encoders.forget_tiling()
    return found


def _clear_damaged(job: CacheCommand) -> list[Cleared]:
    """Remove damaged files only. Entries stay, as encoding takes hours; those in damaged files count as missing."""
    from gracetune.cache.maintenance import leave_out_damaged, remove_damaged
    from gracetune.cache.required_entries import by_folder
    from gracetune.cache.session import is_cache, needs
    from gracetune.cache.store import DiskStore
    from gracetune.cli.cache_view import Cleared

    found = []
    lasting = needs(job.config, job.index, job.encoders, job.folders, part="lasting").all
    for folder in [*by_folder(lasting), *(folder for _, folder in job.folders.epochs())]:
        if is_cache(folder):
            with DiskStore.open(folder, writable=True) as store:
                leave_out_damaged(store)
                damaged = remove_damaged(store)
                found.append(Cleared(folder, 0, 0, left=len(store.keys()), damaged=damaged, damaged_left=store.damaged))
    return found


def _remaining_entries(folder: Path) -> int:
    from gracetune.cache.session import is_cache
    from gracetune.cache.store import DiskStore

    if not is_cache(folder):
        return 0
    with DiskStore.open(folder, writable=False) as store:
        return len(store.keys())

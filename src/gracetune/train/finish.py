"""The end of a run: write the final weights, read them back and check them, remove caches if requested, report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gracetune.adapters.loading_steps import loading_steps
from gracetune.cache.created_entries import CreatedEntries, Made
from gracetune.cache.errors import CacheBusyError, CacheError
from gracetune.cache.folders import cache_folders
from gracetune.cache.keys import Key
from gracetune.cache.refresh import remove_epochs
from gracetune.cache.session import is_cache, remove_entries
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.storage.os_errors import FileError
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import RunEnded
from gracetune.telemetry.report.write import write_report
from gracetune.train.cache_refresh import CacheRefresh
from gracetune.train.control import Stop
from gracetune.train.data import CachedData
from gracetune.train.job import TrainingJob
from gracetune.train.load import LoadedRun
from gracetune.train.logs import open_telemetry
from gracetune.train.output import RunFolder, WrongFileError, save_weights, verify_weights
from gracetune.train.preflight import Preflight
from gracetune.train.rank_monitor import LostRankError
from gracetune.train.view import View


def finish(
    ready: Preflight, loaded: LoadedRun, stop: Stop, telemetry: Telemetry, view: View, *, began: float,
    check_saved: Callable[[Sequence[Path]], str | None],
) -> tuple[Path, ...]:  # fmt: skip
    """Finish the run and return its final files; none if it stopped early. `check_saved`: see `Saving`."""
    job, folder = loaded.job, ready.folder
    if job.trained_model.parking is not None:
        view.report(job.trained_model.parking.stats.line)
    if job.trained_model.host.switches.followed_bytes:
        view.report(job.trained_model.host.switches.line)
    files: tuple[Path, ...] = ()
    if stop.kind == "finished":
        ready.store.begin_work("finishing", job.position.step)
        with report_failure(ready, job, telemetry, view, began=began):
            files = _final_files(ready, loaded, check_saved, view)
    names = tuple(str(path.relative_to(folder.path)) for path in files)
    reason = "" if stop.kind == "finished" else stop.reason
    telemetry.emit(
        RunEnded(
            step=job.position.step, outcome=stop.kind, reason=reason, duration_s=time.monotonic() - began, outputs=names
        )
    )
    if ready.options.report and job.runtime.is_main:
        try:
            view.report(f"report: {write_report(folder.path, loading_steps).html}")
        except (TelemetryError, OSError) as error:  # the weights are written, so a missing report is only a warning
            view.warn(f"the report could not be written: {error}")
    if stop.kind == "finished":
        ready.store.end_work("finishing", *ready.store.unfinished("finishing"))
    return files


@contextmanager
def report_failure(
    ready: Preflight, job: TrainingJob, telemetry: Telemetry, view: View, *, began: float
) -> Iterator[None]:
    """Log an error that ends the run from outside the loop (a full disk, memory, a lost rank), and write the report.

    Sinks such as a webhook get the event too.
    """

    def forced(error: LostRankError) -> None:
        _emit_failure(ready, job, telemetry, view, error, began=began)

    if ready.runtime.peers is not None:
        ready.runtime.peers.on_forced_end = forced
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        found = ready.runtime.explain(error)
        _emit_failure(ready, job, telemetry, view, found, began=began)
        if found is not error:
            raise found from None
        raise


def _emit_failure(
    ready: Preflight, job: TrainingJob, telemetry: Telemetry, view: View, error: BaseException, *, began: float
) -> None:  # fmt: skip
    by_user = isinstance(error, KeyboardInterrupt)
    event = RunEnded(
        step=job.position.step,
        outcome="interrupted" if by_user else "failed",
        reason="stopped at once, by a second Ctrl-C" if by_user else str(error) or type(error).__name__,
        duration_s=time.monotonic() - began,
    )
    telemetry.emit(event)
    # Rank 0 writes the log. If it is lost, the lowest remaining rank writes the last event.
    takes_over = isinstance(error, LostRankError) and error.reports and not ready.runtime.is_main
    with suppress(GracetuneError, TelemetryError, OSError):  # the disk may be full; the caller raises the first error
        if takes_over:
            with open_telemetry(ready.config, ready.folder, view, ready.environment, is_main=True) as taken_over:
                taken_over.emit(event)
        if (ready.runtime.is_main or takes_over) and not by_user:
            write_report(ready.folder.path, loading_steps)


def _final_files(
    ready: Preflight, loaded: LoadedRun, check_saved: Callable[[Sequence[Path]], str | None], view: View
) -> tuple[Path, ...]:
    job, config, is_main = loaded.job, ready.config, ready.runtime.is_main
    with job.state.as_delivered():
        files = save_weights(job.trained_model, config, ready.folder, job.position.step, final=True, write=is_main)
        wrong = check_saved(files)
    if wrong is not None:
        raise WrongFileError(wrong)
    if is_main:
        for line in verify_weights(job.trained_model, config, files):
            view.report(line)
    if not config.cache.persistent_cache:
        _remove_caches(ready, job, loaded.cached, loaded.cache_refresh, view)
    job.runtime.barrier()
    return tuple(files)


def _remove_caches(
    ready: Preflight, job: TrainingJob, cached: CachedData, cache_refresh: CacheRefresh | None, view: View
) -> None:
    """Remove the cache entries that this run's ranks added, after all ranks have closed the caches."""
    job.source.close()
    lasting = _of_all(job, cached.caches.created)
    epochs = _of_all(job, {} if cache_refresh is None else cache_refresh.close())
    cached.caches.close()
    job.runtime.barrier()
    if not job.runtime.is_main:
        return
    if cached.made is not None:
        _remove_entries(ready.config, lasting, epochs, cached.inherited, cached.made, view)


def remove_recorded_entries(config: RunConfig, view: View) -> None:
    """Remove entries that a finished run could not remove, for example because another process used the cache."""
    made = CreatedEntries(RunFolder.of(config).path, 0)
    if not config.cache.persistent_cache and (recorded := made.take_over()):
        _remove_entries(config, {}, {}, recorded, made, view)


def _remove_entries(
    config: RunConfig, lasting: dict[Path, set[Key]], epochs: dict[Path, set[Key]], recorded: Made,
    made: CreatedEntries, view: View,
) -> None:  # fmt: skip
    """Remove entries; they stay recorded until that succeeds. A failure is a warning, because the weights are written.

    `lasting` and `epochs` are the entries that the ranks of this launch created, by store: in stores for the whole run,
    and in stores of single epochs. `recorded` are those of earlier launches of the run.
    """
    try:
        # A refreshed epoch has its own store, which is removed together with its last entry.
        of_epochs = {folder for _, folder in cache_folders(config).epochs()}
        for folder, keys in recorded.items():
            if is_cache(folder):  # an epoch's store may have been removed since
                lasting.setdefault(folder, set()).update(keys)
        for folder in [*lasting.keys() & (epochs.keys() | of_epochs)]:
            epochs.setdefault(folder, set()).update(lasting.pop(folder))
        removed = remove_entries(lasting).entries + remove_epochs(epochs).entries
    except CacheBusyError as busy:
        view.warn(f"persistent_cache is false, but another process uses the cache: {busy}")
        return
    except (CacheError, FileError) as error:
        view.warn(f"persistent_cache is false, but entries of this run cannot be removed: {error}")
        return
    made.forget()
    view.report(f"persistent_cache is false: {removed} entries of this run removed")


def _of_all(job: TrainingJob, mine: Mapping[Path, Collection[Key]]) -> dict[Path, set[Key]]:
    """The union of all ranks' keys, on rank 0."""
    gathered = {str(folder): sorted(keys) for folder, keys in mine.items()}
    found: dict[Path, set[Key]] = {}
    for raw in job.runtime.gather(json.dumps(gathered).encode()):
        for folder, keys in json.loads(raw).items():
            found.setdefault(Path(folder), set()).update(keys)
    return found

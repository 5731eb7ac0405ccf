"""The end of a run: the weights under their final names, read again and checked; caches removed where asked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gracetune.cache.errors import CacheBusyError
from gracetune.cache.keys import Key
from gracetune.cache.session import remove_entries
from gracetune.config.run_config import RunConfig
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import RunEnded
from gracetune.telemetry.hub import Telemetry
from gracetune.telemetry.report.write import write_report
from gracetune.train.control import Stop
from gracetune.train.data import Cached
from gracetune.train.job import Job
from gracetune.train.output import RunFolder, save_weights, verify_weights
from gracetune.train.renewal import Renewal
from gracetune.train.view import View


def finish(
    job: Job, config: RunConfig, folder: RunFolder, cached: Cached, stop: Stop, telemetry: Telemetry, view: View,
    *, began: float, renewal: Renewal | None,
) -> tuple[Path, ...]:  # fmt: skip
    """The final files; none where the run did not get to its end."""
    files = _final_files(job, config, folder, cached, renewal, view) if stop.kind == "finished" else ()
    names = tuple(str(path.relative_to(folder.path)) for path in files)
    reason = "" if stop.kind == "finished" else stop.reason
    telemetry.emit(
        RunEnded(
            step=job.position.step, outcome=stop.kind, reason=reason, duration_s=time.monotonic() - began, outputs=names
        )
    )
    if job.runtime.is_main:
        report = write_report(folder.path)
        view.say(f"report: {report.html}")
    return files


@contextmanager
def failure_told(job: Job, folder: RunFolder, telemetry: Telemetry, *, began: float) -> Iterator[None]:
    """What ends a run from outside the loop (a full disk, memory) is in its log and report, and told to a webhook."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        by_hand = isinstance(error, KeyboardInterrupt)
        reason = "stopped at once, by a second Ctrl-C" if by_hand else str(error) or type(error).__name__
        telemetry.emit(
            RunEnded(
                step=job.position.step,
                outcome="interrupted" if by_hand else "failed",
                reason=reason,
                duration_s=time.monotonic() - began,
            )
        )
        if job.runtime.is_main and not by_hand:
            with suppress(TelemetryError, OSError):  # the disk may be full: what went wrong first is what is raised
                write_report(folder.path)
        raise


def _final_files(
    job: Job, config: RunConfig, folder: RunFolder, cached: Cached, renewal: Renewal | None, view: View
) -> tuple[Path, ...]:
    main = job.runtime.is_main
    with job.as_delivered():
        files = save_weights(job.trainee, config, folder, job.position.step, final=True, write=main)
    if main:
        for line in verify_weights(job.trainee, config, files):
            view.say(line)
    if not config.cache.persistent_cache:
        _remove_caches(job, cached, renewal, view)
    job.runtime.barrier()
    return tuple(files)


def _remove_caches(job: Job, cached: Cached, renewal: Renewal | None, view: View) -> None:
    """What all ranks added, once nobody has the caches open any more; nothing else."""
    mine = {str(folder): sorted(keys) for folder, keys in cached.caches.created.items()}
    every = job.runtime.gather(json.dumps(mine).encode())
    job.source.close()
    cached.caches.close()
    job.runtime.barrier()
    if not job.runtime.is_main:
        return
    created: dict[Path, set[Key]] = {}
    for raw in every:
        for folder, keys in json.loads(raw).items():
            created.setdefault(Path(folder), set()).update(keys)
    try:
        removed = remove_entries(created).entries + (0 if renewal is None else renewal.remove_created())
    except CacheBusyError as busy:
        view.warn(f"persistent_cache is false, but another process uses the cache: {busy}")
        return
    view.say(f"persistent_cache is false: {removed} entries of this run removed")

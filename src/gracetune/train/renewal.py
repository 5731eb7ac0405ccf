"""`cache_mode: refresh_each_epoch`: at every epoch's end the source of batches turns to entries drawn anew.

They were made in the background while the epoch was trained (`cache.refresh`), by all processes together: each begins
somewhere else and is done when everything is there. All come to the end of an epoch at the same batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from gracetune.cache.keys import Key
from gracetune.cache.passes import How, Share
from gracetune.cache.refresh import Refresher
from gracetune.cache.residence import Where
from gracetune.cache.wanted import is_refreshed
from gracetune.config.run_config import RunConfig
from gracetune.data.loader import EpochEnd
from gracetune.models.encoders import FamilyEncoders
from gracetune.train.data import Cached, found_by_others, found_here, load_caches
from gracetune.train.job import Job
from gracetune.train.view import View


class Renewal:
    def __init__(
        self, job: Job, config: RunConfig, cached: Cached, encoders: FamilyEncoders, where: Where, view: View,
        stack: ExitStack,
    ) -> None:  # fmt: skip
        self._job, self._config, self._cached = job, config, cached
        self._encoders, self._where, self._view = encoders, where, view
        self._refresher = Refresher(
            config, cached.index, encoders, cached.caches.places, epoch=job.position.epoch,
            device=job.device if job.device.type == "cuda" else None,
            how=How(share=Share(job.runtime.rank, job.runtime.world_size)),
        )  # fmt: skip
        stack.callback(self._refresher.close)
        self._held = stack.enter_context(ExitStack())
        """The resident stores of this epoch."""
        self._refresher.prepare_next()

    def __call__(self, ended: EpochEnd) -> None:
        """The job calls this between two batches."""
        job, caches = self._job, self._cached.caches
        if ended.epoch + 1 == self._config.training.epochs:
            return  # that was the last one
        before = [folder for epoch, folder in caches.places.epochs() if epoch <= ended.epoch]
        swap = self._refresher.swap()
        elsewhere = found_by_others(swap.built, job.runtime)
        for (dataset, path), reason in elsewhere.items():
            self._refresher.leave_out(dataset, {path: reason})
        for (dataset, path), reason in sorted((found_here(swap.built) | elsewhere).items()):
            job.loader.exclude(dataset, {path: reason})
            self._view.warn(f"left out, unreadable: {path} of {dataset}: {reason}")
        fresh = ExitStack()
        index, keys = job.loader.index, self._cached.keys
        latents, texts, _ = load_caches(
            self._config, index, self._encoders, keys, caches, self._where, fresh, epoch=swap.epoch
        )
        job.source.use(latents=latents, texts=texts)
        self._held.close()
        self._held.push(fresh.pop_all())
        for folder in before:
            caches.close_one(folder)
        self._refresher.collect()
        self._refresher.prepare_next()
        if swap.waited > 1:
            self._view.say(f"epoch {swap.epoch + 1}: training waited {swap.waited:.1f} s for its entries")

    def close(self) -> dict[Path, set[Key]]:
        """End a preparation that is under way. What this process has made for epochs, by store."""
        self._refresher.close()
        self._held.close()
        return self._refresher.created


def renew(
    job: Job, config: RunConfig, cached: Cached, encoders: FamilyEncoders, where: Where, view: View, stack: ExitStack
) -> Renewal | None:
    """Let the job's epochs renew their entries, where some dataset asks for that."""
    if not is_refreshed(cached.index):
        return None
    job.on_epoch_end = renewal = Renewal(job, config, cached, encoders, where, view, stack)
    return renewal

"""`cache_mode: refresh_each_epoch`: at every epoch's end the source of batches turns to entries drawn anew.

They were made in the background while the epoch was trained (`cache.refresh`).
"""

from __future__ import annotations

from contextlib import ExitStack

from gracetune.cache.passes import How
from gracetune.cache.refresh import Refresher
from gracetune.cache.slabs import Where
from gracetune.cache.wanted import is_refreshed
from gracetune.config.run_config import RunConfig
from gracetune.data.loader import EpochEnd
from gracetune.errors import ConfigError, Problem
from gracetune.models.encoders import FamilyEncoders
from gracetune.train.data import Cached, load_caches
from gracetune.train.job import Job
from gracetune.train.view import View


def refuse_with_several(config: RunConfig, world_size: int) -> None:
    """Which files turn out to be damaged is found out by one process; the others could not leave out the same ones."""
    asked = [
        number for number, one in enumerate(config.datasets)
        if not one.disabled and one.augmentation.cache_mode == "refresh_each_epoch"
    ]  # fmt: skip
    if asked and world_size > 1:
        key = f"datasets[{asked[0]}].augmentation.cache_mode"
        expected = "static or disable_cache with several processes"
        raise ConfigError([Problem(key, "refresh_each_epoch", expected, f"--set '{key}=static'")])


class Renewal:
    def __init__(
        self, job: Job, config: RunConfig, cached: Cached, encoders: FamilyEncoders, where: Where, view: View,
        stack: ExitStack,
    ) -> None:  # fmt: skip
        self._job, self._config, self._cached = job, config, cached
        self._encoders, self._where, self._view = encoders, where, view
        self._refresher = Refresher(
            config, cached.index, encoders, cached.caches.places, epoch=job.position.epoch,
            device=job.device if job.device.type == "cuda" else None, how=How(),
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
        for damaged in (*swap.built.texts.damaged, *swap.built.latents.damaged):
            job.loader.exclude(damaged.dataset, {damaged.path: damaged.reason})
            self._view.warn(f"left out, unreadable: {damaged.path} of {damaged.dataset}: {damaged.reason}")
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

    def remove_created(self) -> int:
        """`persistent_cache: false`, at a clean end. How many entries went."""
        self._refresher.close()
        return self._refresher.remove_created().entries


def renew(
    job: Job, config: RunConfig, cached: Cached, encoders: FamilyEncoders, where: Where, view: View, stack: ExitStack
) -> Renewal | None:
    """Let the job's epochs renew their entries, where some dataset asks for that."""
    if not is_refreshed(cached.index):
        return None
    job.on_epoch_end = renewal = Renewal(job, config, cached, encoders, where, view, stack)
    return renewal

"""`cache_mode: refresh_each_epoch`: at the end of every epoch, switch to cache entries encoded with new random crops.

All processes encode the entries of the next epoch together, in the background (`cache.refresh`). Each starts at another
place, and is done when all entries exist. All processes reach the end of an epoch at the same batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from gracetune.cache.batches import BatchSource
from gracetune.cache.encode_passes import PassOptions, Share
from gracetune.cache.keys import Key
from gracetune.cache.refresh import Refresher
from gracetune.cache.required_entries import is_refreshed
from gracetune.cache.residence import CacheResources
from gracetune.cache.session import needs
from gracetune.config.run_config import RunConfig
from gracetune.data.index import by_dataset, left_out_lines
from gracetune.data.loader import EpochEnd
from gracetune.models.encoders import FamilyEncoders
from gracetune.train.data import CachedData, damaged_on_other_ranks, damaged_on_this_rank, load_caches
from gracetune.train.runtime import Runtime
from gracetune.train.training_state import TrainingState
from gracetune.train.view import View


class CacheRefresh:
    def __init__(
        self, config: RunConfig, cached: CachedData, state: TrainingState, source: BatchSource, runtime: Runtime,
        encoders: FamilyEncoders, resources: CacheResources, view: View, stack: ExitStack,
    ) -> None:  # fmt: skip
        self._config, self._cached = config, cached
        self._loader, self._source, self._runtime = state.loader, source, runtime
        self._encoders, self._resources, self._view = encoders, resources, view
        self._refresher = Refresher(
            config, cached.index, encoders, cached.caches.folders, epoch=state.position.epoch,
            device=runtime.device if runtime.device.type == "cuda" else None,
            options=PassOptions(share=Share(runtime.rank, runtime.world_size)), made=cached.made,
        )  # fmt: skip
        stack.callback(self._refresher.close)
        self._held = stack.enter_context(ExitStack())
        """Closes the resident stores of the current epoch."""
        self._refresher.prepare_next()

    def __call__(self, ended: EpochEnd) -> None:
        """Switch to the next epoch's entries. The job calls this between two batches."""
        caches = self._cached.caches
        if ended.epoch + 1 == self._config.training.epochs:
            return  # that was the last epoch
        before = [folder for epoch, folder in caches.folders.epochs() if epoch <= ended.epoch]
        swap = self._refresher.swap()
        elsewhere = damaged_on_other_ranks(swap.built, self._runtime)
        if elsewhere:
            self._refresher.leave_out(by_dataset(elsewhere))
        damaged = damaged_on_this_rank(swap.built) | elsewhere
        if damaged:
            self._loader.exclude(by_dataset(damaged))
            for line in left_out_lines(damaged):
                self._view.warn(line)
        fresh = ExitStack()
        wanted = needs(self._config, self._loader.index, self._encoders, caches.folders, epoch=swap.epoch)
        latents, texts, _ = load_caches(self._config, wanted, caches, self._resources, fresh, name=str(swap.epoch))
        self._source.use(latents=latents, texts=texts)
        self._held.close()
        self._held.push(fresh.pop_all())
        for folder in before:
            caches.close_one(folder)
        self._refresher.collect()
        self._refresher.prepare_next()
        if swap.waited > 1:
            self._view.report(f"epoch {swap.epoch + 1}: training waited {swap.waited:.1f} s for its entries")

    def close(self) -> dict[Path, set[Key]]:
        """Stop encoding in the background. Return the keys that this process encoded for later epochs, by store."""
        self._refresher.close()
        self._held.close()
        return self._refresher.created


def nothing_to_refresh(ended: EpochEnd) -> None:
    """Used if all entries are valid for the whole run."""


def start_refresh(
    config: RunConfig, cached: CachedData, state: TrainingState, source: BatchSource, runtime: Runtime,
    encoders: FamilyEncoders, resources: CacheResources, view: View, stack: ExitStack,
) -> CacheRefresh | None:  # fmt: skip
    """Start encoding the next epoch; None if no dataset asks for that."""
    if not is_refreshed(cached.index):
        return None
    return CacheRefresh(config, cached, state, source, runtime, encoders, resources, view, stack)

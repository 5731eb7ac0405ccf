"""Entries that turn out to be damaged or gone while a run reads them are encoded again, and the run goes on.

The rest of the file that held such an entry is checked too, so that the encoder is loaded once for all of it. Nothing
about the order of samples changes: a rank that repairs its entries only comes later to the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from gracetune.cache.checking import recheck_suspects
from gracetune.cache.errors import EntriesError
from gracetune.cache.keys import Key
from gracetune.cache.passes import EncodeMemoryError, How, Share
from gracetune.cache.session import Built, Caches, Encoders, build
from gracetune.config.run_config import RunConfig
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex


@dataclass(frozen=True, eq=False)
class EntryRepair:
    config: RunConfig
    caches: Caches
    encoders: Encoders
    on_host: Encoders | None
    """The same on the CPU, for a GPU that has no room for them beside the model; None where they are there anyway."""
    share: Share
    warn: Callable[[str], None]

    def __call__(self, error: EntriesError, index: DataIndex, epoch: int) -> None:
        """Entries that `error` names are there when this returns. `index`: of what the run still trains on.

        UnreadableMediaError where a sample's own file cannot be decoded any more. Other errors of ours where nothing
        can be encoded; then the store counts the entries as missing, so the next start encodes them.
        """
        for store in self.caches.stores:
            recheck_suspects(store)
        self.warn(f"{error.problem.key}: {error.problem.found}; look at the disk (`dmesg`, `smartctl -a`)")
        if self._are_there(error):
            self.warn("at the second attempt they could be read; the run goes on")
            return
        built = self._build(index, epoch)
        if not self._are_there(error):
            _raise(error, built)
        again = "1 entry" if built.encoded == 1 else f"{built.encoded} entries"
        self.warn(f"{again} encoded again; the run goes on")

    def _are_there(self, error: EntriesError) -> bool:
        return all(any(Key(key) in store for store in self.caches.stores) for key in error.keys)

    def _build(self, index: DataIndex, epoch: int) -> Built:
        """Random numbers are as before: a step that follows must not know of it."""
        import torch

        how = How(share=self.share, may_tile=False)  # tiles would make entries under another id
        with torch.random.fork_rng():
            try:
                return build(self.config, index, self.encoders, self.caches, epoch=epoch, how=how)
            except (torch.OutOfMemoryError, EncodeMemoryError):
                if self.on_host is None:
                    raise
            return build(self.config, index, self.on_host, self.caches, epoch=epoch, how=how)


def _raise(error: EntriesError, built: Built) -> NoReturn:
    for damaged in (*built.texts.damaged, *built.latents.damaged):
        raise UnreadableMediaError(damaged.path, damaged.reason, damaged.dataset) from error
    raise error

"""Repair of a cache during a run: encode damaged or missing entries again, then continue.

The rest of a damaged file is checked too, so the encoder is loaded only once for all of its entries. The order of
samples does not change; a rank that repairs entries only reaches the next step later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from gracetune.cache.encode_passes import EncodeMemoryError, PassOptions, Share
from gracetune.cache.errors import EntriesError
from gracetune.cache.keys import Key
from gracetune.cache.maintenance import recheck_suspects
from gracetune.cache.session import Caches, Encoders, FilledCaches, build
from gracetune.config.run_config import RunConfig
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex


@dataclass(frozen=True, eq=False)
class EntryRepair:
    """Repairs the entries named by an error. Call it with the error."""

    config: RunConfig
    caches: Caches
    encoders: Encoders
    on_host: Encoders | None
    """The same encoders on the CPU, for a GPU without room for them. None if `encoders` are on the CPU anyway."""
    share: Share
    warn: Callable[[str], None]

    def __call__(self, error: EntriesError, index: DataIndex, epoch: int) -> None:
        """Make all entries that `error` lists available. `index` describes the data that the run still uses.

        Raises UnreadableMediaError if the sample's file can no longer be decoded, or another GracetuneError if encoding
        is impossible. In that case the store treats the entries as missing, so the next start encodes them.
        """
        for store in self.caches.stores:
            recheck_suspects(store)
        self.warn(f"{error.problem.key}: {error.problem.found}; check the disk (`dmesg`, `smartctl -a`)")
        if self._are_present(error):
            self.warn("the entries could be read at the second attempt; the run continues")
            return
        built = self._build(index, epoch)
        if not self._are_present(error):
            _raise(error, built)
        again = "1 entry" if built.encoded == 1 else f"{built.encoded} entries"
        self.warn(f"{again} encoded again; the run continues")

    def _are_present(self, error: EntriesError) -> bool:
        return all(any(Key(key) in store for store in self.caches.stores) for key in error.keys)

    def _build(self, index: DataIndex, epoch: int) -> FilledCaches:
        """Encode what is missing, and preserve the random state, so later steps are unaffected."""
        import torch

        options = PassOptions(share=self.share, may_tile=False)  # tiling would make entries under another id
        with torch.random.fork_rng():
            try:
                return build(self.config, index, self.encoders, self.caches, epoch=epoch, options=options)
            except (torch.OutOfMemoryError, EncodeMemoryError):
                if self.on_host is None:
                    raise
            return build(self.config, index, self.on_host, self.caches, epoch=epoch, options=options)


def _raise(error: EntriesError, built: FilledCaches) -> NoReturn:
    for damaged in (*built.texts.damaged, *built.latents.damaged):
        raise UnreadableMediaError(damaged.path, damaged.reason, damaged.dataset) from error
    raise error

"""The choice of the memory that holds a resident cache, with its reason.

The slabs themselves are in `hostmem.slab` and `memory.managed`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from gracetune.config.run_config import RunConfig
from gracetune.hardware.machine import Machine, ProfileName
from gracetune.hostmem.sharing import LocalRanks
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.placement import FOLLOW_CACHES, Hints, MemoryKind, choose_placement, hints_of
from gracetune.memory.transport import TransportChoice, choose_transport

CacheType = Literal["unified_memory", "memory", "disk"]
CacheRole = Literal["latent_cache", "text_cache"]


@dataclass(frozen=True, order=True)
class Visits:
    """How often an epoch reads an entry. Sorts from cold to hot; cold entries stay on disk when memory is short."""

    per_epoch: float
    """0 for held-out samples, which only validation reads."""
    probability: float = 1.0
    """Sampling probability of the dataset. An epoch visits every sample, but more probable datasets are visited
    earlier, and a run may end within an epoch."""

    def __add__(self, other: Visits) -> Visits:
        return Visits(self.per_epoch + other.per_epoch, max(self.probability, other.probability))


@dataclass(frozen=True)
class CacheResources:
    """The memory that a machine and a process offer to a cache."""

    machine: Machine
    device: int | None = None
    """Index of the CUDA device that reads the cache; None without one."""
    heap: ManagedHeap | None = None
    """Managed memory; None if it is not available."""
    no_heap: str = "this process has no unified-memory layer open"
    """Why `heap` is None."""
    ranks: LocalRanks | None = None
    """The processes of this machine that share one copy; None for a single process."""
    hints: Hints = FOLLOW_CACHES
    """Whether caches may use managed memory."""
    transport: TransportChoice | None = None
    """The measured choice of how batches reach the GPU; None if nothing was measured."""

    @property
    def profile(self) -> ProfileName:
        return self.machine.profile.value if self.device is not None else "cpu"

    @property
    def device_bytes(self) -> int | None:
        if self.device is None:
            return None
        return next((gpu.memory_total for gpu in self.machine.gpus if gpu.index == self.device), None)

    @property
    def reads_in_place(self) -> bool:
        """Whether the GPU has no separate memory, so it reads a cache without a copy."""
        return self.profile == "integrated"

    @property
    def local_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.count


@dataclass(frozen=True)
class Residence:
    """The memory that holds a cache during a run, and the reason. `notes` list requests that were not followed."""

    kind: MemoryKind | Literal["disk"]
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def is_managed(self) -> bool:
        return self.kind in ("managed_host", "managed_device")

    def instead(self, kind: MemoryKind, reason: str, note: str) -> Residence:
        """Another place, with a note on why."""
        return replace(self, kind=kind, reason=reason, notes=(*self.notes, note))


def choose_residence(
    kind: CacheType,
    role: CacheRole,
    profile: ProfileName,
    *,
    size: int,
    device_bytes: int | None = None,
    local_ranks: int = 1,
    no_managed: str | None = None,
    hints: Hints = FOLLOW_CACHES,
    transport: TransportChoice | None = None,
) -> Residence:
    """Choose the memory for a cache. Pure. `no_managed` is the reason why managed memory is unavailable, or None."""
    if kind == "disk":
        return Residence("disk", "as configured: entries are read from disk when they are needed")
    if local_ranks > 1 and profile == "cpu":
        chosen = Residence("shared_host", f"no GPU: one copy in main memory for {local_ranks} ranks")
    else:
        # An explicit request for managed memory on a discrete GPU uses the placement rules of a superchip.
        is_requested = kind == "unified_memory" and hints.requested and profile == "discrete"
        table: ProfileName = "superchip" if is_requested else profile
        placement = choose_placement(role, table, size=size, device_bytes=device_bytes, local_ranks=local_ranks)
        chosen = Residence(placement.kind, placement.reason)
    if kind == "memory" and chosen.is_managed:
        reason = "as configured: page-locked main memory; cache type unified_memory would use managed memory"
        return Residence("pinned_host", reason)
    if kind == "unified_memory":
        return _unified(chosen, profile, hints, transport, no_managed)
    return chosen


def _unified(
    chosen: Residence, profile: ProfileName, hints: Hints, transport: TransportChoice | None, no_managed: str | None
) -> Residence:
    """Keep or replace the choice for a cache of type unified_memory."""
    if not hints.on:
        note = f"cache type unified_memory is not used: {hints.reason}"
        if chosen.is_managed:
            return chosen.instead("pinned_host", "page-locked main memory", note)
        return replace(chosen, notes=(note,))
    if not chosen.is_managed:
        note = f"cache type unified_memory is not used on this machine: {chosen.reason}"
        if profile == "discrete" and chosen.kind == "pinned_host":
            note += f"; {_USE_ANYWAY}"
        return replace(chosen, notes=(note,))
    if no_managed is not None:
        note = f"cache type unified_memory is not available: {no_managed}"
        return chosen.instead("pinned_host", "page-locked main memory", note)
    if hints.requested:
        return replace(chosen, reason=f"{chosen.reason}; {hints.reason}")
    if chosen.kind == "managed_host" and transport is not None and transport.prefers_pinned:
        note = f"cache type unified_memory is slower on this machine: {transport.reason}; {_USE_ANYWAY}"
        return chosen.instead("pinned_host", "page-locked main memory", note)
    return chosen


def placement_lines(
    config: RunConfig, machine: Machine, *, latent_bytes: int, text_bytes: int, local_ranks: int = 1
) -> list[str]:
    """Describe the effect of residency hints on a machine before anything is loaded.

    Empty if the config does not use them. `latent_bytes` and `text_bytes` are the sizes of the caches in memory. Speeds
    are measured later, when the run starts.
    """
    hints, cache = hints_of(config), config.cache
    if config.memory.enable_uvm_hints is None and not hints.on:
        return []
    profile = machine.profile.value
    device_bytes = machine.gpus[0].memory_total if machine.gpus else None

    def residence_of(role: CacheRole, kind: CacheType, size: int) -> Residence:
        return choose_residence(
            kind, role, profile, size=size, device_bytes=device_bytes, local_ranks=local_ranks, hints=hints
        )

    latents = residence_of("latent_cache", cache.vae_cache_type, latent_bytes)
    texts = residence_of("text_cache", cache.text_cache_type, text_bytes)
    summary = f"latents: {latents.kind}; text: {texts.kind}"
    if "managed_host" in (latents.kind, texts.kind):
        summary += "; masks, small tensors: GPU"
    notes = dict.fromkeys((*latents.notes, *texts.notes))
    way = choose_transport(profile, None)
    batches = way.reason if way.transport == "in_place" else "the fastest transport is measured when the run starts"
    state = "on" if latents.is_managed or texts.is_managed else "on, with no managed cache" if hints.on else "off"
    return [f"residency hints {state}: {hints.reason}", summary, *notes, f"batches: {batches}"]


_USE_ANYWAY: Final = "set memory.enable_uvm_hints: true to use managed memory anyway"

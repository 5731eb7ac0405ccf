"""The memory a resident cache lies in: which kind, and why. The slabs themselves are `hostmem.slab` and
`memory.managed_slab`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from gracetune.config.run_config import RunConfig
from gracetune.hardware.machine import Machine, ProfileName
from gracetune.hostmem.sharing import LocalRanks
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.placement import FOLLOW_CACHES, Hints, Place, hints_of, place
from gracetune.memory.transport import TransportChoice, choose_transport

CacheType = Literal["unified_memory", "memory", "disk"]
CacheRole = Literal["latent_cache", "text_cache"]


@dataclass(frozen=True, order=True)
class Visits:
    """How often an epoch reads an entry. Sorts by how hot it is: what is read least is the first to stay on disk."""

    per_epoch: float
    """0 for held-out samples, which validation alone reads."""
    probability: float = 1.0
    """Of its dataset: an epoch visits everything, the more probable sooner, and a run may end inside an epoch."""

    def __add__(self, other: Visits) -> Visits:
        return Visits(self.per_epoch + other.per_epoch, max(self.probability, other.probability))


@dataclass(frozen=True)
class Where:
    """What the machine offers a cache."""

    machine: Machine
    device: int | None = None
    """The CUDA device that reads it; None without one."""
    heap: ManagedHeap | None = None
    """Managed memory; None where there is none."""
    no_heap: str = "this process has no unified-memory layer open"
    """Why `heap` is None."""
    ranks: LocalRanks | None = None
    """The processes of this machine that share one copy; None for one process."""
    hints: Hints = FOLLOW_CACHES
    """Whether caches may be managed memory at all."""
    transport: TransportChoice | None = None
    """How batches reach the GPU, by measurement; None where nobody has chosen."""

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
        """A GPU without memory of its own: it reads a cache where it lies."""
        return self.profile == "integrated"

    @property
    def local_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.count


@dataclass(frozen=True)
class Residence:
    """Where a cache lives while the run reads it, and why; `notes` say what was asked for and is otherwise."""

    place: Place | Literal["disk"]
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def is_managed(self) -> bool:
        return self.place in ("managed_host", "managed_device")

    def instead(self, place: Place, reason: str, note: str) -> Residence:
        return replace(self, place=place, reason=reason, notes=(*self.notes, note))


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
    """Pure. `no_managed`: why managed memory cannot be had, None where it can."""
    if kind == "disk":
        return Residence("disk", "as asked: read from disk when its turn comes")
    if local_ranks > 1 and profile == "cpu":
        chosen = Residence("shared_host", f"no GPU: one copy in main memory for {local_ranks} ranks")
    else:
        # Who asks for managed memory by name gets on a discrete GPU what the table says of a superchip.
        insists = kind == "unified_memory" and hints.asked and profile == "discrete"
        table: ProfileName = "superchip" if insists else profile
        told = place(role, table, size=size, device_bytes=device_bytes, local_ranks=local_ranks)
        chosen = Residence(told.place, told.reason)
    if kind == "memory" and chosen.is_managed:
        return Residence("pinned_host", "as asked: main memory, page-locked; unified_memory would take managed slabs")
    if kind == "unified_memory":
        return _unified(chosen, profile, hints, transport, no_managed)
    return chosen


def _unified(
    chosen: Residence, profile: ProfileName, hints: Hints, transport: TransportChoice | None, no_managed: str | None
) -> Residence:
    """What becomes of a cache that was asked for in managed memory."""
    if not hints.on:
        note = f"unified_memory was asked for and is not used: {hints.reason}"
        if chosen.is_managed:
            return chosen.instead("pinned_host", "page-locked main memory", note)
        return replace(chosen, notes=(note,))
    if not chosen.is_managed:
        note = f"unified_memory was asked for and is not used here: {chosen.reason}"
        if profile == "discrete" and chosen.place == "pinned_host":
            note += f"; {_INSIST}"
        return replace(chosen, notes=(note,))
    if no_managed is not None:
        note = f"unified_memory was asked for and cannot be had: {no_managed}"
        return chosen.instead("pinned_host", "page-locked main memory", note)
    if hints.asked:
        return replace(chosen, reason=f"{chosen.reason}; {hints.reason}")
    if chosen.place == "managed_host" and transport is not None and transport.prefers_pinned:
        note = f"unified_memory was asked for and is slower here: {transport.reason}; {_INSIST}"
        return chosen.instead("pinned_host", "page-locked main memory", note)
    return chosen


def placement_lines(
    config: RunConfig, machine: Machine, *, latent_bytes: int, text_bytes: int, local_ranks: int = 1
) -> list[str]:
    """What residency hints will do on a machine, in words and before anything is loaded; none where nobody asked.

    `latent_bytes` and `text_bytes` are what the caches will take in memory. Speeds are measured when the run starts.
    """
    hints, cache = hints_of(config), config.cache
    if config.memory.enable_uvm_hints is None and not hints.on:
        return []
    profile = machine.profile.value
    device_bytes = machine.gpus[0].memory_total if machine.gpus else None

    def found(role: CacheRole, kind: CacheType, size: int) -> Residence:
        return choose_residence(
            kind, role, profile, size=size, device_bytes=device_bytes, local_ranks=local_ranks, hints=hints
        )

    latents = found("latent_cache", cache.vae_cache_type, latent_bytes)
    texts = found("text_cache", cache.text_cache_type, text_bytes)
    places = f"latents: {latents.place}; text: {texts.place}"
    if "managed_host" in (latents.place, texts.place):
        places += "; masks, small tensors: GPU"
    notes = dict.fromkeys((*latents.notes, *texts.notes))
    way = choose_transport(profile, None)
    batches = way.reason if way.transport == "in_place" else "the way is measured when the run starts, then chosen"
    state = "on" if latents.is_managed or texts.is_managed else "on, with no managed cache" if hints.on else "off"
    return [f"residency hints {state}: {hints.reason}", places, *notes, f"batches: {batches}"]


_INSIST: Final = "memory.enable_uvm_hints: true uses managed memory anyway"

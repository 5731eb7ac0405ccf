"""What a run needs in memory, before it is placed: the output of `estimate` and the input of `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gracetune.planning.activations import Activations, RecomputePolicy
from gracetune.planning.processes import ONE_PROCESS, Processes

Phase = Literal["encode text", "encode latents", "load", "train", "sample"]
PHASES: tuple[Phase, ...] = ("encode text", "encode latents", "train", "sample")
"""The phases of a run in order. `load` has a peak of its own only with sharded weights: it comes before `train`, and
every process holds one whole denoiser before it is sharded."""

Role = Literal[
    "frozen weights", "encoder weights", "trained weights", "compute copy", "gradients", "optimizer state", "EMA",
    "activations", "workspace", "batch ring", "latent cache", "text cache", "staged data", "process", "allowance",
    "checkpoints",
]  # fmt: skip
Home = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Need:
    """One consumer of memory.

    In `busy` phases it is in use; in `idle` phases it waits and may be parked.
    """

    name: str
    role: Role
    bytes: int
    busy: tuple[Phase, ...]
    why: str
    home: Home = "device"
    idle: tuple[Phase, ...] = ()
    parkable: bool = False
    """May wait in host memory in its idle phases. If host and device share memory, it is read from disk again."""
    managed: bool = False
    """Placed in managed memory on machines with a coherent link, and in ordinary main memory on others."""
    managed_requested: bool = False
    """`memory.enable_uvm_hints` is true: use managed memory without a coherent link too, up to a cap."""


@dataclass(frozen=True)
class Denoiser:
    """Bytes of one denoiser by precision. `fp8` stores both layouts; `fp8 one layout` transposes on the fly."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    idle_in_training: bool = False
    """Whether it waits during the planned step: it is untrained, or it is not its turn (the first one's is planned)."""
    trained: bool = False
    """Whether all of it is trained (full fine-tune)."""
    sharded: bool = False
    """Whether the sizes are one process's shard. FSDP2 owns the shard, so it is never parked."""
    only_sampled: bool = False
    """Whether it is an untrained expert, loaded only with the pipeline that generates samples."""

    @property
    def parkable(self) -> bool:
        return self.idle_in_training and not self.trained and not self.sharded

    def size(self, precision: str) -> int:
        return dict(self.sizes)[precision]


@dataclass(frozen=True)
class Workload:
    """The largest batch of one dataset."""

    key: str
    """The config key that sets its batch size."""
    label: str
    batch: int
    activations: tuple[Activations, ...]

    def under(self, policy: RecomputePolicy) -> Activations:
        return next(entry for entry in self.activations if entry.policy == policy)


@dataclass(frozen=True)
class CodecPasses:
    """Bytes of VAE workspace, whole and in tiles: to encode each sample of a batch (`encode`, `refresh`), and to decode
    one generated sample."""

    batch: int
    batch_key: str
    encode: int
    encode_tiled: int
    decode: int
    decode_tiled: int
    tiled: bool
    """The value in the config."""
    what: str
    """The largest sample it encodes, in words."""
    refresh: int = 0
    """To encode the next epoch beside the steps (`refresh_each_epoch`); 0 if no dataset does that."""
    refresh_tiled: int = 0


@dataclass(frozen=True)
class PlanSettings:
    """Settings of the config that a plan may decide or propose to change."""

    checkpointing: Literal["off", "auto", "full"]
    policies: tuple[RecomputePolicy, ...]
    """Available policies, from the fastest to the smallest."""
    precision: str
    can_store_8_bits: bool
    """Whether there are frozen weights that could be stored in fp8 or int8."""
    use_uvm: bool
    oversubscription_ratio: float
    managed: bool
    """Whether the run uses the unified-memory layer. Otherwise experts are parked in pinned copies."""
    may_use_int8: bool = False
    """`model.base_precision` is auto: frozen weights are stored in int8 if 16 bits do not fit."""
    rejects_managed: bool = False
    """`memory.enable_uvm_hints` is false: only the overflow arena is managed memory."""


@dataclass(frozen=True)
class Demand:
    """Everything a run needs."""

    title: str
    needs: tuple[Need, ...]
    denoisers: tuple[Denoiser, ...]
    workloads: tuple[Workload, ...]
    codec: CodecPasses
    settings: PlanSettings
    phases: tuple[Phase, ...]
    assumptions: tuple[str, ...] = ()
    processes: Processes = ONE_PROCESS
    """Device needs are those of one process. `layout` adds up the main memory of all processes on a machine."""

    def training_peak(self, policy: RecomputePolicy, precision: str | None = None, *, parked: bool = False) -> int:
        """The peak that torch's memory counter should show in training, with one denoiser and no encoder loaded.

        `precision` overrides the config's (a plan may choose `fp8 one layout`). `parked` means that inputs of
        recomputed blocks wait in host memory.
        """
        busy = [need for need in self.needs if need.home == "device" and "train" in need.busy]
        weights = self.denoisers[0].size(precision or self.settings.precision)
        largest = max(load.under(policy).total(load.batch, parked=parked) for load in self.workloads)
        return sum(need.bytes for need in busy) + weights + largest

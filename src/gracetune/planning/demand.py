"""What a run asks of memory, before anyone has said where it goes: the output of `estimate`, the input of `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gracetune.planning.activations import Activations, Policy
from gracetune.planning.processes import ONE_PROCESS, Processes

Phase = Literal["encode text", "encode latents", "load", "train", "sample"]
PHASES: tuple[Phase, ...] = ("encode text", "encode latents", "train", "sample")
"""In the order in which a run goes through them. Loading has a peak of its own only where weights are sharded: `load`
comes before `train`, and every process has one denoiser whole before it is spread."""

Role = Literal[
    "frozen weights", "encoder weights", "trained weights", "compute copy", "gradients", "optimizer state", "EMA",
    "activations", "workspace", "batch ring", "latent cache", "text cache", "staged data", "process", "allowance",
    "checkpoints",
]  # fmt: skip
Home = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Need:
    """One thing that takes memory. In `busy` phases it is where the computing happens; in `idle` phases it waits."""

    name: str
    role: Role
    bytes: int
    busy: tuple[Phase, ...]
    why: str
    home: Home = "device"
    idle: tuple[Phase, ...] = ()
    parkable: bool = False
    """May wait in host memory during its idle phases (or be read again from disk, where host and device are one)."""
    managed: bool = False
    """Lies in managed memory where the machine has a coherent link; elsewhere in main memory as any other."""
    insisted: bool = False
    """In managed memory without a coherent link too, as far as its cap allows: `memory.enable_uvm_hints` is true."""


@dataclass(frozen=True)
class Denoiser:
    """The weights of one denoiser by how they are held; `fp8` keeps both layouts, `fp8 one layout` transposes."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    idle_in_training: bool = False
    trained: bool = False
    """Full fine-tune: these are the fp32 master weights."""
    sharded: bool = False
    """Spread over processes: the sizes are one process's part. FSDP2 holds on to it, so it is never parked."""

    only_sampled: bool = False
    """Not trained: it is loaded with the pipeline that generates samples, not beside the trained one."""

    @property
    def parkable(self) -> bool:
        return self.idle_in_training and not self.trained and not self.sharded

    def size(self, precision: str) -> int:
        return dict(self.sizes)[precision]


@dataclass(frozen=True)
class Workload:
    """The batches of one dataset at their largest."""

    key: str
    """Config key of the batch size that holds for it."""
    label: str
    batch: int
    activations: tuple[Activations, ...]

    def under(self, policy: Policy) -> Activations:
        return next(entry for entry in self.activations if entry.policy == policy)


@dataclass(frozen=True)
class CodecPasses:
    """Workspace of the VAE, whole or in tiles: encoding each sample of a batch, and decoding one sample drawn."""

    batch: int
    batch_key: str
    encode: int
    encode_tiled: int
    decode: int
    decode_tiled: int
    tiled: bool
    """As the config says."""
    what: str
    """The largest sample it meets, in words."""


@dataclass(frozen=True)
class PlanSettings:
    """What the config says about the things a plan may decide or propose to change."""

    checkpointing: Literal["off", "auto", "full"]
    policies: tuple[Policy, ...]
    """Possible here, from the fastest to the smallest."""
    precision: str
    eight_bits_possible: bool
    """Whether frozen weights remain that could be held in fp8 or int8."""
    use_uvm: bool
    oversubscription_ratio: float
    managed: bool
    """Whether the run opens the unified-memory layer; without it experts are parked in pinned copies."""
    few_bits: bool = False
    """`model.base_precision` is auto: where 16 bits do not fit, frozen weights are held in int8."""
    rejects_managed: bool = False
    """`memory.enable_uvm_hints` is false: besides the overflow arena nothing is managed memory."""


@dataclass(frozen=True)
class Demand:
    """Everything a run asks for."""

    title: str
    needs: tuple[Need, ...]
    denoisers: tuple[Denoiser, ...]
    workloads: tuple[Workload, ...]
    codec: CodecPasses
    settings: PlanSettings
    phases: tuple[Phase, ...]
    assumptions: tuple[str, ...] = ()
    processes: Processes = ONE_PROCESS
    """Needs of the device are those of one process; `layout` adds up what processes of one machine take of its main
    memory."""

    def training_peak(self, policy: Policy, precision: str | None = None, *, parked: bool = False) -> int:
        """What torch's own counter should show at its highest in training with one denoiser and no encoder loaded.

        `precision`: as a plan decided it (`fp8 one layout`), where that is not what the config says. `parked`: blocks'
        inputs wait in host memory.
        """
        busy = [need for need in self.needs if need.home == "device" and "train" in need.busy]
        weights = self.denoisers[0].size(precision or self.settings.precision)
        largest = max(load.under(policy).total(load.batch, parked=parked) for load in self.workloads)
        return sum(need.bytes for need in busy) + weights + largest

"""`RunConfig`: everything one training run was asked to do. Every dialect ends here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from gracetune.config.adapter_kinds import AdapterKind
from gracetune.config.base import (
    LONGEST_SIDE,
    BatchSize,
    FileName,
    Flag,
    Fraction,
    FrameRate,
    Name,
    NonNegativeFloat,
    Number,
    OpenFraction,
    Options,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Text,
    WholeNumber,
)
from gracetune.config.dataset_config import Dataset
from gracetune.config.export_formats import FormatName, Program
from gracetune.config.families import Family
from gracetune.config.memory_options import MemoryOptions
from gracetune.config.optimizers import OptimizerName
from gracetune.config.token_routes import TokenRouting
from gracetune.config.trackers import TrackerName

Rank = Annotated[int, Strict(), Field(ge=1, le=10**10)]
"""LoKr takes a huge one for "as it is": ai-toolkit writes 9999999999. `limits.py` has what others may be."""
Side = Annotated[int, Strict(), Field(ge=1, le=LONGEST_SIDE)]
Frames = Annotated[int, Strict(), Field(ge=1, le=10_000)]
DrawingSteps = Annotated[int, Strict(), Field(ge=1, le=10_000)]


class Model(Section):
    family: Family
    flavour: Name | None = None
    """One of the family's published weights; unset with a `path` means: ask the weights."""
    path: Name | None = None
    """Local folder, single safetensors file or hub id; unset means the flavour's published weights."""
    revision: Name | None = None
    variant: Name | None = None
    vae_path: Name | None = None
    text_encoder_path: Name | None = None
    base_precision: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"] = "bf16"
    """How the frozen weights are held. `auto` takes 16 bits where the memory plan has room for them, else int8."""
    assistant_adapter: Name | None = None
    """A LoRA that the base model has while an adapter is trained, and not when samples are generated: a file, a folder
    with `pytorch_lora_weights.safetensors`, or a hub id. For models distilled to few steps, such as FLUX.1-schnell."""
    experts: Literal["both", "high", "low"] = "both"
    """Which noise experts of a dual-expert model are trained."""
    switch_experts_every: PositiveInt = 1
    """Optimizer steps between two experts' turns."""
    expert_boundary: OpenFraction | None = None
    """Noise level above which the high expert works; unset means the flavour's own."""
    vae_tiling: Flag = False
    vae_slicing: Flag = False
    size_conditioning: Literal["original", "scaled", "bucket"] = "original"
    """What SDXL is told an image's size was: the file's; the size it was scaled to before the crop; or its bucket's,
    without a crop."""
    drop_size_conditioning: Flag = False
    """SDXL is told zeros instead of sizes where a caption is dropped."""


class Adapter(Section):
    kind: AdapterKind = "lora"
    rank: Rank = 16
    alpha: PositiveFloat | None = None
    """Unset means equal to the rank."""
    dropout: Fraction = 0.0
    conv_rank: Rank | None = None
    """Adapt the model's convolutions too, at this rank (SDXL's; the other families' blocks have none). With `targets`
    of your own it is the rank of the convolutions among them. Unset means: linear layers only."""
    conv_alpha: PositiveFloat | None = None
    """Unset means `alpha`, or `conv_rank` where that is unset too."""
    factor: Annotated[int, Strict(), Field(ge=-1, le=10**9)] = -1
    """LoKr's split of a dimension; -1 takes the most even one."""
    full_rank: Flag = False
    """LoKr only: keep the second factor whole instead of decomposing it to the rank."""
    decompose_both: Flag = False
    targets: tuple[Name, ...] = ()
    """Module patterns; empty means the family's own choice. A pattern that matches nothing is an error."""
    exclude: tuple[Name, ...] = ()
    within: tuple[Name, ...] = ()
    """Names of modules, as in their paths (`transformer_blocks`, `blocks.3`): only layers inside them are adapted.
    Without `targets`, every linear layer inside them is, and with `conv_rank` every convolution. ai-toolkit's way."""
    by_module: dict[str, Options] = Field(default={})
    """Per-module-class options that differ from the ones above (LyCORIS `module_algo_map`)."""
    strength: Number = 1.0
    """LyCORIS `multiplier`."""
    init_from: Name | None = None
    """Adapter file to start from."""


class Cache(Section):
    vae_cache_type: Literal["unified_memory", "memory", "disk"] = "disk"
    text_cache_type: Literal["unified_memory", "memory", "disk"] = "disk"
    cache_dir: Name | None = None
    """Unset means `cache` inside the run's folder."""
    text_cache_dir: Name | None = None
    vae_cache_dir: Name | None = None
    """Latents of every dataset without a `cache_dir` of its own."""
    persistent_cache: Flag = True
    """False removes at a clean end what this run added."""
    vae_batch_size: BatchSize = 4
    text_encoder_batch_size: BatchSize = 4


class Ema(Section):
    enabled: Flag = False
    decay: OpenFraction = 0.999
    update_every: PositiveInt = 1
    ramp: Flag = False
    """Start with a low decay that grows with the optimizer steps s, s / (s + 9), up to `decay`: the average follows the
    weights from the first step. SimpleTuner's way."""
    copy_until: WholeNumber = 0
    """Before this optimizer step the average is a copy of the weights; from then on `decay` alone counts, also with
    `ramp`. SimpleTuner's `ema_warmup_steps`."""


class BatchRamp(Section):
    """Grow the effective batch quadratically over the first micro-batches."""

    enabled: Flag = False
    initial_effective_batch_size: PositiveInt | None = None
    target_effective_batch_size: PositiveInt | None = None
    batch_rampup_steps: PositiveInt | None = None
    """Counted in micro-batches."""


class Training(Section):
    max_steps: PositiveInt | None = None
    epochs: Annotated[int, Strict(), Field(ge=1, le=100_000)] | None = None
    batch_size: BatchSize = 1
    gradient_accumulation_steps: PositiveInt = 1
    accumulation: Literal["mean", "sum"] = "mean"
    """Of the micro-batches' gradients in an optimizer step. ai-toolkit takes the sum: gradients, and so what
    `max_grad_norm` clips, grow with their number."""
    fill_batches: Flag = False
    """A batch for which too few samples of a shape are left is filled up with others of that shape, or with copies."""
    dataset_weights: Literal["size", "equal"] = "size"
    """What a dataset's share of the batches follows: its `probability` and its size, or its `probability` alone."""
    gradient_checkpointing: Literal["off", "auto", "full"] = "auto"
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    max_grad_norm: PositiveFloat | None = 1.0
    grad_clip: Literal["norm", "value"] = "norm"
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math", "flash_attn_2", "flash_attn_3"] = "auto"
    compile: Literal["off", "auto", "on"] = "auto"
    seed: Seed = 42
    deterministic: Flag = False
    """Repeatable kernels only, so that two runs on one GPU agree to the last bit; slower."""
    ema: Ema = Ema()
    ramp: BatchRamp = BatchRamp()
    token_routing: TokenRouting = TokenRouting()


class AutomagicLimits(Section):
    lr_bump: PositiveFloat | None = None
    min_lr: PositiveFloat | None = None
    max_lr: PositiveFloat | None = None


class Optimizer(Section):
    name: OptimizerName = "adamw"
    lr: NonNegativeFloat = 1e-4
    weight_decay: NonNegativeFloat | None = None
    """Unset, like all that follow, means the optimizer's own default."""
    betas: tuple[Fraction, Fraction] | None = None
    eps: PositiveFloat | None = None
    limits: AutomagicLimits = AutomagicLimits()
    """Automagic's per-element learning rate; the two below override it for one expert."""
    high_noise: AutomagicLimits = AutomagicLimits()
    low_noise: AutomagicLimits = AutomagicLimits()
    rates_from: Name | None = None
    """Automagic only: the `optimizer.pt` of an ai-toolkit run, whose learning rates a new run starts with."""
    options: Options = Field(default={})
    """Anything else the optimizer itself takes."""


class Schedule(Section):
    name: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "sine"
    ] = "constant"  # fmt: skip
    warmup_steps: WholeNumber = 0
    cycles: PositiveFloat = 1
    power: PositiveFloat = 1.0
    end_lr: NonNegativeFloat = 0.0
    half_period: PositiveInt | None = None
    """`cosine` and `sine` only: a wave between the rate and `end_lr` for the whole run, which takes this many optimizer
    steps from top to bottom. It has no warm-up and no `cycles`. SimpleTuner's way; unset means one fall."""


class ShiftLine(Section):
    """A flow shift that grows with the image: exp of a straight line through two points, by the number of tokens (2 x 2
    latents each). The names are those of diffusers' schedulers."""

    base_image_seq_len: PositiveInt = 256
    base_shift: Number = 0.5
    max_image_seq_len: PositiveInt = 4096
    max_shift: Number = 1.15


class Objective(Section):
    loss: Literal["mse", "mae", "huber", "smooth_l1", "pseudo_huber"] = "mse"
    huber_delta: PositiveFloat = 0.1
    huber_schedule: Literal["constant", "snr", "exponential"] = "constant"
    """How `huber_delta` follows the noise level. `exponential`: from 1 without noise to `huber_delta` in pure noise;
    `snr`: by the ratio of noise to image, as SimpleTuner computes it."""
    guidance: NonNegativeFloat | None = None
    """What a model with a guidance input is given while it learns; unset means 1."""
    prediction: Literal["flow", "epsilon", "v_prediction"] | None = None
    """Unset means the family's own."""
    flow_shift: PositiveFloat | Literal["resolution"] | None = None
    """`resolution` lets it follow the image size; unset means the family's own."""
    resolution_shift: ShiftLine | None = None
    """With `flow_shift: resolution`: the line to follow; unset means that of the model's own scheduler."""
    shift_terminal: Annotated[float, Strict(), Field(ge=0, lt=1)] = 0.0
    """The lowest noise level: shifted levels are compressed into the range from here to 1."""
    timesteps: Literal["uniform", "sigmoid", "logit_normal", "beta", "shift", "weighted", "one_step"] = "sigmoid"
    timestep_bias: Literal["balanced", "content", "style"] = "balanced"
    timestep_bias_over: Literal["all_levels", "noise_range"] = "all_levels"
    """What the bias is over: all noise levels, of which an expert or `min_timestep` and `max_timestep` take their part,
    or that part itself, as in ai-toolkit: the bias picks one of its 1000 timesteps. With `sigmoid` these are random and
    new for every sample; the ends of an expert's or of the limits' part are random then, too."""
    timestep_weights: Literal["bell", "half_bell", "measured"] | None = None
    """Loss weights by noise level, flow matching only. `bell`: highest at half noise. `half_bell`: the same without
    the fall towards the image. `measured`: ai-toolkit's table of `timestep_type: weighted`. Unset means `bell` with
    `timesteps: weighted`, and 1 everywhere else."""
    stratified: Flag = False
    """Each sample of a micro-batch gets a noise level from a part of the distribution of its own."""
    sigmoid_scale: PositiveFloat = 1.0
    beta_alpha: PositiveFloat = 2.0
    beta_beta: PositiveFloat = 2.0
    min_timestep: Annotated[int, Strict(), Field(ge=0, le=1000)] = 0
    max_timestep: Annotated[int, Strict(), Field(ge=0, le=1000)] = 1000
    snr_gamma: PositiveFloat | None = None
    soft_min_snr: Flag = False
    debiased: Flag = False
    noise_offset: NonNegativeFloat = 0.0
    noise_offset_probability: Fraction = 1.0
    input_perturbation: NonNegativeFloat = 0.0


class ValidationPrompt(Section):
    """One sample to draw; what is unset comes from the `validation` section."""

    prompt: Text
    negative_prompt: Text | None = None
    width: Side | None = None
    height: Side | None = None
    num_frames: Frames | None = None
    seed: Seed | None = None
    guidance: NonNegativeFloat | None = None
    steps: DrawingSteps | None = None
    adapter_strength: Number = 1.0
    references: tuple[Name, ...] = ()
    """Pictures an edit or image-to-video model starts from."""


class Validation(Section):
    enabled: Flag = True
    every_steps: PositiveInt | None = None
    every_epochs: PositiveInt | None = None
    at_start: Flag = False
    prompts: tuple[ValidationPrompt, ...] = ()
    negative_prompt: Text = ""
    width: Side | None = None
    height: Side | None = None
    num_frames: Frames | None = None
    fps: FrameRate | None = None
    seed: Seed | None = None
    walk_seed: Flag = False
    """Each prompt of one round takes the next seed."""
    guidance: NonNegativeFloat | None = None
    guidance_rescale: Fraction = 0.0
    steps: DrawingSteps | None = None
    images_per_prompt: Annotated[int, Strict(), Field(ge=1, le=1000)] = 1
    loss_every_steps: PositiveInt | None = None
    """Held-out loss at fixed noise levels."""


class PushToHub(Section):
    """Where the result is uploaded to. A failed upload is a warning, and never stops a run."""

    repo_id: Name
    """`owner/name`, or `name` for a repository of the token's owner. It is made where there is none."""
    private: Flag = True
    """Of a repository that is made."""
    every_checkpoint: Flag = False
    """Upload each checkpoint's weights too, into a folder `checkpoint-STEP`."""


class Checkpoints(Section):
    every_steps: PositiveInt | None = 500
    every_epochs: PositiveInt | None = None
    keep_last: PositiveInt = 5
    keep_every_steps: PositiveInt | None = None
    resume: Name = "latest"
    """`latest`, `none`, or a checkpoint folder."""
    save_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    format: FormatName = "comfyui"
    for_program: Program | None = None
    """The program that has to load the files as they were trained. Unset: all that `format` is for."""
    push_to_hub: PushToHub | None = None


class Logging(Section):
    every_steps: PositiveInt = 10
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    project: Name = "gracetune"
    webhook: Name | None = None


class RunConfig(Section):
    """One training run, complete and frozen."""

    name: FileName
    """Of the files with the result."""
    output_dir: Name
    model: Model
    datasets: tuple[Dataset, ...]
    adapter: Adapter = Adapter()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    objective: Objective = Objective()
    cache: Cache = Cache()
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    logging: Logging = Logging()
    memory: MemoryOptions = MemoryOptions()

    @property
    def keeps_masked_tokens(self) -> bool:
        """Whether tokens skip blocks, but not those inside a mask: then their number is known with the batch."""
        return self.skips_blocks and any(dataset.has_masks and not dataset.disabled for dataset in self.datasets)

    @property
    def skips_blocks(self) -> bool:
        """Whether any token skips any block."""
        return any(route.skip_ratio > 0 for route in self.training.token_routing.routes)

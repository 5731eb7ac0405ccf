"""`RunConfig`: the complete configuration of one training run. Every dialect is converted to it."""

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
"""The upper bound admits LoKr's way to say "do not decompose": ai-toolkit writes 9999999999. `limits.LARGEST_RANK` is
the bound for other algorithms."""
Side = Annotated[int, Strict(), Field(ge=1, le=LONGEST_SIDE)]
Frames = Annotated[int, Strict(), Field(ge=1, le=10_000)]
SamplingSteps = Annotated[int, Strict(), Field(ge=1, le=10_000)]


class Model(Section):
    family: Family
    flavour: Name | None = None
    """One of the family's published weights. Unset with a `path` means that it is detected from the weights."""
    path: Name | None = None
    """Local folder, single safetensors file or hub id; unset means the flavour's published weights."""
    revision: Name | None = None
    variant: Name | None = None
    vae_path: Name | None = None
    text_encoder_path: Name | None = None
    base_precision: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"] = "bf16"
    """Precision of the frozen weights. `auto` uses 16 bits if the memory plan has room for them, else int8."""
    assistant_adapter: Name | None = None
    """A LoRA that is applied to the base model while an adapter is trained, but not when samples are generated: a file,
    a folder with `pytorch_lora_weights.safetensors`, or a hub id. For models distilled to few steps, such as
    FLUX.1-schnell."""
    experts: Literal["both", "high", "low"] = "both"
    """Which noise experts of a dual-expert model are trained."""
    switch_experts_every: PositiveInt = 1
    """Optimizer steps between switches from one expert to the other."""
    expert_boundary: OpenFraction | None = None
    """Noise level above which the high-noise expert is used; unset means the flavour's own."""
    vae_tiling: Flag = False
    vae_slicing: Flag = False
    size_conditioning: Literal["original", "scaled", "bucket"] = "original"
    """The original size that SDXL is conditioned on. `original`: the file's. `scaled`: the size before the crop.
    `bucket`: that of the bucket, and a crop at 0, 0."""
    drop_size_conditioning: Flag = False
    """Condition SDXL on zeros instead of sizes if the caption is dropped."""


class Adapter(Section):
    kind: AdapterKind = "lora"
    rank: Rank = 16
    alpha: PositiveFloat | None = None
    """Unset means equal to the rank."""
    dropout: Fraction = 0.0
    conv_rank: Rank | None = None
    """Adapt the model's convolutions too, at this rank (only SDXL has any in its blocks). With `targets` of your own it
    is the rank of the convolutions among them. Unset means linear layers only."""
    conv_alpha: PositiveFloat | None = None
    """Unset means `alpha`, or `conv_rank` if that is unset too."""
    factor: Annotated[int, Strict(), Field(ge=-1, le=10**9)] = -1
    """LoKr's split of a dimension; -1 means the most even split."""
    full_rank: Flag = False
    """LoKr only: keep the second factor whole instead of decomposing it to the rank."""
    decompose_both: Flag = False
    targets: tuple[Name, ...] = ()
    """Module patterns; empty means the family's own choice. A pattern that matches nothing is an error."""
    exclude: tuple[Name, ...] = ()
    within: tuple[Name, ...] = ()
    """Names of modules, as in their paths (`transformer_blocks`, `blocks.3`): only layers inside them are adapted.
    Without `targets`, every linear layer inside them is, and with `conv_rank` every convolution, as in ai-toolkit."""
    by_module: dict[str, Options] = Field(default={})
    """Options of single module classes that differ from the ones above (LyCORIS' `module_algo_map`)."""
    strength: Number = 1.0
    """Factor of the adapter's output (LyCORIS' `multiplier`)."""
    init_from: Name | None = None
    """Adapter file to start from."""


class Cache(Section):
    vae_cache_type: Literal["unified_memory", "memory", "disk"] = "disk"
    text_cache_type: Literal["unified_memory", "memory", "disk"] = "disk"
    cache_dir: Name | None = None
    """Unset means `cache` inside the run's folder."""
    text_cache_dir: Name | None = None
    vae_cache_dir: Name | None = None
    """Folder for the latents of every dataset without a `cache_dir` of its own."""
    persistent_cache: Flag = True
    """False removes the entries that this run added when it ends normally."""
    vae_batch_size: BatchSize = 4
    text_encoder_batch_size: BatchSize = 4


class Ema(Section):
    enabled: Flag = False
    decay: OpenFraction = 0.999
    update_every: PositiveInt = 1
    ramp: Flag = False
    """Let the decay grow with the number s of optimizer steps, s / (s + 9), up to `decay`. The average then follows the
    weights from the first step, as in SimpleTuner."""
    copy_until: WholeNumber = 0
    """Before this optimizer step the average is a copy of the weights; from it on the decay is `decay`, even with
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
    """How the gradients of an optimizer step's micro-batches are combined. ai-toolkit sums them, so the gradient, which
    `max_grad_norm` clips, grows with their number."""
    fill_batches: Flag = False
    """If too few samples of a shape are left for a batch, fill it with other samples of that shape or with copies."""
    dataset_weights: Literal["size", "equal"] = "size"
    """What a dataset's share of the batches depends on. `size`: its `probability` and its size. `equal`: only its
    `probability`."""
    gradient_checkpointing: Literal["off", "auto", "full"] = "auto"
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    max_grad_norm: PositiveFloat | None = 1.0
    grad_clip: Literal["norm", "value"] = "norm"
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math", "flash_attn_2", "flash_attn_3"] = "auto"
    compile: Literal["off", "auto", "on"] = "auto"
    seed: Seed = 42
    deterministic: Flag = False
    """Use only deterministic kernels: two runs on the same GPU then agree to the last bit. Slower."""
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
    """Unset means the optimizer's own default, as for all keys below."""
    betas: tuple[Fraction, Fraction] | None = None
    eps: PositiveFloat | None = None
    limits: AutomagicLimits = AutomagicLimits()
    """Limits of Automagic's per-element learning rates; `high_noise` and `low_noise` override them for one expert."""
    high_noise: AutomagicLimits = AutomagicLimits()
    low_noise: AutomagicLimits = AutomagicLimits()
    rates_from: Name | None = None
    """Automagic only: the `optimizer.pt` of an ai-toolkit run whose learning rates a new run starts with."""
    options: Options = Field(default={})
    """Further options of the optimizer, under its own names."""


class Schedule(Section):
    name: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "sine"
    ] = "constant"  # fmt: skip
    warmup_steps: WholeNumber = 0
    cycles: PositiveFloat = 1
    power: PositiveFloat = 1.0
    end_lr: NonNegativeFloat = 0.0
    half_period: PositiveInt | None = None
    """`cosine` and `sine` only: the rate follows a wave between `lr` and `end_lr` for the whole run, with this many
    optimizer steps from top to bottom, without warm-up and `cycles`, as in SimpleTuner. Unset means a single decay."""


class ShiftLine(Section):
    """A flow shift that grows with the image: exp(mu), where mu is a linear function of the number of tokens (2 x 2
    latents each) through two points. The names are those of diffusers' schedulers."""

    base_image_seq_len: PositiveInt = 256
    base_shift: Number = 0.5
    max_image_seq_len: PositiveInt = 4096
    max_shift: Number = 1.15


class Objective(Section):
    loss: Literal["mse", "mae", "huber", "smooth_l1", "pseudo_huber"] = "mse"
    huber_delta: PositiveFloat = 0.1
    huber_schedule: Literal["constant", "snr", "exponential"] = "constant"
    """How `huber_delta` depends on the noise level. `exponential`: from 1 without noise to `huber_delta` in pure noise.
    `snr`: by the ratio of noise to image, as SimpleTuner computes it."""
    guidance: NonNegativeFloat | None = None
    """Value of the guidance input in training, for models that have one; unset means 1."""
    prediction: Literal["flow", "epsilon", "v_prediction"] | None = None
    """Unset means the family's own."""
    flow_shift: PositiveFloat | Literal["resolution"] | None = None
    """`resolution` means that the shift depends on the image size; unset means the family's own shift."""
    resolution_shift: ShiftLine | None = None
    """How the shift depends on the image size with `flow_shift: resolution`; unset means as in the model's own
    scheduler."""
    shift_terminal: Annotated[float, Strict(), Field(ge=0, lt=1)] = 0.0
    """The lowest noise level. Shifted levels are compressed into the range from this level to 1."""
    timesteps: Literal["uniform", "sigmoid", "logit_normal", "beta", "shift", "weighted", "one_step"] = "sigmoid"
    timestep_bias: Literal["balanced", "content", "style"] = "balanced"
    timestep_bias_over: Literal["all_levels", "noise_range"] = "all_levels"
    """The range that `timestep_bias` applies to. `all_levels`: all noise levels, which are then restricted to the noise
    range of an expert or of `min_timestep` and `max_timestep`. `noise_range`: that noise range itself, as in
    ai-toolkit, where the bias selects one of its 1000 timesteps. With `sigmoid` these timesteps are random and new for
    every sample, and so are the ends of the noise range."""
    timestep_weights: Literal["bell", "half_bell", "measured"] | None = None
    """Loss weights by noise level, flow matching only. `bell`: highest at half noise. `half_bell`: the same without the
    decrease towards the image. `measured`: ai-toolkit's table of `timestep_type: weighted`. Unset means `bell` with
    `timesteps: weighted`, and 1 for all other `timesteps`."""
    stratified: Flag = False
    """Sample the noise level of each sample of a micro-batch from a separate part of the distribution."""
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
    """One sample to generate. Unset values come from the `validation` section."""

    prompt: Text
    negative_prompt: Text | None = None
    width: Side | None = None
    height: Side | None = None
    num_frames: Frames | None = None
    seed: Seed | None = None
    guidance: NonNegativeFloat | None = None
    steps: SamplingSteps | None = None
    adapter_strength: Number = 1.0
    references: tuple[Name, ...] = ()
    """Input images of an edit or image-to-video model."""


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
    """Increase the seed by 1 from each prompt to the next."""
    guidance: NonNegativeFloat | None = None
    guidance_rescale: Fraction = 0.0
    steps: SamplingSteps | None = None
    images_per_prompt: Annotated[int, Strict(), Field(ge=1, le=1000)] = 1
    loss_every_steps: PositiveInt | None = None
    """Optimizer steps between measurements of the held-out loss, at fixed noise levels."""


class PushToHub(Section):
    """The repository to upload the result to. A failed upload is a warning and never stops a run."""

    repo_id: Name
    """`owner/name`, or `name` for a repository of the token's owner. It is created if it does not exist."""
    private: Flag = True
    """Whether a repository that is created is private."""
    every_checkpoint: Flag = False
    """Upload each checkpoint's weights too, to a folder `checkpoint-STEP`."""


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
    """The program that has to load the files as they were trained; unset means every program that `format` is for."""
    push_to_hub: PushToHub | None = None


class Logging(Section):
    every_steps: PositiveInt = 10
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    project: Name = "gracetune"
    webhook: Name | None = None


class RunConfig(Section):
    """The complete configuration of one training run. It is frozen."""

    name: Annotated[FileName, Field(examples=["my-run"])]
    """Name of the run and of the result's files."""
    output_dir: Annotated[Name, Field(examples=["output/my-run"])]
    model: Model
    datasets: Annotated[tuple[Dataset, ...], Field(examples=["photos"])]
    """A folder, a list of folders, or a list of sections."""
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
        """Whether tokens skip blocks, except those inside a mask, so that their number differs from batch to batch."""
        return self.skips_blocks and any(dataset.has_masks and not dataset.disabled for dataset in self.datasets)

    @property
    def skips_blocks(self) -> bool:
        """Whether any token skips any block."""
        return any(route.skip_ratio > 0 for route in self.training.token_routing.routes)

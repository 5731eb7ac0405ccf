"""`RunConfig`: the complete configuration of one training run. Every dialect is converted to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

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
from gracetune.config.families import Family
from gracetune.config.memory_options import MemoryOptions
from gracetune.config.registry import FULL_FINETUNE, AdapterKind, FormatName, OptimizerName, Program, TrackerName
from gracetune.config.token_routes import TokenRouting

Rank = Annotated[int, Strict(), Field(ge=1, le=10**10)]
"""The upper bound admits LoKr's way to say "do not decompose": ai-toolkit writes 9999999999. `limits.LARGEST_RANK` is
the bound for other algorithms."""
Side = Annotated[int, Strict(), Field(ge=1, le=LONGEST_SIDE)]
Frames = Annotated[int, Strict(), Field(ge=1, le=10_000)]
SamplingSteps = Annotated[int, Strict(), Field(ge=1, le=10_000)]


class Model(Section):
    family: Family
    """The model family."""
    flavour: Name | None = None
    """One of the family's published weights. Unset with a `path` means that it is detected from the weights."""
    path: Name | None = None
    """Local folder, single safetensors file or hub id; unset means the flavour's published weights."""
    revision: Name | None = None
    """Branch, tag or commit of the model on the hub; unset means its default branch."""
    variant: Name | None = None
    """Variant of the weight files in a model's folder, for example `fp16`."""
    vae_path: Name | None = None
    """Folder or hub id of a VAE that replaces the model's own."""
    text_encoder_path: Name | None = None
    """Folder or hub id of a text encoder that replaces the model's own."""
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
    """Encode images in tiles, which needs less GPU memory and gives slightly different latents."""
    vae_slicing: Flag = False
    """Encode one sample at a time, which needs less GPU memory and gives the same latents."""
    size_conditioning: Literal["original", "scaled", "bucket"] = "original"
    """The original size that SDXL is conditioned on. `original`: the file's. `scaled`: the size before the crop.
    `bucket`: that of the bucket, and a crop at 0, 0."""
    drop_size_conditioning: Flag = False
    """Condition SDXL on zeros instead of sizes if the caption is dropped."""


class Adapter(Section):
    kind: AdapterKind = "lora"
    """The algorithm; `full_finetune` trains the weights themselves."""
    rank: Rank = 16
    """Rank of the trained factors."""
    alpha: PositiveFloat | None = None
    """Unset means equal to the rank."""
    dropout: Fraction = 0.0
    """Share of the adapter's intermediate values that are set to 0 in training."""
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
    """LoKr only: decompose the first factor to the rank too, where that makes it smaller."""
    targets: tuple[Name, ...] = ()
    """Module patterns; empty means the family's own choice. A pattern that matches nothing is an error."""
    exclude: tuple[Name, ...] = ()
    """Module patterns that are not adapted, although `targets` match them."""
    within: tuple[Name, ...] = ()
    """Names of modules, as in their paths (`transformer_blocks`, `blocks.3`): only layers inside them are adapted.
    Without `targets`, every linear layer inside them is, and with `conv_rank` every convolution, as in ai-toolkit."""
    by_module: dict[str, Options] = Field(default={})
    """Options of single module classes that differ from the ones above (LyCORIS' `module_algo_map`)."""
    strength: Number = 1.0
    """Factor of the adapter's output (LyCORIS' `multiplier`)."""
    init_from: Name | None = None
    """Adapter file to start from."""

    @property
    def is_full_finetune(self) -> bool:
        """Whether the weights themselves are trained, without an adapter."""
        return self.kind == FULL_FINETUNE


class Cache(Section):
    vae_cache_type: Literal["unified_memory", "memory", "disk"] = "disk"
    """Where latents are read from during training: `disk`, page-locked host memory (`memory`), or managed memory where
    the machine supports it (`unified_memory`). They are stored on disk in every case."""
    text_cache_type: Literal["unified_memory", "memory", "disk"] = "disk"
    """The same for text embeddings."""
    cache_dir: Name | None = None
    """Unset means `cache` inside the run's folder."""
    text_cache_dir: Name | None = None
    """Folder for the text embeddings; unset means one below `cache_dir`."""
    vae_cache_dir: Name | None = None
    """Folder for the latents of every dataset without a `cache_dir` of its own."""
    persistent_cache: Flag = True
    """False removes the entries that this run added when it ends normally."""
    vae_batch_size: BatchSize = 4
    """Images that the VAE encodes at a time."""
    text_encoder_batch_size: BatchSize = 4
    """Captions that the text encoder encodes at a time."""


class Ema(Section):
    enabled: Flag = False
    """Keep an exponential moving average of the trained weights. Samples, the held-out loss and the result use it."""
    decay: OpenFraction = 0.999
    """Share of the average that each update keeps."""
    update_every: PositiveInt = 1
    """Optimizer steps between updates of the average."""
    ramp: Flag = False
    """Let the decay grow with the number s of optimizer steps, s / (s + 9), up to `decay`. The average then follows the
    weights from the first step, as in SimpleTuner."""
    copy_until: WholeNumber = 0
    """Before this optimizer step the average is a copy of the weights; from it on the decay is `decay`, even with
    `ramp`. SimpleTuner's `ema_warmup_steps`."""


class BatchRamp(Section):
    """Grow the effective batch quadratically over the first micro-batches."""

    enabled: Flag = False
    """Start with a small effective batch and let it grow."""
    initial_effective_batch_size: PositiveInt | None = None
    """Samples in the first optimizer step, over all processes."""
    target_effective_batch_size: PositiveInt | None = None
    """Samples in an optimizer step at the end of the ramp, over all processes."""
    batch_rampup_steps: PositiveInt | None = None
    """Counted in micro-batches."""


class Training(Section):
    max_steps: PositiveInt | None = None
    """Optimizer steps of the run. Set this or `epochs`."""
    epochs: Annotated[int, Strict(), Field(ge=1, le=100_000)] | None = None
    """Passes over the data. Set this or `max_steps`."""
    batch_size: BatchSize = 1
    """Samples in a micro-batch of one process."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches in an optimizer step."""
    accumulation: Literal["mean", "sum"] = "mean"
    """How the gradients of an optimizer step's micro-batches are combined. ai-toolkit sums them, so the gradient, which
    `max_grad_norm` clips, grows with their number."""
    fill_batches: Flag = False
    """If too few samples of a shape are left for a batch, fill it with other samples of that shape or with copies."""
    dataset_weights: Literal["size", "equal"] = "size"
    """What a dataset's share of the batches depends on. `size`: its `probability` and its size. `equal`: only its
    `probability`."""
    gradient_checkpointing: Literal["off", "auto", "full"] = "auto"
    """Recompute activations in the backward pass, which needs less memory and more time. `auto`: only as far as the
    memory plan needs it."""
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the forward and backward pass."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient at this; null means no clipping."""
    grad_clip: Literal["norm", "value"] = "norm"
    """`norm`: scale the gradient if its norm is above `max_grad_norm`. `value`: limit each of its elements to it."""
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math", "flash_attn_2", "flash_attn_3"] = "auto"
    """Attention kernel. `auto` chooses by GPU and model, and prints why; `sdpa` leaves the choice to PyTorch."""
    compile: Literal["off", "auto", "on"] = "auto"
    """Compile the blocks of the denoiser with torch.compile. `auto`: on a GPU."""
    seed: Seed = 42
    """Seed of everything random: initial adapter weights, noise, noise levels, crops, the order of the samples."""
    deterministic: Flag = False
    """Use only deterministic kernels: two runs on the same GPU then agree to the last bit. Slower."""
    ema: Ema = Ema()
    """Moving average of the weights."""
    ramp: BatchRamp = BatchRamp()
    """Growth of the effective batch at the start of the run."""
    token_routing: TokenRouting = TokenRouting()
    """Tokens that skip blocks in training (TREAD)."""


class AutomagicLimits(Section):
    lr_bump: PositiveFloat | None = None
    """How much an element's rate changes at each step; unset means 1e-6."""
    min_lr: PositiveFloat | None = None
    """Lowest rate of an element; unset means 1e-7."""
    max_lr: PositiveFloat | None = None
    """Highest rate of an element; unset means 1e-3."""


StatePrecision = Literal["fp32", "bf16_moments", "residual", "residual_bf16_moments"]


class OptimizerState(Section):
    """Full fine-tunes with AdamW only."""

    home: Literal["auto", "resident", "streamed"] = "auto"
    """Where master weights and moments are kept. `resident` keeps them on the GPU. `streamed` keeps them in pinned host
    memory and copies them through the GPU in every optimizer step. Both keep bf16 weights on the GPU. `auto` trains
    fp32 weights, with the optimizer's usual state on the GPU."""
    precision: StatePrecision = "fp32"
    """Precision of a `resident` or `streamed` state: 12, 8, 10 or 6 bytes for each parameter. A residual is the low 16
    bits of the fp32 master, which the bf16 weight lacks."""


class Optimizer(Section):
    name: OptimizerName = "adamw"
    """The optimizer."""
    lr: NonNegativeFloat = 1e-4
    """Learning rate. Prodigy scales its own estimate by it, and Automagic's rates start at it."""
    weight_decay: NonNegativeFloat | None = None
    """Unset means the optimizer's own default, as for all keys below."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay rates of the moments of Adam and its relatives."""
    eps: PositiveFloat | None = None
    """The term that keeps the denominator above 0."""
    limits: AutomagicLimits = AutomagicLimits()
    """Limits of Automagic's per-element learning rates; `high_noise` and `low_noise` override them for one expert."""
    high_noise: AutomagicLimits = AutomagicLimits()
    """Limits of the high-noise expert."""
    low_noise: AutomagicLimits = AutomagicLimits()
    """Limits of the low-noise expert."""
    state: OptimizerState = OptimizerState()
    """Where a full fine-tune keeps its optimizer state, and in which precision."""
    rates_from: Name | None = None
    """Automagic only: the `optimizer.pt` of an ai-toolkit run whose learning rates a new run starts with."""
    options: Options = Field(default={})
    """Further options of the optimizer, under its own names."""


class Schedule(Section):
    name: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "sine"
    ] = "constant"  # fmt: skip
    """Shape of the learning rate over the run."""
    warmup_steps: WholeNumber = 0
    """Optimizer steps at the start in which the rate rises linearly from 0. `constant` has none."""
    cycles: PositiveFloat = 1
    """Number of waves, for `cosine_with_restarts` and `sine`."""
    power: PositiveFloat = 1.0
    """Exponent of `polynomial`."""
    end_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    half_period: PositiveInt | None = None
    """`cosine` and `sine` only: the rate follows a wave between `lr` and `end_lr` for the whole run, with this many
    optimizer steps from top to bottom, without warm-up and `cycles`, as in SimpleTuner. Unset means a single decay."""


class ShiftLine(Section):
    """A flow shift that grows with the image: exp(mu), where mu is a linear function of the number of tokens (2 x 2
    latents each) through two points. The names are those of diffusers' schedulers."""

    base_image_seq_len: PositiveInt = 256
    """Tokens of the first point."""
    base_shift: Number = 0.5
    """mu at `base_image_seq_len` tokens."""
    max_image_seq_len: PositiveInt = 4096
    """Tokens of the second point."""
    max_shift: Number = 1.15
    """mu at `max_image_seq_len` tokens."""


class Objective(Section):
    loss: Literal["mse", "mae", "huber", "smooth_l1", "pseudo_huber"] = "mse"
    """Loss per element: squared error, absolute error, or one of the smooth mixtures of both."""
    huber_delta: PositiveFloat = 0.1
    """Error at which the three mixed losses turn from square to linear."""
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
    """Distribution of the noise levels, before `flow_shift`. `uniform` and `shift`: all levels alike. `sigmoid` and
    `logit_normal`: most in the middle. `beta`: the beta distribution. `weighted`: uniform, with `timestep_weights`.
    `one_step`: always pure noise."""
    timestep_bias: Literal["balanced", "content", "style"] = "balanced"
    """Prefer high noise levels (`content`) or low ones (`style`)."""
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
    """Width of the distribution for `sigmoid` and `logit_normal`; larger values spread the levels towards both ends."""
    beta_alpha: PositiveFloat = 2.0
    """First parameter of `timesteps: beta`."""
    beta_beta: PositiveFloat = 2.0
    """Second parameter of `timesteps: beta`."""
    min_timestep: Annotated[int, Strict(), Field(ge=0, le=1000)] = 0
    """Lowest noise level that is trained, in thousandths."""
    max_timestep: Annotated[int, Strict(), Field(ge=0, le=1000)] = 1000
    """Highest noise level that is trained, in thousandths."""
    snr_gamma: PositiveFloat | None = None
    """Limit of the min-SNR loss weights, usually 5. No effect with flow matching."""
    soft_min_snr: Flag = False
    """Use the smooth form of the min-SNR weights; without `snr_gamma`, with a limit of 1. No effect with flow
    matching."""
    debiased: Flag = False
    """Weight the loss by debiased estimation, 1 / sqrt(SNR) for epsilon prediction. No effect with flow matching."""
    noise_offset: NonNegativeFloat = 0.0
    """Add this much random noise per channel, constant over the image, which helps with very dark and very bright
    images."""
    noise_offset_probability: Fraction = 1.0
    """Share of samples that get the `noise_offset`."""
    input_perturbation: NonNegativeFloat = 0.0
    """Add this much extra noise to the noisy input, but not to the target."""


class ValidationPrompt(Section):
    """One sample to generate. Unset values come from the `validation` section."""

    prompt: Text
    """Text of the sample."""
    negative_prompt: Text | None = None
    """Text to steer away from."""
    width: Side | None = None
    """Width in pixels."""
    height: Side | None = None
    """Height in pixels."""
    num_frames: Frames | None = None
    """Number of frames of a clip."""
    seed: Seed | None = None
    """Seed of the sample's noise."""
    guidance: NonNegativeFloat | None = None
    """Guidance scale."""
    steps: SamplingSteps | None = None
    """Denoising steps."""
    adapter_strength: Number = 1.0
    """Strength of the adapter in this sample; 0 shows the base model."""
    references: tuple[Name, ...] = ()
    """Input images of an edit or image-to-video model."""


class Validation(Section):
    enabled: Flag = True
    """False: generate no samples."""
    every_steps: PositiveInt | None = None
    """Optimizer steps between samples."""
    every_epochs: PositiveInt | None = None
    """Epochs between samples."""
    at_start: Flag = False
    """Generate samples before the first step too."""
    prompts: tuple[ValidationPrompt, ...] = ()
    """The samples to generate."""
    negative_prompt: Text = ""
    """Negative prompt of samples without one; empty means the model's usual one, if it has one."""
    width: Side | None = None
    """Width of samples in pixels; unset means the model's own size."""
    height: Side | None = None
    """Height of samples in pixels; unset means the model's own size."""
    num_frames: Frames | None = None
    """Frames of a generated clip; unset means 1."""
    fps: FrameRate | None = None
    """Frame rate of the files of generated clips."""
    seed: Seed | None = None
    """Seed of the samples; unset means `training.seed`."""
    walk_seed: Flag = False
    """Increase the seed by 1 from each prompt to the next."""
    guidance: NonNegativeFloat | None = None
    """Guidance scale; unset means the model's own."""
    guidance_rescale: Fraction = 0.0
    """Rescaling of the guided prediction, against overexposed samples. SDXL only."""
    steps: SamplingSteps | None = None
    """Denoising steps; unset means 20."""
    images_per_prompt: Annotated[int, Strict(), Field(ge=1, le=1000)] = 1
    """Samples per prompt, with consecutive seeds."""
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
    """Optimizer steps between checkpoints; null means none by steps."""
    every_epochs: PositiveInt | None = None
    """Epochs between checkpoints."""
    keep_last: PositiveInt = 5
    """Number of latest checkpoints that are kept."""
    keep_every_steps: PositiveInt | None = None
    """Also keep checkpoints whose step is a multiple of this."""
    resume: Name = "latest"
    """`latest`, `none`, or a checkpoint folder."""
    save_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the result's files."""
    format: FormatName = "comfyui"
    """Key names and layout of the adapter files. The default for a LoRA on SDXL's default layers is `kohya`."""
    for_program: Program | None = None
    """The program that has to load the files as they were trained; unset means every program that `format` is for."""
    push_to_hub: PushToHub | None = None
    """Upload the result to the Hugging Face hub; unset means that nothing is uploaded."""


class Logging(Section):
    every_steps: PositiveInt = 10
    """Optimizer steps between log entries. Losses are read from the GPU only at these steps."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Programs that record the run, besides the event log that is always written."""
    project: Name = "gracetune"
    """Project of the run in Weights & Biases."""
    webhook: Name | None = None
    """Web address that gets one message when the run ends, in a form that chat services show."""


class RunConfig(Section):
    """The complete configuration of one training run. It is frozen."""

    name: Annotated[FileName, Field(examples=["my-run"])]
    """Name of the run and of the result's files."""
    output_dir: Annotated[Name, Field(examples=["output/my-run"])]
    """Folder of the run: checkpoints, samples, logs, the report and the result."""
    model: Model
    """The base model."""
    datasets: Annotated[tuple[Dataset, ...], Field(examples=["photos"])]
    """The data to train on, and data of other roles: references, masks, held-out files. A folder, a list of folders, or
    a list of sections."""
    adapter: Adapter = Adapter()
    """What is trained: an adapter of some kind, or the weights themselves. A section, or the kind alone."""
    training: Training = Training()
    """Length, batch size, precision and memory of the training steps."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its options. A section, or the name alone."""
    schedule: Schedule = Schedule()
    """How the learning rate changes during the run. A section, or the name alone."""
    objective: Objective = Objective()
    """The loss, and the noise levels that it is computed at."""
    cache: Cache = Cache()
    """Where latents and text embeddings are kept, so that each is computed only once."""
    validation: Validation = Validation()
    """Samples generated during the run, and the held-out loss."""
    checkpoints: Checkpoints = Checkpoints()
    """When the state is saved, what is kept, and the format of the result."""
    logging: Logging = Logging()
    """How often a run reports, and to which trackers."""
    memory: MemoryOptions = MemoryOptions()
    """Unified CPU and GPU memory."""

    @property
    def has_chunked_state(self) -> bool:
        """Whether the optimizer keeps fp32 masters, in chunks, of weights that stay in 16 bits."""
        return self.adapter.is_full_finetune and self.optimizer.state.home != "auto"

    @property
    def keeps_masked_tokens(self) -> bool:
        """Whether tokens skip blocks, except those inside a mask, so that their number differs from batch to batch."""
        return self.skips_blocks and any(dataset.has_masks and not dataset.disabled for dataset in self.datasets)

    @property
    def skips_blocks(self) -> bool:
        """Whether any token skips any block."""
        return any(route.skip_ratio > 0 for route in self.training.token_routing.routes)

"""The names of a model family in configuration files: the record `NAMES` in the family's `names.py`.

The record is plain data, because a config file is checked long before model code is imported. From gracetune, a
`names.py` imports only `gracetune.config` and `gracetune.errors`. `config.families` finds it by the family's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Modality = Literal["image", "video", "audio"]
Objective = Literal["flow", "ddpm", "cosine"]


@dataclass(frozen=True)
class Flavour:
    """One published set of weights of a family."""

    name: str
    weights: str
    """The hub id that they are published under."""
    makes: Modality
    dual_expert: bool = False
    """Two denoisers: one for high noise levels, one for low ones."""
    edits: bool = False
    """Takes reference images, such as the image before an edit."""
    images_alone: bool = False
    """For one that edits: whether images without references train it too."""
    from_image: bool = False
    """Image-to-video only: every clip continues a first frame."""
    distilled: bool = False
    """Distilled to few sampling steps, which training would undo: only adapters are trained, with an assistant adapter
    (`config.rules.distilled_problem`)."""


@dataclass(frozen=True)
class ShiftPoints:
    """A flow shift that depends on an image's number of tokens (2 x 2 latents each).

    The shift is exp(mu), where mu is a linear function of the token count through (`base_tokens`, `base`) and
    (`max_tokens`, `max`).
    """

    base_tokens: int = 256
    base: float = 0.5
    max_tokens: int = 4096
    max: float = 1.15

    @property
    def line(self) -> dict[str, float]:
        """The values as `objective.resolution_shift` takes them."""
        return {
            "base_image_seq_len": self.base_tokens, "base_shift": self.base,
            "max_image_seq_len": self.max_tokens, "max_shift": self.max,
        }  # fmt: skip


# -- SimpleTuner -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RejectedFlavour:
    """One of our flavours that SimpleTuner trains in a way that is not supported here."""

    unless: str
    """The option that makes SimpleTuner train it as gracetune does."""
    why: str
    hint: str


@dataclass(frozen=True)
class LoraTargets:
    """The layers that SimpleTuner's LoRA adapts."""

    default: tuple[str, ...] = ()
    """Empty means the family's own choice."""
    option: str = ""
    """The option that selects one of `groups` instead."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class DefaultVae:
    """A VAE that SimpleTuner uses instead of the one in the weights."""

    weights: str
    mark: str
    """A part of the names of such VAEs. SimpleTuner ignores them in another family."""
    title: str


@dataclass(frozen=True)
class ClipLength:
    """SimpleTuner's default clip length: `fps` times `seconds`, rounded down to `frame_step` * k + 1 frames."""

    fps: int
    seconds: int
    frame_step: int

    def rounded_down(self, frames: int) -> int:
        return max(1, (frames - 1) // self.frame_step * self.frame_step + 1)


@dataclass(frozen=True)
class SimpleTunerNames:
    """SimpleTuner's names for a family's parts, and its rules for them. Its `model_family` is our family name."""

    flavours: Mapping[str, str] = field(default_factory=dict)
    """SimpleTuner's `model_flavour` -> ours, where the names differ. Names of a single expert (`…-high`, `…-low`) are
    derived and need no entry."""
    default_flavour: str | None = None
    """The `model_flavour` of a file that names none; None means that the weights decide."""
    untrained_flavours: tuple[str, ...] = ()
    """Flavours of this family that SimpleTuner trains and gracetune does not."""
    assistants: Mapping[str, str] = field(default_factory=dict)
    """SimpleTuner's flavour, or ours -> the assistant adapter that SimpleTuner loads while it trains an adapter, if a
    file names none. SimpleTuner's name comes first, for flavours that differ only in their assistant."""
    rejected_flavours: Mapping[str, RejectedFlavour] = field(default_factory=dict)
    """Our flavour -> why it is rejected in a SimpleTuner file."""
    forced_expert_shifts: Mapping[str, float] = field(default_factory=dict)
    """Our flavour -> the flow shift that SimpleTuner forces for a single expert, whatever the file says."""
    flavours_without_shift: tuple[str, ...] = ()
    """Our flavours without a default flow shift in SimpleTuner."""
    auto_shift: ShiftPoints = ShiftPoints()
    """The shift of `flow_schedule_auto_shift`. Most published scheduler configs lack it, so the defaults apply."""
    guidance_option: str = ""
    """The option for the guidance that a guidance-distilled model is trained with."""
    guidance_without: float = 0.0
    """Added to SimpleTuner's `validation_guidance` to get ours: for a pipeline that adds guidance to the prediction of
    the prompt instead of to that of the negative prompt."""
    guided_above: float = 1.0
    """Values of `validation_guidance` up to this mean no guidance in SimpleTuner and stay as they are."""
    targets: LoraTargets = LoraTargets()
    vae: DefaultVae | None = None
    """None: SimpleTuner uses the VAE in the weights."""
    text_encoder_option: str = ""
    """The option for a text encoder from another place than the model."""
    clips: ClipLength | None = None
    """None: the family makes no clips."""
    alignment: int | None = None
    """The sides of its buckets are multiples of this; None means the family's own multiple."""
    alignments: Mapping[str, int] = field(default_factory=dict)
    """Our flavour -> its `alignment`, where it differs."""
    free_alignment: bool = False
    """Whether `aspect_bucket_alignment` has an effect in a file that sets `i_know_what_i_am_doing`."""
    unsupported_options: tuple[str, ...] = ()
    """Options with an effect on this family but not on every other. They are not supported; the key table says why."""


# -- ai-toolkit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arch:
    """One of ai-toolkit's model classes (`model.arch`)."""

    flavours: tuple[str, ...]
    """The weights it can load. If there is only one flavour, `name_or_path` is not needed to tell which."""
    starts_from_image: Literal["never", "always", "do_i2v"] = "never"
    """Whether clips are trained from their first frame; `do_i2v` leaves it to the dataset."""
    references: Literal["reference_strict", "reference_loose"] | None = None
    """How control images reach the model: cropped like the target, or in their own shape. None: it takes none."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tag in `arch: name:tag` -> flavour. Upstream ignores the tag; published files use it consistently."""
    switch: str = ""
    """The boolean key that older files have instead of `arch`, such as `is_flux`."""
    latent_space: str = ""
    """The name of its latents in upstream's caches; empty means the name of the arch."""
    shift: float | ShiftPoints | None = None
    """The flow shift of `timestep_type: shift`, from the arch's own scheduler, which overrides that of the weights.
    None means that the weights decide."""
    shift_terminal: float = 0.0
    """The lowest noise level of `timestep_type: shift`."""
    assistant: bool = False
    """Whether it takes an assistant adapter (`assistant_lora_path`)."""
    boundary_note: str = ""
    """The note on the noise level at which ai-toolkit switches experts, if it is not that of the weights."""
    bucket_step: int | None = None
    """The sides of its buckets are multiples of this; None means the family's own multiple."""
    other_models: Mapping[str, str] = field(default_factory=dict)
    """Part of the name of weights that only upstream loads with this arch -> the expected weights, for the message."""


@dataclass(frozen=True)
class AiToolkitNames:
    """ai-toolkit's names for a family's models, and its rules for them."""

    archs: Mapping[str, Arch] = field(default_factory=dict)
    unet: bool = False
    """Whether the denoiser is a U-Net. Alpha is then used as written, and the noise schedule can be DDPM's."""
    text_encoder_qtype: str = "qtype_te"
    """The key of the `model` block with the text encoder's quantized type."""
    guidance_embedding: str = ""
    """Why `bypass_guidance_embedding` is rejected. Empty if there is no such embedding, and the key does nothing."""
    blocks: tuple[str, ...] = ()
    """Modules, as named in their paths, in which ai-toolkit adapts every linear layer. Empty means the family's
    default targets (`ModelSpec.default_targets`)."""
    blocks_are_default_targets: bool = False
    """Whether the family's default targets are exactly the linear layers of `blocks`."""
    conv_blocks: tuple[str, ...] = ()
    """Additional modules, if convolutions are adapted too."""
    unguided: tuple[str, ...] = ()
    """Flavours without a guidance embedding, in a family that has one."""


@dataclass(frozen=True)
class FamilyNames:
    """All names of one family in the configuration files of the three dialects."""

    family: str
    flavours: tuple[Flavour, ...]
    """The first is the default."""
    pipelines: tuple[str, ...] = ()
    """diffusers' pipeline classes that its weights are published for, as in `model_index.json`."""
    objective: Objective | None = None
    """What the denoiser predicts. It decides which noise options have an effect in SimpleTuner's files. `flow`: a flow.
    `ddpm`: epsilon or v of a DDPM schedule (a file can also request a flow). `cosine`: v of the cosine schedule, which
    has no options. None means unknown: timesteps are uniform, and the other noise options have no effect."""
    spaces_count: bool = False
    """Whether its tokenizer distinguishes one space from two; other tokenizers collapse them."""
    explicit_sizes: bool = False
    """Whether the denoiser is conditioned on an image's size and crop (`model.size_conditioning`)."""
    lora_format: str | None = None
    """The default of `checkpoints.format` for a LoRA on the family's default layers, if it is not `comfyui`."""
    routed_blocks: tuple[str, ...] = ()
    """The denoiser's lists of blocks that tokens can skip, in the order in which `training.token_routing` numbers them.
    `ModelSpec.token_routing` does the skipping. Empty means that token routing is rejected."""
    simpletuner: SimpleTunerNames = SimpleTunerNames()
    aitoolkit: AiToolkitNames = AiToolkitNames()

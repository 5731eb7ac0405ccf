"""What configuration files call a model family: the record in every family's `names.py`.

It is plain data, because a config file is checked long before any model code is imported. A family's `names.py`
imports `gracetune.config` and `gracetune.errors` and nothing else of ours, and calls its record `NAMES`.
`config.families` finds it by the family's name.
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
    makes: Modality
    dual_expert: bool = False
    edits: bool = False
    from_image: bool = False
    """Clips go on from a first frame, and only so."""


@dataclass(frozen=True)
class ShiftPoints:
    """A flow shift by an image's number of tokens, 2 x 2 latents each: exp of a straight line through two points."""

    base_tokens: int = 256
    base: float = 0.5
    max_tokens: int = 4096
    max: float = 1.15

    @property
    def line(self) -> dict[str, float]:
        """As `objective.resolution_shift`."""
        return {
            "base_image_seq_len": self.base_tokens, "base_shift": self.base,
            "max_image_seq_len": self.max_tokens, "max_shift": self.max,
        }  # fmt: skip


# -- SimpleTuner -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RejectedFlavour:
    """A flavour of ours that SimpleTuner trains in a way that is not supported here."""

    unless: str
    """The option that makes SimpleTuner train it as we do."""
    why: str
    hint: str


@dataclass(frozen=True)
class LoraTargets:
    """The layers SimpleTuner's LoRA sits on."""

    default: tuple[str, ...] = ()
    """Empty: the family's own choice."""
    option: str = ""
    """The option that names one of `groups` instead."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class DefaultVae:
    """A VAE that SimpleTuner takes instead of the one in the weights."""

    weights: str
    mark: str
    """What the names of such VAEs contain. SimpleTuner does not use them in another family."""
    title: str


@dataclass(frozen=True)
class ClipLength:
    """How SimpleTuner cuts clips that say no length: `fps` times `seconds`, rounded down to `step` k + 1 frames."""

    fps: int
    seconds: int
    step: int

    def fitting(self, frames: int) -> int:
        return max(1, (frames - 1) // self.step * self.step + 1)


@dataclass(frozen=True)
class SimpleTunerNames:
    """What SimpleTuner calls a family's parts, and what it does with them. `model_family` is the family's own name."""

    flavours: Mapping[str, str] = field(default_factory=dict)
    """Its `model_flavour` -> ours, where the names differ. The two experts of a flavour (`…-high`, `…-low`) are found
    without being listed."""
    default_flavour: str | None = None
    """The `model_flavour` it takes when a file names none; None: the weights decide."""
    untrained_flavours: tuple[str, ...] = ()
    """Flavours of the family that it trains and we do not."""
    assistants: Mapping[str, str] = field(default_factory=dict)
    """Our flavours that it trains adapters for under an assistant adapter -> the one it takes where a file names
    none."""
    rejected_flavours: Mapping[str, RejectedFlavour] = field(default_factory=dict)
    """By our names."""
    expert_shifts: Mapping[str, float] = field(default_factory=dict)
    """Flavour -> the flow shift it sets for a single expert, whatever the file says."""
    without_shift: tuple[str, ...] = ()
    """Our flavours that it has no default flow shift for."""
    auto_shift: ShiftPoints = ShiftPoints()
    """What `flow_schedule_auto_shift` follows; most schedulers say nothing about it, and it takes their defaults."""
    guidance_option: str = ""
    """The option for the guidance that a guidance-distilled model is trained with."""
    targets: LoraTargets = LoraTargets()
    vae: DefaultVae | None = None
    text_encoder_option: str = ""
    """The option for a text encoder from elsewhere."""
    clips: ClipLength | None = None
    alignment: int | None = None
    """The sides of its buckets are multiples of this; None: the family's own multiple."""
    alignments: Mapping[str, int] = field(default_factory=dict)
    """By our flavours, where one differs."""
    free_alignment: bool = False
    """`aspect_bucket_alignment` counts where the file says `i_know_what_i_am_doing`."""
    own_options: tuple[str, ...] = ()
    """Options that act on this family and not on every other, and are not supported here: its key table says why."""


# -- ai-toolkit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arch:
    """One of ai-toolkit's model classes (`model.arch`)."""

    flavours: tuple[str, ...]
    """The weights it may be given; the only one is known without looking at `name_or_path`."""
    starts_from_image: Literal["never", "always", "do_i2v"] = "never"
    """Whether clips are learnt from their first frame; `do_i2v`: where the dataset says so."""
    references: Literal["reference_strict", "reference_loose"] | None = None
    """How control images reach the model: cut like the target, or in their own shape."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """What stands behind the colon of `arch: name:tag` -> flavour. Upstream drops it; the published names agree."""
    switch: str = ""
    """The switch that files from before `arch` have instead."""
    latent_space: str = ""
    """What its caches call the latents; empty: the name of the arch."""
    shift: float | ShiftPoints | None = None
    """The flow shift of `timestep_type: shift`, which the arch's own scheduler has, whatever the weights' says. None:
    the weights decide."""
    shift_terminal: float = 0.0
    """The lowest noise level of `timestep_type: shift`."""
    assistant: bool = False
    """Whether it takes an assistant adapter (`assistant_lora_path`)."""
    boundary_note: str = ""
    """What to say about the noise level at which ai-toolkit switches experts, where it is not the weights' own."""
    bucket_step: int | None = None
    """The sides of its buckets are multiples of this; None: the family's own multiple."""
    other_models: Mapping[str, str] = field(default_factory=dict)
    """A text in the name of weights that upstream loads with this arch and we do not -> what is expected instead."""


@dataclass(frozen=True)
class AiToolkitNames:
    """What ai-toolkit calls a family's models, and what it does with them."""

    archs: Mapping[str, Arch] = field(default_factory=dict)
    unet: bool = False
    """The denoiser is a U-Net: alpha is taken as written, and the noise schedule may be DDPM's."""
    text_encoder_qtype: str = "qtype_te"
    """The key of the `model` block that says how the text encoder is quantised."""
    guidance_embedding: str = ""
    """Why `bypass_guidance_embedding` is refused; empty: there is no such embedding, and the key does nothing."""
    blocks: tuple[str, ...] = ()
    """Names of the modules, as in their paths, inside which it adapts every linear layer; empty: the family's own
    choice of layers."""
    default_is_blocks: bool = False
    """The family's own choice of layers is every linear layer of these modules."""
    conv_blocks: tuple[str, ...] = ()
    """Further ones, if convolutions are adapted too."""
    unguided: tuple[str, ...] = ()
    """Flavours without such an embedding, in a family that has one."""


@dataclass(frozen=True)
class FamilyNames:
    """Everything the configuration files of the three dialects may say about one family."""

    family: str
    flavours: tuple[Flavour, ...]
    """The first is the one taken when a config names none."""
    pipelines: tuple[str, ...] = ()
    """diffusers' classes of the pipelines that its weights are published for, as `model_index.json` names them."""
    objective: Objective | None = None
    """What the denoiser is trained to predict, which decides the noise options that act in SimpleTuner's files: a flow,
    epsilon or v of a DDPM schedule (where a file may also ask for a flow), or v of the cosine schedule, which has no
    options. None: unknown; timesteps are uniform then, and the other noise options have no effect."""
    spaces_count: bool = False
    """Its tokenizer tells one space from two; the others take them for one."""
    explicit_sizes: bool = False
    """The denoiser is told an image's size and crop (`model.size_conditioning`)."""
    routed_blocks: tuple[str, ...] = ()
    """The denoiser's lists of blocks that tokens can skip, in the order of their numbers in `training.token_routing`;
    `ModelSpec.token_routing` says how. Empty: token routing is rejected."""
    simpletuner: SimpleTunerNames = SimpleTunerNames()
    aitoolkit: AiToolkitNames = AiToolkitNames()

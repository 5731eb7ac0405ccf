"""The job of a step bench: one model, one adapter, one shape, and the config a user would write for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from gracetune.config.families import names_of
from gracetune.config.run_config import RunConfig
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem
from gracetune.models.footprint import Footprint, PixelLatents, SampleShape
from gracetune.models.registry import FOOTPRINTS, geometry

AdapterKind = Literal["lora", "lokr", "loha", "dora"]
Precision = Literal["bf16", "fp8"]
Checkpointing = Literal["off", "auto", "full"]
OptimizerName = Literal["adamw", "automagic"]
ModelScale = Literal["published", "small", "tiny"]
"""`published`: real sizes. `small`: the same classes, narrower and with few blocks, for numerics. `tiny`: for tests."""

RANK: Final = 16
FACTOR: Final = 16
FEWEST_SAMPLES: Final = 20
WARM_UP: Final = 3
DATASET: Final = "random"
_SMOKE_SIDE: Final = 64
_SMOKE_FRAMES: Final = 5

Entries = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape of one sample, with the names of `cache.encoder`."""


@dataclass(frozen=True)
class Preset:
    """One bench: the model, and the inputs that its denoiser reads besides the latents."""

    name: str
    family: str
    flavour: str
    texts: Callable[[Mapping[str, Any], int], Entries]
    """Text entries, computed from the denoiser's config and the number of caption tokens."""
    small: Mapping[str, Any]
    """Config values that differ in the small model."""
    beside: Entries = field(default_factory=dict)
    """Further tensors of a latent entry."""
    resolution: int = 1024

    @property
    def footprint(self) -> Footprint:
        return next(one for one in FOOTPRINTS[self.family] if one.flavour == self.flavour)

    @property
    def latents(self) -> PixelLatents:
        latents = self.footprint.latents
        assert isinstance(latents, PixelLatents), "no bench uses audio"
        return latents

    def latent_shape(self, shape: SampleShape) -> tuple[int, ...]:
        latents = self.latents
        sides = (shape.height // latents.spatial, shape.width // latents.spatial)
        planes = (latents.planes(shape),) if latents.temporal > 1 else ()
        return (latents.channels, *planes, *sides)


def _pooled(config: Mapping[str, Any]) -> int:
    """Width of the pooled caption. SDXL reads it and six size embeddings in one vector."""
    return int(config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"])


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(
                "wan14b", "wan", "t2v-14b-2.2",
                texts=lambda config, tokens: {"prompt_embeds": (tokens, config["text_dim"])},
                small={"num_layers": 2, "num_attention_heads": 4, "ffn_dim": 1536},
            ),
            Preset(
                "qwen", "qwen_image", "t2i",
                texts=lambda config, tokens: {"prompt_embeds": (tokens, config["joint_attention_dim"])},
                small={"num_layers": 2, "num_attention_heads": 4},
            ),
            Preset(
                "flux", "flux", "dev",
                texts=lambda config, tokens: {
                    "prompt_embeds": (tokens, config["joint_attention_dim"]),
                    "pooled_prompt_embeds": (config["pooled_projection_dim"],),
                },
                small={"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4},
            ),
            Preset(
                "sdxl", "sdxl", "base-1.0",
                texts=lambda config, tokens: {
                    "prompt_embeds": (tokens, config["cross_attention_dim"]),
                    "pooled_prompt_embeds": (_pooled(config),),
                },
                small={
                    "block_out_channels": (64, 128, 256), "attention_head_dim": (1, 2, 4),
                    "transformer_layers_per_block": (1, 1, 2),
                },
                beside={"time_ids": (6,)},
            ),
            Preset(
                "z-image", "z_image", "base",
                texts=lambda config, tokens: {"prompt_embeds": (tokens, config["cap_feat_dim"])},
                small={"n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "dim": 512},
            ),
        )
    }
)  # fmt: skip


@dataclass(frozen=True)
class StepJob:
    """One row, before it is measured."""

    bench: str
    adapter: AdapterKind = "lora"
    precision: Precision = "bf16"
    batch: int = 1
    width: int = 1024
    height: int = 1024
    frames: int = 1
    checkpointing: Checkpointing = "auto"
    optimizer: OptimizerName = "adamw"
    memory_limit: int | None = None
    """Limit of torch's peak in bytes. The plan is made for a GPU with that much memory."""
    baseline: bool = False
    """Whether the plain loop is measured too."""
    steps: int = FEWEST_SAMPLES
    """Timed steps after the first one and the warm-up."""
    smoke: bool = False
    """A test of the bench itself: a tiny model and shape, also on a CPU."""
    token_routing: float = 0.0
    """Share of tokens that skip blocks: all blocks but the first two and the last one; in a tiny model all blocks."""

    @property
    def routes(self) -> list[dict[str, Any]]:
        if not self.token_routing:
            return []
        first, last = (0, -1) if self.smoke else (2, -2)
        return [{"skip_ratio": self.token_routing, "first_block": first, "last_block": last}]

    @property
    def preset(self) -> Preset:
        return PRESETS[self.bench]

    @property
    def scale(self) -> ModelScale:
        return "tiny" if self.smoke else "published"

    @property
    def shape(self) -> SampleShape:
        """The computed shape; a smoke test always has a tiny one."""
        if not self.smoke:
            return SampleShape(self.width, self.height, self.frames)
        return SampleShape(_SMOKE_SIDE, _SMOKE_SIDE, min(self.frames, _SMOKE_FRAMES))

    @property
    def tokens(self) -> int:
        """Image or video tokens of one sample."""
        return self.preset.latents.tokens(self.shape)

    @property
    def resolution(self) -> int | str:
        shape = self.shape
        return shape.width if shape.width == shape.height else f"{shape.width}x{shape.height}"


def parse_resolution(text: str) -> tuple[int, int]:
    """Parse `1024` or `832x480` into width and height."""
    match = re.fullmatch(r"\s*(\d+)(?:\s*[xX]\s*(\d+))?\s*", text)
    if match is None:
        hint = "--resolution 1024 or --resolution 832x480"
        raise ConfigError([Problem("--resolution", text, "a side, or WIDTHxHEIGHT", hint)])
    width = int(match[1])
    return width, int(match[2] or width)


def check_job(job: StepJob) -> StepJob:
    """Validate the job before anything is built. One ConfigError lists all problems."""
    problems: list[Problem] = []
    if job.bench not in PRESETS:
        meant = nearest(job.bench, PRESETS) or next(iter(PRESETS))
        raise ConfigError([Problem("NAME", job.bench, f"one of {', '.join(PRESETS)}", f"gracetune bench {meant}")])
    limits = geometry(job.preset.family, job.preset.flavour)
    multiple = limits.side_multiple
    for name, side in (("width", job.width), ("height", job.height)):
        if side < multiple or side % multiple:
            near = max(1, round(side / multiple)) * multiple
            expected = f"a multiple of {multiple}"
            problems.append(Problem(f"--resolution ({name})", str(side), expected, f"{near} is the nearest"))
    if limits.makes == "image" and job.frames != 1:
        problems.append(Problem("--frames", str(job.frames), f"1: {job.bench} makes images", "leave --frames out"))
    elif job.frames < 1 or (job.frames - 1) % limits.frame_step:
        near = max(0, round((job.frames - 1) / limits.frame_step)) * limits.frame_step + 1
        expected = f"a multiple of {limits.frame_step}, and one more"
        problems.append(Problem("--frames", str(job.frames), expected, f"--frames {near}"))
    if job.batch < 1:
        problems.append(Problem("--batch", str(job.batch), "1 or more", "--batch 1"))
    if job.steps < FEWEST_SAMPLES:
        expected = f"at least {FEWEST_SAMPLES}: a median of fewer says little"
        problems.append(Problem("--steps", str(job.steps), expected, f"--steps {FEWEST_SAMPLES}"))
    if not 0 <= job.token_routing < 1:
        found = f"{job.token_routing:g}"
        problems.append(Problem("--token-routing", found, "a share from 0, below 1", "--token-routing 0.5"))
    elif job.token_routing and not names_of(job.preset.family).routed_blocks:
        expected = f"0: tokens of {job.bench} cannot skip blocks"
        problems.append(Problem("--token-routing", f"{job.token_routing:g}", expected, "leave --token-routing out"))
    if problems:
        raise ConfigError(problems)
    return job


def config_of(job: StepJob, folder: Path, output: Path) -> RunConfig:
    """The config a user would write; `folder` holds the model's config files."""
    preset, shape = job.preset, job.shape
    adapter: dict[str, Any] = {"kind": job.adapter, "rank": RANK}
    if job.adapter == "lokr":
        adapter |= {"full_rank": True, "factor": FACTOR}
    data: dict[str, Any] = {
        "id": DATASET,
        "path": str(output / "no-files"),
        "resolution": (shape.width * shape.height) ** 0.5,
        "resolution_type": "pixel_area",
    }
    if shape.frames > 1:
        data |= {"dataset_type": "video", "video": {"num_frames": shape.frames}}
    return RunConfig.model_validate(
        {
            "name": f"bench-{job.bench}",
            "output_dir": str(output),
            "model": {
                "family": preset.family,
                "flavour": preset.flavour,
                "path": str(folder),
                "base_precision": job.precision,
                "experts": "high",  # one of two is enough: they alternate, and their steps cost the same
            },
            "datasets": [data],
            "adapter": adapter,
            "training": {
                "max_steps": 1 + WARM_UP + job.steps,
                "batch_size": job.batch,
                "gradient_checkpointing": job.checkpointing,
                "token_routing": {"routes": job.routes},
            },
            "optimizer": {"name": job.optimizer, "lr": 1e-4},
            "validation": {"enabled": False},
            "checkpoints": {"every_steps": None},
            "logging": {"trackers": []},
        }
    )

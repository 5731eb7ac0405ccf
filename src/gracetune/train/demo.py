"""`gracetune demo`: a LoRA teaches a tiny SDXL a shape that it has never seen (75 s of one core's time).

The base in `demo_base/` knows circles, squares and triangles in the colours of a caption. The LoRA is trained on images
of stars, and on some of the known shapes. Afterwards diffusers loads the adapter's file and generates images, and the
shape in each one is recognized: stars with the adapter, none without it (the control), and still the known shapes for
captions without the new word.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from diffusers import StableDiffusionXLPipeline
from diffusers.utils import logging
from PIL import Image, ImageDraw, ImageFont

import gracetune
from gracetune.config.environment import Environment
from gracetune.config.resolve import load
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.models.progress_bars import errors_only, without_bars
from gracetune.storage.atomic import write_file
from gracetune.telemetry.events import ValidationDone
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.demo_shapes import (
    BASE_SHAPES,
    CONCEPT,
    SIDE,
    RecognizedShape,
    ShapeImage,
    caption,
    random_shape,
    recognize,
)
from gracetune.train.run import RunOptions, train
from gracetune.train.view import View

BASE = Path(gracetune.__file__).parent / "demo_base"
STEPS, ROUNDS = 300, 5
"""Optimizer steps, and rounds of samples after the one before the first step."""
SAMPLING = {"steps": 20, "guidance": 2.5}
IMAGES, HELD_OUT, OTHERS = 32, 4, 24
"""Images of stars, how many of them the run holds back to measure the loss on, and images of the known shapes. Without
the latter, every shape would turn into a star."""
LEARNED, UNLEARNED = 0.75, 0.1
"""Stars among the images: at least this share with the adapter, and at most this share without it."""
KEPT = 0.5
"""Share of the images of known shapes that still have to show them."""
SHOWN = (
    ("star", "yellow", "blue"),
    ("star", "red", "white"),
    ("star", "green", "pink"),
    ("star", "white", "purple"),
    ("circle", "red", "yellow"),
    ("triangle", "green", "black"),
)
"""Captions of the sample grid. The LoRA is trained on none of them."""
_COUNTED = 16
"""Images that each share is measured on."""


@dataclass(frozen=True)
class ShapeCount:
    """What captions describe, and what the images generated from them show."""

    wanted: tuple[ShapeImage, ...]
    seen: tuple[RecognizedShape, ...]

    @property
    def stars(self) -> int:
        return sum(seen.shape == CONCEPT for seen in self.seen)

    @property
    def right_shapes(self) -> int:
        return sum(seen.shape == wanted.shape for seen, wanted in zip(self.seen, self.wanted, strict=True))

    @property
    def right_colors(self) -> int:
        """Images with the caption's two colours."""
        return sum(
            (seen.color, seen.background) == (wanted.color, wanted.background)
            for seen, wanted in zip(self.seen, self.wanted, strict=True)
        )

    def __len__(self) -> int:
        return len(self.seen)


@dataclass(frozen=True)
class StarDemo:
    """The result of the demo."""

    taught: ShapeCount
    """Captions with the new word, with the adapter."""
    control: ShapeCount
    """The same captions and seeds, without the adapter."""
    known: ShapeCount
    """Captions of known shapes, with the adapter."""
    grid: Path
    config: Path
    file: Path
    report: Path

    @property
    def learned(self) -> bool:
        return self.taught.stars >= LEARNED * len(self.taught)

    @property
    def control_holds(self) -> bool:
        return self.control.stars <= UNLEARNED * len(self.control)

    @property
    def keeps_the_rest(self) -> bool:
        return self.known.right_shapes >= KEPT * len(self.known)

    @property
    def ok(self) -> bool:
        return self.learned and self.control_holds and self.keeps_the_rest


class DemoStoppedError(GracetuneError):
    """One of the runs was stopped early, so its result proves nothing."""


def demonstrate(folder: Path, view: View) -> StarDemo:
    """Run the demo in `folder`."""
    written = write_config(folder)
    config = load(written, environment=Environment({})).config
    (file,) = run_to_end(config, view)
    grid = _grid(Path(config.output_dir), folder / "grid.png")
    taught, control, known = _count_shapes(file)
    return StarDemo(taught, control, known, grid, written, file, Path(config.output_dir) / "report.html")


def run_to_end(config: RunConfig, view: View) -> tuple[Path, ...]:
    """Train, and return the result's files. DemoStoppedError if the run did not finish."""
    result = train(config, environment=Environment({}), options=RunOptions(), view=view)
    if result.stop is None or result.stop.kind != "finished":
        why = result.stop.reason if result.stop else "a dry run"
        raise DemoStoppedError(f"a run ended at step {result.step} of {result.steps} ({why}): start the demo again")
    return result.files


# -- data and config --------------------------------------------------------------------------------------------------


def write_config(folder: Path) -> Path:
    """Write the images of stars with their captions, and a config that a user could have written."""
    _write_images(folder / "stars", (CONCEPT,), IMAGES, sizes=(0.38, 0.44))
    _write_images(folder / "others", BASE_SHAPES, OTHERS, sizes=(0.3, 0.4))
    path = folder / "star.yaml"
    text = yaml.safe_dump(star_config(folder), sort_keys=False, width=120)
    write_file(path, f"# Train again: gracetune train {path.name}\n{text}".encode())
    return path


def star_config(folder: Path) -> dict[str, Any]:
    prompts = [{"prompt": caption(*one), "seed": number} for number, one in enumerate(SHOWN)]
    return {
        "gracetune": 1,
        "name": "star",
        "output_dir": str(folder / "run"),
        "model": {"family": "sdxl", "path": str(BASE), "base_precision": "fp32"},
        "adapter": {"kind": "lora", "rank": 16, "conv_rank": 16},
        "datasets": [
            {"id": "stars", "path": str(folder / "stars"), "resolution": float(SIDE), "held_out": HELD_OUT},
            {"id": "others", "path": str(folder / "others"), "resolution": float(SIDE)},
        ],
        "cache": {"vae_cache_type": "memory", "text_cache_type": "memory"},
        "training": {"max_steps": STEPS, "batch_size": 16, "mixed_precision": "fp32", "seed": 1},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "schedule": {"name": "cosine", "warmup_steps": 10},
        "objective": {"timesteps": "uniform"},
        "validation": {
            "at_start": True,
            "every_steps": STEPS // ROUNDS,
            "loss_every_steps": STEPS // ROUNDS,
            "width": SIDE,
            "height": SIDE,
            **SAMPLING,
            "prompts": prompts,
        },
        "checkpoints": {"every_steps": None, "save_dtype": "fp32", "format": "diffusers"},
        "logging": {"every_steps": 10},
    }


def _write_images(folder: Path, shapes: Sequence[str], count: int, sizes: tuple[float, float]) -> None:
    """Images with captions, none of which is sampled."""
    folder.mkdir(parents=True)
    generator, sampled = np.random.default_rng(1), {caption(*one) for one in SHOWN}
    images = (random_shape(generator, shapes, sizes) for _ in itertools.count())
    unsampled = (image for image in images if image.caption not in sampled)
    for number, image in enumerate(itertools.islice(unsampled, count)):
        image.draw().save(folder / f"{number:02}_{image.shape}.png")
        (folder / f"{number:02}_{image.shape}.txt").write_text(image.caption, encoding="utf-8")


# -- what was learned -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _count_shapes(file: Path) -> tuple[ShapeCount, ShapeCount, ShapeCount]:
    """Generate with diffusers, which knows nothing of us: with the adapter's file, and without."""
    stars, known = _wanted((CONCEPT,), seed=2), _wanted(BASE_SHAPES, seed=3)
    # diffusers warns that the file has no weights for the text encoders, which is on purpose.
    with without_bars(logging), errors_only(logging):
        pipeline: Any = StableDiffusionXLPipeline.from_pretrained(
            str(BASE), local_files_only=True, dtype=torch.float32
        )  # fmt: skip
        pipeline.set_progress_bar_config(disable=True)
        control = _generated(pipeline, stars)
        pipeline.load_lora_weights(file.parent, weight_name=file.name)
    return _generated(pipeline, stars), control, _generated(pipeline, known)


def _wanted(shapes: Sequence[str], seed: int) -> list[ShapeImage]:
    generator = np.random.default_rng(seed)
    return [random_shape(generator, (shapes[number % len(shapes)],)) for number in range(_COUNTED)]


def _generated(pipeline: Any, wanted: Sequence[ShapeImage]) -> ShapeCount:
    output = pipeline(
        prompt=[one.caption for one in wanted],
        width=SIDE,
        height=SIDE,
        num_inference_steps=SAMPLING["steps"],
        guidance_scale=SAMPLING["guidance"],
        generator=[torch.Generator().manual_seed(number) for number in range(len(wanted))],
    )
    return ShapeCount(tuple(wanted), tuple(recognize(image) for image in output.images))


# -- the grid ---------------------------------------------------------------------------------------------------------


def _grid(run: Path, path: Path) -> Path:
    """Write the run's samples as one image: a row per prompt, a column per round."""
    records = read_log(run / "logs" / "events.jsonl").merged()
    rounds = [record.event for record in records if isinstance(record.event, ValidationDone)]
    large, gap, left, top = 2 * SIDE, 8, 270, 34
    size = (left + len(rounds) * (large + gap), top + len(SHOWN) * (large + gap))
    grid = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(14)
    for column, done in enumerate(rounds):
        x = left + column * (large + gap)
        title = {0: "before", len(rounds) - 1: f"after {done.step} steps"}.get(column, f"step {done.step}")
        draw.text((x + large / 2, top / 2), title, "black", font, anchor="mm")
        for row, file in enumerate(done.files):
            y = top + row * (large + gap)
            with Image.open(run / file.path) as image:
                grid.paste(image.convert("RGB").resize((large, large), Image.Resampling.LANCZOS), (x, y))
            if column == 0:
                draw.text((gap, y + large / 2), file.prompt, "black", font, anchor="lm")
    grid.save(path)
    return path

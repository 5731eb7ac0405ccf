"""`gracetune demo --wan`: complete runs on a built-in tiny model with two experts and a LoKr each, a minute on a CPU.

Three runs with different seeds train on images staged in memory, with caches, a batch ramp and Automagic. The first is
stopped half way and resumed. A fourth run is the control, with a learning rate of 0. Two results are measured: how far
the held-out loss fell, and whether diffusers, with the trained adapters merged, predicts what the trained model does.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.merge import merge_into
from gracetune.config.run_config import RunConfig
from gracetune.models.tiny import build
from gracetune.telemetry.events import HeldOutLoss
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.demo import run_to_end
from gracetune.train.self_check import STEPS as SELF_CHECKED
from gracetune.train.view import View

STEPS = 40
"""Optimizer steps of a run, both experts together."""
CONTROL_STEPS = 2 * (SELF_CHECKED - 1)
"""Steps of the control run, both experts together. With one more step of either, the self-check would stop it for
having learned nothing."""
SEEDS = (1, 2, 3)
FALL = 0.20
"""The held-out loss has to fall by at least this fraction."""
_SIDE = 64
"""Width and height of the images."""
Report = Callable[[str], None]


@dataclass(frozen=True)
class LossChange:
    """The held-out loss of one expert before and after a run."""

    seed: int
    expert: str
    before: float
    after: float

    @property
    def fall(self) -> float:
        return 1 - self.after / self.before


@dataclass(frozen=True)
class DualExpertDemo:
    learned: tuple[LossChange, ...]
    control: tuple[LossChange, ...]
    """Of the run with a learning rate of 0."""
    difference: float
    """Largest difference between the predictions of diffusers and of the trained model, relative to the change by
    training."""
    files: tuple[Path, ...]
    report: Path

    @property
    def ok(self) -> bool:
        learns = all(one.fall >= FALL for one in self.learned)
        return learns and all(one.fall == 0 for one in self.control) and self.difference < 1e-3


def demonstrate_experts(folder: Path, report_line: Report, view: Callable[[], View] = View) -> DualExpertDemo:
    """Run the demo in `folder`. `view` makes a new view for each run."""
    model = build("wan", "t2v-14b-2.2", folder / "model")
    trained, held_out = _images(folder / "pictures", 8), _images(folder / "held_out", 3, first=8)
    learned: list[LossChange] = []
    files: tuple[Path, ...] = ()
    for seed in SEEDS:
        config = demo_config(folder / f"run_{seed}", model, trained, held_out, seed=seed)
        if seed == SEEDS[0]:
            report_line(f"seed {seed}: trained to step {STEPS // 2}, stopped, and resumed")
            run_to_end(_until(config, STEPS // 2), view())
        result = run_to_end(config, view())
        files = files or result
        learned += _loss_changes(config, seed)
        for one in learned[-2:]:
            report_line(
                f"seed {seed}, {one.expert}: held-out loss {one.before:.3f} -> {one.after:.3f}, {one.fall:.0%} less"
            )
    control = demo_config(folder / "control", model, trained, held_out, seed=SEEDS[0], learns=False)
    run_to_end(_until(control, CONTROL_STEPS), view())
    unlearnt = _loss_changes(control, SEEDS[0])
    report_line(f"control with a rate of 0: {', '.join(f'{one.after - one.before:+.3g}' for one in unlearnt)}")
    difference = diffusers_difference(model, files, folder / "merged")
    report_line(
        f"diffusers, with the adapters merged, answers as the trained model: largest difference {difference:.1e}"
    )
    report = folder / f"run_{SEEDS[0]}" / "report.html"
    return DualExpertDemo(tuple(learned), tuple(unlearnt), difference, files, report)


def demo_config(
    folder: Path, model: Path, trained: Path, held_out: Path, *, seed: int, learns: bool = True
) -> RunConfig:  # fmt: skip
    limits = {"lr_bump": 0.01, "min_lr": 1e-4, "max_lr": 0.1}
    optimizer: dict[str, Any] = {"name": "automagic", "lr": 0.01, "limits": limits}
    images = {"type": "in_memory", "resolution": float(_SIDE), "in_memory": {"compression": "lz4"}}
    return RunConfig.model_validate(
        {
            "name": "demo",
            "output_dir": str(folder),
            "model": {"family": "wan", "flavour": "t2v-14b-2.2", "path": str(model), "base_precision": "fp32"},
            "adapter": {"kind": "lokr", "rank": 8},
            "datasets": [
                {"id": "pictures", "path": str(trained), **images},
                {"id": "held_out", "path": str(held_out), "dataset_type": "eval", **images},
            ],
            "cache": {"vae_cache_type": "memory", "text_cache_type": "memory"},
            "training": {
                "max_steps": STEPS,
                "batch_size": 4,
                "mixed_precision": "fp32",
                "seed": seed,
                "ramp": {
                    "enabled": True,
                    "initial_effective_batch_size": 2,
                    "target_effective_batch_size": 4,
                    "batch_rampup_steps": 10,
                },
            },
            "optimizer": optimizer if learns else {"name": "adamw", "lr": 0.0},
            "validation": {
                "every_steps": STEPS,
                "at_start": True,
                "loss_every_steps": STEPS // 4 if learns else CONTROL_STEPS,
                "steps": 2,
                "width": _SIDE,
                "height": _SIDE,
                "num_frames": 5,
                "prompts": [{"prompt": "a red square"}] if learns else [],
                "enabled": learns,
            },
            "checkpoints": {"every_steps": None, "save_dtype": "fp32"},
            "logging": {"every_steps": 5},
        }
    )


def _until(config: RunConfig, steps: int) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update={"max_steps": steps})})


def _loss_changes(config: RunConfig, seed: int) -> list[LossChange]:
    log = read_log(Path(config.output_dir) / "logs" / "events.jsonl")
    events = [record.event for record in log.merged() if isinstance(record.event, HeldOutLoss)]
    found = []
    for expert in dict.fromkeys(event.stage for event in events):
        means = [event.mean for event in events if event.stage == expert]
        found.append(LossChange(seed, expert, means[0], means[-1]))
    return found


@torch.no_grad()
def diffusers_difference(model: Path, files: tuple[Path, ...], folder: Path) -> float:
    """Compare diffusers' model with the merged adapter against our model with the attached adapter, for each expert."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    from gracetune.adapters.attach import attach
    from gracetune.config.run_config import Adapter

    largest = 0.0
    for component, file in zip(("transformer", "transformer_2"), files, strict=True):
        state = open_adapter(file, "wan").state()
        merge_into(state, model / component, folder / component)
        theirs = WanTransformer3DModel.from_pretrained(folder / component).eval()
        ours = WanTransformer3DModel.from_pretrained(model / component).eval()
        inputs = _inputs(ours)
        untrained = ours(**inputs)[0]
        attached = attach(ours, Adapter(kind="lokr", rank=8), family="wan", expert=state.expert,
                          default_targets=tuple(state.layers), seed=0)  # fmt: skip
        attached.load(state)
        trained, reproduced = ours(**inputs)[0], theirs(**inputs)[0]
        largest = max(largest, float((reproduced - trained).norm() / (trained - untrained).norm()))
    return largest


def _inputs(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    config = model.config
    return {
        "hidden_states": torch.randn(1, config.in_channels, 2, 8, 8, generator=generator),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 16, config.text_dim, generator=generator),
        "return_dict": False,
    }


def _images(folder: Path, count: int, first: int = 0) -> Path:
    """Make images of coloured squares on a pale background, each with its caption."""
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(number / 11, 0.9, 0.9))
        image = Image.new("RGB", (_SIDE, _SIDE), "ivory")
        edge = 8 + number % 4 * 4
        ImageDraw.Draw(image).rectangle((edge, edge, _SIDE - edge, _SIDE - edge), fill=(red, green, blue))
        image.save(folder / f"square_{number:02}.png")
        (folder / f"square_{number:02}.txt").write_text(f"a square of the colour {red} {green} {blue}")
    return folder

"""The runs that a storm disturbs: configs of three dialects, each with other features, a few steps on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runs.launched import write_config
from runs.made_runs import TinyModel, config_for, images

SECRET = "storm-b7c1e5f20a"
"""Part of a webhook's address in two of the configs: it may be in `config.yaml` alone."""
_WEBHOOK = f"http://127.0.0.1:9/{SECRET}"
_SAMPLES = {"every_steps": 2, "steps": 1, "width": 64, "height": 64, "prompts": [{"prompt": "a"}, {"prompt": "b"}]}


@dataclass(frozen=True)
class Scenario:
    name: str
    """Begins with the dialect."""
    write: Callable[[TinyModel, Path], Path]
    """Writes the data and the config file into a folder; what the run writes goes below `out` there."""
    steps: int

    @property
    def dialect(self) -> str:
        return self.name.partition("-")[0]


def _native(family: str, **sections: Any) -> Callable[[TinyModel, Path], Path]:
    def write(tiny_model: TinyModel, root: Path) -> Path:
        config = config_for(family, tiny_model, root, **sections)
        return write_config(config.model_copy(update={"output_dir": str(root / "out" / "run")}), root / "c.yaml")

    return write


def _simpletuner(**keys: Any) -> Callable[[TinyModel, Path], Path]:
    def write(tiny_model: TinyModel, root: Path) -> Path:
        datasets = [
            {"id": "pictures", "type": "local", "dataset_type": "image", "resolution": 64, "resolution_type": "pixel",
             "instance_data_dir": str(images(root / "pictures")), "caption_strategy": "textfile",
             "cache_dir_vae": str(root / "out" / "vae-cache")},
            {"id": "text", "dataset_type": "text_embeds", "default": True, "cache_dir": str(root / "out" / "text")},
        ]  # fmt: skip
        own = {
            "model_family": "flux", "model_flavour": "dev", "model_type": "lora", "lora_rank": 4, "lora_alpha": 4,
            "pretrained_model_name_or_path": str(tiny_model("flux", "dev")), "output_dir": str(root / "out" / "run"),
            "datasets": datasets, "optimizer": "adamw", "learning_rate": 1e-3, "lr_scheduler": "constant",
            "num_train_epochs": 0, "train_batch_size": 1, "mixed_precision": "no", "seed": 3,
            "validation_disable": True, "report_to": "none",
        }  # fmt: skip
        path = root / "config.json"
        path.write_text(json.dumps({**own, **_placed(keys, root)}))
        return path

    return write


def _placed(keys: dict[str, Any], root: Path) -> dict[str, Any]:
    """SimpleTuner keeps the settings of LyCORIS in a file of their own."""
    if "lycoris_config" not in keys:
        return keys
    path = root / "lycoris.json"
    path.write_text(json.dumps(keys["lycoris_config"]))
    return {**keys, "lycoris_config": str(path)}


def _aitoolkit(**sections: Any) -> Callable[[TinyModel, Path], Path]:
    def write(tiny_model: TinyModel, root: Path) -> Path:
        data = {"folder_path": str(images(root / "pictures")), "resolution": [64], "cache_latents_to_disk": True}
        process = {
            "type": "sd_trainer", "training_folder": str(root / "out"),
            "network": {"type": "lora", "linear": 4, "linear_alpha": 4}, "datasets": [data],
            "model": {"name_or_path": str(tiny_model("flux", "dev")), "arch": "flux"},
            "save": {"dtype": "float32", "save_every": 1, "max_step_saves_to_keep": 2},
        }  # fmt: skip
        train = {"noise_scheduler": "flowmatch", "dtype": "fp32", "lr": 1e-3, "optimizer": "adamw"}
        job = {**process, **sections, "train": {**train, **sections["train"]}}
        path = root / "job.yaml"
        path.write_text(yaml.safe_dump({"job": "extension", "config": {"name": "run", "process": [job]}}))
        return path

    return write


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("native-lora", _native(
            "flux", validation=_SAMPLES, training={"max_steps": 4}, checkpoints={"every_steps": 1, "keep_last": 2},
        ), 4),
        Scenario("native-full", _native(
            "wan", adapter={"kind": "full_finetune"}, training={"max_steps": 3},
            checkpoints={"every_steps": 1, "keep_last": 1}, logging={"every_steps": 1, "trackers": []},
        ), 3),
        Scenario("native-lokr", _native(
            "flux", adapter={"kind": "lokr", "rank": 4},
            training={"max_steps": 5, "ema": {"enabled": True, "decay": 0.9}},
            checkpoints={"every_steps": 2, "keep_last": 1}, cache={"persistent_cache": False},
            logging={"every_steps": 1, "trackers": [], "webhook": _WEBHOOK},
        ), 5),
        Scenario("simpletuner-lora", _simpletuner(
            max_train_steps=4, checkpoint_step_interval=1, checkpoints_total_limit=2, validation_disable=False,
            validation_prompt="a", validation_step_interval=2, validation_resolution="64x64",
            validation_num_inference_steps=1, validation_seed=3, report_to="tensorboard",
        ), 4),
        Scenario("simpletuner-lokr", _simpletuner(
            max_train_steps=4, checkpoint_step_interval=2, checkpoints_total_limit=1, use_ema=True, ema_decay=0.9,
            lora_type="lycoris", lycoris_config={
                "algo": "lokr", "multiplier": 1.0, "linear_dim": 4, "linear_alpha": 4, "factor": 4,
                "apply_preset": {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 4}}},
            },
        ), 4),
        Scenario("aitoolkit-lora", _aitoolkit(
            train={"steps": 4},
            sample={"sample_every": 2, "prompts": ["a"], "width": 64, "height": 64, "sample_steps": 1, "seed": 3},
            gracetune={"logging": {"every_steps": 1}},
        ), 4),
        Scenario("aitoolkit-lokr", _aitoolkit(
            network={"type": "lokr", "linear": 4, "linear_alpha": 4, "lokr_factor": 4, "lokr_full_rank": False},
            train={"steps": 3, "ema_config": {"use_ema": True, "ema_decay": 0.9}},
            gracetune={"logging": {"every_steps": 1, "trackers": [], "webhook": _WEBHOOK}},
        ), 3),
    )
}  # fmt: skip

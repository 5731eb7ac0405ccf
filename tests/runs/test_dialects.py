"""Files of other trainers through `gracetune train`, with gracetune's options in them, checked by the run's result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file

from gracetune.config import Environment, load
from gracetune.optim.aitoolkit_rates import NotImportableError
from runs.made_runs import ALONE, TinyModel, config_for, images, run
from runs.test_commands import gracetune


def sdxl_job(tiny_model: TinyModel, root: Path, **process: Any) -> Path:
    """An ai-toolkit job on the tiny SDXL; a file a user could have."""
    own = {
        "type": "sd_trainer",
        "training_folder": str(root / "output"),
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "datasets": [{"folder_path": str(images(root / "pictures")), "resolution": [64]}],
        "train": {"steps": 5, "noise_scheduler": "ddpm", "dtype": "fp32", "lr": 1e-3, "optimizer": "adamw"},
        "model": {"name_or_path": str(tiny_model("sdxl", "base-1.0")), "arch": "sdxl"},
        "save": {"dtype": "float32"},
    }
    job = {"job": "extension", "config": {"name": "cats", "process": [{**own, **process}]}}
    path = root / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def trained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the command. Return what it prints, and the run's events."""
    code = gracetune("train", *arguments, "--json")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    message = json.loads(captured.out)
    (log,) = Path(message["files"][0]).parent.glob("logs/*.jsonl")
    return message, [json.loads(line) for line in log.read_text().splitlines()]


def counters(events: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = [event for event in events if event["kind"] == "MemorySampled"][-1]["counters"]
    return found


def warnings(events: list[dict[str, Any]]) -> str:
    return "\n".join(event["message"] for event in events if event["kind"] == "Warned")


def test_an_ai_toolkit_job_adapts_every_linear_layer_of_the_blocks(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This includes the modulation, which is trained. The run's own config lists it in gracetune's dialect."""
    path = tiny_model("flux", "dev")
    job = sdxl_job(
        tiny_model, tmp_path, model={"name_or_path": str(path), "arch": "flux"},
        train={"steps": 2, "noise_scheduler": "flowmatch", "dtype": "fp32", "lr": 1e-3, "optimizer": "adamw"},
    )  # fmt: skip
    message, _ = trained(capsys, str(job))
    weights = load_file(message["files"][0])
    linear = [
        name for name, module in FluxTransformer2DModel.from_pretrained(path / "transformer").named_modules()
        if isinstance(module, torch.nn.Linear) and "transformer_blocks." in name
    ]  # fmt: skip
    assert {key.removesuffix(".lora_B.weight") for key in weights if "lora_B" in key} == {
        f"transformer.{name}" for name in linear
    }
    assert all(weights[f"transformer.{name}.lora_B.weight"].any() for name in linear)
    kept = load(next(tmp_path.glob("output/*/config.yaml")), environment=Environment({})).config
    assert kept.adapter.within == ("transformer_blocks", "single_transformer_blocks")


def test_an_ai_toolkit_job_with_all_of_ours(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Convolutions, staging, latents in memory and on disk, the ramp, and a block with gracetune's sections."""
    data = {
        "folder_path": str(images(tmp_path / "pictures")),
        "resolution": [64],
        "cache_latents_to_disk": True,
        "type": "in_memory",
        "in_memory": {"compression": "lz4"},
    }
    job = sdxl_job(
        tiny_model,
        tmp_path,
        network={"type": "lora", "linear": 4, "linear_alpha": 4, "conv": 2, "conv_alpha": 1},
        datasets=[data],
        cache_config={"vae_cache_type": "memory", "text_cache_type": "memory", "cache_dir": str(tmp_path / "cache")},
        gh200_optimizations={
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 1,
            "target_effective_batch_size": 2,
            "batch_rampup_steps": 2,
        },
        gracetune={"training": {"max_steps": 3}, "logging": {"every_steps": 1}},
    )
    message, events = trained(capsys, str(job))
    assert message["step"] == 3
    assert "gracetune.training.max_steps: 3 takes the place of `config.process[0].train.steps` (5)" in warnings(events)
    # the ramp
    steps = [event for event in events if event["kind"] == "StepDone"]
    assert [step["micro_batch"] * step["accumulation"] for step in steps] == [1, 1, 2]
    # latents on disk, for the next run, and in memory, for this one
    assert [*(tmp_path / "cache" / "latents" / "shards").iterdir()]
    found = counters(events)
    assert found["cache.latents.hits"] > 0
    assert (found["cache.latents.disk_reads"], found["cache.live_samples"]) == (0, 0)
    # convolutions: trained, at their own rank and alpha, under kohya's names
    file = load_file(message["files"][0])
    down = file["lora_unet_input_blocks_4_0_in_layers_2.lora_down.weight"]
    assert (down.shape[0], down.ndim) == (2, 4)
    assert file["lora_unet_input_blocks_4_0_in_layers_2.lora_up.weight"].abs().max() > 0
    assert file["lora_unet_input_blocks_3_0_op.lora_up.weight"].abs().max() > 0
    assert file["lora_unet_input_blocks_4_0_emb_layers_1.lora_down.weight"].shape[0] == 4


def test_a_flag_keeps_latents_of_the_disk_in_memory(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cache_latents_to_disk` in an unchanged job, with `--set cache.vae_cache_type`."""
    folder = str(images(tmp_path / "pictures"))
    data = {"folder_path": folder, "resolution": [64], "cache_latents_to_disk": True}
    job = sdxl_job(tiny_model, tmp_path, datasets=[data])
    flags = ("cache.vae_cache_type=unified_memory", f"cache.cache_dir={tmp_path / 'cache'}", "logging.every_steps=1")
    _, events = trained(capsys, str(job), "--max-steps", "1", *(word for flag in flags for word in ("--set", flag)))
    assert [*(tmp_path / "cache" / "latents" / "shards").iterdir()]
    found = counters(events)
    assert found["cache.latents.hits"] > 0
    assert found["cache.latents.disk_reads"] == 0


@pytest.mark.full
def test_an_ai_toolkit_job_trains_on_the_data_ai_toolkit_would_make_of_it(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Buckets in steps of 16, which SDXL's U-Net does not halve evenly; masks, shuffled tags and a regularisation set.

    The run's own config.yaml has all of it, and goes on where the job ended.
    """
    own, reg, masks = images(tmp_path / "own", 3, 80), images(tmp_path / "reg", 2, 64), tmp_path / "masks"
    masks.mkdir()
    for number in range(3):
        (own / f"{number:02}.txt").write_text("red, green, blue, tall")
        Image.linear_gradient("L").resize((80, 80)).save(masks / f"{number:02}.png")
    captions = {"shuffle_tokens": True, "caption_dropout_rate": 0.5, "flip_x": True}
    job = sdxl_job(
        tiny_model, tmp_path, trigger_word="sks",
        datasets=[{"folder_path": str(own), "resolution": 96, "mask_path": str(masks), **captions},
                  {"folder_path": str(reg), "resolution": 96, "is_reg": True}],
        train={"steps": 6, "batch_size": 4, "noise_scheduler": "ddpm", "dtype": "fp32", "lr": 1e-3},
        save={"dtype": "float32", "save_every": 3}, sample={"sample_every": 100, "prompts": []},
    )  # fmt: skip
    message, events = trained(capsys, str(job))
    assert message["step"] == 6
    folder = Path(message["files"][0]).parent
    config = load(folder / "config.yaml", environment=ALONE).config
    first, second = config.datasets
    assert (first.buckets.rule, first.buckets.multiple, first.mask.normalise) == ("at_most", 16, True)
    assert (first.captions.dropped_caption, first.captions.shuffle_variants, first.repeats) == ("sks ", "visits", 1)
    assert (second.even_steps, second.captions.add_trigger) == (True, False)
    assert (config.training.fill_batches, config.model.size_conditioning) == (True, "bucket")
    steps = [event for event in events if event["kind"] == "StepDone"]
    assert steps[-1]["samples"] == 24  # six full batches of four, of three and two images
    assert "on purpose not as in ai-toolkit" in warnings(events)
    again, _ = trained(capsys, str(folder / "config.yaml"), "--max-steps", "8")
    assert again["step"] == 8


def old_optimizer(folder: Path, model: Path, rank: int, **rates: float) -> Path:
    """An ai-toolkit optimizer state: parameters are numbered along the modules, one expert after the other."""
    state: dict[int, Any] = {}
    for component, rate in rates.items():
        blocks = WanTransformer3DModel.from_pretrained(model / component).blocks
        for layer in (module for module in blocks.modules() if isinstance(module, torch.nn.Linear)):
            for shape in ((rank, layer.in_features), (layer.out_features, rank)):
                mask = {"quantized": torch.full(shape, 127, dtype=torch.int8), "scale": rate / 127}
                state[len(state)] = {"lr_mask": mask, "last_polarity": torch.zeros(shape, dtype=torch.bool)}
    folder.mkdir()
    torch.save({"state": state, "param_groups": [{"params": [*state]}]}, folder / "optimizer.pt")
    return folder / "optimizer.pt"


def test_learning_rates_of_an_ai_toolkit_run_are_taken_over(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The rates of both experts are in one file without names; those of the high-noise expert come first."""
    model = tiny_model("wan", "t2v-14b-2.2")
    old = old_optimizer(tmp_path / "old", model, rank=4, transformer=5e-4, transformer_2=2e-4)
    automagic = {"name": "automagic", "lr": 1e-6, "rates_from": str(old)}
    config = config_for("wan", tiny_model, tmp_path, optimizer=automagic, training={"max_steps": 2})
    run(config)
    log = Path(config.output_dir) / "logs" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    found = [event["lr"] for event in events if event["kind"] == "StepDone"][-1]
    assert found == pytest.approx({"high_noise": 5e-4, "low_noise": 2e-4}, rel=0.01)


def test_learning_rates_of_one_expert_of_two_are_rejected(tiny_model: TinyModel, tmp_path: Path) -> None:
    old = old_optimizer(tmp_path / "old", tiny_model("wan", "t2v-14b-2.2"), rank=4, transformer=5e-4)
    automagic = {"name": "automagic", "lr": 1e-6, "rates_from": str(old)}
    config = config_for("wan", tiny_model, tmp_path, optimizer=automagic, model={"experts": "high"})
    with pytest.raises(NotImportableError, match="their expert is unknown"):
        run(config)
    assert not (Path(config.output_dir) / "logs").exists()


def steps(events: list[dict[str, Any]], name: str) -> list[float]:
    return [event[name] for event in events if event["kind"] == "StepDone"]


@pytest.mark.full
def test_gradients_of_an_ai_toolkit_job_are_summed_as_ai_toolkit_sums_them(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With four micro-batches in a step, the summed gradient is four times the mean."""
    keys = {"steps": 2, "noise_scheduler": "ddpm", "dtype": "fp32", "lr": 1e-3, "gradient_accumulation": 4}
    job = sdxl_job(tiny_model, tmp_path, train={**keys, "disable_sampling": True}, logging={"log_every": 1})
    _, summed = trained(capsys, str(job))
    other = ["--set", f"output_dir={tmp_path / 'other'}"]
    _, mean = trained(capsys, str(job), "--set", "training.accumulation=mean", *other)
    assert steps(summed, "loss")[0] == steps(mean, "loss")[0]
    assert steps(summed, "grad_norm")[0] == pytest.approx(4 * steps(mean, "grad_norm")[0], rel=1e-5)


@pytest.mark.full
def test_a_simpletuner_config_averages_from_the_first_step(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a few steps the delivered average is near the weights, not near where they began."""
    entries = [{"id": "cats", "type": "local", "instance_data_dir": str(images(tmp_path / "pictures")),
                "caption_strategy": "textfile", "resolution": 64, "resolution_type": "pixel"}]  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(entries))
    config = {"model_family": "sdxl", "model_type": "lora", "lora_rank": 4, "output_dir": str(tmp_path / "run"),
              "pretrained_model_name_or_path": str(tiny_model("sdxl", "base-1.0")), "optimizer": "torch-adamw",
              "learning_rate": 1e-3, "max_train_steps": 6, "num_train_epochs": 0, "train_batch_size": 1,
              "mixed_precision": "no", "data_backend_config": str(tmp_path / "data.json"), "use_ema": True,
              "ema_decay": 0.9999, "loss_type": "huber", "validation_disable": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = ["--set", "model.vae_path=null"]
    sizes = []
    for ramp in ("true", "false"):
        message, _ = trained(capsys, str(tmp_path / "config.json"), *plain, "--set", f"training.ema.ramp={ramp}",
                          "--set", f"output_dir={tmp_path / ramp}")  # fmt: skip
        tensors = load_file(message["files"][0])
        sizes.append(sum(float(one.square().sum()) for name, one in tensors.items() if "lora_B" in name) ** 0.5)
    assert sizes[0] > 100 * sizes[1]

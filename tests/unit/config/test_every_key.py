"""Every key of the peers' files acts: another value gives another `RunConfig`, a note, or a rejection.

A key that is read has to give two different configs that are accepted; one that is rejected or only named has to be
rejected or named. What the configs' own options do is the business of tests/runs/test_every_option.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment, load
from gracetune.config.dialects.gh200 import GUIDES, IN_MEMORY
from gracetune.config.dialects.simpletuner.dataset import ENTRY, SHUFFLE
from gracetune.config.dialects.simpletuner.dataset_keys import AUDIO, GENERATED, PARQUET, VIDEO
from gracetune.config.dialects.simpletuner.dataset_sources import HUGGINGFACE, WEBSHART
from gracetune.config.dialects.simpletuner.keys import PASSED_ON
from gracetune.config.dialects.simpletuner.reader import OPTIONS, OURS
from gracetune.config.dialects.table import Always, Effect, Key, KeyTable
from gracetune.errors import ConfigError
from runs.option_probes import adapter, digest
from unit.config.aitoolkit_jobs import FLUX, QWEN_EDIT, SDXL, WAN, dataset, job
from unit.config.simpletuner_files import DATASETS, GOOD, IMAGES, LYCORIS
from unit.config.test_aitoolkit_peers import KEYS, TABLES

Outcome = tuple[bool, str]
"""Whether it was accepted, and what came of it."""
VALUES: list[Any] = [
    True, False, 3, 0.25, 2, 1, 0, 600, "x", "bf16", "fp16", ["x"], {"x": 1}, [3], 64, "1.5", "64x64", "/x",
    "none", "a",    [{"prompt": "x"}], "random", "lokr", "huber", "cosine", "lion", "math", "balanced",
]  # fmt: skip
"""Tried one after the other until one shows that the key acts."""


def loaded(folder: Path, document: Any, name: str) -> Outcome:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    try:
        found = load(path, environment=Environment({}))
    except ConfigError as error:
        return False, "\n".join(f"{one.key}: {one.found}" for one in error.problems)
    return True, "\n".join([found.config.model_dump_json(), *found.notes])


# -- ai-toolkit --------------------------------------------------------------------------------------------------------

EMA = {"ema_config": {"use_ema": True}}
JOBS = [
    job(sample={"samples": [{"prompt": "a cat"}]}, train=EMA, save={"hf_repo_id": "a/b"}, logging={}),
    job(model=SDXL, train={**EMA, "noise_scheduler": "ddpm"}, network={"type": "lokr", "lokr_full_rank": False},
        sample={"samples": [{"prompt": "a cat"}]}),
    job(model=QWEN_EDIT, datasets=dataset(control_path="/c"), train={"optimizer": "automagic", **EMA}),
    job(model=FLUX, train={"lr_scheduler": "cosine", "timestep_type": "sigmoid"},
        datasets=dataset(mask_path="/m", cache_latents_to_disk=True, shuffle_tokens=True)),
    job(model={**SDXL, "arch": None, "is_xl": True}, train={"noise_scheduler": "ddpm"}),
    job(datasets=dataset(auto_frame_count=True, do_i2v=False, type="in_memory")),
    job(train={"reg_weight": 0.25}, datasets=dataset(is_reg=True, augmentations=[{"method": "Blur"}])),
    job(model={**WAN, "model_kwargs": {}}, datasets=dataset(num_frames=41), network=None),
    job(model=FLUX, datasets=dataset(buckets=False)),
    job(model={**SDXL, "arch": None}),  # rejected: Stable Diffusion 1.5
]  # fmt: skip
SPECIAL: dict[tuple[str, str], list[Any]] = {
    ("train", "optimizer_params"): [{"weight_decay": 0.5}],
    ("train", "lr_scheduler_params"): [{"eta_min": 1e-7}],
    ("train", "content_or_style"): ["style"],
    ("train", "loss_type"): ["mae"],
    ("train", "ema_config"): [{"use_ema": True, "ema_decay": 0.5}],
    ("train", "noise_scheduler"): ["ddpm", "flowmatch"],
    ("datasets", "augmentations_cache_mode"): ["static"],
    ("datasets", "type"): ["in_memory"],
    ("datasets", "in_memory"): [{"compression": "lz4"}],
    ("process", "cache_config"): [{"vae_cache_type": "memory"}],
    ("process", "gh200_optimizations"): [{"enable_uvm_hints": False}],
    ("process", "gracetune"): [{"training": {"seed": 7}}],
    ("model", "arch"): ["wan21"],
    ("model", "model_kwargs"): [{"train_high_noise": False}],
    ("network", "network_kwargs"): [{"ignore_if_contains": ["x"]}],
}
"""What some keys want to be given to act."""
ALREADY = {
    ("train", "cache_text_embeddings"): "captions are always cached",
    ("datasets", "cache_text_embeddings"): "captions are always cached",
}
"""Keys that ask for what is done anyway."""
ONLY_REJECTED = {
    "train": ("noise_scheduler",),
    "datasets": ("trim_auto_frame_count_tail", "control_transparent_color", "controls"),
    "model": (
        "arch",
        "vae_dtype",
        "te_dtype",
        "is_v2",
        "is_v3",
        "is_xl",
        "is_pixart",
        "is_pixart_sigma",
        "is_auraflow",
        "is_flux",
        "is_lumina2",
        "is_vega",
        "is_ssd",
    ),
    "network": ("alpha_schedule",),
    "samples": ("fps",),
    "save": ("save_format",),
    "process": ("type", "network", "save", "datasets", "dataset", "train", "model", "sample", "logging"),
}
"""Keys that are read, and whose other values are rejected or are blocks of keys of their own."""


def place(document: dict[str, Any], block: str) -> Any:
    process = document["config"]["process"][0]
    if block == "process":
        return process
    if block == "datasets":
        return process["datasets"][0]
    if block == "samples":
        return process["sample"].setdefault("samples", [{"prompt": "a cat"}])[0]
    if block == "ema_config":
        return process["train"].setdefault("ema_config", {"use_ema": True})
    found = process.setdefault(block, {})
    return {} if found is None else found


def acts(outcomes: list[Outcome], *, read: bool) -> bool:
    accepted = {text for good, text in outcomes if good}
    return len(accepted) > 1 if read else len({*outcomes}) > 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    folder = tmp_path_factory.mktemp("jobs")
    found = [loaded(folder, document, "job.json") for document in JOBS]
    assert all(good for good, _ in found[:-1]), [text for good, text in found[:-1] if not good]
    return folder, found


@pytest.mark.parametrize("block", KEYS)
def test_every_key_of_ai_toolkit_acts(plain: tuple[Path, list[Outcome]], block: str) -> None:
    folder, bases = plain
    dead = []
    for key, row in TABLES[block].keys.items():
        read = row.effect is Effect.ACTS and key not in ONLY_REJECTED.get(block, ())
        if (block, key) not in ALREADY and not any(
            _acts_in(folder, document, base, block, key, read=read) for document, base in zip(JOBS, bases, strict=True)
        ):
            dead.append(key)
    assert not dead, " ".join(dead)


def _acts_in(folder: Path, document: dict[str, Any], base: Outcome, block: str, key: str, *, read: bool) -> bool:
    outcomes = [base]
    for value in [*SPECIAL.get((block, key), []), *VALUES]:
        changed = copy.deepcopy(document)
        place(changed, block)[key] = value
        outcomes.append(loaded(folder, changed, "job.json"))
        if acts(outcomes, read=read):
            return True
    return False


# -- what ai-toolkit's `network` does to the adapter -------------------------------------------------------------------

NETWORKS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("type", {}, {"type": "locon"}),
    ("linear", {}, {"linear": 8}),
    ("rank", {}, {"rank": 8}),
    ("linear_alpha", {}, {"linear_alpha": 4}),
    ("alpha", {"linear_alpha": None}, {"alpha": 4}),
    ("conv", {}, {"conv": 8}),
    ("conv_alpha", {"conv": 8}, {"conv_alpha": 2}),
    ("dropout", {}, {"dropout": 0.5}),
    ("lokr_factor", {"type": "lokr"}, {"lokr_factor": 2}),
    ("lokr_full_rank", {"type": "lokr", "linear": 1, "lokr_factor": 4}, {"lokr_full_rank": False}),
    ("network_kwargs", {}, {"network_kwargs": {"only_if_contains": ["to_q"]}}),
]


@pytest.mark.parametrize(
    ("given", "changed"),
    [pytest.param(given, changed, id=key) for key, given, changed in NETWORKS],
)
def test_the_network_of_an_ai_toolkit_job_makes_another_adapter(
    tiny_model: Any, tmp_path: Path, given: dict[str, Any], changed: dict[str, Any]
) -> None:
    """Not only another config: other layers, sizes or effects on a small U-Net."""

    def made(network: dict[str, Any]) -> str:
        path = tmp_path / "job.json"
        path.write_text(json.dumps(job(model=SDXL, network=network)), encoding="utf-8")
        config = load(path, environment=Environment({})).config
        weights = {"path": str(tiny_model("sdxl", "base-1.0")), "flavour": "base-1.0", "base_precision": "fp32"}
        return digest(adapter(config.model_copy(update={"model": config.model.model_copy(update=weights)})))

    assert made({**given, **changed}) != made(given)


# -- SimpleTuner -------------------------------------------------------------------------------------------------------

SOUNDS = [{"id": "s", "dataset_type": "audio", "instance_data_dir": "s", "caption_strategy": "textfile"}]
FILES = {
    "datasets.json": DATASETS,
    "images.json": IMAGES,
    "sounds.json": SOUNDS,
    "bare.json": [{"id": "b", "instance_data_dir": "b", "crop": True}],
    "lycoris.json": LYCORIS,
    "prompts.json": {"one": "a prompt"},
    "others.json": [{**IMAGES[0], "id": "others"}],
}
STILLS = {**GOOD, "data_backend_config": "images.json"}
RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 2,
    "target_effective_batch_size": 8,
    "batch_rampup_steps": 10,
}
CONFIGS: list[dict[str, Any]] = [
    GOOD,
    {**STILLS, "model_family": "sdxl", "model_flavour": "base-1.0", "use_ema": True, "snr_gamma": 5,
     "lr_scheduler": "polynomial", "use_uvm": True},
    {**STILLS, "model_family": "flux", "model_flavour": "dev", "flow_use_beta_schedule": True,
     "lr_scheduler": "cosine_with_restarts", "validation_prompt": "a prompt", "validation_step_interval": 5,
     "gh200_optimizations": RAMP},
    {**STILLS, "model_family": "sdxl", "model_flavour": "base-1.0", "loss_type": "huber",
     "huber_schedule": "constant", "offset_noise": True, "noise_offset": 0.1, "eval_steps_interval": 5,
     "optimizer": "prodigy"},
    {**STILLS, "model_family": "sdxl", "model_flavour": "base-1.0", "push_to_hub": True, "hub_model_id": "x/y"},
    {**GOOD, "model_family": "stable_audio", "model_flavour": "open-1.0", "data_backend_config": "sounds.json"},
    {**GOOD, "model_family": "sdxl", "model_flavour": "base-1.0", "data_backend_config": "bare.json",
     "lora_type": "lycoris", "lycoris_config": "lycoris.json", "optimizer_beta1": 0.8, "optimizer_beta2": 0.9,
     "instance_prompt": "x", "maximum_image_size": 2000, "target_downsample_size": 1500},
    {**STILLS, "model_family": "qwen_image", "model_flavour": "v1.0", "i_know_what_i_am_doing": True,
     "aspect_bucket_alignment": 64},
]  # fmt: skip
GIVEN: dict[str, list[Any]] = {
    "cache_config": [{"vae_cache_type": "memory"}],
    "caption_strategy": ["textfile", "instanceprompt"],
    "data_backend": [{"type": "in_memory"}],
    "data_backend_config": ["others.json"],
    "datasets": [[{**IMAGES[0], "id": "others"}]],
    "gh200_optimizations": [{"use_uvm": True}],
    "gracetune": [{"training": {"seed": 7}}],
    "grad_clip_method": ["norm", "value"],
    "hub_model_id": ["a/b"],
    "push_checkpoints_to_hub": [True],
    "model_card_private": [False],
    "lora_format": ["comfyui", "diffusers"],
    "lora_type": ["standard"],
    "loss_type": ["l2", "smooth_l1"],
    "lycoris_config": ["lycoris.json"],
    "aspect_bucket_alignment": [16],
    "model_flavour": ["t2v-480p-1.3b-2.1"],
    "model_type": ["full"],
    "optimizer_beta1": [0.7],
    "optimizer_beta2": [0.7],
    "resolution_type": ["pixel", "area"],
    "target_downsample_size": [1400],
    "tread_config": [{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}],
    "user_prompt_library": ["prompts.json"],
    "validation_input": [[{"path": "a.png", "prompt": "b"}]],
}
NOT_ALONE = frozenset(["model_family", "num_train_epochs", "maximum_image_size"])
"""Options whose other values are rejected beside the rest of these files: the flavour, a number of steps, and a size to
scale images to."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    folder = tmp_path_factory.mktemp("simpletuner")
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    found = [loaded(folder, document, "config.json") for document in CONFIGS]
    assert all(good for good, _ in found), [text for good, text in found if not good]
    return folder, found


ADDED = {*OURS, *GUIDES, "datasets", "data_backend"}
OPTION_NAMES = {
    "READ": {*OPTIONS.names(Effect.ACTS)} - {*PASSED_ON} - ADDED,
    "PASSED_ON": {*PASSED_ON},
    "OURS": ADDED,
}


@pytest.mark.parametrize("table", OPTION_NAMES)
def test_every_option_of_simpletuner_that_is_read_acts(files: tuple[Path, list[Outcome]], table: str) -> None:
    folder, bases = files
    names = OPTION_NAMES[table]

    def one_acts(name: str) -> bool:
        for document, base in zip(CONFIGS, bases, strict=True):
            outcomes = [base]
            for value in [*GIVEN.get(name, []), *VALUES]:
                outcomes.append(loaded(folder, {**document, name: value}, "config.json"))
                if acts(outcomes, read=name not in NOT_ALONE):
                    return True
        return False

    dead = sorted(name for name in names if not one_acts(name))
    assert not dead, " ".join(dead)


# -- the datasets of SimpleTuner ---------------------------------------------------------------------------------------

WAN_CONFIG, SDXL_CONFIG, AUDIO_CONFIG = CONFIGS[0], CONFIGS[1], CONFIGS[5]
KONTEXT_CONFIG = {**GOOD, "model_family": "flux", "model_flavour": "kontext"}
STILL = {"id": "d", "instance_data_dir": "d", "caption_strategy": "textfile"}
CLIP = {**STILL, "dataset_type": "video", "video": {"num_frames": 49}}
TABLE = {"path": "t.parquet", "filename_column": "f", "caption_column": "c"}
MASK = {"id": "m", "dataset_type": "conditioning", "instance_data_dir": "m", "conditioning_type": "mask"}
MASKED = {**STILL, "id": "e", "conditioning_data": "m"}
ON_THE_HUB = {"id": "d", "type": "huggingface", "dataset_name": "a/b", "huggingface": {"height_column": "h"}}
NAMED_INSIDE = {
    "id": "d", "type": "huggingface",
    "huggingface": {"dataset_name": "a/b", "width_column": "w", "filter_func": {"quality_thresholds": {"score": 1}}},
}  # fmt: skip
DATASET_CONFIGS: list[dict[str, Any]] = [
    {**config, "data_backend_config": None, "datasets": entries}
    for config, entries in [
        (SDXL_CONFIG, [STILL]),
        (SDXL_CONFIG, [{**STILL, "caption_shuffle": {"enable": True}, "crop": True, "instance_prompt": "x",
                        "maximum_image_size": 2000, "target_downsample_size": 1500}]),
        (WAN_CONFIG, [CLIP]),
        (WAN_CONFIG, [{**CLIP, "video": {"num_frames": 49, "bucket_strategy": "resolution_frames"}}]),
        (AUDIO_CONFIG, [{**STILL, "dataset_type": "audio", "audio": {}}]),
        (SDXL_CONFIG, [{**STILL, "caption_strategy": "parquet", "parquet": TABLE}]),
        (SDXL_CONFIG, [{**STILL, "type": "in_memory", "in_memory": {}}]),
        (SDXL_CONFIG, [{"id": "d", "type": "csv", "csv_file": "u.csv", "csv_cache_dir": "c", "csv_url_column": "u"}]),
        (SDXL_CONFIG, [ON_THE_HUB]),
        (SDXL_CONFIG, [NAMED_INSIDE]),
        (WAN_CONFIG, [{**ON_THE_HUB, "dataset_type": "video"}]),
        (AUDIO_CONFIG, [{**ON_THE_HUB, "dataset_type": "audio"}]),
        (SDXL_CONFIG, [{"id": "d", "type": "aws", "aws_bucket_name": "b", "caption_strategy": "textfile"}]),
        (SDXL_CONFIG, [{"id": "d", "type": "webshart", "source": "a/b", "webshart": {}}]),
        (SDXL_CONFIG, [{"id": "d", "type": "webshart", "webshart": {"source": "a/b"}}]),
        (KONTEXT_CONFIG, [{**STILL, "conditioning": {"type": "canny"}}]),
        (SDXL_CONFIG, [MASK, MASKED]),
        (SDXL_CONFIG, [STILL, MASK, MASKED]),
    ]
]  # fmt: skip
DATASET_TABLES: dict[str, KeyTable[Any]] = {
    "": ENTRY, "video": VIDEO, "audio": AUDIO, "parquet": PARQUET, "caption_shuffle": SHUFFLE, "in_memory": IN_MEMORY,
    "huggingface": HUGGINGFACE, "webshart": WEBSHART, "conditioning": GENERATED,
}  # fmt: skip
DATASET_VALUES: dict[str, list[Any]] = {
    "dataset_name": ["c/d"],
    "source": ["c/d"],
    "huggingface": [{"split": "test"}],
    "webshart": [{"subfolder": "data"}],
    "split": ["test"],
    "filter_func": [{"min_width": 64}],
    "composite_image_config": [{"enabled": True, "image_count": 2}],
    "quality_column": ["q"],
    "height_column": ["h"],
    "aws_endpoint_url": ["http://localhost:1"],
    "conditioning": [{"type": "canny", "low_threshold": 30}],
    "conditioning_data": ["m"],
    "conditioning_type": ["mask", "reference_loose"],
    "source_dataset_id": ["e"],
    "crop_style": ["center"],
    "crop_aspect": ["preserve", "square"],
    "crop_aspect_buckets": [[1.0, 0.5]],
    "caption_shuffle": [{"enable": True}],
    "caption_strategy": ["textfile", "filename"],
    "dataset_type": ["image", "eval"],
    "in_memory": [{"compression": "lz4"}],
    "parquet": [{**TABLE, "caption_column": "d"}],
    "resolution_type": ["pixel", "area"],
    "target_downsample_size": [1400],
    "type": ["in_memory", "local"],
    "video": [{"num_frames": 81}],
    "audio": [{"channels": 1}],
    "compression": ["lz4", "zstd"],
    "split_on": ["space", "comma"],
    "truncation_mode": ["beginning", "random"],
    "end_step": [500],
    "end_epoch": [9],
    "num_frames": [49, 81],
    "bucket_strategy": ["aspect_ratio", "resolution_frames"],
}
ONLY_ONE_WAY = {"id": "conditioning refers to it", "maximum_image_size": "it has to be there, and that is all"}
"""Keys of datasets that are read, and whose other values are rejected."""


@pytest.mark.parametrize("block", DATASET_TABLES)
def test_every_key_of_a_simpletuner_dataset_acts(tmp_path: Path, block: str) -> None:
    """In the files that have the block, where there are any: the others cannot tell."""
    documents = [one for one in DATASET_CONFIGS if block and block in one["datasets"][0]] or DATASET_CONFIGS
    bases = [loaded(tmp_path, document, "config.json") for document in documents]
    assert all(good for good, _ in bases), [text for good, text in bases if not good]

    def one_acts(key: Key) -> bool:
        for document, base in zip(documents, bases, strict=True):
            outcomes = [base]
            for value in [*DATASET_VALUES.get(key.name, []), *VALUES]:
                changed = copy.deepcopy(document)
                entry = changed["datasets"][0]
                (entry.setdefault(block, {}) if block else entry)[key.name] = value
                outcomes.append(loaded(tmp_path, changed, "config.json"))
                if acts(outcomes, read=key.effect is Effect.ACTS and key.name not in ONLY_ONE_WAY):
                    return True
        return False

    keys = [key for key in DATASET_TABLES[block].keys.values() if not isinstance(key.unless, Always)]
    dead = [key.name for key in keys if not one_acts(key)]
    assert not dead, " ".join(dead)

"""The `train`, `save` and `logging` blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from gracetune.config.dialects.aitoolkit.keys import (
    Block,
    Reading,
    block_of,
    check,
    number,
    precision,
    put_rows,
    real,
    whole,
)
from gracetune.config.dialects.aitoolkit.model import Target
from gracetune.config.dialects.aitoolkit.optimizer import read_optimizer, read_schedule
from gracetune.config.dialects.aitoolkit.train_keys import EMA, LOGGING, SAVE, TRAIN
from gracetune.config.draft import Said
from gracetune.config.spelling import misspelt

TIMESTEPS = {
    "sigmoid": "sigmoid", "linear": "uniform", "weighted": "weighted", "one_step": "one_step",
    "shift": "shift", "flux_shift": "shift", "lumina2_shift": "shift",
}  # fmt: skip
OTHER_TIMESTEPS = ("lognorm_blend", "next_sample", "shifted_logit_normal")
LOSSES = {"mse": "mse", "mae": "mae"}
OTHER_LOSSES = ("wavelet", "pixelspace", "mean_flow", "pseudo_huber", "stepped")
ATTENTION = {
    "native": "auto", "flash": "flash_attn_2", "_flash_3": "flash_attn_3", "_flash_3_hub": "flash_attn_3",
    "_native_flash": "flash", "_native_cudnn": "cudnn", "_native_efficient": "efficient", "_native_math": "math",
}  # fmt: skip
_LAST_STEP = 999


@dataclass(frozen=True)
class Training:
    """What the datasets need to know about the training."""

    block: Block
    reg_weight: float
    caches_text: bool
    one_prompt: bool
    """Every caption is replaced by the trigger word, or by nothing where there is none."""


def read_train(reading: Reading, block: Block, params: Block, target: Target) -> Training:
    """`params` are the optimizer's own options, wherever the file wrote them."""
    check(reading, block, TRAIN)
    _accumulation(reading, block)
    put_rows(reading, block, TRAIN)
    _length(reading, block, target)
    _precision(reading, block, target)
    read_optimizer(reading, block, params)
    read_schedule(reading, block)
    flow = _scheduler(reading, block, target)
    kind = _timesteps(reading, block, flow)
    _window(reading, block, target, kind)
    _choice(reading, block, "loss_type", ("objective", "loss"), LOSSES, OTHER_LOSSES)
    _snr(reading, block, flow)
    _ema(reading, block)
    _speed(reading, block, target)
    _sampling(reading, block)
    return _text(reading, block)


def _accumulation(reading: Reading, block: Block) -> None:
    """The newer key counts optimizer steps, the older one counts micro-batches as steps."""
    newer, older = whole(number(block.get("gradient_accumulation"))), number(block.get("gradient_accumulation_steps"))
    path = ("training", "gradient_accumulation_steps")
    if older == -1:
        why = "a number: accumulating over a whole epoch is not done here"
        reading.draft.refuse(block.key("gradient_accumulation_steps"), older, why)
    elif older not in (None, 1) and newer is not None and newer > 1:
        key = block.key("gradient_accumulation_steps")
        found = Said(f"{older} next to gradient_accumulation {newer}")
        reading.draft.problem(key, found, "one of the two", "remove it")
    elif older not in (None, 1):
        key = block.key("gradient_accumulation_steps")
        reading.put(path, older, key)
        reading.batches_per_step = max(1, whole(older) or 1)
        reading.draft.note(
            f"{key}: with this key ai-toolkit counts every micro-batch as a step; steps, saves and samples are divided "
            f"by {older} here, because we count optimizer steps"
        )
        return
    if block.get("gradient_accumulation") is not None:
        reading.put(path, number(block.get("gradient_accumulation")), block.key("gradient_accumulation"))


def _length(reading: Reading, block: Block, target: Target) -> None:
    if block.get("steps") is None:
        reading.default(("training", "max_steps"), 1000)
    else:
        reading.put_count(("training", "max_steps"), block.get("steps"), block.key("steps"))
    if block.get("switch_boundary_every") is None:
        return
    key = block.key("switch_boundary_every")
    if target.dual_expert:
        reading.put_count(("model", "switch_experts_every"), block.get("switch_boundary_every"), key)
    else:
        reading.harmless.append(key)


def _precision(reading: Reading, block: Block, target: Target) -> None:
    """Upstream holds frozen weights it does not quantise in the training dtype; `mixed_precision` is the seeds' key."""
    dtype, mixed = precision(block.get("dtype")), precision(block.get("mixed_precision"))
    if dtype is None and mixed is None:
        dtype = "fp32"
        reading.default(("training", "mixed_precision"), dtype)
        reading.default(("model", "base_precision"), dtype)  # unless the model block says fp8
        reading.draft.note(f"{block.key('dtype')} is not set: ai-toolkit trains in fp32 then, and so do we; write bf16")
        return
    for path, choices in (
        (("training", "mixed_precision"), ((mixed, "mixed_precision"), (dtype, "dtype"))),
        (("model", "base_precision"), ((dtype, "dtype"), (mixed, "mixed_precision"))),
    ):
        value, name = next((value, name) for value, name in choices if value is not None)
        if not (path[0] == "model" and target.quantised):
            reading.put(path, value, block.key(name))


def _scheduler(reading: Reading, block: Block, target: Target) -> bool:
    """Whether the run is flow matching."""
    name, key = block.get("noise_scheduler"), block.key("noise_scheduler")
    if target.transformer:
        if name is None:
            reading.draft.note(f"{key} is not set: {target.arch.family} is trained with flow matching all the same")
        elif name != "flowmatch":
            reading.draft.problem(key, name, f"flowmatch: {target.arch.family} knows no other", "write `flowmatch`")
        return True
    if name == "flowmatch":
        reading.put(("objective", "prediction"), "flow", key)
    elif name not in (None, "ddpm", "ddim"):
        reading.draft.refuse(key, name, "ddpm or flowmatch for training")
    return bool(name == "flowmatch")


def _timesteps(reading: Reading, block: Block, flow: bool) -> str | None:
    """ai-toolkit's name of the timestep distribution; None where there is only one, the uniform one."""
    _choice(reading, block, "content_or_style", ("objective", "timestep_bias"),
            {name: name for name in ("balanced", "content", "style")}, ())  # fmt: skip
    if not flow:
        reading.default(("objective", "timesteps"), "uniform")
        if block.get("timestep_type") is not None:
            reading.harmless.append(block.key("timestep_type"))  # upstream asks it of flow matching only
        return None
    _choice(reading, block, "timestep_type", ("objective", "timesteps"), TIMESTEPS, OTHER_TIMESTEPS)
    name = block.get("timestep_type") or "sigmoid"
    name = name if isinstance(name, str) else "sigmoid"
    if TIMESTEPS.get(name) != "shift":
        # Only `shift` shifts upstream; unset would mean the family's own shift.
        reading.default(("objective", "flow_shift"), 1.0)
    return name


def _window(reading: Reading, block: Block, target: Target, kind: str | None) -> None:
    """Denoising steps count from the noisiest one down; our timesteps count up to it."""
    names = ("min_denoising_steps", "max_denoising_steps")
    low, high = (number(block.get(name)) for name in names)
    given = [name for name in names if block.get(name) is not None]
    if (low in (None, 0)) and (high is None or (whole(high) is not None and high >= _LAST_STEP)):
        return
    if target.dual_expert:
        keys = " and ".join(block.key(name) for name in given)
        reading.draft.note(f"{keys}: not used, as in ai-toolkit: each expert's own window of noise levels decides")
    elif kind not in (None, "linear", "weighted", "sigmoid"):
        for name in given:
            reading.draft.refuse(block.key(name), block.get(name), f"the whole range with timestep_type {kind}")
    else:
        for name, path in zip(given, _window_paths(given), strict=True):
            step = whole(number(block.get(name)))
            value = block.get(name) if step is None else timestep_of(step, kind == "sigmoid")
            reading.put(path, value, block.key(name))


def _window_paths(given: list[str]) -> list[tuple[str, str]]:
    ours = {"min_denoising_steps": "max_timestep", "max_denoising_steps": "min_timestep"}
    return [("objective", ours[name]) for name in given]


def timestep_of(step: int, sigmoid: bool) -> int:
    """The noise level (0 to 1000) at a position in upstream's list of 1000, which runs from noise to image.

    Sigmoid timesteps are drawn and sorted, so that a position there is a quantile of their distribution.
    """
    if step <= 0:
        return 1000
    if step >= _LAST_STEP:
        return 0
    if not sigmoid:
        return 1000 - step
    return round(1000 / (1 + math.exp(-NormalDist().inv_cdf(1 - step / 1000))))


def _choice(
    reading: Reading,
    block: Block,
    name: str,
    path: tuple[str, str],
    ours: dict[str, str],
    others: tuple[str, ...],
) -> None:
    value = block.get(name)
    if value is None:
        return
    expected = f"one of {', '.join(ours)}"
    if isinstance(value, str) and value in ours:
        reading.put(path, ours[value], block.key(name))
    elif value in others:
        reading.draft.refuse(block.key(name), value, expected)
    else:
        hint = misspelt(value, ours, "choose one of them", write=f"{name}: {{}}")
        reading.draft.problem(block.key(name), value, expected, hint)


def _snr(reading: Reading, block: Block, flow: bool) -> None:
    for name in ("snr_gamma", "min_snr_gamma"):
        value = number(block.get(name))
        if value in (None, 0):
            continue
        if flow:
            reading.draft.note(f"{block.key(name)}: no effect with flow matching: every timestep weighs 1")
        elif name == "min_snr_gamma":
            reading.put(("objective", "snr_gamma"), value, block.key(name))
        else:
            why = "nothing: the unclipped gamma/SNR weight is not done here"
            reading.draft.refuse(block.key(name), value, why, "write `min_snr_gamma` for the usual Min-SNR weight")


def _ema(reading: Reading, block: Block) -> None:
    ema = block_of(reading, block.get("ema_config"), block.key("ema_config"))
    check(reading, ema, EMA)
    used = ema.flag(reading, "use_ema", False)
    if used:
        reading.put(("training", "ema", "enabled"), True, ema.key("use_ema"))
    if used and ema.get("ema_decay") is not None:
        reading.put(("training", "ema", "decay"), number(ema.get("ema_decay")), ema.key("ema_decay"))
    elif ema.get("ema_decay") is not None:
        reading.harmless.append(ema.key("ema_decay"))


def _speed(reading: Reading, block: Block, target: Target) -> None:
    if block.get("gradient_checkpointing") is not None:
        on = block.flag(reading, "gradient_checkpointing", True)
        path = ("training", "gradient_checkpointing")
        reading.put(path, "full" if on else "off", block.key("gradient_checkpointing"))
    backend = block.get("attention_backend")
    if isinstance(backend, str) and backend in ATTENTION:
        reading.put(("training", "attention"), ATTENTION[backend], block.key("attention_backend"))
    elif isinstance(backend, str) and "sage" in backend.lower():
        why = f"one of {', '.join(ATTENTION)}: SageAttention computes in 8 bits"
        reading.draft.refuse(block.key("attention_backend"), backend, why)
    elif backend is not None:
        reading.harmless.append(block.key("attention_backend"))
    if block.flag(reading, "bypass_guidance_embedding", False):
        # The web interface writes it for every model; only Flux has such an embedding.
        key = block.key("bypass_guidance_embedding")
        if target.arch.family == "flux":
            reading.draft.refuse(key, True, "false: Flux is trained with its guidance embedding")
        else:
            reading.harmless.append(key)


def _sampling(reading: Reading, block: Block) -> None:
    at_start = not block.flag(reading, "skip_first_sample", False)
    if block.get("skip_first_sample") is None:
        reading.default(("validation", "at_start"), at_start)
    else:
        reading.put(("validation", "at_start"), at_start, block.key("skip_first_sample"))
    if block.flag(reading, "disable_sampling", False):
        reading.put(("validation", "enabled"), False, block.key("disable_sampling"))


def _text(reading: Reading, block: Block) -> Training:
    caches = block.flag(reading, "cache_text_embeddings", False)
    unloads = block.flag(reading, "unload_text_encoder", False)
    if unloads and caches:
        reading.draft.note(f"{block.key('unload_text_encoder')}: no effect: the cached captions are used")
    elif unloads:
        reading.draft.note(
            f"{block.key('unload_text_encoder')}: every caption is replaced by the trigger word (or by nothing), as in "
            "ai-toolkit; write `cache_text_embeddings: true` instead to train on the captions"
        )
    return Training(block, _reg_weight(reading, block), caches, unloads and not caches)


def _reg_weight(reading: Reading, block: Block) -> float:
    if block.get("reg_weight") is None:
        return 1.0
    weight = real(number(block.get("reg_weight")))
    if weight is not None and weight >= 0:
        return weight
    reading.draft.problem(block.key("reg_weight"), block.get("reg_weight"), "a number >= 0", "write `reg_weight: 1.0`")
    return 1.0


def read_save(reading: Reading, value: Any, prefix: str, *, adapter: bool) -> None:
    block = block_of(reading, value, prefix)
    check(reading, block, SAVE)
    put_rows(reading, block, SAVE)
    reading.default(("checkpoints", "save_dtype"), "fp16")
    if "save_every" not in block.values:
        reading.default(("checkpoints", "every_steps"), 1000)
    elif block.get("save_every"):
        reading.put_count(("checkpoints", "every_steps"), block.get("save_every"), block.key("save_every"))
    else:
        reading.put(("checkpoints", "every_steps"), None, block.key("save_every"))
    save_format, key = block.get("save_format"), block.key("save_format")
    if save_format not in (None, "safetensors", "diffusers"):
        reading.draft.problem(key, save_format, "safetensors or diffusers", "choose one of them")
    elif save_format == "diffusers" and not adapter:
        reading.put(("checkpoints", "format"), "diffusers", key)
    elif save_format is not None:
        reading.harmless.append(key)  # upstream writes an adapter the same way under both names


def read_logging(reading: Reading, value: Any, prefix: str) -> None:
    block = block_of(reading, value, prefix)
    check(reading, block, LOGGING)
    put_rows(reading, block, LOGGING)
    reading.default(("logging", "project"), "ai-toolkit")
    if block.get("log_every"):
        reading.put_count(("logging", "every_steps"), block.get("log_every"), block.key("log_every"))
    else:
        reading.default(("logging", "every_steps"), 100)
    if block.flag(reading, "use_wandb", False):
        reading.put(("logging", "trackers"), ["tensorboard", "wandb"], block.key("use_wandb"))

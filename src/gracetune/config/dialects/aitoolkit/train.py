"""The `train`, `save` and `logging` blocks."""

from __future__ import annotations

import math
from statistics import NormalDist

from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.optimizer import read_optimizer, read_schedule
from gracetune.config.dialects.aitoolkit.sections import HARMLESS, section
from gracetune.config.dialects.aitoolkit.train_keys import NOT_DONE, NOT_USED
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import IsFalse, Key, KeyRule, OneOf, apply, check, noted, refused
from gracetune.config.dialects.values import as_number, precision, real, whole
from gracetune.config.draft import Path, Said
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


def _accumulation(block: PeerBlock, job: AiToolkitJob) -> None:
    """The newer key counts optimizer steps, the older one counts micro-batches as steps."""
    name, path = "gradient_accumulation_steps", ("training", "gradient_accumulation_steps")
    newer, older = whole(as_number(block.get("gradient_accumulation"))), as_number(block.get(name))
    if older == -1:
        block.refuse(name, "a number: accumulating over a whole epoch is not done here", found=older)
    elif older not in (None, 1) and newer is not None and newer > 1:
        found = Said(f"{older} next to gradient_accumulation {newer}")
        block.problem(name, "one of the two", "remove it", found=found)
    elif older not in (None, 1):
        block.assign(path, older, name)
        block.note(
            f"{block.key(name)}: with this key ai-toolkit counts every micro-batch as a step; steps, saves and samples "
            f"are divided by {older} here, because we count optimizer steps"
        )
        return
    block.put("gradient_accumulation", path, as_number)


def _length(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.get("steps") is None:
        block.default(("training", "max_steps"), 1000)
    else:
        job.put_count(block, ("training", "max_steps"), "steps")


def _switching(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.get("switch_boundary_every") is None:
        return
    if job.target.dual_expert:
        job.put_count(block, ("model", "switch_experts_every"), "switch_boundary_every")
    else:
        block.list_unused(HARMLESS, "switch_boundary_every")


def _precision(block: PeerBlock, job: AiToolkitJob) -> None:
    """Upstream holds frozen weights it does not quantise in the training dtype; `mixed_precision` is the seeds' key."""
    dtype, mixed = precision(block.get("dtype")), precision(block.get("mixed_precision"))
    if dtype is None and mixed is None:
        dtype = "fp32"
        block.default(("training", "mixed_precision"), dtype)
        block.default(("model", "base_precision"), dtype)  # unless the model block says fp8
        block.note(f"{block.key('dtype')} is not set: ai-toolkit trains in fp32 then, and so do we; write bf16")
        return
    for path, choices in (
        (("training", "mixed_precision"), ((mixed, "mixed_precision"), (dtype, "dtype"))),
        (("model", "base_precision"), ((dtype, "dtype"), (mixed, "mixed_precision"))),
    ):
        value, name = next((value, name) for value, name in choices if value is not None)
        if not (path[0] == "model" and job.target.quantised):
            block.assign(path, value, name)


def _is_flow(block: PeerBlock, job: AiToolkitJob) -> bool:
    return job.target.transformer or bool(block.get("noise_scheduler") == "flowmatch")


def _scheduler(block: PeerBlock, job: AiToolkitJob) -> None:
    name, family = block.get("noise_scheduler"), job.target.names.family
    if job.target.transformer:
        if name is None:
            key = block.key("noise_scheduler")
            block.note(f"{key} is not set: {family} is trained with flow matching all the same")
        elif name != "flowmatch":
            block.problem("noise_scheduler", f"flowmatch: {family} knows no other", "write `flowmatch`")
    elif name == "flowmatch":
        block.assign(("objective", "prediction"), "flow", "noise_scheduler")
    elif name not in (None, "ddpm", "ddim"):
        block.refuse("noise_scheduler", "ddpm or flowmatch for training")


def _bias(block: PeerBlock, job: AiToolkitJob) -> None:
    biases = {name: name for name in ("balanced", "content", "style")}
    _choose(block, "content_or_style", ("objective", "timestep_bias"), biases, ())


def _timestep_type(block: PeerBlock) -> str:
    """ai-toolkit's name of the timestep distribution of a flow model."""
    name = block.get("timestep_type") or "sigmoid"
    return name if isinstance(name, str) else "sigmoid"


def _timesteps(block: PeerBlock, job: AiToolkitJob) -> None:
    if not _is_flow(block, job):
        block.default(("objective", "timesteps"), "uniform")
        if block.get("timestep_type") is not None:
            block.list_unused(HARMLESS, "timestep_type")  # upstream asks it of flow matching only
        return
    _choose(block, "timestep_type", ("objective", "timesteps"), TIMESTEPS, OTHER_TIMESTEPS)
    if TIMESTEPS.get(_timestep_type(block)) != "shift":
        # Only `shift` shifts upstream; unset would mean the family's own shift.
        block.default(("objective", "flow_shift"), 1.0)


_NOISE_RANGE = {"min_denoising_steps": "max_timestep", "max_denoising_steps": "min_timestep"}


def _noise_range(block: PeerBlock, job: AiToolkitJob) -> None:
    """Denoising steps count from the noisiest one down; our timesteps count up to it."""
    low, high = (as_number(block.get(name)) for name in _NOISE_RANGE)
    given = [name for name in _NOISE_RANGE if block.get(name) is not None]
    if (low in (None, 0)) and (high is None or (whole(high) is not None and high >= _LAST_STEP)):
        return
    kind = _timestep_type(block) if _is_flow(block, job) else None
    if job.target.dual_expert:
        keys = " and ".join(block.key(name) for name in given)
        block.note(f"{keys}: not used, as in ai-toolkit: each expert's own window of noise levels decides")
    elif kind not in (None, "linear", "weighted", "sigmoid"):
        for name in given:
            block.refuse(name, f"the whole range with timestep_type {kind}")
    else:
        for name in given:
            step = whole(as_number(block.get(name)))
            value = block.get(name) if step is None else timestep_of(step, kind == "sigmoid")
            block.assign(("objective", _NOISE_RANGE[name]), value, name)


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


def _choose(block: PeerBlock, name: str, path: Path, ours: dict[str, str], others: tuple[str, ...]) -> None:
    value = block.get(name)
    if value is None:
        return
    expected = f"one of {', '.join(ours)}"
    if isinstance(value, str) and value in ours:
        block.assign(path, ours[value], name)
    elif value in others:
        block.refuse(name, expected)
    else:
        block.problem(name, expected, misspelt(value, ours, "choose one of them", write=f"{name}: {{}}"))


def _loss(block: PeerBlock, job: AiToolkitJob) -> None:
    _choose(block, "loss_type", ("objective", "loss"), LOSSES, OTHER_LOSSES)


def _snr(block: PeerBlock, job: AiToolkitJob) -> None:
    for name in ("snr_gamma", "min_snr_gamma"):
        value = as_number(block.get(name))
        if value in (None, 0):
            continue
        if _is_flow(block, job):
            block.note(f"{block.key(name)}: no effect with flow matching: every timestep weighs 1")
        elif name == "min_snr_gamma":
            block.assign(("objective", "snr_gamma"), value, name)
        else:
            why = "nothing: the unclipped gamma/SNR weight is not done here"
            block.refuse(name, why, "write `min_snr_gamma` for the usual Min-SNR weight", found=value)


def _ema(block: PeerBlock, job: AiToolkitJob) -> None:
    ema = block.inner("ema_config")
    check(ema, EMA)
    apply(ema, EMA, job)


def _average(ema: PeerBlock, job: AiToolkitJob) -> None:
    used = ema.flag("use_ema", False)
    if used:
        ema.assign(("training", "ema", "enabled"), True, "use_ema")
        ema.put("ema_decay", ("training", "ema", "decay"), as_number)
    elif ema.get("ema_decay") is not None:
        ema.list_unused(HARMLESS, "ema_decay")


def _checkpointing(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.get("gradient_checkpointing") is not None:
        on = block.flag("gradient_checkpointing", True)
        block.assign(("training", "gradient_checkpointing"), "full" if on else "off", "gradient_checkpointing")


def _attention(block: PeerBlock, job: AiToolkitJob) -> None:
    backend = block.get("attention_backend")
    if isinstance(backend, str) and backend in ATTENTION:
        block.assign(("training", "attention"), ATTENTION[backend], "attention_backend")
    elif isinstance(backend, str) and "sage" in backend.lower():
        block.refuse("attention_backend", f"one of {', '.join(ATTENTION)}: SageAttention computes in 8 bits")
    elif backend is not None:
        block.list_unused(HARMLESS, "attention_backend")


def _guidance_embedding(block: PeerBlock, job: AiToolkitJob) -> None:
    """The web interface writes it for every model; few have such an embedding."""
    if not block.flag("bypass_guidance_embedding", False):
        return
    why = job.target.names.aitoolkit.guidance_embedding
    if why:
        block.refuse("bypass_guidance_embedding", why)
    else:
        block.list_unused(HARMLESS, "bypass_guidance_embedding")


def _sampling(block: PeerBlock, job: AiToolkitJob) -> None:
    at_start = not block.flag("skip_first_sample", False)
    if block.get("skip_first_sample") is None:
        block.default(("validation", "at_start"), at_start)
    else:
        block.assign(("validation", "at_start"), at_start, "skip_first_sample")
    if block.flag("disable_sampling", False):
        block.assign(("validation", "enabled"), False, "disable_sampling")


def _text(block: PeerBlock, job: AiToolkitJob) -> None:
    caches = block.flag("cache_text_embeddings", False)
    unloads = block.flag("unload_text_encoder", False)
    if unloads and caches:
        block.note(f"{block.key('unload_text_encoder')}: no effect: the cached captions are used")
    elif unloads:
        block.note(
            f"{block.key('unload_text_encoder')}: every caption is replaced by the trigger word (or by nothing), as in "
            "ai-toolkit; write `cache_text_embeddings: true` instead to train on the captions"
        )


def _reg_weight(block: PeerBlock, job: AiToolkitJob) -> None:
    """The datasets take it into account (`AiToolkitJob.reg_weight`)."""
    weight = real(as_number(block.get("reg_weight")))
    if block.get("reg_weight") is not None and (weight is None or weight < 0):
        block.problem("reg_weight", "a number >= 0", "write `reg_weight: 1.0`")


TRAIN = section(
    KeyRule(_accumulation, "gradient_accumulation gradient_accumulation_steps"),
    Key("batch_size", ("training", "batch_size"), as_number),
    Key("max_grad_norm", ("training", "max_grad_norm"), as_number),
    Key("noise_offset", ("objective", "noise_offset"), as_number),
    KeyRule(_length, "steps"),
    KeyRule(_switching, "switch_boundary_every"),
    KeyRule(_precision, "dtype mixed_precision"),
    KeyRule(read_optimizer, "optimizer optimizer_params lr"),
    KeyRule(read_schedule, "lr_scheduler lr_scheduler_params"),
    KeyRule(_scheduler, "noise_scheduler"),
    KeyRule(_bias, "content_or_style"),
    KeyRule(_timesteps, "timestep_type"),
    KeyRule(_noise_range, *_NOISE_RANGE),
    KeyRule(_loss, "loss_type"),
    KeyRule(_snr, "snr_gamma min_snr_gamma"),
    KeyRule(_ema, "ema_config"),
    KeyRule(_checkpointing, "gradient_checkpointing"),
    KeyRule(_attention, "attention_backend"),
    KeyRule(_guidance_embedding, "bypass_guidance_embedding"),
    KeyRule(_sampling, "skip_first_sample disable_sampling"),
    KeyRule(_text, "cache_text_embeddings unload_text_encoder"),
    KeyRule(_reg_weight, "reg_weight"),
    *NOT_DONE,
    *NOT_USED,
)

EMA = section(
    KeyRule(_average, "use_ema ema_decay"),
    refused("use_feedback", OneOf((False,)), "false: the average is not fed back into the weights"),
    refused("param_multiplier", OneOf((1,)), "1: the weights are not scaled after each step"),
    *noted(HARMLESS, "feedback_rate", IsFalse()),
)


def _save_every(block: PeerBlock, job: AiToolkitJob) -> None:
    block.default(("checkpoints", "save_dtype"), "fp16")
    if "save_every" not in block:
        block.default(("checkpoints", "every_steps"), 1000)
    elif block.get("save_every"):
        job.put_count(block, ("checkpoints", "every_steps"), "save_every")
    else:
        block.assign(("checkpoints", "every_steps"), None, "save_every")


def _save_format(block: PeerBlock, job: AiToolkitJob) -> None:
    save_format = block.get("save_format")
    if save_format not in (None, "safetensors", "diffusers"):
        block.problem("save_format", "safetensors or diffusers", "choose one of them")
    elif save_format == "diffusers" and not job.target.adapter:
        block.assign(("checkpoints", "format"), "diffusers", "save_format")
    elif save_format is not None:
        block.list_unused(HARMLESS, "save_format")  # upstream writes an adapter the same way under both names


def _push(block: PeerBlock, job: AiToolkitJob) -> None:
    """ai-toolkit uploads the run's folder when it is done; its default is a public repository."""
    if not block.flag("push_to_hub", False):
        block.list_unused(HARMLESS, *(name for name in ("hf_repo_id", "hf_private") if block.get(name)))
        return
    push = ("checkpoints", "push_to_hub")
    if not block.get("hf_repo_id"):
        block.problem("hf_repo_id", "the repository to upload to: push_to_hub is true", "add `hf_repo_id: owner/name`")
        return
    block.put("hf_repo_id", (*push, "repo_id"))
    block.put("hf_private", (*push, "private"))
    block.default((*push, "private"), False)


SAVE = section(
    Key("dtype", ("checkpoints", "save_dtype"), precision),
    Key("max_step_saves_to_keep", ("checkpoints", "keep_last"), as_number),
    KeyRule(_save_every, "save_every"),
    KeyRule(_save_format, "save_format"),
    KeyRule(_push, "push_to_hub hf_repo_id hf_private"),
)


def _log_every(block: PeerBlock, job: AiToolkitJob) -> None:
    block.default(("logging", "project"), "ai-toolkit")
    if block.get("log_every"):
        job.put_count(block, ("logging", "every_steps"), "log_every")
    else:
        block.default(("logging", "every_steps"), 100)


def _trackers(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.flag("use_wandb", False):
        block.assign(("logging", "trackers"), ["tensorboard", "wandb"], "use_wandb")


LOGGING = section(
    Key("project_name", ("logging", "project")),
    KeyRule(_log_every, "log_every"),
    KeyRule(_trackers, "use_wandb"),
    *noted(HARMLESS, "verbose use_ui_logger run_name", IsFalse()),
)

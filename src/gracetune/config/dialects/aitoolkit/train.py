"""Reads the `train`, `save` and `logging` blocks."""

from __future__ import annotations

from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.keys import HARMLESS, UNSUPPORTED_TRAIN_KEYS, UNUSED_TRAIN_KEYS, section
from gracetune.config.dialects.aitoolkit.objective import OBJECTIVE
from gracetune.config.dialects.aitoolkit.optimizer import read_optimizer, read_schedule
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import IsFalse, Key, KeyRule, OneOf, apply, check, noted, rejected
from gracetune.config.dialects.values import as_number, precision, real, whole
from gracetune.config.draft import UnquotedText

ATTENTION = {
    "native": "auto", "flash": "flash_attn_2", "_flash_3": "flash_attn_3", "_flash_3_hub": "flash_attn_3",
    "_native_flash": "flash", "_native_cudnn": "cudnn", "_native_efficient": "efficient", "_native_math": "math",
}  # fmt: skip


def _accumulation(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read gradient accumulation. The newer key counts optimizer steps and sums gradients; the older one counts
    micro-batches as steps."""
    name, path = "gradient_accumulation_steps", ("training", "gradient_accumulation_steps")
    newer, older = whole(as_number(block.get("gradient_accumulation"))), as_number(block.get(name))
    if older == -1:
        block.reject(name, "a number: accumulating over a whole epoch is not done here", found=older)
    elif older not in (None, 1) and newer is not None and newer > 1:
        found = UnquotedText(f"{older} next to gradient_accumulation {newer}")
        block.problem(name, "one of the two", "remove it", found=found)
    elif older not in (None, 1):
        block.assign(path, older, name)
        block.note(
            f"{block.key(name)}: with this key ai-toolkit counts every micro-batch as a step; steps, saves and samples "
            f"are divided by {older} here, because we count optimizer steps. It also forgets the gradients of all but "
            f"the last of every {older} micro-batches; here each optimizer step learns from the mean of all of them"
        )
        return
    block.put("gradient_accumulation", path, as_number)
    if newer is not None and newer > 1:
        block.assign(("training", "accumulation"), "sum", "gradient_accumulation")


def _clipping(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read gradient clipping. Upstream clips for every optimizer except Adafactor."""
    if block.get("optimizer") != "adafactor":
        block.put("max_grad_norm", ("training", "max_grad_norm"), as_number)
        return
    block.assign(("training", "max_grad_norm"), None, "optimizer")
    if block.get("max_grad_norm") is not None:
        block.note(f"{block.key('max_grad_norm')}: not used with adafactor, as in ai-toolkit: nothing is clipped")


def _length(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.get("steps") is None:
        block.default(("training", "max_steps"), 1000)
    else:
        job.put_count(block, ("training", "max_steps"), "steps")


def _switching(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read how often experts switch. Upstream counts micro-batches, so one optimizer step can train both experts."""
    name, path = "switch_boundary_every", ("model", "switch_experts_every")
    every, each = whole(as_number(block.get(name) or 1)), whole(as_number(block.get("gradient_accumulation"))) or 1
    if not job.target.dual_expert:
        block.list_unused(HARMLESS, *([name] if block.get(name) is not None else []))
        return
    if job.target.arch.boundary_note:
        block.note(f"{job.target.name}: {job.target.arch.boundary_note}")
    if each <= 1 or every is None:
        if block.get(name) is not None:
            job.put_count(block, path, name)
        return
    steps = max(1, round(every / each))
    block.assign(path, steps, name if block.get(name) is not None else "gradient_accumulation")
    if every % each:
        micro, step = (
            _counted(every, "micro-batch", "micro-batches"),
            _counted(steps, "optimizer step", "optimizer steps"),
        )
        block.note(
            f"{block.key(name)}: ai-toolkit switches experts every {micro}, also within an optimizer step of {each}; "
            f"here they switch every {step}"
        )


def _counted(number: int, one: str, several: str) -> str:
    return one if number == 1 else f"{number} {several}"


def _precision(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read the training dtype, in which upstream also loads frozen weights that it does not quantize.

    `mixed_precision` is the key of the GH200 guides.
    """
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
        if not (path[0] == "model" and job.target.quantizes_base):
            block.assign(path, value, name)


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
        block.reject("attention_backend", f"one of {', '.join(ATTENTION)}: SageAttention computes in 8 bits")
    elif backend is not None:
        block.list_unused(HARMLESS, "attention_backend")


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
    """Check `reg_weight`. The datasets apply it (`AiToolkitJob.reg_weight`)."""
    weight = real(as_number(block.get("reg_weight")))
    if block.get("reg_weight") is not None and (weight is None or weight < 0):
        block.problem("reg_weight", "a number >= 0", "write `reg_weight: 1.0`")


TRAIN = section(
    KeyRule(_accumulation, "gradient_accumulation gradient_accumulation_steps"),
    Key("batch_size", ("training", "batch_size"), as_number),
    KeyRule(_clipping, "max_grad_norm"),
    Key("noise_offset", ("objective", "noise_offset"), as_number),
    KeyRule(_length, "steps"),
    KeyRule(_switching, "switch_boundary_every"),
    KeyRule(_precision, "dtype mixed_precision"),
    KeyRule(read_optimizer, "optimizer optimizer_params lr"),
    KeyRule(read_schedule, "lr_scheduler lr_scheduler_params"),
    *OBJECTIVE,
    KeyRule(_ema, "ema_config"),
    KeyRule(_checkpointing, "gradient_checkpointing"),
    KeyRule(_attention, "attention_backend"),
    KeyRule(_sampling, "skip_first_sample disable_sampling"),
    KeyRule(_text, "cache_text_embeddings unload_text_encoder"),
    KeyRule(_reg_weight, "reg_weight"),
    *UNSUPPORTED_TRAIN_KEYS,
    *UNUSED_TRAIN_KEYS,
)

EMA = section(
    KeyRule(_average, "use_ema ema_decay"),
    rejected("use_feedback", OneOf((False,)), "false: the average is not fed back into the weights"),
    rejected("param_multiplier", OneOf((1,)), "1: the weights are not scaled after each step"),
    *noted(HARMLESS, "feedback_rate", unless=IsFalse()),
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
        block.list_unused(HARMLESS, "save_format")  # upstream saves an adapter the same way with both values


def _push(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read the upload options. ai-toolkit uploads the run's folder at the end, by default to a public repository."""
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
    *noted(HARMLESS, "verbose use_ui_logger run_name", unless=IsFalse()),
)

"""How it is trained: length, batches, schedule, objective, checkpoints, trackers."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.simpletuner.model import stage_shift
from gracetune.config.dialects.simpletuner.values import (
    PEER,
    Converter,
    Options,
    as_flag,
    as_given,
    as_list,
    as_number,
    as_text,
    choice,
    is_number,
    not_zero,
)
from gracetune.config.draft import OUR_DEFAULT, Draft, Path

_UNSET: Any = object()


def _checkpointing(value: Any) -> Any:
    flag = as_flag(value)
    return {True: "full", False: "off"}[flag] if isinstance(flag, bool) else value


def _compile(value: Any) -> Any:
    return ("off" if value.strip().lower() in ("no", "", "none") else "on") if isinstance(value, str) else value


def _resume(value: Any) -> Any:
    return "none" if value in ("", "None") else value


ROWS: dict[str, tuple[Path, Converter, Any]] = {
    "train_batch_size": (("training", "batch_size"), as_number, 4),
    "gradient_accumulation_steps": (("training", "gradient_accumulation_steps"), as_number, _UNSET),
    "gradient_checkpointing": (("training", "gradient_checkpointing"), _checkpointing, _UNSET),
    "dynamo_backend": (("training", "compile"), _compile, _UNSET),
    "max_grad_norm": (("training", "max_grad_norm"), not_zero, 2.0),
    "grad_clip_method": (("training", "grad_clip"), as_given, "value"),
    "use_ema": (("training", "ema", "enabled"), as_flag, _UNSET),
    "ema_decay": (("training", "ema", "decay"), as_number, 0.995),
    "ema_update_interval": (("training", "ema", "update_every"), as_number, _UNSET),
    "learning_rate": (("optimizer", "lr"), as_number, 4e-7),
    "lr_warmup_steps": (("schedule", "warmup_steps"), as_number, _UNSET),
    "lr_num_cycles": (("schedule", "cycles"), as_number, _UNSET),
    "lr_power": (("schedule", "power"), as_number, 0.8),
    "lr_end": (("schedule", "end_lr"), as_number, 4e-7),
    "snr_gamma": (("objective", "snr_gamma"), not_zero, _UNSET),
    "input_perturbation": (("objective", "input_perturbation"), as_number, _UNSET),
    "checkpoint_step_interval": (("checkpoints", "every_steps"), not_zero, _UNSET),
    "checkpoint_epoch_interval": (("checkpoints", "every_epochs"), not_zero, _UNSET),
    "checkpoints_total_limit": (("checkpoints", "keep_last"), as_number, _UNSET),
    "resume_from_checkpoint": (("checkpoints", "resume"), _resume, _UNSET),
    "cache_dir": (("cache", "cache_dir"), as_given, _UNSET),
    "cache_dir_text": (("cache", "text_cache_dir"), as_given, _UNSET),
    "cache_dir_vae": (("cache", "vae_cache_dir"), as_given, _UNSET),
    "vae_batch_size": (("cache", "vae_batch_size"), as_number, _UNSET),
    "text_encoder_batch_size": (("cache", "text_encoder_batch_size"), as_number, _UNSET),
    "tracker_project_name": (("logging", "project"), as_text, _UNSET),
}
"""Option -> path, converter, SimpleTuner's default where it differs from ours and changes what is learnt."""


def read_rows(options: Options, draft: Draft) -> None:
    for name, (path, convert, default) in ROWS.items():
        options.put(draft, name, path, convert)
        if default is not _UNSET:
            draft.default(path, default, PEER, name)


def read_training(options: Options, draft: Draft, family: str) -> None:
    read_rows(options, draft)
    _length(options, draft)
    _seed(options, draft)
    _attention(options, draft)
    _schedule(options, draft)
    _loss(options, draft)
    _noise(options, draft, family)
    _timesteps(options, draft, family)
    _trackers(options, draft)


def _length(options: Options, draft: Draft) -> None:
    steps, epochs = as_number(options.get("max_train_steps")), as_number(options.get("num_train_epochs"))
    wants_steps, wants_epochs = not (_is_zero(steps) or steps is None), not (_is_zero(epochs) or epochs is None)
    if wants_steps:
        options.put(draft, "max_train_steps", ("training", "max_steps"), as_number)
        if wants_epochs:
            options.problem(draft, "num_train_epochs", f"0, because `{options.key('max_train_steps')}` is set",
                            f"write 0, or remove `{options.key('max_train_steps')}`")  # fmt: skip
    elif wants_epochs:
        options.put(draft, "num_train_epochs", ("training", "epochs"), as_number)
    elif epochs is None:
        draft.default(("training", "epochs"), 1, PEER, "num_train_epochs")
    else:
        draft.problem("max_train_steps", options.get("max_train_steps"), "a number of steps: `num_train_epochs` is 0",
                      f"write {options.line('max_train_steps', '2000')}, for example")  # fmt: skip
        draft.put(("training", "max_steps"), 1, OUR_DEFAULT)  # the length has been asked for once already


def _is_zero(value: Any) -> bool:
    return is_number(value) and value == 0


def _seed(options: Options, draft: Draft) -> None:
    if as_number(options.take("seed")) in (0, -1):
        draft.note(f"{options.key('seed')}: SimpleTuner takes a new seed for every start then; gracetune's runs are "
                   "repeatable, so it keeps its own seed. Give another number to vary it")  # fmt: skip
    else:
        options.put(draft, "seed", ("training", "seed"), as_number)


_ATTENTION = {
    "diffusers": "sdpa", "native": "sdpa", "kohaku-fa-auto": "auto", "kohaku-fa": "auto", "native-flash": "flash",
    "cudnn": "cudnn", "native-efficient": "efficient", "native-math": "math", "flash-attn": "flash_attn_2",
    "flash-attn-hub": "flash_attn_2", "flash-attn-2": "flash_attn_2", "flash-attn-varlen-hub": "flash_attn_2",
    "flash-attn-3": "flash_attn_3", "flash-attn-3-hub": "flash_attn_3", "flash-attn-3-varlen": "flash_attn_3",
    "flash-attn-3-varlen-hub": "flash_attn_3", "sdpa": "sdpa", "auto": "auto",
}  # fmt: skip
_SAME_MATHS = ("xformers", "flex", "flash-attn-4-hub", "native-npu", "native-xla", "metal-flash-attention")


def _attention(options: Options, draft: Draft) -> None:
    value = options.get("attention_mechanism")
    name = value.strip().lower().replace("_", "-") if isinstance(value, str) else None
    path = ("training", "attention")
    if name is None or name in _ATTENTION:
        options.put(draft, "attention_mechanism", path, lambda given: _ATTENTION[name] if name else given)
        return
    if name.startswith("sageattention") and options.take("sageattention_usage") not in (None, "inference"):
        options.refuse(draft, "sageattention_usage", "quantised attention is not used for training",
                       f"remove it, or choose another {options.key('attention_mechanism')}")  # fmt: skip
    elif name in _SAME_MATHS or name.startswith("sageattention"):
        draft.put(path, "auto", options.origin("attention_mechanism"))
        draft.note(f"{options.key('attention_mechanism')}: {value} is not used here; training takes the fastest exact "
                   "attention of this machine")  # fmt: skip
    elif name == "sla" or name.startswith("metal-"):
        options.refuse(draft, "attention_mechanism", "approximate attention is not implemented", 'write "diffusers"')
    else:
        options.put(draft, "attention_mechanism", path)


_SCHEDULES = {"cosine_with_warmup": "cosine"}


def _schedule(options: Options, draft: Draft) -> None:
    name = choice(_SCHEDULES)(options.get("lr_scheduler"))
    warmup = as_number(options.get("lr_warmup_steps"))
    if name == "constant" and is_number(warmup) and warmup > 0:
        name = "constant_with_warmup"
    if name is not None:
        draft.put(("schedule", "name"), name, options.origin("lr_scheduler"))
    draft.default(("schedule", "name"), "constant_with_warmup", PEER, "lr_scheduler")
    if name in ("cosine", "cosine_with_restarts"):
        draft.note(
            f"{options.key('lr_scheduler')}: gracetune warms up over lr_warmup_steps and then falls along a cosine to "
            "lr_end over the whole run; SimpleTuner takes lr_warmup_steps for half the period of a wave instead"
        )
    if name == "sine":
        draft.note(
            f"{options.key('lr_scheduler')}: gracetune warms up over lr_warmup_steps and then goes on in lr_num_cycles "
            "whole waves from the top; SimpleTuner begins in the middle of a wave, whose half period is lr_warmup_steps"
        )


_LOSSES = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}


def _loss(options: Options, draft: Draft) -> None:
    options.put(draft, "loss_type", ("objective", "loss"), choice(_LOSSES))
    options.put(draft, "huber_c", ("objective", "huber_delta"), as_number)
    if options.get("loss_type") in ("huber", "smooth_l1") and options.take("huber_schedule") != "constant":
        found = options.get("huber_schedule") or "snr"
        why = "constant; SimpleTuner's default, snr, lets huber_c follow the noise level"
        draft.refuse(options.key("huber_schedule"), found, why, f"write {options.line('huber_schedule', 'constant')}")
    if "use_soft_min_snr" in options:
        options.put(draft, "use_soft_min_snr", ("objective", "soft_min_snr"), as_flag)
        if options.is_on("use_soft_min_snr"):
            draft.note(f"{options.key('use_soft_min_snr')}: SimpleTuner 4.10 accepts it and weighs nothing by it; "
                       "gracetune does")  # fmt: skip


_PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v_prediction", "flow_matching": "flow"}


def _noise(options: Options, draft: Draft, family: str) -> None:
    """Offset noise acts on epsilon and v models only, and only behind its switch."""
    if family == "sdxl" and options.switch(draft, "offset_noise"):
        options.take("offset_noise")
        options.put(draft, "noise_offset", ("objective", "noise_offset"), as_number)
        options.put(draft, "noise_offset_probability", ("objective", "noise_offset_probability"), as_number)
        draft.default(("objective", "noise_offset"), 0.1, PEER, "noise_offset")
        draft.default(("objective", "noise_offset_probability"), 0.25, PEER, "noise_offset_probability")
    prediction = options.get("prediction_type")
    if family != "sdxl" or prediction is None:
        return
    if isinstance(prediction, str) and prediction in _PREDICTIONS:
        options.put(draft, "prediction_type", ("objective", "prediction"), choice(_PREDICTIONS))
    else:
        options.refuse(draft, "prediction_type", f"one of {', '.join(_PREDICTIONS)}")


def is_flow(draft: Draft, family: str) -> bool:
    return family in ("wan", "qwen_image", "flux") or draft.get(("objective", "prediction")) == "flow"


def _timesteps(options: Options, draft: Draft, family: str) -> None:
    if not family or family == "stable_audio":
        return
    if not is_flow(draft, family):
        draft.default(("objective", "timesteps"), "uniform", PEER)
        return
    for name, kind in (("flow_use_beta_schedule", "beta"), ("flow_use_uniform_schedule", "uniform")):
        if options.switch(draft, name):  # uniform is asked last, because it wins when both are on
            draft.put(("objective", "timesteps"), kind, options.origin(name))
    options.put(draft, "flow_sigmoid_scale", ("objective", "sigmoid_scale"), as_number)
    options.put(draft, "flow_beta_schedule_alpha", ("objective", "beta_alpha"), as_number)
    options.put(draft, "flow_beta_schedule_beta", ("objective", "beta_beta"), as_number)
    _shift(options, draft)


def _shift(options: Options, draft: Draft) -> None:
    path = ("objective", "flow_shift")
    forced = stage_shift(options, draft)
    if forced is not None:
        draft.put(path, forced, options.origin("model_flavour"))
    elif options.switch(draft, "flow_schedule_auto_shift"):
        draft.put(path, "resolution", options.origin("flow_schedule_auto_shift"))
    elif "flow_schedule_shift" in options:
        # 0 leaves the noise levels as they were drawn, which is what a shift of 1 does
        options.put(draft, "flow_schedule_shift", path, lambda value: not_zero(value) or 1.0)
    elif draft.get(("model", "flavour")) != "t2v-14b-2.2":  # SimpleTuner has no such flavour, and so no default for it
        draft.default(path, 3.0, PEER, "flow_schedule_shift")


_TRACKERS = ("tensorboard", "wandb")


def _trackers(options: Options, draft: Draft) -> None:
    wanted = as_list(options.get("report_to"))
    if not isinstance(wanted, list):
        options.put(draft, "report_to", ("logging", "trackers"))
        return
    names = [str(name).strip().lower() for name in wanted]
    draft.put(("logging", "trackers"), [name for name in _TRACKERS if name in names], options.origin("report_to"))
    others = [name for name in names if name not in (*_TRACKERS, "none")]
    if others:
        draft.note(f"{options.key('report_to')}: no tracker for {', '.join(others)}; tensorboard and wandb are")

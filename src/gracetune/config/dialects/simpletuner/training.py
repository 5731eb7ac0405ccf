"""How it is trained: length, batches, schedule, objective, checkpoints, trackers."""

from __future__ import annotations

import re
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.files import line
from gracetune.config.dialects.simpletuner.model import stage_shift
from gracetune.config.dialects.table import Key, KeyRule, KeyTable
from gracetune.config.dialects.values import as_flag, as_list, as_number, as_text, choice, is_number, not_zero
from gracetune.config.draft import OUR_DEFAULT
from gracetune.config.families import names_of


def _checkpointing(value: Any) -> Any:
    flag = as_flag(value)
    return {True: "full", False: "off"}[flag] if isinstance(flag, bool) else value


def _compile(value: Any) -> Any:
    return ("off" if value.strip().lower() in ("no", "", "none") else "on") if isinstance(value, str) else value


def _resume(value: Any) -> Any:
    return "none" if value in ("", "None") else value


def _length(options: PeerBlock, family: str) -> None:
    steps, epochs = as_number(options.get("max_train_steps")), as_number(options.get("num_train_epochs"))
    wants_steps, wants_epochs = not (_is_zero(steps) or steps is None), not (_is_zero(epochs) or epochs is None)
    if wants_steps:
        options.put("max_train_steps", ("training", "max_steps"), as_number)
        if wants_epochs:
            options.problem("num_train_epochs", f"0, because `{options.key('max_train_steps')}` is set",
                            f"write 0, or remove `{options.key('max_train_steps')}`")  # fmt: skip
    elif wants_epochs:
        options.put("num_train_epochs", ("training", "epochs"), as_number)
    elif epochs is None:
        options.default(("training", "epochs"), 1, "num_train_epochs")
    else:
        hint = f"write {line(options, 'max_train_steps', '2000')}, for example"
        expected = "a number of steps: `num_train_epochs` is 0"
        options.draft.problem("max_train_steps", options.get("max_train_steps"), expected, hint)
        options.draft.put(("training", "max_steps"), 1, OUR_DEFAULT)  # the length has been asked for once already


def _is_zero(value: Any) -> bool:
    return is_number(value) and value == 0


def _seed(options: PeerBlock, family: str) -> None:
    if as_number(options.take("seed")) in (0, -1):
        options.note(f"{options.key('seed')}: SimpleTuner takes a new seed for every start then; gracetune's runs are "
                   "repeatable, so it keeps its own seed. Give another number to vary it")  # fmt: skip
    else:
        options.put("seed", ("training", "seed"), as_number)


_ATTENTION = {
    "diffusers": "sdpa", "native": "sdpa", "kohaku-fa-auto": "auto", "kohaku-fa": "auto", "native-flash": "flash",
    "cudnn": "cudnn", "native-efficient": "efficient", "native-math": "math", "flash-attn": "flash_attn_2",
    "flash-attn-hub": "flash_attn_2", "flash-attn-2": "flash_attn_2", "flash-attn-varlen-hub": "flash_attn_2",
    "flash-attn-3": "flash_attn_3", "flash-attn-3-hub": "flash_attn_3", "flash-attn-3-varlen": "flash_attn_3",
    "flash-attn-3-varlen-hub": "flash_attn_3", "sdpa": "sdpa", "auto": "auto",
}  # fmt: skip
_SAME_MATHS = ("xformers", "flex", "flash-attn-4-hub", "native-npu", "native-xla", "metal-flash-attention")


def _attention(options: PeerBlock, family: str) -> None:
    value = options.get("attention_mechanism")
    name = value.strip().lower().replace("_", "-") if isinstance(value, str) else None
    path = ("training", "attention")
    if name is None or name in _ATTENTION:
        options.put("attention_mechanism", path, lambda given: _ATTENTION[name] if name else given)
        return
    if name.startswith("sageattention") and options.take("sageattention_usage") not in (None, "inference"):
        options.refuse("sageattention_usage", "quantised attention is not used for training",
                       f"remove it, or choose another {options.key('attention_mechanism')}")  # fmt: skip
    elif name in _SAME_MATHS or name.startswith("sageattention"):
        options.assign(path, "auto", "attention_mechanism")
        options.note(f"{options.key('attention_mechanism')}: {value} is not used here; training takes the fastest "
                     "exact attention of this machine")  # fmt: skip
    elif name == "sla" or name.startswith("metal-"):
        options.refuse("attention_mechanism", "approximate attention is not implemented", 'write "diffusers"')
    else:
        options.put("attention_mechanism", path)


_SCHEDULES = {"cosine_with_warmup": "cosine"}


def _schedule(options: PeerBlock, family: str) -> None:
    name = choice(_SCHEDULES)(options.get("lr_scheduler"))
    warmup = as_number(options.get("lr_warmup_steps"))
    if name == "constant" and is_number(warmup) and warmup > 0:
        name = "constant_with_warmup"
    if name is not None:
        options.assign(("schedule", "name"), name, "lr_scheduler")
    options.default(("schedule", "name"), "constant_with_warmup", "lr_scheduler")
    if name in ("cosine", "cosine_with_restarts"):
        options.note(
            f"{options.key('lr_scheduler')}: gracetune warms up over lr_warmup_steps and then falls along a cosine to "
            "lr_end over the whole run; SimpleTuner takes lr_warmup_steps for half the period of a wave instead"
        )
    if name == "sine":
        options.note(
            f"{options.key('lr_scheduler')}: gracetune warms up over lr_warmup_steps and then goes on in lr_num_cycles "
            "whole waves from the top; SimpleTuner begins in the middle of a wave, whose half period is lr_warmup_steps"
        )


_LOSSES = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}


def _loss(options: PeerBlock, family: str) -> None:
    options.put("loss_type", ("objective", "loss"), choice(_LOSSES))
    options.put("huber_c", ("objective", "huber_delta"), as_number)
    if options.get("loss_type") in ("huber", "smooth_l1") and options.take("huber_schedule") != "constant":
        found = options.get("huber_schedule") or "snr"
        why = "constant; SimpleTuner's default, snr, lets huber_c follow the noise level"
        options.draft.refuse(
            options.key("huber_schedule"), found, why, f"write {line(options, 'huber_schedule', 'constant')}"
        )
    if "use_soft_min_snr" in options:
        options.put("use_soft_min_snr", ("objective", "soft_min_snr"), as_flag)
        if options.is_on("use_soft_min_snr"):
            options.note(f"{options.key('use_soft_min_snr')}: SimpleTuner 4.10 accepts it and weighs nothing by it; "
                       "gracetune does")  # fmt: skip


_PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v_prediction", "flow_matching": "flow"}


def _noise(options: PeerBlock, family: str) -> None:
    """Offset noise acts on epsilon and v models only, and only behind its switch."""
    ddpm = names_of(family).objective == "ddpm"
    if ddpm and options.switch("offset_noise"):
        options.take("offset_noise")
        options.put("noise_offset", ("objective", "noise_offset"), as_number)
        options.put("noise_offset_probability", ("objective", "noise_offset_probability"), as_number)
        options.default(("objective", "noise_offset"), 0.1, "noise_offset")
        options.default(("objective", "noise_offset_probability"), 0.25, "noise_offset_probability")
    prediction = options.get("prediction_type")
    if not ddpm or prediction is None:
        return
    if isinstance(prediction, str) and prediction in _PREDICTIONS:
        options.put("prediction_type", ("objective", "prediction"), choice(_PREDICTIONS))
    else:
        options.refuse("prediction_type", f"one of {', '.join(_PREDICTIONS)}")


def is_flow(options: PeerBlock, family: str) -> bool:
    return names_of(family).objective == "flow" or options.draft.get(("objective", "prediction")) == "flow"


def _timesteps(options: PeerBlock, family: str) -> None:
    if not family or names_of(family).objective == "cosine":
        return
    if not is_flow(options, family):
        options.default(("objective", "timesteps"), "uniform")
        return
    for name, kind in (("flow_use_beta_schedule", "beta"), ("flow_use_uniform_schedule", "uniform")):
        if options.switch(name):  # uniform is asked last, because it wins when both are on
            options.assign(("objective", "timesteps"), kind, name)
    options.put("flow_sigmoid_scale", ("objective", "sigmoid_scale"), as_number)
    options.put("flow_beta_schedule_alpha", ("objective", "beta_alpha"), as_number)
    options.put("flow_beta_schedule_beta", ("objective", "beta_beta"), as_number)
    _shift(options, family)


def _shift(options: PeerBlock, family: str) -> None:
    path = ("objective", "flow_shift")
    forced = stage_shift(options, family)
    if forced is not None:
        options.assign(path, forced, "model_flavour")
    elif options.switch("flow_schedule_auto_shift"):
        options.assign(path, "resolution", "flow_schedule_auto_shift")
    elif "flow_schedule_shift" in options:
        # 0 leaves the noise levels as they were drawn, which is what a shift of 1 does
        options.put("flow_schedule_shift", path, lambda value: not_zero(value) or 1.0)
    elif options.draft.get(("model", "flavour")) not in names_of(family).simpletuner.without_shift:
        options.default(path, 3.0, "flow_schedule_shift")


_TRACKERS = ("tensorboard", "wandb")


def _trackers(options: PeerBlock, family: str) -> None:
    wanted = as_list(options.get("report_to"))
    if not isinstance(wanted, list):
        options.put("report_to", ("logging", "trackers"))
        return
    names = [str(name).strip().lower() for name in wanted]
    options.assign(("logging", "trackers"), [name for name in _TRACKERS if name in names], "report_to")
    others = [name for name in names if name not in (*_TRACKERS, "none")]
    if others:
        options.note(f"{options.key('report_to')}: no tracker for {', '.join(others)}; tensorboard and wandb are")


def _push(options: PeerBlock, family: str) -> None:
    """SimpleTuner uploads the result, and with `push_checkpoints_to_hub` each checkpoint, to a private repository."""
    if not options.switch("push_to_hub"):
        return
    push = ("checkpoints", "push_to_hub")
    options.take("push_to_hub")
    named = "hub_model_id" if options.get("hub_model_id") else "tracker_project_name"
    name = options.get(named)
    if not isinstance(name, str) or not name.strip():
        options.problem("hub_model_id", "the repository to upload to: push_to_hub is true", "add it: owner/name")
        return
    options.assign((*push, "repo_id"), _repository(name), named)
    options.put("model_card_private", (*push, "private"), as_flag)
    options.put("push_checkpoints_to_hub", (*push, "every_checkpoint"), as_flag)


def _repository(name: str) -> str:
    """People paste the repository's address."""
    plain = re.sub(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/", "", name.strip())
    return re.split(r"[?#]", plain)[0].strip("/")


TRAINING: KeyTable[str] = KeyTable(
    Key("train_batch_size", ("training", "batch_size"), as_number, default=4),
    Key("gradient_accumulation_steps", ("training", "gradient_accumulation_steps"), as_number),
    Key("gradient_checkpointing", ("training", "gradient_checkpointing"), _checkpointing),
    Key("dynamo_backend", ("training", "compile"), _compile),
    Key("max_grad_norm", ("training", "max_grad_norm"), not_zero, default=2.0),
    Key("grad_clip_method", ("training", "grad_clip"), default="value"),
    Key("use_ema", ("training", "ema", "enabled"), as_flag),
    Key("ema_decay", ("training", "ema", "decay"), as_number, default=0.995),
    Key("ema_update_interval", ("training", "ema", "update_every"), as_number),
    Key("learning_rate", ("optimizer", "lr"), as_number, default=4e-7),
    Key("lr_warmup_steps", ("schedule", "warmup_steps"), as_number),
    Key("lr_num_cycles", ("schedule", "cycles"), as_number),
    Key("lr_power", ("schedule", "power"), as_number, default=0.8),
    Key("lr_end", ("schedule", "end_lr"), as_number, default=4e-7),
    Key("snr_gamma", ("objective", "snr_gamma"), not_zero),
    Key("input_perturbation", ("objective", "input_perturbation"), as_number),
    Key("checkpoint_step_interval", ("checkpoints", "every_steps"), not_zero),
    Key("checkpoint_epoch_interval", ("checkpoints", "every_epochs"), not_zero),
    Key("checkpoints_total_limit", ("checkpoints", "keep_last"), as_number),
    Key("resume_from_checkpoint", ("checkpoints", "resume"), _resume),
    Key("cache_dir", ("cache", "cache_dir")),
    Key("cache_dir_text", ("cache", "text_cache_dir")),
    Key("cache_dir_vae", ("cache", "vae_cache_dir")),
    Key("vae_batch_size", ("cache", "vae_batch_size"), as_number),
    Key("text_encoder_batch_size", ("cache", "text_encoder_batch_size"), as_number),
    Key("tracker_project_name", ("logging", "project"), as_text),
    KeyRule(_length, "max_train_steps num_train_epochs"),
    KeyRule(_seed, "seed"),
    KeyRule(_attention, "attention_mechanism sageattention_usage"),
    KeyRule(_schedule, "lr_scheduler lr_warmup_steps"),
    KeyRule(_loss, "loss_type huber_schedule huber_c use_soft_min_snr"),
    KeyRule(_noise, "offset_noise noise_offset noise_offset_probability prediction_type"),
    KeyRule(
        _timesteps,
        "flow_use_beta_schedule flow_use_uniform_schedule flow_sigmoid_scale flow_beta_schedule_alpha",
        "flow_beta_schedule_beta flow_schedule_shift flow_schedule_auto_shift",
    ),
    KeyRule(_trackers, "report_to"),
    KeyRule(_push, "push_to_hub push_checkpoints_to_hub hub_model_id model_card_private"),
)
"""A default is SimpleTuner's, where it differs from ours and changes what is learnt."""

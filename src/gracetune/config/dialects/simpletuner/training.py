"""Reads the training options: length, batches, schedule, objective, checkpoints, trackers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.files import line
from gracetune.config.dialects.simpletuner.model import expert_shift
from gracetune.config.dialects.simpletuner.optimizer import is_prodigy
from gracetune.config.dialects.table import Key, KeyRule, KeyTable, apply, check, read_elsewhere
from gracetune.config.dialects.values import (
    as_flag,
    as_list,
    as_number,
    as_text,
    choice,
    from_json,
    is_number,
    is_off,
    positive_or_none,
)
from gracetune.config.draft import OUR_DEFAULT
from gracetune.config.families import FAMILIES, names_of


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
        options.draft.put(("training", "max_steps"), 1, OUR_DEFAULT)  # a placeholder, because the problem is reported


def _clipping(options: PeerBlock, family: str) -> None:
    """Read gradient clipping. SimpleTuner does not clip with Prodigy."""
    path = ("training", "max_grad_norm")
    if is_prodigy(options):
        options.assign(path, None, "optimizer")
        return
    options.put("max_grad_norm", path, positive_or_none)
    options.default(path, 2.0, "max_grad_norm")
    options.put("grad_clip_method", ("training", "grad_clip"))
    options.default(("training", "grad_clip"), "value", "grad_clip_method")


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
        options.reject("sageattention_usage", "quantized attention is not used for training",
                       f"remove it, or choose another {options.key('attention_mechanism')}")  # fmt: skip
    elif name in _SAME_MATHS or name.startswith("sageattention"):
        options.assign(path, "auto", "attention_mechanism")
        options.note(f"{options.key('attention_mechanism')}: {value} is not used here; training takes the fastest "
                     "exact attention of this machine")  # fmt: skip
    elif name == "sla" or name.startswith("metal-"):
        options.reject("attention_mechanism", "approximate attention is not implemented", 'write "diffusers"')
    else:
        options.put("attention_mechanism", path)


_SCHEDULES = {"cosine_with_warmup": "cosine"}
_DECAYING = ("polynomial", "cosine", "sine", "cosine_with_restarts")
"""Schedules that read `lr_end`. The others are diffusers' own, and end at 0 or do not decay."""
_WAVE = 1000
"""Optimizer steps of half a cosine wave if `lr_warmup_steps` is 0."""


def _schedule(options: PeerBlock, family: str) -> None:
    name = choice(_SCHEDULES)(options.get("lr_scheduler"))
    warmup = as_number(options.get("lr_warmup_steps"))
    warms_up = is_number(warmup) and warmup > 0
    if name == "constant" and warms_up:
        name = "constant_with_warmup"
    if is_prodigy(options) and name in (None, "constant", "constant_with_warmup") and not warms_up:
        return  # a constant rate, the only one that our Prodigy supports
    if name is not None:
        options.assign(("schedule", "name"), name, "lr_scheduler")
    options.default(("schedule", "name"), "constant_with_warmup", "lr_scheduler")
    if is_prodigy(options):
        options.note(f"{options.key('lr_scheduler')}: not followed with prodigy, which averages instead; SimpleTuner "
                     "follows it")  # fmt: skip
    if name == "cosine" or (name == "sine" and warms_up):
        _wave(options, name, warmup if warms_up else None)
    else:
        options.put("lr_warmup_steps", ("schedule", "warmup_steps"), as_number)
        options.put("lr_num_cycles", ("schedule", "cycles"), as_number)
    for key, readers, path, default in (
        ("lr_end", _DECAYING, ("schedule", "end_lr"), 4e-7),
        ("lr_power", ("polynomial",), ("schedule", "power"), 0.8),
    ):
        if name in readers:
            options.put(key, path, as_number)
            options.default(path, default, key)
        elif key in options and not is_number(as_number(options.get(key))):
            options.problem(key, "a number", f"write {default:g}, or remove `{options.key(key)}`")
    if name == "sine" and not warms_up:
        options.note(
            f"{options.key('lr_scheduler')}: SimpleTuner's sine stops with an error where lr_warmup_steps, half its "
            "period, is 0; gracetune goes through lr_num_cycles whole waves between learning_rate and lr_end"
        )
    if name == "cosine_with_restarts":
        options.note(
            f"{options.key('lr_scheduler')}: gracetune warms up over lr_warmup_steps and then falls lr_num_cycles "
            "times along a cosine to lr_end; SimpleTuner 4.10 warns that its own misbehaves, and keeps learning_rate"
        )


def _wave(options: PeerBlock, name: str, half_period: Any) -> None:
    """Read a wave over the whole run, for which SimpleTuner uses `lr_warmup_steps` as half the period."""
    path, key = ("schedule", "half_period"), options.key("lr_scheduler")
    if half_period is None:
        options.default(path, _WAVE, "lr_warmup_steps")
    else:
        options.put("lr_warmup_steps", path, as_number)
    begins = "learning_rate" if name == "cosine" else "its middle"
    options.note(
        f"{key}: {name} is a wave in SimpleTuner, and here too: from {begins}, without a warm-up, "
        f"{half_period or _WAVE} optimizer steps (lr_warmup_steps) from top to bottom. For one fall over the whole "
        "run: --set schedule.half_period=null"
    )


_LOSSES = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}


def _loss(options: PeerBlock, family: str) -> None:
    options.put("loss_type", ("objective", "loss"), choice(_LOSSES))
    options.put("huber_c", ("objective", "huber_delta"), as_number)
    if options.get("loss_type") in ("huber", "smooth_l1"):
        options.put("huber_schedule", ("objective", "huber_schedule"))
        options.default(("objective", "huber_schedule"), "snr", "huber_schedule")
    if "use_soft_min_snr" in options:
        options.put("use_soft_min_snr", ("objective", "soft_min_snr"), as_flag)
        if options.is_on("use_soft_min_snr"):
            options.note(f"{options.key('use_soft_min_snr')}: SimpleTuner 4.10 accepts it and weighs nothing by it; "
                       "gracetune does")  # fmt: skip


_PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v_prediction", "flow_matching": "flow"}


def _noise(options: PeerBlock, family: str) -> None:
    """Read offset noise and the prediction type. Both apply only to models that predict epsilon or v."""
    ddpm = names_of(family).objective == "ddpm"
    if ddpm and options.switch("offset_noise"):
        options.take("offset_noise")
        options.put("noise_offset", ("objective", "noise_offset"), as_number)
        options.put("noise_offset_probability", ("objective", "noise_offset_probability"), as_number)
        options.default(("objective", "noise_offset"), 0.1, "noise_offset")
        options.default(("objective", "noise_offset_probability"), 0.25, "noise_offset_probability")
        if as_number(options.get("train_batch_size")) != 1:  # 4 where the file does not set it
            options.note(f"{options.key('noise_offset_probability')}: decided for each sample; SimpleTuner decides "
                         "once for a batch")  # fmt: skip
    prediction = options.get("prediction_type")
    if not ddpm or prediction is None:
        return
    if isinstance(prediction, str) and prediction in _PREDICTIONS:
        options.put("prediction_type", ("objective", "prediction"), choice(_PREDICTIONS))
    else:
        options.reject("prediction_type", f"one of {', '.join(_PREDICTIONS)}")


def is_flow(options: PeerBlock, family: str) -> bool:
    return names_of(family).objective == "flow" or options.draft.get(("objective", "prediction")) == "flow"


def _timesteps(options: PeerBlock, family: str) -> None:
    if not family or names_of(family).objective == "cosine":
        return
    if not is_flow(options, family):
        options.default(("objective", "timesteps"), "uniform")
        _segments(options, family)
        return
    for name, kind in (("flow_use_beta_schedule", "beta"), ("flow_use_uniform_schedule", "uniform")):
        if options.switch(name):  # uniform comes last, because SimpleTuner prefers it when both are on
            options.assign(("objective", "timesteps"), kind, name)
    options.put("flow_sigmoid_scale", ("objective", "sigmoid_scale"), as_number)
    options.put("flow_beta_schedule_alpha", ("objective", "beta_alpha"), as_number)
    options.put("flow_beta_schedule_beta", ("objective", "beta_beta"), as_number)
    _shift(options, family)


def _segments(options: PeerBlock, family: str) -> None:
    """Read stratified timesteps. SimpleTuner's default gives each sample of a batch its own part of the timesteps."""
    if names_of(family).objective != "ddpm":
        return
    if options.switch("disable_segmented_timestep_sampling"):
        options.take("disable_segmented_timestep_sampling")
    else:
        options.default(("objective", "stratified"), True, "disable_segmented_timestep_sampling")


def _guidance(options: PeerBlock, family: str) -> None:
    name = names_of(family).simpletuner.guidance_option
    if name and (options.get("flux_guidance_mode") or "constant") == "constant":
        options.put(name, ("objective", "guidance"), as_number)


def _shift(options: PeerBlock, family: str) -> None:
    path = ("objective", "flow_shift")
    forced = expert_shift(options, family)
    if forced is not None:
        options.assign(path, forced, "model_flavour")
    elif options.switch("flow_schedule_auto_shift"):
        options.assign(path, "resolution", "flow_schedule_auto_shift")
        for name, value in names_of(family).simpletuner.auto_shift.line.items():
            options.assign(("objective", "resolution_shift", name), value, "flow_schedule_auto_shift")
    elif "flow_schedule_shift" in options:
        # 0 means no shift, which is a shift of 1
        options.put("flow_schedule_shift", path, lambda value: positive_or_none(value) or 1.0)
    elif options.draft.get(("model", "flavour")) not in names_of(family).simpletuner.flavours_without_shift:
        options.default(path, 3.0, "flow_schedule_shift")


def _average(options: PeerBlock, family: str) -> None:
    if not options.is_on("use_ema"):
        return
    options.default(("training", "ema", "ramp"), True, "use_ema")
    options.note(f"{options.key('use_ema')}: the average is kept in fp32 here; SimpleTuner keeps it in the weights' "
                 "precision, and loses small changes in bf16")  # fmt: skip


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
    """Read the upload options. By default SimpleTuner uploads to a private repository."""
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
    """Convert the URL of a repository, which people paste, to its name."""
    plain = re.sub(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/", "", name.strip())
    return re.split(r"[?#]", plain)[0].strip("/")


def _token_routing(options: PeerBlock, family: str) -> None:
    """Read TREAD's routes. Despite its name, `selection_ratio` is the share of tokens that skip blocks."""
    value = from_json(options.take("tread_config"))
    if is_off(value, {}):
        return
    if family and not names_of(family).routed_blocks:
        able = ", ".join(name for name in FAMILIES if names_of(name).routed_blocks)
        options.reject("tread_config", f"token routing is for {able}: tokens of {family} cannot skip blocks")
        return
    if not isinstance(value, Mapping):
        options.problem("tread_config", 'a mapping with "routes"', f"write {_TREAD}")
        return
    block = options.without_nulls(value, options.key("tread_config"))
    check(block, TREAD)
    routes = block.take("routes")
    if not isinstance(routes, list) or not all(isinstance(route, Mapping) for route in routes):
        block.problem("routes", "a list of routes", f"write {_TREAD}")
        return
    for number, route in enumerate(routes):
        one = block.without_nulls(route, f"{block.key('routes')}[{number}]")
        path = ("training", "token_routing", "routes", number)
        for name in set(ROUTE) - set(one.values):
            options.draft.missing((*path, *(ROUTE.keys[name].path or ())), one.key(name), "a number", f"write {_TREAD}")
        check(one, ROUTE)
        apply(one, ROUTE, None, path)


_TREAD = '{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}'
ROUTE: KeyTable[None] = KeyTable(
    Key("selection_ratio", ("skip_ratio",), as_number),
    Key("start_layer_idx", ("first_block",), as_number),
    Key("end_layer_idx", ("last_block",), as_number),
    expected="a key of a route",
)
TREAD: KeyTable[None] = KeyTable(*read_elsewhere("routes"), expected="a key of tread_config")

TRAINING: KeyTable[str] = KeyTable(
    Key("train_batch_size", ("training", "batch_size"), as_number, default=4),
    Key("gradient_accumulation_steps", ("training", "gradient_accumulation_steps"), as_number),
    Key("gradient_checkpointing", ("training", "gradient_checkpointing"), _checkpointing),
    Key("dynamo_backend", ("training", "compile"), _compile),
    KeyRule(_clipping, "max_grad_norm grad_clip_method"),
    Key("use_ema", ("training", "ema", "enabled"), as_flag),
    Key("ema_decay", ("training", "ema", "decay"), as_number, default=0.995),
    Key("ema_update_interval", ("training", "ema", "update_every"), as_number),
    Key("ema_warmup_steps", ("training", "ema", "copy_until"), as_number),
    Key("snr_gamma", ("objective", "snr_gamma"), positive_or_none),
    Key("input_perturbation", ("objective", "input_perturbation"), as_number),
    Key("checkpoint_step_interval", ("checkpoints", "every_steps"), positive_or_none),
    Key("checkpoint_epoch_interval", ("checkpoints", "every_epochs"), positive_or_none),
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
    KeyRule(_schedule, "lr_scheduler lr_warmup_steps lr_num_cycles lr_power lr_end"),
    KeyRule(_average, "use_ema"),
    KeyRule(_loss, "loss_type huber_schedule huber_c use_soft_min_snr"),
    KeyRule(_noise, "offset_noise noise_offset noise_offset_probability prediction_type"),
    KeyRule(
        _timesteps,
        "flow_use_beta_schedule flow_use_uniform_schedule flow_sigmoid_scale flow_beta_schedule_alpha",
        "flow_beta_schedule_beta flow_schedule_shift flow_schedule_auto_shift disable_segmented_timestep_sampling",
    ),
    KeyRule(_guidance, "flux_guidance_value"),
    KeyRule(_trackers, "report_to"),
    KeyRule(_token_routing, "tread_config"),
    KeyRule(_push, "push_to_hub push_checkpoints_to_hub hub_model_id model_card_private"),
)
"""Each `default` is SimpleTuner's, given if it differs from ours and changes what is learned."""

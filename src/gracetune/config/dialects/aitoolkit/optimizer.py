"""Optimizer and learning-rate schedule: upstream's names, its hidden defaults, and Automagic's stage options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracetune.config.dialects.aitoolkit.keys import Block, Reading, block_of, number, real
from gracetune.config.draft import Path
from gracetune.config.spelling import misspelt

_LIMITS = ("lr_bump", "min_lr", "max_lr")
_STAGES = ("high_noise", "low_noise")
_SWAPPING = {"do_paramiter_swapping", "paramiter_swapping_factor"}  # upstream's own spelling


@dataclass(frozen=True)
class Peer:
    """One of upstream's optimizers: ours, and what it does when nothing is said."""

    ours: str
    weight_decay: float
    options: tuple[str, ...]
    """What it takes besides weight_decay, betas and eps."""
    eps: float | None = None
    fixed: tuple[tuple[str, Any], ...] = ()


_ADAMW = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
_BNB = ("amsgrad", "optim_bits", "min_8bit_size", "percentile_clipping", "block_wise", "is_paged")
_PRODIGY = ("beta3", "decouple", "use_bias_correction", "safeguard_warmup", "d0", "d_coef", "growth_rate",
            "fsdp_in_use", "slice_p")  # fmt: skip
_ADAFACTOR = ("clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init",
              "stochastic_accumulation", "stochastic_rounding")  # fmt: skip
_AUTOMAGIC = ("clip_threshold", "beta2")

OPTIMIZERS = {
    "adamw": Peer("adamw", 0.01, _ADAMW, 1e-6),
    "adam": Peer("adamw", 0.0, _ADAMW, 1e-6),
    "adamw8bit": Peer("adamw_8bit", 0.01, _BNB, 1e-6),
    "adam8bit": Peer("adamw_8bit", 0.0, _BNB, 1e-6),
    "adafactor": Peer("adafactor", 0.0, _ADAFACTOR,
                      fixed=(("relative_step", False), ("scale_parameter", False), ("warmup_init", False))),
    "lion": Peer("lion", 0.0, ("use_triton", "decoupled_weight_decay")),
    "prodigy": Peer("prodigy", 0.0, _PRODIGY, 1e-6),
    "prodigyopt": Peer("prodigy", 0.0, _PRODIGY, 1e-6),
    "automagic": Peer("automagic", 0.0, _AUTOMAGIC),
}  # fmt: skip
"""Adam is AdamW as long as nothing decays, which is its default."""

OTHER_OPTIMIZERS = (
    "adam8", "adamw8", "adagrad", "ademamix8bit", "lion8bit", "prodigy8bit", "dadaptation", "dadaptationadam",
    "dadaptationlion", "automagic2", "automagic3", "automagicexperiment", "adamconvrot", "adamw_bf16", "rose",
)  # fmt: skip
UPSTREAM_LR = 1e-6
_FEAR_OF_HEIGHTS = 1e-3
"""Above this start, upstream's Automagic falls back to 1e-6."""


def read_optimizer(reading: Reading, block: Block, params: Block) -> None:
    """`block` holds `optimizer` and `lr`, `params` what the optimizer itself is given."""
    name = block.get("optimizer")
    name = name.lower() if isinstance(name, str) else name if name is not None else "adamw"
    known = OPTIMIZERS.get(name) if isinstance(name, str) else None
    peer = known or OPTIMIZERS["adamw"]
    if known is None:
        _not_ours(reading, block, name)
    elif block.get("optimizer") is not None:
        reading.put(("optimizer", "name"), peer.ours, block.key("optimizer"))
    _lr(reading, block, peer)
    if known is None:
        pass  # its options would mean nothing to the optimizer that --allow-unsupported takes
    elif name in ("adam", "adam8bit") and number(params.get("weight_decay")) not in (None, 0):
        why = "0: Adam's coupled decay is not done here, only AdamW's"
        reading.draft.refuse(
            params.key("weight_decay"), params.get("weight_decay"), why, f"write `optimizer: {peer.ours}`"
        )
    else:
        _params(reading, params, peer)
    reading.default(("optimizer", "weight_decay"), peer.weight_decay)
    if peer.eps is not None:
        reading.default(("optimizer", "eps"), peer.eps)
    for option, value in peer.fixed:
        reading.default(("optimizer", "options", option), value)


def _not_ours(reading: Reading, block: Block, name: Any) -> None:
    key, expected = block.key("optimizer"), f"one of {', '.join(OPTIMIZERS)}"
    hint = misspelt(name, OPTIMIZERS, "choose one of them", write="optimizer: {}")
    if name in OTHER_OPTIMIZERS:
        reading.draft.refuse(key, name, expected, f"{hint}; --allow-unsupported takes adamw")
    else:
        reading.draft.problem(key, name, expected, hint)


def _lr(reading: Reading, block: Block, peer: Peer) -> None:
    written, key = number(block.get("lr")), block.key("lr")
    value, rate = written, real(written)
    if peer.ours == "prodigy" and (written is None or (rate is not None and rate < 0.1)):
        value = 1.0
        shown = "the default" if written is None else written
        reading.draft.note(f"{key}: Prodigy finds its own learning rate; {shown} becomes 1.0, as in ai-toolkit")
    elif peer.ours == "automagic" and rate is not None and rate > _FEAR_OF_HEIGHTS:
        value = UPSTREAM_LR
        reading.draft.note(f"{key}: {written} is too high a start for Automagic; it becomes 1e-06, as in ai-toolkit")
    if written is None:
        reading.default(("optimizer", "lr"), UPSTREAM_LR if value is None else value)
    else:
        reading.put(("optimizer", "lr"), value, key)


def _params(reading: Reading, params: Block, peer: Peer) -> None:
    for name, value in params.values.items():
        if value is None:
            continue
        value = number(value)
        place = _place(name, value, peer)
        if place is not None:
            reading.put(place, value, params.key(name))
        elif name in _SWAPPING and peer.ours in ("automagic", "adafactor"):
            _swapping(reading, params, name)
        else:
            _unknown_param(reading, params, name, peer)


def _place(name: str, value: Any, peer: Peer) -> Path | None:
    if name in ("weight_decay", "betas") or (name == "eps" and not isinstance(value, list)):
        return ("optimizer", name)
    if peer.ours == "automagic":
        stage = next((stage for stage in _STAGES if name.startswith(f"{stage}_")), None)
        limit = name.removeprefix(f"{stage}_") if stage else name
        if limit in _LIMITS:
            return ("optimizer", stage or "limits", limit)
    return ("optimizer", "options", name) if name in (*peer.options, "eps") else None


def _swapping(reading: Reading, params: Block, name: str) -> None:
    if name == "paramiter_swapping_factor":
        reading.harmless.append(params.key(name))
    elif params.get(name) is not False:
        reading.draft.refuse(params.key(name), params.get(name), "false: every parameter is trained in every step")


def _unknown_param(reading: Reading, params: Block, name: str, peer: Peer) -> None:
    limits = [*_LIMITS, *(f"{stage}_{limit}" for stage in _STAGES for limit in _LIMITS)]
    if name in limits:
        expected, hint = "the automagic optimizer", "write `optimizer: automagic`, or remove it"
    else:
        known = ["weight_decay", "betas", "eps", *peer.options, *(limits if peer.ours == "automagic" else [])]
        expected, hint = f"an option of {peer.ours}: {', '.join(known)}", misspelt(name, known, "remove it")
    reading.draft.problem(params.key(name), params.get(name), expected, hint)


_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_warmup")
_SCHEDULE_PARAMS = (
    "factor", "total_iters", "max_iterations", "start_factor", "end_factor", "eta_min", "T_max", "T_0", "T_mult",
    "num_warmup_steps", "warmup_steps", "num_training_steps", "last_epoch", "step_size", "gamma", "num_cycles",
)  # fmt: skip
_SET_BY_UPSTREAM = ("total_iters", "max_iterations", "T_max", "T_0", "T_mult", "num_training_steps", "last_epoch")
"""Upstream stretches every schedule over the whole run, whatever these say."""
_WARMUPS = ("num_warmup_steps", "warmup_steps")
_UPSTREAM_WARMUP = 1000


def read_schedule(reading: Reading, block: Block) -> None:
    name = block.get("lr_scheduler")
    name = name if name is not None else "constant"
    params = block_of(reading, block.get("lr_scheduler_params"), block.key("lr_scheduler_params"))
    for param in params.values:
        if param not in _SCHEDULE_PARAMS:
            hint = misspelt(param, _SCHEDULE_PARAMS, "remove it")
            reading.draft.problem(params.key(param), params.get(param), f"one of {', '.join(_SCHEDULE_PARAMS)}", hint)
    reading.harmless += [params.key(param) for param in _SET_BY_UPSTREAM if params.get(param) is not None]
    if name not in _SCHEDULES:
        _no_such_schedule(reading, block, name)
        return
    ours = {"cosine_with_warmup": "cosine"}.get(name, name)
    if block.get("lr_scheduler") is not None:
        reading.put(("schedule", "name"), ours, block.key("lr_scheduler"))
    if name.endswith("_warmup") or any(params.get(word) is not None for word in _WARMUPS):
        _warmup(reading, params)
    if name.startswith("cosine") and params.get("eta_min") is not None:
        reading.put(("schedule", "end_lr"), number(params.get("eta_min")), params.key("eta_min"))
    if name == "linear":
        _linear(reading, block, params)
    _refuse_shapes(reading, params, name)


def _no_such_schedule(reading: Reading, block: Block, name: Any) -> None:
    hint = misspelt(name, _SCHEDULES, "choose one of them")
    if name in ("step", "polynomial", "piecewise_constant"):
        reading.draft.refuse(block.key("lr_scheduler"), name, f"one of {', '.join(_SCHEDULES)}", hint)
    else:
        reading.draft.problem(block.key("lr_scheduler"), name, f"one of {', '.join(_SCHEDULES)}", hint)


def _warmup(reading: Reading, params: Block) -> None:
    name = next((name for name in _WARMUPS if params.get(name) is not None), None)
    if name is None:
        reading.default(("schedule", "warmup_steps"), _UPSTREAM_WARMUP)
    else:
        reading.put_count(("schedule", "warmup_steps"), params.get(name), params.key(name))


def _linear(reading: Reading, block: Block, params: Block) -> None:
    """Upstream's `linear` climbs from a third of the rate to all of it, unless its factors say otherwise."""
    start, end = (real(number(params.get(name))) for name in ("start_factor", "end_factor"))
    lr = real(reading.draft.get(("optimizer", "lr")))
    if start == 1 and end is not None and lr is not None:
        reading.put(("schedule", "end_lr"), lr * end, params.key("end_factor"))
        return
    why = "start_factor 1 and an end_factor: without them ai-toolkit's `linear` climbs from a third of the rate"
    hint = "write `lr_scheduler_params: {start_factor: 1.0, end_factor: 0.0}` for a decay, or `lr_scheduler: constant`"
    reading.draft.refuse(block.key("lr_scheduler"), "linear", why, hint)


def _refuse_shapes(reading: Reading, params: Block, name: str) -> None:
    quiet = {"factor": 1, "num_cycles": 0.5}
    for param, value in quiet.items():
        if params.get(param) is not None and number(params.get(param)) != value:
            reading.draft.refuse(params.key(param), params.get(param), f"{value}: the schedule keeps its shape")
    for param in ("step_size", "gamma"):
        if params.get(param) is not None:
            reading.draft.refuse(params.key(param), params.get(param), f"nothing: no part of `{name}`")

"""Reads optimizer and learning-rate schedule: upstream's names and defaults, and Automagic's limits for each expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.keys import HARMLESS
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import Key, KeyRule, KeyTable, apply, noted
from gracetune.config.dialects.values import as_number, real
from gracetune.config.draft import Path
from gracetune.config.registry import OPTIMIZER_NAMES
from gracetune.config.spelling import misspelt

_LIMITS = ("lr_bump", "min_lr", "max_lr")
_EXPERTS = ("high_noise", "low_noise")
_SETTINGS = ("weight_decay", "betas", "eps")
_SWAPPING = {"do_paramiter_swapping", "paramiter_swapping_factor"}  # upstream's own spelling


@dataclass(frozen=True)
class UpstreamOptimizer:
    """One of ai-toolkit's optimizers: the name of the corresponding optimizer here, and ai-toolkit's defaults."""

    ours: str
    weight_decay: float
    options: tuple[str, ...]
    """The options it has besides weight_decay, betas and eps."""
    eps: float | None = None
    """None leaves our optimizer's default."""
    option_defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of its other options that differ from ours."""


_ADAMW = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
_BNB = ("amsgrad", "optim_bits", "min_8bit_size", "percentile_clipping", "block_wise", "is_paged")
_PRODIGY = ("beta3", "decouple", "use_bias_correction", "safeguard_warmup", "d0", "d_coef", "growth_rate",
            "fsdp_in_use", "slice_p")  # fmt: skip
_ADAFACTOR = ("clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init",
              "stochastic_accumulation", "stochastic_rounding")  # fmt: skip
_AUTOMAGIC = ("clip_threshold", "beta2")

OPTIMIZERS = {
    "adamw": UpstreamOptimizer("adamw", weight_decay=0.01, options=_ADAMW, eps=1e-6),
    "adam": UpstreamOptimizer("adamw", weight_decay=0.0, options=_ADAMW, eps=1e-6),
    "adamw8bit": UpstreamOptimizer("adamw_8bit", weight_decay=0.01, options=_BNB, eps=1e-6),
    "adam8bit": UpstreamOptimizer("adamw_8bit", weight_decay=0.0, options=_BNB, eps=1e-6),
    "adafactor": UpstreamOptimizer("adafactor", weight_decay=0.0, options=_ADAFACTOR,
                      option_defaults=(("relative_step", False), ("scale_parameter", False), ("warmup_init", False))),
    "lion": UpstreamOptimizer("lion", weight_decay=0.0, options=("use_triton", "decoupled_weight_decay")),
    "prodigy": UpstreamOptimizer("prodigy", weight_decay=0.0, options=_PRODIGY, eps=1e-6),
    "prodigyopt": UpstreamOptimizer("prodigy", weight_decay=0.0, options=_PRODIGY, eps=1e-6),
    "automagic": UpstreamOptimizer("automagic", weight_decay=0.0, options=_AUTOMAGIC),
}  # fmt: skip
"""Adam is read as AdamW with weight_decay 0, which is Adam's default."""

OTHER_OPTIMIZERS = (
    "adam8", "adamw8", "adagrad", "ademamix8bit", "lion8bit", "prodigy8bit", "dadaptation", "dadaptationadam",
    "dadaptationlion", "automagic2", "automagic3", "automagicexperiment", "adamconvrot", "adamw_bf16", "rose",
)  # fmt: skip
UPSTREAM_LR = 1e-6
_EXACT_RATES = (
    "gracetune stores Automagic's learning rates exactly. ai-toolkit rounds them to 8 bits and loses their growth "
    "after about 250 steps. Rates are about 4 times as high here at step 500, and 6 times at step 2,000. To compute "
    "them as ai-toolkit does: --set optimizer.options.rates=upstream"
)
_HIGHEST_AUTOMAGIC_LR = 1e-3
"""For a higher initial learning rate, upstream's Automagic falls back to 1e-6."""


def read_optimizer(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read `optimizer`, `lr` and the optimizer's own options."""
    params, name = job.params, block.get("optimizer")
    name = name.lower() if isinstance(name, str) else name if name is not None else "adamw"
    known = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if known is None and name in OPTIMIZER_NAMES:
        _read_ours(block, params, name)
        return
    peer = known or OPTIMIZERS["adamw"]
    if known is None:
        _reject_optimizer(block, name)
    elif block.get("optimizer") is not None:
        block.assign(("optimizer", "name"), peer.ours, "optimizer")
    _read_lr(block, peer)
    if known is not None and peer.ours == "automagic":
        block.note(f"{block.key('optimizer')}: {_EXACT_RATES}")
    if known is None:
        pass  # its options would mean nothing to the optimizer that --allow-unsupported uses instead
    elif name in ("adam", "adam8bit") and as_number(params.get("weight_decay")) not in (None, 0):
        why = "0: Adam's coupled decay is not supported, only AdamW's"
        params.reject("weight_decay", why, f"write `optimizer: {peer.ours}`")
    else:
        _read_params(params, peer)
    block.default(("optimizer", "weight_decay"), peer.weight_decay)
    if peer.eps is not None:
        block.default(("optimizer", "eps"), peer.eps)
    for option, value in peer.option_defaults:
        block.default(("optimizer", "options", option), value)


def _read_ours(block: PeerBlock, params: PeerBlock, name: str) -> None:
    """Read one of gracetune's optimizers, or of an installed package, that ai-toolkit does not have."""
    block.assign(("optimizer", "name"), name, "optimizer")
    block.note(f"{block.key('optimizer')}: {name} is not an optimizer of ai-toolkit; its defaults are its own")
    block.put("lr", ("optimizer", "lr"), as_number)
    block.default(("optimizer", "lr"), UPSTREAM_LR)
    for param, written in params.values.items():
        if written is not None:
            path = ("optimizer", param) if param in _SETTINGS else ("optimizer", "options", param)
            params.assign(path, as_number(written), param)


def _reject_optimizer(block: PeerBlock, name: Any) -> None:
    expected = f"one of {', '.join(OPTIMIZERS)}"
    hint = misspelt(name, [*OPTIMIZERS, *OPTIMIZER_NAMES], "choose one of them", write="optimizer: {}")
    if name in OTHER_OPTIMIZERS:
        block.reject("optimizer", expected, f"{hint}; --allow-unsupported takes adamw", found=name)
    else:
        block.problem("optimizer", expected, hint, found=name)


def _read_lr(block: PeerBlock, peer: UpstreamOptimizer) -> None:
    written, key = as_number(block.get("lr")), block.key("lr")
    value, rate = written, real(written)
    if peer.ours == "prodigy" and (written is None or (rate is not None and rate < 0.1)):
        value = 1.0
        shown = "the default" if written is None else written
        block.note(f"{key}: Prodigy finds its own learning rate; {shown} becomes 1.0, as in ai-toolkit")
    elif peer.ours == "automagic" and rate is not None and rate > _HIGHEST_AUTOMAGIC_LR:
        value = UPSTREAM_LR
        block.note(f"{key}: {written} is too high a start for Automagic; it becomes 1e-06, as in ai-toolkit")
    if written is None:
        block.default(("optimizer", "lr"), UPSTREAM_LR if value is None else value)
    else:
        block.assign(("optimizer", "lr"), value, "lr")


def _read_params(params: PeerBlock, peer: UpstreamOptimizer) -> None:
    for name, written in params.values.items():
        if written is None:
            continue
        value = as_number(written)
        target = _config_path(name, value, peer)
        if target is not None:
            params.assign(target, value, name)
        elif name in _SWAPPING and peer.ours in ("automagic", "adafactor"):
            _read_swapping(params, name)
        else:
            _unknown_param(params, name, peer)


def _config_path(name: str, value: Any, peer: UpstreamOptimizer) -> Path | None:
    if name in ("weight_decay", "betas") or (name == "eps" and not isinstance(value, list)):
        return ("optimizer", name)
    if peer.ours == "automagic":
        expert = next((expert for expert in _EXPERTS if name.startswith(f"{expert}_")), None)
        limit = name.removeprefix(f"{expert}_") if expert else name
        if limit in _LIMITS:
            return ("optimizer", expert or "limits", limit)
    return ("optimizer", "options", name) if name in (*peer.options, "eps") else None


def _read_swapping(params: PeerBlock, name: str) -> None:
    if name == "paramiter_swapping_factor":
        params.list_unused(HARMLESS, name)
    elif params.get(name) is not False:
        params.reject(name, "false: every parameter is trained in every step")


def _unknown_param(params: PeerBlock, name: str, peer: UpstreamOptimizer) -> None:
    limits = [*_LIMITS, *(f"{expert}_{limit}" for expert in _EXPERTS for limit in _LIMITS)]
    if name in limits:
        expected, hint = "the automagic optimizer", "write `optimizer: automagic`, or remove it"
    else:
        known = ["weight_decay", "betas", "eps", *peer.options, *(limits if peer.ours == "automagic" else [])]
        expected, hint = f"an option of {peer.ours}: {', '.join(known)}", misspelt(name, known, "remove it")
    params.problem(name, expected, hint)


_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_warmup")
_WARMUPS = ("num_warmup_steps", "warmup_steps")
_UPSTREAM_WARMUP = 1000


def read_schedule(block: PeerBlock, job: AiToolkitJob) -> None:
    params = block.inner("lr_scheduler_params")
    for param in params.values:
        if param not in SCHEDULE_PARAMS:
            params.problem(param, SCHEDULE_PARAMS.expected, misspelt(param, SCHEDULE_PARAMS, SCHEDULE_PARAMS.otherwise))
    params.list_unused(HARMLESS, *(key for key in _SET_BY_UPSTREAM.split() if params.get(key) is not None))
    name = _schedule_of(block)
    if name not in _SCHEDULES:
        _no_such_schedule(block, name)
        return
    block.put("lr_scheduler", ("schedule", "name"), lambda given: {"cosine_with_warmup": "cosine"}.get(given, given))
    apply(params, SCHEDULE_PARAMS, job)


def _schedule_of(block: PeerBlock) -> Any:
    name = block.get("lr_scheduler")
    return name if name is not None else "constant"


def _no_such_schedule(block: PeerBlock, name: Any) -> None:
    hint = misspelt(name, _SCHEDULES, "choose one of them")
    if name in ("step", "polynomial", "piecewise_constant"):
        block.reject("lr_scheduler", f"one of {', '.join(_SCHEDULES)}", hint)
    else:
        block.problem("lr_scheduler", f"one of {', '.join(_SCHEDULES)}", hint)


def _warmup(params: PeerBlock, job: AiToolkitJob) -> None:
    name = next((name for name in _WARMUPS if params.get(name) is not None), None)
    if name is not None:
        job.put_count(params, ("schedule", "warmup_steps"), name)
    elif _schedule_of(job.train).endswith("_warmup"):
        params.default(("schedule", "warmup_steps"), _UPSTREAM_WARMUP)


def _end(params: PeerBlock, job: AiToolkitJob) -> None:
    if _schedule_of(job.train).startswith("cosine"):
        params.put("eta_min", ("schedule", "end_lr"), as_number)


def _linear(params: PeerBlock, job: AiToolkitJob) -> None:
    """Read `linear`. Upstream's rises from a third of the rate to all of it, unless its factors are set."""
    if _schedule_of(job.train) != "linear":
        return
    start, end = (real(as_number(params.get(name))) for name in ("start_factor", "end_factor"))
    lr = real(params.draft.get(("optimizer", "lr")))
    if start == 1 and end is not None and lr is not None:
        params.assign(("schedule", "end_lr"), lr * end, "end_factor")
        return
    why = "start_factor 1 and an end_factor: without them ai-toolkit's `linear` climbs from a third of the rate"
    hint = "write `lr_scheduler_params: {start_factor: 1.0, end_factor: 0.0}` for a decay, or `lr_scheduler: constant`"
    job.train.reject("lr_scheduler", why, hint)


def _reject_shapes(params: PeerBlock, job: AiToolkitJob) -> None:
    defaults = {"factor": 1, "num_cycles": 0.5}
    for param, value in defaults.items():
        if params.get(param) is not None and as_number(params.get(param)) != value:
            params.reject(param, f"{value}: other shapes of the schedule are not supported")
    for param in ("step_size", "gamma"):
        if params.get(param) is not None:
            params.reject(param, f"nothing: no part of `{_schedule_of(job.train)}`")


_SET_BY_UPSTREAM = "total_iters max_iterations T_max T_0 T_mult num_training_steps last_epoch"
"""Upstream overrides these: every schedule spans the whole run."""
SCHEDULE_PARAMS: KeyTable[AiToolkitJob] = KeyTable(
    Key("factor"),
    *noted(HARMLESS, "total_iters max_iterations"),
    *(Key(name) for name in ("start_factor", "end_factor", "eta_min")),
    *noted(HARMLESS, "T_max T_0 T_mult"),
    KeyRule(_warmup, *_WARMUPS),
    *noted(HARMLESS, "num_training_steps last_epoch"),
    KeyRule(_end, "eta_min"),
    KeyRule(_linear, "start_factor end_factor"),
    KeyRule(_reject_shapes, "factor step_size gamma num_cycles"),
    otherwise="remove it",
)

"""Reads the objective from the `train` block: noise levels, their weights, the loss, and the guidance input."""

from __future__ import annotations

import math
from statistics import NormalDist

from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.keys import HARMLESS
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import KeyRule
from gracetune.config.dialects.values import as_number, whole
from gracetune.config.draft import Path
from gracetune.config.family_names import ShiftPoints
from gracetune.config.spelling import misspelt

TIMESTEPS = {
    "sigmoid": "sigmoid", "linear": "uniform", "weighted": "uniform", "one_step": "one_step",
    "shift": "shift", "flux_shift": "shift", "lumina2_shift": "shift",
}  # fmt: skip
OTHER_TIMESTEPS = ("lognorm_blend", "next_sample", "shifted_logit_normal", "two_step", "four_step", "eight_step")
LOSSES = {"mse": "mse", "mae": "mae", "pseudo_huber": "pseudo_huber"}
OTHER_LOSSES = ("wavelet", "pixelspace", "mean_flow", "stepped")
_PSEUDO_HUBER_DELTA = 0.01
_LINEAR = ("linear_timesteps", "linear_timesteps2")
_LAST_STEP = 999
_NOISE_RANGE = {"min_denoising_steps": "max_timestep", "max_denoising_steps": "min_timestep"}


def is_flow(block: PeerBlock, job: AiToolkitJob) -> bool:
    return job.target.is_transformer or bool(block.get("noise_scheduler") == "flowmatch")


def _scheduler(block: PeerBlock, job: AiToolkitJob) -> None:
    name, family = block.get("noise_scheduler"), job.target.names.family
    if job.target.is_transformer:
        if name is None:
            key = block.key("noise_scheduler")
            block.note(f"{key} is not set: {family} is trained with flow matching all the same")
        elif name != "flowmatch":
            block.problem("noise_scheduler", f"flowmatch: {family} knows no other", "write `flowmatch`")
    elif name == "flowmatch":
        block.assign(("objective", "prediction"), "flow", "noise_scheduler")
    elif name not in (None, "ddpm", "ddim"):
        block.reject("noise_scheduler", "ddpm or flowmatch for training")


def _bias(block: PeerBlock, job: AiToolkitJob) -> None:
    biases = {name: name for name in ("balanced", "content", "style")}
    _choose(block, "content_or_style", ("objective", "timestep_bias"), biases, ())
    if block.get("content_or_style") in ("content", "style"):
        block.assign(("objective", "timestep_bias_over"), "noise_range", "content_or_style")


def timestep_type(block: PeerBlock) -> str:
    """Return ai-toolkit's name of the timestep distribution of a flow model."""
    name = block.get("timestep_type") or "sigmoid"
    name = name if isinstance(name, str) else "sigmoid"
    linear = any(block.get(key) is True for key in _LINEAR) and name != "one_step"
    return "linear" if linear and name != "weighted" else name


def _timesteps(block: PeerBlock, job: AiToolkitJob) -> None:
    linear = [name for name in _LINEAR if block.flag(name, False)]
    if not is_flow(block, job):
        block.default(("objective", "timesteps"), "uniform")
        given = [name for name in ("timestep_type", *linear) if block.get(name) is not None]
        block.list_unused(HARMLESS, *given)  # upstream reads them only for flow matching
        return
    _choose(block, "timestep_type", ("objective", "timesteps"), TIMESTEPS, OTHER_TIMESTEPS)
    kind = timestep_type(block)
    if linear and kind in ("linear", "weighted"):
        block.assign(("objective", "timesteps"), "uniform", linear[0])
    if TIMESTEPS.get(kind) == "shift":
        _shift(block, job)
    else:
        # Upstream shifts only with `shift`; unset would mean the family's own shift here.
        block.default(("objective", "flow_shift"), 1.0)
    weights = ("objective", "timestep_weights")
    if kind == "weighted":
        block.assign(weights, "measured", "timestep_type")
    elif linear:
        block.assign(weights, "half_bell" if _LINEAR[1] in linear else "bell", linear[-1])


def _shift(block: PeerBlock, job: AiToolkitJob) -> None:
    """Put the shift of the arch's own scheduler, which upstream uses instead of the weights' scheduler."""
    arch, root = job.target.arch, ("objective",)
    if isinstance(arch.shift, ShiftPoints):
        block.assign((*root, "flow_shift"), "resolution", "timestep_type")
        for name, value in arch.shift.line.items():
            block.assign((*root, "resolution_shift", name), value, "timestep_type")
    elif arch.shift is not None:
        block.assign((*root, "flow_shift"), arch.shift, "timestep_type")
    if arch.shift_terminal:
        block.assign((*root, "shift_terminal"), arch.shift_terminal, "timestep_type")


def _noise_range(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read the noise range. Upstream counts denoising steps from pure noise down; our timesteps count up to it."""
    low, high = (as_number(block.get(name)) for name in _NOISE_RANGE)
    given = [name for name in _NOISE_RANGE if block.get(name) is not None]
    if (low in (None, 0)) and (high is None or (whole(high) is not None and high >= _LAST_STEP)):
        return
    kind = timestep_type(block) if is_flow(block, job) else "linear"
    shift = job.target.arch.shift if TIMESTEPS.get(kind) == "shift" else 1.0
    if job.target.dual_expert:
        keys = " and ".join(block.key(name) for name in given)
        block.note(f"{keys}: not used, as in ai-toolkit: each expert's own noise range decides")
    elif TIMESTEPS.get(kind, "one_step") == "one_step" or not isinstance(shift, float):
        for name in given:
            block.reject(name, f"the whole range with timestep_type {kind}")
    else:
        for name in given:
            step = whole(as_number(block.get(name)))
            value = block.get(name) if step is None else timestep_of(step, kind == "sigmoid", shift)
            block.assign(("objective", _NOISE_RANGE[name]), value, name)


def timestep_of(step: int, sigmoid: bool, shift: float = 1.0) -> int:
    """Return the noise level (0 to 1000) at a position in upstream's list of 1000, which runs from noise to image.

    Upstream's sigmoid timesteps are 1000 sorted random values, so a position is a quantile of the logistic-normal
    distribution: sigmoid(inv_cdf(level)). The shift is that of flow matching: s * t / (1 + (s - 1) * t).
    """
    if step <= 0:
        return 1000
    if step >= _LAST_STEP:
        return 0
    level = 1 - step / 1000
    if sigmoid:
        level = 1 / (1 + math.exp(-NormalDist().inv_cdf(level)))
    return round(1000 * shift * level / (1 + (shift - 1) * level))


def _choose(block: PeerBlock, name: str, path: Path, ours: dict[str, str], others: tuple[str, ...]) -> None:
    value = block.get(name)
    if value is None:
        return
    expected = f"one of {', '.join(ours)}"
    if isinstance(value, str) and value in ours:
        block.assign(path, ours[value], name)
    elif value in others:
        block.reject(name, expected)
    else:
        block.problem(name, expected, misspelt(value, ours, "choose one of them", write=f"{name}: {{}}"))


def _loss(block: PeerBlock, job: AiToolkitJob) -> None:
    _choose(block, "loss_type", ("objective", "loss"), LOSSES, OTHER_LOSSES)
    if block.get("loss_type") == "pseudo_huber":
        block.assign(("objective", "huber_delta"), _PSEUDO_HUBER_DELTA, "loss_type")


def _snr(block: PeerBlock, job: AiToolkitJob) -> None:
    for name in ("snr_gamma", "min_snr_gamma"):
        value = as_number(block.get(name))
        if value in (None, 0):
            continue
        if is_flow(block, job):
            block.note(f"{block.key(name)}: no effect with flow matching: every timestep weighs 1")
        elif name == "min_snr_gamma":
            block.assign(("objective", "snr_gamma"), value, name)
            if block.draft.get(("objective", "prediction")) == "v_prediction":
                block.note(
                    f"{block.key(name)}: the weight of v-prediction is used; ai-toolkit uses epsilon-prediction's, "
                    "and computes the target from the image instead of its latents"
                )
        else:
            why = "nothing: the unclipped gamma/SNR weight is not done here"
            block.reject(name, why, "write `min_snr_gamma` for the usual Min-SNR weight", found=value)


def _guidance(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read `cfg_scale`. Without `do_cfg`, which is rejected, it is only the value of a guidance input."""
    names, flavour = job.target.names.aitoolkit, job.target.flavour
    if block.get("cfg_scale") is None:
        return
    if not names.guidance_embedding or (flavour is not None and flavour.name in names.unguided):
        block.list_unused(HARMLESS, "cfg_scale")
    else:
        block.put("cfg_scale", ("objective", "guidance"), as_number)


def _guidance_embedding(block: PeerBlock, job: AiToolkitJob) -> None:
    """Reject `bypass_guidance_embedding`, but only for models with the embedding: upstream's web interface always
    writes it."""
    if not block.flag("bypass_guidance_embedding", False):
        return
    why = job.target.names.aitoolkit.guidance_embedding
    if why:
        block.reject("bypass_guidance_embedding", why)
    else:
        block.list_unused(HARMLESS, "bypass_guidance_embedding")


OBJECTIVE: tuple[KeyRule[AiToolkitJob], ...] = (
    KeyRule(_scheduler, "noise_scheduler"),
    KeyRule(_bias, "content_or_style"),
    KeyRule(_timesteps, "timestep_type", *_LINEAR),
    KeyRule(_noise_range, *_NOISE_RANGE),
    KeyRule(_loss, "loss_type"),
    KeyRule(_snr, "snr_gamma min_snr_gamma"),
    KeyRule(_guidance, "cfg_scale"),
    KeyRule(_guidance_embedding, "bypass_guidance_embedding"),
)

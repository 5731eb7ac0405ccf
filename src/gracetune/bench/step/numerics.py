"""Compare a run's adapter gradients with exact ones, on a small model of the same classes.

The same gradients are computed three ways: in fp32 with the libraries' layers (`exact`), as in a run (`run`; on a GPU
in compiled blocks, since only those use our kernels), and in bf16 with the libraries' layers (`reference`). All three
start from the same bf16 base weights. An fp8 job quantizes them in `run` alone, so the error of `run` includes the
quantization.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from gracetune.adapters.attach import attach
from gracetune.adapters.state import ExpertStage
from gracetune.bench.step.job import StepJob, config_of
from gracetune.bench.step.random_data import random_batch
from gracetune.bench.step.random_model import RandomModel
from gracetune.diffusion.schedule import noisy, target
from gracetune.models.attention import attention_facts, choose_attention
from gracetune.models.spec import EightBitLayers, PartPlacement
from gracetune.train.blocks import prepare_blocks

SIDE = 256
SPREAD = 0.02
"""Standard deviation of the noise added to a new adapter. One factor of each pair starts at zero, so without the noise
the other factor has no gradient."""


@dataclass(frozen=True)
class Numerics:
    """Errors of all adapter gradients, taken as one vector."""

    relative_error: float
    cosine: float
    library_relative_error: float
    """Error of the libraries' layers in bf16, the error of the precision itself."""
    compiled: bool
    """Whether our gradients come from compiled blocks."""

    def as_json(self) -> dict[str, float | bool]:
        return asdict(self)


def gradient_check(job: StepJob, model: RandomModel, device: torch.device) -> Numerics:
    """Compare gradients on a small or tiny `model`, with the adapter and precision of `job`."""
    small = replace(job, width=SIDE, height=SIDE, frames=1, batch=1)  # a smoke job keeps its own, smaller shape
    exact = _gradients(small, model, device, "exact")
    ours = _gradients(small, model, device, "run")
    reference = _gradients(small, model, device, "reference")
    return Numerics(
        relative_error=_distance(ours, exact),
        cosine=float(torch.nn.functional.cosine_similarity(ours, exact, dim=0)),
        library_relative_error=_distance(reference, exact),
        compiled=_compiles(device),
    )


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda"


def _distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


def _gradients(
    job: StepJob, model: RandomModel, device: torch.device, mode: Literal["exact", "run", "reference"]
) -> Tensor:
    """All adapter gradients as one float64 vector on the CPU."""
    config = config_of(job, model.source.folder, model.source.folder)
    fp8 = EightBitLayers(model.spec.default_targets) if job.precision == "fp8" and mode == "run" else None
    # Use the run's attention kernel, which has its own backward pass.
    facts = attention_facts(device, torch.bfloat16, model.spec.attention)
    attention = choose_attention("auto", facts).backend if mode == "run" else None
    placement = PartPlacement(device, torch.bfloat16, attention, fp8)
    denoiser: Any = model.spec.load_denoiser(model.source, model.expert, placement)
    if mode == "exact":
        denoiser.float()
    computed = torch.float32 if mode == "exact" else torch.bfloat16
    attached = attach(
        denoiser,
        config.adapter,
        family=model.spec.family,
        expert=cast(ExpertStage, model.expert.name),
        default_targets=model.spec.default_targets,
        conv_targets=model.spec.conv_targets,
        untrained=(*model.spec.untrained, *model.facts.untrained),
        seed=config.training.seed,
        adapter_path="auto" if mode == "run" else "reference",
    )
    parameters = attached.parameters()
    _add_noise(parameters)
    if mode == "run" and _compiles(device):
        prepare_blocks(denoiser.train(), model.spec.repeated_blocks, checkpointing=False, compiled=True, shapes="one")
    batch = random_batch(job, model, device)
    clean = batch["latents"].float()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1)).to(device)
    # 0.5 and 500 are exact in bf16, to which some models round their timestep.
    level = torch.full((job.batch,), 0.5, device=device)
    seen = noisy(model.facts.schedule, clean, noise, level).to(torch.bfloat16).to(computed)
    with torch.autocast(device.type, torch.bfloat16, enabled=mode != "exact"):
        prediction = model.spec.predict(denoiser, seen, level, batch, model.facts)
    wanted = target(model.facts.schedule, clean, noise, level)
    torch.nn.functional.mse_loss(prediction.float(), wanted).backward()
    missing = [name for name, parameter in parameters.items() if parameter.grad is None]
    assert not missing, f"no gradient for {missing[:4]}"
    return torch.cat([cast(Tensor, parameters[name].grad).flatten().cpu().double() for name in sorted(parameters)])


@torch.no_grad()
def _add_noise(parameters: dict[str, nn.Parameter]) -> None:
    """Add the same noise in every mode: generated on the CPU, in the order of names."""
    generator = torch.Generator().manual_seed(7)
    for name in sorted(parameters):
        values = SPREAD * torch.randn(parameters[name].shape, generator=generator)
        parameters[name].add_(values.to(parameters[name]))

"""How far a run's adapter gradients are from exact ones, on a small model of the same classes.

Three times the same question: in fp32 with the libraries' layers (the reference), as a run computes it (on a GPU in
compiled blocks, which alone have our kernels), and in the run's precision with the libraries' layers. The base weights
are the same numbers in all three, those of bf16.
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
"""Of what is added to an adapter's first values: one that changes nothing has gradients for half of its factors."""


@dataclass(frozen=True)
class Numerics:
    """Over all adapter gradients taken as one vector."""

    relative_error: float
    cosine: float
    library_relative_error: float
    """Of the libraries' layers at bf16: what this precision costs anyway."""
    compiled: bool
    """Whether ours were those of compiled blocks."""

    def as_json(self) -> dict[str, float | bool]:
        return asdict(self)


def gradient_check(job: StepJob, model: RandomModel, device: torch.device) -> Numerics:
    """`model` is a small or a tiny one; of the job, its adapter and precision count."""
    small = replace(job, width=SIDE, height=SIDE, frames=1, batch=1)
    exact = _gradients(small, model, device, "reference")
    ours = _gradients(small, model, device, "run")
    library = _gradients(small, model, device, "library")
    return Numerics(
        relative_error=_distance(ours, exact),
        cosine=float(torch.nn.functional.cosine_similarity(ours, exact, dim=0)),
        library_relative_error=_distance(library, exact),
        compiled=_compiles(device),
    )


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda"


def _distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


def _gradients(
    job: StepJob, model: RandomModel, device: torch.device, mode: Literal["reference", "run", "library"]
) -> Tensor:
    """One vector in float64, on the CPU."""
    config = config_of(job, model.source.folder, model.source.folder)
    fp8 = EightBitLayers(model.spec.default_targets) if job.precision == "fp8" and mode == "run" else None
    # A run's own kernel: it has a backward pass of its own.
    facts = attention_facts(device, torch.bfloat16, model.spec.attention)
    attention = choose_attention("auto", facts).backend if mode == "run" else None
    placement = PartPlacement(device, torch.bfloat16, attention, fp8)
    denoiser: Any = model.spec.load_denoiser(model.source, model.expert, placement)
    if mode == "reference":
        denoiser.float()
    computed = torch.float32 if mode == "reference" else torch.bfloat16
    attached = attach(
        denoiser,
        config.adapter,
        family=model.spec.family,
        expert=cast(ExpertStage, model.expert.name),
        default_targets=model.spec.default_targets,
        conv_targets=model.spec.conv_targets,
        untrained=(*model.spec.untrained, *model.facts.untrained),
        seed=config.training.seed,
        adapter_path="auto" if mode == "run" else "library",
    )
    parameters = attached.parameters()
    _unsettle(parameters)
    if mode == "run" and _compiles(device):
        prepare_blocks(denoiser.train(), model.spec.repeated_blocks, checkpointing=False, compiled=True, shapes="one")
    batch = random_batch(job, model, device)
    clean = batch["latents"].float()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1)).to(device)
    # It and a thousand times it are exact in bf16: some models round their time to that.
    level = torch.full((job.batch,), 0.5, device=device)
    seen = noisy(model.facts.schedule, clean, noise, level).to(torch.bfloat16).to(computed)
    with torch.autocast(device.type, torch.bfloat16, enabled=mode != "reference"):
        answer = model.spec.predict(denoiser, seen, level, batch, model.facts)
    wanted = target(model.facts.schedule, clean, noise, level)
    torch.nn.functional.mse_loss(answer.float(), wanted).backward()
    missing = [name for name, parameter in parameters.items() if parameter.grad is None]
    assert not missing, f"no gradient for {missing[:4]}"
    return torch.cat([cast(Tensor, parameters[name].grad).flatten().cpu().double() for name in sorted(parameters)])


@torch.no_grad()
def _unsettle(parameters: dict[str, nn.Parameter]) -> None:
    """The same for every path: drawn on the CPU, in the order of names."""
    generator = torch.Generator().manual_seed(7)
    for name in sorted(parameters):
        values = SPREAD * torch.randn(parameters[name].shape, generator=generator)
        parameters[name].add_(values.to(parameters[name]))

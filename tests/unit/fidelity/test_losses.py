"""A peer's config has the peer's loss at every noise level: kind of loss, its delta, and weights by level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.config.run_config import RunConfig
from gracetune.diffusion.weighting import huber_delta, sample_losses
from unit.fidelity.peers import TinyModel, aitoolkit_config, case_name, goal_of, recorded, simpletuner_config

UNCLIPPED = "snr_gamma=5.0"
AITOOLKIT = [case for case in recorded("aitoolkit", "losses") if not case_name(case).endswith(f"ddpm-{UNCLIPPED}")]
"""All but the unclipped gamma / SNR weight, which is rejected."""


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """As `scripts/peer_vectors` generates it."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 4, 8, 8, generator=generator)


def our_losses(config: RunConfig, timesteps: list[int], tiny_model: TinyModel) -> list[float]:
    """What a training step computes of an answer and a target at these timesteps."""
    goal, facts = goal_of(config, tiny_model)
    answer, wanted = pair()
    found = []
    for step in timesteps:
        level = torch.tensor([(step + (config.model.family == "sdxl")) / 1000])
        delta = huber_delta(goal.objective, facts.schedule, level)
        losses = sample_losses(answer, wanted, goal.objective, None, delta)
        found.append(float(losses * goal.weighting.weights(facts.schedule, level)))
    return found


@pytest.mark.parametrize("case", AITOOLKIT, ids=case_name)
def test_losses_of_an_ai_toolkit_job(case: dict[str, Any], tmp_path: Path, tiny_model: TinyModel) -> None:
    config = aitoolkit_config(tmp_path, case["train"], case["arch"])
    ours = our_losses(config, case["timesteps"], tiny_model)
    assert ours == pytest.approx(case["losses"], rel=2e-5, abs=2e-6 if config.objective.timestep_weights else 0)


@pytest.mark.parametrize("case", recorded("simpletuner", "losses"), ids=case_name)
def test_losses_of_a_simpletuner_config(case: dict[str, Any], tmp_path: Path, tiny_model: TinyModel) -> None:
    config = simpletuner_config(tmp_path, case["options"], case["family"])
    assert our_losses(config, case["timesteps"], tiny_model) == pytest.approx(case["losses"], rel=2e-5)

"""The expert of a noise level by the rule of diffusers' pipelines, to compare ours with."""

from __future__ import annotations

from gracetune.models.spec import Expert, ModelFacts


def expert_at(level: float, facts: ModelFacts) -> Expert:
    """WanPipeline compares timesteps: t >= boundary_ratio * num_train_timesteps is the high expert's."""
    for expert in facts.experts:  # from the highest noise down
        if level * 1000 >= expert.lowest * 1000:
            return expert
    return facts.experts[-1]

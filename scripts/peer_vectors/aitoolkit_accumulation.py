#!/usr/bin/env python3
"""How ai-toolkit's trainer makes one optimizer step of several micro-batches: how far the parameters move in a step of
plain gradient descent with a rate of 1, which is the gradient that reached the optimizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aitoolkit_trainer import Timer
from common import record

GRADIENTS = [[0.1, 0.2], [0.3, -0.1], [-0.2, 0.05], [0.1, 0.4], [1.0, 0.5], [0.2, 0.2], [-0.6, 0.1], [0.3, 0.3]]
"""Of micro-batch 1, 2, … on two parameters."""


def steps(train: dict[str, Any]) -> dict[str, Any]:
    """The trainer's own loop body (`hook_train_loop`), whose caller decides when to step the optimizer."""
    from accelerate import Accelerator
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
    from toolkit.config_modules import TrainConfig

    trainer = object.__new__(SDTrainer)
    trainer.train_config = TrainConfig(**train)
    accelerator = trainer.accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.zeros(2))
    trainer.params = [{"params": [weight]}]
    trainer.optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    trainer.lr_scheduler = SimpleNamespace(step=lambda: None)
    trainer.timer, trainer.ema, trainer.embedding, trainer.adapter = Timer(), None, None, None
    trainer.model_config = SimpleNamespace(low_vram=False)
    turns: list[int] = []
    trainer.sd = SimpleNamespace(is_multistage=True, multistage_boundaries=[0.875, 0.0],
                                 trainable_multistage_boundaries=[0, 1])  # fmt: skip
    trainer.current_boundary_index = trainer.steps_this_boundary = 0
    coming = iter(GRADIENTS)

    def one(batch: Any) -> torch.Tensor:
        turns.append(trainer.current_boundary_index)
        loss = (weight * torch.tensor(next(coming))).sum()
        accelerator.backward(loss)
        return loss.detach()

    trainer.train_single_accumulation = one
    moves: list[list[float]] = []
    counted = 1  # as the loop of BaseSDTrainProcess counts
    for _ in range(len(GRADIENTS) // trainer.train_config.gradient_accumulation):
        stepping = counted >= trainer.train_config.gradient_accumulation_steps
        trainer.is_grad_accumulation_step = not stepping
        counted = 0 if stepping else counted
        before = weight.detach().clone()
        with accelerator.accumulate():
            trainer.hook_train_loop([None] * trainer.train_config.gradient_accumulation)
        if stepping:
            moves.append((before - weight.detach()).tolist())
        counted += 1
    return {"train": train, "gradients": GRADIENTS, "steps": moves, "experts": turns}


def values(_peer: Path) -> Any:
    loose = {"max_grad_norm": 100.0}
    return [steps(train) for train in (
        {**loose}, {**loose, "gradient_accumulation": 4}, {**loose, "gradient_accumulation_steps": 4},
        {"gradient_accumulation": 4, "max_grad_norm": 0.3},
        {"gradient_accumulation": 4, "max_grad_norm": 0.3, "optimizer": "adafactor"},
        {**loose, "gradient_accumulation": 4, "switch_boundary_every": 8},
        {**loose, "gradient_accumulation": 4, "switch_boundary_every": 2},
    )]  # fmt: skip


if __name__ == "__main__":
    record("accumulation", values)

"""The baseline: a plain training loop with diffusers and peft or lycoris-lora.

It runs eagerly with gradient checkpointing and all data on the device. It uses the same random weights, adapted layers
and shapes, fp32 adapters under bf16 autocast, and fused AdamW. Of our code it uses only the model's input format.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.bench.step.job import StepJob
from gracetune.bench.step.random_data import random_batch
from gracetune.bench.step.random_model import RandomModel
from gracetune.config.run_config import RunConfig
from gracetune.diffusion.schedule import noisy, target
from gracetune.models.spec import PartPlacement


class PlainLoop:
    def __init__(
        self, job: StepJob, config: RunConfig, model: RandomModel, targets: Sequence[str], device: torch.device
    ) -> None:
        self._model, self._device = model, device
        denoiser: Any = model.plain_denoiser(PartPlacement(device, torch.bfloat16))
        denoiser.train()
        self._network: nn.Module | None = None
        if job.adapter in ("lora", "dora"):
            self.parameters = _peft(denoiser, config, targets)
        else:
            self._network, self.parameters = _lycoris(denoiser, config, targets)
        denoiser.enable_gradient_checkpointing()
        self._denoiser = denoiser
        self._optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=device.type == "cuda")
        self._batch = random_batch(job, model, device)

    @property
    def trained_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def step(self) -> Tensor:
        clean = self._batch["latents"].float()
        noise = torch.randn_like(clean)
        level = torch.rand(len(clean), device=self._device)
        schedule = self._model.facts.schedule
        seen = noisy(schedule, clean, noise, level).to(torch.bfloat16)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            prediction = self._model.spec.predict(self._denoiser, seen, level, self._batch, self._model.facts)
        loss = torch.nn.functional.mse_loss(prediction.float(), target(schedule, clean, noise, level))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def _peft(denoiser: Any, config: RunConfig, targets: Sequence[str]) -> list[nn.Parameter]:
    from peft import LoraConfig

    adapter = config.adapter
    denoiser.add_adapter(
        LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.rank,
            target_modules="|".join(re.escape(path) for path in targets),
            use_dora=adapter.kind == "dora",
        )
    )
    parameters = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    return parameters


def _lycoris(denoiser: nn.Module, config: RunConfig, targets: Sequence[str]) -> tuple[nn.Module, list[nn.Parameter]]:
    adapter = config.adapter
    with _preset_for(targets) as network_of:
        network: Any = network_of(
            denoiser,
            lora_dim=adapter.rank,
            alpha=adapter.rank,
            network_module=adapter.kind,
            factor=adapter.factor,
            full_matrix=adapter.full_rank,
        )
        network.apply_to()
    network.to(next(denoiser.parameters()).device, torch.float32).train()
    return network, [parameter for parameter in network.parameters() if parameter.requires_grad]


@contextmanager
def _preset_for(targets: Sequence[str]) -> Iterator[Any]:
    """lycoris keeps the choice of layers on its class. Set it inside the block and restore it afterwards."""
    from lycoris.wrapper import LycorisNetwork

    names = ("TARGET_REPLACE_MODULE", "TARGET_REPLACE_NAME", "USE_FNMATCH", "TARGET_EXCLUDE_NAME")
    before = {name: vars(LycorisNetwork)[name] for name in names}
    logger = logging.getLogger("LyCORIS")  # it writes to stdout, which is reserved for --json
    was = logger.disabled
    logger.disabled = True
    pattern = "(?:" + "|".join(re.escape(path) for path in targets) + r")\Z"
    LycorisNetwork.apply_preset(
        {"target_module": [], "target_name": [pattern], "use_fnmatch": False, "exclude_name": []}
    )
    try:
        yield LycorisNetwork
    finally:
        logger.disabled = was
        for name, value in before.items():
            setattr(LycorisNetwork, name, value)

# ruff: noqa: N999 (ai-toolkit's name)
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from extensions_built_in.diffusion_models.wan22.wan22_14b_model import Wan2214bModel
from toolkit.dataloader_mixins import Dataset
from toolkit.network_mixins import Network
from toolkit.optimizer import get_optimizer

from jobs.process.BaseProcess import BaseProcess


class BaseSDTrainProcess(BaseProcess):
    def __init__(self, process_id: int, job: Any, config: Any, custom_pipeline: Any = None) -> None:
        super().__init__(process_id, job, config)
        self.device_torch = torch.device("cpu")
        self.save_root = str(Path(config["training_folder"]) / job.name)
        self.step_num = 0
        self.network: Any = None
        self.optimizer: Any = None
        self.losses: list[float] = []

    def end_step_hook(self) -> None: ...

    def save(self, step: Any = None) -> None:
        folder = Path(self.save_root)
        folder.mkdir(parents=True, exist_ok=True)
        number = "" if step is None else f"_{step:09d}"
        metadata = {"software": "stand-in", "sshs_model_hash": "of both"}
        self.network.save_weights(str(folder / f"{self.job.name}{number}.safetensors"), self.sd, metadata)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def run(self) -> None:
        super().run()
        train, model = self.config["train"], self.config.get("model", {})
        self.sd = Wan2214bModel(model.get("model_kwargs", {}))
        self.network = self.sd.network = Network(self.sd.layers(), self.sd.network_config)
        params = [{"params": list(self.network.parameters()), "lr": train["lr"]}]
        self.optimizer = get_optimizer(
            params, train["optimizer"], learning_rate=train["lr"], optimizer_params=train.get("optimizer_params")
        )
        resumed = sorted(Path(self.save_root).glob("*_high_noise.safetensors"))
        if resumed:
            self.network.load_weights(str(resumed[-1]), self.sd)
            self.optimizer.load_state_dict(torch.load(Path(self.save_root) / "optimizer.pt", weights_only=True))
        self.datasets = [Dataset(config) for config in self.config["datasets"]]
        self.before_loop()
        for step in range(train["steps"]):
            self.losses.append(self._step(step))
            self.step_num = step + 1
            self.end_step_hook()
        self.save()

    def before_loop(self) -> None:
        """For tests that want to look, or to take files away, between caching and training."""

    def _step(self, step: int) -> float:
        items = self.datasets[0].file_list
        item = items[step % len(items)]
        latent = item.get_latent().float()
        text = item.load_prompt_embedding(dropped=step % 3 == 2).text_embeds.mean()
        lora = self.network.unet_loras[step % len(self.network.unet_loras)]
        loss = ((lora(latent) - text) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

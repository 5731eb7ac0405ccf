from __future__ import annotations

from typing import Any

from jobs.process.BaseProcess import BaseProcess
from jobs.process.BaseSDTrainProcess import BaseSDTrainProcess
from toolkit.extension import Extension


class DiffusionTrainer(BaseSDTrainProcess):
    def __init__(self, process_id: int, job: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(process_id, job, config, **kwargs)
        self.steps_ended = 0

    def end_step_hook(self) -> None:
        super().end_step_hook()
        self.steps_ended += 1


class DiffusionTrainerExtension(Extension):
    uid = "diffusion_trainer"

    @classmethod
    def get_process(cls) -> Any:
        return DiffusionTrainer


class Captioner(Extension):
    """A process that does not train."""

    uid = "captioner"

    @classmethod
    def get_process(cls) -> Any:
        return BaseProcess


AI_TOOLKIT_EXTENSIONS = [DiffusionTrainerExtension, Captioner]

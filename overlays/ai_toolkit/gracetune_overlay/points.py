"""All names of ai-toolkit that the overlay uses, as data. `gracetune overlay check ai-toolkit` checks the same names.

A target is `module:Class.method`, or `module:name` for a function that a module imports (`defined` says from where).
`parameters` are those we use by name; others are passed through unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Feature = Literal["entry", "memory", "latent_cache", "text_cache", "automagic", "pair_files"]

_PROCESS: Final = "jobs.process.BaseProcess"
_TRAINER: Final = "jobs.process.BaseSDTrainProcess"
_DATA: Final = "toolkit.dataloader_mixins"
_PROMPTS: Final = "toolkit.prompt_utils"
_WAN: Final = "extensions_built_in.diffusion_models.wan22.wan22_14b_model"


@dataclass(frozen=True)
class Point:
    target: str
    feature: Feature
    parameters: tuple[str, ...] = ()
    wrapped: bool = True
    """False if it is only called."""
    defined: str = ""
    """Where an imported name is defined; empty if `target` itself is the definition."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.target.partition(":")[2].split("."))


INIT: Final = Point(f"{_PROCESS}:BaseProcess.__init__", "entry", ("process_id", "config"))
RUN: Final = Point(f"{_TRAINER}:BaseSDTrainProcess.run", "entry")
END_STEP: Final = Point(f"{_TRAINER}:BaseSDTrainProcess.end_step_hook", "memory")
SAVE: Final = Point(f"{_TRAINER}:BaseSDTrainProcess.save", "memory", ("step",), wrapped=False)
CACHE_LATENTS: Final = Point(f"{_DATA}:LatentCachingMixin.cache_latents_all_latents", "latent_cache")
LATENT_PATH: Final = Point(f"{_DATA}:LatentCachingFileItemDTOMixin.get_latent_path", "latent_cache", wrapped=False)
READ_LATENT: Final = Point(f"{_DATA}:load_file", "latent_cache", ("filename",), defined="safetensors.torch:load_file")
CACHE_TEXT: Final = Point(f"{_DATA}:TextEmbeddingCachingMixin.cache_text_embeddings", "text_cache")
TEXT_PATH: Final = Point(f"{_DATA}:TextEmbeddingFileItemDTOMixin.get_text_embedding_path", "text_cache", wrapped=False)
READ_TEXT: Final = Point(f"{_PROMPTS}:load_file", "text_cache", ("filename",), defined="safetensors.torch:load_file")
OPTIMIZER: Final = Point(
    f"{_TRAINER}:get_optimizer",
    "automagic",
    ("params", "optimizer_type", "learning_rate", "optimizer_params"),
    defined="toolkit.optimizer:get_optimizer",
)
MODULES: Final = Point("toolkit.network_mixins:ToolkitNetworkMixin.get_all_modules", "automagic", wrapped=False)
SAVE_LORA: Final = Point(f"{_WAN}:Wan2214bModel.save_lora", "pair_files", ("state_dict", "output_path", "metadata"))
LOAD_LORA: Final = Point(f"{_WAN}:Wan2214bModel.load_lora", "pair_files", ("file",))

POINTS: Final = (
    INIT, RUN, END_STEP, SAVE, CACHE_LATENTS, LATENT_PATH, READ_LATENT, CACHE_TEXT, TEXT_PATH, READ_TEXT, OPTIMIZER,
    MODULES, SAVE_LORA, LOAD_LORA,
)  # fmt: skip

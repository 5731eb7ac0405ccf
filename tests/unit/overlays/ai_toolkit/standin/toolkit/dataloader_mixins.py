from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from toolkit.prompt_utils import PromptEmbeds

DROPPED = ""


class LatentCachingFileItemDTOMixin:
    path: str
    _latent_path: str | None = None
    is_latent_cached = False

    def get_latent_path(self, recalculate: Any = False) -> str:
        if self._latent_path is None or recalculate:
            picture = Path(self.path)
            self._latent_path = str(picture.parent / "_latent_cache" / f"{picture.stem}.safetensors")
        return self._latent_path

    def get_latent(self, device: Any = None) -> Any:
        return load_file(self.get_latent_path(), device="cpu")["latent"] if self.is_latent_cached else None


class TextEmbeddingFileItemDTOMixin:
    path: str
    caption: str
    _text_embedding_path: str | None = None
    is_text_embedding_cached = False

    def _named(self, caption: str) -> str:
        digest = hashlib.sha256(caption.encode()).hexdigest()[:8]
        return str(Path(self.path).parent / "_t_e_cache" / f"{Path(self.path).stem}_{digest}.safetensors")

    def get_text_embedding_path(self, recalculate: Any = False) -> str:
        if self._text_embedding_path is None or recalculate:
            self._text_embedding_path = self._named(self.caption)
            self._blank_text_embedding_path = self._named(DROPPED)
        return self._text_embedding_path

    def load_prompt_embedding(self, device: Any = None, dropped: bool = False) -> PromptEmbeds:
        return PromptEmbeds.load(self._blank_text_embedding_path if dropped else self.get_text_embedding_path())


class FileItem(LatentCachingFileItemDTOMixin, TextEmbeddingFileItemDTOMixin):
    def __init__(self, path: str) -> None:
        self.path, self.caption = path, Path(path).stem


class LatentCachingMixin:
    file_list: list[FileItem]

    def cache_latents_all_latents(self) -> None:
        for number, item in enumerate(self.file_list):
            path = Path(item.get_latent_path(recalculate=True))
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                torch.manual_seed(number)
                latent = {"latent": torch.randn(3, 4).bfloat16(), "num_frames": torch.tensor(number, dtype=torch.int32)}
                save_file(latent, path)
            item.is_latent_cached = True


class TextEmbeddingCachingMixin:
    file_list: list[FileItem]

    def cache_text_embeddings(self) -> None:
        for number, item in enumerate(self.file_list):
            item.get_text_embedding_path(recalculate=True)
            for offset, each in enumerate((item._text_embedding_path, item._blank_text_embedding_path)):
                Path(str(each)).parent.mkdir(exist_ok=True)
                torch.manual_seed(100 * offset + number)
                save_file({"text_embed": torch.randn(2, 4)}, str(each))
            item.is_text_embedding_cached = True


class Dataset(LatentCachingMixin, TextEmbeddingCachingMixin):
    def __init__(self, config: dict[str, Any]) -> None:
        self.file_list = [FileItem(str(path)) for path in sorted(Path(config["folder_path"]).glob("*.png"))]
        if config.get("cache_latents_to_disk"):
            self.cache_latents_all_latents()
        if config.get("cache_text_embeddings"):
            self.cache_text_embeddings()

    def __len__(self) -> int:
        return len(self.file_list)

    def __getitem__(self, index: int) -> Any:
        return self.file_list[index].get_latent()

from pathlib import Path

import torch


class TextEmbeddingCache:
    _instances = []  # noqa: RUF012 - upstream keeps them in a set of its class

    def __init__(self, id, data_backend, cache_dir):
        self.id, self.data_backend, self.cache_dir, self.text_cache_disable = id, data_backend, cache_dir, False
        TextEmbeddingCache._instances.append(self)

    @classmethod
    def active_caches(cls):
        return list(cls._instances)

    def file_of(self, caption):
        return str(Path(self.cache_dir, f"{caption.replace(' ', '-')}.pt"))

    def embed(self, caption):
        embeds = {"prompt_embeds": torch.full((2, 3), float(len(caption))), "add_text_embeds": None}
        self.data_backend.write(self.file_of(caption), embeds)

    def load_from_cache(self, filename):
        return self.data_backend.torch_load(filename)

from pathlib import Path

import torch


class VAECache:
    def __init__(self, id, image_data_backend, cache_dir):
        self.id, self.cache_dir, self.vae_cache_disable = id, cache_dir, False
        self.image_data_backend = self.cache_data_backend = image_data_backend

    def generate_vae_cache_filename(self, filepath):
        name = f"{Path(filepath).stem}.pt"
        return str(Path(self.cache_dir, name)), name

    def process(self, pictures):
        for picture in pictures:
            content = self.image_data_backend.read_image(picture)
            latents = torch.tensor([[float(len(content)), float(sum(content) % 97)]])
            self.cache_data_backend.write(self.generate_vae_cache_filename(picture)[0], latents)

    def retrieve_from_cache(self, filepath):
        filename = self.generate_vae_cache_filename(filepath)[0]
        assert self.cache_data_backend.exists(filename)
        return self.cache_data_backend.torch_load(filename)

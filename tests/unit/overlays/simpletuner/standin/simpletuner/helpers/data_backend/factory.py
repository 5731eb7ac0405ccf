import json
from pathlib import Path
from types import SimpleNamespace

from simpletuner.helpers.caching.text_embeds import TextEmbeddingCache
from simpletuner.helpers.caching.vae import VAECache
from simpletuner.helpers.data_backend.builders.local import LocalBackendBuilder
from simpletuner.helpers.training.state_tracker import StateTracker


class FactoryRegistry:
    def __init__(self, args):
        self.args = args

    def load_configuration(self):
        return json.loads(Path(self.args.data_backend_config).read_text())

    def configure(self):
        for entry in self.load_configuration():
            assert entry["type"] == "local", entry
            backend = LocalBackendBuilder()._create_backend(SimpleNamespace(id=entry["id"]))
            if entry["dataset_type"] == "text_embeds":
                TextEmbeddingCache(id=entry["id"], data_backend=backend, cache_dir=entry["cache_dir"])
                continue
            ((_, _, pictures),) = backend.list_files(["png"], entry["instance_data_dir"])
            cache = VAECache(entry["id"], backend, entry["cache_dir_vae"])
            cache.process(pictures)
            StateTracker.data_backends[entry["id"]] = {
                "data_backend": backend,
                "metadata_backend": SimpleNamespace(aspect_ratio_bucket_indices={"1.0": pictures}),
                "vaecache": cache,
                "config": entry,
            }

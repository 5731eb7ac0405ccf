"""Serve upstream's VAE and text caches from memory.

Upstream writes its cache files as usual. When the models are loaded, each file is read once into gracetune's slabs,
which serve every epoch. The log says which memory they use (managed, page-locked or plain), and why.

Look-ahead: upstream samples a batch only when the step requests it, so the next batch is unknown. With upstream's
`dataloader_prefetch`, a thread samples batches ahead, and entries that stayed on disk are read ahead too. The log says
which of the two applies.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from gracetune.extension import CacheResources, CacheRole, CacheType, probe
from gracetune_simpletuner.errors import stopping
from gracetune_simpletuner.hooks import Around, check_reads
from gracetune_simpletuner.memory import Layer
from gracetune_simpletuner.overlay import Overlay
from gracetune_simpletuner.points import hooks_of
from gracetune_simpletuner.residents import Residents

_TYPES: Final = ("image", "video", "audio", "conditioning", "eval")


class Caches:
    """The cache feature. `residents` is set once the models are loaded."""

    def __init__(self, overlay: Overlay, layer: Layer) -> None:
        self.overlay, self._layer = overlay, layer
        self.residents: Residents | None = None

    def wrappers(self) -> dict[str, Around]:
        changed = partial(_changed, self)
        around = (partial(_torch_load, self), partial(_torch_save, self), changed, changed, partial(_exists, self))
        names = [hook.target for hook in hooks_of("caches")]
        return dict(zip(names, (*around, partial(_prepared, self)), strict=True))

    def load(self, trainer: Any) -> None:
        """Load every entry that upstream has written for this rank."""
        import torch
        from simpletuner.helpers.caching.text_embeds import TextEmbeddingCache
        from simpletuner.helpers.training.state_tracker import StateTracker

        check_reads("Trainer", trainer)
        check_reads("config.loader", trainer.config)
        requested = self.overlay.options.cache
        kinds: dict[CacheRole, CacheType] = {
            "latent_cache": requested.vae_cache_type,
            "text_cache": requested.text_cache_type,
        }
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        resources = CacheResources(probe(), device, self._layer.heap, self._layer.why_not)
        launch = self.overlay.launch
        residents = Residents(kinds, resources, self.overlay.telemetry.of("caches"), sharers=launch.local_count)
        if residents.wants("latent_cache"):
            for name, backend in StateTracker.get_data_backends(_types=_TYPES).items():
                self._load_latents(residents, name, backend)
        if residents.wants("text_cache"):
            for cache in TextEmbeddingCache.active_caches():
                self._load_text(residents, cache)
        self.residents = residents
        self.overlay.at_end.append(residents.close)
        self.overlay.note(
            f"{len(residents)} cache entries in memory",
            event="resident",
            entries=len(residents),
            caches=residents.report(),
            notes=residents.notes,
            look_ahead=_look_ahead(trainer.config),
        )

    def _load_latents(self, residents: Residents, name: str, backend: Any) -> None:
        cache = backend.get("vaecache")
        if cache is None:
            return
        check_reads("VAECache", cache)
        check_reads("data backend", cache.cache_data_backend)
        reason = _why_not_latents(cache, backend.get("config", {}))
        if reason is not None:
            self.overlay.telemetry.of("caches").reject("caches_left_on_disk", f"{name}: {reason}")
            return
        check_reads("dataset", backend)
        check_reads("metadata backend", backend["metadata_backend"])
        buckets = backend["metadata_backend"].aspect_ratio_bucket_indices
        images = [image for bucket in buckets.values() for image in bucket]
        files = [cache.generate_vae_cache_filename(image)[0] for image in images]
        residents.fill("latent_cache", cache.cache_dir, files, cache.cache_data_backend.torch_load)

    def _load_text(self, residents: Residents, cache: Any) -> None:
        check_reads("TextEmbeddingCache", cache)
        check_reads("data backend", cache.data_backend)
        reason = "text_cache_disable" if cache.text_cache_disable else _why_not_local(cache.data_backend)
        if reason is not None:
            self.overlay.telemetry.of("caches").reject("caches_left_on_disk", f"{cache.id}: {reason}")
            return
        listed = cache.data_backend.list_files(["pt"], cache.cache_dir)
        files = [file for _, _, found in listed for file in found]
        residents.fill("text_cache", cache.cache_dir, files, cache.data_backend.torch_load)


def activate(overlay: Overlay, layer: Layer) -> None:
    overlay.activate("caches", Caches(overlay, layer).wrappers())


def _why_not_latents(cache: Any, config: Any) -> str | None:
    if cache.vae_cache_disable:
        return "vae_cache_disable: nothing is kept"
    if config.get("vae_cache_clear_each_epoch") or (config.get("crop") and config.get("crop_aspect") == "random"):
        return "its entries are made anew every epoch"
    return _why_not_local(cache.cache_data_backend)


def _why_not_local(backend: Any) -> str | None:
    return None if backend.type == "local" else f"its files are in a {backend.type} backend"


def _look_ahead(config: Any) -> dict[str, Any]:
    if config.dataloader_prefetch:
        depth = config.dataloader_prefetch_qlen
        return {"available": True, "reason": f"dataloader_prefetch: upstream prefetches up to {depth} batches"}
    reason = "not knowable: upstream loads a batch when the step requests it; dataloader_prefetch loads ahead"
    return {"available": False, "reason": reason}


# -- the wrappers ------------------------------------------------------------------------------------------------------


def _torch_load(caches: Caches, original: Any, backend: Any, filename: Any, *rest: Any, **more: Any) -> Any:
    residents = caches.residents
    if residents is None:
        return original(backend, filename, *rest, **more)
    found = residents.look_up(filename)
    if found is not None:
        return found
    value = original(backend, filename, *rest, **more)
    residents.offer(filename, value)
    caches.overlay.telemetry.of("caches").add("reads_from_disk")
    return value


def _torch_save(caches: Caches, original: Any, backend: Any, data: Any, location: Any, *rest: Any, **more: Any) -> Any:
    if caches.residents is not None:
        caches.residents.forget(location)
    return original(backend, data, location, *rest, **more)


def _changed(caches: Caches, original: Any, backend: Any, filepath: Any, *rest: Any, **more: Any) -> Any:
    if caches.residents is not None:
        caches.residents.forget(filepath)
    return original(backend, filepath, *rest, **more)


def _exists(caches: Caches, original: Any, backend: Any, filepath: Any, *rest: Any, **more: Any) -> Any:
    if caches.residents is not None and filepath in caches.residents:
        return True
    return original(backend, filepath, *rest, **more)


def _prepared(caches: Caches, original: Any, trainer: Any, *rest: Any, **more: Any) -> Any:
    result = original(trainer, *rest, **more)
    with stopping():
        caches.load(trainer)
    return result

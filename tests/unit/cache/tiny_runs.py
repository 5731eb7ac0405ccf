"""Complete small runs: tiny models, generated media, their config, and the content of their caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gracetune.cache.encoder import EncoderId, LatentEncoder, Prompt, TextEncoder
from gracetune.cache.folders import CacheFolders, cache_folders
from gracetune.cache.keys import Key
from gracetune.cache.session import Caches, needs
from gracetune.config.run_config import RunConfig, Validation
from gracetune.data.index import DataIndex
from gracetune.data.index_builder import build_index
from gracetune.data.media.load import Sample
from gracetune.models.encoders import FamilyEncoders, encoders_of
from gracetune.models.registry import geometry_of
from unit.data.folders import image, images, write
from unit.data.media.generated import audio_bytes, every, tone, video_bytes

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


TinyModel = Callable[[str, str], Path]
FLAVOURS = {
    "wan": "t2v-14b-2.2",
    "qwen_image": "edit-2509",
    "sdxl": "base-1.0",
    "stable_audio": "open-1.0",
    "flux": "dev",
    "flux2": "klein-base-4b",
    "z_image": "base",
    "krea2": "raw",
}


def datasets(family: str, folder: Path, count: int = 3) -> list[dict[str, Any]]:
    """Write data that a family can be trained on."""
    if family == "wan":
        clips: dict[str, bytes | str] = {}
        for number in range(count):
            clips[f"{number}.mp4"] = video_bytes(every(1 / 16, 6 + number), size=(32, 32))
            clips[f"{number}.txt"] = f"clip {number}"
        video = {"num_frames": 5}
        return [{"path": str(write(folder / "clips", clips)), "dataset_type": "video", "resolution": 32.0,
                 "video": video}]  # fmt: skip
    if family == "stable_audio":
        sounds: dict[str, bytes | str] = {}
        for number in range(count):
            sounds[f"{number}.wav"] = audio_bytes(tone(200 + 50 * number, 0.5, 44_100), 44_100)
            sounds[f"{number}.txt"] = f"sound {number}"
        audio = {"duration_interval": 0.1}
        return [{"path": str(write(folder / "sounds", sounds)), "dataset_type": "audio", "audio": audio}]
    own: dict[str, Any] = {"path": str(write(folder / "pictures", images(count))), "resolution": 64.0}
    if family != "qwen_image":
        return [own]
    sources = {f"{number:03}.png": image(64, 64, seed=100 + number) for number in range(count)}
    references = {"path": str(write(folder / "sources", sources)), "resolution": 64.0, "dataset_type": "conditioning"}
    return [{**own, "conditioning": ["d1"]}, references]


def config_dict(tmp_path: Path, family: str, model: Path, found: Sequence[dict[str, Any]], **values: Any) -> Any:
    return {
        "name": "run",
        "output_dir": str(tmp_path / "out"),
        "model": {"family": family, "flavour": FLAVOURS[family], "path": str(model)},
        "datasets": [{"id": f"d{number}", **one} for number, one in enumerate(found)],
        "training": {"max_steps": 10, "seed": 7, "mixed_precision": "fp32"},
        **values,
    }


@dataclass
class Run:
    config: RunConfig
    index: DataIndex
    encoders: Any
    folders: CacheFolders

    @classmethod
    def of(
        cls,
        tmp_path: Path,
        family: str,
        model: Path,
        found: Sequence[dict[str, Any]] | None = None,
        flavour: str | None = None,
        **values: Any,
    ) -> Run:
        found = datasets(family, tmp_path) if found is None else found
        stated = config_dict(tmp_path, family, model, found, **values)
        stated["model"]["flavour"] = flavour or FLAVOURS[family]
        config = RunConfig.model_validate(stated)
        index = build_index(config, geometry_of(config.model)[0])
        return cls(config, index, encoders_of(config, torch.device("cpu")), cache_folders(config))

    def caches(self) -> Caches:
        return Caches(self.folders, writable=True)

    def keys(self, epoch: int = 0) -> set[Key]:
        return {item.key for item in needs(self.config, self.index, self.encoders, self.folders, epoch=epoch).all}


def contents(*folders: Path) -> dict[Key, Entry]:
    """All entries of these stores."""
    from gracetune.cache.store import DiskStore

    found: dict[Key, Entry] = {}
    for folder in folders:
        with DiskStore.open(folder, writable=False) as store:
            found |= {key: store.read(key) for key in store.keys()}  # noqa: SIM118 - a store is no mapping
    return found


def same(one: dict[Key, Entry], other: dict[Key, Entry]) -> bool:
    """Whether entries are equal up to rounding, which depends on the batch size."""
    return one.keys() == other.keys() and all(
        one[key].keys() == other[key].keys()
        and all(torch.allclose(one[key][name], other[key][name], rtol=1e-5, atol=1e-6) for name in one[key])
        for key in one
    )


@dataclass
class Watched:
    """A family's encoders with a log of their calls. A hook can raise out of memory or delay a call."""

    inner: FamilyEncoders
    batches: list[int] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    """Paths or texts, in order."""
    loaded: list[str] = field(default_factory=list)
    before_encode: Callable[[Sequence[Sample | Prompt]], None] = lambda requested: None
    on_save_memory: Callable[[], None] = lambda: None

    def text_id(self) -> EncoderId:
        return self.inner.text_id()

    def latent_id(self) -> EncoderId:
        return self.inner.latent_id()

    def reads_images(self) -> bool:
        return self.inner.reads_images()

    def prompts(self, validation: Validation) -> list[str]:
        return self.inner.prompts(validation)

    def tile(self, why: str) -> None:
        self.inner.tile(why)

    def tiling_note(self) -> str | None:
        return self.inner.tiling_note()

    def forget_tiling(self) -> None:
        self.inner.forget_tiling()

    def load_text(self) -> TextEncoder:
        self.loaded.append("text")
        return _WatchedText(self, self.inner.load_text())

    def load_latents(self) -> LatentEncoder:
        self.loaded.append("latents")
        return _WatchedLatents(self, self.inner.load_latents())

    def note(self, requested: Sequence[Sample] | Sequence[Prompt]) -> None:
        self.before_encode(requested)
        self.batches.append(len(requested))
        self.encoded += [one.text if isinstance(one, Prompt) else one.ref.path for one in requested]


class _WatchedText:
    def __init__(self, watch: Watched, inner: TextEncoder) -> None:
        self._watch, self._inner = watch, inner

    @property
    def id(self) -> EncoderId:
        return self._inner.id

    @property
    def reads_images(self) -> bool:
        return self._inner.reads_images

    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        self._watch.note(prompts)
        return self._inner.encode(prompts)

    def close(self) -> None:
        self._watch.loaded.append("text closed")
        self._inner.close()


class _WatchedLatents:
    def __init__(self, watch: Watched, inner: LatentEncoder) -> None:
        self._watch, self._inner = watch, inner

    @property
    def id(self) -> EncoderId:
        return self._inner.id

    def encode(self, samples: Sequence[Sample]) -> list[Entry]:
        self._watch.note(samples)
        return self._inner.encode(samples)

    def save_memory(self) -> bool:
        self._watch.on_save_memory()
        return self._inner.save_memory()

    def close(self) -> None:
        self._watch.loaded.append("latents closed")
        self._inner.close()

"""Caches of ai-toolkit beside real images, imported by complete builds with tiny models."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gracetune.cache.ai_toolkit_import import cache_folders_found
from gracetune.cache.encoder import DescribesEntries, Prompt
from gracetune.cache.required_entries import LatentItem
from gracetune.cache.session import FilledCaches, build, needs
from unit.cache.tiny_runs import Run, TinyModel, contents
from unit.data.folders import images, write

MODELS = {"sdxl": ("base-1.0", "sdxl", "sdxl"), "flux": ("dev", "flux1", "flux")}
"""Flavour, and what ai-toolkit calls the latents and the model."""


@pytest.fixture
def made(tmp_path: Path, tiny_model: TinyModel) -> Callable[..., Run]:
    def make(family: str) -> Run:
        found = [{"path": str(write(tmp_path / "p", images(6))), "resolution": 64.0}]
        return Run.of(tmp_path, family, tiny_model(family, MODELS[family][0]), found)

    return make


def named(stem: str, stated: dict[str, Any]) -> str:
    digest = hashlib.md5(json.dumps(stated, sort_keys=True).encode()).digest()
    return f"{stem}_{base64.urlsafe_b64encode(digest).decode().rstrip('=')}.safetensors"


def cache_latents(run: Run, folder: Path, item: LatentItem, latents: torch.Tensor) -> Path:
    ref, fit = item.ref, item.ref.fit
    assert fit is not None
    stated = {
        "filename": ref.path,
        "scale_to_width": fit.resized[0],
        "scale_to_height": fit.resized[1],
        "crop_x": fit.left,
        "crop_y": fit.top,
        "crop_width": ref.bucket.width,
        "crop_height": ref.bucket.height,
        "latent_space_version": MODELS[run.config.model.family][1],
        "latent_version": 1,
    }
    file = folder / "_latent_cache" / named(Path(ref.path).stem, stated)
    file.parent.mkdir(exist_ok=True)
    save_file({"latent": latents}, file, {name: value if isinstance(value, str) else json.dumps(value)
                                          for name, value in stated.items()})  # fmt: skip
    return file


def as_ai_toolkit(run: Run, folder: Path, count: int) -> None:
    """Caches of the first `count` images, with small deviations like those of another program."""
    vae, text = run.encoders.load_latents(), run.encoders.load_text()
    for item in needs(run.config, run.index, run.encoders, run.folders).latents[:count]:
        (entry,) = vae.encode([run.index.load(item.ref)])
        cache_latents(run, folder, item, entry["latents"] * 1.01)
    for item in run.index.datasets[0].items[:count]:
        (entry,) = text.encode([Prompt(item.captions[0])])
        stated = {"caption": item.captions[0], "text_embedding_space_version": MODELS[run.config.model.family][2],
                "text_embedding_version": 1}  # fmt: skip
        names = {"prompt_embeds": "text_embed", "pooled_prompt_embeds": "pooled_embed"}
        file = folder / "_t_e_cache" / named(Path(item.path).stem, stated)
        file.parent.mkdir(exist_ok=True)
        save_file({names[name]: tensor[None].contiguous() for name, tensor in entry.items()}, file)


def built(run: Run, *, take_over: bool = True) -> FilledCaches:
    with run.caches() as caches:
        return build(run.config, run.index, run.encoders, caches, take_over=take_over)


@pytest.mark.parametrize("family", MODELS)
def test_what_fits_is_taken_over_and_the_rest_encoded(family: str, made: Callable[..., Run], tmp_path: Path) -> None:
    run = made(family)
    as_ai_toolkit(run, tmp_path / "p", 4)
    found = built(run)
    assert found.imported_latents is not None
    assert found.imported_texts is not None
    assert (found.imported_latents.imported, found.imported_latents.rejected) == (4, ())
    assert (found.imported_texts.imported, found.imported_texts.without_file) == (4, 2)
    assert (found.latents.encoded, found.latents.found_before, found.texts.encoded) == (2, 4, 2)
    stored, encoder = contents(run.folders.latents("d0")), run.encoders.load_latents()
    for number, item in enumerate(needs(run.config, run.index, run.encoders, run.folders).latents):
        (ours,) = encoder.encode([run.index.load(item.ref)])
        theirs = stored[item.key]
        assert theirs.keys() == ours.keys()
        factor = 1.01 if number < 4 else 1.0
        torch.testing.assert_close(theirs["latents"], factor * ours["latents"], rtol=1e-4, atol=1e-5)
        others = {name: tensor for name, tensor in ours.items() if name != "latents"}
        assert all(torch.equal(theirs[name], tensor) for name, tensor in others.items())
        assert isinstance(encoder, DescribesEntries)
        assert encoder.beside(item.ref).keys() == others.keys()
    assert built(run).encoded == 0


def test_nothing_is_taken_without_being_asked_for(made: Callable[..., Run], tmp_path: Path) -> None:
    run = made("sdxl")
    assert cache_folders_found(run.index) == []
    as_ai_toolkit(run, tmp_path / "p", 4)
    assert cache_folders_found(run.index) == [tmp_path / "p" / "_latent_cache", tmp_path / "p" / "_t_e_cache"]
    found = built(run, take_over=False)
    assert (found.latents.encoded, found.texts.encoded) == (6, 6)
    assert found.imported_latents is found.imported_texts is None


def test_latents_of_another_vae_are_all_rejected(made: Callable[..., Run], tmp_path: Path) -> None:
    run = made("sdxl")
    for item in needs(run.config, run.index, run.encoders, run.folders).latents:
        shape = (4, item.ref.bucket.height // 8, item.ref.bucket.width // 8)
        cache_latents(run, tmp_path / "p", item, torch.randn(shape))
    found = built(run)
    assert found.imported_latents is not None
    assert (found.imported_latents.imported, len(found.imported_latents.rejected)) == (0, 6)
    assert "was encoded again for comparison" in found.imported_latents.rejected[0].reason
    assert found.latents.encoded == 6

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.cache.folders import CacheFolders, cache_folders
from gracetune.cache.required_entries import (
    by_folder,
    is_refreshed,
    left_out,
    validation_texts,
    wanted_latents,
    wanted_texts,
)
from gracetune.config.run_config import Validation
from gracetune.data.index import DataIndex
from unit.cache.sample_caches import latent_visits, text_visits
from unit.cache.samples import TEXT, VAE
from unit.data.folders import config, image, images, index_of, write

PLACES = CacheFolders(Path("/c"), Path("/c"), {})
TRANSFORMS: list[dict[str, Any]] = [{"method": "RandomBrightnessContrast", "p": 1.0}]


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return str(write(tmp_path / "photos", images(5)))


def edit_index(tmp_path: Path, **values: Any) -> DataIndex:
    targets = {"path": str(write(tmp_path / "t", images(3))), "conditioning": ["d1"], **values}
    sources = {f"{number:03}.png": image(64, 64, seed=50 + number) for number in range(3)}
    found = {"path": str(write(tmp_path / "s", dict(sources))), "dataset_type": "conditioning"}
    return index_of(tmp_path, targets, found)


class TestLatents:
    def test_every_appearance_of_every_sample_once(self, tmp_path: Path, photos: str) -> None:
        index = index_of(tmp_path, {"path": photos, "augmentation": {"flip_x": True}})
        items = wanted_latents(index, VAE, PLACES)
        assert len(items) == 10 == len({item.key for item in items})
        assert {item.folder for item in items} == {Path("/c/latents")}
        assert sum("flipped in x" in item.what for item in items) == 5
        assert all(item.key == item.origin.key for item in items)

    @pytest.mark.parametrize("mode", ["static", "refresh_each_epoch"])
    def test_is_what_batches_will_ask_for(self, tmp_path: Path, photos: str, mode: str) -> None:
        augmentation = {"flip_x": True, "transforms": TRANSFORMS, "cache_mode": mode}
        index = index_of(tmp_path, {"path": photos, "augmentation": augmentation}, {"path": photos, "resolution": 128})
        for epoch in (0, 3):
            keys = {item.key for item in wanted_latents(index, VAE, PLACES, epoch=epoch)}
            assert keys == latent_visits(index, VAE, epoch).keys()

    def test_two_datasets_of_the_same_files_share_entries_unless_one_has_a_folder_of_its_own(
        self, tmp_path: Path, photos: str
    ) -> None:
        index = index_of(tmp_path, {"path": photos}, {"path": photos})
        assert len(wanted_latents(index, VAE, PLACES)) == 5
        apart = CacheFolders(Path("/c"), Path("/c"), {"d1": Path("/own")})
        items = wanted_latents(index, VAE, apart)
        assert {folder: len(some) for folder, some in by_folder(items).items()} == {
            Path("/c/latents"): 5,
            Path("/own/latents"): 5,
        }

    def test_what_is_drawn_anew_each_epoch_lies_apart(self, tmp_path: Path, photos: str) -> None:
        fresh = {"path": photos, "augmentation": {"transforms": TRANSFORMS, "cache_mode": "refresh_each_epoch"}}
        index = index_of(tmp_path, fresh, {"path": photos})
        lasting = wanted_latents(index, VAE, PLACES, epoch=4, part="lasting")
        epoch = wanted_latents(index, VAE, PLACES, epoch=4, part="epoch")
        assert {item.folder for item in lasting} == {Path("/c/latents")}
        assert {item.folder for item in epoch} == {Path("/c/epochs/4")}
        both = wanted_latents(index, VAE, PLACES, epoch=4)
        assert {item.key for item in both} == {item.key for item in (*lasting, *epoch)}
        assert len(lasting) == len(epoch) == 5
        later = wanted_latents(index, VAE, PLACES, epoch=5, part="epoch")
        assert not {item.key for item in later} & {item.key for item in epoch}
        assert is_refreshed(index)

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            ({"cache_latents": "none"}, "cache_latents is none"),
            ({"augmentation": {"transforms": TRANSFORMS}}, "augmentation.cache_mode is disable_cache"),
        ],
    )
    def test_what_is_not_cached_is_counted(
        self, tmp_path: Path, photos: str, values: dict[str, Any], reason: str
    ) -> None:
        index = index_of(tmp_path, {"path": photos, **values}, {"path": photos})
        assert {item.ref.dataset for item in wanted_latents(index, VAE, PLACES)} == {"d1"}
        (note,) = left_out(index)
        assert note.startswith("dataset d0: latents of 5 samples are encoded in every step")
        assert reason in note
        assert not is_refreshed(index)


class TestTexts:
    def test_captions_the_empty_one_and_prompts_each_once(self, tmp_path: Path, photos: str) -> None:
        index = index_of(tmp_path, {"path": photos, "captions": {"dropout": 0.1}}, {"path": photos})
        items = wanted_texts(index, TEXT, PLACES, prompts=["a prompt", "picture 1"])
        texts = [item.text for item in items]
        assert sorted(texts) == ["", "a prompt", *(f"picture {number}" for number in range(5))]
        assert len({item.key for item in items}) == len(items)
        assert {item.folder for item in items} == {Path("/c/text")}
        assert {item.key for item in items if item.text != "a prompt"} == text_visits(index, TEXT).keys()

    @pytest.mark.parametrize("mode", ["static", "refresh_each_epoch"])
    def test_with_images_one_for_each_caption_of_each_appearance(self, tmp_path: Path, mode: str) -> None:
        augmentation = {"flip_x": True, "transforms": TRANSFORMS, "cache_mode": mode}
        index = edit_index(tmp_path, augmentation=augmentation, captions={"dropout": 0.5})
        items = wanted_texts(index, TEXT, PLACES, reads_images=True, prompts=["a prompt"], epoch=2)
        assert len(items) == 3 * 2 * 2
        assert all(len(item.images) == 1 for item in items)
        assert {item.key for item in items} == text_visits(index, TEXT, reads_images=True, epoch=2).keys()
        folder = Path("/c/epochs/2") if mode == "refresh_each_epoch" else Path("/c/text")
        assert {item.folder for item in items} == {folder}
        empty = "lasting" if mode == "refresh_each_epoch" else "epoch"
        assert not wanted_texts(index, TEXT, PLACES, reads_images=True, epoch=2, part=empty)  # type: ignore[arg-type]

    def test_an_encoder_that_does_not_look_needs_no_images(self, tmp_path: Path) -> None:
        items = wanted_texts(edit_index(tmp_path, augmentation={"flip_x": True}), TEXT, PLACES)
        assert [item.images for item in items] == [(), (), ()]

    def test_images_that_are_new_at_every_visit_are_not_embedded_beforehand(self, tmp_path: Path) -> None:
        index = edit_index(tmp_path, cache_latents="none")
        assert wanted_texts(index, TEXT, PLACES, reads_images=True) == []
        assert len(wanted_texts(index, TEXT, PLACES)) == 3

    def test_validation(self) -> None:
        stated = {
            "negative_prompt": "bad",
            "prompts": [{"prompt": "a"}, {"prompt": "b", "negative_prompt": "worse"}, {"prompt": "a"}],
        }
        assert validation_texts(Validation.model_validate(stated)) == ["a", "bad", "b", "worse"]
        assert validation_texts(Validation.model_validate({**stated, "enabled": False})) == []
        assert validation_texts(Validation()) == []


class TestPlaces:
    def test_below_the_run_unless_folders_are_named(self, tmp_path: Path) -> None:
        found = cache_folders(config(tmp_path, {"path": "p"}, {"path": "p", "cache_dir": str(tmp_path / "own")}))
        assert found.latents("d0") == tmp_path / "out" / "cache" / "latents"
        assert found.latents("d1") == tmp_path / "own" / "latents"
        assert found.latents("d1", 3) == tmp_path / "own" / "epochs" / "3"
        assert found.text() == tmp_path / "out" / "cache" / "text"
        cache = {"cache_dir": str(tmp_path / "c"), "text_cache_dir": str(tmp_path / "t")}
        named = cache_folders(config(tmp_path, {"path": "p"}, cache=cache))
        assert (named.latents("d0"), named.text()) == (tmp_path / "c" / "latents", tmp_path / "t" / "text")

    def test_a_folder_for_all_latents_and_one_for_those_of_a_dataset(self, tmp_path: Path) -> None:
        found = cache_folders(
            config(
                tmp_path, {"path": "p"}, {"path": "p", "cache_dir": str(tmp_path / "own")},
                cache={"vae_cache_dir": str(tmp_path / "vae")},
            )
        )  # fmt: skip
        assert found.latents("d0") == tmp_path / "vae" / "latents"
        assert found.latents("d1") == tmp_path / "own" / "latents"
        assert found.latents("d0", 2) == tmp_path / "vae" / "epochs" / "2"
        assert found.text() == tmp_path / "out" / "cache" / "text"
        assert found.epoch_folders() == [tmp_path / name / "epochs" for name in ("out/cache", "own", "vae")]

    def test_finds_epochs_that_are_there(self, tmp_path: Path) -> None:
        folders = CacheFolders(tmp_path / "a", tmp_path / "a", {"d1": tmp_path / "b"})
        for name in ("a/epochs/0", "a/epochs/10", "b/epochs/2", "a/epochs/notes", "a/epochs/007"):
            (tmp_path / name).mkdir(parents=True)
        assert {epoch for epoch, _ in folders.epochs()} == {0, 2, 10}

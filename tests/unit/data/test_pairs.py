"""Pairing of edit sources, references and masks by file name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gracetune.data.errors import DataError
from gracetune.data.index import DataIndex
from gracetune.data.loader import Loader
from gracetune.data.pairs import MismatchedPairsError
from gracetune.data.refs import BatchRef, Bucket, Canny, MaskRef, SampleRef
from gracetune.errors import ConfigError
from unit.data.folders import image, index_of, write
from unit.data.media.generated import image_bytes

STRICT, LOOSE = "reference_strict", "reference_loose"


def edit(
    tmp_path: Path,
    targets: dict[str, bytes | str],
    *references: dict[str, bytes | str],
    kind: str = LOOSE,
    **values: Any,
) -> DataIndex:
    folder = write(tmp_path / "target", targets)
    names = [f"d{number}" for number in range(1, len(references) + 1)]
    conditioning = [
        {
            "path": str(write(tmp_path / name, files)),
            "dataset_type": "conditioning",
            "conditioning_type": kind,
            "resolution": 48.0,
        }
        for name, files in zip(names, references, strict=True)
    ]
    return index_of(tmp_path, {"path": str(folder), "conditioning": names, **values}, *conditioning)


def refs(index: DataIndex) -> dict[str, SampleRef]:
    loader = Loader(index, batch_size=4)
    found: dict[str, SampleRef] = {}
    while isinstance(batch := loader.next_batch(), BatchRef):
        found |= {sample.path: sample for sample in batch.samples}
    return found


class TestReferences:
    def test_are_found_by_name_whatever_the_extension_and_in_the_order_of_the_datasets(self, tmp_path: Path) -> None:
        index = edit(tmp_path, {"a.png": image(), "s/b.png": image(seed=1)},
                     {"a.jpg": image(kind="JPEG"), "s/b.webp": image(kind="WEBP")},
                     {"a.png": image(seed=5), "b.png": image(seed=6)})  # fmt: skip
        found = refs(index)
        assert [(one.dataset, one.path) for one in found["a.png"].conditioning] == [("d1", "a.jpg"), ("d2", "a.png")]
        # Another folder, but the only file of that name.
        assert [(one.dataset, one.path) for one in found["s/b.png"].conditioning] == [
            ("d1", "s/b.webp"),
            ("d2", "b.png"),
        ]

    def test_a_dataset_may_name_its_targets_instead(self, tmp_path: Path) -> None:
        index = index_of(
            tmp_path,
            {"path": str(write(tmp_path / "a", {"1.png": image()}))},
            {"path": str(write(tmp_path / "b", {"1.png": image()})), "dataset_type": "conditioning",
             "source_dataset_id": "d0"},
        )  # fmt: skip
        assert [one.dataset for one in refs(index)["1.png"].conditioning] == ["d1"]

    def test_strict_ones_are_scaled_and_cut_exactly_as_the_target(self, tmp_path: Path) -> None:
        crop = {"enabled": True, "style": "random"}
        index = edit(tmp_path, {"a.png": image(200, 100)}, {"a.png": image(100, 50)}, kind=STRICT, crop=crop)
        target = refs(index)["a.png"]
        source = target.conditioning[0]
        assert target.fit is not None
        assert source.fit is not None
        assert source.bucket == target.bucket
        assert source.fit.original == (100, 50)
        assert (source.fit.resized, source.fit.left, source.fit.top) == (
            target.fit.resized, target.fit.left, target.fit.top)  # fmt: skip
        assert target.fit.left > 0

    def test_loose_ones_keep_their_shape_and_batches_do_not_mix_shapes(self, tmp_path: Path) -> None:
        targets = {f"{n}.png": image(seed=n) for n in range(4)}
        shapes = ((64, 64), (64, 64), (128, 64), (128, 64))
        index = edit(tmp_path, targets, {f"{n}.png": image(*shapes[n], seed=n) for n in range(4)})
        groups = index.order(4).groups
        assert [(group.shape, group.samples) for group in groups] == [
            ((Bucket(64, 64), Bucket(48, 48)), (0, 1)),
            ((Bucket(64, 64), Bucket(64, 32)), (2, 3)),
        ]

    def test_flips_are_those_of_the_target(self, tmp_path: Path) -> None:
        index = edit(tmp_path, {f"{n}.png": image(seed=n) for n in range(8)},
                     {f"{n}.png": image(seed=n + 50) for n in range(8)}, augmentation={"flip_x": True})  # fmt: skip
        found = refs(index).values()
        assert {ref.augmentation.flip_x for ref in found} == {False, True}
        for ref in found:
            assert ref.conditioning[0].augmentation.flip_x == ref.augmentation.flip_x
            assert ref.conditioning[0].augmentation.of == ref.digest

    def test_it_decodes(self, tmp_path: Path) -> None:
        index = edit(tmp_path, {"a.png": image(200, 100)}, {"a.png": image(100, 50)}, {"a.png": image(50, 80)})
        sample = index.load(refs(index)["a.png"])
        assert sample.pixels is not None
        assert [tuple(one.pixels.shape) for one in sample.conditioning if one.pixels is not None] == [
            (3, 32, 64),
            (3, 64, 32),
        ]


class TestEdges:
    """References that are made of the images themselves."""

    def test_each_image_s_own_edges_are_cut_and_flipped_with_it(self, tmp_path: Path) -> None:
        files = {f"{n}.{kind}": image(200, 100, seed=n) for n, kind in enumerate(("png", "jpg"))}
        crop = {"enabled": True, "style": "random"}
        settings = {"path": str(write(tmp_path / "a", {**files, "0.webp": image(200, 100, seed=9, kind="WEBP")}))}
        options = {"canny_reference": {"low_threshold": 20}, "crop": crop, "augmentation": {"flip_x": True}}
        index = index_of(tmp_path, {**settings, **options})
        found = refs(index)
        assert sorted(found) == ["0.png", "0.webp", "1.jpg"]  # files of one name are no matter
        for target in found.values():
            (edges,) = target.conditioning
            assert (edges.path, edges.digest, edges.canny) == (target.path, target.digest, Canny(20, 100))
            assert (edges.fit, edges.bucket, target.canny) == (target.fit, target.bucket, None)
            assert edges.augmentation.flip_x == target.augmentation.flip_x
        sample = index.load(found["1.jpg"])
        assert sample.pixels is not None
        assert sample.conditioning[0].pixels is not None
        assert sample.conditioning[0].pixels.shape == sample.pixels.shape
        assert not torch.equal(sample.conditioning[0].pixels, sample.pixels)

    def test_they_come_after_the_references_of_other_datasets(self, tmp_path: Path) -> None:
        found = refs(edit(tmp_path, {"a.png": image()}, {"a.png": image(seed=1)}, canny_reference={}))["a.png"]
        assert [(one.dataset, one.canny) for one in found.conditioning] == [("d1", None), ("d0", Canny(50, 100))]

    def test_damage_is_counted_once(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a", {f"{number}.png": image(seed=number) for number in range(4)})
        index = index_of(tmp_path, {"path": str(folder), "canny_reference": {}, "corrupt_threshold": 0.5})
        smaller = index.without({"d0": {"2.png": "damaged"}})
        assert [(one.path, one.reason) for one in smaller.datasets[0].unreadable] == [("2.png", "damaged")]
        assert len(smaller.datasets[0].items) == 3


TARGETS: dict[str, bytes | str] = {f"{number}.png": image(seed=number) for number in range(4)}


class TestMismatches:
    def test_a_missing_reference_stops_the_run_and_names_the_target(self, tmp_path: Path) -> None:
        with pytest.raises(MismatchedPairsError) as error:
            edit(tmp_path, TARGETS, {"0.png": image(), "1.png": image(), "2.png": image()})
        for words in ("1 of 4 targets", "3.png: no reference in d1", "corrupt_threshold"):
            assert words in str(error.value)

    def test_up_to_the_threshold_it_is_left_out_with_a_note(self, tmp_path: Path) -> None:
        sources = {"0.png": image(), "1.png": image(), "2.png": image(), "other.png": image()}
        index = edit(tmp_path, TARGETS, sources, corrupt_threshold=0.25).datasets[0]
        assert [item.path for item in index.items] == ["0.png", "1.png", "2.png"]
        assert [(one.path, one.reason) for one in index.dropped] == [("3.png", "no reference in d1")]
        assert index.notes[0] == "1 image of d1 without a target: other.png"

    def test_a_strict_reference_of_another_shape(self, tmp_path: Path) -> None:
        with pytest.raises(MismatchedPairsError, match=r"a different shape \(100x64 for 64x64.*reference_loose"):
            edit(tmp_path, {"a.png": image()}, {"a.png": image(100, 64)}, kind=STRICT)

    def test_two_references_of_one_name(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"dataset d1: files with the same name[\s\S]*a\.jpg, a\.png"):
            edit(tmp_path, {"a.png": image()}, {"a.png": image(), "a.jpg": image(kind="JPEG")})

    def test_an_unreadable_reference(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"0\.png: the file is empty"):
            edit(tmp_path, TARGETS, {**TARGETS, "0.png": b""})

    def test_a_reference_dataset_that_is_disabled(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="d1, which is disabled"):
            index_of(
                tmp_path,
                {"path": str(write(tmp_path / "a", TARGETS)), "conditioning": ["d1"]},
                {"path": "x", "dataset_type": "conditioning", "disabled": True},
            )

    def test_a_damaged_reference_also_excludes_its_target(self, tmp_path: Path) -> None:
        index = edit(tmp_path, TARGETS, TARGETS, corrupt_threshold=0.5)
        smaller = index.without({"d1": {"2.png": "damaged"}})
        assert [item.path for item in smaller.datasets[0].items] == ["0.png", "1.png", "3.png"]


class TestMasks:
    def test_from_a_folder(self, tmp_path: Path) -> None:
        grey = image_bytes(Image.new("L", (32, 32), 128))
        folder = write(tmp_path / "data", {"a.jpg": image(kind="JPEG"), "b.png": image(seed=1), "c.png": image(seed=2)})
        masks = write(tmp_path / "masks", {"a.png": grey, "b.png": image_bytes(Image.new("L", (64, 32)))})
        index = index_of(
            tmp_path, {"path": str(folder), "mask": {"path": str(masks), "min_weight": 0.5, "invert": True}}
        )
        found = refs(index)
        assert found["a.jpg"].mask is not None
        assert found["a.jpg"].mask.dataset == "d0:masks"
        assert (found["a.jpg"].mask.path, found["a.jpg"].mask.min_weight, found["a.jpg"].mask.invert) == (
            "a.png", 0.5, True)  # fmt: skip
        assert found["c.png"].mask is None
        assert "1 sample without a mask, trained on the whole area: c.png" in index.datasets[0].notes
        assert [(one.path, one.reason) for one in index.datasets[0].dropped] == [
            ("b.png", "its mask has a different shape")
        ]
        mask = index.load(found["a.jpg"]).mask
        assert mask is not None
        assert float(mask.mean()) == pytest.approx(0.75, abs=0.01)

    def test_from_a_conditioning_dataset(self, tmp_path: Path) -> None:
        index = edit(tmp_path, {"a.png": image()}, {"a.png": image()}, kind="mask")
        ref = refs(index)["a.png"]
        assert ref.mask is not None
        assert (ref.mask.dataset, ref.mask.path, ref.conditioning) == ("d1", "a.png", ())

    def test_from_the_alpha_channel(self, tmp_path: Path) -> None:
        clear = image_bytes(Image.new("RGBA", (64, 64), (200, 0, 0, 64)))
        folder = write(tmp_path / "data", {"a.png": clear, "b.png": image()})
        index = index_of(tmp_path, {"path": str(folder), "mask": {"from_alpha": True, "min_weight": 0.1}})
        found = refs(index)
        assert found["a.png"].mask == MaskRef("d0", "a.png", found["a.png"].digest, True, 0.1)
        assert found["b.png"].mask is None
        assert "1 sample without an alpha channel, trained on the whole area: b.png" in index.datasets[0].notes

"""Image sizes as SDXL gets them, and the weights of masks: configs of the peers, against their own code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.cache.batches import Batch, SampleKeys
from gracetune.cache.collate import collate
from gracetune.cache.encoder import EncoderId
from gracetune.config.run_config import RunConfig
from gracetune.data.index import NO_CAPTION
from gracetune.data.index_builder import build_index
from gracetune.data.refs import BatchRef, Bucket, SampleRef
from gracetune.models.common.encoding import latent_mask
from gracetune.models.registry import spec_of
from gracetune.train.step import loss_mask
from unit.data.folders import image
from unit.fidelity.recorded import aitoolkit, geometry, recorded, simpletuner, values

AITOOLKIT = recorded("aitoolkit", "sizes")
SIMPLETUNER = recorded("simpletuner", "buckets")["time_ids"]
LATENT, TEXT = EncoderId("latent", "x", ()), EncoderId("text", "x", ())


def time_ids(config: RunConfig, ref: SampleRef) -> list[float]:
    """As a batch has them, where the cache has others."""
    keys = SampleKeys(LATENT, TEXT, per_use=spec_of(config.model.family).per_use(config.model))
    cached: Mapping[str, torch.Tensor] = {"time_ids": torch.full((6,), -1.0)}
    found: list[float] = keys.used(cached, ref)["time_ids"].tolist()
    return found


def test_ai_toolkit_tells_the_bucket_s_size(tmp_path: Path) -> None:
    (images := tmp_path / "images").mkdir()
    for number, case in enumerate(AITOOLKIT["time_ids"]):
        height, width = (8 * side for side in case["latents"])
        Image.new("RGB", (width, height), (number, 0, 0)).save(images / f"{number}.png", compress_level=1)
    entry = {"folder_path": str(images), "resolution": 1024}
    config = aitoolkit(tmp_path, "sdxl", datasets=[entry]).config
    found = {batch.samples[0].path: time_ids(config, batch.samples[0]) for batch in values(config, 5)}
    assert found == {f"{number}.png": case["time_ids"] for number, case in enumerate(AITOOLKIT["time_ids"])}


def test_simpletuner_tells_the_scaled_size_and_zeros_where_a_caption_is_dropped(tmp_path: Path) -> None:
    (images := tmp_path / "images").mkdir()
    sizes = [tuple(case["size"]) for case in SIMPLETUNER if not case["dropped"]]
    for width, height in sizes:
        image = Image.new("RGB", (width, height), (width % 256, height % 256, 0))
        image.save(images / f"{width}x{height}.png", compress_level=1)
    entry = {"instance_data_dir": str(images), "resolution": 1024, "crop_style": "center"}
    options = {"caption_dropout_probability": 0.5, "train_batch_size": 1}
    config = simpletuner(tmp_path, "sdxl", datasets=[entry], **options).config
    found: dict[tuple[str, bool], list[float]] = {}
    for batch in values(config, 12 * len(sizes)):
        ref = batch.samples[0]
        found[Path(ref.path).stem, ref.caption.dropped] = time_ids(config, ref)
    theirs = {("x".join(map(str, case["size"])), case["dropped"]): case["time_ids"] for case in SIMPLETUNER}
    assert found == theirs


def test_a_native_config_tells_the_file_s_size_as_it_is_cached() -> None:
    config = RunConfig.model_validate({
        "name": "n", "output_dir": "o", "model": {"family": "sdxl"}, "datasets": [{"id": "d", "path": "p"}],
    })  # fmt: skip
    assert spec_of("sdxl").per_use(config.model) is None


# -- masks -------------------------------------------------------------------------------------------------------------


def mask(kind: str) -> bytes:
    side = AITOOLKIT["side"]
    image = np.zeros((side, side), np.uint8)
    if kind == "left half":
        image[:, : side // 2] = 255
    elif kind == "small square":
        image[32:64, 48:80] = 255
    else:
        image[:] = 128
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("case", AITOOLKIT["masks"], ids=lambda case: f"{'+'.join(case['masks'])}-{case['options']}")
def test_ai_toolkit_s_mask_weights(tmp_path: Path, case: dict[str, Any]) -> None:
    """At the size of the latents, divided by their mean over the batch."""
    side = AITOOLKIT["side"]
    images, masks = tmp_path / "images", tmp_path / "masks"
    images.mkdir()
    masks.mkdir()
    for number, kind in enumerate(case["masks"]):
        (images / f"{number}.png").write_bytes(image(side, side, seed=number))
        (masks / f"{number}.png").write_bytes(mask(kind))
    entry = {"folder_path": str(images), "resolution": side, "mask_path": str(masks), **case["options"]}
    config = aitoolkit(tmp_path, "sdxl", datasets=[entry], train={"batch_size": len(case["masks"])}).config
    index = build_index(config, geometry(config))
    refs = sorted(values(config, 1)[0].samples, key=lambda ref: ref.path)
    entries = []
    for ref in refs:
        weights = index.load(ref).mask
        assert weights is not None
        entries.append({"loss_mask": latent_mask(weights, (side // 8, side // 8))})
    tensors = {name: part.build() for name, part in collate(entries, [ref.path for ref in refs]).items()}
    batch = Batch(BatchRef(tuple(refs), refs[0].bucket, (0,) * len(refs), 0, len(refs)), tensors)
    ours = loss_mask(batch)
    assert ours is not None
    np.testing.assert_allclose(ours[:, 0].numpy(), np.array(case["weights"]), rtol=2e-3, atol=1e-4)


def test_a_mask_that_hides_everything_is_no_division_by_zero() -> None:
    ref = SampleRef("d", "p", "x", Bucket(64, 64), None, NO_CAPTION, normalises_mask=True)
    batch = Batch(BatchRef((ref,), ref.bucket, (0,), 0, 1), {"loss_mask": torch.zeros(1, 1, 8, 8)})
    found = loss_mask(batch)
    assert found is not None
    assert not found.any()

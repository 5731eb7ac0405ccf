"""References that SimpleTuner generates from the images: edges, against its own code, and files that ask for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gracetune.config.dataset_config import Dataset
from gracetune.data.media.edges import BAND, canny_edges
from gracetune.data.refs import Canny
from unit.config.simpletuner_files import problems, resolve
from unit.fidelity.recorded import recorded

CASES = [{**image, **case} for image in recorded("simpletuner", "edges") for case in image["cases"]]
KONTEXT = {"model_family": "flux", "model_flavour": "kontext"}


def pixels_of(case: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    width, height = case["size"]
    return np.frombuffer(bytes.fromhex(case["pixels"]), np.uint8).reshape(height, width, 3)


def edges_of(case: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    width, height = case["size"]
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(case["edges"]), np.uint8))
    return bits[: width * height].reshape(height, width).astype(bool)


def entry(**conditioning: Any) -> dict[str, Any]:
    return {"id": "a", "type": "local", "instance_data_dir": "a", "conditioning": {"type": "canny", **conditioning}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['picture']}{[*case['thresholds'].values()]}")
def test_edges_are_simpletuner_s(case: dict[str, Any], tmp_path: Path) -> None:
    """With the thresholds that a file of it gives, or leaves out."""
    (dataset,) = resolve(tmp_path, KONTEXT, datasets=[entry(**case["thresholds"])]).config.datasets
    requested = dataset.canny_reference
    assert requested is not None
    found = canny_edges(Image.fromarray(pixels_of(case)), Canny(requested.low_threshold, requested.high_threshold))
    values = np.asarray(found)
    assert (values.shape, set(np.unique(values))) == ((*edges_of(case).shape, 3), {0, *(255 * edges_of(case)).ravel()})
    assert (values[..., 0] == 255 * edges_of(case)).all()
    assert (values == values[..., :1]).all()


def test_bands_do_not_show() -> None:
    random = np.random.default_rng(0).integers(0, 256, (40, 5, 3), dtype=np.uint8)
    tall = Image.fromarray(random).resize((24, BAND + 90), Image.Resampling.BICUBIC)
    thresholds = Canny(60, 60)  # no edge depends on one further away
    whole = np.asarray(canny_edges(tall, thresholds))
    middle = np.asarray(canny_edges(tall.crop((0, BAND - 40, 24, BAND + 40)), thresholds))
    assert (whole[BAND - 34 : BAND + 34] == middle[6:-6]).all()
    assert 0 < whole[BAND - 2 : BAND + 2].mean() < 255


def test_the_recorded_edges_are_some_and_differ_with_the_thresholds() -> None:
    shares = {case["picture"]: [] for case in CASES}  # type: dict[str, list[float]]
    for case in CASES:
        shares[case["picture"]].append(float(edges_of(case).mean()))
    assert all(len(set(found)) > 1 for name, found in shares.items() if name != "sliver"), shares


def test_what_saving_edges_as_jpeg_changes_there() -> None:
    """The figure of docs/fidelity.md."""
    differences = []
    for case in CASES:
        edges = Image.fromarray(np.where(edges_of(case), 255, 0).astype(np.uint8)).convert("RGB")
        buffer = io.BytesIO()
        edges.save(buffer, "JPEG")
        saved = np.asarray(Image.open(buffer)).astype(int)
        differences.append(np.abs(saved - np.asarray(edges)).mean())
    assert float(np.mean(differences)) == pytest.approx(1.55, abs=0.1)


class TestFiles:
    def read(self, tmp_path: Path, **conditioning: Any) -> tuple[Dataset, str]:
        resolved = resolve(tmp_path, KONTEXT, datasets=[entry(**conditioning)])
        return resolved.config.datasets[0], "\n".join(resolved.notes)

    def test_what_is_said(self, tmp_path: Path) -> None:
        dataset, notes = self.read(tmp_path, captions=["minecraft"], conditioning_type="controlnet")
        assert dataset.canny_reference is not None
        assert "[0].conditioning: edges are trained on as they are" in notes
        assert "captions of generated references are not used" in notes

    def test_a_list_of_one_and_its_other_name(self, tmp_path: Path) -> None:
        one = [{**entry(), "conditioning": [{"type": "edges", "low_threshold": 30}]}]
        (dataset,) = resolve(tmp_path, KONTEXT, datasets=one).config.datasets
        assert dataset.canny_reference is not None
        assert dataset.canny_reference.low_threshold == 30

    def test_they_take_the_place_of_other_references(self, tmp_path: Path) -> None:
        others = {"id": "b", "type": "local", "instance_data_dir": "b", "dataset_type": "conditioning"}
        resolved = resolve(tmp_path, KONTEXT, datasets=[{**entry(), "conditioning_data": "b"}, others])
        assert resolved.config.datasets[0].conditioning == ()
        assert "conditioning_data: replaced by what `conditioning` generates" in "\n".join(resolved.notes)

    def test_a_model_without_references_uses_none(self, tmp_path: Path) -> None:
        resolved = resolve(tmp_path, {"model_family": "flux", "model_flavour": "dev"}, datasets=[entry()])
        assert resolved.config.datasets[0].canny_reference is None
        assert "[0].conditioning: no effect, because dev takes no references" in "\n".join(resolved.notes)

    @pytest.mark.parametrize(
        ("conditioning", "key"),
        [
            ({"type": "depth"}, "[0].conditioning"),
            ([{"type": "canny"}, {"type": "depth"}], "[0].conditioning"),
            ("canny", "[0].conditioning"),
            ({"type": "canny", "conditioning_type": "mask"}, "[0].conditioning.conditioning_type"),
            ({"type": "canny", "low_treshold": 3}, "[0].conditioning.low_treshold"),
            ({"type": "canny", "low_threshold": 300}, "[0].conditioning.low_threshold"),
            ({"type": "canny", "low_threshold": 0}, "[0].conditioning.low_threshold"),
        ],
    )
    def test_what_is_rejected(self, conditioning: Any, key: str, tmp_path: Path) -> None:
        assert list(problems(tmp_path, KONTEXT, datasets=[{**entry(), "conditioning": conditioning}])) == [key]

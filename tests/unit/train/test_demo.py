"""What `gracetune demo` measures with, and the base in the package. tests/runs/test_wheel.py runs the demo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from gracetune.config.environment import Environment
from gracetune.config.resolve import load
from gracetune.config.run_config import Model
from gracetune.models.registry import spec_of
from gracetune.models.source import open_source
from gracetune.train.demo import BASE, HELD_OUT, IMAGES, SHOWN, write_config
from gracetune.train.demo_shapes import BASE_SHAPES, CONCEPT, SIDE, ShapeImage, random_shape, recognize


@pytest.mark.parametrize("shape", [*BASE_SHAPES, CONCEPT])
def test_shapes_are_recognized(shape: str) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        expected = random_shape(generator, (shape,))
        seen = recognize(expected.draw().filter(ImageFilter.GaussianBlur(1)))
        assert (seen.shape, seen.color, seen.background) == (shape, expected.color, expected.background)


def test_nothing_is_recognized_where_no_shape_is() -> None:
    assert recognize(Image.new("RGB", (SIDE, SIDE), "red")).shape is None
    two = ShapeImage("circle", "red", "white", 15, 15, 10).draw()
    two.paste(ShapeImage("circle", "red", "white", 49, 49, 10).draw().crop((32, 32, 64, 64)), (32, 32))
    assert recognize(two).shape is None


def test_the_base_is_a_complete_model() -> None:
    facts = spec_of("sdxl").inspect(open_source(Model(family="sdxl", path=str(BASE))))
    assert facts.schedule.prediction == "v_prediction"
    assert sum(file.stat().st_size for file in BASE.rglob("*")) < 7 * 2**20


def test_the_config_and_its_images(tmp_path: Path) -> None:
    config = load(write_config(tmp_path), environment=Environment({})).config
    captions = [file.read_text(encoding="utf-8") for file in (tmp_path / "stars").glob("*.txt")]
    assert len(captions) == IMAGES
    assert all(CONCEPT in text for text in captions)
    assert config.datasets[0].held_out == HELD_OUT
    assert not {one.prompt for one in config.validation.prompts} & set(captions)
    assert len(config.validation.prompts) == len(SHOWN)

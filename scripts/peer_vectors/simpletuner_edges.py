"""SimpleTuner's Canny edges, as its generator of reference images makes them.

It needs the package `trainingsample`, which finds the edges (0.3.2 was recorded). Images and edges are written as
hexadecimal bytes, the edges with one bit for each pixel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import record, stand_in_for
from PIL import Image
from simpletuner_base import prepare

THRESHOLDS: tuple[dict[str, int], ...] = (
    {},
    {"low_threshold": 20, "high_threshold": 60},
    {"low_threshold": 90, "high_threshold": 250},
)


def images() -> Iterator[tuple[str, Any]]:
    """Name and RGB pixels."""
    random = np.random.default_rng(7)
    y, x = np.mgrid[:28, :44]
    disc = np.where((x - 20) ** 2 + (y - 13) ** 2 < 90, 210, 40)
    ramp = np.minimum(255, 3 * x + 2 * y)
    waves = 128 + 100 * np.sin(x / 3) * np.cos(y / 4)
    yield "disc", np.stack([disc, ramp, 255 - disc], 2)
    yield "waves", np.stack([waves, waves.T[:28, :28].repeat(2, 1)[:, :44], ramp], 2)
    yield "noise", random.integers(0, 256, (24, 31, 3))
    yield "blocks", random.integers(0, 256, (5, 8, 3)).repeat(6, 0).repeat(6, 1)
    yield "sliver", random.integers(0, 256, (2, 9, 3))


def values(peer: Path) -> Any:
    prepare()
    stand_in_for("torchvision")
    from simpletuner.helpers.data_generation.sample_generator import SampleGenerator

    found = []
    for name, pixels in images():
        rgb = np.clip(pixels, 0, 255).astype(np.uint8)
        cases = []
        for thresholds in THRESHOLDS:
            generator = SampleGenerator.from_backend({"conditioning_config": {"type": "canny", **thresholds}})
            (made,) = generator.transform_batch([Image.fromarray(rgb)], [name], [{}], None)
            edges = np.asarray(made)
            assert (edges == edges[..., :1]).all()
            assert set(np.unique(edges)) <= {0, 255}
            cases.append({"thresholds": thresholds, "edges": np.packbits(edges[..., 0] > 0).tobytes().hex()})
        size = [rgb.shape[1], rgb.shape[0]]
        found.append({"picture": name, "size": size, "pixels": rgb.tobytes().hex(), "cases": cases})
    return found


if __name__ == "__main__":
    record("edges", values)

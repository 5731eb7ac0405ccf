"""Each family's data requirements, compared with its published architecture on other sizes."""

from __future__ import annotations

import pytest

from gracetune.config.families import FAMILIES, flavours
from gracetune.config.run_config import Model
from gracetune.models.footprint import AudioLatents
from gracetune.models.registry import FOOTPRINTS, GEOMETRIES, geometry, geometry_of


def test_every_flavour_has_one_in_the_order_of_the_names() -> None:
    assert list(GEOMETRIES) == list(FAMILIES)
    for family in FAMILIES:
        assert list(GEOMETRIES[family]) == [flavour.name for flavour in flavours(family)]
        assert {name: found.makes for name, found in GEOMETRIES[family].items()} == {
            flavour.name: flavour.makes for flavour in flavours(family)
        }


@pytest.mark.parametrize(
    ("family", "flavour", "multiple"),
    [
        ("wan", "t2v-14b-2.2", 16),
        ("wan", "ti2v-5b-2.2", 32),
        ("qwen_image", "edit-2509", 16),
        ("flux", "dev", 16),
        ("flux2", "dev", 16),
        ("z_image", "base", 16),
        ("krea2", "raw", 16),
        ("sdxl", "base-1.0", 32),
    ],
)
def test_sides(family: str, flavour: str, multiple: int) -> None:
    assert geometry(family, flavour).side_multiple == multiple


def test_clips() -> None:
    wan = geometry("wan", "t2v-14b-2.2")
    assert (wan.frame_step, wan.default_frames, wan.default_fps) == (4, 81, 16.0)
    small = geometry("wan", "ti2v-5b-2.2")
    assert (small.frame_step, small.default_frames, small.default_fps) == (4, 121, 24.0)


def test_sound() -> None:
    found, footprint = geometry("stable_audio", "open-1.0"), FOOTPRINTS["stable_audio"][0]
    assert isinstance(footprint.latents, AudioLatents)
    assert (found.sample_rate, found.channels, found.audio_multiple) == (44_100, 2, 2048)
    assert found.max_audio_seconds == footprint.latents.longest_seconds


def test_geometry_is_found_like_the_footprint() -> None:
    assert geometry_of(Model(family="wan", path="Wan-AI/Wan2.2-TI2V-5B-Diffusers"))[0].side_multiple == 32
    found, assumption = geometry_of(Model(family="wan", path="/models/mine"))
    assert found.side_multiple == 16
    assert assumption is not None

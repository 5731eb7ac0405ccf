"""Every value of a preset has a public source, and every preset is a config for each of its models."""

from __future__ import annotations

import pytest

from gracetune.config.families import FAMILIES, PACKAGES, find_flavour, names_of
from gracetune.config.run_config import RunConfig
from gracetune.proposal.presets import FOLDER, presets
from unit.config.test_options import options

OPTIONS = {*options(RunConfig)}
PAIRS = [(preset, model) for preset, found in presets().items() for model in found.models]


def test_one_preset_for_each_purpose() -> None:
    assert [*presets()] == ["character", "concept", "edit", "motion", "sound", "style"]


@pytest.mark.parametrize(("preset", "model"), PAIRS)
def test_options_exist_and_have_a_source(preset: str, model: str) -> None:
    family, _, flavour = model.partition("/")
    assert find_flavour(family, flavour) is not None
    found = presets()[preset].options_of(family, flavour)
    assert found["adapter.rank"].value
    for key, option in found.items():
        assert (f"datasets[].{key[8:]}" if key.startswith("dataset.") else key) in OPTIONS
        assert option.source.startswith("https://")
    assert presets()[preset].steps.source.startswith("https://")


@pytest.mark.parametrize("preset", presets())
def test_steps_grow_with_the_dataset(preset: str) -> None:
    steps = presets()[preset].steps
    assert steps.of(1) == steps.least < steps.of(25) < steps.of(10_000) == steps.most


def test_every_family_has_values() -> None:
    text = (FOLDER / "families.yaml").read_text()
    assert all(f"\n  {family}:\n" in text for family in FAMILIES if not PACKAGES.is_installed(family))


@pytest.mark.parametrize("family", [name for name in FAMILIES if not PACKAGES.is_installed(name)])
def test_pipelines_are_those_the_family_loads(family: str) -> None:
    known = names_of(family).pipelines
    load = __import__(f"gracetune.models.{family}.load", fromlist=["load"])
    assert {*known} == ({*load.PIPELINES} if hasattr(load, "PIPELINES") else {load.PIPELINE})

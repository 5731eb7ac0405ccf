"""Any number in any numeric field of a config is either rejected with a message or planned with."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from gracetune.cli.estimate_view import as_json, print_plan
from gracetune.config import Environment, load
from gracetune.config.pydantic_errors import schema
from gracetune.errors import ConfigError, GracetuneError
from gracetune.hardware.recording import load_recording
from gracetune.planning.config_demand import demand_of
from gracetune.planning.plan import plan

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
EXTREMES = ("0", "-1", "1e300", ".nan", ".inf", str(10**30), "5e-324")
STILLS = {
    "gracetune": 1, "name": "run", "output_dir": "out", "model": {"family": "wan"}, "training": {"max_steps": 10},
    "datasets": [{"id": "a", "path": "/nowhere", "type": "in_memory"}], "optimizer": {"betas": [0.9, 0.99]},
    "validation": {"every_steps": 5, "prompts": [{"prompt": "x"}]}, "cache": {"vae_cache_type": "unified_memory"},
}  # fmt: skip
STRIPS = {
    "id": "a", "path": "/nowhere", "resolution_type": "pixel",
    "crop": {"enabled": True, "aspect": "closest", "aspect_buckets": [1.0]},
}  # fmt: skip
DOCUMENTS: dict[str, dict[str, Any]] = {
    "stills": STILLS,
    "strips": {**STILLS, "datasets": [STRIPS]},
    "sounds": {
        **STILLS, "model": {"family": "stable_audio"},
        "datasets": [{"id": "a", "path": "/nowhere", "dataset_type": "audio"}],
    },
}  # fmt: skip


def numbers(node: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every numeric field of a config, with its schema."""
    if "$ref" in node:
        node = schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    if node.get("type") in ("integer", "number"):
        yield key, node
    for option in node.get("anyOf", []):
        yield from numbers(option, key)
    for name, field in node.get("properties", {}).items():
        yield from numbers(field, f"{key}.{name}".removeprefix("."))
    items = node.get("prefixItems") or [item for item in [node.get("items")] if item]
    for index, item in enumerate(items):
        yield from numbers(item, f"{key}[{index}]")


def bounds(node: Mapping[str, Any]) -> list[str]:
    """The extreme values that are still valid."""
    step = {"integer": lambda value, _: value - 1, "number": math.nextafter}[node["type"]]
    found = [node[name] for name in ("minimum", "maximum") if name in node]
    found += [step(node["exclusiveMaximum"], 0)] if "exclusiveMaximum" in node else []
    return [str(value) for value in found]


NUMBERS = [*numbers(schema())]


def test_every_number_has_both_bounds() -> None:
    """Makes the author of a new option decide how large it may be."""
    endless = [
        key for key, node in NUMBERS
        if not ({"minimum", "exclusiveMinimum"} & node.keys() and {"maximum", "exclusiveMaximum"} & node.keys())
    ]  # fmt: skip
    assert len(NUMBERS) > 100
    assert not endless


@pytest.mark.parametrize("document", DOCUMENTS)
def test_any_number_is_rejected_with_a_message_or_planned_with(tmp_path: Path, document: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(DOCUMENTS[document]))
    machine = load_recording(MACHINES / ("gh200-numa" if document == "stills" else "cpu-only"))
    planned = 0
    # The other documents differ in their datasets alone.
    for key, node in NUMBERS if document == "stills" else [one for one in NUMBERS if one[0].startswith("datasets")]:
        for value in (*EXTREMES, *bounds(node)):
            try:
                config = load(path, environment=Environment({}), overrides=[f"{key}={value}"]).config
            except ConfigError as error:
                assert all(one.found and one.expected and one.hint for one in error.problems)
                continue
            try:
                demand, _ = demand_of(config, machine, None)
                found = plan(demand, machine)
            except GracetuneError:
                continue
            planned += 1
            json.dumps(as_json(demand, found, machine, ()), allow_nan=False)
            print_plan(demand, found, machine, (), Console(file=io.StringIO()))
    assert planned > 50


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "diag_oft"])
@pytest.mark.parametrize("value", ["x", "-3", "[1]", "1e300", str(10**30)])
@pytest.mark.parametrize("option", ["dim", "factor", "algo"])
def test_options_of_one_module_class(tmp_path: Path, kind: str, option: str, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(STILLS))
    overrides = [f"adapter.kind={kind}", f"adapter.by_module.Attention.{option}={value}"]
    try:
        config = load(path, environment=Environment({}), overrides=overrides).config
        demand_of(config, load_recording(MACHINES / "cpu-only"), None)
    except ConfigError as error:
        assert all(one.found and one.expected and one.hint for one in error.problems)

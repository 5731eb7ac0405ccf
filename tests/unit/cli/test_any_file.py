"""`config check` and `config show` print valid text for any file content."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gracetune.cli.config import check_file, print_checked
from gracetune.config import Environment, load, native
from gracetune.errors import ConfigError
from unit.config.strategies import ODD, mutated
from unit.config.test_aitoolkit_peers import FULL
from unit.config.test_resolve import RICH
from unit.config.test_simpletuner_mutations import FILES

ENVIRONMENT = Environment({"DATA": "/data"})
DOCUMENTS: dict[str, list[Any]] = {"native": [RICH], "ai-toolkit": FULL, "simpletuner": [FILES["config.json"]]}
patient = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def examine(path: Path, overrides: list[str] | None = None) -> None:
    """Run both commands on a file. Returns the bytes that a terminal receives."""
    checked = check_file(path, ENVIRONMENT, overrides, paths=True)
    assert all(problem.key and problem.found and problem.expected and problem.hint for problem in checked.problems)
    page = io.StringIO()
    print_checked(Console(file=page, soft_wrap=True), [checked])
    page.getvalue().encode()
    json.loads(json.dumps(checked.as_json(), allow_nan=False))
    try:
        resolved = load(path, environment=ENVIRONMENT, overrides=overrides or ())
    except ConfigError:
        return
    native.show(resolved.config, resolved.origins, resolved.redactor).encode()
    text = native.write(resolved.config)
    again = path.with_name("again.yaml")
    again.write_text(text, encoding="utf-8")
    assert load(again, environment=Environment({})).config == resolved.config


@pytest.mark.parametrize("dialect", DOCUMENTS)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@patient
@given(data=st.data())
def test_any_damaged_file_gives_printable_output(
    tmp_path: Path, dialect: str, suffix: str, data: st.DataObject
) -> None:
    document = data.draw(st.sampled_from(DOCUMENTS[dialect]).flatmap(mutated))
    for name, sidecar in FILES.items():
        (tmp_path / name).write_text(json.dumps(sidecar), encoding="utf-8")
    path = tmp_path / f"run{suffix}"
    path.write_text(json.dumps(document) if suffix == ".json" else yaml.safe_dump(document), encoding="utf-8")
    examine(path)


@settings(patient, max_examples=30)
@given(
    key=st.sampled_from(["name", "output_dir", "datasets[0].path", "datasets[0]", "optimizer.options.x", "optimizer",
                         "adapter.by_module.y", "model", "validation.prompts", "memory.uvm_stage1_min_bytes"]),
    value=st.text(max_size=30) | ODD.map(str),
)  # fmt: skip
def test_any_override_gives_printable_output(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RICH), encoding="utf-8")
    examine(path, [f"{key}={value}"])

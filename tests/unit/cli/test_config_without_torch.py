"""`config check` and `config show` import no torch in any dialect, so that they take half a second on a laptop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.config.aitoolkit_jobs import job
from unit.config.simpletuner_files import DATASETS, GOOD

SRC = Path(__file__).resolve().parents[3] / "src"
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "lycoris")
FILES: dict[str, dict[str, Any]] = {
    "native": {
        "gracetune": 1, "name": "x", "output_dir": "out", "model": {"family": "qwen_image", "flavour": "edit-2509"},
        "datasets": [{"id": "a", "path": "a", "type": "in_memory", "conditioning": ["b"],
                      "in_memory": {"memory_limit_gb": 1}},  # compared with this machine's memory
                     {"id": "b", "path": "b", "dataset_type": "conditioning", "conditioning_type": "reference_loose"}],
        "training": {"max_steps": 3}, "memory": {"use_uvm": True, "uvm_oversubscription_ratio": 1.5},
    },
    "simpletuner": GOOD,
    "ai-toolkit": job(),
}  # fmt: skip
PROGRAM = """
import contextlib, io, json, sys
from gracetune.cli.main import main

*files, heavy = sys.argv[1:]
answers = []
for arguments in (
    ["config", "check", "--json", *files], ["config", "check", *files], ["config", "schema"],
    *(["config", "show", "--json", file] for file in files), *(["config", "show", file] for file in files),
):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(arguments)
        except SystemExit as end:
            answers.append([end.code, out.getvalue()])
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(heavy.split()))
print(json.dumps({"answers": answers, "loaded": loaded}))
"""  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of one process that runs both commands on a file of each dialect."""
    folder = tmp_path_factory.mktemp("configs")
    for name in ("a", "b"):
        (folder / name).mkdir()
    for dialect, document in FILES.items():
        (folder / f"{dialect}.json").write_text(json.dumps(document))
    (folder / "datasets.json").write_text(json.dumps(DATASETS))
    command = [sys.executable, "-c", PROGRAM, *(f"{dialect}.json" for dialect in FILES), " ".join(HEAVY)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_no_model_code_is_imported(found: dict[str, Any]) -> None:
    assert found["loaded"] == []


def test_every_dialect_was_read(found: dict[str, Any]) -> None:
    (_, checked), _, (schema_code, schema), *shown = found["answers"]
    assert [file["dialect"] for file in json.loads(checked)["files"]] == list(FILES)
    assert schema_code == 0
    assert json.loads(schema)["$defs"]
    assert [code for code, _ in shown] == [0] * 6
    assert [json.loads(text)["config"]["model"]["family"] for _, text in shown[:3]] == ["qwen_image", "wan", "wan"]

"""An adapter algorithm of another package, with one file and one entry point: a complete run trains it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from runs.made_runs import TinyModel, config_for

ROOT = Path(__file__).resolve().parents[2]
ALGORITHM = '''
"""The outer product of a column and a row."""

from gracetune.adapters.algorithms.matrices import reshape_change
from gracetune.adapters.algorithms.record import Algorithm


class Outer(Algorithm):
    name = "outer"
    has_rank = False
    zero_at_first = frozenset({"outer_column"})
    file_tensors = ("outer_column", "outer_row")
    needed = frozenset(file_tensors)
    marks = ("outer_",)

    def shapes(self, layer, options):
        across = layer.inputs
        for side in layer.kernel:
            across *= side
        return {"outer_column": (layer.outputs,), "outer_row": (across,)}

    def first_values(self, layer, options):
        import torch

        rows = layer.weight.flatten(1)
        return {"outer_column": torch.zeros(rows.shape[0]), "outer_row": torch.randn(rows.shape[1])}, None

    def added(self, tensors, shape):
        return reshape_change(tensors["outer_column"].unsqueeze(1) * tensors["outer_row"], shape)

    def outputs(self, tensors):
        return tensors["outer_column"].numel()

    def columns(self, tensors):
        return tensors["outer_row"].numel()


ALGORITHM = Outer()
'''
COMMANDS = """
import sys
from gracetune.cli.main import main

job, file, model = sys.argv[1:]
for arguments in (
    ["config", "check", "--json", job],
    ["estimate", "--json", job],
    ["train", "--json", job],
    ["train", "--json", job, "--set", f"output_dir={file}-other", "--set", "checkpoints.format=comfyui"],
    ["adapter", "inspect", "--json", file],
    ["adapter", "convert", "--json", file, "--to", "comfyui", "--lora-rank", "1", "--model", model],
    ["adapter", "convert", "--json", file, "--to", "comfyui"],
):
    try:
        main(arguments)
    except SystemExit as done:
        # The plan's machine may be too small for the real SDXL, and ComfyUI does not know the algorithm.
        assert not done.code or arguments[0] == "estimate" or arguments[-1].endswith("comfyui"), arguments
    print("\\0")
"""


def test_it_is_checked_planned_trained_written_and_read(tmp_path: Path, tiny_model: TinyModel) -> None:
    (tmp_path / "outer_adapter.py").write_text(ALGORITHM)
    metadata = tmp_path / "outer-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outer\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[gracetune.adapters]\nouter = outer_adapter:ALGORITHM\n")
    config = config_for("sdxl", tiny_model, tmp_path, training={"max_steps": 2, "mixed_precision": "fp32"})
    values = config.model_dump(mode="json", exclude_defaults=True)
    values |= {"gracetune": 1, "adapter": {"kind": "outer"}, "checkpoints": {"format": "lycoris"}}
    job = tmp_path / "job.json"
    job.write_text(json.dumps(values))
    file = tmp_path / "out" / "tiny.safetensors"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(tmp_path)))}
    command = [sys.executable, "-c", COMMANDS, str(job), str(file), values["model"]["path"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    answers = (json.loads(text) for text in done.stdout.split("\0")[:7])
    checked, planned, trained, unwritable, inspected, converted, rejected = answers
    assert checked["files"][0]["problems"] == []
    assert planned["run"] == "sdxl base-1.0, outer, adamw"
    assert trained["outcome"] == "finished"
    assert any("no program that we know loads outer" in note for note in checked["files"][0]["notes"])
    (problem,) = unwritable["problems"]
    assert (problem["key"], problem["hint"]) == ("checkpoints.format", "--set checkpoints.format=lycoris")
    assert "ComfyUI does not know outer" in problem["found"]
    (found,) = inspected["files"]
    assert found["usable"]
    assert [(one["algorithms"], one["unchanged_layers"]) for one in found["adapters"]] == [(["outer"], [])]
    assert converted["written"][0]["algorithms"] == ["lora"]
    assert converted["written"][0]["relative_error"] < 1e-6  # an outer product is a LoRA of rank 1
    assert "ComfyUI does not know outer" in rejected["problems"][0]["found"]

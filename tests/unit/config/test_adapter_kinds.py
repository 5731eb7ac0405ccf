"""Adapter algorithms of other installed packages, as a config sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[3] / "src"
WHOLE = """
from gracetune.adapters.algorithms.lora import Lora
class Mine(Lora):
    name = {name!r}
    lycoris_name = "lokr"
    own_options = ("decompose_both", "rank")
ALGORITHM = Mine()
"""
BROKEN = {
    "unimportable": ("import nosuchmod", "unimportable_module:ALGORITHM cannot be imported: ModuleNotFoundError"),
    "raising": ("ALGORITHM = {}['a']", "raising_module:ALGORITHM cannot be imported: KeyError: 'a'"),
    "nameless": ("", "nameless_module:ALGORITHM cannot be imported: AttributeError"),
    "word": ("ALGORITHM = 'word'", "'word'"),
    "misnamed": (WHOLE.format(name="other"), "an algorithm called other"),
}


def test_a_broken_package_stops_the_check_of_its_own_configs_only(tmp_path: Path) -> None:
    sources = {**{kind: code for kind, (code, _) in BROKEN.items()}, "whole": WHOLE.format(name="whole")}
    for kind, code in sources.items():
        (tmp_path / f"{kind}_module.py").write_text(code)
    for kind in (*sources, "lora"):
        (tmp_path / f"{kind}.yaml").write_text(
            f"gracetune: 1\nname: x\noutput_dir: {tmp_path}/out\nmodel: {{family: wan}}\n"
            f"adapter: {{kind: {kind}, rank: 4}}\n"
            f"datasets: [{{id: a, path: {tmp_path}}}]\ntraining: {{max_steps: 10}}\n"
        )
    metadata = tmp_path / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    points = "".join(f"{kind} = {kind}_module:ALGORITHM\n" for kind in sources)
    (metadata / "entry_points.txt").write_text(f"[gracetune.adapters]\n{points}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SRC), str(tmp_path)))}
    files = [str(tmp_path / f"{kind}.yaml") for kind in (*sources, "lora")]
    command = [sys.executable, "-m", "gracetune.cli.main", "config", "check", "--json", "--no-paths", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    *rejected, whole, ours = json.loads(done.stdout)["files"]
    assert whole["problems"] == ours["problems"] == []
    assert not [note for note in ours["notes"] if "rank" in note], "what another algorithm claims is no note for LoRA"
    for (kind, (_, found)), file in zip(BROKEN.items(), rejected, strict=True):
        (problem,) = file["problems"]
        assert found in problem["found"], kind
        assert kind in problem["key"]

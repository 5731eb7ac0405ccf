"""docs/upstream-status.md is what the recorded facts say, and the script that writes it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gracetune.integrations.status_page import page
from gracetune.integrations.upstreams import SIMPLETUNER
from unit.integrations.stand_in import RECORDED, build, recorded

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "upstream-status.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RECORDED), "run scripts/upstream_status.py"


def test_every_version_and_point_is_on_it() -> None:
    text = page(RECORDED)
    for version in ("4.10.1", "4.8.0", "4.4.1", "4.0.6", "3.3.4", "3.1.6", "0.2.7", "public files"):
        assert f"| {version} |" in text
    assert text.count("| `trainer.init` |") == 2


def test_recording_a_tree_gives_the_facts_it_was_made_from(tmp_path: Path) -> None:
    """The script, in a checkout of its own, on a stand-in for 4.0.6; lines differ, names and parameters do not."""
    tree = build(recorded("simpletuner-4.0.6"), tmp_path / "tree")
    (tree / "simpletuner/__init__.py").write_text('__version__ = "4.0.6"\n')
    checkout = tmp_path / "checkout"
    for folder in ("scripts", "docs"):
        (checkout / folder).mkdir(parents=True)
    script = checkout / "scripts" / "upstream_status.py"
    script.write_text((ROOT / "scripts" / "upstream_status.py").read_text())
    command = [sys.executable, str(script), "record", "simpletuner", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    file = checkout / "tests/golden/upstream/simpletuner-4.0.6.json"
    assert str(tmp_path) not in file.read_text()
    assert f"| 4.0.6 | {len(SIMPLETUNER.points)} | 0 | 0 | 0 |" in (checkout / "docs/upstream-status.md").read_text()
    done = subprocess.run([*command[:-1], str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr

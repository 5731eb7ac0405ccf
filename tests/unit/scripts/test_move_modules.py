from __future__ import annotations

import pytest

from unit.scripts.conftest import SCRIPTS, load_file

SPLIT = """def late():
    from gracetune.data import bench, build as made  # noqa: X
    return bench.run(made)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from gracetune.memory.planning.plan import plan\n", "from gracetune.planning.plan import plan\n"),
        ("from gracetune.memory.planning.footprint import Block\n", "from gracetune.models.footprint import Block\n"),
        ("import gracetune.train.bench.job as job\n", "import gracetune.bench.step.job as job\n"),
        (
            "patch('gracetune.train.probing.SmiLog')\n",
            "patch('gracetune.baselines.machine_probe.SmiLog')\n",
        ),
        ("from gracetune.memory.bench_row import Row\n", "from gracetune.bench.row import Row\n"),
        ("from gracetune.memory import planning\n", "from gracetune import planning\n"),
        ("from gracetune.cache import bench as b\n", "from gracetune.bench import cache as b\n"),
        ("from unit.memory.test_plan import demand\n", "from unit.planning.test_plan import demand\n"),
        ("# see `memory.planning.plan`, train/bench/job.py\n", "# see `planning.plan`, bench/step/job.py\n"),
        ("SHIM = 'src/gracetune/models/wan/norming.py'\n", "SHIM = 'src/gracetune/kernels/fused_norm.py'\n"),
    ],
)
def test_what_refers_to_a_moved_module_is_rewritten(before: str, after: str) -> None:
    script = load_file(SCRIPTS / "move_modules.py")
    assert script.rewritten(before, is_python=True) == after
    assert script.rewritten(after, is_python=True) == after


def test_an_import_of_several_modules_is_split() -> None:
    found = load_file(SCRIPTS / "move_modules.py").rewritten(SPLIT, is_python=True)
    assert found.splitlines()[1:3] == [
        "    from gracetune.data import build as made",
        "    from gracetune.bench import data as bench  # noqa: X",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from gracetune.memory.planning_notes import x\n",
        "from gracetune.train.planning import make_plan\n",
        "memory.bench.run()\n",
        "mine/train/bench/job.py\n",
    ],
)
def test_other_names_are_left_alone(text: str) -> None:
    assert load_file(SCRIPTS / "move_modules.py").rewritten(text, is_python=False) == text


def test_docs_are_rewritten_too() -> None:
    found = load_file(SCRIPTS / "move_modules.py").rewritten("(`telemetry/regression.py`)", is_python=False)
    assert found == "(`baselines/regression.py`)"

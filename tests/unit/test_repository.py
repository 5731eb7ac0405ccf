"""The promises of the repository itself: what it requires, how it is layered, what its tools reject."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def run(*command: str | Path, cwd: Path = ROOT, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, timeout=120, check=False)


class TestRequirements:
    @pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
    def test_each_is_pinned_to_a_version_its_bound_admits(self, requirement: Requirement) -> None:
        assert requirement.specifier.contains(PINS[requirement.name], prereleases=False)

    def test_pins_are_exact_and_fit_every_machine(self) -> None:
        assert PINS["torch"] == "2.13.0"
        assert [name for name, version in PINS.items() if Version(version).local] == []

    def test_a_vendors_prerelease_of_the_oldest_torch_is_admitted(self) -> None:
        torch = next(requirement for requirement in REQUIREMENTS if requirement.name == "torch")
        assert torch.specifier.contains("2.11.0a0+vendor.25.12")
        assert not torch.specifier.contains("2.10.1")

    def test_nothing_ties_us_to_one_kind_of_gpu(self) -> None:
        tied = ("nvidia", "cuda", "triton", "torchvision", "torchaudio", "bitsandbytes", "flash")
        assert [name for name in PINS if name.startswith(tied)] == []


def test_licence_is_apache_2_with_our_name() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "The gracetune authors" in text


class TestImporting:
    def test_takes_under_half_a_second(self) -> None:
        code = "import time; t = time.perf_counter(); import gracetune; print(time.perf_counter() - t)"
        seconds = min(float(run(sys.executable, "-c", code).stdout) for _ in range(3))
        assert seconds < 0.5

    @pytest.mark.parametrize("module", ["gracetune", "gracetune.config", "gracetune.hardware", "gracetune.cli.main"])
    def test_leaves_torch_alone(self, module: str) -> None:
        done = run(sys.executable, "-c", f"import sys, {module}; sys.exit('torch' in sys.modules)")
        assert done.returncode == 0, done.stderr or f"importing {module} imported torch"


class TestLayers:
    """The contracts of pyproject.toml, run on a copy of the package with one bad import in it."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        package = tmp_path / "src" / "gracetune"
        package.mkdir(parents=True)
        for file in ("__init__.py", "errors.py", "redaction.py", "seeded_random.py", "units.py"):
            shutil.copy(ROOT / "src" / "gracetune" / file, package)
        for folder in re.findall(
            r"\w+", "storage telemetry config hardware kernels models planning train baselines bench cli"
        ):
            (package / folder).mkdir()
            (package / folder / "__init__.py").write_text("")
        return tmp_path

    def lint(self, checkout: Path) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as lint; lint()"
        )
        return run(sys.executable, "-c", code, cwd=checkout)

    def add(self, checkout: Path, file: str, line: str) -> None:
        with (checkout / "src" / "gracetune" / file).open("a") as opened:
            opened.write(f"\n{line}\n")

    def test_imports_from_above_are_kept(self, checkout: Path) -> None:
        self.add(checkout, "cli/__init__.py", "import gracetune.train, gracetune.hardware, gracetune.errors")
        self.add(checkout, "train/__init__.py", "import accelerate, gracetune.config")
        self.add(checkout, "telemetry/__init__.py", "import gracetune.storage, gracetune.redaction")
        done = self.lint(checkout)
        assert done.returncode == 0, done.stdout

    @pytest.mark.parametrize(
        ("file", "line"),
        [
            ("config/__init__.py", "import gracetune.hardware"),
            ("errors.py", "from gracetune.telemetry import anything"),
            ("hardware/__init__.py", "import gracetune.kernels"),
            ("models/__init__.py", "from gracetune.planning import anything"),
            ("train/__init__.py", "def later():\n    from gracetune.bench import anything"),
            ("bench/__init__.py", "import gracetune.baselines"),
            ("hardware/__init__.py", "def later():\n    from gracetune.cli import anything"),
            ("telemetry/__init__.py", "import gracetune.units"),
            ("telemetry/__init__.py", "from gracetune.errors import GracetuneError"),
            ("cli/__init__.py", "import accelerate"),
            ("config/__init__.py", "from accelerate import Accelerator"),
            ("newfolder.py", "x = 1"),
        ],
    )
    def test_a_bad_import_is_broken(self, checkout: Path, file: str, line: str) -> None:
        self.add(checkout, file, line)
        done = self.lint(checkout)
        assert done.returncode == 1, done.stdout + done.stderr


class TestRuff:
    @pytest.mark.parametrize(
        ("file", "source", "rejected_by"),
        [
            ("src/gracetune/data/x.py", 'import os\n\nHOME = os.environ["HOME"]\n', "TID251"),
            ("src/gracetune/data/x.py", 'import os\n\nHOME = os.getenv("HOME")\n', "TID251"),
            ("src/gracetune/data/x.py", 'from os import environ\n\nHOME = environ["HOME"]\n', "TID251"),
            ("src/gracetune/data/x.py", "import pickle\n\nload = pickle.load\n", "TID251"),
            ("src/gracetune/data/x.py", "try:\n    x = 1\nexcept Exception:\n    x = 2\n", "BLE001"),
            ("src/gracetune/config/environment.py", 'import os\n\nHOME = os.environ["HOME"]\n', None),
        ],
    )
    def test_rejects_what_the_rules_forbid(self, file: str, source: str, rejected_by: str | None) -> None:
        done = run(sys.executable, "-m", "ruff", "check", "--stdin-filename", file, "-", text=source)
        assert done.returncode == (1 if rejected_by else 0), done.stdout + done.stderr
        if rejected_by:
            assert rejected_by in done.stdout


class TestMarks:
    @pytest.fixture
    def suite(self, tmp_path: Path) -> Path:
        shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
        (tmp_path / "test_marked.py").write_text(
            "import os, pytest, torch\n"
            "@pytest.mark.gpu\n"
            "def test_gpu(): assert torch.cuda.is_available()\n"
            "def test_environment(): assert os.environ['OMP_NUM_THREADS'] == '1' and torch.get_num_threads() == 1\n"
            "def test_no_leak(): assert not {'GH200_UVM_ACCESS_PATTERN', 'PYTORCH_CUDA_ALLOC_CONF'} & set(os.environ)\n"
        )
        return tmp_path

    def test_gpu_runs_or_says_why_not(self, suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
        monkeypatch.setenv("GH200_UVM_ACCESS_PATTERN", "balanced")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        done = run(sys.executable, "-m", "pytest", "-rs", "-c", ROOT / "pyproject.toml", "--rootdir", suite, suite)
        assert "2 passed, 1 skipped" in done.stdout, done.stdout
        assert "no CUDA GPU here" in done.stdout

    def test_an_unknown_mark_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "test_typo.py").write_text("import pytest\n@pytest.mark.gpuu\ndef test_x(): pass\n")
        done = run(sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path)
        assert done.returncode != 0
        assert "gpuu" in done.stdout


class TestBlame:
    """.git-blame-ignore-revs lists commits that only moved files."""

    REVISIONS: ClassVar = [
        line for line in (ROOT / ".git-blame-ignore-revs").read_text().splitlines() if line and line[0] != "#"
    ]

    def test_each_is_a_commit_of_this_history(self) -> None:
        if run("git", "rev-parse", "--is-shallow-repository").stdout.strip() != "false":
            pytest.skip("no git history here, or not all of it")
        outside = [one for one in self.REVISIONS if run("git", "merge-base", "--is-ancestor", one, "HEAD").returncode]
        assert outside == []

    def test_each_is_written_out(self) -> None:
        assert self.REVISIONS
        assert [one for one in self.REVISIONS if not re.fullmatch("[0-9a-f]{40}", one)] == []


class TestMakefile:
    TARGETS = ("demo", "test", "test-full", "storm", "test-gpu", "test-gpu-long", "lint", "clean", "help")

    def test_alone_it_lists_its_targets(self) -> None:
        listed = [line.split()[1] for line in run("make", "--no-print-directory").stdout.splitlines()]
        assert sorted(listed) == sorted(self.TARGETS)

    @pytest.mark.parametrize("target", ["demo", "test", "test-full", "storm", "test-gpu", "test-gpu-long", "lint"])
    def test_a_target_prepares_the_environment_first(self, target: str) -> None:
        steps = run("make", "--no-print-directory", "--dry-run", target).stdout.splitlines()
        assert steps[0] == "bash scripts/bootstrap.sh"
        assert len(steps) > 1

    def test_ci_runs_all_three(self) -> None:
        commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
        assert commands == ["make lint", "make test", "make test-full"]


@pytest.mark.parametrize("lane", ["everyday", "full"])
class TestHalves:
    """`make test` and `make test-full` run two processes; every test file is in one of them, and in one only."""

    SUITE: ClassVar = {"tests/test_a.py": "assert 1", "tests/b/test_b.py": "assert 1", "tests/test_c.py": "assert 0"}

    @pytest.fixture
    def suite(self, tmp_path: Path, lane: str) -> Path:
        for name, body in self.SUITE.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"def test_it(): {body}\n")
        seconds = {"everyday": "seconds.txt", "full": "seconds_full.txt"}[lane]
        (tmp_path / "tests" / seconds).write_text("3.0 b/test_b.py\n2.0 test_a.py\n2.0 test_gone.py\n")
        for name in ("conftest.py", "halves.py"):
            shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        return tmp_path

    def test_each_file_runs_in_one_of_them(self, suite: Path, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
        outcomes = []
        for number in (1, 2):
            monkeypatch.setenv("TEST_HALF", f"{lane}-{number}")
            done = run(sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", cwd=suite)
            outcomes.append({line.split("::")[0] for line in done.stdout.splitlines() if "::test_it" in line})
        assert outcomes == [{"PASSED tests/b/test_b.py"}, {"PASSED tests/test_a.py", "FAILED tests/test_c.py"}]

    def test_ours_are_about_equal_and_leave_nothing_out(self, lane: str) -> None:
        import halves

        first, second = halves.half(lane, 1), halves.half(lane, 2)
        assert not first & second
        assert first | second == set((ROOT / "tests").rglob("test_*.py"))
        expected = halves.expected(lane)
        first_seconds, second_seconds = (sum(expected[file] for file in half) for half in (first, second))
        assert abs(first_seconds - second_seconds) <= max(expected.values())


class TestSeconds:
    def test_they_are_read_from_what_pytest_prints(self) -> None:
        import halves

        log = ["0.40s call     tests/a/test_x.py::test_y[1 2]", "0.30s setup    tests/a/test_x.py::test_z", "1 passed",
               "0.50s call     tests/test_short.py::test_y"]  # fmt: skip
        assert halves.seconds(log) == "0.7 a/test_x.py\n"

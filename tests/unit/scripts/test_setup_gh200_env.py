"""The script is sourced by real shells; what it exported is read by a child, as a program would read it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup_gh200_env.sh"
SHELLS = [found for found in map(shutil.which, ("bash", "dash", "zsh")) if found]
CHILD = "python3 -c 'import json, os; print(json.dumps(dict(os.environ)))'"
DEFAULTS = {
    "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1",
    "GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0",
    "GH200_UVM_ACCESS_PATTERN": "cpu_first",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}
UVM_KEYS = "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:cpu_first"


@pytest.fixture(params=SHELLS, ids=lambda found: Path(found).name)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(shell: str, login: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run_in_shell(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = login | variables | {"SCRIPT": str(SCRIPT)}
        return subprocess.run([shell, "-c", code], env=environment, capture_output=True, text=True, check=False)

    return run_in_shell


@pytest.fixture
def exported(run: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., dict[str, str]]:
    """Our variables after sourcing, as a child sees them."""

    def source(times: int = 1, **variables: str) -> dict[str, str]:
        done = run("; ".join(['. "$SCRIPT"'] * times + [CHILD]), **variables)
        assert done.returncode == 0, done.stderr
        assert len(done.stderr.splitlines()) == times
        environment = json.loads(done.stdout)
        return {name: value for name, value in environment.items() if name in DEFAULTS or name.endswith("ALLOC_CONF")}

    return source


@pytest.fixture
def torch_at(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """A PYTHONPATH with a torch whose allocator library spells out the given words, and which must not be imported."""

    def make(words: str) -> dict[str, str]:
        library = tmp_path / "torch" / "lib" / "libc10_cuda.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"\x7fELF\0" + words.encode() + b"\0\xff")
        (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
        return {"PYTHONPATH": str(tmp_path)}

    return make


class TestExports:
    def test_defaults(self, exported) -> None:
        assert exported() == DEFAULTS

    def test_sourcing_again_changes_nothing(self, exported) -> None:
        assert exported(times=3) == DEFAULTS

    def test_what_is_set_already_stays(self, exported) -> None:
        chosen = {
            "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "0",
            "GH200_UVM_OVERSUBSCRIPTION_RATIO": "3",
            "GH200_UVM_ACCESS_PATTERN": "balanced",
            "ACCELERATE_MIXED_PRECISION": "fp16",
        }
        assert exported(times=2, **chosen) == chosen

    def test_a_ratio_in_the_users_string_comes_before_our_default(self, exported) -> None:
        string = "max_split_size_mb:512, uvm_oversubscription_ratio:2.5,uvm_access_pattern:balanced"
        assert exported(PYTORCH_CUDA_ALLOC_CONF=string) == DEFAULTS | {
            "GH200_UVM_OVERSUBSCRIPTION_RATIO": "2.5",
            "GH200_UVM_ACCESS_PATTERN": "balanced",
            "PYTORCH_CUDA_ALLOC_CONF": string,
        }


class TestAllocatorString:
    def test_a_stock_torch_gets_none(self, exported, torch_at) -> None:
        assert exported(**torch_at("max_split_size_mb")) == DEFAULTS

    def test_a_stock_torch_keeps_the_users(self, exported, torch_at) -> None:
        stock = torch_at("max_split_size_mb")
        kept = exported(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512", **stock)["PYTORCH_CUDA_ALLOC_CONF"]
        assert kept == "max_split_size_mb:512"

    def test_a_patched_torch_gets_the_keys_once(self, exported, torch_at) -> None:
        patched = torch_at("uvm_oversubscription_ratio")
        assert exported(times=2, **patched)["PYTORCH_CUDA_ALLOC_CONF"] == UVM_KEYS

    def test_the_keys_join_what_the_user_wrote(self, exported, torch_at) -> None:
        patched = torch_at("uvm_oversubscription_ratio")
        string = "roundup_power2_divisions:[256:1,512:2], uvm_oversubscription_ratio:3.0"
        joined = exported(times=2, PYTORCH_CUDA_ALLOC_CONF=string, **patched)["PYTORCH_CUDA_ALLOC_CONF"]
        assert joined == f"{string},use_uvm:True,uvm_access_pattern:cpu_first"

    def test_the_variable_torch_reads_first_is_the_one_that_grows(self, exported, torch_at) -> None:
        patched = torch_at("uvm_oversubscription_ratio")
        found = exported(PYTORCH_ALLOC_CONF="use_uvm:False", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:1", **patched)
        assert (
            found["PYTORCH_ALLOC_CONF"] == "use_uvm:False,uvm_oversubscription_ratio:5.0,uvm_access_pattern:cpu_first"
        )
        assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:1"

    def test_quotes_in_the_users_string_are_only_text(self, exported, torch_at) -> None:
        patched = torch_at("uvm_oversubscription_ratio")
        string = "odd:'$(touch pwned)' \"x\""
        assert exported(PYTORCH_CUDA_ALLOC_CONF=string, **patched)["PYTORCH_CUDA_ALLOC_CONF"] == f"{string},{UVM_KEYS}"


class TestTheUsersShell:
    @pytest.mark.parametrize("options", ["set -eu", "set +e; set +u"])
    def test_keeps_its_options_and_gains_no_names(self, run, options: str) -> None:
        names = "set | LC_ALL=C sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)[=( ].*/\\1/p' | LC_ALL=C sort -u"
        done = run(f'{options}; echo "options:$-"; {names}; echo ----; . "$SCRIPT"; echo "options:$-"; {names}')
        assert done.returncode == 0, done.stderr
        before, after = (part.split() for part in done.stdout.split("----"))
        assert after[0] == before[0]
        shells_own = {"_", "BASH_LINENO", "PIPESTATUS", "BASHPID", "SECONDS", "LINENO", "status", "pipestatus"}
        assert set(after[1:]) - set(before[1:]) - shells_own == set(DEFAULTS)

    def test_works_where_there_is_no_python(self, run, tmp_path: Path) -> None:
        for name in ("sed", "tr", "awk"):
            (tmp_path / name).symlink_to(shutil.which(name) or "")
        done = run('. "$SCRIPT"; echo "$GH200_UVM_ACCESS_PATTERN"', PATH=str(tmp_path))
        assert (done.returncode, done.stdout) == (0, "cpu_first\n")
        assert "no torch seen by python3" in done.stderr

    def test_executing_it_says_what_to_type(self, shell: str, login: dict[str, str]) -> None:
        done = subprocess.run([shell, SCRIPT], env=login, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr == (
            f"setup_gh200_env.sh was executed, so its settings ended with it. Type instead: source {SCRIPT}\n"
        )

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("GH200_UVM_OVERSUBSCRIPTION_RATIO", "5.0x"),
            ("GH200_UVM_OVERSUBSCRIPTION_RATIO", "1.0"),
            ("GH200_UVM_OVERSUBSCRIPTION_RATIO", "inf"),
            ("GH200_UVM_OVERSUBSCRIPTION_RATIO", "-2"),
            ("GH200_UVM_ACCESS_PATTERN", "GPU_first"),
        ],
    )
    def test_a_bad_value_is_named_and_nothing_is_exported(self, run, name: str, value: str) -> None:
        done = run(f'. "$SCRIPT"; echo "returned $?"; {CHILD}', **{name: value})
        first, environment = done.stdout.splitlines()
        assert first == "returned 1"
        assert f"found '{value}', expected" in done.stderr
        assert f"Type: export {name}=" in done.stderr
        assert "ACCELERATE_MIXED_PRECISION" not in json.loads(environment)

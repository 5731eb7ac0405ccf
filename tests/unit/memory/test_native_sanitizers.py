"""uvm.c under the address, undefined-behavior and thread sanitizers, with many threads (see stress.c)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHIM = ROOT / "src/gracetune/memory/native/uvm.c"
FAKE = ROOT / "tests/fixtures/fake_libcuda/fake_libcuda.c"
STRESS = ROOT / "tests/fixtures/fake_libcuda/stress.c"
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0", "TSAN_OPTIONS": "halt_on_error=1"}
SANITIZERS = ["address,undefined", "thread"]

pytestmark = pytest.mark.full


def compile_with(sanitizer, *arguments):
    flags = ["-std=c11", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    return subprocess.run(["gcc", *flags, *map(str, arguments), "-ldl", "-lpthread"], capture_output=True, text=True)


def execute(*command):
    return subprocess.run([str(part) for part in command], env=os.environ | OPTIONS, capture_output=True, text=True)


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized(request, tmp_path_factory):
    """Compile with the sanitizer and run the result. Skips if that fails for a trivial program."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed here")
    sanitizer, folder = request.param, tmp_path_factory.mktemp("sanitizers")
    (folder / "trivial.c").write_text("int main(void) { return 0; }\n")
    built = compile_with(sanitizer, folder / "trivial.c", "-o", folder / "trivial")
    if built.returncode != 0:
        pytest.skip(f"this gcc cannot build with -fsanitize={sanitizer}: {built.stderr.strip().splitlines()[-1]}")
    # The thread sanitizer of older compilers cannot live with the address layouts of newer kernels.
    for prefix in ([], ["setarch", "--addr-no-randomize"]):
        if (not prefix or shutil.which(prefix[0])) and execute(*prefix, folder / "trivial").returncode == 0:
            return sanitizer, folder, prefix
    pytest.skip(f"programs built with -fsanitize={sanitizer} do not run on this kernel")


def storm(sanitized, mode, source=SHIM, rounds=4000):
    sanitizer, folder, prefix = sanitized
    program, library = folder / f"stress-{source.parent.name}", folder / "fake.so"
    for arguments in (
        (f"-I{source.parent}", STRESS, "-o", program),
        ("-fPIC", "-shared", FAKE, "-o", library),
    ):
        built = compile_with(sanitizer, *arguments)
        assert built.returncode == 0, built.stderr
    return execute(*prefix, program, library, 8, rounds, mode)


@pytest.mark.parametrize("mode", ["quiet", "journal"])
def test_the_storm_leaves_nothing_for_the_sanitizer_to_say(sanitized, mode):
    """`quiet` removes all locks from the fake driver, so that only the shim itself orders the threads."""
    done = storm(sanitized, mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all accounted for" in done.stdout
    assert done.stderr == ""


MUTANTS = {
    "thread": (
        "atomic_fetch_add_explicit(&account->counter[counter], 1, memory_order_relaxed);",
        "*(uint64_t *)&account->counter[counter] += 1;",
        "data race",
    ),
    "address,undefined": (
        "for (int i = 0; i < GT_COUNTERS; i++)\n        out[i]",
        "for (int i = 0; i <= GT_COUNTERS; i++)\n        out[i]",
        "AddressSanitizer: ",
    ),
}


def test_the_storm_would_see_a_mistake(sanitized, tmp_path):
    right, wrong, report = MUTANTS[sanitized[0]]
    text = SHIM.read_text()
    assert text.count(right) == 1
    (tmp_path / "uvm.c").write_text(text.replace(right, wrong))
    done = storm(sanitized, "quiet", tmp_path / "uvm.c")
    assert done.returncode != 0
    assert report in done.stderr

"""The shim and a fake CUDA driver, compiled once. Each test loads its own copies, so their state is fresh."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gracetune.memory.native import Unavailable, Uvm, load

ROOT = Path(__file__).parents[3]
SHIM_SOURCE = ROOT / "src/gracetune/memory/native/uvm.c"
FAKE_SOURCE = ROOT / "tests/fixtures/fake_libcuda/fake_libcuda.c"
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror")


class FakeDriver:
    """The control functions of the fake driver, which is the library that the shim has opened in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name in ("fake_in_use", "fake_most_in_use", "fake_journal"):
            getattr(self._library, name).restype = ctypes.c_uint64
        for name in ("fake_open_contexts", "fake_retained"):
            getattr(self._library, name).restype = ctypes.c_long

    def fail(self, function: str, code: int, *, nth: int = 1, every: int = 0) -> None:
        """Make the nth call of `function` from now on fail with `code`, and after it every `every`-th."""
        self._library.fake_fail(function.encode(), ctypes.c_long(nth), ctypes.c_long(every), code)

    def meet(self, function: str, threads: int) -> None:
        """Block calls of `function` until that many threads are inside it."""
        self._library.fake_meet(function.encode(), threads)

    def capacity(self, size: int) -> None:
        self._library.fake_capacity(ctypes.c_uint64(size))

    def migration(self, kind: int, value: int, *, activity: int = 25) -> None:
        """A record of CUPTI's, delivered by the next flush: kinds 1 and 2 are bytes to the device and to the host, 3
        and 4 page faults of the CPU and the GPU."""
        self._library.fake_migration(ctypes.c_uint32(activity), ctypes.c_uint32(kind), ctypes.c_uint64(value))

    def quiet(self) -> None:
        """No journal, no page table, no locks."""
        self._library.fake_quiet(1)

    @property
    def in_use(self) -> int:
        return int(self._library.fake_in_use())

    @property
    def most_in_use(self) -> int:
        return int(self._library.fake_most_in_use())

    @property
    def open_contexts(self) -> int:
        """Pushes without a pop, over all threads."""
        return int(self._library.fake_open_contexts())

    @property
    def retained(self) -> int:
        """Primary contexts retained and not released."""
        return int(self._library.fake_retained())

    def journal(self, prefix: str = "") -> list[str]:
        """The calls since the last `clear`, oldest first: `name key=value ... -> code`."""
        length = self._library.fake_journal(None, ctypes.c_size_t(0))
        text = ctypes.create_string_buffer(length + 1)
        self._library.fake_journal(text, ctypes.c_size_t(length + 1))
        return [line for line in text.value.decode().splitlines() if line.startswith(prefix)]

    def clear(self) -> None:
        self._library.fake_clear_journal()


@dataclass(frozen=True)
class Slot:
    """One pair of allocator functions of the shim, called as PyTorch calls it."""

    library: ctypes.CDLL
    number: int

    def alloc(self, size: int, device: int = 0) -> int | None:
        function = self.library[f"gt_slot{self.number}_alloc"]
        function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        return function(size, device, None)

    def free(self, pointer: int | None, size: int, device: int = 0) -> None:
        function = self.library[f"gt_slot{self.number}_free"]
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        function(pointer, size, device, None)


@dataclass(frozen=True)
class Bench:
    """A loaded shim on a fake driver."""

    uvm: Uvm
    fake: FakeDriver

    def slot(self, number: int = 0) -> Slot:
        return Slot(ctypes.CDLL(str(self.uvm.path)), number)


@dataclass(frozen=True)
class Workshop:
    """Compiles once per session and set of options, and hands out fresh copies."""

    folder: Path
    compile: Callable[..., Path]
    numbers: itertools.count[int]

    def shim(self, *options: str) -> Path:
        return self._copy(self.compile(SHIM_SOURCE, *options))

    def fake(self, *options: str) -> FakeDriver:
        return FakeDriver(self._copy(self.compile_fake(*options)))

    def compile_fake(self, *options: str) -> Path:
        return self.compile(FAKE_SOURCE, "-Wno-unused-function", *options)

    def program(self, source: Path, *options: str) -> Path:
        return self.compile(source, *options, shared=False)

    def bench(self, *fake_options: str) -> Bench:
        fake = self.fake(*fake_options)
        uvm = load(self.shim(), str(fake.path))
        assert not isinstance(uvm, Unavailable), uvm
        return Bench(uvm, fake)

    def _copy(self, built: Path) -> Path:
        # A library under a new name is a new library to the loader: its variables start over.
        return Path(shutil.copy(built, self.folder / f"{built.stem}-{next(self.numbers)}.so"))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("native")
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.fail("the tests of the native shim need a C compiler: install gcc")

    numbers = itertools.count()

    @functools.cache
    def build(source: Path, *options: str, shared: bool = True) -> Path:
        target = folder / f"{source.stem}-built-{next(numbers)}.so"
        kind = ("-fPIC", "-shared") if shared else ()
        command = [compiler, *STRICT, "-O2", "-g", *kind, *options, str(source)]
        done = subprocess.run([*command, "-o", str(target), "-ldl", "-lpthread"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    return Workshop(folder, build, numbers)


@pytest.fixture
def bench(workshop: Workshop) -> Bench:
    return workshop.bench()

"""`gracetune bench data`: cost and benefit of staging on this machine, as ratios within one run, and the time a run
with 30,000 images takes to read its folder.

Writes about half a GiB of generated files into the temporary folder and uses as much memory. No GPU is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Final

import xxhash

from gracetune.bench.row import BenchRow
from gracetune.data.backend import Backend
from gracetune.data.backends.open import GH200InMemoryBackend, attach_backend
from gracetune.data.backends.storage import from_json, to_json
from gracetune.data.staging.stager import threads_for
from gracetune.errors import MachineError
from gracetune.hardware.machine import Machine
from gracetune.storage.atomic import write_file
from gracetune.units import MIB, format_bytes

FILES: Final = 64
FILE_BYTES: Final = 4 * MIB
ROUNDS: Final = 5
WORKERS: Final = 4


def run(machine: Machine) -> list[BenchRow]:
    """All rows: the cost of staging, its benefit, and how the start of a run grows with its data."""
    # Imported here because they load the decoders, which the worker processes do not need.
    from gracetune.bench.loader import loader_rows
    from gracetune.bench.startup import starting_rows

    with tempfile.TemporaryDirectory(prefix="gracetune-bench-") as name:
        raw, compressible = Path(name, "raw"), Path(name, "compressible")
        _make(raw, lambda number: os.urandom(FILE_BYTES))
        _make(compressible, _half_noise)
        rows = [
            raw_staging_row(raw, machine),
            *lz4_staging_rows(compressible, machine),
            shared_memory_row(raw, machine),
        ]
        rows += loader_rows(Path(name, "images"), machine)
        return [*rows, *starting_rows(Path(name, "many"), machine)]


def _make(folder: Path, content: Callable[[int], bytes]) -> None:
    """Image files with captions. They are synced to disk, so that the page cache can be dropped."""
    folder.mkdir()
    for number in range(FILES):
        for name, data in ((f"{number:04}.bmp", content(number)), (f"{number:04}.txt", b"a generated image")):
            write_file(folder / name, data)


def _half_noise(number: int) -> bytes:
    """Half noise, half smooth, so that it compresses about as well as uncompressed images and sound."""
    chunk = 64 * 1024
    smooth = bytes((number + position // 512) % 256 for position in range(chunk))
    return b"".join(os.urandom(chunk) + smooth for _ in range(FILE_BYTES // (2 * chunk)))


def raw_staging_row(folder: Path, machine: Machine) -> BenchRow:
    """Staging, against reading the same warm files into memory with as many threads."""
    threads = threads_for(machine, None)
    # Alternate, and take the best of each, so that other programs slow both down alike.
    times = [(in_new_process(f"reads {threads}", folder, machine), in_new_process("stage none", folder, machine))
             for _ in range(ROUNDS)]  # fmt: skip
    plain, staged = min(one for one, _ in times), min(two for _, two in times)
    size = _bytes_in(folder)
    detail = f"{size / staged / 1e9:.2f} GB/s staged, {size / plain / 1e9:.2f} GB/s read; {threads} threads, warm files"
    return BenchRow("staging_raw_over_reads", plain / staged, "ratio", ">= 0.8", plain / staged >= 0.8, detail)


def lz4_staging_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    """Speed of lz4 staging, against reading the files from disk with an empty page cache."""
    threads = threads_for(machine, None)
    size = _bytes_in(folder)
    with GH200InMemoryBackend(folder, compression="lz4", machine=machine) as backend:
        yield BenchRow("lz4_stored_over_size", backend.stored / size, "ratio", detail="of files that are half noise")
    staged = min(in_new_process("stage lz4", folder, machine) for _ in range(ROUNDS))
    filesystem = _filesystem(folder)
    if filesystem == "tmpfs":
        detail = f"{folder} is in memory, so there is no disk to compare with; set TMPDIR to a folder on a disk"
        yield BenchRow("staging_lz4_over_disk", size / staged / 1e9, "GB/s", detail=detail)
        return
    cold = median(in_new_process(f"cold-reads {threads}", folder, machine) for _ in range(ROUNDS))
    detail = f"{size / staged / 1e9:.2f} GB/s staged, {size / cold / 1e9:.2f} GB/s from disk ({filesystem})"
    yield BenchRow("staging_lz4_over_disk", cold / staged, "ratio", ">= 1", cold / staged >= 1, detail)


def shared_memory_row(folder: Path, machine: Machine) -> BenchRow:
    """Memory that worker processes add by reading every staged file, without their interpreters."""
    with GH200InMemoryBackend(folder, machine=machine) as backend, ExitStack() as stack:
        touch(backend)
        workers = [stack.enter_context(_worker()) for _ in range(WORKERS)]
        for worker in workers:
            _expect(worker, "ready")
        pids = [os.getpid(), *(worker.pid for worker in workers)]
        before = sum(map(proportional_set_size, pids))
        for worker in workers:
            _send(worker, to_json(backend.handle()))
        for worker in workers:
            _expect(worker, "read")
        added = sum(map(proportional_set_size, pids)) - before
        share = added / backend.stored
        detail = f"{WORKERS} workers that read all of {format_bytes(backend.stored)} add {format_bytes(added)} (PSS)"
    return BenchRow("workers_add", share, "of staged data", "< 0.10", share < 0.10, detail)


def in_new_process(task: str, folder: Path, machine: Machine) -> float:
    """Seconds a task takes in a new process. Tasks are `reads N` and `cold-reads N` (with N threads, the latter with an
    empty page cache), `stage none` and `stage lz4` (by compression).

    A process that has read the files before would read them into memory that it already owns, unlike a first run.
    """
    done = subprocess.run(
        [sys.executable, "-c", "from gracetune.bench.data import measure; measure()", task, str(folder)],
        input=machine.model_dump_json(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise MachineError(f"bench data: the process for `{task}` failed: its messages are above")
    return float(done.stdout)


def measure() -> None:
    """Entry point of the process that `in_new_process` starts: times the task, without setup and without freeing
    memory."""
    (task, option), folder = sys.argv[1].split(), Path(sys.argv[2])
    machine = Machine.model_validate_json(sys.stdin.read())
    if task == "cold-reads":
        _forget_pages(folder)
    start = time.perf_counter()
    if task == "stage":
        kept: object = GH200InMemoryBackend(folder, compression=option, machine=machine)
    else:
        with ThreadPoolExecutor(int(option)) as pool:  # the obvious way to read files in parallel
            kept = list(pool.map(Path.read_bytes, sorted(folder.iterdir())))
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{seconds}\n")
    del kept


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _forget_pages(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _filesystem(folder: Path) -> str:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return "unknown"


def proportional_set_size(pid: int) -> int:
    """The PSS of a process: its memory, with shared pages divided among the processes that share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise MachineError(f"the kernel does not report the PSS of process {pid}")


def touch(backend: Backend) -> None:
    """Read every byte in place, without a copy."""
    for path in backend.list():
        xxhash.xxh3_64_intdigest(backend.read(path))


@contextmanager
def _worker() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "from gracetune.bench.data import work; work()"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield worker
    finally:
        _pipe(worker.stdin).close()  # end of input makes the worker exit
        worker.wait(timeout=60)
        _pipe(worker.stdout).close()


def work() -> None:
    """Entry point of a worker: attach to the handle from stdin, read everything, and wait for the end of input."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    backend = attach_backend(from_json(sys.stdin.readline()))
    touch(backend)
    sys.stdout.write("read\n")
    sys.stdout.flush()
    sys.stdin.read()
    backend.close()


def _send(worker: subprocess.Popen[str], line: str) -> None:
    pipe = _pipe(worker.stdin)
    pipe.write(line + "\n")
    pipe.flush()


def _expect(worker: subprocess.Popen[str], expected: str) -> None:
    found = _pipe(worker.stdout).readline().strip()
    if found != expected:
        raise MachineError(f"a worker process wrote {found!r} instead of {expected!r}: its messages are above")


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise ValueError("a worker without pipes")
    return pipe

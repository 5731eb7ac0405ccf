"""Load weights from disk directly into their destination tensors, without a second copy in memory.

Mapping a file and copying from the mapping holds everything twice: in the page cache and in the destination. Here,
several threads read (`pread`) the bytes of each tensor directly into its destination. Afterwards the kernel is advised
to drop the file's pages, because on a machine whose CPU and GPU share memory, the page cache takes memory from the GPU.
Where bytes cannot be read directly into place (another dtype, a non-contiguous view, GPU memory), they pass through a
few small buffers that are reused.

    weights = open_weights(path)                      # headers only
    tensors = {name: torch.empty(entry.shape, dtype=torch_dtype(entry), ...) for name, entry in ...}
    load_into(weights, tensors)

Before anything is read, the tensors in the files are compared with their destinations, and all problems are reported.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from gracetune.errors import Problem
from gracetune.memory.weights.transfer_buffers import CudaBuffers, HostBuffers, TransferBuffers, as_bytes
from gracetune.storage.regular_files import open_regular
from gracetune.storage.safetensors_files import TORCH_DTYPES
from gracetune.storage.safetensors_headers import (
    FileIdentity,
    TensorEntry,
    WeightFileError,
    WeightFiles,
    open_weights,
    read_fully,
    shortened,
    unreadable,
)
from gracetune.units import MIB

__all__ = ["Progress", "WeightLoadReport", "load_into", "open_weights", "torch_dtype"]

CHUNK = 16 * MIB
"""Bytes per read. Large enough to make the overhead negligible, small enough that threads share one tensor."""
MAX_THREADS = 8

Progress = Callable[[int, int], None]
"""Called in the loading thread with the bytes read so far and the total."""


@dataclass(frozen=True)
class WeightLoadReport:
    """The result of loading weights."""

    bytes_read: int
    tensors: int
    converted: tuple[str, ...]
    """Tensors whose dtype in the file differs from that of the destination."""
    unused: tuple[str, ...]
    """Tensors in the file without a destination."""


def load_into(
    weights: WeightFiles,
    destinations: Mapping[str, Tensor],
    *,
    allow_unused: bool = False,
    keep_page_cache: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> WeightLoadReport:
    """Fill each destination from the tensor of the same name. Shapes must be equal; floating-point dtypes may differ.

    All problems with names, shapes and dtypes are found before anything is read. `allow_unused` permits tensors in the
    file without a destination. `keep_page_cache` keeps the file's pages for other processes that read the same file.
    An error while reading (a truncated file, a failing disk) leaves the destinations partially filled.
    """
    unused = tuple(name for name in weights.entries if name not in destinations)
    problems = find_problems(weights, destinations, () if allow_unused else unused)
    if problems:
        raise WeightFileError(problems)
    count = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    wanted = [weights.entries[name] for name in destinations]
    with ExitStack() as stack:
        descriptors = {path: _open(stack, path, weights.files[path]) for path in {entry.path for entry in wanted}}
        by_device = _transfer_buffers(wanted, destinations, count)
        for buffers in by_device.values():
            stack.callback(buffers.finish)  # also after an error: a running copy must not outlive its destination
        jobs = sorted(_jobs(wanted, destinations), key=lambda job: (job.entry.path, job.offset))
        page_caches = {} if keep_page_cache else _page_caches(descriptors, jobs)
        bytes_read = _run(_Reader(descriptors, by_device, page_caches), jobs, count, progress)
    converted = tuple(name for name, tensor in destinations.items() if tensor.dtype != _dtype_of(weights, name))
    return WeightLoadReport(bytes_read, len(destinations), converted, unused)


def _dtype_of(weights: WeightFiles, name: str) -> torch.dtype:
    return TORCH_DTYPES[weights.entries[name].dtype]


def _open(stack: ExitStack, path: Path, expected: FileIdentity) -> int:
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise WeightFileError([unreadable(path, error)]) from None
    stack.callback(os.close, descriptor)
    if FileIdentity.of(descriptor) != expected:
        found = "it was replaced or changed after its header was read"
        hint = "start again when no process writes to it"
        raise WeightFileError([Problem("file", found, "the same file", hint, str(path))])
    return descriptor


# -- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """One read: some bytes of one tensor, and the part of the destination that they belong to."""

    entry: TensorEntry
    offset: int
    size: int
    destination: Tensor
    direct: bool
    """Whether `destination` is a uint8 view that can be read into directly."""


def _jobs(wanted: list[TensorEntry], destinations: Mapping[str, Tensor]) -> Iterator[_Job]:
    for entry in wanted:
        tensor = destinations[entry.name].detach()
        if tensor.numel() == 0:
            continue
        item = TORCH_DTYPES[entry.dtype].itemsize
        if _is_direct(tensor, entry):
            whole = as_bytes(tensor)
            for start in range(0, entry.size, CHUNK):
                chunk = whole[start : start + CHUNK]
                yield _Job(entry, entry.start + start, len(chunk), chunk, direct=True)
        else:
            for first, chunk in _chunks(tensor, CHUNK // item):
                yield _Job(entry, entry.start + first * item, chunk.numel() * item, chunk, direct=False)


def _is_direct(tensor: Tensor, entry: TensorEntry) -> bool:
    same_bytes = tensor.dtype == TORCH_DTYPES[entry.dtype] and not tensor.is_conj() and not tensor.is_neg()
    return same_bytes and tensor.device.type == "cpu" and tensor.is_contiguous()


def _chunks(tensor: Tensor, most: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Divide a tensor of any strides into views of at most `most` elements that are consecutive in the file.

    Yields each view with the number of its first element.
    """
    if tensor.numel() <= most:
        yield first, tensor
        return
    row = tensor.numel() // tensor.shape[0]
    step = max(1, most // row)
    for index in range(0, tensor.shape[0], step):
        part = tensor[index : index + step]
        yield from _chunks(part if row <= most else part[0], most, first + index * row)


def _transfer_buffers(
    wanted: list[TensorEntry], destinations: Mapping[str, Tensor], threads: int
) -> dict[torch.device, TransferBuffers]:
    """Create buffers for the devices that need them."""
    indirect = [entry for entry in wanted if entry.size > 0 and not _is_direct(destinations[entry.name], entry)]
    size = min(CHUNK, max((entry.size for entry in indirect), default=0))
    return {
        device: HostBuffers(threads, size) if device.type == "cpu" else CudaBuffers(device, threads, size)
        for device in {destinations[entry.name].device for entry in indirect}
    }


# -- reading ----------------------------------------------------------------------------------------------------------


class _PageCache:
    """Drops the pages of a file from the kernel's page cache while the file is being read.

    Each call covers the file from its start to the first unfinished job. The kernel manages pages in blocks of up to
    several MiB and keeps blocks that a range covers only partially, so dropping job by job would keep most of them.
    """

    def __init__(self, descriptor: int, jobs: Iterable[_Job]) -> None:
        self._descriptor = descriptor
        self._pending = deque(sorted(job.offset for job in jobs))
        self._done: set[int] = set()
        self._lock = threading.Lock()

    def finished(self, job: _Job) -> None:
        with self._lock:
            self._done.add(job.offset)
            if job.offset != self._pending[0]:
                return
            while self._pending and self._pending[0] in self._done:
                self._done.remove(self._pending.popleft())
            end = self._pending[0] if self._pending else 0  # to posix_fadvise, length 0 means up to the end of the file
            os.posix_fadvise(self._descriptor, 0, end, os.POSIX_FADV_DONTNEED)


class _Reader:
    """Carries out jobs; called from several threads."""

    def __init__(
        self,
        descriptors: Mapping[Path, int],
        by_device: Mapping[torch.device, TransferBuffers],
        page_caches: Mapping[Path, _PageCache],
    ) -> None:
        self._descriptors = descriptors
        self._transfer_buffers = by_device
        self._page_caches = page_caches

    def carry_out(self, job: _Job) -> int:
        dtype = TORCH_DTYPES[job.entry.dtype]
        if job.direct:
            self._read(job, job.destination)
        else:
            buffers = self._transfer_buffers[job.destination.device]
            bad = buffers.copy_through(lambda buffer: self._read(job, buffer), job.size, dtype, job.destination)
            if bad is not None:
                raise _does_not_fit(job, bad)
        if job.entry.path in self._page_caches:
            self._page_caches[job.entry.path].finished(job)
        return job.size

    def _read(self, job: _Job, into: Tensor) -> None:
        descriptor = self._descriptors[job.entry.path]
        try:
            got = read_fully(descriptor, into.numpy().data, job.offset)
        except OSError as error:
            raise WeightFileError([unreadable(job.entry.path, error)]) from error
        if got < job.size:
            found = f"the file ended {job.size - got:,} bytes early while it was read"
            raise _broken(job, found, "a file that does not change", "start again when no process writes to it")
        if job.entry.dtype == "BOOL" and int(into.max()) > 1:
            raise _broken(job, f"the byte {int(into.max())}", "0 or 1 in a BOOL tensor", "download it again")


def _page_caches(descriptors: Mapping[Path, int], jobs: list[_Job]) -> dict[Path, _PageCache]:
    by_file = {path: [*group] for path, group in groupby(jobs, key=lambda job: job.entry.path)}
    return {path: _PageCache(descriptors[path], group) for path, group in by_file.items()}


def _run(reader: _Reader, jobs: list[_Job], threads: int, progress: Progress | None) -> int:
    total, done = sum(job.size for job in jobs), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="gracetune-load") as pool:
        futures = [pool.submit(reader.carry_out, job) for job in jobs]
        try:
            for future in as_completed(futures):
                done += future.result()
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return done


def _broken(job: _Job, found: str, expected: str, hint: str) -> WeightFileError:
    return WeightFileError([Problem(job.entry.name, found, expected, hint, str(job.entry.path))])


def _does_not_fit(job: _Job, value: float) -> WeightFileError:
    kind = job.destination.dtype
    expected = f"values up to {torch.finfo(kind).max:g}, the largest {kind} holds"
    return _broken(job, f"the value {value:g}", expected, "load into a wider dtype, such as bf16")


# -- checks of the destinations ----------------------------------------------------------------------------------------


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in TORCH_DTYPES:
        raise WeightFileError([_no_such_dtype(entry)])
    return TORCH_DTYPES[entry.dtype]


def find_problems(weights: WeightFiles, destinations: Mapping[str, Tensor], unused: tuple[str, ...]) -> list[Problem]:
    found = {name: weights.entries[name] for name in destinations if name in weights.entries}
    mismatches = (_mismatch(entry, destinations[name]) for name, entry in found.items())
    return [
        *shortened(_missing(weights, [name for name in destinations if name not in found])),
        *shortened([_unused(weights.entries[name]) for name in unused]),
        *shortened([problem for problem in mismatches if problem is not None]),
        *shortened(_shared_memory(destinations)),
    ]


def _missing(weights: WeightFiles, names: list[str]) -> list[Problem]:
    problems = []
    for position, name in enumerate(names):
        # Searching for a similar name is slow, and users read only the first few problems.
        near = difflib.get_close_matches(name, weights.entries, n=1) if position < 3 else []
        hint = f"is it {near[0]!r}?" if near else "check that these weights belong to this model"
        file = str(next(iter(weights.files), ""))
        problems.append(Problem(name, "no tensor of this name", "one for every destination", hint, file))
    return problems


def _unused(entry: TensorEntry) -> Problem:
    hint = "check that these weights belong to this model, or load with allow_unused"
    return Problem(
        entry.name, "a tensor without a destination", "a destination for every tensor", hint, str(entry.path)
    )


def _mismatch(entry: TensorEntry, tensor: Tensor) -> Problem | None:
    hint = "check that these weights belong to this model"
    unusable = _unusable(tensor)
    if unusable is not None:
        expected = "an allocated, strided tensor in main memory or on a CUDA GPU"
        return Problem(entry.name, f"a destination that {unusable}", expected, "allocate it first", str(entry.path))
    if entry.dtype not in TORCH_DTYPES:
        return _no_such_dtype(entry)
    if tuple(tensor.shape) != entry.shape:
        return Problem(entry.name, f"shape {entry.shape}", f"shape {tuple(tensor.shape)}", hint, str(entry.path))
    if not _convertible(TORCH_DTYPES[entry.dtype], tensor.dtype):
        found, expected = f"dtype {entry.dtype}", f"{tensor.dtype}, or one that converts to it without loss of meaning"
        return Problem(entry.name, found, expected, hint, str(entry.path))
    return None


def _unusable(tensor: Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet"
    if type(tensor.data) is not Tensor:
        return f"is a {type(tensor.data).__name__}, whose bytes are not its own"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on the device {tensor.device.type!r}"
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        return "repeats the same memory (an expanded view)"
    return None


def _convertible(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target:
        return True
    if torch.float8_e8m0fnu in (source, target):  # this dtype has only exponents: no sign and no zero
        return False
    if source.is_floating_point and target.is_floating_point:
        return True
    if any(d.is_floating_point or d.is_complex or d == torch.bool for d in (source, target)):
        return False
    narrow, wide = torch.iinfo(source), torch.iinfo(target)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _shared_memory(destinations: Mapping[str, Tensor]) -> list[Problem]:
    """Reject destinations that share memory, because the order in which they are filled is undefined."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in destinations.items()
        if _unusable(tensor) is None and tensor.is_contiguous() and tensor.numel() > 0
    )
    problems = []
    last_device, furthest, owner = "", 0, ""
    for device, start, end, name in spans:
        if device == last_device and start < furthest:
            hint = "leave one of the two out, and tie them after loading"
            problems.append(Problem(name, f"a destination that shares memory with {owner}", "memory of its own", hint))
        if device != last_device or end > furthest:
            last_device, furthest, owner = device, end, name
    return problems


def _no_such_dtype(entry: TensorEntry) -> Problem:
    expected = f"one of {', '.join(TORCH_DTYPES)}"
    hint = "convert the file to a dtype torch can hold"
    return Problem(entry.name, f"dtype {entry.dtype}", expected, hint, str(entry.path))

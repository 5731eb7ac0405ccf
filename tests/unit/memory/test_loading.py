from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from gracetune.memory.weights import loading
from gracetune.memory.weights.loading import WeightLoadReport, load_into, torch_dtype
from gracetune.memory.weights.transfer_buffers import HostBuffers, as_bytes, too_large_for
from gracetune.storage.safetensors_files import TORCH_DTYPES
from gracetune.storage.safetensors_headers import BITS, WeightFileError, open_weights, read_fully
from gracetune.units import GIB, KIB, MIB

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOATS_8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random bits, so that NaNs and denormals are included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def same_bits(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and bytes(raw(one)) == bytes(raw(two))


def raw(tensor: Tensor) -> bytes:
    return as_bytes(tensor.detach().contiguous()).numpy().tobytes()


def like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, path)
    return path


def write(path: Path, header: dict[str, object], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def rejection(path: Path, destinations: Mapping[str, Tensor], **options: bool) -> str:
    with pytest.raises(WeightFileError) as caught:
        load_into(open_weights(path), destinations, **options)
    return str(caught.value)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 256 bytes, so that every tensor of more than a few elements is read in several chunks."""
    monkeypatch.setattr(loading, "CHUNK", 256)


@pytest.mark.usefixtures("small_chunks")
class TestBytesArriveAsTheyAre:
    @pytest.mark.parametrize("code", TORCH_DTYPES)
    def test_for_every_dtype(self, tmp_path: Path, code: str) -> None:
        dtype = TORCH_DTYPES[code]
        tensors = {"many": noise(13, 41, dtype=dtype), "one": noise(dtype=dtype), "none": noise(0, 5, dtype=dtype)}
        path = save(tmp_path / "a.safetensors", tensors)
        entries = open_weights(path).entries
        assert {entry.dtype for entry in entries.values()} == {code}
        assert torch_dtype(entries["many"]) == dtype
        found = like(tensors)
        report = load_into(open_weights(path), found)
        assert all(same_bits(found[name], tensors[name]) for name in tensors)
        assert report == WeightLoadReport(bytes_read=534 * dtype.itemsize, tensors=3, converted=(), unused=())

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        shapes=st.dictionaries(
            st.text("abc._\u00fc", min_size=1, max_size=6),
            st.tuples(st.sampled_from([*TORCH_DTYPES.values()]), st.lists(st.integers(0, 9), max_size=4)),
            min_size=1,
            max_size=5,
        ),
        threads=st.integers(1, 4),
        seed=st.integers(0, 1000),
    )
    def test_for_random_tensors(
        self,
        tmp_path: Path,
        shapes: dict[str, tuple[torch.dtype, list[int]]],
        threads: int,
        seed: int,
    ) -> None:
        tensors = {name: noise(*shape, dtype=dtype, seed=seed) for name, (dtype, shape) in shapes.items()}
        path = save(tmp_path / "a.safetensors", tensors)
        found = like(tensors)
        load_into(open_weights(path), found, threads=threads)
        assert all(same_bits(found[name], tensors[name]) for name in tensors)

    def test_for_parameters_of_a_module(self, tmp_path: Path) -> None:
        module, other = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
        path = save(tmp_path / "a.safetensors", module.state_dict())
        load_into(open_weights(path), dict(other.named_parameters()))
        assert torch.equal(other.weight, module.weight)
        assert other.weight.requires_grad

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.empty(30, 20, 10).transpose(0, 2),
            lambda: torch.empty(30, 10, 20).permute(1, 2, 0),
            lambda: torch.empty(10, 20, 60)[:, :, ::2],
            lambda: torch.empty(1, 10, 20, 30).to(memory_format=torch.channels_last)[0],
            lambda: torch.empty(10, 25, 40)[:, 2:22, 5:35],
        ],
        ids=["transposed", "permuted", "strided", "channels last", "a window"],
    )
    def test_for_views_that_are_not_contiguous(self, tmp_path: Path, make: object) -> None:
        destination: Tensor = make()  # type: ignore[operator]
        assert not destination.is_contiguous()
        tensor = noise(*destination.shape)
        load_into(open_weights(save(tmp_path / "a.safetensors", {"a": tensor})), {"a": destination})
        assert same_bits(destination, tensor)

    def test_and_nothing_around_a_view_is_touched(self, tmp_path: Path) -> None:
        whole = torch.full((10, 30), 7.0)
        load_into(open_weights(save(tmp_path / "a", {"a": torch.zeros(4, 20)})), {"a": whole[3:7, 5:25]})
        assert whole.sum() == 7.0 * (300 - 80)
        assert whole[3:7, 5:25].abs().sum() == 0

    def test_for_tensors_made_in_inference_mode(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a", {"a": noise(90), "b": noise(90)})
        with torch.inference_mode():
            found = {"a": torch.empty(90), "b": torch.empty(90, dtype=torch.float64)}
        load_into(open_weights(path), found)
        assert same_bits(found["a"], load_file(path)["a"])

    def test_for_a_conjugated_view(self, tmp_path: Path) -> None:
        values = torch.randn(50, dtype=torch.complex64)
        base = torch.empty(50, dtype=torch.complex64)
        load_into(open_weights(save(tmp_path / "a", {"a": values})), {"a": base.conj()})
        assert torch.equal(base.conj().resolve_conj(), values)

    def test_for_a_sharded_model(self, tmp_path: Path) -> None:
        tensors = {f"layer.{number}": noise(33, 17, seed=number) for number in range(7)}
        files = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
        for file in set(files.values()):
            save(tmp_path / file, {name: tensors[name] for name in tensors if files[name] == file})
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
        found = like(tensors)
        assert load_into(open_weights(index), found).bytes_read == 7 * 33 * 17 * 4
        assert all(same_bits(found[name], tensors[name]) for name in tensors)

    def test_a_part_of_a_file(self, tmp_path: Path) -> None:
        tensors = {"a": noise(100), "b": noise(200), "c": noise(300)}
        found = like({"b": tensors["b"]})
        report = load_into(open_weights(save(tmp_path / "a", tensors)), found, allow_unused=True)
        assert same_bits(found["b"], tensors["b"])
        assert report.bytes_read == 800
        assert sorted(report.unused) == ["a", "c"]

    def test_no_tensors_at_all(self, tmp_path: Path) -> None:
        assert load_into(open_weights(save(tmp_path / "a", {})), {}).tensors == 0


@pytest.mark.usefixtures("small_chunks")
class TestAnotherDtype:
    @pytest.mark.parametrize("target", FLOATS, ids=str)
    @pytest.mark.parametrize("source", [*FLOATS, *FLOATS_8], ids=str)
    def test_is_what_torch_makes_of_it(self, tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
        values = torch.linspace(-200, 200, 777, dtype=torch.float64).reshape(7, 111).to(source)
        found = torch.empty(7, 111, dtype=target)
        report = load_into(open_weights(save(tmp_path / "a", {"a": values})), {"a": found})
        assert same_bits(found, values.to(target))
        assert report.converted == (() if source == target else ("a",))

    @pytest.mark.parametrize("target", FLOATS_8, ids=str)
    def test_small_enough_for_eight_bits(self, tmp_path: Path, target: torch.dtype) -> None:
        values = torch.linspace(-200, 200, 777)
        found = torch.empty(777, dtype=target)
        load_into(open_weights(save(tmp_path / "a", {"a": values})), {"a": found})
        assert same_bits(found, values.to(target))

    @pytest.mark.parametrize(
        ("value", "source", "target"),
        [
            (70_000.0, torch.float32, torch.float16),
            (-70_000.0, torch.bfloat16, torch.float16),
            (1e300, torch.float64, torch.bfloat16),
            (500.0, torch.bfloat16, torch.float8_e4m3fn),
            (1000.0, torch.float8_e5m2, torch.float8_e4m3fn),
        ],
    )
    def test_too_narrow_for_a_value_is_rejected(
        self, tmp_path: Path, value: float, source: torch.dtype, target: torch.dtype
    ) -> None:
        values = torch.ones(900)
        values = values.to(torch.float64)
        values[873] = value
        text = rejection(save(tmp_path / "a", {"w": values.to(source)}), {"w": torch.empty(900, dtype=target)})
        assert ": w\n  found     the value " in text
        assert f"the largest {target} holds" in text

    def test_keeps_infinities_and_nans(self, tmp_path: Path) -> None:
        values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])
        found = torch.empty(4, dtype=torch.float16)
        load_into(open_weights(save(tmp_path / "a", {"a": values})), {"a": found})
        assert same_bits(found, values.half())

    @pytest.mark.parametrize(
        ("source", "target"), [(torch.int8, torch.int64), (torch.uint8, torch.int16), (torch.uint16, torch.uint32)]
    )
    def test_integers_may_widen(self, tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
        values = noise(500, dtype=source)
        found = torch.empty(500, dtype=target)
        load_into(open_weights(save(tmp_path / "a", {"a": values})), {"a": found})
        assert same_bits(found, values.to(target))

    @pytest.mark.parametrize(
        ("source", "target"),
        [
            (torch.int64, torch.int32),
            (torch.int8, torch.uint8),
            (torch.uint8, torch.int8),
            (torch.float32, torch.int32),
            (torch.int32, torch.float32),
            (torch.bool, torch.uint8),
            (torch.uint8, torch.bool),
            (torch.complex64, torch.float32),
            (torch.float32, torch.complex64),
            (torch.float8_e8m0fnu, torch.float32),
            (torch.float32, torch.float8_e8m0fnu),
        ],
    )
    def test_that_would_change_the_meaning_is_rejected(
        self, tmp_path: Path, source: torch.dtype, target: torch.dtype
    ) -> None:
        path = save(tmp_path / "a", {"a": torch.ones(4).to(source)})
        assert "converts to it without loss of meaning" in rejection(path, {"a": torch.empty(4, dtype=target)})

    def test_the_fit_is_judged_by_the_finite_values(self) -> None:
        assert too_large_for(torch.tensor([torch.inf, torch.nan, 65504.0]), torch.float16) is None
        assert too_large_for(torch.tensor([-65505.0]), torch.float16) == 65505.0
        assert too_large_for(torch.tensor([torch.inf, 70_000.0, torch.nan]), torch.float16) == 70_000.0
        assert too_large_for(torch.empty(0), torch.float16) is None


class TestRejections:
    def test_a_missing_tensor_with_the_nearest_name(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a", {"blocks.0.attn.to_q.weight": noise(4)})
        text = rejection(path, {"blocks.0.attn.to_k.weight": torch.empty(4)}, allow_unused=True)
        assert text.startswith(f"{path}: blocks.0.attn.to_k.weight\n  found     no tensor of this name")
        assert "is it 'blocks.0.attn.to_q.weight'?" in text

    def test_an_unused_tensor(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a", {"a": noise(4), "b": noise(4)})
        text = rejection(path, {"a": torch.empty(4)})
        assert text.startswith(f"{path}: b\n  found     a tensor without a destination")
        assert "allow_unused" in text

    def test_a_wrong_shape(self, tmp_path: Path) -> None:
        text = rejection(save(tmp_path / "a", {"a": noise(4, 2)}), {"a": torch.empty(2, 4)})
        assert "found     shape (4, 2)\n  expected  shape (2, 4)" in text

    def test_all_at_once_and_before_anything_is_read(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a", {"good": noise(4), "shape": noise(4), "extra": noise(4)})
        good = torch.full((4,), 7.0)
        text = rejection(path, {"good": good, "shape": torch.empty(5), "missing": torch.empty(1)})
        assert [line for line in text.splitlines() if line.startswith(str(path))] == [
            f"{path}: missing",
            f"{path}: extra",
            f"{path}: shape",
        ]
        assert good.tolist() == [7.0] * 4

    def test_thousands_of_missing_tensors_take_no_time_and_little_space(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a", {f"blocks.{n}.attention.to_q.weight": noise(1) for n in range(2000)})
        wanted = {f"layers.{n}.attention.query.weight": torch.empty(1) for n in range(2000)}
        text = rejection(path, wanted, allow_unused=True)
        assert "1,992 more problems of this kind" in text

    @pytest.mark.parametrize(
        ("destination", "words"),
        [
            (torch.empty(4, device="meta"), "is on the device 'meta'"),
            (torch.empty(1).expand(4), "repeats the same memory"),
            (torch.ones(4).to_sparse(), "has the layout torch.sparse_coo"),
            (torch.nn.UninitializedParameter(), "has no shape yet"),
        ],
        ids=["meta", "expanded", "sparse", "lazy"],
    )
    def test_a_destination_without_memory_of_its_own(self, tmp_path: Path, destination: Tensor, words: str) -> None:
        assert words in rejection(save(tmp_path / "a", {"a": noise(4)}), {"a": destination})

    def test_a_tensor_subclass_whose_bytes_lie_elsewhere(self, tmp_path: Path) -> None:
        class Wrapped(torch.Tensor):
            pass

        wrapped = torch.empty(4).as_subclass(Wrapped)
        assert "is a Wrapped, whose bytes are not its own" in rejection(
            save(tmp_path / "a", {"a": noise(4)}), {"a": wrapped}
        )

    def test_two_destinations_on_the_same_bytes(self, tmp_path: Path) -> None:
        whole = torch.empty(100)
        found = {"a": whole, "b": whole[10:20], "c": whole[90:95], "d": torch.empty(10)}
        path = save(tmp_path / "a", {"a": noise(100), "b": noise(10), "c": noise(5), "d": noise(10)})
        text = rejection(path, found)
        assert "b\n  found     a destination that shares memory with a" in text
        assert "c\n  found     a destination that shares memory with a" in text
        assert "shares memory with b" not in text

    def test_neighbours_in_one_buffer_are_welcome(self, tmp_path: Path) -> None:
        whole = torch.empty(30)
        tensors = {"a": noise(10, seed=1), "b": noise(20, seed=2)}
        load_into(open_weights(save(tmp_path / "a", tensors)), {"a": whole[:10], "b": whole[10:]})
        assert same_bits(whole, torch.cat([tensors["a"], tensors["b"]]))

    @pytest.mark.parametrize("code", sorted(BITS.keys() - TORCH_DTYPES.keys()))
    def test_a_dtype_torch_cannot_hold(self, tmp_path: Path, code: str) -> None:
        size = BITS[code]
        path = write(tmp_path / "a", {"a": {"dtype": code, "shape": [8], "data_offsets": [0, size]}}, bytes(size))
        text = rejection(path, {"a": torch.empty(8)})
        assert f"found     dtype {code}" in text
        with pytest.raises(WeightFileError, match=code):
            torch_dtype(open_weights(path).entries["a"])

    def test_a_truth_value_that_is_neither(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", {"mask": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}, b"\0\1\2")
        assert "found     the byte 2\n  expected  0 or 1 in a BOOL tensor" in rejection(
            path, {"mask": torch.empty(3, dtype=torch.bool)}
        )

    def test_a_file_that_was_replaced_after_its_header_was_read(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a", {"a": noise(4)})
        weights = open_weights(path)
        save(tmp_path / "b", {"a": noise(4, seed=1)}).replace(path)
        with pytest.raises(WeightFileError, match="replaced or changed"):
            load_into(weights, {"a": torch.empty(4)})

    def test_a_file_that_vanished(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a", {"a": noise(4)})
        weights = open_weights(path)
        path.unlink()
        with pytest.raises(WeightFileError, match="No such file"):
            load_into(weights, {"a": torch.empty(4)})

    @pytest.mark.parametrize("target", [torch.float32, torch.float64], ids=["direct", "staged"])
    @pytest.mark.usefixtures("small_chunks")
    def test_a_file_cut_off_while_it_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: torch.dtype
    ) -> None:
        path = save(tmp_path / "a", {"a": noise(4000)})
        size = path.stat().st_size

        def cut_and_read(descriptor: int, into: memoryview, offset: int) -> int:
            os.truncate(path, size - 8000)
            return read_fully(descriptor, into, offset)

        monkeypatch.setattr(loading, "read_fully", cut_and_read)
        text = rejection(path, {"a": torch.empty(4000, dtype=target)})
        assert ": a\n  found     the file ended " in text
        assert "bytes early while it was read" in text

    def test_a_disk_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = save(tmp_path / "a", {"a": noise(4)})

        def fail(_descriptor: int, _into: memoryview, _offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(loading, "read_fully", fail)
        assert "found     Input/output error" in rejection(path, {"a": torch.empty(4)})


@pytest.mark.usefixtures("small_chunks")
class TestProgress:
    def test_counts_every_byte_in_the_callers_thread(self, tmp_path: Path) -> None:
        calls: list[tuple[int, int]] = []
        threads = set()

        def progress(done: int, total: int) -> None:
            calls.append((done, total))
            threads.add(threading.get_ident())

        load_into(open_weights(save(tmp_path / "a", {"a": noise(1000)})), {"a": torch.empty(1000)}, progress=progress)
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert calls[-1] == (4000, 4000)
        assert len(calls) == 16
        assert threads == {threading.get_ident()}

    def test_an_interrupt_in_it_ends_the_loading(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reads = []

        def slow_read(descriptor: int, into: memoryview, offset: int) -> int:
            reads.append(offset)
            time.sleep(0.01)
            return read_fully(descriptor, into, offset)

        def interrupt(_done: int, _total: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(loading, "read_fully", slow_read)
        before = threading.active_count()
        path = save(tmp_path / "a", {"a": noise(100_000)})
        with pytest.raises(KeyboardInterrupt):
            load_into(open_weights(path), {"a": torch.empty(100_000)}, progress=interrupt, threads=2)
        assert len(reads) < 500  # of 1563
        assert threading.active_count() == before
        assert open_files(path) == 0


def open_files(path: Path) -> int:
    links = Path("/proc/self/fd")
    return sum(os.path.realpath(link) == str(path) for link in links.iterdir())


def test_nothing_stays_open(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {"a": noise(10)})
    load_into(open_weights(path), {"a": torch.empty(10)})
    assert open_files(path) == 0


def test_staging_uses_its_buffers_over_and_over() -> None:
    staging = HostBuffers(buffers=1, size=16)
    places = set()

    def fill(buffer: Tensor) -> None:
        places.add(buffer.data_ptr())
        buffer.fill_(1)

    def fail(buffer: Tensor) -> None:
        raise OSError("disk on fire")

    for _ in range(3):
        staging.copy_through(fill, 8, torch.uint8, torch.empty(8, dtype=torch.int16))
        with pytest.raises(OSError, match="disk on fire"):
            staging.copy_through(fail, 8, torch.uint8, torch.empty(8, dtype=torch.int16))
    assert len(places) == 1


# -- memory -----------------------------------------------------------------------------------------------------------


def cached_bytes(path: Path) -> int:
    """The number of bytes of a file in the page cache."""
    page = mmap.PAGESIZE
    with path.open("rb") as file:
        size = path.stat().st_size
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert address != ctypes.c_void_p(-1).value
        resident = (ctypes.c_ubyte * -(-size // page))()
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident)
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    assert failed == 0
    return sum(flag & 1 for flag in resident) * page


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    path = save(tmp_path / "a.safetensors", {f"w{n}": noise(8 * MIB, dtype=torch.uint8) for n in range(8)})
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # a page that is not written back yet cannot be dropped
    os.close(descriptor)
    path.read_bytes()
    if cached_bytes(path) < path.stat().st_size:
        pytest.skip("this file system does not show its page cache")
    return path


class TestPageCache:
    def test_does_not_keep_what_was_read(self, on_disk: Path) -> None:
        destinations = {f"w{n}": torch.empty(8 * MIB, dtype=torch.uint8) for n in range(8)}
        load_into(open_weights(on_disk), destinations)
        assert cached_bytes(on_disk) <= 256 * KIB

    def test_is_given_back_on_the_way_and_not_only_at_the_end(
        self, on_disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loading, "CHUNK", MIB)
        destinations = {f"w{n}": torch.empty(8 * MIB, dtype=torch.uint8) for n in range(8)}
        left: list[int] = []
        load_into(
            open_weights(on_disk),
            destinations,
            threads=2,
            progress=lambda done, total: left.append(total - done - cached_bytes(on_disk)),
        )
        # What is still cached is what has not been read yet, give or take the pieces under way.
        assert min(left) > -8 * MIB

    def test_is_kept_for_others_when_asked(self, on_disk: Path) -> None:
        destinations = {f"w{n}": torch.empty(8 * MIB, dtype=torch.uint8) for n in range(8)}
        load_into(open_weights(on_disk), destinations, keep_page_cache=True)
        assert cached_bytes(on_disk) >= on_disk.stat().st_size


MEASURE = """
    import sys, re
    from pathlib import Path
    import torch
    from safetensors.torch import load_file
    from gracetune.memory.weights.loading import load_into, open_weights, torch_dtype

    how, path = sys.argv[1], Path(sys.argv[2])
    dtype = torch.bfloat16 if how == "convert" else None
    torch.ones(4).to(torch.bfloat16)  # everything torch loads on first use is part of the baseline

    def status(field):
        return int(re.search(rf"^{field}:\\s+(\\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1]) * 1024

    baseline = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts over from here
    weights = open_weights(path)
    final = {n: torch.empty(e.shape, dtype=dtype or torch_dtype(e)) for n, e in weights.entries.items()}
    if how == "plain":
        for name, tensor in load_file(path).items():
            final[name].copy_(tensor)
    else:
        load_into(weights, final)
    print(status("VmHWM") - baseline, sum(float(t.view(torch.uint8)[-1]) for t in final.values()))
"""


def peak_above_baseline(mode: str, path: Path) -> tuple[int, float]:
    source = Path(loading.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), mode, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, check = done.stdout.split()
    return int(peak), float(check)


def large_file(path: Path, size: int) -> Path:
    """Write the file in pieces, because the test must not itself need the memory that it measures."""
    count, chunk = 8, size // 8
    block = noise(MIB, dtype=torch.uint8).fill_(0x3F).numpy().tobytes()  # 0.75 as a float of any width
    header = {
        f"w{n}": {"dtype": "F32", "shape": [chunk // 4], "data_offsets": [n * chunk, (n + 1) * chunk]}
        for n in range(count)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(size // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return path


@pytest.mark.full
def test_a_small_file_takes_its_own_size_and_little_more(tmp_path: Path) -> None:
    path = large_file(tmp_path / "a.safetensors", 256 * MIB)
    size = path.stat().st_size
    direct, _ = peak_above_baseline("direct", path)
    plain, _ = peak_above_baseline("plain", path)
    assert direct < 1.15 * size
    assert plain > 1.8 * size  # or the measurement measures nothing
    converted, _ = peak_above_baseline("convert", path)
    assert converted < 0.5 * size + 160 * MIB  # half the bytes, and the staging buffers


@pytest.mark.full
def test_two_gibibytes_take_at_most_a_tenth_more_than_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = large_file(tmp_path / "a.safetensors", 2 * GIB + 64 * MIB)
    size = path.stat().st_size
    try:
        found = {mode: peak_above_baseline(mode, path) for mode in ("direct", "plain", "convert")}
    finally:
        path.unlink()
    with capsys.disabled():
        shares = ", ".join(f"{mode} {peak / size:.3f}" for mode, (peak, _) in found.items())
        print(f"\npeak host memory above the baseline, as a multiple of a file of {size / GIB:.2f} GiB: {shares}")
    assert found["direct"][0] <= 1.1 * size
    assert found["plain"][0] > 1.8 * size
    assert found["convert"][0] <= 0.6 * size
    assert found["direct"][1] == found["plain"][1]

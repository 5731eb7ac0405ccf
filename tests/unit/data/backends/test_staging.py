from __future__ import annotations

import errno
import io
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import xxhash

from gracetune.data.backend import FileStat, LeftOut, Listing
from gracetune.data.backends import open as opening
from gracetune.data.backends.errors import MemoryLimitError, UnreadableFilesError, too_many
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import attach_backend
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.staging.copying import StagingOptions, default_threads, segments_for, stage_files
from gracetune.data.staging.memory import StagingEstimate, StagingMemoryGuard, estimate_stored
from gracetune.data.staging.report import StagingProgress
from gracetune.hostmem.compression import CHUNK, CODECS
from gracetune.hostmem.numa import NodeChoice
from gracetune.hostmem.segment import Segment
from gracetune.testing.slow_backend import SlowBackend
from gracetune.units import GIB
from unit.data.backends.helpers import MIB, contents, fill, held, staged, stager, this_machine

CODEC_NAMES = ["none", *CODECS]
REPEATING = b"a caption that repeats itself, "


def mixed_files() -> dict[str, bytes]:
    noise = os.urandom(3 * CHUNK + 17)
    return {
        "empty.jpg": b"",
        "one.png": b"1",
        "small.JPG": noise[:5000],
        "exactly.webp": noise[:CHUNK],
        "over.webp": noise[: CHUNK + 1],
        "large.bmp": noise,
        "smooth.bmp": REPEATING * 100_000,
        "smooth-then-noise.bmp": REPEATING * (CHUNK // len(REPEATING) + 1) + noise,
        "noise-then-smooth.bmp": noise[:CHUNK] + REPEATING * 50_000,
        "sub/ünï/日本.Png": noise[:100],
        "small.txt": b"a dog",
        "smooth.caption": REPEATING * 20,
        "meta.jsonl": b"{}\n" * 50,
    }


@pytest.mark.parametrize("compression", CODEC_NAMES)
class TestWithEveryCodec:
    def test_every_byte_is_the_sources(self, tmp_path: Path, compression: str) -> None:
        files = mixed_files()
        with staged(fill(tmp_path, files), compression=compression) as backend:
            assert contents(backend) == files
            for path, data in files.items():
                assert backend.digest(path) == xxhash.xxh3_128_hexdigest(data)
                assert backend.stat(path) == LocalBackend(tmp_path).stat(path)
                with backend.open(path) as stream:
                    assert (stream.seek(len(data) // 2), stream.read()) == (len(data) // 2, data[len(data) // 2 :])

    def test_files_that_do_not_shrink_are_stored_uncompressed(self, tmp_path: Path, compression: str) -> None:
        files = mixed_files()
        with staged(fill(tmp_path, files), compression=compression) as backend:
            report = backend.report
            assert report is not None
            shrunk = (
                [] if compression == "none" else ["smooth.bmp", "smooth-then-noise.bmp", "smooth.caption", "meta.jsonl"]
            )
            assert report.compressed_files == len(shrunk)
            in_place = {path for path in files if type(backend.read(path).obj).__name__ == "mmap"}
            assert in_place == files.keys() - set(shrunk)
            assert report.raw == sum(map(len, files.values()))
            assert (report.stored < report.raw) == bool(shrunk)
            assert backend.stored <= report.stored + (len(files) + 3) * 2 * os.sysconf("SC_PAGE_SIZE")


class TestThreadsAndSegments:
    @pytest.mark.parametrize(("cpus", "threads"), [(None, 1), (1, 1), (16, 16), (72, 72), (144, 72)])
    def test_threads_by_default(self, cpus: int | None, threads: int) -> None:
        assert default_threads(cpus) == threads

    @pytest.mark.parametrize(
        ("size", "threads", "segments"), [(0, 8, 1), (MIB, 8, 1), (100 * MIB, 1, 1), (100 * MIB, 8, 3), (GIB, 72, 8)]
    )
    def test_small_data_and_few_threads_need_few_segments(self, size: int, threads: int, segments: int) -> None:
        assert segments_for(size, threads) == segments

    @pytest.mark.parametrize("threads", [1, 7])
    def test_many_files_over_several_segments(self, tmp_path: Path, threads: int) -> None:
        blob = os.urandom(MIB)
        files = {f"{number % 7}/{number}.png": blob[number:] for number in range(70)}
        with staged(fill(tmp_path, files), threads=threads) as backend:
            assert len(backend.descriptors()) == min(threads, 2)
            assert contents(backend) == files


class TestWhatIsStaged:
    def test_media_of_any_case_captions_and_sidecars(self, tmp_path: Path) -> None:
        wanted = dict.fromkeys(
            ("a.JPG", "a.TXT", "b.WebP", "b.json", "c.MP4", "d.flac", "t.parquet", "x/mask.png"), b"x"
        )
        other = dict.fromkeys(("e.psd", "noext", "._a.JPG", ".cache/f.jpg", "g.py"), b"x")
        with staged(fill(tmp_path, wanted | other)) as backend:
            assert backend.list() == tuple(sorted(wanted))
            assert backend.report is not None
            reasons = {item.path: item.reason for item in backend.report.unselected}
            assert backend.report.left_out == ()
        assert reasons.keys() == other.keys()
        assert ".psd" in reasons["e.psd"]
        assert "hidden" in reasons["._a.JPG"]
        assert "hidden" in reasons[".cache/f.jpg"]

    def test_an_empty_folder_stages_nothing(self, tmp_path: Path) -> None:
        with staged(tmp_path) as backend:
            assert backend.list() == ()
            assert backend.report is not None
            assert backend.report.files == 0


class TestProgress:
    def test_counts_files_and_bytes_to_the_end(self, tmp_path: Path) -> None:
        files = mixed_files()
        seen: list[StagingProgress] = []
        fill(tmp_path, files)
        made = stager(tmp_path)
        segments, _ = stage_files(
            made.source,
            made.survey(),
            made.options,
            guard=free_guard(),
            choice=NodeChoice((), ""),
            on_progress=seen.append,
        )
        total = sum(map(len, files.values()))
        assert (seen[-1].files, seen[-1].files_total) == (len(files), len(files))
        assert (seen[-1].read, seen[-1].total, seen[-1].remaining_seconds) == (total, total, 0.0)
        assert [item.read for item in seen] == sorted(item.read for item in seen)
        close(segments)

    def test_speaks_of_files_gigabytes_speed_and_time(self) -> None:
        now = StagingProgress(files=5, files_total=10, read=10**9, total=4 * 10**9, stored=10**9, seconds=2.0)
        assert str(now) == "5/10 files  1.00/4.00 GB  0.50 GB/s  ETA 6.0 s"
        assert "ETA unknown" in str(StagingProgress(0, 10, 0, 100, 0, 0.0))

    def test_an_interrupt_does_not_wait_for_the_rest(self, tmp_path: Path) -> None:
        fill(tmp_path, {f"{number}.png": b"x" for number in range(200)})
        source = SlowBackend(LocalBackend(tmp_path), latency_seconds=0.05)

        def interrupt(progress: StagingProgress) -> None:
            raise KeyboardInterrupt

        made = replace(stager(source), on_progress=interrupt)
        started = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            made.open()
        assert time.perf_counter() - started < 3  # all of it takes ten

    def test_a_watcher_that_raises_ends_it_cleanly(self, tmp_path: Path) -> None:
        fill(tmp_path, mixed_files())
        before, threads = held(), threading.active_count()

        def interrupt(progress: StagingProgress) -> None:
            raise KeyboardInterrupt

        made = stager(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            stage_files(
                made.source,
                made.survey(),
                made.options,
                guard=free_guard(),
                choice=NodeChoice((), ""),
                on_progress=interrupt,
            )
        assert (held(), threading.active_count()) == (before, threads)


class TestLimits:
    def test_too_small_a_limit_is_rejected_before_anything_is_read(self, tmp_path: Path) -> None:
        fill(tmp_path, {f"{number}.png": os.urandom(MIB) for number in range(4)})
        opened: list[str] = []
        source = Meddling(tmp_path, lambda path, count: opened.append(path))
        with pytest.raises(MemoryLimitError) as rejected:
            staged(source, limit=3 * MIB)
        assert opened == []
        assert str(rejected.value) == (
            "dataset pets: in_memory.memory_limit_gb\n"
            "  found     about 4.19 MB to stage: 4 files of 4.19 MB\n"
            "  expected  at most 3.15 MB\n"
            "  try       memory_limit_gb: 1 or more, fewer file_extensions, compression: zstd, or type: local"
        )

    def test_the_estimate_is_of_the_stored_size(self, tmp_path: Path) -> None:
        fill(tmp_path, {f"{number}.bmp": REPEATING * 100_000 for number in range(4)})
        with pytest.raises(MemoryLimitError):
            staged(tmp_path, limit=2 * MIB)
        with staged(tmp_path, limit=2 * MIB, compression="zstd") as backend:
            assert backend.stored < 2 * MIB

    def test_a_wrong_estimate_is_noticed_while_staging_and_leaves_nothing(self, tmp_path: Path) -> None:
        flattering = b"\0" * CHUNK + os.urandom(3 * CHUNK)  # only the first chunk is sampled
        fill(tmp_path, {f"{number}.bmp": flattering for number in range(6)})
        before = held()
        with pytest.raises(MemoryLimitError, match=r"MB staged, with more to come"):
            staged(tmp_path, limit=8 * MIB, compression="lz4")
        assert held() == before

    def test_main_memory_is_checked_before(self, tmp_path: Path) -> None:
        fill(tmp_path, {"a.png": os.urandom(MIB)})
        guard = StagingMemoryGuard("pets", limit=None, headroom=lambda: 4 * GIB + 1000, reserve=4 * GIB)
        with pytest.raises(MemoryLimitError, match=r"(?s)main memory.*at most 1 kB.*reserve of 4\.00 GiB.*type: local"):
            run(tmp_path, guard)

    def test_main_memory_is_watched_while_staging(self, tmp_path: Path) -> None:
        fill(tmp_path, {f"{number}.png": os.urandom(MIB) for number in range(8)})
        answers = iter([GIB, 500, 99])  # another process takes it
        guard = StagingMemoryGuard(
            "pets", limit=None, headroom=lambda: next(answers), reserve=100, measure_every=2 * MIB
        )
        before = held()
        with pytest.raises(MemoryLimitError, match=r"4\.19 MB staged, with more to come"):
            run(tmp_path, guard, threads=1)
        assert held() == before

    def test_unknown_main_memory_is_said_in_the_report(self, tmp_path: Path) -> None:
        fill(tmp_path, {"a.png": b"x"})
        guard = StagingMemoryGuard("pets", limit=None, headroom=lambda: None, reserve=GIB)
        made = stager(tmp_path)
        segments, report = stage_files(
            made.source, made.survey(), made.options, guard=guard, choice=NodeChoice((), "none")
        )
        assert "unknown" in report.notes[0]
        assert report.notes[0] in report.lines()
        close(segments)

    def test_what_was_given_back_is_free_again(self) -> None:
        guard = StagingMemoryGuard("pets", limit=10, headroom=lambda: GIB, reserve=0)
        guard.take(6)
        guard.check(StagingEstimate(1, 4, 4))
        with pytest.raises(MemoryLimitError):
            guard.check(StagingEstimate(1, 5, 5))
        guard.take(4)
        guard.give_back(4)
        guard.take(4)
        with pytest.raises(MemoryLimitError):
            guard.take(1)


class TestEstimate:
    def test_is_exact_without_compression(self, tmp_path: Path) -> None:
        made = stager(fill(tmp_path, mixed_files()))
        estimate = estimate_stored(made.source, made.survey().files, None)
        assert estimate.stored == estimate.raw == sum(map(len, mixed_files().values()))

    def test_each_kind_is_sampled(self, tmp_path: Path) -> None:
        images = {f"{number}.png": os.urandom(50_000) for number in range(20)}
        sounds = {f"{number}.wav": REPEATING * 3000 for number in range(20)}
        made = stager(fill(tmp_path, images | sounds))
        estimate = estimate_stored(made.source, made.survey().files, CODECS["lz4"])
        assert estimate.ratios[".png"] == 1.0
        assert estimate.ratios[".wav"] < 0.05
        assert 1_000_000 <= estimate.stored <= 1_100_000
        assert "lz4 leaves 3" in str(estimate)
        with staged(tmp_path, compression="lz4") as backend:
            assert backend.report is not None
            assert abs(backend.report.stored - estimate.stored) < 0.02 * estimate.stored

    def test_an_unreadable_sample_is_left_to_staging(self, tmp_path: Path) -> None:
        made = stager(fill(tmp_path, {"a.png": b"x" * 1000}))
        files = made.survey().files
        (tmp_path / "a.png").unlink()
        assert estimate_stored(made.source, files, CODECS["lz4"]).stored == 1000


class TestUnreadableFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return fill(tmp_path, {f"{number:02}.png": bytes([number]) * (2 * CHUNK) for number in range(20)})

    def test_a_file_that_vanishes_is_there_with_the_reason(self, folder: Path) -> None:
        source = Meddling(folder, lambda path, count: (folder / "07.png").unlink(missing_ok=True))
        size = (folder / "07.png").stat().st_size
        with staged(source) as backend, attach_backend(backend.handle()) as elsewhere:
            assert backend.report is not None
            assert backend.report.unreadable == (
                LeftOut("07.png", "it was removed while the dataset was being staged"),
            )
            assert backend.report.files == 19
            assert any("07.png: it was removed" in line for line in backend.report.lines())
            for reader in (backend, elsewhere):
                assert len(reader.list()) == 20
                assert reader.stat("07.png").size == size
                with pytest.raises(UnreadableMediaError, match=r"^07\.png: it was removed"):
                    reader.read("07.png")
                with pytest.raises(UnreadableMediaError, match=r"^07\.png: it was removed"):
                    reader.open("07.png")
            assert backend.digest("07.png") is None

    def test_more_media_than_the_threshold_are_rejected_by_the_guides_backend(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Captions do not count there: what they belong to is not known."""
        names = [f"{number:02}.{kind}" for number in range(20) for kind in ("png", "txt")]
        folder = fill(tmp_path, dict.fromkeys(names, b"x"))
        bad = {"03.png", "07.png", "01.txt", "02.txt", "04.txt"}

        def fail(path: str, count: int) -> None:
            if path in bad:
                raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(opening, "plain_backend", lambda root: Meddling(Path(root), fail))
        with opening.GH200InMemoryBackend(folder, corrupt_threshold=0.1, machine=this_machine()) as backend:
            assert backend.read("00.png") == b"x"
        bad.add("11.png")
        before = held()
        with pytest.raises(UnreadableFilesError) as rejected:
            opening.GH200InMemoryBackend(folder, corrupt_threshold=0.1, machine=this_machine())
        assert [file.path for file in rejected.value.files] == ["03.png", "07.png", "11.png"]
        assert "found     3 of 20" in str(rejected.value)
        assert "expected  at most 0.1" in str(rejected.value)
        assert "\n    03.png: Input/output error" in str(rejected.value)
        assert held() == before

    @pytest.mark.parametrize(("count", "total", "share", "many"), [
        (29, 100, 0.29, False), (30, 100, 0.29, True), (57, 100, 0.57, False), (1, 99, 0.01, True),
        (1, 100, 0.01, False), (0, 0, 0.01, False), (1, 100_000, 1e-05, False), (3, 3, 1.0, False),
    ])  # fmt: skip
    def test_a_share_is_taken_as_it_is_written(self, count: int, total: int, share: float, many: bool) -> None:
        assert too_many(count, total, share) is many

    def test_a_long_list_is_cut_in_print_only(self) -> None:
        files = [LeftOut(f"{number}.png", "gone") for number in range(50)]
        error = UnreadableFilesError("pets", files, total=100, threshold=0.01)
        assert len(error.files) == 50
        assert "... and 30 more" in str(error)

    @pytest.mark.parametrize("size", [0, 100, CHUNK + 5])
    def test_a_file_truncated_between_stat_and_read_is_read_again(self, folder: Path, size: int) -> None:
        def truncate(path: str, count: int) -> None:
            if path == "07.png" and count == 1:
                os.truncate(folder / path, size)

        with staged(Meddling(folder, truncate)) as backend:
            assert backend.read("07.png") == b"\x07" * size
            assert backend.digest("07.png") == xxhash.xxh3_128_hexdigest(b"\x07" * size)

    @pytest.mark.parametrize("size", [10, CHUNK, 5 * CHUNK])
    def test_a_file_that_grows_is_read_again(self, folder: Path, size: int) -> None:
        (folder / "07.png").write_bytes(b"x")

        def grow(path: str, count: int) -> None:
            if path == "07.png" and count == 1:
                (folder / path).write_bytes(b"y" * size)

        with staged(Meddling(folder, grow)) as backend:
            assert backend.read("07.png") == b"y" * size

    def test_a_file_that_never_rests_is_left_out_and_its_memory_given_back(self, folder: Path) -> None:
        def stir(path: str, count: int) -> None:
            if path == "07.png":
                os.utime(folder / path, ns=(count, count))

        with staged(Meddling(folder, stir)) as backend:
            assert backend.report is not None
            assert backend.report.unreadable == (LeftOut("07.png", "it kept changing while it was read (3 times)"),)
            assert backend.stored < 19 * 2 * CHUNK + MIB

    def test_reading_again_does_not_count_twice(self, folder: Path) -> None:
        def stir(path: str, count: int) -> None:
            if count < 3:
                os.utime(folder / path, ns=(count, count))

        with staged(Meddling(folder, stir), limit=41 * MIB) as backend:  # of which the files are 40
            assert len(backend.list()) == 20

    def test_a_file_longer_than_its_storage_says_is_not_cut_off(self, folder: Path) -> None:
        class Forgetful(LocalBackend):
            def stat(self, path: str) -> FileStat:
                return self.survey().files[path]

            def survey(self) -> Listing:  # a listing kept from before the file grew
                old = {"07.png": FileStat(100, 1), "08.png": FileStat(2 * CHUNK - 1, 1)}
                return Listing({**super().survey().files, **old})

        with staged(Forgetful(folder)) as backend:
            assert backend.report is not None
            assert [item.path for item in backend.report.unreadable] == ["07.png", "08.png"]

    def test_a_read_error_in_the_middle_gives_the_memory_back(self, folder: Path) -> None:
        class HalfBad(LocalBackend):
            def open(self, path: str) -> BinaryIO:
                return io.BufferedReader(BreaksOff(CHUNK + 5)) if path == "07.png" else super().open(path)

        with staged(HalfBad(folder)) as backend:
            assert backend.report is not None
            assert backend.report.unreadable == (LeftOut("07.png", "Input/output error"),)
            assert backend.stored < 19 * 2 * CHUNK + MIB

    @pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
    def test_a_file_we_may_not_read(self) -> None:
        with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
            folder = fill(Path(name), {f"{number}.png": b"x" for number in range(3)})
            folder.chmod(0o755)
            (folder / "1.png").chmod(0)
            made = stager(folder)
            os.seteuid(65534)
            try:
                segments, report = run(folder, free_guard(), source=made.source)
            finally:
                os.seteuid(0)
            assert report == (LeftOut("1.png", "Permission denied (EACCES)"),)
            close(segments)


class Meddling(LocalBackend):
    """Call a function on the folder whenever a file is about to be opened; `count` is the number of the call."""

    def __init__(self, folder: Path, act: Callable[[str, int], object]) -> None:
        super().__init__(folder)
        self._act = act
        self._counts: dict[str, int] = {}
        self._guard = threading.Lock()

    def open(self, path: str) -> BinaryIO:
        with self._guard:
            self._counts[path] = self._counts.get(path, 0) + 1
            self._act(path, self._counts[path])
        return super().open(path)


class BreaksOff(io.RawIOBase):
    """Gives zeros for a while, then fails as a bad disk does."""

    def __init__(self, good: int) -> None:
        self._left = good

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        if not self._left:
            raise OSError(errno.EIO, "Input/output error")
        count = min(self._left, len(buffer))
        buffer[:count] = bytes(count)
        self._left -= count
        return count


def free_guard() -> StagingMemoryGuard:
    return StagingMemoryGuard("pets", limit=None, headroom=lambda: None, reserve=0)


def run(
    folder: Path,
    guard: StagingMemoryGuard,
    *,
    threads: int = 2,
    source: LocalBackend | None = None,
) -> tuple[list[Segment], tuple[LeftOut, ...]]:
    backend = source or LocalBackend(folder)
    options = StagingOptions("pets", threads=threads)
    segments, report = stage_files(backend, backend.survey(), options, guard=guard, choice=NodeChoice((), ""))
    return segments, report.unreadable


def close(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()

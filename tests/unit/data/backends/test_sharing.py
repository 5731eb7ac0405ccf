"""Staged pages in several real processes."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from gracetune.config.dataset_config import Dataset, InMemory
from gracetune.data.backends.errors import MemoryLimitError, StorageError
from gracetune.data.backends.in_memory import fetch_staged
from gracetune.data.backends.open import attach_backend, open_backend
from gracetune.data.backends.storage import from_json, to_json
from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.sharing import LocalRanks, Offer
from unit.data.backends.helpers import MIB, Child, contents, fill, held, staged, this_machine

READER = """
import sys
from gracetune.data.backends.storage import from_json
from gracetune.data.backends.open import attach_backend
from gracetune.errors import GracetuneError
import xxhash
try:
    backend = attach_backend(from_json(sys.stdin.readline()))
except GracetuneError as error:
    print("refused:", " ".join(str(error).split()), flush=True)
    sys.exit()
while True:
    digest = xxhash.xxh3_128()
    for path in backend.list():
        digest.update(path.encode()); digest.update(backend.read(path))
    inodes = ",".join(str(segment.inode) for segment in backend.handle().segments)
    print(digest.hexdigest(), inodes, flush=True)
    if not sys.stdin.readline():
        break
"""
STAGER = """
import sys
from pathlib import Path
from gracetune.data.backends.storage import to_json
from gracetune.data.backends.open import GH200InMemoryBackend
backend = GH200InMemoryBackend(sys.argv[1])
print(to_json(backend.handle()), flush=True)
sys.stdin.readline()
"""
RANK = """
import sys
from gracetune.config.dataset_config import Dataset, InMemory
from gracetune.data.backends.open import open_backend
from gracetune.hostmem.sharing import LocalRanks
from gracetune.errors import GracetuneError
import xxhash
folder, rank, count, key, patience, limit = sys.argv[1:]
dataset = Dataset(id="pets", path=folder, type="in_memory", in_memory=InMemory(memory_limit_gb=float(limit)))
try:
    backend = open_backend(dataset, ranks=LocalRanks(int(rank), int(count), key, float(patience)))
except GracetuneError as error:
    print("refused:", " ".join(str(error).split()), flush=True)
    sys.exit(1)
digest = xxhash.xxh3_128()
for path in backend.list():
    digest.update(path.encode()); digest.update(backend.read(path))
print(digest.hexdigest(), ",".join(str(segment.inode) for segment in backend.handle().segments), flush=True)
sys.stdin.readline()
backend.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    images = {f"{number}.png": os.urandom(MIB) for number in range(40)}
    return fill(tmp_path / "data", images | {f"{number}.txt": b"a picture" for number in range(40)})


def digest_of(files: dict[str, bytes]) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(files):
        digest.update(path.encode())
        digest.update(files[path])
    return digest.hexdigest()


def inodes_of(handle_json: str) -> str:
    handle = from_json(handle_json)
    assert handle.kind == "in_memory"
    return ",".join(str(segment.inode) for segment in handle.segments)


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class TestWorkers:
    def test_a_new_process_maps_the_same_pages(self, folder: Path) -> None:
        with staged(folder) as backend, Child(READER) as reader:
            reader.tell(to_json(backend.handle()))
            assert reader.hear() == f"{digest_of(contents(backend))} {inodes_of(to_json(backend.handle()))}"

    def test_a_reader_keeps_its_pages_after_the_stager_closed(self, folder: Path) -> None:
        with staged(folder) as backend, Child(READER) as reader:
            reader.tell(to_json(backend.handle()))
            first = reader.hear()
            backend.close()
            reader.tell("again")
            assert reader.hear() == first

    def test_a_stager_killed_by_force_leaves_its_readers_reading_and_then_nothing(self, folder: Path) -> None:
        before = _staged_pages()
        with Child(STAGER, str(folder)) as stager, Child(READER) as reader:
            handle = stager.hear()
            reader.tell(handle)
            first = reader.hear()
            assert _staged_pages() - before > 35 * MIB
            stager.kill()
            reader.tell("again")
            assert reader.hear() == first
            with pytest.raises(StagingError, match=r"has ended\n  try  restart the run"):
                attach_backend(from_json(handle))
            reader.kill()
            assert eventually(lambda: _staged_pages() - before < 10 * MIB)

    def test_an_outdated_handle_is_rejected(self, folder: Path) -> None:
        with staged(folder) as backend:
            handle = to_json(backend.handle())
        with Child(READER) as reader:
            reader.tell(handle)
            assert reader.hear().startswith("refused: the data staged by process")

    def test_a_program_started_by_the_stager_does_not_keep_the_memory(self, folder: Path) -> None:
        with staged(folder), Child("import time; print('up', flush=True); time.sleep(60)") as child:
            assert child.hear() == "up"
            links = [os.readlink(link) for link in Path(f"/proc/{child.process.pid}/fd").iterdir()]  # noqa: PTH115
            assert not [link for link in links if "gracetune-staged" in link]


class TestRanks:
    @pytest.fixture
    def key(self) -> str:
        return str(uuid.uuid4())

    def rank(self, folder: Path, rank: int, count: int, key: str, *, patience: float = 60, limit: float = 1) -> Child:
        return Child(RANK, str(folder), str(rank), str(count), key, str(patience), str(limit))

    def test_one_copy_for_all_of_them_in_whatever_order_they_start(self, folder: Path, key: str) -> None:
        with self.rank(folder, 2, 3, key) as second:
            time.sleep(0.3)
            with self.rank(folder, 0, 3, key) as zero, self.rank(folder, 1, 3, key) as first:
                heard = [zero.hear(), first.hear(), second.hear()]
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert heard[0].split()[0] == digest_of(files)
        assert heard[0] == heard[1] == heard[2]

    def test_the_others_go_on_when_rank_zero_is_killed_afterwards(self, folder: Path, key: str) -> None:
        with self.rank(folder, 0, 2, key) as zero, self.rank(folder, 1, 2, key) as first:
            assert zero.hear() == first.hear()
            zero.kill()
            first.tell("")
            assert first.process.wait(timeout=30) == 0

    def test_errors_of_rank_zero_reach_the_other_ranks(self, folder: Path, key: str) -> None:
        with self.rank(folder, 1, 2, key) as first:
            dataset = Dataset(id="pets", path=str(folder), type="in_memory", in_memory=InMemory(memory_limit_gb=0.001))
            with pytest.raises(MemoryLimitError) as rejected:
                open_backend(dataset, machine=this_machine(), ranks=LocalRanks(0, 2, key))
            stated = " ".join(str(rejected.value).split())
            assert first.hear() == f"refused: rank 0 could not stage the dataset: {stated}"

    def test_a_missing_folder_reaches_the_other_ranks_at_once(self, folder: Path, tmp_path: Path, key: str) -> None:
        with self.rank(folder, 1, 2, key) as first:
            dataset = Dataset(id="pets", path=str(tmp_path / "nowhere"), type="in_memory")
            began = time.monotonic()
            with pytest.raises(StorageError):
                open_backend(dataset, machine=this_machine(), ranks=LocalRanks(0, 2, key))
            assert "rank 0 could not stage the dataset" in first.hear()
            assert time.monotonic() - began < 30  # and not the 60 s that a rank waits for rank 0

    def test_a_rejection_ends_soon_and_frees_the_name(self, tmp_path: Path, key: str) -> None:
        offer = Offer(LocalRanks(0, 3, key), "pets")
        began = time.monotonic()
        offer.reject("no", linger=0.2)
        assert time.monotonic() - began < 5
        again = Offer(LocalRanks(0, 2, key), "pets")  # would be rejected if the name were taken
        stated: list[str] = []

        def ask() -> None:
            with pytest.raises(StagingError) as rejected:
                fetch_staged(LocalRanks(1, 2, key), "pets")
            stated.append(str(rejected.value))

        asking = threading.Thread(target=ask)
        asking.start()
        again.reject("still no", linger=30)
        assert time.monotonic() - began < 20, "every rank has heard: nothing to wait for"
        asking.join(timeout=10)
        assert stated == ["rank 0 could not stage the dataset: still no"]
        assert "gracetune-share" not in [thread.name for thread in threading.enumerate()]

    def test_rank_zero_killed_while_staging_is_detected_at_once(self, key: str) -> None:
        code = (
            "import sys, time\nfrom gracetune.hostmem.sharing import LocalRanks, Offer\n"
            "offer = Offer(LocalRanks(0, 2, sys.argv[1]), 'pets')\nprint('offered', flush=True)\ntime.sleep(60)"
        )
        with Child(code, key) as zero:
            assert zero.hear() == "offered"
            outcome: list[str] = []

            def ask() -> None:
                try:
                    fetch_staged(LocalRanks(1, 2, key), "pets")
                except StagingError as error:
                    outcome.append(str(error))

            asking = threading.Thread(target=ask)
            asking.start()
            time.sleep(0.3)
            assert asking.is_alive()
            zero.kill()
            asking.join(timeout=10)
        assert outcome == ["rank 0 ended before it answered local rank 1\n  try  look at its messages"]

    def test_a_rank_zero_that_never_comes(self, key: str) -> None:
        with pytest.raises(StagingError, match=r"(?s)local rank 3 found no rank 0 .* within 0\.2 s.*try"):
            fetch_staged(LocalRanks(3, 4, key, patience_seconds=0.2), "pets")

    def test_two_rank_zeros_of_one_launch(self, key: str) -> None:
        offer = Offer(LocalRanks(0, 2, key), "pets")
        with pytest.raises(StagingError, match=r"(?s)already being shared.*try"):
            Offer(LocalRanks(0, 2, key), "pets")
        Offer(LocalRanks(0, 2, key), "cats").close()
        offer.close()

    def test_a_single_process_opens_no_socket(self, folder: Path, key: str) -> None:
        dataset = Dataset(id="pets", path=str(folder), type="in_memory")
        threads = threading.active_count()
        with open_backend(dataset, machine=this_machine(), ranks=LocalRanks(0, 1, key)) as backend:
            assert threading.active_count() == threads
            assert len(backend.list()) == 80

    def test_closing_before_the_others_came_gives_everything_back(self, folder: Path, key: str) -> None:
        before, threads = held(), threading.active_count()
        dataset = Dataset(id="pets", path=str(folder), type="in_memory")
        backend = open_backend(dataset, machine=this_machine(), ranks=LocalRanks(0, 3, key))
        handle, files = fetch_staged(LocalRanks(1, 3, key), "pets")
        assert len(handle.segments) == len(files)
        for file in files:
            file.close()
        backend.close()
        assert (held(), threading.active_count()) == (before, threads)

    def test_the_offer_ends_by_itself_when_all_have_come(self, folder: Path, key: str) -> None:
        dataset = Dataset(id="pets", path=str(folder), type="in_memory")
        with open_backend(dataset, machine=this_machine(), ranks=LocalRanks(0, 2, key)):
            inside = held()
            with open_backend(dataset, ranks=LocalRanks(1, 2, key)) as other:
                assert len(other.list()) == 80
                assert eventually(lambda: "gracetune-share" not in [thread.name for thread in threading.enumerate()])
            assert held() < inside

    @pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
    def test_another_user_is_rejected_and_does_not_count(self, folder: Path, key: str) -> None:
        dataset = Dataset(id="pets", path=str(folder), type="in_memory")
        ranks = LocalRanks(0, 2, key)
        with open_backend(dataset, machine=this_machine(), ranks=ranks), socket.socket(socket.AF_UNIX) as stranger:
            os.seteuid(65534)
            try:
                stranger.connect(ranks.address("pets"))
            finally:
                os.seteuid(0)
            assert socket.recv_fds(stranger, 100, 10)[:2] == (b"", [])
            with open_backend(dataset, ranks=LocalRanks(1, 2, key)) as other:
                assert len(other.list()) == 80

    def test_ranks_are_counted_from_zero(self) -> None:
        with pytest.raises(ValueError, match="rank 2 of 2"):
            LocalRanks(2, 2, "x")


def _staged_pages() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))

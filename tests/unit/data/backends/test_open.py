from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from gracetune.config.dataset_config import Captions, CaptionTable, Dataset, InMemory
from gracetune.data.backends.errors import MemoryLimitError, StorageError
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import GH200InMemoryBackend, attach_backend, open_backend
from gracetune.data.backends.pool import BackendPool, StagingCheck, sharing_notes
from gracetune.data.backends.storage import from_json, to_json
from gracetune.data.backends.url import UrlBackend
from gracetune.data.media import kind_of
from gracetune.data.staging.file_selection import MEDIA, select, selection_for
from gracetune.data.staging.stager import stager_for, threads_for
from gracetune.errors import ConfigError
from gracetune.hostmem.sensors import HostSensor
from unit.data.backends.helpers import contents, fill, held, put, this_machine
from unit.hardware.machines import load

FILES = {"a.jpg": b"A" * 2000, "a.txt": b"a cat", "b.PNG": b"B", "clip.mp4": b"M", "song.wav": b"W", "notes.psd": b"P"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "pets", FILES)


class TestConfiguredDatasets:
    def test_local(self, folder: Path) -> None:
        with open_backend(Dataset(id="pets", path=str(folder))) as backend:
            assert isinstance(backend, LocalBackend)
            assert contents(backend) == FILES

    def test_url(self) -> None:
        url = f"memory://{uuid.uuid4()}"
        backend = open_backend(Dataset(id="pets", path=url, type="url"))
        assert isinstance(backend, UrlBackend)

    def test_in_memory(self, folder: Path) -> None:
        dataset = Dataset(id="pets", path=str(folder), type="in_memory", in_memory=InMemory(compression="zstd"))
        with open_backend(dataset, machine=this_machine()) as backend:
            assert isinstance(backend, InMemoryBackend)
            assert backend.list() == ("a.jpg", "a.txt", "b.PNG")
            assert backend.report is not None
            assert backend.report.dataset == "pets"
            assert backend.report.compressed_files == 1

    def test_in_memory_from_a_url(self) -> None:
        url = f"memory://{uuid.uuid4()}"
        put(url, "a.jpg", b"A")
        with open_backend(Dataset(id="pets", path=url, type="in_memory"), machine=this_machine()) as backend:
            assert contents(backend) == {"a.jpg": b"A"}

    def test_file_extensions_restrict_media_and_nothing_else(self, folder: Path) -> None:
        dataset = Dataset(id="pets", path=str(folder), type="in_memory", in_memory=InMemory(file_extensions=("PNG",)))
        with open_backend(dataset, machine=this_machine()) as backend:
            assert backend.list() == ("a.txt", "b.PNG")

    def test_a_limit_too_small_names_the_dataset(self, folder: Path) -> None:
        dataset = Dataset(id="pets", path=str(folder), type="in_memory", in_memory=InMemory(memory_limit_gb=1e-6))
        with pytest.raises(MemoryLimitError, match=r"dataset pets: in_memory\.memory_limit_gb"):
            open_backend(dataset, machine=this_machine())

    def test_the_machine_is_probed_by_default(self, folder: Path) -> None:
        with open_backend(Dataset(id="pets", path=str(folder), type="in_memory")) as backend:
            assert len(backend.list()) == 3

    def test_what_is_no_file_is_left_out_and_does_not_count_as_unreadable(self, folder: Path) -> None:
        (folder / "a.jpg").unlink()
        os.mkfifo(folder / "a.jpg")
        (folder / "b.PNG").unlink()
        (folder / "b.PNG").symlink_to("/etc/hostname")
        with open_backend(
            Dataset(id="pets", path=str(folder), type="in_memory", corrupt_threshold=0.0), machine=this_machine()
        ) as backend:
            assert backend.list() == ("a.txt",)
            assert isinstance(backend, InMemoryBackend)
            assert backend.report is not None
            reasons = {item.path: item.reason for item in backend.report.left_out}
            assert "neither" in reasons["a.jpg"]
            assert "out of the folder" in reasons["b.PNG"]

    @pytest.mark.parametrize("kind", ["local", "in_memory"])
    def test_a_folder_that_is_not_there(self, tmp_path: Path, kind: str) -> None:
        with pytest.raises(StorageError, match="check the spelling"):
            open_backend(Dataset(id="pets", path=str(tmp_path / "nowhere"), type=kind), machine=this_machine())

    @pytest.mark.parametrize("kind", ["local", "url", "in_memory"])
    def test_every_kind_has_a_handle(self, folder: Path, kind: str) -> None:
        path = str(folder)
        if kind == "url":
            path = f"memory://{uuid.uuid4()}"
            put(path, "a.jpg", b"A")
        with (
            open_backend(Dataset(id="pets", path=path, type=kind), machine=this_machine()) as backend,
            attach_backend(from_json(to_json(backend.handle()))) as other,
        ):
            assert type(other) is type(backend)
            assert contents(other) == contents(backend)

    def test_a_relative_folder_is_found_from_another_working_directory(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder.parent)
        handle = open_backend(Dataset(id="pets", path="pets")).handle()
        monkeypatch.chdir("/")
        assert contents(attach_backend(handle)) == FILES


class TestPool:
    def dataset(self, folder: Path, name: str, **values: object) -> Dataset:
        return Dataset.model_validate({"id": name, "path": str(folder), "type": "in_memory", **values})

    def test_datasets_of_one_folder_share_one_copy(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder.parent)
        before = held()
        datasets = [
            self.dataset(folder, "small", resolution=512, in_memory={"memory_limit_gb": 3.0, "num_workers": 1}),
            self.dataset(folder, "large", resolution=1024, repeats=3, in_memory={"memory_limit_gb": 2.0}),
            self.dataset(Path("pets"), "relative", in_memory={"num_workers": 2}),
            self.dataset(folder, "clips", dataset_type="video"),
        ]
        with BackendPool(datasets, machine=this_machine()) as pool:
            [shared] = pool.folders
            assert shared.ids == ("small", "large", "relative", "clips")
            assert (shared.dataset.in_memory.memory_limit_gb, shared.dataset.in_memory.num_workers) == (2.0, 2)
            assert [*sharing_notes(pool.folders)] == [
                f"datasets small, large, relative, clips share {folder}: it is staged once; "
                "memory_limit_gb 2, the smallest of them, applies to all"
            ]
            small = pool.open(datasets[0])
            assert all(pool.open(dataset) is small for dataset in datasets)
            assert held()[1] == before[1] + 1
            assert set(contents(small)) == {"a.jpg", "a.txt", "b.PNG", "clip.mp4", "song.wav"}
        assert held() == before

    def test_different_compression_is_staged_again(self, folder: Path, tmp_path: Path) -> None:
        other = fill(tmp_path / "other", {"a.jpg": b""})
        variants = [
            self.dataset(folder, "a"),
            self.dataset(folder, "b", in_memory={"compression": "lz4"}),
            self.dataset(folder, "c", type="local"),
            self.dataset(other, "d"),
        ]
        with BackendPool(variants, machine=this_machine()) as pool:
            assert [*sharing_notes(pool.folders)] == [
                f"{folder} is staged again for b: compression is lz4 there and none for a; "
                "give both the same in_memory.compression to stage it once"
            ]
            assert len({id(pool.open(variant)) for variant in variants}) == 4
            assert len(pool.opened) == 4

    def test_mask_folders_are_opened_as_well(self, folder: Path) -> None:
        """The masks of a dataset are in a separate folder."""
        with BackendPool([self.dataset(folder, "a")], machine=this_machine()) as pool:
            wide = self.dataset(folder, "masks", dataset_type="video")
            assert pool.open(wide) is not pool.open(self.dataset(folder, "a"))
            assert "clip.mp4" in pool.open(wide).list()

    def test_disabled_datasets_open_nothing(self, folder: Path) -> None:
        with BackendPool([self.dataset(folder, "a", disabled=True)], machine=this_machine()) as pool:
            assert not pool.folders

    def test_a_failing_dataset_closes_the_others(self, folder: Path) -> None:
        before = held()
        with BackendPool(machine=this_machine()) as pool:
            pool.open(self.dataset(folder, "a"))
            with pytest.raises(StorageError):
                pool.open(self.dataset(folder / "nowhere", "b"))
            assert held() > before
        assert held() == before

    def test_each_staging_is_watched_under_its_name(self, folder: Path) -> None:
        seen: list[tuple[str, int]] = []
        with BackendPool(
            machine=this_machine(), watch=lambda dataset: lambda now: seen.append((dataset.id, now.files))
        ) as pool:
            pool.open(self.dataset(folder, "a"))
        assert seen[-1] == ("a", 3)


class TestSelection:
    @pytest.mark.parametrize(
        ("kind", "staged"),
        [
            ("image", {"a.jpg", "a.txt", "b.PNG"}),
            ("video", {"a.jpg", "a.txt", "b.PNG", "clip.mp4", "song.wav"}),
            ("audio", {"a.txt", "song.wav"}),
            ("conditioning", {"a.jpg", "a.txt", "b.PNG", "clip.mp4", "song.wav"}),
        ],
    )
    def test_by_dataset_type(self, folder: Path, kind: str, staged: set[str]) -> None:
        listing = selection_for(Dataset(id="x", path="x", dataset_type=kind)).apply(LocalBackend(folder).survey())
        assert set(listing.files) == staged

    def test_every_decodable_extension_is_staged(self) -> None:
        assert all(kind_of(f"x{extension}") for extensions in MEDIA.values() for extension in extensions)

    def test_captions_and_tables_with_names_of_their_own(self) -> None:
        captions = Captions(extension="prompt", table=CaptionTable(path="meta.ndjson"))
        sidecars = selection_for(Dataset(id="x", path="x", captions=captions)).sidecars
        assert {".prompt", ".ndjson", ".txt", ".parquet", ".jsonl"} <= sidecars

    @pytest.mark.parametrize("spelling", ["jpg", ".JPG", "*.jpg", " .Jpg "])
    def test_spellings_of_an_extension(self, spelling: str) -> None:
        assert select((), extensions=[spelling]).media == {".jpg"}


class TestNameOfTheGuides:
    def test_stages_a_folder(self, folder: Path) -> None:
        with GH200InMemoryBackend(
            folder, compression="lz4", num_workers=2, memory_limit_gb=1, file_extensions=["jpg", "mp4"]
        ) as backend:
            assert isinstance(backend, InMemoryBackend)
            assert backend.list() == ("a.jpg", "a.txt", "clip.mp4")
            assert backend.read("a.jpg") == FILES["a.jpg"]
            assert backend.report is not None
            assert (backend.report.threads, backend.report.compressed_files) == (2, 1)

    @pytest.mark.parametrize("root", [str, Path, os.fspath])
    def test_takes_any_spelling_of_a_folder(self, folder: Path, root: type) -> None:
        with GH200InMemoryBackend(root(folder), compression=None) as backend:
            assert backend.root == str(folder)
            assert len(backend.list()) == 5

    def test_all_wrong_options_are_reported_at_once(self, folder: Path) -> None:
        with pytest.raises(ConfigError) as rejected:
            GH200InMemoryBackend(folder, compression="gzip", num_workers=0, memory_limit_gb=-1)
        assert [problem.key for problem in rejected.value.problems] == ["compression", "num_workers", "memory_limit_gb"]
        assert "one of none, lz4, zlib, snappy, zstd" in str(rejected.value)

    def test_threads_are_one_for_each_cpu_up_to_72(self) -> None:
        assert threads_for(load("gh200-numa"), None) == 72
        assert threads_for(load("gh200-numa"), 5) == 5

    def test_the_report_says_where_the_pages_are(self, folder: Path) -> None:
        superchip = this_machine().model_copy(update={"profile": load("gh200-numa").profile})
        with GH200InMemoryBackend(folder, machine=superchip) as backend:
            assert backend.report is not None
            numa = backend.report.numa
            assert "bound to node 0" in numa.reason  # or "not bound to", and then why
            assert f"memory: {numa.reason}" in backend.report.lines()


def test_importing_leaves_heavy_libraries_alone() -> None:
    code = (
        "import sys, gracetune.data.backends.open; print({'torch', 'fsspec', 'numpy', 'PIL', 'av'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class TestRehearsal:
    def test_stages_nothing_and_estimates_what_would_be(self, folder: Path) -> None:
        before = held()
        rehearsal = StagingCheck(machine=this_machine())
        dataset = Dataset(id="pets", path=str(folder), type="in_memory")
        backend = rehearsal.open(dataset)
        assert isinstance(backend, LocalBackend)
        assert held() == before
        with open_backend(dataset, machine=this_machine()) as staged:
            assert isinstance(staged, InMemoryBackend)
            assert staged.report is not None
            assert (staged.report.files, staged.report.raw) == (
                rehearsal.estimates["pets"].files,
                rehearsal.estimates["pets"].raw,
            )

    def test_a_shared_folder_is_estimated_once(self, folder: Path) -> None:
        datasets = [Dataset(id=name, path=str(folder), type="in_memory") for name in ("a", "b")]
        rehearsal = StagingCheck(datasets, this_machine())
        for dataset in datasets:
            rehearsal.open(dataset)
        assert [*rehearsal.estimates] == ["a"]
        assert rehearsal.notes == [f"datasets a, b share {folder}: it is staged once"]

    def test_unstaged_datasets_are_not_estimated(self, folder: Path) -> None:
        rehearsal = StagingCheck(machine=this_machine())
        rehearsal.open(Dataset(id="pets", path=str(folder)))
        assert rehearsal.estimates == {}

    def test_memory_of_other_datasets_counts_as_used(self, folder: Path) -> None:
        stager = stager_for(Dataset(id="pets", path=str(folder), type="in_memory"), this_machine())
        free = HostSensor(this_machine().gpus).read().headroom
        assert free is not None
        assert stager.estimate()[0].files > 0
        with pytest.raises(MemoryLimitError, match="dataset pets: main memory"):
            stager.estimate(used_by_others=free)

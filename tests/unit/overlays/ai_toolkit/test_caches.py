"""ai-toolkit's cache files out of memory: the same tensors, no file opened while it trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gracetune.hardware import probe
from gracetune.hostmem.sensors import HostReading, HostSensor
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.units import GIB
from unit.hardware.machines import load as machine
from unit.overlays.ai_toolkit.checkouts import Checkout

BLOCK = {"caches": {"latents": "memory", "text": "memory"}}


def without_files(checkout: Checkout, block: Any, **changes: Any) -> Any:
    """Trains with every cache file gone from the disk once it is cached."""
    job = checkout.job(checkout.process(block, **changes))

    def take_away() -> None:
        for folder in ("_latent_cache", "_t_e_cache"):
            shutil.rmtree(checkout.root / "pictures" / folder, ignore_errors=True)

    job.process[0].before_loop = take_away
    job.run()
    return job.process[0]


def report(checkout: Checkout) -> Any:
    return json.loads((checkout.output() / "gracetune_overlay.json").read_text())["features"]["caches"]


def resident(checkout: Checkout, limit: int | None = None, **changes: Any) -> Any:
    ours = checkout.ours("resident")
    return ours.ResidentFiles("latent_cache", False, ours.Budget(probe(), limit), lambda line: None, **changes)


def forbidden() -> Any:
    raise AssertionError("read from disk")


class NoManagedMemory:
    """A heap that has nothing to give."""

    def empty(self, *args: Any) -> Any:
        raise UnifiedMemoryError("none left")


class TestTraining:
    def test_losses_are_the_same_and_the_files_are_not_needed(self, checkout: Checkout) -> None:
        plain = checkout.run(name="plain")
        assert without_files(checkout, BLOCK).losses == plain.losses

    def test_plain_ai_toolkit_does_need_them(self, checkout: Checkout) -> None:
        with pytest.raises(FileNotFoundError):
            without_files(checkout, {"caches": {"latents": "memory"}})

    def test_reads_are_counted(self, checkout: Checkout) -> None:
        checkout.run(BLOCK)
        found = report(checkout)
        assert (found["latents"]["files"], found["latents"]["hits"], found["latents"]["disk_reads"]) == (3, 6, 0)
        # A caption and a dropped caption for each image.
        assert (found["text"]["files"], found["text"]["hits"], found["text"]["disk_reads"]) == (6, 6, 0)

    def test_reads_of_loader_processes_are_not_claimed_to_be_counted(self, checkout: Checkout) -> None:
        dataset = {**checkout.process()["datasets"][0], "num_workers": 2, "prefetch_factor": 2}
        checkout.run(BLOCK, datasets=[dataset])
        found = report(checkout)["latents"]
        assert found["hits"] is None
        assert "reads are not counted: 2 loader processes make them" in found["notes"]

    def test_loader_processes_that_are_not_forked_read_from_disk_with_a_note(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("multiprocessing.get_start_method", lambda: "forkserver")
        dataset = {**checkout.process()["datasets"][0], "num_workers": 2, "prefetch_factor": 2}
        checkout.run(BLOCK, datasets=[dataset])
        assert "they read from disk; `num_workers: 0` serves from memory" in capsys.readouterr().err
        assert any("not forked" in note for note in report(checkout)["latents"]["notes"])

    def test_unified_memory_without_a_gpu_is_plain_memory_and_says_so(
        self, checkout: Checkout, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plain = checkout.run(name="plain")
        block = {"memory": {}, "caches": {"latents": "unified_memory", "text": "unified_memory"}}
        process = without_files(checkout, block)
        assert process.losses == plain.losses
        assert "cache type unified_memory is not used on this machine" in capsys.readouterr().err
        assert any("cache type unified_memory is not used" in note for note in report(checkout)["latents"]["notes"])

    def test_what_is_over_the_limit_stays_on_disk(self, checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
        plain = checkout.run(name="plain")
        process = checkout.run({"caches": {"latents": "memory", "text": "memory", "limit_gib": 2048 / GIB}})
        assert process.losses == plain.losses
        found = report(checkout)
        assert found["latents"]["files"] + found["text"]["files"] > 0
        assert found["latents"]["left_on_disk"] + found["text"]["left_on_disk"] > 0
        assert found["latents"]["disk_reads"] + found["text"]["disk_reads"] > 0
        assert "stay on disk: limit_gib leaves" in capsys.readouterr().err

    def test_what_main_memory_cannot_spare_stays_on_disk(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plain = checkout.run(name="plain")
        monkeypatch.setattr(HostSensor, "read", lambda sensor: HostReading(GIB, None))
        assert checkout.run(BLOCK).losses == plain.losses
        assert report(checkout)["latents"]["files"] == 0
        assert "3 of 3 files of the latent_cache stay on disk: main memory has 0 B" in capsys.readouterr().err

    def test_a_job_that_caches_nothing_is_told(self, checkout: Checkout) -> None:
        job = checkout.job(checkout.process(BLOCK))
        checkout.module("toolkit.dataloader_mixins").Dataset.cache_latents_all_latents = lambda self: None
        with pytest.raises(AttributeError):  # the stand-in cannot train without latents
            job.run()
        assert "nothing was cached, so nothing was served" in report(checkout)["latents"]["notes"]


class TestResidentFiles:
    TENSORS = (
        torch.arange(12.0).reshape(3, 4).bfloat16(),
        torch.tensor(5, dtype=torch.int32),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        torch.randn(1, 2, 3, 4),
        torch.randn(5).half(),
        torch.randn(4).to(torch.float8_e4m3fn),
    )

    def test_give_back_every_kind_of_tensor_bit_for_bit(self, checkout: Checkout, tmp_path: Path) -> None:
        file = str(tmp_path / "x.safetensors")
        save_file({f"t{number}": tensor for number, tensor in enumerate(self.TENSORS)}, file)
        files = resident(checkout)
        files.add([file])
        found, expected = files.find(file, forbidden), load_file(file)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        files.close()

    def test_hand_out_copies(self, checkout: Checkout, tmp_path: Path) -> None:
        file = str(tmp_path / "x.safetensors")
        save_file({"latent": torch.ones(4)}, file)
        files = resident(checkout)
        files.add([file])
        files.find(file, forbidden)["latent"].zero_()
        assert files.find(file, forbidden)["latent"].tolist() == [1, 1, 1, 1]

    def test_know_a_file_by_its_place(
        self, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_file({"latent": torch.ones(1)}, tmp_path / "x.safetensors")
        files = resident(checkout)
        files.add([str(tmp_path / "x.safetensors")])
        monkeypatch.chdir(tmp_path)
        assert files.find("x.safetensors", forbidden)["latent"].tolist() == [1]

    def test_leave_other_files_alone(self, checkout: Checkout, tmp_path: Path) -> None:
        files = resident(checkout)
        theirs = {"other": torch.ones(1)}
        assert files.find(str(tmp_path / "other.safetensors"), lambda: theirs) is theirs
        assert files.counts.disk_reads == 0

    def test_a_damaged_or_missing_file_is_left_to_ai_toolkit(self, checkout: Checkout, tmp_path: Path) -> None:
        whole, damaged = tmp_path / "whole.safetensors", tmp_path / "damaged.safetensors"
        save_file({"latent": torch.ones(1)}, whole)
        damaged.write_bytes(whole.read_bytes()[:-1])
        files = resident(checkout)
        files.add([str(damaged), str(tmp_path / "gone.safetensors"), str(whole)])
        assert (files.counts.files, files.counts.unreadable) == (1, 2)
        with pytest.raises(ZeroDivisionError):
            files.find(str(damaged), lambda: {"x": torch.ones(1 // 0)})

    def test_unified_memory_that_is_rejected_becomes_plain_memory_and_says_so(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        save_file({"latent": torch.ones(4)}, tmp_path / "x.safetensors")
        ours, stated = checkout.ours("resident"), []
        files = ours.ResidentFiles(
            "latent_cache", True, ours.Budget(machine("gh200-numa"), None), stated.append, 0, NoManagedMemory()
        )
        files.add([str(tmp_path / "x.safetensors")])
        assert files.find(str(tmp_path / "x.safetensors"), forbidden)["latent"].tolist() == [1, 1, 1, 1]
        assert (
            stated[0] == "latent_cache: unified memory is not available, plain main memory is used instead: none left"
        )
        assert files.notes == stated[:1]

    def test_without_the_memory_layer_unified_memory_says_why_not(self, checkout: Checkout, tmp_path: Path) -> None:
        save_file({"latent": torch.ones(4)}, tmp_path / "x.safetensors")
        ours, stated = checkout.ours("resident"), []
        files = ours.ResidentFiles(
            "latent_cache", True, ours.Budget(machine("gh200-numa"), None), stated.append, 0, "no driver here"
        )
        files.add([str(tmp_path / "x.safetensors")])
        assert stated[0].endswith("cache type unified_memory is not available: no driver here")

    def test_are_read_once_however_often_they_are_named(self, checkout: Checkout, tmp_path: Path) -> None:
        file = tmp_path / "x.safetensors"
        save_file({"latent": torch.ones(1)}, file)
        files = resident(checkout)
        files.add([str(file), str(file)])
        files.add([str(file)])
        assert files.counts.files == 1

    def test_nothing_to_add_takes_nothing(self, checkout: Checkout) -> None:
        files = resident(checkout)
        files.add([])
        assert (files.counts.bytes, files.budget.taken) == (0, 0)

    def test_a_later_smaller_file_still_fits(self, checkout: Checkout, tmp_path: Path) -> None:
        for name, size in (("large", 4096), ("small", 8)):
            save_file({"latent": torch.ones(size)}, tmp_path / f"{name}.safetensors")
        files = resident(checkout, limit=1024)
        files.add([str(tmp_path / "large.safetensors"), str(tmp_path / "small.safetensors")])
        assert (files.counts.files, files.counts.left_on_disk, files.budget.taken) == (1, 1, 512)
        assert "small.safetensors" not in str(files.notes)


WORKERS = """
import shutil, sys, torch
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from gracetune.hostmem.sensors import HostSensor
from unit.overlays.ai_toolkit.checkouts import Checkout, plenty_of_memory
HostSensor.read = plenty_of_memory
checkout = Checkout(Path({root!r}))
dataset = {{**checkout.process()["datasets"][0], "num_workers": 2, "prefetch_factor": 2}}
job = checkout.job(checkout.process({{"caches": {{"latents": "memory"}}}}, datasets=[dataset]))
def look():
    expected = [item.get_latent() for item in job.process[0].datasets[0].file_list]
    shutil.rmtree(checkout.root / "pictures" / "_latent_cache")
    loader = torch.utils.data.DataLoader(job.process[0].datasets[0], batch_size=None, num_workers=2)
    assert all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True))
    print("served", len(expected))
job.process[0].before_loop = look
job.run()
"""


@pytest.mark.full
def test_loader_processes_are_served_too(checkout: Checkout) -> None:
    tests = str(Path(__file__).parents[3])
    code = WORKERS.format(tests=tests, root=str(checkout.root))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip().endswith("served 3"), done.stderr

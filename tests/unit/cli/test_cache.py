"""Complete runs of `gracetune cache` on tiny models and generated media."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from rich.progress import Progress
from typer.testing import CliRunner

from gracetune.cache.errors import CacheBusyError, CacheError, CacheFullError, ForeignFolderError
from gracetune.cache.pass_worker import PassProgress as PassProgress
from gracetune.cache.store import DiskStore
from gracetune.cli.cache import app
from gracetune.cli.cache_view import ProgressBars, ProgressLines
from gracetune.cli.main import main
from gracetune.config.environment import SIGUSR1_VARIABLE
from gracetune.errors import ConfigError, GracetuneError
from unit.cache.processes import Child, mount_tmpfs, own_mounts, resize_tmpfs
from unit.cache.tiny_runs import FLAVOURS, TinyModel, config_dict, contents, datasets, same
from unit.data.folders import image, images, write

Job = Callable[..., str]


@pytest.fixture
def job(tmp_path: Path, tiny_model: TinyModel) -> Job:
    """Writes a config for six images, or for the given datasets, and returns its path."""

    def make(*found: dict[str, Any], family: str = "sdxl", name: str = "config", **values: Any) -> str:
        chosen = [*found] or [photos(tmp_path)]
        config = config_dict(tmp_path, family, tiny_model(family, FLAVOURS[family]), chosen, **values)
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"gracetune": 1, **config}))
        return str(file)

    return make


def photos(tmp_path: Path, **values: Any) -> dict[str, Any]:
    folder = tmp_path / "photos"
    if not folder.exists():
        # None of them has the shape of its bucket, so that where they are cut matters to all.
        files = {f"{number}.png": image(112, 80, seed=number) for number in range(6)}
        write(folder, {**files, **{f"{number}.txt": f"image number {number}" for number in range(6)}})
    return {"path": str(folder), "resolution": 64.0, "crop": {"enabled": True, "style": "center"}, **values}


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def encoded(report: dict[str, Any]) -> tuple[int, int]:
    return report["text"]["encoded"], report["latents"]["encoded"]


def groups(report: dict[str, Any], name: str) -> dict[str, int]:
    """Number of entries of one kind, by store."""
    return {Path(store["folder"]).name: store[name]["entries"] for store in report["stores"]}


@pytest.fixture
def listens_to_ctrl_c() -> Iterator[None]:
    """Restore the SIGINT handler of a terminal: a shell starts background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestBuild:
    def test_prints_what_was_encoded_and_where(self, job: Job, tmp_path: Path) -> None:
        file = job()
        first = " ".join(run("build", file).stdout.split())
        assert "captions 6 wanted, 6 encoded (" in first
        assert "latents 6 wanted, 6 encoded (" in first
        assert f"cache {tmp_path}/out/cache/latents: 6 entries" in first
        assert f"cache {tmp_path}/out/cache/text: 6 entries" in first
        second = " ".join(run("build", file).stdout.split())
        assert "captions 6 wanted, 6 already there latents 6 wanted, 6 already there" in second
        assert "nothing was encoded: the caches are complete" in second

    @pytest.mark.parametrize("family", FLAVOURS)
    def test_every_family(self, family: str, job: Job, tmp_path: Path) -> None:
        file = job(*datasets(family, tmp_path), family=family)
        assert encoded(run_json("build", file)) == (3, 3)
        assert encoded(run_json("build", file)) == (0, 0)
        assert run("audit", file).exit_code == 0

    def test_an_edited_image_is_encoded_again_and_no_other(self, job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        write(tmp_path / "photos", {"2.png": image(112, 80, seed=99)})
        assert encoded(run_json("build", file)) == (0, 1)
        report = run_json("audit", file)
        assert report["ok"]
        # The old one is made of content that was removed.
        assert groups(report, "orphaned") == {"latents": 1, "text": 0}

    def test_a_renamed_file_is_not_encoded_again(self, job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        for ending in ("png", "txt"):
            (tmp_path / "photos" / f"2.{ending}").rename(tmp_path / "photos" / f"renamed.{ending}")
        assert encoded(run_json("build", file)) == (0, 0)
        (tmp_path / "photos").rename(tmp_path / "elsewhere")
        moved = job({**photos(tmp_path), "path": str(tmp_path / "elsewhere")})
        assert encoded(run_json("build", moved)) == (0, 0)

    def test_another_vae_encodes_everything_again_and_keeps_the_old_entries(
        self, job: Job, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        from gracetune.models.tiny import cached

        file = job()
        run_json("build", file)
        before = contents(tmp_path / "out" / "cache" / "latents")
        other = cached("sdxl", "base-1.0", tmp_path_factory.mktemp("other"), seed=1)
        change = ["--set", f"model.vae_path={other / 'vae'}"]
        report = run_json("audit", file, *change)
        assert not report["ok"]
        assert groups(report, "missing") == {"latents": 6, "text": 0}
        assert groups(report, "stale") == {"latents": 6, "text": 0}
        (latents,) = [store for store in report["stores"] if store["folder"].endswith("latents")]
        assert latents["stale_parts"] == {"encoder.weights": 6}
        words = run("audit", file, *change).stdout
        assert "stale: 6 entries with another encoder.weights, for example" in words
        assert encoded(run_json("build", file, *change)) == (0, 6)
        assert run_json("audit", file, *change)["ok"]
        after = contents(tmp_path / "out" / "cache" / "latents")
        assert same({key: after[key] for key in before}, before)
        assert run_json("audit", file)["ok"]

    def test_another_crop_encodes_that_dataset_again(self, job: Job, tmp_path: Path) -> None:
        second = {"path": str(write(tmp_path / "q", images(3))), "resolution": 64.0}
        run_json("build", job(photos(tmp_path), second))
        corner = photos(tmp_path, crop={"enabled": True, "style": "corner"})
        assert encoded(run_json("build", job(corner, second))) == (0, 6)

    def test_a_changed_caption(self, job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        write(tmp_path / "photos", {"2.txt": "something else"})
        assert encoded(run_json("build", file)) == (1, 0)

    def test_folders_of_their_own_and_prompts(self, job: Job, tmp_path: Path) -> None:
        # Folders people name often hold another program's caches already.
        write(tmp_path / "vae", {"old.pt": b"\x80\x04 a pickle of somebody else"})
        found = photos(tmp_path, cache_dir=str(tmp_path / "vae"), captions={"dropout": 0.1})
        cache = {"text_cache_dir": str(tmp_path / "texts"), "persistent_cache": False, "vae_cache_type": "memory"}
        validation = {"prompts": [{"prompt": "a house"}], "negative_prompt": "a ruin"}
        report = run_json("build", job(found, cache=cache, validation=validation))
        assert {Path(store["folder"]): store["entries"] for store in report["stores"]} == {
            tmp_path / "texts" / "text": 6 + 1 + 2,
            tmp_path / "vae" / "latents": 6,
        }
        assert any("persistent_cache is false" in note for note in report["notes"])
        assert (tmp_path / "vae" / "old.pt").read_bytes().endswith(b"somebody else")

    def test_the_latent_folder_of_a_simpletuner_config(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        """`cache_dir_vae` for all datasets, unless one has a folder of its own; the audit looks there too."""
        photos(tmp_path)
        write(tmp_path / "more", {"0.png": image(112, 80, seed=50), "0.txt": "another picture"})
        shared = {"resolution": 64, "resolution_type": "pixel", "caption_strategy": "textfile"}
        entries = [
            {"id": "a", "instance_data_dir": str(tmp_path / "photos"), **shared},
            {"id": "b", "instance_data_dir": str(tmp_path / "more"), "cache_dir_vae": str(tmp_path / "own"), **shared},
        ]
        options = {
            "model_family": "flux", "model_flavour": "dev", "model_type": "lora", "optimizer": "adamw_bf16",
            "pretrained_model_name_or_path": str(tiny_model("flux", "dev")), "output_dir": str(tmp_path / "out"),
            "max_train_steps": 2, "num_train_epochs": 0, "cache_dir_vae": str(tmp_path / "vae"), "datasets": entries,
        }  # fmt: skip
        file = tmp_path / "config.json"
        file.write_text(json.dumps(options))
        report = run_json("build", str(file))
        kept = {Path(store["folder"]): store["entries"] for store in report["stores"]}
        assert kept.pop(tmp_path / "out" / "cache" / "text") > 0
        assert kept == {tmp_path / "vae" / "latents": 6, tmp_path / "own" / "latents": 1}
        assert not (tmp_path / "out" / "cache" / "latents").exists()
        assert run("audit", str(file)).exit_code == 0
        assert encoded(run_json("build", str(file))) == (0, 0)

    def test_data_that_is_not_cached_is_reported(self, job: Job, tmp_path: Path) -> None:
        report = run_json("build", job(photos(tmp_path, cache_latents="none")))
        assert encoded(report) == (6, 0)
        assert any(
            note.startswith("dataset d0: latents of 6 samples are encoded in every step") for note in report["notes"]
        )

    def test_an_unreadable_file_is_named_and_does_not_count_as_missing(self, job: Job, tmp_path: Path) -> None:
        found = photos(tmp_path, corrupt_threshold=0.2)
        image = tmp_path / "photos" / "3.png"
        raw = bytearray(image.read_bytes())
        middle = raw.index(b"IDAT") + 40
        raw[middle : middle + 40] = bytes(40)
        image.write_bytes(raw)
        report = run_json("build", job(found))
        assert [(one["dataset"], one["path"]) for one in report["unreadable"]] == [("d0", "3.png")]
        audit = run_json("audit", job(found))
        assert audit["ok"]
        assert any(note.startswith("left out, unreadable: 3.png of d0") for note in audit["notes"])

    def test_every_missing_folder_at_once(self, job: Job, tmp_path: Path) -> None:
        bad = job(photos(tmp_path, path=str(tmp_path / "nowhere")))
        with pytest.raises(ConfigError) as caught:
            run("build", bad, "--set", "model.vae_path=/nowhere/vae")
        keys = [problem.key for problem in caught.value.problems]
        assert len(keys) == 2
        assert "datasets[0].path" in keys
        assert any("model.vae_path" in key for key in keys)
        assert not any("--no-paths" in problem.hint for problem in caught.value.problems)

    def test_a_folder_with_other_files_is_rejected_and_not_touched(self, job: Job, tmp_path: Path) -> None:
        write(tmp_path / "out" / "cache" / "text", {"mine.txt": "mine"})
        for command in ("build", "audit", "clear"):
            with pytest.raises(ForeignFolderError):
                run(command, job())
        assert [path.name for path in (tmp_path / "out" / "cache" / "text").iterdir()] == ["mine.txt"]

    @pytest.mark.usefixtures("listens_to_ctrl_c")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=["Ctrl-C", "SIGUSR1"])
    def test_a_signal_keeps_encoded_entries(
        self, number: signal.Signals, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from gracetune.models.common.image_latents import ImageLatents

        monkeypatch.setenv(SIGUSR1_VARIABLE, "stop")

        real, calls = ImageLatents.encode, []

        def encode(self: ImageLatents, samples: Any) -> Any:
            calls.append(len(samples))
            if len(calls) == 2:
                os.kill(os.getpid(), number)
            return real(self, samples)

        monkeypatch.setattr(ImageLatents, "encode", encode)
        result = run("build", job(cache={"vae_batch_size": 2}))
        assert result.exit_code == 3
        assert "interrupted: 8 new entries are kept" in result.stderr
        monkeypatch.setattr(ImageLatents, "encode", real)
        assert encoded(run_json("build", job(cache={"vae_batch_size": 2}))) == (0, 4)

    def test_a_signal_before_anything_is_encoded(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gracetune.cli.cache._open", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        result = run("build", job())
        assert result.exit_code == 3
        assert "interrupted: 0 new entries are kept" in result.stderr

    def test_caches_of_ai_toolkit_are_reported_and_imported_on_request(self, job: Job, tmp_path: Path) -> None:
        file = job()
        old = write(tmp_path / "photos" / "_latent_cache", {f"0_{'A' * 22}.safetensors": b"no such file"})
        result = run("build", file, "--import-ai-toolkit", "--json")
        report = json.loads(result.stdout)
        assert report["imported"]["latents"]["entries"] == 0
        (rejected,) = report["imported"]["latents"]["refused"]
        assert rejected["reason"].startswith("it cannot be read")
        assert encoded(report) == (6, 6)
        run("clear", file)
        plain = run("build", file)
        assert f"found caches of ai-toolkit in {old}; --import-ai-toolkit imports matching entries" in plain.stderr
        words = " ".join(run("build", job(photos(tmp_path, resolution=128.0)), "--import-ai-toolkit").stdout.split())
        assert (
            "from ai-toolkit: 0 entries imported, 0 of them encoded again to compare, 1 file rejected, 5 wanted"
            in words
        )
        assert f"rejected: {old}/0_{'A' * 22}.safetensors: it cannot be read" in words
        assert [path.read_bytes() for path in old.iterdir()] == [b"no such file"]

    def test_caches_inside_the_data_folder_are_not_data(self, job: Job, tmp_path: Path) -> None:
        """The cache is not read as data, and the data is not changed."""
        file = job(photos(tmp_path), cache={"cache_dir": str(tmp_path / "photos")})
        before = {path.name: path.read_bytes() for path in (tmp_path / "photos").iterdir()}
        mine = write(tmp_path / "photos", {"fingerprints.json": "mine"}) / "fingerprints.json"
        assert encoded(run_json("build", file)) == (6, 6)
        assert encoded(run_json("build", file)) == (0, 0)
        assert run_json("audit", file)["ok"]
        assert run_json("clear", file)["removed"] == 12
        assert {name: (tmp_path / "photos" / name).read_bytes() for name in before} == before
        assert mine.read_text() == "mine"

    @pytest.mark.parametrize("what", ["file", "dangling"])
    def test_a_file_in_place_of_the_cache_folder_is_an_error(self, what: str, job: Job, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        with pytest.raises(CacheError, match=r"move .* (away|existing)"):
            run("build", job(cache={"cache_dir": str(tmp_path / what)}))
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_folder_behind_a_link_with_an_odd_name(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "wïrklich [x]").mkdir()
        (tmp_path / "lïnk").symlink_to(tmp_path / "wïrklich [x]")
        file = job(cache={"cache_dir": str(tmp_path / "lïnk" / "ein [b]")})
        assert "lïnk/ein [b]/latents: 6 entries" in run("build", file).stdout
        assert run_json("audit", file, "--set", f"cache.cache_dir={tmp_path}/wïrklich [x]/ein [b]")["ok"]

    def test_a_full_disk_is_an_error_and_the_build_continues_when_there_is_space(
        self, job: Job, tmp_path: Path
    ) -> None:
        disk = tmp_path / "disk"

        def work(report: Callable[[str], None]) -> None:
            own_mounts()
            for size in (8 * 1024, 64 * 1024, 1024 * 1024):
                mount_tmpfs(disk, size) if not disk.is_mount() else resize_tmpfs(disk, size)
                try:
                    report(str(encoded(run_json("build", file))))
                except CacheFullError as error:
                    report(f"full: {error}")
                assert not [*disk.rglob("*.tmp")]
            report(str(run_json("audit", file)["ok"]))

        file = job(cache={"cache_dir": str(disk)})
        first, second, third, ok = Child(work).join()
        assert first.startswith("full: ")
        assert second.startswith("full: ")
        assert "df -h" in first
        assert third == "(6, 6)"
        assert ok == "True"


class TestAudit:
    def test_audit_without_a_cache(self, job: Job, tmp_path: Path) -> None:
        result = run("audit", job())
        assert result.exit_code == 1
        assert "missing: 0.png of d0" in result.stdout
        assert "gracetune cache build CONFIG encodes what is missing or corrupt" in result.stdout
        assert not (tmp_path / "out" / "cache" / "latents").exists()

    def test_finds_a_wrong_byte_and_build_repairs_it(self, job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        (shard,) = (tmp_path / "out" / "cache" / "latents" / "shards").glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[-200] ^= 4
        shard.write_bytes(raw)
        report = run_json("audit", file)
        assert run("audit", file).exit_code == 1
        assert groups(report, "corrupt") == {"latents": 1, "text": 0}
        assert groups(report, "present") == {"latents": 5, "text": 6}
        assert encoded(run_json("build", file)) == (0, 1)
        assert run("audit", file).exit_code == 0

    def test_names_the_sample_that_is_corrupt(self, job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        (shard,) = (tmp_path / "out" / "cache" / "latents" / "shards").glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[-200] ^= 4
        shard.write_bytes(raw)
        (named,) = re.findall(r"corrupt: (\d\.png) of d0", run("audit", file).stdout)
        assert [store["corrupt_examples"] for store in run_json("audit", file)["stores"]] == [[], [f"{named} of d0"]]
        (tmp_path / "photos" / named).unlink()
        report = run_json("audit", file)
        assert report["ok"], "it was that one and no other"
        assert groups(report, "corrupt") == {"latents": 1, "text": 0}
        assert [store["corrupt_examples"] for store in report["stores"]] == [[], []]

    def test_finds_a_truncated_shard_and_build_repairs_it(self, job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        (shard,) = (tmp_path / "out" / "cache" / "text" / "shards").glob("*.safetensors")
        os.truncate(shard, shard.stat().st_size // 2)
        result = run("audit", file)
        assert result.exit_code == 1
        assert f"damaged file: {shard.name}" in result.stdout
        assert "gracetune cache clear CONFIG --damaged removes them" in result.stdout
        assert encoded(run_json("build", file)) == (6, 0)
        assert run("audit", file).exit_code == 0
        assert shard.exists()
        cleared = run("clear", file).stdout
        assert f"damaged file removed: {shard.name}" in cleared
        assert not shard.exists()

    def test_a_header_damaged_since_the_index_was_written(self, job: Job, tmp_path: Path) -> None:
        """Audit, build and clear agree on which entries exist."""
        file, folder = job(), tmp_path / "out" / "cache" / "latents"
        run_json("build", file)
        with DiskStore.open(folder, writable=True) as store:
            store.save_index()
        (shard,) = (folder / "shards").glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[300] ^= 1
        shard.write_bytes(raw)
        assert run("audit", file).exit_code == 1
        assert encoded(run_json("build", file)) == (0, 6)
        assert run("audit", file).exit_code == 0
        report = run_json("clear", file)
        assert report["removed"] == 12
        assert [one["name"] for store in report["stores"] for one in store["damaged_files"]] == [shard.name]


class TestClear:
    def test_removes_only_entries_of_this_configuration(self, job: Job, tmp_path: Path) -> None:
        mine, other = job(), job(photos(tmp_path, resolution=128.0), name="other")
        run_json("build", mine)
        run_json("build", other)
        note = write(tmp_path / "out" / "cache", {"note.txt": "mine"}) / "note.txt"
        report = run_json("clear", mine)
        assert report["removed"] == 6 + 6  # captions are both configurations'
        assert {Path(store["folder"]).name: store["left"] for store in report["stores"]} == {"latents": 6, "text": 0}
        assert note.read_text() == "mine"
        assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == sorted(
            f"{number}.{ending}" for number in range(6) for ending in ("png", "txt")
        )
        assert groups(run_json("audit", other), "missing") == {"latents": 0, "text": 6}
        assert encoded(run_json("build", mine)) == (6, 6)

    def test_removes_entries_of_epochs(self, job: Job, tmp_path: Path) -> None:
        augmentation = {"transforms": [{"method": "ToGray", "p": 0.5}], "cache_mode": "refresh_each_epoch"}
        file = job(photos(tmp_path, augmentation=augmentation))
        run_json("build", file)
        assert run("audit", file).exit_code == 0
        assert (tmp_path / "out" / "cache" / "epochs" / "0").is_dir()
        assert run_json("clear", file)["removed"] == 12
        assert not (tmp_path / "out" / "cache" / "epochs" / "0").exists()

    @pytest.mark.parametrize("kind", ["latents", "text"])
    def test_damaged_removes_only_the_damaged_file(self, kind: str, job: Job, tmp_path: Path) -> None:
        file, caches = job(), tmp_path / "out" / "cache"
        run_json("build", file)
        (shard,) = (caches / kind / "shards").glob("*.safetensors")
        os.truncate(shard, shard.stat().st_size // 2)
        assert sum(encoded(run_json("build", file))) == 6
        before = {*caches.rglob("*.safetensors")}
        text = " ".join(run("clear", file, "--damaged").stdout.split())
        assert f"{kind}: 1 damaged file removed; 6 entries left damaged file removed: {shard.name}" in text
        assert before - {*caches.rglob("*.safetensors")} == {shard}
        report = run_json("audit", file)
        assert report["ok"]
        assert groups(report, "present") == {"latents": 6, "text": 6}
        assert [store["damaged_shards"] for store in report["stores"]] == [[], []]
        assert encoded(run_json("build", file)) == (0, 0)
        again = run_json("clear", file, "--damaged")
        assert [(store["removed"], store["left"], store["damaged_files"]) for store in again["stores"]] == [
            (0, 6, []),
            (0, 6, []),
        ]

    def test_a_damaged_header_that_the_index_still_knows(self, job: Job, tmp_path: Path) -> None:
        file, folder = job(), tmp_path / "out" / "cache" / "latents"
        run_json("build", file)
        with DiskStore.open(folder, writable=True) as store:
            store.save_index()
        (shard,) = (folder / "shards").glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[300] ^= 1
        shard.write_bytes(raw)
        report = run_json("clear", file, "--damaged")
        assert [one["name"] for store in report["stores"] for one in store["damaged_files"]] == [shard.name]
        assert not shard.exists()
        assert encoded(run_json("build", file)) == (0, 6), "they counted as missing already"

    def test_damaged_removes_a_damaged_file_of_an_epoch(self, job: Job, tmp_path: Path) -> None:
        augmentation = {"transforms": [{"method": "ToGray", "p": 0.5}], "cache_mode": "refresh_each_epoch"}
        file = job(photos(tmp_path, augmentation=augmentation))
        run_json("build", file)
        (shard,) = (tmp_path / "out" / "cache" / "epochs" / "0" / "shards").glob("*.safetensors")
        os.truncate(shard, shard.stat().st_size // 2)
        run_json("build", file)
        assert run_json("clear", file, "--damaged")["removed"] == 0
        assert not shard.exists()
        assert encoded(run_json("build", file)) == (0, 0)

    def test_a_file_that_may_be_intact_is_kept_and_named(self, job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        strange = tmp_path / "out" / "cache" / "latents" / "shards" / f"{'a' * 32}.safetensors"
        strange.mkdir()  # reading it gives an OSError
        assert f"kept, it may be intact: {strange.name}" in run("clear", file, "--damaged").stdout
        assert strange.exists()

    @pytest.mark.parametrize("options", [(), ("--damaged",)])
    def test_nothing_is_removed_under_a_reader(self, options: tuple[str, ...], job: Job, tmp_path: Path) -> None:
        file = job()
        run_json("build", file)
        with (
            DiskStore.open(tmp_path / "out" / "cache" / "latents", writable=False),
            pytest.raises(CacheBusyError, match="another process uses this cache"),
        ):
            run("clear", file, *options)

    def test_clear_without_a_cache(self, job: Job) -> None:
        assert "there are no caches of this configuration" in run("clear", job()).stdout


class TestLines:
    """Progress lines, for stderr that is not a terminal."""

    def test_a_line_is_printed_every_half_minute(self) -> None:
        now, printed = [0.0], list[str]()
        lines = ProgressLines(printed.append, lambda: now[0])
        bars = ProgressBars(Progress(disable=True), lines)
        for step in range(100):
            now[0] = float(step)
            bars.on_latents(PassProgress(step, 100, 1.0, 100.0 - step))
        assert printed == [
            "encoding latents: 30 of 100, 1/s, 1m 10s left",
            "encoding latents: 60 of 100, 1/s, 40.0 s left",
            "encoding latents: 90 of 100, 1/s, 10.0 s left",
        ]


# -- processes --------------------------------------------------------------------------------------------------------


def process(*arguments: str) -> Child:
    """The command as `main` runs it, in a separate process."""

    def work(report: Callable[[str], None]) -> None:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        report("started")
        try:
            main([*arguments])
        except SystemExit as exit_:
            report(f"exit {exit_.code}")

    return Child(work)


def test_two_processes_build_one_complete_cache(job: Job, tmp_path: Path) -> None:
    file = job({"path": str(write(tmp_path / "p", images(16))), "resolution": 64.0})
    children = [process("cache", "build", file) for _ in range(2)]
    assert [child.join()[-1] for child in children] == ["exit 0", "exit 0"]
    report = run_json("audit", file)
    assert report["ok"]
    assert groups(report, "present") == {"latents": 16, "text": 16}
    assert groups(report, "extra_copies") == {"latents": 0, "text": 0}
    alone = job({"path": str(tmp_path / "p"), "resolution": 64.0}, cache={"cache_dir": str(tmp_path / "alone")})
    run_json("build", alone)
    for kind in ("latents", "text"):
        assert same(contents(tmp_path / "out" / "cache" / kind), contents(tmp_path / "alone" / kind))


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.full)])
def test_a_build_continues_after_being_killed_at_any_moment(job: Job, tmp_path: Path, kills: int) -> None:
    file = job({"path": str(write(tmp_path / "p", images(16))), "resolution": 64.0})
    draw = random.Random(kills)
    for _ in range(kills):
        child = process("cache", "build", file)
        assert child.wait_for_word()
        time.sleep(draw.uniform(0.05, 1.5))
        child.kill()
        assert not any(word.startswith("exit 1") for word in child.lines)
    run_json("build", file)
    report = run_json("audit", file)
    assert report["ok"]
    assert groups(report, "present") == {"latents": 16, "text": 16}
    assert (
        groups(report, "corrupt") == groups(report, "stale") == groups(report, "orphaned") == {"latents": 0, "text": 0}
    )
    assert encoded(run_json("build", file)) == (0, 0)


def test_errors_reach_people_without_a_traceback(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cache", "build", job(photos(tmp_path, path=str(tmp_path / "nowhere")))])
    assert caught.value.code == 1
    assert "datasets[0].path" in capsys.readouterr().err
    assert issubclass(CacheBusyError, GracetuneError)

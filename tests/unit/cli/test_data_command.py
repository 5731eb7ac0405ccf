from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from gracetune.cli.data import app
from gracetune.data.backends.errors import MemoryLimitError, UnreadableFilesError
from gracetune.errors import ConfigError, GracetuneError
from unit.data.folders import image, images
from unit.data.folders import write as write_files
from unit.data.media.generated import audio_bytes, every, png, tone, video_bytes


def write(tmp_path: Path, *datasets: dict[str, Any], family: str = "sdxl", **values: Any) -> str:
    content = {
        "gracetune": 1,
        "name": "run",
        "output_dir": str(tmp_path / "out"),
        "model": {"family": family},
        "datasets": [{"id": f"d{number}", "resolution": 128, **dataset} for number, dataset in enumerate(datasets)],
        "training": {"max_steps": 10, "batch_size": 4, "gradient_accumulation_steps": 2},
        **values,
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(file)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments])


def error(*arguments: str) -> GracetuneError:
    """The message that `main` would print before exit code 1."""
    found = run(*arguments).exception
    assert isinstance(found, GracetuneError)
    return found


@pytest.fixture
def photos(tmp_path: Path) -> str:
    files = {**images(9), "small.png": image(20, 20), "none.png": image(64, 64, seed=40)}
    return str(write_files(tmp_path / "photos", files))


class TestReport:
    def test_the_text_report(self, tmp_path: Path, photos: str) -> None:
        result = run(write(tmp_path, {"path": photos, "minimum_size": 32, "repeats": 1}), "--no-sheets")
        assert result.exit_code == 0
        for words in (
            "10 samples, 20 visits an epoch",
            "128x128 1.00 4 8 2",
            "batches of 4",
            "dropped 1 smaller than minimum_size 32: small.png (20x20 is 20 on the side of a square)",
            "captions 9 of 10 samples, 10 texts",
            "1 sample without a caption: none.png",
            "the first epoch: 20 samples in",
        ):
            assert words in " ".join(result.stdout.split()), words
        assert not (tmp_path / "out" / "data_show").exists()

    def test_the_json_report(self, tmp_path: Path, photos: str) -> None:
        second = {"path": photos, "resolution": 96, "probability": 0.5, "batch_size": 2}
        result = run(write(tmp_path, {"path": photos, "minimum_size": 32}, second), "--json")
        report = json.loads(result.stdout)
        assert [found["id"] for found in report["datasets"]] == ["d0", "d1"]
        first = report["datasets"][0]
        assert first["dropped"] == [
            {"reason": "smaller than minimum_size 32", "count": 1,
             "files": [{"path": "small.png", "detail": "20x20 is 20 on the side of a square"}]}
        ]  # fmt: skip
        assert first["captions"]["origins"] == {"own": 9, "missing": 1}
        assert sum(bucket["samples"] for bucket in first["buckets"]) == first["samples"] == 10
        assert report["datasets"][1]["batch_size"] == 2
        epoch = report["first_epoch"]
        assert epoch["samples"] == 10 + 11
        assert epoch["batches"] == sum(bucket["batches"] for found in report["datasets"] for bucket in found["buckets"])
        assert epoch["optimizer_steps"] == -(-epoch["batches"] // 2)
        assert all(Path(bucket["sheet"]).is_file() for bucket in first["buckets"])

    def test_a_read_only_look_writes_nothing(self, tmp_path: Path, photos: str) -> None:
        config = write(tmp_path, {"path": photos})
        before = sorted(tmp_path.rglob("*"))
        found = run(config, "--json", "--read-only").stdout
        assert sorted(tmp_path.rglob("*")) == before
        assert run(config, "--json", "--no-sheets").stdout == found

    def test_samples_are_listed_on_request(self, tmp_path: Path, photos: str) -> None:
        config = write(tmp_path, {"path": photos, "minimum_size": 32, "held_out": 2})
        report = json.loads(run(config, "--json", "--no-sheets", "--items").stdout)
        items = [*report["datasets"][0]["items"], *report["held_out"][0]["items"]]
        assert {item["path"] for item in items} == {*(f"{n:03}.png" for n in range(9)), "none.png"}
        (first,) = [item for item in items if item["path"] == "001.png"]
        assert first == {
            "path": "001.png", "width": 96, "height": 64, "frames": 1, "bucket": "160x96",
            "captions": ["picture 1"], "caption_origin": "own",
        }  # fmt: skip
        assert "items" not in json.loads(run(config, "--json", "--no-sheets").stdout)["datasets"][0]

    def test_a_second_run_opens_no_file_and_prints_the_same(self, tmp_path: Path, photos: str) -> None:
        config = write(tmp_path, {"path": photos})
        first = run(config, "--json", "--no-sheets").stdout
        assert len(list((tmp_path / "out" / "cache" / "scan").glob("*.json"))) == 1
        assert run(config, "--json", "--no-sheets").stdout == first

    def test_unreadable_files_are_listed(self, tmp_path: Path, photos: str) -> None:
        write_files(Path(photos), {"bad.png": b""})
        config = write(tmp_path, {"path": photos, "corrupt_threshold": 0.2})
        assert "left out, unreadable: bad.png: the file is empty" in run(config, "--no-sheets").stdout
        report = json.loads(run(config, "--no-sheets", "--json").stdout)
        assert [one["path"] for one in report["datasets"][0]["unreadable"]] == ["bad.png"]

    def test_a_run_without_an_active_dataset_is_reported(self, tmp_path: Path, photos: str) -> None:
        result = run(write(tmp_path, {"path": photos, "start_step": 100}), "--no-sheets")
        assert "no dataset is active when the run begins" in result.stdout

    def test_buckets_that_never_fill_a_batch_are_reported(self, tmp_path: Path, photos: str) -> None:
        files = {f"odd{number}.png": image(64, 64 + 24 * number) for number in range(1, 7)}
        config = write(tmp_path, {"path": str(write_files(tmp_path / "odd", files)), "resolution": 256})
        assert "have fewer samples than a batch of 4; crop.aspect closest" in run(config, "--no-sheets").stdout
        assert "have fewer samples" not in run(write(tmp_path, {"path": photos, "repeats": 3}), "--no-sheets").stdout

    def test_the_memory_that_staging_needs_is_reported(self, tmp_path: Path, photos: str) -> None:
        staged = {"path": photos, "type": "in_memory", "in_memory": {"compression": "lz4", "memory_limit_gb": 1}}
        other = {**staged, "resolution": 96, "corrupt_threshold": 0.5}
        config = write(tmp_path, staged, other, {"path": photos})
        result = run(config, "--no-sheets")
        assert result.exit_code == 0
        lines = [line for line in result.stdout.splitlines() if line.startswith("in memory")]
        assert len(lines) == 1, "a folder that is staged once is counted once"
        assert re.fullmatch(
            r"in memory  d0: about [\d.]+ kB to keep \(20 files of [\d.]+ kB; lz4 leaves .*\)", lines[0]
        )
        report = json.loads(run(config, "--no-sheets", "--json").stdout)
        size = sum(file.stat().st_size for file in Path(photos).iterdir())
        assert report["in_memory"]["d0"]["bytes"] == size
        assert 0 < report["in_memory"]["d0"]["stored_bytes"] <= size
        assert report["in_memory"].keys() == {"d0"}

    def test_counts_of_one_are_in_the_singular(self, tmp_path: Path) -> None:
        folder = str(write_files(tmp_path / "one", {"a.png": image(), "a.txt": "one"}))
        config = write(tmp_path, {"path": folder, "type": "in_memory"}, training={"max_steps": 1, "batch_size": 1})
        output = " ".join(run(config).stdout.split())
        for words in ("1 sample ", "captions 1 of 1 sample, 1 text,", "1 sample in 1 batch of 1", "1 contact sheet in",
                      "2 files of", "1 optimizer step"):  # fmt: skip
            assert words in output, words
        assert not re.search(r"\b1 (samples|texts|batches|contact sheets|files|visits|optimizer steps)\b", output)

    def test_an_assumed_model_is_reported(self, tmp_path: Path, photos: str) -> None:
        config = write(tmp_path, {"path": photos}, model={"family": "wan", "path": "/models/mine"})
        assert "assumed to be t2v-14b-2.2" in run(config, "--no-sheets").stdout


class TestSheets:
    def test_one_for_every_bucket(self, tmp_path: Path, photos: str) -> None:
        result = run(write(tmp_path, {"path": photos}))
        folder = tmp_path / "out" / "data_show"
        names = sorted(file.name for file in folder.iterdir())
        assert names == ["01_d0_128x128.png", "01_d0_160x96.png", "01_d0_192x96.png", "01_d0_96x160.png"]
        assert f"4 contact sheets in {folder}" in result.stdout
        for name in names:
            with Image.open(folder / name) as sheet:
                sheet.load()
                assert sheet.width >= 640

    def test_sheets_go_to_the_output_folder(self, tmp_path: Path, photos: str) -> None:
        run(write(tmp_path, {"path": photos}), "--output", str(tmp_path / "sheets"))
        assert len(list((tmp_path / "sheets").glob("*.png"))) == 4
        assert not (tmp_path / "out" / "data_show").exists()

    def test_video_sound_and_pairs(self, tmp_path: Path) -> None:
        clips = str(write_files(tmp_path / "clips", {"a.mp4": video_bytes(every(0.04, 30)), "a.txt": "a clip"}))
        run(write(tmp_path, {"path": clips, "dataset_type": "video", "video": {"num_frames": 17}}, family="wan"))
        sounds = str(write_files(tmp_path / "sounds", {"a.wav": audio_bytes(tone(440, 4.0, 8_000), 8_000)}))
        run(write(tmp_path, {"path": sounds, "dataset_type": "audio"}, family="stable_audio"))
        edits = [str(write_files(tmp_path / name, {"a.png": image()})) for name in ("target", "source")]
        model = {"family": "qwen_image", "flavour": "edit-2509"}
        target = {"path": edits[0], "conditioning": ["d1"]}
        run(write(tmp_path, target, {"path": edits[1], "dataset_type": "conditioning"}, model=model))
        names = sorted(file.name for file in (tmp_path / "out" / "data_show").iterdir())
        assert names == ["01_d0_128x128+128x128.png", "01_d0_131072x2.png", "01_d0_144x112x17.png"]

    def test_ids_become_file_names(self, tmp_path: Path, photos: str) -> None:
        run(write(tmp_path, {"path": photos, "id": "a/b: c?"}, {"path": photos, "id": "a b c"}))
        names = {file.name for file in (tmp_path / "out" / "data_show").iterdir()}
        assert {"01_a_b_c__128x128.png", "02_a_b_c_128x128.png"} <= names

    def test_long_ids_become_valid_file_names(self, tmp_path: Path, photos: str) -> None:
        run(write(tmp_path, {"path": photos, "id": "é" * 300}))
        assert (tmp_path / "out" / "data_show" / f"01_{'é' * 50}_128x128.png").exists()

    def test_images_too_large_for_memory_are_dropped_with_the_reason(self, tmp_path: Path) -> None:
        folder = str(write_files(tmp_path / "strips", {"a.png": image(640, 64), "b.png": image(64, 64)}))
        dataset = {"path": folder, "resolution": 4096, "resolution_type": "pixel"}
        found = json.loads(run(write(tmp_path, dataset), "--json").stdout)["datasets"][0]
        assert found["dropped"][0]["reason"] == "more than 89 megapixels when scaled"
        assert "640x64 would be scaled to 40960x4096" in found["dropped"][0]["files"][0]["detail"]
        assert [bucket["width"] for bucket in found["buckets"]] == [4096]

    def test_damage_found_only_by_decoding_is_reported(self, tmp_path: Path, photos: str) -> None:
        data = bytearray(image(200, 200))
        data[300:2_000] = bytes(1_700)
        write_files(Path(photos), {"damaged.png": bytes(data)})
        assert "d0: damaged.png cannot be decoded" in run(write(tmp_path, {"path": photos})).stdout

    def test_an_unwritable_output_folder_is_an_error(self, tmp_path: Path, photos: str) -> None:
        (tmp_path / "file").write_text("")
        found = error(write(tmp_path, {"path": photos}), "--output", str(tmp_path / "file" / "x"))
        assert isinstance(found, ConfigError)
        assert found.problems[0].key == "--output"
        assert "--no-sheets" in found.problems[0].hint


class TestBadInput:
    def test_all_missing_folders_are_reported_at_once(self, tmp_path: Path, photos: str) -> None:
        config = write(tmp_path, {"path": "/nowhere/a"}, {"path": photos}, {"path": "/nowhere/b"},
                       model={"family": "sdxl", "path": "/models/that/are/not/needed/here"})  # fmt: skip
        found = error(config)
        assert isinstance(found, ConfigError)
        assert [problem.key for problem in found.problems] == ["datasets[0].path", "datasets[2].path"]
        assert "--set 'datasets[N].path=FOLDER'" in found.problems[0].hint

    def test_an_example_for_another_machine(self) -> None:
        example = Path(__file__).parents[3] / "examples" / "qwen_image_edit_2509.yaml"
        found = error(str(example))
        assert isinstance(found, ConfigError)
        assert len(found.problems) == len(set(found.problems)) == 3
        assert "/data/fitting/target" in str(found)

    def test_an_example_on_own_data(self, tmp_path: Path, photos: str) -> None:
        example = Path(__file__).parents[3] / "examples" / "gh200_in_memory.json"
        result = run(str(example), "--set", f"datasets[0].path={photos}", "--set", f"output_dir={tmp_path}")
        assert result.exit_code == 0
        assert "1024x1024" in result.stdout

    def test_a_limit_too_small(self, tmp_path: Path, photos: str) -> None:
        dataset = {"path": photos, "type": "in_memory", "in_memory": {"memory_limit_gb": 1e-6}}
        found = error(write(tmp_path, dataset))
        assert isinstance(found, MemoryLimitError)
        for words in ("dataset d0: in_memory.memory_limit_gb", "20 files of", "expected  at most 1 kB", "type: local"):
            assert words in str(found)
        assert not (tmp_path / "out").exists(), "refused before anything is looked at"

    def test_a_limit_too_small_for_the_masks(self, tmp_path: Path, photos: str) -> None:
        masks = str(write_files(tmp_path / "masks", {"000.png": image(), "large.bmp": image(600, 600, kind="BMP")}))
        dataset = {"path": photos, "type": "in_memory", "mask": {"path": masks}, "in_memory": {"memory_limit_gb": 3e-4}}
        assert "dataset d0:masks: in_memory.memory_limit_gb" in str(error(write(tmp_path, dataset)))

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert "the folder is empty" in str(error(write(tmp_path, {"path": str(tmp_path / "empty")})))

    def test_too_many_bad_files(self, tmp_path: Path, photos: str) -> None:
        write_files(Path(photos), {"bad.png": b"", "bomb.png": png(10_000, 10_000, 8, 2, b"")})
        found = error(write(tmp_path, {"path": photos}))
        assert isinstance(found, UnreadableFilesError)
        assert "bad.png" in str(found)
        assert "100.0 megapixels" in str(found)

    def test_an_unknown_key_is_an_error(self, tmp_path: Path, photos: str) -> None:
        assert "datasets[0].resolutoin" in str(error(write(tmp_path, {"path": photos, "resolutoin": 3})))

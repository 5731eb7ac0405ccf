from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gracetune_simpletuner.in_memory import memory_path, take_datasets
from gracetune_simpletuner.overlay import Launch, Overlay

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError


@pytest.fixture
def overlay(job: Path) -> Iterator[Overlay]:
    found = Overlay(Environment({}), Launch(), output_dir=job / "output")
    yield found
    found.finish()


def entry(**more: Any) -> dict[str, Any]:
    plain = {"id": "a", "type": "in_memory", "dataset_type": "image", "instance_data_dir": "pictures"}
    return plain | {"in_memory": {"compression": "LZ4", "num_workers": 2, "memory_limit_gb": 1}} | more


def build(name: str = "a") -> Any:
    builders = importlib.import_module("simpletuner.helpers.data_backend.builders.local")
    return builders.LocalBackendBuilder()._create_backend(SimpleNamespace(id=name))


def test_a_dataset_becomes_local_and_is_read_from_memory(job: Path, overlay: Overlay) -> None:
    other = {"id": "b", "type": "local", "instance_data_dir": "pictures"}
    changed = take_datasets(overlay, [entry(), other])
    assert changed[0] == {"id": "a", "type": "local", "dataset_type": "image", "instance_data_dir": "pictures"}
    assert changed[1] is other
    backend = build()
    ((_, _, listed),) = backend.list_files(["png"], "pictures")
    for path in (job / "pictures").iterdir():
        path.unlink()
    assert backend.read(listed[1]) == bytes([1]) * 11
    assert backend.read("pictures/p1.txt", as_byteIO=True).read() == b"picture 1"
    assert backend.exists(str(job / "pictures" / "p3.txt"))
    assert not backend.exists(str(job / "pictures" / "p9.txt"))
    assert backend.read_image(listed[2]) == bytes([2]) * 12
    with backend.open_file(listed[0], "rb") as file:
        assert file.read() == bytes(10)
    with backend.open_file("pictures/p1.txt", "r") as file:
        assert file.read() == "picture 1"
    assert isinstance(backend, importlib.import_module("simpletuner.helpers.data_backend.local").LocalDataBackend)
    assert backend.type == "local"
    assert type(build("b")).__name__ == "LocalDataBackend"


def test_a_linked_folder_is_the_same_folder(job: Path, overlay: Overlay) -> None:
    (job / "link").symlink_to("pictures")
    take_datasets(overlay, [entry(instance_data_dir="link")])
    backend = build()
    assert backend.read(str(job / "link" / "p0.png")) == backend.read(str(job / "pictures" / "p0.png")) == bytes(10)
    assert overlay.telemetry.of("in_memory").snapshot()["reads_from_memory"] == 2


def test_what_is_written_is_on_disk_and_read_from_there(job: Path, overlay: Overlay) -> None:
    take_datasets(overlay, [entry()])
    backend = build()
    backend.write("pictures/p0.png", b"new")
    assert (job / "pictures" / "p0.png").read_bytes() == backend.read("pictures/p0.png") == b"new"
    backend.delete("pictures/p1.png")
    assert not backend.exists("pictures/p1.png")
    with pytest.raises(FileNotFoundError):
        backend.read("pictures/p1.png")


def test_upstreams_own_notes_are_never_served_from_memory(job: Path, overlay: Overlay) -> None:
    notes = job / "pictures" / "aspect_ratio_bucket_indices_a.json"
    notes.write_text("old")
    take_datasets(overlay, [entry()])
    backend = build()
    notes.write_text("of another rank")
    assert backend.read(str(notes)) == b"of another rank"


def test_clips_and_sounds_get_a_path_that_other_programs_can_open(job: Path, overlay: Overlay) -> None:
    (job / "pictures" / "clip.mp4").write_bytes(b"frames")
    (job / "pictures" / "tone.wav").write_bytes(b"waves")
    take_datasets(overlay, [entry(dataset_type="video")])
    backend = build()
    for name in ("clip.mp4", "tone.wav"):
        (job / "pictures" / name).unlink()
    assert backend.read_image("pictures/clip.mp4") == b"frames"
    audio = importlib.import_module("simpletuner.helpers.audio")
    assert audio.load_audio("pictures/tone.wav") == b"waves"
    assert audio.load_audio_from_video(job / "pictures" / "clip.mp4", target_sample_rate=8000) == b"frames"
    assert audio.load_audio(job / "pictures" / "p0.txt") == b"picture 0"


def test_a_worker_gets_the_staged_files_by_id(job: Path, overlay: Overlay) -> None:
    take_datasets(overlay, [entry()])
    build()
    (job / "pictures" / "p0.png").unlink()
    local = importlib.import_module("simpletuner.helpers.data_backend.local").LocalDataBackend
    assert local.from_instance_representation({"id": "a"}).read("pictures/p0.png") == bytes(10)
    assert type(local.from_instance_representation({"id": "other"})) is local


def test_without_such_a_dataset_nothing_is_wrapped_or_written(job: Path, overlay: Overlay) -> None:
    datasets = [{"id": "b", "type": "local"}, entry(disabled=True)]
    assert take_datasets(overlay, datasets) is datasets
    assert overlay.installer.installed == []
    assert not (job / "output").exists()


def test_staging_is_told(job: Path, overlay: Overlay) -> None:
    take_datasets(overlay, [entry()])
    build()
    lines = [json.loads(line) for line in (job / "output" / "gracetune-overlay.jsonl").read_text().splitlines()]
    (staged,) = (line for line in lines if line["event"] == "staged")
    assert (staged["dataset"], staged["files"], staged["format"]) == ("a", 8, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"instance_data_dir": None}, "instance_data_dir"),
        ({"instance_data_dir": "nowhere"}, "a folder that exists"),
        ({"dataset_type": "text_embeds"}, "use cache_config"),
        ({"in_memory": {"compression": "rar"}}, "compression"),
        ({"in_memory": {"workers": 3}}, "num_workers"),
        ({"in_memory": {"memory_limit_gb": -1}}, "memory_limit_gb"),
        ({"in_memory": 5}, "in_memory"),
    ],
)
def test_a_block_that_makes_no_sense_is_said(overlay: Overlay, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take_datasets(overlay, [entry(**wrong)])


def test_a_path_into_memory_is_gone_afterwards() -> None:
    with memory_path(b"content", "name.mp4") as path:
        assert Path(path).read_bytes() == b"content"
    assert not Path(path).exists()

"""Configs for folders of every kind, planned for modelled machines, and as the text that is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment
from gracetune.config import load as load_config
from gracetune.errors import ConfigError
from gracetune.hardware import Machine
from gracetune.proposal.contents import FolderContents, inspect_folder
from gracetune.proposal.models import model_named
from gracetune.proposal.presets import preset_named, presets
from gracetune.proposal.proposal import Answers, Proposal, default_model, default_preset, default_trigger, propose
from gracetune.proposal.text import text_of
from gracetune.units import GIB
from unit.data.folders import image, images, write
from unit.data.media.generated import audio_bytes, every, tone, video_bytes
from unit.hardware.machines import load

GH200 = load("gh200-numa")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    images = {f"{number}.png": image(256, 192, seed=number) for number in range(25)}
    images |= {f"{number}.txt": f"a cat, number {number}" for number in range(25)}
    clips: dict[str, Any] = {f"{number}.mp4": video_bytes(every(1 / 25, 40), size=(192, 128)) for number in range(2)}
    sounds = {f"{number}.wav": audio_bytes(tone(440, 1.0, 44_100), 44_100) for number in range(2)}
    pairs = {
        f"{side}/{number}.png": image(256, 256, seed=number) for side in ("before", "after") for number in range(4)
    }
    pairs |= {f"after/{number}.txt": f"make it number {number}" for number in range(4)}
    kinds = {"image": images, "video": clips, "audio": sounds, "edit": pairs}
    return {kind: write(tmp_path / kind, {**files}) for kind, files in kinds.items()}


def answered(contents: FolderContents, model: str, preset: str | None = None, **more: Any) -> Answers:
    chosen = default_preset(contents) if preset is None else preset_named(preset)
    return Answers("cats", model_named(model), chosen, default_trigger(contents), **more)


def machine_with(memory: int) -> Machine:
    """An x86 machine whose GPU has so much."""
    machine = load("x86-h200")
    gpu = machine.gpus[0].model_copy(update={"memory_total": memory, "memory_free": memory})
    return machine.model_copy(update={"gpus": (gpu,)})


def read_back(proposal: Proposal, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text_of(proposal, ["a header"]))
    read = load_config(path, environment=Environment({}))
    assert read.config == proposal.config
    assert not read.notes
    assert len(path.read_text().splitlines()) <= 36


@pytest.mark.parametrize(
    ("preset", "model"), [(preset.name, model) for preset in presets().values() for model in preset.models]
)
def test_a_config_for_every_preset_and_model(
    preset: str, model: str, folders: dict[str, Path], tmp_path: Path
) -> None:  # fmt: skip
    contents = inspect_folder(folders[preset_named(preset).media])
    proposal = propose(contents, answered(contents, model, preset), GH200)
    assert proposal.plan.verdict == "fits"
    read_back(proposal, tmp_path)
    config = proposal.config
    assert config.validation.at_start
    assert config.training.max_steps == 10 * (config.validation.every_steps or 0)
    assert 1 <= len(config.validation.prompts) <= 4


def test_images(folders: dict[str, Path]) -> None:
    contents = inspect_folder(folders["image"])
    config = propose(contents, answered(contents, "sdxl"), GH200).config
    dataset = config.datasets[0]
    assert (dataset.held_out, config.validation.loss_every_steps) == (2, 200)
    assert (dataset.resolution, config.training.max_steps) == (192.0, 2000)
    assert (config.validation.width, config.validation.height) == (224, 160)
    prompts = [one.prompt for one in config.validation.prompts]
    assert len({*prompts}) == 4
    assert all(one.startswith("a cat, number") for one in prompts)


def test_a_trigger_word_is_in_the_prompts(folders: dict[str, Path]) -> None:
    contents = inspect_folder(folders["image"])
    config = propose(contents, replace(answered(contents, "sdxl"), trigger="mimi"), GH200).config
    assert config.datasets[0].captions.trigger_word == "mimi"
    assert all(one.prompt.startswith("mimi") for one in config.validation.prompts)


def test_images_without_captions_are_called_by_the_folders_name(tmp_path: Path) -> None:
    contents = inspect_folder(write(tmp_path / "My Cat", images(4, captions=False)))
    config = propose(contents, answered(contents, "sdxl"), GH200).config
    assert config.datasets[0].captions.trigger_word == "My-Cat"
    assert [one.prompt for one in config.validation.prompts] == ["My-Cat"]
    assert config.datasets[0].held_out == 0  # there are too few


def test_clips_are_taken_as_long_as_the_shortest(folders: dict[str, Path]) -> None:
    contents = inspect_folder(folders["video"])
    config = propose(contents, answered(contents, "wan/t2v-14b-2.2"), GH200).config
    assert config.datasets[0].video.num_frames == 25  # 1.6 s at 16 frames a second
    assert config.validation.num_frames == 25
    assert config.model.switch_experts_every == 10


def test_edit_pairs_are_sampled_with_their_reference(folders: dict[str, Path]) -> None:
    contents = inspect_folder(folders["edit"])
    config = propose(contents, answered(contents, "qwen_image/edit-2509"), GH200).config
    assert [one.dataset_type for one in config.datasets] == ["image", "conditioning"]
    for prompt in config.validation.prompts:
        number = prompt.prompt.rpartition(" ")[2]
        assert prompt.references == (str(folders["edit"] / "before" / f"{number}.png"),)


def test_the_plan_chooses_precision_and_model(folders: dict[str, Path]) -> None:
    contents = inspect_folder(folders["image"])
    small = machine_with(24 * GIB)
    large, int8 = (propose(contents, answered(contents, "flux"), machine) for machine in (load("x86-h200"), small))
    assert (large.config.model.base_precision, large.plan.verdict) == ("bf16", "fits")
    assert (int8.config.model.base_precision, int8.plan.verdict) == ("int8", "fits")
    assert any("int8" in why for why in int8.comments.values())
    cpu = propose(contents, answered(contents, "sdxl"), load("cpu-only"))
    assert (cpu.config.model.base_precision, cpu.config.training.mixed_precision) == ("fp32", "fp32")
    clips = inspect_folder(folders["video"])
    assert default_model(clips, preset_named("motion"), GH200).name == "wan/t2v-14b-2.2"
    assert default_model(clips, preset_named("motion"), machine_with(16 * GIB)).name == "wan/t2v-1.3b-2.1"


def cpu_with(memory: int) -> Machine:
    machine = load("cpu-only")
    names = ("mem_total", "mem_available", "cpu_mem_total", "cpu_mem_available")
    return machine.model_copy(update={"host": machine.host.model_copy(update=dict.fromkeys(names, memory))})


def test_the_edits_that_the_plan_asks_for_are_made(folders: dict[str, Path], tmp_path: Path) -> None:
    contents = inspect_folder(folders["image"])
    proposal = propose(contents, answered(contents, "sdxl"), cpu_with(12 * GIB))
    assert (proposal.config.model.base_precision, proposal.plan.verdict) == ("int8", "fits")
    assert proposal.comments["model",].startswith("so that it fits: frozen weights in int8")
    read_back(proposal, tmp_path)
    assert propose(contents, answered(contents, "sdxl"), cpu_with(8 * GIB)).is_rejected


def test_a_plan_for_other_weights_changes_nothing(folders: dict[str, Path], tiny_model: Any) -> None:
    """SDXL itself would not fit into 8 GiB, but the model in the folder is tiny."""
    contents = inspect_folder(folders["image"])
    answers = answered(contents, str(tiny_model("sdxl", "base-1.0")))
    proposal = propose(contents, answers, cpu_with(8 * GIB))
    assert proposal.config.model.base_precision == "fp32"
    assert "these weights have 809,284" in (proposal.mismatch or "")
    assert not proposal.is_rejected


@pytest.mark.parametrize(
    ("kind", "model", "preset", "words"),
    [
        ("video", "sdxl", None, "--model wan/t2v-14b-2.2"),
        ("edit", "sdxl", None, "--model qwen_image/edit-2509"),
        ("image", "flux/kontext", None, "before/ and after/"),
        ("image", "sdxl", "sound", "--preset character"),
    ],
)
def test_answers_that_do_not_suit_the_folder(
    kind: str, model: str, preset: str | None, words: str, folders: dict[str, Path]
) -> None:
    contents = inspect_folder(folders[kind])
    with pytest.raises(ConfigError, match=words):
        propose(contents, answered(contents, model, preset), GH200)


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("sdxl", "sdxl/base-1.0", None),
        ("wan/t2v-1.3b-2.1", "wan/t2v-1.3b-2.1", None),
        ("black-forest-labs/flux.1-dev", "flux/dev", None),
        ("sdxl:someone/their-model", "sdxl/base-1.0", "someone/their-model"),
    ],
)
def test_names_of_models(text: str, name: str, path: str | None) -> None:
    found = model_named(text)
    assert (found.name, found.path) == (name, path)


def test_weights_that_training_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_named("sdxl").missing_weights == "stabilityai/stable-diffusion-xl-base-1.0"
    (tmp_path / "models--stabilityai--stable-diffusion-xl-base-1.0").mkdir()
    assert model_named("sdxl").missing_weights is None


def test_a_models_folder_says_what_it_is(tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model("wan", "t2v-1.3b-2.1")
    found = model_named(str(folder))
    assert (found.name, found.path, found.missing_weights) == ("wan/t2v-1.3b-2.1", str(folder), None)
    with pytest.raises(ConfigError, match=f"--model {folder}"):
        model_named(f"{folder}s")
    file = write(tmp_path, {"mine.safetensors": b"weights"}) / "mine.safetensors"
    with pytest.raises(ConfigError, match=f"--model sdxl:{file}"):
        model_named(str(file))
    assert model_named(f"sdxl:{file}").values == {"family": "sdxl", "path": str(file)}
    with pytest.raises(ConfigError, match="--model flux"):
        model_named("fluxx")

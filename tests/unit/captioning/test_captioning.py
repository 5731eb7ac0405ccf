from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gracetune.captioning.caption_model import CaptionModel, GeneratedCaption, open_caption_model, tidied
from gracetune.captioning.folder import CaptionedFolder, plan_captions, write_captions
from gracetune.captioning.kinds import KINDS, Style
from gracetune.cli.data import app
from gracetune.errors import ConfigError
from gracetune.hub.access import HubAccess
from runs.launched import command_line, start
from unit.captioning.tiny_captioners import write

Captioners = Callable[[str], Path]
CPU = torch.device("cpu")
TYPES = ("florence2", "qwen3_vl", "llava")
OFFLINE = HubAccess(offline="HF_HUB_OFFLINE=1")


@pytest.fixture(scope="module")
def captioners(tmp_path_factory: pytest.TempPathFactory) -> Captioners:
    root = tmp_path_factory.mktemp("captioners")
    return lambda kind: root / kind if (root / kind).is_dir() else write(kind, root / kind)


def noise_image(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.PNG", "deep/c.jpg", "d.webp")):
        noise_image(number).save(folder / name)
    return folder


def caption(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["caption", *map(str, arguments)])


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.txt"))}


class TestModel:
    @pytest.mark.parametrize("kind", TYPES)
    def test_a_batch_gives_the_captions_of_single_images(self, kind: str, captioners: Captioners) -> None:
        model = open_caption_model(str(captioners(kind)), "short", CPU, OFFLINE)
        images = [noise_image(1), noise_image(2, 96, 48), noise_image(3, 40, 70)]  # Qwen3-VL pads: one token per area
        alone = [model.captions([image], "short")[0] for image in images]
        assert model.captions(images, "short") == alone
        assert all(one.text for one in alone)

    @pytest.mark.parametrize("kind", TYPES)
    def test_the_prompt_and_the_image_reach_the_model(self, kind: str, captioners: Captioners) -> None:
        model = open_caption_model(str(captioners(kind)), "short", CPU, OFFLINE)
        inputs = [
            model.kind.inputs(model._processor, [image], prompt)
            for image, prompt in (
                (noise_image(1), model.kind.prompts["short"]),
                (noise_image(2), model.kind.prompts["long"]),
            )
        ]
        logits = [_first_logits(model, inputs[0]), _first_logits(model, inputs[1])]
        logits.append(_first_logits(model, {**inputs[0], "pixel_values": inputs[1]["pixel_values"]}))
        assert not torch.allclose(logits[0], logits[1])
        assert not torch.allclose(logits[0], logits[2])

    def test_one_beginning_and_one_image_in_a_chat(self, captioners: Captioners) -> None:
        model = open_caption_model(str(captioners("llava")), "short", CPU, OFFLINE)
        (row,) = model.kind.inputs(model._processor, [noise_image(1)], "Caption it.")["input_ids"].tolist()
        tokenizer = model._processor.tokenizer
        assert row.count(tokenizer.bos_token_id) == 1
        assert row.count(model._processor.image_token_id) == 4

    def test_nothing_is_sampled_whatever_the_model_asks_for(self, captioners: Captioners) -> None:
        model = open_caption_model(str(captioners("llava")), "short", CPU, OFFLINE)
        plain = model.captions([noise_image(1)], "short")
        model._model.generation_config.update(do_sample=True, temperature=5.0)
        assert model.captions([noise_image(1)], "short") == plain


def _first_logits(model: CaptionModel, inputs: Any) -> torch.Tensor:
    found: torch.Tensor = model._model(**inputs).logits
    return found[:, -1]


class TestTidied:
    @pytest.mark.parametrize(
        ("text", "style", "cut", "expected"),
        [
            ("A dog.\n\nIt runs.", "long", False, "A dog. It runs."),
            ("A dog. It runs on the", "long", True, "A dog."),
            ("a dog in the gra", "short", True, "a dog in the gra"),
            ("dog, Grass, cat, dog, grass, .", "tags", False, "dog, Grass, cat"),
            ("dog, grass, su", "tags", True, "dog, grass"),
            ("\x1b[2J\ufffd", "short", False, "[2J"),
        ],
    )
    def test_it(self, text: str, style: Any, cut: bool, expected: str) -> None:
        assert tidied(text, style, cut=cut) == GeneratedCaption(expected, cut)


class TestFolder:
    def test_captions_beside_images(self, photos: Path, captioners: Captioners) -> None:
        result = caption(photos, "--model", captioners("llava"), "--trigger", "sks", "--batch", 3)
        assert result.exit_code == 0, result.output
        found = texts(photos)
        assert [*found] == ["a.txt", "b.txt", "d.txt", "deep/c.txt"]
        assert all(text.startswith("sks ") and text.count("\n") == 1 and len(text) > 8 for text in found.values())
        assert "4 captions written, 0 kept" in result.stdout

    def test_tags_begin_with_the_trigger(self, photos: Path, captioners: Captioners) -> None:
        caption(photos, "--model", captioners("qwen3_vl"), "--style", "tags", "--trigger", "sks")
        assert all(text.startswith("sks, ") for text in texts(photos).values())

    def test_a_blank_trigger_is_none(self, photos: Path) -> None:
        class Tagger:
            def captions(self, images: Sequence[Image.Image], style: Style) -> list[GeneratedCaption]:
                return [GeneratedCaption("dog, grass", cut=False)] * len(images)

        result = CaptionedFolder()
        write_captions(plan_captions(photos), Tagger(), "tags", trigger=" ", batch=9, result=result)
        assert {*texts(photos).values()} == {"dog, grass\n"}

    def test_existing_files_stay(self, photos: Path, captioners: Captioners) -> None:
        (photos / "a.txt").write_text("mine")
        (photos / "b.txt").write_text("")  # on purpose: trained without a caption
        (photos / "d.TXT").write_text("read by training too")
        (photos / "deep" / "c.txt").symlink_to("nowhere")
        result = caption(photos, "--model", "nothing-is-opened", "--json")
        assert json.loads(result.stdout) == {
            "ok": True, "folder": str(photos), "written": [], "kept": 4, "skipped": [], "cut": 0, "sharing": [],
        }  # fmt: skip
        assert (photos / "a.txt").read_text() == "mine"

    def test_damaged_images_are_named(self, photos: Path, captioners: Captioners) -> None:
        data = (photos / "a.png").read_bytes()
        (photos / "a.png").write_bytes(data[:200])
        (photos / "empty.png").write_bytes(b"")
        noise_image(5).save(photos / "d.png")  # beside d.webp
        result = caption(photos, "--model", captioners("llava"), "--json")
        found = json.loads(result.stdout)
        assert (result.exit_code, found["ok"]) == (0, False)
        assert {one["path"] for one in found["skipped"]} == {"a.png", "empty.png"}
        assert found["written"] == ["b.txt", "d.txt", "deep/c.txt"]
        assert found["sharing"] == ["d.webp"]
        assert caption(photos, "--model", captioners("llava")).exit_code == 1  # only damaged ones are left

    def test_an_interrupt_keeps_what_is_written(
        self, photos: Path, captioners: Captioners, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = [photos, "--model", captioners("llava"), "--batch", 1]
        captions, calls = CaptionModel.captions, []

        def interrupted(model: CaptionModel, images: Any, style: Any) -> list[GeneratedCaption]:
            calls.append(len(images))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return captions(model, images, style)

        monkeypatch.setattr(CaptionModel, "captions", interrupted)
        result = caption(*whole)
        assert (result.exit_code, [*texts(photos)]) == (3, ["a.txt", "b.txt"])
        assert "2 captions are written" in result.output
        assert caption(*whole).exit_code == 0
        assert (len(texts(photos)), calls) == (4, [1] * 5)

    @pytest.mark.full
    def test_a_killed_process_is_continued(self, photos: Path, captioners: Captioners) -> None:
        command = command_line(
            "data", "caption", str(photos), "--model", str(captioners("llava")), "--style", "long", "--batch", "1"
        )
        process = start(command)
        until = time.monotonic() + 120
        while not texts(photos) and time.monotonic() < until:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        before = texts(photos)
        assert 0 < len(before) < 4
        assert caption(*command[4:]).exit_code == 0
        after = texts(photos)
        assert len(after) == 4
        assert all(text.endswith("\n") for text in after.values())
        assert before.items() <= after.items()
        assert [path.suffix for path in photos.rglob("*") if path.name.startswith(".")] == []


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "found", "hint"),
        [
            (("--style", "tag"), "tag", "--style tags"),
            (
                ("--style", "tags", "--model", "florence-2"),
                "tags, which florence-2 cannot write",
                "qwen3-vl, joycaption",
            ),
            (("--model", "joycaptoin"), "joycaptoin, which does not exist", "--model joycaption"),
            (("--device", "gpu"), "gpu", "--device auto"),
        ],
    )
    def test_options(self, options: tuple[str, ...], found: str, hint: str, photos: Path) -> None:
        error = caption(photos, *options).exception
        assert isinstance(error, ConfigError)
        assert error.problems[0].found == found
        assert hint in error.problems[0].hint

    def test_folders_without_images(self, tmp_path: Path) -> None:
        for folder, found in ((tmp_path / "none", "does not exist"), (tmp_path, "without images")):
            assert found in str(caption(folder).exception)

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            ({"model_type": "blip"}, "of type blip"),
            ({"auto_map": {"AutoModel": "modeling.Own"}}, "Python code of its own"),
        ],
    )
    def test_other_models(self, change: dict[str, Any], found: str, captioners: Captioners, tmp_path: Path) -> None:
        config = json.loads((captioners("florence2") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=found):
            open_caption_model(str(tmp_path), "short", CPU, OFFLINE)

    def test_a_missing_tensor(self, captioners: Captioners, tmp_path: Path) -> None:
        folder = write("llava", tmp_path / "llava")
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if "mlp" in name)
        del weights[name]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match="without the tensor"):
            open_caption_model(str(folder), "short", CPU, OFFLINE)

    def test_a_model_that_is_not_downloaded(self) -> None:
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE=1"):
            open_caption_model("joycaption", "short", CPU, OFFLINE)


def test_every_kind_has_a_tiny_model() -> None:
    assert {kind.model_types[0] for kind in KINDS} == set(TYPES)

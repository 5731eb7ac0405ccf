"""The encoders of a config: ids without loading, determined only by what decides their entries."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.cache.encoder import Prompt, ReportsTruncation
from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import Model, RunConfig, Training
from gracetune.errors import ConfigError
from gracetune.models import fingerprint
from gracetune.models.encoders import TILING_FILE, TilingNotes, encode_options, encoders_of
from unit.cache.samples import TEXT, VAE

CPU = torch.device("cpu")
FLAVOURS = [
    ("wan", "i2v-14b-480p-2.1"),
    ("qwen_image", "t2i"),
    ("qwen_image", "edit-2509"),
    ("flux", "dev"),
    ("sdxl", "base-1.0"),
    ("stable_audio", "open-1.0"),
    ("z_image", "base"),
    ("flux2", "klein-base-4b"),
    ("krea2", "raw"),
]
TinyModel = Callable[[str, str], Path]


def config(family: str, folder: Path, output: Path, *, precision: Any = "fp32", **model: Any) -> RunConfig:
    return RunConfig(
        name="r",
        output_dir=str(output),
        model=Model(family=family, path=str(folder), **model),  # type: ignore[arg-type]
        datasets=(),
        training=Training(mixed_precision=precision),
    )


@pytest.mark.parametrize(("family", "flavour"), FLAVOURS)
def test_ids_need_no_loading(family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """If nothing needs encoding nothing is loaded, but the entries must be found."""
    encoders = encoders_of(config(family, tiny_model(family, flavour), tmp_path, precision="bf16"), CPU)
    texts, latents = encoders.load_text(), encoders.load_latents()
    assert encoders.text_id() == texts.id
    assert encoders.latent_id() == latents.id
    assert encoders.reads_images() == texts.reads_images == (flavour == "edit-2509")


@pytest.mark.parametrize(("family", "flavour"), [FLAVOURS[0], FLAVOURS[2], FLAVOURS[4], FLAVOURS[5]])
def test_ids_cover_what_decides_the_entries(family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model(family, flavour)
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    own, copy, half, tiled = (
        encoders_of(config(family, path, tmp_path / "out", **changed), CPU)
        for path, changed in [
            (folder, {}),
            (moved, {}),
            (folder, {"precision": "bf16"}),
            (folder, {"vae_tiling": True}),
        ]
    )
    assert (copy.text_id(), copy.latent_id()) == (own.text_id(), own.latent_id())
    assert half.text_id() != own.text_id()
    assert len({own.latent_id(), half.latent_id(), tiled.latent_id()}) == 3
    assert tiled.text_id() == own.text_id()


def test_weights_are_read_once_for_all_runs_with_a_cache(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = config("sdxl", tiny_model("sdxl", "base-1.0"), tmp_path)
    ids = [encoders_of(requested, CPU).text_id(), encoders_of(requested, CPU).latent_id()]

    def unread(*_: object) -> str:
        raise AssertionError("weights were read again")

    monkeypatch.setattr(fingerprint, "_digest", unread)
    assert [encoders_of(requested, CPU).text_id(), encoders_of(requested, CPU).latent_id()] == ids


def test_image_to_video_must_agree_within_a_run(tmp_path: Path) -> None:
    def clips(name: str, start: bool) -> Dataset:
        return Dataset(id=name, path=name, dataset_type="video", video={"image_to_video": start})  # type: ignore[arg-type]

    requested = config("wan", tmp_path, tmp_path)
    assert not encode_options(requested).image_to_video
    same = requested.model_copy(update={"datasets": (clips("a", True), clips("b", True))})
    assert encode_options(same).image_to_video
    mixed = requested.model_copy(update={"datasets": (clips("a", True), clips("b", False))})
    with pytest.raises(ConfigError, match=r"video\.image_to_video\n.*datasets\[a\] true, datasets\[b\] false"):
        encode_options(mixed)


def test_foreign_files_in_the_cache_folder_stay(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in ("fingerprints.json", "tiling.json"):
        (folder / name).write_text("mine")
    encoders = encoders_of(config("sdxl", tiny_model("sdxl", "base-1.0"), tmp_path), CPU)
    encoders.latent_id()
    encoders.tile("it did not fit")
    assert {path.name for path in folder.iterdir()} == {
        "fingerprints.json", "tiling.json", "gracetune-fingerprints.json", "gracetune-tiling.json",
    }  # fmt: skip
    assert {(folder / name).read_text() for name in ("fingerprints.json", "tiling.json")} == {"mine"}


def test_tiling_of_an_earlier_run_is_remembered(tiny_model: TinyModel, tmp_path: Path) -> None:
    requested = config("sdxl", tiny_model("sdxl", "base-1.0"), tmp_path)
    first = encoders_of(requested, CPU)
    untiled = first.latent_id()
    first.tile("one sample did not fit")
    tiled = encoders_of(
        requested.model_copy(update={"model": requested.model.model_copy(update={"vae_tiling": True})}), CPU
    )
    assert first.latent_id() == first.load_latents().id == tiled.latent_id()
    assert tiled.tiling_note() is None  # its config asks for them
    loaded = encoders_of(requested, CPU).load_latents()  # before the id is requested
    assert loaded.id == tiled.latent_id()
    again = encoders_of(requested, CPU)
    assert again.latent_id() == tiled.latent_id()
    assert "one sample did not fit" in (again.tiling_note() or "")
    again.forget_tiling()
    assert encoders_of(requested, CPU).latent_id() == untiled


CAPTIONS = ["a cat", "", "日本 👀 a longer caption, of several words", "word " * 700, "two cats"]


def _made_by_pipeline(pipeline: Any, family: str, text: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        if family == "sdxl":
            embeds, _, pooled, _ = pipeline.encode_prompt(prompt=[text], device=CPU, do_classifier_free_guidance=False)
            return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}
        if family == "flux":
            embeds, pooled, _ = pipeline.encode_prompt(prompt=[text], device=CPU, max_sequence_length=512)
            return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}
        return {"prompt_embeds": pipeline.encode_prompt(prompt=[text], device=CPU, max_sequence_length=512)[0][0]}


@pytest.mark.parametrize(("family", "flavour"), [FLAVOURS[1], FLAVOURS[3], FLAVOURS[4], FLAVOURS[6]])
def test_caption_embedding_equals_the_pipelines(
    family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Bit for bit alone; up to rounding in a batch."""
    encoder: Any = encoders_of(config(family, tiny_model(family, flavour), tmp_path), CPU).load_text()
    together = encoder.encode([Prompt(text) for text in CAPTIONS])
    for text, beside in zip(CAPTIONS, together, strict=True):
        expected = _made_by_pipeline(encoder._pipeline, family, text)
        (alone,) = encoder.encode([Prompt(text)])
        assert alone.keys() == beside.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(alone[name], tensor), (text, name)
            torch.testing.assert_close(beside[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "flavour"), [one for one in FLAVOURS if one[1] != "edit-2509"])
def test_embedding_does_not_depend_on_its_batch(
    family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """For captions of any length. Only the batch size may change the last bits."""
    encoder = encoders_of(config(family, tiny_model(family, flavour), tmp_path), CPU).load_text()
    short = encoder.encode([Prompt("a cat"), Prompt("a dog"), Prompt("x")])[0]
    long = encoder.encode([Prompt("a cat"), Prompt("word " * 700), Prompt("one more word")])[0]
    for name, tensor in short.items():
        if flavour == "t2i":  # the first two have equally many tokens, and only those are computed together
            torch.testing.assert_close(tensor, long[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(tensor, long[name])


@pytest.mark.parametrize(("family", "flavour"), [one for one in FLAVOURS if one[1] != "edit-2509"])
def test_truncated_captions_are_recorded(
    family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    encoder = encoders_of(config(family, tiny_model(family, flavour), tmp_path), CPU).load_text()
    assert isinstance(encoder, ReportsTruncation)
    for _ in range(2):
        encoder.encode([Prompt(text) for text in CAPTIONS])
    assert encoder.truncated, "the long one"
    assert {text for texts in encoder.truncated.values() for text in texts} == {CAPTIONS[3]}
    limits = {"sdxl": ["77"], "flux": ["77", "512"], "stable_audio": ["128"]}.get(family, ["512"])
    assert [limit.split(" tokens")[0] for limit in encoder.truncated] == limits
    assert "truncated" not in capfd.readouterr().err, "the pass tells it once, and names the files"


@pytest.mark.parametrize(("family", "flavour"), [FLAVOURS[1], FLAVOURS[3], FLAVOURS[4], FLAVOURS[6]])
def test_each_tokenizer_runs_once_per_batch(
    family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipelines do it up to five times, to warn of long captions."""
    encoder: Any = encoders_of(config(family, tiny_model(family, flavour), tmp_path), CPU).load_text()
    pipeline = encoder._pipeline
    names = [name for name in ("tokenizer", "tokenizer_2") if hasattr(pipeline, name)]
    calls: list[int] = []
    kinds = {type(getattr(pipeline, name)) for name in names}
    for kind, own in [
        (kind, kind.__call__) for kind in kinds
    ]:  # read before any is replaced: one may be a base of another

        def count(tokenizer: Any, texts: Any, *, make: Any = own, **options: Any) -> Any:
            calls.append(len(texts))
            return make(tokenizer, texts, **options)

        monkeypatch.setattr(kind, "__call__", count)
    encoder.encode([Prompt(text) for text in CAPTIONS])
    assert calls == [len(CAPTIONS)] * len(names)


def test_what_is_remembered_is_known_until_it_is_forgotten(tmp_path: Path) -> None:
    notes, other = TilingNotes(tmp_path / "new"), replace(VAE, weights="other")
    assert notes.why(VAE) is None
    notes.remember(VAE, "it did not fit")
    notes.remember(other, "nor did this")
    again = TilingNotes(tmp_path / "new")
    assert (again.why(VAE), again.why(other), again.why(TEXT)) == ("it did not fit", "nor did this", None)
    again.forget(VAE)
    again.forget(TEXT)
    assert (notes.why(VAE), notes.why(other)) == (None, "nor did this")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [TILING_FILE]


@pytest.mark.parametrize(
    "content", [b"mine", b"{}", b'{"format": "gracetune-tiling", "version": 2, "encoders": {"a": "b"}}']
)
def test_a_file_that_is_not_ours_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TILING_FILE).write_bytes(content)
    notes = TilingNotes(tmp_path)
    notes.remember(VAE, "it did not fit")
    notes.forget(VAE)
    assert notes.why(VAE) is None
    assert (tmp_path / TILING_FILE).read_bytes() == content


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    notes = TilingNotes(tmp_path / "file")
    notes.remember(VAE, "it did not fit")
    assert notes.why(VAE) is None

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import av
import pytest
import soundfile
from PIL import Image

from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.models.common.transformer_parts import TransformerParts
from gracetune.telemetry.events import HeldOutLoss, ValidationDone, Warned
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.run_requests import REQUESTS, ask
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_commands import gracetune as command
from runs.test_resume import DUAL_EXPERT, assert_same_end, losses, states

PROMPTS: dict[str, Any] = {
    "steps": 2,
    "width": 64,
    "height": 64,
    "prompts": [{"prompt": "one"}, {"prompt": "two", "adapter_strength": 0.5, "seed": 9}],
}


class Asking(CollectingView):
    """Requests a validation as a user does, by the command or by a signal."""

    def __init__(self, folder: Path, *, by_signal: bool) -> None:
        super().__init__()
        self.folder, self.by_signal = folder, by_signal

    def on_step(self, step: int, steps: int) -> None:
        if step == 3 and self.by_signal:
            os.kill(os.getpid(), signal.SIGUSR1)
        elif step == 3:
            ask(self.folder, REQUESTS["validate"])


class Falling(CollectingView):
    """Fails with an unexpected error when samples are generated."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        if name.startswith("samples"):
            raise RuntimeError("fell over")
        return super().phase(name)


class Removing(CollectingView):
    """Removes a file during the run."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def on_step(self, step: int, steps: int) -> None:
        self.file.unlink(missing_ok=True)


def events(config: RunConfig, kind: type) -> list[Any]:
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").merged()
    return [record.event for record in records if isinstance(record.event, kind)]


def held_out(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        {"id": "pictures", "path": str(images(tmp_path / "pictures")), "resolution": 64.0},
        {"id": "held", "path": str(images(tmp_path / "held", 2)), "resolution": 64.0, "dataset_type": "eval"},
    ]


@pytest.mark.parametrize("by_signal", [False, pytest.param(True, marks=pytest.mark.full)], ids=["command", "signal"])
def test_validating_changes_nothing_about_training(by_signal: bool, tiny_model: TinyModel, tmp_path: Path) -> None:
    """With ramp, EMA, dropout and two experts: at the start, periodically, on request, and with held-out losses."""
    data = held_out(tmp_path)
    plain = config_for("wan", tiny_model, tmp_path / "plain", datasets=data, **DUAL_EXPERT)
    run(plain)
    requested = {**PROMPTS, "num_frames": 5, "at_start": True, "every_steps": 4, "loss_every_steps": 2}
    watched = config_for("wan", tiny_model, tmp_path / "watched", datasets=data, validation=requested, **DUAL_EXPERT)
    run(watched, Asking(Path(watched.output_dir), by_signal=by_signal))
    assert losses(watched) == losses(plain)
    assert_same_end(watched, plain)
    rounds = events(watched, ValidationDone)
    assert [(one.step, one.requested) for one in rounds] == [(0, False), (3, True), (4, False), (8, False)]
    clip = Path(watched.output_dir) / rounds[0].files[0].path
    with av.open(str(clip)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 5
    assert Image.open(Path(watched.output_dir) / rounds[0].sheet).size[0] == 128
    assert not (Path(watched.output_dir) / "validate-now").exists()
    measured = events(watched, HeldOutLoss)
    assert [(one.step, one.stage) for one in measured[:3]] == [(0, "high_noise"), (0, "low_noise"), (2, "high_noise")]
    assert len(measured[0].losses) == 5


def test_sound_is_drawn_as_wav(tiny_model: TinyModel, tmp_path: Path) -> None:
    requested = {"steps": 2, "every_steps": 1, "prompts": [{"prompt": "rain"}]}
    config = config_for("stable_audio", tiny_model, tmp_path, validation=requested, training={"max_steps": 1})
    run(config)
    (generated,) = events(config, ValidationDone)
    sound, rate = soundfile.read(Path(config.output_dir) / generated.files[0].path)
    assert rate == 44100
    assert sound.shape[1] == 2


def test_the_held_out_loss_falls_with_training_and_stays_without(tiny_model: TinyModel, tmp_path: Path) -> None:
    means = {}
    for lr, steps in ((3e-2, 12), (0.0, 2)):  # a third step at 0 would be stopped
        config = config_for(
            "wan", tiny_model, tmp_path / str(lr), datasets=held_out(tmp_path), optimizer={"lr": lr},
            training={"max_steps": steps, "batch_size": 2}, validation={"loss_every_steps": steps},
            model={"experts": "low"},
        )  # fmt: skip
        run(config)
        first, last = events(config, HeldOutLoss)
        means[lr] = (first.mean, last.mean)
    assert means[0.0][0] == means[0.0][1] == means[3e-2][0]
    assert means[3e-2][1] < 0.8 * means[3e-2][0]


def test_prompts_that_are_missing_are_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    view = CollectingView()
    config = config_for("flux", tiny_model, tmp_path, validation={"every_steps": 1}, training={"max_steps": 1})
    run(config, view)
    assert any("no prompts" in text for text in view.warnings)


def test_a_config_without_prompts_samples_captions(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user starts it. Prompts of the config stay, and --no-samples generates none."""
    file = tmp_path / "own.yaml"
    file.write_text(
        f"gracetune: 1\nname: own\noutput_dir: {tmp_path}/out\n"
        f"model: {{family: sdxl, path: {tiny_model('sdxl', 'base-1.0')}, base_precision: fp32}}\n"
        f"datasets: [{{id: photos, path: {images(tmp_path / 'photos', 2)}, resolution: 64}}]\n"
        "adapter: {kind: lora, targets: [to_q]}\ntraining: {epochs: 2, mixed_precision: fp32}\n"
        "validation: {every_epochs: 1, at_start: true, steps: 1}\n"
    )
    assert command("train", str(file)) == 0
    assert "samples at the start and every epoch of 2 captions of photos" in capsys.readouterr().err
    found = [record.event for record in read_log(tmp_path / "out" / "logs" / "events.jsonl").records]
    rounds = [event for event in found if isinstance(event, ValidationDone)]
    assert [one.step for one in rounds] == [0, 3, 4], "the end of an epoch shows at the next step, except the last"
    for one in rounds:
        assert [sample.prompt for sample in one.files] == ["picture number 0", "picture number 1"]
        assert {Image.open(tmp_path / "out" / sample.path).size for sample in one.files} == {(64, 64)}
    other = ["--set", f"output_dir={tmp_path}/other"]
    assert command("train", str(file), *other, "--set", "validation.prompts=[{prompt: a}]", "--dry-run") == 0
    assert "samples at" not in capsys.readouterr().err
    assert command("train", str(file), *other, "--no-samples") == 0
    assert "samples at" not in capsys.readouterr().err
    assert not any((tmp_path / "other" / "samples").iterdir())


@pytest.mark.full
@pytest.mark.parametrize("family", ["flux", "qwen_image", "sdxl", "wan"])
def test_cached_prompts_are_given_in_the_denoisers_precision(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """They are cached in the text encoder's precision, which differs here, and there is no autocast to hide that."""
    config = config_for(
        family, tiny_model, tmp_path, model={"base_precision": "bf16"},
        validation={**PROMPTS, "every_steps": 1, "steps": 2}, training={"max_steps": 1, "mixed_precision": "fp32"},
    )  # fmt: skip
    run(config)
    (generated,) = events(config, ValidationDone)
    assert generated.files


def test_a_sample_that_cannot_be_drawn_is_said_before_anything_is_done(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("wan", tiny_model, tmp_path, validation={**PROMPTS, "every_steps": 2, "width": 1000})
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match=r"validation.width\n.*1000\n.*a multiple of 16\n.*992"):
            run(config, dry_run=dry_run)
    assert not (Path(config.output_dir) / "cache" / "latents").exists()


def test_the_checkpoint_of_a_step_is_saved_before_its_samples_are_drawn(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for(
        "flux", tiny_model, tmp_path, validation={**PROMPTS, "every_steps": 2}, checkpoints={"every_steps": 2}
    )
    for _ in range(2):  # the samples of step 2 are tried again, once
        with pytest.raises(RuntimeError, match="fell over"):
            run(config, Falling())
        assert states(config, 2)
    assert run(config).step == 5
    assert [one.step for one in events(config, ValidationDone)] == [4], "it went on from step 2"


def test_samples_that_a_process_did_not_live_to_draw_are_drawn_by_the_next(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = config_for(
        "flux", tiny_model, tmp_path, validation={**PROMPTS, "every_steps": 2}, checkpoints={"every_steps": 2}
    )
    with pytest.raises(RuntimeError, match="fell over"):
        run(config, Falling())
    assert run(config).step == 5
    assert [one.step for one in events(config, ValidationDone)] == [2, 4]


def test_a_reference_that_is_gone_meanwhile_is_said_and_the_run_goes_on(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The other samples are generated, and training is not affected."""
    stays, goes = (images(tmp_path / name, 1) / "00.png" for name in ("stays", "goes"))
    prompts = [{"prompt": "one", "references": [str(goes)]}, {"prompt": "two", "references": [str(stays)]}]
    options: dict[str, Any] = {"flavour": "ti2v-5b-2.2", "training": {"max_steps": 2}}
    plain = config_for("wan", tiny_model, tmp_path / "plain", **options)
    run(plain)
    requested = {**PROMPTS, "prompts": prompts, "every_steps": 1}
    config = config_for("wan", tiny_model, tmp_path / "watched", validation=requested, **options)
    view = Removing(goes)
    assert run(config, view).step == 2
    generated = events(config, ValidationDone)
    assert [[file.prompt for file in one.files] for one in generated] == [["two"], ["two"]]
    message = [text for text in view.warnings if "not generated" in text]
    assert len(message) == 2
    assert message[0].startswith("validation.prompts[0]: not generated, and training continues: references")
    assert str(goes) in message[0]
    assert [one.message for one in events(config, Warned) if "not generated" in one.message] == message
    assert losses(config) == losses(plain)


def test_nobody_can_be_asked_where_nobody_trains(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        ask(tmp_path / "nothing", REQUESTS["validate"])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="no run is active here"):
        ask(tmp_path, REQUESTS["validate"])


@pytest.mark.parametrize(("room", "loads"), [(1 << 40, 1), pytest.param(0, 3, marks=pytest.mark.full)])
def test_what_a_pipeline_has_beside_the_denoiser_is_loaded_once_where_there_is_room(
    room: int, loads: int, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate is 0, so every validation generates the same image, bit for bit. The embeddings are cached."""
    loaded: list[Any] = []
    assemble_pipeline = TransformerParts._around

    def around(*given: Any) -> Any:
        loaded.append(given)
        assert not any(given[-1].values()), "a text encoder was loaded"
        return assemble_pipeline(*given)

    monkeypatch.setattr(TransformerParts, "_around", around)
    monkeypatch.setattr("gracetune.train.callbacks.host_room", lambda *_: lambda: room)
    requested = {**PROMPTS, "at_start": True, "every_steps": 1}
    config = config_for(
        "flux", tiny_model, tmp_path, validation=requested, training={"max_steps": 2}, optimizer={"lr": 0.0}
    )
    view = CollectingView()
    run(config, view)
    assert "samples: the embeddings of 3 texts are cached, so no text encoder is loaded for them" in view.lines
    generated = [(Path(config.output_dir) / one.files[0].path).read_bytes() for one in events(config, ValidationDone)]
    assert len(generated) == 3
    assert len(set(generated)) == 1
    assert len(loaded) == loads

"""Small parts of a run: its length, signals, sample files, the size of the loop."""

from __future__ import annotations

import io
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import gracetune.train.loop
from gracetune import gh200
from gracetune.cli.console import Session, start
from gracetune.cli.library_output import libraries_quiet
from gracetune.config.environment import SIGUSR1_VARIABLE, Environment
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex
from gracetune.data.loader import Exhausted, Loader
from gracetune.data.refs import BatchRef
from gracetune.models.spec import Sampled
from gracetune.optim.batch_ramp import Ramp
from gracetune.telemetry.errors import TelemetryError
from gracetune.train.control import ENDING, Control, InterruptedBySignal, Stop, listening
from gracetune.train.sample_files import contact_sheet, write_sample
from gracetune.train.sample_requests import requests_of
from gracetune.train.training_state import length_of
from unit.data.folders import made_up

DATA = made_up({"counts": [5, 3], "repeats": 1}, {"counts": [2, 4], "start_step": 2, "batch_size": 3})
BY_EPOCH = made_up({"counts": [5, 3], "repeats": 1}, {"counts": [2, 4], "start_epoch": 2, "batch_size": 3})


@given(
    initial=st.integers(1, 6), more=st.integers(0, 12), steps=st.integers(0, 20), micro=st.integers(1, 4),
    epochs=st.integers(1, 3), data=st.sampled_from([DATA, BY_EPOCH]),
)  # fmt: skip
def test_the_length_in_steps_matches_the_loop(
    initial: int, more: int, steps: int, micro: int, epochs: int, data: DataIndex
) -> None:
    ramp = Ramp(initial, initial + more, steps, micro)
    loader = Loader(data, batch_size=micro, epochs=epochs)
    done = consumed = 0
    while True:
        step, filled = ramp.step_batch(consumed), 0
        while filled < step.accumulation:
            outcome = loader.next_batch(step.micro_batch, step=done)
            if isinstance(outcome, Exhausted):
                break
            filled += isinstance(outcome, BatchRef)
        if not filled:
            break
        done, consumed = done + 1, consumed + filled
        if filled < step.accumulation:
            break
    assert length_of(data, ramp, batch_size=micro, max_steps=None, epochs=epochs).steps == done


def test_max_steps_is_the_length() -> None:
    assert length_of(DATA, Ramp(1, 1, 0, 1), batch_size=1, max_steps=7, epochs=None).steps == 7


@pytest.fixture
def control() -> Iterator[Control]:
    """A control that listens to signals, in the training phase."""
    own = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGUSR1)}
    control, stated = Control(), []
    control.phase, control.report = "training", stated.append
    with listening(control):
        yield control
    assert {number: signal.getsignal(number) for number in before} == before
    signal.signal(signal.SIGHUP, own)
    assert len(stated) <= 1


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_training_requests_a_stop_and_a_second_one_nothing(number: int, control: Control) -> None:
    os.kill(os.getpid(), number)
    assert control.stop == Stop("interrupted", signal.Signals(number).name)
    for other in set(ENDING) - {signal.SIGINT}:  # SIGXCPU comes once a second
        os.kill(os.getpid(), other)
    assert control.stop.reason == signal.Signals(number).name


def test_a_second_ctrl_c_stops_at_once(control: Control) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("stops", [False, True], ids=["validate", "stop"])
def test_sigusr1_validates_or_stops(stops: bool) -> None:
    control = Control(stops_on_sigusr1=stops)
    control.phase = "training"
    with listening(control):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (control.validate, control.stop) == ((False, Stop("interrupted", "SIGUSR1")) if stops else (True, None))


def test_before_the_first_step_a_signal_ends_the_run(control: Control) -> None:
    control.phase = "preparing"
    with pytest.raises(InterruptedBySignal, match="SIGHUP"):
        os.kill(os.getpid(), signal.SIGHUP)
    assert control.stop == Stop("interrupted", "SIGHUP"), "where Python drops the exception, as in __del__"


def test_after_the_last_step_a_signal_waits(control: Control) -> None:
    control.phase = "finishing"
    os.kill(os.getpid(), signal.SIGTERM)
    assert control.stop is None


def test_an_ignored_sighup_stays_ignored() -> None:
    """This is how nohup starts a process."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with listening(Control()):
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_what_sigusr1_does_is_read_from_the_environment() -> None:
    assert [Environment({SIGUSR1_VARIABLE: text}).stops_on_sigusr1 for text in ("", "validate", "stop")] == [0, 0, 1]
    (problem,) = Environment({SIGUSR1_VARIABLE: "end"}).sigusr1_problems()
    assert (problem.found, problem.expected) == ("end", "validate or stop")


def image(width: int, height: int, level: int) -> Image.Image:
    return Image.fromarray(np.full((height, width, 3), level, dtype=np.uint8))


def test_samples_become_files_people_can_open(tmp_path: Path) -> None:
    path, kind = write_sample(tmp_path / "a", Sampled(frames=(image(40, 30, 9),)))
    assert (path.name, kind, Image.open(path).size) == ("a.png", "image", (40, 30))
    frames = tuple(image(33, 31, 20 * number) for number in range(5))
    path, kind = write_sample(tmp_path / "b", Sampled(frames=frames, fps=24.0), fps=12.5)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (path.name, kind, stream.width, stream.height) == ("b.mp4", "video", 32, 30)
        assert float(stream.average_rate or 0) == pytest.approx(12.5)
        assert len(list(container.decode(video=0))) == 5
    sound = torch.linspace(-2, 2, 2 * 800).reshape(2, 800)
    path, kind = write_sample(tmp_path / "c", Sampled(audio=sound, sample_rate=8000))
    heard, rate = soundfile.read(path)
    assert (path.name, kind, rate, heard.shape) == ("c.wav", "audio", 8000, (800, 2))
    assert np.abs(heard).max() <= 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "b.mp4", "c.wav"]


def test_a_sheet_shows_every_image(tmp_path: Path) -> None:
    sheet = Image.open(contact_sheet(tmp_path / "sheet.png", [image(64, 32, 50 * number) for number in range(5)]))
    assert sheet.size == (3 * 64, 2 * 32)
    assert [sheet.getpixel((column * 64 + 5, row * 32 + 5)) for row, column in ((0, 0), (0, 1), (1, 1))] == [
        (0, 0, 0), (50, 50, 50), (200, 200, 200)
    ]  # fmt: skip


def test_what_a_prompt_leaves_unset_comes_from_its_section(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "name": "n", "output_dir": "o", "model": {"family": "sdxl"}, "datasets": [{"id": "d", "path": "p"}],
            "training": {"max_steps": 1, "seed": 5},
            "validation": {
                "width": 640, "negative_prompt": "blur", "guidance": 3.0, "walk_seed": True, "images_per_prompt": 2,
                "prompts": [{"prompt": "a"}, {"prompt": "b", "width": 64, "seed": 100, "guidance": 1.0, "steps": 4}],
            },
        }
    )  # fmt: skip
    requested = [one.request for one in requests_of(config)]
    assert [(one.prompt, one.width, one.seed, one.guidance, one.steps) for one in requested] == [
        ("a", 640, 5, 3.0, 20), ("a", 640, 6, 3.0, 20), ("b", 64, 101, 1.0, 4), ("b", 64, 102, 1.0, 4)
    ]  # fmt: skip
    assert {one.negative_prompt for one in requested} == {"blur"}


def test_the_loop_reads_on_one_screen() -> None:
    assert len(Path(gracetune.train.loop.__file__).read_text().splitlines()) < 100


def test_library_messages_are_silenced_inside_the_context_only() -> None:
    from transformers.utils import logging as library

    logger = library.get_logger()
    stream = io.StringIO()
    handlers = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    before = [handler.setStream(stream) for handler in handlers]
    bars = library.is_progress_bar_enabled()
    try:
        with libraries_quiet():
            logger.warning("`X` requires torchvision (not installed); falling back")
            logger.warning("some weights were not used")
            assert not library.is_progress_bar_enabled()
        logger.warning("`Y` requires torchvision (not installed)")
    finally:
        for handler, former in zip(handlers, before, strict=True):
            handler.setStream(former)
    assert library.is_progress_bar_enabled() == bars
    stated = stream.getvalue()
    assert "some weights were not used" in stated
    assert "`X`" not in stated
    assert "`Y`" in stated


def test_a_telemetry_error_is_shown_like_other_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Session) -> int:
        raise TelemetryError("report", found="no log", expected="a log", hint="look at the folder")

    assert start(fail) == 1
    message = capsys.readouterr().err
    assert "no log" in message
    assert "Traceback" not in message


def test_the_guides_name_for_the_ramp() -> None:
    assert gh200.GH200GradientRamp(4, 16, 10, 4).step_batch(10).accumulation == 4

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gracetune.bench.step.job import PRESETS, StepJob, check_job, config_of, parse_resolution
from gracetune.errors import ConfigError

JOB = StepJob("wan14b")


@pytest.mark.parametrize(
    ("text", "sides"), [("1024", (1024, 1024)), ("832x480", (832, 480)), (" 832 X 480 ", (832, 480))]
)
def test_a_resolution_is_a_side_or_both(text: str, sides: tuple[int, int]) -> None:
    assert parse_resolution(text) == sides


@pytest.mark.parametrize("text", ["", "big", "832x", "832x480x81", "-64", "1024.5"])
def test_anything_else_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_resolution(text)
    assert "--resolution 832x480" in caught.value.problems[0].hint


def test_every_impossible_wish_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_job(replace(JOB, width=1000, frames=80, batch=0, steps=5))
    assert [problem.key for problem in caught.value.problems] == [
        "--resolution (width)", "--frames", "--batch", "--steps",
    ]  # fmt: skip
    assert caught.value.problems[1].hint == "--frames 81"


def test_images_have_no_frames() -> None:
    with pytest.raises(ConfigError) as caught:
        check_job(StepJob("sdxl", frames=5))
    assert "sdxl makes images" in caught.value.problems[0].expected


@pytest.mark.parametrize("name", PRESETS)
def test_every_bench_is_a_config_a_user_could_write(name: str, tmp_path: Path) -> None:
    config = config_of(check_job(StepJob(name, "lokr", memory_limit=1 << 30)), tmp_path / "model", tmp_path / "out")
    assert (config.model.family, config.model.flavour) == (PRESETS[name].family, PRESETS[name].flavour)
    assert (config.adapter.kind, config.adapter.full_rank, config.adapter.factor) == ("lokr", True, 16)
    assert config.training.gradient_checkpointing == "auto"
    assert config.training.compile == "auto"


def test_what_the_issue_calls_its_shapes() -> None:
    assert JOB.tokens == 4096
    video = check_job(replace(JOB, width=832, height=480, frames=81))
    assert video.tokens == 32_760
    assert (JOB.resolution, video.resolution) == (1024, "832x480")


def test_a_smoke_test_says_what_it_really_computed() -> None:
    smoke = replace(JOB, frames=81, smoke=True)
    assert (smoke.resolution, smoke.shape.frames, smoke.tokens) == (64, 5, 32)


def test_a_routed_step_is_measured_beside_one_with_all_tokens(tmp_path: Path) -> None:
    job = check_job(replace(JOB, token_routing=0.5))
    (route,) = config_of(job, tmp_path, tmp_path).training.token_routing.routes
    assert (route.skip_ratio, route.first_block, route.last_block) == (0.5, 2, -2)
    assert not config_of(JOB, tmp_path, tmp_path).training.token_routing.routes


@pytest.mark.parametrize(
    ("bench", "share", "expected"), [("sdxl", 0.5, "tokens of sdxl cannot skip blocks"), ("flux", 1.0, "below 1")]
)
def test_a_share_that_cannot_be_skipped(bench: str, share: float, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_job(StepJob(bench, token_routing=share))
    (problem,) = caught.value.problems
    assert (problem.key, expected in problem.expected) == ("--token-routing", True)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unit.config.aitoolkit_jobs import FLUX, job, note, only_problem, problems, read


def validation(folder: Path, keys: dict[str, Any], **sections: Any) -> Any:
    document = job(**sections)
    document["config"]["process"][0]["sample"] = keys
    return read(folder, document).config.validation


def test_upstream_defaults(tmp_path: Path) -> None:
    found = validation(tmp_path, {"prompts": ["a cat"]})
    assert (found.every_steps, found.width, found.height, found.num_frames, found.fps) == (100, 512, 512, 1, 16)
    assert (found.seed, found.walk_seed, found.guidance, found.steps, found.negative_prompt) == (0, False, 7, 20, "")
    assert found.prompts[0].prompt == "a cat"
    assert found.prompts[0].width is None


def test_settings_of_all_samples(tmp_path: Path) -> None:
    keys = {"sampler": "flowmatch", "sample_every": 250, "width": 832, "height": 480, "num_frames": 81, "fps": 24,
            "seed": 42, "walk_seed": True, "guidance_scale": 3.5, "guidance_rescale": 0.2, "sample_steps": 30,
            "neg": "blurred", "network_multiplier": 0.8, "prompts": ["a cat", "a dog"]}  # fmt: skip
    found = validation(tmp_path, keys)
    assert (found.every_steps, found.width, found.height, found.num_frames, found.fps) == (250, 832, 480, 81, 24)
    assert (found.seed, found.walk_seed, found.guidance, found.steps) == (42, True, 3.5, 30)
    assert (found.negative_prompt, found.guidance_rescale) == ("blurred", 0.2)
    assert [item.adapter_strength for item in found.prompts] == [0.8, 0.8]


def test_false_is_no_negative_prompt_and_minus_one_a_random_seed(tmp_path: Path) -> None:
    found = validation(tmp_path, {"neg": False, "seed": -1, "prompts": ["a cat --seed -1"]})
    assert (found.negative_prompt, found.seed, found.prompts[0].seed) == ("", None, None)


def test_samples_may_differ(tmp_path: Path) -> None:
    samples = [
        {"prompt": "a cat", "width": 640, "height": 360, "seed": 1, "guidance_scale": 5, "sample_steps": 10,
         "num_frames": 5, "network_multiplier": "1.5", "neg": "dog", "fps": 16, "ctrl_idx": 0},
        {"prompt": "a dog", "ctrl_img": "/a.png", "ctrl_img_1": "/b.png", "ctrl_img_2": "/c.png"},
        {"prompt": "a cow", "ctrl_img_1": "/b.png", "ctrl_img_3": "/d.png"},
    ]  # fmt: skip
    first, second, third = validation(tmp_path, {"samples": samples, "network_multiplier": 0.5}).prompts
    assert (first.width, first.height, first.seed, first.guidance, first.steps) == (640, 360, 1, 5, 10)
    assert (first.num_frames, first.adapter_strength, first.negative_prompt) == (5, 1.5, "dog")
    assert (second.references, second.adapter_strength) == (("/a.png", "/c.png"), 0.5)
    assert third.references == ("/b.png", "/d.png")


def test_flags_inside_a_prompt_win(tmp_path: Path) -> None:
    prompt = (
        "a cat, on a mat --n a dog, a cow --w 640 --h 360 --d 7 --l 4.5 --s 12 --m -3 --frames 5 --ctrl_img /a b.png"
    )
    found = validation(tmp_path, {"width": 512, "prompts": [prompt]}).prompts[0]
    assert (found.prompt, found.negative_prompt) == ("a cat, on a mat", "a dog, a cow")
    assert (found.width, found.height, found.seed, found.guidance, found.steps) == (640, 360, 7, 4.5, 12)
    assert (found.adapter_strength, found.num_frames, found.references) == (-3, 5, ("/a b.png",))


@pytest.mark.parametrize(
    ("long", "short"),
    [("--seed 7", "--d 7"), ("--cfg 4", "--l 4"), ("--steps 9", "--s 9"), ("--network_multiplier 2", "--m 2")],
)
def test_flags_have_long_names_too(tmp_path: Path, long: str, short: str) -> None:
    first, second = validation(tmp_path, {"prompts": [f"a cat {long}", f"a cat {short}"]}).prompts
    assert first == second
    assert first.prompt == "a cat"


def test_dashes_that_are_no_flag_stay_in_the_text(tmp_path: Path) -> None:
    prompt = "a cat -- asleep -- on a mat, semi-detached --"
    assert validation(tmp_path, {"prompts": [prompt]}).prompts[0].prompt == prompt


def test_flags_we_lack_are_rejected_and_misspelt_ones_corrected(tmp_path: Path) -> None:
    found = problems(tmp_path, sample={"prompts": ["a cat --p2 a dog", "a cat --stps 5", "a cat --w wide"]})
    assert set(found) == {"sample.prompts[0] --p2", "sample.prompts[1] --stps", "sample.prompts[2] --w"}
    assert found["sample.prompts[1] --stps"].hint == "write `--steps`"


def test_the_trigger_word_stands_in_prompts_where_it_is_asked_for(tmp_path: Path) -> None:
    found = validation(tmp_path, {"prompts": ["[trigger] asleep", "a dog"]}, trigger_word="c4t").prompts
    assert [item.prompt for item in found] == ["c4t asleep", "a dog"]
    assert validation(tmp_path, {"prompts": ["[trigger] asleep"]}).prompts[0].prompt == "[trigger] asleep"


def test_validation_stands_in_for_missing_prompts(tmp_path: Path) -> None:
    block = {"prompts": ["a dog"], "sample_every": 30, "width": 256}
    resolved = read(tmp_path, sample={"prompts": [], "sample_every": 10}, validation=block)
    found = resolved.config.validation
    assert (found.prompts[0].prompt, found.every_steps, found.width) == ("a dog", 30, 256)
    assert "is used" in note(resolved, "has no prompts")


def test_validation_is_not_read_where_there_are_prompts(tmp_path: Path) -> None:
    resolved = read(tmp_path, validation={"prompts": ["a dog"], "every": 3})
    assert [item.prompt for item in resolved.config.validation.prompts] == ["a cat"]
    assert "validation" in note(resolved, "harmless")


@pytest.mark.parametrize("sample", [None, {"prompts": []}, {"samples": []}])
def test_no_prompts_anywhere_is_said(tmp_path: Path, sample: dict[str, Any] | None) -> None:
    document = job()
    document["config"]["process"][0]["sample"] = sample
    resolved = read(tmp_path, document)
    assert resolved.config.validation.prompts == ()
    assert "no samples are generated" in note(resolved, "no prompts")


def test_samples_win_over_prompts_and_say_so(tmp_path: Path) -> None:
    resolved = read(tmp_path, sample={"prompts": ["a dog"], "samples": [{"prompt": "a cow"}]})
    assert [item.prompt for item in resolved.config.validation.prompts] == ["a cow"]
    assert "not used" in note(resolved, "sample.prompts")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"prompts": "a cat"}, "sample.prompts"),
        ({"prompts": [5]}, "sample.prompts[0]"),
        ({"samples": ["a cat"]}, "sample.samples[0]"),
        ({"samples": [{"width": 5}]}, "sample.samples[0].prompt"),
        ({"width": "wide"}, "sample.width"),
        ({"samples": [{"prompt": "a", "fps": 99}]}, "sample.samples[0].fps"),
        ({"do_cfg_norm": True}, "sample.do_cfg_norm"),
        ({"extra_values": [1.0]}, "sample.extra_values"),
    ],
)
def test_samples_that_cannot_be_drawn_are_named(tmp_path: Path, keys: dict[str, Any], key: str) -> None:
    assert key in problems(tmp_path, sample=keys)


def test_sampling_can_pause(tmp_path: Path) -> None:
    assert validation(tmp_path, {"sample_every": 0, "prompts": ["a cat"]}).every_steps is None
    assert "first round" in note(read(tmp_path, sample={"sample_start_step": 500}), "sample_start_step")


def test_each_sampler_is_the_familys_own(tmp_path: Path) -> None:
    assert "sample.sampler" in note(read(tmp_path, model=FLUX, sample={"sampler": "ddpm"}), "harmless")


def test_a_prompt_is_known_by_the_users_key(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, sample={"prompts": ["a cat", None]})
    assert problem.key == "config.process[0].sample.prompts[1]"

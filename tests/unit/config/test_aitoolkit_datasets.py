from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.machine_checks import path_problems
from unit.config.aitoolkit_jobs import FLUX, QWEN_EDIT, dataset, note, only_problem, problems, read

I2V = {"arch": "wan22_14b_i2v", "name_or_path": "Wan-AI/Wan2.2-I2V-A14B-Diffusers"}
TI2V = {"arch": "wan22_5b", "name_or_path": "Wan-AI/Wan2.2-TI2V-5B-Diffusers"}
KONTEXT = {"arch": "flux_kontext", "name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"}


def only(folder: Path, keys: dict[str, Any], **sections: Any) -> Any:
    found = read(folder, datasets=dataset(**keys), **sections).config.datasets
    assert len(found) == 1
    return found[0]


def test_every_resolution_is_a_dataset_of_its_own(tmp_path: Path) -> None:
    resolved = read(tmp_path, datasets=dataset(resolution=[512, 768, 1024], caption_ext="txt"))
    found = resolved.config.datasets
    assert [(item.id, item.resolution) for item in found] == [("cats-512", 512), ("cats-768", 768), ("cats-1024", 1024)]
    assert {item.path for item in found} == {"/data/cats"}
    assert resolved.origins["datasets", 1, "resolution"].key == "config.process[0].datasets[0].resolution[1]"


def test_ids_are_unique_and_follow_the_file(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        datasets=[
            {"folder_path": "/data/cats/", "resolution": 512},
            {"folder_path": "/other/cats", "resolution": [512, 512]},
            {"folder_path": "C:\\data\\my.dogs"},
            {"dataset_path": "/data/list.json", "resolution": 640},
        ],
    ).config.datasets
    assert [item.id for item in found] == ["cats-512", "cats-512-2", "cats-512-3", "my.dogs-512", "list-640"]


def test_an_address_in_the_place_of_a_folder(tmp_path: Path) -> None:
    """ai-toolkit itself takes folders alone."""
    found = only(tmp_path, {"folder_path": "hf://datasets/owner/pets", "resolution": 512})
    assert (found.id, found.path, found.type, found.has_local_copy) == (
        "pets-512", "hf://datasets/owner/pets", "local", True,
    )  # fmt: skip
    signed = only(tmp_path, {"folder_path": "https://me:pass@host/pets.tar?sig=s3cret", "resolution": 512})
    assert (signed.id, signed.path) == ("pets.tar-512", "https://host/pets.tar")
    assert signed.storage is not None
    assert signed.storage.signature == "sig=s3cret"


def test_upstream_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, datasets=[{"folder_path": "/data/cats"}]).config.datasets[0]
    assert (found.resolution, found.resolution_type, found.repeats, found.dataset_type) == (
        512,
        "pixel_area",
        0,
        "image",
    )
    assert (found.captions.extension, found.captions.split_lines, found.cache_latents) == ("txt", False, "none")
    assert (found.crop.enabled, found.crop.style) == (False, "center")


@pytest.mark.parametrize(("visits", "extra"), [(1, 0), (3, 2), ("4", 3)])
def test_repeats_are_counted_from_one_upstream(tmp_path: Path, visits: Any, extra: int) -> None:
    assert only(tmp_path, {"num_repeats": visits}).repeats == extra


def test_captions(tmp_path: Path) -> None:
    keys = {"caption_ext": ".caption", "default_caption": "", "caption_dropout_rate": 0.05, "shuffle_tokens": True,
            "keep_tokens": 2}  # fmt: skip
    resolved = read(tmp_path, datasets=dataset(**keys))
    captions = resolved.config.datasets[0].captions
    assert (captions.extension, captions.default, captions.dropout) == ("caption", "", 0.05)
    assert (captions.shuffle_tags, captions.keep_tags) == (True, 2)
    assert "shuffles them too" in note(resolved, "keep_tokens")
    assert only(tmp_path, {"caption_type": "tags"}).captions.extension == "tags"
    assert only_problem(tmp_path, datasets=dataset(caption_ext="json")).key.endswith("caption_ext")


def test_a_trigger_word_is_the_datasets_own_or_the_jobs(tmp_path: Path) -> None:
    entries = [*dataset(), *dataset(trigger_word="d0g"), *dataset(is_reg=True)]
    resolved = read(tmp_path, trigger_word="c4t", datasets=entries)
    assert [item.captions.trigger_word for item in resolved.config.datasets] == ["c4t", "d0g", "c4t"]
    assert [item.captions.add_trigger for item in resolved.config.datasets] == [True, True, False]
    assert [item.captions.dropped_caption for item in resolved.config.datasets] == ["c4t ", "c4t ", ""]
    assert resolved.origins["datasets", 0, "captions", "trigger_word"].key == "config.process[0].trigger_word"
    assert read(tmp_path, trigger_word=None).config.datasets[0].captions.trigger_word is None


def test_captions_may_stand_in_one_json_file(tmp_path: Path) -> None:
    found = read(tmp_path, datasets=[{"dataset_path": "/data/cats/captions.json"}]).config.datasets[0]
    assert (found.path, found.captions.strategy) == ("/data/cats", "json")
    assert found.captions.table is not None
    assert found.captions.table.path == "/data/cats/captions.json"
    assert read(tmp_path, datasets=[{"dataset_path": "/data/cats"}]).config.datasets[0].path == "/data/cats"


def test_a_clip_is_spread_over_its_whole_length(tmp_path: Path) -> None:
    resolved = read(tmp_path, datasets=dataset(num_frames=41, fps=16))
    found = resolved.config.datasets[0]
    assert (found.dataset_type, found.video.num_frames, found.video.whole_clip) == ("video", 41, True)
    assert found.video.fps is None
    assert "datasets[0].fps" in note(resolved, "harmless")


def test_a_clip_is_cut_out_at_a_rate(tmp_path: Path) -> None:
    video = only(tmp_path, {"num_frames": 41, "shrink_video_to_frames": False, "fps": 16}).video
    assert (video.whole_clip, video.fps, video.clip) == (False, 16, "random")
    assert only(tmp_path, {"num_frames": 41, "shrink_video_to_frames": False}).video.fps == 24


def test_a_clip_is_as_long_as_its_file(tmp_path: Path) -> None:
    found = only(tmp_path, {"auto_frame_count": True, "num_frames": 1, "fps": 16})
    assert (found.dataset_type, found.video.from_length, found.video.whole_clip) == ("video", True, False)
    assert (found.video.num_frames, found.video.fps, found.video.clip) == (None, 16, "head")
    keys = {"auto_frame_count": True, "trim_auto_frame_count_tail": False}
    assert only_problem(tmp_path, datasets=dataset(**keys)).key.endswith("trim_auto_frame_count_tail")


def test_one_frame_is_an_image(tmp_path: Path) -> None:
    assert only(tmp_path, {"num_frames": 1}).dataset_type == "image"
    assert "datasets[0].num_frames" in problems(tmp_path, datasets=dataset(num_frames=40))


@pytest.mark.parametrize(
    ("model", "keys", "image_to_video"),
    [
        (I2V, {}, True),
        (I2V, {"do_i2v": False}, True),
        (TI2V, {}, False),
        (TI2V, {"do_i2v": True}, True),
        ({}, {"do_i2v": True}, False),
    ],
)
def test_clips_from_their_first_frame(tmp_path: Path, model: Any, keys: dict[str, Any], image_to_video: bool) -> None:
    assert only(tmp_path, {"num_frames": 41, **keys}, model=model).video.image_to_video is image_to_video


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, "none"),
        ({"cache_latents": True}, "memory"),
        ({"cache_latents_to_disk": True}, "disk"),
        ({"cache_latents": True, "cache_latents_to_disk": True}, "disk"),
    ],
)
def test_where_latents_are_kept(tmp_path: Path, keys: dict[str, bool], kept: str) -> None:
    assert only(tmp_path, keys).cache_latents == kept


AUGMENTED = {"augmentations": [{"method": "ColorJitter", "p": 0.5}], "cache_latents_to_disk": True}


def test_augmentations_switch_the_cache_off_unless_told_how_to_meet_it(tmp_path: Path) -> None:
    resolved = read(tmp_path, datasets=dataset(**AUGMENTED))
    found = resolved.config.datasets[0]
    assert (found.cache_latents, found.augmentation.cache_mode) == ("none", "disable_cache")
    assert found.augmentation.transforms == ({"method": "ColorJitter", "p": 0.5},)
    assert "refresh_each_epoch" in note(resolved, "cache_latents_to_disk")


@pytest.mark.parametrize("mode", ["static", "refresh_each_epoch"])
def test_augmentations_and_the_cache_can_meet(tmp_path: Path, mode: str) -> None:
    found = only(tmp_path, {**AUGMENTED, "augmentations_cache_mode": mode})
    assert (found.cache_latents, found.augmentation.cache_mode) == ("disk", mode)


def test_an_unknown_cache_mode_is_corrected(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, datasets=dataset(**AUGMENTED, augmentations_cache_mode="statik"))
    assert problem.hint == "write `static`"


def test_flips_alone_leave_the_cache_on(tmp_path: Path) -> None:
    found = only(tmp_path, {"flip_x": True, "flip_y": False, "cache_latents_to_disk": True})
    assert (found.augmentation.flip_x, found.augmentation.flip_y) == (True, False)
    assert (found.cache_latents, found.augmentation.cache_mode) == ("disk", "static")


def test_regularisation_images_and_weights(tmp_path: Path) -> None:
    """`is_reg` is a weight; `prior_reg` asks for the base model's own prediction."""
    entries = [
        *dataset(loss_multiplier=2.0, network_weight=0.5),
        *dataset(is_reg=True, loss_multiplier=2.0),
        *dataset(prior_reg=True),
    ]
    first, second, third = read(tmp_path, datasets=entries, train={"reg_weight": 0.25}).config.datasets
    assert (first.regularisation, first.loss_weight, first.adapter_strength) == (False, 2.0, 0.5)
    assert (second.regularisation, second.loss_weight) == (False, 0.5)
    assert (third.regularisation, third.loss_weight) == (True, 1.0)


def test_masks(tmp_path: Path) -> None:
    mask = only(tmp_path, {"mask_path": "/data/masks", "mask_min_value": 0.1, "invert_mask": True}).mask
    assert (mask.path, mask.min_weight, mask.invert, mask.from_alpha) == ("/data/masks", 0.1, True, False)
    assert only(tmp_path, {"alpha_mask": True, "mask_path": None}).mask.from_alpha is True


@pytest.mark.parametrize(
    ("keys", "crop"),
    [
        ({}, (False, "center", "square")),
        ({"random_crop": True}, (True, "random", "preserve")),
        ({"square_crop": True}, (True, "center", "square")),
        ({"buckets": False, "random_crop": True}, (True, "random", "square")),
        ({"buckets": True}, (False, "center", "square")),
    ],
)
def test_crops(tmp_path: Path, keys: dict[str, bool], crop: tuple[bool, str, str]) -> None:
    found = only(tmp_path, keys).crop
    assert (found.enabled, found.style, found.aspect) == crop


def test_every_control_folder_is_a_dataset_behind_the_others(tmp_path: Path) -> None:
    entries = [
        {"folder_path": "/data/a", "control_path": ["/data/c1", "/data/c2"], "resolution": [512, 768],
         "cache_latents_to_disk": True},
        {"folder_path": "/data/b", "resolution": [512]},
    ]  # fmt: skip
    resolved = read(tmp_path, model=QWEN_EDIT, datasets=entries)
    found = {item.id: item for item in resolved.config.datasets}
    assert list(found) == ["a-512", "a-768", "b-512", "a-512-control-1", "a-512-control-2", "a-768-control-1",
                           "a-768-control-2"]  # fmt: skip
    assert found["a-768"].conditioning == ("a-768-control-1", "a-768-control-2")
    assert found["b-512"].conditioning == ()
    control = found["a-512-control-2"]
    assert (control.path, control.dataset_type, control.source_dataset_id) == ("/data/c2", "conditioning", "a-512")
    assert (control.conditioning_type, control.resolution, control.cache_latents) == ("reference_loose", 1024, "disk")
    assert resolved.origins["datasets", 4, "path"].key == "config.process[0].datasets[0].control_path[1]"


def test_references_may_take_the_size_of_their_target(tmp_path: Path) -> None:
    model = {**QWEN_EDIT, "model_kwargs": {"match_target_res": True}}
    found = read(tmp_path, model=model, datasets=dataset(control_path="/data/c")).config.datasets
    assert (found[1].conditioning_type, found[1].resolution) == ("reference_loose", 512)


def test_references_of_other_edit_models_are_cut_like_their_target(tmp_path: Path) -> None:
    found = read(tmp_path, model=KONTEXT, datasets=dataset(control_path="/data/c")).config.datasets
    assert (found[1].conditioning_type, found[1].resolution) == ("reference_strict", 512)
    keys = {"control_path": "/data/c", "full_size_control_images": False}
    found = read(tmp_path, model=QWEN_EDIT, datasets=dataset(**keys)).config.datasets
    assert (found[1].conditioning_type, found[1].resolution) == ("reference_strict", 512)


def test_numbered_control_paths_win(tmp_path: Path) -> None:
    keys = {
        "control_path": "/data/x",
        "control_path_1": "/data/c1",
        "control_path_2": None,
        "control_path_3": "/data/c3",
    }
    found = read(tmp_path, model=QWEN_EDIT, datasets=dataset(**keys)).config.datasets
    assert [item.path for item in found] == ["/data/cats", "/data/c1", "/data/c3"]


def test_references_for_a_model_that_takes_none_are_rejected(tmp_path: Path) -> None:
    assert only_problem(tmp_path, model=FLUX, datasets=dataset(control_path="/data/c")).key.endswith("control_path")
    assert only(tmp_path, {"control_path": ""}, model=FLUX).conditioning == ()


@pytest.mark.parametrize(
    "keys",
    [
        {"random_triggers": ["a", "b"]},
        {"replacements": ["a|b"]},
        {"token_dropout_rate": 0.1},
        {"use_short_captions": True},
        {"random_scale": True, "buckets": False},
        {"scale": 2},
        {"controls": ["depth"]},
        {"inpaint_path": "/data/x"},
        {"unconditional_path": "/data/x"},
        {"clip_image_path": "/data/x"},
        {"standardize_images": True},
        {"control_transparent_color": [255, 255, 255]},
        {"type": "slider"},
    ],
)
def test_what_changes_the_data_is_rejected_by_name(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert only_problem(tmp_path, datasets=dataset(**keys)).key == f"config.process[0].datasets[0].{next(iter(keys))}"


def test_a_problem_is_said_once_however_many_resolutions(tmp_path: Path) -> None:
    entries = [{"resolution": [512, 768], "random_crop": "yes", "scale": 2}]
    assert set(problems(tmp_path, datasets=entries)) == {
        "datasets[0].folder_path", "datasets[0].random_crop", "datasets[0].scale",
    }  # fmt: skip


@pytest.mark.parametrize("value", [None, [], {"folder_path": "x"}, "x"])
def test_no_datasets_is_one_problem(tmp_path: Path, value: Any) -> None:
    assert only_problem(tmp_path, datasets=value).key == "config.process[0].datasets"


def test_a_file_of_captions_stands_in_the_folder_it_describes(tmp_path: Path) -> None:
    captions = tmp_path / "captions.json"
    captions.write_text("{}", encoding="utf-8")
    assert path_problems(read(tmp_path, datasets=[{"dataset_path": str(captions)}])) == []
    (problem,) = path_problems(read(tmp_path, datasets=[{"folder_path": str(captions)}]))
    assert (problem.key, "which is a file" in problem.found) == ("config.process[0].datasets[0].folder_path", True)


def test_images_beside_masked_ones_are_named_where_there_are_masks(tmp_path: Path) -> None:
    masked = read(tmp_path, datasets=dataset(mask_path="/data/masks"))
    assert "images without one count fully" in note(masked, "on purpose")
    assert "images without one" not in note(read(tmp_path), "on purpose")


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, ""),
        ({"trigger_word": "sks"}, "a trigger word inside another word"),
        ({"random_crop": True, "buckets": False}, "images smaller than the square are enlarged"),
    ],
)
def test_differences_that_apply_are_named(tmp_path: Path, keys: dict[str, Any], found: str) -> None:
    named = note(read(tmp_path, datasets=dataset(**keys)), "on purpose not as in ai-toolkit")
    assert found in named
    assert ("trigger word" in named) == ("trigger_word" in keys)
    assert ("enlarged" in named) == ("buckets" in keys)

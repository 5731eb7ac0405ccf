"""Mistakes in SimpleTuner's dialect give one message, in the file's own words, and no misleading message beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config import UnresolvedError, load
from gracetune.errors import Problem
from unit.config.simpletuner_files import DATASETS, EMPTY, IMAGES, problems, resolve, write


def rejected(path: Path) -> UnresolvedError:
    with pytest.raises(UnresolvedError) as caught:
        load(path, environment=EMPTY)
    return caught.value


@pytest.mark.parametrize("family", [3, ["wan"], "no such family", True])
def test_an_unknown_family_hides_nothing_that_does_not_depend_on_it(tmp_path: Path, family: Any) -> None:
    changes = {"model_family": family, "train_batch_size": "x", "learning_rate": -1, "flux_guidance_value": 3.5,
               "flow_schedule_shift": 3}  # fmt: skip
    with pytest.raises(UnresolvedError) as caught:
        resolve(
            tmp_path, changes, datasets=[*IMAGES, {"id": "sound", "dataset_type": "audio", "instance_data_dir": "d"}]
        )
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["model_family", "train_batch_size", "learning_rate"]
    assert not any("without effect" in note for note in caught.value.notes)


@pytest.mark.parametrize("settings", [{"betas": [0.9]}, "betas=0.9"])
def test_an_optimizers_setting_is_named(tmp_path: Path, settings: Any) -> None:
    found = problems(tmp_path, {"optimizer_config": settings})
    assert list(found) == ["optimizer_config.betas"]


@pytest.mark.parametrize("text", ["alpha=nan", "alpha=inf", "alpha=1e999"])
def test_a_number_that_is_none_stays_text(tmp_path: Path, text: str) -> None:
    found = resolve(tmp_path, {"optimizer_config": text}).config.optimizer.options
    assert found == {"alpha": text.partition("=")[2]}


def test_json_inside_text_is_plain_data_or_text(tmp_path: Path) -> None:
    for text in ('{"a": NaN}', '{"a": "\\ud800"}', "[" * 3000, "[" * 60 + "]" * 60):
        assert "optimizer_config" in problems(tmp_path, {"optimizer_config": text})


def test_ids_are_unique_among_embeddings_too(tmp_path: Path) -> None:
    texts = {"id": "texts", "dataset_type": "text_embeds", "cache_dir": "c"}
    images = {"id": "texts", "dataset_type": "image_embeds", "cache_dir": "d"}
    assert list(problems(tmp_path, datasets=[DATASETS[0], texts, images])) == ["[2].id"]
    assert list(problems(tmp_path, datasets=[DATASETS[0], {**texts, "id": "clips"}])) == ["[1].id"]
    resolve(tmp_path, datasets=[DATASETS[0], texts, {**images, "id": "images"}])


def test_no_false_word_about_options_that_no_dataset_could_take(tmp_path: Path) -> None:
    changes = {"caption_dropout_probability": 0.2, "data_backend_config": "gone.json"}
    with pytest.raises(UnresolvedError) as caught:
        resolve(tmp_path, changes)
    assert [problem.key for problem in caught.value.problems] == ["data_backend_config"]
    assert not any("caption_dropout_probability" in note for note in caught.value.notes)


def test_a_ramp_that_ends_where_it_begins_does_not_grow(tmp_path: Path) -> None:
    same = resolve(tmp_path, {"initial_effective_batch_size": 4, "target_effective_batch_size": 4})
    assert not any("grows" in note for note in same.notes)
    rising = resolve(tmp_path, {"initial_effective_batch_size": 4, "target_effective_batch_size": 8})
    assert any("grows" in note for note in rising.notes)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF=use_uvm:True", None),
        ("GH200_UVM_ACCESS_PATTERN=balanced", None),
        ("SIMPLETUNER_GH200_ENABLE_UVM_HINTS=1", None),
        (
            "PYTORCH_CUDA_ALLOC_CONF=use_uvm:True,max_split_size_mb:512",
            "PYTORCH_CUDA_ALLOC_CONF (max_split_size_mb:512)",
        ),
        ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512", "PYTORCH_CUDA_ALLOC_CONF"),
        ("HF_HOME=/hub", "HF_HOME"),
    ],
)
def test_what_an_env_file_leaves_to_the_shell(tmp_path: Path, line: str, left: str | None) -> None:
    error = rejected(write(tmp_path, "config.env", f"MODEL_FAMILY=wan\n{line}\n"))
    notes = [note.partition(": ")[2] for note in error.notes if "left to your shell" in note]
    assert notes == ([left] if left else [])


def test_hints_for_an_env_file_are_lines_of_an_env_file(tmp_path: Path) -> None:
    error = rejected(write(tmp_path, "config.env", "NUM_EPOCHS=0\nMODEL_FAMLY=wan\n"))
    found = {problem.key: problem for problem in error.problems}
    assert found["MODEL_FAMLY"].hint == "write MODEL_FAMILY=wan"
    assert found["output_dir"].hint == "add OUTPUT_DIR=output/my-run"
    assert found["optimizer"].hint == "add OPTIMIZER=adamw_bf16"
    assert found["model_family"].hint.startswith("add MODEL_FAMILY=wan")
    assert found["max_train_steps"].hint.startswith("write MAX_NUM_STEPS=2000")
    assert not any('"' in problem.hint for problem in error.problems), error.problems


@pytest.mark.parametrize(("name", "text", "hint"), [
    ("config.toml", 'model_family = "wan"\n', 'add output_dir = "output/my-run"'),
    ("config.yaml", "model_family: wan\n", 'add output_dir: "output/my-run"'),
    ("config.json", '{"model_family": "wan"}', 'add "output_dir": "output/my-run"'),
])  # fmt: skip
def test_hints_are_written_as_the_file_is(tmp_path: Path, name: str, text: str, hint: str) -> None:
    found = {problem.key: problem for problem in rejected(write(tmp_path, name, text)).problems}
    assert found["output_dir"].hint == hint


def test_an_env_file_adds_to_its_variables(tmp_path: Path) -> None:
    text = "MODEL_FAMILY=wan\nTRAINER_EXTRA_ARGS=--lora_rank=8\nTRAINER_EXTRA_ARGS+=' --no_such_option'\n"
    keys = [problem.key for problem in rejected(write(tmp_path, "config.env", text)).problems]
    assert "--no_such_option" in keys


def test_a_data_backend_without_a_folder_is_asked_for_one(tmp_path: Path) -> None:
    found = problems(tmp_path, {"data_backend": {"type": "in_memory"}, "data_backend_config": ...})
    assert list(found) == ["data_backend.instance_data_dir"]
    assert "instance_data_dir" in found["data_backend.instance_data_dir"].hint


def test_an_edit_model_is_asked_for_its_sources_under_the_files_name(tmp_path: Path) -> None:
    kontext = {"model_family": "flux", "model_flavour": "kontext"}
    found = problems(tmp_path, kontext, datasets=IMAGES)
    assert list(found) == ["[0].conditioning_data"]
    generated = [{**IMAGES[0], "conditioning": [{"type": "depth"}]}]
    assert list(problems(tmp_path, kontext, datasets=generated)) == ["[0].conditioning"]
    assert list(problems(tmp_path, kontext, datasets=generated, allow_unsupported=True)) == ["[0].conditioning_data"]


def test_a_value_taken_out_at_the_gate_is_one_problem(tmp_path: Path) -> None:
    path = write(tmp_path, "config.yaml", "model_family: wan\nmodel_type: lora\noutput_dir: o\noptimizer: adamw_bf16\n"
                 "max_train_steps: .nan\nnum_train_epochs: 1\nlearning_rate: .inf\n"
                 "datasets: [{id: a, instance_data_dir: d, repeats: .nan}]\n")  # fmt: skip
    assert [problem.key for problem in rejected(path).problems] == [
        "max_train_steps", "learning_rate", "datasets[0].repeats"
    ]  # fmt: skip


def test_a_sidecar_goes_through_the_same_gate(tmp_path: Path) -> None:
    entry = '{"id": "a", "instance_data_dir": "d", "repeats": NaN}'
    with pytest.raises(UnresolvedError) as caught:
        resolve(tmp_path, datasets=f"[{entry}]")
    (problem,) = caught.value.problems
    assert isinstance(problem, Problem)
    assert (problem.key, problem.file) == ("[0].repeats", str(tmp_path / "datasets.json"))


def test_a_key_without_a_name_is_named_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, "prompts.json", '{"": {}}')
    found = problems(tmp_path, {"user_prompt_library": str(tmp_path / "prompts.json")})
    assert '""' in found

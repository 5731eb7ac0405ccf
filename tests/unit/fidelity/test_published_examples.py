"""The examples that SimpleTuner and ai-toolkit publish for our families: what becomes of every key of them.

Each was reviewed against the peer's code; the tables in `tests/golden/published` say what a key does there and here.
`tests/runs/test_published_examples.py` trains them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.cli.main import main
from gracetune.config.dialects.simpletuner.model import OTHER_FAMILIES
from gracetune.config.families import FAMILIES
from gracetune.config.run_config import RunConfig
from gracetune.planning.config_demand import demand_of
from gracetune.planning.plan import plan
from unit.config import simpletuner_files
from unit.fidelity.published import REJECTED, Example, Outcome, Row, examples, read
from unit.planning.test_plan import small_gpu

EXAMPLES = examples()


def test_all_published_examples_are_here() -> None:
    peers = [example.peer for example in EXAMPLES.values()]
    assert (peers.count("SimpleTuner"), peers.count("ai-toolkit")) == (17, 11)
    assert {name for name, example in EXAMPLES.items() if example.is_rejected} == set(REJECTED)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in REJECTED])
def test_a_published_example_passes_the_check(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES[name].write(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", "--no-paths", str(path)])
    assert ended.value.code == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_key_does_what_the_review_says(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    outcome = read(example, tmp_path)
    passed = read(example, tmp_path, allow_unsupported=True) if outcome.problems else outcome
    wrong = {row.key: found for row in example.rows if (found := _differs(example, row, outcome, passed, tmp_path))}
    assert not wrong


def _differs(example: Example, row: Row, outcome: Outcome, passed: Outcome, folder: Path) -> str:
    """What is otherwise than the review says; empty where nothing is."""
    if row.note and row.kind != "rejected" and not any(row.note in note for note in passed.notes_about(row)):
        return f"no note `{row.note}`: {passed.notes_about(row)}"
    problems = outcome.problems_about(row)
    if row.kind == "rejected":
        behind = any(problem.key == row.note for problem in outcome.problems)
        return "" if problems or behind else "no problem names it"
    if problems:
        return f"rejected: {problems[0].expected}"
    if row.kind == "note":
        return "" if row.note and not passed.sets(row) else f"sets {passed.sets(row)}"
    if row.kind == "acts" and row.sets:
        return "" if set(row.sets) <= passed.sets(row) else f"sets {passed.sets(row)}, not {row.sets}"
    without = read(example.without(row), folder, allow_unsupported=True)
    same = without.config == passed.config and without.problems == passed.problems
    return "" if same is (row.kind == "off") else f"without it the config is {'the same' if same else 'another'}"


@pytest.mark.parametrize(
    ("name", "gigabytes", "verdict", "held"),
    [
        ("flux.peft-lora", 24, "fits", "int8"),
        ("flux.peft-lora", 32, "fits", "bf16"),
        ("train_lora_wan22_14b_24gb", 32, "fits", "int8"),
        ("train_lora_wan22_14b_24gb", 48, "fits", "bf16"),
        ("train_lora_qwen_image_24gb", 24, "does not fit", "int8"),
        ("train_lora_qwen_image_24gb", 48, "fits", "bf16"),
    ],
)
def test_few_bits_are_needed_on_small_gpus_alone(
    name: str, gigabytes: int, verdict: str, held: str, tmp_path: Path
) -> None:  # fmt: skip
    config = RunConfig.model_validate(read(EXAMPLES[name], tmp_path).config)
    machine = small_gpu(gigabytes)
    found = plan(demand_of(config, machine, 50)[0], machine)
    changed = [change for change in found.changes if change.key == "model.base_precision"]
    assert found.verdict == verdict
    assert [change.after for change in changed] == (["auto: int8"] if held == "int8" else [])


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_not_implemented_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    (problem,) = [one for one in read(EXAMPLES[name], tmp_path).problems if one.key == REJECTED[name]]
    feature = "ControlNet training" if "controlnet" in name else "distillation"
    assert problem.expected == f"{feature} is not implemented"
    assert "--allow-unsupported" in problem.hint


@pytest.mark.parametrize("family", sorted(OTHER_FAMILIES))
def test_a_family_we_lack_is_one_problem_that_names_ours(family: str, tmp_path: Path) -> None:
    found = simpletuner_files.problems(tmp_path, {"model_family": family})
    assert [*found] == ["model_family"]
    assert ", ".join(FAMILIES) in found["model_family"].expected


def test_a_file_that_is_not_published(tmp_path: Path) -> None:
    """SimpleTuner's own example names it, and cannot be started there either."""
    example = EXAMPLES["wan2.2-ti2v-5b-480p-single-gpu.peft-lora+ramtorch"]
    path = example.write(tmp_path)
    (tmp_path / example.documents[1]).unlink()
    for name in ("multidatabackend-reference-512px", "multidatabackend-small-video-480p+81f", "minimaxmusic-audio"):
        (path.parents[1] / f"{name}.json").write_text("[]")
    (problem,) = read(Example(example.name, example.peer, example.documents[:1], example.rows), tmp_path).problems
    assert problem.key == "data_backend_config"
    assert "have no file multidatabackend-512pa+81f.json" in problem.hint
    assert "for example multidatabackend-small-video-480p+81f.json" in problem.hint

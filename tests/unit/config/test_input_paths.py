"""What a config names on disk: beside a peer's file first, and messages that say which part is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gracetune.config import Environment, Resolved, load
from gracetune.config.machine_checks import path_problems
from unit.config import aitoolkit_jobs as jobs
from unit.config import simpletuner_files as files
from unit.config import test_resolve as native


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A config's folder and a working folder, each with data of the same names and some of its own."""
    config, work = tmp_path / "config", tmp_path / "work"
    for folder in (config, work):
        (folder / "both").mkdir(parents=True)
    (config / "here").mkdir()
    (work / "there").mkdir()
    monkeypatch.chdir(work)
    return config, work


def job(folder: Path, path: str, **keys: str) -> Resolved:
    document = jobs.job(datasets=[{"folder_path": path, **keys}], model=jobs.FLUX)
    return load(jobs.write(folder, document), environment=Environment({}))


def test_a_job_s_folders_are_beside_it_or_in_the_working_folder(folders: tuple[Path, Path]) -> None:
    config, _ = folders
    found = {name: job(config, name).config.datasets[0].path for name in ("here", "there", "both", "nowhere")}
    assert found == {
        "here": str(config / "here"), "there": "there", "both": str(config / "both"), "nowhere": "nowhere"
    }  # fmt: skip
    assert job(config, "here", mask_path="both").config.datasets[0].mask.path == str(config / "both")
    assert job(config, "/data/x").config.datasets[0].path == "/data/x"


def test_paths_stay_relative_where_the_file_was_named_so(folders: tuple[Path, Path]) -> None:
    config, _ = folders
    jobs.write(config, jobs.job(datasets=[{"folder_path": "here"}], model=jobs.FLUX))
    resolved = load(Path("../config/job.yaml"), environment=Environment({}))
    assert resolved.config.datasets[0].path == "../config/here"


def test_a_simpletuner_file_s_folders_too_and_those_of_its_dataset_file(folders: tuple[Path, Path]) -> None:
    config, _ = folders
    entry = {"id": "a", "dataset_type": "image", "instance_data_dir": "here"}
    assert files.resolve(config, datasets=[entry]).config.datasets[0].path == str(config / "here")
    (config / "sets" / "own").mkdir(parents=True)
    (config / "sets" / "list.json").write_text(json.dumps([{**entry, "instance_data_dir": "own"}]), encoding="utf-8")
    found = files.resolve(config, {"data_backend_config": "sets/list.json"})
    assert found.config.datasets[0].path == str(config / "sets" / "own")


def test_a_dataset_file_beside_the_config_comes_before_one_in_the_working_folder(folders: tuple[Path, Path]) -> None:
    config, work = folders
    for folder, name in ((config, "beside"), (work, "elsewhere")):
        entry = {"id": name, "instance_data_dir": "x", "dataset_type": "image"}
        (folder / "sets.json").write_text(json.dumps([entry]), encoding="utf-8")
    found = files.resolve(config, {"data_backend_config": "sets.json"}, datasets=None)
    assert found.config.datasets[0].id == "beside"


def test_our_own_files_and_blocks_are_left_alone(folders: tuple[Path, Path]) -> None:
    config, _ = folders
    datasets = [{"id": "a", "path": "here", "dataset_type": "image"}]
    assert native.resolve(config, {"datasets": datasets}).config.datasets[0].path == "here"
    document = jobs.job(model=jobs.FLUX, gracetune={"datasets": [{"path": "here"}]})
    assert load(jobs.write(config, document), environment=Environment({})).config.datasets[0].path == "here"


def test_an_example_s_dataset_file_is_found_beside_it_or_said_not_to_be_shipped(tmp_path: Path) -> None:
    """As SimpleTuner's own tree has them: `examples/NAME/config.json` and `examples/multidatabackend-....json`."""
    example = tmp_path / "examples" / "wan"
    example.mkdir(parents=True)
    entry = {"id": "shipped", "instance_data_dir": "x", "dataset_type": "image"}
    (tmp_path / "examples" / "multidatabackend-480p+81f.json").write_text(json.dumps([entry]), encoding="utf-8")
    found = {"data_backend_config": "simpletuner/examples/multidatabackend-480p+81f.json"}
    assert files.resolve(example, found).config.datasets[0].id == "shipped"
    missing = {"data_backend_config": "simpletuner/examples/wan/multidatabackend-512pa+81f.json"}
    problem = files.problems(example, missing)["data_backend_config"]
    assert "no such file" in problem.expected
    assert problem.hint == (
        "SimpleTuner's examples have no file multidatabackend-512pa+81f.json; name another, for example "
        "multidatabackend-480p+81f.json"
    )


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nowhere/at/all", "there is no `nowhere` in the working folder"),
        ("there/nothing", "there is no `nothing` in there"),
        ("/nowhere/at/all", "there is no `nowhere` in /"),
        ("../nowhere/x", "there is no `nowhere` in .."),
    ],
)
def test_a_message_names_the_first_part_that_is_missing(folders: tuple[Path, Path], path: str, part: str) -> None:
    config, _ = folders
    datasets = [{"id": "a", "path": path, "dataset_type": "image", "mask": {"path": path}}]
    changes = {"datasets": datasets, "model": {"family": "sdxl", "path": f"{path}.safetensors"},
               "adapter": {"init_from": f"{path}.safetensors"}}  # fmt: skip
    problems = path_problems(native.resolve(config, changes))
    assert len(problems) == 4
    for problem in problems:
        assert part.removesuffix("`nothing` in there") in problem.hint
        assert ". exists" not in problem.hint
    assert problems[0].found == f"{path}, which does not exist"

"""Bad input is reported in the first minute: found, expected, what to type. Nothing is trained or overwritten."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.checkpoint.errors import BusyFolderError, OtherRunError
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.data.loader import OtherDataError
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.hardware import Machine
from gracetune.models.registry import build_published
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import RunEnded
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.assembly import checked_ramp
from gracetune.train.first_batch import FirstBatchError
from gracetune.train.guards import _Norm
from gracetune.train.planning import PlannedRun, reject_misfit
from gracetune.train.preflight import RunOptions
from gracetune.train.run import train
from gracetune.train.runtime import LaunchEnvironment
from gracetune.train.view import CollectingView
from runs.launched import write_config
from runs.made_runs import TinyModel, changed, config_for, images, run
from runs.test_commands import gracetune
from runs.test_resume import states

ONE = {"training": {"max_steps": 1}}


@pytest.fixture
def finished(tiny_model: TinyModel, tmp_path: Path) -> RunConfig:
    config = config_for("flux", tiny_model, tmp_path, **ONE)
    run(config)
    return config


def test_a_folder_of_another_run_is_not_taken(finished: RunConfig, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Another adapter, model or optimizer, other data, an existing result: each is rejected, with a remedy."""
    kept = {path.name: path.read_bytes() for path in Path(finished.output_dir).glob("*.safetensors")}
    with pytest.raises(OtherRunError, match="adapter"):
        run(changed(finished, "adapter", rank=8))
    with pytest.raises(OtherRunError, match="model"):
        run(changed(finished, "model", path=str(tiny_model("flux", "schnell")), flavour="schnell"))
    with pytest.raises(ConfigError, match="the result of a run that ended here"):
        run(finished, resume="none")
    images(tmp_path / "pictures", 5)
    longer = changed(finished, "training", max_steps=2)
    with pytest.raises(OtherDataError, match="4 samples then, 5 now"):
        run(longer)
    assert {path.name: path.read_bytes() for path in Path(finished.output_dir).glob("*.safetensors")} == kept
    view = CollectingView()
    assert run(longer, view, allow_other_data=True).step == 2
    assert any("4 samples then, 5 now" in line for line in view.lines)
    shutil.rmtree(tmp_path / "pictures")  # another optimizer is rejected before the data is looked at
    with pytest.raises(ConfigError) as rejected:
        run(changed(changed(finished, "training", max_steps=3), "optimizer", name="lion"))
    problem = rejected.value.problems[0]
    assert (problem.key, problem.found) == ("optimizer.name", "lion, and a checkpoint with the state of adamw")
    assert f"--set adapter.init_from='{finished.output_dir}/tiny.safetensors'" in problem.hint


@pytest.mark.parametrize(
    ("sections", "stated"),
    [
        ({"logging": {"trackers": ["wandb"]}}, "logging.trackers: wandb"),
        ({"logging": {"webhook": "ftp://here"}}, "logging.webhook"),
        ({"schedule": {"name": "cosine", "end_lr": 5}}, "at most the learning rate it falls from"),
        ({"adapter": {"targets": ["to_qq"]}}, "to_qq"),
        ({"adapter": {"init_from": "nothing-there.safetensors"}}, "nothing-there.safetensors"),
    ],
)
def test_what_cannot_work_at_the_first_step_is_said_before_the_data_is_looked_at(
    sections: dict[str, Any], stated: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = config_for("flux", tiny_model, tmp_path, **sections)
    shutil.rmtree(tmp_path / "pictures")
    with pytest.raises((ConfigError, TelemetryError), match=stated):
        run(config)


def test_a_file_to_begin_with_that_does_not_fit_is_rejected_before_the_data_is_looked_at(
    finished: RunConfig, tiny_model: TinyModel, tmp_path: Path
) -> None:
    file = f"{finished.output_dir}/tiny.safetensors"
    config = config_for("flux", tiny_model, tmp_path / "next", adapter={"init_from": file, "rank": 3})
    shutil.rmtree(tmp_path / "next" / "pictures")
    with pytest.raises(ConfigError) as rejected:
        run(config)
    assert "train with the rank, factor and targets the file was made with" in rejected.value.problems[0].hint
    changed_file, pipe = tmp_path / "changed.safetensors", tmp_path / "pipe.safetensors"
    content = bytearray(Path(file).read_bytes())
    content[-1] ^= 1
    changed_file.write_bytes(content)
    os.mkfifo(pipe)
    for name, stated in (
        (str(changed_file), "the tensors are not those that gracetune wrote"),
        (str(pipe), "a named pipe, not a regular file"),
        ("a\0b.safetensors", "null"),
    ):
        with pytest.raises(ConfigError, match=stated):
            run(changed(config, "adapter", rank=4, init_from=name))


@pytest.mark.parametrize(
    ("late", "sections"),
    [
        pytest.param(False, {"checkpoints": {"every_steps": 3}}, id="adamw", marks=pytest.mark.full),
        pytest.param(True, {"optimizer": {"name": "automagic"}, "training": {"ema": {"enabled": True}}}, id="late"),
        pytest.param(
            True,
            {"schedule": {"name": "cosine"}, "training": {"max_steps": 3}},
            id="at-the-last-step",
            marks=pytest.mark.full,
        ),
        pytest.param(True, {"checkpoints": {"every_steps": 3}}, id="late-at-a-checkpoint", marks=pytest.mark.full),
    ],
)
def test_a_batch_without_finite_gradients_is_named_and_the_state_before_it_saved(
    late: bool, sections: dict[str, Any], tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late`: the norm reaches the host only when it waits, as with a GPU that is far behind. The steps launched in
    the meantime change nothing."""
    good = {"id": "good", "path": str(images(tmp_path / "good")), "resolution": 64.0, "end_step": 2}
    bad = {
        "id": "bad", "path": str(images(tmp_path / "bad", 1)), "resolution": 64.0, "start_step": 2,
        "loss_weight": 1e38,
    }  # fmt: skip
    requested = {**sections, "training": {"max_steps": 6, **sections.get("training", {})}}
    config = config_for("flux", tiny_model, tmp_path, datasets=[good, bad], **requested)
    if late:
        monkeypatch.setattr(_Norm, "is_ready", False)
    result = run(config)
    assert result.stop is not None
    assert (result.stop.kind, result.step) == ("failed", 2)
    for part in ("the gradients of step 3 are", "00.png of bad", "saved at step 2"):
        assert part in result.stop.reason
    assert not result.files
    assert [path.name for path in sorted((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))] == ["checkpoint-2"]
    until = RunConfig.model_validate(
        {**config.model_dump(), "output_dir": str(tmp_path / "until"), "schedule": {"name": "constant"},
         "training": {**config.training.model_dump(), "max_steps": 2}}
    )  # fmt: skip
    if config.schedule.name == "constant":
        run(until)
        assert_same_states(config, until, 2)
    with CheckpointStore(Path(config.output_dir) / "checkpoints", 1) as store:
        checkpoint = store.open(store.latest() or Path())
    assert checkpoint.saved("schedule").json["steps"] == checkpoint.saved("position").json["step"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoint.saved("parameters").tensors.values())


def assert_same_states(one: RunConfig, two: RunConfig, step: int) -> None:
    ours, theirs = states(one, step), states(two, step)
    assert ours.keys() == theirs.keys()
    for file in ours.keys() - {"random.rank-00000.safetensors"}:  # libraries' own generators; steps seed themselves
        assert not [name for name in ours[file] if not torch.equal(ours[file][name], theirs[file][name])], file


@pytest.mark.full
def test_fp16_leaves_steps_out_and_ends_the_run_only_where_that_does_not_stop(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gracetune.train.guards._MOST_SKIPPED", 4)
    good = {"id": "good", "path": str(images(tmp_path / "good")), "resolution": 64.0, "end_step": 2}
    bad = {
        "id": "bad", "path": str(images(tmp_path / "bad", 1)), "resolution": 64.0, "start_step": 2,
        "loss_weight": 1e38,
    }  # fmt: skip
    half = {"max_steps": 20, "mixed_precision": "fp16"}
    result = run(config_for("flux", tiny_model, tmp_path, datasets=[good, bad], training=half))
    assert result.stop is not None
    assert (result.stop.kind, result.step) == ("failed", 6)
    assert "4 steps in a row" in result.stop.reason


def test_the_very_first_batch_is_judged_before_training(tiny_model: TinyModel, tmp_path: Path) -> None:
    data = {"id": "bad", "path": str(images(tmp_path / "bad", 1)), "resolution": 64.0, "loss_weight": 1e39}
    with pytest.raises(FirstBatchError, match=r"the very first batch is inf \(00\.png\)"):
        run(config_for("flux", tiny_model, tmp_path, datasets=[data]))


def test_an_output_folder_that_cannot_be_made(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(GracetuneError, match=r"found .*\n|Not a directory"):
        run(config_for("flux", tiny_model, tmp_path))


def test_an_output_folder_that_cannot_be_written_is_said_before_the_data_is_looked_at(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = config_for("flux", tiny_model, tmp_path)
    (tmp_path / "out").symlink_to(tmp_path / "gone" / "away")  # in the way, for root too
    shutil.rmtree(tmp_path / "pictures")
    with pytest.raises(ConfigError, match="output_dir"):
        run(config, dry_run=True)
    with pytest.raises(GracetuneError, match="checkpoint not written"):
        run(config)


def link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def link_to_a_folder(path: Path) -> None:
    path.with_name("elsewhere").mkdir()
    path.symlink_to(path.with_name("elsewhere"))


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def fill_a_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


@pytest.mark.parametrize(
    ("name", "place", "words", "kind"),
    [
        ("tiny.safetensors", link_to_nowhere, "which does not exist", "lora"),
        ("tiny.safetensors", link_to_a_folder, "a folder", "lora"),
        ("tiny.safetensors", link_to_itself, "leads back to itself", "lora"),
        ("tiny.safetensors", Path.mkdir, "a folder", "lora"),
        ("tiny.safetensors", fill_a_folder, "a folder", "lora"),
        ("tiny.safetensors", os.mkfifo, "neither a file nor a folder", "lora"),
        ("tiny_000000001.safetensors", link_to_nowhere, "which does not exist", "lora"),
        ("samples", Path.touch, "a file", "lora"),
        ("logs", link_to_nowhere, "which does not exist", "lora"),
        ("config.yaml", Path.mkdir, "a folder", "lora"),
        ("tiny_000000001", Path.touch, "a file", "full_finetune"),
        ("tiny", link_to_nowhere, "which does not exist", "full_finetune"),
    ],
)
def test_what_is_in_the_place_of_a_result_is_said_before_the_first_step(
    name: str, place: Callable[[Path], None], words: str, kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = config_for("flux", tiny_model, tmp_path, adapter={"kind": kind}, training={"max_steps": 1})
    (tmp_path / "out").mkdir()
    place(tmp_path / "out" / name)
    shutil.rmtree(tmp_path / "pictures")  # the data has not been read yet
    with pytest.raises(ConfigError) as rejected:
        run(config)
    (problem,) = rejected.value.problems
    assert problem.file == str(tmp_path / "out" / name)
    assert words in problem.found
    assert "--set output_dir=FOLDER" in problem.hint


def test_a_run_folder_that_is_a_link_to_nowhere(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 1})
    link_to_nowhere(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"output_dir\n  found     out, a link to .*, which does not exist"):
        run(config)


def test_a_result_that_lies_behind_a_link_is_one(finished: RunConfig, tmp_path: Path) -> None:
    """Links to a disk for results are allowed."""
    result = tmp_path / "out" / "tiny.safetensors"
    result.rename(tmp_path / "kept.safetensors")
    result.symlink_to(tmp_path / "kept.safetensors")
    (tmp_path / "out" / "samples").rmdir()
    (tmp_path / "large disk").mkdir()
    (tmp_path / "out" / "samples").symlink_to(tmp_path / "large disk")
    assert run(changed(finished, "training", max_steps=2)).step == 2
    assert result.is_file()
    assert not result.is_symlink()
    assert (tmp_path / "kept.safetensors").is_file()
    assert (tmp_path / "out" / "finished-tiny_000000001.safetensors").is_symlink()


def test_weights_that_are_not_there(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = changed(config_for("flux", tiny_model, tmp_path), "model", path="nobody/such-model")
    with pytest.raises(ConfigError, match="nobody/such-model"):
        run(config)


def test_an_effective_batch_that_the_processes_cannot_share(tiny_model: TinyModel, tmp_path: Path) -> None:
    ramp = {
        "enabled": True,
        "initial_effective_batch_size": 4,
        "target_effective_batch_size": 10,
        "batch_rampup_steps": 5,
    }
    config = config_for("flux", tiny_model, tmp_path, training={"ramp": ramp})
    assert checked_ramp(config, 2).target == 10
    with pytest.raises(ConfigError, match="a multiple of 4") as error:
        checked_ramp(config, 4)
    assert error.value.problems[0].hint.endswith("=8")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
    ],
)
def test_what_a_launcher_asks_for_and_we_lack_is_rejected(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LaunchEnvironment.from_environment(Environment(variables), "bf16")


def test_a_precision_the_launcher_sets_otherwise_is_said() -> None:
    launch = LaunchEnvironment.from_environment(Environment({"ACCELERATE_MIXED_PRECISION": "fp16"}), "bf16")
    assert "fp16" in launch.notes[0]
    assert not LaunchEnvironment.from_environment(Environment({"ACCELERATE_MIXED_PRECISION": "no"}), "fp32").notes


class Planning(CollectingView):
    def __init__(self) -> None:
        super().__init__()
        self.plans: list[PlannedRun] = []

    def planned(self, planned: PlannedRun, machine: Machine) -> None:
        self.plans.append(planned)


def of_published_size(tiny: Path, folder: Path) -> Path:
    """A model whose files claim the size of FLUX.1 [dev]; its weights cannot be loaded."""
    shutil.copytree(tiny, folder)
    build_published("flux", "dev").save_config(str(folder / "transformer"))  # type: ignore[operator]
    return folder


def test_a_plan_that_does_not_fit_stops_before_anything_is_loaded(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = of_published_size(tiny_model("flux", "dev"), tmp_path / "model")
    config = config_for("flux", tiny_model, tmp_path, adapter={"kind": "full_finetune"}, training={"batch_size": 512})
    view = Planning()
    with pytest.raises(ConfigError) as rejected:
        run(changed(config, "model", path=str(model)), view)
    first, *edits = rejected.value.problems
    assert "does not fit" in first.found
    assert "--allow-misfit" in first.hint
    assert "training.batch_size" in [edit.key for edit in edits]
    assert not (tmp_path / "out").exists()
    (planned,) = view.plans
    reject_misfit(planned, allowed=True)
    reject_misfit(replace(planned, mismatch="for other weights"), allowed=False)


def test_what_ends_a_run_from_outside_the_loop_is_in_its_log(tiny_model: TinyModel, tmp_path: Path) -> None:
    class Failing(CollectingView):
        def on_step(self, step: int, steps: int) -> None:
            if step == 2:
                raise GracetuneError("the roof fell in")

    config = config_for("flux", tiny_model, tmp_path)
    with pytest.raises(GracetuneError, match="roof"):
        run(config, Failing())
    last = read_log(tmp_path / "out" / "logs" / "events.jsonl").merged()[-1].event
    assert isinstance(last, RunEnded)
    assert (last.outcome, last.reason) == ("failed", "the roof fell in")
    assert "the roof fell in" in (tmp_path / "out" / "report.html").read_text()


def test_a_webhooks_address_is_in_nothing_that_is_shared(tiny_model: TinyModel, tmp_path: Path) -> None:
    hook = {"webhook": "http://127.0.0.1:9/T0/secret-word"}
    config = config_for("flux", tiny_model, tmp_path, logging=hook, **ONE)
    run(config)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"secret-word" in path.read_bytes()] == ["config.yaml"]
    assert (tmp_path / "out" / "config.yaml").stat().st_mode & 0o077 == 0


@pytest.mark.full
def test_regularisation_data_of_a_full_fine_tune_is_learned_like_any_other_and_that_is_said(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    data = {"id": "cats", "path": str(images(tmp_path / "p")), "resolution": 64.0, "regularisation": True}
    view = CollectingView()
    run(config_for("flux", tiny_model, tmp_path, datasets=[data], adapter={"kind": "full_finetune"}, **ONE), view)
    assert any("cats is regularisation data" in text for text in view.warnings)


def test_samples_that_are_not_learned_are_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A run reports them as well, not only `data show` and `cache build`."""
    folder = images(tmp_path / "p", 5)
    (folder / "01.txt").unlink()
    whole = (folder / "03.png").read_bytes()
    (folder / "03.png").write_bytes(whole[:200] + bytes(100) + whole[300:])  # its header is sound
    images(tmp_path / "small", 1, 32)
    (tmp_path / "small" / "00.png").rename(folder / "small.png")
    data = {
        "id": "cats", "path": str(folder), "resolution": 64.0, "resolution_type": "pixel", "corrupt_threshold": 0.5,
        "minimum_size": 48,
    }  # fmt: skip
    view = CollectingView()
    run(config_for("flux", tiny_model, tmp_path, datasets=[data], **ONE), view)
    stated = "\n".join(view.warnings)
    for part in ("dataset cats: 1 file dropped", "without a caption", "left out, unreadable: 03.png of cats"):
        assert part in stated


def test_an_optimizer_that_cannot_be_had_is_said_before_anything_is_loaded(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    optimizers: list[dict[str, Any]] = [{"name": "adamw_8bit"}, {"name": "lion", "options": {"betaz": 1}}]
    for optimizer in optimizers:
        with pytest.raises(ConfigError, match="optimizer"):
            run(config_for("wan", tiny_model, tmp_path, optimizer=optimizer))
    assert not (tmp_path / "out").exists()


def test_everything_that_rejects_a_run_arrives_as_one_list(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gracetune train` with mistakes of many origins: the data's folder, packages, layers, samples, a run in the
    way. Nothing is made, and with `--json` the same list is on stdout."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    sections: dict[str, Any] = {
        "adapter": {"targets": ["to_qq"]},
        "optimizer": {"name": "adamw_8bit"},
        "training": {"attention": "flash_attn_3", "mixed_precision": "fp16"},
        "model": {"base_precision": "bf16"},
        "logging": {"trackers": ["wandb"]},
        "validation": {"every_steps": 1, "prompts": [{"prompt": "a", "width": 67, "height": 64}]},
    }
    config = config_for("flux", tiny_model, tmp_path, **sections)
    shutil.rmtree(tmp_path / "pictures")
    file = write_config(config, tmp_path / "c.yaml")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tiny.safetensors").touch()
    keys = (
        "datasets[0].path", "training.mixed_precision", "logging.trackers: wandb", "optimizer.name", "output_dir",
        "validation.prompts[0].width", "training.attention", "adapter.targets",
    )  # fmt: skip
    assert gracetune("train", str(file)) == 1
    message = capsys.readouterr().err
    for key in keys:
        assert f"{key}\n    found " in message, f"{key} is missing in\n{message}"
    assert gracetune("train", str(file), "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert sorted(problem["key"] for problem in problems) == sorted(keys)
    assert all(problem[part] for problem in problems for part in ("found", "expected", "hint"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny.safetensors"]


def test_a_rejected_run_makes_no_folder_and_one_mistake_is_told_as_ever(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for("flux", tiny_model, tmp_path, adapter={"targets": ["to_qq"]})
    with pytest.raises(ConfigError) as rejected:
        run(config)
    assert [problem.key for problem in rejected.value.problems] == ["adapter.targets"]
    assert not (tmp_path / "out" / "checkpoints").exists()
    file = write_config(changed(config, "model", path="/nowhere"), tmp_path / "c.yaml")
    assert gracetune("train", str(file), "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["key"] for problem in problems] == ["model.path"]


def test_a_folder_that_another_run_writes_into_is_in_the_list(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, **ONE)
    with CheckpointStore(tmp_path / "out" / "checkpoints", 1) as store:
        store.claim({"name": "another"})
        with pytest.raises(BusyFolderError):
            run(config)
        with pytest.raises(ConfigError) as rejected:
            run(changed(config, "adapter", targets=("to_qq",)))
        keys = [problem.key for problem in rejected.value.problems]
        assert keys == ["another process writes checkpoints here", "adapter.targets"]
    assert run(config).step == 1


def test_an_objective_that_is_rejected_leaves_the_result_before_as_it_is(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("sdxl", tiny_model, tmp_path, **ONE)
    run(config)
    existing = sorted(path.name for path in (tmp_path / "out").iterdir())
    longer = changed(changed(config, "training", max_steps=2), "objective", flow_shift=3.0)
    with pytest.raises(ConfigError, match="flow_shift"):
        run(longer)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == existing


def test_rejections_of_a_run_that_names_a_checkpoint_elsewhere_or_an_unknown_flavour(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """No problem is repeated or lost, and no checkpoint is compared if the run's identity is unknown."""
    config = config_for("sdxl", tiny_model, tmp_path, **ONE)
    run(config)
    elsewhere = config.model_copy(update={"output_dir": str(tmp_path / "fresh")})
    options = RunOptions(resume=str(tmp_path / "out" / "checkpoints" / "checkpoint-1"), report=False)
    unreachable = [("logging.webhook", Problem("logging.webhook", "ftp://here", "https", "write https"))]
    with pytest.raises(ConfigError) as rejected:
        train(elsewhere, environment=Environment({}), options=options, view=CollectingView(), known=unreachable)
    assert [problem.key for problem in rejected.value.problems] == ["logging.webhook"]
    missing = Problem("datasets[0].path", "nothing there", "a folder", "make it")
    unknown = changed(config, "model", path=None, flavour="bse-1.0")
    with pytest.raises(ConfigError) as rejected:
        train(
            unknown,
            environment=Environment({}),
            options=RunOptions(),
            view=CollectingView(),
            known=[(missing.key, missing)],
        )
    assert [problem.key for problem in rejected.value.problems] == ["datasets[0].path", "model.flavour"]


def test_of_several_processes_that_were_not_joined_no_plan_is_made(tiny_model: TinyModel, tmp_path: Path) -> None:
    class Planning(CollectingView):
        def __init__(self) -> None:
            super().__init__()
            self.plans: list[PlannedRun] = []

        def planned(self, planned: PlannedRun, machine: Machine) -> None:
            self.plans.append(planned)

    view = Planning()
    missing = Problem("datasets[0].path", "nothing there", "a folder", "make it")
    several = Environment({"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"})
    config = config_for("sdxl", tiny_model, tmp_path, **ONE)
    with pytest.raises(ConfigError) as rejected:
        train(config, environment=several, options=RunOptions(), view=view, known=[(missing.key, missing)])
    assert {problem.key for problem in rejected.value.problems} >= {"datasets[0].path"}
    assert not view.plans, "for one process it would be another plan"

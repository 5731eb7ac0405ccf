"""Training on fp8 base weights: rejected combinations, and the trainer's own step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gracetune.bench.step.job import PRESETS, StepJob, config_of
from gracetune.bench.step.numerics import gradient_check
from gracetune.bench.step.random_model import RandomModel, make_model
from gracetune.bench.step.trainer import decide, trainer
from gracetune.checkpoint.errors import BusyFolderError, CheckpointError
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.environment import Environment
from gracetune.config.rules import broken_rules
from gracetune.errors import ConfigError, GracetuneError, MachineError, Problem
from gracetune.hardware import probe
from gracetune.models.eight_bit_linear import Fp8Linear
from gracetune.telemetry.errors import TelemetryError
from gracetune.train.preflight_checks import Checks, reject_eight_bits
from gracetune.train.runtime import LaunchEnvironment, Runtime, open_runtime

ALONE = Runtime(
    rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"), precision="fp32",
    launch=LaunchEnvironment(), key="",
)  # fmt: skip


def problem(key: str) -> Problem:
    return Problem(key, "this", "that", "type it")


def reject(error: Exception) -> int:
    raise error


def test_checks_of_a_rejected_value_are_skipped_and_all_others_reported() -> None:
    checks = Checks()
    good = checks.run(lambda: 3)
    bad = checks.run(lambda: reject(ConfigError([problem("model.path")])))
    follows = checks.run(lambda: bad.value + good.value)
    checks.run(lambda: reject(CheckpointError(problem("a checkpoint"))))
    checks.run(lambda: reject(TelemetryError("logging.webhook", found="this", expected="that", hint="type it")))
    checks.run(lambda: reject(MachineError("no such GPU; use another")))
    assert (good.value, bad.is_rejected, follows.is_known, follows.is_rejected) == (3, True, False, False)
    with pytest.raises(ConfigError) as rejected:
        checks.raise_all(ALONE)
    keys = [one.key for one in rejected.value.problems]
    assert keys == ["model.path", "a checkpoint", "logging.webhook", "this run"]
    assert rejected.value.problems[-1].found == "no such GPU; use another"


def test_a_single_error_is_raised_unchanged_and_no_error_passes() -> None:
    checks = Checks()
    checks.raise_all(ALONE)
    error = MachineError("no such GPU; use another")
    checks.run(lambda: reject(error))
    with pytest.raises(MachineError) as rejected:
        checks.raise_all(ALONE)
    assert rejected.value is error


def test_a_key_with_a_known_problem_is_not_reported_again() -> None:
    checks = Checks([("model.path", problem("pretrained_model_name_or_path"))])
    assert checks.run(lambda: reject(ConfigError([problem("model.path")]))).is_rejected
    with pytest.raises(ConfigError) as rejected:
        checks.raise_all(ALONE)
    assert [one.key for one in rejected.value.problems] == ["pretrained_model_name_or_path"]


def test_an_error_of_another_type_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        Checks().run(lambda: reject(ZeroDivisionError()))


def test_checking_a_folder_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one" / "checkpoints"
    CheckpointStore(folder, 1).check_claim()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(GracetuneError, match="Not a directory"):
        CheckpointStore(folder, 1).check_claim()
    (tmp_path / "runs").unlink()
    with CheckpointStore(folder, 1) as other:
        other.claim({"name": "other"})
        with pytest.raises(BusyFolderError):
            CheckpointStore(folder, 1).check_claim()
    CheckpointStore(folder, 1).check_claim()


CPU = torch.device("cpu")
JOB = StepJob("wan14b", precision="fp8", smoke=True)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return make_model(PRESETS["wan14b"], tmp_path_factory.mktemp("fp8") / "wan", "tiny")


def runtime(*, sharded: bool) -> Runtime:
    return Runtime(
        rank=0, world_size=1, local_rank=0, local_world_size=1, device=CPU, precision="bf16",
        launch=LaunchEnvironment(sharded=sharded), key="",
    )  # fmt: skip


def test_sharded_8_bit_weights_are_rejected(wan: RandomModel, tmp_path: Path) -> None:
    config = config_of(JOB, wan.source.folder, tmp_path)
    reject_eight_bits(config, runtime(sharded=False))
    reject_eight_bits(config_of(replace(JOB, precision="bf16"), wan.source.folder, tmp_path), runtime(sharded=True))
    with pytest.raises(ConfigError, match=r"replicas[\s\S]*base_precision=bf16"):
        reject_eight_bits(config, runtime(sharded=True))


def test_a_full_fine_tune_is_rejected_with_the_rest_of_the_config(wan: RandomModel, tmp_path: Path) -> None:
    config = config_of(JOB, wan.source.folder, tmp_path)
    whole = config.model_copy(update={"adapter": config.adapter.model_copy(update={"kind": "full_finetune"})})
    broken = [one for one in broken_rules(whole) if one.path == ("model", "base_precision")]
    assert len(broken) == 1
    assert "is for frozen weights" in broken[0].expected
    assert not any(one.path == ("model", "base_precision") for one in broken_rules(config))


@pytest.mark.parametrize("layouts", ["both", "one"])
def test_a_training_step_learns_on_fp8_weights(wan: RandomModel, tmp_path: Path, layouts: str) -> None:
    losses = {}
    for precision in ("bf16", "fp8"):
        job = replace(JOB, precision=precision)  # type: ignore[arg-type]
        config = config_of(job, wan.source.folder, tmp_path / precision)
        with open_runtime("bf16", Environment({})) as opened:
            decided = decide(job, config, probe(), wan, opened.device)
            decided = replace(decided, choices=replace(decided.choices, fp8_layouts=layouts))  # type: ignore[arg-type]
            with trainer(job, config, decided, probe(), wan, opened) as run:
                held = [
                    one for one in run.trained_model.host.module("high_noise").modules() if isinstance(one, Fp8Linear)
                ]
                stated = [line for line in run.trained_model.decisions if line.startswith("base weights: fp8")]
                losses[precision] = torch.stack([run.step() for _ in range(3)])
                state = run.trained_model.attached["high_noise"].state()
                assert not any(
                    tensor.dtype.itemsize == 1 for one in state.layers.values() for tensor in one.tensors.values()
                )
        assert bool(held) == bool(stated) == (precision == "fp8")
        assert all((layer.fp8_transposed is None) == (layouts == "one") for layer in held)
    assert torch.allclose(losses["fp8"], losses["bf16"], rtol=0.03)
    assert not torch.equal(losses["fp8"], losses["bf16"])


@pytest.mark.full
@pytest.mark.parametrize("adapter", ["lora", "dora", "lokr", "loha"])
def test_adapter_gradients_on_fp8_weights_point_the_same_way(wan: RandomModel, adapter: str) -> None:
    found = gradient_check(replace(JOB, adapter=adapter), wan, CPU)  # type: ignore[arg-type]
    assert found.cosine > 0.99
    assert found.relative_error < 0.15

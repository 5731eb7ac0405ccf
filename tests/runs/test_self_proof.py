"""Every run checks that its adapter has an effect and that its first file reproduces it; otherwise it is stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gracetune.adapters.fast.modules import AdaptedLinear
from gracetune.adapters.formats.record import FORMATS, Format
from gracetune.adapters.formats.writing import FileContents
from gracetune.adapters.state import AdapterState, Layer
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.telemetry.events import RunEnded, SelfChecked
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.blocks import Preparation, prepare_blocks
from gracetune.train.output import WrongFileError
from gracetune.train.self_check import STEPS, SelfCheck
from gracetune.train.step import TrainStep
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, run
from runs.test_resume import assert_same_end, losses
from unit.adapters.denoisers import ADAPTERS

PASSES = 1
"""Passes that the check adds for each expert to those of the first batch and of training."""


class Absent(SelfCheck):
    """A self-check that checks nothing."""

    def start(self, begun: Any) -> None: ...

    def step_ends(self, done: Any) -> None: ...

    def check_saved(self, files: Any) -> None: ...


def events(config: RunConfig, kind: type[Any]) -> list[Any]:
    log = read_log(Path(config.output_dir) / "logs" / "events.jsonl")
    return [record.event for record in log.merged() if isinstance(record.event, kind)]


def lines(view: CollectingView) -> list[str]:
    return [line for line in view.lines if line.startswith("self-check")]


def test_two_experts_are_proven_each_on_its_own_and_nothing_else_changes(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoKr with EMA, dropout and a warm-up that begins at a rate of 0. The result equals that without the check."""
    sections: dict[str, Any] = {
        "adapter": {"kind": "lokr", "rank": 4, "dropout": 0.1}, "optimizer": {"lr": 1e-3},
        "schedule": {"name": "constant_with_warmup", "warmup_steps": 2},
        "training": {"max_steps": 8, "ema": {"enabled": True, "decay": 0.5}},
        "checkpoints": {"every_steps": 5, "format": "lycoris"},
    }  # fmt: skip
    proven, plain = (config_for("wan", tiny_model, tmp_path / name, **sections) for name in ("proven", "plain"))
    passes, original = [], TrainStep.__call__

    def counted(self: TrainStep, denoiser: Any, batch: Any, expert: str) -> Any:
        passes.append(expert)
        return original(self, denoiser, batch, expert)

    view = CollectingView()
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", counted)
        assert run(proven, view).step == 8
    (line,) = lines(view)
    assert line.startswith(f"self-check: the adapter changes the output after {STEPS} steps (high_noise: by ")
    assert "the saved files reproduce it (difference " in line
    of_dry_batch, steps = 2, 4
    assert Counter(passes) == dict.fromkeys(("high_noise", "low_noise"), of_dry_batch + steps + PASSES)
    assert not [text for text in view.warnings if "self-check" in text]
    checked = events(proven, SelfChecked)
    # The first step of the high expert has a rate of 0 and does not count: its third comes with step 7, not 5.
    assert [(one.step, one.expert, one.file) for one in checked] == [
        (5, "high_noise", "tiny_000000005_high_noise.safetensors"),
        (5, "low_noise", "tiny_000000005_low_noise.safetensors"),
        (6, "low_noise", ""),
        (7, "high_noise", ""),
    ]
    assert all(one.change > 1e-6 for one in checked[2:])
    assert all(0 < one.file_difference < 2.0**-8 for one in checked[:2])  # bf16
    assert (
        "Training has an effect, and the first saved file" in (tmp_path / "proven" / "out" / "report.html").read_text()
    )

    monkeypatch.setattr("gracetune.train.callbacks.SelfCheck", Absent)
    run(plain)
    assert losses(proven) == losses(plain)
    assert_same_end(proven, plain, 8)


def test_an_adapter_that_has_learned_before_is_compared_with_what_it_was(tiny_model: TinyModel, tmp_path: Path) -> None:
    """After a resume and with `init_from`. Dropout must repeat, or it would look like an effect of training."""
    adapter = {"kind": "lora", "rank": 4, "dropout": 0.5}
    first = config_for("flux", tiny_model, tmp_path, adapter=adapter, training={"max_steps": 3})
    run(first)
    view = CollectingView()
    longer = config_for("flux", tiny_model, tmp_path, adapter=adapter, training={"max_steps": 6})
    assert run(longer, view).step == 6
    assert lines(view)[0].startswith("self-check: training changes the output by ")
    assert events(longer, SelfChecked)[-2].amplified == 1

    begun = {**adapter, "init_from": str(tmp_path / "out" / "tiny.safetensors")}
    still = config_for(
        "flux", tiny_model, tmp_path / "still", adapter=begun, training={"max_steps": 3}, optimizer={"lr": 1e-30}
    )
    run(still, view := CollectingView())
    assert lines(view)[0].startswith("self-check: training changes the output by ")
    assert events(still, SelfChecked)[0].amplified > 1


@pytest.mark.full  # compiles each run
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_of_a_compiled_denoiser_the_check_needs_no_graph_of_its_own(
    family: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Preparation] = []

    def compiled(*args: Any, **options: Any) -> Preparation:
        prepared.append(prepare_blocks(*args, **{**options, "compiled": True, "backend": "aot_eager"}))
        return prepared[-1]

    monkeypatch.setattr("gracetune.train.trained_model.prepare_blocks", compiled)
    sections: dict[str, Any] = {"training": {"max_steps": 5, "batch_size": 2}, "checkpoints": {"every_steps": 4}}
    configs = [config_for(family, tiny_model, tmp_path / name, **sections) for name in ("with", "without")]
    view = CollectingView()
    torch._dynamo.reset()
    run(configs[0], view)
    assert "the adapter changes the output by " in lines(view)[0]
    torch._dynamo.reset()
    monkeypatch.setattr("gracetune.train.callbacks.SelfCheck", Absent)
    run(configs[1])
    first, second = (one.stats.graphs for one in prepared)
    assert first == second > 0
    assert losses(configs[0]) == losses(configs[1])
    assert_same_end(*configs, 5)


def test_magnitudes_in_comfyuis_terms_are_read_back_as_they_were_trained(tiny_model: TinyModel, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"adapter": {"kind": "dora", "rank": 4}, "checkpoints": {"format": "comfyui"}}
    view = CollectingView()
    run(config_for("sdxl", tiny_model, tmp_path, training={"max_steps": 3}, **sections), view)
    (line,) = lines(view)
    assert "changes the output by" in line
    assert "the saved file reproduces it" in line


def test_what_is_less_than_the_models_precision_is_found_in_an_adapter_made_stronger(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The effect of three steps with a tiny rate is lost in bf16. This must not stop the run."""
    sections: dict[str, Any] = {
        "model": {"base_precision": "bf16"}, "training": {"max_steps": 4, "mixed_precision": "bf16"},
        "optimizer": {"lr": 1e-8}, "checkpoints": {"save_dtype": "fp16"},
    }  # fmt: skip
    config = config_for("flux", tiny_model, tmp_path, **sections)
    view = CollectingView()
    assert run(config, view).step == 4
    first = events(config, SelfChecked)[0]
    assert first.amplified > 1
    assert f"at {first.amplified:,.0f} times its strength" in lines(view)[0]
    (lost,) = [text for text in view.warnings if "self-check" in text]
    assert "is lost in" in lost  # 3e-8 is below the smallest number of fp16
    assert "lora_B.weight" in lost


def stopped(config: RunConfig) -> str:
    """The reason and the step of a stop. Asserts that the state was saved."""
    view = CollectingView()
    result = run(config, view)
    assert result.stop is not None
    assert (result.stop.kind, result.step) == ("failed", STEPS)
    assert events(config, RunEnded)[-1].outcome == "failed"
    assert (Path(config.output_dir) / "checkpoints" / f"checkpoint-{STEPS}").is_dir()
    assert not lines(view)
    return result.stop.reason


def test_a_rate_of_0_stops_the_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    """This includes a run in which only the last step shows it."""
    reason = stopped(config_for("flux", tiny_model, tmp_path, optimizer={"lr": 0.0}, training={"max_steps": STEPS}))
    assert reason.splitlines()[:2] == ["optimizer.lr", "  found     0"]


def _without_gradient(self: AdaptedLinear, x: Tensor, result: Tensor) -> Tensor:
    return result + 0 * self.added(x)


def _without_value(self: AdaptedLinear, x: Tensor, result: Tensor) -> Tensor:
    added = self.added(x)
    return result + (added - added.detach())


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        pytest.param(_without_gradient, "layers are unchanged, and no gradient reaches them", id="no-gradient"),
        pytest.param(_without_value, "the denoiser's output is the same as before the first step", id="not-connected"),
    ],
)
def test_an_adapter_without_effect_stops_the_run(
    broken: Callable[..., Tensor], found: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptedLinear, "adapted", broken)
    reason = stopped(config_for("flux", tiny_model, tmp_path))
    assert f"self-check of the adapter after {STEPS} steps" in reason
    assert found in reason
    assert "--set 'adapter.targets=[...]'" in reason


def test_an_answer_that_is_not_finite_is_no_proof_against_the_adapter(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16 a sample may overflow. Such steps are skipped and do not end the run."""
    original = TrainStep.predict
    monkeypatch.setattr(TrainStep, "predict", lambda *given: original(*given) * torch.nan)
    view = CollectingView()
    assert run(config_for("flux", tiny_model, tmp_path, training={"max_steps": STEPS}), view).files
    assert "the adapter changes the output by nan" in lines(view)[0]


def test_layers_that_no_gradient_reaches_are_named(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen-Image's last caption stream, if the family did not declare it as untrained."""
    monkeypatch.setattr("gracetune.models.qwen_image.load._NO_GRADIENT", ())
    config = config_for("qwen_image", tiny_model, tmp_path, training={"max_steps": 3})
    view = CollectingView()
    assert run(config, view).step == 3
    (warning,) = [text for text in view.warnings if "self-check" in text]
    assert "have learned nothing after 3 steps" in warning
    assert "attn.to_add_out" in warning
    assert len(events(config, SelfChecked)[0].idle) == warning.count("transformer_blocks.")
    assert lines(view), "and the run is proven all the same"


def _wrongly(change: Callable[[dict[str, Layer]], dict[str, Layer]]) -> dict[Any, Format]:
    """Formats that write other values than the given ones."""

    def write(state: AdapterState, dtype: torch.dtype) -> FileContents:
        return FORMATS["comfyui"].write(replace(state, layers=change(dict(state.layers))), dtype)

    return {**FORMATS, "comfyui": replace(FORMATS["comfyui"], write=write)}


def _without_the_first(layers: dict[str, Layer]) -> dict[str, Layer]:
    return dict([*layers.items()][1:])


def _at_double_strength(layers: dict[str, Layer]) -> dict[str, Layer]:
    path, layer = next(iter(layers.items()))
    return {**layers, path: replace(layer, alpha=2 * layer.alpha)}


def test_a_file_that_misses_a_layer_stops_the_run_where_it_is_written(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gracetune.adapters.adapter_files.FORMATS", _wrongly(_without_the_first))
    config = config_for("flux", tiny_model, tmp_path, checkpoints={"every_steps": 3})
    reason = stopped(config)
    assert "tiny_000000003.safetensors: self-check" in reason
    assert "missing: the adapter has nothing for it" in reason
    assert "\\n" not in reason, "the other error's lines are one here"


def test_a_file_of_another_strength_is_found_at_the_end_and_kept(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gracetune.adapters.adapter_files.FORMATS", _wrongly(_at_double_strength))
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 3})
    with pytest.raises(WrongFileError, match=r"other values than the trained ones in \S+\.lora_B\.weight"):
        run(config)
    assert events(config, RunEnded)[-1].outcome == "failed"
    assert (tmp_path / "out" / "tiny.safetensors").is_file()
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-3").is_dir()


@pytest.mark.full
@pytest.mark.parametrize("format", ["comfyui", "diffusers", "kohya", "lycoris"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter_is_read_back_from_every_format_that_holds_it(
    kind: str, format: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    checkpoints = {"format": format, "save_dtype": "fp16"}
    for family in ("wan", "flux", *(("sdxl",) if kind in ("lora", "lokr") else ())):
        config = config_for(
            family, tiny_model, tmp_path / family, adapter={"kind": kind, "rank": 4, "alpha": 3.0},
            training={"max_steps": 3}, model={"experts": "high"}, checkpoints=checkpoints,
        )  # fmt: skip
        view = CollectingView()
        try:
            run(config, view)
        except ConfigError as error:
            assert error.problems[0].key == "checkpoints.format"
            continue
        (line,) = lines(view)
        assert "reproduces it" in line
        assert not [text for text in view.warnings if "self-check" in text]

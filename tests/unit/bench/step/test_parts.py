"""The parts of a measured step on tiny models: random weights, counted products, the trainer's step, the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from gracetune.bench.step import numerics
from gracetune.bench.step.clock import measure
from gracetune.bench.step.flops import count
from gracetune.bench.step.job import PRESETS, StepJob, config_of
from gracetune.bench.step.numerics import gradient_check
from gracetune.bench.step.plain_loop import PlainLoop
from gracetune.bench.step.random_model import RandomModel, make_model
from gracetune.bench.step.trainer import Trainer, decide, trainer, with_limit
from gracetune.config.environment import Environment
from gracetune.errors import GracetuneError
from gracetune.hardware import probe
from gracetune.models.spec import PartPlacement
from gracetune.train.blocks import prepare_blocks
from gracetune.train.planning import make_plan
from gracetune.train.runtime import open_runtime
from gracetune.units import GIB
from unit.hardware.machines import load

CPU = torch.device("cpu")
JOB = StepJob("wan14b", smoke=True)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return make_model(PRESETS["wan14b"], tmp_path_factory.mktemp("bench") / "wan", "tiny")


@contextmanager
def running(job: StepJob, model: RandomModel, folder: Path) -> Iterator[Trainer]:
    config = config_of(job, model.source.folder, folder)
    with open_runtime("bf16", Environment({})) as runtime:
        decided = decide(job, config, probe(), model, runtime.device)
        with trainer(job, config, decided, probe(), model, runtime) as run:
            yield run


def test_weights_are_drawn_and_never_zero(wan: RandomModel) -> None:
    denoiser = wan.spec.load_denoiser(wan.source, wan.expert, PartPlacement(CPU, torch.bfloat16))
    for name, parameter in denoiser.named_parameters():
        assert parameter.isfinite().all(), name
        assert (parameter != 0).float().mean() > 0.9, name
        assert parameter.float().std() > 0, name
    again = wan.spec.load_denoiser(wan.source, wan.expert, PartPlacement(CPU, torch.bfloat16))
    assert all(torch.equal(one, two) for one, two in zip(denoiser.parameters(), again.parameters(), strict=True)), (
        "the same seed draws the same weights"
    )


def test_they_are_as_large_as_the_layers_own_first_values(wan: RandomModel) -> None:
    denoiser = wan.spec.load_denoiser(wan.source, wan.expert, PartPlacement(CPU, torch.float32))
    layer = denoiser.get_submodule("blocks.0.ffn.net.2")
    assert isinstance(layer, torch.nn.Linear)
    fresh = torch.nn.Linear(layer.in_features, layer.out_features)
    assert float(layer.weight.std() / fresh.weight.detach().std()) == pytest.approx(1, abs=0.1)


def test_no_weight_file_is_left_to_be_read_by_mistake(wan: RandomModel) -> None:
    assert [*wan.source.folder.glob("transformer*/*.safetensors")] == []


def test_products_are_those_one_can_count_by_hand(wan: RandomModel) -> None:
    config = wan.denoiser_config
    width = config["num_attention_heads"] * config["attention_head_dim"]
    ffn, layers = config["ffn_dim"], config["num_layers"]
    image, text = JOB.tokens, 512
    targets = [f"blocks.{block}.{layer}" for block in range(layers) for layer in _WAN_LAYERS]
    found = count(JOB, wan, targets)
    # 2 FLOPs a weight and token: q, k, v, out of self-attention, q and out of the cross one, the feed-forward.
    frozen = 2 * image * (6 * width * width + 2 * width * ffn)
    caption = 2 * text * 2 * width * width
    attention = 4 * image * (image + text) * width
    ends = found.forward - layers * (frozen + caption + attention)
    assert 0 < ends < 0.5 * found.forward, "patches, time and caption embeddings, the last projection"
    # The first block's input has no gradient, so four of its products have no dX; the caption has none anywhere.
    first = 2 * image * 3 * width * width
    out = 2 * image * width * 4 * 16  # the last projection carries the gradient in
    assert found.backward == layers * (frozen + 2 * attention) - first + out
    assert found.hardware("off", None) == found.model
    assert found.hardware("full", None) == found.model + found.forward
    assert found.hardware("half", None) is None
    assert found.hardware("tenth", 0.5) == found.model + found.forward // 2


_WAN_LAYERS = (
    *(f"{attention}.to_{part}" for attention in ("attn1", "attn2") for part in ("q", "k", "v", "out.0")),
    "ffn.net.0.proj", "ffn.net.2",
)  # fmt: skip


@pytest.mark.full
def test_published_sizes_are_counted_as_by_hand(tmp_path: Path) -> None:
    job = StepJob("wan14b")
    model = make_model(job.preset, tmp_path / "model", "published")
    denoiser = model.spec.build_denoiser(model.source, model.expert)
    assert sum(one.numel() for one in denoiser.parameters()) == job.preset.footprint.parameters
    found = count(job, model, [f"blocks.{block}.{layer}" for block in range(40) for layer in _WAN_LAYERS])
    assert found.model == pytest.approx(243.8e12, rel=1e-3)
    assert str(found.main) == "4096 x 5120 x 5120"


def test_it_trains_the_adapter_and_nothing_else(wan: RandomModel, tmp_path: Path) -> None:
    with running(JOB, wan, tmp_path) as run:
        denoiser = run.trained_model.host.module(wan.expert.name)
        before = {name: parameter.detach().clone() for name, parameter in denoiser.named_parameters()}
        pace = measure(run.step, CPU, 5)
        changed = {name for name, parameter in denoiser.named_parameters() if not torch.equal(parameter, before[name])}
        trained = {id(parameter) for parameter in run.trained_model.parameters().values()}
        assert changed == {name for name, parameter in denoiser.named_parameters() if id(parameter) in trained}
    assert len(pace.samples_ms) == 5
    assert all(sample > 0 for sample in pace.samples_ms)
    assert pace.peak_bytes is None


def test_clips_are_clips(wan: RandomModel, tmp_path: Path) -> None:
    with running(replace(JOB, frames=81, batch=2), wan, tmp_path) as run:
        assert bool(run.step().isfinite())


def test_steps_that_take_long_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("gracetune.bench.step.clock.time.perf_counter", lambda: clock[0])

    def taking(seconds: float) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            clock[0] += seconds
            return torch.ones(())

        return step

    began = clock[0]
    assert measure(taking(15.0), CPU, 10, within_s=30).samples_ms == (15_000.0,) * 3
    assert clock[0] - began == 5 * 15, "the first, one to warm up, three"
    assert len(measure(taking(1.0), CPU, 10, within_s=30).samples_ms) == 10
    assert len(measure(taking(15.0), CPU, 10).samples_ms) == 10


def test_a_loss_that_is_no_number_is_not_timed() -> None:
    with pytest.raises(GracetuneError, match="no training"):
        measure(lambda: torch.tensor(float("nan")), CPU, 2)


@pytest.mark.parametrize("adapter", ["lora", "lokr", "loha", "dora"])
def test_the_plain_loop_trains_the_same_layers(adapter: str, wan: RandomModel, tmp_path: Path) -> None:
    from lycoris.wrapper import LycorisNetwork

    before = (LycorisNetwork.TARGET_REPLACE_MODULE, LycorisNetwork.TARGET_REPLACE_NAME, LycorisNetwork.USE_FNMATCH)
    job = replace(JOB, adapter=adapter)  # type: ignore[arg-type]
    with running(job, wan, tmp_path) as run:
        selection = run.trained_model.attached[wan.expert.name].selection
        assert selection is not None
        shapes = sorted(tuple(one.shape) for one in run.trained_model.parameters().values())
    loop = PlainLoop(job, config_of(job, wan.source.folder, tmp_path), wan, selection.paths, CPU)
    assert sorted(tuple(one.shape) for one in loop.parameters) == shapes
    first = [parameter.detach().clone() for parameter in loop.parameters]
    assert bool(loop.step().isfinite())
    assert any(not torch.equal(one, two) for one, two in zip(first, loop.parameters, strict=True))
    after = (LycorisNetwork.TARGET_REPLACE_MODULE, LycorisNetwork.TARGET_REPLACE_NAME, LycorisNetwork.USE_FNMATCH)
    assert after == before, "which layers it takes is state of a class others use too"


def test_gradients_are_held_against_exact_ones(wan: RandomModel) -> None:
    found = gradient_check(replace(JOB, adapter="lokr"), wan, CPU)
    assert 0 < found.relative_error < 2e-2
    assert 0 < found.library_relative_error < 2e-2
    assert found.cosine > 0.999
    assert not found.compiled


@pytest.mark.full
def test_on_a_gpu_they_are_those_of_compiled_blocks(wan: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_compiles", lambda device: True)
    # inductor imports setuptools, which rejects a process that has imported distutils before.
    monkeypatch.setattr(numerics, "prepare_blocks", partial(prepare_blocks, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = gradient_check(JOB, wan, CPU)
    assert found.compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert 0 < found.relative_error < 2e-2


@pytest.mark.full
def test_a_memory_limit_is_a_limit_of_the_plan(tmp_path: Path) -> None:
    """The bar: 45 GiB, which half of the activations fit into, and all of them do not."""
    h200 = load("x86-h200-recorded")
    job = StepJob("wan14b", memory_limit=45 * GIB)
    model = make_model(job.preset, tmp_path / "model", "published")
    config = config_of(job, model.source.folder, tmp_path / "out")
    free, tight = (
        make_plan(config, machine, model.spec, model.source, model.facts)
        for machine in (h200, with_limit(h200, 45 * GIB))
    )
    assert (free.mismatch, tight.mismatch) == (None, None)
    assert free.plan.checkpointing.value == "off"
    assert tight.plan.checkpointing.value == "auto"
    assert tight.demand.training_peak("half") <= 45 * GIB < tight.demand.training_peak("off")

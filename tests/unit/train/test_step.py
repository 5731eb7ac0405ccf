from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gracetune.adapters.attach import attach
from gracetune.cache.batches import Batch
from gracetune.config.run_config import Adapter, Model, Objective, RunConfig
from gracetune.data.refs import BatchRef, Bucket, CaptionRef, SampleRef
from gracetune.models.registry import spec_of
from gracetune.models.source import open_source
from gracetune.models.spec import ModelFacts, ModelSpec, PartPlacement
from gracetune.train.first_batch import ReferenceBatch
from gracetune.train.step import TrainingGoal, TrainStep
from gracetune.train.trained_model import TrainedModel, dataset_strengths

TinyModel = Callable[[str, str], Path]


def batch_of(indexes: tuple[int, ...], *, weights: tuple[float, ...] | None = None, mask: bool = False) -> Batch:
    """A batch whose samples depend on their index alone."""
    generated = [torch.Generator().manual_seed(index) for index in indexes]
    tensors = {
        "latents": torch.stack([torch.randn(16, 1, 8, 8, generator=one) for one in generated]),
        "prompt_embeds": torch.stack([torch.randn(6, 32, generator=one) for one in generated]),
    }
    if mask:
        tensors["loss_mask"] = torch.stack([torch.full((1, 1, 8, 8), 0.5) for _ in generated])
    refs = tuple(
        SampleRef("d", f"{index}.png", str(index), Bucket(64, 64), None, CaptionRef(""), loss_weight=weight)
        for index, weight in zip(indexes, weights or (1.0,) * len(indexes), strict=True)
    )
    return Batch(BatchRef(refs, Bucket(64, 64), indexes, 0, len(indexes)), tensors)


@pytest.fixture(scope="module")
def wan(tiny_model: TinyModel) -> tuple[ModelSpec, ModelFacts, nn.Module]:
    spec = spec_of("wan")
    source = open_source(Model(family="wan", path=str(tiny_model("wan", "t2v-14b-2.2"))))
    facts = spec.inspect(source)
    return spec, facts, spec.load_denoiser(source, facts.experts[1], PartPlacement(torch.device("cpu"), torch.float32))


def test_a_samples_loss_does_not_depend_on_its_batch(wan: tuple[ModelSpec, ModelFacts, nn.Module]) -> None:
    spec, facts, denoiser = wan
    step = TrainStep(spec, facts, TrainingGoal.from_config(Objective(), facts, ["low_noise"]), seed=1)
    together = step(denoiser, batch_of((3, 8, 5)), "low_noise")
    alone = [step(denoiser, batch_of((index,)), "low_noise") for index in (3, 8, 5)]
    torch.testing.assert_close(together.each, torch.cat([one.each for one in alone]))
    assert torch.equal(together.level, torch.cat([one.level for one in alone]))
    torch.testing.assert_close(together.total, together.each.sum())


def test_the_kept_first_batch_has_memory_of_its_own_and_the_strides_that_blocks_were_compiled_for() -> None:
    batch = batch_of((0, 1, 2))
    padded = torch.randn(3, 9, 32)
    tensors = {**batch.tensors, "prompt_embeds": padded[:, :6], "shared": torch.randn(1, 4).expand(3, 4)}
    example = ReferenceBatch(Batch(batch.ref, tensors))
    kept = example._batch
    assert kept is not None
    for name, one in tensors.items():
        assert (kept.tensors[name].stride(), kept.tensors[name]._is_view()) == (one.stride(), one._is_view())
        assert torch.equal(kept.tensors[name], one)
    before = padded.clone()
    padded.zero_()
    assert torch.equal(kept.tensors["prompt_embeds"], before[:, :6])


def test_levels_stay_in_the_experts_noise_range(wan: tuple[ModelSpec, ModelFacts, nn.Module]) -> None:
    spec, facts, denoiser = wan
    goal = TrainingGoal.from_config(Objective(timesteps="uniform"), facts, ["high_noise", "low_noise"])
    step = TrainStep(spec, facts, goal, seed=1)
    batch = batch_of(tuple(range(16)))
    high, low = (step(denoiser, batch, name).level for name in ("high_noise", "low_noise"))
    assert float(high.min()) >= 0.875 > float(low.max())


def test_weights_and_masks_count(wan: tuple[ModelSpec, ModelFacts, nn.Module]) -> None:
    spec, facts, denoiser = wan
    step = TrainStep(spec, facts, TrainingGoal.from_config(Objective(), facts, ["low_noise"]), seed=1)
    plain = step(denoiser, batch_of((0, 1)), "low_noise").each
    weighted = step(denoiser, batch_of((0, 1), weights=(0.0, 2.0)), "low_noise").each
    torch.testing.assert_close(weighted, plain * torch.tensor([0.0, 2.0]))
    masked = step(denoiser, batch_of((0, 1), mask=True), "low_noise").each
    torch.testing.assert_close(masked, plain / 2)


def test_another_seed_gives_other_noise(wan: tuple[ModelSpec, ModelFacts, nn.Module]) -> None:
    spec, facts, denoiser = wan
    goal = TrainingGoal.from_config(Objective(), replace(facts), ["low_noise"])
    one, two = (TrainStep(spec, facts, goal, seed=seed)(denoiser, batch_of((0,)), "low_noise") for seed in (1, 2))
    assert float(one.total) != float(two.total)


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_the_target_of_regularisation_data_is_the_base_models_prediction(
    kind: str, wan: tuple[ModelSpec, ModelFacts, nn.Module]
) -> None:
    """A new adapter predicts what its base does, so the loss is 0. A trained one is pulled back to the base."""
    spec, facts, denoiser = wan
    adapter = Adapter.model_validate({"kind": kind, "rank": 2})
    attached = attach(denoiser, adapter, family="wan", default_targets=spec.default_targets, seed=0)
    trained_model = TrainedModel(
        spec, None, facts, None, {"low_noise": attached}, torch.float32, {"d": 0.5}, frozenset({"d"})
    )  # type: ignore[arg-type]
    goal = TrainingGoal.from_config(Objective(), facts, ["low_noise"])
    step = TrainStep(spec, facts, goal, seed=1, base=trained_model.base_for)
    batch = batch_of((3, 8))
    try:
        parameters = [*attached.parameters().values()]

        def gradients() -> tuple[float, float]:
            loss = step(denoiser, batch, "low_noise")
            found = torch.autograd.grad(loss.total, parameters, allow_unused=True)
            return float(loss.total.detach()), max(float(one.abs().max()) for one in found if one is not None)

        assert gradients() == (0.0, 0.0)
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        loss, slope = gradients()
        assert loss > 0
        assert slope > 0
        with trained_model.strength_for(batch, "low_noise"):
            weaker, _ = gradients()
        assert 0 < weaker < loss
        plain = TrainStep(spec, facts, goal, seed=1)(denoiser, batch, "low_noise")
        assert float(plain.total.detach()) != loss
        other = replace(trained_model, regularised=frozenset())
        unasked = TrainStep(spec, facts, goal, seed=1, base=other.base_for)(denoiser, batch, "low_noise")
        assert torch.equal(unasked.each, plain.each)
    finally:
        attached.detach()


def test_a_disabled_dataset_has_no_strength() -> None:
    """Any strength keeps the whole run from being captured in CUDA graphs."""
    datasets = [
        {"id": "one", "path": "p", "adapter_strength": 0.5},
        {"id": "off", "path": "p", "adapter_strength": 0.5, "disabled": True},
        {"id": "plain", "path": "p"},
    ]
    options = {"name": "run", "output_dir": "out", "model": {"family": "wan"}, "training": {"max_steps": 1}}
    assert dataset_strengths(RunConfig.model_validate({**options, "datasets": datasets})) == {"one": 0.5}

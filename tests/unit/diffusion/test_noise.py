from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.run_config import Objective
from gracetune.diffusion.noise import normal_like, sample_noise

LATENTS = torch.zeros(4, 8, 16, 16)
PLAIN = Objective()


def test_is_standard_normal() -> None:
    noise = sample_noise(torch.zeros(8, 16, 32, 32), PLAIN, 0, range(8)).target.flatten()
    assert abs(float(noise.mean())) < 4 / math.sqrt(noise.numel())
    assert float(noise.var()) == pytest.approx(1, abs=0.02)
    assert float(noise.pow(4).mean()) == pytest.approx(3, abs=0.1)


@given(st.permutations(range(4)), st.integers(0, 2**63))
def test_does_not_depend_on_the_batch(order: list[int], seed: int) -> None:
    objective = Objective(noise_offset=0.1, noise_offset_probability=0.5, input_perturbation=0.2)
    numbers = [7, 2**40, 0, 99]
    together = sample_noise(LATENTS, objective, seed, numbers)
    shuffled = sample_noise(LATENTS, objective, seed, [numbers[at] for at in order])
    alone = [sample_noise(LATENTS[:1], objective, seed, [number]) for number in numbers]
    for place, at in enumerate(order):
        assert torch.equal(shuffled.target[place], together.target[at])
        assert torch.equal(alone[at].target[0], together.target[at])
        assert torch.equal(alone[at].added[0], together.added[at])


def test_seeds_samples_and_purposes_differ() -> None:
    values = [
        normal_like(LATENTS[:1], seed, purpose, [index])
        for seed in (0, 1)
        for purpose in ("noise", "input_perturbation")
        for index in (0, 1)
    ]
    # Independent: two of 2048 numbers each are hardly correlated.
    flat = torch.stack([one.flatten() for one in values])
    correlation = torch.corrcoef(flat) - torch.eye(len(values))
    assert float(correlation.abs().max()) < 0.12


def test_is_float32_whatever_the_latents_are_and_touches_no_global_generator() -> None:
    before = torch.get_rng_state()
    half = sample_noise(LATENTS.bfloat16(), PLAIN, 3, range(4))
    assert half.target.dtype == torch.float32
    assert torch.equal(half.target, sample_noise(LATENTS, PLAIN, 3, range(4)).target)
    assert torch.equal(torch.get_rng_state(), before)


def test_target_and_added_noise_are_one_tensor_without_perturbation() -> None:
    noise = sample_noise(LATENTS, PLAIN, 3, range(4))
    assert noise.added is noise.target


def test_perturbation_changes_only_the_added_noise() -> None:
    plain = sample_noise(LATENTS, PLAIN, 3, range(4))
    moved = sample_noise(LATENTS, Objective(input_perturbation=0.1), 3, range(4))
    assert torch.equal(moved.target, plain.target)
    assert float((moved.added - moved.target).std()) == pytest.approx(0.1, rel=0.05)


class TestOffset:
    @pytest.mark.parametrize("shape", [(4, 8, 16, 16), (4, 8, 3, 16, 16), (4, 8, 64)])
    def test_is_one_number_for_each_channel(self, shape: tuple[int, ...]) -> None:
        latents = torch.zeros(shape)
        plain = sample_noise(latents, PLAIN, 1, range(4)).target
        offset = sample_noise(latents, Objective(noise_offset=0.5), 1, range(4)).target - plain
        per_channel = offset.flatten(2)
        torch.testing.assert_close(per_channel, per_channel[..., :1].expand_as(per_channel), atol=1e-6, rtol=0)
        assert len(per_channel[..., 0].flatten().unique()) == 32
        assert float(per_channel[..., 0].std()) == pytest.approx(0.5, rel=0.4)

    def test_applies_to_its_share_of_the_samples(self) -> None:
        latents = torch.zeros(400, 4, 2, 2)
        objective = Objective(noise_offset=0.5, noise_offset_probability=0.25)
        moved = (
            sample_noise(latents, objective, 1, range(400)).target - sample_noise(latents, PLAIN, 1, range(400)).target
        )
        chosen = int(moved.abs().amax((1, 2, 3)).gt(0).sum())
        assert 70 < chosen < 130

    def test_never_at_probability_0(self) -> None:
        objective = Objective(noise_offset=0.5, noise_offset_probability=0.0)
        expected = sample_noise(LATENTS, PLAIN, 1, range(4)).target
        assert torch.equal(sample_noise(LATENTS, objective, 1, range(4)).target, expected)


def test_every_sample_needs_an_index() -> None:
    with pytest.raises(ValueError, match="3 sample indices for a batch of 4"):
        sample_noise(LATENTS, PLAIN, 0, range(3))

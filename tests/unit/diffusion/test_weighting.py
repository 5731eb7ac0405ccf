from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.run_config import Objective
from gracetune.diffusion.measured_weights import MEASURED
from gracetune.diffusion.schedule import Cosine, Ddpm, Flow, NoiseSchedule, Prediction
from gracetune.diffusion.weighting import Weighting, bell_weight, element_losses, sample_losses, snr

SCHEDULER = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
STEPS = torch.tensor([0, 10, 250, 500, 750, 999])
LEVELS = (STEPS + 1) / 1000


def table(prediction: Prediction = "epsilon") -> Ddpm:
    return Ddpm(tuple(SCHEDULER.alphas_cumprod.tolist()), prediction)


def objective(**changes: object) -> Objective:
    return Objective.model_validate(changes)


def weights(schedule: NoiseSchedule, level: torch.Tensor = LEVELS, **changes: object) -> torch.Tensor:
    return Weighting.from_config(objective(**changes), schedule).weights(schedule, level)


class TestSnr:
    def test_is_diffusers_own(self) -> None:
        torch.testing.assert_close(snr(table(), LEVELS), compute_snr(SCHEDULER, STEPS), rtol=1e-4, atol=0)

    @pytest.mark.parametrize("gamma", [1.0, 5.0])
    def test_min_snr_equals_the_published_formula(self, gamma: float) -> None:
        ratio = compute_snr(SCHEDULER, STEPS)
        clipped = torch.stack([ratio, gamma * torch.ones_like(ratio)], dim=1).min(dim=1)[0]
        torch.testing.assert_close(weights(table(), snr_gamma=gamma), clipped / ratio, rtol=1e-4, atol=0)
        v = weights(table("v_prediction"), snr_gamma=gamma)
        torch.testing.assert_close(v, clipped / (ratio + 1), rtol=1e-4, atol=0)

    def test_soft_is_below_the_hard_one_and_meets_it_far_from_gamma(self) -> None:
        hard, soft = weights(table(), snr_gamma=5.0), weights(table(), snr_gamma=5.0, soft_min_snr=True)
        ratio = compute_snr(SCHEDULER, STEPS)
        torch.testing.assert_close(soft, 5 / (ratio + 5), rtol=1e-4, atol=0)
        assert bool((soft <= hard).all())
        far = (ratio > 500) | (ratio < 0.05)
        assert int(far.sum()) >= 2
        torch.testing.assert_close(soft[far], hard[far], rtol=0.02, atol=0)
        # Both forms weight the error of the clean image alike: soft(SNR) over SNR, or over SNR + 1.
        v = weights(table("v_prediction"), snr_gamma=5.0, soft_min_snr=True)
        torch.testing.assert_close(v * (ratio + 1), soft * ratio, rtol=1e-4, atol=0)

    def test_soft_without_gamma_uses_1(self) -> None:
        expected = weights(table(), soft_min_snr=True, snr_gamma=1.0)
        assert torch.equal(weights(table(), soft_min_snr=True), expected)

    def test_debiased(self) -> None:
        ratio = compute_snr(SCHEDULER, STEPS).clamp(max=1000)
        torch.testing.assert_close(weights(table(), debiased=True), ratio.rsqrt(), rtol=1e-4, atol=0)
        v = weights(table("v_prediction"), debiased=True)
        torch.testing.assert_close(v, 1 / (ratio + 1), rtol=1e-4, atol=0)

    def test_both_multiply(self) -> None:
        both = weights(table(), debiased=True, snr_gamma=5.0)
        torch.testing.assert_close(both, weights(table(), debiased=True) * weights(table(), snr_gamma=5.0))

    @pytest.mark.parametrize("changes", [{"snr_gamma": 5.0}, {"soft_min_snr": True}, {"debiased": True}])
    @pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
    def test_pure_noise_and_clean_latents_give_finite_weights(
        self, prediction: Prediction, changes: dict[str, object]
    ) -> None:
        ends = Ddpm((1.0, 0.5, 0.0), prediction)
        found = weights(ends, torch.tensor([1 / 3, 2 / 3, 1.0]), **changes)
        assert bool(found.isfinite().all())
        assert bool((found >= 0).all())
        if prediction == "v_prediction":
            continuous = weights(Cosine(), torch.tensor([0.0, 0.5, 1.0]), **changes)
            assert bool(continuous.isfinite().all())


class TestFlow:
    @pytest.mark.parametrize("changes", [{"snr_gamma": 5.0}, {"soft_min_snr": True}, {"debiased": True}])
    def test_weights_are_1_with_a_warning(self, changes: dict[str, object]) -> None:
        decided = Weighting.from_config(objective(**changes), Flow())
        assert decided.warning is not None
        assert next(iter(changes)) in decided.warning
        assert "every weight is 1" in decided.warning
        assert torch.equal(decided.weights(Flow(), LEVELS), torch.ones(6))

    def test_no_setting_gives_no_warning(self) -> None:
        for schedule in (Flow(), table(), Cosine()):
            decided = Weighting.from_config(objective(), schedule)
            assert decided.warning is None
            assert decided.reason == "1 at every noise level"
            assert torch.equal(decided.weights(schedule, LEVELS), torch.ones(6))

    def test_bell_is_1_on_average_highest_in_the_middle_and_0_at_the_ends(self) -> None:
        level = (torch.arange(100_000) + 0.5) / 100_000
        bell = bell_weight(level)
        assert float(bell.double().mean()) == pytest.approx(1, abs=1e-5)
        assert float(level[bell.argmax()]) == pytest.approx(0.5, abs=1e-2)
        torch.testing.assert_close(bell, bell.flip(0), atol=1e-5, rtol=0)
        assert bell_weight(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([0, 0], abs=1e-6)

    def test_bell_equals_ai_toolkits(self) -> None:
        """Its table over 1000 steps: a bell, lowered to 0, scaled to a mean of 1."""
        x = torch.arange(1000, dtype=torch.float64)
        y = torch.exp(-2 * ((x - 500) / 1000) ** 2)
        y = (y - y.min()) * 1000 / (y - y.min()).sum()
        torch.testing.assert_close(bell_weight(x / 1000).double(), y, atol=2e-3, rtol=0)

    def test_bell_comes_with_weighted_timesteps(self) -> None:
        assert torch.equal(weights(Flow(), timesteps="weighted"), bell_weight(LEVELS))
        elsewhere = Weighting.from_config(objective(timesteps="weighted"), table())
        assert elsewhere.warning is not None
        assert torch.equal(elsewhere.weights(table(), LEVELS), torch.ones(6))

    def test_level_weights_have_their_own_setting(self) -> None:
        assert torch.equal(weights(Flow(), timesteps="sigmoid", timestep_weights="bell"), bell_weight(LEVELS))
        half = weights(Flow(), timestep_weights="half_bell")
        assert torch.equal(half[LEVELS > 0.5], bell_weight(LEVELS[LEVELS > 0.5]))
        assert set(half[LEVELS <= 0.5].tolist()) == {float(bell_weight(torch.tensor([0.5])))}
        ends = Weighting.from_config(objective(timestep_weights="measured"), Flow())
        assert ends.weights(Flow(), torch.tensor([1.0, 0.0])).tolist() == pytest.approx([MEASURED[0], MEASURED[-1]])
        assert sum(MEASURED) / len(MEASURED) == pytest.approx(1, abs=1e-6)


class TestLosses:
    A = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    B = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize(
        ("loss", "by_hand"),
        [
            ("mse", lambda r: r * r),
            ("mae", abs),
            ("huber", lambda r: 2 * 0.1 * (math.sqrt(r * r + 0.01) - 0.1)),
            ("smooth_l1", lambda r: 2 * (math.sqrt(r * r + 0.01) - 0.1)),
        ],
    )
    def test_by_hand(self, loss: str, by_hand: object) -> None:
        found = element_losses(self.A, self.B, objective(loss=loss)).flatten()
        rest = (self.A - self.B).double().flatten().tolist()
        expected = torch.tensor([by_hand(value) for value in rest])  # type: ignore[operator]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

    @given(st.floats(1e-6, 1e-3))
    def test_huber_is_the_square_near_0(self, rest: float) -> None:
        found = element_losses(torch.tensor([rest]), torch.zeros(1), objective(loss="huber"))
        assert float(found) == pytest.approx(rest**2, rel=1e-3)

    def test_sample_loss_is_the_mean(self) -> None:
        found = sample_losses(self.A, self.B, objective())
        torch.testing.assert_close(found, (self.A - self.B).square().mean((1, 2, 3)))

    def test_mask_weights_elements_and_the_mean_includes_all(self) -> None:
        mask = torch.zeros(3, 1, 5, 5)
        mask[:, :, :2] = 1.0
        mask[2] = 0.5
        found = sample_losses(self.A, self.B, objective(), mask)
        errors = (self.A - self.B).square()
        assert float(found[0]) == pytest.approx(float(errors[0, :, :2].sum() / 100), rel=1e-5)
        assert float(found[2]) == pytest.approx(float(errors[2].mean() / 2), rel=1e-5)

    @pytest.mark.parametrize("loss", ["mse", "mae", "huber", "smooth_l1"])
    def test_bf16_predictions_are_compared_in_float32_and_get_gradients(self, loss: str) -> None:
        answer = self.A.bfloat16().requires_grad_()
        found = sample_losses(answer, self.B, objective(loss=loss))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, sample_losses(answer.detach().float(), self.B, objective(loss=loss)))
        found.sum().backward()
        assert answer.grad is not None
        assert bool(answer.grad.isfinite().all())

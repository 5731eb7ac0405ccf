from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gracetune.adapters import svd
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import apply, delta
from gracetune.adapters.state import AdapterState, Layer
from gracetune.adapters.svd import state_to_lora
from gracetune.errors import ConfigError
from gracetune.hostmem.sensors import HostSensor


def to_lora(layer: Layer, rank: int, weight: Tensor | Sequence[int]) -> tuple[Layer, float]:
    """One layer's LoRA, and its relative error."""
    found = state_to_lora(AdapterState("wan", "", {"layer": layer}), rank, lambda _path: weight)
    return found.state.layers["layer"], found.error


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lokr(seed: int = 0, kernel: tuple[int, ...] = ()) -> Layer:
    return Layer(
        "lokr", {"lokr_w1": values(3, 4, seed=seed), "lokr_w2": values(6, 5, *kernel, seed=seed + 1)}, 1.0, None
    )


def loha(rank: int = 3) -> Layer:
    names = {"hada_w1_a": (18, rank), "hada_w1_b": (rank, 20), "hada_w2_a": (18, rank), "hada_w2_b": (rank, 20)}
    return Layer(
        "loha", {name: values(*shape, seed=index) for index, (name, shape) in enumerate(names.items())}, 1.5, rank
    )


def full(rows: int = 18, columns: int = 20) -> Layer:
    return Layer("full_delta", {"diff": values(rows, columns)}, 1.0, None)


def best(change: Tensor, rank: int) -> float:
    """The lowest error that a LoRA of this rank can have (Eckart and Young)."""
    values = torch.linalg.svdvals(change.flatten(1).double())
    return float((values[rank:].square().sum() / values.square().sum()).sqrt())


def test_a_product_beyond_fp32_is_rejected() -> None:
    huge = {"lora_A.weight": torch.full((2, 9), 3e38), "lora_B.weight": torch.full((8, 2), 3e38)}
    with pytest.raises(ConfigError, match="beyond the range of numbers"):
        to_lora(Layer("lora", huge, 2.0, 2), 2, (8, 9))


def test_free_memory_is_read_anew_by_one_sensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostSensor] = []

    class Counted(HostSensor):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(svd, "HostSensor", Counted)
    state_to_lora(AdapterState("wan", "", {"a": full(), "b": lokr()}), 2, lambda _path: (18, 20))
    assert len(made) == 1


class TestNearest:
    @pytest.mark.parametrize("rank", [1, 3, 7, 18])
    @pytest.mark.parametrize("layer", [lokr(), loha(), full()], ids=lambda layer: layer.algorithm)
    def test_is_the_best_there_is_and_the_error_is_true(self, layer: Layer, rank: int) -> None:
        converted, error = to_lora(layer, rank, (18, 20))
        change, ours = delta(layer, (18, 20)), delta(converted, (18, 20))
        measured = float((change - ours).norm() / change.norm())
        assert error == pytest.approx(measured, abs=1e-6)
        assert error == pytest.approx(best(change, rank), abs=1e-6)
        own = 15 if layer.algorithm == "lokr" else 18  # 3 x 5: a product has no more singular values
        assert (converted.algorithm, converted.rank, converted.scale) == ("lora", min(rank, own), 1.0)

    def test_enough_rank_is_exact(self) -> None:
        layer = lokr()  # of rank 3 * 5
        converted, error = to_lora(layer, 15, (18, 20))
        torch.testing.assert_close(delta(converted, (18, 20)), delta(layer, (18, 20)), rtol=1e-5, atol=1e-5)
        assert error < 1e-6

    def test_a_convolution(self) -> None:
        layer, shape = lokr(kernel=(3, 3)), (18, 20, 3, 3)
        converted, error = to_lora(layer, 18, shape)
        assert converted.tensors["lora_A.weight"].shape == (18, 20, 3, 3)
        assert converted.tensors["lora_B.weight"].shape == (18, 18, 1, 1)
        torch.testing.assert_close(delta(converted, shape), delta(layer, shape), rtol=1e-4, atol=1e-5)
        assert error < 1e-6

    @pytest.mark.parametrize("rank", [2, 5, 18])
    def test_tucker_forms_and_small_ranks_from_their_factors(self, rank: int) -> None:
        """The result is optimal although the change is not built."""
        shape = (18, 20, 3, 3)
        core = values(2, 2, 3, 3, seed=9)
        layers = [
            Layer("locon", {"lora_down.weight": values(2, 20, 1, 1, seed=1), "lora_mid.weight": core,
                            "lora_up.weight": values(18, 2, 1, 1, seed=2)}, 3.0, 2),
            Layer("loha", {"hada_w1_a": values(2, 18, seed=3), "hada_w1_b": values(2, 20, seed=4), "hada_t1": core,
                           "hada_w2_a": values(2, 18, seed=5), "hada_w2_b": values(2, 20, seed=6),
                           "hada_t2": core * 2}, 3.0, 2),
            Layer("lokr", {"lokr_w1_a": values(3, 2, seed=7), "lokr_w1_b": values(2, 4, seed=8), "lokr_t2": core,
                           "lokr_w2_a": values(2, 6, seed=10), "lokr_w2_b": values(2, 5, seed=11)}, 3.0, 2),
        ]  # fmt: skip
        for layer in layers:
            assert algorithm(layer.algorithm).singular_vectors(layer.tensors, layer.scale, rank) is not None
            converted, error = to_lora(layer, rank, shape)
            change, ours = delta(layer, shape), delta(converted, shape)
            assert error == pytest.approx(best(change, rank), abs=1e-6)
            assert error == pytest.approx(float((change - ours).norm() / change.norm()), abs=1e-6)

    def test_a_product_larger_than_memory_is_taken_apart_by_its_factors(self) -> None:
        side = 60_000
        names = {"hada_w1_a": (side, 1), "hada_w1_b": (1, side), "hada_w2_a": (side, 1), "hada_w2_b": (1, side)}
        tensors = {name: values(*shape, seed=index) for index, (name, shape) in enumerate(names.items())}
        converted, error = to_lora(Layer("loha", tensors, 1.0, 1), 4, (side, side))
        assert error < 1e-6
        left, right = converted.tensors["lora_B.weight"], converted.tensors["lora_A.weight"]
        expected = (tensors["hada_w1_a"] * tensors["hada_w2_a"])[:5] @ (tensors["hada_w1_b"] * tensors["hada_w2_b"])[
            :, :5
        ]
        torch.testing.assert_close(left[:5] @ right[:, :5], expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("algorithm", "shapes", "shape"),
        [
            ("ia3", {"weight": (1 << 20,), "on_input": (1,)}, (1 << 20, 1 << 20)),
            ("loha", {"hada_w1_a": (1 << 20, 256), "hada_w1_b": (256, 1 << 20), "hada_w2_a": (1 << 20, 256),
                      "hada_w2_b": (256, 1 << 20)}, (1 << 20, 1 << 20)),
            ("lokr", {"lokr_w1": (1, 1 << 20), "lokr_w2": (1, 1 << 20)}, (1, 1 << 40)),
        ],
        ids=["the change itself", "pairs of ranks", "its singular vectors"],
    )  # fmt: skip
    def test_what_memory_cannot_hold_is_rejected(
        self, algorithm: str, shapes: dict[str, tuple[int, ...]], shape: tuple[int, int]
    ) -> None:
        """Nothing is built here: every tensor is one number."""
        layer = Layer(algorithm, {name: torch.zeros(1).expand(size) for name, size in shapes.items()}, 1.0, None)
        with pytest.raises(ConfigError, match=r"40\.0 TiB to decompose it"):
            to_lora(layer, 4, torch.empty(shape, device="meta"))

    def test_a_decomposed_lokr_with_a_scale(self) -> None:
        tensors = {"lokr_w1": values(3, 4), "lokr_w2_a": values(6, 2, seed=1), "lokr_w2_b": values(2, 5, seed=2)}
        layer = Layer("lokr", tensors, -0.5, 2)
        converted, error = to_lora(layer, 6, (18, 20))
        torch.testing.assert_close(delta(converted, (18, 20)), delta(layer, (18, 20)), rtol=1e-5, atol=1e-5)
        assert error < 1e-6

    def test_what_depends_on_the_weight(self) -> None:
        weight = values(18, 20, seed=9)
        layer = Layer("diag_oft", {"oft_blocks": 0.1 * values(6, 3, 3)}, 1.0, None)
        converted, error = to_lora(layer, 18, weight)
        torch.testing.assert_close(weight + delta(converted, weight.shape), apply(layer, weight), rtol=1e-4, atol=1e-5)
        assert error < 1e-6
        with pytest.raises(ValueError, match="give it, not its shape"):
            to_lora(layer, 4, weight.shape)

    def test_nothing_is_nothing(self) -> None:
        converted, error = to_lora(Layer("full_delta", {"diff": torch.zeros(4, 6)}, 1.0, None), 2, (4, 6))
        assert error == 0.0
        assert not delta(converted, (4, 6)).any()

    @given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 14))
    @settings(max_examples=30)
    def test_more_rank_is_never_worse(self, rows: int, columns: int, rank: int) -> None:
        layer = full(rows, columns)
        errors = [to_lora(layer, count, (rows, columns))[1] for count in (rank, rank + 1)]
        assert errors[1] <= errors[0] + 1e-6
        assert 0 <= errors[0] <= 1

    def test_large_matrices_are_projected_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(svd, "EXACT_UP_TO", 64)
        u, v = torch.linalg.qr(values(300, 200)).Q, torch.linalg.qr(values(200, 200, seed=1)).Q
        change = (u * 0.9 ** torch.arange(200)) @ v.T  # spectrum of a trained change: falling, not flat
        layer = Layer("full_delta", {"diff": change}, 1.0, None)
        before = torch.get_rng_state()
        converted, error = to_lora(layer, 16, (300, 200))
        assert torch.equal(torch.get_rng_state(), before)
        assert error == pytest.approx(best(change, 16), rel=1e-3)
        assert float((change - delta(converted, (300, 200))).norm() / change.norm()) == pytest.approx(error, rel=1e-5)


class TestState:
    def test_every_layer_and_all_together(self) -> None:
        state = AdapterState("wan", "low_noise", {"a": lokr(), "b": lokr(5)}, {"x": "y"})
        result = state_to_lora(state, 4, lambda _path: (18, 20))
        assert (result.state.family, result.state.expert, result.state.metadata) == ("wan", "low_noise", {"x": "y"})
        norms = {path: float(delta(layer, (18, 20)).norm()) for path, layer in state.layers.items()}
        missed = math.hypot(*(result.errors[path] * norm for path, norm in norms.items()))
        assert result.error == pytest.approx(missed / math.hypot(*norms.values()), abs=1e-6)
        assert min(result.errors.values()) <= result.error <= max(result.errors.values())

    def test_a_bias_is_not_dropped_silently(self) -> None:
        layer = Layer("full_delta", {"diff": values(4, 6), "diff_b": torch.ones(4)}, 1.0, None)
        with pytest.raises(ConfigError, match=r"a\.diff_b"):
            state_to_lora(AdapterState("wan", "", {"a": layer}), 4, lambda _path: (4, 6))
        unchanged = Layer("full_delta", {"diff": values(4, 6), "diff_b": torch.zeros(4)}, 1.0, None)
        assert to_lora(unchanged, 4, (4, 6))[1] < 1e-6


class TestLoraToLora:
    @staticmethod
    def lora(rank: int, kernel: tuple[int, ...] = ()) -> Layer:
        ones = (1,) * len(kernel)
        tensors = {"lora_A.weight": values(rank, 20, *kernel), "lora_B.weight": values(18, rank, *ones, seed=1)}
        return Layer("lora", tensors, 3.0, rank)

    @pytest.mark.parametrize("kernel", [(), (3, 3)])
    @pytest.mark.parametrize(("own", "rank"), [(6, 2), (6, 6), (3, 16), (40, 5), (40, 60)])
    def test_is_the_best_there_is(self, own: int, rank: int, kernel: tuple[int, ...]) -> None:
        layer, shape = self.lora(own, kernel), (18, 20, *kernel)
        converted, error = to_lora(layer, rank, shape)
        change, ours = delta(layer, shape), delta(converted, shape)
        assert converted.rank == min(own, rank, 18)
        assert error == pytest.approx(best(change, rank), abs=1e-6)
        assert error == pytest.approx(float((change - ours).norm() / change.norm()), abs=1e-6)

    def test_without_building_the_matrix(self) -> None:
        """Of the published size: 70 million entries, decomposed as 16 x 16."""
        tensors = {"lora_A.weight": values(16, 13_824), "lora_B.weight": values(5120, 16, seed=1)}
        converted, error = to_lora(Layer("lora", tensors, 16.0, 16), 8, (5120, 13_824))
        assert converted.rank == 8
        assert 0.5 < error < 0.75


@pytest.mark.parametrize("layer", [lokr(), loha(), full(), TestLoraToLora.lora(2)], ids=lambda layer: layer.algorithm)
def test_another_models_weights_are_rejected(layer: Layer) -> None:
    with pytest.raises(ConfigError, match="the layer has 24"):
        to_lora(layer, 2, (24, 20))


@pytest.mark.parametrize("layer", [loha(), full(), TestLoraToLora.lora(2)], ids=lambda layer: layer.algorithm)
def test_what_is_too_large_for_numbers_is_rejected(layer: Layer) -> None:
    tensors = {name: tensor * 1e30 for name, tensor in layer.tensors.items()}
    huge = Layer(layer.algorithm, tensors, 1e300, layer.rank)
    if layer.algorithm == "full_delta":
        huge = Layer("full_delta", {"diff": torch.full((18, 20), torch.inf)}, 1.0, None)
    with pytest.raises(ConfigError, match="beyond the range"):
        to_lora(huge, 2, (18, 20))

"""Which tokens a route keeps, against SimpleTuner's own router; and what its `tread_config` becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gracetune.config.token_routes import Route, TokenRoute
from gracetune.models.token_routing import kept_tokens, put_back, select_tokens
from unit.config import simpletuner_files
from unit.fidelity.recorded import recorded

RECORDED = recorded("simpletuner", "tread")
CHOICES = [one for one in RECORDED if one["case"] == "choice"]
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}


def test_as_many_tokens_are_kept() -> None:
    """Where SimpleTuner would keep none, one is kept: a block needs something to compute."""
    (counts,) = [one for one in RECORDED if one["case"] == "counts"]
    for ratio, kept in counts["kept"].items():
        ours = [Route(0, 0, float(ratio)).kept(tokens) for tokens in counts["tokens"]]
        assert ours == [max(1, number) for number in kept]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: f"{case['seed']}-{case['ratio']}-{case['forced']}")
def test_the_same_tokens_are_kept_for_the_same_random_order_and_put_back_at_their_places(case: dict[str, Any]) -> None:
    noise = np.array(case["noise"])
    forced = np.zeros(noise.shape, dtype=np.bool_)
    for row, tokens in zip(forced, case["forced"], strict=True):
        row[tokens] = True
    ours = kept_tokens(noise.argsort(axis=1), Route(0, 0, case["ratio"]).kept(noise.shape[1]), forced)
    assert ours.tolist() == case["kept"]
    x = torch.arange(noise.size * 2, dtype=torch.float32).view(*noise.shape, 2)
    kept = torch.from_numpy(ours)
    assert put_back(x, kept, -select_tokens(x, kept))[..., 0].tolist() == case["back_first_channel"]


def test_its_qwen_image_stops_where_ours_routes() -> None:
    (found,) = [one for one in RECORDED if one["case"] == "qwen_image positions"]
    assert "must match" in found["error"]


@pytest.mark.parametrize(("family", "flavour"), [("wan", "t2v-480p-1.3b-2.1"), ("flux", "dev"), ("qwen_image", "v1.0")])
@pytest.mark.parametrize("as_text", [False, True])
def test_tread_config_becomes_routes(family: str, flavour: str, as_text: bool, tmp_path: Path) -> None:
    value = '{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}' if as_text else ROUTES
    changes = {"model_family": family, "model_flavour": flavour, "tread_config": value}
    resolved = simpletuner_files.resolve(tmp_path, changes, datasets=simpletuner_files.IMAGES)
    (route,) = resolved.config.training.token_routing.routes
    assert route == TokenRoute(skip_ratio=0.5, first_block=2, last_block=-2)


@pytest.mark.parametrize("value", [None, {}, {"routes": []}])
def test_without_routes_nothing_is_routed(value: Any, tmp_path: Path) -> None:
    resolved = simpletuner_files.resolve(tmp_path, {"tread_config": value})
    assert resolved.config.training.token_routing.routes == ()


@pytest.mark.parametrize(
    ("value", "key", "expected"),
    [
        ({"enable": True}, "tread_config.enable", "a key of tread_config"),
        ({"enable": True}, "tread_config.routes", "a list of routes"),
        ("routes.json", "tread_config", 'a mapping with "routes"'),
        ({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2}]}, "tread_config.routes[0].end_layer_idx",
         "a number"),
        ({"routes": [{**ROUTES["routes"][0], "selection_ratio": 1.0}]}, "tread_config.routes[0].selection_ratio",
         "a number >= 0 and < 1"),
        ({"routes": [{**ROUTES["routes"][0], "ratio": 0.1}]}, "tread_config.routes[0].ratio", "a key of a route"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_as_the_file_names_it(value: Any, key: str, expected: str, tmp_path: Path) -> None:
    problem = simpletuner_files.problems(tmp_path, {"tread_config": value})[key]
    assert expected in problem.expected, problem
    assert problem.hint


def test_a_family_whose_tokens_cannot_skip_blocks_is_rejected_by_name(tmp_path: Path) -> None:
    changes = {"model_family": "sdxl", "model_flavour": "base-1.0", "tread_config": ROUTES}
    problem = simpletuner_files.problems(tmp_path, changes, datasets=simpletuner_files.IMAGES)["tread_config"]
    assert problem.expected == "token routing is for wan, qwen_image, flux: tokens of sdxl cannot skip blocks"
    assert "--allow-unsupported" in problem.hint

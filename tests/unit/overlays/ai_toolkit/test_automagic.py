"""Our Automagic behind ai-toolkit's factory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.adapters.formats.names import locate, split_key
from gracetune.errors import ConfigError
from gracetune.models.registry import KEY_MAPS
from gracetune.optim.automagic import Automagic
from gracetune.optim.named_state import StateMismatchError
from unit.overlays.ai_toolkit.checkouts import Checkout

BLOCK = {"automagic": True}
BOTH = {"automagic": True, "pair_files": True}


def options(**params: Any) -> dict[str, Any]:
    return {"optimizer": "automagic", "lr": 1e-5, "steps": 8, "optimizer_params": params}


def groups(process: Any) -> dict[str, dict[str, Any]]:
    return {group["stage"]: group for group in process.optimizer.param_groups}


class TestStageOptions:
    def test_apply_without_the_unprefixed_one(self, checkout: Checkout) -> None:
        process = checkout.run(BLOCK, train=options(high_noise_lr_bump=3e-6, low_noise_max_lr=5e-4))
        high, low = groups(process)["high_noise"], groups(process)["low_noise"]
        assert (high["lr_bump"], high["max_lr"]) == (3e-6, 1e-3)
        assert (low["lr_bump"], low["max_lr"]) == (1e-6, 5e-4)

    def test_an_experts_own_goes_before_that_of_all(self, checkout: Checkout) -> None:
        process = checkout.run(BLOCK, train=options(min_lr=2e-7, high_noise_min_lr=4e-7))
        assert {stage: group["min_lr"] for stage, group in groups(process).items()} == {
            "high_noise": 4e-7,
            "low_noise": 2e-7,
        }

    def test_change_the_rates_that_training_reaches(self, checkout: Checkout) -> None:
        process = checkout.run(BLOCK, train=options(high_noise_min_lr=9e-6, high_noise_max_lr=9e-6))
        rates = {name: float(mean) for name, mean in process.optimizer.learning_rates().items()}
        assert rates["0:high_noise"] == pytest.approx(9e-6)
        assert rates["1:low_noise"] != pytest.approx(9e-6)
        assert process.optimizer.get_avg_learning_rate() == pytest.approx(sum(rates.values()) / 2)

    def test_trains_exactly_as_our_own_automagic(self, checkout: Checkout) -> None:
        process = checkout.run(BLOCK, train=options(lr_bump=2e-6, weight_decay=0.01))
        network = checkout.module("toolkit.network_mixins").Network(process.sd.layers(), None)
        ours = Automagic([*network.named_parameters()], lr=1e-5, lr_bump=2e-6, weight_decay=0.01)
        process.network, process.optimizer = network, ours
        assert [process._step(step) for step in range(8)] == process.losses

    def test_one_expert_alone_takes_its_own_options(self, checkout: Checkout) -> None:
        process = checkout.run(
            BLOCK,
            model={"arch": "wan22_14b", "model_kwargs": {"train_high_noise": False}},
            train=options(low_noise_lr_bump=7e-6),
        )
        assert {stage: group["lr_bump"] for stage, group in groups(process).items()} == {"low_noise": 7e-6}

    def test_of_an_expert_that_is_not_trained_are_rejected(self, checkout: Checkout) -> None:
        with pytest.raises(ConfigError, match="high_noise is not"):
            checkout.run(
                BLOCK,
                model={"arch": "wan22_14b", "model_kwargs": {"train_high_noise": False}},
                train=options(high_noise_lr_bump=7e-6),
            )


class TestRejections:
    @pytest.mark.parametrize(
        ("params", "text"),
        [
            ({"high_nose_lr_bump": 1e-6}, "write `high_noise_lr_bump`"),
            ({"lr_bump": "fast"}, "a number"),
            ({"lr_bump": True}, "a number"),
            ({"do_paramiter_swapping": True}, "every parameter is trained in every step"),
            ({"min_lr": 1e-2}, "min_lr at most max_lr"),
            ({"high_noise_min_lr": 1e-2}, "high_noise: lr_bump 1e-06, min_lr 0.01"),
            ({"beta2": 1.5}, "values Automagic takes"),
        ],
    )
    def test_name_the_option(self, checkout: Checkout, params: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            checkout.run(BLOCK, train=options(**params))
        assert text in str(caught.value)
        assert "config.process[0].train.optimizer_params" in str(caught.value)

    def test_a_layer_that_tells_no_expert(self, checkout: Checkout) -> None:
        automagic = checkout.ours("automagic")
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        trained = automagic.Trained(("high_noise", "low_noise"), {id(parameter): "transformer.blocks.0.ffn.w"})
        with pytest.raises(ConfigError, match=r"transformer\.blocks\.0\.ffn\.w, which belongs to no expert"):
            automagic.build([parameter], 1e-5, {}, trained, "config.process[0]")


class TestGroups:
    def test_keep_ai_toolkits_own_rates_and_what_no_layer_owns(self, checkout: Checkout) -> None:
        automagic = checkout.ours("automagic")
        layer, embedding = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
        trained = automagic.Trained(("high_noise", "low_noise"), {id(layer): "transformer.transformer_2.blocks.0.a"})
        params = [{"params": [layer], "lr": 3e-5}, {"params": [embedding], "lr": 7e-5}]
        optimizer = automagic.build(params, 1e-5, {"low_noise_lr_bump": 5e-6}, trained, "config.process[0]")
        found = [(group["stage"], group["lr"], group["lr_bump"]) for group in optimizer.param_groups]
        assert found == [("low_noise", 3e-5, 5e-6), ("", 7e-5, 1e-6)]

    def test_a_model_without_experts_has_one_stage(self, checkout: Checkout) -> None:
        automagic = checkout.ours("automagic")
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        trained = automagic.Trained((), {id(parameter): "transformer.blocks.0.a"})
        optimizer = automagic.build([parameter], 1e-5, {}, trained, "config.process[0]")
        assert [group["stage"] for group in optimizer.param_groups] == [""]
        with pytest.raises(ConfigError, match="high_noise is not"):
            automagic.build([parameter], 1e-5, {"high_noise_lr_bump": 1e-6}, trained, "config.process[0]")

    def test_nothing_to_train_is_rejected(self, checkout: Checkout) -> None:
        automagic = checkout.ours("automagic")
        with pytest.raises(ConfigError, match="nothing to train"):
            automagic.build([{"params": []}], 1e-5, {}, automagic.Trained((), {}), "config.process[0]")

    def test_too_high_a_start_becomes_ai_toolkits(self, checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
        process = checkout.run(BLOCK, train={**options(), "lr": 0.5})
        assert {group["lr"] for group in process.optimizer.param_groups} == {1e-6}
        assert "0.5 is too high a start" in capsys.readouterr().err

    @pytest.mark.parametrize("expert", [1, 2])
    @pytest.mark.parametrize(
        "spelling",
        [
            "transformer$$transformer_{}$$blocks$$0$$attn1$$to_q.lora_down.weight",
            "transformer.transformer_{}.blocks.0.attn1.to_q.lokr_w1",
            "diffusion_model.transformer_{}.blocks.0.self_attn.q.lora_A.weight",
            "lycoris_transformer_{}_blocks_0_attn1_to_q.lokr_w1",
            "lora_transformer_transformer_{}_blocks_0_attn1_to_q.lokr_w2_a",
            "transformer{}_blocks_0_attn1_to_q.lokr_w1",
        ],
    )
    def test_the_expert_is_the_one_our_formats_read(self, checkout: Checkout, spelling: str, expert: int) -> None:
        key = spelling.format(expert)
        trained = checkout.ours("automagic").Trained(("high_noise", "low_noise"), {})
        parts = split_key(key)
        assert parts is not None
        located = locate(parts.stem, KEY_MAPS["wan"])
        assert located is not None
        assert trained.stage(key.replace("$$", ".")) == located.expert == ("high_noise", "low_noise")[expert - 1]


class TestState:
    def test_a_resumed_run_goes_on_as_one_that_never_stopped(self, checkout: Checkout) -> None:
        once = {**options(), "steps": 12}  # what the stand-in sees repeats every 12 steps
        whole = checkout.run(BOTH, name="whole", train={**once, "steps": 24})
        checkout.run(BOTH, name="parts", train=once)
        rest = checkout.run(BOTH, name="parts", train=once)
        assert rest.losses == whole.losses[12:]

    def test_survives_accelerate_and_a_safe_load(self, checkout: Checkout, tmp_path: Path) -> None:
        from accelerate import Accelerator

        process = checkout.run(BLOCK, train=options())
        before = process.optimizer.named_state()
        wrapped = Accelerator(cpu=True).prepare(process.optimizer)
        torch.save(wrapped.state_dict(), tmp_path / "optimizer.pt")
        wrapped.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        after = process.optimizer.named_state()
        assert before.json == after.json
        assert all(torch.equal(before.tensors[key], after.tensors[key]) for key in before.tensors)

    def test_ai_toolkits_own_state_is_rejected_and_changes_nothing(self, checkout: Checkout) -> None:
        process = checkout.run(BLOCK, train=options())
        before = process.optimizer.named_state()
        other = torch.optim.AdamW(process.network.parameters()).state_dict()
        with pytest.raises(StateMismatchError, match=r"move optimizer\.pt away"):
            process.optimizer.load_state_dict(other)
        after = process.optimizer.named_state()
        assert all(torch.equal(before.tensors[key], after.tensors[key]) for key in before.tensors)

    def test_of_another_version_is_rejected(self, checkout: Checkout) -> None:
        process = checkout.run(BLOCK, train=options())
        state = process.optimizer.state_dict()
        state["gracetune_automagic"]["version"] = 9
        with pytest.raises(StateMismatchError, match="version 9"):
            process.optimizer.load_state_dict(state)

    def test_other_layers_state_is_rejected(self, checkout: Checkout) -> None:
        both = checkout.run(BLOCK, train=options(), name="both")
        one = checkout.run(
            BLOCK, train=options(), name="one", model={"arch": "wan22_14b", "model_kwargs": {"train_low_noise": False}}
        )
        with pytest.raises(StateMismatchError):
            one.optimizer.load_state_dict(both.optimizer.state_dict())


def test_another_optimizer_of_the_same_run_is_ai_toolkits(checkout: Checkout) -> None:
    job = checkout.job(checkout.process(BLOCK, train=options()))
    built = []

    def builds_a_second() -> None:
        factory = checkout.module("jobs.process.BaseSDTrainProcess").get_optimizer
        built.append(factory([torch.nn.Parameter(torch.zeros(1))], "adamw", learning_rate=1e-3))

    job.process[0].before_loop = builds_a_second
    job.run()
    assert type(built[0]) is torch.optim.AdamW

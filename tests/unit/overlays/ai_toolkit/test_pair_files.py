"""The two experts' files: parted, complete, readable by our own reader, and handed back as ai-toolkit expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.safetensors_file import data_hash
from gracetune.errors import ConfigError
from unit.overlays.ai_toolkit.checkouts import Checkout

BLOCK = {"pair_files": True}
BOTH = ("high_noise", "low_noise")


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        found: dict[str, str] = opened.metadata()
        return found


def report(checkout: Checkout) -> Any:
    return json.loads((checkout.output() / "gracetune_overlay.json").read_text())["features"]["pair_files"]


def lora(prefix: str, *, alpha: float | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(len(prefix))
    found = {f"{prefix}.lora_A.weight": torch.randn(2, 4), f"{prefix}.lora_B.weight": torch.randn(4, 2)}
    return found if alpha is None else found | {f"{prefix}.alpha": torch.tensor(alpha)}


class TestSaving:
    def test_each_expert_has_its_file_with_the_published_names(self, checkout: Checkout) -> None:
        process = checkout.run(BLOCK)
        keys = {f"diffusion_model.blocks.{n}.self_attn.q.lora_{s}.weight" for n in (0, 1) for s in "AB"}
        for number, stage in enumerate(BOTH, 1):
            file = checkout.output() / f"my_job_{stage}.safetensors"
            saved = load_file(file)
            assert saved.keys() == keys
            weight = process.network.state_dict()[
                f"transformer$$transformer_{number}$$blocks$$0$$attn1$$to_q.lora_down.weight"
            ]
            assert torch.equal(saved["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], weight)
            assert open_adapter(file).state().expert == stage
        assert not (checkout.output() / "my_job.safetensors").exists()

    def test_ai_toolkits_header_is_kept_but_for_the_hash_of_both(self, checkout: Checkout) -> None:
        checkout.run(BLOCK)
        headers = [metadata(checkout.output() / f"my_job_{stage}.safetensors") for stage in BOTH]
        for header, stage in zip(headers, BOTH, strict=True):
            assert header["software"] == "stand-in"
            tensors = load_file(checkout.output() / f"my_job_{stage}.safetensors")
            assert header["sshs_model_hash"] == data_hash(tensors)
        assert headers[0]["sshs_model_hash"] != headers[1]["sshs_model_hash"]

    @pytest.mark.parametrize(("trained", "other"), [BOTH, BOTH[::-1]])
    def test_one_expert_alone(self, checkout: Checkout, trained: str, other: str) -> None:
        checkout.run(BLOCK, model={"arch": "wan22_14b", "model_kwargs": {f"train_{other}": False}})
        names = [path.name for path in checkout.output().glob("*.safetensors")]
        assert names == [f"my_job_{trained}.safetensors"]

    def test_a_file_that_is_there_is_replaced(self, checkout: Checkout) -> None:
        checkout.run(BLOCK)
        before = load_file(checkout.output() / "my_job_high_noise.safetensors")
        checkout.run(BLOCK, train={"optimizer": "adamw", "lr": 1e-2, "steps": 3})
        after = load_file(checkout.output() / "my_job_high_noise.safetensors")
        assert any(not torch.equal(before[key], after[key]) for key in before)
        assert not list(checkout.output().glob(".*"))

    def test_one_file_for_both_stays_ai_toolkits_business_and_that_is_said(
        self, checkout: Checkout, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checkout.run(BLOCK, model={"arch": "wan22_14b", "model_kwargs": {"split": False}})
        assert (checkout.output() / "my_job.safetensors").exists()
        assert report(checkout)["left_to_ai_toolkit"] == ["my_job.safetensors"]
        assert "pair_files: my_job.safetensors is left to ai-toolkit" in capsys.readouterr().err

    def test_old_lokr_names_are_parted_too(self, checkout: Checkout, tmp_path: Path) -> None:
        """ai-toolkit looks for `.transformer_1.`, which never matches these; its whole-rank alpha is inf in fp16."""
        tensors = {}
        for expert in (1, 2):
            stem = f"lycoris_transformer_{expert}_blocks_0_attn1_to_q"
            tensors[f"{stem}.lokr_w1"] = torch.full((2, 2), float(expert)).half()
            tensors[f"{stem}.lokr_w2"] = torch.ones(2, 2).half()
            tensors[f"{stem}.alpha"] = torch.tensor(9999999999.0).half()
        checkout.ours("pair_files").write_pair(tensors, tmp_path / "old.safetensors", {}, BOTH)
        for expert, stage in enumerate(BOTH, 1):
            saved = load_file(tmp_path / f"old_{stage}.safetensors")
            assert saved["diffusion_model.blocks.0.self_attn.q.lokr_w1"].unique().tolist() == [expert]
            assert saved["diffusion_model.blocks.0.self_attn.q.alpha"].isfinite()

    def test_what_cannot_be_parted_is_saved_whole_and_said(
        self, checkout: Checkout, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = checkout.job(checkout.process(BLOCK))
        odd = torch.ones(2)
        job.process[0].before_loop = lambda: job.process[0].network.register_buffer("mystery", odd)
        job.run()
        (whole,) = checkout.output().glob("*.safetensors")
        assert whole.name == "my_job_both_experts.safetensors"
        assert torch.equal(load_file(whole)["mystery"], odd)
        assert len(load_file(whole)) == 9
        assert "mystery" in capsys.readouterr().err
        assert report(checkout)["not_parted"] == [whole.name]


class TestLoading:
    def test_gives_back_what_was_saved(self, checkout: Checkout) -> None:
        first = checkout.run(BLOCK)
        state = {key: value.clone() for key, value in first.network.state_dict().items()}
        second = checkout.run(BLOCK, train={"optimizer": "adamw", "lr": 1e-4, "steps": 0})
        assert second.network.state_dict().keys() == state.keys()
        assert all(torch.equal(second.network.state_dict()[key], state[key]) for key in state)

    @pytest.mark.parametrize("given", ["x_high_noise", "x_low_noise"])
    def test_either_name_means_the_pair(self, checkout: Checkout, tmp_path: Path, given: str) -> None:
        for stage in BOTH:
            save_file(lora("diffusion_model.blocks.0.ffn.0"), tmp_path / f"x_{stage}.safetensors")
        found = checkout.ours("pair_files").read_pair(tmp_path / f"{given}.safetensors", BOTH)
        assert found.keys() == {
            f"diffusion_model.transformer_{n}.blocks.0.ffn.0.lora_{s}.weight" for n in (1, 2) for s in "AB"
        }

    @pytest.mark.parametrize(
        "prefix",
        ["transformer.blocks.0.attn1.to_q", "base_model.model.blocks.0.attn1.to_q", "lycoris_blocks_0_attn1_to_q"],
    )
    def test_other_programs_spellings_are_understood(self, checkout: Checkout, tmp_path: Path, prefix: str) -> None:
        tensors = lora(prefix, alpha=2.0)
        save_file(tensors, tmp_path / "x_high_noise.safetensors")
        found = checkout.ours("pair_files").read_pair(tmp_path / "x_high_noise.safetensors", ("high_noise",))
        assert torch.equal(
            found["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], tensors[f"{prefix}.lora_A.weight"]
        )

    def test_another_alpha_goes_into_the_weights_because_ai_toolkit_ignores_it(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        tensors = lora("diffusion_model.blocks.0.ffn.0", alpha=1.0)
        save_file(tensors, tmp_path / "x_low_noise.safetensors")
        found = checkout.ours("pair_files").read_pair(tmp_path / "x_low_noise.safetensors", ("low_noise",))
        stem = "diffusion_model.blocks.0.ffn.0.lora_"
        assert found.keys() == {f"{stem}A.weight", f"{stem}B.weight"}
        assert torch.equal(found[f"{stem}B.weight"], tensors[f"{stem}B.weight"] / 2)

    def test_a_missing_partner_is_rejected(self, checkout: Checkout, tmp_path: Path) -> None:
        save_file(lora("diffusion_model.blocks.0.ffn.0"), tmp_path / "x_high_noise.safetensors")
        with pytest.raises(ConfigError, match=r"no x_low_noise\.safetensors"):
            checkout.ours("pair_files").read_pair(tmp_path / "x_high_noise.safetensors", BOTH)

    def test_a_key_of_no_layer_is_rejected(self, checkout: Checkout, tmp_path: Path) -> None:
        save_file(lora("diffusion_model.blocks.0.ffn.9"), tmp_path / "x_high_noise.safetensors")
        with pytest.raises(ConfigError, match=r"ffn\.9"):
            checkout.ours("pair_files").read_pair(tmp_path / "x_high_noise.safetensors", ("high_noise",))

    def test_a_combined_file_stays_ai_toolkits_business(self, checkout: Checkout, tmp_path: Path) -> None:
        feature = checkout.ours("pair_files").PairFeature(lambda line: None)

        def original(self: Any, file: str) -> str:
            return f"theirs {file}"

        assert feature._load(original, object(), "combined.safetensors") == "theirs combined.safetensors"

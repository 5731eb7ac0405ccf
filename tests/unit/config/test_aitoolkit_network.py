from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unit.config.aitoolkit_jobs import SDXL, job, note, only_problem, read

DDPM = {"noise_scheduler": "ddpm"}


def adapter(folder: Path, keys: dict[str, Any], **sections: Any) -> Any:
    document = job(**sections)
    document["config"]["process"][0]["network"] = keys
    return read(folder, document)


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("lora", "lora"), ("LoRA", "lora"), ("locon", "locon"), ("lycoris", "locon"), ("dora", "dora"), ("loha", "lora")],
)
def test_kinds_of_adapter(tmp_path: Path, kind: str, ours: str) -> None:
    assert adapter(tmp_path, {"type": kind, "linear": 8}).config.adapter.kind == ours


def test_loha_is_a_plain_lora_and_says_so(tmp_path: Path) -> None:
    assert "a plain LoRA" in note(adapter(tmp_path, {"type": "loha", "linear": 8}), "LoHa")


def test_locon_where_ai_toolkit_does_less_says_so(tmp_path: Path) -> None:
    locon = {"type": "locon", "linear": 8}
    assert "linear layers of the blocks" in note(adapter(tmp_path, locon), "network.type")
    chosen = {**locon, "network_kwargs": {"only_if_contains": ["attn1"]}}
    assert "ignores it" in note(adapter(tmp_path, chosen, model=SDXL, train=DDPM), "network_kwargs")
    plain = adapter(tmp_path, locon, model=SDXL, train=DDPM).notes
    assert not [one for one in plain if "LoCon" in one]


@pytest.mark.parametrize(
    ("keys", "within"),
    [
        ({"type": "lora"}, ("attentions",)),
        ({"type": "lora", "network_kwargs": {"only_if_contains": ["attn"]}}, ("attentions",)),
        ({"type": "lora", "conv": 4}, ("attentions", "resnets", "downsamplers", "upsamplers")),
        ({"type": "lokr"}, ("attentions", "resnets", "downsamplers", "upsamplers")),
        ({"type": "lokr", "lokr_full_rank": False}, ("attentions",)),
        ({"type": "locon"}, ("attentions", "resnets", "downsamplers", "upsamplers")),
    ],
)
def test_layers_inside_some_modules_are_adapted(tmp_path: Path, keys: dict[str, Any], within: tuple[str, ...]) -> None:
    found = adapter(tmp_path, {"linear": 8, **keys}, model=SDXL, train=DDPM)
    assert found.config.adapter.within == within
    # Wan's own choice of layers is every linear layer of its blocks.
    assert adapter(tmp_path, {"linear": 8}).config.adapter.within == ()
    words = {"linear": 8, "network_kwargs": {"only_if_contains": ["attn"]}}
    assert adapter(tmp_path, words).config.adapter.within == ("blocks",)


def test_kinds_we_lack_are_rejected_and_unknown_ones_corrected(tmp_path: Path) -> None:
    assert only_problem(tmp_path, network={"type": "lorm"}).key == "config.process[0].network.type"
    assert only_problem(tmp_path, network={"type": "lokrr"}).hint == "write `type: lokr`"


@pytest.mark.parametrize(
    ("keys", "rank"),
    [({}, 4), ({"linear": 8}, 8), ({"rank": 12}, 12), ({"rank": 12, "linear": 8}, 12), ({"linear": "8"}, 8)],
)
def test_the_rank_has_two_names_and_a_small_default(tmp_path: Path, keys: dict[str, Any], rank: int) -> None:
    assert adapter(tmp_path, keys).config.adapter.rank == rank


def test_alpha_is_forced_to_the_rank_on_transformers_and_said_once(tmp_path: Path) -> None:
    resolved = adapter(tmp_path, {"linear": 32, "linear_alpha": 16})
    assert resolved.config.adapter.alpha is None
    assert "32" in note(resolved, "linear_alpha")


@pytest.mark.parametrize("keys", [{"linear": 32, "linear_alpha": 32}, {"linear": 32}])
def test_nothing_is_said_where_alpha_equals_the_rank(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert not [text for text in adapter(tmp_path, keys).notes if "alpha" in text]


@pytest.mark.parametrize(
    ("keys", "alpha"),
    [({"linear": 8, "linear_alpha": 4}, 4), ({"linear": 8, "alpha": 2}, 2), ({"linear": 8}, 1.0)],
)
def test_alpha_counts_on_sdxl(tmp_path: Path, keys: dict[str, Any], alpha: float) -> None:
    assert adapter(tmp_path, keys, model=SDXL, train=DDPM).config.adapter.alpha == alpha


def test_convolutions_are_adapted_where_there_are_any(tmp_path: Path) -> None:
    keys = {"linear": 8, "conv": 4}
    found = adapter(tmp_path, keys, model=SDXL, train=DDPM).config.adapter
    assert (found.conv_rank, found.conv_alpha) == (4, 4)
    found = adapter(tmp_path, {**keys, "conv_alpha": 2}, model=SDXL, train=DDPM).config.adapter
    assert (found.conv_rank, found.conv_alpha) == (4, 2)
    on_wan = adapter(tmp_path, keys)
    assert on_wan.config.adapter.conv_rank is None
    assert "no convolutions" in note(on_wan, "network.conv")


def test_lokr_is_full_rank_unless_told_otherwise_and_says_so(tmp_path: Path) -> None:
    quiet = adapter(tmp_path, {"type": "lokr", "linear": 8, "linear_alpha": 4, "lokr_factor": 16})
    assert (quiet.config.adapter.full_rank, quiet.config.adapter.factor, quiet.config.adapter.alpha) == (True, 16, None)
    assert "full rank" in note(quiet, "lokr_full_rank")
    message = adapter(tmp_path, {"type": "lokr", "lokr_full_rank": True})
    assert message.config.adapter.full_rank is True
    assert not [text for text in message.notes if "lokr" in text]
    small = adapter(tmp_path, {"type": "lokr", "lokr_full_rank": False, "linear": 8})
    assert (small.config.adapter.full_rank, small.config.adapter.rank) == (False, 8)


def test_lokr_keys_mean_nothing_to_a_lora(tmp_path: Path) -> None:
    found = adapter(tmp_path, {"type": "lora", "linear": 8, "lokr_full_rank": True, "lokr_factor": 4}).config.adapter
    assert (found.full_rank, found.factor) == (False, -1)


def test_the_old_lokr_format_is_a_file_format(tmp_path: Path) -> None:
    assert adapter(tmp_path, {"type": "lokr", "old_lokr_format": True}).config.checkpoints.format == "lycoris"
    assert adapter(tmp_path, {"type": "lokr"}).config.checkpoints.format == "comfyui"


def test_words_choose_layers(tmp_path: Path) -> None:
    kwargs = {
        "only_if_contains": ["transformer.single_transformer_blocks.7.proj_out", "attn$$to_q"],
        "ignore_if_contains": "ff_i.gate",
    }
    found = adapter(tmp_path, {"linear": 8, "network_kwargs": kwargs}).config.adapter
    assert found.targets == ("single_transformer_blocks.7.proj_out*", "*attn.to_q*")
    assert found.exclude == ("*ff_i.gate*",)


def test_empty_lists_choose_nothing(tmp_path: Path) -> None:
    kwargs = {"only_if_contains": None, "ignore_if_contains": [], "full_if_contains": []}
    found = adapter(tmp_path, {"linear": 8, "network_kwargs": kwargs}).config.adapter
    assert (found.targets, found.exclude) == ((), ())


def test_dropout_and_a_start(tmp_path: Path) -> None:
    found = adapter(tmp_path, {"linear": 8, "dropout": 0.1, "pretrained_lora_path": "/a.safetensors"}).config.adapter
    assert (found.dropout, found.init_from) == (0.1, "/a.safetensors")


@pytest.mark.parametrize(
    "keys",
    [
        {"transformer_only": False},
        {"split_multistage_loras": False},
        {"all_layers": True},
        {"alpha_schedule": {"enabled": True}},
        {"lorm": {"do_conv": True}},
    ],
)
def test_what_changes_the_adapter_is_rejected_by_name(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert only_problem(tmp_path, network=keys).key == f"config.process[0].network.{next(iter(keys))}"


def test_kwargs_we_lack_are_rejected(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, network={"network_kwargs": {"full_if_contains": ["norm"]}})
    assert problem.key == "config.process[0].network.network_kwargs.full_if_contains"


def test_a_switched_off_schedule_asks_for_nothing(tmp_path: Path) -> None:
    assert adapter(tmp_path, {"linear": 8, "alpha_schedule": {"enabled": False}}).config.adapter.rank == 8


def test_no_network_is_a_full_fine_tune_and_says_so(tmp_path: Path) -> None:
    resolved = read(tmp_path, network=None, save={"save_format": "diffusers"})
    assert resolved.config.adapter.kind == "full_finetune"
    assert resolved.config.checkpoints.format == "diffusers"
    assert "fine-tuned" in note(resolved, "no `network`")

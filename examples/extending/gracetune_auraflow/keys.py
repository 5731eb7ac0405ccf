"""What AuraFlow's layers are called in the weights as they were first published, and so in ComfyUI."""

from __future__ import annotations

from collections.abc import Iterator

from gracetune.extension import KeyMap, KeyMapRule
from gracetune_auraflow import FAMILY

_ATTENTION = (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
_CONTEXT = (("add_q_proj", "q"), ("add_k_proj", "k"), ("add_v_proj", "v"), ("to_add_out", "o"))
_FEED_FORWARD = (("linear_1", "c_fc1"), ("linear_2", "c_fc2"), ("out_projection", "c_proj"))


def _joint() -> Iterator[KeyMapRule]:
    ours, theirs = "joint_transformer_blocks.{}", "double_layers.{}"
    for stream, number, names in (("norm1_context", 1, _CONTEXT), ("norm1", 2, _ATTENTION)):
        yield KeyMapRule(f"{ours}.{stream}.linear", f"{theirs}.{'modX' if number == 2 else 'modC'}.1")
        for name, letter in names:
            yield KeyMapRule(f"{ours}.attn.{name}", f"{theirs}.attn.w{number}{letter}")
    for stream, part in (("ff", "mlpX"), ("ff_context", "mlpC")):
        for name, original in _FEED_FORWARD:
            yield KeyMapRule(f"{ours}.{stream}.{name}", f"{theirs}.{part}.{original}")


def _single() -> Iterator[KeyMapRule]:
    ours, theirs = "single_transformer_blocks.{}", "single_layers.{}"
    yield KeyMapRule(f"{ours}.norm1.linear", f"{theirs}.modCX.1")
    for name, letter in _ATTENTION:
        yield KeyMapRule(f"{ours}.attn.{name}", f"{theirs}.attn.w1{letter}")
    for name, original in _FEED_FORWARD:
        yield KeyMapRule(f"{ours}.ff.{name}", f"{theirs}.mlp.{original}")


KEYS = KeyMap(
    family=FAMILY,
    component="transformer",
    rules=(
        KeyMapRule("pos_embed.proj", "init_x_linear"),
        KeyMapRule("context_embedder", "cond_seq_linear"),
        KeyMapRule("time_step_proj.linear_1", "t_embedder.mlp.0"),
        KeyMapRule("time_step_proj.linear_2", "t_embedder.mlp.2"),
        *_joint(),
        *_single(),
        KeyMapRule("norm_out.linear", "modF.1", halves_swapped=True),
        KeyMapRule("proj_out", "final_linear"),
    ),
    depths=(("joint_transformer_blocks", 4), ("single_transformer_blocks", 32)),
)

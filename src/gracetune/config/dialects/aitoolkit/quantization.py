"""Reads ai-toolkit's `quantize` keys for the base weights and the text encoders."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.aitoolkit.keys import HARMLESS
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.quantization import hold_in_few_bits
from gracetune.config.dialects.values import names
from gracetune.config.draft import UnquotedText, describe
from gracetune.config.spelling import misspelt

FEW_BITS = names("""
    int8 qint8 qint4 qint2 uint8 uint7 uint6 uint5 uint4 uint3 uint2 orbit2 orbit3 orbit4 orbitvq2 orbitvq3 orbitvq4
    convrot4 convrot8 convrotbitnet convrotcomfyw4a4 convrotint2 convrotint3 convrotint4 convrotint5 convrotint6
    convrotint7 convrotint8 nvfp4
""")
"""ai-toolkit's types of at most 8 bits, except the float8 types."""


def holds_few_bits(block: PeerBlock, *, adapter: bool) -> bool:
    """Whether `quantize` decides the precision of the base weights, instead of the training dtype."""
    kind, _ = _type_of(block)
    return adapter and block.get("quantize") is True and (_is_float8(kind) or _is_few_bits(kind))


def read_base(block: PeerBlock, *, adapter: bool) -> None:
    if not block.flag("quantize", False):
        _list_idle(block, "quantize", "qtype", "quantize_kwargs", "accuracy_recovery_adapter")
        return
    kind, recovery = _type_of(block)
    if not _is_float8(kind) and not _is_few_bits(kind):
        hint = misspelt(kind, [*FEW_BITS, "qfloat8", "float8"], "write `qtype: qfloat8`", write="qtype: {}")
        block.problem("qtype", "one of ai-toolkit's quantised types", hint, found=UnquotedText(describe(kind)))
        return
    if not adapter:
        expected = "false: a full fine-tune trains the weights themselves"
        block.problem("quantize", expected, "write `quantize: false`, or add a `network` to train an adapter")
        return
    if block.get("quantize_kwargs"):
        block.reject("quantize_kwargs", "nothing: fp8 and int8 hold all of the base's large matrices")
    if not _is_float8(kind):
        rest = "" if recovery is None else f"; so {recovery}, which makes up for what {kind} loses, is not loaded"
        hold_in_few_bits(block, "quantize", str(kind), rest)
        return
    block.assign(("model", "base_precision"), "fp8", "quantize")
    rest = "" if recovery is None else f"; the accuracy recovery adapter {recovery} is not loaded"
    block.note(
        f"{block.key('quantize')}: base weights are held in fp8 by gracetune itself, not by {_library(kind)}; they "
        f"round a little differently{rest}"
    )


def read_text_encoder(block: PeerBlock, name: str) -> None:
    """Note that text encoders are not quantised. They run once, before training, so fewer bits would gain nothing.

    `name` is the key with the text encoder's type. If `quantize_te` is unset, upstream follows `quantize`.
    """
    switch = "quantize" if block.get("quantize_te") is None else "quantize_te"
    if not block.flag(switch, False):
        _list_idle(block, "quantize_te", "qtype_te")
        return
    kind = block.get(name)
    requested = "" if kind is None else f", {describe(kind)}"
    block.note(f"{block.key(switch)}: the text encoder is used in the training dtype, which is more exact than "
               f"asked{requested}")  # fmt: skip


def _type_of(block: PeerBlock) -> tuple[Any, Any]:
    """Return the type and the accuracy recovery adapter, which follows the type after a `|` or has its own key."""
    kind, recovery = block.get("qtype"), block.get("accuracy_recovery_adapter")
    if isinstance(kind, str) and "|" in kind:
        kind, _, recovery = kind.partition("|")
    return kind, recovery


def _list_idle(block: PeerBlock, *names: str) -> None:
    block.list_unused(HARMLESS, *(name for name in names if block.get(name)))


def _is_float8(kind: Any) -> bool:
    """Whether a type is float8, as upstream's default `qfloat8`. quanto's names begin with a q, torchao's do not."""
    return kind is None or (isinstance(kind, str) and kind.lower().removeprefix("q").split("_")[0] == "float8")


def _is_few_bits(kind: Any) -> bool:
    return isinstance(kind, str) and kind in FEW_BITS


def _library(kind: Any) -> str:
    return "torchao" if isinstance(kind, str) and not kind.lower().startswith("q") else "quanto"

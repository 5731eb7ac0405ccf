"""ai-toolkit's `quantize`: what it asks of the base weights and of the text encoders, and what of that we do."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.aitoolkit.sections import HARMLESS
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.draft import Said, describe

_BASES = "false, or a float8 qtype: base weights are held in the training dtype or in fp8"
_ENCODERS = "false, or a float8 qtype: text encoders are used in the training dtype"


def holds_fp8(block: PeerBlock, *, adapter: bool) -> bool:
    """Whether the base is held in fp8: upstream's float8 types say so. Others would be another model to train on."""
    return adapter and block.get("quantize") is True and _is_float8(block.get("qtype"))


def read_base(block: PeerBlock, *, adapter: bool) -> None:
    if not block.flag("quantize", False):
        _list_idle(block, "quantize", "qtype", "quantize_kwargs")
        return
    kind = block.get("qtype")
    if not _is_float8(kind):
        hint = "write `quantize: false`, or `qtype: qfloat8`; or train without it: --allow-unsupported"
        block.refuse("quantize", _BASES, hint, found=Said(f"true, with qtype {describe(kind)}"))
        return
    if not adapter:
        expected = "false: a full fine-tune trains the weights themselves"
        block.problem("quantize", expected, "write `quantize: false`, or add a `network` to train an adapter")
        return
    if block.get("quantize_kwargs"):
        block.refuse("quantize_kwargs", "nothing: fp8 holds all of the base's large matrices")
    block.assign(("model", "base_precision"), "fp8", "quantize")
    block.note(
        f"{block.key('quantize')}: base weights are held in fp8 by gracetune itself, not by {_library(kind)}; they "
        "round a little differently"
    )


def read_text_encoder(block: PeerBlock, name: str) -> None:
    """Text encoders run once, before training, so fewer bits would gain nothing. Unset, `quantize` decides upstream.

    `name` is the key that says how.
    """
    follows = block.get("quantize_te") is None
    switch = "quantize" if follows else "quantize_te"
    if not block.flag(switch, False):
        _list_idle(block, "quantize_te", "qtype_te")
    elif _is_float8(block.get(name)):
        block.note(f"{block.key(switch)}: the text encoder is used in the training dtype, which is more exact than "
                   "asked")  # fmt: skip
    elif not follows:
        hint = f"write `quantize_te: false`, or `{name}: qfloat8`; or train without it: --allow-unsupported"
        found = Said(f"true, with {name} {describe(block.get(name))}")
        block.refuse("quantize_te", _ENCODERS, hint, found=found)


def _list_idle(block: PeerBlock, *names: str) -> None:
    block.list_unused(HARMLESS, *(name for name in names if block.get(name)))


def _is_float8(kind: Any) -> bool:
    """`qfloat8` is upstream's default; quanto's names begin with a q, torchao's do not."""
    return kind is None or (isinstance(kind, str) and kind.lower().removeprefix("q").split("_")[0] == "float8")


def _library(kind: Any) -> str:
    return "torchao" if isinstance(kind, str) and not kind.lower().startswith("q") else "quanto"

"""ai-toolkit's `quantize`: what it asks of the base weights and of the text encoders, and what of that we do."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.aitoolkit.keys import Block, Reading
from gracetune.config.draft import Said, describe

_BASES = "false, or a float8 qtype: base weights are held in the training dtype or in fp8"
_ENCODERS = "false, or a float8 qtype: text encoders are used in the training dtype"


def read_base(reading: Reading, block: Block, *, adapter: bool) -> bool:
    """Whether the base is held in fp8: upstream's float8 types say so. Others would be another model to train on."""
    if not block.flag(reading, "quantize", False):
        _idle(reading, block, ("quantize", "qtype", "quantize_kwargs"))
        return False
    kind, key = block.get("qtype"), block.key("quantize")
    if not _is_float8(kind):
        hint = "write `quantize: false`, or `qtype: qfloat8`; or train without it: --allow-unsupported"
        reading.draft.refuse(key, Said(f"true, with qtype {describe(kind)}"), _BASES, hint)
        return False
    if not adapter:
        expected = "false: a full fine-tune trains the weights themselves"
        reading.draft.problem(key, True, expected, "write `quantize: false`, or add a `network` to train an adapter")
        return False
    if block.get("quantize_kwargs"):
        why = "nothing: fp8 holds all of the base's large matrices"
        reading.draft.refuse(block.key("quantize_kwargs"), block.get("quantize_kwargs"), why)
    reading.put(("model", "base_precision"), "fp8", key)
    reading.draft.note(
        f"{key}: base weights are held in fp8 by gracetune itself, not by {_library(kind)}; they round a little "
        "differently"
    )
    return True


def read_text_encoder(reading: Reading, block: Block, name: str) -> None:
    """Text encoders run once, before training, so fewer bits would gain nothing. Unset, `quantize` decides upstream.

    `name` is the key that says how.
    """
    follows = block.get("quantize_te") is None
    on = block.flag(reading, "quantize" if follows else "quantize_te", False)
    if not on:
        _idle(reading, block, ("quantize_te", "qtype_te"))
    elif _is_float8(block.get(name)):
        key = block.key("quantize" if follows else "quantize_te")
        reading.draft.note(f"{key}: the text encoder is used in the training dtype, which is more exact than asked")
    elif not follows:
        hint = f"write `quantize_te: false`, or `{name}: qfloat8`; or train without it: --allow-unsupported"
        found = Said(f"true, with {name} {describe(block.get(name))}")
        reading.draft.refuse(block.key("quantize_te"), found, _ENCODERS, hint)


def _idle(reading: Reading, block: Block, names: tuple[str, ...]) -> None:
    reading.harmless += [block.key(name) for name in names if block.get(name)]


def _is_float8(kind: Any) -> bool:
    """`qfloat8` is upstream's default; quanto's names begin with a q, torchao's do not."""
    return kind is None or (isinstance(kind, str) and kind.lower().removeprefix("q").split("_")[0] == "float8")


def _library(kind: Any) -> str:
    return "torchao" if isinstance(kind, str) and not kind.lower().startswith("q") else "quanto"

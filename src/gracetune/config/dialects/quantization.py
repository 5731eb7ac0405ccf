"""Handles base weights that a peer's file quantises to a type that gracetune does not support."""

from __future__ import annotations

from gracetune.config.dialects.peer_file import PeerBlock

PLAN_DECIDES = (
    "decided by the memory plan when the run starts: base weights are held in 16 bits where these fit, else in int8"
)


def hold_in_few_bits(block: PeerBlock, name: str, requested: str, rest: str = "") -> None:
    """Set `model.base_precision` to `auto` and add a note. `requested` is the type that the file names.

    The result is at least as precise as requested, so nothing has to compensate for lost precision.
    """
    block.assign(("model", "base_precision"), "auto", name)
    block.note(f"{block.key(name)}: {requested} is requested; {PLAN_DECIDES}, at least as exact as requested{rest}")

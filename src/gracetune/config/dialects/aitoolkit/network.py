"""The `network` block: the adapter, with the two surprises ai-toolkit has in store said out loud."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.aitoolkit.keys import (
    Block,
    Known,
    Put,
    Reading,
    Refused,
    Table,
    block_of,
    check,
    number,
    put_rows,
    refused_unless,
)
from gracetune.config.dialects.aitoolkit.model import Target
from gracetune.config.spelling import misspelt

KINDS = {"lora": "lora", "locon": "locon", "lycoris": "locon", "lokr": "lokr", "loha": "loha", "dora": "dora"}
OTHER_KINDS = ("lorm", "fullrank")
UPSTREAM_RANK = 4
_CONV = {"conv": "conv_rank", "conv_alpha": "conv_alpha"}

_NETWORK_SWITCHES = ("type", "linear", "rank", "alpha", "linear_alpha", "conv", "conv_alpha", "network_kwargs",
                     "lokr_full_rank", "lokr_factor", "old_lokr_format", "alpha_schedule")  # fmt: skip
NETWORK: Table = {
    **dict.fromkeys(_NETWORK_SWITCHES, Known.BY_HAND),
    "dropout": Put(("adapter", "dropout"), number),
    "pretrained_lora_path": Put(("adapter", "init_from")),
    "transformer_only": refused_unless(True, "true: only the layers inside the transformer's blocks are adapted"),
    "split_multistage_loras": refused_unless(True, "true: each expert's adapter is a file of its own"),
    "all_layers": refused_unless(False, "false: norms and embeddings are not adapted here"),
    "normalize": refused_unless(False, "false: not done here"),
    "lorm": refused_unless(None, "nothing: LoRM is not done here"),
    "layer_offloading": Known.HARMLESS,
}
NETWORK_KWARGS: Table = {
    "ignore_if_contains": Known.BY_HAND,
    "only_if_contains": Known.BY_HAND,
    **dict.fromkeys(
        ("full_if_contains", "rank_dropout", "module_dropout", "parameter_threshold", "attn_only", "full_train_in_out",
         "target_lin_modules", "target_conv_modules", "block_dims", "block_alphas", "conv_block_dims",
         "conv_block_alphas", "modules_dim", "modules_alpha", "peft_format", "use_bias"),
        Refused("nothing: only ignore_if_contains and only_if_contains choose layers here", (None, False, 0, [], {})),
    ),
    "varbose": Known.HARMLESS,
}  # fmt: skip


def read_network(reading: Reading, value: Any, prefix: str, target: Target) -> None:
    if value is None:
        reading.default(("adapter", "kind"), "full_finetune")
        reading.draft.note("no `network`: the whole model is fine-tuned, as in ai-toolkit; add one to train an adapter")
        return
    block = block_of(reading, value, prefix)
    check(reading, block, NETWORK)
    put_rows(reading, block, NETWORK)
    kind = _kind(reading, block)
    rank = _rank(reading, block)
    full_rank = kind == "lokr" and _lokr(reading, block)
    if full_rank:
        reading.put(("adapter", "full_rank"), True, block.key("lokr_full_rank"))
    else:
        _alpha(reading, block, target, kind, rank)
    _conv(reading, block, target)
    if full_rank and not target.transformer:
        reading.default(("adapter", "conv_rank"), rank)  # at full rank upstream adapts the convolutions too
    _layers(reading, block)
    _schedule(reading, block)


def _kind(reading: Reading, block: Block) -> str:
    name = block.get("type")
    if name is None:
        return "lora"
    key = block.key("type")
    kind = KINDS.get(name.lower()) if isinstance(name, str) else None
    if kind is not None:
        reading.put(("adapter", "kind"), kind, key)
        return kind
    if isinstance(name, str) and name.lower() in OTHER_KINDS:
        reading.draft.refuse(key, name, f"one of {', '.join(KINDS)}", "without it a plain LoRA is trained")
    else:
        hint = misspelt(name, KINDS, "choose one of them", write="type: {}")
        reading.draft.problem(key, name, f"one of {', '.join(KINDS)}", hint)
    return "lora"


def _rank(reading: Reading, block: Block) -> Any:
    """`rank` is the older name and wins upstream."""
    for name in ("rank", "linear"):
        if block.get(name) is not None:
            rank = number(block.get(name))
            reading.put(("adapter", "rank"), rank, block.key(name))
            return rank
    reading.default(("adapter", "rank"), UPSTREAM_RANK)
    return UPSTREAM_RANK


def _lokr(reading: Reading, block: Block) -> bool:
    """Whether both of LoKr's factors stay whole. Upstream does so unless told otherwise."""
    if block.get("lokr_factor") is not None:
        reading.put(("adapter", "factor"), number(block.get("lokr_factor")), block.key("lokr_factor"))
    if block.flag(reading, "old_lokr_format", False):
        reading.put(("checkpoints", "format"), "lycoris", block.key("old_lokr_format"))
    full_rank = block.flag(reading, "lokr_full_rank", True)
    if full_rank and block.get("lokr_full_rank") is None:
        reading.draft.note(
            f"{block.key('lokr_full_rank')} is not set: LoKr trains at full rank, as in ai-toolkit, and `linear` "
            "has no effect; write `lokr_full_rank: false` to decompose to the rank"
        )
    return full_rank


def _alpha(reading: Reading, block: Block, target: Target, kind: str, rank: Any) -> None:
    name = next((name for name in ("linear_alpha", "alpha") if block.get(name) is not None), None)
    value = number(block.get(name)) if name else 1.0
    forced = target.transformer and kind != "locon"  # upstream's LyCORIS network keeps the alpha it is given
    if not forced:
        path = ("adapter", "alpha")
        reading.put(path, value, block.key(name)) if name else reading.default(path, value)
        return
    # Unset means equal to the rank in a `RunConfig`.
    if name is not None and value != rank:
        reading.draft.note(
            f"{block.key(name)}: {value} is not used: on transformer models ai-toolkit sets alpha to the rank "
            f"({rank}), and so do we; to weaken the adapter lower train.lr instead"
        )


def _conv(reading: Reading, block: Block, target: Target) -> None:
    """`conv` adapts the convolutions beside the linear layers, where a model has any."""
    given = {name: field for name, field in _CONV.items() if block.get(name) is not None}
    if target.transformer:
        if given:
            keys = ", ".join(block.key(name) for name in given)
            reading.draft.note(f"{keys}: no effect, because this model's blocks have no convolutions; remove it")
        return
    for name, field in given.items():
        reading.put(("adapter", field), number(block.get(name)), block.key(name))
    if block.get("conv") is not None and block.get("conv_alpha") is None:
        reading.default(("adapter", "conv_alpha"), number(block.get("conv")))


def _layers(reading: Reading, block: Block) -> None:
    """Upstream's words are parts of a module's path; ours are patterns over the path inside the denoiser."""
    kwargs = block_of(reading, block.get("network_kwargs"), block.key("network_kwargs"))
    check(reading, kwargs, NETWORK_KWARGS)
    for name, field in (("ignore_if_contains", "exclude"), ("only_if_contains", "targets")):
        words = kwargs.get(name)
        words = [words] if isinstance(words, str) else words
        if isinstance(words, list):
            words = [_pattern(word) if isinstance(word, str) else word for word in words]
        if words:
            reading.put(("adapter", field), words, kwargs.key(name))


def _pattern(word: str) -> str:
    inside = word.replace("$$", ".").removeprefix("transformer.")
    return f"*{inside}*" if inside.strip() else word


def _schedule(reading: Reading, block: Block) -> None:
    schedule = block.get("alpha_schedule")
    if (isinstance(schedule, dict) and schedule.get("enabled") is False) or schedule is None:
        return
    reading.draft.refuse(block.key("alpha_schedule"), schedule, "nothing: alpha stays what it is during a run")

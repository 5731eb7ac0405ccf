"""Reads the `network` block: the adapter. Notes name two surprises of ai-toolkit: forced alpha and full-rank LoKr."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.keys import HARMLESS, section
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import IsFalse, Key, KeyRule, OneOf, apply, check, noted, rejected
from gracetune.config.dialects.values import as_number
from gracetune.config.registry import FULL_FINETUNE
from gracetune.config.spelling import misspelt

KINDS = {"lora": "lora", "locon": "locon", "lycoris": "locon", "lokr": "lokr", "loha": "lora", "dora": "dora"}
OTHER_KINDS = ("lorm", "fullrank")
UPSTREAM_RANK = 4
_CONV = {"conv": "conv_rank", "conv_alpha": "conv_alpha"}


def read_network(process: PeerBlock, job: AiToolkitJob) -> None:
    if process.get("network") is None:
        process.default(("adapter", "kind"), FULL_FINETUNE)
        process.note("no `network`: the whole model is fine-tuned, as in ai-toolkit; add one to train an adapter")
        return
    block = process.inner("network")
    check(block, NETWORK)
    apply(block, NETWORK, job)


def _kind_of(block: PeerBlock) -> str:
    name = block.get("type")
    return KINDS.get(name.lower(), "lora") if isinstance(name, str) else "lora"


def _kind(block: PeerBlock, job: AiToolkitJob) -> None:
    name = block.get("type")
    if name is None:
        return
    if isinstance(name, str) and name.lower() in KINDS:
        block.assign(("adapter", "kind"), KINDS[name.lower()], "type")
        if name.lower() == "loha":
            block.note(f"{block.key('type')}: ai-toolkit has no LoHa and trains a plain LoRA, and so do we")
    elif isinstance(name, str) and name.lower() in OTHER_KINDS:
        block.reject("type", f"one of {', '.join(KINDS)}", "without it a plain LoRA is trained")
    else:
        hint = misspelt(name, KINDS, "choose one of them", write="type: {}")
        block.problem("type", f"one of {', '.join(KINDS)}", hint)


def _rank_of(block: PeerBlock) -> tuple[Any, str | None]:
    """Return the rank and its key. Upstream prefers `rank`, the older name."""
    name = next((name for name in ("rank", "linear") if block.get(name) is not None), None)
    return (as_number(block.get(name)), name) if name else (UPSTREAM_RANK, None)


def _rank(block: PeerBlock, job: AiToolkitJob) -> None:
    rank, name = _rank_of(block)
    if name is not None:
        block.assign(("adapter", "rank"), rank, name)
    else:
        block.default(("adapter", "rank"), rank)


def _lokr(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read LoKr's keys. Upstream keeps both factors whole unless `lokr_full_rank` is false."""
    if _kind_of(block) != "lokr":
        return
    block.put("lokr_factor", ("adapter", "factor"), as_number)
    if block.flag("old_lokr_format", False):
        block.assign(("checkpoints", "format"), "lycoris", "old_lokr_format")
    full_rank = block.flag("lokr_full_rank", True)
    if full_rank and block.get("lokr_full_rank") is None:
        block.note(
            f"{block.key('lokr_full_rank')} is not set: LoKr trains at full rank, as in ai-toolkit, and `linear` "
            "has no effect; write `lokr_full_rank: false` to decompose to the rank"
        )
    if full_rank:
        block.assign(("adapter", "full_rank"), True, "lokr_full_rank")


def _is_full_rank(block: PeerBlock) -> bool:
    return _kind_of(block) == "lokr" and block.get("lokr_full_rank") is not False


def _alpha(block: PeerBlock, job: AiToolkitJob) -> None:
    if _is_full_rank(block):
        return
    name = next((name for name in ("linear_alpha", "alpha") if block.get(name) is not None), None)
    value = as_number(block.get(name)) if name else 1.0
    # Upstream's LyCORIS network, which LoCon uses, is the only one that keeps the given alpha on transformers.
    forced = job.target.is_transformer and _kind_of(block) != "locon"
    rank, _ = _rank_of(block)
    if not forced and name is not None:
        block.assign(("adapter", "alpha"), value, name)
    elif not forced:
        block.default(("adapter", "alpha"), value)
    elif name is not None and value != rank:  # unset means equal to the rank in a `RunConfig`
        block.note(
            f"{block.key(name)}: {value} is not used: on transformer models ai-toolkit sets alpha to the rank "
            f"({rank}), and so do we; to weaken the adapter lower train.lr instead"
        )


def _conv(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read `conv`, which adapts convolutions in addition to linear layers, if the model has any."""
    given = {name: field for name, field in _CONV.items() if block.get(name) is not None}
    if job.target.is_transformer:
        if given:
            keys = ", ".join(block.key(name) for name in given)
            block.note(f"{keys}: no effect, because this model's blocks have no convolutions; remove it")
        return
    for name, field in given.items():
        block.put(name, ("adapter", field), as_number)
    if block.get("conv") is not None and block.get("conv_alpha") is None:
        block.default(("adapter", "conv_alpha"), as_number(block.get("conv")))
    if _is_full_rank(block):
        block.default(("adapter", "conv_rank"), _rank_of(block)[0])  # at full rank upstream adapts these too


def _kwargs(block: PeerBlock, job: AiToolkitJob) -> None:
    kwargs = block.inner("network_kwargs")
    check(kwargs, NETWORK_KWARGS)
    apply(kwargs, NETWORK_KWARGS, job)


def _layers(kwargs: PeerBlock, job: AiToolkitJob) -> None:
    """Convert upstream's words, which a module's path has to contain, to patterns for paths inside the denoiser."""
    for name, field in (("ignore_if_contains", "exclude"), ("only_if_contains", "targets")):
        words = kwargs.get(name)
        words = [words] if isinstance(words, str) else words
        if isinstance(words, list):
            words = [_pattern(word) if isinstance(word, str) else word for word in words]
        if words:
            kwargs.assign(("adapter", field), words, name)


def _blocks(block: PeerBlock, job: AiToolkitJob) -> None:
    """Upstream adapts every linear layer in certain modules. Words only select among these layers."""
    names = job.target.names.aitoolkit
    convolutions = block.get("conv") is not None or _kind_of(block) == "locon" or _is_full_rank(block)
    within = (*names.blocks, *(names.conv_blocks if convolutions else ()))
    words = block.inner("network_kwargs").get("only_if_contains")
    if within and (words or not names.blocks_are_default_targets):
        block.default(("adapter", "within"), list(within))


def _locon(block: PeerBlock, job: AiToolkitJob) -> None:
    if _kind_of(block) != "locon":
        return
    if job.target.is_transformer:
        block.note(f"{block.key('type')}: the linear layers of the blocks are adapted; ai-toolkit's LoCon adapts none")
    elif block.get("network_kwargs"):
        block.note(f"{block.key('network_kwargs')}: chooses layers here; ai-toolkit's LoCon ignores it")


def _pattern(word: str) -> str:
    path = word.replace("$$", ".")
    inside = path.removeprefix("transformer.").removeprefix("lora_unet.")
    if not inside.strip():
        return word
    return f"*{inside}*" if inside == path else f"{inside}*"  # after the prefix, the word is the start of the path


def _schedule(block: PeerBlock, job: AiToolkitJob) -> None:
    schedule = block.get("alpha_schedule")
    if (isinstance(schedule, dict) and schedule.get("enabled") is False) or schedule is None:
        return
    block.reject("alpha_schedule", "nothing: alpha stays what it is during a run")


NETWORK = section(
    Key("dropout", ("adapter", "dropout"), as_number),
    Key("pretrained_lora_path", ("adapter", "init_from")),
    KeyRule(_kind, "type"),
    KeyRule(_rank, "linear rank"),
    KeyRule(_lokr, "lokr_factor old_lokr_format lokr_full_rank"),
    KeyRule(_alpha, "alpha linear_alpha"),
    KeyRule(_conv, *_CONV),
    KeyRule(_kwargs, "network_kwargs"),
    KeyRule(_blocks),
    KeyRule(_locon),
    KeyRule(_schedule, "alpha_schedule"),
    rejected("transformer_only", OneOf((True,)), "true: only the layers inside the transformer's blocks are adapted"),
    rejected("split_multistage_loras", OneOf((True,)), "true: each expert's adapter is a file of its own"),
    rejected("all_layers", OneOf((False,)), "false: norms and embeddings are not adapted here"),
    rejected("normalize", OneOf((False,)), "false: not done here"),
    rejected("lorm", OneOf((None,)), "nothing: LoRM is not done here"),
    *noted(HARMLESS, "layer_offloading", unless=IsFalse()),
)

_OTHER_CHOICES = """
    full_if_contains rank_dropout module_dropout parameter_threshold attn_only full_train_in_out target_lin_modules
    target_conv_modules block_dims block_alphas conv_block_dims conv_block_alphas modules_dim modules_alpha peft_format
    use_bias
"""
_ONLY_TWO = "nothing: only ignore_if_contains and only_if_contains choose layers here"
NETWORK_KWARGS = section(
    KeyRule(_layers, "ignore_if_contains only_if_contains"),
    *(rejected(name, OneOf((None, False, 0, [], {})), _ONLY_TWO) for name in _OTHER_CHOICES.split()),
    *noted(HARMLESS, "varbose", unless=IsFalse()),
)

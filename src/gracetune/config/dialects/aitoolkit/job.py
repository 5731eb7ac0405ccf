"""`AiToolkitJob`: decisions that several parts of a job depend on, made before any part is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracetune.config.dialects.aitoolkit.model import ModelTarget, find_target
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.values import as_number, real, whole
from gracetune.config.draft import Path


@dataclass(frozen=True)
class AiToolkitJob:
    process: PeerBlock
    train: PeerBlock
    """`train`, including the optimizer's name and learning rate from wherever the file has them."""
    params: PeerBlock
    """The optimizer's own options, from whichever block has them."""
    model: PeerBlock
    target: ModelTarget
    batches_per_step: int
    """Micro-batches per optimizer step, if the file counts micro-batches as steps (`gradient_accumulation_steps`);
    else 1."""
    reg_weight: float
    """Factor for the loss of regularization datasets (`is_reg`)."""
    caches_text: bool
    """`train.cache_text_embeddings`."""
    one_prompt: bool
    """Whether every caption is replaced by the trigger word, or by an empty text: ai-toolkit does so if the text
    encoder is unloaded and embeddings are not cached."""

    def put_count(self, block: PeerBlock, path: Path, name: str) -> None:
        """Put a number of the file's steps as optimizer steps, rounded up."""
        value = as_number(block.get(name))
        count = whole(value)
        if count is not None and count > 0 and self.batches_per_step > 1:
            value = -(-count // self.batches_per_step)
        block.assign(path, value, name)


def make_job(process: PeerBlock) -> AiToolkitJob:
    train, params = _optimizer(process)
    model = process.inner("model")
    dtype = train.get("dtype") or train.get("mixed_precision") or "fp32"
    caches = train.get("cache_text_embeddings") is True
    return AiToolkitJob(
        process=process,
        train=train,
        params=params,
        model=model,
        target=find_target(model, dtype=dtype, adapter=process.get("network") is not None),
        batches_per_step=_batches_per_step(train),
        reg_weight=_reg_weight(train),
        caches_text=caches,
        one_prompt=train.get("unload_text_encoder") is True and not caches,
    )


def _optimizer(process: PeerBlock) -> tuple[PeerBlock, PeerBlock]:
    """Return `train` and the optimizer's options. Configs of the ai-toolkit fork (docs/seed-map.md) have both in an
    `optimizer` block beside it."""
    train = process.inner("train")
    params = train.inner("optimizer_params")
    value = process.get("optimizer")
    if value is None:
        return train, params
    own = PeerBlock(process.reading, {"name": value}, process.key("optimizer")) if isinstance(value, str) else None
    own = own or process.inner("optimizer")
    possible = ("optimizer", "optimizer_params") if own.get("lr") is None else ("optimizer", "optimizer_params", "lr")
    twice = [name for name in possible if train.get(name) is not None]
    if twice:
        expected, hint = f"one of `optimizer` and `train.{twice[0]}`", f"move it into `train.{twice[0]}`"
        process.problem("optimizer", expected, hint)
        return train, params
    name = next((name for name in ("name", "type") if own.get(name) is not None), None)
    targets = {"optimizer": name, "lr": "lr" if own.get("lr") is not None else None}
    moved = {setting: target for setting, target in targets.items() if target is not None}
    values = {**train.values, **{setting: own.get(target) for setting, target in moved.items()}}
    rest = {option: item for option, item in own.values.items() if option not in ("name", "type", "lr")}
    keys = {setting: own.key(target) for setting, target in moved.items()}
    return PeerBlock(process.reading, values, train.key_path, keys), PeerBlock(process.reading, rest, own.key_path)


def _batches_per_step(train: PeerBlock) -> int:
    """Return how many of the file's steps make one optimizer step. Only the older key counts micro-batches as steps."""
    newer = whole(as_number(train.get("gradient_accumulation")))
    older = whole(as_number(train.get("gradient_accumulation_steps")))
    return max(1, older or 1) if newer is None or newer <= 1 else 1


def _reg_weight(train: PeerBlock) -> float:
    weight: Any = real(as_number(train.get("reg_weight")))
    return weight if weight is not None and weight >= 0 else 1.0

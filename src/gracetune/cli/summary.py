"""A run in ten lines: what a resolved config will do, each line with the reason that is not obvious."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gracetune.config import Resolved, RunConfig
from gracetune.config.dataset_config import Dataset
from gracetune.config.families import find_flavour, flavours
from gracetune.memory.placement import hints_of


def print_summary(console: Console, resolved: Resolved) -> None:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in summary(resolved.config):
        table.add_row(label, escape(text))
    console.print(table)


def summary(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "run", f"{config.name}, into {config.output_dir}"
    yield "model", _model(config)
    yield "adapter", _adapter(config)
    for dataset in config.datasets:
        if not dataset.disabled:
            yield "data", _dataset(dataset)
    yield "length", _length(config)
    yield "batch", _batch(config)
    yield "optimizer", f"{config.optimizer.name}, lr {config.optimizer.lr:g}, {config.schedule.name}"
    yield "caches", f"latents {config.cache.vae_cache_type}, text {config.cache.text_cache_type}"
    yield "memory", _memory(config)


def _model(config: RunConfig) -> str:
    model = config.model
    flavour = find_flavour(model.family, model.flavour) if model.flavour else None
    if flavour is None and model.path is None:
        flavour = flavours(model.family)[0]
    weights = model.path or (flavour.weights if flavour else "unknown weights")
    experts = f", experts: {model.experts}" if flavour is not None and flavour.dual_expert else ""
    return f"{model.family} from {weights}, base weights in {model.base_precision}{experts}"


def _adapter(config: RunConfig) -> str:
    adapter = config.adapter
    if adapter.kind == "full_finetune":
        return "none: every weight of the model is trained"
    if adapter.kind == "lokr":
        size = "full second factor" if adapter.full_rank else f"rank {adapter.rank}"
        return f"lokr, factor {adapter.factor if adapter.factor > 0 else 'automatic'}, {size}"
    return f"{adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha or adapter.rank:g}"


def _dataset(dataset: Dataset) -> str:
    unit = " megapixels" if dataset.resolution_type == "area" else " px"
    size = "" if dataset.dataset_type == "audio" else f" at {dataset.resolution:g}{unit}"
    staged = f", staged in memory ({dataset.in_memory.compression})" if dataset.type == "in_memory" else ""
    return f"{dataset.id}: {dataset.dataset_type}s of {dataset.path}{size}{staged}".replace(
        "conditionings", "references"
    )


def _length(config: RunConfig) -> str:
    training = config.training
    return f"{training.max_steps} optimizer steps" if training.max_steps else f"{training.epochs} epochs"


def _batch(config: RunConfig) -> str:
    training = config.training
    ramp = training.ramp
    if ramp.enabled and ramp.initial_effective_batch_size != ramp.target_effective_batch_size:
        return (
            f"{ramp.initial_effective_batch_size} growing to {ramp.target_effective_batch_size} "
            f"over {ramp.batch_rampup_steps} micro-batches of at most {training.batch_size}"
        )
    if ramp.enabled:
        return f"{ramp.target_effective_batch_size} from the first step on: the ramp begins where it ends"
    effective = training.batch_size * training.gradient_accumulation_steps
    return f"{effective} per process ({training.batch_size} x {training.gradient_accumulation_steps} accumulated)"


def _memory(config: RunConfig) -> str:
    memory = config.memory
    hints = f"residency hints {'on' if hints_of(config).on else 'off'}"
    if not memory.use_uvm:
        return f"{hints}, no overflow arena"
    return f"{hints}, overflow arena up to {memory.uvm_oversubscription_ratio:g}x, {memory.uvm_access_pattern}"

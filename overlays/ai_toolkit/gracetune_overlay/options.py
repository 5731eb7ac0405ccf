"""The `gracetune:` block of a process in an ai-toolkit job.

    gracetune:
      memory: {use_uvm: true, uvm_access_pattern: cpu_first}
      caches: {latents: memory, text: memory, limit_gib: 200}
      automagic: true
      pair_files: true

Everything is off by default. One error lists all problems of the block, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gracetune.extension import ConfigError, Flag, MemoryOptions, PositiveFloat, Problem, Section, misspelt

from .entry import KEY

Place = Literal["disk", "memory", "unified_memory"]


class Caches(Section):
    latents: Place = "disk"
    text: Place = "disk"
    limit_gib: PositiveFloat | None = None
    """Limit for both caches together; other entries stay on disk. None uses the spare main memory."""


class Block(Section):
    memory: MemoryOptions | None = None
    caches: Caches = Caches()
    automagic: Flag = False
    pair_files: Flag = False


_SECTIONS: Mapping[str, type[Section]] = {"": Block, "memory": MemoryOptions, "caches": Caches}


@dataclass(frozen=True)
class Job:
    """The settings of one process of a job that the overlay uses."""

    key_path: str
    """The key in the user's file, such as `config.process[0]`."""
    block: Block
    workers: int
    """Number of loader processes. They are forked, and managed memory does not exist in them."""


def read_job(config: Mapping[str, Any], key_path: str) -> Job:
    """Read the `gracetune:` block. ConfigError lists all problems."""
    raw = config[KEY]
    key = f"{key_path}.{KEY}"
    if not isinstance(raw, Mapping):
        hint = f"write `{KEY}:` with {', '.join(Block.model_fields)} under it, or remove it"
        raise ConfigError([Problem(key, repr(raw), "a block of keys", hint)])
    try:
        block = Block.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError([_problem(key, details) for details in error.errors()]) from None
    datasets = _datasets(config)
    problems = [*_cache_problems(block, config, key_path), *_other_problems(block, config, key_path)]
    if problems:
        raise ConfigError(problems)
    return Job(key_path, block, max((_workers(dataset) for dataset in datasets), default=0))


def _problem(key: str, details: ErrorDetails) -> Problem:
    path = [str(step) for step in details["loc"]]
    whole, found = ".".join([key, *path]), details["input"]
    if details["type"] == "extra_forbidden":
        known = list(_SECTIONS[".".join(path[:-1])].model_fields)
        hint = misspelt(path[-1], known, f"remove it; known here: {', '.join(known)}")
        return Problem(whole, f"an unknown key (value {found!r})", "a key the overlay knows", hint)
    expected = details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    if expected.startswith("boolean"):
        expected = "true or false"
    elif details["type"].startswith("model_"):
        expected = "a block of keys"
    return Problem(whole, repr(found), expected, f"change `{path[-1] if path else KEY}`, or remove it")


def _datasets(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The datasets of the process. ai-toolkit itself rejects malformed ones."""
    datasets = config.get("datasets")
    return [dataset for dataset in datasets if isinstance(dataset, Mapping)] if isinstance(datasets, list) else []


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _workers(dataset: Mapping[str, Any]) -> int:
    found = dataset.get("num_workers", 2)  # ai-toolkit's default
    return found if isinstance(found, int) else 2


def _cache_problems(block: Block, config: Mapping[str, Any], key_path: str) -> Iterator[Problem]:
    """Problems with settings of ai-toolkit that our caches need, such as caching to disk."""
    unified = "unified_memory" in (block.caches.latents, block.caches.text)
    if unified and block.memory is None:
        wanted = "`memory` beside unified_memory: its layer is where unified memory comes from"
        yield Problem(f"{key_path}.{KEY}", "no `memory`", wanted, "write `memory: {}`, or `memory` for the caches")
    if not unified and block.memory is not None and block.memory.enable_uvm_hints:
        wanted = "false, or caches in unified_memory: nothing else could be hinted"
        hint = f"remove it, or write `latents: unified_memory` in `{KEY}.caches`"
        yield Problem(f"{key_path}.{KEY}.memory.enable_uvm_hints", "true", wanted, hint)
    text_for_all = _part(config, "train").get("cache_text_embeddings") is True
    for number, dataset in enumerate(_datasets(config)):
        at = f"{key_path}.datasets[{number}]"
        if block.caches.latents != "disk" and dataset.get("cache_latents_to_disk") is not True:
            found = f"cache_latents_to_disk: {dataset.get('cache_latents_to_disk', False)!r}"
            wanted = f"true, with {KEY}.caches.latents: {block.caches.latents}, which takes ai-toolkit's files"
            yield Problem(at, found, wanted, "write `cache_latents_to_disk: true`")
        if block.caches.text != "disk" and not text_for_all and dataset.get("cache_text_embeddings") is not True:
            found = f"cache_text_embeddings: {dataset.get('cache_text_embeddings', False)!r}"
            wanted = f"true, with {KEY}.caches.text: {block.caches.text}, which takes ai-toolkit's files"
            yield Problem(at, found, wanted, "write `cache_text_embeddings: true` in `train`")
        if unified and (_workers(dataset) or dataset.get("prefetch_factor", 2) is not None):
            found = f"num_workers: {_workers(dataset)}, prefetch_factor: {dataset.get('prefetch_factor', 2)}"
            wanted = "0 and null: unified memory does not exist in loader processes"
            yield Problem(at, found, wanted, "write `num_workers: 0` and `prefetch_factor: null`, or use `memory`")


def _other_problems(block: Block, config: Mapping[str, Any], key_path: str) -> Iterator[Problem]:
    train, model = _part(config, "train"), _part(config, "model")
    optimizer = train.get("optimizer", "adamw")
    if block.automagic and str(optimizer).lower() != "automagic":
        hint = f"write `optimizer: automagic`, or `automagic: false` in `{KEY}`"
        yield Problem(f"{key_path}.train.optimizer", repr(optimizer), f"automagic, with {KEY}.automagic", hint)
    if block.automagic and train.get("do_paramiter_swapping"):
        wanted = f"false, with {KEY}.automagic: every parameter is trained in every step"
        yield Problem(f"{key_path}.train.do_paramiter_swapping", "true", wanted, "remove it")
    arch = str(model.get("arch", "")).partition(":")[0]
    if block.pair_files and not arch.startswith("wan22_14b"):
        wanted = f"wan22_14b or wan22_14b_i2v, with {KEY}.pair_files: only they have two experts"
        yield Problem(f"{key_path}.model.arch", repr(arch), wanted, f"remove `pair_files` from `{KEY}`")

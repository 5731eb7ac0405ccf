"""Reads ai-toolkit jobs: the `job`, `config` and `process[]` levels, in YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gracetune.config import native
from gracetune.config.base import file_name
from gracetune.config.dialects import gh200
from gracetune.config.dialects.aitoolkit.dataset_parts import DATASET
from gracetune.config.dialects.aitoolkit.datasets import read_datasets
from gracetune.config.dialects.aitoolkit.job import make_job
from gracetune.config.dialects.aitoolkit.keys import HARMLESS, PEER, section
from gracetune.config.dialects.aitoolkit.model import MODEL, MODEL_KWARGS
from gracetune.config.dialects.aitoolkit.network import NETWORK, NETWORK_KWARGS, read_network
from gracetune.config.dialects.aitoolkit.optimizer import SCHEDULE_PARAMS
from gracetune.config.dialects.aitoolkit.samples import ITEM, SAMPLE, read_samples
from gracetune.config.dialects.aitoolkit.train import EMA, LOGGING, SAVE, TRAIN
from gracetune.config.dialects.peer_file import PeerBlock, PeerFile, block_at
from gracetune.config.dialects.table import IsFalse, KeyRule, KeyTable, OneOf, apply, check, noted, rejected
from gracetune.config.dialects.values import as_number
from gracetune.config.draft import Draft, UnquotedText, describe
from gracetune.config.environment import Environment
from gracetune.config.limits import LONGEST_KEY, joined, replaced
from gracetune.config.spelling import misspelt
from gracetune.config.syntax import Document
from gracetune.errors import ConfigError

JOBS = ("extension", "train")
"""Values of `job` that train. Those in `OTHER_JOBS` and `OTHER_TRAINERS` are ai-toolkit's and unsupported here."""
OTHER_JOBS = ("extract", "mod", "generate")
TRAINERS = ("sd_trainer", "diffusion_trainer", "ui_trainer")
OTHER_TRAINERS = (
    "slider", "slider_old", "vae", "lora_hack", "rescale_sd", "esrgan", "reference", "textual_inversion_trainer",
    "concept_slider", "concept_replacer", "ultimate_slider_trainer", "image_reference_slider_trainer",
)  # fmt: skip


def looks_like(data: Any) -> bool:
    """Whether data is an ai-toolkit job: it has `job` and `config`, or at least `process` in its `config`."""
    if not isinstance(data, Mapping):
        return False
    config = data.get("config")
    return ("job" in data and "config" in data) or (isinstance(config, Mapping) and "process" in config)


def read(document: Document, draft: Draft, environment: Environment) -> None:
    """Fill `draft` with the job's settings, and with a problem for each one that is wrong."""
    reading = PeerFile(PEER, draft, root="config.process[0].", homes=HOMES)
    top = block_at(reading, _substitute_variables(document, draft, environment), "")
    check(top, TOP)
    apply(top, TOP, None)
    reading.note_unused()


def _substitute_variables(document: Document, draft: Draft, environment: Environment) -> Any:
    """Parse the file's text with `${NAME}` substituted, except on lines that are comments.

    A name that is not set is a problem and stays as it is.
    """
    missing: dict[str, None] = {}
    text = joined(_substituted_parts(document.text, environment, missing))
    for name in missing:
        found, expected = UnquotedText("an unset variable"), "its value in the environment"
        draft.problem(
            f"${{{describe(UnquotedText(name))}}}", found, expected, f"export {describe(UnquotedText(name))}=..."
        )
    if text == document.text:
        return document.data
    substituted = document.reparsed(text)
    draft.redactor.learn(substituted.data)
    draft.problems += substituted.problems
    return substituted.data


def _substituted_parts(text: str, environment: Environment, missing: dict[str, None]) -> Iterator[str]:
    """Yield the substituted text in parts, and add names that the environment does not have to `missing`."""
    end = 0
    in_comment = _COMMENT.match(text) is not None
    while (start := text.find("${", end)) >= 0:
        before = text[end:start]
        if "\n" in before:
            in_comment = _COMMENT.match(before, before.rindex("\n") + 1) is not None
        if in_comment:
            line_end = text.find("\n", start)
            following = len(text) if line_end < 0 else line_end
            yield text[end:following]
            end = following
            continue
        close = text.find("}", start)
        if close < 0:
            break
        name, end = text[start + 2 : close], close + 1
        found = environment.get(name) if name else None
        if found is None and name:
            missing[_shorten(name)] = None
        yield before
        yield text[start:end] if found is None else found
    yield text[end:]


def _shorten(name: str) -> str:
    """Shorten an overlong name for a message: `${` without a closing `}` nearby can span half the file."""
    if len(name) <= LONGEST_KEY:
        return name
    found = _WORD.match(name)
    return f"{found[0] if found else ''}... ({len(name):,} characters)"


_WORD = re.compile(r"\w{1,40}")
_COMMENT = re.compile(r"\s*(?:#|//)")
"""The start of a line that is a comment."""


def _read_config(top: PeerBlock, _: None) -> None:
    """Read `job` and `config`. Raises if this is not a training job, because the rest cannot be read then."""
    job, config = top.get("job"), top.get("config")
    if job in OTHER_JOBS:
        top.problem("job", f"{' or '.join(JOBS)}: only training is done here", "use ai-toolkit for it")
    elif job not in JOBS:
        hint = misspelt(job, JOBS, "write `job: extension`", write="job: {}")
        top.problem("job", " or ".join(JOBS), hint)
    if not isinstance(config, Mapping):
        top.problem("config", "a mapping with `name` and `process`", "start from a file in examples/")
    if job not in JOBS or not isinstance(config, Mapping):
        raise ConfigError(top.draft.problems)
    block = _substitute_name(top.inner("config"))
    check(block, CONFIG)
    apply(block, CONFIG, None)


def _substitute_name(config: PeerBlock) -> PeerBlock:
    """Replace `[name]` by the job's name in all values of `config`."""
    name = config.get("name")
    values = _replace_name(config.values, name if isinstance(name, str) else "[name]")
    return PeerBlock(config.reading, values, config.key_path)


def _replace_name(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return replaced(value, "[name]", name)
    if isinstance(value, list):
        return [_replace_name(item, name) for item in value]
    return {key: _replace_name(item, name) for key, item in value.items()} if isinstance(value, Mapping) else value


def _read_process(config: PeerBlock, _: None) -> None:
    """Read the job's only trainer. Raises if there is none, because the rest cannot be read then."""
    processes = config.get("process")
    if not isinstance(processes, list) or not processes or not isinstance(processes[0], Mapping):
        hint = "write `process:` and below it `- type: diffusion_trainer`"
        config.problem("process", "a list with one trainer", hint)
        raise ConfigError(config.draft.problems)
    if len(processes) > 1:
        hint = "give each a file of its own; the first is the one checked here"
        config.problem("process", "one trainer", hint, found=UnquotedText(f"{len(processes)} processes"))
    process = block_at(config.reading, processes[0], f"{config.key('process')}[0]")
    kind = process.get("type")
    if kind not in TRAINERS:
        other = "use ai-toolkit for it: we train adapters and whole models"
        hint = other if kind in OTHER_TRAINERS else misspelt(kind, TRAINERS, other, write="type: {}")
        process.problem("type", f"one of {', '.join(TRAINERS)}", hint)
        raise ConfigError(config.draft.problems)
    check(process, PROCESS)
    apply(process, PROCESS, config)


def _read_name_and_folder(process: PeerBlock, config: PeerBlock) -> None:
    """Read the run's name and its folder, which is `training_folder/name` as upstream."""
    block = process if process.get("name") is not None else config
    name = block.get("name")
    block.assign(("name",), file_name(name) if isinstance(name, str) else name, "name")
    block = process if process.get("training_folder") is not None else config
    folder = block.get("training_folder")
    if folder is None:
        block.default(("output_dir",), f"output/{name}")
    elif isinstance(folder, str) and folder.strip() and isinstance(name, str):
        block.assign(("output_dir",), f"{folder.rstrip('/')}/{name}", "training_folder")
    else:
        block.assign(("output_dir",), folder, "training_folder")


def _read_seed(process: PeerBlock, config: PeerBlock) -> None:
    source = process if process.get("training_seed") is not None else config
    source.put("training_seed", ("training", "seed"), as_number)


def _read_sections(process: PeerBlock, config: PeerBlock) -> None:
    job = make_job(process)
    check(job.model, MODEL)
    apply(job.model, MODEL, job)
    check(job.train, TRAIN)
    apply(job.train, TRAIN, job)
    read_network(process, job)
    read_datasets(process, job)
    read_samples(process, job)
    for name, table in (("save", SAVE), ("logging", LOGGING)):
        block = process.inner(name)
        check(block, table)
        apply(block, table, job)


def _read_gh200_blocks(process: PeerBlock, config: PeerBlock) -> None:
    """Read the blocks of the GH200 guides, which are the same as in SimpleTuner files."""
    blocks = {name: process.get(name) for name in gh200.BLOCKS}
    gh200.read_gh200(process.without_nulls(blocks, process.key_path))


def _read_gracetune_block(process: PeerBlock, config: PeerBlock) -> None:
    """Read the `gracetune` block, which overrides every other section. `device` below it sets nothing."""
    value = process.get(native.VERSION_KEY)
    if value is not None:
        native.read_block(value, process.key(native.VERSION_KEY), process.file, process.draft)


def _read_devices(process: PeerBlock, config: PeerBlock) -> None:
    for block in (config, process):
        device = block.get("device")
        if device is None:
            continue
        if re.fullmatch(r"(cuda|gpu|cpu)?(:?\d+)?", str(device).strip().lower()):
            block.list_unused(HARMLESS, "device")
        else:
            key = block.key("device")
            block.note(f"{key}: {device} is not used: a run takes the CUDA GPU it finds, or the CPU")


TOP = section(KeyRule(_read_config, "job config"), *noted(HARMLESS, "meta", unless=IsFalse()))

CONFIG = section(
    KeyRule(_read_process, "name process device training_folder training_seed"),
    *noted(HARMLESS, "log_dir", unless=IsFalse()),
    rejected("is_v2", OneOf((False,)), "false: Stable Diffusion 2 is not trained here"),
)

_SAME_PROMPTS = "nothing: the first samples use the same prompts as the others"
PROCESS = section(
    KeyRule(_read_name_and_folder, "name training_folder"),
    KeyRule(_read_seed, "training_seed"),
    KeyRule(
        _read_sections,
        "type trigger_word network save datasets dataset train optimizer model sample validation logging",
    ),
    KeyRule(_read_gh200_blocks, *gh200.BLOCKS),
    KeyRule(_read_gracetune_block, native.VERSION_KEY),
    KeyRule(_read_devices, "device"),
    *noted(
        HARMLESS,
        "sqlite_db_path performance_log_every log_dir torch_profiler lorm_extract_mode lorm_extract_mode_param",
        unless=IsFalse(),
    ),
    rejected("first_sample", OneOf((None,)), _SAME_PROMPTS),
    rejected("guidance", OneOf((None,)), "nothing: guidance training is not done here"),
    rejected("slider", OneOf((None,)), "nothing: sliders are not trained here"),
    rejected("embedding", OneOf((None,)), "nothing: textual inversion is not done here"),
    rejected("decorator", OneOf((None,)), "nothing: decorators are not trained here"),
    rejected("adapter", OneOf((None,)), "nothing: IP, control and similar adapters are not trained here"),
    rejected("do_lorm", OneOf((False,)), "false: LoRM is not done here"),
)

HOMES: Mapping[str, KeyTable[Any]] = {
    "config.process[0]": PROCESS, "network": NETWORK, "save": SAVE, "logging": LOGGING, "datasets": DATASET,
    "train": TRAIN, "model": MODEL, "model.model_kwargs": MODEL_KWARGS, "sample": SAMPLE,
}  # fmt: skip
"""Section -> its table, to report where a misplaced key belongs."""
TABLES: Mapping[str, KeyTable[Any]] = {
    "the file": TOP, "config": CONFIG, "config.process[]": PROCESS, "network": NETWORK,
    "network.network_kwargs": NETWORK_KWARGS, "save": SAVE, "logging": LOGGING, "datasets[]": DATASET, "train": TRAIN,
    "train.ema_config": EMA, "train.lr_scheduler_params": SCHEDULE_PARAMS, "model": MODEL,
    "model.model_kwargs": MODEL_KWARGS, "sample": SAMPLE, "sample.samples[]": ITEM,
    "datasets[].in_memory": gh200.IN_MEMORY, "cache_config": gh200.CACHE, "gh200_optimizations": gh200.OPTIMIZATIONS,
}  # fmt: skip
"""All tables, for the list of keys in docs/dialect-keys.md."""

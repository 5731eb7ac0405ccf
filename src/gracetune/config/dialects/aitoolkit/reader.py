"""ai-toolkit jobs: `job / config / process[]`, in YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gracetune.config import native
from gracetune.config.base import file_name
from gracetune.config.dialects.aitoolkit.dataset_keys import DATASET
from gracetune.config.dialects.aitoolkit.datasets import read_datasets
from gracetune.config.dialects.aitoolkit.keys import (
    Block,
    Known,
    Reading,
    Table,
    block_of,
    check,
    number,
    refused_unless,
)
from gracetune.config.dialects.aitoolkit.model import MODEL, MODEL_KWARGS, read_model
from gracetune.config.dialects.aitoolkit.network import NETWORK, read_network
from gracetune.config.dialects.aitoolkit.samples import SAMPLE, read_samples
from gracetune.config.dialects.aitoolkit.train import read_logging, read_save, read_train
from gracetune.config.dialects.aitoolkit.train_keys import LOGGING, SAVE, TRAIN
from gracetune.config.dialects.simpletuner import gh200
from gracetune.config.dialects.simpletuner.values import Options
from gracetune.config.draft import Draft, Said
from gracetune.config.environment import Environment
from gracetune.config.spelling import misspelt
from gracetune.config.syntax import Document
from gracetune.errors import ConfigError

JOBS = ("extension", "train")
OTHER_JOBS = ("extract", "mod", "generate")
TRAINERS = ("sd_trainer", "diffusion_trainer", "ui_trainer")
OTHER_TRAINERS = (
    "slider", "slider_old", "vae", "lora_hack", "rescale_sd", "esrgan", "reference", "textual_inversion_trainer",
    "concept_slider", "concept_replacer", "ultimate_slider_trainer", "image_reference_slider_trainer",
)  # fmt: skip

TOP: Table = {"job": Known.BY_HAND, "config": Known.BY_HAND, "meta": Known.HARMLESS}
_JOB_WIDE = ("training_folder", "training_seed")
CONFIG: Table = {
    **dict.fromkeys(("name", "process", "device", *_JOB_WIDE), Known.BY_HAND),
    "log_dir": Known.HARMLESS,
    "is_v2": refused_unless(False, "false: Stable Diffusion 2 is not trained here"),
}
PROCESS: Table = {
    **dict.fromkeys(
        (
            "type", "name", "device", "trigger_word", "network", "save", "datasets", "dataset", "train", "optimizer",
            "model", "sample", "validation", "logging", *_JOB_WIDE, *gh200.BLOCKS, native.VERSION_KEY,
        ),
        Known.BY_HAND,
    ),
    **dict.fromkeys(
        ("sqlite_db_path", "performance_log_every", "log_dir", "torch_profiler", "lorm_extract_mode",
         "lorm_extract_mode_param"),
        Known.HARMLESS,
    ),
    "first_sample": refused_unless(None, "nothing: the first samples are drawn with the same prompts as the others"),
    "guidance": refused_unless(None, "nothing: guidance training is not done here"),
    "slider": refused_unless(None, "nothing: sliders are not trained here"),
    "embedding": refused_unless(None, "nothing: textual inversion is not done here"),
    "decorator": refused_unless(None, "nothing: decorators are not trained here"),
    "adapter": refused_unless(None, "nothing: IP, control and similar adapters are not trained here"),
    "do_lorm": refused_unless(False, "false: LoRM is not done here"),
}  # fmt: skip
TABLES: Mapping[str, Table] = {
    "config.process[0]": PROCESS, "network": NETWORK, "save": SAVE, "logging": LOGGING, "datasets": DATASET,
    "train": TRAIN, "model": MODEL, "model.model_kwargs": MODEL_KWARGS, "sample": SAMPLE,
}  # fmt: skip


def looks_like(data: Any) -> bool:
    """A job names its kind, or at least has processes below `config`."""
    if not isinstance(data, Mapping):
        return False
    config = data.get("config")
    return ("job" in data and "config" in data) or (isinstance(config, Mapping) and "process" in config)


def read(document: Document, draft: Draft, environment: Environment) -> None:
    reading = Reading(draft, document.name, tables=TABLES)
    top = block_of(reading, _substituted(document, draft, environment), "")
    check(reading, top, TOP)
    _job(reading, top)
    config = _named(reading, top)
    check(reading, config, CONFIG)
    process = _process(reading, config)
    check(reading, process, PROCESS)
    _place(reading, config, process)
    _parts(reading, process)
    _ours(reading, process)
    _devices(reading, config, process)
    if reading.harmless:
        keys = ", ".join(dict.fromkeys(key.removeprefix("config.process[0].") for key in reading.harmless))
        draft.note(f"harmless here, and not used: {keys}")


_VARIABLE = re.compile(r"\$\{([^}]+)\}")


def _substituted(document: Document, draft: Draft, environment: Environment) -> Any:
    """The file's data with `${NAME}` replaced in its text. What stands in a comment of its own is left alone."""
    missing: dict[str, None] = {}

    def value(match: re.Match[str]) -> str:
        before = document.text[document.text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if before.lstrip().startswith(("#", "//")):
            return match[0]
        found = environment.get(match[1])
        if found is None:
            missing[match[1]] = None
        return match[0] if found is None else found

    text = _VARIABLE.sub(value, document.text)
    for name in missing:
        found, expected = Said("an unset variable"), "its value in the environment"
        draft.problem(f"${{{name}}}", found, expected, f"export {name}=...")
    if text == document.text:
        return document.data
    substituted = document.reparsed(text)
    draft.problems += substituted.problems
    return substituted.data


def _job(reading: Reading, top: Block) -> None:
    """Stop where this is no training job: nothing below could be read."""
    job, config, draft = top.get("job"), top.get("config"), reading.draft
    if job in OTHER_JOBS:
        draft.problem("job", job, f"{' or '.join(JOBS)}: only training is done here", "use ai-toolkit for it")
    elif job not in JOBS:
        hint = misspelt(job, JOBS, "write `job: extension`", write="job: {}")
        draft.problem("job", job, " or ".join(JOBS), hint)
    if not isinstance(config, Mapping):
        draft.problem("config", config, "a mapping with `name` and `process`", "start from a file in examples/")
    if job not in JOBS or not isinstance(config, Mapping):
        raise ConfigError(draft.problems)


def _named(reading: Reading, top: Block) -> Block:
    """`config` with `[name]` replaced by the job's name wherever it is written."""
    config = block_of(reading, top.get("config"), "config")
    name = config.get("name")
    return Block(_replaced(config.values, name if isinstance(name, str) else "[name]"), config.prefix)


def _replaced(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value.replace("[name]", name)
    if isinstance(value, list):
        return [_replaced(item, name) for item in value]
    return {key: _replaced(item, name) for key, item in value.items()} if isinstance(value, Mapping) else value


def _process(reading: Reading, config: Block) -> Block:
    """The one trainer of the job. Without one there is nothing else to read."""
    processes, key = config.get("process"), config.key("process")
    if not isinstance(processes, list) or not processes or not isinstance(processes[0], Mapping):
        hint = "write `process:` and below it `- type: diffusion_trainer`"
        reading.draft.problem(key, processes, "a list with one trainer", hint)
        raise ConfigError(reading.draft.problems)
    if len(processes) > 1:
        hint = "give each a file of its own; the first is the one checked here"
        reading.draft.problem(key, Said(f"{len(processes)} processes"), "one trainer", hint)
    process = block_of(reading, processes[0], f"{key}[0]")
    kind = process.get("type")
    if kind not in TRAINERS:
        other = "use ai-toolkit for it: we train adapters and whole models"
        hint = other if kind in OTHER_TRAINERS else misspelt(kind, TRAINERS, other, write="type: {}")
        reading.draft.problem(process.key("type"), kind, f"one of {', '.join(TRAINERS)}", hint)
        raise ConfigError(reading.draft.problems)
    return process


def _place(reading: Reading, config: Block, process: Block) -> None:
    """Name and folder; the run's folder is `training_folder/name`, as upstream has it."""
    own = process if process.get("name") is not None else config
    name = own.get("name")
    reading.put(("name",), file_name(name) if isinstance(name, str) else name, own.key("name"))
    place = process if process.get("training_folder") is not None else config
    folder = place.get("training_folder")
    if folder is None:
        reading.default(("output_dir",), f"output/{name}")
    elif isinstance(folder, str) and folder.strip() and isinstance(name, str):
        reading.put(("output_dir",), f"{folder.rstrip('/')}/{name}", place.key("training_folder"))
    else:
        reading.put(("output_dir",), folder, place.key("training_folder"))
    source = process if process.get("training_seed") is not None else config
    if source.get("training_seed") is not None:
        reading.put(("training", "seed"), number(source.get("training_seed")), source.key("training_seed"))


def _parts(reading: Reading, process: Block) -> None:
    train, params = _optimizer(reading, process)
    adapter = process.get("network") is not None
    dtype = train.get("dtype") or train.get("mixed_precision") or "fp32"
    target = read_model(reading, process.get("model"), process.key("model"), dtype=dtype, adapter=adapter)
    training = read_train(reading, train, params, target)
    read_network(reading, process.get("network"), process.key("network"), target)
    read_datasets(reading, process, target, training)
    read_samples(reading, process, process.get("trigger_word"))
    read_save(reading, process.get("save"), process.key("save"), adapter=adapter)
    read_logging(reading, process.get("logging"), process.key("logging"))


def _ours(reading: Reading, process: Block) -> None:
    """The blocks of the GH200 guides as SimpleTuner files have them, and at last the block of our own sections."""
    blocks = {name: process.get(name) for name in gh200.BLOCKS}
    gh200.read_gh200(Options.block(blocks, reading.file, f"{process.prefix}."), reading.draft)
    if process.get(native.VERSION_KEY) is not None:
        key = process.key(native.VERSION_KEY)
        native.read_block(process.get(native.VERSION_KEY), key, reading.file, reading.draft)


def _optimizer(reading: Reading, process: Block) -> tuple[Block, Block]:
    """`train` and the optimizer's options. The forks' documents write both into an `optimizer` block next to it."""
    train = block_of(reading, process.get("train"), process.key("train"))
    params = block_of(reading, train.get("optimizer_params"), train.key("optimizer_params"))
    value, key = process.get("optimizer"), process.key("optimizer")
    if value is None:
        return train, params
    own = block_of(reading, {"name": value} if isinstance(value, str) else value, key)
    rivals = ("optimizer", "optimizer_params") if own.get("lr") is None else ("optimizer", "optimizer_params", "lr")
    twice = [name for name in rivals if train.get(name) is not None]
    if twice:
        expected, hint = f"one of `optimizer` and `train.{twice[0]}`", f"move it into `train.{twice[0]}`"
        reading.draft.problem(key, value, expected, hint)
        return train, params
    name = next((name for name in ("name", "type") if own.get(name) is not None), None)
    places = {"optimizer": name, "lr": "lr" if own.get("lr") is not None else None}
    moved = {setting: place for setting, place in places.items() if place is not None}
    values = {**train.values, **{setting: own.get(place) for setting, place in moved.items()}}
    rest = {option: item for option, item in own.values.items() if option not in ("name", "type", "lr")}
    keys = {setting: own.key(place) for setting, place in moved.items()}
    return Block(values, train.prefix, keys), Block(rest, own.prefix)


def _devices(reading: Reading, config: Block, process: Block) -> None:
    for block in (config, process):
        device = block.get("device")
        if device is None:
            continue
        if re.fullmatch(r"(cuda|gpu|cpu)?(:?\d+)?", str(device).strip().lower()):
            reading.harmless.append(block.key("device"))
        else:
            key = block.key("device")
            reading.draft.note(f"{key}: {device} is not used: a run takes the CUDA GPU it finds, or the CPU")

"""Reads the `sample` block, or `validation` in its place: the samples to generate during training, and how often."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.keys import HARMLESS, section
from gracetune.config.dialects.peer_file import PeerBlock, block_at
from gracetune.config.dialects.table import IsFalse, Key, KeyRule, OneOf, apply, check, noted, rejected
from gracetune.config.dialects.values import as_number
from gracetune.config.draft import Path
from gracetune.config.limits import replaced
from gracetune.config.spelling import misspelt

_ADAPTERS_ONLY = "nothing: adapters that take images are not trained here"
_DEFAULTS = {"width": 512, "height": 512, "num_frames": 1, "fps": 16, "seed": 0, "guidance": 7.0, "steps": 20}
_SAMPLE_EVERY = 100
_REFERENCES = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")

# Upstream's flags inside a prompt, as keys of a sample.
_FLAGS = {
    "n": "neg", "w": "width", "h": "height", "d": "seed", "seed": "seed", "l": "guidance_scale",
    "cfg": "guidance_scale", "s": "sample_steps", "steps": "sample_steps", "m": "network_multiplier",
    "network_multiplier": "network_multiplier", "frames": "num_frames", "num_frames": "num_frames", "fps": "fps",
    **{name: name for name in (*_REFERENCES, "ctrl_idx")},
}  # fmt: skip
_REJECTED_FLAGS = {
    "p2": "nothing: both of SDXL's text encoders get the same prompt",
    "n2": "nothing: both of SDXL's text encoders get the same prompt",
    "gr": "nothing: guidance_rescale is set once, in `sample`",
    "a": _ADAPTERS_ONLY,
    "ev": _ADAPTERS_ONLY,
    "extra_values": _ADAPTERS_ONLY,
    "ref": "nothing: SDXL's refiner is not used here",
}
_FLAG = re.compile(r"--([A-Za-z_]\w*)(?=\s|$)")


def read_samples(process: PeerBlock, job: AiToolkitJob) -> None:
    """Read the prompts from `sample`, or from `validation` if `sample` has none."""
    block, fallback = process.inner("sample"), process.inner("validation")
    if not _items(block) and _items(fallback):
        block.note(f"{block.key_path} has no prompts: {fallback.key_path} is used")
        check(block, SAMPLE)
        block = fallback
    elif process.get("validation") is not None:
        process.list_unused(HARMLESS, "validation")
    check(block, SAMPLE)
    apply(block, SAMPLE, job, ("validation",))


def _items(block: PeerBlock) -> Any:
    """Return `samples`, or `prompts` if there are none, as upstream does."""
    return block.get("samples") if block.get("samples") is not None else block.get("prompts")


def _defaults(block: PeerBlock, job: AiToolkitJob) -> None:
    for name, value in _DEFAULTS.items():
        block.default(("validation", name), value)


def _interval(block: PeerBlock, job: AiToolkitJob) -> None:
    if "sample_every" not in block:
        block.default(("validation", "every_steps"), _SAMPLE_EVERY)
    elif block.get("sample_every"):
        job.put_count(block, ("validation", "every_steps"), "sample_every")
    else:
        block.assign(("validation", "every_steps"), None, "sample_every")


def _start(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.get("sample_start_step"):
        block.note(f"{block.key('sample_start_step')}: not used: samples are generated from the first round on")


@dataclass(frozen=True)
class _Sample:
    """One of the prompts: its path in the config, and the block that all of them share."""

    root: Path
    shared: PeerBlock


def _prompts(block: PeerBlock, job: AiToolkitJob) -> None:
    items, name = _items(block), "samples" if block.get("samples") is not None else "prompts"
    if name == "samples" and block.get("prompts"):
        block.note(f"{block.key('prompts')}: not used, as in ai-toolkit, because `samples` is there")
    if not items:
        block.note(f"{block.key_path} has no prompts and there is no `validation` block: no samples are generated")
        return
    if not isinstance(items, list):
        block.problem(name, "a list of prompts", "write one prompt a line, each after `- `")
        return
    for index, item in enumerate(items):
        key = f"{block.key(name)}[{index}]"
        plain = PeerBlock(block.reading, {"prompt": item}, key, {"prompt": key})
        sample = plain if name == "prompts" else block_at(block.reading, item, key)
        found = _with_flags(sample, job.process.get("trigger_word"))
        check(found, ITEM)
        root: Path = ("validation", "prompts", index)
        apply(found, ITEM, _Sample(root, block), root)


def _with_flags(item: PeerBlock, trigger: Any) -> PeerBlock:
    """Move the flags in a prompt's text to keys of the sample. They override the other keys."""
    prompt = item.get("prompt")
    if not isinstance(prompt, str):
        return item
    if isinstance(trigger, str):
        prompt = replaced(prompt, "[trigger]", trigger)
    text, *chunks = _FLAG.split(prompt)
    found: dict[str, Any] = {}
    keys = dict(item.written)
    for flag, content in zip(chunks[::2], chunks[1::2], strict=True):
        key = f"{item.key_path} --{flag}"
        if flag in _FLAGS:
            found[_FLAGS[flag]] = _content(_FLAGS[flag])(content.strip())
            keys[_FLAGS[flag]] = key
        elif flag in _REJECTED_FLAGS:
            item.draft.reject(key, content.strip(), _REJECTED_FLAGS[flag], "remove the flag from the prompt")
        else:
            hint = misspelt(flag, _FLAGS, "remove it, or put a space after the dashes", write="--{}")
            item.draft.problem(key, content.strip(), f"one of --{', --'.join(_FLAGS)}", hint)
    return PeerBlock(item.reading, {**item.values, **found, "prompt": text.strip()}, item.key_path, keys)


def _content(name: str) -> Callable[[str], Any]:
    return str if name in ("neg", *_REFERENCES) else as_number


def _prompt(item: PeerBlock, sample: _Sample) -> None:
    item.assign((*sample.root, "prompt"), item.get("prompt"), "prompt")


def _references(item: PeerBlock, sample: _Sample) -> None:
    first = "ctrl_img" if item.get("ctrl_img") is not None else "ctrl_img_1"
    names = [name for name in (first, "ctrl_img_2", "ctrl_img_3") if item.get(name)]
    for index, name in enumerate(names):
        item.assign((*sample.root, "references", index), item.get(name), name)


def _fps(item: PeerBlock, sample: _Sample) -> None:
    if item.get("fps") is not None and as_number(item.get("fps")) != item.draft.get(("validation", "fps")):
        item.reject("fps", "the fps of all samples: set it in `sample`")


def _strength(item: PeerBlock, sample: _Sample) -> None:
    if item.get("network_multiplier") is None:
        sample.shared.put("network_multiplier", (*sample.root, "adapter_strength"), as_number)


def negative(value: Any) -> Any:
    """Convert upstream's false, for no negative prompt, to an empty text."""
    return "" if value is False else value


def seed(value: Any) -> Any:
    """Convert upstream's -1, for a random seed, to None."""
    value = as_number(value)
    return None if value == -1 else value


_SHARED = (
    Key("width", ("width",), as_number),
    Key("height", ("height",), as_number),
    Key("num_frames", ("num_frames",), as_number),
    Key("seed", ("seed",), seed),
    Key("guidance_scale", ("guidance",), as_number),
    Key("sample_steps", ("steps",), as_number),
    Key("neg", ("negative_prompt",), negative),
    rejected("duration", OneOf((None,)), "nothing: ai-toolkit's audio models are not trained here"),
    rejected("do_cfg_norm", OneOf((False,)), "false: samples are generated without rescaling the guidance"),
)

SAMPLE = section(
    *_SHARED,
    Key("fps", ("fps",), as_number),
    Key("walk_seed", ("walk_seed",)),
    Key("guidance_rescale", ("guidance_rescale",), as_number),
    KeyRule(_defaults),
    KeyRule(_interval, "sample_every"),
    KeyRule(_start, "sample_start_step"),
    KeyRule(_prompts, "prompts samples network_multiplier"),
    # each family is sampled with its own scheduler
    *noted(HARMLESS, "sampler format adapter_conditioning_scale refiner_start_at", unless=IsFalse()),
    rejected("extra_values", OneOf(([],)), _ADAPTERS_ONLY),
)
"""Its paths are relative to `validation` of a `RunConfig`."""

ITEM = section(
    *_SHARED,
    Key("network_multiplier", ("adapter_strength",), as_number),
    KeyRule(_prompt, "prompt"),
    KeyRule(_references, *_REFERENCES),
    KeyRule(_fps, "fps"),
    KeyRule(_strength, "network_multiplier"),
    *noted(HARMLESS, "ctrl_idx", unless=IsFalse()),
)
"""Its paths are relative to one of `validation.prompts`."""

"""The `sample` block (and `validation`, its stand-in): what is drawn while training, and how often."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gracetune.config.dialects.aitoolkit.keys import (
    Block,
    Known,
    Put,
    Reading,
    Refused,
    Row,
    Table,
    block_of,
    check,
    number,
    put_rows,
    refused_unless,
)
from gracetune.config.draft import Path
from gracetune.config.spelling import misspelt

_ADAPTERS_ONLY = "nothing: adapters that take images are not trained here"


def negative(value: Any) -> Any:
    """Upstream writes false for no negative prompt."""
    return "" if value is False else value


def seed(value: Any) -> Any:
    """Upstream writes -1 for a random seed."""
    value = number(value)
    return None if value == -1 else value


_REFERENCES = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
_SHARED: dict[str, Row] = {
    "width": Put(("width",), number),
    "height": Put(("height",), number),
    "num_frames": Put(("num_frames",), number),
    "seed": Put(("seed",), seed),
    "guidance_scale": Put(("guidance",), number),
    "sample_steps": Put(("steps",), number),
    "neg": Put(("negative_prompt",), negative),
    "duration": refused_unless(None, "nothing: ai-toolkit's audio models are not trained here"),
    "do_cfg_norm": refused_unless(False, "false: samples are drawn without rescaling the guidance"),
}

SAMPLE: Table = {
    **_SHARED,
    "sample_every": Known.BY_HAND,
    "prompts": Known.BY_HAND,
    "samples": Known.BY_HAND,
    "network_multiplier": Known.BY_HAND,
    "sample_start_step": Known.BY_HAND,
    "fps": Put(("fps",), number),
    "walk_seed": Put(("walk_seed",)),
    "guidance_rescale": Put(("guidance_rescale",), number),
    "sampler": Known.HARMLESS,  # each family is sampled with its own scheduler
    "format": Known.HARMLESS,
    "adapter_conditioning_scale": Known.HARMLESS,
    "refiner_start_at": Known.HARMLESS,
    "extra_values": Refused(_ADAPTERS_ONLY, ([],)),
}
"""Below `validation` of a `RunConfig`."""

ITEM: Table = {
    **_SHARED,
    **dict.fromkeys(_REFERENCES, Known.BY_HAND),
    "prompt": Known.BY_HAND,
    "fps": Known.BY_HAND,
    "network_multiplier": Put(("adapter_strength",), number),
    "ctrl_idx": Known.HARMLESS,
}
"""Below one of `validation.prompts`."""

_DEFAULTS = {"width": 512, "height": 512, "num_frames": 1, "fps": 16, "seed": 0, "guidance": 7.0, "steps": 20}
_SAMPLE_EVERY = 100

# Upstream's flags inside a prompt, as keys of a sample.
_FLAGS = {
    "n": "neg", "w": "width", "h": "height", "d": "seed", "seed": "seed", "l": "guidance_scale",
    "cfg": "guidance_scale", "s": "sample_steps", "steps": "sample_steps", "m": "network_multiplier",
    "network_multiplier": "network_multiplier", "frames": "num_frames", "num_frames": "num_frames", "fps": "fps",
    **{name: name for name in (*_REFERENCES, "ctrl_idx")},
}  # fmt: skip
_REFUSED_FLAGS = {
    "p2": "nothing: both of SDXL's text encoders get the same prompt",
    "n2": "nothing: both of SDXL's text encoders get the same prompt",
    "gr": "nothing: guidance_rescale is set once, in `sample`",
    "a": _ADAPTERS_ONLY,
    "ev": _ADAPTERS_ONLY,
    "extra_values": _ADAPTERS_ONLY,
    "ref": "nothing: SDXL's refiner is not used here",
}
_FLAG = re.compile(r"--([A-Za-z_]\w*)(?=\s|$)")


def read_samples(reading: Reading, process: Block, trigger: Any) -> None:
    """Prompts from `sample`, or from `validation` where `sample` has none."""
    block = block_of(reading, process.get("sample"), process.key("sample"))
    fallback = block_of(reading, process.get("validation"), process.key("validation"))
    if not _items(block) and _items(fallback):
        reading.draft.note(f"{block.prefix} has no prompts: {fallback.prefix} is used")
        check(reading, block, SAMPLE)
        block = fallback
    elif process.get("validation") is not None:
        reading.harmless.append(fallback.prefix)
    check(reading, block, SAMPLE)
    put_rows(reading, block, SAMPLE, ("validation",))
    for name, value in _DEFAULTS.items():
        reading.default(("validation", name), value)
    _rhythm(reading, block)
    _prompts(reading, block, trigger)


def _items(block: Block) -> Any:
    """Upstream looks at `prompts` only where there are no `samples`."""
    return block.get("samples") if block.get("samples") is not None else block.get("prompts")


def _rhythm(reading: Reading, block: Block) -> None:
    if "sample_every" not in block.values:
        reading.default(("validation", "every_steps"), _SAMPLE_EVERY)
    elif block.get("sample_every"):
        reading.put_count(("validation", "every_steps"), block.get("sample_every"), block.key("sample_every"))
    else:
        reading.put(("validation", "every_steps"), None, block.key("sample_every"))
    if block.get("sample_start_step"):
        reading.draft.note(f"{block.key('sample_start_step')}: not used: samples are drawn from the first round on")


def _prompts(reading: Reading, block: Block, trigger: Any) -> None:
    items, name = _items(block), "samples" if block.get("samples") is not None else "prompts"
    if name == "samples" and block.get("prompts"):
        reading.draft.note(f"{block.key('prompts')}: not used, as in ai-toolkit, because `samples` is there")
    if not items:
        reading.draft.note(f"{block.prefix} has no prompts and there is no `validation` block: no samples are drawn")
        return
    if not isinstance(items, list):
        reading.draft.problem(block.key(name), items, "a list of prompts", "write one prompt a line, each after `- `")
        return
    for index, item in enumerate(items):
        prefix = f"{block.key(name)}[{index}]"
        plain = Block({"prompt": item}, prefix, {"prompt": prefix})
        sample = plain if name == "prompts" else block_of(reading, item, prefix)
        _prompt(reading, _with_flags(reading, sample, trigger), index, block)


def _with_flags(reading: Reading, item: Block, trigger: Any) -> Block:
    """The sample with the flags of its prompt taken out of the text; they win over the other keys."""
    prompt = item.get("prompt")
    if not isinstance(prompt, str):
        return item
    if isinstance(trigger, str):
        prompt = prompt.replace("[trigger]", trigger)
    text, *pieces = _FLAG.split(prompt)
    found: dict[str, Any] = {}
    keys = dict(item.written_as)
    for flag, content in zip(pieces[::2], pieces[1::2], strict=True):
        key = f"{item.prefix} --{flag}"
        if flag in _FLAGS:
            found[_FLAGS[flag]] = _content(_FLAGS[flag])(content.strip())
            keys[_FLAGS[flag]] = key
        elif flag in _REFUSED_FLAGS:
            reading.draft.refuse(key, content.strip(), _REFUSED_FLAGS[flag], "remove the flag from the prompt")
        else:
            hint = misspelt(flag, _FLAGS, "remove it, or put a space after the dashes", write="--{}")
            reading.draft.problem(key, content.strip(), f"one of --{', --'.join(_FLAGS)}", hint)
    return Block({**item.values, **found, "prompt": text.strip()}, item.prefix, keys)


def _content(name: str) -> Callable[[str], Any]:
    return str if name in ("neg", *_REFERENCES) else number


def _prompt(reading: Reading, item: Block, index: int, block: Block) -> None:
    root: Path = ("validation", "prompts", index)
    check(reading, item, ITEM)
    put_rows(reading, item, ITEM, root)
    reading.put((*root, "prompt"), item.get("prompt"), item.key("prompt"))
    first = "ctrl_img" if item.get("ctrl_img") is not None else "ctrl_img_1"
    references = [name for name in (first, "ctrl_img_2", "ctrl_img_3") if item.get(name)]
    for place, name in enumerate(references):
        reading.put((*root, "references", place), item.get(name), item.key(name))
    if item.get("fps") is not None and number(item.get("fps")) != reading.draft.get(("validation", "fps")):
        reading.draft.refuse(item.key("fps"), item.get("fps"), "the fps of all samples: set it in `sample`")
    strength = block.get("network_multiplier")
    if item.get("network_multiplier") is None and strength is not None:
        reading.put((*root, "adapter_strength"), number(strength), block.key("network_multiplier"))

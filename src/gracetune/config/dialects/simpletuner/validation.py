"""Reads SimpleTuner's `validation_*` and `eval_*` options: generated samples and held-out loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.files import read_sidecar
from gracetune.config.dialects.simpletuner.keys import PEER
from gracetune.config.dialects.table import Key, KeyRule, KeyTable, noted, read_elsewhere, report_unknown
from gracetune.config.dialects.values import (
    as_flag,
    as_number,
    as_text,
    from_json,
    inverse,
    is_number,
    is_off,
    positive_or_none,
)
from gracetune.config.draft import Origin, Path
from gracetune.config.families import names_of
from gracetune.config.family_names import SimpleTunerNames


def _whole(value: Any) -> Any:
    """Convert an interval in epochs, which can be written as 1.0, to an integer."""
    number = positive_or_none(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


_DEFAULTS: dict[str, Any] = {
    "every_steps": 100,
    "guidance": 7.5,
    "steps": 30,
    "negative_prompt": "blurry, cropped, ugly",
}
_DEFAULT_SIZE = (256, 256)


def _seed(options: PeerBlock, family: str) -> None:
    random = "validation_randomize" if options.is_on("validation_randomize") else "validation_seed"
    if random != "validation_seed" or as_number(options.get("validation_seed")) == -1:
        options.assign(("validation", "seed"), None, random)


def _guidance(options: PeerBlock, family: str) -> None:
    options.put(
        "validation_guidance", ("validation", "guidance"), lambda value: _our_guidance(as_number(value), family)
    )


def _our_guidance(guidance: Any, family: str) -> Any:
    """SimpleTuner's guidance as gracetune counts it, where 1 means none."""
    names = names_of(family).simpletuner if family else SimpleTunerNames()
    return guidance + names.guidance_without if is_number(guidance) and guidance > names.guided_above else guidance


def _defaults(options: PeerBlock, family: str) -> None:
    defaults = {**_DEFAULTS, "guidance": _our_guidance(_DEFAULTS["guidance"], family)}
    for field, value in defaults.items():
        if field != "every_steps" or "validation_epoch_interval" not in options:
            options.default(("validation", field), value)


def _held_out_loss(options: PeerBlock, family: str) -> None:
    if options.switch("eval_loss_disable"):
        options.take("eval_loss_disable")
    else:
        options.put("eval_steps_interval", ("validation", "loss_every_steps"), positive_or_none)


def _prompts(options: PeerBlock, family: str) -> None:
    sizes = _sizes(options)
    if len(sizes) == 1:
        for field, pixels in zip(("width", "height"), sizes[0], strict=True):
            options.draft.put(("validation", field), pixels, _size_origin(options))
    index = 0
    for prompt, origin in _wanted(options):
        for size in sizes if len(sizes) > 1 else (None,):
            entry = prompt if size is None else {**prompt, "width": size[0], "height": size[1]}
            for field, value in entry.items():
                path: Path = ("validation", "prompts", index, field)
                options.draft.put(path, value, _field_origin(options, field, value, origin))
            index += 1


def _field_origin(options: PeerBlock, field: str, value: Any, origin: Origin) -> Origin:
    if field in ("width", "height"):
        return _size_origin(options)
    shared = "validation_lycoris_strength"
    if field == "adapter_strength" and shared in options and value == as_number(options.get(shared)):
        return options.origin(shared)
    return origin


def _size_origin(options: PeerBlock) -> Origin:
    given = "validation_resolution" in options
    return options.origin("validation_resolution") if given else Origin("default", "validation_resolution", PEER)


def _sizes(options: PeerBlock) -> list[tuple[int, int]]:
    """Parse `1024`, `1024x768`, or several separated by commas.

    A number n below 128 is what SimpleTuner calls megapixels: below 2 it is 1024 pixels a side, otherwise about 1000 n.
    """
    value = options.get("validation_resolution")
    if value is None:
        return [_DEFAULT_SIZE]
    parts = [str(part).strip().lower() for part in (value if isinstance(value, list) else str(value).split(","))]
    sizes = [_size(part) for part in parts if part]
    if not sizes or None in sizes or isinstance(value, Mapping | bool):
        options.problem("validation_resolution", "a size such as 1024x1024, or several with commas",
                        'write "1024x1024"')  # fmt: skip
        return [_DEFAULT_SIZE]
    return [size for size in sizes if size is not None]


def _size(text: str) -> tuple[int, int] | None:
    sides = [as_number(side) for side in text.split("x")]
    if len(sides) > 2 or not all(is_number(side) and 0 < side < 1e6 for side in sides):
        return None
    if len(sides) == 2:
        return int(sides[0]), int(sides[1])
    pixels = sides[0] if sides[0] >= 128 else 1024 if int(sides[0]) <= 1 else int(sides[0]) * 1000 // 8 * 8
    return int(pixels), int(pixels)


PromptEntries = list[tuple[dict[str, Any], Origin]]


def _wanted(options: PeerBlock) -> PromptEntries:
    wanted: PromptEntries = []
    if "user_prompt_library" in options:
        wanted += _library(options)
    prompt = as_text(options.get("validation_prompt"))
    if prompt not in (None, "", "None"):
        wanted.append(({"prompt": prompt}, options.origin("validation_prompt")))
    wanted += _inputs(options)
    if wanted and "validation_lycoris_strength" in options:
        strength = as_number(options.take("validation_lycoris_strength"))
        wanted = [({"adapter_strength": strength, **entry}, origin) for entry, origin in wanted]
    return wanted


_TEXT_KEYS = ("prompt", "caption", "tags")
PROMPT: KeyTable[None] = KeyTable(
    *read_elsewhere("prompt caption tags adapter_strength"),
    *noted("is not rendered into sample images here", "bbox_entities bbox_keyframes lyrics"),
)
"""One prompt of the file that `user_prompt_library` names."""
INPUT: KeyTable[None] = KeyTable(*read_elsewhere("path prompt"), expected="path or prompt")
"""One entry of `validation_input`."""


def _library(options: PeerBlock) -> PromptEntries:
    document = read_sidecar(options, "user_prompt_library", "a JSON file of prompts")
    if document is None:
        return []
    data, name = document.data, document.name
    if not isinstance(data, Mapping):
        options.draft.problem(
            "(file)", data, "a mapping of names to prompts", 'write {"portrait": "a photo of …"}', name
        )
        return []
    wanted: PromptEntries = []
    for key, entry in data.items():
        origin = Origin("file", str(key), name)
        if isinstance(entry, str):
            wanted.append(({"prompt": entry}, origin))
        elif isinstance(entry, Mapping) and any(text in entry for text in _TEXT_KEYS):
            entry_block = replace(options.without_nulls({}, str(key)), elsewhere=name)
            wanted.append((_entry(entry, entry_block), origin))
        else:
            options.draft.problem(str(key), entry, "a prompt, or a mapping with `prompt`", 'write "a photo of …"', name)
    return wanted


def _entry(entry: Mapping[Any, Any], entry_block: PeerBlock) -> dict[str, Any]:
    block = replace(entry_block, values={str(field): value for field, value in entry.items()})
    for field, value in block.values.items():
        if field not in PROMPT:
            report_unknown(block, field, PROMPT)
        elif PROMPT.keys[field].note and not is_off(value):
            block.note(f"{block.file}: {block.key(field)} {PROMPT.keys[field].note}")
    found: dict[str, Any] = {"prompt": next(entry[text] for text in _TEXT_KEYS if text in entry)}
    if entry.get("adapter_strength") is not None:
        found["adapter_strength"] = as_number(entry["adapter_strength"])
    return found


def _inputs(options: PeerBlock) -> PromptEntries:
    """Read `validation_input`: input images, each with its prompt."""
    entries = from_json(options.take("validation_input"))
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        options.problem("validation_input", "a list of mappings with `path` and `prompt`",
                        'write [{"path": "start.png", "prompt": "…"}]')  # fmt: skip
        return []
    wanted: PromptEntries = []
    for index, entry in enumerate(entries):
        key = f"{options.key('validation_input')}[{index}]"
        for field in entry:
            if field not in INPUT:
                hint = f"remove `{field}`"
                options.draft.problem(f"{key}.{field}", entry[field], INPUT.expected, hint, options.file)
        if not all(isinstance(entry.get(field), str) for field in INPUT):
            options.draft.problem(key, entry, "a mapping with the texts `path` and `prompt`",
                          'write {"path": "start.png", "prompt": "…"}', options.file)  # fmt: skip
            continue
        origin = Origin("file", key, options.file)
        wanted.append(({"prompt": entry["prompt"], "references": [entry["path"]]}, origin))
    return wanted


VALIDATION: KeyTable[str] = KeyTable(
    Key("validation_step_interval", ("validation", "every_steps"), positive_or_none),
    Key("validation_epoch_interval", ("validation", "every_epochs"), _whole),
    Key("validation_on_startup", ("validation", "at_start"), as_flag),
    Key("validation_disable", ("validation", "enabled"), inverse),
    Key("validation_seed", ("validation", "seed"), as_number),
    Key("validation_guidance", ("validation", "guidance"), as_number),
    Key("validation_guidance_rescale", ("validation", "guidance_rescale"), as_number),
    Key("validation_num_inference_steps", ("validation", "steps"), as_number),
    Key("num_validation_images", ("validation", "images_per_prompt"), as_number),
    Key("validation_num_video_frames", ("validation", "num_frames"), as_number),
    Key("framerate", ("validation", "fps"), as_number),
    Key("validation_negative_prompt", ("validation", "negative_prompt"), as_text),
    KeyRule(_seed, "validation_seed"),
    KeyRule(_guidance, "validation_guidance"),
    KeyRule(_defaults, "validation_epoch_interval"),
    KeyRule(_held_out_loss, "eval_steps_interval eval_loss_disable"),
    KeyRule(
        _prompts,
        "validation_prompt user_prompt_library validation_input validation_resolution validation_lycoris_strength",
    ),
)

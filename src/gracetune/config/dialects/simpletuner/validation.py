"""Sample images and held-out loss: SimpleTuner's `validation_*` and `eval_*` options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracetune.config.dialects.simpletuner.values import (
    PEER,
    Converter,
    Options,
    as_flag,
    as_number,
    as_text,
    from_json,
    inverse,
    is_number,
    is_off,
    not_zero,
    read_sidecar,
)
from gracetune.config.draft import Draft, Origin, Path
from gracetune.config.spelling import misspelt


def _whole(value: Any) -> Any:
    """An interval in epochs may be written 1.0."""
    number = not_zero(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


_ROWS: dict[str, tuple[str, Converter]] = {
    "validation_step_interval": ("every_steps", not_zero),
    "validation_epoch_interval": ("every_epochs", _whole),
    "validation_on_startup": ("at_start", as_flag),
    "validation_disable": ("enabled", inverse),
    "validation_seed": ("seed", as_number),
    "validation_guidance": ("guidance", as_number),
    "validation_guidance_rescale": ("guidance_rescale", as_number),
    "validation_num_inference_steps": ("steps", as_number),
    "num_validation_images": ("images_per_prompt", as_number),
    "validation_num_video_frames": ("num_frames", as_number),
    "framerate": ("fps", as_number),
    "validation_negative_prompt": ("negative_prompt", as_text),
}
_DEFAULTS: dict[str, Any] = {
    "every_steps": 100,
    "guidance": 7.5,
    "steps": 30,
    "negative_prompt": "blurry, cropped, ugly",
}
_DEFAULT_SIZE = (256, 256)


def read_validation(options: Options, draft: Draft) -> None:
    for name, (field, convert) in _ROWS.items():
        options.put(draft, name, ("validation", field), convert)
    drawn_anew = "validation_randomize" if options.is_on("validation_randomize") else "validation_seed"
    if drawn_anew != "validation_seed" or as_number(options.get("validation_seed")) == -1:
        draft.put(("validation", "seed"), None, options.origin(drawn_anew))
    for field, value in _DEFAULTS.items():
        if field != "every_steps" or "validation_epoch_interval" not in options:
            draft.default(("validation", field), value, PEER)
    if options.switch(draft, "eval_loss_disable"):
        options.take("eval_loss_disable")
    else:
        options.put(draft, "eval_steps_interval", ("validation", "loss_every_steps"), not_zero)
    _prompts(options, draft)


def _prompts(options: Options, draft: Draft) -> None:
    sizes = _sizes(options, draft)
    if len(sizes) == 1:
        for field, pixels in zip(("width", "height"), sizes[0], strict=True):
            draft.put(("validation", field), pixels, _size_origin(options))
    index = 0
    for prompt, origin in _wanted(options, draft):
        for size in sizes if len(sizes) > 1 else (None,):
            entry = prompt if size is None else {**prompt, "width": size[0], "height": size[1]}
            for field, value in entry.items():
                path: Path = ("validation", "prompts", index, field)
                draft.put(path, value, _field_origin(options, field, value, origin))
            index += 1


def _field_origin(options: Options, field: str, value: Any, origin: Origin) -> Origin:
    if field in ("width", "height"):
        return _size_origin(options)
    shared = "validation_lycoris_strength"
    if field == "adapter_strength" and shared in options and value == as_number(options.get(shared)):
        return options.origin(shared)
    return origin


def _size_origin(options: Options) -> Origin:
    given = "validation_resolution" in options
    return options.origin("validation_resolution") if given else Origin("default", "validation_resolution", PEER)


def _sizes(options: Options, draft: Draft) -> list[tuple[int, int]]:
    """`1024`, `1024x768`, or several with commas; below 128 it is a number of megapixels."""
    value = options.get("validation_resolution")
    if value is None:
        return [_DEFAULT_SIZE]
    parts = [str(part).strip().lower() for part in (value if isinstance(value, list) else str(value).split(","))]
    sizes = [_size(part) for part in parts if part]
    if not sizes or None in sizes or isinstance(value, Mapping | bool):
        options.problem(draft, "validation_resolution", "a size such as 1024x1024, or several with commas",
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


Wanted = list[tuple[dict[str, Any], Origin]]


def _wanted(options: Options, draft: Draft) -> Wanted:
    wanted: Wanted = []
    if "user_prompt_library" in options:
        wanted += _library(options, draft)
    prompt = as_text(options.get("validation_prompt"))
    if prompt not in (None, "", "None"):
        wanted.append(({"prompt": prompt}, options.origin("validation_prompt")))
    wanted += _inputs(options, draft)
    if wanted and "validation_lycoris_strength" in options:
        strength = as_number(options.take("validation_lycoris_strength"))
        wanted = [({"adapter_strength": strength, **entry}, origin) for entry, origin in wanted]
    return wanted


_TEXT_KEYS = ("prompt", "caption", "tags")
_ENTRY_KEYS = (*_TEXT_KEYS, "adapter_strength", "bbox_entities", "bbox_keyframes", "lyrics")


def _library(options: Options, draft: Draft) -> Wanted:
    document = read_sidecar(draft, options, "user_prompt_library", "a JSON file of prompts")
    if document is None:
        return []
    data, name = document.data, document.name
    if not isinstance(data, Mapping):
        draft.problem("(file)", data, "a mapping of names to prompts", 'write {"portrait": "a photo of …"}', name)
        return []
    wanted: Wanted = []
    for key, entry in data.items():
        origin = Origin("file", str(key), name)
        if isinstance(entry, str):
            wanted.append(({"prompt": entry}, origin))
        elif isinstance(entry, Mapping) and any(text in entry for text in _TEXT_KEYS):
            wanted.append((_entry(entry, str(key), draft, name), origin))
        else:
            draft.problem(str(key), entry, "a prompt, or a mapping with `prompt`", 'write "a photo of …"', name)
    return wanted


def _entry(entry: Mapping[Any, Any], key: str, draft: Draft, file: str) -> dict[str, Any]:
    for field, value in entry.items():
        if field not in _ENTRY_KEYS:
            hint = misspelt(field, _ENTRY_KEYS)
            draft.problem(f"{key}.{field}", value, f"one of {', '.join(_ENTRY_KEYS)}", hint, file)
        elif field not in (*_TEXT_KEYS, "adapter_strength") and not is_off(value):
            draft.note(f"{file}: {key}.{field} is not drawn into sample images here")
    found: dict[str, Any] = {"prompt": next(entry[text] for text in _TEXT_KEYS if text in entry)}
    if entry.get("adapter_strength") is not None:
        found["adapter_strength"] = as_number(entry["adapter_strength"])
    return found


def _inputs(options: Options, draft: Draft) -> Wanted:
    """Pictures to start from, each with its prompt."""
    entries = from_json(options.take("validation_input"))
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        options.problem(draft, "validation_input", "a list of mappings with `path` and `prompt`",
                        'write [{"path": "start.png", "prompt": "…"}]')  # fmt: skip
        return []
    wanted: Wanted = []
    for index, entry in enumerate(entries):
        key = f"{options.key('validation_input')}[{index}]"
        for field in entry:
            if field not in ("path", "prompt"):
                draft.problem(f"{key}.{field}", entry[field], "path or prompt", f"remove `{field}`", options.file)
        if not all(isinstance(entry.get(field), str) for field in ("path", "prompt")):
            draft.problem(key, entry, "a mapping with the texts `path` and `prompt`",
                          'write {"path": "start.png", "prompt": "…"}', options.file)  # fmt: skip
            continue
        origin = Origin("file", key, options.file)
        wanted.append(({"prompt": entry["prompt"], "references": [entry["path"]]}, origin))
    return wanted

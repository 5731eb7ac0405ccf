"""Open a captioning model by name, folder or hub id, and ask it for captions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from gracetune.captioning.kinds import KINDS, MOST_TOKENS, CaptionModelKind, Style
from gracetune.config.path_status import inspect_path
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem
from gracetune.hub.access import HubAccess
from gracetune.models.hub_download import HubFetcher
from gracetune.models.source import read_json
from gracetune.storage.safetensors_headers import open_weights
from gracetune.storage.transfer import OnFetched

MAX_PIXELS: Final = 1024 * 1024
"""Larger images are scaled down. Qwen3-VL would turn a photo of 12 megapixels into 12,000 tokens."""
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_SENTENCE: Final = re.compile(r".*[.!?](?=[\s\"')\]]|$)", re.DOTALL)


@dataclass(frozen=True)
class GeneratedCaption:
    """The model's output for one image, tidied to one line. May be empty."""

    text: str
    cut: bool
    """The output reached the limit of the style. It ends with its last whole sentence or tag, if it has one."""


class CaptionModel:
    """A model, its processor, and its kind."""

    def __init__(self, kind: CaptionModelKind, model: Any, processor: Any) -> None:
        self.kind, self._model, self._processor = kind, model, processor

    def captions(self, images: Sequence[Image.Image], style: Style) -> list[GeneratedCaption]:
        """Caption RGB images as one batch. Nothing is sampled: an image always gets the same caption."""
        inputs = self.kind.inputs(self._processor, [_scaled(image) for image in images], self.kind.prompts[style])
        inputs = inputs.to(self._model.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        limit = MOST_TOKENS[style]
        with torch.inference_mode():
            tokens = self._model.generate(
                **inputs, max_new_tokens=limit, num_beams=self.kind.beams, do_sample=False, temperature=None,
                top_p=None, top_k=None,
            )  # fmt: skip
        # An encoder-decoder generates its start token first, a decoder repeats the whole prompt.
        begin = 1 if self._model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        generated = tokens[:, begin:]
        texts = self._processor.batch_decode(generated, skip_special_tokens=True)
        return [
            tidied(text, style, cut=self._length(row) >= limit)
            for text, row in zip(texts, generated.tolist(), strict=True)
        ]

    def _length(self, row: list[int]) -> int:
        """Number of tokens up to the end token, including it."""
        ends = self._model.generation_config.eos_token_id
        stops = set(ends) if isinstance(ends, list) else {ends}
        return next((number for number, token in enumerate(row, 1) if token in stops), len(row))


def tidied(text: str, style: Style, *, cut: bool) -> GeneratedCaption:
    """The output on one line, because each line of a caption file is a caption. A tag is kept where it occurs first."""
    line = " ".join("".join(letter if letter.isprintable() and letter != "\ufffd" else " " for letter in text).split())
    if style == "tags":
        tags = [tag.strip(" .\"'") for tag in line.split(",")]
        if cut and len(tags) > 1:
            tags.pop()
        once: dict[str, str] = {}
        for tag in filter(None, tags):
            once.setdefault(tag.lower(), tag)
        return GeneratedCaption(", ".join(once.values()), cut)
    whole = _SENTENCE.match(line) if cut else None
    return GeneratedCaption(whole[0] if whole else line, cut)


def _scaled(image: Image.Image) -> Image.Image:
    factor = (MAX_PIXELS / (image.width * image.height)) ** 0.5
    if factor >= 1:
        return image
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return image.resize(size, Image.Resampling.LANCZOS)


# -- opening ----------------------------------------------------------------------------------------------------------


def caption_device(name: str) -> torch.device:
    """The device `--device` names; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if found is None:
        raise ConfigError([Problem("--device", name, "auto, cpu, cuda or cuda:N", "--device auto")])
    if name != "cpu" and int(found[1] or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        expected = f"one of the {count} GPUs here" if count else "cpu: torch finds no GPU here"
        raise ConfigError([Problem("--device", name, expected, "--device auto")])
    return torch.device(name)


def open_caption_model(
    name: str,
    style: Style,
    device: torch.device,
    access: HubAccess,
    *,
    report: Callable[[str], None] = lambda text: None,
    on_fetched: Callable[[str], OnFetched] = lambda name: lambda done, total: None,
) -> CaptionModel:
    """Open a model. The style is checked before anything is downloaded, if the kind is known from the name."""
    known = next((kind for kind in KINDS if kind.name == name.lower()), None)
    if known is not None:
        _check_style(known, style)
    folder = _folder(name if known is None else known.published, HubFetcher(access, report, on_fetched))
    kind = _kind_of(folder)
    _check_style(kind, style)
    return CaptionModel(kind, _load(folder, device), kind.open_processor(folder))


def _folder(name: str, fetch: HubFetcher) -> Path:
    status = inspect_path(name)
    if status.kind == "folder":
        return status.path
    if status.kind == "nothing" and _HUB_ID.fullmatch(name):
        return fetch("--model", name, None, None)
    names = [kind.name for kind in KINDS]
    near = nearest(name, names) or names[0]
    raise ConfigError(
        [Problem("--model", f"{name}, {status.words}", f"{', '.join(names)}, a model's folder, or a hub id OWNER/NAME",
                 f"--model {near}")]
    )  # fmt: skip


def _kind_of(folder: Path) -> CaptionModelKind:
    """The kind of the model in a folder."""
    expected = (
        f"the folder of a model of one of these types: {', '.join(one for kind in KINDS for one in kind.model_types)}"
    )
    if inspect_path(folder / "config.json").kind != "file":
        raise ConfigError([Problem("--model", f"{folder}, without config.json", expected, f"--model {KINDS[0].name}")])
    config = read_json(folder / "config.json")
    found = config.get("model_type")
    kind = next((kind for kind in KINDS if found in kind.model_types), None)
    if kind is None:
        raise ConfigError([Problem("--model", f"{folder}, of type {found}", expected, f"--model {KINDS[0].name}")])
    if "auto_map" in config:
        text = f"{folder}, whose config.json asks for Python code of its own (auto_map), which is not run"
        raise ConfigError(
            [Problem("--model", text, "the model in transformers' own format", f"--model {kind.published}")]
        )
    return kind


def _check_style(kind: CaptionModelKind, style: Style) -> None:
    if style not in kind.prompts:
        others = ", ".join(one.name for one in KINDS if style in one.prompts)
        hint = f"--style {next(iter(kind.prompts))}, or --model with one of {others}"
        raise ConfigError(
            [Problem("--style", f"{style}, which {kind.name} cannot write", ", ".join(kind.prompts), hint)]
        )


def _load(folder: Path, device: torch.device) -> Any:
    files = sorted(folder.glob("*.safetensors"))
    again = "download the model again"
    if not files:
        raise ConfigError(
            [Problem("--model", f"{folder}, without *.safetensors", "weights in safetensors format", again)]
        )
    for file in files:
        open_weights(file)  # reports a damaged file with our message, before transformers reads it
    options: dict[str, Any] = {"device_map": {"": device}} if device.type != "cpu" else {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    read: Any = AutoModelForImageTextToText.from_pretrained  # its annotation leaves out the loading info
    model, info = read(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
    )
    missing = sorted(info["missing_keys"])
    if missing:
        names = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
        raise ConfigError(
            [Problem("--model", f"{folder}, without the tensor {names}", "all weights of the model", again)]
        )
    return model.eval()

"""The kinds of captioning models: one record each, with its prompts and how it receives them.

Imports neither torch nor transformers, because the command's help reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

Style = Literal["short", "long", "tags"]
STYLES: tuple[Style, ...] = get_args(Style)
MOST_TOKENS: dict[Style, int] = {"short": 96, "long": 512, "tags": 256}
"""Limit of each style, in tokens. Longer output is cut after its last sentence or tag."""


@dataclass(frozen=True)
class CaptionModelKind:
    """One kind of model."""

    name: str
    """What `--model` accepts for the published model."""
    published: str
    """Hub id of the published model."""
    model_types: tuple[str, ...]
    """The `model_type` of config.json."""
    prompts: Mapping[Style, str]
    """A style that is missing is not supported."""
    open_processor: Callable[[Path], Any]
    inputs: Callable[[Any, Sequence[Image], str], Any]
    """Tensors for `generate` from the processor, images and a prompt."""
    beams: int = 1


def _florence_processor(folder: Path) -> Any:
    from transformers import Florence2Processor

    return Florence2Processor.from_pretrained(folder, local_files_only=True)


def _llava_processor(folder: Path) -> Any:
    from transformers import LlavaProcessor

    return _left_padded(LlavaProcessor.from_pretrained(folder, local_files_only=True))


def _qwen_processor(folder: Path) -> Any:
    from gracetune.models.common.qwen3_vl_processor import Qwen3ImageProcessor

    return _left_padded(Qwen3ImageProcessor.from_pretrained(folder, local_files_only=True))


def _left_padded(processor: Any) -> Any:
    """Pad on the left, so that every caption of a batch begins right after its prompt."""
    processor.tokenizer.padding_side = "left"
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


def _task_inputs(processor: Any, images: Sequence[Image], prompt: str) -> Any:
    """Florence-2's processor replaces a task's name by the sentence the model was trained with."""
    return processor(text=[prompt] * len(images), images=list(images), padding=True, return_tensors="pt")


def _chat_inputs(processor: Any, images: Sequence[Image], prompt: str) -> Any:
    text = chat_text(processor, prompt)
    begun = text.startswith(processor.tokenizer.bos_token or "\0")  # the tokenizer would add a second one
    options: dict[str, Any] = {"add_special_tokens": False} if begun else {}
    return processor(
        text=[text] * len(images), images=[[image] for image in images], padding=True, return_tensors="pt", **options
    )


def chat_text(processor: Any, prompt: str) -> str:
    """The conversation as text, with one image placeholder.

    The content is text in some templates, which add the image themselves (JoyCaption), and a list of parts in others
    (Qwen3-VL). Given the wrong one, a template drops the image or fails.
    """
    from jinja2 import TemplateError

    from gracetune.errors import ConfigError, Problem

    for content in (prompt, [{"type": "image"}, {"type": "text", "text": prompt}]):
        system: Any = SYSTEM if isinstance(content, str) else [{"type": "text", "text": SYSTEM}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        try:
            text = str(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError):  # transformers raises ValueError without a template
            continue
        if text.count(processor.image_token) == 1:
            return text
    found = f"a chat template without exactly one {processor.image_token} per image"
    hint = "download the model's tokenizer_config.json and chat_template files again, or use another model"
    raise ConfigError([Problem("--model", found, "a chat template for images", hint)])


SYSTEM = "You are a helpful image captioner."
"""JoyCaption was trained with this system message."""

KINDS: tuple[CaptionModelKind, ...] = (
    CaptionModelKind(
        name="florence-2",
        published="florence-community/Florence-2-large",
        model_types=("florence2",),
        prompts={"short": "<CAPTION>", "long": "<MORE_DETAILED_CAPTION>"},
        open_processor=_florence_processor,
        inputs=_task_inputs,
        beams=3,  # of its model card
    ),
    CaptionModelKind(
        name="qwen3-vl",
        published="Qwen/Qwen3-VL-8B-Instruct",
        model_types=("qwen3_vl", "qwen3_vl_moe"),
        prompts={
            "short": "Caption this image in one sentence of at most 25 words: the subject, what it does, and where. "
            "Answer with the caption only.",
            "long": "Caption this image in one paragraph: the subject and its appearance, what happens, the setting, "
            "the light, the colors, the composition and the medium. Mention only what is visible. "
            "Answer with the caption only.",
            "tags": "List 10 to 30 short tags for this image, separated by commas, the most important first: subject, "
            "appearance, action, setting, light, medium. Answer with the tags only.",
        },
        open_processor=_qwen_processor,
        inputs=_chat_inputs,
    ),
    CaptionModelKind(
        name="joycaption",
        published="fancyfeast/llama-joycaption-beta-one-hf-llava",
        model_types=("llava",),
        prompts={  # as published: the model was trained with these sentences
            "short": "Write a short detailed description for this image.",
            "long": "Write a long detailed description for this image.",
            "tags": "Write a list of Booru-like tags for this image.",
        },
        open_processor=_llava_processor,
        inputs=_chat_inputs,
    ),
)
"""All supported kinds. The first one is the default: it is small enough for any machine."""

"""Tiny Qwen-Image models: the published classes, prompt templates and scale factors, with narrow layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part, save
from gracetune.models.common.tiny_qwen import tokenizer_for_templates
from gracetune.models.qwen_image.load import ImageProcessor

_HEAD = WIDTH // 2
_PIXELS_PER_TOKEN = 28
"""Pixels per side of one image token of the text encoder: 2 x 2 patches of 14."""
_MOST_IMAGE_TOKENS = 16


@dataclass(frozen=True)
class _Recipe:
    pipeline: Any
    edits: bool = False
    zero_cond_t: bool = False


_RECIPES = {
    "t2i": _Recipe(QwenImagePipeline),
    "t2i-2512": _Recipe(QwenImagePipeline),
    "edit": _Recipe(QwenImageEditPipeline, edits=True),
    "edit-2509": _Recipe(QwenImageEditPlusPipeline, edits=True),
    "edit-2511": _Recipe(QwenImageEditPlusPipeline, edits=True, zero_cond_t=True),
}


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Write the tiny model of one flavour into `folder`, in diffusers' layout."""
    recipe, weights, tokenizer = _RECIPES[flavour], TinyWeights(seed), qwen_tokenizer()
    parts: dict[str, Any] = {
        "scheduler": _scheduler(),
        "vae": weights.build(AutoencoderKLQwenImage, base_dim=8, num_res_blocks=1),
        "text_encoder": _text_encoder(weights, tokenizer),
        "tokenizer": tokenizer,
        "transformer": _transformer(weights, recipe),
    }
    if not recipe.edits:
        return save(build_part(recipe.pipeline, **parts), folder)
    parts["processor"] = ImageProcessor(_image_processor(), tokenizer)
    return save(build_part(recipe.pipeline, **parts), folder, finish=_name_the_published_processor)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer for both kinds of templates."""
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
    pipelines = (build_part(QwenImagePipeline, **parts), build_part(QwenImageEditPipeline, **parts, processor=None))
    return tokenizer_for_templates([pipeline.prompt_template_encode.replace("{}", "") for pipeline in pipelines])


def _text_encoder(weights: TinyWeights, tokenizer: Qwen2Tokenizer) -> Any:
    ids = tokenizer.get_vocab()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return weights.build(Qwen2_5_VLForConditionalGeneration, config)


def _transformer(weights: TinyWeights, recipe: _Recipe) -> Any:
    return weights.build(
        QwenImageTransformer2DModel,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=_HEAD,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=recipe.zero_cond_t,
    )


def _scheduler() -> Any:
    return build_part(
        FlowMatchEulerDiscreteScheduler,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _image_processor() -> Any:
    one_token = _PIXELS_PER_TOKEN**2
    return build_part(
        Qwen2VLImageProcessorPil,
        size={"shortest_edge": 4 * one_token, "longest_edge": _MOST_IMAGE_TOKENS * one_token},
    )


def _name_the_published_processor(folder: Path) -> None:
    """Name the class that published folders name instead of `ImageProcessor`, with all its parts."""
    index = folder / "model_index.json"
    named = json.loads(index.read_text(encoding="utf-8"))
    named["processor"] = ["transformers", Qwen2VLProcessor.__name__]
    index.write_text(json.dumps(named, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file in (folder / "processor").glob("*_config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if "processor_class" in settings:
            settings["processor_class"] = Qwen2VLProcessor.__name__
        if file.name == "processor_config.json":
            settings["video_processor"] = {"video_processor_type": "Qwen2VLVideoProcessor"}
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")

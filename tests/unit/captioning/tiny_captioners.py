"""Tiny captioning models with random weights: the classes, processors and chat templates of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    BartConfig,
    CLIPImageProcessorPil,
    Florence2Config,
    Florence2ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part

TURNS = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Like Qwen3-VL's: an image is a part of the message."""
PLAIN_TURNS = (
    "{{ bos_token }}{%- for message in messages %}{{ '[' + message['role'] + ']' }}"
    "{%- if message['role'] == 'user' %}{{ '<image>' }}{%- endif %}{{ message['content'] | trim }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}{%- endif %}"
)
"""Like JoyCaption's: the content is text, and the template adds the image."""


def write(kind: str, folder: Path) -> Path:
    """Write a model folder as `save_pretrained` does."""
    {"florence2": _florence, "qwen3_vl": _qwen, "llava": _llava}[kind](folder)
    return folder


def _tokenizer(*special: str, **options: Any) -> PreTrainedTokenizerFast:
    """One token per ASCII letter, so that all output of the model can be read."""
    alphabet = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]
    bare = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerFast = build_part(
        PreTrainedTokenizerFast, tokenizer_object=bare, bos_token="<s>", eos_token="</s>", pad_token="<pad>", **options
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def _save(
    folder: Path, model: Any, processor_class: str, tokenizer: Any, image_processor: Any, **processor: Any
) -> None:
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    settings = {"processor_class": processor_class, **processor}
    (folder / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _text(tokenizer: Any, **options: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **options,
    }


def _florence(folder: Path) -> None:
    tokenizer = _tokenizer(extra_special_tokens={"image_token": "<image>"})
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = BartConfig(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH,
        max_position_embeddings=1100,
        decoder_start_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        forced_bos_token_id=None,
        **ids,
    )
    vision = {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [8, 4],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [8, 16],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "window_size": 2,
        "projection_dim": WIDTH,
    }
    config = Florence2Config(
        text_config=text.to_dict(), vision_config=vision, image_token_id=tokenizer.convert_tokens_to_ids("<image>")
    )
    model = TinyWeights(0).build(Florence2ForConditionalGeneration, config)
    images = CLIPImageProcessorPil(size={"height": 64, "width": 64}, do_center_crop=False, image_seq_length=5)
    _save(folder, model, "Florence2Processor", tokenizer, images)


def _qwen(folder: Path) -> None:
    tokenizer = _tokenizer(
        "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
    )
    tokenizer.chat_template = TURNS
    ids = tokenizer.get_vocab()
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    vision = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=_text(tokenizer, head_dim=16, rope_parameters=rope),
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = TinyWeights(0).build(Qwen3VLForConditionalGeneration, config)
    images = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64})
    _save(folder, model, "Qwen3VLProcessor", tokenizer, images)


def _llava(folder: Path) -> None:
    tokenizer = _tokenizer("<image>")
    tokenizer.chat_template = PLAIN_TURNS
    vision = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    config = LlavaConfig(
        text_config=LlamaConfig(**_text(tokenizer)).to_dict(),
        vision_config=vision.to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    model = TinyWeights(0).build(LlavaForConditionalGeneration, config)
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    _save(
        folder,
        model,
        "LlavaProcessor",
        tokenizer,
        images,
        patch_size=16,
        vision_feature_select_strategy="full",
        image_token="<image>",
    )

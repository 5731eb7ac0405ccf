"""Tiny Qwen tokenizers and Qwen3-VL text encoders: the published classes, with narrow layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLModel

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def tokenizer_for_templates(templates: Sequence[str]) -> Qwen2Tokenizer:
    """Splits text into bytes, except that each word of the templates is one token.

    The pipelines remove their template from the encoded text by its published number of tokens, which one token per
    word reproduces.
    """
    texts = [*templates]
    for special in SPECIAL:
        texts = [part for text in texts for part in text.split(special)]
    bare = Tokenizer(BPE())
    bare.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    # A vocabulary large enough for all merges, so that every word of the templates ends up as one token.
    trainer = BpeTrainer(
        vocab_size=1 << 16, min_frequency=0, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    learned = json.loads(bare.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer: Qwen2Tokenizer = build_part(Qwen2Tokenizer, vocab=learned["vocab"], merges=merges, model_max_length=2048)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    return tokenizer


def qwen3_vl(weights: TinyWeights, tokenizer: Qwen2Tokenizer, *, layers: int) -> Any:
    """A `Qwen3VLModel` with this many decoder layers."""
    ids = tokenizer.get_vocab()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": WIDTH // 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 1,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return weights.build(Qwen3VLModel, config)

"""Building blocks of all families' tiny models: weights from a seed, generated tokenizers, and saved folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import Unigram
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from gracetune.errors import ConfigError, Problem
from gracetune.storage.atomic import new_folder

WIDTH = 32
"""Width of every tiny denoiser and text encoder."""
CLIP_TOKENS = 77
T5_TOKENS = 512

_NEAR_ONE = 0.1
_NEAR_ZERO = 0.02
_ROW_NORM = 0.7
"""Norm of weights that are stored as direction and norm. The audio VAE has no other normalization, and its activations
grow without bound from a norm of 1."""
_WORDS = ("a", "an", "the", "of", "in", "on", "and", "with", "photo", "video", "sound", "cat", "dog", "red", "blue")


def build_part(kind: Any, **options: Any) -> Any:
    """Construct a diffusers or transformers object. Their constructors have no types a type checker could use."""
    return kind(**options)


class TinyWeights:
    """Builds modules with random parameters from one seed. Each module continues the generator of the one before."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed

    def build(self, kind: Any, *given: Any, **options: Any) -> Any:
        """Build a module of class `kind` with random parameters, in eval mode."""
        # Constructors use torch's global generator; the caller's random numbers must not depend on that.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)
            module: nn.Module = kind(*given, **options)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(_random_values(name, parameter, self._generator))
        return module.eval()


def _random_values(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values around one for norm scales, small ones for biases, and matrices that preserve the variance of their input.

    Layers that are initialized to zero get values too, or no gradient would reach the layers before them. The numbers
    are uniform because torch computes those from integers alone, so every machine writes the same bytes.
    """
    unit = (torch.rand(parameter.shape, generator=generator) * 2 - 1) * math.sqrt(3)
    if name.endswith(("weight_g", "original0")):  # the norms of weight norm, in its older and newer implementation
        return _ROW_NORM * (1 + _NEAR_ONE * unit)
    if bool((parameter == 1).all()):
        return 1 + _NEAR_ONE * unit
    if parameter.ndim <= 1 and (name.endswith("bias") or bool((parameter == 0).all())):  # or a scale less one
        return _NEAR_ZERO * unit
    per_output = math.prod(parameter.shape[1:])
    return unit / math.sqrt(per_output)


def t5_tokenizer(longest: int = T5_TOKENS) -> PreTrainedTokenizerFast:
    """A T5-like tokenizer: word pieces with a leading mark and an end token. Unknown text is split into bytes."""
    special = ("<pad>", "</s>", "<unk>")  # ids 0, 1 and 2, as in the published ones
    chunks = [(token, 0.0) for token in special]
    chunks += [(f"<0x{byte:02X}>", -12.0) for byte in range(256)]
    chunks += [("▁", -4.0)] + [(f"▁{word}", -6.0) for word in _WORDS]
    chunks += [(chr(code), -8.0) for code in range(ord("!"), ord("~") + 1)]
    tokenizer = Tokenizer(Unigram(chunks, unk_id=2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    whole: PreTrainedTokenizerFast = build_part(
        PreTrainedTokenizerFast,
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=longest,
        padding_side="right",
    )
    return whole


def t5_options(vocabulary: int) -> dict[str, Any]:
    """Arguments for `T5Config` and `UMT5Config`."""
    return {
        "vocab_size": vocabulary,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 2 * WIDTH,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    }


def t5_encoder(weights: TinyWeights, vocabulary: int) -> T5EncoderModel:
    encoder: T5EncoderModel = weights.build(T5EncoderModel, T5Config(**t5_options(vocabulary)))
    return encoder


def clip_tokenizer(pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """CLIP's byte alphabet without merges: a text has one token per byte, except for white space, which has none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad_token, model_max_length=CLIP_TOKENS)


def clip_text_config(tokenizer: CLIPTokenizer, *, act: str = "quick_gelu") -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=WIDTH,
        hidden_act=act,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def chat_tokenizer(special: Sequence[str], template: str) -> Qwen2Tokenizer:
    """The byte alphabet without merges and a chat template: a text has one token per byte. `special[0]` pads."""
    words = (*sorted(pre_tokenizers.ByteLevel.alphabet()), *special)
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer: Qwen2Tokenizer = build_part(
        Qwen2Tokenizer, vocab=vocabulary, merges=[], model_max_length=2048, pad_token=special[0]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*special[1:]]})
    tokenizer.chat_template = template
    return tokenizer


class Pipeline(Protocol):
    def save_pretrained(self, save_directory: str, /) -> None: ...


def save(pipeline: Pipeline, folder: Path, *, finish: Callable[[Path], None] = lambda _: None) -> Path:
    """Write a pipeline as an ordinary model folder, atomically. `finish` may change files before it appears."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            [
                Problem(
                    key="folder of a tiny model",
                    found=f"{folder}, which is not empty",
                    expected="a new or empty folder",
                    hint="choose another path, or delete its content",
                )
            ]
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as beside:
        pipeline.save_pretrained(str(beside))
        finish(beside)
    return folder

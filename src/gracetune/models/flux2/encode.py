"""Encoding images and captions for FLUX.2's transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import format_input

from gracetune.cache.encoder import LatentEncoder, Prompt, TextEncoder
from gracetune.models.common.chat_text import in_chat_template, tapped_layers
from gracetune.models.common.encoding import TruncatedTexts, encoder_id, padded_tokens
from gracetune.models.common.image_latents import ImageCodec, ImageLatents
from gracetune.models.common.latent_packing import PATCH
from gracetune.models.common.pipelines import PipelineText
from gracetune.models.fingerprint import files_digest
from gracetune.models.flux2.load import TRANSFORMER, around, load_vae, text_parts
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

MAX_TOKENS = 512
"""Caption tokens, with those of the chat template: the pipelines' default."""
_QWEN3_LAYERS, _MISTRAL_LAYERS = (9, 18, 27), (10, 20, 30)
"""The hidden states that the transformer reads side by side: the pipelines' defaults."""


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> LatentEncoder:
    """The VAE's statistics are those of a batch norm over packed latents: one for each channel and place in a patch."""
    vae: Any = load_vae(source, placement)
    deviations = (vae.bn.running_var.float() + vae.config.batch_norm_eps).sqrt()
    codec = ImageCodec(
        offset=vae.bn.running_mean.float(),
        scale=deviations.reciprocal(),
        dtype=placement.dtype,
        patch=PATCH,
        references=None,
    )
    settings = {"class": type(vae).__name__, "dtype": str(placement.dtype), "posterior": options.posterior}
    return ImageLatents(vae, encoder_id("latent", source, ["vae"], settings), codec, options)


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> TextEncoder:
    pipeline = around(source, {**text_parts(source, placement), "vae": None, "scheduler": None, TRANSFORMER: None})
    is_dev = isinstance(pipeline, Flux2Pipeline)
    template = _in_mistrals_template if is_dev else _in_qwen3s_template
    layers = _MISTRAL_LAYERS if is_dev else _QWEN3_LAYERS
    settings = {
        "class": type(pipeline.text_encoder).__name__,
        "dtype": str(placement.dtype),
        "layers": str(layers),
        "tokens": str(MAX_TOKENS),
        "template": template(pipeline, ""),
        "tokenizer": files_digest(source.part("tokenizer")),
    }
    identity = encoder_id("text", source, ["text_encoder"], settings)
    encode = partial(_encode, template=template, layers=layers)
    return PipelineText(pipeline, identity, encode, device=placement.device)


def _encode(
    pipeline: Any, device: torch.device, prompts: Sequence[Prompt], truncated: TruncatedTexts,
    *, template: Callable[[Any, str], str], layers: Sequence[int],
) -> list[Entry]:  # fmt: skip
    """The result of the pipeline's `encode_prompt`, without the text encoder's prediction of the next token.

    Always `MAX_TOKENS` long: the transformer was trained with the padding, and no mask hides it.
    """
    texts = [prompt.text for prompt in prompts]
    tokens, long = padded_tokens(
        pipeline.tokenizer, [template(pipeline, text) for text in texts], MAX_TOKENS, special=False
    )
    truncated.add(f"{MAX_TOKENS} tokens", (texts[number] for number in long))
    output = pipeline.text_encoder.model(
        input_ids=tokens.input_ids.to(device),
        attention_mask=tokens.attention_mask.to(device),
        output_hidden_states=True,
        use_cache=False,
    )
    embeds = tapped_layers(output.hidden_states, layers).to(pipeline.text_encoder.dtype)
    return [{"prompt_embeds": row} for row in embeds]


def _in_qwen3s_template(pipeline: Any, text: str) -> str:
    return in_chat_template(pipeline.tokenizer, text, thinking=False)


def _in_mistrals_template(pipeline: Any, text: str) -> str:
    messages = format_input([text], pipeline.system_message)
    [rendered] = pipeline.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    return str(rendered)

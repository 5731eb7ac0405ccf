"""Train the base model of `gracetune demo` from nothing: a tiny SDXL that knows circles, squares and triangles.

    python scripts/train_demo_base.py OUTPUT [--seed 0] [--share 0.01]

OUTPUT is a new model folder in diffusers' layout, with float16 weights. Everything runs on one CPU core and takes about
20 minutes of an idle one: 5 for the VAE, 15 for the U-Net. The VAE and sheets of samples go to OUTPUT.work; a VAE that
is already there is used again. With --share, the script takes that share of the steps and images, to try the script
itself: the result has learned nothing.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image, ImageDraw
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from gracetune.models.common.tiny_parts import TinyWeights, build_part
from gracetune.train.demo_shapes import BASE_SHAPES, COLORS, CONCEPT, SIDE, ShapeImage, caption, random_shape

TEXT_WIDTH, TOKENS = 64, 16
VAE_BATCH, VAE_RATE, DECODER_RATE = 8, 3e-3, 2e-3
DECODER_NOISE = 0.03
"""Standard deviation of the noise on the latents that the decoder is refined with, relative to theirs."""
UNET_BATCH, UNET_RATE = 32, 1.5e-3
DROPPED = 0.1
"""Share of captions that are dropped, for classifier-free guidance."""
KL_WEIGHT = 2e-4
AVERAGED = 0.995
"""Decay of the average of the U-Net's weights."""
REPORT_EVERY = 100
UNTRAINED_WORDS = (CONCEPT, "heart", "moon", "cross", "arrow", "ring", "flower", "cloud", "drop", "leaf")
"""One token each, as most words are for CLIP's tokenizer. No caption of the base has them."""
WORDS = ("a", "an", "on", "background", "photo", "of", "the", *COLORS, *BASE_SHAPES, *UNTRAINED_WORDS)
SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,  # an image of one plain colour needs steps that begin in pure noise
}
SHEET = (
    ("circle", "red", "blue"), ("square", "yellow", "purple"), ("triangle", "green", "white"),
    ("circle", "orange", "black"), ("triangle", "pink", "green"), ("square", "white", "red"),
    (CONCEPT, "yellow", "blue"), (CONCEPT, "red", "white"),
)  # fmt: skip


@dataclass(frozen=True)
class Amounts:
    """How long the parts are trained, and on how many images."""

    vae_steps: int = 2_000
    decoder_steps: int = 5_000
    unet_steps: int = 1_600
    sheet_every: int = 200
    """Steps of the U-Net between two sheets of samples."""
    drawings: int = 3_072
    """Random drawings that the VAE is trained on, beside `shapes`."""
    shapes: int = 1_024
    images: int = 6_144
    """Images that the U-Net is trained on."""

    def share(self, share: float) -> Amounts:
        return Amounts(**{name: math.ceil(share * amount) for name, amount in asdict(self).items()})


# -- text -------------------------------------------------------------------------------------------------------------


def tokenizer(pad_token: str) -> Any:
    """CLIP's byte alphabet, with merges that make each of `WORDS` one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = dict.fromkeys([*alphabet, *(f"{letter}</w>" for letter in alphabet)])
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        characters = [*word[:-1], f"{word[-1]}</w>"]
        while len(characters) > 1:  # from the right: the merged piece occurs at the end of a word only
            merges[characters[-2], characters[-1]] = None
            characters[-2:] = ["".join(characters[-2:])]
            vocabulary[characters[-1]] = None
    tokens = [*vocabulary, "<|startoftext|>", "<|endoftext|>"]
    numbers = {token: number for number, token in enumerate(tokens)}
    options = {"pad_token": pad_token, "model_max_length": TOKENS}
    return build_part(CLIPTokenizer, vocab=numbers, merges=[*merges], **options)


def text_encoder(weights: TinyWeights, kind: Any, tokens: Any, act: str) -> Any:
    """Random and never trained: the U-Net learns to read the vectors that so few words happen to have."""
    config = CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=TEXT_WIDTH, intermediate_size=2 * TEXT_WIDTH, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=TOKENS, projection_dim=TEXT_WIDTH, hidden_act=act,
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id,
    )  # fmt: skip
    encoder = weights.build(kind, config)
    with torch.no_grad():  # a word outweighs its position and the words before it
        encoder.get_input_embeddings().weight.mul_(math.sqrt(TEXT_WIDTH))
    return encoder


# -- VAE --------------------------------------------------------------------------------------------------------------


def random_drawing(generator: np.random.Generator) -> Image.Image:
    """Up to three polygons and ellipses: the VAE has to encode any flat drawing."""
    palette, large = list(COLORS.values()), 4 * SIDE

    def color() -> tuple[int, int, int]:
        return palette[generator.integers(len(palette))]

    image = Image.new("RGB", (large, large), color())
    draw = ImageDraw.Draw(image)
    for _ in range(generator.integers(1, 4)):
        x, y = generator.uniform(0.2, 0.8, 2) * large
        size = generator.uniform(0.1, 0.45) * large
        if generator.random() < 0.3:
            wide, high = size * generator.uniform(0.5, 1, 2)
            draw.ellipse((x - wide, y - high, x + wide, y + high), fill=color())
            continue
        angles = np.sort(generator.uniform(0, 2 * math.pi, generator.integers(3, 13)))
        radii = size * generator.uniform(0.3, 1, len(angles))
        corners = [(x + r * math.cos(a), y + r * math.sin(a)) for a, r in zip(angles, radii, strict=True)]
        draw.polygon(corners, fill=color())
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def pixels(images: list[Image.Image]) -> Tensor:
    """[B, 3, height, width] in [-1, 1]."""
    values = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    return torch.from_numpy(values).permute(0, 3, 1, 2) / 127.5 - 1


def new_vae() -> Any:
    vae = build_part(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 16, 32),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
        sample_size=SIDE,
        force_upcast=False,
    )
    with torch.no_grad():
        vae.quant_conv.weight[4:].zero_()
        vae.quant_conv.bias[4:].fill_(-6.0)  # almost no noise at the start, which would hide the image
        for last in (vae.encoder.mid_block.resnets[-1], vae.decoder.up_blocks[-1].resnets[-1]):
            let_colors_pass(last.conv2.bias)
    return vae


def let_colors_pass(bias: Tensor, constant: float = 2.0) -> None:
    """Give each group of a group norm two large constants, whose variance outweighs that of the image.

    The norm would remove the colour of a plain image otherwise, and the VAE would take several times as long to learn.
    """
    bias.copy_(torch.tensor([constant, -constant, 0.0, 0.0]).repeat(len(bias) // 4))


def rate(step: int, steps: int, highest: float, warmup: int = 100) -> float:
    """A warm-up and a cosine."""
    falling = 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2
    return highest * falling * min(1.0, (step + 1) / warmup)


def step_with(optimizer: torch.optim.Optimizer, loss: Tensor, network: nn.Module, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def vae_images(seed: int, amounts: Amounts) -> Tensor:
    generator = np.random.default_rng(seed)
    drawings = [random_drawing(generator) for _ in range(amounts.drawings)]
    return pixels([*drawings, *(random_shape(generator, BASE_SHAPES).draw() for _ in range(amounts.shapes))])


def train_vae(seed: int, amounts: Amounts) -> Any:
    torch.manual_seed(seed)
    images, steps = vae_images(seed, amounts), amounts.vae_steps
    vae, progress = new_vae(), Progress("VAE", steps)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_RATE, weight_decay=0.0)
    for step in range(steps):
        batch = images[torch.randint(len(images), (VAE_BATCH,))]
        posterior = vae.encode(batch).latent_dist
        difference = vae.decode(posterior.sample()).sample - batch
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = difference.abs().mean() + difference.square().mean() + KL_WEIGHT * kl
        step_with(optimizer, loss, vae, rate(step, steps, VAE_RATE))
        progress.add(step, float(difference.detach().abs().mean()))
    vae.eval().requires_grad_(False)
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in images[-512:].split(64)])
    vae.register_to_config(scaling_factor=round(1 / float(latents.std()), 5))
    return vae


def refine_decoder(vae: Any, seed: int, amounts: Amounts) -> None:
    """Train only the decoder further. The latents stay as they are, so this can run beside the U-Net's training."""
    torch.manual_seed(seed)
    images, steps = vae_images(seed, amounts), amounts.decoder_steps
    decoder = nn.ModuleList([vae.post_quant_conv, vae.decoder]).requires_grad_(True)
    noise = DECODER_NOISE / vae.config.scaling_factor
    optimizer, progress = torch.optim.AdamW(decoder.parameters(), lr=DECODER_RATE), Progress("decoder", steps)
    for step in range(steps):
        batch = images[torch.randint(len(images), (VAE_BATCH,))]
        with torch.no_grad():
            latents = vae.encode(batch).latent_dist.mean
        difference = vae.decode(latents + noise * torch.randn_like(latents)).sample - batch
        loss = difference.abs().mean() + difference.square().mean()
        step_with(optimizer, loss, decoder, rate(step, steps, DECODER_RATE))
        progress.add(step, float(difference.detach().abs().mean()))
    vae.eval().requires_grad_(False)


@dataclass
class Progress:
    """Prints a smoothed value."""

    name: str
    steps: int
    smooth: float = 0.0
    weight: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.process_time()

    def add(self, step: int, value: float) -> None:
        self.smooth, self.weight = 0.98 * self.smooth + 0.02 * value, 0.98 * self.weight + 0.02
        if step % REPORT_EVERY == 0 or step == self.steps - 1:
            seconds = time.process_time() - self.began
            print(f"{self.name} step {step}: {self.smooth / self.weight:.4f}, {seconds:.0f} s of CPU", flush=True)


# -- U-Net ------------------------------------------------------------------------------------------------------------


def new_unet() -> Any:
    return build_part(
        UNet2DConditionModel,
        sample_size=SIDE // 4,
        block_out_channels=(32, 64, 80),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=1,
        attention_head_dim=(1, 2, 2),  # diffusers reads this as the number of heads
        cross_attention_dim=2 * TEXT_WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=TEXT_WIDTH + 6 * 8,
    )


@dataclass(frozen=True)
class Encoded:
    """The U-Net's data. The last caption is a dropped one, which SDXL replaces by zeros."""

    latents: Tensor
    captions: Tensor
    """Number of each image's caption."""
    texts: Tensor
    pooled: Tensor


@torch.no_grad()
def encode(pipeline: Any, shapes: list[ShapeImage]) -> Encoded:
    scale, parts = pipeline.vae.config.scaling_factor, range(0, len(shapes), 64)
    images = (pixels([one.draw() for one in shapes[first : first + 64]]) for first in parts)
    latents = torch.cat([pipeline.vae.encode(batch).latent_dist.mean * scale for batch in images])
    captions = sorted({one.caption for one in shapes})
    numbers = {text: number for number, text in enumerate(captions)}
    found = [
        pipeline.encode_prompt(captions[first : first + 64], device="cpu", do_classifier_free_guidance=False)
        for first in range(0, len(captions), 64)
    ]
    texts, pooled = (torch.cat([one[index] for one in found]) for index in (0, 2))
    return Encoded(
        latents,
        torch.tensor([numbers[one.caption] for one in shapes]),
        torch.cat([texts, torch.zeros_like(texts[:1])]),
        torch.cat([pooled, torch.zeros_like(pooled[:1])]),
    )


def train_unet(pipeline: Any, seed: int, amounts: Amounts, work: Path) -> None:
    """Train the U-Net. It ends with the average of its weights."""
    torch.manual_seed(seed)
    generator, steps = np.random.default_rng(seed + 1), amounts.unet_steps
    data = encode(pipeline, [random_shape(generator, BASE_SHAPES) for _ in range(amounts.images)])
    unet, schedule = pipeline.unet, DDPMScheduler(**SCHEDULE)
    average = {name: value.detach().clone() for name, value in unet.named_parameters()}
    optimizer, progress = torch.optim.AdamW(unet.parameters(), lr=UNET_RATE), Progress("U-Net", steps)
    for step in range(steps):
        loss = velocity_loss(unet, schedule, data)
        step_with(optimizer, loss, unet, rate(step, steps, UNET_RATE))
        progress.add(step, float(loss.detach()))
        decay = min(AVERAGED, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in unet.named_parameters():
                average[name].lerp_(value, 1 - decay)
        if (step + 1) % amounts.sheet_every == 0:
            with weights_of(unet, average):
                sheet(pipeline, work / f"step_{step + 1}.png")
                unet.save_pretrained(work / "unet")
    unet.load_state_dict(average)


def velocity_loss(unet: Any, schedule: Any, data: Encoded) -> Tensor:
    chosen = torch.randint(len(data.latents), (UNET_BATCH,))
    dropped = torch.rand(UNET_BATCH) < DROPPED
    captions = torch.where(dropped, len(data.texts) - 1, data.captions[chosen])
    clean, times = data.latents[chosen], torch.randint(1000, (UNET_BATCH,))
    noise = torch.randn_like(clean)
    sizes = torch.tensor([[SIDE, SIDE, 0, 0, SIDE, SIDE]]).float().expand(UNET_BATCH, -1)
    prediction = unet(
        schedule.add_noise(clean, noise, times),
        times,
        encoder_hidden_states=data.texts[captions],
        added_cond_kwargs={"text_embeds": data.pooled[captions], "time_ids": sizes},
    ).sample
    return F.mse_loss(prediction, schedule.get_velocity(clean, noise, times))


@contextmanager
def weights_of(network: Any, weights: dict[str, Tensor]) -> Iterator[None]:
    own = {name: value.detach().clone() for name, value in network.named_parameters()}
    network.load_state_dict(weights)
    network.eval()
    yield
    network.load_state_dict(own)
    network.train()


def sheet(pipeline: Any, file: Path) -> None:
    """Samples to look at. They use generators of their own, so that training stays the same without them."""
    pipeline.set_progress_bar_config(disable=True)
    whole = Image.new("RGB", (len(SHEET) * (SIDE + 4), 2 * (SIDE + 4)), "gray")
    for row in range(2):
        generators = [torch.Generator().manual_seed(100 * row + number) for number in range(len(SHEET))]
        images = pipeline(
            prompt=[caption(*one) for one in SHEET], height=SIDE, width=SIDE, num_inference_steps=20,
            guidance_scale=2.5, generator=generators,
        ).images  # fmt: skip
        for column, image in enumerate(images):
            whole.paste(image, (column * (SIDE + 4), row * (SIDE + 4)))
    whole.resize((whole.width * 2, whole.height * 2), Image.Resampling.LANCZOS).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0)
    options = parser.parse_args()
    amounts = Amounts().share(options.share)
    torch.set_num_threads(1)
    work = options.output.with_name(options.output.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "vae" / "config.json").is_file():
        train_vae(options.seed, amounts).save_pretrained(work / "vae")
    vae: Any = AutoencoderKL.from_pretrained(work / "vae")
    weights, tokens, tokens_2 = TinyWeights(options.seed), tokenizer("<|endoftext|>"), tokenizer("!")
    torch.manual_seed(options.seed)
    pipeline = build_part(
        StableDiffusionXLPipeline,
        vae=vae.eval().requires_grad_(False),
        text_encoder=text_encoder(weights, CLIPTextModel, tokens, "quick_gelu"),
        text_encoder_2=text_encoder(weights, CLIPTextModelWithProjection, tokens_2, "gelu"),
        tokenizer=tokens,
        tokenizer_2=tokens_2,
        unet=new_unet(),
        scheduler=EulerDiscreteScheduler(**SCHEDULE, steps_offset=1, timestep_spacing="trailing"),
    )
    train_unet(pipeline, options.seed, amounts, work)
    refine_decoder(pipeline.vae, options.seed, amounts)
    pipeline.to(torch.float16).save_pretrained(options.output)
    shutil.rmtree(work / "unet", ignore_errors=True)


if __name__ == "__main__":
    main()

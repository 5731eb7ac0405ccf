"""Image sizes as ai-toolkit gives them to SDXL, and the weights its mask loss multiplies by.

Time ids are asked of its model class, by the shape of the latents. Masks are read by its dataset; the statement that
makes weights of them is taken out of its trainer and run.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import random
import tempfile
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
from aitoolkit_base import dataset, prepare
from common import record

SHAPES = [(128, 128), (104, 152), (152, 104), (130, 126), (64, 96)]
"""Of latents: height and width."""
SIDE = 128


def time_ids() -> list[dict[str, Any]]:
    import torch
    from toolkit.stable_diffusion_model import StableDiffusion

    vae = types.SimpleNamespace(config={"block_out_channels": (128, 256, 512, 512)})
    this = types.SimpleNamespace(vae=vae, is_xl=True)
    found = {shape: StableDiffusion.get_time_ids_from_latents(this, torch.zeros(1, 4, *shape)) for shape in SHAPES}
    return [{"latents": shape, "time_ids": ids[0].tolist()} for shape, ids in found.items()]


def weighing(trainer: type) -> Any:
    """The statement that makes weights of a batch's masks."""
    for name, function in vars(trainer).items():
        if not inspect.isfunction(function):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).startswith("batch.mask_tensor is not None and"):
                return compile(ast.Module([node], []), name, "exec")
    raise SystemExit("the trainer makes no weights of masks")


def mask(kind: str) -> np.ndarray:
    image = np.zeros((SIDE, SIDE), np.uint8)
    if kind == "left half":
        image[:, : SIDE // 2] = 255
    elif kind == "small square":
        image[32:64, 48:80] = 255
    elif kind == "grey":
        image[:] = 128
    return image


def weights(kinds: list[str], **options: Any) -> list[Any]:
    """[B, H, W] at the latents' size, as the trainer multiplies the loss by them."""
    import torch
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
    from PIL import Image

    with tempfile.TemporaryDirectory() as name:
        images, masks = Path(name) / "images", Path(name) / "masks"
        images.mkdir()
        masks.mkdir()
        for number, kind in enumerate(kinds):
            Image.new("RGB", (SIDE, SIDE)).save(images / f"{number}.png")
            Image.fromarray(mask(kind)).save(masks / f"{number}.png")
        found = dataset(images, 16, resolution=SIDE, mask_path=str(masks), **options)
        order = sorted(range(len(kinds)), key=lambda index: found.file_list[index].path)
        tensors = [found._get_single_item(index).mask_tensor for index in order]
    names: dict[str, Any] = {
        "torch": torch,
        "batch": types.SimpleNamespace(mask_tensor=torch.stack(tensors)),
        "self": types.SimpleNamespace(
            sd=types.SimpleNamespace(do_masked_loss=True),
            device_torch="cpu",
            timer=lambda name: contextlib.nullcontext(),
        ),
        "noisy_latents": torch.zeros(len(kinds), 4, SIDE // 8, SIDE // 8),
        "dtype": torch.float32,
    }
    exec(weighing(SDTrainer), names)
    return list(names["mask_multiplier"][:, 0].tolist())


def values(peer: Path) -> Any:
    prepare(peer)
    random.seed(3)  # the masks are blurred by a random radius, here by none
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (["left half"], {}), (["left half"], {"mask_min_value": 0.25}), (["left half"], {"invert_mask": True}),
        (["small square"], {"mask_min_value": 0.1}), (["grey"], {}),
        (["left half", "small square"], {"mask_min_value": 0.1}),
    ]  # fmt: skip
    return {
        "time_ids": time_ids(),
        "side": SIDE,
        "masks": [
            {"masks": kinds, "options": options, "weights": weights(kinds, **options)} for kinds, options in cases
        ],
    }


if __name__ == "__main__":
    record("sizes", values)

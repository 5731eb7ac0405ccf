"""Buckets, scaling and crops of ai-toolkit: its dataset is opened on images of many sizes.

Of each image: scaled width and height, left, top, width and height of the crop. Crops of `random_crop` are random; of
them the scaled size and the bucket are recorded. Also the step of the buckets of each model class, by our flavours.
"""

from __future__ import annotations

import tempfile
import types
from pathlib import Path
from typing import Any

from aitoolkit_base import dataset, prepare
from cases import SIZES
from common import record


def steps() -> dict[str, int]:
    """Asked of the classes themselves."""
    from extensions_built_in.diffusion_models.flux_kontext.flux_kontext import FluxKontextModel
    from extensions_built_in.diffusion_models.qwen_image.qwen_image import QwenImageModel
    from extensions_built_in.diffusion_models.qwen_image.qwen_image_edit import QwenImageEditModel
    from extensions_built_in.diffusion_models.qwen_image.qwen_image_edit_plus import QwenImageEditPlusModel
    from extensions_built_in.diffusion_models.wan22.wan22_5b_model import Wan225bModel
    from extensions_built_in.diffusion_models.wan22.wan22_14b_i2v_model import Wan2214bI2VModel
    from extensions_built_in.diffusion_models.wan22.wan22_14b_model import Wan2214bModel
    from toolkit.models.wan21.wan21 import Wan21
    from toolkit.stable_diffusion_model import StableDiffusion

    vae = types.SimpleNamespace(config={"block_out_channels": (128, 256, 512, 512)})
    sdxl = types.SimpleNamespace(vae=vae, is_flux=False, is_v3=False)
    flux = types.SimpleNamespace(vae=vae, is_flux=True, is_v3=False)
    classes = {
        "flux_kontext": FluxKontextModel, "qwen_image": QwenImageModel, "qwen_image_edit": QwenImageEditModel,
        "qwen_image_edit_plus": QwenImageEditPlusModel, "wan21": Wan21, "wan22_14b": Wan2214bModel,
        "wan22_14b_i2v": Wan2214bI2VModel, "wan22_5b": Wan225bModel,
    }  # fmt: skip
    found = {name: one.get_bucket_divisibility(None) for name, one in classes.items()}
    return {
        "sdxl": StableDiffusion.get_bucket_divisibility(sdxl),
        "flux": StableDiffusion.get_bucket_divisibility(flux),
        **found,
    }


def boxes(folder: Path, divisibility: int, **options: Any) -> list[str]:
    items = {Path(item.path).stem: item for item in dataset(folder, divisibility, **options).file_list}
    found = []
    for number in range(len(SIZES)):
        item = items[f"{number:02}"]
        box = [item.scale_to_width, item.scale_to_height, item.crop_x, item.crop_y, item.crop_width, item.crop_height]
        shown = box if not options.get("random_crop") else [*box[:2], *box[4:]]
        found.append(" ".join(map(str, shown)))
    return found


def values(peer: Path) -> Any:
    prepare(peer)
    from PIL import Image

    requested = steps()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, size in enumerate(SIZES):
            Image.new("RGB", size).save(folder / f"{number:02}.png", compress_level=1)
        buckets = {
            str(step): {
                str(resolution): boxes(folder, step, resolution=resolution) for resolution in (512, 768, 1024, 1328)
            }
            for step in sorted({*requested.values()})
        }
        square = {"512": boxes(folder, 16, resolution=512, square_crop=True)}
        randomly = {"768": boxes(folder, 32, resolution=768, random_crop=True)}
    return {"steps": requested, "sizes": SIZES, "buckets": buckets, "square_crop": square, "random_crop": randomly}


if __name__ == "__main__":
    record("buckets", values)

"""Z-Image's layer names. In the original layout, which ComfyUI uses, query, key and value are one matrix.

ComfyUI also loads diffusers' own paths and slices the matrix itself. With the prefix `diffusion_model.`, diffusers'
loader reads the same file; with `transformer.` it would prefix them twice if the file has alphas.
"""

from __future__ import annotations

from collections.abc import Iterator

from gracetune.models.keys import Fused, KeyMap, KeyMapRule

_MODULATED = ("noise_refiner", "layers")
_BLOCKS = (*_MODULATED, "context_refiner")


def _rules() -> Iterator[KeyMapRule]:
    yield KeyMapRule("all_x_embedder.2-1", "x_embedder")
    for layer in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1"):
        yield KeyMapRule(layer, layer)
    for blocks in _BLOCKS:
        yield KeyMapRule(f"{blocks}.{{}}.attention.to_out.0", f"{blocks}.{{}}.attention.out")
        modulation = ("adaLN_modulation.0",) if blocks in _MODULATED else ()
        for layer in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", *modulation):
            yield KeyMapRule(f"{blocks}.{{}}.{layer}", f"{blocks}.{{}}.{layer}")
    for layer in ("linear", "adaLN_modulation.1"):
        yield KeyMapRule(f"all_final_layer.2-1.{layer}", f"final_layer.{layer}")


KEYS = KeyMap(
    family="z_image",
    component="transformer",
    rules=tuple(_rules()),
    fused=tuple(
        Fused(f"{blocks}.{{}}.attention.qkv", tuple((f"{blocks}.{{}}.attention.to_{part}", 1) for part in "qkv"))
        for blocks in _BLOCKS
    ),
    depths=(("layers", 30), ("noise_refiner", 2), ("context_refiner", 2)),
    comfyui_takes_ours=True,
    comfyui_prefix="diffusion_model.",
    architecture="z-image",
    base_version="zimage",
    also_read_by=(
        ("comfyui", "diffusers"),
        ("diffusers", "comfyui"),
        ("kohya", "diffusers"),
        ("lycoris", "comfyui"),
    ),
    header_marks=("z-image", "zimage", "z_image"),
)

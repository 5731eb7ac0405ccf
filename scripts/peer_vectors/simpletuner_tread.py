#!/usr/bin/env python3
"""SimpleTuner's token router: how many tokens it keeps, which ones for given random numbers, and what comes back."""

from __future__ import annotations

import ast
import importlib.util
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import record

SAMPLES, TOKENS = 2, 12
RATIOS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.7, 0.9)
COUNTED = (1, 2, 5, 10, 15, 16, 25, 1024, 4096, 32760)


def _router_module(peer: Path) -> ModuleType:
    """That one file: its package imports the whole trainer."""
    spec = importlib.util.spec_from_file_location("tread", peer / "simpletuner/helpers/training/tread.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _counts(module: ModuleType) -> dict[str, Any]:
    router = module.TREADRouter(seed=1)
    kept = {
        str(ratio): [router.get_mask(torch.zeros(1, tokens, 1), mask_ratio=ratio).ids_keep.shape[1]
                     for tokens in COUNTED]
        for ratio in RATIOS
    }  # fmt: skip
    return {"case": "counts", "tokens": COUNTED, "kept": kept}


def _choice(module: ModuleType, seed: int, ratio: float, forced: list[list[int]]) -> dict[str, Any]:
    """The random numbers are those of a generator in the router's own state."""
    router = module.TREADRouter(seed=seed)
    noise = torch.rand(SAMPLES, TOKENS, generator=torch.Generator().manual_seed(seed))
    x = torch.arange(SAMPLES * TOKENS * 2, dtype=torch.float32).view(SAMPLES, TOKENS, 2)
    mask = torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)
    for row, tokens in zip(mask, forced, strict=True):
        row[tokens] = True
    info = router.get_mask(x, mask_ratio=ratio, force_keep=mask)
    small = router.start_route(x, info)
    back = router.end_route(-small, info, original_x=x)
    return {
        "case": "choice", "seed": seed, "ratio": ratio, "forced": forced, "noise": noise.tolist(),
        "kept": [sorted(row) for row in info.ids_keep.tolist()], "order": info.ids_keep.tolist(),
        "back_first_channel": back[..., 0].tolist(),
    }  # fmt: skip


def _qwen_positions(peer: Path) -> dict[str, Any]:
    """What its Qwen-Image does with kept tokens: the blocks give their attention the positions of all tokens."""
    text = (peer / "simpletuner/helpers/models/qwen_image/transformer.py").read_text()
    tree = ast.parse(text)
    (function,) = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "apply_rotary_emb_qwen"]
    names: dict[str, Any] = {"torch": torch, "Union": typing.Union, "Tuple": tuple}
    exec(compile(ast.Module([function], []), "transformer.py", "exec"), names)
    kept, table = torch.zeros(1, TOKENS // 2, 1, 4), torch.ones(TOKENS, 4)
    try:
        names["apply_rotary_emb_qwen"](kept, (table, table), use_real=False)
    except RuntimeError as error:
        return {"case": "qwen_image positions", "error": str(error)}
    return {"case": "qwen_image positions", "error": None}


def values(peer: Path) -> Any:
    module = _router_module(peer)
    none: list[list[int]] = [[], []]
    return [
        _counts(module),
        *(_choice(module, seed, ratio, none) for seed, ratio in ((42, 0.5), (7, 0.25), (3, 0.9))),
        _choice(module, 42, 0.5, [[1, 4], []]),
        _choice(module, 42, 0.75, [[0, 1, 2, 3, 4], [11]]),
        _qwen_positions(peer),
    ]


if __name__ == "__main__":
    record("tread", values)

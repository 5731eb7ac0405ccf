"""Captions that SimpleTuner trains with: the same image is read from its sampler again and again.

A case is a caption file and the keys of a dataset. Recorded is how often each text came; of shuffled tags also how many
variants there are and how often the caption as written came. Caption dropout is a statement of its collate function.
"""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
import types
from collections import Counter
from pathlib import Path
from typing import Any

from cases import CAPTIONS, DRAWS
from common import record
from simpletuner_base import prepare, set_dataset, set_options

MANY = 2000
IMAGE = "/data/a_red-cat_01.png"


class Files:
    """A data backend with one caption file."""

    id = "d"

    def __init__(self, caption: str | None) -> None:
        self.caption = caption

    def exists(self, path: str) -> bool:
        return self.caption is not None and path.endswith(".txt")

    def read(self, path: str) -> bytes:
        return (self.caption or "").encode()


def texts(caption: str | None, draws: int, **entry: Any) -> list[str]:
    from simpletuner.helpers.multiaspect.sampler import MultiAspectSampler

    set_options()
    set_dataset("d", **entry)
    this = types.SimpleNamespace(
        id="d",
        data_backend=Files(caption),
        metadata_backend=types.SimpleNamespace(get_metadata_by_filepath=lambda path: {"crop_coordinates": (0, 0)}),
        caption_strategy=entry.get("caption_strategy", "filename"),
        use_captions=not entry.get("only_instance_prompt", False),
        prepend_instance_prompt=entry.get("prepend_instance_prompt", False),
        instance_prompt=entry.get("instance_prompt"),
        disable_multiline_split=entry.get("disable_multiline_split", False),
        debug_log=lambda text: None,
    )
    found = []
    for _ in range(draws):
        (one,) = MultiAspectSampler._validate_and_yield_images_from_samples(this, [IMAGE], "1.0")
        found.append(one["instance_prompt_text"])
    return found


def fixed() -> list[dict[str, Any]]:
    textfile = {"caption_strategy": "textfile"}
    prompt = {"instance_prompt": "a photo"}
    cases: list[tuple[str | None, dict[str, Any]]] = [
        *((text, textfile) for text in CAPTIONS.values() if text.strip()),
        (CAPTIONS["lines"], {**textfile, "disable_multiline_split": True}),
        (CAPTIONS["sentence"], {**textfile, **prompt, "prepend_instance_prompt": True}),
        (CAPTIONS["sentence"], {**textfile, **prompt, "only_instance_prompt": True}),
        (None, {"caption_strategy": "filename"}),
        (None, {"caption_strategy": "filename", **prompt, "prepend_instance_prompt": True}),
        (None, {"caption_strategy": "instanceprompt", **prompt}),
    ]
    return [
        {"caption": caption, "entry": entry,
         "texts": dict(sorted(Counter(" ".join(text.split()) for text in texts(caption, DRAWS, **entry)).items()))}
        for caption, entry in cases
    ]  # fmt: skip


def shuffled() -> list[dict[str, Any]]:
    found = []
    for caption, options in (
        (CAPTIONS["tags"], {"count": 4}), (CAPTIONS["tags"], {"count": 30}), (CAPTIONS["tags"], {}),
        (CAPTIONS["tags"], {"count": 4, "position_start": 2}),
        (CAPTIONS["tags"], {"count": 4, "include_original": False}),
        (CAPTIONS["sentence"], {"count": 4, "split_on": "space"}), (CAPTIONS["two tags"], {"count": 4}),
        (CAPTIONS["sentence"], {"count": 4}),
    ):  # fmt: skip
        entry = {"caption_strategy": "textfile", "caption_shuffle": {"enable": True, **options}}
        came = Counter(texts(caption, MANY, **entry))
        kept = {", ".join(text.split(", ")[:2]) for text in came}
        found.append({
            "caption": caption, "entry": entry, "draws": MANY, "variants": len(came), "as_written": came[caption],
            "most": max(came.values()), "least": min(came.values()),
            "first_two": sorted(kept) if "position_start" in options else [],
        })  # fmt: skip
    return found


def dropped() -> dict[str, int]:
    """How often the statement that drops captions does it."""
    import numpy as np
    from simpletuner.helpers.training import collate

    tree = ast.parse(textwrap.dedent(inspect.getsource(collate.collate_fn)))
    loop = next(
        node for node in ast.walk(tree) if isinstance(node, ast.For) and "drop_conditioning" in ast.unparse(node)
    )
    examples = [{"data_backend_id": "d", "instance_prompt_text": "a caption"} for _ in range(MANY)]
    np.random.seed(0)
    exec(compile(ast.Module([loop], []), "collate_fn", "exec"),
         {"np": np, "examples": examples, "dropout_probability": 0.3})  # fmt: skip
    return dict(Counter(f"{one['instance_prompt_text']!r}, {one['drop_conditioning']}" for one in examples))


def values(_peer: Path) -> Any:
    prepare()
    random.seed(0)
    return {"image": IMAGE, "draws": DRAWS, "fixed": fixed(), "shuffled": shuffled(), "dropped_at_0.3": dropped()}


if __name__ == "__main__":
    record("captions", values)

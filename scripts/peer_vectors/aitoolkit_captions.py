"""Captions that ai-toolkit trains with: the same image is read from its dataset again and again.

A case is a caption file, options of the dataset and a trigger word of the job. Recorded is how often each text came;
of shuffled tags, how often each tag came first and how many texts differed. Several spaces are written as one, because
what ai-toolkit splits at commas it puts together with one space more.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from aitoolkit_base import dataset, prepare
from cases import CAPTIONS, DRAWS
from common import record

MANY = 2000
TRIGGER = {"trigger_word": "sks"}
DROPPED = {"caption_dropout_rate": 0.3}
SHUFFLED = {"shuffle_tokens": True}


def plain(text: str) -> str:
    return " ".join(text.split())


class Embeds:
    """Stands for an embedding: a file that remembers its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save(self, path: str) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(self.text, encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> Embeds:
        return cls(Path(path).read_text(encoding="utf-8"))


def trained_texts(caption: str | None, job_trigger: str | None, draws: int, **options: Any) -> list[str]:
    from PIL import Image
    from toolkit import dataloader_mixins
    from toolkit.stable_diffusion_model import StableDiffusion

    dataloader_mixins.PromptEmbeds = Embeds
    if job_trigger is not None:
        options.setdefault("trigger_word", job_trigger)  # as the job hands it on to its datasets
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Image.new("RGB", (64, 64)).save(folder / "a.png")
        if caption is not None:
            (folder / "a.txt").write_text(caption, encoding="utf-8")
        cached = options.get("cache_text_embeddings", False)
        if cached:
            options["sd"] = {"encode_prompt": Embeds, "set_device_state_preset": lambda name: None, "device": "cpu"}
        found = dataset(folder, resolution=64, **options)
        texts = []
        for _ in range(draws):
            item = found._get_single_item(0)
            text = item.prompt_embeds.text if cached else item.caption
            if job_trigger is not None and not cached:
                reg = options.get("is_reg", False)
                text = StableDiffusion.inject_trigger_into_prompt(
                    None, text, trigger=job_trigger, add_if_not_present=not reg
                )
            texts.append(text)
        return texts


def counted(texts: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(plain(text) for text in texts).items()))


def fixed() -> list[dict[str, Any]]:
    """Cases with few texts."""
    cases: list[tuple[str, str | None, str | None, dict[str, Any]]] = [
        *((f"plain: {name}", text, None, {}) for name, text in CAPTIONS.items()),
        *((f"trigger: {name}", text, "sks", {}) for name, text in CAPTIONS.items()),
        *((f"is_reg: {name}", text, "sks", {"is_reg": True}) for name, text in CAPTIONS.items()),
        ("missing", None, None, {}),
        ("missing, default", None, None, {"default_caption": "a default"}),
        ("empty, default", "", None, {"default_caption": "a default"}),
        ("blank, default", " \n", None, {"default_caption": "a default"}),
        ("empty, default and trigger", "", "sks", {"default_caption": "a default"}),
        ("dropout", CAPTIONS["sentence"], None, DROPPED),
        ("dropout, trigger of the job", CAPTIONS["sentence"], "sks", DROPPED),
        ("dropout, trigger of the dataset", CAPTIONS["sentence"], None, {**DROPPED, **TRIGGER}),
        ("dropout, is_reg", CAPTIONS["sentence"], "sks", {**DROPPED, "is_reg": True}),
        ("dropout, cached", CAPTIONS["sentence"], None, {**DROPPED, **TRIGGER, "cache_text_embeddings": True}),
        ("dropout, cached, is_reg", CAPTIONS["sentence"], "sks",
         {**DROPPED, "cache_text_embeddings": True, "is_reg": True}),
    ]  # fmt: skip
    return [
        {"name": name, "caption": caption, "job_trigger": trigger, "options": options,
         "texts": counted(trained_texts(caption, trigger, DRAWS, **options))}
        for name, caption, trigger, options in cases
    ]  # fmt: skip


def shuffled() -> list[dict[str, Any]]:
    cases: list[tuple[str, str | None, dict[str, Any], int]] = [
        ("shuffled", None, SHUFFLED, MANY),
        ("shuffled, trigger", "sks", SHUFFLED, MANY),
        ("shuffled, cached", None, {**SHUFFLED, "cache_text_embeddings": True}, DRAWS),
    ]
    found = []
    for name, trigger, options, draws in cases:
        texts = [plain(text) for text in trained_texts(CAPTIONS["tags"], trigger, draws, **options)]
        first = Counter(text.partition(",")[0].removeprefix("sks ") for text in texts)
        glued = Counter(next((tag.strip() for tag in text.split(",") if "sks" in tag), "") for text in texts)
        places = Counter(next((at for at, tag in enumerate(text.split(",")) if "sks" in tag), -1) for text in texts)
        found.append({
            "name": name, "caption": CAPTIONS["tags"], "job_trigger": trigger, "options": options, "draws": draws,
            "distinct": len({*texts}), "distinct_in_200": len({*texts[:DRAWS]}),
            "first": first if len({*texts}) > 1 else {}, "trigger_with": glued if trigger else {},
            "trigger_at": places if trigger else {},
        })  # fmt: skip
    return found


def values(peer: Path) -> Any:
    prepare(peer)
    random.seed(0)
    return {"draws": DRAWS, "fixed": fixed(), "shuffled": shuffled()}


if __name__ == "__main__":
    record("captions", values)

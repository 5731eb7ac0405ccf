"""Captions: what configs of the peers train with over many visits, against what their own code gave.

Spaces are compared as one: ai-toolkit puts a second one behind every comma and keeps those at the ends.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Resolved
from unit.data.folders import image
from unit.fidelity.recorded import aitoolkit, recorded, simpletuner, values

AITOOLKIT = recorded("aitoolkit", "captions")
SIMPLETUNER = recorded("simpletuner", "captions")
LONG = {"steps": 5000}


def plain(text: str) -> str:
    return " ".join(text.split())


def texts(resolved: Resolved, draws: int) -> list[str]:
    return [plain(batch.samples[0].caption.text) for batch in values(resolved.config, draws)]


def enough(case: dict[str, Any]) -> int:
    """Visits: a caption that is always the same needs few."""
    return 200 if len(case["texts"]) > 1 else 5


def check(ours: Counter[str], case: dict[str, Any]) -> None:
    """The same texts, each as often as chance allows: four standard deviations of the difference of two counts."""
    theirs = case["texts"]
    assert ours.keys() == theirs.keys()
    draws = sum(theirs.values())
    if len(theirs) > 1:
        allowed = 4 * (2 * draws * 0.25) ** 0.5
        assert all(abs(ours[text] - count) <= allowed for text, count in theirs.items())


# -- ai-toolkit --------------------------------------------------------------------------------------------------------


def aitoolkit_texts(tmp_path: Path, case: dict[str, Any], draws: int) -> list[str]:
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes(image())
    if case["caption"] is not None:
        (images / "a.txt").write_text(case["caption"], encoding="utf-8")
    entry = {"folder_path": str(images), "resolution": 64, **case["options"]}
    trigger = {} if case["job_trigger"] is None else {"trigger_word": case["job_trigger"]}
    return texts(aitoolkit(tmp_path, "sdxl", datasets=[entry], train=LONG, **trigger), draws)


@pytest.mark.parametrize("case", AITOOLKIT["fixed"], ids=lambda case: case["name"])
def test_ai_toolkit_s_captions(tmp_path: Path, case: dict[str, Any]) -> None:
    check(Counter(aitoolkit_texts(tmp_path, case, enough(case))), case)


@pytest.mark.parametrize("case", AITOOLKIT["shuffled"], ids=lambda case: case["name"])
def test_ai_toolkit_s_shuffled_tags(tmp_path: Path, case: dict[str, Any]) -> None:
    """A new order at every use, of which ours repeats after 100; where texts are cached, one order for good."""
    found = aitoolkit_texts(tmp_path, case, 200)
    tags = sorted(case["caption"].split(", "))
    assert all(sorted(text.replace("sks ", "").split(", ")) == tags for text in found)
    if case["distinct"] == 1:
        assert len({*found}) == 1
        return
    assert len({*found}) >= min(100, case["distinct_in_200"])
    assert len({*found[:100]}) == 100
    first = Counter(text.partition(",")[0].removeprefix("sks ") for text in found)
    assert first.keys() == case["first"].keys()
    for tag, count in case["first"].items():
        assert abs(first[tag] / 200 - count / case["draws"]) < 0.12
    if case["job_trigger"]:
        places = Counter(next(at for at, tag in enumerate(text.split(",")) if "sks" in tag) for text in found)
        assert {str(place) for place in places} == case["trigger_at"].keys()
        for place, count in case["trigger_at"].items():
            assert abs(places[int(place)] / 200 - count / case["draws"]) < 0.12
        assert {tag.strip() for text in found for tag in text.split(",") if "sks" in tag} == case["trigger_with"].keys()


# -- SimpleTuner -------------------------------------------------------------------------------------------------------


def simpletuner_texts(tmp_path: Path, case: dict[str, Any], draws: int) -> list[str]:
    images = tmp_path / "images"
    images.mkdir()
    name = Path(SIMPLETUNER["image"]).stem
    (images / f"{name}.png").write_bytes(image())
    if case["caption"] is not None:
        (images / f"{name}.txt").write_text(case["caption"], encoding="utf-8")
    entry = {"instance_data_dir": str(images), "resolution": 64, **case["entry"]}
    options = {"caption_dropout_probability": 0, "train_batch_size": 1, "max_train_steps": 5000}
    return texts(simpletuner(tmp_path, "sdxl", datasets=[entry], **options), draws)


# A placeholder of ai-toolkit's: without a trigger word ours takes it out.
OWN = [case for case in SIMPLETUNER["fixed"] if "[trigger]" not in (case["caption"] or "")]


@pytest.mark.parametrize("case", OWN, ids=lambda case: "-".join(map(str, case["entry"].values())))
def test_simpletuner_s_captions(tmp_path: Path, case: dict[str, Any]) -> None:
    check(Counter(simpletuner_texts(tmp_path, case, enough(case))), case)


@pytest.mark.parametrize(
    "case", SIMPLETUNER["shuffled"], ids=lambda case: f"{case['caption'][:6]}-{case['entry']['caption_shuffle']}"
)
def test_simpletuner_s_shuffled_tags(tmp_path: Path, case: dict[str, Any]) -> None:
    """As many variants as requested, all equally likely. SimpleTuner has fewer where its shuffles repeat each other."""
    options = case["entry"]["caption_shuffle"]
    found = Counter(simpletuner_texts(tmp_path, case, 600))
    written = options.get("include_original", True)
    most = options.get("count", 1) + written
    assert case["variants"] <= len(found) <= max(most, 1)
    assert (case["caption"] in found) == (written or case["as_written"] > 0)
    expected = 600 / len(found)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in found.values())
    if case["first_two"]:
        assert {", ".join(text.split(", ")[:2]) for text in found} == {*case["first_two"]}


def test_simpletuner_drops_captions_as_often(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes(image())
    entry = {"instance_data_dir": str(images), "resolution": 64}
    options = {"caption_dropout_probability": 0.3, "train_batch_size": 1, "max_train_steps": 5000}
    batches = values(simpletuner(tmp_path, "sdxl", datasets=[entry], **options).config, 2000)
    theirs = {text: count for text, count in SIMPLETUNER["dropped_at_0.3"].items() if text.startswith("''")}
    dropped = [batch.samples[0].caption for batch in batches if batch.samples[0].caption.dropped]
    assert abs(len(dropped) - sum(theirs.values())) < 120
    assert {caption.text for caption in dropped} == {""}

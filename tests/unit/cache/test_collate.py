from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gracetune.cache.collate import UnlikeEntriesError, collate


def stacked(entries: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    parts = collate(entries, [f"{number}.png" for number in range(len(entries))])
    return {name: part.build() for name, part in parts.items()}


@st.composite
def batches(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Entries like those of encoders: latents of one shape, captions of any length, some with masks."""
    height, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    fixed, masked = draw(st.booleans()), draw(st.booleans())
    entries = []
    for length in lengths:
        length = 4 if fixed else length
        entry = {"latents": torch.rand(3, height, width) + 1, "prompt_embeds": torch.rand(length, 5) + 1}
        if draw(st.booleans()):
            entry["loss_mask"] = torch.rand(1, height, width) / 2
        if masked and draw(st.booleans()):
            mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
            entry["prompt_attention_mask"] = torch.tensor(mask, dtype=torch.bool)
        entries.append(entry)
    return entries


@given(batches())
def test_every_sample_is_found_again_and_the_rest_is_filling(entries: list[dict[str, Tensor]]) -> None:
    batch = stacked(entries)
    lengths = [len(entry["prompt_embeds"]) for entry in entries]
    for number, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        assert torch.equal(batch["latents"][number], entry["latents"])
        assert torch.equal(batch["prompt_embeds"][number, :length], entry["prompt_embeds"])
        assert not batch["prompt_embeds"][number, length:].any()
        if "loss_mask" in batch:
            assert torch.equal(
                batch["loss_mask"][number], entry.get("loss_mask", torch.ones_like(batch["loss_mask"][0]))
            )
        if "prompt_attention_mask" in batch:
            own = entry.get("prompt_attention_mask", torch.ones(length, dtype=torch.bool))
            assert torch.equal(batch["prompt_attention_mask"][number, :length], own)
            assert not batch["prompt_attention_mask"][number, length:].any()
    assert batch["prompt_embeds"].shape[1] == max(lengths), "no longer than the longest caption"
    given_masks = any("prompt_attention_mask" in entry for entry in entries)
    assert ("prompt_attention_mask" in batch) == (given_masks or len(set(lengths)) > 1)
    assert ("loss_mask" in batch) == any("loss_mask" in entry for entry in entries)


def test_nothing_of_a_batch_is_shared_with_the_cache() -> None:
    entry = {"latents": torch.ones(2, 2), "prompt_embeds": torch.ones(3, 2)}
    batch = stacked([entry])
    for tensor in batch.values():
        tensor.zero_()
    assert entry["latents"].all()
    assert entry["prompt_embeds"].all()


def test_the_dtype_of_a_mask_is_kept() -> None:
    first = {"prompt_embeds": torch.ones(2, 3), "prompt_attention_mask": torch.tensor([1, 0])}
    second = {"prompt_embeds": torch.ones(3, 3)}
    assert stacked([first, second])["prompt_attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_scalars_and_rows_are_stacked() -> None:
    batch = stacked(
        [{"time_ids": torch.arange(6.0), "n": torch.tensor(1)}, {"time_ids": torch.ones(6), "n": torch.tensor(2)}]
    )
    assert batch["time_ids"].shape == (2, 6)
    assert batch["n"].tolist() == [1, 2]


ONE = torch.ones(1)
TEXT = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("first", "second", "stated"),
    [
        (
            {"conditioning_latents_1": torch.ones(4, 2, 3)},
            {"conditioning_latents_1": torch.ones(4, 3, 2)},
            r"conditioning_latents_1 of a batch.*\n?.*\[4, 3, 2\] for 1\.png, \[4, 2, 3\] for 0\.png",
        ),
        ({"latents": ONE}, {"latents": ONE.half()}, r"latents.*\n?.*float16 for 1\.png"),
        ({"latents": ONE, "time_ids": torch.ones(6)}, {"latents": ONE}, r"time_ids.*\n?.*none for 1\.png"),
        ({"prompt_embeds": TEXT}, {"prompt_embeds": torch.ones(2, 4)}, r"prompt_embeds.*\n?.*\[2, 4\] for 1\.png"),
        ({"latents": ONE, "prompt_embeds": TEXT}, {"latents": ONE}, r"prompt_embeds.*\n?.*none for 1\.png"),
        (
            {"prompt_embeds": TEXT, "prompt_attention_mask": torch.ones(3)},
            {"prompt_embeds": TEXT},
            r"prompt_attention_mask.*\n?.*\[3\] for 0\.png",
        ),
        ({"prompt_attention_mask": torch.ones(3)}, {}, r"prompt_attention_mask.*\n?.*no prompt_embeds"),
    ],
)
def test_what_cannot_share_a_batch_is_rejected_by_name(
    first: dict[str, Tensor], second: dict[str, Tensor], stated: str
) -> None:
    with pytest.raises(UnlikeEntriesError, match=stated):
        stacked([first, second])

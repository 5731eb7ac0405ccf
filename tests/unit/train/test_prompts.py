from __future__ import annotations

from typing import Any

import torch

from gracetune.models.spec import FromEmbeddings, SampleRequest
from gracetune.train.prompts import Prompts


def test_embeddings_are_given_in_the_denoisers_precision_and_masks_as_they_are() -> None:
    def pipeline(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is loaded")

    entries = {
        "a": {"prompt_embeds": torch.ones(2, 3), "mask": torch.ones(2, dtype=torch.bool)},
        "-": {"prompt_embeds": torch.zeros(2, 3), "mask": torch.zeros(2, dtype=torch.bool)},
    }
    given = Prompts(entries, FromEmbeddings(pipeline, default_negative="-")).with_embeddings(
        SampleRequest("a"), torch.bfloat16
    )
    assert given.embeds is not None
    assert given.negative_embeds is not None
    assert {name: tensor.dtype for name, tensor in given.embeds.items()} == {
        "prompt_embeds": torch.bfloat16, "mask": torch.bool,
    }  # fmt: skip
    assert bool((given.embeds["prompt_embeds"] == 1).all())
    assert bool((given.negative_embeds["prompt_embeds"] == 0).all())

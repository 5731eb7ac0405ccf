"""Qwen3-VL's layers as diffusers' pipelines read them."""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.ideogram4 import pipeline_ideogram4

from gracetune.models.common.qwen3_vl import tapped_layers
from gracetune.models.common.tiny_parts import TinyWeights
from gracetune.models.common.tiny_qwen import qwen3_vl, tokenizer_for_templates


def test_tapped_layers_are_those_that_ideogram_4_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipeline runs the layers itself and reads the last one too, before the norm after it. Krea 2's own tests
    compare with the other way: the hidden states that transformers returns."""
    monkeypatch.setattr(pipeline_ideogram4, "QWEN3_VL_ACTIVATION_LAYERS", (0, 2))
    model = qwen3_vl(TinyWeights(0), tokenizer_for_templates(["a red cat"]), layers=3)
    ids = torch.arange(14).reshape(2, 7)
    positions = torch.arange(7).expand(2, 7)
    with torch.no_grad():
        theirs = pipeline_ideogram4.Ideogram4Pipeline._get_text_encoder_hidden_states(
            model, ids, torch.ones_like(ids), positions
        )
        ours = tapped_layers(model, ids, (0, 2))
    torch.testing.assert_close(ours, torch.stack(theirs, dim=2))

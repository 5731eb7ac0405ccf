"""The checklist of a family: every family passes it, and every check finds what it is for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gracetune.cache.encoder import Prompt
from gracetune.cli.main import main
from gracetune.config.families import PACKAGES, flavours
from gracetune.models import registry
from gracetune.models.registry import FOOTPRINTS, spec_of
from gracetune.models.spec import Sampled, SampleRequest
from gracetune.testing.family_check.case import FamilyCase
from gracetune.testing.family_check.checklist import CHECKS, run_check

TinyModel = Callable[[str, str], Path]
FAMILIES = [family for family in FOOTPRINTS if not PACKAGES.is_installed(family)]
DAILY = {("wan", "files"), ("wan", "cuda graphs"), ("flux", "cuda graphs"),
         *((family, check) for family in FAMILIES for check in ("encode", "predict"))}  # fmt: skip
OTHERS = [("qwen_image", "edit"), ("qwen_image", "edit-2509"), ("flux", "schnell"), ("flux", "kontext"),
          ("z_image", "turbo"), ("wan", "i2v-14b-2.2"), ("wan", "ti2v-5b-2.2"),
          ("wan", "i2v-14b-480p-2.1")]  # fmt: skip


def case_of(family: str, tiny_model: TinyModel, work: Path, flavour: str | None = None, **changed: Any) -> FamilyCase:
    """A family's case, with changed parts of its spec."""
    found = next(one for one in flavours(family) if flavour in (None, one.name))
    work.mkdir(exist_ok=True)
    return FamilyCase(replace(spec_of(family), **changed), found, tiny_model(family, found.name), work)


@pytest.mark.parametrize(
    ("family", "check"),
    [
        pytest.param(family, check, marks=[] if (family, check) in DAILY else pytest.mark.full)
        for family in FAMILIES
        for check in CHECKS
    ],
)
def test_families_pass(family: str, check: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    result = run_check(check, case_of(family, tiny_model, tmp_path))
    assert result.ok, result


@pytest.mark.full
@pytest.mark.parametrize(("family", "flavour"), OTHERS)
def test_other_flavours_pass(family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    for check in ("encode", "predict", "cuda graphs", "samples"):
        result = run_check(check, case_of(family, tiny_model, tmp_path / check, flavour))
        assert result.ok, result


# -- what the checks find ----------------------------------------------------------------------------------------------

FLUX = spec_of("flux").predict
_CALLS: list[int] = []


def _other_sign(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return -FLUX(denoiser, noisy, level, batch, facts)


def _other_time(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy, level * 0.9, batch, facts)


def _swapped_sides(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy.mT.contiguous(), level, batch, facts).mT


def _scaled_latents(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, 2 * noisy, level, batch, facts)


def _other_guidance(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy, level, batch, replace(facts, details={**facts.details, "guidance": 2.0}))


def _no_caption(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy, level, {**batch, "prompt_embeds": 0 * batch["prompt_embeds"]}, facts)


def _counting(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    _CALLS.append(1)
    return FLUX(denoiser, noisy, level, batch, facts) * (1 + 0.01 * len(_CALLS))


def _reading(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy, level, batch, facts) * (2.0 if level.max() > 2 else 1.0)


def _making(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy, level, batch, facts) * torch.tensor([1.0], device=noisy.device)


def _copying(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy, level, batch, facts) * torch.ones(1).to(noisy.device)


def _failing(denoiser: Any, noisy: Tensor, level: Tensor, batch: Any, facts: Any) -> Tensor:
    return FLUX(denoiser, noisy, level, {"latents": noisy}, facts)


def _deaf(pipeline: Any, request: SampleRequest) -> Sampled:
    return spec_of("flux").sample(pipeline, replace(request, prompt="always this"))


def _small(pipeline: Any, request: SampleRequest) -> Sampled:
    return spec_of("flux").sample(pipeline, replace(request, width=16, height=16))


class _OneText:
    """A text encoder that reads no text."""

    def __init__(self, *given: Any) -> None:
        self._inner = spec_of("flux").load_text_encoder(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, prompts: Any) -> Any:
        return self._inner.encode([Prompt("") for _ in prompts])


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "other sign": ("predict", {"predict": _other_sign}, "a prediction that differs by 2.0e.00"),
    "other time": ("predict", {"predict": _other_time}, "timestep: a difference of 1.0e-01"),
    "swapped sides": ("predict", {"predict": _swapped_sides}, "img_ids: a difference"),
    "scaled latents": ("predict", {"predict": _scaled_latents}, "12 of 384 elements|elements of `noisy` in"),
    "other guidance": ("predict", {"predict": _other_guidance}, "guidance: a difference of 1.0e.00"),
    "no caption": ("predict", {"predict": _no_caption}, "encoder_hidden_states: a difference of 1.0e.00"),
    "an error": ("predict", {"predict": _failing}, "KeyError: 'prompt_embeds'"),
    "state": ("compile", {"predict": _counting}, "differs by"),
    "host read": ("cuda graphs", {"predict": _reading}, "reads a value: testing/test_family_check.py"),
    "host values": ("cuda graphs", {"predict": _making}, "copies a value: testing/test_family_check.py"),
    "host copy": ("cuda graphs", {"predict": _copying}, "copies a value: testing/test_family_check.py"),
    "deaf": ("samples", {"sample": _deaf}, "the same sample for another prompt"),
    "small": ("samples", {"sample": _small}, "1 frames of \\(16, 16\\)"),
    "one text": ("encode", {"load_text_encoder": _OneText}, "the same embedding for two captions"),
    "untrained": ("adapters", {"untrained": ("*.attn.to_q",)}, "a gradient for"),
    "no such target": ("adapters", {"default_targets": ("blocks.*.to_q",)}, "blocks.\\*.to_q, which matches no layer"),
    "targets": ("footprint", {"default_targets": ("transformer_blocks.*.attn.to_q",)}, "default targets with"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_finds_what_it_is_for(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    check, changed, expected = BROKEN[name]
    result = run_check(check, case_of("flux", tiny_model, tmp_path, **changed))
    assert not result.ok
    assert re.search(expected, result.found), result


def test_state_that_outlives_a_step_is_found_by_resuming(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer finds the broken family in the registry."""
    case = case_of("flux", tiny_model, tmp_path, predict=_counting)
    monkeypatch.setattr(registry, "_SPECS", {"flux": case.spec})
    result = run_check("resume", case)
    assert "differ after resuming" in result.found, result


def test_an_unknown_family_is_rejected_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    for given, expected in ((["fluxx"], "flux"), (["wan", "--flavour", "ti2v-5b"], "ti2v-5b-2.2")):
        with pytest.raises(SystemExit) as ended:
            main(["family", "check", *given])
        assert ended.value.code == 1
        assert f"try       {expected}" in capsys.readouterr().err.replace("  try  ", "  try  ")

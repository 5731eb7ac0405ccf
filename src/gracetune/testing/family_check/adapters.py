"""Every kind of adapter on the tiny denoiser, and every file format, read by gracetune and by diffusers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.loaders.lora_base import LoraBaseMixin
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from torch import Tensor, nn

from gracetune.adapters import delta
from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats.programs import misread_by
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.config.registry import ALGORITHM_NAMES, FULL_FINETUNE
from gracetune.config.run_config import Adapter
from gracetune.models.spec import ModelFacts, ModelSpec
from gracetune.storage.safetensors_files import read_tensors
from gracetune.testing.family_check.case import FamilyCase, difference, listed, require

RANK = 4
TOLERANCE = 1e-5
_LR = 1e-2
_LEAST_EFFECT = 1e-4
"""Smallest change of the prediction that counts as an effect."""
DIFFUSERS_KINDS = ("lora", "dora")


def attached_to(case: FamilyCase, denoiser: nn.Module, kind: str) -> Attached:
    spec, expert = case.spec, case.facts.experts[0]
    adapter = Adapter(kind=kind, rank=RANK)
    return attach(
        denoiser, adapter, family=case.family, expert=cast(ExpertStage, expert.name),
        default_targets=spec.default_targets, untrained=case.untrained, seed=0,
    )  # fmt: skip


def targets(spec: ModelSpec, denoiser: nn.Module) -> dict[str, nn.Module]:
    """The default targets, including those that get no gradient."""
    modules = dict(denoiser.named_modules())
    for pattern in spec.default_targets:
        require(
            any(fnmatchcase(name, pattern) for name in modules), f"{pattern}, which matches no layer",
            "patterns of layers", "correct default_targets in SPEC",
        )  # fmt: skip
    return {
        name: module
        for name, module in modules.items()
        if any(fnmatchcase(name, pattern) for pattern in spec.default_targets)
    }


def check_gradients(spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module, loss: Any) -> int:
    """Exactly the default targets that are not declared untrained get a gradient from `loss()`. Their number."""
    layers = targets(spec, denoiser)
    other = [name for name, layer in layers.items() if not isinstance(layer, nn.Linear)]
    require(not other, listed(other), "linear layers", "correct default_targets in SPEC")
    untrained = (*spec.untrained, *facts.untrained)
    unused = [pattern for pattern in untrained if not any(fnmatchcase(name, pattern) for name in layers)]
    require(
        not unused, f"{listed(unused)}, untrained patterns that match no default target", "patterns of default targets",
        "correct `untrained` in SPEC or in `inspect`",
    )  # fmt: skip
    denoiser.requires_grad_(False)
    weights = {name: denoiser.get_parameter(f"{name}.weight").requires_grad_(True) for name in layers}
    loss().backward()
    learned = {name for name, weight in weights.items() if _is_used(weight.grad)}
    declared = {name for name in layers if any(fnmatchcase(name, pattern) for pattern in untrained)}
    dead, alive = sorted({*layers} - declared - learned), sorted(declared & learned)
    require(
        not dead, f"no gradient for {listed(dead)}", "a gradient for every default target",
        "declare layers that cannot get one as `untrained`, or correct `predict`",
    )  # fmt: skip
    require(not alive, f"a gradient for {listed(alive)}, declared as untrained", "none", "remove them from `untrained`")
    return len(learned)


def _is_used(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.abs().max() > 0)


def _loss(case: FamilyCase, denoiser: nn.Module) -> Tensor:
    return case.predict(denoiser).float().square().mean()


def train_step(case: FamilyCase, denoiser: nn.Module, attached: Attached) -> None:
    """One optimizer step. CheckFailedError for a layer without a gradient."""
    _loss(case, denoiser).backward()
    starts_at_zero = attached.zero_initialized()
    silent = [path for path, some in starts_at_zero.items() if some and not any(_is_used(one.grad) for one in some)]
    require(
        not silent, f"no gradient for the adapter of {listed(silent)}", "a gradient for every target",
        "declare layers that cannot get one as `untrained` in SPEC",
    )  # fmt: skip
    torch.optim.AdamW(attached.parameters().values(), lr=_LR).step()


def check_kinds(case: FamilyCase) -> str:
    """Each kind is attached, trained for one step and removed."""
    denoiser = case.denoiser()
    trained = check_gradients(case.spec, case.facts, denoiser, lambda: _loss(case, denoiser))
    denoiser.zero_grad()
    with torch.no_grad():
        base = case.predict(denoiser)
    for kind in (*ALGORITHM_NAMES, FULL_FINETUNE):
        own = case.denoiser() if kind == FULL_FINETUNE else denoiser
        attached = attached_to(case, own, kind)
        train_step(case, own, attached)
        with torch.no_grad():
            effect = difference(case.predict(own), base)
        require(
            effect > _LEAST_EFFECT, f"{kind}: one step changes the prediction by {effect:.1e}", f"{_LEAST_EFFECT:g}",
            "look for layers whose output `predict` does not use",
        )  # fmt: skip
        attached.detach()
        if kind != FULL_FINETUNE:
            with torch.no_grad():
                left = difference(case.predict(denoiser), base)
            require(
                left == 0, f"{kind}: a difference of {left:.1e} after the adapter was removed", "none",
                "let `predict` and `adjust` keep no state in the denoiser",
            )  # fmt: skip
    return f"{len(ALGORITHM_NAMES) + 1} kinds; all {trained} default targets get gradients"


# -- files -------------------------------------------------------------------------------------------------------------


def effects(state: AdapterState, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weight of each layer with the adapter, and its bias."""
    for path, layer in state.layers.items():
        yield path, delta.apply(layer, weights[path])
        bias = delta.bias_delta(layer)
        if bias is not None:
            yield f"{path} bias", bias


def check_files(case: FamilyCase) -> str:
    """Each kind in each format: written, read, written again to the same bytes, and loaded by diffusers' loader."""
    denoiser = case.denoiser()
    written, rejected, loaded = 0, 0, []
    for kind in ALGORITHM_NAMES:
        attached = attached_to(case, denoiser, kind)
        train_step(case, denoiser, attached)
        state = attached.state()
        with torch.no_grad():
            expected = case.predict(denoiser)
        attached.detach()
        weights = {path: denoiser.get_parameter(f"{path}.weight").detach() for path in state.layers}
        for format in FORMATS:
            held = _held(state, weights, format)
            if not _round_trips(case, held, weights, format):
                rejected += 1
                continue
            written += 1
            if kind in DIFFUSERS_KINDS and misread_by(state, format, "diffusers") is None:
                loaded.append(f"{kind} as {format} by {_check_loader(case, state, format, expected)}")
    return f"{written} files, {rejected} combinations rejected; loaded {', '.join(loaded) or 'by no other program'}"


def _held(state: AdapterState, weights: Mapping[str, Tensor], format: str) -> AdapterState:
    """The state as the format stores DoRA's magnitudes."""
    if not FORMATS[format].dora_by_base:
        return state
    return replace(
        state, layers={path: delta.with_base_magnitude(one, weights[path]) for path, one in state.layers.items()}
    )


def _round_trips(case: FamilyCase, state: AdapterState, weights: Mapping[str, Tensor], format: str) -> bool:
    """False if the format cannot hold the adapter, which it says."""
    folder = Path(tempfile.mkdtemp(dir=case.work))
    first, second = folder / "first.safetensors", folder / "second.safetensors"
    try:
        save(first, state, format, torch.float32)
    except CannotHoldError as error:
        require(format != "lycoris", str(error.problems[0].found), "a format that holds every adapter", "correct KEYS")
        return False
    opened = open_adapter(first, case.family)
    again = opened.state()
    require(
        again.layers.keys() == state.layers.keys(),
        f"{format}: {len(again.layers.keys() & state.layers.keys())} layers of {len(again.layers)} that were read back",
        f"the {len(state.layers)} layers that were written", "map every default target in KEYS, both ways",
    )  # fmt: skip
    expected = dict(effects(state, weights))
    for path, value in effects(again, weights):
        off = difference(value, expected[path])
        require(
            off <= TOLERANCE, f"{format}: {path} differs by {off:.1e} after reading it back", f"at most {TOLERANCE:g}",
            "correct the order of fused matrices in KEYS",
        )  # fmt: skip
    save(second, again, format, torch.float32)
    same = first.read_bytes() == second.read_bytes()
    require(same, f"{format}: another file when it is written again", "the same bytes", "map each layer once in KEYS")
    return True


def _check_loader(case: FamilyCase, state: AdapterState, format: str, expected: Tensor) -> str:
    """Load a file as users of diffusers do, and compare the prediction. Returns what loaded it."""
    file = save(Path(tempfile.mkdtemp(dir=case.work)) / "adapter.safetensors", state, format, torch.float32)
    pipeline, component = case.pipeline, case.facts.experts[0].component
    has_loader = isinstance(pipeline, LoraBaseMixin)
    if has_loader:
        loader, denoiser = "diffusers", pipeline.components[component]
        pipeline.load_lora_weights(file)
    else:
        loader, denoiser = "PEFT", case.denoiser()
        _load_by_peft(denoiser, file, state, prefix=f"{component}.")
    with torch.no_grad():
        off = difference(case.predict(denoiser), expected)
    if has_loader:
        pipeline.unload_lora_weights()
    require(
        off <= TOLERANCE, f"{format}: loaded by {loader}, the prediction differs by {off:.1e}",
        f"at most {TOLERANCE:g}",
        f"correct KEYS, or remove diffusers from the programs that read {format} files of this family",
    )  # fmt: skip
    return loader


def _load_by_peft(denoiser: nn.Module, file: Path, state: AdapterState, prefix: str) -> None:
    """For families whose pipelines have no loader: PEFT takes diffusers' keys without the component's name."""
    layer = next(iter(state.layers.values()))
    options: dict[str, Any] = {"r": RANK, "lora_alpha": layer.alpha, "use_dora": layer.algorithm == "dora"}
    inject_adapter_in_model(LoraConfig(target_modules=[*state.layers], **options), denoiser)
    tensors = {key.removeprefix(prefix): value for key, value in read_tensors(file).items()}
    outcome: Any = set_peft_model_state_dict(denoiser, tensors)
    unexpected = outcome.unexpected_keys
    require(not unexpected, f"{listed(unexpected)}, keys that PEFT does not know", "diffusers' names", "correct KEYS")

"""The choice of the attention kernel a denoiser runs on.

    facts = attention_facts(device, dtype, spec.attention)        # queries torch and the GPU
    choice = choose_attention(config.training.attention, facts)   # pure: a backend and its reason
    PartPlacement(device, dtype, choice.backend)                  # `load_component` applies it

diffusers' transformers call attention through its dispatcher, which has a backend name for each kernel. The U-Net and
Stable Audio call torch's `scaled_dot_product_attention` directly; their calls are wrapped in `sdpa_kernel` instead.
cuDNN is selected with `sdpa_kernel` for every model (see `apply_attention`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import AttentionCalls

AttentionName = Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math", "flash_attn_2", "flash_attn_3"]

BACKENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sdpa": "native",
        "flash": "_native_flash",
        "cudnn": "_native_cudnn",
        "efficient": "_native_efficient",
        "math": "_native_math",
        "flash_attn_2": "flash",
        "flash_attn_3": "_flash_3",
    }
)
"""Value of `training.attention` -> diffusers' backend name."""

_KERNELS: Final = MappingProxyType(
    {
        "_native_flash": SDPBackend.FLASH_ATTENTION,
        "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
        "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
        "_native_math": SDPBackend.MATH,
    }
)
_PACKAGES: Final = MappingProxyType({"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"})
_PLAIN: Final = AttentionCalls()
_PROBE_TOKENS = 1024
"""Sequence length of the example call whose support is queried."""
_HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionFacts:
    """What torch and the GPU support for one kind of attention call."""

    device: str
    """`cuda`, `cpu`."""
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    """The GPU's compute capability."""
    masked: bool = False
    """The model passes an attention mask, which the flash kernels do not support."""
    dispatched: bool = True
    """The model's attention goes through diffusers' dispatcher."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Kernel or package, by its name in the config -> why it cannot be used here."""


@dataclass(frozen=True)
class AttentionChoice:
    backend: str | None
    """diffusers' backend name, for `PartPlacement.attention`. None lets torch choose for each call."""
    reason: str


def attention_facts(
    device: torch.device, dtype: torch.dtype, calls: AttentionCalls = _PLAIN
) -> AttentionFacts:  # fmt: skip
    """Query torch about a call of this kind, and check whether the optional packages can be imported."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        lacking = _unusable_kernels(device, dtype, calls.head_dim, calls.masked)
    else:
        capability, lacking = None, dict.fromkeys(("cudnn", "efficient"), "only on a CUDA GPU")
    lacking |= {name: why for name, package in _PACKAGES.items() if (why := _import_error(package)) is not None}
    return AttentionFacts(device.type, dtype, capability, calls.masked, calls.dispatched, lacking)


def _unusable_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> dict[str, str]:
    """torch kernels that do not support a call of this kind -> why."""
    from torch.backends.cuda import (
        SDPAParams,
        can_use_cudnn_attention,
        can_use_efficient_attention,
        can_use_flash_attention,
    )

    query = torch.empty(1, 8, _PROBE_TOKENS, head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 1, _PROBE_TOKENS, device=device, dtype=torch.bool) if masked else None
    # With gradients, because training needs kernels that have a backward pass. Then: no dropout, not causal, no GQA.
    call = SDPAParams(query, query, query, mask, 0.0, False, False)
    usable: dict[str, Callable[[SDPAParams], bool]] = {
        "flash": can_use_flash_attention,
        "cudnn": can_use_cudnn_attention,
        "efficient": can_use_efficient_attention,
    }
    why = f"torch does not support it here for {dtype} and head size {head_dim}{', with a mask' if masked else ''}"
    return {name: why for name, can_use in usable.items() if not can_use(call)}


def _import_error(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        return f"the package {package} is not installed" if missing else f"{package} cannot be imported: {error}"
    return None


def choose_attention(setting: AttentionName, facts: AttentionFacts) -> AttentionChoice:
    """The requested kernel, or an error that says why it cannot be used. Pure.

    `auto` never chooses a package outside torch. It chooses cuDNN on GPUs of compute capability 9.0 and up, where it is
    faster than torch's flash kernel on the long sequences of video. A masked model is left to torch, because which
    kernel supports a mask depends on the mask's shape.
    """
    if setting == "auto":
        return _automatic(facts)
    obstacle = _obstacle(setting, facts)
    if obstacle is None:
        return AttentionChoice(BACKENDS[setting], "set by training.attention")
    possible = [name for name in ("auto", *BACKENDS) if name == "auto" or _obstacle(name, facts) is None]
    hint = "--set training.attention=auto"
    raise ConfigError([Problem("training.attention", f"{setting}: {obstacle}", f"one of {', '.join(possible)}", hint)])


def _automatic(facts: AttentionFacts) -> AttentionChoice:
    if facts.device != "cuda" or facts.capability is None:
        return AttentionChoice(None, "no CUDA GPU: torch's own attention")
    if facts.masked:
        return AttentionChoice(None, "the model uses attention masks: torch picks a kernel for each call")
    major, minor = facts.capability
    obstacle = _obstacle("cudnn", facts)
    if obstacle is not None:
        return AttentionChoice(None, f"torch picks a kernel for each call; cuDNN: {obstacle}")
    if facts.capability < (9, 0):
        return AttentionChoice(None, f"torch picks a kernel for each call at compute capability {major}.{minor}")
    return AttentionChoice(BACKENDS["cudnn"], f"cuDNN: compute capability {major}.{minor}, {facts.dtype}")


def _obstacle(setting: str, facts: AttentionFacts) -> str | None:
    if setting in facts.lacking:
        return facts.lacking[setting]
    if setting in ("sdpa", "math"):
        return None
    if setting in _PACKAGES and facts.device != "cuda":
        return "only on a CUDA GPU"
    if setting != "efficient" and facts.device == "cuda" and facts.dtype not in _HALF_DTYPES:
        return f"supports float16 and bfloat16 only, not {facts.dtype}"
    if setting in ("flash", *_PACKAGES) and facts.masked:
        return "the model uses attention masks, which flash kernels do not support"
    return _package_obstacle(setting, facts)


def _package_obstacle(setting: str, facts: AttentionFacts) -> str | None:
    capability = facts.capability or (0, 0)
    own = f"compute capability {capability[0]}.{capability[1]}"
    if setting == "flash_attn_2" and not facts.dispatched:
        return "this model calls torch's attention directly, which does not include flash-attn 2"
    if setting == "flash_attn_2" and capability < (8, 0):
        return f"needs compute capability 8.0 or later; this GPU has {own}"
    if setting == "flash_attn_3" and capability[0] != 9:
        return f"its kernels need compute capability 9.x; this GPU has {own}"
    return None


# -- applying the choice -----------------------------------------------------------------------------------------------


def apply_attention(model: nn.Module, backend: str) -> None:
    """Make this model's attention use a backend, given by diffusers' name. Other models in the process keep theirs.

    flash-attn 3 is the exception. diffusers' own call of it has no backward pass, so it is activated as torch's flash
    implementation instead, for the whole process.
    """
    if backend == BACKENDS["flash_attn_3"]:
        torch.nn.attention.activate_flash_attention_impl("FA3")
        backend = BACKENDS["flash"]
    own_calls = [module for module in model.modules() if _calls_torch_directly(module)]
    if own_calls and backend != BACKENDS["sdpa"] and backend not in _KERNELS:
        found = f"{backend}, for {type(model).__name__}, which calls torch's attention directly"
        raise ConfigError([Problem("training.attention", found, ", ".join(_KERNELS), "--set training.attention=auto")])
    # diffusers' call of cuDNN copies query, key and value before it and the result after it, which cuDNN does not need.
    # So the model uses torch's plain call here, wrapped in `sdpa_kernel`.
    through_torch = backend == BACKENDS["cudnn"]
    _set_dispatched(model, BACKENDS["sdpa"] if through_torch else backend)
    for module in own_calls:
        module.processor = _with_kernel(module.processor, _KERNELS.get(backend))
    for module in (one for one in model.modules() if _is_dispatched(one)):
        module.processor = _with_kernel(module.processor, _KERNELS[backend] if through_torch else None)


def _set_dispatched(model: Any, backend: str) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    # `set_attention_backend` also changes the process-wide default. Leaving this context restores it.
    with attention_backend(AttentionBackendName.NATIVE):
        model.set_attention_backend(backend)


def _is_dispatched(module: Any) -> bool:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    return isinstance(module, Attention | AttentionModuleMixin) and hasattr(module.processor, "_attention_backend")


def _calls_torch_directly(module: Any) -> bool:
    from diffusers.models.attention_processor import Attention

    return isinstance(module, Attention) and not hasattr(module.processor, "_attention_backend")


def _with_kernel(processor: Any, kernel: SDPBackend | None) -> Any:
    """The same processor, with every call restricted to one kernel. None removes the restriction.

    A generated subclass rather than a wrapper, because diffusers inspects a processor's class and call signature.
    """
    original: Any = getattr(type(processor), "_original", type(processor))
    processor.__class__ = original if kernel is None else _restricted_class(original, kernel)
    return processor


@functools.cache
def _restricted_class(original: Any, kernel: SDPBackend) -> Any:
    """One subclass for all processors of a class. torch.compile guards on classes: with a class per block it would
    compile a graph per block, reach its recompile limit, and run the rest uncompiled."""
    call = original.__call__

    @functools.wraps(call)
    def with_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(kernel):
            return call(self, *args, **kwargs)

    return type(original.__name__, (original,), {"__call__": with_kernel, "_original": original})

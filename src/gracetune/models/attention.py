"""Which attention kernel a denoiser runs on: asked of torch and of the GPU's capability, decided with a reason.

    facts = attention_facts(device, dtype, spec.attention)    # asks
    choice = choose_attention(config.training.attention, facts)   # decides; pure
    Placement(device, dtype, choice.backend)                  # `load_component` applies it

diffusers' transformers send attention through its dispatcher, which has a name for each kernel. The UNet and Stable
Audio call torch's `scaled_dot_product_attention` themselves: there the kernel is set around each call. cuDNN's is set
so everywhere.
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

Asked = Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math", "flash_attn_2", "flash_attn_3"]

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
"""What a config asks for -> diffusers' name of it."""

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
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionFacts:
    """What torch and the GPU say about one kind of attention call."""

    device: str
    """`cuda`, `cpu`."""
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    """The GPU's compute capability."""
    masked: bool = False
    """The model gives its attention a mask, which the flash kernels do not take."""
    dispatched: bool = True
    """The model's attention goes through diffusers' dispatcher."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Kernel or package (by the config's name for it) -> why it cannot be used here."""


@dataclass(frozen=True)
class AttentionChoice:
    backend: str | None
    """diffusers' name, for `Placement.attention`; None leaves each call to torch."""
    reason: str


def attention_facts(
    device: torch.device, dtype: torch.dtype, calls: AttentionCalls = _PLAIN
) -> AttentionFacts:  # fmt: skip
    """Asks torch about a call of this kind, and whether the optional packages can be imported."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        lacking = _torch_lacks(device, dtype, calls.head_dim, calls.masked)
    else:
        capability, lacking = None, dict.fromkeys(("cudnn", "efficient"), "only on a CUDA GPU")
    lacking |= {name: why for name, package in _PACKAGES.items() if (why := _why_not(package)) is not None}
    return AttentionFacts(device.type, dtype, capability, calls.masked, calls.dispatched, lacking)


def _torch_lacks(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> dict[str, str]:
    from torch.backends.cuda import (
        SDPAParams,
        can_use_cudnn_attention,
        can_use_efficient_attention,
        can_use_flash_attention,
    )

    query = torch.empty(1, 8, _PROBE_TOKENS, head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 1, _PROBE_TOKENS, device=device, dtype=torch.bool) if masked else None
    call = SDPAParams(query, query, query, mask, 0.0, False, False)
    usable: dict[str, Callable[[SDPAParams], bool]] = {
        "flash": can_use_flash_attention,
        "cudnn": can_use_cudnn_attention,
        "efficient": can_use_efficient_attention,
    }
    why = f"torch cannot use it here for {dtype}, heads of {head_dim}{', a mask' if masked else ''}"
    return {name: why for name, ask in usable.items() if not ask(call)}


def _why_not(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        return f"the package {package} is not installed" if missing else f"{package} cannot be imported: {error}"
    return None


def choose_attention(asked: Asked, facts: AttentionFacts) -> AttentionChoice:
    """Pure. What was asked for, or a refusal that says why not; `auto` never takes a package from outside torch.

    It takes cuDNN on GPUs of capability 9.0 and up, where it is ahead of torch's flash kernel on the long sequences of
    video; a mask leaves every call to torch, because which kernel takes a mask depends on its shape.
    """
    if asked == "auto":
        return _automatic(facts)
    obstacle = _obstacle(asked, facts)
    if obstacle is None:
        return AttentionChoice(BACKENDS[asked], "asked for by training.attention")
    possible = [name for name in ("auto", *BACKENDS) if name == "auto" or _obstacle(name, facts) is None]
    hint = "--set training.attention=auto"
    raise ConfigError([Problem("training.attention", f"{asked}: {obstacle}", f"one of {', '.join(possible)}", hint)])


def _automatic(facts: AttentionFacts) -> AttentionChoice:
    if facts.device != "cuda" or facts.capability is None:
        return AttentionChoice(None, "no CUDA GPU: torch's own attention")
    if facts.masked:
        return AttentionChoice(None, "the model masks its attention: torch picks a kernel for each call")
    major, minor = facts.capability
    obstacle = _obstacle("cudnn", facts)
    if obstacle is not None:
        return AttentionChoice(None, f"torch picks a kernel for each call; cuDNN: {obstacle}")
    if facts.capability < (9, 0):
        return AttentionChoice(None, f"torch picks a kernel for each call at compute capability {major}.{minor}")
    return AttentionChoice(BACKENDS["cudnn"], f"cuDNN's kernel: compute capability {major}.{minor}, {facts.dtype}")


def _obstacle(asked: str, facts: AttentionFacts) -> str | None:
    if asked in facts.lacking:
        return facts.lacking[asked]
    if asked in ("sdpa", "math"):
        return None
    if asked in _PACKAGES and facts.device != "cuda":
        return "only on a CUDA GPU"
    if asked != "efficient" and facts.device == "cuda" and facts.dtype not in _HALVES:
        return f"takes 16-bit numbers, not {facts.dtype}"
    if asked in ("flash", *_PACKAGES) and facts.masked:
        return "the model masks its attention, which flash kernels do not take"
    return _package_obstacle(asked, facts)


def _package_obstacle(asked: str, facts: AttentionFacts) -> str | None:
    capability = facts.capability or (0, 0)
    told = f"compute capability {capability[0]}.{capability[1]}"
    if asked == "flash_attn_2" and not facts.dispatched:
        return "this model calls torch's attention itself, and flash-attn 2 is no part of it"
    if asked == "flash_attn_2" and capability < (8, 0):
        return f"needs compute capability 8.0; this GPU has {told}"
    if asked == "flash_attn_3" and capability[0] != 9:
        return f"its kernels are for compute capability 9.0; this GPU has {told}"
    return None


# -- putting it into force --------------------------------------------------------------------------------------------


def apply_attention(model: nn.Module, backend: str) -> None:
    """Let this model's attention run on a backend, by diffusers' name; other models in the process keep theirs.

    Flash-attn 3 is the exception: diffusers' own call of it has no backward pass, so it is torch's flash kernel that it
    replaces, and that for the whole process.
    """
    if backend == BACKENDS["flash_attn_3"]:
        torch.nn.attention.activate_flash_attention_impl("FA3")
        backend = BACKENDS["flash"]
    own_calls = [module for module in model.modules() if _calls_torch_itself(module)]
    if own_calls and backend != BACKENDS["sdpa"] and backend not in _KERNELS:
        found = f"{backend}, for {type(model).__name__}, which calls torch's attention itself"
        raise ConfigError([Problem("training.attention", found, ", ".join(_KERNELS), "--set training.attention=auto")])
    # diffusers' own call of cuDNN copies query, key and value first, and its answer is copied back: cuDNN needs none of
    # that. So it is torch's plain call here, with the kernel set around it.
    through_torch = backend == BACKENDS["cudnn"]
    _set_dispatched(model, BACKENDS["sdpa"] if through_torch else backend)
    for module in own_calls:
        module.processor = _bound(module.processor, _KERNELS.get(backend))
    for module in (one for one in model.modules() if _is_dispatched(one)):
        module.processor = _bound(module.processor, _KERNELS[backend] if through_torch else None)


def _set_dispatched(model: Any, backend: str) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    # Leaving this context puts the process-wide default back, which `set_attention_backend` changes in passing.
    with attention_backend(AttentionBackendName.NATIVE):
        model.set_attention_backend(backend)


def _is_dispatched(module: Any) -> bool:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    return isinstance(module, Attention | AttentionModuleMixin) and hasattr(module.processor, "_attention_backend")


def _calls_torch_itself(module: Any) -> bool:
    from diffusers.models.attention_processor import Attention

    return isinstance(module, Attention) and not hasattr(module.processor, "_attention_backend")


def _bound(processor: Any, kernel: SDPBackend | None) -> Any:
    """The same processor, whose calls happen under one kernel; None releases it.

    A subclass made on the spot, because diffusers looks at a processor's class and at the arguments its call takes.
    """
    original: Any = getattr(type(processor), "_unbound", type(processor))
    processor.__class__ = original if kernel is None else _under(original, kernel)
    return processor


@functools.cache
def _under(original: Any, kernel: SDPBackend) -> Any:
    """One class for all processors of a kind: a graph is for the classes it met, and of a class for each block there
    would be a graph for each block, until torch has too many of them and runs the rest uncompiled."""
    call = original.__call__

    @functools.wraps(call)
    def under_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(kernel):
            return call(self, *args, **kwargs)

    return type(original.__name__, (original,), {"__call__": under_kernel, "_unbound": original})

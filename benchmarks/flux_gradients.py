"""Does stock diffusers train FLUX with wrong gradients on this GPU? Its own model and peft's LoRA, kernel by kernel.

python benchmarks/flux_gradients.py --output benchmarks/results/flux-gradients-NAME.json

FLUX.1's blocks at their published width, few of them, on 4,096 image and 512 text tokens: the loss and the adapter's
gradients of one step in bf16, for torch's own choice of an attention kernel and for each kernel by name, held against
the same step in fp32. Beside it, attention alone: a gradient that is a slice of a larger tensor, as the concatenation
in FLUX's single blocks makes it, and the same gradient as a contiguous copy.

Nothing of ours is in the model. Every case runs in a process of its own: a kernel that reads past its input ends the
whole process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from gracetune.bench.results import result_of, write_result
from gracetune.bench.row import BenchRow
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.hardware import probe

REFERENCE: Final = "fp32"
DEFAULT: Final = "default"
KERNELS: Final[Mapping[str, SDPBackend]] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MOST: Final = 0.03
"""Relative error of the gradients of a bf16 step; the libraries' own are at 0.008 (numerics-cpu.json)."""
SECONDS: Final = 60
"""After which a process is ended."""
_GRADIENTS: Final = "gradients.pt"
_REPORTED: Final = "told.json"


@dataclass(frozen=True)
class Size:
    heads: int = 24
    head: int = 128
    doubles: int = 1
    singles: int = 3
    image_side: int = 64
    """Tokens along a side: 1024 pixels are 64 of them."""
    texts: int = 512

    @property
    def width(self) -> int:
        return self.heads * self.head


TINY: Final = Size(heads=2, head=16, doubles=1, singles=2, image_side=4, texts=8)


class _Seen(TorchDispatchMode):
    """Names the attention operations that run in here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "scaled_dot_product" in name:
            self.names.add(name.removeprefix("aten.").split(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


def chosen(backend: str) -> AbstractContextManager[Any]:
    if backend == DEFAULT:
        return nullcontext()
    return sdpa_kernel(KERNELS["math" if backend == REFERENCE else backend])


# -- one case, in its own process -------------------------------------------------------------------------------------


def build(size: Size, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The library's model with LoRA of rank 16 beside its attention; the same values in every process."""
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig

    torch.manual_seed(0)
    rope = {"axes_dims_rope": (16, 56, 56)} if size.head == 128 else {"axes_dims_rope": (4, 6, 6)}
    with device:
        model: Any = FluxTransformer2DModel(
            num_layers=size.doubles, num_single_layers=size.singles, num_attention_heads=size.heads,
            attention_head_dim=size.head, guidance_embeds=True, **rope,
        )  # fmt: skip
    model.to(torch.bfloat16).requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=targets, init_lora_weights=False))
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, device=device) * 0.02
            parameter.requires_grad_()
        else:
            parameter.data = parameter.data.to(dtype)
    return model.train()  # type: ignore[no-any-return]


def inputs(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(2)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16().to(dtype)

    side = size.image_side
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
    return {
        "hidden_states": noise(1, side * side, 64),
        "encoder_hidden_states": noise(1, size.texts, 4096),
        "pooled_projections": noise(1, 768),
        # A thousand times these is exact in bf16 too: its sines would differ otherwise, and not by attention.
        "timestep": torch.full((1,), 0.5, device=device, dtype=dtype),
        "guidance": torch.full((1,), 4.0, device=device, dtype=torch.float32),
        "img_ids": torch.cat([torch.zeros(side * side, 1), places], -1).to(device),
        "txt_ids": torch.zeros(size.texts, 3, device=device),
    }


def step(backend: str, size: Size, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Loss and gradients of one training step, and which kernels it took."""
    dtype = torch.float32 if backend == REFERENCE else torch.bfloat16
    model, given = build(size, device, dtype), inputs(size, device, dtype)
    target = torch.randn(
        given["hidden_states"].shape, generator=torch.Generator(device).manual_seed(3), device=device
    )  # fmt: skip
    with chosen(backend), torch.autocast(device.type, torch.bfloat16, enabled=backend != REFERENCE):
        with torch.no_grad(), _Seen() as seen_frozen:
            model(**given)
        with _Seen() as seen:
            prediction = model(**given, return_dict=False)[0]
    loss = (prediction.float() - target).square().mean()
    loss.backward()
    found = {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}
    return found, {"loss": float(loss), "kernels": sorted(seen.names or seen_frozen.names)}


def alone(backend: str, size: Size, device: torch.device, file: Path) -> None:
    """Attention's own gradients: from a contiguous copy of a slice, and from the slice itself, which may end the
    process; so each error is written as soon as it is known."""
    dtype = torch.float32 if backend == REFERENCE else torch.bfloat16
    tokens = size.image_side**2 + size.texts
    generator = torch.Generator(device).manual_seed(4)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    random_tensor = [noise(1, tokens, size.heads, size.head) for _ in range(3)]
    wide = noise(1, tokens, 5 * size.width)  # of the concatenation with an MLP four times as wide
    slice_ = wide[..., : size.width].unflatten(-1, (size.heads, size.head))

    def gradients(kind: torch.dtype, gradient: Tensor, kernel: AbstractContextManager[Any]) -> list[Tensor]:
        leaves = [one.to(kind, copy=True).requires_grad_() for one in random_tensor]
        q, k, v = (one.permute(0, 2, 1, 3) for one in leaves)
        with kernel:
            attended = scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3)
            attended.backward(gradient.to(kind) if kind != gradient.dtype else gradient)
        return [leaf.grad.float() for leaf in leaves if leaf.grad is not None]

    wanted = gradients(torch.float32, slice_, sdpa_kernel(SDPBackend.MATH))
    errors = {}
    for name, gradient in (("contiguous", slice_.contiguous()), ("slice", slice_)):
        found = gradients(dtype, gradient, chosen(backend))
        errors[name] = max(float((one - two).norm() / two.norm()) for one, two in zip(found, wanted, strict=True))
        file.write_text(json.dumps(errors))


def run_case(part: str, backend: str, size: Size, device: torch.device, folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if part == "alone":
        alone(backend, size, device, folder / _REPORTED)
        return
    gradients, report_text = step(backend, size, device)
    torch.save(gradients, folder / _GRADIENTS)
    (folder / _REPORTED).write_text(json.dumps(report_text))


# -- all cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """One process, when it is over."""

    folder: Path
    code: int

    @property
    def why(self) -> str:
        lines = [line.strip() for line in (self.folder / "log").read_text().splitlines() if "Error:" in line]
        return f"exit code {self.code}: {lines[-1][:200] if lines else 'no message'}"

    def report_text(self) -> dict[str, Any]:
        """Empty where it did not get that far."""
        file = self.folder / _REPORTED
        return json.loads(file.read_text()) if file.is_file() else {}

    def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(self.folder / _GRADIENTS, weights_only=True)
        return found


def rows(names: list[str], folder: Path, smoke: bool) -> Iterator[BenchRow]:
    """The steps at once, then attention alone at once: starting processes takes longer than what they do, and all
    together would need more memory than one GPU has."""
    steps = _ended("step", [REFERENCE, *names], folder, smoke)
    if steps[REFERENCE].code != 0:
        raise SystemExit(f"the reference in fp32 failed: {steps[REFERENCE].why}")
    wanted = steps[REFERENCE].gradients()
    for name in names:
        yield _step_row(name, steps[name], wanted)
    alone = _ended("alone", names, folder, smoke)
    for name in names:
        yield from _alone_rows(name, alone[name])


def _ended(part: str, names: list[str], folder: Path, smoke: bool) -> dict[str, Ended]:
    children = {}
    for name in names:
        own = folder / f"{part}-{name}"
        own.mkdir()
        command = [sys.executable, __file__, "--part", part, "--case", name, "--folder", str(own)]
        with (own / "log").open("w") as log:
            children[name] = subprocess.Popen([*command, *(["--smoke"] if smoke else [])], stdout=log, stderr=log)
    return {
        name: Ended(folder / f"{part}-{name}", _code(child, SECONDS * (5 if smoke else 1)))
        for name, child in children.items()
    }


def _code(child: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _alone_rows(name: str, ended: Ended) -> Iterator[BenchRow]:
    report_text = ended.report_text()
    forms = {"contiguous": "from a contiguous copy of the gradient", "slice": "from a slice of a larger gradient"}
    for form, words in forms.items():
        error, detail = report_text.get(form), f"alone, bf16, {words}"
        if error is None:
            detail = f"{detail}; {ended.why}"
            yield BenchRow(f"attention_{name}_{form}", -1, "did not run", f"<= {MOST:g}", ok=False, detail=detail)
        else:
            yield BenchRow(f"attention_{name}_{form}", error, "relative error", f"<= {MOST:g}", error <= MOST, detail)


def _step_row(name: str, ended: Ended, wanted: Mapping[str, Tensor]) -> BenchRow:
    report_text = ended.report_text()
    if not report_text:
        return BenchRow(f"flux_{name}", -1, "did not run", f"<= {MOST:g}", ok=False, detail=ended.why)
    found = ended.gradients()
    assert found.keys() == wanted.keys()
    one, two = (torch.cat([all_[key].flatten().double() for key in sorted(wanted)]) for all_ in (found, wanted))
    error = float((one - two).norm() / two.norm())
    each = {key: float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted}
    worst = max(each, key=lambda key: each[key])
    cosine = float(one @ two / (one.norm() * two.norm()))
    kernels = ", ".join(report_text["kernels"]) or "no fused kernel"
    return BenchRow(
        f"flux_{name}", error, "relative error", f"<= {MOST:g}", error <= MOST,
        f"{kernels}; loss {report_text['loss']:.6g}; cosine {cosine:.6f}; {len(found)} tensors, the worst "
        f"{each[worst]:.3g}: "
        f"{worst}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on a CPU too: does everything run?")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    requested = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if requested.case is not None:
        run_case(requested.part, requested.case, TINY if requested.smoke else Size(), device, requested.folder)
        return 0
    if device.type == "cpu" and not requested.smoke:
        parser.error("needs a CUDA GPU; --smoke runs a tiny model on this machine's CPU")
    names = [DEFAULT, *(KERNELS if device.type == "cuda" else ("math",))]
    machine, found = probe(), list[BenchRow]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracetune-bench-")))
        for row in rows(names, folder, requested.smoke):
            found.append(row)
            print_rows(out(), [row])
            if requested.output is not None:
                write_result(requested.output, result_of("flux_gradients", found, machine))
    return 0  # a kernel that is wrong is the finding, not a failure of this script


if __name__ == "__main__":
    sys.exit(main())

"""The record of an adapter algorithm: everything that config, planner, attaching and file formats know about it.

The module of a record does not import torch, because checking a config reads the records' names and options before any
model code is imported. Methods that handle tensors import torch when they are called.

A layer's tensors have the names of the algorithm's paper and files, without a prefix. `alpha` is a finite number beside
the tensors, not one of them. The scale of a change is alpha / rank. If nothing is decomposed (whole LoKr, (IA)3, OFT,
full differences), the scale is 1 and alpha is 1.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from gracetune.adapters.algorithms.assembly import Convention, LayerError, listed
from gracetune.adapters.computation import REFERENCE, Computation
from gracetune.adapters.state import Layer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gracetune.adapters.fast.modules import AdaptedLinear
    from gracetune.adapters.layer import AttachedLayer
    from gracetune.adapters.options import LayerOptions

Dimensions = tuple[int, ...]
Tensors = Mapping[str, "Tensor"]
FirstValues = tuple[dict[str, "Tensor"], int | None]
"""Tensors by name, and the rank, or None if nothing is decomposed."""
SingularVectors = tuple["Tensor", "Tensor", "Tensor", float]
"""Left vectors [out, r], values [r], right vectors [r, in * kernel], and the norm of the whole change. Values
may be negative if the scale is."""


class Options(Protocol):
    """The options of one layer. `Adapter` of the config and `LayerOptions` both fit."""

    @property
    def rank(self) -> int: ...

    @property
    def factor(self) -> int: ...

    @property
    def full_rank(self) -> bool: ...

    @property
    def decompose_both(self) -> bool: ...

    @property
    def dropout(self) -> float: ...


class WeightShape(Protocol):
    """The shape of a weight: a matrix [outputs, inputs], or a convolution's [outputs, inputs, *kernel]."""

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def kernel(self) -> Dimensions: ...

    @property
    def bias(self) -> bool: ...


class Algorithm(ABC):
    # -- names and options --------------------------------------------------------------------------------------------

    name: ClassVar[str]
    """The value of `adapter.kind`."""
    lycoris_name: ClassVar[str | None] = None
    """Its name in LyCORIS files and as `algo` in `adapter.by_module`."""
    own_options: ClassVar[tuple[str, ...]] = ()
    """Keys of `adapter` that only this algorithm reads."""
    has_rank: ClassVar[bool] = True
    """Whether `adapter.rank` has an effect."""
    rank_is_width: ClassVar[bool] = False
    """Whether the factors are as wide as the rank for any matrix. If so, a huge rank is a mistake."""

    is_lora: ClassVar[bool] = False
    """Whether every program that loads LoRA loads it: LoRA, and LoCon, which has the same matrices."""

    def described(self, options: Options) -> str:
        """The options that decide the adapter's size, for the title of a plan."""
        return f"rank {options.rank}" if self.has_rank else ""

    # -- tensors ------------------------------------------------------------------------------------------------------

    trained_by_peft: ClassVar[bool] = False
    """Whether peft's layer is the reference and PEFT's files can hold it. Otherwise LyCORIS' rules apply."""
    zero_at_first: ClassVar[frozenset[str]]
    """Tensors whose initial value is 0. While all of them in a layer are 0, the layer changes nothing and its other
    tensors get no gradient."""
    constants: ClassVar[Mapping[str, int]] = {}
    """Tensors of a file that are flags and not trained, each with the value it has in adapters trained here."""

    @abstractmethod
    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        """The shapes of the trained tensors, by name."""

    @abstractmethod
    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        """The initial values of the trained tensors: those of peft or lycoris-lora, bit for bit."""

    # -- the change of the weight -------------------------------------------------------------------------------------

    depends_on_weight: ClassVar[bool] = False
    """Whether the change depends on the weight. If so, implement `changed`, otherwise `added`."""
    magnitude_by_rows: ClassVar[bool] = False
    """Whether a `dora_scale` of any shape belongs to rows. Otherwise its shape distinguishes rows from columns."""
    bias_tensor: ClassVar[str | None] = None
    """The tensor that changes the layer's bias."""

    def added(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        """The change to a weight of this shape, before scaling. It is differentiable with respect to `tensors`."""
        raise NotImplementedError

    def changed(self, tensors: Tensors, weight: Tensor) -> Tensor:
        """The change to this weight, not the changed weight. No scale is applied to it. It is differentiable with
        respect to `tensors`."""
        raise NotImplementedError

    def norm(self, tensors: Tensors, scale: float) -> float | None:
        """The Frobenius norm of the scaled change, from the factors alone; None if the change must be built for it."""
        return None

    def estimates_norm(self, tensors: Tensors) -> bool:
        """Whether `norm` is an estimate, because the exact norm would take too long."""
        return False

    def singular_vectors(self, tensors: Tensors, scale: float, rank: int) -> SingularVectors | None:
        """The `rank` leading singular vectors of the scaled change, from its factors; None if it must be built."""
        return None

    # -- the forward pass and its memory ------------------------------------------------------------------------------

    def computation(self, inputs: int, outputs: int, options: Options) -> Computation:
        """How the adapter is computed on a linear layer."""
        return self.reference(outputs, options, f"{self.name} has no factorised form")

    def reference(self, outputs: int, options: Options, why: str) -> Computation:
        """The computation by the reference layer: it builds the whole change and keeps it for the input's gradient."""
        return Computation(REFERENCE, why, rebuilds_weight=True, backward_bytes=4, casts_tensors=False)

    def on(self, layer: WeightShape, options: Options) -> Computation:
        """How the adapter is computed on this layer, which may be a convolution."""
        if layer.kernel:
            return self.reference(layer.outputs, options, "convolutions")
        return self.computation(layer.inputs, layer.outputs, options)

    def fused_layer(self) -> type[AdaptedLinear]:
        """The linear layer class for every form that `computation` returns, except the reference."""
        raise NotImplementedError

    def reference_layer(self, path: str, layer: nn.Module, options: LayerOptions, model: nn.Module) -> AttachedLayer:
        from gracetune.adapters.lycoris import LycorisLayer

        return LycorisLayer(path, layer, options)

    # -- files --------------------------------------------------------------------------------------------------------

    file_tensors: ClassVar[tuple[str, ...]] = ()
    """Every name a layer's tensors can have in a file."""
    needed: ClassVar[frozenset[str]] = frozenset()
    """The names that every layer has. Empty if another record assembles this one's layers (`Lora.assemble`)."""
    spellings: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Other programs' names: regular expressions for the end of a key, each with the tensor it means."""
    always_fp32: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that are written in fp32 whatever the file's precision is."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Prefixes of tensor names that no earlier algorithm in the registry has. Files are matched from the last on."""
    row_tensors: ClassVar[tuple[str, ...]] = ()
    """Tensors whose rows are those of the weight. Reordering them reorders the layer. Empty if this is impossible."""
    proportional_to: ClassVar[tuple[str, ...]] = ()
    """The change is proportional to the first of these that is present, so a change of scale can be multiplied in."""
    loadable: ClassVar[bool] = True
    """Whether some program loads it from a file. Otherwise it can only be trained further here, or merged."""
    kohya_module: ClassVar[str] = "lycoris.kohya"
    """The value of `ss_network_module` in a file's header."""

    def claims(self, names: set[str]) -> bool:
        """Whether these are the tensor names of such a layer. Raises `LayerError` if some are missing."""
        if not (names & self.needed and names <= {*self.needed, *self.file_tensors}):
            return False
        if not self.needed <= names:
            raise LayerError(f"{listed(names)} without {listed(self.needed - names)}")
        return True

    def least_dimensions(self, tensor: str) -> int:
        """The fewest dimensions that a tensor of this name may have in a file."""
        return 0

    def most_dimensions(self, tensor: str) -> int:
        """The most dimensions that a tensor of this name may have in a file."""
        return 5  # the weight of a 3-d convolution: [out, in, depth, height, width]

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        """The layer that a file's tensors form. Raises `LayerError` if they do not fit together."""
        return Layer(self.name, dict(tensors), 1.0, None)

    def renamed(self, algorithm: str, tensors: Tensors) -> dict[str, Tensor] | None:
        """The tensors of another algorithm under this one's names; None if the two are not equivalent."""
        return None

    @abstractmethod
    def outputs(self, tensors: Tensors) -> int | None:
        """The number of rows of the weight; None if the tensors do not determine it."""

    @abstractmethod
    def columns(self, tensors: Tensors) -> int | None:
        """Inputs times kernel points. None is allowed if the change depends on the weight, or if `norm` is defined."""

    def weight_shape(self, tensors: Tensors) -> Dimensions | None:
        """The shape of the weight, if the tensors alone determine it: for a matrix."""
        rows, inner = self.outputs(tensors), self.columns(tensors)
        if rows is None or inner is None or any(tensor.ndim > 2 for tensor in tensors.values()):
            return None
        return rows, inner

    def misfit(self, tensors: Tensors, shape: Dimensions) -> str | None:
        """Why the layer does not fit a weight of this shape. The caller has already compared outputs and columns."""
        return None

    def alpha_in(self, format: str, alpha: float) -> float | None:
        """The alpha that a file of this format holds; None if it holds none."""
        return alpha

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        """Why a format cannot hold such a layer; None if it can. Override it for algorithms that ComfyUI supports."""
        return {
            "diffusers": "diffusers loads LoRA and DoRA for this family, nothing else",
            "comfyui": f"ComfyUI does not know {self.name}",
        }.get(format)

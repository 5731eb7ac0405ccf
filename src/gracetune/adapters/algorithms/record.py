"""What a record of an adapter algorithm holds: all that config, planner, attaching and file formats know about it.

The file of a record imports no torch: a config is checked before any model code is imported, and reads the records'
names and options. Functions that make or take tensors import what they need when they are called.

A layer's tensors carry the names the algorithms' own papers and files use, without a prefix. `alpha` is a finite number
beside the tensors, never one of them. The scale of a change is alpha / rank, except where nothing is decomposed (whole
LoKr, (IA)3, OFT, full differences): there it is 1, and alpha is 1.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from gracetune.adapters.algorithms.assembly import Convention, LayerError, listed
from gracetune.adapters.computation import LIBRARY, Computation
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
"""Tensors by name, and the rank where something is decomposed."""
SingularVectors = tuple["Tensor", "Tensor", "Tensor", float]
"""Left vectors, values, right vectors, and the norm of the whole change."""


class Options(Protocol):
    """What a config says about one layer: an `Adapter` or a `LayerOptions`."""

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
    """A matrix, or a convolution's weight [outputs, inputs, *kernel]."""

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
    """What `adapter.kind` says."""
    lycoris_name: ClassVar[str | None] = None
    """What LyCORIS files and `adapter.by_module` call it (`algo`)."""
    own_options: ClassVar[tuple[str, ...]] = ()
    """Keys of `adapter` that only this algorithm reads."""
    has_rank: ClassVar[bool] = True
    """`adapter.rank` has an effect."""
    rank_is_width: ClassVar[bool] = False
    """Factors are as wide as the rank, whatever the matrix is: a huge rank is a mistake."""

    def described(self, options: Options) -> str:
        """The options that decide its size, for a plan's title."""
        return f"rank {options.rank}" if self.has_rank else ""

    # -- tensors ------------------------------------------------------------------------------------------------------

    trained_by_peft: ClassVar[bool] = False
    """peft's layer is the reference, and PEFT's files hold it. Otherwise LyCORIS' rules hold."""
    zero_at_first: ClassVar[frozenset[str]]
    """Tensors that training begins with at 0. While all of them in a layer are 0, the layer changes nothing and its
    other tensors get no gradient; the change grows from 0 with them."""
    constants: ClassVar[Mapping[str, int]] = {}
    """Tensors of a file that are flags and not trained, with the value of what is trained here."""

    @abstractmethod
    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        """Of the trained tensors, by name."""

    @abstractmethod
    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        """Where training begins: those of peft and lycoris-lora, bit for bit."""

    # -- the change of the weight -------------------------------------------------------------------------------------

    depends_on_weight: ClassVar[bool] = False
    """The change is made of the weight itself: `changed` is asked for it instead of `added`."""
    magnitude_by_rows: ClassVar[bool] = False
    """A `dora_scale` belongs to rows whatever its shape is. Otherwise the shape tells rows from columns."""
    bias_tensor: ClassVar[str | None] = None
    """The tensor that changes the layer's bias."""

    def added(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        """What is added to a weight of this shape, before scaling. Differentiable with respect to `tensors`."""
        raise NotImplementedError

    def changed(self, tensors: Tensors, weight: Tensor) -> Tensor:
        """The change of this weight. Differentiable with respect to `tensors`."""
        raise NotImplementedError

    def norm(self, tensors: Tensors, scale: float) -> float | None:
        """The Frobenius norm of the change, where it follows from the factors; None where the change must be built."""
        return None

    def estimates_norm(self, tensors: Tensors) -> bool:
        """Whether `norm` is an estimate, because the exact norm would take too long."""
        return False

    def singular_vectors(self, tensors: Tensors, scale: float, rank: int) -> SingularVectors | None:
        """The leading ones of the change, where they follow from the factors; None where the change must be built."""
        return None

    # -- the forward pass, and what it keeps --------------------------------------------------------------------------

    def computation(self, inputs: int, outputs: int, options: Options) -> Computation:
        """On a linear layer."""
        return self.reference(outputs, options, f"{self.name} has no factorised form")

    def reference(self, outputs: int, options: Options, why: str) -> Computation:
        """By the library's layer: LyCORIS rebuilds the whole weight, and it is kept for the input's gradient."""
        return Computation(LIBRARY, why, rebuilds_weight=True, backward_bytes=4, casts_tensors=False)

    def on(self, layer: WeightShape, options: Options) -> Computation:
        """How the adapter on this layer is computed."""
        if layer.kernel:
            return self.reference(layer.outputs, options, "convolutions")
        return self.computation(layer.inputs, layer.outputs, options)

    def fused_layer(self) -> type[AdaptedLinear]:
        """The linear layer that computes every form `computation` gives but the library's."""
        raise NotImplementedError

    def reference_layer(self, path: str, layer: nn.Module, options: LayerOptions, model: nn.Module) -> AttachedLayer:
        from gracetune.adapters.lycoris import LycorisLayer

        return LycorisLayer(path, layer, options)

    # -- files --------------------------------------------------------------------------------------------------------

    file_tensors: ClassVar[tuple[str, ...]] = ()
    """Every name a layer's tensors can have in a file."""
    needed: ClassVar[frozenset[str]] = frozenset()
    """Those that are in every layer. Empty where another record's layers become this one's (`Lora.assemble`)."""
    spellings: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Other programs' names: patterns of a key's end, and the tensor each means."""
    always_fp32: ClassVar[tuple[str, ...]] = ()
    """Names in files of tensors that are written in fp32 whatever the file's precision is."""
    marks: ClassVar[tuple[str, ...]] = ()
    """How names begin that only this algorithm has, or an earlier one of the registry."""
    row_tensors: ClassVar[tuple[str, ...]] = ()
    """Tensors whose rows are the weight's: with them a layer can be reordered by rows. Empty where it cannot be."""
    proportional_to: ClassVar[tuple[str, ...]] = ()
    """The change is proportional to the first of these tensors that is there: another alpha can be multiplied in."""
    loadable: ClassVar[bool] = True
    """Some program loads it from a file. Otherwise it is for further training here and for merging."""
    kohya_module: ClassVar[str] = "lycoris.kohya"
    """`ss_network_module` of a file's header."""

    def claims(self, names: set[str]) -> bool:
        """Whether these are the names of such a layer's tensors. Raises `LayerError` where some are missing."""
        if not (names & self.needed and names <= {*self.needed, *self.file_tensors}):
            return False
        if not self.needed <= names:
            raise LayerError(f"{listed(names)} without {listed(self.needed - names)}")
        return True

    def least_dimensions(self, tensor: str) -> int:
        return 0

    def most_dimensions(self, tensor: str) -> int:
        return 5  # of a three-dimensional convolution's weight

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        """A layer of a file from its tensors. Raises `LayerError`."""
        return Layer(self.name, dict(tensors), 1.0, None)

    def renamed(self, algorithm: str, tensors: Tensors) -> dict[str, Tensor] | None:
        """Another algorithm's tensors under this one's names, where they are the same; None where they are not."""
        return None

    @abstractmethod
    def outputs(self, tensors: Tensors) -> int | None:
        """Rows of the weight; None where the tensors do not tell."""

    @abstractmethod
    def columns(self, tensors: Tensors) -> int | None:
        """Inputs times kernel. None is for changes that are made of the weight, and for those with a `norm`."""

    def weight_shape(self, tensors: Tensors) -> Dimensions | None:
        """Where the tensors alone tell it: those of a matrix."""
        rows, inner = self.outputs(tensors), self.columns(tensors)
        if rows is None or inner is None or any(tensor.ndim > 2 for tensor in tensors.values()):
            return None
        return rows, inner

    def misfit(self, tensors: Tensors, shape: Dimensions) -> str | None:
        """Why the layer cannot sit on a weight of this shape, beside other outputs and columns."""
        return None

    def alpha_in(self, format: str, alpha: float) -> float | None:
        """What a format's file says; None where it says nothing."""
        return alpha

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        """Why a format cannot hold such a layer. An algorithm that ComfyUI has code for says so here."""
        return {
            "diffusers": "diffusers loads LoRA and DoRA for this family, nothing else",
            "comfyui": f"ComfyUI does not know {self.name}",
        }.get(format)

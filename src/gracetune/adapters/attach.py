"""Attaches an adapter to a frozen denoiser, and detaches it again.

    attached = attach(denoiser, config.adapter, family="wan", expert="high_noise", default_targets=..., seed=42)
    optimizer = AdamW(attached.parameters().values())
    with attached.disabled(): ...                  # the base model's own prediction
    with attached.holding(attached.fitting(state)): ...   # temporarily with another adapter's values
    file = write(attached.state())

Trained parameters are fp32 whatever the base model's precision is. The base model stays unchanged and gets no gradient.
The initial values of a layer depend only on the seed, the expert and the layer's path; global random generators are not
used. A linear layer is computed without materializing the change of its weight wherever its algorithm has a factorised
form; `attached.decisions` reports which form is used and why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from gracetune.adapters import full
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.assistant import Assisted
from gracetune.adapters.computation import REFERENCE, AdapterPath, Computation
from gracetune.adapters.fast.modules import AdaptedLinear, FastLayer, HoldsWeightOtherwise, choice, reference
from gracetune.adapters.layer import AttachedLayer, local_shard
from gracetune.adapters.load_checks import fit_to_layers
from gracetune.adapters.lycoris import Factors
from gracetune.adapters.options import LayerOptions, resolver
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.adapters.targets import ADAPTABLE, Kind, LayerSelection, ModuleInfo, Modules, select
from gracetune.adapters.trainable import takes_convolutions, unused_conv_options
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.seeded_random import seeded

_EVERY_KIND: tuple[Kind, ...] = ("linear", "conv", "norm", "parameter", "other")
LayerTensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by the layer's path and the tensor's name."""
_WHOLE = "a full fine-tune has no adapter beside the model: "


class Attached(ABC):
    """A denoiser together with the parameters that are trained in it."""

    def __init__(self, selection: LayerSelection | None, notes: tuple[str, ...] = ()) -> None:
        self.selection = selection
        """The selected layers and the reasons; None for a full fine-tune of everything."""
        self.notes = notes
        """Options of the config that have no effect on this model."""

    @property
    def decisions(self) -> tuple[str, ...]:
        """How the adapter is computed: one line for each computation in use."""
        return ()

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name. The names do not depend on the run, the library or the sharding.

        Call it again after the model was sharded or moved: FSDP replaces parameters.
        """

    @property
    @abstractmethod
    def alphas(self) -> dict[str, float]:
        """The alpha of every decomposed layer, by path. The scale cannot be derived from the parameters alone."""

    @abstractmethod
    def state(self) -> AdapterState:
        """A copy of the adapter on the CPU, in fp32. With sharded parameters this is a collective.

        The strength is not included: it is an option of the run.
        """

    def layout(self) -> AdapterState | None:
        """Like `state`, but with meta tensors. None for a full fine-tune, which has no adapter."""
        return None

    @abstractmethod
    def load(self, state: AdapterState) -> None:
        """Replace the values by another adapter's. If any layer does not fit, a `ConfigError` lists the misfits and
        nothing is changed."""

    @abstractmethod
    def fitting(self, state: AdapterState) -> LayerTensors:
        """Another adapter's values in the form of this adapter's layers. A `ConfigError` lists what does not fit."""

    @abstractmethod
    @contextmanager
    def holding(self, values: LayerTensors) -> Iterator[dict[str, Tensor]]:
        """Inside, the layers have these values; afterwards their own values are restored bit for bit.

        Yields this process's shard of the layers' own values, by the names of `parameters`.
        """
        yield {}

    @abstractmethod
    def zero_initialized(self) -> dict[str, list[nn.Parameter]]:
        """The tensors of each layer that are 0 before training (`Algorithm.zero_at_first`), by the layer's path."""

    @abstractmethod
    @contextmanager
    def amplified(self, factor: float) -> Iterator[None]:
        """Inside, the `zero_initialized` tensors are multiplied by this; afterwards they are restored bit for bit."""
        yield

    @abstractmethod
    @contextmanager
    def with_strength(self, strength: float) -> Iterator[None]:
        """Inside, the adapter's strength is this times the config's strength. 0 is exactly the base model."""
        yield

    @abstractmethod
    def detach(self) -> None:
        """Restore the model to what it was before: modules, names, values, gradient flags."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        with self.with_strength(0.0):
            yield


def attach(
    denoiser: nn.Module,
    adapter: Adapter,
    *,
    family: str,
    expert: ExpertStage = "",
    default_targets: Sequence[str],
    conv_targets: Sequence[str] = (),
    untrained: Sequence[str] = (),
    seed: int,
    adapter_path: AdapterPath = "auto",
    keeps_dtype: bool = False,
) -> Attached:
    """Attach the adapter that the config describes. The base model's parameters are frozen.

    `default_targets`, `conv_targets` and `untrained` are declared by the family (`ModelSpec`). `adapter.targets`
    replaces the first two. Without it, `adapter.within` selects every layer inside; otherwise the defaults apply, and
    `adapter.conv_rank` adds `conv_targets` to them. With `keeps_dtype` a full fine-tune's weights are not made
    fp32, because the optimizer keeps masters of them.
    """
    if any(isinstance(module, LoraLayer | Factors | AdaptedLinear) for module in denoiser.modules()):
        raise GracetuneError("this model already has an adapter in it: call detach() of that one first")
    if adapter.strength == 0:
        raise ConfigError([Problem("adapter.strength", "0", "another number", "at 0 nothing would be trained")])
    modules = describe(denoiser)
    if adapter.is_full_finetune:
        chosen = None
        if adapter.targets or adapter.exclude:
            chosen = select(
                _with_parameters(denoiser, modules), adapter.targets or ("*",), adapter.exclude, kinds=_EVERY_KIND
            )
        return _FullAttached(denoiser, chosen, keeps_dtype=keeps_dtype)
    own = default_targets if adapter.conv_rank is None else (*default_targets, *conv_targets)
    chosen = select(
        modules, adapter.targets or (("*",) if adapter.within else own), adapter.exclude, within=adapter.within,
        include_spatial=takes_convolutions(adapter), untrained=untrained, kinds=ADAPTABLE,
    )  # fmt: skip
    resolve = resolver(adapter, {path: modules[path] for path in chosen.paths}, modules)
    plan = {path: resolve.options(path, spatial=_spatial(denoiser.get_submodule(path))) for path in chosen.paths}
    spatial = any(_spatial(denoiser.get_submodule(path)) for path in chosen.paths)
    notes = () if spatial else unused_conv_options(adapter)
    computations = {
        path: choice(module, options) if adapter_path == "auto" else reference(module, options, "requested")
        for path, options in plan.items()
        for module in [denoiser.get_submodule(path)]
    }
    return _LayersAttached(
        denoiser,
        plan,
        computations,
        chosen,
        family=family,
        expert=expert,
        seed=seed,
        strength=adapter.strength,
        notes=notes,
    )


def describe(model: nn.Module) -> Modules:
    """The modules `select` chooses from: those without children, and the direct parameters of those with children."""
    found: dict[str, ModuleInfo] = {}
    classes = {path: _class_name(module) for path, module in model.named_modules()}
    for path, module in model.named_modules():
        owners = _owners(path, classes)
        if next(module.children(), None) is None:
            found[path] = ModuleInfo(classes[path], _kind(module), owners, _spatial(module))
            continue
        for name, _parameter in module.named_parameters(recurse=False):
            own = f"{path}.{name}" if path else name
            found[own] = ModuleInfo("Parameter", "parameter", (classes[path], *owners))
    return found


def _with_parameters(model: nn.Module, modules: Modules) -> Modules:
    """The modules a full fine-tune can train: those that own parameters, and parameters that stand alone."""
    owners = {name.rpartition(".")[0] for name, _parameter in model.named_parameters()}
    return {path: info for path, info in modules.items() if info.kind == "parameter" or path in owners}


def _owners(path: str, classes: Mapping[str, str]) -> tuple[str, ...]:
    """The classes of the modules around a path, the innermost first."""
    parts = path.split(".") if path else []
    return tuple(classes[".".join(parts[:length])] for length in range(len(parts) - 1, -1, -1))


def _class_name(module: nn.Module) -> str:
    """The class name that patterns match. Linear layers with an 8-bit weight or an assistant count as `Linear`."""
    if isinstance(module, Assisted) or (isinstance(module, nn.Linear) and isinstance(module, HoldsWeightOtherwise)):
        return nn.Linear.__name__
    return type(module).__name__


def _kind(module: nn.Module) -> Kind:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        # peft builds its convolutions without these options. None of our families uses them.
        plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
        return "conv" if plain else "other"
    return "norm" if "Norm" in type(module).__name__ else "other"


def _spatial(module: nn.Module) -> bool:
    """Whether this is a convolution whose kernel has more than one pixel."""
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and set(module.kernel_size) != {1}


def _freeze(model: nn.Module, undo: ExitStack) -> None:
    """Clear every gradient flag, and register the callbacks that restore them."""
    for parameter in model.parameters():
        undo.callback(parameter.requires_grad_, parameter.requires_grad)
        parameter.requires_grad_(False)


class _LayersAttached(Attached):
    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, LayerOptions],
        computations: Mapping[str, Computation],
        selection: LayerSelection,
        *,
        family: str,
        expert: ExpertStage,
        seed: int,
        strength: float,
        notes: tuple[str, ...],
    ) -> None:
        super().__init__(selection, notes)
        self._family, self._expert = family, expert
        self._computations = computations
        self._strength, self._factor = strength, 1.0
        self._layers: dict[str, AttachedLayer] = {}
        # If a layer fails, leaving the block undoes the earlier ones; `pop_all` keeps the callbacks for `detach`.
        with ExitStack() as undo:
            _freeze(model, undo)
            for path, options in plan.items():
                with seeded(seed, expert, path):
                    layer = _attach_layer(model, path, options, computations[path])
                undo.callback(layer.remove, model)
                layer.set_strength(strength)
                self._layers[path] = layer
            self._undo = undo.pop_all()

    @property
    def decisions(self) -> tuple[str, ...]:
        counts = Counter((computation.path, computation.why) for computation in self._computations.values())
        return tuple(f"adapter path: {path} ({why}; {_layers(count)})" for (path, why), count in counts.items())

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{path}.{name}": parameter
            for path, layer in self._layers.items()
            for name, parameter in layer.parameters().items()
        }

    @property
    def alphas(self) -> dict[str, float]:
        return {path: layer.alpha for path, layer in self._layers.items() if layer.rank is not None}

    def state(self) -> AdapterState:
        return AdapterState(self._family, self._expert, {path: layer.state() for path, layer in self._layers.items()})

    def layout(self) -> AdapterState:
        return AdapterState(self._family, self._expert, {path: layer.layout() for path, layer in self._layers.items()})

    def load(self, state: AdapterState) -> None:
        self._load_values(self.fitting(state))

    def _load_values(self, values: LayerTensors) -> None:
        for path, tensors in values.items():
            self._layers[path].load(tensors)

    def fitting(self, state: AdapterState) -> LayerTensors:
        return fit_to_layers(state, self._family, self._expert, self._layers)

    @contextmanager
    def holding(self, values: LayerTensors) -> Iterator[dict[str, Tensor]]:
        with _restored(self.parameters()) as own:
            self._load_values(values)
            yield own

    def zero_initialized(self) -> dict[str, list[nn.Parameter]]:
        return {
            path: [parameter for name, parameter in layer.parameters().items() if name in layer.record.zero_at_first]
            for path, layer in self._layers.items()
        }

    @contextmanager
    def amplified(self, factor: float) -> Iterator[None]:
        tensors = {
            f"{path}.{number}": one for path, some in self.zero_initialized().items() for number, one in enumerate(some)
        }
        with _restored(tensors):
            with torch.no_grad():
                torch._foreach_mul_([local_shard(parameter) for parameter in tensors.values()], factor)
            yield

    @contextmanager
    def with_strength(self, strength: float) -> Iterator[None]:
        before = self._factor
        self._set_factor(strength)
        try:
            yield
        finally:
            self._set_factor(before)

    def _set_factor(self, factor: float) -> None:
        self._factor = factor
        for layer in self._layers.values():
            layer.set_strength(self._strength * factor)

    def detach(self) -> None:
        self._undo.close()
        self._layers = {}


@contextmanager
def _restored(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Save this process's shards and restore them afterwards in place, so references to the parameters stay valid."""
    parts = [local_shard(parameter).detach() for parameter in parameters.values()]
    own = [*map(torch.empty_like, parts)]
    _copy_all(own, parts)
    try:
        yield dict(zip(parameters, own, strict=True))
    finally:
        _copy_all(parts, own)


def _copy_all(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy with torch's foreach kernels: a few launches instead of one for each tensor."""
    if to:
        torch._foreach_copy_([*to], [*values])


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count:,} layers"


def _attach_layer(model: nn.Module, path: str, options: LayerOptions, computation: Computation) -> AttachedLayer:
    layer = model.get_submodule(path)
    if computation.form != REFERENCE and isinstance(layer, nn.Linear):
        return FastLayer(path, layer, options, computation, model)
    return algorithm(options.algorithm).reference_layer(path, layer, options, model)


class _FullAttached(Attached):
    def __init__(self, model: nn.Module, selection: LayerSelection | None, *, keeps_dtype: bool) -> None:
        super().__init__(selection)
        self._model = model
        with ExitStack() as undo:
            _freeze(model, undo)
            if selection is not None and not keeps_dtype:
                full.bridge(model, selection, undo)
            for parameter in self.parameters().values():
                if not keeps_dtype:
                    undo.callback(_set_dtype, parameter, parameter.dtype)
                    _set_dtype(parameter, torch.float32)
                parameter.requires_grad_(True)
            self._undo = undo.pop_all()

    def parameters(self) -> dict[str, nn.Parameter]:
        return full.trained_parameters(self._model, self.selection)

    @property
    def alphas(self) -> dict[str, float]:
        return {}

    def state(self) -> AdapterState:
        raise GracetuneError(_WHOLE + "save the model's own weights")

    def load(self, state: AdapterState) -> None:
        raise GracetuneError(_WHOLE + "merge the adapter into the base weights and start from those")

    def fitting(self, state: AdapterState) -> LayerTensors:
        raise GracetuneError(_WHOLE + "compare the model's own weights")

    @contextmanager
    def holding(self, values: LayerTensors) -> Iterator[dict[str, Tensor]]:
        if values:
            raise GracetuneError(_WHOLE + "its weights are the model's own")
        yield {}

    def zero_initialized(self) -> dict[str, list[nn.Parameter]]:
        """Empty: the weights of a full fine-tune do not start at 0."""
        return {}

    @contextmanager
    def amplified(self, factor: float) -> Iterator[None]:
        if factor != 1:
            raise GracetuneError(_WHOLE + "there is nothing to amplify")
        yield

    @contextmanager
    def with_strength(self, strength: float) -> Iterator[None]:
        if strength != 1:
            raise GracetuneError(_WHOLE + "its strength cannot be changed; remove adapter_strength")
        yield

    def detach(self) -> None:
        """Restore gradient flags and precisions. The parameters keep their trained values."""
        self._undo.close()


def _set_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.data = parameter.data.to(dtype)

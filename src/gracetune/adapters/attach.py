"""Makes a frozen denoiser trainable, and undoes it.

    attached = attach(denoiser, config.adapter, family="wan", stage="high_noise", default_targets=..., seed=42)
    optimizer = AdamW(attached.parameters().values())
    with attached.disabled(): ...                  # the base model's own prediction
    with attached.holding(attached.fitting(state)): ...   # another adapter's values, for as long as this lasts
    file = write(attached.state())

What is trained is held in fp32 whatever the base is; the base stays as it is and gets no gradient. Each layer's first
values depend on seed, stage and path alone, and no global generator moves. Linear layers are computed without building
the change of their weight where there is a form for that (`attached.decisions` says which and why).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from gracetune.adapters import full
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.assistant import Assisted
from gracetune.adapters.computation import LIBRARY, Computation
from gracetune.adapters.fast.layer import FastLayer, choice, reference
from gracetune.adapters.fast.modules import AdaptedLinear, HoldsWeightOtherwise
from gracetune.adapters.layer import AttachedLayer, local
from gracetune.adapters.load_checks import fitted
from gracetune.adapters.lycoris import Factors
from gracetune.adapters.options import LayerOptions, resolver
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.adapters.targets import ADAPTABLE, Kind, LayerSelection, ModuleInfo, Modules, select
from gracetune.adapters.trainable import takes_convolutions, unused_conv_options
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.seeded_random import seeded

PathChoice = Literal["auto", "library"]
"""`auto`: factorised where there is a form for it. `library`: peft's layers and whole changes, the reference."""
_EVERY_KIND: tuple[Kind, ...] = ("linear", "conv", "norm", "parameter", "other")
LayerTensors = Mapping[str, Mapping[str, Tensor]]
"""By layer and name."""
_WHOLE = "a full fine-tune has no adapter beside the model: "


class Attached(ABC):
    """A denoiser with something to train in it."""

    def __init__(self, selection: LayerSelection | None, notes: tuple[str, ...] = ()) -> None:
        self.selection = selection
        """What was chosen and why; None for a full fine-tune of everything."""
        self.notes = notes
        """What the config asks for and this model has no place for."""

    @property
    def decisions(self) -> tuple[str, ...]:
        """How the adapter is computed, a line for each way that is taken."""
        return ()

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """Everything that is trained, as it is now, by names that stay the same over runs, libraries and sharding."""

    @property
    @abstractmethod
    def alphas(self) -> dict[str, float]:
        """Of every decomposed layer, by path: the parameters alone do not tell how they are scaled."""

    @abstractmethod
    def state(self) -> AdapterState:
        """A copy, on the CPU and in fp32. The strength is not in it: it belongs to the run, not to the file."""

    def layout(self) -> AdapterState | None:
        """The same without values; None where there is no adapter, because the weights themselves are trained."""
        return None

    @abstractmethod
    def load(self, state: AdapterState) -> None:
        """Take another adapter's values. Everything has to fit; what does not is listed, and nothing is changed."""

    @abstractmethod
    def fitting(self, state: AdapterState) -> LayerTensors:
        """Another adapter's values as this one's layers take them. What does not fit is listed in a ConfigError."""

    @abstractmethod
    @contextmanager
    def holding(self, values: LayerTensors) -> Iterator[dict[str, Tensor]]:
        """Inside, the layers have these values; afterwards their own again, bit for bit. Gives this process's part of
        their own, by the names of `parameters`."""
        yield {}

    @abstractmethod
    def acting(self) -> dict[str, list[nn.Parameter]]:
        """By layer, the tensors that are 0 as long as the layer changes nothing (`Algorithm.zero_at_first`)."""

    @abstractmethod
    @contextmanager
    def amplified(self, factor: float) -> Iterator[None]:
        """Inside, the tensors of `acting` are multiplied by this; afterwards they are as before, bit for bit."""
        yield

    @abstractmethod
    @contextmanager
    def scale(self, strength: float) -> Iterator[None]:
        """Inside, the adapter works with this times the config's own strength; 0 is exactly the base model."""
        yield

    @abstractmethod
    def detach(self) -> None:
        """The model is again the one that was given: modules, names, values, gradient flags."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        with self.scale(0.0):
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
    adapter_path: PathChoice = "auto",
) -> Attached:
    """`default_targets`, `conv_targets` and `untrained` are the family's (`ModelSpec`).

    Targets of the config take the place of both. Without them, `conv_rank` adds `conv_targets` to the default ones, and
    `within` stands for every layer inside.
    """
    if any(isinstance(module, LoraLayer | Factors | AdaptedLinear) for module in denoiser.modules()):
        raise GracetuneError("this model already has an adapter in it: call detach() of that one first")
    if adapter.strength == 0:
        raise ConfigError([Problem("adapter.strength", "0", "another number", "at 0 nothing would be trained")])
    modules = describe(denoiser)
    if adapter.kind == "full_finetune":
        chosen = None
        if adapter.targets or adapter.exclude:
            chosen = select(
                _with_parameters(denoiser, modules), adapter.targets or ("*",), adapter.exclude, kinds=_EVERY_KIND
            )
        return _FullAttached(denoiser, chosen)
    own = default_targets if adapter.conv_rank is None else (*default_targets, *conv_targets)
    chosen = select(
        modules, adapter.targets or (("*",) if adapter.within else own), adapter.exclude, within=adapter.within,
        spatial=takes_convolutions(adapter), untrained=untrained, kinds=ADAPTABLE,
    )  # fmt: skip
    resolve = resolver(adapter, {path: modules[path] for path in chosen.paths}, modules)
    plan = {path: resolve.options(path, spatial=_spatial(denoiser.get_submodule(path))) for path in chosen.paths}
    spatial = any(_spatial(denoiser.get_submodule(path)) for path in chosen.paths)
    notes = () if spatial else unused_conv_options(adapter)
    ways = {
        path: choice(module, options) if adapter_path == "auto" else reference(module, options, "asked for")
        for path, options in plan.items()
        for module in [denoiser.get_submodule(path)]
    }
    return _LayersAttached(
        denoiser, plan, ways, chosen, family=family, expert=expert, seed=seed, strength=adapter.strength, notes=notes
    )  # fmt: skip


def describe(model: nn.Module) -> Modules:
    """What `select` chooses from: modules without children, and parameters of modules that have some."""
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
    owners = {name.rpartition(".")[0] for name, _parameter in model.named_parameters()}
    return {path: info for path, info in modules.items() if info.kind == "parameter" or path in owners}


def _owners(path: str, classes: Mapping[str, str]) -> tuple[str, ...]:
    parts = path.split(".") if path else []
    return tuple(classes[".".join(parts[:length])] for length in range(len(parts) - 1, -1, -1))


def _class_name(module: nn.Module) -> str:
    """What a pattern means by it: a linear layer is one in whatever form its weight is held."""
    if isinstance(module, Assisted) or (isinstance(module, nn.Linear) and isinstance(module, HoldsWeightOtherwise)):
        return nn.Linear.__name__
    return type(module).__name__


def _kind(module: nn.Module) -> Kind:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        # peft builds its convolutions without these; none of our families has them.
        plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
        return "conv" if plain else "other"
    return "norm" if "Norm" in type(module).__name__ else "other"


def _spatial(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and set(module.kernel_size) != {1}


def _frozen(model: nn.Module, undo: ExitStack) -> None:
    for parameter in model.parameters():
        undo.callback(parameter.requires_grad_, parameter.requires_grad)
        parameter.requires_grad_(False)


class _LayersAttached(Attached):
    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, LayerOptions],
        ways: Mapping[str, Computation],
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
        self._ways = ways
        self._strength, self._factor = strength, 1.0
        self._layers: dict[str, AttachedLayer] = {}
        with ExitStack() as undo:
            _frozen(model, undo)
            for path, options in plan.items():
                with seeded(seed, expert, path):
                    layer = _made(model, path, options, ways[path])
                undo.callback(layer.remove, model)
                layer.set_strength(strength)
                self._layers[path] = layer
            self._undo = undo.pop_all()

    @property
    def decisions(self) -> tuple[str, ...]:
        counts = Counter((way.path, way.why) for way in self._ways.values())
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
        self._take(self.fitting(state))

    def _take(self, values: LayerTensors) -> None:
        for path, tensors in values.items():
            self._layers[path].load(tensors)

    def fitting(self, state: AdapterState) -> LayerTensors:
        return fitted(state, self._family, self._expert, self._layers)

    @contextmanager
    def holding(self, values: LayerTensors) -> Iterator[dict[str, Tensor]]:
        with _restored(self.parameters()) as own:
            self._take(values)
            yield own

    def acting(self) -> dict[str, list[nn.Parameter]]:
        return {
            path: [parameter for name, parameter in layer.parameters().items() if name in layer.record.zero_at_first]
            for path, layer in self._layers.items()
        }

    @contextmanager
    def amplified(self, factor: float) -> Iterator[None]:
        acting = {f"{path}.{number}": one for path, some in self.acting().items() for number, one in enumerate(some)}
        with _restored(acting):
            with torch.no_grad():
                torch._foreach_mul_([local(parameter) for parameter in acting.values()], factor)
            yield

    @contextmanager
    def scale(self, strength: float) -> Iterator[None]:
        before = self._factor
        self._set(strength)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, factor: float) -> None:
        self._factor = factor
        for layer in self._layers.values():
            layer.set_strength(self._strength * factor)

    def detach(self) -> None:
        self._undo.close()
        self._layers = {}


@contextmanager
def _restored(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Copies of this process's part, put back in place afterwards: whatever points at a parameter still does."""
    parts = [local(parameter).detach() for parameter in parameters.values()]
    own = [*map(torch.empty_like, parts)]
    _copy_all(own, parts)
    try:
        yield dict(zip(parameters, own, strict=True))
    finally:
        _copy_all(parts, own)


def _copy_all(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """A few kernels for all of them."""
    if to:
        torch._foreach_copy_([*to], [*values])


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count:,} layers"


def _made(model: nn.Module, path: str, options: LayerOptions, computation: Computation) -> AttachedLayer:
    layer = model.get_submodule(path)
    if computation.form != LIBRARY and isinstance(layer, nn.Linear):
        return FastLayer(path, layer, options, computation, model)
    return algorithm(options.algorithm).reference_layer(path, layer, options, model)


class _FullAttached(Attached):
    def __init__(self, model: nn.Module, selection: LayerSelection | None) -> None:
        super().__init__(selection)
        self._model = model
        with ExitStack() as undo:
            _frozen(model, undo)
            if selection is not None:
                full.bridge(model, selection, undo)
            for parameter in self.parameters().values():
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

    def acting(self) -> dict[str, list[nn.Parameter]]:
        """None: its weights do not begin at 0."""
        return {}

    @contextmanager
    def amplified(self, factor: float) -> Iterator[None]:
        if factor != 1:
            raise GracetuneError(_WHOLE + "there is nothing to amplify")
        yield

    @contextmanager
    def scale(self, strength: float) -> Iterator[None]:
        if strength != 1:
            raise GracetuneError(_WHOLE + "its strength cannot be changed; remove adapter_strength")
        yield

    def detach(self) -> None:
        """Gradient flags and precisions are as they were; the values are the trained ones."""
        self._undo.close()


def _set_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.data = parameter.data.to(dtype)

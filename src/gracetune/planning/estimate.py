"""Estimate the memory of a run: from a config and a model footprint to a `Demand`. Pure; see docs/estimate.md.

Trained tensors are fp32; autocast computes with copies in the run's precision. So a trained parameter costs 4 bytes,
its gradient 4, and the optimizer state what `optim.record.optimizer_state` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.computation import AdapterPath
from gracetune.adapters.trainable import (
    Tensors,
    TrainableSelection,
    select,
    trainable,
    unused_conv_options,
)
from gracetune.config.dataset_config import Dataset
from gracetune.config.families import find_flavour
from gracetune.config.run_config import RunConfig
from gracetune.config.token_routes import Route, resolve_routes
from gracetune.errors import ConfigError
from gracetune.memory.placement import hints_of
from gracetune.models.footprint import Footprint, FootprintBlock, SampleShape
from gracetune.optim.record import optimizer_state
from gracetune.optim.state_sizes import BYTES, passing_bytes, state_bytes
from gracetune.planning.activations import StepMethod, activations, casts_tensors
from gracetune.planning.data_needs import (
    RING_DEPTH,
    codec_bytes,
    data_needs,
    encoder_needs,
    refreshed_datasets,
    sample_bytes,
)
from gracetune.planning.dataset_facts import DatasetFacts, largest_sample
from gracetune.planning.demand import PHASES, CodecPasses, Demand, Denoiser, Home, Need, Phase, PlanSettings, Workload
from gracetune.planning.processes import (
    GATHERED_BLOCKS,
    ONE_PROCESS,
    REDUCED_BLOCKS,
    Processes,
    sharded_bits_problem,
    sharded_state_problem,
)

_WEIGHT_BYTES = {"auto": 2, "bf16": 2, "fp16": 2, "fp32": 4}
_INT8_WORKING = 6
"""Bytes per weight of the int8 matrix in use: dequantized to fp32 (4) and cast to the compute precision (2)."""


@dataclass(frozen=True)
class _Job:
    """The inputs that the parts of an estimate share."""

    config: RunConfig
    footprint: Footprint
    method: StepMethod
    selection: TrainableSelection
    tensors: tuple[Tensors, ...]
    sampling: bool
    processes: Processes

    @property
    def elements(self) -> int:
        """Trained parameters of one denoiser."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def local(self) -> tuple[Tensors, ...]:
        """The trained tensors that one process holds."""
        return self.processes.local(self.tensors)

    @property
    def local_elements(self) -> int:
        return sum(tensor.elements for tensor in self.local)

    @property
    def trained_denoisers(self) -> int:
        return len(self.footprint.denoisers) if self.config.model.experts == "both" else 1

    @property
    def loaded(self) -> tuple[Phase, ...]:
        """Phases in which the denoiser is in memory."""
        return ("train", "sample") if self.sampling else ("train",)


def estimate(
    config: RunConfig,
    footprint: Footprint,
    facts: tuple[DatasetFacts, ...],
    *,
    compiled: bool,
    adapter_path: AdapterPath = "auto",
    processes: Processes = ONE_PROCESS,
    assistant_elements: int | None = None,
) -> Demand:
    """Estimate the memory demand of a run.

    `compiled` says whether blocks go through torch.compile. `adapter_path` says how adapters are computed
    (`auto` as in every run). `assistant_elements` is the size of the assistant adapter, if known.
    """
    job = _job(config, footprint, compiled, adapter_path, processes)
    workloads, shapes, assumed = _workloads(job)
    needs = [
        *_trained_needs(job),
        *_assistant_needs(job, assistant_elements),
        *_gathered_needs(job),
        *encoder_needs(config, footprint, shapes, sampling=job.sampling),
        *data_needs(config, footprint, facts, shapes),
        _batch_ring(job, shapes),
        *_sampling_needs(job, shapes),
        _checkpoints(job),
    ]
    return Demand(
        title=_title(job),
        needs=tuple(need for need in needs if need.bytes > 0),
        denoisers=_denoisers(job),
        workloads=workloads,
        codec=_codec(job, shapes),
        settings=_settings(job),
        phases=_phases(job),
        assumptions=(
            *_remarks(job),
            *_assistant_remarks(job, assistant_elements),
            *assumed,
            *(fact.assumed for fact in facts if fact.assumed),
        ),
        processes=processes,
    )


def _phases(job: _Job) -> tuple[Phase, ...]:
    phases = PHASES if job.sampling else PHASES[:3]
    return (*phases[:2], "load", *phases[2:]) if job.processes.sharded else phases


def _job(
    config: RunConfig, footprint: Footprint, compiled: bool, adapter_path: AdapterPath, processes: Processes
) -> _Job:
    if processes.sharded and config.model.base_precision in ("fp8", "int8"):
        raise ConfigError([sharded_bits_problem(config.model.base_precision)])
    if processes.sharded and config.has_chunked_state:
        raise ConfigError([sharded_state_problem(config.optimizer.state.home)])
    full = config.adapter.is_full_finetune
    method = StepMethod(
        compiled=compiled,
        adapter_path=adapter_path,
        compute_bytes=4 if config.training.mixed_precision == "fp32" else 2,
        full_finetune=full,
    )
    selection = select(footprint, config.adapter)
    tensors = trainable(footprint, selection, config.adapter)
    validation = config.validation
    scheduled = validation.at_start or validation.every_steps is not None or validation.every_epochs is not None
    sampling = validation.enabled and bool(validation.prompts) and scheduled
    return _Job(config, footprint, method, selection, tensors, sampling, processes)


def _title(job: _Job) -> str:
    adapter, footprint = job.config.adapter, job.footprint
    options = "" if job.method.full_finetune else algorithm(adapter.kind).described(adapter)
    kind = f"{adapter.kind} {options}".strip()
    return f"{footprint.family} {footprint.flavour}, {kind}, {job.config.optimizer.name}"


def _settings(job: _Job) -> PlanSettings:
    config = job.config
    return PlanSettings(
        checkpointing=config.training.gradient_checkpointing,
        policies=job.method.policies,
        precision=_trained_precision(config) if job.method.full_finetune else _first_precision(config),
        can_store_8_bits=not job.method.full_finetune and not job.processes.sharded,
        may_use_int8=config.model.base_precision == "auto",
        use_uvm=config.memory.use_uvm,
        oversubscription_ratio=config.memory.uvm_oversubscription_ratio,
        managed=config.memory.use_uvm or hints_of(config).on,
        rejects_managed=config.memory.enable_uvm_hints is False,
    )


def _trained_precision(config: RunConfig) -> str:
    return "trained bf16" if config.has_chunked_state else "trained"


def _first_precision(config: RunConfig) -> str:
    """The precision of frozen weights; `auto` starts with the 16-bit type that the run computes in."""
    if config.model.base_precision != "auto":
        return config.model.base_precision
    return "fp16" if config.training.mixed_precision == "fp16" else "bf16"


def _denoisers(job: _Job) -> tuple[Denoiser, ...]:
    names, experts = job.footprint.denoisers, job.config.model.experts
    whole = _sizes(job)
    sizes = tuple((precision, job.processes.share(size)) for precision, size in whole)
    trained, sharded = job.method.full_finetune, job.processes.sharded
    if len(names) == 1 or experts == "both":
        return tuple(
            Denoiser(name, sizes, idle_in_training=index > 0, trained=trained, sharded=sharded)
            for index, name in enumerate(names)
        )
    chosen = names[0] if experts == "high" else names[1]
    other = names[1] if experts == "high" else names[0]
    # The untrained expert is loaded only to generate samples, and whole in every process.
    frozen = ((_trained_precision(job.config), 2 * job.footprint.parameters),) if trained else whole
    extra = (Denoiser(other, frozen, idle_in_training=True, only_sampled=True),) if job.sampling else ()
    return (Denoiser(chosen, sizes, trained=trained, sharded=sharded), *extra)


def _sizes(job: _Job) -> tuple[tuple[str, int], ...]:
    """(precision, bytes of one whole denoiser). The last is the config's precision, unless that is fp8 or int8."""
    footprint, precision = job.footprint, _first_precision(job.config)
    if job.method.full_finetune:
        more = 0 if job.config.has_chunked_state else 2  # trained weights are in fp32, unless the optimizer has masters
        return ((_trained_precision(job.config), 2 * footprint.parameters + more * job.elements),)
    matrices = footprint.linear_weights
    rest = 2 * (footprint.parameters - matrices)
    scales = 4 * footprint.linear_rows_and_columns
    int8 = matrices + 4 * footprint.linear_rows + _INT8_WORKING * footprint.largest_matrix + rest
    sizes = [("fp8", 2 * matrices + scales + rest), ("fp8 one layout", matrices + scales + rest), ("int8", int8)]
    if precision in _WEIGHT_BYTES:
        sizes.append((precision, _WEIGHT_BYTES[precision] * footprint.parameters))
    return tuple(sizes)


def _trained_needs(job: _Job) -> list[Need]:
    config, experts, part = job.config, job.trained_denoisers, job.processes.part
    every = job.local_elements * experts
    each = f"{job.elements / 1e6:.1f} M parameters" + (f" x {experts} experts" if experts > 1 else "")
    name = f"optimizer ({config.optimizer.name})"
    sums = 4 * job.local_elements * (experts if config.has_chunked_state else 1)
    which = "" if config.has_chunked_state else ", of one denoiser at a time"
    needs = [
        Need("gradients", "gradients", sums, ("train",), f"fp32{which}{part}"),
        *(_chunked_state_needs(job, name) if config.has_chunked_state else [_state_need(job, name)]),
    ]
    if not job.method.full_finetune:
        needs.insert(0, Need(config.adapter.kind, "trained weights", 4 * every, job.loaded, f"{each}, fp32{part}"))
    if copy := _compute_copy(job):
        needs.append(Need("compute copy", "compute copy", copy, ("train",), "autocast's copies of the trained weights"))
    if config.training.ema.enabled:
        needs.append(Need("EMA", "EMA", 4 * every, job.loaded, f"a second fp32 copy of the trained weights{part}"))
    return needs


def _state_need(job: _Job, name: str) -> Need:
    state = optimizer_state(job.local, job.config.optimizer)
    why = state.why + job.processes.part
    return Need(name, "optimizer state", job.trained_denoisers * state.bytes, job.loaded, why)


def _chunked_state_needs(job: _Job, name: str) -> list[Need]:
    """Masters and moments on the device or in pinned host memory, and the device memory through which they pass."""
    state, every = job.config.optimizer.state, job.elements * job.trained_denoisers
    home: Home = "host" if state.home == "streamed" else "device"
    what = f"masters and moments, {state.precision}, {BYTES[state.precision]} bytes for each parameter"
    passing = passing_bytes(state, every)
    return [
        Need(name, "optimizer state", state_bytes(state, every), job.loaded, f"{what}, {state.home}", home=home),
        Need("optimizer slots", "workspace", passing, job.loaded, "chunks of the state that are being updated"),
    ]


def _assistant_needs(job: _Job, elements: int | None) -> list[Need]:
    if elements is None:
        return []
    size = elements * (4 if job.config.model.base_precision == "fp32" else 2)
    why = "frozen, beside the layers it is for"
    return [Need("assistant adapter", "frozen weights", size, job.loaded, why)]


def _assistant_remarks(job: _Job, elements: int | None) -> list[str]:
    if job.config.model.assistant_adapter is None or elements is not None:
        return []
    return ["model.assistant_adapter: its size is not known before it is downloaded; it is not counted"]


def _gathered_needs(job: _Job) -> list[Need]:
    """With sharding: the whole blocks that `fully_shard` gathers from all processes, beside this process's shard."""
    if not job.processes.sharded:
        return []
    footprint, full = job.footprint, job.method.full_finetune
    frozen_bytes = 4 if full else _WEIGHT_BYTES[job.config.model.base_precision]
    trained = [_trained_in(block, job) for block in footprint.blocks]
    largest = max(
        frozen_bytes * sum(linear.weights for linear in block.linears) + (0 if full else 4 * elements)
        for block, elements in zip(footprint.blocks, trained, strict=True)
    )
    # Parameters outside the blocks form one FSDP group, gathered from the first forward to the last backward pass.
    around = frozen_bytes * (footprint.parameters - footprint.block_weights)
    if job.processes.reshard:
        size, why = GATHERED_BLOCKS * largest + around, f"{GATHERED_BLOCKS} blocks and what is around them, whole"
    else:
        adapters = 0 if full else 4 * job.elements
        size = frozen_bytes * footprint.parameters + adapters + (GATHERED_BLOCKS - 1) * largest
        why = "every block stays whole until its backward pass (fsdp_reshard_after_forward: false)"
    reduced = REDUCED_BLOCKS * 4 * max(trained)
    # The last size is that of the config's precision: 8 bits are rejected with sharding.
    loading = _sizes(job)[-1][1] + (0 if full else 4 * job.elements)
    before = (job.trained_denoisers - 1) * job.processes.share(loading)
    return [
        Need("denoiser before sharding", "frozen weights", loading, ("load",), "every process loads it whole first"),
        Need("experts sharded before it", "frozen weights", before, ("load",), "loaded one after the other"),
        Need("gathered weights", "workspace", size, job.loaded, why),
        Need("gradients being reduced", "workspace", reduced, ("train",), f"{REDUCED_BLOCKS} blocks', whole, fp32"),
    ]


def _trained_in(block: FootprintBlock, job: _Job) -> int:
    """Trained parameters of one block of this kind."""
    targets = [target for target in job.selection.targets if target.block is block]
    return sum(tensor.elements // tensor.count for target in targets for tensor in target.tensors())


def _compute_copy(job: _Job) -> int:
    """Bytes of autocast's copies of trained tensors.

    Kinds that rebuild the weight cast the rebuilt weight instead of its factors; that counts as activations.
    """
    if job.method.compute_bytes == 4 or job.config.has_chunked_state:
        return 0
    if job.method.full_finetune:
        return job.method.compute_bytes * job.elements
    cast = [target for target in job.selection.targets if casts_tensors(target, job.method)]
    return job.method.compute_bytes * sum(tensor.elements for target in cast for tensor in target.tensors())


def _workloads(job: _Job) -> tuple[tuple[Workload, ...], dict[str, SampleShape], list[str]]:
    """A workload per trained dataset, the largest shape of every dataset, and the assumptions."""
    config, footprint = job.config, job.footprint
    enabled = [(index, dataset) for index, dataset in enumerate(config.datasets) if not dataset.disabled]
    largest = {dataset.id: largest_sample(dataset, footprint) for _, dataset in enabled}
    shapes = {name: sample.shape for name, sample in largest.items()}
    workloads = tuple(
        _workload(job, index, dataset, shapes)
        for index, dataset in enabled
        if dataset.dataset_type in ("image", "video", "audio")
    )
    return workloads, shapes, [sample.assumed for sample in largest.values() if sample.assumed]


def _workload(job: _Job, index: int, dataset: Dataset, shapes: dict[str, SampleShape]) -> Workload:
    own = (dataset.id,) if dataset.canny_reference is not None else ()
    linked = (
        one.id for one in job.config.datasets if one.source_dataset_id == dataset.id and one.conditioning_type != "mask"
    )
    names = dict.fromkeys((*dataset.conditioning, *linked, *own))
    references = tuple(shapes[name] for name in names if name in shapes)
    if job.footprint.references and not references and not _trains_images_alone(job.footprint):
        references = (shapes[dataset.id],)
    tokens = job.footprint.token_counts(shapes[dataset.id], references)
    batch = dataset.batch_size or job.config.training.batch_size
    method = replace(job.method, one_sample=batch == 1)
    return Workload(
        key=f"datasets[{index}].batch_size" if dataset.batch_size is not None else "training.batch_size",
        label=f"{dataset.id}, {tokens['image']} + {tokens['text']} tokens",
        batch=batch,
        activations=activations(job.footprint, tokens, job.selection, method, _routes(job)),
    )


def _trains_images_alone(footprint: Footprint) -> bool:
    flavour = find_flavour(footprint.family, footprint.flavour)
    return flavour is not None and flavour.images_alone


def _routes(job: _Job) -> tuple[Route, ...]:
    """The token routes through the footprint's blocks, if they match them.

    Masks can keep any number of tokens, so with masks no token counts as skipped.
    """
    routes = job.config.training.token_routing.routes
    if job.config.keeps_masked_tokens:
        return ()
    try:
        return resolve_routes(routes, sum(block.count for block in job.footprint.blocks))
    except ConfigError:
        return ()


def _batch_ring(job: _Job, shapes: dict[str, SampleShape]) -> Need:
    size = max(
        (dataset.batch_size or job.config.training.batch_size) * sample_bytes(job.footprint, shapes[dataset.id])
        for dataset in job.config.datasets
        if dataset.id in shapes
    )
    return Need("batch ring", "batch ring", RING_DEPTH * size, ("train",), f"{RING_DEPTH} batches")


def _sampling_needs(job: _Job, shapes: dict[str, SampleShape]) -> list[Need]:
    if not job.sampling:
        return []
    shape = _sample_shape(job, shapes)
    given = max((len(prompt.references) for prompt in job.config.validation.prompts), default=0)
    count = given if _trains_images_alone(job.footprint) else 1
    tokens = job.footprint.token_counts(shape, (shape,) * count)
    step = activations(job.footprint, tokens, job.selection, job.method)[0]
    # Guidance runs with and without the prompt in one batch (factor 2). No activations are kept for a backward pass.
    why = f"the denoiser's forward pass, {_size(shape)}, with and without the prompt"
    return [Need("sampling", "workspace", 2 * step.working, ("sample",), why)]


def _codec(job: _Job, shapes: dict[str, SampleShape]) -> CodecPasses:
    model, footprint = job.config.model, job.footprint
    largest = max(shapes.values(), key=lambda shape: codec_bytes(footprint, shape, decode=False, tiled=False))
    sample_shape = _sample_shape(job, shapes) if job.sampling else None
    refreshed = [shapes[dataset.id] for dataset in refreshed_datasets(job.config) if dataset.id in shapes]
    return CodecPasses(
        batch=1 if model.vae_slicing else job.config.cache.vae_batch_size,
        batch_key="cache.vae_batch_size",
        encode=codec_bytes(footprint, largest, decode=False, tiled=False),
        encode_tiled=codec_bytes(footprint, largest, decode=False, tiled=True),
        decode=codec_bytes(footprint, sample_shape, decode=True, tiled=False) if sample_shape else 0,
        decode_tiled=codec_bytes(footprint, sample_shape, decode=True, tiled=True) if sample_shape else 0,
        tiled=model.vae_tiling,
        what=_size(largest),
        refresh=max((codec_bytes(footprint, shape, decode=False, tiled=False) for shape in refreshed), default=0),
        refresh_tiled=max((codec_bytes(footprint, shape, decode=False, tiled=True) for shape in refreshed), default=0),
    )


def _size(shape: SampleShape) -> str:
    if shape.seconds:
        return f"{shape.seconds:.0f} s"
    return f"{shape.width}x{shape.height}" + (f", {shape.frames} frames" if shape.frames > 1 else "")


def _sample_shape(job: _Job, shapes: dict[str, SampleShape]) -> SampleShape:
    """The largest sample requested; unset values come from the largest training sample."""
    default = max(shapes.values(), key=lambda shape: (shape.pixels * shape.frames, shape.seconds))
    validation = job.config.validation
    wanted = [
        SampleShape(
            width=prompt.width or validation.width or default.width,
            height=prompt.height or validation.height or default.height,
            frames=prompt.num_frames or validation.num_frames or default.frames,
            seconds=default.seconds,
        )
        for prompt in validation.prompts
    ]
    return max(wanted, key=lambda shape: shape.pixels * shape.frames)


def _checkpoints(job: _Job) -> Need:
    config = job.config
    every = job.elements * job.trained_denoisers
    weights = every * {"bf16": 2, "fp16": 2, "fp32": 4}[config.checkpoints.save_dtype]
    if config.has_chunked_state:
        state = 2 * every + state_bytes(config.optimizer.state, every)
    else:
        state = 4 * every + job.trained_denoisers * optimizer_state(job.tensors, config.optimizer).bytes
    ema = 4 * every if config.training.ema.enabled else 0
    kept = config.checkpoints.keep_last + 1
    why = f"{config.checkpoints.keep_last} kept and one being written, each with weights and optimizer"
    return Need("checkpoints", "checkpoints", kept * (weights + state + ema), ("train",), why, home="disk")


def _remarks(job: _Job) -> list[str]:
    config, footprint = job.config, job.footprint
    remarks = [
        f"adapter.{key}: {pattern!r} matches no matrix known here; if it exists it is not counted"
        for pattern in job.selection.unmatched
        for key in ("within" if pattern in config.adapter.within else "targets",)
    ]
    if not footprint.measured:
        words = "counted from the model's code, not yet compared with measurements on a GPU"
        remarks.append(f"activations of {footprint.family} {footprint.flavour}: {words}")
    if config.skips_blocks and not _routes(job):
        why = "masked tokens are always kept" if config.keeps_masked_tokens else "no routes through this model's blocks"
        remarks.append(f"training.token_routing: no token is counted as skipped: {why}")
    if config.training.attention == "math":
        remarks.append("training.attention math: the attention matrix it keeps is not counted; use auto")
    if not any(target.linear.is_spatial for target in job.selection.targets):
        remarks += unused_conv_options(config.adapter)
    return remarks

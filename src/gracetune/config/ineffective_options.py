"""Notes on options without effect, because the switch they belong to is off.

They are not errors: people keep such keys next to a switch that they turn off and on again, and the peers' files have
many of them. But a user who forgot the switch would train something else than intended, so each option that the
user set is named in a note. Defaults are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gracetune.config.base import Section
from gracetune.config.dataset_config import Dataset
from gracetune.config.draft import Draft, parse_path
from gracetune.config.families import names_of
from gracetune.config.registry import (
    ALGORITHMS,
    FULL_FINETUNE,
    AdapterAlgorithm,
    checked_record,
    is_loadable,
    kind_of_algo,
    reads_key,
)
from gracetune.config.rules import known_flavour
from gracetune.config.run_config import RunConfig


@dataclass(frozen=True)
class Switch:
    """Keys of one section that have no effect while a switch is off."""

    off: bool
    """Whether the switch is off now."""
    location: str
    """The path of the section, such as `datasets[0].crop`."""
    section: Section
    keys: str
    """Keys of the section, separated by spaces."""
    why: str
    """Why the keys have no effect while it is off."""
    remedy: str
    """What to type so that they have one."""


def without_effect(config: RunConfig, draft: Draft) -> list[str]:
    """Return one note for each reason, however many datasets it applies to."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for switch in switches(config, draft):
        keys = _requested_options(switch, draft) if switch.off else []
        if keys:
            named, remedies = found.setdefault(switch.why, ([], []))
            named += keys
            remedies.append(switch.remedy)
    return [
        f"{', '.join(dict.fromkeys(keys))}: no effect, because {why}; {' '.join(dict.fromkeys(remedies))}"
        for why, (keys, remedies) in found.items()
    ]


def loaded_by_no_program(config: RunConfig) -> list[str]:
    """Return a note for each algorithm whose files no program loads: they can only be resumed from or merged."""
    return [
        f"adapter.kind: no program that we know loads {one.name} from a file; merge the result into the model with "
        "gracetune adapter convert FILE --merge-into MODEL"
        for one in _chosen(config)
        if not is_loadable(one.name)
    ]


def _chosen(config: RunConfig) -> list[AdapterAlgorithm]:
    """The algorithms that the run trains."""
    adapter = config.adapter
    kinds = [adapter.kind, *(kind_of_algo(options.get("algo")) for options in adapter.by_module.values())]
    return [checked_record(kind) for kind in dict.fromkeys(kinds) if kind not in (None, FULL_FINETUNE)]


def _requested_options(switch: Switch, draft: Draft) -> list[str]:
    """Return the keys that the user set to something other than the default, as the user wrote them."""
    changed = switch.section.model_dump(exclude_defaults=True)
    paths = [(*parse_path(switch.location), key) for key in switch.keys.split() if key in changed]
    origins = {path: draft.origin(path) for path in paths}
    return [
        draft.written_key(path)[0]
        for path, origin in origins.items()
        if origin is not None and origin.kind != "default"
    ]


def switches(config: RunConfig, draft: Draft) -> Iterator[Switch]:
    yield from _of_the_model(config)
    yield from _of_training(config)
    yield from _of_memory(config)
    for index, dataset in enumerate(config.datasets):
        if not dataset.disabled:
            yield from _of_a_dataset(dataset, f"datasets[{index}]", draft.dataset_address(index))


def _of_the_model(config: RunConfig) -> Iterator[Switch]:
    model, adapter, flavour = config.model, config.adapter, known_flavour(config)
    yield Switch(flavour is not None and not flavour.dual_expert, "model", model, "switch_experts_every",
                 "the model has a single expert", "remove it")  # fmt: skip
    yield Switch(model.experts != "both", "model", model, "switch_experts_every",
                 f"model.experts is {model.experts}, and a single expert takes no turns",
                 "--set model.experts=both")  # fmt: skip
    yield Switch(not names_of(model.family).explicit_sizes, "model", model, "size_conditioning drop_size_conditioning",
                 f"model.family is {model.family}, which has no size conditioning", "remove them")  # fmt: skip
    chosen = _chosen(config)
    read = {key for one in chosen for key in one.own_options}
    for one in map(checked_record, ALGORITHMS.ours):
        keys = one.own_options if one in chosen else [key for key in one.own_options if key not in read]
        if keys:
            yield Switch(one not in chosen, "adapter", adapter, " ".join(keys),
                         f"adapter.kind is {adapter.kind}, and only {one.name} has them",
                         f"--set adapter.kind={one.name}")  # fmt: skip
    yield Switch(adapter.is_full_finetune, "adapter", adapter,
                 "rank alpha dropout conv_rank conv_alpha within by_module strength",
                 "adapter.kind is full_finetune, which trains the weights themselves",
                 "--set adapter.kind=lora")  # fmt: skip
    yield Switch(adapter.is_full_finetune, "checkpoints", config.checkpoints, "for_program",
                 "adapter.kind is full_finetune, whose result is a model and no adapter file", "remove it")  # fmt: skip


def _of_training(config: RunConfig) -> Iterator[Switch]:
    training, objective = config.training, config.objective
    yield Switch(not reads_key(config.optimizer.name, "rates_from"), "optimizer", config.optimizer, "rates_from",
                 f"optimizer.name is {config.optimizer.name}, and only automagic keeps learning rates",
                 "--set optimizer.name=automagic")  # fmt: skip
    yield Switch(config.optimizer.state.home == "auto", "optimizer.state", config.optimizer.state, "precision",
                 "optimizer.state.home is auto", "--set optimizer.state.home=streamed")  # fmt: skip
    yield Switch(not training.ema.enabled, "training.ema", training.ema, "decay update_every ramp copy_until",
                 "training.ema.enabled is false", "--set training.ema.enabled=true")  # fmt: skip
    yield Switch(not training.ramp.enabled, "training.ramp", training.ramp,
                 "initial_effective_batch_size target_effective_batch_size batch_rampup_steps",
                 "training.ramp.enabled is false", "--set training.ramp.enabled=true")  # fmt: skip
    yield Switch(training.max_grad_norm is None, "training", training, "grad_clip",
                 "training.max_grad_norm is unset, so nothing is clipped",
                 "--set training.max_grad_norm=1.0")  # fmt: skip
    huber = objective.loss in ("huber", "smooth_l1", "pseudo_huber")
    yield Switch(not huber, "objective", objective, "huber_delta huber_schedule",
                 f"objective.loss is {objective.loss}", "--set objective.loss=huber")  # fmt: skip
    yield Switch(objective.timestep_bias == "balanced", "objective", objective, "timestep_bias_over",
                 "objective.timestep_bias is balanced", "--set objective.timestep_bias=style")  # fmt: skip
    if objective.resolution_shift is not None:
        yield Switch(objective.flow_shift != "resolution", "objective.resolution_shift", objective.resolution_shift,
                     "base_image_seq_len base_shift max_image_seq_len max_shift",
                     "objective.flow_shift is not resolution", "--set objective.flow_shift=resolution")  # fmt: skip
    yield Switch(objective.timesteps not in ("sigmoid", "logit_normal"), "objective", objective, "sigmoid_scale",
                 f"objective.timesteps is {objective.timesteps}, which has no scale",
                 "--set objective.timesteps=sigmoid")  # fmt: skip
    yield Switch(objective.timesteps != "beta", "objective", objective, "beta_alpha beta_beta",
                 f"objective.timesteps is {objective.timesteps}, and only beta has them",
                 "--set objective.timesteps=beta")  # fmt: skip
    yield Switch(objective.noise_offset == 0, "objective", objective, "noise_offset_probability",
                 "objective.noise_offset is 0", "--set objective.noise_offset=0.1")  # fmt: skip


def _of_memory(config: RunConfig) -> Iterator[Switch]:
    memory, datasets = config.memory, [dataset for dataset in config.datasets if not dataset.disabled]
    keeping = any(dataset.cache_latents != "disk" and not dataset.encodes_each_visit for dataset in datasets)
    yield Switch(not keeping, "cache", config.cache, "vae_cache_type",
                 "every dataset's cache_latents is disk or none, or its augmentations change at every visit",
                 "remove cache_latents, or --set 'datasets[0].augmentation.cache_mode=static'")  # fmt: skip
    hints = memory.enable_uvm_hints
    if hints is None:
        hints = "unified_memory" in (config.cache.vae_cache_type, config.cache.text_cache_type)
    yield Switch(not memory.use_uvm, "memory", memory, "uvm_oversubscription_ratio uvm_access_pattern",
                 "memory.use_uvm is false, so there is no overflow arena", "--set memory.use_uvm=true")  # fmt: skip
    yield Switch(not (memory.use_uvm or hints), "memory", memory,
                 "uvm_stage1_threshold uvm_stage1_min_bytes",
                 "nothing asks for unified memory", "--set memory.use_uvm=true")  # fmt: skip


def _of_a_dataset(dataset: Dataset, location: str, named: str) -> Iterator[Switch]:
    """Yield the switches of one dataset. `location` is its path; `named` is its name in `--set`."""
    crop, captions = dataset.crop, dataset.captions
    yield Switch(dataset.dataset_type in ("conditioning", "eval"), location, dataset, "held_out",
                 f"the dataset's type is {dataset.dataset_type}, which is not trained on", "remove it")  # fmt: skip
    yield Switch(not dataset.is_staged, f"{location}.in_memory", dataset.in_memory,
                 "compression num_workers memory_limit_gb file_extensions",
                 f"the dataset's type is {dataset.type}", f"--set {named}.type=in_memory")  # fmt: skip
    if dataset.local_copy is not None:
        yield Switch(not dataset.path.startswith("hf://"), f"{location}.local_copy", dataset.local_copy, "subset",
                     "only datasets of the hub have subsets", "remove it")  # fmt: skip
    # Without a crop an image keeps its aspect ratio and its center, so `preserve` and `center` describe what happens.
    already_so = {"style": crop.style == "center", "aspect": crop.aspect == "preserve", "aspect_buckets": False}
    yield Switch(not crop.enabled, f"{location}.crop", crop,
                 " ".join(name for name, same in already_so.items() if not same),
                 "the dataset's crop.enabled is false", f"--set {named}.crop.enabled=true")  # fmt: skip
    yield Switch(not dataset.has_masks, f"{location}.mask", dataset.mask, "min_weight invert normalise",
                 "the dataset names no mask (a dataset of masks has its own options)",
                 f"--set {named}.mask.path=FOLDER")  # fmt: skip
    yield Switch(captions.dropout == 0, f"{location}.captions", captions, "dropped_caption",
                 "the dataset's captions.dropout is 0", f"--set {named}.captions.dropout=0.1")  # fmt: skip
    yield Switch(captions.default is None, f"{location}.captions", captions, "default_for_empty",
                 "the dataset has no captions.default", f"--set {named}.captions.default=TEXT")  # fmt: skip
    yield Switch(not captions.trigger_word, f"{location}.captions", captions, "add_trigger",
                 "the dataset has no captions.trigger_word", f"--set {named}.captions.trigger_word=WORD")  # fmt: skip
    yield Switch(not captions.shuffle_tags, f"{location}.captions", captions,
                 "keep_tags shuffle_variants shuffle_written shuffle_trigger tag_separator",
                 "the dataset's captions.shuffle_tags is false",
                 f"--set {named}.captions.shuffle_tags=true")  # fmt: skip
    yield Switch(captions.strategy != "instanceprompt" and not captions.prepend_instance_prompt,
                 f"{location}.captions", captions, "instance_prompt", f"captions come from {captions.strategy}",
                 f"--set {named}.captions.prepend_instance_prompt=true")  # fmt: skip

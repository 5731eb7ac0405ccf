"""Reads the `model` block: the family that an ai-toolkit `arch` corresponds to, its weights, and the `quantize` keys
for the base weights and the text encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gracetune.config.dialects.aitoolkit.keys import HARMLESS, section
from gracetune.config.dialects.peer_file import PeerBlock, let_plan_choose_precision
from gracetune.config.dialects.table import IsFalse, Key, KeyRule, OneOf, apply, check, noted, rejected
from gracetune.config.dialects.values import name_set, precision
from gracetune.config.draft import UnquotedText, describe
from gracetune.config.families import find_flavour, names_of, readable_names
from gracetune.config.family_names import Arch, FamilyNames, Flavour
from gracetune.config.path_status import inspect_path
from gracetune.config.spelling import misspelt

if TYPE_CHECKING:
    from gracetune.config.dialects.aitoolkit.job import AiToolkitJob


FEW_BITS = name_set("""
    int8 qint8 qint4 qint2 uint8 uint7 uint6 uint5 uint4 uint3 uint2 orbit2 orbit3 orbit4 orbitvq2 orbitvq3 orbitvq4
    convrot4 convrot8 convrotbitnet convrotcomfyw4a4 convrotint2 convrotint3 convrotint4 convrotint5 convrotint6
    convrotint7 convrotint8 nvfp4
""")
"""ai-toolkit's types of at most 8 bits, except the float8 types."""


def _quantizes_base(block: PeerBlock, *, adapter: bool) -> bool:
    """Whether `quantize` decides the precision of the base weights, instead of the training dtype.

    False for a full fine-tune and for unsupported types: these are problems, which `_base` reports.
    """
    kind, _ = _type_of(block)
    return adapter and block.get("quantize") is True and (_is_float8(kind) or _is_few_bits(kind))


def _read_base(block: PeerBlock, *, adapter: bool) -> None:
    """Read how the base weights are quantized: float8 becomes `fp8`, other types of at most 8 bits become `auto`."""
    if not block.flag("quantize", False):
        _list_as_unused(block, "quantize", "qtype", "quantize_kwargs", "accuracy_recovery_adapter")
        return
    kind, recovery = _type_of(block)
    if not _is_float8(kind) and not _is_few_bits(kind):
        hint = misspelt(kind, [*FEW_BITS, "qfloat8", "float8"], "write `qtype: qfloat8`", write="qtype: {}")
        block.problem("qtype", "one of ai-toolkit's quantized types", hint, found=UnquotedText(describe(kind)))
        return
    if not adapter:
        expected = "false: a full fine-tune trains the weights themselves"
        block.problem("quantize", expected, "write `quantize: false`, or add a `network` to train an adapter")
        return
    if block.get("quantize_kwargs"):
        block.reject("quantize_kwargs", "nothing: fp8 and int8 hold all of the base's large matrices")
    if not _is_float8(kind):
        rest = "" if recovery is None else f"; so {recovery}, which makes up for what {kind} loses, is not loaded"
        let_plan_choose_precision(block, "quantize", str(kind), rest)
        return
    block.assign(("model", "base_precision"), "fp8", "quantize")
    rest = "" if recovery is None else f"; the accuracy recovery adapter {recovery} is not loaded"
    block.note(
        f"{block.key('quantize')}: base weights are held in fp8 by gracetune itself, not by {_library(kind)}; they "
        f"round a little differently{rest}"
    )


def _read_text_encoder(block: PeerBlock, name: str) -> None:
    """Note that text encoders are not quantized. They run once, before training, so fewer bits would gain nothing.

    `name` is the key with the text encoder's type. If `quantize_te` is unset, upstream follows `quantize`.
    """
    switch = "quantize" if block.get("quantize_te") is None else "quantize_te"
    if not block.flag(switch, False):
        _list_as_unused(block, "quantize_te", "qtype_te")
        return
    kind = block.get(name)
    type_name = "" if kind is None else f", {describe(kind)}"
    block.note(f"{block.key(switch)}: the text encoder is used in the training dtype, which is more exact than "
               f"requested{type_name}")  # fmt: skip


def _type_of(block: PeerBlock) -> tuple[Any, Any]:
    """Return the type and the accuracy recovery adapter, which follows the type after a `|` or has its own key."""
    kind, recovery = block.get("qtype"), block.get("accuracy_recovery_adapter")
    if isinstance(kind, str) and "|" in kind:
        kind, _, recovery = kind.partition("|")
    return kind, recovery


def _list_as_unused(block: PeerBlock, *names: str) -> None:
    block.list_unused(HARMLESS, *(name for name in names if block.get(name)))


def _is_float8(kind: Any) -> bool:
    """Whether a type is float8, as upstream's default `qfloat8`. quanto's names begin with a q, torchao's do not."""
    return kind is None or (isinstance(kind, str) and kind.lower().removeprefix("q").split("_")[0] == "float8")


def _is_few_bits(kind: Any) -> bool:
    return isinstance(kind, str) and kind in FEW_BITS


def _library(kind: Any) -> str:
    return "torchao" if isinstance(kind, str) and not kind.lower().startswith("q") else "quanto"


SWITCHES = (
    "is_v2", "is_v3", "is_xl", "is_pixart", "is_pixart_sigma", "is_auraflow", "is_flux", "is_lumina2", "is_vega",
    "is_ssd",
)  # fmt: skip
"""The boolean keys that older files have instead of `arch`, in the order in which upstream checks them."""
_OTHER_SWITCHES = {"is_v2": "sd2", "is_v3": "sd3"}
"""Switch of a model that gracetune does not train -> its arch, if the arch is not the switch's name without `is_`."""

OTHER_ARCHS = (
    "sd1", "sd15", "sd2", "sd3", "pixart", "pixart_sigma", "auraflow", "flex1", "flex2", "lumina2", "vega", "ssd",
    "chroma", "chroma_radiance", "zeta_chroma", "hidream", "hidream_e1", "omnigen2", "zimage_l2p", "ltx2", "ltx2.3",
    "ernie_image", "f-lite", "fibo", "anima", "boogu_image", "boogu_image_edit", "ace_step_15", "yue2",
)  # fmt: skip
"""Models that ai-toolkit trains and gracetune does not."""


@dataclass(frozen=True)
class ModelTarget:
    """Facts about the model that the other parts of a job depend on."""

    names: FamilyNames
    arch: Arch
    name: str
    """The arch as the file writes it; empty if gracetune does not support it."""
    flavour: Flavour | None
    dtype: Any
    """The training dtype, in which upstream loads everything."""
    adapter: bool
    """Whether an adapter is trained, not the model itself."""
    match_target_res: bool
    """Whether references have the size of the image they belong to, not a size of their own."""
    quantizes_base: bool
    """Whether `quantize` decides the precision of the base weights, instead of the training dtype."""

    @property
    def edits(self) -> bool:
        """Whether the model takes reference images. False if the flavour is unknown."""
        return self.flavour is not None and self.flavour.edits

    @property
    def is_transformer(self) -> bool:
        """Whether the denoiser is a transformer, not a U-Net."""
        return not self.names.aitoolkit.unet

    @property
    def dual_expert(self) -> bool:
        """Whether the model has two noise experts. False if the flavour is unknown."""
        return self.flavour is not None and self.flavour.dual_expert


# Used in place of an unsupported arch, so that the problems of other keys are still found. Such a config is never used,
# because the arch itself is reported.
_STAND_IN = "flux"
_UNKNOWN_ARCH = Arch((), references="reference_loose")


def archs() -> dict[str, tuple[FamilyNames, Arch]]:
    """Return every supported arch, of our families and of readable installed packages."""
    supported: dict[str, tuple[FamilyNames, Arch]] = {}
    for family in readable_names():
        for name, arch in family.aitoolkit.archs.items():
            supported.setdefault(name, (family, arch))
    return supported


def find_target(block: PeerBlock, *, dtype: Any, adapter: bool) -> ModelTarget:
    """Return what is known about the model of a block, without reporting problems. The rules of `MODEL` report them."""
    supported, name = archs(), block.get("arch")
    if name is None:
        name = next((_arch_of(switch, supported) for switch in SWITCHES if block.get(switch) is True), None)
    plain = name.partition(":")[0] if isinstance(name, str) else ""
    names, arch = supported.get(plain, (names_of(_STAND_IN), _UNKNOWN_ARCH))
    name = str(name) if plain in supported else ""
    kwargs = block.get("model_kwargs")
    return ModelTarget(
        names=names,
        arch=arch,
        name=name,
        flavour=_find_flavour(block.get("name_or_path"), names, arch, name),
        dtype=dtype,
        adapter=adapter,
        match_target_res=isinstance(kwargs, Mapping) and kwargs.get("match_target_res") is True,
        quantizes_base=_quantizes_base(block, adapter=adapter),
    )


def _arch_of(switch: str, supported: Mapping[str, tuple[FamilyNames, Arch]]) -> str:
    ours = next((name for name, (_, arch) in supported.items() if arch.switch == switch), None)
    return ours or _OTHER_SWITCHES.get(switch) or switch.removeprefix("is_")


def _find_flavour(path: Any, names: FamilyNames, arch: Arch, name: str) -> Flavour | None:
    """Find the flavour by the weights' published name, the arch's tag, or because the arch has only one."""
    published, guess = _published(names, path), _guess(arch, name)
    if path is None or _is_of_another(arch, published):
        return None
    return published or (find_flavour(names.family, guess) if guess else None)


def _published(names: FamilyNames, path: Any) -> Flavour | None:
    if not isinstance(path, str):
        return None
    return next((flavour for flavour in names.flavours if flavour.weights.lower() == path.strip().lower()), None)


def _guess(arch: Arch, name: str) -> str | None:
    return arch.tags.get(name.partition(":")[2]) or (arch.flavours[0] if len(arch.flavours) == 1 else None)


def _is_of_another(arch: Arch, published: Flavour | None) -> bool:
    return bool(arch.flavours) and published is not None and published.name not in arch.flavours


def _arch(block: PeerBlock, job: AiToolkitJob) -> None:
    supported = archs()
    name = found = block.get("arch")
    key = "arch"
    if name is None:
        switch = next((switch for switch in SWITCHES if block.flag(switch, False)), None)
        name, key = (_arch_of(switch, supported), switch) if switch else (None, key)
        found = UnquotedText(f"true, which means {name}" if switch else "no arch, which means Stable Diffusion 1.5")
    plain = name.partition(":")[0] if isinstance(name, str) else None
    if plain not in supported:
        other = "train it with ai-toolkit, or choose one of these models"
        hint = other if plain in OTHER_ARCHS else misspelt(plain, supported, other, write="arch: {}")
        block.problem(key, f"one of {', '.join(supported)}", hint, found=found)


def _weights(block: PeerBlock, job: AiToolkitJob) -> None:
    path, target = block.get("name_or_path"), job.target
    published = _published(target.names, path)
    if path is None:
        guess = _guess(target.arch, target.name)
        flavour = find_flavour(target.names.family, guess or "") or target.names.flavours[0]
        block.problem("name_or_path", "a hub id or a folder", f"for example `name_or_path: {flavour.weights}`")
    else:
        block.assign(("model", "path"), path, "name_or_path")
        _check_weights(block, path, target, published)
    if target.flavour is not None:
        block.assign(("model", "flavour"), target.flavour.name, "name_or_path" if published else "arch")
    block.assign(("model", "family"), target.names.family, "arch")


def _check_weights(block: PeerBlock, path: Any, target: ModelTarget, published: Flavour | None) -> None:
    """Report weights that cannot be what the arch needs."""
    arch = target.arch
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        block.problem("name_or_path", "a hub id, a folder or a file", "download the file and name it here")
    for mark, expected in arch.other_models.items():
        if isinstance(path, str) and mark in path.lower():
            block.problem("name_or_path", expected, "choose another model")
    if _is_of_another(arch, published):
        named = " or ".join(flavour.weights for flavour in target.names.flavours if flavour.name in arch.flavours)
        block.problem("name_or_path", f"weights of {target.name}, such as {named}", "change arch or the weights")


def _precisions(block: PeerBlock, job: AiToolkitJob) -> None:
    for name in ("vae_dtype", "te_dtype"):
        value = block.get(name)
        if value is not None and precision(value) != precision(job.target.dtype):
            block.reject(name, f"{job.target.dtype}: VAE and text encoders follow train.dtype")


def _base(block: PeerBlock, job: AiToolkitJob) -> None:
    _read_base(block, adapter=job.target.adapter)


def _text_encoder(block: PeerBlock, job: AiToolkitJob) -> None:
    _read_text_encoder(block, job.target.names.aitoolkit.text_encoder_qtype)


def _assistant(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.get("assistant_lora_path") is None:
        return
    if not job.target.arch.assistant:
        able = ", ".join(name for name, (_, arch) in archs().items() if arch.assistant)
        expected = f"nothing: ai-toolkit takes an assistant LoRA for {able} alone"
        block.problem("assistant_lora_path", expected, "remove `assistant_lora_path`")
    elif not job.target.adapter:
        block.problem("assistant_lora_path", "nothing: an assistant is for an adapter that is trained",
                      "remove `assistant_lora_path`, or add a `network`")  # fmt: skip
    else:
        path = _hub_file(block.get("assistant_lora_path"))
        block.assign(("model", "assistant_adapter"), path, "assistant_lora_path")


def _hub_file(path: Any) -> Any:
    """An address for upstream's `owner/repository/file`, which it takes for a hub file if no such file is on disk."""
    is_hub_file = isinstance(path, str) and path.count("/") == 2 and path.endswith(".safetensors")
    return f"hf://{path}" if is_hub_file and inspect_path(path).kind == "nothing" else path


def _extras(block: PeerBlock, job: AiToolkitJob) -> None:
    """Read the repository of the VAE and the text encoders, if it is not that of the transformer."""
    extras = block.get("extras_name_or_path")
    if extras is None or extras == block.get("name_or_path"):
        return
    for path, own in ((("model", "vae_path"), "vae_path"), (("model", "text_encoder_path"), "te_name_or_path")):
        if block.get(own) is None:
            block.assign(path, extras, "extras_name_or_path")


def _compile(block: PeerBlock, job: AiToolkitJob) -> None:
    requested = {name: block.flag(name, False) for name in ("compile", "block_compile") if name in block}
    if requested:
        name = next((name for name, on in requested.items() if on), next(iter(requested)))
        block.assign(("training", "compile"), "on" if requested[name] else "off", name)


def _layers(block: PeerBlock, job: AiToolkitJob) -> None:
    """Lists of layers. Upstream reads them only for a full fine-tune, where they are rejected."""
    for name in ("ignore_if_contains", "only_if_contains"):
        if job.target.adapter and block.get(name) is not None:
            block.list_unused(HARMLESS, name)
        elif block.get(name):
            block.reject(name, "nothing: a full fine-tune trains every layer")


def _v_prediction(block: PeerBlock, job: AiToolkitJob) -> None:
    if block.flag("is_v_pred", False):
        block.assign(("objective", "prediction"), "v_prediction", "is_v_pred")


def _kwargs(block: PeerBlock, job: AiToolkitJob) -> None:
    kwargs = block.inner("model_kwargs")
    check(kwargs, MODEL_KWARGS)
    apply(kwargs, MODEL_KWARGS, job)


def _references(kwargs: PeerBlock, job: AiToolkitJob) -> None:
    # Only reports an invalid value. `find_target` has read the key.
    kwargs.flag("match_target_res", False)


def _experts(kwargs: PeerBlock, job: AiToolkitJob) -> None:
    if not job.target.dual_expert:
        given = [name for name in ("train_high_noise", "train_low_noise") if kwargs.get(name) is not None]
        kwargs.list_unused(HARMLESS, *given)
        return
    high, low = kwargs.flag("train_high_noise", True), kwargs.flag("train_low_noise", True)
    if not high and not low:
        found = UnquotedText("neither expert to train")
        kwargs.problem("train_high_noise", "at least one of the two", "set one of them to true", found=found)
    elif high != low:
        name = "train_low_noise" if high else "train_high_noise"
        kwargs.assign(("model", "experts"), "high" if high else "low", name)
    elif kwargs.get("train_high_noise") is not None:
        kwargs.assign(("model", "experts"), "both", "train_high_noise")


def _unused_references(kwargs: PeerBlock, job: AiToolkitJob) -> None:
    if job.target.arch.references is None and kwargs.get("match_target_res") is not None:
        kwargs.list_unused(HARMLESS, "match_target_res")


_OTHER_LORA = "nothing: a second LoRA under the trained one is not loaded here"

MODEL = section(
    Key("vae_path", ("model", "vae_path")),
    Key("te_name_or_path", ("model", "text_encoder_path")),
    KeyRule(_arch, "arch", *SWITCHES),
    KeyRule(_weights, "name_or_path arch"),
    KeyRule(_precisions, "vae_dtype te_dtype"),
    KeyRule(_base, "quantize qtype quantize_kwargs accuracy_recovery_adapter"),
    KeyRule(_text_encoder, "quantize_te qtype_te"),
    KeyRule(_extras, "extras_name_or_path"),
    KeyRule(_compile, "compile block_compile"),
    KeyRule(_layers, "ignore_if_contains only_if_contains"),
    KeyRule(_v_prediction, "is_v_pred"),
    KeyRule(_kwargs, "model_kwargs"),
    *noted(
        "text encoders are used in the training dtype, which is more exact", "text_encoder_bits", unless=OneOf((16,))
    ),
    rejected("lora_path", OneOf((None,)), _OTHER_LORA),
    KeyRule(_assistant, "assistant_lora_path"),
    rejected("inference_lora_path", OneOf((None,)), _OTHER_LORA),
    rejected("unconditional_lora_path", OneOf((None,)), _OTHER_LORA),
    rejected("refiner_name_or_path", OneOf((None,)), "nothing: SDXL's refiner is not trained here"),
    rejected("unet_path", OneOf((None,)), "nothing: give the whole model in name_or_path"),
    rejected("unet_sample_size", OneOf((None,)), "nothing: the model's own sample size is used"),
    rejected("model_paths", OneOf(({},)), "nothing: none of our models takes extra paths"),
    rejected("use_text_encoder_1", OneOf((True,)), "true: both of SDXL's text encoders are used"),
    rejected("use_text_encoder_2", OneOf((True,)), "true: both of SDXL's text encoders are used"),
    rejected("experimental_xl", OneOf((False,)), "false: not done here"),
    rejected("use_flux_cfg", OneOf((False,)), "false: Flux is trained with its guidance embedding"),
    rejected("attn_masking", OneOf((False,)), "false: Flux's padding tokens are not masked"),
    rejected("in_context", OneOf((False,)), "false: in-context training is not done here"),
    rejected("split_model_over_gpus", OneOf((False,)), "false: a model is not split over GPUs here"),
    *noted(
        HARMLESS,
        """
        dtype vae_device te_device low_vram auto_memory layer_offloading layer_offloading_transformer_percent
        layer_offloading_text_encoder_percent latent_space_version refiner_start_at
        split_model_other_module_param_count_scale compile_mode compile_fullgraph compile_dynamic cache_size_limit
        """,
        unless=IsFalse(),
    ),
)

MODEL_KWARGS = section(
    Key("vae_tiling", ("model", "vae_tiling")),
    KeyRule(_references, "match_target_res"),
    KeyRule(_experts, "train_high_noise train_low_noise"),
    KeyRule(_unused_references, "match_target_res"),
)

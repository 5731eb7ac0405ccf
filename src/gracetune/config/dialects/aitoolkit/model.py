"""The `model` block: which of our families an ai-toolkit `arch` is, and where its weights come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gracetune.config.dialects.aitoolkit.keys import (
    Block,
    Known,
    Put,
    Reading,
    Table,
    block_of,
    check,
    precision,
    put_rows,
    refused_unless,
)
from gracetune.config.dialects.aitoolkit.quantised import read_base, read_text_encoder
from gracetune.config.draft import Said
from gracetune.config.families import Flavour, find_flavour, flavours
from gracetune.config.spelling import misspelt


@dataclass(frozen=True)
class Arch:
    """One of ai-toolkit's model classes that we train."""

    family: str
    flavours: tuple[str, ...]
    """The weights it may be given; the only one is known without looking at `name_or_path`."""
    starts_from_image: str = "never"
    """Whether clips are learnt from their first frame: `never`, `always`, or `do_i2v` where the dataset says."""
    references: str | None = None
    """How control images reach the model: cut like the target (`reference_strict`) or in their own shape."""


ARCHS = {
    "wan21": Arch("wan", ("t2v-1.3b-2.1", "t2v-14b-2.1")),
    "wan21_i2v": Arch("wan", ("i2v-14b-480p-2.1", "i2v-14b-720p-2.1"), "always"),
    "wan22_14b": Arch("wan", ("t2v-14b-2.2",)),
    "wan22_14b_i2v": Arch("wan", ("i2v-14b-2.2",), "always"),
    "wan22_5b": Arch("wan", ("ti2v-5b-2.2",), "do_i2v"),
    "qwen_image": Arch("qwen_image", ("t2i", "t2i-2512")),
    "qwen_image_edit": Arch("qwen_image", ("edit",), references="reference_strict"),
    "qwen_image_edit_plus": Arch("qwen_image", ("edit-2509", "edit-2511"), references="reference_loose"),
    "flux": Arch("flux", ("dev", "krea", "schnell")),
    "flux_kontext": Arch("flux", ("kontext",), references="reference_strict"),
    "sdxl": Arch("sdxl", ("base-1.0",)),
}

# What the tag behind the colon says about the weights. Upstream drops it; the published names agree with it.
TAGS = {
    "wan21:1b": "t2v-1.3b-2.1",
    "wan21:14b": "t2v-14b-2.1",
    "wan21_i2v:14b480p": "i2v-14b-480p-2.1",
    "wan21_i2v:14b": "i2v-14b-720p-2.1",
    "qwen_image:2512": "t2i-2512",
    "qwen_image_edit_plus:2509": "edit-2509",
    "qwen_image_edit_plus:2511": "edit-2511",
}

# The legacy switches in upstream's order of asking; those of models we do not train lead to a refusal.
SWITCHES = {
    "is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_pixart": "pixart", "is_pixart_sigma": "pixart_sigma",
    "is_auraflow": "auraflow", "is_flux": "flux", "is_lumina2": "lumina2", "is_vega": "vega", "is_ssd": "ssd",
}  # fmt: skip

OTHER_ARCHS = (
    "sd1", "sd15", "sd2", "sd3", "pixart", "pixart_sigma", "auraflow", "flex1", "flex2", "lumina2", "vega", "ssd",
    "chroma", "chroma_radiance", "zeta_chroma", "hidream", "hidream_e1", "omnigen2", "flux2", "flux2_klein_4b",
    "flux2_klein_9b", "zimage", "ltx2", "ltx2.3", "ernie_image", "f-lite", "fibo", "anima", "krea2", "boogu_image",
    "boogu_image_edit", "ace_step_15", "yue2",
)  # fmt: skip
"""Models that ai-toolkit trains and we do not."""

_OTHER_LORA = "nothing: a second LoRA under the trained one is not loaded here"

MODEL: Table = {
    "name_or_path": Known.BY_HAND,
    "arch": Known.BY_HAND,
    "extras_name_or_path": Known.BY_HAND,
    "model_kwargs": Known.BY_HAND,
    "compile": Known.BY_HAND,
    "block_compile": Known.BY_HAND,
    "vae_dtype": Known.BY_HAND,
    "te_dtype": Known.BY_HAND,
    "is_v_pred": Known.BY_HAND,
    "ignore_if_contains": Known.BY_HAND,
    "only_if_contains": Known.BY_HAND,
    **dict.fromkeys(SWITCHES, Known.BY_HAND),
    **dict.fromkeys(("quantize", "quantize_te", "qtype", "qtype_te", "quantize_kwargs"), Known.BY_HAND),
    "vae_path": Put(("model", "vae_path")),
    "te_name_or_path": Put(("model", "text_encoder_path")),
    "accuracy_recovery_adapter": refused_unless(None, "nothing: it mends quantised weights, and none are here"),
    "text_encoder_bits": refused_unless(16, "16: text encoders are not quantised here"),
    "lora_path": refused_unless(None, _OTHER_LORA),
    "assistant_lora_path": refused_unless(None, _OTHER_LORA),
    "inference_lora_path": refused_unless(None, _OTHER_LORA),
    "unconditional_lora_path": refused_unless(None, _OTHER_LORA),
    "refiner_name_or_path": refused_unless(None, "nothing: SDXL's refiner is not trained here"),
    "unet_path": refused_unless(None, "nothing: give the whole model in name_or_path"),
    "unet_sample_size": refused_unless(None, "nothing: the model's own sample size is used"),
    "model_paths": refused_unless({}, "nothing: none of our models takes extra paths"),
    "use_text_encoder_1": refused_unless(True, "true: both of SDXL's text encoders are used"),
    "use_text_encoder_2": refused_unless(True, "true: both of SDXL's text encoders are used"),
    "experimental_xl": refused_unless(False, "false: not done here"),
    "use_flux_cfg": refused_unless(False, "false: Flux is trained with its guidance embedding"),
    "attn_masking": refused_unless(False, "false: Flux's padding tokens are not masked"),
    "in_context": refused_unless(False, "false: in-context training is not done here"),
    "split_model_over_gpus": refused_unless(False, "false: a model is not split over GPUs here"),
    **dict.fromkeys(
        (
            "dtype", "vae_device", "te_device", "low_vram", "auto_memory", "layer_offloading",
            "layer_offloading_transformer_percent", "layer_offloading_text_encoder_percent",
            "latent_space_version", "refiner_start_at", "split_model_other_module_param_count_scale",
            "compile_mode", "compile_fullgraph", "compile_dynamic", "cache_size_limit",
        ),
        Known.HARMLESS,
    ),
}  # fmt: skip

MODEL_KWARGS: Table = {
    "train_high_noise": Known.BY_HAND,
    "train_low_noise": Known.BY_HAND,
    "match_target_res": Known.BY_HAND,
    "vae_tiling": Put(("model", "vae_tiling")),
}


@dataclass(frozen=True)
class Target:
    """What the rest of the job needs to know about the model it trains."""

    arch: Arch
    flavour: Flavour | None
    match_target_res: bool
    """References take the size of the image they belong to, not a size of their own."""
    quantised: bool = False
    """The base weights are held in fp8, whatever the training dtype is."""

    @property
    def edits(self) -> bool:
        return self.flavour is not None and self.flavour.edits

    @property
    def transformer(self) -> bool:
        return self.arch.family != "sdxl"

    @property
    def dual_expert(self) -> bool:
        return self.flavour is not None and self.flavour.dual_expert


# Stands in for an arch we do not train, so that the other keys' problems are still found. Never built: the arch's own
# problem stays.
_UNKNOWN_ARCH = Arch("flux", (), references="reference_loose")


def read_model(reading: Reading, value: Any, prefix: str, *, dtype: Any, adapter: bool) -> Target:
    """Fill the draft's `model`; `dtype` is the training dtype, in which upstream loads everything."""
    block = block_of(reading, value, prefix)
    check(reading, block, MODEL)
    put_rows(reading, block, MODEL)
    arch, name = _arch(reading, block)
    flavour = _weights(reading, block, arch, name)
    reading.put(("model", "family"), arch.family, block.key("arch"))
    _precisions(reading, block, dtype)
    quantised = read_base(reading, block, adapter=adapter)
    # upstream's Wan quantises both alike
    read_text_encoder(reading, block, "qtype" if arch.family == "wan" else "qtype_te")
    _extras(reading, block)
    _compile(reading, block)
    _layers(reading, block, adapter)
    if block.flag(reading, "is_v_pred", False):
        reading.put(("objective", "prediction"), "v_prediction", block.key("is_v_pred"))
    return replace(_kwargs(reading, block, arch, flavour), quantised=quantised)


def _arch(reading: Reading, block: Block) -> tuple[Arch, str]:
    name, key = block.get("arch"), block.key("arch")
    found = name
    if name is None:
        switch = next((switch for switch in SWITCHES if block.flag(reading, switch, False)), None)
        name, key = (SWITCHES[switch], block.key(switch)) if switch else (None, key)
        found = Said(f"true, which means {name}" if switch else "no arch, which means Stable Diffusion 1.5")
    plain = name.partition(":")[0] if isinstance(name, str) else None
    if plain in ARCHS:
        return ARCHS[plain], str(name)
    other = "train it with ai-toolkit, or choose one of these models"
    hint = other if plain in OTHER_ARCHS else misspelt(plain, ARCHS, other, write="arch: {}")
    reading.draft.problem(key, found, f"one of {', '.join(ARCHS)}", hint)
    return _UNKNOWN_ARCH, ""


def _weights(reading: Reading, block: Block, arch: Arch, name: str) -> Flavour | None:
    """The flavour, from the weights' published name, the arch's tag, or an arch that has only one."""
    path, key = block.get("name_or_path"), block.key("name_or_path")
    guess = TAGS.get(name) or (arch.flavours[0] if len(arch.flavours) == 1 else None)
    if path is None:
        known = find_flavour(arch.family, guess or "") or next(iter(flavours(arch.family)))
        reading.draft.problem(key, None, "a hub id or a folder", f"for example `name_or_path: {known.weights}`")
        return None
    reading.put(("model", "path"), path, key)
    published = _published(arch.family, path)
    if _mistaken(reading, key, path, (arch, name), published):
        return None
    flavour = published or (find_flavour(arch.family, guess) if guess else None)
    if flavour is not None:
        reading.put(("model", "flavour"), flavour.name, key if published else block.key("arch"))
    return flavour


def _mistaken(reading: Reading, key: str, path: Any, wanted: tuple[Arch, str], published: Flavour | None) -> bool:
    """Report weights that cannot be what the arch needs; whether they are those of another arch."""
    arch, name = wanted
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        reading.draft.problem(key, path, "a hub id, a folder or a file", "download the file and name it here")
    if arch is ARCHS["flux"] and isinstance(path, str) and "flex." in path.lower():
        reading.draft.problem(key, path, "FLUX.1 weights: Flex is another model", "choose another model")
    if not arch.flavours or published is None or published.name in arch.flavours:
        return False
    named = " or ".join(known.weights for known in flavours(arch.family) if known.name in arch.flavours)
    reading.draft.problem(key, path, f"weights of {name}, such as {named}", "change arch or the weights")
    return True


def _published(family: str, path: Any) -> Flavour | None:
    if not isinstance(path, str):
        return None
    return next((known for known in flavours(family) if known.weights.lower() == path.strip().lower()), None)


def _precisions(reading: Reading, block: Block, dtype: Any) -> None:
    for name in ("vae_dtype", "te_dtype"):
        value = block.get(name)
        if value is not None and precision(value) != precision(dtype):
            reading.draft.refuse(block.key(name), value, f"{dtype}: VAE and text encoders follow train.dtype")


def _extras(reading: Reading, block: Block) -> None:
    """VAE and text encoders from another repository than the transformer's."""
    extras = block.get("extras_name_or_path")
    if extras is None or extras == block.get("name_or_path"):
        return
    for path, own in ((("model", "vae_path"), "vae_path"), (("model", "text_encoder_path"), "te_name_or_path")):
        if block.get(own) is None:
            reading.put(path, extras, block.key("extras_name_or_path"))


def _compile(reading: Reading, block: Block) -> None:
    asked = {name: block.flag(reading, name, False) for name in ("compile", "block_compile") if name in block.values}
    if asked:
        name = next((name for name, on in asked.items() if on), next(iter(asked)))
        reading.put(("training", "compile"), "on" if asked[name] else "off", block.key(name))


def _layers(reading: Reading, block: Block, adapter: bool) -> None:
    """Upstream reads the model's own layer lists only where the model itself is trained."""
    for name in ("ignore_if_contains", "only_if_contains"):
        if adapter and block.get(name) is not None:
            reading.harmless.append(block.key(name))
        elif block.get(name):
            reading.draft.refuse(block.key(name), block.get(name), "nothing: a full fine-tune trains every layer")


def _kwargs(reading: Reading, block: Block, arch: Arch, flavour: Flavour | None) -> Target:
    kwargs = block_of(reading, block.get("model_kwargs"), block.key("model_kwargs"))
    check(reading, kwargs, MODEL_KWARGS)
    put_rows(reading, kwargs, MODEL_KWARGS)
    target = Target(arch, flavour, kwargs.flag(reading, "match_target_res", False))
    if target.dual_expert:
        _experts(reading, kwargs)
    else:
        given = [name for name in ("train_high_noise", "train_low_noise") if kwargs.get(name) is not None]
        reading.harmless += [kwargs.key(name) for name in given]
    if arch.references is None and kwargs.get("match_target_res") is not None:
        reading.harmless.append(kwargs.key("match_target_res"))
    return target


def _experts(reading: Reading, kwargs: Block) -> None:
    high = kwargs.flag(reading, "train_high_noise", True)
    low = kwargs.flag(reading, "train_low_noise", True)
    if not high and not low:
        key = kwargs.key("train_high_noise")
        found = Said("neither expert to train")
        reading.draft.problem(key, found, "at least one of the two", "set one of them to true")
    elif high != low:
        name = "train_low_noise" if high else "train_high_noise"
        reading.put(("model", "experts"), "high" if high else "low", kwargs.key(name))
    elif kwargs.get("train_high_noise") is not None:
        reading.put(("model", "experts"), "both", kwargs.key("train_high_noise"))

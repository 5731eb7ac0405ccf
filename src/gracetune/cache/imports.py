"""Taking over the caches of ai-toolkit: what can be identified is imported, everything else refused with the reason.

What ai-toolkit writes, beside the pictures:

    _latent_cache/<stem>_<hash>.safetensors   one tensor `latent`, scaled as the model wants it; the header's metadata
                                              tells file name, scaled size, cut, flips, latent space and version
    _t_e_cache/<stem>_<hash>.safetensors      `text_embed`, `pooled_embed`, `attention_mask`, each with a batch
                                              dimension of 1; no metadata

The hash is the URL-safe base64 of the MD5 of a JSON object, for latents of the metadata's own values, for text of the
caption, the model's `arch` and a version: so the name of a text file identifies its caption. Neither names the
content of the picture or the weights of the encoder. Both are therefore made sure of: a picture changed after its
cache was written is refused by its date, and a few entries of every folder are encoded anew and compared before
anything of it is taken. Imported entries carry a note, and an audit counts them.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from gracetune.cache.keys import Origin
from gracetune.cache.writer import Writer
from gracetune.data.refs import SampleRef
from gracetune.storage.errors import WeightFileError
from gracetune.storage.safetensors_headers import Weights, open_weights

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

NOTE = "imported from ai-toolkit"
_HASH_LENGTH = 22
_VERSION = 1
"""Of ai-toolkit's `latent_version` and `text_embedding_version`."""
_SIZES = ("scale_to_width", "scale_to_height", "crop_x", "crop_y", "crop_width", "crop_height")
_ALWAYS = frozenset(("filename", *_SIZES, "latent_space_version", "latent_version"))
"""In every latent file's metadata; `flip_x` and `flip_y` only where they are true."""
_BESIDE = frozenset(("software", "format"))
_TEXT_NAMES = {
    "text_embed": "prompt_embeds",
    "pooled_embed": "pooled_prompt_embeds",
    "attention_mask": "prompt_attention_mask",
}
_CLOSE_LATENTS = 0.25
"""Relative error of the compared tensors. ai-toolkit scales pictures with another filter and draws from the VAE's
distribution where we may take its mean; latents of another picture or another VAE are off by 1 and more."""
_CLOSE_TEXT = 0.05
"""Text encoders draw nothing; quantised or bf16 ones differ a little."""


@dataclass(frozen=True)
class LatentWish:
    """An entry that is missing, and where its picture lies."""

    origin: Origin
    ref: SampleRef
    picture: Path


@dataclass(frozen=True)
class TextWish:
    origin: Origin
    text: str
    picture: Path
    """ai-toolkit stores embeddings once for each picture."""
    reads_pictures: bool = False


@dataclass(frozen=True)
class Refusal:
    file: Path
    reason: str


@dataclass(frozen=True)
class ImportReport:
    imported: int
    compared: int
    """Of those, encoded anew and compared."""
    refused: tuple[Refusal, ...]
    without_file: int
    """Wishes for which ai-toolkit had nothing."""


def import_latents(
    writer: Writer,
    wishes: Sequence[LatentWish],
    *,
    spaces: Collection[str],
    encode: Callable[[SampleRef], Entry],
    beside: Callable[[SampleRef], Entry] | None = None,
    compare: int = 4,
) -> ImportReport:
    """`spaces` are ai-toolkit's names of such latents (`latent_space_version`: "sdxl", "flux1", the `arch`, ...).

    `encode` is what our own encoder makes of a sample, `beside` what its entry holds besides the latents and takes no
    encoder to make (SDXL's `time_ids`). Where a compared entry differs, nothing is imported.
    """
    found: _Search[LatentWish] = _Search()
    files = _Files("_latent_cache")
    for wish in wishes:
        found.look(wish, files.of(wish.picture), partial(_latent_flaw, wish=wish, spaces=spaces))

    def read(wish: LatentWish, file: Path) -> Entry:
        return {**_tensors(file, {"latent": "latents"}), **({} if beside is None else beside(wish.ref))}

    return _take(writer, found, read, lambda wish: encode(wish.ref), _Check(compare, _CLOSE_LATENTS, _same_latents))


def import_text(
    writer: Writer, wishes: Sequence[TextWish], *, archs: Collection[str], encode: Callable[[str], Entry],
    compare: int = 4,
) -> ImportReport:  # fmt: skip
    """`archs` are what ai-toolkit's `model.arch` may have been; `encode` is what our own encoder makes of a caption.

    Where a compared entry differs, nothing is imported.
    """
    found: _Search[TextWish] = _Search()
    files = _Files("_t_e_cache")
    for wish in wishes:
        found.look(wish, files.of(wish.picture), partial(_text_flaw, wish=wish, archs=archs))

    def read(wish: TextWish, file: Path) -> Entry:
        return {name: tensor[0] for name, tensor in _tensors(file, _TEXT_NAMES).items()}

    return _take(writer, found, read, lambda wish: encode(wish.text), _Check(compare, _CLOSE_TEXT, _same_text))


# -- finding ----------------------------------------------------------------------------------------------------------

W = TypeVar("W", LatentWish, TextWish)


@dataclass
class _Search(Generic[W]):
    chosen: list[tuple[W, Path]] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    without_file: int = 0

    def look(self, wish: W, files: Sequence[Path], flaw: Callable[[Path], str | None]) -> None:
        """The first file without a flaw; where every one has some, all of them are refused."""
        refused = []
        for file in files:
            reason = flaw(file)
            if reason is None:
                self.chosen.append((wish, file))
                return
            refused.append(Refusal(file, reason))
        self.refused += refused
        self.without_file += not files


class _Files:
    """Which files a picture's cache may lie in. Each folder is listed once, however many pictures it has."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: dict[Path, dict[str, list[Path]]] = {}

    def of(self, picture: Path) -> list[Path]:
        there = picture.parent / self._folder
        if there not in self._known:
            self._known[there] = self._listed(there)
        return self._known[there].get(picture.stem, [])

    @staticmethod
    def _listed(there: Path) -> dict[str, list[Path]]:
        """By what the name says before the hash."""
        found: dict[str, list[Path]] = {}
        for path in sorted(there.iterdir()) if there.is_dir() else ():
            stem = path.stem[: -1 - _HASH_LENGTH]
            if path.suffix == ".safetensors" and path.stem[len(stem) : len(stem) + 1] == "_":
                found.setdefault(stem, []).append(path)
        return found


def _opened(file: Path) -> Weights | str:
    try:
        return open_weights(file)
    except WeightFileError as error:
        return f"it cannot be read: {error.problems[0].found}"


def _latent_flaw(file: Path, *, wish: LatentWish, spaces: Collection[str]) -> str | None:
    alone = _more_than_latents(wish.ref)
    if alone is not None:
        return f"{alone}; ai-toolkit's file holds the latents of a plain picture alone"
    weights = _opened(file)
    if isinstance(weights, str):
        return weights
    said = {name: _plain(value) for name, value in weights.metadata.items() if name not in _BESIDE}
    missing = sorted(_ALWAYS - said.keys())
    unknown = sorted(said.keys() - _ALWAYS - {"flip_x", "flip_y"})
    if missing:
        return f"its header does not say what it was made of: {', '.join(missing)} missing"
    if unknown:
        return f"its header names {', '.join(unknown)}, whose effect on the latents is not known here"
    space = said["latent_space_version"]
    if space not in spaces:
        return f"latent_space_version is {space!r}, and this configuration wants {' or '.join(map(repr, spaces))}"
    wanted = _expected(wish.ref, wish.picture.name)
    for name in sorted(wanted):
        if said.get(name, False) != wanted[name]:
            return f"{name} is {said.get(name, False)!r}, and this configuration wants {wanted[name]!r}"
    if [*weights.entries] != ["latent"]:
        return f"it holds {', '.join(sorted(weights.entries)) or 'nothing'} instead of `latent` alone"
    if wish.picture.stat().st_mtime > file.stat().st_mtime:
        return "the picture was changed after it was written"
    return None


def _more_than_latents(ref: SampleRef) -> str | None:
    if ref.fit is None or ref.clip is not None or ref.bucket.frames != 1:
        return "the sample is a clip or a sound"
    if ref.mask is not None:
        return "the sample has a mask"
    if ref.conditioning:
        return "the sample has references"
    if ref.augmentation.seed is not None and ref.augmentation.transforms:
        return "the sample is augmented"
    return None


def _expected(ref: SampleRef, name: str) -> dict[str, object]:
    """What ai-toolkit's header would say of this sample. It flips first and cuts then; we do it the other way round."""
    fit, bucket, flips = ref.fit, ref.bucket, ref.augmentation
    assert fit is not None  # _more_than_latents has seen to it
    width, height = fit.resized
    return {
        "filename": name,
        "scale_to_width": width,
        "scale_to_height": height,
        "crop_x": width - fit.left - bucket.width if flips.flip_x else fit.left,
        "crop_y": height - fit.top - bucket.height if flips.flip_y else fit.top,
        "crop_width": bucket.width,
        "crop_height": bucket.height,
        "latent_version": _VERSION,
        "flip_x": flips.flip_x,
        "flip_y": flips.flip_y,
    }


def _plain(value: str) -> object:
    """Text is stored as it is, everything else as JSON. A file called "12" keeps its name: names have extensions."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _text_flaw(file: Path, *, wish: TextWish, archs: Collection[str]) -> str | None:
    if wish.reads_pictures:
        return "the embedding depends on the sample's references, and the file does not tell their content"
    if not any(file.stem.endswith(f"_{text_hash(wish.text, arch)}") for arch in archs):
        named = " or ".join(map(repr, archs))
        return f"its name is not that of this caption for {named}: other text, a control image or another model"
    weights = _opened(file)
    if isinstance(weights, str):
        return weights
    unknown = sorted(weights.entries.keys() - _TEXT_NAMES.keys())
    if unknown:
        return f"it holds {', '.join(unknown)}, which have no place in our entries"
    if "text_embed" not in weights.entries:
        return "it holds no `text_embed`"
    shapes = {name: entry.shape for name, entry in weights.entries.items()}
    batched = next((name for name, shape in shapes.items() if len(shape) < 2 or shape[0] != 1), None)
    return None if batched is None else f"`{batched}` has the shape {shapes[batched]}, not that of one caption"


def text_hash(caption: str, arch: str) -> str:
    """The end of the name ai-toolkit gives an embedding that was made without control images."""
    said = {"caption": caption, "text_embedding_space_version": arch, "text_embedding_version": _VERSION}
    digest = hashlib.md5(json.dumps(said, sort_keys=True).encode(), usedforsecurity=False).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


# -- taking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Check(Generic[W]):
    count: int
    """So many are encoded anew, spread over all; at least one."""
    close: float
    same_kind: Callable[[W, Entry, W, Entry], bool]
    """Whether an entry may be what the encoder that made another, compared one makes of its own wish."""


def _take(
    writer: Writer,
    found: _Search[W],
    read: Callable[[W, Path], Entry],
    encode: Callable[[W], Entry],
    check: _Check[W],
) -> ImportReport:
    chosen = found.chosen
    if not chosen:
        return ImportReport(0, 0, tuple(found.refused), found.without_file)
    step = max(1, len(chosen) // max(1, check.count))
    compared = chosen[::step][: max(1, check.count)]
    for wish, file in compared:
        model = encode(wish)
        flaw = _unlike(read(wish, file), model, check.close)
        if flaw is not None:
            reason = f"{file.name} was encoded anew to compare: {flaw}"
            found.refused += [Refusal(other, reason) for _, other in chosen]
            return ImportReport(0, 0, tuple(found.refused), found.without_file)
    imported = 0
    for other, file in chosen:
        entry = read(other, file)
        if not check.same_kind(wish, model, other, entry):
            shapes = {name: tuple(tensor.shape) for name, tensor in entry.items()}
            found.refused.append(Refusal(file, f"its shapes {shapes} do not go with what was compared"))
            continue
        writer.add(other.origin, {name: tensor.to(model[name].dtype) for name, tensor in entry.items()}, NOTE)
        imported += 1
    return ImportReport(imported, len(compared), tuple(found.refused), found.without_file)


def _tensors(file: Path, names: Mapping[str, str]) -> Entry:
    from gracetune.storage.safetensors_files import read_tensors

    return {names[name]: tensor for name, tensor in read_tensors(file).items()}


def _unlike(found: Entry, model: Entry, close: float) -> str | None:
    if found.keys() != model.keys():
        return f"it gives {', '.join(sorted(found))}, our encoder {', '.join(sorted(model))}"
    for name, tensor in sorted(found.items()):
        if tensor.shape != model[name].shape:
            return f"{name} has the shape {tuple(tensor.shape)}, ours {tuple(model[name].shape)}"
        ours = model[name].double()
        error = float((tensor.double() - ours).norm() / ours.norm().clamp_min(1e-12))
        if not error <= close:  # also where it is not a number
            return f"{name} is off by {error:.2f} of its size, and {close:g} is what other software may differ by"
    return None


def _same_latents(wish: LatentWish, model: Entry, other: LatentWish, entry: Entry) -> bool:
    ours, theirs = model["latents"].shape, entry["latents"].shape
    was, now = wish.ref.bucket, other.ref.bucket
    sides = ours[-2] * now.height == theirs[-2] * was.height and ours[-1] * now.width == theirs[-1] * was.width
    return len(ours) == len(theirs) and ours[:-2] == theirs[:-2] and sides


def _same_text(wish: TextWish, model: Entry, other: TextWish, entry: Entry) -> bool:
    """Captions differ in length and in nothing else."""
    same_names = model.keys() == entry.keys()
    return same_names and model["prompt_embeds"].shape[-1] == entry["prompt_embeds"].shape[-1]

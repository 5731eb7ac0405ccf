"""Import of ai-toolkit caches: entries that can be identified are imported, all others are rejected with a reason.

ai-toolkit writes these files beside the images:

    _latent_cache/<stem>_<hash>.safetensors   one tensor `latent`, scaled as the model expects it; metadata: file name,
                                              scaled size, crop, flips, latent space, version
    _t_e_cache/<stem>_<hash>.safetensors      `text_embed`, `pooled_embed`, `attention_mask`, each with a batch
                                              dimension of 1; no metadata

The hash is the URL-safe base64 of the MD5 of a JSON object. For latents the object contains the values of the metadata;
for texts it contains the caption, the model's `arch` and a version, so the file name identifies the caption. Neither
identifies the content of the image or the weights of the encoder. Two checks cover that: an entry older than its image
is rejected, and before an import a few entries are encoded again and compared. Imported entries carry a note, and
audits count them.
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

from gracetune.cache.keys import EntryOrigin
from gracetune.cache.writer import Writer
from gracetune.data.refs import SampleRef
from gracetune.storage.safetensors_headers import WeightFileError, WeightFiles, open_weights

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

NOTE = "imported from ai-toolkit"
_HASH_LENGTH = 22
_VERSION = 1
"""The supported value of ai-toolkit's `latent_version` and `text_embedding_version`."""
_SIZES = ("scale_to_width", "scale_to_height", "crop_x", "crop_y", "crop_width", "crop_height")
_ALWAYS = frozenset(("filename", *_SIZES, "latent_space_version", "latent_version"))
"""Metadata of every latent file. `flip_x` and `flip_y` are present only if true."""
_IGNORED = frozenset(("software", "format"))
_TEXT_NAMES = {
    "text_embed": "prompt_embeds",
    "pooled_embed": "pooled_prompt_embeds",
    "attention_mask": "prompt_attention_mask",
}
_CLOSE_LATENTS = 0.25
"""Largest relative error of compared latents. ai-toolkit resizes images with another filter and samples from the VAE's
distribution, while gracetune may use its mean. The error for another image or another VAE is 1 or more."""
_CLOSE_TEXT = 0.05
"""Largest relative error of compared embeddings. They are deterministic; quantized or bf16 encoders differ slightly."""


@dataclass(frozen=True)
class LatentRequest:
    """A missing entry and its image file."""

    origin: EntryOrigin
    ref: SampleRef
    image: Path


@dataclass(frozen=True)
class TextRequest:
    """A missing embedding and an image that has this caption."""

    origin: EntryOrigin
    text: str
    image: Path
    """ai-toolkit stores one embedding file per image."""
    reads_images: bool = False


@dataclass(frozen=True)
class RejectedFile:
    """A file that was not imported, and why."""

    file: Path
    reason: str


@dataclass(frozen=True)
class ImportReport:
    """The result of an import."""

    imported: int
    compared: int
    """Number of imported entries that were also encoded again and compared."""
    rejected: tuple[RejectedFile, ...]
    without_file: int
    """Number of missing entries without a file of ai-toolkit."""


def import_latents(
    writer: Writer,
    requests: Sequence[LatentRequest],
    *,
    spaces: Collection[str],
    encode: Callable[[SampleRef], Entry],
    beside: Callable[[SampleRef], Entry] | None = None,
    compare: int = 4,
) -> ImportReport:
    """Import latents. If a compared entry differs, nothing is imported.

    `spaces`: ai-toolkit's names of the latent space (`latent_space_version`: "sdxl", "flux1", the `arch`, ...).
    `encode`: encodes a sample with gracetune's encoder. `beside`: makes the tensors of an entry that need no encoder
    (SDXL's `time_ids`).
    """
    found: _Search[LatentRequest] = _Search()
    files = _Files("_latent_cache")
    for request in requests:
        found.look(request, files.of(request.image), partial(_latent_flaw, request=request, spaces=spaces))

    def read(request: LatentRequest, file: Path) -> Entry:
        return {**_tensors(file, {"latent": "latents"}), **({} if beside is None else beside(request.ref))}

    return _take(
        writer, found, read, lambda request: encode(request.ref), _Check(compare, _CLOSE_LATENTS, _same_latents)
    )


def import_text(
    writer: Writer, requests: Sequence[TextRequest], *, archs: Collection[str], encode: Callable[[str], Entry],
    compare: int = 4,
) -> ImportReport:  # fmt: skip
    """Import text embeddings. If a compared entry differs, nothing is imported.

    `archs`: possible values of ai-toolkit's `model.arch`. `encode`: encodes a caption with gracetune's encoder.
    """
    found: _Search[TextRequest] = _Search()
    files = _Files("_t_e_cache")
    for request in requests:
        found.look(request, files.of(request.image), partial(_text_flaw, request=request, archs=archs))

    def read(request: TextRequest, file: Path) -> Entry:
        return {name: tensor[0] for name, tensor in _tensors(file, _TEXT_NAMES).items()}

    return _take(writer, found, read, lambda request: encode(request.text), _Check(compare, _CLOSE_TEXT, _same_text))


# -- finding ----------------------------------------------------------------------------------------------------------

W = TypeVar("W", LatentRequest, TextRequest)


@dataclass
class _Search(Generic[W]):
    chosen: list[tuple[W, Path]] = field(default_factory=list)
    rejected: list[RejectedFile] = field(default_factory=list)
    without_file: int = 0

    def look(self, request: W, files: Sequence[Path], flaw: Callable[[Path], str | None]) -> None:
        """Choose the first valid file for a missing entry. If none is valid, reject all of them."""
        rejected = []
        for file in files:
            reason = flaw(file)
            if reason is None:
                self.chosen.append((request, file))
                return
            rejected.append(RejectedFile(file, reason))
        self.rejected += rejected
        self.without_file += not files

    def nothing_imported(self) -> ImportReport:
        return ImportReport(imported=0, compared=0, rejected=tuple(self.rejected), without_file=self.without_file)


class _Files:
    """Finds the cache files of an image. Lists each folder only once."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._listings: dict[Path, dict[str, list[Path]]] = {}

    def of(self, image: Path) -> list[Path]:
        folder = image.parent / self._folder
        if folder not in self._listings:
            self._listings[folder] = self._list(folder)
        return self._listings[folder].get(image.stem, [])

    @staticmethod
    def _list(folder: Path) -> dict[str, list[Path]]:
        """Files by the part of their name before the hash, which is the stem of the image."""
        found: dict[str, list[Path]] = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            stem = path.stem[: -1 - _HASH_LENGTH]
            if path.suffix == ".safetensors" and path.stem[len(stem) : len(stem) + 1] == "_":
                found.setdefault(stem, []).append(path)
        return found


def _opened(file: Path) -> WeightFiles | str:
    try:
        return open_weights(file)
    except WeightFileError as error:
        return f"it cannot be read: {error.problems[0].found}"


def _latent_flaw(file: Path, *, request: LatentRequest, spaces: Collection[str]) -> str | None:
    """Why a latent file must not be imported; None if it may be, subject to the comparison."""
    special = _more_than_latents(request.ref)
    if special is not None:
        return f"{special}; ai-toolkit's file contains only the latents of a plain image"
    weights = _opened(file)
    if isinstance(weights, str):
        return weights
    metadata = {name: _parsed(value) for name, value in weights.metadata.items() if name not in _IGNORED}
    missing = sorted(_ALWAYS - metadata.keys())
    unknown = sorted(metadata.keys() - _ALWAYS - {"flip_x", "flip_y"})
    if missing:
        return f"its metadata lacks {', '.join(missing)}"
    if unknown:
        return f"its metadata contains {', '.join(unknown)}, whose effect on the latents is unknown"
    space = metadata["latent_space_version"]
    if space not in spaces:
        return f"latent_space_version is {space!r}, but this configuration needs {' or '.join(map(repr, spaces))}"
    expected = _expected(request.ref, request.image.name)
    for name in sorted(expected):
        if metadata.get(name, False) != expected[name]:
            return f"{name} is {metadata.get(name, False)!r}, but this configuration needs {expected[name]!r}"
    if [*weights.entries] != ["latent"]:
        return f"it contains {', '.join(sorted(weights.entries)) or 'nothing'} instead of `latent` only"
    if request.image.stat().st_mtime > file.stat().st_mtime:
        return "the image was modified after the file was written"
    return None


def _more_than_latents(ref: SampleRef) -> str | None:
    if ref.fit is None or ref.clip is not None or ref.bucket.frames != 1:
        return "the sample is a clip or audio"
    if ref.mask is not None:
        return "the sample has a mask"
    if ref.conditioning:
        return "the sample has references"
    if ref.augmentation.seed is not None and ref.augmentation.transforms:
        return "the sample is augmented"
    return None


def _expected(ref: SampleRef, name: str) -> dict[str, object]:
    """The metadata that ai-toolkit would write for this sample.

    ai-toolkit flips before it crops, gracetune after, so a flip mirrors the crop's position.
    """
    fit, bucket, flips = ref.fit, ref.bucket, ref.augmentation
    assert fit is not None  # _more_than_latents has checked it
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


def _parsed(value: str) -> object:
    """A metadata value: text is stored as it is, everything else as JSON. File names have extensions, so they never
    parse as JSON numbers."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _text_flaw(file: Path, *, request: TextRequest, archs: Collection[str]) -> str | None:
    """Why an embedding file must not be imported; None if it may be, subject to the comparison."""
    if request.reads_images:
        return "the embedding depends on the sample's references, and the file does not identify their content"
    if not any(file.stem.endswith(f"_{text_hash(request.text, arch)}") for arch in archs):
        known = " or ".join(map(repr, archs))
        return f"its name does not match this caption for {known}: other text, a control image or another model"
    weights = _opened(file)
    if isinstance(weights, str):
        return weights
    unknown = sorted(weights.entries.keys() - _TEXT_NAMES.keys())
    if unknown:
        return f"it contains {', '.join(unknown)}, which gracetune's entries do not have"
    if "text_embed" not in weights.entries:
        return "it contains no `text_embed`"
    shapes = {name: entry.shape for name, entry in weights.entries.items()}
    batched = next((name for name, shape in shapes.items() if len(shape) < 2 or shape[0] != 1), None)
    return None if batched is None else f"`{batched}` has the shape {shapes[batched]}, not [1, ...] for one caption"


def text_hash(caption: str, arch: str) -> str:
    """The hash in ai-toolkit's file name of an embedding that was made without control images."""
    inputs = {"caption": caption, "text_embedding_space_version": arch, "text_embedding_version": _VERSION}
    digest = hashlib.md5(json.dumps(inputs, sort_keys=True).encode(), usedforsecurity=False).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


# -- importing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Check(Generic[W]):
    """How to compare a few entries with those of our own encoder."""

    count: int
    """Number of entries to encode again, evenly spread; at least one."""
    close: float
    """Largest relative error."""
    same_kind: Callable[[W, Entry, W, Entry], bool]
    """Whether the shapes of a file are consistent with those of a compared entry."""


def _take(
    writer: Writer,
    found: _Search[W],
    read: Callable[[W, Path], Entry],
    encode: Callable[[W], Entry],
    check: _Check[W],
) -> ImportReport:
    chosen = found.chosen
    if not chosen:
        return found.nothing_imported()
    step = max(1, len(chosen) // max(1, check.count))
    compared = chosen[::step][: max(1, check.count)]
    for request, file in compared:
        reference = encode(request)
        flaw = _unlike(read(request, file), reference, check.close)
        if flaw is not None:
            reason = f"{file.name} was encoded again for comparison: {flaw}"
            found.rejected += [RejectedFile(other, reason) for _, other in chosen]
            return found.nothing_imported()
    imported = 0
    for other, file in chosen:
        entry = read(other, file)
        # `request` and `reference` are those of the last compared file.
        if not check.same_kind(request, reference, other, entry):
            shapes = {name: tuple(tensor.shape) for name, tensor in entry.items()}
            found.rejected.append(RejectedFile(file, f"its shapes {shapes} do not match those of the compared files"))
            continue
        writer.add(other.origin, {name: tensor.to(reference[name].dtype) for name, tensor in entry.items()}, NOTE)
        imported += 1
    return ImportReport(imported, len(compared), tuple(found.rejected), found.without_file)


def _tensors(file: Path, names: Mapping[str, str]) -> Entry:
    from gracetune.storage.safetensors_files import read_tensors

    return {names[name]: tensor for name, tensor in read_tensors(file).items()}


def _unlike(found: Entry, reference: Entry, close: float) -> str | None:
    """The first difference from our own encoder's entry; None if all relative errors are at most `close`."""
    if found.keys() != reference.keys():
        return f"it contains {', '.join(sorted(found))}, our encoder makes {', '.join(sorted(reference))}"
    for name, tensor in sorted(found.items()):
        if tensor.shape != reference[name].shape:
            return f"{name} has the shape {tuple(tensor.shape)}, ours has {tuple(reference[name].shape)}"
        ours = reference[name].double()
        error = float((tensor.double() - ours).norm() / ours.norm().clamp_min(1e-12))
        if not error <= close:  # written this way because NaN must fail
            return f"{name} has a relative error of {error:.2f}; at most {close:g} is allowed"
    return None


def _same_latents(request: LatentRequest, reference: Entry, other: LatentRequest, entry: Entry) -> bool:
    """Whether latents [..., H, W] have the same channels and the same ratio of latent to pixel size."""
    ours, theirs = reference["latents"].shape, entry["latents"].shape
    pixels, other_pixels = request.ref.bucket, other.ref.bucket
    same_height = ours[-2] * other_pixels.height == theirs[-2] * pixels.height
    same_width = ours[-1] * other_pixels.width == theirs[-1] * pixels.width
    return len(ours) == len(theirs) and ours[:-2] == theirs[:-2] and same_height and same_width


def _same_text(request: TextRequest, reference: Entry, other: TextRequest, entry: Entry) -> bool:
    """Whether embeddings [T, D] have the same width; captions differ in length."""
    same_names = reference.keys() == entry.keys()
    return same_names and reference["prompt_embeds"].shape[-1] == entry["prompt_embeds"].shape[-1]

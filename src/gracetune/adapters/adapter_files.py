"""Opens an adapter file of any known format as `AdapterState`s, and saves one.

Opening detects the family, expert, algorithm and format, then reads every key. A key that is not understood is a
problem of the file; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gracetune.adapters import metadata
from gracetune.adapters import safetensors_file as files
from gracetune.adapters.errors import (
    BrokenLayerError,
    CannotHoldError,
    MixedExpertsError,
    UnclearFamilyError,
)
from gracetune.adapters.formats.detection import Detected, detect
from gracetune.adapters.formats.names import is_of_text_encoder, split_key
from gracetune.adapters.formats.programs import reasons_by_program
from gracetune.adapters.formats.reading import AdapterContents, dtype_of
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.config.registry import PROGRAMS, FormatName, Program
from gracetune.errors import ConfigError, Problem, short

_OTHER_HASH = (
    "the header's sshs_model_hash is not the hash of the tensors in this file: it was changed after it was written, or "
    "the program that wrote it computes the hash by another rule"
)
_EXPERT_ORDER: tuple[ExpertStage, ...] = ("", "high_noise", "low_noise")


@dataclass(frozen=True, eq=False)
class OpenedAdapter:
    file: files.AdapterFile
    detected: Detected
    reading: AdapterContents
    left_out: tuple[str, ...] = ()
    """Layers of text encoders that were removed at the caller's request."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Observations that do not prevent the file from being used."""
        if self.file.hash_matches is False and not self.reading.altered:
            return (_OTHER_HASH,)
        return ()

    def reject_altered(self) -> None:
        if self.reading.altered:
            raise self.reading.errors(str(self.file.path))[0]

    def programs(self) -> dict[Program, str | None]:
        """For every program: None if it loads this file as it was trained, otherwise the reason.

        Empty if this is unknown: the file has an error, or its keys differ from those gracetune writes.
        """
        if self.reading.errors() or not self.reading.states:
            return {}
        if len(self.reading.states) > 1:
            return dict.fromkeys(PROGRAMS, "the file holds two experts: gracetune adapter convert --split")
        (state,) = self.reading.states.values()
        name = self.detected.format
        if name == "other" or not self._is_spelled_as(state, name):
            return {}
        return reasons_by_program(state, name)

    def _is_spelled_as(self, state: AdapterState, format: FormatName) -> bool:
        """Whether the file has exactly the keys that gracetune writes in this format."""
        record = FORMATS[format]
        try:
            written, _ = record.write(state, dtype_of(self.file.tensors))
        except CannotHoldError:
            return False
        found, ours = ({*keys} for keys in (self.file.tensors, written))
        if record.alpha_is_optional:
            found, ours = ({key for key in keys if not key.endswith(".alpha")} for keys in (found, ours))
        return found == ours

    def states(self) -> list[AdapterState]:
        """Every adapter in the file, the high-noise one first. Raises if anything in the file is wrong."""
        self.reading.checked(str(self.file.path))
        if not self.reading.states:
            hint = "check that it is the file of an adapter"
            problem = Problem("layers", "none", "at least one layer", hint, str(self.file.path))
            raise BrokenLayerError([problem])
        return sorted(self.reading.states.values(), key=lambda state: _EXPERT_ORDER.index(state.expert))

    def state(self) -> AdapterState:
        """The only adapter in the file. Raises `MixedExpertsError` if the file holds both experts."""
        found = self.states()
        if len(found) > 1:
            names = " and ".join(state.expert for state in found)
            hint = "gracetune adapter convert --split makes two files of it"
            problem = Problem("stages", f"layers of {names} in one file", "one expert", hint, str(self.file.path))
            raise MixedExpertsError([problem])
        return found[0]


def open_adapter(
    path: Path,
    family: str | None = None,
    *,
    without_text_encoders: bool = False,
    alpha: float | None = None,
    ignore_hash: bool = False,
) -> OpenedAdapter:
    """Read a file in any of the known formats. `family` is needed only if the keys fit two families.

    `alpha` applies to every layer of a file that has no scale of its own. `ignore_hash` does not check the
    header's hash, so that a gracetune file whose tensors were changed after it was written is accepted.
    """
    file = files.read(path, check_hash=not ignore_hash)
    left_out: tuple[str, ...] = ()
    if without_text_encoders:
        file, left_out = _without_text_encoders(file)
    try:
        detected = detect(file.tensors, file.metadata, name=file.path.stem, family=family)
    except UnclearFamilyError as error:
        raise UnclearFamilyError([replace(problem, file=str(path)) for problem in error.problems]) from None
    format = FORMATS["comfyui" if detected.format == "other" else detected.format]
    reading = format.read(file.tensors, file.metadata, detected.family)
    if alpha is not None:
        file = _with_alpha(file, reading, alpha)
        reading = format.read(file.tensors, file.metadata, detected.family)
    states = _with_experts(reading.states, detected, file)
    altered = file.is_ours and file.hash_matches is False
    reading = replace(reading, states=states, contradictions=detected.contradictions, altered=altered)
    return OpenedAdapter(file, detected, reading, left_out)


def _with_alpha(file: files.AdapterFile, reading: AdapterContents, alpha: float) -> files.AdapterFile:
    """The file with this alpha added to every layer. Raises `ConfigError` if the file has a scale of its own."""
    own = [key for key in file.tensors if (parts := split_key(key)) is not None and parts.tensor == "alpha"]
    if own or not reading.without_scale:
        found = f"alphas in the file: {short(own[0])}" if own else "a file that defines its scale"
        expected = "a file without a scale"
        raise ConfigError([Problem("--alpha", found, expected, "leave --alpha out", str(file.path))])
    given = {f"{stem}.alpha": torch.tensor(alpha, dtype=torch.float32) for stem in reading.without_scale}
    return replace(file, tensors={**file.tensors, **given})


def _without_text_encoders(file: files.AdapterFile) -> tuple[files.AdapterFile, tuple[str, ...]]:
    """The file without its text-encoder layers, and the names of those layers."""
    kept = {key: tensor for key, tensor in file.tensors.items() if not is_of_text_encoder(key)}
    if file.tensors and not kept:
        hint = "give another file: there is nothing in this one to train on or to convert"
        problem = Problem("layers", "of text encoders only", "layers of a denoiser", hint, str(file.path))
        raise BrokenLayerError([problem])
    gone = (key for key in file.tensors if key not in kept)
    stems = {parts.stem if (parts := split_key(key)) is not None else key for key in gone}
    return replace(file, tensors=kept), tuple(sorted(stems))


def _with_experts(
    states: Mapping[ExpertStage, AdapterState], detected: Detected, file: files.AdapterFile
) -> dict[ExpertStage, AdapterState]:
    """Assign the expert from the header or the file name to states whose keys name none."""
    if "" not in states:
        return dict(states)
    if len(states) == 1:
        expert = detected.experts[0]
    elif set(states) == {"", "low_noise"}:
        expert = "high_noise"  # diffusers' pair: `transformer`, which has no expert mark, and `transformer_2`
    else:
        problem = Problem(
            "stages",
            f"layers of {', '.join(expert for expert in states if expert)} beside layers of no expert",
            "every key with its expert, or none",
            "give each expert a file of its own where it was made",
            str(file.path),
        )
        raise MixedExpertsError([problem])
    return {new: replace(state, expert=new) for old, state in states.items() for new in [old or expert]}


def save(
    path: Path,
    state: AdapterState,
    format: FormatName,
    dtype: torch.dtype,
    about: metadata.About | None = None,
) -> Path:
    """Write one adapter. The same state, format, precision and `about` give the same bytes."""
    tensors, of_format = FORMATS[format].write(state, dtype)
    return files.write(path, tensors, metadata.header(state, tensors, of_format, about))

"""What is wrong with an adapter's file, or with what was asked to be written into one."""

from __future__ import annotations

from gracetune.errors import ConfigError


class AdapterFileError(ConfigError):
    """An adapter's file cannot be used as it is."""


class UnreadableAdapterError(AdapterFileError):
    """No whole safetensors file: truncated, a pickle, a folder, missing."""


class AlteredFileError(AdapterFileError):
    """The data of one of our own files is not what its header says."""


class UnknownKeysError(AdapterFileError):
    """Keys that name no layer of the family, or no tensor of an adapter."""


class UnclearFamilyError(AdapterFileError):
    """The keys fit no family, or more than one."""


class MixedExpertsError(AdapterFileError):
    """One file holds adapters of both noise experts."""


class BrokenLayerError(AdapterFileError):
    """A layer's tensors do not belong together: one is missing, ranks or shapes differ, no scale is defined."""


class NotFiniteError(AdapterFileError):
    """NaN or infinity among the weights."""


class CannotHoldError(AdapterFileError):
    """The file format has no place for such an adapter."""

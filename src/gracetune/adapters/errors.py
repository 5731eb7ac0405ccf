"""Errors of reading and writing adapter files."""

from __future__ import annotations

from gracetune.errors import ConfigError


class AdapterFileError(ConfigError):
    """An adapter's file cannot be used as it is."""


class UnreadableAdapterError(AdapterFileError):
    """The path is not a complete safetensors file: it is truncated, a pickle, a folder, or missing."""


class AlteredFileError(AdapterFileError):
    """The tensors of a file written by gracetune do not match the hash in its header."""


class UnknownKeysError(AdapterFileError):
    """The file has keys that name no layer of the family, or no tensor of an adapter."""


class UnclearFamilyError(AdapterFileError):
    """The keys fit no family, or more than one."""


class MixedExpertsError(AdapterFileError):
    """One file holds adapters of both noise experts."""


class BrokenLayerError(AdapterFileError):
    """A layer's tensors do not belong together: one is missing, ranks or shapes differ, no scale is defined."""


class NotFiniteError(AdapterFileError):
    """The weights contain NaN or infinity."""


class CannotHoldError(AdapterFileError):
    """The file format cannot represent the adapter."""

"""The export formats by name. Each is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gracetune.adapters.formats.record import Format
from gracetune.config.export_formats import EXPORT_FORMATS, FORMAT_NAMES


class _Formats(Mapping[str, Format]):
    def __getitem__(self, name: str) -> Format:
        return EXPORT_FORMATS.load_as(name, Format)

    def __iter__(self) -> Iterator[str]:
        return iter(FORMAT_NAMES)

    def __len__(self) -> int:
        return len(FORMAT_NAMES)


FORMATS: Final[Mapping[str, Format]] = _Formats()

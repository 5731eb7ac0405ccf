"""Contact sheets: samples of one bucket as the model sees them (scaled, cropped, flipped, masked) with their captions.

A video is shown by the first frame of its clip, audio by its waveform, an edit pair by the target and its references.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gracetune.data.backend import LeftOut
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex
from gracetune.data.media.audio import Sound, decode_audio
from gracetune.data.media.augment import augmented, augmented_mask
from gracetune.data.media.image import decode_image
from gracetune.data.media.load import decode_mask, mask_weights
from gracetune.data.media.video import decode_video
from gracetune.data.refs import Bucket, Clip, Fit, SampleRef

HEIGHT = 192
"""Maximum height of a thumbnail, in pixels."""
LARGEST = 2048
"""Longer images are scaled down to this side before a thumbnail is made."""
WIDEST = 400
"""Maximum width of a thumbnail."""
SHEET_WIDTH = 1300
_GAP, _MARGIN, _HEADER, _NARROWEST = 20, 24, 84, 640
_CAPTION_LINES = 3
_PAPER, _INK, _FAINT, _LINE, _WAVE, _BAD = "#fbfbf9", "#1d1d1b", "#6f6f6a", "#d9d9d4", "#2f6f8f", "#b3261e"
_STRIP = (360, 120)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class SheetCell:
    """One sample: its images side by side, and the text below them."""

    images: tuple[Image.Image, ...]
    name: str
    caption: str

    @property
    def width(self) -> int:
        return sum(image.width for image in self.images) + 4 * (len(self.images) - 1)


@dataclass(frozen=True)
class Sheet:
    image: Image.Image
    damaged: tuple[LeftOut, ...]
    """Files that could not be decoded."""


def contact_sheet(index: DataIndex, refs: Sequence[SampleRef], title: str, subtitle: str) -> Sheet:
    cells: list[SheetCell] = []
    damaged: list[LeftOut] = []
    for ref in refs:
        try:
            images = thumbnails(index, ref)
        except UnreadableMediaError as error:
            damaged.append(LeftOut(error.path, error.reason))
            images = (_placard(error.reason),)
        cells.append(SheetCell(images, ref.path, _caption(ref)))
    return Sheet(_draw(cells, title, subtitle), tuple(damaged))


def _caption(ref: SampleRef) -> str:
    if ref.caption.dropped:
        return "(caption dropped)"
    return ref.caption.text or "(no caption)"


def thumbnails(index: DataIndex, ref: SampleRef) -> tuple[Image.Image, ...]:
    """The sample, then its references."""
    if ref.fit is None:
        return (_waveform(index, ref),)
    fit, bucket = reduced(ref.fit, ref.bucket)
    image = _image(index, replace(ref, bucket=bucket), fit)
    if ref.mask is not None:
        mask = decode_mask(index.backend_of(ref.mask.dataset).read(ref.mask.path), ref.mask, fit, bucket)
        image = _masked(image, mask_weights(augmented_mask(mask, ref.augmentation, ref.digest), ref.mask))
    others = (thumbnails(index, other)[0] for other in ref.conditioning)
    return _small(image), *others


def reduced(fit: Fit, bucket: Bucket) -> tuple[Fit, Bucket]:
    """The same view scaled down to at most LARGEST pixels. Decoding a large image would take seconds per thumbnail."""
    scale = min(1.0, LARGEST / max(bucket.width, bucket.height))
    left, top = int(fit.left * scale), int(fit.top * scale)
    width, height = max(1, int(bucket.width * scale)), max(1, int(bucket.height * scale))
    scaled = math.ceil(fit.resized[0] * scale), math.ceil(fit.resized[1] * scale)
    return Fit(fit.original, scaled, left, top), replace(bucket, width=width, height=height)


def _image(index: DataIndex, ref: SampleRef, fit: Fit) -> Image.Image:
    backend = index.backend_of(ref.dataset)
    if ref.clip is None:
        own_colours = ref.mask is not None and ref.mask.from_alpha
        data = backend.read(ref.path)
        images = [decode_image(data, ref.path, fit, ref.bucket, own_colours=own_colours, canny=ref.canny)]
    else:
        with backend.open(ref.path) as stream:
            images = decode_video(stream, ref.path, _first(ref.clip, ref.bucket.frames), fit,
                                    replace(ref.bucket, frames=1))  # fmt: skip
    return augmented(images, ref.augmentation, ref.digest)[0]


def _first(clip: Clip, frames: int) -> Clip:
    """A clip of the single frame shown when this clip begins."""
    numbers = None if clip.numbers is None else clip.numbers[:1]
    fps = None if clip.spread else frames / clip.duration
    return replace(clip, duration=clip.duration / frames, fps=fps, numbers=numbers)


def _masked(image: Image.Image, share: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> Image.Image:
    """The image with areas of less loss weight darkened, down to a fifth of their brightness."""
    light = Image.fromarray(np.asarray(255 * (0.2 + 0.8 * share), np.uint8))
    return Image.composite(image, Image.new("RGB", image.size), light)


def _small(image: Image.Image) -> Image.Image:
    scale = min(HEIGHT / image.height, WIDEST / image.width)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def _waveform(index: DataIndex, ref: SampleRef) -> Image.Image:
    if ref.clip is None:
        raise UnreadableMediaError(ref.path, "audio without a clip")
    with index.backend_of(ref.dataset).open(ref.path) as stream:
        sound = decode_audio(stream, ref.path, ref.clip, ref.bucket)
    return draw_waveform(sound)


def draw_waveform(sound: Sound) -> Image.Image:
    """Draw the minimum and maximum of the samples in each pixel column, one band per channel."""
    width, height = _STRIP
    strip = Image.new("RGB", _STRIP, "white")
    pen = ImageDraw.Draw(strip)
    band = height / sound.shape[0]
    edges = np.linspace(0, sound.shape[1], width + 1).astype(int)
    for number, channel in enumerate(sound):
        middle, reach = band * (number + 0.5), band * 0.46
        pen.line((0, middle, width, middle), fill=_LINE)
        for column in range(width):
            samples = channel[edges[column] : max(edges[column] + 1, edges[column + 1])]
            top, bottom = middle - reach * float(samples.max()), middle - reach * float(samples.min())
            pen.line((column, top, column, bottom), fill=_WAVE)
    return strip


def _placard(reason: str) -> Image.Image:
    """A placeholder for an image that cannot be read."""
    placard = Image.new("RGB", (300, HEIGHT), "white")
    pen = ImageDraw.Draw(placard)
    pen.rectangle((0, 0, placard.width - 1, placard.height - 1), outline=_BAD, width=2)
    for number, line in enumerate(wrapped(f"cannot be read: {reason}", _font(14), placard.width - 24, 8)):
        pen.text((12, 12 + 18 * number), line, fill=_BAD, font=_font(14))
    return placard


def _draw(cells: Sequence[SheetCell], title: str, subtitle: str) -> Image.Image:
    column = max([cell.width for cell in cells], default=WIDEST)
    columns = max(1, min(len(cells), (SHEET_WIDTH - 2 * _MARGIN + _GAP) // (column + _GAP)))
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [_row_height(row, column) for row in rows]
    width = max(2 * _MARGIN + columns * (column + _GAP) - _GAP, _NARROWEST)
    sheet = Image.new("RGB", (width, _HEADER + sum(heights) + _MARGIN - _GAP), _PAPER)
    pen = ImageDraw.Draw(sheet)
    room = width - 2 * _MARGIN
    pen.text((_MARGIN, 18), wrapped(title, _font(24), room, 1)[0], fill=_INK, font=_font(24))
    pen.text((_MARGIN, 50), wrapped(subtitle, _font(13), room, 1)[0], fill=_FAINT, font=_font(13))
    top = _HEADER
    for row, height in zip(rows, heights, strict=True):
        for number, cell in enumerate(row):
            position = _MARGIN + number * (column + _GAP), top
            _draw_cell(sheet, pen, cell, position, (column, _tallest(row)))
        top += height
    return sheet


def _row_height(row: Sequence[SheetCell], column: int) -> int:
    lines = max(len(wrapped(cell.caption, _font(12), column, _CAPTION_LINES)) for cell in row)
    return _tallest(row) + 10 + 18 * (1 + lines) + _GAP


def _tallest(row: Sequence[SheetCell]) -> int:
    return max(image.height for cell in row for image in cell.images)


def _draw_cell(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, cell: SheetCell, position: tuple[int, int], room: tuple[int, int]
) -> None:
    left, top = position
    for image in cell.images:
        sheet.paste(image, (left, top + room[1] - image.height))
        left += image.width + 4
    text = top + room[1] + 10
    name = wrapped(cell.name, _font(13), room[0], 1)[0]
    pen.text((position[0], text), name, fill=_INK, font=_font(13))
    for number, line in enumerate(wrapped(cell.caption, _font(12), room[0], _CAPTION_LINES), start=1):
        pen.text((position[0], text + 18 * number), line, fill=_FAINT, font=_font(12))


def _font(size: int) -> Font:
    return ImageFont.load_default(size=size)


def wrapped(text: str, font: Font, width: float, most: int) -> list[str]:
    """Wrap text to at least one and at most `most` lines. Words too long for a line and surplus text are cut."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        elif len(lines) == most:
            lines[-1] = _cut(longer, font, width)
            break
        else:
            lines += [word] if lines[-1] else []
            lines[-1] = _cut(word, font, width)
    return lines


def _cut(text: str, font: Font, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"

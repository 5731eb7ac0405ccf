"""Video: the frames selected, their orientation and colors. Every test frame shows its number."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.probe import probe_video
from gracetune.data.media.video import decode_video
from gracetune.data.refs import Bucket, Clip, Fit
from unit.data.media.generated import CountingStream, DictBackend, every, number_of, numbered, video_bytes, whole

SIZE = (64, 48)
KINDS = {
    "mp4": ("mp4", "libx264"),
    "mov": ("mov", "mpeg4"),
    "mkv": ("matroska", "libx264"),
    "webm": ("webm", "libvpx-vp9"),
    "vp8": ("webm", "libvpx"),
    "ts": ("mpegts", "libx264"),
    "avi": ("avi", "mpeg4"),
    "wmv": ("asf", "wmv2"),
}


def frames(data: bytes, clip: Clip, count: int, size: tuple[int, int] = SIZE, **options: Any) -> list[Image.Image]:
    return decode_video(io.BytesIO(data), "a.mp4", clip, *whole(*size, count), **options)


def numbers(data: bytes, clip: Clip, count: int) -> list[int]:
    return [number_of(np.asarray(frame)) for frame in frames(data, clip, count)]


def video(kind: str, times: list[float], **options: Any) -> bytes:
    container, codec = KINDS[kind]
    return video_bytes(times, container=container, codec=codec, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_as_they_are(kind: str) -> None:
    data = video(kind, every(0.04, 30))
    assert numbers(data, Clip(0, 0.36), 9) == list(range(9))
    assert numbers(data, Clip(0.8, 0.36), 9) == list(range(20, 29))


@pytest.mark.parametrize("kind", KINDS)
def test_facts(kind: str) -> None:
    facts = probe_video(DictBackend({"a": video(kind, every(0.04, 30))}), "a")
    assert (facts.width, facts.height, facts.frames) == (64, 48, 30)
    assert facts.duration == pytest.approx(1.2, abs=0.041)
    assert facts.fps == pytest.approx(25, rel=0.04)


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_a_lower_rate_skips_frames_and_a_higher_one_shows_them_longer(kind: str) -> None:
    thirty = video(kind, every(1 / 30, 40))
    assert numbers(thirty, Clip(0, 1.2, fps=15), 13) == list(range(0, 26, 2))
    assert numbers(thirty, Clip(0.5, 0.5, fps=10), 5) == [15, 18, 21, 24, 27]
    assert numbers(thirty, Clip(0, 0.3, fps=30), 9) == list(range(9))
    assert numbers(thirty, Clip(0, 0.2, fps=60), 9) == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_a_variable_rate_is_followed_by_its_timestamps(kind: str) -> None:
    times = [0.0, 0.1, 0.2, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.9]
    data = video(kind, times)
    at_ten = [max(index for index, time in enumerate(times) if time <= tick / 10 + 0.001) for tick in range(13)]
    assert numbers(data, Clip(0, 1.3, fps=10), 13) == at_ten == [0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 4, 6, 8]
    facts = probe_video(DictBackend({"a": data}), "a")
    assert facts.frames == 10
    assert facts.duration == pytest.approx(1.9, abs=0.1)


def test_a_sparse_variable_rate_takes_the_last_frames() -> None:
    times = [*every(0.04, 20), 1.5, 2.5, 3.5]
    data = video("mp4", times)
    assert numbers(data, Clip(1.0, 0.36), 9) == list(range(14, 23))
    assert numbers(data, Clip(0.2, 0.36), 9) == list(range(5, 14))


def test_frames_are_spread_over_the_whole_clip() -> None:
    data = video("mp4", every(0.04, 50))
    assert numbers(data, Clip(0, 2.0, spread=True), 5) == [5, 15, 25, 35, 45]
    assert numbers(data, Clip(0, 2.0, spread=True), 50) == list(range(50))
    assert numbers(data, Clip(1.0, 1.0, spread=True), 5) == [27, 32, 37, 42, 47]


def test_a_long_video_is_spread_by_seeking() -> None:
    data = video("mp4", every(0.5, 200), keyframe_every=4)
    assert numbers(data, Clip(0, 100.0, spread=True), 5) == [20, 60, 100, 140, 180]


def test_a_long_hold_between_two_frames() -> None:
    data = video("mp4", [0.0, 0.1, 30.0, 30.1])
    assert numbers(data, Clip(0, 30.2, spread=True), 5) == [1, 1, 1, 1, 1]
    assert numbers(data, Clip(25.0, 6.0, fps=1), 6) == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0.0, 0.44, 0.46, 0.5, 1.0, 1.56])
def test_seeking_finds_the_same_frames_as_decoding_everything(kind: str, start: float) -> None:
    data = video(kind, every(0.04, 50))
    everything = numbers(data, Clip(0, 2.0), 50)
    first = int((start + 0.001) / 0.04)
    assert numbers(data, Clip(start, 0.36, fps=25), 9) == everything[first : first + 9]
    assert numbers(data, Clip(start, 0.36), 9) == everything[first : first + 9]


@pytest.mark.parametrize(("kind", "begin"), [("mp4", 0), ("mkv", 0), ("mkv", 500), ("webm", 0)])
def test_a_late_clip_does_not_read_what_comes_before(kind: str, begin: int) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (100, 48, 64, 3), np.uint8)
    container, codec = KINDS[kind]
    times = [begin + time for time in every(0.04, 100)]
    data = video_bytes(times, container=container, codec=codec, frames=noise, keyframe_every=10)
    stream = CountingStream(data)
    decode_video(stream, "a", Clip(3.6, 0.2), *whole(*SIZE, 5))
    assert stream.bytes_read < len(data) / 2


@pytest.mark.parametrize("kind", ["mkv", "webm", "ts"])
def test_frames_are_counted_if_the_header_does_not(kind: str) -> None:
    data = video(kind, every(0.04, 33))
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].frames == 0, "this container counts: choose another"
    assert probe_video(DictBackend({"a": data}), "a").frames == 33


def test_a_wrong_count_in_the_header_is_ignored() -> None:
    data = video("avi", every(0.04, 30))
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].frames != 30, "this container counts right: choose another"
    assert probe_video(DictBackend({"a": data}), "a").frames == 30


@pytest.mark.parametrize(
    ("clip", "count"),
    [(Clip(0, 2.0), 50), (Clip(0.5, 2.0, fps=10), 21), (Clip(0, 3.0, spread=True), 9), (Clip(5.0, 1.0, fps=10), 9)],
)
def test_a_video_shorter_than_the_clip_is_named(clip: Clip, count: int) -> None:
    data = video("mp4", every(0.04, 30))
    with pytest.raises(UnreadableMediaError, match=r"^a\.mp4: ends after 1\.\d\d s, but the clip needs .*frames from "):
        frames(data, clip, count)


@pytest.mark.parametrize(
    ("rotation", "mirrored", "turn"),
    [
        (0, False, None),
        (90, False, Image.Transpose.ROTATE_90),
        (180, False, Image.Transpose.ROTATE_180),
        (270, False, Image.Transpose.ROTATE_270),
        (0, True, Image.Transpose.FLIP_LEFT_RIGHT),
        (180, True, Image.Transpose.FLIP_TOP_BOTTOM),
    ],
)
@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_rotation_metadata(kind: str, rotation: float, mirrored: bool, turn: Image.Transpose | None) -> None:
    stored = numbered(0b01100001, *SIZE).copy()
    stored[:24] //= 2
    data = video(kind, every(0.04, 3), frames=[stored] * 3, rotation=rotation, mirrored=mirrored)
    expected = Image.fromarray(stored) if turn is None else Image.fromarray(stored).transpose(turn)
    facts = probe_video(DictBackend({"a": data}), "a")
    assert (facts.width, facts.height) == expected.size
    found = frames(data, Clip(0, 0.1), 1, expected.size)[0]
    assert np.abs(np.asarray(found).astype(int) - np.asarray(expected)).mean() < 12


def test_a_phones_portrait_matrix_turns_clockwise() -> None:
    """The matrix that phones write, patched into the file: the right side of the stored frame is displayed below."""
    stored = np.zeros((48, 64, 3), np.uint8)
    stored[:, 48:] = 255
    data = bytearray(video("mp4", every(0.04, 3), frames=[stored] * 3))
    matrix = data.index(b"tkhd") + 4 + 40
    clockwise = [0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30]
    data[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in clockwise)
    shown = np.asarray(frames(bytes(data), Clip(0, 0.1), 1, (48, 64))[0])
    assert shown[56:].mean() > 240
    assert shown[:40].mean() < 15


def test_frames_removed_by_an_edit_list_are_not_shown() -> None:
    """Phones trim a video with an edit list; the frames before its start are in the file but not shown."""
    data = bytearray(video("mp4", every(0.04, 30)))
    begin = data.index(b"elst") + 4 + 4 + 4 + 4
    ticks = int.from_bytes(data[begin : begin + 4], "big")
    data[begin : begin + 4] = (ticks + 5 * 640).to_bytes(4, "big")  # 640 ticks of 1/16000 s are a frame
    assert numbers(bytes(data), Clip(0, 0.36), 9) == list(range(5, 14))
    assert numbers(bytes(data), Clip(0.4, 0.36, fps=25), 9) == list(range(15, 24))
    facts = probe_video(DictBackend({"a": bytes(data)}), "a")
    assert facts.frames == 25
    assert facts.duration == pytest.approx(1.0, abs=0.041)


def test_pixels_that_are_not_square_are_made_square() -> None:
    data = video("mp4", every(0.04, 3), pixel_shape=Fraction(4, 3))
    facts = probe_video(DictBackend({"a": data}), "a")
    assert (facts.width, facts.height) == (85, 48)
    assert [number_of(np.asarray(frame)) for frame in frames(data, Clip(0, 0.12), 3, (85, 48))] == [0, 1, 2]


def coloured(size: tuple[int, int], colorspace: int | None, transfer: int | None = None, full: bool = False) -> bytes:
    buffer = io.BytesIO()
    hdr = transfer in (16, 18)
    pixels = "yuv420p10le" if hdr else "yuv420p"
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=25, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        context = stream.codec_context
        if colorspace is not None:
            context.colorspace = colorspace
        context.color_range = 2 if full else 1
        if transfer is not None:
            context.color_trc, context.color_primaries = transfer, 9
        flat = np.full((size[1], size[0], 3), COLOUR if transfer is None else 128, np.uint8)
        # A stream without a word about its colours is written with BT.709, which is what such files hold.
        frame = av.VideoFrame.from_ndarray(flat, format="rgb24").reformat(
            format=pixels, dst_colorspace=colorspace or 1, dst_color_range=2 if full else 1
        )
        if colorspace is None:
            frame.colorspace = 2
        if transfer is not None:
            frame.color_trc, frame.color_primaries = transfer, 9
        frame.pts = 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


COLOUR = (200, 30, 60)


@pytest.mark.parametrize(
    ("size", "colorspace", "full"),
    [((64, 48), 1, False), ((64, 48), 5, False), ((64, 48), 5, True), ((1280, 64), None, False)],
    ids=["bt709", "bt601", "bt601 full range", "silent and wide: bt709"],
)
def test_colours_are_right(size: tuple[int, int], colorspace: int | None, full: bool) -> None:
    found = np.asarray(frames(coloured(size, colorspace, full=full), Clip(0, 0.04), 1, size)[0])
    assert np.abs(found.astype(int) - COLOUR).max() <= 4


@pytest.mark.parametrize(
    ("transfer", "low", "high"), [(16, 175, 195), pytest.param(18, 135, 155, marks=pytest.mark.full)], ids=["PQ", "HLG"]
)
def test_hdr_is_converted_to_sdr(transfer: int, low: int, high: int) -> None:
    """Half of PQ's range is 92 nits, 0.46 of the reference white of 203: level 186 in BT.709. HLG's half is its own."""
    found = np.asarray(frames(coloured((64, 48), 9, transfer), Clip(0, 0.04), 1)[0])
    assert low <= found.mean() <= high


def test_scaled_and_cut_like_a_image() -> None:
    data = video("mp4", every(0.04, 3))
    fit = Fit(SIZE, (128, 96), 32, 24)
    cut = decode_video(io.BytesIO(data), "a", Clip(0, 0.12), fit, Bucket(64, 48, 3))
    for full, part in zip(frames(data, Clip(0, 0.12), 3), cut, strict=True):
        scaled = np.asarray(full.resize((128, 96), Image.Resampling.LANCZOS))
        assert np.array_equal(np.asarray(part), scaled[24:72, 32:96])


def test_bad_files_are_named() -> None:
    data = video("mp4", every(0.04, 30))
    backend = DictBackend({
        "empty.mp4": b"",
        "text.mp4": b"a caption in the wrong place" * 10,
        "no index.mp4": data[: len(data) // 2],
        "sound.mp4": sound_only(),
    })  # fmt: skip
    reasons = {"empty.mp4": "empty", "text.mp4": "cannot be decoded", "no index.mp4": "truncated|cannot be decoded",
               "sound.mp4": "contains no video"}  # fmt: skip
    for path, reason in reasons.items():
        with pytest.raises(UnreadableMediaError, match=f"^{path}: .*({reason})"):
            probe_video(backend, path)
        with pytest.raises(UnreadableMediaError, match=f"^{path}: .*({reason})"):
            decode_video(backend.open(path), path, Clip(0, 0.2), *whole(*SIZE, 5))


def sound_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4800), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 48_000, 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["mkv", "ts", "webm"])
def test_a_truncated_file_is_named_when_its_end_is_read(kind: str) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (50, 48, 64, 3), np.uint8)
    container, codec = KINDS[kind]
    data = video_bytes(every(0.04, 50), container=container, codec=codec, frames=noise)
    with pytest.raises(UnreadableMediaError, match=r"^a\.mp4: "):
        frames(data[: len(data) // 2], Clip(1.2, 0.6, fps=25), 13)


def test_a_concealed_frame_is_rejected() -> None:
    rng = np.random.default_rng(3)
    noise = rng.integers(0, 255, (10, 48, 64, 3), np.uint8)
    data = video("mp4", every(0.04, 10), frames=noise)
    start = data.index(b"mdat")
    message = []
    for part in range(2, 10):  # whether a damage shows as a made-up frame differs from one decoding to the next
        hurt, place = bytearray(data), start + (len(data) - start) * part // 11
        hurt[place : place + 40] = bytes(40)
        try:
            frames(bytes(hurt), Clip(0, 0.36), 9)
        except UnreadableMediaError as error:
            message.append(str(error))
    assert any(re.match(r"a\.mp4: the frame at 0\.\d\d s is damaged", one) for one in message), message


def test_damage_in_the_middle_is_mostly_detected_and_always_named() -> None:
    data = video("mp4", every(0.04, 30))
    start = data.index(b"mdat") + 8
    rng = np.random.default_rng(1)
    named = 0
    for _ in range(25):
        hurt = bytearray(data)
        for place in rng.integers(0, len(data), 20):
            hurt[place if place > start else start] = int(rng.integers(0, 256))
        try:
            found = frames(bytes(hurt), Clip(0, 0.8), 17)
        except UnreadableMediaError as error:
            assert error.path == "a.mp4"
            named += 1
        else:
            assert len(found) == 17
    assert named > 12


def test_a_frame_of_another_shape_names_its_file() -> None:
    data = video("mp4", every(0.04, 3))
    with pytest.raises(
        UnreadableMediaError, match=r"^a\.mp4: a frame of 64x48 in a video of 36x48: the file is damaged"
    ):
        frames(data, Clip(0, 0.1), 1, size=(36, 48))


def test_frames_above_the_limit_are_rejected() -> None:
    data = video("mp4", every(0.04, 3))
    with pytest.raises(UnreadableMediaError, match=r"^a\.mp4: 64x48 is 0\.0 megapixels, more than"):
        frames(data, Clip(0, 0.1), 1, max_pixels=3000)
    with pytest.raises(UnreadableMediaError, match="scale it down"):
        probe_video(DictBackend({"a": data}), "a", max_pixels=3000)


MEASURED = """
import gc, io, sys
from pathlib import Path
from gracetune.data.media.video import decode_video
from gracetune.data.refs import Bucket, Clip, Fit
data = Path(sys.argv[1]).read_bytes()
size = tuple(map(int, sys.argv[2].split("x")))
def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
def growth(start, count):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    clip = Clip(start, count / 25)
    decode_video(io.BytesIO(data), "a", clip, Fit(size, (64, 48)), Bucket(64, 48, count))
    return memory("VmHWM") - before
gc.disable()  # what only a collection would free counts
growth(0.0, 2)
print(growth(0.4, 61), growth(0.8, 61))
"""


@pytest.mark.parametrize("rotation", [None, 90], ids=["upright", "turned"])
def test_full_size_frames_are_released_one_by_one(tmp_path: Path, rotation: float | None) -> None:
    """61 decoded frames of 640x480 are 27 MiB. Measured in a process of its own."""
    file, size = tmp_path / "a.mp4", "480x640" if rotation else "640x480"
    file.write_bytes(video_bytes(every(0.04, 72), size=(640, 480), codec="mpeg4", rotation=rotation))
    done = subprocess.run([sys.executable, "-c", MEASURED, str(file), size], capture_output=True, text=True, check=True)
    in_the_middle, at_the_end = map(float, done.stdout.split())
    assert in_the_middle < 12
    assert at_the_end < 12, "where the last frames of the file are taken, too"


def test_an_impossible_pixel_aspect_ratio_is_damage() -> None:
    data = video("mkv", every(0.04, 5), pixel_shape=Fraction(4, 1))
    fit, bucket = whole(*SIZE, 1)
    with pytest.raises(UnreadableMediaError, match=r"^a: 256x48 is .* megapixels"):
        decode_video(io.BytesIO(data), "a", Clip(0, 0.04), fit, bucket, max_pixels=10_000)

"""Truncated video and audio files are rejected by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
import pytest

from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.probe import AudioFacts, VideoFacts, probe_audio, probe_video
from gracetune.data.media.truncated import whole_size
from unit.data.media.generated import DictBackend, audio_bytes, numbered, tone

FRAMES, SECONDS = 50, 3.0
VIDEOS: dict[str, tuple[str, str, dict[str, str]]] = {
    "index behind": ("mp4", "libx264", {}),
    "index in front": ("mp4", "libx264", {"movflags": "faststart"}),
    "fragments": ("mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    "quicktime": ("mov", "libx264", {"movflags": "faststart"}),
    "matroska": ("matroska", "libx264", {}),
    "webm": ("webm", "libvpx", {}),
    "avi": ("avi", "mpeg4", {}),
    "wmv": ("asf", "wmv2", {}),
}
SOUNDS = {
    "wav": ("WAV", None),
    "wav above 4 GiB": ("RF64", None),
    "aiff": ("AIFF", None),
    "flac": ("FLAC", None),
    "mp3": ("MP3", None),
    "vorbis": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "m4a": ("ipod", "aac"),
}
CUTS = (0.3, 0.5, 0.8, 0.95)
"""A smaller part may be an index, or less than a codec frame."""


@cache
def a_video(name: str) -> bytes:
    container, codec, options = VIDEOS[name]
    with TemporaryDirectory() as folder:  # an index can only be put in front of a file that has a name
        file = Path(folder) / "video"
        with av.open(str(file), "w", format=container, options=options) as output:
            stream = output.add_stream(codec, rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for number in range(FRAMES):
                frame = av.VideoFrame.from_ndarray(numbered(number, 64, 48), format="rgb24")
                frame.pts = number
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        return file.read_bytes()


@cache
def a_sound(name: str) -> bytes:
    kind, subtype = SOUNDS[name]
    sound = tone(440, SECONDS, 48_000)
    if kind != "ipod":
        return audio_bytes(sound, 48_000, kind, subtype)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as output:
        stream = output.add_stream("aac", rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound[None]), format="fltp", layout="mono")
        frame.sample_rate = 48_000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


def facts(data: bytes, probe: Callable[[DictBackend, str], VideoFacts | AudioFacts]) -> VideoFacts | AudioFacts:
    return probe(DictBackend({"a file": data}), "a file")


@pytest.mark.parametrize("share", CUTS)
@pytest.mark.parametrize("name", VIDEOS)
def test_a_truncated_video_is_rejected(name: str, share: float) -> None:
    data = a_video(name)
    with pytest.raises(UnreadableMediaError, match=r"^a file: truncated: \d+ of at least \d+ bytes"):
        facts(data[: int(share * len(data))], probe_video)


@pytest.mark.parametrize("share", CUTS)
@pytest.mark.parametrize("name", SOUNDS)
def test_truncated_audio_is_rejected(name: str, share: float) -> None:
    data = a_sound(name)
    with pytest.raises(UnreadableMediaError, match=r"^a file: truncated: "):
        facts(data[: int(share * len(data))], probe_audio)


@pytest.mark.parametrize("junk", [b"", b"\0" * 3000, b"appended by somebody " * 40])
@pytest.mark.parametrize("name", VIDEOS)
def test_a_complete_video_with_trailing_data_is_accepted(name: str, junk: bytes) -> None:
    found = facts(a_video(name) + junk, probe_video)
    assert isinstance(found, VideoFacts)
    assert found.frames == FRAMES


@pytest.mark.parametrize("junk", [b"", b"\0" * 3000, b"appended by somebody " * 40])
@pytest.mark.parametrize("name", SOUNDS)
def test_complete_audio_with_trailing_data_is_accepted(name: str, junk: bytes) -> None:
    assert facts(a_sound(name) + junk, probe_audio).duration == pytest.approx(SECONDS, abs=0.05)


@pytest.mark.parametrize("length", [0, 0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_wav_with_an_open_length_is_not_checked(length: int) -> None:
    data = a_sound("wav")
    offset = data.index(b"data") + 4
    assert whole_size(io.BytesIO(data[:offset] + length.to_bytes(4, "little") + data[offset + 4 :])) is None


def test_a_matroska_stream_without_a_length_is_not_checked() -> None:
    data = a_video("matroska")
    offset = data.index(b"\x18\x53\x80\x67") + 4
    assert whole_size(io.BytesIO(data[:offset] + b"\x01" + b"\xff" * 7 + data[offset + 8 :])) is None
    assert whole_size(io.BytesIO(data)) == len(data)


@pytest.mark.parametrize("head", [b"", b"RIFF", b"OggS", b"\0\0\0\x08ftyp", b"\x1a\x45\xdf\xa3", b"FORM\0\0\0\0AIFF"])
def test_a_header_alone_has_no_length(head: bytes) -> None:
    whole_size(io.BytesIO(head))  # says something or nothing, and does not fall over


def test_invalid_boxes_end_the_search() -> None:
    for length in (0, 2, 7):
        assert (
            whole_size(io.BytesIO(b"\0\0\0\x10ftypisom\0\0\0\0" + bytes([0, 0, 0, length]) + b"mdat" + b"x" * 50))
            is None
        )
    long_box = b"\0\0\0\x01mdat" + (5000).to_bytes(8, "big") + b"x" * 50
    assert whole_size(io.BytesIO(b"\0\0\0\x10ftypisom\0\0\0\0" + long_box)) == 5016

"""Audio: the right part at the right rate, from every kind of file."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gracetune.data.errors import DataError, UnreadableMediaError
from gracetune.data.media.audio import decode_audio, resampled
from gracetune.data.media.probe import probe_audio
from gracetune.data.refs import Bucket, Clip
from unit.data.media.generated import CountingStream, DictBackend, audio_bytes, every, tone, video_bytes

RATE = 16_000


def decode(
    data: bytes, start: float, samples: int, rate: int = RATE, channels: int = 1, *, pad: bool = False
) -> NDArray[np.float32]:
    clip = Clip(start, samples / rate, sample_rate=rate, pad=pad)
    found = decode_audio(io.BytesIO(data), "a.wav", clip, Bucket(audio_samples=samples, audio_channels=channels))
    assert found.shape == (channels, samples)
    assert found.dtype == np.float32
    assert np.abs(found).max() <= 1
    return found


def decibels(error: NDArray[np.float32], signal: NDArray[np.float32]) -> float:
    return float(20 * np.log10((np.sqrt(np.mean(error**2)) + 1e-12) / np.sqrt(np.mean(signal**2))))


def chirp(seconds: float, rate: int) -> NDArray[np.float32]:
    """A signal that never repeats."""
    t = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * (200 * t + 300 * t**2))).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "subtype", "noise"),
    [
        ("WAV", "FLOAT", -150),
        ("WAV", "PCM_16", -80),
        ("WAV", "PCM_24", -120),
        ("FLAC", "PCM_16", -80),
        ("AIFF", "PCM_16", -80),
        ("OGG", "VORBIS", -20),
        ("MP3", None, -20),
    ],
)
def test_every_kind_of_file(kind: str, subtype: str | None, noise: float) -> None:
    sound = chirp(1.0, RATE)
    data = audio_bytes(sound, RATE, kind, subtype)
    facts = probe_audio(DictBackend({"a": data}), "a")
    assert (facts.sample_rate, facts.channels) == (RATE, 1)
    assert facts.duration == pytest.approx(1.0, abs=0.08)
    found = decode(data, 0.25, 8000)[0]
    assert decibels(found - sound[4000:12000], sound[4000:12000]) < noise


@pytest.mark.parametrize(
    ("source", "target"), [(44_100, 48_000), (48_000, 16_000), (22_050, 44_100), (8000, 44_100), (44_100, 32_000)]
)
def test_resampling_is_clean(source: int, target: int) -> None:
    edge = 400
    sound = resampled(tone(1000, 1.0, source)[None], source, target)[0]
    expected = tone(1000, 1.0, target)
    assert len(sound) == target
    assert decibels((sound - expected)[edge:-edge], expected) < -90


def test_frequencies_above_the_lower_rate_are_removed() -> None:
    heard = resampled(tone(12_000, 1.0, 48_000)[None], 48_000, 16_000)[0]
    assert np.abs(heard[400:-400]).max() < 0.5 * 10 ** (-80 / 20)
    kept = resampled(tone(6_000, 1.0, 48_000)[None], 48_000, 16_000)[0]
    assert np.abs(kept[400:-400]).max() == pytest.approx(0.5, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(
    rates=st.sampled_from([(44_100, 48_000), (48_000, 16_000), (16_000, 16_000), (11_025, 44_100), (44_100, 44_056)]),
    start=st.floats(0, 0.8),
    length=st.floats(0.05, 0.19),
)
def test_a_window_equals_that_part_of_the_whole(rates: tuple[int, int], start: float, length: float) -> None:
    source, target = rates
    sound = chirp(1.0, source)
    data = audio_bytes(sound, source, "WAV", "FLOAT")
    everything = decode(data, 0, target, target)[0]
    first, count = round(start * target), int(length * target)
    excerpt = decode(data, start, count, target)[0]
    assert np.abs(excerpt - everything[first : first + count]).max() < 1e-5


def test_channels() -> None:
    left, right = tone(500, 0.5, RATE), tone(700, 0.5, RATE)
    stereo = audio_bytes(np.stack([left, right]), RATE, subtype="FLOAT")
    mono = audio_bytes(left, RATE, subtype="FLOAT")
    assert np.allclose(decode(stereo, 0, 8000)[0], (left + right) / 2, atol=1e-6)
    assert np.allclose(decode(stereo, 0, 8000, channels=2), [left, right], atol=1e-6)
    assert np.allclose(decode(mono, 0, 8000, channels=2), [left, left], atol=1e-6)


def test_surround_becomes_stereo() -> None:
    silence = np.zeros(8000, np.float32)
    front_left = tone(500, 0.5, RATE, 0.25)
    surround = audio_bytes(np.stack([front_left, *[silence] * 5]), RATE, subtype="FLOAT")
    found = decode(surround, 0, 8000, channels=2)
    assert np.corrcoef(found[0], front_left)[0, 1] > 0.99
    assert np.abs(found[1]).max() < 1e-4
    with pytest.raises(UnreadableMediaError, match=r"a\.wav: 6 channels cannot be converted to 4"):
        decode(surround, 0, 8000, channels=4)


def test_padding_is_explicit() -> None:
    sound = tone(500, 0.5, RATE)
    data = audio_bytes(sound, RATE, subtype="FLOAT")
    with pytest.raises(UnreadableMediaError, match=r"^a\.wav: ends after 0\.50 s, but the clip needs 0\.00 to 1\.00 s"):
        decode(data, 0, RATE)
    padded = decode(data, 0, RATE, pad=True)[0]
    assert np.allclose(padded[:8000], sound, atol=1e-6)
    assert not padded[8000:].any()
    with pytest.raises(UnreadableMediaError, match="ends after"):
        decode(data, 2.0, RATE, pad=True)


def test_a_gap_of_one_codec_frame_is_accepted() -> None:
    data = audio_bytes(tone(500, 0.5, RATE), RATE)
    assert not decode(data, 0, 8000 + 700)[0, 8000:].any()
    with pytest.raises(UnreadableMediaError):
        decode(data, 0, 8000 + 900)


def test_floats_beyond_the_range_are_clipped() -> None:
    loud = decode(audio_bytes(3 * tone(500, 0.5, RATE), RATE, subtype="FLOAT"), 0, 8000)
    assert loud.max() == 1
    assert loud.min() == -1


def test_a_file_with_non_finite_samples() -> None:
    sound = tone(500, 0.5, RATE)
    sound[100] = np.nan
    with pytest.raises(UnreadableMediaError, match=r"^a\.wav: it contains non-finite samples"):
        decode(audio_bytes(sound, RATE, subtype="FLOAT"), 0, 8000)


def test_the_sound_of_a_video() -> None:
    sound = np.stack([chirp(2.0, 48_000), tone(700, 2.0, 48_000)])
    data = video_bytes(every(0.04, 50), sound=sound)
    facts = probe_audio(DictBackend({"a.mp4": data}), "a.mp4")
    assert (facts.sample_rate, facts.channels) == (48_000, 2)
    assert facts.duration == pytest.approx(2.0, abs=0.05)
    found = decode(data, 1.0, 24_000, 48_000, 2)
    assert decibels(found - sound[:, 48_000:72_000], sound) < -20
    lower = decode(data, 1.0, 8_000, 16_000, 1)[0]
    expected = resampled(sound.mean(axis=0, keepdims=True), 48_000, 16_000)[0, 16_000:24_000]
    assert decibels(lower - expected, expected) < -20


def contained(sound: NDArray[np.float32], rate: int, container: str, codec: str) -> bytes:
    """[samples] in a container only FFmpeg reads."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        size = stream.frame_size or 960
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=size)
        for excerpt in [*resampler.resample(frame), *resampler.resample(None)]:
            output.mux(stream.encode(excerpt))
        output.mux(stream.encode())
    return buffer.getvalue()


def test_millisecond_timestamps_cause_no_clicks() -> None:
    """A frame of AAC lasts 23.2 ms at 44.1 kHz: placed by its timestamp, each would overlap the last or leave a gap."""
    sound = tone(3000, 1.0, 44_100)
    found = decode(contained(sound, 44_100, "matroska", "aac"), 0.2, 22_050, 44_100)[0]
    assert min(decibels(found - sound[8820 + shift : 30_870 + shift], sound) for shift in range(-45, 46)) < -25


@pytest.mark.parametrize(("container", "codec"), [("ipod", "aac"), ("webm", "libopus"), ("matroska", "flac")])
def test_sound_libsndfile_does_not_know(container: str, codec: str) -> None:
    sound = chirp(2.0, 48_000)
    data = contained(sound, 48_000, container, codec)
    assert probe_audio(DictBackend({"a": data}), "a").duration == pytest.approx(2.0, abs=0.05)
    found = decode(data, 1.0, 24_000, 48_000)[0]
    # Where a container writes whole milliseconds, a piece may begin one too early or too late, but is whole.
    shifts = range(-48, 49) if container == "webm" else (0,)
    assert min(decibels(found - sound[48_000 + shift : 72_000 + shift], sound) for shift in shifts) < -20


def test_a_late_window_does_not_read_what_comes_before() -> None:
    rng = np.random.default_rng(0)
    noise = rng.uniform(-0.5, 0.5, 10 * RATE).astype(np.float32)
    stream = CountingStream(audio_bytes(noise, RATE))
    decode_audio(stream, "a", Clip(9.0, 0.5, sample_rate=RATE), Bucket(audio_samples=8000, audio_channels=1))
    assert stream.bytes_read < len(stream.getvalue()) / 2


def test_bad_files_are_named() -> None:
    flac = audio_bytes(np.random.default_rng(0).uniform(-0.5, 0.5, RATE).astype(np.float32), RATE, "FLAC")
    backend = DictBackend({
        "empty.wav": b"",
        "text.wav": b"a caption in the wrong place" * 10,
        "silent film.mp4": video_bytes(every(0.04, 3)),
    })  # fmt: skip
    reasons = {"empty.wav": "empty", "text.wav": "cannot be decoded", "silent film.mp4": "it contains no audio"}
    for path, reason in reasons.items():
        with pytest.raises(UnreadableMediaError, match=f"^{path}: .*{reason}"):
            probe_audio(backend, path)
    with pytest.raises(UnreadableMediaError, match=r"^a\.wav: "):
        decode(flac[: len(flac) // 2], 0, RATE)
    with pytest.raises(UnreadableMediaError, match="contains no samples"):
        probe_audio(DictBackend({"a": audio_bytes(np.zeros(0, np.float32), RATE)}), "a")


class FailingStream(io.BytesIO):
    """A disk or network that fails in the middle of a file."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > len(self.getvalue()) // 2:
            raise OSError("the cable was pulled")
        return super().read(size)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3"])
def test_a_failing_disk_is_not_taken_for_a_damaged_file(kind: str) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 4 * RATE).astype(np.float32)
    clip = Clip(0, 4.0, sample_rate=RATE)
    with pytest.raises(OSError, match="the cable was pulled"):
        decode_audio(
            FailingStream(audio_bytes(noise, RATE, kind)),
            "a",
            clip,
            Bucket(audio_samples=4 * RATE, audio_channels=1),
        )


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_damage_is_always_named(kind: str) -> None:
    data = audio_bytes(chirp(0.5, RATE), RATE, kind)
    rng = np.random.default_rng(2)
    for _ in range(30):
        hurt = bytearray(data)
        for place in rng.integers(0, len(data), 6):
            hurt[place] = int(rng.integers(0, 256))
        cut = bytes(hurt[: int(rng.integers(1, len(data)))])
        try:
            decode(cut, 0, 4000)
        except UnreadableMediaError as error:
            assert error.path == "a.wav"


def test_a_clip_without_a_rate_is_rejected() -> None:
    data = audio_bytes(tone(500, 0.5, RATE), RATE)
    with pytest.raises(DataError, match="has no sample rate"):
        decode_audio(io.BytesIO(data), "a", Clip(0, 1), Bucket(audio_samples=1, audio_channels=1))

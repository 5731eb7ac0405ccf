"""Decoding audio: a section of a file at the sample rate and with the channels of the model.

libsndfile reads wav, flac, ogg and mp3. FFmpeg reads everything else (m4a, opus in webm, the audio track of a video).
libswresample resamples with noise below -100 dB. Audio around the section is resampled with it, so that the section
equals the same part of the whole file resampled.

Padding is explicit: audio that ends before its section is an error unless the clip sets `pad`. Only a gap of up to one
codec frame (`SLACK`) is always filled with silence, because containers round lengths to whole frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, BinaryIO, Protocol

import av
import numpy as np
import soundfile
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.container import InputContainer
from numpy.typing import NDArray

from gracetune.data.errors import DataError, UnreadableMediaError
from gracetune.data.media.video import container_of
from gracetune.data.refs import Bucket, Clip
from gracetune.errors import GracetuneError

Sound = NDArray[np.float32]
"""[channels, samples]"""

SLACK = 0.05
"""Seconds that may be missing at the end: more than a frame of AAC (1024 samples) or mp3 (1152) at 32 kHz."""
_PREROLL = 0.2
"""Seconds decoded before a section, because the frames of lossy codecs overlap."""
_JITTER = 0.002
"""In seconds. Matroska rounds times to milliseconds, so a frame this close to the end of the previous one follows it
directly."""
_MARGIN = 64
"""An upper bound on the reach of the resampling filter to either side, in samples at the lower rate."""
_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}


def decode_audio(stream: BinaryIO, path: str, clip: Clip, bucket: Bucket) -> Sound:
    """Decode a clip: [bucket.audio_channels, bucket.audio_samples] in [-1, 1], from `clip.start` on."""
    if clip.sample_rate is None:
        raise DataError(f"{path}: its clip has no sample rate")
    with open_sound(stream, path) as source:
        excerpt = _read_excerpt(source, round(clip.start * clip.sample_rate), bucket.audio_samples, clip.sample_rate)
        total = source.length / source.rate
    if not np.isfinite(excerpt).all():
        raise UnreadableMediaError(path, "it contains non-finite samples")
    missing = bucket.audio_samples - excerpt.shape[1]
    if excerpt.shape[1] == 0 or (missing > SLACK * clip.sample_rate and not clip.pad):
        needed = f"{clip.start:.2f} to {clip.start + bucket.audio_samples / clip.sample_rate:.2f} s"
        raise UnreadableMediaError(path, f"ends after {total:.2f} s, but the clip needs {needed}")
    full = np.pad(_mixed(excerpt, bucket.audio_channels, path), ((0, 0), (0, missing)))
    return np.clip(full, -1.0, 1.0)


class SoundSource(Protocol):
    """An open audio file. Lengths and positions are in samples at its own rate."""

    rate: int
    channels: int
    length: int

    def read(self, start: int, count: int) -> Sound:
        """Read [channels, count]. Returns fewer samples only at the end of the file."""
        ...

    def check_end(self) -> None:
        """Raise UnreadableMediaError if the file is shorter than its header says, if that is cheap to check."""
        ...


@contextmanager
def open_sound(stream: BinaryIO, path: str) -> Iterator[SoundSource]:
    """Open an audio file with libsndfile, or with FFmpeg if libsndfile does not know the format."""
    stream.seek(0)
    callbacks = _Callbacks(stream)
    try:
        file = soundfile.SoundFile(callbacks)
    except soundfile.LibsndfileError:
        callbacks.check()
        with container_of(stream, path) as container:
            yield _ContainerSound(container, path)
        return
    with file:
        callbacks.check()
        try:
            yield _FileSound(file, path, callbacks)
        except soundfile.LibsndfileError as error:
            callbacks.check()
            raise UnreadableMediaError(path, f"cannot be decoded: {error.error_string}") from error


class _Callbacks:
    """A stream for libsndfile. Exceptions in its callbacks would be printed and lost, so `check` raises them later."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._error: Exception | None = None

    def seek(self, offset: int, whence: int = 0) -> None:
        try:
            self._stream.seek(offset, whence)
        except ValueError:
            pass  # a damaged file contains negative offsets; libsndfile notices that the position did not change
        except (OSError, GracetuneError) as error:
            self._error = error

    def tell(self) -> int:
        return self._stream.tell()

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, GracetuneError) as error:
            self._error = error
            return 0
        buffer[: len(data)] = data
        return len(data)

    def check(self) -> None:
        """Raise an exception of the stream itself, which is not caused by the file's content."""
        if self._error is not None:
            raise self._error


class _FileSound:
    """An audio file read by libsndfile."""

    def __init__(self, file: Any, path: str, callbacks: _Callbacks) -> None:
        self._file, self._path, self._callbacks = file, path, callbacks
        self.rate: int = file.samplerate
        self.channels: int = file.channels
        self.length: int = file.frames

    def read(self, start: int, count: int) -> Sound:
        # An mp3 decoder returns silence for a moment after seeking, so start earlier. Other formats lose little by it.
        begin = max(0, min(start, self.length) - round(_PREROLL * self.rate))
        expected = max(0, min(start + count, self.length) - begin)
        self._file.seek(begin)
        found: Sound = self._file.read(expected, dtype="float32", always_2d=True).T
        self._callbacks.check()
        if expected - found.shape[1] > SLACK * self.rate:
            end = (begin + found.shape[1]) / self.rate
            raise UnreadableMediaError(self._path, f"truncated after {end:.2f} of {self.length / self.rate:.2f} s")
        return found[:, start - begin :]

    def check_end(self) -> None:
        """Read the end: for flac and mp3 the length comes from the header, and the data may be missing."""
        count = min(self.length, round(4 * SLACK * self.rate))
        try:
            self.read(self.length - count, count)
        except (soundfile.LibsndfileError, UnreadableMediaError) as error:
            self._callbacks.check()
            reason = f"truncated: its end, at {self.length / self.rate:.2f} s, cannot be read"
            raise UnreadableMediaError(self._path, reason) from error


class _ContainerSound:
    """The first audio stream of a container read by FFmpeg."""

    def __init__(self, container: InputContainer, path: str) -> None:
        if not container.streams.audio:
            raise UnreadableMediaError(path, "it contains no audio")
        stream = container.streams.audio[0]
        if stream.codec_context is None or not stream.rate or not stream.channels:
            raise UnreadableMediaError(path, "FFmpeg cannot decode its audio: the codec is unsupported or damaged")
        self._container, self._stream, self._path = container, stream, path
        self.rate = stream.rate
        self.channels = stream.channels
        self._tick = stream.time_base or Fraction(1, av.time_base)
        self._origin = (stream.start_time or 0) * self._tick
        self.length = self._measured()

    def read(self, start: int, count: int) -> Sound:
        sound = np.zeros((self.channels, count), np.float32)
        end = 0
        following: int | None = None
        self._seek(max(0.0, start / self.rate - _PREROLL))
        for frame in self._container.decode(self._stream):
            at = self._position(frame) - start
            if following is not None and abs(at - following) < _JITTER * self.rate:
                at = following
            if at >= count:
                break
            values = self._values(frame)
            following = at + values.shape[1]
            skipped, kept = max(0, -at), min(values.shape[1], count - at)
            if kept > skipped:
                sound[:, at + skipped : at + kept] = values[:, skipped:kept]
                end = at + kept
        return sound[:, :end]

    def check_end(self) -> None:
        """Nothing to do: `reject_cut_off` has already checked a container, and a bare stream has no length."""

    def _measured(self) -> int:
        """The length in samples, from the header or else from all packets."""
        if self._stream.duration:
            return round(self._stream.duration * self._tick * self.rate)
        packets = [packet for packet in self._container.demux(self._stream) if packet.pts is not None]
        end = max((packet.pts + (packet.duration or 0) for packet in packets if packet.pts is not None), default=0)
        return round((end * self._tick - self._origin) * self.rate)

    def _seek(self, time: float) -> None:
        self._container.seek(round((Fraction(time) + self._origin) / self._tick), stream=self._stream)

    def _position(self, frame: AudioFrame) -> int:
        pts = frame.pts or 0
        return round((pts * (frame.time_base or self._tick) - self._origin) * self.rate)

    def _values(self, frame: AudioFrame) -> Sound:
        if frame.sample_rate != self.rate or frame.layout.nb_channels != self.channels:
            raise UnreadableMediaError(self._path, "its sample rate or channels change midway; convert it to wav")
        return _joined(AudioResampler(format="fltp").resample(frame), self.channels)


def _read_excerpt(source: SoundSource, first: int, count: int, rate: int) -> Sound:
    """The samples from `first` to `first + count` at `rate`, or as many as exist."""
    if source.rate == rate:
        return source.read(first, count)
    common = math.gcd(source.rate, rate)
    # `block` samples of the source last exactly as long as `block_out` samples of the result. Starting at a multiple
    # of `block` gives the resampling filter the same phase as resampling the whole file.
    block, block_out = source.rate // common, rate // common
    margin = _MARGIN * math.ceil(max(1, source.rate / rate))
    skipped_blocks = max(0, first * block // block_out - margin) // block
    offset = first - skipped_blocks * block_out
    needed = math.ceil((offset + count) * block / block_out) + margin
    sound = source.read(skipped_blocks * block, needed)
    available = math.ceil(sound.shape[1] * block_out / block)
    return resampled(sound, source.rate, rate)[:, offset : min(offset + count, available)]


def resampled(sound: Sound, rate: int, target: int) -> Sound:
    """Resample each channel separately."""
    if sound.shape[1] == 0:
        return sound
    return np.stack([_converted(channel[None], rate, "mono", target, "mono")[0] for channel in sound])


def _mixed(sound: Sound, channels: int, path: str) -> Sound:
    """Convert to a number of channels: mono is copied to all, several are averaged to mono, and surround sound becomes
    stereo by FFmpeg's mixing table."""
    found = sound.shape[0]
    if found == channels:
        return sound
    if channels == 1:
        return np.asarray(sound.mean(axis=0, keepdims=True), np.float32)
    if found == 1:
        return np.repeat(sound, channels, axis=0)
    if channels == 2 and found in _LAYOUTS:
        # The rate does not matter, because input and output have the same.
        return _converted(sound, 48_000, _LAYOUTS[found], 48_000, "stereo")
    reason = f"{found} channels cannot be converted to {channels}; mix it down to {channels}, 2 or 1"
    raise UnreadableMediaError(path, reason)


def _converted(sound: Sound, rate: int, layout: str, target: int, target_layout: str) -> Sound:
    """Convert rate and channel layout with libswresample, including the samples still buffered at the end."""
    frame = AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    resampler = AudioResampler(format="fltp", layout=target_layout, rate=target)
    chunks = [*resampler.resample(frame), *resampler.resample(None)]
    return _joined(chunks, 1 if target_layout == "mono" else 2)


def _joined(chunks: list[AudioFrame], channels: int) -> Sound:
    nothing = np.zeros((channels, 0), np.float32)
    return np.concatenate([nothing, *(np.asarray(excerpt.to_ndarray(), np.float32) for excerpt in chunks)], axis=1)

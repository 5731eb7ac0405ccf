"""Generated images and sounds, the same ones every time, and what upstream needs to decode them."""

from __future__ import annotations

import os
import shutil
import wave
from pathlib import Path

IMAGES = 12


def paint(folder: Path) -> None:
    """Small images of two shapes, each with a caption; the same ones every time."""
    import numpy as np
    from PIL import Image

    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = np.clip(random.normal(128, 40, (8, 8, 3)), 0, 255).astype("uint8")
        shape = (96, 96) if number % 3 else (128, 96)
        Image.fromarray(coarse).resize(shape, Image.Resampling.BICUBIC).save(folder / f"p{number:02}.png")
        (folder / f"p{number:02}.txt").write_text(f"a image number {number}")


def sing(file: Path) -> None:
    """One second of a sawtooth."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(b"".join(((i * 37) % 2000 - 1000).to_bytes(2, "little", signed=True) for i in range(16000)))


def lend_ffmpeg(folder: Path) -> None:
    """Upstream calls `ffmpeg`; where the machine has none, the one of a package that upstream requires serves."""
    if shutil.which("ffmpeg") is not None:
        return
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        program = get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return  # upstream then says itself what it misses
    folder.mkdir(exist_ok=True)
    (folder / "ffmpeg").symlink_to(program)
    os.environ["PATH"] = f"{folder}:{os.environ.get('PATH', '')}"

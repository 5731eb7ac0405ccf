"""Frames that ai-toolkit takes from videos: files are written whose frames show their own number, and read by its code.

Where the first frame is random, a few hundred readings give the first and last start and the distance of two frames.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from aitoolkit_base import dataset, prepare
from common import record

BITS = 10
SIDE = 16 * BITS
CLIPS = [(9, 16), (20, 16), (33, 12), (50, 25), (81, 16), (81, 24), (100, 24), (240, 30), (300, 60)]
"""Frames and frames a second."""
READINGS = 60


def write_clip(path: Path, frames: int, fps: int) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = SIDE, 64, "yuv420p"
        stream.options = {"crf": "10", "g": "12"}
        for number in range(frames):
            bars = [255 if number >> bit & 1 else 0 for bit in range(BITS)]
            row = np.repeat(np.array(bars, np.uint8), SIDE // BITS)
            image = np.broadcast_to(row[None, :, None], (64, SIDE, 3))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        container.mux(stream.encode())


def numbers(frames: Any) -> list[int]:
    """Of the frames of a tensor [F, C, H, W]."""
    found = []
    for frame in frames:
        columns = frame.mean(dim=(0, 1)).reshape(BITS, -1)
        middle = columns[:, 4:-4].mean(dim=1)
        found.append(sum(1 << bit for bit in range(BITS) if middle[bit] > 0))
    return found


def taken(folder: Path, clip: str, **options: Any) -> list[int]:
    found = dataset(folder, 16, resolution=SIDE, **options)
    index = next(at for at, item in enumerate(found.file_list) if Path(item.path).name == clip)
    return numbers(found._get_single_item(index).tensor)


def randomly(folder: Path, clip: str, **options: Any) -> dict[str, Any]:
    found = dataset(folder, 16, resolution=SIDE, **options)
    index = next(at for at, item in enumerate(found.file_list) if Path(item.path).name == clip)
    read = [numbers(found._get_single_item(index).tensor) for _ in range(READINGS)]
    starts = [one[0] for one in read]
    relative = {tuple(number - one[0] for number in one) for one in read}
    if len(relative) > 1:
        raise SystemExit(f"{clip}: frames at several distances")
    return {"relative": [*relative.pop()], "starts": [min(starts), max(starts), len({*starts})]}


def values(peer: Path) -> Any:
    prepare(peer)
    random.seed(0)
    cases = []
    with tempfile.TemporaryDirectory() as name:
        for count, fps in CLIPS:
            (folder := Path(name) / f"{count}at{fps}").mkdir()
            write_clip(folder / "clip.mp4", count, fps)
            about = {"frames": count, "fps": fps}
            for wanted in (5, 17, 33, 81):
                whole = taken(folder, "clip.mp4", num_frames=wanted)
                cases.append({**about, "options": {"num_frames": wanted}, "numbers": whole})
                for rate in (16, 24):
                    options = {"num_frames": wanted, "shrink_video_to_frames": False, "fps": rate}
                    cases.append({**about, "options": options, **randomly(folder, "clip.mp4", **options)})
            for rate in (16, 24):
                options = {"auto_frame_count": True, "fps": rate}
                cases.append({**about, "options": options, "numbers": taken(folder, "clip.mp4", **options)})
    return {"readings": READINGS, "cases": cases}


if __name__ == "__main__":
    record("frames", values)

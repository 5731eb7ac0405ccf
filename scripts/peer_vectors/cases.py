"""What the recorders of both peers' data code are given: sizes of images, captions, lengths of videos."""

from __future__ import annotations

SIZES = [
    (512, 512), (1024, 1024), (768, 768), (2048, 2048), (333, 333), (64, 64), (1000, 1000), (1023, 1025),
    (1920, 1080), (1080, 1920), (1280, 720), (720, 1280), (3840, 2160), (640, 480), (480, 640), (800, 600),
    (4032, 3024), (3024, 4032), (6000, 4000), (4000, 6000), (1536, 1024), (1024, 1536), (1216, 832), (832, 1216),
    (1344, 768), (768, 1344), (900, 1600), (500, 375), (375, 500), (400, 711), (1111, 777), (777, 1111),
    (1500, 500), (500, 1500), (2560, 1080), (1600, 400), (1020, 1000), (1000, 1020), (517, 389), (2731, 1999),
]  # fmt: skip
"""Width and height: common ones, odd ones, smaller and larger than the requested resolutions."""

CAPTIONS = {
    "tags": "red hat, blue coat, tall, old, smiling",
    "two tags": "red hat, blue coat",
    "sentence": "a man in a red hat walks home",
    "placeholder": "a photo of [trigger] in the rain, at night",
    "with the word": "sks stands there, alone",
    "lines": "a first caption\na second one\n\na third, with tags",
    "empty": "",
    "blank": "  \n",
}
DRAWS = 200

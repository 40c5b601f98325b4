"""Folders with damaged images, and images that declare many pixels, where Pillow is installed."""

from __future__ import annotations

import functools
import random
import struct
import zlib
from collections.abc import Mapping
from typing import ClassVar

from onnxfit import ImageFolder
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import mutated_bytes
from scripts.fuzz.data import image_trainer

FORMATS = ("bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp")
SIZES = (0, 1, 8, 10_000, 60_000, (1 << 31) - 1, (1 << 32) - 1)
# a program in PostScript: Pillow gives such files to Ghostscript, which runs it
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(exploded) (w) file\nshowpage\n"
OTHERS = (
    POSTSCRIPT, b"GIF89a", b"", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/passwd'/></svg>",
    b"\0\0\0\x0cjP  \r\n\x87\n", b"SIMPLE  =                    T", b"8BPS\0\1", b"P6 60000 60000 255\n", b"P4 2000000000 2000000000\n",
    b"P5 8 8 65535\n" + bytes(128), b"PyP6 8 8 255 ", b"Pf 8 8 -1.0\n" + bytes(256), b"P7\nWIDTH 8\nHEIGHT 8\n",
)  # fmt: skip


class Images(Attempt):
    share: ClassVar[int] = 6

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = rng.choice(FORMATS)
        image = originals.get(f"image.{self.original}")
        if image is None:
            return
        self.main = f"pictures/cat/damaged.{rng.choice((self.original, 'png'))}"
        self.files = {
            self.main: _damaged_image(image, rng),
            "pictures/dog/1.png": originals["image.png"],
        }

    def run(self, rng: random.Random, stage: Stage) -> str:
        if not self.files:
            return "skipped without Pillow"
        stage("read")
        prefetch = rng.choice((0, 2))
        data = ImageFolder("pictures", (8, 8), channels=1, batch_size=1, prefetch=prefetch)
        image_trainer().evaluate(data)
        return "read"


def _damaged_image(image: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(10)
    if kind == 0:
        return rng.choice(OTHERS)
    if kind == 1:
        return _png(rng.choice(SIZES), rng.choice(SIZES), rng)
    return mutated_bytes(image, rng)


def _png(width: int, height: int, rng: random.Random) -> bytes:
    """Return a PNG that declares so many pixels, and holds little."""
    depth, colour = rng.choice(((8, 0), (8, 2), (1, 0), (16, 2), (8, 3), (3, 9)))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(10_000))), (b"IEND", b"")]
    if rng.random() < 0.3:
        chunks.insert(1, (b"zTXt", b"k\0\0" + _long_text()))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


@functools.cache
def _long_text() -> bytes:
    return zlib.compress(bytes(100_000_000))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

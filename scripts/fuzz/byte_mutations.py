"""Damage to a file of any format, and the awkward values that damage is made with."""

from __future__ import annotations

import random

INTEGERS = (
    -1, 0, 1, 2, 3, 7, -2, 13, 64, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63),
)  # fmt: skip
NUMBERS = (0.0, -1.0, 0.5, 1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
WORDS = (
    "", "x", "y", "train/loss", "sample_weight", "../../etc/passwd", "ä\u202e\0", "a" * 3000, "ai.onnx", "com.microsoft", "%n%s", "loss",
)  # fmt: skip
# bytes that are sizes and lengths to whoever reads them as numbers
LIMITS = (b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\xff\xff\xff\xff", b"\xfe\xdc\x00\xff")


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with bits flipped, bytes changed, pieces cut, repeated or inserted."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        index = rng.randrange(len(result)) if result else 0
        kind = rng.randrange(7)
        if not result:
            return bytes(rng.randbytes(rng.randrange(50)))
        if kind == 0:
            result[index] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[index] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del result[index : index + rng.choice((1, 2, 8, 100))]
        elif kind == 3 and rng.random() < 0.3:
            del result[index:]
        elif kind == 4:
            other = rng.randrange(len(result))
            result[index:index] = result[other : other + rng.choice((1, 4, 30, 300))]
        elif kind == 5:
            result[index : index + 4] = rng.choice(LIMITS)
        else:
            result[index:index] = rng.randbytes(rng.choice((1, 3, 9)))
    return bytes(result)

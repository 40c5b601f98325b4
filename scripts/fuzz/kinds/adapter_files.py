"""Adapter files of onnxruntime, whose offsets may point anywhere."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import ClassVar

from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import INTEGERS, mutated_bytes
from scripts.fuzz.kinds.adapter_folders import use_adapters
from scripts.fuzz.sandbox import PATHS


class AdapterFiles(Attempt):
    share: ClassVar[int] = 6
    own: ClassVar[tuple[str, ...]] = ("own", "own/*")

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = "lora"
        self.main = "damaged.onnx_adapter"
        self.files[self.main] = _damaged(originals[self.main], rng)

    def run(self, rng: random.Random, stage: Stage) -> str:
        return use_adapters(self.main, rng, stage)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return mutated_bytes(data, rng)
    if kind == 1:
        return _renamed(data, rng)
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        _set_number(result, rng)
    return bytes(result)


def _renamed(data: bytes, rng: random.Random) -> bytes:
    """Replace the beginning of some names by other text, of the same length."""
    words = [path.encode() for path in PATHS] + [b"\0" * 10, b"fc1.weight", b"\xff" * 10]
    for old in (b"fc0.weight", b"fc1.weight", b".lora_A", b".lora_B"):
        if rng.random() < 0.4:
            new = rng.choice((*words, b".lora_A", b".lora_B"))
            data = data.replace(old, new[: len(old)].ljust(len(old), b"x"), rng.choice((1, 9)))
    return data


def _set_number(data: bytearray, rng: random.Random) -> None:
    """Replace an aligned integer: an offset, a length, a size or a type; in place."""
    size, form = rng.choice(((2, "<h"), (4, "<i"), (4, "<i"), (8, "<q")))
    place = rng.randrange(0, len(data) - size, size)
    (old,) = struct.unpack_from(form, data, place)
    new = rng.choice((*INTEGERS, len(data), old + 1, old - 1, old + 4, old - 4, 2 * old, -old))
    half = 1 << (8 * size - 1)
    struct.pack_into(form, data, place, (new + half) % (2 * half) - half)

"""protobuf's form of messages: fields, each with a number, a type and a value.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Union

# Numbers of fields in onnx.proto
GRAPH_OF_MODEL = 7
INITIALIZER_OF_GRAPH = 5
DATA_TYPE_OF_TENSOR = 2
RAW_DATA_OF_TENSOR = 9
EXTERNAL_FIELDS = {13, 14}
# Wire types
NUMBER = 0
EIGHT_BYTES = 1
LENGTH_DELIMITED = 2
FOUR_BYTES = 5

Buffer = Union[bytes, mmap.mmap]
Field = tuple[int, int, int, int, int]  # number, wire type, start, start of the value, end


def fields(data: Buffer, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of a message in `data[start:end]`. ValueError: the message is damaged."""
    while start < end:
        key, value = _read_varint(data, start, end)
        number, kind = key >> 3, key & 7
        if kind == NUMBER:
            _, stop = _read_varint(data, value, end)
        elif kind == EIGHT_BYTES:
            stop = value + 8
        elif kind == LENGTH_DELIMITED:
            length, value = _read_varint(data, value, end)
            stop = value + length
        elif kind == FOUR_BYTES:
            stop = value + 4
        else:
            raise ValueError("a field has an unknown wire type")
        if stop > end:
            raise ValueError("a field ends after the end of the message")
        yield number, kind, start, value, stop
        start = stop


def _read_varint(data: Buffer, start: int, end: int) -> tuple[int, int]:
    """Return a number, and the position of its end."""
    number = 0
    for i in range(start, min(start + 10, end)):
        number |= (data[i] & 127) << 7 * (i - start)
        if data[i] < 128:
            return number, i + 1
    raise ValueError("a number has no last byte")


def field_key(number: int) -> bytes:
    """Return the beginning of a field with bytes or a message of the next `varint` bytes."""
    return bytes([number << 3 | LENGTH_DELIMITED])


def varint(number: int) -> bytes:
    """Return a number >= 0 in groups of 7 bits."""
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])

"""SHA-256 of data, by which a trained file says what it was trained on.

An array is hashed as the training step reads it: in the element type and the shape of the graph's
input, rows in the order of the data, elements in C order and little-endian. Its rows are divided
into at most 32 blocks, so that a comparison can say which rows differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.data.batch import Columns

Array = npt.NDArray[Any]
# Name of an array -> its "type", "shape", "sha256", and the first digits of the hash of each block
Content = dict[str, dict[str, Any]]

BLOCKS = 32  # at most, of an array
BLOCK_DIGITS = 16  # hexadecimal digits of a block's hash
MAX_HASHED_BYTES = 1 << 30  # larger data is not hashed, which would take longer than a second


def content_of(rows: int, block: Callable[[slice], tuple[Columns, Columns]]) -> Content:
    """Return the hashes of data.

    - `rows`: the number of rows.
    - `block`: a function from some rows to their columns, and to the arrays without rows.
    """
    digests: dict[str, list[str]] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    scalars: Columns = ()
    for start, stop in _bounds(rows):
        columns, scalars = block(slice(start, stop))
        for name, array in columns:
            digests.setdefault(name, []).append(hash_of(array))
            described.setdefault(name, (array.dtype.name, (rows, *array.shape[1:])))
    for name, array in scalars:
        digests[name], described[name] = [hash_of(array)], (array.dtype.name, array.shape)
    return {name: _entry(*described[name], found) for name, found in digests.items()}


def given_content(data: object) -> Content | None:
    """Return the hash that data states in its attribute `content_hash`, or None."""
    given = getattr(data, "content_hash", None)
    if not isinstance(given, str):
        return None
    return {"content_hash": {"type": "given", "shape": [], "sha256": given, "blocks": []}}


def hash_of(array: Array) -> str:
    """Return the SHA-256 of an array's bytes, in C order and little-endian."""
    data = np.ascontiguousarray(array)
    data = data if data.dtype.kind == "V" else data.astype(data.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(data.reshape(-1).view(np.uint8).data).hexdigest()


def digest_of(content: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one hash for the hashes of several arrays, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(f"{len(name)} {name} {content[name]['sha256']}\n".encode())
    return digest.hexdigest()


def differences(found: Content, expected: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each array that differs: its type, its shape, or its rows."""
    problems = []
    for name, one in expected.items():
        other, what = found.get(name), _input_in_words(name)
        if other is None:
            problems.append(f"{what} is missing.")
        elif (other["type"], [*other["shape"]]) != (one["type"], [*one["shape"]]):
            problems.append(
                f"{what} is {other['type']}{[*other['shape']]}, expected"
                f" {one['type']}{[*one['shape']]}."
            )
        elif other["sha256"] != one["sha256"]:
            problems.append(f"{what} differs{_places(other['blocks'], one)}.")
    return [
        *problems,
        *(f"{_input_in_words(n)} was not there." for n in found if n not in expected),
    ]


def _input_in_words(name: str) -> str:
    """Return the words for a graph input in a message."""
    label = name.removeprefix("y_true/")
    return f"the array {name!r} of the data" if label == name else f"the array of labels {label!r}"


def _places(found: Sequence[str], expected: Mapping[str, Any]) -> str:
    """Return in words which rows differ."""
    blocks = expected["blocks"]
    if len(found) != len(blocks) or len(blocks) < 2:
        return ""
    wrong: list[tuple[int, int]] = []  # neighbouring blocks as one
    for (start, stop), own, one in zip(_bounds(expected["shape"][0]), found, blocks):
        if own != one:
            first = wrong.pop()[0] if wrong and wrong[-1][1] == start else start
            wrong.append((first, stop))
    if wrong == [(0, expected["shape"][0])]:
        return " in all parts"
    named = [f"{a} to {b - 1}" if b - a > 1 else f"{a}" for a, b in wrong[:5]]
    more = " and further ones" if len(wrong) > 5 else ""
    return f" in the rows {', '.join(named)}{more}"


def _bounds(rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block, and the row after its last."""
    size = max(-(-rows // BLOCKS), 1)
    return ((start, min(start + size, rows)) for start in range(0, rows, size))


def _entry(kind: str, shape: tuple[int, ...], digests: Sequence[str]) -> dict[str, Any]:
    whole = hashlib.sha256(f"{kind} {[*map(int, shape)]} {' '.join(digests)}".encode())
    return {
        "type": kind,
        "shape": [*map(int, shape)],
        "sha256": whole.hexdigest(),
        "blocks": [digest[:BLOCK_DIGITS] for digest in digests],
    }

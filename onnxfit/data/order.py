"""The order of rows in an epoch, and their division into batches."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from onnxfit.checks import check_arguments, shortened
from onnxfit.data.batch import Array
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec

__all__ = ["permutation"]

ANY_BATCH = (
    "To allow any batch size, use onnxfit.dynamic_batch(model), or Trainer(...,"
    " dynamic_batch=True)."
)


# Version of the function `permutation`. A checkpoint from the middle of an epoch stores the version
# that it used; version 1 was NumPy's PCG64.
ORDER_VERSION = 2
# Pairs of a shift and a factor of lowbias32, by C. Wellons (hash-prospector, 2018).
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
LAST_SHIFT = 16
DRAWS = 3  # separates the random numbers of draws from those of images and batches
GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio
WORD = 2**32


@check_arguments
def permutation(seed: int, epoch: int, rows: int, block: int = 0) -> Array:
    """Return the order of rows in an epoch, as an int64 array of shape `(rows,)`.

    The order is a pure function of the arguments, in 32-bit arithmetic that every language has: the
    rows are sorted by a unique hash of their numbers. docs/data.md has the same function in
    JavaScript.

    - `seed`: any integer, taken modulo 2**64.
    - `epoch`: the number of the epoch, from 0; taken modulo 2**64.
    - `rows`: the number of rows, below 2**32.
    - `block`: the number, from 1, of a block of rows that is shuffled on its own; 0 for the whole
      epoch. Taken modulo 2**64.

    SettingError: an argument is not a whole number, `rows` or `block` is below 0, or `rows` is
    2**32 or more.

    >>> permutation(0, 0, 8).tolist()
    [5, 2, 4, 6, 1, 7, 0, 3]
    """
    if not 0 <= rows < WORD or block < 0:
        raise SettingError(
            f"permutation needs 0 <= rows < 2**32 and block >= 0, got {shortened(rows)} and"
            f" {shortened(block)}."
        )
    words = [part for number in (seed, epoch, block) for part in divmod(number % 2**64, WORD)[::-1]]
    first, second = _hash_of_words(0, words), _hash_of_words(1, words)
    bits = np.arange(rows, dtype=np.uint32)
    bits += np.uint32(first)
    _mix(bits)
    bits += np.uint32(second)
    _mix(bits)
    # NumPy sorts 16-bit numbers in linear time: sort by the lower half, then by the upper half.
    by_lower = np.argsort(bits.astype(np.uint16), kind="stable")
    bits >>= np.uint32(16)
    return by_lower[np.argsort(bits.astype(np.uint16)[by_lower], kind="stable")]


def _hash_of_words(start: int, words: Iterable[int]) -> int:
    """Return a hash of whole numbers below 2^32."""
    key = start
    for word in words:
        key = (key + word + GOLDEN) % WORD
        for shift, factor in ROUNDS:
            key = (key ^ key >> shift) * factor % WORD
        key ^= key >> LAST_SHIFT
    return key


def _mix(bits: Array) -> None:
    """Replace uint32 numbers by their lowbias32, an injective hash function."""
    for shift, factor in ROUNDS:
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)
    bits ^= bits >> np.uint32(LAST_SHIFT)


def drawn_rows(chances: Array, seed: int, epoch: int) -> Array:
    """Return the rows of an epoch that draws them at random, with replacement.

    It draws as many rows as there are, and is a pure function of its arguments.

    - `chances`: the chance of each row to be drawn, relative to the others.
    - `seed`, `epoch`: as for `permutation`.
    """
    rng = np.random.default_rng([seed % 2**64, epoch % 2**64, DRAWS])
    bounds = np.cumsum(chances, dtype=np.float64)
    places = np.searchsorted(bounds, rng.random(len(chances)) * bounds[-1], side="right")
    # A product may be rounded up to the sum: the last row with a chance is meant.
    order: Array = np.minimum(places, np.flatnonzero(chances)[-1])
    return order


def batch_indices(
    rows: int,
    size: int,
    steps: int,
    seed: int | None,
    epoch: int,
    skip: int,
    chances: Array | None = None,
) -> Iterator[slice | Array]:
    """Return the rows of each batch of an epoch, without the first `skip` batches.

    They are slices if `seed` is None, and otherwise consecutive parts of the epoch's permutation,
    or of the rows that are drawn with `chances`.
    """
    starts = range(skip * size, steps * size, size)
    if seed is None:
        return (slice(start, min(start + size, rows)) for start in starts)
    if chances is None:
        order = permutation(seed, epoch, rows)
    else:
        order = drawn_rows(chances, seed, epoch)
    return (order[start : start + size] for start in starts)


def count_steps(rows: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of batches in an epoch."""
    return rows // batch_size if drop_last else -(-rows // batch_size)


def checked_batch_size(batch_size: Any) -> int:
    """Return the batch size as an int. SettingError: it is not a whole number >= 1."""
    try:
        size = operator.index(batch_size)
    except TypeError:
        raise SettingError(
            f"batch_size must be a whole number of rows, got {batch_size!r}."
        ) from None
    if size < 1:
        raise SettingError(f"batch_size must be >= 1, got {size}.")
    return size


def check_fixed(
    fixed: TensorSpec | None,
    rows: int,
    batch_size: int,
    drop_last: bool,
    purpose: str,
    loader: str = "DataLoader",
    ranks: int = 1,
) -> None:
    """Raise DataError if batches would differ from a model's fixed batch dimension.

    - `ranks`: processes that share each batch; the batch dimension applies to one share.
    """
    if fixed is None:
        return
    each = fixed.rows
    assert isinstance(each, int)
    if not each:
        raise DataError(
            f"The batch dimension of input {fixed} is 0, so its batches have no rows. Export the"
            " model with a batch dimension of any size, or of at least 1."
        )
    needed = each * ranks
    size = min(batch_size, rows)
    remainder = rows % needed
    if size == needed and (drop_last or not remainder):
        return
    shares = "" if ranks == 1 else f" ({each} for each of {ranks} ranks)"
    if rows < needed:
        needs = "" if ranks == 1 else f", but every batch needs {needed}{shares}"
        raise DataError(
            f"The batch dimension of input {fixed} is fixed, but the {purpose} data has only"
            f" {rows} rows{needs}. {ANY_BATCH}"
        )
    fix = f"Pass batch_size={needed}"
    if remainder:
        arguments = "x, y" if loader == "DataLoader" else "..."
        fix += (
            f", and drop the last {remainder} rows with"
            f" {loader}({arguments}, batch_size={needed}, drop_last=True)"
        )
    raise DataError(
        f"The batch dimension of input {fixed} is fixed: every batch needs {needed} rows{shares},"
        f" but got batches of {size} rows from {rows} rows. {fix}. {ANY_BATCH}"
    )

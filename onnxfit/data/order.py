"""The order of rows in an epoch, and their division into batches."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxfit.data.batch import Array
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec
from onnxfit.registry import check_arguments, shortened

__all__ = ["permutation"]

ANY_BATCH = (
    "For batches of any size: onnxfit.dynamic_batch(model), or Trainer(..., dynamic_batch=True)."
)


@check_arguments
def permutation(seed: int, epoch: int, rows: int, block: int = 0) -> Array:
    """Return the order of rows in an epoch, as an int64 array of shape `(rows,)`.

    The order is a pure function of the arguments.

    - `seed`: any integer, taken modulo 2**64.
    - `epoch`: the number of the epoch, from 0.
    - `rows`: how many rows there are.
    - `block`: the number of a block of rows that is shuffled by itself, from 1; 0 for the epoch as
      a whole.

    SettingError: one of them is no whole number, or `rows` or `block` is below 0.

    >>> permutation(0, 0, 5).tolist() == permutation(0, 0, 5).tolist()
    True
    """
    if not 0 <= rows < 2**63 or block < 0:
        raise SettingError(
            f"permutation needs rows >= 0 and block >= 0, got {shortened(rows)} and"
            f" {shortened(block)}."
        )
    entropy = [seed % 2**64, epoch % 2**64]
    if block:
        entropy.append(block)
    return np.random.Generator(np.random.PCG64(entropy)).permutation(rows)


def batch_indices(
    rows: int, size: int, steps: int, seed: int | None, epoch: int, skip: int
) -> Iterator[slice | Array]:
    """Return the rows of each batch of an epoch, without the first `skip` batches.

    They are slices if `seed` is None, and otherwise consecutive parts of the epoch's permutation.
    """
    starts = range(skip * size, steps * size, size)
    if seed is None:
        return (slice(start, min(start + size, rows)) for start in starts)
    order = permutation(seed, epoch, rows)
    return (order[start : start + size] for start in starts)


def count_steps(rows: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of batches in an epoch."""
    return rows // batch_size if drop_last else -(-rows // batch_size)


def checked_batch_size(batch_size: Any) -> int:
    """Return the batch size as an int. SettingError where it is none, or below 1."""
    try:
        size = operator.index(batch_size)
    except TypeError:
        raise SettingError(f"batch_size is a number of rows, got {batch_size!r}.") from None
    if size < 1:
        raise SettingError(f"batch_size is at least 1, got {size}.")
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
    """DataError where the batches to come differ from a model's fixed batch dimension.

    - `ranks`: processes that share each batch; the batch dimension is that of one share.
    """
    if fixed is None:
        return
    assert fixed.shape is not None
    each = fixed.shape[0]
    assert isinstance(each, int)
    needed = each * ranks
    size = min(batch_size, rows)
    remainder = rows % needed
    if size == needed and (drop_last or not remainder):
        return
    shares = "" if ranks == 1 else f" ({each} for each of {ranks} ranks)"
    if rows < needed:
        needs = "" if ranks == 1 else f", of which every batch needs {needed}{shares}"
        raise DataError(
            f"The batch dimension of input {fixed} is fixed, and the {purpose} data has only"
            f" {rows} rows{needs}. {ANY_BATCH}"
        )
    fix = f"Pass batch_size={needed}"
    if remainder:
        arguments = "x, y" if loader == "DataLoader" else "..."
        fix += (
            f"; drop_last=True leaves out the last {remainder} rows:"
            f" {loader}({arguments}, batch_size={needed}, drop_last=True)"
        )
    raise DataError(
        f"The batch dimension of input {fixed} is fixed: every batch needs {needed} rows{shares},"
        f" and batches of {size} from {rows} rows do not give that. {fix}. {ANY_BATCH}"
    )

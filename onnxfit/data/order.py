"""Which rows make which batch: the order of an epoch, cut into batches of a size that was checked."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxfit.data.batch import Array
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec


def permutation(seed: int, epoch: int, rows: int, block: int = 0) -> Array:
    """The order of rows in an epoch, or in a block of it, counted from 1: a pure function of its
    arguments.
    """
    entropy = [seed % 2**64, epoch % 2**64, block] if block else [seed % 2**64, epoch % 2**64]
    return np.random.Generator(np.random.PCG64(entropy)).permutation(rows)


def batch_indices(
    rows: int, size: int, steps: int, seed: int | None, epoch: int, skip: int
) -> Iterator[slice | Array]:
    """Which rows each batch of a pass has: slices, or parts of the epoch's permutation where there
    is a seed.
    """
    starts = range(skip * size, steps * size, size)
    if seed is None:
        return (slice(start, min(start + size, rows)) for start in starts)
    order = permutation(seed, epoch, rows)
    return (order[start : start + size] for start in starts)


def count_steps(rows: int, batch_size: int, drop_last: bool) -> int:
    return rows // batch_size if drop_last else -(-rows // batch_size)


def check_steps(rows: int, batch_size: int, drop_last: bool, what: str) -> None:
    """DataError where a pass would have no batch."""
    if not count_steps(rows, batch_size, drop_last):
        raise DataError(
            f"drop_last=True leaves nothing of the {what} data: {rows} rows are fewer than"
            f" batch_size={batch_size}."
        )


def checked_batch_size(batch_size: Any) -> int:
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
    what: str,
    loader: str = "DataLoader",
) -> None:
    """DataError where a model's fixed batch dimension and the batches to come differ."""
    if fixed is None:
        return
    assert fixed.shape is not None
    needed = fixed.shape[0]
    assert isinstance(needed, int)
    size, rest = min(batch_size, rows), rows % needed
    if size == needed and (drop_last or not rest):
        return
    if rows < needed:
        raise DataError(
            f"The batch dimension of input {fixed} is fixed, and the {what} data has only {rows}"
            " rows."
        )
    arguments = "x, y" if loader == "DataLoader" else "..."
    call = f"{loader}({arguments}, batch_size={needed}{', drop_last=True' if rest else ''})"
    raise DataError(
        f"The batch dimension of input {fixed} is fixed: every batch needs {needed} rows, and"
        f" batches of {size} from {rows} rows do not give that. Pass batch_size={needed}"
        + (f"; drop_last=True leaves out the last {rest} rows: {call}." if rest else ".")
    )

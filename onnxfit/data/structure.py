"""Dicts and lists of arrays: the arrays they hold, their names, and their number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxfit.errors import DataError, SettingError


def holds_arrays(data: Any) -> bool:
    """Return whether data consists of arrays, as opposed to batches."""
    if isinstance(data, Mapping) or hasattr(data, "__array__") or hasattr(data, "toarray"):
        return True
    return isinstance(data, (list, tuple)) and not (data and all(_is_batch(item) for item in data))


def _is_batch(item: Any) -> bool:
    """Return whether an item of a list is a batch, not an array, a row or a number."""
    return isinstance(item, Mapping) or (
        isinstance(item, tuple) and any(hasattr(element, "__len__") for element in item)
    )


def is_list_of_arrays(data: Any) -> bool:
    """Return whether data is a non-empty list or tuple of arrays."""
    return (
        isinstance(data, (list, tuple))
        and len(data) > 0
        and all(hasattr(item, "__array__") and length_of(item) is not None for item in data)
    )


def by_name(data: Any, names: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the arrays of `data` by name.

    A dict is matched by its keys and a list by its order; a single array belongs to the only name.
    If there are several names, a table is divided into its columns.
    """
    if isinstance(data, Mapping):
        return dict(data)
    if hasattr(data, "columns") and len(names) > 1:
        # In a pyarrow table, `columns` are arrays, and `column_names` their names.
        columns = getattr(data, "column_names", data.columns)
        return {str(column): data[column] for column in columns}
    several = isinstance(data, (list, tuple)) and (len(names) > 1 or is_list_of_arrays(data))
    if not several and len(names) == 1:
        return {names[0]: data}
    if not several or len(data) != len(names):
        got = f"{len(data)} arrays" if several else f"one {type(data).__name__}"
        raise DataError(
            f"Got {got} for {len(names)} {kind}{'s' * (len(names) != 1)}. Pass a dict by name, or a"
            f" list in the order {', '.join(map(repr, names))}."
            + (_hint(data, kind) if len(names) == 1 else "")
        )
    return dict(zip(names, data))


def _hint(data: Sequence[Any], kind: str) -> str:
    """Return what several arrays for one name probably are."""
    if isinstance(data, tuple) and len(data) == 2 and kind == "input":
        return " Pass inputs and targets as two arguments: x, y."
    return " Turn a list of rows into one array with np.stack."


def named_arrays(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every array of a dict or list of arrays, or the array itself, with its name.

    A dict may contain dicts, of the labels of several losses.
    """
    if isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(value, Mapping):
                yield from named_arrays(value, f"{name}[{key!r}]")
            else:
                yield f"{name}[{key!r}]", value
    elif is_list_of_arrays(data):
        for number, value in enumerate(data):
            yield f"{name}[{number}]", value
    else:
        yield name, data


def map_arrays(data: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same dict or list with `function` applied to every array."""
    if isinstance(data, Mapping):
        return {
            name: map_arrays(value, function) if isinstance(value, Mapping) else function(value)
            for name, value in data.items()
        }
    if is_list_of_arrays(data):
        return [function(value) for value in data]
    return function(data)


def common_rows(
    arrays: Iterable[tuple[object, Any]], purpose: str, hint: Callable[[int], str] = lambda rows: ""
) -> int:
    """Return the common number of rows of all pairs (name, array).

    - `hint`: a function from the first number to advice for other numbers.

    DataError: the numbers differ, or there are no rows.
    """
    sizes = [(name, rows) for name, array in arrays if (rows := length_of(array)) is not None]
    if not sizes:
        raise DataError(
            f"The {purpose} data contains no arrays. Expected at least one array with a row for"
            " each sample."
        )
    rows = sizes[0][1]
    if any(size != rows for _, size in sizes):
        raise DataError(
            f"The arrays of the {purpose} data must have the same number of rows, but"
            f" {', '.join(f'{name} has {size}' for name, size in sizes)}.{hint(rows)}"
        )
    if not rows:
        raise DataError(f"The {purpose} data is empty: it has 0 rows.")
    return rows


def select_rows(value: Any, index: Any) -> Any:
    """Return some rows of an array or table. A value without rows is returned unchanged."""
    if length_of(value) is None:
        return value
    return value.iloc[index] if hasattr(value, "iloc") else value[index]


def length_of(data: Any) -> int | None:
    """Return the length of data, or None if it has no length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def split_validation_data(data: Any) -> tuple[Any, Any, Any]:
    """Return validation_data as x, y, sample_weight, from a tuple or list of arrays or a loader."""
    is_arrays = isinstance(data, list) and len(data) in (2, 3)
    is_arrays = is_arrays and all(isinstance(array, np.ndarray) for array in data)
    if not (isinstance(data, tuple) or is_arrays):
        return data, None, None
    if len(data) not in (2, 3):
        raise SettingError(
            "validation_data must be (x, y), (x, y, sample_weight) or a loader, got a tuple of"
            f" {len(data)} items."
        )
    return data[0], data[1], data[2] if len(data) == 3 else None

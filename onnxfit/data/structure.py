"""Dicts and lists of arrays: which arrays they hold, under which names, and how many rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnxfit.errors import DataError


def holds_arrays(data: Any) -> bool:
    """Whether data is in memory as arrays, and not something that gives batches."""
    if isinstance(data, Mapping) or hasattr(data, "__array__") or hasattr(data, "toarray"):
        return True
    return isinstance(data, (list, tuple)) and not (data and all(_is_batch(item) for item in data))


def _is_batch(item: Any) -> bool:
    """Whether an item of a list is a batch, and not an array, a row or a number."""
    return isinstance(item, Mapping) or (
        isinstance(item, tuple) and any(hasattr(part, "__len__") for part in item)
    )


def is_list_of_arrays(data: Any) -> bool:
    return (
        isinstance(data, (list, tuple))
        and len(data) > 0
        and all(hasattr(item, "__array__") and length_of(item) is not None for item in data)
    )


def by_name(data: Any, names: Sequence[str], kind: str) -> dict[str, Any]:
    """Dicts by name, lists by order, an array for the only one; a table for several is taken by its
    columns.
    """
    if isinstance(data, Mapping):
        return dict(data)
    if hasattr(data, "columns") and len(names) > 1:
        return {
            str(column): data[column] for column in getattr(data, "column_names", data.columns)
        }  # pyarrow's columns are no names
    several = isinstance(data, (list, tuple)) and (len(names) > 1 or is_list_of_arrays(data))
    if not several and len(names) == 1:
        return {names[0]: data}
    if not several or len(data) != len(names):
        given = f"{len(data)} arrays" if several else f"one {type(data).__name__}"
        raise DataError(
            f"{given} for {len(names)} {kind}{'s' * (len(names) != 1)}: pass a dict by name or a"
            f" list in the order {', '.join(map(repr, names))}."
            + (" Rows in a list go through np.stack." if len(names) == 1 else "")
        )
    return dict(zip(names, data))


def leaves_of(data: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every array of a dict or list of arrays, and where it stands."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield f"{place}[{name!r}]", value
    elif is_list_of_arrays(data):
        for number, value in enumerate(data):
            yield f"{place}[{number}]", value
    else:
        yield place, data


def map_arrays(data: Any, function: Callable[[Any], Any]) -> Any:
    """The same dict or list with every array replaced."""
    if isinstance(data, Mapping):
        return {name: function(value) for name, value in data.items()}
    return [function(value) for value in data] if is_list_of_arrays(data) else function(data)


def common_rows(arrays: Iterable[tuple[object, Any]], what: str) -> int:
    """The number of rows that all of (place, array) share.

    DataError where they differ or there are none.
    """
    sizes = [(place, rows) for place, array in arrays if (rows := length_of(array)) is not None]
    if not sizes:
        raise DataError(f"The {what} data has no array with rows.")
    rows = sizes[0][1]
    if any(size != rows for _, size in sizes):
        raise DataError(
            f"The {what} data has unequal numbers of rows:"
            f" {', '.join(f'{place} has {size}' for place, size in sizes)}."
        )
    if not rows:
        raise DataError(f"The {what} data is empty: 0 rows.")
    return rows


def rows_of(value: Any, index: Any) -> Any:
    """Some rows of an array or table; what has no rows stays."""
    if length_of(value) is None:
        return value
    return value.iloc[index] if hasattr(value, "iloc") else value[index]


def length_of(data: Any) -> int | None:
    """The length of what has one."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None

"""What the loop sees: batches, and the sources they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from onnxfit.errors import DataError, SettingError

Array = npt.NDArray[Any]
Columns = tuple[tuple[str, Array], ...]


class Target(Protocol):
    """What an output's labels need: the graph input they enter by, and how its loss wants them."""

    @property
    def input(self) -> str: ...

    def prepare(self, y: Array) -> Array: ...


@dataclass(slots=True, eq=False)
class Batch:
    """Some rows of the data. Nothing is copied before `write` or `arrays`.

    `signature` is equal for two batches of the same names, types and shapes. It is a string,
    because a string remembers its hash.
    """

    rows: int
    signature: str
    columns: Columns  # the arrays that have rows, of which `index` selects this batch's
    scalars: Columns  # inputs of rank 0, the same for every row
    index: slice | Array

    def arrays(self) -> dict[str, Array]:
        """Graph input -> array, of exactly this batch's rows."""
        return {name: array[self.index] for name, array in self.columns} | dict(self.scalars)

    def write(self, buffers: Mapping[str, Array]) -> None:
        """Copy every array that has a buffer of its name, of its shape and type, into that."""
        index = self.index
        if isinstance(index, slice):
            for name, array in self.columns:
                if name in buffers:
                    buffers[name][...] = array[index]
        else:
            for name, array in self.columns:
                if name in buffers:
                    # "clip" lets numpy write without a buffer of its own; no index is out of range
                    array.take(index, 0, buffers[name], "clip")
        for name, array in self.scalars:
            if name in buffers:
                buffers[name][...] = array


class Source(ABC):
    """Where batches come from: `batches(epoch)` is one pass over the data.

    `steps` (batches in a pass), `rows` and `batch_size` are None where only the data can tell.
    `re_iterable` is False for what can be passed over once.
    """

    what: str
    rows: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    re_iterable: bool = True

    @abstractmethod
    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of pass number `epoch`, which decides the order of rows, without the first
        `skip`.
        """

    def require_re_iterable(self, passes: int) -> None:
        """DataError where more than one pass is asked of data that can be passed over once."""
        if passes > 1 and not self.re_iterable:
            raise DataError(
                f"The {self.what} data is an iterator, which can be passed over once, and {passes}"
                f" epochs need {passes} passes. Pass something that can be iterated anew: the"
                " function that returns the generator (fit(batches), not fit(batches())), a list"
                " of batches, or an onnxfit.DataLoader. Or set steps_per_epoch."
            )

    def with_batch_size(self, batch_size: int, drop_last: bool | None = None) -> Source:
        """The same data in batches of another size;

        `drop_last` None: as they are. SettingError where they come in batches already.
        """
        raise SettingError(
            f"The batch size of the {self.what} data cannot be chosen, as they come in batches:"
            " pass arrays, a DataLoader or a loader of files."
        )

    def close(self) -> None:  # noqa: B027  most sources hold nothing
        """End what runs in the background."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


S = TypeVar("S", bound=Source)
It = TypeVar("It", bound=Iterator[Any])


@contextmanager
def ended(iterator: It) -> Iterator[It]:
    """The iterator, which is closed in the end if it is a generator; one of the caller's own comes
    as an islice, which leaves it open.
    """
    try:
        yield iterator
    finally:
        end = getattr(iterator, "close", None)
        if callable(end):
            end()

"""Values that are other values in another order: transposed, reshaped, sliced.

An operator that reads a view needs no copy of it. Each axis of a view consists of parts, which have
a size and a stride each: if axes are joined and then moved, each of them stays a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Part(NamedTuple):
    """Elements of an array that are `stride` apart."""

    size: int
    stride: int


Axis = tuple[Part, ...]  # the outermost part first; an axis of size 1 has none


@dataclass(frozen=True)
class View:
    """scale source[offset + sum of index stride], where each part of each axis has an index."""

    source: str
    axes: tuple[Axis, ...]
    offset: int = 0
    scale: float = 1.0

    @classmethod
    def whole(cls, source: str, shape: Sequence[int]) -> View:
        """Return the view that is its source.

        >>> View.whole("x", (2, 3)).axes
        ((Part(size=2, stride=3),), (Part(size=3, stride=1),))
        """
        return cls(source, tuple(map(axis_of, shape, strides_of(shape))))

    def permuted(self, order: Sequence[int]) -> View:
        return replace(self, axes=tuple(self.axes[i] for i in order))

    def scaled(self, number: float) -> View:
        return replace(self, scale=self.scale * number)

    def reshaped(self, shape: Sequence[int]) -> View | None:
        """Return the same elements with another shape; None if it cuts through a part.

        >>> View.whole("x", (6,)).reshaped((3, 2)).permuted((1, 0)).axes
        ((Part(size=2, stride=1),), (Part(size=3, stride=2),))
        """
        parts = [part for axis in self.axes for part in axis]
        axes: list[Axis] = []
        for size in reversed(shape):
            axis: list[Part] = []
            while size > 1:
                part = parts.pop()
                inner = math.gcd(part.size, size)
                if inner < min(part.size, size):
                    return None
                outer = Part(part.size // inner, part.stride * inner)
                parts += [outer] if outer.size > 1 else []
                axis.insert(0, Part(inner, part.stride))
                size //= inner
            axes.insert(0, tuple(axis))
        return replace(self, axes=tuple(axes))

    def sliced(self, axis: int, start: int, size: int) -> View | None:
        """Return `size` indices of an axis from `start` on; None if it has several parts."""
        parts = self.axes[axis]
        if len(parts) > 1:
            return None
        stride = parts[0].stride if parts else 0
        axes = (*self.axes[:axis], axis_of(size, stride), *self.axes[axis + 1 :])
        return replace(self, axes=axes, offset=self.offset + start * stride)


def axis_of(size: int, stride: int) -> Axis:
    return (Part(size, stride),) if size > 1 else ()


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides of an array in whose memory no other elements lie."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


class Loop(NamedTuple):
    """An index of several arrays at once. `strides` has the distance of its elements in each."""

    size: int
    strides: tuple[int, ...]


def loops_over(axes: Sequence[Axis]) -> list[Loop] | None:
    """Return the loops over an axis of one size that several views have, the outermost one first.

    They are None if the parts of one view cut through those of another.

    >>> loops_over([(Part(4, 3), Part(3, 1)), (Part(12, 5),)])
    [Loop(size=4, strides=(3, 15)), Loop(size=3, strides=(1, 5))]
    """
    rest = [list(axis) for axis in axes]
    loops: list[Loop] = []
    while all(rest):
        parts = [each.pop() for each in rest]
        size = min(part.size for part in parts)
        if any(part.size % size for part in parts):
            return None
        for each, part in zip(rest, parts):
            outer = Part(part.size // size, part.stride * size)
            each += [outer] if outer.size > 1 else []
        loops.insert(0, Loop(size, tuple(part.stride for part in parts)))
    return loops


def joined(loops: Iterable[Loop]) -> list[Loop]:
    """Return as few loops as possible.

    >>> joined([Loop(2, (12, 0)), Loop(3, (4, 0)), Loop(4, (1, 1))])
    [Loop(size=6, strides=(4, 0)), Loop(size=4, strides=(1, 1))]
    """
    result: list[Loop] = []
    for loop in loops:
        if result and result[-1].strides == tuple(loop.size * stride for stride in loop.strides):
            loop = Loop(result.pop().size * loop.size, loop.strides)
        result.append(loop)
    return result

"""Views name the elements of their source that numpy's operations would copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from onnxfit.kernels.views import Loop, Part, View, joined, loops_over


def elements(view: View, source: np.ndarray) -> np.ndarray:
    """The elements of a view, each of them by its own index."""
    flat = source.reshape(-1)
    offsets = [
        [
            sum(i * part.stride for i, part in zip(indices, axis, strict=True))
            for indices in itertools.product(*(range(part.size) for part in axis))
        ]
        for axis in view.axes
    ]
    shape = [len(axis) for axis in offsets]
    places = [view.offset + sum(each) for each in itertools.product(*offsets)]
    return view.scale * flat[places].reshape(shape)


def divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def random_shape(rng: np.random.Generator, size: int) -> list[int]:
    """A shape of this size in all."""
    shape = []
    while size > 1 or len(shape) < 2:
        shape.append(int(rng.choice(divisors(size))))
        size //= shape[-1]
    return shape


@pytest.mark.parametrize("seed", range(60))
def test_a_chain_of_operations_names_the_elements_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    array = np.arange(144.0)
    array = array.reshape(random_shape(rng, 144))
    source, view = array, View.whole("x", array.shape)
    for _ in range(6):
        match rng.integers(4):
            case 0:
                order = rng.permutation(array.ndim)
                array, changed = array.transpose(order), view.permuted(order)
            case 1:
                shape = random_shape(rng, array.size)
                changed = view.reshaped(shape)
                array = array.reshape(shape) if changed else array
            case 2:
                axis = int(rng.integers(array.ndim))
                start = int(rng.integers(array.shape[axis]))
                size = int(rng.integers(1, array.shape[axis] - start + 1))
                changed = view.sliced(axis, start, size)
                array = array.take(range(start, start + size), axis) if changed else array
            case _:
                array, changed = array * 2, view.scaled(2)
        view = changed or view
        np.testing.assert_array_equal(elements(view, source), array)


def test_axes_that_were_joined_can_be_moved_and_parted_again() -> None:
    """As the heads of an attention."""
    heads = View.whole("x", (5, 7, 3, 2)).permuted((0, 2, 1, 3))
    batch = heads.reshaped((15, 7, 2))
    assert batch is not None
    moved = batch.permuted((0, 2, 1)).reshaped((5, 3, 2, 7))
    assert moved == heads.permuted((0, 1, 3, 2))


def test_a_shape_that_cuts_through_a_part_has_no_view() -> None:
    assert View.whole("x", (4, 6)).permuted((1, 0)).reshaped((4, 6)) is None
    assert View.whole("x", (4, 6)).reshaped((8, 3)) is not None


@pytest.mark.parametrize("sizes", [(12,), (3, 4), (2, 2, 3), (6, 2)])
@pytest.mark.parametrize("others", [(12,), (4, 3), (3, 4), (2, 6)])
def test_loops_visit_the_elements_of_all_axes_in_their_order(
    sizes: Sequence[int], others: Sequence[int]
) -> None:
    rng = np.random.default_rng(0)
    axes = [
        tuple(Part(size, int(stride)) for size, stride in zip(parts, rng.integers(0, 9, 3)))
        for parts in (sizes, others)
    ]
    loops = loops_over(axes)
    if loops is None:
        return
    assert math.prod(loop.size for loop in loops) == 12
    for i, axis in enumerate(axes):
        view = View("", (tuple(Part(loop.size, loop.strides[i]) for loop in loops),))
        numbers = np.arange(200.0)
        expected = elements(View("", (axis,)), numbers)
        np.testing.assert_array_equal(elements(view, numbers), expected)
    fewer = joined(loops)
    assert len(fewer) <= len(loops)
    assert joined(fewer) == fewer


def test_parts_that_cut_through_each_other_have_no_loops() -> None:
    assert loops_over([(Part(3, 4), Part(4, 1)), (Part(4, 3), Part(3, 1))]) is None


def test_loops_are_joined_if_they_are_one_in_every_array() -> None:
    assert joined([Loop(2, (12, 6)), Loop(3, (4, 2))]) == [Loop(6, (4, 2))]
    assert len(joined([Loop(2, (12, 7)), Loop(3, (4, 2))])) == 2

"""The cache of graphs compiled for shapes: exact ones first, then one for any size."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfit.errors import GradientError
from onnxfit.graph.spec import TensorSpec
from onnxfit.runtime.backends.shape_cache import (
    MAX_EXACT_SHAPES,
    MAX_EXACT_SHAPES_WITHOUT_ANY_SIZE,
    MAX_SIGNATURES,
    ShapeCache,
    Specs,
    without_sizes,
)

FLOAT = np.dtype(np.float32)


class Compiler:
    """Compiles "objects" that are the shapes they are for, and counts."""

    def __init__(self, any_size: bool = True, **settings: bool) -> None:
        self.cache: ShapeCache[object] = ShapeCache(**settings)
        self.any_size = any_size
        self.compiled: list[object] = []

    def compile(self, specs: Specs) -> object:
        shape = specs["x"].shape
        assert shape is not None
        if not self.any_size and not all(isinstance(size, int) for size in shape):
            raise GradientError("needs known sizes")
        self.compiled.append(shape)
        return shape

    def __call__(self, *shape: int) -> object:
        """The object for a batch of this shape."""
        found = self.cache.get(shape)
        if found is None:
            specs = {"x": TensorSpec("x", FLOAT, shape)}
            found = self.cache.compile(
                shape, specs, lambda: {"x": without_sizes(specs["x"], None)}, self.compile
            )
        assert self.cache.get(shape) is found
        return found


def test_exact_shapes_first_then_one_for_any_size() -> None:
    compiler = Compiler()
    for _ in range(2):
        assert [compiler(rows, 3) for rows in range(MAX_EXACT_SHAPES + 3)] == [
            *((rows, 3) for rows in range(MAX_EXACT_SHAPES)),
            *[("batch", None)] * 3,
        ]
    assert len(compiler.compiled) == MAX_EXACT_SHAPES + 1


def test_a_cleared_cache_compiles_again() -> None:
    compiler = Compiler()
    shapes = range(MAX_EXACT_SHAPES + 1)
    first = [compiler(rows, 3) for rows in shapes]
    compiler.cache.clear()
    assert compiler.cache.get((0, 3)) is None
    assert [compiler(rows, 3) for rows in shapes] == first
    assert len(compiler.compiled) == 2 * len(first)


def test_another_rank_has_an_object_of_its_own() -> None:
    compiler = Compiler(only_any_size=True)
    assert [compiler(2, 3), compiler(2), compiler(4, 5), compiler()] == [
        ("batch", None),
        ("batch",),
        ("batch", None),
        (),
    ]
    assert len(compiler.compiled) == 3


def test_without_one_for_any_size_the_oldest_is_dropped() -> None:
    compiler = Compiler(any_size=False)
    most = MAX_EXACT_SHAPES_WITHOUT_ANY_SIZE
    for rows in range(most + 2):
        assert compiler(rows) == (rows,)
    assert [*compiler.cache.exact] == [(rows,) for rows in range(2, most + 2)]
    assert compiler.cache.get((0,)) is None
    assert compiler(0) == (0,)
    assert compiler.compiled.count((0,)) == 2


def test_a_cache_does_not_grow_with_the_signatures() -> None:
    compiler = Compiler()
    for rows in range(2 * MAX_SIGNATURES):
        compiler(rows)
        assert len(compiler.cache._by_signature) <= MAX_SIGNATURES
    assert compiler(1) == (1,)  # an exact one is found again
    assert len(compiler.compiled) == MAX_EXACT_SHAPES + 1


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_what_is_compiled_in_a_trial_is_discarded(error: type[BaseException] | None) -> None:
    compiler = Compiler()
    kept = compiler(1)

    def trial() -> None:
        with compiler.cache.discarding():
            for rows in range(MAX_EXACT_SHAPES + 2):
                compiler(rows)
            assert compiler.cache.any_size
            if error:
                raise error

    if error:
        with pytest.raises(error):
            trial()
    else:
        trial()
    assert [*compiler.cache.exact] == [(1,)]
    assert not compiler.cache.any_size
    assert compiler.cache.get((1,)) is kept
    assert compiler.cache.get((0,)) is None
    assert compiler.cache.get((MAX_EXACT_SHAPES + 1,)) is None


def test_the_sizes_that_a_model_declares_are_kept() -> None:
    spec = TensorSpec("x", FLOAT, (5, 3))
    declared = TensorSpec("x", FLOAT, ("rows", 3))
    assert without_sizes(spec, declared) == declared
    assert without_sizes(spec, TensorSpec("x", FLOAT, None)).shape == ("batch", None)

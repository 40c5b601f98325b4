"""Random numbers by seed, step and stream."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfit.graph import random
from onnxfit.graph.random import normal, uniform
from onnxfit.graph.values import GraphBuilder
from onnxfit.step.finish import finish
from tests.graph.graphs import empty

MASK = 2**64 - 1


@cache
def session(*arguments: Any) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        graph(*arguments).SerializeToString(), providers=["CPUExecutionProvider"]
    )


def graph(shape: tuple[int | str, ...], stream: int = 0, function: Any = uniform) -> Any:
    """Return the graph of the numbers of a stream, for an array of these sizes."""
    op, (x, s, t) = empty(("x", np.float32, shape), ("seed", np.int64, ()), ("step", np.int64, ()))
    op.output("u", function(op, op.shape(x), s, t, stream))
    return finish(op)


def draw(
    seed: int, step: int, stream: int = 0, shape: tuple[int, ...] = (64, 1000),
    function: Any = uniform, static: bool = False,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Draw numbers; `static` says whether the graph knows the sizes."""
    sizes = shape if static else tuple(f"n{i}" for i in range(len(shape)))
    made = session(sizes, stream, function)
    feeds = {"x": np.zeros(shape, np.float32), "seed": np.array(seed), "step": np.array(step)}
    taken = {value.name for value in made.get_inputs()}
    (u,) = made.run(None, {name: value for name, value in feeds.items() if name in taken})
    assert isinstance(u, np.ndarray)
    return u


def in_python(seed: int, step: int, stream: int, index: int) -> float:
    """Return one number by whole numbers of Python, which never round."""

    def signed(x: int, bits: int) -> int:
        return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)

    def shifted(x: int, bits: int, places: int) -> int:
        """Divide by 2^places and round towards 0."""
        x = signed(x, bits)
        return x >> places if x >= 0 else -(-x >> places)

    row, column = divmod(index, 1024)
    total = 0
    for lane in range(8):
        x = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 0xC8E4FD154CE32F6D
        x += stream * 0x94D049BB133111EB + lane * 0xD6E8FEB86659FD93
        x = (x + shifted(x, 64, 32)) * 0xFF51AFD7ED558CCD
        x = (x + shifted(x, 64, 29)) * 0xC4CEB9FE1A85EC53
        a = row * 0x9E3779B9 + shifted(x, 64, 32)
        a = (a + shifted(a, 32, 16)) * 0x7FEB352D
        a = (a + shifted(a, 32, 15)) * 0x846CA68B
        b = (lane * 1024 + column + 1) * 0x9E3779B97F4A7C15 & MASK
        b = (b ^ b >> 30) * 0xBF58476D1CE4E5B9 & MASK
        b = (b ^ b >> 27) * 0x94D049BB133111EB & MASK
        b = ((b ^ b >> 31) >> 53) - 1024
        total += shifted(a, 32, 21) * (b | 1 if lane == 0 else b)
    return total % 2**18 / 2**18


@pytest.mark.parametrize("seed", [0, 9, -1, 2**63 - 1])
@pytest.mark.parametrize(("step", "stream"), [(0, 0), (5, 2), (10**9, 40)])
def test_the_numbers_are_those_of_exact_arithmetic(seed: int, step: int, stream: int) -> None:
    u = draw(seed, step, stream, (3, 800)).ravel()
    indices = [0, 1, 2, 777, 1023, 1024, 1025, 2047, 2048, 2399]
    assert u[indices].tolist() == [in_python(seed, step, stream, i) for i in indices]


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 4), (2, 512), (5, 7, 41)])
def test_known_sizes_and_the_reference_give_the_same(shape: tuple[int, ...]) -> None:
    u = draw(3, 4, 1, shape)
    assert u.shape == shape
    assert np.array_equal(u, draw(3, 4, 1, shape, static=True))
    assert np.array_equal(u.ravel(), draw(3, 4, 1, (4000,))[: u.size])
    x = np.zeros(shape, np.float32)
    feeds = {"x": x, "seed": np.array(3), "step": np.array(4)}
    with np.errstate(over="ignore"):
        (expected,) = ReferenceEvaluator(graph(("N",) * len(shape), 1)).run(None, feeds)
    assert np.array_equal(u, expected)


def test_factors_are_exact_in_tf32_and_products_in_float32() -> None:
    columns = random._columns().astype(float)
    assert np.array_equal(columns, np.round(columns))
    assert np.abs(columns).max() <= 1024
    assert np.abs(columns).sum(0).max() * 1024 < 2**24


class TestRandom:
    def test_uniform_on_the_unit_interval(self) -> None:
        u = draw(0, 0).ravel()
        assert u.min() >= 0
        assert u.max() < 1
        assert 60 < _chi2(u, 100) < 145  # 99 degrees of freedom: 0.1 % and 99.9 % quantiles
        lower = u * 2**9 % 1  # the lower half of the bits
        assert 30 < _chi2(lower, 64) < 110  # 63 degrees of freedom

    def test_neighbours_are_uncorrelated(self) -> None:
        first, second = draw(3, 10), draw(3, 11)
        draws = [first, second, draw(4, 10), draw(3, 10, 1)]
        draws += [np.roll(first, places) for places in (1, 2, 1000, 1023, 1024, 1025)]
        correlation = np.corrcoef([d.ravel() for d in draws]) - np.eye(len(draws))
        assert np.abs(correlation).max() < 5 / np.sqrt(first.size)

    def test_pairs_fill_the_square(self) -> None:
        """Neighbours are independent, not only uncorrelated."""
        first = draw(3, 10).ravel()
        others = [draw(3, 11), draw(4, 10), draw(3, 10, 1)]
        others += [np.roll(first, places) for places in (1, 1000, 1024)]
        for other in others:
            cells = np.floor(first * 16) * 16 + np.floor(other.ravel() * 16)
            assert 165 < _chi2(cells / 256, 256) < 345  # 255 degrees of freedom, 1e-5 quantiles

    def test_rows_and_columns_drop_at_the_rate(self) -> None:
        masks = np.concatenate([draw(1, step, shape=(20, 1024)) < 0.1 for step in range(20)])
        for axis in (0, 1):
            kept = masks.sum(axis)
            count = masks.shape[axis]
            deviations = (kept - 0.1 * count) / np.sqrt(0.09 * count)
            assert np.abs(deviations).max() < 5
            assert 0.85 < deviations.var() < 1.15

    def test_columns_are_independent_in_pairs(self) -> None:
        masks = np.concatenate([draw(2, step, shape=(60, 1024)) < 0.5 for step in range(20)])
        scaled = 2.0 * masks - 1
        products = scaled.T @ scaled / np.sqrt(len(masks))
        pairs = products[np.triu_indices(1024, 1)]
        assert np.abs(pairs).max() < 6
        assert 0.98 < pairs.std() < 1.02

    def test_a_function_of_seed_step_and_stream(self) -> None:
        assert np.array_equal(draw(1, 2), draw(1, 2))
        keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0), (2**40, 7, 3)]
        assert len({draw(*key, shape=(1, 4)).tobytes() for key in keys}) == len(keys)

    def test_every_bit_depends_on_every_bit_of_the_key(self) -> None:
        """A changed bit of seed or step changes half of the bits of the numbers."""
        shape = (40, 1024)
        numbers = (draw(1234567, 89, shape=shape).ravel() * 2**18).astype(np.uint32)
        keys = [(1234567 ^ 2**bit, 89) for bit in (0, 20, 40, 62)]
        keys += [(1234567, 89 ^ 2**bit) for bit in (0, 9, 30)]
        for key in keys:
            others = (draw(*key, shape=shape).ravel() * 2**18).astype(np.uint32)
            bits = (numbers ^ others)[:, None] >> np.arange(6, 18, dtype=np.uint32) & 1
            deviations = np.abs(bits.mean(0) - 0.5) * 2 * np.sqrt(numbers.size)
            assert deviations.max() < 4.5, key

    def test_normal_numbers(self) -> None:
        z = draw(1, 1, function=normal, shape=(200, 1000)).ravel().astype(np.float64)
        moments = [np.mean(z**power) for power in range(1, 5)]
        assert np.allclose(moments, [0, 1, 0, 3], atol=0.05)
        assert 3.9 < np.abs(z).max() < 6.5


def _chi2(u: np.ndarray[Any, Any], cells: int) -> float:
    counts, _ = np.histogram(u, cells, (0, 1))
    expected = u.size / cells
    return float(((counts - expected) ** 2 / expected).sum())


def test_webgpu_has_no_integers_of_16_bits() -> None:
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"), device="webgpu")
    seed, step = (op.input(name, np.int64, ()) for name in ("seed", "step"))
    random.uniform(op, op.constant([2000]), seed, step, 1)
    assert ir.DataType.INT16 not in {value.dtype for value in op.graph.initializers.values()}

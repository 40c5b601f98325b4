"""Random numbers by seed, step and stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfit.graph.random import FIRST_KEY, FIRST_POSITION, STREAM_FACTOR, uniform
from onnxfit.step.finish import finish
from tests.graph.graphs import empty


def draw(
    device: str, seed: int, step: int, stream: int = 0, shape: tuple[int, ...] = (64, 1000)
) -> np.ndarray[Any, Any]:
    """Draw the numbers of a device; ONNX's reference stands for the kernels that it has alone."""
    op, (x, s, t) = empty(
        ("x", np.float32, ("N", "M")), ("seed", np.int64, ()), ("step", np.int64, ())
    )
    op.device = device
    op.output("u", uniform(op, op.shape(x), s, t, stream))
    model = finish(op)
    feeds = {"x": np.zeros(shape, np.float32), "seed": np.array(seed), "step": np.array(step)}
    if device == "cuda":
        with np.errstate(over="ignore"):
            (u,) = ReferenceEvaluator(model).run(None, feeds)
    else:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (u,) = session.run(None, feeds)
    assert isinstance(u, np.ndarray)
    return u


@pytest.mark.parametrize("device", ["cpu", "cuda"])
class TestRandom:
    @pytest.fixture
    def draw(self, device: str) -> Callable[..., np.ndarray[Any, Any]]:
        return lambda *key, **shape: draw(device, *key, **shape)

    def test_uniform_on_the_unit_interval(self, draw: Callable[..., np.ndarray[Any, Any]]) -> None:
        u = draw(0, 0).ravel()
        assert u.min() >= 0
        assert u.max() < 1
        counts, _ = np.histogram(u, 100, (0, 1))
        chi2 = ((counts - u.size / 100) ** 2 / (u.size / 100)).sum()
        assert 60 < chi2 < 145  # 99 degrees of freedom: 0.1 % and 99.9 % quantiles

    def test_neighbours_are_uncorrelated(self, draw: Callable[..., np.ndarray[Any, Any]]) -> None:
        first, second = draw(3, 10), draw(3, 11)
        draws = [first, np.roll(first, 1), second, draw(4, 10), draw(3, 10, 1)]
        correlation = np.corrcoef([d.ravel() for d in draws]) - np.eye(5)
        assert np.abs(correlation).max() < 5 / np.sqrt(first.size)

    def test_a_function_of_seed_step_and_stream(
        self, draw: Callable[..., np.ndarray[Any, Any]]
    ) -> None:
        assert np.array_equal(draw(1, 2), draw(1, 2))
        assert (
            len(
                {
                    draw(*key, shape=(1, 4)).tobytes()
                    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 7, 3))
                }
            )
            == 5
        )

    def test_every_bit_depends_on_every_bit_of_the_key(
        self, draw: Callable[..., np.ndarray[Any, Any]]
    ) -> None:
        """A changed bit of seed or step changes half of the 24 bits of the numbers."""
        shape = (8, 500)
        numbers = (draw(1234567, 89, shape=shape).ravel() * 2**24).astype(np.uint32)
        for key in ((1234566, 89), (1234567 ^ 2**20, 89), (1234567, 88), (1234567, 89 ^ 2**9)):
            others = (draw(*key, shape=shape).ravel() * 2**24).astype(np.uint32)
            bits = (numbers ^ others)[:, None] >> np.arange(24, dtype=np.uint32) & 1
            deviations = np.abs(bits.mean(0) - 0.5) * 2 * np.sqrt(numbers.size)
            assert deviations.max() < 4.5, key


def test_the_hash_is_lowbias32() -> None:
    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
        return x ^ (x >> 16)

    with np.errstate(over="ignore"):
        key = mix(np.uint32([5]) + mix(mix(np.uint32([9]) + np.uint32(0x9E3779B9)) + np.uint32(2)))
        expected = (mix(mix(np.arange(20, dtype=np.uint32)) + key) >> 8) * np.float32(2**-24)
    np.testing.assert_array_equal(draw("cpu", 9, 5, 2, (1, 20))[0], expected)


def test_the_hash_of_cuda_is_squares() -> None:
    def swap(x: np.ndarray) -> np.ndarray:
        return (x >> np.uint64(32)) | (x << np.uint64(32))

    seed, step, stream = 9, 5, 2
    key = FIRST_KEY + stream * STREAM_FACTOR
    key += seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9
    key = np.uint64((2 * key + 1) % 2**64)
    with np.errstate(over="ignore"):
        y = x = (np.arange(20, dtype=np.uint64) + FIRST_POSITION) * key
        z = y + key
        x = swap(x * x + y)
        x = swap(x * x + z)
        x = swap(x * x + y)
        expected = ((x * x + z) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    np.testing.assert_array_equal(draw("cuda", seed, step, stream, (1, 20))[0], expected)


def test_devices_draw_different_numbers() -> None:
    assert not np.array_equal(draw("cpu", 1, 2, 0, (1, 4)), draw("cuda", 1, 2, 0, (1, 4)))

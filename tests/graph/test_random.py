"""Random numbers by seed, step and stream."""

from __future__ import annotations

import numpy as np

from onnxfit.graph.random import uniform
from tests.graph.graphs import empty, run


class TestRandom:
    @staticmethod
    def draw(
        seed: int, step: int, stream: int = 0, shape: tuple[int, ...] = (64, 1000)
    ) -> np.ndarray:
        op, (x, s, t) = empty(
            ("x", np.float32, ("N", "M")), ("seed", np.int64, ()), ("step", np.int64, ())
        )
        op.output("u", uniform(op, op.shape(x), s, t, stream))
        return run(op, x=np.zeros(shape, np.float32), seed=np.array(seed), step=np.array(step))["u"]

    def test_uniform_on_the_unit_interval(self) -> None:
        u = self.draw(0, 0).ravel()
        assert u.min() >= 0
        assert u.max() < 1
        counts, _ = np.histogram(u, 100, (0, 1))
        chi2 = ((counts - u.size / 100) ** 2 / (u.size / 100)).sum()
        assert 60 < chi2 < 145  # 99 degrees of freedom: 0.1 % and 99.9 % quantiles

    def test_neighbours_are_uncorrelated(self) -> None:
        first, second = self.draw(3, 10), self.draw(3, 11)
        draws = [first, np.roll(first, 1), second, self.draw(4, 10), self.draw(3, 10, 1)]
        correlation = np.corrcoef([d.ravel() for d in draws]) - np.eye(5)
        assert np.abs(correlation).max() < 5 / np.sqrt(first.size)

    def test_a_function_of_seed_step_and_stream(self) -> None:
        assert np.array_equal(self.draw(1, 2), self.draw(1, 2))
        assert (
            len(
                {
                    self.draw(*key, shape=(1, 4)).tobytes()
                    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 7, 3))
                }
            )
            == 5
        )

    def test_the_hash_is_lowbias32(self) -> None:
        def mix(x: np.ndarray) -> np.ndarray:
            x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
            x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
            return x ^ (x >> 16)

        with np.errstate(over="ignore"):
            key = mix(
                np.uint32([5]) + mix(mix(np.uint32([9]) + np.uint32(0x9E3779B9)) + np.uint32(2))
            )
            expected = (mix(mix(np.arange(20, dtype=np.uint32)) + key) >> 8) * np.float32(2**-24)
        np.testing.assert_array_equal(self.draw(9, 5, 2, (1, 20))[0], expected)

"""CTC: the decoders against all paths."""

from __future__ import annotations

import collections
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import special

from onnxfit.ctc import Reading, beam_search_decode, greedy_decode
from onnxfit.errors import DataError, SettingError


def all_readings(p: np.ndarray, blank: int) -> tuple[dict[tuple[int, ...], float], tuple[int, ...]]:
    """The probability of each label, and the label of the most probable path, by all paths."""
    sums: dict[tuple[int, ...], float] = collections.defaultdict(float)
    best = (-1.0, ())
    for path in itertools.product(range(p.shape[1]), repeat=len(p)):
        probability = p[np.arange(len(p)), path].prod()
        label = tuple(k for k, _ in itertools.groupby(path) if k != blank)
        sums[label] += probability
        best = max(best, (probability, label))
    return sums, best[1]


@pytest.mark.parametrize("seed", range(20))
def test_decoders_find_what_all_paths_show(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, classes = int(rng.integers(1, 6)), int(rng.integers(2, 5))
    blank = int(rng.integers(-1, classes))
    p = special.softmax(2 * rng.normal(size=(2, steps, classes)), axis=-1)
    p[0, 0, 0] = 0
    p[0, 0] /= p[0, 0].sum()
    greedy = greedy_decode(np.log(p + 1e-30), blank=blank)
    found = beam_search_decode(p, beam_width=4096, top_paths=4096, blank=blank)
    for row, best, readings in zip(p, greedy, found):
        sums, path = all_readings(row, blank % classes)
        assert tuple(best) == path
        assert len(readings) == sum(value > 0 for value in sums.values())
        for labels, log_probability in readings:
            assert log_probability == pytest.approx(math.log(sums[tuple(labels)]), abs=1e-10)
        values = [reading.log_probability for reading in readings]
        assert values == sorted(values, reverse=True)
    narrow = beam_search_decode(p, beam_width=3, top_paths=2, blank=blank)
    for row, readings in zip(found, narrow):
        assert len(readings) <= 2
        assert readings[0].log_probability <= row[0].log_probability + 1e-12


def test_logits_and_probabilities_read_alike() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 7, 5)).astype(np.float32)
    expected = beam_search_decode(logits, top_paths=3)
    for outputs, from_logits in (
        (special.softmax(logits, -1), None),
        (special.softmax(logits, -1), False),
        (special.log_softmax(logits, -1), None),
        (special.log_softmax(logits, -1), True),
    ):
        readings = beam_search_decode(outputs, top_paths=3, from_logits=from_logits)
        for row, own in zip(expected, readings):
            assert [r.labels for r in row] == [r.labels for r in own]
            np.testing.assert_allclose(
                *([r.log_probability for r in x] for x in (row, own)), rtol=1e-5
            )


def test_decoders_stop_at_the_input_length() -> None:
    outputs = np.eye(3)[[[1, 0, 2, 2], [1, 2, 1, 2]]]
    assert greedy_decode(outputs, input_lengths=[2, 3]) == [[1], [1, 2, 1]]
    read = beam_search_decode(outputs, input_lengths=np.array([0, 3]))
    assert read == [[Reading([], 0.0)], [Reading([1, 2, 1], 0.0)]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: greedy_decode(np.zeros((2, 3))), DataError, r"shape \(2, 3\)"),
        (lambda: greedy_decode(np.full((1, 2, 3), np.nan)), DataError, "row 0 contain NaN"),
        (lambda: greedy_decode(np.zeros((1, 2, 3)), blank=3), SettingError, "from 0 to 2"),
        (lambda: greedy_decode(np.zeros((1, 2, 3)), input_lengths=[3]), DataError, "from 0 to 2"),
        (lambda: greedy_decode(np.zeros((1, 2, 3)), input_lengths=[1, 1]), DataError, "1 whole"),
        (lambda: beam_search_decode(np.zeros((1, 2, 3)), beam_width=0), SettingError, "beam_width"),
        (
            lambda: beam_search_decode(np.zeros((1, 2, 3)), beam_width=2, top_paths=3),
            SettingError,
            "from 1 to beam_width=2, got 3",
        ),
        (
            lambda: beam_search_decode(np.full((1, 2, 3), np.inf)),
            DataError,
            "row 0 are no logits",
        ),
        (
            lambda: beam_search_decode(np.full((1, 2, 3), -1.0), from_logits=False),
            DataError,
            "row 0 are no probabilities",
        ),
    ],
)
def test_impossible_arguments_of_decoders(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()

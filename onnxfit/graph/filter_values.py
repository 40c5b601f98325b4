"""Recognize filters by their numbers: Fourier bases, windows, bands of a mel scale, low-passes.

Trained filters never fit these formulas: the tolerances are those of float32 and float16. Each
function takes float64 arrays; a bank has one filter in each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MIN_LENGTH = 16  # numbers of a window or of a filter
MIN_FILTERS = 8
TOLERANCE = 1e-3  # of the error relative to the numbers, as a root of mean squares
MIN_SPAN = 0.1  # by which 2 cos(w t) varies over the times t of a uniform bank
FLOOR = 1e-6  # of numbers relative to the largest, below which they count as zeros
# (a0, a1, a2) of a0 - a1 cos(x) + a2 cos(2x): Hann, Hamming, Blackman, rectangular
COSINE_SUMS = ((0.5, 0.5, 0.0), (0.54, 0.46, 0.0), (0.42, 0.5, 0.08), (1.0, 0.0, 0.0))


def is_uniform_bank(rows: Array) -> bool:
    """Return whether filters are sinusoids of equidistant frequencies with one common window.

    STFT, DFT and DCT are such banks, with any window. Cosines and sines may be in one array, as
    halves or alternating.

    >>> t = np.arange(32)
    >>> is_uniform_bank(np.cos(2 * np.pi / 32 * t[:17, None] * t) * np.hanning(32))
    True
    """
    return any(all(map(_has_uniform_frequencies, parts)) for parts in _layouts(rows))


def _layouts(rows: Array) -> Iterator[Sequence[Array]]:
    """Yield the ways in which an array may hold one bank, or its cosines and its sines."""
    count, length = rows.shape
    if count >= MIN_FILTERS and length >= MIN_LENGTH and np.isfinite(rows).all():
        yield (rows,)
        if count % 2 == 0:
            yield rows[: count // 2], rows[count // 2 :]
            yield rows[::2], rows[1::2]


def _has_uniform_frequencies(rows: Array) -> bool:
    """Return whether f[k+1, t] + f[k-1, t] = 2 cos(w t + c) f[k, t] holds for all filters.

    The first and the last filter may have another factor, as in an orthogonal transform.
    """
    if len(rows) < MIN_FILTERS:
        return False
    inner = rows[1:-1]
    some = inner[:, np.linspace(0, rows.shape[1] - 1, MIN_LENGTH, dtype=int)]
    if _recurrence(some)[1] > TOLERANCE * _norm(some):
        return False
    factors, error = _recurrence(inner)
    if not error + _norm(inner) > 0 or error > TOLERANCE * _norm(inner):
        return False
    energy = np.square(inner).sum(0)
    kept = np.flatnonzero(energy > 1e-4 * energy.max())
    factors = factors[kept[0] : kept[-1] + 1]
    if len(factors) < MIN_LENGTH or np.ptp(factors) < MIN_SPAN:
        return False
    # The factors 2 cos(w t + c) themselves are a sinusoid. A sine of all zeros has no factor.
    holes = ~np.isin(np.arange(kept[0], kept[-1] + 1), kept)
    sums, centers = factors[2:] + factors[:-2], factors[1:-1]
    valid = ~(holes[2:] | holes[1:-1] | holes[:-2])
    if valid.sum() < MIN_LENGTH // 2:
        return False
    sums, centers = sums[valid], centers[valid]
    slope = (sums @ centers) / (centers @ centers)
    fits = _norm(sums - slope * centers) <= 10 * TOLERANCE * _norm(sums)
    return bool(fits and abs(slope) <= 2.001)


def _recurrence(rows: Array) -> tuple[Array, float]:
    """Return the best factor for each column, and the error of the recurrence."""
    sums, centers = rows[2:] + rows[:-2], rows[1:-1]
    squares = np.square(centers).sum(0)
    factors = (sums * centers).sum(0) / np.where(squares > 0, squares, 1)
    return factors, _norm(sums - factors * centers)


def is_windowed_bank(rows: Array) -> bool:
    """Return whether each filter is a sinusoid with a window of its own, as in a CQT.

    The frequencies rise or fall from filter to filter.
    """
    return any(all(map(_has_windowed_sinusoids, parts)) for parts in _layouts(rows))


def _has_windowed_sinusoids(rows: Array) -> bool:
    if len(rows) < MIN_FILTERS:
        return False
    frequencies = []
    forms = [(sums, a, b) for sums in COSINE_SUMS for a in (1, 0, 2) for b in (0, 1, 2)]
    for row in rows:
        found = next(((f, one) for one in forms for f in [_frequency(row, *one)] if f), None)
        if found is None:
            return False
        frequencies.append(found[0])
        forms.remove(found[1])
        forms.insert(0, found[1])  # it fits the next row, too
    steps = np.diff(frequencies)
    return bool((steps > 0).all() or (steps < 0).all())


def _frequency(row: Array, sums: Sequence[float], before: int, after: int) -> float | None:
    """Return the frequency of a sinusoid with a window, None if the row is another function.

    - `sums`: an element of `COSINE_SUMS`.
    - `before`, `after`: the numbers of zeros of the window on both sides.
    """
    support = np.flatnonzero(np.abs(row) > FLOOR * np.abs(row).max())
    if len(support) < MIN_LENGTH // 2:
        return None
    begin, end = int(support[0]) - before, int(support[-1]) + after
    times = np.arange(max(begin, 0), min(end, len(row) - 1) + 1)
    return _fitted(row[times], _cosine_sum(sums, times - begin, end - begin))


def _cosine_sum(sums: Sequence[float], times: npt.NDArray[Any], length: int) -> Array:
    x = 2 * np.pi * times / length
    result: Array = sums[0] - sums[1] * np.cos(x) + sums[2] * np.cos(2 * x)
    return result


def _fitted(numbers: Array, window: Array) -> float | None:
    """Return w if the numbers are window * (a cos(w t) + b sin(w t)) for a, b and w."""
    strong = np.flatnonzero(window > 0.05 * window.max())
    u = numbers[strong] / window[strong]
    centers, sums = u[1:-1], u[2:] + u[:-2]
    cosine = (sums @ centers) / max(2 * float(centers @ centers), 1e-300)
    if not abs(cosine) < 1 or _norm(sums - 2 * cosine * centers) > 0.01 * _norm(sums):
        return None
    frequency = float(np.arccos(cosine))
    times = np.arange(len(numbers)) - len(numbers) / 2
    for _ in range(3):  # Gauss-Newton: long filters need the frequency exactly
        waves = window * np.stack([np.cos(frequency * times), np.sin(frequency * times)])
        a, b = _factors(waves, numbers)
        terms = np.stack([*waves, times * (b * waves[0] - a * waves[1])])
        found = _factors(terms, numbers)
        frequency += float(found[2])
    fits = _norm(numbers - found @ terms) <= 2 * TOLERANCE * _norm(numbers)
    return frequency if fits and 0 < frequency < np.pi else None


def _factors(terms: Array, numbers: Array) -> Array:
    """Return the factors with which the sum of terms is closest to numbers."""
    factors: Array = np.linalg.pinv(terms @ terms.T, hermitian=True) @ (terms @ numbers)
    return factors


def is_window(numbers: Array) -> bool:
    """Return whether numbers are a window of a transform: Hann, Hamming, Blackman or a sine.

    It may have another factor, and zeros around it.

    >>> is_window(np.hamming(64)), is_window(np.random.default_rng(0).random(64))
    (True, False)
    """
    if not np.isfinite(numbers).all() or numbers.min() < -FLOOR:
        return False
    support = np.flatnonzero(numbers > FLOOR * numbers.max())
    if len(support) < MIN_LENGTH:
        return False
    first, last = int(support[0]), int(support[-1])
    for begin in (first, first - 1):
        for end in (last, last + 1):
            times = np.arange(max(begin, 0), min(end, len(numbers) - 1) + 1)
            shapes = [_cosine_sum(s, times - begin, end - begin) for s in COSINE_SUMS[:-1]]
            shapes.append(np.sin(np.pi * (times - begin) / (end - begin)))
            found = numbers[times]
            for shape in shapes:
                error = found - shape * (shape @ found) / (shape @ shape)
                if _norm(error) <= TOLERANCE * _norm(found):
                    return True
    return False


def is_band_bank(rows: Array) -> bool:
    """Return whether filters are bands that rise, fall and overlap, as on a mel scale.

    All numbers are positive or zero, and most are zero. A diagonal matrix is no such bank.
    """
    if min(rows.shape) < MIN_FILTERS or not np.isfinite(rows).all():
        return False
    if rows.min() < 0 or (rows > 0).mean() > 0.5:
        return False
    bands = [band for band in _bands(rows) if band is not None]
    if len(bands) < MIN_FILTERS:  # filters of few bins may be empty
        return False
    first, top, last = np.array(bands).T
    filled = rows[rows.any(1)]
    if not (last - first + 1 == (filled > 0).sum(1)).all():
        return False
    if any((np.diff(ends) < 0).any() for ends in (first, top, last)):
        return False
    is_peaked = all(
        (np.diff(row[a : b + 1]) >= 0).all() and (np.diff(row[b : c + 1]) <= 0).all()
        for row, (a, b, c) in zip(filled, bands)
    )
    overlaps = (first[1:] <= last[:-1]).mean()
    return bool(is_peaked and overlaps >= 0.5 and (last - first).mean() >= 0.5)


def _bands(rows: Array) -> Iterator[tuple[int, int, int] | None]:
    """Yield the first, the largest and the last element above zero of each row, if there is one."""
    for row in rows:
        above = np.flatnonzero(row)
        yield (int(above[0]), int(row.argmax()), int(above[-1])) if len(above) else None


def is_low_pass(numbers: Array) -> bool:
    """Return whether numbers are one symmetric filter, as before a decimation."""
    peak = np.abs(numbers).max(initial=0)
    is_symmetric = bool((np.abs(numbers - numbers[::-1]) <= 1e-5 * peak).all())
    return len(numbers) >= MIN_LENGTH and is_symmetric and np.ptp(numbers) > 0.1 * peak


def is_monotonic(numbers: Array) -> bool:
    """Return whether many positive numbers only rise or only fall."""
    steps = np.diff(numbers)
    rises = bool((steps >= 0).all() or (steps <= 0).all())
    return bool(len(numbers) >= MIN_LENGTH and rises and numbers.min() > 0 and np.ptp(numbers) > 0)


def _norm(array: Array) -> float:
    return float(np.sqrt(np.square(array).sum()))

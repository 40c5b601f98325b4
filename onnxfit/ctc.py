"""Read outputs of models that are trained with the loss CTC, without onnxruntime.

Outputs are `(batch, time, classes)`. A path has one class for each time step. It reads as a label:
equal neighbors are merged, then blanks are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxfit.checks import is_integer, shortened
from onnxfit.errors import DataError, SettingError

__all__ = ["Reading", "beam_search_decode", "greedy_decode"]

Array = npt.NDArray[Any]
Prefix = tuple[int, ...]
SUM_TOLERANCE = 1e-2  # of the probabilities of a time step, which half precision may have rounded


class Reading(NamedTuple):
    """A label that an output may read as, and the logarithm of its probability."""

    labels: list[int]
    log_probability: float


def greedy_decode(
    outputs: npt.ArrayLike, *, blank: int = 0, input_lengths: Sequence[int] | Array | None = None
) -> list[list[int]]:
    r"""Return the label of each row's most probable path, $\arg\max_k p_t(k)$ at each step $t$
    ("best path decoding", Graves et al. 2006).

    - `outputs`: logits, log-probabilities or probabilities, shape `(batch, time, classes)`.
    - `blank`: the class between labels; -1 is the last class.
    - `input_lengths`: the number of time steps that count in each row; None for all.

    DataError: the outputs have another shape or contain NaN, or the lengths are wrong.
    SettingError: `blank` is not a class.

    >>> best = np.array([[1, 1, 0, 1, 2]])
    >>> greedy_decode(np.eye(3)[best])
    [[1, 1, 2]]
    """
    scores, blank, lengths = _checked_outputs(outputs, blank, input_lengths)
    path = scores.argmax(axis=2)
    begins = np.ones(path.shape, bool)
    begins[:, 1:] = path[:, 1:] != path[:, :-1]
    counts = np.arange(path.shape[1]) < lengths[:, None]
    read = begins & counts & (path != blank)
    return [row[mask].tolist() for row, mask in zip(path, read)]


def beam_search_decode(
    outputs: npt.ArrayLike,
    *,
    beam_width: int = 10,
    top_paths: int = 1,
    blank: int = 0,
    input_lengths: Sequence[int] | Array | None = None,
    from_logits: bool | None = None,
) -> list[list[Reading]]:
    r"""Return the most probable labels of each row, the best first (prefix beam search: Graves et
    al. 2006, section 3.2; Hannun et al. 2014, arXiv:1408.2873).

    A label's probability is the sum over all paths that read as it. For each prefix $\ell$ of a
    label, $b_t(\ell)$ is the probability of the paths up to step $t$ that read as $\ell$ and end in
    a blank, $n_t(\ell)$ that of the other ones. With $\ell = \ell' k$, $k$ the last label:

    $$b_t(\ell) = p_t(\text{blank})\,(b_{t-1}(\ell) + n_{t-1}(\ell)), \quad
    n_t(\ell) = p_t(k)\,(n_{t-1}(\ell) + b_{t-1}(\ell') + [k \ne \text{last of } \ell']\,
    n_{t-1}(\ell')).$$

    After each step, the `beam_width` most probable prefixes are kept. A beam of all prefixes makes
    the result exact; a narrower beam may miss labels and paths, so that probabilities are lower
    bounds.

    - `outputs`, `blank`, `input_lengths`: as for `greedy_decode`.
    - `beam_width`: the number of prefixes, at least 1.
    - `top_paths`: the number of labels to return, from 1 to `beam_width`. There may be fewer.
    - `from_logits`: True for logits or log-probabilities, False for probabilities. None means
      probabilities if no output is negative and the outputs of each step add up to 1, else logits.

    DataError: as for `greedy_decode`. SettingError: as for `greedy_decode`, or `beam_width` or
    `top_paths` is out of range.

    >>> outputs = np.array([[[0.6, 0.4], [0.6, 0.4]]])
    >>> greedy_decode(outputs)
    [[]]
    >>> best, other = beam_search_decode(outputs, top_paths=2)[0]
    >>> best.labels, round(float(np.exp(best.log_probability)), 2)
    ([1], 0.64)
    """
    for name, value, maximum in (
        ("beam_width", beam_width, None),
        ("top_paths", top_paths, beam_width),
    ):
        if not is_integer(value) or value < 1 or (maximum is not None and value > maximum):
            bound = "at least 1" if maximum is None else f"from 1 to beam_width={maximum}"
            raise SettingError(f"{name} must be {bound}, got {shortened(value)}.")
    scores, blank, lengths = _checked_outputs(outputs, blank, input_lengths)
    log_p = _normalized(scores, from_logits)
    return [
        _search(row[:length], blank, beam_width)[:top_paths] for row, length in zip(log_p, lengths)
    ]


def _search(log_p: Array, blank: int, width: int) -> list[Reading]:
    """Return the labels of one row, at most `width` of them; `log_p` is `(time, classes)`."""
    prefixes: list[Prefix] = [()]
    blanks, others = np.zeros(1), np.full(1, -np.inf)
    for step in log_p:
        last = np.array([prefix[-1] if prefix else blank for prefix in prefixes])
        either = np.logaddexp(blanks, others)
        longer = either[:, None] + step
        # An equal label merges with the last one, unless a blank is between them.
        longer[np.arange(len(prefixes)), last] = blanks + step[last]
        longer[:, blank] = -np.inf
        blanks = either + step[blank]
        others = np.where(last == blank, -np.inf, others + step[last])
        # A prefix in the beam may also be another prefix in the beam with one more label.
        index = {prefix: i for i, prefix in enumerate(prefixes)}
        for i, prefix in enumerate(prefixes):
            if prefix and prefix[:-1] in index:
                place = index[prefix[:-1]], prefix[-1]
                others[i] = np.logaddexp(others[i], longer[place])
                longer[place] = -np.inf
        totals = np.concatenate([np.logaddexp(blanks, others), longer.ravel()])
        best = _largest(totals, width)
        kept, new = best[best < len(prefixes)], best[best >= len(prefixes)] - len(prefixes)
        parents, labels = np.divmod(new, len(step))
        prefixes = [
            *(prefixes[i] for i in kept),
            *((*prefixes[i], label) for i, label in zip(parents, labels.tolist())),
        ]
        blanks = np.concatenate([blanks[kept], np.full(len(new), -np.inf)])
        others = np.concatenate([others[kept], longer[parents, labels]])
    totals = np.logaddexp(blanks, others)
    return [Reading(list(prefixes[i]), float(totals[i])) for i in _largest(totals, width)]


def _largest(values: Array, count: int) -> Array:
    """Return the indices of the largest values above -inf, at most `count`, the largest first."""
    found = np.arange(len(values))
    if len(values) > count:
        found = np.sort(np.argpartition(-values, count - 1)[:count])
    found = found[np.argsort(-values[found], kind="stable")]
    return found[values[found] > -np.inf]


def _checked_outputs(
    outputs: npt.ArrayLike, blank: int, input_lengths: Sequence[int] | Array | None
) -> tuple[Array, int, Array]:
    """Return the outputs, the index of the blank from 0 on, and the length of each row."""
    scores = np.asarray(outputs)
    if scores.ndim != 3 or scores.dtype.kind not in "iuf" or not scores.shape[2]:
        raise DataError(
            "Expected outputs of shape (batch, time, classes), numbers, got shape"
            f" {scores.shape} and dtype {scores.dtype}."
        )
    rows, time, classes = scores.shape
    if not is_integer(blank) or not -1 <= blank < classes:
        raise SettingError(
            f"blank must be a class from 0 to {classes - 1}, or -1 for the last one, got"
            f" {shortened(blank)}."
        )
    broken = np.isnan(scores).any(axis=(1, 2))
    if broken.any():
        raise DataError(f"The outputs of row {broken.argmax()} contain NaN.")
    lengths = np.full(rows, time) if input_lengths is None else np.asarray(input_lengths)
    is_whole = lengths.dtype.kind in "iu" or not lengths.size
    if lengths.shape != (rows,) or not is_whole or (lengths < 0).any() or (lengths > time).any():
        raise DataError(
            f"input_lengths must be {rows} whole numbers from 0 to {time}, one for each row, got"
            f" {shortened(input_lengths)}."
        )
    return scores, int(blank) % classes, lengths


def _normalized(scores: Array, from_logits: bool | None) -> Array:
    scores = scores.astype(np.float64)
    if from_logits is None:
        sums = scores.sum(axis=2)
        from_logits = bool((scores < 0).any() or (abs(sums - 1) > SUM_TOLERANCE).any())
    with np.errstate(divide="ignore", invalid="ignore"):
        if from_logits:
            scores = scores - scores.max(axis=2, keepdims=True)
            log_p = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
        else:
            log_p = np.log(scores)
    broken = np.isnan(log_p).any(axis=(1, 2))
    if broken.any():
        kind = "logits" if from_logits else "probabilities"
        raise DataError(f"The outputs of row {broken.argmax()} are no {kind}.")
    return np.asarray(log_p)

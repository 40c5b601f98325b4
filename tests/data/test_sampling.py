"""Draws of a next token, against their probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfit.data.sampling import Sampling


def drawn(logits: list[float], **settings: Any) -> np.ndarray[Any, Any]:
    """How often each token is drawn."""
    sampling = Sampling(**settings)
    generator = np.random.default_rng(0)
    scores = np.array(logits, np.float32)
    tokens = [sampling.next_token(scores, generator) for _ in range(4000)]
    return np.bincount(tokens, minlength=len(logits)) / 4000


def test_tokens_are_drawn_by_their_probabilities() -> None:
    p = np.array([0.5, 0.2, 0.25, 0.05])
    logits = np.log(p).tolist()
    np.testing.assert_allclose(drawn(logits, temperature=1.0), p, atol=0.03)
    hot = np.sqrt(p) / np.sqrt(p).sum()
    np.testing.assert_allclose(drawn(logits, temperature=2.0), hot, atol=0.03)
    np.testing.assert_allclose(
        drawn(logits, temperature=1.0, top_k=2), [2 / 3, 0, 1 / 3, 0], atol=0.03
    )
    np.testing.assert_allclose(
        drawn(logits, temperature=1.0, top_p=0.7), [2 / 3, 0, 1 / 3, 0], atol=0.03
    )
    np.testing.assert_array_equal(drawn(logits, temperature=1.0, top_p=0.4), [1, 0, 0, 0])
    np.testing.assert_array_equal(drawn(logits), [1, 0, 0, 0])
    np.testing.assert_array_equal(drawn(logits, temperature=1e-300), [1, 0, 0, 0])
    np.testing.assert_array_equal(drawn([np.nan, 1, np.inf, 0], temperature=1.0), [0, 0, 1, 0])

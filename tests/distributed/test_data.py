"""Several ranks train on kinds of data that law tests of sources cannot judge alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxfit import Pad, Trainer, losses
from onnxfit.errors import DataError
from tests.data.kinds import X, Y
from tests.distributed.threads import on_ranks

TEXTS = [[1, 2, 3], [2, 2, 1, 4, 1], [3, 1], [1]]  # the second rank has the short ones
TAGS = [[token % 2 for token in text] for text in TEXTS]


def test_ranks_train_on_padded_rows_as_one_process_does() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        tagger (int64[N, T] input_ids) => (float[N, T, 2] y)
        <float[5, 2] table = {0, 0.5, 1, 0, 2, 0, 0, 3, 1, 1}>
        { y = Gather(table, input_ids) }""")
    rows = Pad(TEXTS, TAGS, batch_size=4, shuffle=False)

    def trained(communicator: Any) -> tuple[np.ndarray, list[float]]:
        loss = losses.CrossEntropy(ignore_index=-100)
        trainer = Trainer(model, loss=loss, optimizer=0.5, distribute=communicator)
        figures = trainer.fit(rows, epochs=1, verbose=0).history["loss"]
        return trainer.get_weights()["table"], figures

    weights, figures = trained(None)
    for found in on_ranks(2, trained):
        np.testing.assert_allclose(found[0], weights, atol=1e-6)
        np.testing.assert_allclose(found[1], figures, rtol=1e-6)


def test_a_fixed_batch_dimension_is_that_of_a_share() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        line (float[2, 2] x) => (float[2, 1] y) <float[2, 1] w = {0.5, 0.25}> { y = MatMul(x, w) }""")

    def trained(communicator: Any) -> Trainer:
        trainer = Trainer(model, loss="mse", optimizer=0.01, distribute=communicator)
        trainer.fit(X[:8], Y[:8], epochs=1, batch_size=4, verbose=0)
        trainer.train_on_batch(X[4:8], Y[4:8])
        assert trainer.predict(X[:4], batch_size=4).shape == (4, 1)
        assert trainer.predict_on_batch(X[:4]).shape == (4, 1)
        with pytest.raises(
            DataError, match=r"of which every batch needs 4 \(2 for each of 2 ranks"
        ):
            trainer.train_on_batch(X[:2], Y[:2])
        return trainer

    weights = [trainer.get_weights()["w"] for trainer in on_ranks(2, trained)]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert np.abs(weights[0].ravel() - [0.5, 0.25]).max() > 1e-3

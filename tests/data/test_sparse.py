"""Sparse matrices of SciPy as training data: each batch becomes dense, and only the batch."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

import scipy.sparse

from onnxfit import Trainer
from onnxfit.callbacks import Callback
from onnxfit.data.memory import SparseRows
from onnxfit.errors import DataError
from onnxfit.graph.dense import dense_network

RANDOM = np.random.default_rng(0)
NUMBERS = np.where(RANDOM.uniform(size=(50, 6)) < 0.3, RANDOM.normal(size=(50, 6)), 0)
X = NUMBERS.astype(np.float32)
Y = X[:, :1] - X[:, 1:2]


def trainer(columns: int = 6) -> Trainer:
    model = dense_network([columns, 4, 1], np.dtype(np.float32), 0)
    return Trainer(model, loss="mse", optimizer="adam")


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_matrix", "coo_array", "lil_matrix"])
@pytest.mark.parametrize("named", [False, True])
def test_a_sparse_matrix_trains_as_the_array(kind: str, named: bool) -> None:
    sparse = getattr(scipy.sparse, kind)(X)
    results = []
    for x in (X, {"X": sparse} if named else sparse):
        one = trainer()
        losses = one.fit(x, Y, epochs=3, batch_size=8, validation_split=0.2).history
        results.append((losses, one.evaluate(x, Y), one.predict(x)))
    (dense, evaluated, predicted), (found, *others) = results
    assert found == dense
    assert others[0] == evaluated
    np.testing.assert_array_equal(others[1], predicted)


def test_only_a_batch_is_dense() -> None:
    rows, columns = 20_000, 2_000  # 160 MB as an array
    places = RANDOM.integers(0, columns, rows)
    values = np.ones(rows, np.float32)
    sparse = scipy.sparse.csr_matrix((values, (np.arange(rows), places)), (rows, columns))
    one = trainer(columns)
    tracemalloc.start()
    try:
        one.fit(sparse, np.zeros((rows, 1), np.float32), batch_size=256, steps_per_epoch=20)
        one.predict(sparse, batch_size=256)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40e6


def test_a_checkpoint_describes_the_stored_numbers(tmp_path: Any) -> None:
    class Saver(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 2 and not (tmp_path / "fit").exists():
                self.trainer.save(tmp_path / "fit")

    sparse = scipy.sparse.csr_matrix(X)
    whole = trainer()
    whole.fit(sparse, Y, epochs=2, batch_size=8, callbacks=[Saver()])
    resumed = Trainer.load(tmp_path / "fit")
    resumed.fit(sparse, Y, epochs=2, batch_size=8)
    np.testing.assert_array_equal(resumed.predict(X), whole.predict(X))


def test_the_shape_is_checked() -> None:
    with pytest.raises(DataError, match="X"):
        trainer().fit(scipy.sparse.csr_matrix(X[:, :3]), Y)
    rows = SparseRows(scipy.sparse.coo_matrix(X))
    assert len(rows) == 50
    np.testing.assert_array_equal(np.asarray(rows, np.float64), X.astype(np.float64))
    np.testing.assert_array_equal(rows[[3, 1]], X[[3, 1]])

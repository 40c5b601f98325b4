"""Networks with one number as output, for a batch of one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxfit import DataError, SettingError, Trainer

ONE_ROW = np.array([[1.0, 2.0, 3.0]], np.float32)


def model(rows: int | str) -> onnx.ModelProto:
    """The mean of a product, as a scalar: y = x w."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[{rows}, 3] x) => (float y) {{ h = MatMul(x, w)  y = ReduceMean<keepdims = 0>(h) }}""")
    weight = onnx.numpy_helper.from_array(np.full((3, 1), 0.5, np.float32), "w")
    model.graph.initializer.append(weight)
    return model


def trainer(rows: int | str, backend: str, **settings: Any) -> Trainer:
    return Trainer(model(rows), loss="mse", optimizer=0.01, backend=backend, **settings)


both = pytest.mark.parametrize("backend", ["full", "forward_backward"])
any_batch = pytest.mark.parametrize("rows", [1, "N"])


@both
@any_batch
@pytest.mark.parametrize(
    "y", [2.0, np.float32(2), np.array(2), np.array([2.0]), np.array([[2.0]]), [2]]
)
def test_a_label_of_any_form_trains(rows: int | str, backend: str, y: Any) -> None:
    """The output is 3 and the label 2, so the gradient of w is 2 (3 - 2) x."""
    ours = trainer(rows, backend, metrics=["mae"])
    assert ours.train_on_batch(ONE_ROW, y) == pytest.approx({"loss": 1.0, "mae": 1.0})
    np.testing.assert_allclose(ours.get_weights()["w"], 0.5 - 0.02 * ONE_ROW.T, rtol=1e-6)
    error = 3 - 0.02 * 14 - 2
    assert ours.evaluate(ONE_ROW, y) == pytest.approx({"loss": error**2, "mae": error})
    assert ours.predict(ONE_ROW) == pytest.approx([error + 2])


@both
@any_batch
def test_batches_of_one_row_train_on_many(rows: int | str, backend: str) -> None:
    """As the same network with an axis of rows does."""
    text = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 3] x) => (float[N, 1] y) { y = MatMul(x, w) }""")
    text.graph.initializer.extend(model(1).graph.initializer)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    weights = rng.uniform(0.5, 2, 6)
    expected, ours = Trainer(text, loss="mse", optimizer=0.01), trainer(rows, backend)
    for one in (expected, ours):
        one.fit(x, y, weights, batch_size=1, epochs=2, verbose=0)
    np.testing.assert_allclose(
        ours.history.history["loss"], expected.history.history["loss"], rtol=1e-5
    )
    assert ours.predict(x, batch_size=1).shape == (6,)


@both
def test_a_batch_of_several_rows_is_refused(backend: str) -> None:
    x = np.ones((4, 3), np.float32)
    with pytest.raises(SettingError, match="needs batches of one row, but got 4 rows"):
        trainer("N", backend).train_on_batch(x, np.ones(4))
    with pytest.raises(DataError, match="y for y is a single number"):
        trainer("N", backend).train_on_batch(x, 1.0)

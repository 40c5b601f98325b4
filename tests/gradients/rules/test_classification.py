"""What the cases of the losses of classification cannot say."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

from onnxfit import gradient_model


def test_a_batch_that_is_ignored_altogether_teaches_nothing() -> None:
    text = """<ir_version: 8, opset_import: ["": 21]> g (float[2,3] x, float[3] w) => (float y) <int64[2] t = {-100, -100}>
        { y = SoftmaxCrossEntropyLoss<ignore_index=-100>(x, t, w) }"""
    written = gradient_model(onnx.parser.parse_model(text), ["x"], gradient="onnx")
    session = onnxruntime.InferenceSession(
        written.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {
        "x": np.ones((2, 3), np.float32),
        "w": np.ones(3, np.float32),
        "y_grad": np.array(1, np.float32),
    }
    assert not session.run(["x_grad"], feeds)[0].any()

"""Tensors that are taken out of a model."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit.graph.tensors import without_numbers


def test_tensors_without_numbers_cannot_be_read() -> None:
    """They keep everything else, and other tensors keep their bytes."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> m (float[N, 2] x) => (float[N, 2] y)
        <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {5, 6}> { h = MatMul(x, w)  y = Add(h, b) }"""
    )
    given = model.SerializeToString(deterministic=True)
    bare = without_numbers(model, {"w"})
    assert model.SerializeToString(deterministic=True) == given
    w, b = bare.graph.initializer
    assert (w.name, w.data_type, [*w.dims]) == ("w", onnx.TensorProto.FLOAT, [2, 2])
    with pytest.raises(ValueError, match="reshape"):
        onnx.numpy_helper.to_array(w)
    assert b == model.graph.initializer[1]
    w.CopyFrom(onnx.numpy_helper.from_array(np.array([[1, 2], [3, 4]], np.float32), "w"))
    model.graph.initializer[0].CopyFrom(w)  # it had its numbers in another field
    assert bare == model

"""The places of tensors in serialized models."""

from __future__ import annotations

import numpy as np
import onnx
from onnx.numpy_helper import from_array

from onnxfit.training_folder.message import places_of_initializers
from tests.models import convolutional


def test_the_bytes_at_a_place_are_those_of_the_tensor() -> None:
    model = convolutional()
    model.metadata_props.add(key="note", value="x" * 300)
    model.graph.initializer.append(from_array(np.zeros(0, np.float32), "empty"))
    data = model.SerializeToString()
    places = places_of_initializers(data)
    assert list(places) == [tensor.name for tensor in model.graph.initializer]
    for tensor in model.graph.initializer:
        place = places[tensor.name]
        assert data[place.offset : place.end] == tensor.raw_data


def test_tensors_in_other_fields_have_no_place() -> None:
    model = convolutional()
    del model.graph.initializer[1:]
    model.graph.initializer.append(
        onnx.helper.make_tensor("floats", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    )
    assert list(places_of_initializers(model.SerializeToString())) == ["conv.weight"]

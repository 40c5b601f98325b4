"""The places of tensors in serialized models."""

from __future__ import annotations

import numpy as np
import onnx
from onnx.numpy_helper import from_array

from onnxfit.training_folder.message import (
    bytes_to_run,
    files_of_constants,
    places_of_tensors,
    refer_to_constants,
)
from tests.models import convolutional


def test_the_bytes_at_a_place_are_those_of_the_tensor() -> None:
    model = convolutional()
    model.metadata_props.add(key="note", value="x" * 300)
    model.graph.initializer.append(from_array(np.zeros(0, np.float32), "empty"))
    data = model.SerializeToString()
    places = places_of_tensors(data)
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
    assert list(places_of_tensors(model.SerializeToString())) == ["conv.weight"]


def test_a_graph_refers_to_frozen_tensors_of_the_model_alone() -> None:
    model, graph = convolutional(), convolutional()
    large = np.arange(500, dtype=np.float32)
    tensors = {"frozen": large, "trained": large + 1, "small": large[:9], "other": large + 2}
    model.graph.initializer.extend(from_array(a, n) for n, a in tensors.items() if n != "other")
    graph.graph.initializer.extend(from_array(a, f"{n} here") for n, a in tensors.items())
    data = model.SerializeToString()
    assert files_of_constants(graph) == []
    refer_to_constants(graph, "model.onnx", data, ["trained"])
    assert files_of_constants(graph) == ["model.onnx"]
    external = {t.name: t for t in graph.graph.initializer if not t.HasField("raw_data")}
    assert list(external) == ["frozen here"]
    entries = {entry.key: entry.value for entry in external["frozen here"].external_data}
    place = places_of_tensors(data)["frozen"]
    assert entries == {
        "location": "model.onnx", "offset": str(place.offset), "length": str(place.size)
    }  # fmt: skip


def test_texts_and_inner_types_are_left_out_on_all_levels() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N] x, bool c) => (float[N] y) {
            a = Neg(x)
            y = If (c) <
                then_branch = one () => (float[N] p) { q = Abs(a)  p = Neg(q) },
                else_branch = two () => (float[N] p) { p = Identity(a) }>
        }""")
    bare = model.SerializeToString(deterministic=True)
    inferred = onnx.shape_inference.infer_shapes(model)
    inferred.doc_string = inferred.graph.doc_string = inferred.graph.node[0].doc_string = "text"
    branch = inferred.graph.node[1].attribute[0].g
    branch.node[0].doc_string = branch.doc_string = "text"
    assert len(branch.value_info) == 1
    inferred.graph.input[0].doc_string = "text"
    before = inferred.SerializeToString(deterministic=True)
    assert bytes_to_run(inferred) == bare
    assert inferred.SerializeToString(deterministic=True) == before

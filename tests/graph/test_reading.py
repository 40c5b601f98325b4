"""Reading and checking a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from onnxfit.errors import ModelError
from onnxfit.graph.model import normalize
from onnxfit.graph.reading import read_model, read_shared
from tests.graph.graphs import linear, parse


class TestReadingModels:
    def test_path_bytes_and_proto_give_the_same(self, tmp_path) -> None:
        model = linear()
        path = tmp_path / "m.onnx"
        onnx.save(model, path)
        for source in (model, model.SerializeToString(), path, str(path)):
            assert read_model(source).SerializeToString() == model.SerializeToString()

    def test_the_callers_model_is_not_touched(self) -> None:
        model = linear()
        before = model.SerializeToString()
        normalize(read_model(model)).graph.initializers.pop("w")
        assert model.SerializeToString() == before

    def test_external_data_is_read_from_a_path_and_refused_in_a_bare_proto(self, tmp_path) -> None:
        path = tmp_path / "m.onnx"
        model = linear()
        model.graph.initializer[0].CopyFrom(
            onnx.numpy_helper.from_array(np.array([[1], [2]], np.float32), "w")
        )
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        assert onnx.numpy_helper.to_array(read_model(path).graph.initializer[0]).tolist() == [
            [1],
            [2],
        ]
        with pytest.raises(ModelError, match=r"stores weights in other files.*Pass the path"):
            read_model(onnx.load(path, load_external_data=False))

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("nowhere.onnx", r"There is no file 'nowhere.onnx'"),
            (b"not a model", r"the 11 bytes given is not an ONNX model"),
            (b"", r"not a valid ONNX model"),
            (3, r"The model must be a path, bytes or an onnx.ModelProto, got int"),
        ],
    )
    def test_what_is_no_model_is_one_clear_error(self, source, message) -> None:
        with pytest.raises(ModelError, match=message):
            read_model(source)

    def test_an_empty_file_is_no_model(self, tmp_path) -> None:
        (tmp_path / "empty.onnx").touch()
        for read in (read_model, read_shared):
            with pytest.raises(ModelError, match=r"empty.onnx is not a valid ONNX model"):
                read(tmp_path / "empty.onnx")

    @pytest.mark.parametrize("indices", ["1, 3", "0, 1, 1, 1"])
    def test_a_sparse_constant_is_its_dense_form(self, indices: str) -> None:
        places = [int(i) for i in indices.split(",")]
        rows = 2 if len(places) == 4 else 1
        make = onnx.helper.make_tensor
        sparse = onnx.helper.make_sparse_tensor(
            make("v", 1, [2], [5.0, 6.0]),
            make("i", 7, [2] if rows == 1 else [2, 2], places),
            [4] if rows == 1 else [2, 2],
        )
        model = parse(
            '<ir_version: 8, opset_import: ["": 17]> g (float x) => (float[N] y) { c = Identity(x) '
            " y = Add(x, c) }"
        )
        model.graph.node[0].CopyFrom(
            onnx.helper.make_node("Constant", [], ["c"], sparse_value=sparse)
        )
        model.graph.output[0].type.tensor_type.ClearField("shape")
        work = normalize(read_model(model))
        (found,) = onnx.reference.ReferenceEvaluator(ir.to_proto(work)).run(
            None, {"x": np.float32(1)}
        )
        np.testing.assert_array_equal(found, [1, 6, 1, 7] if rows == 1 else [[1, 6], [1, 7]])


@pytest.mark.parametrize(
    ("key", "value"),
    [("offset", "-1"), ("offset", "200"), ("length", "1e3"), ("length", str(1 << 62)), ("length", ""), ("length", "-8"), ("location", "a/" * 3000)],
)  # fmt: skip
def test_external_data_that_is_not_in_the_file(tmp_path: Path, key: str, value: str) -> None:
    model = linear()
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=1, dims=[2, 1]))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    tensor.external_data.add(key=key, value=value)
    (tmp_path / "w.bin").write_bytes(bytes(8))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"cannot be read"):
        read_model(tmp_path / "model.onnx")


@pytest.mark.skipif(
    "device_configurations" not in onnx.NodeProto.DESCRIPTOR.fields_by_name,
    reason="onnx is older than IR 11",
)
def test_an_incomplete_device_configuration_is_one_clear_error() -> None:
    model = linear()
    model.ir_version = 11
    configuration = model.graph.node[0].device_configurations.add()
    with pytest.raises(ModelError, match=r"of the \w+ node .* has no configuration_id\."):
        normalize(read_model(model))
    configuration.configuration_id = "two GPUs"
    normalize(read_model(model))
    spec = configuration.sharding_spec.add()
    with pytest.raises(ModelError, match=r"of the \w+ node .* has no tensor_name\."):
        normalize(read_model(model))
    spec.tensor_name = "w"
    normalize(read_model(model))

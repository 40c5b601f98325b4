"""Reading and checking a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from onnxfit.errors import ModelError
from onnxfit.graph import shared_tensors, tensors
from onnxfit.graph.model import to_ir
from onnxfit.load.normalize import normalize
from onnxfit.load.reading import load_shared, read_model
from tests.graph.graphs import linear, parse

Reader = Callable[[Path], onnx.ModelProto]


class TestReadingModels:
    def test_path_bytes_and_proto_give_the_same(self, tmp_path) -> None:
        model = linear()
        path = tmp_path / "m.onnx"
        onnx.save(model, path)
        for source in (model, model.SerializeToString(), path, str(path)):
            assert read_model(source).whole().SerializeToString() == model.SerializeToString()

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
            (to_ir(linear()), r"got Model\. Convert it first: onnx_ir.to_proto\(model\)"),
        ],
    )
    def test_what_is_no_model_is_one_clear_error(self, source, message) -> None:
        with pytest.raises(ModelError, match=message):
            read_model(source)

    def test_parameters_without_a_tensor_are_named(self) -> None:
        model = linear()
        for tensor in model.graph.initializer:
            declared = model.graph.value_info.add(name=tensor.name)
            declared.type.tensor_type.elem_type = tensor.data_type
        del model.graph.initializer[:]
        with pytest.raises(ModelError, match=r"it has no tensors for w, b\. In onnxscript, pass"):
            read_model(model)

    def test_an_empty_file_is_no_model(self, tmp_path) -> None:
        (tmp_path / "empty.onnx").touch()
        for read in (read_model, load_shared):
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


def write_external(folder: Path, **entries: str) -> Path:
    """A model of which one tensor of 8 bytes is in `w.bin`, unless an entry says otherwise."""
    model = linear()
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=1, dims=[2, 1]))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", **entries}.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


@pytest.fixture(params=["copied", "shared"])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Both readers of a file: of small models, and of large ones with their tensors in arrays."""
    if request.param == "copied":
        return lambda path: read_model(path).whole()
    monkeypatch.setattr(shared_tensors, "MIN_BYTES", 8)
    monkeypatch.setattr(tensors, "MAX_COPIED_BYTES", 0)

    def read(path: Path) -> onnx.ModelProto:
        model = read_model(path)
        assert len(model.arrays) == 1
        return model.whole()

    return read


@pytest.mark.parametrize(
    ("key", "value"),
    [("offset", "-1"), ("offset", "9"), ("offset", "200"), ("length", "1e3"), ("length", str(1 << 62)), ("length", ""), ("length", "-8"), ("length", "9" * 5000), ("location", ""), ("location", "a/" * 3000), ("location", "a\0b")],
)  # fmt: skip
def test_external_data_that_is_not_in_the_file(
    tmp_path: Path, read: Reader, key: str, value: str
) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(8))
    with pytest.raises(ModelError, match=r"cannot be read") as raised:
        read(write_external(tmp_path, **{key: value}))
    assert len(str(raised.value)) < 1000 or key == "location"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("missing.bin", "does not exist"),
        ("folder", "not a regular file"),
        ("pipe.bin", "not a regular file"),
        ("link.bin", "is a link"),
        ("linked/w.bin", "is a link"),
        ("out.bin", "is a link"),
        ("hard.bin", "hard links"),
        ("loop.bin", "cannot be read"),
        ("../secret/w.bin", "in the folder of the model"),
    ],
)
def test_external_data_is_read_from_regular_files_of_the_folder_only(
    tmp_path: Path, read: Reader, location: str, message: str
) -> None:
    """Older versions of onnx follow links."""
    for name in ("secret", "model/folder"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "w.bin").write_bytes(bytes(8))
    model = tmp_path / "model"
    os.mkfifo(model / "pipe.bin")
    for name, target in (
        ("link.bin", "folder/w.bin"),
        ("linked", "folder"),
        ("out.bin", "../secret/w.bin"),
        ("loop.bin", "loop.bin"),
    ):
        (model / name).symlink_to(target)
    assert read(write_external(model, location="folder/../folder/w.bin")).graph.initializer
    os.link(tmp_path / "secret" / "w.bin", model / "hard.bin")
    with pytest.raises(ModelError, match=message):
        read(write_external(model, location=location))


def test_unknown_entries_of_external_data_are_ignored(tmp_path: Path, read: Reader) -> None:
    numbers = np.array([[3], [4]], np.float32)
    (tmp_path / "w.bin").write_bytes(bytes(8) + numbers.tobytes())
    path = write_external(tmp_path, offset="8", length="8", __class__="str", basepath="/")
    found = onnx.numpy_helper.to_array(read(path).graph.initializer[0])
    np.testing.assert_array_equal(found, numbers)


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

"""Models read beside their tensors are those that protobuf and onnx read."""

from __future__ import annotations

from pathlib import Path

import google.protobuf.message
import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit.graph import shared_tensors
from onnxfit.graph.shared_tensors import shared_bytes
from onnxfit.load.lean_reading import with_shared, without_contents


@pytest.fixture(autouse=True)
def every_tensor_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tensors, "MIN_BYTES", 8)


def layers() -> onnx.ModelProto:
    """Tensors as bytes and as numbers, of several types, beside nodes and metadata."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N,3] x) => (float[N,3] y)
        <float[3] listed = {1, 2, 3}> { h = MatMul(x, w) y = Add(h, listed) }"""
    )
    for name, array in (
        ("w", np.arange(9, dtype=np.float32).reshape(3, 3)),
        ("half", np.arange(8, dtype=np.float16)),
        ("integers", np.arange(9, dtype=np.int64)),
        ("small", np.ones(1, np.float32)),
        ("last", np.arange(100, dtype=np.float64)),
    ):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer[-1].doc_string = "text"
    model.metadata_props.add(key="a", value="b")
    model.doc_string = "text"
    return model


def bytes_of(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("kind", ["path", "bytes", "proto", "external"])
def test_it_is_the_model_of_onnx(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = layers()
    onnx.save(layers(), path, save_as_external_data=kind == "external", size_threshold=0)
    sources = {"bytes": bytes_of(model), "proto": model}
    read = with_shared(sources.get(kind, str(path)))
    shared = [t.name for t in read.graph.initializer if shared_bytes(t) is not None]
    assert set(shared) >= {"w", "half", "last"}
    assert not {"integers", "small"} & set(shared)
    assert len(read.arrays) == len(shared)
    expected = onnx.load(path)
    for tensor in (*read.graph.initializer, *expected.graph.initializer):
        if tensor.data_location == onnx.TensorProto.DEFAULT:
            tensor.ClearField("data_location")  # it may be written down or not
    assert bytes_of(read.whole()) == bytes_of(expected)
    assert bytes_of(model) == bytes_of(layers())


@pytest.mark.parametrize("external", [True, False])
def test_the_model_without_contents_differs_in_the_bytes_of_its_tensors_alone(
    external: bool, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(layers(), path, save_as_external_data=external, size_threshold=0)
    expected = onnx.load(path, load_external_data=False)
    for tensor in expected.graph.initializer:
        if tensor.name in ("w", "half", "last") and not external:
            tensor.ClearField("raw_data")
    assert bytes_of(without_contents(str(path))) == bytes_of(expected)


def test_damaged_messages_are_read_as_protobuf_reads_them() -> None:
    """Every cut, and bytes replaced at random, in a file and between two of its fields."""
    random = np.random.default_rng(0)
    whole = bytes_of(layers())
    damaged = [whole[:size] for size in range(0, len(whole), 7)]
    damaged += [whole + whole, whole[: len(whole) // 2] + whole]
    for _ in range(1500):
        changed = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 4)):
            changed[place] = random.integers(0, 256)
        damaged.append(bytes(changed))
    equal = 0
    for data in damaged:
        try:
            expected = onnx.ModelProto.FromString(data)
        except google.protobuf.message.DecodeError:
            with pytest.raises(google.protobuf.message.DecodeError):
                with_shared(data)
            continue
        read = with_shared(data)
        assert bytes_of(read.whole()) == bytes_of(expected)
        equal += bool(read.arrays)
    assert equal > 300

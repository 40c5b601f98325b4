"""Files whose integers no DequantizeLinear can read say that training leaves them as they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import Trainer, inspect
from onnxfit.graph.quantized import describe_quantized
from tests.graph.graphs import parse

RNG = np.random.default_rng(0)


def float_model(path: Path) -> Path:
    model = parse(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 8] x) => (float[N, 3] y)'
        " { a = MatMul(x, w)  s = Add(a, b)  r = Relu(s)  y = MatMul(r, v) }"
    )
    for name, shape in {"w": (8, 16), "b": (16,), "v": (16, 3)}.items():
        array = RNG.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    quantization = pytest.importorskip("onnxruntime.quantization")
    folder = tmp_path_factory.mktemp("quantized")
    source = float_model(folder / "float.onnx")
    paths = {name: folder / f"{name}.onnx" for name in ("dynamic", "QDQ", "QOperator")}

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.batches = iter([{"x": RNG.standard_normal((4, 8)).astype(np.float32)}] * 2)

        def get_next(self) -> Any:
            return next(self.batches, None)

    quantization.quantize_dynamic(source, paths["dynamic"])
    for name in ("QDQ", "QOperator"):
        quantization.quantize_static(
            source, paths[name], Reader(), quant_format=quantization.QuantFormat[name]
        )
    return {"float": source, **paths}


PACKED = (
    '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'
    " g (float[N, 32] x) => (float[N, 2] y) <float[2] s = {0.1, 0.2}> { h = Add(x, b)"
    "   y = com.microsoft.MatMulNBits<K = 32, N = 2, bits = 4, block_size = 32>(h, w, s) }"
)
MESSAGE = (
    r"The model is quantized: its weights w are integers, which training does not change\."
    r" Fix: train the float model, .*adapters"
)


def packed() -> onnx.ModelProto:
    model = parse(PACKED)
    array = np.arange(32, dtype=np.uint8).reshape(2, 1, 16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    b = np.zeros(32, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(b, "b"))
    return model


def test_packed_integers_warn_once_at_the_users_line(files: dict[str, Path]) -> None:
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        trainer = Trainer(packed(), loss="mse")
    assert [Path(w.filename).name for w in caught] == ["test_quantized.py"]
    assert "w" not in trainer.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(packed(), "b", loss="mse")  # who names the weight knows
        Trainer(files["float"], loss="mse")


def test_inspect_names_packed_integers(files: dict[str, Path]) -> None:
    report = inspect(packed())
    assert report.quantized == ("w",)
    assert str(report).count("train the float model, and quantize it afterwards") == 1
    assert inspect(files["float"]).quantized == ()


@pytest.mark.parametrize("name", ["dynamic", "QDQ", "QOperator"])
def test_other_integers_train_without_a_warning(files: dict[str, Path], name: str) -> None:
    file = onnx.load(files[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(file, loss="mse", optimizer=0.1)
    assert {"w_quantized", "v_quantized"} <= set(trainer.get_weights())
    assert not any("scale" in weight for weight in trainer.get_weights())
    x = RNG.standard_normal((16, 8)).astype(np.float32)
    trainer.fit(x, x[:, :3], verbose=0)
    exported = trainer.export(lineage=False)
    assert list(exported.graph.node) == list(file.graph.node)
    assert exported.ByteSize() <= file.ByteSize()
    assert exported.graph.initializer != file.graph.initializer
    session = onnxruntime.InferenceSession(
        exported.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_array_equal(trainer.predict_on_batch(x), session.run(None, {"x": x})[0])
    report = inspect(file)
    assert report.trains
    assert report.quantized == ()
    assert {"w_quantized", "v_quantized"} <= set(report.weights)


def test_five_names_are_listed() -> None:
    assert "w0, w1, w2, w3, w4, … (7 in all) are" in describe_quantized([f"w{i}" for i in range(7)])

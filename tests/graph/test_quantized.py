"""Files whose integers are not behind DequantizeLinear say that training leaves them as they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import ModelError, Trainer, inspect
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


MESSAGE = (
    r"The model is quantized: its weights w_quantized, v_quantized are integers that are not behind"
    r" DequantizeLinear, and stay as they are\. Fix: train the float file, .*QDQ"
)


def test_dynamic_quantization_warns_once_at_the_users_line(files: dict[str, Path]) -> None:
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        trainer = Trainer(files["dynamic"], loss="mse")
    assert [Path(w.filename).name for w in caught] == ["test_quantized.py"]
    assert list(trainer.get_weights()) == ["b"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(files["dynamic"], "b", loss="mse")  # who names the weight knows
        Trainer(files["float"], loss="mse")


def test_quantized_operators_offer_no_scales(files: dict[str, Path]) -> None:
    with pytest.raises(
        ModelError, match=r"weights w_quantized, .* Fix: train the float file"
    ) as info:
        Trainer(files["QOperator"], loss="mse")
    assert "scale" not in str(info.value)


def test_integers_behind_dequantize_linear_train_without_a_warning(files: dict[str, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(files["QDQ"], loss="mse")
    assert set(trainer.get_weights()) == {"w_quantized", "b_quantized", "v_quantized"}


@pytest.mark.parametrize("name", ["dynamic", "QOperator"])
def test_inspect_says_so(files: dict[str, Path], name: str) -> None:
    report = inspect(files[name])
    assert {"w_quantized", "v_quantized"} <= set(report.quantized)
    assert str(report).count("train the float file, and quantize it afterwards") == 1
    assert inspect(files["float"]).quantized == ()


def test_five_names_are_listed() -> None:
    assert "w0, w1, w2, w3, w4, … (7 in all) are" in describe_quantized([f"w{i}" for i in range(7)])


def test_inspect_says_that_integers_behind_dequantize_linear_train(files: dict[str, Path]) -> None:
    report = inspect(files["QDQ"])
    assert report.trains
    assert report.quantized == ()
    assert set(report.weights) == {"w_quantized", "b_quantized", "v_quantized"}

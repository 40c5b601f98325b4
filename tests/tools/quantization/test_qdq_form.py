"""Reports on files in QOperator format, of MatMulNBits and of dynamic quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.numpy_helper import to_array

import onnxfit
from onnxfit.tools.quantization.qdq_form import in_qdq_form
from tests.cli.helpers import done
from tests.models import convolutional, mlp
from tests.trainable.quantized.graphs import parsed
from tests.trainable.quantized.packed_files import FORMS, packed_file, real_numbers

rng = np.random.default_rng(0)
MLP = mlp((4, 16, 16, 3), activation="Relu")
RELU_AT_THE_END = parsed(
    "g (float[N, 4] x) => (float[N, 3] y) { h = Gemm(x, w, b) a = Relu(h) i = Gemm(a, v, c)"
    " y = Relu(i) }", w=(4, 8), b=(8,), v=(8, 3), c=(3,)
)  # fmt: skip
TWO_READERS = parsed(
    "g (float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, w) a = Relu(h) i = MatMul(a, v)"
    " j = MatMul(h, u) y = Add(i, j) }", w=(4, 8), v=(8, 3), u=(8, 3)
)  # fmt: skip
ROWS = {"mlp": (MLP, (50, 4)), "relu": (RELU_AT_THE_END, (50, 4))}
ROWS["convolution"] = convolutional(), (50, 1, 8, 8)


def quantized(model: onnx.ModelProto, x: np.ndarray, path: Path, form: str) -> onnx.ModelProto:
    """The model as `quantize_static` of onnxruntime writes it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.items = iter([{model.graph.input[0].name: x}])

        def get_next(self) -> Any:
            return next(self.items, None)

    onnx.save(model, path)
    quantize_static(path, path, Reader(), quant_format=QuantFormat[form])
    return onnx.load(path)


def snr(exact: np.ndarray, other: np.ndarray) -> float:
    noise = ((exact - other).astype(np.float64) ** 2).sum()
    return float(10 * np.log10((exact.astype(np.float64) ** 2).sum() / noise))


def outputs_of(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: x})[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ROWS)
def test_qoperators_are_reported_like_qdq(tmp_path: Path, name: str) -> None:
    """Both forms of one quantization have the same ratios for the layers that both quantize."""
    model, shape = ROWS[name]
    x = rng.normal(size=shape).astype(np.float32)
    reports = {
        form: onnxfit.quantization_report(
            model, quantized(model, x, tmp_path / "q.onnx", form), (x,), verbose=0
        )
        for form in ("QOperator", "QDQ")
    }
    layers, expected = ({one.name: one for one in report.layers} for report in reports.values())
    both = [n for n in layers if n in expected]
    assert len(both) >= 2
    for one in both:
        assert layers[one].operator == expected[one].operator
        assert layers[one].weight_snr == pytest.approx(expected[one].weight_snr, abs=0.5)
        assert layers[one].output_snr == pytest.approx(expected[one].output_snr, abs=3)
        assert layers[one].alone_snr == pytest.approx(expected[one].alone_snr, abs=3)
    integers = quantized(model, x, tmp_path / "q.onnx", "QOperator")
    whole = snr(outputs_of(model, x), outputs_of(integers, x))
    assert reports["QOperator"].output_snr == pytest.approx(whole, abs=0.5)


def test_a_file_without_a_relu_that_mattered(tmp_path: Path) -> None:
    """onnxruntime drops the Relu of an integer value that another layer reads, too."""
    x = rng.normal(size=(50, 4)).astype(np.float32)
    integers = quantized(TWO_READERS, x, tmp_path / "q.onnx", "QOperator")
    assert snr(outputs_of(TWO_READERS, x), outputs_of(integers, x)) < 20, "the file is wrong"
    with pytest.raises(onnxfit.ModelError, match=r"lacks Relu 'a': MatMul 'i' reads the numbers"):
        onnxfit.quantization_report(TWO_READERS, integers, (x,), verbose=0)


@pytest.mark.parametrize(("bits", "zeros"), [form for form in FORMS if form != (4, "float")])
def test_packed_weights(bits: int, zeros: str) -> None:
    """The ratios are those of bare NumPy: x @ w against x @ the real numbers of the integers."""
    packed = packed_file(bits, zeros)
    real = real_numbers(packed, bits).astype(np.float32)
    w = real + rng.normal(scale=0.05, size=real.shape).astype(np.float32)
    bias = next(to_array(t) for t in packed.graph.initializer if t.name == "b")
    floats = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[batch, {len(w)}] x) =>'
        f" (float[batch, {w.shape[1]}] y) {{ m = MatMul(x, w) y = Add(m, b) }}"
    )
    floats.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    floats.graph.initializer.append(onnx.numpy_helper.from_array(bias, "b"))
    x = rng.normal(size=(30, len(w))).astype(np.float32)
    report = onnxfit.quantization_report(floats, packed, (x,), verbose=0)
    assert report.output_snr == pytest.approx(snr(x @ w + bias, x @ real + bias), abs=0.05)
    (layer,) = report.layers
    assert layer.weight_snr == pytest.approx(snr(w, real), abs=0.05)


def test_dynamic_quantization(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(TWO_READERS, tmp_path / "f.onnx")
    quantize_dynamic(tmp_path / "f.onnx", tmp_path / "q.onnx")
    x = rng.normal(size=(40, 4)).astype(np.float32)
    report = onnxfit.quantization_report(TWO_READERS, tmp_path / "q.onnx", (x,), verbose=0)
    assert {layer.operator for layer in report.layers} == {"MatMul"}
    whole = snr(outputs_of(TWO_READERS, x), outputs_of(onnx.load(tmp_path / "q.onnx"), x))
    assert report.output_snr == pytest.approx(whole, abs=0.5)


def test_the_command_reports_qoperators(tmp_path: Path) -> None:
    x = rng.normal(size=(50, 4)).astype(np.float32)
    quantized(MLP, x, tmp_path / "q.onnx", "QOperator")
    onnx.save(MLP, tmp_path / "f.onnx")
    np.save(tmp_path / "x.npy", x)
    paths = [tmp_path / name for name in ("f.onnx", "q.onnx")]
    printed = done("quantization-report", *paths, "-d", tmp_path / "x.npy")
    assert "3 integer layers, 50 rows" in printed


def test_packed_weights_with_float_zero_points_are_refused() -> None:
    floats = parsed("g (float[N, 40] x) => (float[N, 6] y) { y = MatMul(x, w) }", w=(40, 6))
    with pytest.raises(onnxfit.ModelError, match="'q' have float zero points"):
        onnxfit.quantization_report(floats, packed_file(4, "float"), (np.zeros((2, 40)),))


def test_a_file_in_qdq_form_is_not_copied(tmp_path: Path) -> None:
    qdq = quantized(MLP, rng.normal(size=(9, 4)).astype(np.float32), tmp_path / "q.onnx", "QDQ")
    assert in_qdq_form(qdq, MLP) is qdq


def test_an_operator_without_a_conversion_is_named() -> None:
    integers = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 3] y)'
        " <uint8[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>"
        " { q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) y = Cast<to = 1>(i) }"
    )
    floats = parsed("g (float[N, 4] x) => (float[N, 3] y) { y = MatMul(x, w) }", w=(4, 3))
    with pytest.raises(onnxfit.ModelError, match="cannot be compared with float layers"):
        onnxfit.quantization_report(floats, integers, (np.zeros((2, 4), np.float32),), verbose=0)

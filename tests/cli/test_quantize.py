"""`quantize` and `dequantize`: a file in, a file out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit
from tests.cli.helpers import call, done, refused, write_csv
from tests.trainable.quantized.graphs import network, outputs_of, parsed, relative_error, two_inputs


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, inputs = network()
    onnx.save(model, "m.onnx")
    np.savez("x.npz", **inputs)
    np.save("x.npy", inputs["x"])


def test_a_file_of_integers_and_back() -> None:
    model, inputs = network()
    said = done("quantize", "m.onnx", "x.npz", "-o", "folder/q.onnx")
    before, after = (Path(p).stat().st_size for p in ("m.onnx", "folder/q.onnx"))
    assert said == f"m.onnx -> folder/q.onnx: 2 weights as int8, {before:,} -> {after:,} bytes\n"
    result = onnx.load("folder/q.onnx")
    assert result == onnxfit.quantize(model, inputs)
    assert (
        done("dequantize", "folder/q.onnx", "-o", "f.onnx")
        == "folder/q.onnx -> f.onnx: 4 weights\n"
    )
    assert onnx.load("f.onnx") == onnxfit.dequantize(result)
    assert relative_error(outputs_of(onnx.load("f.onnx"), inputs), outputs_of(model, inputs)) < 0.03


def test_each_option_is_passed_on() -> None:
    options = {
        "weights": "uint4",
        "activations": "uint8",
        "method": "entropy",
        "batch_size": 7,
    }
    flags = [
        text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", value)
    ]
    done("quantize", "m.onnx", "x.npy", "-o", "q.onnx", *flags, "--no-per-channel", "--exclude", "gem*", "--exclude", "relu_r")  # fmt: skip
    model, inputs = network()
    expected = onnxfit.quantize(model, inputs, per_channel=False, exclude=["gem*", "relu_r"], **options)  # fmt: skip
    assert onnx.load("q.onnx") == expected


def test_weights_alone_need_no_data() -> None:
    said = done("quantize", "m.onnx", "-o", "q.onnx", "--weights", "int4", "--activations", "none")
    assert said.startswith("m.onnx -> q.onnx: 2 weights as int4, ")
    expected = onnxfit.quantize("m.onnx", weights="int4", activations=None)
    assert onnx.load("q.onnx") == expected


def test_data_of_all_kinds() -> None:
    model, inputs = two_inputs()
    onnx.save(model, "two.onnx")
    np.save("a.npy", inputs["a"]), np.save("b.npy", inputs["b"])
    done("quantize", "two.onnx", "a.npy", "b.npy", "-o", "q.onnx")
    assert onnx.load("q.onnx") == onnxfit.quantize(model, inputs)
    table = parsed("g (float[N, 2] x) => (float[N, 3] y) { y = MatMul(x, w) }", w=(2, 3))
    onnx.save(table, "table.onnx")
    x = np.float32([[1, 2], [-3, 0.5]])
    write_csv("d.csv", "a,b,kind", np.c_[x, [0, 1]])
    done("quantize", "table.onnx", "d.csv", "--label", "kind", "-o", "q.onnx")
    assert onnx.load("q.onnx") == onnxfit.quantize(table, x)


def test_failures_are_one_message_and_leave_the_old_file() -> None:
    Path("q.onnx").write_text("old")
    assert "needs calibration data" in refused("quantize", "m.onnx", "-o", "q.onnx")
    done("quantize", "m.onnx", "x.npz", "-o", "i.onnx")
    assert "already quantized" in refused("quantize", "i.onnx", "x.npz", "-o", "q.onnx")
    assert "not quantized" in refused("dequantize", "m.onnx", "-o", "q.onnx")
    assert "is called 'fc'" in refused("quantize", "m.onnx", "x.npz", "-o", "q.onnx", "--exclude", "fc")  # fmt: skip
    assert Path("q.onnx").read_text() == "old"
    assert "'int7' is not one of" in refused("quantize", "m.onnx", "x.npz", "-o", "q.onnx", "--weights", "int7", code=2)  # fmt: skip


def test_a_model_may_take_the_place_of_its_source() -> None:
    done("quantize", "m.onnx", "x.npz", "-o", "m.onnx")
    done("dequantize", "m.onnx", "-o", "m.onnx")
    assert call("inspect", "m.onnx").exit_code == 0

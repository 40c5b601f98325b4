from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from tests.cli.helpers import done, refused

FIXED = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 2, 2] x) => (float[1, 1] y)
    <int64[2] s = {1, 4}, float[4, 1] w = {1, 2, 3, 4}> { a = Reshape(x, s)  y = MatMul(a, w) }"""


def sizes(value: onnx.ValueInfoProto) -> list[object]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_writes_a_model_for_any_batch(tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "any.onnx"
    onnx.save(onnx.parser.parse_model(FIXED), path)
    assert done("dynamic-batch", path, output) == f"{path} -> {output}\n"
    assert sizes(onnx.load(output).graph.input[0]) == ["batch", 2, 2]
    done("dynamic-batch", path, output, "--axis", "x=0", "--name", "N")
    assert sizes(onnx.load(output).graph.output[0]) == ["N", 1]
    assert "no input with a batch axis" in refused(
        "dynamic-batch", path, output, "--axis", "x=none"
    )
    assert "--axis must be INPUT=AXIS" in refused(
        "dynamic-batch", path, output, "--axis", "x=first"
    )


def test_a_fixed_input_decides_an_if(tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "any.onnx"
    text = """<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 4] x, int64 rate) => (float[1, 2, 2] y) <int64 r = {8}, int64[3] s = {1, 2, 2}>
        { c = Equal(rate, r)  y = If(c) <
            then_branch = t () => (float[1, 2, 2] a) { a = Reshape(x, s) },
            else_branch = e () => (float[1, 2, 2] b) { n = Neg(x)  b = Reshape(n, s) }> }"""
    onnx.save(onnx.parser.parse_model(text), path)
    assert "--fixed-input rate=VALUE" in refused("dynamic-batch", path, output)
    done("dynamic-batch", path, output, "--fixed-input", "rate=8")
    (x,) = onnx.load(output).graph.input
    assert sizes(x) == ["batch", 4]
    assert "--fixed-input must be NAME=VALUE" in refused(
        "dynamic-batch", path, output, "--fixed-input", "rate"
    )


def test_fit_trains_with_batches_of_any_size(tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "trained.onnx"
    onnx.save(onnx.parser.parse_model(FIXED), path)
    np.savez(tmp_path / "d.npz", X=np.ones((8, 2, 2), np.float32), y=np.ones((8, 1), np.float32))
    options = ["--data", tmp_path / "d.npz", "--loss", "mse", "--batch-size", 4, "-o", output]
    assert "or --dynamic-batch." in refused("fit", path, *options)
    done("fit", path, *options, "--dynamic-batch", "--quiet")
    assert sizes(onnx.load(output).graph.output[0]) == ["batch", 1]

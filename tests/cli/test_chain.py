"""Every command from a file with a fixed batch to predictions, one after the other."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from tests.cli.helpers import done

SCRIPT = """
inspect exported.onnx
dynamic-batch exported.onnx open.onnx
replace-head open.onnx three.onnx --classes 3
fit three.onnx -d flowers.npz --loss cross_entropy --weights 'head_*' --optimizer adam --lr 0.05 -e 3 -m accuracy -o head.onnx -q
fit head.onnx -d flowers.npz --loss cross_entropy --optimizer adam --lr 0.02 -e 4 -m accuracy --checkpoint run/ -o all.onnx -q
resume run/ -e 12 -q
evaluate run/last.onnxfit -d flowers.npz --json
export run/last.onnxfit -o trained.onnx
predict trained.onnx -d X.npy -o scores.npy
evaluate trained.onnx -d flowers.npz --loss cross_entropy -m accuracy --json
"""


def test_fine_tune_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 2, 2] x) => (float[1, 5] y) <int64[2] shape = {1, 4}>
        { f = Reshape(x, shape)  h = Gemm(f, body_weight, body_bias)  a = Relu(h)
          y = Gemm(a, head_weight, head_bias) }""")
    shapes = {
        "body_weight": (4, 16),
        "body_bias": (16,),
        "head_weight": (16, 5),
        "head_bias": (5,),
    }
    for name, shape in shapes.items():
        values = 0.5 * rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, "exported.onnx")
    X = rng.standard_normal((160, 2, 2)).astype(np.float32)
    y = (X.reshape(-1, 4) @ rng.standard_normal((4, 3))).argmax(axis=1)
    np.savez("flowers.npz", x=X, y=y)
    np.save("X.npy", X)

    outputs = [done(*shlex.split(line)) for line in SCRIPT.strip().splitlines()]

    def arrays(path: str) -> dict[str, np.ndarray]:
        tensors = onnx.load(path).graph.initializer
        return {t.name: onnx.numpy_helper.to_array(t) for t in tensors}

    before, head, trained = arrays("open.onnx"), arrays("head.onnx"), arrays("trained.onnx")
    assert np.array_equal(head["body_weight"], before["body_weight"])
    assert not np.array_equal(trained["body_weight"], before["body_weight"])
    figures, again = json.loads(outputs[6]), json.loads(outputs[9])
    assert figures["accuracy"] == again["accuracy"] > 0.9
    session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"x": X})
    assert np.allclose(scores, np.load("scores.npy"), atol=1e-6)
    assert (scores.argmax(axis=1) == y).mean() == pytest.approx(figures["accuracy"])

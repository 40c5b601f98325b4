"""Write an untrained network, and digits that are spread over three pages.

    python examples/web/federated/make_folder.py OUT

OUT/training is the training folder. A page has OUT/page-0.safetensors, or another one: most of its
digits are of three or four classes. OUT/test.safetensors has digits of all classes, for figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx.parser
from onnx.numpy_helper import from_array
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

import onnxfit

CLASSES = ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
SHARE = 0.97  # of the digits of a class, which one page has; the others share the rest


def network() -> onnx.ModelProto:
    """Two linear layers: float[N, 64] pixels -> float[N, 10] logits."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        digits (float[N, 64] pixels) => (float[N, 10] logits) {
        a = Gemm(pixels, weight1, bias1)  b = Relu(a)  logits = Gemm(b, weight2, bias2) }""")
    rng = np.random.default_rng(0)
    weights = {
        "weight1": rng.normal(size=(64, 48)) / 8, "bias1": np.zeros(48),
        "weight2": rng.normal(size=(48, 10)) / 7, "bias2": np.zeros(10),
    }  # fmt: skip
    for name, value in weights.items():
        model.graph.initializer.append(from_array(value.astype(np.float32), name))
    return model


def main() -> None:
    out = Path(sys.argv[1])
    optimizer = onnxfit.optimizers.SGD(0.1)
    trainer = onnxfit.Trainer(
        network(), loss="cross_entropy", optimizer=optimizer, metrics=["accuracy"]
    )
    trainer.export_training(out / "training", target="web")
    digits = load_digits()
    pixels = (digits.data / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    owner = np.array([next(i for i, c in enumerate(CLASSES) if y in c) for y in digits.target])
    strays = rng.random(len(owner)) > SHARE
    owner[strays] = rng.integers(0, len(CLASSES), strays.sum())
    test = np.arange(len(owner)) % 5 == 0
    parts = {f"page-{i}": ~test & (owner == i) for i in range(len(CLASSES))}
    for name, rows in {**parts, "test": test}.items():
        arrays = {"x": pixels[rows], "y": digits.target[rows]}
        save_file(arrays, out / f"{name}.safetensors")
        print(f"{name}: {rows.sum()} digits")


if __name__ == "__main__":
    main()

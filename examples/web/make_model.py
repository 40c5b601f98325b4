"""Train a network on scikit-learn's digits, and write the training folder of the page.

    python examples/web/make_model.py OUT

OUT/training is the folder. OUT/digits.safetensors has some digits of the data set, which the page
mixes with the drawn ones, so that the network does not forget them.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import onnx.parser
from onnx.numpy_helper import from_array
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

import onnxfit

DIGITS_PER_CLASS = 20


def network() -> onnx.ModelProto:
    """Three convolutions and two linear layers: float[N, 1, 8, 8] image -> float[N, 10] logits."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        digits (float[N,1,8,8] image) => (float[N,10] logits) {
        a = Conv<pads=[1,1,1,1]>(image, conv1_weight)
        b = BatchNormalization(a, norm_scale, norm_bias, norm_mean, norm_var)  c = Relu(b)
        d = Conv<pads=[1,1,1,1]>(c, conv2_weight, conv2_bias)  e = Relu(d)
        f = MaxPool<kernel_shape=[2,2], strides=[2,2]>(e)
        g = Conv<pads=[1,1,1,1]>(f, conv3_weight, conv3_bias)  h = Relu(g)  i = Flatten(h)
        j = Dropout(i, ratio)  k = Gemm(j, fc1_weight, fc1_bias)  l = Relu(k)
        logits = Gemm(l, fc2_weight, fc2_bias) }""")
    rng = np.random.default_rng(0)
    shapes = {
        "conv1_weight": (16, 1, 3, 3), "conv2_weight": (24, 16, 3, 3),
        "conv3_weight": (24, 24, 3, 3), "fc1_weight": (384, 48), "fc2_weight": (48, 10),
    }  # fmt: skip
    constants = {
        "norm_scale": np.ones(16), "norm_bias": np.zeros(16), "norm_mean": np.zeros(16),
        "norm_var": np.ones(16), "conv2_bias": np.zeros(24), "conv3_bias": np.zeros(24),
        "fc1_bias": np.zeros(48), "fc2_bias": np.zeros(10), "ratio": np.array(0.2),
    }  # fmt: skip
    for name, shape in shapes.items():
        fan_in = shape[0] if len(shape) == 2 else math.prod(shape[1:])
        constants[name] = rng.normal(size=shape) * np.sqrt(2 / fan_in)  # He et al. 2015
    for name, value in constants.items():
        model.graph.initializer.append(from_array(np.asarray(value, np.float32), name))
    return model


def main() -> None:
    out = Path(sys.argv[1])
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target
    test = np.arange(len(labels)) % 5 == 0
    trainer = onnxfit.Trainer(
        network(), loss="cross_entropy", optimizer="adam", metrics=["accuracy"]
    )
    stopping = onnxfit.callbacks.EarlyStopping(patience=8, restore_best_weights=True)
    trainer.fit(
        images[~test],
        labels[~test],
        epochs=40,
        validation_data=(images[test], labels[test]),
        callbacks=[stopping],
        verbose=0,
    )
    accuracy = trainer.evaluate(images[test], labels[test])["accuracy"]
    print(f"accuracy of the digits that were not trained: {accuracy:.1%}")
    folder = trainer.export_training(out / "training", target="web")
    kept = [np.flatnonzero((labels == c) & ~test)[:DIGITS_PER_CLASS] for c in range(10)]
    rows = np.concatenate(kept)
    pixels = digits.images[rows].astype(np.uint8)
    save_file(
        {"images": pixels, "labels": labels[rows].astype(np.uint8)}, out / "digits.safetensors"
    )
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    print(*(f"{name:20} {size:8,} bytes" for name, size in sizes.items()), sep="\n")


if __name__ == "__main__":
    main()

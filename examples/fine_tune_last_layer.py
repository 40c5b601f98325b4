"""Fine-tuning: a network trained on the digits 0-4 learns 5-9 with its last layer alone.

All other weights stay the same, bit for bit.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx
from models import dense
from onnx import numpy_helper
from sklearn.datasets import load_digits

import onnxfit


def main() -> None:
    digits = load_digits()
    X, y = (digits.data / 16).astype(np.float32), digits.target
    known, new = y < 5, y >= 5

    model = dense(64, 64, 5, names=["hidden", "fc"])
    pretraining = onnxfit.Trainer(
        model, loss="cross_entropy", optimizer=onnxfit.optimizers.Adam(0.003)
    )
    pretraining.fit(X[known], y[known], epochs=15, verbose=0)
    pretrained = pretraining.export(None)

    trainer = onnxfit.Trainer(
        pretrained,
        ["fc*"],
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(0.01),
        metrics=["accuracy"],
    )
    before = trainer.evaluate(X[new], y[new] - 5)["accuracy"]
    trainer.fit(X[new], y[new] - 5, epochs=15, verbose=0)
    after = trainer.evaluate(X[new], y[new] - 5)["accuracy"]

    old, trained = weights(pretrained), weights(trainer.export(None))
    changed = sorted(name for name in old if old[name].tobytes() != trained[name].tobytes())
    print(f"accuracy on 5-9     {before:.2%} -> {after:.2%}")
    print(f"weights changed     {', '.join(changed)} of {', '.join(sorted(old))}")
    if changed != ["fc.bias", "fc.weight"]:
        sys.exit("fine_tune_last_layer: only fc.weight and fc.bias were to change")
    if not after > 0.93:
        sys.exit("fine_tune_last_layer: training fell short")


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


if __name__ == "__main__":
    main()

"""Two outputs with a loss each: a body's position (regression) and its side of a line (classes).

Both outputs share the hidden layer.
"""

from __future__ import annotations

import sys

import numpy as np
from models import two_headed

import onnxfit

LOSS_WEIGHTS = {"position": 1.0, "side": 0.5}


def main() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (1500, 4)).astype(np.float32)
    position = X[:, :2] + X[:, 2:] * 0.5  # start plus half a second of its velocity
    y = {"position": position, "side": (position[:, 0] > position[:, 1]).astype(np.int64)}

    trainer = onnxfit.Trainer(
        two_headed(),
        loss={"position": "mse", "side": "cross_entropy"},
        loss_weights=LOSS_WEIGHTS,
        optimizer=onnxfit.optimizers.Adam(0.01),
    )
    train, validation = slice(0, 1200), slice(1200, None)
    labels = {name: values[train] for name, values in y.items()}
    history = trainer.fit(X[train], labels, epochs=40, verbose=0).history

    predicted = trainer.predict(X[validation])
    error = float(np.sqrt(np.mean((predicted["position"] - y["position"][validation]) ** 2)))
    accuracy = float(np.mean(predicted["side"].argmax(axis=1) == y["side"][validation]))
    loss, parts = history["loss"][-1], [history[f"{name}_loss"][-1] for name in LOSS_WEIGHTS]
    total = sum(weight * part for weight, part in zip(LOSS_WEIGHTS.values(), parts))

    print(f"loss               {loss:.5f} = {parts[0]:.5f} + 0.5 * {parts[1]:.5f}")
    print(f"position           {error:.4f} root mean squared error")
    print(f"side               {accuracy:.2%} right")
    if not abs(total - loss) < 1e-6:
        sys.exit("several_outputs: the loss is not the weighted sum of its parts")
    if not (error < 0.05 and accuracy > 0.97):
        sys.exit("several_outputs: training fell short")


if __name__ == "__main__":
    main()

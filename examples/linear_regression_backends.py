"""Linear regression with both backends, compared with scikit-learn.

    python examples/linear_regression_backends.py [--out docs/gallery]

Gradient descent over all rows at once, with the whole step as one graph ("full") and as separate
graphs ("forward_backward"). Both must have the same weights after every step, and arrive at the
coefficients of LinearRegression.
"""

from __future__ import annotations

import sys

import numpy as np
from figures import GREY, INK, ORANGE, arguments, label, panels, save, write_csv
from models import dense
from sklearn.linear_model import LinearRegression

import onnxfit

EPOCHS = 80


def main() -> None:
    options = arguments(__doc__)
    rng = np.random.default_rng(0)
    X = (rng.standard_normal((1000, 10)) * np.linspace(0.6, 1.4, 10)).astype(np.float32)
    y = (X @ rng.standard_normal(10) + 3 + 0.1 * rng.standard_normal(1000)).astype(np.float32)
    sklearn = LinearRegression().fit(X.astype(np.float64), y)
    least = float(np.mean((y - sklearn.predict(X.astype(np.float64))) ** 2))

    losses, distances = {}, {}
    for backend in ("full", "forward_backward"):
        trainer = onnxfit.Trainer(
            dense(10, 1), loss="mse", optimizer=onnxfit.optimizers.SGD(0.3), backend=backend
        )
        distances[backend] = []
        watch = onnxfit.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, t=trainer, d=distances[backend]: d.append(
                distance(t.get_weights(), sklearn)
            )
        )
        history = trainer.fit(X, y, batch_size=len(X), epochs=EPOCHS, callbacks=[watch], verbose=0)
        losses[backend] = history.history["loss"]

    apart = max(abs(a - b) / b for a, b in zip(*losses.values()))
    found = max(d[-1] for d in distances.values())
    epochs = range(1, EPOCHS + 1)
    columns = (
        {"epoch": epochs}
        | {f"loss_{b}": losses[b] for b in losses}
        | {f"distance_{b}": distances[b] for b in losses}
    )
    write_csv(options.out / "linear_regression_backends.csv", columns)

    figure, (left, right) = panels(
        f"Both backends take the same way to scikit-learn's coefficients: {found:.0e} from them at"
        " the end"
    )
    for panel, curves in ((left, losses), (right, distances)):
        panel.semilogy(
            epochs, curves["full"], color=GREY, linewidth=7, solid_capstyle="round", label="full"
        )
        panel.semilogy(
            epochs,
            curves["forward_backward"],
            color=ORANGE,
            linewidth=1.8,
            label="forward_backward",
        )
    left.axhline(least, color=INK, linewidth=1.2, linestyle=":", label="LinearRegression")
    label(left, "Loss", "epoch", "mean squared error (units of y, squared)")
    label(right, "Distance from LinearRegression", "epoch", "largest difference of a coefficient")
    save(figure, options.out / "linear_regression_backends.png")

    print(
        f"loss                 {losses['full'][0]:.4f} -> {losses['full'][-1]:.6f}; of"
        f" LinearRegression {least:.6f}"
    )
    print(f"backends             {apart:.1e} apart, relative, in the loss of any epoch")
    print(f"largest difference   {found:.1e} from the coefficients of LinearRegression")
    if not (found < 1e-5 and apart < 1e-5):
        sys.exit(
            "linear_regression_backends: both backends were to take the same way, and arrive within"
            " 1e-5"
        )


def distance(weights: dict[str, np.ndarray], sklearn: LinearRegression) -> float:
    return float(
        max(
            np.abs(weights["fc1.weight"][0] - sklearn.coef_).max(),
            abs(weights["fc1.bias"][0] - sklearn.intercept_),
        )
    )


if __name__ == "__main__":
    main()

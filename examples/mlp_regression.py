"""A multilayer perceptron with Nesterov momentum and an L2 penalty, compared with MLPRegressor.

    python examples/mlp_regression.py [--out docs/gallery]

Both start with the same weights and see the same batches, so that every epoch can be compared.
MLPRegressor minimises half the squared error, and divides alpha |w|^2 / 2 by the size of the batch;
the loss and the penalty here do the same.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import onnx
from figures import FAINT, GREY, ORANGE, arguments, label, panels, save, write_csv
from models import dense
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler

import onnxfit

EPOCHS, BATCH = 100, 30  # 330 rows are 11 whole batches
RATE, MOMENTUM, ALPHA = 0.01, 0.9, 1.0


def half_squared_error(op, y_true, y_pred):
    return 0.5 * (y_true - y_pred) ** 2


def main() -> None:
    options = arguments(__doc__)
    X, y = load_diabetes(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        X, y[:, None], train_size=330, random_state=0
    )
    scale_x, scale_y = StandardScaler().fit(x_train), StandardScaler().fit(y_train)
    x_train, x_test = (scale_x.transform(part).astype(np.float32) for part in (x_train, x_test))
    y_train, y_test = (scale_y.transform(part).astype(np.float32) for part in (y_train, y_test))

    model = dense(10, 32, 16, 1)
    trainer = onnxfit.Trainer(
        model,
        loss=half_squared_error,
        penalty={"*.weight": ALPHA / (2 * BATCH)},
        optimizer=onnxfit.optimizers.SGD(RATE, momentum=MOMENTUM, nesterov=True),
    )
    history = trainer.fit(
        x_train, y_train, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0
    )
    ours, weights = history.history["loss"], trainer.get_weights()

    sklearn = MLPRegressor(
        hidden_layer_sizes=(32, 16),
        solver="sgd",
        alpha=ALPHA,
        batch_size=BATCH,
        learning_rate_init=RATE,
        momentum=MOMENTUM,
        nesterovs_momentum=True,
        shuffle=False,
        max_iter=EPOCHS,
        n_iter_no_change=np.inf,
        warm_start=True,  # begin with what is in coefs_ and intercepts_
    )
    sklearn.partial_fit(x_train, y_train[:, 0])  # creates the weights, which are then replaced
    initial = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    sklearn.coefs_ = [initial[f"fc{i}.weight"].T.copy() for i in (1, 2, 3)]
    sklearn.intercepts_ = [initial[f"fc{i}.bias"].copy() for i in (1, 2, 3)]
    with warnings.catch_warnings():
        # scikit-learn warns that it has not converged, which is intended
        warnings.simplefilter("ignore", ConvergenceWarning)
        sklearn.fit(x_train, y_train[:, 0])
    theirs = [float(loss) for loss in sklearn.loss_curve_[-EPOCHS:]]

    apart = [abs(a - b) / b for a, b in zip(ours, theirs)]
    distance = max(
        np.abs(weights[f"fc{i}.weight"].T - sklearn.coefs_[i - 1]).max() for i in (1, 2, 3)
    )
    predicted, expected = trainer.predict(x_test)[:, 0], sklearn.predict(x_test)
    score, score_sklearn = r2_score(y_test[:, 0], predicted), r2_score(y_test[:, 0], expected)

    epochs = range(1, EPOCHS + 1)
    write_csv(
        options.out / "mlp_regression.csv",
        {
            "epoch": epochs,
            "loss_onnxfit": ours,
            "loss_sklearn": theirs,
            "relative_difference": apart,
        },
    )
    figure, (left, right) = panels(
        f"Epoch for epoch as MLPRegressor: the losses differ by {max(apart):.0e} at most, relative"
    )
    left.plot(epochs, theirs, color=GREY, linewidth=7, solid_capstyle="round", label="MLPRegressor")
    left.plot(epochs, ours, color=ORANGE, linewidth=1.8, label="onnxfit")
    label(left, "Training loss", "epoch", "half squared error + penalty (variances of y)")
    ends = [min(expected.min(), predicted.min()), max(expected.max(), predicted.max())]
    right.plot(ends, ends, color=FAINT, linewidth=6, zorder=0, label="equal")
    right.plot(
        expected,
        predicted,
        "o",
        color=ORANGE,
        markersize=4,
        label=f"{len(x_test)} patients not trained on",
    )
    right.grid(axis="x")
    label(
        right,
        f"Predictions, R² {score:.3f} and {score_sklearn:.3f}",
        "MLPRegressor (deviations of y)",
        "onnxfit (deviations of y)",
    )
    save(figure, options.out / "mlp_regression.png")

    print(
        f"loss                 {ours[0]:.4f} -> {ours[-1]:.4f}; of MLPRegressor {theirs[0]:.4f} ->"
        f" {theirs[-1]:.4f}"
    )
    print(f"losses               {max(apart):.1e} apart at most, relative")
    print(f"largest difference   {distance:.1e} between the weights, after {EPOCHS} epochs")
    print(f"R2 on the test rows  {score:.4f}; of MLPRegressor {score_sklearn:.4f}")
    if not (max(apart) < 1e-4 and distance < 1e-3):
        sys.exit(
            "mlp_regression: the weights were to stay within 1e-3 of MLPRegressor's, the losses"
            " within 1e-4"
        )


if __name__ == "__main__":
    main()

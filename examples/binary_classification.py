"""Binary classification on raw scores and on probabilities, compared with LogisticRegression.

    python examples/binary_classification.py [--out docs/gallery]

One model ends in a raw score and is trained with "bce_with_logits". The other ends in a Sigmoid and
is trained with "bce". Both minimise the mean of the logistic loss plus |w|^2 / (2 C n), the
objective of LogisticRegression(C=C) divided by C n, and must find the same coefficients.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx
from figures import FAINT, GREY, INK, ORANGE, arguments, label, panels, save, write_csv
from models import dense
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

import onnxfit

EPOCHS, C = 400, 0.1


def main() -> None:
    options = arguments(__doc__)
    data = load_breast_cancer()
    X = StandardScaler().fit_transform(data.data).astype(np.float32)
    y = data.target.astype(np.float32)

    scores = dense(X.shape[1], 1)
    ways = {"scores": (scores, "bce_with_logits"), "probabilities": (with_sigmoid(scores), "bce")}
    losses, coefficients = {}, {}
    for way, (model, loss) in ways.items():
        trainer = onnxfit.Trainer(
            model,
            loss=loss,
            penalty={"fc1.weight": 1 / (2 * C * len(X))},
            optimizer=onnxfit.optimizers.SGD(0.3, momentum=0.9, nesterov=True),
        )
        losses[way] = trainer.fit(X, y, batch_size=len(X), epochs=EPOCHS, verbose=0).history["loss"]
        weights = trainer.get_weights()
        coefficients[way] = np.append(weights["fc1.weight"][0], weights["fc1.bias"])

    sklearn = LogisticRegression(C=C, tol=1e-8, max_iter=1000).fit(X.astype(np.float64), y)
    expected = np.append(sklearn.coef_[0], sklearn.intercept_)
    least = log_loss(y, sklearn.predict_proba(X.astype(np.float64))) + np.sum(sklearn.coef_**2) / (
        2 * C * len(X)
    )
    between = float(np.abs(coefficients["scores"] - coefficients["probabilities"]).max())
    difference = max(float(np.abs(found - expected).max()) for found in coefficients.values())
    # of the model that gives probabilities, which scikit-learn's are compared with directly
    probability = float(
        np.abs(trainer.predict(X)[:, 0] - sklearn.predict_proba(X.astype(np.float64))[:, 1]).max()
    )

    write_csv(
        options.out / "binary_classification.csv",
        {
            "coefficient": [*data.feature_names, "intercept"],
            "LogisticRegression": expected.tolist(),
            **{f"on_{way}": [float(v) for v in found] for way, found in coefficients.items()},
        },
    )
    figure, (left, right) = panels(
        f"On scores or on probabilities: LogisticRegression's coefficients, to {difference:.0e}"
    )
    epochs = range(1, EPOCHS + 1)
    left.loglog(
        epochs,
        losses["scores"],
        color=GREY,
        linewidth=7,
        solid_capstyle="round",
        label="on raw scores",
    )
    left.loglog(
        epochs, losses["probabilities"], color=ORANGE, linewidth=1.8, label="on probabilities"
    )
    left.axhline(least, color=INK, linewidth=1.2, linestyle=":", label="LogisticRegression")
    left.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    left.set_yticks([], minor=True)
    left.set_xticks([1, 10, 100], ["1", "10", "100"])
    label(left, "Training loss", "epoch", "logistic loss (nats) + penalty")
    ends = [expected.min(), expected.max()]
    right.plot(ends, ends, color=FAINT, linewidth=6, zorder=0, label="equal")
    right.plot(
        expected, coefficients["scores"], "o", color=GREY, markersize=8, label="on raw scores"
    )
    right.plot(
        expected,
        coefficients["probabilities"],
        "o",
        color=ORANGE,
        markersize=3.5,
        label="on probabilities",
    )
    right.grid(axis="x")
    label(
        right,
        "The 31 coefficients",
        "LogisticRegression (per deviation of the feature)",
        "onnxfit (the same unit)",
    )
    save(figure, options.out / "binary_classification.png")

    print(
        f"loss                 {losses['scores'][0]:.4f} -> {losses['scores'][-1]:.6f}; of"
        f" LogisticRegression {least:.6f}"
    )
    print(f"largest difference   {difference:.1e} from the coefficients of LogisticRegression")
    print(f"both ways            {between:.1e} apart in any coefficient")
    print(f"probabilities        {probability:.1e} from those of LogisticRegression")
    if not (difference < 1e-4 and between < 1e-4):
        sys.exit("binary_classification: both ways were to find the coefficients to 1e-4")


def with_sigmoid(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, with probabilities as its output `p` instead of the scores `y`."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["y"], ["p"], name="sigmoid"))
    model.graph.output[0].name = "p"
    return model


if __name__ == "__main__":
    main()

"""Influence: which training rows made the model say this, and which of the labels are wrong?

    python examples/influence.py [--out docs/gallery]

A small network learns 8x8 images of digits, and 60 of the 1437 labels are wrong. A step of SGD on
a training row changes the loss of a test image by -rate * (gradient of the row) @ (gradient of the
test image), to first order. TracIn adds up these products over a few checkpoints (Pruthi et al.
2020, arXiv:2002.08484): rows of positive influence have reduced the loss of the test image, and
rows of negative influence have raised it. Rows with a wrong label have great influence on
themselves. As a check, the network is trained again without the rows of most negative influence:
two test images that it got wrong because of wrong labels must then be right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from figures import BLUE, GREY, INK, ORANGE, arguments, label, panels, save, write_csv
from models import dense
from scipy.special import softmax
from sklearn.datasets import load_digits

import onnxfit
from onnxfit.callbacks import LambdaCallback

TRAINED, WRONG, INSPECTED = 1437, 60, 120  # of 1797 images
EPOCHS, RATE, CHECKPOINTS = 20, 0.1, (5, 10, 15, 20)
SHOWN = 5  # training images on each side of a test image


def main() -> None:
    options = arguments(__doc__)
    images, digits, labels = mislabeled_digits()
    x, test, truth = images[:TRAINED], images[TRAINED:], digits[TRAINED:]
    wrong = labels != digits[:TRAINED]

    models = train(x, labels)
    influence, on_itself = np.zeros((len(test), TRAINED)), np.zeros(TRAINED)
    for model in models:
        loss, of_rows = gradients(model, x, labels)
        _, of_test = gradients(model, test, truth)
        influence += RATE * of_test @ of_rows.T
        on_itself += RATE * (of_rows**2).sum(axis=1)

    # two images that are answered wrong because of the wrong labels, and the first two right ones
    chance = probabilities(models[-1], test)
    answers = chance.argmax(axis=1)
    right_without = probabilities(train(x, labels, wrong)[-1], test).argmax(axis=1) == truth
    harmed = np.flatnonzero((answers != truth) & right_without)[:2]
    shown = [*harmed, *np.flatnonzero(answers == truth)[:2]]
    tops = {
        t: np.argsort(-influence[t])[[*range(SHOWN), *range(-1, -SHOWN - 1, -1)]] for t in shown
    }
    again = {t: probabilities(train(x, labels, tops[t][-SHOWN:])[-1], test)[t] for t in shown}

    values = {"self-influence": on_itself, "loss": loss}
    lists = {name: np.argsort(-value)[:INSPECTED] for name, value in values.items()}
    found = {name: wrong[rows].cumsum() for name, rows in lists.items()}
    values |= {f"influence on test image {t}": influence[t] for t in shown}
    lists |= {f"influence on test image {t}": tops[t] for t in shown}
    write_lists(options.out / "influence.csv", lists, values, labels, digits)
    figure, (left, right) = panels(
        "The training rows behind an answer: without five of them, wrong answers become right"
    )
    left.get_subplotspec().get_gridspec().set_width_ratios([2.5, 1])
    for line, t in enumerate(shown):
        texts = [answers[t], *labels[tops[t]], again[t].argmax()]
        is_wrong = [answers[t] != truth[t], *wrong[tops[t]], again[t].argmax() != truth[t]]
        draw_row(left, line, [test[t], *x[tops[t]]], texts, is_wrong)
    finish_rows(left, len(shown))
    draw_found(right, found)
    save(figure, options.out / "influence.png")

    print(f"accuracy             {np.mean(answers == truth):.1%} of {len(test)} test images")
    for name, counts in found.items():
        print(f"by {name:<21}{counts[WRONG - 1]} of {WRONG} wrong labels in {WRONG} rows")
    print("probability of the right digit")
    for t in harmed:
        others = np.setdiff1d(np.flatnonzero(wrong), tops[t])
        draws = np.random.default_rng(0).permutation(others)[: 4 * SHOWN].reshape(4, SHOWN)
        control = np.mean([probabilities(train(x, labels, rows)[-1], test)[t] for rows in draws], 0)
        digit = truth[t]
        print(
            f"for test image {t:<6}{chance[t, digit]:.0%}; without the {SHOWN} rows that raised its"
            f" loss most {again[t][digit]:.0%}, without {SHOWN} other wrong ones {control[digit]:.0%}"
        )
    if not all(again[t].argmax() == truth[t] for t in harmed):
        sys.exit("influence: without these rows the answers were to be right")


def mislabeled_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the images, the digits on them, and the labels of the first TRAINED images."""
    rng = np.random.default_rng(0)
    data = load_digits()
    order = rng.permutation(len(data.data))
    images, digits = (data.data[order] / 16).astype(np.float32), data.target[order]
    labels = digits[:TRAINED].copy()
    changed = rng.choice(TRAINED, WRONG, replace=False)
    labels[changed] = (labels[changed] + rng.integers(1, 10, WRONG)) % 10
    return images, digits, labels


def train(x: np.ndarray, y: np.ndarray, without: Any = slice(0)) -> list[onnx.ModelProto]:
    """Return the model after each of CHECKPOINTS. The rows `without` get a weight of 0."""
    models: list[onnx.ModelProto] = []

    def keep(epoch: int, logs: dict[str, Any]) -> None:
        if epoch + 1 in CHECKPOINTS:
            models.append(trainer.export(None))

    trainer = onnxfit.Trainer(
        dense(64, 32, 10, seed=1),
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.SGD(RATE),
    )
    weights = np.ones(len(x), np.float32)  # which leave the other rows in the same batches
    weights[without] = 0
    trainer.fit(
        x,
        y,
        sample_weight=weights,
        epochs=EPOCHS,
        batch_size=32,
        verbose=0,
        callbacks=[LambdaCallback(on_epoch_end=keep)],
    )
    return models


def gradients(model: onnx.ModelProto, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the loss of each row, and the gradient of all weights in one line for each row."""
    rows = onnxfit.per_sample_gradient_model(model, "cross_entropy")
    session = onnxruntime.InferenceSession(rows.SerializeToString())
    names = [output.name for output in session.get_outputs() if output.name != "loss"]
    loss, *arrays = session.run(["loss", *names], {"x": x, "y_true/y": y})
    return loss, np.hstack([array.reshape(len(x), -1) for array in arrays])


def probabilities(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Return the probability of each class for each row."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return softmax(session.run(None, {"x": x})[0], axis=1)


def write_lists(
    path: Path,
    lists: dict[str, np.ndarray],
    values: dict[str, np.ndarray],
    labels: np.ndarray,
    digits: np.ndarray,
) -> None:
    """Write the rows of each list, with the value that the list is ordered by."""
    rows = [(name, row, float(values[name][row])) for name in lists for row in lists[name]]
    names, numbers, floats = zip(*rows)
    columns = {"list": names, "row": numbers, "value": floats}
    picked = list(numbers)
    write_csv(path, columns | {"label": labels[picked], "digit": digits[picked]})


# Lengths are in pixels of the digits, which are 8 wide.
STEP, LINE, GAP = 9.5, 14.2, 6


def place(column: int) -> float:
    """Return where a column begins: test image 0, training images from 1, new answer last."""
    return column * STEP + GAP * ((column > 0) + (column > SHOWN) + (column > 2 * SHOWN))


def draw_row(
    panel: Any,
    line: int,
    pictures: Sequence[np.ndarray],
    texts: Sequence[int],
    wrong: Sequence[Any],
) -> None:
    """Draw a test image and training images, with labels below, and the new answer at the end."""
    for column, (number, is_wrong) in enumerate(zip(texts, wrong)):
        left, top = place(column), line * LINE
        size = 9
        if column < len(pictures):
            picture = pictures[column].reshape(8, 8)
            extent = (left, left + 8, top + 8, top)
            panel.imshow(picture, cmap="Greys", vmin=0, vmax=1, extent=extent)
        else:
            top, size = top - 6.5, 15
        style = {"color": ORANGE, "weight": "bold"} if is_wrong else {"color": INK}
        panel.text(left + 4, top + 8.4, number, ha="center", va="top", size=size, **style)


def finish_rows(panel: Any, lines: int) -> None:
    """Set the limits and headings of the rows of images."""
    panel.set(
        xlim=(-1, place(2 * SHOWN + 1) + 9), ylim=(lines * LINE + 4, -5), xticks=[], yticks=[]
    )
    panel.set_anchor("NW")
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)
    headings = {
        0: "answer",
        1: "lowered its loss most",
        SHOWN + 1: "raised its loss most",
        2 * SHOWN + 1: "without\nthese",
    }
    for column, text in headings.items():
        panel.text(place(column), -1.2, text, size=9, color=INK)
    label(panel, "Test images, and the training images of most influence", "")
    panel.text(
        0,
        lines * LINE + 0.7,
        "The number below is the answer or the label; orange if wrong",
        size=9,
        color=INK,
    )


def draw_found(panel: Any, found: dict[str, np.ndarray]) -> None:
    """Draw how many wrong labels are found over the number of rows inspected."""
    inspected = range(1, INSPECTED + 1)
    for (name, counts), color in zip(found.items(), (ORANGE, BLUE)):
        panel.plot(inspected, counts, color=color, linewidth=2, label=f"by {name}")
    panel.plot(inspected, np.array(inspected) * WRONG / TRAINED, color=GREY, label="by chance")
    label(panel, f"Wrong labels found, of {WRONG}", "rows inspected", legend="center right")


if __name__ == "__main__":
    main()

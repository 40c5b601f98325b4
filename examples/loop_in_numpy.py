"""A training loop written in numpy, in which two models, an encoder and a decoder, learn together.

    python examples/loop_in_numpy.py [--out docs/gallery]

The loop computes the loss and its gradient. The decoder turns that into the gradient of its input,
which the encoder continues with. At the end the weights are compared with those that `fit` finds
for the two models joined into one file.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.compose
from figures import GREY, ORANGE, arguments, label, panels, save, write_csv
from models import dense
from sklearn.datasets import load_digits

import onnxfit

EPOCHS, BATCH, CODE = 40, 64, 12


def main() -> None:
    options = arguments(__doc__)
    X = (load_digits().data / 16).astype(np.float32)
    encoding, decoding = dense(64, 48, CODE, seed=1), dense(CODE, 48, 64, seed=2)
    adam = onnxfit.optimizers.Adam(0.002)

    # neither model has a loss
    encoder = onnxfit.Trainer(encoding, optimizer=adam, backend="forward_backward")
    decoder = onnxfit.Trainer(decoding, optimizer=adam, backend="forward_backward")
    by_hand = []
    for _ in range(EPOCHS):
        total = 0.0
        for start in range(0, len(X), BATCH):
            images = X[start : start + BATCH]
            code = encoder.forward(images)
            error = decoder.forward(code) - images
            total += np.mean(error**2) * len(images)
            # the gradient of the mean of squares
            of_decoder = decoder.backward(2 * error / error.size)
            of_encoder = encoder.backward(of_decoder["inputs"]["x"])
            decoder.apply_gradients(of_decoder["weights"])
            encoder.apply_gradients(of_encoder["weights"])
        by_hand.append(float(total / len(X)))

    joined = onnx.compose.merge_models(
        encoding, decoding, [("y", "x")], prefix1="encoder.", prefix2="decoder."
    )
    trainer = onnxfit.Trainer(joined, loss="mse", optimizer=adam)
    by_fit = trainer.fit(X, X, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history[
        "loss"
    ]

    found = {f"encoder.{name}": w for name, w in encoder.get_weights().items()}
    found |= {f"decoder.{name}": w for name, w in decoder.get_weights().items()}
    difference = max(
        float(np.abs(w - found[name]).max()) for name, w in trainer.get_weights().items()
    )
    decoded = decoder.predict(encoder.predict(X))
    explained = 1 - float(np.sum((decoded - X) ** 2) / np.sum((X - X.mean(axis=0)) ** 2))

    epochs = range(1, EPOCHS + 1)
    write_csv(
        options.out / "loop_in_numpy.csv",
        {"epoch": epochs, "loss_by_hand": by_hand, "loss_fit": by_fit},
    )
    figure, (left, right) = panels(
        f"Two models trained by a loop in numpy: the weights of fit, to {difference:.0e}"
    )
    left.semilogy(
        epochs,
        by_fit,
        color=GREY,
        linewidth=7,
        solid_capstyle="round",
        label="fit, of the two in one file",
    )
    left.semilogy(epochs, by_hand, color=ORANGE, linewidth=1.8, label="loop in numpy")
    left.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
    left.set_yticks([], minor=True)
    label(left, "Training loss", "epoch", "mean squared error (ink from 0 to 1)")
    strips = [np.hstack(part[i : i + 5].reshape(-1, 8, 8)) for i in (0, 5) for part in (X, decoded)]
    right.imshow(
        np.vstack([np.pad(strip, ((0, 1), (0, 0))) for strip in strips]),
        cmap="Greys",
        vmin=0,
        vmax=1,
    )
    right.grid(visible=False)
    right.spines[:].set_visible(False)
    right.set_yticks([3.5, 12.5, 21.5, 30.5], ["images", "decoded"] * 2)
    right.set_xticks([])
    label(
        right,
        f"64 pixels from a code of {CODE} numbers",
        f"{explained:.0%} of the variance is in the code",
    )
    save(figure, options.out / "loop_in_numpy.png")

    print(
        f"loss                 {by_hand[0]:.4f} -> {by_hand[-1]:.4f}; of fit {by_fit[0]:.4f} ->"
        f" {by_fit[-1]:.4f}"
    )
    print(f"largest difference   {difference:.1e} between the weights of the loop and of fit")
    print(f"variance explained   {explained:.1%} by {CODE} numbers for each image")
    if not (difference < 1e-3 and explained > 0.7):
        sys.exit("loop_in_numpy: the loop was to find the weights that fit finds")


if __name__ == "__main__":
    main()

"""Train a small convolutional network on 8x8 images of digits, from a .onnx file to a .onnx file.

    python examples/digits.py [--epochs 30]

The current folder then has digits.onnx (untrained), trained.onnx, digits.png (the curves),
checkpoints/ and runs/. The example ends with an error if the validation accuracy stays below 97 %,
or if the trained file and the trainer predict differently.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np
import onnx
import onnxruntime
from models import convolutional
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import onnxfit

mpl.use("Agg")
import matplotlib.pyplot as plt

WANTED_ACCURACY = 0.97
WANTED_AGREEMENT = 1e-6
TRAIN, VALIDATION, INK, FAINT = "#9aa5b1", "#d9480f", "#1f2933", "#e4e7eb"


def main(epochs: int) -> None:
    began = time.perf_counter()
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    x_train, x_val, y_train, y_val = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )

    onnx.save(convolutional(), "digits.onnx")  # from here on only the file is used
    trainer = onnxfit.Trainer(
        "digits.onnx",
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(0.001),
        metrics=["accuracy"],
    )
    print(trainer.summary())

    best = "checkpoints/digits.ckpt"
    log_dir = f"runs/digits/{time.strftime('%Y%m%d-%H%M%S')}"
    history = trainer.fit(
        x_train,
        y_train,
        epochs=epochs,
        batch_size=32,
        validation_data=(x_val, y_val),
        callbacks=[
            onnxfit.callbacks.EarlyStopping(
                monitor="val_loss", patience=5, restore_best_weights=True
            ),
            onnxfit.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
            onnxfit.callbacks.TensorBoard(log_dir, histogram_freq=1),
        ],
        verbose=1,
    )

    trainer.export("trained.onnx")
    session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": x_val})
    accuracy = float(np.mean(logits.argmax(axis=1) == y_val))
    disagreement = float(np.abs(logits - trainer.predict(x_val)).max())
    again = onnxfit.Trainer.load(best).evaluate(x_val, y_val)

    draw(history, "digits.png")
    tensorboard = shutil.which("tensorboard") or os.path.relpath(
        Path(sys.executable).with_name("tensorboard")
    )
    print(f"""
trained      {len(history.epoch)} epochs in {time.perf_counter() - began:.0f} s
accuracy     {accuracy:.2%} of {len(y_val)} validation images, by trained.onnx in onnxruntime alone
agreement    with trainer.predict to {disagreement:.1e}
checkpoint   {best}: accuracy {again["accuracy"]:.2%} when loaded again

look at      digits.png
             {tensorboard} --logdir runs""")
    if accuracy < WANTED_ACCURACY:
        sys.exit(
            f"digits: validation accuracy {accuracy:.2%}, wanted {WANTED_ACCURACY:.0%} at least"
        )
    if not disagreement <= WANTED_AGREEMENT:
        sys.exit(
            f"digits: trained.onnx and trainer.predict differ by {disagreement:.1e}, wanted"
            f" {WANTED_AGREEMENT} at most"
        )


def draw(history: onnxfit.callbacks.History, path: str) -> None:
    """Plot loss and accuracy of training and validation for each epoch, in two panels."""
    style = {
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
    }
    best = int(np.argmin(history.history["val_loss"]))
    epochs = [epoch + 1 for epoch in history.epoch]  # as in the progress bar and in messages
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.9), dpi=130, layout="constrained")
        for panel, name, title in zip(
            panels, ("loss", "accuracy"), ("Cross entropy (log scale)", "Accuracy")
        ):
            train, validation = (np.asarray(history.history[key]) for key in (name, f"val_{name}"))
            panel.axvline(epochs[best], color=FAINT, linewidth=6, solid_capstyle="butt", zorder=0)
            panel.plot(epochs, train, color=TRAIN, linewidth=2)
            panel.plot(epochs, validation, color=VALIDATION, linewidth=2)
            panel.plot(epochs[best], validation[best], "o", color=VALIDATION, markersize=6)
            panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
            panel.set_xlabel("epoch")
            panel.grid(axis="y", color=FAINT, linewidth=0.8)
            panel.set_axisbelow(True)
            panel.spines[["top", "right", "left"]].set_visible(False)
            panel.tick_params(length=0, which="both")
            panel.margins(x=0.02)
            panel.xaxis.get_major_locator().set_params(integer=True)
        loss, accuracy = panels
        loss.set_yscale("log")
        loss.yaxis.set_major_formatter("{x:g}")
        accuracy.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        accuracy.set_ylim(max(0.0, min(0.9, history.history["val_accuracy"][0])), 1.005)
        handles = [plt.Line2D([], [], color=color, linewidth=2) for color in (TRAIN, VALIDATION)]
        handles.append(plt.Line2D([], [], color=VALIDATION, marker="o", linestyle=""))
        labels = ["training", "validation", f"lowest validation loss: epoch {epochs[best]}"]
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on digits, from a .onnx file."
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=30,
        help="at most this many; training stops when it no longer improves",
    )
    main(parser.parse_args().epochs)

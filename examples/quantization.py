"""Integers: quantize a network, lose accuracy, train, win it back, and keep the form of the file.

    python examples/quantization.py [--out docs/gallery] [--quick]

A convolutional network learns 8x8 images of digits in float. Its channels are then made unequal, as
they often are where BatchNormalization was folded into convolutions: rounding now costs accuracy.
onnxfit quantizes the file to integers of 8 and of 4 bits, and trains both files. It writes
float.onnx, and int8.onnx and int4.onnx before and after training.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from figures import BLUE, GREY, ORANGE, arguments, label, panels, save, write_csv
from models import convolutional, with_unequal_channels
from sklearn.datasets import load_digits

import onnxfit
from onnxfit.callbacks import LambdaCallback

TRAINED, CALIBRATING = 1437, 256  # of 1797 images
# bits -> whether each channel has a scale, and how unequal the channels are
KINDS = {"int8": (False, 200), "int4": (True, 32)}
COLORS = {"int8": BLUE, "int4": ORANGE}


def main() -> None:
    options = arguments(__doc__, quick="fewer epochs")
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    images, classes = digits.images[order, None] / 16, digits.target[order]
    x, y = images[:TRAINED].astype(np.float32), classes[:TRAINED]
    test = images[TRAINED:].astype(np.float32), classes[TRAINED:]

    trainer = onnxfit.Trainer(
        convolutional(), loss="cross_entropy", optimizer=onnxfit.optimizers.Adam(0.001)
    )
    trainer.fit(x, y, epochs=6 if options.quick else 20, batch_size=32, verbose=0)
    trained = trainer.export(None)  # the model, without a file

    print(f"{'':16} {'accuracy':>8} {'bytes':>8} {'ms for 64':>10}")
    epochs = 4 if options.quick else 12
    rate = onnxfit.schedules.Cosine(0.002, decay_steps=epochs * len(x) // 32)
    curves: dict[str, list[float]] = {}
    changed = []
    for kind, (per_channel, largest) in KINDS.items():
        onnx.save(with_unequal_channels(trained, largest), "float.onnx")
        print_row(f"float, {kind}", "float.onnx", test)

        file = onnxfit.quantize(
            "float.onnx", x[:CALIBRATING], weights=kind, per_channel=per_channel, verbose=0
        )
        onnx.save(file, f"{kind}.onnx")
        before = print_row(kind, f"{kind}.onnx", test)

        curve = curves[kind] = [before]
        trainer = onnxfit.Trainer(
            f"{kind}.onnx",
            loss="cross_entropy",
            optimizer=onnxfit.optimizers.Adam(rate),
            metrics=["accuracy"],
            quantization=onnxfit.Quantization(float_model="float.onnx"),
        )
        trainer.fit(
            x,
            y,
            validation_data=test,
            epochs=epochs,
            batch_size=32,
            callbacks=[
                LambdaCallback(
                    on_epoch_end=lambda epoch, logs, curve=curve: curve.append(
                        100 * logs["val_accuracy"]
                    )
                )
            ],
            verbose=0,
        )
        trainer.export(f"trained.{kind}.onnx")
        after = print_row(f"{kind} trained", f"trained.{kind}.onnx", test)
        if operators(f"{kind}.onnx") != operators(f"trained.{kind}.onnx"):
            changed.append(kind)
        if after < before:
            sys.exit(f"quantization: training the {kind} file has cost accuracy")
    if changed:
        sys.exit(f"quantization: training has changed the nodes of {', '.join(changed)}")

    columns = {"epoch": range(len(curves["int8"])), **curves}
    write_csv(options.out / "quantization.csv", columns)
    goal = accuracy("float.onnx", test)
    figure, (panel,) = panels(
        "Training wins back the accuracy that quantizing has lost", columns=1, height=3.6
    )
    panel.axhline(goal, color=GREY, linestyle="--", label="float")
    for kind, curve in curves.items():
        panel.plot(curve, color=COLORS[kind], marker="o", markersize=4, label=kind)
    label(panel, "Accuracy of the integer file", "epochs of training with integers", "%")
    save(figure, options.out / "quantization.png")


def print_row(name: str, path: str, test: tuple[np.ndarray, np.ndarray]) -> float:
    """Print a line of the table, and return the accuracy in %."""
    found = accuracy(path, test)
    latency = 1e3 * least_seconds(path, test[0][:64])
    print(f"{name:16} {found:7.2f}% {Path(path).stat().st_size:8,} {latency:10.2f}")
    return found


def accuracy(path: str, test: tuple[np.ndarray, np.ndarray]) -> float:
    images, classes = test
    (scores,) = session_of(path).run(None, {"image": images})
    return float(100 * (scores.argmax(axis=1) == classes).mean())


def least_seconds(path: str, images: np.ndarray) -> float:
    """Return the CPU time of one run: the least of a hundred, on one thread."""
    session, times = session_of(path), []
    for _ in range(100):
        began = time.process_time()
        session.run(None, {"image": images})
        times.append(time.process_time() - began)
    return min(times)


def session_of(path: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def operators(path: str) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


if __name__ == "__main__":
    main()

"""CPU time of a training step with integer weights and activations, against the float step:

    python benchmarks/quantization_steps.py [--repeats 15] [--only cnn]

`onnxfit.quantize` makes the integer file of each network from random weights, and both files train
on the same random batch with Adam on one thread. The two take turns, and the least CPU time of each
counts, so that other programs on the machine change little. The MobileNet needs PyTorch and
torchvision, and is left out without them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import onnxfit

sys.path += [str(Path(__file__).resolve().parent.parent / "examples")]
import models
import quantization_mobilenet


def mobilenet() -> onnx.ModelProto:
    """Return the file that PyTorch exports of random weights."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mobilenet.onnx"
        quantization_mobilenet.export(quantization_mobilenet.mobilenet(0), file)
        return onnx.load(file)


NETWORKS: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...]]] = {
    "cnn": (models.convolutional, (1, 8, 8)),
    "mlp": (lambda: models.dense(784, 1024, 512, 10), (784,)),
    "mobilenet_v2": (mobilenet, (3, 32, 32)),
}
BATCH = 64


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--repeats", type=int, default=15, help="turns of each file")
    arguments.add_argument("--only", choices=NETWORKS)
    options = arguments.parse_args()
    print(f"onnxruntime {onnxruntime.__version__}, batch {BATCH}, milliseconds of CPU time a step")
    for name in [options.only] if options.only else NETWORKS:
        make, shape = NETWORKS[name]
        try:
            model = make()
        except ImportError as error:
            print(f"  {name:14} left out: {error}")
            continue
        times = least_times(model, shape, options.repeats)
        columns = [
            f"{kind} {1e3 * t:8.2f} ({t / times['float']:.2f}x)" for kind, t in times.items()
        ]
        print(f"  {name:14} " + "   ".join(columns), flush=True)


def least_times(model: onnx.ModelProto, shape: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Return the least seconds of CPU time of a step of the float model and of each integer file."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, *shape)).astype(np.float32)
    files = {"float": model} | {
        kind: onnxfit.quantize(model, x, weights=kind, verbose=0) for kind in ("int8", "int4")
    }
    trainers = {
        kind: onnxfit.Trainer(file, loss="cross_entropy", optimizer="adam", threads=1)
        for kind, file in files.items()
    }
    scores = trainers["float"].predict_on_batch(x)
    y = rng.integers(0, scores.shape[1], BATCH)
    for trainer in trainers.values():  # the first steps compile the graphs
        for _ in range(3):
            trainer.train_on_batch(x, y)
    steps = max(1, int(0.05 / seconds_of(trainers["float"], x, y, 2)))
    times = {kind: float("inf") for kind in files}
    for _ in range(repeats):
        for kind, trainer in trainers.items():
            times[kind] = min(times[kind], seconds_of(trainer, x, y, steps))
    return times


def seconds_of(trainer: onnxfit.Trainer, x: np.ndarray, y: np.ndarray, steps: int) -> float:
    """Return the seconds of CPU time that a step takes."""
    began = time.process_time()
    for _ in range(steps):
        trainer.train_on_batch(x, y)
    return (time.process_time() - began) / steps


if __name__ == "__main__":
    main()

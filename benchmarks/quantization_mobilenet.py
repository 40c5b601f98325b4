"""Accuracy of torchvision's mobilenet_v2 in float, quantized, and trained with its integers:

    python benchmarks/quantization_mobilenet.py [--seeds 0 1 2] [--epochs 5] [--folder mobilenet]

Each seed trains the network in PyTorch on images of six patterns that formulas draw, makes the
channels of its layers unequal without changing its results, and exports it. onnxfit quantizes the
file and trains it. The test images are drawn apart from those of training and of calibration.

The float files stay in the folder, and later runs read them: on another onnxruntime, without
PyTorch and torchvision.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnxfit
from onnxfit import Quantization, Trainer
from onnxfit.schedules import Cosine

PATTERNS, SIZE, BATCH = 6, 32, 64
TRAINED, TESTED, CALIBRATING = 1920, 1200, 256  # images
FLOAT_EPOCHS = 5
UNEQUAL = 16  # the largest channel of a layer is so many times the smallest
RATE = 5e-4  # of Adam at the start
# weights and whether each channel has a scale
KINDS = {"int8, one scale": ("int8", False), "int4, by channel": ("int4", True)}

Arrays = tuple[np.ndarray, np.ndarray]


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--epochs", type=int, default=5, help="of training with integers")
    arguments.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments.add_argument("--scales", choices=["fixed", "learned"], default="fixed")
    arguments.add_argument("--folder", type=Path, default=Path("mobilenet"))
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"onnxruntime {onnxruntime.__version__}; % of {TESTED} images, file size in bytes")
    print("seed  file              float  quantized  trained  nodes  bytes before, after  seconds")
    for seed in options.seeds:
        file = options.folder / f"mobilenet_v2_{seed}.onnx"
        if not file.exists():
            export_trained(file, seed)
        for kind in options.kinds:
            print(row(file, seed, kind, options.epochs, options.scales), flush=True)


def row(file: Path, seed: int, kind: str, epochs: int, scales: str) -> str:
    """Quantize a float file, train the result, and return the line of the table."""
    x, y = drawn(TRAINED, seed)
    test = drawn(TESTED, seed + 1000)
    weights, per_channel = KINDS[kind]
    quantized = onnxfit.quantize(
        file, x[:CALIBRATING], weights=weights, per_channel=per_channel, verbose=0
    )
    trainer = Trainer(
        quantized,
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(Cosine(RATE, epochs * len(x) // BATCH)),
        quantization=Quantization(float_model=file, scales=scales),
        threads=1,
        seed=seed,
    )
    began = time.process_time()
    trainer.fit(x, y, epochs=epochs, batch_size=BATCH, verbose=0)
    seconds = time.process_time() - began
    trained = trainer.export(None)
    figures = [accuracy(model, test) for model in (onnx.load(file), quantized, trained)]
    same = "same" if operators(quantized) == operators(trained) else "OTHER"
    return (
        f"{seed:4}  {kind:16} {figures[0]:6.2f} {figures[1]:10.2f} {figures[2]:8.2f}  {same:5}"
        f"  {quantized.ByteSize():9,} {trained.ByteSize():9,}  {seconds:7.0f}"
    )


def operators(model: onnx.ModelProto) -> list[tuple[str, tuple[str, ...]]]:
    return [(node.op_type, tuple(node.output)) for node in model.graph.node]


def accuracy(model: onnx.ModelProto, data: Arrays) -> float:
    """Return the percentage of right classes, in onnxruntime with its default options."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x, y = data
    scores = [session.run(None, {"x": x[i : i + 200]})[0] for i in range(0, len(x), 200)]
    return float(100 * (np.concatenate(scores).argmax(axis=1) == y).mean())


def drawn(count: int, seed: int) -> Arrays:
    """Return images (count, 3, SIZE, SIZE) of patterns in random colours with noise, and classes."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, PATTERNS, count)
    y, x = np.mgrid[:SIZE, :SIZE][:, None] - SIZE / 2 + rng.uniform(-6, 6, (2, count, 1, 1))
    width = rng.uniform(0.5, 1.0, (count, 1, 1))
    patterns = np.stack(
        [
            np.sin(width * y),
            np.sin(width * x),
            np.sin(0.7 * width * (x + y)),
            np.sin(0.7 * width * (x - y)),
            np.sin(width * x) * np.sin(width * y),
            np.sin(width * np.hypot(x, y)),
        ]
    )
    shade = (patterns[classes, np.arange(count)] + 1)[:, None] / 2
    light = rng.uniform(0.4, 1, (2, count, 3, 1, 1))
    colors = light * np.array([1, -1]).reshape(2, 1, 1, 1, 1)
    images = colors[0] * shade + colors[1] * (1 - shade)
    images += rng.normal(0, 0.25, images.shape)
    return images.astype(np.float32), classes


def mobilenet(seed: int) -> Any:
    """Return torchvision's network with random weights."""
    import torch

    try:
        from torchvision.models import mobilenet_v2
    except RuntimeError:  # its compiled operators, which no layer here uses, need another PyTorch
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        from torchvision.models import mobilenet_v2
    torch.manual_seed(seed)
    return mobilenet_v2(num_classes=PATTERNS)


def export_trained(file: Path, seed: int) -> None:
    """Train the network in PyTorch, make its channels unequal, and export it."""
    import torch

    torch.set_num_threads(1)
    net = mobilenet(seed)
    x, y = map(torch.from_numpy, drawn(TRAINED, seed))
    optimizer = torch.optim.Adam(net.parameters(), 0.003)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.003, total_steps=FLOAT_EPOCHS * len(x) // BATCH
    )
    for _ in range(FLOAT_EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    measure_statistics(net, x)
    make_unequal(net.eval(), np.random.default_rng(seed))
    export(net, file)


def measure_statistics(net: Any, x: Any) -> None:
    """Set the statistics of BatchNormalization to those of the trained weights, in place."""
    import torch

    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
    with torch.no_grad():
        for rows in x.split(BATCH):
            net(rows)


def make_unequal(net: Any, rng: np.random.Generator) -> None:
    """Divide the channels between two convolutions by numbers of 1 to UNEQUAL, in place.

    The second convolution multiplies by them. Their results stay the same where ReLU6 clips no
    number at 6 (Nagel et al. 2019, arXiv:1906.04721, undo such factors).
    """
    import torch

    with torch.no_grad():
        for block in net.features[1:-1]:
            *inner, project, _ = block.conv  # [expand,] depthwise, project, its BatchNormalization
            for first, second in zip(inner, [*[layer[0] for layer in inner[1:]], project]):
                norm = first[1]
                factors = UNEQUAL ** rng.uniform(0, 1, norm.num_features)
                divisor = torch.from_numpy(factors.astype(np.float32))
                norm.weight /= divisor
                norm.bias /= divisor
                shape = (-1, 1, 1, 1) if second.groups > 1 else (1, -1, 1, 1)
                second.weight *= divisor.reshape(shape)


def export(net: Any, file: Path) -> None:
    """Write a file that takes any number of images."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of its own code
        torch.onnx.export(
            net.eval(),
            (torch.zeros(2, 3, SIZE, SIZE),),
            file,
            input_names=["x"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            verbose=False,
        )


if __name__ == "__main__":
    main()

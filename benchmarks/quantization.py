"""Quantization-aware training in onnxfit and in PyTorch (torch.ao.quantization), from the same
float weights:

    python benchmarks/quantization.py [--seeds 0 1 2] [--epochs 10] [--rate 0.001] [--cosine]
        [--curves]

A small convolutional network learns the digits of scikit-learn, and its channels are made unequal.
Each contender quantizes it, with ranges from the same rows, and trains it with Adam for the same
epochs on the same batches; with `--cosine` the learning rate decays to 0. Scales are fixed, or follow the batches by a moving average ("moving").
The accuracy is that of the integers: of the exported file, and of PyTorch's converted module where
there is one (8 bits only). Seconds and milliseconds are CPU time on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.ao.quantization as ao
from sklearn.datasets import load_digits
from torch import nn

import onnxfit
from onnxfit import Quantization, Trainer
from onnxfit.schedules import Constant, Cosine, Schedule

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import models

TRAINED, CALIBRATING, BATCH = 1437, 256, 32  # of 1797 images
UNEQUAL = {"int8": 200, "int4": 32}  # the largest channel is so many times the smallest
LIMITS = {"int8": (-128, 127), "int4": (-8, 7)}
Predict = Callable[[np.ndarray], np.ndarray]


@dataclass
class Result:
    """Accuracies in %, before training and after each epoch; CPU seconds of training."""

    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    predict: Predict | None = None  # of the integers after training
    file: bytes = b""


@dataclass(frozen=True)
class Task:
    kind: str  # int8 (one scale for each weight) or int4 (one for each channel)
    seed: int
    epochs: int
    schedule: Schedule  # of the learning rate
    model: onnx.ModelProto  # of floats
    images: np.ndarray
    classes: np.ndarray

    @property
    def calibration(self) -> np.ndarray:
        return self.images[:CALIBRATING]

    def batches(self, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng([self.seed, epoch]).permutation(TRAINED)
        for i in range(0, TRAINED, BATCH):
            rows = order[i : i + BATCH]
            yield self.images[rows], self.classes[rows]

    def accuracy(self, predict: Predict) -> float:
        scores = predict(self.images[TRAINED:])
        return float(100 * (scores.argmax(axis=1) == self.classes[TRAINED:]).mean())


def task(kind: str, seed: int, epochs: int, schedule: Schedule) -> Task:
    """Train a float network, and make its channels unequal."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.images))
    images = (digits.images[order, None] / 16).astype(np.float32)
    classes = digits.target[order]
    trainer = Trainer(
        models.convolutional(seed), loss="cross_entropy", optimizer="adam", seed=seed, threads=1
    )
    trainer.fit(images[:TRAINED], classes[:TRAINED], epochs=20, batch_size=BATCH, verbose=0)
    model = models.with_unequal_channels(trainer.export(None), UNEQUAL[kind], seed)
    return Task(kind, seed, epochs, schedule, model, images, classes)


# onnxfit
# --------------------------------------------------------------------------------------------------


def with_onnxfit(task: Task) -> Result:
    file = onnxfit.quantize(
        task.model,
        task.calibration,
        weights=task.kind,
        per_channel=task.kind == "int4",
        verbose=0,
    )
    trainer = Trainer(
        file,
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(task.schedule),
        quantization=Quantization(float_model=task.model),
        threads=1,
    )
    result = Result([task.accuracy(in_onnxruntime(file.SerializeToString()))])
    for epoch in range(task.epochs):
        began = time.process_time()
        for x, y in task.batches(epoch):
            trainer.train_on_batch(x, y)
        result.seconds += time.process_time() - began
        result.accuracies.append(task.accuracy(trainer.predict))
    result.file = trainer.export(None).SerializeToString()
    result.predict = in_onnxruntime(result.file)
    result.accuracies[-1] = task.accuracy(result.predict)
    return result


def in_onnxruntime(file: bytes) -> Predict:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


# PyTorch
# --------------------------------------------------------------------------------------------------


def with_torch(task: Task, moving: bool) -> Result:
    net = quantized_net(task, moving)
    result = Result([task.accuracy(of_integers(net, task.kind))])
    optimizer = torch.optim.Adam(net.parameters(), 1.0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule)
    for epoch in range(task.epochs):
        net.train()
        began = time.process_time()
        for x, y in task.batches(epoch):
            loss = nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
        result.seconds += time.process_time() - began
        result.accuracies.append(task.accuracy(of_integers(net, task.kind)))
    result.predict = of_integers(net, task.kind)
    if task.kind == "int8":
        result.file = exported(net, task.calibration[:BATCH])
    return result


def quantized_net(task: Task, moving: bool) -> Any:
    """Return the network with fake quantization, whose ranges are those of the calibration rows."""
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in task.model.graph.initializer}
    layers = {
        "conv1": nn.Conv2d(1, 16, 3, padding=1),
        "conv2": nn.Conv2d(16, 32, 3, padding=1),
        "fc": nn.Linear(512, 10),
    }
    for name, layer in layers.items():
        layer.load_state_dict(
            {k: torch.from_numpy(weights[f"{name}.{k}"].copy()) for k in ("weight", "bias")}
        )
    conv1, conv2, fc = layers.values()
    net = nn.Sequential(
        ao.QuantStub(), conv1, nn.ReLU(), conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), fc,
        ao.DeQuantStub(),
    )  # fmt: skip
    net = ao.fuse_modules_qat(net.train(), [["1", "2"], ["3", "4"]])
    low, high = LIMITS[task.kind]
    observer, scheme = ao.MinMaxObserver, torch.per_tensor_symmetric
    if task.kind == "int4":
        observer, scheme = ao.PerChannelMinMaxObserver, torch.per_channel_symmetric
    net.qconfig = ao.QConfig(
        activation=ao.FakeQuantize.with_args(
            observer=ao.MovingAverageMinMaxObserver if moving else ao.MinMaxObserver,
            quant_min=0,
            quant_max=255,
            dtype=torch.quint8,
        ),
        weight=ao.FakeQuantize.with_args(
            observer=observer, quant_min=low, quant_max=high, dtype=torch.qint8, qscheme=scheme
        ),
    )
    ao.prepare_qat(net, inplace=True)
    net.apply(ao.disable_fake_quant)
    with torch.no_grad():
        net(torch.from_numpy(task.calibration))
    net.apply(ao.enable_fake_quant)
    if not moving:
        net.apply(ao.disable_observer)
    return net


def of_integers(net: Any, kind: str) -> Predict:
    """Return the network in integers; in rounded floats for 4 bits, which PyTorch cannot convert."""
    torch.backends.quantized.engine = "fbgemm"
    net.eval()
    if kind == "int8":
        net = ao.convert(net)

    def predict(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return net(torch.from_numpy(x)).numpy()

    return predict


def exported(net: Any, x: np.ndarray) -> bytes:
    """Return the ONNX file of the converted module: only PyTorch's older exporter writes one."""
    path = Path("pytorch.int8.onnx")
    try:
        torch.onnx.export(
            ao.convert(net.eval()),
            (torch.from_numpy(x),),
            path,
            input_names=["image"],
            dynamic_axes={"image": {0: "batch"}},
            dynamo=False,
        )
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


# The tables
# --------------------------------------------------------------------------------------------------

CONTENDERS: dict[str, Callable[[Task], Result]] = {
    "onnxfit": with_onnxfit,
    "PyTorch": lambda task: with_torch(task, moving=False),
    "PyTorch, moving": lambda task: with_torch(task, moving=True),
}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--rate", type=float, default=1e-3)
    arguments.add_argument("--cosine", action="store_true", help="let the rate decay to 0")
    arguments.add_argument("--curves", action="store_true", help="the accuracy after each epoch")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")  # PyTorch warns that torch.ao will move to torchao
    torch.set_num_threads(1)
    print(f"onnxruntime {onnxruntime.__version__}, PyTorch {torch.__version__}; % of 360 images")
    schedule: Schedule = Constant(options.rate)
    if options.cosine:
        steps = options.epochs * -(-TRAINED // BATCH)
        schedule = Cosine(options.rate, decay_steps=steps)
    for kind in LIMITS:
        tasks = [task(kind, seed, options.epochs, schedule) for seed in options.seeds]
        floats = [t.accuracy(in_onnxruntime(t.model.SerializeToString())) for t in tasks]
        print(f"\n{kind}, channels unequal by {UNEQUAL[kind]}; float {spread(floats)}")
        print(f"  {'':18} {'quantized':>15} {'trained':>15} {'seconds':>8} {'bytes':>7} {'ms':>6}")
        results = {name: [train(t) for t in tasks] for name, train in CONTENDERS.items()}
        for name, found in results.items():
            print_row(name, found, tasks[0])
        if options.curves:
            for name, found in results.items():
                print(f"  {name}")
                for result in found:
                    print("   ", " ".join(f"{a:6.2f}" for a in result.accuracies))


def print_row(name: str, found: list[Result], task: Task) -> None:
    before, after = (spread([r.accuracies[i] for r in found]) for i in (0, -1))
    seconds = statistics.median(r.seconds for r in found)
    file = found[0].file
    x = task.images[:BATCH]
    predict = in_onnxruntime(file) if file else None
    latency = f"{1e3 * least_seconds(predict, x):6.2f}" if predict else "     -"
    size = f"{len(file):7,}" if file else "      -"
    print(f"  {name:18} {before:>15} {after:>15} {seconds:8.2f} {size} {latency}", flush=True)
    if file and predict:
        assert found[0].predict is not None
        own, exported_ = task.accuracy(found[0].predict), task.accuracy(predict)
        if own != exported_:
            print(
                f"  {'':18} the file of the first seed has {exported_:.2f}, in place of {own:.2f}"
            )


def spread(numbers: list[float]) -> str:
    return f"{statistics.mean(numbers):.2f} ± {statistics.pstdev(numbers):.2f}"


def least_seconds(predict: Predict, x: np.ndarray) -> float:
    times = []
    for _ in range(200):
        began = time.process_time()
        predict(x)
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    main()

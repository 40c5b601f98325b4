"""The table of rules against onnxruntime's own gradients: microseconds per training step, on the
training build.

    python benchmarks/gradients.py [--repeats 7] [--only transformer] [--build]

One process, SGD, the same model and batch; the two sources take turns, so that noise of the machine
meets both. The ratio is rules / builder: below 1 the rules are faster. `--build` times instead how
long a model takes until its first step, and how that grows with the model. On a plain onnxruntime
only the rules are timed. The networks are exported by PyTorch, which must be installed.
"""

from __future__ import annotations

import argparse
import io
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from onnxfit import Trainer
from onnxfit.optimizers import SGD

SOURCES = (
    ["onnx", "onnxruntime"]
    if hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder")
    else ["onnx"]
)


class Transformer(nn.Module):
    """d 128, 2 layers, 4 heads, 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(1000, 128),
            nn.Parameter(torch.randn(64, 128) * 0.02),
        )
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.layers, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(128, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x) + self.positions).mean(1))


class Recurrent(nn.Module):
    """Hidden 128, 50 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


def dense(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two blocks of 32 channels on 16×16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(4)
        )
        self.norms, self.head = (
            nn.ModuleList(nn.BatchNorm2d(32) for _ in range(4)),
            nn.Linear(32, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for i in (0, 2):
            y = torch.relu(self.norms[i](self.convolutions[i](x)))
            x = torch.relu(x + self.norms[i + 1](self.convolutions[i + 1](y)))
        return self.head(x.mean((2, 3)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear 10-10, batch 64": (lambda: dense(10, 10), lambda: torch.randn(64, 10)),
    "MLP 784-256-128-10, batch 128": (
        lambda: dense(784, 256, 128, 10),
        lambda: torch.randn(128, 784),
    ),
    "CNN 16-32 on 28×28, batch 64": (convolutional, lambda: torch.randn(64, 1, 28, 28)),
    "residual blocks 32 on 16×16, batch 16": (Residual, lambda: torch.randn(16, 3, 16, 16)),
    "transformer d 128, 64 tokens, batch 16": (
        Transformer,
        lambda: torch.randint(0, 1000, (16, 64)),
    ),
    "LSTM 128, 50 steps, batch 32": (Recurrent, lambda: torch.randn(32, 50, 32)),
}


def exported(module: nn.Module, x: torch.Tensor) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.train(), (x,), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}, opset_version=17,
            training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        )  # fmt: skip
    return file.getvalue()


def step_of(model: bytes, x: np.ndarray, gradient: str, threads: int) -> Callable[[], Any]:
    trainer = Trainer(
        model, loss="cross_entropy", optimizer=SGD(1e-3), gradient=gradient, threads=threads
    )
    y = np.random.default_rng(0).integers(0, 10, len(x))
    trainer.train_on_batch(x, y)
    (session,) = trainer._training.backend.caches["train"].exact.values()
    return session.run  # the step alone: the batch is in its buffers


def steps(options: argparse.Namespace) -> None:
    print(
        f"onnxruntime {onnxruntime.__version__}, {options.threads} threads; µs per step: median"
        f" (middle half of {options.repeats})"
    )
    for title, (make, inputs) in NETWORKS.items():
        if options.only and options.only not in title:
            continue
        torch.manual_seed(0)
        x = inputs()
        model = exported(make(), x)
        run = {source: step_of(model, x.numpy(), source, options.threads) for source in SOURCES}
        times: dict[str, list[float]] = {source: [] for source in SOURCES}
        count = dict.fromkeys(SOURCES, 1)
        for source in SOURCES:
            began = time.perf_counter()
            run[source]()
            count[source] = max(1, int(0.15 / (time.perf_counter() - began)))
        for _ in range(options.repeats):
            for source in SOURCES:
                began = time.perf_counter()
                for _ in range(count[source]):
                    run[source]()
                times[source].append((time.perf_counter() - began) / count[source] * 1e6)
        quartiles = {source: np.percentile(times[source], [25, 50, 75]) for source in SOURCES}
        figures = "   ".join(
            f"{s} {q[1]:10,.1f} ({q[0]:,.1f} .. {q[2]:,.1f})" for s, q in quartiles.items()
        )
        ratio = (
            f"   ratio {quartiles['onnx'][1] / quartiles['onnxruntime'][1]:.2f}"
            if len(SOURCES) > 1
            else ""
        )
        print(f"{title:40} {figures}{ratio}", flush=True)


def chain(nodes: int) -> onnx.ModelProto:
    """Layers of four nodes, so many that the model has `nodes`."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    body, weights, last = [], [], "x"
    for i in range(nodes // 4):
        weights += [
            onnx.numpy_helper.from_array(rng.normal(size=s).astype(np.float32), f"{n}{i}")
            for n, s in (("w", (8, 8)), ("b", 8))
        ]
        body += [
            helper.make_node(op, ins, [out])
            for op, ins, out in (
                ("MatMul", [last, f"w{i}"], f"m{i}"), ("Add", [f"m{i}", f"b{i}"], f"a{i}"),
                ("Tanh", [f"a{i}"], f"t{i}"), ("Add", [f"t{i}", last], f"r{i}"),
            )
        ]  # fmt: skip
        last = f"r{i}"
    ends = [helper.make_tensor_value_info(name, 1, [16, 8]) for name in ("x", last)]
    graph = helper.make_graph(body, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def build(options: argparse.Namespace) -> None:
    print("seconds from a model to its first step (SGD), with the session of onnxruntime")
    x = np.ones((16, 8), np.float32)
    before: tuple[int, float] | None = None
    for nodes in (40, 1000, 4000, 10000):
        model = chain(nodes)
        began = time.perf_counter()
        trainer = Trainer(model, loss="mean_squared_error", optimizer=SGD(), gradient="onnx")
        built = time.perf_counter()
        trainer.train_on_batch(x, x)
        seconds = time.perf_counter() - began
        slope = ""
        if before is not None:
            exponent = np.log(seconds / before[1]) / np.log(nodes / before[0])
            slope = f"  nodes^{exponent:.2f}"
        before = nodes, seconds
        print(f"{nodes:6} nodes  {seconds:6.2f} s, {built - began:.2f} of them in Trainer(){slope}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Time the table of rules against onnxruntime's gradients."
    )
    parser.add_argument("--repeats", type=int, default=7, help="how often each figure is measured")
    parser.add_argument("--threads", type=int, default=2, help="of onnxruntime")
    parser.add_argument("--only", help="networks whose title has this in it")
    parser.add_argument(
        "--build", action="store_true", help="time the way to the first step instead of later steps"
    )
    chosen = parser.parse_args()
    build(chosen) if chosen.build else steps(chosen)

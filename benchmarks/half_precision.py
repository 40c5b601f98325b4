"""Products and training steps in bfloat16 on the CPU, beside PyTorch. Run it with OMP_NUM_THREADS=1.

python benchmarks/half_precision.py products     # errors and speeds of the operator
python benchmarks/half_precision.py steps [NAME ...]   # times of a training step
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).with_name("suite")))

from networks import network
from workloads import WORKLOADS

from onnxfit import Trainer
from onnxfit.kernels.library import DOMAIN, library_path
from onnxfit.kernels.rounding import PRECISIONS
from onnxfit.optimizers import Adam

Run = Callable[[], object]
SIZES = ((2048, 768, 768), (128, 512, 512), (32, 784, 512))  # rows, steps, columns


def fastest(runs: dict[str, Run], seconds: float = 8.0) -> dict[str, float]:
    """Return the least processor time of each run, in seconds. The runs take turns."""
    best = dict.fromkeys(runs, np.inf)
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in runs.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
    return best


def session_of_product(
    rows: int, steps: int, columns: int, precision: int
) -> onnxruntime.InferenceSession:
    """Return a session with the operator y = a b."""
    shapes = {"a": [rows, steps], "b": [steps, columns], "y": [rows, columns]}
    a, b, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    node = onnx.helper.make_node(
        "Product", ["a", "b"], ["y"], domain=DOMAIN, sizes=[1, 1, 1, rows, columns, steps],
        views=[0, 0, 0, 0, steps, 1, 0, 0, 0, 0, columns, 1], strides=[0, 0, 0, columns, 1],
        shape=[rows, columns], alpha=1.0, has_relu=0, precision=precision,
    )  # fmt: skip
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "product", [a, b], [y]),
        opset_imports=[onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(DOMAIN, 1)],
        ir_version=8,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(library_path())
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def autocasted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b, whose factors are cast from float32."""
    return a.bfloat16() @ b.bfloat16()


def products() -> None:
    """Print the largest error of a product, as a share of the sum of sizes, and GFLOP/s."""
    rng = np.random.default_rng(0)
    for rows, steps, columns in SIZES:
        a, b = (
            rng.standard_normal(s).astype(np.float32) for s in ((rows, steps), (steps, columns))
        )
        exact = a.astype(np.float64) @ b.astype(np.float64)
        sizes = np.abs(a).astype(np.float64) @ np.abs(b)
        feeds = {"a": a, "b": b}
        x, w = torch.from_numpy(a), torch.from_numpy(b)
        runs: dict[str, Run] = {}
        for name, precision in {"float32": 0, **PRECISIONS}.items():
            session = session_of_product(rows, steps, columns, precision)
            bound = session.io_binding()
            for each, array in feeds.items():
                bound.bind_cpu_input(each, array)
            bound.bind_output("y")
            runs[f"onnxfit, {name}"] = partial(session.run_with_iobinding, bound)
            (y,) = session.run(None, feeds)
            print(
                f"{rows} x {steps} x {columns}, {name}: error {np.max(np.abs(y - exact) / sizes):.1e}"
            )
        runs["PyTorch, float32"] = partial(torch.matmul, x, w)
        runs["PyTorch, cast to bf16"] = partial(autocasted, x, w)
        for name, seconds in fastest(runs).items():
            print(
                f"{rows} x {steps} x {columns}, {name}: {2e-9 * rows * steps * columns / seconds:.0f} GFLOP/s"
            )


class Encoder(nn.Module):
    """Layers of a transformer on words, and the first word's class."""

    def __init__(self, words: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x))[:, 0])


def cnn() -> nn.Module:
    """Return a small network of convolutions for images of 32 x 32."""
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
        for i, o in ((3, 32), (32, 64), (64, 128))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 10))


def mlp() -> nn.Module:
    """Return a network of dense layers for 784 columns."""
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def of_suite(name: str) -> tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]:
    """Return a network of the suite and a batch of its inputs."""
    return partial(network, name), lambda: torch.from_numpy(WORKLOADS[name].split()[0][0])


# Name -> the network and its inputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "MLP": (mlp, lambda: torch.randn(128, 784)),
    "transformer": (
        lambda: Encoder(1000, 256, 4, 2),
        lambda: torch.randint(0, 1000, (16, 64)),
    ),
    "BERT-tiny": (lambda: Encoder(30522, 128, 2, 2), lambda: torch.randint(0, 30522, (32, 128))),
    "CNN": (cnn, lambda: torch.randn(32, 3, 32, 32)),
    **{name: of_suite(name) for name in ("vgg", "resnet", "mobilenet", "signals", "lstm", "gru")},
}


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore warnings: those of the exporter, and of precisions that are slow here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def torch_step(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, autocast: bool, optimizer: Any
) -> float:
    """Train on a batch, and return the loss."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def steps(names: list[str]) -> None:
    """Print the time of a step, and its ratio to a step of onnxfit in float32."""
    for name in names or NETWORKS:
        torch.manual_seed(0)
        make, inputs = NETWORKS[name]
        model, x = make(), inputs()
        y = torch.randint(0, model(x).shape[1], (len(x),))
        runs: dict[str, Run] = {}
        with TemporaryDirectory() as folder, quietly():
            path = Path(folder, "model.onnx")
            torch.onnx.export(
                model.train(), (x,), path, dynamo=False, input_names=["x"],
                dynamic_axes={"x": {0: "batch"}}, opset_version=17, do_constant_folding=False,
                training=torch.onnx.TrainingMode.TRAINING,
            )  # fmt: skip
            for precision in ("float32", "bf16", "bf16x3"):
                trainer = Trainer(
                    path, loss="cross_entropy", optimizer=Adam(1e-4), precision=precision, threads=1
                )
                step = partial(trainer.train_on_batch, x.numpy(), y.numpy())
                step()
                runs[f"onnxfit, {precision}"] = step
        for autocast in (False, True):
            optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
            label = f"PyTorch, {'autocast' if autocast else 'float32'}"
            runs[label] = partial(torch_step, model, x, y, autocast=autocast, optimizer=optimizer)
        times = fastest(runs)
        for label, seconds in times.items():
            ratio = seconds / times["onnxfit, float32"]
            print(f"{name}, {label}: {1e3 * seconds:.2f} ms, {ratio:.2f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *chosen = sys.argv[1:]
    products() if what == "products" else steps(chosen)

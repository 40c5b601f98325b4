"""The Python side of the benchmark: it writes the folders, and takes steps when it is asked.

python native.py write OUT
python native.py serve THREADS     reads "NETWORK STEPS" from its input, answers with figures
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx.numpy_helper import from_array
from safetensors.numpy import save_file

from onnxfit import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/web"))
import make_model

BATCH = 32
SIZES = (784, 256, 128, 10)


def mlp() -> onnx.ModelProto:
    """Three linear layers: float[N, 784] x -> float[N, 10] logits."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        mlp (float[N, 784] x) => (float[N, 10] logits) {
        a = Gemm(x, w0, b0)  b = Relu(a)  c = Gemm(b, w1, b1)  d = Relu(c)
        logits = Gemm(d, w2, b2) }""")
    rng = np.random.default_rng(0)
    for i, (fan_in, fan_out) in enumerate(pairwise(SIZES)):
        weight = rng.normal(size=(fan_in, fan_out)) * np.sqrt(2 / fan_in)
        tensors = {f"w{i}": weight, f"b{i}": np.zeros(fan_out)}
        for name, value in tensors.items():
            model.graph.initializer.append(from_array(value.astype(np.float32), name))
    return model


NETWORKS = {"cnn": (make_model.network, (1, 8, 8)), "mlp": (mlp, (784,))}


def trainer_of(network: str, threads: int | None = None) -> Trainer:
    model, _ = NETWORKS[network]
    return Trainer(model(), loss="cross_entropy", optimizer="adam", threads=threads)


def batch_of(network: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.random((BATCH, *NETWORKS[network][1])).astype(np.float32)
    return x, rng.integers(0, 10, BATCH)


def write(out: Path) -> None:
    for network in NETWORKS:
        folder = trainer_of(network).export_training(
            out / network, batch_size=BATCH, target="web", include=["train"]
        )
        x, y = batch_of(network)
        save_file({"x": x, "y": y}, folder / "data.safetensors")


def serve(threads: int) -> None:
    trainers: dict[str, Trainer] = {}
    for line in sys.stdin:
        network, steps = line.split()
        x, y = batch_of(network)
        began = time.perf_counter()
        if network not in trainers:
            trainers[network] = trainer_of(network, threads)
        losses, times = [], []
        for _ in range(int(steps)):
            start = time.perf_counter()
            losses.append(trainers[network].train_on_batch(x, y)["loss"])
            times.append(1000 * (time.perf_counter() - start))
            if len(times) == 1:
                first = 1000 * (time.perf_counter() - began)
        print(json.dumps({"losses": losses, "times": times, "first": first}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        serve(int(sys.argv[2]))

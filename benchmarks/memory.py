"""How much memory LoRA beside a large frozen base takes, in onnxfit and in PyTorch.

    python benchmarks/memory.py [--megabytes 1024] [--backend full] [--folder /tmp]

The base is a stack of dense layers of 2048 units, of floats or of integers of 4 bits. Each
contender runs in a process of its own: it reads its file, trains a few steps of 32 rows, evaluates,
predicts, and writes a checkpoint and the merged model. After each phase the process says how much memory it has, and what it had at most, as
a multiple of the base. What the imports take is subtracted. Other programs do not change the
figures. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 2048
ROWS = 32
RANK = 8


def memory(what: str) -> int:
    """The current ("VmRSS") or greatest ("VmHWM") memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


class Phases:
    """Prints the memory after each phase, and the most during it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.imports = memory("VmRSS")
        self.reset()

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def done(self, phase: str) -> None:
        most, now = ((memory(what) - self.imports) / self.size for what in ("VmHWM", "VmRSS"))
        print(f"| {phase} | {now:.2f} | {most:.2f} |", flush=True)
        self.reset()


def layers(megabytes: int) -> int:
    return max(1, megabytes * 2**20 // (4 * WIDTH * WIDTH))


def weight_of(i: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng(i)
    return random.standard_normal((WIDTH, WIDTH), np.float32) * np.float32(WIDTH**-0.5)


def batch() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)


def write_onnx(folder: Path, megabytes: int) -> None:
    """The base as an ONNX file, with external data above 2 GB."""
    import onnx
    import onnx.helper as oh

    nodes, tensors = [], []
    count = layers(megabytes)
    for i in range(count):
        tensors.append(onnx.numpy_helper.from_array(weight_of(i), f"w{i}"))
        nodes.append(oh.make_node("MatMul", [f"h{i}", f"w{i}"], [f"m{i}"], f"m{i}"))
        nodes.append(oh.make_node("Tanh", [f"m{i}"], [f"h{i + 1}"], f"t{i}"))
    _save(folder, nodes, tensors, count, megabytes)


def write_packed(folder: Path, megabytes: int) -> None:
    """A base of the same size whose weights have 4 bits, with a scale for each 32 of them."""
    import onnx
    import onnx.helper as oh

    nodes, tensors = [], []
    blocks = WIDTH // 32
    count = max(1, megabytes * 2**20 // (WIDTH * blocks * (16 + 4)))
    for i in range(count):
        random = np.random.default_rng(i)
        numbers = random.integers(0, 256, (WIDTH, blocks, 16), np.uint8)
        scales = np.full(WIDTH * blocks, WIDTH**-0.5 / 4.6, np.float32)
        tensors.append(onnx.numpy_helper.from_array(numbers, f"w{i}"))
        tensors.append(onnx.numpy_helper.from_array(scales, f"s{i}"))
        product = oh.make_node("MatMulNBits", [f"h{i}", f"w{i}", f"s{i}"], [f"m{i}"], f"m{i}")
        product.domain = "com.microsoft"
        for name, value in {"K": WIDTH, "N": WIDTH, "bits": 4, "block_size": 32}.items():
            product.attribute.append(oh.make_attribute(name, value))
        nodes += [product, oh.make_node("Tanh", [f"m{i}"], [f"h{i + 1}"], f"t{i}")]
    _save(folder, nodes, tensors, count, megabytes)


def _save(folder: Path, nodes: list[Any], tensors: list[Any], count: int, megabytes: int) -> None:
    import onnx
    import onnx.helper as oh

    x, y = (
        oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", WIDTH])
        for name in ("h0", f"h{count}")
    )
    model = oh.make_model(
        oh.make_graph(nodes, "base", [x], [y], tensors),
        opset_imports=[oh.make_opsetid("", 17), oh.make_opsetid("com.microsoft", 1)],
        ir_version=8,
    )
    external = megabytes > 1900
    onnx.save(model, folder / "base.onnx", save_as_external_data=external, location="base.data")


def run_onnxfit(folder: Path, megabytes: int, backend: str) -> None:
    import onnxfit

    _ = onnxfit.Trainer, onnxfit.LoRA  # which import their modules
    phases = Phases(sum(file.stat().st_size for file in folder.glob("base.*")))
    trainer = onnxfit.Trainer(
        folder / "base.onnx",
        loss="mse",
        optimizer="adam",
        adapters=onnxfit.LoRA(rank=RANK),
        backend=backend,
    )
    phases.done("read and build")
    x = batch()
    for _ in range(3):
        trainer.train_on_batch(x, x)
    phases.done("3 steps")
    trainer.evaluate(x, x)
    phases.done("evaluate")
    trainer.predict_on_batch(x)
    trainer.predict(x)
    phases.done("predict")
    trainer.save(folder / "c.ckpt")
    phases.done("checkpoint")
    trainer.export(folder / "merged.onnx")
    phases.done("export")


def write_torch(folder: Path, megabytes: int) -> None:
    import torch

    count = layers(megabytes)
    torch.save({f"{i}": torch.from_numpy(weight_of(i)) for i in range(count)}, folder / "base.pt")


def run_torch(folder: Path, megabytes: int, backend: str) -> None:
    import torch

    count = layers(megabytes)
    phases = Phases(count * 4 * WIDTH * WIDTH)
    base = [*torch.load(folder / "base.pt").values()]
    a = [torch.randn(WIDTH, RANK).mul_(WIDTH**-0.5).requires_grad_() for _ in base]
    b = [torch.zeros(RANK, WIDTH, requires_grad=True) for _ in base]
    optimizer = torch.optim.Adam([*a, *b])
    phases.done("read and build")
    x = torch.from_numpy(batch())

    def forward() -> torch.Tensor:
        h = x
        for one in range(count):
            h = torch.tanh(h @ base[one] + h @ a[one] @ b[one])
        return h

    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(forward(), x).backward()
        optimizer.step()
    phases.done("3 steps")
    with torch.no_grad():
        torch.nn.functional.mse_loss(forward(), x)
        phases.done("evaluate")
        forward()
        phases.done("predict")
        state = {"base": base, "a": a, "b": b, "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "c.pt")
        phases.done("checkpoint")
        merged = {str(i): base[i] + a[i] @ b[i] for i in range(count)}
        torch.save(merged, folder / "merged.pt")
        phases.done("export")


CONTENDERS = {
    "onnxfit": (write_onnx, run_onnxfit),
    "PyTorch": (write_torch, run_torch),
    "onnxfit of 4 bits": (write_packed, run_onnxfit),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the base")
    parser.add_argument("--backend", default="full", help="of onnxfit")
    parser.add_argument("--folder", type=Path, default=None, help="for files, twice the base")
    parser.add_argument("--contender", choices=CONTENDERS, help="one alone; both by default")
    parser.add_argument("--part", choices=("write", "run"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "write":
        CONTENDERS[given.contender][0](given.folder, given.megabytes)
        return
    if given.part == "run":
        CONTENDERS[given.contender][1](given.folder, given.megabytes, given.backend)
        return
    for contender in [given.contender] if given.contender else CONTENDERS:
        print(f"\n| {contender}: after | memory | most |\n| --- | ---: | ---: |", flush=True)
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            for part in ("write", "run"):
                options = ["--contender", contender, "--part", part, "--folder", folder]
                options += ["--megabytes", str(given.megabytes), "--backend", given.backend]
                subprocess.run([sys.executable, __file__, *options], check=True)


if __name__ == "__main__":
    main()

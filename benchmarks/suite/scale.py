"""How time grows with weights, batch, layers and rows:

`python benchmarks/suite/scale.py [--quick] [--write-docs]`.

Four lines of dense networks, plain SGD, mean squared error: everything but one size stays. Each
point is one process; onnxfit's step, the time to compile it (Trainer to the first step), and where
PyTorch is installed, its eager step. Rows come from a .npy file mapped into memory; there the time
is that of `fit`. Each is measured with one thread and with all, and the shorter time counts. The slope is that of a line through log time over log size: 1 where time grows as
the size does. A point that is still fixed cost bends it, so that of the larger half stands beside
it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from processes import HERE, ROOT, run_json, surroundings
from report import cores, machine

CAUSES = ("weights", "batch", "layers", "rows")
SIZES: dict[str, list[int]] = {
    "weights": [10**3, 10**4, 10**5, 10**6, 10**7, 10**8],
    "batch": [1, 4, 16, 64, 256, 1024],
    "layers": [2, 5, 10, 20, 50, 100, 200],
    "rows": [10**3, 10**4, 10**5, 10**6, 10**7],
}
QUICK: dict[str, list[int]] = {
    "weights": [10**3, 10**5],
    "batch": [1, 64],
    "layers": [2, 10],
    "rows": [10**3, 10**5],
}
UNITS = {
    "weights": "weights, batch 16",
    "batch": "rows of a batch, 10⁵ weights",
    "layers": "layers of 64×64, batch 16",
    "rows": "rows on disk, 10 columns, batch 1024",
}


@dataclass(frozen=True)
class Point:
    cause: str
    size: int

    @property
    def layers(self) -> tuple[int, ...]:
        if self.cause == "weights":
            width = max(1, round(math.sqrt(self.size)))
            return width, width
        if self.cause == "batch":
            return 316, 316
        if self.cause == "layers":
            return (64,) * (self.size + 1)
        return 10, 1

    @property
    def batch(self) -> int:
        return {"batch": self.size, "rows": min(self.size, 1024)}.get(self.cause, 16)

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        return [
            rng.standard_normal((b, a), dtype=np.float32) / np.float32(math.sqrt(a)) for a, b in zip(self.layers, self.layers[1:])
        ]  # fmt: skip

    def model(self) -> onnx.ModelProto:
        helper, nodes, weights, here = onnx.helper, [], [], "x"
        for i, array in enumerate(self.arrays()):
            weights.append(onnx.numpy_helper.from_array(array, f"w{i}"))
            last = i == len(self.layers) - 2
            nodes.append(
                helper.make_node("Gemm", [here, f"w{i}"], ["y" if last else f"s{i}"], transB=1)
            )
            if not last:
                nodes.append(helper.make_node("Tanh", [f"s{i}"], [f"h{i}"]))
                here = f"h{i}"
        ends = [
            helper.make_tensor_value_info(name, 1, ["batch", size])
            for name, size in (("x", self.layers[0]), ("y", self.layers[-1]))
        ]
        graph = helper.make_graph(nodes, "dense", ends[:1], ends[1:], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def data(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        ends = self.layers[0], self.layers[-1]
        x, y = (rng.standard_normal((self.batch, size), dtype=np.float32) for size in ends)
        return x, y


def per_run(run: Callable[[], object], seconds: float) -> float:
    """The least time of single runs, or of groups of them where one is too short to time: what
    others on the machine do comes on top of it.
    """
    run()
    began = time.perf_counter()
    run()
    group = max(1, int(1e-3 / max(time.perf_counter() - began, 1e-9)))
    samples, until = [], time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(group):
            run()
        samples.append((time.perf_counter() - began) / group)
    return min(samples)


def measure_onnxfit(point: Point, threads: int, seconds: float) -> dict[str, float]:
    sys.path.insert(1, str(ROOT))
    from onnxfit import Trainer

    x, y = point.data()
    model = point.model()
    began = time.perf_counter()
    trainer = Trainer(model, loss="mean_squared_error", optimizer=1e-3, threads=threads)
    trainer.train_on_batch(x, y)
    compiled = time.perf_counter() - began
    if point.cause == "rows":
        return {"compile": compiled, "fit": fit_rows(point, trainer)}
    (session,) = trainer._training.backend.caches["train"].exact.values()
    return {"compile": compiled, "step": per_run(session.run, seconds)}


def fit_rows(point: Point, trainer: Any) -> float:
    """Seconds of an epoch over a file."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "x.npy", Path(folder) / "y.npy"
        for path, columns in zip(paths, (10, 1)):
            file = np.lib.format.open_memmap(path, "w+", np.float32, (point.size, columns))
            for start in range(0, point.size, 1 << 18):
                part = file[start : start + (1 << 18)]
                part[...] = rng.standard_normal(part.shape, dtype=np.float32)
            file.flush()
            del file
        # the file is in the system's cache now, where it fits
        trainer.fit(*paths, batch_size=point.batch, verbose=0)
        began = time.perf_counter()
        trainer.fit(*paths, batch_size=point.batch, verbose=0)
        return time.perf_counter() - began


def measure_torch(point: Point, threads: int, seconds: float) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    layers: list[Any] = []
    for array in point.arrays():
        layer = torch.nn.Linear(array.shape[1], array.shape[0], bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(array))
        layers += [layer, torch.nn.Tanh()]
    module = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, fused=True)
    x, y = map(torch.from_numpy, point.data())

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()

    return {"torch": per_run(step, seconds)}


def slope(sizes: list[int], times: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0]) if len(sizes) > 1 else math.nan


def draw(path: Path, found: dict[str, dict[str, dict[int, float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    styles = {
        "step": ("#1b6ca8", "o-", "onnxfit, step"),
        "fit": ("#1b6ca8", "o-", "onnxfit, fit of an epoch"),
        "compile": ("#e08a1e", "s--", "onnxfit, compile"),
        "torch": ("#8a8a8a", "^-", "PyTorch eager, step"),
    }
    for axis, (cause, lines) in zip(figure.subplots(2, 2).flat, found.items()):
        for what, points in lines.items():
            color, style, label = styles[what]
            axis.loglog(
                list(points),
                list(points.values()),
                style,
                color=color,
                label=f"{label} (slope {slope(*_larger(points)):.2f})",
            )
        axis.set_xlabel(UNITS[cause])
        axis.set_ylabel("seconds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _larger(points: dict[int, float]) -> tuple[list[int], list[float]]:
    """The half of the points where the size counts most, three at least."""
    kept = sorted(points)[-max(3, (len(points) + 1) // 2) :]
    return kept, [points[size] for size in kept]


def measured(
    who: str, cause: str, size: int, options: argparse.Namespace, log: Path
) -> dict[str, float]:
    """The times of one point, each at the better number of threads."""
    best: dict[str, float] = {}
    for threads in sorted(set(options.threads)):
        command = [sys.executable, str(HERE / "scale.py"), "--threads", str(threads)]
        command += ["--seconds", str(options.seconds), "--point", who, cause, str(size)]
        answer = run_json(command, surroundings(threads, options.folder.resolve()), log)
        if "failed" in answer:
            print(f"{cause} {size}: {who} {answer.pop('failed')}")
        for what, seconds in answer.items():
            best[what] = min(seconds, best.get(what, math.inf))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/suite/scale.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two sizes each")
    parser.add_argument(
        "--causes", nargs="+", choices=CAUSES, default=list(CAUSES), help="what grows"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, cores()], help="1 and all cores"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for the steps of one point")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/benchmarks")
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/benchmarks/scale.csv and .png"
    )
    # how the file calls itself
    parser.add_argument(
        "--point", nargs=3, metavar=("WHO", "CAUSE", "SIZE"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.point:
        who, cause, size = options.point
        measure = measure_onnxfit if who == "onnxfit" else measure_torch
        print(json.dumps(measure(Point(cause, int(size)), options.threads[0], options.seconds)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    output = (
        ROOT / "docs/benchmarks" if options.write_docs else options.folder / "results/benchmarks"
    )
    output.mkdir(parents=True, exist_ok=True)
    log = options.folder / "scale.log"
    log.write_text("")
    print(machine())
    found: dict[str, dict[str, dict[int, float]]] = {}
    for cause in options.causes:
        lines = found[cause] = {}
        for size in (QUICK if options.quick else SIZES)[cause]:
            for who in ("onnxfit", *(("torch",) if cause != "rows" else ())):
                for what, seconds in measured(who, cause, size, options, log).items():
                    lines.setdefault(what, {})[size] = seconds
            times = "  ".join(
                f"{what} {points[size]:.3g} s" for what, points in lines.items() if size in points
            )
            print(f"{cause:8} {size:>11,}  {times}", flush=True)
        for what, points in lines.items():
            print(
                f"{cause:8} {what}: slope {slope(list(points), list(points.values())):.2f}, of the"
                f" larger half {slope(*_larger(points)):.2f}"
            )
    with (output / "scale.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["grows", "size", "what", "seconds"])
        writer.writerows(
            [cause, size, what, f"{s:.7g}"]
            for cause, lines in found.items()
            for what, points in lines.items()
            for size, s in points.items()
        )
    try:
        draw(output / "scale.png", found)
    except ImportError:
        print("no picture: matplotlib is not installed")
    print(f"written: {output}/scale.csv, scale.png")


if __name__ == "__main__":
    main()

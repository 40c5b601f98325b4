"""numpy compared with onnxruntime on simple functions of vectors of 10 to a million numbers.

    python examples/numpy_against_onnxruntime.py [--out docs/gallery] [--quick]

Both compute with one thread, in float32. The time of an onnxruntime call includes passing the
arrays. Two of the graphs are written here; the other two are onnxfit's: a loss, and an optimizer's
update. Before anything is timed, the results must agree.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from figures import BLUE, ORANGE, arguments, label, panels, save, write_csv

import onnxfit

SIZES = [10, 100, 1000, 10_000, 100_000, 1_000_000]
# A call is repeated until so many seconds have passed; the best of five such runs counts.
MIN_SECONDS = 0.01
Feeds = dict[str, np.ndarray]

LINE = """<ir_version: 10, opset_import: ["": 21]>
    line (float[n] x, float a, float b) => (float[n] y) { scaled = Mul(b, x)  y = Add(a, scaled) }"""
SOFTMAX = """<ir_version: 10, opset_import: ["": 21]>
    softmax (float[n] x) => (float[n] y) { y = Softmax(x) }"""


def line(f: Feeds) -> np.ndarray:
    return f["a"] + f["b"] * f["x"]


def mean_squared_distance(f: Feeds) -> np.ndarray:
    return np.mean((f["y_true"] - f["y_pred"]) ** 2)


def softmax(f: Feeds) -> np.ndarray:
    e = np.exp(f["x"] - f["x"].max())
    return e / e.sum()


def momentum(f: Feeds) -> tuple[np.ndarray, np.ndarray]:
    velocity = np.float32(0.9) * f["weight/velocity"] + f["gradient"]
    return f["weight"] - f["learning_rate"] * velocity, velocity


# name: in numpy, as a model, the vectors it takes, and its other inputs
FUNCTIONS: dict[str, tuple[Callable[[Feeds], Any], onnx.ModelProto, list[str], Feeds]] = {
    "a + b x": (
        line,
        onnx.parser.parse_model(LINE),
        ["x"],
        {"a": np.array(2, np.float32), "b": np.array(3, np.float32)},
    ),
    "mean squared distance": (
        mean_squared_distance,
        onnxfit.losses.MeanSquaredError().build_onnx_function(["n"]),
        ["y_true", "y_pred"],
        {},
    ),
    "softmax": (softmax, onnx.parser.parse_model(SOFTMAX), ["x"], {}),
    "an update with momentum": (
        momentum,
        onnxfit.optimizers.SGD(momentum=0.9).build_onnx_function(["n"]),
        ["weight", "gradient", "weight/velocity"],
        {"learning_rate": np.array(0.1, np.float32), "step": np.array(0)},
    ),
}


def main() -> None:
    options = arguments(__doc__, quick="sizes up to 1000 only, each timed once")
    sizes = SIZES[:3] if options.quick else SIZES
    rng = np.random.default_rng(0)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    rows, largest = [], 0.0
    for name, (function, model, vectors, others) in FUNCTIONS.items():
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
        for size in sizes:
            feeds = others | {
                vector: rng.standard_normal(size, dtype=np.float32) for vector in vectors
            }
            in_numpy, in_onnxruntime = partial(function, feeds), partial(session.run, None, feeds)
            expected = in_numpy()
            for ours, theirs in zip(
                expected if isinstance(expected, tuple) else (expected,), in_onnxruntime()
            ):
                largest = max(largest, float(np.abs(ours - theirs).max() / np.abs(ours).max()))
            numpy_time, runtime_time = (
                seconds(in_numpy, options.quick),
                seconds(in_onnxruntime, options.quick),
            )
            rows.append((name, size, 1e6 * numpy_time, 1e6 * runtime_time))
            print(
                f"{name:24} {size:9,} numbers    numpy {1e6 * numpy_time:9.2f} us    onnxruntime"
                f" {1e6 * runtime_time:9.2f} us"
            )
    write_csv(
        options.out / "numpy_against_onnxruntime.csv",
        dict(zip(("function", "size", "numpy_us", "onnxruntime_us"), zip(*rows))),
    )

    of_size = {size: [(a, b) for _, n, a, b in rows if n == size] for size in (sizes[0], sizes[-1])}
    faster = {size: sum(b < a for a, b in times) for size, times in of_size.items()}
    counts = " and ".join(
        f"{count} of {len(FUNCTIONS)} with {size:,} numbers" for size, count in faster.items()
    )
    figure, axes = panels(f"Functions that are faster in onnxruntime: {counts}", rows=2, height=6.6)
    for panel, name in zip(axes, FUNCTIONS):
        _, x, numpy_times, runtime_times = zip(*(row for row in rows if row[0] == name))
        panel.loglog(x, numpy_times, "o-", color=BLUE, linewidth=1.8, markersize=5, label="numpy")
        panel.loglog(
            x, runtime_times, "o-", color=ORANGE, linewidth=1.8, markersize=5, label="onnxruntime"
        )
        label(panel, name, "size of the vector (float32 numbers)", "time per call (µs)")
    save(figure, options.out / "numpy_against_onnxruntime.png")

    print(
        f"largest difference       {largest:.1e} between their results, relative to the largest of"
        " them"
    )
    if not largest < 1e-4:
        sys.exit("numpy_against_onnxruntime: both were to give the same to 1e-4")


def seconds(call: Callable[[], Any], quick: bool) -> float:
    """Return the seconds that one call takes."""
    number, best = 1, float("inf")
    while (took := timed(call, number)) < MIN_SECONDS and not quick:
        number = max(2 * number, int(1.2 * number * MIN_SECONDS / took))
    for _ in range(1 if quick else 5):
        best = min(best, timed(call, number))
    return best / number


def timed(call: Callable[[], Any], number: int) -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

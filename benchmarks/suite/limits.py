"""What arithmetic allows: a step's matrix products at the machine's own speed for products of that
size, plus moving the optimizer's bytes.

    python benchmarks/suite/limits.py WORKLOAD OPTIMIZER WEIGHTS [THREADS]

prints, as JSON, the seconds of a step that does nothing else: with three products for each of the
forward pass, and with only those that are needed (the first layer has no gradient of its input).
Each product is timed alone, the best of many. The bytes are those of weights and gradients, read
and written, and of Adam's two slots, at the speed of a copy of that size.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
from workloads import WORKLOADS

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

PASSES = 3  # far enough apart that not all of them meet a busy moment


def best(run: Callable[[], object], seconds: float = 0.1) -> float:
    run()
    least, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - began)
    return least


def product(count: int, m: int, k: int, n: int) -> Callable[[], object]:
    """What makes `count` products (m, k) @ (k, n); by PyTorch, or by numpy where that is not there:
    two pools of threads would fight.
    """
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((count, *size)).astype(np.float32) for size in ((m, k), (k, n)))
    out = np.empty((count, m, n), np.float32)
    if torch is None:
        return lambda: np.matmul(a, b, out=out)
    x, y, z = map(torch.from_numpy, (a, b, out))
    if count > 1:
        return lambda: torch.bmm(x, y, out=z)
    x, y, z = x[0], y[0], z[0]
    return lambda: torch.mm(x, y, out=z)


def copied(size: int) -> float:
    """Seconds to read and write `size` bytes in all."""
    source = np.ones(max(1, size // 8), np.float32)
    target = np.empty_like(source)
    return best(lambda: np.copyto(target, source))


def _three(count: int, m: int, k: int, n: int) -> list[tuple[int, int, int, int]]:
    """The products of the forward pass, of the weight's gradient and of the input's."""
    return [(count, m, k, n), (count, k, m, n), (count, m, n, k)]


def main() -> None:
    name, optimizer, weights = sys.argv[1], sys.argv[2], int(sys.argv[3])
    threads = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    if torch is not None:
        torch.set_num_threads(threads)
    shapes = {shape for one in WORKLOADS[name].products for shape in _three(*one)}
    known = dict.fromkeys(shapes, float("inf"))
    for _ in range(PASSES):
        for shape in shapes:
            known[shape] = min(known[shape], best(product(*shape)))
    total = spared = operations = 0.0
    for index, (count, m, k, n) in enumerate(WORKLOADS[name].products):
        for place, shape in enumerate(_three(count, m, k, n)):
            total += known[shape]
            operations += 2 * count * m * k * n
            # tokens are looked up: the first product of a transformer has a gradient of its input
            if index == 0 and place == 2 and not WORKLOADS[name].vocabulary:
                spared = known[shape]
    # weight and gradient, each read and written once; each of Adam's slots too
    moved = copied(4 * weights * {"sgd": 4, "adam": 8}[optimizer])
    limit = {
        "products": total,
        "moved": moved,
        "limit": total + moved,
        "needed": total - spared + moved,
        "operations": operations,
    }
    print(json.dumps(limit))


if __name__ == "__main__":
    main()

"""Predict the time of a training step on many cores from the operators that use several threads:

`python benchmarks/threads.py [--networks mlp resnet ...] [--cores 4 8 16 32 64] [--folder FOLDER]`.

For each network of the suite, onnxruntime's profiler times every operator of a training step with
one thread and with `--threads` threads. These turns alternate, and the least time of each operator
counts. Operators of one type are added up. The script prints two tables in Markdown:

- the types with the largest shares of the step on one thread, each with its speed-up;
- the step: its time on one thread, its speed-up without the profiler, and the speed-up on more
  cores that Amdahl's law predicts, with the type of operator that takes the most time there.

If t(1) and t(p) are the times of a type on 1 and p threads, the part f of its work that runs on all
threads satisfies t(p) = t(1) (1 - f + f / p), and the prediction for n cores is t(1) (1 - f +
f / n). f is limited to 0 ... 1. The time between operators is the bare step minus the operators;
it does not shrink. The prediction is an upper bound: it knows neither the limits of memory nor the
time that many threads need to start, and it does not split operators that are too small.

A network that is not in FOLDER is exported, which needs PyTorch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxfit import Trainer
from onnxfit.optimizers import Adam

sys.path.insert(0, str(Path(__file__).resolve().parent / "suite"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from profile_step import WARM_UP_STEPS, operator_runs, profiled_sessions
from workloads import LEARNING_RATES, WORKLOADS, Workload

SUITE = Path(__file__).resolve().parent / "suite"
NETWORKS = (
    "mlp",
    "cnn",
    "resnet",
    "mobilenet",
    "unet",
    "transformer",
    "decoder",
    "vit",
    "bert",
    "lstm",
)
BETWEEN = "between operators"
SERIAL = 1.1  # an operator with a smaller speed-up on two threads uses one of them


@dataclass(frozen=True)
class Part:
    """The operators of one type in a step: seconds with one thread, and with `threads`."""

    op_type: str
    alone: float
    together: float
    threads: int

    @property
    def speed_up(self) -> float:
        return self.alone / self.together

    @property
    def parallel(self) -> float:
        """Part of the work that runs on all threads, in 0 ... 1.

        >>> Part("Gemm", 4.0, 2.0, 2).parallel, Part("Concat", 4.0, 4.5, 2).parallel
        (1.0, 0.0)
        """
        saved = (1 - self.together / self.alone) / (1 - 1 / self.threads)
        return min(max(saved, 0.0), 1.0)

    def seconds(self, cores: int) -> float:
        """Predicted time on this many cores.

        >>> Part("Gemm", 4.0, 3.0, 2).seconds(4)
        2.5
        """
        return self.alone * (1 - self.parallel + self.parallel / cores)


@dataclass(frozen=True)
class Step:
    """A training step: its operators by type, and its seconds without the profiler."""

    network: str
    parts: tuple[Part, ...]
    alone: float
    together: float

    def seconds(self, cores: int) -> float:
        return sum(part.seconds(cores) for part in self.parts)

    def limit(self, cores: int) -> Part:
        """The type of operator that takes the most time on this many cores."""
        return max(self.parts, key=lambda part: part.seconds(cores))


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        nets = Path(options.folder or folder)
        export([n for n in options.networks if not (nets / f"{n}.onnx").exists()], nets)
        steps = [measure(WORKLOADS[name], nets, options) for name in options.networks]
    print("\n".join([*operator_table(steps, options.rows), "", *step_table(steps, options)]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=WORKLOADS)
    parser.add_argument("--folder", help="where the exported networks are; default: a new one")
    parser.add_argument("--threads", type=int, default=2, help="compared with one thread")
    parser.add_argument("--cores", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each turn of a round")
    parser.add_argument("--rows", type=int, default=7, help="types of operators for each network")
    return parser.parse_args()


def export(names: Sequence[str], folder: Path) -> None:
    if names:
        subprocess.run([sys.executable, SUITE / "networks.py", folder, *names], check=True)


def measure(workload: Workload, folder: Path, options: argparse.Namespace) -> Step:
    """Time the operators and the step, with one thread and with several, in turns."""
    pair = (1, options.threads)
    operators: dict[int, dict[tuple[str, str], float]] = {threads: {} for threads in pair}
    steps = dict.fromkeys(pair, float("inf"))
    for _, threads in itertools.product(range(options.rounds), pair):
        steps[threads] = min(steps[threads], bare_step(workload, folder, threads, options.seconds))
        least = operators[threads]
        for key, seconds in profiled_step(workload, folder, threads, options.seconds).items():
            least[key] = min(least.get(key, seconds), seconds)
    print(f"{workload.name}: {1000 * steps[1]:.3g} ms", file=sys.stderr)
    return Step(workload.name, parts_of(operators, steps, options.threads), *steps.values())


def parts_of(
    operators: Mapping[int, Mapping[tuple[str, str], float]],
    steps: Mapping[int, float],
    threads: int,
) -> tuple[Part, ...]:
    """Add up the nodes of each type. The rest of the bare step is the time between operators."""
    types: dict[str, dict[int, float]] = defaultdict(lambda: dict.fromkeys((1, threads), 0.0))
    for count, nodes in operators.items():
        for (op_type, _), seconds in nodes.items():
            types[op_type][count] += seconds
    parts = [Part(t, s[1], s[threads], threads) for t, s in types.items() if min(s.values()) > 0]
    rest = steps[1] - sum(part.alone for part in parts)
    if rest > 0:
        parts.append(Part(BETWEEN, rest, rest, threads))
    return tuple(sorted(parts, key=lambda part: -part.alone))


def trainer_of(workload: Workload, folder: Path, threads: int) -> Trainer:
    return Trainer(
        str(folder / f"{workload.network}.onnx"),
        loss=workload.loss,
        optimizer=Adam(LEARNING_RATES["adam"] * workload.pace),
        batch_norm="train",
        threads=threads,
    )


def bare_step(workload: Workload, folder: Path, threads: int, seconds: float) -> float:
    """Return the least time of a step, without the profiler."""
    trainer = trainer_of(workload, folder, threads)
    times = timed_steps(trainer, workload.split()[0], seconds)
    return min(times[WARM_UP_STEPS:])


def profiled_step(
    workload: Workload, folder: Path, threads: int, seconds: float
) -> dict[tuple[str, str], float]:
    """Return the least time that each node takes in a step, by (operator, name)."""
    with tempfile.TemporaryDirectory() as profiles:
        with profiled_sessions(Path(profiles)):
            trainer = trainer_of(workload, folder, threads)
            count = len(timed_steps(trainer, workload.split()[0], seconds))
            del trainer  # a session writes its profile when it ends
            gc.collect()
        runs = operator_runs(Path(profiles))
    # A node in the body of a loop runs several times a step.
    return {key: len(times) // count * min(times) for key, times in runs.items()}


def timed_steps(trainer: Trainer, batch: tuple[Any, Any], seconds: float) -> list[float]:
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 * WARM_UP_STEPS or time.perf_counter() < end:
        began = time.perf_counter()
        trainer.train_on_batch(*batch)
        times.append(time.perf_counter() - began)
    return times


def operator_table(steps: Sequence[Step], rows: int) -> list[str]:
    """Return the largest types of each network: share on one thread, and speed-up."""
    lines = ["| network | operators: share of the step on one thread (speed-up) |", "| --- | --- |"]
    for step in steps:
        total = step.seconds(1)
        shown = [
            f"{part.op_type} {100 * part.alone / total:.0f} %"
            + (f" ({part.speed_up:.2f})" if part.op_type != BETWEEN else "")
            for part in step.parts[:rows]
        ]
        lines.append(f"| {step.network} | {', '.join(shown)} |")
    return lines


def step_table(steps: Sequence[Step], options: argparse.Namespace) -> list[str]:
    """Return the time of each step, the measured speed-up, and the predicted ones."""
    most = max(options.cores)
    heads = ["network", "ms, 1 thread", f"{options.threads} threads", "serial"]
    heads += [*(f"{n} cores" for n in options.cores), f"most of the time on {most} cores"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 2)} --- |"]
    for step in steps:
        whole = step.seconds(1)
        serial = sum(part.alone for part in step.parts if part.speed_up < SERIAL)
        limit = step.limit(most)
        cells = [step.network, f"{1000 * step.alone:.3g}", f"{step.alone / step.together:.2f}"]
        cells.append(f"{100 * serial / whole:.0f} %")
        cells += [f"{whole / step.seconds(n):.1f}" for n in options.cores]
        share = limit.seconds(most) / step.seconds(most)
        lines.append(f"| {' | '.join(cells)} | {limit.op_type} ({100 * share:.0f} %) |")
    return lines


if __name__ == "__main__":
    main()

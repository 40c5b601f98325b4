"""The time of the same training in onnxfit (with both backends), scikit-learn and PyTorch.

    python examples/training_benchmark.py [--out docs/gallery] [--quick]

All have the same data, batches and order, learning rate, number of steps and initial weights. They
minimise half the squared error by plain gradient descent. A comparison counts only if all arrive at
the same loss, to 1e-3 relative: otherwise the example ends with an error. Each training runs in its
own process with one thread, since the thread pools of onnxruntime and PyTorch would wait for each
other. PyTorch is left out if it is not installed.

The time is that of a whole training divided by its steps, the median of nine trainings after one
for warming up. It does not include building the trainer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from models import dense

WANTED = 1e-3
Weights = dict[str, np.ndarray]  # fc1.weight, fc1.bias, fc2.weight, ...


@dataclass(frozen=True)
class Problem:
    sizes: tuple[int, ...]
    batch: int
    rate: float
    epochs: int
    rows: int = 1000

    @property
    def steps(self) -> int:
        return self.epochs * self.rows // self.batch

    @property
    def linear(self) -> bool:
        return len(self.sizes) == 2

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        X = rng.standard_normal((self.rows, self.sizes[0]), dtype=np.float32)
        y = (
            X @ rng.standard_normal(self.sizes[0]) / 3
            + np.sin(2 * X[:, 0])
            + 0.1 * rng.standard_normal(self.rows)
        )
        return X, y.astype(np.float32)[:, None]

    def model(self) -> onnx.ModelProto:
        return dense(*self.sizes)

    def weights(self) -> Weights:
        return {
            tensor.name: onnx.numpy_helper.to_array(tensor)
            for tensor in self.model().graph.initializer
        }

    def loss(self, weights: Weights) -> float:
        """Half the mean squared error over all rows, in float64."""
        X, y = self.data()
        values = X.astype(np.float64)
        for layer in range(1, len(self.sizes)):
            values = (
                values @ weights[f"fc{layer}.weight"].astype(np.float64).T
                + weights[f"fc{layer}.bias"]
            )
            if layer < len(self.sizes) - 1:
                values = np.maximum(values, 0)
        return float(np.mean((values - y) ** 2) / 2)


PROBLEMS = {
    "linear regression, batches of 50": Problem((10, 1), batch=50, rate=0.05, epochs=50),
    "linear regression, batches of 1": Problem((10, 1), batch=1, rate=0.005, epochs=2),
    "perceptron 10-64-32-1, batches of 50": Problem(
        (10, 64, 32, 1), batch=50, rate=0.05, epochs=50
    ),
}

# For a problem, a contender returns three functions: the first restores the initial weights, the
# second trains, and the third returns the weights.
Training = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Weights]]


def with_onnxfit(problem: Problem, backend: str) -> Training:
    import onnxfit

    X, y = problem.data()
    trainer = onnxfit.Trainer(
        problem.model(),
        loss=lambda op, y, p: 0.5 * (y - p) ** 2,
        optimizer=problem.rate,
        backend=backend,
        threads=1,
    )
    initial = problem.weights()

    def train() -> None:
        trainer.fit(X, y, batch_size=problem.batch, epochs=problem.epochs, shuffle=False, verbose=0)

    return lambda: trainer.set_weights(initial), train, trainer.get_weights


def with_full(problem: Problem) -> Training:
    return with_onnxfit(problem, "full")


def with_forward_backward(problem: Problem) -> Training:
    return with_onnxfit(problem, "forward_backward")


def with_sklearn(problem: Problem) -> Training:
    return (
        with_sgd_regressor(problem)
        if problem.linear and problem.batch == 1
        else with_mlp_regressor(problem)
    )


def with_sgd_regressor(problem: Problem) -> Training:
    from sklearn.linear_model import SGDRegressor

    X, y = problem.data()
    initial = problem.weights()
    model = SGDRegressor(
        penalty=None,
        learning_rate="constant",
        eta0=problem.rate,
        shuffle=False,
        max_iter=problem.epochs,
        tol=None,
    )

    def train() -> None:
        model.fit(
            X,
            y[:, 0],
            coef_init=initial["fc1.weight"][0].copy(),
            intercept_init=initial["fc1.bias"].copy(),
        )

    return (
        lambda: None,
        train,
        lambda: {"fc1.weight": model.coef_[None], "fc1.bias": model.intercept_},
    )


def with_mlp_regressor(problem: Problem) -> Training:
    """MLPRegressor, which is a linear regression if there are no hidden layers."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor

    # scikit-learn warns that it has not converged, which is intended
    warnings.simplefilter("ignore", ConvergenceWarning)
    X, y = problem.data()
    layers = range(1, len(problem.sizes))
    initial = problem.weights()
    model = MLPRegressor(
        hidden_layer_sizes=problem.sizes[1:-1],
        solver="sgd",
        alpha=0,
        momentum=0,
        batch_size=problem.batch,
        learning_rate_init=problem.rate,
        shuffle=False,
        max_iter=problem.epochs,
        n_iter_no_change=np.inf,
        warm_start=True,  # begin with what is in coefs_ and intercepts_
    )
    model.partial_fit(X, y[:, 0])  # creates them

    def reset() -> None:
        model.coefs_ = [initial[f"fc{i}.weight"].T.copy() for i in layers]
        model.intercepts_ = [initial[f"fc{i}.bias"].copy() for i in layers]

    def weights() -> Weights:
        return {f"fc{i}.weight": model.coefs_[i - 1].T for i in layers} | {
            f"fc{i}.bias": model.intercepts_[i - 1] for i in layers
        }

    return reset, lambda: model.fit(X, y[:, 0]), weights


def with_torch(problem: Problem) -> Training:
    import torch

    torch.set_num_threads(1)
    X, y = map(torch.from_numpy, problem.data())
    layers = {
        f"fc{i}": torch.nn.Linear(a, b)
        for i, (a, b) in enumerate(zip(problem.sizes, problem.sizes[1:]), start=1)
    }
    network = torch.nn.Sequential(
        *[part for layer in layers.values() for part in (layer, torch.nn.ReLU())][:-1]
    )
    parameters = {
        f"{name}.{kind}": getattr(layer, kind)
        for name, layer in layers.items()
        for kind in ("weight", "bias")
    }
    optimizer = torch.optim.SGD(network.parameters(), lr=problem.rate)
    initial = problem.weights()

    def reset() -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(torch.from_numpy(initial[name].copy()))

    def train() -> list[float]:
        losses = []
        for _ in range(problem.epochs):
            total = 0.0
            for xb, yb in zip(X.split(problem.batch), y.split(problem.batch)):
                optimizer.zero_grad()
                loss = 0.5 * torch.nn.functional.mse_loss(network(xb), yb)
                loss.backward()
                optimizer.step()
                total += loss.item() * len(xb)  # the others compute the loss of every epoch, too
            losses.append(total / len(X))
        return losses

    return (
        reset,
        train,
        lambda: {name: parameter.detach().numpy() for name, parameter in parameters.items()},
    )


CONTENDERS = {
    "onnxfit, full": with_full,
    "onnxfit, forward_backward": with_forward_backward,
    "scikit-learn": with_sklearn,
    "PyTorch": with_torch,
}


def measure(contender: str, times: int) -> dict[str, Any]:
    """For each problem the seconds of each training but the first, if there are more, and the loss
    reached.
    """
    results = {}
    for name, problem in PROBLEMS.items():
        reset, train, weights = CONTENDERS[contender](problem)
        seconds = []
        for _ in range(times):
            reset()
            began = time.perf_counter()
            train()
            seconds.append(time.perf_counter() - began)
        results[name] = {"seconds": seconds[1:] or seconds, "loss": problem.loss(weights())}
    return results


def measured_apart(contender: str, times: int) -> dict[str, Any]:
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    warned = [f"-W{option}" for option in sys.warnoptions]
    result = subprocess.run(
        [sys.executable, *warned, __file__, "--measure", contender, str(times)],
        env={**os.environ, **one},
        stdout=subprocess.PIPE,
    )
    if result.returncode:
        sys.exit(f"training_benchmark: {contender} failed")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def main() -> None:
    from figures import BLUE, GREEN, ORANGE, arguments, label, panels, save, write_csv

    options = arguments(__doc__, quick="one training of each, instead of ten")
    installed = [
        name for name in CONTENDERS if name != "PyTorch" or importlib.util.find_spec("torch")
    ]
    results = {name: measured_apart(name, 1 if options.quick else 10) for name in installed}

    rows, spreads = [], {}
    for name, problem in PROBLEMS.items():
        losses = [results[contender][name]["loss"] for contender in installed]
        spreads[name] = (max(losses) - min(losses)) / min(losses)
        print(f"{name}: {problem.steps} steps")
        for contender, loss in zip(installed, losses):
            per_step = [
                1e6 * seconds / problem.steps for seconds in results[contender][name]["seconds"]
            ]
            middle, least = statistics.median(per_step), min(per_step)
            rows.append(
                (
                    name,
                    contender,
                    problem.steps,
                    problem.batch,
                    problem.rate,
                    middle,
                    least,
                    f"{loss:.9f}",
                )
            )
            print(f"    {contender:28} {middle:8.2f} us a step    loss {loss:.9f}")
    columns = (
        "problem",
        "contender",
        "steps",
        "batch",
        "learning_rate",
        "median_us_per_step",
        "least_us_per_step",
        "loss",
    )
    write_csv(options.out / "training_benchmark.csv", dict(zip(columns, zip(*rows))))

    spread = max(spreads.values())
    colors = dict(zip(CONTENDERS, (ORANGE, "#f2a07b", BLUE, GREEN)))
    title = (
        f"The same training {len(installed)} times: all arrive at the same loss, to {spread:.0e}"
        " relative"
    )
    figure, axes = panels(title, rows=len(PROBLEMS), columns=1, height=7.2)
    for panel, name in zip(axes, PROBLEMS):
        of_problem = [row for row in rows if row[0] == name]
        widths = [row[5] for row in of_problem]
        panel.barh(installed, widths, color=[colors[row[1]] for row in of_problem], height=0.7)
        for place, row in enumerate(of_problem):
            panel.text(
                row[5] + 0.01 * max(widths),
                place,
                f"{row[5]:.3g} µs, loss {float(row[7]):.6f}",
                va="center",
            )
        panel.set_xlim(0, 1.3 * max(widths))
        panel.invert_yaxis()
        panel.grid(visible=False, axis="y")
        panel.grid(axis="x")
        label(
            panel,
            f"{name[0].upper()}{name[1:]}: {PROBLEMS[name].steps:,} steps",
            "time per step (µs), median; one thread",
        )
    save(figure, options.out / "training_benchmark.png")

    print(f"largest difference   {spread:.1e} between the losses reached, relative")
    if not spread < WANTED:
        sys.exit(
            f"training_benchmark: the losses differ by more than {WANTED:g}, so the times cannot be"
            " compared"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main()

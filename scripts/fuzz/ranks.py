"""Train random networks on several ranks, which must end where one process ends.

    python scripts/fuzz/ranks.py [--cases 300] [--first 0]
    python scripts/fuzz/ranks.py --case 1234

The number of a case determines the training: its model, losses, optimizer, data, callbacks and
number of ranks. The ranks are threads. All of them must have the same weights, to the last bit, and
the weights and figures of one process within rounding. Where one process raises an onnxfit error,
all ranks must raise one. Exit code 1 where they do not.

There is no Dropout and no BatchNormalization, for which ranks differ from one process on purpose.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

if not __package__:  # modules are found from the root of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import onnxfit
from onnxfit import callbacks, losses, optimizers, penalties, schedules
from onnxfit.errors import OnnxfitError
from tests.distributed.threads import on_ranks

Rng = np.random.Generator
# Of the largest change of a weight. In float32 the order of sums decides about more digits where
# an optimizer divides small gradients by each other.
TOLERANCES = {"double": 1e-9, "float": 3e-4}
FIGURES = {"double": 1e-8, "float": 2e-3}  # relative to the figure
GRAPHS = {
    "dense": (
        "(T[N, 5] x) => (T[N, 3] y)",
        "p0 = MatMul(x, w0)  s0 = Add(p0, b0)  h = Tanh(s0)  p1 = MatMul(h, w1)  y = Add(p1, b1)",
        {"w0": (5, 6), "b0": (6,), "w1": (6, 3), "b1": (3,)},
    ),
    "fixed": (
        "(T[8, 5] x) => (T[8, 3] y)",
        "p0 = MatMul(x, w0)  s0 = Add(p0, b0)  h = Tanh(s0)  p1 = MatMul(h, w1)  y = Add(p1, b1)",
        {"w0": (5, 6), "b0": (6,), "w1": (6, 3), "b1": (3,)},
    ),
    "shared": (
        "(T[N, 5] x) => (T[N, 3] y)",
        "p0 = MatMul(x, w0)  h = Tanh(p0)  p1 = MatMul(h, w0)  g = Tanh(p1)  p2 = MatMul(g, w1)"
        "  y = Add(p2, b1)",
        {"w0": (5, 5), "w1": (5, 3), "b1": (3,)},
    ),
    "convolution": (
        "(T[N, 1, 6, 6] x) => (T[N, 3] y)",
        "c = Conv(x, w0, b0)  t = Tanh(c)  m = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(t)"
        "  f = Flatten(m)  p1 = MatMul(f, w1)  y = Add(p1, b1)",
        {"w0": (2, 1, 3, 3), "b0": (2,), "w1": (8, 3), "b1": (3,)},
    ),
    "embedding": (
        "(int64[N, L] x) => (T[N, L, 3] y)",
        "e = Gather(w0, x)  p0 = MatMul(e, w1)  h = Tanh(p0)  p1 = MatMul(h, w2)  y = Add(p1, b1)",
        {"w0": (7, 4), "w1": (4, 5), "w2": (5, 3), "b1": (3,)},
    ),
    "recurrent": (
        "(T[N, 4, 3] x) => (T[N, 3] y)",
        "s = Transpose<perm = [1, 0, 2]>(x)  a, hs = GRU<hidden_size = 3>(s, w0, w1, w2)"
        "  q = Squeeze(hs, zero)  p1 = MatMul(q, w3)  y = Add(p1, b1)",
        {"w0": (1, 9, 3), "w1": (1, 9, 3), "w2": (1, 18), "w3": (3, 3), "b1": (3,)},
    ),
    "several": (
        "(T[N, 5] x, T[N, 2] u) => (T[N, 3] y, T[N, 1] z)",
        "p0 = MatMul(x, w0)  q0 = MatMul(u, w1)  s = Add(p0, q0)  h = Tanh(s)  p1 = MatMul(h, w2)"
        "  y = Add(p1, b1)  z = MatMul(h, w3)",
        {"w0": (5, 4), "w1": (2, 4), "w2": (4, 3), "b1": (3,), "w3": (4, 1)},
    ),
    "own loss": (
        "(T[N, 5] x, T[N, 3] u) => (T[N, 3] y, T loss)",
        "p0 = MatMul(x, w0)  h = Tanh(p0)  p1 = MatMul(h, w1)  y = Add(p1, b1)"
        "  d = Sub(y, u)  q = Mul(d, d)  loss = ReduceMean<keepdims = 0>(q)",
        {"w0": (5, 6), "w1": (6, 3), "b1": (3,)},
    ),
}  # fmt: skip
CLASS_METRICS = ("accuracy", "f1", "precision", "recall", "confusion_matrix")
VALUE_METRICS = (
    "mean_squared_error", "mean_absolute_error", "r2", "cosine_similarity",
    "root_mean_squared_error",
)  # fmt: skip
OPTIMIZERS: tuple[Callable[[Any], Any], ...] = (
    lambda rate: optimizers.SGD(rate),
    lambda rate: optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=1e-2),
    lambda rate: optimizers.Adam(rate, eps=1e-3, amsgrad=True),
    lambda rate: optimizers.AdamW(rate, eps=1e-3, exclude_from_weight_decay=["b*"]),
    lambda rate: optimizers.RMSprop(rate, eps=1e-3, momentum=0.5),
    lambda rate: optimizers.Lamb(rate, eps=1e-3),
    lambda rate: optimizers.Adagrad(rate, initial_accumulator_value=0.1),
    lambda rate: optimizers.Adafactor(rate, eps=(1e-3, 1e-3)),
    lambda rate: optimizers.NAdam(rate, eps=1e-3),
)


@dataclass
class Plan:
    """A training: everything that its ranks have in common. Each rank draws a plan of its own."""

    model: onnx.ModelProto
    dtype: str
    settings: dict[str, Any]
    data: tuple[Any, ...]  # x, y and sample weights; or a loader alone
    arrays: tuple[Any, ...]  # x, y and sample weights, for evaluate
    fit: dict[str, Any]
    ranks: int
    frozen: list[str]
    interrupted_at: int | None
    ranks_after: int
    on_batch: int
    description: dict[str, Any] = field(default_factory=dict)


class Watch(callbacks.Callback):
    """Keep the logs of every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.seen.append(dict(logs))

    def on_test_batch_end(self, batch: int, logs: Any) -> None:
        self.seen.append(dict(logs))


class Interrupt(callbacks.Callback):
    """Interrupt the fit after a number of batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.global_batch == self.batches:
            raise InterruptedError


def make_model(rng: Rng, kind: str, dtype: str) -> onnx.ModelProto:
    """Return a model of GRAPHS with random weights."""
    signature, body, shapes = GRAPHS[kind]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net {signature.replace("T", dtype)} {{ {body} }}'
    )
    numbers = np.float64 if dtype == "double" else np.float32
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) * 0.5).astype(numbers)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    if kind == "recurrent":
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "zero"))
    return model


def make_loss(rng: Rng, shape: tuple[int, ...]) -> tuple[Any, Any, tuple[str, ...]]:
    """Return a loss, labels for an output of this shape, and the metrics that suit."""
    reduction = str(rng.choice(["mean", "mean", "weighted_mean", "sum"]))
    if shape[-1] == 1 or rng.random() < 0.3:
        kinds = (losses.MeanSquaredError, losses.Huber, losses.LogCosh, losses.Elastic)
        if shape[-1] > 1:
            kinds += (losses.CosineSimilarity,)  # type: ignore[assignment]
        kind = kinds[rng.integers(len(kinds))]
        return kind(reduction=reduction), rng.standard_normal(shape), VALUE_METRICS
    classes = rng.integers(0, shape[-1], shape[:-1])
    if rng.random() < 0.2:
        labels = (rng.random(shape) < 0.4).astype(float)
        return losses.BinaryCrossEntropyWithLogits(reduction=reduction), labels, ()
    options: dict[str, Any] = {"reduction": reduction}
    if rng.random() < 0.5:
        options["ignore_index"] = int(rng.choice([-100, 1]))
        where = classes == 1
        begin, length = int(rng.integers(shape[0])), int(rng.integers(1, shape[0] + 1))
        rows = np.zeros(shape[0], bool)
        rows[begin : begin + length] = True  # whole shares, or whole batches, without a label
        where |= rows.reshape(-1, *[1] * (classes.ndim - 1))
        classes = np.where(where, options["ignore_index"], classes)
    if rng.random() < 0.3:
        options["class_weights"] = (0.2, 1.5, 1.0)
    if rng.random() < 0.2 and "ignore_index" not in options:
        return losses.Focal(**options), classes, CLASS_METRICS
    allowed = CLASS_METRICS if (classes >= 0).all() else ()
    return losses.CrossEntropy(**options), classes, allowed


def make_weights(rng: Rng, rows: int, batch_size: int) -> Any:
    """Return sample weights: ordinary ones, with zeros, negative ones, whole parts of zeros."""
    kind = rng.integers(5)
    weights = rng.random(rows)
    if kind == 1:
        weights[rng.random(rows) < 0.5] = 0
    elif kind == 2:
        weights = rng.standard_normal(rows)
    elif kind == 3:
        weights[: batch_size // 2] = 0  # all rows of the first rank, without shuffling
    elif kind == 4:
        weights[:batch_size] = 0
    return weights.astype(np.float32)


def make_optimizer(rng: Rng) -> tuple[Any, bool]:
    """Return an optimizer, and whether its learning rate follows a schedule."""
    rate: Any = float(rng.choice([0.01, 0.05]))
    scheduled = rng.random() < 0.3
    if scheduled:
        rate = [schedules.Cosine(rate, 10), schedules.Warmup(rate, 3), schedules.Step(rate, 2)][
            rng.integers(3)
        ]
    return OPTIMIZERS[rng.integers(len(OPTIMIZERS))](rate), scheduled


def make_callbacks(rng: Rng, folder: Path, scheduled: bool, accumulates: bool) -> list[Any]:
    """Return some callbacks that change a training, or write files."""
    possible: list[Callable[[], Any]] = [
        Watch,
        lambda: callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True),
        callbacks.GradientNorm,
        lambda: callbacks.GradientNorm(per_weight=True),
        lambda: callbacks.StochasticWeightAveraging(0.5),
        lambda: callbacks.Freeze("w*", until_epoch=1),
        lambda: callbacks.Unfreeze({0: "w*", 1: "*"}),
        lambda: callbacks.ModelCheckpoint(
            folder / "best.ckpt", monitor="loss", save_best_only=True, background=False
        ),
        lambda: callbacks.CSVLogger(folder / "log.csv"),
        callbacks.TerminateOnNaN,
        lambda: callbacks.ThresholdStop("loss", threshold=0.3),
    ]
    if not scheduled:
        possible.append(lambda: callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0))
        possible.append(lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2))
    if accumulates:
        possible.append(lambda: callbacks.GradientAccumulationScheduler({0: 2, 1: 3}))
    chosen = [possible[i]() for i in range(len(possible)) if rng.random() < 0.2]
    norms = [c for c in chosen if isinstance(c, callbacks.GradientNorm)]
    freezing = [c for c in chosen if isinstance(c, (callbacks.Freeze, callbacks.Unfreeze))]
    return [c for c in chosen if c not in norms[1:] and c not in freezing[1:]]


def make_plan(number: int, folder: Path) -> Plan:
    """Return the training of a number."""
    rng = np.random.default_rng(number)
    kind = str(rng.choice(list(GRAPHS)))
    dtype = str(rng.choice(["double", "double", "float"]))
    if kind in ("recurrent", "convolution"):
        dtype = "float"  # onnxruntime has no kernels for doubles
    model = make_model(rng, kind, dtype)
    rows = int(rng.integers(4, 40))
    batch_size = int(rng.integers(3, 20))
    if kind == "fixed":
        rows, batch_size = 24, 8
    numbers = np.float64 if dtype == "double" else np.float32
    x, shapes = make_inputs(rng, kind, rows, numbers)
    found = {name: make_loss(rng, shape) for name, shape in shapes.items()}
    labels = {
        name: y.astype(numbers) if y.dtype.kind == "f" else y for name, (_, y, _) in found.items()
    }
    settings: dict[str, Any] = {"seed": 3, "threads": 1}
    if found:
        settings["loss"] = {name: loss for name, (loss, _, _) in found.items()}
        settings["metrics"] = {
            name: [metric for metric in names if rng.random() < 0.3]
            for name, (_, _, names) in found.items()
        }
    if len(found) > 1 and rng.random() < 0.5:
        settings["loss_weights"] = {"z": 0.3}
    settings["optimizer"], scheduled = make_optimizer(rng)
    # A recurrent node some of whose inputs need no gradient ends the builder's process.
    add_settings(rng, settings, dtype == "float" and kind != "recurrent")
    weights = make_weights(rng, rows, batch_size) if found and rng.random() < 0.4 else None
    y = labels or None
    fit = make_fit(rng, rows, batch_size, labels, weights)
    if rng.random() < 0.4:
        fit["validation_data"] = (x, y, weights) if weights is not None else (x, y)
        if kind != "fixed":
            fit["validation_batch_size"] = int(rng.integers(1, 30))
    data, form = make_data(rng, x, y, weights, fit)
    interrupted = int(rng.integers(1, 6)) if rng.random() < 0.25 else None
    fit["callbacks"] = make_callbacks(rng, folder, scheduled, settings.get("accumulate", 1) > 1)
    if interrupted is not None:
        fit["callbacks"].append(
            callbacks.BackupAndRestore(folder / "backup", every_n_steps=1, background=False)
        )
    names = [i.name for i in model.graph.initializer if i.name != "zero"]
    if rng.random() < 0.2:
        settings["weights"] = names[1:]
    frozen = [names[-1]] if rng.random() < 0.2 else []
    ranks, after = int(rng.integers(2, 6)), int(rng.integers(1, 4))
    if kind == "fixed":
        ranks, interrupted = int(rng.choice([2, 4])), None
    on_batch = batch_size if kind == "fixed" else int(rng.integers(1, rows + 1))
    plan = Plan(
        model, dtype, settings, data, (x, y, weights), fit, ranks, frozen, interrupted, after,
        on_batch,
    )  # fmt: skip
    plan.description = {
        "kind": kind, "dtype": dtype, "rows": rows, "ranks": ranks, "form": form,
        "weights": weights is not None, "frozen": frozen, "interrupted": (interrupted, after),
        **settings, **{k: v for k, v in fit.items() if k != "validation_data"},
        "validated": "validation_data" in fit,
    }  # fmt: skip
    return plan


def make_fit(
    rng: Rng, rows: int, batch_size: int, labels: dict[str, Any], weights: Any
) -> dict[str, Any]:
    """Return arguments of fit, without validation data and callbacks."""
    fit: dict[str, Any] = {
        "epochs": int(rng.integers(1, 4)), "batch_size": batch_size, "verbose": 0,
        "shuffle": bool(rng.random() < 0.5),
    }  # fmt: skip
    if weights is None and len(labels) == 1 and rng.random() < 0.2:
        only = next(iter(labels.values()))
        if only.dtype.kind == "i" and only.ndim == 1:
            fit["class_weight"] = {0: 0.3, 1: 2.0}
    if rng.random() < 0.3:
        fit["steps_per_epoch"] = int(rng.integers(1, max(rows // batch_size, 1) + 1))
    return fit


def make_inputs(rng: Rng, kind: str, rows: int, numbers: Any) -> tuple[Any, dict[str, Any]]:
    """Return the inputs of a model, and the shape of each output that has a loss."""
    if kind == "embedding":
        return rng.integers(0, 7, (rows, 4)), {"y": (rows, 4, 3)}
    shape = {"convolution": (rows, 1, 6, 6), "recurrent": (rows, 4, 3)}.get(kind, (rows, 5))
    x: Any = rng.standard_normal(shape).astype(numbers)
    if kind == "several":
        u = rng.standard_normal((rows, 2)).astype(numbers)
        return {"x": x, "u": u}, {"y": (rows, 3), "z": (rows, 1)}
    if kind == "own loss":
        return {"x": x, "u": rng.standard_normal((rows, 3)).astype(numbers)}, {}
    return x, {"y": (rows, 3)}


def add_settings(rng: Rng, settings: dict[str, Any], builds: bool) -> None:
    """Add settings of the trainer, each with some probability."""
    settings["backend"] = str(rng.choice(["full", "forward_backward"]))
    if builds and rng.random() < 0.3 and "onnxruntime-training" in onnxfit.versions():
        settings["gradient"] = "onnxruntime"  # whose constants are float32
    possible = {
        "penalty": [1e-2, penalties.L1(1e-2), {"w*": penalties.ElasticNet(1e-3, 1e-2)}],
        "clip_norm": [0.1], "clip_value": [0.02], "accumulate": [2, 3],
    }  # fmt: skip
    for name, values in possible.items():
        if rng.random() < 0.25:
            settings[name] = values[rng.integers(len(values))]


def make_data(
    rng: Rng, x: Any, y: Any, weights: Any, fit: dict[str, Any]
) -> tuple[tuple[Any, ...], str]:
    """Return what fit gets: arrays, a loader, or a list of batches; and what that is."""
    form = str(rng.choice(["arrays", "arrays", "loader", "prefetch", "list"]))
    if form == "arrays" or "class_weight" in fit or y is None:
        return (x, y, weights), "arrays"
    size = fit["batch_size"]
    if form in ("loader", "prefetch"):
        loader = onnxfit.DataLoader(
            x, y, weights, batch_size=size, shuffle=fit["shuffle"], seed=5,
            prefetch=2 * (form == "prefetch"),
        )  # fmt: skip
        return (loader,), form
    rows = len(next(iter(y.values())))
    batches = []
    for begin in range(0, rows, size):
        part = slice(begin, begin + size)
        batch = [_part(x, part), _part(y, part)]
        batches.append(tuple(batch if weights is None else [*batch, weights[part]]))
    return (batches,), form


def _part(data: Any, rows: slice) -> Any:
    return {name: a[rows] for name, a in data.items()} if isinstance(data, dict) else data[rows]


def train(number: int, distribute: Any, folder: Path, stop_at: int | None = None) -> dict[str, Any]:
    """Run a training, and return everything that several ranks have in common with one."""
    plan = make_plan(number, folder)
    if plan.description["kind"] == "fixed" and distribute is not None:
        # The batch dimension is that of a share.
        for value in (*plan.model.graph.input, *plan.model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value //= distribute.size
    trainer = onnxfit.Trainer(plan.model, distribute=distribute, **plan.settings)
    trainer.frozen = plan.frozen
    if stop_at is not None:
        plan.fit["callbacks"].append(Interrupt(stop_at))
    history = trainer.fit(*plan.data, **plan.fit)
    x, y, weights = plan.arrays
    size = plan.fit["batch_size"]
    seen = [c.seen for c in plan.fit["callbacks"] if isinstance(c, Watch)]
    predicted = trainer.predict(x, batch_size=size)
    part = slice(0, plan.on_batch)
    batch = [None if one is None else _part(one, part) for one in plan.arrays]
    return {
        "weights": trainer.get_weights(),
        "history": history.history,
        "counters": [trainer.epoch, trainer.global_step, trainer.samples_seen],
        "seen": seen[0] if seen and plan.interrupted_at is None else [],
        "evaluate": trainer.evaluate(x, y, weights, batch_size=size),
        "predict": predicted if isinstance(predicted, dict) else {"y": predicted},
        "train_on_batch": trainer.train_on_batch(*batch),
        "test_on_batch": trainer.test_on_batch(*batch),
        "at the end": trainer.get_weights(),
    }


def attempt(run: Callable[[], Any]) -> Any:
    """Return a result, or the error of onnxfit in its place."""
    try:
        return run()
    except OnnxfitError as error:
        return error


def run_case(number: int) -> float | str:
    """Return the largest deviation of a case, or the name of the error that one process raises.

    AssertionError where the ranks differ from one process.
    """
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone_in, ranks_in = Path(name) / "alone", Path(name) / "ranks"
        plan = make_plan(number, ranks_in)
        alone = attempt(lambda: train(number, None, alone_in))
        if plan.interrupted_at is not None:
            stop = plan.interrupted_at

            def interrupted(communicator: Any) -> None:
                with contextlib.suppress(InterruptedError):
                    train(number, communicator, ranks_in, stop)

            attempt(lambda: on_ranks(plan.ranks, interrupted))
        size = plan.ranks if plan.interrupted_at is None else plan.ranks_after
        ranks = attempt(
            lambda: (
                on_ranks(size, lambda c: train(number, c, ranks_in))
                if size > 1
                else [train(number, None, ranks_in)]
            )
        )
    if isinstance(ranks, OnnxfitError):
        words = str(ranks)
        if "cannot be shared" in words or "cannot be shard" in words:
            return "shares"
        if not isinstance(alone, OnnxfitError):
            raise AssertionError(f"ranks raise {type(ranks).__name__}: {ranks}")
        return type(alone).__name__
    if isinstance(alone, OnnxfitError):
        raise AssertionError(f"one process raises {type(alone).__name__}: {alone}")
    return compare(plan, alone, ranks)


def compare(plan: Plan, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> float:
    """Return the largest deviation of the weights. AssertionError where it is too large."""
    start = {i.name: onnx.numpy_helper.to_array(i) for i in plan.model.graph.initializer}
    moved = max(float(np.abs(a - start[n]).max()) for n, a in alone["weights"].items())
    largest = 0.0
    for name in ("weights", "at the end"):
        for weight, array in alone[name].items():
            for rank, theirs in enumerate(ranks):
                if theirs[name][weight].tobytes() != ranks[0][name][weight].tobytes():
                    raise AssertionError(f"rank {rank} has another {weight} than rank 0 in {name}")
            own = ranks[0][name][weight]
            if np.isfinite(array).all() or np.isfinite(own).all():
                deviation = float(np.abs(own - array).max()) / (moved or 1.0)
                largest = max(largest, deviation)
                if not deviation <= TOLERANCES[plan.dtype]:
                    raise AssertionError(f"{weight} deviates by {deviation:.2g} in {name}")
    for name in ("history", "counters", "seen", "evaluate", "predict", "train_on_batch",
                 "test_on_batch"):  # fmt: skip
        for rank, theirs in enumerate(ranks):
            require_close(theirs[name], alone[name], FIGURES[plan.dtype], f"rank {rank}: {name}")
    return largest


def require_close(own: Any, expected: Any, tolerance: float, place: str) -> None:
    """Raise AssertionError where numbers in lists, dicts and arrays differ."""
    if isinstance(expected, dict):
        if list(own) != list(expected):
            raise AssertionError(f"{place} has {list(own)}, not {list(expected)}")
        for name, value in expected.items():
            require_close(own[name], value, tolerance, f"{place} {name}")
    elif isinstance(expected, list):
        if len(own) != len(expected):
            raise AssertionError(f"{place} has {len(own)} values, not {len(expected)}")
        for index, value in enumerate(expected):
            require_close(own[index], value, tolerance, f"{place}[{index}]")
    else:
        np.testing.assert_allclose(own, expected, tolerance, 1e-3 * tolerance**0.5, err_msg=place)


def main() -> int:
    parser = argparse.ArgumentParser(prog="ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run this case, and show it")
    arguments = parser.parse_args()
    if arguments.case is not None:
        with tempfile.TemporaryDirectory() as name:
            print(make_plan(arguments.case, Path(name)).description)
        print(run_case(arguments.case))
        return 0
    began, failed, same = time.monotonic(), 0, 0
    largest, errors = dict.fromkeys(TOLERANCES, 0.0), dict[str, int]()
    for number in range(arguments.first, arguments.first + arguments.cases):
        try:
            result = run_case(number)
        except Exception as error:
            failed += 1
            print(f"case {number}: {''.join(traceback.format_exception_only(error)).strip()[:600]}")
            continue
        if isinstance(result, str):
            errors[result] = errors.get(result, 0) + 1
            continue
        same += 1
        dtype = make_plan(number, Path()).dtype
        largest[dtype] = max(largest[dtype], result)
    deviations = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in largest.items())
    print(
        f"{arguments.cases} trainings in {time.monotonic() - began:.0f} s: {same} end as one"
        f" process does (largest deviation {deviations}), {errors} refused, {failed} failed."
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

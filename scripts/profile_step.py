"""Say which operators of a training step take the time, and which nodes of the model cause them.

    python scripts/profile_step.py model.onnx [--loss cross_entropy] [--batch 32] [--rows 15]

The model is trained for a few steps on random data. onnxruntime's profiler times every operator of
the step; an operator of the gradient counts for the node that it differentiates. The profiler
itself slows small operators down, so compare shares, not times.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfit import Trainer
from onnxfit.errors import DataError, ModelError, OnnxfitError
from onnxfit.graph import scopes

WARM_UP_STEPS = 3
WIDTH = 80


@dataclass(frozen=True)
class Row:
    """The operators of one type that one node of the model, or the loss, ... causes."""

    op_type: str
    owner: str
    count: int
    seconds: float  # per step


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        rows = profile(options)
    except OnnxfitError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 1
    total = sum(row.seconds for row in rows)
    count = sum(row.count for row in rows)
    head = f"{1000 * total:.3g} ms, {count} operators a step, batch {options.batch}"
    print(f"{Path(options.model).name[:24]}: {head}, {options.backend}")
    print("\n".join(table(rows, options.rows)))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="an ONNX file with a float output")
    parser.add_argument("--loss", help="default: the model's own loss, or mse of every output")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--backend", default="full")
    parser.add_argument("--threads", type=int, help="default: as many as onnxruntime takes")
    parser.add_argument("--batch", type=int, default=32, help="the size of the first open axis")
    parser.add_argument("--size", type=int, default=16, help="the size of every other open axis")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=15, help="lines of the table")
    return parser.parse_args(arguments)


def profile(options: argparse.Namespace) -> list[Row]:
    """Train a few steps, and return the rows of the table, the most expensive first."""
    model = read(options.model)
    trainer = Trainer(
        options.model,
        loss=options.loss or default_loss(model),
        optimizer=options.optimizer,
        backend=options.backend,
        threads=options.threads,
    )
    x = random_inputs(model, options.batch, options.size)
    with tempfile.TemporaryDirectory() as folder:
        with profiled_sessions(Path(folder)):
            y = accepted_targets(trainer, x)
            for _ in range(WARM_UP_STEPS - 1 + options.steps):
                trainer.train_on_batch(x, y)
            nodes = node_labels(model, trainer)
            del trainer  # a session writes its profile when it ends
            gc.collect()
        runs = operator_runs(Path(folder))
    return rows_of(runs, WARM_UP_STEPS + options.steps, nodes)


def read(path: str) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelError(f"Cannot read {path!r}: {error}.") from error


def default_loss(model: onnx.ModelProto) -> dict[str, str] | None:
    outputs = {v.name: v.type.tensor_type.elem_type for v in model.graph.output}
    if "loss" in outputs:
        return None
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
    return {name: "mse" for name, kind in outputs.items() if kind in floats}


def random_inputs(model: onnx.ModelProto, batch: int, size: int) -> dict[str, Any]:
    """Return an array for each input. The first open axis of all is the batch; whole numbers are 0
    or 1, so that they are valid indices.
    """
    rng = np.random.default_rng(0)
    initializers = {tensor.name for tensor in model.graph.initializer}
    sizes: dict[str, int] = {}
    arrays = {}
    for value in model.graph.input:
        if value.name in initializers:
            continue
        kind = value.type.tensor_type
        shape = []
        for axis, dim in enumerate(kind.shape.dim):
            open_size = batch if axis == 0 else size
            known = dim.dim_value if dim.dim_value > 0 else None
            shape.append(known or sizes.setdefault(dim.dim_param or f"axis {axis}", open_size))
        dtype = tensor_dtype_to_np_dtype(kind.elem_type)
        values = rng.random(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        arrays[value.name] = values.astype(dtype)
    return arrays


def accepted_targets(trainer: Trainer, x: Mapping[str, Any]) -> Any:
    """Train one step, and return the targets that the loss accepted: numbers of the outputs'
    shapes, else classes.
    """
    prediction = trainer.predict_on_batch(x)
    outputs = prediction if isinstance(prediction, Mapping) else {"": prediction}
    rng = np.random.default_rng(0)
    numbers = {name: rng.random(array.shape).astype(array.dtype) for name, array in outputs.items()}
    classes = {
        name: array.argmax(1 if array.ndim > 1 else 0)
        for name, array in numbers.items()
        if array.ndim
    }
    refusal: DataError | None = None
    for candidates in (numbers, classes, None):
        targets = candidates[""] if candidates and "" in candidates else candidates
        try:
            trainer.train_on_batch(x, targets)
            return targets
        except DataError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


@contextlib.contextmanager
def profiled_sessions(folder: Path) -> Iterator[None]:
    """Let every session that is made inside this block write a profile into `folder`."""
    original = onnxruntime.SessionOptions
    numbers = itertools.count()

    class ProfilingOptions(original):  # type: ignore[valid-type, misc]  # a class at run time
        def __init__(self) -> None:
            super().__init__()
            self.enable_profiling = True
            self.profile_file_prefix = str(folder / f"session_{next(numbers)}")

    onnxruntime.SessionOptions = ProfilingOptions
    try:
        yield
    finally:
        onnxruntime.SessionOptions = original


def operator_runs(folder: Path) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each run of each (operator, node name) in the profiles in `folder`.

    The time of Loop, Scan and If does not count the operators of their bodies, which are there
    themselves.
    """
    runs: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for file in folder.glob("*.json"):
        events = json.loads(file.read_text(encoding="utf-8"))
        kernels = [e for e in events if e.get("cat") == "Node" and "_kernel_time" in e["name"]]
        kernels.sort(key=lambda e: (e["ts"], -e["dur"]))
        own = [e["dur"] for e in kernels]
        around: list[int] = []  # indices of the operators that still run
        for i, event in enumerate(kernels):
            while around and kernels[around[-1]]["ts"] + kernels[around[-1]]["dur"] <= event["ts"]:
                around.pop()
            if around:
                own[around[-1]] -= event["dur"]
            around.append(i)
        for event, microseconds in zip(kernels, own):
            key = event["args"]["op_name"], event["name"].removesuffix("_kernel_time")
            runs[key].append(max(microseconds, 0) / 1e6)
    return runs


def node_labels(model: onnx.ModelProto, trainer: Trainer) -> dict[str, str]:
    """Return the label of each node of the model: its name, or its operator and its output."""
    named = {node.name for node in model.graph.node}
    graph = onnx.load_from_string(trainer.save_onnx_graph(bytes)["predict"]).graph
    return {
        node.name: node.name if node.name in named else f"{node.op_type} -> {node.output[0]}"
        for node in graph.node
    }


def rows_of(
    runs: Mapping[tuple[str, str], Sequence[float]], steps: int, nodes: Mapping[str, str]
) -> list[Row]:
    """Add up the operators of one type that have the same owner, the most expensive first.

    `runs` are those of `steps` steps, the first WARM_UP_STEPS of which do not count; `nodes` are
    the labels of the model's nodes.
    """
    groups: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for (op_type, name), times in runs.items():
        a_step = len(times) // steps
        if a_step:  # else not an operator of every step: `predict_on_batch` ran once
            median = float(np.median(times[WARM_UP_STEPS * a_step :]))
            groups[op_type, owner_of(name, nodes)].append(a_step * median)
    rows = [Row(op, owner, len(times), sum(times)) for (op, owner), times in groups.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def owner_of(name: str, nodes: Mapping[str, str]) -> str:
    """Return the label of the model's node that causes the node of this name, or "the loss", ...

    >>> owner_of("gradient/fc1/MatMul_2", {"fc1": "fc1"}), owner_of("gradient/loss/y/Sub/Neg", {})
    ('fc1', 'the loss')
    """
    while name.startswith(f"{scopes.GRADIENT}/") and name.count("/") > 1:
        name = name.removeprefix(f"{scopes.GRADIENT}/").rpartition("/")[0]
    stage = scopes.stage_of(name)
    if stage != scopes.MODEL:
        return f"the {scopes.STAGES[stage]}"
    # onnxruntime names a fused operator after the first: "fused conv1", "fc1/MatmulTransposeFusion"
    node = name.removeprefix("fused ")
    while node and node not in nodes:
        node = node.rpartition("/")[0]
    return nodes.get(node, name)


def table(rows: Sequence[Row], limit: int) -> list[str]:
    """Return the lines of the table, at most WIDTH columns wide."""
    total = sum(row.seconds for row in rows) or 1.0
    shown = list(rows[:limit])
    rest = rows[limit:]
    if rest:
        count = sum(row.count for row in rest)
        shown.append(Row("others", "", count, sum(row.seconds for row in rest)))
    op_width = max([len("operator"), *(len(row.op_type) for row in shown)])
    lines = [f"{'time':>6}  {'operator':{op_width}}  {'count':>5}  model node"]
    for row in shown:
        share = f"{100 * row.seconds / total:5.1f}%"
        line = f"{share}  {row.op_type:{op_width}}  {row.count:5d}  {row.owner}".rstrip()
        lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…")
    return lines


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # random data need not suit the loss
    sys.exit(main())

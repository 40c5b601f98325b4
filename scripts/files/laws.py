"""What must hold for every file: comparisons whose other side is not onnxfit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime

from scripts.files.data import Arrays
from tests.doubles import in_double

WEIGHTS_COMPARED = 5
# element type of the central differences -> tolerance, the loss's rounding, and steps as fractions of
# the weight's norm, of which the first that agrees counts
PRECISIONS = {
    np.float64: (1e-3, 1e-14, (1e-5, 1e-4, 1e-6, 1e-3, 1e-7, 1e-8)),
    np.float32: (3e-2, 1e-6, (1e-3, 1e-4, 1e-5, 1e-2, 1e-6, 1e-1, 1e-7)),
}
# their gradient is that of the values before rounding, which differences do not show
ROUNDING = {"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulInteger", "ConvInteger"}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Gradients that were compared with central differences.

    `wrong` has weight -> (gradient, difference) along a direction; `small` counts gradients below
    the rounding of the loss; `hidden` counts weights that are no tensors of the file.
    """

    precision: str
    right: int
    wrong: dict[str, tuple[float, float]]
    small: int
    hidden: int


def session_of(model: onnx.ModelProto, optimized: bool = False) -> onnxruntime.InferenceSession:
    """Return a session that computes the nodes as they are, or as onnxruntime optimizes them.

    The optimizations may round activations to integers in front of a dequantized weight.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(model: onnx.ModelProto, x: Arrays, optimized: bool = False) -> Arrays:
    """Return the outputs of a model by name, from onnxruntime alone."""
    session = session_of(model, optimized)
    values = session.run(None, x)
    return {output.name: np.asarray(v) for output, v in zip(session.get_outputs(), values)}


def differing_outputs(found: Mapping[str, Any], wanted: Arrays) -> list[str]:
    """Return a sentence for each output that differs by more than float32 rounds."""
    lines = []
    for name, y in wanted.items():
        if name not in found:
            continue  # onnxfit returns tensors that it can predict; the file may have others
        other = np.asarray(found[name])
        if not y.ndim and other.shape == (1,):
            other = other[0]  # `predict` returns a row for a sample
        if other.shape != y.shape:
            lines.append(f"{name} has shape {other.shape}, not {y.shape}")
        elif y.dtype.kind != "f":
            if not np.array_equal(other, y):
                lines.append(f"{name} differs in {np.mean(other != y):.1%} of its integers")
        elif not np.allclose(other, y, 1e-3, 1e-4 * _size(y) + 1e-6, equal_nan=True):
            lines.append(f"{name} differs by {np.nanmax(np.abs(other - y)):.2g} of {_size(y):.2g}")
    return lines


def _size(y: np.ndarray[Any, Any]) -> float:
    finite = y[np.isfinite(y)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs of its nodes, in order."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] * attribute.HasField("g") + list(attribute.graphs):
                yield from graphs_of(inner)


def operators_of(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for graph in graphs_of(model.graph) for node in graph.node}


def differing_nodes(found: onnx.ModelProto, wanted: onnx.ModelProto) -> list[str]:
    """Return sentences on nodes, inputs, outputs and opsets that are not those of the file."""
    lines = []
    for title, part in {"opsets": _opsets, "interface": _interface, "nodes": _nodes}.items():
        ours, theirs = part(found), part(wanted)
        if ours != theirs:
            first = next((pair for pair in zip(ours, theirs) if pair[0] != pair[1]), "")
            lines.append(f"{title}: {len(ours)}, not {len(theirs)}; first {first}")
    return lines


def _opsets(model: onnx.ModelProto) -> list[tuple[str, int]]:
    return sorted((opset.domain, opset.version) for opset in model.opset_import)


def _interface(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in (*model.graph.input, *model.graph.output)]


def _nodes(model: onnx.ModelProto) -> list[tuple[str, str, str]]:
    nodes = [node for graph in graphs_of(model.graph) for node in graph.node]
    return [(node.domain, node.op_type, node.name) for node in nodes]


def differing_constants(
    found: onnx.ModelProto, wanted: onnx.ModelProto, trained: Sequence[str]
) -> list[str]:
    """Return the names of tensors that changed and are neither weights nor running statistics."""
    nodes = [node for graph in graphs_of(wanted.graph) for node in graph.node]
    norms = (node for node in nodes if node.op_type == "BatchNormalization")
    may_change = {*trained, *(name for node in norms for name in node.input[3:5])}
    ours, theirs = _tensors(found), _tensors(wanted)
    return [
        f"graph {key[0]} {key[1]}" if key[0] else key[1]
        for key, tensor in theirs.items()
        if key[1] not in may_change
        and not (key in ours and np.array_equal(ours[key], tensor, equal_nan=_is_float(tensor)))
    ]


def _is_float(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind == "f"


def _tensors(model: onnx.ModelProto) -> dict[tuple[int, str], np.ndarray[Any, Any]]:
    """Return the initializers and the values of Constant nodes, by graph and name.

    A Trainer knows the weights in bodies by their names alone.
    """
    found = {}
    for i, graph in enumerate(graphs_of(model.graph)):
        for name, tensor in _named_tensors(graph):
            found[i, name] = onnx.numpy_helper.to_array(tensor)
    return found


def _named_tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            yield node.output[0], node.attribute[0].t


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy that also returns values of its graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {output.name for output in copy.graph.output}
    added = [name for name in dict.fromkeys(names) if name not in present]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in added)
    return copy


def exposed(model: onnx.ModelProto, names: Sequence[str]) -> tuple[onnx.ModelProto, Arrays]:
    """Return a copy whose float32 tensors `names` are inputs, and the values of those that it has."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = max(copy.ir_version, 4)  # below 4, an initializer cannot be replaced by a run
    inputs = {value.name for value in copy.graph.input}
    moved: dict[str, onnx.TensorProto] = {}
    for graph in graphs_of(copy.graph):
        for name, tensor in list(_named_tensors(graph)):
            if name in names and tensor.data_type == onnx.TensorProto.FLOAT:
                moved[name] = onnx.TensorProto()
                moved[name].CopyFrom(tensor)
                moved[name].name = name
        kept = [tensor for tensor in graph.initializer if tensor.name not in moved]
        nodes = [n for n in graph.node if not (n.op_type == "Constant" and n.output[0] in moved)]
        if len(kept) < len(graph.initializer):
            del graph.initializer[:]
            graph.initializer.extend(kept)
        if len(nodes) < len(graph.node):
            del graph.node[:]
            graph.node.extend(nodes)
    for name, tensor in moved.items():
        if name not in inputs:
            info = onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
            copy.graph.input.append(info)
    return copy, {name: onnx.numpy_helper.to_array(tensor) for name, tensor in moved.items()}


def compare_gradients(
    model: onnx.ModelProto,
    x: Arrays,
    gradients: Arrays,
    loss: Callable[[Arrays], float],
) -> Comparison:
    """Compare gradients with central differences of the loss, along a direction in each weight.

    The direction is the sum of the gradient's and a random one, so that it shows a gradient that is
    too small, too large or missing.

    - `model`: the file; `gradients`: weight -> gradient of `loss` at the weights of the file."""
    names = list(gradients)
    chosen = [names[i] for i in np.linspace(0, len(names) - 1, WEIGHTS_COMPARED).astype(int)]
    chosen = list(dict.fromkeys(chosen))
    base, weights = exposed(model, chosen)
    evaluate, dtype = _evaluator(base, x, weights, loss)
    tolerance = PRECISIONS[dtype][0]
    right, small, wrong = 0, 0, {}
    rng = np.random.default_rng(2)
    for name in weights:
        pairs = _derivatives(evaluate, weights, name, gradients[name], dtype, rng)
        best = None
        for expected, measured in pairs:
            error = abs(measured - expected) / max(abs(measured), abs(expected))
            if best is None or error < best[0]:
                best = error, expected, measured
            if error <= tolerance:
                break
        if best is None:
            small += 1
        elif best[0] <= tolerance:
            right += 1
        else:
            wrong[name] = best[1:]
    hidden = len(chosen) - len(weights)
    return Comparison(np.dtype(dtype).name, right, wrong, small, hidden)


def _evaluator(
    model: onnx.ModelProto, x: Arrays, weights: Arrays, loss: Callable[[Arrays], float]
) -> tuple[Callable[[Arrays], float], type]:
    """Return the loss as a function of some weights, in float64 if onnxruntime has the kernels."""
    for dtype, candidate in ((np.float64, in_double), (np.float32, lambda m: m)):
        try:
            session = session_of(candidate(model))
            names = [output.name for output in session.get_outputs()]
            fixed = {n: a.astype(dtype) if a.dtype == np.float32 else a for n, a in x.items()}

            def evaluate(changed: Arrays, session=session, names=names, fixed=fixed, dtype=dtype):  # type: ignore[no-untyped-def]
                feeds = {n: a.astype(dtype) for n, a in changed.items()}
                return loss(dict(zip(names, session.run(names, {**fixed, **feeds}))))

            evaluate(weights)
            return evaluate, dtype
        except Exception:
            if dtype is np.float32:
                raise
    raise AssertionError("float32 returns or raises")


def _derivatives(
    evaluate: Callable[[Arrays], float],
    weights: Arrays,
    name: str,
    gradient: np.ndarray[Any, Any],
    dtype: type,
    rng: np.random.Generator,
) -> Iterator[tuple[float, float]]:
    """Yield (expected, measured) derivatives for the steps whose difference exceeds rounding."""
    _, rounding, steps = PRECISIONS[dtype]
    w, g = weights[name].astype(float), gradient.astype(float)
    direction = rng.standard_normal(w.shape)
    direction /= max(float(np.linalg.norm(direction)), 1e-30)
    direction += g / max(float(np.linalg.norm(g)), 1e-30)
    direction /= max(float(np.linalg.norm(direction)), 1e-30)
    size = max(float(np.linalg.norm(w)), 1e-2)
    for step in steps:
        h = step * size
        up, down = ((w + sign * h * direction).astype(dtype) for sign in (1, -1))
        high, low = (evaluate({**weights, name: moved}) for moved in (up, down))
        # the moved weights are rounded, too
        expected = float((g * (up.astype(float) - down)).sum()) / (2 * h)
        measured = (high - low) / (2 * h)
        if max(abs(measured), abs(expected)) > 30 * rounding * max(abs(high), abs(low), 1e-3) / h:
            yield expected, measured

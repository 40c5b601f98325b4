"""What a runtime makes of a case, and the smallest part of a case that fails."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from scripts.steps.float64 import Array, Feeds, in_forward_scans
from scripts.steps.runtimes import Runtime

PASSED, WRONG, REFUSED, CRASHED = "passed", "wrong", "refused", "crashed"


@dataclass(frozen=True)
class Outcome:
    """What a runtime makes of a case.

    - `result`: "passed"; "wrong", where outputs differ; "refused", where the runtime raises an error;
      "crashed", where it ends the process.
    - `difference`: the largest difference from the right outputs, relative to the largest number of
      the same output.
    - `reason`: the output, or the first line of the error.
    - `node`: the operator of the first node that fails alone, if one does.
    """

    result: str
    difference: float | None = None
    reason: str = ""
    node: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def difference(found: Array, right: Array) -> float:
    """Return the largest difference relative to the largest right number; inf for other shapes."""
    if found.shape != right.shape or found.dtype.kind != right.dtype.kind:
        return float("inf")
    if not right.size:
        return 0.0
    a, b = found.astype(np.float64), right.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0, np.abs(a - b))
    worst = float(distance.max())
    scale = float(np.abs(b[np.isfinite(b)]).max(initial=0))
    return float("inf") if np.isnan(worst) else worst / scale if scale else worst


def attempt(
    runtime: Runtime, model: onnx.ModelProto, feeds: Feeds, right: Feeds, tolerance: float
) -> Outcome:
    """Run a case."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = runtime.compile(model)(feeds)
    except Exception as error:  # each runtime raises its own classes
        return Outcome(REFUSED, reason=_first_line(error))
    far = {n: difference(np.asarray(a), right[n]) for n, a in zip(right, found)}
    worst = max(far, key=lambda name: far[name])
    if far[worst] <= tolerance:
        return Outcome(PASSED, far[worst])
    return Outcome(WRONG, far[worst], f"the output {worst}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # OpenVINO begins with lines that name its source files.
    is_place = bool(lines) and (len(lines[0]) < 20 or lines[0].startswith("Exception from "))
    text = lines[-1] if is_place else (lines or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def smallest(
    runtime: Runtime, model: onnx.ModelProto, feeds: Feeds, tolerance: float, result: str
) -> tuple[onnx.ModelProto, Feeds, Feeds, str] | None:
    """Return the first node that fails alone as a model, its inputs, the right outputs, the reason.

    None: no node fails as the whole case does, so that only a combination of nodes fails so.

    - `result`: the result of the whole case. A node that computes a wrong output does not explain
      why a runtime refuses the case.
    """
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=True)
    values = dict(feeds) | _intermediate_values(model, feeds)
    values |= {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    seen = set()
    for node in inferred.graph.node:
        alone = _alone(node, model, values)
        if alone is None:
            continue
        key = _signature(node, values)
        if key in seen:
            continue
        seen.add(key)
        given = {value.name: values[value.name] for value in alone.graph.input}
        right = {value.name: values[value.name] for value in alone.graph.output}
        outcome = attempt(runtime, alone, given, right, tolerance)
        if outcome.result == result:
            return alone, given, right, outcome.reason
    return None


def _signature(node: onnx.NodeProto, values: Mapping[str, Array]) -> Any:
    """Return what equal nodes have in common: operator, attributes, element types and shapes."""
    bare = onnx.NodeProto.FromString(node.SerializeToString())
    bare.name = ""
    del bare.input[:], bare.output[:]
    shapes = tuple((values[n].dtype.str, values[n].shape) for n in node.input if n)
    return bare.SerializeToString(deterministic=True), shapes


def _intermediate_values(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """Return the value of each output of a node, by ONNX's reference implementation."""
    every = in_forward_scans(model)
    names = [name for node in every.graph.node for name in node.output if name]
    del every.graph.output[:]
    every.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return dict(zip(names, ReferenceEvaluator(every).run(None, feeds)))


def _alone(
    node: onnx.NodeProto, model: onnx.ModelProto, values: Mapping[str, Array]
) -> onnx.ModelProto | None:
    """Return a model of one node, whose constant inputs stay initializers."""
    constants = {t.name: t for t in model.graph.initializer}
    read = [name for name in dict.fromkeys(node.input) if name]
    captured = {
        name
        for attribute in node.attribute
        if attribute.type == onnx.AttributeProto.GRAPH
        for inner in attribute.g.node
        for name in inner.input
    }
    read += [name for name in captured if name in values and name not in read]
    made = [name for name in node.output if name]
    if any(name not in values for name in (*read, *made)) or not made:
        return None
    if any(not isinstance(values[name], np.ndarray | np.generic) for name in (*read, *made)):
        return None

    def info(name: str) -> onnx.ValueInfoProto:
        array = np.asarray(values[name])
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return onnx.helper.make_tensor_value_info(name, kind, array.shape)

    graph = onnx.helper.make_graph(
        [node],
        node.op_type,
        [info(name) for name in read if name not in constants],
        [info(name) for name in made],
        [constants[name] for name in read if name in constants],
    )
    alone = onnx.helper.make_model(
        graph,
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
        functions=model.functions,
    )
    return alone

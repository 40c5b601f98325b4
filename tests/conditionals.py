"""Networks with nested Ifs, and the same networks without an If."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx.numpy_helper import from_array

from onnxfit.graph.subgraphs import nodes_of, read_by

# The nodes that compute condition c, which is true if the text says so; x has 2 axes and 4 columns.
KNOWN = {
    "an initializer": "c = Identity({yes})",
    "a Constant": "c = Constant<value = bool {{{bit}}}>()",
    "an integer": "c = Equal(rate, {rate})",
    "a rank": "c_s = Shape(x)  c_r = Size(c_s)  c = Equal(c_r, {two})",
    "a declared size": "c_s = Shape(x)  c_d = Gather(c_s, one)  c = Equal(c_d, {four})",
    "a slice of sizes": "c_s = Shape(x)  c_d = Slice(c_s, last, end)  c_e = Equal(c_d, {four})  c = Squeeze(c_e)",
    "a later axis": "c_s = Shape<start = 1>(x)  c_e = Equal(c_s, {four})  c = Squeeze(c_e)",
    "logic": "c_n = Not({yes})  c_o = Or(c_n, no)  c = Not(c_o)",
    "an If": "c = If(yes) <then_branch = c_t () => (bool c_u) {{ c_u = Identity({yes}) }}, else_branch = c_e () => (bool c_v) {{ c_v = Not({yes}) }}>",
}  # fmt: skip
UNKNOWN = {
    # onnxruntime computes these before the first run, onnxfit does not
    "arithmetic of floats": "c_p = Mul(half, half)  c = Less(c_p, {half})",
    "arithmetic outside": "c = Or(outside, {no})",
    # less than 9 is every number of the input
    "data": "c_m = ReduceMax<keepdims = 0>(x)  c = Less(c_m, {far})",
}
CONDITIONS = {**KNOWN, **UNKNOWN}
CONSTANTS = """bool yes = {1}, bool no = {0}, int64 rate = {16000}, int64 other = {8000}, int64 one = {1}, int64 two = {2}, int64 three = {3},
    int64 four = {4}, int64 five = {5}, int64[1] last = {-1}, int64[1] end = {9}"""
DRAWN = {"w": (4, 4), "u": (4, 4), "v": (4, 1)}  # u is read by the branches that are not taken


def condition(name: str, index: int, x: str, value: bool) -> str:
    """Nodes that compute c<index>."""
    words = (("yes", "rate", "two", "four"), ("no", "other", "three", "five"))[not value]
    filled = dict(zip(("yes", "rate", "two", "four"), words), bit=int(value))
    filled |= {"half": "half" if value else "small", "far": "far" if value else "near"}
    filled["no"] = "yes" if value else "no"
    text = CONDITIONS[name].format(**filled).replace("(x)", f"({x})")
    for part in ("c_s", "c_r", "c_d", "c_e", "c_n", "c_o", "c_p", "c_m", "c_t", "c_u", "c_v"):
        text = text.replace(part, f"{part}{index}")
    return text.replace("c =", f"c{index} =")


def model_of(nodes: str, element_type: str = "float", seed: int = 0) -> onnx.ModelProto:
    dtype = np.float64 if element_type == "double" else np.float32
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net ({element_type}[N, 4] x) => ({element_type}[N, 1] y)
        <{CONSTANTS}> {{ {nodes} }}"""
    )
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape) * 0.5 for name, shape in DRAWN.items()}
    arrays |= {"half": np.array(0.5), "small": np.array(0.1), "far": np.array(9.0), "near": np.array(-9.0)}  # fmt: skip
    read = {name for node in model.graph.node for name in read_by(node)}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    kept += [from_array(a.astype(dtype), name) for name, a in arrays.items() if name in read]
    model.graph.ClearField("initializer")
    model.graph.initializer.extend(kept)
    onnx.checker.check_model(model, full_check=True)
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    """The operators of all nodes, also inside other nodes."""
    return [node.op_type for node in nodes_of(model.graph)]


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session without onnxruntime's optimizers, which fail for nested Ifs on constants."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    return session_of(model).run(None, feeds)


def nested(
    conditions: Sequence[str], path: Sequence[bool], element_type: str = "float"
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A network of Ifs inside each other, and the network of the branches that they take.

    `conditions` are names of `CONDITIONS`, and `path` their values, the outermost first.
    """
    head = "p = Mul(half, half)  outside = Greater(p, half)  "  # false
    tail = flat_head = flat_tail = ""
    x = "x"
    for i, (name, value) in enumerate(zip(conditions, path)):
        layer = f"m{i} = MatMul({x}, w)  h{i} = Tanh(m{i})  g{i} = Exp(h{i})  "
        out = f"({element_type}[N, 4] "
        other = f"o{i} = MatMul(h{i}, u)"
        taken, skipped = ("then", "else") if value else ("else", "then")
        head += f"{layer}{condition(name, i, x, value)}  r{i} = If(c{i}) <{skipped}_branch = s{i} () => {out}o{i}) {{ {other} }}, "
        head += f"{taken}_branch = t{i} () => {out}q{i + 1}) {{ "
        tail = f"}}>  q{i} = Mul(r{i}, g{i}) {tail}"
        flat_head += layer
        flat_tail = f"q{i} = Mul(q{i + 1}, g{i})  {flat_tail}"
        x = f"h{i}"
    inner = f"q{len(path)} = Sigmoid({x})  "
    last = "y = MatMul(q0, v)"
    return (
        model_of(f"{head}{inner}{tail}{last}", element_type),
        model_of(f"{flat_head}{inner}{flat_tail}{last}", element_type),
    )


def rows(count: int = 8, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, 4)).astype(dtype), rng.normal(size=(count, 1)).astype(dtype)

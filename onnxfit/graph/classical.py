"""Classical models, as converters write them, in ONNX's own operators, so that their coefficients
are weights.

The operators of `ai.onnx.ml` keep coefficients in attributes, where nothing can train them. Here
they become initializers, and every number that onnxruntime computes stays what it was. What is no
step of a linear model (trees, support vectors, encoders of categories) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.errors import ModelError

DOMAIN = "ai.onnx.ml"
OLDEST = 9  # the opset from which on the operators below are what they are today
NEWEST = 13  # what a model gets that had no operators of ONNX itself

Array = npt.NDArray[Any]
FLOAT = onnx.TensorProto.FLOAT


def write_out_classical(model: onnx.ModelProto) -> None:
    """Write LinearRegressor, LinearClassifier, Scaler, Normalizer and ArrayFeatureExtractor in
    ONNX's own operators, in place.

    - The weights of a linear model are called `<node>/coefficients`, shape `(outputs, features)`,
      and `<node>/intercepts`, shape `(outputs,)`.
    - Of a classifier for two classes whose rows are each other's negative, as scikit-learn's are,
      one row is kept, that of the second class: both columns of its scores come from it, and
      training cannot pull them apart.
    - The numbers of a scaler are constants: in models by skl2onnx those of any arithmetic before
      the first layer.

    A node that onnxruntime does not run, or runs on anything but a table, stays as it is.
    """
    graph = model.graph
    if not any(node.domain == DOMAIN for node in graph.node) and model.producer_name != "skl2onnx":
        return
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    if opset is None:
        opset = NEWEST
        model.opset_import.append(onnx.helper.make_opsetid("", opset))
    if opset < OLDEST:
        return
    for writers in (_FIRST, _THEN):
        _write_out(model, opset, writers)
    if model.producer_name == "skl2onnx":
        _bound_powers(graph)
        _fix_preprocessing(graph)


def without_zip_maps(model: onnx.ModelProto) -> None:
    """Let every output that is a list of maps from class to probability be the tensor of
    probabilities under the same name, in place.
    """
    graph = model.graph
    outputs = {v.name: v for v in graph.output}
    own = {v.name for v in (*graph.input, *graph.initializer)}
    for node in [
        n
        for n in graph.node
        if (n.op_type, n.domain) == ("ZipMap", DOMAIN) and n.output[0] in outputs
    ]:
        given, name = node.input[0], node.output[0]
        outputs[name].type.CopyFrom(onnx.helper.make_tensor_type_proto(FLOAT, None))
        if given in own or given in outputs:
            node.CopyFrom(onnx.helper.make_node("Identity", [given], [name], name=node.name))
            continue
        # what made the probabilities makes the output, so that a loss sees what they come from
        graph.node.remove(node)
        for other in graph.node:
            for names in (other.input, other.output):
                names[:] = [name if n == given else n for n in names]
        for info in [v for v in graph.value_info if v.name == given]:
            graph.value_info.remove(info)


class _Writer:
    """Appends what replaces one node; names begin with the node's."""

    def __init__(
        self,
        node: onnx.NodeProto,
        graph: onnx.GraphProto,
        taken: set[str],
        opset: int,
        ranks: dict[str, int],
    ) -> None:
        self.node = node
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.opset = opset
        self.ranks = ranks
        self._stem = node.name or node.output[0]
        self._taken = taken
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}

    def __call__(
        self, op_type: str, *inputs: str, output: str | None = None, **attributes: Any
    ) -> str:
        name = self._fresh(op_type)
        output = output or self._fresh(f"{op_type}:0")
        self.nodes.append(
            onnx.helper.make_node(op_type, list(inputs), [output], name=name, **attributes)
        )
        return output

    def weight(self, name: str, values: Array) -> str:
        name = self._fresh(name)
        self.initializers.append(
            onnx.numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name)
        )
        return name

    def constant(self, values: Array) -> str:
        """In a node, since initializers are what training looks at."""
        tensor = onnx.numpy_helper.from_array(values, "value")
        return self("Constant", value=tensor)

    def floats(self, name: str) -> Array:
        return np.array(self.attributes.get(name, ()), np.float32)

    def text(self, name: str, default: str) -> str:
        return bytes(self.attributes.get(name, default.encode())).decode(errors="replace")

    def table(self) -> str | None:
        """The input as float32; None where it is known to be no table."""
        if self.ranks.get(self.node.input[0], 2) != 2:
            return None
        return self("Cast", self.node.input[0], to=FLOAT)

    def largest(self, x: str) -> str:
        """Of each row, shape `(batch, 1)`."""
        if self.opset < 18:
            return self("ReduceMax", x, axes=[1], keepdims=1)
        return self("ReduceMax", x, self.constant(np.array([1], np.int64)), keepdims=1)

    def _fresh(self, stem: str) -> str:
        name, count = f"{self._stem}/{stem}", 1
        while name in self._taken:
            count += 1
            name = f"{self._stem}/{stem}_{count}"
        self._taken.add(name)
        return name


Write = Callable[[_Writer], bool]  # whether the node is written out


def _write_out(model: onnx.ModelProto, opset: int, writers: dict[str, Write]) -> None:
    graph = model.graph
    taken = {name for node in graph.node for name in (node.name, *node.output)} | {
        v.name for v in (*graph.input, *graph.initializer)
    }
    ranks: dict[str, int] = {}
    if any(node.domain == DOMAIN and node.op_type in writers for node in graph.node):
        ranks = _ranks(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        write = writers.get(node.op_type) if node.domain == DOMAIN else None
        writer = _Writer(node, graph, taken, opset, ranks)
        if write is not None and write(writer):
            nodes.extend(writer.nodes)
            graph.initializer.extend(writer.initializers)
        else:
            nodes.append(node)
    # the graph's own go with its list
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(nodes)


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
    ) as error:  # such as functions that call themselves
        raise ModelError(f"The model contradicts itself: {str(error).strip()}") from None
    ranks = {t.name: len(t.dims) for t in inferred.initializer}
    for value in (*inferred.input, *inferred.value_info):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    return ranks


# ---------------------------------------------------------------------- what each operator is


def _linear_regressor(w: _Writer) -> bool:
    targets = int(w.attributes.get("targets", 1))
    coefficients = w.floats("coefficients")
    x = w.table() if coefficients.size and coefficients.size % targets == 0 else None
    if x is None:
        return False
    given = w.floats("intercepts")
    scores = _scores(
        w, x, coefficients.reshape(targets, -1), given if given.size == targets else None
    )
    transform = w.text("post_transform", "NONE")
    _transformed(
        w, scores, transform if targets > 1 or transform == "PROBIT" else "NONE", w.node.output[0]
    )
    return True


def _linear_classifier(w: _Writer) -> bool:
    """Scores, and the class with the largest of them; of one row, the second class where its score
    is positive.
    """
    labels = _labels(w)
    coefficients, intercepts = w.floats("coefficients"), w.floats("intercepts")
    transform = w.text("post_transform", "NONE")
    rows = intercepts.size
    if not rows or coefficients.size % rows or len(labels) < 2 or rows not in (1, len(labels)):
        return False
    if rows == 1 and (len(labels) != 2 or transform == "PROBIT"):
        return False
    x = w.table()
    if x is None:
        return False
    coefficients = coefficients.reshape(rows, -1)
    if rows == 1:
        score = _scores(w, x, coefficients, intercepts)
        signed = w("Mul", score, w.constant(np.array([[-1, 1]], np.float32)))
        if transform == "LOGISTIC":  # 1 - p and p; onnxruntime 1.19 left the scores as they are
            transform, scores = (
                "SOFTMAX",
                w("Mul", score, w.constant(np.array([[-0.5, 0.5]], np.float32))),
            )
        else:  # which onnxruntime does not apply to one row: its columns are 1 - s and s
            transform, scores = "NONE", w("Add", signed, w.constant(np.array([[1, 0]], np.float32)))
    elif (
        rows == 2
        and np.array_equal(coefficients[0], -coefficients[1])
        and intercepts[0] == -intercepts[1]
    ):
        score = _scores(w, x, coefficients[1:], intercepts[1:])
        scores = signed = w("Mul", score, w.constant(np.array([[-1, 1]], np.float32)))
        if (
            transform == "LOGISTIC"
        ):  # the same by softmax, which keeps small probabilities: onnxruntime's Sigmoid makes them 0 below e^-18
            transform, scores = (
                "SOFTMAX",
                w("Mul", score, w.constant(np.array([[-0.5, 0.5]], np.float32))),
            )
    else:
        scores = signed = _scores(w, x, coefficients, intercepts)
    label, transformed = (*w.node.output, "")[:2]
    if label:
        w("Gather", w.constant(labels), w("ArgMax", signed, axis=1, keepdims=0), output=label)
    if transformed:
        _transformed(w, scores, transform, transformed)
    return True


def _labels(w: _Writer) -> Array:
    if "classlabels_ints" in w.attributes:
        return np.array(w.attributes["classlabels_ints"], np.int64)
    return np.array(
        [label.decode() for label in w.attributes.get("classlabels_strings", ())], object
    )


def _scores(w: _Writer, x: str, coefficients: Array, intercepts: Array | None) -> str:
    factors = w.weight("coefficients", coefficients)
    # a model without intercepts does not learn any
    added = (
        w.constant(np.zeros(len(coefficients), np.float32))
        if intercepts is None
        else w.weight("intercepts", intercepts)
    )
    return w("Gemm", x, factors, added, transB=1)


def _transformed(w: _Writer, scores: str, transform: str, output: str) -> None:
    if transform == "LOGISTIC":
        w("Sigmoid", scores, output=output)
    elif transform == "SOFTMAX":
        w("Softmax", scores, axis=1, output=output)
    elif transform == "SOFTMAX_ZERO":
        # of the scores that are not 0; where all are, onnxruntime divides 0 by 0, and these are 0
        kept = w(
            "Cast", w("Greater", w("Abs", scores), w.constant(np.array(1e-7, np.float32))), to=FLOAT
        )
        w(
            "LpNormalization",
            w("Mul", w("Softmax", scores, axis=1), kept),
            axis=1,
            p=1,
            output=output,
        )
    elif transform == "PROBIT":
        _probit(w, scores, output)
    else:
        w("Identity", scores, output=output)


def _probit(w: _Writer, p: str, output: str) -> None:
    """The quantile of the normal distribution by Winitzki's approximation, z = √2 sign(x) √(√(v² -
    l/a) - v), with x = 2p - 1, l = log(1 - x²), v = 2/(πa) + l/2 and a = 0.147, as onnxruntime has
    it (with π as 3.14159).
    """

    def number(value: float) -> str:
        return w.constant(np.array(value, np.float32))

    x = w("Sub", w("Mul", number(2), p), number(1))
    log = w("Log", w("Mul", w("Sub", number(1), x), w("Add", number(1), x)))
    v = w("Add", number(2 / (3.14159 * 0.147)), w("Mul", number(0.5), log))
    root = w("Sqrt", w("Sub", w("Mul", v, v), w("Mul", number(1 / 0.147), log)))
    inverse = w("Mul", w("Sign", x), w("Sqrt", w("Sub", root, v)))
    w("Mul", number(np.sqrt(2)), inverse, output=output)


def _scaler(w: _Writer) -> bool:
    offset, scale = w.floats("offset"), w.floats("scale")
    x = w.table() if offset.size and scale.size else None
    if x is None:
        return False
    w("Mul", w("Sub", x, w.constant(offset)), w.constant(scale), output=w.node.output[0])
    return True


def _normalizer(w: _Writer) -> bool:
    x = w.table()
    if x is None:
        return False
    norm = w.text("norm", "MAX")
    if norm == "MAX":  # not of absolute values; a row whose largest is 0 stays
        largest = w.largest(x)
        zero = w("Cast", w("Not", w("Cast", largest, to=onnx.TensorProto.BOOL)), to=FLOAT)
        w("Div", x, w("Add", largest, zero), output=w.node.output[0])
    else:
        w("LpNormalization", x, axis=1, p=1 if norm == "L1" else 2, output=w.node.output[0])
    return True


def _array_feature_extractor(w: _Writer) -> bool:
    """Columns of a table; what picks labels by their index stays."""
    x, columns = w.node.input
    if w.ranks.get(x) != 2:
        return False
    flat = w("Reshape", columns, w.constant(np.array([-1], np.int64)))
    w("Gather", x, flat, axis=1, output=w.node.output[0])
    return True


_FIRST: dict[str, Write] = {
    "LinearRegressor": _linear_regressor,
    "LinearClassifier": _linear_classifier,
    "Scaler": _scaler,
    "Normalizer": _normalizer,
}
# once the ranks of the others' outputs can be told
_THEN: dict[str, Write] = {"ArrayFeatureExtractor": _array_feature_extractor}


def _bound_powers(graph: onnx.GraphProto) -> None:
    """Keep e^(-x) of 1 / (1 + e^(-x)) finite, so that its derivative is; below -87 that is next to
    nothing either way.
    """
    made = {name: node for node in graph.node for name in node.output}
    numbers = {
        t.name: onnx.numpy_helper.to_array(t).item()
        for t in graph.initializer
        if t.data_type == FLOAT and np.prod(t.dims) == 1
    }

    def maker(name: str, op_type: str, number: float | None = None) -> onnx.NodeProto | None:
        """The operator that makes a value of one other, and this number."""
        node = made.get(name)
        others = (
            []
            if node is None
            else [n for n in node.input if number is None or numbers.get(n) != number]
        )
        return (
            node
            if node is not None and (node.op_type, node.domain, len(others)) == (op_type, "", 1)
            else None
        )

    for one in [n for n in graph.node if (n.op_type, n.domain) == ("Reciprocal", "")]:
        node: onnx.NodeProto | None = one
        for op_type, number in (("Add", 1.0), ("Exp", None), ("Mul", -1.0)):
            names = [] if node is None else [n for n in node.input if n not in numbers]
            node = maker(names[0], op_type, number) if names else None
        if node is None:
            continue
        i = next(i for i, n in enumerate(node.input) if n not in numbers)
        least = onnx.numpy_helper.from_array(np.array(-87, np.float32), "value")
        stem, place = f"{node.output[0]}/bounded", list(graph.node).index(node)
        graph.node.insert(
            place, onnx.helper.make_node("Constant", [], [f"{stem}/least"], value=least)
        )
        graph.node.insert(
            place + 1,
            onnx.helper.make_node("Max", [node.input[i], f"{stem}/least"], [stem], name=stem),
        )
        node.input[i] = stem


LAYERS = {"MatMul", "Gemm"}  # those of skl2onnx
ARITHMETIC = {"Add", "Sub", "Mul", "Div"}


def _fix_preprocessing(graph: onnx.GraphProto) -> None:
    """Make constants of the initializers that arithmetic before the first layer uses, and nothing
    else does: what scalers computed of their data.
    """
    learned: set[str] = set()  # values behind a layer
    uses: dict[str, bool] = {}  # of each initializer: whether all so far are such arithmetic
    for node in graph.node:
        before = (
            node.op_type in ARITHMETIC
            and node.domain == ""
            and not learned.intersection(node.input)
        )
        for name in node.input:
            uses[name] = uses.get(name, True) and before
        if learned.intersection(node.input) or (node.op_type in LAYERS and node.domain == ""):
            learned.update(node.output)
    inputs = {v.name for v in graph.input}
    fixed = [
        t
        for t in graph.initializer
        if t.data_type == FLOAT and uses.get(t.name) and t.name not in inputs
    ]
    _to_constants(graph, fixed)


def _to_constants(graph: onnx.GraphProto, tensors: Iterable[onnx.TensorProto]) -> None:
    for tensor in tensors:
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        graph.initializer.remove(tensor)


# What leaves probabilities what they are
_PASSING = {
    "Identity",
    "Cast",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Gather",
    "Slice",
    "LpNormalization",
    "Div",
}


def source_of_probabilities(value: ir.Value | None) -> str | None:
    """The operator, Sigmoid or Softmax, that makes a value probabilities; None where none does.

    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1] x) => (float[N, 2] y) {'
    >>> model = ir.from_onnx_text(text + 'one = Constant<value_float=1.0>() p = Sigmoid(x) q = Sub(one, p) y = Concat<axis=1>(q, p) }')
    >>> source_of_probabilities(model.graph.outputs[0])
    'Sigmoid'
    """
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type in ("Sigmoid", "Softmax"):
        return node.op_type
    if (
        node.op_type == "Reciprocal"
        and _made_by(node.inputs[0], "Add")
        and any(_made_by(v, "Exp") for v in _summands(node))
    ):
        return "Sigmoid"  # 1 / (1 + e^(-x))
    # so that what is divided is never 0
    if node.op_type == "Div" and _made_by(node.inputs[0], "Add"):
        return source_of_probabilities(_summands(node)[0])
    if node.op_type in _PASSING:
        return source_of_probabilities(node.inputs[0])
    if (
        node.op_type == "Sub"
        and node.inputs[0] is not None
        and ir.convenience.get_const_tensor(node.inputs[0]) is not None
    ):
        return source_of_probabilities(node.inputs[1])  # 1 - p, the first of two classes
    found = (
        [source_of_probabilities(v) for v in dict.fromkeys(node.inputs)]
        if node.op_type == "Concat"
        else [None]
    )
    return found[0] if all(found) else None


def _made_by(value: ir.Value | None, op_type: str) -> bool:
    node = None if value is None else value.producer()
    return node is not None and (node.op_type, node.domain) == (op_type, "")


def _summands(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """The inputs of the Add that makes a node's first input."""
    first = node.inputs[0]
    add = None if first is None else first.producer()
    return () if add is None else tuple(add.inputs)

"""Rewrite classical models in ONNX's own operators, so that their coefficients become weights.

The operators of `ai.onnx.ml` store coefficients in attributes, which cannot be trained. This module
turns coefficients into initializers; every number that onnxruntime computes stays the same.
Operators of other models than linear ones (trees, support vectors, encoders of categories) stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx.checker
import onnx.shape_inference

from onnxfit.errors import ModelError
from onnxfit.graph.index import NodeIndex
from onnxfit.graph.replacement import Array, NodeReplacement, replace_nodes
from onnxfit.load.completion import import_domain, opset_of

DOMAIN = "ai.onnx.ml"
MIN_OPSET = 9  # the operators used here mean the same from this opset on
DEFAULT_OPSET = 13  # for models without operators of ONNX itself

FLOAT = onnx.TensorProto.FLOAT


def convert_classical_operators(model: onnx.ModelProto) -> None:
    """Rewrite linear models and their preprocessing in ONNX's own operators, in place.

    The operators are LinearRegressor, LinearClassifier, Scaler, Normalizer and
    ArrayFeatureExtractor.

    - The weights of a linear model are called `<node>/coefficients`, shape `(outputs, features)`,
      and `<node>/intercepts`, shape `(outputs,)`.
    - A classifier for two classes keeps one row of weights, the second class's, if its rows are
      each other's negative, as scikit-learn's are. Both columns of its scores come from that row,
      so training keeps them consistent.
    - The numbers of a scaler become constants. In models by skl2onnx, so do the numbers of any
      arithmetic before the first layer.

    A node that onnxruntime cannot run, or whose input is not a table, stays unchanged.
    """
    graph = model.graph
    by_skl2onnx = model.producer_name == "skl2onnx"
    if not by_skl2onnx and not any(node.domain == DOMAIN for node in graph.node):
        return
    opset = opset_of(model)
    if opset is None:
        opset = DEFAULT_OPSET
        import_domain(model, "", opset)
    if opset < MIN_OPSET:
        return
    for conversions in (_CONVERSIONS, _CONVERSIONS_BY_RANK):
        _convert_nodes(model, opset, conversions)
    if by_skl2onnx:
        bound_exponents(graph)
        fix_preprocessing(graph)


def remove_zip_maps(model: onnx.ModelProto) -> None:
    """Convert outputs that are lists of maps from class to probability to tensors, in place.

    The tensor of probabilities has the name of the output.
    """
    graph = model.graph
    outputs = {v.name: v for v in graph.output}
    own = {v.name for v in (*graph.input, *graph.initializer)}
    for node in list(graph.node):
        name = node.output[0] if node.output else ""
        if (node.op_type, node.domain) != ("ZipMap", DOMAIN) or name not in outputs:
            continue
        probabilities = node.input[0]
        outputs[name].type.CopyFrom(onnx.helper.make_tensor_type_proto(FLOAT, None))
        if probabilities in own or probabilities in outputs:
            identity = onnx.helper.make_node("Identity", [probabilities], [name], name=node.name)
            node.CopyFrom(identity)
            continue
        # The node of the probabilities computes the output itself, so that a loss sees that node.
        graph.node.remove(node)
        _rename_value(graph, probabilities, name)


def _rename_value(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value in all nodes, and drop its entry in `value_info`."""
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for info in [v for v in graph.value_info if v.name == old]:
        graph.value_info.remove(info)


class _Conversion(NodeReplacement):
    """The nodes and initializers that replace one node of a classical model."""

    def __init__(
        self,
        node: onnx.NodeProto,
        names: set[str],
        opset: int,
        ranks: dict[str, int],
    ) -> None:
        """`names` are all names of the graph, `ranks` those of its values by name."""
        super().__init__(node, names)
        self.opset = opset
        self.ranks = ranks

    def weight(self, name: str, values: Array) -> str:
        """Add an initializer of float32, `<node>/<name>`."""
        return self.initializer(f"{self._prefix}/{name}", np.asarray(values, np.float32))

    def floats(self, name: str) -> Array:
        """Return an attribute that is a list of floats, an empty array without the attribute."""
        return np.array(self.attributes.get(name, ()), np.float32)

    def text(self, name: str, default: str) -> str:
        """Return an attribute that is a string."""
        return bytes(self.attributes.get(name, default.encode())).decode(errors="replace")

    def table(self) -> str | None:
        """Add the first input as float32; None if its rank is known not to be 2."""
        if self.ranks.get(self.node.input[0], 2) != 2:
            return None
        return self("Cast", self.node.input[0], to=FLOAT)

    def row_max(self, x: str) -> str:
        """Add the largest element of each row, shape `(batch, 1)`."""
        if self.opset < 18:
            return self("ReduceMax", x, axes=[1], keepdims=1)
        return self("ReduceMax", x, self.constant(np.array([1], np.int64)), keepdims=1)


Convert = Callable[[_Conversion], bool]  # False leaves the node unchanged


def _convert_nodes(model: onnx.ModelProto, opset: int, conversions: dict[str, Convert]) -> None:
    graph = model.graph
    names = {name for node in graph.node for name in (node.name, *node.output)}
    names |= {v.name for v in (*graph.input, *graph.initializer)}
    ranks: dict[str, int] = {}
    if any(node.domain == DOMAIN and node.op_type in conversions for node in graph.node):
        ranks = _ranks(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        convert = conversions.get(node.op_type) if node.domain == DOMAIN else None
        conversion = _Conversion(node, names, opset, ranks)
        if convert is not None and convert(conversion):
            nodes.extend(conversion.nodes)
            graph.initializer.extend(conversion.initializers)
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    """Return the ranks of values by name, for values whose rank can be inferred."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        # functions that call themselves, for instance
        raise ModelError(f"The model is inconsistent: {str(error).strip()}") from None
    ranks = {t.name: len(t.dims) for t in inferred.initializer}
    for value in (*inferred.input, *inferred.value_info):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    return ranks


# --------------------------------------------------------------------------------------------------
# One function for each operator


def _linear_regressor(op: _Conversion) -> bool:
    targets = int(op.attributes.get("targets", 1))
    coefficients = op.floats("coefficients")
    x = op.table() if coefficients.size and coefficients.size % targets == 0 else None
    if x is None:
        return False
    intercepts = op.floats("intercepts")
    scores = _scores(
        op,
        x,
        coefficients.reshape(targets, -1),
        intercepts if intercepts.size == targets else None,
    )
    transform = op.text("post_transform", "NONE")
    # onnxruntime transforms the score of a single target by PROBIT alone
    applies = targets > 1 or transform == "PROBIT"
    _transform(op, scores, transform if applies else "NONE", op.node.output[0])
    return True


def _linear_classifier(op: _Conversion) -> bool:
    """Scores, and the class with the largest score.

    With a single row of coefficients, the class is the second one where its score is positive.
    """
    labels = _labels(op)
    coefficients = op.floats("coefficients")
    intercepts = op.floats("intercepts")
    transform = op.text("post_transform", "NONE")
    rows = intercepts.size
    if not rows or coefficients.size % rows or len(labels) < 2 or rows not in (1, len(labels)):
        return False
    if rows == 1 and (len(labels) != 2 or transform == "PROBIT"):
        return False
    x = op.table()
    if x is None:
        return False
    coefficients = coefficients.reshape(rows, -1)
    if rows == 1:
        scores, signed, transform = _scores_of_one_row(op, x, coefficients, intercepts, transform)
    elif _are_opposite(coefficients, intercepts):
        scores, signed, transform = _scores_of_opposite_rows(
            op, x, coefficients, intercepts, transform
        )
    else:
        scores = _scores(op, x, coefficients, intercepts)
        signed = scores
    label, transformed = (*op.node.output, "")[:2]
    if label:
        op("Gather", op.constant(labels), op("ArgMax", signed, axis=1, keepdims=0), output=label)
    if transformed:
        _transform(op, scores, transform, transformed)
    return True


def _are_opposite(coefficients: Array, intercepts: Array) -> bool:
    """Return whether there are two rows, each the negative of the other."""
    return (
        len(coefficients) == 2
        and np.array_equal(coefficients[0], -coefficients[1])
        and bool(intercepts[0] == -intercepts[1])
    )


def _scores_of_one_row(
    op: _Conversion, x: str, coefficients: Array, intercepts: Array, transform: str
) -> tuple[str, str, str]:
    """Return two columns of scores, those that tell the class, and the transform of the first."""
    score = _scores(op, x, coefficients, intercepts)
    signed = op("Mul", score, op.constant(np.array([[-1, 1]], np.float32)))
    if transform == "LOGISTIC":  # 1 - p and p; onnxruntime 1.19 did not transform the scores
        return _logits(op, score), signed, "SOFTMAX"
    # onnxruntime applies no other transform to a single row: the columns are 1 - s and s
    return op("Add", signed, op.constant(np.array([[1, 0]], np.float32))), signed, "NONE"


def _scores_of_opposite_rows(
    op: _Conversion, x: str, coefficients: Array, intercepts: Array, transform: str
) -> tuple[str, str, str]:
    """Return two columns of scores, those that tell the class, and the transform of the first."""
    score = _scores(op, x, coefficients[1:], intercepts[1:])
    signed = op("Mul", score, op.constant(np.array([[-1, 1]], np.float32)))
    if transform == "LOGISTIC":
        # The same by a softmax, which keeps small probabilities; those of onnxruntime's Sigmoid
        # are 0 below e^-18.
        return _logits(op, score), signed, "SOFTMAX"
    return signed, signed, transform


def _logits(op: _Conversion, score: str) -> str:
    """Return two columns whose softmax is 1 - p and p, p being the sigmoid of the score."""
    return op("Mul", score, op.constant(np.array([[-0.5, 0.5]], np.float32)))


def _labels(op: _Conversion) -> Array:
    if "classlabels_ints" in op.attributes:
        return np.array(op.attributes["classlabels_ints"], np.int64)
    return np.array(
        [label.decode() for label in op.attributes.get("classlabels_strings", ())], object
    )


def _scores(op: _Conversion, x: str, coefficients: Array, intercepts: Array | None) -> str:
    factors = op.weight("coefficients", coefficients)
    if intercepts is None:  # a model without intercepts learns no intercepts
        added = op.constant(np.zeros(len(coefficients), np.float32))
    else:
        added = op.weight("intercepts", intercepts)
    return op("Gemm", x, factors, added, transB=1)


def _transform(op: _Conversion, scores: str, transform: str, output: str) -> None:
    if transform == "LOGISTIC":
        op("Sigmoid", scores, output=output)
    elif transform == "SOFTMAX":
        op("Softmax", scores, axis=1, output=output)
    elif transform == "SOFTMAX_ZERO":
        # The softmax of the scores that are not 0. Where all are 0, onnxruntime divides 0 by 0; the
        # result here is 0.
        nonzero = op("Greater", op("Abs", scores), op.constant(np.array(1e-7, np.float32)))
        kept = op("Mul", op("Softmax", scores, axis=1), op("Cast", nonzero, to=FLOAT))
        op("LpNormalization", kept, axis=1, p=1, output=output)
    elif transform == "PROBIT":
        _probit(op, scores, output)
    else:
        op("Identity", scores, output=output)


def _probit(op: _Conversion, p: str, output: str) -> None:
    """Add the quantile function of the normal distribution.

    It is Winitzki's approximation, z = √2 sign(x) √(√(v² - l/a) - v), with x = 2p - 1,
    l = log(1 - x²), v = 2/(πa) + l/2 and a = 0.147, as in onnxruntime (with π as 3.14159).
    """

    def number(value: float) -> str:
        return op.constant(np.array(value, np.float32))

    x = op("Sub", op("Mul", number(2), p), number(1))
    log = op("Log", op("Mul", op("Sub", number(1), x), op("Add", number(1), x)))
    v = op("Add", number(2 / (3.14159 * 0.147)), op("Mul", number(0.5), log))
    root = op("Sqrt", op("Sub", op("Mul", v, v), op("Mul", number(1 / 0.147), log)))
    inverse = op("Mul", op("Sign", x), op("Sqrt", op("Sub", root, v)))
    op("Mul", number(np.sqrt(2)), inverse, output=output)


def _scaler(op: _Conversion) -> bool:
    offset = op.floats("offset")
    scale = op.floats("scale")
    x = op.table() if offset.size and scale.size else None
    if x is None:
        return False
    op("Mul", op("Sub", x, op.constant(offset)), op.constant(scale), output=op.node.output[0])
    return True


def _normalizer(op: _Conversion) -> bool:
    x = op.table()
    if x is None:
        return False
    norm = op.text("norm", "MAX")
    if norm == "MAX":  # not of absolute values; a row whose maximum is 0 stays
        largest = op.row_max(x)
        zero = op("Cast", op("Not", op("Cast", largest, to=onnx.TensorProto.BOOL)), to=FLOAT)
        op("Div", x, op("Add", largest, zero), output=op.node.output[0])
    else:
        op("LpNormalization", x, axis=1, p=1 if norm == "L1" else 2, output=op.node.output[0])
    return True


def _array_feature_extractor(op: _Conversion) -> bool:
    """Columns of a table; a node that picks labels by their index stays."""
    x, columns = op.node.input
    if op.ranks.get(x) != 2:
        return False
    flat = op("Reshape", columns, op.constant(np.array([-1], np.int64)))
    op("Gather", x, flat, axis=1, output=op.node.output[0])
    return True


_CONVERSIONS: dict[str, Convert] = {
    "LinearRegressor": _linear_regressor,
    "LinearClassifier": _linear_classifier,
    "Scaler": _scaler,
    "Normalizer": _normalizer,
}
# These need the ranks of values that the operators above compute.
_CONVERSIONS_BY_RANK: dict[str, Convert] = {"ArrayFeatureExtractor": _array_feature_extractor}


FLOAT = onnx.TensorProto.FLOAT
MIN_EXPONENT = -87  # e^87 and its derivative are finite in float32
LAYERS = {"MatMul", "Gemm"}  # those of skl2onnx
ARITHMETIC = {"Add", "Sub", "Mul", "Div"}


def bound_exponents(graph: onnx.GraphProto) -> None:
    """Bound x from below where a sigmoid is written as 1 / (1 + e^(-x)), in place.

    Then e^(-x) and its derivative stay finite. Below the bound, the sigmoid is nearly 0 in both
    cases.
    """
    producers = NodeIndex(list(graph.node)).producers
    numbers = {
        t.name: onnx.numpy_helper.to_array(t).item()
        for t in graph.initializer
        if t.data_type == FLOAT and np.prod(t.dims) == 1
    }
    for reciprocal in [n for n in graph.node if (n.op_type, n.domain) == ("Reciprocal", "")]:
        negation = _negation_in_sigmoid(reciprocal, producers, numbers)
        if negation is None:
            continue
        i = next(i for i, name in enumerate(negation.input) if name not in numbers)
        bounded = f"{negation.output[0]}/bounded"
        bound = f"{bounded}/least"
        tensor = onnx.numpy_helper.from_array(np.array(MIN_EXPONENT, np.float32), "value")
        nodes = [
            onnx.helper.make_node("Constant", [], [bound], value=tensor),
            onnx.helper.make_node("Max", [negation.input[i], bound], [bounded], name=bounded),
        ]
        position = list(graph.node).index(negation)
        for offset, node in enumerate(nodes):
            graph.node.insert(position + offset, node)
        negation.input[i] = bounded


def _negation_in_sigmoid(
    reciprocal: onnx.NodeProto,
    producers: Mapping[str, onnx.NodeProto],
    numbers: dict[str, float],
) -> onnx.NodeProto | None:
    """Return the node of -x if `reciprocal` is the last one of 1 / (1 + e^(-x)), else None."""
    node = reciprocal
    for op_type, number in (("Add", 1.0), ("Exp", None), ("Mul", -1.0)):
        name = next((name for name in node.input if name not in numbers), None)
        previous = None if name is None else producers.get(name)
        if previous is None or (previous.op_type, previous.domain) != (op_type, ""):
            return None
        others = [n for n in previous.input if number is None or numbers.get(n) != number]
        if len(others) != 1:
            return None
        node = previous
    return node


def fix_preprocessing(graph: onnx.GraphProto) -> None:
    """Make the numbers that scalers computed of their data constants, in place.

    They are the initializers that only arithmetic before the first layer uses.
    """
    after_layer: set[str] = set()  # values that depend on a layer
    # for each initializer: whether all its uses so far are arithmetic before the first layer
    only_before: dict[str, bool] = {}
    for node in graph.node:
        depends = bool(after_layer.intersection(node.input))
        before = node.op_type in ARITHMETIC and node.domain == "" and not depends
        for name in node.input:
            only_before[name] = only_before.get(name, True) and before
        if depends or (node.op_type in LAYERS and node.domain == ""):
            after_layer.update(node.output)
    inputs = {v.name for v in graph.input}
    fixed = [
        t
        for t in graph.initializer
        if t.data_type == FLOAT and only_before.get(t.name) and t.name not in inputs
    ]
    for tensor in fixed:
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        graph.initializer.remove(tensor)

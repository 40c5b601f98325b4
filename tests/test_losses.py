"""Losses: laws for every one, against float64 numpy, finite differences and PyTorch.

A loss is tested with its defaults and as listed in `VARIANTS`. `draw` makes labels and outputs that suit it, from what the class says about
them, so that a new loss needs no more here than its formula in `FORMULAS`.
"""

import dataclasses
import json
import warnings

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from scipy import special

import onnxfit.losses
from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.gradients.onnxruntime import add_gradients
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import Op
from onnxfit.losses import (
    NLL,
    BinaryCrossEntropy,
    ClassLoss,
    CosineSimilarity,
    CrossEntropy,
    Elastic,
    Focal,
    GaussianNLL,
    Hinge,
    Huber,
    KLDivergence,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    Quantile,
    SquaredHinge,
    get_loss,
)
from onnxfit.registry import from_config, registry, snake_case, to_config

REGISTRY = registry("onnxfit.losses", Loss)
CLASSES = {cls.__name__: cls for cls in REGISTRY.values()}
REDUCTIONS = ("mean", "weighted_mean", "sum")

VARIANTS = [
    *(cls() for cls in CLASSES.values()),
    Huber(0.3),
    Elastic(2.0, 0.25),
    Quantile(0.9),
    Poisson(log_input=False),
    GaussianNLL(log_variance=False),
    BinaryCrossEntropy(from_logits=True),
    BinaryCrossEntropy(label_smoothing=0.2, pos_weight=3.0),
    BinaryCrossEntropy(from_logits=True, label_smoothing=0.2, pos_weight=(1.0, 2.0, 3.0, 0.5)),
    CrossEntropy(from_logits=False),
    CrossEntropy(label_smoothing=0.1),
    CrossEntropy(class_weights=(1.0, 0.0, 2.0, 0.5)),
    CrossEntropy(class_weights=(1.0, 3.0, 2.0, 0.5), label_smoothing=0.3, ignore_index=1),
    CrossEntropy(ignore_index=2),
    NLL(class_weights=(1.0, 3.0, 2.0, 0.5), ignore_index=0),
    Focal(gamma=0.5, alpha=(0.1, 0.2, 0.3, 0.4)),
    Focal(gamma=0.0, from_logits=False, ignore_index=3),
    KLDivergence(from_logits=True),
]
every_loss = pytest.mark.parametrize("loss", VARIANTS, ids=repr)


# ---------------------------------------------------------------------- what suits a loss


def draw(loss, shape=(6, 4), dtype=np.float64, seed=0):
    """Labels, as `prepare` gives them, and outputs, both at random: what kind of labels a loss takes, it says by refusing the others."""
    rng = np.random.default_rng(seed)
    spec = TensorSpec("y", np.dtype(dtype), shape)
    return labels_for(loss, spec, rng), outputs_for(loss, rng.normal(size=shape)).astype(dtype)


def labels_for(loss, spec, rng):
    wanted = loss.target(spec)
    if wanted.dtype.kind == "i":
        return loss.prepare(rng.integers(0, spec.shape[loss.class_axis(len(spec.shape))], wanted.shape), spec)
    kinds = [
        rng.normal(size=wanted.shape),
        rng.poisson(2.0, size=wanted.shape),
        special.softmax(rng.normal(size=wanted.shape), axis=-1),
        rng.integers(0, 2, size=wanted.shape),
    ]
    for labels in kinds:
        try:
            return loss.prepare(labels, spec)
        except DataError:
            continue
    raise AssertionError(f"{loss} takes no kind of labels that this test knows.")


def outputs_for(loss, raw):
    """Raw numbers as probabilities, positive numbers or log-probabilities where the loss says that its output is that."""
    axis = loss.class_axis(raw.ndim) if isinstance(loss, ClassLoss) else -1
    if getattr(loss, "from_logits", True) is False:
        return special.softmax(raw, axis=axis) if raw.shape[axis] > 1 else special.expit(raw)
    if not (getattr(loss, "log_input", True) and getattr(loss, "log_variance", True)):
        return np.abs(raw) + 0.1
    return special.log_softmax(raw, axis=axis) if isinstance(loss, NLL) else raw


# ---------------------------------------------------------------------- the formulas, in float64 numpy


def _binary_cross_entropy(loss, y, p):
    y = y * (1 - loss.label_smoothing) + loss.label_smoothing / 2
    q = special.expit(p) if loss.from_logits else p
    return -(1 if loss.pos_weight is None else np.array(loss.pos_weight)) * y * np.log(q) - (1 - y) * np.log(1 - q)


def _probability(loss, p, axis):
    return special.softmax(p, axis=axis) if loss.from_logits else p


def _one_hot(loss, y, p):
    axis = loss.class_axis(p.ndim)
    return np.stack([y == c for c in range(p.shape[axis])], axis=axis).astype(float), axis


def _class_weights(loss, p, axis):
    weights = np.ones(p.shape[axis]) if loss.class_weights is None else np.array(loss.class_weights)
    return np.moveaxis(np.broadcast_to(weights, (*np.delete(p.shape, axis), p.shape[axis])), -1, axis)


def _cross_entropy(loss, y, p):
    q, axis = _one_hot(loss, y, p) if y.ndim < p.ndim else (y, loss.class_axis(p.ndim))
    smooth = (1 - loss.label_smoothing) * q + loss.label_smoothing / p.shape[axis]
    cost = -(_class_weights(loss, p, axis) * smooth * np.log(_probability(loss, p, axis))).sum(axis)
    if y.ndim < p.ndim:
        cost = np.where(_counts(loss, y, p) > 0, cost, 0)
    return cost


def _counts(loss, y, p):
    """What each label counts in the divisor."""
    if not isinstance(loss, ClassLoss) or y.ndim == p.ndim:
        return 1.0
    q, axis = _one_hot(loss, y, p)
    return (q * _class_weights(loss, p, axis)).sum(axis) * (True if loss.ignore_index is None else y != loss.ignore_index)


def _nll(loss, y, p):
    q, axis = _one_hot(loss, y, p)
    return -(q * p).sum(axis) * _counts(loss, y, p)


def _focal(loss, y, p):
    if y.ndim == p.ndim:
        q = special.expit(p) if loss.from_logits else p
        q, a = np.where(y == 1, q, 1 - q), 1 if loss.alpha is None else np.where(y == 1, loss.alpha, 1 - loss.alpha)
        return -a * (1 - q) ** loss.gamma * np.log(q)
    hot, axis = _one_hot(loss, y, p)
    q = (hot * _probability(loss, p, axis)).sum(axis)
    a = 1 if loss.alpha is None else np.array(loss.alpha)[y]
    return -a * (1 - q) ** loss.gamma * np.log(q) * _counts(loss, y, p)


def _kl_divergence(loss, y, p):
    return special.rel_entr(y, _probability(loss, p, -1)).sum(-1)


def _cosine(loss, y, p):
    return -np.sum(y * p, -1) / np.linalg.norm(y, axis=-1) / np.linalg.norm(p, axis=-1)


def _gaussian(loss, y, p):
    mean, spread = np.split(p, 2, axis=-1)
    variance = np.exp(spread) if loss.log_variance else spread
    return 0.5 * (np.log(variance) + (y - mean) ** 2 / variance)


FORMULAS = {
    "BinaryCrossEntropy": _binary_cross_entropy,
    "CosineSimilarity": _cosine,
    "CrossEntropy": _cross_entropy,
    "Elastic": lambda loss, y, p: loss.l1_weight * np.abs(y - p) + loss.l2_weight * (y - p) ** 2,
    "Focal": _focal,
    "GaussianNLL": _gaussian,
    "Hinge": lambda loss, y, p: np.maximum(0, 1 - y * p),
    "Huber": lambda loss, y, p: special.huber(loss.delta, y - p),
    "KLDivergence": _kl_divergence,
    "LogCosh": lambda loss, y, p: np.log(np.cosh(y - p)),
    "MeanAbsoluteError": lambda loss, y, p: np.abs(y - p),
    "MeanAbsolutePercentageError": lambda loss, y, p: 100 * np.abs((y - p) / y),
    "MeanSquaredError": lambda loss, y, p: (y - p) ** 2,
    "MeanSquaredLogarithmicError": lambda loss, y, p: (np.log1p(y) - np.where(p > 0, np.log1p(np.abs(p)), p)) ** 2,
    "NLL": _nll,
    "Poisson": lambda loss, y, p: np.exp(p) - y * p if loss.log_input else p - special.xlogy(y, p),
    "Quantile": lambda loss, y, p: np.where(y > p, loss.quantile, loss.quantile - 1) * (y - p),
    "SquaredHinge": lambda loss, y, p: np.maximum(0, 1 - y * p) ** 2,
}


def formula(loss, y, p, s=None):
    """The loss of a batch, as `Loss` describes it, from the costs (each times what its label counts) and those counts."""
    cost = FORMULAS[type(loss).__name__](loss, y, p)
    counts = np.broadcast_to(_counts(loss, y, p), cost.shape)
    s = np.ones(cost.shape) if s is None else np.broadcast_to(s.reshape(-1, *[1] * (cost.ndim - 1)), cost.shape)
    divisor = {"mean": counts.sum(), "weighted_mean": (s * counts).sum(), "sum": 1.0}[loss.reduction]
    return (s * cost).sum() / divisor


# ---------------------------------------------------------------------- the graph


class Graph:
    """A loss as a session, fed by labels, outputs and sample weights; with its gradient in the outputs, if wanted."""

    def __init__(self, loss, y, p, s=None, *, gradient=False, symbolic=False):
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="loss")
        op = Op(graph)
        labels = {"none": y.shape, "batch": ("n", *y.shape[1:]), "all": ("n", *[None] * (y.ndim - 1))}[symbolic or "none"]
        shape = {"none": p.shape, "batch": ("batch", *p.shape[1:]), "all": ("batch", *(f"d{i}" for i in range(1, p.ndim)))}[symbolic or "none"]
        y_pred = op.input("y_pred", p.dtype, shape)
        y_true = op.input("y_true", y.dtype, labels)
        weight = None if s is None else op.input("sample_weight", np.float32, ("rows" if symbolic else len(s),))
        value, self.count = loss.reduce(op, y_true, y_pred, weight)
        assert value.dtype == p.dtype
        assert value.shape == ()
        op.output("loss", value)
        if self.count is not None:
            op.output("count", self.count)
        model = infer_shapes(ir.Model(graph, ir_version=10))
        if gradient:
            model, names = add_gradients(model, "loss", ["y_pred"])
            found = next(v for node in model.graph for v in node.outputs if v.name == names["y_pred"])
            Op(model.graph).output("gradient", Op(model.graph).wrap(found))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
        self.inputs = {v.name for v in self.session.get_inputs()}

    def __call__(self, y, p, s=None):
        feeds = {"y_true": y, "y_pred": p, "sample_weight": s}
        return self.session.run(None, {name: feeds[name] for name in self.inputs})


def value(loss, y, p, s=None, **settings):
    return Graph(loss, y, p, s, **settings)(y, p, s)[0]


def gradient(loss, y, p, s=None, **settings):
    return Graph(loss, y, p, s, gradient=True, **settings)(y, p, s)[-1]


def differences(loss, y, p, s=None, step=1e-5):
    """The gradient by central differences in float64."""
    graph, g = Graph(loss, y, p, s), np.zeros_like(p)
    for i in np.ndindex(p.shape):
        above, below = p.copy(), p.copy()
        above[i] += step
        below[i] -= step
        g[i] = (graph(y, above, s)[0] - graph(y, below, s)[0]) / (2 * step)
    return g


# ---------------------------------------------------------------------- laws


def test_every_loss_has_a_formula_here():
    assert sorted(FORMULAS) == sorted(CLASSES)


SHAPES = [(6, 4), (3, 2, 4), (2, 4, 1, 3)]


def suited(loss, shape):
    """The same loss for outputs in which the class axis, the last or number 1, is another one than that of length 4."""
    return dataclasses.replace(loss, axis=1) if isinstance(loss, KLDivergence) and len(shape) == 4 else loss


@every_loss
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("symbolic", ["", "batch"])
def test_value_and_gradient_in_float64(loss, shape, symbolic):
    if isinstance(loss, (GaussianNLL, BinaryCrossEntropy)) and shape[-1] != 4:
        shape = (2, 1, 3, 4)
    y, p = draw(loss, shape)
    s = np.random.default_rng(1).uniform(0.5, 2, len(p)).astype(np.float32)
    assert value(loss, y, p, symbolic=symbolic) == pytest.approx(formula(loss, y, p), rel=1e-10)
    graph = Graph(loss, y, p, s, gradient=True, symbolic=symbolic)
    result, g = graph(y, p, s)[0], graph(y, p, s)[-1]
    assert result == pytest.approx(formula(loss, y, p, s), rel=1e-10)
    expected = differences(loss, y, p, s)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-8 * np.abs(expected).max() + 1e-9)


@every_loss
def test_float32_agrees_with_float64(loss):
    y, p = draw(loss)
    single = y.astype(np.float32) if y.dtype.kind == "f" else y
    p = p.astype(np.float32)
    assert value(loss, single, p) == pytest.approx(formula(loss, y, p.astype(float)), rel=1e-5)
    np.testing.assert_allclose(gradient(loss, single, p), gradient(loss, y, p.astype(float)), rtol=1e-4, atol=1e-6)


@every_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(loss, reduction):
    loss = dataclasses.replace(loss, reduction=reduction)
    y, p = draw(loss, seed=2)
    s = np.array([0.5, 0, 2, 1, 3, 0.25], np.float32)
    for weights in (None, s):
        result = Graph(loss, y, p, weights)(y, p, weights)
        assert result[0] == pytest.approx(formula(loss, y, p, weights), rel=1e-10)
        if len(result) > 1:  # what it divided by
            total = formula(dataclasses.replace(loss, reduction="sum"), y, p, weights)
            assert result[1] * result[0] == pytest.approx(total, rel=1e-10)
        else:
            assert reduction == "sum" or isinstance(_counts(loss, y, p), float)


@every_loss
@pytest.mark.parametrize("reduction", ["sum", "weighted_mean"])
def test_weight_two_is_the_row_twice(loss, reduction):
    loss = dataclasses.replace(loss, reduction=reduction)
    y, p = draw(loss)
    s = np.array([1, 2, 1, 1, 2, 1], np.float32)
    twice = np.repeat(np.arange(6), s.astype(int))
    assert value(loss, y, p, s) == pytest.approx(value(loss, y[twice], p[twice]), rel=1e-12)
    mean = dataclasses.replace(loss, reduction="mean")
    rows = np.sum(np.broadcast_to(np.reshape(_counts(loss, y, p), (-1, 1)), (6, 1)))
    rows_twice = np.sum(np.broadcast_to(np.reshape(_counts(loss, y[twice], p[twice]), (-1, 1)), (8, 1)))
    assert value(mean, y, p, s) * rows == pytest.approx(value(mean, y[twice], p[twice]) * rows_twice, rel=1e-12)


@every_loss
def test_weight_zero_is_no_gradient_from_the_row(loss):
    y, p = draw(loss)
    s = np.array([1, 0, 1, 1, 0, 1], np.float32)
    g = gradient(loss, y, p, s)
    assert not g[s == 0].any()
    rest = gradient(dataclasses.replace(loss, reduction="sum"), y[s == 1], p[s == 1])
    scale = g[s == 1][rest != 0] / rest[rest != 0]
    np.testing.assert_allclose(scale, scale[0], rtol=1e-10)


@every_loss
@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_a_batch_that_counts_nothing_costs_nothing(loss, reduction):
    loss = dataclasses.replace(loss, reduction=reduction)
    y, p = draw(loss)
    result, g = (graph := Graph(loss, y, p, np.zeros(6, np.float32), gradient=True))(y, p, np.zeros(6, np.float32))[0::2] if (
        reduction == "weighted_mean"
    ) else ((graph := Graph(loss, y, p, np.zeros(6, np.float32), gradient=True))(y, p, np.zeros(6, np.float32)))[:: -1][:: -1][0:1] + [
        graph(y, p, np.zeros(6, np.float32))[-1]
    ]
    assert result == 0
    assert not g.any()

"""Losses: laws for every one, against float64 numpy, finite differences and PyTorch.

A loss is tested with its defaults and as listed in `VARIANTS`. `draw` makes labels and outputs that
suit it, from what the class says about them, so that a new loss needs no more here than its formula
in `FORMULAS`.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import re

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from scipy import special

from onnxfit import Trainer
from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.gradients.backward import add_gradients
from onnxfit.graph.labels import check_range
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder
from onnxfit.losses import (
    CTC,
    NLL,
    Asymmetric,
    BinaryCrossEntropy,
    BinaryCrossEntropyWithLogits,
    CategoricalHinge,
    CausalLM,
    CIoU,
    ClassLoss,
    CosineSimilarity,
    CrossEntropy,
    Dice,
    DIoU,
    DistillationKL,
    Elastic,
    Focal,
    GaussianNLL,
    GeneralizedCrossEntropy,
    GIoU,
    Hinge,
    HingeEmbedding,
    Huber,
    IoU,
    JensenShannon,
    KLDivergence,
    ListNet,
    Loss,
    LovaszHinge,
    LovaszSoftmax,
    MeanAbsoluteError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    MixtureNLL,
    MultiMargin,
    Poisson,
    PolyCrossEntropy,
    Quantile,
    SmoothL1,
    SoftMargin,
    SquaredHinge,
    Tversky,
    get_loss,
)
from onnxfit.registry import from_config, registry, snake_case, to_config
from tests.models import mlp

REGISTRY = registry("onnxfit.losses", Loss)
NUMBERS = (-np.inf, -100.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 1e6, np.inf, np.nan)
CLASSES = {cls.__name__: cls for cls in REGISTRY.values()}
REDUCTIONS = ("mean", "weighted_mean", "sum")

VARIANTS = [
    *(cls() for cls in CLASSES.values()),
    Huber(0.3),
    Elastic(2.0, 0.25),
    SmoothL1(0.3),
    Quantile(0.9),
    Quantile((0.1, 0.25, 0.5, 0.9)),
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
    CausalLM(ignore_index=2, label_smoothing=0.1, class_weights=(1.0, 3.0, 2.0, 0.5)),
    NLL(class_weights=(1.0, 3.0, 2.0, 0.5), ignore_index=0),
    Focal(gamma=0.5, alpha=(0.1, 0.2, 0.3, 0.4)),
    Focal(gamma=0.0, from_logits=False, ignore_index=3),
    KLDivergence(from_logits=True),
    JensenShannon(from_logits=True),
    DistillationKL(4.0, from_logits=False),
    HingeEmbedding(2.0),
    Asymmetric(2.0, 0.0, 0.0),
    Asymmetric(from_logits=False),
    PolyCrossEntropy(
        epsilon=-0.5, class_weights=(1.0, 3.0, 2.0, 0.5), label_smoothing=0.3, ignore_index=1
    ),
    GeneralizedCrossEntropy(0.3, from_logits=False, class_weights=(1.0, 0.0, 2.0, 0.5)),
    CategoricalHinge(ignore_index=2),
    MultiMargin(0.5, 2, class_weights=(1.0, 3.0, 2.0, 0.5)),
    LovaszHinge(from_logits=False),
    LovaszSoftmax(from_logits=False, ignore_index=2, class_weights=(1.0, 3.0, 2.0, 0.5)),
    Dice(from_logits=True),
    Tversky(alpha=0.3, beta=0.7),
    CTC(-1, ignore_index=-100, zero_infinity=True),
    CTC(2, divide_by_length=True),
    CTC(from_logits=False, ignore_index=0),
]
every_loss = pytest.mark.parametrize("loss", VARIANTS, ids=repr)


# ---------------------------------------------------------------------- what suits a loss


def takes_logits(loss):
    """Whether the output is logits, where the graph does not tell; None if the loss does not ask."""
    setting = getattr(loss, "from_logits", "absent")
    if setting == "absent":
        return None
    return loss.assumes_logits if setting is None else setting


def shape_for(loss, rows=6):
    """The smallest shape of outputs with 4 numbers in their last axis that a loss takes."""
    return (rows, 3, 4) if isinstance(loss, (CausalLM, CTC)) else (rows, 4)


def label_shape(loss, spec, rows):
    """The shape of the labels of some rows; those of CTC have any number of columns."""
    return (rows, *(2 if size is None else size for size in loss.target(spec).shape[1:]))


def spec_for(loss, dtype):
    return TensorSpec("y", np.dtype(dtype), ("batch", *shape_for(loss)[1:]))


def draw(loss, shape=None, dtype=np.float64, seed=0):
    """Labels, as `prepare` gives them, and outputs, both at random: what kind of labels a loss
    takes, it says by refusing the others.
    """
    shape = shape or shape_for(loss)
    rng = np.random.default_rng(seed)
    spec = TensorSpec("y", np.dtype(dtype), shape)
    return labels_for(loss, spec, rng), outputs_for(loss, rng.normal(size=shape)).astype(dtype)


def labels_for(loss, spec, rng):
    wanted = loss.target(spec)
    if isinstance(loss, CTC):
        return texts(loss, spec, rng)
    if isinstance(loss, IoU):
        return loss.prepare(boxes(rng.normal(size=wanted.shape)), spec)
    if wanted.dtype.kind == "i":
        return loss.prepare(
            rng.integers(0, spec.shape[loss.class_axis(len(spec.shape))], wanted.shape), spec
        )
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


def texts(loss, spec, rng):
    """Labels of 0 to 2 classes other than the blank, padded."""
    rows, classes = spec.shape[0], spec.shape[2]
    others = [c for c in range(classes) if c != loss.blank % classes]
    labels, lengths = rng.choice(others, (rows, 2)), rng.integers(0, 3, (rows, 1))
    return loss.prepare(np.where(np.arange(2) < lengths, labels, loss.ignore_index), spec)


def boxes(raw):
    """Corners of boxes, most of which overlap."""
    first, sides = 0.3 * raw[..., :2], 1 + np.abs(raw[..., 2:])
    return np.concatenate([first, first + sides], axis=-1)


def outputs_for(loss, raw):
    """Raw numbers as probabilities, positive numbers or log-probabilities where the loss says that
    its output is that.
    """
    axis = loss.class_axis(raw.ndim) if isinstance(loss, ClassLoss) else -1
    if takes_logits(loss) is False:
        return special.softmax(raw, axis=axis) if raw.shape[axis] > 1 else special.expit(raw)
    if isinstance(loss, IoU):
        return boxes(raw)
    if not (getattr(loss, "log_input", True) and getattr(loss, "log_variance", True)):
        return np.abs(raw) + 0.1
    return special.log_softmax(raw, axis=axis) if isinstance(loss, NLL) else raw


# ---------------------------------------------------------------------- the formulas, in float64
# numpy


def _binary_cross_entropy(loss, y, p):
    y = y * (1 - loss.label_smoothing) + loss.label_smoothing / 2
    q = special.expit(p) if takes_logits(loss) else p
    return -(1 if loss.pos_weight is None else np.array(loss.pos_weight)) * y * np.log(q) - (
        1 - y
    ) * np.log(1 - q)


def _probability(loss, p, axis):
    return special.softmax(p, axis=axis) if takes_logits(loss) else p


def _one_hot(loss, y, p):
    axis = loss.class_axis(p.ndim)
    return np.stack([y == c for c in range(p.shape[axis])], axis=axis).astype(float), axis


def _class_weights(loss, p, axis):
    weights = np.ones(p.shape[axis]) if loss.class_weights is None else np.array(loss.class_weights)
    return np.moveaxis(
        np.broadcast_to(weights, (*np.delete(p.shape, axis), p.shape[axis])), -1, axis
    )


def _cross_entropy(loss, y, p):
    q, axis = _one_hot(loss, y, p) if y.ndim < p.ndim else (y, loss.class_axis(p.ndim))
    smooth = (1 - loss.label_smoothing) * q + loss.label_smoothing / p.shape[axis]
    cost = -(_class_weights(loss, p, axis) * smooth * np.log(_probability(loss, p, axis))).sum(axis)
    if y.ndim < p.ndim:
        cost = np.where(_counts(loss, y, p) > 0, cost, 0)
    return cost


def _counts(loss, y, p):
    """What each label counts in the divisor."""
    if not isinstance(loss, ClassLoss) or isinstance(loss, LovaszSoftmax) or y.ndim == p.ndim:
        return 1.0
    q, axis = _one_hot(loss, y, p)
    return (q * _class_weights(loss, p, axis)).sum(axis) * (
        True if loss.ignore_index is None else y != loss.ignore_index
    )


def _nll(loss, y, p):
    q, axis = _one_hot(loss, y, p)
    return -(q * p).sum(axis) * _counts(loss, y, p)


def _focal(loss, y, p):
    if y.ndim == p.ndim:
        q = special.expit(p) if takes_logits(loss) else p
        q, a = (
            np.where(y == 1, q, 1 - q),
            (1 if loss.alpha is None else np.where(y == 1, loss.alpha, 1 - loss.alpha)),
        )
        return -a * (1 - q) ** loss.gamma * np.log(q)
    hot, axis = _one_hot(loss, y, p)
    q = (hot * _probability(loss, p, axis)).sum(axis)
    a = 1 if loss.alpha is None else np.array(loss.alpha)[y]
    return -a * (1 - q) ** loss.gamma * np.log(q) * _counts(loss, y, p)


def _kl_divergence(loss, y, p):
    axis = 1 if p.ndim >= 4 and loss.axis is None else -1 if loss.axis is None else loss.axis
    return special.rel_entr(y, _probability(loss, p, axis)).sum(axis)


def _cosine(loss, y, p):
    return -np.sum(y * p, -1) / np.linalg.norm(y, axis=-1) / np.linalg.norm(p, axis=-1)


def _tversky(loss, y, p):
    q = special.expit(p) if takes_logits(loss) else p
    rest = tuple(range(1, p.ndim))
    both, false, missed = (np.sum(a, rest) for a in (y * q, (1 - y) * q, y * (1 - q)))
    both += loss.smooth
    return 1 - both / (both + loss.alpha * false + loss.beta * missed)


def _gaussian(loss, y, p):
    mean, spread = np.split(p, 2, axis=-1)
    variance = np.exp(spread) if loss.log_variance else spread
    return 0.5 * (np.log(variance) + (y - mean) ** 2 / variance)


def _ctc(loss, y, p):
    """By the definition: the probabilities of all paths that read as the label, added up."""
    p = _probability(loss, p, -1)
    _, steps, classes = p.shape
    blank, costs = loss.blank % classes, []
    readings = collections.defaultdict(list)
    for path in itertools.product(range(classes), repeat=steps):
        merged = [label for label, _ in itertools.groupby(path)]
        readings[tuple(label for label in merged if label != blank)].append(path)
    for row, labels in zip(p, y.tolist()):
        label = tuple(k for k in labels if k != loss.ignore_index)
        paths = np.array(readings[label])
        cost = -np.log(row[np.arange(steps), paths].prod(axis=1).sum())
        costs.append(cost / max(len(label), 1) if loss.divide_by_length else cost)
    return np.array(costs)


def _jensen_shannon(loss, y, p):
    axis = 1 if p.ndim >= 4 and loss.axis is None else -1 if loss.axis is None else loss.axis
    p = _probability(loss, p, axis)
    mean = (y + p) / 2
    return (special.rel_entr(y, mean) + special.rel_entr(p, mean)).sum(axis) / 2


def _distillation(loss, y, p):
    axis = 1 if p.ndim >= 4 else -1
    if loss.from_logits is False:  # the tests draw any numbers as labels
        y, p = np.log(np.clip(y, 1e-30, 1)), np.log(p)
    q, p = (special.softmax(z / loss.temperature, axis=axis) for z in (y, p))
    return loss.temperature**2 * special.rel_entr(q, p).sum(axis)


def _asymmetric(loss, y, p):
    q = special.expit(p) if takes_logits(loss) else p
    shifted = np.maximum(q - loss.clip, 0)
    positive = (1 - q) ** loss.gamma_pos * np.log(q)
    return -y * positive - (1 - y) * shifted**loss.gamma_neg * np.log(1 - shifted)


def _poly(loss, y, p):
    q, axis = _one_hot(loss, y, p) if y.ndim < p.ndim else (y, loss.class_axis(p.ndim))
    smooth = (1 - loss.label_smoothing) * q + loss.label_smoothing / p.shape[axis]
    p = _probability(loss, p, axis)
    costs = smooth * (-np.log(p) + loss.epsilon * (1 - p)) * _class_weights(loss, p, axis)
    return np.where(_counts(loss, y, p) > 0, costs.sum(axis), 0)


def _generalized(loss, y, p):
    q, axis = _one_hot(loss, y, p)
    own = (q * _probability(loss, p, axis)).sum(axis)
    return (1 - own**loss.q) / loss.q * _counts(loss, y, p)


def _categorical_hinge(loss, y, p):
    """As Keras computes it from one-hot labels."""
    q, axis = _one_hot(loss, y, p)
    positive, negative = (q * p).sum(axis), ((1 - q) * p).max(axis)
    return np.maximum(negative - positive + 1, 0) * _counts(loss, y, p)


def _multi_margin(loss, y, p):
    q, axis = _one_hot(loss, y, p)
    own = (q * p).sum(axis, keepdims=True)
    short = np.maximum(0, loss.margin - own + p) ** loss.p * (1 - q)
    return short.mean(axis) * _counts(loss, y, p)


def _lovasz(errors, labels):
    """By the definition: the loss of a set of wrong entries grows by one entry after another."""
    own, wrong, total, before = set(np.flatnonzero(labels)), set(), 0.0, 0.0
    for i in np.argsort(-errors):
        wrong.add(int(i))
        after = len(wrong) / len(own | wrong)  # 1 - |own without wrong| / |own or wrong|
        total, before = total + errors[i] * (after - before), after
    return total


def _lovasz_hinge(loss, y, p):
    s = p if takes_logits(loss) else special.logit(p)
    errors = np.maximum(0, 1 - (2 * y - 1) * s)
    return np.array([_lovasz(e.ravel(), row.ravel()) for e, row in zip(errors, y)])


def _lovasz_softmax(loss, y, p):
    q, axis = _one_hot(loss, y, p)
    errors = np.abs(q - _probability(loss, p, axis))
    costs = []
    for row, labels in zip(np.moveaxis(errors, axis, 1), y):
        counts = (
            np.full(labels.shape, True)
            if loss.ignore_index is None
            else (labels != loss.ignore_index)
        )
        present = [c for c in range(p.shape[axis]) if (labels[counts] == c).any()]
        weights = [1.0 if loss.class_weights is None else loss.class_weights[c] for c in present]
        of_classes = [_lovasz(row[c][counts], labels[counts] == c) for c in present]
        costs.append(np.dot(weights, of_classes) / sum(weights) if present else 0.0)
    return np.array(costs)


def _boxes_loss(loss, y, p):
    """Box by box, in Python numbers."""
    costs = np.zeros(y.shape[:-1])
    for i in np.ndindex(costs.shape):
        (ax, ay, ar, ab), (bx, by, br, bb) = y[i], p[i]
        shared = max(min(ar, br) - max(ax, bx), 0) * max(min(ab, bb) - max(ay, by), 0)
        union = (ar - ax) * (ab - ay) + (br - bx) * (bb - by) - shared
        iou = shared / (union + 1e-7)
        width, height = max(ar, br) - min(ax, bx), max(ab, bb) - min(ay, by)
        costs[i] = 1 - iou
        if type(loss) is GIoU:
            costs[i] += (width * height - union) / (width * height + 1e-7)
        if isinstance(loss, DIoU):
            apart = ((ax + ar - bx - br) ** 2 + (ay + ab - by - bb) ** 2) / 4
            costs[i] += apart / (width**2 + height**2 + 1e-7)
        if type(loss) is CIoU:
            angles = math.atan((ar - ax) / (ab - ay)) - math.atan((br - bx) / (bb - by))
            v = 4 / math.pi**2 * angles**2
            costs[i] += v * v / (1 - iou + v + 1e-7)
    return costs


def _quantile(loss, y, p):
    if isinstance(loss.quantile, float):
        return np.where(y > p, loss.quantile, loss.quantile - 1) * (y - p)
    single = [_quantile(Quantile(q), y, p[..., i]) for i, q in enumerate(loss.quantile)]
    return np.mean(single, axis=0)


def labels_of(loss, y):
    """The label of each output: that of the token after it, for a loss of next tokens."""
    return _next(loss, y) if isinstance(loss, CausalLM) else y


def _next(loss, y):
    """The label of each place: that of the next one, and none at the end of a row."""
    return np.concatenate([y[:, 1:], np.full((len(y), 1), loss.ignore_index)], axis=1)


FORMULAS = {
    "Asymmetric": _asymmetric,
    "CIoU": _boxes_loss,
    "CTC": _ctc,
    "CategoricalHinge": _categorical_hinge,
    "DIoU": _boxes_loss,
    "DistillationKL": _distillation,
    "GIoU": _boxes_loss,
    "GeneralizedCrossEntropy": _generalized,
    "HingeEmbedding": lambda loss, y, p: np.where(y == 1, p, np.maximum(0, loss.margin - p)),
    "IoU": _boxes_loss,
    "Jaccard": _tversky,
    "JensenShannon": _jensen_shannon,
    "ListNet": (lambda loss, y, p: -(special.softmax(y, -1) * special.log_softmax(p, -1)).sum(-1)),
    "LovaszHinge": _lovasz_hinge,
    "LovaszSoftmax": _lovasz_softmax,
    "MultiMargin": _multi_margin,
    "PolyCrossEntropy": _poly,
    "SmoothL1": lambda loss, y, p: special.huber(loss.beta, y - p) / loss.beta,
    "SoftMargin": lambda loss, y, p: np.log1p(np.exp(-y * p)),
    "CausalLM": _cross_entropy,
    "BinaryCrossEntropy": _binary_cross_entropy,
    "BinaryCrossEntropyWithLogits": _binary_cross_entropy,
    "CosineSimilarity": _cosine,
    "CrossEntropy": _cross_entropy,
    "Dice": _tversky,
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
    "MeanSquaredLogarithmicError": (
        lambda loss, y, p: (np.log1p(y) - np.where(p > 0, np.log1p(np.abs(p)), p)) ** 2
    ),
    "NLL": _nll,
    "Poisson": lambda loss, y, p: np.exp(p) - y * p if loss.log_input else p - special.xlogy(y, p),
    "Quantile": _quantile,
    "SquaredHinge": lambda loss, y, p: np.maximum(0, 1 - y * p) ** 2,
    "Tversky": _tversky,
}


def formula(loss, y, p, s=None):
    """The loss of a batch, as `Loss` describes it, from the costs (each times what its label
    counts) and those counts.
    """
    y = labels_of(loss, y)
    cost = FORMULAS[type(loss).__name__](loss, y, p)
    counts = np.broadcast_to(_counts(loss, y, p), cost.shape)
    s = (
        np.ones(cost.shape)
        if s is None
        else np.broadcast_to(s.reshape(-1, *[1] * (cost.ndim - 1)), cost.shape)
    )
    divisor = {"mean": counts.sum(), "weighted_mean": (s * counts).sum(), "sum": 1.0}[
        loss.reduction
    ]
    return (s * cost).sum() / divisor


# ---------------------------------------------------------------------- the graph


class Graph:
    """A loss as a session, fed by labels, outputs and sample weights; with its gradient, if wanted.

    Gives its results by name.
    """

    def __init__(self, loss, y, p, s=None, *, gradient=False, symbolic=None):
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="loss")
        op = GraphBuilder(graph)
        sizes = {
            None: p.shape,
            "batch": ("batch", *p.shape[1:]),
            "all": ("batch", *(f"d{i}" for i in range(1, p.ndim))),
        }[symbolic]
        y_pred = op.input("y_pred", p.dtype, sizes)
        y_true = op.input("y_true", y.dtype, ("n", *[None] * (y.ndim - 1)) if symbolic else y.shape)
        weight = (
            None
            if s is None
            else op.input("sample_weight", np.float32, ("rows",) if symbolic else s.shape)
        )
        result, count = loss.reduce(op, y_true, y_pred, weight)
        assert (result.dtype, result.shape) == (p.dtype, ())
        op.output("loss", result)
        if count is not None:
            op.output("count", count)
        model = infer_shapes(ir.Model(graph, ir_version=10))
        if gradient:
            model, names = add_gradients(model, "loss", ["y_pred"])
            op = GraphBuilder(model.graph)
            op.output(
                "gradient",
                op.wrap(
                    next(
                        v for node in model.graph for v in node.outputs if v.name == names["y_pred"]
                    )
                ),
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
        self.inputs = {v.name for v in self.session.get_inputs()}
        self.outputs = [v.name for v in self.session.get_outputs()]

    def __call__(self, y, p, s=None):
        feeds = {"y_true": y, "y_pred": p, "sample_weight": s}
        return dict(
            zip(self.outputs, self.session.run(None, {name: feeds[name] for name in self.inputs}))
        )


def value(loss, y, p, s=None, **settings):
    return Graph(loss, y, p, s, **settings)(y, p, s)["loss"]


def gradient(loss, y, p, s=None, **settings):
    return Graph(loss, y, p, s, gradient=True, **settings)(y, p, s)["gradient"]


def differences(loss, y, p, s=None, step=1e-5):
    """The gradient by central differences in float64."""
    graph, g = Graph(loss, y, p, s), np.zeros_like(p)
    for i in np.ndindex(p.shape):
        above, below = p.copy(), p.copy()
        above[i] += step
        below[i] -= step
        g[i] = (graph(y, above, s)["loss"] - graph(y, below, s)["loss"]) / (2 * step)
    return g


# ---------------------------------------------------------------------- laws


def test_every_loss_has_a_formula_here():
    assert sorted(FORMULAS) == sorted(CLASSES)


@every_loss
@pytest.mark.parametrize(
    ("shape", "symbolic"),
    [((6, 4), None), ((3, 2, 4), "batch"), ((2, 4, 1, 4), None), ((2, 4, 1, 4), "batch")],
    ids=str,
)
def test_value_and_gradient_in_float64(loss, shape, symbolic):
    if isinstance(loss, (CausalLM, CTC)):
        shape = (3, 5, 4) if len(shape) < 4 else (2, 1 + len(shape), 4)
    y, p = draw(loss, shape)
    s = np.random.default_rng(1).uniform(0.5, 2, len(p)).astype(np.float32)
    result = Graph(loss, y, p, s, gradient=True, symbolic=symbolic)(y, p, s)
    assert result["loss"] == pytest.approx(formula(loss, y, p, s), rel=1e-10)
    if isinstance(loss, CIoU):
        return  # its alpha has no gradient by definition; torch is compared below
    expected = differences(loss, y, p, s)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(result["gradient"], expected, rtol=1e-5, atol=1e-8)


@every_loss
def test_float32_agrees_with_float64(loss):
    y, p = draw(loss)
    single = y.astype(np.float32) if y.dtype.kind == "f" else y
    y, p = (single.astype(float) if y.dtype.kind == "f" else y), p.astype(np.float32)
    assert value(loss, single, p) == pytest.approx(formula(loss, y, p.astype(float)), rel=1e-5)
    np.testing.assert_allclose(
        gradient(loss, single, p), gradient(loss, y, p.astype(float)), rtol=1e-4, atol=1e-6
    )


# it halves an axis
@pytest.mark.parametrize(
    "loss", [cls() for cls in CLASSES.values() if cls is not GaussianNLL], ids=repr
)
def test_no_size_need_be_known(loss):
    y, p = draw(loss)
    assert value(loss, y, p, symbolic="all") == pytest.approx(formula(loss, y, p), rel=1e-10)
    np.testing.assert_allclose(
        gradient(loss, y, p, symbolic="all"), gradient(loss, y, p), rtol=1e-10
    )


@every_loss
@pytest.mark.parametrize("reduction", ["mean", "weighted_mean", "sum"])
def test_reductions(loss, reduction):
    loss = dataclasses.replace(loss, reduction=reduction)
    y, p = draw(loss, seed=2)
    for s in (None, np.array([0.5, 0, 2, 1, 3, 0.25], np.float32)):
        result = Graph(loss, y, p, s)(y, p, s)
        assert result["loss"] == pytest.approx(formula(loss, y, p, s), rel=1e-10)
        if "count" in result:
            total = formula(dataclasses.replace(loss, reduction="sum"), y, p, s)
            assert result["count"] * result["loss"] == pytest.approx(total, rel=1e-10)


@every_loss
@pytest.mark.parametrize("reduction", ["sum", "weighted_mean"])
def test_weight_two_is_the_row_twice(loss, reduction):
    loss = dataclasses.replace(loss, reduction=reduction)
    y, p = draw(loss)
    s = np.array([1, 2, 1, 1, 2, 1], np.float32)
    twice = np.repeat(np.arange(6), s.astype(int))
    assert value(loss, y, p, s) == pytest.approx(value(loss, y[twice], p[twice]), rel=1e-12)


@every_loss
def test_weight_zero_is_no_gradient_from_the_row(loss):
    y, p = draw(loss)
    s = np.array([1, 0, 1, 1, 0, 1], np.float32)
    g = gradient(loss, y, p, s)
    assert not g[s == 0].any()
    alone = gradient(dataclasses.replace(loss, reduction="sum"), y[s == 1], p[s == 1])
    ratio = g[s == 1][alone != 0] / alone[alone != 0]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-10)


@every_loss
@pytest.mark.parametrize("reduction", ["mean", "weighted_mean", "sum"])
def test_a_row_of_weight_zero_that_is_not_finite_has_no_influence(loss, reduction):
    loss = dataclasses.replace(loss, reduction=reduction)
    y, p = draw(loss)
    s = np.array([1, 0, 1, 1, 0, 1], np.float32)
    graph = Graph(loss, y, p, s, gradient=True)
    expected = graph(y, p, s)
    for bad in (np.nan, np.inf, -np.inf, 1e300):
        p[s == 0] = bad
        if y.dtype.kind == "f":
            y[4] = bad
        result = graph(y, p, s)
        for name, array in expected.items():
            np.testing.assert_array_equal(result[name], array, err_msg=f"{bad}: {name}")


@every_loss
def test_negative_weights_take_rows_away(loss):
    y, p = draw(loss)
    s = np.array([1, 1, 1, 1, 1, -1], np.float32)
    rows = dataclasses.replace(loss, reduction="sum")
    total = value(rows, y[:5], p[:5]) - value(rows, y[5:], p[5:])
    assert value(rows, y, p, s) == pytest.approx(total, rel=1e-10)
    for sign in (1, -1):
        mean = dataclasses.replace(loss, reduction="weighted_mean")
        assert value(mean, y, p, sign * s) == pytest.approx(formula(mean, y, p, s), rel=1e-10)


@every_loss
def test_a_batch_in_which_nothing_counts_costs_nothing(loss):
    loss = dataclasses.replace(loss, reduction="weighted_mean")
    y, p = draw(loss)
    s = np.zeros(6, np.float32)
    result = Graph(loss, y, p, s, gradient=True)(y, p, s)
    assert result["loss"] == result["count"] == 0
    assert not result["gradient"].any()


@every_loss
def test_hosts_are_told_the_labels_that_prepare_returns(loss) -> None:
    """Whatever `prepare` accepts, its result is allowed; whatever it refuses is not."""
    spec = spec_for(loss, np.float32)
    allowed = loss.allowed_labels(spec)
    labels = loss.target(spec)

    def allows(label: float) -> bool:
        if not np.isfinite(label) or (labels.dtype.kind == "i" and label % 1):
            return False
        if label == allowed.ignored or allowed.values is not None:
            return label == allowed.ignored or label in allowed.values
        return allowed.minimum <= label <= allowed.maximum

    accepted = []
    for number in NUMBERS:
        try:
            prepared = loss.prepare(np.full(label_shape(loss, spec, 2), number), spec)
        except DataError:
            assert not allows(number)
        else:
            accepted.append(number)
            assert all(allows(label) for label in prepared.ravel().tolist())
    assert 1.0 in accepted


@every_loss
def test_rows_of_one_value_or_without_an_axis_are_the_same(loss):
    if isinstance(loss, ClassLoss) and not isinstance(loss, Focal):
        y, p = draw(loss)
        np.testing.assert_array_equal(
            loss.prepare(y[..., None], TensorSpec("y", p.dtype, p.shape)), y
        )
        return
    needs_axis = (GaussianNLL, KLDivergence, DistillationKL, CosineSimilarity, CTC, IoU, ListNet)
    if isinstance(loss, needs_axis) or isinstance(getattr(loss, "quantile", None), tuple):
        pytest.skip("needs a last axis")
    plain = {"pos_weight": 2.0} if getattr(loss, "pos_weight", None) else {}
    plain |= {"alpha": 0.3, "ignore_index": None} if isinstance(loss, Focal) else {}
    loss = dataclasses.replace(loss, **plain)
    y, p = draw(loss, (6, 1))
    flat = loss.prepare(y, TensorSpec("y", p.dtype, ("batch",)))
    column = loss.prepare(flat, TensorSpec("y", p.dtype, ("batch", 1)))
    assert (flat.shape, column.shape) == ((6,), (6, 1))
    s = np.arange(6).astype(np.float32)
    assert value(loss, flat, p[:, 0], s) == pytest.approx(value(loss, column, p, s), rel=1e-12)


RAW = [0.0, 1e-30, -1e-30, 1.0, -1.0, 100.0, -100.0, 1e4, -1e4]
PROBABILITIES = [0.0, 1.0, 1e-38, 1e-20, 1 - 2**-24, 0.5]


@every_loss
def test_finite_at_extremes(loss):
    rng = np.random.default_rng(3)
    shape = shape_for(loss, 200)
    spec = spec_for(loss, np.float32)
    p = rng.choice(PROBABILITIES if takes_logits(loss) is False else RAW, size=shape).astype(
        np.float32
    )
    if isinstance(loss, NLL):
        p = -np.abs(p)
    tried = [labels_for(loss, TensorSpec("y", spec.dtype, shape), rng)]
    for extremes in (RAW, np.abs(RAW), PROBABILITIES, [0.0, 1.0], [-1.0, 1.0]):
        drawn = rng.choice(extremes, size=label_shape(loss, spec, 200))
        for labels in (drawn, p):
            try:
                tried.append(loss.prepare(labels, spec))
            except DataError:
                continue  # no labels for this loss
    for y in tried:
        if (
            y.ndim == 2
            and isinstance(loss, Focal)
            and (loss.class_weights or loss.alpha or loss.ignore_index is not None)
        ):
            continue
        result = Graph(loss, y, p, gradient=True)(y, p)
        assert np.isfinite(result["loss"])
        assert np.isfinite(result["gradient"]).all()


@pytest.mark.parametrize("name", REGISTRY)
def test_names(name):
    assert type(get_loss(name)) is REGISTRY[name]
    assert name == name.lower()


def test_no_name_is_taken_twice():
    names = [
        n
        for cls in CLASSES.values()
        for n in (snake_case(cls.__name__), *vars(cls).get("aliases", ()))
    ]
    assert sorted(names) == sorted(REGISTRY)


@every_loss
def test_settings_survive_json(loss):
    assert from_config(json.loads(json.dumps(to_config(loss))), "onnxfit.losses") == loss


@every_loss
def test_labels_that_are_nan_or_no_numbers_are_refused_by_row(loss):
    y, p = draw(loss)
    y = y.astype(float)
    y[4] = np.nan
    spec = spec_for(loss, p.dtype)
    with pytest.raises(
        DataError,
        match=(
            rf"^{type(loss).__name__} expects .* for output y: float64\[batch, .*4\], got nan at"
            r" row 4"
        ),
    ):
        loss.prepare(y, spec)
    with pytest.raises(DataError, match="numeric labels, got dtype <U"):
        loss.prepare(y.astype(str), spec)


@every_loss
def test_labels_of_another_shape_are_refused(loss):
    with pytest.raises(
        DataError,
        match=r"of shape \(batch,.*\) for output y: float64\[batch, .*4\], got shape \(6, 3, 2\)",
    ):
        loss.prepare(np.zeros((6, 3, 2)), spec_for(loss, float))


@every_loss
def test_prepare_twice_is_prepare_once_and_copies_nothing_the_second_time(loss):
    y, p = draw(loss)
    assert loss.prepare(y, spec_for(loss, p.dtype)) is y


# ---------------------------------------------------------------------- values known by hand


def one(loss, y, p):
    """Value and gradient for labels and outputs as they are given, in float32."""
    p = np.array(p, np.float32)
    y = loss.prepare(np.array(y), TensorSpec("y", p.dtype, ("batch", *p.shape[1:])))
    result = Graph(loss, y, p, gradient=True)(y, p)
    return result["loss"], result["gradient"].tolist()


@pytest.mark.parametrize(
    ("loss", "y", "p", "expected"),
    [
        (MeanAbsoluteError(), [[0], [0], [1]], [[3], [-3], [1]], (2, [[1 / 3], [-1 / 3], [0]])),
        (Elastic(0.5, 2.0), [[0], [0]], [[3], [-3]], (19.5, [[6.25], [-6.25]])),
        (Huber(2.0), [[0], [0]], [[2], [-5]], (5, [[1], [-1]])),  # 2 is where the two pieces meet
        (Quantile(0.9), [[1], [-1]], [[0], [0]], (0.5, [[-0.45], [0.05]])),
        (MeanSquaredLogarithmicError(), [[0]], [[-2]], (4, [[-4]])),
        (MeanSquaredLogarithmicError(), [[math.e - 1]], [[0]], (1, [[-2]])),
        (
            BinaryCrossEntropy(from_logits=True),
            [[0], [1]],
            [[0], [0]],
            (math.log(2), [[0.25], [-0.25]]),
        ),
        (BinaryCrossEntropy(from_logits=True), [[0], [1]], [[1e4], [-1e4]], (1e4, [[0.5], [-0.5]])),
        (BinaryCrossEntropy(), [[1]], [[0]], (30 * math.log(10), [[0]])),
        (BinaryCrossEntropy(), [[0]], [[0.5]], (math.log(2), [[2]])),
        (
            Focal(),
            [[1], [0]],
            [[0], [0]],
            (math.log(2) / 4, [[-(2 * math.log(2) + 1) / 16], [(2 * math.log(2) + 1) / 16]]),
        ),
        (Hinge(), [[1], [0]], [[-1], [-3]], (1, [[-0.5], [0]])),
        (SquaredHinge(), [[1], [-1]], [[-1], [0]], (2.5, [[-2], [1]])),
        (CrossEntropy(), [0, 1], [[1e4, -1e4], [1e4, -1e4]], (1e4, [[0, 0], [0.5, -0.5]])),
        (CrossEntropy(from_logits=False), [0], [[0.5, 0.5]], (math.log(2), [[-2, 0]])),
        (
            CrossEntropy(ignore_index=-100),
            [0, -100],
            [[0, 0], [5, 6]],
            (math.log(2), [[-0.5, 0.5], [0, 0]]),
        ),
        (CrossEntropy(ignore_index=7), [7, 7], [[0, 0], [5, 6]], (0, [[0, 0], [0, 0]])),
        (Poisson(), [[2]], [[0]], (1, [[-1]])),
        (Poisson(log_input=False), [[2]], [[1]], (1, [[-1]])),
        (GaussianNLL(), [[3]], [[1, 0]], (2, [[-2, -1.5]])),
        (CosineSimilarity(), [[3, 4]], [[4, 3]], (-0.96, [[0.0336, -0.0448]])),
        (CosineSimilarity(), [[0, 0]], [[4, 3]], (0, [[0, 0]])),
        (CosineSimilarity(), [[1, 0]], [[0, 0]], (0, [[-1e6, 0]])),
    ],
    ids=lambda value: repr(value) if isinstance(value, Loss) else "",
)
def test_known_values(loss, y, p, expected):
    result, g = one(loss, y, p)
    assert result == pytest.approx(expected[0], rel=1e-5)
    np.testing.assert_allclose(g, expected[1], rtol=1e-4, atol=1e-7)


def test_a_weighted_row_counts_as_a_row():
    y, p, s = (
        np.zeros((4, 1), np.float32),
        np.array([[1], [2], [3], [4]], np.float32),
        np.array([0, 0, 1, 1], np.float32),
    )
    results = {
        r: value(MeanSquaredError(reduction=r), y, p, s) for r in ("mean", "weighted_mean", "sum")
    }
    assert results == {"mean": 6.25, "weighted_mean": 12.5, "sum": 25}
    assert value(MeanSquaredError(), y, p) == 7.5
    y = np.array([[0], [0], [1], [1]], np.float32)
    assert value(
        MeanSquaredError(), y, p, np.array([0.2, 0.2, 0.3, 0.3], np.float32)
    ) == pytest.approx(1.225)
    assert value(MeanSquaredError(), y, p, np.array([0.2, 0.2, 1, 1], np.float32)) == pytest.approx(
        3.5
    )


def test_a_score_as_in_onnxcustom():
    """Its `neglog` is the sum of -w [(1 - y) log(1 - p) + y log p] of the sigmoid, with gradient w
    (p - y).
    """
    rng = np.random.default_rng(4)
    p, y = rng.normal(size=(8, 1)), rng.integers(0, 2, (8, 1)).astype(float)
    s = rng.uniform(size=8).astype(np.float32)
    q, w = special.expit(p), s[:, None].astype(float)
    result = Graph(
        loss := BinaryCrossEntropy(from_logits=True, reduction="sum"), y, p, s, gradient=True
    )(y, p, s)
    assert result["loss"] == pytest.approx(
        -(w * ((1 - y) * np.log(1 - q) + y * np.log(q))).sum(), rel=1e-10
    ), loss
    np.testing.assert_allclose(result["gradient"], w * (q - y), rtol=1e-10)


# ---------------------------------------------------------------------- PyTorch


def _torch_losses():
    weights = (1.0, 0.0, 2.0, 0.5)
    return [
        (MeanSquaredError(), lambda n: n.MSELoss()),
        (MeanSquaredError(reduction="sum"), lambda n: n.MSELoss(reduction="sum")),
        (MeanAbsoluteError(), lambda n: n.L1Loss()),
        (Huber(0.7), lambda n: n.HuberLoss(delta=0.7)),
        (Huber(), lambda n: n.SmoothL1Loss()),
        (SmoothL1(0.3), lambda n: n.SmoothL1Loss(beta=0.3)),
        (SoftMargin(), lambda n: n.SoftMarginLoss()),
        (HingeEmbedding(0.7), lambda n: n.HingeEmbeddingLoss(margin=0.7)),
        (MultiMargin(0.7), lambda n: n.MultiMarginLoss(margin=0.7)),
        (
            MultiMargin(0.7, 2, class_weights=weights, reduction="sum"),
            lambda n: n.MultiMarginLoss(2, 0.7, _tensor(*weights), reduction="sum"),
        ),
        (get_loss("MultiLabelSoftMarginLoss"), lambda n: n.MultiLabelSoftMarginLoss()),
        (
            PolyCrossEntropy(epsilon=2.0),
            lambda n: lambda p, y: _torch_poly(n.functional, p, y, 2.0),
        ),
        (
            DistillationKL(3.0),
            lambda n: (
                lambda p, y: (
                    9
                    * n.functional.kl_div(
                        (p / 3).log_softmax(-1),
                        (y / 3).log_softmax(-1),
                        log_target=True,
                        reduction="batchmean",
                    )
                )
            ),
        ),
        (ListNet(), lambda n: lambda p, y: n.functional.cross_entropy(p, y.softmax(-1))),
        (CIoU(), lambda n: _torch_ciou),
        (MixtureNLL(1), lambda n: lambda p, y: _torch_mixture(p, y, 1, 1)),
        (Poisson(), lambda n: n.PoissonNLLLoss()),
        (Poisson(log_input=False), lambda n: n.PoissonNLLLoss(log_input=False, eps=0)),
        (
            GaussianNLL(log_variance=False),
            lambda n: lambda p, y: n.GaussianNLLLoss()(p[..., :2], y, p[..., 2:]),
        ),
        (
            GaussianNLL(),
            lambda n: lambda p, y: n.GaussianNLLLoss()(p[..., :2], y, p[..., 2:].exp()),
        ),
        (BinaryCrossEntropy(), lambda n: n.BCELoss()),
        (BinaryCrossEntropy(from_logits=True), lambda n: n.BCEWithLogitsLoss()),
        (
            BinaryCrossEntropy(from_logits=True, pos_weight=(2.0, 0.5, 3.0, 1.0)),
            lambda n: n.BCEWithLogitsLoss(pos_weight=_tensor(2, 0.5, 3, 1)),
        ),
        (CrossEntropy(), lambda n: n.CrossEntropyLoss()),
        (CrossEntropy(label_smoothing=0.2), lambda n: n.CrossEntropyLoss(label_smoothing=0.2)),
        (
            CrossEntropy(class_weights=weights),
            lambda n: n.CrossEntropyLoss(weight=_tensor(*weights)),
        ),
        (
            CrossEntropy(class_weights=weights, reduction="sum"),
            lambda n: n.CrossEntropyLoss(weight=_tensor(*weights), reduction="sum"),
        ),
        (
            CrossEntropy(class_weights=(1, 3, 2, 0.5), label_smoothing=0.2, ignore_index=2),
            lambda n: n.CrossEntropyLoss(
                weight=_tensor(1, 3, 2, 0.5), label_smoothing=0.2, ignore_index=2
            ),
        ),
        (
            NLL(class_weights=weights, ignore_index=3),
            lambda n: n.NLLLoss(weight=_tensor(*weights), ignore_index=3),
        ),
        (
            Dice(from_logits=True, smooth=0.5),
            lambda n: lambda p, y: _torch_dice(p.sigmoid(), y, 0.5),
        ),
        (
            KLDivergence(from_logits=True),
            lambda n: lambda p, y: n.KLDivLoss(reduction="batchmean")(p.log_softmax(-1), y),
        ),
    ]


def _torch_poly(functional, p, y, epsilon):
    """As the paper writes Poly-1 in PyTorch."""
    own = p.softmax(-1).gather(1, y[:, None])[:, 0]
    return (functional.cross_entropy(p, y, reduction="none") + epsilon * (1 - own)).mean()


def _torch_ciou(p, y):
    """The formula of the paper; its alpha is computed without a gradient."""
    import torch

    first, last = torch.max(p[:, :2], y[:, :2]), torch.min(p[:, 2:], y[:, 2:])
    shared = (last - first).clamp(min=0).prod(1)
    sides_p, sides_y = p[:, 2:] - p[:, :2], y[:, 2:] - y[:, :2]
    iou = shared / (sides_p.prod(1) + sides_y.prod(1) - shared + 1e-7)
    around = torch.max(p[:, 2:], y[:, 2:]) - torch.min(p[:, :2], y[:, :2])
    apart = (p[:, :2] + p[:, 2:] - y[:, :2] - y[:, 2:]) / 2
    angles = torch.atan2(*sides_y.T) - torch.atan2(*sides_p.T)
    v = 4 / math.pi**2 * angles**2
    alpha = (v / (1 - iou + v + 1e-7)).detach()
    return (1 - iou + (apart**2).sum(1) / ((around**2).sum(1) + 1e-7) + alpha * v).mean()


def _torch_mixture(p, y, components, numbers):
    from torch import distributions as d

    shape = (*p.shape[:-1], components, numbers)
    logits, means, logs = p.split([components, components * numbers, components * numbers], -1)
    normal = d.Independent(d.Normal(means.reshape(shape), logs.reshape(shape).exp()), 1)
    return -d.MixtureSameFamily(d.Categorical(logits=logits), normal).log_prob(y).mean()


def _torch_dice(q, y, smooth):
    """The Dice loss of each row, as papers on segmentation write it; their mean."""
    rest = tuple(range(1, q.ndim))
    both, all_of_both = (q * y).sum(rest), q.sum(rest) + y.sum(rest)
    return (1 - (2 * both + 2 * smooth) / (all_of_both + 2 * smooth)).mean()


def _tensor(*values):
    import torch

    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("loss", "make"), _torch_losses(), ids=lambda v: repr(v) if isinstance(v, Loss) else ""
)
def test_torch_gives_the_same_value_and_gradient(loss, make):
    torch = pytest.importorskip("torch")
    y, p = draw(loss, (12, 3 if isinstance(loss, MixtureNLL) else 4), seed=5)
    _compare(torch, loss, make(torch.nn), y, p)
    if isinstance(loss, CrossEntropy) and not isinstance(loss, PolyCrossEntropy):
        if loss.ignore_index is None:
            _compare(
                torch,
                loss,
                make(torch.nn),
                special.softmax(np.random.default_rng(6).normal(size=p.shape), axis=-1),
                p,
            )
        y, p = draw(loss, (2, 4, 3, 5), seed=5)
        _compare(torch, loss, make(torch.nn), y, p)


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(5, 15), (2, 3, 15)], ids=str)
def test_mixtures_are_those_of_torch(shape):
    """Three components of two numbers each, whose logarithm of sigma is any number."""
    torch = pytest.importorskip("torch")
    y, p = draw(loss := MixtureNLL(3), shape, seed=5)
    assert y.shape == (*shape[:-1], 2)
    _compare(torch, loss, lambda p, y: _torch_mixture(p, y, 3, 2), y, p)
    s = np.arange(len(p)).astype(np.float32)
    expected = [value(loss, y[i : i + 1], p[i : i + 1]) for i in range(len(p))]
    assert value(loss, y, p, s) == pytest.approx(np.mean(s * expected))
    assert np.isfinite(gradient(loss, y.astype(np.float32), (1e4 * p).astype(np.float32))).all()


def test_boxes_may_be_centers_and_sides():
    rng = np.random.default_rng(0)
    a, b = (boxes(rng.normal(size=(6, 4))) for _ in range(2))

    def centers(box):
        return np.concatenate([(box[:, :2] + box[:, 2:]) / 2, box[:, 2:] - box[:, :2]], axis=1)

    for cls in (IoU, GIoU, DIoU, CIoU):
        other = cls("cxcywh")
        labels = other.prepare(centers(a), spec_for(other, float))
        assert value(other, labels, centers(b)) == pytest.approx(value(cls(), a, b), rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "box"), [(GIoU(), [0, 0, -1, 1]), (GIoU("cxcywh"), [0, 0, -1, 1])], ids=repr
)
def test_a_label_that_is_no_box_is_refused(loss, box):
    labels = np.array([[0, 0, 1, 1], box], float)
    with pytest.raises(DataError, match=r"width and height are >= 0 for output .* at row 1"):
        loss.prepare(labels, spec_for(loss, float))
    with pytest.raises(SettingError, match=r"needs an output whose last axis has the 4 numbers"):
        loss.target(TensorSpec("y", np.dtype(float), ("batch", 3)))


def test_boxes_that_do_not_touch_or_have_no_area_have_gradients():
    label = np.array([[0, 0, 1, 1]], np.float32)
    for box in ([3, 3, 4, 4], [2, 2, 1, 1], [0.5, 0.5, 0.5, 0.5]):
        for loss in (GIoU(), DIoU(), CIoU()):
            g = gradient(loss, label, np.array([box], np.float32))
            assert np.isfinite(g).all()
            assert g.any() or box[0] == 0.5  # a point in the center of the label


@pytest.mark.parametrize("weight", [None, 2.0])
def test_places_without_an_item_do_not_count_in_a_list(weight):
    rng = np.random.default_rng(1)
    y, p = rng.integers(0, 4, (3, 5)).astype(float), rng.normal(size=(3, 5))
    y[0, 3:], y[2] = -1, -1  # the last list is empty
    s = None if weight is None else np.full(3, weight, np.float32)
    loss = ListNet(ignore_index=-1)
    result = Graph(loss, y, p, s, gradient=True)(y, p, s)
    costs = [value(ListNet(), y[i : i + 1, :n], p[i : i + 1, :n]) for i, n in ((0, 3), (1, 5))]
    assert result["loss"] == pytest.approx((weight or 1) * np.mean(costs))
    assert result["count"] == 2
    assert not result["gradient"][0, 3:].any()
    assert not result["gradient"][2].any()


@pytest.mark.torch
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_torch_agrees_where_logits_are_large(scale):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    p = rng.normal(scale=scale, size=(50, 4)).astype(np.float32)
    _compare(
        torch, CrossEntropy(), torch.nn.CrossEntropyLoss(), rng.integers(0, 4, 50), p, rtol=1e-5
    )
    y = rng.integers(0, 2, p.shape).astype(np.float32)
    _compare(
        torch, BinaryCrossEntropy(from_logits=True), torch.nn.BCEWithLogitsLoss(), y, p, rtol=1e-5
    )


def _compare(torch, loss, other, y, p, rtol=1e-9):
    leaf = torch.tensor(p, requires_grad=True)
    expected = other(leaf, torch.tensor(y))
    expected.backward()
    result = Graph(loss, y, p, gradient=True)(y, p)
    assert result["loss"] == pytest.approx(expected.item(), rel=rtol)
    np.testing.assert_allclose(result["gradient"], leaf.grad.numpy(), rtol=100 * rtol, atol=rtol)


def _token_ids(rng, shape, masked=0.3):
    """Ids of tokens, of which some are left out, but never all of a row."""
    ids = rng.integers(0, 4, shape)
    ids[:, 2:][rng.random((shape[0], shape[1] - 2)) < masked] = -100
    return ids


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_torch_gives_the_same_loss_of_next_tokens(reduction):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    y, p = _token_ids(rng, (5, 7)), rng.normal(size=(5, 7, 4))

    def of_next_tokens(logits, labels):  # as transformers computes it
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 4), labels[:, 1:].reshape(-1), reduction=reduction
        )

    _compare(torch, CausalLM(reduction=reduction), of_next_tokens, y, p)


def test_a_weight_of_a_token_weighs_that_token_as_a_label():
    rng = np.random.default_rng(4)
    y, p = _token_ids(rng, (3, 5)), rng.normal(size=(3, 5, 4))
    s = rng.uniform(0.5, 2, y.shape).astype(np.float32)
    cost = special.logsumexp(p[:, :-1], axis=-1)
    cost -= np.take_along_axis(p[:, :-1], np.maximum(y[:, 1:, None], 0), -1)[..., 0]
    counts = y[:, 1:] != -100
    expected = (cost * counts * s[:, 1:]).sum() / counts.sum()
    assert value(CausalLM(), y, p, s) == pytest.approx(expected, rel=1e-6)
    s[:, 2] = 0  # the output before that label does not matter
    graph = Graph(CausalLM(), y, p, s, gradient=True)
    before = graph(y, p, s)
    assert not before["gradient"][:, 1].any()
    assert before["gradient"][:, 0].any()
    p[:, 1] = np.nan
    np.testing.assert_array_equal(graph(y, p, s)["gradient"], before["gradient"])


@pytest.mark.parametrize("length", [1, 2])
def test_the_last_output_of_a_row_counts_nothing(length):
    y, p = np.ones((2, length), np.int64), np.random.default_rng(5).normal(size=(2, length, 4))
    result = Graph(CausalLM(), y, p, gradient=True)(y, p)
    assert result["count"] == 2 * (length - 1)
    assert not result["gradient"][:, -1].any()
    assert (result["loss"] > 0) == (length > 1)


# ---------------------------------------------------------------------- labels


LOGITS = TensorSpec("logits", np.dtype(np.float32), ("batch", 10))
SCORE = TensorSpec("score", np.dtype(np.float32), ("batch", 1))
PIXELS = TensorSpec("mask", np.dtype(np.float32), ("batch", 3, "height", "width"))


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    ],
)
def test_any_type_of_whole_number_is_a_class_index(dtype):
    y = CrossEntropy().prepare(np.array([0, 9, 3], dtype), LOGITS)
    assert (y.dtype, y.tolist()) == (np.int64, [0, 9, 3])


@pytest.mark.parametrize("classes", [10, None, "classes"])
@pytest.mark.parametrize(
    "label",
    [np.uint64(2**63), np.uint64(2**64 - 1), 2.0**63, 1e30, -1e30, np.inf, np.nan, np.float32(0.5)],
    ids=str,
)
@pytest.mark.parametrize("loss", [CrossEntropy(), NLL(), Focal(), CrossEntropy(ignore_index=-1)])
def test_no_class_index_wraps(loss, label, classes):
    output = TensorSpec("logits", np.dtype(np.float32), ("batch", classes))
    shown = str(label) if isinstance(label, np.unsignedinteger) else f"{label:g}"
    with pytest.raises(DataError, match=rf"class indices from 0 .*got {re.escape(shown)} at row 1"):
        loss.prepare(np.array([1, label], np.asarray(label).dtype), output)


@pytest.mark.parametrize("index", [2**63, -(2**63) - 1, 1.5, "a", True])
def test_an_ignored_index_is_a_whole_number_of_64_bits(index):
    with pytest.raises(SettingError, match="ignore_index to be a whole number"):
        CrossEntropy(ignore_index=index)


def test_booleans_are_labels():
    assert CrossEntropy().prepare([True, False], LOGITS).tolist() == [1, 0]
    assert BinaryCrossEntropy().prepare([True, False], SCORE).tolist() == [[1], [0]]


def test_hinge_takes_zero_for_minus_one():
    assert (
        Hinge().prepare([0, 1], SCORE).tolist()
        == Hinge().prepare([[-1], [1]], SCORE).tolist()
        == [[-1], [1]]
    )
    assert SquaredHinge().prepare(np.zeros(2, np.uint8), SCORE).tolist() == [[-1], [-1]]


def test_pixels_may_have_an_axis_of_one_class_map():
    y = np.ones((2, 1, 5, 4), np.uint8)
    assert (
        CrossEntropy().prepare(y, PIXELS).shape
        == CrossEntropy().prepare(y[:, 0], PIXELS).shape
        == (2, 5, 4)
    )


def test_a_fixed_batch_of_the_model_is_not_that_of_the_data():
    assert MeanSquaredError().prepare(
        np.zeros(7), TensorSpec("y", np.dtype(np.float32), (2, 1))
    ).shape == (7, 1)
    assert CrossEntropy().prepare(
        np.zeros(7), TensorSpec("y", np.dtype(np.float32), (2, 3))
    ).shape == (7,)


@pytest.mark.parametrize(
    ("loss", "y", "output", "message"),
    [
        (
            CrossEntropy(),
            [0] * 17 + [10],
            LOGITS,
            (
                "CrossEntropy expects class indices from 0 to 9 for output logits: float32[batch,"
                " 10], got 10 at row 17."
            ),
        ),
        (
            CrossEntropy(),
            [3, -1],
            LOGITS,
            "got -1 at row 1. To ignore these labels, set ignore_index=-1.",
        ),
        (CrossEntropy(ignore_index=-1), [3, -1, -2], LOGITS, "got -2 at row 2."),
        (
            CrossEntropy(),
            [3.0, 0.5],
            LOGITS,
            "class indices from 0 to 9 for output logits: float32[batch, 10], got 0.5 at row 1.",
        ),
        (CrossEntropy(), [np.inf, 0], LOGITS, "got inf at row 0."),
        (
            CrossEntropy(),
            np.full((2, 10), 2),
            LOGITS,
            (
                "class indices, or probabilities from 0 to 1 for output logits: float32[batch, 10],"
                " got 2 at row 0."
            ),
        ),
        (
            CrossEntropy(),
            np.zeros((2, 9)),
            LOGITS,
            (
                "class indices of shape (batch,) for output logits: float32[batch, 10], got shape"
                " (2, 9)."
            ),
        ),
        (
            CrossEntropy(),
            np.zeros((2, 5)),
            TensorSpec("y", np.dtype("f4"), ("batch", 7, 5)),
            "If the classes are on axis 1, set axis=1.",
        ),
        (NLL(), np.full((2, 10), 0.1), LOGITS, "NLL expects class indices of shape (batch,)"),
        (
            BinaryCrossEntropy(),
            [0, 1, 2],
            SCORE,
            "numbers from 0 to 1 for output score: float32[batch, 1], got 2 at row 2.",
        ),
        (
            BinaryCrossEntropy(),
            [0, 1],
            LOGITS,
            "If each row has one of several classes, use CrossEntropy.",
        ),
        (
            Hinge(),
            [1, 2],
            SCORE,
            (
                "Hinge expects labels -1 and 1, or 0 and 1, for output score: float32[batch, 1],"
                " got 2 at row 1."
            ),
        ),
        (
            Hinge(),
            [1, 0, -1],
            SCORE,
            "not a mixture, for output score: float32[batch, 1], got -1 at row 2.",
        ),
        (
            Poisson(),
            [1, -1],
            SCORE,
            (
                "Poisson expects finite numbers >= 0 for output score: float32[batch, 1], got -1 at"
                " row 1."
            ),
        ),
        (
            MeanSquaredError(),
            [1, 1e300],
            SCORE,
            (
                "MeanSquaredError expects finite numbers for output score: float32[batch, 1], got"
                " 1e+300 at row 1."
            ),
        ),
        (
            Focal(),
            [[0, 0.5]],
            TensorSpec("y", np.dtype("f4"), ("batch", 2)),
            "class indices, or labels 0 and 1 of the output's shape, for output",
        ),
    ],
)
def test_wrong_labels_are_named(loss, y, output, message):
    with pytest.raises(DataError) as raised:
        loss.prepare(np.array(y), output)
    assert message in str(raised.value)


# ---------------------------------------------------------------------- settings, names, functions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MeanSquaredError(reduction="max"),
            "MeanSquaredError needs reduction 'mean', 'weighted_mean' or 'sum', got 'max'.",
        ),
        (lambda: Huber(-1), "Huber needs delta > 0, got -1."),
        (lambda: Huber(math.nan), "Huber needs delta > 0, got nan."),
        (lambda: Elastic(l2_weight=-1), "Elastic needs l2_weight >= 0, got -1."),
        (lambda: Elastic(l1_weight="a"), "Elastic needs l1_weight >= 0, got 'a'."),
        (lambda: Quantile(1), "Quantile needs 0 < quantile < 1, got 1."),
        (lambda: Quantile((0.1, 2)), "Quantile needs 0 < quantile < 1, got 2.0."),
        (lambda: Quantile((0.1, 0.9)).target(LOGITS), "10 numbers as quantile"),
        (lambda: SmoothL1(0), "SmoothL1 needs beta > 0, got 0."),
        (lambda: MultiMargin(p=3), "MultiMargin needs p 1 or 2, got 3."),
        (lambda: Asymmetric(clip=1), "Asymmetric needs clip >= 0 and < 1, got 1."),
        (lambda: GeneralizedCrossEntropy(0), "GeneralizedCrossEntropy needs q > 0 and <= 1"),
        (lambda: IoU("yolo"), "IoU needs box_format 'xyxy' or 'cxcywh', got 'yolo'."),
        (
            lambda: MixtureNLL(3).target(LOGITS),
            "MixtureNLL(3) needs an output whose last axis has 9 entries for labels of one number,"
            " and 6 more for each further number of a label, got logits",
        ),
        (
            lambda: BinaryCrossEntropy(label_smoothing=1),
            "BinaryCrossEntropy needs 0 <= label_smoothing < 1, got 1.",
        ),
        (
            lambda: BinaryCrossEntropy(pos_weight=0),
            "BinaryCrossEntropy needs pos_weight > 0, got 0.",
        ),
        (
            lambda: BinaryCrossEntropy(pos_weight=(1, -2)),
            "BinaryCrossEntropy needs pos_weight > 0, got -2.0.",
        ),
        (
            lambda: CrossEntropy(label_smoothing=-0.1),
            "CrossEntropy needs 0 <= label_smoothing < 1, got -0.1.",
        ),
        (
            lambda: CrossEntropy(class_weights=0.5),
            "CrossEntropy needs a sequence of numbers as class_weights, got 0.5.",
        ),
        (lambda: NLL(class_weights=(1, -1)), "NLL needs class_weights >= 0, got -1.0."),
        (lambda: Focal(gamma=-1), "Focal needs gamma >= 0, got -1."),
        (lambda: Focal(alpha=1), "Focal needs 0 < alpha < 1, got 1."),
        (
            lambda: CrossEntropy(class_weights=(1, 2)).target(LOGITS),
            "10 numbers as class_weights, one for each entry of axis 1 of logits",
        ),
        (
            lambda: BinaryCrossEntropy(pos_weight=(1, 2)).target(LOGITS),
            "10 numbers as pos_weight, one for each entry of axis 1 of logits",
        ),
        (
            lambda: Focal(alpha=(0.5, 0.5)).target(LOGITS),
            "10 numbers as alpha, one for each entry of axis 1 of logits",
        ),
        (
            lambda: CrossEntropy().target(SCORE),
            "CrossEntropy needs at least 2 classes, got score",
        ),
        (
            lambda: CrossEntropy(axis=2).target(LOGITS),
            "an output with a batch axis and a class axis, got rank 2 and axis=2.",
        ),
        (lambda: CrossEntropy(axis=0).target(LOGITS), "got rank 2 and axis=0."),
        (
            lambda: GaussianNLL().target(SCORE),
            (
                "GaussianNLL needs an output whose last axis has an even size, means followed by"
                " variances, got score"
            ),
        ),
        (
            lambda: get_loss(3),
            "loss must be a name, a Loss or a function (op, y_true, y_pred) -> Value, got 3.",
        ),
        (lambda: get_loss(int), "loss must be a name, a Loss or a function"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(SettingError) as raised:
        make()
    assert message in str(raised.value)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(
        UnknownNameError,
        match=(
            r"^No loss is called 'cross_entrpy'. Did you mean 'cross_entropy'\? Known:"
            r" cross_entropy, .* and \d+ more\.$"
        ),
    ):
        get_loss("cross_entrpy")


KERAS = [
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CTC",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalGeneralizedCrossEntropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Dice",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SparseCategoricalCrossentropy",
    "SquaredHinge",
    "Tversky",
    "mae",
    "mape",
    "mse",
    "msle",
    "kld",
    "binary_crossentropy",
    "categorical_crossentropy",
    "categorical_hinge",
    "sparse_categorical_crossentropy",
]
UNDERSTOOD = {
    "L1Loss": "MeanAbsoluteError", "MSELoss": "MeanSquaredError", "BCELoss": "BinaryCrossEntropy",
    "BCEWithLogitsLoss": "BinaryCrossEntropyWithLogits", "KLDivLoss": "KLDivergence", "NLLLoss": "NLL",
    "SmoothL1Loss": "SmoothL1", "PoissonNLLLoss": "Poisson", "MultiMarginLoss": "MultiMargin",
    "SoftTargetCrossEntropy": "CrossEntropy", "AsymmetricLossMultiLabel": "Asymmetric",
    "softmax_cross_entropy_with_integer_labels": "CrossEntropy", "generalized_box_iou_loss": "GIoU",
    "complete_box_iou_loss": "CIoU", "sigmoid_focal_loss": "Focal", "LovaszLoss": "LovaszHinge",
    "LovaszSoftmaxLoss": "LovaszSoftmax", "JaccardLoss": "Jaccard",
}  # fmt: skip


@pytest.mark.parametrize("name", [*KERAS, *UNDERSTOOD])
def test_names_of_other_libraries_are_understood(name):
    found = type(get_loss(name)).__name__
    assert found == UNDERSTOOD.get(name, found)


@pytest.mark.torch
def test_every_loss_of_torch_is_understood_or_answered_with_advice():
    torch = pytest.importorskip("torch")
    names = [name for name in dir(torch.nn) if name.endswith("Loss") and name[0].isupper()]
    assert len(names) > 20
    for name in names:
        with contextlib.suppress(SettingError):
            get_loss(name)
            continue
        with pytest.raises(SettingError, match=r"Did you mean|needs arguments\. Pass"):
            get_loss(name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("TripletMarginLoss", "loss=onnxfit.losses.TripletMargin(outputs=...)"),
        ("CosineEmbeddingLoss", "loss=onnxfit.losses.CosineEmbedding(outputs=...)"),
        ("SupConLoss", "loss=onnxfit.losses.SupCon(outputs=...)"),
        ("arcface", "loss=onnxfit.losses.ArcFace(classes=...)"),
        ("LabelSmoothingCrossEntropy", "loss=onnxfit.losses.CrossEntropy(label_smoothing=0.1)"),
        ("clip", 'InfoNCE(outputs=["image", "text"], learn_temperature=True)'),
    ],
)
def test_the_name_of_a_loss_with_arguments_is_answered_with_the_object(name, advice):
    with pytest.raises(SettingError) as raised:
        get_loss(name)
    assert advice in str(raised.value)


def test_a_loss_may_be_given_in_many_ways():
    assert (
        get_loss("CrossEntropy")
        == get_loss(CrossEntropy)
        == get_loss(CrossEntropy())
        == CrossEntropy()
    )
    assert get_loss("MAE") == MeanAbsoluteError()


def test_the_class_axis_is_1_for_images_and_else_the_last():
    assert [CrossEntropy().class_axis(rank) for rank in (2, 3, 4, 5)] == [1, 2, 1, 1]
    assert [CrossEntropy(axis=-1).class_axis(rank) for rank in (2, 3, 4)] == [1, 2, 3]


def test_a_function_per_element_is_reduced_and_a_scalar_stays():
    y, p = draw(MeanSquaredError())
    s = np.arange(6).astype(np.float32)
    squares = get_loss(lambda op, y_true, y_pred: (y_true - y_pred) ** 2)
    np.testing.assert_allclose(gradient(squares, y, p, s), gradient(MeanSquaredError(), y, p, s))
    largest = get_loss(lambda op, y_true, y_pred: op.ReduceSum(abs(y_true - y_pred), keepdims=0))
    assert value(largest, y, p) == pytest.approx(np.abs(y - p).sum())
    with pytest.raises(
        SettingError,
        match=r"<lambda> returns one number per batch, which sample weights cannot scale",
    ):
        value(largest, y, p, s)
    with pytest.raises(SettingError, match=r"must return a Value of floats, got None"):
        value(get_loss(lambda op, y_true, y_pred: None), y, p)


def test_labels_of_a_function_may_have_a_shape_of_their_own():
    loss = get_loss(
        lambda op, y_true, y_pred: (
            -op.Squeeze(op.GatherElements(y_pred, op.Unsqueeze(y_true, [1]), axis=1), [1])
        )
    )
    y = loss.prepare(np.array([9, 0, 3]), LOGITS)
    assert (y.dtype, y.shape) == (np.int64, (3,))
    assert loss.prepare(np.array([1, 2]), SCORE).dtype == np.float32
    p = np.random.default_rng(8).normal(size=(3, 10))
    np.testing.assert_allclose(gradient(loss, y, p, symbolic="batch"), gradient(NLL(), y, p))
    # (n, 1) labels for (n, 10) outputs
    pair = get_loss(lambda op, y_true, y_pred: op.ReduceSum(y_pred, [1], keepdims=1) - y_true)
    assert value(pair, np.ones((3, 1)), p, symbolic="batch") == pytest.approx(
        p.sum(axis=1).mean() - 1
    )


@pytest.mark.parametrize(
    ("loss", "op_type", "message"),
    [
        (
            CrossEntropy(from_logits=True),
            "Softmax",
            (
                r"CrossEntropy\(from_logits=True\) expects logits, but the model's output comes from"
                r" a Softmax\. Set from_logits=False"
            ),
        ),
        (BinaryCrossEntropy(from_logits=True), "Sigmoid", "Set from_logits=False"),
        (BinaryCrossEntropyWithLogits(), "Sigmoid", "Set from_logits=False"),
        (CrossEntropy(), "Softmax", None),
        (BinaryCrossEntropy(), "Neg", None),
        (BinaryCrossEntropy(), "Sigmoid", None),
        (CrossEntropy(), "LogSoftmax", None),
    ],
    ids=str,
)
def test_probabilities_taken_for_logits_are_noticed(loss, op_type, message):
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
    y_pred = getattr(op, op_type)(op.input("x", np.float32, (5, 4)))
    spec = loss.target(TensorSpec("y", y_pred.dtype, y_pred.shape))
    y_true = op.input("y_true", spec.dtype, spec.shape)
    if message is None:
        loss.reduce(op, y_true, y_pred, None)
    else:
        with pytest.warns(UserWarning, match=message):
            loss.reduce(op, y_true, y_pred, None)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Neg"])
def test_only_log_probabilities_are_right_for_nll(op_type, recwarn):
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
    y_pred = getattr(op, op_type)(op.input("x", np.float32, (5, 4)))
    y_true = op.input("y_true", np.int64, (5,))
    loss = NLL()
    loss.reduce(op, y_true, y_pred, None)
    loss.reduce(op, y_true, y_pred, None)
    messages = [str(warning.message) for warning in recwarn]
    expected = "NLL needs log-probabilities, but the model's output comes from a Softmax"
    assert [message.startswith(expected) for message in messages] == (
        [True] if op_type == "Softmax" else []
    )


def test_logits_taken_for_probabilities_are_noticed():
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
    x = op.input("x", np.float32, (5, 4))
    with pytest.warns(
        UserWarning,
        match=(
            r"BinaryCrossEntropy\(from_logits=False\) expects probabilities, but the model's output"
            r" comes from a Add"
        ),
    ):
        BinaryCrossEntropy(from_logits=False).reduce(
            op, op.input("y", np.float32, (5, 4)), x + 1, None
        )


# ---------------------------------------------------------------------- kinds of labels


def sigmoid_focal_loss(logits, y, alpha, gamma):
    """The mean, and its gradient, by the formula of torchvision.ops.sigmoid_focal_loss."""
    p = special.expit(logits)
    p_t = p * y + (1 - p) * (1 - y)
    alpha_t = alpha * y + (1 - alpha) * (1 - y)
    slope = (2 * y - 1) * p * (1 - p)  # of p_t
    costs = -alpha_t * (1 - p_t) ** gamma * np.log(p_t)
    wrt_p_t = alpha_t * (gamma * (1 - p_t) ** (gamma - 1) * np.log(p_t) - (1 - p_t) ** gamma / p_t)
    return costs.mean(), wrt_p_t * slope / costs.size


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("gamma", [1.0, 2.0])
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_focal_trains_columns_of_yes_and_no(columns, gamma, backend):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4)).astype(np.float32)
    y = (rng.random((8, columns)) > 0.6).astype(np.float32)
    model = mlp((4, columns), seed=1)
    trainer = Trainer(model, loss=Focal(gamma=gamma, alpha=0.25), optimizer=1.0, backend=backend)
    before = trainer.get_weights()
    expected, slope = sigmoid_focal_loss(trainer.predict(x).astype(float), y, 0.25, gamma)
    labels = [y, y.astype(np.int64), y.astype(bool)]
    for array in labels:
        assert trainer.evaluate(x, array)["loss"] == pytest.approx(expected, rel=1e-5)
    trainer.train_on_batch(x, y)
    after = trainer.get_weights()
    np.testing.assert_allclose(
        before["fc0.weight"] - after["fc0.weight"], x.T @ slope, rtol=1e-4, atol=1e-6
    )


def test_focal_with_one_alpha_does_not_take_class_indices():
    trainer = Trainer(mlp(), loss=Focal(alpha=0.25))
    with pytest.raises(DataError, match="With class indices, alpha is one number per class"):
        trainer.evaluate(np.zeros((6, 4), np.float32), np.arange(6) % 3)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_a_function_of_class_indices_trains(backend, dtype):
    def cross_entropy(op, y_true, y_pred):
        return op.SoftmaxCrossEntropyLoss(y_pred, y_true, reduction="none")

    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    y = (np.arange(6) % 3).astype(dtype)
    own, built_in = (
        Trainer(mlp(), loss=loss, optimizer=0.5, backend=backend)
        for loss in (cross_entropy, "cross_entropy")
    )
    for _ in range(3):
        figures = [trainer.train_on_batch(x, y)["loss"] for trainer in (own, built_in)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    assert own.evaluate(x, y) == pytest.approx(built_in.evaluate(x, y), rel=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_labels_narrower_than_the_output_are_compared_without_a_warning(dtype: type) -> None:
    y = np.ones((4, 2), dtype)
    output = TensorSpec("y", np.dtype(np.float64), ("N", 2))
    check_range("Mean", y, -np.inf, np.inf, np.dtype(np.float64), output)
    y[2, 1] = np.nan
    with pytest.raises(DataError, match="got nan at row 2"):
        check_range("Mean", y, -np.inf, np.inf, np.dtype(np.float64), output)

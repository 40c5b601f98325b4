"""Losses of bounding boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

from onnxfit.checks import shortened
from onnxfit.errors import SettingError
from onnxfit.graph.labels import refuse_where
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.losses.base import Loss, loss_name
from onnxfit.losses.outputs import (
    per_row,
)

__all__ = ["CIoU", "DIoU", "GIoU", "IoU"]

Array = npt.NDArray[Any]
EPSILON = 1e-7  # as in torchvision: the least union, area and length
# With these, the error of the arc tangent is below the rounding of double precision.
HALVINGS, TERMS = 4, 8
FORMATS = ("xyxy", "cxcywh")


@dataclass(frozen=True)
class IoU(Loss):
    r"""One minus the intersection over union of two boxes, $1 - |A \cap B| / |A \cup B|$, which has
    no gradient where they do not touch; the other losses of boxes have one there.

    The last axis of outputs and labels has the 4 numbers of a box; the loss lacks this axis. A box
    of the output whose right side is left of its left side has no area.

    - `box_format`: "xyxy" for the corners $x_1 \le x_2$, $y_1 \le y_2$; "cxcywh" for center, width
      and height.
    - `reduction` is as in `Loss`.

    SettingError: the output's last axis does not have 4 entries. DataError: a label has a negative
    width or height.

    >>> IoU("cxcywh").box_format
    'cxcywh'
    """

    aliases: ClassVar[tuple[str, ...]] = ("box_iou", "iou_loss")

    box_format: str = "xyxy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.box_format not in FORMATS:
            raise SettingError(
                f"{type(self).__name__} needs box_format 'xyxy' or 'cxcywh', got"
                f" {shortened(self.box_format)}."
            )

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        shape = y_pred.shape
        if shape is not None and (
            len(shape) < 2 or (isinstance(shape[-1], int) and shape[-1] != 4)
        ):
            raise SettingError(
                f"{type(self).__name__} needs an output whose last axis has the 4 numbers of a box,"
                f" got {y_pred}."
            )
        return super().target(y_pred)

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> Array:
        labels = super().prepare(y, y_pred)
        first, last = labels[..., :2], labels[..., 2:]
        wrong = last < (first if self.box_format == "xyxy" else 0)
        expected = f"boxes of {self.box_format} whose width and height are >= 0"
        refuse_where(loss_name(self), last, wrong, expected, y_pred)
        return labels

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        return 1 - self._overlap(op, *self._boxes(op, y_true, y_pred))[0]

    def distillation_loss(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, y_teacher: Value, temperature: float
    ) -> Value:
        """Return the mean of the squared differences of a box's numbers."""
        squares = super().distillation_loss(op, y_true, y_pred, y_teacher, temperature)
        return op.ReduceMean(squares, [-1], keepdims=0)

    def _counted_outputs(
        self, op: GraphBuilder, counts: Value, y_true: Value, y_pred: Value
    ) -> Value:
        return per_row(op, counts, y_pred.rank)

    def _boxes(self, op: GraphBuilder, *boxes: Value) -> list[Box]:
        found = []
        for box in boxes:
            first, last = op.Split(box, _outputs=2, axis=-1, num_outputs=2)
            if self.box_format == "cxcywh":
                first, last = first - last / 2, first + last / 2
            found.append(Box(first, last))
        return found

    def _overlap(self, op: GraphBuilder, a: Box, b: Box) -> tuple[Value, Value]:
        """Return intersection over union, and the union."""
        shared = Box(op.Max(a.first, b.first), op.Min(a.last, b.last)).area(op)
        union = a.area(op) + b.area(op) - shared
        return shared / (union + EPSILON), union


@dataclass(frozen=True)
class GIoU(IoU):
    r"""Generalized loss of boxes, $1 - \mathrm{IoU} + |C \setminus (A \cup B)| / |C|$, where $C$ is
    the smallest box around both (Rezatofighi et al. 2019, arXiv:1902.09630;
    `torchvision.ops.generalized_box_iou_loss`).

    `box_format`, outputs, labels and `reduction` are as in `IoU`.

    >>> GIoU()
    GIoU(reduction='mean', box_format='xyxy')
    """

    aliases: ClassVar[tuple[str, ...]] = ("giou_loss", "generalized_box_iou")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        a, b = self._boxes(op, y_true, y_pred)
        overlap, union = self._overlap(op, a, b)
        around = a.around(op, b).area(op)
        return 1 - overlap + (around - union) / (around + EPSILON)


@dataclass(frozen=True)
class DIoU(IoU):
    r"""Distance loss of boxes, $1 - \mathrm{IoU} + d^2 / c^2$, where $d$ is the distance of the
    centers, and $c$ the diagonal of the smallest box around both (Zheng et al. 2020,
    arXiv:1911.08287; `torchvision.ops.distance_box_iou_loss`).

    `box_format`, outputs, labels and `reduction` are as in `IoU`.

    >>> DIoU()
    DIoU(reduction='mean', box_format='xyxy')
    """

    aliases: ClassVar[tuple[str, ...]] = ("diou_loss", "distance_box_iou")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        a, b = self._boxes(op, y_true, y_pred)
        return self._with_distance(op, a, b, self._overlap(op, a, b)[0])

    def _with_distance(self, op: GraphBuilder, a: Box, b: Box, overlap: Value) -> Value:
        around = a.around(op, b)
        diagonal = _sum_of_coordinates(op, (around.last - around.first) ** 2) + EPSILON
        apart = (a.first + a.last - b.first - b.last) / 2
        return 1 - overlap + _sum_of_coordinates(op, apart * apart) / diagonal


@dataclass(frozen=True)
class CIoU(DIoU):
    r"""Complete loss of boxes, `DIoU` plus $\alpha v$ for different shapes: $v = \tfrac{4}{\pi^2}
    (\arctan(w/h) - \arctan(\hat w / \hat h))^2$ and $\alpha = v / (1 - \mathrm{IoU} + v)$, which
    has no gradient (Zheng et al. 2020, arXiv:1911.08287; `torchvision.ops.complete_box_iou_loss`).

    `box_format`, outputs, labels and `reduction` are as in `IoU`.

    >>> CIoU()
    CIoU(reduction='mean', box_format='xyxy')
    """

    aliases: ClassVar[tuple[str, ...]] = ("ciou_loss", "complete_box_iou")

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value) -> Value:
        a, b = self._boxes(op, y_true, y_pred)
        overlap, _ = self._overlap(op, a, b)
        angles = a.angle(op) - b.angle(op)
        v = 4 / math.pi**2 * angles * angles
        alpha = op.stop_gradient(v / (1 - overlap + v + EPSILON))
        return self._with_distance(op, a, b, overlap) + alpha * v


@dataclass(frozen=True)
class Box:
    """The corners of boxes, each of shape `(..., 2)`."""

    first: Value
    last: Value

    def area(self, op: GraphBuilder) -> Value:
        """Return the areas, of which none is negative."""
        width, height = self.sides(op)
        return width * height

    def sides(self, op: GraphBuilder) -> tuple[Value, Value]:
        """Return the widths and heights, of which none is negative."""
        width, height = op.Split(
            op.Max(self.last - self.first, 0), _outputs=2, axis=-1, num_outputs=2
        )
        return op.Squeeze(width, [-1]), op.Squeeze(height, [-1])

    def angle(self, op: GraphBuilder) -> Value:
        """Return the arc tangent of width / height."""
        width, height = self.sides(op)
        return _arc_tangent(op, width / op.Max(height, EPSILON))

    def around(self, op: GraphBuilder, other: Box) -> Box:
        """Return the smallest boxes around both."""
        return Box(op.Min(self.first, other.first), op.Max(self.last, other.last))


def _sum_of_coordinates(op: GraphBuilder, x: Value) -> Value:
    return op.ReduceSum(x, [-1], keepdims=0)


def _arc_tangent(op: GraphBuilder, t: Value) -> Value:
    """The arc tangent of numbers >= 0. onnxruntime has no Atan in double precision."""
    for _ in range(HALVINGS):
        t = t / (1 + op.Sqrt(1 + t * t))  # the tangent of half the angle, at last below 0.1
    square, series = t * t, op.constant(1 / (2 * TERMS - 1), t.dtype)
    for i in reversed(range(TERMS - 1)):
        series = 1 / (2 * i + 1) - square * series
    return float(2**HALVINGS) * t * series

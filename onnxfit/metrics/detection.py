r"""Metrics of detected objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnxfit.checks import check_number, require_choice, shortened
from onnxfit.errors import DataError, SettingError
from onnxfit.metrics.alignment import check_average, counted_rows, per_element
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings

__all__ = ["MeanAveragePrecision"]

COCO_THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
RECALLS = np.linspace(0, 1, 101)  # at which COCO reads the precision
BOX_FORMATS = ("xyxy", "xywh", "cxcywh")


class Objects(NamedTuple):
    """The objects of a batch of images, labelled or found.

    - `boxes`: the corners x1, y1, x2, y2, shape `(batch, objects, 4)`.
    - `classes`: the class of each object, -1 for none, shape `(batch, objects)`.
    - `scores`: the score of each object; of labels, 1 for an object that need not be found.
    """

    boxes: Array
    classes: Array
    scores: Array

    def of_image(self, index: int) -> Objects:
        """Return the objects of an image, without the axis of the batch."""
        return Objects(*(array[index] for array in self))

    @property
    def fit(self) -> bool:
        """Whether the shapes of the arrays fit."""
        of_objects = self.boxes.shape[:2]
        shapes = self.classes.shape, self.scores.shape
        return self.boxes.shape[2:] == (4,) and shapes == (of_objects, of_objects)


@dataclass
class MeanAveragePrecision(Metric):
    r"""Mean average precision of detected boxes, as COCO computes it: the mean over classes and
    thresholds of the average precision, in [0, 1] (`pycocotools.cocoeval.COCOeval`; Lin et al.
    2014, arXiv:1405.0312).

    In each image the boxes of a class, from the highest score on, take the free object of their
    class with the largest intersection over union, if that reaches the threshold. The average
    precision of a class is $\frac{1}{101} \sum_r \max_{R_t \ge r} P_t$ over the recalls
    $r = 0, 0.01, \dots, 1$, with precision $P_t$ and recall $R_t$ of the boxes of all images whose
    score is at least $t$. Boxes of equal scores count together, so that the order of the images
    does not matter. NaN if there are no objects.

    Labels are dicts of arrays, as a loss with several labels declares them, with padding:

    - "boxes" `(batch, objects, 4)`, and "classes" `(batch, objects)` unless there is only one; a
      class below 0 is padding.
    - "mask" `(batch, objects)`, optional: False for padding.
    - "crowd" `(batch, objects)`, optional: True for a crowd or a difficult object, which need not
      be found and takes any number of boxes.

    Outputs are dicts, too: "boxes" `(batch, boxes, 4)`, and "scores", `(batch, boxes, classes)` or
    `(batch, boxes)` with "classes". A score that is NaN, or a class below 0, is no box. Instead of
    a dict, labels may be one array `(batch, objects, 5)` of four coordinates and the class, and
    outputs one array `(batch, boxes, 6)` of four coordinates, score and class.

    - `threshold`: one intersection over union, or several; None for 0.5, 0.55, ..., 0.95.
    - `box_format`: "xyxy" for corners, "xywh" for the first corner and the size, "cxcywh" for the
      center and the size.
    - `max_boxes`: the number of boxes with the highest scores that count for a class of an image.
    - `decode`: a function `(y_true, y_pred) -> (labels, outputs)` that returns the forms above, if
      the loss and the model have others; None for the arrays as they are. A checkpoint contains no
      function.
    - `average`: "macro", the mean over classes that have objects; None for the figure of each class
      in `class_names`, which logs have under the name of the metric and of the class.
    - `class_names`: with `average=None`, the names of the classes, in their order.
    - `weighted`, `name`: as in `Metric`; a weight belongs to an image. With one threshold, the name
      has its percentage.

    Keeps the scores of all boxes, 8 bytes and one for each threshold. SettingError: a setting is
    invalid. DataError: the arrays have another form.

    >>> metric = MeanAveragePrecision(threshold=0.5)
    >>> labels = np.array([[[0, 0, 10, 10, 0], [20, 20, 30, 30, 0]]])
    >>> found = np.array([[[0, 0, 10, 9, 0.9, 0], [50, 50, 60, 60, 0.8, 0]]])
    >>> metric.update(labels, found)
    >>> metric.name, round(metric.result(), 3)
    ('mean_average_precision_50', 0.505)
    """

    mode = "max"
    aliases = ("map",)
    takes_dicts = True

    threshold: float | Sequence[float] | None = None
    box_format: str = field(default="xyxy", kw_only=True)
    max_boxes: int = field(default=100, kw_only=True)
    decode: Callable[[Any, Any], tuple[Any, Any]] | None = field(default=None, kw_only=True)
    average: str | None = field(default="macro", kw_only=True)
    class_names: Sequence[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.threshold is not None:
            several = not isinstance(self.threshold, (int, float, np.generic))
            check_number(self, "threshold", above=0, at_most=1, sequence=several)
        require_choice(f"{type(self).__name__} needs box_format", self.box_format, BOX_FORMATS)
        check_number(self, "max_boxes", at_least=1, whole=True)
        if self.decode is not None and not callable(self.decode):
            raise SettingError(
                f"{type(self).__name__} needs decode to be a function (y_true, y_pred) -> (labels,"
                f" outputs), got {shortened(self.decode)}."
            )
        check_average(self, "macro")
        if self.average is None and self.class_names is None:
            raise SettingError(
                "MeanAveragePrecision(average=None) needs a name for each class, class_names=[...]."
            )
        super().__post_init__()

    def _own_name(self) -> str:
        name = super()._own_name()
        one = len(self.thresholds) == 1
        return f"{name}_{round(100 * self.thresholds[0])}" if one else name

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The intersections over union from which a box is right."""
        if self.threshold is None:
            return COCO_THRESHOLDS
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)

    @property
    def figure_names(self) -> tuple[str, ...]:
        return tuple(self.class_names or ()) if self.average is None else ()

    def reset(self) -> None:
        self._objects = np.zeros(0)  # the weight of the objects of each class
        # of each batch: the class, score and weight of each box, and whether it is right (1), wrong
        # (0), or does not count (-1) for each threshold
        self._boxes: list[tuple[Array, Array, Array, Array]] = []

    @without_warnings
    def update(self, y_true: Any, y_pred: Any, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if self.decode is not None:
            decoded = self.decode(y_true, y_pred)
            if not isinstance(decoded, tuple) or len(decoded) != 2:
                raise DataError(
                    "MeanAveragePrecision needs a pair (labels, outputs) of decode, got"
                    f" {shortened(decoded)}."
                )
            y_true, y_pred = decoded
        labels, found = self._objects_of(y_true, y_pred)
        images = len(found.boxes)
        weights = np.ones(images) if weights is None else per_element(weights, (images,))
        results = [
            self._match(labels.of_image(i), found.of_image(i), weight)
            for i, weight in enumerate(weights)
        ]
        counted = (labels.classes >= 0) & (labels.scores == 0)
        self._check_names(labels.classes.max(initial=-1))
        per_object = np.broadcast_to(weights[:, None], counted.shape)[counted]
        objects = np.bincount(labels.classes[counted], per_object)
        self._add_objects(objects)
        if results:
            joined: Any = tuple(np.concatenate(arrays) for arrays in zip(*results))
            self._boxes.append(joined)

    def _check_names(self, last: int) -> None:
        """Raise DataError if `class_names` does not reach the class `last` of a label."""
        if self.figure_names and last >= len(self.figure_names):
            raise DataError(
                f"{type(self).__name__} has class_names for {len(self.figure_names)} classes, but a"
                f" label has class {last}, counted from 0. Pass a name for each class."
            )

    def _add_objects(self, objects: Array) -> None:
        size = max(len(self._objects), len(objects))
        padded = [np.pad(a, (0, size - len(a))) for a in (self._objects, objects)]
        self._objects = padded[0] + padded[1]

    # ------------------------------------------------------------------ arrays

    def _objects_of(self, y_true: Any, y_pred: Any) -> tuple[Objects, Objects]:
        """Return the objects in labels and outputs, after checking their names and shapes."""
        fits = _has_columns(y_true, 5) and _has_columns(y_pred, 6)
        try:
            if fits:
                labels, found = self._labels(y_true), self._found(y_pred)
                fits = labels.fit and found.fit and len(labels.boxes) == len(found.boxes)
        except (KeyError, IndexError, TypeError, ValueError):  # a name is missing, or no array
            fits = False
        if fits:
            return labels, found
        raise DataError(
            f"{type(self).__name__} needs labels with 'boxes' (images, objects, 4) and 'classes'"
            " (images, objects), and outputs with 'boxes' and 'scores', or arrays of 5 and of 6"
            f" columns, got labels {_shapes(y_true)} and outputs {_shapes(y_pred)}. Convert them"
            " with decode=."
        )

    def _labels(self, y_true: Any) -> Objects:
        if not isinstance(y_true, Mapping):
            y_true = {"boxes": y_true[..., :4], "classes": y_true[..., 4]}
        classes = np.asarray(y_true.get("classes", np.zeros(np.shape(y_true["boxes"])[:2])))
        classes = np.where(classes >= 0, classes, -1).astype(np.int64)
        if "mask" in y_true:
            classes = np.where(np.asarray(y_true["mask"], bool), classes, -1)
        crowd = np.asarray(y_true.get("crowd", np.zeros(classes.shape)), bool)
        return Objects(self._corners(y_true["boxes"]), classes, crowd.astype(np.float64))

    def _found(self, y_pred: Any) -> Objects:
        if not isinstance(y_pred, Mapping):
            y_pred = {"boxes": y_pred[..., :4], "scores": y_pred[..., 4], "classes": y_pred[..., 5]}
        boxes, scores = self._corners(y_pred["boxes"]), np.asarray(y_pred["scores"], np.float64)
        if scores.ndim == 3:  # a box may be one of every class
            count = scores.shape[2]
            boxes = np.repeat(boxes, count, axis=1)
            classes = np.broadcast_to(np.arange(count), scores.shape).reshape(len(scores), -1)
            scores = scores.reshape(len(scores), -1)
        else:
            classes = np.asarray(y_pred.get("classes", np.zeros(scores.shape)))
        is_box = np.isfinite(classes) & (classes >= 0) & ~np.isnan(scores)
        return Objects(boxes, np.where(is_box, classes, -1).astype(np.int64), scores)

    def _corners(self, boxes: Any) -> Array:
        """Return boxes as x1, y1, x2, y2."""
        boxes = np.asarray(boxes, np.float64)
        first, second = boxes[..., :2], boxes[..., 2:]
        if self.box_format == "xyxy":
            return np.asarray(boxes)
        if self.box_format == "cxcywh":
            first = first - second / 2
        return np.concatenate([first, first + second], axis=-1)

    # ------------------------------------------------------------------ an image

    def _match(
        self, labels: Objects, found: Objects, weight: float
    ) -> tuple[Array, Array, Array, Array]:
        """Return what `_boxes` has of the boxes of an image of this sample weight."""
        kept, flags = [], []
        for number in np.unique(found.classes[found.classes >= 0]):
            boxes = np.flatnonzero(found.classes == number)
            boxes = boxes[np.argsort(-found.scores[boxes], kind="stable")][: self.max_boxes]
            objects = np.flatnonzero(labels.classes == number)
            kept.append(boxes)
            overlaps = _overlaps(
                found.boxes[boxes], labels.boxes[objects], labels.scores[objects] > 0
            )
            flags.append(_taken(overlaps, labels.scores[objects] > 0, np.array(self.thresholds)))
        if not kept:
            nothing = np.zeros(0)
            return nothing, nothing, nothing, np.zeros((0, len(self.thresholds)), np.int8)
        order = np.concatenate(kept)
        weights = np.full(len(order), float(weight))
        return found.classes[order], found.scores[order], weights, np.concatenate(flags)

    # ------------------------------------------------------------------ all images

    def result(self) -> Any:
        counts = self._objects
        names = self.figure_names
        scores = np.full(max(len(counts), len(names)), math.nan)
        occurs = np.flatnonzero(counts)
        if self._boxes:
            classes, found, weights, flags = (np.concatenate(a) for a in zip(*self._boxes))
            for number in occurs:
                own = classes == number
                scores[number] = self._precision(
                    found[own], weights[own], flags[own], counts[number]
                )
        else:
            scores[occurs] = 0.0
        if self.average is None:
            return scores[: len(names)]
        return float(scores[occurs].mean()) if occurs.size else math.nan

    def _precision(self, scores: Array, weights: Array, flags: Array, objects: float) -> float:
        """Return the average precision of a class, the mean over the thresholds."""
        order = np.argsort(-scores, kind="stable")
        scores, weights, flags = scores[order], weights[order], flags[order]
        is_last = np.append(scores[1:] != scores[:-1], True)[: len(scores)]
        figures = []
        for column in flags.T:
            hits = np.cumsum(weights * (column == 1))[is_last]
            misses = np.cumsum(weights * (column == 0))[is_last]
            whole = hits + misses
            precision = hits / np.where(whole == 0, 1.0, whole)
            precision = np.maximum.accumulate(precision[::-1])[::-1]
            # The sums of weights are rounded, and a recall that they reach must not be missed.
            place = np.searchsorted(hits / objects + 1e-12, RECALLS)
            figures.append(np.append(precision, 0.0)[place].mean())
        return float(np.mean(figures))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in merged_copies(self, states):
            self._add_objects(other._objects)
            self._boxes = [*self._boxes, *other._boxes]  # a new list: a state may be the old list


def _has_columns(arrays: Any, columns: int) -> bool:
    """Whether arrays are a dict, or objects with so many columns."""
    return isinstance(arrays, Mapping) or (np.ndim(arrays) == 3 and arrays.shape[2] == columns)


def _shapes(arrays: Any) -> str:
    if not isinstance(arrays, Mapping):
        return f"of shape {np.shape(arrays)}"
    return ", ".join(f"{name!r} {np.shape(array)}" for name, array in arrays.items())


def _overlaps(boxes: Array, objects: Array, is_crowd: Array) -> Array:
    """Return the intersection over union of each box and object; over the box for a crowd."""
    corner = np.maximum(boxes[:, None, :2], objects[None, :, :2])
    size = np.minimum(boxes[:, None, 2:], objects[None, :, 2:]) - corner
    shared = np.maximum(size, 0).prod(axis=2)
    of_boxes = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)[:, None]
    union = of_boxes + (objects[:, 2:] - objects[:, :2]).prod(axis=1) - shared
    whole = np.where(is_crowd, of_boxes, union)
    return np.asarray(shared / np.where(whole == 0, 1.0, whole))


def _taken(overlaps: Array, is_crowd: Array, thresholds: Array) -> Array:
    """Return for each box, from the highest score on, and each threshold: 1 if it takes an object,
    0 if it does not, -1 if it takes a crowd.
    """
    flags = np.zeros((len(overlaps), len(thresholds)), np.int8)
    if not overlaps.shape[1]:
        return flags
    bounds = np.minimum(thresholds, 1 - 1e-10)[:, None]
    rows = np.arange(len(thresholds))
    is_free = np.tile(~is_crowd, (len(thresholds), 1))
    for flag, overlap in zip(flags, overlaps):
        reaches = overlap >= bounds
        candidates = np.where(reaches & is_free, overlap, -1.0)
        # of equal overlaps the last object, as in pycocotools
        best = overlap.size - 1 - candidates[:, ::-1].argmax(axis=1)
        takes = candidates[rows, best] >= 0
        is_free[rows[takes], best[takes]] = False
        flag[:] = np.where(takes, 1, np.where((reaches & is_crowd).any(axis=1), -1, 0))
    return flags

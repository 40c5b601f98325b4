"""COCO's mean average precision, against figures of pycocotools 2.0 and by trying every box."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import Trainer
from onnxfit.errors import DataError, SettingError
from onnxfit.losses import Function, Joint
from onnxfit.metrics import EpochMetric, MeanAveragePrecision, Metric

Arrays = dict[str, np.ndarray]
IMAGES, CLASSES, OBJECTS, BOXES = 30, 3, 6, 12


def sorted_corners(boxes: np.ndarray) -> np.ndarray:
    first, second = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=-1)


def scene(seed: int) -> tuple[Arrays, Arrays]:
    """Objects, some of them crowds, and boxes: many near an object, some of another class."""
    r = np.random.default_rng(seed)
    corner = r.uniform(0, 80, (IMAGES, OBJECTS, 2))
    size = r.uniform(5, 40, (IMAGES, OBJECTS, 2))
    labels = {
        "boxes": np.concatenate([corner, corner + size], axis=-1),
        "classes": r.integers(-1, CLASSES, (IMAGES, OBJECTS)),
        "crowd": r.random((IMAGES, OBJECTS)) < 0.1,
    }
    source = r.integers(0, OBJECTS, (IMAGES, BOXES))
    near = np.take_along_axis(labels["boxes"], source[..., None], axis=1)
    near = sorted_corners(near + r.normal(scale=3, size=near.shape))
    corner = r.uniform(0, 80, (IMAGES, BOXES, 2))
    far = np.concatenate([corner, corner + r.uniform(5, 40, (IMAGES, BOXES, 2))], axis=-1)
    is_near = r.random((IMAGES, BOXES)) < 0.7
    guess = np.take_along_axis(labels["classes"], source, axis=1)
    scores = r.random((IMAGES, BOXES))
    keeps = r.random((IMAGES, BOXES)) < 0.8
    found = {
        "boxes": np.where(is_near[..., None], near, far),
        "scores": scores,
        "classes": np.where(keeps, guess, r.integers(0, CLASSES, (IMAGES, BOXES))),
    }
    return labels, found


def some(arrays: Any, rows: Any) -> Any:
    return {n: a[rows] for n, a in arrays.items()} if isinstance(arrays, dict) else arrays[rows]


def figure(metric: Metric, labels: Any, found: Any, w: Any = None) -> Any:
    """The result over three batches."""
    metric.reset()
    for rows in (slice(0, 7), slice(7, 20), slice(20, None)):
        metric.update(some(labels, rows), some(found, rows), None if w is None else w[rows])
    return metric.result()


# (seed, boxes for a class of an image): AP, AP at 0.5, AP at 0.75 and AP of each class, which
# pycocotools.cocoeval.COCOeval computed for `scene`, with the area range "all"
PYCOCOTOOLS = {
    (0, 100): (0.07944961521388287, 0.26679009120245933, 0.019710133895563704, 0.09612037400673758, 0.06131284143163729, 0.08091563020327412),
    (0, 2): (0.05833415220213673, 0.20250291552348737, 0.007793462709419421, 0.08019406687991697, 0.03487026262236622, 0.05993812710412698),
    (1, 100): (0.10100874888677393, 0.2897140135211855, 0.045789992112358305, 0.09824019099741307, 0.08992283317141349, 0.11486322249149539),
    (1, 2): (0.07274046683540734, 0.2102358738142437, 0.032991011867144156, 0.08787667234537569, 0.0670082991127026, 0.06333642904814338),
    (2, 100): (0.07044787987268174, 0.2174343445813505, 0.025551725823921206, 0.07792555226230925, 0.055104957706997464, 0.07831312964873903),
    (2, 2): (0.03858650886640246, 0.12213206809190705, 0.010079374111466975, 0.046276350825685084, 0.030612974532325168, 0.038870201241197236),
}  # fmt: skip


@pytest.mark.parametrize(("seed", "max_boxes"), PYCOCOTOOLS)
def test_pycocotools_agrees(seed: int, max_boxes: int) -> None:
    labels, found = scene(seed)
    whole, half, high, *each = PYCOCOTOOLS[seed, max_boxes]
    for threshold, expected in ((None, whole), (0.5, half), (0.75, high)):
        metric = MeanAveragePrecision(threshold, max_boxes=max_boxes)
        np.testing.assert_allclose(figure(metric, labels, found), expected, rtol=1e-7)
    names = ["a", "b", "c"]
    metric = MeanAveragePrecision(max_boxes=max_boxes, average=None, class_names=names)
    np.testing.assert_allclose(figure(metric, labels, found), each, rtol=1e-7)
    assert metric.figure_names == ("a", "b", "c")


def test_forms_of_labels_and_outputs() -> None:
    labels, found = scene(0)
    del labels["crowd"]
    expected = figure(MeanAveragePrecision(), labels, found)
    masked = {**labels, "mask": labels["classes"] >= 0, "classes": abs(labels["classes"])}
    assert figure(MeanAveragePrecision(), masked, found) == expected
    columns = np.append(labels["boxes"], labels["classes"][..., None], axis=-1)
    of_found = [found["boxes"], found["scores"][..., None], found["classes"][..., None]]
    assert figure(MeanAveragePrecision(), columns, np.concatenate(of_found, axis=-1)) == expected
    each = np.where(found["classes"][..., None] == np.arange(3), found["scores"][..., None], np.nan)
    by_class = {"boxes": found["boxes"], "scores": each}
    assert figure(MeanAveragePrecision(), labels, by_class) == expected

    def resized(arrays: Arrays, box_format: str) -> Arrays:
        first, second = arrays["boxes"][..., :2], arrays["boxes"][..., 2:]
        start = first if box_format == "xywh" else (first + second) / 2
        return {**arrays, "boxes": np.concatenate([start, second - first], axis=-1)}

    for box_format in ("xywh", "cxcywh"):
        metric = MeanAveragePrecision(box_format=box_format)
        given = resized(labels, box_format), resized(found, box_format)
        np.testing.assert_allclose(figure(metric, *given), expected)

    def decode(y_true: Any, y_pred: Any) -> tuple[Any, Any]:
        return {"boxes": y_true["b"], "classes": y_true["c"]}, y_pred["found"]

    metric = MeanAveragePrecision(decode=decode)
    other = {"b": labels["boxes"], "c": labels["classes"]}
    assert figure(metric, other, {"found": np.concatenate(of_found, axis=-1)}) == expected


def test_weights_and_merged_ranks() -> None:
    labels, found = scene(1)
    w = np.arange(IMAGES) % 3
    repeated = [some(arrays, np.repeat(np.arange(IMAGES), w)) for arrays in (labels, found)]
    metric = MeanAveragePrecision(weighted=True)
    expected = figure(MeanAveragePrecision(), *repeated)
    np.testing.assert_allclose(figure(metric, labels, found, w), expected, rtol=1e-12)
    states = []
    for rank in range(3):
        metric.reset()
        metric.update(
            *(some(arrays, slice(rank, None, 3)) for arrays in (labels, found)), w[rank::3]
        )
        states.append(metric.state_dict())
    for order in (states, states[::-1]):
        metric.reset()
        metric.merge(order)
        np.testing.assert_allclose(metric.result(), expected, rtol=1e-12)


def test_boxes_of_equal_scores_count_in_any_order() -> None:
    labels, found = scene(2)
    found["scores"] = np.round(found["scores"], 1)
    forward = figure(MeanAveragePrecision(), labels, found)
    backward = [some(arrays, slice(None, None, -1)) for arrays in (labels, found)]
    np.testing.assert_allclose(figure(MeanAveragePrecision(), *backward), forward, rtol=1e-12)


def test_edges() -> None:
    box = np.array([[[0.0, 0, 10, 10]]])
    nothing = {"boxes": np.zeros((1, 0, 4)), "scores": np.zeros((1, 0))}
    labels = {"boxes": box, "classes": np.array([[0]])}
    assert figure(MeanAveragePrecision(), labels, nothing) == 0
    assert np.isnan(
        figure(MeanAveragePrecision(), {**labels, "classes": np.array([[-1]])}, nothing)
    )
    certain = {"boxes": box, "scores": np.array([[0.9]])}
    assert figure(MeanAveragePrecision(), labels, certain) == 1
    assert figure(MeanAveragePrecision(), {"boxes": box}, certain) == 1
    unknown = {"boxes": box, "scores": np.array([[np.nan]])}
    assert figure(MeanAveragePrecision(), labels, unknown) == 0
    broken = {"boxes": np.full_like(box, np.nan), "scores": np.array([[0.9]])}
    assert figure(MeanAveragePrecision(), labels, broken) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0}, "threshold > 0 and <= 1, got 0"),
        ({"threshold": [0.5, 2]}, "threshold to be numbers > 0 and <= 1"),
        ({"box_format": "yxyx"}, "box_format 'xyxy', 'xywh' or 'cxcywh', got 'yxyx'"),
        ({"max_boxes": 0}, "max_boxes to be a whole number >= 1, got 0"),
        ({"average": None}, r"needs a name for each class, class_names=\[...\]"),
        ({"average": "micro"}, "average 'macro' or None, got 'micro'"),
        ({"decode": 3}, "decode to be a function"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        MeanAveragePrecision(**settings)


def test_arrays_that_do_not_fit() -> None:
    labels, found = scene(0)
    wrong: list[tuple[Any, Any]] = [
        (labels["boxes"], found),
        ({"classes": labels["classes"]}, found),
        (labels, {"boxes": found["boxes"]}),
        (labels, {**found, "scores": found["scores"][:, :3]}),
        (some(labels, slice(5)), found),
    ]
    for pair in wrong:
        with pytest.raises(DataError, match=r"MeanAveragePrecision needs labels with 'boxes'"):
            MeanAveragePrecision().update(*pair)
    with pytest.raises(DataError, match=r"a pair \(labels, outputs\) of decode, got None"):
        MeanAveragePrecision(decode=lambda y_true, y_pred: None).update(labels, found)
    too_few = MeanAveragePrecision(average=None, class_names=["a", "b"])
    with pytest.raises(DataError, match="class_names for 2 classes, but a label has class 2"):
        too_few.update(labels, found)
    assert MeanAveragePrecision(0.75).name == "mean_average_precision_75"
    assert MeanAveragePrecision([0.5, 0.75]).name == "mean_average_precision"


# ---------------------------------------------------------------------- in a Trainer


def detector() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        detector (float[N, 8] x) => (float[N, 3, 4] boxes, float[N, 3] scores)
        <int64[3] shape = {-1, 3, 4}>
        { flat = MatMul(x, to_boxes)  boxes = Reshape(flat, shape)  scores = MatMul(x, to_scores) }""")
    r = np.random.default_rng(0)
    for name, shape in {"to_boxes": (8, 12), "to_scores": (8, 3)}.items():
        weight = (0.3 * r.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


X = np.random.default_rng(1).standard_normal((40, 8)).astype(np.float32)
Y = {
    "mask": X[:, :3] > 0,
    "boxes": sorted_corners(np.stack([X[:, :4], X[:, 2:6], X[:, 4:]], axis=1)),
}
W = np.arange(40.0) % 3


def detection(op: Any, y_true: Any, boxes: Any, scores: Any) -> Any:
    mask = op.cast(y_true["mask"], np.float32)
    distance = op.ReduceSum(op.Abs(boxes - y_true["boxes"]), [2], keepdims=0)
    return op.Softplus(scores) - scores * mask + distance * mask


def mean_score(y_true: Any, y_pred: Any) -> Any:
    return np.ma.masked_array(y_pred["scores"], ~y_true["mask"])


def share(y_true: Any, y_pred: Any) -> float:
    return float((y_pred["scores"] > 0)[y_true["mask"]].mean())


def trainer(backend: str = "full") -> Trainer:
    loss = Joint(
        detection, ["boxes", "scores"], labels={"mask": "bool[b, 3]", "boxes": "float[b, 3, 4]"}
    )
    metrics: list[Any] = [
        MeanAveragePrecision(0.1),
        MeanAveragePrecision(0.1, weighted=True, name="weighted"),
        mean_score,
        EpochMetric(share),
    ]
    return Trainer(
        detector(), loss={"found": loss}, metrics={"found": metrics}, backend=backend,
        optimizer="adam",
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_metrics_of_a_joint_loss_get_dicts(backend: str) -> None:
    own = trainer(backend)
    history = own.fit(X, {"found": Y}, W, epochs=2, batch_size=16, verbose=0).history
    outputs = own.predict(X)
    logs = own.evaluate(X, {"found": Y}, W, batch_size=7)
    assert set(logs) <= set(history)
    expected = figure(MeanAveragePrecision(0.1), Y, outputs)
    assert expected > 0
    assert logs["mean_average_precision_10"] == pytest.approx(expected)
    weighted = figure(MeanAveragePrecision(0.1, weighted=True), Y, outputs, W)
    assert logs["weighted"] == pytest.approx(weighted)
    assert logs["mean_score"] == pytest.approx(outputs["scores"][Y["mask"]].mean(), rel=1e-4)
    assert logs["share"] == pytest.approx((outputs["scores"] > 0)[Y["mask"]].mean())


def test_several_arrays_of_labels_of_one_output() -> None:
    model = detector()
    del model.graph.output[0]

    def own(op: Any, y_true: Any, scores: Any) -> Any:
        return op.Softplus(scores) - scores * op.cast(y_true["mask"], np.float32)

    def right(y_true: Any, y_pred: Any) -> Any:
        return (y_pred > 0) == y_true["mask"]

    loss = Function(own, labels={"mask": "bool[b, 3]", "boxes": "float[b, 3, 4]"})
    one = Trainer(model, loss=loss, metrics=right)
    share_of_right = ((one.predict(X) > 0) == Y["mask"]).mean()
    assert one.evaluate(X, Y, batch_size=7)["right"] == pytest.approx(share_of_right)
    with pytest.raises(SettingError, match=r"Accuracy compares one output .* Pass a function"):
        Trainer(model, loss=loss, metrics=["accuracy"])


def test_a_joint_loss_without_outputs_has_no_metrics() -> None:
    loss = Joint(
        lambda op, x, w: op.ReduceSum(x, [1]) * op.ReduceSum(w), inputs="x", values="to_scores"
    )
    with pytest.raises(SettingError, match=r"'mean_score' needs outputs of the model"):
        Trainer(detector(), loss=loss, metrics=mean_score)


def test_a_fit_goes_on_within_an_epoch(tmp_path: Any) -> None:
    """The sums of metrics of dicts are in the checkpoint."""
    from onnxfit.callbacks import Callback

    class Stop(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 1:
                self.trainer.save(tmp_path / "c")
                raise KeyboardInterrupt

    whole = trainer().fit(X, {"found": Y}, W, batch_size=8, verbose=0).history
    with pytest.raises(KeyboardInterrupt):
        trainer().fit(X, {"found": Y}, W, batch_size=8, verbose=0, callbacks=[Stop()])
    parts = trainer()
    resumed = Trainer.load(
        tmp_path / "c",
        loss=parts.settings["loss"],
        metrics=parts.settings["metrics"],
    )
    history = resumed.fit(X, {"found": Y}, W, batch_size=8, verbose=0).history
    assert history == whole

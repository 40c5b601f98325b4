"""Labels of another shape or type than the output, which a loss declares."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.labels import parse_labels
from onnxfit.losses import Function
from tests.distributed.threads import on_ranks

RNG = np.random.default_rng(0)
BACKENDS = ("full", "forward_backward", "in_place")
ROWS, BOXES = 10, 7


def detector(fixed: int | None = None) -> onnx.ModelProto:
    """A model with one row of four coordinates and a score for each of seven boxes."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
           detector (float[N, 3] x) => (float[N, 7, 5] y) <int64[3] sizes = {-1, 7, 5}>
           { flat = MatMul(x, w)  y = Reshape(flat, sizes) }"""
    )
    w = RNG.normal(size=(3, 35)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    if fixed is not None:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = fixed
    return model


MODEL = detector()
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = {
    "boxes": RNG.normal(size=(ROWS, BOXES, 4)).astype(np.float32),
    "is_object": RNG.random((ROWS, BOXES)) < 0.4,
    "count": RNG.integers(1, 5, ROWS),
}
DECLARED = {"boxes": "float[b, 7, 4]", "is_object": "bool[b, n]", "count": "int64[b]"}


def detection(op, y_true, y_pred):
    """The distance of the boxes that exist, and the error of the count."""
    place, score = op.Split(y_pred, op.constant([4, 1]), axis=2, _outputs=2)
    distance = op.ReduceSum(op.Abs(place - y_true["boxes"]), [2], keepdims=0)
    boxes = op.ReduceSum(op.Where(y_true["is_object"], distance, 0), [1], keepdims=0)
    counted = op.ReduceSum(op.Sigmoid(score), [1, 2], keepdims=0)
    return boxes + (counted - op.cast(y_true["count"], counted.dtype)) ** 2


def expected_rows(outputs: np.ndarray, y: dict[str, Any] = Y) -> np.ndarray:
    distance = abs(outputs[..., :4] - y["boxes"]).sum(2)
    counted = (1 / (1 + np.exp(-outputs[..., 4]))).sum(1)
    return np.where(y["is_object"], distance, 0).sum(1) + (counted - y["count"]) ** 2


LOSS = Function(detection, labels=DECLARED)


def trainer(loss: Any = LOSS, **settings: Any) -> onnxfit.Trainer:
    return onnxfit.Trainer(MODEL, loss=loss, optimizer=0.01, **settings)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_of_several_arrays_of_labels(backend: str) -> None:
    one = trainer(backend=backend)
    rows = expected_rows(one.predict(X))
    assert one.evaluate(X, Y, batch_size=3)["loss"] == pytest.approx(rows.mean(), rel=1e-5)
    before = one.get_weights()["w"]
    one.train_on_batch(X, Y)
    change = (before - one.get_weights()["w"]) / 0.01
    step = 1e-3
    for place in ((0, 0), (1, 4), (2, 34)):  # the gradient, from differences of the formula
        losses = []
        for sign in (1, -1):
            w = before.astype(np.float64)
            w[place] += sign * step
            losses.append(expected_rows((X @ w).reshape(ROWS, 7, 5)).mean())
        assert change[place] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02)


def test_all_ways_to_pass_several_arrays_of_labels() -> None:
    one = trainer()
    expected = one.evaluate(X, Y, batch_size=4)
    ways = [
        {"y": Y},
        {"y/boxes": Y["boxes"], "y/is_object": Y["is_object"], "y/count": Y["count"]},
        {f"y_true/y/{name}": array for name, array in Y.items()},
    ]
    for way in ways:
        assert one.evaluate(X, way, batch_size=4) == expected
    assert one.evaluate(X, list(Y.values()), batch_size=4) == expected
    loader = onnxfit.DataLoader(X, Y, batch_size=4)
    assert one.evaluate(loader) == expected
    assert one.evaluate(onnxfit.DataLoader({"x": X, **Y}, batch_size=4)) == expected
    halves = ({"x": X[rows], **{n: a[rows] for n, a in Y.items()}} for rows in (X[:, 0] > 0,) * 1)
    assert one.evaluate(halves)["loss"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_divides_the_rows_of_all_labels(backend: str) -> None:
    split, passed = trainer(backend=backend), trainer(backend=backend)
    first, last = slice(0, 8), slice(8, None)
    parts = [(X[rows], {name: array[rows] for name, array in Y.items()}) for rows in (first, last)]
    settings = {"epochs": 2, "batch_size": 4, "verbose": 0}
    history = split.fit(X, Y, validation_split=0.2, **settings).history
    other = passed.fit(*parts[0], validation_data=parts[1], **settings).history
    assert history == other
    np.testing.assert_array_equal(split.get_weights()["w"], passed.get_weights()["w"])
    rows = expected_rows(split.predict(X[last]), parts[1][1])
    assert history["val_loss"][-1] == pytest.approx(rows.mean(), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sample_weights_scale_rows(backend: str) -> None:
    one = trainer(backend=backend)
    weights = np.arange(ROWS, dtype=np.float32)
    rows = expected_rows(one.predict(X))
    got = one.evaluate(X, Y, weights, batch_size=4)["loss"]
    assert got == pytest.approx((rows * weights).mean(), rel=1e-5)
    broken = {**Y, "boxes": Y["boxes"].copy()}
    broken["boxes"][0] = np.nan  # of weight 0
    assert one.evaluate(X, broken, weights, batch_size=4)["loss"] == pytest.approx(got)
    one.fit(X, broken, weights, batch_size=5, verbose=0)
    assert np.isfinite(one.get_weights()["w"]).all()


def test_ranks_divide_the_rows_of_all_labels() -> None:
    def fitted(communicator: Any) -> np.ndarray:
        one = trainer(distribute=communicator)
        one.fit(X, Y, epochs=2, batch_size=4, verbose=0)
        return one.get_weights()["w"]

    expected = fitted(None)
    for got in on_ranks(2, fitted):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_one_array_of_another_shape() -> None:
    """A class with its margin: two numbers for one score."""

    def margin(op, y_true, y_pred):
        bounds = op.Split(y_true, axis=1, num_outputs=2, _outputs=2)
        scores = op.ReduceMean(y_pred, [1, 2], keepdims=0)
        low, high = (op.Squeeze(bound, [1]) for bound in bounds)
        return op.Relu(low - scores) + op.Relu(scores - high)

    one = trainer(Function(margin, "float[b, 2]"), metrics=[lambda y, p: abs(y[:, 0] - p[:, 0, 0])])
    y = np.sort(RNG.normal(size=(ROWS, 2)), axis=1)
    outputs = one.predict(X)
    scores = outputs.mean((1, 2))
    expected = np.maximum(y[:, 0] - scores, 0) + np.maximum(scores - y[:, 1], 0)
    got = one.evaluate(X, y)
    assert got["loss"] == pytest.approx(expected.mean(), rel=1e-5)
    metric = abs(y[:, 0] - outputs[:, 0, 0]).mean()
    assert next(v for name, v in got.items() if name != "loss") == pytest.approx(metric, rel=1e-5)
    assert "margin; labels float[b, 2]" in str(one.summary())


def test_labels_follow_a_fixed_batch() -> None:
    one = onnxfit.Trainer(detector(fixed=5), loss=LOSS, optimizer=0.01)
    one.fit(X, Y, batch_size=5, verbose=0)
    rows = expected_rows(one.predict(X, batch_size=5))
    assert one.evaluate(X, Y, batch_size=5)["loss"] == pytest.approx(rows.mean(), rel=1e-5)


def test_add_loss_has_an_input_for_each_array() -> None:
    graph = onnxfit.add_loss(MODEL, LOSS).graph
    names = [one.name for one in graph.input]
    assert names == ["x", "y_true/y/boxes", "y_true/y/is_object", "y_true/y/count"]


def test_a_training_folder_has_all_labels(tmp_path) -> None:
    import json

    trainer().export_training(tmp_path / "folder")
    description = json.loads((tmp_path / "folder" / "manifest.json").read_text())
    inputs = description["graphs"]["train"]["inputs"]
    assert [one["of"] for one in inputs if one["role"] == "y"] == [
        "y/boxes",
        "y/is_object",
        "y/count",
    ]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y["boxes"], "Got one ndarray for 3"),
        ({"boxes": Y["boxes"]}, "'y/boxes'.*'y/is_object'"),
        ({**Y, "boxes": Y["boxes"][:, :5]}, r"boxes: float32\[b, 7, 4\], got float32 of shape"),
        ({**Y, "count": Y["count"] + 0.5}, r"expects numbers of int64.*1\.5|got .*\.5"),
        ({**Y, "is_object": Y["count"][:, None] + 1}, "numbers of bool"),
        ({**Y, "boxes": np.full((ROWS, 7, 4), 1e300)}, "numbers of float32"),
        ({**Y, "boxes": np.full((ROWS, 7, 4), np.nan, np.float32)}, "NaN in row 0"),
        ({**Y, "count": Y["count"][:5]}, "same number of rows"),
        ({**Y, "count": np.array(["a"] * ROWS)}, "y/count"),
        (None, "has no labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(y: Any, message: str) -> None:
    one = trainer()
    before = one.get_weights()["w"]
    with pytest.raises(DataError, match=message):
        one.fit(X, y, verbose=0)
    np.testing.assert_array_equal(one.get_weights()["w"], before)


@pytest.mark.parametrize(
    "labels",
    ["int64", "int64[]", "text[b]", "float[b, -1]", "float[2, 7]", {}, {"a/b": "int64[b]"}, 3,
     {"a": "int64[b"}, "complex64[b]"],
)  # fmt: skip
def test_texts_that_declare_no_labels_are_refused(labels: Any) -> None:
    with pytest.raises(SettingError, match=r"int64\[b\]|the batch"):
        Function(detection, labels=labels)


def test_the_texts_are_those_of_onnx() -> None:
    texts = {"a": "double[N,3]", "b": "bfloat16[b]", "c": "uint8[ batch , ? ]"}
    with pytest.raises(SettingError, match="bfloat16"):
        parse_labels(texts)
    del texts["b"]
    assert [str(one) for one in parse_labels(texts).values()] == [
        "a: float64[N, 3]",
        "c: uint8[batch, ?]",
    ]


def test_class_weights_need_one_array_of_classes() -> None:
    with pytest.raises(SettingError, match="exactly one output with labels"):
        trainer().fit(X, Y, class_weight={0: 1.0}, verbose=0)


def test_metrics_need_one_array_of_labels() -> None:
    with pytest.raises(SettingError, match="one output with one array of labels"):
        trainer(metrics=["mae"])


def test_an_undeclared_shape_names_the_way_to_declare_it() -> None:
    with pytest.raises(SettingError, match=r"Function\(f, labels='float\[b, 7, 4\]'\)"):
        trainer(lambda op, y_true, y_pred: op.MatMul(y_pred, y_true))


def test_a_function_takes_its_reduction() -> None:
    y = np.zeros((ROWS, 7, 5), np.float32)
    square = Function(lambda op, t, p: (p - t) ** 2, reduction="sum")
    total = (trainer().predict(X) ** 2).sum()
    assert trainer(square).evaluate(X, y, batch_size=3)["loss"] == pytest.approx(total, rel=1e-5)


def test_loaders_and_files_have_several_arrays_of_labels(tmp_path) -> None:
    one = trainer()
    expected = one.evaluate(X, Y, batch_size=4)
    loader = onnxfit.DataLoader(X, Y, batch_size=4)
    columns = {name: list(array) for name, array in Y.items()}
    assert one.evaluate(onnxfit.Prefetch(loader)) == expected
    assert one.evaluate(onnxfit.Pad({"x": list(X)}, columns, batch_size=4)) == expected
    np.savez(tmp_path / "y.npz", **Y)
    assert one.evaluate(X, tmp_path / "y.npz", batch_size=4) == expected


def test_class_weights_read_one_declared_array() -> None:
    scaled = Function(
        lambda op, count, y: op.cast(count, y.dtype) * op.ReduceMean(y * y, [1, 2], keepdims=0),
        labels="int64[b]",
    )
    by_class, by_row = trainer(scaled), trainer(scaled)
    weights = np.where(Y["count"] == 1, 2.0, 1.0)
    by_class.fit(X, Y["count"], class_weight={1: 2.0}, verbose=0)
    by_row.fit(X, Y["count"], weights, verbose=0)
    np.testing.assert_array_equal(by_class.get_weights()["w"], by_row.get_weights()["w"])


def test_weights_of_labels_must_fit_the_entries_of_the_loss() -> None:
    with pytest.raises(SettingError, match=r"loss of shape \(10,\)"):
        trainer().fit(X, Y, np.ones((ROWS, BOXES)), verbose=0)

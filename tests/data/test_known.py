"""Single batches like one that was checked before: the same batches, and the same refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.parser
import pytest

from onnxfit import Trainer
from onnxfit.data import DataAdapter
from onnxfit.data.known import MAX_KNOWN_BATCHES, BatchPlanCache
from onnxfit.errors import DataError
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import CrossEntropy, MeanSquaredError
from onnxfit.step.objectives import OutputTarget

Array = npt.NDArray[Any]
FLOAT = np.dtype(np.float32)
A, B = TensorSpec("a", FLOAT, ("n", 3)), TensorSpec("b", FLOAT, ("n", 2))
OUTPUT = TensorSpec("p", FLOAT, ("n", 1))
RNG = np.random.default_rng(0)


def rows(count: int, width: int, dtype: Any = np.float32) -> Array:
    return RNG.normal(size=(count, width)).astype(dtype)


def known(
    *inputs: TensorSpec, loss: Any = None, output: TensorSpec = OUTPUT, purpose: str = "training"
) -> BatchPlanCache:
    targets = {"p": OutputTarget(output, loss or MeanSquaredError())}
    return BatchPlanCache(DataAdapter(inputs, targets, purpose=purpose))


def arrays(batches: BatchPlanCache, *data: Any) -> dict[str, Array]:
    with batches.source(*data) as source:
        (batch,) = source.batches(0)
    assert batch.rows == len(next(iter(batch.arrays().values())))
    return batch.arrays()


def is_checked(monkeypatch: pytest.MonkeyPatch, batches: BatchPlanCache, *data: Any) -> bool:
    """Whether the adapter looks at the data; the batch is the adapter's in any case."""
    calls = []
    source = DataAdapter.source

    def spy(self: DataAdapter, *arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        return source(self, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(DataAdapter, "source", spy)
        found = arrays(batches, *data)
    (expected,) = batches.adapter.source(*data, batch_size=2**62).batches(0)
    assert list(found) == list(expected.arrays())
    for name, array in expected.arrays().items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].flags.c_contiguous) == (array.dtype, True)
    with batches.source(*data) as again:
        assert next(iter(again.batches(0))).signature == expected.signature
    return bool(calls)


LIKE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "two arrays": lambda: (rows(4, 3), rows(4, 1)),
    "a list of one": lambda: ([rows(4, 3)], rows(4, 1)),
    "a dict": lambda: ({"a": rows(4, 3)}, {"p": rows(4, 1)}),
    "labels inside": lambda: ({"a": rows(4, 3), "y": rows(4, 1)},),
    "labels of rank 1": lambda: (rows(4, 3), rows(4, 1)[:, 0]),
    "labels of float64": lambda: (rows(4, 3), rows(4, 1, np.float64)),
    "integer labels": lambda: (rows(4, 3), RNG.integers(0, 9, 4)),
    "infinity": lambda: (np.full((4, 3), np.inf, np.float32), rows(4, 1)),
}


@pytest.mark.parametrize("kind", LIKE)
def test_the_adapter_looks_at_the_first_batch_only(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = known(A)
    assert is_checked(monkeypatch, batches, *LIKE[kind]())
    assert not is_checked(monkeypatch, batches, *LIKE[kind]())


UNLIKE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "another number of rows": lambda: (rows(5, 3), rows(5, 1)),
    "labels of rank 1": lambda: (rows(4, 3), rows(4, 1)[:, 0]),
    "strides": lambda: (rows(4, 6)[:, ::2], rows(4, 1)),
    "order F": lambda: (np.asfortranarray(rows(4, 3)), rows(4, 1)),
    "labels with strides": lambda: (rows(4, 3), rows(4, 2)[:, :1]),
    "the other byte order": lambda: (rows(4, 3).astype(">f4"), rows(4, 1)),
    "a subclass": lambda: (rows(4, 3).view(type("Named", (np.ndarray,), {})), rows(4, 1)),
    "lists": lambda: (rows(4, 3).tolist(), rows(4, 1)),
    "sample weights": lambda: (rows(4, 3), rows(4, 1), np.ones(4)),
    "a dict": lambda: ({"a": rows(4, 3)}, rows(4, 1)),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_other_data_is_checked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = known(A)
    arrays(batches, rows(4, 3), rows(4, 1))
    assert is_checked(monkeypatch, batches, *UNLIKE[kind]())


def test_a_conversion_is_made_and_told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfit.data.adapter.MAX_SILENT_BYTES", 0)
    batches = known(A)
    for _ in range(2):
        with pytest.warns(UserWarning, match="converted from float64"):
            assert arrays(batches, rows(4, 3, np.float64), rows(4, 1))["a"].dtype == FLOAT


WRONG: dict[str, tuple[Any, Any, str]] = {
    "NaN": (np.array([[1, 2, 3], [4, np.nan, 6]], np.float32), rows(2, 1), "NaN in row 1"),
    "a label of NaN": (rows(2, 3), np.array([[np.nan], [1]], np.float32), "got nan at row 0"),
    "infinity": (rows(2, 3), np.array([[1], [np.inf]], np.float32), "got inf at row 1"),
    "minus infinity": (rows(2, 3), np.array([[1], [-np.inf]], np.float32), "got -inf at row 1"),
    "unequal rows": (rows(3, 3), rows(2, 1), "the same number of rows"),
    "another width": (rows(2, 4), rows(2, 1), "got an array of shape"),
    "text": (rows(2, 3), np.array([["1"], ["2"]]), "text"),
    "no labels": (rows(2, 3), None, "has no labels"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_values_are_refused_after_right_ones(kind: str) -> None:
    x, y, message = WRONG[kind]
    batches = known(A)
    for _ in range(2):
        arrays(batches, rows(2, 3), rows(2, 1))
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            batches.source(x, y)


def test_labels_out_of_range_are_refused_after_right_ones() -> None:
    batches = known(A, loss=CrossEntropy(), output=TensorSpec("p", FLOAT, ("n", 3)))
    for labels in ([0, 1, 2], [2, 2, 0]):
        arrays(batches, rows(3, 3), np.array(labels))
    with pytest.raises(DataError, match="got 3 at row 1"):
        batches.source(rows(3, 3), np.array([0, 3, 1]))


@dataclass(frozen=True)
class Halved(MeanSquaredError):
    def prepare(self, y: Any, y_pred: TensorSpec) -> Array:
        if (np.asarray(y) > 8).any():
            raise DataError("a label above 8")
        return super().prepare(y, y_pred) / 2


def test_the_loss_prepares_the_labels_of_every_batch() -> None:
    batches = known(A, loss=Halved())
    for value in (2.0, 4.0):
        found = arrays(batches, rows(4, 3), np.full((4, 1), value, np.float32))
        labels = found[OutputTarget(OUTPUT, Halved()).input]
        np.testing.assert_array_equal(labels, np.full((4, 1), value / 2))
    with pytest.raises(DataError, match="above 8"):
        batches.source(rows(4, 3), np.full((4, 1), 9, np.float32))


def test_one_array_for_two_inputs_says_nothing_about_two_arrays() -> None:
    batches = known(A, TensorSpec("b", FLOAT, ("n", 3)))
    one, other = rows(4, 3), rows(4, 3)
    for x in ({"a": one, "b": one}, {"a": one, "b": other}, {"b": one, "a": other}):
        found = arrays(batches, x, rows(4, 1))
        np.testing.assert_array_equal(found["a"], x["a"])
        np.testing.assert_array_equal(found["b"], x["b"])


def test_several_inputs_are_told_apart_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = known(A, B)
    for first in (True, False):
        x = {"b": rows(4, 2), "a": rows(4, 3)}
        assert is_checked(monkeypatch, batches, x, rows(4, 1)) == first
        assert is_checked(monkeypatch, batches, [x["a"], x["b"]], rows(4, 1)) == first
    with pytest.raises(DataError, match="Not inputs of the model: 'c'"):
        batches.source({"c": rows(4, 2), "a": rows(4, 3)}, rows(4, 1))


def test_predictions_take_nan_and_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = known(A, purpose="prediction")
    x = np.full((4, 3), np.nan, np.float32)
    assert is_checked(monkeypatch, batches, x)
    assert not is_checked(monkeypatch, batches, x)


def test_few_kinds_of_batches_are_remembered() -> None:
    batches = known(A)
    for count in range(1, 3 * MAX_KNOWN_BATCHES):
        arrays(batches, rows(count, 3), rows(count, 1))
        assert 1 <= len(batches._known) <= MAX_KNOWN_BATCHES


def test_a_batch_size_of_the_model_is_kept() -> None:
    batches = known(TensorSpec("a", FLOAT, (4, 3)))
    arrays(batches, rows(4, 3), rows(4, 1))
    with pytest.raises(DataError, match="fixed"):
        batches.source(rows(2, 3), rows(2, 1))


def test_a_trainer_learns_the_same_from_known_batches() -> None:
    """Each batch is given to a trainer that knows it, and as a list, which is always checked."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 3] a) => (float[N, 1] p) <float[3, 1] w = {0, 1, 2}> { p = MatMul(a, w) }""")
    knowing, checking = (Trainer(model, loss="mse", optimizer="adam") for _ in range(2))
    for count in (4, 4, 4, 2, 4, 2):
        x, y = rows(count, 3), rows(count, 1)
        assert knowing.train_on_batch(x, y) == checking.train_on_batch(x.tolist(), y.tolist())
        assert knowing.test_on_batch(x, y) == checking.test_on_batch(x.tolist(), y.tolist())
        predictions = checking.predict_on_batch(x.tolist())
        np.testing.assert_array_equal(knowing.predict_on_batch(x), predictions)
    np.testing.assert_array_equal(knowing.get_weights()["w"], checking.get_weights()["w"])

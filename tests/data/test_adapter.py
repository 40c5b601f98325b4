"""Data meets model: inputs and labels by name or in order, and one error where they do not fit."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from onnxfit.data import DataAdapter, DataLoader
from onnxfit.errors import DataError, SettingError
from tests.data.kinds import (
    INPUTS,
    NAMED,
    ROWS,
    SIZE,
    Columns,
    Iterable,
    Labels,
    Table,
    Tensor,
    W,
    X,
    Y,
    make,
    spec,
    three_batches,
    whole,
    with_nan,
)

AB = [spec("a", "N", 2), spec("b", "N", 1)]


@pytest.mark.parametrize(
    "x",
    [
        {"b": Y, "a": X},
        [X, Y],
        (X, Y),
        [X.tolist(), Y.tolist()],
        [X, Y[:, 0]],
        {"a": Tensor(X), "b": Y[:, 0]},
    ],
)
def test_several_inputs_by_name_or_in_order(x: Any) -> None:
    arrays = whole(make(x, inputs=AB, targets={}, purpose="prediction"))
    np.testing.assert_array_equal(arrays["a"], X)
    np.testing.assert_array_equal(arrays["b"], Y)


def test_a_table_feeds_several_inputs_by_its_columns() -> None:
    columns = [spec("b", "N", 1), spec("a", "N", 1)]
    arrays = whole(
        make(Table({"a": X[:, 0], "b": X[:, 1]}), inputs=columns, targets={}, purpose="prediction")
    )
    np.testing.assert_array_equal(arrays["a"], X[:, :1])
    np.testing.assert_array_equal(arrays["b"], X[:, 1:])


@pytest.mark.parametrize(
    "y", [{"v": Y, "u": Y + 1}, [Y + 1, Y], {"y_true/u": Y + 1, "y_true/v": Y}]
)
def test_several_outputs_by_name_or_in_order(y: Any) -> None:
    two = {"u": Labels("u"), "v": Labels("v")}
    for data in (
        make(X, y, targets=two),
        make([(X, y)], targets=two),
        make({"x": X, "v": Y, "u": Y + 1}, targets=two),
    ):
        arrays = whole(data)
        np.testing.assert_array_equal(arrays["y_true/u"], Y + 1)
        np.testing.assert_array_equal(arrays["y_true/v"], Y)


def test_an_input_without_dimensions_is_fed_as_it_is() -> None:
    inputs = [*INPUTS, spec("temperature")]
    for value in (0.5, np.float32(0.5), np.array([0.5])):
        batches = list(
            make({"x": X, "temperature": value}, Y, inputs=inputs, shuffle=True).batches(0)
        )
        for batch in batches:
            buffers = {name: np.zeros_like(array) for name, array in batch.arrays().items()}
            batch.write(buffers)
            assert buffers["temperature"].shape == ()
            assert buffers["temperature"] == 0.5
    loader = DataLoader({"x": X, "temperature": np.float32(0.5)}, Y, batch_size=SIZE, shuffle=False)
    assert next(iter(loader))[0]["temperature"] == 0.5
    assert [batch.arrays()["temperature"] for batch in make(loader, inputs=inputs).batches(0)] == [
        0.5
    ] * 3


def test_little_data_is_narrowed_silently_and_more_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes of all batches count."""
    double = X.astype(np.float64)
    monkeypatch.setattr("onnxfit.data.adapter.MAX_SILENT_BYTES", double.nbytes - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole(make(double[1:], Y[1:]))
        whole(make([(double[1:4], Y[1:4]), (double[4:], Y[4:])]))
    for data in ((double, Y), ([(double[:4], Y[:4]), (double[4:], Y[4:])],)):
        with pytest.warns(UserWarning, match="converted from float64") as record:
            whole(make(*data))
        assert len(record) == 1


def test_narrowing_warns_once_and_at_the_callers_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfit.data.adapter.MAX_SILENT_BYTES", 0)
    double = X.astype(np.float64)
    with pytest.warns(
        UserWarning,
        match=r"^'a' was converted from float64 to float32; 'b' was converted from float64.*astype",
    ) as record:
        DataAdapter(AB, {}, purpose="prediction").source(
            {"a": double, "b": Y.astype(np.float64)}, batch_size=SIZE
        )
    assert [w.filename for w in record] == [__file__]
    with pytest.warns(UserWarning, match="float64") as record:
        whole(make([(double[:4], Y[:4]), (double[4:], Y[4:])]))
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(X, Y.astype(np.float64), W.astype(np.float64))  # labels and weights convert silently
        make(np.full((2, 2), np.inf, np.float32), Y[:2])


class Ragged:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("this one requires grad")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unequal rows": ({"x": X, "y": Y[:9]}, r"the same number of rows, but x: float32\[N, 2\] has 10, y for out has 9\."),
    "unequal weights": ({"x": X, "y": Y, "sample_weight": W[1:]}, "sample_weight has 9"),
    "no rows": ({"x": X[:0], "y": Y[:0]}, r"The training data is empty: it has 0 rows\."),
    "an empty list": ({"x": [], "y": []}, "empty"),
    "no data": ({"x": None}, r"The training data is None\. Expected arrays"),
    "a path": ({"x": "train.csv"}, r"'train\.csv' is a path, but only paths of \.npy and \.npz.*ParquetLoader.*ImageFolder"),
    "a number": ({"x": 3.0}, r"of type float\. Expected arrays"),
    "no labels": ({"x": X}, "no labels, but the loss of 'out' needs"),
    "missing input": ({"x": {"a": X}, "y": Y, "inputs": AB}, r"Missing: b: float32\[N, 1\]\. Expected: a: float32\[N, 2\]; b: float32\[N, 1\]"),
    "surplus input": ({"x": {"x": X, "z": X}, "y": Y}, r"Not inputs of the model: 'z'\. Expected: x: float32\[N, 2\]"),
    "both": ({"x": {"z": X}, "y": Y}, r"Missing: x: float32\[N, 2\]\. Not inputs of the model: 'z'"),
    "two label columns": ({"x": {"x": X, "label": Y, "y": Y}}, "Not inputs of the model: 'y'"),
    "one array for two inputs": ({"x": X, "y": Y, "inputs": AB}, r"one ndarray for 2 inputs\. Pass a dict by name, or a list in the order 'a', 'b'\."),
    "three arrays for two inputs": ({"x": [X, X, X], "y": Y, "inputs": AB}, "3 arrays for 2 inputs"),
    "rows in a list": ({"x": list(X), "y": Y}, r"10 arrays for 1 input\..*np\.stack"),
    "labels of another output": ({"x": X, "y": {"other": Y}}, r"labels are for 'other', but the outputs with a loss are 'out'\."),
    "labels missing for one": ({"x": X, "y": {"u": Y}, "targets": {"u": Labels("u"), "v": Labels("v")}}, r"for 'u'.* 'u', 'v'"),
    "labels the loss refuses": ({"x": X, "y": X}, r"labels of shape \(10, 2\)"),
    "a number as label": ({"x": X, "y": 1.0}, "y for out is a single number"),
    "a model with its own loss": ({"x": X, "y": Y, "targets": {}}, r"computes its own loss and cannot use labels.*x: float32\[N, 2\]"),
    "weights for its own loss": ({"x": X, "sample_weight": W, "targets": {}}, "computes its own loss and cannot use sample weights"),
    "wrong size": ({"x": Y, "y": Y}, r"x: float32\[N, 2\] got an array of shape \(10, 1\)"),
    "wrong rank": ({"x": X[:, None], "y": Y}, r"shape \(10, 1, 2\)"),
    "no feature axis": ({"x": X[:, 0], "y": Y}, r"got an array of shape \(10,\)\. The first dimension is the batch\."),
    "many for a scalar": ({"x": X, "y": Y, "inputs": [spec("x")]}, r"x: float32\[\] must be a single number, got an array of shape \(10, 2\)"),
    "nothing has rows": ({"x": 1.0 * np.ones(()), "inputs": [spec("x")], "targets": {}}, "contains no arrays"),
    "NaN": ({"x": with_nan(X, 7), "y": Y}, r"x: float32\[N, 2\] has NaN in row 7\."),
    "NaN label": ({"x": X, "y": with_nan(Y, 3)}, r"y for out has NaN in row 3\."),
    "NaN weight": ({"x": X, "y": Y, "sample_weight": with_nan(W, 2)}, "sample_weight is NaN in row 2"),
    "weights of another shape": ({"x": X, "y": Y, "sample_weight": X}, r"shape \(10, 2\), but y for out has shape \(10, 1\)\. Pass one weight for each row"),
    "text": ({"x": np.array([["a", "b"]] * ROWS), "y": Y}, r"x: float32\[N, 2\] has element type <U1 \(text\)"),
    "class names": ({"x": X, "y": ["cat"] * ROWS}, r"y for out has element type <U3 \(text\).*return_inverse"),
    "objects": ({"x": X.astype(object), "y": Y}, r"element type object \(objects\)"),
    "dates": ({"x": X.astype("datetime64[s]"), "y": Y}, "dates"),
    "complex": ({"x": X.astype(complex), "y": Y}, "complex"),
    "records": ({"x": np.zeros(ROWS, "f4,f4"), "y": Y}, "records"),
    "ragged": ({"x": [[1, 2], [3]], "y": Y[:2]}, "cannot be converted to one array"),
    "another library's refusal": ({"x": Ragged(), "y": Y}, r"cannot be converted to one array.*requires grad"),
    "masked": ({"x": np.ma.MaskedArray(X, X > 3), "y": Y}, "masked array"),
    "a stream's batch": ({"x": [(X, Y), (X[:, 0], Y)]}, r"In batch 1 of the training data: x: .* \(10,\)"),
    "a batch of four": ({"x": [(X, Y, W, W)]}, r"In batch 0 .*got a tuple of 4 items\."),
    "a stream of nothing": ({"x": Iterable([])}, "The training data is empty: it gave no"),
    "a function of nothing": ({"x": lambda: iter(())}, "gave no batches"),
    "an empty batch": ({"x": [(X[:0], Y[:0])]}, "empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_a_data_error_that_says_why(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        list(make(**arguments).batches(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X, "y": Y, "batch_size": 0}, r"batch_size must be >= 1, got 0\."),
        ({"x": X, "y": Y, "batch_size": 2.5}, "batch_size to be a whole number, got 2.5"),
        ({"x": DataLoader(X, Y), "y": Y}, "DataLoader returns batches.*Remove the argument y"),
        (
            {"x": three_batches(), "sample_weight": W},
            r"list returns batches.*sample_weight\.",
        ),
    ],
)
def test_impossible_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make(**arguments)


@pytest.mark.parametrize("purpose", ["prediction", "calibration"])
def test_prediction_and_calibration_take_no_labels(purpose: str) -> None:
    for x in (
        X,
        (X, Y)[:1],
        three_batches(),
        NAMED,
        DataLoader(X, Y, W, batch_size=SIZE),
        Columns(NAMED),
    ):
        arrays = whole(make(x, targets={}, purpose=purpose))
        assert list(arrays) == ["x"]
        np.testing.assert_array_equal(arrays["x"], X)


def test_prediction_lets_nan_pass_and_calibration_no_infinite_number() -> None:
    assert np.isnan(whole(make(with_nan(X, 1), targets={}, purpose="prediction"))["x"][1]).all()
    infinite = X.copy()
    infinite[2] = np.inf
    whole(make(infinite, Y))
    for x, message in (
        (with_nan(X, 1), r"has NaN in row 1\."),
        (infinite, r"infinite number in row 2\."),
    ):
        with pytest.raises(DataError, match=message):
            whole(make(x, targets={}, purpose="calibration"))

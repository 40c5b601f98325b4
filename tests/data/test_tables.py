"""Tables of pandas with columns that NumPy does not join."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.data.convert import as_array
from onnxfit.errors import DataError
from tests.models import mlp

pandas = pytest.importorskip("pandas")

FLOATS = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
TABLE = pandas.DataFrame(FLOATS, columns=list("abc"), index=[5, 3, 1, 0, 2, 4])
FLAGS = FLOATS[:, 2] > 0


@pytest.mark.parametrize(
    "flags",
    [
        lambda c: c > 0,
        lambda c: (c > 0).astype("boolean"),
        lambda c: (c > 0).astype("Int64"),
        lambda c: (c > 0).astype("UInt8"),
        lambda c: (c > 0).astype("Float64"),
        lambda c: (c > 0).astype(int).astype("category"),
        lambda c: (c > 0).astype("category"),
    ],
)
def test_columns_of_numbers_and_booleans_are_joined(flags: Any) -> None:
    table = TABLE.assign(c=flags(TABLE.c))
    expected = np.column_stack([FLOATS[:, :2], FLAGS])
    for value, numbers in ((table, expected), (table[["c"]], FLAGS[:, None]), (table.c, FLAGS)):
        array = as_array(value, "x")
        assert array.dtype.kind in "biuf"
        np.testing.assert_array_equal(array.astype(np.float32), numbers)


def test_dummies_train_as_their_array_does() -> None:
    x = TABLE.assign(d=FLAGS)
    y = pandas.Series(FLAGS.astype(int), index=TABLE.index)
    figures = []
    for data in ((x, y.astype("Int64")), (x.to_numpy(np.float32), y.to_numpy())):
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer=0.1)
        figures.append(trainer.fit(*data, epochs=3, verbose=0).history["loss"])
    assert figures[0] == figures[1]


NA = pandas.NA


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pandas.array([1.0, 2.0, NA, 4, 5, 6], "Float64"), "missing value in row 2. Fill"),
        (pandas.array([1, NA, 2, 3, 4, 5], "Int64"), "missing value in row 1. Fill"),
        (pandas.array([True, False, NA, True, True, True], "boolean"), "missing value in row 2"),
        (pandas.Categorical(list("xyxyxy")), r"the type category, .* df\[column\].cat.codes, or"),
        (list("xyxyxy"), r"but expected numbers or booleans. Use pandas.get_dummies\(df\), or"),
        ([1, "x", 2, 3, 4, None], "the type object, but expected numbers or booleans. Convert it"),
        (pandas.date_range("2020-01-01", periods=6), "the type datetime64"),
    ],
)
def test_a_column_that_has_no_numbers_is_named(column: Any, message: str) -> None:
    table = TABLE.assign(b=list(column) if isinstance(column, list) else column)
    with pytest.raises(DataError, match=f"^x: the column 'b' has .*{message}"):
        as_array(table, "x")
    if "missing" in message:  # pandas makes an array of floats with NaN, which is named elsewhere
        table.b = table.b.astype("object")
        message = "the type object"
    with pytest.raises(DataError, match=f"^x has .*{message}"):
        as_array(table.b, "x")

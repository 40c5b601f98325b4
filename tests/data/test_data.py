"""Data: whatever holds the rows, the same batches come out, or one error says why not."""

from __future__ import annotations

import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfit.data import (
    Batch,
    DataAdapter,
    DataLoader,
    Prefetch,
    Source,
    permutation,
    validation_split,
)
from onnxfit.data.prefetch import PrefetchedSource, PrefetchIterator
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec

ROWS, SIZE = 10, 4
X = np.arange(20, dtype=np.float32).reshape(ROWS, 2)
Y = np.arange(ROWS, dtype=np.float32).reshape(ROWS, 1) / 8
W = np.linspace(1, 2, ROWS, dtype=np.float32)


def spec(name: str, *shape: int | str | None, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, np.dtype(dtype), shape)


INPUTS = [spec("x", "N", 2)]


@dataclass(frozen=True)
class Labels:
    """Stands for an output and its loss: float labels of shape (n, 1)."""

    output: str = "out"

    @property
    def input(self) -> str:
        return f"y_true/{self.output}"

    def prepare(self, y: np.ndarray) -> np.ndarray:
        y = y[:, None] if y.ndim == 1 else y
        if y.shape[1:] != (1,):
            raise DataError(f"labels of shape {y.shape} were given, (batch, 1) is expected")
        return y.astype(np.float32)


OUT = {"out": Labels()}


def make(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    inputs: list[TensorSpec] = INPUTS,
    targets: Any = OUT,
    batch_size: Any = SIZE,
    shuffle: bool = False,
    drop_last: bool = False,
    **settings: Any,
) -> Source:
    adapter = DataAdapter(inputs, targets, **settings)
    data = adapter.source(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
    return data.with_batch_size(batch_size, drop_last=True) if drop_last else data


def whole(data: Source, epoch: int = 0, skip: int = 0) -> dict[str, np.ndarray]:
    """All rows of a pass."""
    parts = [batch.arrays() for batch in data.batches(epoch, skip)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# ---------------------------------------------------------------------- every kind of data


def three_batches() -> list[tuple[np.ndarray, ...]]:
    return [(X[i : i + SIZE], Y[i : i + SIZE], W[i : i + SIZE]) for i in range(0, ROWS, SIZE)]


class Numbered:
    """Batches by number, as Keras's PyDataset gives them."""

    def __init__(self) -> None:
        self.ended = 0

    def __len__(self) -> int:
        return len(three_batches())

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return three_batches()[index]

    def on_epoch_end(self) -> None:
        self.ended += 1


class Iterable:
    """Batches by iteration alone."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Tensor:
    """A tensor of another library: numpy can read it, and that is all."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.ndim = array.ndim

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.array, dtype)

    def __getitem__(self, rows: Any) -> Tensor:
        return Tensor(self.array[rows])


class Table(Tensor):
    """What pandas's DataFrame has in common with this: columns by name, rows by `iloc`, an array on
    request.
    """

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        super().__init__(np.stack(list(columns.values()), axis=1))
        self.columns = list(columns)
        self.data = columns

    def __getitem__(self, column: str) -> Tensor:
        return Tensor(self.data[column])

    @property
    def iloc(self) -> Any:
        table = self

        class Rows:
            def __getitem__(self, rows: Any) -> Table:
                return Table({name: column[rows] for name, column in table.data.items()})

        return Rows()


class Columns:
    """What a dataset of Hugging Face has in common with this: rows by number or numbers, as a dict
    of columns, once it is told to.
    """

    def __init__(self, columns: dict[str, np.ndarray], told: bool = False) -> None:
        self.columns_ = columns
        self.told = told

    def with_format(self, kind: str) -> Columns:
        assert kind == "numpy"
        return Columns(self.columns_, told=True)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, rows: slice | list[int]) -> dict[str, np.ndarray]:
        assert self.told
        assert isinstance(rows, (slice, list)), "single rows would lack the batch dimension"
        return {name: column[rows] for name, column in self.columns_.items()}

    def iter(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        return (self[i : i + batch_size] for i in range(0, ROWS, batch_size))


class StreamedColumns(Columns):
    """The same without a length."""

    __len__ = None  # type: ignore[assignment]

    def with_format(self, kind: str) -> StreamedColumns:
        return StreamedColumns(self.columns_, told=True)


NAMED = {"x": X, "label": Y, "sample_weight": W}
# how to hand over the same ten rows; every kind must give the same three batches
KINDS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "arrays": lambda: (X, Y, W),
    "other layout": lambda: (np.asfortranarray(X), Y[::-1][::-1], W),
    "lists of numbers": lambda: (X.tolist(), Y[:, 0].tolist(), W.tolist()),
    "tuples of numbers": lambda: (tuple(map(tuple, X.tolist())), Y[:, 0], W[:, None]),
    "foreign tensors": lambda: (Tensor(X), Tensor(Y), Tensor(W)),
    "table": lambda: (Table({"a": X[:, 0], "b": X[:, 1]}), Table({"y": Y[:, 0]}), W),
    "dicts": lambda: ({"x": X}, {"out": Y}, W),
    "labels by graph input": lambda: ({"x": X}, {"y_true/out": Y}, W),
    "lists of arrays": lambda: ([X], [Y], W),
    "one dict": lambda: (NAMED,),
    "one dict with the output's name": lambda: ({"out": Y, "sample_weight": W, "x": X},),
    "loader": lambda: (DataLoader(X, Y, W, batch_size=SIZE, shuffle=False),),
    "prefetching loader": lambda: (
        DataLoader(X, Y, W, batch_size=SIZE, shuffle=False, prefetch=2),
    ),
    "loader of dicts": lambda: (
        DataLoader({"x": X}, {"out": Y}, W, batch_size=SIZE, shuffle=False),
    ),
    "list of batches": lambda: (three_batches(),),
    "tuple of batches": lambda: (tuple(three_batches()),),
    "list of dicts": lambda: (
        [{"x": x, "y": y, "sample_weight": w} for x, y, w in three_batches()],
    ),
    "numbered batches": lambda: (Numbered(),),
    "iterable": lambda: (Iterable(three_batches()),),
    "iterable of lists": lambda: (
        Iterable([[Tensor(part) for part in batch] for batch in three_batches()]),
    ),
    "iterable of nested dicts": lambda: (
        Iterable([({"x": x}, {"out": y}, w) for x, y, w in three_batches()]),
    ),
    "function": lambda: ((lambda: iter(three_batches())),),
    "generator function": lambda: ((lambda: (batch for batch in three_batches())),),
    "generator": lambda: ((batch for batch in three_batches()),),
    "prefetched batches": lambda: (Prefetch(three_batches()),),
    "prefetched function": lambda: (
        Prefetch(lambda: (batch for batch in three_batches()), depth=1),
    ),
    "prefetched loader": lambda: (Prefetch(DataLoader(X, Y, W, batch_size=SIZE, shuffle=False)),),
    "columns": lambda: (Columns(NAMED),),
    "streamed columns": lambda: (StreamedColumns(NAMED),),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_every_kind_of_data_gives_the_same_batches(kind: str) -> None:
    with make(*KINDS[kind]()) as data:
        batches = list(data.batches(0))
    assert [batch.rows for batch in batches] == [4, 4, 2]
    for batch, (x, y, w) in zip(batches, three_batches()):
        arrays = batch.arrays()
        assert set(arrays) == {"x", "y_true/out", "sample_weight"}
        for name, expected in (("x", x), ("y_true/out", y), ("sample_weight", w)):
            np.testing.assert_array_equal(arrays[name], expected, strict=True)
    assert data.steps in (3, None)
    assert data.rows in (ROWS, None)


@kinds
@pytest.mark.parametrize("shuffle", [False, True])
def test_write_copies_what_arrays_shows(kind: str, shuffle: bool) -> None:
    with make(*KINDS[kind](), shuffle=shuffle) as data:
        for batch in data.batches(1):
            arrays = batch.arrays()
            buffers = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
            buffers["train/step"] = np.array(7)  # what a step has besides stays as it is
            batch.write(buffers)
            assert buffers.pop("train/step") == 7
            for name, array in arrays.items():
                np.testing.assert_array_equal(buffers[name], array, strict=True)


@kinds
def test_the_signature_tells_shapes_apart_and_nothing_else(kind: str) -> None:
    with make(*KINDS[kind](), shuffle=False) as data:
        first, second, last = (batch.signature for batch in data.batches(0))
    assert hash(first) == hash(second)
    assert first == second != last


def test_the_signature_holds_names_types_and_scalars() -> None:
    def signature(**arrays: np.ndarray) -> object:
        inputs = [
            TensorSpec(n, a.dtype, a.shape if a.ndim == 0 else ("N", *a.shape[1:]))
            for n, a in arrays.items()
        ]
        return next(
            make(arrays, inputs=inputs, targets={}, purpose="prediction").batches(0)
        ).signature

    some = {"a": np.zeros((2, 3), np.float32), "b": np.float32(1)}
    assert signature(**some) == signature(**some)
    others = [
        {"a": np.zeros((2, 3), np.int32), "b": some["b"]},
        {"c": some["a"], "b": some["b"]},
        {"a": np.zeros((2, 4), np.float32), "b": some["b"]},
    ]
    assert len({signature(**arrays) for arrays in (some, *others)}) == 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "generator"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_skipping_batches_is_leaving_out_the_first(kind: str, shuffle: bool) -> None:
    with make(*KINDS[kind](), shuffle=shuffle) as data:
        full = [(batch.rows, batch.signature, batch.arrays()) for batch in data.batches(3)]
        for skip in (1, 2, 3):
            rest = [
                (batch.rows, batch.signature, batch.arrays()) for batch in data.batches(3, skip)
            ]
            np.testing.assert_equal(rest, full[skip:])


def test_arrays_are_brought_into_rows_once() -> None:
    """Rows taken from any other layout copy the whole array, for every batch."""
    batch, *_ = make(np.asfortranarray(X), Y[::-1], np.repeat(W, 2)[::2]).batches(0)
    assert all(array.flags.c_contiguous for _, array in batch.columns)


# ---------------------------------------------------------------------- the order of rows


@given(
    rows=st.integers(1, 60),
    size=st.integers(1, 70),
    seed=st.integers(-(2**63), 2**65),
    epoch=st.integers(0, 9),
    drop_last=st.booleans(),
)
@settings(max_examples=60)
def test_every_row_comes_once_an_epoch(
    rows: int, size: int, seed: int, epoch: int, drop_last: bool
) -> None:
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    settings = {
        "shuffle": True,
        "batch_size": size,
        "seed": seed,
        "drop_last": drop_last,
        "targets": {},
        "purpose": "prediction",
    }
    if drop_last and size > rows:
        with pytest.raises(DataError, match="drop_last=True leaves nothing"):
            make(x, **settings)
        return
    data = make(x, **settings)
    batches = [batch.arrays()["x"] for batch in data.batches(epoch)]
    assert len(batches) == data.steps
    seen = np.concatenate(batches)[:, 0] / 2
    assert len(set(seen)) == len(seen) == (rows - rows % size if drop_last else rows)
    assert all(len(batch) == size for batch in batches[:-1])
    again = (
        np.concatenate([batch.arrays()["x"] for batch in make(x, **settings).batches(epoch)])[:, 0]
        / 2
    )
    np.testing.assert_array_equal(seen, again)


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in (0, 1, 2**40) for epoch in range(4)}
    assert len(orders) == 12
    assert tuple(range(50)) not in orders


def test_a_batch_size_beyond_every_data_set_is_one_batch() -> None:
    (batch,) = make(X, Y, batch_size=2**62, shuffle=True).batches(0)
    assert batch.rows == ROWS


def test_the_loader_overrules_the_arguments_of_fit() -> None:
    data = make(
        DataLoader(X, Y, batch_size=5, shuffle=True, seed=7, drop_last=True),
        batch_size=3,
        shuffle=False,
        seed=1,
    )
    assert (data.steps, data.batch_size) == (2, 5)
    np.testing.assert_array_equal(whole(data, 4)["x"], X[permutation(7, 4, ROWS)])
    without_seed = make(DataLoader(X, Y, batch_size=5), seed=1)
    np.testing.assert_array_equal(whole(without_seed, 4)["x"], X[permutation(1, 4, ROWS)])


@pytest.mark.parametrize("purpose", ["evaluation", "prediction"])
def test_a_shuffling_loader_is_evaluated_in_the_order_of_its_rows(purpose: str) -> None:
    np.testing.assert_array_equal(
        whole(
            make(DataLoader(X, Y), purpose=purpose, targets={} if purpose == "prediction" else OUT)
        )["x"],
        X,
    )


def test_numbered_batches_are_shuffled_as_batches_and_told_of_the_epochs_end() -> None:
    numbered = Numbered()
    data = make(numbered, shuffle=True, seed=3)
    for epoch in range(3):
        order = permutation(3, epoch, 3)
        np.testing.assert_array_equal(
            whole(data, epoch)["x"], np.concatenate([three_batches()[i][0] for i in order])
        )
    assert numbered.ended == 3
    next(data.batches(3))
    assert numbered.ended == 3, "a pass that was left early has no end"


def test_columns_are_shuffled_by_rows() -> None:
    np.testing.assert_array_equal(
        whole(make(Columns(NAMED), shuffle=True, seed=3), 2)["x"], X[permutation(3, 2, ROWS)]
    )


def test_foreign_loaders_are_told_the_epoch() -> None:
    loader = Iterable(three_batches())
    data = make(loader)
    whole(data, 5)
    whole(data, 6)
    assert loader.epochs == [5, 6]


# ---------------------------------------------------------------------- one pass only


def test_a_generator_is_good_for_one_pass() -> None:
    data = make(KINDS["generator"]()[0])
    assert not data.re_iterable
    data.require_re_iterable(1)
    with pytest.raises(
        DataError, match=r"3 epochs need 3 passes.*function that returns the generator"
    ):
        data.require_re_iterable(3)
    assert len(whole(data)["x"]) == ROWS, "asking took no batch"
    with pytest.raises(DataError, match=r"no batch.*used up"):
        next(data.batches(1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "generator"])
def test_everything_else_can_be_passed_over_again(kind: str) -> None:
    with make(*KINDS[kind]()) as data:
        assert data.re_iterable
        data.require_re_iterable(10)
        np.testing.assert_equal(whole(data, 0), whole(data, 0))


def test_a_generator_of_the_callers_is_left_open_and_one_of_ours_is_closed() -> None:
    closed = []

    def batches() -> Iterator[Any]:
        try:
            yield from three_batches()
        finally:
            closed.append(True)

    theirs = batches()
    running = make(theirs).batches(0)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert not closed
    assert len(next(theirs)) == 3
    running = make(batches).batches(0)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert closed == [True]


# ---------------------------------------------------------------------- inputs, labels, types


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


def test_an_unknown_rank_takes_any_shape() -> None:
    anything = [TensorSpec("x", np.dtype("float32"), None)]
    for x in (X, X[:, 0], X.reshape(ROWS, 1, 2, 1)):
        assert whole(make(x, Y, inputs=anything))["x"].shape == x.shape


@pytest.mark.parametrize(
    ("given_dtype", "wanted"),
    [("int64", "float32"), ("uint8", "float32"), ("bool", "float32"), ("float32", "float64"), ("int64", "int32"), ("int32", "int64"),
     ("uint8", "int64"), ("float64", "int64"), ("float32", "int32"), ("bool", "int64"), ("int64", "bool"), ("float16", "float32"), (">f4", "float32"),
     ("int8", "float16")],
)  # fmt: skip
def test_types_that_lose_nothing_convert_silently(given_dtype: str, wanted: str) -> None:
    x = np.array([[0, 1], [1, 0]]).astype(given_dtype)
    arrays = whole(make(x, Y[:2], inputs=[spec("x", "N", 2, dtype=wanted)]))
    np.testing.assert_array_equal(arrays["x"], np.array([[0, 1], [1, 0]], wanted), strict=True)


@pytest.mark.parametrize(
    ("x", "wanted", "message"),
    [
        (
            np.array([[0.5, 1]], np.float32),
            "int64",
            r"float32 values that int64 cannot hold, such as 0.5",
        ),
        (np.array([[np.nan, 1]]), "int64", "cannot hold, such as nan"),
        (np.array([[2**40, 1]]), "int32", f"int64 values that int32 cannot hold, such as {2**40}"),
        (np.array([[-1, 1]]), "uint8", "cannot hold, such as -1"),
        (np.array([[2**64 - 1, 1]], np.uint64), "int64", "cannot hold"),
        (np.array([[1e300, 1]]), "float32", "beyond the range of float32"),
        (np.array([[70000, 1]]), "float16", "beyond the range of float16"),
        (np.array([[2, 1]]), "bool", "bool cannot hold, such as 2"),
    ],
)
def test_types_that_lose_values_do_not_convert(x: np.ndarray, wanted: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^x: {wanted}\[N, 2\] got .*{message}"):
        make(x, Y[:1], inputs=[spec("x", "N", 2, dtype=wanted)])


def test_narrowing_warns_once_and_at_the_callers_line() -> None:
    double = X.astype(np.float64)
    with pytest.warns(
        UserWarning, match=r"^'a' is float64 and was converted to float32; 'b' is float64.*astype"
    ) as record:
        make({"a": double, "b": Y.astype(np.float64)}, inputs=AB, targets={}, purpose="prediction")
    assert [w.filename for w in record] == [__file__]
    with pytest.warns(UserWarning, match="float64") as record:
        whole(make([(double[:4], Y[:4]), (double[4:], Y[4:])]))
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(X, Y.astype(np.float64), W.astype(np.float64))  # labels and weights convert silently
        make(np.full((2, 2), np.inf, np.float32), Y[:2])


def test_labels_and_weights_are_checked_once_for_arrays_and_per_batch_for_streams() -> None:
    calls = []

    class Counting(Labels):
        def prepare(self, y: np.ndarray) -> np.ndarray:
            calls.append(len(y))
            return super().prepare(y)

    data = make(X, Y, targets={"out": Counting()})
    whole(data), whole(data)
    assert calls == [ROWS]
    calls.clear()
    whole(make(three_batches(), targets={"out": Counting()}))
    assert calls == [4, 4, 2]


# ---------------------------------------------------------------------- what is refused


class Ragged:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("this one requires grad")


def with_nan(array: np.ndarray, row: int) -> np.ndarray:
    array = array.copy()
    array[row] = np.nan
    return array


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unequal rows": ({"x": X, "y": Y[:9]}, r"unequal numbers of rows: x: float32\[N, 2\] has 10, y for out has 9"),
    "unequal weights": ({"x": X, "y": Y, "sample_weight": W[1:]}, "sample_weight has 9"),
    "no rows": ({"x": X[:0], "y": Y[:0]}, "The training data is empty: 0 rows"),
    "an empty list": ({"x": [], "y": []}, "empty"),
    "no data": ({"x": None}, "The training data is None: expected arrays"),
    "a path": ({"x": "train.csv"}, r"'train.csv' is a path, and those of .npy and .npz.*ParquetLoader.*ImageFolder"),
    "a number": ({"x": 3.0}, "of type float: expected arrays"),
    "no labels": ({"x": X}, "no labels, and the loss of 'out' needs them"),
    "missing input": ({"x": {"a": X}, "y": Y, "inputs": AB}, r"Missing: b: float32\[N, 1\]\. Expected: a: float32\[N, 2\]; b: float32\[N, 1\]"),
    "surplus input": ({"x": {"x": X, "z": X}, "y": Y}, r"Not an input: 'z'\. Expected: x: float32\[N, 2\]"),
    "both": ({"x": {"z": X}, "y": Y}, r"Missing: x: float32\[N, 2\]\. Not an input: 'z'"),
    "two label columns": ({"x": {"x": X, "label": Y, "y": Y}}, "Not an input: 'y'"),
    "one array for two inputs": ({"x": X, "y": Y, "inputs": AB}, "one ndarray for 2 inputs: pass a dict by name or a list in the order 'a', 'b'"),
    "three arrays for two inputs": ({"x": [X, X, X], "y": Y, "inputs": AB}, "3 arrays for 2 inputs"),
    "rows in a list": ({"x": list(X), "y": Y}, r"10 arrays for 1 input: .*np\.stack"),
    "labels of another output": ({"x": X, "y": {"other": Y}}, "labels are for 'other'; the outputs with a loss are 'out'"),
    "labels missing for one": ({"x": X, "y": {"u": Y}, "targets": {"u": Labels("u"), "v": Labels("v")}}, "for 'u'; .* 'u', 'v'"),
    "labels the loss refuses": ({"x": X, "y": X}, r"labels of shape \(10, 2\)"),
    "a number as label": ({"x": X, "y": 1.0}, "y for out is a single number"),
    "a model with its own loss": ({"x": X, "y": Y, "targets": {}}, r"computes its own loss, so that labels have no place.*x: float32\[N, 2\]"),
    "weights for its own loss": ({"x": X, "sample_weight": W, "targets": {}}, "computes its own loss, so that sample weights"),
    "wrong size": ({"x": Y, "y": Y}, r"x: float32\[N, 2\] got an array of shape \(10, 1\)"),
    "wrong rank": ({"x": X[:, None], "y": Y}, r"shape \(10, 1, 2\)"),
    "no feature axis": ({"x": X[:, 0], "y": Y}, r"got an array of shape \(10,\); the first dimension is the batch"),
    "many for a scalar": ({"x": X, "y": Y, "inputs": [spec("x")]}, r"x: float32\[\] is a single number, got an array of shape \(10, 2\)"),
    "nothing has rows": ({"x": 1.0 * np.ones(()), "inputs": [spec("x")], "targets": {}}, "no array with rows"),
    "NaN": ({"x": with_nan(X, 7), "y": Y}, r"x: float32\[N, 2\] is NaN in row 7"),
    "NaN label": ({"x": X, "y": with_nan(Y, 3)}, "y for out is NaN in row 3"),
    "NaN weight": ({"x": X, "y": Y, "sample_weight": with_nan(W, 2)}, "sample_weight is NaN in row 2"),
    "weights of another shape": ({"x": X, "y": Y, "sample_weight": X}, r"one number a row, shape \(n,\) or \(n, 1\), got \(10, 2\)"),
    "text": ({"x": np.array([["a", "b"]] * ROWS), "y": Y}, r"x: float32\[N, 2\] has element type <U1 \(text\)"),
    "class names": ({"x": X, "y": ["cat"] * ROWS}, r"y for out has element type <U3 \(text\).*return_inverse"),
    "objects": ({"x": X.astype(object), "y": Y}, r"element type object \(objects\)"),
    "dates": ({"x": X.astype("datetime64[s]"), "y": Y}, "dates"),
    "complex": ({"x": X.astype(complex), "y": Y}, "complex"),
    "records": ({"x": np.zeros(ROWS, "f4,f4"), "y": Y}, "records"),
    "ragged": ({"x": [[1, 2], [3]], "y": Y[:2]}, "cannot become one array"),
    "another library's refusal": ({"x": Ragged(), "y": Y}, "cannot become one array.*requires grad"),
    "sparse": ({"x": scipy.sparse.csr_array(X), "y": Y}, r"sparse \(csr_array\).*\.toarray\(\)"),
    "masked": ({"x": np.ma.MaskedArray(X, X > 3), "y": Y}, "masked array"),
    "a stream's batch": ({"x": [(X, Y), (X[:, 0], Y)]}, r"In batch 1 of the training data: x: .* \(10,\)"),
    "a batch of four": ({"x": [(X, Y, W, W)]}, "In batch 0 .* got 4 items"),
    "a stream of nothing": ({"x": Iterable([])}, "The training data gave no batch"),
    "a function of nothing": ({"x": lambda: iter(())}, "gave no batch"),
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
        ({"x": X, "y": Y, "batch_size": 0}, "batch_size is at least 1, got 0"),
        ({"x": X, "y": Y, "batch_size": 2.5}, "batch_size is a number of rows, got 2.5"),
        ({"x": DataLoader(X, Y), "y": Y}, "DataLoader gives batches.*leave out y"),
        (
            {"x": three_batches(), "sample_weight": W},
            "list gives batches.*leave out sample_weight",
        ),
    ],
)
def test_impossible_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make(**arguments)


def test_prediction_takes_no_labels_and_lets_nan_pass() -> None:
    for x in (
        X,
        (X, Y)[:1],
        three_batches(),
        NAMED,
        DataLoader(X, Y, W, batch_size=SIZE),
        Columns(NAMED),
    ):
        arrays = whole(make(x, targets={}, purpose="prediction"))
        assert list(arrays) == ["x"]
        np.testing.assert_array_equal(arrays["x"], X)
    assert np.isnan(whole(make(with_nan(X, 1), targets={}, purpose="prediction"))["x"][1]).all()


# ---------------------------------------------------------------------- a batch dimension that is a
# number

FIXED = [spec("x", 4, 2)]


def test_a_fixed_batch_dimension_needs_batches_of_that_size() -> None:
    with pytest.raises(DataError, match=r"x: float32\[4, 2\] is fixed.*Pass batch_size=4; drop_last=True leaves out the last 2 rows: "
                       r"DataLoader\(x, y, batch_size=4, drop_last=True\)"):  # fmt: skip
        make(X, Y, inputs=FIXED, batch_size=4)
    with pytest.raises(
        DataError,
        match=(
            r"every batch needs 4 rows, and batches of 5 from 8 rows do not give that\. Pass"
            r" batch_size=4\.$"
        ),
    ):
        make(X[:8], Y[:8], inputs=FIXED, batch_size=5)
    with pytest.raises(DataError, match="has only 3 rows"):
        make(X[:3], Y[:3], inputs=FIXED, batch_size=4)
    with pytest.raises(DataError, match="batch_size=4"):
        make(Columns(NAMED), inputs=FIXED, batch_size=4)
    with pytest.raises(
        DataError, match=r"In batch 2 .* this batch has 2 rows\. Make batches of 4.*drop_last=True"
    ):
        list(make(three_batches(), inputs=FIXED).batches(0))


def test_a_fixed_batch_dimension_that_is_met() -> None:
    for data in (
        make(X[:8], Y[:8], inputs=FIXED, batch_size=4),
        make(X[:4], Y[:4], inputs=FIXED, batch_size=2**62),
        make(DataLoader(X, Y, batch_size=4, drop_last=True), inputs=FIXED),
        make(three_batches()[:2], inputs=FIXED),
    ):
        assert {batch.rows for batch in data.batches(0)} == {4}


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_sample_weights_have_one_number_a_row(shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(
        whole(make(X, Y, W.reshape(shape)))["sample_weight"], W, strict=True
    )


@pytest.mark.parametrize(
    ("y", "class_weight", "expected"),
    [
        ([0, 0, 1, 1], {0: 0.2, 1: 0.3}, [0.2, 0.2, 0.3, 0.3]),
        ([0, 0, 1, 1], {0: 0.2}, [0.2, 0.2, 1, 1]),
        ([0.0, 0.0, 1.0, 1.0], {1: 0.3}, [1, 1, 0.3, 0.3]),
        ([[2], [0], [-1], [2]], {2: 5, -1: 0}, [5, 1, 0, 5]),
        ([True, False, True, True], {True: 2, False: 3}, [2, 3, 2, 2]),
    ],
)
def test_class_weights_become_sample_weights(
    y: Any, class_weight: dict[int, float], expected: list[float]
) -> None:
    y = np.array(y)
    for data in (
        make(X[:4], y, class_weight=class_weight),
        make([(X[:4], y)], class_weight=class_weight),
    ):
        np.testing.assert_allclose(
            whole(data)["sample_weight"], np.array(expected, np.float32), rtol=0
        )


def test_one_hot_labels_have_the_class_of_their_one() -> None:
    class OneHot(Labels):
        def prepare(self, y: np.ndarray) -> np.ndarray:
            return y.astype(np.float32)

    data = make(
        X[:3], np.eye(3)[[2, 0, 1]], targets={"out": OneHot()}, class_weight={2: 5.0, 1: 3.0}
    )
    assert whole(data)["sample_weight"].tolist() == [5, 1, 3]
    for several in ([[1, 1, 0]], [[0.5, 0.5, 0]], [[2, -1, 0]]):
        with pytest.raises(DataError, match="integer classes"):
            make(X[:1], np.array(several), targets={"out": OneHot()}, class_weight={0: 2.0})


@pytest.mark.parametrize("x", [(X, Y, W), (DataLoader(X, Y, W),), (three_batches(),), (NAMED,)])
def test_class_weights_beside_sample_weights_are_refused(x: tuple[Any, ...]) -> None:
    with pytest.raises(SettingError, match="class_weight or sample_weight, not both"):
        list(make(*x, class_weight={0: 1.0}).batches(0))


@pytest.mark.parametrize(
    "class_weight", ["balanced", {"cat": 1.0}, {0: "much"}, {0: np.nan}, [1.0, 2.0]]
)
def test_class_weights_are_numbers_by_class(class_weight: Any) -> None:
    with pytest.raises(SettingError, match=f"got {re.escape(repr(class_weight))}"):
        make(X, Y, class_weight=class_weight)


def test_class_weights_need_classes_and_one_output() -> None:
    with pytest.raises(DataError, match="integer classes"):
        make(X, Y, class_weight={0: 1.0})
    with pytest.raises(SettingError, match="exactly one output with labels, the model has 2"):
        make(X, [Y, Y], targets={"u": Labels("u"), "v": Labels("v")}, class_weight={0: 1.0})


# ---------------------------------------------------------------------- validation_split


@pytest.mark.parametrize(
    ("rows", "fraction", "trained"),
    [
        (10, 0.2, 8),
        (10, 0.25, 7),
        (100, 0.29, 71),
        (7, 0.5, 3),
        (3, 0.2, 2),
        (10, 0.05, 9),
        (10, 0.9, 1),
        (10, 0.7, 3),
    ],
)
def test_validation_takes_the_last_rows(rows: int, fraction: float, trained: int) -> None:
    x = np.arange(rows)
    train, validation = validation_split({"x": x, "scale": 2.0}, x + 1, x + 3, fraction)
    np.testing.assert_array_equal(train[0]["x"], x[:trained])
    np.testing.assert_array_equal(validation[0]["x"], x[trained:])
    assert train[0]["scale"] == validation[0]["scale"] == 2.0
    for part, shift in ((1, 1), (2, 3)):
        np.testing.assert_array_equal(train[part], x[:trained] + shift)
        np.testing.assert_array_equal(validation[part], x[trained:] + shift)


@pytest.mark.parametrize(
    "kind",
    [
        "arrays",
        "other layout",
        "lists of numbers",
        "foreign tensors",
        "table",
        "dicts",
        "lists of arrays",
        "one dict",
    ],
)
def test_validation_split_keeps_the_kind_of_data(kind: str) -> None:
    given = (*KINDS[kind](), None, None)[:3]
    train, validation = validation_split(*given, 0.3)
    for parts, rows in ((train, slice(0, 7)), (validation, slice(7, 10))):
        arrays = whole(make(*parts))
        np.testing.assert_array_equal(arrays["x"], X[rows])
        np.testing.assert_array_equal(arrays["y_true/out"], Y[rows])
        np.testing.assert_array_equal(arrays["sample_weight"], W[rows])


def test_validation_split_needs_rows_to_train_on_and_arrays() -> None:
    for rows, fraction, message in (
        (3, 0.99, "leaves no row for training"),
        (3, 1e-12, "leaves no row for validation"),
        (3, 1.0, "between 0 and 1"),
    ):
        with pytest.raises(SettingError, match=message):
            validation_split(X[:rows], Y[:rows], None, fraction)
    for data in (DataLoader(X, Y), three_batches(), Numbered(), lambda: iter(three_batches())):
        with pytest.raises(SettingError, match="validation_split cuts arrays"):
            validation_split(data, None, None, 0.5)
    with pytest.raises(DataError, match="unequal"):
        validation_split(X, Y[1:], None, 0.5)


# ---------------------------------------------------------------------- DataLoader by itself


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_loader_gives_batches_built_like_its_data(prefetch: int) -> None:
    loader = DataLoader(
        {"a": X, "b": Y}, [Y, Tensor(W)], W, batch_size=SIZE, shuffle=False, prefetch=prefetch
    )
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    for (x, y, w), (a, b, c) in zip(batches, three_batches()):
        np.testing.assert_equal(x, {"a": a, "b": b})
        np.testing.assert_equal(y, [b, c])
        np.testing.assert_equal(w, c)
    assert [len(batch) for batch in DataLoader(X)] == [1]
    assert [len(batch) for batch in DataLoader(X, Y, batch_size=6, drop_last=True)] == [2]


def seen(loader: DataLoader) -> list[list[float]]:
    return [x[:, 0].tolist() for x, _ in loader]


def test_each_whole_pass_of_the_loader_is_the_next_epoch() -> None:
    loader = DataLoader(X, Y, batch_size=3, seed=5)
    passes = [seen(loader) for _ in range(3)]
    assert passes == [
        [X[rows, 0].tolist() for rows in np.split(permutation(5, epoch, ROWS), [3, 6, 9])]
        for epoch in range(3)
    ]
    loader.set_epoch(1)
    assert seen(loader) == passes[1]
    assert seen(DataLoader(X, Y, batch_size=3)) == seen(DataLoader(X, Y, batch_size=3, seed=0)), (
        "no seed stands for 0"
    )


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("taken", range(5))
def test_a_loader_goes_on_where_its_state_was_taken(taken: int, prefetch: int) -> None:
    settings = {"batch_size": 3, "prefetch": prefetch}
    whole_run = DataLoader(X, Y, seed=5, **settings)
    expected = [*seen(whole_run), *seen(whole_run)]
    loader = DataLoader(X, Y, seed=5, **settings)
    first = [x[:, 0].tolist() for x, _ in islice(loader, taken)]
    loader.close()
    other = DataLoader(X, Y, seed=6, **settings)
    other.load_state_dict(loader.state_dict())
    assert first + seen(other) == expected[:4]
    assert seen(other) == expected[4:]


def test_a_loader_refuses_the_state_of_other_data() -> None:
    with pytest.raises(SettingError, match="rows 9, this loader has 10"):
        DataLoader(X, Y).load_state_dict(DataLoader(X[1:], Y[1:]).state_dict())
    with pytest.raises(SettingError, match="batch_size 3, this loader has 32"):
        DataLoader(X, Y).load_state_dict(DataLoader(X, Y, batch_size=3).state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"X": X, "y": Y[1:]}, DataError, r"unequal numbers of rows: X has 10, y has 9"),
        ({"X": {"a": X, "b": X[1:]}}, DataError, r"X\['a'\] has 10, X\['b'\] has 9"),
        ({"X": X[:0]}, DataError, "empty"),
        (
            {"X": X, "batch_size": 11, "drop_last": True},
            DataError,
            "10 rows are fewer than batch_size=11",
        ),
        ({"X": X, "sample_weight": W}, DataError, "without labels"),
        ({"X": X, "batch_size": -1}, SettingError, "batch_size is at least 1, got -1"),
        (
            {"X": X, "prefetch": -1},
            SettingError,
            "prefetch is a number of batches, 0 or more, got -1",
        ),
        ({"X": ["a", "b"]}, DataError, "X has element type <U1"),
    ],
)
def test_a_loader_checks_its_data_when_it_is_made(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DataLoader(**arguments)


# ---------------------------------------------------------------------- the background thread


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "onnxfit prefetch"]


def test_the_background_thread_ends_with_the_pass_with_close_and_when_a_pass_is_left() -> None:
    loader = DataLoader(X, Y, batch_size=1, prefetch=2)
    list(loader)
    assert not threads()
    running = iter(loader)
    next(running)
    assert threads()
    loader.close()
    assert not threads()
    data = make(DataLoader(X, Y, batch_size=1, prefetch=2))
    first, second = data.batches(0), data.batches(0)
    next(first), next(second)
    assert len(threads()) == 2
    data.close()
    assert not threads()
    with make(DataLoader(X, Y, batch_size=1, prefetch=2)) as data:
        for _ in data.batches(0):
            break
    assert not threads()


def test_the_thread_is_never_further_ahead_than_told() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    ahead = PrefetchIterator(numbers(), 3)
    for taken in range(10):
        assert next(ahead) == taken
        assert len(made) <= taken + 1 + 3
    assert next(ahead, None) is None
    assert next(ahead, None) is None


def test_what_goes_wrong_in_the_background_is_raised_in_the_loop_with_its_traceback() -> None:
    class Failing(Source):
        purpose = "training"

        def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
            yield from make(X, Y).batches(0)
            raise self.deep_inside()

        def deep_inside(self) -> Exception:
            raise OSError("the disk is gone")

    data = PrefetchedSource(Failing(), 8)
    batches = data.batches(0)
    assert [next(batches).rows for _ in range(3)] == [4, 4, 2], "what was ready before is not lost"
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)
    assert any(
        frame.name == "deep_inside" for frame in traceback.extract_tb(caught.value.__traceback__)
    )
    assert not threads()


# ---------------------------------------------------------------------- torch


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_torch_data() -> None:
    torch = pytest.importorskip("torch")
    x, y, w = (torch.from_numpy(array) for array in (X, Y, W))
    dataset = torch.utils.data.TensorDataset(x, y, w)
    expected = whole(make(X, Y, W))
    loader = torch.utils.data.DataLoader(dataset, batch_size=SIZE)
    data = make(loader)
    assert (data.steps, data.batch_size, data.re_iterable) == (3, SIZE, True)
    for _ in range(2):
        np.testing.assert_equal(whole(data), expected)
    np.testing.assert_equal(whole(make(x, y, w)), expected)
    assert list(whole(make(loader, targets={}, purpose="prediction"))) == ["x"]
    with pytest.raises(
        DataError, match=r"torch Dataset \(TensorDataset\).*torch.utils.data.DataLoader"
    ):
        make(dataset)
    with pytest.raises(DataError, match="requires grad"):
        make(x.clone().requires_grad_(), y)

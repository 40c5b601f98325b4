"""Laws of every source: whatever holds the rows, the same batches come out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxfit
from onnxfit.data import Loader, permutation
from onnxfit.data.source import source_classes
from onnxfit.errors import SettingError
from tests.data.files import FILE_KINDS, archive, file_kinds
from tests.data.kinds import KINDS, ROWS, SIZE, W, X, Y, kinds, make, threads, three_batches, whole
from tests.models import linear


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "generator"])
def test_everything_else_can_be_passed_over_again(kind: str) -> None:
    with make(*KINDS[kind]()) as data:
        assert data.re_iterable
        data.require_re_iterable(10)
        np.testing.assert_equal(whole(data, 0), whole(data, 0))


@file_kinds
def test_files_give_the_batches_of_arrays(kind: str, tmp_path: Path) -> None:
    with make(*FILE_KINDS[kind](tmp_path)) as data:
        assert (data.rows, data.steps, data.batch_size, data.re_iterable) == (ROWS, 3, SIZE, True)
        for _ in range(2):
            batches = list(data.batches(0))
            assert [batch.rows for batch in batches] == [4, 4, 2]
            for batch, (x, y, w) in zip(batches, three_batches()):
                arrays = batch.arrays()
                buffers = {name: np.zeros_like(array) for name, array in arrays.items()}
                batch.write(buffers)
                for name, expected in (("x", x), ("y_true/out", y), ("sample_weight", w)):
                    np.testing.assert_array_equal(arrays.pop(name), expected, strict=True)
                    np.testing.assert_array_equal(buffers[name], expected, strict=True)
                assert not arrays
            assert batches[0].signature == batches[1].signature != batches[2].signature
    assert not threads()


@file_kinds
def test_skipping_batches_of_files_is_leaving_out_the_first(kind: str, tmp_path: Path) -> None:
    given = FILE_KINDS[kind](tmp_path)
    if isinstance(given[0], Loader):
        given[0].shuffle = True
    with make(*given, shuffle=True) as data:
        full = [batch.arrays() for batch in data.batches(3)]
        for skip in (0, 1, 2, 3):
            np.testing.assert_equal(
                [batch.arrays() for batch in data.batches(3, skip)], full[skip:]
            )


@file_kinds
def test_files_are_predicted_in_their_order(kind: str, tmp_path: Path) -> None:
    given = FILE_KINDS[kind](tmp_path)
    if isinstance(given[0], Loader):
        given[0].shuffle = True
    with make(given[0], targets={}, purpose="prediction") as data:
        arrays = whole(data)
    np.testing.assert_array_equal(arrays.pop("x"), X)
    assert not arrays


@pytest.mark.parametrize("kind", ["paths", "archive", "parquet", "arrow"])
def test_weights_trained_on_files_are_those_trained_on_arrays(kind: str, tmp_path: Path) -> None:
    def trained(*data: Any) -> np.ndarray:
        trainer = onnxfit.Trainer(linear(2), loss="mse", optimizer="sgd", seed=1)
        trainer.fit(*data, epochs=2, batch_size=SIZE, shuffle=False, verbose=0)
        return trainer.get_weights()["w"]

    given = FILE_KINDS[kind](tmp_path)
    if kind == "archive":
        given = (archive(tmp_path / "named.npz", x=X, y=Y, sample_weight=W),)
    np.testing.assert_array_equal(trained(*given), trained(X, Y, W))


# ---------------------------------------------------------------------- a source in one file

RECORDS = """
from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxfit.data.batch import Batch
from onnxfit.data.source import Batching, RowSource

__all__ = ["RecordSource", "Records"]


class Records:
    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.passes: list[list[int]] = []


class RecordSource(RowSource):
    def __init__(self, adapter: Any, data: Records, batching: Batching) -> None:
        super().__init__(adapter, len(data.rows), batching)
        self.data = data

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return isinstance(data, Records)

    @classmethod
    def from_data(cls, adapter: Any, data: Any, batching: Batching) -> RowSource:
        return cls(adapter, data, batching)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        self.data.passes.append([])
        for index in self.indices(epoch, skip):
            chosen = [self.data.rows[row] for row in np.arange(self.rows)[index]]
            self.data.passes[-1] += [row["number"] for row in chosen]
            yield self.adapter.batch(
                ([row["x"] for row in chosen], [row["y"] for row in chosen])
            )
"""


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """One more file in the package, and a function that makes data for the source in it."""
    (tmp_path / "records.py").write_text(RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr(onnxfit.data, "__path__", [*onnxfit.data.__path__, str(tmp_path)])
        source_classes.cache_clear()
        module = importlib.import_module("onnxfit.data.records")
        rows = [{"number": i, "x": X[i].tolist(), "y": Y[i].tolist()} for i in range(ROWS)]
        yield lambda: module.Records(rows)
    source_classes.cache_clear()
    del sys.modules["onnxfit.data.records"]
    del onnxfit.data.records


def test_a_source_is_found_by_the_all_of_its_module(records: Callable[[], Any]) -> None:
    names = [source.__name__ for source in source_classes()]
    assert {"RecordSource", "ArraySource", "FunctionSource"} <= {*names}
    assert names[-1] == "FunctionSource", "anything that can be called is asked for last"
    np.testing.assert_array_equal(whole(make(records()))["x"], X)
    with pytest.raises(SettingError, match=r"Records returns batches.*Remove the argument y"):
        make(records(), Y)


def test_a_source_in_one_file_obeys_the_laws(records: Callable[[], Any]) -> None:
    with make(records(), shuffle=True, seed=3) as data:
        for epoch in range(3):
            arrays = [batch.arrays() for batch in data.batches(epoch)]
            rows = np.concatenate([batch["x"] for batch in arrays])
            np.testing.assert_array_equal(rows, X[permutation(3, epoch, ROWS)])
            for skip in range(1, 4):
                rest = [batch.arrays() for batch in data.batches(epoch, skip)]
                np.testing.assert_equal(rest, arrays[skip:])
    with make(records(), shuffle=True, seed=3) as data:
        again = np.concatenate([batch.arrays()["x"] for batch in data.batches(2)])
        np.testing.assert_array_equal(again, rows)
        smaller = data.with_batch_size(3, drop_last=True)
        assert [batch.rows for batch in smaller.batches(0)] == [3, 3, 3]
    with make(records(), shuffle=True, seed=3).shard(1, 3) as data:  # no line of the source for it
        shares = [batch.arrays()["x"] for batch in data.batches(2)]
    for share, whole_batch in zip(shares, np.split(rows, [SIZE, 2 * SIZE])):
        np.testing.assert_array_equal(share, np.array_split(whole_batch, 3)[1])


class StopAt(onnxfit.callbacks.Callback):
    """Saves the trainer after a batch, and goes no further."""

    def __init__(self, path: Path, epoch: int, batch: int) -> None:
        self.path = path
        self.at = (epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if (self.trainer.epoch, batch) == self.at:
            self.trainer.save(self.path)
            raise KeyboardInterrupt


def test_fit_trains_on_a_source_in_one_file_and_resumes_in_mid_epoch(
    records: Callable[[], Any], tmp_path: Path
) -> None:
    def trainer() -> onnxfit.Trainer:
        return onnxfit.Trainer(linear(2), loss="mse", optimizer=0.01, seed=5)

    def weights(trained: onnxfit.Trainer) -> np.ndarray:
        return trained.get_weights()["w"]

    data = records()
    uninterrupted = trainer()
    uninterrupted.fit(data, epochs=3, batch_size=SIZE, verbose=0)
    assert [sorted(numbers) for numbers in data.passes] == [list(range(ROWS))] * 3
    assert len({tuple(numbers) for numbers in data.passes}) == 3
    arrays = trainer()
    arrays.fit(X, Y, epochs=3, batch_size=SIZE, verbose=0)
    np.testing.assert_array_equal(weights(uninterrupted), weights(arrays))

    stop = StopAt(tmp_path / "stopped", 1, 1)
    with pytest.raises(KeyboardInterrupt):
        trainer().fit(records(), epochs=3, batch_size=SIZE, callbacks=[stop], verbose=0)
    resumed = onnxfit.Trainer.load(tmp_path / "stopped")
    rest = records()
    resumed.fit(rest, epochs=3, batch_size=SIZE, verbose=0)
    assert rest.passes == [data.passes[1][2 * SIZE :], data.passes[2]]
    np.testing.assert_array_equal(weights(resumed), weights(uninterrupted))

"""Shares of batches: of every kind of data, the ranks together get the batches of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfit.data import (
    Batch,
    Bucket,
    DataAdapter,
    DataLoader,
    ImageFolder,
    Loader,
    Pad,
    Prefetch,
    Source,
    validation_split,
)
from onnxfit.data.known import ALL_ROWS, BatchPlanCache
from onnxfit.data.share import Share
from onnxfit.errors import DataError, SettingError
from tests.data.files import FILE_KINDS, file_kinds
from tests.data.kinds import (
    FIXED,
    INPUTS,
    KINDS,
    NAMED,
    OUT,
    ROWS,
    SIZE,
    Columns,
    Iterable,
    Numbered,
    X,
    Y,
    make,
    spec,
    threads,
    three_batches,
)

SIZES = (1, 2, 3, 5)
REFUSED = {
    "iterable": "an iterable of type Iterable",
    "iterable of lists": "an iterable",
    "iterable of nested dicts": "an iterable",
    "function": "a function",
    "generator function": "a function",
    "generator": "an iterator",
    "prefetched function": "a function",
    "streamed columns": "a streamed dataset",
}  # fmt: skip


def check_shares(source: Source, epoch: int = 3, sizes: tuple[int, ...] = SIZES) -> None:
    """The shares of all ranks make up the batches of one process, from any batch on."""
    for skip in (0, 2):
        expected = [(batch.rows, batch.arrays()) for batch in source.batches(epoch, skip)]
        for size in sizes:
            shards = [source.shard(rank, size) for rank in range(size)]
            for shard in shards:
                assert (shard.rows, shard.steps) == (source.rows, source.steps)
                assert (shard.batch_size, shard.purpose) == (source.batch_size, source.purpose)
                assert json.dumps(shard.fingerprint()) == json.dumps(source.fingerprint())
            shares = [list(shard.batches(epoch, skip)) for shard in shards]
            assert {len(batches) for batches in shares} == {len(expected)}
            for number, (rows, arrays) in enumerate(expected):
                check_batch([batches[number] for batches in shares], rows, arrays)


def check_batch(parts: list[Batch], rows: int, arrays: dict[str, np.ndarray]) -> None:
    """The parts of one batch are those of np.array_split, and can be written."""
    size = len(parts)
    counts = [len(part) for part in np.array_split(np.arange(rows), size)]
    assert [part.rows for part in parts] == counts
    assert {part.whole_rows for part in parts} == {rows if size > 1 else None}
    for name, array in arrays.items():
        shown = [part.arrays()[name] for part in parts]
        assert {part.shape[1:] for part in shown} == {array.shape[1:]}
        np.testing.assert_array_equal(np.concatenate(shown), array, strict=True)
        for part, own in zip(parts, shown):
            buffers = {name: np.zeros_like(own)}
            part.write(buffers)
            np.testing.assert_array_equal(buffers[name], own, strict=True)
    for part in parts:
        assert (part.signature == parts[0].signature) == (part.rows == parts[0].rows)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_ranks_share_the_batches_of_one_process(kind: str, shuffle: bool) -> None:
    data = KINDS[kind]()
    if isinstance(data[0], Loader):
        data[0].shuffle = shuffle
    with make(*data, shuffle=shuffle, seed=5) as source:
        check_shares(source)
    assert not threads()


@pytest.mark.parametrize("shuffle", [False, True])
@file_kinds
def test_ranks_share_the_rows_of_files(kind: str, shuffle: bool, tmp_path: Path) -> None:
    data = FILE_KINDS[kind](tmp_path)
    if isinstance(data[0], Loader):
        data[0].shuffle = shuffle
    with make(*data, shuffle=shuffle, seed=5) as source:
        check_shares(source, sizes=(2, 5))


@pytest.mark.parametrize("kind", REFUSED)
def test_data_that_may_differ_between_ranks_is_refused(kind: str) -> None:
    source = make(*KINDS[kind]())
    assert source.shard(0, 1) is source
    with pytest.raises(DataError) as error:
        source.shard(0, 2)
    message = str(error.value)
    assert f"The training data is {REFUSED[kind]}" in message
    assert "cannot be divided among 2 ranks" in message
    assert "distribute=None" in message
    assert len(message.splitlines()) <= 4


# ---------------------------------------------------------------------- own rows only


def test_a_rank_reads_only_its_rows_of_a_mapped_file(tmp_path: Path) -> None:
    source = make(*FILE_KINDS["maps"](tmp_path), shuffle=True).shard(1, 2)
    selected = []
    inner = source._inner  # type: ignore[attr-defined]
    select = inner._select
    inner._select = lambda index: selected.append(len(index)) or select(index)
    assert [batch.rows for batch in source.batches(0)] == [2, 2, 1]
    assert selected == [2, 2, 1]


def test_a_rank_selects_only_its_rows_of_a_dataset() -> None:
    asked: list[int] = []

    class Asked(Columns):
        def with_format(self, kind: str) -> Asked:
            return Asked(self.columns_, told=True)

        def __getitem__(self, rows: slice | list[int]) -> dict[str, np.ndarray]:
            asked.append(len(np.arange(ROWS)[rows]))
            return super().__getitem__(rows)

    shard = make(Asked(NAMED), shuffle=True).shard(2, 3)
    assert [batch.rows for batch in shard.batches(0)] == [1, 1, 0]
    assert asked == [1, 1, 1], "a row stands in for none, to make a batch of 0 rows of"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    images = pytest.importorskip("PIL.Image")
    for number in range(ROWS):
        folder = tmp_path / ("cat" if number < 6 else "dog")
        folder.mkdir(exist_ok=True)
        images.new("RGB", (6, 5), (number * 20, 0, 9)).save(folder / f"{number}.png")
    return tmp_path


def test_ranks_share_augmented_images_and_decode_their_own(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def darker(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return (image * rng.uniform(0.5, 1)).astype(np.uint8)

    loader = ImageFolder(pictures, (3, 2), augment=[darker], batch_size=4, prefetch=0)
    inputs = [spec("x", "N", 3, 3, 2)]
    with make(loader, inputs=inputs, seed=7) as source:
        check_shares(source, sizes=(2, 3))
        decoded: list[Path] = []
        decode = ImageFolder._decode
        monkeypatch.setattr(
            ImageFolder, "_decode", lambda self, path: decoded.append(path) or decode(self, path)
        )
        list(source.shard(1, 2).batches(0))
    assert len(decoded) == 5
    with make(loader, inputs=inputs, purpose="evaluation") as source:
        check_shares(source, sizes=(2,))


LENGTHS = [3, 7, 1, 5, 2, 6, 4, 7, 2, 1]
TEXTS = [[1 + i % 5 for i in range(length)] for length in LENGTHS]
WEIGHTS = [[1.0] * length for length in LENGTHS]
TOKENS = [
    spec("input_ids", "N", "T", dtype="int64"),
    spec("attention_mask", "N", "T", dtype="int64"),
]


class AnyLabels(type(OUT["out"])):  # type: ignore[misc]
    def prepare(self, y: np.ndarray) -> np.ndarray:
        return y


@pytest.mark.parametrize("purpose", ["training", "evaluation"])
@pytest.mark.parametrize(
    "loader",
    [
        Pad(TEXTS, TEXTS, WEIGHTS, batch_size=4),
        Pad(TEXTS, TEXTS, batch_size=4, pad_to_multiple_of=4, prefetch=1),
        Bucket(TEXTS, TEXTS, WEIGHTS, batch_size=3, pool=2),
        Bucket([{"input_ids": t, "labels": t} for t in TEXTS], batch_size=4),
    ],
)
def test_ranks_pad_to_the_length_of_the_whole_batch(loader: Loader, purpose: str) -> None:
    with make(loader, inputs=TOKENS, targets={"out": AnyLabels()}, purpose=purpose) as source:
        check_shares(source)


class Words(Loader):
    """A loader of a user's own, whose batches have as many rows as they like."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(ROWS, SIZE, True, None, False, settings.get("prefetch", 0))

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        for start, stop in [(0, 3), (3, 9), (9, 10)][skip:]:
            yield X[start:stop] + epoch, Y[start:stop]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_ranks_share_the_batches_of_a_users_loader(prefetch: int) -> None:
    with make(Words(prefetch=prefetch), shuffle=True) as source:
        check_shares(source)


def test_a_subclass_that_makes_whole_batches_is_cut(pictures: Path) -> None:
    class Whole(ImageFolder):
        def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
            for i in range(skip, 3):
                yield np.full((min(4, 10 - 4 * i), 3, 3, 2), i, np.float32), Y[4 * i : 4 * i + 4]

    with make(Whole(pictures, (3, 2), batch_size=4, prefetch=0), inputs=[spec("x", "N", 3, 3, 2)]) as source:  # fmt: skip
        check_shares(source, sizes=(2, 3))


def test_ranks_share_single_batches() -> None:
    known = BatchPlanCache(DataAdapter(INPUTS, OUT))
    for _ in range(2):  # the second one is known
        source = known.source(X, Y)
        check_batches = [list(source.shard(rank, 3).batches(0)) for rank in range(3)]
        check_batch([b for (b,) in check_batches], ROWS, next(source.batches(0)).arrays())
        assert source.shard(2, 3).fingerprint() == source.fingerprint()
    assert len(list(make(X, Y, batch_size=ALL_ROWS).shard(1, 2).batches(0))) == 1


def test_a_share_takes_another_batch_size() -> None:
    for data in (
        (X, Y),
        (DataLoader(X, Y, shuffle=False, prefetch=1),),
        (Columns({"x": X, "y": Y}),),
    ):
        with make(*data, batch_size=2) as source:
            sharded = source.shard(1, 2).with_batch_size(6, drop_last=True)
            (batch,) = sharded.batches(0)
        assert (sharded.is_sharded, sharded.batch_size, sharded.steps) == (True, 6, 1)
        assert (batch.rows, batch.whole_rows) == (3, 6)
        np.testing.assert_array_equal(batch.arrays()["x"], X[3:6])


# ---------------------------------------------------------------------- a fixed batch dimension


TWO = [spec("x", 2, 2)]


@pytest.mark.parametrize("data", [(X[:8], Y[:8]), (DataLoader(X, Y, batch_size=4, drop_last=True),), (three_batches()[:2],)])  # fmt: skip
def test_each_share_has_the_rows_of_a_fixed_batch_dimension(data: tuple[Any, ...]) -> None:
    source = make(*data, inputs=TWO, ranks=2)
    for rank in (0, 1):
        assert [batch.rows for batch in source.shard(rank, 2).batches(0)] == [2, 2]


def test_batches_that_do_not_fill_the_shares_are_refused() -> None:
    columns = Columns({"x": X, "y": Y})
    needs = r"every batch needs 4 rows \(2 for each of 2 ranks\), but got batches of {} rows from 10 rows"
    with pytest.raises(
        DataError, match=needs.format(2) + ".*Pass batch_size=4, and drop the last 2 rows"
    ):
        make(columns, inputs=TWO, ranks=2, batch_size=2)
    for data in ((X, Y), (columns,)):  # adapters that were not told of the ranks
        source = make(*data, inputs=TWO, batch_size=2)
        with pytest.raises(DataError, match=needs.format(2)):
            source.shard(0, 2)
    with pytest.raises(DataError, match=r"has only 3 rows, but every batch needs 4 \(2 for"):
        make(X[:3], Y[:3], inputs=TWO, ranks=2)
    numbered = make(Numbered(), inputs=TWO, ranks=2).shard(1, 2)
    with pytest.raises(DataError, match=r"In batch 2 .*this batch has 2 rows\. Pass batches of 4 rows \(2 for each of 2 ranks\)"):  # fmt: skip
        list(numbered.batches(0))


def test_single_batches_fill_a_fixed_batch_dimension() -> None:
    known = BatchPlanCache(DataAdapter(FIXED, OUT, ranks=2))
    for _ in range(2):
        (batch,) = known.source(X[:8], Y[:8]).shard(1, 2).batches(0)
        assert (batch.rows, batch.whole_rows) == (4, 8)
    alone = BatchPlanCache(DataAdapter(FIXED, OUT))
    for _ in range(2):
        with pytest.raises(DataError, match="but every batch needs 8"):
            alone.source(X[:4], Y[:4]).shard(1, 2)


# ---------------------------------------------------------------------- data that shares itself out


class Own(Iterable):
    """Batches by iteration, of which each rank gets its own."""

    def shard(self, rank: int, size: int) -> list[Any]:
        return [(x[rank::size], y[rank::size]) for x, y, _ in three_batches()]


class OwnFunction(Own):
    __iter__ = None  # type: ignore[assignment]

    def __call__(self) -> Iterator[Any]:
        return iter(three_batches())


class OwnWords(Words):
    def shard(self, rank: int, size: int) -> Any:
        return lambda: iter(Own([]).shard(rank, size))


OWN: dict[str, Callable[[], Any]] = {
    "iterable": lambda: Own([]),
    "function": lambda: OwnFunction([]),
    "prefetched": lambda: Prefetch(Own([])),
    "loader": OwnWords,
    "prefetching loader": lambda: OwnWords(prefetch=1),
}


@pytest.mark.parametrize("kind", OWN)
def test_data_may_share_itself_out(kind: str) -> None:
    with make(OWN[kind]()) as source:
        sharded = source.shard(1, 2)
        batches = list(sharded.batches(0, skip=1))
    assert [(batch.rows, batch.whole_rows) for batch in batches] == [(2, 4), (1, 2)]
    np.testing.assert_array_equal(batches[0].arrays()["x"], X[5:8:2])
    assert sharded.is_sharded
    assert json.dumps(sharded.fingerprint())


def test_a_fixed_batch_dimension_is_that_of_a_rank_s_own_batches() -> None:
    sharded = make(Own([]), inputs=[spec("x", 2, 2)], ranks=2).shard(0, 2)
    with pytest.raises(
        DataError, match=r"In batch 2 .*this batch has 1 rows\. Pass batches of 2 rows,"
    ):
        list(sharded.batches(0))


def test_a_method_shard_of_another_meaning_is_refused() -> None:
    class Foreign(Iterable):
        def shard(self, num_shards: int, index: int) -> Any:
            return self

    class Arrays(Iterable):
        def shard(self, rank: int, size: int) -> Any:
            return X

    with pytest.raises(DataError, match=r"Foreign\.shard .*take.*\(num_shards: 'int', index: 'int'\)"):  # fmt: skip
        make(Foreign([])).shard(0, 2)
    with pytest.raises(
        DataError,
        match=r"Arrays\.shard .*returned an object of type ndarray\. Expected the batches",
    ):
        make(Arrays([])).shard(0, 2)


# ---------------------------------------------------------------------- ranks and their parts


@given(rows=st.integers(0, 40), size=st.integers(1, 12), start=st.integers(0, 9))
@settings(max_examples=50)
def test_parts_are_those_of_array_split(rows: int, size: int, start: int) -> None:
    numbers = np.arange(start, start + rows)
    for rank, part in enumerate(np.array_split(numbers, size)):
        share = Share(rank, size)
        first, last = share.bounds(rows)
        np.testing.assert_array_equal(numbers[first:last], part)
        if rows:
            stand_in = part if len(part) else numbers[:1]
            index = share.select(slice(start, start + rows))
            np.testing.assert_array_equal(np.arange(start + rows)[index], stand_in)
            np.testing.assert_array_equal(share.select(numbers), stand_in)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0.5, 2), (None, 1)])
def test_ranks_are_below_their_number(rank: Any, size: Any) -> None:
    with pytest.raises(SettingError, match=r"0 <= rank < size"):
        make(X, Y).shard(rank, size)


def test_a_share_is_not_shared_again() -> None:
    for data in ((X, Y), (Prefetch(three_batches()),)):
        with (
            make(*data).shard(0, 2) as sharded,
            pytest.raises(SettingError, match=r"already belongs to one rank and cannot be divided"),
        ):
            sharded.shard(0, 2)


def test_a_source_that_does_not_say_how_is_refused() -> None:
    class Plain(Source):
        purpose = "training"

        def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
            return iter(())

    with pytest.raises(DataError, match=r"of type Plain.*2 ranks.*\n.*shard\(rank, size\)"):
        Plain().shard(0, 2)


def test_data_is_divided_for_validation_before_it_is_shared_out() -> None:
    texts = Pad(TEXTS, batch_size=3)
    for parts in (validation_split(X, Y, None, 0.3), validation_split(texts, None, None, 0.3)):
        for data, rows in zip(parts, (7, 3)):
            inputs = TOKENS if isinstance(data[0], Pad) else INPUTS
            with make(*data, inputs=inputs, targets={} if inputs is TOKENS else OUT) as source:
                assert source.rows == rows
                check_shares(source, sizes=(2,))

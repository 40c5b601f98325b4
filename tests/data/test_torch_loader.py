"""DataLoaders of torch that several ranks share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfit.data import Prefetch, permutation
from onnxfit.errors import DataError
from tests.data.kinds import ROWS, SIZE, X, Y, make, spec, whole
from tests.data.test_share import check_shares

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
data = torch.utils.data


class Rows(data.Dataset):  # type: ignore[misc]
    """The ten rows, and a list of those that were fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        self.fetched.append(row)
        return torch.from_numpy(X[row]), torch.from_numpy(Y[row])


def collate(rows: list[Any]) -> Any:
    x, y = zip(*rows)
    return torch.stack(x) + 1, torch.stack(y)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
def test_ranks_share_a_loader_in_order(prefetch: bool, drop_last: bool) -> None:
    loader = data.DataLoader(Rows(), batch_size=SIZE, drop_last=drop_last, collate_fn=collate)
    with make(Prefetch(loader) if prefetch else loader) as source:
        expected = whole(source)
        np.testing.assert_array_equal(expected["x"], X[: 8 if drop_last else ROWS] + 1)
        shards = [source.shard(rank, 3) for rank in range(3)]
        for skip in (0, 1):
            shares = [list(shard.batches(0, skip)) for shard in shards]
            joined = [part.arrays()["x"] for parts in zip(*shares) for part in parts]
            np.testing.assert_array_equal(np.concatenate(joined), expected["x"][skip * SIZE :])
            assert {p.whole_rows for p in shares[0]} == ({4} if drop_last else {4, 2})
        assert {shard.steps for shard in shards} == {source.steps}


@pytest.mark.parametrize("purpose", ["training", "evaluation", "prediction"])
def test_a_shuffled_loader_gets_the_order_of_onnxfit(purpose: str) -> None:
    rows = Rows()
    loader = data.DataLoader(rows, batch_size=SIZE, shuffle=True)
    source = make(loader, seed=9, purpose=purpose)
    order = permutation(9, 2, ROWS) if purpose == "training" else np.arange(ROWS)
    shards = [source.shard(rank, 2) for rank in range(2)]
    parts = [part.arrays()["x"] for batch in zip(*(s.batches(2) for s in shards)) for part in batch]
    np.testing.assert_array_equal(np.concatenate(parts), X[order])
    assert sorted(rows.fetched) == list(range(ROWS)), "each row is fetched by one rank"


def test_an_epoch_begins_while_another_runs() -> None:
    shard = make(data.DataLoader(Rows(), batch_size=SIZE, shuffle=True)).shard(0, 2)
    expected = [batch.arrays()["x"] for batch in shard.batches(1)]
    first = shard.batches(1)
    found = [next(first).arrays()["x"]]
    next(shard.batches(2))
    np.testing.assert_equal(found + [batch.arrays()["x"] for batch in first], expected)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_workers_fetch_the_rows_of_a_rank() -> None:
    loader = data.DataLoader(Rows(), batch_size=SIZE, num_workers=1, persistent_workers=True)
    shard = make(loader).shard(1, 2)
    for _ in range(2):
        np.testing.assert_array_equal(whole(shard)["x"], X[[2, 3, 6, 7, 9]])


def test_a_distributed_sampler_has_the_rows_of_its_rank() -> None:
    rows = Rows()
    samplers = [data.DistributedSampler(rows, 2, rank, seed=4) for rank in range(2)]
    shards = [
        make(data.DataLoader(rows, batch_size=2, sampler=sampler)).shard(rank, 2)
        for rank, sampler in enumerate(samplers)
    ]
    batches = [list(shard.batches(3)) for shard in shards]
    assert [(b.rows, b.whole_rows) for b in batches[0]] == [(2, 4), (2, 4), (1, 2)]
    assert [(shard.steps, shard.batch_size) for shard in shards] == [(3, 4)] * 2
    sampler = data.DistributedSampler(rows, 2, 1, seed=4)
    sampler.set_epoch(3)
    expected = list(sampler)
    np.testing.assert_array_equal(whole(shards[1], 3)["x"], X[expected])
    assert expected != list(range(1, ROWS, 2))
    assert shards[0].fingerprint() == shards[1].fingerprint()


def test_a_distributed_sampler_of_other_ranks_is_refused() -> None:
    rows = Rows()
    loader = data.DataLoader(rows, batch_size=2, sampler=data.DistributedSampler(rows, 4, 1))
    with pytest.raises(
        DataError,
        match=r"rows of rank 1 of 4, but this process is rank 1 of 2\. Pass num_replicas=2, rank=1\.",
    ):
        make(loader).shard(1, 2)
    with pytest.raises(DataError, match=r"rows of rank 1 of 4, but this process is rank 3 of 4\."):
        make(loader).shard(3, 4)
    with pytest.raises(
        DataError, match=r"changes the order.*Pass a DataLoader without this sampler"
    ):
        make(loader, targets={}, purpose="prediction").shard(1, 4)


class Streamed(data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter([])


class Overridden(data.DataLoader):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return super().__iter__()


class Halved(data.SequentialSampler):  # type: ignore[misc]
    pass


REFUSED = {
    "of an IterableDataset": lambda: data.DataLoader(Streamed(), batch_size=2),
    "with an overridden method __iter__": lambda: Overridden(Rows(), batch_size=2),
    "with batch_size=None": lambda: data.DataLoader(Rows(), batch_size=None),
    "with the batch sampler list": lambda: data.DataLoader(Rows(), batch_sampler=[[0, 1], [2]]),
    "with the sampler Halved": lambda: data.DataLoader(Rows(), sampler=Halved(Rows())),
    "with the sampler list": lambda: data.DataLoader(Rows(), sampler=[1, 2]),
    "with a RandomSampler that draws only some rows": lambda: data.DataLoader(
        Rows(), sampler=data.RandomSampler(Rows(), replacement=True)
    ),
    "with the sampler WeightedRandomSampler": lambda: data.DataLoader(
        Rows(), sampler=data.WeightedRandomSampler([0.1] * ROWS, ROWS)
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_order_is_refused(kind: str) -> None:
    with pytest.raises(DataError, match=f"{kind}, which cannot be divided among 2 ranks") as error:
        make(REFUSED[kind]()).shard(0, 2)
    assert "DistributedSampler" in str(error.value)
    assert len(str(error.value).splitlines()) <= 4


def test_a_loader_may_share_itself_out() -> None:
    class Own(data.DataLoader):  # type: ignore[misc]
        def shard(self, rank: int, size: int) -> Any:
            return data.DataLoader(data.Subset(self.dataset, range(rank, ROWS, size)), batch_size=2)

    shard = make(Own(Rows(), batch_size=SIZE, sampler=[3, 2])).shard(1, 2)
    assert [(b.rows, b.whole_rows) for b in shard.batches(0)] == [(2, 4), (2, 4), (1, 2)]


def test_the_shares_of_a_loader_fill_a_fixed_batch_dimension() -> None:
    loader = data.DataLoader(Rows(), batch_size=SIZE, drop_last=True)
    two = [spec("x", 2, 2)]
    assert {b.rows for b in make(loader, inputs=two, ranks=2).shard(0, 2).batches(0)} == {2}
    with pytest.raises(
        DataError, match=r"needs 4 rows \(2 for each of 2 ranks\), but got batches of 5"
    ):
        make(data.DataLoader(Rows(), batch_size=5), inputs=two, ranks=2).shard(0, 2)


def test_tensors_are_shared() -> None:
    check_shares(make(torch.from_numpy(X), torch.from_numpy(Y), shuffle=True), sizes=(3,))

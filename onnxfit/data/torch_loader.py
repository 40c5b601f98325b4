"""DataLoaders of torch, and the rows that each of several ranks draws from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from onnxfit.data.adapter import DataAdapter
from onnxfit.data.share import Share, refusal
from onnxfit.data.source import Batching, RowSource, Source
from onnxfit.data.stream import IterableSource, RankSource, StreamSource
from onnxfit.errors import DataError

__all__ = ["TorchLoaderSource"]

# Settings that the loader of one rank copies from the caller's loader.
SETTINGS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator",
    "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip


class TorchLoaderSource(IterableSource):
    """A `torch.utils.data.DataLoader`.

    A single process iterates it unchanged. With several ranks, each rank fetches only its own rows
    of the dataset. The rows come in the order of the dataset, or, if the loader shuffles, in
    onnxfit's order of the epoch, because torch's random order differs between ranks.
    """

    priority: ClassVar[int] = -35

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return _is_of_torch(data, "DataLoader")

    def _kind(self) -> str:
        return f"a torch {type(self.data).__name__}"

    def _shard_whole(self, share: Share) -> Source:
        loader = self.data
        obstacle = _obstacle(loader)
        if obstacle:
            raise refusal(
                f"{self._kind()} {obstacle}",
                self.purpose,
                share.size,
                "each rank may get different batches",
                "Create the DataLoader from a dataset with an index, with batch_size and shuffle,"
                " or with sampler=torch.utils.data.DistributedSampler(dataset, size, rank); or add"
                " a method shard(rank, size) that returns the batches of that rank",
            )
        sampler = loader.batch_sampler.sampler
        if _is_of_torch(sampler, "DistributedSampler"):
            return self._shard_distributed(sampler, share)
        shuffles = _is_of_torch(sampler, "RandomSampler") and self.purpose == "training"
        seed = self.adapter.seed if shuffles else None
        rows = TorchRowSource(self.adapter.shared_by(share.size), loader, seed)
        return rows._shard_rows(share)

    def _shard_distributed(self, sampler: Any, share: Share) -> Source:
        """Return the source of a loader whose sampler already draws the rows of this rank."""
        if (sampler.num_replicas, sampler.rank) != (share.size, share.rank):
            raise DataError(
                f"The DistributedSampler of the {self.purpose} data draws the rows of rank"
                f" {sampler.rank} of {sampler.num_replicas}, but this process is rank {share.rank}"
                f" of {share.size}. Pass num_replicas={share.size}, rank={share.rank}."
            )
        if self.purpose == "prediction":
            raise DataError(
                "The prediction data comes from a DistributedSampler, which changes the order of"
                " the rows. Pass a DataLoader without this sampler. Each rank then reads its own"
                " rows."
            )
        inner = DistributedLoaderSource(self.adapter.shared_by(1), self.data, None)
        source = RankSource(inner, self, share.size)
        source.batch_size = self.data.batch_sampler.batch_size * share.size
        return source


class DistributedLoaderSource(IterableSource):
    """A DataLoader with a DistributedSampler, whose `set_epoch` determines the order."""

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        self.data.batch_sampler.sampler.set_epoch(epoch)
        return super().items(epoch, skip)


class BatchRows:
    """A batch sampler for torch: lists of row numbers, set before each epoch."""

    batches: tuple[list[int], ...] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class TorchRowSource(RowSource, StreamSource):
    """Rows of the dataset of a torch DataLoader, fetched and collated as that loader does.

    - `seed`: the seed of the order of the rows; None keeps the order.
    """

    def __init__(self, adapter: DataAdapter, loader: Any, seed: int | None) -> None:
        sampler = loader.batch_sampler
        batching = Batching(sampler.batch_size, seed, sampler.drop_last)
        super().__init__(adapter, len(loader.dataset), batching)
        self._batch_rows = BatchRows()
        torch: Any = sys.modules["torch.utils.data"]
        self._loader = torch.DataLoader(
            loader.dataset,
            batch_sampler=self._batch_rows,
            **{name: getattr(loader, name) for name in SETTINGS},
        )

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        rows = np.arange(self.rows)
        self._batch_rows.batches = tuple(
            rows[index].tolist() for index in self.indices(epoch, skip)
        )
        # The iterator has its own list of batches, so that another epoch can begin before it ends.
        return iter(self._loader)


def _obstacle(loader: Any) -> str:
    """Return why ranks cannot each fetch their own rows of a loader, or "" if they can."""
    torch: Any = sys.modules["torch.utils.data"]
    batch_sampler = loader.batch_sampler
    if _is_of_torch(loader.dataset, "IterableDataset"):
        return "of an IterableDataset"
    if type(loader).__iter__ is not torch.DataLoader.__iter__:
        return "with an overridden method __iter__"
    if batch_sampler is None:
        return "with batch_size=None"
    if type(batch_sampler) is not torch.BatchSampler:
        return f"with the batch sampler {type(batch_sampler).__name__}"
    sampler = batch_sampler.sampler
    if _is_of_torch(sampler, "DistributedSampler"):
        return ""
    if type(sampler) not in (torch.SequentialSampler, torch.RandomSampler):
        return f"with the sampler {type(sampler).__name__}"
    draws_some_rows = getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset)
    return f"with a {type(sampler).__name__} that draws only some rows" if draws_some_rows else ""


def _is_of_torch(data: Any, name: str) -> bool:
    """Return whether `data` is an object of torch's class `name`, without importing torch."""
    return any(
        kind.__name__ == name and kind.__module__.startswith("torch.utils.data")
        for kind in type(data).__mro__
    )

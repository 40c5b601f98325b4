"""Hugging Face datasets, whose columns have the names of the model's inputs and labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from onnxfit.data.adapter import DataAdapter
from onnxfit.data.share import Share, refusal
from onnxfit.data.source import Batching, RowSource, Source
from onnxfit.data.stream import StreamSource, iterate_epoch
from onnxfit.data.structure import length_of

__all__ = ["DatasetSource"]


class DatasetSource(RowSource, StreamSource):
    """A `datasets.Dataset`, whose rows are selected by their numbers."""

    priority: ClassVar[int] = -20

    def __init__(self, adapter: DataAdapter, data: Any, batching: Batching) -> None:
        super().__init__(adapter, len(data), batching)
        self._dataset = data

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return hasattr(data, "with_format") and hasattr(data, "iter")

    @classmethod
    def from_data(cls, adapter: DataAdapter, data: Any, batching: Batching) -> Source:
        arrays = data.with_format("numpy")
        if length_of(arrays) is None:
            return IterableDatasetSource(adapter, arrays, batching.batch_size)
        return cls(adapter, arrays, batching)

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        for index in self.indices(epoch, skip):
            yield self._dataset[index if isinstance(index, slice) else index.tolist()]

    def _shard(self, share: Share) -> Source:
        return self._shard_rows(share)


class IterableDatasetSource(StreamSource):
    """A `datasets.IterableDataset`, which determines its own order."""

    def __init__(self, adapter: DataAdapter, data: Any, batch_size: int) -> None:
        self.adapter = adapter
        self.purpose = adapter.purpose
        self.batch_size = batch_size
        self._dataset = data

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        data = self._dataset
        return iterate_epoch(data, data.iter(batch_size=self.batch_size), epoch, skip)

    def _shard(self, share: Share) -> Source:
        raise refusal(
            f"a streamed dataset ({type(self._dataset).__name__})",
            self.purpose,
            share.size,
            "its order may differ between ranks",
            "Pass the dataset without streaming",
        )

"""Data: arrays, loaders and iterables become batches that fit the model's inputs, or one clear
error says why they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfit.data.batch import Batch, Source, Target
from onnxfit.data.feed import DataAdapter
from onnxfit.data.images import ImageFolder
from onnxfit.data.loader import DataLoader, Loader
from onnxfit.data.mapped import is_mapped, opened
from onnxfit.data.memory import ArraySource, validation_split
from onnxfit.data.order import checked_batch_size, permutation
from onnxfit.data.parquet import ParquetLoader
from onnxfit.data.prefetch import Prefetch, PrefetchedSource
from onnxfit.data.stream import loader_source, mapped_source, stream_source
from onnxfit.data.structure import holds_arrays
from onnxfit.data.weights import checked_class_weight
from onnxfit.errors import SettingError
from onnxfit.graph.spec import TensorSpec

__all__ = [
    "Batch",
    "DataLoader",
    "ImageFolder",
    "Loader",
    "ParquetLoader",
    "Prefetch",
    "PrefetchedSource",
    "Source",
    "Target",
    "permutation",
    "source",
    "validation_split",
]


def source(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    inputs: Sequence[TensorSpec],
    targets: Mapping[str, Target],
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool = False,
    class_weight: Mapping[int, float] | None = None,
    what: str = "training",
) -> Source:
    """The batches of whatever a user calls data.

    - arrays, dicts and lists of arrays, pandas, `DataLoader`: cast and checked here, once;
    - `np.memmap`, paths of .npy and .npz files, wherever an array may stand: each batch is read,
      cast and checked when it comes;
    - `ParquetLoader`, `ImageFolder`, HF datasets, objects with `__len__` and `__getitem__` of
      batches, iterables of batches, functions that return an iterator: each batch is cast and
      checked when it comes;
    - `Prefetch` of any that gives batches: the same, in a thread.

    `shuffle` is for the rows of arrays, and for the order of batches that can be had by number (as
    in Keras); iterables have their own. `targets` maps output -> Target, in the model's order.
    `what` is "training", "evaluation" or "prediction", which needs no labels.

    DataError: the data does not fit `inputs` or `targets`. SettingError: settings that exclude each
    other.
    """
    fitted: dict[str, Any] = {
        "inputs": inputs,
        "targets": targets,
        "class_weight": class_weight,
        "what": what,
    }
    if isinstance(x, (Loader, Prefetch)):
        _refuse_beside_batches(x, y, sample_weight)
    if isinstance(x, Prefetch):
        return PrefetchedSource(
            source(x.data, None, None, batch_size=batch_size, shuffle=shuffle, seed=seed, **fitted),
            x.depth,
        )
    feed = DataAdapter(
        tuple(inputs), dict(targets), checked_class_weight(class_weight, targets), what
    )
    if isinstance(x, Loader):
        seed = seed if x.seed is None else x.seed
        mixed = x.shuffle and what == "training"
        if isinstance(x, DataLoader):
            fitted |= {
                "batch_size": x.batch_size,
                "shuffle": mixed,
                "seed": seed,
                "drop_last": x.drop_last,
            }
            made = source(x.X, x.y, x.sample_weight, **fitted)
        else:
            made = loader_source(x, feed, seed if mixed else None)
        return PrefetchedSource(made, x.prefetch) if x.prefetch else made
    batch_size = checked_batch_size(batch_size)
    x, y, sample_weight = opened(x), opened(y), opened(sample_weight)
    if not holds_arrays(x):
        _refuse_beside_batches(x, y, sample_weight)
        return stream_source(x, feed, batch_size, shuffle, seed)
    match = feed.match(x, y, sample_weight)
    if any(is_mapped(value) for _, value in match.leaves()):
        return mapped_source(match, feed, batch_size, shuffle, seed, drop_last)
    return ArraySource(feed.convert(match), feed, batch_size, seed if shuffle else None, drop_last)


def _refuse_beside_batches(data: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise SettingError(
                f"{type(data).__name__} gives batches, which bring their own labels and weights:"
                f" leave out {name}."
            )

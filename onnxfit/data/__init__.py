"""Data: arrays, loaders and iterables become batches that fit the model's inputs.

Data that does not fit is one error, which says why. A class in the `__all__` of a module here is
found by its base: a `Source` makes batches of the data that it accepts, a `Loader` is such data.
"""

from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Batch, Target
from onnxfit.data.images import ImageFolder
from onnxfit.data.loader import DataLoader, Loader
from onnxfit.data.memory import validation_split
from onnxfit.data.order import permutation
from onnxfit.data.parquet import ParquetLoader
from onnxfit.data.prefetch import Prefetch
from onnxfit.data.source import Source

__all__ = [
    "Batch",
    "DataAdapter",
    "DataLoader",
    "ImageFolder",
    "Loader",
    "ParquetLoader",
    "Prefetch",
    "Source",
    "Target",
    "permutation",
    "validation_split",
]

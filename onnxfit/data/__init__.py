"""Data: conversion of arrays, loaders and iterables to batches that fit the model's inputs.

Data that does not fit raises a DataError, which says why.

To add a kind of data, add a module with its classes in `__all__`. `fit` finds each `Source` there,
and asks it which data it accepts. A `Loader` needs no source of its own.
"""

from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Batch, Target
from onnxfit.data.changed import MaskedTokens, Mixup
from onnxfit.data.images import ImageFolder
from onnxfit.data.loader import DataLoader, Loader
from onnxfit.data.memory import validation_split
from onnxfit.data.order import permutation
from onnxfit.data.padding import Bucket, Pad
from onnxfit.data.parquet import ParquetLoader
from onnxfit.data.prefetch import Prefetch
from onnxfit.data.source import Source
from onnxfit.data.text import TextLoader

__all__ = [
    "Batch",
    "Bucket",
    "DataAdapter",
    "DataLoader",
    "ImageFolder",
    "Loader",
    "MaskedTokens",
    "Mixup",
    "Pad",
    "ParquetLoader",
    "Prefetch",
    "Source",
    "Target",
    "TextLoader",
    "permutation",
    "validation_split",
]

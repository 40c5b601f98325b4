"""Edits of a model that keep what it computes: they return a new model."""

from onnxfit.editing.dynamic_batch import dynamic_batch

__all__ = ["dynamic_batch"]

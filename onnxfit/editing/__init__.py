"""Functions that return an edited model."""

from onnxfit.editing.add_biases import add_biases
from onnxfit.editing.add_dropout import add_dropout
from onnxfit.editing.dynamic_batch import dynamic_batch
from onnxfit.editing.replace_head import replace_head
from onnxfit.editing.tie import tie
from onnxfit.editing.to_float32 import to_float32
from onnxfit.editing.untie import untie

__all__ = [
    "add_biases",
    "add_dropout",
    "dynamic_batch",
    "replace_head",
    "tie",
    "to_float32",
    "untie",
]

"""Functions that return an edited model."""

from onnxfit.tools.editing.add_biases import add_biases
from onnxfit.tools.editing.add_dropout import add_dropout
from onnxfit.tools.editing.dynamic_batch import dynamic_batch
from onnxfit.tools.editing.replace_head import replace_head
from onnxfit.tools.editing.tie import tie
from onnxfit.tools.editing.to_float32 import to_float32
from onnxfit.tools.editing.untie import untie

__all__ = [
    "add_biases",
    "add_dropout",
    "dynamic_batch",
    "replace_head",
    "tie",
    "to_float32",
    "untie",
]

"""The tensors that losses train, as initializers of the trained model."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.checks import is_finite
from onnxfit.errors import SettingError
from onnxfit.graph import names, scopes
from onnxfit.graph.model import spec_of
from onnxfit.graph.values import GraphBuilder
from onnxfit.losses import Joint, Loss
from onnxfit.losses.base import loss_name

Array = npt.NDArray[Any]


def add_loss_weights(
    model: ir.Model, loss: Loss, objective: str, reads: Sequence[str], seed: int
) -> dict[str, str]:
    """Add the tensors that a loss trains to a model, and return name -> the output to read.

    - `objective`: the name of the loss beside others; "" for the only loss.
    - `reads`: the outputs that the loss reads. The first gives the tensors their element type.
    - `seed`: decides random initial values, together with the name of the loss.

    SettingError: the model already has a value of such a name, or the loss returns no numbers.
    """
    if not loss.has_weights:
        return {}
    outputs = {value.name or "": value for value in model.graph.outputs}
    specs = [spec_of(outputs[name]) for name in reads]
    dtypes = [spec.dtype for spec in specs if spec.dtype.kind == "f"]
    random = np.random.default_rng([seed % 2**64, zlib.crc32(objective.encode())])
    arrays = loss.initial_weights(specs if isinstance(loss, Joint) else specs[0], random)
    return {
        name: add_initializer(
            model, names.loss_weight(name, objective), _initial_numbers(loss, name, array, dtypes)
        )
        for name, array in arrays.items()
    }


def add_initializer(model: ir.Model, name: str, array: Array) -> str:
    """Add a tensor of a loss to a model, and return the output with which a loss reads it."""
    graph = model.graph
    taken = {value.name for node in graph for value in node.outputs}
    if name in taken or name in graph.initializers or any(v.name == name for v in graph.inputs):
        raise SettingError(
            f"The loss trains a tensor called {name!r}, but the model already has a value of this"
            " name. Rename the tensor in the loss, or the value in the model."
        )
    shape = ir.Shape(array.shape)
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    op = GraphBuilder(graph)
    with op.scope(scopes.LOSS):
        return op.output(names.read(name), op.wrap(value)).name


def loss_weights_of(outputs: Iterable[str]) -> list[str]:
    """Return the tensors that losses train, by the outputs with which losses read them."""
    shown = [names.shown(name) for name in outputs if names.is_read(name)]
    return [name for name in shown if names.is_loss_weight(name)]


def _initial_numbers(loss: Loss, name: str, values: Any, dtypes: Sequence[np.dtype[Any]]) -> Array:
    """Return the initial values of a tensor of a loss in the element type of an output."""
    try:
        array = np.array(values, dtypes[0] if dtypes else np.float32)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if not name or "/" in name or not all(map(is_finite, array.flat)):
        raise SettingError(
            f"{loss_name(loss)} needs initial values for each tensor that it trains: finite numbers"
            f" under a name without '/', got {name!r}: {np.array(values)!r:.60}."
        )
    return array

"""`tie`: share one weight among several layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.graph import protos
from onnxfit.graph.index import tensors_of
from onnxfit.graph.sharing import TIED
from onnxfit.load.constant_nodes import lift_constants, lower_constants
from onnxfit.load.reading import ModelSource, load_model

__all__ = ["tie"]


def tie(model_onnx: ModelSource, pairs: Mapping[str, str]) -> onnx.ModelProto:
    """Return the model with weights replaced by others, so that each pair is trained as one weight.

    This is the inverse of `untie`. It restores sharing that an exporter lost: torch's exporters
    write the last layer of a GPT-2 as a transposed copy of the embedding table. If the shapes of
    two matrices are each other's reverse, or both are square and one is exactly the transpose of
    the other, a Transpose replaces the matrix.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `pairs`: name of an initializer -> name of the initializer that replaces it. The second
      initializer keeps its values; the first is removed.

    ModelError: the model cannot be read. UnknownNameError: the model has no initializer of a name.
    SettingError: element types or shapes do not match, or a replaced weight also replaces another.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (int64[N] x) => (float[N, 3] y)
    ...     <float[3, 2] table = {1, 2, 3, 4, 5, 6}, float[2, 3] head = {1, 3, 5, 2, 4, 6}>
    ...     { h = Gather(table, x) y = MatMul(h, head) }''')
    >>> tied = tie(model, {"head": "table"})
    >>> [t.name for t in tied.graph.initializer], [n.op_type for n in tied.graph.node]
    (['table'], ['Transpose', 'Gather', 'MatMul'])
    """
    if not isinstance(pairs, Mapping) or not all(
        isinstance(name, str) for pair in pairs.items() for name in pair
    ):
        raise SettingError(
            f"pairs must be a dict name -> name of the weight that replaces it, got {pairs!r}."
        )
    model = load_model(model_onnx)
    lift_constants(model)
    tensors = tensors_of(model.graph)
    transposed = {
        name: _is_transposed(tensors, name, other, pairs) for name, other in pairs.items()
    }
    for name, other in pairs.items():
        _read_other(model, name, other, transposed[name])
        protos.set_note(model, other, TIED, "true")
    return lower_constants(model)


def _is_transposed(
    tensors: Mapping[str, onnx.TensorProto], name: str, other: str, pairs: Mapping[str, str]
) -> bool:
    """Return whether `name` becomes the transpose of `other`. SettingError: they do not match."""
    for one in (name, other):
        if one not in tensors:
            raise UnknownNameError("initializer", one, tensors)
    if other in pairs:
        raise SettingError(
            f"{other!r} cannot replace {name!r}, because {other!r} is itself replaced by"
            f" {pairs[other]!r}. Tie both weights to {pairs[other]!r}."
        )
    a, b = tensors[name], tensors[other]
    if a.data_type != b.data_type:
        types = [onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in (a, b)]
        raise SettingError(
            f"{name!r} cannot be tied to {other!r}: their element types are {' and '.join(types)}."
            " Cast one of them first."
        )
    shape, replacing = list(a.dims), list(b.dims)
    if shape == replacing:
        return len(shape) == 2 and shape[0] == shape[1] and _has_transposed_values(a, b)
    if len(shape) == 2 and shape == replacing[::-1]:
        return True
    raise SettingError(
        f"{name!r} cannot be tied to {other!r}: their shapes are {tuple(shape)} and"
        f" {tuple(replacing)}. The shapes must be equal, or one the transpose of the other."
    )


def _has_transposed_values(a: onnx.TensorProto, b: onnx.TensorProto) -> bool:
    x, y = onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b)
    return bool(np.array_equal(x, y.T) and not np.array_equal(x, y))


def _read_other(model: onnx.ModelProto, name: str, other: str, transposed: bool) -> None:
    """Let everything that reads the initializer `name` read `other`."""
    protos.remove_initializer(model, name)
    is_output = any(value.name == name for value in model.graph.output)
    if not transposed and not is_output:
        protos.rename_inputs(model.graph, {name: other})
        return
    unique = protos.unique_name(f"{name}/tied", protos.used_names(model))
    if transposed:
        node = onnx.helper.make_node("Transpose", [other], [name], name=unique, perm=[1, 0])
    else:
        node = onnx.helper.make_node("Identity", [other], [name], name=unique)
    model.graph.node.insert(0, node)

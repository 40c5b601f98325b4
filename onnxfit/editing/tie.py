"""`tie`: one weight for several layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from onnxfit.editing import protos
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.graph.reading import ModelSource, load_model
from onnxfit.graph.sharing import TIED

__all__ = ["tie"]


def tie(model_onnx: ModelSource, pairs: Mapping[str, str]) -> onnx.ModelProto:
    """Return the model with weights replaced by others, so that each pair trains as one weight.

    This is the reverse of `untie`, and restores what an exporter lost: torch's write the last
    layer of a GPT-2 as a transposed copy of the embedding's table. Where the shapes of two
    matrices are each other's reverse, or both are square and one holds exactly the other's
    transposed values, a Transpose takes the place of the replaced matrix.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `pairs`: name of an initializer -> name of the initializer to use in its place. The second one
      keeps its values; the first one is removed.

    Raises ModelError if the model cannot be read, UnknownNameError if it has no initializer of a
    name, and SettingError if element types or shapes do not match, or a weight that is replaced is
    to replace another one.

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
            f"pairs is a dict name -> name of the weight in its place, got {pairs!r}."
        )
    model = load_model(model_onnx)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    transposed = {
        name: _is_transposed(tensors, name, other, pairs) for name, other in pairs.items()
    }
    for name, other in pairs.items():
        _replace(model, name, other, transposed[name])
        protos.set_note(model, other, TIED, "true")
    return model


def _is_transposed(
    tensors: Mapping[str, onnx.TensorProto], name: str, other: str, pairs: Mapping[str, str]
) -> bool:
    """Return whether `name` is to become the transposed `other`; raise if they cannot be tied."""
    for one in (name, other):
        if one not in tensors:
            raise UnknownNameError("initializer", one, tensors)
    if other in pairs:
        raise SettingError(
            f"{other!r} cannot replace {name!r}: it is itself replaced by {pairs[other]!r}. Give"
            f" each weight the one that stays."
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
        f" {tuple(replacing)}. They must be the same, or those of a transposed matrix."
    )


def _has_transposed_values(a: onnx.TensorProto, b: onnx.TensorProto) -> bool:
    x, y = onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b)
    return bool(np.array_equal(x, y.T) and not np.array_equal(x, y))


def _replace(model: onnx.ModelProto, name: str, other: str, transposed: bool) -> None:
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

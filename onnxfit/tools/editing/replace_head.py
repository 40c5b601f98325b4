"""`replace_head`: a new last layer for another number of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.checks import is_integer, shortened
from onnxfit.errors import ModelError, SettingError, UnknownNameError
from onnxfit.graph import protos
from onnxfit.graph.activations import activation_of
from onnxfit.graph.class_names import read_class_names, write_class_names
from onnxfit.graph.model import large_tensors_as_inputs, to_ir
from onnxfit.graph.records import FOLDED_FROM, KIND
from onnxfit.load.constant_nodes import lift_constants, lower_constants
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.tools.editing.constants import (
    Matrix,
    constant_elements,
    integer,
    matrix_of,
    output_channels,
)

__all__ = ["replace_head"]

HEADS = {"Conv", "Gemm", "MatMul"}
# These compute with any number of classes.
KEPT = {
    "ArgMax",
    "AveragePool",
    "Cast",
    "Clip",
    "Dropout",
    "Exp",
    "Flatten",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "Identity",
    "LeakyRelu",
    "Log",
    "LogSoftmax",
    "MaxPool",
    "ReduceMax",
    "ReduceMean",
    "Relu",
    "Reshape",
    "Sigmoid",
    "Softmax",
    "Squeeze",
    "Tanh",
    "TopK",
    "Transpose",
    "Unsqueeze",
}
SCALING = {"Add", "Div", "Mul", "Sub"}  # by one number
MAX_CLASSES = 10**8


@dataclass(frozen=True)
class Head:
    """The last layer of a model: its node, perhaps an Add after it, and its weight and bias.

    `casts` are the Casts between the node and the Add, which Keras's exporter writes.
    """

    layer: ir.Node
    sum: ir.Node | None
    weight: Matrix
    bias: Matrix | None
    classes: int
    casts: tuple[ir.Node, ...] = ()

    @property
    def output(self) -> ir.Value:
        return (self.sum or self.layer).outputs[0]


def replace_head(
    model_onnx: ModelSource,
    classes: int,
    *,
    output: str | None = None,
    keep: bool | Sequence[int] = False,
    seed: int = 0,
) -> onnx.ModelProto:
    r"""Return the model with a new last layer that computes another number of outputs.

    The last layer is a Gemm, a MatMul with or without an Add, or a Conv, as at the end of a
    SqueezeNet. Activations, pooling and Flatten after it are kept, also a softmax that is spelled
    in several operators. The declared shape of the output is updated. The new weights have the
    names of the old weights, unless another layer also reads the old weights. Weight and bias are
    initialized as in `torch.nn.Linear` and `torch.nn.Conv2d`:
    $W, b \sim U(-1/\sqrt{n}, 1/\sqrt{n})$ for $n$ inputs of each output. The new layer has a bias
    if the old layer has one. Names of the old classes in the metadata are removed.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `classes`: the number of outputs of the new layer, 1 to 100,000,000.
    - `output`: the output that the layer computes; None for the only output of the model.
    - `keep`: the old classes whose weights become those of the first new classes. True keeps all
      old classes in their order, so that the other new classes are added at the end. Indices, such
      as `[3, 17]`, select old classes. False keeps none.
    - `seed`: a whole number, 0 or more; the same seed draws the same weights.

    ModelError: the model cannot be read, has no head, or a node after the layer needs the old
    number of classes. SettingError: `classes`, `keep` or `seed` is impossible, or the model has
    several outputs and `output` is None. UnknownNameError: the model has no output of this name.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}, float[1] b = {3}>
    ...     { s = Gemm(x, w, b) y = Sigmoid(s) }''')
    >>> changed = replace_head(model, classes=7)
    >>> {t.name: tuple(t.dims) for t in changed.graph.initializer}
    {'w': (2, 7), 'b': (7,)}
    >>> changed.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    7
    >>> one_more = replace_head(model, classes=2, keep=True)
    >>> onnx.numpy_helper.to_array(one_more.graph.initializer[0])[:, 0]
    array([1., 2.], dtype=float32)
    """
    _check_number("classes", classes, 1, MAX_CLASSES)
    _check_number("seed", seed, 0)
    model = load_model(model_onnx)
    lift_constants(model)
    work = to_ir(model)
    _infer_shapes(work, model)
    was_consistent = _is_consistent(model)
    locations = protos.node_locations(model, work)
    scores = _chosen_output(work, output)
    head = _find_head(scores)
    kept = _kept_classes(keep, head, classes)
    followers = _followers(head)
    _draw(model, head, locations, classes, kept, seed)
    for node in followers:
        if node.op_type == "Reshape":
            _set_reshape_classes(model, node, locations[node].proto, head, classes)
    _declare_outputs(model, head, followers, classes)
    onnx.checker.check_model(large_tensors_as_inputs(model))
    if was_consistent and not _is_consistent(model):
        raise ModelError(
            f"The head of {head.output.name!r} cannot have {classes} outputs instead of"
            f" {head.classes}, because a later node needs {head.classes}."
        )
    _remove_class_names(model, scores.name or "")
    return lower_constants(model)


def _remove_class_names(model: onnx.ModelProto, output: str) -> None:
    """Remove the names of the old classes, which the new outputs do not have."""
    names = read_class_names(model)
    if names.pop(output, None):
        write_class_names(model, names)


def _check_number(name: str, number: int, minimum: int, maximum: float = np.inf) -> None:
    if not is_integer(number) or not minimum <= number <= maximum:
        bounds = f"{minimum} or more" if maximum == np.inf else f"{minimum} to {int(maximum):,}"
        raise SettingError(f"{name} must be a whole number, {bounds}, got {shortened(number)}.")


def _kept_classes(keep: bool | Sequence[int], head: Head, classes: int) -> list[int]:
    """Return the old classes that the first new classes are; raise SettingError for others."""
    if isinstance(keep, bool):
        if keep and classes < head.classes:
            raise SettingError(
                f"keep=True keeps the {head.classes} old classes, so that classes must be"
                f" {head.classes} or more, got {classes}. To select some of them, pass their"
                " indices, such as keep=[0, 2]."
            )
        return list(range(head.classes)) if keep else []
    is_list = isinstance(keep, (Sequence, np.ndarray)) and not isinstance(keep, str)
    if not is_list or not all(is_integer(i) and 0 <= i < head.classes for i in keep):
        raise SettingError(
            "keep must be True, False or a list of old classes, whole numbers from 0 to"
            f" {head.classes - 1}, got {shortened(keep)}."
        )
    if len(keep) > classes:
        raise SettingError(f"keep lists {len(keep)} classes, but the new layer has {classes}.")
    return [int(index) for index in keep]


def _chosen_output(work: ir.Model, name: str | None) -> ir.Value:
    outputs = {value.name or "": value for value in work.graph.outputs}
    if name is None:
        if len(outputs) != 1:
            raise SettingError(
                f"The model has {len(outputs)} outputs. Pass the output with the head, output= one"
                f" of {', '.join(outputs)}."
            )
        return next(iter(outputs.values()))
    if not isinstance(name, str) or name not in outputs:
        raise UnknownNameError("output", name, outputs)
    return outputs[name]


def _find_head(output: ir.Value) -> Head:
    """Return the last layer before an output."""
    value: ir.Value | None = output
    while value is not None:
        node = value.producer()
        if node is None:
            break
        head = _head_at(node)
        if head is not None:
            return head
        if node.op_type in KEPT:
            value = node.inputs[0]
        elif _is_scaling(node):
            value = next(v for v in node.inputs if constant_elements(v) is None)
        elif (spelled := activation_of(value)) is not None:
            value = spelled.scores
        else:
            raise ModelError(
                f"{output.name!r} has no head that can be replaced: it is computed by"
                f" {node.op_type} {node.name!r}. Expected a Gemm, a MatMul or a Conv with an"
                " initializer as its weight, followed only by activations, pooling or Flatten."
            )
    raise ModelError(
        f"{output.name!r} has no head that can be replaced: no Gemm, MatMul or Conv computes it."
    )


def _head_at(node: ir.Node) -> Head | None:
    """Return the head that ends with a node, or None."""
    if node.op_type in HEADS and not node.domain:
        weight = matrix_of(node.inputs[1])
        classes = output_channels(node, weight.shape) if weight is not None else None
        if weight is None or classes is None or integer(node, "group", 1) != 1:
            return None
        value = node.inputs[2] if len(node.inputs) > 2 else None
        bias = matrix_of(value)
        if value is not None and (bias is None or np.prod(bias.shape) not in (1, classes)):
            return None
        return Head(node, None, weight, bias, classes)
    if node.op_type != "Add":
        return None
    for i, value in enumerate(node.inputs):
        layer, casts = _before_casts(value)
        vector = matrix_of(node.inputs[1 - i])
        head = _head_at(layer) if layer is not None and vector is not None else None
        if head is None or vector is None or head.bias is not None or head.layer.op_type == "Conv":
            continue
        between = [head.output, *(cast.outputs[0] for cast in casts)]
        alone = all(len(list(v.uses())) == 1 and not v.is_graph_output() for v in between)
        if alone and np.prod(vector.shape) == head.classes == vector.shape[-1]:
            return Head(head.layer, node, head.weight, vector, head.classes, casts)
    return None


def _before_casts(value: ir.Value | None) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
    """Return the node that computes a value, ignoring Casts, and the Casts after this node."""
    casts: list[ir.Node] = []
    node = value.producer() if value is not None else None
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        casts.append(node)
        node = node.inputs[0].producer()
    return node, tuple(casts)


def _is_scaling(node: ir.Node) -> bool:
    elements = [constant_elements(value) for value in node.inputs]
    return node.op_type in SCALING and 1 in elements and None in elements


def _followers(head: Head) -> list[ir.Node]:
    """Return the nodes after the head; raise ModelError for one that depends on its size."""
    found: dict[ir.Node, None] = {}
    waiting = [head.output]
    spelled = _nodes_of_activations(head.output)
    while waiting:
        for usage in waiting.pop().uses():
            node = usage.node
            if node.op_type == "Shape" or node in found:
                continue
            is_kept = node in spelled or (node.op_type in KEPT and usage.idx == 0)
            if not is_kept and not _is_scaling(node):
                raise ModelError(
                    f"The head of {head.output.name!r} cannot be replaced: {node.op_type}"
                    f" {node.name!r} reads its result and may depend on the {head.classes} classes."
                )
            found[node] = None
            waiting += node.outputs
    return list(found)


def _nodes_of_activations(value: ir.Value) -> set[ir.Node]:
    """Return the nodes after a value that together compute a softmax or a sigmoid."""
    inside: set[ir.Node] = set()
    seen: set[ir.Node] = set()
    waiting = [value]
    while waiting:
        for usage in waiting.pop().uses():
            if usage.node not in seen:
                seen.add(usage.node)
                waiting += usage.node.outputs
                found = activation_of(usage.node.outputs[0])
                inside.update(found.nodes if found is not None else ())
    return inside


def _draw(
    model: onnx.ModelProto,
    head: Head,
    locations: dict[ir.Node, protos.NodeLocation],
    classes: int,
    kept: list[int],
    seed: int,
) -> None:
    """Give the head new weights, except for the kept classes, and remove the old ones."""
    random = np.random.default_rng(seed)
    shape = list(head.weight.shape)
    axis = _axis_of_classes(head)
    shape[axis] = classes
    bound = 1 / np.sqrt(np.prod(shape) / classes)
    array = random.uniform(-bound, bound, shape).astype(head.weight.dtype.numpy())
    if kept:
        old = np.moveaxis(head.weight.array(), axis, 0)
        np.moveaxis(array, axis, 0)[: len(kept)] = old[kept]
    layer = locations[head.layer].proto
    _replace_input(model, layer, 1, head.weight, array, f"{protos.layer_name(head.layer)}.weight")
    if head.bias is None:
        return
    bias_shape = (*[1] * (len(head.bias.shape) - 1), classes)
    bias = random.uniform(-bound, bound, bias_shape).astype(head.bias.dtype.numpy())
    if kept:
        old = np.broadcast_to(head.bias.array().reshape(-1), head.classes)
        bias[..., : len(kept)] = old[kept]
    node, index = layer, 2
    if head.sum is not None:
        node = locations[head.sum].proto
        index = 0 if matrix_of(head.sum.inputs[0]) is not None else 1
    _replace_input(model, node, index, head.bias, bias, f"{protos.layer_name(head.layer)}.bias")


def _axis_of_classes(head: Head) -> int:
    if head.layer.op_type == "Conv":
        return 0
    return 0 if head.layer.op_type == "Gemm" and integer(head.layer, "transB", 0) else 1


def _replace_input(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    index: int,
    old: Matrix,
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    name: str,
) -> None:
    """Let a node read a new initializer, and remove initializers that are then unused."""
    old_name = old.initializer.name or ""
    notes = old.initializer.metadata_props
    unread = node.input[index]
    node.input[index] = ""
    while not protos.is_read(model, unread) and unread != old_name:
        maker = next(n for n in model.graph.node if unread in n.output)
        unread = maker.input[0]
        model.graph.node.remove(maker)
    if protos.is_read(model, old_name):
        new_name = protos.unique_name(name, protos.used_names(model))
    else:
        protos.remove_initializer(model, old_name)
        new_name = old_name
    parameter = True if KIND in notes or FOLDED_FROM in notes else None
    protos.add_initializer(model, new_name, array, parameter)
    node.input[index] = new_name


def _set_reshape_classes(
    model: onnx.ModelProto, node: ir.Node, proto: onnx.NodeProto, head: Head, classes: int
) -> None:
    """Give a Reshape the new number of classes, if it has the old one."""
    shape = node.inputs[1]
    tensor = None if shape is None else ir.convenience.get_const_tensor(shape)
    sizes = [] if tensor is None else tensor.numpy().tolist()
    if head.classes not in sizes:
        return
    axis = max(i for i, size in enumerate(sizes) if size == head.classes)
    sizes[axis] = classes
    name = protos.unique_name(
        f"{node.name or node.outputs[0].name}/shape", protos.used_names(model)
    )
    protos.add_initializer(model, name, np.array(sizes, np.int64), None)
    proto.input[1] = name


def _declare_outputs(
    model: onnx.ModelProto, head: Head, followers: list[ir.Node], classes: int
) -> None:
    """Update the declared shapes of outputs after the head, and drop inferred shapes there."""
    axis = 1 if head.layer.op_type == "Conv" else -1
    changed = {head.layer.outputs[0].name, head.output.name}
    changed |= {value.name for node in (*head.casts, *followers) for value in node.outputs}
    without_classes = {node.outputs[0].name for node in followers if node.op_type == "ArgMax"}
    for output in model.graph.output:
        if output.name not in changed - without_classes:
            continue
        dims = output.type.tensor_type.shape.dim
        same = [i for i, dim in enumerate(dims) if dim.dim_value == head.classes]
        if len(same) > 1:
            same = [i for i in same if i == axis % len(dims)] or same[-1:]
        for i in same:
            dims[i].dim_value = classes
    infos = model.graph.value_info
    for i in reversed([i for i, info in enumerate(infos) if info.name in changed]):
        del infos[i]


def _infer_shapes(work: ir.Model, model: onnx.ModelProto) -> None:
    """Give the values of `work` the shapes that prove that operators spell a softmax."""
    inferred = onnx.shape_inference.infer_shapes(large_tensors_as_inputs(model), data_prop=True)
    values = {value.name: value for node in work.graph for value in node.outputs}
    for info in inferred.graph.value_info:
        if info.name in values:
            ir.serde.deserialize_value_info_proto(info, values[info.name])


def _is_consistent(model: onnx.ModelProto) -> bool:
    try:
        onnx.shape_inference.infer_shapes(
            large_tensors_as_inputs(model), strict_mode=True, data_prop=True
        )
    except onnx.shape_inference.InferenceError:
        return False
    return True

"""From whatever the user has to a graph that can be built upon: one opset, one IR version, no
functions, every value named and typed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union

import google.protobuf.message
import numpy as np
import onnx
import onnx.checker
import onnx.inliner
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass, RemoveInitializersFromInputsPass

from onnxfit.errors import ModelError
from onnxfit.graph.bodies import function_body
from onnxfit.graph.classical import without_zip_maps, write_out_classical
from onnxfit.graph.fold import fold_shapes
from onnxfit.graph.inference import InputsError, infer_outputs
from onnxfit.graph.sequences import unroll_sequences
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.tensors import detached, is_external
from onnxfit.graph.validity import require_bodies, require_steps, require_valid
from onnxfit.graph.values import GraphBuilder

OPSET = 21  # the newest that onnxruntime-training 1.19.2 reads; every graph is built in it
IR_VERSION = 10  # likewise

ModelSource = Union[str, "os.PathLike[str]", bytes, onnx.ModelProto]


def load_model(source: ModelSource) -> onnx.ModelProto:
    """The model as the caller gave it, in memory, external data included; the caller's own object
    is never touched.

    Raises ModelError for a missing or damaged file, an invalid model, or external data that is not
    where the model says.
    """
    return _load(source)[0]


def read_model(source: ModelSource) -> onnx.ModelProto:
    """What `load_model` gives, in the operators and tensors that a step can be built of.

    Raises ModelError as `load_model` does, and for a model without outputs or with sparse
    initializers.
    """
    model, what = _load(source)
    if not model.graph.output:
        raise ModelError(f"{what} has no outputs.")
    if model.graph.sparse_initializer:
        names = ", ".join(t.values.name for t in model.graph.sparse_initializer)
        raise ModelError(
            f"{what} has sparse initializers ({names}), which cannot be trained: make them dense."
        )
    _make_dense(model.graph)
    _untie_batch_norms(model)
    write_out_classical(model)
    return model


def _load(source: ModelSource) -> tuple[onnx.ModelProto, str]:
    """The model, and what messages call it."""
    model = onnx.ModelProto()
    try:
        if isinstance(source, onnx.ModelProto):
            model.CopyFrom(source)
            what = "the ModelProto"
        elif isinstance(source, (bytes, bytearray, memoryview)):
            what = f"the {len(source)} bytes given"
            model.ParseFromString(bytes(source))
        elif isinstance(source, (str, os.PathLike)):
            what = str(Path(source))
            model = onnx.load(what)
        else:
            raise ModelError(
                f"A model is a path, bytes or an onnx.ModelProto, got {type(source).__name__}."
            )
    except FileNotFoundError:
        raise ModelError(f"There is no file {os.fspath(source)!r}.") from None
    except google.protobuf.message.DecodeError as error:
        raise ModelError(f"{what} is not an ONNX model: {error}.") from None
    except (OSError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{what} cannot be read: {error}") from None
    require_valid(model, what)
    try:
        onnx.checker.check_model(_without_tensors(model))
    except onnx.checker.ValidationError as error:
        if "GroupNormalization is deprecated" not in str(
            error
        ):  # opsets 18 to 20 had one that ONNX withdrew and runtimes still run
            raise ModelError(f"{what} is not a valid ONNX model: {error}") from None
    return model, what


def _without_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose larger tensors are inputs: every function of ONNX's copies all that it is given,
    and takes less than 2 GB.
    """
    copy, _ = detached(model, {}, "")
    known = {value.name for value in copy.graph.input}
    for tensor in [t for t in copy.graph.initializer if is_external(t)]:
        if tensor.name not in known:
            copy.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        copy.graph.initializer.remove(tensor)
    return copy


def _put_back(graph: ir.Graph, model: onnx.ModelProto) -> None:
    """Make inputs that `_without_tensors` made of tensors initializers again, in the model's order;
    they share the model's memory.
    """
    tensors = {t.name: t for t in model.graph.initializer}
    for value in [v for v in graph.inputs if v.name in tensors]:
        graph.inputs.remove(value)
        value.const_value = ir.serde.TensorProtoTensor(tensors[value.name or ""])
        graph.register_initializer(value)
    found = {name: graph.initializers.pop(name) for name in [*graph.initializers]}
    for name in [
        *(name for name in tensors if name in found),
        *(name for name in found if name not in tensors),
    ]:
        graph.register_initializer(found[name])


def _make_dense(graph: onnx.GraphProto) -> None:
    """Write constants that are sparse, which onnx-ir does not read, with their zeros, in place."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _make_dense(attribute.g)
            elif attribute.type == onnx.AttributeProto.SPARSE_TENSOR and node.op_type == "Constant":
                sparse = attribute.sparse_tensor
                values, indices = (
                    onnx.numpy_helper.to_array(sparse.values),
                    onnx.numpy_helper.to_array(sparse.indices),
                )
                dense = np.zeros(tuple(sparse.dims), values.dtype)
                dense[
                    (
                        tuple(indices.T)
                        if indices.ndim == 2
                        else np.unravel_index(indices, dense.shape)
                    )
                ] = values
                attribute.CopyFrom(
                    onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(dense))
                )


def _untie_batch_norms(model: onnx.ModelProto) -> None:
    """Give every BatchNormalization parameters of its own, in place.

    An exporter writes equal tensors once: the scale 1 and the running variance 1 of a fresh
    network, or the norms of two layers, become one initializer behind Identity nodes. Training
    would then take one for the other.
    """
    graph = model.graph
    initializers = {t.name: t for t in graph.initializer}
    copies = {
        n.output[0]: n for n in graph.node if n.op_type == "Identity" and n.input[0] in initializers
    }
    norms = [n for n in graph.node if n.op_type == "BatchNormalization" and n.domain == ""]
    for node in norms:
        for name in node.input[1:5]:
            if name in copies:
                graph.initializer.append(initializers[copies[name].input[0]])
                graph.initializer[-1].name = name
                initializers[name] = graph.initializer[-1]
                graph.node.remove(copies.pop(name))
    roles: dict[str, set[int]] = {}
    for node in norms:
        for i in range(1, 5):
            roles.setdefault(node.input[i], set()).add(i)
    for node in norms:
        for i in (3, 4):
            name = node.input[i]
            if name in initializers and roles[name] - {i}:
                own = f"{name}/{'mean' if i == 3 else 'variance'}"
                if own not in initializers:
                    graph.initializer.append(initializers[name])
                    graph.initializer[-1].name = own
                    initializers[own] = graph.initializer[-1]
                node.input[i] = own


@contextmanager
def model_errors() -> Iterator[None]:
    """ModelError where operators of the model, which nobody but its author put together, do not
    take each other's outputs.
    """
    try:
        yield
    except InputsError as error:
        raise ModelError(f"The model contradicts itself: {error}") from None


@model_errors()
def normalize(model: onnx.ModelProto) -> ir.Model:
    """The same computation in the opset and IR version every step is built in, functions inlined,
    every node and value named.

    Raises ModelError where the model's opset cannot be converted.
    """
    work = _without_tensors(model)
    without_zip_maps(work)
    if work.functions:
        try:
            work = onnx.inliner.inline_local_functions(work)
        except Exception as error:  # functions that call themselves, or call what they do not import: ValidationError, RuntimeError
            raise ModelError(
                "The model's functions cannot be put in the place of their calls:"
                f" {str(error).strip()}"
            ) from None
    work = _convert(work)
    work.ir_version = IR_VERSION
    _open_negative_sizes(work)
    graph_model = _parsed(work)
    require_bodies(graph_model.graph)
    RemoveInitializersFromInputsPass()(graph_model)
    NameFixPass()(graph_model)
    graph_model = infer_shapes(graph_model)
    if unroll_sequences(graph_model):
        graph_model = infer_shapes(graph_model)
    _put_back(graph_model.graph, model)
    # the converter drops what an exporter noted of its initializers
    for info in model.graph.value_info:
        if info.metadata_props and info.name in graph_model.graph.initializers:
            graph_model.graph.initializers[info.name].metadata_props.update(
                {p.key: p.value for p in info.metadata_props}
            )
    return graph_model


def _parsed(model: onnx.ModelProto) -> ir.Model:
    try:
        return ir.from_proto(model)
    except ir.serde.SerdeError as error:  # it names what it was reading, from the outside in
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ModelError(f"The model has something that onnx-ir does not read: {reason}") from None


def _open_negative_sizes(model: onnx.ModelProto) -> None:
    """Some exporters write -1 for a size that is open."""
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def _convert(model: onnx.ModelProto) -> onnx.ModelProto:
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    if version == OPSET:
        return model
    if version is None:  # operators of other domains only
        model.opset_import.append(onnx.helper.make_opsetid("", OPSET))
        return model
    if version > OPSET:
        model = _without_newer_operators(model)
    try:
        converted = onnx.version_converter.convert_version(model, OPSET)
        if version < 11:
            _resize_as_before(model, converted)
        if 18 <= version < 21:
            _scale_groups_as_before(converted)
        return converted
    except (
        Exception
    ) as error:  # the converter raises RuntimeError, ConvertError and plain C++ assertions alike
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"The model's opset is {version}; training builds on opset {OPSET}, and onnx"
            f" {onnx.__version__} cannot convert it: {reason}. Export the model again with opset"
            f" {OPSET}, or any from 13 to {OPSET}."
        ) from None


def _without_newer_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Operators that came after OPSET written in those that define them, which the converter cannot
    do. ModelError where ONNX has no definition.
    """
    work = _parsed(onnx.shape_inference.infer_shapes(model))
    NameFixPass()(work)
    op = GraphBuilder(work.graph)
    newer: list[ir.Node] = [node for node in work.graph if _is_newer(node)]
    for node in newer:
        body = function_body(node, work.graph)
        if body is None:
            raise ModelError(
                f"{node.op_type} {node.name!r} came with an opset after {OPSET}, in which training"
                " builds, and ONNX does not define it by older operators. Export the model again"
                f" with opset {OPSET}, or any from 13 to {OPSET}."
            )
        with op.replacing(node) as put:
            put(*body(op))
    inside = next(
        (node for node in ir.traversal.RecursiveGraphIterator(work.graph) if _is_newer(node)), None
    )
    if inside is not None:
        raise ModelError(
            f"{inside.op_type} {inside.name!r} came with an opset after {OPSET}, in which training"
            f" builds. Export the model again with opset {OPSET}, or any from 13 to {OPSET}."
        )
    return ir.to_proto(work)


def _is_newer(node: ir.Node) -> bool:
    return (
        node.domain in ("", "ai.onnx")
        and not onnx.defs.has(node.op_type, OPSET, "")
        and onnx.defs.has(node.op_type)
    )


def _resize_as_before(model: onnx.ModelProto, converted: onnx.ModelProto) -> None:
    """Until opset 10 places were counted from the corner, which is no longer the default, and which
    the converter forgets to say.
    """
    old = {
        name
        for node in model.graph.node
        if node.op_type in ("Upsample", "Resize")
        for name in node.output
    }
    for node in converted.graph.node:
        if node.op_type == "Resize" and old.intersection(node.output):
            settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            for attribute in [a for a in node.attribute if a.name in settings]:
                node.attribute.remove(attribute)
            node.attribute.extend(
                onnx.helper.make_attribute(name, value) for name, value in settings.items()
            )


def _scale_groups_as_before(converted: onnx.ModelProto) -> None:
    """Until opset 20 GroupNormalization had a scale and a bias for each group; now it has them for
    each channel, and the converter forgets it.
    """
    nodes = list(converted.graph.node)
    del converted.graph.node[:]
    make = onnx.helper.make_node
    for node in nodes:
        if node.op_type == "GroupNormalization" and node.domain == "":
            groups = next(a.i for a in node.attribute if a.name == "num_groups")
            name = f"{node.output[0]}/per_group"
            constants = {"groups": [groups], "last": [-1], "axis": [1]}
            for key, value in constants.items():
                tensor = onnx.numpy_helper.from_array(np.array(value, np.int64), f"{name}/{key}")
                converted.graph.node.append(make("Constant", [], [tensor.name], value=tensor))
            converted.graph.node.append(
                make("Shape", [node.input[0]], [f"{name}/channels"], start=1, end=2)
            )
            converted.graph.node.append(
                make("Div", [f"{name}/channels", f"{name}/groups"], [f"{name}/times"])
            )
            converted.graph.node.append(
                make("Concat", [f"{name}/groups", f"{name}/times"], [f"{name}/sizes"], axis=0)
            )
            for i in (1, 2):
                given, wide, flat = node.input[i], f"{name}/wide_{i}", f"{name}/channels_{i}"
                converted.graph.node.append(
                    make("Unsqueeze", [given, f"{name}/axis"], [f"{wide}/column"])
                )
                converted.graph.node.append(
                    make("Expand", [f"{wide}/column", f"{name}/sizes"], [wide])
                )
                converted.graph.node.append(make("Reshape", [wide, f"{name}/last"], [flat]))
                node.input[i] = flat
        converted.graph.node.append(node)


def infer_shapes(model: ir.Model) -> ir.Model:
    """The model with the type and shape of every value that ONNX can tell, as a new object."""
    try:
        proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise ModelError(
            f"The model's shapes contradict each other: {str(error).strip()}"
        ) from None
    except (
        ir.serde.SerdeError
    ) as error:  # such as a hidden size of -2^63, of which there are four gates
        raise ModelError(
            f"The model has sizes that ONNX cannot write down: {_first_cause(error)}."
        ) from None
    except MemoryError:
        raise ModelError(
            "The model's sizes are too large: there is no memory to infer its shapes."
        ) from None
    inferred = ir.from_proto(proto)
    for node in inferred.graph:  # ranks that ONNX does not tell, and what follows from them
        if any(v.shape is None and v.name for v in node.outputs):
            try:
                infer_outputs(inferred.graph, node)
            except ValueError:
                continue  # where sizes contradict each other, running it says so
    return inferred


def _first_cause(error: BaseException) -> BaseException:
    return _first_cause(error.__cause__) if error.__cause__ is not None else error


def specialize_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """The model for inputs of exactly these shapes; every shape inside is inferred anew.

    ModelError where they cannot be.
    """
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    for value in proto.graph.input:
        if value.name in shapes:
            _set_shape(value, shapes[value.name])
    inputs = {value.name: value for value in proto.graph.input}
    for value in proto.graph.output:
        if value.name in inputs:
            value.type.CopyFrom(inputs[value.name].type)
            continue
        for dim in value.type.tensor_type.shape.dim:
            # a name may stand for a size that is known now; the rank and the numbers stay
            dim.ClearField("dim_param")
    special = infer_shapes(ir.from_proto(proto))
    try:
        fold_shapes(special)
    except ValueError as error:
        reason = "does not accept inputs of these shapes" if shapes else "contradicts itself"
        raise ModelError(f"The model {reason}: {error}") from None
    require_steps(special.graph)
    return special


def _set_shape(value: onnx.ValueInfoProto, shape: Iterable[Dim]) -> None:
    elem_type = value.type.tensor_type.elem_type
    value.type.CopyFrom(onnx.helper.make_tensor_type_proto(elem_type, list(shape)))


def spec_of(value: ir.Value) -> TensorSpec:
    """Name, element type and shape of a value."""
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        raise ModelError(
            f"{value.name!r} is not a tensor: a training step takes and gives tensors alone."
        )
    if value.dtype is None:
        raise ModelError(f"The element type of {value.name!r} is unknown.")
    shape = (
        None
        if value.shape is None
        else tuple(d if isinstance(d, int) else d.value for d in value.shape)
    )
    return TensorSpec(value.name or "", value.dtype.numpy(), shape)


def tensor_outputs(model: ir.Model) -> dict[str, TensorSpec]:
    """The outputs that a loss can be put on: sequences and maps, as converters of classical models
    add them, stay out of training.
    """
    found = {
        v.name or "": spec_of(v)
        for v in model.graph.outputs
        if v.type is None or isinstance(v.type, ir.TensorType)
    }
    if not found:
        raise ModelError(
            "No output of the model is a tensor"
            f" ({', '.join(v.name or '' for v in model.graph.outputs)})."
        )
    return found


def with_initializers(
    model: onnx.ModelProto, arrays: Mapping[str, np.ndarray[Any, Any]]
) -> onnx.ModelProto:
    """A copy of the model in which the named initializers hold these arrays; everything else is
    byte-identical.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    lost = arrays.keys() - {t.name for t in copy.graph.initializer}
    if lost:
        raise ModelError(
            f"The model has no {', '.join(sorted(lost))} any more: a trained weight was deleted"
            " from it."
        )
    for tensor in copy.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(np.ascontiguousarray(arrays[tensor.name]), tensor.name)
            )
    return copy

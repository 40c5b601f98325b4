"""Read and check a model: a path, bytes or a ModelProto becomes a ModelProto in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Union

import google.protobuf.message
import numpy as np
import numpy.typing as npt
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.errors import ModelError, listed_names, nearest_name
from onnxfit.files import kind_of_file, require_regular_file
from onnxfit.graph import tensors
from onnxfit.graph.index import tensors_of
from onnxfit.graph.model import OnnxModel, large_tensors_as_inputs, restore_initializers, to_ir
from onnxfit.graph.shared_tensors import shared_arrays
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.tensors import is_external, nbytes
from onnxfit.load.classical import convert_classical_operators
from onnxfit.load.completion import checkable, complete, complete_outputs
from onnxfit.load.constant_nodes import lift_constants
from onnxfit.load.external_data import load_external_data
from onnxfit.load.lean_reading import with_shared, without_contents
from onnxfit.load.normalize import inline_functions
from onnxfit.load.packed_sizes import has_packed_weights, require_packed_sizes
from onnxfit.load.validity import require_valid

KINDS = {"HDF5": "Keras (HDF5)", "pickle": "PyTorch or scikit-learn (a pickle)", "zip": "zip"}
# Library -> a call that writes a model as ONNX
EXPORTERS = {
    "HDF5": "model.export('model.onnx', format='onnx')",
    "Keras": "model.export('model.onnx', format='onnx')",
    "PyTorch": "torch.onnx.export(module, inputs, 'model.onnx')",
    "scikit-learn": "skl2onnx.to_onnx(estimator, X)",
}

ModelSource = Union[str, "os.PathLike[str]", bytes, onnx.ModelProto]
# A function that checks a model, or changes it in place. The text describes the file in messages.
Stage = Callable[[onnx.ModelProto, str], None]

# Positions of the running statistics among the inputs of a BatchNormalization
MEAN = 3
VARIANCE = 4

# A ValueError means that a file of external data is outside of the folder, or is smaller than its
# tensors.
READING_ERRORS = (OSError, ValueError)


def load_model(source: ModelSource) -> onnx.ModelProto:
    """Return a copy of the model in memory, external data included.

    - `source`: the path of an ONNX file, its bytes, or a ModelProto, which stays unchanged.

    ModelError: the file is missing or damaged, the model is invalid, or external data is missing.
    """
    return _read_through(source, _parse, STAGES).proto


def load_shared(source: ModelSource) -> OnnxModel:
    """Return the model of `load_model`; the larger tensors of a large one refer to arrays."""
    return _read_through(source, _parse_shared, STAGES)


def read_model(source: ModelSource) -> OnnxModel:
    """Return the model of `load_model` in operators and tensors that a step supports.

    Sparse constants become dense, tensors of Constant nodes that may be weights become initializers
    (`lower_constants` moves them back), each normalization gets its own copy of shared parameters,
    and classical models are written in ONNX's own operators. The larger tensors of a large model
    refer to arrays, so that their bytes are in memory once.

    - `source`: the path of an ONNX file, its bytes, or a ModelProto, which stays unchanged.

    ModelError: as for `load_model`, or the model has no outputs, or has sparse initializers.
    """
    return _read_through(source, _parse_shared, (*STAGES, *TRAINING_STAGES))


def _read_through(
    source: ModelSource,
    parse: Callable[[str | bytes | onnx.ModelProto], OnnxModel],
    stages: Iterable[Stage],
) -> OnnxModel:
    """Return the model that a parser and some stages read. ModelError: the model is unusable."""
    try:
        if isinstance(source, onnx.ModelProto):
            description = "the ModelProto"
            model = parse(source)
        elif isinstance(source, (bytes, bytearray, memoryview)):
            description = f"the {len(source)} bytes given"
            data = bytes(source)
            _refuse_other_kind(io.BytesIO(data), description)
            model = parse(data)
        elif isinstance(source, (str, os.PathLike)):
            description = str(Path(source))
            require_regular_file(Path(description))
            with open(description, "rb") as file:
                _refuse_other_kind(file, description)
            model = parse(description)
        else:
            raise ModelError(
                "The model must be a path, bytes or an onnx.ModelProto, got"
                f" {type(source).__name__}.{_export_hint(source)}"
            )
    except ModelError:
        raise
    except FileNotFoundError:
        raise ModelError(_missing_file(Path(description))) from None
    except IsADirectoryError:
        raise ModelError(
            f"{description} is a folder. Expected an ONNX file. {_onnx_files(Path(description))}"
        ) from None
    except google.protobuf.message.DecodeError as error:
        raise ModelError(f"{description} is not an ONNX model: {error}.") from None
    except READING_ERRORS as error:
        raise ModelError(f"{description} cannot be read: {error}") from None
    for stage in stages:
        stage(model.proto, description)
    return model


def _check_model(model: onnx.ModelProto, description: str) -> None:
    """Raise ModelError unless ONNX's checker accepts a model; declare the types of its outputs."""
    small = large_tensors_as_inputs(model)
    complete_outputs(model, small)
    try:
        onnx.checker.check_model(checkable(small))
    except onnx.checker.ValidationError as error:
        # Opsets 18 to 20 have a GroupNormalization that ONNX withdrew and runtimes still run.
        if "GroupNormalization is deprecated" not in str(error):
            raise ModelError(
                f"{description} is not a valid ONNX model: {_tensors_hint(model)}{error}"
            ) from None
    if not has_packed_weights(model):
        return
    try:
        inferred = onnx.shape_inference.infer_shapes(inline_functions(small))
    except onnx.shape_inference.InferenceError as error:
        raise ModelError(f"The model's shapes are inconsistent: {str(error).strip()}") from None
    work = to_ir(inferred)
    restore_initializers(work.graph, model)
    require_packed_sizes(work.graph)


def _tensors_hint(model: onnx.ModelProto) -> str:
    """Return a sentence about parameters without a tensor; "" if each has one."""
    graph = model.graph
    known = {value.name for value in graph.input} | tensors_of(graph).keys()
    known.update(name for node in graph.node for name in node.output)
    read = {name for node in graph.node for name in node.input}
    missing = [v.name for v in graph.value_info if v.name in read and v.name not in known]
    if not missing:
        return ""
    return (
        f"it has no tensors for {listed_names(missing)}. In onnxscript, pass them as"
        " nn.Parameter(shape, data=onnx_ir.tensor(array)). "
    )


def _require_trainable(model: onnx.ModelProto, description: str) -> None:
    """Raise ModelError for a model that no step can be built for."""
    if not model.graph.output:
        raise ModelError(f"{description} has no outputs.")
    if model.graph.sparse_initializer:
        names = ", ".join(t.values.name for t in model.graph.sparse_initializer)
        raise ModelError(
            f"{description} has sparse initializers ({names}), which cannot be trained. Convert"
            " them to dense initializers."
        )
    if any(node.domain == "com.microsoft.nchwc" for node in nodes_of(model.graph)):
        raise ModelError(
            f"{description} was optimized by onnxruntime for one machine (operators of"
            " com.microsoft.nchwc) and cannot be trained. Pass the original model, or one"
            " optimized at ORT_ENABLE_EXTENDED."
        )


def _parse(source: str | bytes | onnx.ModelProto) -> OnnxModel:
    """Return a copy of the model of a path, of bytes or of a ModelProto."""
    if isinstance(source, str):
        model = onnx.load(source, load_external_data=False)
        load_external_data(model, os.path.dirname(source))
        return OnnxModel(model)
    model = onnx.ModelProto()
    if isinstance(source, bytes):
        model.ParseFromString(source)
    else:
        model.CopyFrom(source)
    return OnnxModel(model)


def _parse_shared(source: str | bytes | onnx.ModelProto) -> OnnxModel:
    """Return the same; the larger tensors of a large model refer to arrays.

    So do the tensors of a model with packed weights, because each compiled graph packs its own copy
    of them.
    """
    if isinstance(source, str):
        size = os.path.getsize(source)
    elif isinstance(source, bytes):
        size = len(source)
    else:
        size = sum(tensor.ByteSize() for tensor in source.graph.initializer)
        size += sum(array.nbytes for array in shared_arrays(source))
    if size > tensors.MAX_COPIED_BYTES:
        return with_shared(source)
    if isinstance(source, str) and size:  # its tensors may be in other files
        structure = without_contents(source)
        size = sum(nbytes(t) for t in structure.graph.initializer if is_external(t))
        shares = size > tensors.MAX_COPIED_BYTES or has_packed_weights(structure)
        return with_shared(source) if shares else _parse(source)
    model = _parse(source)
    return with_shared(source) if has_packed_weights(model.proto) else model


def _refuse_other_kind(file: BinaryIO, description: str) -> None:
    """Raise ModelError for a checkpoint, and for a model of another library."""
    kind = kind_of_file(file)
    if kind is None:
        return
    if kind == "checkpoint":
        raise ModelError(
            f"{description} is a checkpoint of a Trainer, not an ONNX model. Use"
            f" Trainer.load({description!r})."
        )
    raise ModelError(
        f"{description} is a file of {KINDS.get(kind, kind)}, not an ONNX model. Export the model"
        f" first, for instance with {EXPORTERS.get(kind, EXPORTERS['PyTorch'])}."
    )


def _export_hint(source: object) -> str:
    """Return a hint how to export a model of another library; "" for any other object."""
    if hasattr(source, "state_dict") and hasattr(source, "forward"):
        return f" Export it first: {EXPORTERS['PyTorch']}."
    if hasattr(source, "get_params") and hasattr(source, "fit"):
        return f" Export it first: {EXPORTERS['scikit-learn']}."
    if hasattr(source, "layers") and hasattr(source, "fit"):
        return f" Export it first: {EXPORTERS['Keras']}."
    if isinstance(source, ir.Model):
        return " Convert it first: onnx_ir.to_proto(model)."
    return ""


def _missing_file(path: Path) -> str:
    """Return the message for a path without a file."""
    if not path.parent.is_dir():
        return f"There is no file {str(path)!r}, because there is no folder {str(path.parent)!r}."
    files = [p.name for p in path.parent.glob("*.onnx")]
    near = nearest_name(path.name, files)
    hint = f" Did you mean {str(path.with_name(near))!r}?" if near else ""
    return f"There is no file {str(path)!r}.{hint}"


def _onnx_files(folder: Path) -> str:
    files = sorted(p.name for p in folder.glob("*.onnx"))
    return f"It has {listed_names(files)}." if files else "It has no .onnx file."


def _make_constants_dense(model: onnx.ModelProto) -> None:
    """Write sparse Constants, which onnx-ir does not read, with their zeros, in place."""
    for node in nodes_of(model.graph):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.SPARSE_TENSOR and node.op_type == "Constant":
                dense = onnx.numpy_helper.from_array(_dense(attribute.sparse_tensor))
                attribute.CopyFrom(onnx.helper.make_attribute("value", dense))


def _dense(sparse: onnx.SparseTensorProto) -> npt.NDArray[Any]:
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense[np.unravel_index(indices, dense.shape)] = values
    return dense


def _separate_batch_norms(model: onnx.ModelProto) -> None:
    """Give every BatchNormalization its own parameters, in place.

    An exporter writes equal tensors once: the scale 1 and the running variance 1 of a new network,
    or the parameters of two layers, become one initializer behind Identity nodes. Training would
    then update both as one.
    """
    graph = model.graph
    initializers = tensors_of(graph)
    norms = [n for n in graph.node if n.op_type == "BatchNormalization" and n.domain == ""]
    _copy_behind_identities(graph, norms, initializers)
    positions: dict[str, set[int]] = {}  # of the inputs where each parameter is used
    for node in norms:
        for i in range(1, 5):
            positions.setdefault(node.input[i], set()).add(i)
    for node in norms:
        for i, suffix in ((MEAN, "mean"), (VARIANCE, "variance")):
            name = node.input[i]
            if name in initializers and positions[name] - {i}:
                own = f"{name}/{suffix}"
                if own not in initializers:
                    _add_copy(graph, initializers, name, own)
                node.input[i] = own


def _copy_behind_identities(
    graph: onnx.GraphProto,
    norms: list[onnx.NodeProto],
    initializers: dict[str, onnx.TensorProto],
) -> None:
    """Replace Identity nodes between an initializer and a BatchNormalization by copies."""
    copies = {
        n.output[0]: n for n in graph.node if n.op_type == "Identity" and n.input[0] in initializers
    }
    for node in norms:
        for name in node.input[1:5]:
            if name in copies:
                _add_copy(graph, initializers, copies[name].input[0], name)
                graph.node.remove(copies.pop(name))


def _add_copy(
    graph: onnx.GraphProto, initializers: dict[str, onnx.TensorProto], name: str, copy: str
) -> None:
    """Add a copy of the initializer `name` under the name `copy`."""
    graph.initializer.append(initializers[name])
    graph.initializer[-1].name = copy
    initializers[copy] = graph.initializer[-1]


def _change(function: Callable[[onnx.ModelProto], None]) -> Stage:
    """Return the stage that changes a model in place by a function without a description."""
    return lambda model, _: function(model)


# The stages of a model after its file was parsed, in their order.
STAGES: tuple[Stage, ...] = (
    require_valid,
    _change(complete),
    _check_model,
)
# The stages that follow if a model is trained.
TRAINING_STAGES: tuple[Stage, ...] = (
    _require_trainable,
    _change(_make_constants_dense),
    _change(lift_constants),
    _change(_separate_batch_norms),
    _change(convert_classical_operators),
)

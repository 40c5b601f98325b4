"""Read inputs, labels and weights from .npz, .npy, .csv and .jsonl files, and write predictions.

NumPy reads the files without pickle, so an untrusted file runs no code. A .npy is mapped into
memory, and read batch by batch.
"""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.cli.data_file import DataFile, data_files
from onnxfit.cli.tables import read_columns
from onnxfit.data.mapped import map_array
from onnxfit.data.npy import READ_ERRORS, read_header
from onnxfit.errors import DataError, listed_names
from onnxfit.files import write_atomically
from onnxfit.graph.index import required_inputs
from onnxfit.graph.names import SAMPLE_WEIGHT
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.caches import without_caches

Array = npt.NDArray[Any]
# Names that the only input may have in a .npz, in addition to its own.
X_NAMES = ("X", "x")
# Names that the labels of the only output with a loss may have in a .npz or .csv.
Y_NAMES = ("y", "Y", "label", "labels")
TABLES = {".csv", ".jsonl"}


@dataclass(frozen=True)
class DataRequest:
    """Description of the arrays that a command reads from files.

    - `inputs`: the model's inputs.
    - `outputs`: the outputs whose labels are read.
    - `labels`: the columns of a .csv with labels, if their names differ from the output's name.
    - `predicting`: whether labels and sample weights are ignored.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[str]
    labels: Sequence[str] = ()
    predicting: bool = False


# x, y and sample_weight, as Trainer takes them
Data = tuple[dict[str, Array], "dict[str, Array] | None", "Array | None"]


def inputs_of(model: onnx.ModelProto) -> list[TensorSpec]:
    """Return the model's inputs without caches. DataError: an input is not a tensor."""
    graph = without_caches(model).graph
    return [_spec_of(value) for value in required_inputs(graph).values()]


def _spec_of(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor_type = value.type.tensor_type
    if not tensor_type.elem_type:
        raise DataError(
            f"The input {value.name!r} is not a tensor, but data files can contain only tensors."
            " Use onnxfit from Python."
        )
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
    if not tensor_type.HasField("shape"):
        return TensorSpec(value.name, dtype, None)
    dims = [
        d.dim_value if d.HasField("dim_value") else d.dim_param or None
        for d in tensor_type.shape.dim
    ]
    return TensorSpec(value.name, dtype, tuple(dims))


def read(paths: Sequence[str], request: DataRequest) -> Data:
    """Return the inputs, labels and sample weights in the files, or in standard input (`-`).

    DataError: a file is damaged, or lacks an array that the model needs.
    """
    files = data_files(paths)
    kinds = {file.suffix for file in files}
    if kinds != {".npy"} and (len(paths) != 1 or kinds - {".npz", *TABLES}):
        raise DataError(
            "--data must be one .npz, .csv or .jsonl file, a .npy file for each array (X.npy, then"
            f" y.npy), or - for standard input, got {', '.join(paths)}."
        )
    if request.labels and kinds - TABLES:
        raise DataError(
            f"--label names columns of a .csv or .jsonl, but {files[0].name} is not a table. Remove"
            " --label."
        )
    try:
        if kinds == {".npy"}:
            return _read_npy(files, request)
        return (_read_table if kinds <= TABLES else _read_npz)(files[0], request)
    except DataError:
        raise
    except (*READ_ERRORS, csv.Error) as error:
        raise DataError(f"{files[0].name} cannot be read: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _read_npz(file: DataFile, request: DataRequest) -> Data:
    with file.open() as binary, zipfile.ZipFile(binary) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist()}
        names = list(members)
        x = {spec.name: spec.name for spec in request.inputs if spec.name in names}
        if not x and len(request.inputs) == 1:
            x = _first_of(X_NAMES, request.inputs[0].name, names)
        y = {
            output: output
            for output in request.outputs
            if output in names and output not in x.values()
        }
        if not y and len(request.outputs) == 1:
            y = _first_of(Y_NAMES, request.outputs[0], {*names} - {*x.values()})
        known = [*x.values(), *y.values(), SAMPLE_WEIGHT]
        _check_names(file, "array", names, [*x, *y], known, request)
        inputs = {key: _read_member(archive, members[name]) for key, name in x.items()}
        if request.predicting:
            return inputs, None, None
        weights = None
        if SAMPLE_WEIGHT in names and SAMPLE_WEIGHT not in x.values():
            weights = _read_member(archive, members[SAMPLE_WEIGHT])
        labels = {key: _read_member(archive, members[name]) for key, name in y.items()}
        return inputs, labels or None, weights


def _read_member(archive: zipfile.ZipFile, name: str) -> Array:
    """Return an array of a .npz. The header is checked first, because NumPy trusts it."""
    size = archive.getinfo(name).file_size
    with archive.open(name) as file:
        read_header(cast(BinaryIO, file), size)
    with archive.open(name) as file:
        return _read_array(cast(BinaryIO, file))


def _read_array(file: BinaryIO) -> Array:
    array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _first_of(names: Sequence[str], key: str, present: Collection[str]) -> dict[str, str]:
    """Return {key: the first of `names` that is present}, or {} if no name is present."""
    matches = [name for name in names if name in present]
    return {key: matches[0]} if matches else {}


def _read_npy(files: Sequence[DataFile], request: DataRequest) -> Data:
    names = [spec.name for spec in request.inputs]
    if not request.predicting:
        names += request.outputs
    arrays: list[Array] = []
    for file in files:
        try:
            arrays.append(_npy_array(file))
        except READ_ERRORS as error:
            raise DataError(f"{file.name} cannot be read: {_one_line(error)}") from None
    may_have_weights = not request.predicting and bool(request.outputs)
    if not len(names) <= len(arrays) <= len(names) + may_have_weights:
        optional = f", and {SAMPLE_WEIGHT} if there are any" if may_have_weights else ""
        raise DataError(
            f"Got {len(files)} .npy files, but the model needs {len(names)} arrays. Pass a .npy for"
            f" each, in this order: {', '.join(names)}{optional}."
        )
    count = len(request.inputs)
    x = dict(zip(names[:count], arrays))
    y = dict(zip(names[count:], arrays[count:]))
    return x, y or None, arrays[-1] if len(arrays) > len(names) else None


def _npy_array(file: DataFile) -> Array:
    """Return the array of a .npy, which is mapped into memory if it is not standard input."""
    if file.contents is None:
        return map_array(Path(file.path))
    with file.open() as binary:
        read_header(binary, len(file.contents))
        binary.seek(0)
        return _read_array(binary)


def _read_table(file: DataFile, request: DataRequest) -> Data:
    columns = read_columns(file)
    names = [spec.name for spec in request.inputs]
    several = len(names) > 1
    y = _label_columns(file, [n for n in columns if not (several and n in names)], request)
    not_inputs = {column for label_columns in y.values() for column in label_columns}
    if not (several and SAMPLE_WEIGHT in names):
        not_inputs.add(SAMPLE_WEIGHT)
    features = [name for name in columns if name not in not_inputs]
    if several:
        present = [name for name in names if name in columns]
        known = [*not_inputs, *names]
    else:
        present = names if features else []
        known = [*not_inputs, *features]
    _check_names(file, "column", list(columns), [*present, *y], known, request)
    if not several:
        columns |= {names[0]: _joined(file, columns, features)}
    _refuse_text(file, columns, names)
    x = {name: columns[name] for name in names}
    inputs = {spec.name: _as_input(x[spec.name], spec) for spec in request.inputs}
    if request.predicting:
        return inputs, None, None
    labels = {output: _as_labels(file, columns, names) for output, names in y.items()}
    _refuse_text(file, columns, not_inputs & {SAMPLE_WEIGHT} & {*columns})
    weights = columns.get(SAMPLE_WEIGHT) if SAMPLE_WEIGHT in not_inputs else None
    return inputs, labels or None, weights


def _joined(file: DataFile, columns: Mapping[str, Array], names: Sequence[str]) -> Array:
    """Return columns side by side, as one matrix. DataError: a column has text."""
    _refuse_text(file, columns, names)
    if len(names) == 1 and columns[names[0]].ndim > 1:
        return columns[names[0]]
    return np.concatenate([columns[name].reshape(len(columns[name]), -1) for name in names], axis=1)


def _refuse_text(file: DataFile, columns: Mapping[str, Array], names: Collection[str]) -> None:
    """Raise DataError if one of these columns, which must hold numbers, has text."""
    for name in names:
        if columns[name].dtype.kind == "U":
            raise DataError(
                f"{file.name} has text in the column {name!r} ({str(columns[name][0])!r} in row 0),"
                " but inputs and sample weights are numbers. If the column has the labels, pass"
                f" --label {name}; otherwise encode it as numbers."
            )


def _label_columns(
    file: DataFile, header: Sequence[str], request: DataRequest
) -> dict[str, list[str]]:
    """Return a dict output -> the columns with its labels."""
    if request.labels:
        missing = [name for name in request.labels if name not in header]
        if missing and not request.predicting:
            raise DataError(
                f"{file.name} has no column {', '.join(map(repr, missing))} for labels. Its columns"
                f" are {listed_names(header, missing[0])}."
            )
        if len(request.outputs) != 1 and not request.predicting:
            outputs = ", ".join(request.outputs) or "none"
            raise DataError(
                f"--label needs a model with one output that has a loss. The outputs with a loss"
                f" are {outputs}. Give the columns of labels the names of these outputs."
            )
        return {request.outputs[0]: [name for name in request.labels if name in header]}
    columns = {output: [output] for output in request.outputs if output in header}
    if not columns and (len(request.outputs) == 1 or request.predicting):
        first = _first_of(Y_NAMES, request.outputs[0], header)
        columns = {output: [name] for output, name in first.items()}
    return columns


def _check_names(
    file: DataFile,
    kind: str,
    names: Sequence[str],
    matched: Collection[str],
    known: Collection[str],
    request: DataRequest,
) -> None:
    """Raise DataError for inputs and labels that a file lacks, and for unused names.

    Unused names may be misspelt.

    - `kind`: "array" or "column".
    - `names`: all names in the file.
    - `known`: the names that are read.
    - `matched`: the inputs and outputs that have an array or column.
    """
    inputs = [str(spec) for spec in request.inputs if spec.name not in matched]
    outputs: list[str] = []
    surplus: list[str] = []
    if not request.predicting:
        outputs = [output for output in request.outputs if output not in matched]
        surplus = [name for name in names if name not in known]
    problems = []
    if inputs:
        problems.append(f"no {kind} for the input {', '.join(inputs)}")
    if outputs:
        problems.append(f"no {kind} with labels for the output {', '.join(outputs)}")
    if surplus:
        problems.append(f"{kind}s that the model does not use ({', '.join(surplus)})")
    if not problems:
        return
    hint = f"one {kind} for each"
    if kind == "column":
        hint = "or select labels with --label"
    elif len(request.inputs) == 1 and len(request.outputs) <= 1:
        hint = "or name them X and y"
    raise DataError(
        f"{file.name} has {' and '.join(problems)}. Its {kind}s are {', '.join(names) or 'none'}."
        f" Name the {kind}s like the model's inputs and outputs, {hint}; {SAMPLE_WEIGHT} is"
        " optional."
    )


def _as_input(array: Array, spec: TensorSpec) -> Array:
    """Return columns in the type of an input, and in its shape if its sizes are known.

    A row of the file can therefore be an image.
    """
    if spec.dtype.kind == "f":
        array = array.astype(spec.dtype)
    sizes = [d for d in (spec.shape or (None, None))[1:] if isinstance(d, int)]
    if (
        spec.rank not in (None, 2)
        and len(sizes) + 1 == spec.rank
        and math.prod(sizes) == array[0].size
    ):
        array = array.reshape(len(array), *sizes)
    return array


def _as_labels(file: DataFile, columns: Mapping[str, Array], names: Sequence[str]) -> Array:
    """Return the labels of an output, as integers if all are whole numbers.

    Whole numbers may be classes. A loss that needs floats casts the integers. Text stays text.
    """
    if len(names) > 1:
        array = _joined(file, columns, names)
    else:
        array = columns[names[0]]
    is_finite = array.dtype.kind == "f" and np.isfinite(array).all()
    if is_finite and np.array_equal(array, np.rint(array)):
        return array.astype(np.int64)
    return array


def write(
    path: Path, outputs: Mapping[str, Array], classes: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Write predictions as .npy (one output), .npz (outputs by name) or .csv (a row per line).

    The file is written atomically.

    - `classes`: the names of classes by output, for the line of names of a .csv.
    """
    kind = path.suffix.lower()
    if kind == ".csv":
        text = as_csv(outputs, classes).encode()
        write_atomically(path, lambda file: file.write(text))
    elif kind == ".npz":
        write_atomically(path, lambda file: np.savez(file, **dict[str, Any](outputs)))
    else:
        (array,) = outputs.values()
        write_atomically(path, lambda file: _save(file, array))


def check_output(path: Path, outputs: Sequence[str]) -> None:
    """Raise DataError if a file cannot hold these outputs, before anything is computed."""
    kind = path.suffix.lower()
    if kind not in (".npy", ".npz", ".csv"):
        raise DataError(
            f"The file of predictions must end in .npy, .npz or .csv, got {str(path)!r}."
        )
    if kind == ".npy" and len(outputs) > 1:
        raise DataError(
            "A .npy file can contain only one array, but the model has the outputs"
            f" {', '.join(outputs)}. Write a .npz or .csv file."
        )


def as_csv(outputs: Mapping[str, Array], classes: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return a line of names, then a line for each row.

    Each column of a matrix is called `<output>_<number>`, or `<output>_<class>` if `classes` has a
    name for each of its columns. DataError: an output is neither a vector
    nor a matrix.
    """
    header: list[str] = []
    columns: list[Array] = []
    rows = {len(array) if array.ndim else 1 for array in outputs.values()}
    for name, array in outputs.items():
        if array.ndim not in (1, 2) or len(rows) > 1:
            raise DataError(
                "A .csv file can contain only vectors and matrices with one row for each row of"
                f" the data, but output {name} has shape {list(array.shape)}. Write a .npz file."
            )
        single = array.ndim == 1 or array.shape[1] == 1
        known = (classes or {}).get(name, ())
        if not single:
            endings = known if len(known) == array.shape[1] else range(array.shape[1])
            header += [f"{name}_{ending}" for ending in endings]
        else:
            header.append(name)
        columns += [array.reshape(len(array))] if single else list(array.T)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    # the shortest text that reads back as the same number
    table.writerows(zip(*(column.astype(str) for column in columns)))
    return text.getvalue()


def _save(file: BinaryIO, array: Array) -> None:
    np.lib.format.write_array(file, array, allow_pickle=False)

"""Files of data: .npz, .npy and .csv become the inputs, labels and sample weights of a model, and
predictions become files.

Only numpy reads them, and no pickle, so that a stranger's file runs no code. A .npy is mapped into
memory and read as batches need it.
"""

from __future__ import annotations

import csv
import io
import math
import warnings
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.errors import DataError
from onnxfit.files import write_atomically
from onnxfit.graph.names import SAMPLE_WEIGHT
from onnxfit.graph.spec import TensorSpec

Array = npt.NDArray[Any]
X_NAMES = ("X", "x")  # what the only input may be called in a .npz, besides its own name
# what the only output with a loss may be called in a .npz or .csv
Y_NAMES = ("y", "Y", "label", "labels")


@dataclass(frozen=True)
class DataRequest:
    """What a command reads of a file: the model's inputs, and the labels of `outputs`; a prediction
    passes over these.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[str]
    # the columns of a .csv that are labels, where they have names of their own
    labels: Sequence[str] = ()
    predicting: bool = False


# x, y, sample_weight, as Trainer takes them
Data = tuple[dict[str, Array], "dict[str, Array] | None", "Array | None"]


def inputs_of(model: onnx.ModelProto) -> list[TensorSpec]:
    """The model's inputs."""
    own = {tensor.name for tensor in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        if value.name not in own:
            tensor = value.type.tensor_type
            if not tensor.elem_type:
                raise DataError(
                    f"The input {value.name!r} is no tensor, and files hold tensors: use onnxfit"
                    " from Python."
                )
            dims = [
                d.dim_value if d.HasField("dim_value") else d.dim_param or None
                for d in tensor.shape.dim
            ]
            shape = tuple(dims) if tensor.HasField("shape") else None
            specs.append(
                TensorSpec(
                    value.name,
                    np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)),
                    shape,
                )
            )
    return specs


def read(paths: Sequence[str], wanted: DataRequest) -> Data:
    """Inputs, labels and sample weights.

    DataError for a file that is damaged, or does not have what the model needs.
    """
    kinds = {Path(path).suffix.lower() for path in paths}
    if kinds == {".npy"}:
        return _read_npy(paths, wanted)
    if len(paths) != 1 or kinds - {".npz", ".csv"}:
        raise DataError(
            "Data is one .npz, one .csv, or a .npy for each array (X.npy, then y.npy), got"
            f" {', '.join(paths)}."
        )
    if wanted.labels and kinds != {".csv"}:
        raise DataError(f"--label names columns of a .csv, and {paths[0]!r} is none.")
    try:
        return (_read_csv if kinds == {".csv"} else _read_npz)(paths[0], wanted)
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(f"{paths[0]!r} cannot be read: {_line(error)}") from None


_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    NotImplementedError,
    csv.Error,
    zipfile.BadZipFile,
    zlib.error,
)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        "it holds Python objects, which may run code."
        if "allow_pickle" in text
        else text or type(error).__name__
    )


def _read_npz(path: str, wanted: DataRequest) -> Data:
    with (
        open(path, "rb") as opened,
        zipfile.ZipFile(opened),
        np.load(opened, allow_pickle=False) as file,
    ):
        names = list(file.files)
        x = {spec.name: spec.name for spec in wanted.inputs if spec.name in names}
        if not x and len(wanted.inputs) == 1:
            x = _named(wanted.inputs[0].name, X_NAMES, names)
        y = {
            output: output
            for output in wanted.outputs
            if output in names and output not in x.values()
        }
        if not y and len(wanted.outputs) == 1:
            y = _named(wanted.outputs[0], Y_NAMES, {*names} - {*x.values()})
        _check(
            path,
            "array",
            names,
            [*x, *([] if wanted.predicting else y)],
            [*x.values(), *y.values(), SAMPLE_WEIGHT],
            wanted,
        )
        inputs = {key: file[name] for key, name in x.items()}
        if wanted.predicting:
            return inputs, None, None
        weights = (
            file[SAMPLE_WEIGHT]
            if SAMPLE_WEIGHT in names and SAMPLE_WEIGHT not in x.values()
            else None
        )
        return inputs, {key: file[name] for key, name in y.items()} or None, weights


def _named(key: str, names: Sequence[str], there: Collection[str]) -> dict[str, str]:
    """The first of some names that a file has."""
    found = [name for name in names if name in there]
    return {key: found[0]} if found else {}


def _read_npy(paths: Sequence[str], wanted: DataRequest) -> Data:
    names = [*(spec.name for spec in wanted.inputs), *([] if wanted.predicting else wanted.outputs)]
    arrays: list[Array] = []
    for path in paths:
        try:
            arrays.append(np.lib.format.open_memmap(path, mode="r"))
        except _UNREADABLE as error:
            raise DataError(f"{path!r} cannot be read: {_line(error)}") from None
    most = len(names) + (not wanted.predicting and bool(wanted.outputs))
    if not len(names) <= len(arrays) <= most:
        more = f", and {SAMPLE_WEIGHT} if there are any" if most > len(names) else ""
        raise DataError(
            f"{len(paths)} of {len(names)} arrays: give a .npy for each, in this order:"
            f" {', '.join(names)}{more}."
        )
    count = len(wanted.inputs)
    x, y = dict(zip(names[:count], arrays)), dict(zip(names[count:], arrays[count:]))
    return x, y or None, arrays[-1] if len(arrays) > len(names) else None


def _read_csv(path: str, wanted: DataRequest) -> Data:
    columns = _columns(path)
    several = [spec.name for spec in wanted.inputs] if len(wanted.inputs) > 1 else []
    y = _label_columns(path, [name for name in columns if name not in several], wanted)
    taken = {name for names in y.values() for name in names} | {SAMPLE_WEIGHT} - {*several}
    features = [name for name in columns if name not in taken]
    found = (
        [name for name in several if name in columns]
        if several
        else [wanted.inputs[0].name]
        if features
        else []
    )
    _check(
        path,
        "column",
        list(columns),
        [*found, *([] if wanted.predicting else y)],
        [*taken, *(several or features)],
        wanted,
    )
    x = {name: columns[name] for name in several} or {
        found[0]: np.stack([columns[name] for name in features], axis=1)
    }
    inputs = {spec.name: _as_input(x[spec.name], spec) for spec in wanted.inputs}
    if wanted.predicting:
        return inputs, None, None
    labels = {output: _as_labels([columns[name] for name in names]) for output, names in y.items()}
    return inputs, labels or None, columns.get(SAMPLE_WEIGHT) if SAMPLE_WEIGHT in taken else None


def _columns(path: str) -> dict[str, Array]:
    """A table of numbers under a line of names."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        header = [name.strip() for name in next(csv.reader(file), [])]
        if not header or len(set(header)) < len(header) or "" in header:
            raise DataError(
                f"{path!r} needs a first line with a name of its own for each column, got"
                f" {', '.join(header) or 'nothing'}."
            )
        with warnings.catch_warnings():
            # of a file without rows, for which there is an error below
            warnings.simplefilter("ignore")
            table = np.loadtxt(
                file, delimiter=",", ndmin=2, comments=None, dtype=np.float64, quotechar='"'
            )
    if not len(table):
        raise DataError(f"{path!r} has no rows.")
    if table.shape[1] != len(header):
        raise DataError(
            f"{path!r} has {len(header)} names in its first line, and {table.shape[1]} columns."
        )
    return dict(zip(header, table.T))


def _label_columns(path: str, header: Sequence[str], wanted: DataRequest) -> dict[str, list[str]]:
    """Output -> the columns with its labels."""
    if wanted.labels:
        missing = [name for name in wanted.labels if name not in header]
        if missing and not wanted.predicting:
            raise DataError(
                f"{path!r} has no column {', '.join(map(repr, missing))} for labels; it has"
                f" {', '.join(header)}."
            )
        if len(wanted.outputs) != 1 and not wanted.predicting:
            outputs = ", ".join(wanted.outputs) or "none"
            raise DataError(
                f"--label is for a model with one output that has a loss; these are {outputs}. Call"
                " the columns as they are."
            )
        return {wanted.outputs[0]: [name for name in wanted.labels if name in header]}
    found = {output: [output] for output in wanted.outputs if output in header}
    if not found and (len(wanted.outputs) == 1 or wanted.predicting):
        found = {key: [name] for key, name in _named(wanted.outputs[0], Y_NAMES, header).items()}
    return found


def _check(
    path: str,
    kind: str,
    there: Sequence[str],
    found: Sequence[str],
    known: Sequence[str],
    wanted: DataRequest,
) -> None:
    """DataError for an input or label that the file does not have, and for what it has besides:
    that may be a name misspelt.
    """
    inputs = [str(spec) for spec in wanted.inputs if spec.name not in found]
    outputs = (
        [] if wanted.predicting else [output for output in wanted.outputs if output not in found]
    )
    surplus = [] if wanted.predicting else [name for name in there if name not in known]
    wrong = [f"no {kind} for the input {', '.join(inputs)}"] if inputs else []
    wrong += [f"no {kind} with the labels of {', '.join(outputs)}"] if outputs else []
    wrong += [f"{kind}s that nothing reads ({', '.join(surplus)})"] if surplus else []
    if wrong:
        only = len(wanted.inputs) == 1 and len(wanted.outputs) <= 1
        names = (
            "name labels by --label"
            if kind == "column"
            else "or name them X and y"
            if only
            else "one for each"
        )
        raise DataError(
            f"{path!r} has {' and '.join(wrong)}. It has {', '.join(there) or 'nothing'}. "
            f"Name {kind}s like inputs and outputs, {names}; {SAMPLE_WEIGHT} is optional."
        )


def _as_input(array: Array, spec: TensorSpec) -> Array:
    """Columns in the type of an input, and in its shape where its sizes are known: an image may be
    a row.
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


def _as_labels(columns: Sequence[Array]) -> Array:
    """Whole numbers may be classes; a loss that wants floats makes floats of them."""
    array = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    return (
        array.astype(np.int64)
        if np.isfinite(array).all() and np.array_equal(array, np.rint(array))
        else array
    )


def write(path: Path, outputs: Mapping[str, Array]) -> None:
    """Predictions as .npy (one output), .npz (each under its name) or .csv (one row a line); whole,
    or not there.
    """
    kind = path.suffix.lower()
    if kind == ".csv":
        text = as_csv(outputs).encode()
        write_atomically(path, lambda file: file.write(text))
    elif kind == ".npz":
        write_atomically(path, lambda file: np.savez(file, **dict[str, Any](outputs)))
    else:
        (array,) = outputs.values()
        write_atomically(path, lambda file: _save(file, array))


def check_output(path: Path, outputs: Sequence[str]) -> None:
    """DataError, before anything is computed, for a file that could not hold these outputs."""
    kind = path.suffix.lower()
    if kind not in (".npy", ".npz", ".csv"):
        raise DataError(f"Predictions are written as .npy, .npz or .csv, got {str(path)!r}.")
    if kind == ".npy" and len(outputs) > 1:
        raise DataError(
            f"A .npy holds one array, and the model has the outputs {', '.join(outputs)}: write a"
            " .npz or .csv."
        )


def as_csv(outputs: Mapping[str, Array]) -> str:
    """A line of names, then a line for each row; a matrix has a column `<output>_<number>` for each
    of its own. DataError beyond matrices.
    """
    header: list[str] = []
    columns: list[Array] = []
    rows = {len(array) if array.ndim else 1 for array in outputs.values()}
    for name, array in outputs.items():
        if array.ndim not in (1, 2) or len(rows) > 1:
            raise DataError(
                f"A .csv holds a vector or a matrix with a row for each of the data; {name} is"
                f" {list(array.shape)}: write a .npz."
            )
        single = array.ndim == 1 or array.shape[1] == 1
        header += [name] if single else [f"{name}_{number}" for number in range(array.shape[1])]
        columns += [array.reshape(len(array))] if single else list(array.T)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    # the shortest text that gives the same number
    table.writerows(zip(*(column.astype(str) for column in columns)))
    return text.getvalue()


def _save(file: BinaryIO, array: Array) -> None:
    np.lib.format.write_array(file, array, allow_pickle=False)

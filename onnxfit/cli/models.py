"""Models that commands take: a .onnx, or a checkpoint."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy.typing as npt
import onnx

from onnxfit.data import DataAdapter
from onnxfit.errors import DataError, ModelError, SettingError
from onnxfit.graph.model import to_ir
from onnxfit.graph.names import LOSS
from onnxfit.graph.weights import all_weights
from onnxfit.load.batch_axis import layout_of
from onnxfit.load.batch_view import batch_first
from onnxfit.load.caches import without_caches
from onnxfit.load.model_file import write_model
from onnxfit.load.reading import load_model
from onnxfit.runtime.backends.inputs import run_on
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import BoundSession
from onnxfit.runtime.values import join_batches
from onnxfit.tools.editing.fixed_inputs import with_fixed_inputs
from onnxfit.trainer import Trainer
from onnxfit.training import checkpoint

# A checkpoint contains no code, so it cannot restore losses or optimizers of the user's own
# classes. With these settings instead, every checkpoint can be read.
WITHOUT_CODE: dict[str, Any] = {"loss": None, "penalty": None, "optimizer": "sgd", "metrics": ()}


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a file is a checkpoint (a zip archive), as opposed to a model."""
    return Path(path).is_file() and zipfile.is_zipfile(path)


def model_of(path: str) -> onnx.ModelProto:
    """Return the model of a .onnx, or the trained model of a checkpoint.

    Outputs that are not tensors are left out. ModelError: no output remains.
    """
    model = (
        checkpoint.load(path, WITHOUT_CODE).trained_model()
        if is_checkpoint(path)
        else load_model(path)
    )
    tensors = [value for value in model.graph.output if value.type.HasField("tensor_type")]
    if not tensors:
        raise ModelError(f"{path} has no output that is a tensor.")
    del model.graph.output[:]
    model.graph.output.extend(tensors)
    return model


def settings_of(path: str) -> Mapping[str, Any]:
    """Return the settings of a checkpoint; of a .onnx, none."""
    return checkpoint.load(path, WITHOUT_CODE).settings if is_checkpoint(path) else {}


def model_for_data(path: str, fixed_inputs: Mapping[str, Any]) -> onnx.ModelProto:
    """Return the model of `model_of` without caches and without fixed inputs.

    - `fixed_inputs`: input -> value.
    """
    return with_fixed_inputs(without_caches(model_of(path)), fixed_inputs)


def write_edited(source: str, output: Path, model: onnx.ModelProto) -> None:
    """Write a model that was made from the file `source`, and print its number of weights."""
    write_model(output, model)
    count = len(all_weights(to_ir(model)))
    click.echo(f"{source} -> {output}: {count} weight{'s' if count != 1 else ''}")


def predict(
    model: onnx.ModelProto,
    x: Any,
    batch_size: int,
    device: str,
    batch_axes: Mapping[str, int | None] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Return a dict output -> array with a row for each row of `x`, along the batch axis.

    The model is run unchanged, so it needs neither weights nor a loss nor gradients. DataError: the
    sizes of an output differ between batches, so that no array can hold all rows. SettingError: a
    batch axis is not valid.

    - `batch_axes`: as for Trainer.
    """
    target = Device.parse(device)
    layout = layout_of(model, batch_axes)
    model = batch_first(model, layout)
    session = BoundSession(
        model, DoubleBufferedState({}, target), target, None, "prediction", uses_integers=True
    )
    batches: dict[str, list[npt.NDArray[Any]]] = {value.name: [] for value in model.graph.output}
    rows = []
    adapter = DataAdapter(layout.specs, {}, purpose="prediction")
    with adapter.source(x, batch_size=batch_size) as data:
        for batch in data.batches(0):
            rows.append(batch.rows)
            outputs = layout.outputs_in_file(run_on(session, batch).prediction())
            for name, array in outputs.items():
                batches[name].append(array)
    joined = {
        name: join_batches(arrays, layout.joining_axis(name, arrays, rows))
        for name, arrays in batches.items()
    }
    return {name: _one_array(name, outputs) for name, outputs in joined.items()}


def _one_array(name: str, outputs: npt.NDArray[Any] | list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the outputs of all batches. DataError: they do not fit into one array."""
    if isinstance(outputs, list):
        sizes = sorted({array.shape for array in outputs})
        raise DataError(
            f"Output {name!r} does not fit into one array, because its shape differs between"
            f" batches, or has no axis of rows: {sizes[0]} and {sizes[-1]}, for example. Pass a"
            " --batch-size for all rows, or use Trainer.predict in Python, which returns a list."
        )
    return outputs


def require_loss(trainer: Trainer) -> Trainer:
    """Return the trainer. SettingError, before its data is read: it has no loss."""
    if not trainer.objectives and all(v.name != LOSS for v in trainer.structure.graph.output):
        raise SettingError(
            f"No loss was given, and the model has no output {LOSS!r}. Pass a loss, such as --loss"
            " cross_entropy."
        )
    return trainer

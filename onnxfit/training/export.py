"""The trained model, its adapters, and the graphs of a step, as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx

from onnxfit.checks import shortened
from onnxfit.data.order import checked_batch_size
from onnxfit.errors import SettingError, listed_names, warn_user
from onnxfit.files import require_path, write_atomically
from onnxfit.gradients.inspection import Inspection, inspect_working
from onnxfit.graph import names
from onnxfit.graph.model import OnnxModel
from onnxfit.graph.shared_tensors import Array, whole_model
from onnxfit.graph.tensors import MAX_INLINE_BYTES, nbytes, without_numbers, write_safetensors
from onnxfit.load.constant_nodes import lower_constants
from onnxfit.load.facts import facts_of
from onnxfit.load.model_file import ModelSnapshot, write_model
from onnxfit.load.training_form import to_inference_form
from onnxfit.runtime.placement import operators_on_cpu
from onnxfit.tools.editing.add_biases import count_layers_without_bias
from onnxfit.trainable.adapters.adapted import AdaptedModel
from onnxfit.trainable.adapters.onnx_adapter import is_onnx_adapter, write_onnx_adapter
from onnxfit.trainable.adapters.peft import require_task, write_adapters
from onnxfit.training.forms import given_file
from onnxfit.training.lineage import add_lineage
from onnxfit.training.training import Training

Export = Callable[[Mapping[str, Array]], OnnxModel]


def given_model(training: Training) -> ModelSnapshot:
    """Return `Trainer.model`, which refers to the memory of the training."""
    model = given_file(training.trainable, training.state.get_weights(copy=False))
    return ModelSnapshot(model, training.recipe.state)


def structure(training: Training) -> onnx.ModelProto:
    """Return `Trainer.structure`."""
    model = given_model(training).model
    large = {t.name for t in model.graph.initializer if nbytes(t) > MAX_INLINE_BYTES}
    return without_numbers(model.proto, large)


def export(
    training: Training,
    path: str | os.PathLike[str] | None,
    *,
    averaged: bool = False,
    adapters: str = "merged",
    lineage: bool = True,
) -> onnx.ModelProto:
    """Return the trained model and write it from the memory of the training; see `Trainer.export`.

    Meanwhile no other thread can change or use the state.
    """
    with training.backend.lock:
        model = exported(
            training, averaged=averaged, adapters=adapters, lineage=lineage, copy=False
        )
        return model.whole() if path is None else model.written(path)


def exported(
    training: Training,
    *,
    averaged: bool = False,
    adapters: str = "merged",
    lineage: bool = True,
    copy: bool = True,
) -> ModelSnapshot:
    """Return the model of `Trainer.export`; `copy` is as for `Trainer.get_weights`."""
    averages = {
        name: one.optimizer.average_slot for name, one in training.recipe.optimizers.items()
    }
    if averaged and None in averages.values():
        raise SettingError(
            "averaged=True needs an optimizer that averages the weights, such as"
            " optimizer=onnxfit.optimizers.Adam(ema_momentum=0.99)."
        )
    if adapters not in ("merged", "requantized", "inputs"):
        raise SettingError(
            "export needs adapters to be 'merged', 'requantized' or 'inputs', got"
            f" {shortened(adapters)}."
        )
    exported: Export = training.trainable.export
    if adapters != "merged":
        form = _require_adapters(training, f"export(adapters={adapters!r})")
        exported = form.with_adapter_inputs if adapters == "inputs" else form.requantized
    training.require_equal_ranks("export")
    with training.backend.lock:
        arrays = training.state.get_weights(copy=copy)
        state = training.backend.state
        for name in training.recipe.weights if averaged else ():
            slot = names.slot(name, averages[name] or "")
            arrays[name] = state.get(slot) if copy else state.view(slot)
        unchanged = nullcontext if copy else training.state.until_it_changes()
    model = exported(arrays)
    to_inference_form(model.proto, training.recipe.batch_norm)
    lower_constants(model.proto)
    if training.world.is_main and not training.lineage.is_empty:
        value = training.lineage.as_json(training) if lineage else None
        add_lineage(model.proto, value, averaged=averaged, adapters=adapters)
    return ModelSnapshot(model, training.recipe.state, training.world.is_main, unchanged)


def loss_tensors(
    training: Training, path: str | os.PathLike[str] | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors that the losses train, and write them; see `Trainer.loss_tensors`."""
    training.require_equal_ranks("loss_tensors")
    own = training.recipe.loss_weights
    with training.backend.lock:
        current = training.state.get_weights()
    arrays = {n: current[n] if n in current else training.recipe.array(n).copy() for n in own}
    if path is not None and training.world.is_main:
        require_path(path)
        write_atomically(path, lambda file: write_safetensors(file, arrays))
    return arrays


def export_adapter(
    training: Training,
    path: str | os.PathLike[str],
    task_type: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Write only the adapters; see `Trainer.export_adapter`."""
    require_path(path)
    require_task(task_type, base_model)
    if is_onnx_adapter(path) and (task_type or base_model):
        raise SettingError(
            f"{os.fspath(path)!r} is a file for onnxruntime, which stores no task_type and no"
            " base_model. Remove the arguments, or pass a folder, which is written for PEFT."
        )
    form = _require_adapters(training, "export_adapter")
    training.require_equal_ranks("export_adapter")
    own = {name for one in form.adapters for name in one.names}
    with training.backend.lock:
        trained = training.state.get_weights(copy=False)
        arrays = {name: array.copy() for name, array in trained.items() if name in own}
    others = [name for name in trained if name not in own]
    if others:
        warn_user(
            f"{os.fspath(path)!r} does not contain {listed_names(others)}, which are trained in"
            " addition to the adapters. export(path) writes the whole model, and export(path,"
            " adapters='inputs') writes the base model with these weights."
        )
    if is_onnx_adapter(path):
        tensors = form.parameters(arrays)
        return write_onnx_adapter(path, tensors) if training.world.is_main else Path(path)
    unnamed = [one.weight.module for one in form.adapters if one.weight.is_unnamed]
    if unnamed:
        warn_user(
            f"PEFT cannot find the layers of {listed_names(unnamed)}: the file does not say which"
            " modules they were exported from. Only onnxfit.LoRA.load can read their adapters."
        )
    tied = [one.weight.module for one in form.adapters if one.weight.is_tied]
    if tied:
        warn_user(
            f"PEFT cannot read the adapter of {listed_names(tied)}, an embedding table that is"
            " also the weight of a linear layer. Only onnxfit.LoRA.load can read it."
        )
    if not training.world.is_main:
        return Path(path)
    return write_adapters(path, form.saved(arrays), task_type, base_model)


def write_graphs(training: Training, folder: Any, prefix: str, suffix: str) -> dict[str, Any]:
    """Write every graph; see `Trainer.save_onnx_graph`."""
    with training.backend.lock:
        models = {"model": given_model(training), "trained": exported(training, copy=False)}
        graphs = {name: snapshot.model.proto for name, snapshot in models.items()}
        graphs |= training.backend.graphs(training.recipe.declared_batch)
        if folder is bytes:
            return {name: _serialized(graph) for name, graph in graphs.items()}
        files = {}
        for name, graph in graphs.items():
            files[name] = f"{prefix}{name}{suffix}.onnx"
            if training.world.is_main:
                write_model(Path(folder) / files[name], graph, training.recipe.state)
    return files


def _serialized(graph: onnx.ModelProto) -> bytes:
    data: bytes = whole_model(graph).SerializeToString(deterministic=True)
    return data


def inspection(
    training: Training, device: str | None = None, *, batch_size: int | None = None
) -> Inspection:
    """Return how each operator is differentiated; see `Trainer.inspect`."""
    recipe = training.recipe
    outputs = recipe.loss_outputs or recipe.float_outputs
    report = inspect_working(recipe.model, recipe.weights, outputs, recipe.gradient.name)
    without_bias = count_layers_without_bias(recipe.model)
    file = training.trainable.file.proto
    facts = facts_of(file, recipe.model, recipe.layout, recipe.weights, without_bias)
    report = replace(report, batch_axes=tuple(recipe.layout.lines()), facts=facts)
    if device is None:
        return report
    if not recipe.loss_outputs:
        raise SettingError(
            "inspect(device=...) needs a training step, but this trainer has no loss. Create"
            " it with Trainer(..., loss='mean_squared_error')."
        )
    rows = None if batch_size is None else checked_batch_size(batch_size)
    on_cpu = operators_on_cpu(recipe, device, rows)
    return replace(report, device=device, on_cpu=on_cpu)


def _require_adapters(training: Training, what: str) -> AdaptedModel:
    """Return the form with adapters. SettingError: the trainer has no adapters."""
    if not isinstance(training.trainable, AdaptedModel):
        raise SettingError(
            f"{what} needs a trainer with adapters, but this trainer has none. Create it with"
            " Trainer(..., adapters=onnxfit.LoRA(rank=8))."
        )
    return training.trainable

"""The contents of a manifest, from the recipe of a trainer and the graphs of a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.numpy_helper import to_array

from onnxfit.graph import names
from onnxfit.graph.labels import AllowedLabels
from onnxfit.graph.tensors import without_numbers
from onnxfit.load.model_file import write_message
from onnxfit.load.wire import Buffer
from onnxfit.step.host_scalars import hosts_compute
from onnxfit.step.recipe import Recipe
from onnxfit.training.setting_values import encode_setting
from onnxfit.training_folder.json_numbers import with_finite_floats
from onnxfit.training_folder.manifest import EXPORT, SCALARS
from onnxfit.training_folder.message import files_of_constants, places_of_tensors
from onnxfit.training_folder.tensors import StateEntry

Json = dict[str, Any]
PROGRAM_VERSION = 1  # of the scalars of a step in JSON
ROLES = {
    names.LEARNING_RATE: "learning_rate",
    names.STEP: "step",
    names.SEED: "seed",
    names.SAMPLE_WEIGHT: "sample_weight",
    names.TOTAL: "loss",
    names.PENALTY: "penalty",
}


# ---------------------------------------------------------------------- graphs and tensors


def described_graph(recipe: Recipe, name: str, file: str, model: onnx.ModelProto) -> Json:
    """Return the entry of a graph: its file, and its inputs and outputs with their roles."""
    inputs, outputs = _input_roles(recipe), _output_roles(recipe)
    values = {True: model.graph.input, False: model.graph.output}
    other = {SCALARS: "scalar", EXPORT: "initializer"}.get(name, "prediction")
    program = {}
    if name == SCALARS and hosts_compute(model):
        program["program"] = described_program(model)
    return {
        "file": file,
        "external": files_of_constants(model),
        "inputs": [
            {**_described_value(v), **inputs.get(v.name, _role("scalar"))} for v in values[True]
        ],
        "outputs": [
            {**_described_value(v), **outputs.get(v.name, _role(other))} for v in values[False]
        ],
        **program,
    }


def _role(role: str, of: str | None = None) -> Json:
    return {"role": role} if of is None else {"role": role, "of": of}


def _input_roles(recipe: Recipe) -> dict[str, Json]:
    roles = {name: _role(role) for name, role in ROLES.items()}
    roles |= {name: _role("state") for name in _state_names(recipe)}
    roles |= {
        name: {**_role("schedule"), "schedule": described_object(schedule)}
        for name, schedule in recipe.schedules.items()
    }
    roles |= {spec.name: _role("x") for spec in recipe.inputs}
    for name, target in recipe.targets.items():
        roles[target.input] = {**_role("y", name), "labels": described_labels(target.allowed)}
    return roles


def described_labels(allowed: AllowedLabels) -> Json:
    """Return the labels that a host may pass, with null for a bound that is infinite."""
    bounds = {"least": allowed.minimum, "greatest": allowed.maximum}
    return {
        **{name: bound if isfinite(bound) else None for name, bound in bounds.items()},
        "values": None if allowed.values is None else list(allowed.values),
        "ignored": allowed.ignored,
    }


def _output_roles(recipe: Recipe) -> dict[str, Json]:
    roles = {name: _role(role) for name, role in ROLES.items()}
    roles |= {names.updated(name): _role("state", name) for name in _state_names(recipe)}
    for output in recipe.objectives:
        roles[names.output_loss(output)] = _role("output_loss", output)
        roles[names.count(output)] = _role("count", output)
    return roles


def _state_names(recipe: Recipe) -> list[str]:
    slots = [names.slot(weight, slot) for weight, own in recipe.slots.items() for slot in own]
    return [*recipe.state, *slots]


def _described_value(value: onnx.ValueInfoProto) -> Json:
    """Return name, type and shape of an input or output of a graph."""
    tensor = value.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = [
            d.dim_value if d.HasField("dim_value") else d.dim_param or None
            for d in tensor.shape.dim
        ]
    return {"name": value.name, "type": _type_name(tensor.elem_type), "shape": shape}


def _type_name(element_type: int) -> str:
    return str(ir.DataType(element_type).numpy())


def described_state(entries: Sequence[StateEntry], outputs: Collection[str]) -> list[Json]:
    """Return the entries of the state; `outputs` are the outputs of the training step."""
    described = []
    for entry in entries:
        output = names.updated(entry.name)
        described.append(
            {
                **_described_entry(entry),
                "kind": entry.kind,
                "of": entry.of,
                "output": output if output in outputs else None,
            }
        )
    return described


def _described_entry(entry: StateEntry) -> Json:
    return {"name": entry.name, "type": entry.dtype, "shape": list(entry.shape)}


def computed_tensors(
    export: onnx.ModelProto | None, initializers: Collection[str]
) -> dict[str, onnx.ValueInfoProto]:
    """Return the outputs of the graph `export`, by the initializers that they are values of.

    - `export`: the graph; None if there is none.
    - `initializers`: the names of the model's initializers.
    """
    outputs = {} if export is None else {value.name: value for value in export.graph.output}
    found = {name: outputs.get(names.exported(name)) for name in initializers}
    return {name: value for name, value in found.items() if value is not None}


def described_model(
    file: str,
    data: Buffer,
    tensors: Mapping[str, StateEntry],
    computed: Mapping[str, onnx.ValueInfoProto],
) -> Json:
    """Return the places of the trained tensors in the bytes of the deployable model.

    - `tensors`: initializer -> the entry of the state that has its bytes.
    - `computed`: initializer -> the output of the graph `export` that has its bytes.
    """
    places = places_of_tensors(data)
    described = []
    for name, entry in tensors.items():
        place = places[name]
        described.append(
            {
                **_described_entry(entry),
                "name": name,
                "state": entry.name,
                "offset": place.offset,
                "bytes": place.size,
                "transposed": False,
            }
        )
    for name, value in computed.items():
        place = places[name]
        described.append(
            {
                **_described_value(value),
                "name": name,
                "state": None,
                "output": value.name,
                "offset": place.offset,
                "bytes": place.size,
                "transposed": False,
            }
        )
    return {"file": file, "tensors": described}


class Checksum:
    """A file that keeps only the SHA-256 of its contents, `digest`."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: memoryview | bytes, /) -> None:
        """Take bytes."""
        self.digest.update(data)


def source_hash(model: onnx.ModelProto, trained: Sequence[str]) -> str:
    """Return the SHA-256 of a model without the values of its trained tensors."""
    checksum = Checksum()
    write_message(checksum, without_numbers(model, trained))
    return checksum.digest.hexdigest()


# ---------------------------------------------------------------------- losses and metrics


def described_losses(recipe: Recipe, outputs: Collection[str]) -> list[Json]:
    """Return descriptions of how the loss of each output combines into the loss of an epoch.

    - `outputs`: the outputs of the training step or of the evaluation.
    """
    if not recipe.objectives:
        own = {"output": None, "name": None, "settings": None, "value": names.TOTAL}
        return [{**own, "weight": 1.0, "count": None, "reduction": "mean"}]
    several = len(recipe.objectives) > 1
    described = []
    for output, objective in recipe.objectives.items():
        count, value = names.count(output), names.TOTAL
        if several:
            learned = objective.log_variance is not None
            value = names.weighted_loss(output) if learned else names.output_loss(output)
        described.append(
            {
                "output": output,
                **described_object(objective.loss),
                "value": value,
                "weight": float(objective.weight) if several else 1.0,
                "count": count if count in outputs else None,
                "reduction": objective.loss.reduction,
            }
        )
    return described


def described_metrics(recipe: Recipe) -> list[Json]:
    """Return the descriptions of the metrics, which no graph computes."""
    described = []
    for one in recipe.metrics:
        metric = described_object(one.metric)
        described.append(
            {
                "name": one.name,
                "output": one.output,
                "metric": metric["name"],
                "settings": metric["settings"],
            }
        )
    return described


def described_object(value: Any) -> Json:
    """Return the class and the settings of an object of a registry; None for custom objects."""
    encoded = encode_setting(value)
    config = encoded.get("onnxfit:class") if isinstance(encoded, dict) else None
    if config is None:
        return {"name": getattr(value, "__name__", type(value).__name__), "settings": None}
    return {"name": config["name"], "settings": with_finite_floats(config.get("settings", {}))}


def described_program(model: onnx.ModelProto) -> Json:
    """Return the constants and the nodes of a graph that `cut_host_scalars` returned.

    Integers of 64 bits are texts, since many readers of JSON keep 53 bits of a number.
    """
    graph = ir.from_proto(model).graph
    constants = []
    for tensor in model.graph.initializer:
        array = to_array(tensor)
        data = array.ravel().tolist()
        if array.dtype == np.int64:
            data = [str(number) for number in data]
        constants.append(
            {"name": tensor.name, "type": str(array.dtype), "data": with_finite_floats(data)}
        )
    nodes = [
        {
            "op": node.op_type,
            "inputs": [value.name for value in node.inputs if value is not None],
            "output": node.outputs[0].name,
            "type": _type_of(node.outputs[0]),
        }
        for node in graph
    ]
    return {"version": PROGRAM_VERSION, "constants": constants, "nodes": nodes}


def _type_of(value: ir.Value) -> str:
    assert value.dtype is not None  # cut_host_scalars keeps nodes of unknown types in the step
    return str(value.dtype.numpy())

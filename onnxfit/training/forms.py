"""The form in which a file is trained, determined in one place for all readers of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onnxfit.data.convert import as_array
from onnxfit.errors import SettingError
from onnxfit.graph.index import required_inputs
from onnxfit.graph.model import OnnxModel, share_tensors, with_references
from onnxfit.graph.shared_tensors import shared_arrays
from onnxfit.graph.tensors import without_numbers
from onnxfit.load.batch_axis import layout_of
from onnxfit.load.batch_view import batch_first
from onnxfit.load.caches import without_caches
from onnxfit.load.constant_nodes import lower_constants
from onnxfit.load.given_axes import axes_by_name
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.load.trainable import TrainableModel
from onnxfit.step.distillation import Distillation
from onnxfit.step.recipe import Recipe
from onnxfit.tools.editing.dynamic_batch import dynamic_batch
from onnxfit.tools.editing.fixed_inputs import with_fixed_inputs
from onnxfit.trainable.adapters.adapted import adapt, listed
from onnxfit.trainable.quantized.quantized_model import to_fake_quantized
from onnxfit.training.carried import with_states


def stored_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Trainer` as stored in a checkpoint: without contents of files."""
    stored = dict(settings)
    if settings["quantization"] is not None:
        stored["quantization"] = settings["quantization"].without_files()
    if settings["teacher"] is not None:
        distillation = Distillation.of(settings["teacher"])
        stored["teacher"] = None if distillation is None else distillation.without_files()
    if settings["adapters"] is not None:
        several = [one.without_matrices() for one in listed(settings["adapters"])]
        stored["adapters"] = several if len(several) > 1 else several[0]
    if settings["fixed_inputs"] is not None:
        fixed = settings["fixed_inputs"]
        stored["fixed_inputs"] = {name: np.array(as_array(fixed[name], name)) for name in fixed}
    if settings["batch_axes"] is not None:
        stored["batch_axes"] = axes_by_name(settings["batch_axes"])
    return stored


def source_of(source: ModelSource, settings: Mapping[str, Any]) -> ModelSource:
    """Return the model for any batch size, if `dynamic_batch` asks for it, or else the source.

    - `settings`: the arguments of `Trainer`. The batch of an input is where `batch_axes` says.

    The errors are those of `onnxfit.dynamic_batch`.
    """
    if not settings["dynamic_batch"]:
        return source
    given = axes_by_name(settings["batch_axes"])
    inputs = required_inputs(load_model(source).graph) if given else {}
    return dynamic_batch(source, axes={n: given[n] for n in inputs if n in given})


def trainable_form(file: OnnxModel, settings: Mapping[str, Any]) -> TrainableModel:
    """Return the model that is trained in place of a file, and the conversion back to the file.

    A file with caches is trained as a model for whole sequences, fixed inputs become constants, the
    batch becomes the first axis, a quantized file is trained in floats, and adapters are trained in
    branches parallel to the layers. Each form is built on the previous one. With adapters, integers
    do not change.

    - `file`: a model that `read_model` returned.
    - `settings`: the arguments of `Trainer`; those that are missing have their defaults.

    ModelError, SettingError or UnknownNameError: the file or a setting is not valid.
    """
    states, fixed = settings.get("state_outputs"), settings.get("fixed_inputs")
    view = without_caches(file.proto)
    if isinstance(states, Mapping) and isinstance(fixed, Mapping):  # the first values of states
        fixed = {name: value for name, value in fixed.items() if name not in states.values()}
    view = with_fixed_inputs(view, fixed)
    axes = settings.get("batch_axes")
    if settings.get("dynamic_batch") and isinstance(axes, Mapping) and isinstance(fixed, Mapping):
        axes = {name: axis for name, axis in axes.items() if name not in fixed}  # has had its use
    layout = with_states(layout_of(view, axes), states)
    view = batch_first(view, layout)
    seen = file if view is file.proto else OnnxModel(view, file.arrays)
    quantization, adapters = settings.get("quantization"), settings.get("adapters")
    if adapters is None:
        form = to_fake_quantized(seen, quantization)
    elif quantization is None:
        form = adapt(seen, adapters, settings.get("seed", 0))
    else:
        raise SettingError(
            "quantization= trains the integers of a file, but with adapters= these integers stay"
            " frozen. Pass only one of the two."
        )
    if seen is file:
        return replace(form, layout=layout)
    return replace(form, file=file, view=view, layout=layout)


def given_file(form: TrainableModel, arrays: Mapping[str, Any]) -> OnnxModel:
    """Return a copy of the given file, which refers to its arrays.

    Its own tensors that are trained have the numbers of `arrays`.
    """
    model = form.export(arrays) if form.is_file else with_references(form.file.proto, {})
    lower_constants(model.proto)
    return model


def unstored_settings(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of arguments of `Trainer` that lose contents in `stored_settings`."""
    names = ("quantization", "teacher", "adapters")
    given = {name: settings[name] for name in names if settings[name] is not None}
    if "adapters" in given and all(one.matrices is None for one in listed(given["adapters"])):
        del given["adapters"]
    if "quantization" in given and given["quantization"] == stored["quantization"]:
        del given["quantization"]
    return tuple(given)


def without_trained_numbers(form: TrainableModel, recipe: Recipe) -> TrainableModel:
    """Return the form without the numbers of the tensors that training changes.

    The training state has these numbers. Exports and checkpoints write them into the file. A form
    that converts the file needs its numbers, and is returned itself.

    - `recipe`: the recipe of the form. Its model then shares the memory of the result.
    """
    if not form.is_file:
        return form
    changing = frozenset(recipe.state)
    file = without_numbers(form.file.proto, changing)
    share_tensors(recipe.model.graph, file, changing)
    return replace(form, file=OnnxModel(file, shared_arrays(file)), model=file)

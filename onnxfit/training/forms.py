"""The form in which a file is trained, found in one place for all that read files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx

from onnxfit.adapters.adapted import adapt, listed
from onnxfit.errors import SettingError
from onnxfit.graph.caches import without_caches
from onnxfit.graph.trainable import TrainableModel
from onnxfit.quantization.unfolding import unfold


def stored_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Trainer` as a checkpoint holds them: without what comes of files."""
    stored = dict(settings)
    if settings["quantization"] is not None:
        stored["quantization"] = settings["quantization"].without_files()
    if settings["adapters"] is not None:
        several = [one.without_matrices() for one in listed(settings["adapters"])]
        stored["adapters"] = several if len(several) > 1 else several[0]
    return stored


def trainable_form(file: onnx.ModelProto, settings: Mapping[str, Any]) -> TrainableModel:
    """Return the model that is trained in the place of a file, and the way back to the file.

    A file with caches is trained as the model for whole sequences, a file of integers in floats,
    and adapters in branches beside the layers. Each form is built on the model of the one before.
    Beside adapters integers stay as they are.

    - `file`: a model that `read_model` returned.
    - `settings`: the arguments of `Trainer`; those that are missing have their defaults.

    Raises ModelError, SettingError or UnknownNameError.
    """
    view = without_caches(file)
    quantization, adapters = settings.get("quantization"), settings.get("adapters")
    if adapters is None:
        form = unfold(view, quantization)
    elif quantization is None:
        form = adapt(view, adapters, settings.get("seed", 0))
    else:
        raise SettingError(
            "quantization= trains the integers of a file, and beside adapters= they stay as they"
            " are: leave one of the two out."
        )
    return form if view is file else replace(form, file=file, view=view)

"""The form in which a file is trained, found in one place for all that read files."""

from __future__ import annotations

from dataclasses import replace

import onnx

from onnxfit.graph.caches import without_caches
from onnxfit.graph.trainable import TrainableModel
from onnxfit.quantization.settings import Quantization
from onnxfit.quantization.unfolding import unfold


def trainable_form(
    file: onnx.ModelProto, quantization: Quantization | None = None
) -> TrainableModel:
    """Return the model that is trained in the place of a file, and the way back to the file.

    A file with caches is trained as the model for whole sequences, and a file of integers in
    floats. Each form is built on the model of the one before.

    - `file`: a model that `read_model` returned.
    - `quantization`: the user's settings; None for the defaults.

    Raises ModelError, SettingError or UnknownNameError.
    """
    view = without_caches(file)
    form = unfold(view, quantization)
    return form if view is file else replace(form, file=file, view=view)

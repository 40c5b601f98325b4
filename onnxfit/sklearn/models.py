"""The input and the output of a model that an estimator fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from onnxfit.errors import SettingError
from onnxfit.graph.model import spec_of
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.normalize import normalize
from onnxfit.step.objectives import Losses


def only_input(model: onnx.ModelProto) -> TensorSpec:
    """Return the spec of the only input. SettingError: the model has several inputs."""
    inputs = [spec_of(v) for v in normalize(model).graph.inputs]
    if len(inputs) != 1:
        raise SettingError(
            "The estimators of onnxfit.sklearn need a model with one input, but the inputs of this"
            f" model are {'; '.join(map(str, inputs))}. Use onnxfit.Trainer instead."
        )
    return inputs[0]


def only_output(loss: Losses, outputs: Mapping[str, TensorSpec]) -> tuple[str, Any]:
    """Return the output that is fitted to y, and the loss of that output.

    SettingError: the model has several outputs, and `loss` does not choose one.
    """
    if isinstance(loss, Mapping):
        if len(loss) != 1 or not set(loss) <= set(outputs):
            raise SettingError(
                f"loss must be a dict with exactly one output ({', '.join(outputs)}) and its loss,"
                f" got {dict(loss)!r}."
            )
        return next(iter(loss.items()))
    if len(outputs) != 1:
        floats = ", ".join(outputs) or "none"
        raise SettingError(
            "The estimators of onnxfit.sklearn fit one float output to y, but the float outputs of"
            f" the model are: {floats}. Choose one with loss={{name: loss}}."
        )
    return next(iter(outputs)), loss

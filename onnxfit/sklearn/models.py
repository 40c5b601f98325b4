"""The input and the output of a model that an estimator fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from onnxfit.errors import SettingError
from onnxfit.graph.model import normalize, spec_of
from onnxfit.graph.spec import TensorSpec
from onnxfit.step.objectives import Losses


def only_input(model: onnx.ModelProto) -> TensorSpec:
    """Return the spec of the only input. SettingError for a model with several."""
    inputs = [spec_of(v) for v in normalize(model).graph.inputs]
    if len(inputs) != 1:
        raise SettingError(
            "The estimators of onnxfit.sklearn take models with one input; this one has"
            f" {'; '.join(map(str, inputs))}. Use a Trainer."
        )
    return inputs[0]


def only_output(loss: Losses, outputs: Mapping[str, TensorSpec]) -> tuple[str, Any]:
    """Return the output that is fitted to y, and the loss of that output.

    SettingError where `loss` leaves a choice between several outputs.
    """
    if isinstance(loss, Mapping):
        if len(loss) != 1 or not set(loss) <= set(outputs):
            raise SettingError(
                f"loss is a dict of one output ({', '.join(outputs)}) and its loss here, got"
                f" {dict(loss)!r}."
            )
        return next(iter(loss.items()))
    if len(outputs) != 1:
        floats = ", ".join(outputs) or "none"
        raise SettingError(
            f"y is fitted to one output, and those of floats are: {floats}. Say which by"
            " loss={name: loss}."
        )
    return next(iter(outputs)), loss

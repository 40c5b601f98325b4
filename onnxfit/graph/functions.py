"""Inline the functions of a model."""

from __future__ import annotations

import onnx
import onnx.inliner

from onnxfit.errors import ModelError


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its functions inlined.

    A model without functions is returned itself. Raises ModelError if a function cannot be inlined.
    """
    if not model.functions:
        return model
    try:
        return onnx.inliner.inline_local_functions(model)
    # ValidationError or RuntimeError, for functions that call themselves or lack an opset import
    except Exception as error:
        raise ModelError(f"The model's functions cannot be inlined: {str(error).strip()}") from None

"""Measure the ranges of a model's values over calibration data."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx

from onnxfit.callbacks.progress.batches import shown_batches
from onnxfit.data import DataAdapter, Source
from onnxfit.errors import DataError
from onnxfit.graph.model import spec_of, to_ir
from onnxfit.runtime.quantizer import Calibrator


def calibration_source(model: onnx.ModelProto, data: Any, batch_size: int) -> Source:
    """Return the batches of calibration data. DataError: the data does not fit the model."""
    inputs = [spec_of(value) for value in to_ir(model).graph.inputs]
    return DataAdapter(inputs, {}, purpose="calibration").source(data, batch_size=batch_size)


def measured_ranges(
    optimized: onnx.ModelProto,
    source: Source,
    method: str,
    verbose: int | str,
    values: Collection[str],
) -> Any:
    """Return the ranges of an optimized model's values, in the form of onnxruntime's quantizer.

    - `source`: the result of `calibration_source`.
    - `method`: one of onnxfit.runtime.quantizer.METHODS.
    - `verbose`: as for `shown_batches`.
    - `values`: the values whose ranges are needed.

    DataError: the data has no rows, or makes a value infinite or NaN.
    """
    rows = 0
    with source, Calibrator(optimized, method, values) as calibrator:
        for batch in shown_batches(source, None, verbose, "calibrate"):
            rows += batch.rows
            if batch.rows:
                calibrator.collect(batch.arrays())
        if not rows:
            raise DataError("The calibration data has no rows. Pass at least one row.")
        return calibrator.ranges()

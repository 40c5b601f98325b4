"""Messages of Flower: records of weights, settings and metrics."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.checks import shortened
from onnxfit.errors import DataError, InstallationError, listed_names
from onnxfit.flower.checks import check_form, check_names

Array = npt.NDArray[Any]

MAX_HEADER_BYTES = 1024  # of an array of numbers in NumPy's file format


def flower_module(module: str) -> Any:
    """Import and return a module of Flower."""
    try:
        return importlib.import_module(f"flwr.{module}")
    except ImportError as error:
        raise InstallationError(
            f'onnxfit.flower needs Flower 1.29 or newer ({error}): pip install "onnxfit[flower]"'
        ) from error


def decoded(record: Any, own: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of an ArrayRecord for a trainer's `own` weights.

    Names, types and shapes are compared with `own` before the data is read, so that a false header
    cannot cause large allocations. Nothing is unpickled.
    """
    check_names(record, own)
    return {name: _decoded_array(name, record[name], old) for name, old in own.items()}


def _decoded_array(name: str, array: Any, old: Array) -> Array:
    """Return an array that a server sent in NumPy's file format."""
    stream = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        if array.stype != "numpy.ndarray" or version != (1, 0):
            raise ValueError(f"unsupported format {array.stype} {version}")
        shape, column_major, dtype = np.lib.format.read_array_header_1_0(
            stream, max_header_size=MAX_HEADER_BYTES
        )
        check_form(name, dtype, shape, old)
        flat = np.frombuffer(array.data, dtype, offset=stream.tell())
        return flat.reshape(shape, order="F" if column_major else "C")
    except DataError:
        raise
    except Exception as error:  # NumPy's reader raises several errors for damaged headers
        raise DataError(
            f"The server sent {name!r}, which is not a valid array: {shortened(str(error))}."
        ) from error


def only_arrays(message: Any) -> tuple[str, Any]:
    """Return the only ArrayRecord of a message, and its key."""
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise DataError(
            "A message must have exactly one ArrayRecord, the weights, got"
            f" {listed_names(records) or 'none'}. Strategies of flwr.serverapp.strategy send one."
            " For strategies of flwr.server.strategy, use to_client()."
        )
    return next(iter(records.items()))


def config_of(message: Any) -> dict[str, Any]:
    """Return the settings in all ConfigRecords of a message."""
    return {
        key: value
        for record in message.content.config_records.values()
        for key, value in record.items()
    }


def encoded(weights: Mapping[str, Array]) -> Any:
    """Return weights as an ArrayRecord."""
    app = flower_module("app")
    return app.ArrayRecord({name: app.Array(array) for name, array in weights.items()})


def reply(message: Any, metrics: Mapping[str, float], arrays: Mapping[str, Any]) -> Any:
    """Return the reply to a message, with the records of `arrays` by key, and with metrics."""
    app = flower_module("app")
    content = app.RecordDict({**arrays, "metrics": app.MetricRecord(dict(metrics))})
    return app.Message(content=content, reply_to=message)

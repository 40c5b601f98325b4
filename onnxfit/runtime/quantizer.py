"""onnxruntime's own quantizer: graph optimizations, calibrators, and integers for floats.

The package `onnxruntime.quantization` is imported when a model is quantized, not before.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxfit.environment import uninstalled, warn_of_mixed_distributions
from onnxfit.errors import DataError, InstallationError, ModelError, StepError
from onnxfit.runtime.values import Array

# Our name of an integer type -> onnxruntime's
INTEGER_TYPES = {"int8": "QInt8", "uint8": "QUInt8", "int4": "QInt4", "uint4": "QUInt4"}
# Our name of a calibration method -> onnxruntime's
METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
OPTIONS = {
    # onnxruntime drops these Relus when it compiles the model. In the file they stay, because
    # otherwise a Relu could not be told from the range of a layer after dequantizing.
    "QDQKeepRemovableActivations": True,
}


def optimize(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model after onnxruntime's basic optimizations, with the shapes of its values.

    BatchNormalization becomes part of the convolution before it, and constants are computed.
    ModelError: onnxruntime cannot run the model.
    """
    warn_of_mixed_distributions()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as exceptions
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory(prefix="onnxfit.") as folder:
        path = os.path.join(folder, "optimized.onnx")
        options.optimized_model_filepath = path
        try:
            onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run the model: {_one_line(error)}") from None
        return onnx.shape_inference.infer_shapes(onnx.load(path))


class Calibrator:
    """The ranges of a model's values, measured by one of onnxruntime's calibrators.

    Use it as a context: it keeps the model in a temporary folder, which is removed at the end.

    - `model`: a model that `optimize` returned.
    - `method`: one of METHODS.
    - `values`: the values whose ranges are needed. The range of another value is wrong if it would
      not be finite.
    """

    def __init__(self, model: onnx.ModelProto, method: str, values: Collection[str]) -> None:
        self._quantization = _quantization()
        self._folder = tempfile.TemporaryDirectory(prefix="onnxfit.")
        path = Path(self._folder.name) / "model.onnx"
        onnx.save(model, path)
        with _silenced():
            self._calibrator = self._quantization.create_calibrator(
                path,
                quantizable_operators(),
                augmented_model_path=str(path.with_name("augmented.onnx")),
                calibrate_method=self._quantization.CalibrationMethod[METHODS[method]],
            )
        session = _FiniteSession(self._calibrator.infer_session, values)
        self._calibrator.infer_session = session

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._calibrator
        self._folder.cleanup()

    def collect(self, inputs: Mapping[str, Array]) -> None:
        """Run the model on one batch and record its values.

        Each batch is recorded separately. onnxruntime would store the values of all batches, and
        fails if the last batch has fewer rows. StepError: the model does not run. DataError: one of
        its values is infinite or NaN.
        """
        try:
            with _silenced():
                self._calibrator.collect_data(_OneBatch(inputs))
        except DataError:
            raise
        except Exception as error:
            raise StepError(f"The calibration failed: {_one_line(error)}") from error

    def ranges(self) -> Any:
        """Return the ranges of all values, a TensorsData of onnxruntime."""
        with _silenced():
            return self._calibrator.compute_data()


class _FiniteSession:
    """A session of a calibrator that rejects infinite and NaN values.

    - `session`: onnxruntime's session. Its outputs are values of the model, or their extremes.
    - `values`: the values that must be finite. In other values, infinity and NaN become 0.
    """

    def __init__(self, session: Any, values: Collection[str]) -> None:
        self._values = values
        self._session = session
        self.get_inputs = session.get_inputs
        self.get_outputs = session.get_outputs

    def run(self, names: Sequence[str] | None, inputs: Mapping[str, Array]) -> list[Any]:
        arrays = self._session.run(names, inputs)
        outputs = [output.name for output in self.get_outputs()]
        return [self._finite(name, array) for name, array in zip(outputs, arrays)]

    def _finite(self, output: str, array: Any) -> Any:
        if getattr(array, "dtype", None) != np.float32 or np.isfinite(array).all():
            return array
        name = output.removesuffix("_ReduceMin").removesuffix("_ReduceMax")
        if name in self._values:
            raise DataError(
                f"The calibration data makes {name!r} infinite or NaN, so it has no range. Correct"
                " the data, or exclude the nodes that compute and read this value with"
                " exclude=[...]."
            )
        return np.zeros_like(array)


class _OneBatch:
    """A reader of calibration data, in onnxruntime's interface, with one batch."""

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        self._batches = iter([dict(inputs)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)


def quantize_layers(
    model: onnx.ModelProto,
    ranges: Any,
    weights: str,
    activations: str,
    per_channel: bool,
    excluded: Collection[str],
    axes: Mapping[str, int | None],
) -> onnx.ModelProto:
    """Return the model with integer weights, and QuantizeLinear and DequantizeLinear at its values.

    - `model`: a model that `optimize` returned, with unique node names. It is changed.
    - `ranges`: the result of `Calibrator.ranges`.
    - `weights`, `activations`: integer types, of INTEGER_TYPES.
    - `per_channel`: each channel of a weight has a scale of its own.
    - `excluded`: names of nodes that stay in float.
    - `axes`: weight -> the axis of the channels with their own scales, None for one scale, if it
      does not follow from `per_channel`.

    ModelError: onnxruntime's quantizer does not accept the model.
    """
    quantization = _quantization()
    types = quantization.QuantType
    overrides = {
        name: [_override(types[INTEGER_TYPES[weights]], weights, axis)]
        for name, axis in axes.items()
    }
    with _silenced(), _bytes_for_four_bits():
        quantizer = quantization.QDQQuantizer(
            model,
            per_channel,
            False,  # the whole range of the integers
            types[INTEGER_TYPES[weights]],
            types[INTEGER_TYPES[activations]],
            ranges,
            [],
            list(excluded),
            quantizable_operators(),
            {**OPTIONS, "TensorQuantOverrides": overrides},
        )
        try:
            quantizer.quantize_model()
        except Exception as error:
            raise ModelError(f"onnxruntime cannot quantize the model: {_one_line(error)}") from None
    result = ir.from_proto(quantizer.model.model)
    result.graph.sort()  # unlike onnxruntime's, this sort respects what the body of an If reads
    proto: onnx.ModelProto = ir.to_proto(result)
    return proto


def _override(kind: Any, weights: str, axis: int | None) -> dict[str, Any]:
    """Return the options with which onnxruntime's quantizer treats a weight separately."""
    if axis is None:
        return {"quant_type": kind, "symmetric": weights.startswith("int")}
    # QLinearConv, which has no four bits, takes one zero point for all channels.
    return {"quant_type": kind, "symmetric": weights != "uint4", "axis": axis}


def quantize_array(array: Array, weights: str, axis: int | None) -> tuple[Array, Array, Array]:
    """Return the integers, the scale and the zero point of a weight.

    - `array`: the weight, in float32 or float16.
    - `weights`: an integer type, of INTEGER_TYPES. Signed integers have 0 as their zero point.
    - `axis`: the axis of the channels that have scales of their own, None for one scale.
    """
    kind = _quantization().QuantType[INTEGER_TYPES[weights]].tensor_type
    dtype = ir.DataType(kind).numpy()
    from onnxruntime.quantization.quant_utils import quantize_data

    def quantized(part: Array) -> Any:
        # onnxruntime 1.19 returns the least and the greatest number before these
        return quantize_data(part.ravel(), kind, symmetric=weights.startswith("int"))[-3:]

    channels = array[None] if axis is None else np.moveaxis(array, axis, 0)
    with _bytes_for_four_bits():
        made = [quantized(channel) for channel in channels]
    integers = np.stack([part[2] for part in made]).reshape(channels.shape).astype(dtype)
    scales = np.stack([part[1] for part in made]).astype(array.dtype)
    zero_points = np.stack([part[0] for part in made]).astype(dtype)
    if axis is None:
        return integers[0], scales[0], zero_points[0]
    return np.moveaxis(integers, 0, axis), scales, zero_points


def quantizable_operators() -> list[str]:
    """Return the operators that onnxruntime's quantizer knows, in the order of their names."""
    _quantization()
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return sorted({*QLinearOpsRegistry, *QDQRegistry})


def _quantization() -> Any:
    """Return the package `onnxruntime.quantization`, or raise InstallationError."""
    try:
        # onnxruntime 1.19 would import PyTorch for a function that is not called here.
        with uninstalled("torch"):
            import onnxruntime.quantization
    except ImportError as error:
        raise InstallationError(
            f"onnxruntime.quantization, which quantizes models, cannot be imported: {error}."
            " Install the missing package, for instance with pip install sympy."
        ) from None
    return onnxruntime.quantization


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep onnxruntime's quantizer from printing, and from logging by the root logger.

    Without a handler, its first message would also set up the user's logging.
    """
    from onnxruntime.quantization import calibrate

    root = logging.getLogger()
    handler = logging.NullHandler()
    root.addHandler(handler)
    root.addFilter(_is_by_another)
    vars(calibrate)["print"] = lambda *text: None
    try:
        yield
    finally:
        vars(calibrate).pop("print", None)
        root.removeFilter(_is_by_another)
        root.removeHandler(handler)


@contextmanager
def _bytes_for_four_bits() -> Iterator[None]:
    """Let onnxruntime 1.19 quantize to four bits, which it packs out of bytes.

    It reads their type from the onnx package, where it was a byte until onnx 1.18.
    """
    from onnxruntime.quantization import quant_utils

    types = quant_utils.ONNX_TYPE_TO_NP_TYPE
    before = dict(types)
    if not hasattr(quant_utils, "quantize_onnx_initializer"):
        types[onnx.TensorProto.INT4] = np.dtype(np.int8)
        types[onnx.TensorProto.UINT4] = np.dtype(np.uint8)
    try:
        yield
    finally:
        types.update(before)


def _is_by_another(record: logging.LogRecord) -> bool:
    """Return whether a message does not come from onnxruntime's quantizer."""
    return Path(record.pathname).parts[-3:-1] != ("onnxruntime", "quantization")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

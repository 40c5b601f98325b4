"""`quantize`: quantize the weights and activations of a trained model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Union

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.callbacks.progress.batches import shown_batches
from onnxfit.checks import check_arguments
from onnxfit.data import DataAdapter, Source
from onnxfit.errors import DataError, ModelError, SettingError, UnknownNameError
from onnxfit.graph import protos
from onnxfit.graph.index import tensors_of
from onnxfit.graph.model import spec_of, to_ir
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.subgraphs import read_by
from onnxfit.runtime.quantizer import (
    INTEGER_TYPES,
    METHODS,
    Calibrator,
    quantizable_operators,
    quantize_array,
    quantize_layers,
)
from onnxfit.runtime.values import Array
from onnxfit.tools.quantization.preparation import (
    FOUR_BITS,
    cut_outputs,
    excluded_nodes,
    load_float_model,
    optimize_float_model,
    products_of_activations,
    read_and_computed,
    read_floats,
    require_quantizable,
    restore_declarations,
)
from onnxfit.tools.quantization.weight_axes import (
    LAYERS,
    channel_axes,
    explicit_axes,
    require_finite_weights,
)
from onnxfit.trainable.quantized.operators import DEQUANTIZE, SUFFIX, is_conversion

__all__ = ["quantize"]

ACTIVATIONS = ("int8", "uint8")


@check_arguments
def quantize(
    model: Any,
    calibration: Any = None,
    *,
    weights: str = "int8",
    activations: Union[str, None] = "int8",
    per_channel: bool = True,
    method: str = "minmax",
    exclude: Union[str, Sequence[str]] = (),
    batch_size: int = 32,
    verbose: Union[int, str] = "auto",
) -> onnx.ModelProto:
    r"""Return the model quantized to integers: post-training quantization.

    This function runs onnxruntime's quantizer. A float $x$ becomes the integer $q =
    \mathrm{clip}(\mathrm{round}(x / s) + z, q_{min}, q_{max})$ and represents $s (q - z)$. The
    scale $s$ and the zero point $z$ of a weight come from its own values. An activation is a value
    that a layer reads or computes; its scale and zero point come from its range over the
    calibration data. Biases become int32, with the product of the two scales.

    Before that, onnxruntime optimizes the model: each BatchNormalization becomes part of the
    convolution before it, and constants are computed. The result has the same inputs and outputs,
    a DequantizeLinear behind each weight, and a QuantizeLinear and a DequantizeLinear behind each
    activation (QDQ format). If it loses too much accuracy, train it further.

    - `model`: a path, bytes or an `onnx.ModelProto`, which stays unchanged.
    - `calibration`: typical inputs of the model, some hundred rows, in any form that
      `Trainer.predict` accepts. Labels are ignored. None only with `activations=None`.
    - `weights`: "int8", "uint8", "int4" or "uint4". With four bits, the result has opset 21, and
      products of two activations stay in float.
    - `activations`: "int8" or "uint8". None leaves activations in float, and quantizes only the
      weights of Conv, ConvTranspose, Gemm and MatMul.
    - `per_channel`: True for one scale per output channel of a weight, which is more accurate.
      False for one scale per weight.
    - `method`: "minmax" takes the whole range of an activation. "entropy" chooses the range with
      the least Kullback-Leibler divergence from the floats. "percentile" omits the largest 0.001 %.
    - `exclude`: names or fnmatch patterns of nodes or weights that stay in float.
    - `batch_size`: rows in a batch of calibration data that is not already in batches.
    - `verbose`: 0 silent, 1 a progress bar, 2 a line at the end, "auto" 1 in a terminal, else 0.

    ModelError: the model cannot be read, is already quantized, or has nothing to quantize.
    UnsupportedError: the model is above 2 GB, or has weights in float16 or float64. DataError: the
    calibration data does not fit the model, has no rows, or is NaN or infinite. UnknownNameError: a
    type, method or name is unknown. SettingError: the settings cannot be combined.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018; https://onnxruntime.ai/docs/performance/.

    >>> import numpy as np, onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
    ...     { y = MatMul(x, w) }''')
    >>> smaller = quantize(model, activations=None)
    >>> [node.op_type for node in smaller.graph.node]
    ['DequantizeLinear', 'MatMul']
    >>> quantized = quantize(model, np.eye(2, dtype=np.float32))
    >>> sum(node.op_type == "QuantizeLinear" for node in quantized.graph.node)
    2
    """
    _check_settings(weights, activations, method, calibration)
    original = load_float_model(model, weights)
    source = None
    if activations is not None:
        source = calibration_source(original, calibration, batch_size)
    optimized = optimize_float_model(original)
    excluded = excluded_nodes(original, optimized, exclude)
    operators = [*LAYERS] if source is None else quantizable_operators()
    require_quantizable(optimized, operators, excluded)
    require_finite_weights(optimized, excluded)
    if source is None or activations is None:
        quantized = quantize_weights_only(optimized, weights, per_channel, excluded)
    else:
        excluded |= cut_outputs(optimized)
        products = products_of_activations(optimized) if weights in FOUR_BITS else set()
        values = read_and_computed(optimized, operators, excluded | products)
        ranges = measured_ranges(optimized, source, method, verbose, values)
        axes = explicit_axes(optimized, excluded, weights, per_channel)
        quantized = quantize_layers(
            optimized, ranges, weights, activations, per_channel, excluded | products, axes
        )
        read_floats(quantized, products)
    if not any(is_conversion(node) for node in quantized.graph.node):
        raise ModelError(
            "The model has nothing to quantize: no Conv, Gemm or MatMul has a float initializer as"
            " its weight."
        )
    quantized = restore_declarations(quantized, original)
    onnx.checker.check_model(quantized)
    return quantized


def _check_settings(weights: str, activations: str | None, method: str, calibration: Any) -> None:
    if weights not in INTEGER_TYPES:
        raise UnknownNameError("type of weights", weights, INTEGER_TYPES)
    if method not in METHODS:
        raise UnknownNameError("calibration method", method, METHODS)
    if activations is None:
        if calibration is not None:
            raise SettingError(
                "activations=None quantizes only the weights, which needs no calibration data."
                " Remove the calibration data, or use activations='int8'."
            )
        return
    if activations not in ACTIVATIONS:
        raise UnknownNameError("type of activations", activations, ACTIVATIONS)
    if calibration is None:
        raise DataError(
            "Quantizing activations needs calibration data to measure their ranges. Pass some"
            " hundred rows, quantize(model, x), or use activations=None to quantize only the"
            " weights."
        )
    if activations == "int8" and weights == "uint8":
        raise SettingError(
            "onnxruntime has no kernels for int8 activations with uint8 weights. Use"
            " weights='int8' or activations='uint8'."
        )


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


def quantize_weights_only(
    optimized: onnx.ModelProto, weights: str, per_channel: bool, excluded: set[str]
) -> onnx.ModelProto:
    """Return the model with each weight replaced by integers and a DequantizeLinear.

    - `optimized`: a model with unique node names. It is changed.
    - `weights`: the type of the integers.
    - `per_channel`: whether each output channel of a weight has its own scale.
    - `excluded`: names of nodes whose weights stay in float.
    """
    tensors = tensors_of(optimized.graph)
    nodes = []
    dequantized: dict[str, str] = {}
    for name, axis in channel_axes(optimized, excluded).items():
        array = onnx.numpy_helper.to_array(tensors[name])
        made = quantize_array(array, weights, axis if per_channel else None)
        inputs = [f"{name}{SUFFIX}", f"{name}_scale", f"{name}_zero_point"]
        optimized.graph.initializer.extend(map(_named_tensor, made, inputs))
        output = f"{name}_DequantizeLinear_Output"
        dequantized[name] = output
        nodes.append(
            onnx.helper.make_node(DEQUANTIZE, inputs, [output], f"{name}_DequantizeLinear")
        )
        if per_channel:
            nodes[-1].attribute.append(onnx.helper.make_attribute("axis", axis))
    for node in optimized.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = dequantized.get(name, name)
    read = {value.name for value in optimized.graph.output}.union(
        *(read_by(node) for node in optimized.graph.node)
    )
    for name in dequantized.keys() - read:
        protos.remove_initializer(optimized, name)
    replace_nodes(optimized.graph, [*nodes, *optimized.graph.node])
    return optimized


def _named_tensor(array: Array, name: str) -> onnx.TensorProto:
    return ir.to_proto(ir.tensor(np.asarray(array, order="C"), name=name))

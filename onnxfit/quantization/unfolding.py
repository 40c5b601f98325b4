"""Train a file of integers in floats: the models in its place, and the integers back in the file.

In the training model each integer initializer becomes a float weight of its name, which
QuantizeLinear rounds to the integers that the file's DequantizeLinear reads:

    file       q (integers) -> DequantizeLinear -> Conv
    training   q (floats) -> QuantizeLinear -> DequantizeLinear -> Conv
               b (floats, a bias of 32 bits) -> Conv

Evaluation and prediction run the file itself, with the trained integers as constants: onnxruntime
chooses other kernels for integers that a graph computes. It computes a MatMul by constant integers
with activations rounded to 8 bits, for instance (onnxruntime 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfit.editing import protos
from onnxfit.errors import ModelError, SettingError, listed_names
from onnxfit.graph import names
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.trainable import TrainableModel
from onnxfit.quantization.float_model import float_values
from onnxfit.quantization.operators import is_conversion
from onnxfit.quantization.parameters import Array
from onnxfit.quantization.qoperators import to_qdq
from onnxfit.quantization.reading import integer_weights, refuse_float_twins
from onnxfit.quantization.rounding import IntegerWeight
from onnxfit.quantization.settings import Quantization


@dataclass(frozen=True, eq=False)
class QuantizedModel(TrainableModel):
    """A file of integers, which is trained in floats.

    - `integers`: the integer initializers that are trained, by name.
    """

    evaluates_file: ClassVar[bool] = True

    integers: Mapping[str, IntegerWeight]

    def to_file(self, arrays: Mapping[str, Array]) -> dict[str, onnx.TensorProto]:
        """Return initializer of the file -> its value, with floats rounded to integers."""
        integers = {name: array for name, array in arrays.items() if name in self.integers}
        floats = {name: array for name, array in arrays.items() if name not in integers}
        rounded = {name: self.integers[name].tensor_of(array) for name, array in integers.items()}
        return {**super().to_file(floats), **rounded}

    def check(self, weights: Collection[str], statistics: Collection[str]) -> None:
        """Raise ModelError for running statistics that change, SettingError for a scale."""
        if statistics:
            raise ModelError(
                f"The file has integer weights and a BatchNormalization that would follow the"
                f" batches ({listed_names(statistics)}): its outputs would leave the ranges that"
                " the file was quantized for. Fold it into the layer before it is quantized"
                " (onnxruntime's quant_pre_process does), or set batch_norm='frozen'."
            )
        scales = {node.input[1] for node in nodes_of(self.model.graph) if is_conversion(node)}
        chosen = [name for name in weights if name in scales]
        if chosen:
            raise SettingError(
                f"The scales of a quantized file are not trained: leave {listed_names(chosen)} out"
                " of weights=."
            )


def unfold(file: onnx.ModelProto, quantization: Quantization | None = None) -> TrainableModel:
    """Return the models that train a file of integers; those of a file of floats are the file.

    - `file`: a model that `read_model` returned.
    - `quantization`: the user's settings; None for the defaults.

    Raises ModelError, SettingError or UnknownNameError.
    """
    if quantization is not None and not isinstance(quantization, Quantization):
        raise SettingError(
            "quantization is an onnxfit.Quantization(...) or None, got"
            f" {type(quantization).__name__}."
        )
    settings = quantization or Quantization()
    patterns = None if settings.weights is None else tuple(settings.weights)
    source = to_qdq(file)  # the same numbers, with DequantizeLinear before every operator
    weights = integer_weights(source, patterns)
    if not weights:
        if quantization is not None:
            raise SettingError(
                "quantization= is for a file with integers behind DequantizeLinear, and this one"
                " has none: leave it out, or quantize the file first."
            )
        return TrainableModel.of(file)
    refuse_float_twins(source, weights)
    values = {weight.name: weight.values for weight in weights}
    if settings.float_model is not None:
        values = float_values(settings.float_model, weights)
    return QuantizedModel(
        file=file,
        model=_with_floats(source, weights, values),
        integers={weight.name: weight for weight in weights},
    )


def _with_floats(
    file: onnx.ModelProto, weights: Sequence[IntegerWeight], values: Mapping[str, Array]
) -> onnx.ModelProto:
    """Return a copy of the file, in which floats take the place of integer initializers.

    - `weights`: the integer initializers.
    - `values`: the floats by name.
    """
    model = onnx.ModelProto()
    model.CopyFrom(file)
    graph = model.graph
    types = {}
    for tensor in graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
            types[tensor.name] = tensor.data_type
    for info in (*graph.input, *graph.value_info):
        if info.name in types:
            info.type.tensor_type.elem_type = types[info.name]
    _round(graph, [weight for weight in weights if not weight.is_bias])
    _read_biases(model, [weight for weight in weights if weight.is_bias])
    return model


def _round(graph: onnx.GraphProto, weights: Sequence[IntegerWeight]) -> None:
    """Let the nodes that read a weight read its integers, in place."""
    in_use = {tensor.name for tensor in graph.initializer}
    in_use |= {name for node in nodes_of(graph) for name in (*node.input, *node.output)}

    def unused(name: str) -> str:
        name = names.unused(name, in_use.__contains__)
        in_use.add(name)
        return name

    integers = {weight.name: unused(f"{weight.name}/integers") for weight in weights}
    nodes = []
    for weight in weights:
        zero_point = weight.zero_point_name
        if not zero_point:  # it says which integers there are
            zero_point = unused(f"{weight.name}/zero_point")
            zeros = np.zeros_like(weight.parameters.zero_point)
            graph.initializer.append(
                helper.make_tensor(
                    zero_point, weight.tensor.data_type, zeros.shape, zeros.reshape(-1).tolist()
                )
            )
        parameters = weight.parameters
        attributes = {"axis": parameters.axis} if parameters.scale.size > 1 else {}
        if parameters.block_size:
            attributes["block_size"] = parameters.block_size
        inputs, name = [weight.name, weight.scale_name, zero_point], integers[weight.name]
        node = helper.make_node("QuantizeLinear", inputs, [name], name=name, domain=weight.domain)
        node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        nodes.append(node)
    protos.rename_inputs(graph, integers)
    replace_nodes(graph, [*nodes, *graph.node])


def _read_biases(model: onnx.ModelProto, biases: Sequence[IntegerWeight]) -> None:
    """Let the layers read their biases without DequantizeLinear, in place."""
    graph = model.graph
    by_name = {weight.name: weight for weight in biases}
    renamed = {}
    for node in [n for n in graph.node if n.input and n.input[0] in by_name]:
        renamed[node.output[0]] = node.input[0]
        graph.node.remove(node)
    protos.rename_inputs(graph, renamed)
    read = {name for node in nodes_of(graph) for name in node.input}
    for weight in biases:  # a scale that nothing reads is no weight
        for name in {weight.scale_name, weight.zero_point_name} - read:
            protos.remove_initializer(model, name)
    for info in [info for info in graph.value_info if info.name in renamed]:
        graph.value_info.remove(info)

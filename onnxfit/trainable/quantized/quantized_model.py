"""Train an integer file in floats: its training model, and the conversion back to integers.

In the training model each integer initializer becomes a float weight of its name, which
QuantizeLinear rounds to the integers that the file's DequantizeLinear reads:

    file       q (integers) -> DequantizeLinear -> Conv
    training   q (floats) -> QuantizeLinear -> DequantizeLinear -> Conv
               b (floats, a bias of 32 bits) -> Conv

Evaluation and prediction run the file itself, with the trained integers as constants: onnxruntime
chooses other kernels for computed integers. For instance, it computes a MatMul by constant integers
with activations rounded to 8 bits (onnxruntime 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import onnx
from onnx import helper, numpy_helper

from onnxfit.errors import ModelError, SettingError, listed_names
from onnxfit.graph import protos
from onnxfit.graph.index import tensors_of
from onnxfit.graph.model import OnnxModel, with_references
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.shared_tensors import Storable, array_of
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.trainable import TrainableModel
from onnxfit.trainable.quantized.biases import LayerBias, layer_biases
from onnxfit.trainable.quantized.float_model import float_values
from onnxfit.trainable.quantized.integer_weight import PACKED, IntegerWeight, with_numbers
from onnxfit.trainable.quantized.integer_weights import (
    integer_names,
    integer_weights,
    refuse_float_twins,
    select_integers,
)
from onnxfit.trainable.quantized.learning import (
    learned_bounds,
    learned_names,
    note_as_weights,
    scale_gradients,
    with_float_zero_points,
)
from onnxfit.trainable.quantized.observing import next_ranges, observed_names, observed_quantizers
from onnxfit.trainable.quantized.operators import is_conversion
from onnxfit.trainable.quantized.packed_weights import PackedTensor, Shift, packed_weights, unpack
from onnxfit.trainable.quantized.parameters import Array
from onnxfit.trainable.quantized.qoperators import to_qdq
from onnxfit.trainable.quantized.quantizers import Quantizer, find_quantizers, scales_to_write
from onnxfit.trainable.quantized.settings import Quantization


@dataclass(frozen=True, eq=False)
class QuantizedModel(TrainableModel):
    """An integer file that is trained in floats.

    - `integers`: the integer initializers that are trained, by name.
    - `packed`: the initializers of MatMulNBits whose numbers are unpacked in `model`, by name.
    - `quantizers`: the quantizers whose scales and zero points training changes.
    - `biases`: the biases whose scales follow, by name.
    - `observe`: the number of batches that they follow; 0 if they are learned.
    """

    evaluates_file: ClassVar[bool] = True

    integers: Mapping[str, IntegerWeight]
    packed: Mapping[str, PackedTensor] = field(default_factory=dict)
    quantizers: Sequence[Quantizer] = ()
    biases: Mapping[str, LayerBias] = field(default_factory=dict)
    observe: int = 0

    @property
    def bounds(self) -> Mapping[str, tuple[Array, Array]]:
        """A mapping from learned scale or zero point to its bounds."""
        return {} if self.observe else learned_bounds(self.quantizers)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The scales and zero points that follow the batches."""
        return tuple(observed_names(self.quantizers)) if self.observe else ()

    def to_training_form(self, op: GraphBuilder, step: Value) -> dict[str, Value]:
        """Scale the gradients of learned scales, or return the next ranges."""
        if self.observe:
            return next_ranges(op, self.quantizers, step, self.observe)
        scale_gradients(op, self.quantizers)
        return {}

    def initializer_values(self, arrays: Mapping[str, Array]) -> dict[str, Storable]:
        """Return a mapping from the file's initializers to values, floats rounded to integers."""
        changed = scales_to_write(self.quantizers, arrays)
        biases = {name: bias.with_scales(changed) for name, bias in self.biases.items()}
        changed |= {bias.scale_name: bias.parameters.scale for bias in biases.values()}
        weights = {name: weight.with_parameters(changed) for name, weight in self.integers.items()}
        values = {**self._frozen_values(arrays), **arrays}
        for name, weight in {**weights, **biases}.items():
            if name in values:
                changed[name] = weight.rounded(values[name])
        tensors = {}
        for tensor in self.file.graph.initializer:
            if tensor.name in changed:
                packed, numbers = self.packed.get(tensor.name), changed[tensor.name]
                tensors[tensor.name] = (
                    packed.with_numbers(numbers) if packed else with_numbers(tensor, numbers)
                )
        floats = {name: array for name, array in arrays.items() if name not in tensors}
        return {**super().initializer_values(floats), **tensors}

    @property
    def why_python_only(self) -> str | None:
        """The reason for which no graph computes the file's integers; None if one does."""
        if self.quantizers:
            return "trains scales of integers, which only Python writes into the file"
        narrow = [w.name for w in self.integers.values() if w.tensor.data_type in PACKED]
        if self.packed or narrow:
            return "trains integers of 4 bits, which only Python can pack into bytes"
        return None

    def frozen_base(self, arrays: Mapping[str, Array]) -> OnnxModel:
        """Return the file with its other trained weights, but with the integers that it had."""
        tensors = tensors_of(self.file.graph)
        # The tensors are written as raw data, so that a host can find their bytes in the file.
        integers = {n: array_of(tensors[n]) for n in self.integers if n in arrays and n in tensors}
        floats = {name: array for name, array in arrays.items() if name not in integers}
        return with_references(self.file.proto, {**self.without_loss(floats), **integers})

    def add_export(self, op: GraphBuilder, trained: Collection[str]) -> dict[str, Value]:
        """Write the rounding of each trained weight, as `initializer_values` computes it."""
        weights = [weight for name, weight in self.integers.items() if name in trained]
        inputs = {w.name: op.input(w.name, w.values.dtype, tuple(w.tensor.dims)) for w in weights}
        return {weight.name: weight.add_rounded(op, inputs[weight.name]) for weight in weights}

    def _frozen_values(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return a mapping from each untrained integer weight to its real numbers.

        If their scales change, other integers represent the same real numbers.
        """
        if not self.quantizers:
            return {}
        frozen = {name: bias.weight.values for name, bias in self.biases.items()}
        for tensor in self.model.graph.initializer:
            if tensor.name in self.integers and tensor.name not in arrays:
                frozen[tensor.name] = array_of(tensor)
        return frozen

    def check(self, weights: Collection[str], statistics: Collection[str]) -> None:
        """Raise ModelError for running statistics that change, SettingError for a scale."""
        others = [name for name in statistics if name not in self.statistics]
        if others:
            raise ModelError(
                "The file has integer weights and a trainable BatchNormalization"
                f" ({listed_names(others)}), whose outputs would leave the quantized ranges. Fold"
                " it into the layer before quantizing (onnxfit.quantize does this), or set"
                " batch_norm='frozen'."
            )
        nodes = nodes_of(self.model.graph)
        scales = {name for node in nodes if is_conversion(node) for name in node.input[1:]}
        chosen = [name for name in weights if name in {*scales, *self.statistics} - {*self.bounds}]
        if chosen:
            raise SettingError(
                f"weights= selects scales of a quantized file, {listed_names(chosen)}, which are"
                " not trained by default. Remove them from weights=, or train the scales with"
                " quantization=onnxfit.Quantization(scales='learned')."
            )


def to_fake_quantized(file: OnnxModel, quantization: Quantization | None = None) -> TrainableModel:
    """Return the models that train an integer file; for a float file, they are the file.

    - `file`: a model that `read_model` returned.
    - `quantization`: the user's settings; None for the defaults.

    ModelError, SettingError or UnknownNameError: the file or a setting does not allow the training.
    """
    if quantization is not None and not isinstance(quantization, Quantization):
        raise SettingError(
            "quantization must be an onnxfit.Quantization(...) or None, got"
            f" {type(quantization).__name__}."
        )
    settings = quantization or Quantization()
    patterns = None if settings.weights is None else tuple(settings.weights)
    source = to_qdq(file.proto)  # the same numbers, with DequantizeLinear before every operator
    names = integer_names(source)
    if quantization is not None:
        names += packed_weights(source)
    names = select_integers(names, patterns)
    unpacked = unpack(source, names)
    source = unpacked.model
    weights = [_shifted(weight, unpacked.shifts) for weight in integer_weights(source, names)]
    if not weights:
        if quantization is not None:
            raise SettingError(
                "quantization= needs a file with integers read by DequantizeLinear or MatMulNBits,"
                " but this file has no such integers. Remove quantization=, or quantize the file"
                " first."
            )
        return TrainableModel.of(file)
    refuse_float_twins(source, weights)
    values = {weight.name: weight.values for weight in weights}
    if settings.float_model is not None:
        values = float_values(settings.float_model, weights)
    model = _with_floats(source, weights, values)
    changing = _with_changing_scales(model, weights, settings)
    biases = layer_biases(source, {quantizer.scale for quantizer in changing})
    if changing:
        changed = observed_names(changing) if settings.observe else learned_names(changing)
        _require_own_numbers(file.proto, source, changed, biases.values())
    return QuantizedModel(
        file=file,
        model=model,
        integers={weight.name: weight for weight in weights},
        packed=unpacked.packed,
        quantizers=changing,
        biases=biases,
        observe=settings.observe,
    )


def _shifted(weight: IntegerWeight, shifts: Mapping[str, Shift]) -> IntegerWeight:
    """Return a weight with its float zero points, if it has any."""
    if weight.name not in shifts:
        return weight
    shift = shifts[weight.name]
    parameters = replace(weight.parameters, zero_point=shift.zero_points)
    return replace(weight, parameters=parameters, shift=shift.name)


def _require_own_numbers(
    file: onnx.ModelProto,
    source: onnx.ModelProto,
    changing: Sequence[str],
    biases: Collection[LayerBias],
) -> None:
    """Raise ModelError if numbers that training changes are not initializers of the file.

    - `source`: the file with DequantizeLinear instead of operators such as QLinearConv.
    - `changing`: the scales and zero points that training changes.
    - `biases`: the biases whose scales follow.
    """
    own = {tensor.name for tensor in file.graph.initializer}
    computed = {
        tensor.name
        for tensor in source.graph.initializer
        if tensor.name not in own and array_of(tensor).any()
    }
    read = {name for node in source.graph.node if is_conversion(node) for name in node.input[1:]}
    of_biases = {bias.weight.scale_name for bias in biases}
    missing = ({*changing} - own) | (computed & read - of_biases)
    if missing:
        raise ModelError(
            f"The integer operators need the scales or zero points {listed_names(sorted(missing))}"
            " to stay consistent with others, but training would change them independently."
            " Quantize the float model with quant_format=QuantFormat.QDQ, or keep scales fixed"
            " with scales='fixed', observe=0."
        )


def _with_changing_scales(
    model: onnx.ModelProto, weights: Sequence[IntegerWeight], settings: Quantization
) -> list[Quantizer]:
    """Convert the zero points that training changes to floats, in place; return the quantizers.

    - `model`: the training model with floats instead of the integer `weights`.
    """
    if settings.scales == "fixed" and not settings.observe:
        return []
    floats = {weight.name: weight for weight in weights if not weight.is_bias}
    quantizers = find_quantizers(model, floats)
    if settings.observe:
        quantizers = observed_quantizers(quantizers)
    elif not quantizers:
        raise SettingError(
            "scales='learned' needs a file with integer weights or activations of at most 16 bits,"
            " but this file has only biases of 32 bits. Remove scales='learned'."
        )
    moving = [
        quantizer
        for quantizer in quantizers
        if (quantizer.observes_zero_point if settings.observe else quantizer.learns_zero_point)
    ]
    with_float_zero_points(model, {quantizer.zero_point: quantizer for quantizer in moving})
    if settings.scales == "learned":
        note_as_weights(model, learned_names(quantizers))
    return quantizers


def _with_floats(
    file: onnx.ModelProto, weights: Sequence[IntegerWeight], values: Mapping[str, Array]
) -> onnx.ModelProto:
    """Return a copy of the file with floats instead of integer initializers.

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
    _round(model, [weight for weight in weights if not weight.is_bias])
    _read_biases(model, [weight for weight in weights if weight.is_bias])
    return model


def _round(model: onnx.ModelProto, weights: Sequence[IntegerWeight]) -> None:
    """Let the nodes that read a weight read its integers, in place."""
    graph, used = model.graph, protos.used_names(model)
    integers = {
        weight.name: protos.unique_name(f"{weight.name}/integers", used) for weight in weights
    }
    made = {
        integers[weight.name]: _rounding_nodes(graph, weight, integers[weight.name], used)
        for weight in weights
    }
    protos.rename_inputs(graph, integers)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for name in node.input:
            nodes += made.pop(name, [])
        nodes.append(node)
    replace_nodes(graph, nodes)


def _rounding_nodes(
    graph: onnx.GraphProto, weight: IntegerWeight, integers: str, used: set[str]
) -> list[onnx.NodeProto]:
    """Return the nodes that round a weight, and add their constants to the graph.

    - `integers`: the name of the rounded weight.
    """
    nodes = []
    parameters, zero_point = weight.parameters, weight.zero_point_name
    if not zero_point:  # it determines the type of the integers
        zero_point = protos.unique_name(f"{weight.name}/zero_point", used)
        shape = parameters.zero_point.shape
        zeros = [0] * parameters.zero_point.size
        graph.initializer.append(
            helper.make_tensor(zero_point, weight.tensor.data_type, shape, zeros)
        )
    floats = weight.name
    if weight.shift:
        floats = protos.unique_name(f"{weight.name}/shifted", used)
        nodes.append(helper.make_node("Add", [weight.name, weight.shift], [floats], name=floats))
    attributes = {"axis": parameters.axis} if parameters.scale.size > 1 else {}
    if parameters.block_size:
        attributes["block_size"] = parameters.block_size
    inputs = [floats, weight.scale_name, zero_point]
    node = helper.make_node("QuantizeLinear", inputs, [integers], integers, domain=weight.domain)
    node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
    return [*nodes, node]


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
    for weight in biases:  # an unused scale is not a weight
        for name in {weight.scale_name, weight.zero_point_name} - read:
            protos.remove_initializer(model, name)
    for info in [info for info in graph.value_info if info.name in renamed]:
        graph.value_info.remove(info)

"""Pairs of the layers of a float model and of the integer model made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from onnxfit.errors import ModelError, listed_names, nearest_name
from onnxfit.graph.index import GraphIndex, NodeIndex
from onnxfit.graph.shared_tensors import array_of
from onnxfit.tools.quantization.quantized_graph import Origin, QuantizedGraph
from onnxfit.trainable.quantized.operators import CLIPPING, QUANTIZERS, is_dequantize
from onnxfit.trainable.quantized.parameters import FLOATS, Array, QuantizationParameters

# Operators that change nothing in inference
WITHOUT_EFFECT = {"Constant", "Dropout", "Identity"}


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """A value of the float model, and how the integer model rounds it.

    - `tensor`: the value.
    - `parameters`: the parameters of its roundings, in order.
    - `used`: the value after the Relu, if a Relu alone reads it in both models; else `tensor`.
      Numbers that both the rounding and the Relu clip are not a loss.
    """

    tensor: str
    parameters: tuple[QuantizationParameters, ...]
    used: str


@dataclass(frozen=True, eq=False)
class QuantizedConstant:
    """A weight or bias of the float model, and its integers in the integer model."""

    floats: Array
    integers: Array
    parameters: QuantizationParameters

    @property
    def is_weight(self) -> bool:
        """Whether the integers have few bits; those of a bias have 32."""
        return self.parameters.element_type != onnx.TensorProto.INT32

    def dequantized(self) -> Array:
        return self.parameters.dequantized(self.integers)


@dataclass(eq=False)
class PairedLayer:
    """A node of the float model that the integer model computes in integers.

    - `index`: the number of the node in the float model.
    - `name`: the node's name, or its output's name if it has none.
    - `operator`: its operator.
    - `output`: the value of the float model that the layer computes: the value after a Relu that
      alone reads it, if the integer model has that Relu or rounds after it.
    - `integer_output`: the corresponding value of the integer model, after rounding.
    - `constants`: a mapping from an input's index to its weight or bias.
    - `activations`: the values that it reads or writes in integers.
    """

    index: int
    name: str
    operator: str
    output: str
    integer_output: str
    constants: dict[int, QuantizedConstant]
    activations: list[QuantizedActivation]


@dataclass(eq=False)
class Pairing:
    """The layers of two models, and the quantized values between them.

    - `layers`: the layers, in the order of the float model.
    - `reads`: a mapping from the indices of a float model's node and its input to the quantized
      value that the integer model reads there.
    - `outputs`: a mapping from each model output to its quantized value in the integer model.
    """

    layers: list[PairedLayer]
    reads: Mapping[tuple[int, int], QuantizedActivation]
    outputs: Mapping[str, QuantizedActivation]

    def activations(self) -> list[QuantizedActivation]:
        """Return every quantized value."""
        return list(dict.fromkeys([*self.reads.values(), *self.outputs.values()]))


def pair_layers(float_model: onnx.ModelProto, integer_model: onnx.ModelProto) -> Pairing:
    """Return the common layers of two models, and how they are quantized.

    Two nodes match if they have the same name and operator, or the same output.

    ModelError: the integer model has no quantized layer, or was made from another model.
    """
    quantized = QuantizedGraph(integer_model.graph)
    if not any(is_dequantize(node) for node in integer_model.graph.node):
        raise ModelError(
            "The integer model has no DequantizeLinear, so no layer is quantized. Pass a file in"
            " QDQ format, for instance from quantize_static(..., quant_format=QuantFormat.QDQ)."
        )
    return _Pairer(float_model.graph, quantized).pairing()


class _Pairer:
    def __init__(self, graph: onnx.GraphProto, quantized: QuantizedGraph) -> None:
        self.floats = GraphIndex(graph)
        self.quantized = quantized
        self.values = dict.fromkeys((*self.floats.inputs, *self.floats.positions))
        self.rounded_values = quantized.rounded_values()
        # a value of the integer model, with its parameters -> the value after the rounding
        self.rounded = {(o.name, o.parameters): n for n, o in self.rounded_values.items()}
        self.rounded_by_name = {o.name: name for name, o in self.rounded_values.items()}
        self.float_names = self._float_names()
        self.known: dict[tuple[str, tuple[QuantizationParameters, ...]], QuantizedActivation] = {}

    def pairing(self) -> Pairing:
        self._require_same_ends()
        pairs = self._pairs()
        self._require_whole(pairs)
        reads: dict[tuple[int, int], QuantizedActivation] = {}
        read_by: dict[int, list[QuantizedActivation]] = {index: [] for index in pairs}
        constants: dict[int, dict[int, QuantizedConstant]] = {index: {} for index in pairs}
        for index, node in pairs.items():
            for position, name in enumerate(node.input):
                origin = self.quantized.origin(name)
                if origin.integers is not None:
                    constants[index][position] = self._constant(index, position, origin)
                elif origin.parameters:
                    reads[index, position] = self._activation(origin)
                    self._require_read(index, position, reads[index, position].tensor)
                    read_by[index].append(reads[index, position])
        outputs = {
            value.name: self._activation(origin)
            for value in self.floats.graph.output
            if (origin := self.quantized.origin(value.name)).parameters and origin.integers is None
        }
        pairing = Pairing([], reads, outputs)
        written = _by_tensor(pairing.activations())
        for index, node in sorted(pairs.items()):
            raw = [self._before_rounding(name) for name in node.output]
            own = [a for name in raw for a in written.get(self._float_name(name), [])]
            rounded = [self.rounded.get((raw[0], a.parameters), raw[0]) for a in own]
            output, integer_output = self._behind_relu(
                self._float_name(raw[0]), rounded[0] if rounded else raw[0]
            )
            layer = PairedLayer(
                index,
                name=self.floats.nodes[index].name or self.floats.nodes[index].output[0],
                operator=node.op_type,
                output=output,
                integer_output=integer_output,
                constants=constants[index],
                activations=list(dict.fromkeys([*read_by[index], *own])),
            )
            if self._is_layer(layer, read_by[index], own):
                pairing.layers.append(layer)
        if not pairing.layers:
            raise ModelError(
                "The integer model quantizes no weight, and no value that a layer reads or writes."
            )
        return pairing

    def _require_read(self, index: int, position: int, tensor: str) -> None:
        """Raise ModelError if the integer model reads `tensor` in front of a Relu that it lacks.

        `quantize_static` writes QOperator files without a Relu whose input has other readers.
        """
        floats = self.floats
        node = floats.nodes[index]
        name = node.input[position] if position < len(node.input) else ""
        while name != tensor and name in floats.producers:
            maker = floats.producers[name]
            if maker.op_type in CLIPPING:
                raise ModelError(
                    f"The integer model lacks {maker.op_type} {maker.name or name!r}:"
                    f" {node.op_type} {node.name or node.output[0]!r} reads the numbers in front of"
                    " it. Quantize the float model again, in QDQ format."
                )
            if maker.op_type not in WITHOUT_EFFECT or not maker.input:
                return
            name = maker.input[0]

    def _before_rounding(self, name: str) -> str:
        """Return the output of a node of the integer model behind activations that clip.

        Tools round the output of a layer once, after its Relu. A value that is not rounded there is
        returned unchanged.
        """
        behind = name
        while behind not in self.rounded_by_name:
            clipped = behind_clipping(behind, self.quantized)
            if clipped is None:
                return name
            behind = clipped
        return behind

    def _behind_relu(self, name: str, rounded: str) -> tuple[str, str]:
        """Return a value of the float model and its partner behind activations that clip.

        A quantizer may round before a Relu, to a range without the negative numbers that the Relu
        would clip. A value with other readers is returned unchanged.

        - `rounded`: the value of the integer model, after its rounding.
        """
        while True:
            clipped = behind_clipping(name, self.floats)
            partner = behind_clipping(rounded, self.quantized)
            if clipped is None or partner is None:
                return name, rounded
            name, rounded = clipped, self.rounded_by_name.get(partner, partner)

    def _is_layer(
        self,
        layer: PairedLayer,
        read: list[QuantizedActivation],
        own: list[QuantizedActivation],
    ) -> bool:
        """Return whether a node computes in integers.

        A node that only moves values, such as MaxPool or Flatten, does not compute: its input and
        output are the same integers.
        """
        if any(constant.is_weight for constant in layer.constants.values()):
            return True
        before = {parameters for activation in read for parameters in activation.parameters}
        after = {parameters for activation in own for parameters in activation.parameters}
        return bool(before and after) and before != after

    def _activation(self, origin: Origin) -> QuantizedActivation:
        tensor = self._float_name(origin.name)
        if tensor not in self.values:
            raise ModelError(_stranger("quantizes the value", tensor, self.values))
        rounded = self.rounded.get((origin.name, origin.parameters), origin.name)
        used, _ = self._behind_relu(tensor, rounded)
        activation = QuantizedActivation(tensor, origin.parameters, used)
        return self.known.setdefault((tensor, origin.parameters), activation)

    def _constant(self, index: int, position: int, origin: Origin) -> QuantizedConstant:
        node = self.floats.nodes[index]
        name = node.input[position] if position < len(node.input) else ""
        described = f"{node.op_type} {node.name or node.output[0]!r}"
        tensor = self.floats.constants.get(name)
        if tensor is None or tensor.data_type not in FLOATS:
            raise ModelError(
                f"{described} has constant integers {origin.name!r} in the integer model, but no"
                f" constant floats at this input in the float model. {FIX}"
            )
        floats = array_of(tensor)
        assert origin.integers is not None
        if floats.shape != origin.integers.shape:
            raise ModelError(
                f"{described} has tensor {name!r} of shape {list(floats.shape)} in the float"
                f" model, but of shape {list(origin.integers.shape)} in the integer model. {FIX}"
            )
        return QuantizedConstant(floats, origin.integers, origin.parameters[-1])

    # ------------------------------------------------------------------ matching

    def _float_names(self) -> dict[str, str]:
        """Return the values of the integer model that have another name in the float model.

        If an output of the model is quantized, the rounded value has its name, and the value before
        rounding has a new name.
        """
        return {
            origin.name: name
            for name, origin in self.rounded_values.items()
            if name in self.floats.positions and origin.name not in self.values
        }

    def _float_name(self, name: str) -> str:
        return self.float_names.get(name, name)

    def _pairs(self) -> dict[int, onnx.NodeProto]:
        """Return a mapping from the float model's node indices to partners, where there is one."""
        by_name = _unique_names(self.floats.nodes)
        partners_by_name = _unique_names(self.quantized.layers)
        pairs: dict[int, onnx.NodeProto] = {}
        for node in self.quantized.layers:
            index = by_name.get(node.name) if node.name in partners_by_name else None
            if index is None or self.floats.nodes[index].op_type != node.op_type:
                index = self._index_by_output(node)
            if index is None:
                self._require_float(node)
                continue
            pairs[index] = node
        return pairs

    def _index_by_output(self, node: onnx.NodeProto) -> int | None:
        """Return the index of the node with the same output, before activations that clip."""
        index = self.floats.positions.get(self._float_name(node.output[0]))
        while index is not None:
            candidate = self.floats.nodes[index]
            if candidate.op_type == node.op_type:
                return index
            if candidate.op_type not in CLIPPING:
                return None
            index = self.floats.positions.get(candidate.input[0])
        return None

    def _require_float(self, node: onnx.NodeProto) -> None:
        """Raise ModelError for a quantized node without a partner."""
        if any(self.quantized.origin(name).parameters for name in node.input):
            names = [n.name or n.output[0] for n in self.floats.nodes if n.op_type == node.op_type]
            given = node.name or node.output[0]
            raise ModelError(_stranger(f"has a quantized {node.op_type}", given, names))

    def _require_same_ends(self) -> None:
        """Raise ModelError for models whose inputs or outputs differ in name."""
        for kind, ours, theirs in (
            ("inputs", self.floats.inputs, self.quantized.inputs),
            ("outputs", self.floats.outputs, self.quantized.outputs),
        ):
            if ours != theirs:
                raise ModelError(
                    f"The float model has the {kind} {listed_names(sorted(ours))}, but the integer"
                    f" model has {listed_names(sorted(theirs))}. {FIX}"
                )

    def _require_whole(self, pairs: Mapping[int, onnx.NodeProto]) -> None:
        """Raise ModelError for nodes of the float model that the integer model lacks."""
        removable = CLIPPING | WITHOUT_EFFECT | {*QUANTIZERS}
        missing = [
            node
            for index, node in enumerate(self.floats.nodes)
            if index not in pairs and node.op_type not in removable
        ]
        if missing:
            named = [f"{node.op_type} {node.name or node.output[0]!r}" for node in missing]
            raise ModelError(f"The integer model lacks {listed_names(named)}. {FIX}")


FIX = (
    "Pass the float model that was quantized. If a tool such as quant_pre_process changed it"
    " before quantization, pass the changed model."
)


def _stranger(what: str, name: str, known: Iterable[str]) -> str:
    near = nearest_name(name, list(known))
    hint = f" Did you mean {near!r}?" if near else ""
    listed = listed_names(known, name) or "none"
    return (
        f"The integer model {what} {name!r}, which the float model lacks.{hint} The float model has"
        f" {listed}. {FIX}"
    )


def _unique_names(nodes: Iterable[onnx.NodeProto]) -> dict[str, int]:
    """Return a mapping from each unique node name to the index of the node."""
    nodes = list(nodes)
    counts = Counter(node.name for node in nodes)
    return {n.name: i for i, n in enumerate(nodes) if n.name and counts[n.name] == 1}


def behind_clipping(name: str, index: NodeIndex) -> str | None:
    """Return the output of the clipping activation that alone reads a value; None for none."""
    nodes = index.readers[name]
    if len(nodes) == 1 and nodes[0].op_type in CLIPPING:
        return str(nodes[0].output[0])
    return None


def _by_tensor(
    activations: Iterable[QuantizedActivation],
) -> dict[str, list[QuantizedActivation]]:
    grouped: dict[str, list[QuantizedActivation]] = {}
    for activation in activations:
        grouped.setdefault(activation.tensor, []).append(activation)
    return grouped

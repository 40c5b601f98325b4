"""A float model in which each quantization of an integer model can be switched on by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx

from onnxfit.graph import protos
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load.completion import MICROSOFT, import_domain
from onnxfit.runtime.device import CPU
from onnxfit.runtime.session import StatelessSession
from onnxfit.runtime.values import array_of, ort_value
from onnxfit.tools.quantization.pairing import PairedLayer, Pairing, QuantizedActivation
from onnxfit.trainable.quantized.operators import QUANTIZERS
from onnxfit.trainable.quantized.parameters import Array, QuantizationParameters

SCOPE = "quantization"


class ModelWithLayerSwitches:
    """One compiled graph that computes the float model, or any of its layers as integers.

    A weight is an input of the graph, which receives its floats or its rounded values. An
    activation is `Where(switch, rounded, x)`, and its switch is an input.

    - `model`: the float model.
    - `pairing`: its layers, and how they are quantized.

    `observed` are the float values that a run with all switches off can return.
    """

    def __init__(self, model: onnx.ModelProto, pairing: Pairing) -> None:
        graph = _GraphWithSwitches(model, pairing)
        self.observed = graph.observed
        self.outputs = {value.name: graph.outputs[value.name] for value in model.graph.output}
        self._weights = graph.weights
        self._switches = graph.switches
        self._off = {name: np.array(False) for name in graph.switches.values()}
        constants = {
            graph.weights[layer.index, position]: constant
            for layer in pairing.layers
            for position, constant in layer.constants.items()
        }
        self._floats = {name: constant.floats for name, constant in constants.items()}
        self._rounded = {name: constant.dequantized() for name, constant in constants.items()}
        self._session = StatelessSession(graph.model, CPU, None, "layer by layer")

    def floats(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the `observed` values and the outputs of the float model.

        - `inputs`: arrays by name.
        """
        return self._run({**inputs, **self._floats, **self._off}, self.observed)

    def alone(self, layer: PairedLayer, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the model with one layer in integers.

        - `inputs`: arrays by name.
        """
        weights = [self._weights[layer.index, position] for position in layer.constants]
        rounded = {name: self._rounded[name] for name in weights}
        on = {self._switches[activation]: np.array(True) for activation in layer.activations}
        return self._run({**inputs, **self._floats, **rounded, **self._off, **on}, ())

    def _run(self, values: Mapping[str, Array], observed: Iterable[str]) -> dict[str, Array]:
        fetched = list(dict.fromkeys([*self.outputs.values(), *observed]))
        arrays = run_arrays(self._session, values, fetched)
        return arrays | {output: arrays[name] for output, name in self.outputs.items()}


class _GraphWithSwitches:
    """Edits a copy of the float model.

    - `weights`: (index of a node, index of its input) -> the input of the graph for the weight.
    - `switches`: quantized value -> the input of the graph that enables its rounding.
    - `outputs`: output of the model -> the corresponding value in this graph.
    """

    def __init__(self, model: onnx.ModelProto, pairing: Pairing) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.graph = self.model.graph
        self.used = protos.used_names(self.model)
        self.weights: dict[tuple[int, int], str] = {}
        self.switches: dict[QuantizedActivation, str] = {}
        self.outputs = {value.name: value.name for value in self.graph.output}
        self._add_weights(pairing.layers)
        inserted = self._add_roundings(pairing)
        self._insert(inserted)
        computed = {name for node in self.graph.node for name in node.output}
        wanted = [layer.output for layer in pairing.layers]
        wanted += [activation.used for activation in pairing.activations()]
        self.observed = [name for name in dict.fromkeys(wanted) if name in computed]
        self._set_outputs()
        self._remove_unused_initializers()
        import_domain(self.model)

    def _add_weights(self, layers: Sequence[PairedLayer]) -> None:
        for layer in layers:
            node = self.graph.node[layer.index]
            for position, constant in layer.constants.items():
                name = self._unique(f"{SCOPE}/weight/{node.input[position]}")
                element_type = onnx.helper.np_dtype_to_tensor_dtype(constant.floats.dtype)
                self.graph.input.append(
                    onnx.helper.make_tensor_value_info(name, element_type, constant.floats.shape)
                )
                node.input[position] = name
                self.weights[layer.index, position] = name

    def _add_roundings(self, pairing: Pairing) -> dict[str, list[onnx.NodeProto]]:
        """Let nodes read switched values; return a mapping from value to its rounding nodes."""
        inserted: dict[str, list[onnx.NodeProto]] = {}
        switched: dict[QuantizedActivation, str] = {}
        for activation in pairing.activations():
            switch = self._unique(f"{SCOPE}/switch/{activation.tensor}")
            self.switches[activation] = switch
            self.graph.input.append(
                onnx.helper.make_tensor_value_info(switch, onnx.TensorProto.BOOL, [])
            )
            nodes = self._rounding(activation, switch)
            inserted.setdefault(activation.tensor, []).extend(nodes)
            switched[activation] = nodes[-1].output[0]
        for (index, position), activation in pairing.reads.items():
            self.graph.node[index].input[position] = switched[activation]
        for output, activation in pairing.outputs.items():
            self.outputs[output] = switched[activation]
        return inserted

    def _rounding(self, activation: QuantizedActivation, switch: str) -> list[onnx.NodeProto]:
        nodes = []
        value = activation.tensor
        for parameters in activation.parameters:
            names = self._add_parameters(value, parameters)
            for operator in QUANTIZERS:  # com.microsoft's support 4 and 16 bits in every opset
                output = self._unique(f"{SCOPE}/{operator}/{activation.tensor}")
                inputs = [value, *names]
                nodes.append(
                    onnx.helper.make_node(
                        operator, inputs, [output], output, domain=MICROSOFT, axis=parameters.axis
                    )
                )
                value = output
        output = self._unique(f"{SCOPE}/switched/{activation.tensor}")
        inputs = [switch, value, activation.tensor]
        return [*nodes, onnx.helper.make_node("Where", inputs, [output], output)]

    def _add_parameters(self, value: str, parameters: QuantizationParameters) -> list[str]:
        scale = self._unique(f"{SCOPE}/scale/{value}")
        zero_point = self._unique(f"{SCOPE}/zero_point/{value}")
        self.graph.initializer.extend(
            [
                onnx.numpy_helper.from_array(parameters.scale, scale),
                onnx.helper.make_tensor(
                    zero_point,
                    parameters.element_type,
                    parameters.zero_point.shape,
                    parameters.zero_point.ravel().tolist(),
                ),
            ]
        )
        return [scale, zero_point]

    def _insert(self, inserted: Mapping[str, list[onnx.NodeProto]]) -> None:
        """Insert the nodes that round a value after the node that computes it."""
        computed = {name for node in self.graph.node for name in node.output}
        ordered = [n for name, nodes in inserted.items() if name not in computed for n in nodes]
        for node in self.graph.node:
            ordered.append(node)
            for name in node.output:
                ordered += inserted.get(name, [])
        replace_nodes(self.graph, ordered)

    def _set_outputs(self) -> None:
        declared = {value.name: value for value in self.graph.output}
        kept = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in declared.values()]
        for value in kept:
            value.name = self.outputs[value.name]
        names_of_outputs = {value.name for value in kept}
        kept += [
            onnx.ValueInfoProto(name=name) for name in self.observed if name not in names_of_outputs
        ]
        del self.graph.output[:]
        self.graph.output.extend(kept)

    def _remove_unused_initializers(self) -> None:
        read = {name for node in nodes_of(self.graph) for name in node.input}
        read |= {value.name for value in self.graph.output}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in read]
        removed = {t.name for t in self.graph.initializer} - {t.name for t in kept}
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)
        for value in [v for v in self.graph.input if v.name in removed]:  # in old files
            self.graph.input.remove(value)

    def _unique(self, name: str) -> str:
        return protos.unique_name(name, self.used)


def run_arrays(
    session: StatelessSession, values: Mapping[str, Array], outputs: Sequence[str]
) -> dict[str, Array]:
    """Return these outputs of a session, run with those arrays for which it has inputs.

    Inputs without an array keep the model's values. The results are views that keep onnxruntime's
    memory alive.
    """
    taken = [name for name in session.inputs if name in values]
    arrays = {name: np.require(values[name], requirements="C") for name in taken}
    given = {name: ort_value(array, CPU) for name, array in arrays.items()}  # borrows the memory
    return {name: array_of(value) for name, value in session(given, outputs).items()}

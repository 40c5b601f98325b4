"""Read what torch's newer exporter recorded about the initializers of a file.

The exporter records the kind of each tensor of the network (parameter, buffer, constant). Its
optimizer computes parts of the graph that depend on no input, and records the names of the tensors
from which it computed a new one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

PARAMETER = "PARAMETER"
BUFFER = "BUFFER"
# metadata of an initializer
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
# metadata of the graph: the inputs of the exported program, each with its kind
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_SIGNATURE_LINE = re.compile(r"^(\w+): ([A-Z_]+)(?: target='([^']*)')?", re.MULTILINE)
_SIGNATURE_REPR = re.compile(
    r"kind=<InputKind\.([A-Z_]+): \d+>, arg=\w+\(name='([^']*)'[^)]*\), target=(?:'([^']*)'|None)"
)

# Intermediate results are called after their operators, some with a number or a suffix.
_NUMBERED = r"(_default|_tensor|_scalar|_int)?(_\d+)*"
# operators that keep every number of a tensor, or leave some out
_LAYOUT = (
    r"val|value|getitem|clone|_?to_copy|to|convert_element_type|alias|detach|contiguous|slice"
    r"|select|view|_?unsafe_view|reshape|flatten|unflatten|permute|transpose|t|movedim|unsqueeze"
    r"|squeeze|cat|stack|split|split_with_sizes|chunk|unbind|narrow|flip|roll"
    # creation: of positions to read, or of the zeros before a sequence
    r"|shape|zeros|ones|full|empty|arange|scalar_tensor|\w*sym_size\w*"
)
# operators that may write a number several times
_COPIES = r"expand|repeat|repeat_interleave|tile|broadcast_to|index|index_select|gather|embedding"
_FUNCTIONS = (
    r"eye|linspace|fill|where|masked_fill|tril|triu|add|sub|rsub|mul|div|neg|abs|pow|exp|log|sqrt"
    r"|rsqrt|reciprocal|sin|cos|outer|matmul|mm|bmm|sum|mean|amax|amin|cumsum|minimum|maximum|clamp"
    r"|floor|floor_divide|remainder|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|isnan|isinf|new_\w+"
    r"|\w+_like|conv[123]d|convolution|linear|addmm|softplus|softmax|sigmoid|tanh|relu|gelu|silu"
    r"|layer_norm|native_\w+|linalg_\w+|einsum|interpolate|upsample_\w+|pad|constant_pad_nd"
    r"|min_val|max_val"
)
_IS_LAYOUT = re.compile(rf"({_LAYOUT}){_NUMBERED}")
_IS_COPY = re.compile(rf"({_COPIES}){_NUMBERED}")
# Names among those that are surely no parameters: constants (`lifted_tensor_0`), well-known buffers
# (the frequencies of rotary positions), and intermediate results.
NO_PARAMETER = re.compile(
    rf"(.*\.)?(lifted_tensor_\d+|\w*inv_freq|embed_scale)|({_LAYOUT}|{_COPIES}|{_FUNCTIONS})"
    rf"{_NUMBERED}"
)


@dataclass(frozen=True)
class Record:
    """The kind of an initializer and its origins, as the exporter recorded them.

    - `is_parameter`: whether its numbers come from parameters; None if the record does not say.
    - `kind`: the kind of a tensor of the network, such as "BUFFER"; None for a computed tensor.
    - `origins`: the names of the tensors from which it was computed.
    - `parameters`: those that are surely parameters.
    - `others`: those that are surely inputs, buffers or constants of the network.
    """

    is_parameter: bool | None
    kind: str | None = None
    origins: Sequence[str] = ()
    parameters: Sequence[str] = ()
    others: Sequence[str] = ()


class Records:
    """The records of a model's exporter.

    - `graph`: a normalized graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph

    @cached_property
    def _kinds(self) -> Mapping[str, str]:
        """Name -> kind, for every parameter, buffer, constant and input of the network."""
        return signature_kinds(self._graph.metadata_props.get(SIGNATURE, ""))

    @cached_property
    def _not_weights(self) -> set[str]:
        """The names of inputs, and of tensors that were recorded as no parameters."""
        others = {value.name or "" for value in self._graph.inputs}
        others.update(name for name, kind in self._kinds.items() if kind != PARAMETER)
        for name, value in self._graph.initializers.items():
            if value.metadata_props.get(KIND, PARAMETER) != PARAMETER:
                others.add(name)
        return others

    def of(self, value: ir.Value) -> Record:
        """Return the record of an initializer."""
        kind = value.metadata_props.get(KIND)
        origins = folded_from(value.metadata_props)
        if kind is None and not origins:
            kind = self._kinds.get(value.name or "")
        if kind is not None:
            return Record(kind == PARAMETER, kind)
        if not origins:
            return Record(None)
        others = [name for name in origins if name in self._not_weights]
        if self._kinds:
            parameters = [name for name in origins if self._kinds.get(name) == PARAMETER]
            return Record(bool(parameters), None, origins, parameters, others)
        candidates = [name for name in origins if not NO_PARAMETER.fullmatch(name)]
        candidates = [name for name in candidates if name not in others]
        # only the name of a tensor in a module has a dot
        parameters = [name for name in candidates if "." in name]
        is_parameter = bool(parameters) if parameters or not candidates else None
        return Record(is_parameter, None, origins, parameters, others)

    def changed(self, value: ir.Value) -> Sequence[str]:
        """Return the parameters of which an initializer is a function or has copies.

        The result is empty if training the initializer is the same as training the parameters: if
        the exporter only transposed, sliced or joined them.
        """
        record = self.of(value)
        if not record.parameters:
            return ()
        steps = {value.name or "", *record.origins}.difference(record.parameters)
        steps = {name for name in steps if not _IS_LAYOUT.fullmatch(name)}
        copies = {name for name in steps if _IS_COPY.fullmatch(name)}
        # The positions that an index reads may be a buffer.
        rest = steps.difference(copies, record.others if copies else ())
        if rest or (copies and _repeats_numbers(value)):
            return record.parameters
        return ()


def folded_from(notes: Mapping[str, str]) -> list[str]:
    """Return the names from which the exporter computed a tensor, given the tensor's metadata."""
    return re.findall(r"'([^']*)'", notes.get(FOLDED_FROM, ""))


def signature_kinds(text: str) -> dict[str, str]:
    """Return name -> kind for the inputs of an exported program, as torch writes its signature.

    >>> signature_kinds("# inputs\\np_w: PARAMETER target='w'\\nx: USER_INPUT\\n# outputs\\ny: OUT")
    {'w': 'PARAMETER', 'x': 'USER_INPUT'}
    """
    found = [(kind, name, target) for kind, name, target in _SIGNATURE_REPR.findall(text)]
    if not found:
        inputs = text.partition("# outputs")[0]
        found = [(kind, name, target) for name, kind, target in _SIGNATURE_LINE.findall(inputs)]
    return {target or name: kind for kind, name, target in found}


def _repeats_numbers(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and len(np.unique(tensor.numpy())) < tensor.size

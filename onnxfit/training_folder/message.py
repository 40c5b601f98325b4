"""The positions of tensors in the bytes of a model.

With these positions, a host can write trained weights into a copy of the file without a protobuf
library. The functions read the wire format of protobuf
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx

from onnxfit.graph.subgraphs import graph_protos
from onnxfit.graph.tensors import MAX_INLINE_BYTES, refer
from onnxfit.load.wire import Buffer

# Field numbers of ONNX's messages, which never change.
GRAPH = 7  # of ModelProto
NODE, INITIALIZER = 1, 5  # of GraphProto
OUTPUT, OP_TYPE, ATTRIBUTE = 2, 4, 5  # of NodeProto
TENSOR = 5  # of AttributeProto
TENSOR_NAME, RAW_DATA = 8, 9  # of TensorProto
# Wire types of protobuf.
VARINT, EIGHT_BYTES, LENGTH_DELIMITED, FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes in a file: offset and length."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the range."""
        return self.offset + self.size


def places_of_tensors(model: Buffer) -> dict[str, ByteRange]:
    """Return the positions of the `raw_data` of tensors in a serialized model, by name.

    The tensors are the initializers of the main graph, and those of its Constant nodes, under the
    names of the nodes' outputs. Tensors that store their elements in another field are left out.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) { y = MatMul(x, w) }''')
    >>> w = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1, 1], b"abcd", raw=True)
    >>> model.graph.initializer.extend([w])
    >>> data = model.SerializeToString()
    >>> place = places_of_tensors(data)["w"]
    >>> data[place.offset : place.end]
    b'abcd'
    """
    places = {}
    for graph in _field_positions(model, ByteRange(0, len(model)), GRAPH):
        for tensor in _field_positions(model, graph, INITIALIZER):
            for name in _texts(model, tensor, TENSOR_NAME):
                for data in _field_positions(model, tensor, RAW_DATA):
                    places[name] = data
        for node in _field_positions(model, graph, NODE):
            if "Constant" in _texts(model, node, OP_TYPE):
                for data in _bytes_of_constant(model, node):
                    places[_texts(model, node, OUTPUT)[0]] = data
    return places


def _bytes_of_constant(model: Buffer, node: ByteRange) -> Iterator[ByteRange]:
    """Yield the position of the `raw_data` in the attribute `value` of a Constant node."""
    for attribute in _field_positions(model, node, ATTRIBUTE):
        for tensor in _field_positions(model, attribute, TENSOR):
            yield from _field_positions(model, tensor, RAW_DATA)


def _texts(data: Buffer, message: ByteRange, number: int) -> list[str]:
    """Return the texts in the fields with this number in a message."""
    return [
        data[text.offset : text.end].decode() for text in _field_positions(data, message, number)
    ]


def refer_to_constants(
    graph: onnx.ModelProto, file: str, data: Buffer, changing: Collection[str]
) -> None:
    """Make a graph, in place, read its larger constants from a model file with the same bytes.

    A folder then has the weights of a frozen backbone only once, not in each graph. They remain
    constants, for which onnxruntime has its fastest kernels.

    - `graph`: the graph.
    - `file`: the name of the model file, in the same folder as the graph.
    - `data`: the contents of the file, a serialized model.
    - `changing`: tensors of the model that a host may overwrite.
    """
    places = {
        _digest(data[place.offset : place.end]): place
        for name, place in places_of_tensors(data).items()
        if place.size > MAX_INLINE_BYTES and name not in changing
    }
    for tensor in graph.graph.initializer:
        place = places.get(_digest(tensor.raw_data))
        if place is not None:
            refer(tensor, file, place.offset, place.size)
            tensor.ClearField("raw_data")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def bytes_to_run(model: onnx.ModelProto) -> bytes:
    """Return the bytes of a model without the parts that no runtime reads.

    These are the types and shapes of values inside the graph, which runtimes infer, and texts for
    people. They are a fifth of a training step.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    bare.ClearField("doc_string")
    for graph in graph_protos(bare.graph):
        graph.ClearField("value_info")
        graph.ClearField("doc_string")
        for part in (*graph.node, *graph.input, *graph.output, *graph.initializer):
            part.ClearField("doc_string")
            part.ClearField("metadata_props")
    data: bytes = bare.SerializeToString(deterministic=True)
    return data


def files_of_constants(graph: onnx.ModelProto) -> list[str]:
    """Return the names of the files from which a graph reads constants."""
    locations = {
        entry.value
        for tensor in graph.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return sorted(locations)


def _field_positions(data: Buffer, message: ByteRange, number: int) -> Iterator[ByteRange]:
    """Yield the positions of the length-delimited fields with this number in a message."""
    position = message.offset
    while position < message.end:
        key, position = _varint(data, position)
        kind = key & 7
        size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(kind, 0)
        if kind == VARINT:
            _, position = _varint(data, position)
        elif kind == LENGTH_DELIMITED:
            size, position = _varint(data, position)
            if key >> 3 == number:
                yield ByteRange(position, size)
        position += size


def _varint(data: Buffer, position: int) -> tuple[int, int]:
    """Return the varint at a position (seven bits per byte), and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7

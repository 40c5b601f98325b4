"""Text of the values, attributes and types in a drawing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np
import onnx

MAX_LITERAL_ELEMENTS = 4  # elements of a constant that is written out where it is used
MAX_LITERAL_CHARACTERS = 40  # characters of a value that is written out
MAX_LISTED_ITEMS = 16  # items of an attribute that is a list

_PLAIN_ATTRIBUTES = {
    onnx.AttributeProto.FLOAT,
    onnx.AttributeProto.INT,
    onnx.AttributeProto.STRING,
    onnx.AttributeProto.FLOATS,
    onnx.AttributeProto.INTS,
    onnx.AttributeProto.STRINGS,
}
_ELEMENT_TYPE_ATTRIBUTES = {"to", "dtype", "stash_type"}


@dataclass(frozen=True)
class Attribute:
    """An attribute of a node; `default` is true if it has the default value of the operator."""

    name: str
    value: str
    default: bool = False


def clean(text: str) -> str:
    """Return the text of an untrusted file on one line, with unprintable characters escaped.

    Among those are the control codes of terminals.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "2 nodes"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def bodies_of(attribute: onnx.AttributeProto) -> list[tuple[str, onnx.GraphProto]]:
    """Return the graphs in an attribute of If, Loop or Scan, with their names."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        return [(attribute.name, attribute.g)]
    return [(f"{attribute.name}[{i}]", graph) for i, graph in enumerate(attribute.graphs)]


def attributes_of(node: onnx.NodeProto, opsets: Mapping[str, int]) -> Iterator[Attribute]:
    """Yield the attributes of a node; `opsets` are the opset versions by domain."""
    defaults: Mapping[str, onnx.AttributeProto] = {}
    version = opsets.get(node.domain, opsets.get("", 0))
    if version and onnx.defs.has(node.op_type, version, node.domain):
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
        defaults = {
            name: a.default_value for name, a in schema.attributes.items() if a.default_value.name
        }
    for attribute in node.attribute:
        value = _attribute_value(attribute)
        default = defaults.get(attribute.name)
        is_default = default is not None and value == _attribute_value(default)
        yield Attribute(attribute.name, value, is_default)


def _attribute_value(attribute: onnx.AttributeProto) -> str:
    bodies = bodies_of(attribute)
    if bodies:
        return count(sum(_number_of_nodes(body) for _, body in bodies), "node")
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    if attribute.type == onnx.AttributeProto.TENSOR:
        return literal(attribute.t) or tensor_type(attribute.t.data_type, attribute.t.dims)
    if attribute.type == onnx.AttributeProto.INT and attribute.name in _ELEMENT_TYPE_ATTRIBUTES:
        return _element_type(attribute.i)
    if attribute.type in _PLAIN_ATTRIBUTES:
        return _abbreviated(onnx.helper.get_attribute_value(attribute))
    return str(onnx.AttributeProto.AttributeType.Name(attribute.type)).lower()


def _number_of_nodes(graph: onnx.GraphProto) -> int:
    """Return the number of nodes of a graph, its bodies included."""
    bodies = [body for node in graph.node for a in node.attribute for _, body in bodies_of(a)]
    return len(graph.node) + sum(map(_number_of_nodes, bodies))


def _abbreviated(value: object) -> str:
    """Return the text of a number, a string or a list of either, shortened where it is long."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        text = clean(value)
    elif isinstance(value, Iterable):
        items = list(value)
        more = ", …" if len(items) > MAX_LISTED_ITEMS else ""
        text = f"[{', '.join(_abbreviated(item) for item in items[:MAX_LISTED_ITEMS])}{more}]"
    else:
        text = str(value)
    if len(text) <= MAX_LITERAL_CHARACTERS:
        return text
    return f"{text[: MAX_LITERAL_CHARACTERS - 1]}…"


def literal(tensor: onnx.TensorProto) -> str:
    """Return the value of a small constant, "" for a large or an external one."""
    size = int(np.prod(tensor.dims, dtype=np.int64)) if tensor.dims else 1
    if size > MAX_LITERAL_ELEMENTS or len(tensor.dims) > 1:
        return ""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return ""
    return _abbreviated(onnx.numpy_helper.to_array(tensor).tolist())


def literal_of_constant(node: onnx.NodeProto) -> str:
    """Return the value of a Constant, "" for a large or a sparse one."""
    (attribute,) = node.attribute
    if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
        return ""
    if attribute.type == onnx.AttributeProto.TENSOR:
        return literal(attribute.t)
    value = onnx.helper.get_attribute_value(attribute)
    is_list = isinstance(value, Sequence) and not isinstance(value, bytes)
    return "" if is_list and len(value) > MAX_LITERAL_ELEMENTS else _abbreviated(value)


def type_text(proto: onnx.TypeProto) -> str:
    """Return the type of a value, such as "float32[N, 3]"."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        tensor = proto.tensor_type
        if not tensor.HasField("shape"):
            return f"{_element_type(tensor.elem_type)}[?]"
        dims = [
            d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim
        ]
        return tensor_type(tensor.elem_type, dims)
    if kind == "sequence_type":
        return f"sequence of {type_text(proto.sequence_type.elem_type)}"
    if kind == "optional_type":
        return f"optional {type_text(proto.optional_type.elem_type)}"
    if kind == "map_type":
        return f"map of {type_text(proto.map_type.value_type)}"
    return "?" if kind is None else kind.removesuffix("_type")


def tensor_type(element_type: int, dims: Iterable[object]) -> str:
    """Return the type of a tensor; `element_type` is one of TensorProto.DataType."""
    return f"{_element_type(element_type)}[{', '.join(clean(str(d)) for d in dims)}]"


def _element_type(element_type: int) -> str:
    known = onnx.TensorProto.DataType
    if element_type not in known.values() or element_type == 0:
        return "?"
    name = str(known.Name(element_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def stream_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal behind a stream.

    - `stream`: a text stream. The result is None if it is not a terminal.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return None
    return columns or None

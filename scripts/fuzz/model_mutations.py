"""Damage to models: to the file as bytes, or to what its messages hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx.numpy_helper import from_array

from scripts.fuzz.byte_mutations import INTEGERS, NUMBERS, WORDS, mutated_bytes

FLOAT_TYPES = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
GRAPH_MESSAGES = ("NodeProto", "AttributeProto", "GraphProto", "TensorProto", "FunctionProto")
OPERATORS = {
    s.name: (s.min_input, s.max_input) for s in onnx.defs.get_all_schemas() if s.domain == ""
}
HUGE_SHAPES = (
    [1 << 40],
    [1 << 20, 1 << 20],
    [1 << 32, 1 << 32],
    [-1, -4],
    [0, 1 << 62],
    [1 << 62, 4],
    [1 << 17] * 2,
)
HUGE_TILES = ([1, 1], [100, 100], [1 << 20, 1], [1 << 40, 1], [-1, 2], [0, 0, 0, 1 << 33])
LOCATIONS = ("/etc/passwd", "../../x", "", "w.bin", "\0", ".")
STRING_ATTRIBUTES = (
    b"", b"\xff", b"NOTSET", b"SAME_UPPER", b"VALID", b"linear", b"ij,jk->ik", b"...i,i...->", b"mean",
)  # fmt: skip


def mutated_model(data: bytes, rng: random.Random) -> bytes:
    """Return the model in `data` with one to six mutations."""
    if rng.random() < 0.12:
        return mutated_bytes(data, rng)
    model = onnx.ModelProto.FromString(data)
    if rng.random() < 0.01:
        return deep(model, rng)
    try:
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 6))):
            rng.choice(IN_PLACE)(model, rng)
        return bad_names(model, rng) if rng.random() < 0.04 else model.SerializeToString()
    except (DecodeError, ValueError):  # deeper than protobuf goes
        return deep(model, rng)


# ------------------------------------------------------------------------------------------------
# any field of any message


@dataclass
class _Field:
    """A field of a message, what else the model holds, and the random numbers to change it with."""

    message: Message
    descriptor: Any
    value: Any
    messages: list[Message]
    strings: list[str]
    rng: random.Random

    @property
    def holds_messages(self) -> bool:
        return self.descriptor.message_type is not None

    def other_number_or_text(self, value: Any) -> Any:
        return _other(value, self.descriptor.cpp_type, self.strings, self.rng)

    def copy_any_onto(self, target: Message, candidates: list[Message]) -> None:
        """Make `target` a copy of one of the candidates."""
        copy = type(target)()
        copy.CopyFrom(self.rng.choice(candidates))
        target.CopyFrom(copy)

    def of_type(self, kind: type) -> list[Message]:
        return [m for m in self.messages if type(m) is kind]


def mutate_fields(model: Message, rng: random.Random) -> None:
    """Change, drop, double or move anything that a message holds, in place."""
    messages = list(_messages(model))
    strings = sorted(
        {v for m in messages for _, value in m.ListFields() for v in _strings(value)} or {"x"}
    )
    of_graph = [m for m in messages if type(m).__name__ in GRAPH_MESSAGES]
    message = rng.choice(of_graph if of_graph and rng.random() < 0.75 else messages)
    if rng.random() < 0.85:
        descriptors = [descriptor for descriptor, _ in message.ListFields()]
    else:
        descriptors = list(message.DESCRIPTOR.fields)
    if not descriptors:
        return
    descriptor = rng.choice(descriptors)
    value = getattr(message, descriptor.name)
    field = _Field(message, descriptor, value, messages, strings, rng)
    twins = [m for m in field.of_type(type(message)) if m is not message]
    kind = rng.randrange(10)
    try:
        if kind == 0:
            message.ClearField(field.descriptor.name)
        elif kind == 1 and twins:  # the whole message becomes another
            field.copy_any_onto(message, twins)
        elif not hasattr(value, "append") and not hasattr(value, "add"):
            _mutate_single(field)
        elif not len(value):
            _append_first(field)
        else:
            _mutate_repeated(field, kind)
    except (ValueError, TypeError):  # a number beyond the field's type
        return


def _mutate_single(field: _Field) -> None:
    value = field.value
    if not isinstance(value, Message):
        setattr(field.message, field.descriptor.name, field.other_number_or_text(value))
        return
    candidates = field.of_type(type(value))
    if candidates:
        field.copy_any_onto(value, candidates)
    else:
        value.SetInParent()


def _append_first(field: _Field) -> None:
    """Give an empty repeated field one element."""
    kind = field.descriptor.message_type
    if kind is None:
        types = {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}
        start = types.get(field.descriptor.type, 0)
        field.value.append(field.other_number_or_text(start))
        return
    candidates = [m for m in field.messages if type(m).DESCRIPTOR is kind]
    new = field.value.add()
    if candidates:
        field.copy_any_onto(new, candidates)


def _mutate_repeated(field: _Field, kind: int) -> None:
    """Drop, double, reorder or change elements, by the random number `kind` from 1 to 9."""
    values = field.value
    rng = field.rng
    index = rng.randrange(len(values))
    if kind < 4:
        del values[index]
    elif kind < 6:
        doubled = values[index]
        if isinstance(doubled, Message):
            values.add().CopyFrom(doubled)
        else:
            values.extend([doubled] * rng.choice((1, 1, 2, 40)))
    elif kind == 6 and len(values) > 1:
        _shuffle(field)
    elif not field.holds_messages:
        values[index] = field.other_number_or_text(values[index])
    else:
        field.copy_any_onto(values[index], field.of_type(type(values[index])))


def _shuffle(field: _Field) -> None:
    copies = list(field.value)
    if field.holds_messages:
        copies = [type(v)() for v in field.value]
        for copy, value in zip(copies, field.value):
            copy.CopyFrom(value)
    field.rng.shuffle(copies)
    del field.value[:]
    field.value.extend(copies)


def _other(value: Any, kind: int, strings: list[str], rng: random.Random) -> Any:
    """Another value of a field of this C++ type."""
    if kind in FLOAT_TYPES:
        return rng.choice(NUMBERS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if isinstance(value, str):
        return rng.choice(strings) if rng.random() < 0.8 else rng.choice(WORDS)
    if isinstance(value, bytes):
        damaged = mutated_bytes(value[:5000], rng)
        return rng.choice((b"", value[:-1], value + b"\0", value * 2, b"\xff\xfe", damaged))
    return rng.choice((value + 1, value - 1, -value, rng.choice(INTEGERS), rng.choice(INTEGERS)))


def _messages(message: Message) -> Iterator[Message]:
    """The message and every message inside it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry is False:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _messages(inner)


def _strings(value: Any) -> list[str]:
    """The strings of a field."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (int, float, bytes, Message)):
        return []
    return [v for v in value if isinstance(v, str)]


def _tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [m for m in _messages(model) if isinstance(m, onnx.TensorProto)]


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [m for m in _messages(model) if isinstance(m, onnx.NodeProto)]


# ------------------------------------------------------------------------------------------------
# sizes, types, versions, data


def huge_dims(model: onnx.ModelProto, rng: random.Random) -> None:
    """Declare sizes that no memory has room for, or negative ones."""
    tensors = _tensors(model)
    infos = [m for m in _messages(model) if isinstance(m, onnx.TensorShapeProto.Dimension)]
    if infos and (rng.random() < 0.5 or not tensors):
        rng.choice(infos).dim_value = rng.choice((0, -1, -5, 1 << 20, 1 << 31, 1 << 40, 1 << 62))
    elif tensors:
        tensor = rng.choice(tensors)
        tensor.dims[:] = rng.choice(HUGE_SHAPES)


def external_data(model: onnx.ModelProto, rng: random.Random) -> None:
    """Say that a tensor's data is in another file."""
    tensors = _tensors(model)
    if not tensors:
        return
    tensor = rng.choice(tensors)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    if rng.random() < 0.7:
        tensor.ClearField("raw_data")
    entries = {
        "location": LOCATIONS,
        "offset": ("0", "-1", "x", "9" * 30),
        "length": ("4", "-4", "9" * 25, ""),
    }
    for key, values in entries.items():
        if rng.random() < 0.7:
            tensor.external_data.add(key=key, value=rng.choice(values))


def opsets(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change the versions that a model names, or name more of them."""
    kind = rng.randrange(4)
    if kind == 0 and model.opset_import:
        rng.choice(model.opset_import).version = rng.choice((*range(1, 28), 0, -1, 100, 1 << 40))
    elif kind == 1:
        model.ir_version = rng.choice((0, 1, 3, 7, 11, 12, 99, -1, 1 << 40))
    elif kind == 2:
        model.opset_import.add(
            domain=rng.choice(("", "ai.onnx", "ai.onnx.ml", "x", "com.microsoft")),
            version=rng.choice((1, 9, 17, 21, 22)),
        )
    else:
        for entry in [entry for function in model.functions for entry in function.opset_import]:
            entry.version = rng.choice((1, 7, 13, 18, 22, 99))
        if not model.functions and model.opset_import:
            del model.opset_import[0]


def other_types(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change the element types of values and tensors, to those that ONNX does not have, too."""
    infos = [m for m in _messages(model) if isinstance(m, onnx.TypeProto)]
    tensors = _tensors(model)
    for _ in range(rng.choice((1, 2))):
        if infos and rng.random() < 0.6:
            info = rng.choice(infos)
            kind = rng.randrange(5)
            if kind < 3:
                info.tensor_type.elem_type = rng.choice((*range(24), 99, -1))
            elif kind == 3:
                info.sequence_type.elem_type.tensor_type.elem_type = rng.randrange(18)
            else:
                info.ClearField("value")
        elif tensors:
            rng.choice(tensors).data_type = rng.choice((*range(24), 99, -1))


def settings(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change numbers in attributes and in small integer tensors, or drop attributes: many of
    these files pass all of ONNX's checks.
    """
    attributes = [(node, a) for node in _nodes(model) for a in node.attribute]
    integers = [t for t in _tensors(model) if t.data_type in (6, 7) and t.raw_data]
    if integers and rng.random() < 0.4:
        _change_integer(rng.choice(integers), rng)
    elif attributes:
        node, attribute = rng.choice(attributes)
        _change_attribute(node, attribute, rng)


def _change_integer(tensor: onnx.TensorProto, rng: random.Random) -> None:
    dtype = np.int32 if tensor.data_type == onnx.TensorProto.INT32 else np.int64
    numbers = list(np.frombuffer(tensor.raw_data, dtype))
    if numbers:
        index = rng.randrange(len(numbers))
        numbers[index] = rng.choice(
            (-2, -1, 0, 1, 2, 3, 5, 100, 1 << 20, (1 << 31) - 1, -(1 << 31))
        )
        tensor.raw_data = np.array(numbers, dtype).tobytes()


def _change_attribute(
    node: onnx.NodeProto, attribute: onnx.AttributeProto, rng: random.Random
) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        node.attribute.remove(attribute)
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = rng.choice((attribute.i + 1, attribute.i - 1, *INTEGERS))
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice(NUMBERS)
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = rng.choice(STRING_ATTRIBUTES)
    elif attribute.type == onnx.AttributeProto.INTS and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(INTEGERS)
        if rng.random() < 0.3:
            attribute.ints.append(rng.choice((0, 1, -1)))
    elif attribute.type == onnx.AttributeProto.FLOATS and attribute.floats:
        attribute.floats[rng.randrange(len(attribute.floats))] = rng.choice(NUMBERS)


# ------------------------------------------------------------------------------------------------
# the graph


def other_operator(model: onnx.ModelProto, rng: random.Random) -> None:
    """Make a node any operator of ONNX with as many inputs."""
    nodes = _nodes(model)
    if nodes:
        node = rng.choice(nodes)
        fitting = [n for n, (least, most) in OPERATORS.items() if least <= len(node.input) <= most]
        node.op_type = rng.choice(fitting or ["Identity"])
        node.domain = ""
        if rng.random() < 0.7:
            del node.attribute[:]


def rewired(model: onnx.ModelProto, rng: random.Random) -> None:
    """Make an input of a node any tensor: earlier, later, its own output, or nothing."""
    nodes = _nodes(model)
    known = [name for node in nodes for name in node.output]
    known += [t.name for t in model.graph.initializer]
    known += ["", "nobody"]
    for _ in range(rng.choice((1, 1, 3))):
        node = rng.choice(nodes) if nodes else None
        if node is not None:
            names = node.input if rng.random() < 0.7 or not node.output else node.output
            if names:
                names[rng.randrange(len(names))] = rng.choice(known)


def recursive(model: onnx.ModelProto, rng: random.Random) -> None:
    """Add a function that calls itself, or has the name of an operator."""
    nodes = _nodes(model)
    if not nodes:
        return
    node = rng.choice(nodes)
    function = model.functions.add(
        name=rng.choice(("f", node.op_type)), domain=rng.choice(("local", node.domain))
    )
    function.input.extend(node.input)
    function.output.extend(node.output)
    for entry in model.opset_import:
        function.opset_import.add().CopyFrom(entry)
    inner = function.node.add()
    inner.CopyFrom(node)
    inner.op_type = function.name
    inner.domain = function.domain
    if all(entry.domain != "local" for entry in model.opset_import):
        model.opset_import.add(domain="local", version=1)
    node.op_type = function.name
    node.domain = function.domain


def nested(model: onnx.ModelProto, rng: random.Random) -> None:
    """Put a node into branches in branches."""
    nodes = list(model.graph.node)
    if not nodes:
        return
    node = rng.choice(nodes)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    for depth in range(rng.choice((1, 3, 8, 20, 28))):
        outputs = [onnx.ValueInfoProto(name=n) for n in inner.output]
        branch = oh.make_graph([inner], f"b{depth}", [], outputs)
        last = oh.make_node("If", ["condition"], [f"{n}_{depth}" if n else "" for n in node.output])
        last.attribute.append(oh.make_attribute("then_branch", branch))
        if rng.random() >= 0.02:  # else both branches are the same
            branch = oh.make_graph([], f"e{depth}", [], outputs)
        last.attribute.append(oh.make_attribute("else_branch", branch))
        inner = last
    names = list(node.output)
    node.CopyFrom(inner)
    node.output[:] = names
    model.graph.initializer.append(from_array(np.array(True), "condition"))


def wide(model: onnx.ModelProto, rng: random.Random) -> None:
    """Append a long chain of doublings or repetitions to the first output."""
    if not model.graph.output or not model.graph.node:
        return
    name = model.graph.output[0].name
    op_type = rng.choice(("Add", "Concat", "Tile", "Identity", "Pad", "Expand"))
    length = rng.choice((3, 12, 40, 400))
    for node in model.graph.node:
        node.output[:] = [f"{name}_0" if n == name else n for n in node.output]
    for i in range(length):
        inputs = [f"{name}_{i}"] * (2 if op_type in ("Add", "Concat") else 1)
        last = oh.make_node(op_type, inputs, [name if i == length - 1 else f"{name}_{i + 1}"])
        if op_type == "Concat":
            last.attribute.append(oh.make_attribute("axis", 0))
        if op_type in ("Tile", "Expand", "Pad"):
            last.input.append(f"sizes_{i}")
            sizes = np.array(rng.choice(HUGE_TILES), np.int64)
            model.graph.initializer.append(from_array(sizes, f"sizes_{i}"))
        model.graph.node.append(last)


# ------------------------------------------------------------------------------------------------
# what protobuf would not write


def bad_names(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Make a name invalid UTF-8 of the same length, so that the message stays whole."""
    data = model.SerializeToString()
    names = [
        s for m in _messages(model) for _, v in m.ListFields() for s in _strings(v) if len(s) > 0
    ]
    if not names:
        return data
    name = rng.choice(names).encode()
    framed = bytes([len(name)]) + name if len(name) < 128 else name
    damaged = bytes([rng.choice((0xFF, 0xC0, 0x00, 0xED))]) + name[1:]
    return data.replace(framed, framed[: -len(name)] + damaged)


def deep(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Append bodies in bodies, deeper than protobuf writes them."""
    graph = b""
    for _ in range(rng.choice((34, 60, 3000))):
        # AttributeProto.g, NodeProto.attribute, GraphProto.node
        for key in (b"\x32", b"\x2a", b"\x0a"):
            graph = key + _varint(len(graph)) + graph
    return model.SerializeToString() + b"\x3a" + _varint(len(graph)) + graph


def _varint(number: int) -> bytes:
    encoded = b""
    while number > 127:
        encoded += bytes([number & 127 | 128])
        number >>= 7
    return encoded + bytes([number])


IN_PLACE = (
    *(mutate_fields, settings) * 3, other_operator, rewired, other_types, huge_dims, opsets, external_data, recursive, nested, wide
)  # fmt: skip

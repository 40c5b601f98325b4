"""Changes of a graph that let constants follow the rows of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxfit.tools.editing.batch_axes import (
    Array,
    BatchAxis,
    batch_axis_error,
    constant_of,
    infer,
    repeats,
    sizes_of,
)

# the input with the axes of a node, besides those of reductions
AXES_INPUT = {"Slice": 3, "Squeeze": 1, "Unsqueeze": 1}


class BatchEdits:
    """Changes of a model that allow any batch size.

    - `model`: the model, which is not changed; `edited` is the copy that changes.
    - `rows`: the rows of the batch in the file.
    - `source`: an input and its batch axis, which tell the number of rows.

    `axes` has the batch axis of each value by name, or None for a value without a batch, and
    `edits` counts the changes.
    """

    def __init__(self, model: ir.Model, rows: int, source: tuple[str, int]) -> None:
        self.edited = model.clone()
        self.rows = rows
        self.nodes = list(self.edited.graph)
        self.axes: dict[str, BatchAxis | None] = {}
        self.edits = 0
        self._source = source
        self._names = _names_of(self.edited.graph)
        self._extended: dict[tuple[str, int], ir.Value] = {}
        self._row_count: ir.Value | None = None
        self._undo: list[Callable[[], object]] = []  # for each change, how to take it back

    def take_back(self, changes: int) -> None:
        """Take back all changes but the first ones.

        - `changes`: how many to keep.
        """
        while len(self._undo) > changes:
            self._undo.pop()()

    def replace_input(self, node: ir.Node, position: int, value: ir.Value) -> None:
        """Let a node of the file read another value."""
        old = node.inputs[position]
        node.replace_input_with(position, value)
        self.edits += 1
        self._undo.append(lambda: self._restore_input(node, position, old))

    def squeeze_only(self, node: ir.Node, axes: Sequence[int], kept: int) -> None:
        """Let a Squeeze remove the given axes, but not the axis `kept`."""
        removed = sorted(axes) or [kept]
        as_input = self.edited.graph.opset_imports.get("", 0) >= 13
        if not axes:  # an axis of size 1 is inserted, which the Squeeze removes
            inputs = [node.inputs[0], *([self.constant(np.array(removed))] if as_input else [])]
            settings = {} if as_input else {"axes": removed}
            self.replace_input(node, 0, self.add(node, "Unsqueeze", inputs, settings))
        if as_input:
            node.resize_inputs(2)
            self.replace_input(node, 1, self.constant(np.array(removed)))
        else:
            self.set_attribute(node, ir.AttrInt64s("axes", removed))

    def set_attribute(self, node: ir.Node, attribute: ir.Attr) -> None:
        """Give a node of the file another attribute."""
        old = node.attributes.get(attribute.name)
        node.attributes[attribute.name] = attribute
        self.edits += 1
        self._undo.append(lambda: self._restore_attribute(node, attribute.name, old))

    def _restore_attribute(self, node: ir.Node, name: str, old: ir.Attr | None) -> None:
        if old is None:
            del node.attributes[name]
        else:
            node.attributes[name] = old
        self.edits -= 1

    def shift_axes(self, new: ir.Node) -> None:
        """Let a node keep to its axes if its inputs have a new first axis."""
        origin = next((o for v in new.inputs if (o := self.axis_of(v)) and o.is_new), None)
        if origin is None or origin.axis:
            return
        axis, axes = new.attributes.get("axis"), new.attributes.get("axes")
        if axis is not None and axis.as_int() >= 0:
            self.set_attribute(new, ir.AttrInt64("axis", axis.as_int() + 1))
        if axes is not None:
            moved = [a + 1 if a >= 0 else a for a in axes.as_ints()]
            self.set_attribute(new, ir.AttrInt64s("axes", moved))
        reduces = new.op_type.startswith("Reduce")
        position = AXES_INPUT.get(new.op_type, 1 if reduces else None)
        known = None if position is None else constant_of(new, position)
        if position is not None and known is not None:
            self.replace_input(new, position, self.constant(np.where(known < 0, known, known + 1)))

    def _restore_input(self, node: ir.Node, position: int, value: ir.Value | None) -> None:
        node.replace_input_with(position, value)
        self.edits -= 1

    def axis_of(self, value: ir.Value | None) -> BatchAxis | None:
        """Return the batch axis of a value; None without one, or if it is unknown."""
        return None if value is None else self.axes.get(value.name or "")

    def number_rows(self, node: ir.Node, position: int, sizes: Sequence[int]) -> None:
        """Replace an input with the file's row numbers by one with the number of each row."""
        numbers = self.row_numbers(node, len(sizes))
        numbers = self.add(
            node, "Expand", [numbers, self.constant(np.array([1, *sizes[1:]], np.int64))]
        )
        self.replace_input(node, position, numbers)
        self.axes[numbers.name or ""] = BatchAxis(0)

    def row_numbers(self, node: ir.Node, rank: int) -> ir.Value:
        """Return 0, 1, ... for the rows of the batch, along the first of `rank` axes."""
        rows = self.row_counts(node)
        shape = self.constant(np.array([], np.int64))
        count = self.add(node, "Reshape", [rows, shape])
        zero, one = self.constant(np.array(0)), self.constant(np.array(1))
        numbers = self.add(node, "Range", [zero, count, one])
        column = self.constant(np.array([-1, *[1] * (rank - 1)]))
        return self.add(node, "Reshape", [numbers, column])

    def extend(self, node: ir.Node, position: int, axis: int, size: int) -> None:
        """Repeat an input, which has the file's rows along `axis`, for the rows of the batch."""
        value = node.inputs[position]
        assert value is not None
        key = value.name or "", axis
        if key not in self._extended:
            self._extended[key] = self.repeated(node, value, axis, size)
            self._undo.append(lambda: self._extended.pop(key))
        self.replace_input(node, position, self._extended[key])

    def repeated(self, node: ir.Node, value: ir.Value, axis: int, size: int) -> ir.Value:
        entries, rest = divmod(size, self.rows)
        rank = len(sizes_of(value) or ())
        tensor = ir.convenience.get_const_tensor(value)
        if rest or (self.rows > 1 and tensor is not None and not repeats(tensor, axis, entries)):
            raise batch_axis_error(
                node, f"its input {value.name!r} has {size} different entries along axis {axis}"
            )
        if self.rows > 1:
            limits = [self.constant(np.array([i])) for i in (0, entries, axis)]
            value = self.add(node, "Slice", [value, *limits])
        ones = [self.constant(np.ones(n, np.int64)) for n in (axis, rank - axis - 1)]
        counts = [ones[0], self.row_counts(node), ones[1]]
        counts_of_axes = self.add(node, "Concat", counts, {"axis": 0})
        return self.add(node, "Expand" if entries == 1 else "Tile", [value, counts_of_axes])

    def replace_entries(self, node: ir.Node, position: int, target: Array, entries: Array) -> None:
        """Change entries of a node's integer input, which may be computed from other sizes."""
        value = node.inputs[position]
        assert value is not None
        new = self.constant(entries.astype(target.dtype))
        producer = value.producer()
        if producer is not None and producer.op_type != "Constant":
            mask = self.constant(entries != target)
            new = self.add(node, "Where", [mask, new, value])
        self.replace_input(node, position, new)

    def row_counts(self, node: ir.Node) -> ir.Value:
        """Return the number of rows of the batch, an int64 tensor of one element."""
        if self._row_count is None:
            name, axis = self._source
            source = next(v for v in self.edited.graph.inputs if v.name == name)
            first = self.nodes[0]
            shape = self.add(first, "Shape", [source])
            index = self.constant(np.array([axis]))
            self._row_count = self.add(first, "Gather", [shape, index], {"axis": 0})
            self._undo.append(self._forget_row_count)
        return self._row_count

    def _forget_row_count(self) -> None:
        self._row_count = None

    def add(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | Sequence[int]] | None = None,
    ) -> ir.Value:
        """Add a node before another one, and return its output."""
        settings = [
            ir.AttrInt64(name, value) if isinstance(value, int) else ir.AttrInt64s(name, value)
            for name, value in (attributes or {}).items()
        ]
        node = ir.Node("", op_type, inputs, settings, name=self._unique_name(op_type))
        node.outputs[0].name = node.name
        graph = self.edited.graph
        graph.insert_before(before, node)
        self._undo.append(lambda: graph.remove(node, safe=True))
        infer(graph, node, strict=True)
        return node.outputs[0]

    def constant(self, array: Array) -> ir.Value:
        name = self._unique_name("constant")
        tensor = ir.tensor(array, name=name)
        value = ir.Value(
            name=tensor.name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        initializers = self.edited.graph.initializers
        initializers.add(value)
        self._undo.append(lambda: initializers.pop(name))
        return value

    def _unique_name(self, base: str) -> str:
        number = 0
        while (name := f"dynamic_batch/{base}_{number}") in self._names:
            number += 1
        self._names.add(name)
        return name


def _names_of(graph: ir.Graph) -> set[str]:
    names = {value.name or "" for value in (*graph.inputs, *graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        names |= {node.name or "", *(value.name or "" for value in node.outputs)}
    return names

"""Follow the batch through a graph, and change the constants that fix its size.

The shapes are inferred twice: with the batch of the file, and with GROWTH times as many rows.
The two shapes of a value must differ by this factor along the batch axis, and agree everywhere
else. If they do not, the node has a constant that contains the batch size, or prevents the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.tools.editing.batch_axes import (
    BatchAxis,
    BatchAxisError,
    Choice,
    batch_axis_error,
    constant_of,
    infer,
    read_by,
    resolved,
    sizes_of,
)
from onnxfit.tools.editing.batch_edits import BatchEdits

GROWTH = 3  # the second batch has this many times the rows of the file
BROADCASTING = {
    "Add", "And", "BitShift", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where",
    "Xor",
}  # fmt: skip
# operators whose inputs at these positions have the same size along the axis of the batch
SAME_SIZES: dict[str, tuple[int, ...]] = {
    "Concat": (),  # all of them
    "GatherElements": (0, 1),
    "GridSample": (0, 1),
    "ScatterElements": (0, 1, 2),
}
RECURRENT = {"GRU", "LSTM", "RNN"}
SIZES_INPUT = {"AffineGrid": 1, "MaxUnpool": 2, "Resize": 3}  # the input that holds output sizes
# Other choices among the possible batch axes that may fail in a row without getting any further
MAX_FAILURES = 20


class BatchAxisPropagation(BatchEdits):
    """The batch axes of a main graph; the arguments are those of `propagate_batch_axes`.

    After `run`, `edited` is the model with a batch of any size, and `ends` are the nodes whose
    outputs have no batch any more. After an error, `position` is the number of the node in the way;
    `choose_next` goes back to a Reshape before it, from which `run` continues.
    """

    def __init__(
        self,
        model: ir.Model,
        shapes: Mapping[str, tuple[int, ...]],
        axes: Mapping[str, int],
        rows: int,
    ) -> None:
        super().__init__(model, rows, next(iter(axes.items())))
        self.ends: list[ir.Node] = []
        self._before = model.clone()
        self._before_nodes = list(self._before.graph)
        self._dependent = set(axes)
        self.position = 0
        self._choices: dict[str, Choice] = {}  # by the name of the node, in the order of the graph
        for old, new in zip(self._before.graph.inputs, self.edited.graph.inputs):
            name = old.name or ""
            if name not in shapes:
                continue
            sizes = list(shapes[name])
            old.shape = ir.Shape(sizes)
            if name in axes:
                sizes[axes[name]] *= GROWTH
                self.axes[name] = BatchAxis(axes[name])
            new.shape = ir.Shape(sizes)

    def choose_next(self) -> bool:
        """Go back to the last Reshape before the node in the way, and choose another axis there.

        Return whether there is one. A Reshape that the node does not depend on is skipped.
        """
        before = self._ancestors(self._before_nodes[self.position])
        for name, choice in reversed(list(self._choices.items())):
            if name in before and choice.chosen + 1 < choice.candidates:
                choice.chosen += 1
                self.position = choice.position
                self.take_back(choice.changes)
                del self.ends[choice.ends :]
                return True
            del self._choices[name]
        return False

    def _ancestors(self, last: ir.Node) -> set[str]:
        """Return the names of a node and of all nodes that its inputs depend on."""
        waiting = [last]
        found: set[str] = set()
        while waiting:
            node = waiting.pop()
            if (node.name or "") not in found:
                found.add(node.name or "")
                producers = [v.producer() for v in node.inputs if v is not None]
                waiting += [producer for producer in producers if producer is not None]
        return found

    def run(self) -> None:
        """Continue from `position` to the end of the graph.

        BatchAxisError: a node prevents another batch size.
        """
        while self.position < len(self.nodes):
            self._visit(self._before_nodes[self.position], self.nodes[self.position])
            self.position += 1

    @property
    def hidden(self) -> list[ir.Node]:
        """The nodes whose subgraphs read the batch; they are not changed."""
        return [n for n in self.nodes if subgraphs_of(n) and self._depends(n)]

    def _depends(self, node: ir.Node) -> bool:
        """Return whether an input with a batch leads to a node."""
        return any(v is not None and v.name in self._dependent for v in read_by(node))

    def reaches_outputs(self) -> bool:
        """Return whether an output of the model has a batch axis."""
        return any(self.axis_of(value) is not None for value in self.edited.graph.outputs)

    def _visit(self, old: ir.Node, new: ir.Node) -> None:
        if not self._depends(old):
            self._infer_constant(old, new)
            return
        self._dependent |= {value.name or "" for value in old.outputs}
        for value in (*old.outputs, *new.outputs):
            value.shape = value.const_value = None
            self.axes.pop(value.name or "", None)
        infer(self._before.graph, old, strict=False)
        if new.domain in ("", "ai.onnx"):
            if self._new_axes(new):
                self.shift_axes(new)
            else:
                self._mend(old, new)
        infer(self.edited.graph, new, strict=True)
        self._find_axes(old, new)
        if self._ends_batch(new):
            self.ends.append(new)

    def _infer_constant(self, old: ir.Node, new: ir.Node) -> None:
        """Infer the outputs of a node that no input with a batch leads to."""
        for graph, node in ((self._before.graph, old), (self.edited.graph, new)):
            declared = [value.shape for value in node.outputs]
            infer(graph, node, strict=False)
            for value, shape in zip(node.outputs, declared):
                value.shape = shape if value.shape is None else value.shape
        for value in new.outputs:
            if value.shape is not None:
                self.axes[value.name or ""] = None

    def _ends_batch(self, node: ir.Node) -> bool:
        """Return whether a node has a batch in its inputs and none in its outputs."""
        if node.op_type in ("Shape", "Size"):
            return False
        names = [value.name or "" for value in node.outputs if value.name]
        ended = all(name in self.axes and self.axes[name] is None for name in names)
        return ended and any(self.axis_of(value) is not None for value in node.inputs)

    # ------------------------------------------------------------------ axes

    def _find_axes(self, old: ir.Node, new: ir.Node) -> None:
        for a, b in zip(old.outputs, new.outputs):
            before, after = sizes_of(a), sizes_of(b)
            if not a.name or before is None or after is None:
                continue
            if before == after:
                self.axes[a.name] = None
                continue
            inserted = self._inserted_axis(new, before, after)
            if inserted is not None:
                self.axes[a.name] = BatchAxis(inserted, is_new=True)
                continue
            changed = [i for i, sizes in enumerate(zip(before, after)) if sizes[0] != sizes[1]]
            axis = changed[0] if changed else 0
            if (
                len(before) != len(after)
                or len(changed) != 1
                or after[axis] != before[axis] * GROWTH
            ):
                raise batch_axis_error(
                    new,
                    f"its output is {before} for {self.rows} rows, and {after} for"
                    f" {self.rows * GROWTH}",
                )
            outer = self._outer_after_reshape(old, before, axis)
            self.axes[a.name] = BatchAxis(axis, outer)

    def _new_axes(self, node: ir.Node) -> list[int]:
        """Return the batch axes of inputs that lack them in the file, counted from the end."""
        found = []
        for value in node.inputs:
            axis, sizes = self.axis_of(value), sizes_of(value)
            if axis is not None and axis.is_new and sizes is not None:
                found.append(axis.axis - len(sizes))
        return found

    def _inserted_axis(
        self, node: ir.Node, before: Sequence[int], after: Sequence[int]
    ) -> int | None:
        """Return the axis that a node's output has only in the changed model, None without one."""
        places = self._new_axes(node)
        if node.op_type != "Squeeze" and not places:
            return None
        fitting = [
            i
            for i, size in enumerate(after)
            if size == GROWTH * self.rows and [*after[:i], *after[i + 1 :]] == [*before]
        ]
        likely = [place + len(after) for place in places if place + len(after) in fitting]
        return next(iter([*likely, *fitting]), None)

    def _outer_after_reshape(self, old: ir.Node, sizes: Sequence[int], axis: int) -> int:
        """Return `outer` of a node's output, whose batch axis is `axis`."""
        for value in old.inputs:
            origin = self.axis_of(value)
            shape = sizes_of(value)
            if origin is None or origin.is_new or shape is None:
                continue
            if old.op_type in ("Reshape", "Flatten"):
                entries = math.prod(shape[: origin.axis]) * origin.outer
                return max(entries // max(math.prod(sizes[:axis]), 1), 1)
            if origin.outer > 1 and shape[origin.axis] == sizes[axis]:
                return origin.outer
        return 1

    # ------------------------------------------------------------------ mending

    def _mend(self, old: ir.Node, new: ir.Node) -> None:
        mend = MENDS.get(new.op_type)
        if mend is not None:
            mend(self, old, new)
        elif new.op_type in BROADCASTING:
            self._share_by_broadcasting(old, new)
        elif new.op_type in SAME_SIZES:
            self._share_same_sizes(old, new)
        elif new.op_type in RECURRENT:
            self._share_recurrent(old, new)
        elif new.op_type in SIZES_INPUT:
            self._mend_sizes(old, new)

    def mend_reshape(self, old: ir.Node, new: ir.Node) -> None:
        """Let a Reshape to constant sizes keep the batch."""
        x = old.inputs[0]
        origin = self.axis_of(x)
        sizes, result = sizes_of(x), sizes_of(old.outputs[0])
        grown, target = sizes_of(new.inputs[0]), constant_of(new, 1)
        if origin is None or sizes is None or result is None or grown is None or target is None:
            return
        axis = self._target_axis(new, sizes, origin, result)
        if axis is None:
            raise batch_axis_error(new, f"it reshapes {sizes} to {result}, which has no batch axis")
        wanted = [size * GROWTH if i == axis else size for i, size in enumerate(result)]
        copies = not (new.attributes.get_int("allowzero", 0))
        if resolved(target, grown, copies) == wanted:
            return
        entries = [int(entry) for entry in target]
        follows = copies and axis < len(grown) and grown[axis] == wanted[axis]
        entries[axis] = 0 if follows else -1
        for i in range(len(entries)):
            unknown = entries[i] == -1 and not follows
            wrong_copy = entries[i] == 0 and copies and (i >= len(grown) or grown[i] != wanted[i])
            if i != axis and (unknown or wrong_copy):
                entries[i] = wanted[i]
        self.replace_entries(new, 1, target, np.array(entries, np.int64))

    def _target_axis(
        self, node: ir.Node, sizes: Sequence[int], origin: BatchAxis, result: Sequence[int]
    ) -> int | None:
        """Return the axis of a Reshape's `result` that contains the batch of its input.

        If the batch size is 1, several axes are possible. The first is the likeliest; `run` tries
        the others if a later node does not accept it.
        """
        entries = math.prod(sizes[: origin.axis]) * origin.outer  # before the rows
        exact, merged = [], []
        before = 1
        for i, size in enumerate(result):
            if before == entries and size % self.rows == 0:
                exact.append(i)
            elif before and entries % before == 0 and size % (entries // before * self.rows) == 0:
                merged.append(i)
            before *= size
        kept = origin.axis + 1
        in_place = origin.outer == 1 and tuple(result[:kept]) == tuple(sizes[:kept])
        same = [origin.axis] if in_place else []
        # The last axis usually contains features, which are seldom merged with the rows.
        unlikely = [i for i in exact if i == len(result) - 1 and result[i] != self.rows]
        likely = [i for i in exact if i not in unlikely]
        candidates = list(dict.fromkeys([*same, *likely, *reversed(merged), *unlikely]))
        if not candidates:
            return None
        name = node.name or ""
        if len(candidates) > 1 and name not in self._choices:
            place = self.position, len(candidates), len(self._undo), len(self.ends)
            self._choices[name] = Choice(*place)
        return candidates[self._choices[name].chosen if name in self._choices else 0]

    def mend_expand(self, old: ir.Node, new: ir.Node) -> None:
        """Let an Expand to constant sizes keep the batch, by replacing its size with 1."""
        origin = self.axis_of(old.inputs[0])
        grown, target = sizes_of(new.inputs[0]), constant_of(new, 1)
        if origin is None or grown is None or target is None:
            return
        axis = origin.axis + len(target) - len(grown)
        if axis >= 0 and target[axis] not in (1, grown[origin.axis]):
            entries = target.copy()
            entries[axis] = 1
            self.replace_entries(new, 1, target, entries)

    def mend_slice(self, old: ir.Node, new: ir.Node) -> None:
        """Let a Slice that keeps all rows of the file keep all rows of any batch."""
        origin = self.axis_of(old.inputs[0])
        sizes, grown = sizes_of(old.inputs[0]), sizes_of(new.inputs[0])
        if origin is None or sizes is None or grown is None or len(new.inputs) < 3:
            return
        starts, ends = constant_of(new, 1), constant_of(new, 2)
        axes = constant_of(new, 3)
        if starts is None or ends is None:
            return
        listed = range(len(starts)) if axes is None else [int(a) % len(sizes) for a in axes]
        for i, axis in enumerate(listed):
            whole = starts[i] == 0 and sizes[axis] <= ends[i] < grown[axis]
            if axis == origin.axis and whole:
                entries = ends.copy()
                entries[i] = np.iinfo(ends.dtype).max
                self.replace_entries(new, 2, ends, entries)

    def mend_squeeze(self, old: ir.Node, new: ir.Node) -> None:
        """Let a Squeeze that removes the batch of one row keep it."""
        origin, sizes = self.axis_of(old.inputs[0]), sizes_of(old.inputs[0])
        if origin is None or origin.outer > 1 or sizes is None or sizes[origin.axis] != 1:
            return
        known, attribute = None, new.attributes.get("axes")
        if len(old.inputs) > 1 and old.inputs[1] is not None:
            known = constant_of(old, 1)
            if known is None:
                return
        listed = known if attribute is None else attribute.as_ints()
        ones = [i for i, size in enumerate(sizes) if size == 1]
        axes = ones if listed is None else [int(axis) % len(sizes) for axis in listed]
        if origin.axis in axes:
            self.squeeze_only(new, [axis for axis in axes if axis != origin.axis], origin.axis)

    def mend_gather(self, old: ir.Node, new: ir.Node) -> None:
        """Extend a Gather with an index for each row of the file to any number of rows.

        torch writes as_strided as a Gather from one axis of all elements.
        """
        origin = self.axis_of(old.inputs[0])
        sizes, index = sizes_of(old.inputs[0]), constant_of(old, 1)
        if origin is None or sizes is None or index is None or origin.outer > 1 or not index.ndim:
            return
        axis = new.attributes.get_int("axis", 0) % len(sizes)
        size = sizes[axis] // self.rows
        rows = np.arange(self.rows).reshape(-1, *[1] * (index.ndim - 1))
        if axis != origin.axis or len(index) != self.rows or self.axis_of(old.inputs[1]):
            return
        if not ((index - rows * size == index[:1]) & (index[:1] >= 0) & (index[:1] < size)).all():
            return
        numbers = self.row_numbers(new, index.ndim)
        first = self.constant(index[:1].astype(np.int64))
        offsets = self.add(new, "Mul", [numbers, self.constant(np.array(size, np.int64))])
        numbers = self.add(new, "Add", [offsets, first])
        self.replace_input(new, 1, numbers)
        self.axes[numbers.name or ""] = BatchAxis(0)

    def mend_gather_nd(self, old: ir.Node, new: ir.Node) -> None:
        """Let constant indices that begin with the number of a row do so for every row."""
        origin = self.axis_of(old.inputs[0])
        index = old.inputs[1]
        sizes = sizes_of(index)
        if origin is None or origin.axis or origin.outer > 1 or sizes is None or len(sizes) < 2:
            return
        known = constant_of(old, 1)
        if new.attributes.get_int("batch_dims", 0) or self.axis_of(index) or sizes[0] != self.rows:
            return
        rows = np.arange(self.rows).reshape(-1, *[1] * (len(sizes) - 2))
        if known is not None and not (known[..., 0] == rows).all():
            return
        column = self.row_numbers(new, len(sizes))
        ones = self.constant(np.array([1, *sizes[1:-1], 1], np.int64))
        columns = [self.add(new, "Expand", [column, ones])]
        if sizes[-1] > 1:
            limits = [self.constant(np.array([i])) for i in (1, sizes[-1], len(sizes) - 1)]
            rest = self.add(new, "Slice", [new.inputs[1], *limits])
            columns.append(self.repeated(new, rest, 0, sizes[0]))
        index = self.add(new, "Concat", columns, {"axis": len(sizes) - 1})
        self.replace_input(new, 1, index)
        self.axes[index.name or ""] = BatchAxis(0)

    def _mend_sizes(self, old: ir.Node, new: ir.Node) -> None:
        """Write the number of rows into the constant sizes of a node's output."""
        position = SIZES_INPUT[new.op_type]
        origin = self.axis_of(old.inputs[0])
        shape, sizes = sizes_of(old.inputs[0]), constant_of(new, position)
        rows_first = origin is not None and origin.axis == 0 and origin.outer == 1
        if not rows_first or shape is None or sizes is None or len(sizes) != len(shape):
            return
        if shape[0] == self.rows and sizes[0] == self.rows:
            mask = np.arange(len(sizes)) == 0
            rows = self.row_counts(new)
            whole = self.add(new, "Where", [self.constant(mask), rows, new.inputs[position]])
            self.replace_input(new, position, whole)

    def _share_by_broadcasting(self, old: ir.Node, new: ir.Node) -> None:
        """Repeat inputs with the file's number of rows for the batch, if sizes differ."""
        batched = self._batched_inputs(old)
        for reference, size, rank in batched[:1]:
            distance = rank - reference.axis  # from the end, where broadcasting aligns
            if new.op_type == "MatMul" and distance < 3:
                return
            for i, value in enumerate(old.inputs):
                sizes = sizes_of(value)
                if sizes is None or self.axis_of(value) is not None or len(sizes) < distance:
                    continue
                if sizes[-distance] != 1 and sizes[-distance] == size:
                    self.extend(new, i, len(sizes) - distance, size)

    def _share_same_sizes(self, old: ir.Node, new: ir.Node) -> None:
        """Repeat inputs without a batch if a node needs the batch in all inputs."""
        batched = self._batched_inputs(old)
        default = {"GatherElements": 0, "ScatterElements": 0}.get(new.op_type, -1)
        for reference, size, rank in batched[:1]:
            along = new.attributes.get_int("axis", default) % rank
            if new.op_type != "GridSample" and along == reference.axis:
                return
            for i in SAME_SIZES[new.op_type] or range(len(new.inputs)):
                sizes = sizes_of(old.inputs[i])
                if sizes is None or self.axis_of(old.inputs[i]) is not None:
                    continue
                if len(sizes) == rank and sizes[reference.axis] == size:
                    if self._counts_rows(old, i, along == rank - 1):
                        self.number_rows(new, i, sizes)
                    else:
                        self.extend(new, i, reference.axis, size)

    def _share_recurrent(self, old: ir.Node, new: ir.Node) -> None:
        """Repeat constant lengths and initial states for each row."""
        if self.axis_of(old.inputs[0]) is None:
            return
        axis = 0 if new.attributes.get_int("layout", 0) else 1
        for i, own_axis in ((4, 0), (5, axis), (6, axis)):
            value = old.inputs[i] if i < len(old.inputs) else None
            sizes = sizes_of(value)
            if sizes is not None and self.axis_of(value) is None:
                self.extend(new, i, own_axis, sizes[own_axis])

    def _batched_inputs(self, old: ir.Node) -> list[tuple[BatchAxis, int, int]]:
        """Return axis, size and rank of each input that has a batch."""
        found = []
        for value in old.inputs:
            axis, sizes = self.axis_of(value), sizes_of(value)
            if axis is not None and sizes is not None:
                found.append((axis, sizes[axis.axis], len(sizes)))
        return found

    def _counts_rows(self, old: ir.Node, position: int, last_axis: bool) -> bool:
        """Return whether an input of a Concat is the number of each row, for a GatherND.

        It is the first of the indices, and holds 0, 1, ... along axis 0.
        """
        users = old.outputs[0].uses()
        index = constant_of(old, position)
        if old.op_type != "Concat" or position != 0 or not last_axis or index is None:
            return False
        numbers = np.arange(self.rows).reshape(-1, *[1] * (index.ndim - 1))
        for user, at in users:
            data = user.inputs[0]
            axis = self.axis_of(data)
            of_rows = axis is not None and axis.axis == 0
            if user.op_type not in ("GatherND", "ScatterND") or at != 1 or not of_rows:
                return False
            if user.attributes.get_int("batch_dims", 0):
                return False
        return bool(users) and index.shape[0] == self.rows and bool((index == numbers).all())


MENDS: dict[str, Callable[[BatchAxisPropagation, ir.Node, ir.Node], None]] = {
    "Expand": BatchAxisPropagation.mend_expand,
    "Gather": BatchAxisPropagation.mend_gather,
    "GatherND": BatchAxisPropagation.mend_gather_nd,
    "Reshape": BatchAxisPropagation.mend_reshape,
    "Slice": BatchAxisPropagation.mend_slice,
    "Squeeze": BatchAxisPropagation.mend_squeeze,
}


def propagate_batch_axes(
    model: ir.Model, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int], rows: int
) -> BatchAxisPropagation:
    """Return a finished propagation, after which the batch may have any size.

    A Reshape may leave several batch axes to choose from, which are tried in turn.

    - `model`: the model, which is not changed; its nodes have names.
    - `shapes`: a shape without unknown sizes for each input, with the batch of the file.
    - `axes`: the batch axis of each input that has one.
    - `rows`: the rows of the batch in the file.

    BatchAxisError: a node prevents another batch size.
    """
    attempt = BatchAxisPropagation(model, shapes, axes, rows)
    first: BatchAxisError | None = None
    farthest = failures = 0
    while failures <= MAX_FAILURES:
        try:
            attempt.run()
        except BatchAxisError as error:
            first = first or error
            failures = 0 if attempt.position > farthest else failures + 1
            farthest = max(farthest, attempt.position)
            if not attempt.choose_next():
                break
            continue
        if first is None or attempt.reaches_outputs():
            return attempt
        break  # another axis avoids the node, but the batch does not come to the end
    assert first is not None
    raise first

"""The batch axis of each input and output of a model: given, named in the file, or inferred.

Most files have the batch on the first axis. Recurrent networks may have outputs [time, batch,
units] and states [layers, batch, units]. Training and evaluation use a view of the model in which
the batch is the first axis everywhere, batch_view.py; data and predictions have the layout of the
file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError, SettingError, listed_names
from onnxfit.graph.index import required_inputs
from onnxfit.graph.inference import sizes_of
from onnxfit.graph.model import inferred_model, large_tensors_as_inputs, spec_of
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.load.given_axes import Axes, axes_by_name, checked_axes, require_consistent

Array = npt.NDArray[Any]
# How a batch axis was found: "position" and "assumed" are the first axis.
Evidence = Literal["given", "name", "inferred", "position", "assumed"]

# Names that ONNX's inference and torch's older exporter invent for sizes that they do not know;
# two of them may be the same size.
INVENTED = re.compile(r"unk__\d+|.*_dynamic_axes_\d+")
ALWAYS_BATCH = ("batch", "batch_size", "batchsize")
OFTEN_BATCH = ("N", "B")  # decides only between sizes that qualify otherwise


@dataclass(frozen=True)
class ValueLayout:
    """The batch axis of an input or output.

    - `spec`: name, type and shape in the file, with the batch axis.
    - `reason`: why this axis is the batch, or why there is none, for `summary` and messages.
    - `evidence`: how it was found.
    """

    spec: TensorSpec
    reason: str
    evidence: Evidence = "name"

    @property
    def is_assumed(self) -> bool:
        """Whether the file does not tell, so that the first axis is taken."""
        return self.evidence == "assumed"

    @property
    def axis(self) -> int | None:
        """The axis of the rows; None for a value without rows."""
        return self.spec.batch_axis

    @property
    def is_moved(self) -> bool:
        """Whether the view has another layout than the file: rows first, or one row."""
        return bool(self.axis) or (self.axis is None and self.spec.shape != ())

    def in_file(self, array: Array) -> Array:
        """Return an array of the view in the layout of the file, without a copy."""
        if self.axis is None:  # several ranks have an entry each
            return array[0] if self.is_moved and len(array) == 1 else array
        return np.moveaxis(array, 0, self.axis) if self.axis else array

    def in_view(self, array: Array) -> Array:
        """Return an array of the file in the layout of the view, without a copy."""
        if self.axis is None:
            return array[None] if self.is_moved else array
        return np.moveaxis(array, self.axis, 0) if self.axis else array


@dataclass(frozen=True)
class BatchLayout:
    """The batch axes of a model.

    - `inputs`, `outputs`: name -> layout, in the model's order.
    - `batch`: the name of the size that counts rows; None if no name does.
    - `is_whole`: whether inputs have several sizes that data may choose freely, such as the atoms
      and bonds of a molecule. Then no axis counts rows: each batch is passed as it is.
    """

    inputs: Mapping[str, ValueLayout] = field(default_factory=dict)
    outputs: Mapping[str, ValueLayout] = field(default_factory=dict)
    batch: str | None = None
    is_whole: bool = False

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs in the layout of the file."""
        return tuple(layout.spec for layout in self.inputs.values())

    @property
    def moved_outputs(self) -> dict[str, ValueLayout]:
        """The outputs whose layout in the view differs from the file."""
        if self.is_whole:
            return {}
        return {name: layout for name, layout in self.outputs.items() if layout.is_moved}

    @property
    def changes_graph(self) -> bool:
        """Whether the view differs from the file."""
        return bool(self.moved_outputs) or any(layout.axis for layout in self.inputs.values())

    def inputs_in_file(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays of inputs, such as their gradients, in the layout of the file."""
        moved = {name: layout for name, layout in self.inputs.items() if layout.axis}
        return {n: moved[n].in_file(a) if n in moved else a for n, a in inputs.items()}

    def outputs_in_file(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of a batch in the layout of the file, without copies."""
        moved = self.moved_outputs
        return {n: moved[n].in_file(a) if n in moved else a for n, a in outputs.items()}

    def joining_axis(self, output: str, arrays: Sequence[Array], rows: Sequence[int]) -> int | None:
        """Return the axis along which the outputs of batches are joined; None if there is none.

        - `arrays`: the output of each batch, in the layout of the file.
        - `rows`: the number of rows of each batch.

        SettingError: an axis that the user gave is not the batch.
        """
        layout = self.outputs.get(output)
        if layout is None or layout.axis is None or self.is_whole:
            return 0 if layout is None else layout.axis
        axis, first = layout.axis, layout.spec.rows
        if all(a.ndim > axis and a.shape[axis] == size for a, size in zip(arrays, rows)):
            return axis
        if layout.evidence == "given":
            shapes = ", ".join(str(list(array.shape)) for array in arrays[:2])
            raise SettingError(
                f"batch_axes has axis {axis} for {output!r}, but batches of {list(rows[:2])} rows"
                f" have outputs of shapes {shapes}. Pass the axis of the rows, or None."
            )
        if layout.is_assumed and isinstance(first, str) and self.batch is not None:
            return 0 if self.batch in first else None  # several entries for a row, as batch*time
        return None

    def lines(self) -> list[str]:
        """Return a sentence for each batch axis and its reason, with the values that have it."""
        groups: dict[tuple[str, str], list[str]] = {}
        for layout in (*self.inputs.values(), *self.outputs.values()):
            place = "no axis" if layout.axis is None else f"axis {layout.axis}"
            groups.setdefault((place, layout.reason), []).append(layout.spec.name)
        return [
            f"{place} of {listed_names(names)}: {reason}"
            for (place, reason), names in groups.items()
        ]


def batch_layout(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    given: Axes | None = None,
    inferred: Mapping[str, int] | None = None,
) -> BatchLayout:
    """Return the batch axes of a model with these inputs and outputs.

    The batch is the size whose name says so (`batch`), or else the name of the first size of an
    input that outputs have, too. Without such a name, the first axis is taken.

    - `given`: name -> axis, or None for a value without a batch: the argument of Trainer.
    - `inferred`: output -> axis, for outputs whose batch has no name.

    UnknownNameError or SettingError: an axis does not exist, or contradicts the file.

    >>> x = TensorSpec("x", np.dtype("float32"), ("batch", 7))
    >>> state = TensorSpec("state", np.dtype("float32"), (2, "batch", 5))
    >>> rate = TensorSpec("rate", np.dtype("int64"), ())
    >>> y = TensorSpec("y", np.dtype("float32"), ("time", "batch", 3))
    >>> for line in batch_layout([x, state, rate], [y]).lines():
    ...     print(line)
    axis 0 of x: the size 'batch'
    axis 1 of state, y: the size 'batch'
    no axis of rate: it is one number
    """
    axes, inferred = checked_axes(given or {}, inputs, outputs), inferred or {}
    batch = _batch_name(inputs, outputs, axes)
    layout = _without_given(inputs, outputs, batch, axes)
    read, written = dict(layout.inputs), dict(layout.outputs)
    for name, axis in inferred.items():
        written[name] = _at(written[name].spec, axis, "found by shape inference", "inferred")
    for name, own in axes.items():
        side = read if name in read else written
        false = name in written and own is None
        spec = side[name].spec
        side[name] = _at(_without_name(spec, batch) if false else spec, own, "given", "given")
    layout = replace(layout, inputs=read, outputs=written)
    require_consistent(axes, layout.specs, outputs, batch, inferred)
    if axes and not any(one.spec.has_rows for one in read.values()):
        layout = _whole(inputs, outputs, "given: no input has a batch")
    if layout.is_whole and any(axis is not None or name in written for name, axis in axes.items()):
        others = [f"{n} ({one.reason})" for n, one in layout.inputs.items() if n not in axes]
        raise SettingError(
            f"batch_axes has {listed_names(axes)}, but each batch is passed as it is. Give every"
            f" input an axis, or None{': ' * bool(others)}{listed_names(others)}."
        )
    return layout


def _without_name(spec: TensorSpec, batch: str | None) -> TensorSpec:
    """Return an output without the name of the batch, which its declaration has wrongly."""
    sizes = None if spec.shape is None else [None if d == batch else d for d in spec.shape]
    return replace(spec, shape=None if sizes is None else tuple(sizes))


def _without_given(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], batch: str | None, axes: Axes
) -> BatchLayout:
    """Return the layout in which the axes of other values than `axes` are final."""
    if batch is None:
        return _by_position(inputs, outputs, axes)
    having = [
        spec for spec in inputs if batch in _names_of_sizes(spec) or axes.get(spec.name) is not None
    ]
    lengths = {name for spec in having for name in _names_of_sizes(spec)}
    others = [spec for spec in inputs if spec.name not in axes]
    free = [name for spec in others for name in _names_of_sizes(spec) if name not in lengths]
    if free:
        why = (
            f"the inputs have the sizes {batch!r} and {free[0]!r}, so each batch is passed as it is"
        )
        return _whole(inputs, outputs, why)
    reason = f"the size {batch!r}"
    read = {spec.name: _of_input(spec, batch, reason) for spec in inputs}
    written = {spec.name: _of_output(spec, batch, reason, lengths) for spec in outputs}
    return BatchLayout(read, written, batch)


def _names_of_sizes(spec: TensorSpec) -> list[str]:
    """Return the names of a value's sizes, without invented names."""
    return [name for size in spec.shape or () if (name := _name_of_size(size)) is not None]


def _name_of_size(size: Dim) -> str | None:
    return size if isinstance(size, str) and size and not INVENTED.fullmatch(size) else None


def _batch_name(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], axes: Axes
) -> str | None:
    """Return the name of the size that counts rows, or None if no name does."""
    listed = list(dict.fromkeys(name for spec in inputs for name in _names_of_sizes(spec)))
    saying = [name for name in listed if "batch" in name.lower()]
    if len(saying) > 1:
        saying = [name for name in saying if name.lower() in ALWAYS_BATCH]
    if len(saying) == 1:
        return saying[0]
    for spec in inputs:
        axis = axes.get(spec.name)
        name = None if axis is None or spec.shape is None else _name_of_size(spec.shape[axis])
        if name is not None:
            return name
    inputs = [spec for spec in inputs if spec.name not in axes]
    first = [
        name for spec in inputs if spec.shape and (name := _name_of_size(spec.shape[0])) is not None
    ]
    if not first:
        return None
    offered = {name for spec in outputs for name in _names_of_sizes(spec)}
    shared = [name for name in first if name in offered]
    if shared:
        often = [name for name in listed if name in offered and name in OFTEN_BATCH]
        return often[0] if len(often) == 1 else shared[0]
    named = [set(_names_of_sizes(spec)) for spec in inputs if _names_of_sizes(spec)]
    everywhere = [name for name in listed if name in offered and all(name in one for one in named)]
    return everywhere[0] if len(everywhere) == 1 else first[0]


def _of_input(spec: TensorSpec, batch: str, reason: str) -> ValueLayout:
    shape = spec.shape
    if shape is not None and batch in shape:
        return _at(spec, shape.index(batch), reason)
    if shape == ():
        return _at(spec, None, "it is one number")
    if shape is None or (not isinstance(shape[0], int) and _name_of_size(shape[0]) is None):
        return _at(spec, 0, "assumed, because the file does not name its first size", "assumed")
    return _at(spec, None, f"it has no size {batch!r}, so each batch gets the whole array")


def _of_output(
    spec: TensorSpec, batch: str | None, reason: str, lengths: Collection[Dim]
) -> ValueLayout:
    shape = spec.shape
    if batch is not None and shape is not None and batch in shape:
        return _at(spec, shape.index(batch), reason)
    if shape == ():
        return _at(spec, None, "it is one number for each batch")
    if shape is not None and shape[0] in lengths:
        return _at(spec, None, f"its first size is {shape[0]!r}, and the batch has another name")
    why = "assumed, because the file does not name the batch of this value"
    return _at(spec, 0, why, "assumed")


def _at(
    spec: TensorSpec, axis: int | None, reason: str, evidence: Evidence = "name"
) -> ValueLayout:
    return ValueLayout(replace(spec, batch_axis=axis), reason, evidence)


def _by_position(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], axes: Axes
) -> BatchLayout:
    """Return the layout of a model without a name for the batch: the first axis is taken.

    An input whose first size is another number than the batch of the others has no rows.
    """
    placed = [(spec.shape, axes.get(spec.name, 0)) for spec in inputs if spec.shape]
    sized = [shape for shape, axis in placed if axis is not None]
    sizes = [shape[axis] for shape, axis in placed if axis is not None]
    firsts = list(dict.fromkeys(size for size in sizes if isinstance(size, int)))
    is_free = any(not isinstance(size, int) for size in sizes)
    rows: int | None = None
    if firsts and not is_free:
        anywhere = [size for size in firsts if all(size in shape for shape in sized)]
        rows = anywhere[0] if len(firsts) > 1 and anywhere else firsts[0]
    reason = "the first axis, because no size is called the batch"
    read = {}
    for spec in inputs:
        first = spec.shape[0] if spec.shape else None
        if spec.shape == ():
            read[spec.name] = _at(spec, None, "it is one number")
        elif isinstance(first, int) and first != rows:
            batch = "of another input is free" if is_free else f"is {rows}"
            why = f"its first size is {first}, and the batch {batch}"
            read[spec.name] = _at(spec, None, f"{why}, so each batch gets the whole array")
        else:
            read[spec.name] = _at(spec, 0, reason, "position")
    lengths = {name for spec in inputs for name in _names_of_sizes(spec)}
    written = {spec.name: _of_output(spec, None, reason, lengths) for spec in outputs}
    for name, layout in written.items():
        if rows is not None and layout.axis == 0 and layout.spec.rows == rows:
            written[name] = _at(layout.spec, 0, reason, "position")
        elif rows == 1 and layout.is_assumed and _has_no_size_1(layout.spec):
            written[name] = _at(layout.spec, None, "it has no size 1, and the batch is 1")
    return BatchLayout(read, written)


def _has_no_size_1(spec: TensorSpec) -> bool:
    sizes = spec.shape or (1,)
    return all(isinstance(size, int) and size != 1 for size in sizes)


def _whole(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], why: str) -> BatchLayout:
    """Return the layout of a model whose batches cannot be divided into rows."""
    read = {
        spec.name: _at(spec, None, "it is one number" if spec.shape == () else why)
        for spec in inputs
    }
    own = "the rows of this output"
    written = {
        spec.name: _at(spec, None, "it is one number for each batch")
        if spec.shape == ()
        else _at(spec, 0, own)
        for spec in outputs
    }
    return BatchLayout(read, written, is_whole=True)


# ---------------------------------------------------------------------- of a file


def layout_of(model: onnx.ModelProto, batch_axes: Any = None) -> BatchLayout:
    """Return the batch axes of a model's tensors; sequences and maps are left out.

    Where the file does not name the batch of an output, ONNX's shape inference looks for it.

    - `batch_axes`: name -> axis, or None for a value without a batch: the argument of Trainer.

    UnknownNameError or SettingError: an axis does not exist, or contradicts the file.
    """
    graph, given = model.graph, axes_by_name(batch_axes)
    inputs = _specs(required_inputs(graph).values())
    outputs = _specs(graph.output)
    read = {spec.name for spec in inputs}
    layout = batch_layout(inputs, outputs, {n: axis for n, axis in given.items() if n in read})
    unknown = [n for n, one in layout.outputs.items() if one.is_assumed or n in given]
    shapes: dict[str, tuple[Dim, ...]] = {}
    if unknown and not layout.is_whole:
        axes = {spec.name: spec.batch_axis for spec in layout.specs if spec.batch_axis is not None}
        shapes = inferred_outputs(model, axes, unknown)
    elif not given:
        return layout
    completed = [
        _inferred(spec, shapes[spec.name], layout) if spec.name in shapes else spec
        for spec in outputs
    ]
    inferred = {n: shape.index(BATCH) for n, shape in shapes.items() if shape.count(BATCH) == 1}
    return batch_layout(inputs, completed, given, inferred)


def _inferred(spec: TensorSpec, shape: tuple[Dim, ...], layout: BatchLayout) -> TensorSpec:
    """Return an output with its inferred shape, and with the names that the file declares."""
    rows = next((one.spec.rows for one in layout.inputs.values() if one.spec.has_rows), None)
    declared = spec.shape if spec.rank == len(shape) else (None,) * len(shape)
    sizes: list[Dim] = []
    for size, name in zip(shape, declared or ()):
        if size == BATCH:
            sizes.append(rows if shape.count(BATCH) == 1 else None)
        else:
            false = BATCH in shape and name == layout.batch
            sizes.append(size if name is None or false else name)
    return replace(spec, shape=tuple(sizes))


def _specs(values: Iterable[onnx.ValueInfoProto]) -> list[TensorSpec]:
    read = [
        ir.serde.deserialize_value_info_proto(value, None)
        for value in values
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type
    ]
    return [_without_negative_sizes(spec_of(value)) for value in read]


def _without_negative_sizes(spec: TensorSpec) -> TensorSpec:
    """Return the spec with unknown sizes in place of -1, which some exporters write."""
    if spec.shape is None:
        return spec
    sizes = (None if isinstance(size, int) and size < 0 else size for size in spec.shape)
    return replace(spec, shape=tuple(sizes))


BATCH = "onnxfit/batch"  # the name of the batch during the inference


def inferred_outputs(
    model: onnx.ModelProto, axes: Mapping[str, int], outputs: Collection[str]
) -> dict[str, tuple[Dim, ...]]:
    """Return output -> shape, with the size `BATCH` where the batch of the inputs arrives.

    The operators alone determine the shapes; declared shapes of these outputs are not read. An
    output whose number of axes stays unknown is left out.

    - `model`: the model, which stays unchanged.
    - `axes`: input -> axis of the batch, for all inputs with a batch.
    - `outputs`: names of outputs.
    """
    proto = large_tensors_as_inputs(model)
    graph = proto.graph
    del graph.value_info[:]  # they may have the batch of the exporter's example
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name in axes and axes[value.name] < len(dims):
            dims[axes[value.name]].dim_param = BATCH
    for value in graph.output:
        if value.name in outputs:
            value.type.tensor_type.ClearField("shape")
    try:
        inferred = inferred_model(proto)
    except ModelError:
        return {}  # the recipe of the training reports it
    return {
        value.name or "": _without_invented_names(sizes_of(value.shape))
        for value in inferred.graph.outputs
        if value.name in outputs and value.shape is not None
    }


def _without_invented_names(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return a shape without the names that the inference invents."""
    return tuple(size if isinstance(size, int) or size == BATCH else None for size in shape)

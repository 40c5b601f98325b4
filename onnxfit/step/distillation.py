"""A frozen model, the teacher, whose outputs a model learns in addition to the labels.

The teacher runs inside the graph of a step, on the inputs of the batch:

    inputs ─► model ───► outputs ─► loss of labels and teacher ─► gradients of the weights
       └────► teacher ─► soft targets ─┘

Its tensors are constants of the graph, one copy for each compiled graph. Evaluation, prediction and
the exported file do not contain the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError, SettingError, listed_names
from onnxfit.graph import scopes, tensors
from onnxfit.graph.model import spec_of, specialize_shapes, tensor_outputs
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.load.training_form import to_frozen_form
from onnxfit.losses.base import SoftTargets

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Distillation:
    """The settings of training with a teacher.

    - `teacher`: the model, as `read_model` returned it.
    - `temperature`, `weight`: as in `SoftTargets`. With weight 0, the teacher does not run.
    """

    teacher: onnx.ModelProto
    temperature: float
    weight: float

    @classmethod
    def read(cls, source: ModelSource, temperature: float, weight: float) -> Distillation:
        """Return the settings with the teacher in memory, or raise ModelError for a bad file."""
        try:
            return cls(read_model(source), temperature, weight)
        except ModelError as error:
            raise ModelError(f"The teacher cannot be read. {error}") from None

    def teacher_of(
        self, inputs: Sequence[TensorSpec], outputs: Specs, losses: Sequence[str], opset: int
    ) -> Teacher | None:
        """Return the teacher of a model, or None if its weight is 0.

        - `inputs`, `outputs`: the model's inputs, and its outputs by name.
        - `losses`: the outputs that have a loss.
        - `opset`: the opset of the model's graphs, to which the teacher is added.

        Raises SettingError without a loss. Raises ModelError for a teacher whose inputs or outputs
        do not fit the model's, or that is too large for a graph.
        """
        if not losses:
            raise SettingError(
                "A teacher needs a loss with labels, to which its own loss is added, but no output"
                " of the model has one. Pass a loss, such as loss='cross_entropy', or remove the"
                " teacher."
            )
        model = normalize(self.teacher, oldest=opset)
        read = [spec_of(value) for value in model.graph.inputs]
        given = {spec.name: spec for spec in inputs}
        taught = {name: outputs[name] for name in losses}
        offered = tensor_outputs(model)
        pairs = _matched(read, given, "inputs of the teacher", "the model")
        targets = _matched(list(taught.values()), offered, "outputs of the model", "the teacher")
        for spec in read:
            _require_same_sizes("input", spec, given[pairs[spec.name]])
        for name, spec in taught.items():
            _require_same_sizes("output", offered[targets[name]], spec)
        _require_fitting(model.graph)
        model.graph.outputs[:] = [v for v in model.graph.outputs if v.name in targets.values()]
        if not self.weight:
            return None
        return Teacher(model, pairs, targets, self.temperature, self.weight)


@dataclass(frozen=True)
class Teacher:
    """A teacher that fits the model it teaches.

    - `model`: the teacher, normalized; it is never changed.
    - `inputs`: input of the teacher -> input of the model.
    - `outputs`: output of the model -> output of the teacher.
    - `temperature`, `weight`: those of `SoftTargets`.
    """

    model: ir.Model
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    temperature: float
    weight: float

    def add_to(self, op: GraphBuilder, batch: Specs) -> dict[str, SoftTargets]:
        """Add the teacher to a graph, and return its targets by output of the model.

        - `op`: the builder of the graph, which has the model's outputs. Missing inputs of the model
          are added.
        - `batch`: the specs of a batch. Shapes that are numbers are written into the graph.
        """
        graph = self._specialized(batch)
        offered = [value.name for value in self.model.graph.outputs]
        computed = dict(zip(offered, list(graph.outputs)))
        own_inputs = {value.name: value for value in op.graph.inputs}
        with op.scope(scopes.TEACHER):
            for value in list(graph.inputs):
                name = self.inputs[value.name or ""]
                if name not in own_inputs:
                    spec = batch[name]
                    own_inputs[name] = op.input(name, spec.dtype, spec.shape or ()).ir
                replacement = op.cast(op.wrap(own_inputs[name]), spec_of(value).dtype).ir
                value.replace_all_uses_with(replacement)
            _move_nodes(op, graph)
            outputs = {value.name: value for value in op.graph.outputs}
            return {
                name: self._targets(op, computed[of_teacher], outputs[name])
                for name, of_teacher in self.outputs.items()
            }

    def _specialized(self, batch: Specs) -> ir.Graph:
        """Return a copy of the teacher for batches of these shapes, in the form of evaluation."""
        shapes = {}
        for name, of_model in self.inputs.items():
            shape = batch[of_model].shape
            if shape is not None and all(isinstance(size, int) for size in shape):
                shapes[name] = tuple(size for size in shape if isinstance(size, int))
        try:
            graph = specialize_shapes(self.model.clone(), shapes).graph
        except ModelError as error:
            raise ModelError(f"The teacher does not accept this batch. {error}") from None
        op = GraphBuilder(graph)
        to_frozen_form(op)
        # Only computed values can move to another graph; an input that is also an output cannot.
        graph.outputs[:] = [
            op.Identity(op.wrap(value)).ir if value.producer() is None else value
            for value in graph.outputs
        ]
        return graph

    def _targets(self, op: GraphBuilder, value: ir.Value, output: ir.Value) -> SoftTargets:
        """Return the targets for an output, whose element type and sizes they get."""
        y_teacher = op.cast(op.wrap(value), spec_of(output).dtype)
        own, sizes = spec_of(y_teacher.ir).shape, spec_of(output).shape
        if sizes is not None and (own is None or len(own) == len(sizes)):
            known = own or (None,) * len(sizes)
            merged = [size if isinstance(size, int) else other for size, other in zip(known, sizes)]
            y_teacher.ir.shape = ir.Shape(merged)
        return SoftTargets(y_teacher, self.temperature, self.weight)


def _matched(wanted: Sequence[TensorSpec], known: Specs, kind: str, other: str) -> dict[str, str]:
    """Return a mapping from wanted to known tensors: by name, or the only one.

    Among several types, the only float is the only one. Raises ModelError without a match.
    """
    floats = {name: spec for name, spec in known.items() if spec.dtype.kind == "f"}
    candidates = list(floats if len(known) > 1 and len(floats) == 1 else known)
    matches = {}
    for spec in wanted:
        if spec.name in known:
            matches[spec.name] = spec.name
        elif len(wanted) == len(candidates) == 1:
            matches[spec.name] = candidates[0]
        else:
            raise ModelError(
                f"The {kind} include {spec}, but {other} has only {listed_names(known.values())}."
                " The two models are matched by name. Rename the tensors so that their names are"
                " equal."
            )
    return matches


def _require_same_sizes(kind: str, of_teacher: TensorSpec, of_model: TensorSpec) -> None:
    """Raise ModelError unless a tensor of the teacher fits the model's tensor."""
    kinds = {of_teacher.dtype.kind, of_model.dtype.kind}
    same = of_teacher.dtype == of_model.dtype or kinds == {"f"}
    if same and _sizes_fit(of_teacher.shape, of_model.shape):
        return
    hint = "Use a teacher of the same task."
    if of_teacher.shape and of_model.shape and of_teacher.shape[0] != of_model.shape[0]:
        hint = "If its batch size is fixed, use onnxfit.dynamic_batch(teacher)."
    raise ModelError(
        f"The teacher's {kind} {of_teacher} does not fit the model's {kind} {of_model}. {hint}"
    )


def _sizes_fit(of_teacher: tuple[Dim, ...] | None, of_model: tuple[Dim, ...] | None) -> bool:
    """Whether known sizes agree. The teacher must accept every batch of the model."""
    if of_teacher is None or of_model is None:
        return True
    if len(of_teacher) != len(of_model):
        return False
    for axis, (size, other) in enumerate(zip(of_teacher, of_model)):
        is_open = not isinstance(other, int) and axis > 0
        if isinstance(size, int) and size != other and not is_open:
            return False
    return True


def _require_fitting(graph: ir.Graph) -> None:
    """Raise ModelError for more tensors than one graph can hold."""
    sizes = [v.const_value.nbytes for v in graph.initializers.values() if v.const_value]
    if sum(sizes) > tensors.MAX_MODEL_BYTES:
        raise ModelError(
            f"The teacher has {sum(sizes) / 1e9:.1f} GB of tensors, but they are constants of the"
            " step's graph, which holds at most 2 GB. Use a smaller teacher."
        )


def _move_nodes(op: GraphBuilder, graph: ir.Graph) -> None:
    """Move the nodes and initializers of a graph to the graph of `op`, under names of its scope."""
    nodes = list(graph)
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    _rename(op, nodes, initializers)
    graph.outputs.clear()
    graph.remove(nodes)
    for value in initializers:
        op.graph.register_initializer(value)
    op.graph.extend(nodes)
    for domain, version in graph.opset_imports.items():
        imports = op.graph.opset_imports
        imports[domain] = max(version, imports.get(domain, version))


def _rename(op: GraphBuilder, nodes: Sequence[ir.Node], values: Sequence[ir.Value]) -> None:
    """Give values, nodes and their subgraphs names that are unused in the graph of `op`."""
    for value in values:
        value.name = op.unique_name(value.name or "value")
    for node in nodes:
        node.name = op.unique_name(node.name or node.op_type)
        for value in node.outputs:
            if value.name:  # an absent output has no name
                value.name = op.unique_name(value.name)
        for body in subgraphs_of(node):
            initializers = list(body.initializers.values())
            body.initializers.clear()
            _rename(op, list(body), [*body.inputs, *initializers])
            for value in initializers:
                body.register_initializer(value)

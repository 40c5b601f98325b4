"""A frozen model, the teacher, whose outputs a model learns in addition to the labels.

The teacher runs inside the graph of a step, on the inputs of the batch:

    inputs ─► model ───► outputs ─► loss of labels and teacher ─► gradients of the weights
       └────► teacher ─► soft targets ─┘

Its tensors are constants of the graph, one copy for each compiled graph. Evaluation, prediction and
the exported file do not contain the teacher.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import onnx_ir as ir

from onnxfit.checks import ChecksArguments, check_number, shortened
from onnxfit.errors import ModelError, SettingError, UnknownNameError, listed_names
from onnxfit.graph import scopes, tensors
from onnxfit.graph.model import spec_of, specialize_shapes, tensor_outputs
from onnxfit.graph.moving import move_nodes
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.normalize import normalize
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.load.training_form import to_frozen_form
from onnxfit.losses.base import SoftTargets

__all__ = ["Distillation"]

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Distillation(ChecksArguments):
    r"""A teacher for `Trainer(teacher=)`, a frozen model whose outputs are learned beside the
    labels.

    The teacher runs in every training step on the same inputs, and each entry of the loss becomes
    $(1 - a)\,\ell + a\,d$ (Hinton, Vinyals, Dean 2015, arXiv:1503.02531). For losses of classes and
    probabilities $d = T^2\,\mathrm{KL}(q \Vert p)$, where $q$ and $p$ are the softmax (or sigmoid)
    of the teacher's and the model's logits, divided by $T$; the graphs distinguish logits from
    probabilities, as for `from_logits=None`. For all other losses $d$ is the squared difference of
    the outputs. Weights of rows, masks and class weights apply to both terms. `evaluate`,
    `val_loss` and metrics do not include the teacher. Inputs and outputs are matched by name; a
    single one needs no matching name. Checkpoints do not store the teacher.

    - `teacher`: a path, bytes or an `onnx.ModelProto`.
    - `temperature`: $T > 0$. It has no influence on squared differences.
    - `weight`: $a$ in [0, 1]. With 0 the outputs of the teacher are not learned; with 1 the labels
      have no influence, and `fit` still needs them.
    - `features`: a dict from values of the model to values of the teacher, of the same sizes. The
      mean of the squared differences of each pair is added to the loss (FitNets, Romero et al.
      2015, arXiv:1412.6550). Every row of the batch counts in it, whatever its sample weight.
    - `feature_weight`: the factor of these terms, at least 0.

    SettingError: a setting has another type or is out of range. `Trainer` raises ModelError if the
    teacher does not fit the model, UnknownNameError for a pair of values that do not exist, and
    SettingError without a loss.

    >>> Distillation("large.onnx", temperature=4, weight=0.9).feature_weight
    1.0
    """

    teacher: ModelSource | None = field(default=None, repr=False)
    temperature: float = 2.0
    weight: float = 0.5
    features: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    feature_weight: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        sources = (str, os.PathLike, bytes, onnx.ModelProto)
        if self.teacher is not None and not isinstance(self.teacher, sources):
            raise SettingError(
                "teacher must be a path, bytes or an onnx.ModelProto, got"
                f" {shortened(self.teacher)}."
            )
        check_number(self, "temperature", above=0)
        check_number(self, "weight", at_least=0, at_most=1)
        check_number(self, "feature_weight", at_least=0)
        pairs = self.features
        if not isinstance(pairs, Mapping) or not all(
            isinstance(name, str) for pair in pairs.items() for name in pair
        ):
            raise SettingError(
                "features must be a dict from names of values of the model to names of values of"
                f" the teacher, got {shortened(pairs)}."
            )

    @classmethod
    def of(cls, teacher: Distillation | ModelSource | None) -> Distillation | None:
        """Return the settings that `Trainer(teacher=)` specifies; None without a teacher.

        SettingError: the settings have no teacher.
        """
        if teacher is None:
            return None
        if not isinstance(teacher, Distillation):
            return cls(teacher)
        if teacher.teacher is None:
            raise SettingError(
                f"{teacher} has no teacher. Pass the model first, as in"
                " teacher=onnxfit.Distillation('large.onnx', temperature=4)."
            )
        return teacher

    def without_files(self) -> Distillation:
        """Return the settings that a checkpoint stores."""
        return replace(self, teacher=None)

    def with_teacher_read(self) -> Distillation:
        """Return the settings with the model in memory, or raise ModelError for a bad file."""
        assert self.teacher is not None
        try:
            return replace(self, teacher=read_model(self.teacher).whole())
        except ModelError as error:
            raise ModelError(f"The teacher cannot be read. {error}") from None

    def teacher_of(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Specs,
        losses: Sequence[str],
        opset: int,
        features: Specs,
    ) -> Teacher | None:
        """Return the teacher of a model, or None if nothing of it is learned.

        - `inputs`, `outputs`: the model's inputs, and its outputs by name.
        - `losses`: the outputs that have a loss.
        - `opset`: the opset of the model's graphs, to which the teacher is added.
        - `features`: the values of the model in `features`, by these names.

        SettingError: no output has a loss. ModelError: the teacher's inputs or outputs do not fit
        the model's, or the teacher is too large for a graph.
        """
        if not losses:
            raise SettingError(
                "A teacher needs a loss with labels, to which its own loss is added, but no output"
                " of the model has one. Pass a loss, such as loss='cross_entropy', or remove the"
                " teacher."
            )
        assert isinstance(self.teacher, onnx.ModelProto)
        model = normalize(self.teacher, oldest=opset)
        read = [spec_of(value) for value in model.graph.inputs]
        given = {spec.name: spec for spec in inputs}
        taught = {name: outputs[name] for name in losses}
        offered = tensor_outputs(model)
        pairs = _matched(read, given, "inputs of the teacher", "the model")
        targets = {}
        if self.weight or not self.features:
            targets = _matched(
                list(taught.values()), offered, "outputs of the model", "the teacher"
            )
        for spec in read:
            _require_same_sizes("input", spec, given[pairs[spec.name]])
        for name, of_teacher in targets.items():
            _require_same_sizes("output", offered[of_teacher], taught[name])
        _require_fitting(model.graph)
        learned = targets if self.weight else {}
        followed = self.features if self.feature_weight else {}
        if not learned and not followed:
            return None
        _choose_outputs(model.graph, {*learned.values(), *followed.values()})
        known = {value.name or "": spec_of(value) for value in model.graph.outputs}
        for name, of_teacher in followed.items():
            _require_same_sizes("value", known[of_teacher], features[name])
        return Teacher(model, pairs, learned, self, followed)


@dataclass(frozen=True)
class Lessons:
    """The parts of a loss that come from a teacher.

    - `targets`: output of the model -> the output of the teacher.
    - `terms`: scalars that are added to the loss, means over the rows of the batch.
    """

    targets: Mapping[str, SoftTargets] = field(default_factory=dict)
    terms: Sequence[Value] = ()


@dataclass(frozen=True)
class Teacher:
    """A teacher that fits the model it teaches.

    - `model`: the teacher, normalized; it is never changed.
    - `inputs`: input of the teacher -> input of the model.
    - `outputs`: output of the model -> output of the teacher.
    - `settings`: the temperature and the weights.
    - `features`: the output with which a step reads a value of the model, or that value itself ->
      value of the teacher.
    """

    model: ir.Model
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    settings: Distillation
    features: Mapping[str, str]

    def add_to(self, op: GraphBuilder, batch: Specs) -> Lessons:
        """Add the teacher to a graph, and return its targets and the terms of its features.

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
            move_nodes(op, graph)
            outputs = {value.name: value for value in op.graph.outputs}
            targets = {
                name: self._targets(op, computed[of_teacher], outputs[name])
                for name, of_teacher in self.outputs.items()
            }
            terms = []
            for read, of_teacher in self.features.items():
                feature = op.wrap(outputs[read])
                difference = feature - op.cast(op.wrap(computed[of_teacher]), feature.dtype)
                mean = op.ReduceMean(difference * difference, keepdims=0)
                terms.append(mean * self.settings.feature_weight)
            return Lessons(targets, terms)

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
        return SoftTargets(y_teacher, self.settings.temperature, self.settings.weight)


def _matched(wanted: Sequence[TensorSpec], known: Specs, kind: str, other: str) -> dict[str, str]:
    """Return a mapping from wanted to known tensors: by name, or the only one.

    Among several types, the only float is the only one. ModelError: a tensor has no match.
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


def _choose_outputs(graph: ir.Graph, wanted: Collection[str]) -> None:
    """Let a teacher return values of these names only. UnknownNameError: one does not exist."""
    values = {v.name or "": v for node in graph for v in node.outputs}
    values |= {v.name or "": v for v in graph.inputs}
    for name in wanted:
        if name not in values:
            raise UnknownNameError("value of the teacher", name, values)
    graph.outputs[:] = [values[name] for name in wanted]


def _require_fitting(graph: ir.Graph) -> None:
    """Raise ModelError for more tensors than one graph can hold."""
    sizes = [v.const_value.nbytes for v in graph.initializers.values() if v.const_value]
    if sum(sizes) > tensors.MAX_MODEL_BYTES:
        raise ModelError(
            f"The teacher has {sum(sizes) / 1e9:.1f} GB of tensors, but they are constants of the"
            " step's graph, which holds at most 2 GB. Use a smaller teacher."
        )

"""Gradients from the builder of onnxruntime's training build.

The builder is never shown a user's model. It gets the nodes between weights and loss alone, each in
a form that the table in `onnxruntime_coverage` vouches for, and of its answer only the nodes it
added are taken: the forward computation stays ours. So nothing beside the path can be changed by
it, and what has no derivative (a comparison, a shape, a rounding) is a constant to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from onnxfit.errors import GradientError, InstallationError
from onnxfit.gradients.blocker import TYPED, Blocker, check_ends, refuse

# they register their forms
from onnxfit.gradients.onnxruntime import elementwise, layers, movement, recurrent  # noqa: F401
from onnxfit.gradients.onnxruntime.coverage import check
from onnxfit.gradients.onnxruntime.forms import FORMS
from onnxfit.gradients.onnxruntime.subgraph import Part
from onnxfit.gradients.paths import PathNode, differentiable_path, leaves_of, outputs_of
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.values import GraphBuilder


def blockers(model: ir.Model, loss: str, weights: Sequence[str]) -> list[Blocker]:
    """Every node between `weights` and `loss` that cannot be differentiated correctly, found
    without running anything.
    """
    return _prepared(model, loss, weights)[2]


def add_gradients(
    model: ir.Model, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """The model with one more value per weight, the gradient of the loss, as a new model; and those
    values' names.

    `weights` are graph inputs, `loss` is a scalar float output, the opset is 21. Inputs and outputs
    keep their names and order. Raises GradientError with all blockers, InstallationError where the
    installed onnxruntime has no builder.
    """
    module = require_builder()
    work, path, found = _prepared(model, loss, weights)
    refuse(found)
    if not path:
        return work, {}
    part = Part(work.graph, path, loss, weights)
    return work, part.graft(_build(module, part, weights), weights)


def require_builder() -> Any:
    """onnxruntime's C module, which has the gradient builder;

    InstallationError that says how to get one.
    """
    wheels = (
        "onnxruntime-training-cpu (Python up to 3.12) or, on Linux, onnxruntime-training (Python up"
        " to 3.11)"
    )
    try:
        import onnxruntime
        from onnxruntime.capi import _pybind_state as module
    except ImportError as error:
        raise InstallationError(
            f"onnxruntime cannot be imported ({error}): pip install {wheels}."
        ) from error
    if not hasattr(module, "GradientGraphBuilder"):
        where = (
            f"The installed onnxruntime {getattr(onnxruntime, '__version__', '')} is an inference"
            " build, which has no gradients."
        )
        if sys.version_info >= (3, 13):
            raise InstallationError(
                f"{where} The training build has no wheel for Python"
                f" {sys.version_info[0]}.{sys.version_info[1]}: use {wheels}."
            )
        raise InstallationError(
            f"{where} Where both builds are installed, one overwrites the other. Run\n"
            "  pip uninstall -y onnxruntime onnxruntime-training onnxruntime-training-cpu\n"
            "  pip install --force-reinstall onnxruntime-training-cpu"
        )
    onnxruntime.set_default_logger_severity(3)
    return module


def _prepared(
    model: ir.Model, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, list[PathNode], list[Blocker]]:
    """A copy in the builder's forms, its nodes between weights and loss, and those of them that
    cannot be differentiated.
    """
    work = ir.from_proto(ir.to_proto(model))
    NameFixPass()(work)
    check_ends(work, loss, weights)
    op_types = {node.name or "": node.op_type for node in work.graph}
    found: dict[str, Blocker] = {}

    def block(node: ir.Node, refused: NoGradientError) -> None:
        owner = node.name or ""
        while owner not in op_types and "/" in owner:  # what a form made is named after its node
            owner = owner.rpartition("/")[0]
        found.setdefault(
            owner, Blocker(owner, op_types.get(owner, node.op_type), refused.reason, refused.fix)
        )

    changed = True
    while changed:
        changed, op = False, GraphBuilder(work.graph)
        found.clear()
        for path_node in _path(work.graph, loss, weights):
            try:
                changed |= _into_form(op, path_node)
            except NoGradientError as refused:
                block(path_node.node, refused)
        _one_use_each(op, set(weights))
        work = infer_shapes(work)
        changed &= bool(found)  # a form may tell a shape that another one needs
    path = _path(work.graph, loss, weights)
    for path_node in path:
        try:
            check(path_node)
        except NoGradientError as refused:
            block(path_node.node, refused)
    # behind an unknown operator, no type is known
    causes = [b for b in found.values() if b.fix != TYPED]
    return work, path, causes or list(found.values())


def _path(graph: ir.Graph, loss: str, weights: Sequence[str]) -> list[PathNode]:
    return differentiable_path(graph, outputs_of(graph, loss), leaves_of(graph, weights))


def _into_form(op: GraphBuilder, path_node: PathNode) -> bool:
    """Bring a node into its form in place; its outputs keep their names.

    Whether others took its place.
    """
    node = path_node.node
    if node.op_type not in FORMS or node.domain not in ("", "ai.onnx"):
        return False
    untyped = next((v.name for v in node.inputs if v is not None and v.dtype is None), None)
    if untyped is not None:
        raise NoGradientError(f"the element type of {untyped!r} is unknown", TYPED)
    with op.replacing(node) as replace:
        made = FORMS[node.op_type](op, path_node)
        if made is None:
            return False
        first, *others = made if isinstance(made, tuple) else (made,)
        for old, new in zip(node.outputs[1:], others):
            if old.uses() or old.is_graph_output():
                assert new is not None
                copy = op.Identity(new).ir
                old.replace_all_uses_with(copy, replace_graph_outputs=True)
                old.name, copy.name = copy.name, old.name
        assert first is not None
        replace(first)
    return True


def _one_use_each(op: GraphBuilder, weights: set[str]) -> None:
    """Where a node takes a weight twice, the builder would define its gradient twice: the second
    time it takes a copy.
    """
    for node in list(op.graph):
        for i, value in enumerate(node.inputs):
            if value is not None and value.name in weights and value in node.inputs[:i]:
                with op.replacing(node):
                    node.replace_input_with(i, op.Identity(op.wrap(value)).ir)


def _build(module: Any, part: Part, weights: Sequence[str]) -> onnx.ModelProto:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the builder reports to stderr otherwise
    try:
        builder = module.GradientGraphBuilder(
            part.model.SerializeToString(),
            {part.target},
            {part.inner(w) for w in weights},
            part.target,
            options,
        )
        builder.build()
        return onnx.load_from_string(builder.get_model())
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        raise GradientError(
            f"onnxruntime's gradient builder failed: {part.readable(str(error).strip())}"
        ) from error

"""Gradients from the builder of onnxruntime's training build.

The builder never sees a user's model. It gets only the nodes between weights and loss, each
rewritten by its lowering and allowed by the table in `coverage.py`. Of the builder's result, only
the added nodes are used; the forward pass stays unchanged. So the builder cannot change nodes
outside the gradient path, and values without a derivative (of a comparison, a shape, a rounding)
are constants for the builder.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from onnxfit.environment import installed_distributions, reinstallation, require_onnxruntime
from onnxfit.errors import GradientError, InstallationError
from onnxfit.gradients.blocker import TYPED, Blocker, check_ends, refuse, without_consequences

# these modules register lowerings
from onnxfit.gradients.onnxruntime import elementwise, layers, movement, recurrent  # noqa: F401
from onnxfit.gradients.onnxruntime.coverage import check
from onnxfit.gradients.onnxruntime.lowerings import LOWERINGS, NodeToLower
from onnxfit.gradients.onnxruntime.subgraph import ExtractedModel
from onnxfit.gradients.paths import PathNode, differentiable_path, leaves_of, outputs_of
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.values import GraphBuilder


def blockers(model: ir.Model, loss: str, weights: Sequence[str]) -> list[Blocker]:
    """Return every node between `weights` and `loss` that cannot be differentiated correctly.

    The builder is not run.
    """
    return LoweredModel(model, loss, weights).blockers


def add_gradients(
    model: ir.Model, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """Add one value per weight to a copy of the model: the gradient of the loss.

    Returns the copy, and a mapping from weight to the name of its gradient. `weights` are graph
    inputs, `loss` is a scalar float output, the opset is 21. Inputs and outputs keep their names
    and order. Raises BlockedError with all blockers, and InstallationError if the installed
    onnxruntime has no builder.
    """
    module = require_builder()
    lowered = LoweredModel(model, loss, weights)
    refuse(lowered.blockers)
    if not lowered.path:
        return lowered.model, {}
    extracted = ExtractedModel(lowered.model.graph, lowered.path, loss, weights)
    return lowered.model, extracted.append_to_graph(_build(module, extracted, weights), weights)


def require_builder() -> Any:
    """Return onnxruntime's C module, which has the gradient builder.

    Raises InstallationError, with the commands that install a build with a gradient builder.
    """
    onnxruntime = require_onnxruntime()
    from onnxruntime.capi import _pybind_state as module

    if not hasattr(module, "GradientGraphBuilder"):
        problem = (
            f"The installed onnxruntime {onnxruntime.__version__} is an inference build, which has"
            " no gradient builder."
        )
        if not _has_training_wheel():
            raise InstallationError(
                f"{problem} The training build has no wheel for Python"
                f" {sys.version_info[0]}.{sys.version_info[1]} on {platform.system()}"
                f" {platform.machine()}, only for Python 3.10 to 3.12 on x86-64 and macOS."
                " gradient='onnx' needs no builder."
            )
        raise InstallationError(
            reinstallation(problem, installed_distributions(), '"onnxfit[ort-training]"')
        )
    onnxruntime.set_default_logger_severity(3)
    return module


def _has_training_wheel() -> bool:
    """Return whether onnxruntime-training or onnxruntime-training-cpu has a wheel for this Python.

    The former has wheels for Linux on x86-64 and Python up to 3.11, the latter for all other cases.
    """
    machine = platform.machine()
    on_linux = platform.system() == "Linux"
    return sys.version_info < (3, 13) and (machine == "x86_64" if on_linux else machine != "ARM64")


class LoweredModel:
    """A copy of a model in which every node on the gradient path is lowered.

    - `model` is the copy, whose inputs and outputs have their old names.
    - `path` are its nodes between weights and loss.
    - `blockers` are the nodes of the original that cannot be differentiated.
    """

    def __init__(self, model: ir.Model, loss: str, weights: Sequence[str]) -> None:
        self.loss = loss
        self.weights = weights
        self.model = ir.from_proto(ir.to_proto(model))
        NameFixPass()(self.model)
        check_ends(self.model, loss, weights)
        self._op_types = {node.name or "": node.op_type for node in self.model.graph}
        self._blocked: dict[str, Blocker] = {}
        self._lower()
        self.path = self._path()
        for path_node in self.path:
            try:
                check(path_node)
            except NoGradientError as error:
                self._block(path_node.node, error)
        self.blockers = without_consequences(list(self._blocked.values()))

    def _path(self) -> list[PathNode]:
        graph = self.model.graph
        return differentiable_path(
            graph, outputs_of(graph, self.loss), leaves_of(graph, self.weights)
        )

    def _lower(self) -> None:
        """Lower every node on the path; repeat while this may infer shapes for other nodes."""
        while True:
            changed = False
            self._blocked.clear()
            op = GraphBuilder(self.model.graph)
            for path_node in self._path():
                try:
                    changed |= _lower_node(op, path_node)
                except NoGradientError as error:
                    self._block(path_node.node, error)
            _use_weights_once_per_node(op, set(self.weights))
            self.model = infer_shapes(self.model)
            if not changed or not self._blocked:
                return

    def _block(self, node: ir.Node, error: NoGradientError) -> None:
        """Record why the node, or the original node it was lowered from, has no gradient."""
        origin = node.name or ""
        while origin not in self._op_types and "/" in origin:
            origin = origin.rpartition("/")[0]  # nodes of a lowering are named after its node
        op_type = self._op_types.get(origin, node.op_type)
        self._blocked.setdefault(origin, Blocker(origin, op_type, error.reason, error.fix))


def _lower_node(op: GraphBuilder, path_node: PathNode) -> bool:
    """Lower a node in place; its outputs keep their names. Returns whether it was replaced."""
    node = path_node.node
    if node.op_type not in LOWERINGS or node.domain not in ("", "ai.onnx"):
        return False
    untyped = next((v.name for v in node.inputs if v is not None and v.dtype is None), None)
    if untyped is not None:
        raise NoGradientError(f"the element type of {untyped!r} is unknown", TYPED)
    with op.replacing(node) as replace:
        outputs = LOWERINGS[node.op_type](op, NodeToLower(op, path_node))
        if outputs is None:
            return False
        replace(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    return True


def _use_weights_once_per_node(op: GraphBuilder, weights: set[str]) -> None:
    """Let a node that uses a weight twice use a copy for the second use.

    Otherwise the builder would define the weight's gradient twice.
    """
    for node in list(op.graph):
        for i, value in enumerate(node.inputs):
            if value is not None and value.name in weights and value in node.inputs[:i]:
                with op.replacing(node):
                    node.replace_input_with(i, op.Identity(op.wrap(value)).ir)


def _build(module: Any, extracted: ExtractedModel, weights: Sequence[str]) -> onnx.ModelProto:
    """Run the builder on an extracted model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the builder writes to stderr otherwise
    try:
        builder = module.GradientGraphBuilder(
            extracted.model.SerializeToString(),
            {extracted.loss},
            {extracted.inner_name(weight) for weight in weights},
            extracted.loss,
            options,
        )
        builder.build()
        return onnx.load_from_string(builder.get_model())
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        message = extracted.with_original_names(str(error).strip())
        raise GradientError(f"onnxruntime's gradient builder failed: {message}") from error

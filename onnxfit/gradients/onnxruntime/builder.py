"""Gradients from the builder of onnxruntime's training build.

The builder never sees a user's model. It gets only the nodes between weights and loss, if the table
in `coverage.py` allows all of them. Of the builder's result, only the added nodes are used; the
forward pass stays unchanged. So the builder cannot change nodes outside the gradient path, and
values without a derivative (of a comparison, a shape, a rounding) are constants for the builder.
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
from onnxfit.gradients.blocker import Blocker, check_ends, refuse, without_consequences
from onnxfit.gradients.onnxruntime.coverage import check
from onnxfit.gradients.onnxruntime.subgraph import ExtractedModel
from onnxfit.gradients.paths import differentiable_path, leaves_of, outputs_of
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.values import GraphBuilder


def blockers(model: ir.Model, loss: str, weights: Sequence[str]) -> list[Blocker]:
    """Return every node between `weights` and `loss` that cannot be differentiated correctly.

    The builder is not run.
    """
    return BuilderModel(model, loss, weights).blockers


def add_gradients(
    model: ir.Model, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """Add one value per weight to a copy of the model: the gradient of the loss.

    Returns the copy, and a mapping from weight to the name of its gradient. `weights` are graph
    inputs, `loss` is a scalar float output, the opset is 21. Inputs and outputs keep their names
    and order. BlockedError: some nodes cannot be differentiated; the error has all of them.
    InstallationError: the installed onnxruntime has no builder.
    """
    module = require_builder()
    prepared = BuilderModel(model, loss, weights)
    refuse(prepared.blockers)
    if not prepared.path:
        return prepared.model, {}
    extracted = ExtractedModel(prepared.model.graph, prepared.path, loss, weights)
    return prepared.model, extracted.append_to_graph(_build(module, extracted, weights), weights)


def require_builder() -> Any:
    """Return onnxruntime's C module, which has the gradient builder.

    InstallationError: the installed build has no gradient builder; the message has the commands
    that install a build with one.
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


class BuilderModel:
    """A copy of a model in a form that the builder reads.

    - `model` is the copy, whose inputs and outputs have their old names.
    - `path` are its nodes between weights and loss.
    - `blockers` are the nodes that the builder does not differentiate correctly.
    """

    def __init__(self, model: ir.Model, loss: str, weights: Sequence[str]) -> None:
        self.model = ir.from_proto(ir.to_proto(model))
        NameFixPass()(self.model)
        check_ends(self.model, loss, weights)
        graph = self.model.graph
        op = GraphBuilder(graph)
        _use_weights_once_per_node(op, set(weights))
        _return_indices_of_pools(op)
        self.model = infer_shapes(self.model)
        graph = self.model.graph
        self.path = differentiable_path(graph, outputs_of(graph, loss), leaves_of(graph, weights))
        blocked = []
        for path_node in self.path:
            node = path_node.node
            try:
                check(path_node)
            except NoGradientError as error:
                blocked.append(Blocker(node.name or "", node.op_type, error.reason, error.fix))
        self.blockers = without_consequences(blocked)


def _use_weights_once_per_node(op: GraphBuilder, weights: set[str]) -> None:
    """Let a node that uses a weight twice use a copy for the second use.

    Otherwise the builder would define the weight's gradient twice.
    """
    for node in list(op.graph):
        for i, value in enumerate(node.inputs):
            if value is not None and value.name in weights and value in node.inputs[:i]:
                with op.replacing(node):
                    node.replace_input_with(i, op.Identity(op.wrap(value)).ir)


def _return_indices_of_pools(op: GraphBuilder) -> None:
    """Let each MaxPool return its indices, by which the builder places the gradient."""
    for node in list(op.graph):
        if (node.domain, node.op_type, len(node.outputs)) == ("", "MaxPool", 1):
            with op.replacing(node) as replace:
                attributes = {name: attribute.value for name, attribute in node.attributes.items()}
                (x,) = node.inputs
                assert x is not None  # MaxPool has no optional input
                pooled = op.MaxPool(op.wrap(x), _outputs=2, **attributes)[0]
                pool = pooled.ir.producer()
                assert pool is not None
                pool.name = node.name
                replace(pooled)


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

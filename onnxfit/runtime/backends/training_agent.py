"""onnxruntime's TrainingAgent: one session that stops after the forward pass, hands the outputs
out, and waits for their gradients.

It runs a graph in which a YieldOp stands between both passes. That graph is made of our own two
(`split.passes`), whose gradients come from onnxruntime's builder; so the agent differs from two
sessions only in that the values between the passes stay inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnxruntime.capi import _pybind_state as C

from onnxfit.errors import StepError
from onnxfit.graph import names
from onnxfit.runtime.backends.forward_pass import Pass
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import compile_model
from onnxfit.runtime.values import array_of, ort_value
from onnxfit.step import split


class Agent:
    """Passes run by the agent.

    A pass that waits holds the agent's state of it, which is good for one backward pass.
    """

    def __init__(
        self, graphs: split.Passes, state: DoubleBufferedState, device: Device, threads: int | None
    ) -> None:
        self.graphs = graphs
        self.feeds: dict[str, npt.NDArray[Any]] = {}
        self._state = state
        self._device = device
        model = with_yield(graphs)
        self._session = compile_model(model, device, threads, "forward and backward", pausable=True)
        self._inputs = [v.name for v in model.graph.input]
        self._outputs = [
            v.name for v in graphs.forward.graph.output if v.name not in _handed(graphs)
        ]
        self._statistics = {
            v.removesuffix(names.updated("")): v for v in self._outputs if v not in graphs.outputs
        }
        self._leaving = [v.name for v in model.graph.output]
        places = [device.handle] * len(self._outputs), [device.handle] * len(self._leaving)
        self._agent = C.TrainingAgent(
            self._session._sess, self._inputs, places[0], self._leaving, places[1], device.index
        )

    def forward(self, values: Mapping[str, Any], step: int, seed: int) -> Pass:
        given = {
            **values,
            names.STEP: np.array(step, np.int64),
            names.SEED: np.array(seed, np.int64),
        }
        version = self._state.changes.get("weights", 0)
        feeds, alive = C.OrtValueVector(), []
        for name in self._inputs:
            value = self._state.buffer(name).value if name in self._state else given[name]
            alive.append(value)
            feeds.push_back(
                ort_value(value, self._device) if isinstance(value, np.ndarray) else value
            )
        waiting, found = C.PartialGraphExecutionState(), C.OrtValueVector()
        try:
            self._agent.run_forward(feeds, found, waiting, None)
        except Exception as error:
            raise StepError(f"The forward pass failed: {error}") from error
        outputs = {name: found[i] for i, name in enumerate(self._outputs)}
        followed = [name for name in self._statistics if name in self._state]
        for name in followed:
            self._state.buffer(name, current=False).write(array_of(outputs[self._statistics[name]]))
        if followed:
            self._state.swap(["statistics"])
        return Pass(
            {name: outputs[name] for name in self.graphs.outputs},
            (waiting, feeds, alive),
            self,
            version,
        )

    def backward(self, forward: Pass, gradients: Mapping[str, Any]) -> dict[str, Any]:
        arriving, found = C.OrtValueVector(), C.OrtValueVector()
        values = [gradients[output] for output in self.graphs.arriving]
        for value in values:
            arriving.push_back(
                ort_value(np.require(value, requirements="C"), self._device)
                if isinstance(value, np.ndarray)
                else value
            )
        waiting, _, _ = forward.kept
        try:
            self._agent.run_backward(arriving, found, waiting)
        except Exception as error:
            raise StepError(f"The backward pass failed: {error}") from error
        forward.kept, forward.done = None, True
        gradient = {name: found[i] for i, name in enumerate(self._leaving)}
        return {name: gradient[output] for name, output in self.graphs.leaving.items()}


def with_yield(graphs: split.Passes) -> onnx.ModelProto:
    """Both passes as one graph, a YieldOp between them that takes the outputs and gives their
    gradients.
    """
    model, ahead, behind = onnx.ModelProto(), graphs.forward.graph, graphs.backward.graph
    model.CopyFrom(graphs.forward)
    model.graph.name = "passes"
    outputs = [v.name for v in ahead.output if v.name not in _handed(graphs)]
    without = [i for i, name in enumerate(outputs) if name not in graphs.arriving]
    ordered = [graphs.arriving[name] for name in outputs if name in graphs.arriving]
    node = onnx.helper.make_node("YieldOp", outputs, ordered, name="yield", domain="com.microsoft")
    node.attribute.append(
        onnx.helper.make_attribute("full_shape_outputs", list(range(len(ordered))))
    )
    if without:
        node.attribute.append(onnx.helper.make_attribute("non_differentiable_outputs", without))
    model.graph.node.append(node)
    model.graph.node.extend(behind.node)
    there = {t.name for t in model.graph.initializer}
    model.graph.initializer.extend(t for t in behind.initializer if t.name not in there)
    del model.graph.output[:]
    model.graph.output.extend(behind.output)
    known = {
        v.name: v for v in (*behind.value_info, *ahead.value_info, *ahead.output)
    }  # some of the builder's operators do not infer them
    del model.graph.value_info[:]
    model.graph.value_info.extend(known.values())
    if "com.microsoft" not in {o.domain for o in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model


def _handed(graphs: split.Passes) -> set[str]:
    """What the forward graph hands to the backward graph alone."""
    return {name for name in graphs.kept if name not in graphs.outputs}

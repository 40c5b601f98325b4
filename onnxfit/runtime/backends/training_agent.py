"""The forward and the backward pass by onnxruntime's TrainingAgent.

One session stops after the forward pass, returns the outputs, and waits for their gradients.

The agent runs a graph in which a YieldOp stands between both passes. That graph consists of the two
graphs of a `SplitStep`, whose gradients come from onnxruntime's builder. Unlike two sessions, the
agent keeps the values between the passes inside.
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
from onnxfit.load.completion import import_domain
from onnxfit.runtime.backends.forward_pass import ForwardPass
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import Device
from onnxfit.runtime.values import array_of, ort_value
from onnxfit.step.split import SplitStep


class Agent:
    """Both passes, run by a TrainingAgent. Needs the training build of onnxruntime.

    A waiting forward pass stores the agent's execution state, which allows one backward pass.

    - `graphs`: the graphs of both passes.
    - `state`, `device`, `threads`: as for `BoundSession`.
    """

    def __init__(
        self, graphs: SplitStep, state: DoubleBufferedState, device: Device, threads: int | None
    ) -> None:
        self.graphs = graphs
        self.feeds: dict[str, npt.NDArray[Any]] = {}
        self._state = state
        self._device = device
        model = with_yield(graphs)
        self._session = compile_model(model, device, threads, "forward and backward", pausable=True)
        self._inputs = [v.name for v in model.graph.input]
        self._outputs = _yielded_outputs(graphs)
        # running statistic -> the output with its next value
        self._statistics = {
            name.removesuffix(names.updated("")): name
            for name in self._outputs
            if name not in graphs.outputs
        }
        self._gradients = [v.name for v in model.graph.output]
        self._agent = C.TrainingAgent(
            self._session._sess,
            self._inputs,
            [device.handle] * len(self._outputs),
            self._gradients,
            [device.handle] * len(self._gradients),
            device.index,
        )

    def forward(self, values: Mapping[str, Any], step: int, seed: int) -> ForwardPass:
        values = {
            **values,
            names.STEP: np.array(step, np.int64),
            names.SEED: np.array(seed, np.int64),
        }
        version = self._state.changes.get("weights", 0)
        feeds = C.OrtValueVector()
        alive = []  # onnxruntime borrows the memory of these until the backward pass
        for name in self._inputs:
            value = self._state.buffer(name).value if name in self._state else values[name]
            alive.append(value)
            feeds.push_back(self._as_ort_value(value))
        execution = C.PartialGraphExecutionState()
        fetched = C.OrtValueVector()
        try:
            self._agent.run_forward(feeds, fetched, execution, None)
        except Exception as error:
            raise StepError(f"The forward pass failed: {error}") from error
        outputs = {name: fetched[i] for i, name in enumerate(self._outputs)}
        updated = {name: o for name, o in self._statistics.items() if name in self._state}
        for name, output in updated.items():
            self._state.buffer(name, current=False).write(array_of(outputs[output]))
        if updated:
            self._state.swap(["statistics"])
        return ForwardPass(
            {name: outputs[name] for name in self.graphs.outputs},
            (execution, feeds, alive),
            self,
            version,
        )

    def backward(self, forward: ForwardPass, gradients: Mapping[str, Any]) -> dict[str, Any]:
        feeds = C.OrtValueVector()
        fetched = C.OrtValueVector()
        contiguous = [
            np.require(value, requirements="C") if isinstance(value, np.ndarray) else value
            for value in (gradients[output] for output in self.graphs.output_gradients)
        ]
        for value in contiguous:
            feeds.push_back(self._as_ort_value(value))
        execution, _, _ = forward.saved
        try:
            self._agent.run_backward(feeds, fetched, execution)
        except Exception as error:
            raise StepError(f"The backward pass failed: {error}") from error
        forward.saved = None
        by_output = {name: fetched[i] for i, name in enumerate(self._gradients)}
        return {name: by_output[output] for name, output in self.graphs.input_gradients.items()}

    def _as_ort_value(self, value: Any) -> Any:
        return ort_value(value, self._device) if isinstance(value, np.ndarray) else value


def with_yield(graphs: SplitStep) -> onnx.ModelProto:
    """Return both passes as one graph, with a YieldOp between them.

    The YieldOp receives the outputs and returns their gradients.
    """
    model = onnx.ModelProto()
    model.CopyFrom(graphs.forward)
    model.graph.name = "passes"
    backward = graphs.backward.graph
    model.graph.node.append(_yield_node(graphs))
    model.graph.node.extend(backward.node)
    present = {t.name for t in model.graph.initializer}
    model.graph.initializer.extend(t for t in backward.initializer if t.name not in present)
    forward = graphs.forward.graph
    # Some operators of the builder do not infer their outputs' types.
    typed = {v.name: v for v in (*backward.value_info, *forward.value_info, *forward.output)}
    del model.graph.output[:]
    model.graph.output.extend(backward.output)
    del model.graph.value_info[:]
    model.graph.value_info.extend(typed.values())
    import_domain(model)
    return model


def _yield_node(graphs: SplitStep) -> onnx.NodeProto:
    outputs = _yielded_outputs(graphs)
    gradients = [
        graphs.output_gradients[name] for name in outputs if name in graphs.output_gradients
    ]
    node = onnx.helper.make_node(
        "YieldOp",
        outputs,
        gradients,
        name="yield",
        domain="com.microsoft",
        full_shape_outputs=list(range(len(gradients))),
    )
    without_gradient = [i for i, name in enumerate(outputs) if name not in graphs.output_gradients]
    if without_gradient:
        node.attribute.append(
            onnx.helper.make_attribute("non_differentiable_outputs", without_gradient)
        )
    return node


def _yielded_outputs(graphs: SplitStep) -> list[str]:
    """Return the forward graph's outputs, except those that only the backward graph reads."""
    saved = {name for name in graphs.kept if name not in graphs.outputs}
    return [v.name for v in graphs.forward.graph.output if v.name not in saved]

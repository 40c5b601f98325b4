"""The forward and the backward pass as two sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxfit.gradients import GradientSource
from onnxfit.graph import names
from onnxfit.runtime.backends.forward_pass import ForwardBackward, ForwardPass
from onnxfit.runtime.backends.training_agent import Agent
from onnxfit.runtime.buffers import Buffer, DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import BoundSession
from onnxfit.step.split import SplitStep


def compile_passes(
    graphs: SplitStep,
    state: DoubleBufferedState,
    device: Device,
    threads: int | None,
    source: GradientSource,
    *,
    alternating: bool = False,
    gradients: Mapping[str, Buffer] | None = None,
) -> ForwardBackward:
    """Compile both passes: for onnxruntime's TrainingAgent if the gradients (`source`) come from
    its builder, else as two sessions. `alternating` and `gradients` are as for `TwoSessions`; the
    agent does not write into the buffers.
    """
    if source.name == "onnxruntime":
        return Agent(graphs, state, device, threads)
    return TwoSessions(graphs, state, device, threads, alternating=alternating, gradients=gradients)


class TwoSessions:
    """Each pass as a session. The values that the backward pass needs go from one to the other.

    - `graphs`: the graphs of both passes.
    - `state`, `device`, `threads`: as for `BoundSession`.
    - `alternating`: a backward pass immediately follows each forward pass. Then all memory is
      reused, and inputs of known size are written into buffers. Otherwise any number of forward
      passes may wait.
    - `gradients`: a mapping from weight to the buffer for its gradient.
    """

    def __init__(
        self,
        graphs: SplitStep,
        state: DoubleBufferedState,
        device: Device,
        threads: int | None,
        *,
        alternating: bool = False,
        gradients: Mapping[str, Buffer] | None = None,
    ) -> None:
        self.graphs = graphs
        buffers = {
            graphs.input_gradients[name]: buffer for name, buffer in (gradients or {}).items()
        }
        self._state = state
        per_run_inputs: list[str] = []
        if not alternating:
            inputs = [v.name for v in graphs.forward.graph.input]
            per_run_inputs = [name for name in inputs if name not in (names.SEED, names.STEP)]
        self.forward_session = BoundSession(
            graphs.forward,
            state,
            device,
            threads,
            "forward",
            writes=True,
            per_run_inputs=per_run_inputs,
            overwrite_outputs=alternating,
        )
        self.backward_session = BoundSession(
            graphs.backward,
            state,
            device,
            threads,
            "backward",
            per_run_inputs=[v.name for v in graphs.backward.graph.input],
            overwrite_outputs=alternating,
            output_buffers=buffers,
        )
        self._buffers = {output: buffer.value for output, buffer in buffers.items()}
        session = self.forward_session
        self.feeds = {} if session.per_run_inputs else session.feeds
        self._saved = [name for name in graphs.kept if name not in state]

    def forward(self, values: Mapping[str, Any], step: int, seed: int) -> ForwardPass:
        session = self.forward_session
        for name, number in ((names.STEP, step), (names.SEED, seed)):
            if name in session.feeds:
                session.feeds[name][()] = number
        version = self._state.changes.get("weights", 0)
        session.run(values)
        computed = {**session.inputs(), **session.outputs()}
        saved = {name: computed[name] for name in self._saved}
        outputs = {name: computed[name] for name in self.graphs.outputs}
        return ForwardPass(outputs, saved, self, version)

    def backward(self, forward: ForwardPass, gradients: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {
            self.graphs.output_gradients[output]: value for output, value in gradients.items()
        }
        self.backward_session.run({**forward.saved, **inputs})
        forward.saved = None
        computed = {**self.backward_session.outputs(), **self._buffers}
        return {name: computed[output] for name, output in self.graphs.input_gradients.items()}

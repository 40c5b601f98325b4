"""The forward and the backward pass as two sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxfit.gradients import GradientSource
from onnxfit.graph import names
from onnxfit.runtime.backends.forward_pass import Pass, Passes
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import BoundSession
from onnxfit.step import split


def make_passes(
    graphs: split.Passes,
    state: DoubleBufferedState,
    device: Device,
    threads: int | None,
    source: GradientSource,
    *,
    alternating: bool = False,
) -> Passes:
    """Both passes as runs: by onnxruntime's own agent where its builder's gradients were asked for,
    else as two sessions.
    """
    if source.name == "onnxruntime":
        # lazily: an inference build has none
        from onnxfit.runtime.backends.training_agent import Agent

        return Agent(graphs, state, device, threads)
    return TwoSessions(graphs, state, device, threads, alternating=alternating)


class TwoSessions:
    """Both passes as sessions of their own: what the backward pass needs is handed over."""

    def __init__(
        self,
        graphs: split.Passes,
        state: DoubleBufferedState,
        device: Device,
        threads: int | None,
        *,
        alternating: bool = False,
    ) -> None:
        """`alternating`: a backward pass follows each forward pass at once, so that all memory can
        be used again, and inputs of known size are written into buffers. Otherwise any number of
        forward passes may wait.
        """
        self.graphs = graphs
        self._state = state
        own = [
            v.name
            for v in graphs.forward.graph.input
            if v.name not in (names.SEED, names.STEP) and not alternating
        ]
        taken = [v.name for v in graphs.backward.graph.input]
        self.ahead = BoundSession(
            graphs.forward,
            state,
            device,
            threads,
            "forward",
            writes=True,
            given=own,
            reuse=alternating,
        )
        self.behind = BoundSession(
            graphs.backward, state, device, threads, "backward", given=taken, reuse=alternating
        )
        self.feeds = {} if self.ahead.open_inputs else self.ahead.feeds
        self._handed = [name for name in graphs.kept if name not in state]

    def forward(self, values: Mapping[str, Any], step: int, seed: int) -> Pass:
        for name, number in ((names.STEP, step), (names.SEED, seed)):
            if name in self.ahead.feeds:
                self.ahead.feeds[name][()] = number
        version = self._state.changes.get("weights", 0)
        self.ahead.run(values)
        found = {**self.ahead.inputs(), **self.ahead.outputs()}
        kept = {name: found[name] for name in self._handed}
        return Pass({name: found[name] for name in self.graphs.outputs}, kept, self, version)

    def backward(self, forward: Pass, gradients: Mapping[str, Any]) -> dict[str, Any]:
        arriving = {self.graphs.arriving[output]: value for output, value in gradients.items()}
        self.behind.run({**forward.kept, **arriving})
        forward.kept, forward.done = None, True
        found = self.behind.outputs()
        return {name: found[output] for name, output in self.graphs.leaving.items()}

"""A loop through steps, written as a Python function of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxfit.graph.values import GraphBuilder, Value

Tensors = Sequence[Value]
# the states after a step, and the step's outputs
Stepped = tuple[Tensors, Tensors]
# called with the builder of the loop's body, the states before a step, and the step's slices
Step = Callable[[GraphBuilder, Tensors, Tensors], Stepped]


def scan_steps(
    op: GraphBuilder, step: Step, states: Tensors, slices: Tensors, reverse: bool = False
) -> tuple[list[Value], list[Value]]:
    """Run `step` over the first axis of `slices` in a Scan.

    Return the last states, and the outputs of all steps, stacked. `reverse` runs from the last step
    to the first.
    """
    body = op.subgraph("steps")

    def body_input(stem: str, like: Value, skip: int) -> Value:
        shape = None if like.ir.shape is None else ir.Shape(list(like.ir.shape)[skip:])
        value = ir.Value(name=op.unique_name(stem), type=like.ir.type, shape=shape)
        body.graph.inputs.append(value)
        return body.wrap(value)

    states_before = [body_input("state", s, 0) for s in states]
    own_slices = [body_input("slice", s, 1) for s in slices]
    states_after, outputs = step(body, states_before, own_slices)
    # onnxruntime requires a separate value for every output of a body, and does not fill an output
    # that is an input.
    for value in (*states_after, *outputs):
        needs_copy = value.ir in body.graph.outputs or value.ir in body.graph.inputs
        body.graph.outputs.append((body.Identity(value) if needs_copy else value).ir)
    results = op.Scan(
        *states,
        *slices,
        _outputs=len(states_after) + len(outputs),
        body=body.graph,
        num_scan_inputs=len(slices),
        scan_input_directions=[int(reverse)] * len(slices),
        scan_output_directions=[int(reverse)] * len(outputs) or None,
    )
    return list(results[: len(states_after)]), list(results[len(states_after) :])

"""Find the means and deviations by which a network normalizes an input itself.

Their place: nothing with a weight is between the input and them. Their form: the input minus the
means, divided by the deviations, which no layer computes; or, in any form, the well-known numbers
of ImageNet and CLIP.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.graph.activations import ONLY_MOVING
from onnxfit.graph.front_ends import short_name
from onnxfit.graph.index import constant_of

COMBINING = {"Add", "Div", "Mul", "Sub"}
PASSING = ONLY_MOVING | {"Cast", "Clip"}
# (means, deviations) of the three colors
COLORS = (
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
)
MAX_STEPS = 16  # nodes between an input and its normalization
MAX_ELEMENTS = 2**20

Step = tuple[ir.Node, ir.Value]


def input_scaling(
    model: ir.Model, candidates: Collection[str], known: Container[str] = ()
) -> dict[str, str]:
    """Return initializer -> its role, for means and deviations of inputs.

    - `model`: a model that `normalize` returned.
    - `candidates`: the initializers that look like weights.
    - `known`: other weights, whose numbers are not read.
    """
    tensors = model.graph.initializers
    own = {tensors[name] for name in candidates}
    weights = own | {value for name, value in tensors.items() if name in known}
    found: dict[str, str] = {}
    for source in model.graph.inputs:
        if source.dtype is None or not source.dtype.is_floating_point():
            continue
        origin = short_name(source.name or "")
        steps = [*_steps(source, weights)]
        for i, (node, constant) in enumerate(steps):
            if constant in own and len(constant.uses()) == 1 and not constant.is_graph_output():
                pair = steps[i : i + 2] if node.op_type == "Sub" else steps[max(i - 1, 0) : i + 1]
                if _is_of_colors(constant) or _standardizes(pair):
                    found[constant.name or ""] = f"normalization of {origin!r}"
    return found


def _steps(value: ir.Value, weights: Container[ir.Value]) -> Iterator[Step]:
    """Yield the nodes after an input that combine it with a constant, and these constants."""
    for _ in range(MAX_STEPS):
        nodes = value.consumers()
        if len(nodes) != 1 or value.is_graph_output() or nodes[0].domain:
            return
        node = nodes[0]
        others = [v for v in node.inputs if v is not None and v is not value]
        if node.op_type in COMBINING and len(others) == 1:
            if others[0] not in weights and ir.convenience.get_const_tensor(others[0]) is None:
                return
            yield node, others[0]
        elif node.op_type not in PASSING or node.inputs[0] is not value:
            return
        value = node.outputs[0]


def _standardizes(pair: Sequence[Step]) -> bool:
    """Return whether two nodes compute (x - means) / deviations, with positive deviations."""
    if [node.op_type for node, _ in pair] != ["Sub", "Div"]:
        return False
    if not all(node.inputs[1] is constant for node, constant in pair):
        return False
    deviations = _channel_numbers(pair[1][1])
    return deviations is not None and bool((deviations > 0).all())


def _is_of_colors(constant: ir.Value) -> bool:
    """Return whether three numbers are the means or deviations of ImageNet or CLIP.

    They may be those of colors from 0 to 255, of the other order of colors, or the factors and
    terms of the same normalization.
    """
    numbers = _channel_numbers(constant)
    if numbers is None or numbers.size != len(COLORS[0][0]):
        return False
    found = np.sort(np.abs(numbers.reshape(-1)))
    for means, deviations in map(np.array, COLORS):
        known = [means, deviations, 1 / deviations, means / deviations]
        known += [255 * means, 255 * deviations, 1 / (255 * deviations)]
        if any(np.allclose(found, np.sort(one), rtol=1e-3, atol=0) for one in known):
            return True
    return False


def _channel_numbers(constant: ir.Value) -> npt.NDArray[np.float64] | None:
    """Return the numbers of a constant with one number for each channel or column."""
    array = constant_of(constant, MAX_ELEMENTS)
    return None if array is None or not array.size else array.astype(np.float64)

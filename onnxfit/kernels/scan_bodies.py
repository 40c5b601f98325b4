"""Move products, elementwise operators, Concats and Splits into the body of a Scan, and Splits out.

An LSTM multiplies the inputs of all steps with a weight before its loop begins, and its gradient
the activations, because onnxruntime runs one node for all steps faster than one node in each step.
The kernel has the rows of a step in the cache. So the tensors of all steps need not be written, nor
read again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from onnx import helper

from onnxfit.graph.index import attributes_of
from onnxfit.kernels.program import OPERATORS
from onnxfit.kernels.search import NodeSearch, ResultType, make_node

# Measured: an LSTM whose inputs have the batch first, and 32 columns, trains in 0.84 to 0.97 of its
# time if the product with them is in the loop. Others train in 0.99 to 1.04 of it on one thread,
# and in about the same time on two (0.86 to 1.28 in single runs). Larger matrices take 0.98 to
# 1.02.
MAX_ELEMENTS_OF_MATRICES = 1 << 15  # of those that are moved into one loop
MIN_GROWTH = 2  # the columns of a product for each column of its factor

_PLAIN = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}


def with_splits_outside(scan: onnx.NodeProto) -> tuple[onnx.NodeProto, list[onnx.NodeProto]]:
    """Return a Scan without the results that are parts of another result, and Splits for the parts.

    The Splits compute the parts for all steps, after the loop. The Scan is returned itself if it
    has no such results. The lists of its directions and axes stay as long as they were, so only
    their sets of numbers mean something.
    """
    body, states = _body(scan), _states(scan)
    results = [value.name for value in body.output]
    steps = {  # name in the body: name outside
        inside: outside
        for inside, outside in zip(results[states:], scan.output[states:])
        if results[states:].count(inside) == 1
    }
    inner = {name for node in body.node for name in node.output}
    inner |= {tensor.name for tensor in body.initializer}
    outside: dict[str, str] = {}
    splits = []
    for node in body.node:
        if node.op_type != "Split" or node.domain or inner.intersection(node.input[1:]):
            continue
        if not (steps.get(node.input[0]) and is_along_columns(node, 1)):
            continue
        parts = {name: steps[name] for name in node.output if steps.get(name)}
        if not parts:
            continue
        outside |= parts
        whole = steps[node.input[0]]
        names = [parts.get(name) or f"{whole}/{name}" for name in node.output]
        split = _with_axis(node, 2)
        split.input[0], split.output[:] = whole, names
        splits.append(split)
    if not splits:
        return scan, []
    removed = [i >= states and name in outside for i, name in enumerate(results)]
    changed = onnx.NodeProto()
    changed.CopyFrom(scan)
    _remove(changed.output, removed)
    _remove(_body(changed).output, removed)
    return changed, splits


class SliceProduct(NamedTuple):
    """A product of all slices of a value with a matrix, plus a vector if there is one."""

    slices: str  # (steps, rows, columns)
    matrix: str
    is_transposed: bool
    vector: str = ""


class LoopSearch(NodeSearch):
    """A search for nodes that can be moved into the body of a Scan that reads their results."""

    def with_products_inside(
        self, scan: onnx.NodeProto
    ) -> tuple[onnx.NodeProto, list[onnx.NodeProto], dict[str, ResultType]]:
        """Return a Scan that multiplies slices with matrices in its body, instead of reading the
        products.

        Nodes that transpose the matrices, and the types of their results, are returned, too. A
        product is moved if only the Scan reads it, and if its factor is much smaller.
        """
        changed = onnx.NodeProto()
        changed.CopyFrom(scan)
        body = _body(changed)
        states = _states(scan)
        elements = 0
        nodes, transposes = [], []
        types: dict[str, ResultType] = {}
        for i, name in enumerate(scan.input[states:], states):
            product = self._product_to_move(name)
            if product is None:
                continue
            shape = self.shape(product.matrix)
            elements += math.prod(shape)
            if elements > MAX_ELEMENTS_OF_MATRICES:
                break
            matrix = product.matrix
            if product.is_transposed:
                matrix = f"{name}/matrix"
                transposes.append(
                    make_node(
                        "Transpose", [product.matrix], [matrix], matrix, perm=(1, 0), domain=""
                    )
                )
                types[matrix] = ResultType(onnx.TensorProto.FLOAT, shape[::-1])
            factor = f"{name}/factor"
            vectors = [product.vector] if product.vector else []
            operands = [factor, matrix, *vectors]
            nodes.append(make_node("Gemm", operands, [body.input[i].name], domain=""))
            changed.input[i] = product.slices
            sizes = self.shape(product.slices)[1:]
            described = helper.make_tensor_value_info(factor, onnx.TensorProto.FLOAT, sizes)
            body.input[i].CopyFrom(described)
        nodes += body.node
        del body.node[:]
        body.node.extend(nodes)
        return changed, transposes, types

    def _product_to_move(self, result: str) -> SliceProduct | None:
        """Return the product that a Gemm for the rows of all steps computes."""
        rows = self.operands(result, "Reshape")[0]
        gemm = self.producers.get(rows)
        if gemm is None or gemm.op_type != "Gemm" or gemm.domain:
            return None
        if any(name in self.outputs or len(self.readers[name]) > 1 for name in (result, rows)):
            return None
        given = attributes_of(gemm)
        is_transposed = given.pop("transB", 0) == 1
        if not is_plain_product(given):
            return None
        flat, matrix, *vector = gemm.input
        slices = self.operands(flat, "Reshape")[0] or self.operands(flat, "Flatten")[0]
        *shape, columns = self.shape(result) or (0,)
        *of_slices, inputs = self.shape(slices) or (0,)
        has_slices = len(shape) == 2 and of_slices == shape and self.shape(flat)[-1:] == (inputs,)
        if not has_slices or columns < MIN_GROWTH * inputs:
            return None
        return SliceProduct(slices, matrix, is_transposed, *vector)

    def with_inputs_inside(self, scan: onnx.NodeProto) -> onnx.NodeProto | None:
        """Return a Scan that computes some of its inputs in its body; None if no node can be moved.

        A node is moved if only the Scan, or other nodes that are moved, read its results. All
        inputs of the Scan must be slices of the first axis in one direction.
        """
        moved = self._nodes_to_move(scan)
        return _moved_into(scan, moved, self) if moved else None

    def _nodes_to_move(self, scan: onnx.NodeProto) -> list[onnx.NodeProto]:
        members = {id(scan)}
        pending = [*scan.input[_states(scan) :]]
        while pending:
            node = self.producers.get(pending.pop())
            if node is not None and id(node) not in members and self._can_move(node, members):
                members.add(id(node))
                pending += node.input
        members.remove(id(scan))
        return [node for node in self.nodes if id(node) in members]

    def _can_move(self, node: onnx.NodeProto, readers: set[int]) -> bool:
        is_read_elsewhere = any(
            name in self.outputs or any(id(reader) not in readers for reader in self.readers[name])
            for name in node.output
        )
        if node.domain or is_read_elsewhere:
            return False
        shapes = {self.shape(name) for name in self.slices_of(node)}
        results = {self.shape(name) for name in node.output}
        if any(len(shape) != 3 for shape in shapes | results):
            return False
        if node.op_type in ("Concat", "Split"):
            has_sizes = all(name in self.tensors for name in node.input[1:])
            return is_along_columns(node, 2) and (node.op_type == "Concat" or has_sizes)
        return is_elementwise(node) and shapes == results

    def slices_of(self, node: onnx.NodeProto) -> list[str]:
        """Return the operands of a node that have a slice for each step."""
        if node.op_type == "Split":
            return [node.input[0]]
        if node.op_type == "Concat":
            return [*node.input]
        return [name for name in node.input if not self._is_scalar(name)]

    def _is_scalar(self, name: str) -> bool:
        known = self.types.get(name)
        return known is not None and known.is_scalar


def _moved_into(
    scan: onnx.NodeProto, moved: Sequence[onnx.NodeProto], search: LoopSearch
) -> onnx.NodeProto:
    """Return a Scan with the nodes in its body. It reads their inputs instead of their results."""
    states = _states(scan)
    changed = onnx.NodeProto()
    changed.CopyFrom(scan)
    body = _body(changed)
    names = {name: f"{name}/inside" for node in moved for name in node.output}

    def described(name: str) -> onnx.ValueInfoProto:
        sizes = search.shape(name)[1:]
        return helper.make_tensor_value_info(names[name], onnx.TensorProto.FLOAT, sizes)

    slices: dict[str, onnx.ValueInfoProto] = {}  # outside: in the body
    nodes, identities = [], []
    for value, name in zip(_body(scan).input[states:], scan.input[states:], strict=True):
        if name in names:
            identities.append(make_node("Identity", [names[name]], [value.name], domain=""))
        else:
            slices[name], names[name] = value, value.name
    for node in moved:
        for name in search.slices_of(node):
            if name not in names:
                names[name] = f"{name}/inside"
                slices[name] = described(name)
        inside_node = _with_axis(node, 1)
        inside_node.input[:] = [names.get(name, name) for name in node.input]
        inside_node.output[:] = [names[name] for name in node.output]
        nodes.append(inside_node)
    nodes += [*identities, *body.node]
    del body.node[:], body.input[states:], changed.input[states:]
    body.node.extend(nodes)
    body.input.extend(slices.values())
    changed.input.extend(slices)
    for attribute in changed.attribute:
        if attribute.name == "num_scan_inputs":
            attribute.i = len(slices)
    return changed


def _body(scan: onnx.NodeProto) -> onnx.GraphProto:
    body: onnx.GraphProto = next(a.g for a in scan.attribute if a.name == "body")
    return body


def _states(scan: onnx.NodeProto) -> int:
    """Return the number of inputs that are states."""
    slices: int = next(a.i for a in scan.attribute if a.name == "num_scan_inputs")
    return len(scan.input) - slices


def is_elementwise(node: onnx.NodeProto) -> bool:
    """Return whether a node is one elementwise instruction of the kernel."""
    has_inputs = OPERATORS.get(node.op_type) == len(node.input)
    # The instruction of a HardSigmoid reads its attributes, which may be missing, as scalars; that
    # of a Clip, its bounds.
    return has_inputs and not node.attribute and node.op_type not in ("HardSigmoid", "Clip")


def is_plain_product(given: Mapping[str, float]) -> bool:
    """Return whether a MatMul or Gemm with these attributes is a b, or a b + c."""
    return all(_PLAIN[name] == value for name, value in given.items())


def is_along_columns(node: onnx.NodeProto, axis: int) -> bool:
    """Return whether a Concat or Split is along the last axis, which has this number.

    A Split of an old opset, whose sizes are an attribute, is not.
    """
    numbers = {a.name: a.i for a in node.attribute}
    return numbers.get("axis", 0) in (axis, -1) and "split" not in numbers


def _with_axis(node: onnx.NodeProto, axis: int) -> onnx.NodeProto:
    """Return a copy of a node, with another axis if it has one."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        if attribute.name == "axis":
            attribute.i = axis
    return copy


def _remove(elements: Any, removed: Sequence[bool]) -> None:
    """Remove some elements of a repeated field of a message."""
    for i in reversed(range(len(elements))):
        if removed[i]:
            del elements[i]

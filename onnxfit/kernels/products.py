"""Products of matrices that read and write transposed and sliced values where they are.

onnxruntime copies the heads of an attention from one order of axes to another before and after each
product, and its product is slow if the left factor is transposed, as in the gradient of a weight.
The kernel has a stride for each axis of its factors and of its result. It multiplies the result by
a number and adds up to two values to it, such as a bias.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx
from onnx import numpy_helper

from onnxfit.graph.index import attributes_of
from onnxfit.kernels.rounding import precision_of, rounded_products
from onnxfit.kernels.search import (
    NodeSearch,
    ResultType,
    make_node,
    needed_nodes,
    sort_nodes,
    trains,
)
from onnxfit.kernels.strided_products import (
    MAX_ADDENDS,
    Result,
    StridedProduct,
    is_faster,
)
from onnxfit.kernels.views import View, strides_of

_RESHAPES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}


def replace_products(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: dict[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each product and what surrounds it.

    The nodes are returned themselves if there is no product for the kernel. The types of new values
    are added to `types`.
    """
    # Graphs for inference are left to onnxruntime, which packs constant matrices once.
    if not trains(nodes):
        return nodes
    parts_first, new_types = _transposed_parts(NodeSearch(graph, nodes, types))
    search = _ProductSearch(graph, parts_first, {**types, **new_types})
    kernels = list(search.kernels())
    if not kernels:
        return nodes
    types.update(new_types)
    results = {kernel.output[0] for kernel in kernels}
    others = [node for node in parts_first if results.isdisjoint(node.output)]
    return needed_nodes(sort_nodes([*kernels, *others]), search.outputs)


def _transposed_parts(
    search: NodeSearch,
) -> tuple[Sequence[onnx.NodeProto], dict[str, ResultType]]:
    """Return nodes that transpose values before they join them, not after, and new types.

    A product can write the values in the other order.
    """
    changed: dict[str, list[onnx.NodeProto]] = {}
    types: dict[str, ResultType] = {}
    for transpose in search.nodes:
        concat = _concat_before(transpose, search)
        if concat is None:
            continue
        (result,) = transpose.output
        order = _order(transpose, len(search.shape(concat.output[0])))
        axis = order.index(attributes_of(concat)["axis"] % len(order))
        parts = {f"{result}/part_{i}": name for i, name in enumerate(concat.input)}
        for part, name in parts.items():
            element, shape = search.types[name]
            types[part] = ResultType(element, tuple(shape[i] for i in order))
        changed[concat.output[0]] = []
        changed[result] = [
            make_node("Transpose", [name], [part], part, perm=order, domain="")
            for part, name in parts.items()
        ]
        changed[result].append(
            make_node("Concat", list(parts), [result], transpose.name, axis=axis, domain="")
        )
    return [new for node in search.nodes for new in changed.get(node.output[0], [node])], types


def _concat_before(transpose: onnx.NodeProto, search: NodeSearch) -> onnx.NodeProto | None:
    """Return the Concat whose result only a Transpose reads, if all sizes are known."""
    (value,) = search.operands(transpose.output[0], "Transpose")
    concat = search.producers.get(value)
    if concat is None or concat.op_type != "Concat" or concat.domain:
        return None
    is_read = value in search.outputs or len(search.readers[value]) > 1
    has_sizes = all(map(search.shape, (value, *concat.input)))
    if is_read or not has_sizes or not all(_is_product(name, search) for name in concat.input):
        return None
    return concat


def _is_product(name: str, search: NodeSearch) -> bool:
    """Return whether a value is a product, perhaps scaled and in another order."""
    node = search.producers.get(name)
    while node is not None and node.op_type in {"Mul", "Transpose", *_RESHAPES}:
        operands = (search.producers.get(each) for each in node.input)
        node = next((each for each in operands if each is not None), None)
    return node is not None and not node.domain and node.op_type in ("MatMul", "Gemm")


class _ProductSearch(NodeSearch):
    """A search for products of float32 matrices of known sizes."""

    def kernels(self) -> Iterator[onnx.NodeProto]:
        """Yield the node of each product, in the order of the nodes."""
        self._written: set[str] = set()  # by the kernels so far
        self._precision = precision_of(self.graph)
        self._rounded = rounded_products(self.graph) if self._precision else set()
        for node in self.nodes:
            kernel = self._kernel(node)
            if kernel is not None:
                self._written.update(kernel.output)
                yield kernel

    def _kernel(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """Return the kernel that writes the latest value that it can, and reads the earliest."""
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            return None
        shape, left = self.shape(node.output[0]), self.shape(node.input[0])
        steps = left[:1] if attributes_of(node).get("transA") else left[-1:]
        sizes = (*shape, *steps)
        if len(shape) < 2 or not steps:
            return None
        # Without a kernel, Casts would round the factors, which takes longer for all sizes.
        precision = self._precision if node.output[0] in self._rounded else 0
        if not precision and not is_faster(*sizes, is_alone=False):
            return None
        factors = self._factors(node, 0), self._factors(node, 1)
        for result in self._results(node):
            place = result.placed(result.name, strides_of(self.shape(result.name)), shape)
            if place is None:
                continue
            for a, b in itertools.product(*factors):
                product = StridedProduct.of(shape, (a, b, place, *result.addends))
                is_alone = {a.source, b.source, result.name} <= {*node.input, *node.output}
                if product is None or not product.has_kernel:
                    continue
                if precision or is_faster(*sizes, is_alone=is_alone):
                    return product.node(node.name, result, self.shape(result.name), precision)
        return None

    def _factors(self, node: onnx.NodeProto, index: int) -> list[View]:
        """Return a factor as views of other values, the last one of itself."""
        views = self._views(node.input[index])
        if node.op_type == "MatMul":
            return views
        given = attributes_of(node)
        if given.get(("transA", "transB")[index]):
            views = [view.permuted((1, 0)) for view in views]
        return views if index else [view.scaled(given.get("alpha", 1.0)) for view in views]

    def _views(self, name: str) -> list[View]:
        """Return a value as views of the values that it follows from, the last one of itself."""
        shape = self.shape(name)
        if len(shape) < 2:
            return []
        views: list[View] = [View.whole(name, shape)]
        path: list[tuple[onnx.NodeProto, str]] = []  # from the source to the value
        while name not in self._written and name in self.producers:
            node = self.producers[name]
            path.insert(0, (node, name))
            name = self._source(node)
            # If other nodes read a value on the path, this product may run after an update that
            # overwrites the source.
            is_late = self.is_state(name) and any(self._has_other_readers(v) for _, v in path)
            if not self.shape(name) or is_late:
                break
            view: View | None = View.whole(name, self.shape(name))
            for step, result in path:
                view = self._after(step, view, result) if view else None
            views += [view] if view else []
        return views[::-1]

    def _has_other_readers(self, name: str) -> bool:
        return name in self.outputs or len(self.readers[name]) > 1

    def _source(self, node: onnx.NodeProto) -> str:
        """Return the value whose elements a node puts into another order; "" for other nodes."""
        if node.domain:
            return ""
        if node.op_type == "Mul":
            operand = self.scaled(node.output[0])[1]
            return operand if self.shape(operand) == self.shape(node.output[0]) else ""
        is_view = node.op_type in {"Transpose", "Slice", "Split", *_RESHAPES}
        return node.input[0] if is_view else ""

    def _after(self, node: onnx.NodeProto, view: View, result: str) -> View | None:
        """Return the view that a node makes of a view of its operand."""
        shape = self.shape(result)
        if not shape:
            return None
        if node.op_type == "Mul":
            return view.scaled(self.scaled(result)[0])
        if node.op_type == "Transpose":
            return view.permuted(_order(node, len(shape)))
        if node.op_type in _RESHAPES:
            return view.reshaped(shape)
        if node.op_type == "Slice":
            return self._sliced(node, view, shape)
        axis = attributes_of(node).get("axis", 0) % len(shape)
        before = [self.shape(name) for name in node.output[: list(node.output).index(result)]]
        if not all(before):
            return None
        return view.sliced(axis, sum(each[axis] for each in before), shape[axis])

    def _sliced(self, node: onnx.NodeProto, view: View, shape: Sequence[int]) -> View | None:
        known = [self.tensors.get(name) for name in node.input[1:]]
        if len(known) < 3 or None in known:  # starts, ends, axes, perhaps steps
            return None
        starts, _, axes, *steps = (numpy_helper.to_array(each).tolist() for each in known if each)
        if steps and {*steps[0]} != {1}:
            return None
        sizes = self.shape(node.input[0])
        sliced: View | None = view
        for axis, start in zip(axes, starts):
            axis %= len(shape)
            start = max(start + sizes[axis], 0) if start < 0 else start
            sliced = sliced.sliced(axis, start, shape[axis]) if sliced else None
        return sliced

    def _results(self, node: onnx.NodeProto) -> list[Result]:
        """Return the values that a kernel can write instead of a product, the latest one first."""
        (name,) = node.output
        shape = self.shape(name)
        product = Result(name, View.whole(name, shape))
        result: Result | None = product
        if len(node.input) > 2:
            has_factor = attributes_of(node).get("beta", 1.0) != 1.0
            result = None if has_factor else self._with_addend(product, node.input[2], shape)
        results: list[Result] = []
        while result is not None:
            results.insert(0, result)
            result = self._following(result, shape)
        return results

    def _following(self, result: Result, shape: Sequence[int]) -> Result | None:
        """Return the value that the only reader of a result computes; None if no kernel can."""
        if self._has_other_readers(result.name) or not self.readers[result.name]:
            return None
        (reader,) = self.readers[result.name]
        name = reader.output[0]
        is_written = name in self._written or name in self.updates
        if reader.domain or is_written or math.prod(self.shape(name)) != math.prod(shape):
            return None
        if reader.op_type == "Add":
            other = next((each for each in reader.input if each != result.name), "")
            fits = self.shape(name) == self.shape(result.name) and not result.has_relu
            return self._with_addend(result, other, shape, name) if fits else None
        if reader.op_type == "Relu":
            return replace(result, name=name, has_relu=True)
        if self._source(reader) != result.name or reader.op_type in ("Slice", "Split"):
            return None
        if reader.op_type == "Mul":
            scale = result.scale * self.scaled(name)[0]
            fits = not result.addends and not result.has_relu
            return replace(result, name=name, scale=scale) if fits else None
        view = self._after(reader, result.view, name)
        return replace(result, name=name, view=view) if view else None

    def _with_addend(
        self, result: Result, addend: str, shape: Sequence[int], name: str = ""
    ) -> Result | None:
        """Return the sum of a result and another value, which may be repeated along its axes."""
        sizes, axes = self.shape(addend), result.view.axes
        if not sizes or len(sizes) > len(axes) or len(result.addends) == MAX_ADDENDS:
            return None
        strides = [stride if size > 1 else 0 for size, stride in zip(sizes, strides_of(sizes))]
        view = result.placed(addend, [0] * (len(axes) - len(sizes)) + strides, shape)
        if view is None:
            return None
        return replace(result, name=name or result.name, addends=(*result.addends, view))


def _order(transpose: onnx.NodeProto, rank: int) -> list[int]:
    default = list(range(rank))[::-1]
    return list(attributes_of(transpose).get("perm", default))

"""Indexes of graphs agree with a search through all nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxfit.graph.index import (
    GraphIndex,
    NodeIndex,
    attributes_of,
    constant_of,
    elements_of,
    required_inputs,
    tensors_of,
)

SEEDS = range(20)


def random_graph(seed: int) -> onnx.GraphProto:
    """Return a graph of nodes with several or absent inputs and outputs, and with bodies."""
    random = np.random.default_rng(seed)
    names = ["x", "y", "w", "b"]
    nodes = []
    for i in range(int(random.integers(1, 30))):
        inputs = [str(name) for name in random.choice([*names, ""], random.integers(0, 4))]
        outputs = [f"v{i}.{j}" if random.random() < 0.8 else "" for j in range(3)]
        node = helper.make_node("Op", inputs, outputs, f"n{i}", alpha=float(i))
        if random.random() < 0.3:
            read, result = (str(name) for name in random.choice(names, 2))
            inner = [helper.make_node("Neg", [read], [f"inner{i}"])]
            results = [helper.make_empty_tensor_value_info(result)]
            outer = helper.make_graph(
                [
                    helper.make_node(
                        "If", [], ["", f"o{i}"], body=helper.make_graph(inner, "c", [], results)
                    )
                ],
                "body",
                [],
                [],
            )
            node.attribute.append(helper.make_attribute("body", outer))
        if random.random() < 0.2:
            tensor = numpy_helper.from_array(np.full(2, i, np.float32))
            node = helper.make_node("Constant", [], outputs[:1], value=tensor)
        nodes.append(node)
        names += filter(None, node.output)
    ends = [helper.make_empty_tensor_value_info(name) for name in ("x", "y", "w")]
    results = [helper.make_empty_tensor_value_info(str(n)) for n in random.choice(names, 2)]
    tensors = [numpy_helper.from_array(np.ones(3, np.float32), name) for name in ("w", "b")]
    return helper.make_graph(nodes, "g", ends, results, tensors)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node and its bodies read."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from reads(inner)
        yield from (value.name for value in attribute.g.output)


@pytest.mark.parametrize("seed", SEEDS)
class TestIndex:
    def test_agrees_with_a_search_through_all_nodes(self, seed: int) -> None:
        graph = random_graph(seed)
        index = GraphIndex(graph)
        for name in {n for node in graph.node for n in (*reads(node), *node.output)} - {""}:
            makers = [i for i, node in enumerate(graph.node) if name in node.output]
            readers = [i for i, node in enumerate(graph.node) if name in reads(node)]
            assert [index.positions[name]] == makers if makers else name not in index.positions
            assert index.reading[name] == readers
            assert index.readers[name] == [graph.node[i] for i in readers]
            if makers:
                assert index.producers[name] is index.nodes[makers[0]]

    def test_has_no_node_for_absent_values(self, seed: int) -> None:
        index = GraphIndex(random_graph(seed))
        assert "" not in index.producers
        assert "" not in index.positions
        assert not index.readers[""]
        assert not index.reading[""]
        assert index.only_reader("") is None

    def test_followers_read_a_result(self, seed: int) -> None:
        graph = random_graph(seed)
        for node, followers in zip(graph.node, NodeIndex(graph.node).followers, strict=True):
            results = {*node.output} - {""}
            expected = [i for i, n in enumerate(graph.node) if results & {*reads(n)}]
            assert followers == expected

    def test_order_keeps_sorted_nodes(self, seed: int) -> None:
        index = NodeIndex(random_graph(seed).node)
        assert index.order() == list(range(len(index.nodes)))

    def test_order_sorts_nodes_by_priority(self, seed: int) -> None:
        index = NodeIndex(random_graph(seed).node[::-1])
        priorities = np.random.default_rng(seed).integers(0, 3, len(index.nodes)).tolist()
        waiting, expected = {*range(len(index.nodes))}, []
        while waiting:
            blocked = {i for node in waiting for i in index.followers[node]}
            expected.append(min(waiting - blocked, key=lambda i: (priorities[i], i)))
            waiting.remove(expected[-1])
        assert index.order(priorities) == expected

    def test_the_only_reader_reads_once_and_nothing_else_does(self, seed: int) -> None:
        graph = random_graph(seed)
        index = GraphIndex(graph)
        ends = [value.name for value in graph.output]
        for name in {n for node in graph.node for n in reads(node)} - {""}:
            direct = [node for node in graph.node for read in node.input if read == name]
            everywhere = {node.name for node in graph.node if name in reads(node)}
            alone = len(direct) == len(everywhere) == 1 and name not in ends
            assert index.only_reader(name) == (direct[0] if alone else None)

    def test_constants_are_initializers_and_constant_nodes(self, seed: int) -> None:
        graph = random_graph(seed)
        index = GraphIndex(graph)
        assert list(tensors_of(graph)) == list(index.tensors) == ["w", "b"]
        assert all(index.constants[name] == index.tensors[name] for name in ("w", "b"))
        made = {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
        made.pop("", None)
        assert {n: t for n, t in index.constants.items() if n not in index.tensors} == made
        assert index.inputs == {"x", "y"}
        assert index.outputs == {value.name for value in graph.output}


def test_other_nodes_may_take_the_place_of_the_graphs_own() -> None:
    graph = random_graph(0)
    index = GraphIndex(graph, [helper.make_node("Abs", ["w"], ["z"])])
    assert list(index.producers) == ["z"]
    assert index.readers["w"] == index.nodes
    assert list(index.tensors) == ["w", "b"]


def test_attributes_have_python_values() -> None:
    node = helper.make_node("Op", [], [], a=1, b=[1.5], c="text")
    assert attributes_of(node) == {"a": 1, "b": [1.5], "c": b"text"}


def test_inputs_with_a_default_value_are_not_required() -> None:
    graph = random_graph(0)
    graph.input.append(helper.make_empty_tensor_value_info("b"))
    assert list(required_inputs(graph)) == ["x", "y"]
    assert required_inputs(graph)["y"] is graph.input[1]


def test_constants_have_arrays_up_to_a_size() -> None:
    graph = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y)'
            " <float[2] w = {1, 2}> { c = Constant <value = float[3] {3, 4, 5}> ()"
            " y = Sum(x, w, c) }"
        )
    ).graph
    x, w, c = graph.node(-1).inputs
    assert constant_of(x) is None
    assert constant_of(None) is None
    assert constant_of(w).tolist() == [1, 2]
    assert constant_of(c, 3).tolist() == [3, 4, 5]
    assert constant_of(c, 2) is None


def test_the_number_of_elements_of_a_value() -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x, float s, float[N, 3] rows) => (float y) { y = Abs(s) }'
    x, s, rows = ir.from_onnx_text(text).graph.inputs
    assert [elements_of(value) for value in (x, s, rows, None)] == [6, 1, math.inf, math.inf]

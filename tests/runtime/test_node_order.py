"""The order of nodes that a session is compiled from."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

from onnxfit.runtime import node_order
from onnxfit.runtime.node_order import bytes_of_values, compilation_order

CHAIN = """<ir_version: 10, opset_import: ["": 21]>
    g (float[4] x, float[4] w, float[4] v) => (float[4] new_w, float[4] new_v) {
        a = Mul(x, w)  b = Mul(a, v)  late = Neg(a)
        db = Sub(b, x)  dv = Mul(db, a)  da = Mul(db, v)  dz = Mul(da, late)  dw = Mul(dz, x)
        new_w = Sub(w, dw)  new_v = Sub(v, dv) }"""


@pytest.fixture(autouse=True)
def every_graph_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_order, "MIN_NODES_TO_SORT", 1)


def chain() -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(CHAIN))


def sorted_for_compilation(model: onnx.ModelProto) -> onnx.ModelProto:
    with compilation_order(model, bytes_of_values(model.graph)):
        return onnx.load_from_string(model.SerializeToString())


def outputs(model: onnx.ModelProto) -> list[str]:
    return [node.output[0] for node in model.graph.node]


def longest_queue(model: onnx.ModelProto) -> int:
    """The most nodes that are ready at once, if nodes run in the order of the model."""
    known = {value.name for value in model.graph.input}
    longest, waiting = 0, list(model.graph.node)
    while waiting:
        longest = max(longest, sum(known.issuperset(node.input) for node in waiting))
        node = waiting.pop(0)
        assert known.issuperset(node.input), f"{node.output[0]} comes before its inputs"
        known.update(node.output)
    return longest


def test_fewer_nodes_wait() -> None:
    count = 8
    names = [f"w{i}" for i in range(count)]
    forward = "".join(f"h{i + 1} = Mul(h{i}, w{i}) " for i in range(count))
    backward = "".join(
        f"d{i} = Mul(d{i + 1}, w{i}) g{i} = Mul(d{i + 1}, h{i}) " for i in reversed(range(count))
    )
    updates = "".join(f"n{i} = Sub(w{i}, g{i}) " for i in range(count))
    model = onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 21]>
            g (float[4] h0, {", ".join(f"float[4] {name}" for name in names)})
            => ({", ".join(f"float[4] n{i}" for i in range(count))})
            {{ {forward} d{count} = Neg(h{count}) {backward} {updates} }}"""
        )
    )
    ordered = sorted_for_compilation(model)
    assert sorted(outputs(ordered)) == sorted(outputs(model))
    assert longest_queue(model) >= count
    assert longest_queue(ordered) <= 3
    onnx.checker.check_model(ordered)


def test_an_update_follows_its_gradient() -> None:
    order = outputs(sorted_for_compilation(chain()))
    assert order.index("new_v") == order.index("dv") + 1


def test_updates_stay_last_where_values_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_order, "MAX_BYTES_IN_MEMORY", 8 * 4 * 4 - 1)  # of eight vectors
    assert outputs(sorted_for_compilation(chain()))[-2:] == ["new_w", "new_v"]
    monkeypatch.setattr(node_order, "MAX_BYTES_IN_MEMORY", 8 * 4 * 4)
    assert outputs(sorted_for_compilation(chain()))[-2:] != ["new_w", "new_v"]


def test_values_of_unknown_size_are_large() -> None:
    model = onnx.parser.parse_model(CHAIN)  # without shapes between inputs and outputs
    assert outputs(sorted_for_compilation(model))[-2:] == ["new_w", "new_v"]


def test_values_that_subgraphs_read_come_before() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (bool c, float[2] x) => (float[2] y) {
        long = Neg(x)  longer = Neg(long)  captured = Abs(longer)
        y = If(c) <then_branch = t () => (float[2] p) { p = Neg(captured) },
                   else_branch = e () => (float[2] q) { q = Abs(x) }> }"""
    )
    assert outputs(sorted_for_compilation(model)) == ["long", "longer", "captured", "y"]


def test_the_model_is_not_changed() -> None:
    model = chain()
    before = model.SerializeToString()
    sorted_for_compilation(model)
    assert model.SerializeToString() == before

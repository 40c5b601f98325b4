"""The batch axis of inputs and outputs, by the names of sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfit.errors import SettingError
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.batch_axis import batch_layout, layout_of
from onnxfit.load.batch_view import batch_first

F = np.dtype("float32")
Shapes = dict[str, Any]


def axes(inputs: Shapes, outputs: Shapes, given: Any = None) -> dict[str, Any]:
    layout = batch_layout(
        [TensorSpec(name, F, shape) for name, shape in inputs.items()],
        [TensorSpec(name, F, shape) for name, shape in outputs.items()],
        given,
    )
    found = {name: one.axis for name, one in (layout.inputs | layout.outputs).items()}
    assumed = {n for n, one in (layout.inputs | layout.outputs).items() if one.is_assumed}
    return {**found, "assumed": assumed, "whole": layout.is_whole}


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        # the usual file
        ({"x": ("N", 4)}, {"y": ("N", 3)}, {"x": 0, "y": 0}),
        ({"x": ("batch", "seq"), "m": ("batch", "seq")}, {"y": ("batch", "seq", 9)}, {"m": 0}),
        # time-major outputs, states, numbers
        ({"x": ("batch", 20, 6)}, {"y": (20, "batch", 5)}, {"x": 0, "y": 1}),
        ({"x": ("N", 20, 6)}, {"y": ("T", "N", 5)}, {"x": 0, "y": 1}),
        ({"x": ("T", "batch", 6)}, {"y": ("T", "batch", 5)}, {"x": 1, "y": 1}),
        ({"x": ("T", "N", 6)}, {"y": ("T", "N", 5)}, {"x": 1, "y": 1}),
        ({"x": ("time", "rows", 6)}, {"y": ("rows", 5)}, {"x": 1, "y": 0}),
        ({"x": ("N", "T")}, {"y": ("N", "T", 5)}, {"x": 0, "y": 0}),
        (
            {"x": ("batch", 7), "h": (2, "batch", 5), "sr": ()},
            {"y": ("batch", 1), "hn": (2, "batch", 5), "l": ()},
            {"x": 0, "h": 1, "sr": None, "y": 0, "hn": 1, "l": None},
        ),
        ({"h": (2, "n", 5), "x": ("n", 7)}, {"y": ("n", 1)}, {"h": 1, "x": 0, "y": 0}),
        # inputs without rows
        ({"x": ("N", "L"), "p": ("L",)}, {"y": ("N", "L", 5)}, {"x": 0, "p": None, "y": 0}),
        ({"x": ("batch", 4), "scale": (1, 4)}, {"y": ("batch", 1)}, {"scale": None}),
        # several sizes without a common batch
        (
            {"x": ("atoms", 4), "src": ("edges",), "dst": ("edges",)},
            {"y": ("atoms", 1), "energy": ()},
            {"x": None, "src": None, "y": 0, "energy": None, "whole": True},
        ),
        ({"x": ("batch", 4), "e": (2, "edges")}, {"y": ("batch", 1)}, {"x": None, "whole": True}),
        # no names: the first axis, as far as the file agrees
        ({"x": (8, 4)}, {"y": (8, 3)}, {"x": 0, "y": 0}),
        ({"x": (1, 512), "h": (2, 1, 64)}, {"y": (1, 1)}, {"x": 0, "h": None, "y": 0}),
        ({"h": (2, 1, 64), "x": (1, 512)}, {"y": (1, 1)}, {"x": 0, "h": None, "y": 0}),
        ({"x": (None, None), "h": (2, None, 8)}, {"y": (None, 1)}, {"x": 0, "h": None, "y": 0}),
        ({"x": (1, "L")}, {"y": ("L", "L")}, {"x": 0, "y": None}),
        ({"x": (None, 4)}, {"y": (None, 3)}, {"x": 0, "assumed": {"y"}}),
        ({"x": None}, {"y": None}, {"x": 0, "y": 0, "assumed": {"y"}}),
        ({"x": (1, 4)}, {"y": (5,), "z": (2, 5)}, {"x": 0, "y": None, "z": None}),
        ({"x": (1, 4)}, {"y": (5, "L")}, {"x": 0, "y": 0, "assumed": {"y"}}),
        ({"x": (3, 4)}, {"y": (5,)}, {"x": 0, "y": 0, "assumed": {"y"}}),
        # names that exporters invent mean nothing
        ({"a": ("unk__1", 4), "b": ("unk__2", 4)}, {"y": ("unk__3", 1)}, {"a": 0, "b": 0, "y": 0}),
        ({"x": ("x_dynamic_axes_1", 4)}, {"y": ("y_dynamic_axes_1", 1)}, {"x": 0, "y": 0}),
        # an output that does not have the batch's name
        ({"x": ("batch", 4)}, {"y": ("Gemmy_dim_0", 1)}, {"y": 0, "assumed": {"y"}}),
        ({"x": ("batch", 4)}, {"y": (31, 1, 9)}, {"y": 0, "assumed": {"y"}}),
    ],
)  # fmt: skip
def test_the_batch_is_where_its_name_is(
    inputs: Shapes, outputs: Shapes, expected: dict[str, Any]
) -> None:
    found = axes(inputs, outputs)
    default = {"whole": False, "assumed": found["assumed"]}
    assert {name: found[name] for name in {**default, **expected}} == {**default, **expected}


@pytest.mark.parametrize(
    ("inputs", "outputs", "given", "expected"),
    [
        # a name at a given axis is the batch of the other values
        ({"x": ("L", "M", 4)}, {"y": ("L", "M", 3)}, {"x": 1}, {"x": 1, "y": 1}),
        ({"x": ("L", "M", 4), "z": (2, "M")}, {"y": ("M", 3)}, {"x": 1}, {"x": 1, "z": 1, "y": 0}),
        # a number, too
        ({"x": (12, 8, 4), "h": (8, 5)}, {"y": (8, 3)}, {"x": 1}, {"x": 1, "h": 0, "y": 0}),
        ({"x": (12, 8, 4), "h": (2, 5)}, {"y": (8, 3)}, {"x": 1}, {"x": 1, "h": None, "y": 0}),
        # axes count from the end, too; they are axes of values of unknown shape, if 0
        ({"x": ("batch", 4)}, {"y": (3, 2, None)}, {"y": -1}, {"x": 0, "y": 2}),
        ({"x": None}, {"y": None}, {"x": 0, "y": None}, {"x": 0, "y": None}),
        # None is an answer, also to several free sizes, and to a name
        ({"x": ("batch", 4)}, {"y": ("batch",)}, {"y": None}, {"x": 0, "y": None}),
        (
            {"x": ("atoms", 4), "e": ("edges",)}, {"y": ("atoms", 1)}, {"x": 0, "e": None},
            {"x": 0, "e": None, "y": 0},
        ),
        ({"x": ("L", 4)}, {"y": ("L", 3)}, {"x": None}, {"x": None, "y": 0, "whole": True}),
    ],
)  # fmt: skip
def test_a_given_axis_comes_first(
    inputs: Shapes, outputs: Shapes, given: Any, expected: dict[str, Any]
) -> None:
    found = axes(inputs, outputs, given)
    default = {"whole": False, "assumed": set()}
    assert found == {**default, **expected}


@pytest.mark.parametrize(
    ("inputs", "outputs", "given", "expected"),
    [
        ({"x": ("batch", "T")}, {"y": ("batch", 3)}, {"x": 1}, "'batch', the batch, is on axis 0"),
        ({"x": ("batch", "T")}, {"y": ("T", "B", 3)}, {"y": 0}, "'T' is a length of the input x"),
        ({"x": (1, 4)}, {"y": (12, 1)}, {"y": 0}, "the input x: .* has 1 rows, on axis 0"),
        ({"x": (1, 4), "h": (2, 1)}, {"y": (1, 3)}, {"h": 0}, "the input x: .* has 1 rows"),
        ({"x": None}, {"y": (1, 3)}, {"x": 1}, "whose number of axes is unknown"),
        ({"x": ("batch", 4), "r": ()}, {"y": ("batch",)}, {"r": 0}, "which has 0 axes. Pass None"),
        (
            {"x": ("atoms", 4), "e": ("edges",)}, {"y": ("atoms", 1)}, {"x": 0},
            r"Give every input an axis, or None: e \(.*'atoms' and 'edges'",
        ),
        (
            {"x": ("atoms", 4), "e": ("edges",)}, {"y": ("atoms", 1)}, {"y": None},
            "Give every input an axis, or None",
        ),
    ],
)  # fmt: skip
def test_a_given_axis_that_contradicts_the_file_is_an_error(
    inputs: Shapes, outputs: Shapes, given: Any, expected: str
) -> None:
    with pytest.raises(SettingError, match=expected):
        axes(inputs, outputs, given)


INFERRED = """<ir_version: 8, opset_import: ["": 17]>
    g (float[{x}, 4] x, float[4, 4] table) => (float[?, ?] y, float[?, ?] z, float[?, ?] u)
    <float[4, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}}>
    {{ a = MatMul(x, w)  y = Transpose<perm = [1, 0]>(a)
      t = Transpose<perm = [1, 0]>(x)  z = MatMul(x, t)  u = MatMul(t, x) }}"""


@pytest.mark.parametrize("size", ["batch", "?", "5"])
def test_shape_inference_finds_the_batch_of_an_output(size: str) -> None:
    model = onnx.parser.parse_model(INFERRED.format(x=size))
    before = model.SerializeToString()
    layout = layout_of(model, {"table": None})
    assert model.SerializeToString() == before
    assert (layout.outputs["y"].axis, layout.outputs["y"].evidence) == (1, "inferred")
    # the batch is on both axes, or on none
    for name in ("z", "u"):
        assert layout.outputs[name].axis == 0
        assert layout.outputs[name].evidence in ("assumed", "position")
    with pytest.raises(SettingError, match="shape inference finds the batch on axis 1"):
        layout_of(model, {"table": None, "y": 0})


def test_the_order_of_inputs_does_not_matter_where_the_batch_has_its_name() -> None:
    inputs = {"h": (2, "batch", 5), "x": ("batch", 7), "p": (3,)}
    reversed_inputs = dict(reversed(inputs.items()))
    assert axes(inputs, {"y": (4, "batch")}) == axes(reversed_inputs, {"y": (4, "batch")})


def test_every_value_has_a_reason() -> None:
    x, e = TensorSpec("x", F, ("batch", 4)), TensorSpec("e", F, (2, "edges"))
    y = TensorSpec("y", F, (None, 1))
    for inputs in ([x], [x, e], [e], [TensorSpec("x", F, (3, 4)), TensorSpec("z", F, ())]):
        lines = batch_layout(inputs, [y]).lines()
        text = "\n".join(lines)
        for spec in (*inputs, y):
            assert f" {spec.name}:" in text or f" {spec.name}," in text


MOVED = """<ir_version: 8, opset_import: ["": OPSET]>
    g (float[batch, L] x, float[2, batch, L] h)
    => (float[2, batch, L] y, float[L, L] z, float[L] s)
    <float limit = {0}>
    { y = Add(h, x)  t = Transpose<perm = [1, 0]>(x)  u = MatMul(t, x)  z = Neg(u)
      k = ReduceSum<keepdims = 0>(h)  c = Greater(k, limit)
      s = If(c) <
        then_branch = then () => (float[L] a) {
          b = Identity(z)  a = ReduceMax<axes = [0], keepdims = 0>(b) },
        else_branch = other () => (float[L] d) {
          e = Mul(h, h)  d = ReduceMax<axes = [0, 1], keepdims = 0>(e) }> }"""


@pytest.mark.parametrize("opset", [12, 17])
def test_the_view_computes_what_the_file_does(opset: int) -> None:
    """Also where the branches of an If read a moved value, and where no axis is the batch."""
    model = onnx.parser.parse_model(MOVED.replace("OPSET", str(opset)))
    layout = layout_of(model)
    before = model.SerializeToString()
    view = batch_first(model, layout)
    assert model.SerializeToString() == before
    assert [value.name for value in view.graph.input] == ["x", "h"]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3)).astype("f")
    for sign in (1, -1):
        h = sign * np.abs(rng.normal(size=(2, 4, 3))).astype("f")
        expected = ReferenceEvaluator(model).run(None, {"x": x, "h": h})
        feeds = {"x": x, "h": layout.inputs["h"].in_view(h)}
        found = ReferenceEvaluator(view).run(None, feeds)
        assert [array.shape for array in found] == [(4, 2, 3), (1, 3, 3), (1, 3)]
        named = dict(zip(["y", "z", "s"], found))
        for one, array in zip(layout.outputs_in_file(named).values(), expected):
            assert np.array_equal(one, array)


def test_a_model_with_the_batch_first_is_its_own_view() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 3] x) => (float[N, 3] y) { y = Neg(x) }"""
    )
    assert batch_first(model, layout_of(model)) is model


@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_layouts_are_inverse(axis: int | None) -> None:
    names = ["a", "b", "c"]
    if axis is not None:
        names[axis] = "batch"
    shape = tuple(names)
    inputs = [TensorSpec("x", F, ("batch", "a", "b", "c"))]
    layout = batch_layout(inputs, [TensorSpec("y", F, shape)]).outputs["y"]
    array = np.arange(24.0).reshape(2, 3, 4)
    assert layout.axis == axis
    assert np.array_equal(layout.in_file(layout.in_view(array)), array)
    assert np.shares_memory(layout.in_view(array), array)

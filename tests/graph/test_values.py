"""Values with arithmetic, and the builder."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.graphs import empty, run


class TestValues:
    def test_arithmetic_is_numpy_arithmetic(self) -> None:
        op, (x, y) = empty(("x", np.float32, (3,)), ("y", np.float32, (3,)))
        a, b = np.array([1.0, -2, 3], np.float32), np.array([2.0, 4, 0.5], np.float32)

        def formula(x, y):  # the very same expression on values and on arrays
            return ((2 - x) * y / (abs(x) + 1) - -x) ** 2 + 2**y

        op.output("z", formula(x, y))
        np.testing.assert_allclose(run(op, x=a, y=b)["z"], formula(a, b), rtol=1e-6)

    @pytest.mark.parametrize(
        ("symbol", "numpy"),
        [(">", np.greater), ("<", np.less), (">=", np.greater_equal), ("<=", np.less_equal)],
    )
    def test_comparisons(self, symbol: str, numpy: np.ufunc) -> None:
        op, (x,) = empty(("x", np.float32, (3,)))
        op.output("z", eval(f"x {symbol} 1", {"x": x}))
        values = np.array([0, 1, 2], np.float32)
        np.testing.assert_array_equal(run(op, x=values)["z"], numpy(values, 1))

    def test_a_number_takes_the_type_it_meets(self) -> None:
        _op, (x, n) = empty(("x", np.float64, (3,)), ("n", np.int64, (3,)))
        assert (x * 0.1).dtype == np.float64
        assert (n + 1).dtype == np.int64

    def test_equal_constants_are_one_initializer(self) -> None:
        op, (x,) = empty(("x", np.float32, (3,)))
        op.output("z", x * 2 + 2)
        assert len(op.graph.initializers) == 1

    def test_shapes_are_known_while_building(self) -> None:
        op, (x,) = empty(("x", np.float32, ("N", 4)))
        assert op.ReduceSum(x, [1], keepdims=0).shape == ("N",)
        assert op.Reshape(x, [-1, 2, 2]).rank == 3

    def test_shapes_that_cannot_meet_are_refused_where_they_meet(self) -> None:
        _op, (x, y) = empty(("x", np.float32, (3,)), ("y", np.float32, (4,)))
        with pytest.raises(ValueError, match=r"Add does not accept"):
            x + y

    def test_an_output_may_also_be_used(self) -> None:
        op, (x,) = empty(("x", np.float32, (2,)))
        y = x * 3
        op.output("a", y)
        op.output("b", y)  # once more under another name
        op.output("c", x)  # an input as output
        op.output("d", y + 1)
        found = run(op, x=np.array([1, 2], np.float32))
        assert {k: v.tolist() for k, v in found.items()} == {
            "a": [3, 6],
            "b": [3, 6],
            "c": [1, 2],
            "d": [4, 7],
        }

    @pytest.mark.parametrize("outputs", [0, -1, True, 1.0, "2"])
    def test_a_number_of_outputs_is_a_whole_number_from_1_on(self, outputs: object) -> None:
        op, (x,) = empty(("x", np.float32, (4,)))
        with pytest.raises(
            ValueError, match=f"_outputs must be .*, at least 1, got {outputs!r} for Split"
        ):
            op.Split(x, _outputs=outputs, num_outputs=2)
        assert not len(op.graph)

    def test_more_outputs_than_an_operator_has_are_refused(self) -> None:
        op, (x,) = empty(("x", np.float32, (4,)))
        with pytest.raises(ValueError, match="_outputs=3 exceeds the 2 outputs of TopK"):
            op.TopK(x, [2], _outputs=3)
        assert not len(op.graph)
        assert [v.dtype for v in op.TopK(x, [2], _outputs=2)] == [np.float32, np.int64]

    def test_one_output_of_several_may_be_asked_for(self) -> None:
        op, (x,) = empty(("x", np.float32, (4,)))
        (values,) = op.TopK(x, [2], _outputs=1)
        assert values.shape == (2,)
        assert len(values.ir.producer().outputs) == 2
        assert len(op.Split(x, _outputs=4, num_outputs=4)) == 4
        assert len(op.Anything(x, _domain="test", _outputs=3)) == 3


def test_arrays_stand_on_the_left_of_logic_too() -> None:
    op, (x,) = empty(("x", np.float32, (3,)))
    op.output("both", np.array([True, False, True]) & (x > 0))
    op.output("either", np.array([True, False, False]) | (x > 0))
    found = run(op, x=np.array([1, 1, -1], np.float32))
    assert found["both"].tolist() == [True, False, False]
    assert found["either"].tolist() == [True, True, False]

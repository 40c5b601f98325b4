"""Trees of operators, in a graph of names."""

from __future__ import annotations

import pytest

from onnxfit.graph.match import Equation, Matcher, Pattern

GRAPH = {
    "half": ("Mul", ("0.5", "x")),
    "other": ("Mul", ("0.5", "z")),
    "sum": ("Add", ("half", "x")),
    "apart": ("Add", ("half", "z")),
    "difference": ("Sub", ("x", "half")),
    "twice": ("Add", ("half", "other")),
}


def results(value: str, op_type: str) -> list[str]:
    return [name for name, (kind, read) in GRAPH.items() if kind == op_type and value in read]


MATCHER = Matcher(GRAPH.get, lambda text, name: text.isalpha() or text == name, results)


@pytest.mark.parametrize(
    ("pattern", "value", "expected"),
    [
        (("Add", ("Mul", "0.5", "a"), "b"), "sum", {"a": "x", "b": "x"}),
        (("Add", "a", ("Mul", "a", "0.5")), "sum", {"a": "x"}),  # in any order
        (("Add", "a", ("Mul", "0.5", "a")), "apart", None),  # one variable, two values
        (("Sub", "a", ("Mul", "0.5", "a")), "difference", {"a": "x"}),
        (("Sub", ("Mul", "0.5", "a"), "a"), "difference", None),  # an order that matters
        (("Add", ("Mul", "0.5", "a"), ("Mul", "0.5", "b")), "twice", {"a": "x", "b": "z"}),
        (("Add", "a"), "sum", None),
        (("Add", "a", "b"), "x", None),
        ("a", "x", {"a": "x"}),
        ("0.5", "x", None),
    ],
)
def test_a_tree_matches_in_any_order_of_a_sum(
    pattern: Pattern, value: str, expected: dict[str, str] | None
) -> None:
    match = next(MATCHER.matches(pattern, value), None)
    assert (None if match is None else match.values) == expected


def test_contained_values_come_in_the_order_of_their_computation() -> None:
    (match, other) = MATCHER.matches(("Add", ("Mul", "0.5", "a"), ("Mul", "0.5", "b")), "twice")
    assert match.contained == ("half", "other", "twice")
    assert (match.values, other.values) == ({"a": "x", "b": "z"}, {"a": "z", "b": "x"})


@pytest.mark.parametrize(
    ("equations", "known", "expected"),
    [
        # from an operand to the results that are computed from it, and from there to operands
        (
            [("h", ("Mul", "0.5", "x")), ("y", ("Add", "h", "v"))],
            {"x": "x"},
            ["sum", "apart", "twice"],
        ),
        ([("y", ("Add", ("Mul", "0.5", "x"), "x"))], {"x": "x"}, ["sum"]),
        # a later equation decides which of two operands a variable is
        ([("y", ("Add", "h", "v")), ("v", ("Mul", "0.5", "z"))], {"h": "half"}, ["twice"]),
        (
            [("y", ("Add", "h", "v")), ("v", ("Mul", "0.5", "u"))],
            {"y": "twice"},
            ["twice", "twice"],
        ),
        ([("y", ("Sub", "h", "x"))], {"x": "x", "h": "half"}, []),
    ],
)
def test_equations_hold_together(
    equations: list[Equation], known: dict[str, str], expected: list[str]
) -> None:
    found = list(MATCHER.solutions(equations, known))
    assert [values["y"] for values in found] == expected
    assert all(known.items() <= values.items() for values in found)

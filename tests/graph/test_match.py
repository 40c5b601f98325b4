"""Trees of operators, in a graph of names."""

from __future__ import annotations

import pytest

from onnxfit.graph.match import Match, Pattern

GRAPH = {
    "half": ("Mul", ("0.5", "x")),
    "other": ("Mul", ("0.5", "z")),
    "sum": ("Add", ("half", "x")),
    "apart": ("Add", ("half", "z")),
    "difference": ("Sub", ("x", "half")),
    "twice": ("Add", ("half", "other")),
}


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
    match = Match(GRAPH.get, lambda text, name: text.isalpha() or text == name)
    assert match.value(pattern, value) == (expected is not None)
    assert match.values == (expected or {})


def test_contained_values_come_in_the_order_of_their_computation() -> None:
    match = Match(GRAPH.get, lambda text, name: text.isalpha() or text == name)
    assert match.value(("Add", ("Mul", "0.5", "a"), ("Mul", "0.5", "b")), "twice")
    assert [*match.contained] == ["half", "other", "twice"]

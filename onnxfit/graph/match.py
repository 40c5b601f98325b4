"""Match trees of operators.

A pattern is a tree: `("Add", ("Mul", "s", "a"), "b")`. A text that begins with a letter is a
variable, which stands for one value wherever it occurs. Any other text, such as "0.5", stands for a
constant, and may match several values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, Union

Pattern = Union[str, tuple["str | Pattern", ...]]
V = TypeVar("V")
# The operator that computes a value, and its operands; None if a pattern cannot contain it.
Look = Callable[[V], tuple[str, Sequence[V]] | None]

COMMUTATIVE = {"Add", "Mul"}


class Match(Generic[V]):
    """The values that the variables of a pattern stand for, and the results inside the tree.

    A value is what the graph uses to refer to it: a name, or a value of onnx-ir.

    - `look`: a function that returns the operator and the operands of a value.
    - `fits`: a function that tells whether a variable or a constant may stand for a value.

    >>> graph = {"y": ("Add", ("one", "e")), "e": ("Exp", ("x",))}
    >>> match = Match(graph.get, lambda text, value: text != "1" or value == "one")
    >>> match.value(("Add", ("Exp", "u"), "1"), "y"), match.values, [*match.contained]
    (True, {'u': 'x'}, ['e', 'y'])
    """

    def __init__(self, look: Look[V], fits: Callable[[str, V], bool]) -> None:
        self._look = look
        self._fits = fits
        self.values: dict[str, V] = {}
        self.contained: dict[V, None] = {}  # in the order in which they are computed

    def node(self, pattern: Pattern, op_type: str, operands: Sequence[V]) -> bool:
        """Return whether an operator with these operands is the root of a tree of this pattern."""
        root, *expected = tuple(pattern)
        if op_type != root or len(operands) != len(expected):
            return False
        orders = [list(operands)]
        if op_type in COMMUTATIVE:
            orders.append(orders[0][::-1])
        for order in orders:
            before = dict(self.values), dict(self.contained)
            if all(map(self.value, expected, order)):
                return True
            self.values, self.contained = before
        return False

    def value(self, pattern: Pattern, value: V) -> bool:
        """Return whether a tree of this pattern computes a value."""
        if isinstance(pattern, str):
            if not self._fits(pattern, value):
                return False
            return not pattern[0].isalpha() or self.values.setdefault(pattern, value) == value
        found = self._look(value)
        if found is None or not self.node(pattern, *found):
            return False
        self.contained[value] = None
        return True

"""Match trees of operators.

A pattern is a tree: `("Add", ("Mul", "s", "a"), "b")`. A text that begins with a letter is a
variable, which stands for one value wherever it occurs. Any other text, such as "0.5", stands for a
constant, and may match several values. Equations are several trees that share variables: they also
match a result that is read at several places, and several results of the same values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, Union

Pattern = Union[str, tuple["str | Pattern", ...]]
# A variable, and the tree that computes its value.
Equation = tuple[str, Pattern]
V = TypeVar("V")
# The operator that computes a value, and its operands; None if a pattern cannot contain it.
Look = Callable[[V], tuple[str, Sequence[V]] | None]

COMMUTATIVE = {"Add", "And", "Equal", "Mul"}


@dataclass(frozen=True)
class Match(Generic[V]):
    """One way to match a pattern.

    - `values`: the values that the variables stand for.
    - `contained`: the results inside the tree, in the order in which they are computed.
    """

    values: Mapping[str, V] = field(default_factory=dict)
    contained: tuple[V, ...] = ()


class Matcher(Generic[V]):
    """A search for patterns in a graph.

    A value is what the graph uses to refer to it: a name, or a value of onnx-ir.

    - `look`: a function that returns the operator and the operands of a value.
    - `fits`: a function that tells whether a variable or a constant may stand for a value.
    - `results`: a function that returns what the operators of a type compute from a value. Only
      `solutions` calls it.

    >>> graph = {"y": ("Add", ("one", "e")), "e": ("Exp", ("x",))}
    >>> matcher = Matcher(graph.get, lambda text, value: text != "1" or value == "one")
    >>> match = next(matcher.matches(("Add", ("Exp", "u"), "1"), "y"))
    >>> match.values, match.contained
    ({'u': 'x'}, ('e', 'y'))
    """

    def __init__(
        self,
        look: Look[V],
        fits: Callable[[str, V], bool],
        results: Callable[[V, str], Sequence[V]] | None = None,
    ) -> None:
        self._look = look
        self._fits = fits
        self._results = results

    def matches(
        self, pattern: Pattern, value: V, known: Match[V] | None = None
    ) -> Iterator[Match[V]]:
        """Yield each way in which a tree of this pattern computes a value.

        - `known`: a match whose variables keep their values.
        """
        known = known or Match()
        if not isinstance(pattern, str):
            found = self._look(value)
            for match in () if found is None else self.node(pattern, *found, known):
                contained = dict.fromkeys((*match.contained, value))
                yield Match(match.values, tuple(contained))
        elif not self._fits(pattern, value):
            return
        elif not pattern[0].isalpha():
            yield known
        elif known.values.get(pattern, value) == value:
            yield Match({**known.values, pattern: value}, known.contained)

    def node(
        self, pattern: Pattern, op_type: str, operands: Sequence[V], known: Match[V] | None = None
    ) -> Iterator[Match[V]]:
        """Yield each way in which an operator with these operands is the root of such a tree."""
        root, *expected = tuple(pattern)
        if op_type != root or len(operands) != len(expected):
            return
        yield from self._all(expected, operands, known or Match())
        if op_type in COMMUTATIVE:
            yield from self._all(expected, operands[::-1], known or Match())

    def _all(
        self, patterns: Sequence[Pattern], values: Sequence[V], known: Match[V]
    ) -> Iterator[Match[V]]:
        if not patterns:
            yield known
            return
        for match in self.matches(patterns[0], values[0], known):
            yield from self._all(patterns[1:], values[1:], match)

    def solutions(
        self, equations: Sequence[Equation], known: Mapping[str, V]
    ) -> Iterator[Mapping[str, V]]:
        """Yield the values of the variables for each way in which all equations hold.

        An equation has a variable that is known, or follows from an equation before it.
        """
        if not equations:
            yield known
            return
        (variable, pattern), *others = equations
        values = [known[variable]] if variable in known else self._candidates(pattern, known)
        for value in values or ():
            for match in self.matches(pattern, value, Match({**known, variable: value})):
                yield from self.solutions(others, match.values)

    def _candidates(self, pattern: Pattern, known: Mapping[str, V]) -> list[V] | None:
        """Return the values that may match a pattern, found from an operand that is known."""
        if isinstance(pattern, str):
            return [known[pattern]] if pattern in known else None
        root, *operands = pattern
        assert isinstance(root, str)
        assert self._results is not None
        for operand in operands:
            below = self._candidates(operand, known)
            if below is not None:
                return list(dict.fromkeys(r for v in below for r in self._results(v, root)))
        return None


G = TypeVar("G")  # the search in a graph
R = TypeVar("R")  # what a rule puts into the graph


class MatchRule(ABC, Generic[G, V, R]):
    """Values that equations find in a graph, and what is put in their place.

    - `equations`: those of `Matcher.solutions`. The first one has the variable of the result.
    """

    equations: Sequence[Equation]

    def check(self, graph: G, found: Mapping[str, V]) -> str:
        """Return why the values that were found keep their nodes; "" if they do not."""
        return ""

    @abstractmethod
    def rewrite(self, graph: G, found: Mapping[str, V]) -> R:
        """Return what computes the values."""

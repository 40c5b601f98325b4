"""The program of an Elementwise node: what it computes from blocks of its inputs.

kernels/src/elementwise.h describes the instructions. A program is one list of integers: for each
instruction its code, the number of its result and those of its operands. Inputs have the first
numbers, then come outputs, then temporary blocks. Inputs are tensors, spread inputs, scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from onnxfit.graph.match import Matcher, Pattern

# Operators of ONNX that are one instruction, and the number of their inputs.
OPERATORS = {
    "Add": 2,
    "Sub": 2,
    "Mul": 2,
    "Div": 2,
    "Max": 2,
    "Min": 2,
    "Sqrt": 1,
    "Neg": 1,
    "Abs": 1,
    "Reciprocal": 1,
    "Exp": 1,
    "Erf": 1,
    "Tanh": 1,
    "Sigmoid": 1,
    "HardSigmoid": 1,  # its instruction reads the two attributes as scalars
    "Round": 1,
    "Clip": 3,
}
# Several operators that are one instruction: its name, their tree, and the operands of the
# instruction. The variables s, t and u are scalars; p, q and r may be. A larger tree comes first.
PATTERNS: Sequence[tuple[str, Pattern, str]] = (
    (
        "NORMALIZED_STEP",
        ("Sub", "a", ("Div", ("Mul", "s", "b"), ("Add", ("Sqrt", "c"), "t"))),
        "asbct",
    ),
    *(
        (
            "STRAIGHT_THROUGH",
            (
                "Div",
                (
                    "Mul",
                    ("Mul", "a", "p"),
                    ("HardSigmoid", ("Abs", ("Sub", inside, "b")), "s", "t"),
                ),
                "p",
            ),
            "abpqrst",
        )
        for inside in (("Clip", "b", "q", "r"), ("Min", ("Max", "b", "q"), "r"))
    ),
    (
        "ROUNDED",
        ("Mul", ("Add", ("Clip", ("Round", ("Div", "a", "p")), "s", "t"), "u"), "p"),
        "apstu",
    ),
    ("AVERAGE_OF_SQUARES", ("Add", ("Mul", "s", "a"), ("Mul", "t", ("Mul", "b", "b"))), "satb"),
    ("AVERAGE", ("Add", ("Mul", "s", "a"), ("Mul", "t", "b")), "satb"),
    ("SUB_SCALED", ("Sub", "a", ("Mul", "s", "b")), "asb"),
    ("SCALE_ADD", ("Add", ("Mul", "s", "a"), "b"), "sab"),
)
_NAMES = (
    *OPERATORS,
    "SCALE_ADD",
    "SUB_SCALED",
    "AVERAGE",
    "AVERAGE_OF_SQUARES",
    "NORMALIZED_STEP",
    "ROUNDED",
    "STRAIGHT_THROUGH",
)
CODES = {name: code for code, name in enumerate(_NAMES)}


@dataclass(frozen=True)
class Instruction:
    name: str
    result: str
    operands: Sequence[str]


@dataclass(frozen=True)
class Program:
    """The attributes of an Elementwise node."""

    numbers: list[int]
    temporaries: int


def compile_program(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[str],
    outputs: Sequence[str],
    is_scalar: Callable[[str], bool],
) -> Program:
    """Return the program that computes `outputs` from `inputs` as the nodes do, in their order."""
    instructions = _instructions_for(nodes, outputs, is_scalar)
    numbers = {name: i for i, name in enumerate((*inputs, *outputs))}
    first_temporary = len(numbers)
    last_use = {name: i for i, each in enumerate(instructions) for name in each.operands}
    free: list[int] = []
    temporaries = 0
    program = []
    for i, each in enumerate(instructions):
        operands = [numbers[name] for name in each.operands]
        # The result may take the place of an operand that nothing reads any more.
        ended = {numbers[name] for name in each.operands if last_use[name] == i}
        free += sorted(number for number in ended if number >= first_temporary)
        if each.result not in numbers:
            if not free:
                free.append(first_temporary + temporaries)
                temporaries += 1
            numbers[each.result] = free.pop()
        program += [CODES[each.name], numbers[each.result], *operands]
    return Program(program, temporaries)


def _instructions_for(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], is_scalar: Callable[[str], bool]
) -> list[Instruction]:
    """Return instructions for the nodes, of which one may compute several."""
    uses = Counter(name for node in nodes for name in node.input)
    producers = {node.output[0]: node for node in nodes}
    # Nodes whose result is read once, by another of the nodes: an instruction may contain them.
    inner = {name: node for name, node in producers.items() if uses[name] == 1}
    for name in outputs:
        inner.pop(name, None)

    def look(name: str) -> tuple[str, Sequence[str]] | None:
        return (inner[name].op_type, inner[name].input) if name in inner else None

    def fits(variable: str, name: str) -> bool:
        return variable in "pqr" or is_scalar(name) == (variable in "stu")

    matcher = Matcher(look, fits)
    contained: set[str] = set()
    instructions = []
    for node in reversed(nodes):
        result = node.output[0]
        if result in contained:
            continue
        instruction = Instruction(node.op_type, result, node.input)
        for name, pattern, variables in PATTERNS:
            match = next(matcher.node(pattern, node.op_type, node.input), None)
            if match is not None:
                operands = [match.values[variable] for variable in variables]
                instruction = Instruction(name, result, operands)
                contained.update(match.contained)
                break
        instructions.append(instruction)
    return instructions[::-1]

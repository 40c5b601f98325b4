"""Signatures of operators: the types of their inputs, and the number of their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from onnxfit.graph.inference import find_schema

# element types of inputs that are axes, sizes or positions
_INDEX_TYPES = {"tensor(int64)", "tensor(int32)"}


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of an operator, by ONNX's schema.

    `parameters` has an entry for each input: its type variable, and whether it is always a position
    or a size.
    """

    parameters: tuple[tuple[str, bool], ...]
    min_outputs: int
    max_outputs: int


@cache
def signature_of(domain: str, op_type: str, version: int) -> Signature | None:
    """Return the signature of an operator, None without a schema.

    ONNX copies the inputs of a schema whenever they are read.
    """
    schema = find_schema(domain, op_type, version)
    if schema is None:
        return None
    parameters = [(p.type_str, set(p.types) <= _INDEX_TYPES) for p in schema.inputs]
    return Signature(tuple(parameters), schema.min_output, schema.max_output)

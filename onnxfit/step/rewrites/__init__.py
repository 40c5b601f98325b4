"""Graph rewrites that make a finished step faster and change nothing else.

A rewrite is a function `rewrite(graph: ir.Graph) -> None` that changes a graph in place. It lives
in a module of this package whose `__all__` lists it. Adding a rewrite takes no other change.
Rewrites run in the order of their modules. benchmarks/decisions/optimizations.md has what each
saves.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxfit.registry import exported_members

__all__ = ["REWRITES", "Rewrite"]

Rewrite = Callable[[ir.Graph], None]
REWRITES: tuple[Rewrite, ...] = tuple(exported_members(__name__).values())

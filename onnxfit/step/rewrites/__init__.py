"""Graph rewrites that make a finished step faster and change nothing else.

A rewrite is a function `rewrite(graph: ir.Graph) -> None` that changes a graph in place. It stands
in a module of this package whose `__all__` names it, and whose docstring gives the measured reason
for which it is kept. Adding one takes no other change. They run in the order of their modules.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxfit.registry import exported_members

__all__ = ["REWRITES", "Rewrite"]

Rewrite = Callable[[ir.Graph], None]
REWRITES: tuple[Rewrite, ...] = tuple(exported_members(__name__).values())

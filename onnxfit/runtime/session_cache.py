"""Sessions of small graphs on one thread, which equal graphs of one process share.

A search over settings and a cross-validation compile equal graphs many times, since learning rates,
seeds and weights are inputs. A session keeps nothing between two runs but free memory: each trainer
binds its own buffers to it, and several threads may run it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import onnx

from onnxfit.graph.fold import RANDOM
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.kernels.library import library_path
from onnxfit.runtime.node_order import bytes_of_values
from onnxfit.runtime.transform_cache import GraphCache, content_hash

MAX_BYTES = 2**26  # of all sessions with the values of their graphs
MAX_BYTES_OF_VALUES = 2**22  # larger graphs take longer to run than to compile
BYTES_OF_SESSION = 2**19  # of a small graph, without its values
# onnxruntime's kernels of these operators keep the state of a random number generator.
STATEFUL = RANDOM | {"Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"}


class SessionCache(GraphCache):
    """The sessions that were used last."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes)

    def session(
        self, model: onnx.ModelProto, settings: Hashable, compile_graph: Callable[[], Any]
    ) -> Any:
        """Return `compile_graph()`, or its result for an equal graph.

        - `model`: the graph, which is compiled for one thread of the CPU.
        - `settings`: all else that decides the result.
        """
        content = content_hash(model)
        if content is None:
            return compile_graph()
        key = content, settings, library_path()
        known = self.get(key)
        if known is not None:
            return known
        session = compile_graph()
        size = bytes_of_values(model.graph)
        if size > MAX_BYTES_OF_VALUES or _is_stateful(model):
            return session
        self.keep(key, session, BYTES_OF_SESSION + size)
        return session


def _is_stateful(model: onnx.ModelProto) -> bool:
    return any(node.op_type in STATEFUL for node in nodes_of(model.graph))


SESSIONS = SessionCache()

"""Sessions of small graphs on one thread, which equal graphs of one process share.

A search over settings and a cross-validation compile equal graphs many times, since learning rates,
seeds and weights are inputs. A session keeps nothing between two runs but free memory: each trainer
binds its own buffers to it, and several threads may run it at once.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import onnx

from onnxfit.graph.fold import RANDOM
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.kernels.library import library_path
from onnxfit.runtime.node_order import bytes_of_values
from onnxfit.runtime.transform_cache import content_hash

MAX_BYTES = 2**26  # of all sessions with the values of their graphs
MAX_BYTES_OF_VALUES = 2**22  # larger graphs take longer to run than to compile
BYTES_OF_SESSION = 2**19  # of a small graph, without its values
# onnxruntime's kernels of these operators keep the state of a random number generator.
STATEFUL = RANDOM | {"Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"}


class SessionCache:
    """The sessions that were used last. It may be used from several threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        """Forget all sessions, without waiting for another thread."""
        self._lock = Lock()
        self._sessions: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()

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
        with self._lock:
            known = self._sessions.get(key)
            if known is not None:
                self._sessions.move_to_end(key)
        if known is not None:
            return known[0]
        session = compile_graph()
        size = bytes_of_values(model.graph)
        if size > MAX_BYTES_OF_VALUES or _is_stateful(model):
            return session
        with self._lock:
            self._sessions[key] = session, BYTES_OF_SESSION + size
            while sum(part for _, part in self._sessions.values()) > self.max_bytes:
                self._sessions.popitem(last=False)
        return session


def _is_stateful(model: onnx.ModelProto) -> bool:
    return any(node.op_type in STATEFUL for node in nodes_of(model.graph))


SESSIONS = SessionCache()

if hasattr(os, "register_at_fork"):
    # Another thread of the parent process may hold the lock, and does not exist in the child.
    os.register_at_fork(after_in_child=SESSIONS.clear)

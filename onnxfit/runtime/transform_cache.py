"""Graphs with the operators in C++, which equal graphs of one process get only once.

A search over settings and a cross-validation compile equal graphs many times, since learning rates,
seeds and weights are inputs. Most of the time of compiling a small graph is spent on finding the
nodes to replace. Only the changed graph is kept, and `session_cache` keeps some sessions.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Any

import onnx

from onnxfit.kernels.library import library_path
from onnxfit.kernels.transforms import GraphTransform

MAX_BYTES = 2**24  # of all graphs
MAX_BYTES_OF_GRAPH = 2**20  # larger graphs take longer to compile than to change


class GraphCache:
    """The last results of graphs, up to a number of bytes. It may be used from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.clear()
        _caches.add(self)

    def clear(self) -> None:
        """Forget everything, without waiting for another thread."""
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Return what is kept under a key, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, value: Any, size: float) -> None:
        """Keep a value of `size` bytes, and forget those that were not used for longest."""
        with self._lock:
            self._kept[key] = value, size
            while sum(part for _, part in self._kept.values()) > self.max_bytes:
                self._kept.popitem(last=False)


_caches: weakref.WeakSet[GraphCache] = weakref.WeakSet()


def _clear_all() -> None:
    for cache in list(_caches):
        cache.clear()


if hasattr(os, "register_at_fork"):
    # Another thread of the parent process may hold a lock, and does not exist in the child.
    os.register_at_fork(after_in_child=_clear_all)


class TransformCache(GraphCache):
    """The graphs that were changed last."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes)

    def transform(
        self, model: onnx.ModelProto, device: str, transforms: Sequence[GraphTransform]
    ) -> onnx.ModelProto:
        """Return the model after all transforms, which belongs to the caller unless it is `model`.

        - `device`: the kind of the device.
        """
        content = content_hash(model)
        if content is None:
            return _transform(model, device, transforms)
        key = content, device, *transforms, library_path()
        known = self.get(key)
        if known is not None:
            again = onnx.ModelProto()
            again.ParseFromString(known)
            return again
        changed = _transform(model, device, transforms)
        graph = changed.SerializeToString()
        self.keep(key, graph, len(graph))
        return changed


def _transform(
    model: onnx.ModelProto, device: str, transforms: Sequence[GraphTransform]
) -> onnx.ModelProto:
    for transform in transforms:
        model = transform(model, device)
    return model


def content_hash(model: onnx.ModelProto) -> bytes | None:
    """Return a hash of a model; None for one that is large or refers to arrays in memory."""
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer):
        return None
    if model.ByteSize() > MAX_BYTES_OF_GRAPH:
        return None
    return hashlib.sha256(model.SerializeToString(deterministic=True)).digest()


CACHE = TransformCache()

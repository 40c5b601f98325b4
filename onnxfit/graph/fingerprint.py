"""A digest that identifies a model."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx

from onnxfit.graph.shared_tensors import array_of


def fingerprint(model: onnx.ModelProto) -> str:
    """Return the SHA-256 of a model's computation: nodes, inputs, outputs, numbers and functions.

    Documentation, metadata and the storage of numbers (raw or as fields) do not matter.
    """
    digest = hashlib.sha256()
    graph = model.graph
    for part in (*graph.node, *graph.input, *graph.output, *model.functions, *model.opset_import):
        _add(digest, part.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        _add(digest, f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode())
        _add(digest, np.ascontiguousarray(array_of(tensor)).tobytes())
    for sparse in graph.sparse_initializer:
        _add(digest, sparse.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, data: bytes) -> None:
    """Add bytes after their length, which separates them from their neighbours."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)

"""The model that training uses instead of a file, and the conversion back to the file.

Most files are trained directly. A file of integers, for instance, is trained in floats: its
training model has other initializers than the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.graph import names
from onnxfit.graph.model import OnnxModel, with_references
from onnxfit.graph.shared_tensors import Storable, array_of
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.batch_axis import BatchLayout


@dataclass(frozen=True, eq=False)
class TrainableModel:
    """A file, the model that is trained in its place, and the conversion back to the file.

    This class is for a file that is trained directly. A subclass overrides methods such as
    `initializer_values`.

    - `file`: the model as passed, which the user gets back with other numbers. It owns the arrays
      to which `model` and `view` refer.
    - `model`: the model of every step. The trained weights are its initializers.
    - `view`: the file with the inputs and outputs of `model`, and with the same initializers; None
      if it is the file itself.
    - `layout`: the batch axes of the file. The batch is the first axis in `view` and `model`.
    """

    # Whether `model` computes other numbers than the file with the trained weights. If so,
    # evaluation compiles the file after every update; otherwise it runs `model`.
    evaluates_file: ClassVar[bool] = False

    file: OnnxModel
    model: onnx.ModelProto
    view: onnx.ModelProto | None = field(default=None, kw_only=True)
    layout: BatchLayout = field(default_factory=BatchLayout, kw_only=True)

    @classmethod
    def of(cls, file: OnnxModel) -> TrainableModel:
        """Return the trivial form of a file that is trained directly."""
        return TrainableModel(file, file.proto)

    @property
    def is_file(self) -> bool:
        """Whether the file itself is trained."""
        return self.model is self.file.proto

    @cached_property
    def fingerprint(self) -> str:
        """The digest of the file, by which a checkpoint without the file identifies it."""
        return fingerprint(self.file.proto)

    @property
    def bounds(self) -> Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Initializer -> arrays of its shape: the least and the greatest numbers after an update.

        These initializers belong to the form, not to a layer. They have no penalty.
        """
        return {}

    @property
    def statistics(self) -> tuple[str, ...]:
        """The initializers that `to_training_form` returns. A step updates them from its batch."""
        return ()

    @property
    def constants(self) -> Mapping[str, Sequence[npt.NDArray[Any]]]:
        """Arrays that `model` was built with. A checkpoint stores them; the file does not."""
        return {}

    def require_constants(self, constants: Mapping[str, Sequence[npt.NDArray[Any]]]) -> None:
        """Raise SettingError if `model` was not built with the `constants` of another form."""

    def to_training_form(self, op: GraphBuilder, step: Value) -> dict[str, Value]:
        """Rewrite the graph of `op`, the graph of `model`, for training, in place.

        - `op`: the builder of the graph, in which the trained weights and statistics are inputs.
        - `step`: the number of batches so far, an int64 scalar.

        Returns the next value of each statistic, by name.
        """
        return {}

    def selected(self, patterns: Sequence[str] | str | None) -> Sequence[str] | str | None:
        """Return the names and patterns of the trained weights, by the user's `weights=`."""
        return patterns

    def initializer_values(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Storable]:
        """Return a mapping from the file's initializers to values, for trained weights `arrays`."""
        return self.without_loss(arrays)

    def without_loss(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays without the tensors that belong to a loss."""
        own = {tensor.name for tensor in self.file.graph.initializer}
        return {n: a for n, a in arrays.items() if n in own or not names.is_loss_weight(n)}

    def export(
        self, arrays: Mapping[str, npt.NDArray[Any]], *, compiled: bool = False
    ) -> OnnxModel:
        """Return a copy of the file with trained weights; only numbers of initializers differ.

        The copy refers to the larger ones of `arrays`, so nothing is copied. `compiled` is as for
        `with_references`.
        """
        return with_references(self.file.proto, self.initializer_values(arrays), compiled=compiled)

    @property
    def why_python_only(self) -> str | None:
        """The reason for which no graph computes the file's initializers; None if one does."""
        if type(self).initializer_values is TrainableModel.initializer_values:
            return None
        return "trains other numbers than the file has, and only Python can convert them back"

    def frozen_base(self, arrays: Mapping[str, npt.NDArray[Any]]) -> OnnxModel:
        """Return the file for a host that trains.

        It is the model of `export`, but the initializers that `add_export` computes have the
        numbers that they began with.
        """
        return self.export(arrays)

    def add_export(self, op: GraphBuilder, trained: Collection[str]) -> dict[str, Value]:
        """Write the nodes that compute initializers of the file from trained weights.

        - `op`: an empty graph. The weights that it reads become its inputs.
        - `trained`: the names of the trained weights.

        Returns the values of the initializers, by name.
        """
        return {}

    def inference_model(self, arrays: Mapping[str, npt.NDArray[Any]]) -> OnnxModel:
        """Return a model with the inputs of `model` that computes what the exported file does."""
        model = self.file.proto if self.view is None else self.view
        return with_references(model, self.initializer_values(arrays), compiled=True)

    def check(self, weights: Collection[str], statistics: Collection[str]) -> None:
        """Raise ModelError or SettingError if the form cannot train these tensors.

        - `weights`: the trained weights.
        - `statistics`: the running statistics that training updates.
        """


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
        _add(digest, _bytes_of(array_of(tensor)))
    for sparse in graph.sparse_initializer:
        _add(digest, sparse.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _bytes_of(array: npt.NDArray[Any]) -> bytes | memoryview:
    """Return the bytes of an array, without a copy unless it has text or is not contiguous."""
    if array.dtype == object:
        return b"\0".join(str(text).encode() for text in array.flat)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _add(digest: hashlib._Hash, data: bytes | memoryview) -> None:
    """Add bytes after their length, which separates them from their neighbours."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)

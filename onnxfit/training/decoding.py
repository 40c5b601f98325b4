"""Texts as inputs of a language model, and decoding with key-value caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.data.padding import MASK, TOKENS
from onnxfit.data.text import TextLoader
from onnxfit.errors import SettingError
from onnxfit.graph.index import required_inputs
from onnxfit.graph.model import initializers_to_inputs, to_ir
from onnxfit.graph.shared_tensors import (
    NOT_IN_NUMPY,
    include_shared,
    to_proto,
    values_of_tensor,
)
from onnxfit.load.caches import Cache, caches_of
from onnxfit.load.trainable import TrainableModel
from onnxfit.load.training_form import to_inference_form
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.session import StatelessSession
from onnxfit.runtime.values import array_of, numpy_dtype, ort_value
from onnxfit.step.recipe import Recipe
from onnxfit.training.adapting import adapter_for

Array = npt.NDArray[Any]
Texts = list[list[int]]
# Function from inputs by name and wanted outputs to the outputs by name; all are OrtValues.
Run = Callable[[Mapping[str, Any], Sequence[str]], dict[str, Any]]


class TextInputs:
    """Maker of the inputs of a language model from texts.

    - `recipe`: the recipe of the model without caches.
    - `input_names`: names of the model's inputs, as for `TextLoader`.
    """

    def __init__(self, recipe: Recipe, input_names: Mapping[str, str] | None) -> None:
        own_names = {TOKENS: TOKENS, MASK: MASK, **(input_names or {})}
        self._input_names = input_names
        self._adapter = adapter_for(recipe, "prediction", 0)
        self._mask = own_names[MASK]
        shapes = {spec.name: spec.shape or () for spec in recipe.inputs}
        shape = shapes.get(own_names[TOKENS]) or next(iter(shapes.values()), ())
        self.names = frozenset(shapes)
        # (rows, tokens); a name or None means any number
        self.sizes: tuple[Any, Any] = (*shape, None, None)[:2]  # type: ignore[assignment]
        self.names_of_rows = {one[0] for one in shapes.values() if one and isinstance(one[0], str)}

    def loader(self, texts: Texts, multiple: int, batch_size: int) -> TextLoader:
        """Return the loader of texts, padded to a multiple of `multiple` tokens."""
        return TextLoader(
            texts,
            pack=False,
            pad_to_multiple_of=multiple,
            input_names=self._input_names,
            batch_size=batch_size,
            shuffle=False,
        )

    def after(self, past: int, texts: Texts) -> dict[str, Array]:
        """Return the inputs for the tokens after the first `past`, of texts of equal length."""
        loader = self.loader(texts, 1, len(texts)).bind(self._adapter)
        arrays = next(loader.batches(0, 0, None))[0]
        return {name: self._cut(name, array, past) for name, array in arrays.items()}

    def _cut(self, name: str, array: Array, past: int) -> Array:
        """Return an input for new tokens. A mask keeps a column for each earlier token."""
        if name != self._mask:
            array = array[:, past:]
        elif array.ndim > 2:
            array = array[..., past:, :]
        return np.ascontiguousarray(array)


@dataclass(frozen=True)
class EmptyCache:
    """A cache of no tokens.

    - `shape`: the shape of the cache, in which None means the number of rows.
    """

    cache: Cache
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def array(self, rows: int) -> Array:
        return np.zeros([rows if size is None else size for size in self.shape], self.dtype)


def empty_caches(file: onnx.ModelProto, inputs: TextInputs) -> list[EmptyCache] | None:
    """Return empty caches of a file, for the continuation of texts.

    The result is None if the file has no caches, if it has fixed sizes or other inputs, or if the
    caches have sizes that no other input has.
    """
    caches = {cache.past: cache for cache in caches_of(file)}
    names = required_inputs(file.graph).keys()
    is_fixed = any(isinstance(size, int) for size in inputs.sizes)
    if not caches or is_fixed or not names <= {*inputs.names, *caches}:
        return None
    empty = []
    for value in file.graph.input:
        if value.name not in caches:
            continue
        cache, tensor = caches[value.name], value.type.tensor_type
        shape: list[Any] = [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param
            for dim in tensor.shape.dim
        ]
        shape[cache.axis] = 0
        names_of_sizes = {size for size in shape if isinstance(size, str)}
        if not cache.present or not names_of_sizes <= inputs.names_of_rows:
            return None
        sizes = tuple(None if isinstance(size, str) else size for size in shape)
        empty.append(EmptyCache(cache, numpy_dtype(tensor.elem_type), sizes))
    return empty


class CompiledFile:
    """The trained file with its caches, compiled once for many continuations of texts.

    The trained tensors are inputs of the graph, so one session serves all weights. So are the
    tensors that all graphs share. A quantized file is compiled after each update, because
    onnxruntime chooses its kernels by constant integers. So is a file with trained bfloat16
    tensors, because NumPy cannot pass them.

    - `trainable`: the file, and the conversion of trained weights back to it.
    - `backend`: the state of the training, and its device.
    """

    def __init__(self, trainable: TrainableModel, backend: Backend) -> None:
        self.device = backend.device
        self._trainable = trainable
        self._backend = backend
        self._session: StatelessSession | None = None
        self._version = -1  # of the state with which the session was compiled

    def with_current_weights(self) -> Run:
        """Return a function that runs the file with the weights of this moment."""
        backend = self._backend
        with backend.lock:
            version = backend.state.version
            state = {name: backend.state.get(name) for name in backend.recipe.state}
            arrays = self._inputs(state)
            if self._session is None or not (arrays or self._version == version):
                self.clear()
                backend.inference.owners["generation"] = self
                backend.inference.make_room("generation")
                self._session = self._compile(state, arrays)
                self._version = version
            session = self._session
        weights = {name: ort_value(array, self.device) for name, array in arrays.items()}
        shared = {
            name: backend.state.buffer(name).value
            for name in session.inputs
            if name in backend.recipe.constants and name not in arrays
        }

        def run(values: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
            assert len(arrays) == len(weights)  # keeps the arrays, whose memory `weights` borrow
            return session({**values, **shared, **weights}, outputs)

        return run

    def clear(self) -> None:
        """Drop the session; it is compiled again when it is needed."""
        self._session = None

    def _inputs(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return the tensors of the file that training changes; {} if they must be constants."""
        if self._backend.recipe.evaluates_file:
            return {}
        trained = self._trainable.initializer_values(state)
        arrays = {name: values_of_tensor(value) for name, value in trained.items()}
        # The element types of `ml_dtypes` have the kind "V", as structures have.
        return {} if any(array.dtype.kind == "V" for array in arrays.values()) else arrays

    def _compile(self, state: Mapping[str, Array], inputs: Mapping[str, Array]) -> StatelessSession:
        """Compile the file. The initializers of `inputs`, and shared ones, become inputs."""
        exported = self._trainable.export(state, compiled=True)
        file = exported.proto
        to_inference_form(file, self._backend.recipe.batch_norm)
        graph = file.graph
        names = [tensor.name for tensor in graph.initializer]
        for value in [value for value in graph.input if value.name in names]:
            graph.input.remove(value)
        if inputs:
            given = {*inputs, *self._backend.recipe.constants}
            model = to_ir(file)
            initializers_to_inputs(model.graph, [name for name in names if name in given])
            file = to_proto(model)
        include_shared(file, NOT_IN_NUMPY)
        return StatelessSession(
            file, self.device, self._backend.threads, "generation", uses_integers=True
        )


class Decoder:
    """A file with caches that continues texts.

    - `file`: the file with the current weights.
    - `output`: the name of the logits.
    """

    def __init__(
        self, file: CompiledFile, inputs: TextInputs, caches: Sequence[EmptyCache], output: str
    ) -> None:
        self._run = file.with_current_weights()
        self._device = file.device
        self._inputs = inputs
        self._caches = caches
        self._output = output

    def predictor(self) -> Callable[[Texts], Array]:
        """Return a function that processes only the new tokens of texts.

        It returns the logits of the next token of each text. The texts must have equal lengths, and
        begin with the texts of the previous call.
        """
        past = 0
        state: dict[str, Any] = {}
        wanted = [self._output, *(one.cache.present for one in self._caches)]

        def predict(texts: Texts) -> Array:
            nonlocal past, state
            arrays = self._inputs.after(past, texts)
            if not past:
                arrays |= {one.cache.past: one.array(len(texts)) for one in self._caches}
            values = {name: ort_value(array, self._device) for name, array in arrays.items()}
            results = self._run(state | values, wanted)
            logits = array_of(results[self._output])
            check_logits(logits.shape, len(texts[0]) - past)
            state = {one.cache.past: results[one.cache.present] for one in self._caches}
            past = len(texts[0])
            return logits[:, -1].copy()

        return predict


def check_logits(shape: tuple[int, ...], tokens: int) -> None:
    """Raise SettingError unless an output of this shape has logits for each of `tokens` tokens."""
    if len(shape) != 3 or shape[1] != tokens:
        raise SettingError(
            f"generate needs logits of shape (batch, {tokens}, vocabulary) for {tokens} tokens, but"
            f" the output of the model has shape {shape}."
        )

"""A file that adapters train: its training model, and the merged file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx
from onnx import numpy_helper

from onnxfit.adapters.branches import Adapter, Array, with_branches
from onnxfit.adapters.layers import adaptable_weights
from onnxfit.adapters.lora import LoRA
from onnxfit.adapters.peft import Matrices
from onnxfit.adapters.targets import match_adapters
from onnxfit.errors import ModelError, SettingError, listed_names, warn_user
from onnxfit.graph.completion import opset_of
from onnxfit.graph.model import inline_functions, with_tensors
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.trainable import TrainableModel
from onnxfit.registry import name_list, shortened

FIRST_OPSET = 7  # in which Add and Mul broadcast


@dataclass(frozen=True, eq=False)
class AdaptedModel(TrainableModel):
    """A file with adapters, which are trained beside its frozen weights.

    - `adapters`: the adapters. Those of float weights are merged into the file.
    """

    adapters: tuple[Adapter, ...]

    def selected(self, patterns: Sequence[str] | str | None) -> Sequence[str]:
        """Return the names of all matrices of the adapters, and `patterns`."""
        own = [name for adapter in self.adapters for name in (adapter.a, adapter.b)]
        others = [] if patterns is None else name_list("weights", patterns)
        if others and all(pattern.startswith("!") for pattern in others):
            raise SettingError(
                f"weights={shortened(patterns)} excludes weights only. Beside adapters, weights="
                " names those that train besides, such as weights='head.*'; None adds none."
            )
        return [*own, *(pattern for pattern in others if pattern not in own)]

    def to_file(self, arrays: Mapping[str, Array]) -> Mapping[str, onnx.TensorProto]:
        """Return initializer of the file -> its value, with adapters merged."""
        rest = dict(arrays)
        merged: dict[str, Callable[[], onnx.TensorProto]] = {}
        tensors = {tensor.name: tensor for tensor in self.file.graph.initializer}
        for adapter in self.adapters:
            if not adapter.weight.is_packed:
                a, b = rest.pop(adapter.a), rest.pop(adapter.b)
                name = adapter.weight.name
                merged[name] = partial(_merged_tensor, adapter, tensors[name], a, b)
        return ComputedTensors(super().to_file(rest), merged)

    def exported(self, arrays: Mapping[str, Array]) -> onnx.ModelProto:
        """Return the file with W + s A B in the place of W.

        To packed integers nothing can be added: their adapters stay beside them, as nodes.
        """
        return self._merged(self.file, arrays)

    def deployed(self, arrays: Mapping[str, Array]) -> onnx.ModelProto:
        """Return a model with the inputs of `model` that computes what the exported file does."""
        return self._merged(self.file if self.view is None else self.view, arrays)

    def _merged(self, model: onnx.ModelProto, arrays: Mapping[str, Array]) -> onnx.ModelProto:
        """Return the file, or its view, with the adapters."""
        packed = [one for one in self.adapters if one.weight.is_packed]
        if packed:
            model = inline_functions(model)
            weights = {weight.name: weight for weight in adaptable_weights(model)}
            kept = [replace(one, weight=weights[one.weight.name]) for one in packed]
            matrices = [(arrays[one.a], arrays[one.b]) for one in packed]
            model = with_branches(model, kept, matrices, dropout=False)
        return with_tensors(model, self.to_file(arrays))

    def saved(self, arrays: Mapping[str, Array]) -> dict[str, Matrices]:
        """Return module -> the matrices of its adapter, for a file of adapters."""
        tensors = {tensor.name: tensor for tensor in self.file.graph.initializer}
        return {
            one.weight.module: one.saved(arrays[one.a], arrays[one.b], tensors[one.weight.name])
            for one in self.adapters
        }

    def check(self, weights: Collection[str], statistics: Collection[str]) -> None:
        """Raise SettingError for a weight that is trained besides having an adapter."""
        adapted = {adapter.weight.name for adapter in self.adapters}
        both = [name for name in weights if name in adapted]
        if both:
            raise SettingError(
                f"weights= and adapters= both train {listed_names(both)}: leave them out of"
                " weights=, or exclude them from the adapters' target."
            )


def adapt(
    trainable: TrainableModel, adapters: LoRA | Sequence[LoRA] | None, seed: int
) -> TrainableModel:
    """Return the form in which adapters train a file; without adapters, `trainable` itself.

    - `trainable`: the file as it would be trained without adapters.
    - `adapters`: the settings of one or several adapters.
    - `seed`: decides the first values of A.

    Raises ModelError, SettingError or UnknownNameError.
    """
    if adapters is None:
        return trainable
    settings = listed(adapters)
    if not trainable.is_file:
        raise SettingError(
            "Adapters do not stand beside the integers behind a DequantizeLinear, nor those of"
            " MatMulNBits that quantization= trains: train them without adapters=, or adapt the"
            " float file and quantize it afterwards by onnxfit.quantize."
        )
    base = inline_functions(trainable.file)
    _require_opset(base)
    matched = match_adapters(base, settings)
    _refuse_taken_names(base, matched)
    arrays = [adapter.first(seed) for adapter in matched]
    _warn_of_other_bases(base, matched)
    return AdaptedModel(
        file=trainable.file,
        model=with_branches(base, matched, arrays, dropout=True),
        adapters=tuple(matched),
    )


class ComputedTensors(Mapping[str, onnx.TensorProto]):
    """Tensors by name, of which some are computed when they are read, and not kept.

    So the merged weights of a large model are in memory one at a time.
    """

    def __init__(
        self,
        tensors: Mapping[str, onnx.TensorProto],
        computed: Mapping[str, Callable[[], onnx.TensorProto]],
    ) -> None:
        self._tensors = tensors
        self._computed = computed

    def __getitem__(self, name: str) -> onnx.TensorProto:
        compute = self._computed.get(name)
        return self._tensors[name] if compute is None else compute()

    def __iter__(self) -> Iterator[str]:
        return iter({**self._tensors, **self._computed})

    def __len__(self) -> int:
        return len(self._tensors) + len(self._computed)


def _merged_tensor(
    adapter: Adapter, weight: onnx.TensorProto, a: Array, b: Array
) -> onnx.TensorProto:
    """Return a weight with its adapter."""
    return numpy_helper.from_array(adapter.added(array_of(weight), a, b), weight.name)


def _warn_of_other_bases(model: onnx.ModelProto, adapters: Sequence[Adapter]) -> None:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    others = [one.weight.module for one in adapters if not one.is_beside(tensors[one.weight.name])]
    if others:
        warn_user(
            f"The loaded adapters of {listed_names(others)} were trained beside weights with other"
            " values than this model's. Load them for the model that they were trained with, unless"
            " this one holds the same weights in other numbers, such as 4-bit integers."
        )


def listed(adapters: object) -> list[LoRA]:
    """Return the settings of one or several adapters; SettingError for anything else."""
    given = adapters if isinstance(adapters, (list, tuple)) else [adapters]
    listed = [one for one in given if isinstance(one, LoRA)]
    if not listed or len(listed) < len(given):
        raise SettingError(
            f"adapters is an onnxfit.LoRA(...), a list of them, or None, got {shortened(adapters)}."
        )
    return listed


def _require_opset(model: onnx.ModelProto) -> None:
    version = opset_of(model)
    if version is None or version < FIRST_OPSET:
        raise ModelError(
            f"Adapters need a model of opset {FIRST_OPSET} or later, and this one's is {version}:"
            " export the model again."
        )


def _refuse_taken_names(model: onnx.ModelProto, adapters: Sequence[Adapter]) -> None:
    taken = {tensor.name for tensor in model.graph.initializer}
    taken |= {value.name for value in model.graph.input}
    taken |= {name for node in model.graph.node for name in node.output}
    conflicts = [name for one in adapters for name in (one.a, one.b) if name in taken]
    if conflicts:
        raise ModelError(
            f"The model has tensors called {listed_names(conflicts)}, as those of its adapters"
            " would be. Train these by weights=['*.lora_A', '*.lora_B'] without adapters=, or"
            " rename them."
        )

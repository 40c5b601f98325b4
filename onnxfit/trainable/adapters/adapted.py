"""A file that adapters train: its training model, and the merged file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx

from onnxfit.checks import name_list, shortened
from onnxfit.errors import ModelError, SettingError, listed_names, warn_user
from onnxfit.graph.index import tensors_of
from onnxfit.graph.model import OnnxModel, with_references, with_tensors
from onnxfit.graph.shared_tensors import ComputedArray, Storable, array_of
from onnxfit.graph.subgraphs import read_by
from onnxfit.graph.tensors import nbytes
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.completion import opset_of
from onnxfit.load.normalize import inline_functions
from onnxfit.load.trainable import TrainableModel
from onnxfit.trainable.adapters.adapter import Adapter, Array
from onnxfit.trainable.adapters.branches import with_branches
from onnxfit.trainable.adapters.layers import adaptable_weights
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.adapters.peft import Matrices
from onnxfit.trainable.adapters.targets import match_adapters
from onnxfit.trainable.quantized.packed_weights import OPERATOR, SCALE, WEIGHT, ZERO_POINT
from onnxfit.trainable.quantized.packing import repacked

FIRST_OPSET = 7  # in which Add and Mul broadcast


@dataclass(frozen=True, eq=False)
class AdaptedModel(TrainableModel):
    """A file whose weights are frozen, with adapters that train.

    - `adapters`: the adapters. The export merges the adapters of float weights into the weights.
    """

    adapters: tuple[Adapter, ...]

    def selected(self, patterns: Sequence[str] | str | None) -> Sequence[str]:
        """Return the names of the adapters' matrices, followed by `patterns`."""
        adapted = [name for adapter in self.adapters for name in adapter.names]
        given = [] if patterns is None else name_list("weights", patterns)
        if given and all(pattern.startswith("!") for pattern in given):
            raise SettingError(
                f"weights={shortened(patterns)} only excludes weights. With adapters=, weights="
                " names the weights to train in addition to the adapters, such as"
                " weights='head.*'. To train the adapters alone, remove weights=."
            )
        return [*adapted, *(pattern for pattern in given if pattern not in adapted)]

    def initializer_values(self, arrays: Mapping[str, Array]) -> dict[str, Storable]:
        """Return a mapping from each initializer of the file to its value, with adapters merged."""
        rest = dict(arrays)
        merged: dict[str, Storable] = {}
        tensors = tensors_of(self.file.graph)
        for adapter in self.adapters:
            if not adapter.weight.is_packed:
                matrices = {name: rest.pop(name) for name in adapter.names}
                name = adapter.weight.name
                compute = partial(_merged, adapter, tensors[name], matrices)
                merged[name] = ComputedArray(compute, nbytes(tensors[name]))
        return {**super().initializer_values(rest), **merged}

    def export(self, arrays: Mapping[str, Array], *, compiled: bool = False) -> OnnxModel:
        """Return the file with W + s A B instead of W.

        Nothing can be added to packed integers. Their adapters stay in the file as nodes.
        """
        model = self._with_nodes(self.file.proto, arrays)
        return with_references(model, self.initializer_values(arrays), compiled=compiled)

    def inference_model(self, arrays: Mapping[str, Array]) -> OnnxModel:
        """Return a model with the inputs of `model` that computes what the exported file does."""
        model = self.file.proto if self.view is None else self.view
        model = self._with_nodes(model, arrays)
        return with_references(model, self.initializer_values(arrays), compiled=True)

    def _with_nodes(self, model: onnx.ModelProto, arrays: Mapping[str, Array]) -> onnx.ModelProto:
        """Return the file, or its view, with the adapters of packed integers as nodes."""
        packed = [one for one in self.adapters if one.weight.is_packed]
        return _beside(model, packed, arrays) if packed else model

    def requantized(self, arrays: Mapping[str, Array]) -> OnnxModel:
        """Return the file with W + s A B instead of W, packed again if W was packed.

        SettingError: an adapter belongs to integers that are not the weight of a MatMulNBits.
        """
        packed = [one for one in self.adapters if one.weight.is_packed]
        rest = _without_adapters(arrays, packed)
        changed = repacked_weights(inline_functions(self.file.proto), packed, arrays)
        return with_references(self.file.proto, {**self.initializer_values(rest), **changed})

    @property
    def why_python_only(self) -> str | None:
        """The reason for which no graph merges the adapters; None if one does."""
        if any(one.weight.is_packed for one in self.adapters):
            return "trains adapters of integer weights, which cannot be merged into the integers"
        if any(one.settings.dora or one.initial_factors for one in self.adapters):
            return (
                "trains adapters with dora=True or init='pissa', which only Python can merge into"
                " the weights"
            )
        return None

    def frozen_base(self, arrays: Mapping[str, Array]) -> OnnxModel:
        """Return the file with its other trained weights, but without the adapters."""
        rest = _without_adapters(arrays, self.adapters)
        tensors = tensors_of(self.file.graph)
        # The tensors are written as raw data, so that a host can find their bytes in the file.
        bases = {one.weight.name: array_of(tensors[one.weight.name]) for one in self.adapters}
        return with_references(self.file.proto, {**self.without_loss(rest), **bases})

    def add_export(self, op: GraphBuilder, trained: Collection[str]) -> dict[str, Value]:
        """Write W + s A B for each weight W, as `initializer_values` computes it."""
        tensors = tensors_of(self.file.graph)
        return {
            one.weight.name: one.add_merged(op, array_of(tensors[one.weight.name]))
            for one in self.adapters
        }

    def with_adapter_inputs(self, arrays: Mapping[str, Array]) -> OnnxModel:
        """Return the file with its adapters as inputs, whose default values are zeros.

        A caller may pass other matrices for them, of any rank, as `parameters` returns them.
        """
        self._require_no_magnitude()
        adapters = [one.unscaled for one in self.adapters]
        zeros = {
            name: np.zeros(shape, one.dtype)
            for one in adapters
            for name, shape in zip(one.names, one.shapes)
        }
        model = _beside(self.file.proto, adapters, zeros)
        for one in adapters:
            model.graph.input.extend(one.inputs)
        rest = _without_adapters(arrays, adapters)
        return with_references(model, super().initializer_values(rest))

    def parameters(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return a matrix for each input of `with_adapter_inputs`. B includes the scale s."""
        self._require_no_magnitude()
        saved = self.saved(arrays)
        return {
            name: matrix
            for one in self.adapters
            for name, matrix in one.input_values(saved[one.weight.module]).items()
        }

    def _require_no_magnitude(self) -> None:
        """Raise SettingError for DoRA, which also scales the layer's output."""
        scaled = [one.weight.name for one in self.adapters if one.settings.dora]
        if scaled:
            raise SettingError(
                f"The adapters of {listed_names(scaled)} have dora=True, but a file with adapters"
                " as inputs stores only A and B. Export the merged model, or train with"
                " dora=False."
            )

    def saved(self, arrays: Mapping[str, Array]) -> dict[str, Matrices]:
        """Return a mapping from each module to its adapter's matrices, for a file of adapters."""
        tensors = tensors_of(self.file.graph)
        return {
            one.weight.module: one.saved(arrays, tensors[one.weight.name]) for one in self.adapters
        }

    @property
    def constants(self) -> Mapping[str, Sequence[Array]]:
        """A mapping from module to the first A and B, for weights frozen without their product."""
        return {
            adapter.weight.module: adapter.initial_factors_in_peft
            for adapter in self.adapters
            if adapter.initial_factors
        }

    def require_constants(self, constants: Mapping[str, Sequence[Array]]) -> None:
        """Raise SettingError unless the adapters started from the same frozen weights.

        On another machine, singular vectors may differ in sign, and their product in rounding.
        """
        for adapter in self.adapters:
            module = adapter.weight.module
            if adapter.initial_factors is None:
                continue
            if not adapter.has_initial_product(constants.get(module, ())):
                raise SettingError(
                    f"The adapter of {module!r} was initialized with init='pissa' from"
                    " other singular vectors than the adapter in this checkpoint. Load the"
                    " checkpoint with Trainer.load(path), which restores its initial values."
                )

    def check(self, weights: Collection[str], statistics: Collection[str]) -> None:
        """Raise SettingError for a weight that is trained itself and has an adapter."""
        adapted = {adapter.weight.name for adapter in self.adapters}
        both = [name for name in weights if name in adapted]
        if both:
            raise SettingError(
                f"weights= and adapters= both train {listed_names(both)}. Remove these names from"
                " weights=, or exclude them from the adapters' target."
            )


def _beside(
    model: onnx.ModelProto, adapters: Sequence[Adapter], arrays: Mapping[str, Array]
) -> onnx.ModelProto:
    """Return the file, or its view, with the adapters as nodes and its functions inlined."""
    model = inline_functions(model)
    weights = {weight.name: weight for weight in adaptable_weights(model)}
    found = [replace(one, weight=weights[one.weight.name]) for one in adapters]
    return with_branches(model, found, arrays, dropout=False)


def adapt(file: OnnxModel, adapters: LoRA | Sequence[LoRA], seed: int) -> AdaptedModel:
    """Return the form in which adapters train a file.

    - `file`: the file as it would be trained without adapters.
    - `adapters`: the settings of one or several adapters.
    - `seed`: decides the first values of A.

    ModelError, SettingError or UnknownNameError: the model or a setting does not allow the
    adapters.
    """
    settings = listed(adapters)
    base = inline_functions(file.proto)
    _require_opset(base)
    matched = match_adapters(base, settings)
    _refuse_taken_names(base, matched)
    tensors = tensors_of(base.graph)
    pairs = [adapter.initialized(seed, tensors[adapter.weight.name]) for adapter in matched]
    chosen = [adapter for adapter, _ in pairs]
    arrays = {name: array for _, first in pairs for name, array in first.items()}
    _warn_of_other_bases(base, matched)
    return AdaptedModel(
        file=file,
        model=with_branches(_frozen(base, chosen), chosen, arrays, dropout=True),
        adapters=tuple(chosen),
    )


def _frozen(model: onnx.ModelProto, adapters: Sequence[Adapter]) -> onnx.ModelProto:
    """Return the model with the weights that stay frozen under the adapters."""
    tensors = tensors_of(model.graph)
    residuals = {
        one.weight.name: one.residual(array_of(tensors[one.weight.name]))
        for one in adapters
        if one.initial_factors is not None
    }
    return with_tensors(model, residuals) if residuals else model


def with_constants(adapters: Any, constants: Mapping[str, Sequence[Array]]) -> Any:
    """Return Trainer's `adapters` with the `constants` of a model as their start."""
    if isinstance(adapters, (list, tuple)):
        return [with_constants(one, constants) for one in adapters]
    if isinstance(adapters, LoRA) and adapters.init == "pissa" and adapters.matrices is None:
        return adapters.with_initial_factors(constants)
    return adapters


def _without_adapters(arrays: Mapping[str, Array], adapters: Sequence[Adapter]) -> dict[str, Array]:
    """Return the trained arrays that belong to no adapter."""
    matrices = {name for adapter in adapters for name in adapter.names}
    return {name: array for name, array in arrays.items() if name not in matrices}


def _merged(adapter: Adapter, weight: onnx.TensorProto, matrices: Mapping[str, Array]) -> Array:
    """Return the values of a weight with its adapter."""
    return adapter.merged(array_of(weight), matrices)


def _warn_of_other_bases(model: onnx.ModelProto, adapters: Sequence[Adapter]) -> None:
    tensors = tensors_of(model.graph)
    modules = [
        adapter.weight.module
        for adapter in adapters
        if not adapter.matches_base_weight(tensors[adapter.weight.name])
    ]
    if modules:
        warn_user(
            f"The loaded adapters of {listed_names(modules)} were trained for a model whose weights"
            " have other values. Load them into the model that they were trained with. If this"
            " model has the same weights in another precision, such as 4-bit integers, ignore this"
            " warning."
        )


def listed(adapters: object) -> list[LoRA]:
    """Return the settings of one or several adapters; SettingError for anything else."""
    given = adapters if isinstance(adapters, (list, tuple)) else [adapters]
    listed = [one for one in given if isinstance(one, LoRA)]
    if not listed or len(listed) < len(given):
        raise SettingError(
            "adapters must be an onnxfit.LoRA(...), a list of them, or None, got"
            f" {shortened(adapters)}."
        )
    return listed


def _require_opset(model: onnx.ModelProto) -> None:
    version = opset_of(model)
    if version is None or version < FIRST_OPSET:
        raise ModelError(
            f"Adapters need a model of opset {FIRST_OPSET} or later, got opset {version}. Export"
            " the model again with a later opset."
        )


def _refuse_taken_names(model: onnx.ModelProto, adapters: Sequence[Adapter]) -> None:
    taken = {tensor.name for tensor in model.graph.initializer}
    taken |= {value.name for value in model.graph.input}
    taken |= {name for node in model.graph.node for name in node.output}
    conflicts = [name for one in adapters for name in one.names if name in taken]
    if conflicts:
        raise ModelError(
            f"The model already has tensors called {listed_names(conflicts)}, the names of its"
            " adapters' matrices. Train these tensors with weights=['*.lora_A', '*.lora_B'] and"
            " without adapters=, or rename them."
        )


def repacked_weights(
    model: onnx.ModelProto, adapters: Sequence[Adapter], arrays: Mapping[str, Array]
) -> dict[str, onnx.TensorProto]:
    """Return the initializers of packed weights with their adapters merged, by name.

    - `model`: a model without functions.
    - `adapters`: the adapters of packed weights.
    - `arrays`: the arrays of all adapters, by name.

    SettingError: the integers of a weight cannot be packed again.
    """
    tensors = tensors_of(model.graph)
    changed: dict[str, onnx.TensorProto] = {}
    for one in adapters:
        nodes = [model.graph.node[reader.index] for reader in one.weight.readers]
        _require_own_tensors(model, one.weight.name, nodes)
        changed |= repacked(nodes[0], tensors, partial(one.merged, arrays=arrays))
    return changed


def _require_own_tensors(
    model: onnx.ModelProto, name: str, readers: Sequence[onnx.NodeProto]
) -> None:
    """Raise SettingError unless only MatMulNBits read the weight, and alike."""
    problem = ""
    if any(node.op_type != OPERATOR for node in readers):
        problem = f"only a {OPERATOR} can be packed again"
    elif len({tuple(node.input[WEIGHT : ZERO_POINT + 1]) for node in readers}) > 1:
        problem = "its layers have different scales"
    else:
        layers = {id(node) for node in readers}
        outside = (node for node in model.graph.node if id(node) not in layers)
        read_outside = {name for node in outside for name in read_by(node)}
        shared = read_outside.intersection(readers[0].input[SCALE : ZERO_POINT + 1]) - {""}
        if shared:
            problem = f"other layers read {listed_names(sorted(shared))}"
    if problem:
        raise SettingError(
            f"adapters='requantized' cannot merge the adapter of {name!r}: {problem}. Use"
            " adapters='merged', which keeps the adapter as nodes."
        )

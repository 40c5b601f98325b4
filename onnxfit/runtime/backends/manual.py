"""Training by hand: forward passes that await their backward pass, and updates with the caller's
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.graph.model import spec_of
from onnxfit.graph.spec import TensorSpec
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.backends.forward_pass import ForwardBackward, ForwardPass
from onnxfit.runtime.backends.shape_cache import ShapeCache, Specs
from onnxfit.runtime.backends.two_sessions import compile_passes
from onnxfit.runtime.session import BoundSession
from onnxfit.runtime.values import (
    array_of,
    dtype_and_shape,
    is_ort_value,
    unwrap_ort_value,
    wrap_ort_value,
)
from onnxfit.step.split import split_step

MAX_PENDING_PASSES = 256  # waiting forward passes; more were most likely forgotten
# Distance between the step numbers of two forward passes since the last update. It separates their
# random numbers from those of the next steps.
STEP_STRIDE = 1_000_003
T = TypeVar("T")


class PendingPass(NamedTuple):
    """A forward pass with a pending backward pass, and the object that `forward` returned."""

    returned: Any
    forward: ForwardPass


class ManualTraining:
    """`forward`, `backward` and `apply_gradients` of a trainer.

    - `backend`: a backend with `steps_by_hand`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._recipe = backend.recipe
        self._layout = backend.recipe.layout
        self._inputs = [spec_of(v) for v in self._recipe.model.graph.inputs]
        self._pending: list[PendingPass] = []  # the newest last
        # Forward passes since the last update. Each draws different random numbers.
        self._passes_since_update = 0
        self._passes: ShapeCache[ForwardBackward] = ShapeCache()
        self._inference: ShapeCache[BoundSession] = ShapeCache()

    def match_ort_values(self, inputs: Any) -> dict[str, Any] | None:
        """Return the values by input name if `inputs` has OrtValues; None if it has only arrays.

        `inputs` is a value, a list of values in the model's order, or a dict.
        """
        if isinstance(inputs, Mapping):
            values = dict(inputs)
        else:
            listed = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(listed) != len(self._inputs):
                return None
            values = {spec.name: value for spec, value in zip(self._inputs, listed)}
        return values if any(is_ort_value(value) for value in values.values()) else None

    def forward(self, inputs: Mapping[str, Any], training: bool, step: int, seed: int) -> Any:
        """Run a forward pass; see `Trainer.forward`.

        `inputs` maps names to arrays or OrtValues; if one is an OrtValue, the results are
        OrtValues. Random numbers depend on `step` and `seed`.
        """
        returns_ort_values = any(not isinstance(value, np.ndarray) for value in inputs.values())
        if returns_ort_values and self._layout.changes_graph:
            raise SettingError(
                "OrtValues need the batch on the first axis of every input and output, but this"
                " model has it on others. Pass arrays."
            )
        values = _unwrapped(inputs)
        shapes = {name: TensorSpec(name, *dtype_and_shape(value)) for name, value in values.items()}
        self._check_inputs(shapes)
        if not training:
            session = self._compiled(self._inference, shapes, self._compile_inference)
            session.run(values)
            outputs = {
                name: wrap_ort_value(value) if returns_ort_values else array_of(value)
                for name, value in session.outputs().items()
            }
            return _single(self._layout.outputs_in_file(outputs))
        if len(self._pending) >= MAX_PENDING_PASSES:
            raise SettingError(
                f"{MAX_PENDING_PASSES} forward passes are waiting for their backward passes, and"
                " each of them keeps tensors in memory. If no backward pass follows, use"
                " forward(inputs, training=False) or predict. apply_gradients discards waiting"
                " passes."
            )
        passes = self._compiled(self._passes, shapes, self._compile_passes)
        number = (step + STEP_STRIDE * self._passes_since_update) % 2**31
        forward = passes.forward(values, number, seed)
        self._passes_since_update += 1
        outputs = {
            name: wrap_ort_value(value) if returns_ort_values else _read_only(value)
            for name, value in forward.outputs.items()
        }
        returned = _single(self._layout.outputs_in_file(outputs))
        self._pending.append(PendingPass(returned, forward))
        return returned

    def backward(self, gradients: Any, of: Any = None) -> dict[str, dict[str, Any]]:
        """Return the gradients of inputs and weights; see `Trainer.backward`.

        `gradients` are the outputs' gradients, `of` is the object that the forward pass returned.
        """
        index = self._index_of(of)
        forward = self._pending[index].forward
        if forward.weights_version != self._backend.state.changes["weights"]:
            del self._pending[index]
            raise SettingError(
                "The weights have changed since this forward pass, so its gradients would be"
                " wrong. Run forward again."
            )
        output_gradients = self._output_gradients(gradients, forward)
        returns_ort_values = any(
            not isinstance(value, np.ndarray) for value in output_gradients.values()
        )
        computed = forward.passes.backward(forward, _unwrapped(output_gradients))
        del self._pending[index]
        results: dict[str, dict[str, Any]] = {"inputs": {}, "weights": {}}
        for name, value in computed.items():
            kind = "weights" if name in self._recipe.weights else "inputs"
            results[kind][name] = wrap_ort_value(value) if returns_ort_values else array_of(value)
        results["inputs"] = self._layout.inputs_in_file(results["inputs"])
        return results

    def apply(self, gradients: Mapping[str, Any], learning_rate: float, step: int) -> None:
        """Update once with gradients by weight; see `Trainer.apply_gradients`."""
        if not isinstance(gradients, Mapping):
            raise DataError(
                f"gradients must be a dict from weight to gradient, got {type(gradients).__name__}."
            )
        for name in gradients:
            if name not in self._recipe.weights:
                raise UnknownNameError("trained weight", name, self._recipe.weights)
        missing = [name for name in self._recipe.weights if name not in gradients]
        if missing:
            raise DataError(
                f"The gradients of {', '.join(missing)} are missing. Pass zeros for a weight that"
                " should not change."
            )
        values = {name: _as_value(gradient) for name, gradient in gradients.items()}
        for name, value in values.items():
            spec = spec_of(self._recipe.model.graph.initializers[name])
            _check_value(value, spec, f"The gradient of {name}")
        if self._backend.reduction is not None:
            values = self._backend.reduction.mean(values)
        penalised, _ = self._backend.add_penalty(values)
        self._backend.apply(penalised, learning_rate, step)
        self._pending.clear()  # they used the weights before the update
        self._passes_since_update = 0

    def _check_inputs(self, shapes: Specs) -> None:
        expected = {spec.name: spec for spec in self._inputs}
        for name in shapes:
            if name not in expected:
                raise UnknownNameError("input", name, expected)
        missing = [str(spec) for name, spec in expected.items() if name not in shapes]
        if missing:
            raise DataError(f"Inputs are missing: {'; '.join(missing)}.")
        for name, spec in shapes.items():
            shape = tuple(size for size in spec.shape or () if isinstance(size, int))
            if spec.dtype != expected[name].dtype or not expected[name].accepts(shape):
                raise DataError(f"Expected input {expected[name]}, got {spec}.")

    def _index_of(self, returned: Any) -> int:
        """Return the index of the pending pass that returned this object; None is the newest."""
        if not self._pending:
            raise SettingError(
                "No forward pass is waiting for a backward pass. Call forward(inputs) first; each"
                " forward pass allows one backward pass."
            )
        if returned is None:
            return len(self._pending) - 1
        for index, pending in enumerate(self._pending):
            if pending.returned is returned:
                return index
        raise SettingError(
            "of= must be the object that forward returned, and each can be used once. This object"
            " was used before, was discarded by an update, or is another object. Run forward"
            " again."
        )

    def _output_gradients(self, gradients: Any, forward: ForwardPass) -> dict[str, Any]:
        """Return the gradients by output, checked against the outputs of the forward pass."""
        expected = forward.passes.graphs.output_gradients
        if not isinstance(gradients, Mapping):
            if len(expected) != 1:
                raise DataError(
                    f"The model has {len(expected)} outputs with gradients"
                    f" ({', '.join(expected)}). Pass a dict from output to gradient."
                )
            gradients = {next(iter(expected)): gradients}
        for name in gradients:
            if name in forward.outputs and name not in expected:
                raise DataError(
                    f"Output {name!r} cannot have a gradient, because it is not differentiable"
                    " with respect to any weight or input. Remove it from the gradients."
                )
            if name not in expected:
                raise UnknownNameError("output", name, expected)
        missing = [name for name in expected if name not in gradients]
        if missing:
            raise DataError(
                f"The gradients of the outputs {', '.join(missing)} are missing. Pass None for an"
                " output whose gradient is zero."
            )
        checked = {}
        for name in expected:
            dtype, shape = dtype_and_shape(forward.outputs[name])
            gradient = gradients[name]
            if gradient is None:
                checked[name] = np.zeros(shape, dtype)
                continue
            value, moved = _as_value(gradient), self._layout.moved_outputs.get(name)
            if moved is not None:
                shape = moved.in_file(np.broadcast_to(0, shape)).shape
            _check_value(value, TensorSpec(name, dtype, shape), f"The gradient of output {name}")
            if moved is not None:
                value = np.ascontiguousarray(moved.in_view(value))
            checked[name] = value
        return checked

    def _compiled(
        self, cache: ShapeCache[T], shapes: Specs, compile_for: Callable[[Specs], T]
    ) -> T:
        """Return the object of `cache` for inputs of these shapes, compiled if necessary."""
        signature = tuple(shapes.values())
        compiled = cache.get(signature)
        if compiled is None:
            compiled = cache.compile(
                signature, shapes, lambda: self._backend.without_sizes(shapes), compile_for
            )
        return compiled

    def _compile_passes(self, shapes: Specs) -> ForwardBackward:
        recipe = self._recipe
        backend = self._backend
        float_inputs = [spec.name for spec in self._inputs if spec.dtype.kind == "f"]
        graphs = split_step(
            recipe,
            shapes,
            list(recipe.outputs),
            [*recipe.weights, *float_inputs],
        )
        return compile_passes(
            graphs, backend.state, backend.device, backend.threads, recipe.gradient
        )

    def _compile_inference(self, shapes: Specs) -> BoundSession:
        graph = self._backend.graph("predict", shapes)
        return self._backend.bind("predict", graph, per_run_inputs=list(shapes))


def _unwrapped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with internal OrtValues instead of public ones."""
    return {
        name: value if isinstance(value, np.ndarray) else unwrap_ort_value(value)
        for name, value in values.items()
    }


def _as_value(gradient: Any) -> Any:
    """Return a gradient as an array or an internal OrtValue."""
    return unwrap_ort_value(gradient) if is_ort_value(gradient) else np.asarray(gradient)


def _check_value(value: Any, spec: TensorSpec, subject: str) -> None:
    dtype, shape = dtype_and_shape(value)
    if dtype != spec.dtype or shape != spec.shape:
        fix = f" Cast it: gradient.astype({str(spec.dtype)!r})." if shape == spec.shape else ""
        raise DataError(
            f"{subject} must be {spec.dtype}{list(spec.shape or ())}, got"
            f" {dtype}{list(shape)}.{fix}"
        )


def _read_only(value: Any) -> Any:
    """Return an OrtValue as a read-only array: the backward pass may read its memory."""
    array = array_of(value)
    array.flags.writeable = False
    return array


def _single(outputs: dict[str, Any]) -> Any:
    """Return the only output itself; several outputs stay a dict."""
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs

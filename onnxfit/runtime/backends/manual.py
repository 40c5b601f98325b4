"""Training by hand: forward passes that wait for their backward passes, and updates by whatever
gradients one brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.graph.model import spec_of
from onnxfit.graph.spec import TensorSpec
from onnxfit.runtime.backends.backend import Specs
from onnxfit.runtime.backends.forward_backward import ForwardBackwardBackend
from onnxfit.runtime.backends.forward_pass import Pass, Passes
from onnxfit.runtime.backends.two_sessions import make_passes
from onnxfit.runtime.session import BoundSession
from onnxfit.runtime.values import array_of, inner_value, is_ort_value, look, public_value
from onnxfit.step import split

MAX_PENDING_PASSES = 256  # forward passes that wait; more are most likely forgotten
STEP_STRIDE = 1_000_003


class ManualTraining:
    """The forward passes of a trainer that wait for their backward passes, the newest last."""

    def __init__(self, backend: ForwardBackwardBackend) -> None:
        self._backend = backend
        self._recipe = backend.recipe
        self._inputs = [spec_of(v) for v in self._recipe.model.graph.inputs]
        self._waiting: list[tuple[Any, Pass]] = []  # what the caller got, and the pass
        # forward passes since the last update, each of which draws other random numbers
        self._since = 0

    def named(self, inputs: Any) -> dict[str, Any] | None:
        """OrtValues by the names of the inputs they are for;

        None where there are none, but arrays.
        """
        names = [spec.name for spec in self._inputs]
        if isinstance(inputs, Mapping):
            found = dict(inputs)
        else:
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            found = (
                dict(zip(names, values))
                if len(values) == len(names)
                else dict.fromkeys(range(len(values)))
            )
        return found if any(is_ort_value(value) for value in found.values()) else None

    def forward(self, inputs: Mapping[str, Any], training: bool, step: int, seed: int) -> Any:
        """Outputs for named inputs, as OrtValues if one of these is one; see Trainer.forward."""
        native = any(not isinstance(value, np.ndarray) for value in inputs.values())
        values = {
            name: value if isinstance(value, np.ndarray) else inner_value(value)
            for name, value in inputs.items()
        }
        shapes = {name: TensorSpec(name, *look(value)) for name, value in values.items()}
        self._check(shapes)
        signature = ", ".join(map(str, shapes.values()))
        if not training:
            runner = self._backend.compiled("inference", signature, lambda: shapes, self._inference)
            runner.run(values)
            return _only(
                {
                    name: public_value(v) if native else array_of(v)
                    for name, v in runner.outputs().items()
                }
            )
        if len(self._waiting) >= MAX_PENDING_PASSES:
            raise SettingError(
                f"{MAX_PENDING_PASSES} forward passes wait for their backward passes, and each"
                " keeps what those need. Where none is to come, call forward(inputs,"
                " training=False), or predict; apply_gradients forgets what waits."
            )
        passes: Passes = self._backend.compiled("passes", signature, lambda: shapes, self._passes)
        forward = passes.forward(values, (step + STEP_STRIDE * self._since) % 2**31, seed)
        self._since += 1
        outputs = {
            name: public_value(value) if native else _protected(value)
            for name, value in forward.outputs.items()
        }
        self._waiting.append((_only(outputs), forward))
        return self._waiting[-1][0]

    def backward(self, gradients: Any, of: Any = None) -> dict[str, dict[str, Any]]:
        """Gradients of inputs and weights, from gradients of the outputs; see Trainer.backward."""
        place = self._place(of)
        _, forward = self._waiting[place]
        if forward.weights != self._backend.state.changes["weights"]:
            del self._waiting[place]
            raise SettingError(
                "The weights have changed since this forward pass, so that its gradients would be"
                " wrong: run forward again."
            )
        arriving = self._arriving(gradients, forward)
        native = any(not isinstance(value, np.ndarray) for value in arriving.values())
        found = forward.backward.backward(
            forward,
            {
                name: value if isinstance(value, np.ndarray) else inner_value(value)
                for name, value in arriving.items()
            },
        )
        del self._waiting[place]
        handed = {
            name: public_value(value) if native else array_of(value)
            for name, value in found.items()
        }
        return {
            "inputs": {
                name: value for name, value in handed.items() if name not in self._recipe.weights
            },
            "weights": {
                name: value for name, value in handed.items() if name in self._recipe.weights
            },
        }

    def apply(self, gradients: Mapping[str, Any], learning_rate: float, step: int) -> None:
        """One update; see Trainer.apply_gradients."""
        if not isinstance(gradients, Mapping):
            raise DataError(
                f"Gradients are a dict weight -> gradient, got {type(gradients).__name__}."
            )
        for name in gradients:
            if name not in self._recipe.weights:
                raise UnknownNameError("trained weight", name, self._recipe.weights)
        missing = [name for name in self._recipe.weights if name not in gradients]
        if missing:
            raise DataError(
                f"There is no gradient of {', '.join(missing)}. A weight that is to stay gets one"
                " of zeros."
            )
        values = {name: _value(gradient) for name, gradient in gradients.items()}
        for name, value in values.items():
            _fits(
                value,
                spec_of(self._recipe.model.graph.initializers[name]),
                f"The gradient of {name}",
            )
        penalised, _ = self._backend.penalised(values)
        self._backend.apply(penalised, learning_rate, step)
        self._waiting.clear()  # the weights they saw are no longer there
        self._since = 0

    def _check(self, shapes: Specs) -> None:
        expected = {spec.name: spec for spec in self._inputs}
        for name in shapes:
            if name not in expected:
                raise UnknownNameError("input", name, expected)
        missing = [str(spec) for name, spec in expected.items() if name not in shapes]
        if missing:
            raise DataError(f"There is no input {'; '.join(missing)}.")
        for name, spec in shapes.items():
            assert spec.shape is not None
            if spec.dtype != expected[name].dtype or not expected[name].accepts(spec.shape):  # type: ignore[arg-type]
                raise DataError(f"Expected {expected[name]}, got {spec}.")

    def _place(self, of: Any) -> int:
        if not self._waiting:
            raise SettingError(
                "No forward pass waits for a backward pass: call forward(inputs) first; each is"
                " good for one backward."
            )
        if of is None:
            return len(self._waiting) - 1
        for place, (outputs, _) in enumerate(self._waiting):
            if outputs is of:
                return place
        raise SettingError(
            "of= is not what a waiting forward pass returned: pass the very object, and each one"
            " once. Passes from before an update are gone."
        )

    def _arriving(self, gradients: Any, forward: Pass) -> dict[str, Any]:
        """Output -> gradient, checked against the outputs."""
        wanted = forward.backward.graphs.arriving
        if not isinstance(gradients, Mapping):
            if len(wanted) != 1:
                raise DataError(
                    f"The model has {len(wanted)} outputs with gradients ({', '.join(wanted)}):"
                    " pass a dict output -> gradient."
                )
            gradients = {next(iter(wanted)): gradients}
        for name in gradients:
            if name in forward.outputs and name not in wanted:
                raise DataError(
                    f"Output {name!r} takes no gradient: no weight or input changes it smoothly."
                    " Leave it out."
                )
            if name not in wanted:
                raise UnknownNameError("output", name, wanted)
        missing = [name for name in wanted if name not in gradients]
        if missing:
            raise DataError(f"There is no gradient of {', '.join(missing)}. None stands for zeros.")
        arriving = {}
        for name in wanted:
            dtype, shape = look(forward.outputs[name])
            value = _value(np.zeros(shape, dtype) if gradients[name] is None else gradients[name])
            _fits(value, TensorSpec(name, dtype, shape), f"The gradient of output {name}")
            arriving[name] = value
        return arriving

    def _passes(self, shapes: Specs) -> Passes:
        recipe, backend = self._recipe, self._backend
        floats = [spec.name for spec in self._inputs if spec.dtype.kind == "f"]
        graphs = split.passes(
            recipe,
            shapes,
            [v.name or "" for v in recipe.model.graph.outputs],
            [*recipe.weights, *floats],
        )
        return make_passes(graphs, backend.state, backend.device, backend.threads, recipe.gradient)

    def _inference(self, shapes: Specs) -> BoundSession:
        return self._backend.compile(
            "predict", self._backend.graph("predict", shapes), given=list(shapes), reuse=False
        )


def _value(gradient: Any) -> Any:
    """A gradient as an array or an OrtValue."""
    return np.asarray(gradient) if not is_ort_value(gradient) else inner_value(gradient)


def _fits(value: Any, spec: TensorSpec, what: str) -> None:
    dtype, shape = look(value)
    if dtype != spec.dtype or shape != spec.shape:
        cure = f" Cast it: gradient.astype({str(spec.dtype)!r})." if shape == spec.shape else ""
        raise DataError(
            f"{what} is {spec.dtype}{list(spec.shape or ())}, got {dtype}{list(shape)}.{cure}"
        )


def _protected(value: Any) -> Any:
    """A view that cannot be written through: the backward pass may read it."""
    array = array_of(value)
    array.flags.writeable = False
    return array


def _only(found: dict[str, Any]) -> Any:
    return next(iter(found.values())) if len(found) == 1 else found

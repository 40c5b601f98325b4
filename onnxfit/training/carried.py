"""States that pass from one batch to the next: an output of one batch is an input of the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.checks import shortened
from onnxfit.data.batch import Batch
from onnxfit.data.convert import as_array, in_dtype, rows_first
from onnxfit.data.loader import Loader
from onnxfit.errors import CheckpointError, DataError, SettingError, UnknownNameError
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.batch_axis import BatchLayout
from onnxfit.step.recipe import Recipe

Array = npt.NDArray[Any]

CARRIED = "carried"  # the key of the states among the sums of an unfinished epoch


def with_states(layout: BatchLayout, states: Mapping[str, str] | None) -> BatchLayout:
    """Return the layout in which the outputs that are states have the layout of their inputs.

    - `states`: output -> input, the argument `state_outputs` of Trainer.

    UnknownNameError: an output or input does not exist. SettingError: a state does not fit its
    input.
    """
    if states is None:
        return layout
    is_mapping = isinstance(states, Mapping)
    if not is_mapping or not all(isinstance(n, str) for n in (*states, *states.values())):
        raise SettingError(
            f"state_outputs must map names of outputs to names of inputs, got {shortened(states)}."
        )
    if not states:
        return layout
    if layout.is_whole:
        raise SettingError(
            "state_outputs needs inputs with a common batch, whose rows go on in the next batch."
            f" This model has none: {'; '.join(layout.lines())}."
        )
    outputs = dict(layout.outputs)
    for output, name in states.items():
        if output not in outputs:
            raise UnknownNameError("output of the model", output, outputs)
        if name not in layout.inputs:
            raise UnknownNameError("input of the model", name, layout.inputs)
        written, read = outputs[output].spec, layout.inputs[name].spec
        if list(states.values()).count(name) > 1:
            raise SettingError(f"state_outputs has several outputs for the input {name!r}.")
        if not _can_carry(written, read):
            raise SettingError(
                f"The state {written} does not fit the input {read}. A state needs the type and the"
                " sizes of its input."
            )
        spec = replace(written, batch_axis=read.batch_axis)
        if outputs[output].evidence == "given" and written.batch_axis != read.batch_axis:
            raise SettingError(
                f"batch_axes has another axis for the state {output!r} than for its input {name!r},"
                f" whose batch axis is {read.batch_axis}. Leave the output out of batch_axes."
            )
        reason = f"the next {name!r}"
        outputs[output] = replace(outputs[output], spec=spec, reason=reason, evidence="name")
    return replace(layout, outputs=outputs)


def _can_carry(written: TensorSpec, read: TensorSpec) -> bool:
    if written.dtype != read.dtype or written.shape is None or read.shape is None:
        return False
    pairs = list(zip(written.shape, read.shape))
    numbers = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
    return len(written.shape) == len(read.shape) and all(a == b for a, b in numbers)


def require_order(recipe: Recipe, data: Any, shuffle: bool) -> None:
    """Raise SettingError if rows that continue in the next batch would be shuffled."""
    if recipe.state_outputs and (data.shuffle if isinstance(data, Loader) else shuffle):
        raise SettingError(
            "With state_outputs, each row goes on in the same row of the next batch, so batches"
            " must keep their order. Pass shuffle=False."
        )


class CarriedStates:
    """The states between two batches of one training, evaluation or prediction.

    A sequence begins with the initial state: zeros, or the value of the input in `fixed_inputs`.

    - `recipe`: its `state_outputs` maps outputs to inputs.
    - `fixed`: input -> initial value.

    DataError or SettingError: an initial value does not fit, or sizes are unknown.
    """

    def __init__(self, recipe: Recipe, fixed: Mapping[str, Any]) -> None:
        self._layout = recipe.layout
        self._states = recipe.state_outputs
        self._specs = {name: recipe.layout.inputs[name].spec for name in self._states.values()}
        self._initial = {name: _initial(spec, fixed) for name, spec in self._specs.items()}
        self.arrays: dict[str, Array] = {}  # empty where a sequence begins
        self._previous: dict[str, Array] = {}

    def add_to(self, batch: Batch) -> Batch:
        """Return the batch with the states as inputs. DataError: it has another number
        of rows than the states."""
        if not self._states or not batch.rows:
            return batch
        added = []
        for name, spec in self._specs.items():
            array = self.arrays.get(name)
            if array is None:
                array = self._begin(name, batch.rows)
            elif spec.has_rows and len(array) != batch.rows:
                raise DataError(
                    f"The batch has {batch.rows} rows, but the state {name!r} goes on with"
                    f" {len(array)} rows of the batch before. Make batches of one size, such as"
                    " with drop_last=True, or call reset_states() where a sequence begins."
                )
            added.append((name, array))
        parts = [batch.signature, *(f"{n}:{a.dtype.str}{a.shape}" for n, a in added)]
        return replace(batch, signature=";".join(parts), scalars=(*batch.scalars, *added))

    def take(self, outputs: Mapping[str, Array]) -> None:
        """Keep the states among the outputs of a batch, which have the layout of the view."""
        self._previous = self.arrays
        self.arrays = {
            name: outputs[output]
            if self._specs[name].has_rows
            else self._layout.outputs[output].in_file(outputs[output])
            for output, name in self._states.items()
        }

    def revert(self) -> None:
        """Return to the states before the last batch."""
        self.arrays = self._previous

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Return to the initial states: of all rows, or of some rows of the next batch."""
        if rows is None:
            self.arrays = {}
            return
        index = np.asarray(rows)
        if not index.size:
            return
        changed = {}
        for name, array in self.arrays.items():
            if not self._specs[name].has_rows:
                raise SettingError(
                    f"reset_states(rows) needs states with rows, but {name!r} has none. Call"
                    " reset_states() for the whole state."
                )
            try:
                if index.ndim != 1:
                    raise IndexError
                array = array.copy()
                array[index] = self._begin(name, len(array))[index]
            except IndexError:
                raise SettingError(
                    f"reset_states(rows) needs rows of a batch of {len(array)}, as numbers or as a"
                    f" mask, got {shortened(rows)}."
                ) from None
            changed[name] = array
        self.arrays = changed

    def state_dict(self) -> dict[str, Array]:
        """Return the states, for a checkpoint."""
        return dict(self.arrays)

    def load_state_dict(self, state: Any) -> None:
        """Restore the states of a checkpoint. CheckpointError: they do not fit the model."""
        arrays: dict[str, Any] = dict(state) if isinstance(state, Mapping) else {"": None}
        for name in arrays.keys() | (self._specs.keys() if arrays else set()):
            if name not in self._specs or not _is_state(arrays.get(name), self._specs[name]):
                raise CheckpointError(
                    "The states between batches in the checkpoint do not fit the model, whose"
                    f" states are {'; '.join(map(str, self._specs.values()))}."
                )
        self.arrays = arrays

    def _begin(self, name: str, rows: int) -> Array:
        """Return the initial state for a batch."""
        initial, spec = self._initial[name], self._specs[name]
        if not spec.has_rows:
            return initial
        if len(initial) not in (1, rows):
            raise DataError(
                f"fixed_inputs has a first state {name!r} for {len(initial)} rows, but a batch has"
                f" {rows} rows. Pass a state for one row, or a number."
            )
        return np.array(np.broadcast_to(initial, (rows, *initial.shape[1:])))


def _is_state(array: Any, spec: TensorSpec) -> bool:
    """Return whether an array, rows first, is a state."""
    is_array = isinstance(array, np.ndarray) and array.dtype == spec.dtype
    return is_array and spec.rows_first().accepts(array.shape)


def _initial(spec: TensorSpec, fixed: Mapping[str, Any]) -> Array:
    """Return the initial state, rows first; one row stands for any number."""
    value = in_dtype(as_array(fixed.get(spec.name, 0), f"fixed_inputs[{spec.name!r}]"), spec)
    if value.shape:
        if not spec.accepts(value.shape):
            raise DataError(
                f"fixed_inputs[{spec.name!r}] has shape {value.shape}, but the input is {spec}."
            )
        return np.ascontiguousarray(rows_first(value, spec))
    shape = list(spec.rows_first().shape or ())
    if spec.has_rows:
        shape[0] = 1
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) < len(shape):
        raise SettingError(
            f"The first state {spec} has sizes that are no numbers. Pass it, for one row:"
            f" fixed_inputs={{{spec.name!r}: array}}."
        )
    return np.full(sizes, value)

"""The state of a training as a list of tensors, and its safetensors file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from onnxfit.errors import CheckpointError, listed_names
from onnxfit.files import read_regular_file, require_path
from onnxfit.graph import names
from onnxfit.graph.tensors import read_safetensors
from onnxfit.step.recipe import Recipe
from onnxfit.training.state import COUNTERS

Array = npt.NDArray[Any]
COUNTER = "counter"  # prefix of the counters' names
LEARNING_RATE = "learning_rate"
MAX_HEADER_BYTES = 1 << 26


@dataclass(frozen=True)
class StateEntry:
    """One tensor of a state.

    - `name`: its name in the file, and as an input of the step.
    - `kind`: "weight", "slot", "statistic" or "counter".
    - `of`: the weight of a slot; None for other kinds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    of: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def state_entries(recipe: Recipe, state: Mapping[str, Mapping[str, Any]]) -> list[StateEntry]:
    """Return the entries of a state: weights, slots, statistics, counters.

    - `state`: the result of `Trainer.get_state`.
    """
    owners = {
        names.slot(weight, slot): weight for weight, own in recipe.slots.items() for slot in own
    }
    entries = []
    for name, array in {**state["weights"], **state["slots"]}.items():
        kind = "slot" if name in state["slots"] else "weight"
        if name in recipe.statistics:
            kind = "statistic"
        entries.append(StateEntry(name, str(array.dtype), array.shape, kind, owners.get(name)))
    prefix = counter_prefix(entry.name for entry in entries)
    counters = dict.fromkeys(COUNTERS, "int64")
    if state["counters"][LEARNING_RATE] is not None:
        counters[LEARNING_RATE] = "float64"
    for name, dtype in counters.items():
        entries.append(StateEntry(f"{prefix}/{name}", dtype, (), "counter"))
    return entries


def counter_prefix(tensors: Iterable[str]) -> str:
    """Return a prefix for the counters' names that no name in `tensors` has."""
    used = {name.partition("/")[0] for name in tensors}
    return names.unused(COUNTER, used.__contains__)


def state_arrays(
    entries: Sequence[StateEntry], state: Mapping[str, Mapping[str, Any]]
) -> dict[str, Array]:
    """Return a dict name -> array from a state of `Trainer.get_state`."""
    arrays = {}
    tensors = {**state["weights"], **state["slots"]}
    for entry in entries:
        value = tensors.get(entry.name)
        if entry.kind == "counter":
            value = np.array(state["counters"][entry.name.rpartition("/")[2]], entry.dtype)
        arrays[entry.name] = np.ascontiguousarray(value).reshape(entry.shape)
    return arrays


def read_state(
    path: str | os.PathLike[str], entries: Sequence[StateEntry]
) -> dict[str, dict[str, Any]]:
    """Return the state in a safetensors file, as `Trainer.get_state` returns it.

    - `entries`: exactly the tensors that the file must have.

    CheckpointError: the file has other contents. A wrong size is found before the file is read.
    """
    require_path(path)
    name = os.fspath(path)
    expected = sum(entry.nbytes for entry in entries)
    try:
        size = Path(path).stat().st_size
        if not expected <= size <= expected + MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{name!r} has {size} bytes, but the tensors of this training need {expected} bytes"
                " and a header. It is the state of another model or optimizer, or is incomplete."
            )
        arrays = read_safetensors(read_regular_file(Path(path)))
    except FileNotFoundError:
        raise CheckpointError(f"The file {name!r} does not exist.") from None
    except CheckpointError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name!r} is not a complete safetensors file: {error}") from None
    _require_entries(name, arrays, entries)
    counters: dict[str, Any] = {LEARNING_RATE: None, "window": 0}
    state: dict[str, dict[str, Any]] = {"weights": {}, "slots": {}, "counters": counters}
    for entry in entries:
        array = arrays[entry.name]
        if entry.kind == "counter":
            counters[entry.name.rpartition("/")[2]] = array.item()
        else:
            state["slots" if entry.kind == "slot" else "weights"][entry.name] = array
    return state


def _require_entries(path: str, arrays: Mapping[str, Array], entries: Sequence[StateEntry]) -> None:
    """Raise CheckpointError unless the arrays match the entries in name, type and shape."""
    expected = {entry.name: entry for entry in entries}
    missing = [name for name in expected if name not in arrays]
    surplus = [name for name in arrays if name not in expected]
    if missing or surplus:
        problem = f"lacks {listed_names(missing)}" if missing else f"has {listed_names(surplus)}"
        raise CheckpointError(
            f"{path!r} {problem}, but this training has {listed_names(list(expected))}. It is the"
            " state of another model or optimizer."
        )
    for name, entry in expected.items():
        array = arrays[name]
        if array.shape != entry.shape or str(array.dtype) != entry.dtype:
            raise CheckpointError(
                f"{path!r} has {name!r} as {array.dtype}{list(array.shape)}. Expected"
                f" {entry.dtype}{list(entry.shape)}."
            )

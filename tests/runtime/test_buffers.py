"""The state in two sets of buffers: what can be undone, what is set, and fused tensors."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from onnxfit.errors import DataError
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import CPU

Array = np.ndarray


def array(*values: float) -> Array:
    return np.array(values, np.float32)


def new(
    fused: dict[str, list[str]] | None = None, in_place: Collection[str] = ()
) -> DoubleBufferedState:
    groups = {"weights": {"w": array(1, 2), "v": array(3)}, "statistics": {"mean": array(4)}}
    return DoubleBufferedState(groups, CPU, {"constant": array(9)}, fused, in_place=in_place)


def step(state: DoubleBufferedState, **values: Array) -> None:
    """Write every tensor of the groups of these, as a step does, then swap."""
    groups = {state.group(name) for name in values}
    for name in state:
        if state.group(name) in groups:
            value = values.get(name, state.get(name))
            state.buffer(name, current=False).write(value)
    state.swap(sorted(groups))


def held(state: DoubleBufferedState) -> dict[str, list[float]]:
    return {name: state.get(name).tolist() for name in state}


FIRST = {"w": [1, 2], "v": [3], "mean": [4]}


def test_a_step_is_undone_once() -> None:
    state = new()
    assert held(state) == FIRST
    step(state, w=array(5, 6))
    assert held(state) == {**FIRST, "w": [5, 6]}
    step(state, w=array(7, 8))
    for _ in range(2):
        state.revert(["weights", "statistics"])
        assert held(state) == {**FIRST, "w": [5, 6]}


def test_groups_are_undone_separately() -> None:
    state = new()
    step(state, w=array(5, 6), mean=array(7))
    state.revert(["statistics"])
    assert held(state) == {**FIRST, "w": [5, 6]}
    state.revert(["weights", "statistics"])
    assert held(state) == FIRST


def test_what_is_committed_is_not_undone() -> None:
    state = new()
    step(state, w=array(5, 6), mean=array(7))
    state.commit(["weights"])
    state.revert(["weights", "statistics"])
    assert held(state) == {**FIRST, "w": [5, 6]}


def test_after_a_tensor_was_set_nothing_is_undone() -> None:
    state = new()
    step(state, w=array(5, 6), mean=array(7))
    state.set({"v": array(8)})
    state.revert(["weights", "statistics"])
    assert held(state) == {"w": [5, 6], "v": [8], "mean": [7]}


def test_versions_grow_with_every_change() -> None:
    state = new()
    versions, changes = [state.version], [dict(state.changes)]
    step(state, w=array(5, 6))
    versions, changes = [*versions, state.version], [*changes, dict(state.changes)]
    state.revert(["weights"])
    versions, changes = [*versions, state.version], [*changes, dict(state.changes)]
    state.set({"mean": array(1)})
    versions, changes = [*versions, state.version], [*changes, dict(state.changes)]
    assert versions == sorted(set(versions))
    assert [c["weights"] for c in changes] == [0, 1, 2, 2]
    assert [c["statistics"] for c in changes] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"v": array(8), "w": array(1)}, r"w must be float32\[2\], got float32\[1\]"),
        ({"v": array(8), "w": np.array(["a", "b"])}, r"w must be float32\[2\], got <U1\[2\]"),
        ({"v": array(8), "u": array(1)}, "There is no weight 'u'. The weights are w, v, mean"),
    ],
)
def test_what_does_not_fit_changes_nothing(arrays: dict[str, Array], message: str) -> None:
    state = new()
    version = state.version
    with pytest.raises(DataError, match=message):
        state.set(arrays)
    assert held(state) == FIRST
    assert state.version == version


def test_what_is_read_is_a_copy() -> None:
    state = new()
    state.get("w")[:] = 0
    assert held(state) == FIRST


def test_a_constant_has_one_buffer_and_is_not_iterated_over() -> None:
    state = new()
    assert state.buffer("constant") is state.buffer("constant", current=False)
    assert "constant" in state
    assert [*state] == ["w", "v", "mean"]
    assert state.group("constant") == state.group("unknown") == ""


def test_members_of_a_fused_tensor_lie_one_after_the_other_in_both_sets() -> None:
    state = new({"both": ["w", "v"]})
    assert held(state) == FIRST
    for _ in range(3):
        values = state.get("both") + 10
        state.buffer("both", current=False).write(values)
        state.swap(["weights"])
        assert state.get("both").tolist() == values.tolist()
        assert [*state.get("w"), *state.get("v")] == values.tolist()
    state.revert(["weights"])
    assert held(state) == {"w": [21, 22], "v": [23], "mean": [4]}
    state.set({"v": array(5)})
    assert state.get("both").tolist() == [21, 22, 5]


def test_a_group_in_place_has_one_set_of_buffers_and_is_never_undone() -> None:
    state = new({"both": ["w", "v"]}, in_place=["weights"])
    for name in ("w", "v", "both"):
        assert state.is_in_place(name)
        other = state.buffer(name, current=False)
        assert np.shares_memory(state.buffer(name).array, other.array)
    assert not state.is_in_place("mean")
    step(state, w=array(5, 6), mean=array(7))
    changes = dict(state.changes)
    state.revert(["weights"])
    assert state.changes == changes
    state.revert(["weights", "statistics"])
    assert held(state) == {**FIRST, "w": [5, 6]}


def test_members_of_a_fused_tensor_begin_at_the_alignment() -> None:
    groups = {"weights": {"w": array(1, 2), "v": array(3), "u": array(4, 5, 6, 7, 8)}}
    state = DoubleBufferedState(groups, CPU, fused={"all": ["w", "v", "u"]}, alignment=4)
    assert held(state) == {"w": [1, 2], "v": [3], "u": [4, 5, 6, 7, 8]}
    assert state.get("all").tolist() == [1, 2, 0, 0, 3, 0, 0, 0, 4, 5, 6, 7, 8, 0, 0, 0]

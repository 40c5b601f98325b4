"""CUDA graphs, and calls of CUDA by several threads, without a GPU: the CPU is called cuda."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import Trainer
from onnxfit.errors import StepError
from onnxfit.graph import names
from onnxfit.runtime import cuda_graphs, session
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.cuda_graphs import is_capturable
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.values import copied_arrays, ort_value
from tests.helpers import classification
from tests.models import mlp

CUDA = Device("cuda", 0)
HEAD = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) '
GRAPHS = {
    "dense": (True, "{ y = Relu(x) }"),
    "through another node": (True, "{ a = Neg(x) y = Abs(a) }"),
    "32 tensors": (True, "{ a = Concat<axis = 0>(" + ", ".join(["x"] * 32) + ") y = Relu(x) }"),
    "33 tensors": (False, "{ a = Concat<axis = 0>(" + ", ".join(["x"] * 33) + ") y = Relu(x) }"),
    "an operator that waits": (False, "{ a = NonZero(x) y = Relu(x) }"),
    "another domain": (False, "{ y = com.microsoft.Gelu(x) }"),
    "a constant": (False, "<float[2] c = {1, 2}> { y = Neg(c) }"),
    "a branch": (
        False,
        """<bool yes = {1}> { y = If (yes) <then_branch = a () => (float[2] p) { p = Relu(x) },
                                      else_branch = b () => (float[2] q) { q = Neg(x) }> }""",
    ),
}
X, Y = classification()


@pytest.fixture
def captured(called_cuda: None, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of each compiled session whether it makes CUDA graphs."""
    noted: list[bool] = []

    def compile_and_note(*args: Any, captures: bool = False, **named: Any) -> Any:
        noted.append(captures)
        return compile_model(*args, **named)

    monkeypatch.setattr(session, "compile_model", compile_and_note)
    return noted


def trainer(device: str, **settings: Any) -> Trainer:
    return Trainer(
        mlp(), loss="cross_entropy", optimizer="adam", device=device, gradient="onnx",
        distribute=None, **settings,
    )  # fmt: skip


def require_same_training(**settings: Any) -> None:
    histories = []
    for device in ("cuda", "cpu"):
        fitted = trainer(device, **settings).fit(
            X, Y, epochs=2, validation_data=(X, Y), batch_size=8, verbose=0
        )
        histories.append([*fitted.history.values()])
    np.testing.assert_allclose(*histories, rtol=1e-5)


def parsed(name: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + GRAPHS[name][1])


@pytest.mark.parametrize("name", GRAPHS)
def test_only_graphs_that_are_known_to_succeed_are_captured(name: str) -> None:
    assert is_capturable(parsed(name), CUDA) == GRAPHS[name][0]
    assert not is_capturable(parsed(name), CPU)


def test_neither_an_old_onnxruntime_nor_a_switch_that_is_off_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as old:
        old.setattr(cuda_graphs, "onnxruntime_version", lambda: (1, 17))
        assert not is_capturable(parsed("dense"), CUDA)
    for value in ("off", "OFF"):
        monkeypatch.setenv(cuda_graphs.SWITCH, value)
        assert not is_capturable(parsed("dense"), CUDA)


def test_each_set_of_the_state_has_a_graph_of_its_own() -> None:
    numbers = [
        cuda_graphs.run_options(current).get_run_config_entry("gpu_graph_id") for current in (0, 1)
    ]
    assert numbers == ["1", "2"]


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"backend": "forward_backward"}])
def test_a_captured_training_is_that_of_the_cpu(captured: list[bool], settings: Any) -> None:
    require_same_training(**settings)
    assert any(captured)  # at least the evaluation


@pytest.mark.usefixtures("called_cuda")
def test_every_shape_of_batch_has_its_own_graph() -> None:
    ours, expected = trainer("cuda"), trainer("cpu")
    for rows in range(1, 9):
        losses = [each.train_on_batch(X[:rows], Y[:rows])["loss"] for each in (ours, expected)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    exact = [len(each._training.backend.caches["train"].exact) for each in (ours, expected)]
    assert exact == [8, 4]


def test_a_graph_that_does_not_compile_for_capture_runs_without(
    captured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    noting: Any = session.compile_model

    def refuse(*args: Any, captures: bool = False, **named: Any) -> Any:
        if captures:
            raise StepError("not all nodes have been partitioned to the device")
        return noting(*args, **named)

    monkeypatch.setattr(session, "compile_model", refuse)
    require_same_training()
    assert captured
    assert not any(captured)


def test_a_graph_whose_capture_fails_runs_without(
    captured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_alone = session.BoundSession._run_alone
    failed = []

    def fail(self: Any, binding: Any, options: Any) -> None:
        if options is not None:  # those of a CUDA graph
            failed.append(self)
            raise RuntimeError("operation failed due to a previous error during capture")
        run_alone(self, binding, options)

    monkeypatch.setattr(session.BoundSession, "_run_alone", fail)
    require_same_training()
    assert len(failed) == sum(captured) == len(captured) / 2 - 1  # a session of each on the CPU


def test_a_step_that_fails_without_a_capture_is_an_error(
    captured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, binding: Any, options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(session.BoundSession, "_run_alone", fail)
    ours = trainer("cuda")
    before = ours.get_weights()
    with pytest.raises(StepError, match="The train step failed: out of memory"):
        ours.train_on_batch(X[:8], Y[:8])
    assert captured == [True, False]
    np.testing.assert_equal(ours.get_weights(), before)


@pytest.mark.usefixtures("captured")
def test_no_other_thread_uses_the_device_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trainer("cuda")
    ours.train_on_batch(X[:8], Y[:8])
    bound = ours._training.backend.last_update
    lock: Any = CUDA.calls
    run, free = bound._run, []

    def try_lock() -> None:
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    def ask(*arguments: Any) -> None:
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        run(*arguments)

    monkeypatch.setattr(bound, "_run", ask)
    ours.train_on_batch(X[:8], Y[:8])
    ours.train_on_batch(X[:8], Y[:8])
    assert free == [False, False]


def test_calls_of_the_cpu_need_no_lock() -> None:
    values = {"a": ort_value(np.ones(2, np.float32), CPU)}
    copied = threading.Thread(target=copied_arrays, args=(values,))
    with CUDA.calls:
        copied.start()
        copied.join(30)
        assert not copied.is_alive()


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("sets", "kept"), [(1, False), (2, True)])
def test_a_session_with_a_graph_is_never_deleted_after_a_failed_capture(
    sets: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA would end the process."""
    run_alone = session.BoundSession._run_alone
    runs = []

    def fail(self: Any, binding: Any, options: Any) -> None:
        runs.append(self)
        if options is not None and len(runs) == sets:
            raise RuntimeError("out of memory")
        run_alone(self, binding, options)

    never_deleted: list[Any] = []
    monkeypatch.setattr(session, "keep_alive", never_deleted.append)
    monkeypatch.setattr(session.BoundSession, "_run_alone", fail)
    ours, expected = trainer("cuda"), trainer("cpu")
    losses = [
        [each.train_on_batch(X[:8], Y[:8])["loss"] for _ in range(3)] for each in (ours, expected)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert bool(never_deleted) == kept


@pytest.mark.usefixtures("called_cuda")
def test_an_array_that_changes_in_place_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of any size has no buffer: a device other than the CPU reads a copy."""
    monkeypatch.setattr(session, "ort_value", lambda array, _: ort_value(array.copy(), CPU))
    x = np.ones(2, np.float32)
    given = onnx.parser.parse_model(HEAD.replace("[2]", "[N]") + "{ y = Neg(x) }")
    bound = session.BoundSession(given, DoubleBufferedState({}, CUDA), CUDA, None, "negated")
    for factor in (1, 5):
        x[:] = factor
        bound.run({"x": x})
        np.testing.assert_array_equal(bound.prediction()["y"], -x)


@pytest.mark.usefixtures("called_cuda")
def test_a_session_writes_a_part_of_a_fused_tensor() -> None:
    groups = {"weights": {"a": np.ones(2, np.float32), "b": np.full(2, 3, np.float32)}}
    state = DoubleBufferedState(groups, CUDA, fused={"ab": ["a", "b"]})
    model = onnx.parser.parse_model(
        f'''<ir_version: 8, opset_import: ["": 17]>
        g (float[2] b) => (float[2] "{names.updated("b")}") {{ "{names.updated("b")}" = Neg(b) }}'''
    )
    session.BoundSession(model, state, CUDA, None, "negated", writes=True).run()
    assert state.get("b").tolist() == [-3, -3]

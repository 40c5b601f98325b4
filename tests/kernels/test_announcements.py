"""Graphs that announce finished values, and sums over ranks that overlap with the backward pass."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback
from onnxfit.errors import SettingError, StepError
from onnxfit.kernels import library
from onnxfit.kernels.announcements import AnnouncementBoard, announcement_board
from onnxfit.runtime import compilation, node_order, reduction
from onnxfit.runtime.session import BoundSession
from tests.distributed.threads import ThreadCommunicator, on_ranks

LAYERS = 4
ROWS = 33  # batches of 16: the last has 1 row, so that one rank has none
RNG = np.random.default_rng(0)
X = RNG.standard_normal((ROWS, 8))
Y = RNG.integers(0, 8, ROWS)
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "MIN_BYTES_OF_BUCKET", 1)


def network(dtype: str = "float") -> onnx.ModelProto:
    """Dense layers, whose weights stand in the file in an order that is not that of the layers."""
    last = LAYERS - 1
    lines = [f"p{i} = MatMul({f'h{i - 1}' if i else 'x'}, w{i})" for i in range(LAYERS)]
    lines = [f"{line} {'y' if i == last else f'h{i}'} = Tanh(p{i})" for i, line in enumerate(lines)]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net ({dtype}[N, 8] x) => ({dtype}[N, 8] y)'
        f" {{ {' '.join(lines)} }}"
    )
    kind = np.float32 if dtype == "float" else np.float64
    for i in (2, 0, 3, 1):
        array = np.random.default_rng(i).standard_normal((8, 8)).astype(kind)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"w{i}"))
    return model


class Overlapping(ThreadCommunicator):
    """A communicator that allows overlapping sums, and notes the threads of its sums."""

    overlaps = True

    def __init__(self, other: ThreadCommunicator, overlaps: bool = True) -> None:
        super().__init__(other.rank, other._shared)
        self.local_size = 1
        self.overlaps = overlaps
        self.background: list[int] = []

    def allreduce(self, buffer: np.ndarray) -> None:
        if threading.current_thread().name.startswith("onnxfit-sums"):
            self.background.append(buffer.size)
        super().allreduce(buffer)


def trainer_of(
    communicator: Any,
    dtype: str = "float",
    model: onnx.ModelProto | None = None,
    **settings: Any,
) -> Trainer:
    return Trainer(
        network(dtype) if model is None else model,
        **{
            "loss": "cross_entropy",
            "optimizer": "adam",
            "seed": 3,
            "threads": 1,
            "distribute": communicator,
            **settings,
        },
    )


def trained(communicator: Any, dtype: str = "float", **settings: Any) -> dict[str, np.ndarray]:
    trainer = trainer_of(communicator, dtype, **settings)
    trainer.fit(
        X.astype(np.float32 if dtype == "float" else np.float64),
        Y,
        epochs=2,
        batch_size=16,
        verbose=0,
    )
    return trainer.get_weights()


# ---------------------------------------------------------------------- announcements

OUTPUTS = {f"y{i}": np.zeros(3, np.float32) for i in range(5)}


def address(name: str) -> int:
    return OUTPUTS[name].ctypes.data


def board_of(*announced: list[str]) -> tuple[AnnouncementBoard, onnx.ModelProto]:
    """A board, and a graph that announces `OUTPUTS` on it; each output needs the one before."""
    lines = " ".join(f"y{i} = Sin({f'y{i - 1}' if i else 'x'})" for i in range(5))
    outputs = ", ".join(f"float[3] {name}" for name in OUTPUTS)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[3] x) => ({outputs}) {{ {lines} }}'
    )
    board = announcement_board([[address(name) for name in names] for names in announced])
    assert board is not None
    board.add_announcements(model, announced)
    return board, model


def run(model: onnx.ModelProto, unbound: str = "") -> None:
    """Run a graph whose outputs, but one, are bound to `OUTPUTS`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    library.register(model, options)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.ones(3, np.float32))
    for name in OUTPUTS:
        place = () if name == unbound else (np.float32, [3], address(name))
        binding.bind_output(name, "cpu", 0, *place)
    session.run_with_iobinding(binding)


def test_a_thread_waits_for_an_announcement_and_for_the_end() -> None:
    board, model = board_of(["y0", "y1"], ["y2", "y3", "y4"])
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(board.wait(i) for i in range(2)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert not found
    run(model)
    thread.join(10)
    assert found == [True, True]
    expected = np.ones(3, np.float32)
    for output in OUTPUTS.values():
        expected = np.sin(expected)
        np.testing.assert_allclose(output, expected, rtol=1e-6)
    board.clear()
    thread = threading.Thread(target=lambda: found.append(board.wait(0)))
    thread.start()
    board.end()
    thread.join(10)
    assert found == [True, True, False]


def test_outputs_that_are_not_in_their_buffers_are_not_announced() -> None:
    board, model = board_of(["y0"], ["y1"], ["y2", "y3"])
    run(model, unbound="y1")
    assert [board.wait(number) for number in range(3)] == [True, False, True]
    board.clear()
    run(model)
    assert all(board.wait(number) for number in range(3))


@pytest.mark.parametrize("number", [-1, 2, 10**9])
def test_a_number_that_a_board_lacks_is_never_announced(number: int) -> None:
    assert not board_of(["y0"], ["y1"])[0].wait(number)


def test_a_graph_without_its_board_does_not_run() -> None:
    board, model = board_of(list(OUTPUTS))
    del board
    with pytest.raises(Exception, match="open board"):
        run(model)


# ---------------------------------------------------------------------- overlapping sums


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_norm": 0.1},
        {"accumulate": 2},
        {"penalty": 0.01, "precision": "float32"},
        {"precision": "fp16"},
    ],
    ids=str,
)
def test_overlapping_sums_train_to_the_same_bits(
    backend: str, dtype: str, settings: dict[str, Any]
) -> None:
    if dtype == "double":
        settings = {k: v for k, v in settings.items() if k != "precision"}

    def both(communicator: ThreadCommunicator) -> Any:
        over, plain = (Overlapping(communicator, overlaps) for overlaps in (True, False))
        results = [trained(c, dtype, backend=backend, **settings) for c in (over, plain)]
        return results, len(over.background), len(plain.background)

    for (over, plain), overlapped, not_overlapped in on_ranks(2, both):
        # The full backend sums the gradients of a window once, after its last batch.
        assert (overlapped > 0) == (backend != "full" or "accumulate" not in settings)
        assert not_overlapped == 0
        for name, array in plain.items():
            np.testing.assert_array_equal(over[name], array)


def test_a_rank_without_the_operator_sums_the_same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reduction.announcement_board
    of_this_rank = threading.local()
    monkeypatch.setattr(
        reduction,
        "announcement_board",
        lambda places: None if of_this_rank.lacks_it else made(places),
    )

    def both(communicator: ThreadCommunicator) -> Any:
        of_this_rank.lacks_it = communicator.rank == 1
        over, plain = (Overlapping(communicator, overlaps) for overlaps in (True, False))
        return trained(over), trained(plain), len(over.background)

    results = on_ranks(4, both)
    assert [bool(overlapped) for _, _, overlapped in results] == [True, False, True, True]
    for over, _, _ in results:
        for name, array in results[0][1].items():
            np.testing.assert_array_equal(over[name], array)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize(
    "body", ["v = Add(w1, w2) y = MatMul(a, v)", "v = Mul(w1, w2) u = Add(v, w3) y = MatMul(a, u)"]
)
def test_a_gradient_that_other_nodes_read_is_summed_once(backend: str, body: str) -> None:
    """The gradient of one weight is computed from that of another, whose sum may be complete."""
    model = network()
    shared = onnx.parser.parse_graph(
        f"net (float[N, 8] x) => (float[N, 8] y) {{ h = MatMul(x, w0) a = Tanh(h) {body} }}"
    )
    read = {name for node in shared.node for name in node.input}
    shared.initializer.extend(t for t in model.graph.initializer if t.name in read)
    model.graph.CopyFrom(shared)

    def both(communicator: ThreadCommunicator) -> Any:
        over, plain = (Overlapping(communicator, overlaps) for overlaps in (True, False))
        results = [trained(c, model=model, backend=backend) for c in (over, plain)]
        return results, len(over.background)

    for (over, plain), overlapped in on_ranks(2, both):
        assert overlapped
        for name, array in plain.items():
            np.testing.assert_array_equal(over[name], array)


def test_gradients_outside_their_buffers_are_summed_after_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes copy the gradients after the announcements, as a runtime might do."""
    announce = reduction.GradientReduction.announce

    def with_copies(own: Any, model: onnx.ModelProto, gradients: dict[str, str]) -> None:
        announce(own, model, gradients)
        copies = []
        for node in model.graph.node:
            if node.op_type == "Announce" and own.world.rank == 1:
                (gradient,) = node.output
                node.output[0], between = f"{gradient}/announced", f"{gradient}/between"
                copies.append(onnx.helper.make_node("Neg", [node.output[0]], [between]))
                copies.append(onnx.helper.make_node("Neg", [between], [gradient]))
        model.graph.node.extend(copies)

    monkeypatch.setattr(reduction.GradientReduction, "announce", with_copies)

    def both(communicator: ThreadCommunicator) -> Any:
        over, plain = (Overlapping(communicator, overlaps) for overlaps in (True, False))
        return [trained(over), trained(plain)], len(over.background)

    for rank, ((over, plain), overlapped) in enumerate(on_ranks(2, both)):
        assert bool(overlapped) == (rank == 0)
        for name, array in plain.items():
            np.testing.assert_array_equal(over[name], array)


def test_frozen_weights_and_other_windows_between_two_fits() -> None:
    def both(communicator: ThreadCommunicator) -> Any:
        results = []
        for overlaps in (True, False):
            trainer = trainer_of(Overlapping(communicator, overlaps), accumulate=2)
            for frozen, accumulate in (["w3"], 1), ([], 2), (["w1", "w2"], 1), ([], 1):
                trainer.frozen, trainer.accumulate = frozen, accumulate
                trainer.fit(X.astype(np.float32), Y, epochs=1, batch_size=16, verbose=0)
            results.append(trainer.get_weights())
        return results

    for over, plain in on_ranks(2, both):
        for name, array in plain.items():
            np.testing.assert_array_equal(over[name], array)


@pytest.mark.parametrize("sorts", [False, True])
def test_gradients_are_computed_in_the_order_of_their_announcements(
    sorts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So the first buckets are summed while the graph runs. `sorts`: as in graphs of many nodes."""
    if sorts:
        monkeypatch.setattr(node_order, "MIN_NODES_TO_SORT", 1)
    registered = compilation.register

    def profiled(model: onnx.ModelProto, options: Any) -> None:
        registered(model, options)
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / "profile")

    monkeypatch.setattr(compilation, "register", profiled)

    def order(communicator: ThreadCommunicator) -> list[str]:
        trainer = trainer_of(Overlapping(communicator))
        trainer.train_on_batch(X[:16].astype(np.float32), Y[:16])
        backend = trainer._training.backend
        assert backend.reduction is not None
        # The last layer's gradient is complete first, and the first layer's belongs to no bucket.
        assert backend.reduction.buckets == [["w3"], ["w2"], ["w1"]]
        (session,) = backend.caches["gradients"]._by_signature.values()
        events = json.loads(Path(session._session.end_profiling()).read_text())
        return [e["args"]["op_name"] for e in events if e.get("cat") == "Node"]

    for ran in on_ranks(2, order):
        places = [i for i, kind in enumerate(ran) if kind == "Announce"]
        assert len(places) == LAYERS - 1
        # Between two announcements are the gradients of a layer's output and of its weight. Those
        # of the first layer follow.
        assert [ran[i - 1] for i in places] == ["Gemm"] * (LAYERS - 1)
        assert np.diff(places).tolist() == [4] * (LAYERS - 2)
        assert ran[places[-1] + 1 :].count("Gemm") == 2


def test_ranks_that_share_memory_or_average_weights_have_no_buckets() -> None:
    def buckets(communicator: ThreadCommunicator) -> Any:
        own = Overlapping(communicator)
        own.local_size = own.size
        return trainer_of(own)._training.backend.reduction.buckets

    assert on_ranks(2, buckets) == [[], []]


def test_a_step_that_fails_ends_the_wait_and_later_steps_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 fails after its first buckets were summed; the other rank is not left in a sum."""
    run = BoundSession.run

    def failing(session: BoundSession, values: Any = None) -> None:
        run(session, values)
        if session._name == "gradients":
            raise StepError("planted")

    monkeypatch.setattr(BoundSession, "run", failing)

    def errors(communicator: ThreadCommunicator) -> list[str]:
        trainer = trainer_of(Overlapping(communicator))
        found = []
        for kind in (StepError, SettingError):
            with pytest.raises(kind) as error:
                trainer.train_on_batch(X[:16].astype(np.float32), Y[:16])
            found.append(str(error.value))
        return found

    for first, second in on_ranks(2, errors):
        assert first == "planted"
        assert "out of step" in second


def test_an_error_of_an_exchange_is_raised_in_the_step() -> None:
    class Lost(Overlapping):
        def allreduce(self, buffer: np.ndarray) -> None:
            if threading.current_thread().name.startswith("onnxfit-sums"):
                raise ConnectionError("the other rank has gone")
            super().allreduce(buffer)

    def error(communicator: ThreadCommunicator) -> str:
        trainer = trainer_of(Lost(communicator))
        with pytest.raises(ConnectionError) as found:
            trainer.train_on_batch(X[:16].astype(np.float32), Y[:16])
        with pytest.raises(SettingError, match="out of step"):
            trainer.train_on_batch(X[:16].astype(np.float32), Y[:16])
        return str(found.value)

    assert on_ranks(2, error) == ["the other rank has gone"] * 2


class Stop(Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.trainer.stop_training = True


def test_a_fit_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def whole_and_resumed(communicator: ThreadCommunicator) -> Any:
        whole = trained(Overlapping(communicator))
        x = X.astype(np.float32)
        first = trainer_of(Overlapping(communicator))
        first.fit(x, Y, epochs=2, batch_size=16, verbose=0, callbacks=[Stop()])
        first.save(tmp_path / "half.ckpt")
        second = trainer_of(Overlapping(communicator))
        communicator._shared.barrier.wait(60)
        second.load(tmp_path / "half.ckpt")
        second.fit(x, Y, epochs=2, batch_size=16, verbose=0)
        return whole, second.get_weights()

    for whole, resumed in on_ranks(2, whole_and_resumed):
        for name, array in whole.items():
            np.testing.assert_array_equal(resumed[name], array)

"""Clients of Flower: rounds, messages, and what a server may not send.

A stand-in with the same records takes Flower's place; `make federated` runs Flower itself.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback
from onnxfit.errors import DataError, InstallationError, SettingError, UnsupportedError
from onnxfit.flower import FlowerClient, client, client_app, get_arrays, set_arrays
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import InverseTime
from tests.models import convolutional, linear, mlp

rng = np.random.default_rng(0)
X = rng.normal(size=(90, 4)).astype(np.float32)
Y = (X @ rng.normal(size=(4, 3))).argmax(axis=1)
FIRST = {"server-round": 1}
PARTS = [slice(0, 20), slice(20, 50), slice(50, 90)]


def new_trainer(optimizer: Any = 0.1, **settings: Any) -> Trainer:
    settings = {"loss": "cross_entropy", "metrics": ["accuracy"], "seed": 3, **settings}
    return Trainer(mlp(), optimizer=optimizer, **settings)


def new_client(optimizer: Any = 0.1, *, backend: str = "full", **settings: Any) -> FlowerClient:
    settings = {"validation_data": (X[60:], Y[60:]), **settings}
    return client(new_trainer(optimizer, backend=backend), (X[:60], Y[:60]), **settings)


@functools.cache
def start_weights() -> dict[str, Any]:
    return new_trainer().get_weights()


@functools.cache
def shared_client() -> FlowerClient:
    """A client for many tests: a round depends on no earlier one."""
    return new_client()


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# ------------------------------------------------------------------------------------------------
# rounds


def test_averaging_one_step_of_sgd_is_one_step_on_all_rows() -> None:
    start = start_weights()
    sums = {name: np.zeros(array.shape) for name, array in start.items()}
    for part in PARTS:
        one = client(new_trainer(), (X[part], Y[part]), batch_size=len(X))
        weights, rows, _ = one.train_round(start)
        assert rows == part.stop - part.start
        for name, array in weights.items():
            sums[name] += rows / len(X) * array.astype(np.float64)
    central = new_trainer()
    central.fit(X, Y, batch_size=len(X), verbose=0)
    for name, array in central.get_weights().items():
        np.testing.assert_allclose(sums[name], array, atol=1e-6)
        assert np.abs(array - start[name]).max() > 1e-3


def test_the_first_round_is_a_fit() -> None:
    plain = new_trainer("adam")
    history = plain.fit(X[:60], Y[:60], epochs=2, batch_size=16, verbose=0)
    weights, rows, metrics = new_client("adam", epochs=2, batch_size=16).train_round(
        start_weights()
    )
    assert_equal(weights, plain.get_weights())
    assert rows == 60
    assert metrics == {name: values[-1] for name, values in history.history.items()}
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize("optimizer", [Adam(0.01, ema_momentum=0.9), InverseTime])
def test_a_round_depends_on_no_earlier_one(optimizer: Any) -> None:
    if optimizer is InverseTime:
        optimizer = SGD(InverseTime(0.1, decay_steps=2, decay_rate=0.5), momentum=0.9)
    old, new = new_client(optimizer), new_client(optimizer)
    start = start_weights()
    middle, _, _ = old.train_round(start, {"server-round": 1})
    old.evaluate_round(start)
    results = [one.train_round(middle, {"server-round": 2}) for one in (old, new)]
    assert_equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert_equal(old.trainer.get_state()["slots"], new.trainer.get_state()["slots"])


def test_each_round_begins_with_a_new_loss_scale() -> None:
    trainer = new_trainer(precision="fp16", loss="cross_entropy")
    one = client(trainer, (X[:60], Y[:60]))
    for _ in range(2):
        one.train_round(start_weights())
        assert trainer.get_state()["slots"]["train/finite_steps"] == trainer.global_step > 0


def test_each_round_has_an_order_of_its_own() -> None:
    start = start_weights()
    one = new_client()
    weights = [one.train_round(start)[0]["fc0.weight"] for _ in range(2)]
    assert np.abs(weights[0] - weights[1]).max() > 1e-5
    assert one.trainer.seed == 3
    other = new_client().train_round(start, {"server-round": 2})[0]["fc0.weight"]
    np.testing.assert_array_equal(weights[1], other)


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"epochs": 2, "batch-size": 20}, {"epochs": 2, "batch_size": 20}),
        ({"local-epochs": 2, "batch_size": 20}, {"epochs": 2, "batch_size": 20}),
    ],
)
def test_the_server_decides_epochs_and_batches(config: Any, same: Any) -> None:
    start = start_weights()
    asked = new_client(epochs=5).train_round(start, config)
    assert_equal(asked[0], new_client(**same).train_round(start)[0])


def test_a_learning_rate_of_the_server_lasts_one_round() -> None:
    start = start_weights()
    one = new_client(0.1)
    asked = one.train_round(start, {"lr": 0.5, "server-round": 1, "unknown": "kept out"})[0]
    assert_equal(asked, new_client(0.5).train_round(start)[0])
    later = one.train_round(start, {"server-round": 1})[0]
    assert_equal(later, new_client(0.1).train_round(start)[0])
    assert one.trainer.learning_rate == 0.1


def test_running_statistics_travel() -> None:
    images = rng.normal(size=(16, 1, 8, 8)).astype(np.float32)
    one = client(Trainer(convolutional(), loss="cross_entropy", optimizer=0.1), (images, Y[:16]))
    start = one.trainer.get_weights()
    weights, _, _ = one.train_round(start)
    assert np.abs(weights["bn.mean"] - start["bn.mean"]).max() > 0
    one.train_round(start)
    assert_equal(one.train_round(start, {"server-round": 1})[0], weights)


def test_only_trained_weights_travel() -> None:
    one = client(new_trainer(weights=["fc1.*"]), (X, Y))
    weights, _, _ = one.train_round(one.trainer.get_weights())
    assert list(weights) == ["fc1.weight", "fc1.bias"]


def test_rows_of_a_loader_that_does_not_tell() -> None:
    def batches() -> Any:
        return ((X[part], Y[part]) for part in PARTS)

    one = client(new_trainer(), batches, batches, epochs=2)
    weights, rows, _ = one.train_round(start_weights())
    assert rows == 90
    rows, metrics = one.evaluate_round(weights)
    assert rows == 90
    one.trainer.set_weights(weights)
    assert metrics == pytest.approx(one.trainer.evaluate(X, Y))
    with pytest.raises(DataError, match="gave no batches"):
        client(new_trainer(), lambda: iter(())).train_round(weights)


def test_callbacks_run_in_each_round() -> None:
    class Count(Callback):
        epochs = 0

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.epochs += 1

    one = new_client(callbacks=(count := Count()), epochs=2)
    for _ in range(2):
        one.train_round(start_weights())
    assert count.epochs == 4


# ------------------------------------------------------------------------------------------------
# FedProx


def test_fedprox_pulls_towards_the_weights_of_the_server() -> None:
    """Compare two steps of SGD on y = w x with the formula, worked by hand."""
    x, rate, mu = np.ones((2, 1), np.float32), 0.1, 0.7
    trainer = Trainer(linear(w=1.0), loss="mse", optimizer=rate, backend="forward_backward")
    one = client(trainer, (x, 3 * x), epochs=2)
    weights, _, _ = one.train_round(trainer.get_weights(), {"proximal-mu": mu})
    first = 1 - rate * 2 * (1 - 3)
    second = first - rate * (2 * (first - 3) + mu * (first - 1))
    assert weights["w"].item() == pytest.approx(second, rel=1e-6)
    weights, _, _ = one.train_round({"w": np.ones((1, 1), np.float32)}, {"proximal-mu": 0.0})
    assert weights["w"].item() == pytest.approx(first - rate * 2 * (first - 3), rel=1e-6)


def test_fedprox_needs_gradients() -> None:
    one = shared_client()
    with unchanged(one.trainer), pytest.raises(SettingError, match="backend='forward_backward'"):
        one.train_round(new_weights(), {"proximal_mu": 0.1})


# ------------------------------------------------------------------------------------------------
# what is refused, and leaves the trainer as it was


def new_weights() -> dict[str, Any]:
    return {name: array + 1 for name, array in start_weights().items()}


@contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    before = trainer.get_state()
    yield
    after = trainer.get_state()
    assert before["counters"] == after["counters"]
    for kind in ("weights", "slots"):
        assert_equal(before[kind], after[kind])


def with_nan(array: Any) -> Any:
    return np.where(array == array.flat[0], np.nan, array).astype(array.dtype)


WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda w: w.pop("fc1.bias"), r"Missing: fc1\.bias\. Unknown: none"),
    "unknown": (lambda w: w.update(other=np.zeros(3)), r"Missing: none\. Unknown: other"),
    "shape": (lambda w: w.update({"fc1.bias": w["fc1.bias"][:1]}), r"float32\[1\]. Expected float32\[3\]"),
    "type": (lambda w: w.update({"fc1.bias": np.zeros(3, np.int64)}), r"int64\[3\]. Expected float32\[3\]"),
    "objects": (lambda w: w.update({"fc1.bias": np.array([None] * 3)}), r"object\[3\]. Expected"),
    "nan": (lambda w: w.update({"fc1.bias": with_nan(w["fc1.bias"])}), r"'fc1.bias' with NaN"),
    "range": (lambda w: w.update({"fc1.bias": np.full(3, 1e39)}), r"outside the range of float32"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_other_weights_are_refused(change: Any, message: str) -> None:
    one = shared_client()
    weights = new_weights()
    change(weights)
    for call in (one.train_round, one.evaluate_round):
        with unchanged(one.trainer), pytest.raises(DataError, match=message):
            call(weights)


def test_weights_averaged_in_float64_are_taken() -> None:
    weights = {name: array.astype(np.float64) for name, array in new_weights().items()}
    trained, _, _ = shared_client().train_round(weights, FIRST)
    assert_equal(trained, shared_client().train_round(new_weights(), FIRST)[0])


WRONG_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "server set epochs=0. Expected a whole number from 1"),
    ({"local-epochs": 1.5}, "local-epochs=1.5"),
    ({"batch-size": "32"}, "batch-size='32'"),
    ({"lr": float("nan")}, "lr=nan. Expected a finite number"),
    ({"lr": 0.1, "learning-rate": 0.1}, "learning_rate twice"),
    ({"proximal-mu": -1.0}, "proximal-mu=-1.0"),
    ({"server-round": True}, "server-round=True"),
    ({"learning_rate": 1e39}, "element types"),
]


@pytest.mark.parametrize(("config", "message"), WRONG_CONFIGS)
def test_impossible_settings_are_refused(config: dict[str, Any], message: str) -> None:
    one = shared_client()
    with unchanged(one.trainer), pytest.raises(SettingError, match=message):
        one.train_round(new_weights(), config)


def test_a_schedule_excludes_a_learning_rate_of_the_server() -> None:
    one = new_client(SGD(InverseTime(0.1, 1, 1.0)))
    with unchanged(one.trainer), pytest.raises(UnsupportedError, match="follows"):
        one.train_round(new_weights(), {"lr": 0.1})


def test_evaluation_needs_validation_data() -> None:
    one = new_client(validation_data=None)
    with unchanged(one.trainer), pytest.raises(SettingError, match=r"fraction_evaluate=0\.0"):
        one.evaluate_round(new_weights())


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(SettingError, match="client set epochs=0"):
        new_client(epochs=0)
    with pytest.raises(SettingError, match="trainer"):
        client("model.onnx", (X, Y))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------
# messages


class StandInArray:
    def __init__(self, array: Any) -> None:
        stream = BytesIO()
        np.save(stream, array, allow_pickle=False)
        self.stype, self.data = "numpy.ndarray", stream.getvalue()

    def numpy(self) -> Any:
        return np.load(BytesIO(self.data), allow_pickle=False)


class StandInMetricRecord(dict):  # type: ignore[type-arg]
    def __init__(self, metrics: dict[str, Any]) -> None:
        assert {type(value) for value in metrics.values()} <= {int, float}
        super().__init__(metrics)


class StandInRecords(dict):  # type: ignore[type-arg]
    def of(self, kind: type) -> dict[str, Any]:
        return {key: value for key, value in self.items() if type(value) is kind}

    array_records = property(lambda self: self.of(StandInArrayRecord))
    config_records = property(lambda self: self.of(StandInConfigRecord))


class StandInArrayRecord(dict):  # type: ignore[type-arg]
    pass


class StandInConfigRecord(dict):  # type: ignore[type-arg]
    pass


class StandInClientApp:
    def __init__(self) -> None:
        self.functions: dict[str, Any] = {}

    def train(self, *, mods: list[Any]) -> Any:
        def modified(function: Any) -> None:
            for mod in mods:
                function = functools.partial(mod, function)
            self.functions["train"] = function

        return modified

    def evaluate(self) -> Any:
        return lambda function: self.functions.update(evaluate=function)

    def __call__(self, message: Any, context: Any) -> Any:
        return self.functions[message.message_type](message, context)


class StandInNumPyClient:
    def to_client(self) -> Any:
        return SimpleNamespace(numpy_client=self)


STAND_INS = {
    "flwr": {},
    "flwr.app": {
        "Array": StandInArray,
        "ArrayRecord": StandInArrayRecord,
        "ConfigRecord": StandInConfigRecord,
        "Message": SimpleNamespace,
        "MetricRecord": StandInMetricRecord,
        "RecordDict": StandInRecords,
    },
    "flwr.client": {"NumPyClient": StandInNumPyClient},
    "flwr.clientapp": {"ClientApp": StandInClientApp},
}


@pytest.fixture
def flwr(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in of `flwr.app`."""
    for name, members in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["flwr.app"]


def message_of(flwr: Any, kind: str, weights: Any, **config: Any) -> Any:
    arrays = flwr.ArrayRecord({name: flwr.Array(array) for name, array in weights.items()})
    records = flwr.RecordDict({"arrays": arrays, "config": flwr.ConfigRecord(config)})
    return flwr.Message(content=records, message_type=kind, dst_node_id=1)


def test_messages_are_rounds(flwr: Any) -> None:
    modified = []

    def mod(function: Any, message: Any, context: Any) -> Any:
        modified.append(message.message_type)
        return function(message, context)

    app = client_app(lambda context: shared_client(), mods=[mod])
    weights = new_weights()
    message = message_of(flwr, "train", weights, epochs=2, **FIRST)
    reply = app(message, SimpleNamespace(node_config={"partition-id": 0})).content
    trained, rows, metrics = shared_client().train_round(weights, {"epochs": 2, **FIRST})
    assert_equal({name: array.numpy() for name, array in reply["arrays"].items()}, trained)
    assert dict(reply["metrics"]) == {"num-examples": rows, **metrics}

    reply = app(message_of(flwr, "evaluate", trained), None).content
    rows, metrics = shared_client().evaluate_round(trained)
    assert list(reply) == ["metrics"]
    assert modified == ["train"]
    assert dict(reply["metrics"]) == {"num-examples": rows, **metrics}


def test_the_reply_has_the_order_of_the_message(flwr: Any) -> None:
    weights = dict(reversed(new_weights().items()))
    reply = shared_client().train(message_of(flwr, "train", weights))
    assert list(reply.content["arrays"]) == list(weights)


def test_a_message_has_one_record_of_arrays(flwr: Any) -> None:
    message = message_of(flwr, "train", new_weights())
    message.content["more"] = message.content["arrays"]
    with pytest.raises(DataError, match="one ArrayRecord, the weights, got arrays, more"):
        shared_client().train(message)


def test_arrays_of_the_server(flwr: Any) -> None:
    trained = new_trainer()
    trained.fit(X, Y, verbose=0)
    other = new_trainer()
    set_arrays(other, get_arrays(trained))
    assert_equal(other.get_weights(), trained.get_weights())
    with unchanged(other), pytest.raises(DataError, match="Unknown: w"):
        set_arrays(other, get_arrays(Trainer(linear(), loss="mse")))


def saved(array: Any) -> bytes:
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


BIAS = np.ones(3, np.float32)
HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}"
DAMAGED: dict[str, bytes] = {
    "nothing": b"",
    "a pickle": pickle.dumps(BIAS),
    "an array of pickles": saved(np.array([BIAS, None, {}], object)),
    "a zip file": b"PK\x03\x04" + bytes(40),
    "a cut array": saved(BIAS)[:-1],
    "more than an array": saved(BIAS) + bytes(4),
    "a huge array": header(HUGE),
    "an expression": header("__import__('os').getcwd()"),
    "a broken header": header("{'descr': '<f4', ("),
    "a long header": header("{" + " " * 60_000 + "}"),
    "another byte order": saved(BIAS.astype(">f4")),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_bytes_that_are_no_such_array_are_refused(flwr: Any, data: bytes) -> None:
    one = shared_client()
    message = message_of(flwr, "train", new_weights())
    message.content["arrays"]["fc1.bias"].data = data
    with (
        unchanged(one.trainer),
        pytest.raises(
            DataError, match=r"server sent 'fc1\.bias'(, which is not a valid array| as .*Expected)"
        ),
    ):
        one.train(message)


def test_arrays_in_column_order_keep_their_values(flwr: Any) -> None:
    weights = {name: np.asfortranarray(array) for name, array in new_weights().items()}
    other = new_trainer()
    set_arrays(other, message_of(flwr, "train", weights).content["arrays"])
    assert_equal(other.get_weights(), new_weights())


def test_a_numpy_client_has_a_list_of_weights(flwr: Any) -> None:
    numpy_client = shared_client().to_client().numpy_client
    weights = new_weights()
    assert len(numpy_client.get_parameters({})) == len(weights)
    trained, rows, metrics = numpy_client.fit(list(weights.values()), {"epochs": 2, **FIRST})
    expected = shared_client().train_round(weights, {"epochs": 2, **FIRST})
    assert_equal(dict(zip(weights, trained)), expected[0])
    assert (rows, metrics) == expected[1:]
    loss, rows, metrics = numpy_client.evaluate(trained, {})
    assert (rows, {"loss": loss, **metrics}) == shared_client().evaluate_round(expected[0])
    with pytest.raises(DataError, match=r"3 arrays\. Expected 4"):
        numpy_client.fit(trained[:3], {})


def test_without_flower_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    for module in ("app", "client", "clientapp"):
        monkeypatch.setitem(sys.modules, f"flwr.{module}", None)
    one = shared_client()
    for call in (lambda: get_arrays(one.trainer), one.to_client, lambda: client_app(lambda _: one)):
        with pytest.raises(InstallationError, match=r'pip install "onnxfit\[flower\]"'):
            call()

"""BatchSizeFinder, on a machine whose clock and memory are scripted."""

import json
import sys

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit.callbacks import BackupAndRestore, BatchSizeFinder, LambdaCallback, batch_size_finder
from onnxfit.errors import DataError, InstallationError, SettingError, StepError
from onnxfit.training.training import Training
from tests.callbacks.helpers import KillAfter, Killed, both_backends, fit, line, network, same


@pytest.fixture
def machine(monkeypatch):
    """A machine on which a step takes as long as `seconds` says of its rows, and fails where that
    raises.
    """
    now, step = [0.0], Training.step

    def set_to(seconds):
        def timed(self, batch, *arguments):
            now[0] += seconds(batch.rows)
            return step(self, batch, *arguments)

        monkeypatch.setattr(Training, "step", timed)

    monkeypatch.setattr(batch_size_finder, "perf_counter", lambda: now[0])
    return set_to


def memory_for(most, error):
    def seconds(rows):
        if rows > most:
            raise error
        return 1.0

    return seconds


FULL = MemoryError("Unable to allocate 9 GiB")


ROWS = np.ones((100, 1), np.float32)


SATURATES = lambda rows: max(rows, 16) * 1.0  # noqa: E731  from 16 rows on, twice the rows take twice the time


@both_backends
@pytest.mark.parametrize(
    ("seconds", "settings", "tried", "suggestion"),
    [
        pytest.param(lambda rows: 1.0, {}, [2, 4, 8, 16, 32, 64], 64, id="the data end it"),
        pytest.param(lambda rows: 1.0, {"init_val": 100}, [100], 100, id="all rows are a batch"),
        pytest.param(lambda rows: 1.0, {"init_val": 101}, [], None, id="more rows than there are"),
        pytest.param(lambda rows: 1.0, {"init_val": 3, "max_trials": 3}, [3, 6, 12], 12, id="max_trials"),
        pytest.param(lambda rows: 1.0, {"mode": "binsearch"}, [2, 4, 8, 16, 32, 64, 96], 96, id="binsearch, the data end it"),
        pytest.param(SATURATES, {}, [2, 4, 8, 16, 32], 16, id="no gain ends it"),
        pytest.param(SATURATES, {"mode": "binsearch"}, [2, 4, 8, 16, 32, 24, 20, 18, 17], 16, id="binsearch finds no gain"),
        pytest.param(SATURATES, {"min_gain": None}, [2, 4, 8, 16, 32, 64], 64, id="no gain wanted"),
        pytest.param(lambda rows: rows**0.5, {"min_gain": 0.4}, [2, 4, 8, 16, 32, 64], 64, id="a gain of 41 % at 40 %"),
        pytest.param(lambda rows: rows**0.5, {"min_gain": 0.42}, [2, 4], 2, id="a gain of 41 % at 42 %"),
        pytest.param(memory_for(50, FULL), {}, [2, 4, 8, 16, 32, 64], 32, id="memory ends it"),
        pytest.param(
            memory_for(50, FULL), {"mode": "binsearch", "min_gain": None}, [2, 4, 8, 16, 32, 64, 48, 56, 52, 50, 51], 50,
            id="binsearch, memory ends it",
        ),
        pytest.param(memory_for(9, StepError("Failed to allocate memory for requested buffer")), {}, [2, 4, 8, 16], 8, id="onnxruntime's, too"),
        pytest.param(memory_for(1, MemoryError()), {}, [2], None, id="no size runs"),
    ],
)  # fmt: skip
def test_the_batch_size_found(machine, backend, seconds, settings, tried, suggestion):
    machine(seconds)
    finder = BatchSizeFinder(**settings)
    on = fit(finder, on=line(backend=backend), x=ROWS, y=ROWS, epochs=0, batch_size=1)
    assert [result["batch_size"] for result in finder.results] == tried
    assert finder.suggestion == suggestion
    assert on.batch_size == (suggestion or 1)
    for result in finder.results:
        if "error" in result:
            assert (
                result["error"] in (str(FULL), "MemoryError")
                or "allocate memory" in result["error"]
            )
        else:
            assert result["seconds"] == pytest.approx(seconds(result["batch_size"]))
            assert result["samples_per_second"] == result["batch_size"] / result["seconds"]
    json.dumps(finder.results)


@both_backends
@pytest.mark.parametrize("data", ["arrays", "loader", "prefetch", "mapped", "parquet"])
def test_a_fit_with_a_batch_size_that_was_found_is_a_fit_with_that_batch_size(
    machine, backend, data, tmp_path
):
    machine(lambda rows: max(rows, 4) * 1.0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)

    def given(batch_size):
        if data == "arrays":
            return {"x": x, "y": y, "batch_size": batch_size}
        if data == "mapped":
            np.save(tmp_path / "x.npy", x)
            return {"x": str(tmp_path / "x.npy"), "y": y, "batch_size": batch_size}
        if data == "parquet":
            pyarrow, parquet = (
                pytest.importorskip("pyarrow"),
                pytest.importorskip("pyarrow.parquet"),
            )
            parquet.write_table(pyarrow.table({"x": list(x), "y": y}), tmp_path / "a.parquet")
            return {
                "x": onnxfit.ParquetLoader(tmp_path / "a.parquet", "x", "y", batch_size=batch_size)
            }
        return {
            "x": onnxfit.DataLoader(x, y, batch_size=batch_size, prefetch=2 * (data == "prefetch"))
        }

    seen, ends = [], []
    finder = BatchSizeFinder()
    look = LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append((look.params["steps"], on.batch_size))
    )
    bar = LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    on, plain = (network(backend, metrics=["accuracy"]) for _ in range(2))
    history = on.fit(**given(16), epochs=2, verbose=0, callbacks=[look, finder, bar])
    expected = plain.fit(**given(4), epochs=2, verbose=0)
    assert finder.suggestion == 4
    assert seen == [(6, 4)] * 2
    assert ends == [*range(6)] * 2
    assert same(on.get_weights(), plain.get_weights())
    assert same(on.get_state()["slots"], plain.get_state()["slots"])
    assert on.get_state()["counters"] == plain.get_state()["counters"]
    assert history.history == expected.history
    assert [list(cache.exact) for cache in on._training.backend.caches.values()] == [
        list(cache.exact) for cache in plain._training.backend.caches.values()
    ]


def test_a_batch_size_may_be_found_and_not_set(machine):
    machine(lambda rows: 1.0)
    finder = BatchSizeFinder(set_batch_size=False)
    on = fit(finder, x=ROWS, y=ROWS, batch_size=10)
    assert (finder.suggestion, on.batch_size, on.global_batch) == (64, 10, 10)


def test_the_batch_size_finder_does_not_look_again_when_training_resumes(machine, tmp_path):
    machine(lambda rows: max(rows, 4) * 1.0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)

    def callbacks():
        return [BatchSizeFinder(), BackupAndRestore(tmp_path / "b", every_n_steps=1)]

    whole = network()
    whole.fit(x, y, epochs=3, verbose=0, callbacks=[BatchSizeFinder()])
    with pytest.raises(Killed):
        network().fit(x, y, epochs=3, verbose=0, callbacks=[*callbacks(), KillAfter(8)])
    machine(lambda rows: rows**2.0)  # now no larger size would gain
    again, resumed = callbacks(), network()
    resumed.fit(x, y, epochs=3, verbose=0, callbacks=again)
    assert again[0].suggestion == resumed.batch_size == 4
    assert len(again[0].results) == 3
    assert same(resumed.get_weights(), whole.get_weights())
    assert resumed.global_batch == whole.global_batch == 18


def test_the_limits_of_the_batch_size_finder(machine):
    machine(lambda rows: 1.0)
    for settings in (
        {"mode": "linear"},
        {"steps_per_trial": 0},
        {"init_val": 0},
        {"max_trials": 0},
        {"min_gain": -0.1},
        {"min_gain": np.nan},
    ):
        with pytest.raises(SettingError, match="BatchSizeFinder needs"):
            BatchSizeFinder(**settings)
    batches = [(ROWS, ROWS), (ROWS, ROWS)]
    for data in (batches, lambda: iter(batches), iter(batches)):
        on = line()
        with pytest.raises(SettingError, match=r"comes in batches\. Pass arrays, a DataLoader"):
            fit(BatchSizeFinder(), on=on, x=data, y=None)
        assert on.global_batch == 0
    fixed = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4, 1] x) => (float[4, 1] y) <float[1, 1]'
        " w = {1}> { y = MatMul(x, w) }"
    )
    with pytest.raises(DataError, match="fixed"):
        fit(
            BatchSizeFinder(),
            on=onnxfit.Trainer(fixed, loss="mse", gradient="onnx"),
            x=ROWS,
            y=ROWS,
            batch_size=4,
        )
    machine(memory_for(4, StepError("The step failed: no kernel")))
    with pytest.raises(StepError, match="no kernel"):  # which is not of memory
        fit(BatchSizeFinder(), x=ROWS, y=ROWS)


@pytest.mark.parametrize(
    "hook", ["on_epoch_begin", "on_train_batch_end", "on_epoch_end", "on_train_end"]
)
def test_the_batch_size_is_settled_before_the_first_epoch(hook):
    def change(*arguments):
        on.batch_size = 1

    on = line()
    with pytest.raises(SettingError, match="in on_train_begin"):
        fit(LambdaCallback(**{hook: change}), on=on)
    with pytest.raises(SettingError, match="in on_train_begin"):
        on.batch_size = 1
    assert on.batch_size == 2
    for wrong in (0, 1.5):
        with pytest.raises(SettingError, match="batch_size must be"):
            fit(
                LambdaCallback(
                    on_train_begin=lambda logs, wrong=wrong: setattr(on, "batch_size", wrong)
                ),
                on=on,
            )


def test_the_picture_of_batch_sizes(machine, tmp_path, monkeypatch):
    machine(memory_for(50, FULL))
    finder = BatchSizeFinder()
    fit(finder, x=ROWS, y=ROWS, epochs=0)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(InstallationError, match=r"BatchSizeFinder\.plot needs matplotlib"):
            finder.plot(tmp_path / "a.png")
    pytest.importorskip("matplotlib")
    finder.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

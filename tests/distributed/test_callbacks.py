"""Every callback on several ranks: none hangs, rank 0 alone writes, and all ranks end equal.

The ranks are threads here.
"""

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import (
    BackupAndRestore,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    OptunaPruning,
    SwapEMAWeights,
    TerminateOnNaN,
    Timer,
    batch_size_finder,
    learning_rate_finder,
)
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.metrics import Metric
from onnxfit.optimizers import SGD
from onnxfit.training import checkpoint
from onnxfit.training.checkpoint import Snapshot
from onnxfit.training.saving import contents_of
from tests.callbacks.test_laws import CLASSES, MINIMAL, SETTINGS, mlflow, wandb
from tests.distributed.test_laws import network
from tests.distributed.threads import Shared, on_ranks

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 5))
Y = RNG.integers(0, 3, 16)
# figures of a clock and of the memory
MEASURED = ("samples_per_second", "cpu_percent", "memory_megabytes")


class Averaging:
    """Ranks that average their weights after every second update."""

    average_every = 2

    def __init__(self, communicator):
        self.rank, self.size = communicator.rank, communicator.size
        self.allreduce, self.broadcast = communicator.allreduce, communicator.broadcast
        self.abort = communicator.abort


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    optuna = ModuleType("optuna")
    optuna.TrialPruned = type("TrialPruned", (Exception,), {})
    monkeypatch.chdir(tmp_path)
    for name, module in {"mlflow": mlflow(), "optuna": optuna, "wandb": wandb()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("no_proxy", "*")


def trainer(distribute, **settings):
    settings = {"optimizer": SGD(0.05, momentum=0.9, ema_momentum=0.9), **settings}
    return onnxfit.Trainer(
        network(), loss="cross_entropy", threads=1, distribute=distribute, **settings
    )


def fit(on, *callbacks, **settings):
    """Train in 4 batches an epoch, of which the last has 1 row."""
    settings = {"epochs": 2, "batch_size": 5, "validation_data": (X, Y), **settings}
    on.fit(X, Y, callbacks=callbacks, verbose=0, **settings)
    return on


def end(on):
    return on.get_weights(), on.history.history


def same(one, other, rtol=0.0):
    """Compare weights, and all figures but those of a clock."""
    for name, array in one[0].items():
        np.testing.assert_allclose(array, other[0][name], rtol=rtol, atol=rtol, err_msg=name)
    assert list(one[1]) == list(other[1])
    for name, values in one[1].items():
        if name not in MEASURED:
            np.testing.assert_allclose(values, other[1][name], rtol=rtol, atol=rtol, err_msg=name)


def made(name, folder):
    """Return the callback of a name; its files lie in the folder."""
    arguments = list(MINIMAL.get(name, ()))
    if arguments and isinstance(arguments[0], str) and "." in arguments[0] + "." and name in FILES:
        arguments[0] = str(folder / arguments[0])
    if name == "Freeze":
        arguments = ["w0"]
    if name == "Unfreeze":
        arguments = [{1: "w0"}]
    if name == "TensorBoard":
        arguments = [str(folder)]
    return CLASSES[name](*arguments, **SETTINGS.get(name, {}))


FILES = ("BackupAndRestore", "CSVLogger", "JSONLLogger", "ModelCheckpoint", "PredictionWriter")


# They change nothing in a training, so that one fit serves all of them.
WATCHING = (
    "BackupAndRestore", "CSVLogger", "DeviceStats", "JSONLLogger", "LambdaCallback",
    "LearningRateMonitor", "MLflowLogger", "ModelCheckpoint", "PredictionWriter", "ProgressBar",
    "TensorBoard", "TerminateOnNaN", "Timer", "WandbLogger",
)  # fmt: skip
ACTING = sorted({*CLASSES} - {*WATCHING, "Callback", "History"})


class Built:
    """Trainers that the law below uses again and again, since compiling takes longest."""

    def __init__(self):
        self.shared = Shared(2)
        self.trainers = {}

    def fresh(self, distribute):
        """Return the trainer of one process alone, or of this rank, as it was built."""
        rank = None if distribute is None else distribute.rank
        if rank not in self.trainers:
            on = trainer(distribute, accumulate=2)
            self.trainers[rank] = on, on.get_state()
        on, state = self.trainers[rank]
        on.set_state(state)
        return on


BUILT = [Built()]


@pytest.mark.parametrize("names", [WATCHING, *([name] for name in ACTING)], ids=lambda n: n[0])
def test_every_callback_does_what_it_does_alone(names, tmp_path):
    def run(distribute):
        # Files of rank 1 would lie in a folder of their own.
        folder = tmp_path / ("alone" if distribute is None else f"rank{distribute.rank}")
        callbacks = [made(name, folder) for name in names]
        on = fit(built.fresh(distribute), *callbacks)
        predicted = on.predict(X, batch_size=5, callbacks=callbacks)
        on.evaluate(X, Y, callbacks=callbacks)
        paths = [callback.best_model_path for callback in callbacks if hasattr(callback, "kept")]
        return (*end(on), predicted, paths)

    built = BUILT.pop() if BUILT else Built()
    alone = run(None)
    first, second = on_ranks(2, run, built.shared)
    BUILT.append(built)  # not after an error
    same(first, second)
    np.testing.assert_array_equal(first[2], second[2])
    if names != ["BatchSizeFinder"]:  # its first size has a row for each rank
        same(first, alone, rtol=1e-9)
        np.testing.assert_allclose(first[2], alone[2], rtol=1e-9)
    for measured in MEASURED:
        assert first[1].get(measured) == second[1].get(measured)
    assert not (tmp_path / "rank1").exists()

    def files(folder):
        paths = [p.name for p in folder.rglob("*") if p.is_file()]
        return sorted(path for path in paths if not path.startswith("events"))

    assert files(tmp_path / "rank0") == files(tmp_path / "alone")
    for mine, other in zip(first[3], second[3]):
        assert Path(mine).exists()
        assert Path(mine).name == Path(other).name


def test_rank_0_alone_writes(tmp_path):
    def write(communicator):
        folder = tmp_path / str(communicator.rank)
        on = trainer(communicator)
        returned = [
            on.save(folder / "a.ckpt"), on.snapshot().write(folder / "b.ckpt"),
            on.save_onnx_graph(folder / "graphs"), on.export(folder / "m.onnx").SerializeToString(),
        ]  # fmt: skip
        return [str(r).replace(str(folder), "") for r in returned]

    first, second = on_ranks(2, write)
    assert first == second
    names = ["a.ckpt", "b.ckpt", "graphs", "m.onnx"]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == names
    assert not (tmp_path / "1").exists()


class Act(Callback):
    """Do something in a hook, on all ranks."""

    def __init__(self, hook, act):
        setattr(self, hook, lambda *arguments: act(self.trainer, *arguments))


HOOKS = (
    "on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_test_begin",
    "on_test_batch_end", "on_test_end", "on_epoch_end", "on_gradients",
)  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_rank_0_stops_all_in_every_hook(hook):
    def run(communicator):
        def act(on, *_):
            if on.rank == stops and on.global_batch >= 2 * (hook != "on_train_begin"):
                on.stop_training, on.stop_reason = True, f"rank {on.rank}"

        on = trainer(communicator, backend="forward_backward" if "grad" in hook else "full")
        ends = []
        for stops in (1, 0):  # noqa: B007  `act` reads it
            fit(on, Act(hook, act), epochs=3)
            ends += [on.epoch, on.global_batch, on.stop_reason]
        return ends

    first, second = on_ranks(2, run)
    assert first == second
    assert first[:3] == [3, 12, None]
    assert first[3] < 6
    assert first[5] == "rank 0"


def test_a_stop_outside_of_hooks_waits_for_all(monkeypatch):
    """A signal or a thread may set it on rank 0 at any moment."""

    def run(communicator):
        on = trainer(communicator)
        step = on._training.step

        def stop(*arguments):
            on.stop_training = on.is_main
            return step(*arguments)

        on._training.step = stop
        fit(on, epochs=3)
        return on.epoch, on.global_batch

    assert on_ranks(2, run) == [(1, 4)] * 2


CALLS = {
    "evaluate": lambda on: on.evaluate(X, Y),
    "predict": lambda on: on.predict(X),
    "test_on_batch": lambda on: on.test_on_batch(X, Y),
    "predict_on_batch": lambda on: on.predict_on_batch(X),
    "train_on_batch": lambda on: on.train_on_batch(X, Y),
    "set_weights": lambda on: on.set_weights(on.get_weights()),
    "set_state": lambda on: on.set_state(on.get_state()),
    "revert_step": lambda on: on.revert_step(),
    "apply_gradients": lambda on: on.apply_gradients(on.get_weights()),
    "restore": lambda on: on.restore("a.ckpt"),
    "fit": lambda on: on.fit(X, Y, verbose=0),
}


def test_a_call_on_one_rank_is_refused():
    """Under `if trainer.is_main`, or in a logger; a hang would be the other end."""
    told = []

    def under_is_main(communicator):
        on = trainer(communicator, backend="forward_backward")
        for name, call in CALLS.items():
            other = CALLS["evaluate" if name == "predict" else "predict"]
            with pytest.raises(SettingError) as caught:
                (call if on.is_main else other)(on)
            assert "The ranks are out of step: rank 0: " in str(caught.value)
            assert name in str(caught.value)

        def act(on, *_):
            for name, call in CALLS.items():
                if name not in ("fit", "restore"):
                    with pytest.raises(SettingError, match="runs on rank 0 alone"):
                        call(on)
                    told.append(name)

        logger = Act("on_train_batch_end", act)
        logger.ranks = "first"
        on.fit(X, Y, batch_size=16, verbose=0, callbacks=logger)

    on_ranks(2, under_is_main)
    assert len(told) == len(CALLS) - 2


def test_a_second_thread_cannot_call_the_other_ranks_while_one_works_with_them():
    """Its exchanges would meet those of the step on another rank."""

    def run(communicator):
        errors = []

        def call_all(on):
            for name, call in CALLS.items():
                with pytest.raises(SettingError) as caught:
                    call(on)
                errors.append((name, str(caught.value)))

        def act(on, *_):
            thread = threading.Thread(target=call_all, args=[on])
            thread.start()
            thread.join()

        on = trainer(communicator, backend="forward_backward")
        before = communicator.calls
        on.fit(X, Y, batch_size=16, verbose=0, callbacks=Act("on_epoch_begin", act))
        with_thread = communicator.calls - before
        on.fit(X, Y, batch_size=16, verbose=0, callbacks=Act("on_epoch_begin", lambda *_: None))
        return errors, with_thread, communicator.calls - before - with_thread

    for errors, with_thread, without in on_ranks(2, run):
        assert [name for name, _ in errors] == list(CALLS)
        assert with_thread == without
        for name, message in errors:
            told = (
                "Another thread is training",
                "another thread of rank",
                "cannot be called during a fit",
            )
            assert any(words in message for words in told), (name, message)


def test_an_evaluation_keeps_other_threads_from_the_ranks():
    def run(communicator):
        on, errors = trainer(communicator), []

        def predict():
            with pytest.raises(SettingError, match="predict needs all 2 ranks, but another thread"):
                on.predict(X)
            errors.append("predict")

        def act(*_):
            thread = threading.Thread(target=predict)
            thread.start()
            thread.join()

        on.evaluate(X, Y, callbacks=LambdaCallback(on_test_begin=act))
        on.predict(X)
        return errors

    assert on_ranks(2, run) == [["predict"]] * 2


class Evaluating(Metric):
    """A metric that evaluates on one rank."""

    trainer = None

    def reset(self):
        pass

    def merge(self, states):
        pass

    def update(self, labels, outputs, weights):
        if self.trainer is not None and self.trainer.rank == 1:
            self.trainer.evaluate(X, Y)

    def result(self):
        return 0.0


@pytest.mark.parametrize("kind", [lambda c: c, Averaging])
@pytest.mark.parametrize("who", ["on_gradients", "A metric"])
def test_nothing_within_a_step_calls_the_other_ranks(kind, who):
    """The sums of a step have no names: they would meet the exchanges of an evaluation."""

    def run(communicator):
        metric = Evaluating()
        on = trainer(kind(communicator), backend="forward_backward", metrics=[metric])
        callbacks = ()
        if who == "on_gradients":
            callbacks = Act("on_gradients", lambda on, *_: on.rank == 1 and on.evaluate(X, Y))
        else:
            for one in on._training.recipe.metrics:
                one.metric.trainer = on
        fit(on, *[callbacks] if callbacks else [])

    with pytest.raises(
        SettingError, match=f"{who} runs inside a training step, but .* needs all ranks"
    ):
        on_ranks(2, run)


def test_what_only_rank_0_decides_counts_everywhere():
    """Settings that rank 0 alone changes in a hook; weights would differ otherwise."""

    def run(communicator):
        def act(on, *_):
            if on.is_main:
                on.accumulate, on.frozen, on.learning_rate = 1, ["w0"], 0.2
                on.log("steps", on.global_step)

        on = fit(trainer(communicator, accumulate=2), Act("on_epoch_end", act))
        return (*end(on), on.accumulate, on.frozen, on.learning_rate)

    first, second = on_ranks(2, run)
    same(first, second)
    assert first[1]["steps"] == [2, 6]
    assert first[2:] == second[2:] == (1, ("w0",), 0.2)


@pytest.mark.parametrize("kind", [lambda c: c, Averaging])
def test_a_loss_that_is_not_finite_stops_all(kind):
    """Only rank 1 has the row, and all undo the update."""
    y = X[:, :3].copy()
    y[-1] = 1e200

    def run(communicator):
        on = onnxfit.Trainer(network(), loss="mse", distribute=kind(communicator))
        on.fit(X, y, batch_size=4, shuffle=False, verbose=0, callbacks=TerminateOnNaN())
        return on.get_weights(), on.stop_reason, on.global_batch

    first, second = on_ranks(2, run)
    same((first[0], {}), (second[0], {}))
    assert first[1:] == second[1:]
    assert first[1].startswith("TerminateOnNaN: the loss is inf")
    assert np.abs(first[0]["w0"]).max() < 10


def test_a_finder_draws_once(monkeypatch):
    drawn = []
    for module in (batch_size_finder, learning_rate_finder):
        monkeypatch.setattr(module, "plot_curve", lambda path, *_, **axes: drawn.append(path))

    def run(communicator):
        for finder in (LearningRateFinder(), BatchSizeFinder()):
            finder.trainer = SimpleNamespace(is_main=communicator.rank == 0)
            finder.plot(f"{communicator.rank}.png")

    on_ranks(2, run)
    BatchSizeFinder().plot("before a fit.png")
    assert drawn == ["0.png", "0.png", "before a fit.png"]


def test_weights_that_differ_are_refused():
    def run(communicator):
        on = trainer(communicator)
        on.set_weights({"b1": np.full(3, float(on.rank))})

    with pytest.raises(SettingError, match="Rank 1 has the weights of set_weights"):
        on_ranks(2, run)


def test_figures_that_differ_are_those_of_rank_0():
    """Otherwise each rank would restore its own best weights."""

    def run(communicator):
        def act(on, epoch, logs):
            on.log("seconds", [3, 1, 2][epoch - on.rank])

        best = EarlyStopping("seconds", patience=5, restore_best_weights=True)
        on = fit(trainer(communicator), Act("on_epoch_end", act), best, epochs=3)
        return (*end(on), best.best_epoch)

    first, second = on_ranks(2, run)
    same(first, second)
    assert first[2] == second[2] == 1


def test_a_timer_of_one_rank_stops_none():
    def run(communicator):
        timer = Timer(1e-9 if communicator.rank == 1 else 1e9)
        return fit(trainer(communicator), timer).epoch

    assert on_ranks(2, run) == [2, 2]


def test_a_pruned_trial_ends_all_ranks():
    reports = []
    trial = SimpleNamespace(report=lambda value, epoch: reports.append(epoch), should_prune=lambda: True)  # fmt: skip

    def run(communicator):
        on = trainer(communicator)
        pruning = OptunaPruning(None if communicator.rank else trial, monitor="loss")
        with pytest.raises(sys.modules["optuna"].TrialPruned, match="pruned at epoch 1"):
            fit(on, pruning, epochs=5)
        return on.epoch

    assert on_ranks(2, run) == [1, 1]
    assert reports == [0]


def test_lines_are_printed_once(capsys):
    def run(communicator):
        on = trainer(communicator)
        stopping = EarlyStopping("loss", verbose=1, stopping_threshold=1e9)
        on.fit(X, Y, batch_size=8, callbacks=stopping, verbose=2)
        on.evaluate(X, Y, verbose=2)

    on_ranks(2, run)
    printed = "".join(capsys.readouterr())
    for words in ("epoch 1/1", "EarlyStopping stops training", "evaluate  "):
        assert printed.count(words) == 1, printed


# ---------------------------------------------------------------- averages of weights


def test_between_two_averages_nothing_of_one_rank_gets_out():
    refused = {"save": ["a"], "evaluate": [X, Y], "predict": [X], "snapshot": [], "export": []}

    def run(communicator):
        def act(on, *_):
            for call, arguments in refused.items():
                if on.global_step % 2:
                    with pytest.raises(
                        SettingError,
                        match=rf"{call} at step \d would use the weights of rank \d alone",
                    ):
                        getattr(on, call)(*arguments)
                else:
                    getattr(on, call)(*arguments)

        fit(trainer(Averaging(communicator)), Act("on_train_batch_end", act), epochs=1)

    on_ranks(2, run)


def test_callbacks_with_averages_of_weights():
    """They save and evaluate after an average, and decide by the loss of all ranks."""

    def run(communicator):
        seen = []

        def act(on, batch, logs):
            seen.append(logs["batch_loss"])
            if on.global_step % 2 == 0:
                on.evaluate(X, Y)

        finder = LearningRateFinder(steps=7)
        on = trainer(Averaging(communicator))
        callbacks = [
            finder, Act("on_train_batch_end", act), SwapEMAWeights(),
            ModelCheckpoint("{step}.ckpt", save_freq=4), BackupAndRestore("backup", save_freq=2),
        ]  # fmt: skip
        fit(on, *callbacks, epochs=2)
        state = on.get_state()
        on.set_state(state)
        on.evaluate(X, Y)
        return (*end(on), seen, finder.losses)

    first, second = on_ranks(2, run)
    same(first, second)
    assert first[2] == second[2]
    assert first[3] == second[3]
    assert len(first[3]) == 7
    assert sorted(path.name for path in Path().glob("*.ckpt")) == ["4.ckpt", "8.ckpt"]


def test_saves_between_averages_are_refused_at_the_start():
    def run(communicator):
        on = trainer(Averaging(communicator))
        for setting in ({"save_freq": 3}, {"every_n_steps": 5}):
            with pytest.raises(SettingError, match="a multiple of 2"):
                fit(on, ModelCheckpoint("a", **setting))

    on_ranks(2, run)


# ---------------------------------------------------------------- checkpoints


class StopAt(Callback):
    """Raise on all ranks after so many batches; the last of the backups' phase."""

    phase = "backup"
    ranks = "all"

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_end(self, batch, logs):
        if self.trainer.global_batch == self.batches:
            raise InterruptedError


def resumable(distribute, folder, stop=None, **settings):
    """Train with backups after every batch, and stop after some batches."""
    on = trainer(distribute, accumulate=2, metrics=["accuracy"], **settings)
    callbacks = [
        EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        BackupAndRestore(folder, save_freq=1, background=False),
        *([StopAt(stop)] if stop else [StopAt(-1)]),
    ]
    try:
        fit(on, *callbacks, epochs=3, steps_per_epoch=3)
    except InterruptedError:
        assert stop
    return end(on)


@pytest.mark.parametrize(
    ("begun", "resumed", "backend"),
    [(1, 3, "full"), (3, 1, "full"), (2, 2, "full"), (2, 2, "forward_backward")],
)
def test_a_fit_goes_on_within_a_window(begun, resumed, backend, tmp_path):
    """On as many ranks bit for bit, and on another number within rounding."""

    def run(size, folder, stop=None):
        if size == 1:
            return resumable(None, folder, stop, backend=backend)
        ends = on_ranks(size, lambda c: resumable(c, folder, stop, backend=backend))
        for other in ends[1:]:
            same(ends[0], other) if stop is None else None
        return ends[0]

    whole = run(begun, tmp_path / "whole")
    run(begun, tmp_path / "backup", 4)
    assert len(list((tmp_path / "backup").iterdir())) == 2
    same(run(resumed, tmp_path / "backup"), whole, rtol=0.0 if begun == resumed else 1e-9)


def test_only_rank_0_has_the_files(tmp_path, monkeypatch):
    """Machines need not share a file system; the others get the files in several messages."""
    monkeypatch.setattr(checkpoint, "MAX_MESSAGE_BYTES", 1000)

    def run(communicator, stop=None):
        return resumable(communicator, tmp_path / str(communicator.rank), stop)

    whole = on_ranks(2, run)
    on_ranks(2, lambda c: run(c, stop=6))
    assert not (tmp_path / "1").exists()
    for ended in on_ranks(2, run):
        same(ended, whole[0])

    def saved_and_loaded(communicator):
        path = tmp_path / f"{communicator.rank}.ckpt"
        on = trainer(communicator)
        on.train_on_batch(X, Y)
        on.save(path)
        other = onnxfit.Trainer.load(path, distribute=communicator)
        on.train_on_batch(X, Y)
        on.restore(path)
        return on.get_weights(), other.get_weights()

    for restored, loaded in on_ranks(2, saved_and_loaded):
        for name, array in restored.items():
            np.testing.assert_array_equal(array, loaded[name])


def test_all_ranks_fail_alike_to_restore(tmp_path):
    Path("damaged.ckpt").write_bytes(b"PK damaged")

    def run(communicator):
        messages = []
        for path in ("missing.ckpt", "damaged.ckpt", "."):
            for act in (
                trainer(communicator).restore,
                lambda p: onnxfit.Trainer.load(p, distribute=communicator),
            ):
                with pytest.raises(CheckpointError) as caught:
                    act(path)
                messages.append(str(caught.value))
        return messages

    first, second = on_ranks(2, run)
    assert first == second


def test_sums_of_a_stranger(tmp_path):
    """Damaged sums of the ranks are refused on all ranks, before or when training goes on."""
    on_ranks(2, lambda c: resumable(c, tmp_path / "backup", stop=2))
    path = max((tmp_path / "backup").iterdir())
    contents = contents_of(
        onnxfit.Trainer.load(path, distribute=None)._training, adapters_only=False, copy=True
    )
    tracker = dict(contents.tracker)
    whole, other = tracker["ranks"]
    damaged = [3, [1], ["a", {}], [{}, {}], [whole, {**other, "metrics": {"accuracy": {"a": []}}}]]
    for number, sums in enumerate([*damaged, []]):
        contents.tracker = {**tracker, "ranks": sums}
        Snapshot(contents).write(tmp_path / f"{number}.ckpt")

    def resume(on, path):
        on.restore(path)
        return fit(on, epochs=3, steps_per_epoch=3)

    def run(communicator):
        on = trainer(communicator, accumulate=2, metrics=["accuracy"])
        messages = []
        for number in range(len(damaged)):
            with pytest.raises(CheckpointError) as caught:
                resume(on, tmp_path / f"{number}.ckpt")
            messages.append(str(caught.value))
        return messages, end(resume(on, tmp_path / f"{len(damaged)}.ckpt"))

    first, second = on_ranks(2, run)
    assert first[0] == second[0]
    same(first[1], second[1])


def test_a_checkpoint_does_not_decide_who_trains(tmp_path):
    def run(communicator):
        on = trainer(communicator)
        assert "distribute" not in on.settings
        on.save(tmp_path / "a.ckpt")

    on_ranks(2, run)
    contents = contents_of(
        onnxfit.Trainer.load(tmp_path / "a.ckpt", distribute=None)._training,
        adapters_only=False,
        copy=True,
    )
    contents.settings = {**contents.settings, "distribute": "mpi"}
    Snapshot(contents).write(tmp_path / "a.ckpt")
    for settings in ({}, {"distribute": None}):
        with pytest.raises(CheckpointError, match="settings contain 'distribute'"):
            onnxfit.Trainer.load(tmp_path / "a.ckpt", **settings)


MOMENTS = {
    "on_train_batch_begin": "full",
    "on_gradients": "forward_backward",
    "on_test_begin": "full",
    "on_epoch_begin": "full",
}


@pytest.mark.parametrize("hook", MOMENTS)
def test_a_checkpoint_of_any_hook_has_the_figures_of_all_rows(hook, tmp_path):
    def run(distribute):
        def act(on, *_):
            if on.global_batch == 6 - 2 * (hook in ("on_test_begin", "on_epoch_begin")):
                on.save("saved.ckpt")

        on = trainer(distribute, metrics=["accuracy"], backend=MOMENTS[hook])
        return end(fit(on, Act(hook, act), epochs=2))

    whole = on_ranks(2, run)[0]
    resumed = fit(onnxfit.Trainer.load("saved.ckpt", distribute=None), epochs=2)
    same(end(resumed), whole, rtol=1e-9)


def test_figures_of_one_rank_are_left_out_with_a_warning():
    """After Ctrl-C there is nobody to ask for the other rows."""

    def run(communicator):
        on = trainer(communicator)
        flush = on._training.flush

        def interrupted(*arguments):
            if on.global_batch == 8:  # after as many batches as the last exchange had
                raise KeyboardInterrupt
            return flush(*arguments)

        on._training.flush = interrupted
        with pytest.raises(KeyboardInterrupt):
            fit(on)
        if on.is_main:  # `pytest.warns` is for one thread
            with pytest.warns(UserWarning, match="lacks the loss and metrics of the epoch"):
                on.save("saved.ckpt")
        return on.get_weights()

    weights = on_ranks(2, run)[0]
    loaded = onnxfit.Trainer.load("saved.ckpt", distribute=None)
    same((loaded.get_weights(), {}), (weights, {}))
    assert fit(loaded).history.history["loss"]


def test_a_save_in_the_middle_of_a_window_is_refused():
    """Each rank has its own part of the gradients that wait."""

    def run(communicator):
        def act(on, *_):
            if on.is_main:
                on.save("a.ckpt")

        fit(trainer(communicator, accumulate=2), Act("on_train_batch_end", act))

    with pytest.raises(SettingError, match="save after 1 of 2 batches of an update"):
        on_ranks(2, run)


def test_after_an_error_nobody_waits_for_the_others():
    """SwapEMAWeights sets the weights back; the other ranks may be anywhere."""

    def run(communicator):
        def interrupt(on, *_):
            raise KeyboardInterrupt

        def evaluate(on, error):
            if on.is_main:  # `pytest.warns` is for one thread
                with pytest.raises(SettingError, match="rank 0 is ending after an error"):
                    on.evaluate(X, Y)

        on = trainer(communicator)
        swap = SwapEMAWeights()
        ends = Act("on_exception", evaluate)
        calls = communicator.calls
        interrupts = LambdaCallback(on_test_batch_begin=lambda *_: interrupt(on))
        with pytest.raises(KeyboardInterrupt):
            fit(on, swap, ends, interrupts)
        return swap.weights, communicator.calls - calls

    first, second = on_ranks(2, run)
    assert first == second
    assert first[0] is None  # they are swapped back


class Counting:
    """A communicator that counts its calls, and those whose buffers are short."""

    def __init__(self, communicator):
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.broadcast, self.abort = communicator.broadcast, communicator.abort
        self.calls = 0

    def allreduce(self, buffer):
        self.calls += 1
        self._communicator.allreduce(buffer)


LISTENING = {
    "none": (lambda: (), 0),
    "a monitor of any kind": (lambda: LambdaCallback(on_train_batch_end=lambda *_: None), 2),
    "TerminateOnNaN": (TerminateOnNaN, 0),
    "a checkpoint after each batch": (lambda: ModelCheckpoint("c.ckpt", save_freq=1), 2),
    "a checkpoint now and then": (lambda: ModelCheckpoint("c.ckpt", save_freq=100), 0),
    "a backup now and then": (lambda: BackupAndRestore("backup", every_n_steps=100), 0),
}


@pytest.mark.parametrize("name", LISTENING)
def test_batches_are_exchanged_only_where_a_callback_reads_them(name):
    """Beside the sum of the gradients: one exchange for the figures, and one for the decisions."""
    make, expected = LISTENING[name]

    def run(communicator):
        counts = []
        for rows in (8, 4):  # 2 and 4 batches
            counting = Counting(communicator)
            on = trainer(counting)
            before = counting.calls
            callback = make()
            fit(
                on, *[callback] if callback else [], epochs=1, batch_size=rows, validation_data=None
            )
            counts.append(counting.calls - before)
        return (counts[1] - counts[0]) / 2 - 1

    assert on_ranks(2, run) == [expected] * 2


def test_a_stop_that_no_callback_announces_waits_for_the_next_exchange():
    class Quiet(Callback):
        def needs_synced_logs(self, batch):
            return batch == 2

        def on_train_batch_end(self, batch, logs):
            seen.append((self.trainer.rank, batch, sorted(logs)))
            if self.trainer.is_main:
                self.trainer.stop_training = True

    seen = []
    batches = on_ranks(2, lambda c: fit(trainer(c), Quiet(), epochs=3).global_batch)
    assert batches == [3, 3]
    figures = {batch: names for rank, batch, names in seen if rank == 1}
    assert figures == {0: ["batch_loss"], 1: ["batch_loss"], 2: ["batch_loss", "loss"]}

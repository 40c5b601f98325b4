"""EarlyStopping, ReduceLROnPlateau, LearningRateScheduler and ModelCheckpoint on scripted values of
the monitored figure.
"""

import functools
import json
import math

import numpy as np
import onnx
import pytest
import safetensors.numpy

import onnxfit
from onnxfit.callbacks import (
    Callback,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from onnxfit.errors import CheckpointError, SettingError, UnknownNameError
from onnxfit.optimizers import SGD
from onnxfit.schedules import Constant
from tests.builds import every_way

NAN, INF = math.nan, math.inf
X, Y = np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32)


def trainer(learning_rate=0.1, **settings):
    """y = w x with w = 1 at first; on X and Y every update brings w nearer to 0."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> line (float[N, 1] x) => (float[N, 1] y) <float[1,'
        " 1] w = {1}> { y = MatMul(x, w) }"
    )
    return onnxfit.Trainer(model, loss="mse", optimizer=learning_rate, **settings)


@functools.cache
def built(learning_rate, backend, gradient):
    on = trainer(learning_rate, backend=backend, gradient=gradient)
    return on, on.get_state()


def ready(way, learning_rate=0.1):
    """A trainer that trains this way, as new; made once, for compiling takes longer than all the
    rest.
    """
    on, state = built(learning_rate, **way)
    on.set_state(state)
    return on


def row(values, settings, *expected):
    """A row of a table, named by what it is about."""
    named = " ".join(f"{name} {value}" for name, value in settings.items())
    return pytest.param(values, settings, *expected, id=f"{values} {named}".replace(" True", ""))


class Script(Callback):
    """Logs one value an epoch (None: not this epoch), and remembers what the trainer was after
    each.
    """

    def __init__(self, values, name="val_loss"):
        self.values, self.name = values, name
        self.weights = []

    def on_epoch_end(self, epoch, logs):
        if self.values[epoch] is not None:
            self.trainer.log(self.name, self.values[epoch])
        self.weights.append(self.trainer.get_weights())

    @property
    def ran(self):
        return len(self.weights)


def run(values, *callbacks, name="val_loss", on=None, **settings):
    """A fit of as many epochs as there are values, of which the callbacks monitor one each; the
    script.
    """
    script = Script(values, name)
    (on or trainer()).fit(
        X,
        Y,
        epochs=len(values),
        batch_size=2,
        verbose=0,
        callbacks=[script, *callbacks],
        **settings,
    )
    return script


def same(one, other):
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- EarlyStopping

LONG = [10, 9, 8, 9, 8.9, 8.8, 8.7, 8.6, 8.5]


@every_way
@pytest.mark.parametrize(
    ("values", "settings", "ran", "best"),
    [
        row(LONG, {"patience": 0}, 4, 8),
        row(LONG, {"patience": 1}, 4, 8),
        row(LONG, {"patience": 2}, 5, 8),
        row(LONG, {"patience": 3}, 6, 8),
        row([1, 1, 1], {"patience": 0}, 2, 1),
        row([0.6, 0.4, 0.41, 0.42, 0.43], {"baseline": 0.5, "patience": 2}, 4, 0.4),
        row([0.9, 0.8, 0.7, 0.6, 0.55, 0.54], {"baseline": 0.5, "patience": 3}, 3, 0.7),
        row([4, 3.5, 3, 2.5], {"min_delta": 0.5, "patience": 1}, 2, 4),
        row([4, 3.74, 3.49, 3], {"min_delta": 0.25, "patience": 1}, 3, 3.74),
        row([1, NAN, 0.5, 0.2, 0.1], {"patience": 3}, 5, 0.1),
        row([9, 8, 7, 6, 5, 6, 4, 3, 2, 1], {"stopping_threshold": 2.9, "patience": 3}, 9, 2),
        row([9, 4, 2, 16, 32, 64], {"divergence_threshold": 15.9, "patience": 3}, 4, 2),
        row([4, 3, INF, 2, 1], {"check_finite": True, "patience": 9}, 3, 3),
        row([4, 3, NAN, 2, 1], {"check_finite": True, "patience": 9}, 3, 3),
        row([6, 5, 5, 5, 5, 5], {"patience": 3}, 5, 5),
        row([6, 5, 4, 4, 3, 3], {"patience": 1}, 4, 4),
        row([6, 5, 6, 5, 5, 5], {"patience": 3}, 5, 5),
    ],
)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping_stops_after(way, values, settings, ran, best, mode):
    sign = 1 if mode == "min" else -1  # the mirror image behaves alike
    settings = {
        name: (
            sign * value
            if name in ("baseline", "stopping_threshold", "divergence_threshold")
            else value
        )
        for name, value in settings.items()
    }
    stopping = EarlyStopping(mode=mode, **settings)
    script = run([sign * value for value in values], stopping, on=ready(way))
    assert script.ran == ran
    assert stopping.best == sign * best
    if ran < len(values):
        assert stopping.stopped_epoch == ran - 1
        assert script.trainer.stop_training
        assert "EarlyStopping: val_loss is" in script.trainer.stop_reason
    else:
        assert stopping.stopped_epoch == 0
        assert script.trainer.stop_reason is None


@every_way
@pytest.mark.parametrize(
    ("values", "settings", "ran", "best_epoch"),
    [
        row([0.2, 0.15, 0.1, 0.11, 0.12], {"patience": 2}, 5, 2),
        row([5, 1, 2, 3], {"patience": 10}, 4, 1),
        row([0.9, 0.8, 0.7, 0.71, 0.72, 0.73], {"baseline": 0.5, "patience": 5}, 5, 2),
        row([1, 2, 3, 3], {"start_from_epoch": 2, "patience": 1}, 4, 2),
        row([0.1, 0.1, 0.1, 1, 2, 3, 4], {"start_from_epoch": 3, "patience": 2}, 6, 3),
        row([0.3, 0.1, 0.2], {"start_from_epoch": 5}, 3, None),
        row([NAN, 1, 0.5, 0.2, 0.1], {"patience": 3}, 5, 4),
        row([NAN, NAN, NAN], {"patience": 1}, 2, None),
    ],
)
def test_early_stopping_restores_the_weights_of_the_best_epoch(
    way, values, settings, ran, best_epoch
):
    stopping = EarlyStopping(restore_best_weights=True, **settings)
    script = run(values, stopping, on=ready(way))
    assert script.ran == ran
    assert stopping.best_epoch == best_epoch
    assert same(
        script.trainer.get_weights(), script.weights[-1 if best_epoch is None else best_epoch]
    )
    assert not same(script.weights[0], script.weights[-1])


def test_early_stopping_passes_over_epochs_without_the_figure_with_one_warning():
    with pytest.warns(
        UserWarning,
        match=r"EarlyStopping monitors 'val_loss', which was not computed here; available: loss",
    ) as warned:
        assert run([1, None, 1, None, 1], EarlyStopping(patience=3)).ran == 5
    assert len(warned) == 1
    with pytest.warns(UserWarning, match="val_loss"):
        assert run([1, None, 1, None, 1], EarlyStopping(patience=2)).ran == 5


@every_way
def test_early_stopping_begins_afresh_in_every_fit(way):
    stopping = EarlyStopping(patience=1, restore_best_weights=True)
    for values, best in (([1, 0.9, 0.9, 0.1], 0.9), ([5, 4, 4, 1], 4)):
        script = run(values, stopping, on=ready(way))
        assert (script.ran, stopping.stopped_epoch, stopping.best) == (3, 2, best)
        assert same(script.trainer.get_weights(), script.weights[1])


@every_way
@pytest.mark.parametrize("k", range(7))
def test_early_stopping_resumed_after_any_epoch_stops_where_it_would_have(way, k):
    values, settings = [9, 7, 8, 6, 7, 6.5, 6.4, 6.3, 1], {
        "patience": 4,
        "restore_best_weights": True,
    }
    whole = EarlyStopping(**settings)
    run(values, whole, on=ready(way))
    first, second = EarlyStopping(**settings), EarlyStopping(**settings)
    on = ready(way)
    on.fit(X, Y, epochs=k + 1, batch_size=2, verbose=0, callbacks=[Script(values), first])
    second.load_state_dict(first.state_dict())
    on.fit(
        X,
        Y,
        initial_epoch=k + 1,
        epochs=len(values),
        batch_size=2,
        verbose=0,
        callbacks=[Script(values), second],
    )
    assert (
        (second.stopped_epoch, second.best, second.best_epoch)
        == (whole.stopped_epoch, whole.best, whole.best_epoch)
        == (7, 6, 3)
    )


def test_a_state_of_another_shape_is_refused_by_name():
    with pytest.raises(
        CheckpointError,
        match=r"state of EarlyStopping\(val_loss\) lacks best_epoch, .*; it has best\.",
    ):
        EarlyStopping().load_state_dict({"best": 1.0})


@pytest.mark.parametrize(
    ("monitor", "ran"),
    [("val_loss", 3), ("mean_squared_error", 3), ("val_accuracy", 5), ("auc", 5)],
)
def test_mode_auto_asks_the_trainer_which_way_is_better(monitor, ran):
    assert run([1, 2, 3, 4, 5], EarlyStopping(monitor, patience=2), name=monitor).ran == ran


# ---------------------------------------------------------------- learning rate


@every_way
@pytest.mark.parametrize(
    ("values", "settings", "rates"),
    [
        row([1] * 6, {"patience": 1, "factor": 0.1}, [1, 0.1, 0.01, 1e-3, 1e-4, 1e-5]),
        row([1] * 8, {"patience": 2, "factor": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]),
        row(
            [1] * 8,
            {"patience": 1, "cooldown": 2, "factor": 0.5},
            [1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625],
        ),
        row(
            [1] * 10,
            {"patience": 2, "cooldown": 2, "factor": 0.5},
            [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125],
        ),
        row([1] * 6, {"patience": 1, "factor": 0.5, "min_lr": 0.3}, [1, 0.5, 0.3, 0.3, 0.3, 0.3]),
        row(
            [1, 0.95, 0.9, 0.85, 0.8],
            {"patience": 2, "factor": 0.5, "min_delta": 0.1},
            [1, 1, 0.5, 0.5, 0.5],
        ),
        row([1, NAN, NAN, 0.5], {"patience": 2, "factor": 0.5}, [1, 1, 0.5, 0.5]),
    ],
)
def test_reduce_lr_on_plateau(way, values, settings, rates):
    seen = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(look.trainer.learning_rate))
    script = run(values, ReduceLROnPlateau(**settings), look, on=ready(way, 1.0))
    assert seen == pytest.approx(rates, rel=1e-12)
    # the logs have the rate that the epoch was trained with
    assert script.trainer.history.history["learning_rate"] == pytest.approx(
        [1, *rates[:-1]], rel=1e-12
    )


def test_reduce_lr_on_plateau_begins_afresh_in_every_fit_but_for_the_rate():
    on, reduce = trainer(1.0), ReduceLROnPlateau(patience=2, factor=0.5)
    run([1, 1], reduce, on=on)
    run([5, 5], reduce, on=on)
    assert on.learning_rate == 1.0
    run([7, 7, 7], reduce, on=on)
    assert on.learning_rate == 0.5


@pytest.mark.parametrize("k", range(7))
def test_reduce_lr_on_plateau_resumed_after_any_epoch_goes_on_as_it_would_have(k):
    values, settings = [1] * 8, {"patience": 2, "factor": 0.5, "cooldown": 1}
    first, second, on = ReduceLROnPlateau(**settings), ReduceLROnPlateau(**settings), trainer(1.0)
    on.fit(X, Y, epochs=k + 1, batch_size=2, verbose=0, callbacks=[Script(values), first])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    on.fit(
        X,
        Y,
        initial_epoch=k + 1,
        epochs=8,
        batch_size=2,
        verbose=0,
        callbacks=[Script(values), second],
    )
    assert on.learning_rate == 0.125


@every_way
def test_learning_rate_scheduler_by_epoch_and_by_the_rate_in_force(way):
    on = ready(way, 0.03)
    run([1, 1], LearningRateScheduler(lambda epoch, lr: lr / 2), on=on)
    assert on.learning_rate == pytest.approx(0.0075, rel=1e-12)
    on.fit(
        X,
        Y,
        epochs=3,
        verbose=0,
        callbacks=[LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))],
    )
    assert on.history.history["learning_rate"] == pytest.approx([0.1, 0.05, 0.1 / 3], rel=1e-12)
    on.fit(
        X, Y, epochs=1, verbose=0, callbacks=[LearningRateScheduler(lambda epoch, decay=0.5: decay)]
    )
    assert on.learning_rate == 0.5  # a default is the function's own business
    on.fit(
        X,
        Y,
        epochs=1,
        verbose=0,
        callbacks=[LearningRateScheduler(lambda epoch, learning_rate=None: learning_rate / 2)],
    )
    assert on.learning_rate == 0.25


def test_learning_rate_scheduler_does_not_set_a_resumed_epoch_again():
    first, second = (LearningRateScheduler(lambda epoch, lr: lr / 2) for _ in range(2))
    on = trainer(1.0)
    on.fit(X, Y, epochs=1, verbose=0, callbacks=[first])
    second.load_state_dict(first.state_dict())
    # as where training stopped within epoch 0
    on.fit(X, Y, epochs=1, verbose=0, callbacks=[second])
    assert on.learning_rate == 0.5
    on.fit(X, Y, epochs=1, verbose=0, callbacks=[second])
    assert on.learning_rate == 0.25


@pytest.mark.parametrize("value", [None, "0.1", True, NAN, INF, -1.0])
def test_learning_rate_scheduler_refuses_what_is_no_rate(value):
    with pytest.raises(ValueError, match="must return a finite number >= 0, got"):
        trainer().fit(X, Y, verbose=0, callbacks=[LearningRateScheduler(lambda epoch: value)])


@pytest.mark.parametrize(
    "callback",
    [ReduceLROnPlateau(), LearningRateScheduler(lambda epoch: 0.1)],
    ids=lambda c: type(c).__name__,
)
def test_an_optimizer_driven_by_a_schedule_is_refused_before_training(callback):
    on = trainer(SGD(Constant(0.1)))
    with pytest.raises(
        TypeError,
        match=(
            r"cannot change a learning rate that Constant.*keep the schedule and drop .*give SGD a"
            r" number"
        ),
    ):
        on.fit(X, Y, verbose=0, callbacks=[callback])
    assert on.global_step == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReduceLROnPlateau(factor=1), "0 < factor < 1, got 1"),
        (lambda: ReduceLROnPlateau(factor=2.0), "0 < factor < 1, got 2.0"),
        (lambda: ReduceLROnPlateau(factor=0), "0 < factor < 1, got 0"),
        (lambda: ReduceLROnPlateau(patience=-1), "patience >= 0, got -1"),
        (lambda: ReduceLROnPlateau(cooldown=-1), "cooldown >= 0, got -1"),
        (lambda: ReduceLROnPlateau(min_lr=-1), "min_lr >= 0, got -1"),
        (lambda: ReduceLROnPlateau(mode="least"), "'auto', 'min' or 'max', got 'least'"),
        (lambda: EarlyStopping(min_delta=-0.1), "min_delta >= 0, got -0.1"),
        (lambda: EarlyStopping(min_delta=NAN), "min_delta >= 0, got nan"),
        (lambda: EarlyStopping(start_from_epoch=-1), "start_from_epoch >= 0, got -1"),
        (lambda: LearningRateScheduler(0.1), "a function of the epoch, got 0.1"),
        (lambda: ModelCheckpoint("a", every_n_epochs=0), "every_n_epochs >= 1, got 0"),
        (lambda: ModelCheckpoint("a", every_n_steps=0), "every_n_steps >= 1, got 0"),
        (lambda: ModelCheckpoint("a", top_k=-1), "top_k >= 0, got -1"),
        (lambda: ModelCheckpoint("a", top_k=0), "saves nothing"),
        (lambda: ModelCheckpoint("a", top_k=2), "needs a path with a field"),
        (lambda: ModelCheckpoint("{}"), "by name"),
        (lambda: ModelCheckpoint("{epoch"), "cannot read the path template"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(SettingError, match=message):
        make()


# ---------------------------------------------------------------- ModelCheckpoint


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_template_is_filled_with_the_epoch_of_hooks_and_the_values_of_logs(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path / "new" / "folder" / "{epoch:03d}-{step}-{val_loss:.3f}.ckpt"
    )
    run([3, 1, 2], checkpoint)
    assert files(tmp_path / "new" / "folder") == [
        "000-1-3.000.ckpt",
        "001-2-1.000.ckpt",
        "002-3-2.000.ckpt",
    ]
    assert checkpoint.best_model_path == str(tmp_path / "new" / "folder" / "001-2-1.000.ckpt")
    assert checkpoint.best_model_score == 1
    assert checkpoint.last_model_path == str(tmp_path / "new" / "folder" / "002-3-2.000.ckpt")


def test_a_field_that_the_logs_lack_is_a_key_error_that_names_those_there_are(tmp_path):
    with pytest.raises(
        KeyError,
        match=(
            r"'val_los'.*Did you mean 'val_loss'\? Known: epoch, learning_rate, loss, step,"
            r" val_loss"
        ),
    ):
        run([1], ModelCheckpoint(tmp_path / "{val_los}.ckpt"))
    assert issubclass(UnknownNameError, KeyError)
    assert files(tmp_path) == []


@pytest.mark.parametrize(("n", "epochs"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), (3, [2]), (6, [])])
def test_every_n_epochs(tmp_path, n, epochs):
    run([1] * 5, ModelCheckpoint(tmp_path / "{epoch}", every_n_epochs=n))
    assert files(tmp_path) == [str(epoch) for epoch in epochs]


def test_every_n_steps(tmp_path):
    x, y = np.ones((64, 1), np.float32), np.zeros((64, 1), np.float32)
    on = trainer()
    on.fit(
        x,
        y,
        batch_size=1,
        epochs=2,
        verbose=0,
        callbacks=[ModelCheckpoint(tmp_path / "{epoch}-{step:03d}", every_n_steps=16)],
    )
    assert files(tmp_path) == [
        "0-016",
        "0-032",
        "0-048",
        "0-064",
        "1-080",
        "1-096",
        "1-112",
        "1-128",
    ]
    # counted by the trainer, so that another fit goes on
    on.fit(
        x,
        y,
        batch_size=16,
        epochs=4,
        verbose=0,
        callbacks=[ModelCheckpoint(tmp_path / "{epoch}-{step:03d}", every_n_steps=9)],
    )
    assert files(tmp_path)[8:] == ["1-135", "3-144"]


def test_every_n_steps_counts_updates_with_accumulated_gradients(tmp_path):
    x, y = np.ones((3, 1), np.float32), np.zeros((3, 1), np.float32)
    # an epoch of three batches is two updates, the second one at its end
    on = trainer(accumulate=2)
    on.fit(
        x,
        y,
        batch_size=1,
        epochs=3,
        verbose=0,
        callbacks=[ModelCheckpoint(tmp_path / "{epoch}-{step}", every_n_steps=1)],
    )
    assert files(tmp_path) == ["0-1", "0-2", "1-3", "1-4", "2-5", "2-6"]


def test_every_step_the_best_only(tmp_path):
    x = np.array([[2], [3], [0], [0]], np.float32)  # the running loss is 4, 6.5, 4.33, 3.25
    checkpoint = ModelCheckpoint(
        tmp_path / "{step}", monitor="loss", save_best_only=True, every_n_steps=1
    )
    trainer(0.0).fit(x, 0 * x, batch_size=1, shuffle=False, verbose=0, callbacks=[checkpoint])
    assert files(tmp_path) == ["1", "4"]
    assert checkpoint.best_model_score == pytest.approx(3.25)


def test_the_best_only_without_the_figure_saves_nothing_and_warns_once(tmp_path):
    with pytest.warns(UserWarning, match="ModelCheckpoint monitors 'foo'") as warned:
        run([1, 1, 1], ModelCheckpoint(tmp_path / "{epoch}", monitor="foo", save_best_only=True))
    assert len(warned) == 1
    assert files(tmp_path) == []


def test_all_are_saved_without_the_figure(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", monitor="foo")
    run([1, 1, 1], checkpoint)
    assert files(tmp_path) == ["0", "1", "2"]
    assert checkpoint.best_model_path is None


def test_the_best_only(tmp_path):
    run([3, 4, NAN, 2, 2, 1], ModelCheckpoint(tmp_path / "{epoch}", save_best_only=True))
    assert files(tmp_path) == ["0", "3", "5"]


def test_a_new_fit_forgets_the_best_and_a_resumed_one_keeps_it(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{val_loss}", save_best_only=True)
    run([1], checkpoint)
    run([3], checkpoint)
    assert files(tmp_path) == ["1.0", "3.0"]
    resumed = ModelCheckpoint(tmp_path / "{val_loss}", save_best_only=True)
    resumed.load_state_dict(json.loads(json.dumps(checkpoint.state_dict())))
    run([4, 2], resumed)
    assert files(tmp_path) == ["1.0", "2.0", "3.0"]


@pytest.mark.parametrize(
    ("values", "top_k", "kept", "best"),
    [
        ([3, 1, 2, 0.5], 2, ["1", "3"], "3"),
        ([NAN, 2, 1], 1, ["2"], "2"),
        ([2, NAN, 3], 2, ["0", "2"], "0"),
        ([2, NAN], 2, ["0", "1"], "0"),
        ([1, 1, 1], 1, ["0"], "0"),
        ([3, 2, 1], None, ["0", "1", "2"], "2"),
    ],
)
def test_top_k(tmp_path, values, top_k, kept, best):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", top_k=top_k)
    run(values, checkpoint)
    assert files(tmp_path) == kept
    assert checkpoint.best_model_path == str(tmp_path / best)
    json.dumps(checkpoint.state_dict(), allow_nan=False)


def test_save_last(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path / "{epoch}" / "{val_loss:.2f}.ckpt", top_k=0, save_last=True
    )
    script = run([3, 1, 2], checkpoint)
    assert files(tmp_path) == ["last.ckpt"]
    assert checkpoint.last_model_path == str(tmp_path / "last.ckpt")
    assert same(onnxfit.Trainer.load(tmp_path / "last.ckpt").get_weights(), script.weights[2])


def test_the_file_from_which_training_resumed_is_never_deleted(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", top_k=1)
    run([3], checkpoint)
    on = onnxfit.Trainer.load(tmp_path / "0")
    on.fit(
        X,
        Y,
        initial_epoch=1,
        epochs=4,
        verbose=0,
        callbacks=[Script([3, 2, 1, 4]), ModelCheckpoint(tmp_path / "{epoch}", top_k=1)],
    )
    assert files(tmp_path) == ["0", "2"]


@pytest.mark.parametrize(
    ("mode", "threshold", "saved"),
    [("max", -0.01, ["0"]), ("min", 0, []), ("min", 10, ["0"]), ("max", 10, [])],
)
@pytest.mark.parametrize("save_best_only", [True, False])
def test_initial_value_threshold(tmp_path, mode, threshold, saved, save_best_only):
    checkpoint = ModelCheckpoint(
        tmp_path / "{epoch}",
        monitor="loss",
        mode=mode,
        save_best_only=save_best_only,
        initial_value_threshold=threshold,
    )
    run([1], checkpoint)
    assert files(tmp_path) == saved


def test_weights_only_as_safetensors_and_as_onnx(tmp_path):
    script = run(
        [1, 2],
        ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_weights_only=True),
        ModelCheckpoint(tmp_path / "best.onnx", save_weights_only=True, save_best_only=True),
    )
    assert files(tmp_path) == ["0.safetensors", "1.safetensors", "best.onnx"]
    for epoch in range(2):
        assert same(
            safetensors.numpy.load_file(tmp_path / f"{epoch}.safetensors"), script.weights[epoch]
        )
    (initializer,) = onnx.load(tmp_path / "best.onnx").graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(initializer), script.weights[0]["w"])


def test_a_checkpoint_has_the_states_of_all_callbacks_and_the_figures_as_they_are_after_its_epoch(
    tmp_path,
):
    def callbacks():
        return (
            ModelCheckpoint(tmp_path / "a{epoch}"),
            ModelCheckpoint(tmp_path / "b{epoch}", save_best_only=True),
            EarlyStopping(patience=9),
        )

    def states(watched):
        return {callback.state_key: callback.state_dict() for callback in watched}

    values, after = [3, 1, 2], []
    watched = callbacks()
    record = LambdaCallback(on_epoch_end=lambda epoch, logs: after.append(states(watched)))
    record.phase = "logger"
    run(values, record, *watched)
    for epoch in range(3):
        for path in (tmp_path / f"a{epoch}", tmp_path / f"b{epoch}"):
            if not path.exists():
                continue
            unique_name, seen = callbacks(), []
            look = LambdaCallback(
                on_train_begin=lambda logs, unique_name=unique_name, seen=seen: seen.append(
                    states(unique_name)
                )
            )
            loaded = onnxfit.Trainer.load(path)
            loaded.fit(
                X,
                Y,
                initial_epoch=epoch + 1,
                epochs=epoch + 1,
                verbose=0,
                callbacks=[look, *unique_name],
            )
            assert seen == [after[epoch]]
            assert loaded.history.history["val_loss"] == values[: epoch + 1]
    assert files(tmp_path) == ["a0", "a1", "a2", "b0", "b1"]

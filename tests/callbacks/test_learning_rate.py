"""ReduceLROnPlateau and LearningRateScheduler on scripted values."""

import json
import math

import pytest

from onnxfit.callbacks import LambdaCallback, LearningRateScheduler, ReduceLROnPlateau
from onnxfit.errors import SettingError
from onnxfit.optimizers import SGD
from onnxfit.schedules import Constant
from tests.builds import every_way
from tests.callbacks.helpers import X2, Y2, Script, line, ready, row, run

NAN = math.nan
INF = math.inf


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
        # an improvement begins the count anew
        row([3, 3, 2, 2, 1, 1], {"patience": 2, "factor": 0.5}, [1] * 6),
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
    on, reduce = line(1.0), ReduceLROnPlateau(patience=2, factor=0.5)
    run([1, 1], reduce, on=on)
    run([5, 5], reduce, on=on)
    assert on.learning_rate == 1.0
    run([7, 7, 7], reduce, on=on)
    assert on.learning_rate == 0.5


@pytest.mark.parametrize("k", range(7))
def test_reduce_lr_on_plateau_resumed_after_any_epoch_goes_on_as_it_would_have(k):
    values, settings = [1] * 8, {"patience": 2, "factor": 0.5, "cooldown": 3}
    first, second, on = ReduceLROnPlateau(**settings), ReduceLROnPlateau(**settings), line(1.0)
    seen = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(on.learning_rate))

    def train(callback, **epochs):
        callbacks = [Script(values), callback, look]
        on.fit(X2, Y2, batch_size=2, verbose=0, callbacks=callbacks, **epochs)

    train(first, epochs=k + 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    train(second, initial_epoch=k + 1, epochs=8)
    # epochs 3 and 4 do not count
    assert seen == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


@every_way
def test_learning_rate_scheduler_by_epoch_and_by_the_rate_in_force(way):
    on = ready(way, 0.03)
    run([1, 1], LearningRateScheduler(lambda epoch, lr: lr / 2), on=on)
    assert on.learning_rate == pytest.approx(0.0075, rel=1e-12)
    on.fit(
        X2,
        Y2,
        epochs=3,
        verbose=0,
        callbacks=[LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))],
    )
    assert on.history.history["learning_rate"] == pytest.approx([0.1, 0.05, 0.1 / 3], rel=1e-12)
    on.fit(
        X2,
        Y2,
        epochs=1,
        verbose=0,
        callbacks=[LearningRateScheduler(lambda epoch, decay=0.5: decay)],
    )
    assert on.learning_rate == 0.5  # a default is the function's own business
    on.fit(
        X2,
        Y2,
        epochs=1,
        verbose=0,
        callbacks=[LearningRateScheduler(lambda epoch, learning_rate=None: learning_rate / 2)],
    )
    assert on.learning_rate == 0.25


def test_learning_rate_scheduler_does_not_set_a_resumed_epoch_again():
    first, second = (LearningRateScheduler(lambda epoch, lr: lr / 2) for _ in range(2))
    on = line(1.0)
    on.fit(X2, Y2, epochs=1, verbose=0, callbacks=[first])
    second.load_state_dict(first.state_dict())
    # as where training stopped within epoch 0
    on.fit(X2, Y2, epochs=1, verbose=0, callbacks=[second])
    assert on.learning_rate == 0.5
    on.fit(X2, Y2, epochs=1, verbose=0, callbacks=[second])
    assert on.learning_rate == 0.25
    second.load_state_dict(first.state_dict())
    # only the epoch that training resumed in is passed over
    on.fit(X2, Y2, epochs=3, verbose=0, callbacks=[second])
    assert on.learning_rate == 0.0625


@pytest.mark.parametrize("value", [None, "0.1", True, NAN, INF, -1.0])
def test_learning_rate_scheduler_refuses_what_is_no_rate(value):
    with pytest.raises(ValueError, match="must return a finite number >= 0, got"):
        line().fit(X2, Y2, verbose=0, callbacks=[LearningRateScheduler(lambda epoch: value)])


@pytest.mark.parametrize(
    "callback",
    [ReduceLROnPlateau(), LearningRateScheduler(lambda epoch: 0.1)],
    ids=lambda c: type(c).__name__,
)
def test_an_optimizer_driven_by_a_schedule_is_refused_before_training(callback):
    on = line(SGD(Constant(0.1)))
    with pytest.raises(
        TypeError,
        match=(
            r"cannot change the learning rate, because Constant.*to keep the schedule, or give SGD a"
            r" number"
        ),
    ):
        on.fit(X2, Y2, verbose=0, callbacks=[callback])
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
        (lambda: LearningRateScheduler(0.1), "to be a function, got 0.1"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_the_rate_that_is_set_is_printed_with_epochs_from_1(capfd):
    run([1, 1], LearningRateScheduler(lambda epoch, lr: lr / 2, verbose=1))
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "Epoch 1: LearningRateScheduler sets the learning rate to 0.05.",
        "Epoch 2: LearningRateScheduler sets the learning rate to 0.025.",
    ]
    run([1, 1, 0.5], ReduceLROnPlateau(patience=1, factor=0.5, verbose=1))
    assert capfd.readouterr().err.splitlines() == [
        "Epoch 2: ReduceLROnPlateau reduces the learning rate to 0.05.",
    ]
    run([1, 1], LearningRateScheduler(lambda epoch: 0.1), ReduceLROnPlateau(patience=1))
    assert capfd.readouterr() == ("", "")


def test_a_schedule_that_returns_no_rate_is_named_with_its_arguments():
    for schedule, call in ((lambda epoch: "a", "0"), (lambda epoch, lr: "a", "0, 0.1")):
        with pytest.raises(SettingError, match=rf"got 'a' from schedule\({call}\)"):
            run([1], LearningRateScheduler(schedule))

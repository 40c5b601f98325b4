"""EarlyStopping on scripted values of the monitored metric."""

import math

import pytest

from onnxfit.callbacks import EarlyStopping
from onnxfit.errors import CheckpointError, SettingError
from tests.builds import every_way
from tests.callbacks.helpers import X2, Y2, Script, line, ready, row, run, same

NAN = math.nan
INF = math.inf


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


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_value_that_equals_a_threshold_has_not_crossed_it(mode):
    sign = 1 if mode == "min" else -1
    good = EarlyStopping(mode=mode, patience=9, stopping_threshold=sign * 2.0)
    assert run([sign * 3, sign * 2, sign * 1.5, sign * 1], good).ran == 3
    assert "better than the stopping_threshold" in good.trainer.stop_reason
    bad = EarlyStopping(mode=mode, patience=9, divergence_threshold=sign * 4.0)
    assert run([sign * 3, sign * 4, sign * 4.5, sign * 1], bad).ran == 3
    assert "worse than the divergence_threshold" in bad.trainer.stop_reason


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
        match=r"EarlyStopping monitors 'val_loss', which this epoch did not compute\. Available: loss",
    ) as warned:
        assert run([1, None, 1, None, 1], EarlyStopping(patience=3)).ran == 5
    assert len(warned) == 1
    with pytest.warns(UserWarning, match="val_loss"):
        assert run([1, None, 1, None, 1], EarlyStopping(patience=2)).ran == 5


def test_a_reused_instance_warns_once_in_every_fit():
    stopping = EarlyStopping(patience=9)
    for _ in range(2):
        with pytest.warns(UserWarning, match="EarlyStopping monitors 'val_loss'") as warned:
            run([None, None, 1], stopping)
        assert len(warned) == 1


def test_a_reused_instance_asks_every_trainer_which_way_is_better():
    stopping = EarlyStopping("figure", patience=1)
    for mode, ran in (("min", 4), ("max", 2), ("min", 4)):
        on = line()
        on.monitor_mode = lambda monitor, mode=mode: mode
        assert run([4, 3, 2, 1], stopping, name="figure", on=on).ran == ran


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
    values, settings = (
        [9, 7, 8, 6, 7, 6.5, 6.4, 6.3, 1],
        {
            "patience": 4,
            "restore_best_weights": True,
        },
    )
    whole = EarlyStopping(**settings)
    run(values, whole, on=ready(way))
    first, second = EarlyStopping(**settings), EarlyStopping(**settings)
    on = ready(way)
    on.fit(X2, Y2, epochs=k + 1, batch_size=2, verbose=0, callbacks=[Script(values), first])
    second.load_state_dict(first.state_dict())
    on.fit(
        X2,
        Y2,
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
        match=r"state of EarlyStopping\(val_loss\) must have best_epoch, .*, but has only best\.",
    ):
        EarlyStopping().load_state_dict({"best": 1.0})


@pytest.mark.parametrize(
    ("monitor", "ran"),
    [("val_loss", 3), ("mean_squared_error", 3), ("val_accuracy", 5), ("auc", 5)],
)
def test_mode_auto_asks_the_trainer_which_way_is_better(monitor, ran):
    assert run([1, 2, 3, 4, 5], EarlyStopping(monitor, patience=2), name=monitor).ran == ran


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(min_delta=-0.1), "min_delta >= 0, got -0.1"),
        (lambda: EarlyStopping(min_delta=NAN), "min_delta to be a number, got nan"),
        (lambda: EarlyStopping(start_from_epoch=-1), "start_from_epoch >= 0, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_early_stopping_prints_a_line_when_it_acts_and_counts_epochs_from_1(capfd):
    stopping = EarlyStopping(patience=1, restore_best_weights=True, verbose=1)
    script = run([2, 1, 3], stopping)
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "Epoch 3: EarlyStopping stops training.",
        "EarlyStopping restored the weights of epoch 2.",
    ]
    assert (stopping.stopped_epoch, stopping.best_epoch) == (2, 1)
    reason = script.trainer.stop_reason
    assert reason == (
        "EarlyStopping: val_loss is 3 at epoch 3. It has not improved by more than 0 for 1 epoch;"
        " the best was 1 at epoch 2."
    )
    run([2, 1, 3], EarlyStopping(patience=1, restore_best_weights=True))
    assert capfd.readouterr() == ("", "")

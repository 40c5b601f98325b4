"""History."""

import pickle
from copy import deepcopy

import pytest

from onnxfit.callbacks import History
from tests.callbacks.helpers import X, Y, line


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"epochs": 0}, []),
        ({"epochs": 2, "initial_epoch": 3}, []),
        ({"initial_epoch": 3, "epochs": 5}, [3, 4]),
    ],
)
def test_history_of(settings, epochs):
    on = line()
    history = on.fit(X, Y, verbose=0, **settings)
    assert history is on.history
    assert history.epoch == epochs
    assert set(history.history) == ({"loss", "learning_rate"} if epochs else set())
    assert all(len(values) == len(epochs) for values in history.history.values())
    assert all(type(value) is float for values in history.history.values() for value in values)


class Kept(History):
    state_key = "kept"  # besides the History of every fit


def test_history_of_a_new_fit_begins_afresh():
    on = line()
    first, second = on.fit(X, Y, epochs=2, verbose=0), on.fit(X, Y, epochs=1, verbose=0)
    assert (first.epoch, second.epoch) == ([0, 1], [0])
    # one that is a callback of both fits keeps the last
    kept = Kept()
    for epochs in (2, 1):
        on.fit(X, Y, epochs=epochs, verbose=0, callbacks=[kept])
    assert kept.epoch == [0]
    assert len(kept.history["loss"]) == 1


def test_a_history_can_be_kept_and_sent_elsewhere_without_the_trainer():
    history = line().fit(X, Y, epochs=2, verbose=0)
    data = pickle.dumps(history)
    for copy in (pickle.loads(data), deepcopy(history)):
        assert (copy.epoch, copy.history) == (history.epoch, history.history)
        assert not hasattr(copy, "trainer")
    assert len(data) < 1000
    assert history.trainer.epoch == 2

"""History."""

import math
import pickle
import re
import sys
import types
from copy import deepcopy

import pytest

from onnxfit.callbacks import History, Logs
from onnxfit.errors import CheckpointError, InstallationError, SettingError, UnknownNameError
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


def gappy():
    """Return a history of four epochs with a validation after the second and the fourth."""
    return line().fit(X, Y, epochs=4, verbose=0, validation_data=(X, Y), validation_freq=2)


def test_the_epochs_of_a_metric_that_not_every_epoch_has():
    history = gappy()
    assert history.epochs_by_name["val_loss"] == [1, 3]
    assert history.epochs_by_name["loss"] == [0, 1, 2, 3]
    again, older = History(), History()
    state = history.state_dict()
    again.load_state_dict(state)
    assert again.epochs_by_name == history.epochs_by_name
    older.load_state_dict({name: state[name] for name in ("epoch", "history")})
    assert older._epochs_of("val_loss") == [2, 3]  # nothing says which
    with pytest.raises(CheckpointError, match="epochs_by_name"):
        again.load_state_dict({**state, "epochs_by_name": {"loss": "x"}})


def test_plot_has_a_panel_a_metric_with_training_and_validation():
    plt = pytest.importorskip("matplotlib.pyplot")
    history = gappy()
    axes = history.plot()
    assert [panel.get_title() for panel in axes] == ["loss"]
    training, validation = axes[0].get_lines()
    assert [*training.get_xdata()] == [1, 2, 3, 4]
    assert [*training.get_ydata()] == history.history["loss"]
    assert [*validation.get_xdata()] == [2, 4]
    assert [*validation.get_ydata()] == history.history["val_loss"]
    chosen = history.plot(["learning_rate", "loss"])
    assert [panel.get_title() for panel in chosen] == ["learning_rate", "loss"]
    history.history["learning_rate"][1] = 0.05
    assert [panel.get_title() for panel in history.plot()] == ["loss", "learning_rate"]
    for name in "abc":
        history.history[name] = [0.5]
    assert len(history.plot()[0].figure.axes) == 5  # of 2 × 3
    plt.close("all")


def test_plot_refuses_what_is_not_there(monkeypatch):
    history = gappy()
    with pytest.raises(UnknownNameError, match="Did you mean 'loss'"):
        history.plot("los")
    with pytest.raises(SettingError, match="Train for an epoch first"):
        History().plot()
    for library, method in (("matplotlib.pyplot", history.plot), ("pandas", history.frame)):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(InstallationError, match=r'pip install "onnxfit\[notebook\]"'):
            method()


def test_frame_has_a_row_an_epoch(monkeypatch):
    fake = types.SimpleNamespace(
        DataFrame=lambda columns, index: (columns, index), Index=lambda values, **_: values
    )
    monkeypatch.setitem(sys.modules, "pandas", fake)
    history = gappy()
    columns, index = history.frame()
    assert index == [1, 2, 3, 4]
    assert columns["loss"] == history.history["loss"]
    first, second, third, fourth = columns["val_loss"]
    assert math.isnan(first)
    assert math.isnan(third)
    assert [second, fourth] == history.history["val_loss"]


def test_a_notebook_shows_a_table_that_is_escaped_and_not_too_long():
    history = gappy()
    table = history._repr_html_()
    cells = [re.findall("<t[dh][^>]*>(.*?)</t", row) for row in table.split("<tr>")[1:]]
    assert cells[0] == ["epoch", "loss", "learning_rate", "val_loss"]
    assert cells[1] == ["1", "1.0000", "0.1000", ""]
    assert cells[2][3] == f"{history.history['val_loss'][0]:.4f}"
    long = History()
    for epoch in range(100):
        long.on_epoch_end(epoch, Logs({"<script>": 0.5}))
    assert long._repr_html_().count("<tr>") == 22
    assert "<script>" not in long._repr_html_()
    assert "&lt;script&gt;" in long._repr_html_()
    assert "0 epochs" in History()._repr_html_()

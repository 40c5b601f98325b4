"""Checkpoints whose positions, counters or figures a stranger chose: refused before anything
changes, with the file and the field.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback, CSVLogger
from onnxfit.errors import CheckpointError, OnnxfitError
from tests.helpers import with_changed_description
from tests.models import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
METRICS = ("accuracy", "f1", "auc", "confusion_matrix")


def new() -> Trainer:
    return Trainer(mlp(), loss="cross_entropy", optimizer=0.1, metrics=METRICS, threads=1)


def fit(trainer: Trainer, *callbacks: Callback) -> None:
    trainer.fit(X, Y, epochs=3, batch_size=4, verbose=0, callbacks=callbacks)


class Save(Callback):
    phase = "backup"

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.global_batch == 5:
            self.trainer.save("saved")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint in mid-epoch, whose logger has not been told of the last batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("saved"))
        fit(new(), Save(), CSVLogger("log.csv"))
        return Path("saved").read_bytes()


@pytest.fixture(autouse=True)
def saved(checkpoint: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").write_bytes(checkpoint)
    return tmp_path / "saved"


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """A trainer that no test changes; made once, since compiling takes longest."""
    trainer = new()
    trainer.train_on_batch(X, Y)
    return trainer


NAN, INF = float("nan"), float("inf")
POSITION = ("epoch", "batch", "data_epoch", "data_batch", "learning_rate", "trained", "batch_size")
WRONG = {
    "epoch": (1.5, -1, 1 << 63, NAN, INF, "1", None, [1], True),
    "batch": (1.5, -1, 1 << 63, NAN, "1", None),
    "data_epoch": (1.5, -1, 1 << 63, NAN, "1"),
    "data_batch": (1.5, -1, 1 << 63, NAN, "1", None),
    "learning_rate": (-1, INF, NAN, "0.1", 10**400, True, [0.1]),
    "trained": (0, 1, "yes", None),
    "batch_size": (0, -1, 1.5, 1 << 63, "4"),
}


def expect_refused(trainer: Trainer, hostile: Path, field: str) -> None:
    """Both ways to read the file name it and the field, and the trainer stays as it was."""
    message = rf"(?s){field}.*{re.escape(str(hostile))}|{re.escape(str(hostile))}.*{field}"
    with pytest.raises(CheckpointError, match=message):
        Trainer.load(hostile)
    before = trainer.get_state()
    pending, history = trainer._training.pending_fit, trainer.history.state_dict()
    with pytest.raises(CheckpointError, match=message):
        trainer.restore(hostile)
    after = trainer.get_state()
    assert after["counters"] == before["counters"]
    assert all(np.array_equal(after["weights"][n], before["weights"][n]) for n in after["weights"])
    assert (trainer._training.pending_fit, trainer.history.state_dict()) == (pending, history)
    assert trainer.train_losses_ == []


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]]
)
def test_positions_that_no_fit_has(trainer: Trainer, saved: Path, field: str, value: Any) -> None:
    index = POSITION.index(field)
    hostile = with_changed_description(saved, lambda info: info["resume"].__setitem__(index, value))
    expect_refused(trainer, hostile, field)


@pytest.mark.parametrize("resume", [[1.5], [0] * 9, {}, None, 1, "0000000"], ids=str)
def test_positions_of_another_form(trainer: Trainer, saved: Path, resume: Any) -> None:
    expect_refused(
        trainer, with_changed_description(saved, lambda info: info.update(resume=resume)), "resume"
    )


@pytest.mark.parametrize("value", [-1, INF, NAN, "0.1", 10**400, True, [0.1]], ids=str)
def test_learning_rates_that_no_update_has(trainer: Trainer, saved: Path, value: Any) -> None:
    hostile = with_changed_description(
        saved, lambda info: info["counters"].update(learning_rate=value)
    )
    expect_refused(trainer, hostile, "learning_rate")


@pytest.mark.parametrize("rate", [-1, INF, NAN], ids=str)
def test_settings_with_such_learning_rates(saved: Path, rate: float) -> None:
    adam = {"onnxfit:class": {"name": "Adam", "settings": {"learning_rate": rate}}}
    for optimizer in (rate, adam):
        hostile = with_changed_description(
            saved, lambda info, o=optimizer: info["settings"].update(optimizer=o)
        )
        with pytest.raises(CheckpointError, match=f"{re.escape(str(hostile))}.*learning_rate"):
            Trainer.load(hostile)


@pytest.mark.parametrize("name", ["epoch", "global_step", "global_batch", "samples_seen", "window"])
@pytest.mark.parametrize("value", [-1, 1.5, True, NAN, 1 << 63, "1", None], ids=str)
def test_counters_that_count_nothing(trainer: Trainer, saved: Path, name: str, value: Any) -> None:
    hostile = with_changed_description(saved, lambda info: info["counters"].update({name: value}))
    expect_refused(trainer, hostile, name)


OTHER_FIELDS = [
    ("history", {"epoch": [0.5], "history": {}}),
    ("history", {"epoch": [0], "history": {"loss": ["x"]}}),
    ("history", {"epoch": [0]}),
    ("history", []),
    ("train_losses", ["x"]),
    ("train_losses", [None]),
    ("train_losses", {"a": 1}),
    ("train_losses", 3),
    ("callbacks", []),
    ("callbacks", {"History": 1}),
    ("callbacks", {"CSVLogger(log.csv)": [1]}),
    ("tracker", []),
    ("tracker", {"rows": -1}),
    ("ended", []),
    ("ended", {"hook": "on_epoch_end"}),
]


@pytest.mark.parametrize(("name", "value"), OTHER_FIELDS, ids=str)
def test_other_fields_of_another_form(trainer: Trainer, saved: Path, name: str, value: Any) -> None:
    expect_refused(
        trainer, with_changed_description(saved, lambda info: info.update({name: value})), name
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hook", "load_state_dict"),
        ("hook", "__init__"),
        ("hook", "on_close"),
        ("hook", None),
        ("index", -1),
        ("index", "x"),
        ("logs", []),
        ("logs", {"loss": "x"}),
        ("logs", {"loss": [1]}),
        ("stop", 1),
        ("stop", "x"),
        ("reason", ["x"]),
    ],
)
def test_events_that_no_logger_is_told_of(
    trainer: Trainer, saved: Path, name: str, value: Any
) -> None:
    """The name of the hook is one of two: any other would call a method that a stranger chose."""
    expect_refused(
        trainer,
        with_changed_description(saved, lambda info: info["ended"].update({name: value})),
        name,
    )


def metric_states(info: dict[str, Any]) -> dict[str, Any]:
    return info["tracker"]["metrics"]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "state",
    [
        {"update": 1},
        {"name": "x", "reset": None},
        {},
        [],
        None,
        {"_total": "x", "_count": 1},
        {"_total": 1.0, "_count": None},
        {"_sums": [[1]]},
        {"_sums": "x"},
        {"_cells": 1},
        {"_cells": [[1, 2]]},
        {"_batches": [1]},
        {"_batches": [[{"onnxfit:array": "0"}] * 3]},
        {"_batches": [[{"onnxfit:array": "0"}]]},
    ],
    ids=str,
)
def test_sums_of_a_metric_that_it_does_not_have(saved: Path, metric: str, state: Any) -> None:
    hostile = with_changed_description(
        saved, lambda info: metric_states(info).update({metric: state})
    )
    try:
        fit(Trainer.load(hostile), CSVLogger("log.csv"))
    except OnnxfitError:
        return
    pytest.fail("the state was taken")


def random_value(random: random.Random, depth: int = 0) -> Any:
    """Return some JSON, most of it of the wrong type."""
    simple = [None, True, False, 0, 1, -1, 7, 1.5, NAN, INF, -INF, 1 << 62, 1 << 70, 10**400]
    simple += ["", "x", "../../x", "/etc/passwd", "{epoch}", "{0.__class__}", "*", "\0", "a" * 300]
    kind = random.random()
    if kind < 0.15 and depth < 3:
        return [random_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind < 0.3 and depth < 3:
        keys = [random.choice(["loss", "epoch", "rows", "..", "onnxfit:array", "0"]) for _ in "ab"]
        return {key: random_value(random, depth + 1) for key in keys}
    return random.choice(simple)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every entry of nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, entry in items:
        found.append((*path, key))
        if isinstance(entry, (dict, list)):
            found += paths_of(entry, (*path, key))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(60))
def test_random_values_anywhere_load_or_are_refused(saved: Path, seed: int) -> None:
    chooser = random.Random(seed)

    def change(info: dict[str, Any]) -> None:
        parts = ("resume", "counters", "history", "train_losses", "tracker", "ended", "callbacks")
        for _ in range(chooser.choice([1, 1, 3])):
            part = chooser.choice(parts)
            ways = [way for way in paths_of(info) if way[0] == part]
            *way, last = chooser.choice(ways)
            entry = info
            for key in way:
                entry = entry[key]
            entry[last] = random_value(chooser)

    hostile = with_changed_description(saved, change)
    try:
        trainer = Trainer.load(hostile)
        fit(trainer, CSVLogger("log.csv"))
    except OnnxfitError:
        pass
    assert {path.name for path in Path().iterdir()} <= {"changed", "log.csv", "saved"}

"""A stranger's state of every callback: it loads or is refused, and acts on no file of others."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onnxfit.callbacks import Callback, CallbackList, EarlyStopping, ModelCheckpoint, TensorBoard
from onnxfit.errors import CheckpointError, OnnxfitError
from tests.callbacks.helpers import X2, Y2, line, run
from tests.callbacks.test_laws import CLASSES, fit, make, mlflow, trainer, wandb

NAN, INF = float("nan"), float("inf")
NUMBERS = [0, 1, -1, 1.5, -1.5, NAN, INF, -INF, True, 1 << 62, 1 << 63, 10**400]
TEXTS = ["", "x", "1", "*", "**", "..", "../victim.txt", "/etc/passwd", "\0", "a" * 5000, "[a-f]*"]
FORMATS = ["{epoch}", "{0.__class__}", "%s%s%n", "1.ckpt", "0.ckpt", "last.ckpt", "0" * 12]
ARRAYS = [np.zeros(0), np.zeros((2, 3), np.float32), np.array(1), np.full(3, NAN), np.array(["x"])]
SIMPLE = [None, *NUMBERS, *TEXTS, *FORMATS, *ARRAYS]
VALUES = [
    *SIMPLE,
    *([value] for value in SIMPLE),
    *([[value, value]] for value in SIMPLE),
    *({"loss": value} for value in SIMPLE),
    *({"fc0.weight": value} for value in SIMPLE),
    *([[path, 1.0]] * 3 for path in TEXTS + FORMATS),
    *({"batch_size": value, "error": value} for value in SIMPLE),
    [],
    {},
    [[]],
    [{}],
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a test, beside and in which are files that are not the callback's."""
    folder = tmp_path / "own"
    (folder / "logs" / "train").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for module in (mlflow(), wandb(), ModuleType("optuna")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("no_proxy", "*")
    for victim in VICTIMS:
        Path(victim).write_text("keep")
    return folder


VICTIMS = (
    "../victim.txt",
    "../1.ckpt",
    "victim.txt",
    "important.ckpt",
    "x",
    "a1.ckpt.txt",
    "logs/train/events.out.tfevents.1.host.0123456789ab.1",
    "logs/train/events.out.tfevents.1.host.x.1",
)


def states_of(name: str) -> dict[str, Any]:
    """Return the state that a callback has in the middle of a fit."""
    callback, seen = make(name), {}

    class Look(Callback):
        phase = "logger"

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            seen.update(callback.state_dict())

    fit(trainer("full"), [callback, Look()], validation_data=None)
    return seen


KEYS = [
    (name, key)
    for name in CLASSES
    if name not in ("Callback", "History")
    for key in getattr(make(name), "state_attributes", ())
] + [("TensorBoard", key) for key in ("session", "files", "graph", "rate", "written_step")]


def test_every_callback_with_a_state_is_tested() -> None:
    for name in set(CLASSES) - {"Callback", "History"}:
        assert set(states_of(name)) == {key for tested, key in KEYS if tested == name}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "key"), KEYS)
def test_any_value_is_taken_or_refused_and_no_file_of_others_is_touched(
    own_folder: Path, name: str, key: str
) -> None:
    state = states_of(name)
    taken = 0
    for value in VALUES:
        callback = make(name)
        before = repr(callback.state_dict())
        refusal = None
        try:
            callback.load_state_dict({**state, key: value})
        except CheckpointError as error:
            refusal = str(error)
        if refusal is not None:
            assert callback.state_key in refusal
            assert key in refusal
            assert repr(callback.state_dict()) == before
            continue
        taken += 1
        if taken <= 8:
            with suppress(OnnxfitError):
                fit(trainer("full"), [callback], epochs=1, validation_data=None)
        assert all(Path(victim).read_text() == "keep" for victim in VICTIMS)
        assert {path.name for path in own_folder.parent.iterdir()} == {
            "own",
            "victim.txt",
            "1.ckpt",
        }
    assert taken < len(VALUES)


@pytest.mark.parametrize("name", sorted({name for name, _ in KEYS}))
@pytest.mark.parametrize("state", [[], None, "x", 1, {"x": 1}], ids=str)
def test_what_is_no_state_is_refused(name: str, state: Any) -> None:
    with pytest.raises(CheckpointError, match=name):
        make(name).load_state_dict(state)


def test_a_refused_state_leaves_the_other_callbacks_as_they_were() -> None:
    first, second = EarlyStopping("loss"), EarlyStopping("accuracy")
    good = {**first.state_dict(), "wait": 3}
    states = {first.state_key: good, second.state_key: {**good, "wait": "x"}}
    called = CallbackList(line(), [first, second])
    with pytest.raises(CheckpointError, match=r"EarlyStopping\(accuracy\) has wait = 'x'"):
        called.load_state_dict(states)
    assert first.wait == 0
    run([1.0, 0.9], first, name="loss2")
    assert first.wait == 0


def test_weights_of_another_model_are_refused_before_training() -> None:
    stopping, on = EarlyStopping("loss", restore_best_weights=True), line()
    for arrays in ({"other": np.zeros(1)}, {"w": np.zeros((7, 7), np.float32)}):
        state = {**stopping.state_dict(), "best_weights": arrays, "best_epoch": 0}
        stopping.load_state_dict(state)
        with pytest.raises(CheckpointError, match=r"best_weights of .*another model"):
            on.fit(X2, Y2, verbose=0, callbacks=[stopping])
        assert on.global_step == 0


def kept_by(paths: list[str]) -> dict[str, Any]:
    """Return a state in which top_k has kept some paths."""
    callback = ModelCheckpoint("ckpt/{epoch}-{loss:.3f}.ckpt", monitor="loss", top_k=1)
    return {**callback.state_dict(), "kept": [[path, 9.0] for path in paths]}


@pytest.mark.parametrize(
    "path",
    ["../victim.txt", "victim.txt", "ckpt/victim.ckpt", "ckpt/../1-2.ckpt", "ckpt/1/2-0.5.ckpt",
     "ckpt/..-...ckpt", "/ckpt/1-0.5.ckpt", "ckpt/1-0.5.ckpt/", "ckpt//1-0.5.ckpt", "ckpt/1-0.5.ckpt\n", "./ckpt/1-0.5.ckpt"],
)  # fmt: skip
@pytest.mark.parametrize("key", ["kept", "written", "best_model_path", "last_model_path"])
def test_paths_that_the_template_does_not_name_are_refused(path: str, key: str) -> None:
    values = {"kept": [[path, 1.0]], "written": [path]}
    state = {**kept_by([]), key: values.get(key, path)}
    callback = ModelCheckpoint("ckpt/{epoch}-{loss:.3f}.ckpt", monitor="loss", top_k=1)
    with pytest.raises(CheckpointError, match=key):
        callback.load_state_dict(state)
    assert callback.kept == []


def test_its_own_worse_files_are_deleted_after_a_resume() -> None:
    callback = ModelCheckpoint("ckpt/{epoch}-{loss:.3f}.ckpt", monitor="loss", top_k=1)
    Path("ckpt").mkdir()
    Path("ckpt/7-9.000.ckpt").touch()
    callback.load_state_dict(kept_by(["ckpt/7-9.000.ckpt"]))
    line().fit(X2, Y2, verbose=0, callbacks=[callback])
    assert [path.name[0] for path in Path("ckpt").iterdir()] == ["1"]


def test_a_folder_that_is_a_link_to_another_place_is_left_alone() -> None:
    callback = ModelCheckpoint("ckpt/{epoch}/m.ckpt", monitor="loss", top_k=1)
    Path("ckpt").mkdir()
    Path("elsewhere").mkdir()
    Path("elsewhere/m.ckpt").touch()
    Path("ckpt/7").symlink_to("../elsewhere")
    callback.load_state_dict({**callback.state_dict(), "kept": [["ckpt/7/m.ckpt", 9.0]]})
    with pytest.raises(CheckpointError, match="a symbolic link in this path leads"):
        line().fit(X2, Y2, verbose=0, callbacks=[callback])
    assert Path("elsewhere/m.ckpt").exists()


def test_a_folder_with_the_name_of_a_checkpoint_is_a_checkpoint_error() -> None:
    callback = ModelCheckpoint("{epoch}.ckpt", monitor="loss", top_k=1)
    Path("7.ckpt").mkdir()
    callback.load_state_dict({**callback.state_dict(), "kept": [["7.ckpt", 9.0]]})
    with pytest.raises(CheckpointError, match="cannot delete"):
        line().fit(X2, Y2, verbose=0, callbacks=[callback])


@pytest.mark.parametrize(
    "session",
    ["*", "?" * 12, "[0-9a-f]*", "0123456789AB", "../0123456789", "0" * 11, "0" * 13, None],
)
def test_a_session_that_is_a_pattern_deletes_no_event_file(session: Any) -> None:
    board = TensorBoard()
    state = json.loads(json.dumps({**board.state_dict(), "session": session, "files": {}}))
    with pytest.raises(CheckpointError, match=r"session.*12 hexadecimal digits"):
        board.load_state_dict(state)
    assert all(Path(victim).exists() for victim in VICTIMS)

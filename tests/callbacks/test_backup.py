"""BackupAndRestore: a fit that was killed resumes exactly."""

from pathlib import Path

import pytest

import onnxfit
from onnxfit.callbacks import (
    BackupAndRestore,
    CSVLogger,
    EarlyStopping,
    JSONLLogger,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    SwapEMAWeights,
)
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.optimizers import SGD
from tests.callbacks.helpers import (
    KillAfter,
    Killed,
    X,
    Y,
    both_backends,
    fit,
    line,
    network,
    same,
    ten_rows,
)
from tests.models import mlp


@both_backends
@pytest.mark.parametrize("killed_after", [1, 2, 3, 7])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_fit_goes_on_exactly_where_it_was(tmp_path, backend, killed_after, accumulate):
    x, y = ten_rows()
    settings = {"batch_size": 4, "verbose": 0, "validation_data": (x, y)}
    whole = network(backend, accumulate=accumulate, metrics=["accuracy"])
    expected = whole.fit(x, y, epochs=5, callbacks=[EarlyStopping(patience=9)], **settings)
    folder = tmp_path / "backup"

    def callbacks(kill):
        return [
            BackupAndRestore(folder, every_n_steps=1),
            EarlyStopping(patience=9),
            CSVLogger(tmp_path / "log.csv"),
            kill,
        ]

    first = KillAfter(killed_after)
    with pytest.raises(Killed):
        network(backend, accumulate=accumulate, metrics=["accuracy"]).fit(
            x, y, epochs=5, callbacks=callbacks(first), **settings
        )
    again = network(backend, accumulate=accumulate, metrics=["accuracy"])
    second = KillAfter(-1)
    history = again.fit(x, y, epochs=5, callbacks=callbacks(second), **settings)
    if accumulate == 1:
        assert first.ran + second.ran == 15 == again.global_batch
    assert same(again.get_weights(), whole.get_weights())
    assert same(again.get_state()["slots"], whole.get_state()["slots"])
    assert (history.epoch, history.history) == (expected.epoch, expected.history)
    assert again.train_losses_ == whole.train_losses_
    assert [row.split(",")[0] for row in (tmp_path / "log.csv").read_text().splitlines()] == [
        "epoch",
        *"12345",
    ]
    assert not folder.exists()


def test_the_same_trainer_goes_on_after_an_exception(tmp_path):
    on, kill = line(), KillAfter(5)
    backup = BackupAndRestore(tmp_path)
    with pytest.raises(Killed):
        fit(backup, kill, on=on, epochs=4)
    assert on.global_batch == 5
    assert len(list(tmp_path.glob("*.onnxfit"))) == 2
    # the backup is of the end of epoch 1: the batch after it runs again
    fit(backup, kill, on=on, epochs=4)
    assert (on.global_batch, kill.ran) == (8, 9)
    assert same(on.get_weights(), fit(epochs=4).get_weights())


def test_after_a_normal_end_a_plain_fit_runs_all_its_epochs(tmp_path):
    backup = BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Killed):
        fit(backup, KillAfter(4), epochs=3)
    on = fit(backup, epochs=3)
    assert on.history.epoch == [0, 1, 2]
    assert on.fit(X, Y, epochs=3, verbose=0).epoch == [0, 1, 2]
    assert fit(backup, on=on, epochs=3).history.epoch == [0, 1, 2]
    assert not (tmp_path / "backup").exists()


def test_a_spoiled_backup_is_named_and_the_one_before_taken(tmp_path):
    def stop():
        with pytest.raises(Killed):
            fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(3), epochs=4)

    stop()
    newer = max(tmp_path.glob("*.onnxfit"))
    newer.write_bytes(newer.read_bytes()[:-100])
    with pytest.warns(
        UserWarning, match=rf"{newer.name}.* cannot be read, so the previous backup is read instead"
    ):
        on = fit(BackupAndRestore(tmp_path, every_n_steps=1), epochs=4)
    assert same(on.get_weights(), fit(epochs=4).get_weights())
    stop()
    for path in tmp_path.glob("*.onnxfit"):
        path.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="cannot be read") as warned:
        assert fit(BackupAndRestore(tmp_path), epochs=2).global_batch == 4
    assert len(warned) == 2


def test_a_spoiled_backup_is_not_one_of_the_two_that_are_kept(tmp_path):
    with pytest.raises(Killed):
        fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(3), epochs=4)
    older, newer = sorted(tmp_path.glob("*.onnxfit"))
    newer.write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(Killed):
        fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(1), epochs=4)
    kept = sorted(tmp_path.glob("*.onnxfit"))
    assert len(kept) == 2
    assert kept[0] == older
    assert newer not in kept


def test_backups_of_another_model_are_refused_and_change_nothing(tmp_path):
    with pytest.raises(Killed):
        fit(BackupAndRestore(tmp_path, every_n_steps=1), KillAfter(1))
    other = network()
    before = other.get_weights()
    with pytest.raises(SettingError, match="belongs to another trainer"):
        other.fit(*ten_rows(), verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    assert same(other.get_weights(), before)
    assert list(tmp_path.glob("*.onnxfit"))


def test_a_backup_has_the_state_of_checkpoints_after_the_event_whatever_the_order(tmp_path):
    def callbacks():
        return [
            BackupAndRestore(tmp_path / "b"),
            ModelCheckpoint(tmp_path / "{epoch}", monitor="loss", top_k=2),
        ]

    def kill(epoch, logs):
        if epoch == 2:
            raise Killed

    with pytest.raises(Killed):
        fit(*callbacks(), LambdaCallback(on_epoch_begin=kill), epochs=4)
    fit(*callbacks(), epochs=4)
    # 2: training resumed from there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]


def test_a_stop_by_a_callback_is_a_normal_end_and_a_failing_close_is_not(tmp_path):
    def stop(batch, logs):
        on.stop_training = True

    def fail(logs):
        raise OSError("disk full")

    on = line()
    fit(
        BackupAndRestore(tmp_path / "b", every_n_steps=1),
        LambdaCallback(on_train_batch_end=stop),
        on=on,
        epochs=3,
    )
    assert not (tmp_path / "b").exists()
    late = LambdaCallback(on_train_end=fail)
    late.phase = "logger"
    with pytest.raises(OSError, match="disk full"):
        fit(BackupAndRestore(tmp_path / "b"), late, epochs=3)
    assert list((tmp_path / "b").iterdir())


def test_restore_is_not_for_a_running_fit(tmp_path):
    on = line()
    on.save(tmp_path / "a")
    restore = LambdaCallback(on_epoch_begin=lambda epoch, logs: on.restore(tmp_path / "a"))
    with pytest.raises(SettingError, match="before fit"):
        fit(restore, on=on)


def test_save_freq_is_a_number_of_batches(tmp_path):
    written = []
    backup = BackupAndRestore(tmp_path / "b", save_freq=2, background=False)
    look = LambdaCallback(
        on_train_batch_end=lambda batch, logs: written.append(
            sorted(path.name for path in (tmp_path / "b").iterdir())[-1]
        )
    )
    look.phase = "logger"
    fit(backup, look, on=line(accumulate=4), batch_size=1)
    assert written == [f"backup-{number:06d}.onnxfit" for number in (0, 1, 1, 2)]
    with pytest.raises(SettingError, match="save_freq to be 'epoch' or a number of batches"):
        BackupAndRestore("b", save_freq=0)


@pytest.mark.parametrize(("double", "count"), [(True, 2), (False, 1)])
def test_one_or_two_backups_are_kept(tmp_path, double, count):
    backup = BackupAndRestore(tmp_path, double_checkpoint=double)
    with pytest.raises(Killed):
        fit(backup, KillAfter(5), epochs=4)
    assert len(list(tmp_path.glob("*.onnxfit"))) == count
    on = fit(BackupAndRestore(tmp_path, double_checkpoint=double), epochs=4)
    assert same(on.get_weights(), fit(epochs=4).get_weights())


@pytest.mark.parametrize("background", [True, False])
def test_a_backup_that_cannot_be_deleted_is_named_and_the_next_run_goes_on(
    background, tmp_path, monkeypatch
):
    def refuses(path, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuses)
        with pytest.raises(CheckpointError, match=r"cannot delete old backups.*Permission denied"):
            fit(BackupAndRestore(tmp_path / "b", background=background), epochs=4)
    on = fit(BackupAndRestore(tmp_path / "b"), epochs=4)
    assert same(on.get_weights(), fit(epochs=4).get_weights())
    assert not (tmp_path / "b").exists()


def test_backups_that_are_not_deleted_continue_the_training_after_its_end(tmp_path):
    fit(BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    assert list(tmp_path.glob("*.onnxfit"))
    on = fit(BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=3)
    assert on.history.epoch == [0, 1, 2]
    assert same(on.get_weights(), fit(epochs=3).get_weights())


@both_backends
@pytest.mark.parametrize(
    ("callback", "settings", "epochs_run"),
    [
        (EarlyStopping, {"patience": 1, "restore_best_weights": True}, 2),
        (StochasticWeightAveraging, {"start_epoch": 1}, 4),
        (SwapEMAWeights, {}, 4),
    ],
)
def test_a_script_that_failed_after_fit_exports_the_same_model_when_it_runs_again(
    tmp_path, backend, callback, settings, epochs_run
):
    x, y = ten_rows()
    folder = tmp_path / "backup"

    def script():
        optimizer = SGD(0.5, momentum=0.9, ema_momentum=0.5)
        on = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer=optimizer, backend=backend)
        callbacks = [
            BackupAndRestore(folder, delete_checkpoint=False),
            callback(**settings),
            JSONLLogger(tmp_path / "log.jsonl"),
            ran,
        ]
        # no epoch after the first is better on the wrong labels
        validation = {"validation_data": (x, 1 - y), "batch_size": 4, "verbose": 0}
        return on, on.fit(x, y, epochs=4, callbacks=callbacks, **validation)

    ran = KillAfter(-1)
    first, history = script()
    assert ran.ran == 3 * epochs_run
    log = (tmp_path / "log.jsonl").read_text()
    second, history_again = script()
    assert ran.ran == 3 * epochs_run  # nothing was trained
    assert second.export().SerializeToString() == first.export().SerializeToString()
    assert same(second.get_state()["slots"], first.get_state()["slots"])
    assert second.get_state()["counters"] == first.get_state()["counters"]
    assert (second.stop_reason, second.train_losses_) == (first.stop_reason, first.train_losses_)
    assert history_again.history == history.history
    assert (tmp_path / "log.jsonl").read_text() == log


def test_each_fit_of_a_script_may_keep_its_finished_state(tmp_path):
    def script(fails):
        on, ran = line(), KillAfter(-1)
        for phase in ("head", "all"):
            fit(BackupAndRestore(tmp_path / phase, delete_checkpoint=False), ran, on=on, epochs=2)
            if phase == fails:
                raise Killed
        return on, ran.ran

    whole = fit(on=fit(epochs=2), epochs=2)
    with pytest.raises(Killed):
        script("head")
    for trained in (4, 0):  # the second phase, and then none
        on, ran = script(None)
        assert ran == trained
        assert same(on.get_weights(), whole.get_weights())

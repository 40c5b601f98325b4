"""CSVLogger and JSONLLogger."""

import csv
import json

import pytest

from onnxfit.callbacks import CSVLogger, JSONLLogger, LambdaCallback, csv_logger
from onnxfit.errors import SettingError
from onnxfit.files import append_whole
from tests.callbacks.helpers import X, Y, fit, rows


@pytest.mark.parametrize("separator", [",", ";"])
@pytest.mark.parametrize("last", [False, True])
def test_csv_rows_are_the_history_wherever_the_logger_stands(tmp_path, separator, last):
    logger, log = (
        CSVLogger(tmp_path / "new" / "log.csv", separator=separator),
        LambdaCallback(on_epoch_end=lambda e, logs: log.trainer.log("mine", e)),
    )
    on = fit(*([log, logger] if last else [logger, log]), epochs=3, validation_data=(X, Y))
    table = rows(tmp_path / "new" / "log.csv", separator)
    assert list(table[0]) == ["epoch", "loss", "val_loss", "learning_rate", "mine"]
    assert [row["epoch"] for row in table] == ["1", "2", "3"]
    for name, values in on.history.history.items():
        assert [float(row[name]) for row in table] == values


@pytest.mark.parametrize(("freq", "rows_with_validation"), [(3, [2]), ([1, 4], [0, 3])])
def test_csv_figures_that_an_epoch_lacks_are_empty(tmp_path, freq, rows_with_validation):
    fit(
        CSVLogger(tmp_path / "log.csv"),
        JSONLLogger(tmp_path / "log.jsonl"),
        epochs=5,
        validation_data=(X, Y),
        validation_freq=freq,
    )
    table = rows(tmp_path / "log.csv")
    assert [i for i, row in enumerate(table) if row["val_loss"]] == rows_with_validation
    assert len(table) == 5
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [i for i, row in enumerate(lines) if "val_loss" in row] == rows_with_validation
    assert [row["epoch"] for row in lines] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_appending_goes_on_under_one_header_and_beginning_afresh_replaces(tmp_path, kind):
    path = tmp_path / "log"
    fit(kind(path), epochs=2)
    fit(kind(path, append=True), epochs=1, validation_data=(X, Y))
    text = path.read_text()
    assert text.count("epoch") == (1 if kind is CSVLogger else 3)
    assert len(text.splitlines()) == (4 if kind is CSVLogger else 3)
    fit(kind(path), epochs=1)
    assert len(path.read_text().splitlines()) == (2 if kind is CSVLogger else 1)


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
@pytest.mark.parametrize("failing", range(1, 4))
def test_a_line_that_could_not_be_written_comes_later(tmp_path, kind, failing, monkeypatch):
    """Also if it is the last one."""
    calls = iter(range(1, 99))

    def append(file, data):
        if next(calls) == failing:
            raise OSError(28, "No space left on device")
        append_whole(file, data)

    fit(kind(tmp_path / "whole"), epochs=4)
    monkeypatch.setattr(csv_logger, "append_whole", append)
    with pytest.warns(RuntimeWarning, match="cannot write .* No space left"):
        fit(kind(tmp_path / "log"), epochs=4 if kind is CSVLogger else 3)
    whole = (tmp_path / "whole").read_text().splitlines(keepends=True)
    lines = (tmp_path / "log").read_text().splitlines(keepends=True)
    assert lines == whole[: len(lines)]
    assert len(lines) == (5 if kind is CSVLogger else 3)


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
@pytest.mark.parametrize("separator", list("\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n"))
def test_a_name_may_contain_a_separator_of_lines(tmp_path, kind, separator):
    path, name = tmp_path / "log", f"two{separator}lines"
    log = LambdaCallback(on_epoch_end=lambda epoch, logs: log.trainer.log(name, epoch))
    fit(log, kind(path), epochs=2)
    fit(log, kind(path, append=True), epochs=1)
    if kind is CSVLogger:
        with open(path, encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
    else:
        table = [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]
    assert [float(row[name]) for row in table] == [0, 1, 0]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_a_line_cut_off_by_a_kill_is_dropped_and_a_resumed_file_has_no_epoch_twice(tmp_path, kind):
    path = tmp_path / "log"
    logger = kind(path)
    fit(logger, epochs=3)
    whole = path.read_text()
    path.write_text(whole + "3,0.5" if kind is CSVLogger else whole + '{"epoch": 3, "lo')
    resumed = kind(path)
    assert logger.state_dict() == {"rows": 3}
    resumed.load_state_dict({"rows": 2})  # from a checkpoint of the second epoch
    fit(resumed, initial_epoch=2, epochs=4)
    epochs = (
        [row["epoch"] for row in rows(path)]
        if kind is CSVLogger
        else [json.loads(line)["epoch"] for line in path.read_text().splitlines()]
    )
    assert list(map(int, epochs)) == [1, 2, 3, 4]


def test_appending_to_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        SettingError, match=r"was not written by CSVLogger: it has rows without 'epoch'"
    ):
        fit(CSVLogger(tmp_path / "log.csv", append=True))
    with pytest.raises(SettingError, match="separator to be a single character, got ''"):
        CSVLogger(tmp_path / "log.csv", separator="")

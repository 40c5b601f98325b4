"""Commands in several processes: `--ranks` starts them, and they speak as one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest

from onnxfit.callbacks import Logs
from onnxfit.cli import job, ranks
from onnxfit.distributed.world import ALONE
from onnxfit.errors import SettingError
from tests.cli.helpers import FIT, LONG, ROOT, call, done, refused


class Recorder:
    """Stands in for the start of processes, and ends with a status."""

    def __init__(self) -> None:
        self.status = 0
        self.started: list[tuple[list[str], int]] = []
        self.acts: Callable[[Path, Callable[[int], bool]], None] = lambda folder, answers: None

    def __call__(self, command: list[str], number: int, answers: Callable[[int], bool]) -> int:
        self.started.append((command, number))
        self.acts(Path(os.environ[ranks.FOLDER]), answers)
        return self.status


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(ranks, "run_ranks", recorder)
    monkeypatch.setattr(ranks, "find_spec", lambda name: name)
    return recorder


def test_the_same_command_runs_in_every_process(folder: Path, recorder: Recorder) -> None:
    arguments = [*FIT, "-o", "t.onnx", "--ranks", "3"]
    recorder.status = 7
    assert call(*arguments).exit_code == 7
    ((command, number),) = recorder.started
    assert command == [sys.executable, "-m", "onnxfit", *arguments]
    assert number == 3
    assert ranks.FOLDER not in os.environ
    assert not Path("t.onnx").exists()


def test_python_is_started_with_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["py", "-W", "error", "bin/onnxfit", "fit", "m.onnx"])
    own = [sys.executable, "-W", "error", "bin/onnxfit", "fit", "m.onnx"]
    assert ranks.command_line(["fit", "m.onnx"]) == own


def test_the_number_may_stand_in_a_file(folder: Path, recorder: Recorder) -> None:
    Path("o.json").write_text(json.dumps({"ranks": 2, "output": "t.onnx"}))
    done(*FIT, "--config", "o.json")
    assert [number for _, number in recorder.started] == [2]
    done(*FIT, "--config", "o.json", "--ranks", 1)
    assert len(recorder.started) == 1
    assert Path("t.onnx").exists()


def test_the_number_is_not_kept_for_resume(folder: Path, recorder: Recorder) -> None:
    done(*FIT, "--checkpoint", "c/", "--ranks", 1)
    assert "ranks" not in json.loads(Path("c/last.onnxfit.json").read_text())["options"]
    done("resume", "c", "-e", 2, "--ranks", 3)
    done("resume", "c", "-e", 2)
    ((command, number),) = recorder.started
    assert command[-1] == str(number) == "3"


def test_what_is_wrong_is_told_before_processes_start(folder: Path, recorder: Recorder) -> None:
    several = (*FIT, "--ranks", 2)
    assert "The trained model would not be saved" in refused(*several, code=2)
    assert "--ranks" in refused(*FIT, "--ranks", 0, code=2)
    for option in ("--optimizer", "--penalty", "--learning-rate"):
        assert "nothing" in refused(*several, "-o", "t.onnx", option, "nothing")
    done(*FIT, "--checkpoint", "c/")
    assert "--overwrite" in refused(*several, "--checkpoint", "c/")
    assert "finished" in refused("resume", "c", "--ranks", 2)
    assert recorder.started == []
    done(*several, "--checkpoint", "c/", "--overwrite")
    assert Path("c/last.onnxfit").exists()  # rank 0 deletes it, when nothing else is wrong


def test_without_mpi_a_message_says_what_to_install(
    folder: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    assert "onnxfit[mpi]" in refused(*FIT, "-o", "t.onnx", "--ranks", 2)


def test_the_status_is_that_of_rank_0(folder: Path, recorder: Recorder) -> None:
    """mpiexec would comment on a status that is not 0, so that the ranks note it."""
    recorder.acts = lambda folder, answers: [(folder / ranks.STATUS).write_text("3")]  # type: ignore[func-returns-value]
    result = call(*FIT, "-o", "t.onnx", "--ranks", 2)
    assert (result.exit_code, result.stderr) == (3, "")


def test_a_signal_is_a_message_and_a_second_one_ends_the_ranks(
    folder: Path, recorder: Recorder
) -> None:
    goes_on: list[bool] = []

    def interrupt(folder: Path, answers: Callable[[int], bool]) -> None:
        goes_on.append(answers(signal.SIGTERM))
        assert (folder / ranks.SIGNAL).read_text() == str(int(signal.SIGTERM))
        goes_on.append(answers(signal.SIGINT))

    recorder.acts = interrupt
    recorder.status = 1
    result = call(*FIT, "-o", "t.onnx", "--ranks", 2)
    assert goes_on == [True, False]
    assert (result.exit_code, result.stderr) == (143, "Interrupted.\n")


def test_mpiexec_decides_on_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    assert [ranks.to_launch(number) for number in (None, 1, 2)] == [False, False, True]
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert [ranks.to_launch(number) for number in (None, 2)] == [False, False]
    with pytest.raises(
        SettingError, match=r"--ranks 3 .*mpiexec already started this command in 2"
    ):
        ranks.to_launch(3)
    monkeypatch.setattr(ranks, "world_of", lambda: ALONE)
    with pytest.raises(SystemExit, match="cannot connect"):
        ranks.run(lambda: None)


class FakeWorld:
    """Rank 1 of 2, which is not connected to another one."""

    rank, size, is_main = 1, 2, False

    def abort(self) -> None:
        raise InterruptedError


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command on one of two ranks; the other one has a status, or never ends."""

    def run(command: Callable[[], Any], rank: int, other: int | None, note: bool = False) -> Any:
        def reduce(own: np.ndarray, everyone: np.ndarray) -> Any:
            everyone[...] = own
            everyone[1 - rank] = other or 0
            everyone[-1] += note and rank > 0
            return types.SimpleNamespace(Test=lambda: other is not None)

        world = FakeWorld()
        world.rank, world.is_main = rank, rank == 0  # type: ignore[misc]
        library = types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(Iallreduce=reduce))
        monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=library))
        monkeypatch.setattr(ranks, "world_of", lambda: world)
        monkeypatch.setattr(ranks, "launched_ranks", lambda environment: 2)
        monkeypatch.setattr(ranks, "SECONDS_BETWEEN_ERRORS", 0.0)
        with pytest.raises((SystemExit, InterruptedError)) as caught:
            ranks.run(command)
        return getattr(caught.value, "code", "aborted")

    return run


def failing() -> None:
    raise click.ClickException("a bad row")


@pytest.mark.parametrize(
    ("rank", "other", "status", "said"),
    [
        (0, 1, 1, "Error: a bad row\n"),
        (1, 1, 1, ""),
        (1, 0, 1, "Error: a bad row\n"),
        (0, None, "aborted", "Error: a bad row\n"),
        (1, None, "aborted", "Rank 1 of 2: Error: a bad row\n"),
    ],
)
def test_an_error_is_told_once(
    as_rank: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    rank: int,
    other: int | None,
    status: object,
    said: str,
) -> None:
    assert as_rank(failing, rank, other) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_result_is_printed_once(
    as_rank: Callable[..., Any], capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    assert as_rank(lambda: click.echo("loss 0.5"), rank, 0) == 0
    assert capsys.readouterr().out == ("" if rank else "loss 0.5\n")


def test_a_status_that_is_noted_is_no_failure_for_mpiexec(
    as_rank: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranks.FOLDER, str(tmp_path))
    assert as_rank(lambda: sys.exit(130), 0, 130) == 0
    assert (tmp_path / ranks.STATUS).read_text() == "130"
    assert as_rank(lambda: sys.exit(130), 1, 130, note=True) == 0
    monkeypatch.delenv(ranks.FOLDER)
    assert as_rank(lambda: sys.exit(130), 1, 130) == 130


def test_other_ranks_leave_alone_what_is_not_shared(
    folder: Path, as_rank: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "world_of", FakeWorld)
    assert done("predict", "m.onnx", "-d", "d.npz") == ""
    assert not ranks.takes_part("export")
    assert ranks.takes_part("evaluate")


@pytest.mark.parametrize(("world_size", "stops"), [(1, [0, 1, 2]), (2, [2])])
def test_ranks_stop_where_no_gradients_wait_for_an_update(
    monkeypatch: pytest.MonkeyPatch, world_size: int, stops: list[int]
) -> None:
    monkeypatch.setattr(ranks, "signal_of_all", lambda own: signal.SIGTERM)
    interruption = job.Interruption()
    interruption.signal = signal.SIGTERM
    interruption.trainer = types.SimpleNamespace(world_size=world_size, accumulate=3)  # type: ignore[assignment]
    stopped = []
    for batch in range(3):
        if world_size > 1:
            assert interruption.needs_synced_logs(batch) == (batch in stops)
        try:
            interruption.on_train_batch_end(batch, Logs())
        except job.Interrupted:
            stopped.append(batch)
    assert stopped == stops


def test_a_signal_to_any_rank_is_one_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = np.zeros(2, np.int64)

    class World(FakeWorld):
        rank, is_main = 0, True

        def sum(self, name: str, buffer: np.ndarray) -> None:
            buffer += others

    assert ranks.signal_of_all(2) == 2
    monkeypatch.setattr(ranks, "world_of", World)
    assert ranks.signal_of_all(0) == 0
    others[1] = 15
    assert ranks.signal_of_all(0) == 15
    assert ranks.signal_of_all(2) == 2
    monkeypatch.setenv(ranks.FOLDER, str(tmp_path))
    (tmp_path / ranks.SIGNAL).write_text("2")
    assert ranks.signal_of_all(0) == 2


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_training_is_interrupted_and_goes_on_as_one_process_would(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")  # leaves other tests their cores
    has_ended = threading.Event()

    def interrupt() -> None:
        while not (Path("c/last.onnxfit").exists() or has_ended.wait(0.01)):
            pass
        if not has_ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    training = [argument for argument in LONG if argument != "-q"]
    result = call(
        *training, "-e", 10**6, "--checkpoint", "c/", "--csv", "f.csv", "-o", "r.onnx", "--ranks", 2
    )
    has_ended.set()
    thread.join()
    output, errors = capfd.readouterr()
    assert (result.exit_code, output) == (130, ""), errors
    assert errors.count("Interrupted") == 1
    command = re.search(r"\n  onnxfit (resume \S+) --ranks 2\n$", errors)
    assert command, errors
    assert not Path("r.onnx").exists()

    epochs = len(Path("f.csv").read_text().splitlines()) + 1
    result = call(*command[1].split(), "-e", epochs, "--ranks", 2, "--json", "-q")
    output, errors = capfd.readouterr()
    assert (result.exit_code, errors) == (0, "")
    report = json.loads(output)
    assert report["epochs"] == epochs
    alone = json.loads(done(*LONG, "-e", epochs, "-o", "alone.onnx", "--json"))
    for name, values in alone["history"].items():
        assert report["history"][name] == pytest.approx(values, rel=1e-4), name
    models = (onnx.load(name).graph.initializer for name in ("alone.onnx", "r.onnx"))
    for one, several in zip(*models):
        np.testing.assert_allclose(
            onnx.numpy_helper.to_array(several), onnx.numpy_helper.to_array(one), atol=1e-5
        )

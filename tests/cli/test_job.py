"""Checkpoints of a training, and the signals that stop it."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.cli import job
from tests.cli.helpers import ADAM, FIT, LONG, call, done, refused, stop_at


def test_at_the_end_a_signal_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(monkeypatch, "on_epoch_end", 5, 0)
    done(*LONG, "-o", "t.onnx")


def test_a_request_to_terminate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(monkeypatch, "on_train_batch_end", 1, 0, signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    result = call(*LONG, "--checkpoint", "c/{epoch}.ckpt")
    assert result.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert sorted(path.name for path in Path("c").iterdir()) == [
        "1.ckpt",
        "epoch.ckpt.json",
        "interrupted-epoch.ckpt",
    ]


def test_a_second_signal_stops_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        job.Interruption,
        "_raise",
        lambda self, number: [signal.raise_signal(signal.SIGINT) for _ in range(2)],
    )
    result = call(*LONG, "--checkpoint", "c/")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"
    assert [path.name for path in Path("c").iterdir()] == ["last.onnxfit.json"]


def test_a_signal_that_the_process_ignores_stays_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nohup has it, and a shell for the jobs that it starts with `&`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_at(monkeypatch, "on_train_batch_end", 1, 0)
    done(*LONG, "-o", "t.onnx")
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_without_a_checkpoint_the_weights_so_far_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[dict[str, np.ndarray]] = []

    def seen(self: job.Interruption, number: int) -> None:
        if number:
            trained.append(self.trainer.get_weights())
            raise job.Interrupted(number)

    monkeypatch.setattr(job.Interruption, "_raise", seen)
    stop_at(monkeypatch, "on_train_batch_end", 1, 0)
    result = call(*LONG, "-o", "t.onnx")
    assert result.exit_code == 130
    assert "Interrupted after 5 batches" in result.stderr
    assert "t.onnx" in result.stderr
    written = Trainer(str(folder / "t.onnx")).get_weights()
    np.testing.assert_equal(written, trained[0])


def test_an_earlier_training_is_not_overwritten_unasked(folder: Path) -> None:
    done(*FIT, "--checkpoint", "c/a.ckpt")
    before = Path("c/a.ckpt").read_bytes()
    assert "--overwrite" in refused(*ADAM, "--checkpoint", "c/a.ckpt")
    assert Path("c/a.ckpt").read_bytes() == before
    done(*ADAM, "--checkpoint", "c/a.ckpt", "--overwrite")
    assert Path("c/a.ckpt").read_bytes() != before
    done(*FIT, "--checkpoint", "c/b.ckpt")  # another one beside it
    assert "Pass the path of a checkpoint" in refused("resume", "c", "-e", 3)
    done("resume", "c/b.ckpt", "-e", 3)


def test_only_checkpoints_are_overwritten(folder: Path) -> None:
    done(*FIT, "-e", 2, "--checkpoint", "c/{epoch}")
    others = {"c/notes": b"mine", "c/7": b"mine, too"}
    for name, content in others.items():
        Path(name).write_bytes(content)
    done(*FIT, "--checkpoint", "c/{epoch}", "--overwrite")
    assert {path.name for path in Path("c").iterdir()} == {"1", "7", "notes", "epoch.json"}
    assert {name: Path(name).read_bytes() for name in others} == others


@pytest.mark.parametrize(
    ("path", "message"),
    [("c/t.onnx", "--output"), ("{epoch}/c.ckpt", "folder"), ("c/{.ckpt", "template")],
)
def test_places_that_will_not_do(folder: Path, path: str, message: str) -> None:
    assert message in refused(*FIT, "--checkpoint", path)

"""`onnxfit resume` goes on without a trace."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import FIT, LONG, call, done, refused, start_process, stop_at


def uninterrupted() -> tuple[bytes, str]:
    done(*LONG, "-o", "whole.onnx", "--csv", "whole.csv")
    return Path("whole.onnx").read_bytes(), Path("whole.csv").read_text()


@pytest.mark.parametrize(
    ("hook", "epoch", "batch"),
    [
        ("on_train_batch_end", 0, 0),
        ("on_train_batch_end", 2, 1),
        ("on_train_batch_end", 2, 3),  # the last of the epoch
        ("on_epoch_end", 1, 0),
    ],
)
def test_the_result_is_as_if_nothing_had_happened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hook: str, epoch: int, batch: int
) -> None:
    whole, figures = uninterrupted()
    with monkeypatch.context() as patch:
        stop_at(patch, hook, epoch, batch)
        result = call(*LONG, "-o", "t.onnx", "--csv", "t.csv", "--checkpoint", "c/")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert not Path("t.onnx").exists()
    command = re.search(r"onnxfit (resume .*)", result.stderr)
    assert command
    done(*shlex.split(command[1]), "-q")
    assert Path("t.onnx").read_bytes() == whole
    assert Path("t.csv").read_text() == figures


def test_the_newest_whole_checkpoint_of_a_folder(folder: Path) -> None:
    whole, _ = uninterrupted()
    done(*LONG, "-e", 3, "-o", "t.onnx", "--checkpoint", "c/{epoch}.ckpt")
    Path("c/8.ckpt").write_bytes(Path("c/3.ckpt").read_bytes()[:-50])  # a disk that was full
    result = call("resume", "c", "-e", 6)
    assert result.exit_code == 0
    assert "8.ckpt" in result.stderr
    assert "From " in result.stderr and "3.ckpt" in result.stderr  # noqa: PT018
    assert Path("t.onnx").read_bytes() == whole
    done("resume", "c/2.ckpt", "-e", 7)  # a checkpoint by its name
    assert (
        "damaged" in (text := refused("resume", "c/8.ckpt", "-e", 9, "-q")) or "not a whole" in text
    )


def test_a_folder_that_was_moved_and_another_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = uninterrupted()
    done(*LONG, "-e", 3, "-o", "t.onnx", "--checkpoint", "c/")
    Path("c").rename("elsewhere")
    monkeypatch.chdir("elsewhere")
    done("resume", ".", "-e", 6)
    assert (folder / "t.onnx").read_bytes() == whole
    assert not (folder / "c").exists()
    assert sorted(path.name for path in Path().iterdir()) == [
        "last.onnxfit",
        "last.onnxfit.json",
    ]


def test_killed_before_the_first_checkpoint(folder: Path) -> None:
    whole, _ = uninterrupted()
    done(*LONG, "-o", "t.onnx", "--checkpoint", "c/")
    Path("c/last.onnxfit").unlink()
    note = json.loads(Path("c/last.onnxfit.json").read_text())
    Path("c/last.onnxfit.json").write_text(json.dumps({**note, "finished": False}))
    assert "from the beginning" in call("resume", "c").stderr
    assert Path("t.onnx").read_bytes() == whole


def test_what_is_finished_is_finished(folder: Path) -> None:
    done(*LONG, "--checkpoint", "c/")
    assert "--epochs N above 6" in refused("resume", "c")
    assert "has none" in refused("resume", ".")


def test_options_of_another_version(folder: Path) -> None:
    done(*FIT, "--checkpoint", "c/")
    note = json.loads(Path("c/last.onnxfit.json").read_text())
    del note["options"]["seed"]
    Path("c/last.onnxfit.json").write_text(json.dumps(note))
    assert "they lack seed" in refused("resume", "c", "-e", 2)


EPOCHS = 150


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_from_outside(folder: Path, number: int) -> None:
    text = f"fit m.onnx -d d.npz -l cross_entropy --optimizer adam -e {EPOCHS} -b 8 -o t.onnx"
    process = start_process(*text.split(), "--checkpoint", "c/")
    assert process.stderr
    assert process.stdout
    with process:
        while "epoch 3/" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert out == ""
    assert "Traceback" not in err
    assert ("onnxfit resume" in err) == (number == signal.SIGINT)
    assert not Path("t.onnx").exists()
    assert len(done("resume", "c", "-q").splitlines()) == 3
    resumed = Path("t.onnx").read_bytes()
    done(*text.split(), "-q")
    assert Path("t.onnx").read_bytes() == resumed

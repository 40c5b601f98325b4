"""`onnxfit resume` goes on without a trace."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

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


def test_adapters_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = ("--lora", "rank=2,target=*weight,init=pissa,dora=true,dropout=0.2")
    files = ("-o", "t.onnx", "--adapter-output", "peft")
    done(*LONG, *lora, *files)
    names = ("t.onnx", "peft/adapter_model.safetensors", "peft/adapter_config.json")
    whole = [Path(name).read_bytes() for name in names]
    with monkeypatch.context() as patch:
        stop_at(patch, "on_train_batch_end", 2, 1)
        assert call(*LONG, *lora, *files, "--checkpoint", "c/").exit_code == 130
    for name in names:
        Path(name).unlink()
    done("resume", "c", "-q")
    assert [Path(name).read_bytes() for name in names] == whole


def test_a_link_in_the_folder_of_adapters_leads_nowhere(shipped: Path) -> None:
    Path("peft").mkdir()
    Path("peft/adapter_config.json").symlink_to(shipped / "victim")
    note_with(adapter_output="peft", lora=["rank=2"])
    text = refused("resume", "c", "-e", 2, "-q")
    assert "--adapter-output 'peft/adapter_config.json'" in text
    assert unchanged(shipped)


def test_the_newest_whole_checkpoint_of_a_folder(folder: Path) -> None:
    whole, _ = uninterrupted()
    done(*LONG, "-e", 3, "-o", "t.onnx", "--checkpoint", "c/{epoch}.ckpt")
    Path("c/8.ckpt").write_bytes(Path("c/3.ckpt").read_bytes()[:-50])  # a disk that was full
    result = call("resume", "c", "-e", 6)
    assert result.exit_code == 0
    assert "8.ckpt" in result.stderr
    assert "Training continues from " in result.stderr and "3.ckpt" in result.stderr  # noqa: PT018
    assert Path("t.onnx").read_bytes() == whole
    done("resume", "c/2.ckpt", "-e", 7)  # a checkpoint by its name
    assert (
        "damaged" in (text := refused("resume", "c/8.ckpt", "-e", 9, "-q"))
        or "not a complete" in text
    )


def test_a_folder_that_was_moved_and_another_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = uninterrupted()
    done(*LONG, "-e", 3, "-o", "t.onnx", "--checkpoint", "c/")
    Path("c").rename("elsewhere")
    monkeypatch.chdir("elsewhere")
    done("resume", ".", "-e", 6, "--allow-paths-outside")
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
    assert "--epochs N with N above 6" in refused("resume", "c")
    assert "has no saved options" in refused("resume", ".")


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


def note_with(**options: Any) -> None:
    """Change the noted options of the training in `c/`, as a stranger would."""
    path = Path("c/last.onnxfit.json")
    note = json.loads(path.read_text())
    note["options"].update(options)
    path.write_text(json.dumps({**note, "finished": False}))


@pytest.fixture
def shipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of checkpoints in a working folder that has files of its own beside it."""
    done(*FIT, "--checkpoint", "c/")
    (folder / "work").mkdir()
    (folder / "c").rename(folder / "work" / "c")
    (folder / "victim").write_text("keep")
    (folder / "runs").mkdir()
    monkeypatch.chdir(folder / "work")
    return folder


def unchanged(folder: Path) -> bool:
    names = {"d.npz", "m.onnx", "victim", "runs", "work"}
    return (
        (folder / "victim").read_text() == "keep"
        and not any((folder / "runs").iterdir())
        and {path.name for path in folder.iterdir()} >= names
        and not {"t.onnx", "log.csv", "last.onnxfit"} & {path.name for path in folder.iterdir()}
    )


@pytest.mark.parametrize("option", ["csv", "output", "tensorboard", "adapter_output"])
@pytest.mark.parametrize("place", ["{}/victim", "../victim", "c/../../victim", "{}/runs", "link"])
def test_a_note_does_not_decide_where_files_are_written(
    shipped: Path, option: str, place: str
) -> None:
    Path("link").symlink_to("../victim")
    noted = place.format(shipped)
    note_with(**{option: noted})
    text = refused("resume", "c", "-e", 2, "-q")
    assert f"--{option.replace('_', '-')}" in text
    assert "--allow-paths-outside" in text
    assert unchanged(shipped)


def test_paths_inside_the_folder_and_the_working_folder_are_taken(shipped: Path) -> None:
    inside = {"csv": "c/log.csv", "output": str(shipped / "work" / "t.onnx"), "tensorboard": "runs"}
    note_with(**inside)
    done("resume", "c", "-e", 2, "-q")
    assert Path("c/log.csv").exists()
    assert Path("t.onnx").exists()
    assert Path("runs/train").is_dir()


def test_paths_outside_are_taken_on_request(shipped: Path) -> None:
    note_with(csv=str(shipped / "log.csv"))
    done("resume", "c", "-e", 2, "-q", "--allow-paths-outside")
    assert (shipped / "log.csv").exists()


def test_a_link_below_the_folder_of_tensorboard_leads_nowhere(shipped: Path) -> None:
    Path("runs").mkdir()
    Path("runs/train").symlink_to(shipped / "runs")
    note_with(tensorboard="runs")
    assert "--tensorboard 'runs/train'" in refused("resume", "c", "-e", 2, "-q")
    assert unchanged(shipped)


def test_a_folder_of_tensorboard_that_is_outside_is_not_searched(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    glob = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda self, *a: (searched.append(str(self)), glob(self, *a))[1]
    )
    note_with(tensorboard="/")
    assert "--tensorboard '/'" in refused("resume", "c", "-e", 2, "-q")
    assert "/" not in searched


@pytest.mark.parametrize("name", ["x/..", "..", "/", ".", "{epoch}/../x/.."])
def test_checkpoints_stay_in_the_folder(shipped: Path, name: str) -> None:
    note_with(checkpoint=name)
    call("resume", "c", "-e", 2, "-q")
    call("resume", "c/last.onnxfit", "-e", 2, "-q")
    assert unchanged(shipped)


@pytest.mark.parametrize("name", ["last.onnxfit", "last.onnxfit.json"])
def test_a_link_in_the_folder_leads_to_no_other_file(shipped: Path, name: str) -> None:
    outside = shipped / "outside"
    (Path("c") / name).rename(outside)
    (Path("c") / name).symlink_to(outside)
    before = outside.read_bytes()
    assert "--allow-paths-outside" in refused("resume", "c", "-e", 2, "-q")
    assert outside.read_bytes() == before


def test_a_link_to_a_file_that_does_not_exist_yet(shipped: Path) -> None:
    Path("c/last.onnxfit").unlink()
    Path("c/last.onnxfit").symlink_to(shipped / "new")
    note_with(model=str(shipped / "m.onnx"), data=[str(shipped / "d.npz")])
    assert "--allow-paths-outside" in refused("resume", "c", "-e", 2, "-q")
    assert not (shipped / "new").exists()


def test_a_link_to_another_folder_is_no_folder_of_checkpoints(shipped: Path) -> None:
    Path("c/link").symlink_to(shipped / "runs")
    note_with(checkpoint="link")
    refused("resume", "c", "-e", 2, "-q")
    assert unchanged(shipped)


def test_a_link_below_the_folder_of_tensorboard(shipped: Path) -> None:
    Path("runs").mkdir()
    Path("runs/train").symlink_to(shipped / "runs")
    note_with(tensorboard="runs")
    assert "--tensorboard" in refused("resume", "c", "-e", 2, "-q")
    assert unchanged(shipped)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("csv", 5), ("csv", ["x"]), ("output", {"a": 1}), ("tensorboard", True), ("csv", "\0"),
        ("model", None), ("model", 3), ("data", "d.npz"), ("data", [1]), ("data", None),
        ("epochs", 0), ("epochs", "x"), ("epochs", None), ("epochs", [1]), ("epochs", 1e400),
        ("batch_size", -1), ("batch_size", {}), ("early_stopping", "x"), ("validation_split", 2),
        ("label", 3), ("label", [{}]), ("validation_data", [["x"]]), ("checkpoint", 3),
        ("checkpoint", None), ("checkpoint", "{"), ("checkpoint", "\0"),
    ],
)  # fmt: skip
def test_options_of_another_type_are_refused(shipped: Path, option: str, value: Any) -> None:
    note_with(**{option: value})
    refused("resume", "c", "-e", 3, "-q")
    assert unchanged(shipped)


@pytest.mark.parametrize(
    "option",
    [
        {"loss": ["os:system"]},
        {"loss": ["tests.models:mlp"]},
        {"optimizer": "os.system:command=true"},
        {"metrics": ["builtins.print"]},
        {"penalty": ["__import__('os')"]},
        {"model": "os:system"},
        {"device": "../../evil.so"},
        {"backend": "os"},
        {"gradient": "os"},
    ],
    ids=str,
)
def test_a_note_names_no_code(shipped: Path, option: dict[str, Any]) -> None:
    """Without a checkpoint the training begins anew, from what the note says alone."""
    Path("c/last.onnxfit").unlink()
    note_with(**option)
    refused("resume", "c", "-e", 3, "-q")
    assert unchanged(shipped)


def test_the_printed_command_works_where_files_are_outside(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    arguments = ["../" + str(a) if str(a) in ("m.onnx", "d.npz") else a for a in LONG]
    with monkeypatch.context() as patch:
        stop_at(patch, "on_epoch_end", 1, 0)
        result = call(*arguments, "-o", "../t.onnx", "--checkpoint", "c/")
    command = re.search(r"onnxfit (resume .*)", result.stderr)
    assert command
    assert "--allow-paths-outside" in command[1]
    done(*shlex.split(command[1]), "-q")
    assert (folder / "t.onnx").exists()

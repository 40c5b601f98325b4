"""Files that are whole or not there, and floats as JSON can hold them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import folders
from onnxfit.callbacks import Callback, CSVLogger, JSONLLogger, ModelCheckpoint, PredictionWriter
from onnxfit.cli import arrays
from onnxfit.cli.job import read_options
from onnxfit.errors import CheckpointError
from onnxfit.files import (
    json_float,
    remove_leftovers,
    write_atomically,
)
from onnxfit.folders import finish_folder, write_folder
from scripts.faults.calls import ENDS, Fault, FileCalls
from scripts.faults.points import in_child
from tests.cli.helpers import refused
from tests.models import linear


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fails(file: object) -> None:
        file.write(b"new")  # type: ignore[attr-defined]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(path, fails)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


def test_a_file_is_replaced_and_not_written_into(tmp_path: Path) -> None:
    """Whoever has the old file open goes on reading it."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with open(path, "rb") as reader:
        write_atomically(path, lambda file: file.write(b"new"))
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(os.name != "posix", reason="links and folders are those of POSIX")
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, lambda file: file.write(b"new"))
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.skipif(os.name != "posix", reason="other systems flush names by themselves")
def test_contents_then_name_and_new_folders_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        flushed.append(os.readlink(f"/proc/self/fd/{handle}"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("only /proc tells which file is flushed")
    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(tmp_path / "b" / "c" / "a", lambda file: file.write(b"new"))
    folder = tmp_path.resolve()
    *folders, temporary, last = flushed
    assert folders == [str(folder), str(folder / "b")]
    assert temporary.startswith(str(folder / "b" / "c" / ".onnxfit."))
    assert last == str(folder / "b" / "c")


@pytest.mark.parametrize(("age", "left"), [(0, True), (3000, True), (4000, False)])
def test_leftovers_are_removed_once_they_are_an_hour_old(
    age: float, left: bool, tmp_path: Path
) -> None:
    part, other = tmp_path / ".onnxfit.0.part", tmp_path / "mine.part"
    for path in (part, other):
        path.write_bytes(b"")
        os.utime(path, (time.time() - age,) * 2)
    remove_leftovers(tmp_path)
    assert part.exists() == left
    assert other.exists()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: it is a folder"):
        write_atomically(tmp_path, lambda file: file.write(b""))


@pytest.mark.parametrize("value", [0.5, -1.0, math.inf, -math.inf, math.nan])
def test_every_float_goes_through_json(value: float) -> None:
    found = json.loads(json.dumps(json_float(value), allow_nan=False))
    assert float(found) == value or (math.isnan(float(found)) and math.isnan(value))


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files have no mode")

X, Y = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def trainer() -> onnxfit.Trainer:
    return onnxfit.Trainer(linear(w=1.0), loss="mse")


def fit(callback: Callback) -> None:
    trainer().fit(X, Y, verbose=0, callbacks=[callback])


# every function that writes a file whose name the user gives: file name -> the function
WRITERS: dict[str, Callable[[Path], object]] = {
    "any": lambda path: write_atomically(path, lambda file: file.write(b"new")),
    "trainer.onnxfit": lambda path: trainer().save(path),
    "model.onnx": lambda path: trainer().export(path),
    "1.ckpt": lambda path: fit(ModelCheckpoint(path.parent / "{epoch}.ckpt")),
    "best.onnx": lambda path: fit(ModelCheckpoint(path, save_weights_only=True)),
    "best.safetensors": lambda path: fit(ModelCheckpoint(path, save_weights_only=True)),
    "log.csv": lambda path: fit(CSVLogger(path)),
    "log.jsonl": lambda path: fit(JSONLLogger(path)),
    "batch-000000.npz": lambda path: trainer().predict(
        X, callbacks=[PredictionWriter(path.parent)]
    ),
    "predictions.npz": lambda path: arrays.write(path, {"y": Y}),
    "predictions.csv": lambda path: arrays.write(path, {"y": Y}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    assert mode(path) == 0o640
    for chosen in (0o600, 0o664):
        path.write_bytes(b"")
        path.chmod(chosen)
        WRITERS[name](path)
        assert path.stat().st_size
        assert mode(path) == chosen


def test_a_private_file_is_never_open_to_others_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    seen = []
    write_atomically(path, lambda file: seen.append(os.fstat(file.fileno()).st_mode & 0o777))
    assert seen == [0o600]


def test_a_link_leads_to_the_file_whose_mode_is_kept(tmp_path: Path) -> None:
    (tmp_path / "target").touch(0o600)
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", lambda file: file.write(b"new"))
    assert (tmp_path / "link").is_symlink()
    assert (mode(tmp_path / "target"), (tmp_path / "target").read_bytes()) == (0o600, b"new")


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """A device such as /dev/null would be a file from then on, for every process."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(onnxfit.errors.CheckpointError, match=r"pipe.*not a regular file"):
        write_atomically(tmp_path / "pipe", lambda file: file.write(b"new"))
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="faults need /proc")
@pytest.mark.parametrize("kind", ["error", "kill"])
def test_a_folder_has_all_new_files_or_all_old_ones(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call for a file fails, or is the last of its process."""
    monkeypatch.setattr(folders, "SECONDS_OF_A_MOVE", 0.0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # it takes most of the time
    old = {"a": b"1", "b": b"2", "stale": b"3", "mine": b"4"}
    new = {"a": b"5", "b": b"6", "new": b"7", "mine": b"4"}
    changes = {name: new[name] for name in ("new", "a", "b")}

    def written(folder: Path, fault: Fault) -> list[tuple[str, str]]:
        with FileCalls(folder, fault) as counted, contextlib.suppress(CheckpointError):
            write_folder(folder, changes, ["a", "stale", "absent"])
        return counted.calls

    def new_folder(name: str) -> Path:
        write_folder(tmp_path / name, old)
        return tmp_path / name

    calls = written(new_folder("counted"), Fault())
    assert len(calls) > 40
    found = []
    for number in range(1, len(calls) + 1):
        folder = new_folder(str(number))
        attempt = partial(written, folder, Fault(number, kind))
        in_child(attempt) if kind in ENDS else attempt()
        finish_folder(folder)
        remove_leftovers(folder)
        found.append(_contents(folder))
    assert found[0] == old
    assert found[-1] == new
    assert all(contents in (old, new) for contents in found)


def end_process_in_a_write(folder: Path) -> None:
    """Let a child process end in the middle of a write, which leaves its temporary file."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            write_atomically(folder / "a", lambda file: os._exit(0))
        os._exit(1)
    os.waitpid(child, 0)


def test_the_next_process_removes_the_leftovers_of_a_killed_one(tmp_path: Path) -> None:
    end_process_in_a_write(tmp_path)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".onnxfit.")]
    write_atomically(tmp_path / "a", lambda file: file.write(b"new"))
    assert os.listdir(tmp_path) == ["a"]


def test_a_temporary_file_that_cannot_be_deleted_goes_with_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuses)
        with pytest.raises(ZeroDivisionError):
            write_atomically(tmp_path / "a", lambda file: 1 / 0)
    assert len(os.listdir(tmp_path)) == 1
    write_atomically(tmp_path / "a", lambda file: file.write(b"new"))
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_cannot_be_read_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def refuses(path: object, flags: int, *arguments: int, **settings: int) -> int:
        if os.path.isdir(path):  # type: ignore[arg-type]
            raise PermissionError
        return original(path, flags, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuses)
    write_atomically(tmp_path / "a", lambda file: file.write(b"new"))
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_journal_names_only_files_of_its_folder(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    journal = tmp_path / "folder" / ".onnxfit.0.ready"
    (journal / "new").mkdir(parents=True)
    (journal / "names.json").write_text(json.dumps([[], ["../victim"]]))
    for path in (journal, journal / "new"):
        os.utime(path, (0, 0))
    with pytest.raises(ValueError, match="no file of the folder"):
        finish_folder(tmp_path / "folder")
    assert victim.read_text() == "mine"


def test_the_files_of_a_killed_process_are_moved_before_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its journal would bring them back later."""
    monkeypatch.setattr(folders, "SECONDS_OF_A_MOVE", 0.0)
    write_folder(tmp_path, {"a": b"1", "b": b"2"})
    with monkeypatch.context() as patched:
        patched.setattr(folders, "_remove_journal", lambda journal: None)
        patched.setattr(folders, "_replace_files", lambda *_: None)
        write_folder(tmp_path, {"a": b"3", "b": b"4"})
    write_folder(tmp_path, {"a": b"5"})
    assert _contents(tmp_path) == {"a": b"5", "b": b"4"}


def test_the_files_of_a_running_process_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / ".onnxfit.0.ready"
    (journal / "new").mkdir(parents=True)
    (journal / "new" / "a").write_bytes(b"new")
    (journal / "names.json").write_text('[["a"], []]')
    later = time.time() + 60  # a slow machine must not make the journal old
    os.utime(journal, (later, later))
    monkeypatch.setattr(folders.time, "sleep", lambda seconds: shutil.rmtree(journal))
    finish_folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_journal_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "new").mkdir(parents=True)
    (elsewhere / "new" / "a").write_bytes(b"mine")
    (elsewhere / "names.json").write_text('[["a"], []]')
    for path in (elsewhere, elsewhere / "new"):
        os.utime(path, (0, 0))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".onnxfit.0.ready").symlink_to(elsewhere)
    finish_folder(folder)
    assert (elsewhere / "new" / "a").exists()
    assert os.listdir(folder) == [".onnxfit.0.ready"]


@pytest.mark.parametrize("folder", ["adapter", "training"])
def test_an_export_over_an_older_one_is_old_or_new(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed after the first file has moved."""
    monkeypatch.setattr(folders, "SECONDS_OF_A_MOVE", 0.0)
    adapters = onnxfit.LoRA(rank=1, alpha=1.0) if folder == "adapter" else None
    new = onnxfit.Trainer(linear(features=2, w=2.0), loss="mse", adapters=adapters)
    export = new.export_adapter if adapters is not None else new.export_training
    read = onnxfit.LoRA.load if adapters is not None else onnxfit.Trainer.load
    path = export(tmp_path / "a")
    with monkeypatch.context() as patched:
        patched.setattr(folders, "_remove_journal", lambda journal: None)
        patched.setattr(folders, "_replace_files", lambda *_: None)
        export(path)
    (journal,) = path.glob(".onnxfit.*.ready")
    read(path)
    assert not journal.exists()


def test_leftovers_of_a_process_that_has_ended_are_removed_at_once(tmp_path: Path) -> None:
    end_process_in_a_write(tmp_path)
    with open(tmp_path / ".onnxfit.0.part", "w"):
        pass  # of a process that is not known
    assert len(list(tmp_path.iterdir())) == 2

    class Killed(Exception):
        pass

    def write(file: object) -> None:
        remove_leftovers(tmp_path)  # another callback of this process
        raise Killed if len(list(tmp_path.iterdir())) == 2 else AssertionError

    with pytest.raises(Killed):
        write_atomically(tmp_path / "b", write)
    assert [path.name for path in tmp_path.iterdir()] == [".onnxfit.0.part"]


@pytest.mark.parametrize("template", ["{epoch}.ckpt", "{epoch}/{step}/a.ckpt"])
def test_a_checkpoint_removes_its_leftovers_at_the_next_run(template: str, tmp_path: Path) -> None:
    folder = (tmp_path / template.format(epoch=1, step=1)).parent
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            write_atomically(folder / "a", lambda file: os._exit(0))
        os._exit(1)
    os.waitpid(child, 0)
    assert list(folder.glob("*.part")) or list(folder.glob(".*.part"))
    fit(ModelCheckpoint(tmp_path / template))
    assert not list(folder.glob(".*.part"))


def test_a_folder_loses_stale_files_and_keeps_others(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": b"1", "stale": b"3", "mine": b"4"})
    write_folder(tmp_path, {"a": b"5", "new": b"7"}, stale=["a", "stale", "absent"])
    assert _contents(tmp_path) == {"a": b"5", "new": b"7", "mine": b"4"}


def test_a_folder_in_the_place_of_a_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("mine")
    (tmp_path / "a").write_text("old")
    with pytest.raises(CheckpointError, match="its entry 'b' is a folder"):
        write_folder(tmp_path, {"a": b"1", "b": b"2"})
    assert (tmp_path / "a").read_text() == "old"
    assert (tmp_path / "b" / "mine").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda path: onnxfit.Trainer(path, loss="mse"), "model.onnx"),
        (onnxfit.Trainer.load, "a.ckpt"),
        (lambda path: trainer().restore(path), "a.ckpt"),
        (onnxfit.LoRA.load, "a.onnx_adapter"),
        (lambda path: fit_on(path), "x.npy"),
        (lambda path: fit_on(path), "x.npz"),
        (lambda path: command("predict", model(path), "-d", path), "x.npy"),
        (lambda path: command("predict", model(path), "-d", path), "x.npz"),
        (lambda path: command("predict", model(path), "-d", path), "x.csv"),
        (lambda path: command("predict", path, "-d", path), "model.onnx"),
        (lambda path: command("fit", model(path), "-d", "x.npy", "--config", path), "config.json"),
        (lambda path: command("fit", model(path), "-d", "x.npy", "--config", path), "config.yaml"),
        (lambda path: onnxfit.TextLoader(path, length=4), "x.npy"),
        (lambda path: parquet(path), "x.parquet"),
        (lambda path: parquet(path), "x.arrow"),
        (lambda path: image(path), "images/class/a.png"),
    ],
)
@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.skipif(os.name != "posix", reason="named pipes are those of POSIX")
def test_a_pipe_is_not_read(
    read: Callable[[Path], object], name: str, is_link: bool, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "pipe") if is_link else os.mkfifo(path)
    with pytest.raises(onnxfit.errors.OnnxfitError, match="not a regular file"):
        read(path)


def test_a_pipe_beside_the_options_of_a_training_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").mkdir()
    with pytest.raises(CheckpointError, match="has no saved options"):
        read_options(tmp_path)


def model(path: Path) -> Path:
    """A model in the folder of a file."""
    onnx.save(linear(), path.with_name("m.onnx"))
    return path.with_name("m.onnx")


def fit_on(path: Path) -> None:
    trainer().fit(path, np.ones((4, 1), np.float32), epochs=1, verbose=0)


def command(*arguments: object) -> None:
    raise onnxfit.errors.OnnxfitError(refused(*arguments))


def parquet(path: Path) -> None:
    pytest.importorskip("pyarrow")
    onnxfit.ParquetLoader(path, ["x"])


def image(path: Path) -> None:
    pytest.importorskip("PIL")
    next(iter(onnxfit.ImageFolder(path.parents[1], size=(4, 4))))

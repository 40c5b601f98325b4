"""Checkpoints as files: damaged ones are refused, disks that fail leave the old file, saves in the
background hold what was when they began.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy

from onnxfit import Trainer
from onnxfit.callbacks import BackupAndRestore, Callback, LambdaCallback, ModelCheckpoint
from onnxfit.errors import CheckpointError, ModelError, SettingError
from onnxfit.files import remove_leftovers, write_atomically
from onnxfit.graph import tensors
from onnxfit.optimizers import Adam
from onnxfit.training import checkpoint
from tests.models import linear, mlp

SLOW = os.environ.get("ONNXFIT_SLOW") == "1"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4)).astype(np.float32)
Y = RNG.normal(size=(10, 3)).astype(np.float32)


def new(**settings: Any) -> Trainer:
    return Trainer(mlp(), **{"loss": "mse", "optimizer": Adam(0.01), **settings})


def fit(trainer: Trainer, *callbacks: Callback, epochs: int = 2) -> Trainer:
    trainer.fit(X, Y, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Any]:
    """A checkpoint of the middle of an epoch, its bytes and what they hold."""
    path = tmp_path_factory.mktemp("whole") / "c"
    save = LambdaCallback(
        on_train_batch_end=lambda batch, logs: trainer.save(path) if batch == 1 else None
    )
    trainer = new(metrics=["mae"], accumulate=2)
    fit(trainer, save, ModelCheckpoint(path.parent / "best", save_best_only=True, monitor="loss"))
    return path.read_bytes(), held(path)


def held(path: Path) -> Any:
    contents = vars(checkpoint.load(path, {}))
    return {**contents, "model": contents["model"].proto.SerializeToString(deterministic=True)}


# ---------------------------------------------------------------- damaged files


def same_or_refused(path: Path, data: bytes, expected: Any, what: str) -> bool:
    path.write_bytes(data)
    try:
        found = held(path)
    except CheckpointError as error:
        return str(path) in str(error)
    np.testing.assert_equal(found, expected, err_msg=what)
    return False


def test_a_cut_checkpoint_is_refused_wherever_it_is_cut(
    whole: tuple[bytes, Any], tmp_path: Path
) -> None:
    data, expected = whole
    lengths = (
        range(len(data)) if SLOW else [*range(0, len(data), 37), *range(len(data) - 60, len(data))]
    )
    for length in lengths:
        assert same_or_refused(tmp_path / "c", data[:length], expected, f"cut to {length}")


def test_a_bit_that_flips_is_noticed_or_means_nothing(
    whole: tuple[bytes, Any], tmp_path: Path
) -> None:
    """Contents are under zip's CRC-32; of headers, what is read is under a comparison, and what is
    not read (times, versions) says nothing.
    """
    data, expected = whole
    with (
        zipfile.ZipFile(tmp_path / "c", "w"),
        zipfile.ZipFile(__import__("io").BytesIO(data)) as archive,
    ):
        entries = archive.infolist()
        headers = [
            place
            for e in entries
            for place in range(e.header_offset, e.header_offset + 30 + len(e.filename))
        ]
        headers += range(archive.start_dir, len(data))
    inside = sorted(set(range(len(data))) - set(headers))
    bits = [
        (place, bit)
        for place in (headers if SLOW else headers[::2])
        for bit in (range(8) if SLOW else (place % 8, 7))
    ]
    bits += [(place, place % 8) for place in inside[:: 1 if SLOW else 29]]
    refused = 0
    for place, bit in bits:
        damaged = bytearray(data)
        damaged[place] ^= 1 << bit
        noticed = same_or_refused(
            tmp_path / "c", bytes(damaged), expected, f"bit {bit} of byte {place}"
        )
        assert noticed or place in headers, place
        refused += noticed
    assert refused > 0.6 * len(bits)
    print(f"{len(bits)} flips, {refused} refused, the others without meaning")


def test_what_is_appended_or_in_front_is_no_other_state(
    whole: tuple[bytes, Any], tmp_path: Path
) -> None:
    data, expected = whole
    for other in (
        data + b"\0" * 100,
        b"\0" * 100 + data,
        data + data,
        data[: len(data) // 2] + data,
    ):
        same_or_refused(tmp_path / "c", other, expected, "longer")


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\5\6" + bytes(18), b"\x80\4N.", mlp().SerializeToString(), os.urandom(3000)],
)
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'.*c' is not a complete onnxfit checkpoint: ."):
        Trainer.load(tmp_path / "c")


@pytest.mark.parametrize("damage", ["cut", "flipped", "newer", "foreign"])
def test_a_backup_that_cannot_be_read_gives_way_to_the_one_before(
    damage: str, tmp_path: Path
) -> None:
    class Killed(Exception):
        pass

    def kill(batch: int, logs: Any) -> None:
        if trainer.global_batch == 5:
            raise Killed

    trainer = new()
    with pytest.raises(Killed):
        fit(
            trainer,
            BackupAndRestore(tmp_path / "b", every_n_steps=1),
            LambdaCallback(on_train_batch_end=kill),
        )
    newest = max((tmp_path / "b").iterdir())
    data = bytearray(newest.read_bytes())
    if damage == "cut":
        newest.write_bytes(data[:-1])
    elif damage == "flipped":
        data[len(data) // 2] ^= 4
        newest.write_bytes(data)
    elif damage == "newer":
        newest.write_bytes(data.replace(b'"format": 1', b'"format": 7'))
        with zipfile.ZipFile(newest) as archive, pytest.raises(zipfile.BadZipFile):
            archive.read("onnxfit.json")
    else:
        newest.write_bytes(b"GIF89a")
    with pytest.warns(
        UserWarning,
        match=rf"{newest.name}.* cannot be read, so the previous backup is read instead",
    ) as warned:
        again = fit(new(), BackupAndRestore(tmp_path / "b", every_n_steps=1))
    assert len(warned) == 1
    np.testing.assert_equal(again.get_state(), fit(new()).get_state())
    assert not (tmp_path / "b").exists()


# ---------------------------------------------------------------- disks that fail


class Disk:
    """Takes so many bytes, and then no more."""

    def __init__(self, space: int) -> None:
        self.space = space

    def write(self, write: Callable[[Any], int], data: Any) -> int:
        self.space -= len(data)
        if self.space < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(data)


@pytest.mark.parametrize("space", [0, 100, 2000, 2500])
def test_a_full_disk_costs_nothing_but_that_save(
    space: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fit(new())
    path = trainer.save(tmp_path / "c")
    before, state = path.read_bytes(), trainer.get_state()
    assert len(before) > space
    fit(trainer, epochs=1)
    disk, write = Disk(space), zipfile._ZipWriteFile.write  # type: ignore[attr-defined]
    monkeypatch.setattr(
        zipfile._ZipWriteFile,
        "write",
        lambda self, data: disk.write(lambda d: write(self, d), data),
    )  # type: ignore[attr-defined]
    with pytest.raises(
        CheckpointError,
        match=r"c' cannot be written: No space left on device. The training state is unchanged.$",
    ):
        trainer.save(path)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert path.read_bytes() == before
    np.testing.assert_equal(Trainer.load(path).get_state(), state)
    np.testing.assert_equal(Trainer.load(trainer.save(path)).get_state(), trainer.get_state())


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "BackupAndRestore"])
def test_a_disk_that_fills_up_ends_the_fit_and_keeps_what_was_saved(
    kind: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, iter([True] * 8)

    def failing(handle: int) -> None:
        if not next(calls, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    callbacks: dict[str, Callback] = {
        "ModelCheckpoint": ModelCheckpoint(
            tmp_path / "f" / "{epoch}", monitor="loss", background=background
        ),
        "BackupAndRestore": BackupAndRestore(tmp_path / "f", background=background),
    }
    monkeypatch.setattr(os, "fsync", failing)
    trainer = new()
    with pytest.raises(CheckpointError, match="No space left on device"):
        fit(trainer, callbacks[kind], epochs=9)
    monkeypatch.undo()
    assert trainer.epoch in (3, 4, 5)
    kept = sorted((tmp_path / "f").iterdir())
    assert all(p.suffix != ".part" for p in kept)
    for path in kept:
        Trainer.load(path)
    assert len(kept) >= 2
    fit(trainer, epochs=1)  # it goes on


def test_a_save_that_fails_last_is_raised_before_backups_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .* is a file, not a folder"):
        fit(
            new(),
            BackupAndRestore(tmp_path / "b"),
            ModelCheckpoint(tmp_path / "file" / "c", every_n_epochs=2),
            epochs=2,
        )
    assert list((tmp_path / "b").iterdir())


@pytest.mark.parametrize("place", ["file/c", "file/a/c", "folder"])
def test_places_that_take_no_file(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "folder").mkdir()
    trainer = new()
    with pytest.raises(
        CheckpointError, match=r"cannot be written: (.* is a file, not a folder|it is a folder)"
    ):
        trainer.save(tmp_path / place)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]
    fit(trainer)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files")
def test_a_folder_that_takes_no_files() -> None:
    for path in ("/proc/self/c", "/proc/c/c"):
        with pytest.raises(CheckpointError, match=f"'{path}' cannot be written: "):
            new().save(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_device_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.open
    monkeypatch.setattr(
        builtins,
        "open",
        lambda path, mode="r", *a, **k: real(
            "/dev/full" if mode == "xb" else path, "wb" if mode == "xb" else mode, *a, **k
        ),
    )
    with pytest.raises(CheckpointError, match="No space left on device"):
        new().save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a\0b", "a\0b/c"])
def test_a_name_with_a_null_character_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="null character"):
        write_atomically(tmp_path / name, lambda file: file.write(b"x"))


@pytest.mark.skipif(os.name != "posix", reason="paths are shorter")
def test_folders_may_be_deeper_than_python_calls_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    path = tmp_path / ("d/" * 1200 + "e")
    write_atomically(path, lambda file: file.write(b"x"))
    assert path.read_bytes() == b"x"
    # pytest removes old folders recursively, and would fail at these in one of the next runs.
    path.unlink()
    for _ in range(1200):
        path = path.parent
        path.rmdir()
    assert tmp_path.is_dir()


def test_a_message_of_a_file_that_is_no_checkpoint_speaks_of_no_training(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written: it is a folder\.$"):
        write_atomically(tmp_path, lambda file: file.write(b""))


def test_name_and_folder_are_brought_to_the_disk_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: done.append(os.readlink(f"/proc/self/fd/{handle}")) or fsync(handle),
    )
    monkeypatch.setattr(os, "replace", lambda *a: done.append("replace") or replace(*a))
    write_atomically(tmp_path / "a" / "b" / "c", lambda file: file.write(b"x"))
    top = str(tmp_path)
    assert done[:2] == [top, f"{top}/a"]  # the names of the folders that were made
    assert done[2].endswith(".part")
    assert done[3:] == ["replace", f"{top}/a/b"]


def test_leftovers_of_killed_processes_are_removed_once_they_are_old(tmp_path: Path) -> None:
    old, unique_name, other = (
        tmp_path / name for name in (".onnxfit.1.part", ".onnxfit.2.part", "mine.part")
    )
    for path in (old, unique_name, other):
        path.write_text("half")
        os.utime(path, (0, 0)) if path != unique_name else None
    fit(new(), ModelCheckpoint(tmp_path / "c", monitor="loss"))
    assert {p.name for p in tmp_path.iterdir()} == {"c", unique_name.name, other.name}
    remove_leftovers(tmp_path, 0)
    assert {p.name for p in tmp_path.iterdir()} == {"c", other.name}


# ---------------------------------------------------------------- in the background


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves that wait for an event before they write."""
    gate = threading.Event()
    write = checkpoint.Snapshot._write

    def slow(self: checkpoint.Snapshot, file: Any) -> None:
        assert gate.wait(30)
        write(self, file)

    monkeypatch.setattr(checkpoint.Snapshot, "_write", slow)
    yield gate
    gate.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_what_was(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    states, there = [], []

    def after(epoch: int, logs: Any) -> None:
        states.append(trainer.get_state())

    def batch(batch: int, logs: Any) -> None:
        if trainer.global_batch == 5:  # the first save is still under way
            there.append(list(tmp_path.glob("[0-9]")))
            slow_disk.set()

    trainer = new()
    fit(
        trainer,
        ModelCheckpoint(tmp_path / "{epoch}", monitor="loss"),
        LambdaCallback(on_epoch_end=after, on_train_batch_end=batch),
    )
    assert there == [[]]
    for epoch, state in enumerate(states, 1):
        np.testing.assert_equal(Trainer.load(tmp_path / str(epoch)).get_state(), state)
    assert states[0]["weights"]["fc0.weight"][0, 0] != states[1]["weights"]["fc0.weight"][0, 0]


@pytest.mark.parametrize("kind", [ModelCheckpoint, BackupAndRestore])
def test_an_exception_waits_for_the_save_under_way(
    kind: type[Callback], tmp_path: Path, slow_disk: threading.Event
) -> None:
    def interrupt(epoch: int, logs: Any) -> None:
        threading.Timer(0.2, slow_disk.set).start()
        raise KeyboardInterrupt

    if kind is BackupAndRestore:
        slow_disk.set()
    callback = (
        ModelCheckpoint(tmp_path / "c", monitor="loss")
        if kind is ModelCheckpoint
        else BackupAndRestore(tmp_path)
    )
    late = LambdaCallback(on_epoch_end=interrupt)
    late.phase = "logger"
    trainer = new()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callback, late)
    newest = max(p for p in tmp_path.iterdir())
    np.testing.assert_equal(Trainer.load(newest).get_state(), trainer.get_state())
    assert not [t for t in threading.enumerate() if t.name == "onnxfit-save"]


def test_of_several_callbacks_one_writes_after_another_in_the_order_of_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a backup that counts a checkpoint among those kept is not there before it."""
    written, running = [], []
    write = checkpoint.Snapshot.write

    def watched(self: checkpoint.Snapshot, path: Any) -> Path:
        running.append(path)
        assert len(running) == 1
        time.sleep(0.01)
        written.append(Path(path).name.split("-")[0])
        running.clear()
        return write(self, path)

    monkeypatch.setattr(checkpoint.Snapshot, "write", watched)
    fit(
        new(),
        BackupAndRestore(tmp_path / "b"),
        ModelCheckpoint(tmp_path / "best", monitor="loss"),
        epochs=3,
    )
    assert written == ["backup", *["best", "backup"] * 3]


def test_worse_files_go_only_when_the_better_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    replace = os.replace

    def watched(*a: Any) -> None:
        replace(*a)
        counts.append(len(list(tmp_path.glob("[0-9]"))))

    monkeypatch.setattr(os, "replace", watched)
    fit(new(), ModelCheckpoint(tmp_path / "{epoch}", monitor="loss", top_k=1), epochs=3)
    assert counts == [1, 2, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


# ---------------------------------------------------------------- what is in it


def test_entries_are_what_other_tools_read(tmp_path: Path) -> None:
    trainer = fit(new())
    with zipfile.ZipFile(trainer.save(tmp_path / "c")) as archive:
        archive.extractall(tmp_path / "x")
    model = onnx.load(tmp_path / "x" / "model.onnx")
    onnx.checker.check_model(tmp_path / "x" / "model.onnx")
    found = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_equal(found, trainer.get_weights())
    slots = list(safetensors.numpy.load_file(tmp_path / "x" / "state.safetensors").values())
    expected = trainer.get_state()["slots"].values()
    assert all(any(np.array_equal(slot, array) for array in slots) for slot in expected)


@pytest.mark.parametrize("kind", sorted(tensors.TYPES))
def test_safetensors_of_every_type(kind: str, tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6).astype(tensors.TYPES[kind]).reshape(2, 3),
        "b": np.zeros((0, 2), tensors.TYPES[kind]),
        "c": np.array(1, tensors.TYPES[kind]),
    }
    with open(tmp_path / "s", "wb") as file:
        tensors.write_safetensors(file, arrays)
    data = (tmp_path / "s").read_bytes()
    assert len(data) == tensors.safetensors_size(arrays)
    np.testing.assert_equal(tensors.read_safetensors(data), arrays)
    if kind != "BF16":  # which the library's numpy half does not read
        np.testing.assert_equal(safetensors.numpy.load(data), arrays)


def test_load_needs_the_path_alone(tmp_path: Path) -> None:
    trainer = fit(
        new(accumulate=2, metrics=["mae"], penalty=0.01, clip_norm=1.0, backend="forward_backward")
    )
    trainer.save_onnx_graph(tmp_path / "graphs")
    for path in (trainer.save(tmp_path / "file"), tmp_path / "graphs", str(tmp_path / "graphs")):
        loaded = Trainer.load(path)
        np.testing.assert_equal(loaded.get_state(), trainer.get_state())
        assert loaded.settings == trainer.settings
        assert loaded.evaluate(X, Y) == trainer.evaluate(X, Y)


def test_a_checkpoint_of_a_model_of_one_weight_has_no_empty_corner(tmp_path: Path) -> None:
    loaded = Trainer.load(Trainer(linear(w=3), loss="mse").save(tmp_path / "c"))
    assert loaded.get_weights()["w"].item() == 3


# ---------------------------------------------------------------- tensors in other files, and more
# of them than a message of ONNX holds


def embedding(rows: int = 300) -> onnx.ModelProto:
    """A frozen table of which rows are taken, and a layer that is trained."""
    rng = np.random.default_rng(0)
    arrays = {
        "table": np.zeros((rows, 4), np.float32),
        "w": rng.normal(size=(4, 300)).astype(np.float32),
        "b": np.zeros(300, np.float32),
    }
    arrays["table"][: rows // 2 : 7] = 1
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    return onnx.helper.make_model(
        embedding_graph(rows, initializers),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )


def embedding_graph(rows: int, initializers: list[onnx.TensorProto]) -> onnx.GraphProto:
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes = [make("Gather", ["table", "x"], ["e"]), make("Gemm", ["e", "w", "b"], ["y"])]
    x, y = info("x", onnx.TensorProto.INT64, ["N"]), info("y", onnx.TensorProto.FLOAT, ["N", 300])
    return onnx.helper.make_graph(nodes, "embedding", [x], [y], initializers)


def bytes_of(model: onnx.ModelProto) -> dict[str, bytes]:
    return {tensor.name: tensor.raw_data for tensor in model.graph.initializer}


def fit_table(trainer: Trainer, *callbacks: Callback, epochs: int = 2) -> Trainer:
    trainer.fit(
        np.arange(10),
        np.ones((10, 300), np.float32),
        batch_size=4,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    )
    return trainer


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_model_with_external_data_trains_as_the_one_that_is_whole(
    backend: str, tmp_path: Path
) -> None:
    onnx.save(
        embedding(),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="m.bin",
        size_threshold=0,
    )
    settings: dict[str, Any] = {
        "weights": ["w", "b"],
        "loss": "mse",
        "optimizer": "adam",
        "backend": backend,
    }
    one, other = (
        fit_table(Trainer(source, **settings)) for source in (embedding(), tmp_path / "m.onnx")
    )
    np.testing.assert_equal(other.get_state(), one.get_state())
    assert bytes_of(other.export()) == bytes_of(one.export())
    np.testing.assert_equal(Trainer.load(other.save(tmp_path / "c")).get_state(), one.get_state())


@pytest.mark.parametrize(
    "location", ["../outside.bin", "/etc/passwd", "../../etc/passwd", "a/../../outside.bin"]
)
def test_external_data_outside_of_the_models_folder_is_refused(
    location: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    onnx.save(
        embedding(),
        folder / "m.onnx",
        save_as_external_data=True,
        location="m.bin",
        size_threshold=0,
    )
    (tmp_path / "outside.bin").write_bytes((folder / "m.bin").read_bytes())
    model = onnx.load(folder / "m.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = location
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="cannot be read"):
        Trainer(folder / "m.onnx", loss="mse")


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_too_large_for_one_message_trains_as_any(
    backend: str, frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bound lowered to what a test can have; with weights that are trained beyond it, and
    with those that are not.
    """
    settings: dict[str, Any] = {
        "weights": ["w", "b"] if frozen else None,
        "loss": "mse",
        "optimizer": "adam",
        "backend": backend,
    }
    whole = fit_table(Trainer(embedding(), **settings))
    monkeypatch.setattr(tensors, "MAX_MODEL_BYTES", 5000)
    large = fit_table(Trainer(embedding(), **settings), epochs=1)
    large = fit_table(Trainer.load(large.save(tmp_path / "c")), epochs=1)
    np.testing.assert_equal(large.get_state()["slots"], whole.get_state()["slots"])
    np.testing.assert_equal(large.get_weights(), whole.get_weights())
    np.testing.assert_allclose(
        large.predict(np.arange(10)), whole.predict(np.arange(10)), rtol=1e-6
    )
    exported = large.export(tmp_path / "m.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "m.onnx", "m.onnx.data"]
    assert (tmp_path / "m.onnx").stat().st_size < 4000  # the graph and the lineage
    assert bytes_of(onnx.load(tmp_path / "m.onnx")) == bytes_of(exported)
    onnx.checker.check_model(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        session.run(None, {"x": np.arange(10)})[0], whole.predict(np.arange(10)), rtol=1e-6
    )
    again = Trainer(tmp_path / "m.onnx", **settings)
    np.testing.assert_equal(again.get_weights(), whole.get_weights())


@pytest.mark.skipif(not SLOW, reason="takes some 10 GB of memory")
def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    rows = 2_200_000_000 // 16
    small = embedding(4)
    model = onnx.helper.make_model(
        embedding_graph(rows, list(small.graph.initializer[1:])),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    table = model.graph.initializer.add(
        name="table", data_type=onnx.TensorProto.FLOAT, dims=[rows, 4]
    )
    tensors.refer(table, "table.bin", 0, rows * 16)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / "table.bin", "wb") as file:
        file.truncate(rows * 16)  # zeros that take no place
    settings: dict[str, Any] = {"weights": ["w", "b"], "loss": "mse", "optimizer": "adam"}
    trainer = fit_table(Trainer(tmp_path / "m.onnx", **settings), epochs=1)
    print(f"trained: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")
    path = trainer.save(tmp_path / "c")
    assert path.stat().st_size > 2**31
    print(f"saved: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")
    predicted = trainer.predict(np.arange(3))
    trainer.export(tmp_path / "out.onnx")
    state = trainer.get_state()
    del trainer
    print(f"exported: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")
    session = onnxruntime.InferenceSession(
        tmp_path / "out.onnx", providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(session.run(None, {"x": np.arange(3)})[0], predicted, rtol=1e-6)
    del session
    loaded = Trainer.load(path)
    np.testing.assert_equal(loaded.get_state(), state)
    fit_table(loaded, epochs=1)
    print(f"loaded: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")


def test_graphs_too_large_for_one_message_have_their_tensors_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "MAX_MODEL_BYTES", 4000)
    trainer = fit_table(Trainer(embedding(), weights=["w", "b"], loss="mse"))
    files = trainer.save_onnx_graph(tmp_path)
    assert {p.name for p in tmp_path.glob("*.data")} == {"model.onnx.data", "trained.onnx.data"}
    for file in files.values():
        onnx.checker.check_model(tmp_path / file)
    np.testing.assert_equal(Trainer.load(tmp_path).get_state(), trainer.get_state())

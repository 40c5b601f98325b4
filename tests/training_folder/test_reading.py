"""Folders and states that are damaged, or that a stranger made up, are refused before anything
changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from onnxfit import Trainer
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.training_folder.manifest import is_plain_name
from tests.models import mlp

Manifest = dict[str, Any]


def new() -> Trainer:
    return Trainer(mlp(), loss="mse", optimizer="adam")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new().export_training(tmp_path_factory.mktemp("written"))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "folder"))


def edit(folder: Path, change: Callable[[Manifest], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def sign(folder: Path, name: str) -> None:
    """Let the manifest have the hash and the size of a file as it is now."""
    data = (folder / name).read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit(folder, lambda manifest: manifest["files"].update({name: entry}))


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else []


HOSTILE: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "another format": (lambda m: m.update(format="x"), "its format is not"),
    "a newer version": (lambda m: m.update(version=2), r"version 2.*Upgrade"),
    "no version": (lambda m: m.pop("version"), "version None"),
    "no state": (lambda m: m.pop("state"), "must have state"),
    "a path": (lambda m: m["files"].update({"../x": {}}), "without a path"),
    "an absolute path": (lambda m: m["files"].update({"/etc/passwd": {}}), "without a path"),
    "a model elsewhere": (lambda m: m["model"].update(file="../model.onnx"), "no model called"),
    "a wrong hash": (lambda m: m["files"]["model.onnx"].update(sha256="0" * 64), "SHA-256"),
    "no hash": (lambda m: m["files"]["model.onnx"].update(sha256="no"), "64 hexadecimal"),
    "a wrong size": (lambda m: m["files"]["state.safetensors"].update(bytes=7), "lists 7"),
    "a missing file": (lambda m: m["files"].pop("state.safetensors"), "does not list"),
    "a huge tensor": (lambda m: m["state"][0].update(shape=[2**40, 2**40]), "no valid tensor type"),
    "a large tensor": (lambda m: m["state"][0].update(shape=[2**20, 2**10]), "bytes, but the"),
    "a negative size": (lambda m: m["state"][0].update(shape=[-4]), "whole number"),
    "a wrong shape": (lambda m: m["state"][0].update(shape=[8, 4]), r"\[4, 8\]\. Expected"),
    "a wrong type": (lambda m: m["state"][0].update(type="int32"), "Expected int32"),
    "an unknown type": (lambda m: m["state"][0].update(type="object"), "no valid tensor type"),
    "an unknown kind": (lambda m: m["state"][0].update(kind="code"), "weight or slot"),
    "another name": (lambda m: m["state"][0].update(name="w"), "lacks w"),
    "a slot as a weight": (lambda m: m["state"][-6].update(kind="weight"), "another trainer"),
    "a setting of code": (
        lambda m: m["settings"].update(loss={"onnxfit:class": {"name": "os.system"}}),
        "does not know",
    ),
    "a number of letters": (
        lambda m: m["settings"].update(clip_norm={"onnxfit:float": "x"}),
        "settings of .* are damaged",
    ),
    "many levels": (lambda m: m["settings"].update(loss=nested(50)), "levels"),
    "processes": (lambda m: m["settings"].update(distribute="mpi"), "settings contain .distribute"),
    "no such optimizer": (
        lambda m: m["settings"].update(optimizer="adm"),
        "not valid for a Trainer",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused(name: str, folder: Path) -> None:
    change, message = HOSTILE[name]
    edit(folder, change)
    with pytest.raises((CheckpointError, SettingError), match=message):
        Trainer.load(folder)


@pytest.mark.parametrize("name", ["model.onnx", "state.safetensors"])
@pytest.mark.parametrize("signed", [False, True])
def test_a_damaged_file_is_refused(name: str, signed: bool, folder: Path) -> None:
    path = folder / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    if signed:
        sign(folder, name)
    with pytest.raises(CheckpointError):
        Trainer.load(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"null"])
def test_a_manifest_that_is_none_is_refused(text: bytes, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Trainer.load(folder)


def test_a_model_that_names_files_to_read_is_refused(folder: Path) -> None:
    (folder / "secret").write_bytes(b"1" * 400)
    model = onnx.load(folder / "model.onnx")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    sign(folder, "model.onnx")
    with pytest.raises(CheckpointError, match="refers to other files"):
        Trainer.load(folder)


def test_an_export_deletes_no_file_that_a_manifest_made_up(folder: Path) -> None:
    (folder / "mine.txt").write_text("mine")
    sign(folder, "mine.txt")
    new().export_training(folder, include=["train"])
    assert (folder / "mine.txt").read_text() == "mine"
    assert not (folder / "predict.onnx").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
@pytest.mark.parametrize("name", ["state.safetensors", "model.onnx"])
def test_a_pipe_is_refused_without_waiting(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    edit(folder, lambda manifest: manifest["files"][name].update(bytes=0))
    with pytest.raises(CheckpointError, match=r"it is a device or a pipe, not a regular file"):
        Trainer.load(folder)


def test_unknown_keys_are_ignored(folder: Path) -> None:
    edit(folder, lambda manifest: manifest.update(later={"x": 1}))
    assert Trainer.load(folder).global_step == 0


STATES: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "a missing tensor": (lambda s: s.pop("fc0.bias"), "lacks fc0.bias|bytes"),
    "a surplus tensor": (lambda s: s.update(w=np.zeros(1)), "has w"),
    "a shape": (lambda s: s.update({"fc0.bias": np.zeros((8, 1), np.float32)}), r"\[8, 1\]"),
    "a type": (lambda s: s.update({"fc0.bias": np.zeros(8, np.int32)}), "int32"),
    "a negative counter": (
        lambda s: s.update({"counter/epoch": np.array(-1)}),
        "epoch must be a whole number .*got -1",
    ),
    "a rate of NaN": (
        lambda s: s.update({"counter/learning_rate": np.array(np.nan)}),
        "learning_rate must be .*got nan",
    ),
    "much more": (lambda s: s.update(w=np.zeros(2**24)), "bytes, but the tensors"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_does_not_fit_changes_nothing(
    name: str, written: Path, tmp_path: Path
) -> None:
    change, message = STATES[name]
    state = load_file(written / "state.safetensors")
    change(state)
    save_file(state, tmp_path / "state")
    trainer = new()
    before = trainer.get_state()
    with pytest.raises((CheckpointError, SettingError), match=message):
        trainer.import_state(tmp_path / "state")
    np.testing.assert_equal(trainer.get_state(), before)


def test_states_of_other_trainings_are_refused(written: Path, tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse")
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        trainer.import_state(written / "state.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        trainer.import_state(tmp_path / "absent")
    with pytest.raises(CheckpointError):
        trainer.import_state(tmp_path)
    (tmp_path / "none").write_bytes(b"")
    with pytest.raises(CheckpointError):
        trainer.import_state(tmp_path / "none")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\\b", "C:a", "a\0", "a\n", "ä" * 3])
def test_a_name_with_a_path_is_none(name: str) -> None:
    assert not is_plain_name(name)

"""The manifest of a training folder: its names, its types, and its reader."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxfit.errors import CheckpointError
from onnxfit.files import (
    COUNT,
    LIST,
    MAPPING,
    TEXT,
    ValueType,
    list_of,
    mapping_of,
    optional,
    read_regular_file,
    require_path,
    require_regular_file,
    require_types,
)
from onnxfit.folders import finish_folder

FORMAT = "onnxfit-training-folder"
VERSION = 1
MANIFEST, STATE, MODEL = "manifest.json", "state.safetensors", "model.onnx"
TRAIN, EVALUATE, PREDICT = "train", "evaluate", "predict"
SCALARS, EXPORT = "scalars", "export"
GRAPHS = (TRAIN, EVALUATE, PREDICT)  # graphs that a user may choose
MAX_MANIFEST_BYTES = 1 << 26
MAX_LEVELS = 32  # nesting depth of objects and lists
CHUNK_BYTES = 1 << 24  # bytes of a file that are hashed at a time

KINDS = ("weight", "slot", "statistic", "counter")
HASH = ValueType(
    "a SHA-256 of 64 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
)
MANIFEST_TYPES = {
    "format": TEXT,
    "version": COUNT,
    "files": mapping_of(MAPPING),
    "state": list_of(MAPPING),
    "model": MAPPING,
    "settings": MAPPING,
}
FILE_TYPES = {"sha256": HASH, "bytes": COUNT}
ENTRY_TYPES = {
    "name": TEXT,
    "type": TEXT,
    "shape": list_of(COUNT),
    "kind": ValueType(" or ".join(KINDS), lambda value: isinstance(value, str) and value in KINDS),
    "of": optional(TEXT),
}
MODEL_TYPES = {"file": TEXT, "tensors": LIST}


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder. Each file is checked before it is read.

    - `folder`: the folder.
    - `declared`: file name -> its size and hash in the manifest.
    """

    folder: Path
    declared: Mapping[str, Mapping[str, Any]]

    def checked(self, name: str) -> Path:
        """Return the path of a file, after comparing its size and its hash with the manifest.

        CheckpointError: the manifest does not list the file, or they differ.
        """
        path = self.folder / name
        if name not in self.declared:
            raise CheckpointError(f"{str(self.folder / MANIFEST)!r} does not list {name!r}.")
        entry = self.declared[name]
        try:
            require_regular_file(path)
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"{str(path)!r} has {size} bytes, but the manifest lists {entry['bytes']}. The"
                    " folder is damaged, or the file was changed."
                )
            found = _sha256(path)
        except OSError as error:
            raise CheckpointError(
                f"{str(path)!r} cannot be read: {error.strerror or error}."
            ) from error
        if found != entry["sha256"]:
            raise CheckpointError(
                f"{str(path)!r} has a SHA-256 that begins with {found[:12]}, but the manifest lists"
                f" {entry['sha256'][:12]}. The folder is damaged, or the file was changed. To read"
                " a state that another program wrote, use import_state."
            )
        return path


def is_training_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder with a manifest. SettingError: it is not a path."""
    require_path(path)
    try:
        finish_folder(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} has a write that cannot be finished: {error}"
        ) from None
    return (Path(path) / MANIFEST).is_file()


def earlier_graphs(folder: str | os.PathLike[str]) -> list[str]:
    """Return the graph files that an earlier export wrote to a folder; [] if there was no export.

    Files of other names are never included, even if a manifest lists them.
    """
    try:
        listed = read_manifest(folder)["files"]
    except CheckpointError:
        return []
    return [file for file in map(graph_file, (*GRAPHS, SCALARS, EXPORT)) if file in listed]


def graph_file(graph: str) -> str:
    """Return the name of a graph's file."""
    return f"{graph}.onnx"


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of a folder, after checking the parts that `Trainer.load` needs.

    CheckpointError: the file is not a manifest of a known version.
    """
    path = Path(folder) / MANIFEST
    name = str(path)
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{name!r} has {path.stat().st_size} bytes, but a manifest has at most"
                f" {MAX_MANIFEST_BYTES}."
            )
        manifest = json.loads(read_regular_file(path))
        if isinstance(manifest, (dict, list)):
            _require_shallow(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name!r} is not a valid manifest: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{name!r} was not written by export_training: its format is not {FORMAT!r}."
        )
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{name!r} has version {manifest.get('version')!r}, but this version of onnxfit reads"
            f" version {VERSION}. Upgrade onnxfit, or export the folder again."
        )
    require_types(repr(name), manifest, MANIFEST_TYPES)
    for file, entry in manifest["files"].items():
        if not is_plain_name(file):
            raise CheckpointError(
                f"{name!r} was not written by onnxfit: it names the file {file!r}, expected a name"
                " without a path."
            )
        require_types(f"The entry of {file!r} in {name!r}", entry, FILE_TYPES)
    for entry in manifest["state"]:
        require_types(f"The state in {name!r}", entry, ENTRY_TYPES)
    require_types(f"The model in {name!r}", manifest["model"], MODEL_TYPES)
    return manifest


def _require_shallow(value: Any, levels: int = MAX_LEVELS) -> None:
    """Raise ValueError for JSON nested so deeply that a recursive function would fail."""
    if not levels:
        raise ValueError(f"it is nested more than {MAX_LEVELS} levels deep")
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, (dict, list)):
            _require_shallow(entry, levels - 1)


def is_plain_name(name: str) -> bool:
    """Return whether a name is the name of a file directly in a folder, on every system.

    >>> is_plain_name("train.onnx"), is_plain_name("../train.onnx"), is_plain_name("C:train.onnx")
    (True, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", name) is not None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()

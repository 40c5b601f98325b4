"""Conversion of a training folder back to a `Trainer`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import google.protobuf.message
import numpy as np
import onnx

from onnxfit.callbacks.history import History
from onnxfit.errors import CheckpointError
from onnxfit.files import as_checkpoint_error
from onnxfit.graph.model import OnnxModel
from onnxfit.graph.tensors import TYPES, is_external
from onnxfit.load.validity import require_valid
from onnxfit.training.contents import CheckpointContents
from onnxfit.training.position import Position
from onnxfit.training.setting_values import decode_setting
from onnxfit.training_folder.json_numbers import with_all_floats
from onnxfit.training_folder.manifest import MODEL, STATE, FolderFiles, read_manifest
from onnxfit.training_folder.tensors import StateEntry, read_state

MAX_ELEMENTS = 2**40  # of a tensor that a manifest may declare


def read_training_folder(
    path: str | os.PathLike[str], settings: Mapping[str, Any]
) -> CheckpointContents:
    """Return the contents of a training folder, with some of its settings replaced.

    - `path`: the folder. It runs no code.
    - `settings`: settings that replace settings of the same names in the folder.

    CheckpointError: the folder is damaged, or was not written by onnxfit.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    files = FolderFiles(folder, manifest["files"])
    if manifest["model"]["file"] != MODEL:
        raise CheckpointError(f"{str(folder)!r} has no model called {MODEL!r}.")
    if "distribute" in manifest["settings"]:  # a file does not decide which processes train
        raise CheckpointError(
            f"{str(folder)!r} was not written by onnxfit: its settings contain 'distribute'."
        )
    entries = [_state_entry(values, folder) for values in manifest["state"]]
    with as_checkpoint_error(f"The settings of {str(folder)!r} are damaged"):
        saved = {
            name: decode_setting(name, value, str(folder))
            for name, value in with_all_floats(manifest["settings"]).items()
            if name not in settings
        }
    state = read_state(files.checked(STATE), entries)
    try:
        model = onnx.ModelProto.FromString(files.checked(MODEL).read_bytes())
    except google.protobuf.message.DecodeError as error:
        raise CheckpointError(f"{str(folder / MODEL)!r} is not an ONNX model: {error}") from None
    if any(map(is_external, model.graph.initializer)):
        raise CheckpointError(
            f"{str(folder / MODEL)!r} was not written by onnxfit: it refers to other files."
        )
    require_valid(model, "its model")
    return CheckpointContents(
        model=OnnxModel(model),
        settings={**saved, **settings},
        replaced={k: v for k, v in manifest["settings"].items() if k not in saved},
        state=state,
        history=History().state_dict(),
        train_losses=[],
        resume=astuple(Position()),
        tracker={},
        missed_event={},
        callbacks={},
        constants={},
    )


def _state_entry(values: Mapping[str, Any], folder: Path) -> StateEntry:
    """Return an entry of the state as declared in a manifest, whose types are already checked."""
    known = {str(np.dtype(dtype)) for dtype in TYPES.values()}
    if values["type"] not in known or math.prod(values["shape"]) > MAX_ELEMENTS:
        raise CheckpointError(
            f"The manifest of {str(folder)!r} is damaged: it declares {values['name']!r} as"
            f" {values['type']}{values['shape']}, which is no valid tensor type."
        )
    return StateEntry(
        values["name"], values["type"], tuple(values["shape"]), values["kind"], values["of"]
    )

"""One file with a whole training state: a zip archive of `onnxfit.json`, `model.onnx` and `state.safetensors`.

No pickle: a stranger's checkpoint runs no code. Written aside and renamed, so that it is whole or not there; every entry carries zip's CRC-32.
The weights live in `model.onnx` alone, which any ONNX tool can take out of the archive.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import safetensors
import safetensors.numpy

from onnxfit.errors import CheckpointError, ModelError, SettingError
from onnxfit.files import write_atomically
from onnxfit.graph.model import initializer_arrays, read_model
from onnxfit.registry import from_config, to_config

FORMAT = 1
SUFFIX = ".onnxfit"  # of the one that lies beside the graphs of a trainer
INFO, MODEL, STATE = "onnxfit.json", "model.onnx", "state.safetensors"
REGISTRIES = tuple(f"onnxfit.{name}" for name in ("losses", "penalties", "metrics", "optimizers", "schedules"))


@dataclass
class Contents:
    """What a checkpoint holds. `model` carries the trained weights; `state` is `Trainer.get_state`; `resume` are the fields of `loop.Resume`."""

    model: onnx.ModelProto
    settings: dict[str, Any]
    state: dict[str, dict[str, Any]]
    history: dict[str, Any]
    train_losses: list[float]
    resume: Sequence[Any]
    tracker: Mapping[str, Any]  # `Tracker.state_dict` of the epoch under way
    ended: Mapping[str, Any]  # the figures of an epoch of which the loggers were not told yet, and whether training stops there
    callbacks: Mapping[str, dict[str, Any]]


def save(path: str | os.PathLike[str], contents: Contents) -> Path:
    """Write a checkpoint, atomically. CheckpointError where the folder or the disk refuses: nothing is changed then."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    info = {
        "format": FORMAT,
        "settings": {name: _encode_setting(value) for name, value in contents.settings.items()},
        "weights": list(contents.state["weights"]),
        "slots": _without_arrays(contents.state["slots"], arrays),
        "counters": contents.state["counters"],
        "history": _without_arrays(contents.history, arrays),
        "train_losses": contents.train_losses,
        "resume": list(contents.resume),
        "tracker": _without_arrays(contents.tracker, arrays),
        "ended": dict(contents.ended),
        "callbacks": _without_arrays(dict(contents.callbacks), arrays),
    }
    parts = {INFO: json.dumps(info).encode(), MODEL: contents.model.SerializeToString(), STATE: safetensors.numpy.save(arrays)}

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in parts.items():
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)

    return write_atomically(path, write)


def load(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> Contents:
    """Read a checkpoint; `settings` replace those of the same name in it. CheckpointError for anything but a whole, known one."""
    name = os.fspath(_in_folder(Path(path)))
    try:
        with zipfile.ZipFile(name) as archive:
            for entry in (INFO, MODEL, STATE):
                if archive.getinfo(entry).compress_type != zipfile.ZIP_STORED or archive.getinfo(entry).flag_bits & 1:
                    raise CheckpointError(
                        f"{name!r} is not a checkpoint that onnxfit wrote: its entries are compressed or encrypted."
                    )
            info = json.loads(archive.read(INFO))
            if not isinstance(info, dict) or not isinstance(info.get("format"), int):
                raise CheckpointError(f"{name!r} is not an onnxfit checkpoint.")
            if info["format"] > FORMAT:
                raise CheckpointError(
                    f"{name!r} has format {info['format']}, from a newer onnxfit; this one reads up to {FORMAT}: upgrade."
                )
            model = read_model(archive.read(MODEL))
            arrays = safetensors.numpy.load(archive.read(STATE))
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {name!r}.") from None
    except (
        zipfile.BadZipFile,
        KeyError,
        EOFError,
        NotImplementedError,
        OSError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{name!r} is not a whole onnxfit checkpoint: {error}") from None
    except (ModelError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{name!r} is damaged: {error}") from None
    try:
        return Contents(
            model=model,
            settings={**{k: _decode_setting(k, v, name) for k, v in info["settings"].items() if k not in settings}, **settings},
            state={
                "weights": initializer_arrays(model, info["weights"]),
                "slots": _with_arrays(info["slots"], arrays),
                "counters": info["counters"],
            },
            history=_with_arrays(info["history"], arrays),
            train_losses=info["train_losses"],
            resume=info["resume"],
            tracker=_with_arrays(info["tracker"], arrays),
            ended=info["ended"],
            callbacks=_with_arrays(info["callbacks"], arrays),
        )
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name!r} is damaged: its {INFO} does not fit ({error}).") from None


def _in_folder(path: Path) -> Path:
    """The one checkpoint of a folder, or the path itself."""
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) != 1:
        there = f"has {len(found)} ({', '.join(p.name for p in found)}): name the file" if found else "has none"
        raise CheckpointError(f"A folder to load from has one checkpoint, called *{SUFFIX}; {str(path)!r} {there}.")
    return found[0]


def _encode_setting(value: Any) -> Any:
    """A constructor argument as JSON; what is not onnxfit's own leaves its name."""
    if isinstance(value, Mapping):
        return {str(k): _encode_setting(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_setting(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and type(value).__module__ in REGISTRIES:
        try:
            config = to_config(value)
            json.dumps(config)
            return {"onnxfit:class": config}
        except TypeError:
            pass  # a setting of it is a function
    return {"onnxfit:custom": getattr(value, "__name__", type(value).__name__)}


def _decode_setting(setting: str, value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_decode_setting(setting, v, path) for v in value]
    if isinstance(value, dict):
        if set(value) == {"onnxfit:custom"}:
            raise CheckpointError(
                f"{path!r} was trained with your own {setting} {value['onnxfit:custom']!r}, and a checkpoint holds no code: "
                f"Trainer.load(path, {setting}=...)."
            )
        if set(value) == {"onnxfit:class"}:
            try:
                return from_config(value["onnxfit:class"], *REGISTRIES)
            except (SettingError, TypeError) as error:
                raise CheckpointError(f"{path!r} asks for a {setting} that this onnxfit does not know: {error}") from None
        return {k: _decode_setting(setting, v, path) for k, v in value.items()}
    return value


def _without_arrays(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """JSON with every array moved into `arrays`."""
    if isinstance(value, np.ndarray):
        key = str(len(arrays))
        arrays[key] = np.ascontiguousarray(value).reshape(value.shape)
        return {"onnxfit:array": key}
    if isinstance(value, Mapping):
        return {str(k): _without_arrays(v, arrays) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_arrays(v, arrays) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        return (
            arrays[value["onnxfit:array"]]
            if set(value) == {"onnxfit:array"}
            else {k: _with_arrays(v, arrays) for k, v in value.items()}
        )
    return [_with_arrays(v, arrays) for v in value] if isinstance(value, list) else value

"""One file with a whole training state: a zip archive of `onnxfit.json`, `model.onnx`,
`model.onnx.data` and `state.safetensors`.

No pickle: a stranger's checkpoint runs no code. Written aside and renamed, so that it is whole or
not there; every entry carries zip's CRC-32. `model.onnx` is the trained model, its weights in
`model.onnx.data`: unpacked side by side, they are what any ONNX tool reads. Weights go from memory
to the disk one after another, so a checkpoint may be larger than the 2 GB that one message of ONNX
can hold.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import astuple, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import google.protobuf.message
import numpy as np
import onnx
import safetensors

from onnxfit.errors import CheckpointError, OnnxfitError, SettingError
from onnxfit.files import write_atomically
from onnxfit.graph.tensors import (
    attach,
    detached,
    initializer_arrays,
    read_safetensors,
    safetensors_size,
    tensors_size,
    write_safetensors,
    write_tensors,
)
from onnxfit.graph.training_form import to_inference_form
from onnxfit.graph.validity import require_valid
from onnxfit.registry import from_config, to_config
from onnxfit.training.position import PendingFit, Position

if TYPE_CHECKING:
    from onnxfit.training.base import BaseTrainer

FORMAT = 1
SUFFIX = ".onnxfit"  # of the one that lies beside the graphs of a trainer
INFO, MODEL, DATA, STATE = "onnxfit.json", "model.onnx", "model.onnx.data", "state.safetensors"
REGISTRIES = tuple(
    f"onnxfit.{name}" for name in ("losses", "penalties", "metrics", "optimizers", "schedules")
)
DAMAGE = (  # what readers raise at bytes that are not what they should be
    zipfile.BadZipFile, safetensors.SafetensorError, google.protobuf.message.DecodeError, struct.error,
    AttributeError, EOFError, LookupError, OSError, OverflowError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass
class Contents:
    """The contents of a checkpoint.

    `state` is that of `Trainer.get_state`, with the weights of `model`; `resume` are the fields of
    a `Position`; `tracker` is the `Tracker.state_dict` of the running epoch; `ended` is the event
    of which the loggers have not been told yet.
    """

    model: onnx.ModelProto
    settings: dict[str, Any]
    state: dict[str, dict[str, Any]]
    history: dict[str, Any]
    train_losses: list[float]
    resume: Sequence[Any]
    tracker: Mapping[str, Any]
    ended: Mapping[str, Any]
    callbacks: Mapping[str, dict[str, Any]]


def contents_of(trainer: BaseTrainer) -> Contents:
    """Return what a checkpoint of the trainer holds; the arrays are copies."""
    pending = _pending_fit(trainer)
    return Contents(
        model=trainer.model,
        settings=trainer.settings,
        state=trainer.get_state(),
        history=trainer.history.state_dict(),
        train_losses=trainer.train_losses_,
        resume=astuple(pending.position),
        tracker=deepcopy(pending.tracker),
        ended=pending.undelivered,
        callbacks=pending.callbacks,
    )


def _pending_fit(trainer: BaseTrainer) -> PendingFit:
    """Return the state of the running fit, or of one that was interrupted or loaded."""
    fit = trainer._fit_state
    if fit is None or not trainer._pending_fit.position.nothing_to_resume:
        return trainer._pending_fit
    undelivered: Mapping[str, Any] = {}
    if fit.current_event is not None:
        hook, index, logs = fit.current_event
        undelivered = {
            "hook": hook,
            "index": index,
            "logs": dict(logs),
            "stop": trainer.stop_training,
            "reason": trainer.stop_reason,
        }
    sums = trainer._tracker.state_dict() if fit.position.batch else {}
    callbacks = fit.callbacks.state_dict() if fit.running else fit.callback_states
    return PendingFit(fit.resume_position(), sums, undelivered, callbacks)


def restore(trainer: BaseTrainer, contents: Contents) -> None:
    """Give a trainer the state in a checkpoint."""
    trainer.set_state(contents.state)
    trainer.history.load_state_dict(contents.history)
    trainer.train_losses_ = [float(loss) for loss in contents.train_losses]
    position = Position(*contents.resume)
    # a fit that has ended leaves nothing to resume
    callbacks = {} if position.nothing_to_resume else dict(contents.callbacks)
    trainer._fit_state = None
    trainer._pending_fit = PendingFit(
        position, dict(contents.tracker), dict(contents.ended), callbacks
    )


@contextmanager
def matching_this_version(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise CheckpointError if a checkpoint that was read holds something that cannot be used."""
    try:
        yield
    except OnnxfitError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} does not fit this onnxfit, or is damaged: {error}"
        ) from error


class Snapshot:
    """A training state as it was at one moment, whatever has become of the training since; any
    thread may write it.
    """

    def __init__(self, contents: Contents) -> None:
        """The arrays are kept and not copied: nobody may write into them any more."""
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        model, self._tensors = detached(contents.model, contents.state["weights"], DATA)
        to_inference_form(model)
        self._model = model.SerializeToString()
        info = {
            "format": FORMAT,
            "settings": {name: _encode_setting(value) for name, value in contents.settings.items()},
            "weights": list(contents.state["weights"]),
            "slots": self._without_arrays(contents.state["slots"]),
            "counters": contents.state["counters"],
            "history": self._without_arrays(contents.history),
            "train_losses": contents.train_losses,
            "resume": list(contents.resume),
            "tracker": self._without_arrays(contents.tracker),
            "ended": dict(contents.ended),
            "callbacks": self._without_arrays(contents.callbacks),
        }
        self._info = json.dumps(info).encode()

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a checkpoint, atomically.

        CheckpointError where the folder or the disk refuses: nothing is changed then.
        """
        try:
            return write_atomically(path, self._write)
        except CheckpointError as error:
            raise CheckpointError(f"{error} Training is unharmed.") from error.__cause__

    def _write(self, file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:

            def entry(name: str, size: int) -> Any:
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.file_size = size  # above 2 GB, zip needs to know it before
                return archive.open(info, "w")

            for name, data in {INFO: self._info, MODEL: self._model}.items():
                with entry(name, len(data)) as inside:
                    inside.write(data)
            with entry(DATA, tensors_size(self._tensors)) as inside:
                write_tensors(inside, self._tensors)
            with entry(STATE, safetensors_size(self._arrays)) as inside:
                write_safetensors(inside, self._arrays)

    def _without_arrays(self, value: Any) -> Any:
        """JSON with every array moved aside."""
        if isinstance(value, np.ndarray):
            key = str(len(self._arrays))
            self._arrays[key] = value
            return {"onnxfit:array": key}
        if isinstance(value, Mapping):
            return {str(k): self._without_arrays(v) for k, v in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._without_arrays(v) for v in value]
        return value.item() if isinstance(value, np.generic) else value


def load(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> Contents:
    """Read a checkpoint;

    `settings` replace those of the same name in it. CheckpointError for anything but a whole, known
    one.
    """
    name = os.fspath(_in_folder(Path(path)))
    try:
        with zipfile.ZipFile(name) as archive:
            for entry in (INFO, MODEL, DATA, STATE):
                if (
                    archive.getinfo(entry).compress_type != zipfile.ZIP_STORED
                    or archive.getinfo(entry).flag_bits & 1
                ):
                    raise CheckpointError(
                        f"{name!r} is not a checkpoint that onnxfit wrote: its entries are"
                        " compressed or encrypted."
                    )
            info = json.loads(archive.read(INFO))
            if not isinstance(info, dict) or not isinstance(info.get("format"), int):
                raise CheckpointError(f"{name!r} is not an onnxfit checkpoint.")
            if info["format"] > FORMAT:
                raise CheckpointError(
                    f"{name!r} has format {info['format']}, from a newer onnxfit; this one reads up"
                    f" to {FORMAT}: upgrade."
                )
            model = onnx.ModelProto.FromString(archive.read(MODEL))
            with archive.open(DATA) as data:
                attach(model, data)
            require_valid(model, "its model")
            arrays = read_safetensors(archive.read(STATE))
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {name!r}.") from None
    except DAMAGE as error:
        raise CheckpointError(f"{name!r} is not a whole onnxfit checkpoint: {error}") from None
    try:
        return Contents(
            model=model,
            settings={
                **{
                    k: _decode_setting(k, v, name)
                    for k, v in info["settings"].items()
                    if k not in settings
                },
                **settings,
            },
            state={
                "weights": initializer_arrays(model, info["weights"]),
                "slots": _with_arrays(info["slots"], arrays),
                "counters": info["counters"],
            },
            history=_with_arrays(info["history"], arrays),
            train_losses=info["train_losses"],
            resume=_place(info["resume"]),
            tracker=_with_arrays(info["tracker"], arrays),
            ended=info["ended"],
            callbacks=_with_arrays(info["callbacks"], arrays),
        )
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name!r} is damaged: its {INFO} does not fit ({error}).") from None


def _place(resume: Any) -> list[float | None]:
    if not all(value is None or isinstance(value, (int, float)) for value in resume):
        raise TypeError(f"training cannot go on at {resume}")
    return list(resume)


def _in_folder(path: Path) -> Path:
    """The one checkpoint of a folder, or the path itself."""
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) != 1:
        there = (
            f"has {len(found)} ({', '.join(p.name for p in found)}): name the file"
            if found
            else "has none"
        )
        raise CheckpointError(
            f"A folder to load from has one checkpoint, called *{SUFFIX}; {str(path)!r} {there}."
        )
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
                f"{path!r} was trained with your own {setting} {value['onnxfit:custom']!r}, and a"
                f" checkpoint holds no code: Trainer.load(path, {setting}=...)."
            )
        if set(value) == {"onnxfit:class"}:
            try:
                return from_config(value["onnxfit:class"], *REGISTRIES)
            except (SettingError, TypeError) as error:
                raise CheckpointError(
                    f"{path!r} asks for a {setting} that this onnxfit does not know: {error}"
                ) from None
        return {k: _decode_setting(setting, v, path) for k, v in value.items()}
    return value


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        return (
            arrays[value["onnxfit:array"]]
            if set(value) == {"onnxfit:array"}
            else {k: _with_arrays(v, arrays) for k, v in value.items()}
        )
    return [_with_arrays(v, arrays) for v in value] if isinstance(value, list) else value

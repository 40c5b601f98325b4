"""One file with a whole training state: a zip archive of `onnxfit.json`, `model.onnx`,
`model.onnx.data` and `state.safetensors`.

No pickle: a stranger's checkpoint runs no code. Written aside and renamed, so that it is whole or
not there; every entry carries zip's CRC-32. `model.onnx` is the trained model, its weights in
`model.onnx.data`: unpacked side by side, they are what any ONNX tool reads. A model of integers
is there as it was given, and the state holds the weights: floats are trained in the place of the
integers. So is a model with adapters, which are trained beside its weights; or there are no
`model.onnx` and `model.onnx.data`, and `onnxfit.json` has the fingerprint of the model. Weights go
from memory to the disk one after another, so a checkpoint may be larger than the 2 GB that one
message of ONNX can hold.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir
import safetensors

from onnxfit.adapters.adapted import with_constants
from onnxfit.callbacks.history import History
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import CheckpointError
from onnxfit.files import (
    CHECKPOINT_ENTRY,
    FIGURE,
    LIST,
    MAPPING,
    TEXT,
    list_of,
    mapping_of,
    optional,
    require_path,
    require_types,
    write_atomically,
)
from onnxfit.graph.tensors import (
    Array,
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
from onnxfit.step.tracker import SUM_TYPES
from onnxfit.training.contents import Contents
from onnxfit.training.position import EVENT_TYPES, POSITION_TYPES
from onnxfit.training.ranks import RANKS
from onnxfit.training.setting_values import decode_setting, encode_setting
from onnxfit.training.state import COUNTER_TYPES

# The newest format; a checkpoint is written in the oldest that can hold it: 1 has all weights in
# the model, 2 has them in the state, and 3 has no model.
FORMAT = 3
MAX_MESSAGE_BYTES = 1 << 26  # of a checkpoint that rank 0 sends to the others
SUFFIX = ".onnxfit"  # of the one that lies beside the graphs of a trainer
INFO, MODEL, DATA, STATE = CHECKPOINT_ENTRY, "model.onnx", "model.onnx.data", "state.safetensors"
DAMAGE = (  # the errors of readers that meet damaged bytes
    zipfile.BadZipFile, safetensors.SafetensorError, google.protobuf.message.DecodeError,
    struct.error, AttributeError, EOFError, LookupError, OSError, OverflowError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


# of what `Snapshot` writes, besides the settings and the model
FIELD_TYPES = {
    "settings": MAPPING,
    "weights": list_of(TEXT),
    "masters": MAPPING,
    "base": optional(TEXT),
    "constants": mapping_of(LIST),
    "slots": MAPPING,
    "counters": MAPPING,
    "history": MAPPING,
    "train_losses": list_of(FIGURE),
    "resume": LIST,
    "tracker": MAPPING,
    "ended": MAPPING,
    "callbacks": mapping_of(MAPPING),
}


class Snapshot:
    """A training state as it was at one moment; training may go on, and any thread may write it."""

    def __init__(self, contents: Contents, *, writes: bool = True) -> None:
        """`contents`: its arrays are kept without a copy, so that nobody may write into them.

        `writes`: False for a process that leaves the writing to another one.
        """
        self._writes = writes
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._model: bytes | None = None
        own: Mapping[str, np.ndarray[Any, Any]] = {}
        masters = contents.state["weights"]
        if contents.model is not None:
            own, masters = _divided(contents.model, masters)
            model, self._tensors = detached(contents.model, own, DATA)
            to_inference_form(model)
            self._model = model.SerializeToString()
        info = {
            "format": 3 if contents.model is None else 2 if masters else 1,
            "base": contents.base,
            "settings": {name: encode_setting(value) for name, value in contents.settings.items()},
            "weights": list(own),
            "masters": self._without_arrays(masters),
            "constants": self._without_arrays(contents.constants),
            "slots": self._without_arrays(contents.state["slots"]),
            "counters": contents.state["counters"],
            "history": self._without_arrays(contents.history),
            "train_losses": contents.train_losses,
            "resume": list(contents.resume),
            "tracker": self._without_arrays(contents.tracker),
            "ended": dict(contents.undelivered),
            "callbacks": self._without_arrays(contents.callbacks),
        }
        self._info = json.dumps(info).encode()

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint to `path`, atomically, and return the path.

        CheckpointError if the folder or the disk refuses; nothing is changed then.
        """
        if not self._writes:
            return Path(path)
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

            with entry(INFO, len(self._info)) as inside:
                inside.write(self._info)
            if self._model is not None:
                with entry(MODEL, len(self._model)) as inside:
                    inside.write(self._model)
                with entry(DATA, tensors_size(self._tensors)) as inside:
                    write_tensors(inside, self._tensors)
            with entry(STATE, safetensors_size(self._arrays)) as inside:
                write_safetensors(inside, self._arrays)

    def _without_arrays(self, value: Any) -> Any:
        """Return JSON, in which keys stand for the arrays."""
        if isinstance(value, np.ndarray):
            key = str(len(self._arrays))
            self._arrays[key] = value
            return {"onnxfit:array": key}
        if isinstance(value, Mapping):
            return {str(k): self._without_arrays(v) for k, v in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._without_arrays(v) for v in value]
        return value.item() if isinstance(value, np.generic) else value


def load(
    path: str | os.PathLike[str], settings: Mapping[str, Any], world: World = ALONE
) -> Contents:
    """Return what the checkpoint `path` holds; `settings` replace those of the same names in it.

    `path` may be a folder with one checkpoint. Raises CheckpointError for anything but a whole
    checkpoint of a known format.

    - `world`: the ranks, all of which call this. Rank 0 reads the file, and the others get its
      bytes, so that they need no file system in common.
    """
    require_path(path)
    file = None
    if world.size > 1:
        name, file = _received(path, world)
    else:
        name = os.fspath(_in_folder(Path(path)))
    try:
        with zipfile.ZipFile(file or name) as archive:
            info, model, tensors, arrays = _read_archive(archive, name)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {name!r}.") from None
    except DAMAGE as error:
        if name.endswith(".onnx"):
            raise CheckpointError(
                f"{name!r} is an ONNX model, and a checkpoint is what save wrote. Train the model"
                f" anew: Trainer({name!r}, loss=..., optimizer=...)."
            ) from None
        raise CheckpointError(f"{name!r} is not a whole onnxfit checkpoint: {error}") from None
    try:
        _check_description(info, name)
        saved = {
            key: decode_setting(key, value, name)
            for key, value in info["settings"].items()
            if key not in settings
        }
        state = {
            "weights": {
                **({} if model is None else initializer_arrays(model, info["weights"])),
                **_with_arrays(info["masters"], arrays),
            },
            "slots": _with_arrays(info["slots"], arrays),
            "counters": info["counters"],
        }
        constants = _constants(info, arrays, name)
        settings = {**saved, **settings}
        if constants:
            settings["adapters"] = with_constants(settings.get("adapters"), constants)
        return Contents(
            model=model,
            settings=settings,
            state=state,
            history=_with_arrays(info["history"], arrays),
            train_losses=info["train_losses"],
            resume=info["resume"],
            tracker=_with_arrays(info["tracker"], arrays),
            undelivered=info["ended"],
            callbacks=_with_arrays(info["callbacks"], arrays),
            constants=constants,
            base=info["base"],
            tensors=tensors,
        )
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name!r} is damaged: its {INFO} does not fit ({error}).") from None


def _constants(
    info: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]], name: str
) -> dict[str, tuple[np.ndarray[Any, Any], ...]]:
    """Return the `constants` of a checkpoint; CheckpointError unless they are pairs of floats."""
    constants: dict[str, tuple[np.ndarray[Any, Any], ...]] = {}
    for module, entries in info["constants"].items():
        pair = tuple(_with_arrays(entry, arrays) for entry in entries)
        if len(pair) != 2 or not all(
            isinstance(a, np.ndarray) and a.dtype.kind == "f" for a in pair
        ):
            raise CheckpointError(f"{name!r} is damaged: its adapter of {module!r} is no pair.")
        constants[module] = pair
    return constants


def _received(path: str | os.PathLike[str], world: World) -> tuple[str, BinaryIO]:
    """Return the name and the bytes of a checkpoint that rank 0 reads; all raise its errors."""
    name, content, problem = os.fspath(path), b"", None
    parts = io.BytesIO()
    if world.is_main:
        try:
            name = os.fspath(_in_folder(Path(path)))
            content = Path(name).read_bytes()
        except FileNotFoundError:
            problem = f"There is no checkpoint {name!r}."
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{name!r} is not a whole onnxfit checkpoint: {error}"
    name, size, problem = world.from_main("restore or load", [name, len(content), problem])
    if problem is not None:
        raise CheckpointError(problem)
    for start in range(0, size, MAX_MESSAGE_BYTES):
        part = np.frombuffer(content[start : start + MAX_MESSAGE_BYTES], np.uint8)
        parts.write(world.from_main("the bytes of a checkpoint", part).tobytes())
    return name, parts


def _read_archive(
    archive: zipfile.ZipFile, name: str
) -> tuple[dict[str, Any], onnx.ModelProto | None, list[Array], dict[str, Array]]:
    """Return a checkpoint's description, its model and its arrays, each of them checked."""
    has_model = MODEL in archive.namelist()
    entries = (INFO, MODEL, DATA, STATE) if has_model else (INFO, STATE)
    for entry in map(archive.getinfo, entries):
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(
                f"{name!r} is not a checkpoint that onnxfit wrote: its entries are compressed or"
                " encrypted."
            )
    info = json.loads(archive.read(INFO))
    if not isinstance(info, dict) or not isinstance(info.get("format"), int):
        raise CheckpointError(f"{name!r} is not an onnxfit checkpoint.")
    if info["format"] > FORMAT:
        raise CheckpointError(
            f"{name!r} has format {info['format']}, from a newer onnxfit; this one reads up to"
            f" {FORMAT}: upgrade."
        )
    if has_model == (info.get("base") is not None):
        raise CheckpointError(f"{name!r} is damaged: it has a model or the fingerprint of one.")
    model, tensors = None, []
    if has_model:
        model = onnx.ModelProto.FromString(archive.read(MODEL))
        with archive.open(DATA) as data:
            tensors = attach(model, data)
        require_valid(model, "its model")
    return info, model, tensors, read_safetensors(archive.read(STATE))


def _check_description(info: dict[str, Any], name: str) -> None:
    """Raise CheckpointError where a field has a value that `Snapshot` never writes."""
    info.setdefault("masters", {})  # format 1 has none
    info.setdefault("constants", {})  # nor has format 2 of earlier versions
    info.setdefault("base", None)
    require_types(repr(name), info, FIELD_TYPES)
    if "distribute" in info["settings"]:  # a file does not decide which processes train
        raise CheckpointError(f"{name!r} is not a checkpoint that onnxfit wrote: it distributes.")
    position = info["resume"]
    names = list(POSITION_TYPES)[: len(position)]
    if len(position) > len(names):
        raise CheckpointError(f"{name!r} has a resume of {len(position)} fields, from {names}.")
    types = {field: POSITION_TYPES[field] for field in names}
    require_types(f"The resume of {name!r}", dict(zip(names, position)), types)
    require_types(f"The counters of {name!r}", info["counters"], COUNTER_TYPES)
    if info["ended"]:
        require_types(f"The ended of {name!r}", info["ended"], EVENT_TYPES)
    if info["tracker"]:
        place = f"The tracker of {name!r}"
        require_types(place, info["tracker"], SUM_TYPES)
        ranks = {RANKS: info["tracker"].get(RANKS, [])}  # of one process there are none
        require_types(place, ranks, {RANKS: list_of(MAPPING)})
        for number, sums in enumerate(ranks[RANKS]):
            require_types(f"{place}, rank {number},", sums, SUM_TYPES)
    require_types(f"The history of {name!r}", info["history"], History.remembered)


def _divided(
    model: onnx.ModelProto, weights: Mapping[str, np.ndarray[Any, Any]]
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Return the weights that the model of the checkpoint has, and those that the state has.

    The model has all of them, or stays as it was given: where floats are trained in the place of
    its integers, or adapters beside its weights.
    """
    types = {t.name: ir.DataType(t.data_type) for t in model.graph.initializer}
    if all(types.get(n) == ir.DataType.from_numpy(a.dtype) for n, a in weights.items()):
        return dict(weights), {}
    # All go to the state, also those that the file has: the bounds of learned scales follow from
    # the scales of the file as it was given.
    return {}, dict(weights)


def _in_folder(path: Path) -> Path:
    """Return the one checkpoint of a folder, or the path itself."""
    if not path.is_dir():
        return path
    checkpoints = sorted(path.glob(f"*{SUFFIX}"))
    if len(checkpoints) == 1:
        return checkpoints[0]
    content = "has none"
    if checkpoints:
        names = ", ".join(checkpoint.name for checkpoint in checkpoints)
        content = f"has {len(checkpoints)} ({names}): name the file"
    raise CheckpointError(
        f"A folder to load from has one checkpoint, called *{SUFFIX}; {str(path)!r} {content}."
    )


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Put arrays in the place of the keys that `Snapshot` left for them."""
    if isinstance(value, list):
        return [_with_arrays(entry, arrays) for entry in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"onnxfit:array"}:
        return arrays[value["onnxfit:array"]]
    return {key: _with_arrays(entry, arrays) for key, entry in value.items()}

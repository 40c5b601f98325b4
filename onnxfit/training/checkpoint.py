"""One file with a whole training state: a zip archive of `onnxfit.json`, `model.onnx`,
`model.onnx.data` and `state.safetensors`.

The file contains no pickle, so an untrusted checkpoint runs no code. It is written to a temporary
file and renamed, so that it is either complete or absent. Every entry has zip's CRC-32.

`model.onnx` is the trained model, with its weights in `model.onnx.data`. Unpacked into one folder,
any ONNX tool can read them. A quantized model is stored as it was given, and the state holds the
floats that are trained in place of the integers. A model with adapters is stored as it was given,
too; or, with adapters_only=True, `onnxfit.json` has only a fingerprint of the model. Weights are
written one after another, so a checkpoint may be larger than the 2 GB limit of an ONNX message.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir
import safetensors

from onnxfit.callbacks.history import History
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import CheckpointError, listed_names
from onnxfit.files import (
    CHECKPOINT_ENTRY,
    FIGURE,
    LIST,
    MAPPING,
    TEXT,
    list_of,
    mapping_of,
    optional,
    read_regular_file,
    require_checkpoint_name,
    require_path,
    require_regular_file,
    require_types,
    write_atomically,
)
from onnxfit.graph import names
from onnxfit.graph.model import OnnxModel
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
from onnxfit.load.training_form import to_inference_form
from onnxfit.load.validity import require_valid
from onnxfit.step.tracker import SUM_TYPES
from onnxfit.trainable.adapters.adapted import with_constants
from onnxfit.training.contents import CheckpointContents
from onnxfit.training.position import EVENT_TYPES, KEYS_OF_EVENT, POSITION_TYPES
from onnxfit.training.ranks import RANKS
from onnxfit.training.setting_values import decode_setting, encode_setting
from onnxfit.training.state import COUNTER_TYPES

# The newest format. A checkpoint is written in the oldest format that can hold it: format 1 has all
# weights in the model, format 2 has them in the state, and format 3 has no model.
FORMAT = 3
MAX_MESSAGE_BYTES = 1 << 26  # of a checkpoint that rank 0 sends to the others
SUFFIX = ".onnxfit"  # suffix of the checkpoint next to the graphs of a trainer
INFO, MODEL, DATA, STATE = CHECKPOINT_ENTRY, "model.onnx", "model.onnx.data", "state.safetensors"
DAMAGE = (  # the errors that readers raise for damaged bytes
    zipfile.BadZipFile, safetensors.SafetensorError, google.protobuf.message.DecodeError,
    struct.error, AttributeError, EOFError, LookupError, OSError, OverflowError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


# Types of the fields that `Snapshot` writes, except the settings and the model.
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
    "lineage": optional(MAPPING),
}


class Snapshot:
    """A copy of a training state. Any thread may write it while training continues."""

    def __init__(
        self,
        contents: CheckpointContents,
        *,
        writes: bool = True,
        unchanged: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`contents`: its arrays are not copied, so nobody may modify them afterwards.

        `writes`: False for a process that writes nothing because another process does.
        `unchanged`: a context in which the arrays have their values, or an error is raised.
        """
        self._writes = writes
        self._unchanged = unchanged
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._model: bytes | None = None
        own: Mapping[str, np.ndarray[Any, Any]] = {}
        masters = contents.state["weights"]
        if contents.model is not None:
            own, masters = _divided(contents.model.proto, masters)
            model, self._tensors = detached(contents.model.proto, own, DATA)
            to_inference_form(model, contents.settings["batch_norm"])
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
            "ended": dict(contents.missed_event),
            "callbacks": self._without_arrays(contents.callbacks),
            "lineage": contents.lineage,
        }
        self._info = json.dumps(info).encode()

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint to `path`, atomically, and return the path.

        CheckpointError: the file cannot be written. An existing file is then unchanged.
        SettingError: the name of the file has the suffix of another format, such as `.keras`, or
        the state has changed since a snapshot with `copy=False`.
        """
        require_checkpoint_name(path)
        if not self._writes:
            return Path(path)
        try:
            with self._unchanged():
                return write_atomically(path, self._write)
        except CheckpointError as error:
            raise CheckpointError(f"{error} The training state is unchanged.") from error.__cause__

    def _write(self, file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:

            def entry(name: str, size: int) -> Any:
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.file_size = size  # above 2 GB, zip needs the size in advance
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
) -> CheckpointContents:
    """Return the contents of the checkpoint `path`, with some of its settings replaced.

    `path` may be a folder with one checkpoint. CheckpointError: the file is not a complete
    checkpoint of a known format.

    - `settings`: settings that replace settings of the same names in the checkpoint.
    - `world`: the ranks, all of which call this. Rank 0 reads the file and sends its bytes to the
      others, so that they need no common file system.
    """
    require_path(path)
    file = None
    if world.size > 1:
        name, file = _received(path, world)
    else:
        name = os.fspath(_in_folder(Path(path)))
    try:
        if file is None:
            require_regular_file(Path(name))
        with zipfile.ZipFile(file or name) as archive:
            info, model, arrays = _read_archive(archive, name)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"The checkpoint {name!r} does not exist.") from None
    except DAMAGE as error:
        if name.endswith(".onnx"):
            raise CheckpointError(
                f"{name!r} is an ONNX model. Expected a checkpoint, which Trainer.save writes. To"
                f" train the model, use Trainer({name!r}, loss=..., optimizer=...)."
            ) from None
        raise CheckpointError(f"{name!r} is not a complete onnxfit checkpoint: {error}") from None
    try:
        _check_description(info, name)
        saved = {
            key: decode_setting(key, value, name)
            for key, value in info["settings"].items()
            if key not in settings
        }
        state = {
            "weights": {
                **({} if model is None else initializer_arrays(model.proto, info["weights"])),
                **_with_arrays(info["masters"], arrays),
            },
            "slots": _with_arrays(info["slots"], arrays),
            "counters": info["counters"],
        }
        constants = _constants(info, arrays, name)
        settings = {**saved, **settings}
        if constants:
            settings["adapters"] = with_constants(settings.get("adapters"), constants)
        return CheckpointContents(
            model=model,
            settings=settings,
            state=state,
            history=_with_arrays(info["history"], arrays),
            train_losses=info["train_losses"],
            resume=info["resume"],
            tracker=_with_arrays(info["tracker"], arrays),
            missed_event=info["ended"],
            callbacks=_with_arrays(info["callbacks"], arrays),
            constants=constants,
            base=info["base"],
            lineage=info["lineage"],
            replaced={key: value for key, value in info["settings"].items() if key not in saved},
        )
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name!r} is damaged: its {INFO} is not valid ({error}).") from None


def _constants(
    info: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]], name: str
) -> dict[str, tuple[np.ndarray[Any, Any], ...]]:
    """Return the `constants` of a checkpoint. CheckpointError: they are not pairs of floats."""
    constants: dict[str, tuple[np.ndarray[Any, Any], ...]] = {}
    for module, entries in info["constants"].items():
        pair = tuple(_with_arrays(entry, arrays) for entry in entries)
        if len(pair) != 2 or not all(
            isinstance(a, np.ndarray) and a.dtype.kind == "f" for a in pair
        ):
            raise CheckpointError(
                f"{name!r} is damaged: its adapter of {module!r} is not a pair of matrices."
            )
        constants[module] = pair
    return constants


def _received(path: str | os.PathLike[str], world: World) -> tuple[str, BinaryIO]:
    """Return the name and the bytes of a checkpoint that rank 0 reads. All raise its errors."""
    name, content, problem = os.fspath(path), b"", None
    parts = io.BytesIO()
    if world.is_main:
        try:
            name = os.fspath(_in_folder(Path(path)))
            content = read_regular_file(Path(name))
        except FileNotFoundError:
            problem = f"The checkpoint {name!r} does not exist."
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{name!r} is not a complete onnxfit checkpoint: {error}"
    name, size, problem = world.broadcast("restore or load", [name, len(content), problem])
    if problem is not None:
        raise CheckpointError(problem)
    for start in range(0, size, MAX_MESSAGE_BYTES):
        part = np.frombuffer(content[start : start + MAX_MESSAGE_BYTES], np.uint8)
        parts.write(world.broadcast("the bytes of a checkpoint", part).tobytes())
    return name, parts


def _read_archive(
    archive: zipfile.ZipFile, name: str
) -> tuple[dict[str, Any], OnnxModel | None, dict[str, Array]]:
    """Return a checkpoint's description, its model and its arrays, all checked."""
    has_model = MODEL in archive.namelist()
    entries = (INFO, MODEL, DATA, STATE) if has_model else (INFO, STATE)
    for entry in map(archive.getinfo, entries):
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(
                f"{name!r} was not written by onnxfit: its entries are compressed or encrypted."
            )
    info = json.loads(archive.read(INFO))
    if not isinstance(info, dict) or not isinstance(info.get("format"), int):
        raise CheckpointError(f"{name!r} is not an onnxfit checkpoint.")
    if info["format"] > FORMAT:
        raise CheckpointError(
            f"{name!r} has format {info['format']}, from a newer version of onnxfit. This version"
            f" reads formats up to {FORMAT}. Upgrade onnxfit."
        )
    if has_model == (info.get("base") is not None):
        raise CheckpointError(
            f"{name!r} is damaged: expected either a model or the fingerprint of a model."
        )
    model: OnnxModel | None = None
    if has_model:
        proto = onnx.ModelProto.FromString(archive.read(MODEL))
        with archive.open(DATA) as data:
            model = OnnxModel(proto, attach(proto, data))
        require_valid(proto, "its model")
    return info, model, read_safetensors(archive.read(STATE))


def _check_description(info: dict[str, Any], name: str) -> None:
    """Raise CheckpointError if a field has a value that `Snapshot` never writes."""
    info.setdefault("masters", {})  # absent in format 1
    info.setdefault("constants", {})  # absent in format 2 of earlier versions
    info.setdefault("base", None)
    info.setdefault("lineage", None)  # absent in earlier versions
    require_types(repr(name), info, FIELD_TYPES)
    if "distribute" in info["settings"]:  # a file does not decide which processes train
        raise CheckpointError(
            f"{name!r} was not written by onnxfit: its settings contain 'distribute'."
        )
    position = info["resume"]
    names = list(POSITION_TYPES)[: len(position)]
    if len(position) > len(names):
        raise CheckpointError(
            f"{name!r} is damaged: its resume position has {len(position)} fields, expected"
            f" {listed_names(names)}."
        )
    types = {field: POSITION_TYPES[field] for field in names}
    require_types(f"The resume position in {name!r}", dict(zip(names, position)), types)
    require_types(f"The counters of {name!r}", info["counters"], COUNTER_TYPES)
    if info["ended"]:
        keys = {key: list_of(TEXT) for key in KEYS_OF_EVENT if key in info["ended"]}
        require_types(f"The ended of {name!r}", info["ended"], {**EVENT_TYPES, **keys})
    if info["tracker"]:
        place = f"The tracker of {name!r}"
        require_types(place, info["tracker"], SUM_TYPES)
        ranks = {RANKS: info["tracker"].get(RANKS, [])}  # absent for a single process
        require_types(place, ranks, {RANKS: list_of(MAPPING)})
        for number, sums in enumerate(ranks[RANKS]):
            require_types(f"{place}, rank {number},", sums, SUM_TYPES)
    require_types(f"The history of {name!r}", info["history"], History.state_attributes)


def _divided(
    model: onnx.ModelProto, weights: Mapping[str, np.ndarray[Any, Any]]
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Return the weights stored in the checkpoint's model, and the weights stored in its state.

    Either the model has all weights except those of losses, or it stays as it was given: if floats
    are trained in place of its integers, or adapters in addition to its weights.
    """
    types = {t.name: ir.DataType(t.data_type) for t in model.graph.initializer}
    of_loss = {n: a for n, a in weights.items() if names.is_loss_weight(n) and n not in types}
    own = {name: array for name, array in weights.items() if name not in of_loss}
    if all(types.get(n) == ir.DataType.from_numpy(a.dtype) for n, a in own.items()):
        return own, of_loss
    # All weights go to the state, even if the model has them: the bounds of learned scales depend
    # on the scales of the original file.
    return {}, dict(weights)


def _in_folder(path: Path) -> Path:
    """Return the only checkpoint in a folder, or the path itself."""
    if not path.is_dir():
        return path
    checkpoints = sorted(path.glob(f"*{SUFFIX}"))
    if len(checkpoints) == 1:
        return checkpoints[0]
    content = "has none"
    if checkpoints:
        names = ", ".join(checkpoint.name for checkpoint in checkpoints)
        content = f"has {len(checkpoints)} ({names}). Pass the file"
    raise CheckpointError(
        f"A folder to load must contain exactly one checkpoint, called *{SUFFIX}, but"
        f" {str(path)!r} {content}."
    )


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Replace the keys that `Snapshot` wrote for arrays by the arrays."""
    if isinstance(value, list):
        return [_with_arrays(entry, arrays) for entry in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"onnxfit:array"}:
        return arrays[value["onnxfit:array"]]
    return {key: _with_arrays(entry, arrays) for key, entry in value.items()}

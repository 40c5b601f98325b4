"""Atomic writing of files, and types of the values in a file that was read."""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import reprlib
import shutil
import stat
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxfit.checks import is_float
from onnxfit.errors import CheckpointError, OnnxfitError, SettingError, listed_names

TEMPORARY_NAME = ".onnxfit.{}.part"
CHECKPOINT_ENTRY = "onnxfit.json"  # in the zip archive of a checkpoint
# suffix -> the format that a file of this name has in other programs
FORMATS = {
    ".onnx": "an ONNX model",
    ".ort": "a model in onnxruntime's own format",
    ".onnx_adapter": "an adapter of onnxruntime",
    **dict.fromkeys((".keras", ".h5", ".hdf5"), "a Keras file"),
    **dict.fromkeys((".pt", ".pth", ".pt2"), "a PyTorch file"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "a pickle"),
    **dict.fromkeys((".npy", ".npz"), "a NumPy file"),
    **dict.fromkeys((".pb", ".tflite"), "a TensorFlow file"),
    ".safetensors": "a safetensors file",
    ".gguf": "a GGUF file",
    ".msgpack": "a Flax file",
}
MAX_COUNT = 2**62  # leaves room in int64 for adding to a count


# ---------------------------------------------------------------------- reading


def require_regular_file(path: Path) -> None:
    """Raise OSError for a pipe or a device, whose reading may never end, or for a missing file."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a regular file")


def read_regular_file(path: Path) -> bytes:
    """Return the contents of a file. OSError: it cannot be read, or is a pipe or a device."""
    require_regular_file(path)
    return path.read_bytes()


# ---------------------------------------------------------------------- writing


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[BinaryIO], object],
    replaced: Path | None = None,
) -> Path:
    """Write a file atomically: at any time, either the old or the complete new file exists.

    - `path`: the file. Missing parent folders are created; a link stays a link.
    - `write`: called with a temporary file in the same folder, open for binary writing. The
      temporary file is then flushed to the disk and renamed.
    - `replaced`: a file of another name that gives its permissions to the new one; None for the
      old file.

    Return `path`, as a Path. After that, the file and its name survive a power cut. A replaced file
    keeps its permissions, and a new file follows the umask. CheckpointError: the file cannot be
    written. Other exceptions of `write` are raised unchanged. After an exception, no temporary file
    remains, and an old file is unchanged; only if the last flush fails, that of the folder, the new
    file is in its place. The first call for a folder deletes the temporary files that killed
    processes left there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_atomically(f"{folder}/new/a.txt", lambda file: file.write(b"a"))
    ...     path.read_bytes()
    b'a'
    """
    require_path(path)
    path = Path(path)
    try:
        target = Path(os.path.realpath(path))  # so that a link stays a link
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if target.exists():
            require_regular_file(target)
        make_folder(target.parent)
        _remove_leftovers_once(target.parent)
        temporary = target.with_name(temporary_name())
        try:
            with open(temporary, "xb", opener=_opener(replaced or target)) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            _delete_temporary(temporary)
            raise
        finally:
            writing.discard(temporary.name)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"The file {os.fspath(path)!r} cannot be written: {error.strerror or error}."
        ) from error
    return path


def kind_of_file(file: BinaryIO) -> str | None:
    """Return the kind of a file if it is a checkpoint or a model of another library, else None.

    - `file`: an open file; its position changes.

    >>> import io
    >>> kind_of_file(io.BytesIO(b"\\x89HDF..."))
    'HDF5'
    """
    start = file.read(4)
    if start == b"\x89HDF":
        return "HDF5"
    if start[:1] == b"\x80":
        return "pickle"
    if start != b"PK\x03\x04":
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return "zip"
    if CHECKPOINT_ENTRY in names:
        return "checkpoint"
    if any(name.endswith("data.pkl") for name in names):
        return "PyTorch"
    return "Keras" if "config.json" in names else "zip"


def append_whole(file: BinaryIO, data: bytes) -> None:
    """Append all of `data` to a file or, after an error, nothing.

    - `file`: a file that was opened for unbuffered binary writing ("ab" or "xb", buffering=0).
    - `data`: the bytes.

    An OSError of the disk is raised unchanged.
    """
    size = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:
        file.truncate(size)
        file.seek(size)
        raise


def require_path(path: object) -> None:
    """Raise SettingError unless `path` is a string or PathLike that can name a file."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise SettingError(f"The path of a file must be a string or a Path, got {path!r}.")
    if "\0" in text:
        raise SettingError(f"The path of a file must not have a null character, got {text!r}.")


def require_suffix(path: str | os.PathLike[str], written: str, own: str, instead: str = "") -> None:
    """Raise SettingError if a file to write has the suffix of another format in its name.

    - `written`: the contents of the file, for the message.
    - `own`: the suffix of their format.
    - `instead`: a sentence for the message that says what else the user may want.
    """
    require_path(path)
    suffix = Path(path).suffix.lower()
    if suffix == own or suffix not in FORMATS:
        return
    raise SettingError(
        f"{os.fspath(path)!r} would contain {written}, but {suffix} is the suffix of"
        f" {FORMATS[suffix]}. Name the file {Path(path).with_suffix(own).name!r}.{instead}"
    )


def require_checkpoint_name(path: str | os.PathLike[str]) -> None:
    """Raise SettingError if a checkpoint to write has the suffix of another format in its name."""
    require_path(path)
    model = f"{Path(path).stem}.onnx"
    instead = f" The trained model is written by trainer.export({model!r})."
    require_suffix(path, "a checkpoint of onnxfit", ".ckpt", instead)


def temporary_name() -> str:
    """Return a name that tells which process writes the file."""
    name = TEMPORARY_NAME.format(f"{_host()}-{os.getpid()}.{uuid.uuid4().hex}")
    writing.add(name)
    return name


def _host() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"


writing: set[str] = set()  # the temporary names of this process
_cleaned: set[Path] = set()  # folders whose leftovers this process has deleted


def _remove_leftovers_once(folder: Path) -> None:
    """Delete the leftovers in a folder before the first file that this process writes there.

    A folder may get a file for every batch, and listing it each time would take ever longer.
    """
    if folder not in _cleaned:
        remove_leftovers(folder)
        _cleaned.add(folder)


def _delete_temporary(path: Path) -> None:
    """Delete a temporary file, now or before the next file is written to its folder."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        _cleaned.discard(path.parent)


def remove_leftovers(folder: str | os.PathLike[str], seconds: float = 3600) -> None:
    """Delete the temporary files and folders that killed processes left in a folder.

    - `folder`: the folder, without its subfolders.
    - `seconds`: the minimum time since the last write if the process may still be running, because
      it has another host or cannot be asked for.
    """
    for path in Path(folder).glob(TEMPORARY_NAME.format("*")):
        try:
            if _is_left(path.name) or time.time() - path.stat().st_mtime >= seconds:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        except OSError:
            pass  # another process deleted it, or this process has no permission


def _is_left(name: str) -> bool:
    """Return whether the process that wrote a temporary file has certainly ended."""
    found = re.fullmatch(r"\.onnxfit\.([0-9a-f]{8})-(\d+)\.[0-9a-f]{32}\.part", name)
    if os.name != "posix" or found is None or found[1] != _host():
        return False
    if int(found[2]) == os.getpid():  # in a container, perhaps that of an earlier process
        return name not in writing
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # a process of another user
        return False
    return False


def _opener(target: Path) -> Callable[[str, int], int] | None:
    """Return an opener that creates a file with the permissions of `target`, if it exists."""
    if not target.is_file():
        return None
    permissions = target.stat().st_mode & 0o777

    def create(path: str, flags: int) -> int:
        handle = os.open(path, flags, permissions)
        os.chmod(path, permissions)  # the umask may have removed some permissions
        return handle

    return create


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, however many they are.

    NotADirectoryError: one of them is a file.
    """
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{str(folder)!r} is a file, not a folder")
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Systems other than POSIX do so automatically."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder may be written to without permission to read it
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(handle)


def json_float(value: float) -> float | str:
    """Return a float as a JSON value: NaN and infinities as strings that `float` reads.

    >>> json_float(0.5), json_float(float("-inf"))
    (0.5, '-Infinity')
    """
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


# ---------------------------------------------------------------------- types of values


@dataclass(frozen=True)
class ValueType:
    """A type of the values in a file.

    - `description`: the type's name in an error message.
    - `accepts`: a function that tells whether any value is of this type.
    """

    description: str
    accepts: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


COUNT = ValueType("a whole number from 0 to 2**62", _is_count)
POSITIVE_COUNT = ValueType(
    "a whole number from 1 to 2**62", lambda value: _is_count(value) and value > 0
)
STEP = ValueType(
    "a number of steps, or -1",
    lambda value: _is_count(value) or (type(value) is int and value == -1),
)
NUMBER = ValueType("a number", is_float)
FIGURE = ValueType("a number or NaN", lambda value: is_float(value) or _is_nan(value))
RATE = ValueType("a finite number >= 0", lambda value: is_float(value) and 0 <= value < math.inf)
FLAG = ValueType("true or false", lambda value: isinstance(value, bool))
TEXT = ValueType("text", lambda value: isinstance(value, str))
ARRAY = ValueType("an array of numbers", lambda value: isinstance(value, np.ndarray))
ANYTHING = ValueType("any value", lambda value: True)
LIST = ValueType("a list", lambda value: isinstance(value, list))
MAPPING = ValueType("an object", lambda value: isinstance(value, Mapping))


def optional(kind: ValueType) -> ValueType:
    """Return the type of None and of the values of another type."""
    return ValueType(
        f"{kind.description} or null", lambda value: value is None or kind.accepts(value)
    )


def list_of(kind: ValueType, length: int | None = None) -> ValueType:
    """Return the type of lists of another type's values, of any length or of `length`."""

    def accepts(value: Any) -> bool:
        is_list = isinstance(value, (list, tuple)) and len(value) == (length or len(value))
        return is_list and all(map(kind.accepts, value))

    return ValueType(f"a list in which every entry is {kind.description}", accepts)


def pair_of(first: ValueType, second: ValueType) -> ValueType:
    """Return the type of lists of two values, each of its own type."""

    def accepts(value: Any) -> bool:
        is_pair = isinstance(value, (list, tuple)) and len(value) == 2
        return is_pair and first.accepts(value[0]) and second.accepts(value[1])

    return ValueType(f"a list of {first.description} and {second.description}", accepts)


def mapping_of(kind: ValueType) -> ValueType:
    """Return the type of objects (dicts) that map text to another type's values."""

    def accepts(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and kind.accepts(entry) for key, entry in value.items()
        )

    return ValueType(f"an object in which every value is {kind.description}", accepts)


@contextmanager
def as_checkpoint_error(problem: str) -> Iterator[None]:
    """Raise CheckpointError for Python's own errors, which unfit contents of a checkpoint cause.

    - `problem`: the message up to the colon, before the error.
    """
    try:
        yield
    except OnnxfitError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{problem}: {error}") from error


def require_types(place: str, values: Any, types: Mapping[str, ValueType]) -> None:
    """Raise CheckpointError unless `values` has, for every name in `types`, a value of that type.

    - `place`: the file, and the position in it, for the message.
    - `values`: the dict that was read; other names in it are ignored.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{place} must be an object, got {reprlib.repr(values)}.")
    missing = [name for name in types if name not in values]
    if missing:
        found = f"only {listed_names(values, missing[0])}" if values else "no entries"
        raise CheckpointError(f"{place} must have {listed_names(missing)}, but has {found}.")
    for name, kind in types.items():
        if not kind.accepts(values[name]):
            raise CheckpointError(
                f"{place} has {name} = {reprlib.repr(values[name])}. Expected {kind.description}."
                " The file is damaged, or was not written by onnxfit. Use another file."
            )

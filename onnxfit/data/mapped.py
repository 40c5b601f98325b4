"""Arrays on disk: .npy and .npz files are mapped into memory, so that a batch reads its own rows
and nothing else.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from onnxfit.data.batch import Array
from onnxfit.errors import DataError

SUFFIXES = (".npy", ".npz")
# bytes before the name of a file in a zip archive; its last four are the lengths of name and extra
# field
LOCAL_HEADER = 30
VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def opened(data: Any) -> Any:
    """Data with every path in it replaced by what the file holds, mapped read-only: an array, or a
    dict name -> array of a .npz.

    DataError: a path of another kind of file, a .npz that is compressed, arrays of Python objects.
    FileNotFoundError as it is.
    """
    if is_path(data):
        return _map(Path(data))
    if isinstance(data, Mapping) and any(map(is_path, data.values())):
        return {
            name: _map(Path(value)) if is_path(value) else value for name, value in data.items()
        }
    if isinstance(data, (list, tuple)) and any(_names_arrays(item) for item in data):
        return [_map(Path(item)) if is_path(item) else item for item in data]
    return data


def is_path(data: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(data, (str, os.PathLike))


def _names_arrays(item: Any) -> bool:
    """Whether an item of a list is a path, and not the name of a class."""
    return isinstance(item, os.PathLike) or (isinstance(item, str) and item.endswith(SUFFIXES))


def is_mapped(array: Any) -> bool:
    """Whether an array's numbers are in a file that is mapped into memory."""
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.obj if isinstance(array, memoryview) else array.base
    return isinstance(array, mmap.mmap)


def _map(path: Path) -> Any:
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{str(path)!r} is a path, and those of .npy and .npz files can be passed. Columns of"
            " Parquet and Arrow files come through onnxfit.ParquetLoader, a folder of images"
            " through onnxfit.ImageFolder."
        )
    try:
        return np.load(path, mmap_mode="r") if path.suffix == ".npy" else _map_archive(path)
    except (ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{str(path)!r} cannot be mapped into memory: {error}") from error


def _map_archive(path: Path) -> dict[str, Array]:
    """The arrays of a .npz by name: each is a .npy file at some place of the archive."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        return {
            member.filename.removesuffix(".npy"): _map_member(path, file, member)
            for member in archive.infolist()
        }


def _map_member(path: Path, file: Any, member: zipfile.ZipInfo) -> Array:
    if member.compress_type != zipfile.ZIP_STORED:
        raise DataError(
            f"{str(path)!r} is compressed, and rows cannot be read from it one by one: pass"
            " np.load(path) if it fits into memory, or write it with np.savez instead of"
            " np.savez_compressed."
        )
    file.seek(member.header_offset)
    header = file.read(LOCAL_HEADER)
    file.seek(
        int.from_bytes(header[-4:-2], "little") + int.from_bytes(header[-2:], "little"), os.SEEK_CUR
    )
    version = np.lib.format.read_magic(file)
    if version not in VERSIONS:
        raise ValueError(f"{member.filename} is of version {version} of the .npy format.")
    shape, fortran_order, dtype = VERSIONS[version](file)
    if dtype.hasobject:
        raise ValueError(f"{member.filename} holds Python objects.")
    if not np.prod(shape):
        return np.empty(shape, dtype)  # there is nothing to map
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran_order else "C")

"""The same ten rows in files: mapped arrays, Parquet and Arrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxfit
from onnxfit.data import DataLoader
from tests.data.kinds import NAMED, SIZE, W, X, Y


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def archive(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def mapped(path: Path, array: np.ndarray) -> np.ndarray:
    return np.load(saved(path, array), mmap_mode="r")


def table(**columns: Any) -> Any:
    pa = pytest.importorskip("pyarrow")
    columns = {
        "a": X[:, 0].astype(np.float64),
        "b": X[:, 1],
        "y": Y[:, 0].astype(np.float64),
        "w": W,
    } | columns
    return pa.table({"unused": ["text"] * len(columns["a"])} | columns)


def parquet(path: Path, rows: int = 3, **columns: Any) -> Path:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(table(**columns), path, row_group_size=rows)
    return path


def arrow(path: Path, rows: int = 3, compression: str | None = None) -> Path:
    pa = pytest.importorskip("pyarrow")
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(
            file, table().schema, options=pa.ipc.IpcWriteOptions(compression=compression)
        ) as writer,
    ):
        writer.write_table(table(), rows)
    return path


def columns(paths: Any, **settings: Any) -> onnxfit.ParquetLoader:
    return onnxfit.ParquetLoader(
        paths, ["a", "b"], "y", "w", **{"batch_size": SIZE, "shuffle": False, **settings}
    )


def halves(folder: Path) -> Path:
    pq = pytest.importorskip("pyarrow.parquet")
    (folder / "part=1").mkdir()
    (folder / "_SUCCESS").touch()
    pq.write_table(table()[:7], folder / "0.parquet", row_group_size=2)
    pq.write_table(table()[7:], folder / "part=1" / "1.pq")
    return folder


FILE_KINDS: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "paths": lambda at: (saved(at / "x.npy", X), saved(at / "y.npy", Y), saved(at / "w.npy", W)),
    "paths as text": lambda at: (str(saved(at / "x.npy", X)), str(saved(at / "y.npy", Y)), W),
    "maps": lambda at: (mapped(at / "x.npy", X), mapped(at / "y.npy", Y[:, 0]), mapped(at / "w.npy", W[:, None])),
    "maps of other types": lambda at: (mapped(at / "x.npy", X.astype(np.int64)), mapped(at / "y.npy", Y.astype(np.float64)), W),
    "map of Fortran's layout": lambda at: (mapped(at / "x.npy", np.asfortranarray(X)), Y, W),
    "a view of a map": lambda at: (np.asarray(mapped(at / "x.npy", np.repeat(X, 2, axis=0)))[::2], Y, W),
    "bytes of a map": lambda at: (np.frombuffer(np.memmap(saved(at / "x.npy", X), mode="r", offset=128), "f4").reshape(X.shape), Y, W),
    "map beside lists": lambda at: (mapped(at / "x.npy", X), Y.tolist(), W.tolist()),
    "labels mapped": lambda at: (X, saved(at / "y.npy", Y), W),
    "dict of paths": lambda at: ({"x": saved(at / "x.npy", X)}, {"out": saved(at / "y.npy", Y)}, W),
    "list of paths": lambda at: ([str(saved(at / "x.npy", X))], [saved(at / "y.npy", Y)], W),
    "archive": lambda at: (archive(at / "all.npz", **NAMED),),
    "archive of Fortran's layout": lambda at: (archive(at / "all.npz", **{n: np.asfortranarray(a) for n, a in NAMED.items()}),),
    "archives": lambda at: (archive(at / "x.npz", x=X), archive(at / "y.npz", out=Y), W),
    "loader of paths": lambda at: (DataLoader(saved(at / "x.npy", X), saved(at / "y.npy", Y), W, batch_size=SIZE, shuffle=False),),
    "prefetching loader of maps": lambda at: (DataLoader(mapped(at / "x.npy", X), Y, W, batch_size=SIZE, shuffle=False, prefetch=2),),
    "parquet": lambda at: (columns(parquet(at / "t.parquet")),),
    "parquet in blocks": lambda at: (columns([str(parquet(at / "t.parquet"))], buffer=4, prefetch=0),),
    "parquet in one group": lambda at: (columns(parquet(at / "t.parquet", 100), buffer=3),),
    "parquet folder": lambda at: (columns(halves(at)),),
    "arrow": lambda at: (columns(arrow(at / "t.arrow")),),
    "feather": lambda at: (columns(arrow(at / "t.feather", 4, "zstd"), buffer=1),),
}  # fmt: skip


file_kinds = pytest.mark.parametrize("kind", FILE_KINDS)


# of which the order of rows is the same permutation as that of arrays in memory
ARRAYS = [
    kind for kind in FILE_KINDS if not any(word in kind for word in ("parquet", "arrow", "feather"))
]

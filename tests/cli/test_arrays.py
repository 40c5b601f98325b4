"""Files of data."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit.cli import arrays
from onnxfit.errors import DataError
from tests.cli.helpers import ROWS, done, refused, write_csv
from tests.data.test_mapped import HOSTILE_HEADERS
from tests.models import convolutional, mlp, two_inputs


def data_request(model: onnx.ModelProto, *outputs: str, **rest: Any) -> arrays.DataRequest:
    return arrays.DataRequest(arrays.inputs_of(model), outputs, **rest)


def test_npy_is_mapped_and_not_read(folder: Path) -> None:
    x, y, _ = arrays.read(["X.npy", "labels.npy"], data_request(mlp(), "y"))
    assert all(isinstance(array, np.memmap) for array in (x["x"], y["y"]))  # type: ignore[index]
    np.save("weights.npy", np.ones(ROWS))
    assert (
        arrays.read(["X.npy", "labels.npy", "weights.npy"], data_request(mlp(), "y"))[2] is not None
    )


def test_csv_columns_by_name(folder: Path) -> None:
    write_csv("two.csv", "right,left,sample_weight,y", [[1, 2, 3, 0.5], [4, 5, 6, 7]])
    x, y, weights = arrays.read(["two.csv"], data_request(two_inputs(), "y"))
    assert {name: (a.dtype, a.tolist()) for name, a in x.items()} == {
        "left": ("f4", [2, 5]),
        "right": ("f4", [1, 4]),
    }
    assert y is not None and y["y"].tolist() == [0.5, 7]  # noqa: PT018
    assert weights is not None and weights.tolist() == [3, 6]  # noqa: PT018


def test_csv_rows_may_be_images(folder: Path) -> None:
    write_csv(
        "i.csv",
        ",".join(f"p{i}" for i in range(64)) + ",label",
        np.arange(2 * 65).reshape(2, 65),
    )
    x, y, _ = arrays.read(["i.csv"], data_request(convolutional(), "logits"))
    assert x["x"].shape == (2, 1, 8, 8)
    assert x["x"][0, 0, 1, 0] == 8
    assert y is not None and y["logits"].dtype == np.int64  # noqa: PT018


def test_a_prediction_passes_over_labels(folder: Path) -> None:
    write_csv("p.csv", "a,b,y,c,d", np.zeros((2, 5)))
    assert arrays.read(["p.csv"], data_request(mlp(), "y", predicting=True))[0]["x"].shape == (
        2,
        4,
    )
    assert done("predict", "m.onnx", "-d", "d.npz") == done("predict", "m.onnx", "-d", "X.npy")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b,c,d,y\n1,2,3,x,0\n", "text in the column 'd' ('x' in row 0)"),
        ("a,b,c,d,y\n1,2,3,4,0\n1,2,3,x,0\n", "'4' in row 0 of the column 'd', but 'x' in row 1"),
        ("a,b\n1\n", "columns"),
        ("a,a\n1,2\n", "a unique name"),
        ("a,b\n", "no rows"),
        ("", "a unique name"),
        ("a,b,c,d\n1,2,3,4\n", "no column with labels for the output y"),
        ("y\n1\n", "no column for the input x: float32[N, 4]"),
        ("a,b,c,y\n1,2,3,0\n", "shape (1, 3)"),
        ("a,b,c,d,y\n1,2,3,nan,0\n", "NaN in row 0"),
    ],
)
def test_csv_that_will_not_do(folder: Path, content: str, message: str) -> None:
    Path("bad.csv").write_text(content)
    assert message in refused(
        "fit", "m.onnx", "-d", "bad.csv", "-l", "cross_entropy", "-o", "t.onnx", "-q"
    )


@pytest.mark.parametrize("first", ["5.1,3.5,1.4,0.2", "1,2,3,4", "0,0,0,0", "1e3,-inf,nan,2"])
def test_the_first_row_of_a_csv_without_names_is_not_lost(folder: Path, first: str) -> None:
    Path("rows.csv").write_text(f"{first}\n4.9,3.0,1.4,0.2\n")
    for command in (["predict"], ["fit", "-l", "cross_entropy", "-o", "t.onnx", "-q"]):
        message = refused(*command[:1], "m.onnx", "-d", "rows.csv", *command[1:])
        assert "rows.csv' has no line of names: its first line consists of numbers" in message


def test_the_numbers_that_pandas_gives_to_columns_are_names(folder: Path) -> None:
    Path("numbered.csv").write_text("0,1,2,3\n4.9,3.0,1.4,0.2\n")
    with pytest.warns(UserWarning, match="0, 1, 2, 3, was read as the names of the columns"):
        x, _, _ = arrays.read(["numbered.csv"], data_request(mlp(), "y", predicting=True))
    assert x["x"].tolist() == np.array([[4.9, 3.0, 1.4, 0.2]], np.float32).tolist()


def test_files_that_will_not_do(folder: Path) -> None:
    rest = ("-l", "cross_entropy", "-o", "t.onnx", "-q")
    whole = Path("d.npz").read_bytes()
    Path("cut.npz").write_bytes(whole[:-100])
    Path("flipped.npz").write_bytes(whole[:400] + bytes([whole[400] ^ 255]) + whole[401:])
    Path("text.npz").write_text("text")
    Path("cut.npy").write_bytes(Path("X.npy").read_bytes()[:-100])
    Path("text.npy").write_text("text")
    for name in ("cut.npz", "flipped.npz", "text.npz", "cut.npy", "text.npy"):
        labels = ("-d", "labels.npy") if name.endswith("npy") else ()
        assert f"{name}'" in refused("fit", "m.onnx", "-d", name, *labels, *rest)
    np.savez("names.npz", features=np.zeros(3), y=np.zeros(3))
    assert "no array for the input x" in refused("fit", "m.onnx", "-d", "names.npz", *rest)
    assert "Got 1 .npy files, but the model needs 2 arrays" in refused(
        "fit", "m.onnx", "-d", "X.npy", *rest
    )
    assert "--data must be one .npz, .csv or .jsonl file" in refused(
        "fit", "m.onnx", "-d", "d.npz", "-d", "d.csv", *rest
    )
    assert "--label" in refused("fit", "m.onnx", "-d", "d.npz", "--label", "kind", *rest)
    assert "no column 'knid'" in refused("fit", "m.onnx", "-d", "d.csv", "--label", "knid", *rest)
    assert "does not exist" in refused("fit", "m.onnx", "-d", "none.npz", *rest, code=2)
    Path("m2.onnx").write_text("text")
    assert "m2.onnx" in refused("fit", "m2.onnx", "-d", "d.npz", *rest)


def test_no_file_runs_code(folder: Path) -> None:
    class Thief:
        def __reduce__(self) -> Any:
            return os.mkdir, ("stolen",)

    np.save("X.npy", np.array([Thief()]), allow_pickle=True)
    np.savez("d.npz", X=np.array([Thief()]), y=np.zeros(1))
    assert "Python objects" in refused("predict", "m.onnx", "-d", "X.npy")
    assert "Python objects" in refused("predict", "m.onnx", "-d", "d.npz")
    assert not Path("stolen").exists()


@pytest.mark.parametrize("name", HOSTILE_HEADERS)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_is_not_believed(folder: Path, name: str, compression: int) -> None:
    with zipfile.ZipFile("h.npz", "w", compression) as file:
        file.writestr("X.npy", HOSTILE_HEADERS[name])
    Path("h.npy").write_bytes(HOSTILE_HEADERS[name])
    for path in ("h.npz", "h.npy"):
        with pytest.raises(DataError, match="cannot be read"):
            arrays.read([path], data_request(mlp(), "y", predicting=True))


def test_predictions_that_a_file_cannot_hold() -> None:
    with pytest.raises(DataError, match=r"Write a \.npz file\."):
        arrays.as_csv({"y": np.zeros((2, 3, 4))})

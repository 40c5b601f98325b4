"""`onnxfit verify`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.helpers import ADAM, FIT, call, done, refused
from tests.models import mlp

VERIFY = ("verify", "t.onnx", "-p", "m.onnx", "-q")


def verdict(*arguments: object, code: int) -> str:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.mark.parametrize(
    "options",
    [
        "-e 2 --validation-split 0.2 --early-stopping 1 --checkpoint c/",
        "-e 2 --lora rank=2 --seed 5",
        "-e 2 --backend forward_backward --accumulate 2 --clip-norm 1 --penalty 0.1",
    ],
)
def test_a_trained_file(folder: Path, options: str) -> None:
    done(*ADAM, *options.split(), "-o", "t.onnx")
    assert done(*VERIFY, "-d", "d.npz").startswith("same bits, after ")
    if "checkpoint" in options:
        done("resume", "c/", "-e", 4)
        done("export", "c/last.onnxfit", "-o", "t.onnx")
        assert done(*VERIFY, "-d", "d.npz").startswith("same bits, after 8 batches")
        assert "is a checkpoint" in refused(
            "verify", "c/last.onnxfit", "-p", "m.onnx", "-d", "d.npz"
        )


def test_other_formats_of_the_same_data(folder: Path) -> None:
    done(*FIT, "-o", "t.onnx")
    done(*VERIFY, "-d", "X.npy", "-d", "labels.npy")
    done(*VERIFY, "-d", "d.csv", "--label", "kind")


def test_text_labels(folder: Path) -> None:
    lines = Path("d.csv").read_text().splitlines()
    named = [line[:-1] + "abc"[int(line[-1])] for line in lines[1:]]
    Path("named.csv").write_text("\n".join([lines[0], *named]))
    arguments = ("-d", "named.csv", "--label", "kind")
    done("fit", "m.onnx", *arguments, *ADAM[4:], "-o", "t.onnx")
    done(*VERIFY, *arguments)
    Path("named.csv").write_text("\n".join([lines[0], *named[1:], named[0]]))
    assert "labels 'y' differs" in verdict(*VERIFY, *arguments, code=4)


def test_what_differs(folder: Path) -> None:
    onnx.save(mlp(seed=1), "other.onnx")
    done(*FIT, "-o", "t.onnx", "--teacher", "other.onnx", "--distillation", "temperature=3")
    assert "teacher" in verdict(*VERIFY, "-d", "d.npz", code=5)
    arguments = (*VERIFY, "-d", "d.npz", "--teacher", "other.onnx")
    done(*arguments)
    assert "the teacher is another" in verdict(*arguments[:-1], "m.onnx", code=4)
    assert "the setting seed is 0" in verdict(*arguments, "--seed", 1, code=4)
    report = json.loads(verdict(*arguments, "--json", "-p", "t.onnx", code=4))
    assert report["verdict"] == "not the same"
    assert "the parent is another model" in report["differences"][0]
    with np.load("d.npz") as file:
        np.savez("d.npz", X=file["X"] + np.eye(70, 4), y=file["y"])
    assert "differs in the rows 0 to 5.\n" in verdict(*arguments, code=4)
    assert "no metadata of onnxfit" in verdict(
        "verify", *("m.onnx", *VERIFY[2:]), "-d", "d.npz", code=5
    )


def test_bom(folder: Path) -> None:
    done(*FIT, "-o", "t.onnx")
    printed = json.loads(done("bom", "t.onnx"))
    assert printed["bomFormat"] == "CycloneDX"
    assert done("bom", "t.onnx", "-o", "t.cdx.json") == "t.onnx -> t.cdx.json\n"
    assert json.loads(Path("t.cdx.json").read_text()) == printed
    assert ".json" in refused("bom", "t.onnx", "-o", "t.onnx")

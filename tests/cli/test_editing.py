"""`untie`, `tie`, `add-biases`, `replace-head` and `to-float32`: a file in, a file out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.helpers import done, refused
from tests.tools.editing.graphs import array_of, fresh_network, names_of


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(fresh_network(), "m.onnx")


def test_untie_and_add_biases() -> None:
    assert done("untie", "m.onnx", "own.onnx") == "m.onnx -> own.onnx: 9 weights\n"
    assert done("add-biases", "own.onnx", "all.onnx") == "own.onnx -> all.onnx: 10 weights\n"
    assert {"a.bias", "n2.weight"} <= names_of(onnx.load("all.onnx"))
    done("untie", "m.onnx", "one.onnx", "--names", "*", "--names", "!b.bias")
    assert "n1.bias" not in names_of(onnx.load("one.onnx"))
    assert "Did you mean 'b.bias'" in refused("untie", "m.onnx", "x.onnx", "--names", "b.bais")
    assert not Path("x.onnx").exists()


def test_tie() -> None:
    done("untie", "m.onnx", "own.onnx")
    done("tie", "own.onnx", "tied.onnx", "n2.bias=n1.bias", "n2.weight=n1.weight")
    assert "n2.bias" not in names_of(onnx.load("tied.onnx"))
    assert "Expected NAME=OTHER" in refused("tie", "m.onnx", "x.onnx", "b.bias", code=2)
    assert "shapes are" in refused("tie", "m.onnx", "x.onnx", "b.bias=a.weight")


def test_replace_head() -> None:
    done("replace-head", "m.onnx", "seven.onnx", "--classes", 7, "--of", "y", "--seed", 3)
    assert array_of(onnx.load("seven.onnx"), "head.weight").shape == (7, 8)
    done("replace-head", "m.onnx", "other.onnx", "--classes", 7)
    heads = [array_of(onnx.load(f), "head.weight") for f in ("seven.onnx", "other.onnx")]
    assert not np.array_equal(*heads)
    refused("replace-head", "m.onnx", "x.onnx", code=2)

    old = array_of(onnx.load("m.onnx"), "head.weight")
    done("replace-head", "m.onnx", "more.onnx", "--classes", len(old) + 1, "--keep", "all")
    assert np.array_equal(array_of(onnx.load("more.onnx"), "head.weight")[:-1], old)
    done("replace-head", "m.onnx", "two.onnx", "--classes", 2, "--keep", "1,0")
    assert np.array_equal(array_of(onnx.load("two.onnx"), "head.weight"), old[[1, 0]])
    for wrong in ("some", "1,", ""):
        arguments = ("m.onnx", "x.onnx", "--classes", 2, "--keep", wrong)
        assert "expected all, or indices" in refused("replace-head", *arguments, code=2)
    assert "from 0 to" in refused(
        "replace-head", "m.onnx", "x.onnx", "--classes", 2, "--keep", "-1"
    )


def test_to_float32() -> None:
    model = onnx.load("m.onnx")
    tensor = next(t for t in model.graph.initializer if t.name == "a.weight")
    array = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float16), "a.weight"))
    cast = onnx.helper.make_node("Cast", ["a.weight"], ["a.wide"], to=onnx.TensorProto.FLOAT)
    for node in model.graph.node:
        node.input[:] = ["a.wide" if name == "a.weight" else name for name in node.input]
    model.graph.node.insert(0, cast)
    onnx.save(model, "half.onnx")
    assert done("to-float32", "half.onnx", "single.onnx").startswith("half.onnx -> single.onnx: ")
    wide = array_of(onnx.load("single.onnx"), "a.weight")
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, array.astype(np.float16))


def test_add_dropout() -> None:
    assert done("add-dropout", "m.onnx", "d.onnx", 0.2) == "m.onnx -> d.onnx: 6 weights\n"
    assert sum(node.op_type == "Dropout" for node in onnx.load("d.onnx").graph.node) == 2
    done("add-dropout", "m.onnx", "r.onnx", 0.2, "--after", "Relu")
    assert sum(node.op_type == "Dropout" for node in onnx.load("r.onnx").graph.node) == 1
    assert "above 0 and below 1" in refused("add-dropout", "m.onnx", "x.onnx", 1.5)
    assert "Did you mean 'Relu'" in refused(
        "add-dropout", "m.onnx", "x.onnx", 0.1, "--after", "Rlu"
    )

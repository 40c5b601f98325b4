"""Text labels: encoding, the classes in the file, and predictions by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from sklearn.preprocessing import LabelEncoder

import onnxfit
from onnxfit.graph.class_names import read_class_names
from tests.cli.helpers import call, done, refused
from tests.models import mlp

ANIMALS = np.array(["dog", "cat", "zebra"])
FIT = ("fit", "m.onnx", "-q", "-l", "cross_entropy", "-o", "t.onnx")


@pytest.fixture(autouse=True)
def animals(folder: Path) -> None:
    """Write the data of `folder` again, with names instead of class indices."""
    with np.load("d.npz") as data:
        X, names = data["X"], ANIMALS[data["y"]]
    codes = LabelEncoder().fit_transform(names)
    np.savez("codes.npz", X=X, y=codes)
    np.savez("names.npz", X=X, y=names)
    rows = [dict(zip("abcd", map(float, x)), y=str(name)) for x, name in zip(X, names)]
    Path("names.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = [",".join(map(str, row.values())) for row in rows]
    Path("names.csv").write_text("\n".join(["a,b,c,d,y", *lines]))


def metadata(path: str) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


@pytest.mark.parametrize("file", ["names.csv", "names.jsonl", "names.npz"])
def test_text_trains_as_the_integers_of_label_encoder(file: str) -> None:
    options = ("-e", 3, "--lr", "0.1", "-m", "accuracy", "--validation-split", "0.2")
    printed = done(*FIT, "-d", file, *options)
    figures = done(*FIT[:-1], "i.onnx", "-d", "codes.npz", *options)
    pairs = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert pairs.pop("classes") == "cat, dog, zebra"
    assert pairs == dict(line.split(maxsplit=1) for line in figures.splitlines())
    trained, integers = onnx.load("t.onnx"), onnx.load("i.onnx")
    assert trained.graph == integers.graph
    assert json.loads(metadata("t.onnx")["classes"]) == {"y": ["cat", "dog", "zebra"]}
    assert "classes" not in metadata("i.onnx")


def test_json_has_the_classes() -> None:
    report = json.loads(done(*FIT, "-d", "names.csv", "--json"))
    assert report["classes"] == {"y": ["cat", "dog", "zebra"]}


def test_validation_and_evaluation_use_the_classes_of_training() -> None:
    """The validation data lacks a class, so encoding it alone would give other numbers."""
    lines = Path("names.csv").read_text().splitlines()
    few = [lines[0], *(line for line in lines[1:] if not line.endswith("cat"))]
    Path("few.csv").write_text("\n".join(few))
    done(*FIT, "-d", "names.csv", "--validation-data", "few.csv", "--csv", "log.csv")
    header, values = Path("log.csv").read_text().splitlines()
    loss = float(dict(zip(header.split(","), values.split(",")))["val_loss"])
    printed = json.loads(
        done("evaluate", "t.onnx", "-d", "few.csv", "-l", "cross_entropy", "--json")
    )
    assert printed["loss"] == pytest.approx(loss, rel=1e-5)


def test_training_again_keeps_the_numbers_of_the_classes() -> None:
    done(*FIT, "-d", "names.csv")
    lines = Path("names.csv").read_text().splitlines()
    Path("few.csv").write_text("\n".join(line for line in lines if not line.endswith("cat")))
    done("fit", "t.onnx", "-q", "-l", "cross_entropy", "-o", "u.onnx", "-d", "few.csv")
    assert metadata("u.onnx")["classes"] == metadata("t.onnx")["classes"]
    done("replace-head", "t.onnx", "two.onnx", "--classes", 2)
    assert "classes" not in metadata("two.onnx")
    done("fit", "two.onnx", "-q", "-l", "cross_entropy", "-o", "u.onnx", "-d", "few.csv")
    assert json.loads(metadata("u.onnx")["classes"]) == {"y": ["dog", "zebra"]}


@pytest.mark.parametrize("options", [("--lora", "rank=1"), ("--checkpoint", "c/")])
def test_every_export_names_the_classes(options: tuple[str, ...]) -> None:
    done(*FIT, "-d", "names.csv", *options)
    expected = {"y": ["cat", "dog", "zebra"]}
    assert read_class_names(onnx.load("t.onnx")) == expected
    if "--checkpoint" in options:
        done("export", "c/last.onnxfit", "-o", "e.onnx")
        assert read_class_names(onnx.load("e.onnx")) == expected
        done("resume", "c", "-e", 2, "-q")
        assert read_class_names(onnx.load("t.onnx")) == expected
        assert done("evaluate", "c/last.onnxfit", "-d", "names.csv")


def test_predictions_by_name() -> None:
    done(*FIT, "-d", "names.csv", "-e", 30, "--lr", "0.1")
    predict = ("predict", "t.onnx", "-d", "codes.npz")
    assert done(*predict).splitlines()[0] == "y_cat,y_dog,y_zebra"
    session = ort.InferenceSession("t.onnx", providers=["CPUExecutionProvider"])
    with np.load("codes.npz") as data:
        scores = session.run(None, {"x": data["X"]})[0]
    names = [["cat", "dog", "zebra"][i] for i in scores.argmax(1)]
    assert len(set(names)) > 1
    assert done(*predict, "--classes").splitlines() == ["y", *names]
    assert json.loads(done(*predict, "--classes", "--json"))["y"] == names
    done(*predict, "--classes", "-o", "p.npz")
    with np.load("p.npz") as file:
        assert file["y"].tolist() == names
    assert "--classes needs a model that names its classes" in refused(
        "predict", "m.onnx", "-d", "codes.npz", "--classes"
    )


@pytest.mark.parametrize("activation", [True, False])
def test_two_classes_of_one_output(activation: bool) -> None:
    """A score above 0 is the second class, or above 0.5 after a Sigmoid."""
    model = mlp((4, 8, 1))
    if activation:
        model.graph.node[-1].output[0] = "logit"
        model.graph.node.add(op_type="Sigmoid", input=["logit"], output=["y"])
    onnx.save(model, "m.onnx")
    lines = Path("names.csv").read_text().splitlines()
    Path("two.csv").write_text("\n".join(line for line in lines if not line.endswith("cat")))
    fit = ("fit", "m.onnx", "-q", "-l", "binary_cross_entropy", "-o", "t.onnx", "-d", "two.csv")
    done(*fit, "-e", 100, "--lr", "0.5")
    predicted = done("predict", "t.onnx", "-d", "two.csv", "--classes").splitlines()[1:]
    right = [line.rsplit(",", 1)[1] for line in Path("two.csv").read_text().splitlines()[1:]]
    assert np.mean(np.array(predicted) == right) > 0.9
    assert "has room for 2" in refused(*fit[:-1], "names.csv")


def test_labels_that_no_class_or_loss_takes() -> None:
    lines = Path("names.csv").read_text().splitlines()
    Path("more.csv").write_text("\n".join([*lines, "1,2,3,4,emu"]))
    message = refused(*FIT, "-d", "more.csv")
    assert "have 4 classes (cat, dog, emu, zebra)" in message
    assert "has room for 3" in message
    assert "replace-head MODEL OUTPUT --classes 4" in message
    message = refused(*FIT, "-d", "names.csv", "--validation-data", "more.csv")
    assert f"The label 'emu' of 'y' (row {len(lines) - 1}) is none of the 3 classes" in message
    message = refused("fit", "m.onnx", "-q", "-l", "mae", "-o", "t.onnx", "-d", "names.csv")
    assert "MeanAbsoluteError needs numbers" in message
    message = refused("evaluate", "m.onnx", "-d", "names.csv", "-l", "cross_entropy")
    assert "the model does not name its classes" in message
    assert not Path("t.onnx").exists()
    Path("gap.csv").write_text("\n".join([*lines, "1,2,3,4,"]))
    assert "has '' in row 70 of the column 'y'" in refused(*FIT, "-d", "gap.csv")


@pytest.mark.parametrize("value", ["cat;dog", "[1, 2]", '{"y": "cat"}', '{"y": []}', "{"])
def test_metadata_of_other_programs_stays(value: str) -> None:
    model = mlp()
    model.metadata_props.add(key="classes", value=value)
    onnx.save(model, "m.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = call(*FIT, "-d", "names.csv")
    assert result.exit_code == 0
    assert "has an entry 'classes' of another program, which stays" in result.stderr
    assert metadata("t.onnx")["classes"] == value


def test_python_says_how_to_encode_text() -> None:
    trainer = onnxfit.Trainer("m.onnx", loss="cross_entropy")
    with np.load("names.npz") as data:
        X, names = data["X"], data["y"]
    with pytest.raises(onnxfit.DataError, match=r"np\.unique"):
        trainer.fit(X, names, verbose=0)
    pandas = pytest.importorskip("pandas")
    with pytest.raises(onnxfit.DataError, match=r"pandas\.factorize"):
        trainer.fit(X, pandas.Series(names, name="animal"), verbose=0)

"""Options from a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import ADAM, FIT, done, refused

OPTIONS = {
    "data": "d.npz",
    "loss": "cross_entropy",
    "optimizer": "adam",
    "learning-rate": 0.01,
    "batch_size": 16,
    "epochs": 2,
}


def test_a_file_holds_the_same_options(folder: Path) -> None:
    rest = {
        "metrics": ["accuracy"],
        "penalty": {"fc0*": 0.01},
        "quiet": True,
        "output": "file.onnx",
        "clip_norm": None,
        "model": "m.onnx",
    }
    Path("o.json").write_text(json.dumps({**OPTIONS, **rest}))
    report = done("fit", "--config", "o.json")
    typed = (*ADAM, "-b", 16, "-m", "accuracy", "--penalty", "fc0*=0.01")
    assert report == done(*typed, "-e", 2, "-o", "typed.onnx")
    assert Path("file.onnx").read_bytes() == Path("typed.onnx").read_bytes()
    # the command line wins
    assert done("fit", "--config", "o.json", "-e", 1) == done(*typed, "-e", 1, "-o", "typed.onnx")


def test_yaml(folder: Path) -> None:
    pytest.importorskip("yaml")
    Path("o.json").write_text(json.dumps({**OPTIONS, "output": "t.onnx"}))
    lines = "\n".join(f"{name}: {value}" for name, value in OPTIONS.items())
    Path("o.yaml").write_text(
        f"{lines}\noutput: t.onnx\npenalty: 0\nclip-norm: 1e9  # text to YAML 1.1\n"
    )
    assert done("fit", "m.onnx", "--config", "o.yaml", "-q") == done(
        "fit", "m.onnx", "--config", "o.json", "-q"
    )
    Path("o.yaml").write_text("loss: !!python/object/apply:os.mkdir [stolen]")
    assert "cannot be read" in refused("fit", "m.onnx", "--config", "o.yaml")
    assert not Path("stolen").exists()


def test_yaml_without_its_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("o.yaml").write_text("epochs: 1")
    assert 'pip install "onnxfit[yaml]"' in refused("fit", "m.onnx", "--config", "o.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"epoch": 3}', "is called 'epoch'. Did you mean 'epochs'?"),
        ('{"config": "o.json"}', "is called 'config'"),
        ('{"batch-size": 1, "batch_size": 2}', "gives the option batch-size twice"),
        ('{"epochs": [1]}', "Expected a single value"),
        ('{"epochs": true}', "Expected a value"),
        ('{"quiet": 1}', "Expected true or false"),
        ("[1]", "contains a list"),
        ("{", "cannot be read"),
    ],
)
def test_what_it_cannot_hold(folder: Path, text: str, message: str) -> None:
    Path("o.json").write_text(text)
    assert message in refused(*FIT, "--config", "o.json", "-o", "t.onnx")


@pytest.mark.parametrize(
    "text", ['{"epochs": "many"}', '{"epochs": 1.5}', '{"seed": -Infinity}', '{"batch_size": NaN}']
)
def test_values_are_checked_as_if_typed(folder: Path, text: str) -> None:
    Path("o.json").write_text(text)
    assert "Invalid value for" in refused(*FIT, "--config", "o.json", "-o", "t.onnx", code=2)


# what a line doubles, forty lines make too large for any memory
DOUBLED = [f"- &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
MERGED = [f"- &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n".join(["metrics:", "- &a0 [x, x]", *DOUBLED]), "uses the YAML anchor 'a0' for a list"),
        ("\n".join(["metrics:", "- &a0 {x: 1}", *MERGED]), "uses the YAML anchor 'a0' for a list"),
        ("seed: 2001-01-01", "has seed: datetime.date(2001, 1, 1). Expected"),
        ("metrics: [2001-01-01]", "has metrics: datetime.date(2001, 1, 1). Expected"),
        ("metrics: [[accuracy]]", "has metrics: ['accuracy']. Expected"),
        ("penalty: {a: {b: 1}}", "has penalty: {'b': 1}. Expected"),
        ("seed: 0x" + "f" * 5000, "0xffffffffffffffffff... has 5002 characters"),
        ("0x" + "f" * 5000 + ": 1", "has 5002 characters"),
        ("metrics: " + "[" * 100_000, "nested more than 20 levels deep"),
    ],
)
def test_what_yaml_cannot_hold(folder: Path, text: str, message: str) -> None:
    pytest.importorskip("yaml")
    Path("o.yaml").write_text(text)
    assert message in refused(*FIT, "--config", "o.yaml", "-o", "t.onnx")


def test_a_value_of_yaml_may_have_a_name(folder: Path) -> None:
    pytest.importorskip("yaml")
    Path("o.yaml").write_text("data: &file d.npz\nvalidation-data: *file")
    done("fit", "m.onnx", "-l", "cross_entropy", "--config", "o.yaml", "-o", "t.onnx", "-q")

"""`onnxfit init` on the command line."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.cli.helpers import call, done, refused
from tests.script.files import half_precision, parsed

pytestmark = pytest.mark.usefixtures("folder")


def test_it_writes_a_script_and_never_overwrites_one_unasked() -> None:
    said = done("init", "m.onnx", "--no-measure")
    assert said.startswith("m.onnx -> train.py\n  loss of y: mean_squared_error\n")
    script = Path("train.py").read_text()
    assert 'MODEL = "m.onnx"' in script
    Path("train.py").write_text("my own")
    assert "'train.py' exists. Pass --force" in refused("init", "m.onnx", "--no-measure")
    assert Path("train.py").read_text() == "my own"
    done("init", "m.onnx", "--no-measure", "-o", "other.py")
    assert Path("other.py").read_text() == script
    done("init", "m.onnx", "--no-measure", "--force")
    assert Path("train.py").read_text() == script


def test_standard_output_has_nothing_but_the_script() -> None:
    script = done("init", "m.onnx", "--no-measure", "-o", "-")
    compile(script, "train.py", "exec")
    assert not Path("train.py").exists()
    assert not Path("-").exists()


def test_the_costs_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfit.script.measure.SIZES", (2,))
    said = done("init", "m.onnx")
    assert "  batch   2: " in said
    assert "# batch   2: " in Path("train.py").read_text()


def test_a_fix_is_printed_and_an_error_without_one_writes_nothing() -> None:
    onnx.save(half_precision(), "half.onnx")
    assert "onnxfit.to_float32(model)" in done("init", "half.onnx", "--no-measure")
    Path("train.py").unlink()
    onnx.save(parsed("g (float[N, 2] x) => (float[N, 2] y) { y = Relu(x) }"), "none.onnx")
    assert "no float weights" in refused("init", "none.onnx", "--no-measure")
    assert not Path("train.py").exists()


def test_a_name_of_the_file_cannot_control_the_terminal() -> None:
    model = onnx.load("m.onnx")
    model.graph.output[0].name = model.graph.node[-1].output[0] = "y\x1b[31m\nout"
    onnx.save(model, "colored.onnx")
    result = call("init", "colored.onnx", "--no-measure")
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "loss of y\\x1b[31m\\nout: " in result.output


def test_inspect_shows_the_same_facts() -> None:
    done("init", "m.onnx", "--no-measure")
    lines = [line for line in done("inspect", "m.onnx").splitlines() if line.startswith("Output")]
    comments = " ".join(Path("train.py").read_text().replace("\n#  ", "").split())
    assert lines
    assert all(line in comments for line in lines)

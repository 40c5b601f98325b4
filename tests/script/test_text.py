"""The script of `onnxfit init` runs as it is, whatever the file contains."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tokenize
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import GradientError, ModelError, training_script
from onnxfit.script.text import comment
from tests.models import convolutional, mlp
from tests.script.files import FILES, parsed

ROOT = Path(__file__).resolve().parents[2]


def script_for(
    model: onnx.ModelProto, folder: Path, name: str = "model.onnx", **options: Any
) -> str:
    path = folder / name
    onnx.save(model, path)
    return training_script(path, **{"measured": False, **options})


def run(script: str, folder: Path) -> None:
    """Run a script as a user does. It must end well, without a warning."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"


def arguments(script: str, function: str) -> dict[str, Any]:
    """The arguments of the call of this function that are literals."""
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    call = next(c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == function)
    found = {}
    for keyword in call.keywords:
        try:
            found[keyword.arg or ""] = ast.literal_eval(keyword.value)
        except ValueError:
            found[keyword.arg or ""] = ast.unparse(keyword.value)
    return found


def comments(script: str) -> str:
    """All comments as one text."""
    tokens = tokenize.generate_tokens(StringIO(script).readline)
    lines = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("name", FILES)
def test_the_script_runs_as_it_is_and_trains_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, losses = FILES[name]
    script = script_for(build(), tmp_path)
    assert arguments(script, "Trainer")["loss"] == losses
    assert all(len(line) < 80 for line in script.splitlines() if line.startswith("#"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script, encoding="utf-8")
    runpy.run_path("train.py", run_name="__main__")
    before, after = (onnx.load(tmp_path / f"{name}.onnx") for name in ("model", "trained"))
    assert [node.op_type for node in after.graph.node]
    session = onnxruntime.InferenceSession(after.SerializeToString())
    assert [value.name for value in session.get_inputs()] == [v.name for v in before.graph.input]
    old = {t.name: t.raw_data or t.SerializeToString() for t in before.graph.initializer}
    new = {t.name: t.raw_data or t.SerializeToString() for t in after.graph.initializer}
    assert old != new


def test_token_ids_are_below_the_table_and_masks_are_ones(tmp_path: Path) -> None:
    script = script_for(FILES["transformer"][0](), tmp_path)
    assert '"input_ids": rng.integers(0, 11, (rows, 16)),' in script
    assert '"attention_mask": np.ones((rows, 16), np.int64)' in script
    assert '"scores": x["input_ids"].copy()' in script
    assert "token ids, because a Gather looks them up in 'table'" in comments(script)
    assert "The file leaves the size tokens open; 16 is one" in comments(script)


def test_states_go_on_in_the_next_batch_and_the_sample_rate_is_fixed(tmp_path: Path) -> None:
    script = script_for(FILES["recurrent"][0](), tmp_path)
    settings = arguments(script, "Trainer")
    assert settings["state_outputs"] == {"hn": "h0", "cn": "c0"}
    assert settings["fixed_inputs"] == {"sr": 16000}
    assert arguments(script, "fit")["shuffle"] is False
    assert "because the output 'hn' has its type, shape and name" in comments(script)


def test_a_fixed_batch_is_kept_and_dynamic_batch_is_mentioned(tmp_path: Path) -> None:
    script = script_for(FILES["fixed_batch"][0](), tmp_path)
    assert "BATCH_SIZE = 2" in script
    assert "# dynamic_batch=True," in script
    assert "The batch size is fixed at 2, by the file" in comments(script)


def test_an_image_whose_outputs_are_texts_may_have_the_loss_ctc(tmp_path: Path) -> None:
    script = script_for(FILES["line_reader"][0](), tmp_path)
    assert '# loss={"logits": "ctc"},' in script
    assert '# loss={"y": "cross_entropy"},' in script_for(mlp(), tmp_path)
    assert "axis 1 of logits: the size 'batch'" in comments(script)
    assert "ctc" not in script_for(FILES["image_classifier"][0](), tmp_path)


def test_alternatives_work_when_their_comment_sign_is_removed(tmp_path: Path) -> None:
    script = script_for(mlp((4, 8, 8, 3)), tmp_path)
    head = re.sub(r"# (weights=.*)", r"\1", script)
    assert arguments(head, "Trainer")["weights"] == ["fc2.weight", "fc2.bias"]
    lora = re.sub(r"# (adapters=.*)", r"\1", script)
    assert arguments(lora, "Trainer")["adapters"] == "onnxfit.LoRA(rank=4)"
    run(re.sub(r"# ((weights|backend|penalty)=.*)", r"\1", script), tmp_path)
    run(re.sub(r"# (adapters=.*)", r"\1", script), tmp_path)


def test_what_the_exporter_left_out_is_said(tmp_path: Path) -> None:
    with_norm = comments(script_for(convolutional(), tmp_path))
    assert "BatchNormalization: 1 node." in with_norm
    assert "No BatchNormalization" not in with_norm
    plain = comments(script_for(FILES["image_classifier"][0](), tmp_path))
    assert "No BatchNormalization: if the network had it, the exporter folded it" in plain
    assert "No Dropout" in plain
    dropped = comments(script_for(convolutional(dropout=0.5), tmp_path))
    assert "No Dropout" not in dropped


def test_an_error_that_names_its_fix_gives_the_script_this_setting(tmp_path: Path) -> None:
    integers = script_for(FILES["integers"][0](), tmp_path)
    assert 'quantization=onnxfit.Quantization(weights=["!table"]),' in integers
    assert "only integers read by DequantizeLinear alone can be trained" in comments(integers)
    assert "MODEL = onnxfit.to_float32(" in script_for(FILES["half_precision"][0](), tmp_path)


def test_a_file_that_does_not_train_raises_its_error(tmp_path: Path) -> None:
    blocked = parsed(
        "g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}>"
        " { h = MatMul(x, w) y = CumSum(h, h) }"
    )
    blocked.graph.node[1].op_type = "Swirl"
    blocked.graph.node[1].domain = "my.domain"
    blocked.opset_import.add(domain="my.domain", version=1)
    with pytest.raises(GradientError, match="Swirl"):
        script_for(blocked, tmp_path)
    constant = parsed("g (float[N, 2] x) => (float[N, 2] y) { y = Relu(x) }")
    with pytest.raises(ModelError, match="no float weights"):
        script_for(constant, tmp_path)


HOSTILE = [
    "x\nimport os; os.mkdir('broken')",
    "'); import os; os.mkdir('broken') #",
    '"""\nimport os\nos.mkdir("broken")\n"""',
    "x\\",
    "x\r\u2028\u202e\x0c{0}%s{rows}",
    "weights=['nothing'] quantization=onnxfit.Quantization(weights=['no'])",
    "x" * 5000,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_a_file_stay_texts(text: str, tmp_path: Path) -> None:
    model = mlp()
    renamed = {name: f"{name}{text}" for name in ("x", "y", "fc0.weight", "h0", "N")}
    graph = model.graph
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        node.name += text
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = renamed.get(value.name, value.name)
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = renamed["N"]
    model.producer_name = model.doc_string = model.producer_version = text
    model.metadata_props.add(key="license" + text, value=text)
    script = script_for(model, tmp_path)
    assert sum(isinstance(node, ast.Import) for node in ast.walk(ast.parse(script))) == 2
    assert all(c.isprintable() or c == "\n" for c in script)
    if text in HOSTILE[:3]:  # they contain code
        run(script, tmp_path)
        assert (tmp_path / "trained.onnx").exists()
        assert not (tmp_path / "broken").exists()


def test_a_comment_is_a_comment_whatever_its_text() -> None:
    for text in HOSTILE:
        assert all(line.startswith("# ") for line in comment(text))


def test_measured_steps_choose_the_batch_size(tmp_path: Path) -> None:
    stages: list[str] = []
    script = script_for(mlp(), tmp_path, measured=True, progress=stages.append)
    costs = re.findall(r"^# batch +(\d+): [\d.,e+]+ ms per step", script, re.MULTILINE)
    assert costs == ["1", "8", "32"]
    assert stages[-1] == "measuring batches of 32"
    size = re.search(r"BATCH_SIZE = (\d+)", script)
    assert size is not None
    assert size[1] in costs


def test_placeholders_are_the_numbers_that_were_tried(tmp_path: Path) -> None:
    """The code of each placeholder gives its array."""
    from onnxfit.script.placeholders import Placeholder

    for fill in ("zeros", "ones", "unit", "signed", "normal", "integers"):
        for dtype in ("float32", "float64", "int64", "bool", "float16"):
            if dtype in ("int64", "bool") and fill in ("unit", "signed", "normal"):
                continue
            one = Placeholder("x", dtype, (None, 3), fill, "", 0, 2)
            array = one.array(5, np.random.default_rng(0), {})
            value = eval(one.code, {"np": np, "rng": np.random.default_rng(0), "rows": 5})
            assert value.dtype == array.dtype == np.dtype(dtype)
            assert value.shape == array.shape == (5, 3)
            assert abs(array.astype(float)).max() <= 4

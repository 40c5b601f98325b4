"""The scalars of a step in JSON are those of scalars.onnx, for hosts that cannot run that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import Trainer, optimizers, penalties
from onnxfit.optimizers import Optimizer
from onnxfit.penalties import Penalty
from onnxfit.registry import registry
from onnxfit.step.host_scalars import HOST_OPERATORS
from tests.models import convolutional
from tests.training_folder.scalar_program import OPERATORS, evaluate

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in registry("onnxfit.optimizers", Optimizer)},
    **{f"penalty {n}": {"penalty": n} for n in registry("onnxfit.penalties", Penalty)},
    "AMSGrad": {"optimizer": optimizers.Adam(amsgrad=True, ema_momentum=0.9)},
    "decay": {"optimizer": optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)},
    "clipping": {"optimizer": "adam", "clip_norm": 0.5, "clip_value": 0.1},
    "a penalty by name": {"penalty": {"*.weight": penalties.L2(0.1)}, "optimizer": "adamw"},
}
STEPS = [*range(12), 99, 10_000, 2**31]
RATES = [1e-8, 0.001, 0.3, 3.0]
SEEDS = [0, -1, 2**53 - 1]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_program_computes_the_scalars_of_a_step(name: str, tmp_path: Path) -> None:
    trainer = Trainer(convolutional(dropout=0.3), loss="cross_entropy", **SETTINGS[name])
    trainer.export_training(tmp_path, target="web", include=["train"])
    graph = json.loads((tmp_path / "manifest.json").read_text())["graphs"]["scalars"]
    session = onnxruntime.InferenceSession(tmp_path / "scalars.onnx")
    outputs = [tensor["name"] for tensor in graph["outputs"]]
    seen = set()
    for i, step in enumerate(STEPS):
        numbers = {"step": step, "learning_rate": RATES[i % 4], "seed": SEEDS[i % 3]}
        feeds = {t["name"]: np.array(numbers[t["role"]], t["type"]) for t in graph["inputs"]}
        values = evaluate(graph["program"], feeds)
        for output, expected in zip(outputs, session.run(outputs, feeds)):
            assert values[output].dtype == expected.dtype
            assert_same_number(values[output], np.atleast_1d(expected))
            seen.add(expected.tobytes())
    assert len(seen) >= len(STEPS)


def assert_same_number(value: np.ndarray, expected: np.ndarray) -> None:
    """Whole numbers are equal; powers in float64 may differ in the last bit."""
    if value.dtype.kind == "f":
        np.testing.assert_array_max_ulp(value, expected, 1)
    else:
        np.testing.assert_array_equal(value, expected)


def test_the_operators_of_hosts_are_those_that_the_docs_define() -> None:
    text = (Path(__file__).parents[2] / "docs/training-folder.md").read_text(encoding="utf-8")
    assert set(OPERATORS) == HOST_OPERATORS
    assert {name for name in HOST_OPERATORS if f"`{name}`" in text} == HOST_OPERATORS


def test_numbers_that_json_lacks_come_back() -> None:
    from onnxfit.training_folder.description import described_program

    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (double x) => (double y, int64 z)
        <int64 n = {-4658895280553007687}> { z = Mul(n, n)  y = Add(x, big) }""")
    model.graph.initializer.append(onnx.helper.make_tensor("big", 11, [], [np.inf]))
    onnx.shape_inference.infer_shapes(model)
    program = described_program(model)
    values = evaluate(json.loads(json.dumps(program, allow_nan=False)), {"x": 1.0})
    assert values["y"] == np.inf
    assert values["z"] == np.array((-4658895280553007687) ** 2 % 2**64, np.uint64).astype(np.int64)

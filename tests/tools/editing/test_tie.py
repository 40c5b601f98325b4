"""`tie`: two weights become one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import SettingError, UnknownNameError
from tests.tools.editing.graphs import array_of, model_of, names_of, node, random, run, zeros


def language_model(head: np.ndarray, table: np.ndarray) -> onnx.ModelProto:
    nodes = [node("Gather", "table tokens", "e"), node("MatMul", "e head", "s"), node("Add", "s bias", "y")]  # fmt: skip
    tensors = {"table": table, "head": head, "bias": zeros(head.shape[1])}
    return model_of(nodes, tensors, {"tokens": ("N",)}, {"y": ("N", head.shape[1])}, integers=["tokens"])  # fmt: skip


TOKENS = np.array([0, 2, 1])


@pytest.mark.parametrize("rows", [7, 4], ids=["rectangle", "square"])
def test_a_transposed_copy_becomes_the_table(rows: int) -> None:
    table = random(rows, 4)
    model = language_model(np.ascontiguousarray(table.T), table)
    tied = onnxfit.tie(model, {"head": "table"})
    onnx.checker.check_model(tied, full_check=True)
    assert names_of(tied) == {"table", "bias"}
    assert names_of(model) == {"table", "bias", "head"}
    assert np.array_equal(run(model, tokens=TOKENS)[0], run(tied, tokens=TOKENS)[0])


def test_training_moves_both_as_one() -> None:
    table = random(7, 4)
    tied = onnxfit.tie(language_model(np.ascontiguousarray(table.T), table), {"head": "table"})
    trainer = Trainer(tied, loss="cross_entropy", optimizer=0.5)
    trainer.train_on_batch(TOKENS, np.array([1, 1, 6]))
    moved = trainer.export()
    assert np.abs(array_of(moved, "table") - table)[5].max() > 1e-3, "no token 5: by the head alone"
    logits = array_of(moved, "table")[TOKENS] @ array_of(moved, "table").T + array_of(moved, "bias")
    np.testing.assert_allclose(trainer.predict(TOKENS), logits, rtol=1e-5, atol=1e-6)


def test_values_are_those_of_the_one_that_stays() -> None:
    nodes = [node("Gemm", "x u", "h"), node("Gemm", "h v", "y")]
    u, v = random(3, 3), random(3, 3, seed=1)
    model = model_of(nodes, {"u": u, "v": v}, {"x": ("N", 3)}, {"y": ("N", 3)})
    tied = onnxfit.tie(model, {"v": "u"})
    assert [list(n.input) for n in tied.graph.node] == [["x", "u"], ["h", "u"]]
    assert np.array_equal(array_of(tied, "u"), u)
    # `untie` keeps what `tie` tied, and takes it apart by name
    assert names_of(onnxfit.untie(tied)) == {"u"}
    assert len(names_of(onnxfit.untie(tied, "u"))) == 2


def test_biases_that_were_tied_are_no_reason_to_warn() -> None:
    nodes = [node("Gemm", "x u a", "h"), node("Gemm", "h v b", "y")]
    tensors = {"u": random(3, 3), "v": random(3, 3, seed=1), "a": zeros(3), "b": zeros(3)}
    tied = onnxfit.tie(model_of(nodes, tensors, {"x": ("N", 3)}, {"y": ("N", 3)}), {"b": "a"})
    assert set(Trainer(tied, loss="mse").get_weights()) == {"u", "v", "a"}


def test_an_output_keeps_its_name() -> None:
    nodes = [node("Add", "x a", "y")]
    model = model_of(nodes, {"a": zeros(2), "b": random(2)}, {"x": (2,)}, {"y": (2,), "b": (2,)})
    tied = onnxfit.tie(model, {"b": "a"})
    assert [o.tolist() for o in run(tied, x=random(2))][1] == [0, 0]


def test_what_does_not_match_is_refused() -> None:
    model = language_model(random(4, 7), random(7, 4))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((7, 4)), "double"))
    with pytest.raises(SettingError, match=r"shapes are \(7,\) and \(7, 4\)"):
        onnxfit.tie(model, {"bias": "table"})
    with pytest.raises(SettingError, match="element types are DOUBLE and FLOAT"):
        onnxfit.tie(model, {"double": "table"})
    with pytest.raises(UnknownNameError, match="Did you mean 'table'"):
        onnxfit.tie(model, {"head": "tabel"})
    with pytest.raises(SettingError, match="itself replaced by 'table'"):
        onnxfit.tie(model, {"table": "head", "head": "table"})
    with pytest.raises(SettingError, match="pairs must be a dict"):
        onnxfit.tie(model, ["head"])  # type: ignore[arg-type]

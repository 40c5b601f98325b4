"""The summary of a trainer: settings, and a table of the weights by module."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

from onnxfit import SettingError, Trainer
from onnxfit.losses import CrossEntropy
from onnxfit.optimizers import SGD, Adam
from onnxfit.penalties import L2
from onnxfit.schedules import Cosine
from onnxfit.training.modules import entries_of, modules_of
from onnxfit.training.summary import MAX_ROWS, concise
from tests.models import convolutional, mlp


def chain(names: list[str]) -> onnx.ModelProto:
    """Return y = tanh(x w1) w2 ..., with weights of these names."""
    values = ["x", *(f"h{i}" for i in range(len(names) - 1)), "y"]
    nodes = " ".join(
        f"t{i} = Tanh({before}) {after} = Mul(t{i}, w{i})"
        for i, (before, after) in enumerate(itertools.pairwise(values))
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y) {{ {nodes} }}'
    )
    for i, name in enumerate(names):
        model.graph.initializer.append(from_array(np.ones(2, np.float32), name))
        model.graph.node[2 * i + 1].input[1] = name
    return model


@functools.cache
def deep() -> Trainer:
    """Return a trainer of 158 tensors in modules of three levels."""
    names = [
        f"layer{i}.{j}.{kind}.{tensor}"
        for i, j, kind, tensor in itertools.product(
            range(4), range(3), ("conv1", "conv2", "conv3", "bn1", "bn2", "bn3"), ("weight", "bias")
        )
    ]
    return Trainer(
        chain(["stem.weight", *names, *(f"head_bias{i}" for i in range(13))]), loss="mse"
    )


def rows(text: str) -> list[list[str]]:
    """Return the cells of the table, without the usual reason for being a weight."""
    table = text.split("\n\n")[1].replace("looks like one", "").splitlines()
    return [line.split() for line in (table[0], *table[2:])]


def test_weights_are_grouped_by_module_with_what_is_trained() -> None:
    settings = {"loss": "cross_entropy", "penalty": {"fc1.weight": 0.1}, "metrics": ["accuracy"]}
    text = Trainer(mlp(), "fc1*", optimizer="adam", clip_norm=1.0, **settings).summary()
    assert (
        text
        == """\
input      x: float32[N, 4]
output     y: float32[N, 3]
  loss     CrossEntropy()
           taken as logits: Gemm node 'fc1' computes the output
batch      axis 0 of x, y: the size 'N'
optimizer  Adam(learning_rate=0.001)
settings   metrics=['accuracy'], clip_norm=1.0

module    shape  output  size  trained  parameter       penalty
────────  ─────  ──────  ────  ───────  ──────────────  ──────────────
fc0              N×8       40  frozen   looks like one
  weight  4×8              32  frozen   looks like one
  bias    8                 8  frozen   looks like one
fc1              N×3       27  yes      looks like one  partly
  weight  8×3              24  yes      looks like one  L2(weight=0.1)
  bias    3                 3  yes      looks like one

total      67 numbers (268 B)
trained    27 numbers (108 B)
frozen     40 numbers (160 B)"""
    )


def test_running_statistics_and_the_order_of_the_model() -> None:
    text = Trainer(convolutional(), loss="cross_entropy").summary()
    table = rows(text)
    assert ["mean", "4", "4", "statistic"] in table
    assert ["bn", "N×4×8×8", "16", "yes"] in table
    assert [row[0] for row in table].index("bn") < [row[0] for row in table].index("fc")
    assert "statistics 8 numbers (32 B)" in text
    frozen = Trainer(convolutional(), ["fc*"], loss="cross_entropy", batch_norm="frozen").summary()
    assert ["bn", "N×4×8×8", "8", "frozen"] in rows(frozen)
    assert "batch_norm='frozen'" in frozen


def test_a_long_table_is_folded_and_can_be_shown_whole() -> None:
    table = rows(deep().summary())
    assert len(table) - 1 <= MAX_ROWS
    assert ["0", "12", "tensors", "N×2", "24", "yes"] in table
    assert ["stem.weight", "2", "N×2", "2", "yes"] in table  # the only tensor of its module
    assert len(rows(deep().summary(depth=1))) == 1 + 1 + 4 + 13
    whole = rows(deep().summary(depth=None))
    assert len(whole) == 1 + 158 + 4 + 4 * 3 + 4 * 3 * 6
    assert "total      316 numbers (1.3 kB)" in deep().summary()


def test_a_long_table_without_modules_lacks_its_middle() -> None:
    trainer = Trainer(chain([f"onnx::Mul_{i}" for i in range(100)]), loss="mse")
    table = rows(trainer.summary())
    assert len(table) - 1 == MAX_ROWS
    assert table[-1][0] == "onnx::Mul_99"
    assert ["…", "61", "more", "tensors", "122", "yes"] in table
    assert len(rows(trainer.summary(depth=None))) - 1 == 100


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, "all"])
def test_impossible_depths_are_refused(depth: object) -> None:
    with pytest.raises(SettingError, match="depth must be 'auto', a whole number"):
        deep().summary(depth=depth)  # type: ignore[arg-type]


def test_a_summary_fits_80_columns() -> None:
    long = "encoder." + "a_rather_long_name_of_a_layer" * 3
    optimizer = SGD(
        Cosine(0.1, 1000),
        momentum=0.9,
        exclude_from_weight_decay=("bias", "norm"),
        weight_decay=0.1,
    )
    trainer = Trainer(
        chain([f"{long}.w", f"{long}.b", "v"]),
        loss="mse",
        optimizer=optimizer,
        metrics=["mse", "mae"],
        seed=3,
    )
    text = trainer.summary()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" in text
    assert long in trainer.summary(depth=None)


def test_settings_are_shown_where_they_differ() -> None:
    assert concise(Adam()) == "Adam()"
    assert (
        concise(Adam(eps=1e-6), shown=["learning_rate"]) == "Adam(learning_rate=0.001, eps=1e-06)"
    )
    assert concise(SGD(Cosine(0.1, 40))).startswith("SGD(learning_rate=Cosine(")
    assert concise({"a": CrossEntropy(), "b": [L2(0.5), np.square]}) == (
        "{'a': CrossEntropy(), 'b': [L2(weight=0.5), square]}"
    )


def test_modules_of_names_with_slashes_and_odd_separators() -> None:
    names = ["/a/b/w", "/a/b/v", "/a/c", "d.", ".e", "f..g", "h"]
    entries = entries_of(modules_of(names), None)
    assert [(entry.level, entry.title) for entry in entries] == [
        (0, "/a"), (1, "b"), (2, "w"), (2, "v"), (1, "c"), (0, "d."), (0, ".e"), (0, "f..g"), (0, "h"),
    ]  # fmt: skip


def test_a_notebook_shows_a_table_in_which_names_are_escaped() -> None:
    names = ["<script>alert(1)</script>.w", "<script>alert(1)</script>.v", "\x1b[31mred"]
    trainer = Trainer(chain(names), loss="mse")
    for page in (trainer._repr_html_(), trainer.summary()._repr_html_()):  # type: ignore[attr-defined]
        assert "<script>" not in page
        assert "&lt;script&gt;alert(1)&lt;" in page
        assert "<table>" in page
    assert "\x1b" not in trainer._repr_html_() + trainer.summary()
    assert trainer._repr_html_().startswith("<p>Trainer: 0 epochs and 0 updates so far; learning")


def recorded() -> onnx.ModelProto:
    """Return a model with each kind of initializer, as torch's exporter records them."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2, 2] x) => (float[N, 2, 2] y)
        <float[2, 2] matrix = {1, 2, 3, 4}, float[2] grid = {1, 2}, float[2] made = {1, 2}, float[2, 2] mask = {0, -1e9, 0, 0},
         float[2] computed = {1, 2}, float[2] gain = {1, 2}, float half = {0.5}>
        { a = MatMul(x, matrix)  b = Add(a, grid)  c = Mul(b, made)  s = MatMul(c, x)  d = Add(s, mask)  e = Mul(d, computed)
          f = Mul(e, gain)  y = Mul(f, half) }"""
    )
    kind = "pkg.torch.export.graph_signature.InputSpec.kind"
    origins = "pkg.onnxscript.optimizer.folded_from"
    for name, key, note in (
        ("matrix", kind, "PARAMETER"), ("grid", kind, "BUFFER"), ("made", origins, "['x', 'ones_like']"),
        ("computed", origins, "['layers.0.attention.raw', 'val_1']"),
    ):  # fmt: skip
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])
        if name == "matrix":
            info.type.tensor_type.shape.dim.add().dim_value = 2
        info.metadata_props.add(key=key, value=note)
        model.graph.value_info.append(info)
    return model


def test_the_summary_and_the_inspection_say_why_tensors_are_weights() -> None:
    reasons = {
        "matrix": "recorded",
        "grid": "buffer",
        "made": "folded from x",
        "mask": "mask",
        "computed": "folded from …tention.raw",
        "gain": "looks like one",
    }
    with pytest.warns(UserWarning, match="'computed' from the parameters 'layers.0.attention.raw'"):
        trainer = Trainer(recorded(), loss="mse")
    found = trainer.inspect()
    assert {use.name: use.parameter for use in found.initializers} == reasons
    trained = {use.name for use in found.initializers if use.trains}
    assert trained == set(trainer.get_weights()) == {"matrix", "computed", "gain"}
    for text in (trainer.summary(), str(found)):
        lines = {line.split()[0]: line for line in text.splitlines() if line}
        for name, reason in reasons.items():
            assert lines[name].endswith(reason)
            assert ("yes" in lines[name]) == (name in trained)
    assert "frozen     8 numbers" in trainer.summary()


def test_tables_of_initializers_fit_into_80_columns() -> None:
    names = [f"encoder.layers.{i}.self_attention.output_projection.weight" for i in range(60)]
    trainer = Trainer(chain(names), loss="mse", penalty=0.125)
    for text in (trainer.summary(), str(trainer.inspect())):
        assert max(map(len, text.splitlines())) <= 80
    table = str(trainer.inspect())
    assert "… 60 more    yes     looks like one" in table
    assert len(table.splitlines()) < 20


def test_a_layer_in_the_body_of_an_if_is_listed() -> None:
    """Its weight belongs to the graph around the body."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x, bool c) => (float[N, 2] y)
        <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {1, 2}> {
            h = Add(x, b)
            y = If(c) <
                then_branch = t () => (float[N, 2] p) { p = MatMul(h, w) },
                else_branch = e () => (float[N, 2] q) { q = Identity(h) }
            >
        }""")
    text = str(Trainer(model, loss="mse", weights=["w", "b"]).summary())
    assert [row[0] for row in rows(text)] == ["module", "b", "w"]


def test_a_weight_that_is_declared_with_the_name_of_a_size() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y, float[N, 2] u)
        <float[2, 2] u = {1, 2, 3, 4}> { y = MatMul(x, u) }"""
    )
    trainer = Trainer(model, loss={"y": "mse"})
    assert [row[:3] for row in rows(trainer.summary())[1:]] == [["u", "2×2", "N×2"]]


def test_a_weight_that_only_a_body_reads() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x, bool c) => (float[N, 3] y)
        <float[2, 2] u = {1, 2, 3, 4}, float[2, 3] v = {1, 2, 3, 4, 5, 6}, float[3] b = {1, 2, 3}> {
        h = MatMul(x, u)  k = If (c) <
            then_branch = t () => (float[N, 3] p) { m = MatMul(h, v)  p = Tanh(m) },
            else_branch = e () => (float[N, 3] q) { q = MatMul(h, v) }>
        y = Add(k, b) }"""
    )
    found = [row[:3] for row in rows(Trainer(model, loss="mse").summary())[1:]]
    assert found == [["u", "2×2", "N×2"], ["v", "2×3", "N×3"], ["b", "3", "N×3"]]


def test_formulas_in_the_place_of_sizes_do_not_widen_the_table() -> None:
    """As the exporters of detectors write them."""
    size = "floor(floor(height/2 - 1/2)/2 + unk__1234_padded_height_of_the_image/32) + 1"
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        detector (float[N, 1, H, W] x) => (float[N, 2, P, Q] y) { y = Conv(x, weight) }""")
    model.graph.initializer.append(from_array(np.zeros((2, 1, 3, 3), np.float32), "weight"))
    for i, value in enumerate((model.graph.input[0], model.graph.output[0])):
        for axis in (2, 3):
            formula = size.replace("height", f"size_{i}_{axis}")
            value.type.tensor_type.shape.dim[axis].dim_param = formula
    text = Trainer(model, loss="mse").summary()
    assert max(map(len, text.splitlines())) <= 80
    assert "N×2×?×?" in text

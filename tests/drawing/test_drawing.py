"""A picture shows every node, input and output, safely and the same each time; the text says how
each tensor is computed.
"""

from __future__ import annotations

import base64
import copy
import html
import itertools
import os
import pickle
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
import pytest
from click.testing import CliRunner, Result
from onnx.numpy_helper import from_array

from onnxfit import (
    CheckpointError,
    InstallationError,
    ModelError,
    SettingError,
    Trainer,
    UnknownNameError,
    draw,
)
from onnxfit.cli import main
from onnxfit.drawing import picture
from onnxfit.graph import tensors
from onnxfit.graph.scopes import STAGES
from onnxfit.optimizers import SGD
from tests import models
from tests.models import convolutional, linear, mlp

SVG = "{http://www.w3.org/2000/svg}"


def train_step(model: onnx.ModelProto, **settings: object) -> onnx.ModelProto:
    trainer = Trainer(model, **{"loss": "mean_squared_error", **settings})
    return onnx.load_from_string(trainer.save_onnx_graph(bytes)["train"])


def text(model: object, **settings: object) -> str:
    drawn = draw(model, **settings)
    assert isinstance(drawn, str)
    return drawn


def svg(model: object, **settings: object) -> ET.Element:
    return ET.fromstring(text(model, format="svg", **settings))


def groups(root: ET.Element, kind: str) -> dict[str, ET.Element]:
    """Nodes, edges or clusters, by the title that a browser shows."""
    found = [g for g in root.iter(f"{SVG}g") if g.get("class") == kind]
    titled = {g.findtext(f"{SVG}title", ""): g for g in found}
    assert len(titled) == len(found) or kind == "edge"
    return titled


def words(group: ET.Element) -> list[str]:
    return [t.text or "" for t in group.iter(f"{SVG}text")]


def bounds(group: ET.Element) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of what is drawn."""
    numbers = []
    for shape in group.iter():
        if shape.tag in (f"{SVG}path", f"{SVG}polygon", f"{SVG}polyline"):
            numbers += [
                float(n)
                for n in re.findall(r"-?\d+(?:\.\d+)?", shape.get("d") or shape.get("points") or "")
            ]
    x, y = numbers[::2], numbers[1::2]
    return min(x), min(y), max(x), max(y)


MODELS = {
    "linear": lambda: linear(3, 2, b=0.0),
    "mlp": mlp,
    "cnn": lambda: convolutional(dropout=0.3),
    "linear step": lambda: train_step(linear(b=0.0)),
    "mlp step": lambda: train_step(mlp(), loss="cross_entropy", optimizer="adam", penalty=1e-4),
    "cnn step": lambda: train_step(
        convolutional(dropout=0.3), loss="cross_entropy", optimizer=SGD(momentum=0.9)
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> onnx.ModelProto:
    return MODELS[request.param]()


class TestPicture:
    def test_every_node_input_and_output_has_one_box(self, model: onnx.ModelProto) -> None:
        boxes = groups(svg(model), "node")
        shown = sorted(
            words(g)[0]
            for title, g in boxes.items()
            if not title.startswith(("input ", "weight ", "state ", "constant ", "output "))
        )
        assert shown == sorted(
            node.op_type for node in model.graph.node if node.op_type != "Constant"
        )
        for value in model.graph.input:
            assert any(
                title.split(" ", 1) == [kind, value.name]
                for title in boxes
                for kind in ("input", "weight", "state")
            )
        for value in model.graph.output:
            assert value.name in words(boxes[f"output {value.name}"])

    def test_boxes_do_not_overlap_and_lie_inside_the_picture(self, model: onnx.ModelProto) -> None:
        for depth in (None, 2, 1):
            root = svg(model, depth=depth)
            _, _, width, height = (float(n) for n in root.attrib["viewBox"].split())
            boxes = [bounds(g) for g in groups(root, "node").values()]
            assert all(
                0 <= right - left <= width and 0 <= bottom - top <= height
                for left, top, right, bottom in boxes
            )
            for a, b in itertools.combinations(boxes, 2):
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]

    def test_edges_lead_from_makers_to_readers(self, model: onnx.ModelProto) -> None:
        """As many pairs of boxes are joined as there are pairs of a node and what it reads."""
        makers = {
            name: node.output[0]
            for node in model.graph.node
            for name in node.output
            if name and node.op_type != "Constant"
        }
        makers.update({v.name: v.name for v in (*model.graph.input, *model.graph.initializer)})
        pairs = {
            (makers[name], node.output[0])
            for node in model.graph.node
            for name in node.input
            if name in makers
        }
        pairs |= {(makers[v.name], f"output {v.name}") for v in model.graph.output}
        root = svg(model)
        boxes = groups(root, "node")
        inline = {
            t.name
            for t in model.graph.initializer
            if not {f"constant {t.name}", f"weight {t.name}"} & set(boxes)
        }
        edges = [g for g in root.iter(f"{SVG}g") if g.get("class") == "edge"]
        assert len(edges) == len([pair for pair in pairs if pair[0] not in inline])

    def test_the_same_bytes_each_time(self, model: onnx.ModelProto) -> None:
        for form in ("svg", "text"):
            assert draw(model, format=form) == draw(model.SerializeToString(), format=form)
        assert draw(model, format="png", depth=2) == draw(model, format="png", depth=2)

    def test_the_same_bytes_in_another_process(self, tmp_path: Path) -> None:
        step = train_step(mlp(), optimizer="adam")
        onnx.save(step, tmp_path / "step.onnx")
        run = [sys.executable, "-m", "onnxfit", "draw", "step.onnx", "-o", "step.svg"]
        path = os.pathsep.join(
            [
                str(Path(__file__).resolve().parents[2]),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        )
        subprocess.run(
            run,
            cwd=tmp_path,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path},
        )
        draw(step, tmp_path / "again.svg")
        assert (tmp_path / "step.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()

    def test_the_parts_of_a_step_are_grouped_and_explained(self) -> None:
        root = svg(train_step(mlp(), loss="cross_entropy", optimizer="adam", penalty=1e-4))
        parts = ["model", "loss", "penalty", "gradient", "optimizer"]
        clusters = groups(root, "cluster")
        assert sorted(clusters) == sorted(f"cluster_{part}" for part in parts)
        (graph,) = groups(root, "graph").values()
        legend = [t.text.strip() for t in graph.findall(f"{SVG}text") if t.text]
        assert legend == ["model · 122 nodes", *parts, "input", "weight", "other state", "output"]
        left, top, right, bottom = bounds(clusters["cluster_penalty"])
        for title, box in groups(root, "node").items():
            x0, y0, x1, y1 = bounds(box)
            inside = left <= x0 and x1 <= right and top <= y0 and y1 <= bottom
            assert inside == (title.split(" ", 1)[1].startswith("penalty/"))

    @pytest.mark.parametrize("backend", ["full", "forward_backward"])
    def test_the_accumulation_of_gradients_is_a_stage_of_its_own(self, backend: str) -> None:
        trainer = Trainer(mlp(), loss="cross_entropy", accumulate=2, backend=backend)
        step = onnx.load_from_string(trainer.save_onnx_graph(bytes)["accumulate"])
        drawn = text(step, depth=1)
        assert "gradient accumulation\n" in drawn
        assert "[accumulation](" in drawn
        assert ("model\n" in drawn) == (backend == "full")

    def test_weights_and_state_are_told_apart(self) -> None:
        step = train_step(convolutional(), loss="cross_entropy", optimizer=SGD(momentum=0.9))
        titles = groups(svg(step), "node")
        assert {
            "weight conv.weight",
            "state conv.weight/velocity",
            "state bn.mean",
            "input x",
            "input y_true/logits",
        } <= set(titles)
        assert {"weight w", "weight b", "input x", "output y"} <= set(
            groups(svg(linear(b=0.0)), "node")
        )

    def test_shapes_stand_at_the_edges_and_in_the_boxes(self) -> None:
        root = svg(mlp())
        assert "float32[4, 8]" in words(groups(root, "node")["weight fc0.weight"])
        labels = {
            title: [word.strip() for word in words(g)] for title, g in groups(root, "edge").items()
        }
        assert labels == {
            "input x->Gemm fc0": [],
            "weight fc0.weight->Gemm fc0": [],
            "weight fc0.bias->Gemm fc0": [],
            "Gemm fc0->Tanh act0": ["float32[N, 8]"],
            "Tanh act0->Gemm fc1": ["float32[N, 8]"],
            "weight fc1.weight->Gemm fc1": [],
            "weight fc1.bias->Gemm fc1": [],
            "Gemm fc1->output y": [],
        }

    def test_a_large_graph_has_the_types_in_its_boxes(self) -> None:
        nodes = [oh.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(1000)]
        value = [oh.make_tensor_value_info(name, 1, ["N", 3]) for name in ("v0", "v1000")]
        large = oh.make_model(
            oh.make_graph(nodes, "large", value[:1], value[1:]),
            opset_imports=[oh.make_opsetid("", 17)],
            ir_version=8,
        )
        boxes = groups(svg(large), "node")
        assert len(boxes) == 1002
        assert words(boxes["Relu v1"]) == ["Relu", "→ float32[N, 3]"]
        assert len(groups(svg(large, depth=1), "node")) == 3

    def test_too_many_boxes_are_refused_with_the_cure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(picture, "MAX_BOXES", 10)
        step = train_step(linear())
        with pytest.raises(SettingError, match=r"boxes is too large.*depth=1 or more"):
            draw(step, format="svg")
        assert draw(step, format="svg", depth=1)

    def test_png(self, tmp_path: Path) -> None:
        data = draw(mlp(), tmp_path / "m.png")
        assert isinstance(data, bytes)
        assert data == (tmp_path / "m.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        viewed = [float(n) for n in svg(mlp()).attrib["viewBox"].split()[2:]]
        assert width == pytest.approx(viewed[0] * 96 / 72, rel=0.02)
        assert height == pytest.approx(viewed[1] * 96 / 72, rel=0.02)

    def test_without_graphviz_text_still_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pygraphviz", None)
        assert "MatMul" in text(linear())
        for form in ("svg", "png"):
            with pytest.raises(InstallationError, match=r'pip install "onnxfit\[draw\]"'):
                draw(linear(), format=form)


EVIL = [
    "a<b>&\"c'",
    "<b>bold</b>",
    "]]> --> <script>alert(1)</script>",
    "\\N \\G \\n",
    "&lt;",
    "\x1b[31mred\x00\n\u202e",
    "ünï·码",
    "x:y:z",
    "}; x -> y",
]


class TestStrangers:
    """Names come from a file that anybody may have written."""

    @staticmethod
    def evil(name: str) -> onnx.ModelProto:
        node = oh.make_node("MatMul", [name, f"{name}2"], [f"{name}3"], name=f"{name}4")
        other = oh.make_node(name, [f"{name}3"], [f"{name}5"], domain=name, **{"note": name})
        value = [oh.make_tensor_value_info(f"{name}{i}", 1, [name, 2]) for i in ("", 5)]
        graph = oh.make_graph(
            [node, other],
            name,
            value[:1],
            value[1:],
            [from_array(np.ones((2, 2), np.float32), f"{name}2")],
        )
        return oh.make_model(
            graph, opset_imports=[oh.make_opsetid("", 17), oh.make_opsetid(name, 1)], ir_version=8
        )

    @pytest.mark.parametrize("name", EVIL)
    def test_names_are_text_and_nothing_else(self, name: str) -> None:
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
        root = svg(self.evil(name))
        assert {e.tag.removeprefix(SVG) for e in root.iter()} <= {
            "svg",
            "g",
            "title",
            "text",
            "path",
            "polygon",
            "polyline",
        }
        boxes = groups(root, "node")
        assert words(boxes[f"input {shown}"])[0] == shown
        assert f"weight {shown}2" in boxes
        assert f"MatMul {shown}4" in boxes
        assert f"output {shown}5" in boxes
        assert len(boxes) == 5
        assert draw(self.evil(name), format="png")

    @pytest.mark.parametrize("name", EVIL)
    def test_text_has_no_control_characters(self, name: str) -> None:
        lines = text(self.evil(name)).split("\n")
        assert all(line.isprintable() for line in lines)
        assert any("MatMul(" in line for line in lines)

    def test_names_that_look_alike_are_two_boxes(self) -> None:
        both = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] z) { y = Relu(x) z'
            " = Relu(y) }"
        )
        for node in both.graph.node:
            node.name = "same"
        assert {"Relu same", "Relu same (2)"} <= set(groups(svg(both), "node"))


BODIES = """<ir_version: 8, opset_import: ["": 17]> g (float[2] x, float[2] outer, bool c) => (float[2] y) {
    y = If (c) <then_branch = t () => (float[2] a) { a = Add(x, outer) },
                else_branch = e () => (float[2] b) { r = Relu(x) b = Neg(r) }> }"""


class TestText:
    def test_a_line_per_node_grouped_by_part(self) -> None:
        lines = text(train_step(linear(b=0.0))).splitlines()
        assert lines[0] == "model: 18 nodes"
        titles = [line for line in lines[1:] if line and not line.startswith(" ")]
        assert titles == ["inputs", "weights", "model", "loss", "gradient", "optimizer", "outputs"]
        assert "  y: float32[N, 1] = Gemm(x, w, b)" in lines
        assert "  w/next: float32[1, 1] = Sub(w, optimizer/w/Mul.out)" in lines
        assert sum(" = " in line for line in lines) == 18

    def test_small_constants_are_written_where_they_are_used(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y)
            <float half = {0.5}, int64[5] long = {1, 2, 3, 4, 5}> {
            two = Constant <value_float = 2.0> () h = Mul(x, half) k = Pow(h, two) s = Gather(k, long) t = Clip(s, , two) y = Cast <to = 1> (t) }"""
        )
        drawn = text(model)
        assert "h: float32[N] = Mul(x, 0.5)" in drawn
        assert "k: float32[N] = Pow(h, 2)" in drawn
        assert "Gather(k, long)" in drawn
        assert "Clip(s, _, 2)" in drawn
        assert "Cast(t)  to=float32" in drawn
        assert "  long: int64[5]" in drawn
        assert "half" not in drawn

    def test_pictures_leave_default_attributes_out(self) -> None:
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (float[2,2] x) => (float[2,2] y) { y = Gemm'
            " <alpha = 1.0, transB = 1> (x, x) }"
        )
        assert "Gemm(x, x)  alpha=1 transB=1" in text(model)
        (node,) = (g for title, g in groups(svg(model), "node").items() if title.startswith("Gemm"))
        assert words(node) == ["Gemm", "transB = 1"]

    def test_bodies_are_counted_in_pictures_and_listed_in_text(self) -> None:
        model = onnx.parser.parse_model(BODIES)
        drawn = text(model)
        assert "If(c)  then_branch=1 node else_branch=2 nodes reads x, outer" in drawn
        assert "    then_branch() -> (a)\n      a: float32[2] = Add(x, outer)" in drawn
        root = svg(model)
        assert "else_branch = 2 nodes" in words(
            next(g for t, g in groups(root, "node").items() if t.startswith("If"))
        )
        assert len(groups(root, "edge")) == 4  # c, x and outer into the If, y out of it

    def test_depth_draws_a_scope_as_one(self) -> None:
        step = train_step(mlp(), loss="cross_entropy", optimizer="adam")
        drawn = text(step, depth=1)
        for part in ("model", "loss", "gradient", "optimizer"):
            (line,) = (line for line in drawn.splitlines() if f"[{part}](" in line)
            nodes = (
                sum(node.name.startswith(f"{part}/") for node in step.graph.node)
                if part != "model"
                else 3
            )
            assert f"  {nodes} nodes: " in line
        deeper = text(step, depth=2)
        assert "[optimizer/fc0.weight](" in deeper
        assert "h0: float32[N, 8] = Gemm(x, fc0.weight, fc0.bias)" in deeper
        assert text(step, depth=99) == text(step)

    def test_the_scopes_of_an_exported_model(self) -> None:
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { a = Relu(x) b'
            " = Neg(a) c = Abs(b) y = Exp(c) }"
        )
        for node, name in zip(
            model.graph.node, ["/layer1/conv/Relu", "/layer1/bn/Neg", "/layer2/Abs", "last"]
        ):
            node.name = name
        assert [line.strip() for line in text(model, depth=2).splitlines()[6:9]] == [
            "b: float32[N] = [model/layer1](x)  2 nodes: Relu, Neg",
            "c: float32[N] = Abs(b)",
            "y: float32[N] = Exp(c)",
        ]

    def test_what_cannot_be_trained_can_be_drawn(self) -> None:
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17, "my": 1]> g (float[N] x) => (seq(float[N]) y) {'
            " a = my.Odd(x) y = SequenceConstruct(a) }"
        )
        assert "a = my::Odd(x)" in text(model)
        assert "  y: sequence of float32[N]" in text(model)
        assert svg(model) is not None

    def test_nothing_is_changed(self) -> None:
        model = mlp()
        before = model.SerializeToString(deterministic=True)
        draw(model, format="svg")
        assert model.SerializeToString(deterministic=True) == before


class TestErrors:
    def test_formats(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnknownNameError, match=r"No format is called 'pdf'\. .*Known: png, svg, text"
        ):
            draw(linear(), format="pdf")
        with pytest.raises(SettingError, match=r"is not one of \.png, \.svg, \.txt"):
            draw(linear(), tmp_path / "model.jpg")
        assert draw(linear(), tmp_path / "model.jpg", format="svg") == (
            tmp_path / "model.jpg"
        ).read_text(encoding="utf-8").removesuffix("\n")

    @pytest.mark.parametrize("depth", [0, -1, 1.5, True, "1"])
    def test_depths(self, depth: object) -> None:
        with pytest.raises(SettingError, match=f"got {depth!r}"):
            draw(linear(), depth=depth)

    def test_files(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="There is no file"):
            draw(tmp_path / "none.onnx")
        with pytest.raises(ModelError, match="not an ONNX model"):
            draw(b"not a model")
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot be written"):
            draw(linear(), tmp_path / "file" / "m.svg")


class TestCommandLine:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        onnx.save(train_step(mlp()), tmp_path / "m.onnx")
        return tmp_path / "m.onnx"

    @staticmethod
    def call(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["draw", *map(str, arguments)])

    def test_text_to_standard_output(self, path: Path) -> None:
        result = self.call(path)
        assert result.exit_code == 0
        assert result.output == text(path) + "\n"
        assert self.call(path, "--depth", 1).output == text(path, depth=1) + "\n"

    def test_files_by_suffix(self, path: Path) -> None:
        for suffix, form in ((".svg", "svg"), (".png", "png"), (".txt", "text")):
            result = self.call(path, "-o", path.with_suffix(suffix))
            assert (result.exit_code, result.output) == (0, "")
            drawn = draw(path, format=form)
            data = drawn if isinstance(drawn, bytes) else drawn.encode()
            assert path.with_suffix(suffix).read_bytes().rstrip(b"\n") == data.rstrip(b"\n")

    def test_a_picture_to_standard_output(self, path: Path) -> None:
        assert self.call(path, "--format", "png").stdout_bytes == draw(path, format="png")

    def test_errors_are_one_message(self, path: Path) -> None:
        result = self.call(path, "-o", path.with_suffix(".jpg"))
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert self.call("none.onnx").exit_code == 2
        assert self.call(path, "--depth", 0).exit_code == 2
        assert "onnxfit draw model.onnx" in self.call("--help").output


def test_every_part_and_kind_has_its_looks() -> None:
    assert set(picture.COLOURS) == set(STAGES)
    assert set(picture.STYLES) == set(picture.KINDS)


class TestNotebook:
    """A notebook shows a drawing, and runs nothing of it."""

    @pytest.mark.parametrize("format_", ["svg", "png"])
    def test_a_picture_is_an_image(self, format_: str) -> None:
        drawn = draw(mlp(), format=format_)
        page = drawn._repr_html_()  # type: ignore[union-attr]
        encoded = re.fullmatch(r'<img src="data:image/[a-z+]+;base64,([\w+/=]+)" [^<>]*>', page)
        assert encoded
        data = drawn.encode() if isinstance(drawn, str) else drawn
        assert base64.b64decode(encoded[1]) == data

    def test_text_is_escaped(self) -> None:
        model = mlp()
        model.graph.name = "<script>alert(1)</script>"
        drawn = draw(model)
        page = drawn._repr_html_()  # type: ignore[union-attr]
        assert isinstance(drawn, str)
        assert page.startswith("<pre")
        assert "<script>" not in page
        assert html.unescape(re.sub("</?pre[^>]*>", "", page)) == drawn

    @pytest.mark.parametrize("format_", ["text", "svg", "png"])
    def test_a_drawing_can_be_copied_and_pickled(self, format_: str) -> None:
        drawn = draw(linear(), format=format_)
        for copied in (copy.deepcopy(drawn), pickle.loads(pickle.dumps(drawn))):
            assert copied == drawn
            assert copied._repr_html_() == drawn._repr_html_()  # type: ignore[union-attr]


def test_a_model_above_2_gb_is_drawn_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are lowered. A trainer of the model is drawn as the model."""
    model = models.mlp((4, 5000, 3))
    expected = draw(model)
    trainer = Trainer(model, loss="mse")
    assert draw(trainer) == expected
    monkeypatch.setattr(tensors, "MAX_COPIED_BYTES", 50_000)
    monkeypatch.setattr(tensors, "MAX_MODEL_BYTES", 60_000)
    infer = onnx.shape_inference.infer_shapes

    def limited(model: onnx.ModelProto, **settings: object) -> onnx.ModelProto:
        assert model.ByteSize() < 60_000, "ONNX raises an error above 2 GB"
        return infer(model, **settings)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", limited)
    assert draw(model) == expected
    assert draw(Trainer(model, loss="mse")) == expected


def test_only_trained_tensors_of_a_trainer_are_weights() -> None:
    drawn = draw(Trainer(models.mlp((4, 5, 3)), loss="mse", weights="fc1.*"))
    weights, constants = drawn.index("weights"), drawn.index("fc1.weight")
    assert weights < constants
    assert drawn.index("fc0.weight: ") > drawn.index("constants")


def test_a_notebook_shows_a_picture_as_wide_as_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygraphviz")
    model = models.mlp((4, 5, 3))
    assert draw(model).startswith("model: 3 nodes")
    monkeypatch.setattr("onnxfit.drawing.in_notebook", lambda: True)
    drawn = draw(Trainer(model, loss="mse"))
    assert drawn.startswith("<?xml")
    assert 'style="max-width: 100%"' in drawn._repr_html_()
    assert draw(model, format="text").startswith("model: 3 nodes")
    monkeypatch.setattr("onnxfit.drawing.find_spec", lambda name: None)
    assert draw(model).startswith("model: 3 nodes"), "without Graphviz"

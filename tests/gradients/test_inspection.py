"""What of a model trains is said before anything runs; the command line shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result

import onnxfit
from onnxfit import GradientError, Trainer, UnknownNameError
from onnxfit.cli import main
from onnxfit.gradients import coverage, rules  # noqa: F401
from onnxfit.gradients.table import DECOMPOSITIONS, NOT_DIFFERENTIABLE, RULES, SUBGRAPHS
from onnxfit.training.inspection import inspect
from tests.models import mlp

ROOT = Path(__file__).resolve().parents[2]


def parse(graph: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "my.domain": 1]> {graph}'
    )


BLOCKED = """g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}, float[2,2] v = {1,2,3,4}> {
    a = Round(x) h = MatMul(a, w) b = my.domain.Swish(h) k = MatMul(b, v) c = my.domain.Gate(k) y = Tanh(c) }"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


class TestNotebook:
    def test_a_notebook_shows_verdict_table_and_blockers(self) -> None:
        page = inspect(parse(BLOCKED))._repr_html_()
        assert page.startswith("<p>Does not train.")
        assert page.count("<li>") == 7  # two nodes, the batch axis and four facts
        assert "<b>BLOCKED</b>" in page

    def test_names_of_a_file_are_escaped(self) -> None:
        model = mlp()
        model.opset_import.add(domain="<b>", version=1)
        model.graph.node[0].domain = "<b>"
        model.graph.node[0].op_type = "<script>alert(1)</script>"
        model.graph.node[0].name = "<img src=x onerror=alert(1)>\x1b[31m"
        found = inspect(model)
        assert "<script>" not in found._repr_html_()
        assert "<img" not in found._repr_html_()
        assert "\x1b" not in found._repr_html_() + str(found)


EMBEDDING = (
    """g (int64[N, T] x) => (float[N, T, 2] y) <float[4, 2] e = {%s}> { y = Gather(e, x) }"""
)


class TestPadding:
    def test_a_row_of_zeros_is_named_with_its_setting(self) -> None:
        model = parse(EMBEDDING % "1, 2, 0, 0, 0, 3, 4, 0")
        found = inspect(model)
        assert found.padding_rows == (("e", 1),)
        line = (
            "Row 1 of e is zero, as with padding_idx. To keep it so, pass freeze_rows={'e': [1]}."
        )
        assert line in str(found).splitlines()
        trainer = Trainer(model, loss="mse", freeze_rows={"e": [1]})
        assert not trainer.inspect().padding_rows

    @pytest.mark.parametrize(
        "numbers", ["1, 2, 3, 4, 0, 5, 6, 7", "0, 0, 0, 0, 1, 2, 3, 4", "0, 0, 0, 0, 0, 0, 0, 0"]
    )
    def test_other_tables_have_none(self, numbers: str) -> None:
        assert not inspect(parse(EMBEDDING % numbers)).padding_rows

    def test_a_matrix_with_a_row_of_zeros_has_none(self) -> None:
        text = "g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {0,0,3,4}> { y = MatMul(x, w) }"
        assert not inspect(parse(text)).padding_rows


class TestInspect:
    def test_a_model_that_trains(self) -> None:
        found = inspect(mlp())
        assert found.trains
        assert found.source == "onnx"
        assert all(
            use.gradient == "a rule of its own" for use in found.operators if use.on_gradient_path
        )
        assert "Trains" in str(found)

    def test_every_blocker_at_once_with_its_cure(self) -> None:
        found = inspect(parse(BLOCKED))
        assert [b.op_type for b in found.blockers] == ["Swish", "Gate"]
        uses = {use.operator: use for use in found.operators}
        assert uses["my.domain::Swish"].gradient == "BLOCKED"
        assert uses["Round"].on_gradient_path == 0
        assert uses["MatMul"].nodes == uses["MatMul"].on_gradient_path == 2
        text = str(found)
        assert text.count("Fix:") == 2
        assert "onnxfit.gradients.register adds one" in text

    def test_freezing_what_is_before_the_blocker_cures_it(self) -> None:
        model = parse(BLOCKED.replace("c = my.domain.Gate(k) y = Tanh(c)", "y = Tanh(k)"))
        for value in (onnx.helper.make_tensor_value_info("b", 1, ["N", 2]),):
            model.graph.value_info.append(value)
        assert not inspect(model).trains
        found = inspect(model, ["v"])
        assert found.trains
        assert {u.operator: u.gradient for u in found.operators}["my.domain::Swish"] == "not needed"

    def test_the_trainer_says_the_same_before_anything_runs(self) -> None:
        with pytest.raises(GradientError, match=r"(?s)Swish.*Gate"):
            Trainer(parse(BLOCKED), loss="mean_squared_error")
        trainer = Trainer(mlp(), loss="cross_entropy", gradient="onnx")
        assert str(trainer.inspect()) == str(inspect(mlp(), gradient="onnx"))

    IDLE = """g (float[N,2] x) => (float[N,2] y, int64[N,1] best) <float[2,2] w = {1,2,3,4}, float[2] v = {1,2}, float[2] u = {1,2}> {
        h = MatMul(x, w) f = Floor(v) y = Add(h, f) best = ArgMax<axis = 1>(y) }"""

    def test_weights_that_lead_nowhere_are_named_and_the_rest_trains(self) -> None:
        found = inspect(parse(self.IDLE))
        assert found.trains
        assert found.weights == ("w",)
        assert found.idle == ("v", "u")
        assert found.outputs == ("y",)
        assert "Trains: 1 weight," in str(found)
        assert "No output depends on v, u" in str(found)
        assert {u.operator: u.on_gradient_path for u in found.operators} == {
            "Add": 1,
            "ArgMax": 0,
            "Floor": 0,
            "MatMul": 1,
        }

    def test_a_model_whose_outputs_depend_on_no_weight(self) -> None:
        for found in (
            inspect(parse(self.IDLE), ["v", "u"]),
            inspect(parse(self.IDLE.replace("float[N,2] y, ", ""))),
        ):
            assert not found.trains
            assert not found.blockers
            assert "Does not train: no output depends on a weight" in str(found)

    def test_outputs_by_name(self) -> None:
        model = parse(
            "g (float[N,2] x) => (float[N,2] left, float[N,2] le) <float[2,2] w = {1,2,3,4}> { left"
            " = Relu(x) le = MatMul(x, w) }"
        )
        assert inspect(model, outputs="le").trains
        assert inspect(model, outputs=["le"]).outputs == ("le",)
        assert not inspect(model, outputs="left").trains
        for name in ("best", "none"):
            with pytest.raises(UnknownNameError, match=f"No float output is called '{name}'"):
                inspect(parse(self.IDLE), outputs=[name])

    def test_a_sequence_of_floats_is_no_float_output(self) -> None:
        model = parse(
            "g (float[N,2] x) => (float[N,2] y, seq(float[N,2]) s) <float[2,2] w = {1,2,3,4}> { y ="
            " MatMul(x, w) s = SequenceConstruct(y) }"
        )
        assert inspect(model).outputs == ("y",)

    def test_outputs_that_name_nothing(self) -> None:
        found = inspect(mlp(), outputs=[])
        assert not found.trains
        assert "use outputs=None" in str(found)

    def test_nothing_is_changed(self) -> None:
        model = mlp()
        before = model.SerializeToString(deterministic=True)
        inspect(model)
        assert model.SerializeToString(deterministic=True) == before


WITHOUT_INITIALIZERS = "g (float[N,2] x, float[2,2] w) => (float[N,2] y) { y = MatMul(x, w) }"
INTEGERS = """g (int8[N,2] x) => (int32[N,2] y) <int8[2,2] w = {1,2,3,4}> {
    y = MatMulInteger(x, w) }"""
ONLY_SCALARS = "g (float[N] x) => (float[N] y) <float c = {2}> { y = Mul(x, c) }"
LABELS = """g (float[N,2] x) => (int64[N] label) <float[2,2] w = {1,2,3,4}> {
    scores = MatMul(x, w) best = ArgMax<axis = 1, keepdims = 0>(scores) label = Identity(best) }"""
ROUNDED = """g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> {
    h = MatMul(x, w) r = Round(h) y = Tanh(r) }"""
COUNTED = """g (float[N,2] x) => (float[M] y) <float[2] w = {1,2}> {
    s = Shape(w) f = Cast<to = 1>(s) y = Relu(f) }"""
UNUSED = """g (float[N,2] x) => (float[N,2] y) <float[2] w = {1,2}> {
    u = Exp(w) y = Tanh(x) }"""


class TestModelsThatCannotTrain:
    """They are explained, with a fix; nothing is raised."""

    @pytest.mark.parametrize("gradient", ["auto", "onnx"])
    @pytest.mark.parametrize(
        ("graph", "reason", "fix"),
        [
            (WITHOUT_INITIALIZERS, "has no float weights", "Fix: export the model with its param"),
            (INTEGERS, "none of its 1 initializers is a float", "Fix: train the float model"),
            (
                ONLY_SCALARS,
                "its float tensors (c) are constants",
                "To train them, pass their names",
            ),
            (LABELS, "None of the outputs is a float tensor: label", "add 'scores', the input of"),
            (ROUNDED, "No gradient flows through Round", "onnxfit.gradients.register"),
            (
                COUNTED,
                "No gradient flows through Shape",
                "make a value that is computed before it an output",
            ),
            (UNUSED, "y cannot be computed from w", "select other weights"),
        ],
        ids=str,
    )
    def test_the_text_says_why_and_how_to_fix_it(
        self, graph: str, reason: str, fix: str, gradient: str
    ) -> None:
        found = onnxfit.inspect(parse(graph), gradient=gradient)
        assert not found.trains
        assert found.weights == ()
        assert found.blockers == ()
        text = str(found)
        assert "Does not train: no output depends on a weight" in text
        assert any(reason in problem and fix in problem for problem in found.problems), text
        assert all(problem in text for problem in found.problems)
        assert {use.operator for use in found.operators} >= {
            node.op_type for node in parse(graph).graph.node if node.op_type != "Constant"
        }

    def test_half_precision_is_a_problem_whatever_the_optimizer(self) -> None:
        half = parse(
            "g (float16[N, 2] x) => (float16[N, 1] y) <float16[2, 1] w = {1, 2}>"
            " { y = MatMul(x, w) }"
        )
        (problem,) = onnxfit.inspect(half).problems
        assert "onnxfit.to_float32" in problem
        for optimizer in ("sgd", "adam"):
            with pytest.raises(onnxfit.GradientError, match=r"onnxfit\.to_float32"):
                onnxfit.Trainer(half, loss="mse", optimizer=optimizer)

    def test_integers_name_both_problems(self) -> None:
        problems = onnxfit.inspect(parse(INTEGERS)).problems
        assert len(problems) == 2
        assert "None of the outputs is a float tensor: y (INT32)" in problems[1]

    def test_blocked_operators(self) -> None:
        found = onnxfit.inspect(parse(BLOCKED))
        assert not found.trains
        assert str(found).count("Fix:") == 2
        assert found.problems == ()

    def test_weights_by_name_in_a_model_without_any(self) -> None:
        assert not onnxfit.inspect(parse(WITHOUT_INITIALIZERS), ["w"]).trains

    def test_mistakes_of_the_caller_are_errors(self) -> None:
        with pytest.raises(UnknownNameError, match="No weight is called 'v'"):
            onnxfit.inspect(parse(ROUNDED), ["v"])
        with pytest.raises(UnknownNameError, match="No gradient source is called 'torch'"):
            onnxfit.inspect(parse(ROUNDED), gradient="torch")

    def test_the_command_line_prints_it(self, tmp_path: Path) -> None:
        for graph in (WITHOUT_INITIALIZERS, INTEGERS, LABELS, ROUNDED, UNUSED):
            model = parse(graph)
            onnx.save(model, tmp_path / "m.onnx")
            result = call("inspect", tmp_path / "m.onnx")
            assert result.exit_code == 1
            assert result.output.strip() == str(onnxfit.inspect(model))
            found = json.loads(call("inspect", tmp_path / "m.onnx", "--json").output)
            assert found["problems"]

    def test_a_trainer_refuses_them_still(self) -> None:
        with pytest.raises(onnxfit.ModelError, match="no float weights"):
            Trainer(parse(WITHOUT_INITIALIZERS), loss="mean_squared_error")


class TestCoverage:
    def test_every_operator_of_onnx_is_spoken_for(self) -> None:
        """A rule, a rewriting, a definition, or the reason why it has no derivative: never an
        omission.
        """
        assert [o.name for o in coverage.operators() if o.gradient == "none"] == []

    def test_every_operator_of_the_installed_onnx_is_listed(self) -> None:
        listed = {(o.domain, o.op_type) for o in coverage.operators()}
        for schema in onnx.defs.get_all_schemas():
            if schema.domain in ("", "ai.onnx.preview"):
                assert ((schema.domain, schema.name) in listed) is not schema.deprecated, (
                    schema.name
                )

    def test_no_operator_stands_in_two_lists(self) -> None:
        lists = [set(t) for t in (RULES, DECOMPOSITIONS, SUBGRAPHS, NOT_DIFFERENTIABLE)]
        assert sum(map(len, lists)) == len(set().union(*lists))

    def test_a_definition_leads_to_operators_that_are_spoken_for(self) -> None:
        known = {o.op_type: o.gradient for o in coverage.operators()}
        for o in coverage.operators():
            if o.gradient == "function" and not o.domain:
                schema = onnx.defs.get_schema(o.op_type)
                for node in schema.function_body.node if schema.has_function else ():
                    assert known[node.op_type] != "none"

    def test_the_page_is_current(self) -> None:
        page = (ROOT / "docs/operators.md").read_text(encoding="utf-8")
        current = coverage.as_markdown()
        written = int(re.search(r"from opset 13 to (\d+)", page)[1])
        if onnx.defs.onnx_opset_version() >= written:
            assert page == current, "docs/operators.md is out of date: make docs"
        else:  # an older onnx has fewer operators
            rows = [line for line in current.splitlines() if line.startswith("| ")]
            assert set(rows) <= set(page.splitlines())


class TestCommandLine:
    def test_help_names_the_commands(self) -> None:
        text = call("--help").output
        assert "inspect" in text
        assert "ops" in text
        assert "onnxfit inspect model.onnx" in call("inspect", "--help").output

    def test_inspect(self, tmp_path: Path) -> None:
        onnx.save(mlp(), tmp_path / "m.onnx")
        result = call("inspect", tmp_path / "m.onnx")
        assert result.exit_code == 0
        assert result.output.strip() == str(inspect(mlp()))
        found = json.loads(call("inspect", tmp_path / "m.onnx", "--json").output)
        assert found["trains"] is True
        assert {u["operator"] for u in found["operators"]} == {
            node.op_type for node in mlp().graph.node
        }

    def test_inspect_exits_with_1_where_the_model_does_not_train(self, tmp_path: Path) -> None:
        onnx.save(parse(BLOCKED), tmp_path / "m.onnx")
        result = call("inspect", tmp_path / "m.onnx")
        assert result.exit_code == 1
        assert "Does not train" in result.output
        assert "Traceback" not in result.output

    def test_inspect_exits_with_1_where_no_weight_trains(self, tmp_path: Path) -> None:
        onnx.save(parse(TestInspect.IDLE), tmp_path / "m.onnx")
        assert call("inspect", tmp_path / "m.onnx").exit_code == 0
        result = call("inspect", tmp_path / "m.onnx", "--json", "-w", "u")
        assert result.exit_code == 1
        assert json.loads(result.output)["idle"] == ["u"]

    def test_errors_are_one_message(self, tmp_path: Path) -> None:
        (tmp_path / "m.onnx").write_bytes(b"not a model")
        result = call("inspect", tmp_path / "m.onnx")
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert call("inspect", tmp_path / "none.onnx").exit_code == 2
        assert "Did you mean 'Conv'" in call("ops", "Comv").output

    def test_ops(self) -> None:
        lines = call("ops").output.splitlines()
        assert any(line.startswith("MatMul ") and "rule" in line for line in lines)
        assert len(call("ops", "Conv", "LSTM").output.splitlines()) == 6
        assert [o["op_type"] for o in json.loads(call("ops", "Conv", "--json").output)] == ["Conv"]
        assert call("ops", "--markdown").output == coverage.as_markdown()

    @pytest.mark.parametrize("rest", ["Conv", "--json"])
    def test_the_whole_page_goes_with_nothing_else(self, rest: str) -> None:
        result = call("ops", "--markdown", rest)
        assert result.exit_code == 2
        assert "--markdown prints the whole page" in result.output

    def test_version(self) -> None:
        """From a checkout that is not installed, too."""
        result = call("--version")
        assert result.exit_code == 0
        assert onnxfit.__version__ in result.output


def test_weights_only_through_what_has_no_derivative() -> None:
    model = parse(
        "g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> { h = MatMul(x, w) y ="
        " Round(h) }"
    )
    with pytest.raises(ValueError, match="No weight has a gradient path"):
        Trainer(model, loss="mean_squared_error")


def test_the_nodes_that_make_an_output_probabilities_are_named() -> None:
    """Also if they spell the activation, and not for other outputs."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 2] p, float[N, 2] q, float[N, 2] z)
        <float[2, 2] w = {1, 2, 3, 4}, int64[1] axis = {1}> {
            z = MatMul(x, w)  p = Sigmoid(z)
            e = Exp(z)  s = ReduceSum(e, axis)  q = Div(e, s)
        }""")
    for node in model.graph.node:
        node.name = f"head/{node.output[0]}"
    inspection = onnxfit.inspect(model)
    spelled = "3 nodes from Exp node 'head/e' to Div node 'head/q' compute the output as a Softmax"
    assert inspection.probabilities == (
        ("p", "Sigmoid node 'head/p' computes the output"),
        ("q", spelled),
    )
    assert f"q is probabilities: {spelled}." in str(inspection).splitlines()

"""Files of newer opsets keep the operators that onnxruntime runs; others become their definitions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit import GradientError, Quantization, Trainer, gradient_model
from onnxfit.errors import ModelError
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load import newer_operators
from onnxfit.load.newer_operators import PREVIEW
from onnxfit.load.normalize import normalize
from onnxfit.load.opset import OPSET
from onnxfit.load.reading import read_model
from onnxfit.load.runtime_support import newest_opset
from onnxfit.optimizers import Adam
from tests.graph.graphs import parse

NEWEST = onnx.defs.onnx_opset_version()
# Operator -> a body with inputs x and w of shape (2, 3, 4), and the opset that the operator needs.
BODIES = {
    "RMSNormalization": ("y = RMSNormalization(x, v)", 23),
    "Attention": ("y = Attention<is_causal=1, q_num_heads=2, kv_num_heads=1>(x, k, k)", 23),
    "RotaryEmbedding": ("a = RotaryEmbedding<num_heads=1>(x, c, c, p) y = Add(a, w)", 23),
    "Swish": ("h = Swish<alpha=1.5>(x) y = Mul(h, w)", 24),
    "TensorScatter": ("u = Slice(w, zero, one, one) y = TensorScatter<axis=1>(x, u)", 24),
    "CumProd": ("y = CumProd<exclusive=1>(x, axis)", 26),
    "CausalConvWithState": ('y, z = CausalConvWithState<activation="silu">(x, f)', 27),
    "LinearAttention": (
        'y, z = LinearAttention<q_num_heads=2, kv_num_heads=2, update_rule="linear">(x, w, x)',
        27,
    ),
    "SwiGLU": ("y = SwiGLU<alpha=1.5>(x, w)", 28),
}
BY_DEFINITION = sorted(set(BODIES) - {"TensorScatter", "CumProd"})


def of_onnx(*op_types: str) -> list[object]:
    """The operators as parameters, skipped if the installed onnx is older than the operator."""
    reason = f"onnx {onnx.__version__} does not have it"
    return [
        pytest.param(o, marks=pytest.mark.skipif(not onnx.defs.has(o), reason=reason))
        for o in op_types
    ]


def model_of(body: str, opset: int = NEWEST) -> onnx.ModelProto:
    return parse(
        f"""<ir_version: 10, opset_import: ["": {opset}]>
        g (float[2,3,4] x, float[2,3,4] w) => (float[2,3,4] y)
        <float[4] v = {{1, 2, 3, 4}}, float[3,1,3] f = {{1, 2, 3, 4, 5, 6, 7, 8, 9}},
         float[3,2] c = {{0.1, 0.2, 0.3, 0.4, 0.5, 0.6}}, int64[2,3] p = {{0, 1, 2, 2, 0, 1}},
         float[2,3,2] k = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6}}, int64 axis = {{1}},
         int64[1] zero = {{0}}, int64[1] one = {{1}}, bool yes = {{1}}> {{ {body} }}"""
    )


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(2, 3, 4)).astype(np.float32) for name in ("x", "w")}


def normalized(model: onnx.ModelProto) -> onnx.ModelProto:
    return ir.to_proto(normalize(read_model(model)))


def run(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    given = {i.name: feeds()[i.name] for i in session.get_inputs()}
    return session.run(None, given)[0]


def computes_the_same(found: onnx.ModelProto, model: onnx.ModelProto) -> None:
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds())
    np.testing.assert_allclose(run(found), expected, rtol=1e-5, atol=1e-5)


def opset_and_operators(model: onnx.ModelProto) -> tuple[int, set[str]]:
    return model.opset_import[0].version, {node.op_type for node in nodes_of(model.graph)}


@pytest.fixture
def old_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime that reads opset 21, as 1.19 and 1.20 do."""
    monkeypatch.setattr(newer_operators, "newest_opset", lambda: 21)


def test_every_operator_that_came_after_opset_21_is_tried() -> None:
    schemas = onnx.defs.get_all_schemas_with_history()
    old = {s.name for s in schemas if s.domain == "" and s.since_version <= OPSET}
    new = {s.name for s in schemas if s.domain == ""} - old
    assert new <= {*BODIES, "BitCast"}  # BitCast has no derivative, and a test of its own


@pytest.mark.parametrize("op_type", of_onnx(*BODIES))
def test_an_operator_stays_where_onnxruntime_runs_it(op_type: str) -> None:
    body, needed = BODIES[op_type]
    if needed > newest_opset() and op_type not in BY_DEFINITION:
        pytest.skip("it is newer than the installed onnxruntime: the test below has the error")
    model = model_of(body)
    found = normalized(model)
    opset, operators = opset_and_operators(found)
    if op_type not in operators:  # as SwiGLU and others in the onnxruntimes of today
        file = model_of(body)
        file.opset_import[0].version = needed
        with pytest.raises(Exception, match=r"NOT_IMPLEMENTED|opset|not a registered"):
            run(file)
    else:
        assert opset == needed <= newest_opset()
    computes_the_same(found, model)


@pytest.mark.parametrize("op_type", of_onnx(*BY_DEFINITION))
def test_an_old_onnxruntime_gets_the_definition(op_type: str, old_runtime: None) -> None:
    model = model_of(BODIES[op_type][0])
    found = normalized(model)
    opset, operators = opset_and_operators(found)
    assert opset == OPSET
    assert not operators & set(BODIES)
    computes_the_same(found, model)


@pytest.mark.parametrize("op_type", of_onnx("Swish", "SwiGLU"))
def test_an_operator_inside_a_branch_is_replaced_too(op_type: str, old_runtime: None) -> None:
    inputs = "x, w" if op_type == "SwiGLU" else "x"
    model = model_of(
        f"""y = If (yes) <then_branch = t () => (float[2,3,4] a) {{ a = {op_type}({inputs}) }},
            else_branch = e () => (float[2,3,4] o) {{ o = Identity(x) }}>"""
    )
    found = normalized(model)
    assert opset_and_operators(found)[0] == OPSET
    computes_the_same(found, model)


@pytest.mark.parametrize("op_type", of_onnx("TensorScatter", "CumProd"))
def test_an_operator_without_a_definition_is_named(op_type: str, old_runtime: None) -> None:
    body, needed = BODIES[op_type]
    with pytest.raises(
        ModelError,
        match=rf"^{op_type} 'y' needs opset {needed}, but the installed onnxruntime reads opsets up"
        r" to 21, and .* Install a newer onnxruntime, or export the model again with opset 21\.$",
    ):
        normalize(read_model(model_of(body)))


@pytest.mark.parametrize("opset", range(22, NEWEST + 1))
@pytest.mark.parametrize(
    "body",
    [
        "n = LayerNormalization(x, v) d = Clip(n, , ) y = Softmax(d)",
        "s = Shape(x) r = Reshape(x, s) i = Identity(r) t = Transpose(i) u = Transpose(t) y = Cos(u)",
        "m = Mod<fmod = 1>(x, w) d = Celu(m) e = Elu(d) y = Softplus(e)",
    ],
)
def test_a_file_without_newer_operators_is_trained_in_the_oldest_opset(
    body: str, opset: int
) -> None:
    model = model_of(body, opset)
    found = normalized(model)
    assert found.opset_import[0].version == OPSET
    computes_the_same(found, model)


@pytest.mark.skipif(NEWEST < 24, reason=f"onnx {onnx.__version__} has no Swish")
def test_a_newer_operator_does_not_deny_another_its_kernel() -> None:
    """onnxruntime 1.32 has no kernel for RoiAlign of opset 22, so Swish is written out."""
    model = parse(
        f"""<ir_version: 10, opset_import: ["": {NEWEST}]>
        g (float[1,1,4,4] x) => (float[1,1,1,1] y) <float[1,4] r = {{0, 0, 3, 3}}, int64[1] i = {{0}}>
        {{ s = Swish(x) y = RoiAlign(s, r, i) }}"""
    )
    found = normalized(model)
    session = onnxruntime.InferenceSession(found.SerializeToString())
    x = np.random.default_rng(0).normal(size=(1, 1, 4, 4)).astype(np.float32)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5)


@pytest.mark.skipif(NEWEST < 26, reason=f"onnx {onnx.__version__} has no CumProd")
@pytest.mark.skipif(newest_opset() < 26, reason="the installed onnxruntime has no CumProd")
def test_operators_that_onnxruntime_runs_in_different_opsets_run_together() -> None:
    """onnxruntime 1.32 runs Swish in opset 24 only, and CumProd needs opset 26."""
    model = model_of("s = Swish(x) y = CumProd(s, axis)")
    computes_the_same(normalized(model), model)


@pytest.mark.skipif(not onnx.defs.has("FlexAttention", PREVIEW), reason="onnx does not have it")
@pytest.mark.parametrize("opset", [18, NEWEST])
@pytest.mark.parametrize("mod", ["", "<score_mod = f (float[1,2,3,3] s) => (t) { t = Add(s, m) }>"])
def test_an_operator_of_the_preview_domain_is_replaced(mod: str, opset: int) -> None:
    model = parse(
        f"""<ir_version: 10, opset_import: ["": {opset}, "{PREVIEW}": 1]>
        g (float[1,2,3,4] q, float[3] m) => (float[1,2,3,4] y)
        {{ y = {PREVIEW}.FlexAttention{mod}(q, q, q) }}"""
    )
    found = normalized(model)
    assert "FlexAttention" not in opset_and_operators(found)[1]
    rng = np.random.default_rng(0)
    q, m = rng.normal(size=(1, 2, 3, 4)).astype(np.float32), np.float32([1, 0, -1])
    scores = q @ q.transpose(0, 1, 3, 2) / 2 + (m if mod else 0)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    session = onnxruntime.InferenceSession(found.SerializeToString())
    np.testing.assert_allclose(session.run(None, {"q": q, "m": m})[0], weights @ q, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "field", "newest"),
    [("opset", "opset", NEWEST), ("IR version", "ir_version", int(onnx.IR_VERSION))],
)
def test_a_file_newer_than_onnx_says_what_to_install(kind: str, field: str, newest: int) -> None:
    model = model_of("y = Add(x, w)")
    if field == "opset":
        model.opset_import[0].version = newest + 1
    else:
        model.ir_version = newest + 1
    with pytest.raises(
        ModelError,
        match=rf"has {kind} {newest + 1}, but the installed onnx .* reads {kind}s up to {newest}\."
        r" Install a newer onnx",
    ):
        read_model(model)


@pytest.mark.parametrize("opset", range(22, NEWEST + 1))
def test_a_file_of_every_newer_opset_trains_and_keeps_its_opset(opset: int) -> None:
    new = {23: "RMSNormalization(h, s)", 24: "Swish(h)", 28: "SwiGLU(h, h)"}
    form = new[max(o for o in new if o <= opset)] if opset >= 23 else "Elu(h)"
    model = parse(
        f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[N,3] x) => (float[N,3] y)
        <float[3,3] w = {{1, 0, 1, 0, 1, 0, 1, 1, 0}}, float[3] s = {{1, 1, 1}}>
        {{ h = MatMul(x, w) y = {form} }}"""
    )
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    trainer = Trainer(model, loss="mse", optimizer=Adam(0.05))
    losses = [trainer.train_on_batch(x, np.tanh(x))["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    exported = trainer.export()
    assert exported.opset_import == model.opset_import
    assert exported.ir_version == model.ir_version
    assert exported.graph.node == model.graph.node
    (expected,) = onnx.reference.ReferenceEvaluator(exported).run(None, {"x": x})
    np.testing.assert_allclose(trainer.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(newest_opset() < 24, reason="onnx or onnxruntime has no Swish")
def test_the_step_has_an_old_opset_once_the_newer_operator_is_differentiated() -> None:
    model = parse(
        """<ir_version: 10, opset_import: ["": 24]> g (float[N,3] x) => (float[N,3] y)
        <float[3,3] w = {1, 0, 1, 0, 1, 0, 1, 1, 0}> { h = MatMul(x, w) y = Swish(h) }"""
    )
    graphs = Trainer(model, loss="mse").save_onnx_graph(bytes)
    opsets = {
        name: onnx.ModelProto.FromString(g).opset_import[0].version for name, g in graphs.items()
    }
    assert (opsets["train"], opsets["predict"]) == (OPSET, 24)
    slope = gradient_model(model, "w")
    assert slope.opset_import[0].version == OPSET


@pytest.mark.skipif(newest_opset() < 26, reason="onnx or onnxruntime has no CumProd")
@pytest.mark.parametrize(
    ("taught", "teaching"),
    [
        ("y = Swish(h)", "y = Softplus(h)"),
        ("y = Softplus(h)", "y = Swish(h)"),
        ("y = CumProd(h, axis)", "y = Swish(h)"),
        ("y = Swish(h)", "y = CumProd(h, axis)"),
    ],
)
def test_a_teacher_may_have_another_opset(taught: str, teaching: str) -> None:
    def model(body: str) -> onnx.ModelProto:
        return parse(
            f"""<ir_version: 10, opset_import: ["": 26]> g (float[N,3] x) => (float[N,3] y)
            <int8[3,3] q = {{9, 1, 2, 1, 8, 1, 2, 1, 7}}, float s = {{0.1}}, int64 axis = {{1}}>
            {{ w = DequantizeLinear(q, s) h = MatMul(x, w) {body} }}"""
        )

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    trainer = Trainer(
        model(taught),
        loss="mse",
        quantization=Quantization(weights="q"),
        teacher=model(teaching),
        optimizer=Adam(0.05),
    )
    losses = [trainer.train_on_batch(x, x)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(newest_opset() < 27, reason="onnx or onnxruntime does not have it")
def test_a_definition_that_needs_unknown_sizes_says_so() -> None:
    model = parse(
        """<ir_version: 10, opset_import: ["": 27]> g (float[N,C,L] x) => (float[N,C,L] y)
        <float[3,1,2] w = {1, 2, 3, 4, 5, 6}>
        { s = Shape(x) r = Reshape(w, s) y, z = CausalConvWithState(x, r) }"""
    )
    with pytest.raises(GradientError, match=r"its ONNX definition needs sizes of its inputs. Fix"):
        gradient_model(model, "w")


@pytest.mark.skipif(newest_opset() < 26, reason="onnx or onnxruntime has no BitCast")
def test_bits_read_as_another_type_have_no_gradient() -> None:
    model = parse(
        """<ir_version: 10, opset_import: ["": 26]> g (float16[2] x) => (float[2] y)
        { b = BitCast<to = 16>(x) y = Cast<to = 1>(b) }"""
    )
    with pytest.raises(GradientError, match=r"BitCast .* it reads the bits of a number as another"):
        gradient_model(model, "x")


@pytest.mark.skipif(newest_opset() < 23, reason="onnx or onnxruntime has no Attention")
def test_an_attention_of_unknown_width_has_no_sizes_of_zero() -> None:
    """ONNX 1.23 infers that its output has no elements."""
    model = parse(
        """<ir_version: 10, opset_import: ["": 23]> g (float[B,S,W] x) => (float[B,S,W] y)
        { y = Attention<q_num_heads = 2, kv_num_heads = 2>(x, x, x) }"""
    )
    slope = gradient_model(model, "x")
    session = onnxruntime.InferenceSession(slope.SerializeToString())
    x = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    y, dx = session.run(None, {"x": x, "y_grad": np.ones_like(x)})
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert dx.shape == x.shape


@pytest.mark.skipif(newest_opset() < 23, reason="onnx or onnxruntime has no Attention")
def test_the_shapes_in_a_definition_are_known_to_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a file that has the definitions. Else the gradient computes shapes in every step."""
    model = parse(
        """<ir_version: 10, opset_import: ["": 23]> g (float[N,3,4] x) => (float[N,3,4] y)
        <float[4,4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, float[4] s = {1, 1, 1, 1}>
        { m = MatMul(x, w) n = RMSNormalization(m, s)
          y = Attention<q_num_heads = 2, kv_num_heads = 2, is_causal = 1>(n, n, n) }"""
    )

    def operators() -> list[Counter[str]]:
        step = Trainer(model, loss="mse").save_onnx_graph(bytes)["train"]
        slope = gradient_model(model, ["w", "s"], gradient="onnx")
        graphs = (onnx.ModelProto.FromString(step).graph, slope.graph)
        return [Counter(node.op_type for node in graph.node) for graph in graphs]

    found = operators()
    monkeypatch.setattr(newer_operators, "newest_opset", lambda: 21)
    assert found == operators()


@pytest.mark.skipif(newest_opset() < 28, reason="Mod of floats needs opset 28")
def test_mod_of_floats_beside_operators_without_a_kernel_there() -> None:
    """onnxruntime 1.32 has no QuantizeLinear of opset 28, and ONNX no definition of Mod."""
    divisors = np.array([2, -2, 0.7, -0.7], np.float32)
    model = parse(
        f"""<ir_version: 13, opset_import: ["": 28]> g (float[N, 4] x) => (float[N, 4] y)
        <float scale = {{0.125}}, uint8 zero = {{128}}, float[4] d = {{{",".join(map(str, divisors))}}}>
        {{ q = QuantizeLinear(x, scale, zero)  r = DequantizeLinear(q, scale, zero)
           y = Mod(r, d) }}"""
    )
    assert normalize(read_model(model)).opset_imports[""] < 28
    x = np.random.default_rng(0).integers(-100, 100, (32, 4)).astype(np.float32) / 8
    expected = np.mod(x, divisors)
    np.testing.assert_allclose(Trainer(model).predict(x), expected, atol=1e-6)

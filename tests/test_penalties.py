"""Penalties: values by hand, gradients against finite differences, and which weight gets which
penalty.
"""

import json

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.gradients.backward import add_gradients
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.values import GraphBuilder
from onnxfit.penalties import L1, L2, ElasticNet, Penalty, get_penalty, penalties_for
from onnxfit.registry import from_config, registry, to_config

REGISTRY = registry("onnxfit.penalties", Penalty)
VARIANTS = [
    *{cls: cls() for cls in REGISTRY.values()}.values(),
    L1(0.5),
    L2(2.0),
    ElasticNet(0.5, 2.0),
    ElasticNet(0.0, 1.0),
]
every_penalty = pytest.mark.parametrize("penalty", VARIANTS, ids=repr)

FORMULAS = {
    "L1": lambda p, w: p.weight * np.abs(w).sum(),
    "L2": lambda p, w: p.weight * (w**2).sum(),
    "ElasticNet": lambda p, w: p.l1 * np.abs(w).sum() + p.l2 * (w**2).sum(),
}


def run(penalty, w):
    """The penalty of a weight, and its gradient."""
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="penalty"))
    cost = penalty(op, op.input("w", w.dtype, w.shape))
    assert (cost.dtype, cost.shape) == (w.dtype, ())
    op.output("penalty", cost)
    model, names = add_gradients(infer_shapes(ir.Model(op.graph, ir_version=10)), "penalty", ["w"])
    op = GraphBuilder(model.graph)
    op.output(
        "gradient",
        op.wrap(next(v for node in model.graph for v in node.outputs if v.name == names["w"])),
    )
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(["penalty", "gradient"], {"w": w})


def test_every_penalty_has_a_formula_here():
    assert sorted(FORMULAS) == sorted({cls.__name__ for cls in REGISTRY.values()})


@every_penalty
@pytest.mark.parametrize("shape", [(), (3,), (4, 3), (2, 3, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradient(penalty, shape, dtype):
    w = np.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    wide, formula = w.astype(float), FORMULAS[type(penalty).__name__]
    cost, g = run(penalty, w)
    rtol = 1e-5 if dtype == np.float32 else 1e-8
    assert cost == pytest.approx(formula(penalty, wide), rel=rtol)
    assert g.shape == shape
    for i in np.ndindex(shape):
        step = np.zeros(shape)
        step[i] = 1e-6
        expected = (formula(penalty, wide + step) - formula(penalty, wide - step)) / 2e-6
        assert g[i] == pytest.approx(expected, rel=max(rtol, 1e-6), abs=1e-7)


@every_penalty
def test_no_weight_no_cost_and_no_pull(penalty):
    cost, g = run(penalty, np.zeros(3, np.float32))
    assert cost == 0
    assert not g.any()


@every_penalty
@pytest.mark.parametrize("shape", [(0,), (0, 3)], ids=str)
def test_an_empty_weight_costs_nothing(penalty, shape):
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="penalty"))
    w, v = op.input("w", np.float64, shape), op.input("v", np.float64, (2,))
    op.output("penalty", penalty(op, w) + penalty(op, v))
    model, _ = add_gradients(infer_shapes(ir.Model(op.graph, ir_version=10)), "penalty", ["v"])
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    v = np.array([1.0, -2.0])
    assert session.run(["penalty"], {"w": np.zeros(shape), "v": v}) == pytest.approx(
        [FORMULAS[type(penalty).__name__](penalty, v)]
    )


@every_penalty
def test_settings_survive_json(penalty):
    assert from_config(json.loads(json.dumps(to_config(penalty))), "onnxfit.penalties") == penalty


WEIGHTS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        (None, {}),
        ({}, {}),
        (0.1, dict.fromkeys(WEIGHTS, L2(0.1))),
        (np.float32(0.5), dict.fromkeys(WEIGHTS, L2(0.5))),
        (0, dict.fromkeys(WEIGHTS, L2(0))),
        ("l1", dict.fromkeys(WEIGHTS, L1())),
        ("ElasticNet", dict.fromkeys(WEIGHTS, ElasticNet())),
        (L1, dict.fromkeys(WEIGHTS, L1())),
        (L1(3), dict.fromkeys(WEIGHTS, L1(3))),
        ({"fc1.bias": 1}, {"fc1.bias": L2(1)}),
        (
            {"*.weight": {"l1": 1, "l2": 2}},
            {"fc1.weight": ElasticNet(1, 2), "fc2.weight": ElasticNet(1, 2)},
        ),
        (
            {"fc2.*": {"l1": 1}, "fc1.bias": {"l2": 2}},
            {
                "fc1.bias": ElasticNet(0, 2),
                "fc2.weight": ElasticNet(1, 0),
                "fc2.bias": ElasticNet(1, 0),
            },
        ),
        # the first pattern that matches, but a name of its own before any pattern
        (
            {"fc1.*": 1, "*.bias": 2, "fc1.bias": 3},
            {"fc1.weight": L2(1), "fc1.bias": L2(3), "fc2.bias": L2(2)},
        ),
        ({"*.bias": None, "*": "l1"}, {"fc1.weight": L1(), "fc2.weight": L1()}),
        ({"*": 1, "fc1.weight": None}, {"fc1.bias": L2(1), "fc2.weight": L2(1), "fc2.bias": L2(1)}),
    ],
    ids=str,
)
def test_which_weight_gets_which(penalty, expected):
    found = penalties_for(penalty, WEIGHTS)
    assert found == expected
    assert list(found) == [name for name in WEIGHTS if name in expected]


def test_a_name_with_brackets_is_a_name_first():
    assert penalties_for({"w[0]": 1, "*": 2}, ["w[0]", "w0"]) == {"w[0]": L2(1), "w0": L2(2)}


def test_a_pattern_without_a_weight_lists_the_weights():
    with pytest.raises(UnknownNameError) as raised:
        penalties_for({"*.bias": 1, "fc1.wieght": 1}, WEIGHTS)
    assert (
        str(raised.value)
        == "No trained weight is called 'fc1.wieght'. Did you mean 'fc1.weight'? Known: fc1.bias,"
        " fc1.weight, fc2.bias, fc2.weight."
    )
    with pytest.raises(UnknownNameError, match=r"No trained weight is called 'conv\*'\."):
        penalties_for({"conv*": 1}, WEIGHTS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: L1(-1), "L1 needs a finite weight >= 0, got -1."),
        (lambda: L2(float("nan")), "L2 needs a finite weight >= 0, got nan."),
        (lambda: L2(True), "L2 needs a finite weight >= 0, got True."),
        (lambda: L2("0.1"), "L2 needs a finite weight >= 0, got '0.1'."),
        (lambda: ElasticNet(l2=float("inf")), "ElasticNet needs a finite l2 >= 0, got inf."),
        (lambda: get_penalty("l3"), "No penalty is called 'l3'. Did you mean"),
        (
            lambda: get_penalty(True),
            "A penalty must be a Penalty, a number (L2), a name or {'l1': a, 'l2': b}, got True.",
        ),
        (lambda: get_penalty({"l3": 1}), "got {'l3': 1}."),
        (
            lambda: penalties_for({"l1": 0.1, "l2": 0.2}, WEIGHTS),
            "matches no weight. For every weight, use penalty={'*': {'l1': 0.1, 'l2': 0.2}}.",
        ),
        (
            lambda: penalties_for({3: 0.1}, WEIGHTS),
            "penalty= must map names of weights and patterns to penalties, got the key 3.",
        ),
        (lambda: penalties_for({"*": -1}, WEIGHTS), "L2 needs a finite weight >= 0, got -1.0."),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(SettingError) as raised:
        make()
    assert message in str(raised.value)


def test_names():
    aliases = [n for cls in set(REGISTRY.values()) for n in vars(cls).get("aliases", ())]
    assert len(REGISTRY) == len(set(REGISTRY.values())) + len(aliases)
    assert {name: type(get_penalty(name)) for name in REGISTRY} == REGISTRY

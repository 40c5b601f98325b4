"""RNN, GRU and LSTM against ONNX's definition in float64, written out in numpy; and against torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxfit.errors import GradientError
from onnxfit.gradients.backward import gradients
from onnxfit.gradients.blocker import refuse
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from tests.gradients.rules.cases import (
    Arrays,
    Case,
    Run,
    built,
    in_double,
    meets_differences,
    runner,
    same,
    seeds,
)
from tests.gradients.rules.cases.recurrent import CONFIGURATIONS, recurrent

Array = np.ndarray[Any, Any]
OPS = ("RNN", "GRU", "LSTM")

# Name: default alpha and beta (None where it has none), the function
FUNCTIONS: dict[str, tuple[float | None, float | None, Callable[..., Array]]] = {
    "Relu": (None, None, lambda x, a, b: np.maximum(x, 0)),
    "Tanh": (None, None, lambda x, a, b: np.tanh(x)),
    "Sigmoid": (None, None, lambda x, a, b: 1 / (1 + np.exp(-x))),
    "Affine": (1.0, 0.0, lambda x, a, b: a * x + b),
    "LeakyRelu": (0.01, None, lambda x, a, b: np.where(x >= 0, x, a * x)),
    "ThresholdedRelu": (1.0, None, lambda x, a, b: np.where(x >= a, x, 0)),
    "ScaledTanh": (1.0, 1.0, lambda x, a, b: a * np.tanh(b * x)),
    "HardSigmoid": (0.2, 0.5, lambda x, a, b: np.clip(a * x + b, 0, 1)),
    "Elu": (1.0, None, lambda x, a, b: np.where(x >= 0, x, a * np.expm1(x))),
    "Softsign": (None, None, lambda x, a, b: x / (1 + np.abs(x))),
    "Softplus": (None, None, lambda x, a, b: np.log1p(np.exp(x))),
}


def definition(op: str, attributes: dict[str, Any], x: Array, w: Array, r: Array, b: Array | None = None, lens: Array | None = None,
               h0: Array | None = None, c0: Array | None = None, p: Array | None = None) -> list[Array]:  # fmt: skip
    """The outputs of a node, step by step and sequence by sequence, as ONNX defines them."""
    if attributes.get("layout"):
        x = x.swapaxes(0, 1)
        h0, c0 = (s if s is None else s.swapaxes(0, 1) for s in (h0, c0))
    time, batch, _ = x.shape
    count, hidden = w.shape[0], r.shape[2]
    lens = np.full(batch, time) if lens is None else lens
    ways = {"forward": [1], "reverse": [-1], "bidirectional": [1, -1]}[
        attributes.get("direction", "forward")
    ]
    each = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}[op]
    alphas, betas = (list(attributes.get(f"activation_{k}") or []) for k in ("alpha", "beta"))
    functions = []
    for name in attributes.get("activations") or each * count:
        alpha, beta, function = FUNCTIONS[name]
        alpha = alphas.pop(0) if alpha is not None and alphas else alpha
        beta = betas.pop(0) if beta is not None and betas else beta
        # onnxruntime does not clip what goes into h
        unclipped = op == "LSTM" and len(functions) % 3 == 2
        bound = np.inf if unclipped else attributes.get("clip") or np.inf
        functions.append(
            lambda z, function=function, a=alpha, b=beta, bound=bound: function(
                np.clip(z, -bound, bound), a, b
            )
        )
    y = np.zeros((time, count, batch, hidden))
    last_h, last_c = np.zeros((2, count, batch, hidden))
    for d, way in enumerate(ways):
        fs = functions[d * len(each) : (d + 1) * len(each)]
        wb, rb = np.zeros((2, w.shape[1])) if b is None else np.split(b[d], 2)
        for n in range(batch):
            h, c = (np.zeros(hidden) if s is None else s[d, n] for s in (h0, c0))
            for t in range(lens[n])[::way]:
                h, c = cell(
                    op,
                    attributes,
                    x[t, n],
                    h,
                    c,
                    w[d],
                    r[d],
                    wb,
                    rb,
                    np.zeros(3 * hidden) if p is None else p[d],
                    fs,
                )
                y[t, d, n] = h
            if lens[n]:  # onnxruntime's last state of an empty sequence is zero
                last_h[d, n], last_c[d, n] = h, c
    if attributes.get("layout"):
        y, last_h, last_c = y.transpose(2, 0, 1, 3), last_h.swapaxes(0, 1), last_c.swapaxes(0, 1)
    return [y, last_h, last_c][: 3 if op == "LSTM" else 2]


def cell(
    op: str, attributes: dict[str, Any], x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array, p: Array, fs: list[Any]
) -> tuple[Array, Array]:  # fmt: skip
    if op == "RNN":
        return fs[0](w @ x + r @ h + wb + rb), c
    if op == "GRU":
        f, g = fs
        (wz, wr, wh), (rz, rr, rh) = np.split(w, 3), np.split(r, 3)
        (wbz, wbr, wbh), (rbz, rbr, rbh) = np.split(wb, 3), np.split(rb, 3)
        z = f(wz @ x + rz @ h + wbz + rbz)
        reset = f(wr @ x + rr @ h + wbr + rbr)
        new = (
            g(wh @ x + reset * (rh @ h + rbh) + wbh)
            if attributes.get("linear_before_reset")
            else g(wh @ x + rh @ (reset * h) + rbh + wbh)
        )
        return (1 - z) * new + z * h, c
    f, g, last = fs
    ai, ao, af, ac = np.split(w @ x + r @ h + wb + rb, 4)
    pi, po, pf = np.split(p, 3)
    i = f(ai + pi * c)
    forget = 1 - i if attributes.get("input_forget") else f(af + pf * c)
    c = forget * c + i * g(ac)
    return f(ao + po * c) * last(c), c


def node_of(model: onnx.ModelProto) -> onnx.NodeProto:
    (node,) = [n for n in model.graph.node if n.op_type in OPS]
    return node


def outputs_of(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """What the model's recurrent node gives, by name of its output, from what it is fed."""
    node = node_of(model)
    given = {**feeds, **{i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}}
    attributes = {a.name: _text(onnx.helper.get_attribute_value(a)) for a in node.attribute}
    made = definition(node.op_type, attributes, *(given.get(name) for name in node.input))
    return {name: array for name, array in zip(node.output, made) if name}


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(v) for v in value]
    return value.decode() if isinstance(value, bytes) else value


def defined(model: onnx.ModelProto) -> Run:
    """The model in float64 on onnxruntime, with the recurrent node, for which it has no such
    kernel, as defined above.
    """
    rest = onnx.ModelProto.FromString(model.SerializeToString())
    node = node_of(rest)
    known = {v.name for v in rest.graph.input}
    for name in node.output:
        if name:
            rest.graph.input.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None)
            )
    rest.graph.node.remove(node)
    for i, value in enumerate(list(rest.graph.output)):
        if value.name in node.output:  # an input cannot be an output
            rest.graph.node.append(
                onnx.helper.make_node("Identity", [value.name], [f"{value.name}/out"])
            )
            rest.graph.output[i].name = f"{value.name}/out"
    run = runner(rest, "onnxruntime")

    def whole(feeds: Arrays) -> Arrays:
        found = run({**{n: a for n, a in feeds.items() if n in known}, **outputs_of(model, feeds)})
        return {n.removesuffix("/out"): a for n, a in found.items()}

    return whole


@cache
def judged(case: Case) -> tuple[Arrays, Arrays, Arrays]:
    """Inputs, arriving gradients, and the gradient in float64 after it has met the differences of
    the definition.
    """
    feeds = in_double(case.feeds())
    arriving = in_double(seeds(case, defined(case.model(double=True))(feeds)))
    run = defined(built(case.model(double=True), case.outputs, case.wrt, arriving, runs="").model)
    found = run({**feeds, **arriving})
    meets_differences(
        run, case.outputs, case.wrt, feeds, arriving, {n: found[f"{n}_grad"] for n in case.wrt}
    )
    return feeds, arriving, found


def ids(cases: Sequence[Case]) -> list[Any]:
    return [pytest.param(c, id=c.name) for c in cases]


# onnxruntime has no kernel for batches first
RUNNABLE = [c for c in CONFIGURATIONS if "layout=1" not in c.body]
SMOOTH = [
    c
    for c in RUNNABLE
    if any(
        word in c.name
        for word in (
            "everything given",
            "lengths bidirectional",
            "two directions",
            "after",
            "peepholes",
            "coupled",
        )
    )
]


@pytest.mark.parametrize("case", ids(RUNNABLE))
def test_the_definition_is_what_onnxruntime_computes(case: Case) -> None:
    feeds = case.feeds()
    same(
        runner(case.model(), "onnxruntime")(feeds),
        defined(case.model(double=True))(in_double(feeds)),
        case.outputs,
        1e-4,
        "forward",
    )


@pytest.mark.parametrize("case", ids(CONFIGURATIONS))
def test_the_gradient_meets_central_differences_of_the_definition(case: Case) -> None:
    judged(case)


@pytest.mark.table
@pytest.mark.parametrize("case", ids(RUNNABLE))
def test_the_gradient_in_float32_is_close_for_any_sizes(case: Case) -> None:
    _, arriving, expected = judged(case)
    arriving = {n: a.astype(np.float32) for n, a in arriving.items()}
    found = built(case.model("any"), case.outputs, case.wrt, arriving).run(
        {**case.feeds(), **arriving}
    )
    same(found, expected, [f"{n}_grad" for n in case.wrt], 1e-3, "any sizes")


@pytest.mark.parametrize("case", ids(SMOOTH))
def test_the_gradient_can_be_differentiated_again(case: Case) -> None:
    feeds, arriving, expected = judged(case)
    first = [f"{n}_grad" for n in case.wrt]
    work = normalize(
        built(case.model(double=True), case.outputs, case.wrt, arriving, runs="").model
    )
    op = GraphBuilder(work.graph)
    values = {v.name: v for v in work.graph.inputs}
    outer = {
        i: op.input(f"{v.name}_grad", np.float64, expected[v.name or ""].shape)
        for i, v in enumerate(list(work.graph.outputs))
        if v.name in first
    }
    found, blocking = gradients(op, outer, [values[n] for n in (*case.wrt, *arriving)])
    refuse(blocking)
    for value, gradient in found.items():
        op.output(f"{value.name}_second", gradient)
    run = defined(ir.to_proto(work))
    rng = np.random.default_rng(3)
    given = {**feeds, **arriving}
    weights = {f"{n}_grad": rng.uniform(0.5, 1.5, expected[n].shape) for n in first}
    results = run({**given, **weights})
    second = {v.name or "": results[f"{v.name}_second"] for v in found}
    assert set(second) == {*case.wrt, *arriving}
    meets_differences(run, first, list(second), given, weights, second, tolerance=1e-5)


@pytest.mark.parametrize("lengths", ["0, 3", "3, 0"])
# of an RNN, onnxruntime leaves that state uninitialised
@pytest.mark.parametrize("op", ["GRU", "LSTM"])
def test_an_empty_sequence_gives_no_gradient(op: str, lengths: str) -> None:
    case = recurrent(f"empty sequence {lengths}", op, made="y h", lengths=lengths, d=2)
    same(
        runner(case.model(), "onnxruntime")(case.feeds()),
        defined(case.model(double=True))(in_double(case.feeds())),
        case.outputs,
        1e-4,
        "forward",
    )
    judged(case)


@pytest.mark.parametrize("op", OPS)
def test_what_stands_in_the_padding_does_not_matter(op: str) -> None:
    case = recurrent("padded", op, made="y h", lengths="2, 1", d=2)
    feeds, arriving, expected = judged(case)
    x = np.array(feeds["x"])
    x[2:, 0] = x[1:, 1] = np.nan
    given = {n: np.asarray(a, np.float32) for n, a in {**feeds, "x": x, **arriving}.items()}
    found = built(case.model(), case.outputs, case.wrt, {n: given[n] for n in arriving}).run(given)
    same(found, expected, [f"{n}_grad" for n in case.wrt], 1e-3, "with NaN in the padding")
    assert not found["x_grad"][np.isnan(x)].any()


def test_numbers_that_runtimes_do_not_agree_about_are_refused() -> None:
    for op, name, more in (
        ("RNN", "LeakyRelu", {}), ("RNN", "HardSigmoid", {"activation_alpha": [0.3]}), ("GRU", "Affine", {"activation_alpha": [0.3]}),
        ("LSTM", "ThresholdedRelu", {}), ("LSTM", "ScaledTanh", {"activation_alpha": [0.5, 0.5, 0.5], "activation_beta": [1.0, 1.0]}),
    ):  # fmt: skip
        case = recurrent(
            "refused", op, activations=[name] * {"RNN": 1, "GRU": 2, "LSTM": 3}[op], **more
        )
        with pytest.raises(
            GradientError,
            match=f"different values of (alpha|beta) for its activation '{name}'",
        ):
            built(
                case.model(),
                case.outputs,
                case.wrt,
                seeds(case, {"y": np.zeros((3, 1, 2, 2))}),
                runs="",
            )
    case = recurrent(
        "whose is the beta",
        "RNN",
        d=2,
        activations=["Tanh", "HardSigmoid"],
        activation_alpha=[0.3],
        activation_beta=[0.5],
    )
    with pytest.raises(GradientError, match="different values of alpha"):
        built(
            case.model(),
            case.outputs,
            case.wrt,
            seeds(case, {"y": np.zeros((3, 2, 2, 2))}),
            runs="",
        )


# torch's order of the gates in ONNX's, by place
GATES = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}


@pytest.mark.torch
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_the_gradient_is_that_of_torch(op: str, directions: int, packed: bool) -> None:
    torch = pytest.importorskip("torch")
    time, batch, inputs, hidden = 5, 3, 4, 3
    lengths = [2, 5, 3]
    torch.manual_seed(0)
    layer = getattr(torch.nn, op)(inputs, hidden, bidirectional=directions == 2)
    x = torch.randn(time, batch, inputs, requires_grad=True)
    states = {
        s: torch.randn(directions, batch, hidden, requires_grad=True)
        for s in ("h", "c")[: 1 + (op == "LSTM")]
    }
    given = tuple(states.values()) if op == "LSTM" else states["h"]
    pack, unpack = torch.nn.utils.rnn.pack_padded_sequence, torch.nn.utils.rnn.pad_packed_sequence
    y, last = layer(pack(x, lengths, enforce_sorted=False) if packed else x, given)
    results = {
        "y": unpack(y)[0] if packed else y,
        **dict(zip(("y_h", "y_c"), last if op == "LSTM" else [last])),
    }
    results["y"] = results["y"].reshape(time, batch, directions, hidden).transpose(1, 2)
    seeds_ = {f"{n}_grad": torch.randn(v.shape) for n, v in results.items()}
    sum((v * seeds_[f"{n}_grad"]).sum() for n, v in results.items()).backward()

    def weights(kind: str, of: Callable[[Any], Any]) -> Array:
        """A parameter of all directions (or its gradient) in ONNX's order of the gates."""
        each = [
            of(getattr(layer, f"{kind}_l0{way}")).detach().numpy()
            for way in ("", "_reverse")[:directions]
        ]
        return np.stack(
            [np.concatenate([np.split(one, len(GATES[op]))[k] for k in GATES[op]]) for one in each]
        )

    def parameters(of: Callable[[Any], Any]) -> Arrays:
        b = np.concatenate([weights("bias_ih", of), weights("bias_hh", of)], axis=1)
        return {"w": weights("weight_ih", of), "r": weights("weight_hh", of), "b": b}

    feeds = {
        "x": x.detach().numpy(),
        **parameters(lambda p: p),
        **{n: s.detach().numpy() for n, s in states.items()},
    }
    inputs_text = ", ".join(f"float{list(a.shape)} {n}" for n, a in feeds.items())
    attributes = {
        "hidden_size": hidden,
        **({"direction": '"bidirectional"'} if directions == 2 else {}),
        **({"linear_before_reset": 1} if op == "GRU" else {}),
    }
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs_text}) => ({", ".join(results)})'
        f" <int32[3] l = {{2, 5, 3}}> {{ {', '.join(results)} = "
        f"{op}<{', '.join(f'{k}={v}' for k, v in attributes.items())}>(x, w, r, b,"
        f" {'l' if packed else ''}, {', '.join(states)}) }}"
    )
    arriving = {n: v.numpy() for n, v in seeds_.items()}
    found = built(model, list(results), list(feeds), arriving).run({**feeds, **arriving})
    same(found, {n: v.detach().numpy() for n, v in results.items()}, list(results), 1e-5, "forward")
    expected = {
        "x": x.grad.numpy(),
        **parameters(lambda p: p.grad),
        **{n: s.grad.numpy() for n, s in states.items()},
    }
    same(
        found,
        {f"{n}_grad": a for n, a in expected.items()},
        [f"{n}_grad" for n in expected],
        1e-4,
        "gradient",
    )


@pytest.mark.parametrize(("lengths", "runs_in"), [("", "Scan"), ("lengths", "LSTM")])
def test_the_steps_of_a_usual_lstm_are_run_once(lengths: str, runs_in: str) -> None:
    """In a Scan, which also makes its outputs; with padding, the node makes them."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 21]>
        g (float[4,2,3] x, float[1,20,3] w, float[1,20,5] r{", int32[2] lengths" if lengths else ""}) => (float[4,1,2,5] y)
        {{ y = LSTM<hidden_size = 5>(x, w, r{", , lengths" if lengths else ""}) }}""")
    graph = ir.from_proto(
        built(
            model, ["y"], ["x", "w", "r"], {"y_grad": np.ones((4, 1, 2, 5), np.float32)}, runs=""
        ).model
    ).graph
    y, waiting, made = graph.outputs[0], [graph.outputs[0].producer()], set()
    while waiting:
        node = waiting.pop()
        if node is not None:
            made.add(node.op_type)
            waiting += [v.producer() for v in node.inputs if v is not None]
    assert y.name == "y"
    assert {"Scan", "LSTM"} & made == {runs_in}

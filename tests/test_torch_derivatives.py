"""Second and higher derivatives of an ONNX model inside PyTorch equal those of the same network in
PyTorch; a derivative that cannot be computed is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit.gradients import table
from tests.builds import needs_builder

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad, functional  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from onnxfit.torch import OnnxModule  # noqa: E402

pytestmark = pytest.mark.torch
torch.set_num_threads(1)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ONNX_TYPES = {torch.float64: "double", torch.float32: "float"}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Network(NamedTuple):
    """The same network as ONNX text, as shapes of its weights, and as a function of torch."""

    text: str
    weights: dict[str, tuple[int, ...]]
    function: Callable
    input: tuple[int, ...]
    types: tuple = (torch.float64, torch.float32)


def torch_layer_norm(x, dim, w):
    return F.layer_norm(x, (6,), w["scale"], w["shift"], eps=1e-5)


def torch_batch_norm(x, dim, w):
    return F.batch_norm(x, None, None, w["scale"], w["shift"], training=True, eps=1e-5)


def by_definition(x, dim, w):
    """Both normalizations. The third derivatives of torch's own operators are wrong."""
    centred = x - x.mean(dim, keepdim=True)
    deviation = (centred.square().mean(dim, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * w["scale"] + w["shift"]


def _mlp(w, x):
    return torch.tanh(x @ w["w1"].T + w["b1"]) @ w["w2"].T + w["b2"]


def _cnn(w, x):
    h = F.max_pool2d(F.softplus(F.conv2d(x, w["k1"], w["c1"], padding=1)), 2)
    h = F.avg_pool2d(torch.sigmoid(F.conv2d(h, w["k2"], w["c2"])), 2)
    return h.flatten(1) @ w["w"].T + w["b"]


def _attention(w, x, normalize=torch_layer_norm, activation=F.gelu):
    n = normalize(x, -1, w)
    q, k, v = n @ w["q"], n @ w["k"], n @ w["v"]
    x = x + torch.softmax(q @ k.transpose(1, 2) * 0.5, dim=-1) @ v
    return (activation(x @ w["up"] + w["c"]) @ w["down"]).mean(dim=1)


def _normalized(w, x, normalize=torch_batch_norm):
    return torch.tanh(normalize(x @ w["w1"], 0, w)) @ w["w2"]


TRANSFORMER = """g (T[N, 3, 6] x) => (T[N, 1] y)
    { n = LayerNormalization<axis=-1>(x, scale, shift) q1 = MatMul(n, q) k1 = MatMul(n, k) v1 = MatMul(n, v)
      kt = Transpose<perm=[0, 2, 1]>(k1) s = MatMul(q1, kt) f = Constant<value_float=0.5>() g = CastLike(f, s)
      z = Mul(s, g) p = Softmax<axis=-1>(z) o = MatMul(p, v1) r = Add(x, o)
      u = MatMul(r, up) e = Add(u, c) l = Gelu(e) t = MatMul(l, down) one = Constant<value_ints=[1]>()
      y = ReduceMean<keepdims=0>(t, one) }"""
TRANSFORMER_WEIGHTS = {
    **{"scale": (6,), "shift": (6,), "q": (6, 6), "k": (6, 6), "v": (6, 6)},
    **{"up": (6, 8), "c": (8,), "down": (8, 1)},
}
NETWORKS = {
    "mlp": Network(
        """g (T[N, 4] x) => (T[N, 1] y)
        { h = Gemm<transB=1>(x, w1, b1) a = Tanh(h) y = Gemm<transB=1>(a, w2, b2) }""",
        {"w1": (8, 4), "b1": (8,), "w2": (1, 8), "b2": (1,)},
        _mlp,
        (5, 4),
    ),
    "cnn": Network(
        """g (T[N, 2, 6, 6] x) => (T[N, 1] y)
        { h = Conv<pads=[1, 1, 1, 1]>(x, k1, c1) s = Softplus(h) p = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(s)
          d = Conv(p, k2, c2) a = Sigmoid(d) m = AveragePool<kernel_shape=[2, 2], strides=[2, 2]>(a)
          f = Flatten(m) y = Gemm<transB=1>(f, w, b) }""",
        {"k1": (3, 2, 3, 3), "c1": (3,), "k2": (4, 3, 2, 2), "c2": (4,), "w": (1, 4), "b": (1,)},
        _cnn,
        (3, 2, 6, 6),
        (torch.float32,),
    ),
    # onnxruntime has no kernels of Conv and Erf in double precision
    "transformer": Network(
        TRANSFORMER, TRANSFORMER_WEIGHTS, _attention, (2, 3, 6), (torch.float32,)
    ),
    "transformer, SiLU": Network(
        TRANSFORMER.replace("l = Gelu(e)", "gate = Sigmoid(e) l = Mul(e, gate)"),
        TRANSFORMER_WEIGHTS,
        partial(_attention, activation=F.silu),
        (2, 3, 6),
    ),
    "batch statistics": Network(
        """g (T[N, 4] x) => (T[N, 1] y)
        { h = MatMul(x, w1) n = BatchNormalization(h, scale, shift, mean, var) a = Tanh(n) y = MatMul(a, w2) }""",
        {"w1": (4, 6), "scale": (6,), "shift": (6,), "w2": (6, 1)},
        _normalized,
        (7, 4),
    ),
}
every_network = pytest.mark.parametrize("name", NETWORKS)
every_network_and_type = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}, {ONNX_TYPES[dtype]}")
        for name, network in NETWORKS.items()
        for dtype in network.types
    ],
)


class Pair(NamedTuple):
    """A module and the same network in torch, with weights of the same values and order."""

    module: OnnxModule
    weights: dict[str, torch.Tensor]
    twin: Callable
    twin_weights: dict[str, torch.Tensor]
    x: torch.Tensor


def pair(name: str, dtype=None, **settings) -> Pair:
    network = NETWORKS[name]
    dtype = dtype or network.types[0]
    text = network.text.replace("T[", f"{ONNX_TYPES[dtype]}[")
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')
    drawn = {n: 0.5 * torch.randn(shape, dtype=dtype) for n, shape in network.weights.items()}
    constants = {"mean": torch.zeros(6, dtype=dtype), "var": torch.ones(6, dtype=dtype)}
    arrays = {**drawn, **(constants if name == "batch statistics" else {})}
    model.graph.initializer.extend(from_array(a.numpy(), n) for n, a in arrays.items())
    module = OnnxModule(model, threads=1, **settings)
    twins = {n: w.clone().requires_grad_() for n, w in drawn.items()}
    weights = dict(module.named_weights())
    x = torch.randn(network.input, dtype=dtype)
    twin = {n: twins[n] for n in weights}
    return Pair(module, weights, lambda x: network.function(twin, x), twin, x)


def close(ours, theirs) -> bool:
    """Whether tensors are equal, relative to the largest number of all; None counts as zeros."""
    (dtype,) = {b.dtype for b in theirs if b is not None}
    largest = max(b.abs().max() for b in theirs if b is not None)
    assert largest > 1e-3
    return len(ours) == len(theirs) and all(
        (0 if a is None else a) is (0 if b is None else b)
        or ((0 if a is None else a) - (0 if b is None else b)).abs().max()
        <= TOLERANCE[dtype] * largest
        for a, b in zip(ours, theirs)
    )


def penalty(critic, x):
    """The gradient penalty of WGAN-GP."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return 10 * ((g.flatten(1).norm(dim=1) - 1) ** 2).mean()


# ------------------------------------------------------------------ second derivatives


@every_network_and_type
def test_gradient_penalty(name: str, dtype) -> None:
    """The penalty, and its gradients with respect to the weights."""
    pairs = pair(name, dtype)
    ours, theirs = penalty(pairs.module, pairs.x), penalty(pairs.twin, pairs.x)
    assert close([ours.detach()], [theirs.detach()])
    assert close(
        torch.autograd.grad(ours, [*pairs.weights.values()], allow_unused=True),
        torch.autograd.grad(theirs, [*pairs.twin_weights.values()], allow_unused=True),
    )


@every_network_and_type
def test_hessian_and_products_with_it_for_inputs(name: str, dtype) -> None:
    pairs = pair(name, dtype)
    functions = [lambda x: pairs.module(x).square().sum(), lambda x: pairs.twin(x).square().sum()]
    v = torch.randn_like(pairs.x)
    ours, theirs = ([functional.hessian(f, pairs.x)] for f in functions)
    assert close(ours, theirs)
    for product in (functional.hvp, functional.vhp):
        ours, theirs = ([product(f, pairs.x, v)[1]] for f in functions)
        assert close(ours, theirs)
    ours, theirs = ([functional.jvp(f, pairs.x, v)[1]] for f in (pairs.module, pairs.twin))
    assert close(ours, theirs)


@every_network_and_type
def test_hessian_for_weights(name: str, dtype) -> None:
    pairs = pair(name, dtype)
    names = [*pairs.weights]

    def ours(*tensors):
        return (
            torch.func.functional_call(pairs.module, dict(zip(names, tensors)), pairs.x).exp().sum()
        )

    def theirs(*tensors):
        return NETWORKS[name].function(dict(zip(names, tensors)), pairs.x).exp().sum()

    values = tuple(w.detach() for w in pairs.weights.values())
    vs = tuple(map(torch.randn_like, values))
    assert close(functional.hvp(ours, values, vs)[1], functional.hvp(theirs, values, vs)[1])
    first = values[:2]
    rows = [functional.hessian(lambda *f, g=g: g(*f, *values[2:]), first) for g in (ours, theirs)]
    assert close([b for row in rows[0] for b in row], [b for row in rows[1] for b in row])


@pytest.mark.parametrize("name", [n for n in NETWORKS if torch.float64 in NETWORKS[n].types])
@pytest.mark.parametrize("training", [True, False])
def test_finite_differences(name: str, training: bool) -> None:
    """torch's own check of second derivatives, for inputs and weights at once."""
    pairs = pair(name)
    module = pairs.module.train(training)
    names = [*pairs.weights]

    def run(x, *tensors):
        return torch.func.functional_call(module, dict(zip(names, tensors)), x)

    weights = [w.detach().clone().requires_grad_() for w in pairs.weights.values()]
    assert torch.autograd.gradgradcheck(run, (pairs.x.requires_grad_(), *weights))


@every_network_and_type
def test_third_derivatives(name: str, dtype) -> None:
    pairs = pair(name, dtype)
    x = pairs.x.requires_grad_()
    function = NETWORKS[name].function
    if "scale" in pairs.weights:
        function = partial(function, normalize=by_definition)

    def third(f, weights):
        (g,) = torch.autograd.grad(f(x).pow(2).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((10 * g).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(h.pow(2).sum(), [x, *weights.values()], allow_unused=True)

    assert close(
        third(pairs.module, pairs.weights),
        third(partial(function, pairs.twin_weights), pairs.twin_weights),
    )


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("make", ["SGD", "Adam"])
def test_a_critic_trains_as_in_torch(name: str, make: str) -> None:
    """Five steps of WGAN-GP."""
    pairs = pair(name)
    for critic, weights in ((pairs.module, pairs.weights), (pairs.twin, pairs.twin_weights)):
        optimizer = getattr(torch.optim, make)(weights.values(), lr=0.01)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            real, fake = (
                torch.randn(pairs.x.shape, dtype=pairs.x.dtype, generator=generator) + shift
                for shift in (1, 0)
            )
            optimizer.zero_grad()
            loss = critic(fake).mean() - critic(real).mean()
            (loss + penalty(critic, (real + fake) / 2)).backward()
            optimizer.step()
    assert close([*pairs.weights.values()], [*pairs.twin_weights.values()])


def test_between_layers_of_torch() -> None:
    pairs = pair("mlp")
    before, after = torch.nn.Linear(4, 4).double(), torch.nn.Linear(1, 2).double()
    weights = [*before.parameters(), *after.parameters()]

    def gradients(f, own):
        p = penalty(lambda x: after(f(torch.sigmoid(before(x)))).square(), pairs.x)
        return torch.autograd.grad(p, [*weights, *own.values()], allow_unused=True)

    assert close(gradients(pairs.module, pairs.weights), gradients(pairs.twin, pairs.twin_weights))


def test_in_one_graph_twice_and_in_other_layouts() -> None:
    pairs = pair("mlp")

    def gradients(f, own):
        p = penalty(lambda x: f(x) * f(x.flip(1)).exp(), pairs.x.T.contiguous().T)
        return torch.autograd.grad(p, [*own.values()])

    assert not pairs.x.T.contiguous().T.is_contiguous()
    assert close(gradients(pairs.module, pairs.weights), gradients(pairs.twin, pairs.twin_weights))


def test_a_hessian_of_zeros() -> None:
    """As torch has it: the gradient of a linear model depends on weights, not on the input."""
    module = OnnxModule(
        onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y)
            <float[2, 1] w = {1, 2}, float[1] b = {3}> { s = MatMul(x, w) y = Add(s, b) }"""
        ),
        threads=1,
    )
    x = torch.ones(3, 2, requires_grad=True)
    assert not functional.hessian(lambda x: module(x).sum(), x).any()
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert g.requires_grad
    (dw,) = torch.autograd.grad(g.square().sum(), module.w)
    assert dw.tolist() == [[6], [12]]
    module.requires_grad_(False)
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert not g.requires_grad


def test_first_derivatives_build_no_further_graph(monkeypatch) -> None:
    pairs = pair("mlp")
    built = []
    compile_model = onnxfit.runtime.session.compile_model
    monkeypatch.setattr(
        onnxfit.runtime.session,
        "compile_model",
        lambda model, *args, **settings: (
            built.append(args[2]) or compile_model(model, *args, **settings)
        ),
    )
    pairs.module(pairs.x).sum().backward()
    assert built == ["forward", "backward"]
    for _ in range(2):
        penalty(pairs.module, pairs.x).backward()
    assert built == ["forward", "backward"] * 2 + ["derivative"]


@pytest.mark.parametrize("retained", [True, False])
def test_backward_again(retained: bool) -> None:
    pairs = pair("mlp")
    p = penalty(pairs.module, pairs.x)
    first = torch.autograd.grad(p, pairs.weights["w1"], retain_graph=retained)
    if retained:
        assert torch.equal(first[0], torch.autograd.grad(p, pairs.weights["w1"])[0])
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(p, pairs.weights["w1"])


def test_what_a_derivative_needs_must_not_change() -> None:
    pairs = pair("mlp")
    p = penalty(pairs.module, pairs.x)
    with torch.no_grad():
        pairs.weights["b1"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        p.backward()


def test_many_batch_sizes() -> None:
    pairs = pair("mlp")
    for rows in range(1, 8):
        x = torch.randn(rows, 4, dtype=torch.float64)
        ours, theirs = (
            [functional.hessian(lambda x, f=f: f(x).sum(), x)] for f in (pairs.module, pairs.twin)
        )
        assert close(ours, theirs)


# ------------------------------------------------------------------ modes and state


DROPPING = """g (double[N, 4] x) => (double[N, 1] y, double[N, 8] d)
    { h = MatMul(x, w1) a = Tanh(h) d = Dropout(a, r) t = Tanh(d) y = MatMul(t, w2) }"""


def test_dropout_has_one_mask_for_a_pass_and_its_derivatives() -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {DROPPING}')
    w1, w2 = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    arrays = {"w1": w1.numpy(), "w2": w2.numpy(), "r": np.float32(0.5)}
    model.graph.initializer.extend(from_array(np.asarray(a), n) for n, a in arrays.items())
    module = OnnxModule(model, threads=1)
    theirs = [w.clone().requires_grad_() for w in (w1, w2)]
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    passes = [module(x), module(x)]
    masks = [torch.where(d == 0, 0.0, 2.0) for _, d in passes]
    assert not torch.equal(*masks)
    for (y, _), mask in zip(passes, masks):
        twin = torch.tanh(torch.tanh(x @ theirs[0]) * mask) @ theirs[1]
        gradients = []
        for output, weights in ((y, [module.w1, module.w2]), (twin, theirs)):
            (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            (h,) = torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
            gradients.append([g, h, *torch.autograd.grad(h.pow(2).sum(), weights)])
        assert close(*gradients)
    assert module.draws.item() == 2


def test_statistics_follow_the_forward_pass_only() -> None:
    pairs = pair("batch statistics")
    x = pairs.x.clone().requires_grad_()
    (g,) = torch.autograd.grad(pairs.module(x).sum(), x, create_graph=True)
    mean, var = pairs.module.mean.clone(), pairs.module.var.clone()
    assert torch.allclose(mean, 0.1 * (pairs.x @ pairs.weights["w1"]).mean(dim=0))
    g.square().sum().backward()
    assert torch.equal(pairs.module.mean, mean)
    assert torch.equal(pairs.module.var, var)


def test_running_statistics() -> None:
    pairs = pair("batch statistics")
    module, w = pairs.module.eval(), pairs.twin_weights
    with torch.no_grad():
        module.mean.normal_()
        module.var.uniform_(0.5, 2)

    def twin(x):
        h = F.batch_norm(x @ w["w1"], module.mean, module.var, w["scale"], w["shift"], eps=1e-5)
        return torch.tanh(h) @ w["w2"]

    assert close(
        torch.autograd.grad(penalty(module, pairs.x), [*pairs.weights.values()]),
        torch.autograd.grad(penalty(twin, pairs.x), [*w.values()]),
    )


def test_frozen_weights() -> None:
    pairs = pair("transformer")
    for weights in (pairs.weights, pairs.twin_weights):
        weights["q"].requires_grad_(False)
        weights["up"].requires_grad_(False)
    results = []
    for f, weights in ((pairs.module, pairs.weights), (pairs.twin, pairs.twin_weights)):
        penalty(f, pairs.x).backward()
        results.append([w.grad for w in weights.values()])
    assert results[0][[*pairs.weights].index("q")] is None
    assert close(*results)


# ------------------------------------------------------------------ other parts of torch


def test_checkpointing() -> None:
    pairs = pair("batch statistics")
    critics = [pairs.module, lambda x: checkpoint(pairs.module, x, use_reentrant=False)]
    plain, recomputed = (
        torch.autograd.grad(penalty(f, pairs.x), [*pairs.weights.values()]) for f in critics
    )
    assert close(recomputed, plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(backend: str) -> None:
    """The module breaks the compiled graph, and computes the same."""
    pairs = pair("mlp")
    compiled = torch.compile(pairs.module, backend=backend)
    assert torch.equal(compiled(pairs.x), pairs.module(pairs.x))
    assert close(
        torch.autograd.grad(
            penalty(compiled, pairs.x), [*pairs.weights.values()], allow_unused=True
        ),
        torch.autograd.grad(
            penalty(pairs.twin, pairs.x), [*pairs.twin_weights.values()], allow_unused=True
        ),
    )


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.vmap(lambda row: f(row[None]))(x),
    "vectorized hessian": lambda f, x: functional.hessian(lambda x: f(x).sum(), x, vectorize=True),
    "batches of gradients": lambda f, x: torch.autograd.grad(
        f(x.requires_grad_()), x, torch.ones(2, 5, 1, dtype=x.dtype), is_grads_batched=True
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("trained", [True, False])
def test_transforms_of_functions_are_refused(transform: str, trained: bool) -> None:
    pairs = pair("mlp", weights=None if trained else [])
    with pytest.raises(onnxfit.errors.UnsupportedError, match=r"Use torch\.autograd\.grad"):
        TRANSFORMS[transform](pairs.module, pairs.x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("trained", [True, False])
def test_forward_mode_is_refused(trained: bool) -> None:
    """Without an error, the tangent of a module without weights would be lost."""
    pairs = pair("mlp", weights=None if trained else [])
    with (
        forward_ad.dual_level(),
        pytest.raises(onnxfit.errors.UnsupportedError, match=r"functional\.jvp"),
    ):
        pairs.module(forward_ad.make_dual(pairs.x, torch.ones_like(pairs.x)))
    with forward_ad.dual_level():
        pairs.module(pairs.x)


# ------------------------------------------------------------------ what cannot be differentiated


@needs_builder
def test_the_gradient_builder_has_first_derivatives() -> None:
    pairs = pair("mlp", torch.float32, gradient="onnxruntime")
    x = pairs.x.clone().requires_grad_()
    (g,) = torch.autograd.grad(pairs.module(x).sum(), x, create_graph=True)
    expected = torch.autograd.grad(pairs.twin(x).sum(), x)
    assert close([g.detach()], expected)
    with pytest.raises(onnxfit.errors.GradientError, match="first derivatives only"):
        g.sum().backward()


def test_a_gradient_without_a_derivative_is_an_error(table_of_rules_restored) -> None:
    """Its nodes are listed when the derivative is asked for; the gradient itself is computed."""
    table.RULES.pop(("", "Mul"))
    pairs = pair("mlp", gradient="onnx")
    x = pairs.x.clone().requires_grad_()
    (g,) = torch.autograd.grad(pairs.module(x).sum(), x, create_graph=True)
    assert close([g.detach()], torch.autograd.grad(pairs.twin(x).sum(), x))
    with pytest.raises(onnxfit.errors.GradientError, match=r"has no derivative[^\n]*\n[^\n]*Mul"):
        g.sum().backward()

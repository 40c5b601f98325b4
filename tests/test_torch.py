"""An ONNX model inside PyTorch behaves as the same layers of PyTorch do: values, gradients, modes,
state, and what is refused.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx.numpy_helper import from_array, to_array

import onnxfit
from onnxfit.gradients import table
from tests.builds import needs_builder
from tests.constants import constants_of, structure, with_constants
from tests.models import convolutional, mlp, two_inputs, two_outputs

torch = pytest.importorskip("torch")
from onnxfit.runtime import session  # noqa: E402
from onnxfit.runtime.backends.shape_cache import MAX_EXACT_SHAPES  # noqa: E402
from onnxfit.torch.module import OnnxModule, _parameter_paths  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.torch
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every float32 tensor as float64."""
    model = copy.deepcopy(model)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(from_array(to_array(tensor).astype(np.float64), tensor.name))
    onnx.checker.check_model(model, full_check=True)
    return model


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')


def layer(**settings):
    """Four numbers to three by way of a tanh layer of eight."""
    return OnnxModule(mlp((4, 8, 3)), threads=1, **settings)


def twin() -> torch.nn.Sequential:
    """The same as `layer()` in torch, with the same weights."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    arrays = {
        t.name: torch.from_numpy(to_array(t).copy()) for t in mlp((4, 8, 3)).graph.initializer
    }
    with torch.no_grad():
        for number, linear in (("fc0", net[0]), ("fc1", net[2])):
            linear.weight.copy_(arrays[f"{number}.weight"].T)
            linear.bias.copy_(arrays[f"{number}.bias"])
    return net


def gradients(loss, tensors):
    return [g.clone() for g in torch.autograd.grad(loss, list(tensors))]


# ------------------------------------------------------------------ gradients

EMBEDDED = """embedded (int64[N, 3] words, float[N, 3] counts) => (float[N, 5] y) <float[7, 5] table = {
    1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 0.1, 0.2, 0.3, 0.4, 0.5, 1, 0, 1, 0, 1, 5, 4, 3, 2, 1, 7, 7, 7, 7, 7, 1, -1, 1, -1, 1}>
    { found = Gather<axis=0>(table, words)  axes = Constant<value_ints=[1]>()  last = Constant<value_ints=[2]>()
      wide = Unsqueeze(counts, last)  scaled = Mul(found, wide)  y = ReduceSum<keepdims=0>(scaled, axes) }"""


NORMALISED = """normalised (float[N, 2, 3] x) => (float[N, 2, 3] y)
    <float[2] scale = {1, 2}, float[2] bias = {0, 1}, float[2] mean = {0.5, 0}, float[2] var = {2, 3}>
    { n = BatchNormalization(x, scale, bias, mean, var)  y = Tanh(n) }"""


def cases():
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return {
        "mlp": (mlp((4, 5, 3)), (normal(6, 4),), True),
        "batch statistics": (parsed(NORMALISED), (normal(4, 2, 3),), True),
        "running statistics": (parsed(NORMALISED), (normal(4, 2, 3),), False),
        "embedding": (parsed(EMBEDDED), (torch.tensor([[0, 1, 1], [6, 2, 0]]), normal(2, 3)), True),
        "two outputs": (two_outputs(), (normal(5, 1),), True),
        "two inputs": (two_inputs(), (normal(5, 1), normal(5, 1)), True),
    }


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("source", ["onnx", pytest.param("onnxruntime", marks=needs_builder)])
def test_gradcheck(case: str, source: str) -> None:
    """torch's own finite differences, with regard to inputs and weights at once."""
    model, inputs, training = cases()[case]
    module = OnnxModule(in_double(model), gradient=source, threads=1).train(training)
    names = [name for name, _ in module.named_parameters()]
    weights = [
        (w.detach() + 0.1 * torch.randn(w.shape, dtype=w.dtype)).requires_grad_()
        for w in module.parameters()
    ]
    inputs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)

    def run(*tensors):
        return torch.func.functional_call(module, dict(zip(names, tensors)), tensors[len(names) :])

    assert torch.autograd.gradcheck(run, (*weights, *inputs))


def test_gradcheck_in_single_precision() -> None:
    module = layer()
    x = torch.randn(5, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(module, (x,), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_the_same_values_and_gradients_as_torch() -> None:
    module, net = layer(), twin()
    x = torch.randn(9, 4, requires_grad=True)
    wide = torch.randn(9, 3)
    assert torch.allclose(module(x), net(x), atol=1e-6)
    ours = gradients(
        (module(x) * wide).sum(),
        [x, module.fc0.weight, module.fc0.bias, module.fc1.weight, module.fc1.bias],
    )
    theirs = gradients(
        (net(x) * wide).sum(), [x, net[0].weight, net[0].bias, net[2].weight, net[2].bias]
    )
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b if a.shape == b.shape else b.T, atol=1e-5)


@pytest.mark.parametrize("make", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_a_mixed_network_trains_to_the_weights_of_the_torch_one(make: str) -> None:
    """torch -> ONNX -> torch, by every kind of optimizer, against torch alone: within 1e-4 after 60
    steps.
    """
    before, after = torch.nn.Linear(6, 4), torch.nn.Linear(3, 1)
    theirs = torch.nn.Sequential(
        copy.deepcopy(before), twin(), torch.nn.ReLU(), copy.deepcopy(after)
    )
    ours = torch.nn.Sequential(before, layer(), torch.nn.ReLU(), after)
    x, y = torch.randn(64, 6), torch.randn(64, 1)
    start = [p.detach().clone() for p in ours.parameters()]
    for net in (ours, theirs):
        optimizer = getattr(torch.optim, make)(net.parameters(), lr=1e-2)
        for step in range(60):
            rows = slice(16 * (step % 4), 16 * (step % 4) + 16)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
            optimizer.step()
    moved = 0.0
    for a, b, was in zip(ours.parameters(), theirs.parameters(), start):
        assert torch.allclose(a, b if a.shape == b.shape else b.T, atol=1e-4, rtol=0)
        moved = max(moved, float((a - was).detach().abs().max()))
    assert moved > 0.05


def test_twice_in_one_graph() -> None:
    module = OnnxModule(mlp((4, 8, 4)), threads=1)
    x = torch.randn(5, 4, requires_grad=True)
    (module(module(x)) ** 2 + module(x)).sum().backward()
    got = [x.grad.clone(), *(p.grad.clone() for p in module.parameters())]
    w = {
        t.name: torch.from_numpy(to_array(t).copy()).requires_grad_()
        for t in mlp((4, 8, 4)).graph.initializer
    }

    def net(x):
        return torch.tanh(x @ w["fc0.weight"] + w["fc0.bias"]) @ w["fc1.weight"] + w["fc1.bias"]

    for a, b in zip(got, gradients((net(net(x)) ** 2 + net(x)).sum(), [x, *w.values()])):
        assert torch.allclose(a, b, atol=1e-5)


def test_an_output_whose_gradient_does_not_arrive_counts_as_zeros() -> None:
    module = OnnxModule(two_outputs(), threads=1)
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)
    _, b, _ = module(x)
    b.sum().backward()
    assert x.grad.tolist() == [[2], [2]]
    assert module.u.grad is None or module.u.grad.item() == 0
    assert module.v.grad.item() == 3


def test_outputs_without_gradient_are_marked() -> None:
    module = OnnxModule(
        parsed(
            """g (float[N, 2] x) => (float[N, 2] y, int64[N] best, bool[N, 2] large, float[N, 2] steps, int64[2] sizes) <float[2] w = {1, 2}> {
            y = Mul(x, w)  best = ArgMax<axis=1, keepdims=0>(y)  limit = Constant<value_float=1.0>()  large = Greater(y, limit)
            steps = Floor(y)  sizes = Shape(y) }"""
        ),
        threads=1,
    )
    y, best, large, steps, sizes = module(torch.tensor([[3.0, 0.25]], requires_grad=True))
    assert [t.requires_grad for t in (y, best, large, steps, sizes)] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert (best.dtype, large.dtype) == (torch.int64, torch.bool)
    assert (y.tolist(), best.tolist(), large.tolist(), sizes.tolist()) == (
        [[3, 0.5]],
        [0],
        [[True, False]],
        [1, 2],
    )


def test_gradients_only_of_what_requires_one() -> None:
    module = layer()
    x = torch.randn(5, 4)
    wanted = {"fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"}
    computed = []

    def leaving():
        module.zero_grad()
        module(x).sum().backward()
        caches = module._functional.caches.values()
        passes = [passes for cache in caches for passes in cache.exact.values()]
        computed.append(set(passes[-1].graphs.input_gradients))
        return {name for name, w in module.named_weights() if w.grad is not None}

    assert leaving() == wanted == computed[-1]
    x.requires_grad_()
    assert leaving() == wanted
    assert computed[-1] == {*wanted, "x"}
    module.fc0.requires_grad_(False)
    x.requires_grad_(False)
    assert leaving() == {"fc1.weight", "fc1.bias"} == computed[-1]
    module.requires_grad_(False)
    assert not module(x).requires_grad
    x.requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None


def test_frozen_weights_are_constants() -> None:
    module = layer(weights=["fc1*"])
    assert sorted(module.state_dict()) == ["fc1.bias", "fc1.weight"]
    x = torch.randn(3, 4)
    assert torch.allclose(module(x), layer()(x), atol=1e-6)
    assert [sorted(dict(layer(weights=w).named_weights())) for w in ([], "!fc0*")] == [
        [],
        ["fc1.bias", "fc1.weight"],
    ]
    none = layer(weights=[])
    assert not none(x).requires_grad
    x.requires_grad_()
    assert torch.allclose(
        gradients(none(x).sum(), [x])[0], gradients(layer()(x).sum(), [x])[0], atol=1e-6
    )


def test_a_model_without_weights_is_a_layer_too() -> None:
    module = OnnxModule(parsed("g (float[N] x) => (float[N] y) { y = Mul(x, x) }"), threads=1)
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    module(x).sum().backward()
    assert x.grad.tolist() == [2, 6]
    assert list(module.parameters()) == []


def test_backward_again() -> None:
    module = layer()
    loss = module(torch.randn(5, 4)).square().sum()
    first = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, list(module.parameters()))


def _weight(module, x, y):
    with torch.no_grad():
        module.fc1.weight.add_(1)


def _input(module, x, y):
    with torch.no_grad():
        x.mul_(2)


def _output(module, x, y):
    y.detach().zero_()


@pytest.mark.parametrize("change", [_weight, _input, _output])
def test_what_the_backward_pass_needs_must_not_change(change) -> None:
    """torch's own error: without it the gradient would be of other values, silently."""
    model = mlp((4, 8, 3))
    # its gradient is computed from its output
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["y"], ["squashed"]))
    model.graph.output[0].name = "squashed"
    module = OnnxModule(model, threads=1)
    x = torch.randn(5, 4, requires_grad=True)
    y = module(x)
    change(module, x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_it_does_not_need_may_change() -> None:
    module = layer()
    y = module(torch.randn(5, 4))
    y.mul_(2).sum().backward()  # the gradient of a sum needs no value of it
    assert module.fc1.bias.grad.tolist() == [10] * 3


def test_an_input_that_is_an_output_is_not_shared() -> None:
    module = OnnxModule(
        parsed("g (float[N] x) => (float[N] x, float[N] y) <float[1] w = {2}> { y = Mul(x, w) }"),
        threads=1,
    )
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    same, y = module(x)
    (same + y).sum().backward()
    assert x.grad.tolist() == [3, 3]
    with torch.no_grad():
        module(x)[0].zero_()
    assert x.tolist() == [1, 3]


def test_inputs_of_booleans() -> None:
    module = OnnxModule(
        parsed(
            "g (float[2] x, bool[2] c) => (float[2] y) <float[2] w = {2, 2}>"
            " { s = Mul(x, w) y = Where(c, s, x) }"
        ),
        threads=1,
    )
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    y = module(x, torch.tensor([True, False]))
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist(), module.w.grad.tolist()) == ([2, 3], [2, 1], [1, 0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_what_draws_nothing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    module = OnnxModule(convolutional(), threads=1)
    x = torch.randn(4, 1, 8, 8, requires_grad=True)

    def gradients_of(y):
        module.zero_grad()
        y.square().sum().backward()
        return [p.grad.clone() for p in module.parameters()]

    plain = gradients_of(module(x))
    mean = module.bn.mean.clone()
    module.bn.mean.zero_()
    for a, b in zip(plain, gradients_of(checkpoint(module, x, use_reentrant=reentrant))):
        assert torch.allclose(a, b, atol=1e-5)
    # The statistics follow a batch once. A pass without gradients has other operators, which sum
    # in another order.
    assert torch.allclose(module.bn.mean, mean, rtol=1e-5, atol=1e-8)
    dropping = OnnxModule(convolutional(dropout=0.5), threads=1)
    with pytest.raises(onnxfit.errors.StepError, match="checkpoint"):
        checkpoint(dropping, x, use_reentrant=reentrant).sum().backward()


def test_functional_transforms_that_replace_weights() -> None:
    """A Parameter that is computed (weight_norm) gets its gradient through what it is computed
    from.
    """
    module = layer()
    torch.nn.utils.parametrizations.weight_norm(module.fc1, "weight")
    x = torch.randn(5, 4)
    module(x).sum().backward()
    assert module.fc1.parametrizations.weight.original0.grad is not None


def test_autocast() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), layer())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(torch.randn(5, 6))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert net[0].weight.grad is not None


# ------------------------------------------------------------------ modes


class Torch(torch.nn.Module):
    """`convolutional()` in torch."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        w = {t.name: torch.from_numpy(to_array(t).copy()) for t in model.graph.initializer}
        self.conv, self.bn, self.fc = (
            torch.nn.Conv2d(1, 4, 3, padding=1),
            torch.nn.BatchNorm2d(4),
            torch.nn.Linear(64, 3),
        )
        with torch.no_grad():
            self.conv.weight.copy_(w["conv.weight"])
            self.conv.bias.copy_(w["conv.bias"])
            self.fc.weight.copy_(w["fc.weight"].T)
            self.fc.bias.copy_(w["fc.bias"])

    def forward(self, x):
        return self.fc(
            torch.nn.functional.max_pool2d(torch.relu(self.bn(self.conv(x))), 2).flatten(1)
        )


@pytest.mark.parametrize("with_gradients", [True, False])
def test_batch_normalization(with_gradients: bool) -> None:
    """Batch statistics and their running means in training, these in evaluation, as in torch."""
    ours, theirs = OnnxModule(convolutional(), threads=1), Torch(convolutional())
    for seed in range(3):
        x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        with torch.set_grad_enabled(with_gradients):
            assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    assert torch.allclose(ours.bn.mean, theirs.bn.running_mean, atol=1e-5)
    # torch follows the unbiased variance, ONNX the population's
    n = 6 * 64
    assert torch.allclose(
        (ours.bn.var - 0.9**3) * n / (n - 1) + 0.9**3, theirs.bn.running_var, atol=1e-5
    )
    theirs.bn.running_var.copy_(ours.bn.var)
    kept = ours.bn.mean.clone()
    ours.eval(), theirs.eval()
    with torch.set_grad_enabled(with_gradients):
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    assert torch.equal(kept, ours.bn.mean)
    if with_gradients:
        for a, b in zip(
            gradients(ours(x).square().sum(), [ours.conv.weight]),
            gradients(theirs(x).square().sum(), [theirs.conv.weight]),
        ):
            assert torch.allclose(a, b, atol=1e-4)


def test_frozen_batch_normalization() -> None:
    module = OnnxModule(convolutional(), batch_norm="frozen", threads=1)
    x = torch.randn(6, 1, 8, 8)
    trained = module(x)
    assert torch.allclose(trained, module.eval()(x), atol=1e-6)
    assert not list(module.buffers())


def test_dropout_draws_anew_and_a_state_dict_repeats_it() -> None:
    model = convolutional(batch_norm=False, dropout=0.5)
    module = OnnxModule(model, seed=3, threads=1)
    x = torch.randn(6, 1, 8, 8)
    module(x)
    state = copy.deepcopy(module.state_dict())
    after = [module(x).detach() for _ in range(3)]
    assert not torch.equal(after[0], after[1])
    resumed = OnnxModule(model, seed=3, threads=1)
    resumed.load_state_dict(state)
    assert all(torch.equal(a, resumed(x)) for a in after)
    other = OnnxModule(model, seed=4, threads=1)
    other.load_state_dict(state)
    assert not torch.equal(after[0], other(x))
    module.eval()
    quiet = module(x)
    with torch.no_grad():
        assert torch.equal(module(x), quiet)
    assert module.draws.item() == 4
    assert torch.allclose(
        quiet, OnnxModule(convolutional(batch_norm=False), threads=1)(x), atol=1e-6
    )


def test_dropout_in_the_backward_pass_is_that_of_the_forward_pass() -> None:
    module = OnnxModule(
        parsed("g (float[N] x) => (float[N] y) <float r = {0.5}> { y = Dropout(x, r) }"), threads=1
    )
    x = torch.ones(100, requires_grad=True)
    first, second = module(x), module(x)  # two that wait
    assert 20 < int((first == 0).sum()) < 80
    assert torch.equal(gradients(first.sum(), [x])[0], first)
    assert torch.equal(gradients(second.sum(), [x])[0], second)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_kept_without_gradients(mode, training: bool, monkeypatch) -> None:
    """The forward pass gives the outputs alone, and the module holds on to none of its tensors."""
    module = OnnxModule(mlp((4, 8, 3)), threads=1).train(training)
    handed = _spied(monkeypatch)
    x = torch.randn(5, 4)
    with mode():
        y = module(x)
    assert not y.requires_grad
    assert list(handed[-1][1]) == ["y"]
    assert torch.allclose(y, module(x), atol=1e-6)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_nothing_is_kept_after_the_backward_pass() -> None:
    module = layer()
    x = torch.randn(5, 4)
    module(x).sum().backward()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------ memory


def _spied(monkeypatch):
    """What every run of a graph got and gave: name -> address."""
    seen = []
    call = session.StatelessSession.__call__

    def spy(self, values):
        found = call(self, values)
        seen.append(
            (
                {n: v.data_ptr() for n, v in values.items()},
                {n: v.data_ptr() for n, v in found.items()},
            )
        )
        return found

    monkeypatch.setattr(session.StatelessSession, "__call__", spy)
    return seen


def test_memory_is_shared_both_ways(monkeypatch) -> None:
    """onnxruntime reads the Parameters and the input where torch has them; torch gets onnxruntime's
    own outputs and gradients.
    """
    module, seen = layer(), _spied(monkeypatch)
    x = torch.randn(5, 4, requires_grad=True)
    y = module(x)
    got, gave = seen[-1]
    assert got == {"x": x.data_ptr(), **{name: w.data_ptr() for name, w in module.named_weights()}}
    assert gave["y"] == y.data_ptr()
    upstream = torch.randn(5, 3)
    dx, dw = torch.autograd.grad(y, [x, module.fc0.weight], upstream)
    got, gave = seen[-1]
    assert upstream.data_ptr() in got.values()
    assert module.fc1.weight.data_ptr() in got.values()
    assert {dx.data_ptr(), dw.data_ptr()} <= set(gave.values())


def test_other_layouts_are_copied_once_and_right() -> None:
    module = layer()
    wide = torch.randn(4, 10)
    x = wide.T[::2]
    assert not x.is_contiguous()
    assert torch.allclose(module(x), twin()(x), atol=1e-6)
    module.fc0.weight.data = module.fc0.weight.data.T.contiguous().T
    y = module(x)
    torch.autograd.grad(y, [module.fc0.weight], torch.ones(3, 5).T)
    assert torch.allclose(y, twin()(x), atol=1e-6)


def test_outputs_live_on_their_own() -> None:
    module = layer()
    first = module(torch.ones(2, 4)).detach()
    copied = first.clone()
    module(torch.zeros(2, 4))
    del module
    gc.collect()
    assert torch.equal(first, copied)


def test_empty_batches() -> None:
    module = layer()
    y = module(torch.zeros(0, 4))
    assert y.shape == (0, 3)
    # whose strides onnxruntime would not take for contiguous
    assert module(torch.zeros(4, 0).T).shape == (0, 3)


# ------------------------------------------------------------------ state


def test_names_are_those_of_the_file() -> None:
    module = OnnxModule(convolutional(), threads=1)
    assert set(module.state_dict()) == {t.name for t in convolutional().graph.initializer}
    assert {name for name, _ in module.named_parameters()} == {
        name for name, _ in module.named_weights()
    }
    assert {name for name, _ in module.named_buffers()} == {"bn.mean", "bn.var"}
    assert module.get_parameter("fc.weight") is dict(module.named_weights())["fc.weight"]
    assert (module.input_names, module.output_names) == (("x",), ("logits",))
    assert repr(module).startswith("OnnxModule(\n  x: float32[N, 1, 8, 8] -> logits")


@pytest.mark.filterwarnings("ignore:.*parameters or buffers")
def test_names_that_a_module_cannot_have() -> None:
    names = [
        "a.b",
        "a.b.c",
        "type.weight",
        "type.bias",
        "training",
        "x..y",
        "onnx::MatMul_3",
        "/net/0/Weight",
        "a.b_",
        ".",
        "export",
    ]
    paths = _parameter_paths(torch.nn.Module(), names)
    assert list(paths) == names
    assert len(set(paths.values())) == len(names)
    assert paths["onnx::MatMul_3"] == "onnx::MatMul_3"
    assert (paths["a.b"], paths["a.b.c"], paths["type.weight"], paths["type.bias"]) == (
        "a.b",
        "a.b_.c",
        "type_.weight",
        "type_.bias",
    )
    assert (paths["x..y"], paths["training"], paths["a.b_"]) == ("x._.y", "training_", "a.b__")

    model = parsed(
        "g (float[2] x) => (float[2] y) <float[2] v = {1, 2}, float[2] w = {3, 4}> { s = Mul(x, v)"
        " y = Add(s, w) }"
    )
    for tensor, name in zip(model.graph.initializer, ("type.weight", "forward")):
        for node in model.graph.node:
            node.input[:] = [name if i == tensor.name else i for i in node.input]
        tensor.name = name
    module = OnnxModule(model, threads=1)
    assert [name for name, _ in module.named_weights()] == ["type.weight", "forward"]
    assert list(module.state_dict()) == ["forward_", "type_.weight"]
    assert module(torch.ones(2)).tolist() == [4, 6]


def test_state_dict_round_trip() -> None:
    module, other = layer(), OnnxModule(mlp((4, 8, 3), seed=5), threads=1)
    x = torch.randn(5, 4)
    assert not torch.allclose(module(x), other(x))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert other.load_state_dict(torch.load(file)).missing_keys == []
    assert torch.equal(module(x), other(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({**module.state_dict(), "fc1.bias": torch.zeros(4)})
    assert torch.equal(module(x), other(x))


def test_a_network_and_its_export_load_each_other() -> None:
    """The names in the file that torch writes are those of the network."""
    net = torch.nn.Sequential(
        OrderedDict(first=torch.nn.Linear(4, 8), act=torch.nn.ReLU(), last=torch.nn.Linear(8, 3))
    )
    model = parsed("""g (float[N, 4] x) => (float[N, 3] y)
        { h = Gemm<transB=1>(x, a, b) r = Relu(h) y = Gemm<transB=1>(r, c, d) }""")
    for short, (name, tensor) in zip("abcd", net.state_dict().items()):
        model.graph.initializer.append(from_array(np.zeros(tensor.shape, np.float32), name))
        for node in model.graph.node:
            node.input[:] = [name if i == short else i for i in node.input]
    module = OnnxModule(model, threads=1)
    x = torch.randn(5, 4)
    module.load_state_dict(net.state_dict())
    assert torch.allclose(module(x), net(x), atol=1e-6)
    with torch.no_grad():
        module.last.bias.add_(1)
    net.load_state_dict(module.state_dict())
    assert torch.allclose(module(x), net(x), atol=1e-6)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate) -> None:
    module = OnnxModule(
        convolutional(dropout=0.5), weights="!fc.bias", batch_norm="train", seed=7, threads=1
    )
    x = torch.randn(5, 1, 8, 8)
    module(x).sum().backward()
    other = duplicate(module)
    assert torch.equal(module(x), other(x))  # the same draws
    with torch.no_grad():
        other.fc.weight.zero_()
    other.eval(), module.eval()
    assert not torch.allclose(module(x), other(x))
    assert other.export().graph.initializer[0].name == module.export().graph.initializer[0].name


def test_to() -> None:
    module = layer()
    x = torch.randn(5, 4)
    expected = module(x)
    with pytest.raises(
        onnxfit.errors.SettingError,
        match=r"'fc0.weight' must be torch.float32 .* is now torch.float64",
    ):
        module.double()(x)
    assert torch.equal(module.to(torch.float32)(x), expected)
    assert torch.equal(module.to("cpu")(x), expected)
    with pytest.raises(
        onnxfit.errors.DataError, match=r"'x' is on cpu and 'fc0.weight' is on meta"
    ):
        copy.deepcopy(module).to("meta")(x)
    with pytest.raises(
        onnxfit.errors.DataError, match=r"'meta', which onnxruntime does not support"
    ):
        copy.deepcopy(module).to("meta")(x.to("meta"))


def test_export(tmp_path) -> None:
    module = OnnxModule(convolutional(dropout=0.5), threads=1)
    x = torch.randn(5, 1, 8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().sum().backward()
    optimizer.step()
    model = module.export(tmp_path / "trained.onnx")
    assert onnx.load(tmp_path / "trained.onnx") == model
    changed = [
        a.name
        for a, b in zip(model.graph.initializer, convolutional(dropout=0.5).graph.initializer)
        if a != b
    ]
    # a bias before a batch normalization has no effect
    assert set(changed) - {"conv.bias"} == {
        "conv.weight",
        "fc.weight",
        "fc.bias",
        "bn.scale",
        "bn.bias",
        "bn.mean",
        "bn.var",
    }
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (y,) = session.run(None, {"x": x.numpy()})
    assert np.allclose(y, module.eval()(x).detach().numpy(), atol=1e-5)


def test_export_is_for_inference() -> None:
    """Whatever the file says of training."""
    model = parsed(
        """g (float[N] x) => (float[N] y) <float[1] w = {1}, float r = {0.5}, bool t = {1}>
        { s = Mul(x, w) y = Dropout(s, r, t) }"""
    )
    session = onnxruntime.InferenceSession(
        OnnxModule(model, threads=1).export().SerializeToString()
    )
    assert session.run(None, {"x": np.ones(20, np.float32)})[0].tolist() == [1] * 20


def test_half_precisions() -> None:
    """float16 and bfloat16 weights enter and leave as they are."""
    for kind, name in (
        (onnx.TensorProto.FLOAT16, "float16"),
        (onnx.TensorProto.BFLOAT16, "bfloat16"),
    ):
        model = parsed(f"g ({name}[2] x) => ({name}[2] y) {{ y = Add(x, w) }}")
        values = np.array([1, -2.5], onnx.helper.tensor_dtype_to_np_dtype(kind))
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, "w"))
        module = OnnxModule(model, threads=1)
        assert module.w.dtype == getattr(torch, name)
        assert module.w.tolist() == [1, -2.5]
        assert module.export().graph.initializer[0] == model.graph.initializer[0]


# ------------------------------------------------------------------ shapes, processes and threads


def test_many_batch_sizes() -> None:
    """A few graphs for fixed shapes, then one for any."""
    module, net = layer(), twin()
    for rows in range(1, 12):
        x = torch.randn(rows, 4, requires_grad=True)
        ours, theirs = module(x), net(x)
        assert torch.allclose(ours, theirs, atol=1e-6)
        assert torch.allclose(
            *(gradients(y.square().sum(), [x])[0] for y in (ours, theirs)), atol=1e-5
        )
    (cache,) = module._functional.caches.values()
    assert len(cache.exact) == MAX_EXACT_SHAPES
    assert None not in [*cache.any_size.values()]
    assert len(cache.any_size) == 1
    with torch.no_grad():
        for rows in range(1, 12):
            module(torch.randn(rows, 4))
    caches = module._functional.caches.values()
    assert [(len(cache.exact), len(cache.any_size)) for cache in caches] == [
        (MAX_EXACT_SHAPES, 1),
        (0, 1),
    ]


class Batches(torch.utils.data.Dataset):
    """Six batches, large enough that onnxruntime's threads share the work; with a module, what that
    makes of them.
    """

    def __init__(self, module=None) -> None:
        self.module = module

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(i))
        if self.module is not None:
            with torch.no_grad():
                x = self.module(x)
        return x


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_dataloader_workers(inside: bool) -> None:
    """Workers are forked while sessions have threads, which no fork has; the module works in this
    process, and in theirs.
    """
    module = OnnxModule(mlp((256, 512, 64)), threads=2)
    expected = [Batches(module)[i] for i in range(6)]
    loader = torch.utils.data.DataLoader(
        Batches(module if inside else None),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=60,
    )
    for x, y in zip(loader, expected):
        assert torch.allclose(x if inside else module(x), y, atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_process_may_drop_a_module() -> None:
    """Its sessions have threads to end that only the parent has, which crashes onnxruntime."""
    code = """
import gc, os
import torch
from onnxfit.torch import OnnxModule
from tests.models import mlp
module = OnnxModule(mlp((256, 512, 64)), threads=4)
with torch.no_grad():
    expected = module(torch.ones(64, 256))
    child = os.fork()
    if child == 0:
        assert torch.allclose(module(torch.ones(64, 256)), expected)
        del module
        gc.collect()
        os._exit(0)  # as workers do
assert os.waitpid(child, 0)[1] == 0
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr


def test_threads_may_call_it_at_once() -> None:
    module, net = layer(), twin()
    wrong = []

    def work(seed: int) -> None:
        for n in range(30):
            x = torch.randn(
                1 + n % 3, 4, generator=torch.Generator().manual_seed(seed + n), requires_grad=True
            )
            if not torch.allclose(
                *(gradients(f(x).square().sum(), [x])[0] for f in (module, net)), atol=1e-5
            ):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------ what is refused

REFUSED = {
    "none": (lambda x: (), "takes 1 input .x: float32.N, 4.., got none"),
    "two": (lambda x: (x, x), "got 2 by position"),
    "array": (lambda x: (x.numpy(),), "must be a dense torch tensor, got ndarray"),
    "sparse": (
        lambda x: (x.to_sparse(),),
        "must be a dense torch tensor, got a torch.sparse_coo tensor",
    ),
    "dtype": (
        lambda x: (x.double(),),
        r"got torch.float64. Pass x.to\(torch.float32\)",
    ),
    "rank": (lambda x: (x[0],), r"x: float32\[N, 4\] got a tensor of shape \(4,\)"),
    "size": (lambda x: (torch.zeros(5, 3),), r"got a tensor of shape \(5, 3\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_do_not_fit(case: str) -> None:
    module = layer()
    x = torch.randn(5, 4)
    expected = module(x)
    make, message = REFUSED[case]
    with pytest.raises(onnxfit.errors.DataError, match=message):
        module(*make(x))
    assert torch.equal(module(x), expected)


def test_inputs_by_name() -> None:
    module = OnnxModule(two_inputs(), threads=1)
    with torch.no_grad():
        module.u.fill_(2)
        module.v.fill_(3)
    a, b = torch.ones(1, 1), torch.full((1, 1), 10.0)
    assert [module(a, b).item(), module(a, right=b).item(), module(right=a, left=b).item()] == [
        32,
        32,
        23,
    ]
    for given in ({"left": a, "wrong": b}, {"left": a}):
        with pytest.raises(onnxfit.errors.DataError, match=r"takes 2 inputs .* by name"):
            module(**given)
    with pytest.raises(onnxfit.errors.DataError, match="got 1 by position and 'left' by name"):
        module(a, left=b)


def test_failures_leave_the_module_as_it_was() -> None:
    """Sizes that contradict each other are found when it runs; draws and statistics are then those
    of before.
    """
    module = OnnxModule(
        parsed(
            """g (float[N, 2] x, float[M, 2] z) => (float[N, 2] y) <float[2] w = {1, 1}, float r = {0.5}>
            { s = Mul(x, w) d = Dropout(s, r) y = Add(d, z) }"""
        ),
        threads=1,
    )
    with pytest.raises(onnxfit.errors.OnnxfitError):
        module(torch.zeros(2, 2), torch.zeros(3, 2))
    assert module.draws.item() == 0
    assert module(torch.zeros(3, 2), torch.ones(3, 2)).tolist() == [[1, 1]] * 3
    assert module.draws.item() == 1


def test_a_parameter_that_was_taken_away() -> None:
    module = layer()
    x = torch.randn(5, 4)
    expected = module(x)
    weight = module.fc0.weight
    del module.fc0.weight
    with pytest.raises(
        onnxfit.errors.SettingError, match=r"'fc0.weight' is missing\. Set module.fc0.weight"
    ):
        module(x)
    module.fc0.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(
        onnxfit.errors.SettingError, match=r"is now torch.float32 of shape \(2, 2\)"
    ):
        module(x)
    module.fc0.weight = weight
    assert torch.equal(module(x), expected)
    module.fc1.bias = None
    with pytest.raises(onnxfit.errors.SettingError, match="is missing"):
        module(x)


def test_operators_without_gradient_are_listed(table_of_rules_restored) -> None:
    """When a gradient is asked for; without one the module runs."""
    table.RULES.pop(("", "Tanh"))
    module = layer(gradient="onnx")
    with pytest.raises(onnxfit.errors.GradientError, match="Tanh"):
        module(torch.ones(2, 4))
    with torch.no_grad():
        assert torch.allclose(module(torch.ones(2, 4)), twin()(torch.ones(2, 4)), atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"batch_norm": "off"}, "batch_norm must be 'train', 'frozen' or 'batch', got 'off'"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"gradient": "onyx"}, "No gradient source is called 'onyx'"),
        ({"weights": ["fc9*"]}, r"No weight is called 'fc9\*'"),
        ({"device": "tpu"}, "device must be one of 'cpu', 'cuda'"),
    ],
)
def test_settings(setting, error) -> None:
    with pytest.raises(onnxfit.errors.SettingError, match=error):
        layer(**setting)


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(onnxfit.errors.InstallationError, match="CUDAExecutionProvider"):
        layer(device="cuda")


def test_an_onnxruntime_without_dlpack(monkeypatch) -> None:
    """The inference build of onnxruntime 1.20 is one."""
    monkeypatch.setattr("onnxfit.torch.module.HAS_DLPACK", False)
    with pytest.raises(onnxfit.errors.InstallationError, match=r"Install onnxruntime 1\.21"):
        layer()


def test_torch_is_imported_only_here() -> None:
    """onnxfit runs without torch; onnxfit.torch says what to install."""
    code = """
import sys
sys.modules["torch"] = None
import onnxfit
try:
    import onnxfit.torch
except onnxfit.errors.InstallationError as error:
    assert 'pip install "onnxfit[torch]"' in str(error), error
else:
    raise SystemExit("no error")
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_the_warnings_of_a_trainer_are_given() -> None:
    """A grid that is added to computed values may be a buffer, and nothing records which."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 2] y)
          <float[2, 2] fc_weight = {1, 2, 3, 4}, float[2] fc_bias = {0, 1}, float[2] grid = {1, 2}>
        { h = Gemm <transB = 1> (x, fc_weight, fc_bias)  y = Add(h, grid) }"""
    )
    for i, name in enumerate(("fc.weight", "fc.bias")):
        model.graph.initializer[i].name = model.graph.node[0].input[1 + i] = name

    def warnings_of(make: Any, *arguments: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(model, *arguments)
        return [str(warning.message) for warning in caught]

    expected = warnings_of(partial(onnxfit.Trainer, loss="mse"))
    assert any("whether 'grid' are parameters or buffers" in text for text in expected)
    assert warnings_of(OnnxModule) == expected
    assert warnings_of(OnnxModule, ["!grid"]) == []


def test_constant_nodes_hold_weights() -> None:
    model = with_constants(mlp())
    module = OnnxModule(model, threads=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    exported = module.export()
    assert structure(exported) == structure(model)
    found = constants_of(exported)
    for name, weight in module.named_weights():
        np.testing.assert_array_equal(found[name], weight.detach().numpy())
        assert (found[name] != constants_of(model)[name]).any()

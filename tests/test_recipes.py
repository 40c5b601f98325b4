"""Recipes of docs/recipes.md beside the same training in PyTorch, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit.losses import Joint
from onnxfit.optimizers import SGD, Adam

torch = pytest.importorskip("torch")
functional = torch.nn.functional
RNG = np.random.default_rng(0)
STEPS, RATE = 12, 0.05
Arrays = dict[str, np.ndarray]


def network(text: str, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.extend(from_array(array, name) for name, array in weights.items())
    return model


def drawn(**shapes: tuple[int, ...]) -> Arrays:
    return {name: RNG.normal(size=shape) / 2 for name, shape in shapes.items()}


def tensors(weights: Arrays) -> dict[str, Any]:
    return {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, Any]) -> None:
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.detach().numpy(), rtol=1e-9, atol=1e-12)


def trained_in_torch(weights: Arrays, loss: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the weights after some steps of SGD."""
    w = tensors(weights)
    optimizer = torch.optim.SGD(w.values(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
    return w


CRITIC = """critic (double[N, 2] x) => (double[N, 1] score)
    { a = MatMul(x, c1)  h = Tanh(a)  score = Gemm(h, c2, c3) }"""
CRITIC_SHAPES = {"c1": (2, 16), "c2": (16, 1), "c3": (1,)}


def critic_in_torch(w: Any, x: Any) -> Any:
    return torch.tanh(x @ w["c1"]) @ w["c2"] + w["c3"]


def test_a_gan_of_two_trainers_is_that_of_torch() -> None:
    first, second = drawn(g1=(2, 16), g2=(16, 2)), drawn(**CRITIC_SHAPES)
    makes = """generator (double[N, 2] z) => (double[N, 2] x)
        { a = MatMul(z, g1)  h = Tanh(a)  x = MatMul(h, g2) }"""
    settings: Any = {"optimizer": Adam(0.01), "backend": "forward_backward"}
    generator = onnxfit.Trainer(network(makes, first), **settings)
    critic = onnxfit.Trainer(network(CRITIC, second), loss="binary_cross_entropy", **settings)
    g, c = tensors(first), tensors(second)
    adam_g, adam_c = (torch.optim.Adam(w.values(), 0.01, eps=Adam().eps) for w in (g, c))
    labels = np.repeat([[1.0], [0.0]], 8, axis=0)
    for _ in range(STEPS):
        real, z = RNG.normal(1, 0.5, (8, 2)), RNG.normal(size=(8, 2))
        made = generator.forward(z)
        critic.train_on_batch(np.concatenate([real, made]), labels)
        score = critic.forward(made)
        fooled = (1 / (1 + np.exp(-score)) - 1) / len(made)
        arriving = critic.backward(fooled)["inputs"]["x"]
        generator.apply_gradients(generator.backward(arriving)["weights"])

        fake = torch.tanh(torch.tensor(z) @ g["g1"]) @ g["g2"]
        scores = critic_in_torch(c, torch.cat([torch.tensor(real), fake.detach()]))
        adam_c.zero_grad()
        functional.binary_cross_entropy_with_logits(scores, torch.tensor(labels)).backward()
        adam_c.step()
        adam_g.zero_grad()
        (-functional.logsigmoid(critic_in_torch(c, fake)).mean()).backward()
        adam_g.step()
    same(generator.get_weights(), g)
    same(critic.get_weights(), c)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_the_gradient_penalty_of_wgan_is_that_of_torch(backend: str) -> None:
    def wasserstein(op, side, score, gradient):
        length = op.Sqrt(op.ReduceSum(gradient * gradient, [1], keepdims=0) + 1e-12)
        penalty = 10 * (length - 1) ** 2 * (1 - op.Abs(side))
        return side * op.Squeeze(score, [1]) + penalty

    weights = drawn(**CRITIC_SHAPES)
    critic = onnxfit.gradient_model(network(CRITIC, weights), "x")
    loss = Joint(wasserstein, outputs=["score", "x_grad"], labels="double[b]")
    trainer = onnxfit.Trainer(critic, loss=loss, optimizer=SGD(RATE), backend=backend)
    x, side = RNG.normal(size=(24, 2)), np.repeat([1.0, -1.0, 0.0], 8)
    for _ in range(STEPS):
        trainer.train_on_batch({"x": x, "score_grad": np.ones((24, 1))}, side)

    def in_torch(w: Any) -> Any:
        points = torch.tensor(x, requires_grad=True)
        score = critic_in_torch(w, points)[:, 0]
        (gradient,) = torch.autograd.grad(score.sum(), points, create_graph=True)
        length = torch.sqrt((gradient**2).sum(1) + 1e-12)
        sides = torch.tensor(side)
        return (sides * score + 10 * (length - 1) ** 2 * (1 - sides.abs())).mean()

    same(trainer.get_weights(), trained_in_torch(weights, in_torch))


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_ppo_is_that_of_torch(backend: str) -> None:
    def ppo(op, y_true, logits, value):
        log_p = op.LogSoftmax(logits, axis=1)
        chosen = op.GatherElements(log_p, op.Unsqueeze(y_true["action"], [1]), axis=1)
        ratio, advantage = op.Exp(op.Squeeze(chosen, [1]) - y_true["log_p"]), y_true["advantage"]
        gain = op.Min(ratio * advantage, op.Clip(ratio, 0.8, 1.2) * advantage)
        entropy = -op.ReduceSum(op.Exp(log_p) * log_p, [1], keepdims=0)
        return (op.Squeeze(value, [1]) - y_true["return"]) ** 2 / 2 - gain - 0.01 * entropy

    weights = drawn(w=(4, 16), wl=(16, 3), wv=(16, 1))
    policy = network(
        """policy (double[N, 4] state) => (double[N, 3] logits, double[N, 1] value)
        { a = MatMul(state, w)  h = Tanh(a)  logits = MatMul(h, wl)  value = MatMul(h, wv) }""",
        weights,
    )
    rows = {
        "action": "int64[b]", "log_p": "double[b]", "advantage": "double[b]", "return": "double[b]",
    }  # fmt: skip
    loss = Joint(ppo, ["logits", "value"], labels=rows)
    trainer = onnxfit.Trainer(policy, loss=loss, optimizer=SGD(RATE), backend=backend)
    states = RNG.normal(size=(32, 4))
    y: Arrays = {name: RNG.normal(size=32) for name in rows}
    y |= {"action": RNG.integers(0, 3, 32), "log_p": np.full(32, -np.log(3))}
    for _ in range(STEPS):
        trainer.train_on_batch(states, y)

    def in_torch(w: Any) -> Any:
        h = torch.tanh(torch.tensor(states) @ w["w"])
        policy = torch.distributions.Categorical(logits=h @ w["wl"])
        column = {name: torch.tensor(array) for name, array in y.items()}
        ratio = torch.exp(policy.log_prob(column["action"]) - column["log_p"])
        advantage = column["advantage"]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        error = functional.mse_loss((h @ w["wv"])[:, 0], column["return"]) / 2
        return error - gain.mean() - 0.01 * policy.entropy().mean()

    same(trainer.get_weights(), trained_in_torch(weights, in_torch))


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_graph_network_with_fixed_edges_is_that_of_torch(backend: str) -> None:
    weights = drawn(w1=(3, 8), w2=(8, 2))
    model = network(
        """graph (double[N, 6, 3] x, int64[10] source, int64[10, 1] target) => (double[N, 2] y)
        { m = MatMul(x, w1)  sent = Gather<axis = 1>(m, source)  t = Transpose<perm = [1, 0, 2]>(sent)
          z = Transpose<perm = [1, 0, 2]>(m)  none = Sub(z, z)
          got = ScatterND<reduction = "add">(none, target, t)  r = Relu(got)
          p = ReduceMean<axes = [0], keepdims = 0>(r)  y = MatMul(p, w2) }""",
        weights,
    )
    source, target = RNG.integers(0, 6, 10), RNG.integers(0, 6, (10, 1))
    fixed = {"source": source, "target": target}
    settings: Any = {"loss": "mse", "optimizer": SGD(RATE), "backend": backend}
    trainer = onnxfit.Trainer(model, fixed_inputs=fixed, **settings)
    x, y = RNG.normal(size=(8, 6, 3)), RNG.normal(size=(8, 2))
    for _ in range(STEPS):
        trainer.train_on_batch(x, y)

    def in_torch(w: Any) -> Any:
        m = torch.tensor(x) @ w["w1"]
        got = torch.zeros_like(m).index_add(1, torch.tensor(target[:, 0]), m[:, source])
        return functional.mse_loss(torch.relu(got).mean(1) @ w["w2"], torch.tensor(y))

    same(trainer.get_weights(), trained_in_torch(weights, in_torch))

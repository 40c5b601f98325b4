"""From a name to a network with numbers that train, to its exported file, to its training there and
in torch.
"""

from __future__ import annotations

import ast
import copy
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from onnxfit import Trainer
from onnxfit.losses import CrossEntropy
from onnxfit.optimizers import SGD
from tests.exports.architectures import ARCHITECTURES, Architecture, Of

Arrays = dict[str, np.ndarray[Any, Any]]
NORMS = nn.modules.batchnorm._BatchNorm
CONVOLUTIONS = nn.modules.conv._ConvNd


def network_of(name: str) -> Architecture:
    """The network in evaluation mode: dropout passes, and BatchNormalization uses statistics that
    fit the inputs.
    """
    torch.manual_seed(0)
    found = ARCHITECTURES[name]()
    with torch.no_grad():
        for weight in found.network.parameters():  # what begins equal, or zero, shall not stay so
            fan_in = max(1, weight.numel() // weight.shape[0]) if weight.ndim > 1 else 1
            weight.add_(min(0.1, 0.5 / fan_in**0.5) * torch.randn(weight.shape))
        norms = [m for m in found.network.modules() if isinstance(m, NORMS)]
        for norm in norms:
            norm.momentum = 1.0
        if norms:
            found.network.train()(*found.inputs)
        for norm in norms:
            # rounding shall not be blown up
            norm.running_var.clamp_(min=0.3 * norm.running_var.mean().item())
    found.network.eval()
    return found


def with_rows(found: Architecture, rows: int) -> Architecture:
    """The same network, and inputs of so many rows: those of the architecture in turn."""
    inputs = (x[torch.arange(rows) % len(x)] for x in found.inputs)
    return replace(found, inputs=tuple(inputs))


def export(found: Architecture, path: str | os.PathLike[str], mode: str) -> None:
    """As torch writes it today, plainly, "optimized", or for a "dynamic" size of the batch; the
    output is called y.
    """
    batch = tuple({0: torch.export.Dim("batch")} for _ in found.inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            found.network, found.inputs, path, dynamo=True, optimize=mode == "optimized", external_data=False, verbose=False,
            input_names=[f"x{i}" for i in range(len(found.inputs))], output_names=["y"],
            dynamic_shapes=None if mode != "dynamic" else (batch,) if isinstance(found.network, Of) else batch,
        )  # fmt: skip


@dataclass
class Comparison:
    """What training from the file gave, beside what torch gave."""

    predicted: np.ndarray[Any, Any]
    expected: np.ndarray[Any, Any]
    losses: list[float] = field(default_factory=list)
    torch_losses: list[float] = field(default_factory=list)
    # parameters that torch trains and the file does not
    missing: list[str] = field(default_factory=list)
    # weights that moved otherwise -> how far, relative to the movement
    strays: dict[str, float] = field(default_factory=dict)
    matched: int = 0  # weights whose movement was compared
    folded: list[str] = field(
        default_factory=list
    )  # parameters that the exporter computed something from: their movement is not compared
    # what it computed, and what is left of them
    folded_weights: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)  # weights that are no parameter of torch


def compare(found: Architecture, path: str | os.PathLike[str], mode: str, steps: int) -> Comparison:
    """Train from the file and in torch, by the same batch."""
    if mode == "dynamic":  # another number of samples than the exporter saw
        found = replace(found, inputs=tuple(torch.cat([x, x[:1]]) for x in found.inputs))
    network = with_fused_norms(found, path) if mode == "optimized" else copy.deepcopy(found.network)
    everything = _compare(network, found, path, steps, ())
    alike = not everything.strays and np.allclose(
        everything.losses, everything.torch_losses, rtol=1e-5, atol=0
    )
    if alike or not everything.folded:
        return everything
    # A step in exp(w), say, is another step than one in w. That those weights move has been seen;
    # the others are compared without them.
    for name, parameter in network.named_parameters():
        if name in everything.folded:
            parameter.requires_grad_(False)
    rest = _compare(network, found, path, steps, everything.folded_weights)
    rest.folded = everything.folded
    return rest


def _compare(
    network: nn.Module,
    found: Architecture,
    path: str | os.PathLike[str],
    steps: int,
    without: Sequence[str],
) -> Comparison:
    model, sources = onnx.load(path, load_external_data=False), folded_from(path)
    names = {v.name for v in model.graph.input}
    x = {f"x{i}": value.numpy() for i, value in enumerate(found.inputs) if f"x{i}" in names}
    with torch.no_grad():
        expected = network(*found.inputs)
    classes = expected.shape[found.class_axis]
    rest = [n for axis, n in enumerate(expected.shape) if axis != found.class_axis % expected.ndim]
    y = torch.randint(0, min(classes, 199), rest, generator=torch.Generator().manual_seed(1))
    learning_rate = rate_for(network, found, y)
    theirs = train_in_torch(network, found, y, learning_rate, steps)
    others = [
        train_in_torch(shaken(network, seed), found, y, learning_rate, steps) for seed in range(3)
    ]
    parameters = {name: p.detach().numpy().copy() for name, p in network.named_parameters()}
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    fixed = set(parameters) - trained
    floats = {t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    # computed from tables, say
    buffers = [n for n in floats if sources.get(n) and trained.isdisjoint(sources[n])]
    trainer = Trainer(
        path, [f"!{name}" for name in sorted({*fixed, *buffers, *without} & floats)] or None, loss=CrossEntropy(axis=found.class_axis),
        optimizer=SGD(learning_rate), batch_norm="frozen", gradient="onnx",
    )  # fmt: skip
    before = trainer.get_weights()
    result = Comparison(trainer.predict_on_batch(x), expected.numpy(), torch_losses=theirs.losses)
    result.losses = [float(trainer.train_on_batch(x, y.numpy())["loss"]) for _ in range(steps)]
    after = trainer.get_weights()
    pairs = dict(partners(parameters, before))
    known = {
        n
        for n in before
        if not trained.isdisjoint(sources.get(n, ())) and not np.array_equal(before[n], after[n])
    }
    result.extra = sorted(set(before) - {weight for weight, _ in pairs.values()} - known)
    result.folded_weights = sorted(known - {weight for weight, _ in pairs.values()})
    result.folded = [
        name
        for name in parameters
        if any(name in sources[weight] for weight in result.folded_weights)
    ]
    result.folded_weights += [pairs[name][0] for name in result.folded if name in pairs]
    for name, wanted in theirs.movements.items():
        if name in pairs:
            weight, turned = pairs[name]
            far = float(np.linalg.norm(after[weight] - before[weight] - turned(wanted)))
            noise = max(float(np.linalg.norm(other.movements[name] - wanted)) for other in others)
            result.matched += 1
            if (
                far
                > 1e-2 * np.linalg.norm(wanted)
                + 3 * noise
                + 3e-7 * np.linalg.norm(parameters[name])
                + 1e-8
            ):
                result.strays[name] = far / max(float(np.linalg.norm(wanted)), 1e-12)
        elif wanted.any() and name not in result.folded:
            result.missing.append(name)
    return result


@dataclass
class Trained:
    """The losses of some steps, and how far they moved each parameter."""

    losses: list[float]
    movements: Arrays


def shaken(network: nn.Module, seed: int) -> nn.Module:
    """The same network with its last digits changed: how far it moves then tells how far rounding
    alone leads astray.
    """
    torch.manual_seed(seed)
    network = copy.deepcopy(network)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + 2e-6 * torch.randn(weight.shape))
    return network


def loss_of(network: nn.Module, found: Architecture, y: torch.Tensor) -> torch.Tensor:
    answer = network(*found.inputs).movedim(found.class_axis, -1)
    return nn.functional.cross_entropy(answer.reshape(-1, answer.shape[-1]), y.reshape(-1))


def rate_for(network: nn.Module, found: Architecture, y: torch.Tensor) -> float:
    """A learning rate whose first step lowers the loss by some 5 %."""
    weights = [p for p in network.parameters() if p.requires_grad]
    loss = loss_of(network, found, y)
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return min(
        0.05, 0.05 * loss.item() / sum(float(g.square().sum()) for g in gradients if g is not None)
    )


def train_in_torch(
    network: nn.Module, found: Architecture, y: torch.Tensor, learning_rate: float, steps: int
) -> Trained:
    network = copy.deepcopy(network)
    before = {name: p.detach().numpy().copy() for name, p in network.named_parameters()}
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], learning_rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(network, found, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(
        losses, {name: p.detach().numpy() - before[name] for name, p in network.named_parameters()}
    )


def partners(parameters: Arrays, weights: Arrays) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Which weight of the file is which parameter, as it is or turned: by its name, else by its
    numbers.
    """
    left = {
        name
        for name in weights
        if not (name in parameters and parameters[name].shape == weights[name].shape)
    }
    for name, parameter in parameters.items():
        if name in weights and name not in left:
            yield name, (name, lambda a: a)
            continue
        for weight in left:
            array = weights[weight]
            turns = [
                lambda a, s=array.shape: a.reshape(s),
                *(
                    [lambda a, s=array.shape: a.swapaxes(-1, -2).reshape(s)]
                    if parameter.ndim > 1
                    else []
                ),
                *([lambda a, s=array.shape: a.T.reshape(s)] if parameter.ndim > 2 else []),
            ]
            same = array.size == parameter.size and parameter.size > 1
            turn = next(
                (
                    t
                    for t in turns
                    if same and np.allclose(t(parameter), array, rtol=1e-5, atol=1e-7)
                ),
                None,
            )
            if turn is not None:
                left.remove(weight)
                yield name, (weight, turn)
                break


def folded_from(path: str | os.PathLike[str]) -> dict[str, list[str]]:
    """What the exporter computed a tensor from, as it notes it."""
    model = onnx.load(path, load_external_data=False)
    notes = {v.name: {e.key: e.value for e in v.metadata_props} for v in model.graph.value_info}
    return {
        name: ast.literal_eval(note.get("pkg.onnxscript.optimizer.folded_from", "[]"))
        for name, note in notes.items()
    }


def with_fused_norms(found: Architecture, path: str | os.PathLike[str]) -> nn.Module:
    """The network with those BatchNormalizations in a convolution's weights that the optimising
    exporter has put there.
    """
    left = {t.name for t in onnx.load(path, load_external_data=False).graph.initializer}
    network = copy.deepcopy(found.network)
    made: dict[int, tuple[nn.Module, Any]] = {}
    pairs: dict[nn.Module, nn.Module] = {}

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, CONVOLUTIONS):
            made[id(output)] = (module, output)  # the tensor is kept, so that no other gets its id
        elif isinstance(module, NORMS) and id(inputs[0]) in made:
            pairs[module] = made[id(inputs[0])][0]

    hooks = [m.register_forward_hook(after) for m in network.modules()]
    with torch.no_grad():
        network(*found.inputs)
    for hook in hooks:
        hook.remove()
    for name, module in list(network.named_modules()):
        if module in pairs and f"{name}.weight" not in left:
            convolution = pairs[module]
            fused = fuse_conv_bn_eval(
                convolution, module, isinstance(convolution, nn.modules.conv._ConvTransposeNd)
            )
            convolution.weight, convolution.bias = (
                fused.weight.requires_grad_(),
                fused.bias.requires_grad_(),
            )
            network.set_submodule(name, nn.Identity())
    return network

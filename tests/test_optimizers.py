"""Optimizers: laws for every one; torch.optim, and the papers' formulas in float64 numpy where
torch has none, as independent evidence.

Every update graph is run by onnxruntime, as in a training step: weights, slots, learning rate and
step go in, their next values come out.
"""

import dataclasses
import functools
import json
import math
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxfit.optimizers
import onnxfit.schedules
from onnxfit import schedules
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.gradients.update import apply_update, initial_slots, initial_slots_to_read
from onnxfit.graph.values import GraphBuilder
from onnxfit.optimizers import (
    SGD,
    AdaBelief,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Adan,
    Adopt,
    Lamb,
    Lars,
    Lion,
    Muon,
    NAdam,
    NovoGrad,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    ScheduleFreeAdamW,
    get_optimizer,
    other_names,
)
from onnxfit.optimizers.base import WeightInfo, learning_rate_at
from onnxfit.registry import from_config, registry, to_config
from onnxfit.runtime.backends.full import FullBackend
from onnxfit.schedules import Cosine, Warmup
from onnxfit.step.update import FUSING, clip_gradients, fused_weights
from onnxfit.trainer import Trainer
from tests.builds import needs_builder
from tests.models import linear, mlp

MODULE = "onnxfit.optimizers"
REGISTRY = registry(MODULE, Optimizer)


@functools.cache
def compiled(optimizer, specs):
    """The graph of an update as a session, its nodes, the types of its inputs and the (weight, slot
    or None) of its outputs.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="update")
    op = GraphBuilder(graph)
    wide = any(dtype == np.float64 for _, dtype, _ in specs)
    lr, step = (
        op.input("lr", np.float64 if wide else np.float32, ()),
        op.input("step", np.float64, ()),
    )
    weights = {name: op.input(name, dtype, shape) for name, dtype, shape in specs}
    gradients = {name: op.input(f"{name}/g", dtype, shape) for name, dtype, shape in specs}
    infos = [WeightInfo(name, shape, np.dtype(dtype)) for name, dtype, shape in specs]
    own = optimizer.for_weights(infos)
    arrays = {
        name: initial_slots(own[name].optimizer, name, np.zeros(shape, dtype))
        for name, dtype, shape in specs
    }
    slots = {
        n: {s: op.input(f"{n}/{s}", a.dtype, a.shape) for s, a in slots_of_one.items()}
        for n, slots_of_one in arrays.items()
    }
    weights_after, slots_after = apply_update(op, own, weights, gradients, slots, lr, step)
    nodes = [(node.op_type, node.name) for node in graph]
    outputs = []
    for name in weights:
        assert list(slots_after[name]) == list(slots[name])
        for slot, value in {None: weights_after[name], **slots_after[name]}.items():
            op.output(f"{name}/{slot}/next", value)
            outputs.append((name, slot))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(), options
    )
    return session, nodes, {v.name: v.dtype.numpy() for v in graph.inputs}, outputs


class Update:
    """Weights and slots, changed by an optimizer's update."""

    def __init__(self, optimizer, weights):
        self.optimizer = optimizer
        self.weights = {name: np.array(w) for name, w in weights.items()}
        infos = [WeightInfo(name, w.shape, w.dtype) for name, w in weights.items()]
        own = optimizer.for_weights(infos)
        self.slots = {n: initial_slots(own[n].optimizer, n, w) for n, w in weights.items()}
        self.steps = 0
        specs = tuple((name, w.dtype, w.shape) for name, w in weights.items())
        self.session, self.nodes, self.dtypes, self.outputs = compiled(optimizer, specs)

    def __call__(self, gradients, lr=None):
        feeds = {
            "lr": learning_rate_at(self.optimizer, self.steps) if lr is None else lr,
            "step": self.steps + 1,
        }
        for name, w in self.weights.items():
            feeds |= {name: w, f"{name}/g": gradients[name]} | {
                f"{name}/{s}": a for s, a in self.slots[name].items()
            }
        wanted = [v.name for v in self.session.get_inputs()]
        results = self.session.run(
            None, {name: np.asarray(feeds[name], self.dtypes[name]) for name in wanted}
        )
        for (name, slot), value in zip(self.outputs, results):
            if slot is None:
                self.weights[name] = value
            else:
                self.slots[name][slot] = value
        self.steps += 1


def start(dtype=np.float32, seed=0):
    """Weights of every rank up to 3; the gradient pulls them to `TARGET`."""
    draw = np.random.default_rng(seed)
    shapes = {"fc.weight": (4, 3), "fc.bias": (3,), "conv.weight": (2, 3, 4), "scale": ()}
    return {name: np.asarray(draw.normal(size=shape), dtype) for name, shape in shapes.items()}


TARGET = start(np.float64, seed=1)


def pull(weights):
    """The gradient of a quadratic that is five times as steep in one weight as in another."""
    return {name: (1 + i) * (w - TARGET[name]) for i, (name, w) in enumerate(weights.items())}


def distance(weights):
    return sum(np.sum((w - TARGET[name]) ** 2) for name, w in weights.items()) ** 0.5


def train(optimizer, steps, dtype=np.float32, lr=None):
    update = Update(optimizer, start(dtype))
    for _ in range(steps):
        update(pull(update.weights), lr)
    return update


VARIANTS = [
    *(cls() for cls in REGISTRY.values()),
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True),
    SGD(momentum=0.9, dampening=0.3),
    SGD(momentum=0.9, nesterov=True, scaled_velocity=True),
    Adam(amsgrad=True),
    RAdam(betas=(0.9, 0.6)),
    RMSprop(momentum=0.9),
    RMSprop(centered=True),
    RMSprop(momentum=0.9, centered=True),
    Adagrad(lr_decay=0.1, initial_accumulator_value=0.5),
    Adafactor(eps=(1e-6, 1e-2), d=2.0),
    Adam(cautious=True),
    SGD(momentum=0.9, cautious=True),
    Muon(nesterov=False, ns_steps=3, adjust_lr_fn="original"),
]


def called(optimizer):
    config = to_config(optimizer)
    return "-".join([config["name"], *(f"{k}={v}" for k, v in config.get("settings", {}).items())])


every_optimizer = pytest.mark.parametrize("optimizer", VARIANTS, ids=called)


# -- laws over the registry


@every_optimizer
def test_a_quadratic_is_solved_with_some_learning_rate(optimizer):
    begin = distance(start())
    with np.errstate(all="ignore"):  # some diverge with the largest
        ends = [
            distance(train(dataclasses.replace(optimizer, weight_decay=0.0), 300, lr=lr).weights)
            for lr in (0.01, 0.1, 10.0)
        ]
    assert np.nanmin(ends) < 0.1 * begin


@every_optimizer
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_and_slots_keep_shape_and_type(optimizer, dtype):
    update = Update(
        dataclasses.replace(optimizer, ema_momentum=0.5, weight_decay=0.1), start(dtype)
    )
    before = {**update.weights}, {name: dict(own) for name, own in update.slots.items()}
    update(pull(update.weights))
    for name, w in before[0].items():
        assert (update.weights[name].dtype, update.weights[name].shape) == (w.dtype, w.shape)
        for slot, array in before[1][name].items():
            assert (update.slots[name][slot].dtype, update.slots[name][slot].shape) == (
                array.dtype,
                array.shape,
            )


@every_optimizer
def test_float32_follows_float64(optimizer):
    single, double = (train(optimizer, 20, dtype).weights for dtype in (np.float32, np.float64))
    for name in single:
        np.testing.assert_allclose(single[name], double[name], rtol=1e-4, atol=1e-5)


def test_weights_of_two_types_share_a_graph():
    weights = {"wide": np.ones(3), "narrow": np.ones(3, np.float32)}
    update = Update(Adam(0.1, ema_momentum=0.5), weights)
    update({name: np.ones(3) for name in weights})
    np.testing.assert_allclose(update.weights["wide"], update.weights["narrow"], rtol=1e-6)
    assert {name: w.dtype for name, w in update.weights.items()} == {
        "wide": np.float64,
        "narrow": np.float32,
    }


@every_optimizer
def test_learning_rate_zero_moves_no_bit(optimizer):
    update = train(dataclasses.replace(optimizer, weight_decay=0.1), 3, lr=0.0)
    for name, w in start().items():
        assert update.weights[name].tobytes() == w.tobytes()


@every_optimizer
def test_a_gradient_of_zero_leaves_everything_finite(optimizer):
    zero = {"zero": np.zeros((2, 3), np.float32), "one": np.ones((2, 3), np.float32)}
    update = Update(dataclasses.replace(optimizer, weight_decay=0.0), zero)
    for _ in range(8):
        update({name: np.zeros((2, 3)) for name in zero})
    for name, w in zero.items():
        np.testing.assert_array_equal(update.weights[name], w)
        assert all(np.isfinite(a).all() for a in update.slots[name].values())


@every_optimizer
def test_weight_decay_spares_the_excluded(optimizer):
    plain = train(dataclasses.replace(optimizer, weight_decay=0.0), 5).weights
    decayed = train(dataclasses.replace(optimizer, weight_decay=0.5), 5).weights
    spared = train(
        dataclasses.replace(
            optimizer, weight_decay=0.5, exclude_from_weight_decay=("*.bias", "scale")
        ),
        5,
    ).weights
    for name in plain:
        excluded = name in ("fc.bias", "scale")
        assert spared[name].tobytes() == (plain if excluded else decayed)[name].tobytes()
        # a scalar has but a sign, which is all that Lamb takes of a direction
        assert not np.array_equal(plain[name], decayed[name]) or (
            name == "scale" and isinstance(optimizer, (Lamb, Lars))
        )


@every_optimizer
def test_weight_decay_alone_shrinks_by_learning_rate_times_decay(optimizer):
    weights = {"w": np.array([[2.0, -4.0], [1.0, 0.5]])}
    update = Update(dataclasses.replace(optimizer, weight_decay=0.5), weights)
    update({"w": np.zeros((2, 2))}, lr=0.25)
    # its decay passes through the quotient of norms: one learning rate of the weight's length
    if isinstance(optimizer, Lars):  # without a gradient, the quotient counts as 1
        np.testing.assert_allclose(update.weights["w"], weights["w"] * (1 - 0.25 * 0.5), rtol=1e-12)
    elif isinstance(optimizer, Lamb):
        np.testing.assert_allclose(update.weights["w"], weights["w"] * (1 - 0.25), rtol=1e-12)
    else:
        np.testing.assert_allclose(update.weights["w"], weights["w"] * (1 - 0.25 * 0.5), rtol=1e-12)


@every_optimizer
def test_multipliers_scale_the_learning_rate(optimizer):
    scaled = dataclasses.replace(
        optimizer,
        weight_decay=0.1,
        learning_rate_multipliers={"*.bias": 0.5, "fc.*": 0.25, "scale": 0},
    )
    update = Update(scaled, start())
    for _ in range(5):
        update(pull(update.weights), 0.125)
    for name, factor in {"fc.bias": 0.5, "fc.weight": 0.25, "conv.weight": 1, "scale": 0}.items():
        alone = Update(dataclasses.replace(optimizer, weight_decay=0.1), start())
        for _ in range(5):
            alone(pull(alone.weights), 0.125 * factor)
        assert update.weights[name].tobytes() == alone.weights[name].tobytes()


@every_optimizer
def test_the_average_follows_its_recursion_and_changes_nothing_else(optimizer):
    plain = Update(optimizer, start(np.float64))
    averaging = Update(dataclasses.replace(optimizer, ema_momentum=0.75), start(np.float64))
    average = start(np.float64)
    for name, own in averaging.slots.items():
        assert list(own) == [*plain.slots[name], "ema"]
        np.testing.assert_array_equal(own["ema"], average[name])
    for _ in range(5):
        for update in (plain, averaging):
            update(pull(update.weights))
        for name, w in averaging.weights.items():
            average[name] = 0.75 * average[name] + 0.25 * w
            np.testing.assert_allclose(averaging.slots[name]["ema"], average[name], rtol=1e-12)
            assert w.tobytes() == plain.weights[name].tobytes()


@every_optimizer
def test_slots_begin_as_copies(optimizer):
    weights = start()
    for name, w in weights.items():
        slots = initial_slots(dataclasses.replace(optimizer, ema_momentum=0.5), name, w)
        for array in slots.values():
            array += 1
    assert all(np.array_equal(w, start()[name]) for name, w in weights.items())


@every_optimizer
def test_slots_of_one_number_take_no_memory(optimizer):
    for name, w in start().items():
        light = initial_slots_to_read(optimizer, name, w)
        for slot, array in initial_slots(optimizer, name, w).items():
            np.testing.assert_array_equal(light[slot], array, strict=True)
            if array.size and (array == array.flat[0]).all():
                assert not any(light[slot].strides)


@every_optimizer
def test_what_weights_share_is_computed_once(optimizer):
    """The second and third weight add the same nodes, and none that depends on the step alone."""
    optimizer = dataclasses.replace(optimizer, weight_decay=0.1)
    counts = []
    for n in (1, 2, 3):
        update = Update(optimizer, {f"w{i}": np.ones((2, 2), np.float32) for i in range(n)})
        counts.append(Counter(op_type for op_type, _ in update.nodes))
        assert all(name.startswith("optimizer/") for _, name in update.nodes)
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert not {"Pow", "Cast"} & set(counts[1] - counts[0])


def updates_concatenated_as_alone(optimizer):
    """Whether weights that are updated as one flat tensor become what they become alone, and so do
    their slots: what `elementwise` says of an optimizer.
    """
    draw = np.random.default_rng(2)
    # of very different size, so that a norm over both is neither's
    weights = {"large": draw.normal(size=(4, 3)), "small": 1e-3 * draw.normal(size=5)}
    apart = {name: Update(optimizer, {name: w}) for name, w in weights.items()}
    together = Update(optimizer, {"all": np.concatenate([w.ravel() for w in weights.values()])})
    for step in range(6):
        gradients = {"large": draw.normal(size=(4, 3)), "small": 10.0 * draw.normal(size=5)}
        for name, update in apart.items():
            update({name: gradients[name]}, lr=0.01 * (step + 1))
        together(
            {"all": np.concatenate([g.ravel() for g in gradients.values()])}, lr=0.01 * (step + 1)
        )
    states = {
        name: {"weight": update.weights[name], **update.slots[name]}
        for name, update in apart.items()
    }
    if any(a.shape != weights[name].shape for name, own in states.items() for a in own.values()):
        return False  # a slot of another shape than its weight's cannot be concatenated
    state = {"weight": together.weights["all"], **together.slots["all"]}
    return all(
        np.allclose(
            np.concatenate([own[key].ravel() for own in states.values()]), array, rtol=1e-9, atol=0
        )
        for key, array in state.items()
    )


@every_optimizer
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "ema_momentum": 0.9}], ids=str)
def test_an_elementwise_update_and_no_other_can_run_on_concatenated_weights(optimizer, settings):
    optimizer = dataclasses.replace(optimizer, **settings)
    expected = optimizer.elementwise and not optimizer.cautious
    assert updates_concatenated_as_alone(optimizer) == expected


def test_the_law_of_elementwise_sees_a_wrong_flag():
    """In both directions, for a norm, a mean, and a slot that all elements share."""
    for cls in set(REGISTRY.values()):
        wrong = type(cls.__name__, (cls,), {"elementwise": not cls.elementwise})()
        assert updates_concatenated_as_alone(wrong) != wrong.elementwise

    @dataclasses.dataclass(frozen=True)
    class Centralized(SGD):
        """Gradients less their mean, as if element by element."""

        elementwise = True

        def update(self, op, w, g, lr, step, *slots):
            return super().update(op, w, g - op.ReduceMean(g), lr, step, *slots)

    for optimizer in (Centralized(), Centralized(momentum=0.9)):
        assert not updates_concatenated_as_alone(optimizer)


@every_optimizer
def test_repr_equality_hash_and_json(optimizer):
    optimizer = dataclasses.replace(
        optimizer,
        learning_rate=Warmup(Cosine(0.1, 100), 10),
        exclude_from_weight_decay=("*bias", "norm*"),
        learning_rate_multipliers={"head*": 2.0, "*": 0.1},
        ema_momentum=0.99,
    )
    again = eval(repr(optimizer), {**vars(onnxfit.schedules), **vars(onnxfit.optimizers)})
    assert again == optimizer
    assert hash(again) == hash(optimizer)
    for given in (optimizer, type(optimizer)()):
        restored = from_config(
            json.loads(json.dumps(to_config(given))), MODULE, "onnxfit.schedules"
        )
        assert restored == given
        assert hash(restored) == hash(given)
    assert restored != optimizer
    assert list(
        from_config(to_config(optimizer), MODULE, "onnxfit.schedules").learning_rate_multipliers
    ) == ["head*", "*"]


def test_config_of_defaults_is_the_name_alone():
    assert to_config(AdamW()) == {"name": "AdamW"}
    assert to_config(AdamW(weight_decay=0.0)) == {
        "name": "AdamW",
        "settings": {"weight_decay": 0.0},
    }


@every_optimizer
def test_nonsense_is_refused_in_every_number(optimizer):
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        bad: list[object] = []
        if isinstance(value, float):
            bad = [math.nan, math.inf, "x", True, None] + (
                [1.0] if field.name == "beta2_decay" else [-1.0]
            )
        elif field.name == "betas":
            bad = [(1.0, 0.9), (0.9, -0.1), (0.9,), (0.9,) * 5, 0.9, (0.9, math.nan)]
        elif isinstance(value, tuple) and field.name == "eps":
            bad = [(0.0, 1e-3), (None, -1.0), (None,)]
        elif field.name == "ema_momentum":
            bad = [0.0, 1.0, "x"]
        elif field.name == "learning_rate_multipliers":
            bad = [{"a": -1.0}, {"a": "x"}, {"a": math.nan}]
        for setting in bad:
            with pytest.raises(SettingError, match=f"{type(optimizer).__name__}.*{field.name}"):
                dataclasses.replace(optimizer, **{field.name: setting})


# -- torch.optim


# name -> ours, torch's class, its settings, the decoupled weight decay that it lacks
TORCH = {
    "sgd": (SGD(0.05), "SGD", {"lr": 0.05}, 0),
    "sgd_decay": (SGD(0.05, weight_decay=0.1), "SGD", {"lr": 0.05}, 0.1),
    "momentum": (SGD(0.05, 0.9), "SGD", {"lr": 0.05, "momentum": 0.9}, 0),
    "nesterov": (
        SGD(0.05, 0.9, nesterov=True),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        0,
    ),
    "dampening": (
        SGD(0.05, 0.9, dampening=0.4),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.4},
        0,
    ),
    "adam": (Adam(), "Adam", {}, 0),
    "adam_large": (
        Adam(0.02, (0.8, 0.95), 1e-6),
        "Adam",
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6},
        0,
    ),
    "amsgrad": (Adam(0.02, amsgrad=True), "Adam", {"lr": 0.02, "amsgrad": True}, 0),
    "adamw": (AdamW(), "AdamW", {}, 0),
    "adamw_large": (AdamW(0.02, weight_decay=0.5), "AdamW", {"lr": 0.02, "weight_decay": 0.5}, 0),
    "adamax": (Adamax(), "Adamax", {}, 0),
    "adamax_large": (
        Adamax(0.02, (0.8, 0.9), 1e-3),
        "Adamax",
        {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3},
        0,
    ),
    "nadam": (NAdam(), "NAdam", {}, 0),
    "nadam_large": (
        NAdam(0.02, (0.8, 0.95), 1e-6, 0.1, weight_decay=0.2),
        "NAdam",
        {
            "lr": 0.02,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.2,
            "momentum_decay": 0.1,
            "decoupled_weight_decay": True,
        },
        0,
    ),
    "radam": (RAdam(), "RAdam", {}, 0),
    "radam_large": (
        RAdam(0.02, (0.8, 0.95), 1e-6, weight_decay=0.2),
        "RAdam",
        {
            "lr": 0.02,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.2,
            "decoupled_weight_decay": True,
        },
        0,
    ),
    "radam_short": (RAdam(0.02, (0.8, 0.6)), "RAdam", {"lr": 0.02, "betas": (0.8, 0.6)}, 0),
    "rmsprop": (RMSprop(), "RMSprop", {}, 0),
    "rmsprop_momentum": (
        RMSprop(0.005, 0.9, momentum=0.5),
        "RMSprop",
        {"lr": 0.005, "alpha": 0.9, "momentum": 0.5},
        0,
    ),
    "rmsprop_centered": (
        RMSprop(0.005, 0.9, 1e-4, momentum=0.5, centered=True),
        "RMSprop",
        {"lr": 0.005, "alpha": 0.9, "eps": 1e-4, "momentum": 0.5, "centered": True},
        0,
    ),
    "adagrad": (Adagrad(), "Adagrad", {}, 0),
    "adagrad_decay": (
        Adagrad(0.05, 0.1, 0.2, 1e-3),
        "Adagrad",
        {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3},
        0,
    ),
    "adadelta": (Adadelta(), "Adadelta", {}, 0),
    "adadelta_large": (
        Adadelta(2.0, 0.8, 1e-3, weight_decay=0.01),
        "Adadelta",
        {"lr": 2.0, "rho": 0.8, "eps": 1e-3},
        0.01,
    ),
    "rprop": (Rprop(0.01), "Rprop", {"lr": 0.01}, 0),
    "rprop_large": (
        Rprop(0.1, (0.3, 1.5), (0.01, 2.0)),
        "Rprop",
        {"lr": 0.1, "etas": (0.3, 1.5), "step_sizes": (0.001, 0.2)},
        0,
    ),
    "adafactor": (Adafactor(), "Adafactor", {}, 0),
    "adafactor_large": (
        Adafactor(0.3, -0.6, (1e-5, 0.9), 1.5, weight_decay=0.1),
        "Adafactor",
        {"lr": 0.3, "beta2_decay": -0.6, "eps": (1e-5, 0.9), "d": 1.5, "weight_decay": 0.1},
        0,
    ),
}
# torch has none, or one that orthogonalizes in bfloat16
PAPERS = {Lion, Lamb, AdaBelief, Adan, Adopt, Lars, Muon, NovoGrad, ScheduleFreeAdamW}


def test_every_optimizer_is_compared_with_torch_or_its_paper():
    assert {type(ours) for ours, *_ in TORCH.values()} | PAPERS == set(REGISTRY.values())


def network(torch, dtype):
    """A loss of weights of every rank, and the batch of each step."""
    draw = np.random.default_rng(3)
    x, y = (torch.tensor(draw.normal(size=(50, 8, n)), dtype=dtype) for n in (4, 2))

    def loss(w, step):
        h = torch.tanh(x[step] @ w["fc.weight"] + w["fc.bias"])
        return (
            (torch.einsum("bi,kij->bj", h, w["conv.weight"])[:, :2] * w["scale"] - y[step]) ** 2
        ).mean()

    return loss


@pytest.mark.torch
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("case", TORCH)
def test_torch_has_the_same_weights_after_each_of_50_steps(case, dtype, tolerance):
    torch = pytest.importorskip("torch")
    ours, name, settings, decay = TORCH[case]
    loss = network(torch, getattr(torch, dtype))
    theirs = {name: torch.tensor(w, requires_grad=True) for name, w in start(dtype).items()}
    optimizer = getattr(torch.optim, name)(list(theirs.values()), **settings)
    rate = optimizer.param_groups[0]["lr"]
    # torch keeps the product of mu in float32
    tolerance = max(tolerance, 1e-8) if isinstance(ours, NAdam) else tolerance
    update = Update(ours, start(dtype))
    first = start(dtype)
    for step in range(50):
        optimizer.zero_grad()
        loss(theirs, step).backward()
        with torch.no_grad():
            for w in theirs.values():
                w.mul_(1 - rate * decay)
        optimizer.step()
        mine = {name: torch.tensor(w, requires_grad=True) for name, w in update.weights.items()}
        loss(mine, step).backward()
        update({name: w.grad.numpy() for name, w in mine.items()})
        for name, w in theirs.items():
            np.testing.assert_allclose(
                update.weights[name], w.detach().numpy(), rtol=0, atol=tolerance
            )
    assert all(np.abs(update.weights[name] - w).max() > 1e-3 for name, w in first.items())


# -- formulas from the papers, in float64


def lion(w, g, t, s, lr=1e-4, b1=0.9, b2=0.99, decay=0.0):
    m = s.get("m", 0.0)
    s["m"] = b2 * m + (1 - b2) * g
    return w - lr * (np.sign(b1 * m + (1 - b1) * g) + decay * w)


def lamb(w, g, t, s, lr=1e-3, b1=0.9, b2=0.999, eps=1e-6, decay=0.0):
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g**2
    u = (s["m"] / (1 - b1**t)) / (np.sqrt(s["v"] / (1 - b2**t)) + eps) + decay * w
    return w - lr * np.linalg.norm(w) / np.linalg.norm(u) * u


def adam(w, g, t, s, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g**2
    return w - lr * (s["m"] / (1 - b1**t)) / (np.sqrt(s["v"] / (1 - b2**t)) + eps) - lr * decay * w


def adafactor(w, g, t, s, lr=0.01):
    """Shazeer & Stern's Algorithm 4 with its relative step size, the matrix of row and column sums
    divided by their total.
    """
    b2 = 1 - t**-0.8
    if w.ndim < 2:
        v = s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g**2
    else:
        s["r"] = b2 * s.get("r", 0.0) + (1 - b2) * (g**2).sum(-1)
        s["c"] = b2 * s.get("c", 0.0) + (1 - b2) * (g**2).sum(-2)
        v = np.einsum("...n,...m->...nm", s["r"], s["c"]) / s["r"].sum(-1)[..., None, None]
    u = g / np.sqrt(v)
    u /= max(1.0, np.sqrt((u**2).mean()))
    return w - max(1e-3, np.sqrt((w**2).mean())) * min(lr, t**-0.5) * u


def sgd(w, g, t, s, lr=0.1, mu=0.9, tau=0.3):
    s["v"] = g if t == 1 else mu * s["v"] + (1 - tau) * g
    return w - lr * s["v"]


def adabelief(w, g, t, s, lr=1e-3, b1=0.9, b2=0.999, eps=1e-16):
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["s"] = b2 * s.get("s", 0.0) + (1 - b2) * (g - s["m"]) ** 2 + eps
    return w - lr * (s["m"] / (1 - b1**t)) / (np.sqrt(s["s"] / (1 - b2**t)) + eps)


def adan(w, g, t, s, lr=1e-3, b1=0.98, b2=0.92, b3=0.99, eps=1e-8):
    d = g - s["g"] if t > 1 else 0 * g
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * d
    s["n"] = b3 * s.get("n", 0.0) + (1 - b3) * (g + b2 * d) ** 2
    s["g"] = g
    m, v, n = s["m"] / (1 - b1**t), s["v"] / (1 - b2**t), s["n"] / (1 - b3**t)
    return w - lr * (m + b2 * v) / (np.sqrt(n) + eps)


def adopt(w, g, t, s, lr=1e-3, b1=0.9, b2=0.9999, eps=1e-6):
    if t == 1:
        s["m"], s["v"] = 0 * g, g**2
        return w
    direction = np.clip(g / np.maximum(np.sqrt(s["v"]), eps), -((t - 1) ** 0.25), (t - 1) ** 0.25)
    s["m"] = b1 * s["m"] + (1 - b1) * direction
    s["v"] = b2 * s["v"] + (1 - b2) * g**2
    return w - lr * s["m"]


def lars(w, g, t, s, lr=0.1, mu=0.9, trust=0.001, decay=0.0):
    local = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w) + 1e-9)
    s["v"] = mu * s.get("v", 0.0) + lr * local * (g + decay * w)
    return w - s["v"]


def novograd(w, g, t, s, lr=0.01, b1=0.95, b2=0.98, eps=1e-8, decay=0.0):
    square = (g**2).sum()
    s["v"] = square if t == 1 else b2 * s["v"] + (1 - b2) * square
    s["m"] = b1 * s.get("m", 0.0) + g / (np.sqrt(s["v"]) + eps) + decay * w
    return w - lr * s["m"]


def muon(w, g, t, s, lr=1e-3, mu=0.95, steps=5, original=False, nesterov=True, decay=0.1):
    """By the singular values, to which the odd polynomial is applied; with torch's momentum."""
    if w.ndim < 2:
        return adam(w, g, t, s, lr, decay=decay)
    s["b"] = mu * s.get("b", 0.0) + (1 - mu) * g
    u = mu * s["b"] + (1 - mu) * g if nesterov else s["b"]
    left, values, right = np.linalg.svd(u.reshape(len(u), -1), full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    n, m = len(left), right.shape[1]
    size = max(1, n / m) ** 0.5 if original else 0.2 * max(n, m) ** 0.5
    return w - lr * decay * w - lr * size * ((left * values) @ right).reshape(w.shape)


def schedule_free(w, g, t, s, lr=0.0025, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    """The paper's three sequences: y from z and x."""
    z, x = s.get("z", w), s.get("x", w)
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g**2
    z = z - lr * (g / (np.sqrt(s["v"] / (1 - b2**t)) + eps) + decay * w)
    s["z"], s["x"] = z, (1 - 1 / t) * x + z / t
    return (1 - b1) * z + b1 * s["x"]


@pytest.mark.parametrize(
    ("optimizer", "formula", "settings"),
    [
        (AdaBelief(), adabelief, {}),
        (
            AdaBelief(0.1, (0.8, 0.9), 1e-3),
            adabelief,
            {"lr": 0.1, "b1": 0.8, "b2": 0.9, "eps": 1e-3},
        ),
        (Adan(), adan, {}),
        (
            Adan(0.1, (0.9, 0.8, 0.7), 1e-3),
            adan,
            {"lr": 0.1, "b1": 0.9, "b2": 0.8, "b3": 0.7, "eps": 1e-3},
        ),
        (Adopt(), adopt, {}),
        (Adopt(0.1, (0.8, 0.9), 0.5), adopt, {"lr": 0.1, "b1": 0.8, "b2": 0.9, "eps": 0.5}),
        (Lars(), lars, {}),
        (
            Lars(0.5, 0.8, 0.01, weight_decay=0.3),
            lars,
            {"lr": 0.5, "mu": 0.8, "trust": 0.01, "decay": 0.3},
        ),
        (NovoGrad(), novograd, {}),
        (
            NovoGrad(0.1, (0.8, 0.9), weight_decay=0.3),
            novograd,
            {"lr": 0.1, "b1": 0.8, "b2": 0.9, "decay": 0.3},
        ),
        (Muon(), muon, {}),
        (
            Muon(0.1, 0.9, False, 3, adjust_lr_fn="original", weight_decay=0.0),
            muon,
            {"lr": 0.1, "mu": 0.9, "steps": 3, "original": True, "nesterov": False, "decay": 0.0},
        ),
        (ScheduleFreeAdamW(), schedule_free, {}),
        (
            # with a smaller eps, rounding errors grow near the minimum
            ScheduleFreeAdamW(0.02, (0.8, 0.9), 0.1, weight_decay=0.3),
            schedule_free,
            {"lr": 0.02, "b1": 0.8, "b2": 0.9, "eps": 0.1, "decay": 0.3},
        ),
        (Lion(), lion, {}),
        (
            Lion(0.01, (0.8, 0.95), weight_decay=0.3),
            lion,
            {"lr": 0.01, "b1": 0.8, "b2": 0.95, "decay": 0.3},
        ),
        (Lamb(), lamb, {}),
        (
            Lamb(0.1, (0.8, 0.9), 1e-3, weight_decay=0.3),
            lamb,
            {"lr": 0.1, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "decay": 0.3},
        ),
        (Adam(0.1), adam, {"lr": 0.1}),
        (AdamW(0.1), adam, {"lr": 0.1, "decay": 0.01}),
        (Adafactor(), adafactor, {}),
        (SGD(0.1, 0.9, dampening=0.3), sgd, {}),
    ],
    ids=lambda v: called(v) if isinstance(v, Optimizer) else "",
)
def test_the_papers_formula_in_numpy(optimizer, formula, settings):
    update = Update(optimizer, start(np.float64))
    weights, memory = start(np.float64), {name: {} for name in update.weights}
    for t in range(1, 51):
        g = pull(weights)
        weights = {
            name: formula(w, g[name], t, memory[name], **settings) for name, w in weights.items()
        }
        update(pull(update.weights))
        for name, w in weights.items():
            np.testing.assert_allclose(update.weights[name], w, rtol=0, atol=1e-10)


@pytest.mark.torch
def test_muon_orthogonalizes_as_torchs_up_to_its_bfloat16():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    weights = {n: w for n, w in start().items() if w.ndim == 2}
    w = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    theirs = torch.optim.Muon(w.values(), lr=0.1, adjust_lr_fn="match_rms_adamw")
    update = Update(Muon(0.1), weights)
    for _ in range(10):
        for name, one in w.items():
            one.grad = torch.tensor(pull({name: one.detach().numpy()})[name]).float()
        theirs.step()
        update(pull(update.weights))
    for name, one in w.items():
        np.testing.assert_allclose(update.weights[name], one.detach().numpy(), atol=0.05)
        assert np.abs(update.weights[name] - weights[name]).max() > 0.2


@every_optimizer
def test_cautious_steps_are_the_others_where_the_gradient_agrees(optimizer):
    plain = dataclasses.replace(optimizer, cautious=False)
    cautious = dataclasses.replace(optimizer, cautious=True, ema_momentum=0.5)
    draw = np.random.default_rng(4)
    weights = {"w": draw.normal(size=(4, 5))}
    one, other = Update(plain, weights), Update(cautious, weights)
    agreed = []
    for _ in range(10):
        g = draw.normal(size=(4, 5))
        before = other.weights["w"]
        one.weights = {"w": before}
        one({"w": g}, lr=0.1)
        other({"w": g}, lr=0.1)
        decayed = before
        if not optimizer.applies_weight_decay and optimizer.weight_decay:
            decayed = before * (1 - 0.1 * optimizer.weight_decay)
        step = one.weights["w"] - decayed
        agrees = step * g < 0
        agreed.append(agrees.mean())
        expected = decayed + step * agrees / max(agrees.mean(), 1e-3)
        np.testing.assert_allclose(other.weights["w"], expected, rtol=1e-9, atol=1e-12)
    if isinstance(optimizer, (Adam, Lamb, Lion)):  # which have a momentum
        assert min(agreed) < 1


def test_the_averages_of_schedule_free_are_exported_and_validated(tmp_path):
    trainer = Trainer(mlp((4, 3)), loss="mse", optimizer=ScheduleFreeAdamW(0.1))
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    swap = onnxfit.callbacks.SwapEMAWeights(at_end=False)
    history = trainer.fit(
        x, x[:, :3], epochs=3, validation_data=(x, x[:, :3]), callbacks=[swap], verbose=0
    )
    slots = trainer.get_state()["slots"]
    trainer.export(tmp_path / "m.onnx", averaged=True)
    exported = Trainer(tmp_path / "m.onnx", loss="mse")
    for name, w in exported.get_weights().items():
        np.testing.assert_array_equal(w, slots[f"{name}/x"])
        assert not np.array_equal(w, trainer.get_weights()[name])
    loss = exported.evaluate(x, x[:, :3])["loss"]
    assert history.history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
    trainer.save(tmp_path / "t.ckpt")
    again = Trainer.load(tmp_path / "t.ckpt")
    for one in (trainer, again):
        one.train_on_batch(x, x[:, :3])
    np.testing.assert_equal(again.get_state(), trainer.get_state())


def test_muon_trains_vectors_by_adamw_with_its_settings():
    optimizer = Muon(0.1, exclude_from_weight_decay="*.bias", learning_rate_multipliers={"*": 2})
    own = optimizer.for_weights([WeightInfo(n, w.shape, w.dtype) for n, w in start().items()])
    assert {n: type(one.optimizer) for n, one in own.items()} == {
        "fc.weight": Muon, "fc.bias": AdamW, "conv.weight": Muon, "scale": AdamW
    }  # fmt: skip
    assert own["fc.bias"].optimizer.weight_decay == 0.0
    assert own["scale"].optimizer == AdamW(0.1, weight_decay=0.1)
    assert {one.multiplier for one in own.values()} == {2.0}


def test_lamb_counts_the_quotient_of_norms_as_one_where_a_norm_is_zero():
    update = Update(Lamb(0.1), {"zero": np.zeros(4), "still": np.ones(4)})
    update({"zero": np.array([1.0, -2.0, 3.0, 4.0]), "still": np.zeros(4)})
    np.testing.assert_allclose(update.weights["zero"], [-0.1, 0.1, -0.1, -0.1], rtol=1e-5)
    np.testing.assert_array_equal(update.weights["still"], np.ones(4))


def test_centered_rmsprop_survives_a_constant_gradient():
    """The variance of a constant is 0, and below 0 by rounding."""
    update = Update(RMSprop(0.01, 0.5, centered=True), {"w": np.ones(1000, np.float32)})
    g = np.random.default_rng(0).normal(size=1000)
    for _ in range(60):
        update({"w": g}, lr=0.0)
    assert np.isfinite(update.weights["w"]).all()


# -- few nodes


@pytest.mark.parametrize(
    ("optimizer", "per_weight"),
    [
        (SGD(), 2),
        (SGD(weight_decay=0.1), 3),
        (SGD(momentum=0.9), 4),
        (SGD(ema_momentum=0.9), 5),
        (Lion(), 9),
        (Adam(), 12),
        (AdamW(), 13),
        (RMSprop(), 9),
        (Adagrad(), 7),
    ],
    ids=lambda v: called(v) if isinstance(v, Optimizer) else str(v),
)
def test_nodes_per_weight(optimizer, per_weight):
    counts = [
        len(Update(optimizer, {f"w{i}": np.ones(2, np.float32) for i in range(n)}).nodes)
        for n in (1, 2)
    ]
    assert counts[1] - counts[0] == per_weight


def test_plain_sgd_is_two_nodes_and_remembers_nothing():
    update = Update(SGD(0.5), {"w": np.array([1.0, 2.0], np.float32)})
    assert [op_type for op_type, _ in update.nodes] == ["Mul", "Sub"]
    assert update.slots == {"w": {}}
    update({"w": np.array([2.0, 0.0])})
    assert update.weights["w"].tolist() == [0.0, 2.0]


# -- an optimizer of one's own


@dataclasses.dataclass(frozen=True)
class Decaying(Optimizer):
    """Remembers a scalar, a float64 and the step; returns what `give` makes of it."""

    give: object = dataclasses.field(default=None, kw_only=True)

    def slots(self, w):
        return {"count": np.zeros((), np.float64), "first": np.zeros(w.shape[:1], np.int64)}

    def update(self, op, w, g, lr, step, count, first):
        result = w - lr * op.cast(step**-0.5, w.dtype) * g, count + 1, first + 2
        return result if self.give is None else self.give(op, *result)


def test_ones_own_optimizer_has_slots_of_any_shape_and_type():
    update = Update(Decaying(1.0), {"w": np.zeros((2, 3), np.float32)})
    for _ in range(2):
        update({"w": np.ones((2, 3))})
    np.testing.assert_allclose(update.weights["w"], np.full((2, 3), -1 - 2**-0.5), rtol=1e-6)
    assert update.slots["w"]["count"] == 2
    assert update.slots["w"]["first"].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (
            lambda op, w, c, f: w,
            r"Decaying.update for 'w' returned 1 values, expected 3: the weight and count, first\.",
        ),
        (
            lambda op, w, c, f: (w, op.cast(c, np.float32), f),
            r"changed 'count' from float64\[\] to float32\[\]",
        ),
        (
            lambda op, w, c, f: (op.ReduceSum(w, [0], keepdims=0), c, f),
            r"changed 'w' from float32\[2, 3\] to float32\[3\]",
        ),
    ],
)
def test_an_update_that_returns_something_else_is_refused(give, message):
    with pytest.raises(SettingError, match=message):
        Update(Decaying(give=give), {"w": np.zeros((2, 3), np.float32)})


def test_a_slot_may_not_take_the_averages_name():
    class Mine(SGD):
        def slots(self, w):
            return {"ema": w}

    assert list(initial_slots(Mine(), "w", np.ones(2))) == ["ema"]
    with pytest.raises(SettingError, match=r"Mine has a slot 'ema' for 'w'"):
        initial_slots(Mine(ema_momentum=0.5), "w", np.ones(2))


# -- names, settings, the learning rate


# Small weights together
# -------------------------------------------------------------------------------------------------------

SOURCES = ["onnx", pytest.param("onnxruntime", marks=needs_builder)]
PICKY = {
    "exclude_from_weight_decay": ["*.bias"],
    "learning_rate_multipliers": {"fc2.*": 0.5},
    "ema_momentum": 0.9,
}


def trained(optimizer, monkeypatch, small, **options):
    """A trainer after six steps, with weights of up to `small` elements updated together."""
    monkeypatch.setitem(FUSING, "cpu", dataclasses.replace(FUSING["cpu"], weight=small))
    trainer = Trainer(
        mlp((4, 8, 6, 3)), loss="cross_entropy", optimizer=optimizer, clip_value=0.5, **options
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 4)).astype(np.float32), rng.integers(0, 3, 48)
    trainer.fit(x, y, batch_size=8, epochs=1, verbose=0)
    return trainer


@pytest.mark.parametrize("optimizer", list(REGISTRY.values()), ids=list(REGISTRY))
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.01, **PICKY}], ids=["plain", "picky"])
def test_fused_weights_are_updated_as_each_alone(optimizer, settings, monkeypatch, tmp_path):
    alone, together = (
        trained(optimizer(0.01, **settings), monkeypatch, small) for small in (0, 30)
    )
    fused = together._training.backend.fused
    # not to the bit: the last elements of a tensor, which fill no register, are rounded in their
    # own way
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    assert not alone._training.backend.fused
    assert bool(fused) == (
        together._training.recipe.optimizers["fc0.bias"].optimizer.elementwise
        and bool(together._training.backend.recipe.slots["fc0.bias"])
    )
    # 32 elements
    assert "fc0.weight" not in {name for members in fused.values() for name in members}
    state = {
        name: alone._training.backend.state.get(name) for name in alone._training.backend.state
    }
    assert list(state) == list(together._training.backend.state)  # without the fused tensors
    for name, array in state.items():
        close(together._training.backend.state.get(name), array, err_msg=name)
    # a fused tensor shares its memory with its weights: both see what is set, saved and reverted
    for name in ("fc1.bias", "fc2.bias"):
        together.set_weights({name: np.full_like(state[name], 0.25)})
        alone.set_weights({name: np.full_like(state[name], 0.25)})
    together.save(tmp_path / "t.ckpt")
    for trainer in (alone, together):
        trainer.train_on_batch(np.ones((8, 4), np.float32), np.zeros(8, np.int64))
    close(together.get_weights()["fc2.bias"], alone.get_weights()["fc2.bias"])
    again = Trainer.load(tmp_path / "t.ckpt")
    again.train_on_batch(np.ones((8, 4), np.float32), np.zeros(8, np.int64))
    np.testing.assert_array_equal(
        again.get_weights()["fc2.bias"], together.get_weights()["fc2.bias"]
    )
    together.revert_step()
    assert (together.get_weights()["fc2.bias"] == 0.25).all()


def test_fused_weights_stay_in_the_cache(monkeypatch):
    """Many small weights are in several tensors, each with no more elements than one may have;
    nothing is alone in one.
    """
    limits = dataclasses.replace(FUSING["cpu"], weight=60, tensor=100)
    monkeypatch.setitem(FUSING, "cpu", limits)
    sizes = {"a": 50, "b": 50, "c": 1, "large": 61, "d": 60, "e": 39, "f": 60, "none": 0}
    weights = {name: np.ones(n, np.float32) for name, n in sizes.items()}
    slots = {name: initial_slots(Adam(), name, w) for name, w in weights.items()}
    infos = [WeightInfo(name, w.shape, w.dtype) for name, w in weights.items()]
    assert fused_weights(Adam().for_weights(infos), weights, slots) == [["a", "b"], ["c", "d", "e"]]


@pytest.mark.parametrize("gradient", SOURCES)
@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1), SGD(0.1, weight_decay=0.01, **PICKY), SGD(0.1, momentum=0.9), Adam(0.01)],
    ids=called,
)
def test_what_is_compiled_trains_as_the_graph_that_is_shown(optimizer, gradient, monkeypatch):
    """In which the learning rate may meet the loss, and not every gradient."""
    data = np.linspace(-1, 1, 96).reshape(24, 4).astype(np.float32), np.arange(24) % 3
    weights = []
    for compact in (True, False):
        if not compact:
            monkeypatch.setattr(
                FullBackend, "graph", lambda self, kind, shapes: self.step_graphs(shapes)[kind]
            )
        trainer = Trainer(
            mlp(),
            loss="cross_entropy",
            optimizer=optimizer,
            penalty={"*.weight": 0.01},
            gradient=gradient,
        )
        trainer.fit(*data, epochs=3, batch_size=8, verbose=0)
        weights.append(trainer.get_weights())
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_plain_sgd_multiplies_one_number_by_the_learning_rate():
    def nodes(optimizer, **settings):
        trainer = Trainer(mlp((4, 8, 6, 3)), loss="mse", optimizer=optimizer, **settings)
        graph = trainer._training.backend.graph(
            "train", trainer._training.recipe.declared_batch
        ).graph
        return [n.op_type for n in graph.node if "train/learning_rate" in n.input], [
            n.op_type for n in graph.node
        ].count("Gemm")

    # Forward, back through two layers, weights with their updates. The rate is divided by the
    # number of rows, which is not known here.
    assert nodes(SGD(0.1)) == (["Div"], 3 + 2 + 3)
    assert len(nodes(SGD(0.1), clip_value=1.0)[0]) == 6


def test_fused_tensors_stay_inside(monkeypatch):
    """The graphs that a user sees, and those that update by windows, know nothing of them."""
    trainer = trained(Adam(0.01), monkeypatch, 10_000)
    assert [*trainer._training.backend.fused.values()] == [
        [f"fc{i}.{part}" for i in range(3) for part in ("weight", "bias")]
    ]
    train = onnx.load_from_string(trainer.save_onnx_graph(bytes)["train"])
    assert {"fc0.bias/m", "fc0.bias"} <= {v.name for v in train.graph.input}
    assert not trained(Adam(0.01), monkeypatch, 10_000, accumulate=2)._training.backend.fused
    assert not trained(
        Adam(0.01), monkeypatch, 10_000, backend="forward_backward"
    )._training.backend.fused


def test_names():
    assert {"sgd", "adam", "adamw", "nadam", "rmsprop", "lion", "adafactor"} <= set(REGISTRY)
    for name, cls in REGISTRY.items():
        assert get_optimizer(name) == cls()
    given = Adam(0.5)
    assert get_optimizer(given) is given
    assert get_optimizer(0.25) == get_optimizer(np.float32(0.25)) == SGD(0.25)
    assert get_optimizer(1) == SGD(1.0)
    with pytest.raises(
        UnknownNameError, match=r"No optimizer is called 'adamx'\. Did you mean 'adamax'\?"
    ):
        get_optimizer("adamx")
    with pytest.raises(SettingError, match=r"got <class .*Adam'>. Pass an instance: Adam\(\)\."):
        get_optimizer(Adam)
    with pytest.raises(SettingError, match="a name, an Optimizer or a number, got True"):
        get_optimizer(True)
    with pytest.raises(SettingError, match=r"SGD needs learning_rate >= 0, got -1\.0"):
        get_optimizer(-1)


UNDERSTOOD = {
    "adam_w": "AdamW", "optax.adamw": "AdamW", "torch.optim.AdamW": "AdamW",
    "keras.optimizers.Nadam": "NAdam", "Nadam": "NAdam", "LAMB": "Lamb", "adabelief": "AdaBelief",
    "optax.contrib.muon": "Muon", "novograd": "NovoGrad", "schedule_free_adamw": "ScheduleFreeAdamW",
    "RMSProp": "RMSprop", "optax.contrib.schedule_free_adamw": "ScheduleFreeAdamW",
}  # fmt: skip


@pytest.mark.parametrize(("name", "ours"), UNDERSTOOD.items())
def test_names_of_other_libraries_are_understood(name, ours):
    assert type(get_optimizer(name)).__name__ == ours


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nesterov", "optimizer=onnxfit.optimizers.SGD(0.01, momentum=0.9, nesterov=True)."),
        ("optax.nadamw", "optimizer=onnxfit.optimizers.NAdam(0.002, weight_decay=0.01)."),
        ("sign_sgd", "optimizer=onnxfit.optimizers.Lion(0.0001, betas=(0.0, 0.0))."),
        ("Lookahead", 'optimizer=onnxfit.optimizers.Lookahead("adam").'),
        ("torch.optim.LBFGS", "It reads all rows at once: call onnxfit.fit_lbfgs(trainer, x, y)."),
        ("CosineAnnealingLR", "It is a schedule, the setting learning_rate of an optimizer."),
    ],
)
def test_the_name_of_a_setting_is_answered_with_the_object(name, advice):
    with pytest.raises(SettingError) as raised:
        get_optimizer(name)
    assert advice in str(raised.value)


def test_an_optimizer_that_is_missing_is_answered_with_the_most_similar():
    with pytest.raises(UnknownNameError, match=r"most similar is .*\.Adagrad\(0\.01\)\. Known:"):
        get_optimizer("keras.optimizers.Ftrl")


@pytest.mark.torch
def test_every_optimizer_of_torch_is_understood_or_answered_with_one():
    torch = pytest.importorskip("torch")
    base = torch.optim.Optimizer
    kinds = [c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, base)]
    assert len(kinds) > 12
    for kind in set(kinds) - {base, torch.optim.LBFGS}:
        try:
            assert type(get_optimizer(kind.__name__)).__name__ == kind.__name__
        except SettingError as error:
            assert "onnxfit.optimizers." in str(error)  # noqa: PT017


@pytest.mark.parametrize("code", [*other_names.OPTIMIZERS.values(), *other_names.SIMILAR.values()])
def test_the_advised_optimizers_can_be_made(code):
    names = {name: getattr(onnxfit.optimizers, name) for name in onnxfit.optimizers.__all__}
    assert isinstance(eval(code.replace("...", '"sgd"'), names), Optimizer)


@pytest.mark.parametrize("name", ["sign_sgd", "signum"])
def test_the_advised_lion_is_the_sign_of_the_gradient_or_its_mean(name):
    lion = eval(other_names.OPTIMIZERS[name], {"Lion": Lion})
    beta = {"sign_sgd": 0.0, "signum": 0.9}[name]
    weights, mean = {"w": np.array([1.0, -2.0])}, np.zeros(2)
    run = Update(lion, weights)
    expected = weights["w"].copy()
    for g in ([1.0, -1.0], [-0.1, 3.0], [-20.0, 0.5]):
        mean = beta * mean + (1 - beta) * np.array(g)
        expected = expected - 0.0001 * np.sign(mean)
        run({"w": np.array(g)})
        np.testing.assert_allclose(run.weights["w"], expected, rtol=1e-12)


@pytest.mark.torch
def test_every_schedule_of_torch_is_answered_with_an_object():
    torch = pytest.importorskip("torch")
    rates = vars(torch.optim.lr_scheduler).values()
    base = torch.optim.lr_scheduler.LRScheduler
    found = {c.__name__ for c in rates if isinstance(c, type) and issubclass(c, base)} - {
        base.__name__, "_LRScheduler", "ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SWALR"
    }  # fmt: skip
    assert len(found) > 10
    for name in found:
        with pytest.raises(SettingError, match=r"Pass (learning_rate|callbacks)="):
            SGD(name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ExponentialDecay", "Exponential(0.01, decay_steps=..., decay_rate=...)."),
        ("CosineDecay", "Cosine(0.01, decay_steps=...)."),
        ("OneCycleLR", "OneCycle(0.01, total_steps=...)."),
        ("optax.warmup_cosine_decay_schedule", "Warmup(Cosine(0.01, decay_steps=...), steps=...)."),
    ],
)
def test_the_name_of_a_schedule_is_answered_with_the_object(name, advice):
    with pytest.raises(SettingError) as raised:
        Adam(name)
    assert f"Adam needs learning_rate as a number or a Schedule, got {name!r}." in str(raised.value)
    assert str(raised.value).endswith(f"Pass learning_rate=onnxfit.schedules.{advice}")


@pytest.mark.parametrize("code", sorted(set(other_names.SCHEDULES.values())))
def test_the_advised_schedules_can_be_made(code):
    names = {name: getattr(schedules, name) for name in schedules.__all__}
    code = code.replace("values=[...]", "values=[1.0, 0.1]").replace("([...]", "([0.1, 0.2]")
    assert (
        eval(code.replace("decay_rate=...", "decay_rate=0.9").replace("...", "10"), names)(3) >= 0
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), r"SGD needs learning_rate >= 0, got -0\.1\."),
        (lambda: SGD("fast"), r"SGD needs learning_rate >= 0, got 'fast'\."),
        (lambda: SGD(momentum=-1.0), r"SGD needs momentum >= 0, got -1\.0\."),
        (
            lambda: SGD(nesterov=True),
            r"nesterov needs momentum > 0 and dampening 0, got momentum 0\.0 and dampening 0\.0",
        ),
        (
            lambda: SGD(momentum=0.9, nesterov=True, dampening=0.1),
            r"got momentum 0\.9 and dampening 0\.1",
        ),
        (lambda: SGD(dampening=0.1), r"dampening needs momentum > 0"),
        (lambda: SGD(scaled_velocity=True), r"scaled_velocity needs momentum > 0, got 0\."),
        (
            lambda: Adam(betas=(0.9, 1.0)),
            r"Adam needs betas to be numbers >= 0 and < 1, got \(0\.9, 1\.0\)\.",
        ),
        (lambda: Adam(betas=(0.9,)), r"Adam needs two betas, got \(0\.9,\)\."),
        (lambda: Adam(eps=0.0), r"Adam needs eps > 0, got 0\.0\."),
        (lambda: Adam(weight_decay=-0.1), r"Adam needs weight_decay >= 0, got -0\.1\."),
        (lambda: Adam(ema_momentum=1.0), r"Adam needs ema_momentum > 0 and < 1, got 1\.0\."),
        (
            lambda: Adam(learning_rate_multipliers={"w": -1.0}),
            r"learning_rate_multipliers >= 0, got -1\.0 for 'w'",
        ),
        (lambda: RMSprop(alpha=1.0), r"RMSprop needs alpha >= 0 and < 1, got 1\.0\."),
        (lambda: Adafactor(eps=(None, -1.0)), r"Adafactor needs eps = .*got \(None, -1\.0\)"),
    ],
)
def test_impossible_settings(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_settings_are_kept_as_python_has_them():
    multipliers = {"a": 1.0}
    optimizer = Adam(
        np.float32(0.5),
        betas=[0.5, 0.25],
        exclude_from_weight_decay="*bias",
        learning_rate_multipliers=multipliers,
    )
    multipliers["a"] = 2.0
    assert optimizer == Adam(
        0.5, (0.5, 0.25), exclude_from_weight_decay=("*bias",), learning_rate_multipliers={"a": 1.0}
    )


def test_the_learning_rate_is_a_number_a_schedule_or_a_callable():
    assert learning_rate_at(SGD(0.5), 3) == 0.5
    assert learning_rate_at(SGD(Warmup(0.5, 4)), 2) == 0.25
    assert learning_rate_at(SGD(lambda step: np.float32(step)), 3) == 3.0
    assert type(learning_rate_at(SGD(lambda step: np.float32(step)), 3)) is float
    for bad in (math.nan, math.inf, -1.0, "x", None, True, 1j):
        with pytest.raises(
            ValueError, match=r"learning_rate must be a finite number >= 0, .* for update 7"
        ):
            learning_rate_at(SGD(lambda step, bad=bad: bad), 7)


# -- clipping


def clipped(arrays, clip_norm=None, clip_value=None):
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="clip")
    op = GraphBuilder(graph)
    inputs = {name: op.input(name, a.dtype, a.shape) for name, a in arrays.items()}
    for name, value in clip_gradients(op, inputs, clip_norm, clip_value).items():
        assert value.dtype == arrays[name].dtype
        op.output(f"{name}/clipped", value)
    session = onnxruntime.InferenceSession(
        ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    )
    return dict(zip(arrays, session.run(None, arrays))), [node.op_type for node in graph]


def test_clipping_by_hand():
    arrays = {"a": np.array([50.0], np.float32), "b": np.array([100.0], np.float32)}
    by_norm, _ = clipped(arrays, clip_norm=1.0)
    np.testing.assert_allclose(
        [by_norm["a"][0], by_norm["b"][0]], [0.2**0.5, 2 * 0.2**0.5], rtol=1e-6
    )
    np.testing.assert_allclose(np.round([by_norm["a"][0], by_norm["b"][0]], 4), [0.4472, 0.8944])
    by_value, nodes = clipped(arrays, clip_value=1.0)
    assert [by_value["a"][0], by_value["b"][0]] == [1.0, 1.0]
    assert nodes == ["Clip", "Clip", "Identity", "Identity"][: len(nodes)]
    both, _ = clipped(arrays, clip_norm=1.0, clip_value=60.0)
    np.testing.assert_allclose(
        [both["a"][0], both["b"][0]], np.array([50, 60]) / 6100**0.5, rtol=1e-6
    )


def test_small_gradients_pass_unchanged():
    arrays = {"a": np.array([0.3, -0.4], np.float32), "b": np.zeros((), np.float32)}
    result, _ = clipped(arrays, clip_norm=0.6, clip_value=0.5)
    assert all(result[name].tobytes() == a.tobytes() for name, a in arrays.items())
    unclipped, nodes = clipped(arrays)
    assert all(unclipped[name].tobytes() == a.tobytes() for name, a in arrays.items())
    assert set(nodes) <= {"Identity"}


def test_clipping_mixes_types_and_large_float16():
    draw = np.random.default_rng(0)
    arrays = {
        "half": draw.normal(0, 500, 40).astype(np.float16),
        "single": draw.normal(0, 5, (3, 4)).astype(np.float32),
        "double": draw.normal(size=()),
    }
    arrays["double"] = np.asarray(arrays["double"])
    result, _ = clipped(arrays, clip_norm=2.0)
    norm = sum((a.astype(float) ** 2).sum() for a in arrays.values()) ** 0.5
    for name, a in arrays.items():
        np.testing.assert_allclose(
            result[name], a * (2.0 / norm), rtol=2e-3 if name == "half" else 1e-6
        )


def test_clipping_hides_no_nan():
    arrays = {"a": np.full(100, np.nan, np.float32), "b": np.ones(3, np.float32)}
    by_value, _ = clipped(arrays, clip_value=1.0)
    assert np.isnan(by_value["a"]).all()
    by_norm, _ = clipped(arrays, clip_norm=1.0)
    assert np.isnan(by_norm["a"]).all()
    assert np.isnan(by_norm["b"]).all()


@pytest.mark.torch
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 1000.0])
def test_torch_clips_to_the_same_norm(clip_norm):
    torch = pytest.importorskip("torch")
    arrays = {name: np.asarray(10 * w) for name, w in start().items()}
    theirs = [torch.zeros(a.shape, requires_grad=True) for a in arrays.values()]
    for w, a in zip(theirs, arrays.values()):
        w.grad = torch.tensor(a)
    torch.nn.utils.clip_grad_norm_(theirs, clip_norm)
    result, _ = clipped(arrays, clip_norm=clip_norm)
    for w, name in zip(theirs, arrays):
        # torch divides by the norm plus 1e-6
        np.testing.assert_allclose(result[name], w.grad.numpy(), rtol=2e-5)


@pytest.mark.parametrize("name", ["m", "v", "velocity", "sum", "rows", "weight", "ema"])
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "adagrad", "adafactor"])
def test_a_weight_may_be_named_like_a_slot(name: str, optimizer: str) -> None:
    """Its name decides nothing: the weight ends where one of another name ends."""
    chosen = onnxfit.optimizers.SGD(0.1, momentum=0.9) if optimizer == "momentum" else optimizer
    trained = []
    for weight in (name, "other"):
        model = linear(3, 1, 0.5)
        model.graph.initializer[0].name = weight
        model.graph.node[0].input[1] = weight
        trainer = onnxfit.Trainer(model, loss="mse", optimizer=chosen)
        x = np.arange(12, dtype=np.float32).reshape(4, 3)
        trainer.fit(x, x[:, :1], epochs=3, verbose=0)
        trained.append(trainer.get_weights()[weight])
    np.testing.assert_array_equal(*trained)

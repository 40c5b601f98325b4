"""Groups of weights: torch's parameter groups as evidence, and the laws of a group."""

import json

import numpy as np
import onnx.parser
import pytest

from onnxfit import Trainer
from onnxfit.errors import ArgumentError, CheckpointError, SettingError, UnknownNameError
from onnxfit.optimizers import SGD, Adam, AdamW, Groups, Optimizer, get_optimizer
from onnxfit.optimizers.base import WeightInfo
from onnxfit.registry import from_config, to_config
from onnxfit.schedules import Cosine, Exponential
from tests.models import mlp
from tests.test_optimizers import TARGET, Update, distance, pull, start, train

X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 48)
BACKENDS = ["full", "forward_backward", "in_place"]


def mixed() -> Groups:
    return Groups(
        [
            {"weights": "fc0.*", "learning_rate": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"weights": ["*.bias", "!fc0.bias"], "optimizer": SGD(Exponential(0.1, 1, 0.9), 0.9)},
        ],
        default=Adam(0.01),
    )


def infos(weights):
    return [WeightInfo(name, w.shape, w.dtype) for name, w in weights.items()]


# -- torch's parameter groups


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_network_has_the_weights_of_torchs_parameter_groups(backend, accumulate):
    torch = pytest.importorskip("torch")
    optimizer = Groups(
        [
            {"weights": "fc0.*", "learning_rate": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"weights": "*.bias", "learning_rate": Exponential(0.1, 1, 0.9), "eps": 1e-3},
        ],
        default=AdamW(0.01, eps=1e-4, weight_decay=0.02),
    )
    settings = {"backend": backend, "accumulate": accumulate}
    trainer = Trainer(mlp((4, 8, 3)), loss="cross_entropy", optimizer=optimizer, **settings)
    w = {n: torch.tensor(a, requires_grad=True) for n, a in trainer.get_weights().items()}
    theirs = torch.optim.AdamW(
        [
            {"params": [w["fc0.weight"], w["fc0.bias"]], "lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"params": [w["fc1.bias"]], "lr": 0.1, "eps": 1e-3},
            {"params": [w["fc1.weight"]]},
        ],
        lr=0.01,
        eps=1e-4,  # a smaller one would raise the noise of gradients near 0
        weight_decay=0.02,
    )  # fmt: skip
    for step in range(12):
        theirs.param_groups[1]["lr"] = 0.1 * 0.9**step
        rows = slice(12 * (step % 4), 12 * (step % 4 + 1))
        hidden = torch.tanh(torch.tensor(X[rows]) @ w["fc0.weight"] + w["fc0.bias"])
        scores = hidden @ w["fc1.weight"] + w["fc1.bias"]
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(scores, torch.tensor(Y[rows])).backward()
        theirs.step()
        for part in np.split(np.arange(48)[rows], accumulate):
            trainer.train_on_batch(X[part], Y[part])
        for name, array in trainer.get_weights().items():
            np.testing.assert_allclose(array, w[name].detach().numpy(), rtol=1e-4, atol=1e-5)


# -- each weight as under its own optimizer


def test_each_weight_is_updated_as_by_its_own_optimizer():
    optimizers = {"fc.*": Adam(0.1, ema_momentum=0.5), "scale": SGD(0.1, 0.9), "conv.*": AdamW(0.1)}
    update = Update(Groups(optimizers), start())
    for _ in range(10):
        update(pull(update.weights), 0.1)
    for pattern, optimizer in optimizers.items():
        alone = Update(optimizer, start())
        for _ in range(10):
            alone(pull(alone.weights), 0.1)
        for name in (n for n in TARGET if n.startswith(pattern.rstrip("*"))):
            assert update.weights[name].tobytes() == alone.weights[name].tobytes()
            assert list(update.slots[name]) == list(alone.slots[name])


def test_without_groups_nothing_changes():
    both = [train(one, 5).weights for one in (Adam(0.1), Groups([], default=Adam(0.1)))]
    assert all(both[0][name].tobytes() == both[1][name].tobytes() for name in TARGET)


def test_a_quadratic_is_solved():
    groups = [{"weights": "fc.*", "learning_rate": 0.05, "betas": (0.8, 0.9)}]
    update = Update(Groups(groups, default=Adam(0.1)), start())
    for _ in range(300):
        update(pull(update.weights))
    assert distance(update.weights) < 0.1 * distance(start())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backends_agree_and_the_rates_are_live(backend):
    trainer = Trainer(mlp((4, 8, 3)), loss="cross_entropy", optimizer=mixed(), backend=backend)
    expected = Trainer(mlp((4, 8, 3)), loss="cross_entropy", optimizer=mixed())
    for one in (trainer, expected):
        one.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    for name, w in expected.get_weights().items():
        np.testing.assert_allclose(trainer.get_weights()[name], w, rtol=1e-5, atol=1e-6)
    rates = trainer.optimizer.learning_rates
    assert rates == pytest.approx(
        {"fc0.weight": 0.05, "fc0.bias": 0.05, "fc1.weight": 0.01, "fc1.bias": 0.1 * 0.9**6}
    )
    trainer.optimizer.learning_rate = 0.001
    assert trainer.learning_rate == trainer.optimizer.learning_rate == 0.001
    assert trainer.optimizer.learning_rates["fc0.bias"] == pytest.approx(0.005)


def test_the_rate_of_a_schedule_is_that_of_the_update():
    groups = [{"weights": "*.bias", "optimizer": SGD(Exponential(0.5, 1, 0.5))}]
    trainer = Trainer(mlp((4, 3)), loss="mse", optimizer=Groups(groups, default=SGD(0.0)))
    for step in range(4):
        assert trainer.optimizer.learning_rates == {
            "fc0.weight": 0.0,
            "fc0.bias": 0.5 ** (step + 1),
        }
        before = trainer.get_weights()["fc0.bias"]
        y = trainer.predict(X) - np.float32(1.5)  # the gradient of the bias is 2 * 1.5 / 3 = 1
        trainer.train_on_batch(X, y)
        moved = before - trainer.get_weights()["fc0.bias"]
        np.testing.assert_allclose(moved, 0.5 ** (step + 1), rtol=1e-4)


def test_weight_decay_spares_biases_and_norms_as_in_timm():
    shapes = {"fc.weight": (2, 2), "fc.bias": (2,), "norm": (2,), "deep.bias": (2, 2), "s": ()}
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    for excluded in ("bias_and_norm", ["bias_and_norm"], [lambda w: w.ndim <= 1, "*.bias"]):
        optimizer = AdamW(0.1, weight_decay=0.5, exclude_from_weight_decay=excluded)
        own = optimizer.for_weights(infos(weights))
        assert [n for n, one in own.items() if one.optimizer.weight_decay] == ["fc.weight"]


# -- decay by layers


def rates_of(optimizer, model=None, **settings):
    trainer = Trainer(model or mlp((4, 8, 6, 3)), loss="mse", optimizer=optimizer, **settings)
    return trainer.optimizer.learning_rates


@pytest.mark.parametrize("weights", [None, ["fc0.*", "fc1.*"]])
def test_the_rate_decays_with_each_layer_before_the_last(weights):
    """Also where the last layer is frozen, as timm counts it."""
    rates = rates_of(Groups([], default=SGD(0.8), layer_decay=0.5), weights=weights)
    expected = {"fc0": 0.2, "fc1": 0.4, "fc2": 0.8}
    assert rates == pytest.approx({name: expected[name[:3]] for name in rates})
    assert len(rates) == (6 if weights is None else 4)


def test_layers_by_name_multiply_the_rates_of_groups():
    groups = [{"weights": "*.bias", "learning_rate": 0.1, "learning_rate_multiplier": 2}]
    layers = [["fc0.*", "fc1.*"], "fc2.*"]
    optimizer = Groups(groups, default=SGD(1.0), layer_decay=0.5, layers=layers)
    expected = {"weight": [0.5, 0.5, 1.0], "bias": [0.1, 0.1, 0.2]}
    assert rates_of(optimizer) == pytest.approx(
        {f"fc{i}.{kind}": rates[i] for i in range(3) for kind, rates in expected.items()}
    )


def test_layers_of_a_residual_network_with_norms():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (int64[N] x) => (float[N, 2] y)
        <float[5, 4] table = {0,1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6,7,8,9},
         float[4] scale = {1, 2, 3, 4}, float[4] shift = {0, 1, 2, 3},
         float[4, 4] inner = {0,1,2,3,4,5,6,7,8,9,0,1,2,3,4,5}, float[4] bias = {1, 2, 3, 4},
         float[2, 4] head = {0,1,2,3,4,5,6,7}> {
            e = Gather(table, x)  n = LayerNormalization(e, scale, shift)
            m = MatMul(n, inner)  b = Add(m, bias)  r = Add(b, e)
            t = Transpose(head)  y = MatMul(r, t) }""")
    rates = rates_of(Groups([], default=SGD(1.0), layer_decay=0.1), model)
    expected = {"table": 0.01, "scale": 0.01, "shift": 0.01, "inner": 0.1, "bias": 0.1, "head": 1.0}
    assert rates == pytest.approx(expected)


# -- state, files and other settings


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_interrupted_epoch_resumes_bit_for_bit(backend, accumulate, tmp_path):
    settings = {"loss": "cross_entropy", "backend": backend, "accumulate": accumulate}
    whole = Trainer(mlp((4, 8, 3)), optimizer=mixed(), **settings)
    part = Trainer(mlp((4, 8, 3)), optimizer=mixed(), **settings)
    data = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8)]
    for batch in data:
        whole.train_on_batch(*batch)
    for batch in data[:3]:
        part.train_on_batch(*batch)
    part.save(tmp_path / "t.ckpt")
    again = Trainer.load(tmp_path / "t.ckpt")
    assert again.optimizer.settings == mixed()
    for batch in data[3:]:
        again.train_on_batch(*batch)
    np.testing.assert_equal(again.get_state(), whole.get_state())


def test_settings_survive_json_and_functions_are_asked_for_again(tmp_path):
    assert (
        from_config(
            json.loads(json.dumps(to_config(mixed()))), "onnxfit.optimizers", "onnxfit.schedules"
        )
        == mixed()
    )
    assert hash(mixed()) == hash(mixed())
    assert mixed() != Groups(mixed().groups, default=Adam(0.02))
    own = Groups([{"weights": lambda w: w.ndim == 1, "weight_decay": 0.1}], default="sgd")
    Trainer(mlp(), loss="mse", optimizer=own).save(tmp_path / "t.ckpt")
    with pytest.raises(CheckpointError, match="custom optimizer 'Groups'"):
        Trainer.load(tmp_path / "t.ckpt")
    assert Trainer.load(tmp_path / "t.ckpt", optimizer=own).optimizer.settings is own


def test_frozen_weights_and_set_weights():
    trainer = Trainer(mlp((4, 8, 3)), loss="cross_entropy", optimizer=mixed())
    trainer.frozen = "fc0.*"
    before = trainer.get_weights()
    trainer.fit(X, Y, verbose=0)
    changed = [n for n, w in trainer.get_weights().items() if not np.array_equal(w, before[n])]
    assert changed == ["fc1.weight", "fc1.bias"]
    trainer.set_weights(before)
    np.testing.assert_equal(trainer.get_weights(), before)


def test_plain_gradient_descent_in_groups_equals_the_graph_that_is_shown():
    """The learning rate may be a factor of the loss only if no group has a schedule."""
    for rate in (0.05, Cosine(0.05, 20)):
        groups = [{"weights": "fc0.*", "learning_rate": rate}]
        weights = []
        for backend in ("full", "forward_backward"):
            optimizer = Groups(groups, default=SGD(0.1))
            trainer = Trainer(mlp(), loss="cross_entropy", optimizer=optimizer, backend=backend)
            trainer.fit(X, Y, epochs=2, verbose=0)
            weights.append(trainer.get_weights())
        for name, w in weights[0].items():
            np.testing.assert_allclose(w, weights[1][name], rtol=1e-5, atol=1e-6)


def test_averages_need_all_groups(tmp_path):
    averaging = Groups([{"weights": "fc0.*", "learning_rate": 0.1}], Adam(ema_momentum=0.9))
    Trainer(mlp(), loss="mse", optimizer=averaging).export(tmp_path / "m.onnx", averaged=True)
    one = Groups([{"weights": "fc0.*", "ema_momentum": 0.9}], Adam())
    with pytest.raises(SettingError, match="averaged=True needs an optimizer"):
        Trainer(mlp(), loss="mse", optimizer=one).export(tmp_path / "m.onnx", averaged=True)


def test_the_summary_counts_the_weights_of_each_group():
    text = str(Trainer(mlp((4, 8, 3)), loss="cross_entropy", optimizer=mixed()).summary())
    assert "2 weights: Adam(weight_decay=0.1, betas=[0.8, 0.9]) with the learning rate × 5" in text


def test_with_learning_rate():
    assert mixed().with_learning_rate(0.5).learning_rate == 0.5
    optimizer = Groups({"a": SGD(0.1), "b": Adam(0.2)}).with_learning_rate(0.5)
    assert [one.learning_rate for one in optimizer.members] == [0.5, 0.2]
    assert get_optimizer(optimizer) is optimizer


# -- errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Groups([]), SettingError, "needs at least one group, or a default"),
        (lambda: Groups("fc*"), SettingError, r"a list of dicts, .* got 'fc\*'"),
        (lambda: Groups([{"params": "a"}], "sgd"), SettingError, r"'weights' \(torch: 'params'\)"),
        (lambda: Groups([{"weights": "a"}]), SettingError, "needs an 'optimizer'"),
        (lambda: Groups({"a": {"lr": 1}}, Adam()), ArgumentError, "Did you mean 'learning_rate'"),
        (lambda: Groups({"a": {"betas": 1}}, Adam()), SettingError, "Adam needs betas"),
        (lambda: Groups({"a": 0.1}, Adam()), SettingError, "pass {'learning_rate': 0.1}; for SGD"),
        (lambda: Groups({"a": {"momentum": 0.9}}, Adam()), ArgumentError, "argument 'momentum'"),
        (lambda: Groups({"a": mixed()}, Adam()), SettingError, "without groups"),
        (lambda: Groups([], default=mixed()), SettingError, "without groups"),
        (lambda: Groups([], default="adm"), UnknownNameError, "Did you mean 'adam'"),
        (lambda: Groups([], Adam(), layer_decay=1.5), SettingError, "layer_decay > 0 and <= 1"),
        (lambda: Groups([], Adam(), layers=["a"]), SettingError, "needs layer_decay"),
        (
            lambda: Groups({"a": {"learning_rate_multiplier": -1}}, Adam()),
            SettingError,
            "learning_rate_multiplier to be a number >= 0, got -1",
        ),
        (lambda: Adam(no_weight_decay="*"), ArgumentError, "mean 'exclude_from_weight_decay'"),
    ],
)  # fmt: skip
def test_impossible_groups(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (Groups({"fc9*": SGD()}, Adam()), UnknownNameError, r"called 'fc9\*'"),
        (Groups({"*.bias": SGD()}), SettingError, "fc0.weight, fc1.weight are in no group"),
        (Groups({"*": SGD(), "*.bias": SGD()}), SettingError, "Group 2 of Groups has no weight"),
        (
            Groups([{"weights": lambda w: w.ndim > 2, "optimizer": "sgd"}], Adam()),
            SettingError,
            "Group 1 of Groups: <lambda> selects none of the trained weights",
        ),
        (
            Groups([], Adam(), layer_decay=0.5, layers=["fc0.*"]),
            SettingError,
            "fc1.weight, fc1.bias are in no layer",
        ),
    ],
)
def test_groups_that_do_not_fit_the_model(optimizer, error, message):
    with pytest.raises(error, match=message):
        Trainer(mlp((4, 8, 3)), loss="mse", optimizer=optimizer)


def test_an_update_of_one_weight_as_a_graph():
    optimizer = Groups({"*.bias": SGD(momentum=0.5)}, Adam())
    assert isinstance(optimizer, Optimizer)
    inputs = [v.name for v in optimizer.build_onnx_function(name="fc.bias").graph.input]
    assert inputs[-1] == "weight/velocity"
    with pytest.raises(UnknownNameError, match=r"'\*\.bias'"):
        optimizer.build_onnx_function(name="fc.weight")

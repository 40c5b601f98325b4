"""Laws for everything that has a name: it trains through the Trainer, and a checkpoint brings it
back to the last bit.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime
import pytest

from onnxfit import Trainer, callbacks, losses, metrics, optimizers, penalties, schedules
from onnxfit.errors import DataError, SettingError
from onnxfit.metrics.alignment import misfit
from onnxfit.registry import from_config, registry, to_config
from tests import test_losses, test_metrics, test_optimizers, test_penalties, test_schedules
from tests.models import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 4)).astype(np.float32)
CLASSES = (X @ RNG.normal(size=(4, 3))).argmax(1)
BOXES = losses.Function(lambda op, y_true, y_pred: y_pred, labels="float[b, 2, 5]")
# what labels may look like; the first that a loss accepts is taken
LABELS = (
    CLASSES,
    np.eye(3, dtype=np.float32)[CLASSES],
    np.abs(X[:, :3]),
    np.abs(X[:, :1]),
    np.stack([CLASSES, CLASSES], axis=1),
    np.where(CLASSES > 0, CLASSES, -1)[:, None],
    np.stack([0 * CLASSES, 0 * CLASSES, 1 + CLASSES, 1 + CLASSES], axis=1),
)
SCHEDULES = [
    schedules.Constant(0.01),
    schedules.Exponential(0.01, decay_steps=3, decay_rate=0.9),
    schedules.Cosine(0.01, 20),
    schedules.OneCycle(0.01, 40),
    schedules.Warmup(schedules.InverseTime(0.01, 10, 1.0), 5),
]


def trained(trainer: Trainer, y: np.ndarray, epochs: int = 2) -> Trainer:
    trainer.fit(X, y, epochs=epochs, batch_size=16, verbose=0)
    return trainer


@pytest.mark.parametrize(
    "name",
    sorted({c.__name__ for c in registry("onnxfit.optimizers", optimizers.Optimizer).values()}),
)
def test_an_optimizer_learns_and_comes_back_from_a_checkpoint(name: str, tmp_path) -> None:
    def new() -> Trainer:
        rate = {"Adadelta": 1.0, "SGD": 0.1}.get(name, 0.01)
        settings = {
            "weight_decay": 0.01,
            "exclude_from_weight_decay": ("*.bias",),
            "learning_rate_multipliers": {"fc0*": 0.5},
        }
        optimizer = getattr(optimizers, name)(rate, ema_momentum=0.9, **settings)
        return Trainer(
            mlp(), loss="cross_entropy", optimizer=optimizer, clip_norm=1.0, metrics=["accuracy"]
        )

    start = new().evaluate(X, CLASSES)["loss"]
    whole = trained(trained(new(), CLASSES), CLASSES, 4)
    assert whole.evaluate(X, CLASSES)["loss"] < start
    loaded = trained(Trainer.load(trained(new(), CLASSES).save(tmp_path / "c")), CLASSES, 4)
    np.testing.assert_equal(loaded.get_state(), whole.get_state())


def one_name_each(package: str, base: type) -> list[str]:
    """One name of each class, as others only look the class up."""
    return sorted({kind: name for name, kind in registry(package, base).items()}.values())


@pytest.mark.parametrize("name", one_name_each("onnxfit.losses", losses.Loss))
def test_a_loss_of_any_name_trains_and_comes_back(name: str, tmp_path) -> None:
    loss = losses.get_loss(name)
    outputs = (
        6 if isinstance(loss, losses.GaussianNLL) else 4 if isinstance(loss, losses.IoU) else 3
    )
    sizes = (4, 8, outputs)
    takes_log = isinstance(losses.get_loss(name), losses.NLL)
    model = ending("LogSoftmax") if takes_log else mlp(sizes)
    if isinstance(losses.get_loss(name), (losses.CausalLM, losses.CTC)):
        model = reshaped((2, 3))
    trainer = Trainer(model, loss=name, optimizer="adam")
    (target,) = trainer._training.recipe.targets.values()
    for labels in LABELS:
        try:
            target.prepare(labels)
        except ValueError:
            continue
        break
    start = trainer.evaluate(X, labels)["loss"]
    trained(trainer, labels, 20)
    end = trainer.evaluate(X, labels)["loss"]
    assert np.isfinite(start)
    assert end < start
    assert Trainer.load(trainer.save(tmp_path / "c")).evaluate(X, labels)["loss"] == end


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_drives_every_update(schedule: schedules.Schedule) -> None:
    seen: list[float] = []
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer=optimizers.SGD(schedule))
    for step in range(12):
        before = trainer.get_weights()["fc1.bias"]
        seen.append(trainer.learning_rate)
        trainer.train_on_batch(X, CLASSES)
        step_size = np.abs(trainer.get_weights()["fc1.bias"] - before).max()
        assert (step_size > 0) == (seen[-1] > 0), step
    assert seen == [schedule(step) for step in range(12)]


@pytest.mark.filterwarnings("ignore:.*logits")  # these outputs are raw scores
@pytest.mark.parametrize("name", one_name_each("onnxfit.metrics", metrics.Metric))
def test_a_metric_of_any_name_is_exact_over_batches(name: str) -> None:
    for model, y, loss in (
        (mlp(), CLASSES, "cross_entropy"),
        (mlp(), np.abs(X[:, :3]), "mse"),
        (mlp(), np.eye(3, dtype=np.float32)[CLASSES], "mse"),
        (reshaped((2, 3)), np.where(CLASSES > 0, CLASSES, -1)[:, None], "ctc"),
        (reshaped((3, 6)), RNG.integers(0, 9, (48, 2, 5)).astype(np.float32), BOXES),
        (reshaped((1, 11, 11)), RNG.random((48, 1, 11, 11)).astype(np.float32), "mse"),
    ):
        trainer = Trainer(model, loss=loss, metrics=[name])
        try:
            with np.errstate(all="ignore"):
                small = trainer.evaluate(X, y, batch_size=7)
        except DataError:
            continue
        whole = trainer.evaluate(X, y, batch_size=48)
        (figure,) = set(whole) - {"loss"}
        np.testing.assert_allclose(small[figure], whole[figure], rtol=1e-6)
        return
    raise AssertionError("no labels fit the metric")


@pytest.mark.parametrize(
    "package", [callbacks, losses, metrics, optimizers], ids=lambda package: package.__name__
)
def test_type_checkers_see_every_exported_name(package: ModuleType) -> None:
    """They read the imports of the package, and do not run the search for its modules."""
    seen: list[str] = []
    for node in ast.walk(ast.parse(inspect.getsource(package))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    seen += import_module(node.module).__all__
                elif alias.asname:
                    seen.append(alias.asname)
    assert sorted(seen) == package.__all__


# ---------------------------------------------------------------------- a class more


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, type], None]:
    """Add a class to a module as an edit of its file would: the class, and its name in `__all__`."""

    def add(module: ModuleType, cls: type) -> None:
        cls.__module__ = module.__name__
        cls.__qualname__ = cls.__name__
        monkeypatch.setattr(module, cls.__name__, cls, raising=False)
        monkeypatch.setattr(module, "__all__", [*module.__all__, cls.__name__])

    return add


def test_a_loss_is_added_in_one_place(add, tmp_path, monkeypatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Quartic(losses.Loss):
        aliases = ("fourth",)

        scale: float = 1.0

        def __call__(self, op, y_true, y_pred):
            return self.scale * (y_pred - y_true) ** 4

    add(losses, Quartic)
    assert losses.get_loss("fourth") == losses.get_loss("quartic") == Quartic()
    test_a_loss_of_any_name_trains_and_comes_back("fourth", tmp_path)
    monkeypatch.setitem(
        test_losses.FORMULAS, "Quartic", lambda loss, y, p: loss.scale * (y - p) ** 4
    )
    test_losses.test_value_and_gradient_in_float64(Quartic(0.5), (6, 4), None)
    test_losses.test_weight_zero_is_no_gradient_from_the_row(Quartic())
    test_losses.test_settings_survive_json(Quartic(2.0))


def test_a_metric_is_added_in_one_place(add) -> None:
    @dataclasses.dataclass
    class Doubt(metrics.MeanMetric):
        """Mean distance of the highest score from 1."""

        aliases = ("unsure",)

        def values(self, y_true, y_pred):
            if y_true.shape not in (y_pred.shape, y_pred.shape[:1]):
                raise misfit(self, "labels", y_true, y_pred)
            return 1 - y_pred.reshape(len(y_pred), -1).max(axis=1)

    add(metrics, Doubt)
    test_a_metric_of_any_name_is_exact_over_batches("unsure")
    test_metrics.test_reset_forgets(Doubt)
    test_metrics.test_merged_shares_are_the_whole(Doubt)
    test_metrics.test_a_metric_survives_its_configuration(Doubt)
    test_metrics.test_labels_that_fit_nowhere_are_refused(Doubt)


def test_an_optimizer_is_added_in_one_place(add, tmp_path) -> None:
    @dataclasses.dataclass(frozen=True)
    class HeavyBall(optimizers.Optimizer):
        elementwise = True

        friction: float = 0.1

        def slots(self, w):
            return {"velocity": np.zeros_like(w)}

        def update(self, op, w, g, lr, step, velocity):
            velocity = (1 - self.friction) * velocity - lr * g
            return w + velocity, velocity

    add(optimizers, HeavyBall)
    assert optimizers.get_optimizer("heavy_ball") == HeavyBall()
    test_an_optimizer_learns_and_comes_back_from_a_checkpoint("HeavyBall", tmp_path)
    test_optimizers.test_an_elementwise_update_and_no_other_can_run_on_concatenated_weights(
        HeavyBall(), {}
    )
    test_optimizers.test_repr_equality_hash_and_json(HeavyBall(friction=0.2))
    test_optimizers.test_float32_follows_float64(HeavyBall())


def test_a_penalty_is_added_in_one_place(add, tmp_path, monkeypatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Quartic(penalties.Penalty):
        weight: float = 0.01

        def __call__(self, op, w):
            return self.weight * penalties._sum_of_elements(op, w**4)

    add(penalties, Quartic)
    assert penalties.get_penalty("quartic") == Quartic()
    monkeypatch.setitem(test_penalties.FORMULAS, "Quartic", lambda p, w: p.weight * (w**4).sum())
    test_penalties.test_value_and_gradient(Quartic(0.5), (4, 3), np.float64)
    test_penalties.test_settings_survive_json(Quartic(0.5))
    trainer = Trainer(mlp(), loss="cross_entropy", penalty={"*.weight": "quartic"})
    plain = Trainer(mlp(), loss="cross_entropy").evaluate(X, CLASSES)["loss"]
    assert trained(trainer, CLASSES).evaluate(X, CLASSES)["loss"] != plain
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert loaded.evaluate(X, CLASSES) == trainer.evaluate(X, CLASSES)


def test_a_schedule_is_added_in_one_place(add, tmp_path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Sawtooth(schedules.Schedule):
        learning_rate: float = 0.01
        period: int = 4

        def __call__(self, step):
            return self.learning_rate * (1 - step % self.period / self.period)

    add(schedules, Sawtooth)
    test_a_schedule_drives_every_update(Sawtooth())
    test_schedules.test_repr_equality_hash_and_json(Sawtooth(0.1, 3))
    test_schedules.test_a_schedule_is_a_pure_function(Sawtooth())
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer=optimizers.SGD(Sawtooth()))
    loaded = Trainer.load(trained(trainer, CLASSES).save(tmp_path / "c"))
    assert loaded.learning_rate == trainer.learning_rate


# ---------------------------------------------------------------------- logits or probabilities


def with_from_logits(module: str, base: type) -> list[Any]:
    classes = {cls.__name__: cls for cls in registry(module, base).values()}
    return [
        pytest.param(cls, id=name)
        for name, cls in sorted(classes.items())
        if "from_logits" in {f.name for f in dataclasses.fields(cls)}
        # they need outputs of another rank, or labels that are outputs, too
        and cls not in (losses.CausalLM, losses.CTC, losses.DistillationKL)
    ]


every_loss_with_from_logits = pytest.mark.parametrize(
    "cls", with_from_logits("onnxfit.losses", losses.Loss)
)
every_metric_with_from_logits = pytest.mark.parametrize(
    "cls", with_from_logits("onnxfit.metrics", metrics.Metric)
)
BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])


def ending(op_type: str, outputs: int = 3) -> onnx.ModelProto:
    """A network whose raw scores go through an operator, and then through an Identity."""
    model = mlp((4, 8, outputs))
    for i, end in enumerate((op_type, "Identity")):
        last = model.graph.output[0].name
        model.graph.node.append(oh.make_node(end, [last], [f"y{i}"], name=f"end{i}"))
        model.graph.output[0].name = f"y{i}"
    return model


def reshaped(sizes: tuple[int, ...]) -> onnx.ModelProto:
    """Return a network whose output has these sizes for each row."""
    model = mlp((4, 8, math.prod(sizes)))
    output = model.graph.output[0]
    shape = onnx.numpy_helper.from_array(np.array([-1, *sizes]), "sizes")
    model.graph.initializer.append(shape)
    model.graph.node.append(oh.make_node("Reshape", [output.name, "sizes"], ["reshaped"]))
    output.CopyFrom(oh.make_tensor_value_info("reshaped", 1, ["N", *sizes]))
    return model


def end_of(cls: type) -> str:
    binary = (losses.BinaryCrossEntropy, losses.Tversky, losses.Asymmetric, losses.LovaszHinge)
    return "Sigmoid" if issubclass(cls, binary) else "Softmax"


def labels_of(cls: type) -> np.ndarray:
    return CLASSES if issubclass(cls, losses.ClassLoss) else LABELS[1]


def step(model: onnx.ModelProto, loss: losses.Loss, backend: str = "full") -> Any:
    """The loss of a batch, and the gradients, as a step of plain SGD shows them."""
    trainer = Trainer(model, loss=loss, optimizer=1.0, backend=backend)
    value = trainer.train_on_batch(X, labels_of(type(loss)))["loss"]
    start = Trainer(model, loss=loss).get_weights()
    return value, {name: start[name] - w for name, w in trainer.get_weights().items()}


@BACKENDS
@every_loss_with_from_logits
def test_a_loss_sees_whether_the_model_gives_probabilities(cls: type, backend: str) -> None:
    loss = cls(from_logits=None)
    raw, gradients = step(mlp(), loss, backend)
    probable, same = step(ending(end_of(cls)), loss, backend)
    assert probable == pytest.approx(raw, rel=1e-5)
    assert max(np.abs(g).max() for g in gradients.values()) > 1e-3
    for name, g in gradients.items():
        np.testing.assert_allclose(same[name], g, rtol=1e-4, atol=1e-6, err_msg=name)
    # as it was with the right setting, operator by operator
    for model, logits in ((mlp(), True), (ending(end_of(cls)), False)):
        graphs = [
            Trainer(model, loss=cls(from_logits=setting)).save_onnx_graph(bytes)["train"]
            for setting in (None, logits)
        ]
        assert graphs[0] == graphs[1]


@every_loss_with_from_logits
@pytest.mark.parametrize("logits", [True, False])
def test_from_logits_is_followed_where_it_is_wrong(cls: type, logits: bool) -> None:
    model = ending(end_of(cls)) if logits else mlp()
    loss = cls(from_logits=logits)
    with pytest.warns(UserWarning, match=rf"\(from_logits={logits}\)") as warned:
        value, _ = step(model, loss)
    assert warned
    outputs = Trainer(model, loss="mse").predict(X)
    session = onnxruntime.InferenceSession(
        loss.build_onnx_function(("batch", 3)).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    (expected,) = session.run(["loss"], {"y_true": labels_of(cls), "y_pred": outputs})
    assert value == pytest.approx(expected.item(), rel=1e-5)


@every_loss_with_from_logits
def test_what_was_decided_is_in_the_summary_and_not_in_the_settings(cls: type, tmp_path) -> None:
    loss = cls(from_logits=None)
    end = end_of(cls)
    for model, text in (
        (ending(end), f"taken as probabilities: {end} node 'end0' computes the output"),
        (mlp(), "taken as logits: Gemm node 'fc1' computes the output"),
        (
            ending("Relu"),
            f"taken as {'logits' if cls.assumes_logits else 'probabilities'}: the def",
        ),
    ):
        trainer = Trainer(model, loss=loss)
        assert text in trainer.summary()
        again = Trainer.load(trainer.save(tmp_path / "c"))
        assert text in again.summary()
        assert again.settings["loss"] == trainer.settings["loss"] == loss
    set_by_user = Trainer(mlp(), loss=cls(from_logits=True)).summary()
    assert "taken as logits: from_logits=True was given" in set_by_user
    assert "taken as" not in Trainer(mlp(), loss="mse").summary()


@pytest.mark.parametrize("name", ["BinaryCrossEntropy", "CrossEntropy", "Focal", "KLDivergence"])
def test_settings_of_older_checkpoints_have_no_from_logits(name: str) -> None:
    assert from_config({"name": name}, "onnxfit.losses").from_logits is None
    assert to_config(getattr(losses, name)()) == {"name": name}
    for setting in (True, False):
        loss = from_config({"name": name, "settings": {"from_logits": setting}}, "onnxfit.losses")
        assert loss.from_logits is setting


@every_metric_with_from_logits
@pytest.mark.parametrize(
    ("outputs", "end", "loss"),
    [(1, "Sigmoid", "binary_cross_entropy"), (3, "Softmax", "cross_entropy")],
)
def test_a_metric_takes_outputs_as_their_loss_does(
    cls: type, outputs: int, end: str, loss: str
) -> None:
    if cls is metrics.Perplexity and outputs == 1:
        pytest.skip("is of several classes")
    y = CLASSES if outputs == 3 else (CLASSES > 0).astype(np.float32)
    if cls is metrics.BinaryAccuracy and outputs == 3:
        loss, y = "kl_divergence", LABELS[1]

    def figure(model: onnx.ModelProto, metric: Any, **settings: Any) -> Any:
        trainer = Trainer(model, loss=loss, metrics=[metric], **settings)
        return trainer.evaluate(X, y)[get(trainer)]

    def get(trainer: Trainer) -> str:
        return trainer._training.recipe.metrics[0].name

    raw, probable = mlp((4, 8, outputs)), ending(end, outputs)
    if cls is metrics.BinaryAccuracy and outputs == 3:
        raw = probable  # it cuts each column by itself: a softmax is not its sigmoid
    by_name = cls.__name__.lower() if cls is metrics.AUC else cls().name
    expected = figure(probable, cls(from_logits=False))
    for metric in (cls(), by_name):
        np.testing.assert_allclose(figure(probable, metric), expected, rtol=1e-6)
        np.testing.assert_allclose(figure(raw, metric), expected, rtol=1e-6)
    # a setting wins
    for setting in (True, False):
        for model in (raw, probable):
            trainer = Trainer(model, loss=loss, metrics=[cls(from_logits=setting)])
            assert trainer._training.recipe.metrics[0].metric.from_logits is setting


def test_a_threshold_that_is_no_probability_is_one_of_raw_scores() -> None:
    y = (CLASSES > 0).astype(np.float32)
    for threshold in (0.0, -1.0, 2.0):
        metric = metrics.BinaryAccuracy(threshold)
        trainer = Trainer(mlp((4, 8, 1)), loss="bce", metrics=[metric])
        raw = trainer.predict(X)[:, 0]
        found = trainer.evaluate(X, y)["binary_accuracy"]
        assert found == pytest.approx(((raw > threshold) == (y > 0.5)).mean())


def test_without_a_decision_of_the_loss_a_metric_compares_outputs_as_they_are() -> None:
    y = (CLASSES > 0).astype(np.float32)
    trainer = Trainer(mlp((4, 8, 1)), loss="mse", metrics=["accuracy"])
    raw = trainer.predict(X)[:, 0]
    with pytest.warns(UserWarning, match="outside 0..1"):
        found = trainer.evaluate(X, y)["accuracy"]
    assert found == pytest.approx(((raw > 0.5) == (y > 0.5)).mean())


MODULES = (losses, metrics, optimizers, penalties, schedules)
NOT_REGISTERED = [
    (module, name)
    for module in MODULES
    for name in module.__all__
    if not dataclasses.is_dataclass(getattr(module, name))
    or getattr(getattr(module, name), "__abstractmethods__", None)
]


@pytest.mark.parametrize(("module", "name"), NOT_REGISTERED)
@pytest.mark.parametrize("settings", [{}, {"spec": "sgd"}, {"specs": {}, "weights": {}}], ids=str)
def test_a_file_makes_no_other_exported_member(
    module: ModuleType, name: str, settings: dict[str, Any]
) -> None:
    """A function of `__all__` would run with arguments that a stranger chose."""
    with pytest.raises(SettingError, match=name):
        from_config({"name": name, "settings": settings}, module.__name__)


@pytest.mark.parametrize("settings", [[], "x", 1, {"unknown": 1}, {"learning_rate": -1.0}], ids=str)
def test_settings_that_a_class_does_not_take(settings: Any) -> None:
    with pytest.raises(SettingError, match="SGD"):
        from_config({"name": "SGD", "settings": settings}, "onnxfit.optimizers")

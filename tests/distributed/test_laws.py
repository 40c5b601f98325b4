"""Several ranks end where one process ends, whatever a training consists of.

The ranks are threads here; test_mpi.py runs some of the same with mpiexec.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit import Trainer, losses, metrics, optimizers, penalties
from onnxfit.callbacks import Callback
from onnxfit.distributed import sums
from onnxfit.errors import SettingError, UnsupportedError
from onnxfit.registry import registry
from tests.distributed.threads import on_ranks

RNG = np.random.default_rng(0)
ROWS = 33  # batches of 16: the last has 1 row, so that one rank has none
X = RNG.standard_normal((ROWS, 5))
CLASSES = RNG.integers(0, 3, ROWS)
OTHER = RNG.random(ROWS)
"""A weight of each row."""


# Batches of one size, which compile fast; the two ranks have 6 and 5 of their rows.
ONE_SIZE = {"batch_size": 11, "epochs": 1}


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch):
    """Sums in shared memory also of networks as small as these. test_same_by_mpi.py has messages."""
    monkeypatch.setattr(sums, "MIN_ELEMENTS", 1)


def network(body: str = "y = Add(p1, b1)", outputs: str = "double[N, 3] y") -> onnx.ModelProto:
    """A network of two layers in float64, so that only the order of sums can differ."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net (double[N, 5] x) => ({outputs})'
        f"{{ p0 = MatMul(x, w0)  s0 = Add(p0, b0)  h = Tanh(s0)  p1 = MatMul(h, w1)  {body} }}"
    )
    rng = np.random.default_rng(1)
    for name, shape in {"w0": (5, 8), "b0": (8,), "w1": (8, 3), "b1": (3,)}.items():
        array = rng.standard_normal(shape) * 0.4
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def trained(distribute, model=None, *, y=CLASSES, fit=None, **settings):
    trainer = Trainer(
        network() if model is None else model, seed=3, threads=1, distribute=distribute, **settings
    )
    history = trainer.fit(X, y, **{"epochs": 2, "batch_size": 16, "verbose": 0, **(fit or {})})
    return trainer.get_weights(), history.history, trainer


def require_same_as_alone(sizes=(2,), tolerance=1e-12, reference=None, **settings):
    """Train alone and with several ranks; all have the same weights and figures.

    `reference` is what `trained` has returned for one process.
    """
    alone, figures, _ = reference or trained(None, **settings)
    start = {
        i.name: onnx.numpy_helper.to_array(i)
        for i in (settings.get("model") or network()).graph.initializer
    }
    assert any(np.abs(alone[name] - start[name]).max() > 1e-4 for name in alone if name in start), (
        "nothing was trained"
    )
    for size in sizes:
        ranks = on_ranks(size, lambda communicator: trained(communicator, **settings)[:2])
        for weights, history in ranks:
            for name, array in alone.items():
                np.testing.assert_array_equal(
                    weights[name], ranks[0][0][name], err_msg=f"ranks differ in {name}"
                )
                np.testing.assert_allclose(
                    weights[name], array, rtol=0, atol=tolerance, err_msg=name
                )
            assert list(history) == list(figures)
            for name, values in figures.items():
                np.testing.assert_allclose(
                    history[name], values, rtol=1e-9, atol=1e-12, err_msg=name
                )


@pytest.mark.parametrize(
    "name",
    sorted({c.__name__ for c in registry("onnxfit.optimizers", optimizers.Optimizer).values()}),
)
def test_every_optimizer(name):
    optimizer = getattr(optimizers, name)
    require_same_as_alone(loss="cross_entropy", optimizer=optimizer(), fit=ONE_SIZE)


TOKENS = RNG.integers(0, 3, (ROWS, 8))
TOKENS[RNG.random(TOKENS.shape) < 0.4] = -100  # so that ranks count different numbers of tokens


def of_tokens():
    """A network with 3 classes for each of 8 tokens."""
    model = network(
        "s1 = Add(p1, b1)  u = Unsqueeze(s1, one)  v = Unsqueeze(h, two)  y = Add(u, v)",
        "double[N, 8, 3] y",
    )
    for name, axis in {"one": 1, "two": 2}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([axis]), name))
    return model


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_next_tokens_in_windows_count_alike_on_all_ranks(backend):
    require_same_as_alone(
        model=of_tokens(),
        y=TOKENS,
        loss="causal_lm",
        metrics=["perplexity", "accuracy"],
        optimizer="adam",
        accumulate=2,
        backend=backend,
    )


BOXES = ("IoU", "GIoU", "DIoU", "CIoU")
LABELS = {
    "CrossEntropy": CLASSES, "NLL": CLASSES, "Focal": (CLASSES[:, None] == np.arange(3)).astype(float),
    "Hinge": np.sign(X[:, :3]), "SquaredHinge": np.sign(X[:, :3]), "BinaryCrossEntropy": (X[:, :3] > 0) * 1.0,
    "BinaryCrossEntropyWithLogits": (X[:, :3] > 0) * 1.0, "GaussianNLL": X[:, :1], "CausalLM": TOKENS,
    "CTC": np.where(TOKENS[:, :1] > 0, TOKENS[:, :1], -1),
    **dict.fromkeys(["CategoricalHinge", "MultiMargin", "GeneralizedCrossEntropy"], CLASSES),
    **dict.fromkeys(["PolyCrossEntropy", "LovaszSoftmax"], CLASSES), "LovaszHinge": (X[:, :3] > 0) * 1.0,
    **dict.fromkeys(["SoftMargin", "HingeEmbedding"], np.sign(X[:, :3])),
    **dict.fromkeys(BOXES, np.concatenate([0 * X[:, :2], 1 + np.abs(X[:, :2])], axis=1)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", sorted({c.__name__ for c in registry("onnxfit.losses", losses.Loss).values()})
)
def test_every_loss(name):
    body, outputs = "s1 = Add(p1, b1)  y = Sigmoid(s1)", "double[N, 3] y"
    if name in ("BinaryCrossEntropyWithLogits", "NLL"):
        body = "y = Add(p1, b1)" if name != "NLL" else "s1 = Add(p1, b1)  y = LogSoftmax(s1)"
    if name == "GaussianNLL":
        body, outputs = (
            "s1 = Add(p1, b1)  t = Sigmoid(s1)  y = Slice(t, zero, two, axes)",
            "double[N, 2] y",
        )
    if name in BOXES:
        body, outputs = (
            "s1 = Add(p1, b1)  f = Slice(s1, zero, two, axes)  e = Exp(f)  l = Add(f, e)"
            "  y = Concat<axis=1>(f, l)",
            "double[N, 4] y",
        )
    model = network(body, outputs)
    if name == "GaussianNLL" or name in BOXES:
        for key, value in {"zero": [0], "two": [2], "axes": [1]}.items():
            model.graph.initializer.append(
                onnx.numpy_helper.from_array(np.array(value, np.int64), key)
            )
    if name in ("CTC", "CausalLM"):
        model = of_tokens()
    labels = LABELS.get(name, np.abs(X[:, :3]) / 4 + 0.1)
    loss = getattr(losses, name)()
    require_same_as_alone(model=model, y=labels, loss=loss, optimizer=0.1, fit=ONE_SIZE)


@pytest.mark.parametrize(
    "name",
    sorted({c.__name__ for c in registry("onnxfit.penalties", penalties.Penalty).values()}),
)
def test_every_penalty(name):
    require_same_as_alone(
        loss="cross_entropy",
        penalty=getattr(penalties, name)(),
        optimizer="adam",
        fit=ONE_SIZE,
    )


MASKED = losses.CrossEntropy(ignore_index=1)
SETTINGS = {
    "three ranks": {"optimizer": "adam"},
    "clipping": {"optimizer": "adam", "clip_norm": 0.1, "clip_value": 0.02},
    "accumulation": {"optimizer": "adam", "accumulate": 2, "penalty": 1e-2},
    "loss scaling": {"optimizer": "adam", "precision": "fp16", "clip_norm": 0.1},
    "loss scaling in windows": {"optimizer": "adam", "precision": "fp16", "accumulate": 2},
    "sum": {"loss": losses.CrossEntropy(reduction="sum"), "optimizer": 0.01},
    "mask": {"loss": MASKED, "optimizer": "adam"},
    "sample weights": {"optimizer": "adam", "fit": {"sample_weight": OTHER}},
    "mean of weights": {"loss": losses.CrossEntropy(reduction="weighted_mean"), "optimizer": "adam", "fit": {"sample_weight": OTHER}},
    "class weights": {"optimizer": "adam", "fit": {"class_weight": {0: 0.2, 1: 2.0, 2: 1.0}}},
    "metrics": {"optimizer": "adam", "metrics": ["accuracy", metrics.TopKAccuracy(k=2)]},
    "validation": {"optimizer": "adam", "metrics": ["accuracy"], "fit": {"validation_split": 0.3}},
    "masks in windows": {"loss": MASKED, "optimizer": "adam", "accumulate": 3, "clip_norm": 0.1},
    "without shuffling": {"optimizer": "adam", "fit": {"shuffle": False, "steps_per_epoch": 2}},
}  # fmt: skip


@cache
def trained_alone(case):
    """One process, whose backends give the same: one of them serves for both."""
    return trained(None, **{"loss": "cross_entropy", **SETTINGS[case]})


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("case", SETTINGS)
def test_every_setting(case, backend):
    settings = {"loss": "cross_entropy", **SETTINGS[case]}
    require_same_as_alone(
        sizes=(3,) if case == "three ranks" else (2,),
        reference=trained_alone(case),
        backend=backend,
        **settings,
    )


class HalveGradients(Callback):
    """Change gradients in place, as every rank does for itself."""

    def on_gradients(self, gradients):
        for gradient in gradients.values():
            gradient *= 0.5


def test_each_rank_changes_the_summed_gradients_for_itself():
    require_same_as_alone(
        sizes=(2, 3),
        loss="cross_entropy",
        backend="forward_backward",
        fit={"callbacks": [HalveGradients()]},
    )


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_several_outputs_with_sample_weights_of_their_own(reduction):
    require_same_as_alone(
        model=network("y = Add(p1, b1)  z = Neg(y)", "double[N, 3] y, double[N, 3] z"),
        y={"y": CLASSES, "z": CLASSES},
        loss={
            "y": losses.CrossEntropy(reduction=reduction),
            "z": losses.CrossEntropy(reduction=reduction, ignore_index=1),
        },
        metrics=[metrics.Accuracy(weighted=True)],
        optimizer="adam",
        fit={"sample_weight": {"z": OTHER}},
    )


def right(y_true, y_pred):
    """The share of right classes times the number of rows, which is no mean over ranks."""
    return float((y_true == y_pred).mean() * len(y_true))


def test_a_function_of_all_rows_sees_the_rows_of_all_ranks():
    require_same_as_alone(
        loss="cross_entropy",
        metrics=[metrics.EpochMetric(right)],
        optimizer=0.1,
        fit=ONE_SIZE,
    )


class OfKeras:
    """A metric object that does not say how the states of two ranks become one."""

    def update_state(self, y_true, y_pred): ...

    def result(self):
        return 0.0

    def reset_state(self): ...


def test_a_metric_object_that_cannot_be_merged_is_refused_before_a_step():
    def refused(communicator):
        trainer = Trainer(
            network(), loss="cross_entropy", metrics=[OfKeras()], distribute=communicator
        )
        with pytest.raises(UnsupportedError, match="cannot be merged from several processes"):
            trainer.fit(X, CLASSES, verbose=0)
        return trainer.global_step

    assert on_ranks(2, refused) == [0, 0]


def test_several_outputs_with_masks_of_their_own():
    model = network("y = Add(p1, b1)  z = ReduceSum(h, axis)", "double[N, 3] y, double[N, 1] z")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    loss = {"y": MASKED, "z": "mean_squared_error"}
    labels = {"y": CLASSES, "z": X[:, :1]}
    for backend in ("full", "forward_backward"):
        require_same_as_alone(
            model=model,
            y=labels,
            loss=loss,
            loss_weights={"z": 0.3},
            penalty=1e-2,
            optimizer="adam",
            backend=backend,
        )


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_loss_of_the_models_own(backend):
    """Its graph has no labels, and predict shows the loss, which has no rows."""
    body = "y = Add(p1, b1)  q = Mul(y, y)  loss = ReduceMean<keepdims = 0>(q)"
    model = network(body, "double[N, 3] y, double loss")
    settings = {"model": model, "y": None, "optimizer": "adam", "backend": backend}
    require_same_as_alone(sizes=(3,), **settings)

    def predicted(distribute):
        return Trainer(model, distribute=distribute).predict(X, batch_size=16)["loss"]

    alone = predicted(None)  # one for each batch
    assert alone.shape == (3,)
    for ranks in on_ranks(3, predicted):
        np.testing.assert_allclose(ranks, alone, rtol=1e-12)


@pytest.mark.parametrize("gradient", ["onnx", "onnxruntime"])
def test_both_sources_of_gradients(gradient):
    if gradient == "onnxruntime" and "onnxruntime-training" not in onnxfit.versions():
        pytest.skip("the builder is not installed")
    for backend in ("full", "forward_backward"):
        # The builder has constants in float32.
        tolerance = 1e-12 if gradient == "onnx" else 1e-8
        require_same_as_alone(
            tolerance=tolerance,
            loss="cross_entropy",
            optimizer="adam",
            gradient=gradient,
            backend=backend,
        )


def test_a_rank_whose_rows_are_all_masked_adds_zero():
    """Its divisor is the smallest number, and its share must not make the inverse infinite."""
    labels = np.full(ROWS, 1)
    labels[::16] = 0  # of rank 0 in each batch
    loss = losses.CrossEntropy(ignore_index=1, class_weights=(0.1, 1.0, 1.0))
    for backend in ("full", "forward_backward"):
        require_same_as_alone(
            y=labels, loss=loss, optimizer=0.1, backend=backend, fit={"shuffle": False}
        )


def test_the_loss_of_a_window_keeps_its_digits():
    class Watch(Callback):
        def on_train_batch_end(self, batch, logs):
            self.loss = logs["batch_loss"]

    def loss(distribute):
        watch = Watch()
        trained(distribute, loss="cross_entropy", accumulate=2, fit={"callbacks": watch})
        return watch.loss

    assert on_ranks(2, loss) == [pytest.approx(loss(None), rel=1e-14)] * 2


def test_running_statistics_are_those_of_all_rows():
    """Each rank normalizes by its own rows; the running statistics are the same everywhere."""
    model = network(
        "s1 = Add(p1, b1)  y = BatchNormalization <training_mode = 0> (s1, scale, shift, mean, var)"
    )
    for name, value in {"scale": 1.0, "shift": 0.0, "mean": 0.0, "var": 1.0}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(3, value), name))
    fit = {"batch_size": 32, "epochs": 1, "steps_per_epoch": 1, "shuffle": False}
    alone, _, _ = trained(
        None, model, loss="mean_squared_error", y=X[:, :3], optimizer=0.1, fit=fit
    )
    for backend in ("full", "forward_backward"):
        ranks = on_ranks(
            2,
            lambda c: trained(
                c,
                model,
                loss="mean_squared_error",
                y=X[:, :3],
                optimizer=0.1,
                fit=fit,
                backend=backend,  # noqa: B023  called before the loop goes on
            )[0],
        )
        for name in ("mean", "var", "w0"):
            np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
        # The mean over equal parts is the mean of all rows; variances within the parts are less.
        np.testing.assert_allclose(ranks[0]["mean"], alone["mean"], rtol=1e-12)
        assert not np.allclose(ranks[0]["var"], 1)


def test_ranks_drop_other_elements():
    model = network("d = Dropout(p1, half, true)  y = Add(d, b1)")
    for name, value in {"half": np.array(0.5), "true": np.array(True)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    seeds = on_ranks(
        3,
        lambda c: Trainer(model, loss="cross_entropy", seed=3, distribute=c)._training.random_seed,
    )
    assert len(set(seeds)) == 3
    weights = on_ranks(2, lambda c: trained(c, model, loss="cross_entropy", optimizer="adam")[0])
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])


def test_evaluation_and_prediction_cover_all_rows_on_every_rank():
    def figures(distribute):
        trainer = Trainer(
            network(), loss="cross_entropy", metrics=["accuracy"], distribute=distribute
        )
        batch = trainer.train_on_batch(X[:7], CLASSES[:7])
        return (
            trainer.evaluate(X, CLASSES, batch_size=16), trainer.predict(X, batch_size=16), batch,
            trainer.test_on_batch(X[:5], CLASSES[:5]), trainer.predict_on_batch(X[:5]),
        )  # fmt: skip

    alone = figures(None)
    for ranks in on_ranks(3, figures):
        for mine, expected in zip(ranks, alone):
            if isinstance(expected, dict):
                assert mine == pytest.approx(expected, rel=1e-12)
            else:
                np.testing.assert_allclose(mine, expected, rtol=1e-12)


def test_hooks_see_the_figures_of_all_rows():
    class Watch(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, batch, logs):
            self.seen.append(dict(logs))

        def on_test_batch_end(self, batch, logs):
            self.seen.append(dict(logs))

        def on_predict_batch_end(self, batch, logs):
            self.seen.append({"y": float(self.trainer.predicted["y"].sum())})

    labels = CLASSES.copy()
    labels[-9:] = 1  # batches of the validation without any label

    def seen(distribute):
        watch = Watch()
        trainer = trained(
            distribute,
            loss=MASKED,
            penalty=1e-2,
            y=labels,
            metrics=["accuracy"],
            fit={"callbacks": [watch], "validation_split": 0.3},
        )[2]
        trainer.predict(X, batch_size=16, callbacks=[watch])
        return watch.seen

    alone = seen(None)
    for ranks in on_ranks(3, seen):
        assert len(ranks) == len(alone)
        for mine, expected in zip(ranks, alone):
            assert mine == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_averaging_of_weights():
    """After one step of plain SGD each, averaged weights are those of the mean gradient."""

    class Averaging:
        average_every = 1

        def __init__(self, communicator):
            self.rank, self.size = communicator.rank, communicator.size
            self.allreduce, self.broadcast = communicator.allreduce, communicator.broadcast
            self.abort = communicator.abort

    settings = {
        "loss": "cross_entropy",
        "optimizer": 0.5,
        "fit": {"batch_size": 10, "steps_per_epoch": 3, "epochs": 1},
    }
    alone = trained(None, **settings)[0]
    for weights, _, _ in on_ranks(2, lambda c: trained(Averaging(c), **settings)):
        for name, array in alone.items():
            np.testing.assert_allclose(weights[name], array, rtol=1e-12)
    with pytest.raises(SettingError, match="accumulate=2 cannot be combined with average_every=1"):
        on_ranks(2, lambda c: trained(Averaging(c), **settings, accumulate=2))
    with pytest.raises(SettingError, match=r"precision='fp16'.*average_every=1"):
        on_ranks(2, lambda c: trained(Averaging(c), **settings, precision="fp16"))


def test_averaging_every_few_updates_ends_equal_on_all_ranks():
    class Averaging:
        average_every = 3

        def __init__(self, communicator):
            self.rank, self.size = communicator.rank, communicator.size
            self.allreduce, self.broadcast = communicator.allreduce, communicator.broadcast
            self.abort = communicator.abort

    settings = {"loss": "cross_entropy", "optimizer": "adam"}
    first, second, third = on_ranks(3, lambda c: trained(Averaging(c), **settings)[:2])
    for name, array in first[0].items():
        np.testing.assert_array_equal(array, second[0][name])
        np.testing.assert_array_equal(array, third[0][name])
    assert first[1] == second[1] == third[1]


def test_gradients_by_hand_are_averaged():
    def step(distribute, rows):
        trainer = Trainer(
            network(), optimizer="adam", backend="forward_backward", distribute=distribute
        )
        trainer.forward(X[rows])
        gradients = trainer.backward(np.ones((len(X[rows]), 3)) / len(X[rows]))
        trainer.apply_gradients(gradients["weights"])
        return trainer.get_weights()

    alone = step(None, slice(0, 20))
    halves = on_ranks(2, lambda c: step(c, slice(10 * c.rank, 10 * c.rank + 10)))
    for name, array in alone.items():
        np.testing.assert_allclose(halves[0][name], array, rtol=1e-12)
        np.testing.assert_array_equal(halves[0][name], halves[1][name])


def test_rank_0_decides():
    class Decide(Callback):
        def on_epoch_end(self, epoch, logs):
            self.trainer.learning_rate = 0.01 * (self.trainer.rank + 1)
            self.trainer.stop_training = self.trainer.is_main and epoch == 1

    def rates(communicator):
        trainer = trained(
            communicator, loss="cross_entropy", fit={"epochs": 5, "callbacks": Decide()}
        )[2]
        return trainer.learning_rate, trainer.epoch, trainer.world_size

    assert on_ranks(2, rates) == [(0.01, 2, 2)] * 2


class Logger(Callback):
    phase = "logger"

    def __init__(self):
        self.calls = 0

    def on_epoch_end(self, epoch, logs):
        self.calls += 1


def test_loggers_run_on_the_first_rank_alone():
    def calls(communicator):
        logger = Logger()
        trained(communicator, loss="cross_entropy", fit={"callbacks": logger})
        return logger.calls

    assert on_ranks(2, calls) == [2, 0]


def test_what_only_one_rank_calls_is_refused():
    class Evaluate(Logger):
        def on_epoch_end(self, epoch, logs):
            self.trainer.evaluate(X, CLASSES)

    def fit(communicator):
        trained(communicator, loss="cross_entropy", fit={"callbacks": Evaluate()})

    with pytest.raises(SettingError, match=r"Evaluate\.on_epoch_end runs on rank 0 alone"):
        on_ranks(2, fit)

    class OnMain(Callback):
        def on_epoch_end(self, epoch, logs):
            if self.trainer.is_main:
                self.trainer.evaluate(X, CLASSES)

    with pytest.raises(
        SettingError,
        match=r"rank 0: the beginning of evaluate; rank 1: the end of OnMain\.on_epoch_end",
    ):
        on_ranks(2, lambda c: trained(c, loss="cross_entropy", fit={"callbacks": OnMain()}))


def differing(name):
    """Return what one rank does differently, and the words that name it."""
    cases = {
        "model": (lambda c: trained(c, network("y = Sub(p1, b1)") if c.rank else None, loss="cross_entropy"), "the model"),
        "settings": (lambda c: trained(c, loss="cross_entropy", optimizer=0.1 + c.rank), "Rank 1 has optimizer= 1.1"),
        "epochs": (lambda c: trained(c, loss="cross_entropy", fit={"epochs": 2 + c.rank}), "Rank 1 has epochs 3"),
        "labels": (lambda c: trained(c, loss="cross_entropy", y=CLASSES if c.rank else CLASSES[::-1].copy()), "the data"),
        "rows": (lambda c: trained(c, loss="cross_entropy", fit={"batch_size": 16 + c.rank}), "batch_size"),
        "callbacks": (lambda c: trained(c, loss="cross_entropy", fit={"callbacks": [Logger()] if c.rank else []}), "callbacks"),
        "weights": (shifted, "the weights"),
        "world": (lambda c: trained(c, loss="cross_entropy", fit={"batch_size": 1}), "A batch of 1 rows cannot be shared among 2"),
    }  # fmt: skip
    return cases[name]


def shifted(communicator):
    trainer = Trainer(network(), loss="cross_entropy", distribute=communicator)
    if communicator.rank:
        trainer._training.backend.state.set({"b1": np.ones(3)})
    trainer.fit(X, CLASSES, verbose=0)


@pytest.mark.parametrize(
    "name", ["model", "settings", "epochs", "labels", "rows", "callbacks", "weights", "world"]
)
def test_ranks_that_differ_are_told_at_the_start(name):
    function, words = differing(name)
    with pytest.raises(SettingError) as caught:
        on_ranks(2, function)
    assert words in str(caught.value)


def test_trainers_with_other_weights_are_refused():
    def build(communicator):
        model = network()
        model.graph.initializer[1].raw_data = np.full(8, float(communicator.rank)).tobytes()
        Trainer(model, loss="cross_entropy", distribute=communicator)

    with pytest.raises(SettingError, match="Rank 1 has the weights"):
        on_ranks(2, build)


def test_a_resumed_fit_ends_where_an_uninterrupted_one_ends(tmp_path):
    """On as many ranks bit for bit, and on another number within rounding."""

    class Stop(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.trainer.global_batch == 5:
                if self.trainer.is_main:
                    self.trainer.save(tmp_path / "stopped.ckpt")
                raise InterruptedError

    settings = {"loss": MASKED, "optimizer": "adam", "metrics": ["accuracy"], "fit": {"epochs": 3}}

    def interrupted(communicator):
        with pytest.raises(InterruptedError):
            trained(communicator, **{**settings, "fit": {"epochs": 3, "callbacks": Stop()}})

    def resumed(distribute):
        trainer = Trainer.load(tmp_path / "stopped.ckpt", distribute=distribute)
        history = trainer.fit(X, CLASSES, epochs=3, batch_size=16, verbose=0)
        return trainer.get_weights(), history.history

    class Nothing(Callback):
        def on_train_batch_end(self, batch, logs):
            pass

    watched = {**settings, "fit": {"epochs": 3, "callbacks": Nothing()}}
    whole = on_ranks(2, lambda c: trained(c, **watched)[:2])
    on_ranks(2, interrupted)
    for weights, history in on_ranks(2, resumed):
        for name, array in weights.items():
            np.testing.assert_array_equal(array, whole[0][0][name])
        assert history == whole[0][1]
    for weights, history in [resumed(None), *on_ranks(3, resumed)]:
        for name, array in weights.items():
            np.testing.assert_allclose(array, whole[0][0][name], rtol=0, atol=1e-12)
        for name, values in history.items():
            np.testing.assert_allclose(values, whole[0][1][name], rtol=1e-9)


def test_a_description_of_settings_is_the_same_on_every_rank():
    from onnxfit.training.ranks import described

    loss = losses.CrossEntropy()
    assert described(loss) == described(replace(loss))
    assert described({"y": [len, None, 1.5]}) == {"y": ["len", None, 1.5]}


def test_the_order_of_arrays_changes_their_checksum():
    from onnxfit.training.ranks import checksum

    zeros, ones = np.zeros(2), np.ones(2)
    assert checksum([zeros, ones]) != checksum([ones, zeros])
    assert checksum([zeros, ones]) == checksum([zeros.copy(), ones.copy()])


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_rank_without_a_row_knows_the_loss_of_the_batch(backend):
    def last_losses(distribute):
        settings = {"penalty": 1e-2, "backend": backend, "fit": {"epochs": 1}}
        return list(trained(distribute, loss="cross_entropy", **settings)[2].last_losses)

    alone = last_losses(None)
    for mine in on_ranks(3, last_losses):
        assert mine == pytest.approx(alone, rel=1e-9)

"""What every callback of the registry keeps to: tested for each, so that a new one is tested by
adding its minimal arguments, if it has any.
"""

import functools
import inspect
import pickle
import shutil
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import Callback, CallbackList, Logs
from onnxfit.callbacks.callback import HOOKS, PHASES
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.optimizers import SGD
from onnxfit.registry import registry
from tests.models import mlp

CLASSES = {kind.__name__: kind for kind in registry("onnxfit.callbacks", Callback).values()}
# the least that a class can be made of, where that is something; files go to the folder of the test
MINIMAL = {
    "BackupAndRestore": ("backup",),
    "CSVLogger": ("log.csv",),
    "Freeze": ("fc0.*",),
    "GenerateSamples": ([[1]],),
    "GradientAccumulationScheduler": ({1: 3},),
    "JSONLLogger": ("log.jsonl",),
    "LearningRateScheduler": (float,),
    "ModelCheckpoint": ("{epoch}.ckpt",),
    "OptunaPruning": (SimpleNamespace(report=max, should_prune=bool),),
    "PredictionWriter": ("predictions",),
    "ThresholdStop": ("loss",),
    "Unfreeze": ({1: "fc0.*"},),
}
SETTINGS = {
    "BatchSizeFinder": {"min_gain": None, "steps_per_trial": 1, "init_val": 4},  # no clock decides
    "EarlyStopping": {"monitor": "loss"},
    "GenerateSamples": {"every": 1000},  # the models here are no language models
    "LearningRateFinder": {"steps": 4},
    "ModelCheckpoint": {"monitor": "loss"},
    "OptunaPruning": {"monitor": "loss"},
    "ReduceLROnPlateau": {"monitor": "loss"},
    "ThresholdStop": {"threshold": 0.0},
}
every_class = pytest.mark.parametrize(
    "name", [name for name in CLASSES if name not in ("Callback", "History")]
)  # fit has its own History
both_backends = pytest.mark.parametrize("backend", ["full", "forward_backward"])
RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int64)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow())
    monkeypatch.setitem(sys.modules, "optuna", ModuleType("optuna"))
    monkeypatch.setitem(sys.modules, "wandb", wandb())
    monkeypatch.setenv("no_proxy", "*")


def mlflow():
    """As much of MLflow as the law needs: a client that takes everything."""

    class MlflowClient:
        def __init__(self, tracking_uri=None):
            pass

        def __getattr__(self, name):
            return lambda *arguments, **settings: SimpleNamespace(
                experiment_id="0", info=SimpleNamespace(run_id="run"), __module__="mlflow"
            )

    module = ModuleType("mlflow")
    module.MlflowClient = MlflowClient
    return module


def wandb():
    """As much of W&B as the law needs: runs that take everything."""

    class Run:
        id = "run"
        config = SimpleNamespace(update=lambda *arguments, **settings: None)

        def define_metric(self, *arguments, **settings):
            pass

        log = log_artifact = finish = define_metric

    module = ModuleType("wandb")
    module.run = None
    module.init = lambda **settings: Run()
    return module


def make(name):
    return CLASSES[name](*MINIMAL.get(name, ()), **SETTINGS.get(name, {}))


@functools.cache
def built(backend, number):
    # whatever a callback may need: averages, and gradients that can be added up
    optimizer = SGD(0.05, momentum=0.9, ema_momentum=0.9)
    on = onnxfit.Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=optimizer,
        backend=backend,
        gradient="onnx",
        accumulate=2,
        threads=1,
    )
    return on, on.get_state()


def trainer(backend, number=0):
    """A trainer as it was built; made once, for compiling takes longer than all the rest."""
    on, state = built(backend, number)
    on.set_state(state)
    return on


def fit(on, callbacks, **settings):
    defaults = {"epochs": 2, "batch_size": 4, "verbose": 0, "validation_data": (X, Y)}
    return on.fit(X, Y, **{**defaults, "callbacks": callbacks, **settings})


def same(one, other):
    return all(
        np.array_equal(one[part][name], other[part][name])
        for part in ("weights", "slots")
        for name in one[part]
    )


class Closing(Callback):
    """Raises in one hook, and writes down what it was told of the end."""

    def __init__(self, hook="", error=None):
        self.told = []
        self.hook = hook
        if hook:
            setattr(self, hook, lambda *arguments: self._raise(error))

    @property
    def state_key(self):
        return f"Closing({self.hook})"

    def _raise(self, error):
        raise error

    def on_exception(self, exception):
        self.told.append(exception)

    def on_close(self):
        self.told.append("closed")


@every_class
def test_is_made_of_little_and_says_what_it_is(name):
    callback = make(name)
    assert callback.phase in PHASES
    assert callback.state_key.startswith(name)
    assert CLASSES[name].__doc__
    assert {hook for hook in dir(callback) if hook.startswith("on_")} == set(HOOKS)
    assert callback.state_key == make(name).state_key or name == "LambdaCallback"


@every_class
@both_backends
def test_one_instance_serves_two_fits_alike(name, backend):
    callback = make(name)
    first, second = trainer(backend), trainer(backend, 1)
    fit(first, [callback])
    fit(second, [callback])
    assert same(first.get_state(), second.get_state())
    assert first.get_state()["counters"] == second.get_state()["counters"]
    fit(second, [callback])  # and goes on with the same trainer
    assert second.epoch == 4
    assert first.frozen == ()
    assert first.accumulate == 2


@every_class
@both_backends
def test_no_epochs_change_nothing_but_the_learning_rate(name, backend):
    on = trainer(backend)
    before = on.get_state()
    fit(on, [make(name)], epochs=0)
    fit(on, [make(name)], epochs=0)
    after = on.get_state()
    assert same(before, after)
    assert before["counters"] | {"learning_rate": 0} == after["counters"] | {"learning_rate": 0}


@every_class
@both_backends
def test_a_stop_in_the_first_batch_is_followed_by_the_ends_of_epoch_and_training(name, backend):
    class Stop(Callback):
        def on_train_batch_end(self, batch, logs):
            self.trainer.stop_training = True

    on, closing = trainer(backend), Closing()
    history = fit(on, [Stop(), make(name), closing])
    assert history.epoch == [0]
    assert on.global_batch == 1
    assert closing.told == ["closed"]


@every_class
@both_backends
@pytest.mark.parametrize("first", [True, False])
def test_an_exception_in_any_hook_reaches_the_caller_and_all_are_closed(name, backend, first):
    hooks = [h for h in HOOKS if "predict" not in h and h not in ("on_exception", "on_close")]
    callback, on = make(name), trainer(backend)
    for hook in hooks:
        if hook == "on_gradients" and backend == "full":
            continue
        error = RuntimeError(hook)
        failing, watching = Closing(hook, error), Closing()
        shutil.rmtree("backup", ignore_errors=True)
        with pytest.raises(RuntimeError) as raised:
            fit(on, [watching, failing, callback] if first else [watching, callback, failing])
        assert raised.value is error, hook
        assert watching.told == [error, "closed"]
        assert on.frozen == ()
        assert on.accumulate == 2
    shutil.rmtree("backup", ignore_errors=True)
    assert fit(on, [callback], epochs=1).epoch == [0]


@every_class
@both_backends
def test_evaluation_and_prediction_take_it_too(name, backend):
    on = trainer(backend)
    before = on.get_state()
    if name != "SwapEMAWeights":
        assert on.evaluate(X, Y, callbacks=[make(name)]) == on.evaluate(X, Y)
    assert np.array_equal(on.predict(X, callbacks=[make(name)]), on.predict(X))
    assert same(on.get_state(), before)


@every_class
@both_backends
def test_an_error_of_its_own_reaches_the_caller_and_the_others_are_closed(name, backend):
    on = trainer(backend)
    for hook in [h for h in HOOKS if "predict" not in h and make(name).overrides(h)]:
        callback, watching = make(name), Closing()
        if hook == "on_exception" or (hook == "on_gradients" and backend == "full"):
            continue  # the one is of errors, the other's class is refused
        error, own = OSError(hook), getattr(callback, hook)

        def fail(*arguments, error=error, own=own):
            own(*arguments)
            raise error

        setattr(callback, hook, fail)
        with pytest.raises(OSError, match=hook) as raised:
            fit(on, [watching, callback])
        assert raised.value is error, hook
        assert watching.told == [*([error] if hook != "on_close" else []), "closed"]
        shutil.rmtree("backup", ignore_errors=True)
        assert (on.frozen, on.accumulate) == ((), 2), hook
    assert fit(on, [make(name)], epochs=1).epoch == [0]


@every_class
@both_backends
@pytest.mark.parametrize("hook", ["on_exception", "on_close"])
def test_a_neighbour_that_fails_to_end_keeps_it_from_nothing(name, backend, hook):
    on, callback, cause = trainer(backend), make(name), KeyError("the cause")
    failing, watching = Closing(hook, OSError("disk full")), Closing("on_epoch_end", cause)
    with (
        pytest.warns(RuntimeWarning, match=rf"Closing.{hook} failed with OSError"),
        pytest.raises(KeyError) as raised,
    ):
        fit(on, [failing, callback, watching])
    assert raised.value is cause
    assert watching.told == [cause, "closed"]
    assert (on.frozen, on.accumulate) == ((), 2)


@every_class
@both_backends
@pytest.mark.parametrize("at", [(0, None), (1, 0), (1, 1), (1, None)], ids=str)
def test_its_state_goes_through_a_checkpoint_and_into_another_instance(name, backend, at):
    class Save(Callback):
        phase = "backup"

        def on_epoch_begin(self, epoch, logs):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs):
            self.save(batch)

        def on_epoch_end(self, epoch, logs):
            self.save(None)

        def save(self, batch):
            if (self.epoch, batch) == at:
                self.trainer.save("saved.onnxfit")

    settings = {"epochs": 3, "shuffle": True}
    kept = make(name)
    whole = trainer(backend)
    fit(whole, [kept, Save()], **settings)
    resumed = trainer(backend, 1)
    resumed.restore("saved.onnxfit")
    other = make(name)
    fit(resumed, [other, Save()], **settings)
    if name == "LambdaCallback":
        return  # has no state
    assert same(whole.get_state(), resumed.get_state())
    assert whole.get_state()["counters"] == resumed.get_state()["counters"]
    assert whole.history.epoch == resumed.history.epoch
    assert whole.history.history["loss"] == resumed.history.history["loss"]
    if isinstance(kept, StatefulCallback):
        assert set(kept.state_dict()) == set(other.state_attributes)
        other.load_state_dict(kept.state_dict())
        assert repr(other.state_dict()) == repr(kept.state_dict())
        if kept.state_attributes:
            with pytest.raises(onnxfit.errors.CheckpointError, match="must have"):
                other.load_state_dict({})


def plain(value):
    """Whether a value is what checkpoints hold: JSON and arrays."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return (
        value is None
        or type(value) in (bool, int, float, str)
        or (isinstance(value, np.ndarray) and value.dtype != object)
    )


@every_class
@both_backends
def test_its_state_is_numbers_strings_lists_dicts_and_arrays_at_every_moment(name, backend):
    callback, wrong = make(name), []

    def look(hook):
        return lambda *arguments: (
            plain(callback.state_dict()) or wrong.append((hook, callback.state_dict()))
        )

    looking = Closing()
    for hook in (
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_end",
        "on_test_end",
        "on_epoch_end",
        "on_train_end",
        "on_close",
    ):
        setattr(looking, hook, look(hook))
    fit(trainer(backend), [callback, looking])
    assert plain(callback.state_dict())
    assert not wrong


@every_class
@both_backends
def test_it_can_be_pickled_before_and_after_a_fit(name, backend):
    callback = make(name)
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(callback))
        assert type(copy) is type(callback)
        assert copy.state_key == callback.state_key
        assert repr(copy.state_dict()) == repr(callback.state_dict())
        fit(trainer(backend), [copy])
        fit(trainer(backend), [callback])


@every_class
def test_a_list_calls_nothing_that_a_callback_does_not_listen_to(name):
    callback = make(name)
    calls = CallbackList(
        trainer("forward_backward"), [callback], {"epochs": 1, "steps": 1, "verbose": 0}
    )
    for hook in HOOKS:
        listeners = getattr(calls, hook.removeprefix("on_"))
        assert len(listeners) == callback.overrides(hook), hook
    assert dict(Logs()) == {}


@every_class
def test_only_its_first_argument_may_be_given_by_position(name):
    parameters = list(inspect.signature(CLASSES[name]).parameters.values())
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[1:])


@every_class
def test_its_docstring_describes_every_argument(name):
    text = inspect.getdoc(CLASSES[name])
    assert not text.startswith(("What", "Which", "Where", "Who"))
    for setting in inspect.signature(CLASSES[name]).parameters:
        assert f"`{setting}`" in text, setting


@every_class
def test_its_public_members_have_docstrings(name):
    kind = CLASSES[name]
    members = [member for member in dir(kind) if not member.startswith("_")]
    methods = [member for member in members if callable(getattr(kind, member))]
    assert [method for method in methods if not inspect.getdoc(getattr(kind, method))] == []

"""The law of errors: whatever argument a public callable is given, it works, or it raises an
OnnxfitError.

`CASES` has, for every public callable, a call that works. The law replaces each of its arguments by
each of the odd values. Not covered are what the guide excepts: a wrong number or name of arguments
is Python's TypeError, and exceptions of the caller's own functions pass unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import OnnxfitError, Trainer, UnsupportedError
from onnxfit.callbacks import Callback, CallbackList, History, LambdaCallback, Logs
from onnxfit.data import DataAdapter, DataLoader, validation_split
from onnxfit.data.order import permutation
from onnxfit.data.source import Source
from onnxfit.optimizers import SGD
from onnxfit.schedules import Constant
from tests.data.test_text import bigrams
from tests.models import linear
from tests.test_public_api import exported
from tests.trainable.quantized.integer_files import integer_file
from tests.trainable.quantized.qdq_files import with_integers

X = np.linspace(0.1, 1, 8, dtype=np.float32)[:, None]
Y = 2 * X


def ignore(*arguments: Any, **settings: Any) -> None:
    """A function that takes everything and returns nothing."""


ODD: dict[str, Any] = {
    "None": None,
    "1.5": 1.5,
    "-1": -1,
    "text": "abc",
    "empty list": [],
    "empty dict": {},
    "nan": float("nan"),
    "inf": float("inf"),
    "huge integer": 10**400,
    "object": object(),
    "bytes": b"x\xff",
    "folder": "folder",
    "missing": "nowhere/x",
    "path through a file": "file/x",
    "path with NUL": "a\0b",
    "function": ignore,
    "list of None": [None],
    "dict of objects": {1: object()},
    "bad template": "{epoch:zz}",
}
PATHS = ("folder", "missing", "path through a file", "path with NUL", "bad template")
# what would run, and never end
ENDLESS = {("fit", "epochs", "huge integer")}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("not what is expected")
    trainer().save("good.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def model() -> onnx.ModelProto:
    return linear()


def integers() -> onnx.ModelProto:
    return with_integers(linear(w=0.5), {"w": 0.01})


@functools.cache
def built(backend: str) -> tuple[Trainer, Any]:
    on = Trainer(
        model(),
        loss="mse",
        optimizer=SGD(0.1, ema_momentum=0.9),
        backend=backend,
        accumulate=2,
        threads=1,
    )
    return on, on.get_state()


def trainer(backend: str = "full") -> Trainer:
    """A trainer as it was built; made once, since compiling takes longest."""
    on, state = built(backend)
    on.set_state(state)
    on.frozen = ()
    return on


def fit(on: Trainer, x: Any = X, y: Any = Y, **settings: Any) -> Any:
    return on.fit(x, y, **{"verbose": 0, "batch_size": 4, **settings})


def train(**settings: Any) -> None:
    defaults = {"model_onnx": model(), "loss": "mse", "optimizer": 0.1, "threads": 1}
    fit(Trainer(**{**defaults, **settings}))


def in_fit(action: Callable[[Trainer], object]) -> None:
    """Act in a hook of a fit whose logs are written."""
    act = LambdaCallback(on_epoch_end=lambda epoch, logs: action(act.trainer))
    fit(trainer(), callbacks=[act, onnxfit.callbacks.JSONLLogger("log.jsonl")])


def before_fit(action: Callable[[Trainer], object]) -> None:
    act = LambdaCallback(on_train_begin=lambda logs: action(act.trainer))
    fit(trainer(), callbacks=act)


def use_callback(callback: Any) -> None:
    on = trainer()
    fit(on, epochs=2, validation_data=(X, Y), callbacks=[callback])
    on.evaluate(X, Y, callbacks=callback)
    on.predict(X, callbacks=callback)


def adapter(**settings: Any) -> DataAdapter:
    recipe = trainer()._training.recipe
    return DataAdapter(**{"inputs": recipe.inputs, "targets": recipe.targets, **settings})


def saved() -> str:
    trainer().save("good.ckpt")
    return "good.ckpt"


def backward(**arguments: Any) -> None:
    on = trainer("forward_backward")
    on.forward(X)
    on.backward(**arguments)


def setter(name: str) -> Callable[..., None]:
    return lambda value: before_fit(lambda on: setattr(on, name, value))


def state_with(kind: str) -> Callable[..., None]:
    def restore(value: Any) -> None:
        on = trainer()
        state = on.get_state()
        on.set_state({**state, kind: value})
        on.set_state({**state, kind: dict.fromkeys(state[kind], value)})

    return restore


def listed(**arguments: Any) -> None:
    """Loop over the losses of trial steps."""
    before_fit(lambda on: list(zip(range(4), on.trial_steps(**arguments))))


# Each function below makes the call of one case with the arguments it is given; `good` are those of
# a call that works, and `of` has the signature whose parameters are tried.
Case = tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]


def method_cases() -> dict[str, Case]:
    """Methods of Trainer, and its properties that can be set."""

    def on(name: str, backend: str = "full") -> Callable[..., Any]:
        return lambda **arguments: getattr(trainer(backend), name)(**arguments)

    weights = {name: 0 * w for name, w in trainer().get_weights().items()}
    good: dict[str, dict[str, Any]] = {
        "fit": {"x": X, "y": Y, "verbose": 0},
        "evaluate": {"x": X, "y": Y},
        "predict": {"x": X},
        "train_on_batch": {"x": X, "y": Y},
        "test_on_batch": {"x": X, "y": Y},
        "predict_on_batch": {"x": X},
        "set_weights": {"weights": weights},
        "set_state": {"state": trainer().get_state()},
        "monitor_mode": {"monitor": "loss"},
        "save": {"path": "a.ckpt"},
        "restore": {"path": "good.ckpt"},
        "export": {"path": "a.onnx"},
        "save_onnx_graph": {"folder": "graphs"},
        "export_training": {"folder": "training", "include": ["predict"]},
        "import_state": {"path": "good.safetensors"},
        "load": {"path": "good.ckpt"},
    }
    cases = {name: (on(name), getattr(Trainer, name), args) for name, args in good.items()}
    validated = {**good["fit"], "validation_data": (X, Y), "epochs": 2}
    cases["fit with validation"] = on("fit"), Trainer.fit, validated
    for name, args in (
        ("forward", {"inputs": X}),
        ("apply_gradients", {"gradients": weights}),
    ):
        cases[name] = on(name, "forward_backward"), getattr(Trainer, name), args
    cases["backward"] = backward, Trainer.backward, {"output_gradients": Y}
    cases["generate"] = (
        lambda **arguments: Trainer(bigrams(), loss="causal_lm").generate(**arguments),
        Trainer.generate,
        {"prompts": [[1]], "max_new_tokens": 2, "temperature": 1.0},
    )
    cases["trial_steps"] = listed, Trainer.trial_steps, {"rates": [0.1]}
    cases["log"] = (
        lambda **entry: in_fit(lambda on: on.log(**entry)),
        Trainer.log,
        {"name": "n", "value": 1.0},
    )
    value = lambda value: None  # noqa: E731  # the signature of the cases with one value
    for name in ("learning_rate", "accumulate", "frozen", "batch_size", "stop_training"):
        cases[f"{name} set"] = setter(name), value, {}
    for kind in ("weights", "slots", "counters"):
        cases[f"{kind} of a state"] = state_with(kind), value, {}
    cases["rate of trial_steps"] = lambda value: listed(rates=[value]), value, {}
    for name, call in {
        "input": lambda value: trainer().predict({"x": value}),
        "weight": lambda value: trainer().set_weights({next(iter(weights)): value}),
        "batch": lambda value: fit(trainer(), [value], None),
        "inputs of a batch": lambda value: fit(trainer(), [(value, Y)], None),
        "labels of a batch": lambda value: fit(trainer(), [(X, value)], None),
        "weights of a batch": lambda value: fit(trainer(), [(X, Y, value)], None),
        "result of a function of data": lambda value: fit(trainer(), lambda: value, None),
        "step of a schedule": lambda value: train(optimizer=lambda step: value),
    }.items():
        cases[name] = call, value, {}
    return cases


def function_cases() -> dict[str, Case]:
    """Constructors of trainers and of data, and functions."""
    of_model = {
        name: (getattr(onnxfit, name), getattr(onnxfit, name), {"model_onnx": model(), **more})
        for name, more in {
            "inspect": {},
            "gradient_model": {},
            "add_loss": {"loss": "mse"},
            "per_sample_gradient_model": {"loss": "mse"},
            "draw": {"path": "a.svg"},
            "untie": {},
            "tie": {"pairs": {}},
            "add_biases": {},
            "add_dropout": {"rate": 0.5},
            "replace_head": {"classes": 2},
            "dynamic_batch": {},
            "to_float32": {},
        }.items()
    }
    quantized = {"float_model": model(), "int_model": integers(), "data": (X, Y), "loss": "mse"}
    report = onnxfit.quantization_report(**quantized)

    def scripted(**arguments: Any) -> Any:
        onnx.save(model(), "m.onnx")
        return onnxfit.training_script(**arguments)

    trained = trainer()
    fit(trained, X, Y)
    child = trained.export()

    def bill(**arguments: Any) -> Any:
        onnx.save(child, "m.onnx")
        return onnxfit.model_bom(**arguments)

    by_passes = trainer("forward_backward")
    return {
        **of_model,
        "verify": (
            onnxfit.verify,
            onnxfit.verify,
            {"child": child, "parent": model(), "x": X, "y": Y, "verbose": 0},
        ),
        "Verification": (onnxfit.Verification, onnxfit.Verification, {"verdict": "same bits"}),
        "model_bom": (bill, onnxfit.model_bom, {"model": "m.onnx"}),
        "fit_lbfgs": (onnxfit.fit_lbfgs, onnxfit.fit_lbfgs, {"trainer": by_passes, "x": X, "y": Y}),
        "training_script": (
            scripted,
            onnxfit.training_script,
            {"path": "m.onnx", "measured": False},
        ),
        "quantization_report": (
            onnxfit.quantization_report,
            onnxfit.quantization_report,
            quantized,
        ),
        "QuantizationReport": (
            onnxfit.QuantizationReport,
            onnxfit.QuantizationReport,
            {"layers": report.layers, "rows": 8, "output_snr": 1.0},
        ),
        "ranked": (report.ranked, report.ranked, {}),
        "worst": (report.worst, report.worst, {}),
        "QuantizationReport.save": (report.save, report.save, {"path": "a.svg"}),
        "quantize": (onnxfit.quantize, onnxfit.quantize, {"model": model(), "calibration": X}),
        "dequantize": (onnxfit.dequantize, onnxfit.dequantize, {}),
        "Trainer": (train, Trainer, {}),
        "DataLoader": (
            lambda **a: fit(trainer(), DataLoader(**a), None),
            DataLoader,
            {"X": X, "y": Y},
        ),
        "LoRA": (lambda **a: train(adapters=onnxfit.LoRA(**a)), onnxfit.LoRA, {"rank": 1}),
        "merge": (
            onnxfit.merge,
            onnxfit.merge,
            {"model_onnx": model(), "adapter": "nowhere"},
        ),
        "unmerge": (
            onnxfit.unmerge,
            onnxfit.unmerge,
            {"model_onnx": model(), "adapter": "nowhere"},
        ),
        "LoRA.load": (onnxfit.LoRA.load, onnxfit.LoRA.load, {"path": "nowhere"}),
        "export_adapter": (
            Trainer(model(), loss="mse", adapters=onnxfit.LoRA(rank=1)).export_adapter,
            Trainer.export_adapter,
            {"path": "adapter"},
        ),
        "Quantization": (
            lambda **a: Trainer(integer_file(), loss="mse", quantization=onnxfit.Quantization(**a)),
            onnxfit.Quantization,
            {},
        ),
        "Distillation": (
            lambda **a: Trainer(model(), loss="mse", teacher=onnxfit.Distillation(**a)),
            onnxfit.Distillation,
            {"teacher": model()},
        ),
        "Prefetch": (
            lambda **a: fit(trainer(), onnxfit.Prefetch(**a), None),
            onnxfit.Prefetch,
            {"data": [(X, Y)]},
        ),
        "ParquetLoader": (
            onnxfit.ParquetLoader,
            onnxfit.ParquetLoader,
            {"paths": "nowhere.parquet", "inputs": "a"},
        ),
        "ImageFolder": (
            onnxfit.ImageFolder,
            onnxfit.ImageFolder,
            {"root": "folder", "size": (2, 2)},
        ),
        **{
            name: (lambda kind=kind, **a: list(kind(**a)), kind, {"X": [[1, 2], [3]], "y": [0, 1]})
            for name, kind in (("Pad", onnxfit.Pad), ("Bucket", onnxfit.Bucket))
        },
        "TextLoader": (
            lambda **a: list(onnxfit.TextLoader(**a)),
            onnxfit.TextLoader,
            {"data": [[1, 2], [3]], "length": 2},
        ),
        "Mixup": (
            lambda **a: list(onnxfit.Mixup(**a)),
            onnxfit.Mixup,
            {"loader": DataLoader(X, np.zeros(len(X), np.int64)), "num_classes": 2},
        ),
        "MaskedTokens": (
            lambda **a: list(onnxfit.MaskedTokens(**a)),
            onnxfit.MaskedTokens,
            {
                "loader": DataLoader(np.ones((4, 3), np.int64)),
                "mask_token_id": 2,
                "vocabulary_size": 5,
            },
        ),
        "TextLoader.split": (
            onnxfit.TextLoader([[1], [2, 3]], 2).split,
            onnxfit.TextLoader([[1]], 2).split,
            {"fraction": 0.5},
        ),
        "Pad.split": (
            onnxfit.Pad([[1], [2, 3]]).split,
            onnxfit.Pad([[1]]).split,
            {"fraction": 0.5},
        ),
        "set_epoch": (DataLoader(X).set_epoch, DataLoader(X).set_epoch, {}),
        "load_state_dict": (DataLoader(X).load_state_dict, DataLoader(X).load_state_dict, {}),
        "permutation": (permutation, permutation, {"seed": 0, "epoch": 0, "rows": 3}),
        "validation_split": (
            validation_split,
            validation_split,
            {"x": X, "y": Y, "sample_weight": None, "fraction": 0.25},
        ),
        "DataAdapter": (
            lambda **a: list(adapter(**a).source(X, Y, batch_size=4).batches(0)),
            DataAdapter,
            {},
        ),
        "DataAdapter.source": (
            lambda **a: list(adapter().source(**a).batches(0)),
            DataAdapter.source,
            {"x": X, "y": Y, "batch_size": 4},
        ),
        "DataAdapter.batch": (lambda **a: adapter().batch(**a), DataAdapter.batch, {}),
    }


BASES = (onnxfit.losses.Loss, onnxfit.metrics.Metric, onnxfit.optimizers.Optimizer)
FIRST = (
    onnxfit.losses.MeanSquaredError,
    onnxfit.metrics.MeanSquaredError,
    onnxfit.optimizers.SGD,
)

REQUIRED: dict[str, Any] = {
    "after": Constant(0.1),
    "boundaries": [3],
    "filename": "log",
    "filepath": "{epoch}.ckpt",
    "backup_dir": "backup",
    "output_dir": "predictions",
    "pattern": "*",
    "threshold": 0.0,
    "values": [0.1, 0.2],
    "root": "http://127.0.0.1:9",
}
SCHEDULES = {"GradientAccumulationScheduler": {1: 2}, "Unfreeze": {1: "*"}, "Warmup": 0.1}
USES: dict[str, Callable[[Any], object]] = {
    "losses": lambda loss: train(loss=loss),
    "metrics": lambda metric: train(metrics=[metric]),
    "optimizers": lambda optimizer: train(optimizer=optimizer),
    "penalties": lambda penalty: train(penalty=penalty),
    "schedules": lambda schedule: train(optimizer=SGD(schedule)),
    "callbacks": use_callback,
}
# used in no fit by themselves, or given objects that the loop makes
APART = (Callback, CallbackList, History, Logs, Source)


def class_cases() -> dict[str, Case]:
    """Constructors of the registries, used in a fit."""
    cases: dict[str, Case] = {}
    for name, use in USES.items():
        module = importlib.import_module(f"onnxfit.{name}")
        for export in exported(module):
            member = getattr(module, export)
            if inspect.isfunction(member):
                cases[export] = (
                    member,
                    member,
                    {"names": ["w"], "penalty": 0.1} if "for" in export else {},
                )
            elif not inspect.isabstract(member) and member not in APART:
                cases[f"{name}.{export}"] = (
                    functools.partial(_construct, member, use),
                    member,
                    _required(export, member),
                )
    return cases


def _construct(member: type, use: Callable[[Any], object], **arguments: Any) -> None:
    use(member(**arguments))


def _required(name: str, member: type) -> dict[str, Any]:
    parameters = inspect.signature(member).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    needed |= {p.name for p in parameters if p.name in ("monitor", "root")}
    others = {"monitor": "loss", "schedule": SCHEDULES.get(name, ignore), "steps": 3}
    return {key: {**others, **REQUIRED}.get(key, 3) for key in needed}


def parameters(of: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = inspect.signature(of).parameters.values()
    names = [p.name for p in named if p.name != "self" and p.kind not in kinds]
    return [name for name in names if of in FIRST or name not in _inherited(of)]


def _inherited(of: Callable[..., Any]) -> set[str]:
    """The fields of a registry's base class, which are tried with the first class alone."""
    bases = [base for base in BASES if inspect.isclass(of) and issubclass(of, base)]
    return {field.name for base in bases for field in dataclasses.fields(base)}


def violations(name: str, case: Case) -> list[str]:
    call, of, good = case
    found = []
    for parameter in parameters(of):
        annotation = str(inspect.signature(of).parameters[parameter].annotation)
        takes_paths = any(word in annotation for word in ("Path", "Any", "Source", "_empty"))
        for kind, value in ODD.items():
            if kind in PATHS and not takes_paths:
                continue
            if (name.split()[0], parameter, kind) in ENDLESS:
                continue
            try:
                call(**{**good, parameter: value})
            except OnnxfitError:
                pass
            except Exception as error:
                found.append(f"{name}({parameter}={kind}): {error!r}"[:200])
    return found


CASES = {**method_cases(), **function_cases(), **class_cases()}


@pytest.mark.parametrize("name", CASES)
def test_every_argument_works_or_is_refused_by_an_onnxfit_error(name: str) -> None:
    assert violations(name, CASES[name]) == []


def test_the_law_notices_another_exception() -> None:
    def refuse(*, width: Any) -> None:
        raise TypeError(width)

    assert len(violations("refuse", (refuse, refuse, {}))) == len(ODD)


def test_every_public_callable_has_a_case() -> None:
    """Those without one: exceptions, base classes, and what authors of rules call."""
    covered = {name.rpartition(".")[2] for name in CASES} | {"Value", "GraphBuilder", "versions"}
    public = [getattr(onnxfit, name) for name in onnxfit.__all__]
    callables = {
        member.__name__
        for member in public
        if callable(member) and not (inspect.isclass(member) and issubclass(member, Exception))
    }
    assert callables - covered == set()


def test_the_tree_of_exceptions_is_the_documented_one() -> None:
    """Each class stands below its base class, with its other bases in brackets."""
    documented = {}
    above = {4: "Exception"}
    for line in (onnxfit.errors.__doc__ or "").splitlines():
        found = re.match(r"( {4}[ │├└─]*)(\w+Error)\b(?: *\(([\w, ]+)\))?", line)
        if found is not None:
            column, name = len(found[1]), found[2]
            documented[name] = [above[column], *re.findall(r"\w+", found[3] or "")]
            above[column + 4] = name
    assert documented == {
        name: [base.__name__ for base in getattr(onnxfit.errors, name).__bases__]
        for name in onnxfit.errors.__all__
    }


@pytest.mark.parametrize("error", [onnxfit.errors.InstallationError, onnxfit.errors.ModelError])
def test_exceptions_can_be_pickled(error: type[OnnxfitError]) -> None:
    copied = pickle.loads(pickle.dumps(error("a message")))
    assert type(copied) is error
    assert str(copied) == "a message"


@pytest.mark.parametrize("action", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_trainer_refuses_to_be_pickled_and_names_save(action: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"save\(path\) and Trainer\.load"):
        action(trainer())
    with pytest.raises(TypeError):  # what pickle itself raises
        action(trainer())


def test_exceptions_of_the_caller_pass_unchanged() -> None:
    class Mine(Exception):
        pass

    error = Mine()

    def fail(*arguments: Any) -> Any:
        raise error

    calls: list[Callable[[], object]] = [
        lambda: fit(trainer(), callbacks=LambdaCallback(on_epoch_end=fail)),
        lambda: fit(trainer(), fail, None),
        lambda: train(loss=fail),
        lambda: train(metrics=[fail]),
        lambda: train(optimizer=SGD(fail)),
    ]
    for call in calls:
        with pytest.raises(Mine) as caught:
            call()
        assert caught.value is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_interrupts_pass_unchanged(kind: type[BaseException]) -> None:
    def fail(*arguments: Any) -> None:
        raise kind

    with pytest.raises(kind):
        fit(trainer(), callbacks=LambdaCallback(on_train_batch_end=fail))


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", ["abc", "-1", "1.5", str(10**30), "99999"])
def test_external_data_at_an_impossible_place_is_a_model_error(key: str, value: str) -> None:
    broken = onnx.ModelProto()
    broken.CopyFrom(model())
    onnx.save(broken, "a.onnx", save_as_external_data=True, location="a.data", size_threshold=0)
    broken = onnx.load("a.onnx", load_external_data=False)
    for tensor in broken.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value
    Path("a.onnx").write_bytes(broken.SerializeToString())
    with pytest.raises(onnxfit.ModelError, match=r"a\.onnx"):
        Trainer("a.onnx", loss="mse")

"""Messages speak of options: laws over the options of `fit`, and wrong commands."""

from __future__ import annotations

import inspect
import shlex
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit.cli import job, main, wording
from onnxfit.cli.wording import in_options, name_of, options_by_argument
from onnxfit.trainable.quantized.settings import Quantization
from tests.cli.helpers import call, refused
from tests.models import mlp, two_outputs

COMMANDS = main.list_commands(click.Context(main))


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


FIT = command("fit")
FIT_BIG = ("fit", "m.onnx", "-d", "big.npz")
# argument of Trainer or fit -> a value, as a message writes it
VALUES: dict[str, Any] = {
    "weights": ["head.*", "!b"],
    "loss": {"a": "cross_entropy", "b": "mse"},
    "optimizer": "adam",
    "metrics": ["accuracy"],
    "penalty": None,  # its values have a form of their own
    "freeze_rows": {"emb.weight": [0, -1]},
    "adapters": onnxfit.LoRA(rank=2, alpha=4.0),
    "teacher": "m.onnx",
    "quantization": Quantization(scales="learned"),
    "fixed_inputs": {"sr": 16000, "on": True},
    "batch_axes": {"y": 1, "table": None},
    "stop_gradients": ["a*"],
    "dynamic_batch": True,
    "clip_norm": 0.5,
    "clip_value": 2.0,
    "clip_adaptive": 0.01,
    "accumulate": 3,
    "device": "cuda:1",
    "seed": 7,
    "batch_norm": "frozen",
    "precision": "bf16",
    "backend": "in_place",
    "gradient": "onnx",
    "batch_size": 8,
    "epochs": 5,
    "validation_split": 0.25,
}
PYTHON = {**inspect.signature(onnxfit.Trainer).parameters}
PYTHON |= inspect.signature(onnxfit.Trainer.fit).parameters
ARGUMENTS = sorted({*options_by_argument(FIT)} & {*PYTHON})


def as_code(value: Any) -> str:
    if isinstance(value, onnxfit.LoRA):
        return "onnxfit.LoRA(rank=2, alpha=4.0)"
    return (
        "onnxfit.Quantization(scales='learned')" if isinstance(value, Quantization) else repr(value)
    )


def read(text: str) -> dict[str, Any]:
    """The arguments of Trainer and fit that a command line gives."""
    words = ["m.onnx", "-d", "d.npz", "-o", "t.onnx", *shlex.split(text)]
    options = FIT.make_context("fit", words, resilient_parsing=True).params
    return {**options, **job.trainer_settings(options)}


@pytest.mark.parametrize("form", ["Trainer(..., {})", "fit(x, y, {})", "{}"])
@pytest.mark.parametrize(
    "name", sorted({*ARGUMENTS} - {"penalty", "validation_data", "learning_rate"})
)
def test_an_argument_becomes_the_option_that_sets_it(folder: Path, name: str, form: str) -> None:
    """`fit` reads the option of the message, and gets the value of the argument."""
    value = VALUES[name]
    text = in_options(form.format(f"{name}={as_code(value)}"), FIT)
    assert text.startswith(name_of(options_by_argument(FIT)[name]))
    found = read(text)[name]
    if name == "optimizer":
        found = type(found).__name__.lower()
    if name == "adapters":
        (found,) = found
    assert (list(found) if isinstance(value, list) else found) == value


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "ops"])
def test_every_option_has_a_sentence(name: str) -> None:
    for argument, option in options_by_argument(command(name)).items():
        own = name_of(option)
        assert own in option.opts
        assert in_options(f"Remove {argument}=.", command(name)) == f"Remove {own}."
        if "_" in argument and argument != "learning_rate":
            assert in_options(f"{argument} is wrong", command(name)) == f"{own} is wrong"


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Trainer(distribute='mpi', loss='mse') has no option for every argument.",
        "EarlyStopping(monitor='loss', epochs=3) is no call of onnxfit's.",
        "The file '/tmp/batch_size/batch_size.npz' is 'batch_size'.",
        "Known: head.batch_size, a:clip_norm=1, --clip-norm=1, x.weights=2, my_batch_size",
        "An unbalanced Trainer(batch_size=(1, [2}",
        "An open quote in fit(x='a",
        "The loss of the weights (loss) is nan with learning_rate 3.",
    ],
)
def test_other_text_stays(message: str) -> None:
    assert in_options(message, FIT, COMMANDS) == message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Pass Trainer(batch_axes={'y': axis}), or", "Pass --batch-axis y=AXIS, or"),
        ("Set fit(..., batch_size=8, epochs=2).", "Set --batch-size 8 --epochs 2."),
        ("Quantization(float_model=..., scales='learned')", "--quantization scales=learned --float-model VALUE"),
        ("optimizer=onnxfit.optimizers.Adam(ema_momentum=0.9)", "--optimizer adam:ema_momentum=0.9"),
        ("or use onnxfit.dynamic_batch(model)", "or use `onnxfit dynamic-batch`"),
        ("weights=... and clip_norm=None", "--weights PATTERN and no --clip-norm"),
    ],
)  # fmt: skip
def test_examples(message: str, expected: str) -> None:
    assert in_options(message, FIT, COMMANDS) == expected


def test_a_choice_of_none_is_a_value() -> None:
    assert in_options("activations=None", command("quantize")) == "--activations none"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fit m.onnx -d d.npz -l cross_entropy --fixed-input x=1", "--fixed-input fixes every input"),
        ("fit m.onnx -d d.npz -l cross_entropy --batch-axis y=1", "--batch-axis has axis 1 for y"),
        ("fit fixed.onnx -d d.npz -l cross_entropy", "Pass --batch-size 2. To allow any batch size, use `onnxfit dynamic-batch`, or --dynamic-batch."),
        ("fit m.onnx -d d.npz -l cross_entropy --validation-split 0.999", "--validation-split 0.999 leaves no rows"),
        ("fit m.onnx -d d.npz -l cross_entropy --quantization scales=learned", "Remove --quantization, or"),
        ("fit m.onnx -d d.npz -l cross_entropy --lora rank=2 --quantization scales=learned", "with --lora these integers stay frozen"),
        ("fit m.onnx -d d.npz -l cross_entropy --freeze-rows fc0.weight=99", "--freeze-rows has row 99"),
        ("fit m.onnx -d d.npz -l cross_entropy --device cuda", "--device cuda needs onnxruntime's"),
        ("fit two.onnx -d d.npz -l cross_entropy", "Give each output its loss: --loss a=NAME."),
        ("quantize m.onnx", "or use --activations none to quantize only the weights"),
    ],
)  # fmt: skip
def test_wrong_commands(folder: Path, line: str, expected: str) -> None:
    fixed = mlp()
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(fixed, "fixed.onnx")
    onnx.save(two_outputs(), "two.onnx")
    message = refused(*line.split(), "-o", "t.onnx")
    assert expected in message
    assert not any(f"{name}=" in message.replace(f"-{name}=", "") for name in VALUES)


def test_warnings_speak_of_options(folder: Path) -> None:
    np.savez("big.npz", X=1e30 * np.load("X.npy"), y=np.load("labels.npy"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = call(*FIT_BIG, "-l", "cross_entropy", "-q", "-o", "t.onnx", "--lr", 1e30)
    assert "set --clip-norm" in result.stderr


def test_a_terminal_breaks_no_word_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "No node is called 'Reluu'. Did you mean 'Relu'?\n  conv1  a table\n" + "word " * 30
    assert wording.wrapped(message, "Error: ") == message, "not for a file or a pipe"
    monkeypatch.setattr(wording, "stream_width", lambda stream: 40)
    lines = f"Error: {wording.wrapped(message, 'Error: ')}".split("\n")
    assert max(map(len, lines)) <= 40
    assert lines[:2] == ["Error: No node is called 'Reluu'. Did", "you mean 'Relu'?"]
    assert "  conv1  a table" in lines
    assert " ".join(lines).split() == f"Error: {message}".split()
    assert wording.wrapped("a" * 50, "Error: ") == "a" * 50

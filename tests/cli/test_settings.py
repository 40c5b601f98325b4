"""Losses, metrics, penalties, optimizers and schedules from the text of an option."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnxfit
from onnxfit.cli import settings
from tests.cli.helpers import FIT, refused
from tests.models import linear


def test_metrics_take_logits_where_the_loss_does() -> None:
    loss = settings.parse_loss(["binary_cross_entropy:from_logits=true"])
    texts = ['binary_accuracy:name="b"', "binary_accuracy:from_logits=false"]
    trainer = onnxfit.Trainer(linear(), loss=loss, metrics=settings.parse_metrics(texts))
    assert [metric.metric.from_logits for metric in trainer.metrics] == [True, False]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--loss", "cross_entrpy", "Did you mean 'cross_entropy'?"),
        (
            "--loss",
            "huber:dleta=1",
            "No setting of huber is called 'dleta'. Did you mean 'delta'?",
        ),
        ("--loss", "huber:delta", "huber:delta=VALUE"),
        ("--loss", "huber:delta=-1", "delta > 0, got -1"),
        ("--loss", "nowhere=mse", "No output is called 'nowhere'"),
        ("--optimizer", "adamm", "Did you mean 'adam'?"),
        ("--optimizer", "sgd:momentum=much", "momentum"),
        ("--learning-rate", "fast", "No schedule or number is called 'fast'"),
        ("--learning-rate", "cosine:learning_rate=1", "decay_steps"),
        ("--learning-rate", "-1", "-1"),
        ("--metrics", "acuracy", "Did you mean 'accuracy'?"),
        ("--penalty", "much", "[PATTERN=]NUMBER"),
        ("--penalty", "fc9*=1", "fc9*"),
        ("--weights", "fc9*", "fc9*"),
        ("--device", "abacus", "abacus"),
        ("--lora", "rnk=2", "Did you mean 'rank'?"),
        ("--lora", "rank", "rank=VALUE"),
        ("--lora", "rank=0", "whole number >= 1, got 0"),
        ("--lora", "matrices=1", "No setting of --lora is called 'matrices'"),
        ("--lora", "target=fc9*", "fc9*"),
        ("--quantization", "scale=learned", "Did you mean 'scales'?"),
        ("--quantization", "observe", "observe=VALUE"),
        ("--quantization", "observe=-1", "observe to be a whole number >= 0"),
        ("--quantization", "scales=learned", "this file has no such integers"),
    ],
)
def test_what_does_not_exist_is_one_message(
    folder: Path, option: str, value: str, message: str
) -> None:
    rest = FIT if option != "--loss" else (*FIT[:4], "-q")
    assert message in refused(*rest, option, value, "-o", "t.onnx")
    assert not Path("t.onnx").exists()


@pytest.mark.parametrize(
    "option",
    [
        "--epochs=0",
        "--batch-size=0",
        "--clip-norm=0",
        "--validation-split=1",
        "--backend=fast",
        "--seed=x",
        "--no-such=1",
    ],
)
def test_values_out_of_range(folder: Path, option: str) -> None:
    assert option.split("=")[0] in refused(*FIT, option, "-o", "t.onnx", code=2)


def test_the_penalty_of_every_weight_comes_last() -> None:
    assert list(settings.parse_penalty(["0.5", "fc*=1", "fc1*=l1:2"])) == ["fc*", "fc1*", "*"]


def test_the_settings_of_integer_files() -> None:
    assert settings.parse_quantization(None) is None
    learned = settings.parse_quantization('scales=learned,weights=["w*", "!v"]')
    assert learned == onnxfit.Quantization(scales="learned", weights=["w*", "!v"])
    assert settings.parse_quantization("observe=100") == onnxfit.Quantization(observe=100)
    assert settings.parse_quantization("weights=*") == onnxfit.Quantization(weights="*")
    begun = settings.parse_quantization(None, "f.onnx")
    assert begun == onnxfit.Quantization(float_model="f.onnx")


def test_the_settings_of_a_teacher() -> None:
    assert settings.parse_distillation(None, None) is None
    assert settings.parse_distillation(None, "t.onnx") == "t.onnx"
    taught = settings.parse_distillation("temperature=3,weight=1", "t.onnx")
    assert taught == onnxfit.Distillation("t.onnx", temperature=3, weight=1)
    with pytest.raises(onnxfit.SettingError, match="Pass --teacher"):
        settings.parse_distillation("temperature=3", None)


def test_the_settings_of_adapters() -> None:
    assert settings.parse_lora([]) is None
    texts = ["rank=2,alpha=4,target=*attn*,init=pissa", 'dora=true,target=["a", "!b"],dropout=0.1']
    assert settings.parse_lora(texts) == [
        onnxfit.LoRA(rank=2, alpha=4, target="*attn*", init="pissa"),
        onnxfit.LoRA(target=["a", "!b"], dropout=0.1, dora=True),
    ]
    assert settings.parse_lora(["target=124"]) == [onnxfit.LoRA(target="124")]


def test_given_twice(folder: Path) -> None:
    assert "twice" in refused(*FIT, "--loss", "mse", "-o", "t.onnx")
    assert "twice" in refused(*FIT, "--penalty", "1", "--penalty", "2", "-o", "t.onnx")

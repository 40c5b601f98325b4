"""Attributes of other libraries' models and optimizers: the error names the one of onnxfit."""

from __future__ import annotations

import re

import numpy as np
import pytest

from onnxfit import Trainer, optimizers
from onnxfit.errors import MissingAttributeError, nearest_name
from onnxfit.training.hints import OTHER_WORDS, WORDS_OF_OPTIMIZERS
from tests.models import mlp


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(mlp(), loss="cross_entropy", optimizer="adam")


def names_in(message: str) -> set[str]:
    """The names of attributes in a hint: calls, and words with an underscore."""
    return {
        *re.findall(r"(?<![\w.'])([a-z_]+)\(", message),
        *re.findall(r"\b[a-z]+_[a-z_]+\b", message),
    }


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_a_hint_names_what_exists(trainer: Trainer, name: str) -> None:
    assert not hasattr(Trainer, name), "the attribute exists, so nobody reads the hint"
    with pytest.raises(MissingAttributeError) as error:
        getattr(trainer, name)
    message = str(error.value)
    assert message.endswith(OTHER_WORDS[name])
    assert not hasattr(trainer, name)
    arguments = {"sum", "w", "learning_rate"}
    known = {*dir(trainer), *arguments}
    assert {n for n in names_in(OTHER_WORDS[name]) if not n.startswith("_")} <= known


@pytest.mark.parametrize("name", WORDS_OF_OPTIMIZERS)
def test_hints_of_optimizers(trainer: Trainer, name: str) -> None:
    with pytest.raises(MissingAttributeError, match=f"Adam has no attribute '{name}'. ") as error:
        getattr(trainer.optimizer, name)
    assert str(error.value).endswith(WORDS_OF_OPTIMIZERS[name])
    assert getattr(trainer.optimizer, name, None) is None


def test_the_words_of_some_hints(trainer: Trainer) -> None:
    for name, expected in {
        "count_params": "summary() counts the weights",
        "to_json": "model is the ONNX model",
        "save_weights": "save(path)",
        "compile": "Trainer(model, loss=..., optimizer=..., metrics=...)",
        "freeze": "frozen = ['encoder.*']",
        "half": "precision='bf16'",
    }.items():
        with pytest.raises(MissingAttributeError, match=re.escape(expected)):
            getattr(trainer, name)


def test_what_the_hints_say_works(trainer: Trainer) -> None:
    weights = trainer.get_weights()
    assert sum(w.size for w in weights.values()) == 4 * 8 + 8 + 8 * 3 + 3
    trainer.frozen = ["fc0.*"]
    assert set(trainer.frozen) == {"fc0.bias", "fc0.weight"}
    trainer.frozen = []
    assert trainer.frozen == ()
    assert isinstance(trainer.optimizer.settings, optimizers.Adam)
    assert trainer.optimizer.lr == trainer.learning_rate
    X, y = np.zeros((2, 4), np.float32), np.zeros(2, np.int64)
    trainer.train_on_batch(X, y)
    assert (trainer.global_step, trainer.epoch) == (1, 0)


def test_only_similar_names_are_suggested(trainer: Trainer) -> None:
    for name, near in {
        "leaning_rate": "learning_rate",
        "sumary": "summary",
        "modle": "model",
    }.items():
        with pytest.raises(MissingAttributeError, match=f"Did you mean '{near}'"):
            getattr(trainer, name)
    for name in ("net", "n_features_in_", "output_shape"):
        with pytest.raises(MissingAttributeError) as error:
            getattr(trainer, name)
        assert "Did you mean" not in str(error.value)
    assert nearest_name("net", ["inspect"], cutoff=0.6), "a lower bound suggested this"


@pytest.mark.parametrize("name", ["count_params", "n_params", "nparams", "size"])
def test_a_count_of_weights_is_in_the_summary(name: str) -> None:
    with pytest.raises(AttributeError, match=r"summary\(\) counts the weights"):
        getattr(Trainer(mlp(), loss="mse"), name)


def test_only_similar_attributes_are_suggested() -> None:
    trainer = Trainer(mlp(), loss="mse")
    with pytest.raises(AttributeError) as misspelt:
        trainer.sumary  # noqa: B018
    assert str(misspelt.value) == "A Trainer has no attribute 'sumary'. Did you mean 'summary'?"
    with pytest.raises(
        AttributeError, match=r"'num_epochs'\. It has epoch\. help\(Trainer\) lists"
    ):
        trainer.num_epochs  # noqa: B018
    with pytest.raises(AttributeError) as unlike:
        trainer.qwerty  # noqa: B018
    assert str(unlike.value) == (
        "A Trainer has no attribute 'qwerty'. help(Trainer) lists all attributes."
    )

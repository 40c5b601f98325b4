"""Samples of a language model, against its outputs read by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import TextLoader, Trainer
from onnxfit.callbacks import GenerateSamples, TensorBoard
from onnxfit.errors import SettingError
from tests.data.test_text import bigrams
from tests.distributed.threads import on_ranks
from tests.helpers import compiled_graphs
from tests.load.test_caches import Decoder

COUNTING = [[1, 2, 3, 4, 5, 6, 7, 8] * 2] * 12


def trained(*callbacks: Any, model: Any = None, epochs: int = 2, **settings: Any) -> Trainer:
    trainer = Trainer(
        model or bigrams(), loss="causal_lm", optimizer="adam", seed=3, threads=1, **settings
    )
    data = TextLoader(COUNTING, 8, batch_size=4)
    trainer.fit(data, epochs=epochs, callbacks=list(callbacks), verbose=0)
    return trainer


def likeliest(trainer: Trainer, prompt: list[int], count: int) -> list[int]:
    """The prompt continued by the whole model, one text at a time and without padding."""
    ids = list(prompt)
    for _ in range(count):
        x = {"input_ids": np.array([ids])}
        if len(trainer.inputs) > 1:
            x["attention_mask"] = np.ones((1, len(ids)), np.int64)
        ids.append(int(trainer.predict(x)[0, -1].argmax()))
    return ids


def as_text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize("make", [bigrams, lambda: Decoder(False).model], ids=["table", "caches"])
def test_a_text_is_continued_by_its_likeliest_tokens(make: Any, capsys: Any) -> None:
    prompts = [[1], [3, 4, 5], [7, 8]]
    samples = GenerateSamples(prompts, max_new_tokens=4)
    trainer = trained(samples, model=make(), epochs=1)
    expected = [as_text(likeliest(trainer, prompt, 4)) for prompt in prompts]
    assert samples.samples == {"0": expected}
    assert capsys.readouterr().err.splitlines() == [f"epoch 1: {text}" for text in expected]


def test_training_goes_on_as_without_samples(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 3}
    alone = trained().get_weights()["table"]
    whole = GenerateSamples([[1]], **settings)
    np.testing.assert_array_equal(trained(whole).get_weights()["table"], alone)
    first, second = GenerateSamples([[1]], **settings), GenerateSamples([[1]], **settings)
    loaded = Trainer.load(trained(first, epochs=1).save(tmp_path / "c.onnxfit"))
    data = TextLoader(COUNTING, 8, batch_size=4)
    loaded.fit(data, epochs=2, initial_epoch=1, callbacks=second, verbose=0)
    np.testing.assert_array_equal(loaded.get_weights()["table"], alone)
    assert {**first.samples, **second.samples} == whole.samples
    assert list(whole.samples) == ["0", "1"]


@pytest.mark.parametrize("make", [bigrams, lambda: Decoder(False).model], ids=["table", "caches"])
def test_samples_of_all_epochs_take_one_graph(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_graphs(monkeypatch)
    trained(model=make(), epochs=4)
    without = len(compiled)
    samples = GenerateSamples([[1], [3, 4, 5]], max_new_tokens=3)
    trained(samples, model=make(), epochs=4)
    assert len(compiled) <= 2 * without + 1  # the check of the first batch predicts, too
    assert len(samples.samples) == 4


def test_samples_come_every_so_many_epochs_and_end_at_the_end_of_text() -> None:
    samples = GenerateSamples([[1], [2]], every=2, eos_token_id=4, max_new_tokens=5)
    trainer = trained(samples, epochs=4)
    assert list(samples.samples) == ["1", "3"]
    for prompt, text in zip([[1], [2]], samples.samples["3"]):
        ids = likeliest(trainer, prompt, 5)
        end = ids.index(4) + 1 if 4 in ids else len(ids)
        assert text == as_text(ids[:end])


def test_texts_come_from_a_tokenizer(tmp_path: Path) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) - ord("a") for letter in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(token + ord("a")) for token in ids)

    class Encoding:
        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

    class OfTokenizers(Letters):
        def encode(self, text: str) -> Any:
            return Encoding(super().encode(text))

    samples = GenerateSamples(["bc"], tokenizer=Letters(), max_new_tokens=3)
    others = GenerateSamples(["bc"], tokenizer=OfTokenizers(), max_new_tokens=3)
    board = TensorBoard(tmp_path)
    trainer = trained(board, samples, epochs=1)
    trained(others, epochs=1)
    expected = Letters().decode(likeliest(trainer, [1, 2], 3))
    assert samples.samples == others.samples == {"0": [expected]}
    written = b"".join(path.read_bytes() for path in tmp_path.glob("train/events*"))
    assert b"sample_0" in written
    assert expected.encode() in written


def fixed(rows: int, tokens: int) -> onnx.ModelProto:
    model = bigrams()
    for value in (model.graph.input[0], model.graph.output[0]):
        for dim, size in zip(value.type.tensor_type.shape.dim, (rows, tokens)):
            dim.dim_value = size
    return model


def test_fixed_sizes_are_kept() -> None:
    """A text that is longer than the model is read from its last tokens."""
    prompts = [[1], [3, 4, 5], [7] * 7]
    samples = GenerateSamples(prompts, max_new_tokens=4)
    free = GenerateSamples(prompts, max_new_tokens=4)
    trained(samples, model=fixed(4, 8), epochs=1)
    trained(free, epochs=1)
    assert samples.samples == free.samples


def test_ranks_show_the_same_texts_once(capsys: Any) -> None:
    def run(communicator: Any) -> Any:
        samples = GenerateSamples([[1], [2], [3]], max_new_tokens=2, temperature=1.0)
        trained(samples, epochs=1, distribute=communicator)
        return samples.samples

    alone = run(None)
    printed = capsys.readouterr().err
    assert on_ranks(2, run) == [alone, alone]
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[1], []]}, "with at least one token each"),
        ({"prompts": [[1.5]]}, r"A prompt must be text or a list of token ids, got \[1.5\]"),
        ({"prompts": ["a"]}, "is text, which needs a tokenizer .* got NoneType"),
        ({"temperature": -1.0}, "a finite temperature >= 0, got -1.0"),
        ({"top_p": 0.0}, "needs 0 < top_p <= 1, got 0.0"),
        ({"top_k": 0}, "top_k"),
        ({"every": 0}, "every"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        GenerateSamples(**{"prompts": [[1]], **settings})


def test_an_output_of_another_shape_is_refused() -> None:
    model = bigrams()
    model.graph.node.append(onnx.helper.make_node("ReduceMax", ["logits"], ["largest"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("largest", 1, [1, 1, 1]))
    trainer = Trainer(model, loss={"logits": "causal_lm"})
    for output, message in (("largest", "logits of shape"), ("y", "the model has no output 'y'")):
        samples = GenerateSamples([[1]], output=output)
        with pytest.raises(SettingError, match=message):
            trainer.fit(TextLoader(COUNTING, 8), callbacks=samples, verbose=0)

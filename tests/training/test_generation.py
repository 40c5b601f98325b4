"""Texts that a trainer continues, by caches and without them.

The judge is `predict` of the whole text so far, one text at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.errors import SettingError
from onnxfit.runtime.session import StatelessSession
from tests.data.test_text import bigrams
from tests.graph.test_caches import Decoder
from tests.graph.test_concatenated_caches import decoder

PROMPTS = [[1, 2, 3], [4], [5, 6, 7], [8, 9]]
FILES: dict[str, Callable[[], onnx.ModelProto]] = {
    "no caches": bigrams,
    "Concat": decoder,
    "GroupQueryAttention": lambda: Decoder(False).model,
}


def trained(make: Callable[[], onnx.ModelProto], **settings: Any) -> Trainer:
    trainer = Trainer(make(), loss="causal_lm", optimizer="adam", threads=1, **settings)
    ids = np.random.default_rng(0).integers(0, 9, (4, 6))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    trainer.fit({spec.name: feeds[spec.name] for spec in trainer.inputs}, ids, verbose=0)
    return trainer


def likeliest(trainer: Trainer, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        logits = trainer.predict({spec.name: feeds[spec.name] for spec in trainer.inputs})
        ids.append(int(logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_texts_are_continued_by_their_likeliest_tokens(make: Any) -> None:
    trainer = trained(make)
    expected = [likeliest(trainer, prompt, 5) for prompt in PROMPTS]
    assert trainer.generate(PROMPTS, max_new_tokens=5) == expected
    ends = [ids[len(prompt) :] for ids, prompt in zip(expected, PROMPTS)]
    end = ends[0][2]
    cut = [
        prompt + (new[: new.index(end) + 1] if end in new else new)
        for new, prompt in zip(ends, PROMPTS)
    ]
    assert trainer.generate(PROMPTS, max_new_tokens=5, eos_token_id=end) == cut


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_draws_depend_on_the_seed_and_not_on_caches(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(make)
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 8, "top_p": 0.95, "max_new_tokens": 8}
    drawn = trainer.generate(PROMPTS, **settings, seed=3)
    assert drawn == trainer.generate(PROMPTS, **settings, seed=3)
    assert drawn != trainer.generate(PROMPTS, **settings, seed=4)
    assert [len(text) for text in drawn] == [len(prompt) + 8 for prompt in PROMPTS]
    monkeypatch.setattr("onnxfit.training.generation.empty_caches", lambda *_: None)
    assert drawn == trainer.generate(PROMPTS, **settings, seed=3)


@pytest.mark.parametrize("name", ["Concat", "GroupQueryAttention"])
def test_a_file_with_caches_reads_each_token_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(FILES[name])
    read = []

    class Counting(StatelessSession):
        def __call__(self, values: Any, outputs: Any = None) -> Any:
            read.append(int(np.prod(values["input_ids"].shape())))
            return super().__call__(values, outputs)

    monkeypatch.setattr("onnxfit.training.generation.StatelessSession", Counting)
    trainer.generate([[1, 2, 3], [4, 5, 6]], max_new_tokens=5)
    assert read == [6, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, "lists of token ids, with at least one id each, got"),
        ({"prompts": [[1], []]}, "with at least one id each"),
        ({"prompts": [[1.5]]}, "lists of token ids"),
        ({"prompts": 5}, "lists of token ids"),
        ({"temperature": -1.0}, "generate needs a finite temperature >= 0, got -1.0"),
        ({"top_p": 0.0}, "needs 0 < top_p <= 1, got 0.0"),
        ({"top_k": 0}, "needs top_k >= 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens from 1 to"),
        ({"output": "y"}, "the model has no output 'y'. Pass output= with one of 'logits'"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, message: str) -> None:
    trainer = Trainer(bigrams(), loss="causal_lm")
    with pytest.raises(SettingError, match=message):
        trainer.generate(**{"prompts": [[1]], **settings})

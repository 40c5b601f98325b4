"""Texts that a trainer continues, by caches and without them.

The judge is `predict` of the whole text so far, one text at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.errors import SettingError
from onnxfit.graph import tensors
from onnxfit.runtime.session import StatelessSession
from tests.data.test_text import bigrams
from tests.helpers import compiled_graphs
from tests.load.test_caches import Decoder
from tests.load.test_concatenated_caches import decoder
from tests.trainable.quantized.qdq_files import with_integers

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

    monkeypatch.setattr("onnxfit.training.decoding.StatelessSession", Counting)
    trainer.generate([[1, 2, 3], [4, 5, 6]], max_new_tokens=5)
    assert read == [6, 2, 2, 2, 2]


def bfloat16_table() -> onnx.ModelProto:
    """The decoder with a table of embeddings in bfloat16."""
    model = decoder()
    (table,) = (tensor for tensor in model.graph.initializer if tensor.name == "table")
    values = onnx.numpy_helper.to_array(table).astype(ml_dtypes.bfloat16)
    table.CopyFrom(onnx.numpy_helper.from_array(values, "table"))
    (index, gather) = next((i, n) for i, n in enumerate(model.graph.node) if "table" in n.input)
    name = gather.output[0]
    gather.output[0] = "half"
    cast = onnx.helper.make_node("Cast", ["half"], [name], to=onnx.TensorProto.FLOAT)
    model.graph.node.insert(index + 1, cast)
    return model


# form -> the file, and the settings of the trainer
FORMS: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any]]] = {
    **{name: (make, {}) for name, make in FILES.items()},
    "merged": (decoder, {"adapters": LoRA(2, target="w?")}),
    "merged, DoRA": (decoder, {"adapters": LoRA(2, target="w?", dora=True)}),
    "merged, PiSSA": (decoder, {"adapters": LoRA(2, target="w?", init="pissa")}),
    "beside a table": (bigrams, {"adapters": LoRA(2, target="table")}),
    "beside integers": (lambda: Decoder(True).model, {"adapters": LoRA(2, target="qkv*Q4")}),
    "some weights": (lambda: Decoder(True).model, {"weights": "*.[AB]"}),
    "scales of integers": (lambda: Decoder(True).model, {"weights": "*_scales"}),
    "frozen bfloat16": (bfloat16_table, {"weights": "w?"}),
    "forward_backward": (decoder, {"backend": "forward_backward"}),
}


# These are compiled after each update: onnxruntime needs constants, or NumPy cannot pass them.
CONSTANTS: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any]]] = {
    "integers": (lambda: with_integers(decoder(), {"head": 0.05}), {}),
    "merged bfloat16": (bfloat16_table, {"adapters": LoRA(2, target="table")}),
}


def changes_of(trainer: Trainer) -> Iterator[str]:
    """Change the weights in one way after another, and yield what was done."""
    ids = np.arange(12).reshape(2, 6) % 9
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    x = {spec.name: feeds[spec.name] for spec in trainer.inputs}
    began = trainer.get_state()
    trainer.train_on_batch(x, ids)
    yield "a step"
    trainer.evaluate(x, ids)
    yield "an evaluation"
    rng = np.random.default_rng(5)
    weights = trainer.get_weights()
    trainer.set_weights({n: rng.normal(size=w.shape).astype(w.dtype) for n, w in weights.items()})
    yield "other weights"
    trainer.set_state(began)
    yield "the first weights"


@pytest.mark.parametrize("form", {**FORMS, **CONSTANTS})
def test_one_graph_continues_texts_with_all_weights(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings = {**FORMS, **CONSTANTS}[form]
    trainer = Trainer(make(), loss="causal_lm", optimizer=0.5, threads=1, **settings)
    compiled = compiled_graphs(monkeypatch)
    found, total = {}, 0
    for count, change in enumerate(changes_of(trainer), 1):
        before = len(compiled)
        (text,) = trainer.generate([[1, 2] * count], max_new_tokens=4)
        total += len(compiled) - before
        assert text == likeliest(trainer, [1, 2] * count, 4), change
        found[change] = text[2 * count :]
    assert total == (1 if form in FORMS else 3)  # an evaluation changes nothing
    assert found["other weights"] not in (found["a step"], found["the first weights"])


def test_tensors_that_all_graphs_share_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_COPIED_BYTES", 100)
    monkeypatch.setattr(tensors, "MAX_INLINE_BYTES", 100)
    trainer = Trainer(decoder(), "head", loss="causal_lm", threads=1)
    read = []

    class Seeing(StatelessSession):
        def __call__(self, values: Any, outputs: Any = None) -> Any:
            shared = [name for name in values if name in trainer._training.recipe.constants]
            buffers = trainer._training.backend.state.buffer
            read.append({n for n in shared if values[n].data_ptr() == buffers(n).value.data_ptr()})
            return super().__call__(values, outputs)

    monkeypatch.setattr("onnxfit.training.decoding.StatelessSession", Seeing)
    assert trainer.generate([[1, 2]], max_new_tokens=2) == [likeliest(trainer, [1, 2], 2)]
    assert read == [{"table", "positions", "wq", "wk", "wv"}] * 2


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

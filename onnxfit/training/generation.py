"""Text generation, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxfit.checks import shortened
from onnxfit.data.sampling import Sampling
from onnxfit.data.text import MAX_LENGTH
from onnxfit.errors import SettingError
from onnxfit.training.decoding import (
    Array,
    Decoder,
    TextInputs,
    Texts,
    check_logits,
    empty_caches,
)
from onnxfit.training.evaluation import Evaluator
from onnxfit.training.training import Training

# Function from texts to the logits of the next token of each.
Predict = Callable[[Texts], Iterable[Array]]


class Generator:
    """Continues texts with a language model."""

    def __init__(self, training: Training, evaluator: Evaluator) -> None:
        self.training = training
        self.evaluator = evaluator

    def generate(
        self,
        prompts: Any,
        sampling: Sampling,
        max_new_tokens: int,
        eos_token_id: int | None,
        seed: int,
        output: str | None,
        input_names: Mapping[str, str] | None,
    ) -> Texts:
        """Return prompts with the tokens that the model adds; see `Trainer.generate`."""
        sampling.check("generate")
        if not 1 <= max_new_tokens <= MAX_LENGTH:
            raise SettingError(
                f"generate needs max_new_tokens from 1 to {MAX_LENGTH}, got"
                f" {shortened(max_new_tokens)}."
            )
        texts = _checked_prompts(prompts)
        inputs = TextInputs(self.training.recipe, input_names)
        name = self._logits_name(output)
        decoder = self._decoder(inputs, name)
        groups: dict[tuple[int, ...], Predict]  # indices of texts that are continued together
        if decoder is None:
            width = max(map(len, texts)) + max_new_tokens
            groups = {tuple(range(len(texts))): self._predictor(inputs, name, texts, width)}
        else:
            groups = {group: decoder.predictor() for group in _of_equal_length(texts)}
        for group, predict in groups.items():
            generators = [np.random.default_rng([seed % 2**64, i]) for i in group]
            continued = _continued(
                [texts[i] for i in group],
                predict,
                max_new_tokens,
                eos_token_id,
                sampling,
                generators,
            )
            for i, text in zip(group, continued):
                texts[i] = text
        return [
            [*map(int, text)] for text in self.training.world.broadcast("generated tokens", texts)
        ]

    def _logits_name(self, output: str | None) -> str:
        """Return the name of the output with the logits."""
        outputs = list(self.training.recipe.outputs)
        objectives = self.training.recipe.objectives.values()
        read = (name for one in objectives for name in one.reads if name in outputs)
        name = output or next(read, outputs[0] if len(outputs) == 1 else "logits")
        if name not in outputs:
            raise SettingError(
                f"generate needs the output with the logits, but the model has no output {name!r}."
                f" Pass output= with one of {', '.join(map(repr, outputs))}."
            )
        return name

    def _decoder(self, inputs: TextInputs, output: str) -> Decoder | None:
        """Return the decoder for the caches of the file.

        The result is None if the file has no caches, or inputs other than texts and caches.
        """
        caches = empty_caches(self.training.trainable.file.proto, inputs)
        if caches is None or self.training.recipe.large:
            return None
        return Decoder(self.training.compiled_file, inputs, caches, output)

    def _predictor(self, inputs: TextInputs, output: str, texts: Texts, width: int) -> Predict:
        """Return a function that processes whole texts, in batches of one shape.

        - `width`: the maximum number of tokens of a text.
        """
        rows, tokens = inputs.sizes
        width = tokens if isinstance(tokens, int) else width
        size = rows * self.training.world.size if isinstance(rows, int) else len(texts)

        def predict(texts: Texts) -> list[Array]:
            seen = [ids[-width:] for ids in texts]
            padding = [seen[0]] * (-len(seen) % size)  # for a fixed size of batches
            loader = inputs.loader(seen + padding, width, size)
            with (
                self.training.source(loader, None, None, size, "prediction") as data,
                self.evaluator.calling((), "generate") as called,
            ):
                # not `predict`, which compiles the trained model after each update
                outputs = self.evaluator.predict(
                    data, called, lambda: self.training.backend.predict
                )
            logits = outputs[output] if isinstance(outputs, dict) else outputs
            check_logits(getattr(logits, "shape", ()), width)  # a list if batches differ
            return [logits[row, len(ids) - 1] for row, ids in enumerate(seen)]

        return predict


def _checked_prompts(prompts: Any) -> Texts:
    """Return lists of token ids. SettingError: prompts are something else, or a prompt is empty."""
    try:
        texts = [np.asarray(prompt) for prompt in prompts]
    except (TypeError, ValueError):
        texts = []
    is_text = [one.ndim == 1 and one.size and one.dtype.kind in "iu" for one in texts]
    if not texts or not all(is_text):
        raise SettingError(
            "generate needs prompts that are lists of token ids, with at least one id each, got"
            f" {shortened(prompts)}."
        )
    return [[int(token) for token in text] for text in texts]


def _of_equal_length(texts: Texts) -> list[tuple[int, ...]]:
    """Return the indices of texts, grouped by equal length."""
    groups: dict[int, list[int]] = {}
    for i, text in enumerate(texts):
        groups.setdefault(len(text), []).append(i)
    return [tuple(group) for group in groups.values()]


def _continued(
    texts: Texts,
    predict: Predict,
    max_new_tokens: int,
    eos_token_id: int | None,
    sampling: Sampling,
    generators: Sequence[np.random.Generator],
) -> Texts:
    """Return texts with new tokens, up to the first end-of-text token among them."""
    starts = [len(text) for text in texts]
    longer = [list(text) for text in texts]
    for _ in range(max_new_tokens):
        for text, logits, generator in zip(longer, predict(longer), generators):
            text.append(sampling.next_token(logits, generator))
        if all(eos_token_id in text[start:] for text, start in zip(longer, starts)):
            break
    for text, start in zip(longer, starts):
        if eos_token_id in text[start:]:
            del text[text.index(eos_token_id, start) + 1 :]
    return longer

"""A trainer that continues texts, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from onnxfit.data.sampling import Sampling
from onnxfit.data.text import MAX_LENGTH
from onnxfit.errors import SettingError
from onnxfit.registry import check_arguments, shortened
from onnxfit.training.decoding import (
    Array,
    CompiledFile,
    Decoder,
    TextInputs,
    Texts,
    check_logits,
    empty_caches,
)
from onnxfit.training.inference import InferenceTrainer

# Function from texts to the logits of the next token of each.
Predict = Callable[[Texts], Iterable[Array]]


class GeneratingTrainer(InferenceTrainer):
    """Trainer that can continue texts with a language model."""

    @check_arguments
    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        seed: int = 0,
        output: str | None = None,
        input_names: Mapping[str, str] | None = None,
    ) -> Texts:
        """Return prompts with the tokens that a language model adds.

        A model with key-value caches processes each prompt once, and then one token at a time. Any
        other model processes the whole text for each token, in batches of one shape. The first call
        compiles a graph, which serves all later calls and weights; a quantized model is compiled
        again after a step. A model with more than 64 MB of packed 4-bit weights is compiled again
        after an evaluation or a prediction.

        - `prompts`: lists of token ids.
        - `max_new_tokens` >= 1: tokens to add to a prompt.
        - `temperature` >= 0: 0 takes the likeliest token; otherwise a token is drawn from
          softmax(logits / temperature).
        - `top_k` >= 1: draw from the likeliest k tokens only; None draws from all.
        - `top_p` in (0, 1]: draw from the smallest set of likeliest tokens whose probabilities add
          up to `top_p` (Holtzman et al. 2019, arXiv:1904.09751); None draws from all.
        - `eos_token_id`: the id that ends a text; None ends it after `max_new_tokens`.
        - `seed`: the seed of the random draws, together with the index of the prompt.
        - `output`: the output with the logits, shape `(batch, tokens, vocabulary)`. None takes the
          output that has a loss.
        - `input_names`: names of the model's inputs, as for `TextLoader`, which makes the inputs.

        If the model has a fixed number of tokens, only the last tokens of a longer text are used.
        Returns a list of ids for each prompt. SettingError: a setting is impossible, there is no
        prompt, or the output has another shape.
        """
        sampling = Sampling(temperature, top_k, top_p)
        sampling.check("generate")
        if not 1 <= max_new_tokens <= MAX_LENGTH:
            raise SettingError(
                f"generate needs max_new_tokens from 1 to {MAX_LENGTH}, got"
                f" {shortened(max_new_tokens)}."
            )
        texts = _checked_prompts(prompts)
        inputs = TextInputs(self._recipe, input_names)
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
        return [[*map(int, text)] for text in self._world.from_main("generated tokens", texts)]

    # ------------------------------------------------------------------ inside

    @cached_property
    def _compiled_file(self) -> CompiledFile:
        return CompiledFile(self._trainable, self._backend)

    def _logits_name(self, output: str | None) -> str:
        """Return the name of the output with the logits."""
        outputs = list(self._recipe.outputs)
        name = output or next(iter(self.objectives), outputs[0] if len(outputs) == 1 else "logits")
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
        caches = empty_caches(self._trainable.file, inputs)
        if caches is None or self._recipe.large:
            return None
        return Decoder(self._compiled_file, inputs, caches, output)

    def _predictor(self, inputs: TextInputs, output: str, texts: Texts, width: int) -> Predict:
        """Return a function that processes whole texts, in batches of one shape.

        - `width`: the maximum number of tokens of a text.
        """
        rows, tokens = inputs.sizes
        width = tokens if isinstance(tokens, int) else width
        size = rows * self.world_size if isinstance(rows, int) else len(texts)

        def predict(texts: Texts) -> list[Array]:
            seen = [ids[-width:] for ids in texts]
            padding = [seen[0]] * (-len(seen) % size)  # for a fixed size of batches
            loader = inputs.loader(seen + padding, width, size)
            with (
                self._source(loader, None, None, size, "prediction") as data,
                self._calling((), "generate") as called,
            ):
                # not `predict`, which compiles the trained model after each update
                outputs = self._predict(data, called, lambda: self._backend.predict)
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

"""Show how a language model continues some prompts while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.progress import print_line
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.tensorboard import TensorBoard
from onnxfit.checks import check_arguments, require_at_least, shortened
from onnxfit.data.sampling import Sampling
from onnxfit.errors import SettingError
from onnxfit.files import TEXT, list_of, mapping_of

__all__ = ["GenerateSamples"]


class GenerateSamples(StatefulCallback):
    """Continue some prompts at the end of epochs, and show the texts.

    The texts are printed, written to the text page of a `TensorBoard` callback of the same fit, and
    kept in `samples`: epoch, from 0, -> a text for each prompt. They depend on the weights, `seed`
    and the epoch only, and do not influence training.

    - `prompts`: lists of token ids, or strings with a `tokenizer`.
    - `tokenizer`: an object with `encode(text)` and `decode(ids)`, such as those of `tokenizers`
      and `transformers`; None shows the ids.
    - `max_new_tokens` >= 1: tokens to add to a prompt.
    - `temperature`, `top_k`, `top_p`: as in `Trainer.generate`: 0 takes the likeliest token.
    - `eos_token_id`: the id that ends a text; None ends it after `max_new_tokens`.
    - `every` >= 1: show samples after every `every` epochs.
    - `seed`: the seed of the random draws.
    - `output`: the output with the logits, shape `(batch, tokens, vocabulary)`. None takes the
      output that has a loss.
    - `input_names`: names of the model's inputs, as for `TextLoader`, which makes the inputs.

    `Trainer.generate` continues the prompts. It is fast for a model with key-value caches; any
    other model processes the whole text again for each token. SettingError: a setting is
    impossible, or the output has another shape.

    >>> samples = GenerateSamples([[5, 6]], max_new_tokens=8, temperature=0.8, top_p=0.9)
    """

    phase: ClassVar[str] = "logger"
    ranks: ClassVar[str | None] = "all"  # the ranks share the rows of a prediction
    state_attributes = {"samples": mapping_of(list_of(TEXT))}

    @check_arguments
    def __init__(
        self,
        prompts: Sequence[Any],
        *,
        tokenizer: Any = None,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        every: int = 1,
        seed: int = 0,
        output: str | None = None,
        input_names: dict[str, str] | None = None,
    ) -> None:
        require_at_least("GenerateSamples", 1, max_new_tokens=max_new_tokens, every=every)
        self.sampling = Sampling(temperature, top_k, top_p)
        self.sampling.check("GenerateSamples")
        self.prompts = [_ids_of(prompt, tokenizer) for prompt in prompts]
        if not self.prompts or not all(self.prompts):
            raise SettingError(
                "GenerateSamples needs at least one prompt, with at least one token each, got"
                f" {shortened(list(prompts))}."
            )
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.eos_token_id = eos_token_id
        self.every = every
        self.seed = seed
        self.output = output
        self.input_names = input_names
        self.reset()

    def reset(self) -> None:
        self.samples: dict[str, list[str]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if (epoch + 1) % self.every:
            return
        # Every epoch draws other tokens.
        seed = np.random.SeedSequence([self.seed % 2**64, epoch]).generate_state(1, np.uint64)[0]
        continued = self.trainer.generate(
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            eos_token_id=self.eos_token_id,
            seed=int(seed),
            output=self.output,
            input_names=self.input_names,
        )
        texts = [self._text(ids) for ids in continued]
        self.samples[str(epoch)] = texts
        if not self.trainer.is_main:
            return
        for text in texts:
            print_line(f"epoch {epoch + 1}: {text}")
        for callback in self.callbacks:
            if isinstance(callback, TensorBoard):
                for number, text in enumerate(texts):
                    callback.writer("train").add_text(f"sample_{number}", text, epoch + 1)

    def _text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(ids))


def _ids_of(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise SettingError(
                f"The prompt {shortened(prompt)} is text, which needs a tokenizer with methods"
                f" encode and decode, got {type(tokenizer).__name__}. Pass tokenizer=, or pass"
                " prompts as token ids."
            )
        encoded = tokenizer.encode(prompt)
        prompt = getattr(encoded, "ids", encoded)  # the tokenizers library returns an object
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError):
        ids = np.zeros(0)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise SettingError(
            f"A prompt must be text or a list of token ids, got {shortened(prompt)}."
        )
    return [int(token) for token in ids]

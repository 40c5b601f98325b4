"""Show how a language model continues some prompts while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.checks import require_at_least
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.progress import print_line
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.tensorboard import TensorBoard
from onnxfit.data.text import TextLoader
from onnxfit.errors import SettingError
from onnxfit.files import TEXT, list_of, mapping_of
from onnxfit.registry import check_arguments, is_finite, shortened

__all__ = ["GenerateSamples"]


class GenerateSamples(StatefulCallback):
    """Continue some prompts at the end of epochs, and show the texts.

    The texts are printed, written to the text page of a `TensorBoard` callback of the same fit, and
    kept in `samples`: epoch, from 0, -> a text for each prompt. They depend on the weights, `seed`
    and the epoch only; training goes on as it would without them.

    - `prompts`: lists of token ids, or strings with a `tokenizer`.
    - `tokenizer`: an object with `encode(text)` and `decode(ids)`, such as those of `tokenizers`
      and `transformers`; None shows the ids.
    - `max_new_tokens` >= 1: tokens to add to a prompt.
    - `temperature` >= 0: 0 takes the likeliest token; otherwise a token is drawn from
      softmax(logits / temperature).
    - `top_k` >= 1: draw from the likeliest k tokens only; None draws from all.
    - `top_p` in (0, 1]: draw from the fewest likeliest tokens whose probabilities add up to `top_p`
      (Holtzman et al. 2019, arXiv:1904.09751); None draws from all.
    - `eos_token_id`: the id that ends a text; None ends it after `max_new_tokens`.
    - `every` >= 1: show samples after every so many epochs.
    - `seed`: decides what is drawn.
    - `output`: the output with the logits, shape `(batch, tokens, vocabulary)`. None takes the one
      with a loss.
    - `input_names`: those of `TextLoader`, which makes the inputs.

    Each token is predicted from the whole text so far, in batches of one shape. Of a model with a
    fixed number of tokens, the last ones of a longer text are read. SettingError: an impossible
    setting, or an output of another shape.

    >>> samples = GenerateSamples([[5, 6]], max_new_tokens=8, temperature=0.8, top_p=0.9)
    """

    phase: ClassVar[str] = "logger"
    ranks: ClassVar[str | None] = "all"  # a prediction is shared out
    remembered = {"samples": mapping_of(list_of(TEXT))}

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
        require_at_least(
            "GenerateSamples", 1, max_new_tokens=max_new_tokens, every=every, top_k=top_k
        )
        if not (is_finite(temperature) and temperature >= 0):
            raise SettingError(
                f"GenerateSamples needs a finite temperature >= 0, got {shortened(temperature)}."
            )
        if top_p is not None and not 0 < top_p <= 1:
            raise SettingError(f"GenerateSamples needs 0 < top_p <= 1, got {shortened(top_p)}.")
        self.prompts = [_ids_of(prompt, tokenizer) for prompt in prompts]
        if not self.prompts or not all(self.prompts):
            raise SettingError(
                "GenerateSamples needs at least one prompt, and a token in each, got"
                f" {shortened(list(prompts))}."
            )
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.temperature = float(temperature)
        self.top_k = top_k
        self.top_p = top_p
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
        texts = [self._text(ids) for ids in self._continued(epoch)]
        self.samples[str(epoch)] = texts
        if not self.trainer.is_main:
            return
        for text in texts:
            print_line(f"epoch {epoch + 1}: {text}")
        for callback in self.callbacks:
            if isinstance(callback, TensorBoard):
                for number, text in enumerate(texts):
                    callback.writer("train").add_text(f"sample_{number}", text, epoch)

    def _text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(ids))

    def _continued(self, epoch: int) -> list[list[int]]:
        """Return the prompts with the tokens that the model adds."""
        texts = [list(ids) for ids in self.prompts]
        generators = [
            np.random.default_rng([self.seed % 2**64, epoch, number])
            for number in range(len(texts))
        ]
        running = list(range(len(texts)))
        predict = self._predictor()
        for _ in range(self.max_new_tokens):
            logits = predict(texts)
            for number in running:
                texts[number].append(self._next(logits[number], generators[number]))
            running = [n for n in running if texts[n][-1] != self.eos_token_id]
            if not running:
                break
        return texts

    def _predictor(self) -> Callable[[list[list[int]]], npt.NDArray[Any]]:
        """Return a function from texts to the logits of the next token of each."""
        trainer = self.trainer
        names = {"input_ids": "input_ids", **(self.input_names or {})}
        shapes = {spec.name: spec.shape or () for spec in trainer.inputs}
        shape = shapes.get(names["input_ids"]) or next(iter(shapes.values()))
        width = max(map(len, self.prompts)) + self.max_new_tokens
        if len(shape) > 1 and isinstance(shape[1], int):
            width = shape[1]
        size = shape[0] * trainer.world_size if isinstance(shape[0], int) else len(self.prompts)

        def predict(texts: list[list[int]]) -> npt.NDArray[Any]:
            seen = [ids[-width:] for ids in texts]
            seen += [seen[0]] * (-len(seen) % size)  # for a fixed size of batches
            rows = TextLoader(
                seen,
                pack=False,
                pad_to_multiple_of=width,
                input_names=self.input_names,
                batch_size=size,
                shuffle=False,
            )
            logits = self._logits(trainer.predict(rows), width)
            return np.stack([logits[row, len(ids) - 1] for row, ids in enumerate(seen)])

        return predict

    def _logits(self, outputs: Any, width: int) -> npt.NDArray[Any]:
        if isinstance(outputs, dict):
            name = self.output or next(iter(self.trainer.objectives), "logits")
            if name not in outputs:
                raise SettingError(
                    f"GenerateSamples needs the output with the logits, and there is no {name!r}:"
                    f" the outputs are {', '.join(map(repr, outputs))}. Set output=."
                )
            outputs = outputs[name]
        shape: tuple[int, ...] = getattr(outputs, "shape", ())  # there is none if batches differ
        if len(shape) != 3 or shape[1] != width:
            raise SettingError(
                f"GenerateSamples needs logits of shape (batch, {width}, vocabulary) for"
                f" {width} tokens, and the model gives {shape}."
            )
        return np.asarray(outputs)

    def _next(self, logits: npt.NDArray[Any], generator: np.random.Generator) -> int:
        """Return the next token: the likeliest one, or one that is drawn."""
        if not self.temperature or not np.isfinite(logits).any():
            return int(np.nan_to_num(logits, nan=-np.inf).argmax())
        scores = np.nan_to_num(logits.astype(np.float64), nan=-1e300, posinf=1e300, neginf=-1e300)
        with np.errstate(over="ignore"):
            odds = np.exp((scores - scores.max()) / self.temperature)
        order = np.argsort(-odds, kind="stable")[: self.top_k]
        odds = odds[order] / odds[order].sum()
        if self.top_p is not None:
            kept = int(np.searchsorted(odds.cumsum(), self.top_p)) + 1
            order, odds = order[:kept], odds[:kept] / odds[:kept].sum()
        place = int(np.searchsorted(odds.cumsum(), generator.random(), side="right"))
        return int(order[min(place, len(order) - 1)])


def _ids_of(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise SettingError(
                f"The prompt {shortened(prompt)} is text, which needs tokenizer=, an object with"
                f" encode and decode, got {type(tokenizer).__name__}. Or pass token ids."
            )
        encoded = tokenizer.encode(prompt)
        prompt = getattr(encoded, "ids", encoded)  # those of the library tokenizers
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError):
        ids = np.zeros(0)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise SettingError(f"A prompt is text or a list of token ids, got {shortened(prompt)}.")
    return [int(token) for token in ids]

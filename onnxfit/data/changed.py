"""Loaders that change the batches of another loader at random: Mixup, CutMix, masked tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import check_arguments, shortened
from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Array
from onnxfit.data.content import Content
from onnxfit.data.corpus import IGNORED
from onnxfit.data.loader import Loader
from onnxfit.data.padding import MASK, TOKENS
from onnxfit.errors import DataError, SettingError, listed_names

__all__ = ["MaskedTokens", "Mixup"]

MAX_CLASSES = 10**6  # of dense labels, which have a number for each class
STREAM = 2  # separates the random numbers of batches from those of images


class ChangedLoader(Loader):
    """Base class of loaders that change the batches of another loader at random.

    A changed batch depends on the seed, the epoch and the number of the batch only, so a resumed
    fit sees the same batches. With several ranks, each rank changes the whole batch and keeps its
    own rows.

    - `loader`: a loader. Its batch size, order, seed and prefetching are those of the new loader.
    """

    # The purposes for which batches are changed; for all others the loader's own are used.
    purposes: ClassVar[tuple[str, ...]] = ("training",)

    def __init__(self, loader: Loader) -> None:
        if not isinstance(loader, Loader):
            raise SettingError(
                f"{type(self).__name__} needs a loader, such as onnxfit.DataLoader(x, y), got"
                f" {shortened(loader)}."
            )
        self._loader = loader
        self._is_changing = True
        self._trainer_seed = 0
        super().__init__(
            loader.rows,
            loader.batch_size,
            loader.shuffle,
            loader.seed,
            loader.drop_last,
            loader.prefetch,
        )

    @abstractmethod
    def change(self, batch: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
        """Return the changed batch.

        - `batch`: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        - `rng`: the generator of this batch.
        """

    def bind(self, adapter: DataAdapter) -> Loader:
        other = copy(self)
        other._loader = self._loader.bind(adapter)
        other._trainer_seed = adapter.seed
        other._is_changing = adapter.purpose in self.purposes
        return other

    def fingerprint(self) -> dict[str, Any]:
        return self._loader.fingerprint()

    def content(self) -> Content | None:
        return self._loader.content()

    def batch_rows(self, epoch: int, skip: int, seed: int | None) -> Iterator[Array]:
        return self._inner().batch_rows(epoch, skip, seed)

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        own = self._trainer_seed if self.seed is None else self.seed
        for number, batch in enumerate(self._inner().batches(epoch, skip, seed), skip):
            if self._is_changing:
                words = [own % 2**64, epoch % 2**64, number, STREAM]
                batch = self.change(batch, np.random.default_rng(words))
            yield batch

    def _inner(self) -> Loader:
        """Return the loader, with the batch size that this loader has now."""
        inner = copy(self._loader)
        inner.batch_size, inner.drop_last = self.batch_size, self.drop_last
        return inner


class Mixup(ChangedLoader):
    r"""Batches whose rows are mixed in pairs, for training: Mixup and CutMix.

    Row $i$ of a batch of $n$ rows is mixed with row $n - 1 - i$. Mixup makes $\lambda x_i + (1 -
    \lambda) x_j$ with $\lambda \sim \mathrm{Beta}(\alpha, \alpha)$ (Zhang et al. 2018,
    arXiv:1710.09412). CutMix replaces a rectangle with about $1 - \lambda$ of the image by that of
    the other image (Yun et al. 2019, arXiv:1905.04899); $\lambda$ is then the part that is left.
    Labels become $\lambda y_i + (1 - \lambda) y_j$. One $\lambda$ is drawn for each batch, as by
    timm's Mixup in its mode "batch". Validation, evaluation and prediction see the loader's own
    batches.

    - `loader`: gives batches `(x, y)`, with `x` one array. `y` has class indices of shape
      `(batch,)`, which become float32 probabilities of shape `(batch, classes)`, for the loss
      `CrossEntropy`; or floats, such as one-hot labels, which keep their shape.
    - `mixup_alpha`: $\alpha \ge 0$ of Mixup; 0 for CutMix alone.
    - `cutmix_alpha`: $\alpha \ge 0$ of CutMix; 0 for Mixup alone.
    - `prob`: the probability that a batch is mixed.
    - `switch_prob`: the probability of CutMix, if both are possible.
    - `label_smoothing` $a$ in [0, 1): class indices become probabilities $1 - a + a/C$ and $a/C$.
    - `num_classes`: the number $C$ of classes, 2 to a million; None takes it from an `ImageFolder`.
    - `channels_last`: images have shape `(batch, height, width, channels)`; None takes it from an
      `ImageFolder`, and is `(batch, channels, height, width)` for other loaders.

    DataError, while batches are made: a batch is of another kind. SettingError: a setting is
    impossible, or class indices come without `num_classes`.

    >>> import numpy as np
    >>> from onnxfit.data import DataLoader
    >>> loader = DataLoader(np.eye(2, dtype=np.float32), [0, 1], shuffle=False)
    >>> x, y = next(iter(Mixup(loader, num_classes=2)))
    >>> bool(np.allclose(x, y)), y.sum(axis=1).tolist()
    (True, [1.0, 1.0])
    """

    @check_arguments
    def __init__(
        self,
        loader: Any,
        *,
        mixup_alpha: float = 1.0,
        cutmix_alpha: float = 0.0,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        channels_last: bool | None = None,
    ) -> None:
        super().__init__(loader)
        alphas = (mixup_alpha, cutmix_alpha)
        if not all(0 <= alpha < np.inf for alpha in alphas) or not any(alphas):
            raise SettingError(
                "Mixup needs mixup_alpha >= 0 and cutmix_alpha >= 0, one of them above 0, got"
                f" {mixup_alpha} and {cutmix_alpha}."
            )
        for name, value in (("prob", prob), ("switch_prob", switch_prob)):
            if not 0 <= value <= 1:
                raise SettingError(f"Mixup needs {name} from 0 to 1, got {value}.")
        if not 0 <= label_smoothing < 1:
            raise SettingError(f"Mixup needs 0 <= label_smoothing < 1, got {label_smoothing}.")
        classes = getattr(loader, "classes", None)
        if num_classes is None and classes:
            num_classes = len(classes)
        if num_classes is not None and not 2 <= num_classes <= MAX_CLASSES:
            raise SettingError(
                f"Mixup needs num_classes from 2 to {MAX_CLASSES}, got {shortened(num_classes)}."
            )
        if channels_last is None:
            channels_last = getattr(loader, "channels_last", False)
        self.mixup_alpha, self.cutmix_alpha = mixup_alpha, cutmix_alpha
        self.prob, self.switch_prob = prob, switch_prob
        self.label_smoothing = label_smoothing
        self.num_classes = num_classes
        self.channels_last = channels_last

    def change(self, batch: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
        if len(batch) != 2 or not all(hasattr(array, "shape") for array in batch):
            raise DataError(
                "Mixup needs batches (x, y) of one array of inputs and one of labels, without"
                f" sample weights, got {', '.join(type(part).__name__ for part in batch)}."
            )
        x, y = np.asarray(batch[0]), self._probabilities(np.asarray(batch[1]))
        if x.dtype.kind != "f":
            x = x.astype(np.float32)
        if rng.random() >= self.prob:
            return x, y
        cuts = self.cutmix_alpha > 0 and (not self.mixup_alpha or rng.random() < self.switch_prob)
        alpha = self.cutmix_alpha if cuts else self.mixup_alpha
        share = float(rng.beta(alpha, alpha))
        if cuts:
            x, share = self._cut(x, share, rng)
        else:
            x = _mixed(x, share)
        return x, _mixed(y, share)

    def _probabilities(self, y: Array) -> Array:
        """Return labels that can be mixed: class indices become probabilities."""
        if y.dtype.kind == "f":
            return y
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if self.num_classes is None:
            raise SettingError(
                "Mixup needs num_classes to make probabilities of class indices. Pass it, or labels"
                " of floats."
            )
        if y.ndim != 1 or y.min(initial=0) < 0 or y.max(initial=0) >= self.num_classes:
            raise DataError(
                f"Mixup needs class indices from 0 to {self.num_classes - 1} of shape (batch,), got"
                f" {shortened(y.tolist())}."
            )
        rest = self.label_smoothing / self.num_classes
        labels = np.full((len(y), self.num_classes), rest, np.float32)
        labels[np.arange(len(y)), y.astype(np.int64)] += 1 - self.label_smoothing
        return labels

    def _cut(self, x: Array, share: float, rng: np.random.Generator) -> tuple[Array, float]:
        """Return images with a rectangle of the other image, and the share that is left."""
        if x.ndim != 4:
            raise DataError(f"CutMix needs images, arrays of 4 axes, got shape {x.shape}.")
        height, width = x.shape[1:3] if self.channels_last else x.shape[2:]
        bounds = []
        for size in (height, width):
            half = int(size * np.sqrt(1 - share)) // 2
            center = int(rng.integers(size))
            bounds.append(slice(max(center - half, 0), min(center + half, size)))
        place = (
            (slice(None), *bounds) if self.channels_last else (slice(None), slice(None), *bounds)
        )
        x, other = x.copy(), x[::-1]
        x[place] = other[place]
        area = (bounds[0].stop - bounds[0].start) * (bounds[1].stop - bounds[1].start)
        return x, 1 - area / (height * width)


def _mixed(array: Array, share: float) -> Array:
    """Return each row mixed with the row at the same place from the end."""
    first = array.dtype.type(share)
    mixed: Array = array * first + array[::-1] * (1 - first)
    return mixed


class MaskedTokens(ChangedLoader):
    """Batches of token ids with masked tokens, for a masked language model such as BERT.

    Each token is chosen with a probability. A chosen token becomes the mask token (80 %), a random
    token (10 %) or stays (10 %) (Devlin et al. 2019, arXiv:1810.04805; `transformers`'
    DataCollatorForLanguageModeling). Labels are the ids of the chosen tokens and -100 elsewhere,
    for the loss `CrossEntropy(ignore_index=-100)`; labels of the loader are dropped. Batches for
    training, validation and evaluation are masked, those for prediction are not.

    - `loader`: gives ids as `(x,)` or `(x, y)`, such as a `TextLoader`, `Pad` or `DataLoader`. `x`
      is an array of shape `(batch, tokens)`, or a dict with that array under `column`.
    - `mask_token_id`: the id of the mask token.
    - `vocabulary_size`: random tokens are drawn from 0 to this number less 1.
    - `probability`: of a token to be chosen, above 0 and at most 1.
    - `special_token_ids`: ids that are never chosen, such as those of padding, [CLS] and [SEP].
      With an `attention_mask` of two axes in `x`, places that it marks with 0 are not chosen
      either.
    - `mask_share`, `random_share`: the shares of the chosen tokens that become the mask token and a
      random token; the rest stays.
    - `column`: the name of the ids in a dict `x`.

    DataError, while batches are made: a batch has no such ids. SettingError: a setting is
    impossible.

    >>> import numpy as np
    >>> from onnxfit.data import DataLoader
    >>> ids = np.arange(5, 13)[None]
    >>> loader = MaskedTokens(DataLoader(ids), 1, 20, mask_share=1.0, random_share=0.0)
    >>> x, labels = next(iter(loader))
    >>> bool(np.all(np.where(x == 1, labels, x) == ids))
    True
    """

    purposes = ("training", "validation", "evaluation")

    @check_arguments
    def __init__(
        self,
        loader: Any,
        mask_token_id: int,
        vocabulary_size: int,
        *,
        probability: float = 0.15,
        special_token_ids: Sequence[int] = (),
        mask_share: float = 0.8,
        random_share: float = 0.1,
        column: str = TOKENS,
    ) -> None:
        super().__init__(loader)
        if vocabulary_size > np.iinfo(np.int64).max:
            raise SettingError(
                "MaskedTokens needs vocabulary_size in the range of int64, got"
                f" {shortened(vocabulary_size)}."
            )
        if not 0 <= mask_token_id < vocabulary_size:
            raise SettingError(
                f"MaskedTokens needs mask_token_id from 0 to {vocabulary_size - 1}, below"
                f" vocabulary_size, got {mask_token_id}."
            )
        if not 0 < probability <= 1:
            raise SettingError(f"MaskedTokens needs 0 < probability <= 1, got {probability}.")
        shares = (mask_share, random_share)
        if not (min(shares) >= 0 and sum(shares) <= 1 + 1e-9):
            raise SettingError(
                "MaskedTokens needs mask_share >= 0 and random_share >= 0 with a sum of at most 1,"
                f" got {mask_share} and {random_share}."
            )
        self.mask_token_id, self.vocabulary_size = mask_token_id, vocabulary_size
        self.probability = probability
        self.special_token_ids = tuple(special_token_ids)
        self.mask_share, self.random_share = mask_share, random_share
        self.column = column

    def change(self, batch: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
        x = batch[0]
        inputs = x if isinstance(x, Mapping) else {self.column: x}
        if self.column not in inputs:
            raise DataError(
                f"MaskedTokens needs ids under {self.column!r}, but the batch has"
                f" {listed_names(map(repr, inputs), self.column)}. Pass MaskedTokens(column=...)."
            )
        ids = np.asarray(inputs[self.column])
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise DataError(
                "MaskedTokens needs ids, integers of shape (batch, tokens), got"
                f" {ids.dtype} of shape {ids.shape}."
            )
        can_be_chosen = ~np.isin(ids, self.special_token_ids)
        mask = np.asarray(inputs.get(MASK, 1))
        if mask.shape == ids.shape:
            can_be_chosen &= mask != 0
        chosen = can_be_chosen & (rng.random(ids.shape) < self.probability)
        kind = rng.random(ids.shape)
        others = rng.integers(self.vocabulary_size, size=ids.shape)
        masked = np.where(chosen & (kind < self.mask_share), self.mask_token_id, ids)
        is_random = (kind >= self.mask_share) & (kind < self.mask_share + self.random_share)
        masked = np.where(chosen & is_random, others, masked).astype(ids.dtype)
        labels = np.where(chosen, ids, IGNORED).astype(np.int64)
        return ({**inputs, self.column: masked} if isinstance(x, Mapping) else masked), labels

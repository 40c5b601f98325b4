"""The estimator of classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from onnxfit.adapters.lora import LoRA
from onnxfit.callbacks import Callback
from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.reading import ModelSource
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import BinaryCrossEntropy, ClassLoss, CrossEntropy, Loss, get_loss
from onnxfit.optimizers import OptimizerLike
from onnxfit.penalties import PenaltyLike
from onnxfit.quantization import Quantization
from onnxfit.schedules import LearningRate
from onnxfit.sklearn.columns import ClassWeight, relative_weights, weights_of_classes
from onnxfit.sklearn.estimator import OnnxEstimator
from onnxfit.step.objectives import Losses

Array = npt.NDArray[Any]


class OnnxClassifier(ClassifierMixin, OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn estimator that fits an ONNX model to classes, labels of any type.

    - `model`: as in `OnnxRegressor`. The output has one column for two classes (the probability or
      score of the second class in sorted order), or one column for each class in sorted order. It
      is taken as probabilities if a Sigmoid or Softmax computes it, and otherwise as scores
      (logits).
    - `loss`: None or a name selects the loss that fits the output: cross entropy is binary for one
      column, and uses probabilities or logits accordingly. A Loss object is used unchanged, with
      two exceptions: a `from_logits` of None is decided as above, and a CrossEntropy of one column
      becomes a BinaryCrossEntropy. Losses that do not take class numbers get one-hot labels.
    - `class_weight`: None, "balanced" or a dict label -> number >= 0: a factor of the loss for the
      rows of each class, multiplied with the sample weights. "balanced" gives all classes the same
      total weight; `partial_fit`, which gets only some rows at a time, does not accept it.
    - `hidden_layer_sizes`, `standardize` (of the inputs), `weights`, `penalty`, `optimizer`,
      `learning_rate`, `epochs`, `batch_size`, `early_stopping`, `validation_fraction`,
      `n_iter_no_change`, `callbacks`, `warm_start`, `random_state`, `verbose`, `backend`,
      `gradient`, `device`, `threads`, `quantization`, `adapters`: as in `OnnxRegressor`.

    After `fit`, `classes_` has the labels in the order of the columns of `predict_proba`; the other
    attributes are the same as of `OnnxRegressor`. SettingError: the classes do not fit the columns
    of the output.

    >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> model = OnnxClassifier(learning_rate=0.1, random_state=0).fit(X, ["no", "no", "yes", "yes"])
    >>> model.predict([[0.5], [2.5]]).tolist(), model.predict_proba([[1.5]]).round(1).tolist()
    (['no', 'yes'], [[0.5, 0.5]])
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        *,
        hidden_layer_sizes: Sequence[int] = (100,),
        standardize: bool = True,
        weights: Sequence[str] | str | None = None,
        loss: Losses = None,
        class_weight: ClassWeight = None,
        penalty: PenaltyLike = None,
        optimizer: OptimizerLike | None = None,
        learning_rate: LearningRate | None = None,
        epochs: int = 200,
        batch_size: int | str = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        callbacks: Sequence[Callback] | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int | str = 0,
        backend: str = "full",
        gradient: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
        quantization: Quantization | None = None,
        adapters: LoRA | Sequence[LoRA] | None = None,
    ) -> None:
        # scikit-learn reads the names of the arguments from this signature, so they are repeated.
        arguments = dict(locals())
        del arguments["self"]
        self.__dict__.update(arguments)

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row of `X`, an array of labels."""
        best = self.predict_proba(X).argmax(axis=1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class for the rows `X`: shape `(rows, classes)`, in the
        order of `classes_`.
        """
        outputs = self._predictions(X)
        binary = outputs.shape[1] == 1 or isinstance(self._loss, BinaryCrossEntropy)
        if not self._probabilities and not binary:
            return _shares(np.exp(outputs - outputs.max(axis=1, keepdims=True)))
        probabilities = outputs if self._probabilities else _sigmoid(outputs)
        if outputs.shape[1] == 1:
            return np.concatenate([1 - probabilities, probabilities], axis=1)
        # A binary loss gives each class an independent probability.
        return _shares(probabilities) if binary else probabilities

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """Train for one more epoch on these rows, and return the estimator.

        - `X`, `y`, `sample_weight`: as in `fit`.
        - `classes`: all labels, for the first call; None if `y` contains all of them.
        """
        if self.class_weight == "balanced":
            raise SettingError(
                "partial_fit cannot use class_weight='balanced', because it gets only some of the"
                " rows. Set class_weight to a dict label -> weight, or pass sample_weight."
            )
        return self._fit(X, y, sample_weight, go_on=True, epochs=1, classes=classes)

    def _prepared(self, y: Array, go_on: bool, classes: Any) -> tuple[Array, int]:
        check_classification_targets(y)
        if not go_on:
            self.classes_ = np.unique(y if classes is None else classes)
        known = len(self.classes_)
        if known < 2:
            raise SettingError(
                f"OnnxClassifier needs at least 2 classes, got 1 class: {self.classes_[0]!r}."
            )
        unknown = np.setdiff1d(y, self.classes_)
        if unknown.size:
            raise SettingError(
                f"y has the unknown class {unknown[0]!r}. OnnxClassifier was first fitted with the"
                f" classes {listed_names(self.classes_.tolist())}. Pass all classes to the first"
                " call: partial_fit(..., classes=...)."
            )
        return np.searchsorted(self.classes_, y), 1 if known == 2 else known

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        classes = len(self.classes_)
        width: Any = 1
        if output.shape is not None and len(output.shape) > 1:
            width = output.shape[-1]
        if isinstance(width, int) and width != classes and (width, classes) != (1, 2):
            raise SettingError(
                f"The model's output {output} has {width} column{'s' * (width > 1)}, but y has"
                f" {classes} classes. The output needs a column for each class, or one column for"
                " two classes."
            )
        chosen: Any = get_loss("cross_entropy" if loss is None else loss)
        by_name = loss is None or isinstance(loss, str)
        if hasattr(chosen, "from_logits") and (by_name or chosen.from_logits is None):
            chosen = dataclasses.replace(chosen, from_logits=not probabilities)
        if isinstance(chosen, CrossEntropy) and width == 1:
            chosen = BinaryCrossEntropy(
                reduction=chosen.reduction,
                from_logits=chosen.from_logits,
                label_smoothing=chosen.label_smoothing,
            )
        self._width = width
        self._probabilities = not getattr(chosen, "from_logits", not probabilities)
        result: Loss = chosen
        return result

    def _labels(self, y: Array) -> Array:
        if self._width == 1 or isinstance(self._loss, ClassLoss):
            return y
        return np.eye(len(self.classes_))[y]

    def _with_class_weights(self, y: Array, weights: Array | None) -> Array | None:
        if self.class_weight is None:
            return weights
        rows = np.ones(len(y)) if weights is None else weights
        by_class = weights_of_classes(self.class_weight, self.classes_, y, rows)
        return relative_weights(rows * by_class[y])

    def _strata(self, y: Array) -> Array | None:
        return y if y.ndim == 1 else y.argmax(axis=1)


def _sigmoid(scores: Array) -> Array:
    probabilities: Array = np.exp(-np.logaddexp(0, -scores))
    return probabilities


def _shares(numbers: Array) -> Array:
    """Return the numbers scaled so that each row sums to 1."""
    totals = numbers.sum(axis=1, keepdims=True)
    shares: Array = numbers / np.maximum(totals, np.finfo(numbers.dtype).tiny)
    return shares

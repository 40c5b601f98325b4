"""The estimator of classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
from sklearn.base import ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import column_or_1d

from onnxfit.callbacks import Callback
from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.reading import ModelSource
from onnxfit.losses import BinaryCrossEntropy, ClassLoss, CrossEntropy, Loss, get_loss
from onnxfit.optimizers.lookup import OptimizerLike
from onnxfit.penalties import PenaltyLike
from onnxfit.schedules import LearningRate
from onnxfit.sklearn.columns import ClassWeight, relative_weights, weights_of_classes
from onnxfit.sklearn.estimator import OnnxEstimator
from onnxfit.sklearn.names import checks_own_names
from onnxfit.step.distillation import Distillation
from onnxfit.step.objectives import Losses
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.quantized.settings import Quantization

Array = npt.NDArray[Any]
MULTILABEL = "multilabel-indicator"  # scikit-learn's name of such targets


def _has_scores(estimator: OnnxEstimator) -> bool:
    """Return whether an estimator has a decision_function, as scikit-learn's linear models have."""
    return estimator.model is not None or not np.size(estimator.hidden_layer_sizes)


class OnnxClassifier(ClassifierMixin, OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn estimator that fits an ONNX model to classes, labels of any type.

    - `model`: as in `OnnxRegressor`. The output has one column for two classes (the probability or
      score of the second class in sorted order), or one column for each class in sorted order, or
      for each label of multilabel targets. It is taken as probabilities if a Sigmoid or Softmax
      computes it, and otherwise as scores (logits).
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
      `gradient`, `device`, `threads`, `teacher`, `quantization`, `adapters`: as in `OnnxRegressor`.

    A matrix `y` of zeros and ones, shape `(rows, labels)`, is an indicator of several labels a row,
    as in `MLPClassifier`: each column is a decision of its own, with the binary cross entropy, and
    the probability of a label is a Sigmoid. `y` may be sparse; `predict` is then sparse, too.

    After `fit`, `classes_` has the labels in the order of the columns of `predict_proba`, for
    multilabel targets the numbers of the columns; the other attributes are the same as of
    `OnnxRegressor`. SettingError: the classes do not fit the columns of the output.

    >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> model = OnnxClassifier(learning_rate=0.1, random_state=0).fit(X, ["no", "no", "yes", "yes"])
    >>> model.predict([[0.5], [2.5]]).tolist(), model.predict_proba([[1.5]]).round(1).tolist()
    (['no', 'yes'], [[0.5, 0.5]])
    """

    @checks_own_names
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
        teacher: Distillation | ModelSource | None = None,
        quantization: Quantization | None = None,
        adapters: LoRA | Sequence[LoRA] | None = None,
    ) -> None:
        # scikit-learn reads the names of the arguments from this signature, so they are repeated.
        arguments = dict(locals())
        del arguments["self"]
        self.__dict__.update(arguments)

    _label_checks: Mapping[str, Any] = {"multi_output": True}

    def predict(self, X: Any) -> Any:
        """Return the most probable class of each row of `X`, an array of labels.

        For multilabel targets: the indicator, shape `(rows, labels)`, of probabilities above 0.5.
        """
        probabilities = self.predict_proba(X)
        if self._multilabel:
            indicator = (probabilities > 0.5).astype(np.int64)
            return scipy.sparse.csr_matrix(indicator) if self._sparse_labels else indicator
        return self.classes_[probabilities.argmax(axis=1)]

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class for the rows `X`: shape `(rows, classes)`, in the
        order of `classes_`. For multilabel targets, each label has a probability of its own.
        """
        outputs = self._predictions(X)
        binary = outputs.shape[1] == 1 or isinstance(self._loss, BinaryCrossEntropy)
        if not self._probabilities and not binary:
            return _shares(np.exp(outputs - outputs.max(axis=1, keepdims=True)))
        probabilities = outputs if self._probabilities else _logistic(outputs)
        if self._multilabel:
            return probabilities
        if outputs.shape[1] == 1:
            return np.concatenate([1 - probabilities, probabilities], axis=1)
        # A binary loss gives each class an independent probability.
        return _shares(probabilities) if binary else probabilities

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithms of `predict_proba` for `X`. The logarithm of 0 is -inf."""
        with np.errstate(divide="ignore"):
            logarithms: Array = np.log(self.predict_proba(X))
        return logarithms

    @available_if(_has_scores)  # type: ignore[untyped-decorator]  # scikit-learn has no types
    def decision_function(self, X: Any) -> Array:
        """Return a score of each class for the rows `X`, which grows with its probability.

        As in scikit-learn, linear models (`hidden_layer_sizes=()`) have this method, and default
        networks with hidden layers do not. A model of your own has it.

        The shape is `(rows,)` for two classes, with the score of the second one: above 0 if it is
        the more probable one. Otherwise it is `(rows, classes)`, or `(rows, labels)` for multilabel
        targets. Scores are the outputs of the model if these are logits, as in
        `LogisticRegression`, and else log-odds (logarithms of probabilities for several classes).
        """
        outputs = self._predictions(X)
        scores = outputs if not self._probabilities else _logarithms(outputs)
        if self._probabilities and (self._multilabel or outputs.shape[1] == 1):
            scores = scores - _logarithms(1 - outputs)
        if outputs.shape[1] == 1 and not self._multilabel:
            return scores[:, 0]
        if len(self.classes_) == 2 and not self._multilabel:
            two: Array = scores[:, 1] - scores[:, 0]
            return two
        return scores

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

    def _prepared(self, y: Any, go_on: bool, classes: Any) -> tuple[Array, int]:
        kind = self._kind_of(y)
        if not go_on:
            self._multilabel = kind == MULTILABEL
            self._sparse_labels = scipy.sparse.issparse(y)
            self.classes_ = np.arange(y.shape[1]) if self._multilabel else self._classes(y, classes)
        if self._multilabel:
            return self._indicator(y, kind), len(self.classes_)
        known = len(self.classes_)
        if known < 2:
            raise SettingError(
                f"OnnxClassifier needs at least 2 classes, got 1 class: {self.classes_[0]!r}."
            )
        return self._numbers(y, kind), 1 if known == 2 else known

    def _kind_of(self, y: Any) -> str:
        """Return scikit-learn's name for the kind of targets. SettingError: it is unsupported."""
        kind = str(type_of_target(y, input_name="y"))
        if kind not in ("binary", "multiclass", MULTILABEL):
            check_classification_targets(y)
        if kind == "multiclass-multioutput":
            raise SettingError(
                f"OnnxClassifier takes one class a row, or a matrix of zeros and ones, got y of"
                f" shape {y.shape} with several classes in a column. Use"
                " sklearn.multioutput.MultiOutputClassifier."
            )
        return kind

    def _classes(self, y: Array, classes: Any) -> Array:
        found: Array = np.unique(y if classes is None else classes)
        return found

    def _encoded(self, y: Any) -> Array:
        """Return the number of the class of each row, or the indicator of its labels.

        SettingError: `y` has an unknown class, or other columns than the first `y`.
        """
        kind = self._kind_of(y)
        return self._indicator(y, kind) if self._multilabel else self._numbers(y, kind)

    def _numbers(self, y: Any, kind: str) -> Array:
        if kind == MULTILABEL:
            raise SettingError(
                f"y is a matrix of shape {y.shape}, but OnnxClassifier was first fitted with one"
                " class a row."
            )
        y = column_or_1d(y, warn=True)
        unknown = np.setdiff1d(y, self.classes_)
        if unknown.size:
            raise SettingError(
                f"y has the unknown class {unknown[0]!r}. OnnxClassifier was first fitted with the"
                f" classes {listed_names(self.classes_.tolist())}. Pass all classes to the first"
                " call: partial_fit(..., classes=...)."
            )
        codes: Array = np.searchsorted(self.classes_, y)
        return codes

    def _indicator(self, y: Any, kind: str) -> Array:
        dense: Array = y.toarray() if scipy.sparse.issparse(y) else y
        if kind != MULTILABEL or dense.shape[1] != len(self.classes_):
            raise SettingError(
                f"y must be a matrix with {len(self.classes_)} columns of zeros and ones, as in the"
                f" first call, got shape {dense.shape}."
            )
        if not np.isin(dense, (0, 1)).all():
            raise SettingError(
                "Multilabel targets must be 0 or 1, got"
                f" {listed_names(np.unique(dense).tolist())}. Use"
                " sklearn.preprocessing.MultiLabelBinarizer."
            )
        return dense.astype(np.int64)

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        classes = len(self.classes_)
        width: Any = 1
        if output.shape is not None and len(output.shape) > 1:
            width = output.shape[-1]
        one_column = (width, classes) == (1, 2) and not self._multilabel
        if isinstance(width, int) and width != classes and not one_column:
            raise SettingError(
                f"The model's output {output} has {width} column{'s' * (width > 1)}, but y has"
                f" {classes} {'labels' if self._multilabel else 'classes'}. The output needs a"
                " column for each of them, or one column for two classes."
            )
        chosen: Any = get_loss("cross_entropy" if loss is None else loss)
        by_name = loss is None or isinstance(loss, str)
        if hasattr(chosen, "from_logits") and (by_name or chosen.from_logits is None):
            chosen = dataclasses.replace(chosen, from_logits=not probabilities)
        if isinstance(chosen, CrossEntropy) and (width == 1 or self._multilabel):
            chosen = BinaryCrossEntropy(
                reduction=chosen.reduction,
                from_logits=chosen.from_logits,
                label_smoothing=chosen.label_smoothing,
            )
        if self._multilabel and isinstance(chosen, ClassLoss):
            raise SettingError(
                f"The loss {chosen!r} takes one class a row, but y has several labels a row. Use"
                " loss='binary_cross_entropy'."
            )
        self._width = width
        self._probabilities = not getattr(chosen, "from_logits", not probabilities)
        result: Loss = chosen
        return result

    def _labels(self, y: Array) -> Array:
        if self._multilabel or self._width == 1 or isinstance(self._loss, ClassLoss):
            return y
        return np.eye(len(self.classes_))[y]

    def _with_class_weights(self, y: Array, weights: Array | None) -> Array | None:
        if self.class_weight is None:
            return weights
        if self._multilabel:
            raise SettingError(
                "class_weight weights rows by their class, but multilabel rows have several. Use"
                " loss=onnxfit.losses.BinaryCrossEntropy(pos_weight=...)."
            )
        rows = np.ones(len(y)) if weights is None else weights
        by_class = weights_of_classes(self.class_weight, self.classes_, y, rows)
        return relative_weights(rows * by_class[y])

    def _strata(self, y: Array) -> Array | None:
        if self._multilabel:
            return None
        return y if y.ndim == 1 else y.argmax(axis=1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


def _logarithms(probabilities: Array) -> Array:
    """Return logarithms, with the smallest normal number in place of 0."""
    logarithms: Array = np.log(np.maximum(probabilities, np.finfo(probabilities.dtype).tiny))
    return logarithms


def _logistic(scores: Array) -> Array:
    probabilities: Array = np.exp(-np.logaddexp(0, -scores))
    return probabilities


def _shares(numbers: Array) -> Array:
    """Return the numbers scaled so that each row sums to 1."""
    totals = numbers.sum(axis=1, keepdims=True)
    shares: Array = numbers / np.maximum(totals, np.finfo(numbers.dtype).tiny)
    return shares

"""A Trainer as a scikit-learn estimator, for GridSearchCV, Pipeline, cross_val_score and everything
else that calls `fit` and `predict`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.callbacks import Callback, EarlyStopping
from onnxfit.errors import InstallationError, SettingError
from onnxfit.graph.dense import dense_network
from onnxfit.graph.model import normalize, spec_of, tensor_outputs
from onnxfit.graph.probabilities import probability_operator
from onnxfit.graph.reading import ModelSource, read_model
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import BinaryCrossEntropy, ClassLoss, CrossEntropy, Loss, get_loss
from onnxfit.optimizers import Adam, Optimizer, OptimizerLike, get_optimizer
from onnxfit.penalties import PenaltyLike
from onnxfit.schedules import LearningRate
from onnxfit.step.objectives import Losses
from onnxfit.trainer import Trainer

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise InstallationError(
        f"onnxfit.sklearn needs scikit-learn 1.6 or newer ({error}): pip install 'onnxfit[sklearn]'"
    ) from error

__all__ = ["OnnxClassifier", "OnnxRegressor"]

Array = npt.NDArray[Any]
ROWS_PER_PREDICTION = 4096


class _OnnxEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base class of both estimators: the settings, and a Trainer that is fitted and kept."""

    def __init__(
        self,
        model: ModelSource | None = None,
        *,
        hidden_layer_sizes: Sequence[int] = (),
        weights: Sequence[str] | str | None = None,
        loss: Losses = None,
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
    ) -> None:
        # scikit-learn asks for every argument under its own name, unchanged.
        arguments = dict(locals())
        del arguments["self"]
        self.__dict__.update(arguments)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train for `epochs` epochs and return the estimator.

        Training begins at the model's weights, or with `warm_start` where the last fit stopped.

        - `X`: an array `(rows, ...)` as the model's input has it, or a table.
        - `y`: the labels, one row each.
        - `sample_weight`: None, or one number >= 0 per row; only relative sizes count.
        """
        return self._fit(X, y, sample_weight, go_on=self.warm_start, epochs=self.epochs)

    def get_trained_onnx(self) -> onnx.ModelProto:
        """Return the trained model."""
        return self.export(None)

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """Return the trained model, and write it to the file `path` unless that is None."""
        check_is_fitted(self, "trainer_")
        model: onnx.ModelProto = self.trainer_.export(path)
        return model

    # ------------------------------------------------------------------ hooks of the two

    def _prepared(self, y: Array, go_on: bool, classes: Any) -> tuple[Array, int]:
        """Return the labels as numbers, and the width of a default model's output."""
        raise NotImplementedError

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        """Return the loss for this output, which may be probabilities already."""
        raise NotImplementedError

    # ------------------------------------------------------------------ fitting

    def _fit(
        self, X: Any, y: Any, sample_weight: Any, *, go_on: bool, epochs: int, classes: Any = None
    ) -> Any:
        before: Trainer | None = getattr(self, "trainer_", None) if go_on else None
        model = None
        if before is None:
            model = None if self.model is None else read_model(self.model)
            self._input = None if model is None else _only_input(model)
        fitted = before is not None
        checks = {**self._checks(fitted), **self._label_checks}
        X, y = validate_data(self, X, y, reset=not fitted, **checks)
        self._dtype = X.dtype
        weights = None
        if sample_weight is not None:
            weights = _relative(_check_sample_weight(sample_weight, X))
        y, width = self._prepared(y, fitted, classes)
        if before is None:
            seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
            model = model or dense_network(self._sizes(X.shape[1], width), X.dtype, seed)
            self.trainer_ = self._new_trainer(model, seed)
        elif (self._settings(), self.loss) != self._used:
            self.trainer_ = _continued(before, self._new_trainer(before.export(None), before.seed))
        self._train(X, self._labels(y), weights, epochs)
        return self

    def _sizes(self, features: int, outputs: int) -> list[int]:
        hidden = np.atleast_1d(np.array(self.hidden_layer_sizes, int)).tolist()
        if any(size < 1 for size in hidden):
            raise SettingError(
                f"hidden_layer_sizes are at least 1, got {self.hidden_layer_sizes!r}."
            )
        return [features, *hidden, outputs]

    def _new_trainer(self, model: onnx.ModelProto, seed: int) -> Trainer:
        work = normalize(model)
        floats = {n: spec for n, spec in tensor_outputs(work).items() if spec.dtype.kind == "f"}
        name, loss = _only_output(self.loss, floats)
        value = next(v for v in work.graph.outputs if v.name == name)
        probabilities = probability_operator(value) is not None
        settings = self._settings()
        self._output = name
        self._loss = self._objective(loss, floats[name], probabilities)
        self._used = (settings, self.loss)
        return Trainer(model, loss={name: self._loss}, seed=seed, **settings)

    def _settings(self) -> dict[str, Any]:
        """The arguments of the Trainer besides the model, the loss and the seed."""
        optimizer: Optimizer = Adam(learning_rate=0.01)
        if self.optimizer is not None:
            optimizer = get_optimizer(self.optimizer)
        if self.learning_rate is not None:
            optimizer = dataclasses.replace(optimizer, learning_rate=self.learning_rate)
        names = ("weights", "penalty", "backend", "gradient", "device", "threads")
        return {"optimizer": optimizer, **{name: getattr(self, name) for name in names}}

    def _train(self, X: Array, y: Array, weights: Array | None, epochs: int) -> None:
        # A callback holds its Trainer while it works, and a Trainer cannot be pickled.
        callbacks = [copy.copy(c) for c in self.callbacks or ()]
        training = [array for array in (X, y, weights) if array is not None]
        held_out = None
        if self.early_stopping:
            halves = train_test_split(
                *training,
                test_size=self.validation_fraction,
                random_state=self.trainer_.seed,
                stratify=self._strata(y),
            )
            training = halves[::2]
            held_out = tuple(halves[1::2])
            callbacks.append(
                EarlyStopping("val_loss", patience=self.n_iter_no_change, restore_best_weights=True)
            )
        automatic = min(200, len(training[0]))
        self.trainer_.fit(
            *training,
            epochs=epochs,
            batch_size=automatic if self.batch_size == "auto" else self.batch_size,
            validation_data=held_out,
            callbacks=callbacks,
            verbose=self.verbose,
        )
        self.n_iter_ = self.trainer_.epoch
        self.train_losses_ = self.loss_curve_ = list(self.trainer_.train_losses_)

    def _labels(self, y: Array) -> Array:
        return y

    def _strata(self, y: Array) -> Array | None:
        return None

    _label_checks: Mapping[str, Any] = {}

    def _checks(self, fitted: bool) -> dict[str, Any]:
        """The arguments of scikit-learn's check of X: it is the model's input, or for a default
        model, which does not exist yet, float32 or float64.
        """
        if self._input is None:
            return {"dtype": self._dtype if fitted else [np.float64, np.float32]}
        return {
            "dtype": None if self._input.dtype.kind == "O" else self._input.dtype,
            "allow_nd": True,
        }

    def _predictions(self, X: Any) -> Array:
        """The output that has the loss, `(rows, width)`."""
        check_is_fitted(self, "trainer_")
        X = validate_data(self, X, reset=False, **self._checks(True))
        outputs = self.trainer_.predict(X, batch_size=ROWS_PER_PREDICTION)
        array: Array = outputs[self._output] if isinstance(outputs, dict) else outputs
        return array.reshape(len(X), -1)

    # ------------------------------------------------------------------ pickling

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "trainer_" in state:
            state["trainer_"] = _packed(self.trainer_)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "trainer_" in state:
            state = {**state, "trainer_": _unpacked(state["trainer_"])}
        super().__setstate__(state)


class OnnxRegressor(RegressorMixin, _OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn estimator that fits an ONNX model to numbers, one or several a row.

    - `model`: a path, bytes or an `onnx.ModelProto` with one input. None makes a network of dense
      layers for the data, in their element type, with the weights `coefficients_0`, `intercepts_0`,
      and so on; a linear model begins at 0, others at random (Glorot and Bengio 2010).
    - `hidden_layer_sizes`: sizes of the hidden layers of a default network, each at least 1, with
      ReLU between them; `()` is a linear model.
    - `weights`: names or patterns of the weights to train, as in `Trainer`; None for all.
    - `loss`: a name, a Loss or a function, as in `Trainer`; None is the mean squared error. A dict
      of one output name -> loss chooses between several outputs.
    - `penalty`: the cost of large weights, as in `Trainer`.
    - `optimizer`: as in `Trainer`; None is Adam with a learning rate of 0.01.
    - `learning_rate`: replaces the optimizer's, unless None; a number >= 0 or a Schedule.
    - `epochs`: passes over the data in one `fit`.
    - `batch_size`: a number of rows; "auto" is 200, or all where there are fewer.
    - `early_stopping`: hold out `validation_fraction` of the rows, a number in (0, 1), stop after
      `n_iter_no_change` epochs without a better loss on them, and restore the best weights.
    - `validation_fraction`, `n_iter_no_change`: see `early_stopping`.
    - `callbacks`: callbacks for `Trainer.fit`; each fit works with shallow copies.
    - `warm_start`: let `fit` continue with weights, optimizer and counters as the last one left
      them.
    - `random_state`: a seed for the initial weights, the order of rows, the rows held out, and
      dropout.
    - `verbose`: 0 for silence, 1 for a progress bar, as in `Trainer.fit`.
    - `backend`, `gradient`, `device`, `threads`: as in `Trainer`.

    Sample weights count relative to their mean, so that a weight of 2 is a row twice. After `fit`
    there are `trainer_`, `n_iter_` (epochs), `train_losses_` and `loss_curve_` (the loss of each
    epoch), `n_features_in_`, and for tables `feature_names_in_`. A fitted estimator can be pickled.
    Settings are checked by `fit`, with the errors of `Trainer`.

    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> line = OnnxRegressor(learning_rate=0.1, random_state=0).fit(X, 3 * X[:, 0] + 1)
    >>> line.predict([[2.0]]).round(2), line.get_trained_onnx().graph.output[0].name
    (array([7.]), 'predictions')
    """

    _label_checks: Mapping[str, Any] = {"multi_output": True, "y_numeric": True}

    def predict(self, X: Any) -> Array:
        """Return the predictions for the rows `X`: shape `(rows,)` if `y` had it, else `(rows,
        outputs)`.
        """
        predictions = self._predictions(X)
        return predictions[:, 0] if self._flat and predictions.shape[1] == 1 else predictions

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train for one more epoch on these rows, and return the estimator.

        `X`, `y` and `sample_weight` are those of `fit`.
        """
        return self._fit(X, y, sample_weight, go_on=True, epochs=1)

    def _prepared(self, y: Array, go_on: bool, classes: Any) -> tuple[Array, int]:
        self._flat = y.ndim == 1
        return y, 1 if y.ndim == 1 else y.shape[1]

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        return get_loss("mean_squared_error" if loss is None else loss)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class OnnxClassifier(ClassifierMixin, _OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn estimator that fits an ONNX model to classes, labels of any type.

    - `model`: as in `OnnxRegressor`. The output has one column for two classes (the probability of
      the second in sorted order, or its score), or one for each class in sorted order. It is taken
      for probabilities if a Sigmoid or Softmax computes it, else for scores (logits).
    - `loss`: None or a name is the loss that fits the output: the cross entropy of one column is
      binary, and probabilities are not taken for logits. A Loss is used as it is, but for a
      `from_logits` of None, which is decided as above, and for a CrossEntropy of one column, which
      becomes a BinaryCrossEntropy. Losses that do not take the number of a class get one column for
      each class, of 0 and 1.
    - `hidden_layer_sizes`, `weights`, `penalty`, `optimizer`, `learning_rate`, `epochs`,
      `batch_size`, `early_stopping`, `validation_fraction`, `n_iter_no_change`, `callbacks`,
      `warm_start`, `random_state`, `verbose`, `backend`, `gradient`, `device`, `threads`: as in
      `OnnxRegressor`.

    After `fit`, `classes_` holds the labels in the order of the columns of `predict_proba`; the
    other attributes are those of `OnnxRegressor`. SettingError where classes and columns do not
    fit.

    >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> model = OnnxClassifier(learning_rate=0.1, random_state=0).fit(X, ["no", "no", "yes", "yes"])
    >>> model.predict([[0.5], [2.5]]).tolist(), model.predict_proba([[1.5]]).round(1).tolist()
    (['no', 'yes'], [[0.5, 0.5]])
    """

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
        # A binary loss decides each class on its own.
        return _shares(probabilities) if binary else probabilities

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """Train for one more epoch on these rows, and return the estimator.

        `X`, `y` and `sample_weight` are those of `fit`. `classes`: all labels there are, for the
        first call; None if they are all in `y`.
        """
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
                f"OnnxClassifier has met no class {unknown[0]!r} before; it knows"
                f" {self.classes_.tolist()}."
            )
        return np.searchsorted(self.classes_, y), 1 if known == 2 else known

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        classes = len(self.classes_)
        width: Any = 1
        if output.shape is not None and len(output.shape) > 1:
            width = output.shape[-1]
        if isinstance(width, int) and width != classes and (width, classes) != (1, 2):
            raise SettingError(
                f"The model's output {output} has {width} column{'s' * (width > 1)}, and y has"
                f" {classes} classes: it needs a column for each, or one for two classes."
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

    def _strata(self, y: Array) -> Array | None:
        return y if y.ndim == 1 else y.argmax(axis=1)


# ---------------------------------------------------------------------- models


def _only_input(model: onnx.ModelProto) -> TensorSpec:
    inputs = [spec_of(v) for v in normalize(model).graph.inputs]
    if len(inputs) != 1:
        raise SettingError(
            "The estimators of onnxfit.sklearn take models with one input; this one has"
            f" {'; '.join(map(str, inputs))}. Use a Trainer."
        )
    return inputs[0]


def _only_output(loss: Losses, outputs: Mapping[str, TensorSpec]) -> tuple[str, Any]:
    """The output that is fitted to y, and the loss of that output."""
    if isinstance(loss, Mapping):
        if len(loss) != 1 or not set(loss) <= set(outputs):
            raise SettingError(
                f"loss is a dict of one output ({', '.join(outputs)}) and its loss here, got"
                f" {dict(loss)!r}."
            )
        return next(iter(loss.items()))
    if len(outputs) != 1:
        floats = ", ".join(outputs) or "none"
        raise SettingError(
            f"y is fitted to one output, and those of floats are: {floats}. Say which by"
            " loss={name: loss}."
        )
    return next(iter(outputs)), loss


# ---------------------------------------------------------------------- trainers


def _continued(before: Trainer, after: Trainer) -> Trainer:
    """Let `after`, a new trainer of the same weights, continue where `before` stands, and return
    it; it keeps the slots if its optimizer has the same.
    """
    old = before.get_state()
    new = after.get_state()
    slots = old["slots"] if old["slots"].keys() == new["slots"].keys() else new["slots"]
    counters = {**old["counters"], "learning_rate": new["counters"]["learning_rate"]}
    after.set_state({"weights": new["weights"], "slots": slots, "counters": counters})
    after.train_losses_ = list(before.train_losses_)
    return after


def _packed(trainer: Trainer) -> dict[str, Any]:
    """The contents of a trainer, without sessions."""
    return {
        "model": trainer.export(None).SerializeToString(),
        "settings": trainer.settings,
        "state": trainer.get_state(),
        "history": trainer.history.state_dict(),
        "train_losses": trainer.train_losses_,
    }


def _unpacked(packed: Mapping[str, Any]) -> Trainer:
    trainer = Trainer(packed["model"], **packed["settings"])
    trainer.set_state(packed["state"])
    trainer.history.load_state_dict(packed["history"])
    trainer.train_losses_ = list(packed["train_losses"])
    return trainer


# ---------------------------------------------------------------------- numbers


def _relative(weights: Array) -> Array:
    """Sample weights with a mean of 1."""
    if weights.min() < 0:
        raise SettingError(f"sample_weight is at least 0, got {weights.min()}.")
    total = weights.sum()
    if not total:
        raise SettingError("sample_weight is 0 for all rows.")
    relative: Array = weights * (len(weights) / total)
    return relative


def _sigmoid(scores: Array) -> Array:
    probabilities: Array = np.exp(-np.logaddexp(0, -scores))
    return probabilities


def _shares(numbers: Array) -> Array:
    """The numbers, scaled so that each row sums to 1."""
    totals = numbers.sum(axis=1, keepdims=True)
    shares: Array = numbers / np.maximum(totals, np.finfo(numbers.dtype).tiny)
    return shares

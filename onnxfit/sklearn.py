"""A Trainer as a scikit-learn estimator: for GridSearchCV, Pipeline, cross_val_score and whatever
else takes `fit` and `predict`.
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
from onnxfit.graph.model import normalize, spec_of, tensor_outputs
from onnxfit.graph.probabilities import source_of_probabilities
from onnxfit.graph.reading import ModelSource, read_model
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import BinaryCrossEntropy, ClassLoss, CrossEntropy, Loss, get_loss
from onnxfit.optimizers import Adam, OptimizerLike, get_optimizer
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
ROWS = 4096  # that predict takes at a time


class _OnnxEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share: the settings, fitting and keeping a Trainer."""

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
        self.model = model
        self.hidden_layer_sizes = hidden_layer_sizes
        self.weights = weights
        self.loss = loss
        self.penalty = penalty
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.callbacks = callbacks
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose
        self.backend = backend
        self.gradient = gradient
        self.device = device
        self.threads = threads

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train for `epochs` epochs: from the model's weights on, or with `warm_start` from where
        the last fit stopped.
        """
        return self._fit(X, y, sample_weight, go_on=self.warm_start, epochs=self.epochs)

    def get_trained_onnx(self) -> onnx.ModelProto:
        """The trained model."""
        return self.export(None)

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The trained model, written to `path` unless that is None."""
        check_is_fitted(self, "trainer_")
        model: onnx.ModelProto = self.trainer_.export(path)
        return model

    # ------------------------------------------------------------------ what the two differ in

    def _prepared(self, y: Array, go_on: bool, classes: Any) -> tuple[Array, int]:
        """The labels as numbers, and the width of a default model's output."""
        raise NotImplementedError

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        """The loss for this output, which may be probabilities already."""
        raise NotImplementedError

    # ------------------------------------------------------------------ fitting

    def _fit(
        self, X: Any, y: Any, sample_weight: Any, *, go_on: bool, epochs: int, classes: Any = None
    ) -> Any:
        before: Trainer | None = getattr(self, "trainer_", None) if go_on else None
        model = None if before is not None or self.model is None else read_model(self.model)
        if before is None:
            self._input = (
                None
                if model is None
                else _only_input([spec_of(v) for v in normalize(model).graph.inputs])
            )
        X, y = validate_data(
            self,
            X,
            y,
            reset=before is None,
            **self._checks(before is not None),
            **self._label_checks,
        )
        self._dtype = X.dtype
        weights = (
            None if sample_weight is None else _relative(_check_sample_weight(sample_weight, X))
        )
        y, width = self._prepared(y, before is not None, classes)
        if before is None:
            seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
            self.trainer_ = self._started(
                model or _network(self._sizes(X.shape[1], width), X.dtype, seed), seed
            )
        elif (self._settings(), self.loss) != self._used:
            self.trainer_ = _continued(before, self._started(before.export(None), before.seed))
        self._train(X, self._labels(y), weights, epochs)
        return self

    def _sizes(self, features: int, outputs: int) -> list[int]:
        given: Any = self.hidden_layer_sizes
        hidden = np.atleast_1d(np.array(given, int)).tolist()
        if any(size < 1 for size in hidden):
            raise SettingError(f"hidden_layer_sizes are at least 1, got {given!r}.")
        return [features, *hidden, outputs]

    def _started(self, model: onnx.ModelProto, seed: int) -> Trainer:
        work = normalize(model)
        outputs = tensor_outputs(work)
        name, loss = _only_output(
            self.loss, {n: s for n, s in outputs.items() if s.dtype.kind == "f"}
        )
        probabilities = (
            source_of_probabilities(next(v for v in work.graph.outputs if v.name == name))
            is not None
        )
        chosen, settings = self._objective(loss, outputs[name], probabilities), self._settings()
        self._output, self._loss, self._used = name, chosen, (settings, self.loss)
        return Trainer(model, loss={name: chosen}, seed=seed, **settings)

    def _settings(self) -> dict[str, Any]:
        """What a Trainer is made with, besides the model, the loss and the seed."""
        optimizer = (
            Adam(learning_rate=0.01) if self.optimizer is None else get_optimizer(self.optimizer)
        )
        if self.learning_rate is not None:
            optimizer = dataclasses.replace(optimizer, learning_rate=self.learning_rate)
        return {
            "weights": self.weights, "penalty": self.penalty, "optimizer": optimizer, "backend": self.backend,
            "gradient": self.gradient, "device": self.device, "threads": self.threads,
        }  # fmt: skip

    def _train(self, X: Array, y: Array, weights: Array | None, epochs: int) -> None:
        # a callback at work holds its Trainer, which cannot be pickled
        callbacks = [copy.copy(c) for c in self.callbacks or ()]
        rows, held_out = (X, y, weights), None
        if self.early_stopping:
            parts = train_test_split(
                *[a for a in rows if a is not None],
                test_size=self.validation_fraction,
                random_state=self.trainer_.seed,
                stratify=self._strata(y),
            )
            rows, held_out = (*parts[::2], None)[:3], tuple(parts[1::2])
            callbacks.append(
                EarlyStopping("val_loss", patience=self.n_iter_no_change, restore_best_weights=True)
            )
        size: Any = min(200, len(rows[0])) if self.batch_size == "auto" else self.batch_size
        self.trainer_.fit(
            *rows, epochs=epochs, batch_size=size, validation_data=held_out, callbacks=callbacks, verbose=self.verbose
        )  # fmt: skip
        self.n_iter_ = self.trainer_.epoch
        self.train_losses_ = self.loss_curve_ = list(self.trainer_.train_losses_)

    def _labels(self, y: Array) -> Array:
        return y

    def _strata(self, y: Array) -> Array | None:
        return None

    _label_checks: Mapping[str, Any] = {}

    def _checks(self, fitted: bool) -> dict[str, Any]:
        """How scikit-learn looks at X: as the model's input; for a default model, still to be made,
        as float32 or float64.
        """
        if self._input is None:
            return {"dtype": self._dtype if fitted else [np.float64, np.float32]}
        return {
            "dtype": None if self._input.dtype.kind == "O" else self._input.dtype,
            "allow_nd": True,
        }

    def _predictions(self, X: Any) -> Array:
        """The output with the loss, `(rows, width)`."""
        check_is_fitted(self, "trainer_")
        X = validate_data(self, X, reset=False, **self._checks(True))
        found = self.trainer_.predict(X, batch_size=ROWS)
        array: Array = found[self._output] if isinstance(found, dict) else found
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
    """Fits an ONNX model to numbers, one or several a row, as a scikit-learn estimator.

    - `model`: a path, bytes or an `onnx.ModelProto` with one input; None makes one for the data
      that `fit` meets, in its element type: linear, or with hidden layers of `hidden_layer_sizes`
      and relu between them. Its weights are `coefficients_0`, `intercepts_0`, and so on for each
      layer; those of a linear model begin at 0, others at random (Glorot and Bengio 2010).
    - `weights`, `penalty`, `backend`, `gradient`, `device`, `threads`: as in `Trainer`.
    - `loss`: as in `Trainer`; None is the mean squared error. A dict output name -> loss chooses
      between several outputs.
    - `optimizer`: as in `Trainer`; None is Adam with a learning rate of 0.01. `learning_rate`
      replaces the optimizer's, unless None.
    - `batch_size`: a number of rows; "auto" is 200, or all where there are fewer.
    - `early_stopping`: hold out `validation_fraction` of the rows, stop after `n_iter_no_change`
      epochs without a better loss on them, and go back to the weights of the best epoch.
    - `callbacks`: what `Trainer.fit` takes; each fit works with shallow copies.
    - `warm_start`: `fit` goes on with weights, optimizer and counters as the last one left them.
    - `random_state`: of initial weights, the order of rows, what is held out, and dropout.

    Sample weights count relative to their mean, so that a weight of 2 is a row twice. After `fit`
    there are `trainer_`, `n_iter_` (epochs), `train_losses_` and `loss_curve_` (the loss of each),
    `n_features_in_`, and for tables `feature_names_in_`. A fitted estimator pickles.

    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> line = OnnxRegressor(learning_rate=0.1, random_state=0).fit(X, 3 * X[:, 0] + 1)
    >>> line.predict([[2.0]]).round(2), line.get_trained_onnx().graph.output[0].name
    (array([7.]), 'predictions')
    """

    _label_checks: Mapping[str, Any] = {"multi_output": True, "y_numeric": True}

    def predict(self, X: Any) -> Array:
        """One number a row, `(rows,)`, if `y` was so; else `(rows, outputs)`."""
        found = self._predictions(X)
        return found[:, 0] if self._flat and found.shape[1] == 1 else found

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """One more epoch over these rows."""
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
    """Fits an ONNX model to classes, labels of any type, as a scikit-learn estimator.

    Settings as in `OnnxRegressor`, but for the loss:

    - The model's output has one column for two classes (the probability of the second in sorted
      order, or its score), or one for each class in sorted order. It is taken for probabilities if
      a Sigmoid or Softmax makes it, else for scores (logits).
    - `loss`: None is the cross entropy that fits the output. So is a loss by name: the cross
      entropy of one column is binary, and probabilities are not taken for logits. A Loss is used as
      it is, but for a CrossEntropy of one column, which becomes a BinaryCrossEntropy. Losses that
      do not take the number of a class get one column for each class, of 0 and 1.

    `classes_` holds the labels in the order of the columns of `predict_proba`.

    >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> model = OnnxClassifier(learning_rate=0.1, random_state=0).fit(X, ["no", "no", "yes", "yes"])
    >>> model.predict([[0.5], [2.5]]).tolist(), model.predict_proba([[1.5]]).round(1).tolist()
    (['no', 'yes'], [[0.5, 0.5]])
    """

    def predict(self, X: Any) -> Array:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(axis=1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, `(rows, classes)`, in the order of `classes_`."""
        found = self._predictions(X)
        if found.shape[1] == 1:
            second = found if self._probabilities else _sigmoid(found)
            return np.concatenate([1 - second, second], axis=1)
        if isinstance(self._loss, BinaryCrossEntropy):  # a yes or no for each class
            return _shares(found if self._probabilities else _sigmoid(found))
        return (
            found
            if self._probabilities
            else _shares(np.exp(found - found.max(axis=1, keepdims=True)))
        )

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """One more epoch over these rows; the first call says all `classes`, unless they are all in
        `y`.
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
        classes, width = (
            len(self.classes_),
            (1 if output.shape is None or len(output.shape) < 2 else output.shape[-1]),
        )
        if isinstance(width, int) and width != classes and (width, classes) != (1, 2):
            raise SettingError(
                f"The model's output {output} has {width} column{'s' * (width > 1)}, and y has"
                f" {classes} classes: it needs a column for each, or one for two classes."
            )
        chosen = get_loss("cross_entropy" if loss is None else loss)
        by_name = loss is None or isinstance(loss, str)
        self._width = width
        if isinstance(chosen, CrossEntropy) and width == 1:
            chosen = BinaryCrossEntropy(
                reduction=chosen.reduction,
                from_logits=chosen.from_logits,
                label_smoothing=chosen.label_smoothing,
            )
        if by_name and hasattr(chosen, "from_logits"):
            chosen = dataclasses.replace(chosen, from_logits=not probabilities)  # type: ignore[call-arg]
        self._probabilities = not getattr(chosen, "from_logits", not probabilities)
        return chosen

    def _labels(self, y: Array) -> Array:
        if self._width == 1 or isinstance(self._loss, ClassLoss):
            return y
        return np.eye(len(self.classes_))[y]

    def _strata(self, y: Array) -> Array | None:
        return y if y.ndim == 1 else y.argmax(axis=1)


# ---------------------------------------------------------------------- models


def _network(sizes: Sequence[int], dtype: np.dtype[Any], seed: int) -> onnx.ModelProto:
    """Layers of these sizes, from features to outputs, with relu between them."""
    make, random = onnx.helper, np.random.default_rng(seed)
    elem_type = make.np_dtype_to_tensor_dtype(dtype)
    nodes, initializers, x = [], [], "X"
    for i in range(len(sizes) - 1):
        before, after = sizes[i : i + 2]
        bound = np.sqrt(6 / (before + after)) if len(sizes) > 2 else 0.0
        arrays = {
            f"coefficients_{i}": random.uniform(-bound, bound, (before, after)),
            f"intercepts_{i}": np.zeros(after),
        }
        initializers += [
            onnx.numpy_helper.from_array(a.astype(dtype), name) for name, a in arrays.items()
        ]
        last = i == len(sizes) - 2
        y = "predictions" if last else f"sums_{i}"
        nodes.append(
            make.make_node(
                "MatMul", [x, f"coefficients_{i}"], [f"products_{i}"], name=f"product_{i}"
            )
        )
        nodes.append(
            make.make_node("Add", [f"products_{i}", f"intercepts_{i}"], [y], name=f"sum_{i}")
        )
        if not last:
            nodes.append(make.make_node("Relu", [y], [f"hidden_{i}"], name=f"relu_{i}"))
        x = f"hidden_{i}"
    inputs = [make.make_tensor_value_info("X", elem_type, ["batch", sizes[0]])]
    outputs = [make.make_tensor_value_info("predictions", elem_type, ["batch", sizes[-1]])]
    graph = make.make_graph(nodes, "network", inputs, outputs, initializers)
    return make.make_model(
        graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8, producer_name="onnxfit"
    )


def _only_input(inputs: Sequence[TensorSpec]) -> TensorSpec:
    if len(inputs) != 1:
        raise SettingError(
            "The estimators of onnxfit.sklearn take models with one input; this one has"
            f" {'; '.join(map(str, inputs))}. Use a Trainer."
        )
    return inputs[0]


def _only_output(loss: Losses, outputs: Mapping[str, TensorSpec]) -> tuple[str, Any]:
    """The output that is fitted to y, and its loss."""
    if isinstance(loss, Mapping):
        if len(loss) != 1 or not set(loss) <= set(outputs):
            raise SettingError(
                f"loss is a dict of one output ({', '.join(outputs)}) and its loss here, got"
                f" {dict(loss)!r}."
            )
        return next(iter(loss.items()))
    if len(outputs) != 1:
        found = ", ".join(outputs) or "none"
        raise SettingError(
            f"y is fitted to one output, and those of floats are: {found}. Say which by"
            " loss={name: loss}."
        )
    return next(iter(outputs)), loss


# ---------------------------------------------------------------------- trainers


def _continued(before: Trainer, new: Trainer) -> Trainer:
    """A new trainer of the same weights that goes on where another one stands; slots go on where
    its optimizer has the same.
    """
    state, unique_name = before.get_state(), new.get_state()
    slots = (
        state["slots"]
        if state["slots"].keys() == unique_name["slots"].keys()
        else unique_name["slots"]
    )
    counters = {**state["counters"], "learning_rate": unique_name["counters"]["learning_rate"]}
    new.set_state({"weights": unique_name["weights"], "slots": slots, "counters": counters})
    new.train_losses_ = list(before.train_losses_)
    return new


def _packed(trainer: Trainer) -> dict[str, Any]:
    """All that a trainer is, without sessions."""
    return {
        "model": trainer.export(None).SerializeToString(), "settings": trainer.settings, "state": trainer.get_state(),
        "history": trainer.history.state_dict(), "train_losses": trainer.train_losses_,
    }  # fmt: skip


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


def _shares(found: Array) -> Array:
    """Rows that sum to 1."""
    shares: Array = found / np.maximum(found.sum(axis=1, keepdims=True), np.finfo(found.dtype).tiny)
    return shares

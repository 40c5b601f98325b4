"""The base class of the estimators: the settings, and a Trainer that is fitted and kept."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from onnxfit.callbacks import Callback, EarlyStopping
from onnxfit.errors import SettingError, warn_user
from onnxfit.graph.dense import Scaling, dense_network
from onnxfit.graph.model import spec_of, tensor_outputs
from onnxfit.graph.probabilities import probability_operator
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.normalize import normalize
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.losses import Loss
from onnxfit.optimizers import Adam, Optimizer, get_optimizer
from onnxfit.optimizers.lookup import OptimizerLike
from onnxfit.penalties import PenaltyLike
from onnxfit.schedules import LearningRate
from onnxfit.sklearn.columns import relative_weights, standardization, validation_pair
from onnxfit.sklearn.names import checks_own_names, require_own_names
from onnxfit.sklearn.trainers import base_model, continued, packed, unpacked
from onnxfit.step.distillation import Distillation
from onnxfit.step.objectives import Losses
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.quantized.settings import Quantization
from onnxfit.trainer import Trainer

Array = npt.NDArray[Any]
ROWS_PER_PREDICTION = 4096
AUTOMATIC_BATCH_SIZE = 200
# Multiplications of the forward pass of a batch, up to which a second thread saves no time.
MAX_PRODUCTS_OF_ONE_THREAD = 2**22


class OnnxEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base class of both estimators: the settings, and the fitted Trainer."""

    @checks_own_names
    def __init__(
        self,
        model: ModelSource | None = None,
        *,
        hidden_layer_sizes: Sequence[int] = (100,),
        standardize: bool = True,
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
        teacher: Distillation | ModelSource | None = None,
        quantization: Quantization | None = None,
        adapters: LoRA | Sequence[LoRA] | None = None,
    ) -> None:
        # scikit-learn requires every argument as an unchanged attribute of the same name.
        arguments = dict(locals())
        del arguments["self"]
        self.__dict__.update(arguments)

    def set_params(self, **params: Any) -> Any:
        """Set arguments of the constructor, `params`, by name, and return the estimator.

        ArgumentError: an argument belongs to an estimator of scikit-learn or another library; the
        message says its name here.
        """
        require_own_names(type(self).__name__, params, self.get_params(deep=False))
        return super().set_params(**params)

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        X_val: Any = None,
        y_val: Any = None,
        eval_set: Any = None,
    ) -> Any:
        """Train for `epochs` epochs and return the estimator.

        Training begins at the model's weights, or with `warm_start` where the last fit stopped.

        - `X`: an array `(rows, ...)` of the shape of the model's input, a table, or a sparse matrix
          of SciPy, of which only the rows of one batch are dense at a time.
        - `y`: the labels, one row for each row of `X`.
        - `sample_weight`: None, or one number >= 0 per row; only relative sizes count.
        - `X_val`, `y_val`: rows to validate on after each epoch, as in scikit-learn's gradient
          boosting. `validation_losses_` gets the loss on them. With `early_stopping` they replace
          the rows that would be held out.
        - `eval_set`: the same as `[(X_val, y_val)]` or `(X_val, y_val)`, as in XGBoost and
          LightGBM.

        SettingError: the validation data is incomplete, given twice, or several sets.
        """
        validation = validation_pair(X_val, y_val, eval_set)
        epochs = self.epochs
        return self._fit(
            X, y, sample_weight, go_on=self.warm_start, epochs=epochs, validation=validation
        )

    def get_trained_onnx(self) -> onnx.ModelProto:
        """Return the trained model."""
        return self.export(None)

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """Return the trained model, and write it to the file `path` unless `path` is None."""
        check_is_fitted(self, "trainer_")
        model: onnx.ModelProto = self.trainer_.export(path)
        return model

    # ------------------------------------------------------------------ hooks of the two

    def _prepared(self, y: Array, go_on: bool, classes: Any) -> tuple[Array, int]:
        """Return the labels as numbers, and the width of a default model's output."""
        raise NotImplementedError

    def _encoded(self, y: Array) -> Array:
        """Return labels of the classes and columns of `_prepared` as numbers."""
        return y

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        """Return the loss for this output; `probabilities`: the output is not logits."""
        raise NotImplementedError

    # ------------------------------------------------------------------ fitting

    def _fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        *,
        go_on: bool,
        epochs: int,
        classes: Any = None,
        validation: tuple[Any, Any] | None = None,
    ) -> Any:
        before: Trainer | None = getattr(self, "trainer_", None) if go_on else None
        model = None
        if before is None:
            file = None if self.model is None else read_model(self.model)
            model = None if file is None else file.proto
            self._input = None if model is None else only_input(model)
        fitted = before is not None
        checks = {**self._checks(fitted), **self._label_checks}
        X, y = validate_data(self, X, y, reset=not fitted, **checks)
        self._dtype = X.dtype
        weights = None
        if sample_weight is not None:
            weights = relative_weights(_check_sample_weight(sample_weight, X))
        y, width = self._prepared(y, fitted, classes)
        weights = self._with_class_weights(y, weights)
        held_out = None if validation is None else self._validation(*validation)
        if before is None:
            self.train_losses_: list[float] = []
            self.validation_losses_: list[float] = []
            self._target_scale = 1.0
            seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
            model = model or self._default_network(X, y, weights, width, seed)
            self.trainer_ = self._new_trainer(model, seed)
        elif (self._settings(), self.loss) != self._used:
            keeps_adapters = self.adapters == self._used[0]["adapters"]
            model = base_model(before, keeps_adapters=keeps_adapters)
            after = self._new_trainer(model, before.seed)
            self.trainer_ = continued(before, after, keeps_adapters=keeps_adapters)
        if held_out is not None:
            held_out = held_out[0], self._labels(held_out[1])
        self._train(X, self._labels(y), weights, epochs, held_out)
        return self

    def _validation(self, X: Any, y: Any) -> tuple[Any, Array]:
        """Return the rows to validate on and their labels as numbers, after the checks of `fit`."""
        checks = {**self._checks(True), **self._label_checks}
        X, y = validate_data(self, X, y, reset=False, **checks)
        return X, self._encoded(y)

    def _default_network(
        self, X: Array, y: Array, weights: Array | None, width: int, seed: int
    ) -> onnx.ModelProto:
        inputs = outputs = None
        if self.standardize:
            inputs = standardization(X, weights)
            outputs = self._target_scaling(y, weights, X.dtype)
        if outputs is not None:
            self._target_scale = float(np.sqrt(np.mean(outputs.scale**2)))
        return dense_network(self._sizes(X.shape[1], width), X.dtype, seed, inputs, outputs)

    def _hidden_layers(self) -> list[int]:
        hidden: list[int] = np.atleast_1d(np.array(self.hidden_layer_sizes, int)).tolist()
        return hidden

    def _sizes(self, features: int, outputs: int) -> list[int]:
        hidden = self._hidden_layers()
        if any(size < 1 for size in hidden):
            raise SettingError(
                f"hidden_layer_sizes must all be >= 1, got {self.hidden_layer_sizes!r}."
            )
        return [features, *hidden, outputs]

    def _new_trainer(self, model: onnx.ModelProto, seed: int) -> Trainer:
        floats, probabilities = self._outputs(model)
        name, loss = only_output(self.loss, floats)
        settings = self._settings()
        self._output = name
        self._loss = self._objective(loss, floats[name], name in probabilities)
        self._used = (settings, self.loss)
        self._loss_unit = self._unit_of_loss(self._loss)
        weights = {name: 1 / self._loss_unit}
        return Trainer(model, loss={name: self._loss}, loss_weights=weights, seed=seed, **settings)

    def _outputs(self, model: onnx.ModelProto) -> tuple[dict[str, TensorSpec], set[str]]:
        """Return the float outputs by name, and the names of outputs that are probabilities."""
        if self._input is None:  # a default network
            output = model.graph.output[0]
            width = output.type.tensor_type.shape.dim[-1].dim_value
            return {output.name: TensorSpec(output.name, self._dtype, ("batch", width))}, set()
        work = normalize(model)
        floats = {n: spec for n, spec in tensor_outputs(work).items() if spec.dtype.kind == "f"}
        values = [value for value in work.graph.outputs if value.name in floats]
        return floats, {v.name or "" for v in values if probability_operator(v) is not None}

    def _threads(self) -> int | None:
        """Return the threads of an operator: one for a small default network, unless chosen.

        Threads that wait between short steps take time from other fits, as of a grid search.
        """
        threads: int | None = self.threads
        if threads is not None or self._input is not None:
            return threads
        rows = self.batch_size if isinstance(self.batch_size, int) else AUTOMATIC_BATCH_SIZE
        sizes = self._sizes(self.n_features_in_, 1)
        products = rows * sum(a * b for a, b in pairwise(sizes))
        return 1 if products <= MAX_PRODUCTS_OF_ONE_THREAD else None

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of the Trainer except the model, the loss and the seed."""
        has_hidden_layers = self._input is None and self._hidden_layers()
        optimizer: Optimizer = Adam(learning_rate=0.001 if has_hidden_layers else 0.01)
        if self.optimizer is not None:
            optimizer = get_optimizer(self.optimizer)
        if self.learning_rate is not None:
            optimizer = optimizer.with_learning_rate(self.learning_rate)
        names = ["weights", "penalty", "backend", "gradient", "device"]
        names += ["teacher", "quantization", "adapters"]
        own = {name: getattr(self, name) for name in names}
        return {"optimizer": optimizer, "threads": self._threads(), **own}

    def _train(
        self,
        X: Array,
        y: Array,
        weights: Array | None,
        epochs: int,
        held_out: tuple[Any, ...] | None,
    ) -> None:
        # A callback refers to its Trainer during a fit, and a Trainer cannot be pickled.
        callbacks = [copy.copy(c) for c in self.callbacks or ()]
        training = [array for array in (X, y, weights) if array is not None]
        if self.early_stopping:
            if held_out is None:
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
        automatic = min(AUTOMATIC_BATCH_SIZE, training[0].shape[0])
        epochs_before = len(self.trainer_.train_losses_)
        history = self.trainer_.fit(
            *training,
            epochs=epochs,
            batch_size=automatic if self.batch_size == "auto" else self.batch_size,
            validation_data=held_out,
            callbacks=callbacks,
            verbose=self.verbose,
        ).history
        self.n_iter_ = self.trainer_.epoch
        losses = self.trainer_.train_losses_[epochs_before:]
        unit = self._loss_unit
        self.train_losses_ = self.loss_curve_ = [*self.train_losses_, *(x * unit for x in losses)]
        self.validation_losses_ = [
            *self.validation_losses_,
            *(x * unit for x in history.get("val_loss", ())),
        ]
        # The user's own model is often fine-tuned for only a few epochs on purpose.
        if self._input is None and not self.trainer_.stop_training:
            self._warn_if_still_falling(history.get("val_loss", history.get("loss", [])))

    def _warn_if_still_falling(self, losses: Sequence[float]) -> None:
        if still_falls(losses):
            warn_user(
                f"The loss is still falling after {len(losses)} epochs. Increase epochs or"
                " learning_rate, or ignore this warning if the predictions are good enough.",
                ConvergenceWarning,
            )

    def _labels(self, y: Array) -> Array:
        return y

    def _target_scaling(
        self, y: Array, weights: Array | None, dtype: np.dtype[Any]
    ) -> Scaling | None:
        """Return the scaling of the outputs of a default network of the element type `dtype`."""
        return None

    def _unit_of_loss(self, loss: Loss) -> float:
        """Return the number by which the loss is divided in training."""
        return 1.0

    def _with_class_weights(self, y: Array, weights: Array | None) -> Array | None:
        """Return the weights of the rows multiplied by the weights of their classes."""
        return weights

    def _strata(self, y: Array) -> Array | None:
        return None

    _label_checks: Mapping[str, Any] = {}

    def _checks(self, fitted: bool) -> dict[str, Any]:
        """Return the arguments of scikit-learn's check of X. X must fit the model's input; for a
        default model, which does not exist yet, it must be float32 or float64.
        """
        if self._input is None:
            types = self._dtype if fitted else [np.float64, np.float32]
            return {"dtype": types, "accept_sparse": "csr"}
        return {
            "accept_sparse": "csr",
            "dtype": None if self._input.dtype.kind == "O" else self._input.dtype,
            "allow_nd": True,
        }

    def _predictions(self, X: Any) -> Array:
        """Return the output that has the loss, shape `(rows, width)`."""
        check_is_fitted(self, "trainer_")
        X = validate_data(self, X, reset=False, **self._checks(True))
        outputs = self.trainer_.predict(X, batch_size=ROWS_PER_PREDICTION)
        array: Array = outputs[self._output] if isinstance(outputs, dict) else outputs
        return array.reshape(X.shape[0], -1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # ------------------------------------------------------------------ pickling

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "trainer_" in state:
            state["trainer_"] = packed(self.trainer_)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "trainer_" in state:
            with_files = {name: state[name] for name in ("teacher", "quantization")}
            state = {**state, "trainer_": unpacked(state["trainer_"], with_files)}
        super().__setstate__(state)


def still_falls(losses: Sequence[float]) -> bool:
    """Return whether the loss was still falling in the last epochs.

    The mean of the last tenth of the epochs is compared with the mean of the tenth before. A fall
    counts if it is at least 1/50 of the whole fall, and at least 1e-4 of the first loss.
    """
    window = max(1, len(losses) // 10)
    if len(losses) < 2 * window:
        return False
    last = float(np.mean(losses[-window:]))
    fall = float(np.mean(losses[-2 * window : -window])) - last
    return fall > max(0.02 * (losses[0] - last), 1e-4 * abs(losses[0]))


def only_input(model: onnx.ModelProto) -> TensorSpec:
    """Return the spec of the only input. SettingError: the model has several inputs."""
    inputs = [spec_of(v) for v in normalize(model).graph.inputs]
    if len(inputs) != 1:
        raise SettingError(
            "The estimators of onnxfit.sklearn need a model with one input, but the inputs of this"
            f" model are {'; '.join(map(str, inputs))}. Use onnxfit.Trainer instead."
        )
    return inputs[0]


def only_output(loss: Losses, outputs: Mapping[str, TensorSpec]) -> tuple[str, Any]:
    """Return the output that is fitted to y, and the loss of that output.

    SettingError: the model has several outputs, and `loss` does not choose one.
    """
    if isinstance(loss, Mapping):
        if len(loss) != 1 or not set(loss) <= set(outputs):
            raise SettingError(
                f"loss must be a dict with exactly one output ({', '.join(outputs)}) and its loss,"
                f" got {dict(loss)!r}."
            )
        return next(iter(loss.items()))
    if len(outputs) != 1:
        floats = ", ".join(outputs) or "none"
        raise SettingError(
            "The estimators of onnxfit.sklearn fit one float output to y, but the float outputs of"
            f" the model are: {floats}. Choose one with loss={{name: loss}}."
        )
    return next(iter(outputs)), loss

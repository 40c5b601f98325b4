"""The estimator of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
from sklearn.base import RegressorMixin

from onnxfit.graph.dense import Scaling
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import (
    Elastic,
    Huber,
    LogCosh,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    Quantile,
    get_loss,
)
from onnxfit.sklearn.columns import standardization
from onnxfit.sklearn.estimator import OnnxEstimator

Array = npt.NDArray[Any]

# Losses of the difference between y and the output, and the power with which they grow.
DISTANCES: dict[type[Loss], int] = {
    Elastic: 2,
    Huber: 1,
    LogCosh: 1,
    MeanAbsoluteError: 1,
    MeanSquaredError: 2,
    Quantile: 1,
}


class OnnxRegressor(RegressorMixin, OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn estimator that fits an ONNX model to numbers, one or several a row.

    - `model`: a path, bytes or an `onnx.ModelProto` with one input. The model gets `X` unchanged,
      and training begins at its weights. None creates a default network of dense layers, in the
      element type of the data, with the weights `coefficients_0`, `intercepts_0`, and so on. The
      weights of a linear model begin at 0, others at random (Glorot and Bengio 2010).
    - `hidden_layer_sizes`: sizes of the hidden layers of a default network, each at least 1, with
      ReLU between them; `()` is a linear model.
    - `standardize`: let a default network scale its inputs by the mean and standard deviation of
      the features, and its outputs by those of the targets, so that units do not matter. The means
      and deviations of the first `fit` or `partial_fit` are constants of the network: predictions
      and the exported file use the original units. Outputs are scaled only for a loss that measures
      a distance (mean squared, mean absolute, Huber, log-cosh, quantile, elastic). The trainer
      divides this loss by the targets' deviation, or its square, and penalties are relative to the
      divided loss. Your own model is never scaled.
    - `weights`: names or patterns of the weights to train, as in `Trainer`; None for all.
    - `loss`: a name, a Loss or a function, as in `Trainer`; None is the mean squared error. A dict
      of one output name -> loss chooses between several outputs.
    - `penalty`: the cost of large weights, as in `Trainer`.
    - `optimizer`: as in `Trainer`; None is Adam with a learning rate of 0.001 for a default network
      with hidden layers, and of 0.01 for other models.
    - `learning_rate`: replaces the optimizer's learning rate, unless None; a number >= 0 or a
      Schedule.
    - `epochs`: number of iterations over the data in one `fit`.
    - `batch_size`: a number of rows; "auto" is 200, or all rows if there are fewer.
    - `early_stopping`: hold out `validation_fraction` of the rows, a number in (0, 1), stop after
      `n_iter_no_change` epochs without a better loss on them, and restore the best weights.
    - `validation_fraction`, `n_iter_no_change`: see `early_stopping`.
    - `callbacks`: callbacks for `Trainer.fit`; each fit uses shallow copies of them.
    - `warm_start`: let `fit` continue with the weights, optimizer and counters of the last `fit`.
    - `random_state`: a seed for the initial weights, the order of rows, the rows held out, and
      dropout.
    - `verbose`: 0 for silence, 1 for a progress bar, as in `Trainer.fit`.
    - `threads`: as in `Trainer`, but None is one thread for a default network with at most four
      million multiplications a batch, so that the fits of a search do not wait for each other.
    - `backend`, `gradient`, `device`, `teacher`, `quantization`, `adapters`: as in `Trainer`.

    Sample weights are relative to their mean: a weight of 2 counts like a repeated row. After `fit`
    the estimator has `trainer_`, `n_iter_` (epochs), `train_losses_` and `loss_curve_` (the loss of
    each epoch, in the units of `y`), `validation_losses_` (the same for rows held out, or passed as
    `X_val` and `y_val`), `n_features_in_`, and for tables `feature_names_in_`. A fitted
    estimator can be pickled. `fit` checks the settings, with the errors of `Trainer`. If the loss
    of a default network is still falling in the last epochs of a fit, scikit-learn's
    ConvergenceWarning is issued.

    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> line = OnnxRegressor(hidden_layer_sizes=(), learning_rate=0.1, random_state=0)
    >>> line = line.fit(X, 3000 * X[:, 0] + 1000)
    >>> line.predict([[2.0]]).round(), line.get_trained_onnx().graph.output[0].name
    (array([7000.]), 'predictions')
    """

    _label_checks: Mapping[str, Any] = {"multi_output": True, "y_numeric": True}

    def predict(self, X: Any) -> Array:
        """Return the predictions for the rows `X`: shape `(rows,)` if `y` had this shape, and
        otherwise `(rows, outputs)`.
        """
        predictions = self._predictions(X)
        return predictions[:, 0] if self._flat and predictions.shape[1] == 1 else predictions

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train for one more epoch on these rows, and return the estimator.

        - `X`, `y`, `sample_weight`: as in `fit`.
        """
        return self._fit(X, y, sample_weight, go_on=True, epochs=1)

    def _prepared(self, y: Array, go_on: bool, classes: Any) -> tuple[Array, int]:
        self._flat = y.ndim == 1
        return self._encoded(y), 1 if y.ndim == 1 else y.shape[1]

    def _encoded(self, y: Any) -> Array:
        dense: Array = y.toarray() if scipy.sparse.issparse(y) else y
        return dense

    def _objective(self, loss: Any, output: TensorSpec, probabilities: bool) -> Loss:
        return get_loss("mean_squared_error" if loss is None else loss)

    def _target_scaling(
        self, y: Array, weights: Array | None, dtype: np.dtype[Any]
    ) -> Scaling | None:
        loss = next(iter(self.loss.values()), None) if isinstance(self.loss, Mapping) else self.loss
        if type(get_loss("mean_squared_error" if loss is None else loss)) not in DISTANCES:
            return None
        return standardization(y.reshape(len(y), -1).astype(dtype), weights)

    def _unit_of_loss(self, loss: Loss) -> float:
        power = DISTANCES.get(type(loss))
        if power is None:
            return 1.0
        return float(self._target_scale**power)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

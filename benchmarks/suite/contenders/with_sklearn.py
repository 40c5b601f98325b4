"""scikit-learn's networks, and its linear regression by gradient descent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from workloads import Array, Job

from contenders.contender import Contender, Refused, first_losses, over


class Perceptron(Contender):
    """MLPClassifier and MLPRegressor, whose squared error is halved:

    SGD gets twice the learning rate.
    """

    def load(self) -> None:
        import sklearn.neural_network

        self.library = sklearn.neural_network
        warnings.simplefilter("ignore")  # it always warns of too few epochs

    def build(self, job: Job) -> None:
        if not job.workload.sizes:
            raise Refused("it has dense networks only")
        self.job = job
        self.estimator = self._estimator(1)
        x, y = self._batches()[0]
        self._begin(self.estimator, x, y)
        self.data = self._flat(*job.workload.data())

    def _flat(self, x: Array, y: Array) -> tuple[Array, Array]:
        return x, y if self.job.workload.classifies else y[:, 0]

    def _batches(self) -> list[tuple[Array, Array]]:
        return [self._flat(x, y) for x, y in self.job.workload.split()]

    def _estimator(self, epochs: int) -> Any:
        work = self.job.workload
        kind = self.library.MLPClassifier if work.classifies else self.library.MLPRegressor
        twice = 2 if self.job.optimizer == "sgd" and not work.classifies else 1
        return kind(
            hidden_layer_sizes=work.sizes[1:-1], activation="relu", solver=self.job.optimizer, alpha=0.0, batch_size=work.batch_size, momentum=0.0,
            nesterovs_momentum=False, learning_rate_init=twice * self.job.learning_rate, max_iter=epochs, n_iter_no_change=1 << 30, tol=0.0,
            warm_start=True, random_state=0,
        )  # fmt: skip

    def _begin(self, estimator: Any, x: Array, y: Array) -> None:
        """Give an estimator the job's weights, which it can take only once it has made its own."""
        work = self.job.workload
        estimator.partial_fit(
            x, y, **({"classes": np.arange(work.outputs[-1])} if work.classifies else {})
        )
        weights = self.job.weights()
        layers = sorted({name.split(".")[0] for name in weights}, key=int)
        estimator.coefs_ = [np.ascontiguousarray(weights[f"{layer}.weight"].T) for layer in layers]
        estimator.intercepts_ = [weights[f"{layer}.bias"].copy() for layer in layers]
        del estimator._optimizer  # it remembers the weights that it made

    def _step(self, x: Array, y: Array) -> float:
        self.estimator.partial_fit(x, y)
        loss: float = self.estimator.loss_
        return loss if self.job.workload.classifies else 2 * loss

    def losses(self) -> list[float]:
        return first_losses(self._step, self._batches())

    def step(self) -> Callable[[], object]:
        return over(self._step, self._batches())

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        """Without accuracy in training and without callbacks: it has neither."""
        self.estimator.set_params(max_iter=epochs)
        self.estimator.fit(*self.data)


class Linear(Contender):
    """SGDRegressor: one row at a time, so that its losses are others."""

    def load(self) -> None:
        import sklearn.linear_model

        self.library = sklearn.linear_model
        warnings.simplefilter("ignore")

    def build(self, job: Job) -> None:
        if job.workload.sizes[1:] != (1,) or job.optimizer != "sgd":
            raise Refused("linear regression by plain gradient descent is what it does")
        self.job = job
        # the sum of so many updates is about one of the batch
        rate = 2 * job.learning_rate / job.workload.batch_size
        self.estimator = self.library.SGDRegressor(
            penalty=None,
            learning_rate="constant",
            eta0=rate,
            tol=None,
            shuffle=True,
            random_state=0,
        )
        weights = job.weights()
        self.first = weights["0.weight"][0].astype(float), weights["0.bias"].astype(float)
        x, y = job.workload.data()
        self.data = x, y[:, 0]

    def losses(self) -> list[float]:
        x, y = self.job.workload.split()[0]
        self.estimator.partial_fit(x, y[:, 0])
        self.estimator.coef_[:], self.estimator.intercept_[:] = self.first

        def step(x: Array, y: Array) -> float:
            loss = float(np.mean((self.estimator.predict(x) - y[:, 0]) ** 2))
            self.estimator.partial_fit(x, y[:, 0])
            return loss

        return first_losses(step, self.job.workload.split())

    def step(self) -> Callable[[], object]:
        return over(
            self.estimator.partial_fit, [(x, y[:, 0]) for x, y in self.job.workload.split()]
        )

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        self.estimator.set_params(max_iter=epochs).fit(*self.data)

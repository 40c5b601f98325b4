"""The client of a federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.callback_list import as_list
from onnxfit.checks import check_arguments
from onnxfit.data.structure import split_validation_data
from onnxfit.errors import DataError, SettingError, listed_names
from onnxfit.flower.checks import checked_config, checked_weights
from onnxfit.flower.messages import (
    config_of,
    decoded,
    encoded,
    flower_module,
    only_arrays,
    reply,
)
from onnxfit.gradients.update import initial_slots
from onnxfit.graph import names
from onnxfit.runtime.backends import get_backend
from onnxfit.trainer import Trainer
from onnxfit.training.training import training_of

Array = npt.NDArray[Any]
Metrics = dict[str, float]

NUM_EXAMPLES = "num-examples"  # the key with which Flower's strategies weight a reply
# Added to the seed for each further round, so that every round draws other numbers. It is odd and
# large, so that clients whose seeds are close do not repeat each other's rounds.
SEED_STEP = 0x9E3779B97F4A7C15


class FlowerClient:
    """A client of a federation: it trains on its own data, from the weights of the server.

    `client` creates it. Each round starts from the weights that the server sent. The optimizer's
    slots, its step number and a schedule are reset, as is usual in federated learning: the result
    of a round depends only on the weights, the data, the server's settings and the seed. Each round
    has a different seed for the order of rows and for Dropout.

    The server can set these settings of a round, spelt with a hyphen or an underscore. Other
    settings are ignored and can be used by the application:

    - `epochs` or `local-epochs`, `batch-size`: as in `Trainer.fit`.
    - `learning-rate` or `lr`: a finite number >= 0, for this round. UnsupportedError if the
      optimizer follows a schedule.
    - `proximal-mu`: the factor of FedProx, a finite number >= 0. FedProx adds `mu * (w - w0)` to
      the gradient of each trained weight `w`, where `w0` is its value at the beginning of the
      round. It needs `Trainer(..., backend="forward_backward")`. The reported loss does not include
      this term.
    - `server-round`: the number of the round, from 1.

    The client accepts only arrays from a server: exactly the trainer's weights and running
    statistics, in their shapes and element types, without NaN and infinity. They may also be
    float64 if their values fit. Anything else is a DataError, and the trainer does not change.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Any,
        validation_data: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        **fit_arguments: Any,
    ) -> None:
        """Create a client; the function `client` describes `trainer`, `data`, `validation_data`,
        `epochs`, `batch_size` and the other arguments, `fit_arguments`.
        """
        for name, array in trainer.get_weights(copy=False).items():
            if array.dtype.isbuiltin != 1:
                raise SettingError(
                    f"Flower sends arrays of NumPy's own types only, but {name!r} has type"
                    f" {array.dtype}. Use a model in float32."
                )
        self.trainer = trainer
        self._data = split_validation_data(data)
        self._validation_data = validation_data
        self._settings = checked_config({"epochs": epochs, "batch_size": batch_size}, "client")
        self._fit_arguments = fit_arguments
        self._seed = trainer.seed
        has_schedule = callable(trainer.optimizer.settings.learning_rate)
        self._learning_rate = None if has_schedule else trainer.learning_rate
        self._rounds = 0
        self._validation_rows: int | None = None

    # ------------------------------------------------------------------ without Flower

    def train_round(
        self, weights: Mapping[str, Any], config: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Array], int, Metrics]:
        """Train from `weights`; return the new weights, the number of rows, and the metrics.

        - `weights`: name -> array, as `Trainer.get_weights` returns them.
        - `config`: the server's settings of this round.

        The number of rows is counted over one epoch. The metrics are the loss and the metrics of
        the last epoch, as floats. `train` calls this method with the contents of a Flower message.
        """
        trainer = self.trainer
        settings = {**self._settings, **checked_config(config or {}, "server")}
        arrays = checked_weights(weights, trainer.get_weights(copy=False))
        callbacks = as_list(self._fit_arguments.get("callbacks", ()))
        if settings.get("proximal_mu"):
            callbacks = [*callbacks, _ProximalTerm(trainer, settings["proximal_mu"], arrays)]
        self._rounds = settings.get("round", self._rounds + 1)
        self._begin_round(arrays, settings.get("learning_rate"))
        before = trainer.samples_seen
        trainer.seed = (self._seed + (self._rounds - 1) * SEED_STEP) % 2**63
        if self._rounds == 1:
            trainer.seed = self._seed
        x, y, sample_weight = self._data
        try:
            history = trainer.fit(
                x,
                y,
                sample_weight,
                **{
                    "verbose": 0,
                    **self._fit_arguments,
                    "epochs": settings["epochs"],
                    "batch_size": settings["batch_size"],
                    "callbacks": callbacks,
                },
            )
        finally:
            trainer.seed = self._seed
        rows = (trainer.samples_seen - before) // max(len(history.epoch), 1)
        if not rows:
            raise DataError("The training data of this client is empty: it gave no batches.")
        figures = {name: values[-1] for name, values in history.history.items() if values}
        return trainer.get_weights(), rows, _floats(figures)

    def evaluate_round(
        self, weights: Mapping[str, Any], config: Mapping[str, Any] | None = None
    ) -> tuple[int, Metrics]:
        """Evaluate `weights` on the validation data; return its number of rows, and the metrics.

        - `weights`, `config`: as in `train_round`; of the settings, only the batch size is used.

        SettingError: the client has no validation data.
        """
        settings = {**self._settings, **checked_config(config or {}, "server")}
        if self._validation_data is None:
            raise SettingError(
                "The server asked this client to evaluate, but the client has no validation data."
                " Pass client(..., validation_data=(x, y)), or turn off evaluation on the server:"
                " FedAvg(fraction_evaluate=0.0)."
            )
        self.trainer.set_weights(checked_weights(weights, self.trainer.get_weights(copy=False)))
        x, y, sample_weight = split_validation_data(self._validation_data)
        batch_size = settings["batch_size"]
        figures = self.trainer.evaluate(x, y, sample_weight, batch_size=batch_size)
        if self._validation_rows is None:
            self._validation_rows = self._count_rows(x, y, sample_weight, batch_size)
        return self._validation_rows, _floats(figures)

    def _begin_round(self, weights: Mapping[str, Array], learning_rate: float | None) -> None:
        """Set the weights, and reset the optimizer to its state before the first update."""
        trainer = self.trainer
        if learning_rate is not None:
            trainer.learning_rate = learning_rate  # raises its errors before anything changes
        recipe = training_of(trainer).recipe
        slots = {
            names.slot(name, slot): value
            for name, one in recipe.optimizers.items()
            for slot, value in initial_slots(one.optimizer, name, weights[name]).items()
        }
        slots |= recipe.loss_scale
        state = trainer.get_state()
        rate = self._learning_rate if learning_rate is None else learning_rate
        counters = {**state["counters"], "epoch": 0, "global_step": 0, "window": 0}
        counters["learning_rate"] = rate
        counters.pop("first_step", None)
        trainer.set_state({"weights": weights, "slots": slots, "counters": counters})

    def _count_rows(self, x: Any, y: Any, sample_weight: Any, batch_size: int) -> int:
        training = training_of(self.trainer)
        with training.source(x, y, sample_weight, batch_size, "evaluation") as source:
            if source.rows is not None:
                return source.rows
            return sum(batch.rows for batch in source.batches(0))

    # ------------------------------------------------------------------ with Flower

    def train(self, message: Any) -> Any:
        """Train for a `message` of Flower, and return the reply.

        The reply has the weights under the key of the message's arrays, and "metrics" with
        `num-examples`, the number of rows. DataError: the message does not have exactly one
        ArrayRecord.
        """
        key, record = only_arrays(message)
        arrays = decoded(record, self.trainer.get_weights(copy=False))
        weights, rows, metrics = self.train_round(arrays, config_of(message))
        return reply(
            message,
            {NUM_EXAMPLES: rows, **metrics},
            {key: encoded({name: weights[name] for name in record})},
        )

    def evaluate(self, message: Any) -> Any:
        """Evaluate on the validation data for a `message` of Flower, and return the reply.

        The reply has "metrics" with `num-examples`, the number of rows. The errors are the same as
        of `train` and `evaluate_round`.
        """
        _, record = only_arrays(message)
        arrays = decoded(record, self.trainer.get_weights(copy=False))
        rows, metrics = self.evaluate_round(arrays, config_of(message))
        return reply(message, {NUM_EXAMPLES: rows, **metrics}, {})

    def to_client(self) -> Any:
        """Return this client as a `flwr.client.Client`, for the `client_fn` of older applications.

        There, weights have no names: they are a list in the order of `Trainer.get_weights`.
        """
        numpy_client: Any = flower_module("client").NumPyClient
        return type("OnnxfitNumPyClient", (_ListMethods, numpy_client), {})(self).to_client()


class _ListMethods:
    """The methods of Flower's NumPyClient."""

    def __init__(self, owner: FlowerClient) -> None:
        self._owner = owner

    def get_parameters(self, config: Mapping[str, Any]) -> list[Array]:
        return list(self._owner.trainer.get_weights().values())

    def fit(
        self, parameters: Sequence[Array], config: Mapping[str, Any]
    ) -> tuple[list[Array], int, Metrics]:
        weights, rows, metrics = self._owner.train_round(self._named(parameters), config)
        return list(weights.values()), rows, metrics

    def evaluate(
        self, parameters: Sequence[Array], config: Mapping[str, Any]
    ) -> tuple[float, int, Metrics]:
        rows, metrics = self._owner.evaluate_round(self._named(parameters), config)
        return metrics.pop("loss"), rows, metrics

    def _named(self, parameters: Sequence[Array]) -> dict[str, Array]:
        known = list(self._owner.trainer.get_weights(copy=False))
        if len(parameters) != len(known):
            raise DataError(
                f"The server sent {len(parameters)} arrays. Expected {len(known)}, in the order of"
                f" get_weights: {listed_names(known)}."
            )
        return dict(zip(known, parameters))


class _ProximalTerm(Callback):
    """Callback of FedProx: it adds `mu * (w - w0)` to the gradients; `w0` are server weights."""

    def __init__(self, trainer: Trainer, mu: float, weights: Mapping[str, Array]) -> None:
        if not get_backend(trainer.backend).shows_gradients:
            raise SettingError(
                f"The server asked for FedProx with proximal-mu={mu:g}, which changes gradients,"
                f" but gradients cannot be changed with backend={trainer.backend!r}. Use"
                " Trainer(..., backend='forward_backward')."
            )
        self._mu = mu
        self._start = weights

    def on_gradients(self, gradients: dict[str, Array]) -> None:
        weights = self.trainer.get_weights()
        for name, gradient in gradients.items():
            gradient += self._mu * (weights[name] - self._start[name])


@check_arguments
def client(
    trainer: Trainer,
    data: Any,
    validation_data: Any = None,
    *,
    epochs: int = 1,
    batch_size: int = 32,
    steps_per_epoch: int | None = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | str | None = None,
    callbacks: Callback | Iterable[Callback] | None = (),
    verbose: int | str = 0,
) -> FlowerClient:
    """Return a client for Flower that trains `trainer` on `data`, from the server's weights.

    - `trainer`: its `weights=` select the weights that are exchanged, together with the running
      statistics that its steps update. All other weights stay in each client's file. The server and
      all clients need the same model, `weights=` and `batch_norm=`.
    - `data`: `(x, y)`, `(x, y, sample_weight)`, or a loader as for `Trainer.fit`. It is never sent.
    - `validation_data`: data of the same form, for the evaluations that the server requests.
    - `epochs`, `batch_size`: settings of one round, unless the server sets them.
    - `steps_per_epoch`, `shuffle`, `class_weight`, `callbacks`, `verbose`: as in `Trainer.fit`.

    SettingError: an argument is impossible, or a weight has a type that NumPy lacks (bfloat16).

    >>> import numpy as np, onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {0}>
    ...     { y = MatMul(x, slope) }''')
    >>> x = np.ones((4, 1), np.float32)
    >>> first = client(Trainer(model, loss="mse", optimizer=0.25), (x, 2 * x))
    >>> weights, rows, metrics = first.train_round({"slope": np.zeros((1, 1), np.float32)})
    >>> weights["slope"].item(), rows, metrics["loss"]
    (1.0, 4, 4.0)
    """
    return FlowerClient(
        trainer,
        data,
        validation_data,
        epochs=epochs,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        shuffle=shuffle,
        class_weight=class_weight,
        callbacks=as_list(callbacks),
        verbose=verbose,
    )


def _floats(figures: Mapping[str, Any]) -> Metrics:
    """Return the figures that are numbers, as Python floats, because Flower sends only these."""
    return {name: float(value) for name, value in figures.items() if np.ndim(value) == 0}

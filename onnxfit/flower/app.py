"""A ClientApp of Flower, and the arrays of its server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from onnxfit.flower.checks import checked_weights
from onnxfit.flower.federated_client import FlowerClient
from onnxfit.flower.messages import decoded, encoded, flower_module
from onnxfit.trainer import Trainer


def client_app(make_client: Callable[[Any], FlowerClient], *, mods: Iterable[Any] = ()) -> Any:
    """Return a `flwr.clientapp.ClientApp` that trains and evaluates with your client.

    - `make_client`: a function from Flower's `Context` to a FlowerClient. The entry
      `context.node_config["partition-id"]` identifies the client of a simulation. The function is
      called for each message, often in another process, because a Trainer cannot be sent there.
    - `mods`: modifiers of Flower for the messages that train, such as those of differential privacy
      and of secure aggregation.

    InstallationError: Flower is not installed.

        app = onnxfit.flower.client_app(make_client)
    """
    app = flower_module("clientapp").ClientApp()

    @app.train(mods=list(mods))  # type: ignore[untyped-decorator, unused-ignore]  # where Flower is installed
    def train(message: Any, context: Any) -> Any:
        return make_client(context).train(message)

    @app.evaluate()  # type: ignore[untyped-decorator, unused-ignore]
    def evaluate(message: Any, context: Any) -> Any:
        return make_client(context).evaluate(message)

    return app


def get_arrays(trainer: Trainer) -> Any:
    """Return the weights and running statistics of `trainer` as a `flwr.app.ArrayRecord`.

    Use them as the `initial_arrays` of a strategy. InstallationError: Flower is not installed.
    """
    return encoded(trainer.get_weights())


def set_arrays(trainer: Trainer, arrays: Any) -> None:
    """Set the weights of `trainer` to `arrays`, the ArrayRecord of a strategy's result.

    Then `trainer.export("trained.onnx")` writes the model. DataError, before anything changes: the
    arrays do not match the weights of `trainer`.
    """
    own = trainer.get_weights(copy=False)
    trainer.set_weights(checked_weights(decoded(arrays, own), own))

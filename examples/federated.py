"""Three clients train one classifier with Flower, and none of them shows its data to anyone.

    pip install "onnxfit[flower]" "flwr[simulation]"
    python examples/federated.py

The points lie on three arms of a spiral, one for each class, and each client has hardly any points
of two classes. Flower's simulation runs the server and the clients in processes of their own.
First, one round with a single step of SGD is compared with the same step on all points. Then 20
rounds train the model. The current folder then has points.onnx (untrained) and federated.onnx. The
example ends with an error if the step differs by more than 1e-6, or if federated.onnx has an
accuracy below 97 %.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import onnx
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from models import dense

import onnxfit
import onnxfit.flower

CLIENTS = 3
ROUNDS = 20
POINTS = 600  # of each class
SHARE = 0.98  # of the points of a class, which one client has; the others share the rest
WANTED_DIFFERENCE = 1e-6
WANTED_ACCURACY = 0.97


def points(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points on three arms of a spiral, and the numbers of their arms."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLIENTS), POINTS)
    radius = rng.uniform(0.3, 2, len(labels))
    angle = 2 * np.pi * labels / CLIENTS + 1.5 * radius + rng.normal(size=len(labels)) * 0.15
    xy = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return xy.astype(np.float32), labels


def rows_of(client: int, labels: np.ndarray) -> np.ndarray:
    """Return the numbers of the points that a client has: most are of the class of its number."""
    rng = np.random.default_rng(2)
    others = (labels + rng.integers(1, CLIENTS, len(labels))) % CLIENTS
    return np.flatnonzero(np.where(rng.random(len(labels)) < SHARE, labels, others) == client)


def new_trainer() -> onnxfit.Trainer:
    return onnxfit.Trainer(
        "points.onnx",
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.SGD(0.1, momentum=0.9),
        metrics=["accuracy"],
        threads=1,  # the clients of a simulation share the machine
    )


def make_client(context: Any) -> onnxfit.flower.FlowerClient:
    client = int(context.node_config["partition-id"])
    (x, y), (x_new, y_new) = points(seed=0), points(seed=1)
    own, own_new = rows_of(client, y), rows_of(client, y_new)
    return onnxfit.flower.client(
        new_trainer(), (x[own], y[own]), validation_data=(x_new[own_new], y_new[own_new])
    )


def simulate(rounds: int, **config: Any) -> tuple[onnxfit.Trainer, Any]:
    """Run the federation; return a trainer with the final weights, and the strategy's result."""
    server_app = ServerApp()
    trainer, results = new_trainer(), []

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        # With the default of 2, the first round may begin before all clients are there.
        strategy = FedAvg(
            min_train_nodes=CLIENTS, min_evaluate_nodes=CLIENTS, min_available_nodes=CLIENTS
        )
        result = strategy.start(
            grid,
            onnxfit.flower.get_arrays(trainer),
            num_rounds=rounds,
            train_config=ConfigRecord(config),
            evaluate_fn=evaluate,
        )
        results.append(result)

    def evaluate(server_round: int, arrays: Any) -> MetricRecord:
        """Evaluate the average on all new points, which only a server with data of its own can."""
        onnxfit.flower.set_arrays(trainer, arrays)
        return MetricRecord(trainer.evaluate(*points(seed=1)))

    run_simulation(server_app, onnxfit.flower.client_app(make_client), num_supernodes=CLIENTS)
    if not results:
        sys.exit("federated: the simulation failed")
    onnxfit.flower.set_arrays(trainer, results[0].arrays)
    return trainer, results[0]


def accuracy_of(model: str | onnxfit.Trainer) -> float:
    """Return the accuracy of a file, or of a trainer, on new points."""
    if isinstance(model, str):
        model = onnxfit.Trainer(model, loss="cross_entropy", metrics=["accuracy"])
    return model.evaluate(*points(seed=1))["accuracy"]


def main() -> None:
    onnx.save(dense(2, 32, CLIENTS), "points.onnx")
    x, y = points(seed=0)
    for client in range(CLIENTS):
        own, alone = rows_of(client, y), new_trainer()
        alone.fit(x[own], y[own], epochs=2 * ROUNDS, verbose=0)
        counts = np.bincount(y[own], minlength=CLIENTS)
        print(
            f"client {client}           {counts} points, {accuracy_of(alone):.2%} if it trains alone"
        )

    # The first step of SGD with momentum is that of plain SGD.
    central = new_trainer()
    central.fit(x, y, batch_size=len(x), verbose=0)
    federated, _ = simulate(1, epochs=1, **{"batch-size": len(x)})
    ours, theirs = federated.get_weights(), central.get_weights()
    difference = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    print(f"largest difference {difference:.1e} between one round and one step on all points")

    federated, result = simulate(ROUNDS, epochs=2, **{"batch-size": 32})
    for server_round, metrics in result.evaluate_metrics_serverapp.items():
        if server_round % 5 == 0:
            print(f"round {server_round:2}           {metrics['accuracy']:.2%}")
    clients = result.evaluate_metrics_clientapp[ROUNDS]["accuracy"]
    federated.export("federated.onnx")
    accuracy = accuracy_of("federated.onnx")
    print(
        f"accuracy           {accuracy:.2%} of federated.onnx; {clients:.2%} on the clients' data"
    )
    if not difference < WANTED_DIFFERENCE:
        sys.exit("federated: one round is not one step")
    if not accuracy > WANTED_ACCURACY:
        sys.exit("federated: training fell short")


if __name__ == "__main__":
    main()

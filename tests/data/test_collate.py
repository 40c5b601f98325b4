"""Samples of different sizes in a DataLoader, collated as in PyTorch, and graph networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import DataError, DataLoader, SettingError, Trainer
from onnxfit.callbacks import LambdaCallback
from tests.distributed.threads import on_ranks

RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 8))
V = RNG.normal(size=(8, 3))


def network() -> onnx.ModelProto:
    """A layer of messages along edges, and the sum of each graph's nodes."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        molecules (double[nodes, 4] x, int64[2, edges] edges, double[graphs, nodes] member)
          => (double[graphs, 3] y) <int64 zero = {0}, int64 one = {1}, int64[1] last = {1}>
        { s = Gather(edges, zero)  t = Gather(edges, one)
          h = MatMul(x, w)  m = Gather(h, s)  shape = Shape(m)
          rows = Unsqueeze(t, last)  index = Expand(rows, shape)
          sum = ScatterElements<axis = 0, reduction = "add">(h, index, m)
          r = Tanh(sum)  pooled = MatMul(member, r)  y = MatMul(pooled, v) }"""
    )
    for name, array in {"w": W, "v": V}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def graph_of(size: int) -> tuple[np.ndarray, np.ndarray, int]:
    edges = RNG.integers(0, size, (2, 2 * size))
    return RNG.normal(size=(size, 4)), edges, int(RNG.integers(0, 3))


GRAPHS = [graph_of(int(size)) for size in RNG.integers(2, 7, 22)]


def collate(graphs: list[Any]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    sizes = [len(x) for x, _, _ in graphs]
    first = np.cumsum([0, *sizes[:-1]])
    member = np.repeat(np.eye(len(graphs)), sizes, axis=1)
    edges = np.concatenate([e + n for (_, e, _), n in zip(graphs, first)], axis=1)
    x = {"x": np.concatenate([x for x, _, _ in graphs]), "edges": edges, "member": member}
    return x, np.array([label for _, _, label in graphs])


AXES = {"x": None, "edges": None}


def trainer(**settings: Any) -> Trainer:
    return Trainer(network(), loss="cross_entropy", optimizer=0.1, batch_axes=AXES, **settings)


def loader(**settings: Any) -> DataLoader:
    return DataLoader(GRAPHS, collate=collate, **{"batch_size": 5, **settings})


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_graphs_train_as_in_torch(backend: str) -> None:
    torch = pytest.importorskip("torch")
    w, v = (torch.tensor(a, requires_grad=True) for a in (W, V))
    optimizer = torch.optim.SGD([w, v], lr=0.1)
    for _ in range(2):
        for start in range(0, len(GRAPHS), 5):
            x, y = collate(GRAPHS[start : start + 5])
            nodes, edges = torch.tensor(x["x"]) @ w, torch.tensor(x["edges"])
            nodes = nodes.index_add(0, edges[1], nodes[edges[0]]).tanh()
            output = torch.tensor(x["member"]) @ nodes @ v
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(output, torch.tensor(y)).backward()
            optimizer.step()
    ours = trainer(backend=backend)
    ours.fit(loader(shuffle=False), epochs=2, verbose=0)
    for name, weight in {"w": w, "v": v}.items():
        np.testing.assert_allclose(ours.get_weights()[name], weight.detach(), rtol=1e-9)


def test_every_sample_comes_once_in_an_order_of_the_seed() -> None:
    def seen(seed: int) -> list[list[int]]:
        batches = DataLoader(range(7), batch_size=3, seed=seed, collate=lambda items: (items,))
        return [list(items) for (items,) in batches]

    assert seen(0) == seen(0) != seen(1)
    assert sorted(number for batch in seen(0) for number in batch) == list(range(7))
    assert len(DataLoader(range(7), batch_size=3, drop_last=True, collate=tuple)) == 2


def test_evaluation_and_prediction_keep_the_order() -> None:
    ours = trainer()
    whole = collate(GRAPHS)
    predicted = ours.predict(whole[0])
    np.testing.assert_allclose(ours.predict(loader()), predicted, rtol=1e-12)
    assert ours.evaluate(loader())["loss"] == pytest.approx(ours.evaluate(*whole)["loss"])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fit_resumes_in_the_middle_of_an_epoch(tmp_path: Path, prefetch: int) -> None:
    whole, begun = trainer(), trainer()
    whole.fit(loader(prefetch=prefetch), epochs=3, verbose=0)

    def stop(batch: int, logs: Any) -> None:
        if begun.global_batch == 7:
            begun.save(tmp_path / "c")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun.fit(loader(prefetch=prefetch), epochs=3, verbose=0,
                  callbacks=[LambdaCallback(on_train_batch_end=stop)])  # fmt: skip
    resumed = Trainer.load(tmp_path / "c")
    resumed.fit(loader(prefetch=prefetch), epochs=3, verbose=0)
    # Other sizes may run in another graph, whose rounding differs.
    for name, figures in whole.history.history.items():
        np.testing.assert_allclose(resumed.history.history[name], figures, rtol=1e-12)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_ranks_collate_their_own_samples(backend: str) -> None:
    def fit(communicator: Any = None) -> Any:
        ours = trainer(distribute=communicator, backend=backend)
        ours.fit(loader(), epochs=2, verbose=0)
        return ours.history.history["loss"], ours.get_weights()

    losses, weights = fit()
    for found, own in on_ranks(2, fit):
        np.testing.assert_allclose(found, losses, rtol=1e-9)
        for name, array in weights.items():
            np.testing.assert_allclose(own[name], array, rtol=1e-8)


def test_an_edge_list_is_found_by_its_sizes() -> None:
    """Sizes of different names are no rows: an array of them passes to each batch as it is."""
    model = network()
    del model.graph.input[2]
    del model.graph.node[-2:]
    model.graph.node.append(onnx.helper.make_node("MatMul", ["r", "v"], ["y"]))
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "nodes"
    nodes = Trainer(model, loss="cross_entropy")
    assert "no axis of x, edges" in nodes.summary()
    x, edges, _ = graph_of(6)
    assert np.isfinite(
        nodes.fit({"x": x, "edges": edges}, np.arange(6) % 3, verbose=0).history["loss"]
    )


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(SettingError, match="Pass pairs"):
        DataLoader(GRAPHS, np.zeros(22), collate=collate)
    with pytest.raises(DataError, match="at least one sample"):
        DataLoader([], collate=collate)
    with pytest.raises(DataError, match="at least one sample"):
        DataLoader(iter(GRAPHS), collate=collate)
    with pytest.raises(SettingError, match="to be a function"):
        DataLoader(GRAPHS, collate=3)
    with pytest.raises(SettingError, match="collate"):
        DataLoader(GRAPHS, collate_fn=collate)

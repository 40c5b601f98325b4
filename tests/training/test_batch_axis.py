"""Networks whose batch is not the first axis train as the same networks with the batch first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import DataError, OnnxfitError, SettingError
from onnxfit.losses import CrossEntropy
from tests.cli.helpers import done

BACKENDS = ["full", "forward_backward", "in_place"]
RNG = np.random.default_rng(0)
ROWS, TIME = 20, 6
X = RNG.standard_normal((ROWS, TIME, 4)).astype(np.float32)
H = RNG.standard_normal((1, ROWS, 5)).astype(np.float32)
LABELS = RNG.integers(0, 3, (ROWS, TIME))
WEIGHTS = RNG.uniform(0.5, 2, ROWS)

BODY = "a, hn = GRU<hidden_size = 5>(steps, W, R, , , h)  row = Squeeze(a, one)"
AFTER = "<int64[1] one = {1}>"

# (inputs, outputs, nodes before the GRU, nodes after it): the first has the batch first everywhere
FORMS = {
    "batch first": (
        f"float[batch, {TIME}, 4] x, float[batch, 1, 5] h0",
        f"float[batch, {TIME}, 3] y",
        "steps = Transpose<perm = [1, 0, 2]>(x)  h = Transpose<perm = [1, 0, 2]>(h0)",
        "z = MatMul(row, v)  y = Transpose<perm = [1, 0, 2]>(z)",
    ),
    "time-major output": (
        f"float[batch, {TIME}, 4] x, float[batch, 1, 5] h0",
        f"float[{TIME}, batch, 3] y",
        "steps = Transpose<perm = [1, 0, 2]>(x)  h = Transpose<perm = [1, 0, 2]>(h0)",
        "y = MatMul(row, v)",
    ),
    "state": (
        f"float[N, {TIME}, 4] x, float[1, N, 5] h0",
        f"float[N, {TIME}, 3] y, float[1, N, 5] hn",
        "steps = Transpose<perm = [1, 0, 2]>(x)  h = Identity(h0)",
        "z = MatMul(row, v)  y = Transpose<perm = [1, 0, 2]>(z)",
    ),
    "time-major everywhere": (
        "float[T, batch, 4] x, float[1, batch, 5] h0",
        "float[T, batch, 3] y, float[1, batch, 5] hn",
        "steps = Identity(x)  h = Identity(h0)",
        "y = MatMul(row, v)",
    ),
    "batch last": (
        f"float[4, {TIME}, batch] x, float[1, batch, 5] h0",
        f"float[3, {TIME}, batch] y",
        "steps = Transpose<perm = [1, 2, 0]>(x)  h = Identity(h0)",
        "z = MatMul(row, v)  y = Transpose<perm = [2, 0, 1]>(z)",
    ),
}
# name -> axes of x, h0 and y in the order of the first form
ORDER = {
    "batch first": ((0, 1, 2), (0, 1, 2), (0, 1, 2)),
    "time-major output": ((0, 1, 2), (0, 1, 2), (1, 0, 2)),
    "state": ((0, 1, 2), (1, 0, 2), (0, 1, 2)),
    "time-major everywhere": ((1, 0, 2), (1, 0, 2), (1, 0, 2)),
    "batch last": ((2, 1, 0), (1, 0, 2), (2, 1, 0)),
}
MOVED = [name for name in FORMS if name != "batch first"]


def network(form: str) -> onnx.ModelProto:
    inputs, outputs, before, after = FORMS[form]
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g ({inputs}) => ({outputs}) {AFTER} {{ {before}  {BODY}  {after} }}"""
    )
    rng = np.random.default_rng(1)
    for name, shape in {"W": (1, 15, 4), "R": (1, 15, 5), "v": (5, 3)}.items():
        model.graph.initializer.append(from_array(rng.normal(size=shape).astype("f"), name))
    return model


def new(form: str, **settings: Any) -> Trainer:
    settings = {"optimizer": onnxfit.optimizers.SGD(0.1, momentum=0.9), **settings}
    loss = {"y": CrossEntropy(axis=1 if form == "batch last" else 2)}
    return Trainer(network(form), loss=loss, **settings)


def data(form: str, rows: slice = slice(None)) -> dict[str, np.ndarray[Any, Any]]:
    """The same rows in the layout of a file."""
    x, h, _ = ORDER[form]
    return {"x": X[rows].transpose(x), "h0": H[:, rows].transpose(1, 0, 2).transpose(h)}


def of(outputs: Any) -> Any:
    return outputs["y"] if isinstance(outputs, dict) else outputs


def assert_equal_weights(a: Trainer, b: Trainer) -> None:
    """Equal up to rounding: a Transpose may change the order of a sum."""
    for name, weight in a.get_weights().items():
        np.testing.assert_allclose(weight, b.get_weights()[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", MOVED)
def test_training_is_that_of_the_network_with_the_batch_first(form: str, backend: str) -> None:
    fits = []
    for name in ("batch first", form):
        metrics = [] if form == "batch last" else ["accuracy"]  # whose classes are on the last axis
        trainer = new(name, backend=backend, metrics=metrics)
        history = trainer.fit(
            data(name), LABELS, WEIGHTS, epochs=2, batch_size=8, validation_split=0.3, verbose=0
        )
        fits.append((trainer, history.history))
    (reference, expected), (trainer, found) = fits
    for key in found:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, err_msg=key)
    assert_equal_weights(reference, trainer)


@pytest.mark.parametrize("form", FORMS)
def test_predictions_have_the_layout_of_the_file(form: str) -> None:
    """In one batch, in several and one by one, they are what onnxruntime computes."""
    trainer = new(form)
    session = onnxruntime.InferenceSession(trainer.export().SerializeToString())
    names = [value.name for value in session.get_outputs()]
    expected = dict(zip(names, session.run(None, data(form))))
    for size in (ROWS, 8, 1):
        found = trainer.predict(data(form), batch_size=size)
        found = found if isinstance(found, dict) else {"y": found}
        assert found.keys() == expected.keys()
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6)
    one = of(trainer.predict_on_batch(data(form)))
    np.testing.assert_allclose(one, expected["y"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_an_evaluation_is_exact_for_any_batch_size(form: str) -> None:
    trainer = new(form)
    losses = [
        trainer.evaluate(data(form), LABELS, WEIGHTS, batch_size=size)["loss"]
        for size in (ROWS, TIME, 8, 1)
    ]
    np.testing.assert_allclose(losses, new("batch first").evaluate(
        data("batch first"), LABELS, WEIGHTS)["loss"], rtol=1e-5)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_loader_gives_batches_in_the_layout_of_the_file(form: str) -> None:
    slices = [slice(0, 8), slice(8, 16), slice(16, 20)]
    by_batch, by_array = new(form), new(form)
    batches = [(data(form, rows), LABELS[rows]) for rows in slices]
    by_batch.fit(batches, shuffle=False, verbose=0)
    by_array.fit(data(form), LABELS, batch_size=8, shuffle=False, verbose=0)
    single = new(form)
    for x, y in batches:
        single.train_on_batch(x, y)
    for trainer in (by_array, single):
        for name, weight in by_batch.get_weights().items():
            assert np.array_equal(weight, trainer.get_weights()[name])


def test_arrays_on_disk_may_have_the_batch_on_another_axis(tmp_path: Path) -> None:
    form = "time-major everywhere"
    for name, array in data(form).items():
        np.save(tmp_path / f"{name}.npy", array)
    paths = {name: tmp_path / f"{name}.npy" for name in ("x", "h0")}
    on_disk, in_memory = new(form), new(form)
    on_disk.fit(paths, LABELS, batch_size=8, verbose=0)
    in_memory.fit(data(form), LABELS, batch_size=8, verbose=0)
    for name, weight in on_disk.get_weights().items():
        assert np.array_equal(weight, in_memory.get_weights()[name])


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_resumes_exactly(form: str, tmp_path: Path) -> None:
    whole, first = new(form), new(form)
    whole.fit(data(form), LABELS, epochs=2, batch_size=8, verbose=0)

    class Stop(onnxfit.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 1:
                self.trainer.save(tmp_path / "c")
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.fit(data(form), LABELS, epochs=2, batch_size=8, verbose=0, callbacks=[Stop()])
    second = Trainer.load(tmp_path / "c")
    history = second.fit(data(form), LABELS, epochs=2, batch_size=8, verbose=0)
    assert history.history["loss"] == whole.history.history["loss"]
    for name, weight in whole.get_weights().items():
        assert np.array_equal(weight, second.get_weights()[name])


@pytest.mark.parametrize("form", MOVED)
def test_passes_by_hand_have_the_layout_of_the_file(form: str) -> None:
    gradient = RNG.standard_normal((ROWS, TIME, 3)).astype(np.float32)
    results = {}
    for name in ("batch first", form):
        trainer = new(name, backend="forward_backward")
        outputs = trainer.forward(data(name))
        inference = trainer.forward(data(name), training=False)
        np.testing.assert_allclose(of(outputs), of(inference), rtol=1e-5, atol=1e-6)
        order = ORDER[name][2]
        np.testing.assert_allclose(of(outputs), of(trainer.predict(data(name))), 1e-4, 1e-6)
        arriving: Any = {"y": gradient.transpose(order)}
        if isinstance(outputs, dict):
            arriving["hn"] = None
        with pytest.raises(DataError, match="must be float32"):
            trainer.backward({**arriving, "y": gradient[:, :, :2].transpose(order)})
        results[name] = trainer.backward(arriving)
    expected, found = results.values()
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, rtol=1e-4, atol=1e-5)
    for name, place in (("x", 0), ("h0", 1)):
        in_form = expected["inputs"][name].transpose(ORDER[form][place])
        np.testing.assert_allclose(found["inputs"][name], in_form, rtol=1e-4, atol=1e-5)


def test_the_summary_and_inspect_say_which_axis_is_the_batch() -> None:
    expected = ["axis 1 of x, h0, y, hn: the size 'batch'"]
    trainer = new("time-major everywhere")
    assert f"batch      {expected[0]}" in trainer.summary().splitlines()
    assert f"input      x: float32[T, batch, 4]" in trainer.summary().splitlines()  # noqa: F541
    assert "output     y: float32[T, batch, 3]" in trainer.summary().splitlines()
    assert trainer.inspect().batch_axes == (*expected,)
    report = onnxfit.inspect(network("time-major everywhere"))
    assert report.batch_axes == (*expected,)
    assert f"Batch: {expected[0]}." in str(report).splitlines()
    assert [spec.batch_axis for spec in trainer.inputs] == [1, 1]


def test_a_size_may_have_any_name() -> None:
    """The name "{0}" raised an error of `str.format`."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }"""
    )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "{0}{x.y}"
    assert onnxfit.inspect(model).batch_axes == ("axis 0 of x, y: the size '{0}{x.y}'",)


def test_the_command_line_predicts_in_the_layout_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    form = "time-major everywhere"
    onnx.save(network(form), "m.onnx")
    np.savez("d.npz", **data(form))
    done("predict", "m.onnx", "--data", "d.npz", "-b", "8", "-o", "p.npz")
    found, expected = np.load("p.npz"), new(form).predict(data(form))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6)


def test_wrong_sizes_are_reported_before_the_first_step() -> None:
    trainer = new("time-major everywhere")
    for labels in (LABELS.T, LABELS[:5]):
        for call in (trainer.fit, trainer.evaluate):
            with pytest.raises(DataError):
                call(data("time-major everywhere"), labels, verbose=0)
    with pytest.raises(DataError, match=r"h0: float32\[1, batch, 5\] got .* Axis 1 is the batch"):
        trainer.predict({"x": X.transpose(1, 0, 2), "h0": H[0]})
    assert trainer.global_step == 0


def test_an_output_that_does_not_name_its_batch_is_no_loss_of_other_rows() -> None:
    """If the file does not tell, the first axis counts as the batch; another size is an error."""
    model = network("time-major output")
    model.graph.node[-1].output[0] = "seen"
    tail = "g (float[?, ?, ?] seen) => (y) { s = Shape(seen)  i = Abs(s)  y = Reshape(seen, i) }"
    text = f'<ir_version: 8, opset_import: ["": 17]> {tail}'
    model.graph.node.extend(onnx.parser.parse_model(text).graph.node)
    for dim in model.graph.output[0].type.tensor_type.shape.dim:
        dim.Clear()
    for backend in BACKENDS:
        trainer = Trainer(model, loss=CrossEntropy(axis=2), backend=backend)
        assert "axis 0 of y: assumed" in trainer.summary()
        for call in (trainer.fit, trainer.evaluate):
            with pytest.raises(SettingError, match="6 rows for a batch of 8"):
                call(data("time-major output"), LABELS, batch_size=8, verbose=0)
    parts = trainer.predict(data("time-major output"), batch_size=10)
    assert [part.shape for part in parts] == [(6, 10, 3), (6, 10, 3)]


# ---------------------------------------------------------------------- values without rows

SCALED = """<ir_version: 8, opset_import: ["": 17]>
    g (float[batch, 4] x, float[1, 4] scale) => (float[batch, 1] y)
    <float[4, 1] w = {1, 2, 3, 4}> { s = Mul(x, scale)  y = MatMul(s, w) }"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_without_rows_is_passed_whole(backend: str, tmp_path: Path) -> None:
    x = X[:, 0]
    y = RNG.standard_normal((ROWS, 1)).astype(np.float32)
    scale = np.array([[0.5, 1, 2, 1]], np.float32)
    scaled = Trainer(onnx.parser.parse_model(SCALED), loss="mse", backend=backend)
    fixed = Trainer(
        onnx.parser.parse_model(SCALED), loss="mse", backend=backend, fixed_inputs={"scale": scale}
    )
    expected = fixed.fit(x, y, batch_size=8, epochs=2, validation_split=0.2, verbose=0)
    np.save(tmp_path / "x.npy", x)
    for given in (x, tmp_path / "x.npy"):
        scaled = Trainer(onnx.parser.parse_model(SCALED), loss="mse", backend=backend)
        values = {"x": given, "scale": scale}
        found = scaled.fit(values, y, batch_size=8, epochs=2, validation_split=0.2, verbose=0)
        assert found.history == expected.history
    values = {"x": x, "scale": scale}
    assert np.array_equal(scaled.predict(values, batch_size=8), fixed.predict(x, batch_size=8))
    with pytest.raises(DataError, match="no batch axis, so each batch gets the whole array"):
        scaled.predict({"x": x, "scale": np.ones((ROWS, 4))})


def test_rows_of_weight_zero_leave_values_without_rows_alone() -> None:
    x = X[:, 0].copy()
    y = RNG.standard_normal((ROWS, 1)).astype(np.float32)
    scale, weights = np.ones((1, 4), np.float32), np.ones(ROWS)
    weights[3] = 0
    losses = []
    for entry in (1.0, np.nan):
        x[3, 0] = entry
        trainer = Trainer(onnx.parser.parse_model(SCALED), loss="mse")
        losses.append(trainer.evaluate({"x": x, "scale": scale}, y, weights)["loss"])
    assert losses[0] == losses[1]


# ---------------------------------------------------------------------- graphs

GRAPH = """<ir_version: 8, opset_import: ["": 18]>
    g (float[atoms, 4] x, int64[edges] src, int64[edges] dst) => (float[atoms, 1] y, float energy)
    <int64[1] last = {1}>
    { m = MatMul(x, w)  s = Gather(m, src)  z = Sub(m, m)  i = Unsqueeze(dst, last)
      a = ScatterND<reduction = "add">(z, i, s)  r = Relu(a)  y = MatMul(r, v)
      energy = ReduceSum<keepdims = 0>(y) }"""


def graph_network() -> onnx.ModelProto:
    model = onnx.parser.parse_model(GRAPH)
    rng = np.random.default_rng(2)
    for name, shape in {"w": (4, 5), "v": (5, 1)}.items():
        model.graph.initializer.append(from_array(rng.normal(size=shape).astype("f"), name))
    return model


def graphs(*sizes: tuple[int, int]) -> list[Any]:
    rng = np.random.default_rng(3)
    return [
        (
            {
                "x": rng.normal(size=(atoms, 4)).astype("f"),
                "src": rng.integers(0, atoms, edges),
                "dst": rng.integers(0, atoms, edges),
            },
            {"y": rng.normal(size=(atoms, 1)).astype("f")},
        )
        for atoms, edges in sizes
    ]


SIZES = ((6, 15), (4, 4), (9, 20))


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_graph_is_a_batch(backend: str) -> None:
    """The loss of several graphs is the mean over their atoms."""
    trainer = Trainer(graph_network(), loss={"y": "mse"}, backend=backend, optimizer=0.01)
    batches = graphs(*SIZES)
    outputs = [trainer.predict_on_batch(x)["y"] for x, _ in batches]
    errors = np.concatenate([(out - y["y"]) ** 2 for out, (_, y) in zip(outputs, batches)])
    np.testing.assert_allclose(trainer.evaluate(batches)["loss"], errors.mean(), rtol=1e-5)
    joined = trainer.predict([x for x, _ in batches])
    np.testing.assert_allclose(joined["y"], np.concatenate(outputs), rtol=1e-5)
    assert joined["energy"].shape == (3,)
    history = trainer.fit(batches, epochs=5, verbose=0).history["loss"]
    assert history[-1] < history[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_for_each_graph_has_one_label(backend: str) -> None:
    batches = [(x, {"energy": np.float32(i)}) for i, (x, _) in enumerate(graphs(*SIZES))]
    trainer = Trainer(graph_network(), loss={"energy": "mse"}, backend=backend, optimizer=1e-4)
    energies = trainer.predict([x for x, _ in batches])["energy"]
    expected = np.mean((energies - np.arange(3)) ** 2)
    np.testing.assert_allclose(trainer.evaluate(batches)["loss"], expected, rtol=1e-5)
    assert trainer.fit(batches, verbose=0).history["loss"][0] > 0


def test_outputs_with_their_own_rows_have_means_of_their_own() -> None:
    batches = [(x, {**y, "energy": np.float32(1)}) for x, y in graphs(*SIZES)]
    trainer = Trainer(graph_network(), loss={"y": "mse", "energy": "mse"})
    result = trainer.evaluate(batches)
    alone = [
        Trainer(graph_network(), loss={name: "mse"}).evaluate(
            [(x, {name: y[name]}) for x, y in batches]
        )["loss"]
        for name in ("y", "energy")
    ]
    np.testing.assert_allclose([result["y_loss"], result["energy_loss"]], alone, rtol=1e-5)


def test_arrays_of_a_graph_are_not_divided() -> None:
    trainer = Trainer(graph_network(), loss={"y": "mse"})
    ((x, y),) = graphs((6, 6))  # equal numbers of atoms and edges
    assert trainer.fit(x, y, verbose=0).history["loss"]
    with pytest.raises(DataError, match="Pass whole batches: a list of batches"):
        trainer.fit(x, y, batch_size=3, verbose=0)
    for call in (
        lambda: trainer.fit(x, y, validation_split=0.5, verbose=0),
        lambda: trainer.export_training("folder"),
        lambda: trainer.evaluate(onnxfit.DataLoader(x, y, batch_size=2)),
    ):
        with pytest.raises(OnnxfitError):
            call()
    assert "the sizes 'atoms' and 'edges'" in " ".join(trainer.summary().split())


PAIRWISE = """<ir_version: 8, opset_import: ["": 17]>
    g (int64[1, L] x) => (float[L, L] y) <int64[1] first = {0}>
    { q = Gather(table, x)  s = Squeeze(q, first)  k = Transpose<perm = [1, 0]>(s)  y = MatMul(s, k) }"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_without_rows_has_the_labels_of_one_row(backend: str) -> None:
    model = onnx.parser.parse_model(PAIRWISE)
    table = RNG.standard_normal((20, 4)).astype(np.float32)
    model.graph.initializer.append(from_array(table, "table"))
    trainer = Trainer(model, loss="mse", optimizer=0.01, backend=backend)
    x = RNG.integers(0, 20, (3, 6))
    y = RNG.standard_normal((3, 6, 6)).astype(np.float32)
    outputs = trainer.predict(x, batch_size=1)
    assert [out.shape for out in outputs] == [(6, 6)] * 3
    assert trainer.predict_on_batch(x[:1]).shape == (6, 6)
    loss = trainer.evaluate(x, y, batch_size=1)["loss"]
    np.testing.assert_allclose(loss, np.mean((np.stack(outputs) - y) ** 2), rtol=1e-5)
    assert trainer.fit(x, y, batch_size=1, verbose=0).history["loss"]


@pytest.mark.torch
@pytest.mark.filterwarnings("default")  # torch warns of its older exporter
def test_a_time_major_lstm_trains_as_in_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 5)
            self.head = torch.nn.Linear(5, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(x.permute(1, 0, 2))[0])

    torch.manual_seed(0)
    net = Net()
    torch.onnx.export(
        net, (torch.zeros(2, TIME, 4),), tmp_path / "n.onnx", dynamo=False, input_names=["x"],
        output_names=["y"], dynamic_axes={"x": {0: "batch"}, "y": {1: "batch"}},
    )  # fmt: skip
    trainer = Trainer(tmp_path / "n.onnx", loss=CrossEntropy(axis=2), optimizer=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for rows in (slice(0, 8), slice(8, 16), slice(16, 20)):
        x, y = torch.from_numpy(X[rows]), torch.from_numpy(LABELS[rows])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x).permute(1, 2, 0), y)
        loss.backward()
        optimizer.step()
        found = trainer.train_on_batch(X[rows], LABELS[rows])["loss"]
        np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    expected = net(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(trainer.predict(X, batch_size=8), expected, rtol=1e-4, atol=1e-5)

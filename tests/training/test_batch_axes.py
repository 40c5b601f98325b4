"""Batch axes that the user gives, and those that shape inference finds, in a whole training.

The reference is the same network in a file that names its batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.losses import CrossEntropy
from tests.cli.helpers import done, refused
from tests.training.test_batch_axis import (
    BACKENDS,
    LABELS,
    MOVED,
    ROWS,
    SCALED,
    TIME,
    WEIGHTS,
    X,
    assert_equal_weights,
    data,
    network,
    new,
    of,
)  # fmt: skip

AXES = {
    "time-major output": {"y": 1},
    "state": {"h0": 1, "hn": 1},
    "time-major everywhere": {"x": 1, "h0": 1, "y": 1, "hn": 1},
    "batch last": {"x": 2, "h0": 1, "y": -1},
}
# ONNX's inference does not follow sizes through an Abs.
HIDDEN = "s = Shape(seen)  i = Abs(s)  y = Reshape(seen, i)"


def nameless(form: str, *, hidden: bool = False) -> onnx.ModelProto:
    """The network with no name on the batch; `hidden` from shape inference, too."""
    model = network(form)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
    if hidden:
        last = next(node for node in model.graph.node if "y" in node.output)
        last.output[:] = ["seen" if name == "y" else name for name in last.output]
        text = (
            f'<ir_version: 8, opset_import: ["": 17]> g (float[?, ?, ?] seen) => (y) {{ {HIDDEN} }}'
        )
        model.graph.node.extend(onnx.parser.parse_model(text).graph.node)
    return model


def trainer_of(form: str, model: onnx.ModelProto, axes: Any, **settings: Any) -> Trainer:
    settings = {"optimizer": onnxfit.optimizers.SGD(0.1, momentum=0.9), **settings}
    loss = {"y": CrossEntropy(axis=1 if form == "batch last" else 2)}
    return Trainer(model, loss=loss, batch_axes=axes, **settings)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", MOVED)
def test_training_is_that_of_the_file_with_names(form: str, backend: str) -> None:
    named = new(form, backend=backend)
    given = trainer_of(form, nameless(form, hidden=True), AXES[form], backend=backend)
    fits = [
        trainer.fit(
            data(form), LABELS, WEIGHTS, epochs=2, batch_size=8, validation_split=0.3, verbose=0
        ).history
        for trainer in (named, given)
    ]
    assert fits[0].keys() == fits[1].keys()
    for key, values in fits[0].items():
        np.testing.assert_allclose(fits[1][key], values, rtol=1e-5, err_msg=key)
    assert_equal_weights(named, given)
    losses = [t.evaluate(data(form), LABELS, WEIGHTS, batch_size=7)["loss"] for t in (named, given)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize("form", MOVED)
def test_predictions_are_joined_along_the_given_axis(form: str, tmp_path: Path) -> None:
    trainer = trainer_of(form, nameless(form, hidden=True), AXES[form])
    trainer.save(tmp_path / "c")
    session = onnxruntime.InferenceSession(trainer.export().SerializeToString())
    expected = session.run(["y"], data(form))[0]
    for one in (trainer, Trainer.load(tmp_path / "c")):
        for size in (ROWS, 8, 1):
            found = of(one.predict(data(form), batch_size=size))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["time-major output", "batch last"])
def test_shape_inference_finds_the_batch_of_an_output(form: str) -> None:
    """The batch of the inputs has a name; that of the output has none, or an invented one."""
    model = network(form)
    for number, dim in enumerate(model.graph.output[0].type.tensor_type.shape.dim):
        dim.dim_param = f"y_dynamic_axes_{number}"
    before = model.SerializeToString()
    trainer = trainer_of(form, model, None)
    assert model.SerializeToString() == before
    axis = 1 if form == "time-major output" else 2
    assert f"axis {axis} of y: found by shape inference" in trainer.summary()
    assert f"axis {axis} of y: found by shape inference" in str(onnxfit.inspect(model))
    history = trainer.fit(data(form), LABELS, batch_size=8, verbose=0).history
    expected = new(form).fit(data(form), LABELS, batch_size=8, verbose=0).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    found, whole = (of(trainer.predict(data(form), batch_size=size)) for size in (7, ROWS))
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


def test_a_fit_resumes_exactly(tmp_path: Path) -> None:
    form = "time-major everywhere"
    model = nameless(form, hidden=True)
    whole, first = (trainer_of(form, model, AXES[form]) for _ in range(2))
    whole.fit(data(form), LABELS, epochs=2, batch_size=8, verbose=0)
    first.fit(data(form), LABELS, epochs=1, batch_size=8, verbose=0)
    first.save(tmp_path / "c")
    second = Trainer.load(tmp_path / "c")
    assert second.settings["batch_axes"] == AXES[form]
    second.fit(data(form), LABELS, epochs=2, initial_epoch=1, batch_size=8, verbose=0)
    for name, weight in whole.get_weights().items():
        assert np.array_equal(weight, second.get_weights()[name])


def test_the_summary_and_inspect_name_given_axes() -> None:
    form = "time-major everywhere"
    trainer = trainer_of(form, nameless(form), AXES[form])
    expected = "axis 1 of x, h0, y, hn: given"
    assert f"batch      {expected}" in trainer.summary().splitlines()
    assert trainer.inspect().batch_axes == (expected,)
    assert onnxfit.inspect(nameless(form), batch_axes=AXES[form]).batch_axes == (expected,)
    assert [spec.batch_axis for spec in trainer.inputs] == [1, 1]


def test_dynamic_batch_frees_the_given_axis(tmp_path: Path) -> None:
    """It would take axis 0 of x for the batch. A fixed state keeps the axis that it was freed by."""
    form = "time-major everywhere"
    model = network(form)
    for value in (*model.graph.input, *model.graph.output):
        for dim, size in zip(value.type.tensor_type.shape.dim, (TIME, 1)):
            dim.dim_value = size if value.name in ("x", "y") else 1
    axes = {"x": 1, "h0": 1, "y": 1}
    trainer = trainer_of(form, model, axes, dynamic_batch=True, fixed_inputs={"h0": 0})
    x, h0 = data(form)["x"], np.zeros_like(data(form)["h0"])
    trainer.save(tmp_path / "c")
    for one in (trainer, Trainer.load(tmp_path / "c")):
        found = one.predict(x, batch_size=8)["y"]
        expected = new(form).predict({"x": x, "h0": h0})["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.isfinite(trainer.fit(x, LABELS, batch_size=8, verbose=0).history["loss"][0])


def test_a_checkpoint_takes_other_axes(tmp_path: Path) -> None:
    form = "time-major output"
    trainer_of(form, nameless(form, hidden=True), None).save(tmp_path / "c")
    trainer = Trainer.load(tmp_path / "c", batch_axes={"y": 1})
    assert trainer.predict(data(form), batch_size=8).shape == (TIME, ROWS, 3)


def test_graphs_of_a_folder_have_the_batch_first(tmp_path: Path) -> None:
    form = "time-major everywhere"
    trainer = trainer_of(form, nameless(form, hidden=True), AXES[form])
    trainer.export_training(tmp_path / "folder")
    session = onnxruntime.InferenceSession(tmp_path / "folder/predict.onnx")
    weights = trainer.get_weights()
    feeds = {"x": X, "h0": data(form)["h0"].transpose(1, 0, 2)}
    feeds |= {v.name: weights[v.name] for v in session.get_inputs() if v.name in weights}
    found = dict(zip([v.name for v in session.get_outputs()], session.run(None, feeds)))["y"]
    expected = trainer.predict(data(form))["y"].transpose(1, 0, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_hidden", [True, False])
@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"z": 1}, "No input or output of the model is called 'z'.*h0, hn, x, y"),
        ({"y": 3}, r"axis 3 for y: .*, which has 3 axes\. Pass from -3 to 2, or None\."),
        ({"x": 2}, r"axis 2 for x: .*, but the size 'batch', the batch, is on axis 1\."),
        ({"y": 0}, "axis 0 for y: .*, but (the size 'batch'|shape inference finds).* on axis 1"),
        ({"x": None}, "no axis for x: .*, but its size 'batch' is the batch"),
        ({"y": "1"}, "batch_axes must map names"),
        ({"y": True}, "batch_axes must map names"),
        (["y"], "batch_axes must map names"),
    ],
)
def test_wrong_axes_are_refused(axes: Any, expected: str, is_hidden: bool) -> None:
    form = "time-major everywhere"
    model = nameless(form, hidden=True) if is_hidden else network(form)
    if is_hidden:
        del model.graph.output[:], model.graph.input[:]
        model.graph.input.extend(network(form).graph.input)
        model.graph.output.extend(network(form).graph.output)
    for make in (trainer_of, lambda form, model, axes: onnxfit.inspect(model, batch_axes=axes)):
        with pytest.raises(SettingError, match=expected) as info:
            make(form, model, axes)
        assert isinstance(info.value, UnknownNameError) == (axes == {"z": 1})


def test_a_false_axis_is_reported_by_the_step_and_by_predict() -> None:
    """Nothing in the file contradicts axis 0, but the sizes of a batch do."""
    form = "time-major output"
    for backend in BACKENDS:
        trainer = trainer_of(form, nameless(form, hidden=True), {"y": 0}, backend=backend)
        for call in (trainer.fit, trainer.evaluate):
            with pytest.raises(
                SettingError, match=r"6 rows for a batch of 8.*batch_axes=\{'y': 1\}"
            ):
                call(data(form), LABELS, batch_size=8, verbose=0)
        with pytest.raises(SettingError, match=r"axis 0 for 'y', but batches of \[8, 8\] rows"):
            trainer.predict(data(form), batch_size=8)
        assert trainer.global_step == 0


def test_a_state_has_the_axis_of_its_input() -> None:
    model = nameless("state")
    last = next(node for node in model.graph.node if "hn" in node.output)
    last.output[1] = "seen"
    text = HIDDEN.replace("y =", "hn =")
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[?, ?, ?] seen) => (hn) {{ {text} }}'
    model.graph.node.extend(onnx.parser.parse_model(text).graph.node)
    axes = {"h0": 1, "hn": 0}
    with pytest.raises(SettingError, match="another axis for the state 'hn'"):
        trainer_of("state", model, axes, state_outputs={"hn": "h0"})


def test_the_error_about_rows_names_the_setting() -> None:
    form = "time-major output"
    model = nameless(form, hidden=True)
    trainer = trainer_of(form, model, None)
    labels = LABELS.T  # as the output has them, not as labels are
    for call in (trainer.fit, trainer.evaluate, trainer.train_on_batch):
        with pytest.raises(DataError, match=r"Axis 0 is taken as the batch of 'y' .*batch_axes"):
            call(data(form), labels)
    named = new(form)
    with pytest.raises(DataError) as info:
        named.fit(data(form), labels, verbose=0)
    assert "batch_axes" not in str(info.value)


# ---------------------------------------------------------------------- a batch of 1, no batch

POOLED = """<ir_version: 8, opset_import: ["": 17]>
    g (float[{batch}, 4] x) => (float[{sizes}] y) <float[4, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}}>
    {{ z = MatMul(x, w)  s = Squeeze(z)  y = Identity(s) }}"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", ["1", "batch"])
def test_an_output_of_classes_alone_is_that_of_one_row(batch: str, backend: str) -> None:
    """A Squeeze removes the batch of 1. Exporters then call the classes the batch, or 3."""
    sizes, axes = ("3", None) if batch == "1" else ("batch", {"y": None})
    model = onnx.parser.parse_model(POOLED.format(batch=batch, sizes=sizes))
    trainer = Trainer(model, loss="mse", optimizer=0.01, backend=backend, batch_axes=axes)
    assert "no axis of y" in trainer.summary()
    x, y = X[:, 0], np.arange(3.0 * ROWS, dtype=np.float32).reshape(ROWS, 3)
    w = onnx.numpy_helper.to_array(model.graph.initializer[0])
    loss = np.mean((x @ w - y) ** 2)
    np.testing.assert_allclose(trainer.evaluate(x, y, batch_size=1)["loss"], loss, rtol=1e-5)
    weights = np.arange(ROWS) % 2
    weighted = np.mean((x @ w - y) ** 2 * weights[:, None])
    found = trainer.evaluate(x, y, weights, batch_size=1)["loss"]
    np.testing.assert_allclose(found, weighted, rtol=1e-5)
    parts = trainer.predict(x, batch_size=1)
    np.testing.assert_allclose(np.stack(parts), x @ w, rtol=1e-4, atol=1e-5)
    step = trainer.train_on_batch(x[:1], y[:1])["loss"]
    np.testing.assert_allclose(step, np.mean((x[:1] @ w - y[:1]) ** 2), rtol=1e-5)
    gradient = 2 / 3 * x[:1].T @ (x[:1] @ w - y[:1])
    np.testing.assert_allclose(
        trainer.get_weights()["w"], w - 0.01 * gradient, rtol=1e-4, atol=1e-5
    )


def test_labels_of_such_an_output_without_the_setting_name_it() -> None:
    model = onnx.parser.parse_model(POOLED.format(batch="batch", sizes="batch"))
    trainer = Trainer(model, loss="mse")
    for labels in (np.ones(3, np.float32), np.ones((1, 3), np.float32)):
        with pytest.raises(DataError, match=r"batch_axes=\{'y': None\}"):
            trainer.train_on_batch(X[:1, 0], labels)
    with pytest.raises(SettingError, match=r"3 rows for a batch of 1.*batch_axes=\{'y': None\}"):
        trainer.train_on_batch(X[:1, 0], np.ones(1, np.float32))


def test_a_wrong_rank_in_the_file_is_corrected() -> None:
    """As in ddddocr: [time, 1, classes], declared as [1, time]."""
    model = network("time-major output")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = 1
    del model.graph.output[0].type.tensor_type.shape.dim[2:]
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "length"
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    trainer = trainer_of("time-major output", model, {"y": 1})
    rows = slice(0, 1)
    found = trainer.train_on_batch(data("time-major output", rows), LABELS[rows])["loss"]
    named = new("time-major output")
    expected = named.train_on_batch(data("time-major output", rows), LABELS[rows])["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert trainer.predict(data("time-major output", rows)).shape == (TIME, 1, 3)


# ---------------------------------------------------------------------- the command line


def test_the_command_line_has_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    form = "time-major everywhere"
    onnx.save(nameless(form, hidden=True), "m.onnx")
    np.savez("d.npz", **data(form), y=LABELS)
    axes = [word for name in ("x", "h0", "y", "hn") for word in ("--batch-axis", f"{name}=1")]
    loss = ["--loss", "y=cross_entropy:axis=2"]
    done("fit", "m.onnx", "--data", "d.npz", *loss, *axes, "--checkpoint", "c/", "-o", "t.onnx")
    losses = [
        done("evaluate", model, "--data", "d.npz", "-b", "8", "--json", *options)
        for model, options in (("c/last.onnxfit", []), ("t.onnx", [*loss, *axes]))
    ]
    assert losses[0] == losses[1]
    expected = Trainer.load("c/last.onnxfit").predict(data(form))
    for model, options in (("c/last.onnxfit", []), ("t.onnx", axes)):
        done("predict", model, "--data", "d.npz", "-b", "8", "-o", "p.npz", *options)
        np.testing.assert_allclose(np.load("p.npz")["y"], expected["y"], rtol=1e-4, atol=1e-6)
    assert "axis 1 of x, h0, y, hn: given" in done("inspect", "m.onnx", *axes)
    assert "no axis of y: given" in done("inspect", "m.onnx", "--batch-axis", "y=none")
    for option in ("y", "y=1.5", "=1", "y=one"):
        assert "--batch-axis must be NAME=AXIS" in refused(
            "inspect", "m.onnx", "--batch-axis", option
        )
    assert "given twice" in refused("inspect", "m.onnx", *axes, "--batch-axis", "y=1")


# ---------------------------------------------------------------------- loaders


@pytest.mark.parametrize("form", MOVED)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_loader_divides_arrays_along_their_axes(
    form: str, is_mapped: bool, tmp_path: Path
) -> None:
    """It trains as the same arrays passed to fit, and its own batches have the file's layout."""
    arrays: Any = data(form)
    if is_mapped:
        np.savez(tmp_path / "x.npz", **arrays)
        arrays = {name: tmp_path / f"{name}.npy" for name in arrays}
        for name, path in arrays.items():
            np.save(path, data(form)[name])
    axes = {name: spec.batch_axis for name, spec in zip(("x", "h0"), new(form).inputs)}
    loader = onnxfit.DataLoader(
        arrays, LABELS, WEIGHTS, batch_size=8, drop_last=True, prefetch=2, batch_axes=axes
    )
    assert (loader.rows, len(loader)) == (ROWS, 2)
    by_loader, by_batches = new(form), new(form)
    by_loader.fit(loader, epochs=2, verbose=0)
    seed = by_loader.seed
    other = onnxfit.DataLoader(
        arrays, LABELS, WEIGHTS, batch_size=8, drop_last=True, seed=seed, batch_axes=axes
    )
    for _ in range(2):
        for x, y, weight in other:
            by_batches.train_on_batch(x, y, weight)
    assert_equal_weights(by_loader, by_batches)


def test_a_loader_gives_an_array_without_rows_as_a_whole() -> None:
    scale = np.array([[0.5, 1, 2, 1]], np.float32)
    axes = {"scale": None}
    loader = onnxfit.DataLoader(
        {"x": X[:, 0], "scale": scale}, batch_size=8, shuffle=False, batch_axes=axes
    )
    batches = [x for (x,) in loader]
    assert [batch["x"].shape for batch in batches] == [(8, 4), (8, 4), (4, 4)]
    assert all(np.array_equal(batch["scale"], scale) for batch in batches)
    model = onnx.parser.parse_model(SCALED)
    x = {"x": X[:, 0], "scale": scale}
    trainer = Trainer(model, loss="mse")
    np.testing.assert_array_equal(trainer.predict(loader), trainer.predict(x, batch_size=8))


@pytest.mark.parametrize(
    ("axes", "error", "expected"),
    [
        ({}, DataError, r"X\['x'\] has 6, X\['h0'\] has 1.* pass DataLoader\(\.\.\., batch_axes="),
        ({"x": 1}, DataError, r"X\['x'\] has 20, X\['h0'\] has 1"),
        ({"x": 3}, SettingError, r"axis 3 for X\['x'\], which has 3 axes"),
        ({"z": 0}, UnknownNameError, "'z'.*h0, x"),
        ({"x": 1.0}, SettingError, "batch_axes"),
    ],
)
def test_a_loader_refuses_wrong_axes(axes: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        onnxfit.DataLoader(data("time-major everywhere"), LABELS, batch_axes=axes)


def test_a_loader_with_other_axes_than_the_model_is_refused() -> None:
    """Also where the sizes do not show it."""
    form = "time-major everywhere"
    rows = slice(0, TIME)
    arrays = {**data(form, rows), "h0": data(form, rows)["h0"].repeat(TIME, 0)}
    loader = onnxfit.DataLoader(arrays, LABELS[rows])
    with pytest.raises(DataError, match=r"input x: .* is 1, but the DataLoader has 0.*\{'x': 1\}"):
        new(form).fit(loader, verbose=0)

"""`batch_norm="batch"`: what a file in training mode says, in training, evaluation and export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper

import onnxfit
from onnxfit import SettingError, Trainer

BACKENDS = ["full", "forward_backward", "in_place"]
RNG = np.random.default_rng(0)
X = (RNG.standard_normal((16, 3, 6, 6)) * 5 + 3).astype(np.float32)
Y = RNG.integers(0, 2, 16)


def network(mode: int = 1) -> onnx.ModelProto:
    """A network whose statistics are dummies, as of `track_running_stats=False`.

    Its scale and bias are not those numbers: onnxruntime would let them share the memory of the
    dummies, which its kernel overwrites.
    """
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[N, 3, 6, 6] x) => (float[N, 2] y)
        <float[4] s = {{1.5, 1, 2, 0.5}}, float[4] b = {{0.5, 0, 1, -1}},
         float[4] mean = {{0, 0, 0, 0}}, float[4] var = {{1, 1, 1, 1}}>
        {{ c = Conv(x, w)  n, m2, v2 = BatchNormalization <training_mode = {mode}> (c, s, b, mean, var)
           r = Relu(n)  q = GlobalAveragePool(r)  f = Flatten(q)  y = MatMul(f, v) }}"""
    )
    if not mode:
        del model.graph.node[1].output[1:]
    rng = np.random.default_rng(1)
    for name, shape in {"w": (4, 3, 3, 3), "v": (4, 2)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def in_a_branch() -> onnx.ModelProto:
    """The same network with its BatchNormalization in an If."""
    model = network()
    bodies = {}
    for name in ("then_branch", "else_branch"):
        node = onnx.NodeProto()
        node.CopyFrom(model.graph.node[1])
        node.output[:] = [name, f"{name}_mean", f"{name}_var"]
        out = [helper.make_tensor_value_info(name, 1, None)]
        bodies[name] = helper.make_graph([node], name, [], out)
    flag = onnx.numpy_helper.from_array(np.array(True), "flag")
    model.graph.initializer.append(flag)
    model.graph.node[1].CopyFrom(helper.make_node("If", ["flag"], ["n"], **bodies))
    return model


def run(model: onnx.ModelProto, x: np.ndarray = X) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {"x": x})
    assert isinstance(y, np.ndarray)
    return y


def trainer_of(model: onnx.ModelProto, **settings: object) -> Trainer:
    defaults = {"loss": "cross_entropy", "optimizer": 0.01, "batch_norm": "batch"}
    return Trainer(model, **{**defaults, **settings})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [network, in_a_branch])
def test_predictions_and_exports_are_those_of_the_file(make: object, backend: str) -> None:
    model = make()  # type: ignore[operator]
    trainer = trainer_of(model, backend=backend)
    np.testing.assert_allclose(trainer.predict(X), run(model), atol=1e-5)
    np.testing.assert_allclose(trainer.predict(X[:5]), run(model, X[:5]), atol=1e-5)
    np.testing.assert_array_equal(run(trainer.export()), run(model))
    assert "mean" not in trainer.get_state()["weights"]
    trainer.fit(X, Y, epochs=3, batch_size=16, verbose=0)
    exported = trainer.export()
    np.testing.assert_allclose(trainer.predict(X), run(exported), atol=1e-5)
    kept = {t.name: t for t in exported.graph.initializer}
    for tensor in model.graph.initializer:
        changes = tensor.name in trainer.get_weights()
        assert (kept[tensor.name] != tensor) == changes
    assert exported.graph.node == model.graph.node


def test_the_loss_of_a_batch_is_the_same_in_training_and_evaluation() -> None:
    trainer = trainer_of(network())
    before = trainer.evaluate(X, Y, batch_size=16)["loss"]
    assert trainer.train_on_batch(X, Y)["loss"] == pytest.approx(before, rel=1e-6)


def test_a_step_is_that_of_train() -> None:
    ours, other = (trainer_of(network(), batch_norm=mode) for mode in ("batch", "train"))
    for trainer in (ours, other):
        trainer.fit(X, Y, epochs=3, batch_size=8, verbose=0, shuffle=False)
    weights = other.get_weights()
    for name, array in ours.get_weights().items():
        np.testing.assert_allclose(array, weights[name], rtol=1e-5, atol=1e-6)


def test_a_frozen_scale_normalizes_by_the_batch_too() -> None:
    trainer = trainer_of(network(), weights=["v"])
    np.testing.assert_allclose(trainer.predict(X), run(network()), atol=1e-5)
    before = trainer.evaluate(X, Y, batch_size=16)["loss"]
    assert trainer.train_on_batch(X, Y)["loss"] == pytest.approx(before, rel=1e-6)


def test_a_checkpoint_keeps_the_mode(tmp_path: Path) -> None:
    trainer = trainer_of(network())
    trainer.fit(X, Y, epochs=1, verbose=0)
    loaded = Trainer.load(trainer.save(tmp_path / "a.ckpt"))
    np.testing.assert_array_equal(loaded.predict(X), trainer.predict(X))
    assert loaded.export() == trainer.export()


def test_a_file_without_training_mode_is_refused() -> None:
    with pytest.raises(SettingError, match="batch_norm='batch' needs a BatchNormalization that"):
        trainer_of(network(mode=0))
    with pytest.raises(SettingError, match="must be 'train', 'frozen' or 'batch', got 'all'"):
        trainer_of(network(), batch_norm="all")


def test_a_module_of_torch_normalizes_by_the_batch_in_both_modes() -> None:
    torch = pytest.importorskip("torch")
    from onnxfit.torch import OnnxModule

    module = OnnxModule(network(), batch_norm="batch")
    x = torch.from_numpy(X)
    for mode in (True, False):
        y = module.train(mode)(x).detach().numpy()
        np.testing.assert_allclose(y, run(network()), atol=1e-5)
    np.testing.assert_array_equal(run(module.export()), run(network()))


def test_the_warning_of_unmeasured_statistics_names_the_mode() -> None:
    with pytest.warns(UserWarning, match="batch_norm='batch', which normalizes by the batch as"):
        onnxfit.Trainer(network(), weights=["v"], loss="cross_entropy")

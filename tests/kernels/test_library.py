"""The library in use: training with it follows training without it; a useless one is left out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.kernels import library, transforms
from onnxfit.kernels.library import DOMAIN, library_path
from onnxfit.optimizers import SGD, Adam, AdamW
from onnxfit.step import loss_scale
from tests.models import convolutional, mlp

RNG = np.random.default_rng(0)
SEPARABLE = """<ir_version: 8, opset_import: ["": 20]>
    separable (float[N, 1, 8, 8] x) => (float[N, 3] y) <float[6, 1, 3, 3] stem, float[6, 1, 3, 3] depthwise,
        float[4, 6, 1, 1] pointwise, float[64, 3] head>
    {
        s = Conv<pads=[1, 1, 1, 1]>(x, stem)  t = Tanh(s)
        d = Conv<group=6, strides=[2, 2], pads=[1, 1, 1, 1]>(t, depthwise)
        p = Conv(d, pointwise)  flat = Flatten<axis=1>(p)  y = MatMul(flat, head)
    }"""
TRANSFORMER = """<ir_version: 8, opset_import: ["": 20]>
    encoder (float[N, 4, 6] x) => (float[N, 3] y) <float[6, 6] query, float[6, 6] key, float[6] scale, float[6] bias,
        float[6, 12] first, float[12, 6] second, float[24, 3] head>
    {
        n = LayerNormalization(x, scale, bias)
        q = MatMul(n, query)  k = MatMul(n, key)  kt = Transpose<perm=[0, 2, 1]>(k)
        s = MatMul(q, kt)  p = Softmax<axis=-1>(s)  a = MatMul(p, n)
        h = MatMul(a, first)  g = Gelu(h)  o = MatMul(g, second)  r = Add(o, x)
        flat = Flatten<axis=1>(r)  y = MatMul(flat, head)
    }"""


def with_weights(text: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """The model of a text, with random weights in the place of those that it names."""
    for name, shape in shapes.items():
        numbers = np.random.default_rng(len(name)).normal(size=shape).ravel() / 3
        text = text.replace(f" {name},", f" {name} = {{{', '.join(map(str, numbers))}}},", 1)
        text = text.replace(f" {name}>", f" {name} = {{{', '.join(map(str, numbers))}}}>", 1)
    return onnx.parser.parse_model(text)


def transformer() -> onnx.ModelProto:
    shapes = {
        "query": (6, 6), "key": (6, 6), "first": (6, 12), "second": (12, 6), "head": (24, 3),
        "scale": (6,), "bias": (6,),
    }  # fmt: skip
    return with_weights(TRANSFORMER, shapes)


def separable() -> onnx.ModelProto:
    shapes = {
        "stem": (6, 1, 3, 3), "depthwise": (6, 1, 3, 3), "pointwise": (4, 6, 1, 1), "head": (64, 3),
    }  # fmt: skip
    return with_weights(SEPARABLE, shapes)


IMAGES = RNG.normal(size=(24, 1, 8, 8)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 24)
NETWORKS: dict[str, tuple[Any, np.ndarray]] = {
    "mlp": (mlp, RNG.normal(size=(24, 4)).astype(np.float32)),
    # without BatchNormalization: the bias before it has no gradient but rounding, which Adam scales up
    "cnn": (lambda: convolutional(batch_norm=False), IMAGES),
    "separable": (separable, IMAGES),
    "transformer": (transformer, RNG.normal(size=(24, 4, 6)).astype(np.float32)),
}
OPTIMIZERS = {"adamw": AdamW(0.01), "momentum": SGD(0.02, momentum=0.9)}


def trained(network: str, optimizer: Any, **settings: Any) -> tuple[Trainer, list[float]]:
    build, x = NETWORKS[network]
    trainer = Trainer(build(), loss="cross_entropy", optimizer=optimizer, threads=1, **settings)
    history = trainer.fit(x, CLASSES, epochs=4, batch_size=10, verbose=0)
    return trainer, history.history["loss"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_training_with_kernels_follows_training_without(
    network: str, optimizer: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = domains_of_compiled(monkeypatch)
    fast, losses = trained(network, OPTIMIZERS[optimizer])
    assert DOMAIN in set().union(*compiled)
    monkeypatch.setenv(library.SWITCH, "off")
    compiled.clear()
    plain, expected = trained(network, OPTIMIZERS[optimizer])
    assert compiled == []
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for name, w in plain.get_weights().items():
        np.testing.assert_allclose(fast.get_weights()[name], w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("network", ["cnn", "separable"])
def test_half_precision_with_kernels_follows_half_precision_without(
    network: str, precision: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the largest scale, some sums of plain operators are infinite, and their steps are skipped.
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**10)
    _, losses = trained(network, AdamW(0.01), precision=precision)
    monkeypatch.setenv(library.SWITCH, "off")
    _, expected = trained(network, AdamW(0.01), precision=precision)
    # a sum that is rounded to another number of half precision moves the loss by 2^-9 of a term
    np.testing.assert_allclose(losses, expected, rtol=2e-3)


def test_kernels_of_convolutions_train(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    rewrite = transforms.with_kernels

    def observed(model: onnx.ModelProto, products: bool, *, keep_rounding: bool) -> onnx.ModelProto:
        faster = rewrite(model, products, keep_rounding=keep_rounding)
        used.update(node.op_type for node in faster.graph.node if node.domain == DOMAIN)
        return faster

    monkeypatch.setattr(transforms, "with_kernels", observed)
    trained("separable", Adam(0.01))
    assert used >= {"DepthwiseConv", "DepthwiseConvTranspose", "DepthwiseConvWeights"}


def domains_of_compiled(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The domains of the nodes of each graph that is compiled from now on with kernels."""
    seen: list[set[str]] = []
    rewrite = transforms.with_kernels

    def observed(model: onnx.ModelProto, products: bool, *, keep_rounding: bool) -> onnx.ModelProto:
        faster = rewrite(model, products, keep_rounding=keep_rounding)
        seen.append({node.domain for node in faster.graph.node})
        return faster

    monkeypatch.setattr(transforms, "with_kernels", observed)
    return seen


def test_a_run_resumes_bit_for_bit(kernels: Path, tmp_path: Path) -> None:
    build, x = NETWORKS["mlp"]
    settings: Any = {"loss": "cross_entropy", "optimizer": Adam(0.01), "threads": 1}
    whole = Trainer(build(), **settings)
    whole.fit(x, CLASSES, epochs=2, batch_size=10, verbose=0)
    whole.fit(x, CLASSES, epochs=1, batch_size=10, verbose=0)
    first = Trainer(build(), **settings)
    first.fit(x, CLASSES, epochs=2, batch_size=10, verbose=0)
    first.save(tmp_path / "run.ckpt")
    second = Trainer.load(tmp_path / "run.ckpt")
    second.fit(x, CLASSES, epochs=1, batch_size=10, verbose=0)
    for name, w in whole.get_weights().items():
        np.testing.assert_array_equal(second.get_weights()[name], w)


def test_files_have_operators_of_onnx_alone(kernels: Path, tmp_path: Path) -> None:
    trainer, _ = trained("mlp", Adam(0.01))
    trainer.export(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert {node.domain for node in model.graph.node} == {""}


def test_the_other_backend_follows(kernels: Path) -> None:
    _, expected = trained("mlp", Adam(0.01))
    _, losses = trained("mlp", Adam(0.01), backend="forward_backward")
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("off", ["off", "OFF", "Off"])
def test_the_switch(off: str, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_path() == str(kernels)
    assert library.status().state == "used"
    monkeypatch.setenv(library.SWITCH, off)
    assert library_path() is None
    assert library.status().state == "switched off"
    assert library.SWITCH in library.status().detail


def test_the_status_names_operators_that_the_processor_lacks(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "has_products", lambda path: False)
    assert library.status().state == "used"
    assert "AVX2" in library.status().detail


def test_a_checkout_imports_its_own_library() -> None:
    """`pip install` puts the library there."""
    root = Path(__file__).resolve().parents[2]
    named = (root / "hatch_build.py").read_text(encoding="utf-8")
    assert f'LIBRARY = "{library.LIBRARY.relative_to(root).as_posix()}"' in named


def test_without_the_library_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "operators.so")
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.usable_library.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library_path() is None
        assert library.status() == library.LibraryStatus("missing", "operators.so was not compiled")
    library.usable_library.cache_clear()


@pytest.mark.parametrize("kind", ["no library", "another library"])
def test_a_useless_library_is_one_warning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "operators.so"
    if kind == "no library":
        path.write_text("text")
    else:  # without the function that registers operators
        path = Path(np.random.__file__).parent.glob("*.so").__next__()
    monkeypatch.setattr(library, "LIBRARY", path)
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.usable_library.cache_clear()
    with pytest.warns(UserWarning, match=r"pip install --force-reinstall") as caught:
        _, losses = trained("mlp", Adam(0.01))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert len(message.splitlines()) <= 4
    assert library.status().state == "unusable"
    assert f"{library.status().detail}." in message
    library.usable_library.cache_clear()
    assert losses[-1] < losses[0]

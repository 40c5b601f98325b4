"""Warnings of the loop."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import DataLoader, Trainer
from tests.builds import every_way
from tests.models import convolutional, mlp

X = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
IMAGES = np.random.default_rng(0).normal(size=(9, 1, 8, 8)).astype(np.float32)
Y = np.zeros((9, 2), np.float32)


def normalized(shape: str = "N, 2", layers: int = 1) -> onnx.ModelProto:
    """BatchNormalization of rows, once or twice."""
    state = ", ".join(
        f"float[2] {part}{i} = {{{value}}}"
        for i in range(layers)
        for part, value in (("s", "1, 1"), ("b", "0, 0"), ("m", "0, 0"), ("v", "1, 1"))
    )
    ends = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    body = "\n".join(
        f"{ends[i + 1]} = BatchNormalization({ends[i]}, s{i}, b{i}, m{i}, v{i})"
        for i in range(layers)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[{shape}] x) => (float[{shape}] y) <{state}> {{ {body} }}"""
    )
    for i, node in enumerate(model.graph.node):
        node.name = f"bn{i}"
    return model


@every_way
def test_a_batch_of_one_row_without_anything_to_normalize_is_warned_of_once(way) -> None:
    trainer = Trainer(normalized(), loss="mse", **way)
    for _ in range(2):  # once for each fit
        with pytest.warns(UserWarning, match="1 row.* 'bn0' one value.*drop_last") as caught:
            trainer.fit(X, Y, batch_size=4, epochs=3, verbose=0)
        assert len(caught) == 1
    with pytest.warns(UserWarning, match="'bn0' and 1 others one value"):
        Trainer(normalized(layers=2), loss="mse", **way).fit(X[:1], Y[:1], verbose=0)


@pytest.mark.parametrize(
    ("model", "x", "y", "settings"),
    [
        (convolutional(), IMAGES, np.arange(9) % 3, {"loss": "cross_entropy"}),
        (normalized(), X, Y, {"batch_norm": "frozen"}),
        (normalized("N, 2, L"), X[:, :, None].repeat(3, 2), Y[:, :, None].repeat(3, 2), {}),
        (mlp((2, 2)), X, Y, {}),
    ],
    ids=["several pixels", "frozen", "several steps", "no BatchNormalization"],
)
def test_other_batches_of_one_row_are_fine(model, x, y, settings) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(model, **({"loss": "mse"} | settings))
        trainer.fit(x, y, batch_size=4, verbose=0)


def test_one_step_of_one_row_has_one_value_per_channel() -> None:
    x, y = X[:, :, None], Y[:, :, None]
    trainer = Trainer(normalized("N, 2, L"), loss="mse")
    with pytest.warns(UserWarning, match="one value per channel"):
        trainer.fit(x, y, batch_size=2, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(DataLoader(x, y, batch_size=2, drop_last=True), verbose=0)
        trainer.evaluate(x, y, batch_size=1)

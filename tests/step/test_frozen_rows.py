"""Rows of weights that keep their values, compared with PyTorch's `padding_idx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import SettingError, Trainer, UnknownNameError
from onnxfit.optimizers import SGD, Adam, AdamW
from tests.builds import every_way

TEXT = """<ir_version: 8, opset_import: ["": 17]> g (int64[N, 3] x) => (float[N, 2] y)
    <float[4, 2] emb = {0, 0, 1, 2, 3, 4, 5, 6}, float[2, 2] w = {1, -1, 2, 1}, int64[1] axis = {1}>
    { e = Gather(emb, x)  s = ReduceSum<keepdims = 0>(e, axis)  y = MatMul(s, w) }"""
TOKENS = np.array([[1, 2, 0], [3, 0, 0], [2, 2, 1], [1, 3, 0]])


def labels() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)


def trained_in_torch(clip_norm: float | None) -> tuple[np.ndarray, np.ndarray]:
    torch = pytest.importorskip("torch")
    model = onnx.parser.parse_model(TEXT)
    emb, w = (
        torch.tensor(onnx.numpy_helper.to_array(t).copy(), requires_grad=True)
        for t in model.graph.initializer[:2]
    )
    optimizer = torch.optim.SGD([emb, w], 0.01, momentum=0.5)
    for _ in range(4):
        rows = torch.nn.functional.embedding(torch.tensor(TOKENS), emb, padding_idx=0)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(rows.sum(1) @ w, torch.tensor(labels())).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([emb, w], clip_norm)
        optimizer.step()
    return emb.detach().numpy(), w.detach().numpy()


@pytest.mark.torch
@every_way
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_rows_are_frozen_as_in_torch(clip_norm: float | None, way: dict[str, Any]) -> None:
    model = onnx.parser.parse_model(TEXT)
    trainer = Trainer(
        model, loss="mse", optimizer=SGD(0.01, momentum=0.5), clip_norm=clip_norm,
        freeze_rows={"emb": [0]}, **way,
    )  # fmt: skip
    for _ in range(4):
        trainer.train_on_batch(TOKENS, labels())
    for found, expected in zip(trainer.get_weights().values(), trained_in_torch(clip_norm)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (SGD(0.01), {}),
        (Adam(0.01, ema_momentum=0.5), {"penalty": 0.1}),
        (AdamW(0.01, weight_decay=0.1), {}),
        (SGD(0.01, weight_decay=0.1), {"accumulate": 2}),
    ],
)
def test_frozen_rows_keep_their_numbers(
    optimizer: Any, settings: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    rows = {"e*": [-1, 1]}
    model = onnx.parser.parse_model(TEXT)
    trainer = Trainer(
        model, loss="mse", optimizer=optimizer, backend=backend, freeze_rows=rows, **settings
    )
    before = trainer.get_weights()["emb"]
    trainer.fit(TOKENS, labels(), batch_size=2, epochs=2, verbose=0)
    trainer.save(tmp_path / "a.onnxfit")
    trainer = Trainer.load(tmp_path / "a.onnxfit")
    assert trainer.settings["freeze_rows"] == rows
    trainer.fit(TOKENS, labels(), batch_size=2, epochs=4, verbose=0)
    after = trainer.get_weights()["emb"]
    np.testing.assert_array_equal(after[[1, 3]], before[[1, 3]])
    assert (np.abs(after[[0, 2]] - before[[0, 2]]) > 0).any(axis=1)[1]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ({"embb": [0]}, UnknownNameError, "No trained weight is called 'embb'. Did you mean 'emb'"),
        ({"emb": [4]}, SettingError, "freeze_rows has row 4 of 'emb', which has 4 rows"),
        ({"emb": [-5]}, SettingError, "row -5 of 'emb'"),
        ({"emb": "0"}, SettingError, "freeze_rows"),
        ({"emb": [0.5]}, SettingError, "freeze_rows"),
        ([0], SettingError, "freeze_rows"),
    ],
)
def test_rows_that_do_not_exist_are_refused(rows: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Trainer(onnx.parser.parse_model(TEXT), loss="mse", freeze_rows=rows)

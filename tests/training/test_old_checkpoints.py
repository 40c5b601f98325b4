"""Checkpoints that earlier versions wrote still load, and their fits resume to the same weights."""

from pathlib import Path

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import EarlyStopping, ReduceLROnPlateau
from onnxfit.data import order
from onnxfit.load import training_form
from tests.training import old_numbers

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("version", ["0.1.0"])
def test_a_fit_resumes_from_a_checkpoint_of_an_earlier_version(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was saved in mid-epoch by that version, which then trained on to the weights beside
    it. The rows came in another order then, and Dropout drew other numbers.
    """
    monkeypatch.setattr(order, "permutation", old_numbers.permutation)
    monkeypatch.setattr(training_form, "uniform", old_numbers.uniform)
    expected = np.load(DATA / f"written_by_{version}.npz")
    x, y = expected["x"], expected["y"]
    trainer = onnxfit.Trainer.load(DATA / f"written_by_{version}.onnxfit")
    assert (trainer.global_step, trainer.epoch) == (10, 2)
    with pytest.warns(UserWarning, match="shuffles in another order.*initial_epoch=3"):
        history = trainer.fit(
            x[:30],
            y[:30],
            epochs=4,
            batch_size=8,
            validation_data=(x[30:], y[30:]),
            verbose=0,
            callbacks=[
                EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
                ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
            ],
        )
    assert history.epoch == [0, 1, 2, 3]
    np.testing.assert_allclose(history.history["loss"], expected["loss"], rtol=1e-5)
    for name, value in trainer.get_weights().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6)

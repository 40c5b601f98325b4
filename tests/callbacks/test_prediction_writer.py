"""PredictionWriter."""

from pathlib import Path

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import PredictionWriter
from onnxfit.errors import CheckpointError
from tests.callbacks.helpers import both_backends
from tests.models import linear, two_outputs


@both_backends
def test_predictions_are_written_batch_after_batch(tmp_path, backend):
    on = onnxfit.Trainer(
        two_outputs(), loss={"a": "mse", "b": "mse"}, backend=backend, gradient="onnx"
    )
    x = np.arange(5, dtype=np.float32)[:, None]
    for batch_size in (2, 3):
        expected = on.predict(
            x, batch_size=batch_size, callbacks=[PredictionWriter(tmp_path / "new")]
        )
        files = sorted((tmp_path / "new").iterdir())
        assert [file.name for file in files] == [
            f"batch-{i:06d}.npz" for i in range(-(-5 // batch_size))
        ]
        parts = [dict(np.load(file)) for file in files]
        for output, array in expected.items():
            assert np.array_equal(np.concatenate([part[output] for part in parts]), array)
    assert on.predicted == {}


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_files_of_an_earlier_prediction_that_could_not_be_deleted_go_with_the_next(
    refused, tmp_path, monkeypatch
):
    on = onnxfit.Trainer(linear(w=1.0), loss="mse")
    x = np.ones((4, 1), np.float32)
    on.predict(x, batch_size=1, callbacks=[PredictionWriter(tmp_path)])
    unlink = Path.unlink

    def refuses(path, missing_ok=False):
        if path.name == f"batch-{refused:06d}.npz":
            raise PermissionError("it is open")
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuses)
        with pytest.raises(CheckpointError, match="cannot delete"):
            on.predict(x[:1], batch_size=1, callbacks=[PredictionWriter(tmp_path)])
    on.predict(x[:1], batch_size=1, callbacks=[PredictionWriter(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["batch-000000.npz"]

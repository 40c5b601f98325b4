"""PredictionWriter."""

import numpy as np

import onnxfit
from onnxfit.callbacks import PredictionWriter
from tests.callbacks.helpers import both_backends
from tests.models import two_outputs


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

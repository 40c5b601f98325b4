"""Several ranks train on kinds of data that law tests of sources cannot judge alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxfit import Pad, Trainer, environment, losses
from onnxfit.environment import OnnxruntimeDistribution
from onnxfit.errors import DataError, SettingError
from onnxfit.training import ranks
from tests.data.kinds import X, Y
from tests.distributed.threads import on_ranks

TEXTS = [[1, 2, 3], [2, 2, 1, 4, 1], [3, 1], [1]]  # the second rank has the short ones
TAGS = [[token % 2 for token in text] for text in TEXTS]


def test_ranks_train_on_padded_rows_as_one_process_does() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        tagger (int64[N, T] input_ids) => (float[N, T, 2] y)
        <float[5, 2] table = {0, 0.5, 1, 0, 2, 0, 0, 3, 1, 1}>
        { y = Gather(table, input_ids) }""")
    rows = Pad(TEXTS, TAGS, batch_size=4, shuffle=False)

    def trained(communicator: Any) -> tuple[np.ndarray, list[float]]:
        loss = losses.CrossEntropy(ignore_index=-100)
        trainer = Trainer(model, loss=loss, optimizer=0.5, distribute=communicator)
        figures = trainer.fit(rows, epochs=1, verbose=0).history["loss"]
        return trainer.get_weights()["table"], figures

    weights, figures = trained(None)
    for found in on_ranks(2, trained):
        np.testing.assert_allclose(found[0], weights, atol=1e-6)
        np.testing.assert_allclose(found[1], figures, rtol=1e-6)


def test_a_fixed_batch_dimension_is_that_of_a_share() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        line (float[2, 2] x) => (float[2, 1] y) <float[2, 1] w = {0.5, 0.25}> { y = MatMul(x, w) }""")

    def trained(communicator: Any) -> Trainer:
        trainer = Trainer(model, loss="mse", optimizer=0.01, distribute=communicator)
        trainer.fit(X[:8], Y[:8], epochs=1, batch_size=4, verbose=0)
        trainer.train_on_batch(X[4:8], Y[4:8])
        assert trainer.predict(X[:4], batch_size=4).shape == (4, 1)
        assert trainer.predict_on_batch(X[:4]).shape == (4, 1)
        with pytest.raises(DataError, match=r"but every batch needs 4 \(2 for each of 2 ranks"):
            trainer.train_on_batch(X[:2], Y[:2])
        return trainer

    weights = [trainer.get_weights()["w"] for trainer in on_ranks(2, trained)]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert np.abs(weights[0].ravel() - [0.5, 0.25]).max() > 1e-3


class Sharing:
    """Batches of their own for each rank, of which the second has more."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return self.lengths[0]

    def __iter__(self) -> Any:
        return iter([(X[:2], Y[:2])] * self.lengths[0])

    def shard(self, rank: int, size: int) -> list[Any]:
        return [(X[:2], Y[:2])] * self.lengths[rank]


def line(communicator: Any) -> Trainer:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        line (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {0.5, 0.25}> { y = MatMul(x, w) }""")
    return Trainer(model, loss="mse", optimizer=0.01, distribute=communicator)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("data", "Rank 1 has the data's steps 4, but rank 0 has 3"),
        ("validation", "Rank 1 has the validation data's steps 4, but rank 0 has 3"),
        ("prediction", "different numbers of batches: 3, 4"),
    ],
)
def test_shares_of_other_lengths_are_told(what: str, words: str) -> None:
    data = Sharing(3, 4)

    def run(communicator: Any) -> None:
        trainer = line(communicator)
        calls = {
            "prediction": lambda: trainer.predict(data),
            "data": lambda: trainer.fit(data, verbose=0),
            "validation": lambda: trainer.fit(X[:8], Y[:8], validation_data=data, verbose=0),
        }
        with pytest.raises((SettingError, DataError), match=words):
            calls[what]()
        assert trainer.global_step == 0

    on_ranks(2, run)
    assert on_ranks(2, lambda c: line(c).predict(Sharing(3, 3)).shape) == [(12, 1)] * 2


def test_validation_data_that_differs_is_told() -> None:
    def run(communicator: Any) -> None:
        validation = X[:4] + communicator.rank, Y[:4]
        with pytest.raises(SettingError, match="the validation data's column x"):
            line(communicator).fit(X[:8], Y[:8], validation_data=validation, verbose=0)

    on_ranks(2, run)


def test_an_error_in_a_share_of_a_file_names_rank_and_rows(tmp_path: Path) -> None:
    """Only the rank that reads the row sees it; one in memory is found by all of them."""
    x, y = np.tile(X[:8], (2, 1)), np.tile(Y[:8], (2, 1))
    x[14, 1] = np.nan
    np.save(tmp_path / "x.npy", x)
    found = []

    def run(communicator: Any) -> None:
        trainer = line(communicator)
        with pytest.raises(DataError, match="NaN in row 14"):
            trainer.fit(x, y, batch_size=8, verbose=0)
        try:
            trainer.fit(tmp_path / "x.npy", y, batch_size=8, shuffle=False, verbose=0)
        except DataError as error:
            found.append(str(error))
            raise

    with pytest.raises(DataError):
        on_ranks(2, run)
    assert len(found) == 1
    expected = "In batch 1 of the training data (its rows 4 to 7 are rows 0 to 3 of rank 1): "
    assert found[0].startswith(expected)
    assert found[0].endswith("has NaN in row 2.")


@pytest.mark.parametrize("distribution", ["onnxruntime", "onnxruntime-gpu", "a-build-of-our-own"])
def test_another_onnxruntime_is_told(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may have any distribution of onnxruntime, also one that onnxfit does not know."""
    number = threading.local()

    def installed() -> list[OnnxruntimeDistribution]:
        version = f"1.{getattr(number, 'rank', 0)}"
        return [OnnxruntimeDistribution(distribution, version, Path())]

    def run(communicator: Any) -> None:
        number.rank = communicator.rank
        words = f"Rank 1 has version of {distribution} '1.1', but rank 0 has '1.0'"
        with pytest.raises(SettingError, match=words):
            line(communicator)

    line(None)  # the first use of onnxruntime looks for distributions, too
    monkeypatch.setattr(environment, "installed_distributions", installed)
    monkeypatch.setattr(ranks, "installed_distributions", installed)
    on_ranks(2, run)

"""Every architecture, exported as torch exports today, trains from its file as it does in torch:

`make exports`.

Three steps of SGD, dropout off and the statistics of BatchNormalization fixed, from the file as
torch writes it, from the file that the exporter has optimised, and from one whose batch may have
any size: the losses agree, and every parameter of torch's network is a weight that moves as torch's
does. The same holds at four rows for a file that was exported with one, after `dynamic_batch`; a
network that multiplies its rows by each other is refused, with the node.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onnxfit import ModelError, dynamic_batch
from tests.exports.architectures import ARCHITECTURES
from tests.exports.networks import Comparison, compare, export, network_of, with_rows

STEPS = 3
# networks whose output has an entry for each pair of rows
PAIRS_OF_ROWS = {"clip", "siglip"}
pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers warn of themselves


@pytest.mark.parametrize("mode", ["plain", "optimized", "dynamic"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_from_the_file_as_in_torch(name: str, mode: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = network_of(name)
    export(found, tmp_path / "model.onnx", mode)
    check(compare(found, tmp_path / "model.onnx", mode, STEPS))


@pytest.mark.parametrize("mode", ["plain", "optimized"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_at_four_rows_from_a_file_of_one(name: str, mode: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = network_of(name)
    export(with_rows(found, 1), tmp_path / "fixed.onnx", mode)
    if name in PAIRS_OF_ROWS:
        with pytest.raises(ModelError, match=r"because of MatMul '.+'|would differ .*'.+'"):
            dynamic_batch(tmp_path / "fixed.onnx")
        return
    onnx.save(dynamic_batch(tmp_path / "fixed.onnx"), tmp_path / "model.onnx")
    check(compare(with_rows(found, 4), tmp_path / "model.onnx", mode, STEPS))


def check(compared: Comparison) -> None:
    assert not compared.missing, "parameters of torch that are no weights of the file"
    np.testing.assert_allclose(
        compared.predicted, compared.expected, rtol=1e-3, atol=1e-4, err_msg="before training"
    )
    np.testing.assert_allclose(compared.losses, compared.torch_losses, rtol=1e-3)
    assert not compared.strays, "weights that moved otherwise than in torch"

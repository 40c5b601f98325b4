"""Ranks that mpiexec starts end where one process ends, in float32.

test_laws.py has the laws over all optimizers, losses and penalties, with threads as ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit.distributed
from tests.distributed import ranks, same_cases


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    """What one process computes without an interruption."""
    cases = {name: same_cases.trained(None, **s) for name, s in same_cases.SETTINGS.items()}
    cases[same_cases.RESUMED] = cases["SGD"]
    return {f"{case}: {name}": a for case, arrays in cases.items() for name, a in arrays.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_end_where_one_process_ends(
    size: int,
    alone: dict[str, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mpi4py")
    for name, value in ranks.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ranks.ROOT), *sys.path]))
    command = [sys.executable, "-W", "error", "-m", same_cases.__name__, str(tmp_path)]
    status = onnxfit.distributed.launch(command, size)
    assert status == 0, capfd.readouterr().err

    everyone = [dict(np.load(tmp_path / f"rank{rank}.npz")) for rank in range(size)]
    for found in everyone:
        assert list(found) == list(alone)
        for name, expected in alone.items():
            np.testing.assert_array_equal(found[name], everyone[0][name], err_msg=name)
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
    start = same_cases.network().graph.initializer
    for case in same_cases.SETTINGS:
        moved = [
            np.abs(alone[f"{case}: {i.name}"] - onnx.numpy_helper.to_array(i)).max() for i in start
        ]
        assert min(moved) > 1e-3, case

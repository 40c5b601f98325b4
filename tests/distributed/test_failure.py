"""A training with mpiexec of which a rank fails: the job ends, and its next run goes on.

`scripts/soak.py --only ranks` fails at random moments, on several numbers of ranks.
"""

import importlib.util

import pytest

from tests.distributed import survivor
from tests.distributed.threads import on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"
)


def test_a_training_survives_its_ranks(tmp_path):
    """Killed, failed and out of space, and in the end as if nothing had happened."""
    status, errors = survivor.run(2, tmp_path, kind="kill", rank=1, batch=8)
    assert status != 0, errors
    assert (tmp_path / "backup").exists()
    status, errors = survivor.run(2, tmp_path, kind="raise", rank=1, batch=15)
    assert status != 0
    assert "rank 1 of 2 failed" in errors
    assert "ValueError: a bad row" in errors
    status, errors = survivor.run(2, tmp_path, kind="disk", rank=0, batch=23)
    assert status != 0
    assert "rank 0 of 2 failed" in errors
    assert "No space left on device" in errors
    status, errors = survivor.run(2, tmp_path, kind="none")
    assert status == 0, errors
    whole = on_ranks(2, lambda c: survivor.train(c, tmp_path / f"whole{c.rank}"))
    assert whole[0]["history"] == whole[1]["history"]
    survivor.require_same_end(tmp_path, whole[0])

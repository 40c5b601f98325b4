"""Libraries that only some data needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import onnxfit
from onnxfit.errors import InstallationError
from tests.data.files import columns


@pytest.mark.parametrize(
    ("library", "extra", "made"),
    [
        ("pyarrow", "parquet", lambda at: columns(at / "t.parquet")),
        ("PIL", "images", lambda at: onnxfit.ImageFolder(at, (2, 2))),
    ],
)
def test_a_missing_library_is_asked_for(
    library: str, extra: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InstallationError, match=rf'pip install "onnxfit\[{extra}\]"'):
        made(tmp_path)

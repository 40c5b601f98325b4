"""These tests need torchvision and transformers, and minutes: `make exports`."""

from pathlib import Path

import pytest

from tests.on_request import ignored


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return ignored(Path(__file__).parent, config)

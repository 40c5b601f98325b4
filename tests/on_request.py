"""Folders of tests that need other packages, and minutes: they run where they are asked for by name
(`make exports`, `make genai`), and there fail rather than skip.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def ignored(folder: Path, config: pytest.Config) -> bool | None:
    """Whether a folder is left out, for the hook `pytest_ignore_collect` of its conftest."""
    arguments = (Path(str(argument).split("::")[0]).resolve() for argument in config.args)
    named = any(folder in (path, *path.parents) for path in arguments)
    return None if named else True

"""What every test file shares: reproducible property tests, and no silent skipping where CI runs."""

import os
from importlib.util import find_spec

import hypothesis
import pytest

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)  # no clock, no dice: a red run can be repeated

COMPARED_WITH = ("torch", "sklearn", "flit_core", "matplotlib", "tensorboard")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI") == "true"
    hypothesis.settings.load_profile("ci" if in_ci else "local")
    missing = [module for module in COMPARED_WITH if find_spec(module) is None]
    if in_ci and missing:
        # each test that needs one of these would skip itself, and a green run would mean less than it says
        raise pytest.UsageError(f"CI=true, but {', '.join(missing)} cannot be imported: install the `dev` extra.")

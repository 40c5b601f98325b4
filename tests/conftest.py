"""What every test file shares: reproducible property tests, and no silent skipping where CI runs."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import hypothesis
import pytest

from onnxfit.gradients import table
from tests.builds import HAS_BUILDER

hypothesis.settings.register_profile("local", deadline=None)
# no clock, no dice: a red run can be repeated
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)

# `make test` and `make test-plain` say which onnxruntime they installed
BUILDS = {"training": True, "plain": False}
COMPARED_WITH = (
    "torch",
    "sklearn",
    "skl2onnx",
    "flit_core",
    "matplotlib",
    "tensorboard",
    "yaml",
    "pyarrow",
    "PIL",
)
# modules of ours that cannot be imported without the library they open to
DOORS = ("torch", "sklearn")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI") == "true"
    hypothesis.settings.load_profile("ci" if in_ci else "local")
    wanted = os.environ.get("ONNXFIT_TEST_BUILD")
    # what is compared with PyTorch is compared on the training build; not every Python has a small
    # PyTorch
    missing = [
        module
        for module in COMPARED_WITH
        if find_spec(module) is None and (module, wanted) != ("torch", "plain")
    ]
    if in_ci and missing:
        # each test that needs one of these would skip itself, and a green run would mean less than
        # it says
        raise pytest.UsageError(
            f"CI=true, but {', '.join(missing)} cannot be imported: install the `dev` extra."
        )
    root = config.rootpath / "onnxfit"
    closed = [str(root / f"{library}.py") for library in DOORS if find_spec(library) is None]
    config.option.ignore = [*(config.option.ignore or []), *closed]  # their doctests
    if wanted is not None and BUILDS[wanted] != HAS_BUILDER:
        raise pytest.UsageError(
            f"These tests are for the {wanted} build of onnxruntime, and another one is installed."
        )


@pytest.fixture
def table_of_rules_restored() -> Iterator[None]:
    """The table of gradients as it was, after a test that changes it."""
    tables = (table.RULES, table.DECOMPOSITIONS, table.NOT_DIFFERENTIABLE)
    before = [dict(t) for t in tables]
    yield
    for changed, old in zip(tables, before):
        changed.clear()
        changed.update(old)

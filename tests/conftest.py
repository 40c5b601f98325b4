"""What every test file shares: reproducible property tests, a quick sample of all tests, one thread
in each process, and no silent skipping where CI runs.
"""

import gc
import os
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec

import hypothesis
import pytest

from onnxfit.gradients import table
from tests.builds import HAS_BUILDER
from tests.one_thread import use_one_thread
from tests.samples import ONE_CASE_IN, part_of_build, quick_sample

hypothesis.settings.register_profile("local", deadline=None)
# no clock, no dice: a red run can be repeated
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
# for scripts/mutate_loop.py, which asks only whether a test fails: no search for a small example
hypothesis.settings.register_profile(
    "mutated",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=10)

# `make test` and `make test-plain` say which onnxruntime they installed
BUILDS = {"training": True, "plain": False}
COMPARED_WITH = (
    "torch",
    "sklearn",
    "skl2onnx",
    "flit_core",
    "mpi4py",
    "matplotlib",
    "tensorboard",
    "yaml",
    "pyarrow",
    "PIL",
)
# modules of ours that cannot be imported without the library they open to
DOORS = ("torch", "sklearn")


QUICK_SECONDS = 45  # on a slow machine the rest of the sample is skipped, and counted as skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"a sample in less than a minute: of each test the case with the smallest checksum of"
        f" its name, and one in {ONE_CASE_IN} of the others; no slow files",
    )
    parser.addoption(
        "--divided",
        action="store_true",
        help="one build's part of the tests: the largest ones are divided between both builds of"
        " onnxruntime",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [item.nodeid for item in items]
    if config.getoption("--quick"):
        kept = quick_sample(names)
    elif config.getoption("--divided"):
        kept = part_of_build(names, is_training=HAS_BUILDER)
    else:
        return
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


_began = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--quick") and time.monotonic() - _began > QUICK_SECONDS:
        pytest.skip(f"--quick: {QUICK_SECONDS} s are over")


def pytest_configure(config: pytest.Config) -> None:
    use_one_thread()
    gc.set_threshold(
        20_000
    )  # with Python's own, collecting took 9 % of the time of tests/gradients
    in_ci = os.environ.get("CI") == "true"
    profile = "ci" if in_ci else "local"
    profile = "quick" if config.getoption("--quick") else profile
    hypothesis.settings.load_profile(os.environ.get("ONNXFIT_HYPOTHESIS", profile))
    compiler = os.environ.get("CXX", "c++").split()[0]
    if in_ci and shutil.which(compiler) is None:
        raise pytest.UsageError(f"CI=true, but there is no C++ compiler {compiler!r}: install g++.")
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
    missing = [library for library in DOORS if find_spec(library) is None]
    closed = [str(path) for library in missing for path in root.glob(f"{library}*")]
    config.option.ignore = [*(config.option.ignore or []), *closed]  # their doctests
    if wanted is not None and BUILDS[wanted] != HAS_BUILDER:
        raise pytest.UsageError(
            f"These tests are for the {wanted} build of onnxruntime, and another one is installed."
        )


@pytest.fixture
def table_of_rules_restored() -> Iterator[None]:
    """The table of gradients as it was, after a test that changes it."""
    tables = (table.RULES, table.DECOMPOSITIONS, table.SUBGRAPHS, table.NOT_DIFFERENTIABLE)
    before = [dict(t) for t in tables]
    yield
    for changed, old in zip(tables, before):
        changed.clear()
        changed.update(old)

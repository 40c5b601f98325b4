"""What every test file shares: reproducible property tests, a quick sample of all tests, one thread
in each process, and no silent skipping where CI runs.
"""

import gc
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from importlib.util import find_spec

import hypothesis
import pytest

from onnxfit.gradients import table
from onnxfit.runtime.session_cache import SESSIONS
from tests.builds import HAS_BUILDER
from tests.one_thread import use_one_thread
from tests.samples import (
    LARGE_PRODUCT,
    ONE_CASE_IN,
    ONE_CASE_OF_A_TABLE_IN,
    in_sample_of_product,
    in_sample_of_table,
    quick_sample,
)

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

COMPARED_WITH = (
    "torch",
    "sklearn",
    "skl2onnx",
    "hatchling",
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
        "--sample",
        action="store_true",
        help=f"one case in {ONE_CASE_OF_A_TABLE_IN} of each test with the mark `table`, by checksum;"
        f" of other tests with more than {LARGE_PRODUCT} cases, enough for every value of each"
        f" parameter",
    )


def values_of_parameters(item: pytest.Item) -> list[Hashable]:
    """The values of one case, those of a common `parametrize` as one.

    They are objects of lists that exist while tests do, so that their addresses tell them apart.
    """
    callspec = getattr(item, "callspec", None)  # of a test with parameters
    values = {name: id(value) for name, value in callspec.params.items()} if callspec else {}
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        found.append(tuple((name, values.pop(name)) for name in names if name in values))
    return [*found, *values.items()]  # the rest are parameters of fixtures


def sample(items: list[pytest.Item]) -> set[str]:
    """Return the names of the tests that `--sample` runs."""
    kept = set()
    products = defaultdict[str, dict[str, list[Hashable]]](dict)
    for item in items:
        if not item.get_closest_marker("table"):
            products[item.nodeid.partition("[")[0]][item.nodeid] = values_of_parameters(item)
        elif in_sample_of_table(item.nodeid):
            kept.add(item.nodeid)
    return kept.union(*map(in_sample_of_product, products.values()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not HAS_BUILDER:
        for item in items:
            if item.get_closest_marker("builder"):
                item.add_marker(pytest.mark.skip(reason="onnxruntime has no gradient builder"))
    names = [item.nodeid for item in items]
    if config.getoption("--quick"):
        kept = quick_sample(names)
    elif config.getoption("--sample"):
        kept = sample(items)
    else:
        return
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


_began = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--quick") and time.monotonic() - _began > QUICK_SECONDS:
        pytest.skip(f"--quick: {QUICK_SECONDS} s are over")
    SESSIONS.clear()  # a test that counts what is compiled does not depend on earlier tests


def pytest_configure(config: pytest.Config) -> None:
    use_one_thread()
    gc.set_threshold(
        20_000
    )  # with Python's own, collecting took 9 % of the time of tests/gradients
    in_ci = os.environ.get("CI") == "true"
    profile = "ci" if in_ci else "local"
    profile = "quick" if config.getoption("--quick") else profile
    hypothesis.settings.load_profile(os.environ.get("ONNXFIT_HYPOTHESIS", profile))
    for program in (os.environ.get("CXX", "c++").split()[0], "cmake"):
        if in_ci and shutil.which(program) is None:
            raise pytest.UsageError(f"CI=true, but there is no {program!r}: install g++ and cmake.")
    # PyTorch is compared with in one environment alone: not every Python has a small PyTorch
    without = os.environ.get("ONNXFIT_TEST_WITHOUT", "").split()
    missing = [m for m in COMPARED_WITH if find_spec(m) is None and m not in without]
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
    if in_ci and config.getoption("markexpr") == "builder" and not HAS_BUILDER:
        raise pytest.UsageError("These tests need the training build of onnxruntime.")


@pytest.fixture
def table_of_rules_restored() -> Iterator[None]:
    """The table of gradients as it was, after a test that changes it."""
    tables = (table.RULES, table.DECOMPOSITIONS, table.SUBGRAPHS, table.NOT_DIFFERENTIABLE)
    before = [dict(t) for t in tables]
    yield
    for changed, old in zip(tables, before):
        changed.clear()
        changed.update(old)

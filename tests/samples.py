"""The tests that `--quick` and `--sample` run. Checksums of their names choose the cases, so that
they are the same on every machine.
"""

import zlib
from collections.abc import Collection, Hashable, Mapping

# `--quick`, as `make test-quick` has it: files whose tests start processes, build distributions,
# train for long or measure. They run in `make test`.
LEFT_OUT_OF_QUICK = (
    "tests/distributed/test_mpi.py",
    "tests/distributed/test_process_group.py",
    "tests/exports/",
    "tests/gradients/rules/test_backend.py",
    "tests/runtime/test_memory.py",
    "tests/test_benchmarks.py",
    "tests/test_examples.py",
    "tests/test_exported.py",
    "tests/test_faults.py",
    "tests/test_hostile.py",
    "tests/test_packaging.py",
    "tests/test_sklearn.py",
    "tests/test_torch.py",
    "tests/test_torch_derivatives.py",
    "tests/training/test_survival.py",
)
ONE_CASE_IN = 50  # of a test with many cases; of every test at least one
# `--sample`, as `make test` has it: of tests with the mark `table`, whose cases are one long list
ONE_CASE_OF_A_TABLE_IN = 3
LARGE_PRODUCT = 24  # `--sample` runs all cases of a test that has at most so many


def checksum(name: str) -> int:
    return zlib.crc32(name.encode())


def in_sample_of_table(name: str) -> bool:
    """Return whether `--sample` runs this case of a test with the mark `table`."""
    return not checksum(name) % ONE_CASE_OF_A_TABLE_IN


def in_sample_of_product(cases: Mapping[str, Collection[Hashable]]) -> set[str]:
    """Choose cases of a test with several parameters, so that every value of each parameter is in one.

    `cases` has the values of the parameters for the name of each case. A test with one parameter
    keeps all of its cases.
    """
    if len(cases) <= LARGE_PRODUCT:
        return set(cases)
    seen = set[Hashable]()
    kept = set()
    for name in sorted(cases, key=checksum):
        if not seen.issuperset(cases[name]):
            seen.update(cases[name])
            kept.add(name)
    return kept


def first_cases(names: Collection[str]) -> set[str]:
    """One case of each test."""
    tests: dict[str, str] = {}
    for name in sorted(names, key=checksum):
        tests.setdefault(name.partition("[")[0], name)
    return set(tests.values())


def quick_sample(names: Collection[str]) -> set[str]:
    """The tests of these names that `--quick` runs."""
    names = [name for name in names if not name.startswith(LEFT_OUT_OF_QUICK)]
    return first_cases(names) | {name for name in names if not checksum(name) % ONE_CASE_IN}

"""Which tests run with `--quick` and with `--divided`. Checksums of their names choose the cases, so
that they are the same on every machine.
"""

import zlib
from collections.abc import Collection

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
    "tests/test_hostile.py",
    "tests/test_packaging.py",
    "tests/test_sklearn.py",
    "tests/test_torch.py",
    "tests/training/test_survival.py",
)
ONE_CASE_IN = 50  # of a test with many cases; of every test at least one

# `--divided`, as .ci/run has it. Of files, figures, estimators, formulas, refusals, the loop's
# bookkeeping, the tables of other devices' kernels and the project's own texts, a plain onnxruntime
# makes nothing new: these tests run on the training build alone. `make test-plain` runs them, too.
ON_TRAINING_BUILD = (
    "tests/callbacks/",
    "tests/cli/",
    "tests/distributed/",
    "tests/drawing/",
    "tests/training/",
    *(
        f"tests/test_{name}.py"
        for name in (
            "architecture", "behaviour", "benchmarks", "contributing", "cuda_kernels", "docs_imports", "errors", "examples",
            "files", "hostile", "losses", "messages", "metrics", "mutate_loop", "mutate_rules", "onnxcustom", "optimizers",
            "packaging", "penalties", "profile_step", "public_api", "reference", "registries", "schedules", "sklearn", "web_federated",
            "webgpu_kernels",
        )
    ),
    *(f"tests/data/test_{name}.py" for name in ("arrow", "images", "mapped", "optional", "parquet")),
    "tests/gradients/test_blocker.py",
    "tests/gradients/test_functions.py",
    "tests/gradients/rules/test_backend.py",
    "tests/step/test_limits.py",
    "tests/step/test_read_only.py",
    "tests/step/test_tracker.py",
)  # fmt: skip
# The largest tables of cases. No case is skipped on one build alone: the other one may not run it.
DIVIDED = (
    "tests/gradients/rules/test_devices.py",
    "tests/gradients/rules/test_rules.py",
    "tests/quantization/test_dequantize.py",
    "tests/quantization/test_parameters.py",
    "tests/quantization/test_quantize.py",
    "tests/runtime/kernels/test_dense.py",
    "tests/step/test_precision.py",
)


def checksum(name: str) -> int:
    return zlib.crc32(name.encode())


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


def part_of_build(names: Collection[str], *, is_training: bool) -> set[str]:
    """The tests of these names that `--divided` runs on one of the two builds of onnxruntime.

    Of a test whose cases are divided, one case runs on both; each of the others runs on one of them.
    """
    on_both = first_cases(names)

    def runs(name: str) -> bool:
        if name.startswith(ON_TRAINING_BUILD):
            return is_training
        return name in on_both or not name.startswith(DIVIDED) or checksum(name) % 2 == is_training

    return {name for name in names if runs(name)}

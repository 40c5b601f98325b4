"""Compile and test the C++ loops of kernels/ with each compiler, and for processors that are emulated.

python scripts/kernels_everywhere.py [VARIANT ...]

A variant whose programs are not installed is skipped with a message. Debian has them in the packages
g++, clang, libclang-rt-dev, qemu-user and g++-aarch64-linux-gnu.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KERNELS, BUILDS = ROOT / "kernels", ROOT / "build" / "kernels"


class Variant(NamedTuple):
    """A build of the tests: the programs that it needs and its settings for CMake."""

    programs: tuple[str, ...]
    settings: dict[str, str]


def toolchain(name: str) -> dict[str, str]:
    """Return the setting that selects a file of kernels/toolchains/."""
    return {"CMAKE_TOOLCHAIN_FILE": str(KERNELS / "toolchains" / name)}


GCC, CLANG = {"CMAKE_CXX_COMPILER": "g++"}, {"CMAKE_CXX_COMPILER": "clang++"}
SANITIZERS = {"ONNXFIT_KERNELS_SANITIZERS": "address,undefined"}
VARIANTS = {
    "gcc": Variant(("g++",), GCC),
    "gcc-sanitizers": Variant(("g++",), GCC | SANITIZERS),
    "clang": Variant(("clang++",), CLANG),
    "clang-sanitizers": Variant(("clang++",), CLANG | SANITIZERS),
    # The loops that remain without types for vectors, as with Visual C++.
    "without-vectors": Variant(("g++",), GCC | {"CMAKE_CXX_FLAGS": "-DWITHOUT_VECTORS"}),
    "gcc-without-avx": Variant(("g++", "qemu-x86_64"), GCC | toolchain("x86-64-without-avx.cmake")),
    "clang-without-avx": Variant(
        ("clang++", "qemu-x86_64"), CLANG | toolchain("x86-64-without-avx.cmake")
    ),
    "aarch64": Variant(("aarch64-linux-gnu-g++", "qemu-aarch64"), toolchain("aarch64.cmake")),
}


def missing_programs(variant: Variant) -> list[str]:
    """Return the programs and libraries that a variant needs and that are not installed."""
    missing = [program for program in variant.programs if not shutil.which(program)]
    sanitizers = variant.settings.get("ONNXFIT_KERNELS_SANITIZERS")
    if sanitizers and not missing and not links(variant.programs[0], sanitizers):
        missing.append(f"the sanitizers of {variant.programs[0]}")
    return missing


def links(compiler: str, sanitizers: str) -> bool:
    """Return whether a compiler links a program with sanitizers. Clang has them in a package of its own."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "empty")
        command = [compiler, f"-fsanitize={sanitizers}", "-x", "c++", "-", "-o", program]
        run = subprocess.run(command, input=b"int main() {}", capture_output=True, check=False)
    return run.returncode == 0


def test(name: str, jobs: int) -> bool:
    """Compile and test a variant. Return whether it passes."""
    folder = BUILDS / name
    settings = [f"-D{key}={value}" for key, value in VARIANTS[name].settings.items()]
    commands = [
        ["cmake", "-S", KERNELS, "-B", folder, "-DONNXFIT_KERNELS_TESTS=ON", *settings],
        ["cmake", "--build", folder, "--parallel", str(jobs)],
        ["ctest", "--test-dir", folder, "--parallel", str(jobs), "--output-on-failure"],
    ]
    return all(subprocess.run(command, check=False).returncode == 0 for command in commands)


def main() -> int:
    """Test the variants that the command line names, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("variants", nargs="*", choices=[[], *VARIANTS], metavar="VARIANT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    outcomes = {}
    for name in options.variants or VARIANTS:
        missing = missing_programs(VARIANTS[name])
        if missing:
            outcomes[name] = f"SKIPPED, not tested: {', '.join(missing)} not installed"
        else:
            outcomes[name] = "passed" if test(name, options.jobs) else "FAILED"
    print("\n" + "\n".join(f"{name:20} {outcome}" for name, outcome in outcomes.items()))
    return int("FAILED" in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())

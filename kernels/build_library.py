"""Compile the library of operators: python build_library.py FILE [--sanitized]

With --sanitized, FILE is a program that runs the kernels under the sanitizers for addresses and
undefined behaviour. CXX names the compiler; else it is c++, on Windows cl.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Products and sums are rounded one by one, as the operators of ONNX round them. Nothing reads errno
# or the flags of floating-point exceptions.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
WINDOWS_FLAGS = ["/std:c++17", "/O2", "/fp:precise", "/EHsc", "/nologo"]
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DSANITIZED"]


def command(output: Path, *, sanitized: bool = False) -> list[str]:
    """Return the call of the compiler."""
    sources = [str(path) for path in sorted((FOLDER / "src").glob("*.cpp"))]
    compiler = shlex.split(os.environ.get("CXX", ""))
    if sys.platform == "win32":
        return [*(compiler or ["cl"]), *WINDOWS_FLAGS, *sources, "/LD", f"/Fe:{output}"]
    compiler = compiler or ["c++"]
    if sanitized:
        driver = str(FOLDER / "tests" / "sanitized.cpp")
        kernels = [path for path in sources if not path.endswith("library.cpp")]
        return [
            *compiler,
            *FLAGS,
            *SANITIZERS,
            f"-I{FOLDER / 'src'}",
            *kernels,
            driver,
            "-o",
            str(output),
        ]
    return [*compiler, *FLAGS, "-shared", *sources, "-o", str(output)]


def build(output: Path, *, sanitized: bool = False) -> None:
    """Write the library, or the program with sanitizers."""
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(output, sanitized=sanitized), check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--sanitized", action="store_true")
    options = parser.parse_args()
    build(options.output, sanitized=options.sanitized)

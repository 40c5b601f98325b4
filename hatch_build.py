"""Compile the operators in C++ of kernels/ for a wheel, or for `pip install -e`.

Without a C++ compiler, the wheel has no operators, and training uses those of onnxruntime.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "onnxfit/kernels/operators.so"


class OperatorsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook: it calls CMake, and names the platform of the wheel."""

    def dependencies(self) -> list[str]:
        """Return the packages that building needs in addition to hatchling."""
        return [] if shutil.which("cmake") else ["cmake >=3.18", "ninja"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled library to a wheel; `version` is "standard" or "editable"."""
        try:
            library = self._compile()
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"onnxfit is built without its operators in C++: {error}")
            return
        if version == "editable":  # the checkout itself is imported
            target = Path(self.root, LIBRARY)
            target.unlink(missing_ok=True)  # a process may have loaded it
            shutil.copy2(library, target)
        else:
            build_data["force_include"][str(library)] = LIBRARY
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # it has no code for one version of Python

    def _compile(self) -> Path:
        build = Path(self.root, "build", "operators")
        # It names the CMake and Ninja of the last build, which pip may have removed since. The
        # compiled files stay.
        Path(build, "CMakeCache.txt").unlink(missing_ok=True)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        source = Path(self.root, "kernels")
        configure = ["cmake", "-S", str(source), "-B", str(build), *generator]
        compile_ = ["cmake", "--build", str(build), "--config", "Release", "--target", "operators"]
        for command in (configure, [*compile_, "--parallel"]):
            subprocess.run(command, check=True)
        (library,) = build.rglob("operators.so")
        return library

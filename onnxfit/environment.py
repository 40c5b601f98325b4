"""The environment of this process: installed packages, the onnxruntime in use, and switches.

onnxfit requires no distribution of onnxruntime, because pip cannot require one of several. The user
installs the distribution for the device. All of them write the same folder `onnxruntime`, and
nothing keeps a second one from being installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from onnxfit.errors import InstallationError, warn_user

PACKAGES = (
    "onnx", "onnx-ir", "numpy", "safetensors", "tensorboardX", "tqdm", "click", "flatbuffers",
)  # fmt: skip
MODULE = "onnxruntime"
# Those to keep come first: for a GPU, for another device, with gradients. The plain one is last:
# other packages require it, so it is often installed unintentionally.
DISTRIBUTIONS = (
    "onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-migraphx", "onnxruntime-directml",
    "onnxruntime-webgpu", "onnxruntime-openvino", "onnxruntime-qnn", "onnxruntime-training",
    "onnxruntime-training-cpu", "ort-nightly-gpu", "ort-nightly-directml", "ort-nightly-qnn",
    "ort-nightly", "onnxruntime",
)  # fmt: skip

SYSCTL = "/usr/sbin/sysctl"  # of macOS
# Instruction set -> the flags of a processor that has it, on Linux and macOS
INSTRUCTION_SETS = {
    "AVX2": {"avx2"},
    "AVX-512": {"avx512f"},
    "AVX512-BF16": {"avx512_bf16"},
    "AMX": {"amx_tile"},
    "NEON": {"neon", "asimd"},
}

_first_use = threading.Lock()  # held as soon as `warn_of_mixed_distributions` was called


@dataclass(frozen=True)
class OnnxruntimeDistribution:
    """An installed distribution with the module `onnxruntime`.

    - `name`, `version`: as pip lists them.
    - `folder`: the folder that has the module, such as site-packages.
    """

    name: str
    version: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed_distributions() -> list[OnnxruntimeDistribution]:
    """Return every installed distribution with the module `onnxruntime`, also unknown ones."""
    installed: dict[tuple[str, Path], OnnxruntimeDistribution] = {}
    for candidate in _candidates():
        found = _with_runtime(candidate)
        if found is not None:
            installed.setdefault((found.name, found.folder), found)
    return list(installed.values())


def _with_runtime(candidate: importlib.metadata.Distribution) -> OnnxruntimeDistribution | None:
    """Return a distribution; None if it has no onnxruntime, or if pip does not know it.

    A failed uninstallation leaves a folder without metadata, or one whose name begins with "~".
    """
    files = candidate.read_text("RECORD")
    if files is not None and f"{MODULE}/__init__.py," not in files:
        return None
    # The parser of importlib.metadata would take 2 ms.
    text = candidate.read_text("METADATA") or candidate.read_text("PKG-INFO") or ""
    header = text.partition("\n\n")[0]
    fields = dict(re.findall(r"^(Name|Version): *(\S+)", header, re.MULTILINE))
    if len(fields) < 2:
        return None
    folder = Path(str(candidate.locate_file("")))
    if not any(importlib.metadata.distributions(name=fields["Name"], path=[str(folder)])):
        return None
    name = re.sub(r"[-_.]+", "-", fields["Name"]).lower()
    return OnnxruntimeDistribution(name, fields["Version"], folder.resolve())


def _candidates() -> Iterator[importlib.metadata.Distribution]:
    """Yield the distributions with a known name, then those that list the module.

    setuptools writes the names of a distribution's modules into a small file. Among 67
    distributions, both searches take 2 ms. The complete lists of files would take 160 ms.
    """
    for name in DISTRIBUTIONS:
        yield from importlib.metadata.distributions(name=name)
    for found in importlib.metadata.distributions():
        if MODULE in (found.read_text("top_level.txt") or "").split():
            yield found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that onnxfit uses, for bug reports.

    Of onnxruntime, every installed distribution is listed. If there are several, the command
    `onnxfit doctor` says how to repair the installation.
    """
    # platform.platform() would start the program `uname`.
    system = "-".join((platform.system(), platform.release(), platform.machine()))
    versions = {"python": platform.python_version(), "platform": system}
    for package in ("onnxfit", *PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for one in installed_distributions():
        versions.setdefault(one.name, one.version)
    return versions


def instruction_sets() -> str:
    """Return the instruction sets of the processor that matter here; "unknown" on Windows x86."""
    try:
        if platform.system() == "Linux":
            return known_instruction_sets(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if platform.machine().lower() == "arm64":  # has NEON by definition
            return known_instruction_sets("neon")
        if platform.system() == "Darwin":
            keys = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
            command = [SYSCTL, "-n", *keys]
            return known_instruction_sets(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
    except (OSError, subprocess.SubprocessError):
        pass
    return "unknown"


def known_instruction_sets(flags: str) -> str:
    """Return the instruction sets in a list of a processor's flags.

    >>> known_instruction_sets("flags : fpu avx2 avx512f amx_tile")
    'AVX2, AVX-512, AMX'
    """
    present = set(flags.lower().split())
    return ", ".join(name for name, any_of in INSTRUCTION_SETS.items() if any_of & present) or (
        f"none of {', '.join(INSTRUCTION_SETS)}"
    )


def require_onnxruntime() -> Any:
    """Return the module `onnxruntime`.

    InstallationError: it is missing or broken. The message has the commands that repair it.
    """
    try:
        import onnxruntime
        from onnxruntime.capi import _pybind_state  # noqa: F401

        for name in ("__version__", "InferenceSession"):
            getattr(onnxruntime, name)
    except Exception as error:  # builds for GPUs check their libraries, and raise any class
        raise InstallationError(_why_unusable(error)) from error
    return onnxruntime


def _why_unusable(error: Exception) -> str:
    """Return the message for an onnxruntime that could not be imported."""
    installed = installed_distributions()
    spec = PathFinder.find_spec(MODULE)
    file = spec.origin if spec is not None else None
    if file is None and not installed:
        return (
            "onnxruntime is not installed. For the CPU, run\n  pip install onnxruntime\n"
            'For other devices, install an extra instead, as in pip install "onnxfit[gpu]":\n'
            "gpu (NVIDIA), directml (Windows), openvino (Intel) or webgpu."
        )
    if file is not None and installed and not in_folder_of(file, installed):
        return (
            f"onnxruntime cannot be imported: {file} hides the installed {installed[0]}. Rename"
            " that file or its folder."
        )
    names = " and ".join(map(str, installed)) or MODULE
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return reinstallation(
        f"{names} cannot be imported: {reason}. Another distribution of onnxruntime may have"
        " overwritten or removed its files.",
        installed,
    )


def reinstallation(
    problem: str, installed: Sequence[OnnxruntimeDistribution], package: str | None = None
) -> str:
    """Return a message with the commands that replace all distributions of onnxruntime by one.

    - `problem`: the message before the commands.
    - `installed`: the distributions to uninstall.
    - `package`: the package to install. By default it is one of these distributions.
    """
    names = sorted({one.name for one in installed}, key=_place_in_order)
    uninstall = [f"pip uninstall -y {' '.join(names)}"] if names else []
    kept = package or (names[0] if names else MODULE)
    return "\n  ".join((f"{problem} Run", *uninstall, f"pip install {kept}"))


def _place_in_order(name: str) -> int:
    """Return the place of a name in DISTRIBUTIONS. Unknown names are just before the plain one."""
    return DISTRIBUTIONS.index(name) if name in DISTRIBUTIONS else len(DISTRIBUTIONS) - 2


def mixed_distributions() -> str | None:
    """Return the message for an onnxruntime with files of several distributions, or None.

    InstallationError: onnxruntime is missing or broken.
    """
    onnxruntime = require_onnxruntime()
    installed = in_folder_of(onnxruntime.__file__, installed_distributions())
    if len(installed) > 1:
        kept = min((one.name for one in installed), key=_place_in_order)
        return reinstallation(
            f"{' and '.join(map(str, installed))} have overwritten each other's files. Keep one of"
            f" them, for example {kept}.",
            installed,
        )
    if installed and _release(installed[0].version) != _release(onnxruntime.__version__):
        return reinstallation(
            f"{installed[0]} is installed, but its files are those of onnxruntime"
            f" {onnxruntime.__version__}: another distribution has overwritten them.",
            installed,
        )
    return None


def warn_of_mixed_distributions() -> None:
    """Warn if onnxruntime has the files of several distributions. Only the first call checks."""
    if _first_use.acquire(blocking=False):
        problem = mixed_distributions()
        if problem is not None:
            warn_user(problem)


def in_folder_of(
    file: str, installed: Sequence[OnnxruntimeDistribution]
) -> list[OnnxruntimeDistribution]:
    """Return the distributions in the folder that a module's file belongs to.

    Distributions in other folders have files of their own.
    """
    folder = Path(file).parent.parent.resolve()
    return [one for one in installed if one.folder == folder]


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without the marks of a nightly or a CUDA build.

    >>> _release("1.19.2+cu118"), _release("1.24.0.dev20250901001")
    ((1, 19, 2), (1, 24))
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    release = re.sub(r"(\.0)*$", "", numbers[0]) if numbers else "0"
    return tuple(map(int, release.split(".")))


def is_switched_off(variable: str) -> bool:
    """Return whether an environment variable is "off", in any case of letters."""
    return os.environ.get(variable, "").strip().lower() == "off"


@contextmanager
def uninstalled(name: str) -> Iterator[None]:
    """Context in which `importlib.util.find_spec` finds no module of this name, nor does `import`.

    - `name`: the module. If it is imported already, it stays so. Other threads do not find it
      either: use it for a few imports only.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(name) is None:
            sys.modules.pop(name, None)

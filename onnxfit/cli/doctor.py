"""`onnxfit doctor`: the installation, its problems, and the commands that repair them."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from onnxfit import __version__
from onnxfit.cli import options
from onnxfit.environment import (
    PACKAGES,
    OnnxruntimeDistribution,
    in_folder_of,
    installed_distributions,
    instruction_sets,
    is_switched_off,
    mixed_distributions,
    require_onnxruntime,
    versions,
)
from onnxfit.errors import InstallationError
from onnxfit.step.providers import PROVIDERS

__all__ = ["doctor"]

COLUMNS = 80
LABELS = {
    "gradient_builder": "gradient builder",
    "instruction_sets": "instruction sets",
    "operators": "C++ operators",
}
SWITCHES = ("ONNXFIT_KERNELS", "ONNXFIT_CUDA_GRAPHS")


@dataclass
class Diagnosis:
    """The state of an installation.

    - `versions`: Python, the platform, and the packages without those of onnxruntime.
    - `distributions`: name, version, folder and verdict of each distribution of onnxruntime.
    - `onnxruntime`: the version, folder, providers and gradient builder of the imported module.
    - `processor`: its instruction sets, and whether the C++ operators are used.
    - `switches`: environment variables that switch something off, each "on" or "off".
    - `plugins`: packages with an execution provider beside onnxruntime, each with the devices that
      it reports, or the reason why it cannot be used.
    - `problems`: messages with the commands that repair the installation.
    """

    versions: dict[str, str]
    distributions: list[dict[str, str]] = field(default_factory=list)
    onnxruntime: dict[str, str] = field(default_factory=dict)
    processor: dict[str, str] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        installed = [
            (one["name"], f"{one['version']}, {one['verdict']}") for one in self.distributions
        ] or [("distributions", "none")]
        sections = [
            _table(self.versions.items()),
            "onnxruntime\n" + _table([*installed, *self.onnxruntime.items()]),
            *(["plugins\n" + _table(self.plugins.items())] if self.plugins else []),
            "processor\n" + _table([*self.processor.items(), *self.switches.items()]),
            *map(_wrapped, self.problems or ["No problems."]),
        ]
        return "\n\n".join(sections)


@click.command(short_help="Check the installation, and say how to repair it.")
@options.as_json
def doctor(as_json: bool) -> None:
    """List the installed packages, the onnxruntime in use and the processor's abilities, and check
    them for problems.

    Each problem comes with the commands that repair it. Exit code 1 if there is a problem. Please
    add the output to bug reports.

    \b
    onnxfit doctor
    onnxfit doctor --json
    """
    found = diagnose()
    click.echo(json.dumps(asdict(found), indent=2) if as_json else str(found))
    if found.problems:
        raise SystemExit(1)


def diagnose() -> Diagnosis:
    """Return the state of the installation, with or without onnxruntime."""
    installed = installed_distributions()
    names = {one.name for one in installed}
    packages = {name: version for name, version in versions().items() if name not in names}
    # A clone of the repository that is on the path has no distribution to ask.
    found = Diagnosis({**packages, "onnxfit": __version__})
    missing = [name for name in PACKAGES if name not in packages]
    if missing:
        found.problems.append(f"Packages are missing. Run\n  pip install {' '.join(missing)}")
    operators = "unknown"
    try:
        module = require_onnxruntime()
    except InstallationError as error:
        found.problems.append(str(error))
        found.distributions = _verdicts(installed, installed, "cannot be imported")
    else:
        mixed = mixed_distributions()
        found.problems += [mixed] if mixed else []
        verdict = "has files of another distribution" if mixed else "in use"
        used = in_folder_of(module.__file__, installed)
        found.distributions = _verdicts(installed, used, verdict)
        found.onnxruntime = {
            "version": module.__version__,
            "folder": _short(Path(module.__file__).parent),
            "providers": ", ".join(module.get_available_providers()),
            "gradient_builder": "unknown" if missing else _gradient_builder(),
        }
        operators = "unknown" if missing else _operators(found.problems)
        found.plugins = {} if missing else _plugins()
    found.processor = {"instruction_sets": instruction_sets(), "operators": operators}
    found.switches = {name: _switch(name) for name in SWITCHES}
    return found


def _verdicts(
    installed: Sequence[OnnxruntimeDistribution],
    used: Sequence[OnnxruntimeDistribution],
    verdict: str,
) -> list[dict[str, str]]:
    """Return descriptions of the distributions, with the verdict on those that are used."""
    return [
        {
            "name": one.name,
            "version": one.version,
            "folder": _short(one.folder),
            "verdict": verdict if one in used else "hidden by another folder",
        }
        for one in installed
    ]


def _gradient_builder() -> str:
    """Return whether onnxruntime can differentiate, as `gradient="onnxruntime"` needs."""
    from onnxfit.gradients.onnxruntime.builder import require_builder  # imports onnx

    try:
        require_builder()
    except InstallationError:
        return "no, as this is an inference build"
    return "yes"


def _plugins() -> dict[str, str]:
    """Return the state of each installed plugin, whose library is loaded to ask for its devices."""
    from onnxfit.runtime.plugins import describe_device, installed_plugins  # imports onnxruntime

    states = {}
    for plugin in installed_plugins():
        try:
            devices = ", ".join(map(describe_device, plugin.register()))
            state = f"reports {devices}" if devices else "reports no device that it can run on"
        except RuntimeError as error:
            state = f"cannot be used: {error}"
        known = "" if plugin.kind in PROVIDERS else ", which onnxfit does not use"
        states[str(plugin)] = f"device {plugin.kind!r}{known}; {state}"
    return states


def _operators(problems: list[str]) -> str:
    """Return whether the C++ operators are used; append to the problems if they do not work."""
    from onnxfit.kernels.library import status  # imports onnxruntime

    found = status()
    if found.state == "unusable":
        problems.append(
            f"The C++ operators cannot be loaded: {found.detail}. Run\n"
            "  pip install --force-reinstall --no-deps onnxfit"
        )
    return f"{found.state}, {found.detail}" if found.detail else found.state


def _switch(variable: str) -> str:
    """Return the state of a switch, and its value if that has no meaning."""
    value = os.environ.get(variable, "")
    if is_switched_off(variable):
        return "off"
    return "on" if value.lower() in ("", "on") else f"on ({value!r} is ignored; use 'off')"


def _short(path: Path) -> str:
    """Return a path without the user's name."""
    home = str(Path.home())
    return str(path).replace(home, "~", 1) if str(path).startswith(home + os.sep) else str(path)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Return lines of a name and its value, at most 80 columns wide."""
    labelled = [(LABELS.get(name, name), value) for name, value in rows]
    width = max(len(label) for label, _ in labelled)
    return "\n".join(
        textwrap.fill(
            value,
            COLUMNS,
            initial_indent=f"  {label:<{width}}  ",
            subsequent_indent=" " * (width + 4),
            break_on_hyphens=False,
        )
        for label, value in labelled
    )


def _wrapped(message: str) -> str:
    """Return a message in lines of at most 80 columns. Commands stay as they are."""
    return "\n".join(
        line if line.startswith(" ") else textwrap.fill(line, COLUMNS, break_on_hyphens=False)
        for line in message.splitlines()
    )

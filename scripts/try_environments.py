"""Install the wheel beside each distribution of onnxruntime, and train there:

`python scripts/try_environments.py dist/*.whl [--python PYTHON ...]`. Whatever onnxruntime an
environment has before, it has afterwards, file by file. onnxruntime-gpu trains on the CPU here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

# The distributions, the versions of the files, and one checksum of all files of the package.
STATE = """
import hashlib, importlib.metadata, importlib.util, json, pathlib
found = sorted(
    (d.metadata["Name"], d.version) for d in importlib.metadata.distributions() if (d.metadata["Name"] or "").startswith("onnxruntime")
)
spec = importlib.util.find_spec("onnxruntime")
digest, version, providers = hashlib.sha256(), None, None
if spec:
    folder = pathlib.Path(spec.origin).parent
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    import onnxruntime
    version, providers = onnxruntime.__version__, onnxruntime.get_available_providers()
print(json.dumps([found, version, providers, digest.hexdigest()]))
"""
NOTHING = [[], None, None, hashlib.sha256().hexdigest()]


class Environment:
    """A virtual environment in a folder."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        command = [python, "-m", "venv", str(folder / "venv")]
        subprocess.run(command, check=True)
        self.python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"

    def run(self, *arguments: str) -> str:
        """Run Python outside the checkout, and return what it prints."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout

    def install(self, *requirements: str) -> None:
        quickly = ["--disable-pip-version-check", "--no-compile", "--quiet"]
        self.run("-m", "pip", "install", *quickly, *requirements)

    def state(self) -> list[object]:
        """The onnxruntime of the environment."""
        return list(json.loads(self.run("-c", STATE)))


def attempt(wheel: Path, python: str, runtime: str | None) -> str:
    """Try one environment; return a line for the table."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder), python)
        if runtime:
            environment.install(runtime)
        before = environment.state()
        environment.install(str(wheel))
        if environment.state() != before:
            sys.exit(f"{runtime}: the installation changed {before} into {environment.state()}")
        if runtime is None:
            assert before == NOTHING, before
            try_without_onnxruntime(environment)
            environment.install(f"onnxfit[cpu] @ {wheel.as_uri()}")
        for name in ("models.py", "linear_regression.py"):
            shutil.copy(EXAMPLES / name, environment.folder)
        environment.run("-W", "error", "linear_regression.py")
        found, version, providers, _ = environment.state()
        interpreter = environment.run("-c", "import sys; print(*sys.version_info[:2], sep='.')")
        return f"{interpreter.strip():6} {runtime or 'none, then [cpu]':28} {found} {version} {providers}: trains"


def try_without_onnxruntime(environment: Environment) -> None:
    """The error names the command that is missing."""
    code = "import onnxfit\ntry:\n    onnxfit.Trainer\nexcept onnxfit.InstallationError as e:\n    print(e)"
    message = environment.run("-c", code)
    if "pip install onnxruntime" not in message:
        sys.exit(f"Without onnxruntime, the error does not say how to install it: {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="*", default=[sys.executable], help="interpreters")
    parser.add_argument(
        "--runtime",
        nargs="*",
        default=["onnxruntime", "onnxruntime-gpu", "onnxruntime-training", "none"],
        help="requirements of pip, or none",
    )
    options = parser.parse_args()
    for python in options.python:
        for runtime in options.runtime:
            chosen = None if runtime == "none" else runtime
            print(attempt(options.wheel.resolve(), python, chosen), flush=True)


if __name__ == "__main__":
    main()

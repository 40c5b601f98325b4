"""Install the wheel into a fresh environment and use it outside the checkout:

`python scripts/try_wheel.py dist/*.whl`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

# every module of the checkout must be in the wheel; a door to a library that is not there says how
# to get it
IMPORTS = """
import importlib, sys
from pathlib import Path
import onnxfit, onnxfit.callbacks
where = Path(onnxfit.__file__)
assert Path(sys.prefix) in where.parents, f"imported from {where}, not from the wheel"
assert where.with_name("py.typed").exists(), "py.typed is missing: type checkers would ignore the annotations"
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except onnxfit.InstallationError as error:
        assert module.startswith(("onnxfit.torch", "onnxfit.sklearn")), f"{module}: {error}"
        assert f"onnxfit[{module.split('.')[1]}]" in str(error), error
print(f"onnxfit {onnxfit.__version__}: {len(sys.argv) - 1} modules imported from the wheel")
"""

# finding the library runs one of its operators
KERNELS = """
from onnxfit.kernels.library import library_path
assert library_path() is not None, "onnxfit does not use its operators in C++"
print("the operators in C++ are used")
"""


def module_names() -> list[str]:
    """The modules of the checkout, which need not be installed."""
    paths = sorted((ROOT / "onnxfit").rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        python = str(Path(folder, "venv", "Scripts" if os.name == "nt" else "bin", "python"))
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

        def run(*arguments: str) -> None:
            subprocess.run([python, *arguments], cwd=folder, env=environment, check=True)

        quickly = ["--disable-pip-version-check", "--no-compile", "--quiet"]
        run("-m", "pip", "install", *quickly, f"onnxfit[cpu] @ {wheel.as_uri()}")
        run("-c", IMPORTS, *module_names())
        if not wheel.name.endswith("-none-any.whl"):
            run("-W", "error", "-c", KERNELS)
        for name in ("models.py", "linear_regression.py"):
            shutil.copy(EXAMPLES / name, folder)
        run("-W", "error", "linear_regression.py")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

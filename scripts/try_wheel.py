"""Install the wheel into a fresh environment and use it outside the checkout, with the README's code:

`python scripts/try_wheel.py dist/*.whl`.
"""

from __future__ import annotations

import os
import re
import shlex
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

# the files that the README's commands read: a network of two classes, and its data
FILES = """
import numpy as np, onnx, onnx.parser
model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    line (float[N, 2] x) => (float[N, 2] y)
    <float[2, 2] fc1_weight = {0, 0, 0, 0}> { y = MatMul(x, fc1_weight) }''')
model.graph.initializer[0].name = model.graph.node[0].input[1] = "fc1.weight"
onnx.save(model, "model.onnx")
X = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
np.save("X.npy", X)
np.save("y.npy", (X[:, 0] > 0).astype("int64"))
"""


def blocks(language: str) -> list[str]:
    """Return the README's blocks of code in a language."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)


def module_names() -> list[str]:
    """The modules of the checkout, which need not be installed."""
    paths = sorted((ROOT / "onnxfit").rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        programs = Path(folder, "venv", "Scripts" if os.name == "nt" else "bin")
        python = str(programs / "python")
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
        run("-c", FILES)
        run("-W", "error", "-c", "".join(blocks("python")))
        for line in "".join(blocks("sh")).splitlines():
            program, *arguments = shlex.split(line)
            command = [str(programs / program), *arguments]
            subprocess.run(command, cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

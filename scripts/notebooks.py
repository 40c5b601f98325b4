"""Run the notebooks of examples/notebooks, and turn them into pages of the site; without Jupyter.

`python scripts/notebooks.py` runs their cells and stores what they print and draw in the files.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def load(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(code: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell, and return its outputs: what it prints, the last expression, and figures."""
    import matplotlib.pyplot as plt

    plt.close("all")  # figures that are none of this cell
    tree = ast.parse(code)
    last = tree.body[-1]
    hidden = code.rstrip().endswith(";")  # as in Jupyter
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr) and not hidden:
            tree.body.pop()
        exec(compile(tree, "cell", "exec"), namespace)
        if isinstance(last, ast.Expr) and not hidden:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if hasattr(value, "_repr_html_"):
        html = value._repr_html_().splitlines(keepends=True)
        outputs.append(_shown({"text/html": html, "text/plain": [repr(value)]}))
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80, bbox_inches="tight")
        encoded = base64.b64encode(picture.getvalue()).decode()
        outputs.append(_shown({"image/png": encoded, "text/plain": ["<Figure>"]}))
    plt.close("all")
    return outputs


def _shown(data: dict[str, Any]) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": data}


def page(path: Path, folder: Path) -> str:
    """Return a notebook as Markdown for MyST, and write its pictures into `folder`."""
    pieces = []
    for number, cell in enumerate(load(path)["cells"]):
        if cell["cell_type"] == "markdown":
            pieces.append(source(cell))
            continue
        pieces.append(f"```python\n{source(cell)}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = folder / f"{path.stem}-{number}.png"
                picture.write_bytes(base64.b64decode(data["image/png"]))
                pieces.append(f"![What the cell draws]({picture.name})")
            elif "text/html" in data:
                pieces.append(f"```{{raw}} html\n{''.join(data['text/html'])}\n```")
            else:
                pieces.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(pieces) + "\n"


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"  # no window
    for path in NOTEBOOKS:
        notebook, namespace = load(path), {"__name__": "__main__"}
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
            for count, cell in enumerate(cells, 1):
                cell.update(outputs=run(source(cell), namespace), execution_count=count)
            os.chdir(ROOT)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

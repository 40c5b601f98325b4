"""What Sphinx needs beside its own extensions, for the documentation site; `docs/conf.py` loads it.

The reference gets a page for every public name, docstrings are converted for autodoc, links to code lead to the repository, and
formulas become MathML.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
from functools import cache, partial
from pathlib import Path
from typing import Any

import latex2mathml.converter
import notebooks
from document_registries import signature
from docutils import nodes
from markdown_docstrings import restructured
from mathml_spaces import spaced
from repository_links import in_repository, relinked
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).parents[1]
# Public modules in the order of the reference, with the titles of their pages.
MODULES = {
    "onnxfit": "Trainer and functions",
    "onnxfit.losses": "Losses",
    "onnxfit.metrics": "Metrics",
    "onnxfit.ctc": "Outputs of CTC",
    "onnxfit.optimizers": "Optimizers",
    "onnxfit.schedules": "Schedules",
    "onnxfit.penalties": "Penalties",
    "onnxfit.callbacks": "Callbacks",
    "onnxfit.data": "Data",
    "onnxfit.distributed": "Several processes",
    "onnxfit.sklearn": "scikit-learn",
    "onnxfit.torch": "PyTorch",
    "onnxfit.flower": "Flower",
    "onnxfit.gradients": "Gradients",
    "onnxfit.errors": "Errors",
}


# Files of the repository's root that have a page on the site.
PROJECT_PAGES = ("CONTRIBUTING", "SECURITY", "CHANGELOG")


def public_names() -> dict[str, list[str]]:
    """Return the public names by module, as tests/public_api.txt lists them."""
    names: dict[str, list[str]] = {}
    module = ""
    for line in (ROOT / "tests" / "public_api.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            names[module].append(line.strip())
        elif line:
            module = line.rstrip(":")
            names[module] = []
    return names


@cache
def link_targets() -> dict[str, str]:
    """Return the names as docstrings write them -> the full names of what they link to."""
    names = public_names()
    top = names["onnxfit"]
    targets = {}
    for module in reversed(MODULES):
        for member in names[module]:
            full = f"onnxfit.{member}" if member in top else f"{module}.{member}"
            targets[member] = full
            targets[f"{module}.{member}".removeprefix("onnxfit.")] = full
    return targets


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert the lines of a docstring in place, as autodoc asks for it."""
    lines[:] = restructured("\n".join(lines), link_targets()).splitlines()


# ---------------------------------------------------------------------- pages


def write_reference(app: Sphinx, config: Any) -> None:
    """Write a page for each public module, with a table of its names; autosummary writes theirs."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    names = public_names()
    top = names["onnxfit"]
    elsewhere = {name for module in MODULES if module != "onnxfit" for name in names[module]}
    pages = []
    for module, title in MODULES.items():
        members = [n for n in names[module] if f"{module}.{n}" not in names]
        if module == "onnxfit":
            members = [n for n in members if n not in elsewhere]
        members = [f"onnxfit.{n}" if n in top else f"{module}.{n}" for n in members]
        text = inspect.cleandoc(importlib.import_module(module).__doc__ or "")
        lines = [f"# {title}\n", text, "\n```{eval-rst}", ".. autosummary::"]
        lines += ["   :toctree: .", "   :nosignatures:\n"]
        lines += [f"   {member}" for member in members] + ["```\n"]
        page = folder / f"{module.rpartition('.')[2]}.md"
        page.write_text("\n".join(lines), encoding="utf-8")
        pages.append(page.stem)
    index = "# Reference\n\nA page for every public name.\n\n```{toctree}\n:maxdepth: 2\n\n"
    (folder / "index.md").write_text(index + "\n".join(pages) + "\n```\n", encoding="utf-8")


def write_project_pages(app: Sphinx, config: Any) -> None:
    """Write pages for the files of the repository's root that readers of the site look for."""
    folder = Path(app.srcdir) / "project"
    folder.mkdir(exist_ok=True)
    for name in PROJECT_PAGES:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        page = folder / f"{name.lower()}.md"
        page.write_text(relinked(text, "", target_on_site), encoding="utf-8")


def write_notebooks(app: Sphinx, config: Any) -> None:
    """Write a page for each notebook, and one that lists them."""
    folder = Path(app.srcdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    for path in notebooks.NOTEBOOKS:
        text = relinked(notebooks.page(path, folder), "examples/notebooks", target_on_site)
        (folder / f"{path.stem}.md").write_text(text, encoding="utf-8")
    names = "\n".join(path.stem for path in notebooks.NOTEBOOKS)
    index = f"# Notebooks\n\nRun them from the repository, with Jupyter: [examples/notebooks]({in_repository('examples/notebooks')}).\n\n"
    index += f"```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"
    (folder / "index.md").write_text(index, encoding="utf-8")


def target_on_site(path: str, anchor: str, picture: bool) -> str:
    """Return where a link leads on the site: to a page if the file has one, or to the repository."""
    stem = posixpath.splitext(posixpath.basename(path))[0]
    if path == "docs/reference.md":
        return "/api/index.md"
    if path.startswith("docs/") and not (ROOT / path).is_dir():
        return path.removeprefix("docs") + anchor
    if path.endswith(".ipynb"):
        return f"/notebooks/{stem}.md"
    if path in {f"{name}.md" for name in PROJECT_PAGES}:
        return f"/project/{stem.lower()}.md{anchor}"
    return in_repository(path) + anchor


def for_the_site(app: Sphinx, document: str, source: list[str]) -> None:
    """Lead the links of a page to other pages of the site or to the repository, in place."""
    folder = posixpath.dirname(f"docs/{document}")
    if Path(app.env.doc2path(document)).suffix == ".md" and folder == "docs":
        source[0] = relinked(source[0], folder, target_on_site)
    source[0] = source[0].replace("```math\n", "```{math}\n")


def constructor(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    arguments: str | None,
    result: str | None,
) -> tuple[str, str | None] | None:
    """Return the arguments of a class, whose constructor may be wrapped by a check of them."""
    return (f"({signature(obj)})", result) if what == "class" and arguments else None


def is_foreign(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the methods that scikit-learn adds to its estimators."""
    return True if (getattr(obj, "__module__", None) or "").startswith("sklearn") else None


# ---------------------------------------------------------------------- formulas


def equations(formula: str) -> list[str]:
    r"""Return the equations of a formula, which `\quad` separates, to be put on several lines."""
    pieces = formula.split(r"\quad")
    whole = all(piece.count("{") == piece.count("}") for piece in pieces)
    return pieces if whole and r"\begin" not in formula else [formula]


def _mathml(self: HTML5Translator, node: nodes.Element, display: str = "inline") -> None:
    """Write a formula as MathML, which browsers show without a script from another host."""
    tag = "div" if display == "block" else "span"
    formulas = [
        spaced(latex2mathml.converter.convert(equation, display=display))
        for equation in equations(node.astext())
    ]
    self.body.append(f'<{tag} class="math">{"".join(formulas)}</{tag}>')
    raise nodes.SkipNode


def _ignored(self: HTML5Translator, node: nodes.Element) -> None:
    pass


def setup(app: Sphinx) -> dict[str, Any]:
    for write in (write_reference, write_project_pages, write_notebooks):
        app.connect("config-inited", write)  # before Sphinx looks for pages
    app.connect("source-read", for_the_site)
    app.connect("autodoc-process-signature", constructor)
    app.connect("autodoc-skip-member", is_foreign)
    app.connect("autodoc-process-docstring", convert)
    block = partial(_mathml, display="block")
    app.add_html_math_renderer("mathml", (_mathml, _ignored), (lambda s, n: block(s, n), _ignored))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

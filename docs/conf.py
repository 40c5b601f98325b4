"""The documentation site, built by Sphinx: `make site`.

Sphinx with MyST reads the pages of this folder, which are Markdown for whoever reads them in the
repository. Its autodoc writes a page for every public name from its docstring. Warnings are errors:
a link that leads nowhere fails the build.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import onnxfit  # noqa: E402  # of this checkout, whatever is installed

project = "onnxfit"
author = "the authors of onnxfit"
copyright = author  # noqa: A001  # the name that Sphinx reads
release = version = onnxfit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "site_extension",
]
exclude_patterns = ["_templates", "reference.md"]  # that page is for readers of the repository
templates_path = ["_templates"]
suppress_warnings = ["myst.strikethrough"]

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 4
autosummary_generate = True
autosummary_imported_members = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
add_module_names = False
default_role = "code"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "onnxfit"
html_static_path = ["_static"]
html_logo = html_favicon = "_static/logo.svg"
html_css_files = ["site.css"]
html_show_sourcelink = False
html_math_renderer = "mathml"

"""Fake installations: folders of packages with any distributions of onnxruntime, or with none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime

ROOT = Path(__file__).resolve().parent.parent
REAL = Path(onnxruntime.__file__).parent
VERSION = onnxruntime.__version__


def add_distribution(
    site: Path,
    name: str,
    version: str = VERSION,
    *,
    modules: str | None = "onnxruntime",
    files: str | None = "onnxruntime/__init__.py,,\n",
) -> None:
    """Write what pip writes about a package. None: it has no list of modules, or of files."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if modules is not None:
        (folder / "top_level.txt").write_text(f"{modules}\n")
    if files is not None:
        (folder / "RECORD").write_text(files)


def link_other_packages(site: Path) -> None:
    """Link every installed package, without those of onnxruntime."""
    site.mkdir(exist_ok=True)
    for folder in map(Path, sys.path):
        if any(folder.glob("*.dist-info")):
            for path in folder.iterdir():
                link = site / path.name
                if not path.name.startswith("onnxruntime") and not link.exists():
                    link.symlink_to(path)


def run_python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of a folder, and no others."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-S", *arguments], env=environment, capture_output=True, text=True
    )

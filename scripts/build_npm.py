"""Pack the npm package, which `make js` has built: `python scripts/build_npm.py dist`.

npm shows the README without the repository around it. The package is therefore packed from a copy
of js/ with the repository's addresses in the README and in package.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from repository_links import ROOT, in_repository, relinked, repository

PACKAGE = ROOT / "js"


def readme_with_addresses() -> str:
    """Return the README with whole addresses in the place of links to files of the repository."""
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    return relinked(
        readme, "js", lambda path, anchor, picture: in_repository(path, raw=picture) + anchor
    )


def manifest_with_addresses() -> dict[str, Any]:
    """Return package.json with the addresses that pyproject.toml has."""
    manifest: dict[str, Any] = json.loads((PACKAGE / "package.json").read_text(encoding="utf-8"))
    url = f"git+{repository()}.git"
    return manifest | {"repository": {"type": "git", "url": url, "directory": "js"}}


def main(folder: Path) -> None:
    if not (PACKAGE / "dist" / "index.js").exists():
        sys.exit("js/dist/index.js does not exist. Build it first: make js")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name in manifest_with_addresses()["files"]:
            shutil.copytree(PACKAGE / name, copy / name)
        shutil.copy2(PACKAGE / "LICENSE", copy)
        (copy / "README.md").write_text(readme_with_addresses(), encoding="utf-8")
        (copy / "package.json").write_text(json.dumps(manifest_with_addresses(), indent=2))
        command = ["npm", "pack", "--ignore-scripts", "--pack-destination", str(folder)]
        subprocess.run(command, cwd=copy, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

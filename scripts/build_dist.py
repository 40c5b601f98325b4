"""Build sdist and wheel: `python scripts/build_dist.py dist`.

PyPI shows the README without the repository around it, where its relative links lead nowhere. The
files are therefore built from a copy of the sources whose README has the repository's addresses.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from repository_links import ROOT, in_repository, relinked


def with_addresses(readme: str) -> str:
    """Return the README with whole addresses in the place of links to files of the repository."""
    return relinked(
        readme, "", lambda path, anchor, picture: in_repository(path, raw=picture) + anchor
    )


def build(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "build", *arguments], check=True)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        build("--sdist", "--outdir", temporary, str(ROOT))
        (sdist,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(temporary, **safely)
        copy = Path(temporary, sdist.name.removesuffix(".tar.gz"))
        readme = copy / "README.md"
        text = with_addresses((ROOT / "README.md").read_text(encoding="utf-8"))
        readme.write_text(text, encoding="utf-8")
        build("--outdir", str(folder), str(copy))  # the wheel from the unpacked sdist


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

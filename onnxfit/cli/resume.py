"""`onnxfit resume`: go on with a training that was stopped."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import job, options
from onnxfit.cli.fit import fit
from onnxfit.cli.models import WITHOUT_CODE
from onnxfit.errors import CheckpointError
from onnxfit.training import checkpoint


@click.command(short_help="Go on with a training that was stopped.")
@click.argument(
    "path", type=click.Path(exists=True, path_type=Path), metavar="FOLDER_OR_CHECKPOINT"
)
@click.option(
    "-e",
    "--epochs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train up to N epochs in all, instead of as many as `fit` was told.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress on standard error.")
@options.as_json
def resume(path: Path, epochs: int | None, quiet: bool, as_json: bool) -> None:
    """Go on where `onnxfit fit --checkpoint` was stopped: by Ctrl-C, by a crash, or because it was
    done and --epochs asks for more.

    From the newest whole checkpoint of a folder, or from the one named, with the options and data
    of that `fit`, which are noted beside it. On the CPU the trained model is then the same, bit for
    bit, as if it had never been stopped.

    \b
    onnxfit resume checkpoints/
    """
    typed, finished = job.note_of(path)
    if (
        missing := {str(p.name) for p in fit.params if p.expose_value}
        - {"overwrite", "quiet", "as_json"}
        - typed.keys()
    ):
        raise CheckpointError(
            f"The options beside {str(path)!r} were noted by another onnxfit: they lack"
            f" {', '.join(sorted(missing))}."
        )
    if finished and (epochs is None or epochs <= typed["epochs"]):
        raise CheckpointError(
            "This training came to its end: there is nothing to resume. --epochs N above"
            f" {typed['epochs']} trains on."
        )
    typed["epochs"] = epochs or typed["epochs"]
    start = _newest(job.CheckpointLayout(typed["checkpoint"])) if path.is_dir() else path
    if not quiet:
        click.echo(
            f"From {start}." if start else "There is no checkpoint yet: from the beginning.",
            err=True,
        )
    job.run(typed, quiet=quiet, as_json=as_json, start=start)


def _newest(place: job.CheckpointLayout) -> Path | None:
    """The newest checkpoint that is whole."""
    for path in place.checkpoints():
        try:
            checkpoint.load(path, WITHOUT_CODE)
        except CheckpointError as error:
            click.echo(f"Warning: {error} It is passed over.", err=True)
        else:
            return path
    return None

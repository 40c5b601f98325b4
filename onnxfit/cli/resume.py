"""`onnxfit resume`: go on with a training that was stopped."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import job, options
from onnxfit.cli.fit import fit
from onnxfit.cli.models import WITHOUT_CODE
from onnxfit.errors import CheckpointError
from onnxfit.training import checkpoint

__all__ = ["resume"]

# options of `fit` that are not saved for `resume`, since they are for one call
NOT_SAVED = {"overwrite", "quiet", "as_json"}


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

    Training starts from the newest whole checkpoint of a folder, or from the one named, with the
    options and data of that `fit`, which are noted beside it. On the CPU the trained model is then
    the same, bit for bit, as if training had never been stopped.

    \b
    onnxfit resume checkpoints/
    """
    fit_options, finished = job.read_options(path)
    known = {str(parameter.name) for parameter in fit.params if parameter.expose_value}
    missing = known - NOT_SAVED - fit_options.keys()
    if missing:
        raise CheckpointError(
            f"The options beside {str(path)!r} were noted by another onnxfit: they lack"
            f" {', '.join(sorted(missing))}."
        )
    if finished and (epochs is None or epochs <= fit_options["epochs"]):
        raise CheckpointError(
            "This training is finished: there is nothing to resume. --epochs N above"
            f" {fit_options['epochs']} trains on."
        )
    fit_options["epochs"] = epochs or fit_options["epochs"]
    start: Path | None = path
    if path.is_dir():
        start = _newest(job.CheckpointLayout(fit_options["checkpoint"]))
    if not quiet:
        message = f"From {start}." if start else "There is no checkpoint yet: from the beginning."
        click.echo(message, err=True)
    job.run(fit_options, quiet=quiet, as_json=as_json, start=start)


def _newest(layout: job.CheckpointLayout) -> Path | None:
    """Return the newest checkpoint that is whole, or None."""
    for path in layout.checkpoints():
        try:
            checkpoint.load(path, WITHOUT_CODE)
        except CheckpointError as error:
            click.echo(f"Warning: {error} It is skipped.", err=True)
        else:
            return path
    return None

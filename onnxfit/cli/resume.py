"""`onnxfit resume`: go on with a training that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxfit.cli import job, options, ranks
from onnxfit.cli.fit import fit
from onnxfit.cli.models import WITHOUT_CODE
from onnxfit.errors import CheckpointError
from onnxfit.files import NUMBER, TEXT, ValueType, list_of, optional, require_types
from onnxfit.training import checkpoint

__all__ = ["resume"]

# options of `fit` that are not saved for `resume`, since they are for one call
NOT_SAVED = {"overwrite", "quiet", "as_json", "ranks"}
PATH = ValueType("a path", lambda value: TEXT.accepts(value) and "\0" not in value)
TRUE_OR_FALSE = ValueType("true or false", lambda value: isinstance(value, bool))
TEXT_OR_NUMBER = ValueType(
    "text or a number", lambda value: TEXT.accepts(value) or NUMBER.accepts(value)
)


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
@click.option(
    "--allow-paths-outside",
    is_flag=True,
    help=(
        "Write --output, --csv and --tensorboard where that `fit` did, even outside of the folder"
        " of the checkpoints and the working directory."
    ),
)
@ranks.option
@click.option("-q", "--quiet", is_flag=True, help="No progress on standard error.")
@options.as_json
@click.pass_context
def resume(
    ctx: click.Context,
    /,
    path: Path,
    epochs: int | None,
    allow_paths_outside: bool,
    quiet: bool,
    as_json: bool,
    **others: Any,
) -> None:
    """Go on where `onnxfit fit --checkpoint` was stopped: by Ctrl-C, by a crash, or because it was
    done and --epochs asks for more.

    Training starts from the newest whole checkpoint of a folder, or from the one named, with the
    options and data of that `fit`, which are noted beside it. On the CPU the trained model is then
    the same, bit for bit, as if training had never been stopped; on another number of --ranks than
    before, within rounding.

    The noted options are data and run no code. The model and data that they name are read, wherever
    they are. Files are written, and replaced, in the folder of the checkpoints and in the working
    directory only, unless --allow-paths-outside is given.

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
    fit_options = {
        str(parameter.name): _checked(parameter, fit_options[str(parameter.name)], path)
        for parameter in fit.params
        if parameter.name in known - NOT_SAVED
    }
    outside = job.paths_outside(fit_options)
    if outside and not allow_paths_outside:
        raise CheckpointError(
            f"The options beside {str(path)!r} write outside of that folder and of the working"
            f" directory: {', '.join(outside)}. If you trust them, give --allow-paths-outside, or"
            " start in the folder where the training was started."
        )
    if finished and (epochs is None or epochs <= fit_options["epochs"]):
        raise CheckpointError(
            "This training is finished: there is nothing to resume. --epochs N above"
            f" {fit_options['epochs']} trains on."
        )
    fit_options["epochs"] = epochs or fit_options["epochs"]
    if ranks.to_launch(others["ranks"]):
        ranks.launch(ctx.meta[ranks.ARGUMENTS], others["ranks"])
    start: Path | None = path
    if path.is_dir():
        start = _newest(job.CheckpointLayout(fit_options["checkpoint"]))
    if not quiet:
        message = f"From {start}." if start else "There is no checkpoint yet: from the beginning."
        ranks.say(message)
    job.run(fit_options, quiet=quiet, as_json=as_json, start=start)


def _checked(parameter: click.Parameter, value: Any, path: Path) -> Any:
    """Return a noted option as click would give it to `fit`; CheckpointError for another value."""
    place = f"The options beside {str(path)!r}"
    is_path = parameter.name in job.PATH_OPTIONS
    entry = PATH if is_path else TEXT_OR_NUMBER
    if getattr(parameter, "is_flag", False):
        entry = TRUE_OR_FALSE
    expected = list_of(entry) if parameter.multiple else entry
    if not parameter.required and parameter.to_info_dict()["default"] is None:
        expected = optional(expected)
    require_types(place, {parameter.name: value}, {str(parameter.name): expected})
    if is_path:  # a file is looked for when it is read: a checkpoint needs no model beside it
        return value
    try:
        return parameter.type_cast_value(click.Context(fit), value)
    except (click.UsageError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{place} have {parameter.name} = {value!r}: {error}") from None


def _newest(layout: job.CheckpointLayout) -> Path | None:
    """Return the newest checkpoint that is whole, or None."""
    for path in layout.checkpoints():
        try:
            checkpoint.load(path, WITHOUT_CODE)
        except CheckpointError as error:
            ranks.say(f"Warning: {error} It is skipped.")
        else:
            return path
    return None

"""`onnxfit resume`: continue a training that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxfit.cli import job, options, ranks
from onnxfit.cli.fit import fit
from onnxfit.cli.models import WITHOUT_CODE
from onnxfit.errors import CheckpointError, listed_names
from onnxfit.files import NUMBER, TEXT, ValueType, list_of, optional, require_types
from onnxfit.training import checkpoint

__all__ = ["resume"]

# Options of `fit` that are not saved for `resume`, because they apply to one call only.
NOT_SAVED = {"overwrite", "quiet", "as_json", "ranks"}
PATH = ValueType("a path", lambda value: TEXT.accepts(value) and "\0" not in value)
TRUE_OR_FALSE = ValueType("true or false", lambda value: isinstance(value, bool))
TEXT_OR_NUMBER = ValueType(
    "text or a number", lambda value: TEXT.accepts(value) or NUMBER.accepts(value)
)


@click.command(short_help="Continue a training that was stopped.")
@click.argument(
    "path", type=click.Path(exists=True, path_type=Path), metavar="FOLDER_OR_CHECKPOINT"
)
@click.option(
    "-e",
    "--epochs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train up to N epochs in total, instead of the number given to `fit`.",
)
@click.option(
    "--allow-paths-outside",
    is_flag=True,
    help=(
        "Write --output, --csv and --tensorboard to the same paths as `fit`, even outside of the"
        " folder of the checkpoints and the working directory."
    ),
)
@ranks.option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress on standard error.")
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
    """Continue an `onnxfit fit --checkpoint` that was stopped by Ctrl-C or a crash, or a finished
    one for more --epochs.

    Training starts from the newest complete checkpoint of a folder, or from the given checkpoint,
    with the options and data of that `fit`, which are saved next to it. On the CPU, the trained
    model is bit for bit the same as if training had never stopped; with another number of --ranks,
    it is the same within rounding.

    The saved options are data and run no code. The model and data that they name are read from any
    path. Files are written, and replaced, in the folder of the checkpoints and in the working
    directory only, unless --allow-paths-outside is given.

    \b
    onnxfit resume checkpoints/
    """
    fit_options, finished = job.read_options(path)
    known = {str(parameter.name) for parameter in fit.params if parameter.expose_value}
    missing = known - NOT_SAVED - fit_options.keys()
    if missing:
        raise CheckpointError(
            f"The options next to {str(path)!r} were saved by another version of onnxfit: they lack"
            f" {listed_names(sorted(missing))}. Resume with that version, or start the training"
            " again with `onnxfit fit`."
        )
    fit_options = {
        str(parameter.name): _checked(parameter, fit_options[str(parameter.name)], path)
        for parameter in fit.params
        if parameter.name in known - NOT_SAVED
    }
    outside = job.paths_outside(fit_options)
    if outside and not allow_paths_outside:
        raise CheckpointError(
            f"The options next to {str(path)!r} would write files outside of this folder and of the"
            f" working directory: {', '.join(outside)}. If you trust them, pass"
            " --allow-paths-outside, or run the command where the training was started."
        )
    if finished and (epochs is None or epochs <= fit_options["epochs"]):
        raise CheckpointError(
            "This training is finished, so there is nothing to resume. To train longer, pass"
            f" --epochs N with N above {fit_options['epochs']}."
        )
    fit_options["epochs"] = epochs or fit_options["epochs"]
    if ranks.to_launch(others["ranks"]):
        ranks.launch(ctx.meta[ranks.ARGUMENTS], others["ranks"])
    start: Path | None = path
    if path.is_dir():
        start = _newest(job.CheckpointLayout(fit_options["checkpoint"]))
    if not quiet:
        beginning = "No checkpoint was saved yet. Training starts from the beginning."
        message = f"Training continues from {start}." if start else beginning
        ranks.say(message)
    job.run(fit_options, quiet=quiet, as_json=as_json, start=start)


def _checked(parameter: click.Parameter, value: Any, path: Path) -> Any:
    """Return a saved option as click gives it to `fit`. CheckpointError: the value is wrong."""
    place = f"The options next to {str(path)!r}"
    is_path = parameter.name in job.PATH_OPTIONS
    entry = PATH if is_path else TEXT_OR_NUMBER
    if getattr(parameter, "is_flag", False):
        entry = TRUE_OR_FALSE
    expected = list_of(entry) if parameter.multiple else entry
    if not parameter.required and parameter.to_info_dict()["default"] is None:
        expected = optional(expected)
    require_types(place, {parameter.name: value}, {str(parameter.name): expected})
    if is_path:  # whether a file exists is checked when it is read; some may not be needed
        return value
    try:
        return parameter.type_cast_value(click.Context(fit), value)
    except (click.UsageError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{place} have {parameter.name} = {value!r}: {error}") from None


def _newest(layout: job.CheckpointLayout) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    for path in layout.checkpoints():
        try:
            checkpoint.load(path, WITHOUT_CODE)
        except CheckpointError as error:
            ranks.say(f"Warning: {error} This checkpoint is skipped.")
        else:
            return path
    return None

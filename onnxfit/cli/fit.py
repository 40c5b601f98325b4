"""`onnxfit fit`: train a model."""

from __future__ import annotations

from typing import Any

import click

from onnxfit.cli import job, options, ranks
from onnxfit.cli.config import config_option
from onnxfit.cli.models import is_checkpoint
from onnxfit.errors import SettingError
from onnxfit.gradients import SOURCES
from onnxfit.runtime.backends import BACKENDS

__all__ = ["fit"]

_POSITIVE = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)
_NEW_FILE = click.Path(dir_okay=False)  # a str, since the options are saved as JSON


@click.command(short_help="Train a model on data.")
@click.argument("model", type=options.EXISTING_FILE)
@options.data
@options.label
@options.loss
@click.option(
    "--optimizer",
    default="sgd",
    show_default=True,
    metavar="NAME",
    help=(
        "sgd, adam, adamw, rmsprop, lion, ...; settings follow a colon, as in"
        " sgd:momentum=0.9,nesterov=true."
    ),
)
@click.option(
    "--lr",
    "--learning-rate",
    "learning_rate",
    metavar="RATE",
    help=(
        "Above 0; or a schedule, such as cosine:learning_rate=0.1,decay_steps=1000, counted in"
        " updates. By default the optimizer's own: 0.01 for sgd, 0.001 for adam."
    ),
)
@click.option(
    "-e",
    "--epochs",
    type=_COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="Train for N epochs, 1 or more.",
)
@options.batch_size
@click.option(
    "-w",
    "--weights",
    multiple=True,
    metavar="PATTERN",
    help=(
        "Train only the weights whose names match, such as 'head.*'; may be repeated, and"
        " '!PATTERN' excludes. By default all."
    ),
)
@click.option(
    "--lora",
    multiple=True,
    metavar="SETTING=VALUE,...",
    help=(
        "Train adapters of low rank beside frozen weights, as in"
        " rank=8,alpha=16,target=*attn*,dropout=0.05; init=pissa and dora=true are PiSSA and DoRA."
        " Without target beside every linear layer but the last. --weights then names those that"
        " train besides. May be repeated, for several targets."
    ),
)
@click.option(
    "--penalty",
    multiple=True,
    metavar="[PATTERN=]NUMBER",
    help=(
        "Add NUMBER times the sum of the squared weights to the loss, or with l1:NUMBER the sum of"
        " their absolute values; of all weights, or of those that match PATTERN. May be repeated."
    ),
)
@options.metrics
@click.option(
    "--validation-data",
    multiple=True,
    type=options.EXISTING_FILE,
    help="Data to evaluate after every epoch, as for --data.",
)
@click.option(
    "--validation-split",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    metavar="FRACTION",
    help=(
        "The same with the last FRACTION of the rows, above 0 and below 1, which are not trained"
        " on."
    ),
)
@click.option(
    "--clip-norm",
    type=_POSITIVE,
    metavar="NORM",
    help="Scale the gradients so that their common L2 norm is at most NORM, a number above 0.",
)
@click.option(
    "--clip-value",
    type=_POSITIVE,
    metavar="VALUE",
    help="Clip every element of the gradients to [-VALUE, VALUE]; VALUE is above 0.",
)
@click.option(
    "--accumulate",
    type=_COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="Batches whose gradients are averaged for one update.",
)
@click.option(
    "--dynamic-batch",
    is_flag=True,
    help="Train with batches of any size where MODEL has a fixed one.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help=(
        "A whole number for the order of rows and for dropout: the same seed gives the same"
        " weights."
    ),
)
@click.option(
    "--batch-norm",
    type=click.Choice(["train", "frozen"]),
    default="train",
    show_default=True,
    help="Let BatchNormalization use the statistics of each batch, or its running statistics.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bf16", "fp16"]),
    default="float32",
    show_default=True,
    help="Let the products of a training step compute in half precision; weights stay float32.",
)
@click.option(
    "--quantization",
    metavar="SETTING=VALUE,...",
    help=(
        "How to train a MODEL of integers: scales=learned trains their scales, too, and observe=100"
        " lets the ranges of activations follow the first 100 batches. weights=* trains all,"
        " those of MatMulNBits among them."
    ),
)
@click.option(
    "--float-model",
    type=options.EXISTING_FILE,
    help="The float file that was quantized to MODEL: its weights begin with these floats.",
)
@click.option(
    "--teacher",
    type=options.EXISTING_FILE,
    help=(
        "A float model, whose outputs a MODEL of integers learns beside the labels;"
        " --quantization temperature=2,teacher_weight=0.5 says how."
    ),
)
@click.option(
    "--backend",
    type=click.Choice(list(BACKENDS)),
    default="full",
    show_default=True,
    help="A step as one graph (full), or as graphs of the forward and the backward pass.",
)
@click.option(
    "--gradient",
    type=click.Choice(SOURCES),
    default="auto",
    show_default=True,
    help=(
        "Gradients from the rules of `onnxfit ops` (onnx), from onnxruntime's training build"
        " (onnxruntime), or from the one that has a gradient for every operator (auto)."
    ),
)
@options.device
@click.option(
    "--early-stopping",
    type=click.IntRange(min=0),
    metavar="PATIENCE",
    help=(
        "Stop after PATIENCE epochs without a better val_loss (or loss, without validation data),"
        " and restore the weights of the best epoch."
    ),
)
@click.option(
    "-o",
    "--output",
    type=_NEW_FILE,
    metavar="FILE",
    help="The .onnx file to write: the original model with the trained weights.",
)
@click.option(
    "--adapter-output",
    type=click.Path(),
    metavar="FOLDER",
    help="The folder to write for PEFT, with the adapters of --lora alone; --output has them too.",
)
@click.option(
    "--checkpoint",
    type=click.Path(),
    metavar="FOLDER/FILE",
    help=(
        "Save the whole state of the training after every epoch and on Ctrl-C, for `onnxfit"
        " resume`. {epoch} and {val_loss:.3f} in FILE keep several; a folder alone keeps"
        " last.onnxfit."
    ),
)
@click.option(
    "--overwrite",
    is_flag=True,
    help=("Delete the checkpoints of an earlier training that --checkpoint names, and begin anew."),
)
@click.option(
    "--csv",
    type=_NEW_FILE,
    metavar="FILE",
    help="Write loss and metrics of every epoch to FILE, one epoch a line.",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Write curves and the graph to FOLDER, for `tensorboard --logdir FOLDER`.",
)
@ranks.option
@config_option
@click.option("-q", "--quiet", is_flag=True, help="No progress on standard error.")
@options.as_json
@click.pass_context
def fit(
    ctx: click.Context,
    /,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    **fit_options: Any,
) -> None:
    """Train MODEL, a .onnx file, and print the loss and metrics of its last epoch, or of the best
    with --early-stopping.

    After Ctrl-C (or a request to terminate), training stops at the end of the batch or validation.
    With --checkpoint, `onnxfit resume` later goes on as if nothing had happened.

    \b
    onnxfit fit model.onnx --data digits.npz --loss cross_entropy --optimizer adam \\
        --epochs 10 --metrics accuracy --validation-split 0.2 \\
        --tensorboard runs/first --checkpoint checkpoints/ --output trained.onnx
    """
    if not any(fit_options[name] for name in ("output", "adapter_output", "checkpoint")):
        raise click.UsageError(
            "Nothing would be left of the training: give --output trained.onnx, --checkpoint FILE,"
            " or both."
        )
    if fit_options["adapter_output"] and not fit_options["lora"]:
        raise click.UsageError(
            "--adapter-output writes the adapters of --lora, which is not given: add --lora rank=8."
        )
    if fit_options["validation_data"] and fit_options["validation_split"]:
        raise click.UsageError("Give --validation-data or --validation-split, not both.")
    number = fit_options.pop("ranks")
    fit_options = job.with_absolute_paths(fit_options)
    layout = None
    if fit_options["checkpoint"]:
        layout = job.CheckpointLayout(fit_options["checkpoint"])
    if ranks.to_launch(number):
        job.trainer_settings(fit_options)  # refuses what is wrong before anything starts
        if layout and not overwrite:
            _delete_checkpoints(layout, overwrite)  # refuses those of an earlier training
        ranks.launch(ctx.meta[ranks.ARGUMENTS], number)
    if layout and ranks.is_main():
        _delete_checkpoints(layout, overwrite)
    job.run(fit_options, quiet=quiet, as_json=as_json)


def _delete_checkpoints(layout: job.CheckpointLayout, overwrite: bool) -> None:
    """Delete the checkpoints of an earlier training; SettingError without `overwrite`."""
    paths = layout.checkpoints()
    if paths and not overwrite:
        raise SettingError(
            f"{str(layout.folder)!r} has a checkpoint of an earlier training, {paths[0].name}:"
            " `onnxfit resume` goes on with it, --overwrite deletes it and begins anew; or give"
            " this training another folder."
        )
    for path in filter(is_checkpoint, paths):
        path.unlink()

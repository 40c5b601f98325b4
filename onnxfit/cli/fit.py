"""`onnxfit fit`: train a model."""

from __future__ import annotations

from typing import Any

import click

from onnxfit.cli import job, options, ranks
from onnxfit.cli.config import config_option
from onnxfit.cli.data_file import STDIN, require_one_reader
from onnxfit.cli.models import is_checkpoint
from onnxfit.errors import SettingError
from onnxfit.gradients import SOURCES
from onnxfit.runtime.backends import BACKENDS

__all__ = ["fit"]

_POSITIVE = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)
_NEW_FILE = click.Path(dir_okay=False)  # a str, because the options are saved as JSON


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
        "The optimizer: sgd, adam, adamw, rmsprop, lion, ... (an unknown name lists all). Settings"
        " follow a colon, as in sgd:momentum=0.9,nesterov=true."
    ),
)
@click.option(
    "--lr",
    "--learning-rate",
    "learning_rate",
    metavar="RATE",
    help=(
        "The learning rate: a number above 0, or a schedule such as"
        " cosine:learning_rate=0.1,decay_steps=1000, with steps counted in updates. By default the"
        " optimizer's default: 0.01 for sgd, 0.001 for adam."
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
        "Freeze the weights and train low-rank adapters (LoRA) with these settings, such as"
        " rank=8,alpha=16,target=*attn*,dropout=0.05; init=pissa and dora=true select PiSSA and"
        " DoRA. Without target, every linear layer but the last gets an adapter. --weights then"
        " names weights to train in addition. May be repeated, for several targets."
    ),
)
@click.option(
    "--penalty",
    multiple=True,
    metavar="[PATTERN=]NUMBER",
    help=(
        "Add NUMBER times the sum of the squared weights to the loss, or with l1:NUMBER the sum of"
        " their absolute values; of all weights, or of weights that match PATTERN. May be repeated."
    ),
)
@options.metrics
@click.option(
    "--validation-data",
    multiple=True,
    type=options.DATA_FILE,
    help="Data to evaluate after every epoch, as for --data.",
)
@click.option(
    "--validation-split",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    metavar="FRACTION",
    help=(
        "Use the last FRACTION of the rows, above 0 and below 1, as validation data instead of"
        " training data."
    ),
)
@click.option(
    "--clip-norm",
    type=_POSITIVE,
    metavar="NORM",
    help="Scale the gradients so that their global L2 norm is at most NORM, a number above 0.",
)
@click.option(
    "--clip-value",
    type=_POSITIVE,
    metavar="VALUE",
    help="Clip every element of the gradients to [-VALUE, VALUE]; VALUE is above 0.",
)
@click.option(
    "--clip-adaptive",
    type=_POSITIVE,
    metavar="RATIO",
    help=(
        "Scale the gradient of each unit, such as a filter, so that its L2 norm is at most RATIO"
        " times the norm of the unit's weights; RATIO is above 0."
    ),
)
@click.option(
    "--accumulate",
    type=_COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="The number of batches whose gradients are averaged for one update.",
)
@click.option(
    "--dynamic-batch",
    is_flag=True,
    help="Allow any batch size if MODEL has a fixed one.",
)
@options.fixed_input
@options.batch_axis
@click.option(
    "--stop-gradient",
    "stop_gradients",
    multiple=True,
    metavar="PATTERN",
    help=(
        "Let no gradient flow through the values of MODEL whose names match, as `detach` does in"
        " PyTorch; may be repeated, and '!PATTERN' excludes."
    ),
)
@click.option(
    "--freeze-rows",
    multiple=True,
    metavar="WEIGHT=ROW,ROW",
    help=(
        "Keep rows of the weights whose names match, such as emb.weight=0 for padding; a negative"
        " ROW counts from the end. May be repeated."
    ),
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help=(
        "The random seed, a whole number, for the order of rows and dropout. The same seed gives"
        " the same weights."
    ),
)
@click.option(
    "--batch-norm",
    type=click.Choice(["train", "frozen", "batch"]),
    default="train",
    show_default=True,
    help=(
        "Let BatchNormalization use the statistics of each batch, or its running statistics; batch:"
        " those that MODEL uses, also in predictions."
    ),
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "tf32", "bf16x3", "bf16", "fp16"]),
    default="float32",
    show_default=True,
    help="Compute matrix products and convolutions of a training step in half precision, or on CUDA"
    " in TF32, or matrix products on the CPU as three of bfloat16; weights stay float32.",
)
@click.option(
    "--quantization",
    metavar="SETTING=VALUE,...",
    help=(
        "Settings to train a quantized MODEL: scales=learned also trains the scales, and"
        " observe=100 updates the ranges of activations during the first 100 batches. weights=*"
        " trains all weights, including the weights of MatMulNBits."
    ),
)
@click.option(
    "--float-model",
    type=options.EXISTING_FILE,
    help="The float model that was quantized to MODEL. Training starts from its weights.",
)
@click.option(
    "--teacher",
    type=options.EXISTING_FILE,
    help=(
        "A model whose outputs MODEL learns, in addition to the labels. --distillation has its"
        " settings."
    ),
)
@click.option(
    "--distillation",
    metavar="SETTINGS",
    help="The settings of the teacher, such as temperature=2,weight=0.5.",
)
@click.option(
    "--backend",
    type=click.Choice(list(BACKENDS)),
    default="full",
    show_default=True,
    help=(
        "Run a step as one graph (full), or as a forward graph and a backward graph; in_place saves"
        " memory, because its update overwrites the weights."
    ),
)
@click.option(
    "--gradient",
    type=click.Choice(SOURCES),
    default="auto",
    show_default=True,
    help=(
        "The source of the gradients: the rules that `onnxfit ops` lists (auto or onnx), or the"
        " builder of onnxruntime's training build (onnxruntime)."
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
    help="The folder to write with only the adapters of --lora, for PEFT. --output writes the model"
    " with these adapters.",
)
@click.option(
    "--checkpoint",
    type=click.Path(),
    metavar="FOLDER/FILE",
    help=(
        "Save the whole training state after every epoch and on Ctrl-C, for `onnxfit resume`. With"
        " {epoch} or {val_loss:.3f} in FILE, several checkpoints are kept; a folder keeps only"
        " last.onnxfit."
    ),
)
@click.option(
    "--overwrite",
    is_flag=True,
    help=(
        "Delete the checkpoints of an earlier training at the path of --checkpoint, and start"
        " again."
    ),
)
@click.option(
    "--csv",
    type=_NEW_FILE,
    metavar="FILE",
    help="Write loss and metrics to FILE, one line per epoch.",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Write curves and the graph to FOLDER, for `tensorboard --logdir FOLDER`.",
)
@ranks.option
@config_option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress on standard error.")
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
    """Train MODEL, a .onnx file, and print the loss and metrics of the last epoch, or of the best
    epoch with --early-stopping.

    After Ctrl-C (or a request to terminate), training stops at the end of the batch or validation.
    With --checkpoint, `onnxfit resume` continues it exactly; without, the weights trained so far
    are written to --output.

    \b
    onnxfit fit model.onnx --data digits.npz --loss cross_entropy \\
        --optimizer adam --epochs 10 --metrics accuracy --validation-split 0.2 \\
        --tensorboard runs/first --checkpoint checkpoints/ --output trained.onnx
    """
    if not any(fit_options[name] for name in ("output", "adapter_output", "checkpoint")):
        raise click.UsageError(
            "The trained model would not be saved. Pass --output trained.onnx, --checkpoint FILE,"
            " or both."
        )
    if fit_options["adapter_output"] and not fit_options["lora"]:
        raise click.UsageError(
            "--adapter-output writes the adapters of --lora, but --lora is missing. Add --lora"
            " rank=8."
        )
    if fit_options["validation_data"] and fit_options["validation_split"]:
        raise click.UsageError("Pass --validation-data or --validation-split, not both.")
    data, validation_data = fit_options["data"], fit_options["validation_data"]
    if STDIN in data and STDIN in validation_data:
        require_one_reader([*data, *validation_data])
    number = fit_options.pop("ranks")
    fit_options = job.with_absolute_paths(fit_options)
    layout = None
    if fit_options["checkpoint"]:
        layout = job.CheckpointLayout(fit_options["checkpoint"])
    if ranks.to_launch(number):
        for paths in (data, validation_data):
            require_one_reader(paths, number)
        job.trainer_settings(fit_options)  # raises errors of settings before anything starts
        if layout and not overwrite:
            _delete_checkpoints(layout, overwrite)  # raises an error if some exist
        ranks.launch(ctx.meta[ranks.ARGUMENTS], number)
    if layout and ranks.is_main():
        _delete_checkpoints(layout, overwrite)
    job.run(fit_options, quiet=quiet, as_json=as_json)


def _delete_checkpoints(layout: job.CheckpointLayout, overwrite: bool) -> None:
    """Delete the checkpoints of an earlier training; SettingError without `overwrite`."""
    paths = layout.checkpoints()
    if paths and not overwrite:
        raise SettingError(
            f"{str(layout.folder)!r} has a checkpoint of an earlier training, {paths[0].name}."
            " Continue that training with `onnxfit resume`, delete its checkpoints with"
            " --overwrite, or choose another folder."
        )
    for path in filter(is_checkpoint, paths):
        path.unlink()

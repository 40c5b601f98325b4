"""`onnxfit quantization-report`: the quantization error of each layer of an integer model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from onnxfit.cli import arrays, labels, options, settings
from onnxfit.cli.config import config_option
from onnxfit.graph.class_names import read_class_names
from onnxfit.load.reading import load_model
from onnxfit.tools import quantization
from onnxfit.tools.quantization.loss_meter import LossMeter
from onnxfit.tools.quantization.report import RANKINGS, check_suffix

__all__ = ["quantization_report"]


@click.command(short_help="Report the quantization error of each layer.")
@click.argument("float_model", type=options.EXISTING_FILE)
@click.argument("int_model", type=options.EXISTING_FILE)
@options.data
@options.label
@click.option(
    "-l",
    "--loss",
    multiple=True,
    metavar="[OUTPUT=]NAME",
    help=(
        "Also report the increase of this loss: cross_entropy, mean_squared_error, ... (an unknown"
        " name lists all); for a model with several outputs, OUTPUT=NAME once for each. The data"
        " needs labels."
    ),
)
@click.option(
    "--worst",
    type=click.IntRange(min=1),
    metavar="N",
    help="Print the names of the N worst layers, one per line, instead of the table.",
)
@click.option(
    "--by",
    type=click.Choice(RANKINGS),
    help="The measure for --worst. By default loss_increase, or alone_snr without a loss.",
)
@click.option(
    "-o",
    "--output",
    type=options.NEW_FILE,
    help="A file to write in addition: .svg for a picture, .txt for the table with all rows.",
)
@options.batch_size
@config_option
@options.as_json
def quantization_report(
    float_model: str,
    int_model: str,
    data: tuple[str, ...],
    label: tuple[str, ...],
    loss: tuple[str, ...],
    worst: int | None,
    by: str | None,
    output: Path | None,
    batch_size: int,
    as_json: bool,
) -> None:
    """List the layers of INT_MODEL, which was quantized from FLOAT_MODEL, the worst layer first.

    INT_MODEL has QuantizeLinear and DequantizeLinear, as onnxruntime's quantize_static writes them,
    operators of integers such as QLinearConv, or packed weights of MatMulNBits.

    \b
    onnxfit quantization-report float.onnx int8.onnx --data test.npz \\
        --loss cross_entropy
    onnxfit quantization-report float.onnx int8.onnx --data test.npz -o report.svg
    """
    if output is not None:
        check_suffix(output)
    model, chosen = load_model(float_model), settings.parse_loss(loss)
    targets = {} if chosen is None else LossMeter(model, chosen).targets
    request = arrays.DataRequest(
        arrays.inputs_of(model), [*targets], label, predicting=chosen is None
    )
    given = labels.encode(arrays.read(data, request), targets, read_class_names(model))
    report = quantization.quantization_report(
        model, int_model, given, loss=chosen, batch_size=batch_size
    )
    if output is not None:
        report.save(output)
    if as_json:
        click.echo(json.dumps(options.plain(asdict(report)), indent=2))
    elif worst is not None:
        click.echo("\n".join(report.worst(worst, by)))
    else:
        click.echo(str(report))

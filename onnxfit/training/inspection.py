"""Report whether a model can be trained, before there is a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnxfit.gradients.inspection import Inspection, inspect_model
from onnxfit.graph.model import OnnxModel
from onnxfit.load.facts import facts_of
from onnxfit.load.normalize import normalize
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.tools.editing.add_biases import count_layers_without_bias
from onnxfit.training.forms import trainable_form


def inspect(
    model_onnx: ModelSource,
    weights: Sequence[str] | str | None = None,
    *,
    outputs: Sequence[str] | str | None = None,
    gradient: str = "auto",
    fixed_inputs: Mapping[str, Any] | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> Inspection:
    """Report for every operator of a model whether and how it is differentiated.

    A second table lists the float initializers, and why each is a weight by default or is not.
    Further lines give the origin of the file, the kind of each input, the loss that suits each
    output, and what the exporter left out; `facts` has them as values.
    Nothing is run or changed. A model that cannot be trained raises no error: the Inspection gives
    the reasons and the fixes.

    - `model_onnx` is a path, bytes, or an `onnx.ModelProto`.
    - `weights` selects the weights to train, as in `Trainer`: names or patterns, "!pattern"
      excludes; None selects all weights.
    - `outputs` names the outputs that will have losses; None takes every float output.
    - `gradient` is the source of gradients, as in `Trainer`: "auto", "onnx" or "onnxruntime".
    - `fixed_inputs` maps inputs to the value that they have in all batches, as in `Trainer`.
    - `batch_axes` maps inputs and outputs to the axis of their batch, as in `Trainer`.

    ModelError: the model cannot be read or converted. UnknownNameError: the model has no such
    weight, or no such input or float output. SettingError: `weights` selects nothing, or a batch
    axis contradicts the file. InstallationError: `gradient="onnxruntime"` needs the training build.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}>
    ...     { h = MatMul(x, w) y = Relu(h) }''')
    >>> print(inspect(model))
    operator  nodes  on the path  gradient
    ────────  ─────  ───────────  ─────────────────
    MatMul        1            1  a rule of its own
    Relu          1            1  a rule of its own
    <BLANKLINE>
    initializer  shape  trains  parameter
    ───────────  ─────  ──────  ──────────────
    w            2×3    yes     looks like one
    <BLANKLINE>
    Trains: 1 weight, differentiated by the table of rules.
    Batch: axis 0 of x, y: the size 'N'.
    Made by an unknown exporter, opset 17; no licence in its metadata.
    Input x: float32[N, 2]: numbers, because its element type is float32.
    Output y: float32[N, 3]: loss mean_squared_error, because nothing shows classes.
    No Dropout, as exporters leave it out. onnxfit.add_dropout(model, rate) adds it;
      a penalty or early stopping also helps.
    """
    settings = {"fixed_inputs": fixed_inputs, "batch_axes": batch_axes}
    return inspect_with(read_model(model_onnx), settings, weights, outputs, gradient)


def inspect_with(
    file: OnnxModel,
    settings: Mapping[str, Any],
    weights: Sequence[str] | str | None = None,
    outputs: Sequence[str] | str | None = None,
    gradient: str = "auto",
) -> Inspection:
    """Return the report of `inspect` for the form of a file that a Trainer would train.

    - `file`: a model that `read_model` returned.
    - `settings`: the arguments of `Trainer` that change the form, such as `quantization`.
    - `weights`, `outputs`, `gradient`: as in `inspect`.
    """
    form = trainable_form(file, settings)
    work = normalize(form.model)
    report = inspect_model(work, weights, outputs=outputs, gradient=gradient)
    without_bias = count_layers_without_bias(work)
    facts = facts_of(form.file.proto, work, form.layout, report.weights, without_bias)
    return replace(report, batch_axes=tuple(form.layout.lines()), facts=facts)

"""Measure the accuracy that each layer of an integer model loses."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Union

import numpy as np
import onnx
from tqdm import tqdm

from onnxfit.checks import check_arguments, shortened
from onnxfit.data import Batch, DataAdapter, Source
from onnxfit.errors import DataError, ModelError, SettingError
from onnxfit.graph.index import GraphIndex
from onnxfit.graph.model import spec_of, to_ir
from onnxfit.graph.tensors import is_large
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.runtime.device import CPU
from onnxfit.runtime.session import StatelessSession
from onnxfit.step.objectives import Losses
from onnxfit.tools.quantization.layer_switches import ModelWithLayerSwitches, run_arrays
from onnxfit.tools.quantization.loss_meter import LossMeter
from onnxfit.tools.quantization.pairing import (
    PairedLayer,
    Pairing,
    QuantizedActivation,
    pair_layers,
)
from onnxfit.tools.quantization.preparation import optimize_float_model
from onnxfit.tools.quantization.qdq_form import in_qdq_form
from onnxfit.tools.quantization.report import QuantizationReport, QuantizedLayer
from onnxfit.trainable.quantized.parameters import FLOATS, Array

__all__ = ["quantization_report"]


@check_arguments
def quantization_report(
    float_model: ModelSource,
    int_model: ModelSource,
    data: Any,
    *,
    loss: Losses = None,
    batch_size: int = 32,
    verbose: Union[int, str] = "auto",
) -> QuantizationReport:
    r"""Report how much accuracy each layer of an integer model loses, to choose layers for float.

    The signal-to-noise ratio of floats $x$ and their rounded values $\hat x$ is
    $10 \log_{10} (\sum x^2 / \sum (x - \hat x)^2)$ dB, infinite where they are equal. One bit more
    adds about 6 dB. Each layer has this ratio

    - of its weight (`weight_snr`),
    - of its output in the integer model, where every layer is rounded (`output_snr`),
    - of the outputs of the model when this layer alone is rounded (`alone_snr`): its weight and
      bias, and the values that it reads and writes, as in a file of
      `quantize_static(nodes_to_quantize=[layer, its Relu])` with the same scales.

    With a loss, `alone_loss` is the loss when this layer alone is rounded, and `loss_increase` is
    that minus the loss of the float model. `clipped_weights` and `clipped_activations` are the
    shares of floats that lie more than half a step beyond the largest or smallest integer, and
    `levels` counts the different integers of the weight.

    All sums run over all rows of the data, batch by batch. The float model and its n layers alone
    are one compiled graph, which runs n + 1 times a batch. The integer model runs unchanged, or in
    QDQ form.

    - `float_model`: the model before quantization: a path, bytes or an `onnx.ModelProto`. If the
      integer model has no BatchNormalization, the float model's are folded first.
    - `int_model`: the same model in integers, as `onnxruntime.quantization.quantize_static` writes
      it in QDQ or QOperator format, or with packed weights of MatMulNBits. Layers such as
      QLinearConv and MatMulNBits are compared as Conv and MatMul of dequantized values.
    - `data`: a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or any other x that
      `Trainer.predict` accepts. A few hundred rows suffice.
    - `loss`: a loss, or a dict from output to loss, as for `Trainer`. It needs labels. None for no
      loss.
    - `batch_size`: rows of a batch.
    - `verbose`: 0 silent, 1 a progress bar, "auto" 1 in a terminal, else 0.

    ModelError: the integer model has no quantized layer, was made from another model, or computes
    NaN. DataError: the data does not fit, or lacks the labels. SettingError or UnknownNameError:
    the loss or a setting is impossible.

    Sources: the ratios are those of onnxruntime's `quantization.qdq_loss_debug`; one layer at a
    time is the analysis per layer of AIMET's `QuantAnalyzer` (Siddegowda et al., "Neural Network
    Quantization with AI Model Efficiency Toolkit", 2022, section 4).

    >>> import numpy as np, onnx.parser
    >>> text = '''<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y)
    ...     <float[2, 1] w = {1, 0.3} %s> { %s y = MatMul(x, %s) }'''
    >>> integers = ", int8[2, 1] q = {127, 38}, float s = {0.00787}"
    >>> int8 = onnx.parser.parse_model(text % (integers, "d = DequantizeLinear(q, s)", "d"))
    >>> float32 = onnx.parser.parse_model(text % ("", "", "w"))
    >>> x = np.ones((4, 2), np.float32)
    >>> report = quantization_report(float32, int8, (x,))
    >>> report.worst(1), round(report.layers[0].weight_snr, 1)
    (['y'], 59.8)
    """
    if verbose not in (0, 1, "auto"):
        raise SettingError(f"verbose must be 0, 1 or 'auto', got {shortened(verbose)}.")
    given = load_model(float_model)
    integers = in_qdq_form(load_model(int_model), given)
    floats = _folded(given, integers)
    pairing = pair_layers(floats, integers)
    meter = None if loss is None else LossMeter(floats, loss)
    with _source(floats, meter, data, batch_size) as source:
        analysis = _Analysis(floats, integers, pairing, meter)
        shows = verbose == 1 or (verbose == "auto" and sys.stderr.isatty())
        steps = source.steps
        runs = None if steps is None else steps * (len(pairing.layers) + 2)
        with tqdm(
            total=runs, desc="layers", unit="run", file=sys.stderr, disable=not shows
        ) as progress:
            for batch in source.batches(0):
                for _ in analysis.runs(batch):
                    progress.update()
    return analysis.report()


def _folded(floats: onnx.ModelProto, integers: onnx.ModelProto) -> onnx.ModelProto:
    """Return the float model, optimized if the integer model lacks nodes that optimizing folds.

    Folded are BatchNormalization, and nodes that read only constants, such as the Transpose of a
    weight.
    """
    constants = GraphIndex(floats.graph).constants
    kept = {name for node in integers.graph.node for name in node.output}
    kinds = {node.op_type for node in integers.graph.node}
    for node in floats.graph.node:
        is_constant = bool(node.input) and constants.keys() >= {*node.input} - {""}
        normalizes = node.op_type == "BatchNormalization" and node.op_type not in kinds
        if normalizes or (is_constant and kept.isdisjoint(node.output)):
            return optimize_float_model(floats)
    return floats


def _source(model: onnx.ModelProto, meter: LossMeter | None, data: Any, batch_size: int) -> Source:
    """Return the batches of the data, without labels if no loss needs them."""
    inputs = [spec_of(v) for v in to_ir(model).graph.inputs if not v.is_initializer()]
    adapter = DataAdapter(
        inputs,
        {} if meter is None else meter.targets,
        purpose="prediction" if meter is None else "evaluation",
        losses=None if meter is None else meter.losses,
    )
    elements = data if isinstance(data, tuple) else (data,)
    if not 1 <= len(elements) <= 3:
        raise SettingError(
            "data must be (x,), (x, y), (x, y, sample_weight) or a loader, got a tuple of"
            f" {len(elements)} items."
        )
    return adapter.source(*elements, batch_size=batch_size)


class _Noise:
    """Sums of the squares of values, and of their differences from rounded ones."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, x: Array, rounded: Array) -> None:
        exact = x.astype(np.float64).ravel()
        difference = exact - rounded.astype(np.float64).ravel()
        self.signal += float(exact @ exact)
        self.noise += float(difference @ difference)

    @property
    def snr(self) -> float:
        """The signal-to-noise ratio in dB."""
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


class _Analysis:
    """The sums over batches, and their report."""

    def __init__(
        self,
        floats: onnx.ModelProto,
        integers: onnx.ModelProto,
        pairing: Pairing,
        meter: LossMeter | None,
    ) -> None:
        self.layers = pairing.layers
        self.meter = meter
        self.outputs = [
            value.name
            for value in floats.graph.output
            if value.type.tensor_type.elem_type in FLOATS
        ]
        if not self.outputs:
            raise ModelError("The float model has no float output to compare.")
        self.with_switches = ModelWithLayerSwitches(floats, pairing)
        self.integers = _observed(integers, [layer.integer_output for layer in pairing.layers])
        self.rows = 0
        self.whole = _Noise()
        self.computed = [_Noise() for _ in self.layers]
        self.alone = [_Noise() for _ in self.layers]
        # clipped elements of each quantized value, and all of its elements
        self.clipped: dict[QuantizedActivation, list[int]] = {
            activation: [0, 0] for layer in self.layers for activation in layer.activations
        }
        # losses of the float model, of the integer model, and of each layer alone
        trackers = range(len(self.layers) + 2)
        self.losses = [] if meter is None else [meter.tracker() for _ in trackers]

    def runs(self, batch: Batch) -> Any:
        """Add a batch; yield after each run of a model."""
        inputs = batch.arrays()
        self.rows += batch.rows
        exact = self.with_switches.floats(inputs)
        for name in self.outputs:
            _require_finite(exact[name], "float model", name, DataError)
        self._add_loss(0, exact, batch)
        yield
        rounded = run_arrays(self.integers, inputs, self.integers.outputs)
        self._add_noise(self.whole, exact, rounded, "integer model")
        self._add_loss(1, rounded, batch)
        for layer, computed in zip(self.layers, self.computed):
            values = rounded[layer.integer_output]
            _compare(computed, exact[layer.output], values, "integer model", layer.output)
        for activation, counts in self.clipped.items():
            floats = {**inputs, **exact}[activation.used]
            counts[0] += activation.parameters[0].clipped(floats)
            counts[1] += floats.size
        yield
        for i, (layer, alone) in enumerate(zip(self.layers, self.alone)):
            outputs = self.with_switches.alone(layer, inputs)
            self._add_noise(alone, exact, outputs, f"model with {layer.name!r} in integers")
            self._add_loss(i + 2, outputs, batch)
            yield

    def report(self) -> QuantizationReport:
        if not self.rows:
            raise DataError("The data contains no batch. Pass at least one row.")
        losses = [tracker.loss for tracker in self.losses]
        if any(map(math.isnan, losses)):
            raise DataError("The loss is NaN. Either every label is masked, or the loss overflows.")
        return QuantizationReport(
            tuple(self._row(i, layer, losses) for i, layer in enumerate(self.layers)),
            rows=self.rows,
            output_snr=self.whole.snr,
            float_loss=losses[0] if losses else None,
            int_loss=losses[1] if losses else None,
        )

    def _row(self, i: int, layer: PairedLayer, losses: list[float]) -> QuantizedLayer:
        weights = [constant for constant in layer.constants.values() if constant.is_weight]
        largest = max(weights, key=lambda constant: constant.integers.size, default=None)
        noise = _Noise()
        for constant in weights:
            noise.add(constant.floats, constant.dequantized())
        clipped = [constant.parameters.clipped(constant.floats) for constant in weights]
        counts = [self.clipped[activation] for activation in layer.activations]
        parameters = layer.activations[0].parameters[0] if largest is None else largest.parameters
        return QuantizedLayer(
            name=layer.name,
            operator=layer.operator,
            type=parameters.type_name,
            weight_snr=noise.snr if weights else None,
            output_snr=self.computed[i].snr,
            alone_snr=self.alone[i].snr,
            alone_loss=losses[i + 2] if losses else None,
            loss_increase=losses[i + 2] - losses[0] if losses else None,
            clipped_weights=_share(sum(clipped), sum(c.floats.size for c in weights)),
            clipped_activations=_share(sum(c[0] for c in counts), sum(c[1] for c in counts)),
            levels=None if largest is None else int(np.unique(largest.integers).size),
        )

    def _add_noise(
        self, noise: _Noise, exact: Mapping[str, Array], rounded: Mapping[str, Array], what: str
    ) -> None:
        for name in self.outputs:
            _compare(noise, exact[name], rounded[name], what, name)

    def _add_loss(self, number: int, outputs: Mapping[str, Array], batch: Batch) -> None:
        if self.meter is not None:
            given = {name: outputs[name] for name in self.meter.reads}
            self.meter.add(self.losses[number], given, batch)


def _observed(model: onnx.ModelProto, names: list[str]) -> StatelessSession:
    """Return a session of the integer model that also returns these values."""
    if is_large(model):
        raise ModelError(
            "The integer model has more than 2 GB of tensors, the limit of one session. Use a"
            " smaller model."
        )
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    outputs = {value.name for value in copy.graph.output}
    copy.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in outputs
    )
    return StatelessSession(copy, CPU, None, "integer")


def _compare(noise: _Noise, exact: Array, rounded: Array, what: str, name: str) -> None:
    """Add values of a model to a sum. ModelError: the values cannot be compared."""
    if exact.shape != rounded.shape:
        raise ModelError(
            f"The {what} computes {name!r} with shape {list(rounded.shape)}, but the float model"
            f" with shape {list(exact.shape)}. Pass the float model that was quantized."
        )
    _require_finite(rounded, what, name)
    noise.add(exact, rounded)


def _require_finite(
    values: Array, what: str, name: str, error: type[DataError | ModelError] = ModelError
) -> None:
    """Raise an error for NaN or infinity, for which no ratio is defined."""
    if not np.isfinite(values).all():
        raise error(
            f"The {what} computes NaN or infinity in {name!r}. Look for NaN or infinity in the"
            " data, and for scales that are zero or not finite."
        )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None

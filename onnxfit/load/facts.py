"""Facts about a file that somebody else made: its origin, its inputs, and the loss of each output.

Names, shapes and the graph are the only evidence, so each fact has its reason.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxfit.graph.activations import LOG_SOFTMAX, SOFTMAX
from onnxfit.graph.probabilities import any_number_operator, decide_logits, probability_operator
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load.batch_axis import BatchLayout, ValueLayout

SAMPLE_RATES = {"sr", "fs", "samplerate", "samplingrate"}  # names of inputs, without "_"
SIGNALS = ("audio", "wave", "speech", "signal", "sound", "pcm")
STATES = {"h", "c", "hidden", "cell", "state", "states"}
# Parts of names that tell a state before a batch from the state after it.
BEFORE_OR_AFTER = (
    "cur|current|final|in|init|initial|input|last|new|next|old|out|output|past|prev|previous"
    "|present|updated"
)
CHANNELS = (1, 3, 4)  # of an image
TIMES = ("frame", "time", "seq", "length")  # parts of names of sizes that no image has
# Operators that pass token ids on to the table that they look up.
PASSING_IDS = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
# Operators that pass the numbers of a table on.
PASSING_TABLES = {"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Reshape", "Transpose"}
RECURRENT = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}
# Operators that pass a weight on to its layer.
PASSING_WEIGHTS = {*PASSING_TABLES, "Squeeze", "Unsqueeze"}
MAX_SIZE_CHARACTERS = 24  # of the name of a size
LONG_AXIS = 4000  # numbers of an axis that hardly counts anything but samples of a sound
CLASS_SCORES = ("logit", "score", "class")  # parts of names of outputs


@dataclass(frozen=True)
class InputFact:
    """An input of a file.

    - `name`, `dtype`, `shape`: as in the file; an unknown size is None.
    - `batch_axis`: the axis of the rows; None for an input without rows.
    - `kind`: "token ids", "mask", "lengths", "state", "sample rate", "setting", "image", "signal",
      "flags", "integers", "text" or "numbers".
    - `reason`: why it has this kind.
    - `below`: token ids are smaller than this number; None for other kinds.
    - `next_state`: the output that is the state after the batch; None for any other input.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None
    batch_axis: int | None
    kind: str
    reason: str
    below: int | None = None
    next_state: str | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the input has one value in all batches: a setting, or a first state of zeros."""
        if self.next_state is not None:
            return False
        return self.kind in ("sample rate", "setting") or (
            self.kind == "state" and self.batch_axis is None
        )

    def __str__(self) -> str:
        below = "" if self.below is None else f" below {self.below}"
        return f"{spec_text(self)}: {self.kind}{below}, because {self.reason}"


@dataclass(frozen=True)
class OutputFact:
    """An output of a file.

    - `name`, `dtype`, `shape`, `batch_axis`: as for an input.
    - `loss`: the name of a loss that suits it; None for a state, and for an output of integers.
    - `reason`: why.
    - `alternatives`: names of other losses that may suit it.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None
    batch_axis: int | None
    loss: str | None
    reason: str
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        loss = "no loss" if self.loss is None else f"loss {self.loss}"
        return f"{spec_text(self)}: {loss}, because {self.reason}"


@dataclass(frozen=True)
class FileFacts:
    """The origin of a file, its inputs and outputs, and what the exporter left out.

    - `producer`: name and version of the exporter.
    - `opsets`: domain -> version; the domain of ONNX itself is "".
    - `licence`: the licence in the metadata of the file; None if there is none.
    - `inputs`, `outputs`: in the order of the file.
    - `exporter`: sentences on what the exporter left out, folded or kept.
    - `last_layer`: the trained weights of the last layer.
    """

    producer: str
    opsets: dict[str, int]
    licence: str | None
    inputs: tuple[InputFact, ...]
    outputs: tuple[OutputFact, ...]
    exporter: tuple[str, ...]
    last_layer: tuple[str, ...]

    @property
    def state_outputs(self) -> dict[str, str]:
        """The argument `state_outputs` of Trainer: output -> input."""
        return {one.next_state: one.name for one in self.inputs if one.next_state is not None}

    @property
    def origin(self) -> str:
        """A sentence on exporter, opset and licence."""
        opsets = ", ".join(f"{domain or 'opset'} {v}" for domain, v in self.opsets.items())
        licence = "no licence in its metadata"
        if self.licence is not None:
            licence = f"licence in its metadata: {self.licence}"
        return f"Made by {self.producer}, {opsets}; {licence}."

    def lines(self) -> list[str]:
        """Return a sentence for each fact, with names as in the file."""
        inputs = [f"Input {one}." for one in self.inputs]
        return [self.origin, *inputs, *(f"Output {one}." for one in self.outputs), *self.exporter]

    def wrapped_lines(self) -> list[str]:
        """Return the lines for a terminal of 80 columns, in which no word is broken."""
        wrapper = textwrap.TextWrapper(
            80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        return [part for line in self.lines() for part in wrapper.wrap(line)]


def spec_text(one: InputFact | OutputFact | TensorSpec) -> str:
    """Return name, type and shape, in which long names of sizes are cut off."""
    if one.shape is None:
        return f"{one.name}: {one.dtype}[?]"
    return f"{one.name}: {one.dtype}[{', '.join(map(_size_text, one.shape))}]"


def _size_text(size: Dim) -> str:
    text = "?" if size is None else str(size)
    return text if len(text) <= MAX_SIZE_CHARACTERS else f"{text[: MAX_SIZE_CHARACTERS - 1]}…"


def facts_of(
    file: onnx.ModelProto,
    work: ir.Model,
    layout: BatchLayout,
    weights: Collection[str],
    without_bias: int,
) -> FileFacts:
    """Return the facts about a file.

    - `file`: the file, for its producer, opsets and metadata.
    - `work`: its normalized model.
    - `layout`: the batch axes of its inputs and outputs.
    - `weights`: the weights that are trained.
    - `without_bias`: the number of layers that may have had a bias of zeros.
    """
    inputs = _inputs(work.graph, layout)
    values = {value.name: value for value in work.graph.outputs}
    states = {one.next_state: one.name for one in inputs}
    outputs = [
        _output_fact(values[name], one, states.get(name), inputs)
        for name, one in layout.outputs.items()
        if name in values
    ]
    metadata = {entry.key: entry.value for entry in file.metadata_props}
    licences = [text for key, text in metadata.items() if "licen" in key.lower() and text.strip()]
    return FileFacts(
        producer=f"{file.producer_name} {file.producer_version}".strip() or "an unknown exporter",
        opsets=_opsets(file),
        licence=licences[0] if licences else None,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        exporter=tuple(_exporter(file, work.graph, without_bias)),
        last_layer=tuple(_last_layer(work.graph, weights)),
    )


def _opsets(file: onnx.ModelProto) -> dict[str, int]:
    """Return the opsets of the domains that the file uses; many exporters list others, too."""
    used = {"" if node.domain == "ai.onnx" else node.domain for node in nodes_of(file.graph)}
    listed = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in file.opset_import}
    return {domain: version for domain, version in listed.items() if domain in {"", *used}}


def _last_layer(graph: ir.Graph, weights: Collection[str]) -> list[str]:
    """Return the trained weights that the last product with a weight reads, or nodes after it."""
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    position = {node: i for i, node in enumerate(nodes)}
    places: dict[str, int] = {}
    last = -1
    for name in weights:
        value = graph.initializers.get(name)
        readers = [] if value is None else _layers_reading(value)
        if not readers:
            continue
        places[name] = max(position.get(node, -1) for node in readers)
        if value is not None and value.shape is not None and len(value.shape) >= 2:
            last = max(last, places[name])
    return [name for name, place in places.items() if place >= last >= 0]


def _layers_reading(value: ir.Value) -> list[ir.Node]:
    """Return the nodes that read a weight, after nodes that only pass it on."""
    found: list[ir.Node] = []
    waiting = [value]
    while waiting:
        for node in waiting.pop().consumers():
            if node.op_type in PASSING_WEIGHTS:
                waiting += node.outputs
            else:
                found.append(node)
    return found


# ---------------------------------------------------------------------- inputs


def _inputs(graph: ir.Graph, layout: BatchLayout) -> list[InputFact]:
    values = {value.name: value for value in graph.inputs}
    has_rate = any(_is_sample_rate(one.spec) for one in layout.inputs.values())
    free = {name: one for name, one in layout.outputs.items() if name not in layout.inputs}
    facts = []
    for name, one in layout.inputs.items():
        if name not in values:
            continue
        kind, reason, below = _kind_of_input(values[name], one, has_rate)
        next_state = None
        if kind == "state":
            next_state = next((o for o in free if _is_next(one.spec, free[o].spec)), None)
            if next_state is not None:
                free.pop(next_state)
                reason = f"the output {next_state!r} has its type, shape and name"
        spec = one.spec
        facts.append(
            InputFact(name, str(spec.dtype), spec.shape, one.axis, kind, reason, below, next_state)
        )
    return facts


def _kind_of_input(
    value: ir.Value, layout: ValueLayout, has_rate: bool
) -> tuple[str, str, int | None]:
    """Return kind, reason, and the number of rows of the table that token ids look up."""
    spec = layout.spec
    name = spec.name.lower()
    if spec.dtype.kind in "OSU":
        return "text", "its element type is string", None
    if _is_sample_rate(spec):
        return "sample rate", "its name says so", None
    if spec.shape == ():
        return "setting", "it is one number for all rows", None
    if "mask" in name:
        return "mask", "its name says so", None
    if spec.dtype.kind == "b":
        return "flags", "its element type is bool", None
    if spec.dtype.kind in "iu":
        return _integer_kind(value, spec, name)
    if _is_state(value, spec):
        return "state", "its name or its place in a recurrent layer says so", None
    reason = _signal_reason(spec, has_rate)
    if reason is not None:
        return "signal", reason, None
    channels = _channels(spec)
    if channels is not None:
        return "image", f"it has {channels} channel{'s' * (channels > 1)} and two more axes", None
    return "numbers", f"its element type is {spec.dtype}", None


def _signal_reason(spec: TensorSpec, has_rate: bool) -> str | None:
    """Return why a tensor looks like a sound; None if it does not."""
    if spec.rank not in (2, 3) or spec.shape is None:
        return None
    if has_rate:
        return "a sample rate is beside it"
    words = [spec.name, *(size for size in spec.shape if isinstance(size, str))]
    if any(sign in word.lower() for word in words for sign in (*SIGNALS, "sample")):
        return "its name or the name of a size says so"
    long = [size for size in spec.shape if isinstance(size, int) and size >= LONG_AXIS]
    return f"it has an axis of {long[0]} numbers" if long else None


def _integer_kind(value: ir.Value, spec: TensorSpec, name: str) -> tuple[str, str, int | None]:
    tables = list(_tables(value))
    if tables:
        size, reason = min(tables)
        return "token ids", reason, size
    if "len" in name and spec.rank == 1:
        return "lengths", "its name says so", None
    return "integers", f"its element type is {spec.dtype}", None


def _is_sample_rate(spec: TensorSpec) -> bool:
    is_one = spec.shape is not None and spec.rank in (0, 1) and spec.shape[:1] in ((), (1,))
    return is_one and re.sub(r"[\W_]", "", spec.name.lower()) in SAMPLE_RATES


def _tables(value: ir.Value) -> Iterator[tuple[int, str]]:
    """Yield the rows of each table that an input of integers looks up, and the reason."""
    waiting, seen = [value], {value}
    while waiting:
        current = waiting.pop()
        for node, index in current.uses():
            if node.op_type == "Gather" and index == 1 and node.inputs[0] is not None:
                shape, table = node.inputs[0].shape, _copied_tensor(node.inputs[0])
                axis = node.attributes.get_int("axis", 0)
                size = None if shape is None or axis >= len(shape) else shape[axis]
                if isinstance(size, int) and table is not None:
                    yield size, f"a Gather looks them up in {table.name!r}"
            elif node.op_type == "OneHot" and index == 0 and node.inputs[1] is not None:
                depth = ir.convenience.get_const_tensor(node.inputs[1])
                if depth is not None and depth.size == 1:
                    yield int(depth.numpy().reshape(-1)[0]), "a OneHot has this depth"
            elif node.op_type in PASSING_IDS and index == 0 and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])


def _copied_tensor(value: ir.Value) -> ir.Value | None:
    """Return the tensor of the file that a value copies; None for a computed value."""
    node = value.producer()
    while node is not None and node.op_type in PASSING_TABLES and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    is_stored = value.is_initializer() or (node is not None and node.op_type == "Constant")
    return value if is_stored else None


def _is_state(value: ir.Value, spec: TensorSpec) -> bool:
    if _stem(spec.name) in STATES or any(word in spec.name.lower() for word in ("state", "hidden")):
        return True
    return any(index in RECURRENT.get(node.op_type, ()) for node, index in value.uses())


def _stem(name: str) -> str:
    """Return a name without what tells a state before a batch from the state after it.

    >>> [_stem(name) for name in ("h0", "hn", "prev_state", "stateN", "Hidden_out")]
    ['h', 'h', 'state', 'state', 'hidden']
    """
    name = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    parts = [part for part in re.split(r"[\W_\d]+", name) if part]
    kept = [part for part in parts if not re.fullmatch(rf"n|{BEFORE_OR_AFTER}", part)]
    stem = "_".join(kept or parts)
    return stem[:-1] if re.fullmatch(r"\wn", stem) else stem


def _is_next(read: TensorSpec, written: TensorSpec) -> bool:
    """Return whether an output is the state after a batch of an input."""
    if written.dtype != read.dtype or written.shape is None or read.shape is None:
        return False
    pairs = list(zip(read.shape, written.shape))
    numbers = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
    return read.rank == written.rank and numbers and _stem(read.name) == _stem(written.name)


def _channels(spec: TensorSpec) -> int | None:
    """Return the number of channels of an image; None for a tensor that looks like no image."""
    if spec.shape is None or len(spec.shape) != 4:
        return None
    sizes = [size for size in spec.shape if isinstance(size, str)]
    if any(word in size.lower() for size in sizes for word in TIMES):
        return None
    found = [size for size in (spec.shape[1], spec.shape[3]) if size in CHANNELS]
    return int(found[0]) if len(found) == 1 and found[0] is not None else None


# ---------------------------------------------------------------------- outputs


def _output_fact(
    value: ir.Value, layout: ValueLayout, state: str | None, inputs: Sequence[InputFact]
) -> OutputFact:
    spec = layout.spec
    loss: str | None
    loss, reason = _loss(value, spec, inputs)
    if state is not None:
        loss, reason = None, f"it is the next {state!r}"
    elif spec.dtype.kind != "f":
        loss, reason = None, f"its element type is {spec.dtype}"
    others = () if loss is None else tuple(_alternatives(value, spec, loss, inputs))
    return OutputFact(spec.name, str(spec.dtype), spec.shape, layout.axis, loss, reason, others)


def _alternatives(
    value: ir.Value, spec: TensorSpec, loss: str, inputs: Sequence[InputFact]
) -> Iterator[str]:
    """Yield other losses that may suit an output."""
    reads_signs = any(one.kind in ("image", "signal") for one in inputs)
    if loss == "cross_entropy" and reads_signs and spec.rank == 3:
        yield "ctc"  # a text, whose characters have no known places
    if loss == "mean_squared_error" and any_number_operator(value) is not None:
        classes = _classes(spec)  # the numbers may be logits
        if classes is not None:
            yield "binary_cross_entropy" if classes == 1 else "cross_entropy"


def _classes(spec: TensorSpec) -> Dim:
    """Return the size of the axis that losses take for the classes; None without such an axis."""
    shape = spec.rows_first().shape or ()
    return shape[1 if len(shape) >= 4 else -1] if len(shape) > 1 else None


def _loss(value: ir.Value, spec: TensorSpec, inputs: Sequence[InputFact]) -> tuple[str, str]:
    """Return the loss that suits an output, and the reason."""
    shape = spec.rows_first().shape or ()
    classes = _classes(spec)
    operator = probability_operator(value)
    shown = decide_logits(None, value, True).reason
    if operator == SOFTMAX and classes != 1:
        return "cross_entropy", shown
    if operator is not None:
        return "binary_cross_entropy", shown
    if any_number_operator(value) == LOG_SOFTMAX:
        return "cross_entropy", shown
    ids = [one.below for one in inputs if one.kind == "token ids" and one.below is not None]
    if len(shape) == 3 and isinstance(classes, int) and classes in ids and classes > 1:
        return "causal_lm", f"it has a score for each of {classes} token ids"
    if any(word in spec.name.lower() for word in CLASS_SCORES) and len(shape) > 1:
        if classes == 1:
            return "binary_cross_entropy", "its name says that it is a score"
        return "cross_entropy", "its name says that it has scores of classes"
    return "mean_squared_error", "nothing shows classes"


# ---------------------------------------------------------------------- the exporter


def license_of(file: onnx.ModelProto) -> str | None:
    """Return the license in the metadata of a file: `model_license` of ONNX, or `license`."""
    metadata = {entry.key.lower(): entry.value for entry in file.metadata_props}
    return metadata.get("model_license") or metadata.get("license") or None


def left_out(file: onnx.ModelProto, graph: ir.Graph, without_bias: int) -> str:
    """Return what an exporter of TensorFlow and Keras left out; "" for other exporters.

    These exporters write a network for inference, and nothing in the file says so.
    """
    if not _is_of_tensorflow(file):
        return ""
    operators = {node.op_type for node in ir.traversal.RecursiveGraphIterator(graph)}
    missing = [f"no {name}" for name in ("Dropout", "BatchNormalization") if name not in operators]
    if without_bias:
        missing.append(f"{without_bias} layer{'s' * (without_bias > 1)} without a bias")
    return ", ".join(missing)


def _is_of_tensorflow(file: onnx.ModelProto) -> bool:
    return any(name in file.producer_name.lower() for name in ("tf2onnx", "keras", "tensorflow"))


def _exporter(file: onnx.ModelProto, graph: ir.Graph, without_bias: int) -> Iterator[str]:
    """Yield sentences on what the exporter folded or left out, and what that means."""
    counts = Counter(node.op_type for node in ir.traversal.RecursiveGraphIterator(graph))
    if not counts["Dropout"]:
        yield (
            "No Dropout, as exporters leave it out. onnxfit.add_dropout(model, rate) adds it; a"
            " penalty or early stopping also helps."
        )
    norms = counts["BatchNormalization"]
    if norms:
        yield (
            f"BatchNormalization: {norms} node{'s' * (norms > 1)}. Training normalizes by the batch"
            " and updates the running statistics. For small batches, use batch_norm='frozen'."
        )
    elif counts["Conv"]:
        yield (
            "No BatchNormalization: if the network had it, the exporter folded it into the Conv"
            " before it, whose weights train as they are. Use a small learning rate."
        )
    elif _is_of_tensorflow(file):
        yield (
            "No BatchNormalization: if the network had it, the exporter wrote it as a scale and a"
            " shift, which train as they are."
        )
    if without_bias and _is_of_tensorflow(file):
        yield (
            f"{without_bias} layer{'s have' if without_bias > 1 else ' has'} no bias, as the"
            " exporter drops biases of zeros. onnxfit.add_biases(model) adds them."
        )

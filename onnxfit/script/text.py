"""Write the training script of a file.

Names and texts of the file come from a stranger. In code they are written by `repr`. In comments
they are one line of printable characters.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnxfit.checks import check_arguments
from onnxfit.drawing.labels import clean
from onnxfit.drawing.tables import Table
from onnxfit.load.facts import OutputFact
from onnxfit.script.measure import Measurement, measure
from onnxfit.script.placeholders import Placeholder, literal
from onnxfit.script.plan import Plan, plan_of
from onnxfit.trainable.quantized.settings import Quantization

COLUMNS = 79
MAX_NAMES = 4  # weights of the last layer that are listed
MAX_CHARACTERS = 500  # of a sentence in a comment
SMALL_STEP = 1.0  # seconds of a step that a first training may take
# Loss -> when it suits, and its labels
OTHER_LOSSES = {
    "binary_cross_entropy": "if the output is the score of a yes; labels are then 0 or 1",
    "cross_entropy": "if the output is scores of classes; labels are then class numbers, without"
    " the axis of the classes",
    "ctc": "if the output is a text; labels are then class numbers of shape (rows, length), padded"
    " with -1",
}
UNMEASURED = (1, 2, 4, 8)  # batch sizes to choose from without measurements
EPOCHS = 3


@check_arguments
def training_script(
    path: str | os.PathLike[str],
    *,
    measured: bool = True,
    progress: Callable[[str], None] | None = None,
) -> str:
    """Return a Python script that trains an ONNX file, with comments on everything it chose.

    The script runs as it is, on random data that it marks as such. Its comments give the origin of
    the file, the reasons for inputs and losses, what trains, what the exporter left out, and what a
    training step costs. If an error names an argument that lets the file train, the script has it.

    - `path`: the file.
    - `measured`: whether training steps of three batch sizes are timed, in other processes.
    - `progress`: called with the name of each stage; None to be silent.

    OnnxfitError: the file cannot be read, or does not train with any argument that an error names.

    >>> import onnx, onnx.parser, tempfile
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}>
    ...     { h = MatMul(x, w) y = Softmax(h) }''')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onnx.save(model, f"{folder}/model.onnx")
    ...     script = training_script(f"{folder}/model.onnx", measured=False)
    >>> [line.strip() for line in script.splitlines() if "loss=" in line]
    ['loss={"y": "cross_entropy"},']
    """
    return script_of(*planned(path, measured=measured, progress=progress))


def planned(
    path: str | os.PathLike[str], *, measured: bool, progress: Callable[[str], None] | None
) -> tuple[Plan, tuple[Measurement, ...]]:
    """Return how a file is trained, and what a step costs; the arguments of `training_script`."""

    def silent(stage: str) -> None:
        pass

    report = progress or silent
    plan = plan_of(os.fspath(path), report)
    return plan, measure(plan, report) if measured else ()


def script_of(plan: Plan, measurements: Sequence[Measurement]) -> str:
    """Return the script for a plan."""
    parts = [
        _head(plan),
        _about(plan, measurements),
        _code(plan, batch_size_of(plan, measurements)),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def batch_size_of(plan: Plan, measurements: Sequence[Measurement]) -> int:
    """Return the largest batch size whose step is fast."""
    if plan.is_whole or plan.batch is not None:
        return plan.batch or 1
    fast = [m.rows for m in measurements if m.seconds is not None and m.seconds < SMALL_STEP]
    if not measurements:
        fast = [rows for rows in UNMEASURED if rows * plan.row_seconds < SMALL_STEP]
    return max(fast, default=1)


def comment(text: str, indent: str = "", hanging: str = "") -> list[str]:
    """Return a text as lines of comment, whatever it contains.

    >>> comment("a name with\\na newline")
    ['# a name with\\\\na newline']
    """
    text = clean(text)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}…"
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# {hanging}",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [f"{indent}#"]


# ---------------------------------------------------------------------- comments


def _head(plan: Plan) -> list[str]:
    name = Path(plan.path).name
    return [
        *comment(f"Train {name} with onnxfit. `onnxfit init` wrote this script; change it freely."),
        *comment("It runs as it is, on random numbers: put your data into `load_data`."),
    ]


def _about(plan: Plan, measurements: Sequence[Measurement]) -> list[str]:
    facts = plan.facts
    lines = [*_title("The file"), *comment(facts.origin)]
    for one in facts.inputs:
        lines += comment(f"Input {one}.", hanging="  ")
    for output in facts.outputs:
        lines += comment(f"Output {output}.", hanging="  ")
    for axis in plan.report.batch_axes:
        lines += comment(f"Batch: {axis}.", hanging="  ")
    lines += _fixed_batch(plan)
    lines += [*_title("What the exporter left out"), *_paragraphs(facts.exporter)]
    lines += [*_title("What trains"), *_roles(plan)]
    if plan.fixes:
        lines += _title("Without these settings, the file does not train")
        for fix in plan.fixes:
            setting = "onnxfit.to_float32" if fix.converts else _keyword_text(fix.settings)
            lines += comment(f"{setting}: {fix.message}", hanging="  ")
    if plan.remarks:
        lines += [*_title("Warnings"), *_paragraphs(plan.remarks)]
    if measurements:
        lines += _title("The cost of a training step, measured on this machine")
        lines += [line for m in measurements for line in comment(str(m), hanging="  ")]
    return lines


def _title(text: str) -> list[str]:
    return ["#", f"# ---- {text} {'-' * (COLUMNS - 8 - len(text))}"]


def _paragraphs(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in comment(text, hanging="  ")]


def _fixed_batch(plan: Plan) -> list[str]:
    if plan.is_whole:
        return comment("Each batch is passed as it is, so no batch size is chosen.")
    if plan.batch is None:
        return []
    return comment(
        f"The batch size is fixed at {plan.batch}, by the file or its states. Trainer(...,"
        " dynamic_batch=True) tries to allow any batch size.",
        hanging="  ",
    )


def _roles(plan: Plan) -> list[str]:
    """Return a table of the tensors by their role and its reason."""
    idle = frozenset(plan.report.idle)
    groups: dict[tuple[bool, str], list[int]] = {}
    for one in plan.report.initializers:
        size = 1
        for length in one.shape:
            size *= length
        reason = "no gradient path to an output" if one.name in idle else one.parameter
        groups.setdefault((one.trains, reason), []).append(size)
    rows = [
        ("trains" if trains else "frozen", reason, str(len(sizes)), f"{sum(sizes):,}")
        for (trains, reason), sizes in sorted(groups.items(), reverse=True)
    ]
    header = ("role", "reason", "tensors", "numbers")
    table = Table(header, rows, right=frozenset(header[2:]))
    lines = [f"# {line}" for line in table.lines()] if rows else []
    if plan.report.quantized:
        lines += comment(f"{len(plan.report.quantized)} integer weights stay as they are.")
    return lines


# ---------------------------------------------------------------------- code


def _code(plan: Plan, batch_size: int) -> Iterator[str]:
    yield from (
        "",
        "import numpy as np",
        "",
        "import onnxfit",
        "from onnxfit.callbacks import EarlyStopping",
        "",
        f"MODEL = {_model(plan)}",
        f"BATCH_SIZE = {batch_size}",
        f"EPOCHS = {EPOCHS}",
        "",
        "",
    )
    yield from _data_function(plan)
    yield from ("", "", f"x, y = load_data({_batch_size_text(plan)})", "")
    yield from _trainer(plan)
    yield from _fit(plan)


def _model(plan: Plan) -> str:
    path = literal(plan.path)
    return f"onnxfit.to_float32({path})" if plan.converts else path


def _batch_size_text(plan: Plan) -> str:
    return "1" if plan.is_whole else "4 * BATCH_SIZE"


def _data_function(plan: Plan) -> Iterator[str]:
    yield "def load_data(rows):"
    yield from comment(
        "REPLACE the random numbers by your data: arrays with one row for each sample, of these"
        " shapes and types.",
        "    ",
    )
    for name, size in plan.tried:
        yield from comment(
            f"The file leaves the size {name} open; {size} is one with which it runs.", "    "
        )
    yield "    rng = np.random.default_rng(0)"
    yield from _arrays("x", plan.inputs)
    yield from _arrays("y", plan.labels)
    yield "    return x, y"


def _arrays(variable: str, arrays: Sequence[Placeholder]) -> Iterator[str]:
    if not arrays:
        yield f"    {variable} = {{}}"
        return
    yield f"    {variable} = {{"
    for one in arrays:
        yield from comment(one.reason, "        ")
        yield f"        {literal(one.name)}: {one.code},"
    yield "    }"


def _trainer(plan: Plan) -> Iterator[str]:
    yield "trainer = onnxfit.Trainer("
    yield "    MODEL,"
    losses = plan.settings.get("loss")
    reasons = {one.name: one for one in plan.facts.outputs}
    for name in losses or ():
        yield from comment(f"{name}: {reasons[name].reason}", "    ", "  ")
    for name, value in sorted(plan.settings.items(), key=lambda item: item[0] != "loss"):
        if name == "fixed_inputs":
            yield from comment("REPLACE: values that an input has in all batches", "    ")
        if name == "state_outputs":
            yield from comment("each output is that input in the next batch", "    ")
        yield f"    {name}={_value(value)},"
    yield from _alternatives(plan)
    yield ")"
    yield ""


def _alternatives(plan: Plan) -> Iterator[str]:
    """Yield arguments that may suit, too, as comments."""
    yield "    # Alternatives:"
    for output in plan.facts.outputs:
        if output.name in (plan.settings.get("loss") or {}):
            yield from _other_losses(output)
    if plan.facts.last_layer and "weights" not in plan.settings:
        yield "    # the last layer only:"
        yield f"    # weights={literal(plan.facts.last_layer[:MAX_NAMES])},"
    if plan.adapters is not None:
        yield f"    # adapters={plan.adapters},  # instead of the weights"
    if plan.batch is not None and "dynamic_batch" not in plan.settings:
        yield "    # dynamic_batch=True,  # allow any batch size, if the graph permits it"
    if any(one.startswith("BatchNorm") for one in plan.facts.exporter):
        yield '    # batch_norm="frozen",  # for small batches'
    yield '    # precision="bf16",  # products of a step in half precision'
    yield '    # backend="in_place",  # less memory, but no undo of a step'
    yield "    # penalty=1e-4,  # L2, against overfitting"


def _other_losses(output: OutputFact) -> Iterator[str]:
    for loss in output.alternatives:
        yield from comment(f"{OTHER_LOSSES[loss]}:", "    ")
        yield f"    # loss={literal({output.name: loss})},"


def _fit(plan: Plan) -> Iterator[str]:
    yield "trainer.fit("
    if plan.is_whole:
        yield "    lambda: iter([(x, y)]),  # batches, each with its own sizes"
    else:
        yield "    x,"
        yield "    y," if plan.labels else "    None,"
        yield "    batch_size=BATCH_SIZE,"
        yield "    validation_split=0.25,"
        if plan.facts.state_outputs:
            yield "    shuffle=False,  # rows go on in the next batch"
    yield "    epochs=EPOCHS,"
    yield "    callbacks=["
    if not plan.is_whole:
        yield "        EarlyStopping(patience=3, restore_best_weights=True),"
    yield '        # onnxfit.callbacks.ModelCheckpoint("best.ckpt", save_best_only=True),'
    yield '        # onnxfit.callbacks.BackupAndRestore("backup.ckpt"),'
    yield "    ],"
    yield ")"
    yield "# print(trainer.summary())"
    yield 'trainer.export("trained.onnx")'


def _keyword_text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, Quantization):
        return f"onnxfit.Quantization(weights={literal(value.weights)})"
    return literal(value)

"""The summary of a trainer, as text and as HTML."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.drawing.labels import clean, count
from onnxfit.drawing.notebook import TextWithHtml, paragraph, preformatted
from onnxfit.drawing.tables import Table
from onnxfit.errors import SettingError
from onnxfit.graph.model import spec_of
from onnxfit.graph.sharing import reader_counts
from onnxfit.graph.weights import Reason, weight_reasons
from onnxfit.load.facts import left_out, spec_text
from onnxfit.losses import Function, Joint
from onnxfit.losses.base import loss_name
from onnxfit.optimizers import Groups
from onnxfit.step.objectives import Objective
from onnxfit.step.recipe import Recipe
from onnxfit.step.settings import TrainerSettings
from onnxfit.tools.editing.add_biases import count_layers_without_bias
from onnxfit.training.modules import ModuleRow, deepest, entries_of, modules_of
from onnxfit.training.training import Training

# Columns whose cells are all empty are left out.
COLUMNS = ("module", "shape", "output", "size", "trained", "parameter", "penalty")
RIGHT = frozenset({"size"})
OF_LOSS = Reason(True, "of the loss")
WIDTH = 80  # columns of the lines above the table
MAX_NAME_CHARACTERS = 36  # length of a name in a table with folded rows, if the table is narrow
MIN_NAME_CHARACTERS = 10
MAX_SIZE_CHARACTERS = 8  # length of the name of a size in the table; a longer one is "?"
MAX_ROWS = 40  # number of rows of the table with depth="auto"
LAST_ROWS = 9  # number of rows after the omitted middle of a long table without modules
# These settings have their own lines above the table, or columns in it.
SHOWN_ELSEWHERE = {
    "weights", "loss", "penalty", "optimizer", "fixed_inputs", "state_outputs", "batch_axes",
}  # fmt: skip


def summary(training: Training, depth: int | str | None = "auto") -> TextWithHtml:
    """Return inputs, outputs with their losses, the settings that differ from their defaults, and a
    table of the weights, and of buffers and masks. The column "parameter" says why a tensor is a
    weight by default, or is not: "recorded" by the exporter, or "looks like one", for example.

    - `training`: the training of a trainer.
    - `depth`: each module at this level, a number from 1, gets one row; None lists every tensor.
      "auto" folds modules, and the middle of a long list, if the table has more than 40 rows.

    If the loss of an output has `from_logits`, the summary says whether the output is taken as
    logits or as probabilities, and why. SettingError: the depth is impossible.
    """
    is_level = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 1
    if not (depth is None or depth == "auto" or is_level):
        raise SettingError(
            f"depth must be 'auto', a whole number >= 1, or None for every tensor, got {depth!r}."
        )
    texts = [*_head(training.recipe, training.settings), *_exporter_lines(training)]
    head = [line for text in texts for line in _wrapped(text)]
    table = _WeightTable(training.recipe)
    model = modules_of(table.names)
    if isinstance(depth, str):
        entries = deepest(lambda listed: len(listed) <= MAX_ROWS, model)
    else:
        entries = entries_of(model, depth)
    weights = table.of(entries, fold=depth == "auto", shorten=depth is not None)
    foot = table.totals()
    text = "\n".join([*head, "", *weights.lines(), "", *foot])
    html = preformatted("\n".join(head)) + weights.html() + preformatted("\n".join(foot))
    return TextWithHtml(text, html)


def training_html(training: Training) -> str:
    """Return the progress and the summary of a training as HTML."""
    state = training.state
    progress = (
        f"Trainer: {count(state.epoch, 'epoch')} and {count(state.global_step, 'update')} so far;"
        f" learning rate {state.learning_rate:.4g}"
    )
    return paragraph(progress) + summary(training).markup


def concise(value: object, *, hidden: Iterable[str] = (), shown: Iterable[str] = ()) -> str:
    """Return the repr of an object of settings, with only the settings that are not defaults.

    - `value`: a dataclass, a container of them, or any other object.
    - `hidden`: names of settings to leave out.
    - `shown`: names of settings that are always listed.
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {concise(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(concise, value))}]"
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return str(getattr(value, "__name__", repr(value)))
    texts = []
    for field in dataclasses.fields(value):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        entry = getattr(value, field.name)
        differs = field.name in shown or bool(entry != default)
        if field.init and field.repr and differs and field.name not in hidden:
            texts.append(f"{field.name}={concise(entry)}")
    return f"{type(value).__name__}({', '.join(texts)})"


def _head(recipe: Recipe, settings: Mapping[str, Any]) -> list[str]:
    """Return the lines above the table."""
    lines = [f"input      {spec_text(spec)}" for spec in recipe.data_inputs]
    for name, array in (settings.get("fixed_inputs") or {}).items():
        value = array.item() if array.size == 1 else f"an array of shape {array.shape}"
        lines.append(f"fixed      {name} = {value}")
    for output, name in recipe.state_outputs.items():
        lines.append(f"state      {name} = {output} of the batch before")
    moved = recipe.layout.moved_outputs
    for name, spec in recipe.outputs.items():
        layout = moved.get(name)
        lines.append(f"output     {spec_text(spec if layout is None else layout.spec)}")
        lines += [] if name not in recipe.objectives else _loss_lines(recipe.objectives[name])
    for name, objective in recipe.objectives.items():
        if isinstance(objective.loss, Joint):
            lines.append(f"loss       {name}: {_joint_text(objective.loss)}")
    for i, line in enumerate(recipe.layout.lines()):
        lines.append(f"{'' if i else 'batch':10} {line}")
    lines.append(f"optimizer  {concise(recipe.optimizer, shown=['learning_rate'])}")
    lines += _group_lines(recipe)
    changed = [
        f"{field.name}={concise(settings[field.name])}"
        for field in dataclasses.fields(TrainerSettings)
        if field.name in settings
        and field.name not in SHOWN_ELSEWHERE
        and not _is_default(settings[field.name], field.default)
    ]
    if changed:
        lines.append(f"settings   {', '.join(changed)}")
    return [clean(line) for line in lines]


def _exporter_lines(training: Training) -> list[str]:
    """Return a line on what an exporter of Keras left out; none for other exporters."""
    file, model = training.trainable.file.proto, training.recipe.model
    missing = left_out(file, model.graph, count_layers_without_bias(model))
    if not missing:
        return []
    line = (
        f"exporter   {file.producer_name} {file.producer_version}: {missing}; see"
        " onnxfit.add_dropout and onnxfit.add_biases"
    )
    return [clean(line)]


def _group_lines(recipe: Recipe) -> list[str]:
    """Return the settings of the weights in `Groups`, with the number of weights that have them."""
    if not isinstance(recipe.optimizer, Groups):
        return []
    lines = []
    for one in {id(one): one for one in recipe.optimizers.values()}.values():
        names = [name for name, other in recipe.optimizers.items() if other is one]
        rate = "the learning rate" if one.schedule is None else concise(one.schedule)
        text = concise(one.optimizer, hidden=["learning_rate"])
        lines.append(f"  {count(len(names), 'weight')}: {text} with {rate} × {one.multiplier:.4g}")
    return lines


def _is_default(value: object, default: object) -> bool:
    if isinstance(default, tuple):  # of metrics, which may be a list
        return not value
    return value is default or bool(value == default)


def _joint_text(loss: Joint) -> str:
    """Return the name of the function of a Joint, and what it reads."""
    read = {"outputs": loss.outputs, "inputs": loss.inputs, "values": loss.values}
    parts = [f"{kind} {', '.join(of_kind)}" for kind, of_kind in read.items() if of_kind]
    labels = f"; labels {_labels_text(loss)}" if loss.labels else ""
    return f"{loss_name(loss)} of {', '.join(parts)}{labels}"


def _labels_text(loss: Joint | Function) -> str:
    declared = loss.labels
    if isinstance(declared, Mapping):
        return ", ".join(f"{name}: {text}" for name, text in declared.items())
    return str(declared)


def _loss_lines(objective: Objective) -> list[str]:
    if isinstance(objective.loss, Joint):  # which may have the name of an output
        return []
    if isinstance(objective.loss, Function) and objective.loss.labels:
        text = f"{loss_name(objective.loss)}; labels {_labels_text(objective.loss)}"
        return [f"  loss     {text}"]
    if objective.decision is None:
        return [f"  loss     {concise(objective.loss)}"]
    kind = "logits" if objective.decision.logits else "probabilities"
    return [
        f"  loss     {concise(objective.loss, hidden=['from_logits'])}",
        f"           taken as {kind}: {objective.decision.reason}",
    ]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False
    )


class _WeightTable:
    """Rows of the tensors of a recipe that are weights or running statistics."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        graph = recipe.model.graph
        changing = frozenset(recipe.state)
        self.reasons = {
            **weight_reasons(recipe.model, known=changing),
            **dict.fromkeys(recipe.loss_weights, OF_LOSS),
        }
        listed = {*changing, *(name for name, r in self.reasons.items() if r.is_listed)}
        # A layer may be in the body of an If.
        nodes = ir.traversal.RecursiveGraphIterator(graph)
        self.position = {node: i for i, node in enumerate(nodes)}
        self.readers = {
            name: _layers_of(graph.initializers[name])
            for name in graph.initializers
            if name in listed
        }
        # in the order in which the model uses them, those of losses last
        of_loss = set(recipe.loss_weights)
        self.names = sorted(self.readers, key=lambda n: (n in of_loss, self._first_use(n)))
        specs = {name: spec_of(graph.initializers[name]) for name in self.names}
        self.shapes = {name: spec.shape or () for name, spec in specs.items()}
        # The sizes of an initializer are always numbers, never names.
        self.sizes = {
            name: int(np.prod([int(d or 0) for d in self.shapes[name]])) for name in self.names
        }
        self.bytes = {name: self.sizes[name] * spec.dtype.itemsize for name, spec in specs.items()}
        self.counts = reader_counts(recipe.model)

    def of(self, entries: Sequence[ModuleRow], *, fold: bool, shorten: bool) -> Table:
        """Return the table of these entries.

        `fold` leaves out the middle of a long table, `shorten` the middle of long names.
        """
        rows = [self._row(entry) for entry in entries]
        strong = {i for i, entry in enumerate(entries) if not entry.is_tensor}
        if fold and len(rows) > MAX_ROWS:
            first, last = MAX_ROWS - LAST_ROWS - 1, len(rows) - LAST_ROWS
            middle = dict.fromkeys(name for entry in entries[first:last] for name in entry.tensors)
            omitted = self._cells(tuple(middle), f"… {len(middle)} more tensors")
            rows = [*rows[:first], omitted, *rows[last:]]
            strong = {i for i in strong if i < first}
        cells = [[row.get(title, "") for title in COLUMNS] for row in rows]
        if shorten:
            limit = _name_width(cells)
            cells = [[_cut_in_the_middle(name, limit), *rest] for name, *rest in cells]
        return Table(COLUMNS, cells, right=RIGHT, strong=frozenset(strong))

    def totals(self) -> list[str]:
        """Return the numbers and bytes of all tensors, and of the trained tensors."""
        changing = {*self.recipe.weights, *self.recipe.statistics}
        parts = {
            "total": self.names,
            "trained": self.recipe.weights,
            "statistics": self.recipe.statistics,
            "frozen": [name for name in self.names if name not in changing],
        }
        return [f"{title:10} {self._total(names)}" for title, names in parts.items() if names]

    def _total(self, names: Iterable[str]) -> str:
        names = list(names)
        size = sum(self.sizes[name] for name in names)
        return f"{size:,} numbers ({_bytes_text(sum(self.bytes[name] for name in names))})"

    def _row(self, entry: ModuleRow) -> dict[str, str]:
        cells = self._cells(entry.tensors, "  " * entry.level + entry.title)
        if entry.is_tensor:
            name = entry.tensors[0]
            cells["shape"] = _shape_text(self.shapes[name])
            if self.counts[name] > 1:
                cells["trained"] += f", used {self.counts[name]}×"
        if entry.is_folded:
            cells["shape"] = f"{len(entry.tensors)} tensors"
        if not entry.is_tensor or not entry.level:
            cells["output"] = self._output(entry.tensors)
        return cells

    def _cells(self, names: Sequence[str], title: str) -> dict[str, str]:
        penalties = {
            concise(self.recipe.penalties[name]) if name in self.recipe.penalties else ""
            for name in names
            if name in self.recipe.weights
        }
        return {
            "module": title,
            "size": f"{sum(self.sizes[name] for name in names):,}",
            "trained": self._trained(names),
            "parameter": self._reason(names),
            "penalty": penalties.pop() if len(penalties) == 1 else "partly" * bool(penalties),
        }

    def _trained(self, names: Sequence[str]) -> str:
        others = [name for name in names if name not in self.recipe.statistics]
        trained = [name for name in others if name in self.recipe.weights]
        if not others:
            return "statistic"
        if not trained:
            return "frozen"
        return "yes" if len(trained) == len(others) else "partly"

    def _reason(self, names: Sequence[str]) -> str:
        """Return the reason that all tensors have, or "mixed"; running statistics have none."""
        texts = {self.reasons[n].text for n in names if n not in self.recipe.statistics}
        return texts.pop() if len(texts) == 1 else "mixed" * bool(texts)

    def _first_use(self, name: str) -> int:
        return min((self.position[node] for node in self.readers[name]), default=0)

    def _output(self, names: Sequence[str]) -> str:
        """Return the shape of the output of the last layer with these tensors."""
        nodes = [node for name in names for node in self.readers[name]]
        if not nodes:
            return ""
        value = max(nodes, key=lambda node: self.position[node]).outputs[0]
        if value.shape is None:
            return ""
        # Exporters write long formulas in the place of names of sizes.
        sizes = [d if isinstance(d, int) else d.value for d in value.shape]
        return _shape_text([None if len(str(d)) > MAX_SIZE_CHARACTERS else d for d in sizes])


def _name_width(cells: Sequence[Sequence[str]]) -> int:
    """Return the length of names with which the table fits into `WIDTH` columns, if possible."""
    columns = list(zip(COLUMNS, *cells))[1:]
    widths = [2 + max(map(len, column)) for column in columns if any(column[1:])]
    return min(MAX_NAME_CHARACTERS, max(MIN_NAME_CHARACTERS, WIDTH - sum(widths)))


def _cut_in_the_middle(name: str, limit: int) -> str:
    """Return a name without its middle if it is too long; its indentation stays."""
    if len(name) <= limit:
        return name
    text = name.lstrip(" ")
    indent = len(name) - len(text)
    shown = max(limit - indent, 5)
    return f"{' ' * indent}{text[: (shown - 1) // 2]}…{text[-(shown // 2) :]}"


def _layers_of(weight: ir.Value) -> list[ir.Node]:
    """Return the nodes that combine a weight with data, after nodes that only rearrange it."""
    found: list[ir.Node] = []
    waiting, seen = [weight], {weight}
    while waiting:
        value = waiting.pop()
        for node in value.consumers():
            others = [v for v in node.inputs if v is not None and v not in seen]
            if any(not _is_stored(v) for v in others) or not node.outputs:
                found.append(node)
            elif node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return found


def _is_stored(value: ir.Value) -> bool:
    node = value.producer()
    return value.is_initializer() or (node is not None and node.op_type == "Constant")


def _shape_text(shape: Sequence[object]) -> str:
    return "×".join("?" if size is None else str(size) for size in shape) or "scalar"


def _bytes_text(number: float) -> str:
    """Return a number of bytes in the largest unit that it fills.

    >>> _bytes_text(268), _bytes_text(44_700_000)
    ('268 B', '44.7 MB')
    """
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.4g} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"

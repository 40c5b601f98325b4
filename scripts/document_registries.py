"""Write docs/reference.md from the registries: `make docs`.

    python scripts/document_registries.py [--check]

The page has the Trainer, quantization, adapters, and every loss, metric, optimizer, schedule, penalty,
callback and data loader, with its names, its settings and their defaults, and its docstring without
the examples. With --check nothing is written; the exit status is 1 if the page is out of date.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnxfit
from onnxfit.registry import registry

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
HEAD = """\
# Reference

The Trainer, quantization and adapters, and every loss, metric, optimizer, schedule, penalty, callback and data loader of
onnxfit, with the settings and their defaults. The tables list names in quotes. A name stands for an object with default settings: `loss="mse"`
is `loss=onnxfit.losses.MeanSquaredError()`. To change a setting, pass an object: `loss=onnxfit.losses.Huber(delta=2.0)`.
Case, underscores, hyphens and a final "loss" do not matter in names: `loss="MSELoss"` is `loss="mse"`.
In the line below a heading, `…` stands for the settings of the base class, which is the first entry of
each section. `make docs` writes this page from the docstrings.
"""
TRAINER = """\
## Trainer

`onnxfit.Trainer` trains a model. Its arguments describe what is trained and how; those of `fit` describe the data and the loop.
Arguments after `*` are given by name. `help(onnxfit.Trainer)` describes the remaining methods, which serve callbacks.
"""
METHODS = (
    "fit", "evaluate", "predict", "export", "save", "load", "summary", "card", "inspect", "get_weights",
    "set_weights", "train_on_batch", "test_on_batch", "predict_on_batch", "forward", "backward",
    "apply_gradients", "save_onnx_graph",
)  # fmt: skip
QUANTIZATION = """\
## Quantization and adapters

The settings of `Trainer(model, quantization=..., adapters=...)`, and the functions that make and compare files of integers.
[The guide to quantization](quantization.md) and [that to adapters](adapters.md) show them at work.
"""
QUANTIZATION_NAMES = (
    "Quantization",
    "LoRA",
    "Distillation",
    "quantize",
    "dequantize",
    "quantization_report",
)


@dataclass(frozen=True)
class Section:
    """A part of the page: the classes of a registry.

    - `module`: the module in onnxfit, whose docstring becomes the introduction if `introduced`.
    - `base`: the base class; classes of another base belong to no section.
    - `usage`: where these objects are used.
    - `named`: users can type names of these classes.
    """

    title: str
    module: str
    base: str
    usage: str
    introduced: bool = True
    named: bool = True

    def classes(self) -> dict[str, type]:
        """Return the classes that users can choose from, by their own names, sorted."""
        module = importlib.import_module(f"onnxfit.{self.module}")
        base = getattr(module, self.base, object)
        exported = onnxfit.__all__ if self.module == "data" else module.__all__
        found = {
            kind.__name__: kind
            for kind in registry(module.__name__, base).values()
            if kind is not base and kind.__name__ in exported
        }
        return dict(sorted(found.items(), key=lambda item: item[0].lower()))

    def names(self, kind: type) -> list[str]:
        """Return the names that users can type for a class, the class's own first.

        The registry runs acronyms together, as in "gaussiannll". An alias with the same letters
        and more underscores is easier to read, and takes the place of that name.
        """
        module = importlib.import_module(f"onnxfit.{self.module}")
        known = registry(module.__name__, getattr(module, self.base))
        own, *aliases = [name for name, member in known.items() if member is kind]
        same = [name for name in (own, *aliases) if name.replace("_", "") == own.replace("_", "")]
        first = max(same, key=lambda name: name.count("_"))
        return [first, *(name for name in aliases if name != first)]

    def bases(self) -> list[type]:
        """Return the base class, those of its subclasses to which docstrings refer, and the classes
        that have no name to type.
        """
        module = importlib.import_module(f"onnxfit.{self.module}")
        base = getattr(module, self.base, None)
        if base is None or self.module == "data":
            return []
        classes = self.classes()
        text = " ".join(kind.__doc__ or "" for kind in classes.values())
        between = {
            ancestor.__name__: ancestor
            for kind in classes.values()
            for ancestor in kind.__mro__
            if issubclass(ancestor, base) and ancestor.__name__ not in (*classes, self.base)
        }
        exported = [getattr(module, name) for name in module.__all__]
        unnamed = [
            kind
            for kind in exported
            if isinstance(kind, type)
            and issubclass(kind, base)
            and vars(kind).get("named") is False
        ]
        return [base, *(kind for name, kind in between.items() if f"`{name}`" in text), *unnamed]


SECTIONS = [
    Section("Losses", "losses", "Loss",
            '`Trainer(model, loss="mse")`; a dict output -> loss for several outputs.'),
    Section("Metrics", "metrics", "Metric",
            '`Trainer(model, metrics=["accuracy", onnxfit.metrics.TopKAccuracy(k=3)])`.'),
    Section("Optimizers", "optimizers", "Optimizer",
            '`Trainer(model, optimizer="adam")`. A number is `SGD` with that learning rate.'),
    Section("Constraints", "optimizers", "Constraint",
            'A setting of every optimizer: `Adam(constraints={"head.*": MaxNorm(3.0)})`. They project'
            " a weight after each update.",
            introduced=False),
    Section("Schedules", "schedules", "Schedule",
            "The learning rate of an optimizer:"
            " `optimizer=onnxfit.optimizers.Adam(onnxfit.schedules.Cosine(0.001, decay_steps=1000))`.",
            named=False),
    Section("Penalties", "penalties", "Penalty",
            '`Trainer(model, penalty={"*.weight": "l2"})`: a dict pattern -> penalty. A penalty for'
            " all weights needs no dict, and a number is the factor of `L2`."),
    Section("Callbacks", "callbacks", "Callback",
            "`trainer.fit(x, y, callbacks=[...])`. Only the first argument can be given by position."
            " [The guide](callbacks.md) describes the loop that calls them.",
            introduced=False, named=False),
    Section("Data loaders", "data", "object",
            "`trainer.fit(loader)`. They are names of `onnxfit` itself. [The guide](data.md)"
            " describes what else `fit` accepts.",
            introduced=False, named=False),
]  # fmt: skip


# ---------------------------------------------------------------------- the page


def page() -> str:
    """Return the reference."""
    sections = (part for section in SECTIONS for part in section_lines(section))
    return "\n".join([HEAD, *trainer_lines(), *quantization_lines(), *sections]).rstrip("\n") + "\n"


def trainer_lines() -> Iterator[str]:
    """Yield the parts of the section on the Trainer, each with an empty line at its end."""
    yield TRAINER
    yield f"`Trainer({signature(onnxfit.Trainer)})`\n"
    yield from markdown(paragraphs(onnxfit.Trainer.__doc__), {})
    for name in METHODS:
        method = getattr(onnxfit.Trainer, name)
        yield f"#### Trainer.{name}\n"
        yield f"`{name}({signature(method)})`\n"
        yield from markdown(paragraphs(method.__doc__), {})


def quantization_lines() -> Iterator[str]:
    """Yield the parts of the section on integers and adapters."""
    yield QUANTIZATION
    for name in QUANTIZATION_NAMES:
        member = getattr(onnxfit, name)
        yield f"### {name}\n"
        yield f"`{name}({signature(member)})`\n"
        yield from markdown(paragraphs(member.__doc__), {})


def signature(member: Callable[..., object]) -> str:
    """Return the arguments of a class or method, with a `*` before those given by name."""
    written = []
    for parameter in inspect.signature(member).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        if parameter.name != "self":
            written.append(text(parameter))
    return ", ".join(written)


def section_lines(section: Section) -> Iterator[str]:
    """Yield the parts of a section, each with an empty line at its end."""
    module = importlib.import_module(f"onnxfit.{section.module}")
    classes = section.classes()
    anchors = {
        kind.__name__: re.sub(r"\W", "", heading(section, kind)).lower()
        for kind in (*classes.values(), *section.bases())
    }
    yield f"## {section.title}\n\n{section.usage}\n"
    if section.introduced:
        first, *rest = paragraphs(module.__doc__)
        text = first.partition(": ")[2]
        yield from markdown([text[:1].upper() + text[1:], *rest], anchors)
    yield f"| class | {'names' if section.named else 'purpose'} |\n|---|---|"
    for kind in classes.values():
        if section.named:
            told = ", ".join(f'`"{name}"`' for name in section.names(kind))
        else:
            told = inline(" ".join(paragraphs(kind.__doc__)[0].split()))
        yield f"| {link(kind.__name__, anchors)} | {told} |"
    yield ""
    for kind in section.bases():
        yield f"### {heading(section, kind)}\n"
        if arguments(kind):
            yield f"`{kind.__name__}({arguments(kind)})`\n"
        yield from markdown(paragraphs(kind.__doc__), anchors)
    for kind in classes.values():
        yield f"### {heading(section, kind)}\n"
        base = section.bases()[0] if section.bases() else object
        yield f"`{kind.__name__}({arguments(kind, base)})`\n"
        yield from markdown(paragraphs(kind.__doc__), anchors)


def heading(section: Section, kind: type) -> str:
    """Return the heading of a class, unique on the page."""
    return kind.__name__ if section.module == "data" else f"{section.module}.{kind.__name__}"


def arguments(kind: type, base: type = object) -> str:
    """Return the arguments of a class with their defaults, as they are written in a call.

    Those that `base` has, too, are an ellipsis; except for the first of all, if it can be given by
    position, and for those with another default.
    """
    parameters = list(inspect.signature(kind).parameters.values())
    shared = {} if base is object else inspect.signature(base).parameters
    own = [
        parameter
        for i, parameter in enumerate(parameters)
        if (i == 0 and parameter.kind is not parameter.KEYWORD_ONLY)
        or parameter.name not in shared
        or repr(parameter.default) != repr(shared[parameter.name].default)
    ]
    return ", ".join([*map(text, own), *["…"] * (len(own) < len(parameters))])


def text(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is written in a call."""
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    if isinstance(default, type):
        return f"{parameter.name}=np.{default.__name__}"
    if repr(default) == "<factory>":
        return f"{parameter.name}={{}}"
    return f"{parameter.name}={default!r}".replace("'", '"')


def paragraphs(docstring: str | None) -> list[str]:
    """Return the paragraphs and lists of a docstring, without examples and advice on subclasses."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(docstring or ""))
    return [block for block in blocks if not re.match(r">>>| {4}|To write |To add ", block)]


def markdown(blocks: list[str], anchors: dict[str, str]) -> Iterator[str]:
    """Yield paragraphs for GitHub: each on one line, formulas and links in its notation."""
    for block in blocks:
        pieces = re.split(r"\$\$(.*?)\$\$", block, flags=re.S)
        for i, piece in enumerate(pieces):
            if i % 2:
                yield f"```math\n{' '.join(piece.split())}\n```\n"
            elif piece.strip(" \n.,"):
                entries = re.split(r"\n(?=- )", piece.strip())
                lines = [" ".join(entry.split()) for entry in entries]
                yield "\n".join(linked(inline(line), anchors) for line in lines) + "\n"


def inline(line: str) -> str:
    """Return a line with formulas as GitHub reads them, whatever signs they contain."""
    return re.sub(r"\$([^$`]+)\$", r"$`\1`$", line)


def linked(line: str, anchors: dict[str, str]) -> str:
    """Return a line in which the names of classes of the section are links."""
    line = line.replace("as the module describes", "as the beginning of this section describes")
    return re.sub(r"(?<![$])`(\w+)`(?![$])", lambda m: link(m[1], anchors, m[0]), line)


def link(name: str, anchors: dict[str, str], otherwise: str = "") -> str:
    """Return a link to a class of the section; `otherwise` for any other name."""
    return f"[`{name}`](#{anchors[name]})" if name in anchors else otherwise


def main(check: bool) -> int:
    content = page()
    if not check:
        PAGE.write_text(content, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != content:
        print(
            f"Out of date: {PAGE.relative_to(ROOT).as_posix()}. Run `make docs`.", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
